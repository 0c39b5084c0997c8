"""`GapFiller`: the gaps of one variable, hidden, filled and scored block by block."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import check_aligned
from ml4cube.core.errors import InvalidTypeError, check_choice
from ml4cube.core.grid import Grid
from ml4cube.core.metric_registry import defaults_of, sums_of
from ml4cube.core.missing import find_gaps
from ml4cube.core.sums.pairs import PairSums
from ml4cube.cube.areas import cell_weights
from ml4cube.cube.coordinates import find_time_dim, map_dims
from ml4cube.cube.reader import CubeReader
from ml4cube.gap_filling.artificial import LENGTHS, REACH, ArtificialGaps, Flags, length_classes
from ml4cube.gap_filling.methods import Floats, Gaps, Method
from ml4cube.preprocessing.cubes import all_over_other_dims, as_flags, cells_of_part

Box = dict[str, slice]
#: Errors on artificial gaps, and the sums that they follow from.
SCORES = defaults_of("fill_gaps")
SUMS = sums_of(SCORES)
#: Variables of a filler's reader: the values, and flags and weights of cells.
ALLOWED, USED = "may be filled", "used by climatology"
SCORED, WEIGHT = "may be scored", "weight of cells"
# Cells of a block: many, because blocks that are whole along time cut chunks that are not.
_BLOCK_CELLS = 2**22


@dataclass(frozen=True, eq=False)
class GapFiller:
    """The gaps of a variable, real and artificial. Blocks have the dims of the reader."""

    # Dims: time, if there is one, and the others.
    reader: CubeReader
    name: str
    time_dim: str | None
    artificial: ArtificialGaps

    @classmethod
    def of(
        cls,
        cube: xr.Dataset,
        name: str,
        mask: xr.DataArray | str | None,
        split: str | None,
        artificial: Callable[[int], ArtificialGaps],
        is_model: bool = False,
    ) -> Self:
        """Return the gaps of a variable; those of a model are scored outside the train part."""
        array = cube[name]
        time_dim = find_time_dim(array.coords.values(), array.dims)
        weights = cell_weights("area", array, cube.variables).array
        used, _ = cells_of_part(cube, split)
        train = None
        if is_model:
            train = cells_of_part(cube, "train")[0]
        everywhere = xr.Variable((), True)
        variables = {
            name: array.variable,
            ALLOWED: everywhere if mask is None else _allowed(cube, array, mask),
            USED: everywhere if used is None else all_over_other_dims(used, array.dims),
            SCORED: everywhere if train is None else all_over_other_dims(~train, array.dims),
            WEIGHT: xr.Variable((), 1.0) if weights is None else weights.variable,
        }
        # cells of a map come last
        last = map_dims(array.coords.values(), array.dims)
        first = [str(dim) for dim in array.dims if dim not in (time_dim, *last)]
        dims = (*([] if time_dim is None else [time_dim]), *first, *last)
        reader = CubeReader.of(xr.Dataset(variables), variables, dims)
        n_steps = 1
        if time_dim is not None:
            n_steps = array.sizes[time_dim]
        return cls(reader, name, time_dim, artificial(n_steps))

    def blocks(self, chunks: Mapping[str, int], uncut: tuple[str, ...]) -> Grid:
        """Return blocks that do not cut some dims, and follow the chunks along others."""
        sizes = dict(zip(self.reader.dims, self.reader.shape, strict=True))
        cut = [dim for dim in sizes if dim not in uncut]
        tile = sizes | dict.fromkeys(cut, 1)
        for dim in reversed(cut):
            affordable = max(_BLOCK_CELLS // math.prod(tile.values()), 1)
            chunk = chunks.get(dim, 1)
            if affordable > chunk:
                affordable = affordable // chunk * chunk
            tile[dim] = min(affordable, sizes[dim])
        return Grid.blocks(sizes, tile)

    def fill(self, method: Method, box: Box) -> NDArray[Any]:
        """Return the values of a block with its gaps filled, as far as the method can."""
        cells = self._read(box)
        values = cells[self.name]
        wanted = find_gaps(values) & cells[ALLOWED]
        if not wanted.any():
            return self._as_read(values)
        estimates = method.estimate(Gaps(_with_nan(values), wanted, cells[USED], box))
        with np.errstate(over="ignore"):
            estimates = estimates.astype(values.dtype)
        filled = np.where(wanted & np.isfinite(estimates), estimates, values)
        return self._as_read(filled)

    def hide(self, box: Box) -> NDArray[Any]:
        """Return the values of a block with artificial gaps."""
        cells, hidden, *_ = self._with_artificial(box)
        values = cells[self.name]
        return self._as_read(np.where(hidden, np.array(np.nan, values.dtype), values))

    def flags(self, filled: NDArray[Any], box: Box) -> NDArray[np.uint8]:
        """Return 0 for known cells, 1 for filled ones and 2 for gaps that are left."""
        gaps = find_gaps(self.reader.only([self.name]).read(box)[self.name])
        return (gaps * np.where(find_gaps(filled), 2, 1)).astype(np.uint8)

    def score(self, method: Method, box: Box) -> tuple[PairSums, NDArray[np.int64]]:
        """Return the errors of artificial gaps, and cells in real ones, by length."""
        cells, hidden, real_lengths, lengths = self._with_artificial(box)
        values = _with_nan(cells[self.name])
        real = np.isnan(values) & cells[ALLOWED]
        counts = np.bincount(real_lengths[real], minlength=len(LENGTHS))
        scored = hidden & cells[SCORED]
        if not scored.any():
            return PairSums.empty(len(LENGTHS), SUMS), counts
        visible = np.where(hidden, np.nan, values)
        estimates = method.estimate(Gaps(visible, scored, cells[USED], box))[scored]
        weight, group = cells[WEIGHT][scored], lengths[scored]
        return PairSums.of(estimates, values[scored], weight, group, len(LENGTHS), SUMS), counts

    def _with_artificial(
        self, box: Box
    ) -> tuple[dict[str, NDArray[Any]], Flags, NDArray[np.intp], NDArray[np.intp]]:
        """Return a block, its hidden cells, and classes of gap lengths without and with them."""
        # steps around the block too, for the lengths of its gaps
        inner = slice(0, 1) if self.time_dim is None else box[self.time_dim]
        around = slice(max(inner.start - REACH, 0), inner.stop + REACH)
        source = self.artificial.source[around]
        cells = self._read(self._at(box, slice(around.start, around.start + len(source))))
        gaps = find_gaps(cells[self.name])
        copied = np.zeros_like(gaps)
        is_copied = source >= 0
        if is_copied.any() and self.time_dim is not None:
            steps, position = np.unique(source[is_copied], return_inverse=True)
            read = self.reader.only([self.name]).read_steps(self.time_dim, steps, box)
            copied[is_copied] = find_gaps(read[self.name])[position]
        hidden = copied & ~gaps & cells[ALLOWED]
        part = slice(inner.start - around.start, inner.stop - around.start)
        return (
            {name: values[part] for name, values in cells.items()},
            hidden[part],
            length_classes(gaps)[part],
            length_classes(gaps | hidden)[part],
        )

    def _at(self, box: Box, steps: slice) -> Box:
        """Return a box at other time steps."""
        if self.time_dim is None:
            return box
        return {**box, self.time_dim: steps}

    def _read(self, box: Box) -> dict[str, NDArray[Any]]:
        """Read a block, with an axis for time also without a time dim."""
        cells = self.reader.read(box)
        if self.time_dim is not None:
            return cells
        return {n: v[np.newaxis] for n, v in cells.items()}

    def _as_read(self, values: NDArray[Any]) -> NDArray[Any]:
        if self.time_dim is not None:
            return values
        return np.asarray(values[0])


def _with_nan(values: NDArray[Any]) -> Floats:
    """Return values as float64, with NaN in gaps."""
    return np.where(find_gaps(values), np.nan, values).astype(np.float64)


def _allowed(cube: xr.Dataset, array: xr.DataArray, mask: xr.DataArray | str) -> xr.Variable:
    """Return the mask of the cells that may be filled."""
    if isinstance(mask, str):
        check_choice("mask", mask, [str(name) for name in cube.variables])
        mask = cube[mask]
    if not isinstance(mask, xr.DataArray):
        raise InvalidTypeError(f"mask must be a DataArray or a name, got {type(mask).__name__}")
    check_aligned("mask", mask, cube)
    return all_over_other_dims(as_flags(mask.variable), array.dims)
