"""Predicted cube at a location, written by all ranks; a killed run can be resumed."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import xarray as xr
import zarr

from ml4cube.ledger.call import CallId
from ml4cube.ledger.draft import Draft, WriteErrors, record_task
from ml4cube.ledger.folders import Files, Folder, size_and_hash
from ml4cube.ledger.locations import Location
from ml4cube.ledger.manifest import MANIFEST, write_manifest
from ml4cube.prediction.output.appending import Extension
from ml4cube.prediction.output.files import (
    PREDICTIONS,
    FolderStore,
    open_prediction,
    with_record,
    write_template,
)
from ml4cube.prediction.output.memory import Block, Output
from ml4cube.prediction.output.netcdf import is_netcdf, to_netcdf
from ml4cube.prediction.output.same_call import NOT_RESUMED
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.engine import all_ranks_or_none

logger = logging.getLogger(__name__)


@dataclass
class BlockWriter:
    """Writes blocks to the folder of a draft; picklable, for other processes."""

    folder: Folder
    # Where finished blocks are recorded.
    journal: Folder
    # Dims of each target in the files.
    dims: Mapping[str, tuple[str, ...]]
    write_errors: WriteErrors

    def __call__(self, number: int, block: Block) -> None:
        """Write one block, and record that it is finished."""
        with self.write_errors:
            store = FolderStore.of(self.folder)
            for name, (slices, values) in block.items():
                dims = self.dims[name]
                array: Any = zarr.open_array(store, path=name, mode="r+")
                part = tuple(slices.get(dim, slice(None)) for dim in dims)
                array[part] = values.transpose(*dims).values
            record_task(self.journal, number, store.files)


class StoreOutput(Output):
    """Predicted cube at a location: a path, a URL, or a group of a zarr store.

    Blocks are written to a draft of the store, which takes its place when it is complete, or with
    `append` is then added to the cube that exists. Blocks are whole chunks, so ranks do not
    conflict.
    """

    def __init__(
        self,
        template: xr.Dataset,
        targets: tuple[str, ...],
        world: World,
        target: Location,
        *,
        overwrite: bool,
        append: bool,
        call: CallId | None,
    ) -> None:
        if call is not None:
            template = with_record(template, call)
        super().__init__(template, targets, world)
        self._target, self._call = target, call
        self._overwrite, self._append = overwrite, append
        self._write_errors = WriteErrors.of(target)
        self._draft: Draft | None = None

    def begin(self) -> Collection[int]:
        """Open the draft, with everything but the targets' values."""
        opened: Any = None
        with all_ranks_or_none(self._world):
            if self._world.is_main:
                with self._write_errors:
                    draft = self._open_draft()
                opened = draft.store_folder, draft.journal, set(draft.finished_tasks)
        self._folder, journal, done = self._world.broadcast(opened)
        dims = {name: tuple(map(str, self._template[name].dims)) for name in self._targets}
        self.writer = BlockWriter(self._folder, journal, dims, self._write_errors)
        finished: set[int] = done
        return finished

    def _open_draft(self) -> Draft:
        """Lock the location; start a draft, or find one of a killed run of the same call."""
        id = uuid.uuid4().hex
        if self._call is not None:
            id = self._call.id
        self._draft = Draft(self._target, id, PREDICTIONS)
        if self._call is not None:
            self._draft.begin()
        if not self._draft.finished_tasks:
            self._draft.begin(resume=False)
            write_template(self._draft.store_folder, self._template)
        return self._draft

    def publish(self) -> None:
        """Move the complete cube to its location, or append it to the cube that is there."""
        assert self._draft is not None  # opened by `begin`
        with self._write_errors:
            self._draft.store_folder.make_durable()
            write_manifest(self._draft.store_folder, self._files())
            if self._append:
                # checked again: another run may have appended since this one began
                extension = Extension.of(self._target, self._template, self._targets)
                if extension is not None:
                    extension.write(zarr.open_group(FolderStore.of(self._folder), mode="r"))
            elif is_netcdf(self._target):
                file = to_netcdf(self._draft.store_folder, self._targets)
                self._draft.publish(self._overwrite, file)
            else:
                self._draft.publish(self._overwrite)
            self._draft.discard()

    def _files(self) -> Files:
        """Return size and hash of every file of the draft."""
        assert self._draft is not None  # opened by `begin`
        self._draft.read_journal()
        noted, folder = self._draft.files, self._draft.store_folder
        files: Files = {}
        for path in sorted(folder.list().keys() - {MANIFEST}):
            # no note has those of the template
            files[path] = noted[path] if path in noted else size_and_hash(folder.read(path))
        return files

    def result(self) -> xr.Dataset:
        """Open the complete cube."""
        return open_prediction(self._target)

    def discard(self, error: BaseException) -> None:
        """Remove the draft, unless the same call can go on from its finished blocks."""
        if self._draft is None:
            return
        try:
            if self._call is None or isinstance(error, NOT_RESUMED):
                self._draft.discard()
            self._draft.close()
        except Exception as failure:  # file systems raise any exception
            logger.warning("could not remove the work folder of %s: %s", self._target, failure)
