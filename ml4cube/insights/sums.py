"""One pass over the cells of a cube: sums of each variable, and of each pair of variables.

Variables with the same dims are read together, block by block. Pairs of variables with other dims
are summed up if one of the two has all dims of the other, which is repeated along the others.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations
from typing import NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, caller_level, prefixed
from ml4cube.core.grid import Block
from ml4cube.core.metric_registry import METRICS
from ml4cube.core.missing import find_gaps
from ml4cube.core.sums.fields import Moments
from ml4cube.core.sums.pairs import PairSums
from ml4cube.core.sums.quantiles import Histogram, default_bins
from ml4cube.cube.areas import cell_weights
from ml4cube.cube.coordinates import find_time_dim
from ml4cube.cube.reader import CubeReader, Slices
from ml4cube.cube.scan import Cells, blocks_of, scan
from ml4cube.preprocessing.fields import block_histogram

Floats = NDArray[np.float64]
Pair = tuple[str, str]
_SUMS_OF_PAIRS = METRICS["correlation"].sums
# Name of the weights beside the names of variables, which have none with spaces in netCDF.
_WEIGHTS = "weights of cells"


class BlockSums(NamedTuple):
    """Sums of one variable in a block: known cells of each place, moments of each time step."""

    known: NDArray[np.int64]
    steps: Moments
    histogram: Histogram


@dataclass(eq=False)
class VariableSums:
    """Sums of one variable over all blocks; all but `known` are weighted."""

    array: xr.DataArray
    time_dim: str | None
    # How cells are weighted, and the weight of all cells, known or not, of each time step.
    weighting: str
    weight_of_step: Floats
    # Known cells of each place, along the dims other than time.
    known: NDArray[np.int64] = field(init=False)
    # Moments of each time step, or of all cells without a time dim.
    steps: Moments = field(init=False)
    histogram: Histogram = field(init=False)

    def __post_init__(self) -> None:
        """Start without cells."""
        self.known = np.zeros([self.array.sizes[dim] for dim in self.place_dims], np.int64)
        self.steps = Moments.empty(self.weight_of_step.shape)
        self.histogram = Histogram.empty((), default_bins(1), np.float64)

    @property
    def place_dims(self) -> list[str]:
        """Dims other than time."""
        return [str(dim) for dim in self.array.dims if dim != self.time_dim]

    def add(self, slices: Slices, block: BlockSums) -> None:
        """Add the sums of a block."""
        self.known[tuple(slices[dim] for dim in self.place_dims)] += block.known
        steps = () if self.time_dim is None else slices[self.time_dim]
        self.steps.merge_at(steps, block.steps)
        self.histogram = self.histogram.merge(block.histogram)


def sum_up(
    cube: xr.Dataset, names: Sequence[str]
) -> tuple[dict[str, VariableSums], dict[Pair, PairSums]]:
    """Sum up variables, and pairs of them, a few blocks at a time."""
    dims_of = {name: frozenset(cube[name].dims) for name in names}
    sums: dict[str, VariableSums] = {}
    pair_sums: dict[Pair, PairSums] = {}
    for dims in dict.fromkeys(dims_of.values()):
        own = [name for name in names if dims_of[name] == dims]
        fewer = [name for name in names if dims_of[name] < dims]
        _sum_group(cube, own, fewer, sums, pair_sums)
    return {name: sums[name] for name in names}, pair_sums


def _sum_group(
    cube: xr.Dataset,
    own: Sequence[str],
    fewer: Sequence[str],
    sums: dict[str, VariableSums],
    pair_sums: dict[Pair, PairSums],
) -> None:
    """Add the sums of variables with the same dims, and of their pairs."""
    first = cube[own[0]]
    time_dim = find_time_dim(first.coords.values(), first.dims)
    try:
        weights, weighting, _ = cell_weights("area", first, cube.variables).warn()
    except InvalidValueError as error:  # such as latitudes that are missing on land
        warnings.warn(f"cells have equal weights, because {error}", stacklevel=caller_level())
        weights, weighting = None, f"none, {error}"
    of_step = _weight_of_step(first, time_dim, weights)
    sums |= {
        name: VariableSums(cube[name].transpose(*first.dims), time_dim, weighting, of_step)
        for name in own
    }
    pairs = [*combinations(own, 2), *((one, other) for one in own for other in fewer)]
    pair_sums |= {pair: PairSums.empty(names=_SUMS_OF_PAIRS) for pair in pairs}
    variables: dict[str, xr.Variable | None] = {n: cube.variables[n] for n in (*own, *fewer)}
    variables[_WEIGHTS] = None if weights is None else weights.variable
    reader = CubeReader.of_variables(variables)
    blocks = blocks_of(reader)
    time_axis = None if time_dim is None else first.dims.index(time_dim)
    sum_block = partial(_sum_block, own, pairs, time_axis)
    block_sums = scan(reader, sum_block, blocks)
    for block, (of_variables, of_pairs) in zip(blocks, block_sums, strict=True):
        for name, of_variable in zip(own, of_variables, strict=True):
            sums[name].add(block.slices, of_variable)
        for pair, of_pair in zip(pairs, of_pairs, strict=True):
            pair_sums[pair] = pair_sums[pair].merge(of_pair)


def _weight_of_step(
    array: xr.DataArray, time_dim: str | None, weights: xr.DataArray | None
) -> Floats:
    """Return the weight of all cells of each time step, or of all cells without a time dim."""
    of_cells = xr.Variable((), 1.0) if weights is None else weights.variable
    total = of_cells.sum([dim for dim in of_cells.dims if dim != time_dim])
    repeated = [n for dim, n in array.sizes.items() if dim not in (*of_cells.dims, time_dim)]
    shape = () if time_dim is None else (array.sizes[time_dim],)
    return np.array(np.broadcast_to(total.values * math.prod(repeated), shape), np.float64)


def _sum_block(
    own: Sequence[str],
    pairs: Sequence[Pair],
    time_axis: int | None,
    _: Block,
    values: Cells,
) -> tuple[list[BlockSums], list[PairSums]]:
    """Sum up one block of all variables."""
    weights = values.get(_WEIGHTS)
    axes = tuple(range(values[own[0]].ndim))
    place_axes = tuple(axis for axis in axes if axis != time_axis)
    sums = []
    for name in own:
        has_value = ~find_gaps(values[name])
        with prefixed(f"variable {name!r}"):
            sums.append(
                BlockSums(
                    has_value.astype(np.int64) if time_axis is None else has_value.sum(time_axis),
                    Moments.of(values[name], place_axes, None, weights),
                    block_histogram(axes, default_bins(1), values[name], None, weights),
                )
            )
    return sums, [
        PairSums.of(values[first], values[other], weights, names=_SUMS_OF_PAIRS)
        for first, other in pairs
    ]
