"""Classify the windows of a tile by part, mask and gaps, and make the samples.

A *tile* is a box of neighbouring windows, the unit in which a cube is read; as a `Block` it counts
windows, not cells. The order of work is the same for every dataset: label, mask, drop, fill,
callback. Scaling comes later, when the statistics of all train samples are known.
"""

from __future__ import annotations

import math
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, RunError
from ml4cube.core.grid import Block, Grid
from ml4cube.core.missing import bool_mask, find_gaps, window_all, window_any
from ml4cube.core.scaling import Scaling
from ml4cube.core.split_plan import EXCLUDED, PARTS
from ml4cube.core.statistics import Statistics
from ml4cube.cube.absent_chunks import ABSENT
from ml4cube.cube.reader import CubeReader, Slices
from ml4cube.cube.variables import DATE_UNITS, holds_dtype
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.recipe.preparation import Preparation, cut, fills_of, mask_cells, wait_for_cut
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import INPUT, TARGET, Lead

Arrays = dict[str, NDArray[Any]]
Callback = Callable[[Arrays], Mapping[str, Any]]


def name_of(function: Callback | None) -> str | None:
    """Return the name of a callback, to be stored with the samples."""
    if function is None:
        return None
    return str(getattr(function, "__qualname__", type(function).__name__))


#: Cells of the inputs, and of targets that lie elsewhere, by role.
CellsByRole = dict[str, Arrays]
#: Window shape and dtype of every variable of samples.
Schema = dict[str, tuple[tuple[int, ...], str]]

#: Outcomes of windows, by code; the code of a part is its label.
OUTCOMES = ("test", "train", "val", "straddle", "buffer", "mask", "gap", "unused")
REASONS = OUTCOMES[3:]
_CODES = {name: code for code, name in enumerate(OUTCOMES)}
assert all(_CODES[part] == label for part, label in PARTS.items())


@dataclass(frozen=True)
class Axis:
    """The coordinate along one dim of a cube, as it is stored."""

    name: str
    # One for each cell, dates as numbers.
    values: NDArray[Any]
    # With the encoding of dates.
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class UsedBlocks:
    """The blocks of a cube that are used; a window belongs to the block in which it starts."""

    # Dims in the order of the cube.
    grid: Grid
    # In the shape of ``grid.counts``.
    used: NDArray[np.bool_]

    def are_used(self, starts: Sequence[NDArray[np.intp]]) -> NDArray[np.bool_]:
        """Return which windows of a tile are used, by their first cells along each dim."""
        blocks = [cells // size for cells, size in zip(starts, self.grid.stride, strict=True)]
        return self.used[np.ix_(*blocks)]


@dataclass(frozen=True)
class Extractor:
    """Classifies windows and makes samples, tile by tile; picklable."""

    bound: BoundRecipe
    # Tiles over the positions of ``bound.windows``.
    tiles: Grid
    # One for each dim of the cube.
    axes: tuple[Axis, ...]
    # Name of the split label.
    label: str
    # None if all blocks are used.
    used_blocks: UsedBlocks | None = None
    # Of the train cells, where the fill method needs them.
    fill: Statistics | None = None
    # Called with all samples of one part of a tile.
    callback: Callback | None = None
    # Where targets lie, if not in the cells of the inputs, and how they are classified and cut.
    lead: Lead = field(default_factory=dict)
    targets: Extractor | None = None

    @property
    def recipe(self) -> Recipe:
        """How samples are cut from any cube."""
        return self.bound.recipe

    @property
    def by_role(self) -> dict[str, Extractor]:
        """The extractor of each role that has cells of its own."""
        if self.targets is None:
            return {INPUT: self}
        return {INPUT: self, TARGET: self.targets}

    def boxes(self, tile: Block) -> dict[str, dict[str, slice]]:
        """Return the cells that a tile's windows cover, by role."""
        boxes = {INPUT: self.bound.cells_of(tile)}
        if self.targets is not None:
            from_first_target = self.targets.bound.cells_of(tile)
            boxes[TARGET] = {
                dim: slice(cells.start + self.lead[dim].offset, cells.stop + self.lead[dim].offset)
                for dim, cells in from_first_target.items()
            }
        return boxes

    def read(
        self, reader: CubeReader, tile: Block, names: Mapping[str, Collection[str]]
    ) -> CellsByRole:
        """Read some variables of each role; cells of both roles are read once."""
        boxes = self.boxes(tile)
        union, read_once = boxes[INPUT], Arrays()
        if self.targets is not None and _overlap(boxes[INPUT], boxes[TARGET]):
            for dim, s in boxes[TARGET].items():
                start, stop = min(union[dim].start, s.start), max(union[dim].stop, s.stop)
                union = union | {dim: slice(start, stop)}
            of_both = [name for name in names[INPUT] if name in names[TARGET]]
            read_once = reader.only(of_both).read(union)
        cells: CellsByRole = {}
        for role, box in boxes.items():
            cells[role] = reader.only(n for n in names[role] if n not in read_once).read(box)
            inside = tuple(
                slice(s.start - union[dim].start, s.stop - union[dim].start)
                for dim, s in box.items()
            )
            cells[role] |= {name: values[inside] for name, values in read_once.items()}
        return cells

    @property
    def sample_variables(self) -> tuple[str, ...]:
        """Variables of the cube that `samples` needs."""
        mask = self.recipe.filter_var
        return (*self.recipe.variables, *([mask] if mask and self.recipe.mask_makes_gaps else []))

    def outcome_variables(self, dtypes: Mapping[str, np.dtype[Any]]) -> dict[str, tuple[str, ...]]:
        """Variables of the cube that `outcomes` needs, by role."""
        return {role: of_role._outcome_variables(dtypes) for role, of_role in self.by_role.items()}

    def _outcome_variables(self, dtypes: Mapping[str, np.dtype[Any]]) -> tuple[str, ...]:
        """Variables that classify windows of one role: the label, the mask, those with gaps.

        Among them are the cells of absent chunks, if a variable without gaps has any.
        """
        recipe = self.recipe
        checked = () if recipe.drop_nan is None else recipe.variables
        with_gaps = (name for name in checked if dtypes[name].kind in "fM")
        mask = () if recipe.filter_var is None else (recipe.filter_var,)
        absent = (name for name in dtypes if name == ABSENT)
        return (*with_gaps, self.label, *mask, *absent)

    def schema(self, dtypes: Mapping[str, np.dtype[Any]]) -> Schema:
        """Return the schema of samples that no callback changes, from the dtypes of the cube."""
        return {
            name: (self.recipe.window_shape, dtypes[name].str) for name in self.recipe.variables
        }

    def only(self, names: Iterable[str]) -> Extractor:
        """Return an extractor of some variables; of all if a callback needs them, or none fits."""
        wanted = set(names)
        variables = tuple(name for name in self.recipe.variables if name in wanted)
        if self.callback is not None or not variables:
            return self
        recipe = replace(self.recipe, variables=variables)
        return replace(self, bound=replace(self.bound, recipe=recipe))

    def outcomes(self, cells: CellsByRole, tile: Block) -> NDArray[np.uint8]:
        """Return the outcome code of each window of a tile.

        Inputs and targets must be samples of the same part; they are dropped together, for the
        reason of the inputs, else for that of the targets.
        """
        inputs = self._outcomes_of_role(cells[INPUT], tile)
        if self.targets is None:
            return inputs
        targets = self.targets._outcomes_of_role(cells[TARGET], tile)
        pairs = np.where(inputs == targets, inputs, _CODES["straddle"])
        pairs = np.where(targets >= len(PARTS), targets, pairs)
        return np.where(inputs >= len(PARTS), inputs, pairs).astype(np.uint8)

    def _outcomes_of_role(self, cells: Arrays, tile: Block) -> NDArray[np.uint8]:
        codes = self._parts(cells[self.label], tile)
        for reason, dropped in self._dropped_windows(cells):
            is_in_part = codes < len(PARTS)
            codes[dropped & is_in_part] = _CODES[reason]
        if self.used_blocks is not None:
            codes[~self.used_blocks.are_used(self.bound.starts_of(tile))] = _CODES["unused"]
        return codes.reshape(-1)

    def _parts(self, label: NDArray[Any], tile: Block) -> NDArray[np.uint8]:
        """Return the code of the part that all cells of a window have, or why there is none."""
        recipe = self.recipe
        labels = _as_labels(label, self.label)
        counts = tuple(tile.shape.values())
        first = labels.flat[0]
        if (labels == first).all():
            return np.full(counts, _CODES["buffer"] if first == EXCLUDED else first, np.uint8)
        codes = np.full(counts, _CODES["straddle"], np.uint8)
        for part in PARTS.values():
            codes[window_all(labels == part, recipe.size, recipe.stride)] = part
        codes[window_any(labels == EXCLUDED, recipe.size, recipe.stride)] = _CODES["buffer"]
        return codes

    def _dropped_windows(self, cells: Arrays) -> list[tuple[str, NDArray[np.bool_]]]:
        """Return reasons to drop windows, in order of precedence, and which windows each drops."""
        recipe = self.recipe
        drops = []
        mask = self._mask(cells)
        if mask is not None and recipe.mask_drops_samples:
            drops.append(("mask", ~window_all(mask, recipe.size, recipe.stride)))
        if ABSENT in cells:
            drops.append(("gap", window_any(cells[ABSENT], recipe.size, recipe.stride)))
        if recipe.drop_nan == "masked":
            assert mask is not None
            drops.append(("mask", ~window_any(mask, recipe.size, recipe.stride)))
        if recipe.drop_nan is not None:
            drops += self._windows_with_gaps(cells, mask)
        return drops

    def _windows_with_gaps(
        self, cells: Arrays, mask: NDArray[np.bool_] | None
    ) -> list[tuple[str, NDArray[np.bool_]]]:
        """Return which windows `drop_nan` drops for their gaps, if there are any."""
        recipe = self.recipe
        values_read = (cells[name] for name in recipe.variables if name in cells)
        gaps = [self._gaps(values, mask) for values in values_read if values.dtype.kind in "fM"]
        if not gaps:
            return []
        if recipe.drop_nan == "if_all_nan":
            all_gaps = np.logical_and.reduce(gaps)
            return [("gap", window_all(all_gaps, recipe.size, recipe.stride))]
        any_gap = np.logical_or.reduce(gaps)
        if recipe.drop_nan == "masked":
            any_gap = any_gap & mask
        if not any_gap.any():
            return []
        return [("gap", window_any(any_gap, recipe.size, recipe.stride))]

    def _mask(self, cells: Arrays) -> NDArray[np.bool_] | None:
        """Return the mask, False where it has a gap."""
        if self.recipe.filter_var is None:
            return None
        return bool_mask(cells[self.recipe.filter_var])

    def _gaps(self, values: NDArray[Any], mask: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
        """Return the gaps of a variable, with those that the mask makes."""
        gaps = find_gaps(values)
        if mask is not None and self.recipe.mask_makes_gaps:
            return gaps | ~mask
        return gaps

    def filled_in(self, cells: Arrays) -> tuple[str, ...]:
        """Return the variables with gaps that are filled in a tile."""
        recipe = self.recipe
        if (
            not recipe.fill_method or recipe.drop_nan == "auto"
        ):  # which drops every sample with a gap
            return ()
        mask = self._mask(cells)
        names = [n for n in recipe.variables if recipe.fill_of(n) and cells[n].dtype.kind == "f"]
        return tuple(name for name in names if self._gaps(cells[name], mask).any())

    def origins(self, tile: Block, keep: NDArray[np.intp]) -> Arrays:
        """Return the first cell of each sample along every dim, as value and as index."""
        result: Arrays = {}
        windows = np.unravel_index(keep, tuple(tile.shape.values()))
        for axis, dim, starts, along in zip(
            self.axes, self.recipe.dims, self.bound.starts_of(tile), windows, strict=True
        ):
            result[axis.name] = axis.values[starts].take(along)
            result[f"{dim}_index"] = starts.astype(self.bound.index_dtype).take(along)
        return result

    def samples(self, cells: Arrays, tile: Block, keep: NDArray[np.intp]) -> Arrays:
        """Make samples of the windows in `keep`: mask, cut, fill, callback; not scaled yet."""
        recipe, mask = self.recipe, None
        if recipe.mask_makes_gaps:
            mask = recipe.filter_var
        masked = mask_cells(cells, recipe.variables, mask)
        floats = [name for name, values in masked.items() if values.dtype.kind == "f"]
        # Samples are scaled when the statistics are known, and after the callback.
        preparation = Preparation(
            self.bound.sizes, mask, fills_of(recipe, floats, self.fill), scaling={}
        )
        box = self.bound.cells_of(tile)
        # Most windows may be dropped, and their cells need no statistics to fill them by.
        prepared = wait_for_cut(masked, box, preparation)
        windows, index = (
            self.bound.windows_in(tile),
            np.unravel_index(keep, tuple(tile.shape.values())),
        )
        samples = {name: cut(prepared, name, windows, index) for name in masked}
        if self.callback is None:
            return samples
        return self._apply_callback(samples, len(keep), tile)

    def _apply_callback(self, samples: Arrays, n: int, tile: Block) -> Arrays:
        assert self.callback is not None
        where = ", ".join(f"{d} {s.start}:{s.stop}" for d, s in self.bound.cells_of(tile).items())
        try:
            returned = self.callback(samples)
            is_dict = isinstance(returned, Mapping)
            result = {str(k): _in_date_units(v) for k, v in returned.items()} if is_dict else {}
        # sys.exit() would end the run and the script as if everything had been written
        except (Exception, SystemExit) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise RunError(
                f"the callback failed on {n} samples of tile {tile.id} (cells {where}): "
                f"{type(error).__name__}: {error} (line {frame.lineno} of {frame.filename}); "
                "fix it and run again"
            ) from error
        wrong: Any = {k: v.shape for k, v in result.items() if v.ndim == 0 or len(v) != n}
        wrong |= {k: v.dtype.name for k, v in result.items() if not holds_dtype(v.dtype)}
        if wrong or not result:
            empty = f"no variable: {result}" if is_dict else f"a {type(returned).__name__}"
            raise RunError(
                f"the callback must return a dict of arrays of numbers (of up to 8 bytes), "
                "booleans or dates (up to nanoseconds), with as many samples along the first axis "
                f"as it got; it got {n} samples of tile {tile.id} (cells {where}) and returned "
                f"{wrong or empty}"
            )
        return result

    def scaled(self, samples: Arrays, scaling: Mapping[str, Scaling], origins: Arrays) -> Arrays:
        """Scale the variables of samples that are scaled."""
        first_cells = {dim: origins[f"{dim}_index"] for dim in self.recipe.dims}
        result = dict(samples)
        for name, of_variable in scaling.items():
            values = samples[name]
            window = self.recipe.window_of(name, values.shape[1:])
            result[name] = of_variable.scaled(values, first_cells, window)
        return result

    def to_scale(self, dtypes: Mapping[str, Any]) -> list[str]:
        """Return the variables of samples that are scaled: floats that are no classes."""
        floats = (name for name, dtype in dtypes.items() if np.dtype(dtype).kind == "f")
        return [name for name in floats if name not in self.recipe.classes]

    def statistics(self, samples: Arrays) -> Statistics:
        """Return the statistics of the variables that are scaled."""
        scaled = self.to_scale({name: values.dtype for name, values in samples.items()})
        return Statistics.of({name: samples[name] for name in scaled}, part="train")

    def train_cell_statistics(self, reader: CubeReader, block: Block) -> Statistics:
        """Return the statistics of the raw train cells in a box, which some fill methods need."""
        cells = reader.read(block.slices)
        counted = _as_labels(cells[self.label], self.label) == PARTS["train"]
        mask = self._mask(cells)
        if mask is not None and self.recipe.apply_mask:
            counted &= mask
        floats = {n: cells[n] for n in self.recipe.variables if cells[n].dtype.kind == "f"}
        return Statistics.of(floats, counted, part="train")


def _in_date_units(values: Any) -> NDArray[Any]:
    """Convert dates of other units, such as days, to one that stores have."""
    array = np.asarray(values)
    if array.dtype.kind != "M":
        return array
    unit = np.datetime_data(array.dtype)[0]
    target = np.dtype(f"M8[{unit if unit in DATE_UNITS else 's'}]")
    if np.can_cast(array.dtype, target):
        return array.astype(target, copy=False)
    return array


def _overlap(a: Slices, b: Slices) -> bool:
    return all(max(s.start, b[d].start) < min(s.stop, b[d].stop) for d, s in a.items())


def _as_labels(label: NDArray[Any], name: str) -> NDArray[np.uint8]:
    """Return labels as uint8; a gap in the label excludes its cell."""
    if label.dtype == np.uint8 and label.size and label.min() == label.max() in PARTS.values():
        return label
    gaps = find_gaps(label)
    known = gaps | np.isin(label, (*PARTS.values(), EXCLUDED))
    if not known.all():
        raise InvalidValueError(
            f"the split label {name!r} must be 1 (train), 0 (test), 2 (val) or 255 (excluded), got "
            f"{label[~known].flat[0]!r}; rename it if it is data"
        )
    return np.where(gaps, EXCLUDED, label).astype(np.uint8)


def tiling(
    bound: BoundRecipe, chunks: Mapping[str, int], sample_bytes: int, target_bytes: int
) -> Grid:
    """Return the tiles in which a cube is read, at least `target_bytes` of samples each."""
    windows = bound.windows
    counts = dict(zip(windows.dims, windows.counts, strict=True))
    stride = dict(zip(windows.dims, windows.stride, strict=True))
    tile = {d: min(max(1, round(chunks.get(d, 1) / stride[d])), n) for d, n in counts.items()}
    while math.prod(tile.values()) * sample_bytes < target_bytes:
        growing = [d for d in counts if tile[d] < counts[d]]
        if not growing:
            break
        # double the dim with the most tiles, of equals the one whose name comes last
        dim = max(growing, key=lambda d: (counts[d] / tile[d], d))
        tile[dim] = min(tile[dim] * 2, counts[dim])
    return Grid.blocks(counts, tile)
