"""Open, find and remove the drafts of targets of all kinds."""

from __future__ import annotations

import logging
from pathlib import Path

from ml4cube.ledger.draft import Draft, calls_with_tasks, short_id, work_location
from ml4cube.ledger.folders import RemoteFolder
from ml4cube.ledger.in_zarr import ZarrDraft
from ml4cube.ledger.kinds import SAMPLES, StoreKind
from ml4cube.ledger.local import LocalDraft
from ml4cube.ledger.locations import Location, ZarrFolder
from ml4cube.ledger.remote import RemoteDraft

logger = logging.getLogger(__name__)


def open_draft(target: Location, call_id: str, kind: StoreKind = SAMPLES) -> Draft:
    """Open and lock the draft of a target; its content is kept until `Draft.begin`."""
    if isinstance(target, ZarrFolder):
        return ZarrDraft(target, kind)
    if isinstance(target, Path):
        return LocalDraft(target, call_id, kind)
    return RemoteDraft(target, call_id, kind)


def remove_work_folder(target: Location, call_id: str) -> None:
    """Remove the work folder of a published store, unless another call has finished tasks there."""
    if isinstance(target, ZarrFolder):
        return
    folder = work_location(target)
    try:
        exists = folder.exists() if isinstance(folder, Path) else bool(RemoteFolder(folder).list())
        if exists and not calls_with_tasks(target) - {short_id(call_id)}:
            with open_draft(target, call_id) as draft:
                draft.discard()
    except Exception as error:  # file systems raise any exception
        # it may be in use, not ours, or not writable for this user
        logger.debug("could not remove %s: %s", folder, error)
