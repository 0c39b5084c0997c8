"""Targets of the stores of a call, checked before any work."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from ml4cube.core.errors import InvalidValueError
from ml4cube.ledger.draft import work_location
from ml4cube.ledger.locations import Location, folder_of, location_of, store_and_path


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
