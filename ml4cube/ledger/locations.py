"""Locations of stores: on disk, behind a URL, or in a user's zarr store; targets, checked first."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from ml4cube.core.display import one_line
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreError
from ml4cube.ledger.folders import Folder, filesystem, work_location
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


def targets_of(places: Mapping[str, Any], allow_memory: bool) -> dict[str, Location]:
    """Return the target of every part: a path, or else a URL as text, or a folder in a zarr store.

    Targets in the memory of this process are refused unless `allow_memory`.
    """
    targets: dict[str, Location] = {}
    for part, path in places.items():
        if path is None and part == "val":
            continue
        argument = f"{part}_cube"
        target = target_of(argument, path)
        if is_in_memory(target) and not allow_memory:
            raise InvalidValueError(
                f"{argument}={target!r} exists in this process only; write it with nproc=1"
            )
        for other in targets.values():
            _check_apart(argument, target, other)
        targets[part] = target
    return targets


def is_in_memory(target: Location) -> bool:
    """Return True for a URL of a file system in memory, which only this process can see."""
    system, _ = folder_of(target).system_and_path()
    return "memory" in getattr(system, "protocol", ())


def target_of(argument: str, place: Any) -> Location:
    """Return where a store can be written: a path, or else a URL, or a folder in a zarr store."""
    store, _ = store_and_path(place)
    if store is not None and store.read_only:
        raise InvalidValueError(
            f"{argument}: the {type(store).__name__} is read-only; give a writable one (for "
            "Icechunk: the store of repository.writable_session(branch))"
        )
    location = location_of(argument, place)
    try:
        system, path = folder_of(location).system_and_path()
    except (ImportError, ValueError, OSError) as error:
        raise InvalidValueError(f"{argument}={location!r} cannot be reached: {error}") from error
    if isinstance(location, str):
        if "://" not in location:
            return _absolute_path(location)
        if isinstance(system, LocalFileSystem):
            return _absolute_path(path)
        location = location.rstrip("/")
    folder_of(location).check_target(argument)
    return location


def _absolute_path(path: str) -> Path:
    """Return a path with a final link resolved: a store replaces the link's target."""
    return Path(os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path))


def _check_apart(argument: str, target: Location, other: Location) -> None:
    """Raise if two targets are equal, or one is inside the other or its work folder."""
    system, path = folder_of(target).system_and_path()
    other_system, other_path = folder_of(other).system_and_path()
    if system != other_system:
        return
    if path == other_path:
        raise InvalidValueError(
            f"{argument}={str(target)!r} is also the target of another part; give each part its own"
        )

    def folders(path: str) -> list[str]:
        # "" is the root of a zarr store, which contains all other folders
        return [f"{folder}/".lstrip("/") for folder in (path, work_location(path))]

    if any(a.startswith(b) or b.startswith(a) for a in folders(path) for b in folders(other_path)):
        raise InvalidValueError(
            f"{argument}={str(target)!r} and another part's target {str(other)!r}, or their "
            "work folders <path>.partial, are inside one another; give each part a folder of its "
            "own"
        )
