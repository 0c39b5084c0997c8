"""Where samples lie in a cube, found from what scikit-learn users hand over as X or groups."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import rounding_of
from ml4cube.core.distance.buffer import Reach
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.grid import Grid, SizesLike, parse_sizes
from ml4cube.core.split_plan import EXCLUDED, TEST, TRAIN, VAL, SplitPlan
from ml4cube.splits.cube import CubeView
from ml4cube.splits.validity import ValidLike, valid_mask

Ints = NDArray[np.int64]
Labels = NDArray[np.uint8]
Columns = dict[str, NDArray[Any]]

# Cells whose labels are looked up together.
_CELLS_AT_ONCE = 1 << 23


@dataclass(frozen=True, eq=False)
class Samples:
    """Which cells of a cube each sample covers."""

    # The cube; where none was given, one of the same cells without data.
    view: CubeView
    # Position of each sample's first cell along every dim that is known.
    origin: dict[str, Ints]
    # Cells that a sample covers along each of these dims.
    size: dict[str, int]
    n: int
    # Why places along other dims are not known, where something was given for them.
    troubles: tuple[str, ...] = ()

    @classmethod
    def locate(
        cls,
        X: Any,
        groups: Any = None,
        *,
        cube: xr.Dataset | xr.DataArray | None = None,
        valid: ValidLike | None = None,
        sample_size: SizesLike | None = None,
        dims: Sequence[str] = (),
        ordered: bool = False,
    ) -> Samples:
        """Find out where the rows of X lie."""
        # Tried in this order: positions or coordinates in `groups`; those in X, along the dims of a
        # cube that `groups` leave open; one row for each cell of the cube, or for each of its valid
        # cells, in the order of its dims, where neither says otherwise.
        n = _length(X if X is not None else groups)
        view = None if cube is None else CubeView.of(cube)
        tables = [table for table in map(_columns, (groups, X)) if table]
        if groups is not None and not _columns(groups):
            raise InvalidTypeError(
                f"groups is a {type(groups).__name__} without columns; give a table that says "
                "where the samples lie, with columns such as 'lat' or 'lat_index'"
            )
        spec = _store_spec(X)
        for table in tables:
            if bad := [name for name, values in table.items() if len(values) != n]:
                raise InvalidValueError(
                    f"{bad[0]!r} has {len(table[bad[0]])} values for {n} samples; give one for each"
                )
        if view is None:
            attrs = {name: coord.attrs for name, coord in X.coords.items()} if spec else {}
            return cls._without_cube(n, tables, spec, sample_size, dims, ordered, attrs)
        size = _sample_size(sample_size, spec, view.sizes)
        origin: dict[str, Ints] = {}
        troubles: list[str] = []
        for table in tables:
            found, trouble = _positions(table, view, [d for d in view.dims if d not in origin])
            outside = _outside(found, view.sizes)
            if outside and not origin:
                raise InvalidValueError(next(iter(outside.values())))
            # groups tell places: what in X is called like one may be no more than a feature
            trouble += outside.values()
            origin |= {dim: at for dim, at in found.items() if dim not in outside}
            troubles += trouble
        if groups is None and len(origin) < len(view.dims):
            rows = _row_positions(n, view, valid)
            # columns that are called like a dim may be no more than features
            if rows is not None and all(np.array_equal(rows[d], at) for d, at in origin.items()):
                origin = rows
        if not origin:
            raise InvalidValueError(_why_not_rows(n, view, valid, groups, troubles))
        return cls(view, origin, {dim: size.get(dim, 1) for dim in origin}, n, tuple(troubles))

    @classmethod
    def _without_cube(
        cls,
        n: int,
        tables: Sequence[Columns],
        spec: Mapping[str, Any],
        sample_size: SizesLike | None,
        dims: Sequence[str],
        ordered: bool,
        attrs: Mapping[Any, Mapping[Any, Any]],
    ) -> Samples:
        """Samples whose own positions say enough: a bare cube is made around them."""
        wanted = spec.get("dims", dims)
        for table in tables:
            found = {
                dim: table[f"{dim}_index"].astype(np.int64)
                for dim in wanted
                if f"{dim}_index" in table and table[f"{dim}_index"].dtype.kind in "iu"
            }
            along = next((dim for dim in dims if dim in table), None)
            if not found and ordered and along is not None:
                axis, where = np.unique(table[along], return_inverse=True)
                size = _sample_size(sample_size, spec, {along: axis.size})
                view = _bare_cube({along: axis.size}, {along: axis})
                origin = {along: where.ravel().astype(np.int64)}
                return cls(view, origin, {along: size.get(along, 1)}, n)
            if not found:
                continue
            size = _sample_size(sample_size, spec, dict.fromkeys(found, 1 << 62))
            known = dict(zip(spec.get("dims", ()), spec.get("shape", ()), strict=True))
            shape = {
                dim: int(known.get(dim, where.max(initial=0) + size.get(dim, 1)))
                for dim, where in found.items()
            }
            if outside := _outside(found, shape):
                raise InvalidValueError(next(iter(outside.values())))
            coords = {}
            for dim, where in found.items():
                name = dim if dim in table else f"{dim}_origin"
                whole = _whole_axis(where, table[name], shape[dim]) if name in table else None
                if whole is not None:
                    coords[dim] = xr.DataArray(whole, dims=dim, attrs=attrs.get(name))
            return cls(_bare_cube(shape, coords), found, {d: size.get(d, 1) for d in found}, n)
        raise InvalidTypeError(
            "nothing says where the samples lie: give the splitter the cube (cube=ds) whose cells "
            "are the rows of X, or X or groups with columns of positions such as 'lat_index'"
        )

    def count(self, grid: Grid) -> Ints:
        """Count the samples that begin in each block."""
        ids: Ints = np.zeros(self.n, dtype=np.int64)
        for dim, count in zip(grid.dims, grid.counts, strict=True):
            at = self.origin.get(dim)
            ids = ids * count + (0 if at is None else grid.tile_of_cells(dim)[at])
        return np.bincount(ids, minlength=len(grid)).astype(np.int64)

    def check_known(self, dims: Sequence[str]) -> None:
        """Refuse to split along dims along which the samples' places are not known."""
        if unknown := [dim for dim in dims if dim not in self.origin]:
            tried = f" ({'; '.join(self.troubles)})" if self.troubles else ""
            raise InvalidValueError(
                f"the samples say where they lie along {list(self.origin)}, the split needs "
                f"{unknown} too{tried}; add a column '{unknown[0]}_index', or leave the dim uncut"
            )

    def labels(self, plan: SplitPlan, reaches: tuple[Reach, ...]) -> Labels:
        """Look up the part of each sample; one of several parts is excluded."""
        result = np.full(self.n, EXCLUDED, dtype=np.uint8)
        dims = plan.grid.dims
        size = [self.size.get(dim, 1) for dim in dims]
        for inside in self._together(np.arange(self.n), dims):
            cells, first = {}, []
            for dim, cells_of_sample in zip(dims, size, strict=True):
                at = self.origin[dim][inside] if dim in self.origin else np.zeros(inside.size, int)
                touched = np.unique(np.unique(at)[:, None] + np.arange(cells_of_sample))
                cells[dim] = touched[touched < plan.cube_shape[dim]]
                first.append(np.searchsorted(cells[dim], at))
            found = plan.label_cells(cells, reaches)
            if max(size, default=1) == 1:
                result[inside] = found[tuple(first)]
                continue
            for part in (TRAIN, TEST, VAL):
                result[inside[_all_cells(found == part, first, size)]] = part
        return result

    def _together(self, inside: Ints, dims: Sequence[str]) -> Iterator[Ints]:
        """Groups of samples whose cells, and those between them, fit in memory."""
        touched = {dim: np.unique(self.origin[dim][inside]) for dim in dims if dim in self.origin}
        cells = math.prod(v.size * self.size[dim] for dim, v in touched.items())
        dim = max(touched, key=lambda d: touched[d].size, default=None)
        # a group of few samples spans mostly cells of none of them: worth cutting further
        few = max(1 << 16, 8 * inside.size * math.prod(self.size.values()))
        if dim is None or cells <= min(_CELLS_AT_ONCE, few) or touched[dim].size < 2:
            if inside.size:
                yield inside
            return
        left = self.origin[dim][inside] < touched[dim][touched[dim].size // 2]
        yield from self._together(inside[left], dims)
        yield from self._together(inside[~left], dims)


def _all_cells(
    flags: NDArray[np.bool_], first: Sequence[Ints], size: Sequence[int]
) -> NDArray[np.bool_]:
    """Whether all cells of each window are flagged, from running counts of those that are not."""
    count = np.zeros([n + 1 for n in flags.shape], dtype=np.int32)
    count[(slice(1, None),) * flags.ndim] = ~flags
    for axis in range(flags.ndim):
        np.cumsum(count, axis=axis, out=count)
    ends = [np.minimum(at + s, n) for at, s, n in zip(first, size, flags.shape, strict=True)]
    other = np.zeros(first[0].shape, dtype=np.int64)
    for corner in np.ndindex((2,) * flags.ndim):
        at = tuple(
            end if far else start for far, start, end in zip(corner, first, ends, strict=True)
        )
        other += (-1) ** (flags.ndim - sum(corner)) * count[at]
    return np.asarray(other == 0)


def _length(X: Any) -> int:
    """Samples in X."""
    spec = _store_spec(X)
    if isinstance(X, xr.Dataset):
        return X.sizes[_sample_dim(X, spec)]
    if isinstance(X, Mapping):
        return len(next(iter(X.values()), ()))
    if hasattr(X, "shape"):
        return int(X.shape[0])
    try:
        return len(X)
    except TypeError:
        raise InvalidTypeError(
            f"X is a {type(X).__name__}; give an array or table with one row for each sample"
        ) from None


def _store_spec(X: Any) -> Mapping[str, Any]:
    """What a sample store says of its cube and windows; nothing for other things."""
    spec = X.attrs.get("spec") if isinstance(X, xr.Dataset | xr.DataArray) else None
    keys = ("dims", "shape", "size")
    return spec if isinstance(spec, Mapping) and all(key in spec for key in keys) else {}


def _sample_dim(X: xr.Dataset, spec: Mapping[str, Any]) -> str:
    named = [v.dims[0] for k, v in X.variables.items() if str(k).endswith("_index") and v.ndim == 1]
    dim = named[0] if named else "samples" if "samples" in X.dims else None
    if dim is None and len(X.sizes) == 1:
        dim = next(iter(X.sizes))
    if dim is None:
        raise InvalidTypeError(
            f"X is a Dataset of {dict(X.sizes)} without positions such as 'lat_index', so no dim "
            "counts samples; open a sample store, or give a table with one row for each sample"
        )
    return str(dim)


def _columns(X: Any) -> Columns:
    """Columns by name of anything that has them; index levels go before columns."""
    if isinstance(X, pd.DataFrame | pd.Series):
        table = {str(k): _values(X[k]) for k in X.columns} if isinstance(X, pd.DataFrame) else {}
        for place, level in enumerate(X.index.names):
            if level is not None:
                table[str(level)] = _values(X.index.get_level_values(place))
        return table
    if isinstance(X, xr.Dataset):
        dim = _sample_dim(X, _store_spec(X))
        return {str(k): X[k].values for k in X.variables if X[k].dims == (dim,)}
    if isinstance(X, xr.DataArray):
        coords = X.coords.items()
        return {str(k): v.values for k, v in coords if X.ndim and v.dims == X.dims[:1]}
    if isinstance(X, Mapping):
        arrays = {str(k): _values(v) for k, v in X.items()}
        return {k: v for k, v in arrays.items() if v.ndim == 1}
    return {}


def _values(column: Any) -> NDArray[Any]:
    """Values of a column; dates with a time zone become those of UTC, which cubes have."""
    if isinstance(getattr(column, "dtype", None), pd.DatetimeTZDtype):
        column = pd.DatetimeIndex(column).tz_convert("UTC").tz_localize(None)
    return np.asarray(column)


def _positions(
    table: Columns, view: CubeView, dims: Sequence[str]
) -> tuple[dict[str, Ints], list[str]]:
    """Positions along those of `dims` that a table knows, and why it does not know others."""
    found: dict[str, Ints] = {}
    troubles = []
    for dim in dims:
        if f"{dim}_index" in table and table[f"{dim}_index"].dtype.kind in "iu":
            found[dim] = table[f"{dim}_index"].astype(np.int64)
            continue
        values = table.get(dim, table.get(f"{dim}_origin"))
        if values is None:
            continue
        if dim not in view.ds.coords:
            troubles.append(f"the cube has no coordinate {dim!r} to look {dim!r} of X up in")
            continue
        try:
            place = _look_up(values, view.ds.coords[dim].values)
        except TypeError:  # what cannot be sorted
            place = None
        if place is None and not view.ds.coords[dim].to_index().is_unique:
            troubles.append(
                f"the cube has some {dim!r} more than once, so that {dim!r} of X does not tell its "
                f"cells; give their positions as {dim}_index"
            )
        elif place is None:
            troubles.append(f"some {dim!r} of X are not among those of the cube")
        else:
            found[dim] = place
    return found, troubles


def _look_up(values: NDArray[Any], axis: NDArray[Any]) -> Ints | None:
    """Position on the axis of each value; None if one is not there, or is there twice."""
    if values.dtype.kind == axis.dtype.kind == "M":
        values, axis = values.astype("M8[ns]"), axis.astype("M8[ns]")
    numbers = values.dtype.kind in "fiu" and axis.dtype.kind in "fiu"
    unique, which = np.unique(values, return_inverse=True)
    if np.unique(axis).size != axis.size:
        return None
    if not numbers:
        place = {value: i for i, value in enumerate(axis.tolist())}
        at = [place.get(value, -1) for value in unique.tolist()]
        return None if -1 in at else np.array(at, dtype=np.int64)[which.ravel()]
    # coordinates are kept as float32 here and float64 there: the nearest is meant
    order = np.argsort(axis)
    ascending, wanted = axis[order].astype(float), unique.astype(float)
    right = np.clip(np.searchsorted(ascending, wanted), 0, axis.size - 1)
    left = np.maximum(right - 1, 0)
    is_left = np.abs(wanted - ascending[left]) < np.abs(wanted - ascending[right])
    nearest = np.where(is_left, left, right)
    off = np.abs(ascending[nearest] - wanted)
    if not (off <= rounding_of(ascending)).all():
        return None
    return order[nearest][which.ravel()].astype(np.int64)


def _whole_axis(where: Ints, values: NDArray[Any], n: int) -> NDArray[Any] | None:
    """The coordinate of all cells from that of some; None where it takes a guess."""
    seen, first = np.unique(where, return_index=True)
    known = values[first]
    if seen.size == n:
        return known
    if known.dtype.kind not in "fiuM" or seen.size < 2:
        return None
    # of evenly spaced values, which windows seldom begin at the last of, the others follow
    start = known[0]
    offset = (known - start).astype(float)
    step = offset[-1] / (seen[-1] - seen[0])
    if not np.allclose(offset, step * (seen - seen[0]), rtol=1e-4, atol=1e-3 * abs(step)):
        return None
    apart = step * (np.arange(n) - seen[0])
    if known.dtype.kind == "M":
        return np.asarray(start + np.round(apart).astype(np.int64).astype((known - start).dtype))
    return np.asarray(start + apart)


def _row_positions(n: int, view: CubeView, valid: ValidLike | None) -> dict[str, Ints] | None:
    """Positions if rows are the cells of the cube, or its valid cells, in order."""
    shape = tuple(view.sizes.values())
    if n == math.prod(shape):
        ids = np.arange(n)
    elif valid is None:
        return None
    else:
        mask = valid_mask(valid, view)
        lengths = {dim: view.sizes[dim] for dim in view.dims if dim not in mask.dims}
        full = mask.expand_dims(lengths).transpose(*view.dims)
        ids = np.flatnonzero(full.values)
        if ids.size != n:
            return None
    places = np.unravel_index(ids, shape)
    return {dim: at.astype(np.int64) for dim, at in zip(view.dims, places, strict=True)}


def _why_not_rows(
    n: int, view: CubeView, valid: ValidLike | None, groups: Any, troubles: Sequence[str]
) -> str:
    tried = f" ({'; '.join(troubles)})" if troubles else ""
    if groups is not None:
        return (
            f"groups has the columns {list(_columns(groups))}, which tell no place in the cube "
            f"{view.sizes}{tried}; name them like its dims, as '{view.dims[0]}' or "
            f"'{view.dims[0]}_index', or leave groups out"
        )
    cells = math.prod(view.sizes.values())
    also = "" if valid is None else ", and another number of valid ones"
    return (
        f"X has {n} rows, the cube {view.sizes} has {cells} cells{also}, and nothing else says "
        f"where the rows lie{tried}; give a DataFrame indexed by the dims, as "
        "ds.to_dataframe().dropna() does, or groups= with columns such as 'lat_index'"
    )


def _outside(origin: Mapping[str, Ints], shape: Mapping[str, int]) -> dict[str, str]:
    """Say of positions along which dims they are not in the cube."""
    return {
        dim: f"positions along {dim!r} go from {at.min()} to {at.max()}, the cube has "
        f"{shape[dim]} cells there; these samples are of another cube"
        for dim, at in origin.items()
        if at.size and not 0 <= at.min() <= at.max() < shape[dim]
    }


def _sample_size(
    given: SizesLike | None, spec: Mapping[str, Any], shape: Mapping[str, int]
) -> dict[str, int]:
    if given is not None:
        return parse_sizes("sample_size", given, shape)
    if spec:
        return dict(zip(spec["dims"], map(int, spec["size"]), strict=True))
    return {}


def _bare_cube(shape: Mapping[str, int], coords: Mapping[str, Any]) -> CubeView:
    """A cube of one value, repeated without taking memory."""
    cells = np.broadcast_to(np.zeros((), dtype=bool), tuple(shape.values()))
    return CubeView.of(xr.Dataset({"cells": (tuple(shape), cells)}, dict(coords)))
