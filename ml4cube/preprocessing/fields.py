"""Statistics that keep dims, follow a climatology, are weighted, or have quantiles.

Their numbers are arrays with one entry for each month, level or pixel. The sums of every block are
merged into the entries of its cells.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Self

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import check_aligned
from ml4cube.core.climatology import GROUPS, group_numbers
from ml4cube.core.errors import InvalidValueError, check_choice, prefixed
from ml4cube.core.scaling import dated_dim
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import VariableStatistics
from ml4cube.core.sums.fields import FieldStatistics, Moments
from ml4cube.core.sums.quantiles import Histogram, default_bins
from ml4cube.cube.areas import NO_LATITUDE, Weights, cell_weights
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.scan import Cells, blocks_of, scan
from ml4cube.preprocessing.cubes import any_over_other_dims, check_known

# Names beside that of a variable; those in files have no spaces.
_LABEL, _WEIGHTS, _GROUPS = "split label", "weights of cells", "groups of steps"
_NONE = VariableStatistics()

# By the text of an index, the index of some entries and their histogram.
Histograms = dict[str, tuple[Any, Histogram]]


@dataclass(frozen=True)
class FieldOptions:
    """Options of the statistics of a cube."""

    # Dims to reduce over; all if None.
    dims: tuple[str, ...] | None
    # The climatology, and the group of each time step.
    by: str | None
    groups: xr.Variable | None
    # The rule of the weights, and those of the cells of each variable; none if not weighted, as a
    # variable without latitude beside others.
    weighting: str | None
    weights: Mapping[str, xr.Variable]
    has_histogram: bool
    # Coordinate values of the cube's dims, and the groups of the climatology.
    labels: Mapping[str, NDArray[Any]]

    @classmethod
    def of(
        cls,
        cube: xr.Dataset,
        chosen: Iterable[str],
        dims: tuple[str, ...] | None,
        by: str | None,
        weights: Weights,
        has_histogram: bool,
    ) -> Self:
        """Check the options against the cube."""
        check_choice("by", by, (*GROUPS, None))
        check_free(by, cube.dims)
        if dims is not None:
            check_known("dims", dims, cube.dims)
        labels = {str(name): cube[str(name)].values for name in cube.indexes if name in cube.dims}
        groups = None
        if by is not None:
            time_dim = dated_dim(labels, list(cube.dims))
            if dims is not None and time_dim not in dims:
                raise InvalidValueError(
                    f"dims must include {time_dim!r} if by={by!r}, got {list(dims)}"
                )
            if bool(cube[time_dim].isnull().any()):
                raise InvalidValueError(f"{time_dim!r} has missing dates; drop those steps")
            groups = xr.Variable((time_dim,), group_numbers(labels[time_dim], by))
            labels[by] = GROUPS[by]
        weighting, weights_of = _weights_of(cube, weights, chosen)
        return cls(
            dims=dims,
            by=by,
            groups=groups,
            weighting=weighting,
            weights=weights_of,
            has_histogram=has_histogram,
            labels=labels,
        )

    def labels_of(self, dims: Iterable[str]) -> dict[str, NDArray[Any]]:
        """Return the labels along those of some dims that have any."""
        return {dim: self.labels[dim] for dim in dims if dim in self.labels}

    @property
    def are_default(self) -> bool:
        """True if no option is set, so that the statistics are plain numbers."""
        return self.dims is None and self.by is None and not self.weights and not self.has_histogram


def _weights_of(
    cube: xr.Dataset, weights: Weights, chosen: Iterable[str]
) -> tuple[str | None, dict[str, xr.Variable]]:
    """Return the rule and the weights of each variable, averaged over dims it lacks."""
    if weights is None:
        return None, {}
    if isinstance(weights, xr.DataArray):
        check_aligned("weights", weights, cube)
    rules, of_variables = [], {}
    for name in chosen:
        of_cells = cell_weights(weights, cube[name], cube.variables).warn()
        if not of_cells.is_known and of_cells.rule != NO_LATITUDE:
            raise InvalidValueError(of_cells.rule.removeprefix("none, "))
        if of_cells.is_known:
            rules.append(of_cells.rule)
        if of_cells.array is not None:
            lacking = [dim for dim in of_cells.array.dims if dim not in cube[name].dims]
            variable = of_cells.array.variable
            of_variables[name] = variable.mean(lacking) if lacking else variable
    if not rules:
        raise InvalidValueError(
            f"weights='area' needs a latitude among the coordinates, got {list(cube.coords)}; name "
            "it 'lat', or set its units to 'degrees_north'"
        )
    return "; ".join(dict.fromkeys(rules)), of_variables


def check_free(by: str | None, dims: Iterable[Hashable]) -> None:
    """Refuse a cube with a dim named like that of the climatology."""
    if by is not None and by in dims:
        raise InvalidValueError(
            f"a climatology by {by!r} adds a dim {by!r}, which the cube already has, of "
            f"{list(dims)}; rename it, as with ds.rename({by}='lead_{by}')"
        )


def statistics_of_part(
    name: str,
    variable: xr.Variable,
    label: xr.Variable | None,
    part: str,
    options: FieldOptions,
) -> VariableStatistics:
    """Compute the statistics of a part of a variable, or of all without a label."""
    code: Any = PARTS.get(part)
    if label is not None and not set(label.dims) <= set(variable.dims):
        label, code = any_over_other_dims(label == code, variable.dims), True
    with prefixed(f"variable {name!r}"):
        if not options.are_default:
            return _field_statistics(name, variable, label, code, options)
        reader = CubeReader.of_variables({name: variable, _LABEL: label})
        sum_block = partial(_sum_whole_block, name, code)
        return reduce(VariableStatistics.merge, scan(reader, sum_block, blocks_of(reader)), _NONE)


def _sum_whole_block(name: str, code: Any, _: object, cells: Cells) -> VariableStatistics:
    return VariableStatistics.of(cells[name], _cells_of_part(cells, code))


def _cells_of_part(cells: Cells, code: Any) -> NDArray[np.bool_] | None:
    """Return which cells have a label; None if all are used."""
    if _LABEL not in cells:
        return None
    return np.asarray(cells[_LABEL] == code)


def _field_statistics(
    name: str,
    variable: xr.Variable,
    label: xr.Variable | None,
    code: Any,
    options: FieldOptions,
) -> FieldStatistics:
    """Compute the statistics of the cells of one variable whose label is `code`, or of all."""
    dims = variable.dims
    kept_dims = _kept_dims(variable, options)
    sizes = {dim: variable.sizes[dim] for dim in kept_dims}
    groups, time_axis = _groups_of_steps(variable, options), None
    if options.by is not None and groups is not None:
        time_axis = dims.index(groups.dims[0])
        sizes = {options.by: len(options.labels[options.by]), **sizes}
    shape = tuple(sizes.values())
    axes = tuple(axis for axis, dim in enumerate(dims) if dim not in kept_dims)
    bins = None
    if options.has_histogram:
        bins = default_bins(math.prod(shape))
    weights = options.weights.get(name)
    total = Moments.empty(shape)
    histograms: Histograms = {}
    reader = CubeReader.of_variables(
        {name: variable, _LABEL: label, _WEIGHTS: weights, _GROUPS: groups}
    )
    blocks = blocks_of(reader)
    sum_block = partial(_sum_block, name, code, axes, time_axis, bins)
    for block, sums in zip(blocks, scan(reader, sum_block, blocks), strict=True):
        kept_slices = tuple(block.slices[dim] for dim in kept_dims)
        for group, moments, histogram in sums:
            index: tuple[Any, ...] = kept_slices
            if groups is not None:
                index = (group, *kept_slices)
            _merge_entries(total, histograms, index, moments, histogram)
    whole = None
    if bins is not None:
        whole = _gathered(shape, bins, histograms, is_weighted=weights is not None)
    return FieldStatistics(
        **vars(total),
        dims=tuple(sizes),
        labels=options.labels_of(sizes),
        histogram=whole,
        weighting=options.weighting,
    )


def _kept_dims(variable: xr.Variable, options: FieldOptions) -> list[str]:
    """Return the dims of a variable that are not reduced over."""
    if options.dims is None:
        return []
    return [str(dim) for dim in variable.dims if dim not in options.dims]


def _groups_of_steps(variable: xr.Variable, options: FieldOptions) -> xr.Variable | None:
    """Return the group of each time step; None without a climatology, as without a time dim."""
    groups = options.groups
    if groups is None or groups.dims[0] not in variable.dims:
        return None
    return groups


def _merge_entries(
    total: Moments,
    histograms: Histograms,
    index: tuple[Any, ...],
    moments: Moments,
    histogram: Histogram | None,
) -> None:
    """Merge the sums of one group in a block into the entries at an index."""
    total.merge_at(index, moments)
    if histogram is None:
        return
    # two blocks have either the same index or no entry in common
    if str(index) in histograms:
        histogram = histograms[str(index)][1].merge(histogram)
    histograms[str(index)] = index, histogram


def _gathered(
    shape: tuple[int, ...], bins: int, histograms: Histograms, *, is_weighted: bool
) -> Histogram:
    """Return the histogram of all entries."""
    dtype: type[np.number[Any]] = np.int64
    if is_weighted:
        dtype = np.float64
    return Histogram.gathered(shape, bins, list(histograms.values()), dtype)


def _sum_block(
    name: str,
    code: Any,
    axes: tuple[int, ...],
    time_axis: int | None,
    bins: int | None,
    _: object,
    cells: Cells,
) -> list[tuple[int, Moments, Histogram | None]]:
    """Return moments along `axes`, and a histogram if `bins` is given, of each group in a block."""
    where = _cells_of_part(cells, code)
    sums = []
    for group, steps in _steps_by_group(cells.get(_GROUPS), time_axis):
        arrays: list[Any] = [cells[name], where, cells.get(_WEIGHTS)]
        for i, array in enumerate(arrays):
            if steps is not None and array is not None:
                arrays[i] = np.take(array, steps, time_axis)
        moments = Moments.of(arrays[0], axes, *arrays[1:])
        histogram = None if bins is None else block_histogram(axes, bins, *arrays)
        sums.append((group, moments, histogram))
    return sums


def _steps_by_group(
    groups: NDArray[Any] | None, time_axis: int | None
) -> Iterator[tuple[int, NDArray[np.intp] | None]]:
    """Yield the groups in a block, each with its positions along time, None for all."""
    if groups is None:
        yield 0, None
        return
    index: list[Any] = [0] * groups.ndim
    if time_axis is not None:
        index[time_axis] = slice(None)
    group_of_step = groups[tuple(index)]
    for group in np.unique(group_of_step):
        steps = np.flatnonzero(group_of_step == group)
        yield int(group), None if len(steps) == len(group_of_step) else steps


def block_histogram(
    axes: tuple[int, ...],
    bins: int,
    values: NDArray[Any],
    cells: NDArray[Any] | None = None,
    weights: NDArray[Any] | None = None,
) -> Histogram:
    """Return the histogram along `axes` of one group in a block."""
    counted = values
    if values.dtype not in (np.float32, np.float64):
        with np.errstate(invalid="ignore", over="ignore"):
            counted = values.astype(np.float64)
    unused = np.isinf(counted)
    if cells is not None:
        unused |= ~cells
    if weights is not None:
        unused |= weights == 0
    if unused.any():
        counted = np.where(unused, np.array(np.nan, counted.dtype), counted)

    def by_entry(array: NDArray[Any]) -> NDArray[Any]:
        last_axes = range(array.ndim - len(axes), array.ndim)
        moved = np.moveaxis(array, axes, last_axes)
        return moved.reshape(*moved.shape[: array.ndim - len(axes)], -1)

    return Histogram.of(by_entry(counted), bins, None if weights is None else by_entry(weights))
