"""Classes: the values of a variable that holds few of them, with their names."""

from __future__ import annotations

import math

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.sums.quantiles import Histogram

#: Integers of more different values are numbers.
MOST_CLASSES = 64


def class_fractions(array: xr.DataArray, histogram: Histogram) -> xr.Dataset | None:
    """Return the fraction and the name of each class; None if the values are numbers."""
    is_flag = bool({"flag_values", "flag_meanings"} & array.attrs.keys())
    if array.dtype.kind == "f" and not is_flag:
        return None
    used = ~np.isnan(histogram.edges)
    values, counts = histogram.edges[used], histogram.counts[used]
    if histogram.width > 0 or len(values) > MOST_CLASSES:
        return None
    names = _class_names(array)
    return xr.Dataset(
        {
            "class_fraction": ("class", counts / (counts.sum() or math.nan)),
            "class_name": ("class", [names.get(v, _as_text(v)) for v in values.tolist()]),
        },
        {"class": values},
    )


def _as_text(value: float) -> str:
    return str(int(value)) if value.is_integer() else f"{value:g}"


def _class_names(array: xr.DataArray) -> dict[float, str]:
    """Return the names of values that CF's attributes give."""
    if array.dtype.kind == "b":
        return {0.0: "False", 1.0: "True"}
    values: NDArray[np.float64] = np.ravel(array.attrs.get("flag_values", ())).astype(np.float64)
    meanings = str(array.attrs.get("flag_meanings", "")).split()
    return dict(zip(values.tolist(), meanings, strict=False))
