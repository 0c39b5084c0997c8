"""Classes: variables that hold labels, such as land cover or a cloud mask, rather than quantities.

Statistics, samples, losses, predictions, scores and insights all use these rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ml4cube.cube.masks_and_labels import RECIPE_ATTR

if TYPE_CHECKING:
    import xarray as xr

#: Integers of more different values are numbers.
MOST_CLASSES = 64
#: CF's attributes of labels.
FLAGS = ("flag_values", "flag_meanings", "flag_masks")


def is_flagged(attrs: Mapping[Any, Any]) -> bool:
    """Return True if CF's attributes say that a variable holds labels, also one of floats.

    xarray keeps attributes through arithmetic, so what has units, or was computed with a split
    label, has the flags of another variable.
    """
    is_computed = RECIPE_ATTR in attrs or attrs.get("units", "1") not in ("1", "")
    return not is_computed and any(key in attrs for key in FLAGS)


def holds_classes(variable: xr.Variable | xr.DataArray) -> bool:
    """Return True if a variable holds classes: booleans, integers, or labels with CF's flags.

    A variable with gaps that xarray has decoded is one of floats, and still has its flags.
    """
    return variable.dtype.kind in "iub" or is_flagged(variable.attrs)


def class_names(variable: xr.Variable | xr.DataArray) -> dict[float, str]:
    """Return the labels that CF's attributes list, with their names; none if they list none."""
    if variable.dtype.kind == "b":
        return {0.0: "False", 1.0: "True"}
    listed = np.ravel(variable.attrs.get("flag_values", ()))
    if variable.dtype.kind == "u" and listed.dtype.kind == "i":
        # netCDF has no unsigned bytes: xarray decodes the variable, but not its flags
        listed = listed.astype(variable.dtype)
    values = listed.astype(np.float64).tolist()
    meanings = str(variable.attrs.get("flag_meanings", "")).split()
    meanings += map(as_text, values[len(meanings) :])
    return dict(zip(values, meanings, strict=False))


def as_text(label: float) -> str:
    """Return a label as text, without a point if it is a whole number."""
    if float(label).is_integer():
        return str(int(label))
    return f"{label:g}"
