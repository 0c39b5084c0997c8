"""A place for files, in which every file appears whole or not at all; sizes and hashes of files."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Self

if TYPE_CHECKING:
    from zarr.abc.store import Store

HOST = socket.gethostname()
HASH_ALGORITHM = "sha256"
#: Files that are written or synced at once.
FILES_AT_ONCE = 8

COPIED_AT_ONCE = 256
#: The file without which there is no store, of any kind; it is put last.
MARKER = "zarr.json"
#: Names in a work folder that begin so are ours: unfinished stores and journals, with the call's
#: id, the lock, and the list of files that a copy to the target removes and puts.
OUR_PREFIX = "ml4cube-"
STORE_PREFIX, JOURNAL_PREFIX = f"{OUR_PREFIX}store-", f"{OUR_PREFIX}journal-"
LOCK, COPY_RECORD = f"{OUR_PREFIX}lock", f"{OUR_PREFIX}publishing.json"

Files = dict[str, tuple[int, str]]
"""Size and hash of files by their path inside a folder, with ``/``."""


class Folder(ABC):
    """A place for the files of a store; its text is the location that users give."""

    #: True if nobody reads it before the user commits it: a stopped run leaves nothing to resume,
    #: and one process writes.
    is_session: ClassVar[bool] = False
    #: All errors that its file system raises.
    errors: ClassVar[type[Exception]] = Exception

    @abstractmethod
    def write(self, path: str, *pieces: bytes) -> tuple[int, str]:
        """Write a file whole or not at all, durably; return its size and hash."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """Return the content of a file; raise FileNotFoundError if it does not exist."""

    @abstractmethod
    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""

    @abstractmethod
    def list(self) -> dict[str, int]:
        """Return the size of every file by its path inside the folder."""

    @abstractmethod
    def zarr_store(self) -> tuple[Store, Self, str]:
        """Return a zarr store that has this folder, the folder of its root, and the path inside."""

    @abstractmethod
    def system_and_path(self) -> tuple[Any, str]:
        """Return what file system, None for the disk, and the path in it."""

    def exists(self) -> bool:
        """Return True if there is any file."""
        return bool(self.list())

    def entries(self) -> set[str]:
        """Return the names of files and folders directly here."""
        return {name.partition("/")[0] for name in self.list()}

    def make(self) -> None:
        """Make the folder, where files can only be written to one that exists."""

    def remove(self, path: str) -> None:
        """Remove a file if it exists; places that replace stores otherwise need not."""
        raise NotImplementedError

    def clear(self) -> None:
        """Remove a work folder, which no session has, or the file that is here instead."""
        raise NotImplementedError

    def lock(self, target: Folder) -> Lock:
        """Lock this work folder of a target; no session has one."""
        raise NotImplementedError

    def replace(
        self, finished: Folder, old: set[str], overwrite: bool, check: Callable[[], None]
    ) -> None:
        """Put a finished store here, in place of `old` files; `check` raises if the lock is lost.

        Files are copied, the marker last: without it, there is no store. They are recorded first,
        so that a later run knows by this which files of an interrupted copy are ours.
        """
        new = finished.list().keys()
        self.record_copy(sorted(old | new))
        steps = [*self.removals(old)]
        # metadata of arrays before their chunks
        names = sorted(new - {MARKER}, key=lambda name: MARKER not in name)
        starts = range(0, len(names), COPIED_AT_ONCE)
        for batch in [*(names[start : start + COPIED_AT_ONCE] for start in starts), [MARKER]]:
            steps.append(functools.partial(self.copy_from, finished, batch))
        for step in steps:
            # a run that was suspended must not write into the store of a run that took over
            check()
            step()

    def removals(self, old: set[str]) -> Sequence[Callable[[], None]]:
        """Return the steps that remove an old store, the marker first."""
        return [functools.partial(self.remove, name) for name in (MARKER, *sorted(old))]

    def copy_from(self, other: Folder, paths: Sequence[str]) -> None:
        """Copy files from another folder."""
        for path in paths:
            self.write(path, other.read(path))

    def record_copy(self, files: Sequence[str]) -> None:
        """Record which files a copy removes and puts."""

    def half_copied(self) -> set[str]:
        """Return the files that an interrupted copy of ours has put here or was to remove."""
        return set()

    def for_workers(self) -> Folder:
        """Return the folder for workers of this machine, whose files `sync` makes durable."""
        return self

    def sync(self, paths: Iterable[str]) -> None:
        """Make files durable that workers of this machine have written."""

    def check_target(self, argument: str) -> None:
        """Refuse a place where a store would not be seen, or would hide another."""

    def check_removable(self) -> None:
        """Raise StoreExistsError if files here cannot be removed."""

    def make_durable(self) -> None:
        """Remove temporary files of killed writers, and make the names of all files durable."""

    def restore(self) -> None:
        """Put back an old store that a killed run was replacing."""


class Lock(ABC):
    """The lock of a work folder."""

    #: True until it is released.
    is_open: bool
    #: False if another run has taken over.
    is_held: bool

    def check(self) -> None:
        """Raise RunError if another run has taken over."""

    @abstractmethod
    def release(self) -> None:
        """Release the lock; remove a work folder that is empty."""


def work_location(target: object) -> str:
    """Return the work folder of a target."""
    return f"{target}.partial"


def group_json(attributes: Mapping[str, Any], **more: Any) -> bytes:
    """Return the ``zarr.json`` of a group."""
    return json_bytes({"zarr_format": 3, "node_type": "group", "attributes": attributes, **more})


def json_bytes(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()


def raise_error(error: OSError) -> None:
    """Raise an error that `os.walk` would ignore."""
    raise error


@functools.lru_cache(maxsize=32)
def filesystem(url: str) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path in it."""
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(url)
    return fs, root.rstrip("/")


def digest(*pieces: bytes) -> str:
    """Return the hash of bytes given in pieces, as hexadecimal digits."""
    hasher = hashlib.new(HASH_ALGORITHM)
    for piece in pieces:
        hasher.update(piece)
    return hasher.hexdigest()


def size_and_hash(content: bytes) -> tuple[int, str]:
    """Return the size and hash of the content of a file."""
    return len(content), digest(content)


def write_file(path: Path, *pieces: bytes, sync: bool = True) -> tuple[int, str]:
    """Write a file whole or not at all; return its size and hash."""
    with whole_file(path, sync=sync) as file:
        file.writelines(pieces)
    return sum(map(len, pieces)), digest(*pieces)


@contextmanager
def whole_file(path: Path, *, sync: bool = True) -> Iterator[BinaryIO]:
    """Open a file to write, which appears at its path when the body ends without an error."""
    temporary = temporary_path(path)
    try:
        with temporary.open("w+b") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """Return where a file is written before it is renamed; another name for every writer."""
    # a task may run twice at once (a worker believed lost); host and process tell who has ended
    return path.with_name(f".{path.name}.{uuid.uuid4().hex}.{HOST}-{os.getpid()}.tmp")


def sync_path(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
