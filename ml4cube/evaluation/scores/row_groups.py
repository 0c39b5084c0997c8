"""`RowGroups`: the sums of a scorecard by the labels that are asked for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import date_keys
from ml4cube.core.metric_registry import Floats
from ml4cube.core.sums.pairs import combined, merged, merged_along
from ml4cube.cube.coordinates import LEAD
from ml4cube.evaluation.sums.named_sums import CODE

_MOST_NUMBERS = 2**24  # of all sums by sample that are in memory at a time


class RowGroups:
    """Sums of a variable by model, sample, lead and label, merged over labels not asked for."""

    def __init__(self, rows: xr.Dataset, by: Sequence[str]) -> None:
        self._rows = rows
        self._sample_dim, _, *cell_labels = (str(dim) for dim in rows["weight"].dims[1:])
        # of each sample and lead, then of cells
        of_rows = [name for name in by if name not in cell_labels]
        self._of_cells = [name for name in by if name in cell_labels]
        self._other_labels = [name for name in cell_labels if name not in by]
        self.of_dates = [name for name in of_rows if name not in (self._sample_dim, LEAD)]
        self.dims = (*of_rows, *self._of_cells)
        self.coords = _coords(rows, self.dims)
        self.shape = tuple(rows.sizes[name] for name in self.dims)
        # of dates and lead times, and labels of cells
        self.group_shape = (_size_along(rows, of_rows), _size_along(rows, self._of_cells))
        self._codes = self._codes_of_rows(of_rows)

    def _codes_of_rows(self, names: Sequence[str]) -> NDArray[Any]:
        """Return the group of each sample and lead by some labels, -1 for none."""
        rows = self._rows
        n, leads = rows.sizes[self._sample_dim], rows.sizes[LEAD]
        own_codes = {self._sample_dim: np.arange(n)[:, None], LEAD: np.arange(leads)[None, :]}
        codes = {name: rows[name + CODE].values for name in self.of_dates} | own_codes
        group = combined((codes[name], rows.sizes[name]) for name in names)
        return np.broadcast_to(group, (n, leads))

    @property
    def has_several_dates(self) -> bool:
        """False if each sample is a group of its own."""
        return self._sample_dim not in self.dims

    @cached_property
    def longest_leads(self) -> Floats:
        """Longest lead time of each group, in steps between its samples; at least 1."""
        dates = date_keys(self._rows[self._sample_dim].values)[0]
        ahead = np.median(self._rows["elapsed"].values, axis=0)
        steps = np.ones(self.group_shape[0])
        for group in range(len(steps)):
            is_in = self._codes == group
            of_group = dates[is_in.any(1)]
            if len(of_group) > 1:
                # months differ in length
                longest = ahead[is_in.any(0)].max() / np.median(np.diff(of_group))
                steps[group] = max(1, math.ceil(longest - 0.25))
        return steps

    def parts(self) -> Iterator[tuple[tuple[slice, slice], dict[str, Floats]]]:
        """Yield the sums of some groups, shape (samples, models, groups, labels of cells).

        All samples are merged if each is a group of its own. Sums of classes have a last axis.
        """
        sums = self._arrays()
        n, _, n_models, n_labels = sums["weight"].shape
        if not self.has_several_dates:
            n = 1
        numbers = sum(math.prod(array.shape[4:]) for array in sums.values())
        most = max(1, _MOST_NUMBERS // (n * n_models * numbers))
        for labels in _slices(n_labels, most):
            size = max(1, most // (labels.stop - labels.start))
            for groups in _slices(self.group_shape[0], size):
                of_labels = {name: array[:, :, :, labels] for name, array in sums.items()}
                yield (groups, labels), self._of_groups(of_labels, groups, n)

    def _arrays(self) -> dict[str, Floats]:
        """Return the sums, shape (samples, leads, models, labels of cells, [classes])."""
        rows = self._rows
        dims = (self._sample_dim, LEAD, "model", *self._of_cells, *self._other_labels)
        sizes = [_size_along(rows, names) for names in (self._of_cells, self._other_labels)]
        sums = {}
        for name, array in rows.data_vars.items():
            if set(dims) <= set(array.dims):
                ordered = array.transpose(*dims, ...)
                shape = (*ordered.shape[:3], *sizes, *ordered.shape[len(dims) :])
                sums[str(name)] = ordered.values.reshape(shape)
        return merged_along(sums, 4)

    def _of_groups(self, sums: dict[str, Floats], groups: slice, n: int) -> dict[str, Floats]:
        """Merge the leads of each sample, or of all if n is 1, that are in a group."""
        n_groups = groups.stop - groups.start
        total = {name: np.zeros((n, n_groups, *array.shape[2:])) for name, array in sums.items()}
        for lead in range(self._codes.shape[1]):
            code = self._codes[:, lead]
            samples = np.flatnonzero((code >= groups.start) & (code < groups.stop))
            # If n is 1, each sample has a group of its own, so no position occurs twice.
            at: Any = (samples % n, code[samples] - groups.start)
            ours = {name: array[at] for name, array in total.items()}
            theirs = {name: array[samples, lead] for name, array in sums.items()}
            for name, values in merged(ours, theirs).items():
                total[name][at] = values
        return {name: np.moveaxis(array, 1, 2) for name, array in total.items()}


def _slices(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]


def _coords(rows: xr.Dataset, dims: Iterable[str]) -> dict[str, xr.Variable]:
    """Return the coordinates along dims that have one."""
    return {
        name: rows[name].reset_coords(drop=True).variable for name in dims if name in rows.coords
    }


def _size_along(rows: xr.Dataset, dims: Iterable[str]) -> int:
    return math.prod(rows.sizes[name] for name in dims)
