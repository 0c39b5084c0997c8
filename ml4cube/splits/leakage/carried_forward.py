"""Find values carried forward or backward in time from train steps into held-out steps.

Filled gaps leave such cells. They are wherever gaps were, not in whole tiles, so a seeded sample of
locations and steps is compared cell by cell: a cell is unchanged if it equals the last train cell
before it at its location (or the first after it) and no held-out cell between differs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.split_plan import HELD_OUT, TRAIN
from ml4cube.splits.cube import CubeView, in_chunks
from ml4cube.splits.label_layout import Layout
from ml4cube.splits.leakage.case import Case
from ml4cube.splits.leakage.findings import Findings, percent

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

# Steps and cells in the sample.
_STEPS = 256
_CELLS = 1 << 18
# Values at more than this fraction of the locations (no rain) do not indicate a copy, nor do a few
# distinct values.
_COMMON = 0.01
_FEWEST_VALUES = 8
# If values were filled forward, the fraction of unchanged held-out cells exceeds that of train
# cells by more than this.
_MAX_CARRIED = 0.02


@dataclass(frozen=True)
class Carried:
    """Fractions of cells that equal the adjacent train step at their location."""

    # Fraction of the held-out cells; 0 if these have too few distinct values to tell.
    held_out: float
    # Fraction of the train cells: how often the variable is unchanged by nature.
    train: float


def check_carried(case: Case, findings: Findings) -> None:
    """Judge filled values: test cells that stay unchanged more often than train cells."""
    by_variable: dict[str, Carried] = {}
    if case.axes.time_dim is not None:
        by_variable = find_carried(case.view, case.layout, case.names, case.axes.time_dim)
    if not by_variable:
        return
    worst = max(by_variable.values(), key=lambda carried: carried.held_out - carried.train)
    meaning = "cells with the value of the last train step, or of the next, at their location; "
    meaning += "the limit depends on the fraction of such train cells"
    unit, status = "fraction of held-out cells", "ok"
    if worst.held_out - worst.train > _MAX_CARRIED:
        status = "leak"
        findings.leaks.append(
            f"{percent(worst.held_out)} of the held-out cells have the value of the adjacent train "
            f"step at their location, compared with {percent(worst.train)} of the train cells"
        )
    limit = worst.train + _MAX_CARRIED
    findings.row("cells carried forward", worst.held_out, unit, meaning, limit, status)


def find_carried(
    view: CubeView, layout: Layout, names: Iterable[str], dim: str
) -> dict[str, Carried]:
    """Compare held-out cells with the adjacent train steps, by variable."""
    by_variable: dict[str, Carried] = {}
    if dim not in layout.label.dims:
        return by_variable
    cells = _sample(view, layout, dim)
    label = layout.label.isel(cells, missing_dims="ignore")
    for name in names:
        array = view.ds[name]
        if set(array.dims) != set(view.dims) or array.dtype.kind not in "iuf":
            continue
        bare = xr.DataArray(in_chunks(array).variable).isel(cells).transpose(*cells)
        codes = label.broadcast_like(bare).transpose(*cells)
        steps = cells[dim].size
        carried = _compare(bare.values.reshape(steps, -1), codes.values.reshape(steps, -1))
        if carried is not None:
            by_variable[name] = carried
    return by_variable


def _sample(view: CubeView, layout: Layout, dim: str) -> dict[str, Ints]:
    """Return sampled positions along each dim, time first; edges between parts are included."""
    rng = np.random.default_rng(0)
    steps = np.arange(view.sizes[dim])
    if steps.size > _STEPS:
        edges = layout.run_starts[dim][1:]
        edges = rng.permutation(edges)[: _STEPS // 4]
        more = rng.integers(1, steps.size, _STEPS // 2 - edges.size)
        later = np.concatenate([edges, more])
        steps = np.unique(np.concatenate([later - 1, later]))
    sizes = {d: n for d, n in view.sorted_sizes.items() if d != dim}
    share = min(_CELLS / steps.size / math.prod(sizes.values()), 1.0) ** (1 / max(len(sizes), 1))
    others = {
        d: np.sort(rng.permutation(n)[: max(int(n * share), 1)]).astype(np.int64)
        for d, n in sizes.items()
    }
    return {dim: steps, **others}


def _compare(values: NDArray[Any], codes: NDArray[Any]) -> Carried | None:
    """Compare cells, (steps, locations), with the adjacent train cells."""
    train, held_out = codes == TRAIN, np.isin(codes, HELD_OUT)
    if not (train.any(axis=0) & held_out.any(axis=0)).any():
        return None
    finite = np.isfinite(values)
    forward = _unchanged(values, train, held_out)
    backward = _unchanged(values[::-1], train[::-1], held_out[::-1])[::-1]
    unchanged = finite & ~_is_common(values) & (forward | backward)
    if np.unique(values[unchanged & held_out]).size < _FEWEST_VALUES:
        unchanged &= train
    of_held_out, of_train = (
        float((unchanged & part).sum() / max((finite & part).sum(), 1))
        for part in (held_out, train)
    )
    return Carried(of_held_out, of_train)


def _unchanged(values: NDArray[Any], train: Bools, held_out: Bools) -> Bools:
    """Return which cells have kept the value of the last train cell."""
    steps = np.arange(len(values))[:, None]
    last_train = np.maximum.accumulate(np.where(train, steps, -1), axis=0)
    # The last train step before each cell, without the cell itself; -1 if there is none.
    last_train = np.concatenate([np.full_like(last_train[:1], -1), last_train[:-1]])
    index = np.maximum(last_train, 0)
    same = (last_train >= 0) & (np.take_along_axis(values, index, axis=0) == values)
    changes = np.cumsum(held_out & ~same, axis=0, dtype=np.int32)
    changes_since = changes - np.take_along_axis(changes, index, axis=0)
    return np.asarray(same & (train | (changes_since == 0)))


def _is_common(values: NDArray[Any]) -> Bools:
    """Return which values occur at many locations, at any time."""
    n = values.shape[1]
    code = np.unique(values, return_inverse=True)[1].reshape(values.shape).astype(np.int64)
    code_of_pair = np.unique(code * n + np.arange(n)) // n  # of distinct pairs of code and location
    return np.asarray((np.bincount(code_of_pair) > max(_COMMON * n, 1))[code])
