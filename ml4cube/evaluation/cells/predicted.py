"""`Predicted`: values of a prediction, or of a given baseline, at the dates of the prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import check_aligned, date_keys
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.grid import Block
from ml4cube.core.statistics import check_decoded
from ml4cube.cube.coordinates import INIT, LEAD
from ml4cube.evaluation.cells.cell_reader import CLASS, CellReader, LoadedCells, Steps, Tile
from ml4cube.evaluation.cells.classes import in_order, refuse_logits
from ml4cube.evaluation.cells.probabilities import MEMBER, QUANTILE, Outputs
from ml4cube.evaluation.cells.timing import Timing, positions, valid_times


@dataclass(frozen=True, eq=False)
class Predicted:
    """One variable of a prediction."""

    reader: CellReader
    # Where the values of each sample and lead are, along each dim of the steps; -1 is nowhere.
    steps: Mapping[str, Steps]
    outputs: Outputs | None
    # Whether the values are probabilities of classes.
    are_probabilities: bool = False

    @classmethod
    def of(
        cls,
        array: xr.DataArray,
        steps: Mapping[str, Steps],
        truth: xr.DataArray,
        cell_dims: tuple[str, ...],
        classes: NDArray[Any] | None = None,
    ) -> Predicted:
        """Check a variable against the truth; it may have a dim of several outputs.

        Labels of classes, rather than their probabilities, are read as 1 for the class.
        """
        outputs, are_probabilities = Outputs.of(array, truth.dims), False
        if classes is not None and CLASS in array.dims:
            array, classes, are_probabilities = in_order(array, truth, classes), None, True
        elif classes is not None:
            cell_dims = tuple(dim for dim in cell_dims if dim != CLASS)
            if outputs is not None:
                raise InvalidValueError(
                    f"{array.name!r} must have probabilities along {CLASS!r} if it has "
                    f"{outputs.dim!r}, got labels of classes, which have no mean"
                )
        needed = {*steps, *cell_dims}
        other_dims = set(array.dims) - needed
        if outputs is not None:
            other_dims.discard(outputs.dim)
        if other_dims or not needed <= set(array.dims):
            raise InvalidValueError(
                f"prediction of {array.name!r} must have the dims {(*steps, *cell_dims)}, and may "
                f"have {MEMBER!r}, {QUANTILE!r} or {CLASS!r}, got {array.dims}"
            )
        check_decoded(str(array.name), array)
        check_decoded(str(array.name), truth)
        first = {dim: 0 for dim in array.dims if dim in steps or dim not in truth.dims}
        check_aligned(f"prediction of {array.name!r}", array.isel(first, drop=True), truth)
        reader = CellReader.of(array, tuple(steps), cell_dims, classes)
        return cls(reader, steps, outputs, are_probabilities)

    def load(self, rows: Steps, tile: Tile) -> LoadedCells:
        """Read the values of some rows."""
        return self.checked(self.reader.load(self.steps_of(rows), tile))

    def in_block(self, cells: Mapping[str, NDArray[Any]], block: Block) -> LoadedCells:
        """Return the cells of a block that was read."""
        steps = {}
        for dim in self.reader.step_dims:
            steps[dim] = np.arange(block.slices[dim].start, block.slices[dim].stop)
        return self.checked(self.reader.loaded(cells, steps))

    def checked(self, loaded: LoadedCells) -> LoadedCells:
        """Refuse what should be probabilities and is none."""
        if self.are_probabilities:
            refuse_logits(self.reader.name, loaded.cells[self.reader.name])
        return loaded

    def steps_of(self, rows: Steps) -> dict[str, Steps]:
        """Return where the values of some rows are."""
        return {dim: steps.ravel()[rows] for dim, steps in self.steps.items()}


def own_steps(timing: Timing) -> dict[str, Steps]:
    """Return where the values of the prediction itself are."""
    n, leads = timing.valid_steps.shape
    samples = np.broadcast_to(np.arange(n)[:, None], (n, leads))
    if not timing.is_forecast:
        return {timing.sample_dim: samples}
    return {INIT: samples, LEAD: np.broadcast_to(np.arange(leads), (n, leads))}


def matching_steps(name: str, cube: xr.Dataset, timing: Timing) -> dict[str, Steps]:
    """Return where a given baseline has the forecasts, or the dates, of the prediction."""
    time_dim = timing.time_dim
    if INIT not in cube.dims:
        if time_dim not in cube.dims:
            raise InvalidValueError(
                f"the baseline {name!r} must have the dims {INIT!r} and {LEAD!r}, or {time_dim!r}, "
                f"got {[str(dim) for dim in cube.dims]}"
            )
        steps = {time_dim: positions(timing.valid_keys, _keys(name, cube[time_dim].values, timing))}
    elif not timing.is_forecast:
        raise InvalidValueError(
            f"the baseline {name!r} is a forecast, but the prediction has no {INIT!r}; select the "
            f"baseline's values by date, with the dim {time_dim!r}"
        )
    else:
        inits = positions(timing.sample_keys, _keys(name, cube[INIT].values, timing))
        theirs = _keys(name, valid_times(cube), timing)[inits]
        leads = np.full(timing.valid_steps.shape, -1, np.intp)
        # by the dates that are predicted, since leads in months have no fixed length
        for lead in range(theirs.shape[1]):
            leads[theirs[:, [lead]] == timing.valid_keys] = lead
        leads[inits < 0] = -1
        steps = {INIT: np.broadcast_to(inits[:, None], leads.shape), LEAD: leads}
    if any((of_dim < 0).all() for of_dim in steps.values()):
        raise InvalidValueError(f"the baseline {name!r} has no date of the prediction")
    return steps


def _keys(name: str, dates: NDArray[Any], timing: Timing) -> NDArray[Any]:
    """Return the dates of a given baseline as numbers, which must be comparable with the others."""
    keys, kind = date_keys(dates)
    if kind != timing.kind:
        raise InvalidValueError(
            f"the baseline {name!r} has {kind}, the truth {timing.kind}; convert it, as with "
            "cube.convert_calendar"
        )
    return keys
