"""Groups of a climatology: the month, season or day of the year of each time step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import xarray as xr

from ml4cube.core.errors import InvalidValueError, check_choice
from ml4cube.core.scaling import GROUPS as GROUPS
from ml4cube.core.scaling import dated_dim, group_numbers


def check_group(argument: str, by: str | None) -> None:
    """Refuse an unknown climatology."""
    check_choice(argument, by, (*GROUPS, None))


def check_free(by: str | None, dims: Iterable[Hashable]) -> None:
    """Refuse a cube with a dim named like that of the climatology."""
    if by is not None and by in dims:
        raise InvalidValueError(
            f"a climatology by {by!r} adds a dim {by!r}, which the cube already has, of "
            f"{list(dims)}; rename it, as with ds.rename({by}='lead_{by}')"
        )


def time_dim(cube: xr.Dataset) -> str:
    """Return the time dim: the one whose coordinate holds dates."""
    own = {str(name): index.values for name, index in cube.indexes.items() if name in cube.dims}
    return dated_dim(own, list(cube.dims))


def group_ids(cube: xr.Dataset, by: str) -> xr.Variable:
    """Return the group number of each time step."""
    dim = time_dim(cube)
    when = cube[dim]
    if bool(when.isnull().any()):
        raise InvalidValueError(f"{dim!r} has missing dates; drop those steps")
    return xr.Variable((dim,), group_numbers(when.values, by))
