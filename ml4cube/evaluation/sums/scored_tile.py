"""`ScoredTile`: the values of a variable's truth, predictions and baselines in one tile."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.climatology import Climatology
from ml4cube.core.metric_registry import Floats
from ml4cube.evaluation.cells.baselines import CLIMATOLOGY, DAMPED, baseline_values
from ml4cube.evaluation.cells.cell_reader import LoadedCells, Steps, Tile, at_steps, cut
from ml4cube.evaluation.cells.classes import known_in_all, most_likely
from ml4cube.evaluation.cells.climatology import TrainTile
from ml4cube.evaluation.cells.climatology_distribution import Distribution
from ml4cube.evaluation.cube_scores import in_block
from ml4cube.evaluation.sums.scored_variable import ScoredVariable


@dataclass(frozen=True, eq=False)
class ScoreBlock:
    """Values of some samples in one tile, arrays of shape (samples, leads, *cells)."""

    samples: Steps
    tile: Tile
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
    def at(self) -> slice:
        """Position of the samples, which follow one another."""
        first = int(self.samples[0])
        return slice(first, first + len(self.samples))

    @property
    def n_groups(self) -> int:
        """Number of samples, leads and labels, combined."""
        return math.prod(self.truth.shape[:2]) * self.n_labels

    @cached_property
    def group(self) -> Steps:
        """Sample, lead and label of each cell, combined."""
        n_samples, n_leads, *cells = self.truth.shape
        row = np.arange(n_samples * n_leads).reshape(n_samples, n_leads, *(1 for _ in cells))
        return row * self.n_labels + self.labels

    @cached_property
    def has_truth(self) -> NDArray[np.bool_]:
        """Where the truth has a value, of the cells to score."""
        return (self.labels >= 0) & np.isfinite(self.truth)

    @cached_property
    def has_value(self) -> list[NDArray[np.bool_]]:
        """Where each model has a value."""
        return [np.isfinite(point) for point in self.points.values()]

    @cached_property
    def scored(self) -> NDArray[np.bool_]:
        """Where the truth and all models have a value: the cells that are scored, for all."""
        scored = self.has_truth
        for has_value in self.has_value:
            scored = scored & has_value
        return scored


@dataclass(frozen=True, eq=False)
class ScoredTile:
    """The cells of a tile, at all dates."""

    variable: ScoredVariable
    tile: Tile

    def blocks(self, samples: Steps) -> Iterator[ScoreBlock]:
        """Read some samples, and yield them in smaller blocks to compute with."""
        variable, timing = self.variable, self.variable.options.timing
        inits, valid = timing.init_steps[samples], timing.valid_steps[samples]
        steps = {timing.time_dim: np.concatenate([valid.ravel(), inits])}
        truth = variable.truth.load(steps, self.tile)
        loaded = {}
        for name, predicted in variable.predicted.items():
            loaded[name] = predicted.load(samples, self.tile)
        for some in cut(samples, variable.samples_at_once(self.tile)):
            yield self._block(some, truth, loaded)

    def _block(
        self, samples: Steps, truth: LoadedCells, loaded: Mapping[str, LoadedCells]
    ) -> ScoreBlock:
        options = self.variable.options
        timing, steps = options.timing, options.timing.valid_steps[samples]
        true = truth.at({timing.time_dim: steps})
        points, several = self._predicted(samples, loaded)
        points |= baseline_values(
            options.baselines, samples, timing, truth, self._climatology, self._damping
        )
        if self._distribution is not None:
            several[CLIMATOLOGY] = self._distribution.around(points[CLIMATOLOGY], steps)
        if self.variable.n_classes:
            # compared with labels, baselines are labels too
            as_one = most_likely if self.variable.is_map else known_in_all
            points = {name: as_one(values, 2) for name, values in points.items()}
        normal = None
        if self._climatology is not None:
            normal = self._climatology.at(steps)
        return ScoreBlock(
            samples=samples,
            tile=self.tile,
            truth=true,
            points=points,
            several=several,
            climatology=normal,
            weights=np.broadcast_to(self._weights, true.shape),
            labels=np.broadcast_to(self._labels(steps), true.shape),
            n_labels=options.labels.n_of_cells,
        )

    def _predicted(
        self, samples: Steps, loaded: Mapping[str, LoadedCells]
    ) -> tuple[dict[str, Floats], dict[str, Floats]]:
        """Return the scored value of each model, and all values of those with several."""
        points, several = {}, {}
        for name, predicted in self.variable.predicted.items():
            values = predicted.at(samples, loaded[name])
            points[name] = values
            if predicted.outputs is not None:
                is_complete = np.isfinite(values).all(2)
                points[name] = np.where(is_complete, predicted.outputs.point(values, 2), np.nan)
                several[name] = values
        return points, several

    def _labels(self, steps: Steps) -> Steps:
        """Return the label of each cell, -1 for one that is not scored."""
        options = self.variable.options
        time_dim = options.timing.time_dim
        labels = options.labels.in_tile(steps, time_dim, self.tile)
        is_scored: Any = (steps >= 0).reshape(*steps.shape, *(1,) * len(self.tile))
        if options.part is not None:
            is_scored = is_scored & at_steps(options.part, steps, time_dim, self.tile)
        return np.where(is_scored, labels, -1)

    @cached_property
    def _weights(self) -> Floats:
        if self.variable.weights is None:
            return np.ones((1,) * len(self.tile))
        return in_block(self.variable.weights, self.tile)

    @cached_property
    def _train(self) -> TrainTile:
        climatology = self.variable.options.climatology
        assert climatology is not None
        return TrainTile(self.variable.truth, climatology.train, self.tile)

    @cached_property
    def _climatology(self) -> Climatology | None:
        options = self.variable.options
        if options.climatology is None:
            return None
        return options.climatology.of_tile(
            self.variable.name,
            self._train,
            options.timing.truth_dates,
            self.variable.steps_at_once(self.tile),
        )

    @cached_property
    def _distribution(self) -> Distribution | None:
        outputs = self.variable.distribution
        if outputs is None or self._climatology is None:
            return None
        dates = self.variable.options.timing.truth_dates
        return Distribution.of(outputs, self._train, self._climatology, dates)

    @cached_property
    def _damping(self) -> Floats | None:
        options = self.variable.options
        if DAMPED not in options.baselines or self._climatology is None:
            return None
        steps = self.variable.steps_at_once(self.tile)
        return self._train.damping(self._climatology, options.timing, steps)
