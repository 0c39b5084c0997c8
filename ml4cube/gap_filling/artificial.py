"""Artificial gaps with the shapes of real ones, and the lengths of gaps along time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

Flags = NDArray[np.bool_]
Steps = NDArray[np.intp]

# Stretches of time that get artificial gaps or not.
_STRETCHES = 10
# Longest gap of each class, in time steps; the last class has all that are longer.
_LONGEST = np.array([1, 2, 4, 8, 16, 32])
#: Names of the classes of lengths.
LENGTHS = ("1", "2", "3-4", "5-8", "9-16", "17-32", ">32")
#: Steps before and after a cell that tell the class of its gap.
REACH = int(_LONGEST[-1])


@dataclass(frozen=True, eq=False)
class ArtificialGaps:
    """For each time step, the step whose gaps are copied onto it, or -1."""

    source: Steps

    @classmethod
    def of(cls, n_steps: int, fraction: float, seed: int) -> Self:
        """Shift all gaps along time, which goes on at the other end, and keep some stretches."""
        rng = np.random.default_rng(seed)
        if n_steps < 2:
            return cls(np.full(n_steps, -1, np.intp))
        source = (np.arange(n_steps) + rng.integers(1, n_steps)) % n_steps
        stretches = np.array_split(np.arange(n_steps), min(_STRETCHES, n_steps))
        n_chosen = max(round(fraction * len(stretches)), 1)
        for i in rng.permutation(len(stretches))[n_chosen:]:
            source[stretches[i]] = -1
        return cls(source)


def known_neighbours(has_value: Flags) -> tuple[Steps, Steps]:
    """Return the last known step up to each one, or -1, and the next one from it on, or n."""
    n = len(has_value)
    steps = np.arange(n).reshape(-1, *(1,) * (has_value.ndim - 1))
    before = np.maximum.accumulate(np.where(has_value, steps, -1), axis=0)
    after = np.minimum.accumulate(np.where(has_value, steps, n)[::-1], axis=0)[::-1]
    return before, after


def length_classes(unknown: Flags) -> Steps:
    """Return the class of the length of the gap along the first axis that each cell is in."""
    before, after = known_neighbours(~unknown)
    return np.searchsorted(_LONGEST, after - before - 1)
