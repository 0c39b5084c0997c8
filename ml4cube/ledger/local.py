"""Folders on disk, where an unfinished store is published by one rename.

A file is written under a temporary name, synced and renamed.

The work folder, ``<path>.partial/``, is described in `draft`. While a store is replaced, the old
one is in ``ml4cube-replaced/`` in it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ml4cube.core.errors import RunError, StoreError
from ml4cube.ledger.folders import (
    FILES_AT_ONCE,
    LOCK,
    OUR_PREFIX,
    STORE_PREFIX,
    Folder,
    Lock,
    raise_error,
    sync_path,
    work_location,
    write_file,
)

if TYPE_CHECKING:
    from zarr.storage import LocalStore


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
        # concurrently: the disk syncs several in the time of one
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
        if not self.root.is_dir():  # a netCDF file may be here
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

    def entries(self) -> set[str]:
        with contextlib.suppress(FileNotFoundError):
            return set(os.listdir(self.root))
        return set()

    def make(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    def clear(self) -> None:
        if self.root.is_dir():
            # Errors are ignored, because tasks of a stopped run may still write files here.
            shutil.rmtree(self.root, ignore_errors=True)
        else:
            self.root.unlink(missing_ok=True)

    def lock(self, target: Folder) -> LocalLock:
        lock = LocalLock(self.root, target)
        try:
            if isinstance(target, LocalFolder):
                target._restore_replaced()
        except BaseException:
            lock.release()
            raise
        return lock

    def replace(
        self, finished: Folder, old: set[str], overwrite: bool, check: Callable[[], None]
    ) -> None:
        """Rename a finished store, or file, to this path."""
        assert isinstance(finished, LocalFolder)
        try:
            if overwrite and self.root.exists():
                self.root.rename(self._replaced.root)
            finished.root.rename(self.root)
        except BaseException:
            self._restore_replaced()
            raise
        sync_path(self.root.parent)
        self._replaced.clear()

    def __str__(self) -> str:
        return str(self.root)

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
        if self._is_half_replaced():
            # A run that holds the lock is replacing the store right now.
            with contextlib.suppress(RunError):
                LocalFolder(Path(work_location(self))).lock(self).release()

    @property
    def _replaced(self) -> LocalFolder:
        """Where the old store is while it is being replaced."""
        return LocalFolder(Path(work_location(self)) / f"{OUR_PREFIX}replaced")

    def _is_half_replaced(self) -> bool:
        """Return True if the old store was moved away, and the new one is not at its path yet."""
        # Without an unfinished store, the old one was moved by a run that published its own, and
        # the target has been removed since.
        unfinished = Path(work_location(self)).glob(f"{STORE_PREFIX}*")
        return not self.root.exists() and self._replaced.root.exists() and any(unfinished)

    def _restore_replaced(self) -> None:
        if self._is_half_replaced():
            self._replaced.root.rename(self.root)


class LocalLock(Lock):
    """A locked file, which the kernel unlocks when this process ends."""

    is_held = True

    def __init__(self, folder: Path, target: Folder) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / LOCK
        self._file = self._path.open("ab")
        try:
            if not self._is_locked():
                raise RunError(
                    f"another run is writing {target} (it has locked {folder}); wait for it to end"
                )
        except BaseException:
            self._file.close()
            raise

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """True until it is released."""
        return not self._file.closed

    def _is_locked(self) -> bool:
        """Lock the file; return False if another run has locked it, or has removed it meanwhile."""
        import fcntl  # Windows has none, and can still read stores

        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            self._remove()  # the user will choose another path
            raise StoreError(
                f"cannot lock {self._path}: {error}; choose a path on a file system with locks "
                "(flock), or mount this one with them (Lustre: -o flock)"
            ) from error
        try:
            return os.fstat(self._file.fileno()).st_ino == self._path.stat().st_ino
        except FileNotFoundError:
            return False

    def release(self) -> None:
        import fcntl

        try:
            self._remove()
        finally:  # also if this is interrupted, or later runs of this process would find it locked
            # a process forked in the meantime also has the file open
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._file.close()

    def _remove(self) -> None:
        with contextlib.suppress(OSError):
            self._path.unlink()
            self._path.parent.rmdir()
