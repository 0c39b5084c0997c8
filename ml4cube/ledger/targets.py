"""Targets of the stores of a call, checked before any work."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from ml4cube.core.errors import InvalidValueError
from ml4cube.ledger.draft import work_location
from ml4cube.ledger.folders import filesystem
from ml4cube.ledger.locations import Location, ZarrFolder, location_of, store_and_path


def targets_of(given: Mapping[str, Any], allow_memory: bool) -> dict[str, Location]:
    """Return the target of every part: a path, or else a URL as text, or a folder in a zarr store.

    Targets in the memory of this process are refused unless `allow_memory`.
    """
    targets: dict[str, Location] = {}
    for part, path in given.items():
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
    return isinstance(target, str) and "memory" in filesystem(target)[0].protocol


def target_of(argument: str, given: Any) -> Location:
    """Return where a store can be written: a path, or else a URL, or a folder in a zarr store."""
    store, _ = store_and_path(given)
    if store is not None and store.read_only:
        raise InvalidValueError(
            f"{argument}: the {type(store).__name__} is read-only; give a writable one (for "
            "Icechunk: the store of repository.writable_session(branch))"
        )
    location = location_of(argument, given)
    if isinstance(location, ZarrFolder):
        _check_groups_above(argument, location)
        return location
    if "://" not in location:
        return _absolute_path(location)
    try:
        fs, root = filesystem(location)
    except (ImportError, ValueError, OSError) as error:
        raise InvalidValueError(f"{argument}={location!r} cannot be reached: {error}") from error
    if isinstance(fs, LocalFileSystem):
        return _absolute_path(root)
    if glob.has_magic(root):
        raise InvalidValueError(
            f"{argument}={location!r} has one of '*', '?' and '[', which file systems of URLs read "
            "as wildcards; choose another name"
        )
    return location.rstrip("/")


def _absolute_path(path: str) -> Path:
    """Return a path with a final link resolved: a store replaces the link's target."""
    return Path(os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path))


def _check_groups_above(argument: str, location: ZarrFolder) -> None:
    """Raise if a target is inside a group of zarr v2.

    All groups above a target are written in zarr v3, and would hide one of zarr v2.
    """
    for group in location.groups_from_root()[:-1]:
        with contextlib.suppress(KeyError):  # Icechunk refuses names of zarr v2
            if group.size("zarr.json") is None and group.size(".zgroup") is not None:
                raise InvalidValueError(
                    f"{argument}={str(location)!r} is inside the group {str(group)!r} of zarr v2, "
                    "which samples in zarr v3 would hide; give another path"
                )


def _check_apart(argument: str, target: Location, other: Location) -> None:
    """Raise if two targets are equal, or one is inside the other or its work folder."""
    (system, path), (other_system, other_path) = _system_and_path(target), _system_and_path(other)
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


def _system_and_path(target: Location) -> tuple[Any, str]:
    """Return the zarr store or file system of a target, None for a disk, and the path in it."""
    if isinstance(target, ZarrFolder):
        # read-only views of a store in memory are other objects with the same name
        name = str(target.store)
        return name if name.startswith("memory://") else target.store, target.path
    if isinstance(target, str):
        return filesystem(target)
    return None, os.path.realpath(target)
