"""Folders on disk, where an unfinished store is published by one rename.

A file is written under a temporary name, synced and renamed.

The work folder, ``<path>.partial/``, is described in `draft`. While a store is replaced, the old
one is in ``ml4cube-replaced/`` in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ml4cube.core.errors import RunError, StoreError
from ml4cube.ledger.draft import (
    OUR_PREFIX,
    Draft,
    StoreKind,
    calls_with_tasks,
    journal_name,
    store_name,
    work_location,
)
from ml4cube.ledger.folders import FILES_AT_ONCE, Files, Folder, raise_error, sync_path, write_file
from ml4cube.ledger.overwriting import check_free, check_overwritable

if TYPE_CHECKING:
    from zarr.storage import LocalStore

_LOCK = f"{OUR_PREFIX}lock"


@dataclass(frozen=True)
class LocalFolder(Folder):
    """A folder on disk."""

    # Writing makes folders inside `root`, but never `root` itself: late writes of an ended run must
    # not restore a removed folder.
    root: Path
    sync_each_file: bool = True

    errors = OSError

    def write(self, path: str, *pieces: bytes) -> tuple[int, str]:
        file = self.root / path
        try:
            return write_file(file, *pieces, sync=self.sync_each_file)
        except FileNotFoundError:  # its folder is missing
            for parent in reversed(Path(path).parents[:-1]):
                (self.root / parent).mkdir(exist_ok=True)
            return write_file(file, *pieces, sync=self.sync_each_file)

    def sync(self, paths: Iterable[str]) -> None:
        """Make files durable, concurrently: the disk syncs several in the time of one."""
        with ThreadPoolExecutor(FILES_AT_ONCE, "ml4cube-sync") as threads:
            list(threads.map(sync_path, [self.root / path for path in paths]))

    def read(self, path: str) -> bytes:
        return (self.root / path).read_bytes()

    def size(self, path: str) -> int | None:
        try:
            return (self.root / path).stat().st_size
        except OSError:
            return None

    def list(self) -> dict[str, int]:
        sizes: dict[str, int] = {}
        if not self.root.exists():
            return sizes
        for folder, _, names in os.walk(self.root, onerror=raise_error, followlinks=True):
            for path in (Path(folder, name) for name in names):
                # temporary files of tasks that still run may vanish
                with contextlib.suppress(FileNotFoundError):
                    sizes[path.relative_to(self.root).as_posix()] = path.stat().st_size
        return sizes

    def make_durable(self) -> None:
        for stray in self.root.rglob("*.tmp"):
            if stray.is_file():  # the folder of a variable may have such a name
                stray.unlink()
        for folder, _, _ in os.walk(self.root):
            sync_path(Path(folder))

    def clear(self) -> None:
        """Remove the folder and its content."""
        if self.root.exists():
            shutil.rmtree(self.root)

    def __str__(self) -> str:
        return str(self.root)

    def draft(self, call_id: str, kind: StoreKind) -> LocalDraft:
        return LocalDraft(self.root, call_id, kind)

    def zarr_store(self) -> tuple[LocalStore, LocalFolder, str]:
        from zarr.storage import LocalStore

        return LocalStore(self.root), self, ""

    def system_and_path(self) -> tuple[None, str]:
        return None, os.path.realpath(self.root)

    def exists(self) -> bool:
        return self.root.exists() or self.root.is_symlink()

    def for_workers(self) -> LocalFolder:
        return replace(self, sync_each_file=False)

    def restore(self) -> None:
        if _is_half_replaced(self.root):
            # A run that holds the lock is replacing the store right now.
            with contextlib.suppress(RunError), _lock_and_restore(self.root):
                pass


class LocalDraft(Draft):
    """An unfinished store on disk."""

    def __init__(self, target: Path, call_id: str, kind: StoreKind) -> None:
        self.target: LocalFolder = LocalFolder(target)
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
        path = self.target.root
        if not overwrite:
            check_free(self.target, self.kind)
        finished = self._finished()
        try:
            if overwrite and path.exists():
                check_overwritable(self.target, self.kind)
                path.rename(_replaced_path(path))
            finished.rename(path)
        except BaseException:
            _restore_replaced(path)
            raise
        sync_path(path.parent)
        _remove(_replaced_path(path))

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
        if calls_with_tasks(self.work_folder):
            self._release()
        else:
            self.discard()

    def _release(self) -> None:
        import fcntl

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
    import fcntl  # Windows has none, and can still read stores

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
