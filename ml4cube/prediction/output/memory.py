"""Predicted cube in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import numpy as np
import xarray as xr

from ml4cube.training.ranks.dist import World

#: The part of each target that belongs to one block: slices by dim, and values.
Block = Mapping[str, tuple[Mapping[str, slice], xr.Variable]]


class Output:
    """Predicted cube in memory, on every rank; takes blocks in any order."""

    #: True if nothing is left to predict.
    is_written = False
    #: Writes a block in any process, after `begin`; None if this process must collect them.
    writer: Callable[[int, Block], None] | None = None

    def __init__(self, template: xr.Dataset, targets: tuple[str, ...], world: World) -> None:
        self._template, self._targets, self._world = template, targets, world
        self._blocks: list[Block] = []

    def begin(self) -> Collection[int]:
        """Prepare the output; return the blocks that are finished already. All ranks call this."""
        return ()

    def collect(self, block: Block) -> None:
        """Keep one block in this process."""
        self._blocks.append(block)

    def publish(self) -> None:
        """Publish the complete cube; called on rank 0."""

    def discard(self, error: BaseException) -> None:
        """Remove what is unfinished, unless the same call can go on from there.

        Called on rank 0, after an error.
        """

    def result(self) -> xr.Dataset:
        """Return the complete cube; called on every rank."""
        cube = self._template
        whole = {n: cube[n].variable.copy(data=np.empty_like(cube[n])) for n in self._targets}
        for block in self._blocks:
            for name, (slices, values) in block.items():
                whole[name][slices] = values
        for variable in whole.values():
            del variable.encoding["chunks"]  # chunks are for disk
        return cube.assign(whole)
