"""`ScoreSums`: all sums from which the scores of one variable follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.grid import Block
from ml4cube.core.metric_registry import CLASS_SUMS, MOMENTS, SUMMANDS, defaults_of, sums_of
from ml4cube.core.metric_registry import Cells as ScoredCells
from ml4cube.core.sums.pairs import COUNTS, Groups, merged
from ml4cube.cube.scan import Cells, scan
from ml4cube.evaluation.cells.climatology import ClimatologyOptions
from ml4cube.evaluation.cells.probabilities import reliability_sums
from ml4cube.evaluation.sums.scored_tile import Scored, ScoredTile
from ml4cube.evaluation.sums.scored_variable import ScoredVariable
from ml4cube.evaluation.sums.spectrum import power_of_rows

Arrays = Mapping[str, NDArray[Any]]


def sums_to_keep(metrics: Iterable[str]) -> tuple[str, ...]:
    """Return the names of the sums by date of all variables: of the usual metrics, and these."""
    of_metrics = sums_of((*defaults_of("evaluate"), *metrics))
    of_cells = [name for name in of_metrics if name in SUMMANDS or name in MOMENTS]
    return (*COUNTS, "weight", *of_cells)


@dataclass(frozen=True, eq=False)
class ScoreSums:
    """Sums over cells: by date and label, of each cell over all dates, and over both."""

    # By name, (models, rows, labels), those of classes with a last axis of these; a row is a date
    # and lead.
    rows: Arrays
    # `squared_error` (models, *cells), `count` (*cells).
    cells: Arrays
    # Of classes, of spectra and of reliability.
    total: Arrays

    @classmethod
    def empty(cls, variable: ScoredVariable, n_rows: int, shape: Iterable[int]) -> ScoreSums:
        """Return sums over no cell, of some rows and of a tile of some shape."""
        n_models, n_classes = len(variable.models), variable.n_classes
        shape_of_rows = n_models, n_rows, int(np.prod([*variable.labels.values()], dtype=np.int64))
        rows: dict[str, Any] = {name: np.zeros(shape_of_rows) for name in variable.sums}
        cells = {
            "squared_error": np.zeros((n_models, *shape)),
            "count": np.zeros(tuple(shape), np.int64),
        }
        total: dict[str, Any] = {}
        if n_classes:
            rows["log_score"] = np.zeros(shape_of_rows)
            rows |= {name: np.zeros((*shape_of_rows, n_classes)) for name in CLASS_SUMS}
            total["confusion"] = np.zeros((n_models, n_classes, n_classes))
        if variable.row_dim is not None:
            n_leads, wavenumbers = variable.timing.leads.size, variable.sizes[variable.row_dim] // 2
            total["power"] = np.zeros((2, n_leads, wavenumbers + 1))
            total["power_weight"] = np.zeros(n_leads)
        if coords := variable.reliability_coords:
            total["reliability"] = np.zeros([len(labels) for labels in coords.values()])
        return cls(rows, cells, total)

    @classmethod
    def of(cls, tile: ScoredTile, block: Block, cells: Cells) -> ScoreSums:
        """Sum up a block of the prediction, in a tile."""
        n_rows = len(tile.variable.rows_of(block))
        shape = [part.stop - part.start for part in tile.tile.values()]
        sums = cls.empty(tile.variable, n_rows, shape)
        for scored in tile.in_parts(block, cells):
            sums.merge_at(scored.rows, (), cls._of_part(tile, scored))
        return sums

    @classmethod
    def _of_part(cls, tile: ScoredTile, part: Scored) -> ScoreSums:
        """Sum up a few rows."""
        variable, points = tile.variable, list(part.points.values())
        by_model = [_counts(variable, part, point) for point in points]
        for sums, name in zip(by_model, part.points, strict=True):
            sums |= _errors(variable, part, name)
        total: dict[str, NDArray[Any]] = {}
        if variable.n_classes:
            total["confusion"] = _add_classes(variable, part, by_model)
        if variable.row_dim is not None:
            shown = np.where(part.has_truth, np.stack([points[0], part.truth]), np.nan)
            n_leads = variable.timing.leads.size
            power, weight = power_of_rows(shown, part.weights, part.leads, n_leads)
            total |= {"power": power, "power_weight": weight}
        if variable.reliability_coords:
            total["reliability"] = _reliability(variable, part)
        rows = {}
        nothing = np.zeros(part.n_groups)
        for name in dict.fromkeys(name for sums in by_model for name in sums):
            stacked = np.stack([sums.get(name, nothing) for sums in by_model])
            rows[name] = stacked.reshape(len(points), -1, part.n_labels, *stacked.shape[2:])
        errors = [np.where(part.scored, (point - part.truth) ** 2, 0.0).sum(0) for point in points]
        cells = {"squared_error": np.stack(errors), "count": part.scored.sum(0)}
        return cls(rows, cells, total)

    def merge_at(self, rows: Any, box: Any, other: ScoreSums) -> None:
        """Merge the sums of some rows, each once, and of the cells in a box, in place."""
        ours = {name: array[:, rows] for name, array in self.rows.items()}
        for name, values in merged(ours, other.rows).items():
            self.rows[name][:, rows] = values
        for name, array in other.cells.items():
            self.cells[name][..., *box] += array
        for name, array in other.total.items():
            self.total[name][...] += array


def _counts(variable: ScoredVariable, part: Scored, point: NDArray[Any]) -> dict[str, Any]:
    """Return numbers of cells by group; a cell counts once, not for each class."""
    flags = {
        "count": part.scored,
        "gaps": (part.labels >= 0) & ~part.has_truth,
        "unpredicted": part.has_truth & ~np.isfinite(point),
    }
    counts = {}
    for name, of_cells in flags.items():
        group = part.group
        if variable.n_classes:
            group, of_cells = group[:, 0], of_cells[:, 0]
        counts[name] = np.bincount(group[of_cells], minlength=part.n_groups)
    return counts


def _errors(variable: ScoredVariable, part: Scored, model: str) -> dict[str, Any]:
    """Return the weighted sums of the scored cells of a model, by group."""
    scored = part.scored
    predicted, true, normal = part.points[model][scored], part.truth[scored], None
    if part.climatology is not None:
        normal = part.climatology[scored]
    crps, variance = np.abs(predicted - true), None
    if model in part.several:
        outputs = variable.several[model]
        values = np.moveaxis(part.several[model], 1, -1)[scored]
        crps, variance = outputs.crps(values, true, 1), outputs.variance(values, 1)
    groups = Groups(part.group[scored], part.weights[scored], part.n_groups)
    return groups.sums(ScoredCells(predicted, true, normal, crps, variance), variable.sums)


def _add_classes(
    variable: ScoredVariable, part: Scored, by_model: Iterable[dict[str, Any]]
) -> NDArray[Any]:
    """Add what the scores of labels, and of the true class's probability, follow from.

    Return the weights by true and predicted class, (models, classes, classes).
    """
    n, cells = variable.n_classes, part.scored.all(1)
    # (cells, classes), 1 for the true one
    true = np.moveaxis(part.truth, 1, -1)[cells].argmax(1)
    weight = part.weights[:, 0][cells]
    groups = Groups(part.group[:, 0][cells], weight, part.n_groups)
    confusion = []
    for sums, point in zip(by_model, part.points.values(), strict=True):
        probabilities = np.moveaxis(point, 1, -1)[cells]
        sums |= groups.class_sums(probabilities, true, n)
        pairs = np.bincount(true * n + probabilities.argmax(1), weight, n * n)
        confusion.append(pairs.reshape(n, n))
    return np.stack(confusion)


def _reliability(variable: ScoredVariable, part: Scored) -> NDArray[Any]:
    """Return what is known about the prediction's probabilities."""
    name, prediction = next(iter(part.points.items()))
    if variable.outputs is not None:
        scored = part.scored
        values = np.moveaxis(part.several[name], 1, -1)[scored]
        return variable.outputs.observed(values, part.truth[scored], part.weights[scored], 1)
    of_classes = []
    for i in range(variable.n_classes):
        here = part.scored[:, i]
        arrays = (prediction, part.truth, part.weights)
        of_classes.append(reliability_sums(*(array[:, i][here] for array in arrays)))
    return np.stack(of_classes, axis=1)


def sum_up(
    variable: ScoredVariable, climatology: ClimatologyOptions | None, update: Callable[[], object]
) -> ScoreSums:
    """Sum up a variable, tile by tile; `update` is called after each block."""
    total = ScoreSums.empty(variable, variable.timing.valid_steps.size, variable.sizes.values())
    for cells, blocks in variable.tiles():
        tile = ScoredTile.of(variable, cells, climatology)
        reader = variable.first.reader.reader
        for block, sums in zip(
            blocks, scan(reader, partial(ScoreSums.of, tile), blocks), strict=True
        ):
            total.merge_at(variable.rows_of(block), tuple(cells.values()), sums)
            update()
    return total
