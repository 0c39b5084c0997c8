"""Folders in which every file appears whole or not at all: on disk, or behind a URL."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

HASH = "sha256"
#: Files that are written or synced at once.
FILES_AT_ONCE = 8

Files = dict[str, tuple[int, str]]
"""Size and hash of files by their path inside a folder, with ``/``."""


class Folder(Protocol):
    """The folder of a store that is being written."""

    def write(self, path: str, *pieces: bytes) -> tuple[int, str]:
        """Write a file whole or not at all, durably; return its size and hash."""

    def read(self, path: str) -> bytes:
        """Return the content of a file; raise FileNotFoundError if it does not exist."""

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""

    def list(self) -> dict[str, int]:
        """Return the size of every file by its path inside the folder."""

    def settle(self) -> None:
        """Remove temporary files of killed writers, and make all names durable."""


@dataclass(frozen=True)
class LocalFolder:
    """A folder on disk."""

    # Its path. Writing makes folders in it, but never the folder itself: late writes of an ended
    # run must not restore a removed folder.
    root: Path
    # Whether writing syncs a file to disk; otherwise `sync` does.
    waits: bool = True

    def write(self, path: str, *pieces: bytes) -> tuple[int, str]:
        """Write a file whole or not at all, synced to disk if `waits`."""
        file = self.root / path
        try:
            return write_file(file, *pieces, sync=self.waits)
        except FileNotFoundError:
            for inside in reversed(Path(path).parents[:-1]):
                (self.root / inside).mkdir(exist_ok=True)
            return write_file(file, *pieces, sync=self.waits)

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
        found: dict[str, int] = {}
        if not self.root.exists():
            return found
        for folder, _, names in os.walk(self.root, onerror=raise_error, followlinks=True):
            for path in (Path(folder, name) for name in names):
                found[path.relative_to(self.root).as_posix()] = path.stat().st_size
        return found

    def settle(self) -> None:
        """Remove temporary files of killed writers, and make all names durable."""
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


@dataclass(frozen=True)
class RemoteFolder:
    """A prefix of an object store, or of another file system of fsspec."""

    # Such as ``"s3://bucket/train.zarr"``, without wildcards. fsspec finds credentials and
    # endpoints in every process (for s3: in the environment or the AWS configuration files).
    url: str

    def write(self, path: str, *pieces: bytes) -> tuple[int, str]:
        """Put an object, which appears whole or not at all."""
        fs, root = filesystem(self.url)
        data = b"".join(pieces)
        fs.pipe_file(f"{root}/{path}", data)
        return len(data), digest(data)

    def create(self, path: str, data: bytes) -> bool:
        """Put an object unless it exists; return whether it was put."""
        fs, root = filesystem(self.url)
        try:
            fs.pipe_file(f"{root}/{path}", data, mode="create")
        except FileExistsError:
            return False
        return True

    def read(self, path: str) -> bytes:
        fs, root = filesystem(self.url)
        fs.invalidate_cache()
        found: bytes = fs.cat_file(f"{root}/{path}")
        return found

    def size(self, path: str) -> int | None:
        fs, root = filesystem(self.url)
        try:
            return int(fs.info(f"{root}/{path}")["size"])
        except FileNotFoundError:
            return None

    def list(self) -> dict[str, int]:
        fs, root = filesystem(self.url)
        fs.invalidate_cache()
        found = fs.find(root, detail=True)
        return {name[len(root) + 1 :]: int(info["size"]) for name, info in found.items()}

    def take(self, other: RemoteFolder, paths: Sequence[str]) -> None:
        """Copy objects from another folder of the same file system, on the server."""
        fs, root = filesystem(self.url)
        source = filesystem(other.url)[1]
        fs.copy(
            [f"{source}/{path}" for path in paths],
            [f"{root}/{path}" for path in paths],
            on_error="raise",
        )

    def remove(self, path: str) -> None:
        """Remove an object if it exists."""
        fs, root = filesystem(self.url)
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(f"{root}/{path}")

    def settle(self) -> None:
        """Do nothing: objects are whole and durable once they are put."""

    def clear(self) -> None:
        """Remove all objects."""
        fs, root = filesystem(self.url)
        fs.invalidate_cache()
        # not `fs.rm(names)`, which reads some of their characters as wildcards
        with ThreadPoolExecutor(FILES_AT_ONCE, "ml4cube-remove") as threads:
            list(threads.map(fs.rm_file, fs.find(root)))
        if fs.exists(root) and fs.isdir(root):  # file systems with folders
            fs.rm(root, recursive=True)

    def __str__(self) -> str:
        return self.url


def raise_error(error: OSError) -> None:
    raise error


@functools.lru_cache(maxsize=32)
def _filesystem(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(url)
    return fs, root.rstrip("/")


def filesystem(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """Return the file system of a path or URL, and the path in it."""
    return _filesystem(os.fspath(path))


def digest(*pieces: bytes) -> str:
    found = hashlib.new(HASH)
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def write_file(path: Path, *pieces: bytes, sync: bool = True) -> tuple[int, str]:
    """Write a file whole or not at all."""
    # one name per writer, so that a task may run twice at once (a worker believed lost)
    aside = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with aside.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
    return sum(map(len, pieces)), digest(*pieces)


def sync_path(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
