"""Unfinished stores that will be written into a user's zarr store."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from ml4cube.store.folders import Files, LocalFolder
from ml4cube.store.locations import ZarrFolder
from ml4cube.store.publishing.draft import KEY, Draft
from ml4cube.store.publishing.overwriting import check_free, noted_in, ours_at


class ZarrDraft(Draft):
    """An unfinished store that goes into a user's zarr store, such as an Icechunk session."""

    # Workers write files to a temporary folder of this machine, and this process copies them into
    # the zarr store at the end. So a stopped run cannot be resumed.

    def __init__(self, target: ZarrFolder) -> None:
        self.target: ZarrFolder = target
        self._temporary = tempfile.TemporaryDirectory(prefix="ml4cube-")
        self.root: LocalFolder = LocalFolder(Path(self._temporary.name))
        self.done = {}

    def begin(self, resume: bool = True) -> None:
        """Do nothing: there are no finished tasks."""

    def _clear(self, keep: bool) -> None:
        """Do nothing: the temporary folder is new."""

    def record(self, task: int, files: Files) -> None:
        """Record that a task is finished."""
        self.done[task] = files

    def publish(self, overwrite: bool = False) -> None:
        """Copy the finished store: arrays before their chunks, its group last."""
        # Until then its group records our files, for a run after an interrupted one.
        if not overwrite:
            check_free(self.target)
        names = self.root.list()
        there = ours_at(self.target, noted_in(self.target))
        self._make_groups_above()
        if self.target.store.supports_deletes:  # a zip file would keep both versions of the group
            self._write_group(self.target, {KEY: sorted(there | set(names))})
        for child in sorted({name.partition("/")[0] for name in there} - {"zarr.json"}):
            self.target.remove(child)
        arrays_first = sorted(names, key=lambda name: not name.endswith("zarr.json"))
        for name in sorted(arrays_first, key=lambda name: name == "zarr.json"):
            self.target.write(name, self.root.read(name))

    def _make_groups_above(self) -> None:
        """Make missing groups above the store, without which readers do not find it."""
        for above in self.target.way()[:-1]:
            if above.size("zarr.json") is None:
                self._write_group(above, {})

    @staticmethod
    def _write_group(folder: ZarrFolder, attributes: dict[str, Any]) -> None:
        group = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        folder.write("zarr.json", json.dumps(group).encode())

    def discard(self) -> None:
        """Remove the temporary folder."""
        self._temporary.cleanup()

    close = discard
