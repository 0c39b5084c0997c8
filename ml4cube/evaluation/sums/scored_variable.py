"""`ScoredVariable`: one variable with its truth and predictions, and what fits into memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.axes import check_aligned
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.grid import Grid
from ml4cube.core.metric_registry import LABEL, PROBABILITY, VALUE
from ml4cube.core.sums.fields import check_weights
from ml4cube.cube.areas import cell_weights, check_not_zero
from ml4cube.evaluation.cells.baselines import CLIMATOLOGY
from ml4cube.evaluation.cells.cell_reader import CLASS, CellReader, Steps, Tile, cut
from ml4cube.evaluation.cells.classes import class_labels
from ml4cube.evaluation.cells.climatology import ClimatologyOptions
from ml4cube.evaluation.cells.climatology_distribution import distribution_beside, numbers_of_cell
from ml4cube.evaluation.cells.labels import Labels
from ml4cube.evaluation.cells.predicted import Predicted
from ml4cube.evaluation.cells.probabilities import Outputs
from ml4cube.evaluation.cells.timing import Timing
from ml4cube.evaluation.sums.spectrum import spectrum_dim
from ml4cube.preprocessing.cubes import all_over_other_dims

# Cells of one array that are computed with at a time, and that are read at a time, in a tile of at
# most so many bytes of climatologies: a few hundred MB in all.
_BLOCK_CELLS, _READ_CELLS, _TILE_BYTES = 2**20, 2**24, 2**27


@dataclass(frozen=True, eq=False)
class ScoreOptions:
    """What is compared, and how."""

    timing: Timing
    # Names of our baselines, and the climatology that they or a metric need.
    baselines: Sequence[str]
    climatology: ClimatologyOptions | None
    # Flags of the cells that are scored, None for all.
    part: xr.DataArray | None
    labels: Labels
    # Names of the sums by date.
    sums: Sequence[str]

    def along(self, name: str, dims: Sequence[str]) -> ScoreOptions:
        """Return the options for a variable that may lack dims of the flags."""
        for label in self.labels.of_cells:
            if lacking := [dim for dim in label.codes.dims if dim not in dims]:
                raise InvalidValueError(
                    f"by={label.name!r} lies along {lacking}, which {name!r} lacks; evaluate "
                    "variables of other dims by themselves, as with prediction[['name']]"
                )
        part, climatology = self.part, self.climatology
        if part is not None:
            part = all_over_other_dims(part, dims)
        if climatology is not None:
            climatology = climatology.along(dims)
        return replace(self, part=part, climatology=climatology)


@dataclass(frozen=True, eq=False)
class ScoredVariable:
    """One variable, and how its cells are weighted."""

    name: str
    options: ScoreOptions
    truth: CellReader
    # Cells of a step by dim; that of the rows of spectra is last.
    sizes: Mapping[str, int]
    row_dim: str | None
    # By model: the prediction, then given baselines.
    predicted: Mapping[str, Predicted]
    weights: xr.DataArray | None
    described_weights: str
    # Whether the prediction has labels of classes, without their probabilities.
    is_map: bool

    @classmethod
    def of(
        cls,
        name: str,
        cubes: Mapping[str, tuple[xr.Dataset, Mapping[str, Steps]]],
        truth: xr.Dataset,
        options: ScoreOptions,
        weights: Any,
    ) -> ScoredVariable:
        """Check one variable of the prediction and of given baselines against the truth."""
        array, time_dim = truth[name], options.timing.time_dim
        for model, (cube, _) in cubes.items():
            if name not in cube:
                raise InvalidValueError(f"the baseline {model!r} lacks the variable {name!r}")
        prediction = next(iter(cubes.values()))[0][name]
        row_dim = spectrum_dim(array, time_dim)
        dims = [str(dim) for dim in array.dims if dim not in (time_dim, row_dim)]
        if row_dim is not None:
            dims.append(row_dim)
        sizes, classes = {dim: array.sizes[dim] for dim in dims}, class_labels(prediction, array)
        if classes is not None:
            sizes, row_dim = {CLASS: len(classes), **sizes}, None
        predicted = {}
        for model, (cube, steps) in cubes.items():
            predicted[model] = Predicted.of(cube[name], steps, array, tuple(sizes), classes)
        of_cells, described, _ = cell_weights(weights, array, truth.variables).warn()
        if of_cells is not None:
            _check_weights(of_cells, array, sizes)
        return cls(
            name=name,
            options=options.along(name, (time_dim, *sizes)),
            truth=CellReader.of(array, (time_dim,), tuple(sizes), classes),
            sizes=sizes,
            row_dim=row_dim,
            predicted=predicted,
            weights=of_cells,
            described_weights=described,
            is_map=classes is not None and CLASS not in prediction.dims,
        )

    @property
    def n_classes(self) -> int:
        """Number of classes, 0 for a quantity."""
        return 0 if self.truth.classes is None else len(self.truth.classes)

    @property
    def predictions(self) -> set[str]:
        """What the models predict: a value, members, quantiles, labels, probabilities."""
        if self.is_map:
            return {LABEL}
        if self.n_classes:
            return {LABEL, PROBABILITY}
        return {VALUE, *(outputs.dim for outputs in self.several.values())}

    @property
    def outputs(self) -> Outputs | None:
        """Several outputs of the prediction of a quantity."""
        return None if self.n_classes else next(iter(self.predicted.values())).outputs

    @cached_property
    def distribution(self) -> Outputs | None:
        """What the climatology is, if it is a distribution as the prediction is."""
        climatology = self.options.climatology
        if self.outputs is None or climatology is None or not climatology.train.steps.size:
            return None
        if CLIMATOLOGY not in self.options.baselines:
            return None
        return distribution_beside(self.outputs)

    @cached_property
    def several(self) -> dict[str, Outputs]:
        """What the values are of the models that have several for a cell."""
        several = {}
        for name, predicted in self.predicted.items():
            if predicted.outputs is not None:
                several[name] = predicted.outputs
        if self.distribution is not None:
            several[CLIMATOLOGY] = self.distribution
        return several

    def tiles(self) -> list[dict[str, slice]]:
        """Cut the cells of a step so that climatologies and the values of a sample fit."""
        numbers = self._numbers_of_cell
        of_cell = 2 * self.options.timing.leads.size + numbers
        if self.options.climatology is not None:
            of_cell += self.options.climatology.numbers_of_cell
        if self.outputs is not None:
            of_cell += numbers_of_cell(distribution_beside(self.outputs))
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

    def samples_to_read(self, tile: Tile) -> list[Steps]:
        """Cut the samples into blocks that are read at a time, of whole chunks if these fit."""
        timing = self.options.timing
        n, first = timing.samples.size, next(iter(self.predicted.values()))
        size = max(1, _READ_CELLS // (_n_cells(tile) * self._numbers_of_cell))
        size = _whole_chunks(size, n, first.reader.array, timing.sample_dim)
        return cut(np.arange(n), size)

    def samples_at_once(self, tile: Tile) -> int:
        """Return how many samples are computed with at a time."""
        n_leads, numbers = self.options.timing.leads.size, self._numbers_of_cell
        if self.distribution is not None:
            numbers = max(numbers, n_leads * len(self.distribution.levels))
        of_cells = _BLOCK_CELLS // (_n_cells(tile) * n_leads)
        of_outputs = 4 * _BLOCK_CELLS // (_n_cells(tile) * numbers)
        return max(1, min(of_cells, of_outputs))

    def steps_at_once(self, tile: Tile) -> int:
        """Return how many steps of the truth are read at a time for a climatology."""
        timing = self.options.timing
        size = max(1, 4 * _BLOCK_CELLS // _n_cells(tile))
        return _whole_chunks(size, timing.truth_dates.size, self.truth.array, timing.time_dim)

    @property
    def _numbers_of_cell(self) -> int:
        """Numbers that the prediction has for one cell and sample."""
        most = 1
        for predicted in self.predicted.values():
            if predicted.outputs is not None:
                most = max(most, len(predicted.outputs.levels))
        return self.options.timing.leads.size * most


def _check_weights(weights: xr.DataArray, array: xr.DataArray, sizes: Mapping[str, int]) -> None:
    """Refuse weights that do not lie along the dims of a step, or are not positive."""
    if not set(weights.dims) <= set(sizes):
        raise InvalidValueError(
            f"weights must lie along the dims of a step of {array.name!r}, {tuple(sizes)}, got "
            f"{weights.dims}"
        )
    of_one_class = weights
    if CLASS in weights.dims and CLASS not in array.dims:
        of_one_class = weights.isel({CLASS: 0}, drop=True)
    check_aligned("weights", of_one_class, array)
    check_weights(weights.values)
    check_not_zero(weights)


def _n_cells(tile: Tile) -> int:
    return math.prod(part.stop - part.start for part in tile.values())


def _whole_chunks(size: int, n: int, array: xr.DataArray, dim: str) -> int:
    """Return a size up to `size` and n, of whole chunks along a dim if possible."""
    chunk = max(array.variable.chunksizes.get(dim, (1,)))
    if size >= n or chunk > size:
        return min(size, n)
    return size - size % chunk
