"""Classes: the values of a variable that holds few of them, with their names."""

from __future__ import annotations

import math

import numpy as np
import xarray as xr

from ml4cube.core.sums.quantiles import Histogram
from ml4cube.cube.classes import MOST_CLASSES, as_text, class_names, holds_classes


def class_fractions(array: xr.DataArray, histogram: Histogram) -> xr.Dataset | None:
    """Return the fraction and the name of each class; None if the values are numbers."""
    if not holds_classes(array):
        return None
    used = ~np.isnan(histogram.edges)
    values, counts = histogram.edges[used], histogram.counts[used]
    if histogram.width > 0 or len(values) > MOST_CLASSES:
        return None
    names = class_names(array)
    return xr.Dataset(
        {
            "class_fraction": ("class", counts / (counts.sum() or math.nan)),
            "class_name": ("class", [names.get(v, as_text(v)) for v in values.tolist()]),
        },
        {"class": values},
    )
