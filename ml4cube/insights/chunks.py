"""Chunks of a variable, and what reading a window of it costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import xarray as xr

from ml4cube.core.grid import Grid
from ml4cube.cube.chunks.blocks import chunk_sizes


class WindowReads(NamedTuple):
    """What reading windows costs: chunks read, mean and most, and cells read per cell used."""

    chunks_per_window: float
    most_chunks_per_window: float
    read_amplification: float


def window_reads(
    variable: xr.Variable, sample_size: Mapping[str, int], overlap: Mapping[str, int]
) -> WindowReads:
    """Return what reading each window alone costs; NaN for a variable in memory."""
    chunks = chunk_sizes(variable)
    if not chunks:
        return WindowReads(math.nan, math.nan, math.nan)
    sizes = {str(dim): n for dim, n in variable.sizes.items()}
    windows = Grid.windows(
        sizes, {dim: n for dim, n in sample_size.items() if dim in sizes}, overlap
    )
    chunks_per_window = most_chunks_per_window = amplification = 1.0
    # windows lie on a grid, so means over all of them are products of those along each dim
    for dim, n, size, step in zip(
        windows.dims, windows.shape, windows.tile, windows.stride, strict=True
    ):
        starts = np.arange(0, n - size + 1, step)
        chunk = min(chunks.get(dim, n), n)
        first, end = starts // chunk, -(-(starts + size) // chunk)
        chunks_per_window *= float(np.mean(end - first))
        most_chunks_per_window *= float(np.max(end - first))
        cells_read = np.minimum(end * chunk, n) - first * chunk
        amplification *= float(np.mean(cells_read)) / size
    return WindowReads(chunks_per_window, most_chunks_per_window, amplification)
