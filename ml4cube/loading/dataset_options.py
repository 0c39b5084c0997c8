"""Arguments of `PTXrDataset`, and what they mean for windows of a cube or of a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np

from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_choice,
    check_whole,
    parse_names,
)
from ml4cube.core.grid import SizesLike, parse_overlap, parse_sizes
from ml4cube.core.split_plan import PARTS
from ml4cube.loading.cube_source import CUTTING
from ml4cube.loading.memory import check_megabytes
from ml4cube.recipe.lead_time import whole_cells

#: Arguments for a cube, which have names of their own in the signature of `PTXrDataset`.
SIZES = ("sample_size", "overlap", "block_size")


@dataclass(frozen=True, kw_only=True)
class DatasetOptions:
    """Arguments of `PTXrDataset`, which documents them, checked when made."""

    to_pred: str | Sequence[str] | None
    target_offset: SizesLike | None
    target_size: SizesLike | None
    weights: Any
    features: str | Sequence[str] | None
    coord_features: str | Sequence[str] | None
    part: str | None
    dtype: np.dtype[Any]
    target_dtype: np.dtype[Any]
    cache_mb: float
    rollout: int
    # The arguments for a cube that were given.
    cutting: dict[str, Any]

    def __post_init__(self) -> None:
        """Check the arguments."""
        if self.shifted and not self.targets:
            raise InvalidTypeError(
                "target_offset and target_size need to_pred; name the variables to predict"
            )
        check_choice("part", self.part, (*PARTS, None))
        check_whole("rollout", self.rollout, 1)
        if self.rollout > 1 and self.target_offset is None:
            raise InvalidTypeError(
                f"rollout={self.rollout} needs target_offset along time, as {{'time': 1}}"
            )
        check_megabytes("cache_mb", self.cache_mb)
        for name in self.cutting:
            if name not in (*CUTTING, *SIZES):
                raise InvalidTypeError(
                    f"PTXrDataset has no argument {name!r}; for cubes it takes "
                    f"{', '.join((*SIZES, *CUTTING))}"
                )
        _ = self.targets, self.chosen, self.coordinates  # Parsing checks them.

    @property
    def of_targets(self) -> dict[str, Any]:
        """The arguments that say where targets lie."""
        return {"target_offset": self.target_offset, "target_size": self.target_size}

    @property
    def shifted(self) -> bool:
        """True if the targets lie elsewhere than the inputs."""
        return self.target_offset is not None or self.target_size is not None

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Variables of y."""
        return parse_names("to_pred", self.to_pred)

    @property
    def weights_variable(self) -> str | None:
        """The variable that holds the weights, if one does."""
        if isinstance(self.weights, str):
            return self.weights
        return None

    @property
    def scored(self) -> tuple[str, ...]:
        """Variables used by a loss: cut with the targets, and filled only on request."""
        weights = () if self.weights_variable is None else (self.weights_variable,)
        return tuple(dict.fromkeys((*self.targets, *weights)))

    @cached_property
    def coordinates(self) -> tuple[str, ...]:
        """Coordinates that are channels of X."""
        return parse_names("coord_features", self.coord_features)

    @cached_property
    def chosen(self) -> tuple[str, ...]:
        """Variables of X, if they are named."""
        return parse_names("features", self.features)

    def with_all_steps(self, shape: Mapping[str, int], is_store: bool) -> Self:
        """Return the options of windows in which the steps of a rollout follow one another.

        `shape` is that of the cube, or of the stored windows.
        """
        if self.rollout == 1:
            return self
        offset = whole_cells("target_offset", self.target_offset, shape, least=0)
        dims = [dim for dim, cells in offset.items() if cells]
        if len(dims) != 1:
            raise InvalidValueError(
                f"rollout={self.rollout} needs target_offset along one dim, time, got {offset}"
            )
        dim = dims[0]
        # As without a rollout: windows of a cube have one cell, those in a store all that fit.
        default = {**shape, dim: offset[dim]} if is_store else dict.fromkeys(shape, 1)
        given = parse_sizes("sample_size", self.cutting.get("sample_size", {}), shape)
        inputs = default | given
        outputs = inputs | whole_cells("target_size", self.target_size, shape, least=1)
        self._check_one_step(dim, offset[dim], inputs, outputs)
        longer = inputs[dim] + (self.rollout - 1) * outputs[dim]
        if longer + outputs[dim] > shape[dim]:
            raise InvalidValueError(
                f"rollout={self.rollout} needs {longer + outputs[dim]} cells along {dim!r}, and "
                f"there are {shape[dim]}; choose a smaller rollout"
            )
        cutting = self.cutting | {"sample_size": {**given, dim: longer}}
        if not is_store:  # Windows begin where they do without a rollout.
            shared = parse_overlap("overlap", self.cutting.get("overlap"), inputs)
            fractions = {d: cells / inputs[d] for d, cells in shared.items() if cells}
            fractions[dim] = (shared[dim] + longer - inputs[dim]) / longer
            cutting["overlap"] = fractions
        return replace(self, cutting=cutting, target_size={dim: self.rollout * outputs[dim]})

    def _check_one_step(
        self, dim: str, offset: int, inputs: Mapping[str, int], outputs: Mapping[str, int]
    ) -> None:
        """Refuse a step whose output cannot become its next input."""
        if offset != inputs[dim]:
            raise InvalidValueError(
                f"target_offset along {dim!r} must be {inputs[dim]}, the cells of X, with rollout="
                f"{self.rollout}, because y has the next steps; got {offset}"
            )
        for other, cells in inputs.items():
            if other != dim and outputs[other] != cells:
                raise InvalidValueError(
                    f"target_size along {other!r} must be {cells}, the cells of X, with rollout="
                    f"{self.rollout}, because y becomes X; got {outputs[other]}"
                )
