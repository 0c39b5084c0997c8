"""Open and remove the drafts of targets of all kinds."""

from __future__ import annotations

import logging

from ml4cube.ledger.draft import Draft, StoreKind, calls_with_tasks, short_id, work_location
from ml4cube.ledger.locations import Location, folder_of

logger = logging.getLogger(__name__)


def open_draft(target: Location, call_id: str, kind: StoreKind) -> Draft:
    """Open and lock the draft of a target; its content is kept until `Draft.begin`."""
    draft: Draft = folder_of(target).draft(call_id, kind)
    return draft


def remove_work_folder(target: Location, call_id: str, kind: StoreKind) -> None:
    """Remove the work folder of a published store, unless another call has finished tasks there."""
    if folder_of(target).is_session:
        return
    work_folder = folder_of(work_location(target))
    try:
        if work_folder.exists() and not calls_with_tasks(work_folder) - {short_id(call_id)}:
            with open_draft(target, call_id, kind) as draft:
                draft.discard()
    except Exception as error:  # file systems raise any exception
        # it may be in use, not ours, or not writable for this user
        logger.debug("could not remove %s: %s", work_folder, error)
