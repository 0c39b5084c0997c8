"""Fields of a cube averaged over some hundred tiles, to compare steps with one another."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import dask.array as da
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.distance.separation import nearest_on_axis
from ml4cube.core.split_plan import HELD_OUT, TRAIN
from ml4cube.splits.cube import CubeView, in_chunks
from ml4cube.splits.label_layout import Layout
from ml4cube.splits.residuals import days_and_year, has_year

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Most tiles along a side of the map, and most numbers of one variable that are kept (64 MB).
_LONGEST_SIDE = 16
_NUMBERS_AT_MOST = 1 << 23
# Most positions along other dims, such as levels and members.
_OTHERS = 4
_HARMONICS = 2


@dataclass(frozen=True, eq=False)
class Steps:
    """The time steps of a cube, as a label divides them."""

    dim: str
    # Steps all of whose cells are train, and steps all of whose cells are held out.
    train: Bools
    held_out: Bools
    # Mean, trend and cycles of the year as columns: (steps, columns).
    basis: Floats
    # Numbers of the month or day in the year; all 0 without two years of dates.
    season: NDArray[np.intp]

    @classmethod
    def of(cls, view: CubeView, layout: Layout, dim: str) -> Steps:
        """Read the parts and dates of the steps; no step is train or held out without a label."""
        n = view.sizes[dim]
        train, held_out = np.zeros((2, n), dtype=bool)
        if dim in layout.label.dims:
            has_train = layout.profiles[TRAIN, dim]
            has_held_out = np.logical_or.reduce([layout.profiles[code, dim] for code in HELD_OUT])
            train, held_out = has_train & ~has_held_out, has_held_out & ~has_train
        trend = np.linspace(-1.0, 1.0, n)
        columns = [np.ones(n), trend]
        season = np.zeros(n, dtype=np.intp)
        dates = days_and_year(view.ds, dim)
        if dates is not None and has_year(*dates):
            days, year = dates
            for harmonic in range(1, _HARMONICS + 1):
                angle = 2 * np.pi * harmonic * days / year
                columns += [np.cos(angle), np.sin(angle)]
            step = float(np.median(np.diff(days)))
            # steps of months have one number a month, whatever its length
            season = np.round((days % year) / max(step, 1.0)).astype(np.intp)
            season %= max(round(year / max(step, 1.0)), 1)
        return cls(dim, train, held_out, np.stack(columns, axis=1), season)

    def least_distance(self) -> int:
        """Return the fewest steps from a train step to a held-out one."""
        return least_apart(self.train, self.held_out)


def least_apart(train: Bools, held_out: Bools) -> int:
    """Return the fewest steps along a line from a train cell to a held-out one."""
    trained, tested = np.flatnonzero(train), np.flatnonzero(held_out)
    return int(np.abs(tested - trained[nearest_on_axis(tested, trained)]).min())


@dataclass(frozen=True, eq=False)
class CoarseFields:
    """Means of one variable over tiles, gaps left out: (steps, others, rows, columns)."""

    values: Floats
    # The dims of the map, along which the tiles lie.
    inner: tuple[str, ...]

    @classmethod
    def of(cls, view: CubeView, name: str, time_dim: str) -> CoarseFields | None:
        """Read a variable once; None if it lacks a dim or is too long to be kept."""
        array = view.ds[name]
        if set(array.dims) != set(view.dims) or array.dtype.kind not in "biuf":
            return None
        inner = [d for d in view.dims_of_map if d != time_dim]
        others = [dim for dim in view.sorted_sizes if dim != time_dim and dim not in inner]
        picked = {dim: slice(None, None, -(-view.sizes[dim] // _OTHERS)) for dim in others}
        bare = xr.DataArray(in_chunks(array).variable).isel(picked)
        bare = bare.transpose(time_dim, *others, *inner)
        fields = math.prod(bare.sizes[dim] for dim in (time_dim, *others))
        room = (_NUMBERS_AT_MOST // fields) ** (1 / max(len(inner), 1))
        if room < 1:
            return None
        tiles: dict[int, int] = {}
        for dim in inner:
            n = bare.sizes[dim]
            size = _tile_size(n, min(_LONGEST_SIDE, int(room)))
            first = n % size // 2
            bare = bare.isel({dim: slice(first, first + n // size * size)})
            tiles[bare.get_axis_num(dim)] = size
        data = bare.data if bare.chunks is not None else da.from_array(bare.values, chunks=-1)  # type: ignore[no-untyped-call]
        means = da.coarsen(_mean, data, tiles).compute()
        shape = (bare.sizes[time_dim], -1, *means.shape[1 + len(others) :])
        return cls(means.reshape(shape), tuple(inner))

    def flat(self) -> Floats:
        """Return (steps, cells)."""
        return self.values.reshape(len(self.values), -1)


def _tile_size(n: int, most: int) -> int:
    """Return the side of tiles that cover `n` cells, or all but as many at either end."""
    counts = range(min(n, most), 0, -1)
    exact = [count for count in counts if n % count == 0 and count > most // 2]
    centred = [count for count in counts if n % (n // count) % 2 == 0]
    return n // (exact + centred + [1])[0]


def _mean(cells: NDArray[Any], axis: tuple[int, ...] | None = None) -> Floats:
    """Return the means of finite cells, NaN where there is none."""
    is_finite = np.isfinite(cells)
    sums = np.where(is_finite, cells, 0).sum(axis=axis, dtype=np.float64)
    counts = is_finite.sum(axis=axis)
    means: Floats = np.full(sums.shape, np.nan)
    np.divide(sums, counts, out=means, where=counts > 0)
    return means


def anomalies(values: Floats, basis: Floats) -> Floats:
    """Return (steps, cells) without the best fit of the basis to each cell, gaps kept."""
    is_finite = np.isfinite(values)
    filled = np.where(is_finite, values, 0.0)
    normal = np.einsum("tk,tl,tc->ckl", basis, basis, is_finite, optimize=True)
    right = np.einsum("tk,tc->ck", basis, filled)
    fit = np.einsum("ckl,cl->ck", np.linalg.pinv(normal, rcond=1e-9, hermitian=True), right)
    return np.where(is_finite, values - basis @ fit.T, np.nan)
