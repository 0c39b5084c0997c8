"""Files of a predicted cube: how they are recognized, written and opened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any, Self

import xarray as xr
from zarr.abc.store import Store
from zarr.core.buffer import Buffer
from zarr.storage import FsspecStore, LocalStore, StorePath, WrapperStore

from ml4cube.core.errors import StoreError
from ml4cube.cube.opening import as_dataset
from ml4cube.prediction.results.cf import PREDICTION_ATTR
from ml4cube.store.folders import Files, Folder, LocalFolder, RemoteFolder
from ml4cube.store.locations import Location, ZarrFolder, folder_of
from ml4cube.store.publishing.kinds import StoreKind

GROUP = "zarr.json"


def open_prediction(location: Location) -> xr.Dataset:
    """Open a predicted cube lazily."""
    if isinstance(location, ZarrFolder):
        return as_dataset(StorePath(location.store, location.path))
    return as_dataset(location)


def _files_of_prediction(location: Location) -> Collection[str]:
    """Return the files of a predicted cube; none for a netCDF file."""
    try:
        with open_prediction(location) as cube:
            names = set(cube.variables) if PREDICTION_ATTR in cube.attrs else None
    except Exception:  # what cannot be opened, for any reason, is no predicted cube
        names = None
    if names is None:
        raise StoreError(f"{location} was not written by predict_cube")
    if isinstance(location, Path) and location.is_file():
        return ()
    paths = folder_of(location).list()
    return [path for path in paths if path == GROUP or path.partition("/")[0] in names]


PREDICTIONS = StoreKind("predict_cube", GROUP, _files_of_prediction)


class FolderStore(WrapperStore[Store]):
    """Zarr store whose files are written whole and durably, and counted."""

    def __init__(self, store: Store, folder: Folder) -> None:
        super().__init__(store)
        self._folder = folder
        #: Files written so far.
        self.files: Files = {}

    @classmethod
    def of(cls, folder: LocalFolder | RemoteFolder) -> Self:
        """Make the store of a folder."""
        if isinstance(folder, LocalFolder):
            return cls(LocalStore(folder.root), folder)
        return cls(FsspecStore.from_url(folder.url), folder)

    def _with_store(self, store: Store) -> Self:
        return type(self)(store, self._folder)

    async def set(self, key: str, value: Buffer) -> None:
        """Write a file."""
        self.files[key] = await asyncio.to_thread(self._folder.write, key, value.to_bytes())


def read_json(folder: Folder, path: str) -> dict[str, Any]:
    """Return the content of a JSON file."""
    content: dict[str, Any] = json.loads(folder.read(path))
    return content
