"""Locations of sample stores: on disk, behind a URL, or inside a user's zarr store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ml4cube.core.display import one_line
from ml4cube.core.errors import InvalidTypeError, StoreError
from ml4cube.ledger.folders import Folder, LocalFolder, RemoteFolder, filesystem, size_and_hash


@dataclass(frozen=True)
class ZarrFolder:
    """A group of a zarr store that is not a folder of files: an Icechunk session, or memory."""

    store: Any
    # Path of the group inside it; empty for its root.
    path: str = ""

    def write(self, path: str, *pieces: bytes) -> tuple[int, str]:
        from zarr.buffer.cpu import Buffer

        data = b"".join(pieces)
        _wait_for(self.store.set(self._key(path), Buffer.from_bytes(data)))
        return size_and_hash(data)

    def read(self, path: str) -> bytes:
        from zarr.buffer import default_buffer_prototype

        found = _wait_for(self.store.get(self._key(path), default_buffer_prototype()))
        if found is None:
            raise FileNotFoundError(f"{self} has no {path}")
        content: bytes = found.to_bytes()
        return content

    def size(self, path: str) -> int | None:
        if not _wait_for(self.store.exists(self._key(path))):
            return None
        return int(_wait_for(self.store.getsize(self._key(path))))

    def list(self) -> dict[str, int]:
        prefix = self._key("")

        async def sizes() -> dict[str, int]:
            group_exists = not self.path or await self.store.exists(self._key("zarr.json"))
            # Icechunk refuses to list below a missing group, other stores may have files there
            listed = self.store.list_prefix(prefix) if group_exists else self.store.list()
            keys = [key async for key in listed if key.startswith(prefix)]
            return {k.removeprefix(prefix): int(await self.store.getsize(k)) for k in keys}

        found: dict[str, int] = _wait_for(sizes())
        return found

    def make_durable(self) -> None:
        """Do nothing: an Icechunk session is durable once the user commits it."""

    def remove(self, path: str) -> None:
        """Remove an array or a group, with its content."""
        _wait_for(self.store.delete_dir(self._key(path)))

    def groups_from_root(self) -> Sequence[ZarrFolder]:
        """Return the groups from the root down to this one."""
        parts = self.path.split("/") if self.path else []
        depths = range(len(parts) + 1)
        return [ZarrFolder(self.store, "/".join(parts[:depth])) for depth in depths]

    def _key(self, path: str) -> str:
        return f"{self.path}/{path}" if self.path else path

    def __str__(self) -> str:
        name = type(self.store).__name__
        return f"{name} at {self.path!r}" if self.path else name


def full_path(path: str | os.PathLike[str]) -> str:
    """Return a path as an absolute one, with ``~`` for the home folder; a URL as it is."""
    text = os.fspath(path)
    return text if "://" in text else os.path.abspath(os.path.expanduser(text))


def store_and_path(source: Any) -> tuple[Any, str]:
    """Return the zarr store of a group, session or store, or None, and the path inside it."""
    import zarr
    from zarr.abc.store import Store
    from zarr.storage import StorePath

    if isinstance(source, zarr.Group | StorePath):
        return source.store, source.path
    # an Icechunk session is recognized by its store, without importing icechunk
    store = source if isinstance(source, Store) else getattr(source, "store", None)
    return (store, "") if isinstance(store, Store) else (None, "")


Location = Path | str | ZarrFolder
"""Where a store lies: a path on disk, a URL, or a group of a zarr store."""


def location_of(argument: str, source: Any) -> str | ZarrFolder:
    """Return the location of a path, URL, zarr store or group, or Icechunk session.

    A zarr store that can be opened again by its path or URL has this as its location.
    """
    if isinstance(source, str | os.PathLike) and os.fspath(source):
        return full_path(source)
    if isinstance(source, ZarrFolder):
        return source
    store, path = store_and_path(source)
    if store is None:
        raise InvalidTypeError(
            f"{argument} must be a path, a URL, a zarr store or group, or an Icechunk session, got "
            f"{one_line(source)}"
        )
    from zarr.storage import FsspecStore, LocalStore, StorePath

    if isinstance(store, LocalStore):
        return str(store.root / path)
    if isinstance(store, FsspecStore):
        fs = getattr(store.fs, "sync_fs", store.fs)  # zarr wraps those that are not asynchronous
        url = str(fs.unstrip_protocol("/".join(filter(None, [store.path, path]))))
        if _is_opened_by(url, fs):
            return url
    try:
        _wait_for(StorePath.open(store, path))  # without it, some (ZipStore) cannot be read
    except OSError as error:
        raise StoreError(f"{argument}: {store} cannot be opened: {error}") from error
    return ZarrFolder(store, path)


def _is_opened_by(url: str, fs: Any) -> bool:
    """Return True if a URL alone gives the file system, with the options of the environment."""
    try:
        again, _ = filesystem(url)
    except Exception:  # file systems raise any exception without the options that they need
        return False
    options, of_url = ({**one.storage_options, "asynchronous": None} for one in (fs, again))
    return bool(options == of_url)


def folder_of(location: Location) -> Folder:
    """Return the folder that holds the files of a store."""
    if isinstance(location, ZarrFolder):
        return location
    if isinstance(location, str) and "://" in location:
        return RemoteFolder(location)
    return LocalFolder(Path(full_path(location)))


def _wait_for(coroutine: Any) -> Any:
    """Wait for a coroutine of a zarr store, also inside a running event loop."""
    from zarr.core.sync import sync

    return sync(coroutine)
