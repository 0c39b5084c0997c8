"""Read the samples of some blocks of a cube into memory."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import caller_level
from ml4cube.core.grid import Block, Grid
from ml4cube.core.split_plan import PARTS
from ml4cube.cube.engine import Threads
from ml4cube.recipe.preparation import Arrays
from ml4cube.recipe.roles import INPUT
from ml4cube.sampling.outcomes import OUTCOMES, classify
from ml4cube.sampling.plan import accounting_of, refuse_empty
from ml4cube.sampling.planning import fill_statistics
from ml4cube.sampling.sampled_cube import SampledCube
from ml4cube.sampling.samples import make_samples
from ml4cube.sampling.tiling import TiledRecipe


@dataclass(frozen=True, eq=False)
class BlockSamples:
    """Samples of one block, or of several."""

    samples: Arrays
    origins: Arrays
    # Part of each sample, as the split label has it.
    labels: NDArray[np.uint8]

    @property
    def parts(self) -> set[int]:
        """The parts that samples are of."""
        return set(self.labels.tolist())


class BlockReader:
    """Reads the samples of the first blocks that have any, and counts their windows."""

    def __init__(self, cube: SampledCube, blocks: Grid) -> None:
        self._cube, self._blocks = cube, blocks
        self._counts = np.zeros(len(OUTCOMES), np.int64)
        # Parts that must not be empty.
        self._needed_parts = ("train", "test") if cube.recipe.targets else ()

    @property
    def accounting(self) -> dict[str, int]:
        """Number of windows by outcome; those never read are unused."""
        bound, counts = self._cube.tiled.bound, self._counts.copy()
        counts[OUTCOMES.index("unused")] += len(bound.windows) - counts.sum()
        return accounting_of(bound.total, counts, PARTS)

    def read(self, ids: Iterable[int], number: int | None, patience: int) -> BlockSamples:
        """Return the samples of up to `number` blocks."""
        tiled = self._cube.tiled
        if self._cube.recipe.fills_from_train:
            tiled = replace(tiled, fill=fill_statistics(self._cube, Threads(1)))
        used = self._used_blocks(tiled, ids, number, patience)
        parts = set().union(*(block.parts for block in used))
        empty = [part for part in self._needed_parts if PARTS[part] not in parts]
        if not used or empty:
            refuse_empty(self.accounting, empty or list(PARTS))
        return BlockSamples(
            _joined([block.samples for block in used]),
            _joined([block.origins for block in used]),
            np.concatenate([block.labels for block in used]),
        )

    def _used_blocks(
        self, tiled: TiledRecipe, ids: Iterable[int], number: int | None, patience: int
    ) -> list[BlockSamples]:
        """Return the first blocks with samples, and later ones that hold a lacking part."""
        lacking = {PARTS[part] for part in self._needed_parts}
        used: list[BlockSamples] = []
        counts: list[NDArray[np.int64]] = []
        useless_in_row = 0
        for tile in map(self._tile, ids):
            if tile is None:
                continue
            enough = number is not None and len(used) >= number
            if enough and not lacking:
                break
            if useless_in_row >= patience:
                warnings.warn(
                    f"{useless_in_row} blocks in a row gave no sample to use, so the blocks after "
                    "them were not read (see accounting); raise patience= to read them",
                    stacklevel=caller_level(),
                )
                break
            block, outcomes = self._samples_of(tiled, tile)
            if block is None:
                self._counts += outcomes
            if block is None or (enough and not block.parts & lacking):
                useless_in_row += 1
                continue
            if enough:
                _drop_replaceable(used, counts)
            used.append(block)
            counts.append(outcomes)
            lacking -= block.parts
            useless_in_row = 0
        self._counts += sum(counts, np.zeros_like(self._counts))
        return used

    def _tile(self, id: int) -> Block | None:
        """Return the windows that start in a block, or None if there are none."""
        block = self._blocks.block(id)
        windows = self._cube.tiled.bound.windows
        # From cells to windows, rounded up: the first window that starts at this cell or later.
        start = -(-np.array(block.start) // windows.stride)
        stop = np.minimum(-(-np.array(block.stop) // windows.stride), windows.counts)
        if (start >= stop).any():
            return None
        return Block(id, block.dims, block.index, tuple(start.tolist()), tuple(stop.tolist()))

    def _samples_of(
        self, tiled: TiledRecipe, tile: Block
    ) -> tuple[BlockSamples | None, NDArray[np.int64]]:
        """Return the samples of a block, if there are any, and its windows by outcome."""
        cells = self._cube.reader.cells.read(tiled.bound.cells_of(tile))
        codes = classify(tiled, {INPUT: cells}, tile)
        counts = np.bincount(codes, minlength=len(OUTCOMES))
        keep = np.flatnonzero(codes < len(PARTS))
        if not keep.size:
            return None, counts
        samples, origins = make_samples(tiled, cells, tile, keep), tiled.origins(tile, keep)
        return BlockSamples(samples, origins, codes[keep]), counts


def _joined(blocks: Sequence[Arrays]) -> Arrays:
    """Return the arrays of all samples from those of each block."""
    return {name: np.concatenate([block[name] for block in blocks]) for name in blocks[0]}


def _drop_replaceable(used: list[BlockSamples], counts: list[NDArray[np.int64]]) -> None:
    """Drop the last block whose parts the other blocks have too."""
    for number in reversed(range(len(used))):
        others = [block.parts for other, block in enumerate(used) if other != number]
        if used[number].parts <= set().union(*others):
            del used[number], counts[number]
            return
