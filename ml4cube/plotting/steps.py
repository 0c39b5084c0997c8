"""Steps along time: their positions as users give them, and their dates as figures show them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.cube.coordinates import dates_along


def positions_along(steps: Sequence[int], array: xr.DataArray, time: str | None) -> list[int]:
    """Return the positions along time; refuse those out of range."""
    positions = np.asarray(steps)
    if positions.ndim != 1 or (positions.size and positions.dtype.kind not in "iu"):
        raise InvalidTypeError(f"steps must be a list of integers, as [0, 6], got {steps!r}")
    n = array.sizes.get(time, 0)
    if beyond := [int(step) for step in positions if not -n <= step < n]:
        must = f"be from 0 to {n - 1}"
        if not n:
            must = "be left out because the label has no time dim"
        raise InvalidValueError(f"steps must {must}, got {beyond}")
    return [int(step) for step in positions]


def step_name(array: xr.DataArray, time: str, step: int) -> str:
    """Return the date of a step, as precise as tells steps apart; else its value or position."""
    coord = dates_along(array.coords.values(), time)
    if coord is None and time in array.coords:
        return f"{array.coords[time].values[step]}"
    if coord is None or coord.isnull()[step]:
        return f"step {step}"
    dates = {str(date) for date in coord.values[coord.notnull().values][:1000]}
    to_month, to_day, to_minute, to_second = 7, 10, 16, 19
    if len(dates) == 1:
        return str(coord.values[step])[:to_day]
    lengths = (to_month, to_day, to_minute)
    length = next((n for n in lengths if len({d[:n] for d in dates}) == len(dates)), to_second)
    return str(coord.values[step])[:length].replace("T", " ")
