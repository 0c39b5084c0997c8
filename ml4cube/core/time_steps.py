"""Steps along time: which of them are regular, and which windows span missing dates."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.axes import is_time
from ml4cube.core.errors import caller_level
from ml4cube.core.grid import Grid

#: First cell of every window along a dim, and cells of a window.
Starts = tuple[NDArray[np.intp], int]


def starts_of(windows: Grid) -> dict[str, Starts]:
    """Return the first cells of all windows of a grid along each dim, and the size of a window."""
    of_dims = zip(windows.dims, windows.counts, windows.stride, windows.tile, strict=True)
    return {dim: (np.arange(count) * stride, size) for dim, count, stride, size in of_dims}


# Months and years are of unequal length, but not by half.
_LONGEST = 1.5


@dataclass(frozen=True, eq=False)
class TimeSteps:
    """The steps between the dates along a dim. Make them with `TimeSteps.of`."""

    dim: str
    dates: NDArray[Any]
    # Length of each step; negative back in time.
    days: NDArray[np.float64]

    @classmethod
    def of(cls, dim: str, dates: NDArray[Any]) -> Self | None:
        """Return the steps of a coordinate; None if it has no steps between dates."""
        if len(dates) < 2 or not is_time(dates):
            return None
        steps = np.diff(dates).astype("m8[us]")
        if np.isnat(steps).any():
            return None
        return cls(dim, dates, steps.astype(np.int64) / 86_400e6)

    @property
    def are_regular(self) -> NDArray[np.bool_]:
        """Which steps go in the direction of most, and are not much longer than these."""
        median = float(np.median(self.days))
        forward = self.days * np.sign(median)
        flags: NDArray[np.bool_] = (forward > 0) & (forward <= _LONGEST * abs(median))
        return flags

    @property
    def go_forward(self) -> bool:
        """Return True if all steps are regular, and go forward in time."""
        return bool(self.are_regular.all() and self.days[0] > 0)

    def spanned(self, starts: NDArray[np.intp], size: int) -> NDArray[np.bool_]:
        """Return which windows of `size` cells span a step that is not regular."""
        irregular_before = np.concatenate([[0], np.cumsum(~self.are_regular)])
        flags: NDArray[np.bool_] = irregular_before[starts + size - 1] > irregular_before[starts]
        return flags

    def __str__(self) -> str:
        """Return how long the steps are."""
        longest = int(np.abs(self.days).argmax())
        return (
            f"steps along {self.dim!r} differ or go back in time: {self.days.min():g} to "
            f"{self.days.max():g} days, with a median of {np.median(self.days):g}; the longest is "
            f"from {self.dates[longest]} to {self.dates[longest + 1]}"
        )


@dataclass(frozen=True, eq=False)
class WindowsOverTime:
    """Windows of several cells, and how many of them span missing dates."""

    # All windows, those that span missing dates, and the steps along a dim where they do.
    total: int
    over_missing_dates: int
    steps: TimeSteps | None

    @classmethod
    def of(cls, windows: Mapping[str, Starts], axes: Mapping[str, NDArray[Any]]) -> Self:
        """Count windows; `axes` are the coordinates along dims that have any."""
        total, whole = 1, 1
        uneven: TimeSteps | None = None
        for dim, (starts, size) in windows.items():
            steps = None
            if size > 1 and dim in axes:
                steps = TimeSteps.of(dim, axes[dim])
            spanned = 0
            if steps is not None:
                spanned = int(np.count_nonzero(steps.spanned(starts, size)))
                if spanned:
                    uneven = steps
            total *= len(starts)
            whole *= len(starts) - spanned
        return cls(total, total - whole, uneven)

    def warn(self) -> None:
        """Warn of windows that span missing dates."""
        if self.steps is None:
            return
        warnings.warn(
            f"{self.over_missing_dates:,} of {self.total:,} windows span missing dates, and so "
            f"more time than the others: {self.steps}. Sort the cube along {self.steps.dim!r} and "
            "reindex it to even steps, whose gaps are then dropped",
            stacklevel=caller_level(),
        )
