"""Names that zarr stores and netCDF files can hold, and attributes that netCDF files can hold.

A zarr store loses a variable with another name, or cannot be opened again.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ml4cube.core.errors import InvalidValueError, listed

_MOST_BYTES = 255  # of the name of a folder
_RULE = (
    "without '/', '\\' and control characters, not empty, only dots, 'zarr.json' or beginning with "
    f"'__', and of at most {_MOST_BYTES} bytes"
)
_NETCDF_RULE = "begin with a letter, digit or '_' and end in no space"
# Attributes that the netCDF library keeps to itself.
_RESERVED = {
    "CLASS", "NAME", "DIMENSION_LIST", "REFERENCE_LIST",
    "_NCProperties", "_Netcdf4Dimid", "_Netcdf4Coordinates", "_nc3_strict",
}  # fmt: skip


def check_writable_names(names: Iterable[str], *, netcdf: bool = False) -> None:
    """Raise InvalidValueError unless a store, or a netCDF file, can hold all names."""
    distinct = dict.fromkeys(names)
    refused = [n for n in distinct if not _is_writable(n) or (netcdf and not _begins_and_ends(n))]
    if refused:
        rule = _RULE
        if netcdf:
            rule = f"{_RULE}, and for netCDF {_NETCDF_RULE}"
        raise InvalidValueError(
            f"names of variables, coordinates and dims that are written must be {rule}; got "
            f"{listed(refused)}; rename them (ds.rename)"
        )


def check_netcdf_attributes(names: Iterable[str]) -> None:
    """Raise InvalidValueError unless a netCDF file can hold attributes of all names."""
    refused = [
        name
        for name in dict.fromkeys(names)
        if name in _RESERVED or not _is_writable(name) or not _begins_and_ends(name)
    ]
    if refused:
        raise InvalidValueError(
            f"names of attributes for netCDF must be {_RULE}, {_NETCDF_RULE}, and not be one of "
            f"{sorted(_RESERVED)}; got {listed(refused)}; drop them, or write '.zarr'"
        )


def netcdf_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes; types that netCDF lacks (true, null, dicts) become JSON strings."""
    fitting = dict(attrs)
    for name, value in attrs.items():
        if not _fits_netcdf(value):
            fitting[name] = json.dumps(value)
    return fitting


def _fits_netcdf(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    scalars = all(type(item) in (str, int, float) for item in items)
    return scalars and np.array(items).dtype.kind in "iufU"


def _is_writable(name: str) -> bool:
    """Return True for a name that zarr's specification and file systems allow for a folder."""
    if not name.strip(".") or name.startswith("__") or name == "zarr.json":
        return False
    # zarr reads a backslash as a slash
    if "/" in name or "\\" in name or any(letter < " " or letter == "\x7f" for letter in name):
        return False
    try:
        return len(name.encode()) <= _MOST_BYTES
    except UnicodeEncodeError:  # half of a surrogate pair
        return False


def _begins_and_ends(name: str) -> bool:
    """Return True for a name that begins and ends as those of the netCDF library do."""
    begins = name[:1].isalnum() or name[:1] == "_" or name[:1] > "\x7f"
    return begins and not name.endswith(" ")
