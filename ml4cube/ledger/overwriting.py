"""Checks of what exists at a target, and whether it may be replaced."""

from __future__ import annotations

from collections.abc import Sequence

from ml4cube.core.errors import StoreError, StoreExistsError
from ml4cube.ledger.draft import StoreKind
from ml4cube.ledger.folders import Folder


def may_write(target: Folder, kind: StoreKind, overwrite: bool) -> bool:
    """Return True if nothing is at a target, or a store of ours that `overwrite` replaces."""
    target.restore()
    if not is_taken(target, kind):
        return True
    if overwrite:
        check_overwritable(target, kind)
    return overwrite


def is_taken(target: Folder, kind: StoreKind) -> bool:
    """Return True if anything exists at a target but the rest of an interrupted copy of ours."""
    if not target.exists():
        return False
    # the marker is copied last; of a session, it is the record of the copy until then
    is_complete = not target.is_session and target.size(kind.marker) is not None
    return is_complete or not target.half_copied()


def check_free(target: Folder, kind: StoreKind) -> None:
    """Raise StoreExistsError if something appeared at the target during this run."""
    if is_taken(target, kind):
        raise StoreExistsError(
            f"{target} did not exist when this run began and exists now, so it is not replaced; "
            "move it away, then run again"
        )


def check_overwritable(target: Folder, kind: StoreKind) -> None:
    """Raise StoreExistsError unless a store of our kind, and nothing else, is at the target."""
    target.check_removable()
    try:
        foreign = kind.find_foreign(target)
    except StoreError:
        raise StoreExistsError(
            f"{target} exists and was not written by {kind.writer}, or has lost the list of what "
            "was written, so overwrite=True does not replace it; move it away or choose another "
            "path"
        ) from None
    _check_none_foreign(target, foreign, kind)


def replaceable_files(target: Folder, kind: StoreKind) -> set[str]:
    """Return the files that a copy may replace: a whole store, or those recorded as ours."""
    existing, recorded = target.list().keys(), target.half_copied()
    if kind.marker in existing and not recorded:
        check_overwritable(target, kind)
        return set(existing)
    _check_none_foreign(target, sorted(existing - recorded), kind)
    return recorded


def _check_none_foreign(target: Folder, foreign: Sequence[str], kind: StoreKind) -> None:
    if foreign:
        raise StoreExistsError(
            f"{target} has {len(foreign)} files that {kind.writer} did not write, or that have "
            f"changed since, such as {', '.join(map(repr, foreign[:3]))}, so it is not "
            "overwritten; move it away, or remove it by hand"
        )
