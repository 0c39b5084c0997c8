"""Bytes of a zarr array's files: on local disk, or from any store that zarr knows."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ml4cube.cube.chunks.codecs import Bytes

# Requests of one reader at a time. Zarr itself sends ten.
_AT_A_TIME = 64


class Part(NamedTuple):
    """Bytes of a file; the last ones if `start` is negative, and to its end if `stop` is None."""

    key: str
    start: int = 0
    stop: int | None = None

    @property
    def is_whole(self) -> bool:
        """True if these are all bytes."""
        return self.start == 0 and self.stop is None


class Files(ABC):
    """Reads parts of the files of an array; picklable."""

    #: Bytes between two parts that are read with them, since a request costs as much.
    gap: int = 0

    @abstractmethod
    def read(self, parts: Sequence[Part]) -> list[Bytes | None]:
        """Read parts of files; None for a file that is absent."""

    def read_into(self, part: Part, take: Callable[[int], Bytes]) -> Bytes | None:
        """Read a part of a file, on disk into the array that `take` returns for so many bytes."""
        return self.read([part])[0]

    @abstractmethod
    def version(self, key: str) -> object:
        """Return what changes if a file is replaced, as far as that costs no request."""

    @abstractmethod
    def describe(self, key: str) -> str:
        """Describe a file for an error message."""


@dataclass(frozen=True)
class LocalFiles(Files):
    """Files in a folder of this machine."""

    folder: str

    def read(self, parts: Sequence[Part]) -> list[Bytes | None]:
        """Read parts of files."""
        return [self._read(part) for part in parts]

    def read_into(self, part: Part, take: Callable[[int], Bytes]) -> Bytes | None:
        """Read a part of a file into an array, whose pages the system need not clear again."""
        if part.stop is None:
            return self._read(part)
        try:
            with open(self.describe(part.key), "rb", buffering=0) as file:
                data = take(part.stop - part.start)
                return data[: os.preadv(file.fileno(), [data.data], part.start)]
        except FileNotFoundError:
            return None

    def _read(self, part: Part) -> Bytes | None:
        try:
            with open(self.describe(part.key), "rb") as file:
                if part.is_whole:
                    return np.frombuffer(file.read(), np.uint8)
                end = os.fstat(file.fileno()).st_size
                start = part.start
                if start < 0:
                    start = max(end + start, 0)
                if part.stop is not None:
                    end = part.stop
                return np.frombuffer(os.pread(file.fileno(), end - start, start), np.uint8)
        except FileNotFoundError:
            # such as on a machine of a cluster that does not see the disk: not cells to be filled
            if not os.path.isdir(self.folder):
                raise FileNotFoundError(f"there is no folder {self.folder}") from None
            return None

    def version(self, key: str) -> object:
        """Return identity, time of change and size of a file."""
        try:
            status = os.stat(self.describe(key))
        except FileNotFoundError:
            return None
        return status.st_ino, status.st_mtime_ns, status.st_size

    def describe(self, key: str) -> str:
        """Describe a file for an error message."""
        return f"{self.folder}/{key}"


@dataclass(frozen=True)
class StoreFiles(Files):
    """Files of an array at `path` in a zarr store, such as one behind a URL."""

    store: Any
    path: str
    gap: int = 2**18

    @classmethod
    def of(cls, store: Any, path: str) -> StoreFiles:
        """Return the files of a store, one of s3fs with more than its ten connections."""
        from zarr.storage import FsspecStore

        if type(store) is FsspecStore and type(store.fs).__module__.startswith("s3fs."):
            fs, allowed = _with_connections(store.fs), store.allowed_exceptions
            store = FsspecStore(fs, read_only=True, path=store.path, allowed_exceptions=allowed)
        return cls(store, path)

    def read(self, parts: Sequence[Part]) -> list[Bytes | None]:
        """Read parts of files, many at a time."""
        from zarr.core.sync import sync

        return sync(self._read_all(parts))

    async def _read_all(self, parts: Sequence[Part]) -> list[Bytes | None]:
        free = asyncio.Semaphore(_AT_A_TIME)
        return await asyncio.gather(*(self._read(part, free) for part in parts))

    async def _read(self, part: Part, free: asyncio.Semaphore) -> Bytes | None:
        from zarr.abc.store import ByteRequest, RangeByteRequest, SuffixByteRequest
        from zarr.core.buffer import default_buffer_prototype

        request: ByteRequest | None = None
        if part.stop is not None:
            request = RangeByteRequest(part.start, part.stop)
        elif part.start < 0:
            request = SuffixByteRequest(-part.start)
        async with free:
            data = await self.store.get(
                self.describe(part.key), default_buffer_prototype(), request
            )
        if data is None:
            return None
        cells: Bytes = data.as_numpy_array().view(np.uint8)
        return cells

    def version(self, key: str) -> object:
        """Return nothing: what a store knows of an object is a request away."""
        return None

    def describe(self, key: str) -> str:
        """Return the key of a file in the store."""
        return f"{self.path}/{key}".lstrip("/")


def _with_connections(fs: Any) -> Any:
    """Return a file system of s3fs with a connection for each request, where its options tell all.

    One that was changed after it was made is returned as it is.
    """
    make, options = type(fs), fs.storage_options
    again = make(*fs.storage_args, **{**options, "skip_instance_cache": True})
    if _settings(again) != _settings(fs):
        return fs
    config = {"max_pool_connections": _AT_A_TIME, **(options.get("config_kwargs") or {})}
    return make(*fs.storage_args, **{**options, "config_kwargs": config})


def _settings(fs: Any) -> dict[str, Any]:
    """Return the public attributes of a file system that are plain values and set."""
    plain = (str, int, float, dict, list, tuple)
    public = {name: value for name, value in vars(fs).items() if not name.startswith("_")}
    return {name: value for name, value in public.items() if isinstance(value, plain)}
