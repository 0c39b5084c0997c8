"""Unfinished stores that will be written into a user's zarr store."""

from __future__ import annotations

import tempfile
from pathlib import Path

from ml4cube.ledger.draft import DRAFT_KEY, Draft
from ml4cube.ledger.folders import Files, LocalFolder
from ml4cube.ledger.kinds import SAMPLES, StoreKind
from ml4cube.ledger.locations import ZarrFolder
from ml4cube.ledger.manifest import group_json
from ml4cube.ledger.overwriting import check_free, replaceable_files


class ZarrDraft(Draft):
    """An unfinished store that goes into a user's zarr store, such as an Icechunk session."""

    # Workers write to a temporary folder of this machine, and this process copies its files into
    # the zarr store at the end. So a stopped run cannot be resumed.

    def __init__(self, target: ZarrFolder, kind: StoreKind = SAMPLES) -> None:
        self.target: ZarrFolder = target
        self.kind = kind
        self._temporary = tempfile.TemporaryDirectory(prefix="ml4cube-")
        self.store_folder: LocalFolder = LocalFolder(Path(self._temporary.name))
        self.finished_tasks = {}

    def begin(self, resume: bool = True) -> None:
        """Do nothing: there are no finished tasks."""

    def read_journal(self) -> None:
        """Do nothing: there is no journal."""

    def _clear(self, keep_this_call: bool) -> None:
        """Do nothing: the temporary folder is new."""

    def record(self, task: int, files: Files) -> None:
        """Record that a task is finished."""
        self.finished_tasks[task] = files

    def publish(self, overwrite: bool = False) -> None:
        """Copy the finished store: metadata of arrays, then chunks, then that of its group."""
        if not overwrite:
            check_free(self.target, self.kind)
        new_files = self.store_folder.list().keys()
        old_files = replaceable_files(self.target, self.kind)
        for group in self.target.groups_from_root()[:-1]:
            if group.size("zarr.json") is None:  # readers do not look into a folder without it
                group.write("zarr.json", group_json({}))
        if self.target.store.supports_deletes:  # a zip file would keep both versions of the group
            # if this run is interrupted, the next one knows by this which files are ours
            ours = sorted(old_files | new_files)
            self.target.write("zarr.json", group_json({DRAFT_KEY: ours}))
        for child in sorted({name.partition("/")[0] for name in old_files} - {"zarr.json"}):
            self.target.remove(child)
        # False comes before True
        for name in sorted(new_files, key=lambda n: (n == "zarr.json", "zarr.json" not in n)):
            self.target.write(name, self.store_folder.read(name))

    def discard(self) -> None:
        """Remove the temporary folder."""
        self._temporary.cleanup()

    close = discard
