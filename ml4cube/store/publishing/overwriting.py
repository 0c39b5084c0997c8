"""What stands where a sample store will stand, and whether it may be replaced."""

from __future__ import annotations

import json
from pathlib import Path

from ml4cube.core.errors import StoreError, StoreExistsError
from ml4cube.store.folders import RemoteFolder
from ml4cube.store.format import MANIFEST, read_manifest
from ml4cube.store.locations import Place, ZarrFolder, folder_of
from ml4cube.store.publishing.draft import KEY, work_place

#: Object of a remote work folder that names what is removed and put as a store is copied to its
#: place.
PUBLISHING = "publishing.json"


def is_taken(target: Place) -> bool:
    """Tell whether anything stands at a place."""
    if isinstance(target, Path):
        return target.exists() or target.is_symlink()
    if isinstance(target, ZarrFolder):
        return bool(target.list()) and not noted_in(target)
    cut_off = folder_of(work_place(target)).size(PUBLISHING) is not None
    place = RemoteFolder(target)
    return bool(place.list()) and not (cut_off and place.size(MANIFEST) is None)


def check_free(target: Place) -> None:
    """Refuse to replace what came to a place after the run had begun."""
    if is_taken(target):
        raise StoreExistsError(
            f"{target} was not there when this run began, and is there now, so it is not replaced; "
            "move it away, then run again"
        )


def check_overwritable(target: Place) -> None:
    """Refuse to replace anything but a store of ours."""
    folder = folder_of(target)
    if isinstance(target, ZarrFolder) and not target.store.supports_deletes:
        raise StoreExistsError(
            f"{target} exists, and a {type(target.store).__name__} can remove nothing, so it is "
            "not overwritten; write to a new one"
        )
    try:
        known = read_manifest(target)
    except (StoreError, OSError, ValueError, KeyError, TypeError):
        raise StoreExistsError(
            f"{target} exists and is no sample store of ours, so it is never overwritten; "
            "move it away or choose another path"
        ) from None
    if foreign := sorted(set(folder.list()) - set(known) - {MANIFEST}):
        raise StoreExistsError(
            f"{target} holds {len(foreign)} files that are none of the sampler's, such as "
            f"{foreign[0]!r}, so it is not overwritten; move it away first"
        )


def ours_at(place: RemoteFolder | ZarrFolder, noted: set[str]) -> set[str]:
    """Tell which names at a place may be replaced."""
    there = set(place.list())
    if MANIFEST in there and not noted:
        check_overwritable(place.url if isinstance(place, RemoteFolder) else place)
        return there
    if foreign := sorted(there - noted):
        raise StoreExistsError(
            f"{place} holds {len(foreign)} files that are none of the sampler's, such as "
            f"{foreign[0]!r}, so nothing is written there; move it away, then run again"
        )
    return noted


def noted_in(target: ZarrFolder) -> set[str]:
    """Read what a run that was cut off has noted as ours in a zarr store of the user's."""
    try:
        return set(json.loads(target.read("zarr.json"))["attributes"][KEY])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return set()
