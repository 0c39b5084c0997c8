"""Targets of the stores of a call, checked before any work."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fsspec.implementations.local import LocalFileSystem

from ml4cube.core.errors import InvalidValueError
from ml4cube.cube.opening import store_and_path
from ml4cube.store.folders import filesystem
from ml4cube.store.locations import Location, ZarrFolder, is_array, location_of
from ml4cube.store.publishing.draft import work_location


def targets_of(given: Mapping[str, Any], here: bool) -> dict[str, Location]:
    """Return the target of every part."""
    targets: dict[str, Location] = {}
    for part, path in given.items():
        if path is None and part == "val":
            continue
        store, _ = store_and_path(path)
        if store is not None and store.read_only:
            raise InvalidValueError(
                f"{part}_cube: the {type(store).__name__} is read-only; give a writable one (for "
                "Icechunk: the store of repository.writable_session(branch))"
            )
        location = _location(f"{part}_cube", location_of(f"{part}_cube", path), here)
        for other in targets.values():
            _check_apart(part, location, other)
        targets[part] = location
    return targets


def _check_apart(part: str, location: Location, other: Location) -> None:
    """Raise if two targets are equal, or one is inside the other or its work folder."""
    paths = _paths_in_common(location, other)
    if paths is None:
        return
    if paths[0] == paths[1]:
        raise InvalidValueError(
            f"{part}_cube={str(location)!r} is also the target of another part; give each part its "
            "own"
        )
    # the root of a zarr store contains all others; each target has its work folder next to it
    first, second = [
        [f"{path}/".lstrip("/"), f"{work_location(path)}/".lstrip("/")] for path in paths
    ]
    if any(a.startswith(b) or b.startswith(a) for a in first for b in second):
        raise InvalidValueError(
            f"{part}_cube={str(location)!r} and another part's target {str(other)!r}, or their "
            "work folders <path>.partial, are inside one another; give each part a folder of its "
            "own"
        )


def _paths_in_common(one: Location, other: Location) -> tuple[str, str] | None:
    """Return the paths of two targets in the same zarr store or file system, else None."""
    one, other = _beneath(one), _beneath(other)
    if isinstance(one, ZarrFolder) and isinstance(other, ZarrFolder):
        return (one.path, other.path) if one.shares_store_with(other) else None
    if isinstance(one, Path) and isinstance(other, Path):
        return os.path.realpath(one), os.path.realpath(other)
    if isinstance(one, str) and isinstance(other, str):
        (fs, path), (fs_of_other, path_of_other) = filesystem(one), filesystem(other)
        return (path, path_of_other) if fs == fs_of_other else None
    return None


def _beneath(location: Location) -> Location:
    if not isinstance(location, ZarrFolder):
        return location
    inner = location.unwrapped()
    return Path(inner) if isinstance(inner, str) and "://" not in inner else inner


def _location(argument: str, location: str | ZarrFolder, here: bool) -> Location:
    if isinstance(location, ZarrFolder):
        if (array := location.array_above()) is not None:
            raise InvalidValueError(
                f"{argument}: {location} is inside the array {array!r}; give a path in a group"
            )
        if (group := location.v2_group_above()) is not None:
            raise InvalidValueError(
                f"{argument}: {location} is inside the group {group!r} of zarr v2, which samples "
                "in zarr v3 would hide; give another path"
            )
        return location
    if "://" not in location:
        return _outside_arrays(argument, _path(os.path.expanduser(location)))
    try:
        fs, root = filesystem(location)
    except (ImportError, ValueError, OSError) as error:
        raise InvalidValueError(f"{argument}={location!r} cannot be reached: {error}") from error
    if "memory" in fs.protocol and not here:
        raise InvalidValueError(
            f"{argument}={location!r} exists in this process only; write it with nproc=1"
        )
    if isinstance(fs, LocalFileSystem):
        return _outside_arrays(argument, _path(root))
    if glob.has_magic(root):
        raise InvalidValueError(
            f"{argument}={location!r} has one of '*', '?' and '[', which file systems of URLs read "
            "as wildcards; choose another name"
        )
    return location.rstrip("/")


def is_in_memory(target: Location) -> bool:
    """Return True if only this process can see a target."""
    return isinstance(target, str) and "memory" in filesystem(target)[0].protocol


def _outside_arrays(argument: str, path: Path) -> Path:
    for above in path.parents:
        if os.path.exists(above / ".zarray") or _is_array(above / "zarr.json"):
            raise InvalidValueError(
                f"{argument}={str(path)!r} is inside the array {str(above)!r}; give another path"
            )
    return path


def _is_array(metadata: Path) -> bool:
    try:
        return is_array(metadata.read_bytes())
    except OSError:
        return False


def _path(path: str) -> Path:
    """Return a path with a final link resolved: a store replaces the link's target."""
    return Path(os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path))
