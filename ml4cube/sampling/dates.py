"""Warn of windows in which the steps of time are not even."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ml4cube.core.time_steps import WindowsOverTime, starts_of
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.recipe.lead_time import warn_of_uneven_steps

if TYPE_CHECKING:
    import xarray as xr


def check_dates(ds: xr.Dataset, bound: BoundRecipe) -> int:
    """Warn of windows and leads over missing dates; return the number of these windows."""
    axes = {dim: ds[dim].variable for dim in bound.recipe.dims if dim in ds.coords}
    warn_of_uneven_steps(bound.lead, axes)
    values = {dim: axis.values for dim, axis in axes.items()}
    windows = WindowsOverTime.of(starts_of(bound.windows), values)
    windows.warn()
    return windows.over_missing_dates
