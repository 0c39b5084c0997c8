"""Files of a predicted cube: how they are recognized, written and opened."""

from __future__ import annotations

import asyncio
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import xarray as xr
from zarr.abc.store import Store
from zarr.core.buffer import Buffer
from zarr.errors import ZarrUserWarning
from zarr.storage import MemoryStore, StorePath, WrapperStore

from ml4cube.core.errors import InvalidValueError, StoreError, StoreExistsError
from ml4cube.cube.opening import as_dataset
from ml4cube.ledger.call import CallId
from ml4cube.ledger.draft import StoreKind
from ml4cube.ledger.folders import Files, Folder
from ml4cube.ledger.in_zarr import ZarrFolder
from ml4cube.ledger.locations import Location, folder_of
from ml4cube.ledger.manifest import MANIFEST, find_faults, find_foreign, read_manifest
from ml4cube.prediction.output.netcdf import find_foreign_in_netcdf, is_netcdf
from ml4cube.prediction.template import PREDICTION_ATTR
from ml4cube.store.names import check_netcdf_attributes, check_writable_names

GROUP = "zarr.json"


def open_prediction(location: Location) -> xr.Dataset:
    """Open a predicted cube lazily."""
    if isinstance(location, Folder):
        store, _, path = location.zarr_store()
        return as_dataset(StorePath(store, path))
    return as_dataset(location)


def with_record(template: xr.Dataset, call: CallId) -> xr.Dataset:
    """Return a predicted cube that says which call made it."""
    description = json.loads(template.attrs[PREDICTION_ATTR])
    return template.assign_attrs({PREDICTION_ATTR: json.dumps({**description, **call.record})})


def recorded_call(location: Location) -> dict[str, Any]:
    """Return what a finished predicted cube says of the call that made it.

    Raises StoreExistsError where something else is, or a file is missing or has another size.
    """
    try:
        if not _is_file(folder_of(location)):
            faults = find_faults(location, read_manifest(location), hashes=False)
            if faults:
                raise StoreError(next(iter(faults.values())))
        with open_prediction(location) as cube:
            description: dict[str, Any] = json.loads(cube.attrs[PREDICTION_ATTR])
    except (StoreError, OSError, KeyError, ValueError) as error:
        raise StoreExistsError(
            f"{location} exists and is not a complete cube of predict_cube ({error}); choose "
            "another path, or replace a predicted cube by overwrite=True"
        ) from error
    if "call" not in description:
        raise StoreExistsError(
            f"{location} exists, and does not say which call made it; choose another path or pass "
            "overwrite=True"
        )
    return description


def _is_file(folder: Folder) -> bool:
    return Path(str(folder)).is_file()


def _find_foreign(folder: Folder) -> Sequence[str]:
    """Return what in a folder is not, or no longer, as `predict_cube` wrote it."""
    if _is_file(folder):
        return find_foreign_in_netcdf(Path(str(folder)))
    foreign = find_foreign(folder)
    if not foreign and PREDICTION_ATTR not in read_json(folder, GROUP)["attributes"]:
        raise StoreError(f"{folder} is a store of another kind")
    return foreign


PREDICTIONS = StoreKind("predict_cube", _find_foreign)


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


def write_template(folder: Folder, template: xr.Dataset) -> None:
    """Write everything but the targets' values."""
    # through memory, because zarr lists what it wrote, and listings of a URL may be old
    memory = ZarrFolder(MemoryStore())
    with warnings.catch_warnings():
        # Zarr warns that other readers may ignore it; they read the separate files.
        warnings.filterwarnings("ignore", "Consolidated metadata", ZarrUserWarning)
        template.to_zarr(memory.store, compute=False, zarr_format=3, consolidated=True)
    for path in memory.list():
        folder.write(path, memory.read(path))


def check_template(location: Location, template: xr.Dataset) -> None:
    """Refuse names and attributes of a predicted cube that cannot be written at a location."""
    names = map(str, (*template.variables, *template.dims))
    check_writable_names(names, netcdf=is_netcdf(location))
    if is_netcdf(location):
        attrs = [template.attrs, *(variable.attrs for variable in template.variables.values())]
        check_netcdf_attributes(str(name) for mapping in attrs for name in mapping)
    if (own := MANIFEST.partition("/")[0]) in template.variables:
        raise InvalidValueError(
            f"{own!r} cannot name a variable of a predicted cube in {str(location)!r}, which has "
            "its list of files there; rename it (ds.rename)"
        )
