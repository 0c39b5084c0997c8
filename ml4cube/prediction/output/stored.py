"""Predicted cube at a location, written by all ranks; a killed run can be resumed."""

from __future__ import annotations

import logging
import uuid
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xarray as xr
import zarr
from zarr.errors import ZarrUserWarning
from zarr.storage import MemoryStore

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreExistsError
from ml4cube.ledger.call import CallId
from ml4cube.ledger.draft import Draft, WriteErrors, record_task
from ml4cube.ledger.folders import Files, Folder, size_and_hash
from ml4cube.ledger.in_zarr import ZarrFolder
from ml4cube.ledger.local import LocalFolder
from ml4cube.ledger.locations import Location, folder_of
from ml4cube.ledger.manifest import MANIFEST, write_manifest
from ml4cube.prediction.output.appending import Extension
from ml4cube.prediction.output.files import PREDICTIONS, FolderStore, open_prediction, with_record
from ml4cube.prediction.output.memory import Block, Output
from ml4cube.prediction.output.netcdf import is_netcdf, to_netcdf
from ml4cube.prediction.template import storable
from ml4cube.sampling.identity.cube import SourceChangedError
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.engine import all_ranks_or_none

logger = logging.getLogger(__name__)

# The same call would fail again, or go on from blocks of another cube.
_NOT_RESUMED = (InvalidTypeError, InvalidValueError, StoreExistsError, SourceChangedError)


@dataclass
class BlockWriter:
    """Writes blocks to the folder of a draft; picklable, for other processes."""

    folder: Any
    # Where finished blocks are recorded; None if no run goes on from there.
    journal: Folder | None
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
            if self.journal is not None:
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
        super().__init__(storable(template), targets, world)
        self._target = target
        # Blocks of a killed run are used by the same call; a session has none.
        self._call = None if folder_of(target).is_session else call
        self._overwrite, self._append = overwrite, append
        self._write_errors = WriteErrors.of(target)
        self._draft: Draft | None = None

    def begin(self) -> Collection[int]:
        """Open the draft, with everything but the targets' values."""
        done: set[int] = set()
        journal: Folder | None = None
        folder: Any = None
        with all_ranks_or_none(self._world):
            if self._world.is_main:
                with self._write_errors:
                    draft = self._open_draft()
                is_resumable = not folder_of(self._target).is_session
                done, journal = set(draft.finished_tasks), draft.journal if is_resumable else None
                # a folder for other machines syncs each file, which only a resumed run needs
                folder = draft.folder_for_workers(on_other_machines=is_resumable)
        folder, journal, done = self._world.broadcast((folder, journal, done))
        dims = {name: tuple(map(str, self._template[name].dims)) for name in self._targets}
        self.writer = BlockWriter(folder, journal, dims, self._write_errors)
        self._folder = folder
        return done

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
            self._write_template(self._draft.store_folder)
        return self._draft

    def _write_template(self, folder: Folder) -> None:
        """Write everything but the targets' values."""
        # through memory, because zarr lists what it wrote, and listings of a URL may be old
        memory = ZarrFolder(MemoryStore())
        with warnings.catch_warnings():
            # Zarr warns that other readers may ignore it; they read the separate files.
            warnings.filterwarnings("ignore", "Consolidated metadata", ZarrUserWarning)
            self._template.to_zarr(memory.store, compute=False, zarr_format=3, consolidated=True)
        for path in memory.list():
            folder.write(path, memory.read(path))

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
                file = to_netcdf(Path(str(self._draft.store_folder)), self._targets)
                self._draft.publish(self._overwrite, LocalFolder(file))
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
            # no note has those of the template, nor any of a draft without a journal
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
            if self._call is None or isinstance(error, _NOT_RESUMED):
                self._draft.discard()
            self._draft.close()
        except Exception as failure:  # file systems raise any exception
            logger.warning("could not remove the work folder of %s: %s", self._target, failure)
