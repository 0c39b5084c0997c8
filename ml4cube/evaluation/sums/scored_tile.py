"""`ScoredTile`: the values of a variable's truth, predictions and baselines in one tile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.climatology import Climatology
from ml4cube.core.grid import Block
from ml4cube.core.sums.pairs import combined
from ml4cube.cube.scan import Cells
from ml4cube.evaluation.cells.baselines import CLIMATOLOGY, DAMPED, baseline_values
from ml4cube.evaluation.cells.cell_reader import Floats, LoadedCells, Steps, Tile
from ml4cube.evaluation.cells.classes import known_in_all, most_likely
from ml4cube.evaluation.cells.climatology import ClimatologyOptions
from ml4cube.evaluation.cells.climatology_distribution import Distribution
from ml4cube.evaluation.cells.train_climatology import damping, train_climatology
from ml4cube.evaluation.sums.score_options import PART, WEIGHTS
from ml4cube.evaluation.sums.scored_variable import ScoredVariable

# Numbers of one array that are computed with at a time.
_NUMBERS_AT_ONCE = 2**20


@dataclass(frozen=True, eq=False)
class Scored:
    """Values of some rows in a tile, (rows, *cells); a row is a date and a lead."""

    # Positions of the rows among those of the block.
    rows: slice
    leads: Steps
    truth: Floats
    # The scored value of each model, the prediction first, and all values of those with several.
    points: Mapping[str, Floats]
    several: Mapping[str, Floats]
    climatology: Floats | None
    # Weight and label of each cell; the label is -1 where a cell is not scored.
    weights: Floats
    labels: Steps
    n_labels: int

    @property
    def n_groups(self) -> int:
        """Number of rows and labels, combined."""
        return len(self.truth) * self.n_labels

    @cached_property
    def group(self) -> Steps:
        """Row and label of each cell, combined."""
        row = np.arange(len(self.truth)).reshape(-1, *(1,) * (self.truth.ndim - 1))
        return row * self.n_labels + self.labels

    @cached_property
    def has_truth(self) -> NDArray[np.bool_]:
        """Where the truth has a value, of the cells to score."""
        return (self.labels >= 0) & np.isfinite(self.truth)

    @cached_property
    def scored(self) -> NDArray[np.bool_]:
        """Where the truth and all models have a value: the cells that are scored, for all."""
        scored = self.has_truth
        for point in self.points.values():
            scored = scored & np.isfinite(point)
        return scored


@dataclass(frozen=True, eq=False)
class ScoredTile:
    """The cells of a tile, at all dates, with what is known of their climatology."""

    variable: ScoredVariable
    tile: Tile
    climatology: Climatology | None = None
    distribution: Distribution | None = None
    damping: Floats | None = None

    @classmethod
    def of(
        cls, variable: ScoredVariable, tile: Tile, options: ClimatologyOptions | None
    ) -> ScoredTile:
        """Read the train cells of a tile, as far as a climatology or damping needs them."""
        if options is None:
            return cls(variable, tile)
        truth, timing, train = variable.truth, variable.timing, options.train.steps
        climatology = train_climatology(truth, tile, options, timing.truth_dates)
        distribution = rho = None
        if variable.distribution is not None:
            distribution = Distribution.of(
                variable.distribution, truth, tile, climatology, train, timing.truth_dates
            )
        if DAMPED in variable.baselines:
            rho = damping(truth, tile, train, climatology, timing)
        return cls(variable, tile, climatology, distribution, rho)

    def in_parts(self, block: Block, cells: Cells) -> Iterator[Scored]:
        """Read what a block of the prediction is compared with; yield a few rows at a time."""
        variable, timing = self.variable, self.variable.timing
        rows = variable.rows_of(block)
        inits = timing.init_steps[rows // timing.leads.size]
        steps = np.concatenate([timing.valid_steps.ravel()[rows], inits])
        truth = variable.truth.load({timing.time_dim: steps}, self.tile)
        loaded = {}
        for name, predicted in variable.predicted.items():
            if predicted is variable.first:
                loaded[name] = predicted.in_block(cells, block)
            else:
                loaded[name] = predicted.load(rows, self.tile)
        most = max([len(outputs.levels) for outputs in variable.several.values()], default=1)
        numbers = most * np.prod([part.stop - part.start for part in self.tile.values()])
        at_once = max(1, _NUMBERS_AT_ONCE // max(int(numbers), 1))
        for start in range(0, len(rows), at_once):
            part = slice(start, min(start + at_once, len(rows)))
            yield self._scored(part, rows[part], truth, loaded)

    def _scored(
        self, part: slice, rows: Steps, truth: LoadedCells, loaded: Mapping[str, LoadedCells]
    ) -> Scored:
        variable, timing = self.variable, self.variable.timing
        steps = timing.valid_steps.ravel()[rows]
        at = {timing.time_dim: steps}
        true = truth.at(at)
        points, several = self._predicted(rows, loaded)
        points |= baseline_values(
            variable.baselines, rows, timing, truth, self.climatology, self.damping
        )
        if self.distribution is not None:
            several[CLIMATOLOGY] = self.distribution.around(points[CLIMATOLOGY], steps)
        if variable.n_classes:
            # compared with labels, baselines are labels too
            as_one = most_likely if variable.is_map else known_in_all
            points = {name: as_one(values, 1) for name, values in points.items()}
        normal = None
        if self.climatology is not None:
            normal = self.climatology.at(steps)
        labels = combined((truth.beside(name, at), n) for name, n in variable.labels.items())
        is_scored: Any = (steps >= 0).reshape(-1, *(1,) * (truth.cells[variable.name].ndim - 1))
        if PART in truth.cells:
            is_scored = is_scored & truth.beside(PART, at)
        weights: Any = np.ones(())
        if WEIGHTS in truth.cells:
            weights = truth.beside(WEIGHTS, at)
        return Scored(
            rows=part,
            leads=rows % timing.leads.size,
            truth=true,
            points=points,
            several=several,
            climatology=normal,
            weights=self._with_classes(weights, true.shape),
            labels=self._with_classes(np.where(is_scored, labels, -1), true.shape),
            n_labels=int(np.prod(list(variable.labels.values()), dtype=np.int64)),
        )

    def _with_classes(self, values: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """Return values repeated for each class, if there are some."""
        if self.variable.n_classes and values.ndim:
            values = values[:, np.newaxis]
        return np.broadcast_to(values, shape)

    def _predicted(
        self, rows: Steps, loaded: Mapping[str, LoadedCells]
    ) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Return the scored value of each model, and all values of those with several."""
        points, several = {}, {}
        for name, predicted in self.variable.predicted.items():
            values = loaded[name].at(predicted.steps_of(rows))
            points[name] = values
            if predicted.outputs is not None:
                is_complete = np.isfinite(values).all(1)
                points[name] = np.where(is_complete, predicted.outputs.point(values, 1), np.nan)
                several[name] = values
        return points, several
