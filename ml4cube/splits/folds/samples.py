"""Samples: the positions of samples in a cube, found from X or groups of a splitter."""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import has_distances, rounding_of
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.grid import Grid, SizesLike, parse_sizes
from ml4cube.core.missing import window_all
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.core.split_plan import EXCLUDED, TEST, TRAIN, SplitPlan
from ml4cube.splits.buffers import reaches_of
from ml4cube.splits.cube import Cube, CubeView
from ml4cube.splits.validity import ValidLike, valid_mask

Ints = NDArray[np.int64]
Labels = NDArray[np.uint8]
# One value per sample in each column.
Columns = dict[str, NDArray[Any]]

# Cells whose labels are computed at once.
_CELLS_AT_ONCE = 1 << 23

# How far coordinates may lie off a straight line and still count as evenly spaced: relative to the
# largest, from rounding to float32; and dates, from their storage as float days. By as much may
# dates of a store and its cube differ.
_ROUNDING = 8 * float(np.finfo(np.float32).eps)
_ROUNDING_OF_DATES = np.timedelta64(1, "ms")


@dataclass(frozen=True, eq=False)
class Samples:
    """The cells of a cube that each sample covers."""

    # The cube; if none was given, a cube of the same shape without data.
    view: CubeView
    # Position of each sample's first cell along every dim; 0 where it is unknown.
    origin: dict[str, Ints]
    # Cells that a sample covers along every dim; 1 where its position is unknown.
    size: dict[str, int]
    # Number of samples.
    n: int
    # The dims along which positions are unknown, and the reason if a column has the dim's name.
    unknown: dict[str, str]

    @classmethod
    def locate(
        cls,
        X: Any,
        groups: Any = None,
        cube: Cube | None = None,
        valid: ValidLike | None = None,
        sample_size: SizesLike | None = None,
        time_dims: Sequence[str] = (),
    ) -> Samples:
        """Find the positions of the rows of X: by groups, by columns of X, or by row order.

        Without a cube, a column named in `time_dims` locates samples by their times.
        """
        n, table = _count_and_columns(X, groups)
        spec = store_spec(X)
        if cube is None:
            # Which coordinates are time, latitude and longitude may depend on their attributes.
            attrs = {}
            if spec:
                attrs = {name: coord.attrs for name, coord in X.coords.items()}
            view = _bare_view(table, spec, sample_size, time_dims, attrs)
        else:
            view = CubeView.of(cube)
            if spec and groups is None:
                _check_same_cube(table, view)
        size = _sample_size(sample_size, spec, view.sizes)
        origin, reasons = _positions(table, view)
        if not origin and not reasons and groups is None:
            origin = _row_positions(n, view, valid)
        _check_located(origin, reasons, table, view)
        unknown = {dim: reasons.get(dim, "") for dim in view.dims if dim not in origin}
        origin |= dict.fromkeys(unknown, np.zeros(n, dtype=np.int64))
        size = dict.fromkeys(view.dims, 1) | size | dict.fromkeys(unknown, 1)
        return cls(view, origin, size, n, unknown)

    def count(self, grid: Grid) -> Ints:
        """Count the samples that begin in each block."""
        index = [grid.tile_of_cells(dim, self.origin[dim]) for dim in grid.dims]
        ids = np.ravel_multi_index(index, grid.counts)
        return np.bincount(ids, minlength=len(grid)).astype(np.int64)

    def check_known(self, dims: Sequence[str]) -> None:
        """Refuse to split along dims along which the samples' positions are unknown."""
        for dim in dims:
            if dim in self.unknown:
                reason = ""
                if self.unknown[dim]:
                    reason = f" ({self.unknown[dim]})"
                located = [dim for dim in self.origin if dim not in self.unknown]
                raise InvalidValueError(
                    f"the split needs the samples' positions along {dim!r}, but they are known "
                    f"only along {located}{reason}; add a column '{dim}_index', or do not cut "
                    "the dim"
                )

    def labels(self, plan: SplitPlan) -> Labels:
        """Return the part of each sample; a sample with cells of several parts is excluded."""
        result = np.full(self.n, EXCLUDED, dtype=np.uint8)
        reaches, dims = reaches_of(plan, self.view), plan.grid.dims
        size = [self.size[dim] for dim in dims]
        for samples in self._near_one_another(np.arange(self.n)):
            # Label the cells of all these samples at once, then look up the window of each.
            cells, window_starts = {}, []
            for dim, n in zip(dims, size, strict=True):
                origin = self.origin[dim][samples]
                covered = np.unique(np.unique(origin)[:, None] + np.arange(n))
                cells[dim] = covered[covered < plan.cube_shape[dim]]
                window_starts.append(np.searchsorted(cells[dim], origin))
            labels = plan.label_cells(cells, reaches)
            for part in (TRAIN, TEST):
                in_part = _whole_windows(labels == part, size)[tuple(window_starts)]
                result[samples[in_part]] = part
        return result

    def _near_one_another(self, samples: Ints) -> Iterator[Ints]:
        """Yield groups of samples whose bounding boxes fit in memory."""
        origins = {dim: np.unique(origin[samples]) for dim, origin in self.origin.items()}
        cells = math.prod(starts.size * self.size[dim] for dim, starts in origins.items())
        longest = max(origins, key=lambda dim: origins[dim].size)
        # A large box with few samples is mostly empty and is worth cutting further.
        most_cells = max(1 << 16, 8 * samples.size * math.prod(self.size.values()))
        fits = cells <= min(_CELLS_AT_ONCE, most_cells)
        if fits or origins[longest].size < 2:
            if samples.size:
                yield samples
            return
        middle = origins[longest][origins[longest].size // 2]
        is_before = self.origin[longest][samples] < middle
        yield from self._near_one_another(samples[is_before])
        yield from self._near_one_another(samples[~is_before])


def _whole_windows(flags: NDArray[np.bool_], size: Sequence[int]) -> NDArray[np.bool_]:
    """Return for each cell whether the window that begins there holds only flagged cells.

    Cells beyond the cube count as flagged.
    """
    flags = np.pad(flags, [(0, n - 1) for n in size], constant_values=True)
    return window_all(flags, size, [1] * len(size))


def _count_and_columns(X: Any, groups: Any) -> tuple[int, Columns]:
    """Return the number of samples, and the columns that may locate them: of groups, else of X."""
    rows, table = X, groups
    if X is None:
        rows = groups
    if groups is None:
        table = X
    n, columns = _length(rows), _columns(table)
    if groups is not None and not columns:
        raise InvalidTypeError(
            f"groups must be a table with columns such as 'lat' or 'lat_index', got "
            f"{type(groups).__name__}"
        )
    for name, values in columns.items():
        if len(values) != n:
            raise InvalidValueError(
                f"{name!r} must have one value per sample, got {len(values)} values for {n} samples"
            )
    return n, columns


def _length(X: Any) -> int:
    if isinstance(X, xr.Dataset):
        return X.sizes[_sample_dim(X)]
    if isinstance(X, Mapping):
        return len(next(iter(X.values()), ()))
    if hasattr(X, "shape"):
        return int(X.shape[0])
    try:
        return len(X)
    except TypeError:
        raise InvalidTypeError(
            f"X must be an array or table with one row per sample, got {type(X).__name__}"
        ) from None


def store_spec(X: Any) -> Mapping[str, Any]:
    """Return the attrs of a sample store that describe its cube and windows; else nothing."""
    spec = None
    if isinstance(X, xr.Dataset | xr.DataArray):
        spec = X.attrs.get("spec")
    keys = ("dims", "shape", "size")
    if isinstance(spec, Mapping) and all(key in spec for key in keys):
        return spec
    return {}


def _sample_dim(X: xr.Dataset) -> str:
    dims = [SAMPLE_DIM]
    if SAMPLE_DIM not in X.dims:
        dims = [str(dim) for dim in X.sizes]
    if len(dims) != 1:
        raise InvalidTypeError(
            f"a Dataset of samples must be a sample store or have one dim, got {dict(X.sizes)}; "
            "pass a table with one row per sample"
        )
    return dims[0]


def _columns(X: Any) -> Columns:
    """Return the columns by name; an index level replaces a column of the same name."""
    if isinstance(X, pd.Series):
        X = X.to_frame()
    if isinstance(X, pd.DataFrame):
        X = {**X, **X.index.to_frame()}
    elif isinstance(X, xr.Dataset | xr.DataArray):
        dims = (_sample_dim(X),) if isinstance(X, xr.Dataset) else X.dims[:1]
        arrays = X.variables if isinstance(X, xr.Dataset) else X.coords
        X = {name: array for name, array in arrays.items() if array.dims == dims}
    elif not isinstance(X, Mapping):
        return {}
    columns = {str(name): _values(column) for name, column in X.items()}
    return {name: values for name, values in columns.items() if values.ndim == 1}


def _values(column: Any) -> NDArray[Any]:
    """Return the values of a column; dates with a time zone are converted to UTC."""
    if isinstance(getattr(column, "dtype", None), pd.DatetimeTZDtype):
        column = pd.DatetimeIndex(column).tz_convert("UTC").tz_localize(None)
    return np.asarray(column)


def _index_columns(table: Columns) -> dict[str, Ints]:
    """Return the columns of positions by dim."""
    return {
        name.removesuffix("_index"): values.astype(np.int64)
        for name, values in table.items()
        if name.endswith("_index") and values.dtype.kind in "iu"
    }


def origin_name(dim: str, names: Container[Any]) -> str:
    """Return the name of the coordinate of samples along a dim; stores add "_origin" if taken."""
    if dim in names:
        return dim
    return f"{dim}_origin"


def _positions(table: Columns, view: CubeView) -> tuple[dict[str, Ints], dict[str, str]]:
    """Return the positions along the dims that have a column, and reasons why some have none."""
    positions: dict[str, Ints] = {}
    unknown: dict[str, str] = {}
    # A table of all dims, as ds.to_dataframe() makes it, has positions where there is no
    # coordinate. A single column with the name of such a dim may be any feature.
    complete = all(dim in table for dim in view.sizes)
    index_columns = _index_columns(table)
    for dim, n in view.sizes.items():
        values = table.get(origin_name(dim, table))
        if dim in index_columns:
            index = index_columns[dim]
            if index.size and not 0 <= index.min() <= index.max() < n:
                raise InvalidValueError(
                    f"positions along {dim!r} must be from 0 to {n - 1}, got {index.min()} to "
                    f"{index.max()}; the samples are not from this cube"
                )
            positions[dim] = index
        elif values is not None and (complete or dim in view.ds.coords):
            axis = view.ds.coords[dim].to_index() if dim in view.ds.coords else pd.RangeIndex(n)
            if not axis.is_unique:
                unknown[dim] = (
                    f"the cube has some {dim!r} more than once; give positions as {dim}_index"
                )
            elif (cells := _look_up(values, axis)) is None:
                unknown[dim] = f"some {dim!r} of the samples are not coordinates of the cube"
            else:
                positions[dim] = cells
    return positions, unknown


def _check_located(
    origin: dict[str, Ints], reasons: dict[str, str], table: Columns, view: CubeView
) -> None:
    """Refuse samples whose positions are unknown along all dims."""
    if not origin:
        reason = "; ".join(reasons.values()) or f"none of the columns {list(table)} is named so"
        raise InvalidValueError(
            f"the samples need columns named like the cube's dims {view.dims}, or "
            f"'{view.dims[0]}_index' with positions: {reason}"
        )


def _check_same_cube(table: Columns, view: CubeView) -> None:
    """Refuse a cube in which the positions of a store's samples have other coordinates."""
    for dim, index in _index_columns(table).items():
        values = table.get(origin_name(dim, table))
        axis = None
        if dim in view.ds.coords:
            axis = view.ds.coords[dim].values
        if values is None or axis is None or not 0 <= index.max(initial=-1) < axis.size:
            continue
        if values.dtype.kind == axis.dtype.kind == "M":
            wrong = np.abs(values - axis[index]) > _ROUNDING_OF_DATES
        elif values.dtype.kind in "fiu" and axis.dtype.kind in "fiu":
            wrong = np.abs(values.astype(float) - axis[index]) > rounding_of(axis)
        else:
            continue
        if wrong.any():
            i = int(wrong.argmax())
            raise InvalidValueError(
                f"the samples are not from this cube: sample {i} is at {dim!r} {values[i]}, but "
                f"the cube has {axis[index[i]]} at its position {index[i]}; pass the cube that the "
                "store was cut from"
            )


def _look_up(values: NDArray[Any], axis: pd.Index[Any]) -> Ints | None:
    """Return the position of each value on the axis, or None if one is missing."""
    if values.dtype.kind not in "fiu" or axis.dtype.kind not in "fiu":
        positions = axis.get_indexer(pd.Index(values))
        if (positions < 0).any():
            return None
        return positions.astype(np.int64)
    # Coordinates may be float32 in one place and float64 in the other.
    order = np.argsort(axis.values)
    ascending = axis.values[order].astype(float)
    positions = pd.Index(ascending).get_indexer(
        values.astype(float), method="nearest", tolerance=rounding_of(ascending)
    )
    if (positions < 0).any():
        return None
    return np.asarray(order[positions], np.int64)


def _bare_view(
    table: Columns,
    spec: Mapping[str, Any],
    sample_size: SizesLike | None,
    time_dims: Sequence[str],
    attrs: Mapping[Any, Mapping[Any, Any]],
) -> CubeView:
    """Return a cube without data around samples with known positions, or known times."""
    shape: dict[str, int] = {}
    coords: dict[str, Any] = {}
    time_dim = next((dim for dim in time_dims if dim in table), None)
    if index_columns := _index_columns(table):
        no_limit = dict.fromkeys(index_columns, 1 << 62)  # Because the cube is not known.
        size = _sample_size(sample_size, spec, no_limit)
        cube_shape = dict(zip(spec.get("dims", ()), spec.get("shape", ()), strict=True))
        for dim, index in index_columns.items():
            shape[dim] = int(cube_shape.get(dim, index.max(initial=0) + size.get(dim, 1)))
            name = origin_name(dim, table)
            axis = None
            if name in table:
                axis = whole_axis(index, table[name], shape[dim])
            if axis is not None:
                coords[dim] = xr.DataArray(axis, dims=dim, attrs=attrs.get(name))
    if time_dim is not None and time_dim not in shape:
        times = table[time_dim]
        if pd.isnull(times).any():
            raise InvalidValueError(f"{time_dim!r} has missing times; fill or drop them")
        if not has_distances(times):
            raise InvalidTypeError(
                f"{time_dim!r} must hold dates or numbers, got {times.dtype}; convert it, as with "
                "pd.to_datetime"
            )
        coords[time_dim] = np.unique(times)
        shape[time_dim] = coords[time_dim].size
    if not shape:
        raise InvalidTypeError(
            "the positions of the samples are unknown: construct the splitter with the cube "
            "(cube=ds) whose cells are the rows of X, or pass X or groups with columns of "
            "positions such as 'lat_index'"
        )
    cells = np.broadcast_to(np.zeros((), dtype=bool), tuple(shape.values()))
    return CubeView.of(xr.Dataset({"cells": (tuple(shape), cells)}, coords))


def whole_axis(index: Ints, values: NDArray[Any], n: int) -> NDArray[Any] | None:
    """Return the coordinate of all n cells from that of some, if it is evenly spaced; else None."""
    cells, first = np.unique(index, return_index=True)
    values = values[first]
    if len(cells) == n:
        return values
    if len(cells) < 2 or values.dtype.kind not in "fiuM":
        return None
    has_dates = values.dtype.kind == "M"
    # Dates are counted from the first one, so that they stay exact.
    offsets = values
    if has_dates:
        offsets = values - values[0]
    numbers = offsets.astype(float)
    step = (numbers[-1] - numbers[0]) / (cells[-1] - cells[0])
    line = numbers[0] + step * (np.arange(n) - cells[0])
    rounding = _ROUNDING * np.abs(numbers).max()
    if has_dates:
        # Months and years have no fixed length, and are exact.
        in_months = np.datetime_data(offsets.dtype)[0] in ("M", "Y")
        rounding = 0.0
        if not in_months:
            rounding = _ROUNDING_OF_DATES / np.ones((), offsets.dtype)
    # Written so that it also refuses NaN.
    if not np.abs(line[cells] - numbers).max() <= rounding:
        return None
    if values.dtype.kind != "f":
        line = np.round(line)
    line = line.astype(offsets.dtype)
    axis: NDArray[Any] = values[0] + line if has_dates else line
    axis[cells] = values
    return axis


def _row_positions(n: int, view: CubeView, valid: ValidLike | None) -> dict[str, Ints]:
    """Return the positions of rows that are the cells of the cube, or its valid cells, in order."""
    n_cells = math.prod(view.sizes.values())
    mask = valid_mask(valid, view)
    if n == n_cells:
        mask = xr.DataArray(True)
    positions = np.nonzero(mask.variable.set_dims(view.sizes).values)  # type: ignore[no-untyped-call]
    if n != positions[0].size:
        valid_too = ""
        if valid is not None:
            valid_too = f" and {positions[0].size} valid cells"
        raise InvalidValueError(
            f"X has {n} rows, but the cube {view.sizes} has {n_cells} cells{valid_too}, and X has "
            "no columns of positions; pass a DataFrame indexed by the dims, as from "
            "ds.to_dataframe().dropna(), or groups= with columns such as 'lat_index'"
        )
    return dict(zip(view.dims, positions, strict=True))


def _sample_size(
    sample_size: SizesLike | None, spec: Mapping[str, Any], shape: Mapping[str, int]
) -> dict[str, int]:
    if sample_size is not None:
        return parse_sizes("sample_size", sample_size, shape)
    if spec:
        return dict(zip(spec["dims"], map(int, spec["size"]), strict=True))
    return {}
