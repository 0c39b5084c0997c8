"""`VariableSums`: all sums from which the scores of one variable follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.evaluation.cells.cell_reader import Floats, Steps, Tile
from ml4cube.evaluation.cells.probabilities import Outputs, reliability_sums
from ml4cube.evaluation.sums.spectrum import add_power

# Of classes: the score -log(probability of the true one), and by class the weight of cells where it
# is true, is predicted, and both.
LOG_SCORE, TRUE, PREDICTED, HITS = "log_score", "true", "predicted", "hits"
#: Sums by model, sample, lead and label. All are weighted, except for the three numbers of cells.
FIELDS = (
    "count",
    "unpredicted",
    "gaps",
    "weight",
    "error",
    "absolute_error",
    "squared_error",
    "predicted_anomaly",
    "true_anomaly",
    "anomaly_product",
    "crps",
    "variance",
)


def class_fields(n_classes: int) -> tuple[str, ...]:
    """Return the further sums of a variable with so many classes."""
    of_each = (f"{what}_{k}" for what in (TRUE, PREDICTED, HITS) for k in range(n_classes))
    return (LOG_SCORE, *of_each) if n_classes else ()


@dataclass(frozen=True, eq=False)
class Block:
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


class VariableSums:
    """Sums over all blocks of one variable."""

    def __init__(
        self,
        n_models: int,
        shape: tuple[int, int, int],
        cells: Mapping[str, int],
        row_length: int | None,
        reliability: xr.DataArray | None,
        n_classes: int = 0,
    ) -> None:
        self.fields = (*FIELDS, *class_fields(n_classes))
        self.n_classes = n_classes
        # (fields, models, samples, leads, labels)
        self.rows = np.zeros((len(self.fields), n_models, *shape))
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

    def add(self, block: Block) -> None:
        """Add a block: cells where the truth and all models have a value, the same for all."""
        truth, shape = block.truth, block.truth.shape
        self.outputs |= {name: outputs for name, (outputs, _) in block.several.items()}
        labels = np.broadcast_to(block.labels, shape)
        weights = np.broadcast_to(block.weights, shape)
        has_truth = (labels >= 0) & np.isfinite(truth)
        has_value = {name: np.isfinite(point) for name, point in block.points.items()}
        scored = np.logical_and.reduce([has_truth, *has_value.values()])
        row = np.arange(shape[0] * shape[1]).reshape(*shape[:2], *(1,) * (truth.ndim - 2))
        group = row * self.rows.shape[-1] + labels
        once: Any = np.s_[:, :, :1] if self.n_classes else ...  # cells, not classes, are counted
        self._add("gaps", block, group[once][((labels >= 0) & ~has_truth)[once]])
        self._add("count", block, group[once][scored[once]])
        for i, name in enumerate(block.points):
            unpredicted = (has_truth & ~has_value[name])[once]
            self._add("unpredicted", block, group[once][unpredicted], model=i)
        self._add_errors(block, scored, group[scored], weights[scored])
        box: tuple[Any, ...] = tuple(block.tile.values())
        self.cell_count[box] += scored.sum((0, 1))
        for i, point in enumerate(block.points.values()):
            errors = np.where(scored, (point - truth) ** 2, 0.0).sum((0, 1))
            self.cell_errors[(i, *box)] += errors
        if block.has_rows:
            prediction = next(iter(block.points.values()))
            shown = np.where(has_truth, np.stack([prediction, truth]), np.nan)
            add_power(self.power, self.power_weight, shown, weights)
        self._add_reliability(block, scored, weights)
        if self.n_classes:
            self._add_classes(block, scored, group, weights)

    def _add_errors(
        self, block: Block, scored: NDArray[np.bool_], group: Steps, weights: Floats
    ) -> None:
        """Add the weighted sums of the scored cells."""
        true = block.truth[scored]
        normal = None if block.climatology is None else block.climatology[scored]
        self._add("weight", block, group, weights)
        if normal is not None:
            true_anomaly = np.nan_to_num(true - normal)  # cells without a climatology add nothing
            self._add("true_anomaly", block, group, weights * true_anomaly**2)
        for i, (name, point) in enumerate(block.points.items()):
            predicted = point[scored]
            error = predicted - true
            found = {"error": error, "absolute_error": np.abs(error), "squared_error": error**2}
            if normal is not None:
                anomaly = np.nan_to_num(predicted - normal)
                found["predicted_anomaly"] = anomaly**2
                found["anomaly_product"] = anomaly * true_anomaly
            found["crps"] = found["absolute_error"]  # of one value
            if name in block.several:
                outputs, outcomes = block.several[name]
                of_cells = np.moveaxis(outcomes, 2, -1)[scored]
                found["crps"] = outputs.crps(of_cells, true, 1)
                found["variance"] = outputs.variance(of_cells, 1)
            for field, values in found.items():
                self._add(field, block, group, weights * values, model=i)

    def _add(
        self,
        field: str,
        block: Block,
        group: Steps,
        values: Floats | None = None,
        *,
        model: int | None = None,
    ) -> None:
        """Add values, or the number of cells, by group to the sums of a model, or of all."""
        models = slice(None) if model is None else model
        n, n_leads = block.truth.shape[:2]
        n_labels = self.rows.shape[-1]
        sums = np.bincount(group, values, n * n_leads * n_labels).reshape(n, n_leads, n_labels)
        first = block.samples[0]  # the samples of a block follow one another
        self.rows[self.fields.index(field), models, first : first + n] += sums

    def _add_classes(
        self, block: Block, scored: NDArray[np.bool_], group: Steps, weights: Floats
    ) -> None:
        """Add what the scores of labels, and of the true class's probability, follow from."""
        n, cells = self.n_classes, scored.all(2)
        truth = np.moveaxis(block.truth, 2, -1)[cells]  # (cells, classes), 1 for the true one
        true, group = truth.argmax(1), group[:, :, 0][cells]
        weights = np.moveaxis(weights, 2, -1)[cells]  # which may differ between classes
        weight = np.take_along_axis(weights, true[:, None], 1)[:, 0]
        for k in range(n):
            self._add(f"{TRUE}_{k}", block, group[true == k], weight[true == k])
        for i, point in enumerate(block.points.values()):
            probabilities = np.moveaxis(point, 2, -1)[cells]
            predicted = probabilities.argmax(1)
            of_true = np.take_along_axis(probabilities, true[:, None], 1)[:, 0]
            score = -np.log(of_true.clip(np.finfo(np.float64).eps, 1))  # as in scikit-learn
            self._add(LOG_SCORE, block, group, weight * score, model=i)
            pairs = np.bincount(true * n + predicted, weight, n * n)
            self.confusion[i] += pairs.reshape(n, n)
            for k in range(n):
                is_here = predicted == k
                self._add(f"{PREDICTED}_{k}", block, group[is_here], weight[is_here], model=i)
                is_here &= true == k
                self._add(f"{HITS}_{k}", block, group[is_here], weight[is_here], model=i)

    def _add_reliability(self, block: Block, scored: NDArray[np.bool_], weights: Floats) -> None:
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
