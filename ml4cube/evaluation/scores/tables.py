"""Scores and their intervals, from the sums of a scorecard."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import xarray as xr

from ml4cube.core.metric_registry import (
    CELLS,
    LABEL,
    MEMBER,
    METRICS,
    PER_CLASS_METRICS,
    PROBABILITY,
    QUANTILE,
    SKILLS,
    VALUE,
    Floats,
    Sums,
)
from ml4cube.core.sums.pairs import merged_along, without
from ml4cube.cube.coordinates import LEAD
from ml4cube.evaluation.cells.cell_reader import CLASS
from ml4cube.evaluation.scores.intervals import Intervals
from ml4cube.evaluation.scores.row_groups import RowGroups

Formula = Callable[[Sums], Floats]

#: What a score is followed by: the ends of its interval, and how many independent dates there
#: seem to be.
ENDINGS = ("_low", "_high", "_independent")


def score_rows(
    rows: Mapping[str, xr.Dataset], by: Sequence[str], metrics: Sequence[str], intervals: Intervals
) -> xr.Dataset:
    """Return scores by labels, with `ENDINGS` for all but numbers of cells.

    `rows` has the sums of each variable by model, sample, lead and label.
    """
    first = next(iter(rows.values()))
    models = [str(name) for name in first["model"].values]
    names = list(dict.fromkeys((*metrics, "count", "unpredicted")))
    if len(models) > 1:
        names += [name for name in SKILLS if name == "skill" or "crps" in metrics]
    of_variables = []
    for sums in rows.values():
        formulas = {name: _formula(sums, name) for name in names}
        of_variables.append(_variable_scores(RowGroups(sums, by), formulas, intervals))
    groups = RowGroups(first, by)
    units = [sums.attrs["units"] for sums in rows.values()]
    coords = {"variable": list(rows), "units": ("variable", units), "model": models}
    result = xr.Dataset(coords=coords | groups.coords)
    if len(models) > 1:
        result = result.assign_coords(baseline=models[1:])
    for name in names:
        values = np.stack([scores[name] for scores in of_variables], axis=1)
        dims = ("variable", "baseline" if name in SKILLS else "model", *groups.dims)
        result = result.assign(_with_endings(name, dims, values, groups.shape))
    result = _without_absent_labels(result.transpose("variable", ..., *by), groups.of_dates)
    return result.drop_vars([name for name in ("count", "unpredicted") if name not in metrics])


def class_scores(rows: xr.Dataset, by: Sequence[str], intervals: Intervals) -> xr.Dataset:
    """Return scores of each class by model and labels, with `ENDINGS`."""
    groups = RowGroups(rows, by)
    formulas = {name: METRICS[name].formula for name in PER_CLASS_METRICS}
    result = xr.Dataset(coords={"model": rows["model"], **groups.coords})
    for name, values in _variable_scores(groups, formulas, intervals).items():
        dims = ("model", CLASS, *groups.dims)
        of_classes = np.moveaxis(values, -1, 2)
        result = result.assign(_with_endings(name, dims, of_classes, groups.shape))
    return result


def _with_endings(
    name: str, dims: tuple[str, ...], values: Floats, shape: tuple[int, ...]
) -> dict[str, xr.Variable]:
    """Name the arrays of a score: its values, and `ENDINGS`; numbers of cells are integers.

    `values` has a first axis of these four, two as in the first `dims`, and the two of groups.
    """
    values = values.reshape(*values.shape[:3], *shape)
    if name in SKILLS:
        lowest, highest, attrs = -np.inf, 1.0, {}
    else:
        entry = METRICS[name]
        lowest, highest, attrs = entry.lowest, entry.highest, {"long_name": entry.long_name}
        if entry.unit == CELLS:
            return {name: xr.Variable(dims, values[0].astype(np.int64), attrs)}
    values[1:3] = values[1:3].clip(lowest, highest)
    named = {name: xr.Variable(dims, values[0], attrs)}
    for ending, array in zip(ENDINGS, values[1:], strict=True):
        named[name + ending] = xr.Variable(dims, array)
    return named


def _without_absent_labels(scores: xr.Dataset, of_dates: Sequence[str]) -> xr.Dataset:
    """Leave out labels without a date, such as months that are not predicted."""
    with_truth = scores["count"] + scores["unpredicted"]
    for label in of_dates:
        is_present = with_truth.sum([dim for dim in with_truth.dims if dim != label]) > 0
        scores = scores.isel({label: np.flatnonzero(is_present.values)})
    return scores


def _variable_scores(
    groups: RowGroups, formulas: Mapping[str, Formula], intervals: Intervals
) -> dict[str, Floats]:
    """Return each score and its `ENDINGS`, shape (4, models, groups, labels of cells)."""
    scores: dict[str, Floats] = {}
    for (of_groups, of_labels), sums in groups.parts():
        total = merged_along(sums, 0)
        without_date = without(total, sums)
        is_used = sums["weight"][:, :1] > 0
        for name, formula in formulas.items():
            value = formula(total)
            if name not in scores:
                shape = (4, len(value), *groups.group_shape, *value.shape[3:])
                scores[name] = np.full(shape, np.nan)
            part = scores[name][:, :, of_groups, of_labels]
            part[0] = value
            is_number = name in METRICS and METRICS[name].unit == CELLS
            if is_number or not groups.has_several_dates:  # a date alone has no interval
                continue
            leads = groups.longest_leads[None, of_groups, None]
            used = is_used
            if value.ndim > 3:  # of each class
                leads, used = leads[..., None], used[..., None]
            half, independent = intervals.around(formula(without_date), used, leads)
            part[1:] = value - half, value + half, independent
    return scores


def samples_and_leads(rows: Mapping[str, xr.Dataset]) -> tuple[xr.DataArray, xr.DataArray | None]:
    """Return the dates of samples with a scored cell, and how far a forecast looks ahead.

    These are medians over the samples, in the unit of `date_keys`: lead times may be numbers of any
    unit, such as months.
    """
    first = next(iter(rows.values()))
    dim = str(first["count"].dims[1])
    counts = [
        sums["count"].sum([d for d in sums["count"].dims if d != dim]) for sums in rows.values()
    ]
    is_used = np.sum(counts, axis=0) > 0
    samples = first[dim].reset_coords(drop=True)[is_used]
    if LEAD not in first.coords:
        return samples, None
    elapsed = first["elapsed"]
    if is_used.any():
        elapsed = elapsed[is_used]
    return samples, elapsed.median(dim).reset_coords(drop=True)


def _formula(of_variable: xr.Dataset, metric: str) -> Formula:
    """Return the formula of a metric; NaN where it does not apply to the variable."""
    if metric in SKILLS:
        return _skill_formula(SKILLS[metric])
    kinds = {VALUE, MEMBER, QUANTILE}
    if CLASS in of_variable.dims:
        kinds = {LABEL}
        if of_variable.attrs["has_probabilities"]:
            kinds.add(PROBABILITY)
    if kinds.isdisjoint(METRICS[metric].predictions):
        return lambda sums: np.full_like(sums["weight"], np.nan)
    return METRICS[metric].formula


def _skill_formula(name: str) -> Formula:
    def skill(sums: Sums) -> Floats:
        """Return 1 - prediction / baseline; 0 if both are perfect, which is a tie."""
        own, others = sums[name][..., :1, :, :], sums[name][..., 1:, :, :]
        with np.errstate(divide="ignore", invalid="ignore"):
            score = 1.0 - own / others
        score = np.where((own == 0) & (others == 0), 0.0, score)
        return np.where(sums["weight"][..., 1:, :, :] > 0, score, np.nan)

    return skill
