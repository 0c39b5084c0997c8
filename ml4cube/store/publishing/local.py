"""Unfinished stores on disk, published by one rename.

While a store is replaced, the old one is in ``ml4cube-replaced/`` in the work folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ml4cube.core.errors import RunError, StoreError
from ml4cube.store.folders import Files, LocalFolder, sync_path
from ml4cube.store.locations import Location
from ml4cube.store.publishing.draft import (
    OURS,
    Draft,
    calls_with_tasks,
    journal_name,
    store_name,
    work_location,
)
from ml4cube.store.publishing.overwriting import check_free, check_overwritable

_LOCK = f"{OURS}lock"


class LocalDraft(Draft):
    """An unfinished store on disk."""

    def __init__(self, target: Path, call_id: str) -> None:
        self.target: Path = target
        folder = Path(work_location(target))
        self.folder: LocalFolder = LocalFolder(folder)
        self.root: LocalFolder = LocalFolder(folder / store_name(call_id))
        self.journal: LocalFolder = LocalFolder(folder / journal_name(call_id))
        self.done = {}
        self.call_id = call_id
        with contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(_lock_folder(target))
            _put_back(target)
            undo.pop_all()

    def begin(self, resume: bool = True) -> None:
        """Read the finished tasks, or start over."""
        # a store that is still aside has been replaced
        shutil.rmtree(_aside(self.target), ignore_errors=True)
        super().begin(resume)

    def _clear(self, keep: bool) -> None:
        journals = self.journal.root.parent
        if not keep:
            self.journal.clear()
            self.root.clear()
        # tasks of stopped runs may still write some files
        kept = (journals, self.root.root, self.journal.root)
        for path in (*self.folder.root.glob(f"{OURS}*"), *journals.glob("*")):
            if path.is_dir() and path not in kept:
                shutil.rmtree(path, ignore_errors=True)
        # the store first, because a journal without one means that it is published
        for folder in (self.root.root, self.journal.root):
            folder.mkdir(parents=True, exist_ok=True)

    def _sizes(self) -> Callable[[str], int | None]:
        # not listed at once: tasks of stopped runs may still write
        return self.root.size

    def record(self, task: int, files: Files) -> None:
        """Sync the files of a finished task, then record it."""
        self.root.sync(files)
        super().record(task, files)

    def publish(self, overwrite: bool = False) -> None:
        """Rename the finished store to its path."""
        if not overwrite:
            check_free(self.target)
        elif self.target.exists():
            check_overwritable(self.target)
            self.target.rename(_aside(self.target))
        try:
            self.root.root.rename(self.target)
        except BaseException:
            _put_back(self.target)
            raise
        sync_path(self.target.parent)
        shutil.rmtree(_aside(self.target), ignore_errors=True)

    def discard(self) -> None:
        """Remove our part of the work folder, the lock last."""
        try:
            _put_back(self.target)
            # the journal first, because one without a store means that it is published
            for path in sorted(self.folder.root.glob(f"{OURS}*")):
                if path.is_dir():
                    shutil.rmtree(path, ignore_errors=True)
            with contextlib.suppress(OSError):
                (self.folder.root / _LOCK).unlink()
                self.folder.root.rmdir()
        finally:
            self._release()

    def close(self) -> None:
        """Release the lock; remove a work folder without finished tasks."""
        # The kernel also releases the lock if this process dies.
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


def put_back(target: Location) -> None:
    """Restore a store that a killed run had moved aside to replace it."""
    if isinstance(target, Path) and _moved_aside(target):
        # a run that holds the lock is replacing the store right now
        with contextlib.suppress(RunError), _lock_folder(target):
            _put_back(target)


def _lock_folder(target: Path) -> IO[bytes]:
    """Lock the work folder of a target; the kernel releases it when this process ends."""
    folder = Path(work_location(target))
    path = folder / _LOCK
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        lock = undo.enter_context(path.open("ab"))
        if not _takes(lock, path):
            raise RunError(
                f"another run is writing {target} (it has locked {folder}); wait for it to end"
            )
        undo.pop_all()
    return lock


def _takes(lock: IO[bytes], path: Path) -> bool:
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
    except FileNotFoundError:  # published and removed between opening and locking
        return False


def _aside(target: Path) -> Path:
    """Return the path of the old store while it is being replaced."""
    return Path(work_location(target)) / f"{OURS}replaced"


def _moved_aside(target: Path) -> bool:
    """Return True if the old store was moved aside, and the new one is not at its path yet."""
    unfinished = Path(work_location(target)).glob(store_name("*"))
    return not target.exists() and _aside(target).exists() and any(unfinished)


def _put_back(target: Path) -> None:
    if _moved_aside(target):
        _aside(target).rename(target)
