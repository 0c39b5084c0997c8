"""`ScoreSums`: all sums from which the scores of one variable follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.metric_registry import CLASS_SUMS, MOMENTS, SUMMANDS, Cells, defaults_of, sums_of
from ml4cube.core.sums.pairs import COUNTS, Groups, merged
from ml4cube.evaluation.cells.cell_reader import Floats, Steps, Tile
from ml4cube.evaluation.cells.probabilities import Outputs, reliability_sums
from ml4cube.evaluation.sums.spectrum import add_power


def sums_to_keep(metrics: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the sums by date of all variables: of the usual metrics, and these."""
    of_metrics = sums_of((*defaults_of("evaluate"), *metrics))
    of_cells = [name for name in of_metrics if name in SUMMANDS or name in MOMENTS]
    return (*COUNTS, "weight", *of_cells)


@dataclass(frozen=True, eq=False)
class ScoreBlock:
    """Values of some samples in one tile, arrays of shape (samples, leads, *cells)."""

    samples: Steps
    tile: Tile
    truth: Floats
    # The scored value of each model, the prediction first, and all outputs of those with several.
    points: Mapping[str, Floats]
    several: Mapping[str, tuple[Outputs, Floats]]
    climatology: Floats | None
    # Weight and label of each cell, which broadcast to the shape; -1 is a cell that is not scored.
    weights: Floats
    labels: Steps
    has_rows: bool


class ScoreSums:
    """Sums over all blocks of one variable."""

    def __init__(
        self,
        names: Sequence[str],
        n_models: int,
        shape: tuple[int, int, int],
        cells: Mapping[str, int],
        row_length: int | None,
        reliability: xr.DataArray | None,
        n_classes: int = 0,
    ) -> None:
        self.n_classes = n_classes
        # by name, (models, samples, leads, labels), those of classes with a last axis of these
        self.rows = {name: np.zeros((n_models, *shape)) for name in names}
        if n_classes:
            self.rows["log_score"] = np.zeros((n_models, *shape))
            by_class = (n_models, *shape, n_classes)
            self.rows |= {name: np.zeros(by_class) for name in CLASS_SUMS}
        # weights by true and by predicted class
        self.confusion = np.zeros((n_models, n_classes, n_classes))
        # over samples and leads, for each cell
        self.cell_count = np.zeros(tuple(cells.values()), np.int64)
        self.cell_errors = np.zeros((n_models, *cells.values()))
        # of prediction and truth
        wavenumbers = 0 if row_length is None else row_length // 2 + 1
        self.power = np.zeros((2, shape[1], wavenumbers))
        self.power_weight = np.zeros(shape[1])
        self.reliability = reliability
        # what the several numbers of models for one cell are
        self.outputs: dict[str, Outputs] = {}

    def add(self, block: ScoreBlock) -> None:
        """Add a block: cells where the truth and all models have a value, the same for all."""
        truth, shape = block.truth, block.truth.shape
        self.outputs |= {name: outputs for name, (outputs, _) in block.several.items()}
        labels = np.broadcast_to(block.labels, shape)
        weights = np.broadcast_to(block.weights, shape)
        has_label = labels >= 0
        has_truth = has_label & np.isfinite(truth)
        has_value = [np.isfinite(point) for point in block.points.values()]
        scored = np.logical_and.reduce([has_truth, *has_value])
        row = np.arange(shape[0] * shape[1]).reshape(*shape[:2], *(1,) * (truth.ndim - 2))
        group = row * self.rows["weight"].shape[-1] + labels
        self._count("gaps", slice(None), block, group, has_label & ~has_truth)
        self._count("count", slice(None), block, group, scored)
        for model, is_predicted in enumerate(has_value):
            self._count("unpredicted", model, block, group, has_truth & ~is_predicted)
        self._add_errors(block, scored, group, weights)
        box: tuple[Any, ...] = tuple(block.tile.values())
        self.cell_count[box] += scored.sum((0, 1))
        for model, point in enumerate(block.points.values()):
            errors = np.where(scored, (point - truth) ** 2, 0.0).sum((0, 1))
            self.cell_errors[(model, *box)] += errors
        if block.has_rows:
            prediction = next(iter(block.points.values()))
            shown = np.where(has_truth, np.stack([prediction, truth]), np.nan)
            add_power(self.power, self.power_weight, shown, weights)
        self._add_reliability(block, scored, weights)
        if self.n_classes:
            self._add_classes(block, scored, group, weights)

    def _count(
        self,
        name: str,
        model: int | slice,
        block: ScoreBlock,
        group: Steps,
        flags: NDArray[np.bool_],
    ) -> None:
        """Add the numbers of cells that have a flag; a cell counts once, not for each class."""
        if self.n_classes:
            group, flags = group[:, :, 0], flags[:, :, 0]
        at = _of_samples(block)
        entries = self.rows[name][0, at].shape
        numbers = np.bincount(group[flags], minlength=self._n_groups(block)).reshape(entries)
        self.rows[name][model, at] += numbers

    def _n_groups(self, block: ScoreBlock) -> int:
        """Return the number of samples, leads and labels of a block, combined."""
        return self.rows["weight"][0, _of_samples(block)].size

    def _add_errors(
        self, block: ScoreBlock, scored: NDArray[np.bool_], group: Steps, weights: Floats
    ) -> None:
        """Add the weighted sums of the scored cells."""
        groups = Groups(group[scored], weights[scored], self._n_groups(block))
        true = block.truth[scored]
        normal = None if block.climatology is None else block.climatology[scored]
        for model, (name, point) in enumerate(block.points.items()):
            predicted = point[scored]
            crps, variance = np.abs(predicted - true), None
            if name in block.several:
                outputs, values = block.several[name]
                of_cells = np.moveaxis(values, 2, -1)[scored]
                crps = outputs.crps(of_cells, true, 1)
                variance = outputs.variance(of_cells, 1)
            cells = Cells(predicted, true, normal, crps, variance)
            self._merge(model, block, groups.sums(cells, self.rows))

    def _merge(self, model: int, block: ScoreBlock, sums: Mapping[str, Floats]) -> None:
        """Merge sums of the samples of a block, by group, with those of earlier blocks."""
        at = _of_samples(block)
        ours = {name: self.rows[name][model, at] for name in sums}
        theirs = {name: values.reshape(ours[name].shape) for name, values in sums.items()}
        for name, values in merged(ours, theirs).items():
            self.rows[name][model, at] = values

    def _add_classes(
        self, block: ScoreBlock, scored: NDArray[np.bool_], group: Steps, weights: Floats
    ) -> None:
        """Add what the scores of labels, and of the true class's probability, follow from."""
        n, cells = self.n_classes, scored.all(2)
        # (cells, classes), 1 for the true one
        true = np.moveaxis(block.truth, 2, -1)[cells].argmax(1)
        weights = np.moveaxis(weights, 2, -1)[cells]  # which may differ between classes
        weight = np.take_along_axis(weights, true[:, None], 1)[:, 0]
        groups = Groups(group[:, :, 0][cells], weight, self._n_groups(block))
        for model, point in enumerate(block.points.values()):
            probabilities = np.moveaxis(point, 2, -1)[cells]
            self._merge(model, block, groups.class_sums(probabilities, true, n))
            pairs = np.bincount(true * n + probabilities.argmax(1), weight, n * n)
            self.confusion[model] += pairs.reshape(n, n)

    def _add_reliability(
        self, block: ScoreBlock, scored: NDArray[np.bool_], weights: Floats
    ) -> None:
        """Add what is known about the prediction's probabilities."""
        if self.reliability is None:
            return
        name, prediction = next(iter(block.points.items()))
        if name in block.several and not self.n_classes:
            outputs, values = block.several[name]
            of_cells = np.moveaxis(values, 2, -1)[scored]
            self.reliability.values += outputs.observed(
                of_cells, block.truth[scored], weights[scored], 1
            )
            return
        first = next(iter(block.tile.values())).start
        for i in range(block.truth.shape[2]):
            here = scored[:, :, i]
            of_class = (array[:, :, i][here] for array in (prediction, block.truth, weights))
            self.reliability.values[:, first + i] += reliability_sums(*of_class)


def _of_samples(block: ScoreBlock) -> slice:
    """Return the position of the samples of a block, which follow one another."""
    first = int(block.samples[0])
    return slice(first, first + len(block.samples))
