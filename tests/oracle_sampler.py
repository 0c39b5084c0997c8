"""The slowest, most obvious sampler: a loop over every window, in plain numpy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import xarray as xr

from tests.oracle import cut, tiles, verdict


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
    window_size = [size.get(d, 1) for d in dims]
    stride = [n - overlap.get(d, 0) for d, n in zip(dims, window_size, strict=True)]
    for box in tiles(list(shape.values()), window_size, stride, ragged=True):
        counts["total"] += 1
        if any(stop - start < n for (start, stop), n in zip(box, window_size, strict=True)):
            counts["edge"] += 1
            continue
        window = {n: cells[n][cut(box)].copy() for n in cells}
        labels = set(window.pop("split").ravel().tolist())
        if 255 in labels:
            counts["buffer"] += 1
            continue
        if len(labels) > 1:
            counts["straddle"] += 1
            continue
        part = {1: "train", 0: "test", 2: "val"}[labels.pop()]
        found = _verdict(window, mask, drop_nan, drop_sample, math.prod(size.values()) == 1)
        counts[part if found == "kept" else found] += 1
        if found == "kept":
            samples[part].append((tuple(start for start, _ in box), window))
    return counts, samples


def _verdict(
    window: dict[str, np.ndarray],
    mask: str | None,
    drop_nan: str | None,
    drop_sample: bool,
    point: bool,
) -> str:
    inside = window.pop(mask).astype(bool) if mask else None
    if inside is not None and (point or (drop_sample and drop_nan != "masked")):
        if not inside.all():
            return "mask"
    elif inside is not None:
        for values in window.values():
            values[~inside] = np.nan
    return verdict(window, inside, drop_nan)
