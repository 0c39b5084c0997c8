"""`ScoreOptions`: what is compared, for all variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xarray as xr

from ml4cube.core.axes import check_aligned
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.sums.fields import check_weights
from ml4cube.cube.areas import Weights, cell_weights, check_not_zero
from ml4cube.evaluation.cells.baselines import CLIMATOLOGY
from ml4cube.evaluation.cells.climatology import ClimatologyOptions
from ml4cube.evaluation.cells.climatology_distribution import distribution_beside
from ml4cube.evaluation.cells.labels import Labels
from ml4cube.evaluation.cells.probabilities import Outputs
from ml4cube.evaluation.cells.timing import Timing
from ml4cube.evaluation.cells.train_climatology import TRAIN
from ml4cube.preprocessing.cubes import all_over_other_dims

#: Names of what is read beside the truth; those of variables in files have no spaces.
PART, WEIGHTS = "is scored", "weights of cells"


@dataclass(frozen=True, eq=False)
class ScoreOptions:
    """What is compared, and how."""

    timing: Timing
    # Names of our baselines, and the climatology that they or a metric need.
    baselines: Sequence[str]
    climatology: ClimatologyOptions | None
    # Flags of the cells that are scored, None for all.
    part: xr.DataArray | None
    labels: Labels
    weights: Weights
    # Names of the sums by date.
    sums: Sequence[str]

    def distribution_beside(self, outputs: Outputs | None) -> Outputs | None:
        """Return what the climatology of train cells is beside several outputs, if it is one."""
        if outputs is None or self.climatology is None or CLIMATOLOGY not in self.baselines:
            return None
        if not self.climatology.train.steps.size:
            return None
        return distribution_beside(outputs)

    def beside(
        self, array: xr.DataArray, truth: xr.Dataset, dims: Sequence[str]
    ) -> tuple[dict[str, xr.Variable | None], str]:
        """Return what is read beside a variable of the truth, and how its cells are weighted."""
        name = array.name
        for label in self.labels.of_cells:
            if lacking := [dim for dim in label.codes.dims if dim not in dims]:
                raise InvalidValueError(
                    f"by={label.name!r} lies along {lacking}, which {name!r} lacks; evaluate "
                    "variables of other dims by themselves, as with prediction[['name']]"
                )
        flags: dict[str, xr.Variable | None] = {**self.labels.variables}
        if self.part is not None:
            flags[PART] = all_over_other_dims(self.part.variable, dims)
        if self.climatology is not None:
            flags[TRAIN] = all_over_other_dims(self.climatology.train.flags.variable, dims)
        weights, described, _ = cell_weights(self.weights, array, truth.variables).warn()
        if weights is not None:
            _check_weights(weights, array, dims[1:])
            flags[WEIGHTS] = weights.variable
        return flags, described


def _check_weights(weights: xr.DataArray, array: xr.DataArray, dims: Sequence[str]) -> None:
    """Refuse weights that do not lie along the dims of a step, or are not positive."""
    if not set(weights.dims) <= set(dims):
        raise InvalidValueError(
            f"weights must lie along the dims of a step of {array.name!r}, {tuple(dims)}, got "
            f"{weights.dims}"
        )
    check_aligned("weights", weights, array)
    check_weights(weights.values)
    check_not_zero(weights)
