"""Statistics that keep dims, follow a climatology, are weighted, or have quantiles.

Their numbers are arrays with one entry for each month, level or pixel. The sums of every block are
merged into the entries of its cells.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Self

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, check_choice
from ml4cube.core.scaling import GROUPS, dated_dim, group_numbers
from ml4cube.core.sums.fields import FieldStatistics, Moments
from ml4cube.core.sums.quantiles import Histogram, default_bins
from ml4cube.preprocessing.area_weights import Weights, cell_weights
from ml4cube.preprocessing.blocks import Slices, each_block
from ml4cube.preprocessing.cubes import check_known


@dataclass(frozen=True)
class FieldOptions:
    """Options of the statistics of a cube."""

    # Dims to reduce over; all if None.
    dims: tuple[str, ...] | None
    # The climatology, and the group of each time step.
    by: str | None
    groups: xr.Variable | None
    # Kind of the weights, and those of the cells of each variable; none if not weighted.
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
        return cls(
            dims=dims,
            by=by,
            groups=groups,
            weighting="given" if isinstance(weights, xr.DataArray) else weights,
            weights=cell_weights(cube, weights, chosen),
            has_histogram=has_histogram,
            labels=labels,
        )

    @property
    def are_default(self) -> bool:
        """True if no option is set, so that the statistics are plain numbers."""
        return self.dims is None and self.by is None and not self.weights and not self.has_histogram


def check_free(by: str | None, dims: Iterable[Hashable]) -> None:
    """Refuse a cube with a dim named like that of the climatology."""
    if by is not None and by in dims:
        raise InvalidValueError(
            f"a climatology by {by!r} adds a dim {by!r}, which the cube already has, of "
            f"{list(dims)}; rename it, as with ds.rename({by}='lead_{by}')"
        )


def field_statistics(
    name: str, variable: xr.Variable, cells: xr.Variable | None, options: FieldOptions
) -> FieldStatistics:
    """Compute the statistics of one variable from some of its cells, or all if None."""
    reduction = _Reduction.of(variable, options)
    weights = options.weights.get(name)
    groups = options.groups if reduction.has_groups else None
    shape = tuple(reduction.sizes.values())
    bins = default_bins(math.prod(shape)) if options.has_histogram else None
    total = Moments.empty(shape)
    histograms: dict[str, tuple[Any, Histogram]] = {}
    sum_block = partial(_sum_block, reduction, bins)
    for slices, sums in each_block(variable, [cells, weights, groups], sum_block):
        for group, moments, histogram in sums:
            index = reduction.index(slices, group)
            entries = Moments(*(array[index] for array in total))
            for array, merged in zip(entries, entries.merge(moments), strict=True):
                array[...] = merged
            if histogram is not None:
                # two blocks have either the same index or no entry in common
                if str(index) in histograms:
                    histogram = histograms[str(index)][1].merge(histogram)
                histograms[str(index)] = index, histogram
    statistics = FieldStatistics(
        *total,
        dims=tuple(reduction.sizes),
        labels={dim: options.labels[dim] for dim in reduction.sizes if dim in options.labels},
        weighting=options.weighting,
    )
    if bins is None:
        return statistics
    dtype = np.int64 if weights is None else np.float64
    whole = Histogram.gathered(shape, bins, list(histograms.values()), dtype)
    return replace(statistics, histogram=whole)


@dataclass(frozen=True)
class _Reduction:
    """Axes of a variable over which it is reduced, and the shape of its statistics."""

    dims: tuple[str, ...]
    kept_dims: tuple[str, ...]
    # Axis of the climatology's groups, if the variable has it.
    time_axis: int | None
    # Of the statistics: the climatology, if any, and the kept dims.
    sizes: dict[str, int]

    @classmethod
    def of(cls, variable: xr.Variable, options: FieldOptions) -> Self:
        """Apply the options to a variable; one without a time dim has no climatology."""
        dims = tuple(str(dim) for dim in variable.dims)
        kept = tuple(d for d in dims if options.dims is not None and d not in options.dims)
        sizes = {dim: variable.sizes[dim] for dim in kept}
        time_axis = None
        if options.by is not None and options.groups is not None:
            (time_dim,) = options.groups.dims
            if time_dim in dims:
                time_axis = dims.index(str(time_dim))
                sizes = {options.by: len(options.labels[options.by]), **sizes}
        return cls(dims, kept, time_axis, sizes)

    @property
    def has_groups(self) -> bool:
        """True if the first dim of the statistics is that of the climatology."""
        return self.time_axis is not None

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes of the variable to reduce over."""
        return tuple(axis for axis, dim in enumerate(self.dims) if dim not in self.kept_dims)

    def index(self, slices: Slices, group: int) -> tuple[Any, ...]:
        """Return the index of a block's sums in the statistics."""
        # `...` makes a single entry a view, too
        front: tuple[Any, ...] = (group,) if self.has_groups else ()
        return (*front, *(slices[dim] for dim in self.kept_dims), ...)

    def steps_by_group(
        self, groups: NDArray[Any] | None
    ) -> Iterator[tuple[int, NDArray[np.intp] | None]]:
        """Yield the groups in a block, each with its positions along time, None for all."""
        if groups is None:
            yield 0, None
            return
        along_time = [slice(None) if i == self.time_axis else 0 for i in range(groups.ndim)]
        group_of_step = groups[tuple(along_time)]
        for group in np.unique(group_of_step):
            steps = np.flatnonzero(group_of_step == group)
            yield int(group), None if len(steps) == len(group_of_step) else steps


def _sum_block(
    reduction: _Reduction,
    bins: int | None,
    values: NDArray[Any],
    cells: NDArray[Any] | None,
    weights: NDArray[Any] | None,
    groups: NDArray[Any] | None,
) -> list[tuple[int, Moments, Histogram | None]]:
    """Return moments, and a histogram if `bins` is given, of every group in a block."""
    sums = []
    for group, steps in reduction.steps_by_group(groups):
        arrays: list[Any] = [values, cells, weights]
        if steps is not None:
            arrays = [a if a is None else np.take(a, steps, reduction.time_axis) for a in arrays]
        moments = Moments.of(arrays[0], reduction.axes, *arrays[1:])
        histogram = None if bins is None else _histogram(reduction, bins, *arrays)
        sums.append((group, moments, histogram))
    return sums


def _histogram(
    reduction: _Reduction,
    bins: int,
    values: NDArray[Any],
    cells: NDArray[Any] | None,
    weights: NDArray[Any] | None,
) -> Histogram:
    """Return the histogram of one group in a block."""
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
    kept_shape = tuple(values.shape[reduction.dims.index(dim)] for dim in reduction.kept_dims)

    def by_entry(array: NDArray[Any]) -> NDArray[Any]:
        last_axes = tuple(range(array.ndim - len(reduction.axes), array.ndim))
        return np.moveaxis(array, reduction.axes, last_axes).reshape(*kept_shape, -1)

    return Histogram.of(by_entry(counted), bins, None if weights is None else by_entry(weights))
