"""`Timing`: when the values of a prediction are valid, as steps of the truth along time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import date_keys
from ml4cube.core.errors import InvalidValueError
from ml4cube.cube.coordinates import INIT, LEAD

Steps = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Timing:
    """The dates of a prediction, as steps of the truth; -1 where the truth has no such date.

    A plain prediction, with the dims of the truth, has one sample for each of its dates, and a
    single lead without a coordinate.
    """

    # The dim `init_time` of a forecast, or the time dim of a plain prediction.
    sample_dim: str
    samples: xr.DataArray
    leads: xr.DataArray
    # Steps of the dates that are predicted, shape (samples, leads), and of the last inputs.
    valid_steps: Steps
    init_steps: Steps
    # All dates as numbers: microseconds, or the numbers of the coordinates.
    sample_keys: NDArray[Any]
    valid_keys: NDArray[Any]
    truth_keys: NDArray[Any]
    truth_dates: xr.DataArray
    # What the dates are: of which calendar, or numbers.
    kind: str

    @classmethod
    def of(cls, prediction: xr.Dataset, truth: xr.Dataset, time_dim: str) -> Timing:
        """Match the dates of a prediction with those of the truth."""
        truth_keys, kind = date_keys(truth[time_dim].values)
        if not (np.diff(truth_keys) > 0).all():
            raise InvalidValueError(
                f"truth must have increasing dates along {time_dim!r}, each once, got others; sort "
                f"it, as with truth.sortby({time_dim!r})"
            )
        is_forecast = INIT in prediction.dims
        if not is_forecast and time_dim not in prediction.dims:
            raise InvalidValueError(
                f"prediction must have the dims {INIT!r} and {LEAD!r}, or {time_dim!r} as the "
                f"truth has, got {[str(dim) for dim in prediction.dims]}"
            )
        sample_dim = time_dim
        if is_forecast:
            sample_dim = INIT
        samples = prediction[sample_dim].reset_coords(drop=True)
        leads = xr.DataArray([0], dims=LEAD)
        inits, init_kind = date_keys(samples.values)
        valid, valid_kind = inits[:, None], init_kind
        if is_forecast:
            leads = prediction[LEAD].reset_coords(drop=True)
            valid, valid_kind = date_keys(valid_times(prediction))
        if not kind == init_kind == valid_kind:
            raise InvalidValueError(
                f"the dates of prediction and truth must be of one calendar, got {valid_kind} and "
                f"{kind}; convert one of them, as with truth.convert_calendar"
            )
        if len(np.unique(inits)) < len(inits):
            raise InvalidValueError(f"prediction must have each date once along {sample_dim!r}")
        valid_steps = positions(valid, truth_keys)
        if (valid_steps < 0).all():
            raise InvalidValueError(
                f"the truth must have dates that are predicted, got {span(truth[time_dim])}; the "
                f"prediction starts from {span(samples)}"
            )
        return cls(
            sample_dim=sample_dim,
            samples=samples,
            leads=leads,
            valid_steps=valid_steps,
            init_steps=positions(inits, truth_keys),
            sample_keys=inits,
            valid_keys=valid,
            truth_keys=truth_keys,
            truth_dates=truth[time_dim].reset_coords(drop=True),
            kind=kind,
        )

    @property
    def time_dim(self) -> str:
        """The time dim of the truth."""
        return str(self.truth_dates.dims[0])

    @property
    def is_forecast(self) -> bool:
        """True if there are lead times."""
        return self.sample_dim == INIT

    def pairs(self, lead: int) -> tuple[Steps, Steps]:
        """Return the pairs of steps of the truth that are a lead apart."""
        keys, n = self.truth_keys, len(self.truth_keys)
        is_known = self.valid_steps[:, lead] >= 0
        if n < 2 or not is_known.any():
            return np.zeros(0, np.intp), np.zeros(0, np.intp)
        wanted = keys + np.median(self.valid_keys[is_known, lead] - self.sample_keys[is_known])
        after = np.searchsorted(keys, wanted).clip(1, n - 1)
        is_before = wanted - keys[after - 1] <= keys[after] - wanted
        nearest = np.where(is_before, after - 1, after)
        # months differ in length, but not by half a step; a truth may lack years
        is_near = np.abs(keys[nearest] - wanted) <= np.median(np.diff(keys)) / 2
        return np.flatnonzero(is_near), nearest[is_near]


def with_forecast_dims(cube: xr.Dataset) -> xr.Dataset:
    """Return a forecast with both of its dims, also if one was selected by a number."""
    for dim, other in ((INIT, LEAD), (LEAD, INIT)):
        if dim not in cube.dims and dim in cube.coords and other in cube.dims:
            valid = cube.coords.get("valid_time")
            cube = cube.drop_vars("valid_time", errors="ignore").expand_dims(dim)
            if valid is not None:
                cube = cube.assign_coords(valid_time=valid.expand_dims(dim))
    if (INIT in cube.dims) != (LEAD in cube.dims):
        raise InvalidValueError(
            f"a forecast must have the dims {INIT!r} and {LEAD!r}, got "
            f"{[str(dim) for dim in cube.dims]}"
        )
    return cube


def valid_times(forecast: xr.Dataset) -> NDArray[Any]:
    """Return the dates that a forecast predicts, shape (init_time, lead_time)."""
    if "valid_time" in forecast.coords:
        valid_time = forecast["valid_time"]
        if set(valid_time.dims) != {INIT, LEAD}:
            raise InvalidValueError(
                f"valid_time must have the dims {INIT!r} and {LEAD!r}, got {valid_time.dims}"
            )
        return np.asarray(valid_time.transpose(INIT, LEAD).values)
    inits, leads = forecast[INIT].values, forecast[LEAD].values
    if inits.dtype.kind in "OM":
        if leads.dtype.kind != "m":
            raise InvalidValueError(
                "prediction needs a coordinate valid_time, or lead_time as timedelta, got "
                f"lead_time of dtype {leads.dtype}"
            )
        if inits.dtype.kind == "O":
            leads = leads.astype("m8[us]").astype(object)
    return np.asarray(inits[:, None] + leads[None, :])


def positions(wanted: NDArray[Any], values: NDArray[Any]) -> Steps:
    """Return the position of each wanted value among distinct ones, -1 if it is not there."""
    order = np.argsort(values, kind="stable")
    nearest = np.searchsorted(values, wanted, sorter=order).clip(max=len(values) - 1)
    steps = order[nearest]
    return np.where(values[steps] == wanted, steps, -1).astype(np.intp)


def span(dates: xr.DataArray) -> str:
    """Return the first and the last date, as days if they have no time of day."""
    values = dates.values.astype("M8[s]" if dates.dtype.kind == "M" else object).astype(str)
    shown = [
        str(value).replace("T00:00:00", "").replace(" 00:00:00", "") for value in values[[0, -1]]
    ]
    return " to ".join(shown)
