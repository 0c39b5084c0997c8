"""Scores of a filling, from its errors on artificial gaps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.sums.pairs import PairSums
from ml4cube.cube.areas import cell_weights
from ml4cube.cube.chunks.blocks import chunk_sizes
from ml4cube.gap_filling.artificial import LENGTHS
from ml4cube.gap_filling.blocks import SCORES, SUMS, GapFiller
from ml4cube.gap_filling.methods import Method

_ASSUMES = (
    "gaps do not depend on the values that they hide; where they do, the true errors are larger, "
    "and the bias of the real gaps does not show"
)


def errors_and_gaps(
    filler: GapFiller, method: Method, array: xr.DataArray
) -> tuple[PairSums, NDArray[np.int64]]:
    """Return the errors on artificial gaps, and the cells in real ones, by length."""
    total, gaps = PairSums.empty(len(LENGTHS), SUMS), np.zeros(len(LENGTHS), np.int64)
    for block in filler.blocks(chunk_sizes(array.variable), method.uncut_dims):
        of_values, counts = filler.score(method, block.slices)
        total, gaps = total.merge(of_values), gaps + counts
    return total, gaps


def scores_of(
    cube: xr.Dataset, sums: Mapping[str, tuple[PairSums, NDArray[np.int64]]]
) -> xr.Dataset:
    """Return the scores of all variables, over all gaps and by their length."""
    by_metric: dict[str, list[Any]] = {metric: [] for metric in (*SCORES, "gaps")}
    for by_length, gaps in sums.values():
        overall = by_length.of_all_groups()
        for metric in SCORES:
            scores = np.concatenate([overall.score(metric), by_length.score(metric)])
            by_metric[metric].append(scores)
        by_metric["gaps"].append([gaps.sum(), *gaps])
    units = [str(cube[name].attrs.get("units", "")) for name in sums]
    weights = {name: cell_weights("area", cube[name], cube.variables).warn().rule for name in sums}
    return xr.Dataset(
        {metric: (("variable", "gap_length"), rows) for metric, rows in by_metric.items()},
        {
            "variable": list(sums),
            "units": ("variable", units),
            "gap_length": ("gap_length", ["all", *LENGTHS], {"long_name": "time steps of the gap"}),
        },
        {
            "weights": "; ".join(f"{name}: {how}" for name, how in weights.items()),
            "assumes": _ASSUMES,
        },
    )
