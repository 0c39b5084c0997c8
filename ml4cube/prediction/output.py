"""Outputs of a prediction: in memory, or block by block into a CF zarr store or netCDF.

On disk, blocks are written to a hidden folder next to the path. It is renamed when the cube is
complete, and removed if anything fails.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr
from zarr.errors import ZarrUserWarning

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreExistsError
from ml4cube.prediction.cf import PREDICTION_ATTR, storable
from ml4cube.store.folders import sync_path
from ml4cube.training.ranks.dist import World

_NETCDF = (".nc", ".nc4")

Slices = Mapping[str, slice]
Targets = Mapping[str, xr.Variable]


class Output:
    """Predicted cube in memory, on every rank; takes blocks from any rank, in any order."""

    def __init__(self, template: xr.Dataset, targets: tuple[str, ...], world: World) -> None:
        self._template, self._targets, self._world = template, targets, world
        self._blocks: list[tuple[Slices, Targets]] = []

    def begin(self) -> None:
        """Prepare the output; called on rank 0."""

    def write(self, slices: Slices, block: Targets) -> None:
        """Store one block of every target."""
        self._blocks.append((slices, block))

    def publish(self) -> None:
        """Publish the complete cube; called on rank 0."""

    def result(self) -> xr.Dataset:
        """Return the complete cube; called on every rank."""
        cube = self._template
        whole = {n: cube[n].variable.copy(data=np.empty_like(cube[n])) for n in self._targets}
        for blocks in self._world.gather_objects(self._blocks):
            for slices, block in blocks:
                for name, values in block.items():
                    whole[name][{d: slices[str(d)] for d in whole[name].dims}] = values
        for variable in whole.values():
            del variable.encoding["chunks"]  # chunks are for disk
        return cube.assign(whole)

    def discard(self) -> None:
        """Remove everything unfinished; called on rank 0."""


class StoreOutput(Output):
    """Predicted cube as a zarr store that all ranks write, or as a netCDF file made from one."""

    def __init__(
        self,
        template: xr.Dataset,
        targets: tuple[str, ...],
        world: World,
        path: Path,
        overwrite: bool,
    ) -> None:
        super().__init__(storable(template), targets, world)
        self._path, self._overwrite = path, overwrite
        name = world.broadcast(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
        self._hidden_folder = path.parent / name
        self._store = self._hidden_folder / "cube.zarr"

    def begin(self) -> None:
        """Write everything but the targets' values to the hidden folder."""
        self._hidden_folder.mkdir()
        with warnings.catch_warnings():
            # Zarr warns that other readers may ignore it; they read the separate files.
            warnings.filterwarnings("ignore", "Consolidated metadata", ZarrUserWarning)
            self._template.to_zarr(self._store, compute=False, zarr_format=3, consolidated=True)

    @cached_property
    def _arrays(self) -> zarr.Group:
        return zarr.open_group(self._store, mode="r+")

    def write(self, slices: Slices, block: Targets) -> None:
        """Write one block of every target; blocks are whole chunks, so ranks do not conflict."""
        for name, values in block.items():
            dims = [str(dim) for dim in self._template[name].dims]
            array: Any = self._arrays[name]
            array[tuple(slices[dim] for dim in dims)] = values.transpose(*dims).values

    def publish(self) -> None:
        """Move the complete cube to its path."""
        complete = self._store
        if self._path.suffix in _NETCDF:
            complete = self._hidden_folder / "cube.nc"
            _to_netcdf(self._store, complete, self._targets)
        for path in (complete, *complete.rglob("*")):
            sync_path(path)
        check_free(self._path, self._overwrite)  # again: it may have been created meanwhile
        replaced = self._hidden_folder / "replaced"
        if os.path.lexists(self._path):
            self._path.rename(replaced)
        try:
            complete.rename(self._path)
        except OSError:
            if os.path.lexists(replaced):  # or it would be removed with the hidden folder
                replaced.rename(self._path)
            raise
        self.discard()

    def result(self) -> xr.Dataset:
        """Open the complete cube."""
        return _open_prediction(self._path)

    def discard(self) -> None:
        """Remove the hidden folder."""
        shutil.rmtree(self._hidden_folder, ignore_errors=True)


def parse_path(out: str | os.PathLike[str]) -> Path:
    """Return `out` as a local path that can be written."""
    if not isinstance(out, str | os.PathLike):
        raise InvalidTypeError(f"out must be a path, got {out!r}")
    text = os.fspath(out)
    if "://" in text:
        raise InvalidValueError(
            f"out must be a local path, got the URL {text!r}; write to a local path and copy the "
            "cube"
        )
    path = Path(text).absolute()
    if path.suffix not in (".zarr", *_NETCDF):
        raise InvalidValueError(f"out must end in '.zarr' or '.nc', got {text!r}")
    if path.suffix in _NETCDF and not {"netcdf4", "h5netcdf"} & xr.backends.list_engines().keys():
        raise InvalidValueError(
            f"out={text!r} needs netCDF4 or h5netcdf; install one of them, or write '.zarr'"
        )
    if not path.parent.is_dir():
        raise InvalidValueError(f"out={text!r} is in a folder that does not exist")
    return path


def check_dtypes(path: Path, dtypes: Mapping[str, np.dtype[Any]]) -> None:
    """Refuse targets that a file cannot hold."""
    for name, dtype in dtypes.items():
        if path.suffix in _NETCDF and dtype == np.float16:
            raise InvalidValueError(
                f"out={path.name!r}: netCDF has no float16, the dtype of target {name!r}; "
                "write '.zarr', or convert the cube, as with ds.astype('float32')"
            )


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse an existing path, unless it is a predicted cube and `overwrite` is true."""
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise StoreExistsError(f"{path} exists; choose another path or pass overwrite=True")
    try:
        with _open_prediction(path) as cube:
            replaceable = PREDICTION_ATTR in cube.attrs
    except Exception:  # what cannot be opened is not a predicted cube
        replaceable = False
    if not replaceable:
        raise StoreExistsError(
            f"{path} was not written by predict_cube, so overwrite=True does not replace it; move "
            "it or choose another path"
        )


def _open_prediction(path: Path) -> xr.Dataset:
    """Open a predicted cube lazily."""
    if path.suffix in _NETCDF:
        return xr.open_dataset(path, chunks={})
    cube: xr.Dataset = xr.open_zarr(path, consolidated=True)
    return cube


def _to_netcdf(store: Path, path: Path, targets: tuple[str, ...]) -> None:
    """Convert a store to a netCDF file, chunk by chunk."""
    with xr.open_zarr(store, consolidated=False) as cube:
        cube.attrs = _netcdf_attrs(cube.attrs)
        for variable in cube.variables.values():
            variable.attrs = _netcdf_attrs(variable.attrs)
            # Other entries, such as a missing_value, may contradict these or do not fit the values.
            kept = ("units", "calendar", "dtype", "_FillValue")
            variable.encoding = {k: v for k, v in variable.encoding.items() if k in kept}
        encoding = {
            name: {
                "zlib": True,
                "complevel": 1,
                "shuffle": True,
                "chunksizes": tuple(parts[0] for parts in cube[name].chunks or ()),
            }
            for name in targets
        }
        cube.to_netcdf(path, format="NETCDF4", encoding=encoding)


def _netcdf_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes; types that netCDF lacks (true, null, dicts) become JSON strings."""
    return {name: v if _fits_netcdf(v) else json.dumps(v) for name, v in attrs.items()}


def _fits_netcdf(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    scalars = all(type(item) in (str, int, float) for item in items)
    return scalars and np.array(items).dtype.kind in "iufU"
