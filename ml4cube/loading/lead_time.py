"""Targets at a lead time: y is cut from other cells of a cube than X.

A sample is then a pair of windows, a fixed number of cells apart. Both must lie in the same part
and pass the same rules for masks and gaps. So no target comes from another part, and the counts
of dropped windows still add up.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    caller_level,
    check_whole,
    parse_names,
)
from ml4cube.core.grid import Grid, SizesLike, parse_pairs
from ml4cube.core.time_steps import TimeSteps, WindowsOverTime, starts_of
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.recipe.roles import DimLead, Lead
from ml4cube.sampling.request import Sampling, axis_values, check_known

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Arguments of `PTXrDataset` about targets."""

    to_pred: str | Sequence[str] | None
    target_offset: SizesLike | None
    target_size: SizesLike | None
    weights: Any

    def __post_init__(self) -> None:
        """Refuse a lead without targets."""
        if self.shifted and not self.targets:
            raise InvalidTypeError(
                "target_offset and target_size need to_pred; name the variables to predict"
            )

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

    def lead_of(self, inputs: Mapping[str, int], available: Mapping[str, int], where: str) -> Lead:
        """Return the lead for windows of inputs, by dim; pairs must fit into the available cells.

        `where` names in messages what has these cells.
        """
        offset = whole_cells("target_offset", self.target_offset, inputs, least=0)
        size = whole_cells("target_size", self.target_size, inputs, least=1)
        lead = {d: DimLead(offset.get(d, 0), n, size.get(d, n)) for d, n in inputs.items()}
        for dim, along in lead.items():
            if (span := along.input_size + along.cells_past_input) > available[dim]:
                raise InvalidValueError(
                    f"inputs and targets together span {span} cells along {dim!r}, and {where} has "
                    f"{available[dim]}; choose a smaller target_offset, target_size or sample_size"
                )
        return lead


def whole_cells(
    argument: str, given: SizesLike | None, dims: Mapping[str, int], least: int
) -> dict[str, int]:
    """Return the cells by dim that a user gave."""
    pairs = {} if given is None else parse_pairs(argument, given, tuple(dims))
    for dim, value in pairs.items():
        check_whole(f"{argument} along {dim!r}", value, least)
    return {dim: int(value) for dim, value in pairs.items()}


def warn_of_uneven_steps(lead: Lead, axes: Mapping[str, xr.Variable]) -> None:
    """Warn if a lead, which counts cells, is not the same time everywhere, or lies in the past."""
    for dim, along in lead.items():
        steps = TimeSteps.of(dim, axes[dim].values) if along.offset and dim in axes else None
        if steps is None or steps.go_forward:
            continue
        warnings.warn(
            f"target_offset counts cells, but {steps}. Targets there lie at another lead time; "
            f"sort the cube along {dim!r} and reindex it to even steps, whose gaps are then "
            "dropped",
            stacklevel=caller_level(),
        )


def with_lead(sampling: Sampling, options: TargetOptions) -> Sampling:
    """Return a sampling whose targets lie elsewhere than its inputs."""
    recipe, tiled, targets = sampling.recipe, sampling.tiled, options.scored
    check_known("to_pred", options.targets, recipe.variables, sampling.left_out)
    check_known("weights", targets, recipe.variables)  # The variables of y are known by now.
    if tiled.callback is not None:
        raise InvalidTypeError(
            "callback cannot be combined with target_offset or target_size, because it gets the "
            "inputs without their targets; compute the variable on the cube, or use augment="
        )
    size, shape = dict(zip(recipe.dims, recipe.size, strict=True)), tiled.bound.sizes
    lead = options.lead_of(size, shape, "the cube")
    warn_of_uneven_steps(lead, {d: sampling.ds[d].variable for d in lead if d in sampling.ds})
    of_targets = replace(
        recipe,
        size=tuple(of_dim.target_size for of_dim in lead.values()),
        variables=targets,
        window_dims=(),
        array_dims=(),
        fill_method=None,  # Filled targets would be scored like measured ones.
        const=None,
    )
    offset = tuple(of_dim.offset for of_dim in lead.values())
    bound = replace(tiled.bound, targets=BoundRecipe(of_targets, tiled.bound.shape, offset=offset))
    windows = bound.windows
    counts = dict(zip(recipe.dims, windows.counts, strict=True))
    tile = zip(recipe.dims, tiled.tiles.tile, strict=True)
    tiles = Grid.blocks(counts, {dim: min(n, counts[dim]) for dim, n in tile})
    tiled = replace(tiled, bound=bound, tiles=tiles)
    over_time = WindowsOverTime.of(starts_of(windows), axis_values(sampling.ds, recipe.dims))
    return replace(sampling, tiled=tiled, over_missing_dates=over_time.over_missing_dates)
