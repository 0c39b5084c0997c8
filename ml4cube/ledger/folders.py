"""A place for files, in which every file appears whole or not at all; sizes and hashes of files."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Self

if TYPE_CHECKING:
    from zarr.abc.store import Store

HOST = socket.gethostname()
HASH_ALGORITHM = "sha256"
#: Files that are written or synced at once.
FILES_AT_ONCE = 8

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
    def draft(self, call_id: str, kind: Any) -> Any:
        """Open and lock the `Draft` of a store of some `StoreKind` that will be here."""

    @abstractmethod
    def zarr_store(self) -> tuple[Store, Self, str]:
        """Return a zarr store that has this folder, the folder of its root, and the path inside."""

    @abstractmethod
    def system_and_path(self) -> tuple[Any, str]:
        """Return what file system, None for the disk, and the path in it."""

    def exists(self) -> bool:
        """Return True if there is any file."""
        return bool(self.list())

    def half_copied(self) -> set[str]:
        """Return the files that an interrupted copy of ours has put here or was to remove."""
        return set()

    def for_workers(self) -> Folder:
        """Return the folder for workers of this machine, whose files `Draft.record` syncs."""
        return self

    def check_target(self, argument: str) -> None:
        """Refuse a place where a store would not be seen, or would hide another."""

    def check_removable(self) -> None:
        """Raise StoreExistsError if files here cannot be removed."""

    def make_durable(self) -> None:
        """Remove temporary files of killed writers, and make the names of all files durable."""

    def restore(self) -> None:
        """Put back an old store that a killed run was replacing."""


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
