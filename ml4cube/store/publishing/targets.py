"""Where the stores of a call will stand: places that a user gives, checked before any work."""

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
from ml4cube.store.locations import Place, ZarrFolder, is_array, place_of
from ml4cube.store.publishing.draft import work_place


def targets_of(given: Mapping[str, Any], here: bool) -> dict[str, Place]:
    """Find the places that a user has given for the stores of a call."""
    targets: dict[str, Place] = {}
    for part, path in given.items():
        if path is None and part == "val":
            continue
        store, _ = store_and_path(path)
        if store is not None and store.read_only:
            raise InvalidValueError(
                f"{part}_cube: the {type(store).__name__} is read-only; give a writable one (of "
                "Icechunk: the store of repository.writable_session(branch))"
            )
        place = _place(f"{part}_cube", place_of(f"{part}_cube", path), here)
        for other in targets.values():
            _check_apart(part, place, other)
        targets[part] = place
    return targets


def _check_apart(part: str, place: Place, other: Place) -> None:
    """Refuse the place of another part, and places that would grow into one another."""
    paths = _paths_in_common(place, other)
    if paths is None:
        return
    if paths[0] == paths[1]:
        raise InvalidValueError(
            f"{part}_cube={str(place)!r} is another part's place too; give each its own"
        )
    # the root of a store holds all others; beside each is its work folder
    first, second = [[f"{path}/".lstrip("/"), f"{work_place(path)}/".lstrip("/")] for path in paths]
    if any(a.startswith(b) or b.startswith(a) for a in first for b in second):
        raise InvalidValueError(
            f"{part}_cube={str(place)!r} and another part's place {str(other)!r}, or the folders "
            "<place>.partial in which they grow, lie one inside the other; a store holds nothing "
            "but its own files"
        )


def _paths_in_common(one: Place, other: Place) -> tuple[str, str] | None:
    """Paths of two places in the same zarr store or file system; None if they share none."""
    one, other = _beneath(one), _beneath(other)
    if isinstance(one, ZarrFolder) and isinstance(other, ZarrFolder):
        return (one.path, other.path) if one.shares_store_with(other) else None
    if isinstance(one, Path) and isinstance(other, Path):
        return os.path.realpath(one), os.path.realpath(other)
    if isinstance(one, str) and isinstance(other, str):
        (fs, path), (fs_of_other, path_of_other) = filesystem(one), filesystem(other)
        return (path, path_of_other) if fs == fs_of_other else None
    return None


def _beneath(place: Place) -> Place:
    if not isinstance(place, ZarrFolder):
        return place
    inner = place.unwrapped()
    return Path(inner) if isinstance(inner, str) and "://" not in inner else inner


def _place(argument: str, place: str | ZarrFolder, here: bool) -> Place:
    if isinstance(place, ZarrFolder):
        if (array := place.array_above()) is not None:
            raise InvalidValueError(
                f"{argument}: {place} lies inside the array {array!r}; give a path in a group"
            )
        if (group := place.v2_group_above()) is not None:
            raise InvalidValueError(
                f"{argument}: {place} lies inside the group {group!r}, which is zarr v2; samples "
                "are written as v3, which would hide what is in it: give another place"
            )
        return place
    if "://" not in place:
        return _outside_arrays(argument, _path(os.path.expanduser(place)))
    try:
        fs, root = filesystem(place)
    except (ImportError, ValueError, OSError) as error:
        raise InvalidValueError(f"{argument}={place!r} cannot be reached: {error}") from error
    if "memory" in fs.protocol and not here:
        raise InvalidValueError(
            f"{argument}={place!r} lives in this process only; write it with nproc=1"
        )
    if isinstance(fs, LocalFileSystem):
        return _outside_arrays(argument, _path(root))
    if glob.has_magic(root):
        raise InvalidValueError(
            f"{argument}={place!r} has one of '*', '?' and '[', which file systems behind URLs "
            "take for wildcards, so that other stores could be meant; choose another name"
        )
    return place.rstrip("/")


def is_in_memory(target: Place) -> bool:
    """Tell whether a place is known to this process only."""
    return isinstance(target, str) and "memory" in filesystem(target)[0].protocol


def _outside_arrays(argument: str, path: Path) -> Path:
    for above in path.parents:
        if os.path.exists(above / ".zarray") or _is_array(above / "zarr.json"):
            raise InvalidValueError(
                f"{argument}={str(path)!r} lies inside the array {str(above)!r}; give another path"
            )
    return path


def _is_array(metadata: Path) -> bool:
    try:
        return is_array(metadata.read_bytes())
    except OSError:
        return False


def _path(path: str) -> Path:
    """Where a path leads: a store replaces what a link leads to, not the link."""
    return Path(os.path.realpath(path) if os.path.islink(path) else os.path.abspath(path))
