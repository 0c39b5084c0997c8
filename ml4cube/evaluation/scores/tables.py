"""Scores and their intervals, from the sums of a scorecard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.cube.coordinates import LEAD
from ml4cube.evaluation.cells.cell_reader import CLASS
from ml4cube.evaluation.cells.timing import date_keys
from ml4cube.evaluation.pair_sums import ratio
from ml4cube.evaluation.scores.classes import OF_ALL, OF_EACH, OF_PROBABILITIES, Sums
from ml4cube.evaluation.scores.intervals import Floats, Intervals
from ml4cube.evaluation.sums.block_sums import FIELDS
from ml4cube.evaluation.sums.named_sums import CODE

_MOST_NUMBERS = 2**21  # of one sum by sample that are in memory at a time

Formula = Callable[[Sums], Floats]


def _acc(sums: Sums) -> Floats:
    spread = np.sqrt(sums["predicted_anomaly"]) * np.sqrt(sums["true_anomaly"])
    return np.clip(ratio(sums["anomaly_product"], spread), -1.0, 1.0)  # beyond by rounding only


FORMULAS: dict[str, Callable[[Sums], Floats]] = {
    "rmse": lambda sums: np.sqrt(ratio(sums["squared_error"], sums["weight"])),
    "mse": lambda sums: ratio(sums["squared_error"], sums["weight"]),
    "mae": lambda sums: ratio(sums["absolute_error"], sums["weight"]),
    "bias": lambda sums: ratio(sums["error"], sums["weight"]),
    "acc": _acc,
    "crps": lambda sums: ratio(sums["crps"], sums["weight"]),
    "spread_ratio": lambda sums: np.sqrt(ratio(sums["variance"], sums["squared_error"])),
    "brier": lambda sums: ratio(sums["squared_error"], sums["weight"]),  # times the classes
    "count": lambda sums: sums["count"],
    "unpredicted": lambda sums: sums["unpredicted"],
    "gaps": lambda sums: sums["gaps"],
}
METRICS = (*FORMULAS, *OF_ALL)
NUMBERS = ("count", "unpredicted", "gaps")
#: Sums of which a skill is 1 - prediction / baseline.
SKILLS = {"skill": "squared_error", "crps_skill": "crps"}
#: What a score is followed by: the ends of its interval, and how many independent dates there
#: seem to be.
ENDINGS = ("_low", "_high", "_independent")
#: Limits of scores that are not 0 to infinity.
LIMITS = {
    "bias": (-np.inf, np.inf),
    "acc": (-1.0, 1.0),
    "kappa": (-1.0, 1.0),
    "accuracy": (0.0, 1.0),
    "balanced_accuracy": (0.0, 1.0),
    "skill": (-np.inf, 1.0),
    "crps_skill": (-np.inf, 1.0),
}


def score_rows(
    rows: xr.Dataset, by: Sequence[str], metrics: Sequence[str], intervals: Intervals
) -> xr.Dataset:
    """Return scores by labels, with `ENDINGS` for all but numbers of cells.

    `rows` has the sums by variable, model, sample, lead and label.
    """
    grouped = _Grouped(rows, by)
    models = [str(name) for name in rows["model"].values]
    names = list(dict.fromkeys((*metrics, "count", "unpredicted")))
    if len(models) > 1:
        names += [name for name in SKILLS if name == "skill" or "crps" in metrics]
    of_variables = []
    for i in range(rows.sizes["variable"]):
        formulas = {name: _formula(rows.isel(variable=i), name) for name in names}
        of_variables.append(_variable_scores(grouped, i, formulas, intervals))
    variables: dict[str, tuple[tuple[str, ...], Floats]] = {}
    for name in names:
        values = np.stack([scores[name] for scores in of_variables], axis=1)
        variables |= _with_endings(name, values, grouped)
    coords = {"variable": rows["variable"], "model": models, **grouped.coords}
    if len(models) > 1:
        coords["baseline"] = models[1:]
    result = xr.Dataset(variables, coords, rows.attrs).transpose("variable", ..., *by)
    result = _without_absent_labels(result, grouped.of_dates)
    return result.drop_vars([name for name in ("count", "unpredicted") if name not in metrics])


def _with_endings(
    name: str, values: Floats, grouped: _Grouped
) -> dict[str, tuple[tuple[str, ...], Floats]]:
    """Name the arrays of a score: its values, and `ENDINGS`; numbers of cells are integers."""
    dims = ("variable", "baseline" if name in SKILLS else "model", *grouped.dims)
    values = values.reshape(*values.shape[:3], *grouped.shape)
    if name in NUMBERS:
        return {name: (dims, values[0].astype(np.int64))}
    values[1:3] = values[1:3].clip(*LIMITS.get(name, (0.0, np.inf)))
    endings = ("", *ENDINGS)
    return {name + end: (dims, array) for end, array in zip(endings, values, strict=True)}


def _without_absent_labels(scores: xr.Dataset, of_dates: Sequence[str]) -> xr.Dataset:
    """Leave out labels without a date, such as months that are not predicted."""
    with_truth = scores["count"] + scores["unpredicted"]
    for label in of_dates:
        is_present = with_truth.sum([dim for dim in with_truth.dims if dim != label]) > 0
        scores = scores.isel({label: np.flatnonzero(is_present.values)})
    return scores


def _variable_scores(
    grouped: _Grouped, variable: int, formulas: Mapping[str, Formula], intervals: Intervals
) -> dict[str, Floats]:
    """Return each score and its `ENDINGS`, shape (4, models, groups, labels of cells)."""
    found: dict[str, Floats] = {}
    for box, sums in grouped.parts(variable):
        total = {field: array.sum(0) for field, array in sums.items()}
        without = {field: total[field] - array for field, array in sums.items()}
        is_used = sums["weight"][:, :1] > 0
        for name, formula in formulas.items():
            value = formula(total)
            if name not in found:
                found[name] = np.full((4, len(value), *grouped.group_shape), np.nan)
            found[name][:1, :, *box] = value
            if name in NUMBERS or not grouped.has_several_dates:  # a date alone has no interval
                continue
            leads = grouped.longest_leads[None, box[0], None]
            half, independent = intervals.around(formula(without), is_used, leads)
            found[name][1:, :, *box] = value - half, value + half, independent
    return found


def samples_and_leads(rows: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray | None]:
    """Return the dates of samples with a scored cell, and how far a forecast looks ahead.

    These are medians over the samples, in the unit of `date_keys`: lead times may be numbers of any
    unit, such as months.
    """
    dim, is_used = str(rows["weight"].dims[2]), _is_used(rows)
    samples = rows[dim].reset_coords(drop=True)[is_used]
    if LEAD not in rows.coords:
        return samples, None
    elapsed = rows["elapsed"][is_used if is_used.any() else slice(None)]
    return samples, elapsed.median(dim).reset_coords(drop=True)


def _is_used(rows: xr.Dataset) -> NDArray[np.bool_]:
    """Return which samples have a scored cell."""
    count, dim = rows["count"], rows["count"].dims[2]
    return np.asarray(count.sum([d for d in count.dims if d != dim]).values > 0)


def _formula(of_variable: xr.Dataset, metric: str) -> Formula:
    """Return the formula of a metric; NaN where it does not apply to the variable."""
    n = int(of_variable["classes"])
    if metric in SKILLS:
        return _skill_formula(SKILLS[metric])
    if metric in NUMBERS:
        return FORMULAS[metric]
    applies = bool(n) == (metric in OF_ALL or metric == "brier")
    if metric in OF_PROBABILITIES:
        applies &= bool(of_variable["probabilities"])
    if not applies:
        return lambda sums: np.full_like(sums["weight"], np.nan)
    if metric in OF_ALL:
        return lambda sums: OF_ALL[metric](sums, n)
    factor = n or 1  # the squared errors of a cell's classes are added up, not averaged
    return lambda sums: factor * FORMULAS[metric](sums)


def class_scores(
    rows: xr.Dataset, variable: str, by: Sequence[str], intervals: Intervals
) -> xr.Dataset:
    """Return scores of each class by model and labels, with `ENDINGS`."""
    grouped, i = _Grouped(rows, by), rows["variable"].values.tolist().index(variable)
    n = int(rows["classes"][i])
    formulas = {
        f"{name}_{k}": lambda sums, of_each=of_each, k=k: of_each(sums, n)[k]
        for name, of_each in OF_EACH.items()
        for k in range(n)
    }
    entries = _variable_scores(grouped, i, formulas, intervals)
    found = {}
    for name in OF_EACH:
        values = np.stack([entries[f"{name}_{k}"] for k in range(n)], axis=2)
        values[1:3] = values[1:3].clip(0, 1)
        for end, of_end in zip(("", *ENDINGS), values, strict=True):
            shape = (*of_end.shape[:2], *grouped.shape)
            found[name + end] = ("model", CLASS, *grouped.dims), of_end.reshape(shape)
    return xr.Dataset(found, {"model": rows["model"], **grouped.coords})


def _skill_formula(field: str) -> Callable[[Sums], Floats]:
    def skill(sums: Sums) -> Floats:
        """Return 1 - prediction / baseline; 0 if both are perfect, which is a tie."""
        own, others = sums[field][..., :1, :, :], sums[field][..., 1:, :, :]
        with np.errstate(divide="ignore", invalid="ignore"):
            found = 1.0 - own / others
        found = np.where((own == 0) & (others == 0), 0.0, found)
        return np.where(sums["weight"][..., 1:, :, :] > 0, found, np.nan)

    return skill


class _Grouped:
    """Sums by the labels that are asked for, summed over all others."""

    def __init__(self, rows: xr.Dataset, by: Sequence[str]) -> None:
        self._rows = rows
        self._sample_dim, _, *cell_labels = (str(dim) for dim in rows["weight"].dims[2:])
        # of each sample and lead, then of cells
        of_rows = [name for name in by if name not in cell_labels]
        self._of_cells = [name for name in by if name in cell_labels]
        self.of_dates = [name for name in of_rows if name not in (self._sample_dim, LEAD)]
        self.dims = (*of_rows, *self._of_cells)
        self.coords = {
            name: rows[name].reset_coords(drop=True).variable
            for name in self.dims
            if name in rows.coords
        }
        self.shape = tuple(rows.sizes[name] for name in self.dims)
        # of dates and lead times, and labels of cells
        self.group_shape = tuple(
            math.prod(rows.sizes[name] for name in names) for names in (of_rows, self._of_cells)
        )
        # the group of each sample and lead, -1 for none
        n, leads = rows.sizes[self._sample_dim], rows.sizes[LEAD]
        known = {self._sample_dim: np.arange(n)[:, None], LEAD: np.arange(leads)[None, :]}
        self._codes = np.zeros((n, leads), np.intp)
        for name in of_rows:
            along = known[name] if name in known else rows[name + CODE].values
            code = self._codes * rows.sizes[name] + along
            self._codes = np.where((self._codes < 0) | (along < 0), -1, code)

    @property
    def has_several_dates(self) -> bool:
        """False if each sample is a group of its own."""
        return self._sample_dim not in self.dims

    @cached_property
    def longest_leads(self) -> Floats:
        """Longest lead time of each group, in steps between its samples; at least 1."""
        dates = date_keys(self._rows[self._sample_dim].values)[0]
        ahead = np.median(self._rows["elapsed"].values, axis=0)
        steps = np.ones(self.group_shape[0])
        for group in range(len(steps)):
            is_in = self._codes == group
            of_group = dates[is_in.any(1)]
            if len(of_group) > 1:
                # months differ in length
                longest = ahead[is_in.any(0)].max() / np.median(np.diff(of_group))
                steps[group] = max(1, math.ceil(longest - 0.25))
        return steps

    def parts(self, variable: int) -> Iterator[tuple[tuple[slice, slice], Sums]]:
        """Yield the sums of some groups, shape (samples, models, groups, labels of cells).

        All samples are added up if each is a group of its own.
        """
        rows, first = self._rows, (self._sample_dim, LEAD, "model", *self._of_cells)
        others = [dim for dim in rows["weight"].dims[4:] if dim not in self._of_cells]
        fields = {}
        for field in (name for name in rows if rows[name].dims == rows["weight"].dims):
            array = rows[field].isel(variable=variable).sum(others).transpose(*first).values
            fields[str(field)] = array.reshape(*array.shape[:3], math.prod(array.shape[3:]))
        _, _, n_models, n_labels = fields["weight"].shape
        n = len(self._codes) if self.has_several_dates else 1
        several = max(1, len(fields) // len(FIELDS))  # with classes
        most = max(1, _MOST_NUMBERS // (n * n_models * several))
        for labels in _slices(n_labels, most):
            size = max(1, most // (labels.stop - labels.start))
            for groups in _slices(self.group_shape[0], size):
                sums = self._of_groups(fields, groups, labels, n)
                yield (groups, labels), sums

    def _of_groups(self, fields: Sums, groups: slice, labels: slice, n: int) -> Sums:
        """Add up the leads of each sample, or of all if n is 1, that are in a group."""
        n_models = fields["weight"].shape[2]
        shape = (n, groups.stop - groups.start, n_models, labels.stop - labels.start)
        sums = {field: np.zeros(shape) for field in fields}
        for lead in range(self._codes.shape[1]):
            code = self._codes[:, lead]
            known = np.flatnonzero((code >= groups.start) & (code < groups.stop))
            at: Any = (0 if n == 1 else known, code[known] - groups.start)
            for field, array in fields.items():
                np.add.at(sums[field], at, array[known, lead, :, labels])
        return {field: np.moveaxis(array, 1, 2) for field, array in sums.items()}


def _slices(n: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, n)) for start in range(0, n, size)]
