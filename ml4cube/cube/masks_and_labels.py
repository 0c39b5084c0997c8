"""Masks and split labels among the variables of a cube.

xarray keeps attributes through arithmetic, so an attribute alone is not proof: results computed
with a mask or a label have it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

#: Name of the mask variable where none is given.
FILTER_VAR = "filter_mask"
#: Name of the variable that a DataArray without a name becomes.
DATA_VAR = "data"
#: Attribute of a mask.
ROLE_ATTR = "ml4cube_role"
#: Attribute of a split label: its recipe.
RECIPE_ATTR = "ml4cube_split"
#: Attribute with the name that a mask or label was made with.
NAME_ATTR = "ml4cube_name"


def is_mask(
    name: object, dtype: np.dtype[Any], attrs: Mapping[Any, Any], filter_var: str | None = None
) -> bool:
    """Return True if a variable is a mask rather than data, as the one called `filter_var` is."""
    return name in (FILTER_VAR, filter_var) or (
        attrs.get(ROLE_ATTR) == "mask" and (dtype == np.bool_ or attrs.get(NAME_ATTR) == name)
    )


def is_label(name: object, dtype: np.dtype[Any], attrs: Mapping[Any, Any]) -> bool:
    """Return True if a variable is a split label rather than data."""
    # old netCDF files have no unsigned bytes
    return name == "split" or (
        RECIPE_ATTR in attrs and (dtype in (np.uint8, np.int8) or attrs.get(NAME_ATTR) == name)
    )
