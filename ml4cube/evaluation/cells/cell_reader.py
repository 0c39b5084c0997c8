"""`CellReader`: values of one variable at any steps, for one tile of its cells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.cube.reader import CubeReader

Floats = NDArray[np.float64]
Steps = NDArray[np.intp]
Tile = Mapping[str, slice]

#: Dim of the probabilities of classes.
CLASS = "class"


@dataclass(frozen=True, eq=False)
class CellReader:
    """A variable that is read at steps along some of its dims, and what lies beside it."""

    # Dims: those of the steps, one of several outputs if there is one, those of the cells.
    reader: CubeReader
    name: str
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
        beside: Mapping[str, xr.Variable | None] | None = None,
    ) -> CellReader:
        """Make a reader; a dim of several outputs comes between those of steps and cells."""
        present = [dim for dim in cell_dims if dim in array.dims]
        variable = array.variable.transpose(*step_dims, ..., *present)
        name = str(array.name)
        reader = CubeReader.of_variables({name: variable, **(beside or {})})
        return cls(reader, name, step_dims, classes)

    def load(self, steps: Mapping[str, Steps], tile: Tile) -> LoadedCells:
        """Read the cells of a tile at some steps along each dim; -1 is no step."""
        box, loaded = {}, {}
        for dim, n in zip(self.reader.dims, self.reader.shape, strict=True):
            box[dim] = tile.get(dim, slice(0, n))
        for dim in self.step_dims:
            loaded[dim] = np.unique(steps[dim][steps[dim] >= 0])
            if not loaded[dim].size:  # so that the cells have a shape
                loaded[dim] = np.zeros(1, np.intp)
        first, *others = self.step_dims
        for dim in others:
            box[dim] = slice(int(loaded[dim][0]), int(loaded[dim][-1]) + 1)
            loaded[dim] = np.arange(box[dim].start, box[dim].stop)
        return self.loaded(self.reader.read_steps(first, loaded[first], box), loaded)

    def loaded(self, cells: Mapping[str, NDArray[Any]], steps: Mapping[str, Steps]) -> LoadedCells:
        """Return cells that were read; refuse labels that are none of the classes."""
        if self.classes is not None:
            values = cells[self.name]
            other = np.setdiff1d(values[np.isfinite(values)], self.classes)
            if other.size:
                raise InvalidValueError(
                    f"{self.name!r} has the label {other[0]:g}, but its classes are "
                    f"{self.classes.tolist()}; list all in its flag_values, name those of a "
                    "prediction by outputs={'class': [...]}, or make others gaps, as with ds.where"
                )
        return LoadedCells(cells, steps, self)


@dataclass(frozen=True, eq=False)
class LoadedCells:
    """The values of a tile at some steps, in memory, and what lies beside them."""

    cells: Mapping[str, NDArray[Any]]
    steps: Mapping[str, Steps]
    reader: CellReader

    def at(self, steps: Mapping[str, Steps]) -> Floats:
        """Return values at some of the loaded steps, 1-D, as float64; NaN where a step is -1."""
        values: Floats = self.beside(self.reader.name, steps).astype(np.float64)
        values[np.any([steps[dim] < 0 for dim in self.steps], axis=0)] = np.nan
        classes = self.reader.classes
        if classes is None:
            return values
        values = values[:, np.newaxis]
        labels = classes.astype(np.float64).reshape(-1, *(1,) * (values.ndim - 2))
        return np.where(np.isnan(values), np.nan, values == labels)

    def beside(self, name: str, steps: Mapping[str, Steps]) -> NDArray[Any]:
        """Return what was read beside the values at some of the loaded steps."""
        index = []
        for dim, loaded in self.steps.items():
            index.append(np.searchsorted(loaded, steps[dim]).clip(max=len(loaded) - 1))
        return np.asarray(self.cells[name][tuple(index)])
