"""Locations of sample stores: on disk, behind a URL, or inside a user's zarr store."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ml4cube.core.display import one_line
from ml4cube.core.errors import InvalidTypeError, StoreError
from ml4cube.ledger.draft import work_location
from ml4cube.ledger.folders import Folder, filesystem
from ml4cube.ledger.in_zarr import ZarrFolder, wait_for
from ml4cube.ledger.local import LocalFolder
from ml4cube.ledger.remote import RemoteFolder


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


Location = Path | str | Folder
"""Where a store lies: a path on disk, a URL, or another place, such as a group of a zarr store."""


def location_of(argument: str, source: Any) -> str | Folder:
    """Return the location of a path, URL, zarr store or group, or Icechunk session.

    A zarr store that can be opened again by its path or URL has this as its location.
    """
    if isinstance(source, str | os.PathLike) and os.fspath(source):
        return full_path(source)
    if isinstance(source, Folder):
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
        wait_for(StorePath.open(store, path))  # without it, some (ZipStore) cannot be read
    except OSError as error:
        raise StoreError(f"{argument}: {store} cannot be opened: {error}") from error
    return ZarrFolder(store, path)


def _is_opened_by(url: str, fs: Any) -> bool:
    """Return True if a URL alone gives the file system, with the options of the environment."""
    try:
        again, _ = filesystem(url)
    except Exception:  # file systems raise any exception without the options that they need
        return False
    options = {**fs.storage_options, "asynchronous": None}
    return bool(options == {**again.storage_options, "asynchronous": None})


def folder_of(location: Location) -> Folder:
    """Return the folder that holds the files of a store."""
    if isinstance(location, Folder):
        return location
    text = full_path(location)
    return RemoteFolder(text) if "://" in text else LocalFolder(Path(text))


def paths_of(location: Location) -> list[str]:
    """Return the real paths or URLs that a run writes to: of the store, and of its work folder."""
    if folder_of(location).is_session:
        return []
    return [os.path.realpath(path) for path in (str(location), work_location(location))]
