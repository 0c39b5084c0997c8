"""Files of a predicted cube: how they are recognized, written and opened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import xarray as xr
from zarr.abc.store import Store
from zarr.core.buffer import Buffer
from zarr.storage import StorePath, WrapperStore

from ml4cube.core.errors import StoreError
from ml4cube.cube.opening import as_dataset
from ml4cube.ledger.draft import StoreKind
from ml4cube.ledger.folders import Files, Folder
from ml4cube.ledger.locations import Location
from ml4cube.ledger.manifest import find_foreign
from ml4cube.prediction.output.digest import find_foreign_in_netcdf
from ml4cube.prediction.template import PREDICTION_ATTR

GROUP = "zarr.json"


def open_prediction(location: Location) -> xr.Dataset:
    """Open a predicted cube lazily."""
    if isinstance(location, Folder):
        store, _, path = location.zarr_store()
        return as_dataset(StorePath(store, path))
    return as_dataset(location)


def _find_foreign(folder: Folder) -> Sequence[str]:
    """Return what in a folder is not, or no longer, as `predict_cube` wrote it."""
    path = Path(str(folder))
    if path.is_file():
        return find_foreign_in_netcdf(path)
    foreign = find_foreign(folder)
    if not foreign and PREDICTION_ATTR not in read_json(folder, GROUP)["attributes"]:
        raise StoreError(f"{folder} is a store of another kind")
    return foreign


PREDICTIONS = StoreKind("predict_cube", GROUP, _find_foreign)


class FolderStore(WrapperStore[Store]):
    """Zarr store whose files are written whole and durably, and counted."""

    def __init__(self, store: Store, folder: Folder) -> None:
        super().__init__(store)
        self._folder = folder
        #: Files written so far.
        self.files: Files = {}

    @classmethod
    def of(cls, folder: Folder) -> Self:
        """Make the store of a folder; of a group of a zarr store, that of its root."""
        store, root, _ = folder.zarr_store()
        return cls(store, root)

    def _with_store(self, store: Store) -> Self:
        return type(self)(store, self._folder)

    async def set(self, key: str, value: Buffer) -> None:
        """Write a file."""
        self.files[key] = await asyncio.to_thread(self._folder.write, key, value.to_bytes())


def read_json(folder: Folder, path: str) -> dict[str, Any]:
    """Return the content of a JSON file."""
    content: dict[str, Any] = json.loads(folder.read(path))
    return content
