"""Unfinished stores on disk, published by one rename.

The work folder holds the files in ``store-<call>/``, the call in ``call.json``, finished tasks in
``journal.jsonl`` and a lock. While a store is replaced, the old one is in ``replaced/``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import shutil
from pathlib import Path
from typing import IO

from ml4cube.core.errors import RunError, StoreError, StoreExistsError
from ml4cube.store.folders import Files, LocalFolder, sync_path, write_file
from ml4cube.store.locations import Location
from ml4cube.store.publishing.draft import (
    KEY,
    OTHER_CALL,
    Draft,
    call_of,
    journal_entry,
    store_name,
    work_location,
)
from ml4cube.store.publishing.overwriting import check_free, check_overwritable

logger = logging.getLogger(__name__)

# Content of the lock file, which marks a work folder as ours, so it is removed last.
_LOCK_MARK = b"work folder of an ml4cube sample store\n"


class LocalDraft(Draft):
    """An unfinished store on disk."""

    def __init__(self, target: Path, call_id: str) -> None:
        self.target: Path = target
        self.folder = Path(work_location(target))
        self.root: LocalFolder = LocalFolder(self.folder / store_name(call_id))
        self.done = {}
        self._call_id = call_id
        with contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(_lock_folder(target))
            self._journal = (self.folder / "journal.jsonl").open("ab")
            _put_back(target)
            undo.pop_all()

    def begin(self, resume: bool = True) -> None:
        """Read the journal, or start over."""
        # a store that is still aside has been replaced
        shutil.rmtree(_aside(self.target), ignore_errors=True)
        found = call_of(LocalFolder(self.folder))
        ours = found == self._call_id
        if resume and found is not None and not ours:
            logger.warning(OTHER_CALL, self.folder)
        # without an unfinished store, the last one was published
        if not (resume and ours and self.root.root.exists()):
            self._start_over()
        self._read_journal()

    def _start_over(self) -> None:
        (self.folder / "call.json").unlink(missing_ok=True)
        self._journal.truncate(0)
        self._remove_stores()
        self.root.clear()
        self.root.root.mkdir()
        write_file(self.folder / "call.json", json.dumps({KEY: self._call_id}).encode())

    def _remove_stores(self) -> None:
        """Remove the stores of all calls, except files that tasks of stopped runs still write."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)

    def _read_journal(self) -> None:
        """Accept every complete line whose files exist with their sizes."""
        path = self.folder / "journal.jsonl"
        lines = path.read_bytes().splitlines(keepends=True)
        whole = [line for line in lines if line.endswith(b"\n")]
        for number, line in enumerate(whole, 1):
            task, files = journal_entry(line, f"{path}, line {number}")
            if all(self.root.size(name) == size for name, (size, _) in files.items()):
                self.done[task] = files
        # the next line must not be appended to one that a crash left incomplete
        self._journal.truncate(sum(map(len, whole)))

    def record(self, task: int, files: Files) -> None:
        """Sync the files of a finished task, then record it durably in the journal."""
        self.root.sync(files)
        self.done[task] = files
        self._journal.write((json.dumps({"task": task, "files": files}) + "\n").encode())
        self._journal.flush()
        os.fsync(self._journal.fileno())

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
        """Remove the work folder, the lock last, because it marks the folder as ours."""
        try:
            _put_back(self.target)
            with contextlib.suppress(OSError):
                # first, because a call without a store counts as published
                (self.folder / "call.json").unlink(missing_ok=True)
                self._remove_stores()
                for path in sorted(self.folder.iterdir(), key=lambda path: path.name == "lock"):
                    path.unlink()
                self.folder.rmdir()
        finally:
            self._release()

    def close(self) -> None:
        """Release the lock; remove a work folder without finished tasks."""
        # The kernel also releases the lock if this process dies.
        if self._lock.closed:
            return
        if os.fstat(self._journal.fileno()).st_size:
            self._release()
        else:
            self.discard()

    def _release(self) -> None:
        # closing retries a line that did not fit on the disk; reading ignores it
        with contextlib.suppress(OSError):
            self._journal.close()
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
    path = folder / "lock"
    _refuse_foreign(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as undo:
        lock = undo.enter_context(path.open("ab"))
        if not _takes(lock, path):
            raise RunError(
                f"another run is writing {target} (it has locked {folder}); wait for it to end"
            )
        if not os.fstat(lock.fileno()).st_size:
            os.write(lock.fileno(), _LOCK_MARK)
            os.fsync(lock.fileno())
        undo.pop_all()
    return lock


def _takes(lock: IO[bytes], path: Path) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # the user will choose another path, so remove them now
        if not os.fstat(lock.fileno()).st_size:
            with contextlib.suppress(OSError):
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


def _refuse_foreign(folder: Path) -> None:
    if not folder.exists():
        return
    lock = folder / "lock"
    # a run that was killed while locking leaves only an empty lock file
    bare = folder.is_dir() and all(path == lock for path in folder.iterdir())
    mark = lock.read_bytes() if lock.is_file() else b""
    if mark != _LOCK_MARK and not (bare and not mark):
        raise StoreExistsError(
            f"{folder} is needed as work folder, but has other content; move it away"
        )


def _aside(target: Path) -> Path:
    """Return the path of the old store while it is being replaced."""
    return Path(work_location(target)) / "replaced"


def _moved_aside(target: Path) -> bool:
    """Return True if the old store was moved aside, and the new one is not at its path yet."""
    folder = Path(work_location(target))
    if target.exists() or not _aside(target).exists():
        return False
    call = call_of(LocalFolder(folder))
    return call is not None and (folder / store_name(call)).exists()


def _put_back(target: Path) -> None:
    if _moved_aside(target):
        _aside(target).rename(target)
