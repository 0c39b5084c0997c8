"""`CellReader`: values of one variable at any steps, for one tile of its cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.cube.reader import reading
from ml4cube.evaluation.cube_scores import in_block

Floats = NDArray[np.float64]
Steps = NDArray[np.intp]
Tile = Mapping[str, slice]

#: Dim of the probabilities of classes.
CLASS = "class"


@dataclass(frozen=True, eq=False)
class CellReader:
    """A variable that is read at steps along some of its dims."""

    # Dims: those of the steps, one of several outputs if there is one, those of the cells.
    array: xr.DataArray
    step_dims: tuple[str, ...]
    # Labels to compare the values with: 1 where the value is the label, along a first dim of cells.
    classes: NDArray[Any] | None = None

    @classmethod
    def of(
        cls,
        array: xr.DataArray,
        step_dims: tuple[str, ...],
        cell_dims: tuple[str, ...],
        classes: NDArray[Any] | None = None,
    ) -> CellReader:
        """Make a reader; a dim of several outputs comes between those of steps and cells."""
        present = [dim for dim in cell_dims if dim in array.dims]
        return cls(array.transpose(*step_dims, ..., *present), step_dims, classes)

    def load(self, steps: Mapping[str, Steps], tile: Tile) -> LoadedCells:
        """Read the cells of a tile at some steps along each dim; -1 is no step."""
        loaded: dict[str, Steps] = {}
        chosen: dict[str, Any] = {dim: tile[dim] for dim in tile if dim in self.array.dims}
        box = dict(tile)
        for dim in self.step_dims:
            loaded[dim] = np.unique(steps[dim][steps[dim] >= 0])
            if not loaded[dim].size:  # so that the cells have a shape
                loaded[dim] = np.zeros(1, np.intp)
            first, last = int(loaded[dim][0]), int(loaded[dim][-1])
            chosen[dim] = loaded[dim]
            box[dim] = slice(first, last + 1)
            if last - first + 1 == len(loaded[dim]):  # without holes, a slice is read faster
                chosen[dim] = box[dim]
        with reading(str(self.array.name), box):
            values = self.array.isel(chosen).values
        if self.classes is not None:
            self._refuse_other_labels(values)
        return LoadedCells(values, loaded, self.classes)

    def _refuse_other_labels(self, values: NDArray[Any]) -> None:
        """Refuse values that are none of the classes."""
        assert self.classes is not None
        other = np.setdiff1d(values[np.isfinite(values)], self.classes)
        if other.size:
            raise InvalidValueError(
                f"{self.array.name!r} has the label {other[0]:g}, but its classes are "
                f"{self.classes.tolist()}; list all in its flag_values, name those of a "
                "prediction by outputs={'class': [...]}, or make others gaps, as with ds.where"
            )


@dataclass(frozen=True, eq=False)
class LoadedCells:
    """The values of a tile at some steps, in memory."""

    values: NDArray[Any]
    steps: Mapping[str, Steps]
    labels: NDArray[Any] | None

    def at(self, steps: Mapping[str, Steps]) -> Floats:
        """Return values at some of the loaded steps as float64; NaN where a step is -1."""
        arrays = np.broadcast_arrays(*(steps[dim] for dim in self.steps))
        index = [
            np.searchsorted(loaded, array).clip(max=len(loaded) - 1)
            for loaded, array in zip(self.steps.values(), arrays, strict=True)
        ]
        values: Floats = self.values[tuple(index)].astype(np.float64)
        values[np.any([array < 0 for array in arrays], axis=0)] = np.nan
        if self.labels is None:
            return values
        axis = arrays[0].ndim
        values = np.expand_dims(values, axis)
        labels = self.labels.astype(np.float64).reshape(-1, *(1,) * (values.ndim - axis - 1))
        return np.where(np.isnan(values), np.nan, values == labels)


def cut(steps: Steps, size: int) -> list[Steps]:
    """Cut steps or samples into blocks."""
    return [steps[start : start + size] for start in range(0, len(steps), size)]


def at_steps(array: xr.DataArray, steps: Steps, time_dim: str, tile: Tile) -> NDArray[Any]:
    """Return flags or labels at steps of any shape, with an axis of 1 for dims that they lack."""
    if time_dim not in array.dims:
        values = in_block(array, tile)
        return values.reshape((1,) * steps.ndim + values.shape)
    wanted = np.unique(steps.clip(min=0))
    values = in_block(array, {time_dim: wanted, **tile})
    return np.asarray(values[np.searchsorted(wanted, steps.clip(min=0))])
