"""Statistics of a cube that keep dims, follow a climatology, are weighted, or know quantiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.sums.fields import FieldStatistics, Moments
from ml4cube.core.sums.quantiles import Histogram, default_bins
from ml4cube.preprocessing.blocks import Slices, each_block
from ml4cube.preprocessing.climatology import GROUPS, check_free, check_group, group_ids, time_dim
from ml4cube.preprocessing.cubes import check_known
from ml4cube.preprocessing.weights import Weights, cell_weights, fitted_weights


@dataclass(frozen=True)
class Form:
    """What statistics are asked for besides one mean and range per variable."""

    # Dims to sum up along; all if None.
    dims: tuple[str, ...] | None = None
    by: str | None = None
    # Each on some dims of the cube; a variable takes the one that fits it.
    weights: tuple[xr.Variable, ...] | None = None
    counted: bool = False
    # Group of each time step.
    groups: xr.Variable | None = None
    # Coordinate values of the cube's dims.
    labels: Mapping[str, NDArray[Any]] | None = None
    weighting: str | None = None

    @property
    def plain(self) -> bool:
        """Whether nothing is asked for."""
        return self.dims is None and self.by is None and self.weights is None and not self.counted


def form_of(
    cube: xr.Dataset,
    chosen: Iterable[str],
    dims: tuple[str, ...] | None,
    by: str | None,
    weights: Weights,
    counted: bool,
) -> Form:
    """Check what a user asked for."""
    check_group("by", by)
    check_free(by, cube.dims)
    if dims is not None:
        check_known("dims", dims, cube.dims)
    groups = None
    if by is not None:
        if dims is not None and time_dim(cube) not in dims:
            raise InvalidValueError(
                f"by={by!r} sums along {time_dim(cube)!r}, but dims={list(dims)} keeps it; "
                "name it in dims too"
            )
        groups = group_ids(cube, by)
    labels = {str(name): cube[str(name)].values for name in cube.indexes if name in cube.dims}
    weighting = None if weights is None else weights if isinstance(weights, str) else "given"
    found = cell_weights(cube, weights, chosen)
    return Form(dims, by, found, counted, groups, labels, weighting)


def field_statistics(
    variable: xr.Variable, where: xr.Variable | None, form: Form
) -> FieldStatistics:
    """Sum up one variable as the form asks."""
    plan = _Plan.of(variable, form)
    weights = None if form.weights is None else fitted_weights(form.weights, variable)
    groups = None
    if plan.grouped and form.groups is not None:
        groups = form.groups
    shape = tuple(plan.sizes.values())
    bins = default_bins(math.prod(shape)) if form.counted else None
    total = Moments.empty(shape)
    histograms: dict[str, tuple[Any, Histogram]] = {}
    work = partial(_sum_block, plan, bins)
    for slices, found in each_block(variable, [where, weights, groups], work):
        for group, moments, histogram in found:
            place = plan.place(slices, group)
            target = tuple(array[place] for array in total)
            merged = Moments(*target).merge(moments)
            for array, values in zip(target, merged, strict=True):
                array[...] = values
            if histogram is not None:
                # blocks cover the same places, or none in common
                before = histograms.get(str(place))
                together = histogram if before is None else before[1].merge(histogram)
                histograms[str(place)] = (place, together)
    labels = dict(form.labels or {})
    if plan.grouped:
        labels[str(form.by)] = GROUPS[str(form.by)]
    labels = {dim: labels[dim] for dim in plan.sizes if dim in labels}
    statistics = FieldStatistics(
        *total, dims=tuple(plan.sizes), labels=labels, weighting=form.weighting
    )
    if bins is not None:
        dtype = np.int64 if weights is None else np.float64
        whole = Histogram.gathered(shape, bins, list(histograms.values()), dtype)
        statistics = replace(statistics, histogram=whole)
    return statistics


@dataclass(frozen=True)
class _Plan:
    """How a block of one variable is summed up."""

    dims: tuple[str, ...]
    kept: tuple[str, ...]
    time_axis: int | None
    sizes: dict[str, int]

    @classmethod
    def of(cls, variable: xr.Variable, form: Form) -> _Plan:
        """Plan for a variable; one that lacks the time has no climatology."""
        dims = tuple(str(dim) for dim in variable.dims)
        kept = tuple(d for d in dims if form.dims is not None and d not in form.dims)
        sizes = {dim: variable.sizes[dim] for dim in kept}
        axis = None
        if form.groups is not None and form.groups.dims[0] in dims:
            axis = dims.index(str(form.groups.dims[0]))
            sizes = {str(form.by): len(GROUPS[str(form.by)]), **sizes}
        return cls(dims, kept, axis, sizes)

    @property
    def grouped(self) -> bool:
        """Whether the first dim is that of the climatology."""
        return self.time_axis is not None

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes of the variable that are summed along."""
        return tuple(i for i, dim in enumerate(self.dims) if dim not in self.kept)

    def place(self, slices: Slices, group: int) -> tuple[Any, ...]:
        """Where a block's sums belong in the field; `...` keeps a view of a single place."""
        front: tuple[Any, ...] = (group,) if self.grouped else ()
        return (*front, *(slices[dim] for dim in self.kept), ...)

    def of_group(
        self, arrays: tuple[NDArray[Any] | None, ...], groups: NDArray[Any] | None
    ) -> list[tuple[int, tuple[NDArray[Any] | None, ...]]]:
        """Cut a block by groups."""
        if self.time_axis is None or groups is None:
            return [(0, arrays)]
        axis = self.time_axis
        along = groups[tuple(slice(None) if i == axis else 0 for i in range(groups.ndim))]
        cut = []
        for group in np.unique(along):
            steps = np.flatnonzero(along == group)
            if len(steps) == len(along):
                cut.append((int(group), arrays))
                continue
            taken = tuple(None if a is None else np.take(a, steps, axis) for a in arrays)
            cut.append((int(group), taken))
        return cut


def _sum_block(
    plan: _Plan,
    bins: int | None,
    slices: Slices,
    values: NDArray[Any],
    where: NDArray[Any] | None,
    weights: NDArray[Any] | None,
    groups: NDArray[Any] | None,
) -> list[tuple[int, Moments, Histogram | None]]:
    """Sum up one block, group by group, and count its cells if `bins` says by how many."""
    found = []
    for group, arrays in plan.of_group((values, where, weights), groups):
        moments = Moments.of(arrays[0], plan.axes, arrays[1], arrays[2])  # type: ignore[arg-type]
        histogram = None if bins is None else _count_block(plan, bins, *arrays)
        found.append((group, moments, histogram))
    return found


def _count_block(
    plan: _Plan,
    bins: int,
    values: NDArray[Any] | None,
    where: NDArray[Any] | None,
    weights: NDArray[Any] | None,
) -> Histogram:
    """Count the cells of one block of a group."""
    assert values is not None
    cells = values
    if values.dtype not in (np.float32, np.float64):
        with np.errstate(invalid="ignore", over="ignore"):
            cells = values.astype(np.float64)
    unused = np.isinf(cells)
    if where is not None:
        unused |= ~where
    if weights is not None:
        unused |= weights == 0
    if unused.any():
        cells = np.where(unused, np.array(np.nan, cells.dtype), cells)
    kept = tuple(values.shape[plan.dims.index(dim)] for dim in plan.kept)

    def flat(array: NDArray[Any]) -> NDArray[Any]:
        last = tuple(range(array.ndim - len(plan.axes), array.ndim))
        return np.moveaxis(array, plan.axes, last).reshape(*kept, -1)

    return Histogram.of(flat(cells), bins, None if weights is None else flat(weights))
