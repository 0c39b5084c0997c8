"""`ScoredVariable`: one variable with its truth and predictions, and the blocks that are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.grid import Block
from ml4cube.core.metric_registry import LABEL, PROBABILITY, VALUE
from ml4cube.cube.coordinates import LEAD
from ml4cube.cube.scan import blocks_of
from ml4cube.evaluation.cells.baselines import CLIMATOLOGY, PREDICTION
from ml4cube.evaluation.cells.cell_reader import CLASS, CellReader, Steps, Tile
from ml4cube.evaluation.cells.classes import class_labels
from ml4cube.evaluation.cells.predicted import Predicted
from ml4cube.evaluation.cells.probabilities import Outputs, reliability_coords
from ml4cube.evaluation.cells.timing import Timing
from ml4cube.evaluation.sums.score_options import ScoreOptions
from ml4cube.evaluation.sums.spectrum import spectrum_dim


@dataclass(frozen=True, eq=False)
class ScoredVariable:
    """One variable, and how its cells are weighted."""

    name: str
    timing: Timing
    # With the part, labels, weights and train cells beside it.
    truth: CellReader
    # Cells of a step by dim; that of the rows of spectra is last.
    sizes: Mapping[str, int]
    row_dim: str | None
    # By model: the prediction, then given baselines; and the names of ours.
    predicted: Mapping[str, Predicted]
    baselines: Sequence[str]
    # What the climatology is, if it is a distribution as the prediction is.
    distribution: Outputs | None
    # Number of labels of each kind of labels of cells, and the names of the sums by date.
    labels: Mapping[str, int]
    sums: Sequence[str]
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
    ) -> ScoredVariable:
        """Check one variable of the prediction and of given baselines against the truth."""
        array, time_dim = truth[name], options.timing.time_dim
        prediction = next(iter(cubes.values()))[0][name]
        row_dim = spectrum_dim(array, time_dim)
        dims = [str(dim) for dim in array.dims if dim not in (time_dim, row_dim)]
        if row_dim is not None:
            dims.append(row_dim)
        sizes, classes = {dim: array.sizes[dim] for dim in dims}, class_labels(prediction, array)
        beside, described = options.beside(array, truth, (time_dim, *sizes))
        if classes is not None:
            sizes, row_dim = {CLASS: len(classes), **sizes}, None
        predicted = {}
        for model, (cube, steps) in cubes.items():
            predicted[model] = Predicted.of(cube[name], steps, array, tuple(sizes), classes)
        distribution = None
        if classes is None:
            distribution = options.distribution_beside(predicted[PREDICTION].outputs)
        return cls(
            name=name,
            timing=options.timing,
            truth=CellReader.of(array, (time_dim,), tuple(sizes), classes, beside),
            sizes=sizes,
            row_dim=row_dim,
            predicted=predicted,
            baselines=options.baselines,
            distribution=distribution,
            labels=options.labels.sizes,
            sums=options.sums,
            described_weights=described,
            is_map=classes is not None and CLASS not in prediction.dims,
        )

    @property
    def models(self) -> list[str]:
        """Names of all models, the prediction first."""
        return [*self.predicted, *self.baselines]

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
    def several(self) -> dict[str, Outputs]:
        """What the values are of the models that have several for a cell."""
        several = {}
        for name, predicted in self.predicted.items():
            if predicted.outputs is not None:
                several[name] = predicted.outputs
        if self.distribution is not None:
            several[CLIMATOLOGY] = self.distribution
        return several

    @property
    def first(self) -> Predicted:
        """The prediction itself."""
        return self.predicted[PREDICTION]

    @property
    def outputs(self) -> Outputs | None:
        """Several outputs of the prediction of a quantity."""
        return None if self.n_classes else self.first.outputs

    @property
    def reliability_coords(self) -> dict[str, Any]:
        """Labels of the sums of reliability, if there are some."""
        if self.is_map:
            return {}
        return reliability_coords(self.outputs, self.truth.classes)

    def tiles(self) -> Iterator[tuple[Tile, list[Block]]]:
        """Yield tiles of the cells of a step, each with the blocks of the prediction in it.

        A block has all rows of spectra, classes and outputs that it meets.
        """
        reader, step_dims = self.first.reader.reader, self.first.reader.step_dims
        uncut = [dim for dim in reader.dims if dim not in self.sizes and dim not in step_dims]
        if self.row_dim is not None:
            uncut.append(self.row_dim)
        if self.n_classes and CLASS in reader.dims:
            uncut.append(CLASS)

        def cells_of(block: Block) -> tuple[int, ...]:
            return block.index[len(step_dims) :]

        blocks = sorted(blocks_of(reader, uncut=uncut), key=cells_of)
        for _, of_tile in groupby(blocks, cells_of):
            listed = list(of_tile)
            cells = listed[0].slices
            yield {dim: cells.get(dim, slice(0, n)) for dim, n in self.sizes.items()}, listed

    @property
    def n_blocks(self) -> int:
        """Number of blocks of the prediction."""
        return sum(len(blocks) for _, blocks in self.tiles())

    def rows_of(self, block: Block) -> Steps:
        """Return the rows, dates and leads combined, of a block of the prediction."""
        rows = np.arange(self.timing.valid_steps.size).reshape(self.timing.valid_steps.shape)
        samples = block.slices[self.timing.sample_dim]
        return rows[samples, block.slices.get(LEAD, slice(None))].ravel()
