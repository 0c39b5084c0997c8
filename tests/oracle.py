"""The slowest, most obvious version of what the fast code computes, to compare with."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

# --- grid -------------------------------------------------------------------------------------


def tiles(
    shape: Sequence[int], tile: Sequence[int], stride: Sequence[int], ragged: bool
) -> list[tuple[tuple[int, int], ...]]:
    """(start, stop) along each dim of every tile, last dim fastest."""
    per_dim = []
    for n, t, s in zip(shape, tile, stride, strict=True):
        starts = range(0, n, s)
        per_dim.append([(a, min(a + t, n)) for a in starts if ragged or a + t <= n])
    return list(itertools.product(*per_dim))


def cut(box: tuple[tuple[int, int], ...]) -> tuple[slice, ...]:
    """What cuts a tile out of an array."""
    return tuple(slice(start, stop) for start, stop in box)


# --- statistics -------------------------------------------------------------------------------


def moments(values: NDArray[Any], where: NDArray[np.bool_] | None = None) -> dict[str, Any]:
    """Moments of the finite cells."""
    return weighted_moments(values, np.ones(values.shape) if where is None else where)


def weighted_moments(values: Any, weights: Any) -> dict[str, Any]:
    """Two passes in long double over the finite values; those of weight 0 are left out."""
    used = np.asarray(weights, np.longdouble) > 0
    x, w = (np.asarray(numbers, np.longdouble)[used] for numbers in (values, weights))
    finite = np.isfinite(x)
    gaps = int(np.isnan(x).sum())
    count = int(finite.sum())
    result = {"count": count, "gaps": gaps, "infs": x.size - count - gaps}
    if not count:
        return {**result, "mean": math.nan, "std": math.nan, "min": math.nan, "max": math.nan}
    x, w = x[finite], w[finite]
    mean = (x * w).sum() / w.sum()
    std = np.sqrt((w * (x - mean) ** 2).sum() / w.sum())
    return {**result, "mean": mean, "std": std, "min": x.min(), "max": x.max()}


# --- missing data -----------------------------------------------------------------------------


def is_gap(value: Any) -> bool:
    """Whether a cell holds no finite value."""
    return not math.isfinite(value)


def keep(
    samples: Mapping[str, NDArray[Any]], mask: NDArray[np.bool_] | None, policy: str | None
) -> list[str]:
    """Per sample: "kept", "gap" or "mask"."""
    n = len(next(iter(samples.values())))
    return [
        verdict(
            {name: values[i] for name, values in samples.items()},
            None if mask is None else mask[i],
            policy,
        )
        for i in range(n)
    ]


def verdict(sample: Mapping[str, Any], mask: Any, policy: str | None) -> str:
    """What becomes of one sample: "kept", "gap" or "mask"."""
    gaps = {name: [is_gap(x) for x in np.ravel(values)] for name, values in sample.items()}
    if policy is None:
        return "kept"
    if policy == "auto":
        return "gap" if any(any(flags) for flags in gaps.values()) else "kept"
    if policy == "if_all_nan":
        return "gap" if all(all(flags) for flags in gaps.values()) else "kept"
    inside = [bool(flag) for flag in np.ravel(mask)]
    if not any(inside):
        return "mask"
    for flags in gaps.values():
        if any(gap and here for gap, here in zip(flags, inside, strict=True)):
            return "gap"
    return "kept"


def windows(
    flags: NDArray[np.bool_], size: Sequence[int], stride: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], NDArray[np.bool_]]]:
    """Index and cells of every whole window."""
    for box in tiles(flags.shape, size, stride, ragged=False):
        index = tuple(start // s for (start, _), s in zip(box, stride, strict=True))
        yield index, flags[cut(box)]


def sample_means(values: NDArray[Any], fallback: float) -> NDArray[np.float64]:
    """Mean of the finite cells of each sample; `fallback` where there is none."""
    means = []
    for sample in values:
        finite = [float(x) for x in np.ravel(sample) if not is_gap(x)]
        means.append(math.fsum(finite) / len(finite) if finite else fallback)
    return np.array(means)


def quantile_bounds(
    values: Sequence[float], weights: Sequence[float], probability: float
) -> tuple[float, float]:
    """Least and greatest value that may be called the quantile: the cells' own, not between."""
    pairs = sorted((x, w) for x, w in zip(values, weights, strict=True) if w and math.isfinite(x))
    total, below = math.fsum(w for _, w in pairs), 0.0
    fits = []
    for x, w in pairs:
        # at least a share p of the weight is at or below x, at least 1 - p at or above it
        slack = 1e-9 * total
        if below + w >= probability * total - slack and below <= probability * total + slack:
            fits.append(x)
        below += w
    return (fits[0], fits[-1]) if fits else (math.nan, math.nan)


# --- climatology ------------------------------------------------------------------------------


def group_of(date: Any, by: str) -> Any:
    """Label of the group that a date (pandas or cftime) belongs to."""
    if by == "month":
        return date.month
    if by == "dayofyear":
        return date.timetuple().tm_yday if hasattr(date, "timetuple") else date.dayofyr
    return ("DJF", "MAM", "JJA", "SON")[date.month % 12 // 3]


def filled(
    sample: NDArray[Any], method: str, train: Sequence[float], const: float
) -> NDArray[np.float64]:
    """One sample with its gaps filled; NaN where noise may put any number of the train range."""
    train_mean = math.fsum(train) / len(train)
    finite = [float(x) for x in np.ravel(sample) if not is_gap(x)]
    stand_in = {
        "sample_mean": math.fsum(finite) / len(finite) if finite else train_mean,
        "mean": train_mean,
        "constant": const,
        "noise": math.nan,
    }[method]
    cells = [stand_in if is_gap(x) else float(x) for x in np.ravel(sample)]
    return np.array(cells).reshape(np.shape(sample))


def finest_bins(cells: Sequence[float], bins: int) -> tuple[list[float], list[int]]:
    """Lower edges and counts of the narrowest bins, 2**e wide, of which at most `bins` hold cells.

    In whole numbers of 2**-1022, step by step from bins that hold one normal number each.
    """
    numbers = [math.floor(Fraction(cell) * 2**1022) for cell in cells]
    for step in itertools.count():
        held = Counter(number >> step for number in numbers)
        if len(held) <= bins:
            edges = [float(Fraction(k << step, 2**1022)) for k in sorted(held)]
            return edges, [held[k] for k in sorted(held)]
    raise AssertionError("some width is enough")


def band_areas(latitudes: Any, steps: int = 200_000) -> np.ndarray:
    """Areas of rows in degrees, in units of 2 pi: rings of the sphere, each the nearest row's.

    A last row reaches as far beyond itself as towards its neighbour.
    """
    rows = np.asarray(latitudes, dtype=float)
    edges = np.linspace(-90, 90, steps + 1)
    ring = (edges[1:] + edges[:-1]) / 2
    nearest = np.abs(ring[:, None] - rows).argmin(1)
    low, *_, high = ordered = np.sort(rows)
    inside = (ring > 1.5 * low - ordered[1] / 2) & (ring < 1.5 * high - ordered[-2] / 2)
    area = np.cos(np.deg2rad(ring)) * np.deg2rad(180 / steps) * inside
    return np.bincount(nearest, area, len(rows))


def quadrilateral_areas(latitudes: Any, longitudes: Any, parts: int = 40) -> np.ndarray:
    """Areas of cells whose corners are means of four centres, cut into small plane parts.

    Beyond an edge there is the mirror image of the cell inside, along the great circle.
    """
    phi, theta = np.deg2rad(latitudes), np.deg2rad(longitudes)
    points = np.stack([np.cos(phi) * np.cos(theta), np.cos(phi) * np.sin(theta), np.sin(phi)], -1)

    def point(i: int, j: int) -> np.ndarray:
        for axis, k in enumerate((i, j)):
            n = points.shape[axis]
            if not 0 <= k < n:
                near, far = (0, 1) if k < 0 else (n - 1, n - 2)
                at = [(near, j), (far, j)] if axis == 0 else [(i, near), (i, far)]
                inner, outer = point(*at[0]), point(*at[1])
                return 2 * (inner @ outer) * inner - outer
        return points[i, j]

    def unit(vector: np.ndarray) -> np.ndarray:
        return vector / np.linalg.norm(vector, axis=-1, keepdims=True)

    areas = np.zeros(points.shape[:2])
    for i, j in np.ndindex(areas.shape):
        corner = {
            (di, dj): unit(sum(point(i + di + a, j + dj + b) for a in (0, 1) for b in (0, 1)))
            for di in (-1, 0)
            for dj in (-1, 0)
        }
        u, v = np.meshgrid(*[np.linspace(0, 1, parts + 1)] * 2, indexing="ij")
        inside = unit(
            ((1 - u) * (1 - v))[..., None] * corner[-1, -1]
            + (u * (1 - v))[..., None] * corner[0, -1]
            + (u * v)[..., None] * corner[0, 0]
            + ((1 - u) * v)[..., None] * corner[-1, 0]
        )
        one, other = inside[1:, 1:] - inside[:-1, :-1], inside[1:, :-1] - inside[:-1, 1:]
        areas[i, j] = np.linalg.norm(np.cross(one, other), axis=-1).sum() / 2
    return areas


def slow_rows(dates: Any, calendar: str, harmonics: int, has_hours: bool) -> list[list[float]]:
    """Harmonics of the year of each date, and two of the day that change with the season."""
    rows = []
    for date in dates:
        is_leap = calendar != "noleap" and date.year % 4 == 0
        length = 360 if calendar == "360_day" else 365 + is_leap
        of_day = (date.hour + date.minute / 60) / 24
        day_of_year = date.day_of_year if hasattr(date, "day_of_year") else date.dayofyr
        year = slow_waves((day_of_year - 1 + of_day) / length, harmonics)
        day = slow_waves(of_day, 2)[1:] if has_hours else []
        rows.append([*year, *day, *(a * b for a in year[1:3] for b in day)])
    return rows


def slow_waves(phase: float, harmonics: int) -> list[float]:
    """1, and cosine and sine of each harmonic."""
    row = [1.0]
    for k in range(1, harmonics + 1):
        row += [np.cos(2 * np.pi * k * phase), np.sin(2 * np.pi * k * phase)]
    return row


def slow_fit(rows: Any, values: Any) -> np.ndarray:
    """Least squares of each cell by itself, from the values that it has."""
    rows = np.array(rows)
    found = np.full_like(values, np.nan)
    for cell in range(values.shape[1]):
        known = np.isfinite(values[:, cell])
        if known.sum() >= 3 * rows.shape[1]:
            found[:, cell] = rows @ np.linalg.lstsq(rows[known], values[known, cell], rcond=1e-9)[0]
    return found
