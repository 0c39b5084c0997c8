"""One pass over the cells of a cube: sums of each variable, and of each pair of variables.

Variables with the same dims are read together, block by block. Pairs of variables with other dims
are summed up if one of the two has all dims of the other, which is repeated along the others.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, caller_level, prefixed
from ml4cube.core.metric_registry import METRICS
from ml4cube.core.missing import find_gaps
from ml4cube.core.sums.fields import Moments
from ml4cube.core.sums.mergeable import Mergeable, decoded
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


@dataclass(eq=False)
class ValueSums(Mergeable):
    """Sums of the values of one variable; all but `known` are weighted."""

    # Known cells of each place, along the dims other than time.
    known: NDArray[np.int64]
    # Moments of each time step, or of all cells without a time dim.
    steps: Moments
    histogram: Histogram

    @classmethod
    def of(cls, values: NDArray[Any], weights: Floats | None, time_axis: int | None) -> ValueSums:
        """Sum up a block."""
        axes = tuple(range(values.ndim))
        places = tuple(axis for axis in axes if axis != time_axis)
        known = (~find_gaps(values)).astype(np.int64)
        if time_axis is not None:
            known = known.sum(time_axis)
        histogram = block_histogram(axes, default_bins(1), values, None, weights)
        return cls(known, Moments.of(values, places, None, weights), histogram)

    def merge(self, other: ValueSums) -> ValueSums:
        """Return the sums over the cells of both, which are of the same places and steps."""
        both = ValueSums(self.known.copy(), self.steps.map(np.copy), self.histogram)
        both.merge_at((), (), other)
        return both

    def merge_at(self, places: Any, steps: Any, other: ValueSums) -> None:
        """Merge the sums of some places and steps, in place."""
        self.known[places] += other.known
        self.steps.merge_at(steps, other.steps)
        self.histogram = self.histogram.merge(other.histogram)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ValueSums:
        """Read the dict that `to_dict` returned."""
        steps, histogram = Moments.from_dict(raw["steps"]), Histogram.from_dict(raw["histogram"])
        return cls(decoded(raw["known"]), steps, histogram)


@dataclass(frozen=True, eq=False)
class SummedVariable:
    """One variable, how its cells are weighted, and its sums."""

    array: xr.DataArray
    time_dim: str | None
    # How cells are weighted, and the weight of all cells, known or not, of each time step.
    weighting: str
    weight_of_step: Floats
    sums: ValueSums

    @classmethod
    def of(
        cls, array: xr.DataArray, time_dim: str | None, weighting: str, weight_of_step: Floats
    ) -> SummedVariable:
        """Start without cells."""
        places = [array.sizes[dim] for dim in array.dims if dim != time_dim]
        histogram = Histogram.empty((), default_bins(1), np.float64)
        steps = Moments.empty(weight_of_step.shape)
        sums = ValueSums(np.zeros(places, np.int64), steps, histogram)
        return cls(array, time_dim, weighting, weight_of_step, sums)

    @property
    def place_dims(self) -> list[str]:
        """Dims other than time."""
        return [str(dim) for dim in self.array.dims if dim != self.time_dim]

    def add(self, slices: Slices, block: ValueSums) -> None:
        """Add the sums of a block."""
        places = tuple(slices[dim] for dim in self.place_dims)
        steps = () if self.time_dim is None else slices[self.time_dim]
        self.sums.merge_at(places, steps, block)


def sum_up(
    cube: xr.Dataset, names: Sequence[str]
) -> tuple[dict[str, SummedVariable], dict[Pair, PairSums]]:
    """Sum up variables, and pairs of them, a few blocks at a time."""
    dims_of = {name: frozenset(cube[name].dims) for name in names}
    sums: dict[str, SummedVariable] = {}
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
    sums: dict[str, SummedVariable],
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
        name: SummedVariable.of(cube[name].transpose(*first.dims), time_dim, weighting, of_step)
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
    _: object,
    values: Cells,
) -> tuple[list[ValueSums], list[PairSums]]:
    """Sum up one block of all variables."""
    weights = values.get(_WEIGHTS)
    sums, of_pairs = [], []
    for name in own:
        with prefixed(f"variable {name!r}"):
            sums.append(ValueSums.of(values[name], weights, time_axis))
    for first, other in pairs:
        pair = values[first], values[other]
        of_pairs.append(PairSums.of(*pair, weights, names=_SUMS_OF_PAIRS))
    return sums, of_pairs
