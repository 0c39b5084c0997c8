"""Statistics that keep dims, follow a climatology, are weighted, or have quantiles."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

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
class Form:
    """Options of statistics: kept dims, climatology, weights, quantiles."""

    # Dims to reduce over; all if None.
    dims: tuple[str, ...] | None = None
    by: str | None = None
    # Of each variable, if there are any.
    weights: Mapping[str, xr.Variable] = field(default_factory=dict)
    # Whether to keep a histogram.
    counted: bool = False
    # Group of each time step.
    groups: xr.Variable | None = None
    # Coordinate values of the cube's dims.
    labels: Mapping[str, NDArray[Any]] | None = None
    weighting: str | None = None

    @property
    def plain(self) -> bool:
        """True if no option is set."""
        return self.dims is None and self.by is None and not self.weights and not self.counted


def form_of(
    cube: xr.Dataset,
    chosen: Iterable[str],
    dims: tuple[str, ...] | None,
    by: str | None,
    weights: Weights,
    counted: bool,
) -> Form:
    """Check the options."""
    check_choice("by", by, (*GROUPS, None))
    check_free(by, cube.dims)
    if dims is not None:
        check_known("dims", dims, cube.dims)
    groups = None
    if by is not None:
        if dims is not None and _time_dim(cube) not in dims:
            raise InvalidValueError(
                f"dims must include {_time_dim(cube)!r} if by={by!r}, got {list(dims)}"
            )
        groups = _group_ids(cube, by)
    labels = {str(name): cube[str(name)].values for name in cube.indexes if name in cube.dims}
    weighting = None if weights is None else weights if isinstance(weights, str) else "given"
    found = cell_weights(cube, weights, chosen)
    return Form(dims, by, found, counted, groups, labels, weighting)


def check_free(by: str | None, dims: Iterable[Hashable]) -> None:
    """Refuse a cube with a dim named like that of the climatology."""
    if by is not None and by in dims:
        raise InvalidValueError(
            f"a climatology by {by!r} adds a dim {by!r}, which the cube already has, of "
            f"{list(dims)}; rename it, as with ds.rename({by}='lead_{by}')"
        )


def _time_dim(cube: xr.Dataset) -> str:
    """Return the time dim: the one whose coordinate holds dates."""
    own = {str(name): index.values for name, index in cube.indexes.items() if name in cube.dims}
    return dated_dim(own, list(cube.dims))


def _group_ids(cube: xr.Dataset, by: str) -> xr.Variable:
    """Return the group number of each time step."""
    dim = _time_dim(cube)
    when = cube[dim]
    if bool(when.isnull().any()):
        raise InvalidValueError(f"{dim!r} has missing dates; drop those steps")
    return xr.Variable((dim,), group_numbers(when.values, by))


def field_statistics(
    name: str, variable: xr.Variable, where: xr.Variable | None, form: Form
) -> FieldStatistics:
    """Compute the statistics of one variable."""
    plan = _Plan.of(variable, form)
    weights = form.weights.get(name)
    groups = form.groups if plan.grouped else None
    shape = tuple(plan.sizes.values())
    bins = default_bins(math.prod(shape)) if form.counted else None
    total = Moments.empty(shape)
    histograms: dict[str, tuple[Any, Histogram]] = {}
    work = partial(_sum_block, plan, bins)
    for slices, found in each_block(variable, [where, weights, groups], work):
        for group, moments, histogram in found:
            entries = plan.entries(slices, group)
            target = tuple(array[entries] for array in total)
            merged = Moments(*target).merge(moments)
            for array, values in zip(target, merged, strict=True):
                array[...] = values
            if histogram is not None:
                # two blocks cover either the same entries or none in common
                before = histograms.get(str(entries))
                together = histogram if before is None else before[1].merge(histogram)
                histograms[str(entries)] = (entries, together)
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
    """Axes of one variable, and the shape of its statistics."""

    dims: tuple[str, ...]
    kept: tuple[str, ...]
    time_axis: int | None
    sizes: dict[str, int]

    @classmethod
    def of(cls, variable: xr.Variable, form: Form) -> _Plan:
        """Make the plan of a variable; one without a time dim has no climatology."""
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
        """True if the first dim is that of the climatology."""
        return self.time_axis is not None

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes of the variable to reduce over."""
        return tuple(i for i, dim in enumerate(self.dims) if dim not in self.kept)

    def entries(self, slices: Slices, group: int) -> tuple[Any, ...]:
        """Index of a block's sums in the result; `...` makes a single entry a view."""
        front: tuple[Any, ...] = (group,) if self.grouped else ()
        return (*front, *(slices[dim] for dim in self.kept), ...)

    def of_group(
        self, arrays: tuple[NDArray[Any] | None, ...], groups: NDArray[Any] | None
    ) -> list[tuple[int, tuple[NDArray[Any] | None, ...]]]:
        """Split a block by groups of the climatology."""
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
    values: NDArray[Any],
    where: NDArray[Any] | None,
    weights: NDArray[Any] | None,
    groups: NDArray[Any] | None,
) -> list[tuple[int, Moments, Histogram | None]]:
    """Return moments, and a histogram if `bins` is given, of every group in a block."""
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
    """Return the histogram of one group in a block."""
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
