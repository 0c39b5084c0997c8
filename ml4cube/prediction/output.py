"""Where a predicted cube goes: into memory, or block by block into a CF zarr store or netCDF.

On disk nothing stands at the path before the cube is complete: blocks go to a hidden folder
beside it, which is renamed at the end, and removed if anything fails.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import warnings
from collections.abc import Hashable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

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


class Output(Protocol):
    """Takes blocks from any rank, in any order, and hands back the whole cube."""

    def begin(self) -> None:
        """Make room; the work of rank 0."""

    def write(self, slices: Mapping[str, slice], block: Blocks) -> None:
        """Keep one block of every target; its dims are those of `slices`, in order."""

    def publish(self) -> None:
        """Show the cube, now that every rank has written; the work of rank 0."""

    def result(self) -> xr.Dataset:
        """Return the complete cube; every rank calls this."""

    def discard(self) -> None:
        """Leave nothing unfinished behind; the work of rank 0."""


class MemoryOutput:
    """The cube as arrays, on every rank."""

    def __init__(self, template: xr.Dataset, targets: tuple[str, ...], world: World) -> None:
        self._template, self._targets, self._world = template, targets, world
        self._blocks: list[tuple[dict[str, slice], Blocks]] = []

    def begin(self) -> None:
        """Do nothing: blocks are kept as they come."""

    def write(self, slices: Mapping[str, slice], block: Blocks) -> None:
        """Keep one block of every target."""
        self._blocks.append((dict(slices), block))

    def publish(self) -> None:
        """Do nothing: the blocks are put together in `result`."""

    def result(self) -> xr.Dataset:
        """Put the blocks of all ranks together."""
        cube = self._template
        arrays = {name: np.empty(cube[name].shape, cube[name].dtype) for name in self._targets}
        for blocks in self._world.gather_objects(self._blocks):
            for slices, block in blocks:
                for name, values in block.items():
                    _put(arrays[name], cube[name].dims, slices, values)
        self.discard()
        variables = {n: cube[n].variable.copy(data=values) for n, values in arrays.items()}
        for variable in variables.values():
            del variable.encoding["chunks"]  # they were for disk
        return cube.assign(variables)

    def discard(self) -> None:
        """Forget all blocks."""
        self._blocks = []


class StoreOutput:
    """The cube as a zarr store that all ranks write, or as a netCDF file made from one."""

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
        self._aside = path.parent / name
        self._store = self._aside / "cube.zarr"

    def begin(self) -> None:
        """Write everything but the targets' values, beside the path."""
        self._aside.mkdir()
        self._template.to_zarr(self._store, compute=False, zarr_format=3, consolidated=False)

    @cached_property
    def _arrays(self) -> dict[str, Any]:
        group = zarr.open_group(self._store, mode="r+")
        return {name: group[name] for name in self._targets}

    def write(self, slices: Mapping[str, slice], block: Blocks) -> None:
        """Write one block of every target; a block is whole chunks, so no two ranks meet."""
        for name, values in block.items():
            _put(self._arrays[name], self._template[name].dims, slices, values)

    def publish(self) -> None:
        """Move the complete cube to its path."""
        ready = self._store
        if self._path.suffix in _NETCDF:
            ready = self._aside / "cube.nc"
            _to_netcdf(self._store, ready, self._targets)
        else:
            _consolidate(ready)
        _sync(ready)
        check_free(self._path, self._overwrite)  # again: it may have been taken meanwhile
        if os.path.lexists(self._path):
            self._path.rename(self._aside / "replaced")
        ready.rename(self._path)
        self.discard()

    def result(self) -> xr.Dataset:
        """Open the complete cube."""
        return open_prediction(self._path)

    def discard(self) -> None:
        """Remove what stands beside the path."""
        shutil.rmtree(self._aside, ignore_errors=True)


def parse_path(out: str | os.PathLike[str]) -> Path:
    """Turn `out` into a local path that can be written."""
    if not isinstance(out, str | os.PathLike):
        raise InvalidTypeError(f"out={out!r} is a {type(out).__name__}; give a path")
    text = os.fspath(out)
    if "://" in text:
        raise InvalidValueError(
            f"out={text!r} is a URL, and only a local path appears all at once; "
            "write to a local path and copy the cube there"
        )
    path = Path(text).absolute()
    if path.suffix not in (".zarr", *_NETCDF):
        raise InvalidValueError(f"out={text!r} ends in {path.suffix!r}; end it in '.zarr' or '.nc'")
    if path.suffix in _NETCDF and not _netcdf_engine():
        raise InvalidValueError(
            f"out={text!r} needs netCDF4 or h5netcdf, found neither; install one of them, or "
            "write '.zarr'"
        )
    if not path.parent.is_dir():
        raise InvalidValueError(f"out={text!r} lies in a folder that does not exist; make it first")
    return path


def check_free(path: Path, overwrite: bool) -> None:
    """Refuse a path that is taken, unless what is there may be replaced."""
    if not os.path.lexists(path):
        return
    if not overwrite:
        raise StoreExistsError(f"{path} exists; choose another path or pass overwrite=True")
    try:
        with open_prediction(path) as there:
            ours = MARK in there.attrs
    except Exception:  # whatever it is that cannot be opened, it is not ours
        ours = False
    if not ours:
        raise StoreExistsError(
            f"{path} is not a cube that predict_cube wrote, so overwrite=True does not replace "
            "it; move it away yourself"
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
    """Put a block, whose dims are those of `slices`, where it belongs in an array of `dims`."""
    order = list(slices)
    where = tuple(slices[str(dim)] for dim in dims)
    array[where] = values.transpose([order.index(str(dim)) for dim in dims]).astype(array.dtype)


def _netcdf_engine() -> str | None:
    engines = xr.backends.list_engines()
    return next((name for name in ("netcdf4", "h5netcdf") if name in engines), None)


def _to_netcdf(store: Path, path: Path, targets: tuple[str, ...]) -> None:
    """Copy a store into a netCDF file, chunk by chunk."""
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
    """Attributes with those that netCDF has no type for (true, null, dicts) as texts of JSON."""
    return {name: v if _fits_netcdf(v) else json.dumps(v) for name, v in attrs.items()}


def _fits_netcdf(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    scalars = all(type(item) in (str, int, float) for item in items)
    return scalars and np.array(items).dtype.kind in "iufU"


def _consolidate(store: Path) -> None:
    """Write all metadata into one file too, which is where xarray looks first."""
    with warnings.catch_warnings():
        # zarr warns that others may not read it; they read the separate files instead
        warnings.filterwarnings("ignore", "Consolidated metadata", ZarrUserWarning)
        zarr.consolidate_metadata(store)


def _sync(path: Path) -> None:
    """Make files durable before they get their final name."""
    files = [path] if path.is_file() else [found for found in path.rglob("*") if found.is_file()]
    for file in files:
        with file.open("rb") as handle:
            os.fsync(handle.fileno())
