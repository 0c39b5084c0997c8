"""`ScoredVariable`: one variable with its truth and predictions, summed up block by block."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.axes import check_aligned
from ml4cube.core.climatology import Climatology
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.grid import Grid
from ml4cube.core.metric_registry import CLASS_SUMS, LABEL, PROBABILITY, VALUE
from ml4cube.core.sums.fields import check_weights
from ml4cube.cube.areas import cell_weights, check_not_zero
from ml4cube.evaluation.cells.baselines import CLIMATOLOGY, DAMPED, baseline_values
from ml4cube.evaluation.cells.cell_reader import CLASS, CellReader, Steps, Tile, at_steps
from ml4cube.evaluation.cells.classes import class_labels, known_in_all, most_likely
from ml4cube.evaluation.cells.climatology import ClimatologyOptions, TrainTile
from ml4cube.evaluation.cells.climatology_distribution import Distribution
from ml4cube.evaluation.cells.labels import Labels
from ml4cube.evaluation.cells.predicted import Predicted
from ml4cube.evaluation.cells.probabilities import Outputs, empty_reliability
from ml4cube.evaluation.cells.timing import Timing
from ml4cube.evaluation.cube_scores import in_block
from ml4cube.evaluation.sums.block_sums import ScoreBlock, ScoreSums
from ml4cube.evaluation.sums.spectrum import spectrum_dim
from ml4cube.preprocessing.cubes import all_over_other_dims
from ml4cube.progress import Stage

# Cells of one array that are computed with at a time, and that are read at a time, in a tile of at
# most so many bytes of climatologies: a few hundred MB in all.
_BLOCK_CELLS, _READ_CELLS, _TILE_BYTES = 2**20, 2**24, 2**27


@dataclass(frozen=True, eq=False)
class ScoredVariable:
    """One variable, and how its cells are weighted."""

    name: str
    timing: Timing
    truth: CellReader
    # Cells of a step by dim; that of the rows of spectra is last.
    sizes: Mapping[str, int]
    row_dim: str | None
    # By model: the prediction, then given baselines.
    predicted: Mapping[str, Predicted]
    weights: xr.DataArray | None
    described_weights: str
    # Whether the prediction has labels of classes, without their probabilities.
    is_map: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        cubes: Mapping[str, tuple[xr.Dataset, Mapping[str, Steps]]],
        truth: xr.Dataset,
        timing: Timing,
        weights: Any,
    ) -> ScoredVariable:
        """Check one variable of the prediction and of given baselines against the truth."""
        array, time_dim = truth[name], timing.time_dim
        if lacking := [model for model, (cube, _) in cubes.items() if name not in cube]:
            raise InvalidValueError(f"the baseline {lacking[0]!r} lacks the variable {name!r}")
        prediction = next(iter(cubes.values()))[0][name]
        row_dim = spectrum_dim(array, time_dim)
        dims = [str(dim) for dim in array.dims if dim not in (time_dim, row_dim)]
        dims += [] if row_dim is None else [row_dim]
        sizes, classes = {dim: array.sizes[dim] for dim in dims}, class_labels(prediction, array)
        if classes is not None:
            sizes, row_dim = {CLASS: len(classes), **sizes}, None
        predicted = {
            model: Predicted.of(cube[name], steps, array, tuple(sizes), classes)
            for model, (cube, steps) in cubes.items()
        }
        of_cells, described, _ = cell_weights(weights, array, truth.variables).warn()
        if of_cells is not None and not set(of_cells.dims) <= set(sizes):
            raise InvalidValueError(
                f"weights must lie along the dims of a step of {name!r}, {tuple(sizes)}, got "
                f"{of_cells.dims}"
            )
        if of_cells is not None:
            of_class = {} if classes is None else {CLASS: 0}
            one_class = of_cells.isel(of_class, drop=True, missing_dims="ignore")
            check_aligned("weights", one_class, array)
            check_weights(of_cells.values)
            check_not_zero(of_cells)
        reader = CellReader.of(array, (time_dim,), tuple(sizes), classes)
        is_map = classes is not None and CLASS not in prediction.dims
        return cls(name, timing, reader, sizes, row_dim, predicted, of_cells, described, is_map)

    @property
    def n_cells(self) -> int:
        """Cells of a step."""
        return math.prod(self.sizes.values())

    @property
    def n_classes(self) -> int:
        """Number of classes, 0 for a quantity."""
        return 0 if self.truth.classes is None else len(self.truth.classes)

    @property
    def n_sums_of_classes(self) -> int:
        """Sums of each row that classes add to those of quantities."""
        return 1 + len(CLASS_SUMS) * self.n_classes if self.n_classes else 0

    @property
    def predictions(self) -> set[str]:
        """What the models predict: a value, members, quantiles, labels, probabilities."""
        if self.is_map:
            return {LABEL}
        if self.n_classes:
            return {LABEL, PROBABILITY}
        several = [one.outputs for one in self.predicted.values() if one.outputs is not None]
        return {VALUE, *(outputs.dim for outputs in several)}

    @property
    def numbers_of_cell(self) -> int:
        """Numbers that the prediction has for one cell and sample."""
        n_leads = self.timing.leads.size
        several = [one.outputs for one in self.predicted.values() if one.outputs is not None]
        return n_leads * max((len(outputs.levels) for outputs in several), default=1)

    @property
    def outputs(self) -> Outputs | None:
        """Several outputs of the prediction of a quantity."""
        return None if self.n_classes else next(iter(self.predicted.values())).outputs

    def tiles(self, of_climatology: int) -> list[dict[str, slice]]:
        """Cut the cells of a step so that climatologies and the values of a sample fit."""
        n_leads, numbers = self.timing.leads.size, self.numbers_of_cell
        of_distribution = 0 if self.outputs is None else Distribution.numbers_of_cell(self.outputs)
        of_cell = of_climatology + of_distribution + 2 * n_leads + numbers
        limit = max(1, min(_TILE_BYTES // (8 * of_cell), 2 * _BLOCK_CELLS // numbers))
        size = dict(self.sizes)
        for dim, n in self.sizes.items():
            if dim == self.row_dim or (dim == CLASS and self.n_classes):
                continue
            others = math.prod(size.values()) // size[dim]
            size[dim] = max(1, min(n, limit // others))
            size[dim] = _whole_chunks(size[dim], n, self.truth.array, dim)
        grid = Grid.blocks(dict(self.sizes), size)
        return [{dim: block.slices[dim] for dim in self.sizes} for block in grid]

    def blocks(self, tile: Tile) -> list[Steps]:
        """Cut the samples into blocks that are read at a time, of whole chunks if these fit."""
        cells = math.prod(part.stop - part.start for part in tile.values())
        n, first = self.timing.samples.size, next(iter(self.predicted.values()))
        size = max(1, _READ_CELLS // (cells * self.numbers_of_cell))
        size = _whole_chunks(size, n, first.reader.array, self.timing.sample_dim)
        return _cut(np.arange(n), size)

    def sum_up(
        self,
        names: Sequence[str],
        options: ClimatologyOptions | None,
        part: xr.DataArray | None,
        labels: Labels,
        kept: Sequence[str],
        stage: Stage,
    ) -> ScoreSums:
        """Return the sums of all cells of a part, for the prediction and baselines by name."""
        first = next(iter(self.predicted.values()))
        dims = (self.timing.time_dim, *self.sizes)
        part = None if part is None else all_over_other_dims(part, dims)
        options = None if options is None else options.along(dims)
        for one in labels.of_cells:
            if lacking := [dim for dim in one.codes.dims if dim not in dims]:
                raise InvalidValueError(
                    f"by={one.name!r} lies along {lacking}, which {self.name!r} lacks; evaluate "
                    "variables of other dims by themselves, as with prediction[['name']]"
                )
        shape = (self.timing.samples.size, self.timing.leads.size, labels.n_of_cells)
        n_models = len({*self.predicted, *names})
        row_length = None if self.row_dim is None else self.sizes[self.row_dim]
        reliability = empty_reliability(first.outputs, self.truth.classes)
        if self.is_map:
            reliability = None
        sums = ScoreSums(kept, n_models, shape, self.sizes, row_length, reliability, self.n_classes)
        for tile in self.tiles(0 if options is None else options.numbers_of_cell):
            scored_tile = _Tile(self, tile, names, options, part, labels)
            for samples in self.blocks(tile):
                for block in scored_tile.blocks(samples):
                    sums.add(block)
                stage.update()
        return sums


class _Tile:
    """The cells of a tile, at all dates."""

    def __init__(
        self,
        scored: ScoredVariable,
        tile: Tile,
        names: Sequence[str],
        options: ClimatologyOptions | None,
        part: xr.DataArray | None,
        labels: Labels,
    ) -> None:
        self._scored, self._tile, self._names = scored, tile, names
        self._part, self._labels = part, labels
        self._cells = math.prod(along.stop - along.start for along in tile.values())
        self._climatology: Climatology | None = None
        self._distribution: Distribution | None = None
        self._damping = None
        timing, dims = scored.timing, tuple(scored.sizes)
        if options is not None:
            n_steps, time_dim = timing.truth_dates.size, timing.time_dim
            steps = max(1, 4 * _BLOCK_CELLS // self._cells)
            steps = _whole_chunks(steps, n_steps, scored.truth.array, time_dim)
            train = TrainTile(scored.truth, options.train, timing.time_dim, dims, tile)
            self._climatology = options.of_tile(scored.name, train, timing.truth_dates, steps)
            outputs = scored.outputs
            if CLIMATOLOGY in names and outputs is not None and options.train.steps.size:
                dates = timing.truth_dates
                self._distribution = Distribution.of(outputs, train, self._climatology, dates)
            if DAMPED in names:
                self._damping = train.damping(self._climatology, timing, steps)
        weights = scored.weights
        self._weights = (
            np.ones((1,) * len(dims)) if weights is None else in_block(weights, dims, tile)
        )

    @property
    def _samples_of_block(self) -> int:
        """Samples to compute with at a time."""
        scored = self._scored
        of_cells: int = _BLOCK_CELLS // (self._cells * scored.timing.leads.size)
        numbers = scored.numbers_of_cell
        if self._distribution is not None:
            levels = len(self._distribution.outputs.levels)
            numbers = max(numbers, scored.timing.leads.size * levels)
        of_outputs: int = 4 * _BLOCK_CELLS // (self._cells * numbers)
        return max(1, min(of_cells, of_outputs))

    def blocks(self, samples: Steps) -> Iterator[ScoreBlock]:
        """Read some samples, and yield them in smaller blocks to compute with."""
        scored, timing, tile = self._scored, self._scored.timing, self._tile
        time_dim, dims = timing.time_dim, tuple(scored.sizes)
        wanted = np.concatenate([timing.valid_steps[samples].ravel(), timing.init_steps[samples]])
        truth = scored.truth.load({time_dim: wanted}, tile)
        loaded = {name: one.load(samples, tile) for name, one in scored.predicted.items()}
        for some in _cut(samples, self._samples_of_block):
            steps = timing.valid_steps[some]
            points, several = {}, {}
            for name, one in scored.predicted.items():
                values = one.at(some, loaded[name])
                points[name] = values
                if one.outputs is not None:
                    is_complete = np.isfinite(values).all(2)
                    points[name] = np.where(is_complete, one.outputs.point(values, 2), np.nan)
                    several[name] = one.outputs, values
            points |= baseline_values(
                self._names, some, timing, truth, self._climatology, self._damping
            )
            if self._distribution is not None:
                around = self._distribution.around(points[CLIMATOLOGY], steps)
                several[CLIMATOLOGY] = self._distribution.outputs, around
            if scored.n_classes:
                # compared with labels, baselines are labels too
                as_one = most_likely if scored.is_map else known_in_all
                points = {name: as_one(values, 2) for name, values in points.items()}
            labels = self._labels.in_tile(steps, time_dim, dims, tile)
            is_date = (steps >= 0).reshape(*steps.shape, *(1,) * len(dims))
            labels = np.where(is_date, labels, -1)
            if self._part is not None:
                is_part = at_steps(self._part, steps, time_dim, dims, tile)
                labels = np.where(is_part, labels, -1)
            yield ScoreBlock(
                samples=some,
                tile=tile,
                truth=truth.at({time_dim: steps}),
                points=points,
                several=several,
                climatology=None if self._climatology is None else self._climatology.at(steps),
                weights=self._weights,
                labels=labels,
                has_rows=scored.row_dim is not None,
            )


def _cut(samples: Steps, size: int) -> list[Steps]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def _whole_chunks(size: int, n: int, array: xr.DataArray, dim: str) -> int:
    """Return a size up to `size` and n, of whole chunks along a dim if possible."""
    chunk = max(array.variable.chunksizes.get(dim, (1,)))
    if size >= n or chunk > size:
        return min(size, n)
    return size - size % chunk
