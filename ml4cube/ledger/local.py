"""Unfinished stores on disk, published by one rename.

The work folder, ``<path>.partial/``, is described in `draft`. While a store is replaced, the old
one is in ``ml4cube-replaced/`` in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

from ml4cube.core.errors import RunError, StoreError
from ml4cube.ledger.draft import (
    OUR_PREFIX,
    Draft,
    calls_with_tasks,
    journal_name,
    store_name,
    work_location,
)
from ml4cube.ledger.folders import Files, LocalFolder, sync_path
from ml4cube.ledger.kinds import SAMPLES, StoreKind
from ml4cube.ledger.locations import Location
from ml4cube.ledger.overwriting import check_free, check_overwritable

_LOCK = f"{OUR_PREFIX}lock"


class LocalDraft(Draft):
    """An unfinished store on disk."""

    def __init__(self, target: Path, call_id: str, kind: StoreKind = SAMPLES) -> None:
        self.target: Path = target
        self.kind = kind
        path = Path(work_location(target))
        self.work_folder: LocalFolder = LocalFolder(path)
        self.store_folder: LocalFolder = LocalFolder(path / store_name(call_id))
        self.journal: LocalFolder = LocalFolder(path / journal_name(call_id))
        self.call_id = call_id
        self.finished_tasks = {}
        self._lock = _lock_and_restore(target)

    def _clear(self, keep_this_call: bool) -> None:
        if not keep_this_call:
            self.journal.clear()
            self.store_folder.clear()
        ours = self.store_folder.root, self.journal.root
        # The folder of journals holds one folder for each call.
        journals = self.journal.root.parent
        for path in (*self.work_folder.root.glob(f"{OUR_PREFIX}*"), *journals.glob("*")):
            if path not in (journals, *ours):
                # Also an old store: taking the lock has put it back unless it had been replaced.
                _remove(path)
        for path in ours:
            path.mkdir(parents=True, exist_ok=True)

    def record(self, task: int, files: Files) -> None:
        """Sync the files of a finished task, then record it."""
        self.store_folder.sync(files)
        super().record(task, files)

    def publish(self, overwrite: bool = False) -> None:
        """Rename the finished store to its path."""
        if not overwrite:
            check_free(self.target, self.kind)
        finished = self._finished()
        try:
            if overwrite and self.target.exists():
                check_overwritable(self.target, self.kind)
                self.target.rename(_replaced_path(self.target))
            finished.rename(self.target)
        except BaseException:
            _restore_replaced(self.target)
            raise
        sync_path(self.target.parent)
        _remove(_replaced_path(self.target))

    def _finished(self) -> Path:
        """Return the finished store, which is renamed to its path."""
        return self.store_folder.root

    def discard(self) -> None:
        """Remove our part of the work folder, the lock last."""
        try:
            for path in self.work_folder.root.glob(f"{OUR_PREFIX}*"):
                _remove(path)
            with contextlib.suppress(OSError):
                (self.work_folder.root / _LOCK).unlink()
                self.work_folder.root.rmdir()
        finally:
            self._release()

    def close(self) -> None:
        """Release the lock; remove a work folder without finished tasks."""
        if self._lock.closed:
            return
        if calls_with_tasks(self.target):
            self._release()
        else:
            self.discard()

    def _release(self) -> None:
        # a process forked in the meantime also has the lock open
        fcntl.flock(self._lock, fcntl.LOCK_UN)
        self._lock.close()


def _remove(path: Path) -> None:
    """Remove a file or folder of ours, but not the lock."""
    if path.is_dir():
        # Errors are ignored, because tasks of a stopped run may still write files here.
        shutil.rmtree(path, ignore_errors=True)
    elif path.name != _LOCK:
        path.unlink(missing_ok=True)


def restore_replaced(target: Location) -> None:
    """Move an old store back to its target if a run was killed while it replaced the store."""
    if isinstance(target, Path) and _is_half_replaced(target):
        # A run that holds the lock is replacing the store right now.
        with contextlib.suppress(RunError), _lock_and_restore(target):
            pass


def _lock_and_restore(target: Path) -> IO[bytes]:
    """Lock the work folder of a target, then move an old store back.

    The kernel releases the lock when this process ends.
    """
    folder = Path(work_location(target))
    folder.mkdir(parents=True, exist_ok=True)
    lock = (folder / _LOCK).open("ab")
    try:
        if not _try_lock(lock, folder / _LOCK):
            raise RunError(
                f"another run is writing {target} (it has locked {folder}); wait for it to end"
            )
        _restore_replaced(target)
    except BaseException:
        lock.close()
        raise
    return lock


def _try_lock(lock: IO[bytes], path: Path) -> bool:
    """Lock a file; return False if another run has locked it, or has removed it meanwhile."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        with contextlib.suppress(OSError):  # the user will choose another path
            path.unlink()
            path.parent.rmdir()
        raise StoreError(
            f"cannot lock {path}: {error}; choose a path on a file system with locks (flock), or "
            "mount this one with them (Lustre: -o flock)"
        ) from error
    try:
        return os.fstat(lock.fileno()).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


def _replaced_path(target: Path) -> Path:
    """Return where the old store is while it is being replaced."""
    return Path(work_location(target)) / f"{OUR_PREFIX}replaced"


def _is_half_replaced(target: Path) -> bool:
    """Return True if the old store was moved away, and the new one is not at its path yet."""
    # Without an unfinished store, the old one was moved by a run that published its own, and the
    # target has been removed since.
    unfinished = Path(work_location(target)).glob(store_name("*"))
    return not target.exists() and _replaced_path(target).exists() and any(unfinished)


def _restore_replaced(target: Path) -> None:
    if _is_half_replaced(target):
        _replaced_path(target).rename(target)
