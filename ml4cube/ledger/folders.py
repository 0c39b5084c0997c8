"""Folders in which every file appears whole or not at all: on disk, or behind a URL.

On disk, a file is written under a temporary name, synced and renamed. Behind a URL, putting an
object is atomic already.
"""

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

HASH_ALGORITHM = "sha256"
#: Files that are written or synced at once.
FILES_AT_ONCE = 8

Files = dict[str, tuple[int, str]]
"""Size and hash of files by their path inside a folder, with ``/``."""


class Folder(Protocol):
    """Files by their path: on disk, behind a URL, or in a group of a zarr store (`ZarrFolder`)."""

    def write(self, path: str, *pieces: bytes) -> tuple[int, str]:
        """Write a file whole or not at all, durably; return its size and hash."""

    def read(self, path: str) -> bytes:
        """Return the content of a file; raise FileNotFoundError if it does not exist."""

    def size(self, path: str) -> int | None:
        """Return the size of a file in bytes, or None if it does not exist."""

    def list(self) -> dict[str, int]:
        """Return the size of every file by its path inside the folder."""

    def make_durable(self) -> None:
        """Remove temporary files of killed writers, and make the names of all files durable."""


@dataclass(frozen=True)
class LocalFolder:
    """A folder on disk."""

    # Writing makes folders inside `root`, but never `root` itself: late writes of an ended run must
    # not restore a removed folder.
    root: Path
    sync_each_file: bool = True

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


@dataclass(frozen=True)
class RemoteFolder:
    """A prefix of an object store, or of another file system of fsspec."""

    # Without wildcards. fsspec finds credentials and endpoints in every process (for s3: in the
    # environment or the AWS configuration files).
    url: str

    def write(self, path: str, *pieces: bytes) -> tuple[int, str]:
        fs, root = filesystem(self.url)
        data = b"".join(pieces)
        fs.pipe_file(f"{root}/{path}", data)
        return size_and_hash(data)

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
        content: bytes = fs.cat_file(f"{root}/{path}")
        return content

    def size(self, path: str) -> int | None:
        fs, root = filesystem(self.url)
        try:
            return int(fs.info(f"{root}/{path}")["size"])
        except FileNotFoundError:
            return None

    def list(self) -> dict[str, int]:
        fs, root = filesystem(self.url)
        fs.invalidate_cache()
        objects = fs.find(root, detail=True)
        return {name[len(root) + 1 :]: int(info["size"]) for name, info in objects.items()}

    def copy_from(self, other: RemoteFolder, paths: Sequence[str]) -> None:
        """Copy objects from another folder of the same file system, on the server."""
        fs, root = filesystem(self.url)
        _, other_root = filesystem(other.url)
        fs.copy(
            [f"{other_root}/{path}" for path in paths],
            [f"{root}/{path}" for path in paths],
            on_error="raise",
        )

    def remove(self, path: str) -> None:
        """Remove an object if it exists."""
        fs, root = filesystem(self.url)
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(f"{root}/{path}")

    def make_durable(self) -> None:
        """Do nothing: objects are durable once they are put."""

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
    # one name per writer, so that a task may run twice at once (a worker believed lost)
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.writelines(pieces)
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return sum(map(len, pieces)), digest(*pieces)


def sync_path(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
