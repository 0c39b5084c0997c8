"""Masks and split labels among the variables of a cube.

xarray keeps attributes through arithmetic, so an attribute alone is not proof: results computed
with a mask or a label have it too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.split_plan import EXCLUDED, PARTS

if TYPE_CHECKING:
    import xarray as xr

#: Name of the split label.
LABEL = "split"

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
    return name == LABEL or (
        RECIPE_ATTR in attrs and (dtype in (np.uint8, np.int8) or attrs.get(NAME_ATTR) == name)
    )


def check_label(name: str, variable: xr.Variable) -> None:
    """Refuse data that have the name of a label; reads no cells."""
    renamed = f"rename it if it is data, as with ds.rename({name}='{name}_data')"
    if variable.dtype.kind not in "biuf":
        raise InvalidTypeError(
            f"the split label {name!r} must hold numbers (train 1, test 0, val 2, excluded 255), "
            f"got dtype {variable.dtype}; {renamed}"
        )
    if RECIPE_ATTR in variable.attrs:
        return
    units = variable.attrs.get("units", "1")
    if units not in ("1", "") or "standard_name" in variable.attrs:
        said = {
            key: variable.attrs[key] for key in ("units", "standard_name") if key in variable.attrs
        }
        raise InvalidValueError(
            f"the split label {name!r} must have neither units nor standard_name, got {said}; "
            f"{renamed}"
        )


def check_codes(name: str, label: xr.Variable) -> None:
    """Refuse a label with other values than the codes of parts; reads its cells."""
    # the mean of validation 2 and test 0 is 1, which is train; floats may hold the codes, and gaps
    # after an alignment
    known = label.isnull()
    for code in (*PARTS.values(), EXCLUDED):
        known = known | (label == code)
    if not bool(known.all()):
        raise InvalidValueError(
            f"the split label {name!r} must hold {sorted(PARTS.values())} or {EXCLUDED}, got "
            "other numbers; if it was averaged with its cube, drop it before, as with "
            f"ds.drop_vars({name!r}), and split the coarser cube; if it is data, rename it"
        )
