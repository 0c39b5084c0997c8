"""Append new steps along time to a predicted cube.

Their chunks lie beyond the present end, where no reader looks, or in the last chunks, of which
readers use what was there before. The metadata of the arrays follow, and last, in one step, those
of the group, which readers use: they see all new steps or none. After a kill, the same call writes
the same once more.
"""

from __future__ import annotations

import copy
import itertools
import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import xarray as xr
import zarr
from zarr.storage import MemoryStore, StorePath

from ml4cube.core.axes import is_time
from ml4cube.core.errors import InvalidValueError, StoreError, StoreExistsError
from ml4cube.cube.coordinates import find_time_dim
from ml4cube.ledger.folders import Files, Folder, size_and_hash
from ml4cube.ledger.locations import Location, folder_of
from ml4cube.ledger.manifest import NoStoreError, read_manifest, write_manifest
from ml4cube.prediction.output.files import GROUP, FolderStore, open_prediction, read_json
from ml4cube.prediction.template import PREDICTION_ATTR

# So that a coordinate of many appended steps is not one file for each of them.
_STEPS_PER_CHUNK = 1024
# Dates are then written to the second, whatever the first step is.
_UNITS = "seconds since 1970-01-01"
# What the description of a predicted cube says of the call that made it.
_OF_CALL = ("call", "call_parts")
# Leads of months differ, because a month has 28 to 31 days.
_MONTH, _MONTHS_DIFFER = np.timedelta64(28, "D"), 0.11


def appended_dim(template: xr.Dataset) -> str:
    """Return the dim along which steps are appended."""
    coords = list(template.coords.values())
    dim = "init_time" if "init_time" in template.dims else find_time_dim(coords, template.dims)
    if dim is None or dim not in template.indexes:
        raise InvalidValueError(
            f"append=True needs a cube with coordinates along time, got {dict(template.sizes)}"
        )
    return dim


def prepared(template: xr.Dataset) -> xr.Dataset:
    """Return a new cube in units and chunks that suit the steps that will be appended."""
    dim, template = appended_dim(template), template.copy()
    for variable in template.variables.values():
        if dim in variable.dims and variable.chunks is None:
            chunks = {**variable.sizes, dim: _STEPS_PER_CHUNK}
            date = {"units": _UNITS, "dtype": "int64"} if is_time(variable) else {}
            variable.encoding = {**date, **variable.encoding, "chunks": tuple(chunks.values())}
    return template


@dataclass(frozen=True)
class Extension:
    """New steps of a predicted cube, after those that it has. Make one with `Extension.of`."""

    location: Location
    dim: str
    # The steps that the cube has, and the new ones.
    old: int
    new: int
    # Content of the metadata of the group, with those of its arrays.
    group: dict[str, Any]
    # The list of files; None where an older version wrote none, so that none is made up.
    files: Files | None
    # All new values but those of the targets, encoded as the cube has them.
    coordinates: zarr.Group

    @classmethod
    def of(cls, location: Location, template: xr.Dataset, targets: Sequence[str]) -> Self | None:
        """Check the steps of a template against the cube; return None if it has all of them."""
        group = _group_of_prediction(location)
        dim, cube = appended_dim(template), open_prediction(location)
        _check_description(location, cube, template)
        encoded = _encoded(template.drop_vars(targets), cube)
        decoded = xr.open_zarr(encoded.store, consolidated=False)
        _check_grid(location, cube, template, decoded, dim)
        arrays = group["consolidated_metadata"]["metadata"]
        for name, variable in template.variables.items():
            if dim in variable.dims and name not in targets:
                _check_encoding(location, arrays[str(name)], encoded[str(name)])
        if _has_all_steps(location, cube.indexes[dim], decoded.indexes[dim], dim):
            return None
        files = _listed_files(location)
        return cls(location, dim, cube.sizes[dim], template.sizes[dim], group, files, encoded)

    def write(self, targets: zarr.Group) -> None:
        """Write the new steps; `targets` has the values of the targets."""
        folder = folder_of(self.location)
        group = copy.deepcopy(self.group)
        arrays = {
            name: metadata
            for name, metadata in group["consolidated_metadata"]["metadata"].items()
            if self.dim in (metadata.get("dimension_names") or ())
        }
        for metadata in arrays.values():
            axis = metadata["dimension_names"].index(self.dim)
            metadata["shape"][axis] = self.old + self.new
        if folder.is_session:
            # Icechunk refuses chunks beyond the end; nobody reads a session before its commit
            _write_metadata(folder, arrays)
        *_, root = folder.zarr_store()
        store = FolderStore.of(folder)
        at = StorePath(store, root)
        for name, metadata in arrays.items():
            source: Any = self.coordinates.get(name, targets.get(name))
            axis = metadata["dimension_names"].index(self.dim)
            _copy(source, zarr.Array.from_dict(at / name, metadata), axis, self.old)
        folder.make_durable()
        written = {path.removeprefix(f"{root}/"): file for path, file in store.files.items()}
        written |= _write_metadata(folder, arrays)
        group["attributes"][PREDICTION_ATTR] = _without_call(group["attributes"][PREDICTION_ATTR])
        # listed before it is written, because the steps are there once it is
        written[GROUP] = size_and_hash(_as_json(group))
        if self.files is not None:
            write_manifest(folder, self.files | written)
        folder.write(GROUP, _as_json(group))


def _group_of_prediction(location: Location) -> dict[str, Any]:
    """Return the metadata of the group of a predicted cube, with those of its arrays."""
    try:
        group = read_json(folder_of(location), GROUP)
    except (FileNotFoundError, ValueError):
        group = {}
    if PREDICTION_ATTR not in group.get("attributes", {}):
        raise StoreExistsError(
            f"append=True: {location} was not written by predict_cube, so nothing is appended to "
            "it; choose another path"
        )
    if not group.get("consolidated_metadata"):
        raise StoreError(f"append=True: {location} has lost its consolidated metadata")
    return group


def _listed_files(location: Location) -> Files | None:
    try:
        return read_manifest(location)
    except NoStoreError:
        return None


def _without_call(description: str) -> str:
    """Describe a cube that no single call made."""
    kept = {n: v for n, v in json.loads(description).items() if n not in _OF_CALL}
    return json.dumps(kept)


def _write_metadata(folder: Folder, arrays: dict[str, Any]) -> Files:
    paths = {f"{name}/{GROUP}": metadata for name, metadata in arrays.items()}
    return {path: folder.write(path, _as_json(metadata)) for path, metadata in paths.items()}


def _as_json(metadata: dict[str, Any]) -> bytes:
    return json.dumps(metadata, indent=2).encode()


def _copy(source: Any, target: Any, axis: int, first: int) -> None:
    """Copy an array into another one, from `first` on along an axis, chunk by chunk."""
    for part in _chunks(target.shape, target.chunks, axis, first):
        moved = list(part)
        moved[axis] = slice(part[axis].start - first, part[axis].stop - first)
        target[part] = source[tuple(moved)]


def _chunks(
    shape: Sequence[int], chunks: Sequence[int], axis: int, first: int
) -> Iterator[tuple[slice, ...]]:
    """Yield the slices of each chunk of an array, from `first` on along an axis."""
    along = []
    for number, (size, chunk) in enumerate(zip(shape, chunks, strict=True)):
        start = first if number == axis else 0
        starts = [start, *range((start // chunk + 1) * chunk, size, chunk)]
        along.append([slice(a, b) for a, b in itertools.pairwise([*starts, size])])
    return itertools.product(*along)


def _encoded(new: xr.Dataset, cube: xr.Dataset) -> zarr.Group:
    """Write the variables of a small Dataset to memory, dates in the units that a cube has."""
    new = new.copy()
    for name in new.variables:
        if is_time(new[name]) and name in cube.variables:
            old = cube[name].encoding
            new[name].encoding |= {key: old[key] for key in ("units", "dtype") if key in old}
    store = MemoryStore()
    with warnings.catch_warnings():
        # dates that do not fit the units are refused later
        warnings.filterwarnings("ignore", "Times can't be serialized faithfully")
        new.to_zarr(store, zarr_format=3, consolidated=False)
    return zarr.open_group(store, mode="r")


def _check_description(location: Location, cube: xr.Dataset, template: xr.Dataset) -> None:
    """Refuse predictions of other targets or windows; a model may have been trained again."""
    before, now = (json.loads(ds.attrs[PREDICTION_ATTR]) for ds in (cube, template))
    for name in (before.keys() & now.keys()) - {"version", *_OF_CALL}:
        if before[name] != now[name]:
            raise InvalidValueError(
                f"append=True: {location} was predicted with {name} {before[name]!r}, and the new "
                f"steps are with {now[name]!r}; write to another path"
            )


def _check_grid(
    location: Location, cube: xr.Dataset, template: xr.Dataset, decoded: xr.Dataset, dim: str
) -> None:
    """Refuse other variables, dtypes or coordinates than those of the cube."""
    if different := sorted(map(str, set(cube.variables) ^ set(template.variables))):
        raise InvalidValueError(
            f"append=True: either {location} or the new steps lack {different}; write to another "
            "path"
        )
    for name in dict.fromkeys((*decoded.variables, *template.variables)):
        old, new = cube[name].variable, template[name].variable
        same = old.dims == new.dims and all(
            cube.sizes[d] == template.sizes[d] for d in new.dims if d != dim
        )
        if same and name in decoded and dim not in new.dims:
            same = _same_values(old, decoded[name].variable)
        elif same and name not in decoded:
            same = old.dtype == new.dtype
        if not same:
            raise InvalidValueError(
                f"append=True: {name!r} of the new steps differs from that of {location}; write "
                "to another path"
            )


def _same_values(old: xr.Variable, new: xr.Variable) -> bool:
    if old.dtype.kind == new.dtype.kind == "m":
        difference = np.abs(new.values - old.values)
        months = (old.values >= _MONTH) & (difference <= _MONTHS_DIFFER * old.values)
        return bool(np.all(months | (new.values == old.values)))
    return bool(old.equals(new))  # type: ignore[no-untyped-call]


def _check_encoding(location: Location, stored: dict[str, Any], new: Any) -> None:
    """Refuse values that would be read as others with the stored units, calendar and dtype."""
    before, now = stored["attributes"], dict(new.attrs)
    dtypes = stored["data_type"], new.metadata.to_dict()["data_type"]
    if dtypes[0] != dtypes[1] or not _decoded(new, before).equals(_decoded(new, now)):
        described = [
            [dtype, *(attrs[key] for key in ("units", "calendar") if key in attrs)]
            for dtype, attrs in zip(dtypes, (before, now), strict=True)
        ]
        raise InvalidValueError(
            f"append=True: {new.basename!r} is stored as {described[0]} in {location}, and the new "
            f"steps need {described[1]}; write to another path"
        )


def _decoded(array: Any, attrs: dict[str, Any]) -> Any:
    """Return an array as it is read with some attributes."""
    dims = array.metadata.dimension_names
    return xr.decode_cf(xr.Dataset({"values": (dims, array[...], attrs)}))


def _has_all_steps(location: Location, old: Any, new: Any, dim: str) -> bool:
    """Return True if a cube has all steps already; refuse some, and steps that are not later."""
    there = new.isin(old)
    if there.all():
        return True
    if there.any():
        raise InvalidValueError(
            f"append=True: {location} has {there.sum()} of the {len(new)} steps along {dim!r} "
            f"already, such as {new[there][0]}; predict only those after {old[-1]}"
        )
    if not new.is_monotonic_increasing or new[0] <= old.max():
        raise InvalidValueError(
            f"append=True: the steps along {dim!r} must be later than those of {location}, which "
            f"ends at {old.max()}, got {new[0]} to {new[-1]}"
        )
    return False
