"""The arguments of `evaluate`: read, and checked against prediction and truth."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import xarray as xr

from ml4cube.core.axes import check_aligned
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice, names_of
from ml4cube.core.metric_registry import CLASS_SUMS, METRICS, SCORECARD_METRICS, defaults_of
from ml4cube.cube.variables import split_label
from ml4cube.evaluation.cells.baselines import (
    BASELINES,
    DAMPED,
    FROM_CLIMATOLOGY,
    PREDICTION,
)
from ml4cube.evaluation.cells.climatology import ClimatologyOptions, warn_of_train_cells
from ml4cube.evaluation.cells.labels import Labels
from ml4cube.evaluation.cells.timing import Timing
from ml4cube.evaluation.sums.scored_variable import ScoredVariable
from ml4cube.preprocessing.cubes import cells_of_part

Baselines = str | Mapping[str, Any] | Sequence[str | Mapping[str, Any]]

_MOST_BYTES = 2**32  # of the sums by date


def read_baselines(baselines: Baselines) -> tuple[list[str], dict[str, Any]]:
    """Return the names of our baselines, and the cubes of given ones."""
    listed: Any = [baselines]
    if isinstance(baselines, Iterable) and not isinstance(baselines, str | Mapping | xr.DataArray):
        listed = baselines
    named: list[str] = []
    cubes: dict[str, Any] = {}
    for baseline in listed:
        if isinstance(baseline, Mapping) and not isinstance(baseline, xr.Dataset):
            cubes |= baseline
            continue
        if not isinstance(baseline, str):
            raise InvalidTypeError(
                "baselines must hold names, or a mapping of names to cubes, got "
                f"{type(baseline).__name__}; give a cube a name, as in {{'era5': cube}}"
            )
        check_choice("baselines", baseline, BASELINES)
        named.append(baseline)
    if taken := [name for name in cubes if name in (PREDICTION, *BASELINES)]:
        raise InvalidValueError(f"a given baseline must have another name, got {taken[0]!r}")
    return list(dict.fromkeys(named)), cubes


def read_metrics(metrics: str | Sequence[str] | None) -> list[str]:
    wanted = names_of("metrics", metrics)
    for metric in wanted:
        check_choice("metrics", metric, list(SCORECARD_METRICS))
    return list(wanted)


def _check_means(means: xr.Dataset, variables: Sequence[str], truth: xr.Dataset) -> None:
    """Refuse a climatology that lacks a variable, or is of another grid."""
    if not set(variables) <= set(means.data_vars):
        raise InvalidValueError(
            f"climatology must have the variables {list(variables)}, got {list(means.data_vars)}"
        )
    for name in variables:
        cycles = [dim for dim in means[name].dims if dim not in truth[name].dims]
        first = means[name].isel(dict.fromkeys(cycles, 0), drop=True)
        check_aligned("climatology", first, truth[name])


def _needing_climatology(names: Sequence[str]) -> list[str]:
    """Return the baselines, then the metrics, that need a climatology."""
    needing = [name for name in names if name in FROM_CLIMATOLOGY]
    metrics = [METRICS[name] for name in names if name in METRICS]
    return needing + [metric.name for metric in metrics if metric.needs_climatology]


def climatology_options(
    truth: xr.Dataset,
    timing: Timing,
    climatology: Any,
    variables: Sequence[str],
    wanted: Iterable[str],
) -> ClimatologyOptions | None:
    """Return the climatology; None if it is neither known nor needed."""
    if isinstance(climatology, xr.DataArray) and len(variables) == 1:
        climatology = climatology.rename(variables[0])
    options = ClimatologyOptions.of(truth, timing, climatology)
    if options.means is not None:
        _check_means(options.means, variables, truth)
    wanted = list(wanted)
    needing = _needing_climatology(wanted)
    lacks = not options.is_known or (DAMPED in needing and not options.train.steps.size)
    if needing and lacks:
        raise InvalidValueError(
            f"{needing} need train cells, but truth has no split label and no date before those of "
            "the prediction; add a label, as with assign_time_split, or give climatology="
        )
    has_metrics = not METRICS.keys().isdisjoint(wanted)
    if lacks or (has_metrics and not needing):  # by default, acc if it can be had
        return None
    warn_of_train_cells(options, truth, timing, climatology)
    return options


def check_size(variables: Sequence[ScoredVariable], labels: Labels) -> None:
    """Refuse labels of so many cells that the sums by date do not fit."""
    n_bytes, n_labels = 0, math.prod(labels.sizes.values())
    for variable in variables:
        n_sums = len(variable.sums)
        if variable.n_classes:
            n_sums += 1 + len(CLASS_SUMS) * variable.n_classes
        n_rows = len(variable.models) * variable.timing.valid_steps.size * n_labels
        n_bytes += 8 * n_sums * n_rows
    if n_bytes > _MOST_BYTES:
        raise InvalidValueError(
            f"by must have fewer labels of cells: sums for {n_labels:,} of them at "
            f"{variable.timing.valid_steps.size:,} dates and lead times need {n_bytes / 1e9:.0f} "
            "GB; see `Scorecard.map` for scores of each cell"
        )


def part_to_score(truth: xr.Dataset, split: str | None) -> tuple[xr.DataArray | None, str]:
    """Return flags of the cells to score, None for all."""
    label = split_label(truth)
    if split is None or label is None:
        return None, "all cells"
    variable, part = cells_of_part(truth, split)
    return xr.DataArray(variable), f"the {part} cells of {label!r}"


def applicable_metrics(variables: Iterable[ScoredVariable], has_climatology: bool) -> list[str]:
    """Return the usual metrics that any of the variables has."""
    predictions = set[str]().union(*(variable.predictions for variable in variables))
    names = []
    for name in defaults_of("evaluate"):
        metric = METRICS[name]
        is_known = has_climatology or not metric.needs_climatology
        if is_known and not predictions.isdisjoint(metric.predictions):
            names.append(name)
    return names
