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
from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
import zarr
from numpy.typing import NDArray
from zarr.errors import ZarrUserWarning

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreExistsError
from ml4cube.prediction.cf import MARK, storable
from ml4cube.training.ranks.dist import World

_NETCDF = (".nc", ".nc4")

Blocks = Mapping[str, NDArray[Any]]


class Output(ABC):
    """Output that takes blocks from any rank, in any order."""

    def begin(self) -> None:
        """Prepare the output; called on rank 0."""

    @abstractmethod
    def write(self, slices: Mapping[str, slice], block: Blocks) -> None:
        """Store one block of every target; its dims are those of `slices`, in order."""

    def publish(self) -> None:
        """Publish the complete cube; called on rank 0."""

    @abstractmethod
    def result(self) -> xr.Dataset:
        """Return the complete cube; called on every rank."""

    def discard(self) -> None:
        """Remove everything unfinished; called on rank 0."""


class MemoryOutput(Output):
    """Cube in memory, on every rank."""

    def __init__(self, template: xr.Dataset, targets: tuple[str, ...], world: World) -> None:
        self._template, self._targets, self._world = template, targets, world
        self._blocks: list[tuple[dict[str, slice], Blocks]] = []

    def write(self, slices: Mapping[str, slice], block: Blocks) -> None:
        """Store one block of every target."""
        self._blocks.append((dict(slices), block))

    def result(self) -> xr.Dataset:
        """Combine the blocks of all ranks."""
        cube = self._template
        arrays = {name: np.empty(cube[name].shape, cube[name].dtype) for name in self._targets}
        for blocks in self._world.gather_objects(self._blocks):
            for slices, block in blocks:
                for name, values in block.items():
                    _put(arrays[name], cube[name].dims, slices, values)
        variables = {n: cube[n].variable.copy(data=values) for n, values in arrays.items()}
        for variable in variables.values():
            del variable.encoding["chunks"]  # chunks are for disk
        return cube.assign(variables)


class StoreOutput(Output):
    """Cube as a zarr store that all ranks write, or as a netCDF file converted from one."""

    def __init__(
        self,
        template: xr.Dataset,
        targets: tuple[str, ...],
        world: World,
        path: Path,
        overwrite: bool,
    ) -> None:
        self._template, self._targets, self._world = storable(template), targets, world
        self._path, self._overwrite = path, overwrite
        name = world.share(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
        self._hidden = path.parent / name
        self._store = self._hidden / "cube.zarr"

    def begin(self) -> None:
        """Write everything but the targets' values to the hidden folder."""
        self._hidden.mkdir()
        self._template.to_zarr(self._store, compute=False, zarr_format=3, consolidated=False)

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        group = zarr.open_group(self._store, mode="r+")
        return {name: group[name] for name in self._targets}

    def write(self, slices: Mapping[str, slice], block: Blocks) -> None:
        """Write one block of every target; blocks are whole chunks, so ranks do not conflict."""
        for name, values in block.items():
            _put(self._arrays[name], self._template[name].dims, slices, values)

    def publish(self) -> None:
        """Move the complete cube to its path."""
        ready = self._store
        if self._path.suffix in _NETCDF:
            ready = self._hidden / "cube.nc"
            _to_netcdf(self._store, ready, self._targets)
        else:
            _consolidate(ready)
        _sync(ready)
        check_free(self._path, self._overwrite)  # again: it may have been created meanwhile
        if os.path.lexists(self._path):
            self._path.rename(self._hidden / "replaced")
        ready.rename(self._path)
        self.discard()

    def result(self) -> xr.Dataset:
        """Open the complete cube."""
        return open_prediction(self._path)

    def discard(self) -> None:
        """Remove the hidden folder."""
        shutil.rmtree(self._hidden, ignore_errors=True)


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
    if path.suffix in _NETCDF and not _netcdf_engine():
        raise InvalidValueError(
            f"out={text!r} needs netCDF4 or h5netcdf; install one of them, or write '.zarr'"
        )
    if not path.parent.is_dir():
        raise InvalidValueError(f"out={text!r} is in a folder that does not exist")
    return path


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse an existing path, unless it is a predicted cube and `overwrite` is true."""
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise StoreExistsError(f"{path} exists; choose another path or pass overwrite=True")
    try:
        with open_prediction(path) as there:
            ours = MARK in there.attrs
    except Exception:  # what cannot be opened is not a predicted cube
        ours = False
    if not ours:
        raise StoreExistsError(
            f"{path} was not written by predict_cube, so overwrite=True does not replace it; move "
            "it or choose another path"
        )


def open_prediction(path: Path) -> xr.Dataset:
    """Open a predicted cube lazily."""
    if path.suffix in _NETCDF:
        return xr.open_dataset(path, chunks={})
    cube: xr.Dataset = xr.open_zarr(path, consolidated=True)
    return cube


def _put(
    array: Any, dims: tuple[Hashable, ...], slices: Mapping[str, slice], values: NDArray[Any]
) -> None:
    """Write a block, whose dims are those of `slices`, into an array with `dims`."""
    order = list(slices)
    where = tuple(slices[str(dim)] for dim in dims)
    array[where] = values.transpose([order.index(str(dim)) for dim in dims]).astype(array.dtype)


def _netcdf_engine() -> str | None:
    engines = xr.backends.list_engines()
    return next((name for name in ("netcdf4", "h5netcdf") if name in engines), None)


def _to_netcdf(store: Path, path: Path, targets: tuple[str, ...]) -> None:
    """Convert a store to a netCDF file, chunk by chunk."""
    with xr.open_zarr(store, consolidated=False) as cube:
        cube.attrs = _netcdf_attrs(cube.attrs)
        for variable in cube.variables.values():
            variable.attrs = _netcdf_attrs(variable.attrs)
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
        cube.to_netcdf(path, format="NETCDF4", engine=_netcdf_engine(), encoding=encoding)


def _netcdf_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes; types that netCDF lacks (true, null, dicts) become JSON strings."""
    return {name: v if _fits_netcdf(v) else json.dumps(v) for name, v in attrs.items()}


def _fits_netcdf(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    scalars = all(type(item) in (str, int, float) for item in items)
    return scalars and np.array(items).dtype.kind in "iufU"


def _consolidate(store: Path) -> None:
    """Write consolidated metadata, which xarray reads first."""
    with warnings.catch_warnings():
        # zarr warns that other readers may ignore it; they read the separate files
        warnings.filterwarnings("ignore", "Consolidated metadata", ZarrUserWarning)
        zarr.consolidate_metadata(store)


def _sync(path: Path) -> None:
    """Flush files to disk."""
    files = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
