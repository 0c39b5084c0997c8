"""Values that stand on in time, from train steps into those held out, at one and the same place.

Gaps that were filled forward or backward leave such cells. They lie where gaps were, not in tiles:
a seeded sample of places and steps is compared cell by cell.
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
from ml4cube.splits.leakage.layout import Layout

Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]

# Steps and cells that are looked at together.
_STEPS = 256
_CELLS = 1 << 18
# A value at more than this share of the places (no rain) is no sign of a copy, nor are few values.
_COMMON = 0.01
_LEAST_VALUES = 8


@dataclass(frozen=True)
class Carried:
    """Cells whose place has kept its value since the last train step, or up to the next."""

    # Share of the cells held out; 0 where these hold too few different values to tell.
    held_out: float
    # Share of the train cells, which tells how often the variable stands still by nature.
    train: float

    @property
    def beyond_nature(self) -> float:
        """By how much cells held out stand still more often than train cells do."""
        return self.held_out - self.train


def find_carried(
    view: CubeView, layout: Layout, names: Iterable[str], dim: str
) -> dict[str, Carried]:
    """Compare cells held out with the train steps next to them."""
    found: dict[str, Carried] = {}
    if dim not in layout.label.dims:
        return found
    cells = _sample(view, layout, dim)
    label = layout.label.isel({d: i for d, i in cells.items() if d in layout.label.dims})
    for name in names:
        array = view.ds[name]
        if set(array.dims) != set(view.dims) or array.dtype.kind not in "iuf":
            continue
        bare = xr.DataArray(in_chunks(array).variable).isel(cells).transpose(*cells)
        codes = label.broadcast_like(bare).transpose(*cells)
        steps = cells[dim].size
        carried = _compare(bare.values.reshape(steps, -1), codes.values.reshape(steps, -1))
        if carried is not None:
            found[name] = carried
    return found


def _sample(view: CubeView, layout: Layout, dim: str) -> dict[str, Ints]:
    """Positions along each dim, time first; where steps are left out, edges of parts are not."""
    rng = np.random.default_rng(0)
    steps = np.arange(view.sizes[dim])
    if steps.size > _STEPS:
        edges = layout.starts[dim][1:]
        edges = rng.permutation(edges)[: _STEPS // 4]
        more = rng.integers(1, steps.size, _STEPS // 2 - edges.size)
        later = np.concatenate([edges, more])
        steps = np.unique(np.concatenate([later - 1, later]))
    sizes = {d: n for d, n in view.canonical.items() if d != dim}
    share = min(_CELLS / steps.size / math.prod(sizes.values()), 1.0) ** (1 / max(len(sizes), 1))
    places = {
        d: np.sort(rng.permutation(n)[: max(int(n * share), 1)]).astype(np.int64)
        for d, n in sizes.items()
    }
    return {dim: steps, **places}


def _compare(values: NDArray[Any], codes: NDArray[Any]) -> Carried | None:
    """Compare cells, (steps, places), with the train cells next to them."""
    train, held_out = codes == TRAIN, np.isin(codes, HELD_OUT)
    if not (train.any(axis=0) & held_out.any(axis=0)).any():
        return None
    known = np.isfinite(values)
    backward = _stands(values[::-1], train[::-1], held_out[::-1])[::-1]
    still = known & ~_common(values) & (_stands(values, train, held_out) | backward)
    if np.unique(values[still & held_out]).size < _LEAST_VALUES:
        still &= train
    held, trained = (
        float((still & part).sum() / max((known & part).sum(), 1)) for part in (held_out, train)
    )
    return Carried(held, trained)


def _stands(values: NDArray[Any], train: Bools, held_out: Bools) -> Bools:
    """Whether cells, and those held out before them, have the value of the last train cell."""
    steps = np.arange(len(values))[:, None]
    last = np.maximum.accumulate(np.where(train, steps, -1), axis=0)
    last = np.concatenate([np.full_like(last[:1], -1), last[:-1]])
    at = np.maximum(last, 0)
    same = (last >= 0) & (np.take_along_axis(values, at, axis=0) == values)
    changes = np.cumsum(held_out & ~same, axis=0, dtype=np.int32)
    since = changes - np.take_along_axis(changes, at, axis=0)
    return np.asarray(same & (train | (since == 0)))


def _common(values: NDArray[Any]) -> Bools:
    """Whether a value stands at many places, if at some other time."""
    places = values.shape[1]
    which = np.unique(values, return_inverse=True)[1].reshape(values.shape).astype(np.int64)
    seen = np.unique(which * places + np.arange(places)) // places
    return np.asarray((np.bincount(seen) > max(_COMMON * places, 1))[which])
