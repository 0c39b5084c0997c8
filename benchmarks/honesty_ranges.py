"""Are ranges known as well as their intervals say, and blocks of isotropic fields square?

Gaussian fields with the covariance exp(-3 h / R). A case is one field with one seed: isotropic maps
of ranges 8 and 24, maps with a range three times as long along one dim, and lines, maps and cubes
of 3 to 30 ranges.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.splits import estimate_range, suggest_block_size

SEEDS = 12
RUNS = 25  # fields for each number of ranges
SQUARE_SHAPES = ((64, 64), (48, 96))
KINDS = ("series", "map", "cube")
NUMBERS_OF_RANGES = (3, 4, 5, 7, 10, 20, 30)
TOO_LARGE = ("interval: cube, 20 ranges", "interval: cube, 30 ranges")
Floats = NDArray[np.float64]


def smooth_noise(seed: int, shape: Sequence[int], reaches: Sequence[float]) -> Floats:
    """Draw a field of unit variance with the covariance exp(-3 h), h in ranges."""
    # On a torus so long that what is kept does not meet itself.
    sides = [max(2 * n, n + round(2 * reach)) for n, reach in zip(shape, reaches, strict=True)]
    squares = np.zeros(sides)
    for axis, (side, reach) in enumerate(zip(sides, reaches, strict=True)):
        cells = np.minimum(np.arange(side), side - np.arange(side)) / reach
        squares += np.expand_dims(cells**2, [a for a in range(len(sides)) if a != axis])
    power = np.maximum(np.fft.fftn(np.exp(-3 * np.sqrt(squares))).real, 0.0)
    noise = np.fft.fftn(np.random.default_rng(seed).normal(size=sides))
    field = np.fft.ifftn(noise * np.sqrt(power)).real
    return field[tuple(map(slice, shape))]


def cube_of(seed: int, shape: Sequence[int], reaches: Sequence[float]) -> xr.DataArray:
    """Return a field as a map, a series or both."""
    dims = {1: ("time",), 2: ("y", "x"), 3: ("time", "y", "x")}[len(shape)]
    return xr.DataArray(smooth_noise(seed, shape, reaches), dims=dims)


def blocks(seed: int, shape: tuple[int, int], reaches: tuple[float, float]) -> dict[str, Any]:
    """Return the suggested blocks of a map, and whether its directions differ."""
    cube = cube_of(seed, shape, reaches)
    sizes = suggest_block_size(cube)
    ranges = estimate_range(cube)
    return {
        "sides": list(sizes.values()),
        "apart": ranges.intervals["y"] != ranges.intervals["x"],
    }


def shape_of(kind: str, n_ranges: int) -> tuple[int, ...]:
    """Return the shape of a field in which a range has at least three cells."""
    return {
        "series": (max(200, 10 * n_ranges),),
        "map": (max(48, 3 * n_ranges),) * 2,
        "cube": (max(24, 3 * n_ranges), 24, 24),
    }[kind]


def interval(seed: int, kind: str, n_ranges: int) -> dict[str, Any]:
    """Return whether the interval of the first dim's range holds the true one."""
    shape = shape_of(kind, n_ranges)
    reach = shape[0] / n_ranges
    ranges = estimate_range(cube_of(seed, shape, [reach] * len(shape)))
    dim = next(iter(ranges))
    low, high = ranges.intervals[dim]
    return {
        "held": bool(low <= reach <= high),
        "told": bool(np.isfinite(ranges[dim])),
        "closed": bool(np.isfinite(high)),
    }


def keys() -> list[str]:
    """Return the names of the cases."""
    sizes = [f"{rows} × {columns}" for rows, columns in SQUARE_SHAPES]
    maps = [f"isotropic: {size}, range {reach}" for size in sizes for reach in (8, 24)]
    maps += ["anisotropic: 64 × 64, range 24 and 8", "anisotropic: 64 × 64, range 12 and 4"]
    fields = [f"interval: {kind}, {n} ranges" for kind in KINDS for n in NUMBERS_OF_RANGES]
    fields = [name for name in fields if name not in TOO_LARGE]
    return [f"{name}, seed {seed}" for name in maps for seed in range(SEEDS)] + [
        f"{name}, seed {seed}" for name in fields for seed in range(RUNS)
    ]


def run(key: str) -> dict[str, Any]:
    """Return what is said of one field."""
    logging.disable(logging.WARNING)
    try:
        return measure(key)
    finally:
        logging.disable(logging.NOTSET)


def measure(key: str) -> dict[str, Any]:
    """Return what is said of one field, and in the log."""
    case, _, seed = key.rpartition(", seed ")
    group, _, name = case.partition(": ")
    first, _, second = name.partition(", ")
    if group == "interval":
        return interval(int(seed), first, int(second.split()[0]))
    height, _, width = first.partition(" × ")
    reaches = [float(word) for word in second.split() if word.isdecimal()]
    return blocks(int(seed), (int(height), int(width)), (reaches[0], reaches[-1]))


def rows(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the bars: square blocks, directions told apart, intervals that hold the truth."""

    def of_group(start: str) -> list[dict[str, Any]]:
        return [case for key, case in results.items() if key.startswith(start)]

    isotropic, anisotropic = of_group("isotropic"), of_group("anisotropic")
    square = sum(max(case["sides"]) <= 1.5 * min(case["sides"]) for case in isotropic)
    apart = sum(case["apart"] for case in anisotropic)
    bars = [
        {
            "claim": "blocks of isotropic fields are square, to a factor of 1.5",
            "bar": "≥ 44 of 48",
            "measured": f"{square} of {len(isotropic)}",
            "met": square >= 44,
        },
        {
            "claim": "directions whose ranges differ threefold are told apart",
            "bar": "≥ 20 of 24",
            "measured": f"{apart} of {len(anisotropic)}",
            "met": apart >= 20,
        },
    ]
    for kind in KINDS:
        fields = {n: of_group(f"interval: {kind}, {n} ranges") for n in NUMBERS_OF_RANGES}
        held = {n: [case["held"] for case in cases] for n, cases in fields.items() if cases}
        share = sum(map(sum, held.values())) / max(sum(map(len, held.values())), 1)
        by_number = ", ".join(f"{n}: {np.mean(cases):.0%}" for n, cases in held.items())
        bars.append(
            {
                "claim": f"90 % intervals hold the true range of a {kind}",
                "bar": "85 to 95 %, 3 to 30 ranges",
                "measured": f"{share:.0%} ({by_number})",
                "met": 0.85 <= share <= 0.95,
            }
        )
    return bars
