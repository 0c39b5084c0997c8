"""Roles of the arrays of a sample: input, target and weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

INPUT, TARGET, WEIGHT = "input", "target", "weight"


class ArrayName(NamedTuple):
    """Name of one array of samples: its variable, and whose cells it holds."""

    variable: str
    # TARGET for targets that lie in other cells than the inputs, and for weights of these cells.
    role: str = INPUT


class DimLead(NamedTuple):
    """Cells of inputs and targets along one dim."""

    # From the first cell of the inputs to the first cell of the targets.
    offset: int
    input_size: int
    target_size: int

    @property
    def cells_past_input(self) -> int:
        """Cells by which the targets extend past the end of the inputs."""
        return max(0, self.offset + self.target_size - self.input_size)


# By dim of the cube or of stored windows; empty if the targets are in the same cells as the inputs.
Lead = Mapping[str, DimLead]
