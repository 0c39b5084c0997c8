"""Checks of what exists at a target, and whether it may be replaced."""

from __future__ import annotations

import json
from pathlib import Path

from ml4cube.core.errors import StoreError, StoreExistsError
from ml4cube.store.folders import RemoteFolder
from ml4cube.store.format import MANIFEST, read_manifest
from ml4cube.store.locations import Location, ZarrFolder, folder_of
from ml4cube.store.publishing.draft import KEY, OURS, work_location

#: Object of a remote work folder with the files that a copy to the target removes and puts.
PUBLISHING = f"{OURS}publishing.json"


def is_taken(target: Location) -> bool:
    """Return True if anything exists at a target."""
    if isinstance(target, Path):
        return target.exists() or target.is_symlink()
    if isinstance(target, ZarrFolder):
        return bool(target.list()) and not noted_in(target)
    cut_off = folder_of(work_location(target)).size(PUBLISHING) is not None
    location = RemoteFolder(target)
    return bool(location.list()) and not (cut_off and location.size(MANIFEST) is None)


def check_free(target: Location) -> None:
    """Raise StoreExistsError if something appeared at the target during this run."""
    if is_taken(target):
        raise StoreExistsError(
            f"{target} did not exist when this run began, and does now, so it is not replaced; "
            "move it away, then run again"
        )


def check_overwritable(target: Location) -> None:
    """Raise StoreExistsError unless a sample store is at the target."""
    folder = folder_of(target)
    if isinstance(target, ZarrFolder) and not target.store.supports_deletes:
        raise StoreExistsError(
            f"{target} exists, and a {type(target.store).__name__} cannot remove files, so it is "
            "not overwritten; write to a new one"
        )
    try:
        known = read_manifest(target)
    except (StoreError, OSError, ValueError, KeyError, TypeError):
        raise StoreExistsError(
            f"{target} exists and is not a sample store of ml4cube, so it is never overwritten; "
            "move it away or choose another path"
        ) from None
    _check_ours(target, set(folder.list()) - set(known) - {MANIFEST})


def _check_ours(location: Location | RemoteFolder, foreign: set[str]) -> None:
    if foreign:
        raise StoreExistsError(
            f"{location} has {len(foreign)} files that the sampler did not write, such as "
            f"{min(foreign)!r}, so it is not overwritten; move it away first"
        )


def ours_at(location: RemoteFolder | ZarrFolder, noted: set[str]) -> set[str]:
    """Return the names at a location that may be replaced; raise if there are others."""
    there = set(location.list())
    if MANIFEST in there and not noted:
        check_overwritable(location.url if isinstance(location, RemoteFolder) else location)
        return there
    _check_ours(location, there - noted)
    return noted


def noted_in(target: ZarrFolder) -> set[str]:
    """Return the files that an interrupted run recorded as ours in a user's zarr store."""
    try:
        return set(json.loads(target.read("zarr.json"))["attributes"][KEY])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return set()
