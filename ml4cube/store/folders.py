"""Folders that files are written to whole: on this machine's disk, or behind a URL."""

from __future__ import annotations

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
    """Where the files of a store under way are put; picklable, and the same in every worker."""

    def write(self, path: str, *pieces: bytes) -> tuple[int, str]:
        """Write a file whole or not at all, durably; return its size and hash."""
        ...

    def read(self, path: str) -> bytes:
        """Return what is in a file, FileNotFoundError if it is not there."""
        ...

    def size(self, path: str) -> int | None:
        """Bytes of a file, None if it is not there."""
        ...

    def list(self) -> dict[str, int]:
        """Return the bytes of every file by its path inside the folder."""
        ...

    def settle(self) -> None:
        """Remove what killed writers have left, and make all names durable."""
        ...


@dataclass(frozen=True)
class LocalFolder:
    """A folder on disk."""

    # Its path. Writing makes the folders in it, never itself: what a run that ended still writes
    # must not bring back a folder that was removed.
    root: Path
    # Whether writing a file waits until it is on disk; if not, `sync` does.
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
        """Make files durable, all at once: the disk syncs several in the time of one."""
        with ThreadPoolExecutor(FILES_AT_ONCE, "ml4cube-sync") as threads:
            list(threads.map(sync_path, [self.root / path for path in paths]))

    def read(self, path: str) -> bytes:
        """Read a file."""
        return (self.root / path).read_bytes()

    def size(self, path: str) -> int | None:
        """Tell how large a file is."""
        try:
            return (self.root / path).stat().st_size
        except OSError:
            return None

    def list(self) -> dict[str, int]:
        """List all files."""
        found = {}
        for folder, _, names in os.walk(self.root, onerror=_raise, followlinks=True):
            for path in (Path(folder, name) for name in names):
                found[path.relative_to(self.root).as_posix()] = path.stat().st_size
        return found

    def settle(self) -> None:
        """Remove what writers that were killed in mid-file have left; make names durable."""
        for stray in self.root.rglob("*.tmp"):
            if stray.is_file():  # a variable may have such a name, and its folder
                stray.unlink()
        for folder, _, _ in os.walk(self.root):
            sync_path(Path(folder))

    def clear(self) -> None:
        """Remove the folder and all that is in it."""
        if self.root.exists():
            shutil.rmtree(self.root)

    def __str__(self) -> str:
        """Its path."""
        return str(self.root)


@dataclass(frozen=True)
class RemoteFolder:
    """A prefix of an object store or another file system that fsspec knows."""

    # Credentials and endpoints are those that fsspec finds by itself, in every process (for s3: the
    # environment or the AWS configuration files).

    # Such as ``"s3://bucket/train.zarr"``, without the wildcards of fsspec.
    url: str

    def write(self, path: str, *pieces: bytes) -> tuple[int, str]:
        """Put an object, which appears whole or not at all."""
        fs, root = filesystem(self.url)
        data = b"".join(pieces)
        fs.pipe_file(f"{root}/{path}", data)
        return len(data), digest(data)

    def create(self, path: str, data: bytes) -> bool:
        """Put an object unless there is one of that name."""
        fs, root = filesystem(self.url)
        try:
            fs.pipe_file(f"{root}/{path}", data, mode="create")
        except FileExistsError:
            return False
        return True

    def read(self, path: str) -> bytes:
        """Get an object."""
        fs, root = filesystem(self.url)
        fs.invalidate_cache()
        found: bytes = fs.cat_file(f"{root}/{path}")
        return found

    def size(self, path: str) -> int | None:
        """Tell how large an object is."""
        fs, root = filesystem(self.url)
        try:
            return int(fs.info(f"{root}/{path}")["size"])
        except FileNotFoundError:
            return None

    def list(self) -> dict[str, int]:
        """List all objects."""
        fs, root = filesystem(self.url)
        fs.invalidate_cache()
        found = fs.find(root, detail=True)
        return {name[len(root) + 1 :]: int(info["size"]) for name, info in found.items()}

    def take(self, other: RemoteFolder, paths: Sequence[str]) -> None:
        """Copy objects of another folder of the same file system, without fetching them."""
        fs, root = filesystem(self.url)
        source = filesystem(other.url)[1]
        fs.copy(
            [f"{source}/{path}" for path in paths],
            [f"{root}/{path}" for path in paths],
            on_error="raise",
        )

    def remove(self, path: str) -> None:
        """Remove an object, if it is there."""
        fs, root = filesystem(self.url)
        try:
            fs.rm_file(f"{root}/{path}")
        except FileNotFoundError:
            return

    def settle(self) -> None:
        """Do nothing: an object is there, whole and durable, once it was put."""

    def clear(self) -> None:
        """Remove all objects."""
        fs, root = filesystem(self.url)
        fs.invalidate_cache()
        # not `fs.rm(names)`, which takes some of their characters for wildcards
        with ThreadPoolExecutor(FILES_AT_ONCE, "ml4cube-remove") as threads:
            list(threads.map(fs.rm_file, fs.find(root)))
        if fs.exists(root) and fs.isdir(root):  # file systems that know folders
            fs.rm(root, recursive=True)

    def __str__(self) -> str:
        """Its URL."""
        return self.url


def _raise(error: OSError) -> None:
    raise error


@functools.lru_cache(maxsize=32)
def _filesystem(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(url)
    return fs, root.rstrip("/")


def filesystem(path: str | os.PathLike[str]) -> tuple[Any, str]:
    """Find the file system of a path or URL."""
    return _filesystem(os.fspath(path))


def digest(*pieces: bytes) -> str:
    """Hash some bytes."""
    found = hashlib.new(HASH)
    for piece in pieces:
        found.update(piece)
    return found.hexdigest()


def write_file(path: Path, *pieces: bytes, sync: bool = True) -> tuple[int, str]:
    """Write a file whole or not at all, synced to disk."""
    # one name per writer: a task that runs twice at once (a worker thought lost) stays harmless
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
    """Make a file, or the names in a folder, durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
