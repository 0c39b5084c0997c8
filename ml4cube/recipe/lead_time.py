"""Targets at a lead time: y is cut from other cells of a cube than X.

A sample is then a pair of windows, a fixed number of cells apart. Both must lie in the same part
and pass the same rules for masks and gaps. So no target comes from another part, and the counts
of dropped windows still add up.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from ml4cube.core.errors import InvalidValueError, caller_level, check_whole
from ml4cube.core.grid import SizesLike, parse_pairs
from ml4cube.core.time_steps import TimeSteps
from ml4cube.recipe.roles import DimLead, Lead


def parse_lead(
    inputs: Mapping[str, int],
    available: Mapping[str, int],
    where: str,
    *,
    target_offset: SizesLike | None,
    target_size: SizesLike | None,
) -> Lead:
    """Return the lead for windows of inputs, by dim; pairs must fit into the available cells.

    `where` names in messages what has these cells.
    """
    offset = whole_cells("target_offset", target_offset, inputs, least=0)
    size = whole_cells("target_size", target_size, inputs, least=1)
    lead = {d: DimLead(offset.get(d, 0), n, size.get(d, n)) for d, n in inputs.items()}
    for dim, of_dim in lead.items():
        if (span := of_dim.input_size + of_dim.cells_past_input) > available[dim]:
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


def warn_of_uneven_steps(lead: Lead, axes: Mapping[str, Any]) -> None:
    """Warn if a lead, which counts cells, is not the same time everywhere, or lies in the past.

    `axes` are coordinates, with their values, by dim.
    """
    for dim, of_dim in lead.items():
        if not of_dim.offset or dim not in axes:
            continue
        steps = TimeSteps.of(dim, axes[dim].values)
        if steps is None or steps.go_forward:
            continue
        warnings.warn(
            f"target_offset counts cells, but {steps}. Targets there lie at another lead time; "
            f"sort the cube along {dim!r} and reindex it to even steps, whose gaps are then "
            "dropped",
            stacklevel=caller_level(),
        )
