"""The climatology as a distribution, beside a prediction of members or quantiles.

A value compared with a distribution loses by its lack of spread alone: members drawn from the
climatology would have a skill of 0.3 over its mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import is_time
from ml4cube.core.climatology import Climatology, group_numbers
from ml4cube.evaluation.cells.cell_reader import CellReader, Floats, Steps, Tile
from ml4cube.evaluation.cells.probabilities import QUANTILE, Outputs
from ml4cube.evaluation.cells.train_climatology import train_values

#: Levels that stand for the whole distribution, beside members.
_LEVELS = (np.arange(50) + 0.5) / 50
_MONTHS, _MOST_DATES = 12, 60


@dataclass(frozen=True, eq=False)
class Distribution:
    """Quantiles of train anomalies of the season around each month, (months, levels, *cells)."""

    quantiles: Floats
    month_of_step: NDArray[np.int64]

    @classmethod
    def of(
        cls,
        outputs: Outputs,
        truth: CellReader,
        tile: Tile,
        climatology: Climatology,
        train: Steps,
        dates: xr.DataArray,
    ) -> Distribution:
        """Take the anomalies of a tile.

        A season is a month with the one before and the one after, or all train dates of times
        without months; of many dates, 60 that are evenly spread.
        """
        months, n_months = np.zeros(dates.size, np.int64), 1
        if is_time(dates):
            months, n_months = group_numbers(dates.values, "month"), _MONTHS
        cells = climatology.numbers.shape[1:]
        quantiles = np.zeros((n_months, len(outputs.levels), *cells))
        for month in range(n_months):
            in_season = train[(months[train] - month + 1) % n_months <= 2]
            if in_season.size:
                spread = np.linspace(0, in_season.size - 1, min(in_season.size, _MOST_DATES))
                steps = in_season[spread.round().astype(np.intp)]
                anomalies = train_values(truth.load({truth.step_dims[0]: steps}, tile), steps)
                anomalies -= climatology.at(steps)
                quantiles[month] = _quantiles(anomalies, outputs.levels)
        return cls(quantiles, months)

    def around(self, normal: Floats, steps: Steps) -> Floats:
        """Return quantiles at steps of the truth, (rows, levels, *cells)."""
        return np.asarray(normal[:, None] + self.quantiles[self.month_of_step[steps]])


def distribution_beside(outputs: Outputs) -> Outputs:
    """Return the levels of the climatology: those of a prediction's quantiles if it has some."""
    if outputs.dim == QUANTILE:
        return outputs
    return Outputs(QUANTILE, _LEVELS)


def _quantiles(values: Floats, levels: Floats) -> Floats:
    """Return quantiles along the first axis, without gaps; 0 of no value.

    The i-th of n values is at the level i / (n + 1), so that another value is as likely to lie
    between any two.
    """
    count = np.isfinite(values).sum(0)
    in_order, last = np.sort(values, axis=0), (count - 1).clip(min=0)
    at = levels.reshape(-1, *(1,) * count.ndim) * (count + 1) - 1
    at = at.clip(0, last)
    lower = at.astype(np.intp)
    below = np.take_along_axis(in_order, lower, 0)
    above = np.take_along_axis(in_order, np.minimum(lower + 1, last), 0)
    return np.asarray(np.where(count > 0, below + (at - lower) * (above - below), 0.0))
