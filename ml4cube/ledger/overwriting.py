"""Checks of what exists at a target, and whether it may be replaced."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from ml4cube.core.errors import StoreError, StoreExistsError
from ml4cube.ledger.draft import DRAFT_KEY, OUR_PREFIX, work_location
from ml4cube.ledger.kinds import SAMPLES, StoreKind
from ml4cube.ledger.locations import Location, ZarrFolder, folder_of

#: Object of a remote work folder that lists the files that a copy to the target removes and puts.
COPY_RECORD = f"{OUR_PREFIX}publishing.json"


def is_taken(target: Location, kind: StoreKind = SAMPLES) -> bool:
    """Return True if anything exists at a target but the rest of an interrupted copy of ours."""
    if isinstance(target, Path):
        return target.exists() or target.is_symlink()
    folder = folder_of(target)
    if not folder.list():
        return False
    # behind a URL the marker is copied last, into a zarr store the group, which has the record
    is_complete = not isinstance(target, ZarrFolder) and folder.size(kind.marker) is not None
    return is_complete or not _recorded_files(target)


def check_free(target: Location, kind: StoreKind) -> None:
    """Raise StoreExistsError if something appeared at the target during this run."""
    if is_taken(target, kind):
        raise StoreExistsError(
            f"{target} did not exist when this run began and exists now, so it is not replaced; "
            "move it away, then run again"
        )


def check_overwritable(target: Location, kind: StoreKind = SAMPLES) -> None:
    """Raise StoreExistsError unless a store of our kind, and nothing else, is at the target."""
    if isinstance(target, ZarrFolder) and not target.store.supports_deletes:
        raise StoreExistsError(
            f"{target} exists, and a {type(target.store).__name__} cannot remove files, so it is "
            "not overwritten; write to a new one"
        )
    try:
        foreign = kind.find_foreign(target)
    except StoreError:
        raise StoreExistsError(
            f"{target} exists and was not written by {kind.writer}, or has lost the list of what "
            "was written, so overwrite=True does not replace it; move it away or choose another "
            "path"
        ) from None
    _check_none_foreign(target, foreign, kind)


def replaceable_files(target: Location, kind: StoreKind) -> set[str]:
    """Return the files that a copy may replace: a whole store, or those recorded as ours."""
    existing, recorded = set(folder_of(target).list()), _recorded_files(target)
    if kind.marker in existing and not recorded:
        check_overwritable(target, kind)
        return existing
    _check_none_foreign(target, sorted(existing - recorded), kind)
    return recorded


def _check_none_foreign(target: Location, foreign: Sequence[str], kind: StoreKind) -> None:
    if foreign:
        raise StoreExistsError(
            f"{target} has {len(foreign)} files that {kind.writer} did not write, or that have "
            f"changed since, such as {', '.join(map(repr, foreign[:3]))}, so it is not "
            "overwritten; move it away, or remove it by hand"
        )


def _recorded_files(target: Location) -> set[str]:
    """Return the files that an interrupted copy to a target recorded as removed or put by it."""
    try:
        if isinstance(target, ZarrFolder):
            return set(json.loads(target.read("zarr.json"))["attributes"][DRAFT_KEY])
        return set(json.loads(folder_of(work_location(target)).read(COPY_RECORD)))
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return set()
