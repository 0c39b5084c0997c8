"""`ScoreSums`: all sums from which the scores of one variable follow."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.metric_registry import (
    CLASS_SUMS,
    MOMENTS,
    SUMMANDS,
    Cells,
    Floats,
    defaults_of,
    sums_of,
)
from ml4cube.core.sums.pairs import COUNTS, Groups, merged
from ml4cube.cube.classes import as_text, class_names
from ml4cube.cube.coordinates import LEAD
from ml4cube.evaluation.cells.baselines import PREDICTION
from ml4cube.evaluation.cells.cell_reader import CLASS
from ml4cube.evaluation.cells.probabilities import empty_reliability, reliability_sums
from ml4cube.evaluation.sums.scored_tile import ScoreBlock
from ml4cube.evaluation.sums.scored_variable import ScoredVariable
from ml4cube.evaluation.sums.spectrum import add_power


def sums_to_keep(metrics: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the sums by date of all variables: of the usual metrics, and these."""
    of_metrics = sums_of((*defaults_of("evaluate"), *metrics))
    of_cells = [name for name in of_metrics if name in SUMMANDS or name in MOMENTS]
    return (*COUNTS, "weight", *of_cells)


class ScoreSums:
    """Sums over all blocks of one variable."""

    def __init__(self, variable: ScoredVariable, models: Sequence[str]) -> None:
        self.variable = variable
        self.n_classes = variable.n_classes
        timing, labels = variable.options.timing, variable.options.labels
        shape = (len(models), *timing.valid_steps.shape, labels.n_of_cells)
        # by name, (models, samples, leads, labels), those of classes with a last axis of these
        self.rows = {name: np.zeros(shape) for name in variable.options.sums}
        if self.n_classes:
            self.rows["log_score"] = np.zeros(shape)
            self.rows |= {name: np.zeros((*shape, self.n_classes)) for name in CLASS_SUMS}
        # over samples and leads: for each cell, of classes, of spectra and of reliability
        self.others = _empty_others(variable, models)

    def add(self, block: ScoreBlock) -> None:
        """Add a block."""
        self._count("gaps", slice(None), block, (block.labels >= 0) & ~block.has_truth)
        self._count("count", slice(None), block, block.scored)
        for model, has_value in enumerate(block.has_value):
            self._count("unpredicted", model, block, block.has_truth & ~has_value)
        self._add_errors(block)
        self._add_cells(block)
        if "power" in self.others:
            prediction = next(iter(block.points.values()))
            shown = np.where(block.has_truth, np.stack([prediction, block.truth]), np.nan)
            power, power_weight = self.others["power"].values, self.others["power_weight"].values
            add_power(power, power_weight, shown, block.weights)
        if "reliability" in self.others:
            self._add_reliability(block)
        if self.n_classes:
            self._add_classes(block)

    def _count(
        self, name: str, model: int | slice, block: ScoreBlock, flags: NDArray[np.bool_]
    ) -> None:
        """Add the numbers of cells that have a flag; a cell counts once, not for each class."""
        group = block.group
        if self.n_classes:
            group, flags = group[:, :, 0], flags[:, :, 0]
        rows = self.rows[name][:, block.at]
        numbers = np.bincount(group[flags], minlength=block.n_groups)
        rows[model] += numbers.reshape(rows.shape[1:])

    def _merge(self, model: int, block: ScoreBlock, sums: Mapping[str, Floats]) -> None:
        """Merge sums of the samples of a block, by group, with those of earlier blocks."""
        ours = {name: self.rows[name][model, block.at] for name in sums}
        theirs = {name: values.reshape(ours[name].shape) for name, values in sums.items()}
        for name, values in merged(ours, theirs).items():
            ours[name][...] = values

    def _add_errors(self, block: ScoreBlock) -> None:
        """Add the weighted sums of the scored cells."""
        scored = block.scored
        groups = Groups(block.group[scored], block.weights[scored], block.n_groups)
        true, normal = block.truth[scored], None
        if block.climatology is not None:
            normal = block.climatology[scored]
        for model, (name, point) in enumerate(block.points.items()):
            predicted = point[scored]
            crps, variance = np.abs(predicted - true), None
            if name in block.several:
                outputs = self.variable.several[name]
                values = np.moveaxis(block.several[name], 2, -1)[scored]
                crps = outputs.crps(values, true, 1)
                variance = outputs.variance(values, 1)
            cells = Cells(predicted, true, normal, crps, variance)
            self._merge(model, block, groups.sums(cells, self.rows))

    def _add_cells(self, block: ScoreBlock) -> None:
        """Add the errors of each cell, over samples and leads."""
        box: tuple[Any, ...] = tuple(block.tile.values())
        self.others["count"].values[box] += block.scored.sum((0, 1))
        for model, point in enumerate(block.points.values()):
            errors = np.where(block.scored, (point - block.truth) ** 2, 0.0).sum((0, 1))
            self.others["squared_error"].values[(model, *box)] += errors

    def _add_classes(self, block: ScoreBlock) -> None:
        """Add what the scores of labels, and of the true class's probability, follow from."""
        n, cells = self.n_classes, block.scored.all(2)
        # (cells, classes), 1 for the true one
        true = np.moveaxis(block.truth, 2, -1)[cells].argmax(1)
        weights = np.moveaxis(block.weights, 2, -1)[cells]  # which may differ between classes
        weight = np.take_along_axis(weights, true[:, None], 1)[:, 0]
        groups = Groups(block.group[:, :, 0][cells], weight, block.n_groups)
        for model, point in enumerate(block.points.values()):
            probabilities = np.moveaxis(point, 2, -1)[cells]
            self._merge(model, block, groups.class_sums(probabilities, true, n))
            pairs = np.bincount(true * n + probabilities.argmax(1), weight, n * n)
            self.others["confusion"].values[model] += pairs.reshape(n, n)

    def _add_reliability(self, block: ScoreBlock) -> None:
        """Add what is known about the prediction's probabilities."""
        sums = self.others["reliability"].values
        name, prediction = next(iter(block.points.items()))
        if not self.n_classes:
            scored, outputs = block.scored, self.variable.several[name]
            values = np.moveaxis(block.several[name], 2, -1)[scored]
            sums += outputs.observed(values, block.truth[scored], block.weights[scored], 1)
            return
        for i in range(self.n_classes):
            here = block.scored[:, :, i]
            arrays = (prediction, block.truth, block.weights)
            sums[:, i] += reliability_sums(*(array[:, :, i][here] for array in arrays))


def _empty_others(variable: ScoredVariable, models: Sequence[str]) -> xr.Dataset:
    """Return sums of zero, over samples and leads, with the coordinates of the truth."""
    array, timing = variable.truth.array, variable.options.timing
    dims, shape = tuple(variable.sizes), tuple(variable.sizes.values())
    sums: dict[str, Any] = {
        "squared_error": (("model", *dims), np.zeros((len(models), *shape))),
        "count": (dims, np.zeros(shape, np.int64)),
    }
    coords: dict[str, Any] = {"model": list(models)}
    attrs = {"units": str(array.attrs.get("units", ""))}
    of_cells = array.isel({timing.time_dim: 0}, drop=True)
    for name, coord in of_cells.coords.items():
        if coord.ndim and coord.dtype.kind in "fiuUM":
            coords[str(name)] = coord.reset_coords(drop=True).variable
    if timing.is_forecast:
        coords[LEAD] = timing.leads.variable
    classes = variable.truth.classes
    if classes is not None:
        names = class_names(array)
        shown = [names.get(label, as_text(label)) for label in classes.tolist()]
        coords |= {CLASS: classes, "predicted_class": classes, "class_name": (CLASS, shown)}
        confusion = np.zeros((len(models), len(classes), len(classes)))
        sums["confusion"] = ("model", CLASS, "predicted_class"), confusion
    if variable.row_dim is not None:
        wavenumbers, leads = variable.sizes[variable.row_dim] // 2 + 1, timing.leads.size
        sums["power"] = ("source", LEAD, "wavenumber"), np.zeros((2, leads, wavenumbers))
        sums["power_weight"] = LEAD, np.zeros(leads)
        coords["source"] = [PREDICTION, "truth"]
        attrs["rows_along"] = variable.row_dim
    reliability = empty_reliability(variable.outputs, classes)
    if reliability is not None and not variable.is_map:
        sums["reliability"] = reliability
    return xr.Dataset(sums, coords, attrs)
