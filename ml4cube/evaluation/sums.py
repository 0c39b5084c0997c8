"""`VariableSums`: all sums from which the scores of one variable follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.evaluation.cell_reader import Floats, Steps, Tile
from ml4cube.evaluation.pair_sums import PairSums
from ml4cube.evaluation.probabilities import Outputs, reliability_sums
from ml4cube.evaluation.spectrum import add_power

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
_FROM_PAIRS = ("count", "weight", "error", "absolute_error", "squared_error")


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
    ) -> None:
        # (fields, models, samples, leads, labels)
        self.rows = np.zeros((len(FIELDS), n_models, *shape))
        # over samples and leads, for each cell
        self.cell_count = np.zeros(tuple(cells.values()), np.int64)
        self.cell_errors = np.zeros((n_models, *cells.values()))
        # of prediction and truth
        wavenumbers = 0 if row_length is None else row_length // 2 + 1
        self.power = np.zeros((2, shape[1], wavenumbers))
        self.power_weight = np.zeros(shape[1])
        self.reliability = reliability

    def add(self, block: Block) -> None:
        """Add a block: cells where the truth and all models have a value, the same for all."""
        truth, n_labels = block.truth, self.rows.shape[-1]
        labels = np.broadcast_to(block.labels, truth.shape)
        weights = np.broadcast_to(block.weights, truth.shape)
        n, n_leads = truth.shape[:2]
        row = np.arange(n * n_leads).reshape(n, n_leads, *(1,) * (truth.ndim - 2))
        has_truth = (labels >= 0) & np.isfinite(truth)
        group = row * n_labels + labels

        def by_group(cells: np.ndarray, values: Floats | None = None) -> Floats:
            chosen = None if values is None else np.broadcast_to(values, truth.shape)[cells]
            sums = np.bincount(group[cells], chosen, n * n_leads * n_labels)
            return np.asarray(sums.reshape(n, n_leads, n_labels), np.float64)

        scored = has_truth.copy()
        for point in block.points.values():
            scored &= np.isfinite(point)
        scored_group = np.where(scored, group, -1)
        box: tuple[Any, ...] = tuple(block.tile.values())
        gaps = by_group((labels >= 0) & ~has_truth)
        for i, (name, point) in enumerate(block.points.items()):
            pairs = PairSums.of(point, truth, weights, scored_group, n * n_leads * n_labels)
            found = {f: getattr(pairs, f).reshape(gaps.shape) for f in _FROM_PAIRS}
            found |= {"gaps": gaps, "unpredicted": by_group(has_truth & ~np.isfinite(point))}
            if block.climatology is not None:
                known = scored & np.isfinite(block.climatology)
                predicted, true = point - block.climatology, truth - block.climatology
                found["predicted_anomaly"] = by_group(known, weights * predicted**2)
                found["true_anomaly"] = by_group(known, weights * true**2)
                found["anomaly_product"] = by_group(known, weights * predicted * true)
            # the CRPS of one value is its absolute error
            found["crps"] = found["absolute_error"]
            if name in block.several:
                outputs, values = block.several[name]
                found["crps"] = by_group(scored, weights * outputs.crps(values, truth, 2))
                found["variance"] = by_group(scored, weights * outputs.variance(values, 2))
            for field, sums in found.items():
                self.rows[FIELDS.index(field), i, block.samples] += sums
            errors = np.where(scored, (point - truth) ** 2, 0.0).sum((0, 1))
            self.cell_errors[(i, *box)] += errors
        self.cell_count[box] += scored.sum((0, 1))
        prediction = next(iter(block.points.values()))
        if block.has_rows:
            shown = np.where(has_truth, np.stack([prediction, truth]), np.nan)
            add_power(self.power, self.power_weight, shown, weights)
        self._add_reliability(block, prediction, scored, weights)

    def _add_reliability(
        self, block: Block, prediction: Floats, scored: np.ndarray, weights: Floats
    ) -> None:
        """Add what is known about the prediction's probabilities."""
        if self.reliability is None:
            return
        name = next(iter(block.points))
        if name in block.several:
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
