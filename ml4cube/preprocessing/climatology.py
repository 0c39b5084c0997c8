"""Groups of a climatology: which month, season or day of the year each time step belongs to."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import xarray as xr

from ml4cube.core.errors import InvalidValueError, check_choice
from ml4cube.core.scaling import GROUPS as GROUPS
from ml4cube.core.scaling import dated_dim, group_numbers


def check_group(argument: str, by: str | None) -> None:
    """Refuse a climatology that there is not."""
    check_choice(argument, by, (*GROUPS, None))


def check_free(by: str | None, dims: Iterable[Hashable]) -> None:
    """Refuse a cube with a dim that is called like the one of a climatology."""
    if by is not None and by in dims:
        raise InvalidValueError(
            f"a climatology by {by!r} makes a dim of that name, but the cube has one already, of "
            f"{list(dims)}; rename it, as by ds.rename({by}='lead_{by}')"
        )


def time_dim(cube: xr.Dataset) -> str:
    """Find the dim of time: the one whose coordinate holds dates."""
    own = {str(name): index.values for name, index in cube.indexes.items() if name in cube.dims}
    return dated_dim(own, list(cube.dims))


def group_ids(cube: xr.Dataset, by: str) -> xr.Variable:
    """Number the group of each time step."""
    dim = time_dim(cube)
    when = cube[dim]
    if bool(when.isnull().any()):
        raise InvalidValueError(f"{dim!r} has missing dates; leave those steps out")
    return xr.Variable((dim,), group_numbers(when.values, by))
