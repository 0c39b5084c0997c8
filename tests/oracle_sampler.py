"""The slowest, most obvious sampler: a loop over every window, in plain numpy."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import xarray as xr


def windows_of(shape: dict[str, int], size: dict[str, int], overlap: dict[str, int]) -> Any:
    """First cells of every window that starts inside the cube."""
    starts = [range(0, n, size.get(d, 1) - overlap.get(d, 0)) for d, n in shape.items()]
    return itertools.product(*starts)


def sample_cube(
    ds: xr.Dataset,
    names: list[str],
    size: dict[str, int],
    overlap: dict[str, int],
    *,
    drop_nan: str | None = "auto",
    mask: str | None = None,
    drop_sample: bool = True,
) -> tuple[dict[str, int], dict[str, list[tuple[tuple[int, ...], dict[str, np.ndarray]]]]]:
    """Count what becomes of every window, and collect samples with their first cells, by part."""
    dims = max((ds[n] for n in names), key=lambda v: (v.ndim, v.size)).dims
    shape = {d: ds.sizes[d] for d in dims}
    full = xr.Dataset({n: ds[n] for n in [*names, "split", *([mask] if mask else [])]})
    template = xr.DataArray(np.zeros(tuple(shape.values())), dims=dims)
    cells = {n: v.broadcast_like(template).transpose(*dims).values for n, v in full.items()}
    counts = dict.fromkeys(
        ("total", "edge", "straddle", "buffer", "mask", "gap", "train", "test", "val"), 0
    )
    samples: dict[str, list[Any]] = {"train": [], "test": [], "val": []}
    for start in windows_of(shape, size, overlap):
        counts["total"] += 1
        box = tuple(slice(a, a + size.get(d, 1)) for a, d in zip(start, dims, strict=True))
        if any(b.stop > n for b, n in zip(box, shape.values(), strict=True)):
            counts["edge"] += 1
            continue
        window = {n: cells[n][box].copy() for n in cells}
        labels = set(window.pop("split").ravel().tolist())
        if 255 in labels:
            counts["buffer"] += 1
            continue
        if len(labels) > 1:
            counts["straddle"] += 1
            continue
        part = {1: "train", 0: "test", 2: "val"}[labels.pop()]
        reason = _reason(window, mask, drop_nan, drop_sample, math.prod(size.values()) == 1)
        if reason:
            counts[reason] += 1
            continue
        counts[part] += 1
        samples[part].append((start, window))
    return counts, samples


def _reason(
    window: dict[str, np.ndarray],
    mask: str | None,
    drop_nan: str | None,
    drop_sample: bool,
    point: bool,
) -> str | None:
    inside = window.pop(mask).astype(bool) if mask else None
    if inside is not None and (point or (drop_sample and drop_nan != "masked")):
        if not inside.all():
            return "mask"
    elif inside is not None:
        for values in window.values():
            values[~inside] = np.nan
    gaps = [~np.isfinite(values) for values in window.values()]
    if drop_nan == "auto" and any(g.any() for g in gaps):
        return "gap"
    if drop_nan == "if_all_nan" and all(g.all() for g in gaps):
        return "gap"
    if drop_nan == "masked":
        if not inside.any():
            return "mask"
        if any((g & inside).any() for g in gaps):
            return "gap"
    return None
