"""Distances of cells of a cube, or of another one, to the nearest train cells in space and time.

`Axes` are the locations and times of a cube on any grid, `Cells` those of them that have a label.
`distances` measures them to the nearest of other cells, also of another cube.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import has_distances, is_time
from ml4cube.core.distance.separation import nearest_on_axis
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.split_plan import EXCLUDED, TRAIN
from ml4cube.cube.coordinates import dates_along
from ml4cube.cube.variables import data_variables
from ml4cube.splits.cube import CubeView, microseconds
from ml4cube.splits.label_layout import Layout
from ml4cube.splits.positions import Positions, positions_of, refuse_degrees_as_data
from ml4cube.splits.validity import has_value

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]
# A step, the nearest one with train cells, and their distance in time; None is all steps.
_StepPair = tuple[int | None, int | None, float]

_MICROSECONDS_PER_DAY = 86_400_000_000.0
#: Test cells, or locations, that are sampled.
SAMPLE = 1000
# Time steps that are sampled; the map of train cells is read once for each.
_STEPS = 32
#: The distance in space to train at any time, beside that at the nearest time.
ANY_TIME = "space at any time"


@dataclass(frozen=True, eq=False)
class Axes:
    """The locations and times of the cells of a cube."""

    # Dims of the locations, sorted: those of a map, or the one of stations.
    sizes: dict[str, int]
    # Their positions; None without coordinates.
    positions: Positions | None
    time_dim: str | None
    # Dates or numbers of its steps, if it has them.
    times: xr.DataArray | None
    # Number of steps.
    steps: int

    @classmethod
    def of(cls, view: CubeView) -> Axes:
        """Find the locations and times of a cube."""
        time_dim, times, steps = view.dim_of_time, None, 0
        if time_dim is not None:
            times, steps = _times(view, time_dim), view.sizes[time_dim]
        positions = positions_of(view, "leakage_report")
        if positions is not None:
            return cls(positions.sizes, positions, time_dim, times, steps)
        refuse_degrees_as_data(view)
        sizes = {dim: view.sizes[dim] for dim in sorted(view.dims_of_map)}
        return cls(sizes, None, time_dim, times, steps)

    @property
    def places(self) -> Positions:
        """The positions of a cube that has them."""
        assert self.positions is not None
        return self.positions

    @property
    def station_dim(self) -> str | None:
        """The dim of locations in no order; None on a map or along a track."""
        dim = next(iter(self.sizes), None)
        is_line = len(self.sizes) == 1 and self.positions is not None
        if is_line and dim != self.time_dim:
            return dim
        return None

    def steps_of(self, locations: Ints) -> Ints:
        """Return the steps of locations along a track."""
        dims = list(self.sizes)
        indices = np.unravel_index(locations, tuple(self.sizes.values()))
        return np.asarray(indices[dims.index(str(self.time_dim))])

    @property
    def time_unit(self) -> str:
        """The unit of `time_numbers`."""
        if self.times is None:
            return "steps"
        if is_time(self.times):
            return "days"
        unit = str(self.times.attrs.get("units", f"units of {self.times.name}"))
        return unit.partition(" since ")[0]

    def time_numbers(self, other: Axes) -> Floats:
        """Return the times of this cube or of another one in this one's unit."""
        ours, theirs = self.times, other.times
        if ours is None or theirs is None:
            return np.arange(float(self.steps))
        our_kind, their_kind = _kind_of_times(ours), _kind_of_times(theirs)
        if our_kind != their_kind:
            raise InvalidValueError(
                f"the deployment has {their_kind} along {theirs.name!r}, but the cube has "
                f"{our_kind} along {ours.name!r}; decode the times of both (xarray.decode_cf)"
            )
        if not is_time(ours):
            return theirs.values
        try:
            dates = [_in_microseconds(ours.values[:1]), _in_microseconds(theirs.values)]
            joined = xr.DataArray(np.concatenate(dates), dims="t", name=theirs.name)
            return microseconds(joined)[1:] / _MICROSECONDS_PER_DAY
        except TypeError as error:
            raise InvalidValueError(
                "the dates of the deployment must have the cube's calendar, got another "
                f"({' '.join(str(error).split())}); use convert_calendar"
            ) from None


def _kind_of_times(times: xr.DataArray) -> str:
    if is_time(times):
        return "dates"
    return f"numbers ({times.attrs.get('units', 'without units')})"


def _in_microseconds(dates: NDArray[Any]) -> NDArray[Any]:
    """Return dates in a unit that neither overflows after 292 years nor gives integers."""
    if dates.dtype.kind != "M":
        return dates
    return dates.astype("M8[us]")


def _times(view: CubeView, dim: str) -> xr.DataArray | None:
    """Return the dates along a dim, or else its numbers, if none is missing."""
    for coord in (dates_along(view.ds.coords.values(), dim), view.dim_coord(dim)):
        if coord is not None and has_distances(coord) and not coord.isnull().any():
            if is_time(coord):
                return coord
            return coord.astype("float64")
    return None


@dataclass(frozen=True, eq=False)
class Cells:
    """The cells of a part, or of a deployment."""

    # Locations and times of their cube.
    axes: Axes
    # Label of the cube; cells without a value are excluded.
    layout: Layout
    # Code of the cells in the label.
    code: int

    @classmethod
    def of_deployment(cls, deployment: Any, axes: Axes) -> Cells:
        """Return the cells of a cube that have a value."""
        if not isinstance(deployment, xr.Dataset | xr.DataArray):
            raise InvalidTypeError(
                "deployment must be a Dataset, a DataArray or a path, got "
                f"{type(deployment).__name__}"
            )
        time = None
        if axes.times is not None:
            time = axes.times.name
        if time in deployment.coords and not deployment[time].ndim:
            deployment = deployment.expand_dims(time)  # The deployment is one step of a cube.
        try:
            view = CubeView.of(deployment)
        except InvalidValueError as error:
            raise InvalidValueError(f"deployment: {error}") from None
        variables = [
            view.ds[name]
            for name in data_variables(view.ds, kinds="iufmM")
            if set(view.ds[name].dims) == set(view.dims)
        ]
        if not variables:
            raise InvalidValueError(
                f"deployment must have values, got only masks {list(view.ds.data_vars)}; pass "
                "cube.where(mask)"
            )
        valid = has_value(variables, any_of_them=True)
        if valid is None:
            valid = xr.ones_like(variables[0], dtype=bool)
        label = xr.full_like(valid, EXCLUDED, dtype=np.uint8).where(~valid, np.uint8(TRAIN))
        own_axes = Axes.of(view)
        layout = Layout.of(label, tuple(own_axes.sizes))
        if not layout.counts[TRAIN]:
            raise InvalidValueError("deployment must have cells with a value, got none")
        return cls(own_axes, layout, TRAIN)

    def steps(self) -> Ints:
        """Return the positions along time that hold some of the cells."""
        time_dim = str(self.axes.time_dim)
        if time_dim not in self.layout.label.dims:
            return np.arange(self.axes.steps)
        return np.flatnonzero(self.layout.profiles[self.code, time_dim])

    def locations(self, step: int | None = None) -> Ints:
        """Return the known locations that hold some of the cells: at one step, or at any time."""
        sizes = self.axes.sizes
        if step is None:
            has_cells = self.layout.maps[self.code]
        else:
            label = self.layout.label.isel({self.axes.time_dim: step}, missing_dims="ignore")
            has_cells = (label == self.code).any([dim for dim in label.dims if dim not in sizes])
        missing = {dim: n for dim, n in sizes.items() if dim not in has_cells.dims}
        on_map = np.asarray(has_cells.expand_dims(missing).transpose(*sizes).values).ravel()
        return np.flatnonzero(on_map & np.isfinite(self.axes.places.points).all(axis=-1))


def distances(cells: Cells, train: Cells, measured: set[str]) -> dict[str, Floats]:
    """Return the distances of sampled cells to the nearest train cells, in space and in time."""
    # The distance in time is to the nearest time with any train cell, and that in space to the
    # nearest location that is train then, and to the nearest that is train at any time.
    rng = np.random.default_rng(0)
    samples: dict[str, list[Floats]] = {"space": [], "time": [], ANY_TIME: []}
    axes, train_axes = cells.axes, train.axes
    # Along a track, each time has one location.
    on_track = {train_axes.time_dim, axes.time_dim} & {*train_axes.sizes, *axes.sizes}
    space_by_step = "space" in measured and not on_track
    pairs: list[_StepPair] = [(None, None, math.nan)]
    if "time" in measured:
        n_steps = SAMPLE
        if space_by_step:
            n_steps = _STEPS
        train_steps = train.steps()
        steps = sample_of(cells.steps(), n_steps, rng)
        train_times = train_axes.time_numbers(train_axes)[train_steps]
        times = train_axes.time_numbers(axes)[steps]
        nearest = nearest_on_axis(times, train_times)
        time_distances = np.abs(times - train_times[nearest])
        if space_by_step:
            pairs = list(zip(steps, train_steps[nearest], time_distances, strict=True))
        else:
            samples["time"].append(time_distances)
    if "space" in measured:
        _add_distances_in_space(samples, cells, train, pairs, rng)
    return {domain: np.concatenate(parts) for domain, parts in samples.items() if parts}


def _add_distances_in_space(
    samples: dict[str, list[Floats]],
    cells: Cells,
    train: Cells,
    pairs: list[_StepPair],
    rng: np.random.Generator,
) -> None:
    """Add the distances of sampled locations at each step, in space and in time."""
    places, train_places = cells.axes.places, train.axes.places
    for step, train_step, time_distance in pairs:
        locations = sample_of(cells.locations(step), math.ceil(SAMPLE / len(pairs)), rng)
        train_locations = train.locations(train_step)
        if locations.size and train_locations.size:
            km, _ = train_places.nearest(train_locations, places, locations)
            samples["space"].append(km.ravel())
            if step is not None:
                samples["time"].append(np.full(locations.size, time_distance))
                km, _ = train_places.nearest(train.locations(), places, locations)
                samples[ANY_TIME].append(km.ravel())


def sample_of(indices: Ints, most: int, rng: np.random.Generator) -> Ints:
    """Draw at most `most` indices, in order."""
    if indices.size <= most:
        return indices
    return np.sort(rng.choice(indices, most, replace=False))


def spacing(train: Cells, measured: set[str]) -> float:
    """Return the median distance in kilometres between neighbouring train locations."""
    if "space" not in measured or (locations := train.locations()).size < 2:
        return 0.0
    places = train.axes.places
    sample = sample_of(locations, SAMPLE, np.random.default_rng(0))
    # The nearest location is the location itself.
    km, _ = places.nearest(locations, places, sample, 2)
    return float(np.median(km[:, 1]))
