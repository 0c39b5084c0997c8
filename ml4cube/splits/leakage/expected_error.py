"""Expected error of prediction by the distances to train, and what a test part promises of it.

The mean of the five train cells most like a cell is the prediction of a plain model that knows
positions only. Its mean squared error follows from the semivariances between the cell and these
five, and between the five themselves (Matheron 1963, *Principles of geostatistics*, Economic
Geology 58, on the variance of estimation).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.statistics import check_decoded
from ml4cube.splits.distances import Axes, Cells, sample_of
from ml4cube.splits.leakage.space_time_variogram import SpaceTimeVariogram, fit_space_time
from ml4cube.splits.positions import Positions

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

# Train cells whose mean predicts a cell. In fields of known covariance, this reproduces the ratio
# of promised to true error of nearest neighbours and of a random forest without bias.
_NEIGHBOURS = 5
# Cells and steps of time that are sampled, and train cells along a track near to each.
_CELLS = 600
_STEPS = 12
_NEAREST_OF_TRACK = 40
# A promise within this factor of the true error fits, if nine in ten lie within a wider one. Single
# promises on simulated fields (benchmarks/honesty_splits.py) lie within a tenth of the expected.
_LOWEST_FIT = 0.92
_WIDEST_FIT = 2.5
_NINE_IN_TEN = 1.645
# Cells between which covariances of errors are added up.
_CELLS_OF_SPREAD = 150
_ROWS_AT_ONCE = 16
# Train steps are examined whose ranks, counted from a cell's own time, differ by this.
_RANKS = np.array([0, 1, 2, 3, 5, 8, 13])


@dataclass(frozen=True, eq=False)
class Errors:
    """Errors of prediction at some cells: each is a sum of values with weights that add up to 0."""

    variogram: SpaceTimeVariogram
    positions: Positions | None
    # (cells, values, 3), and (cells, values).
    points: Floats
    times: Floats
    weights: Floats
    # Why nothing is known of them; "" if something is.
    unknown: str

    def variances(self) -> Floats:
        """Return the variance of each error."""
        everything = np.arange(len(self.times))
        return self._covariances(self, everything, everything)

    def covariances(self, other: Errors) -> Floats:
        """Return the covariances of evenly spaced errors with others, (errors, others)."""
        few = _evenly(np.arange(len(self.times)), _CELLS_OF_SPREAD)
        others = _evenly(np.arange(len(other.times)), _CELLS_OF_SPREAD)
        rows = [
            self._covariances(other, *np.meshgrid(few[start : start + _ROWS_AT_ONCE], others))
            for start in range(0, few.size, _ROWS_AT_ONCE)
        ]
        return np.concatenate(rows, axis=1).T

    def _covariances(self, other: Errors, some: Ints, others: Ints) -> Floats:
        """Return the covariance of each of some errors with the one at its side."""
        difference = self.points[some][..., :, None, :] - other.points[others][..., None, :, :]
        straight = np.sqrt((difference**2).sum(axis=-1))
        km = straight
        if self.positions is not None:
            km = self.positions.kilometres(straight)
        apart = np.abs(self.times[some][..., :, None] - other.times[others][..., None, :])
        semivariance = self.variogram.at(km, apart)
        weighted = (self.weights[some][..., :, None] * semivariance).sum(axis=-2)
        return np.asarray(-(weighted * other.weights[others]).sum(axis=-1))


def deviation_of_ratio(errors: Errors, others: Errors) -> float:
    """Return the relative standard deviation of the ratio of two roots of mean squared errors.

    Over draws of a normal field, whose squares have twice the squared covariance of its values.
    """
    within, among = errors.covariances(errors), others.covariances(others)
    between = errors.covariances(others)
    means = [max(float(np.trace(covariances)), 1e-300) for covariances in (within, among)]
    variance = 2 * (within**2).sum() / means[0] ** 2 + 2 * (among**2).sum() / means[1] ** 2
    variance -= 4 * (between**2).sum() / (means[0] * means[1])
    # The relative deviation of a root is half as large.
    return math.sqrt(max(variance, 0.0)) / 2


@dataclass(frozen=True, eq=False)
class Neighbourhoods:
    """Sampled cells, and train cells around each: near in space, in time or in both."""

    positions: Positions | None
    # (cells, 3) and (cells,)
    points: Floats
    times: Floats
    # (cells, train cells, 3) and (cells, train cells); NaN where there are fewer.
    train_points: Floats
    train_times: Floats

    @classmethod
    def of(cls, cells: Cells, train: Cells, measured: set[str]) -> Neighbourhoods | None:
        """Find the train cells around a sample of cells; None if no position is known."""
        if not measured:
            return None
        points, times = _sample_cells(cells, train.axes, measured)
        if not times.size:
            return None
        near_points, near_times = [], []
        for group_points, group_times, asked in _groups(train, times, measured):
            joint, asked_joint = _joint(group_points, group_times, points[asked], times[asked])
            count = min(_NEAREST_OF_TRACK if np.ptp(group_times) else _NEIGHBOURS, len(joint))
            index = _nearest(joint, asked_joint, count)
            shape = (times.size, count)
            some_points, some_times = np.full((*shape, 3), np.nan), np.full(shape, np.nan)
            some_points[asked], some_times[asked] = group_points[index], group_times[index]
            near_points.append(some_points)
            near_times.append(some_times)
        if not near_points:
            return None
        return cls(
            train.axes.positions if "space" in measured else None,
            points,
            times,
            np.concatenate(near_points, axis=1),
            np.concatenate(near_times, axis=1),
        )

    def distances(self) -> tuple[Floats, Floats]:
        """Return kilometres and differences of time to the train cells; NaN where none is."""
        apart = np.abs(self.train_times - self.times[:, None])
        return self._kilometres(self.train_points, self.points[:, None]), apart

    def same(self) -> NDArray[np.bool_]:
        """Return which cells have the position and time of a train cell."""
        km, apart = self.distances()
        return np.asarray(((km == 0) & (apart == 0)).any(axis=1))

    def without(self, left_out: NDArray[np.bool_]) -> Neighbourhoods:
        """Return the neighbourhoods of the other cells."""
        arrays = (self.points, self.times, self.train_points, self.train_times)
        return Neighbourhoods(self.positions, *(array[~left_out] for array in arrays))

    def errors(self, variogram: SpaceTimeVariogram) -> Errors:
        """Return the errors of the mean of the train cells that are most like each cell."""
        km, apart = self.distances()
        semivariance = variogram.at(km, apart)
        semivariance[np.isnan(km)] = np.inf
        nearest = np.argsort(semivariance, axis=1, kind="stable")[:, :_NEIGHBOURS]
        is_train = np.isfinite(np.take_along_axis(semivariance, nearest, axis=1))
        weights = is_train / is_train.sum(axis=1, keepdims=True)
        points = np.take_along_axis(self.train_points, nearest[:, :, None], axis=1)
        times = np.take_along_axis(self.train_times, nearest, axis=1)
        first = nearest[:, :1]
        unknown = variogram.why_unknown(
            np.take_along_axis(km, first, axis=1), np.take_along_axis(apart, first, axis=1)
        )
        return Errors(
            variogram,
            self.positions,
            np.nan_to_num(np.concatenate([self.points[:, None], points], axis=1)),
            np.nan_to_num(np.concatenate([self.times[:, None], times], axis=1)),
            np.concatenate([np.ones((len(weights), 1)), -weights], axis=1),
            unknown,
        )

    def _kilometres(self, points: Floats, others: Floats) -> Floats:
        straight: Floats = np.linalg.norm(points - others, axis=-1)
        if self.positions is None:
            return straight
        return self.positions.kilometres(straight)


@dataclass(frozen=True)
class Promise:
    """The error that a test part promises, as a fraction of that in the deployment."""

    # NaN if unknown, with the reason.
    ratio: float
    # Between these lie nine in ten ratios of one draw of the field.
    low: float
    high: float
    unknown: str = ""
    # The variable that it was taken from, and its ranges by domain; inf without a sill.
    variable: str = ""
    ranges: dict[str, float] = field(default_factory=dict)

    @classmethod
    def without(cls, reason: str) -> Promise:
        """Return a promise of which nothing is known."""
        return cls(math.nan, math.nan, math.nan, reason)

    @property
    def judgement(self) -> str:
        """Return "too easy", "fits", "too hard" or "undecided"."""
        if math.isnan(self.ratio):
            return "undecided"
        if _LOWEST_FIT <= self.ratio <= 1 / _LOWEST_FIT:
            if self.high / self.low <= _WIDEST_FIT:
                return "fits"
            return "undecided"
        if self.high < 1:
            return "too easy"
        if self.low > 1:
            return "too hard"
        return "undecided"


def expected_promise(
    variables: Sequence[xr.DataArray],
    train: Cells,
    test: Neighbourhoods | None,
    deployment: Neighbourhoods | None,
    measured: set[str],
) -> Promise:
    """Return the promise that is farthest from 1 among variables of numbers."""
    if test is None or deployment is None:
        return Promise.without("no cell has a known position")
    best = deployment.same()
    if best.all() and test.same().all():
        return Promise(1.0, 1.0, 1.0)  # both are members of the dates and places of train
    if best.all():
        return Promise.without("all cells of the deployment are cells that the model is trained on")
    deployment = deployment.without(best)
    promises = [
        _promise_of(array, train, test, deployment, measured)
        for array in variables
        if array.dtype.kind in "biuf"
    ]
    clear = [promise for promise in promises if not promise.unknown]
    if clear:
        return max(clear, key=lambda promise: abs(math.log(promise.ratio)))
    if promises:
        return promises[0]
    return Promise.without("no variable holds numbers")


def _promise_of(
    array: xr.DataArray,
    train: Cells,
    test: Neighbourhoods,
    deployment: Neighbourhoods,
    measured: set[str],
) -> Promise:
    try:
        check_decoded(str(array.name), array)
    except InvalidValueError as error:
        return Promise.without(str(error))
    variogram = fit_space_time(array, train, measured)
    if variogram is None:
        return Promise.without(f"{array.name!r} is constant over the train cells")
    of_test, of_deployment = (cells.errors(variogram) for cells in (test, deployment))
    if unknown := of_test.unknown or of_deployment.unknown:
        return Promise.without(unknown)
    squares = [float(errors.variances().mean()) for errors in (of_test, of_deployment)]
    if min(squares) <= 0:
        return Promise.without(f"no error of {array.name!r} is expected at such distances")
    ratio = math.sqrt(squares[0] / squares[1])
    factor = math.exp(_NINE_IN_TEN * deviation_of_ratio(of_test, of_deployment))
    variograms = {"space": variogram.space, "time": variogram.time}
    ranges = {domain: model.seen_range for domain, model in variograms.items() if model is not None}
    return Promise(ratio, ratio / factor, ratio * factor, "", str(array.name), ranges)


def _sample_cells(cells: Cells, train_axes: Axes, measured: set[str]) -> tuple[Floats, Floats]:
    """Return points and times of sampled cells; zeros where they are not measured."""
    axes, rng = cells.axes, np.random.default_rng(0)
    times = train_axes.time_numbers(axes) if "time" in measured else np.zeros(max(axes.steps, 1))
    if "space" not in measured:
        steps = _evenly(cells.steps(), _CELLS)
        return np.zeros((steps.size, 3)), times[steps]
    points = axes.places.points
    if "time" not in measured or axes.time_dim in axes.sizes:
        locations = sample_of(cells.locations(), _CELLS, rng)
        if "time" not in measured:
            return points[locations], np.zeros(locations.size)
        return points[locations], times[axes.steps_of(locations)]
    steps = _evenly(cells.steps(), _STEPS)
    chosen = [
        sample_of(cells.locations(step), math.ceil(_CELLS / steps.size), rng) for step in steps
    ]
    sizes = [locations.size for locations in chosen]
    return points[np.concatenate(chosen)], np.repeat(times[steps], sizes)


def _evenly(indices: Ints, most: int) -> Ints:
    """Return at most `most` of some indices, evenly spaced."""
    if indices.size <= most:
        return indices
    return np.asarray(indices[np.linspace(0, indices.size - 1, most).round().astype(int)])


def _groups(
    train: Cells, times: Floats, measured: set[str]
) -> Iterator[tuple[Floats, Floats, Ints]]:
    """Yield points and times of groups of train cells, and the cells to compare with each."""
    axes = train.axes
    train_times = axes.time_numbers(axes) if "time" in measured else np.zeros(max(axes.steps, 1))
    everything = np.arange(times.size)
    if "space" not in measured:
        train_times = train_times[train.steps()]
        yield np.zeros((train_times.size, 3)), train_times, everything
        return
    points = axes.places.points
    if "time" not in measured or axes.time_dim in axes.sizes:
        locations = train.locations()
        of_locations = np.zeros(locations.size)
        if "time" in measured:
            of_locations = train_times[axes.steps_of(locations)]
        if locations.size:
            yield points[locations], of_locations, everything
        return
    steps = train.steps()
    steps = steps[np.argsort(train_times[steps], kind="stable")]
    after = np.searchsorted(train_times[steps], times)[:, None]
    near = np.concatenate([after - 1 - _RANKS, after + _RANKS], axis=1)
    for rank in np.unique(near[(near >= 0) & (near < steps.size)]):
        step = steps[rank]
        locations = train.locations(step)
        if locations.size:
            of_step = np.full(locations.size, train_times[step])
            yield points[locations], of_step, np.flatnonzero((near == rank).any(axis=1))


def _joint(
    points: Floats, times: Floats, asked_points: Floats, asked_times: Floats
) -> tuple[Floats, Floats]:
    """Return positions in space and time together, in units of the spread of each along a track."""
    spread = float(np.ptp(times))
    if not spread:
        return points, asked_points
    in_space = max(float(points.std()), 1e-12)
    joint, asked = (
        np.column_stack([some_points / in_space, some_times / spread])
        for some_points, some_times in ((points, times), (asked_points, asked_times))
    )
    return joint, asked


def _nearest(points: Floats, asked: Floats, count: int) -> Ints:
    from sklearn.neighbors import KDTree

    return np.asarray(KDTree(points).query(asked, count, return_distance=False))
