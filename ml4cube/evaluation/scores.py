"""Scores and their intervals, from the sums of a scorecard."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.evaluation.bootstrap import Bootstrap, Floats
from ml4cube.evaluation.pair_sums import ratio
from ml4cube.evaluation.sums import FIELDS
from ml4cube.evaluation.timing import LEAD

#: Ending of the variable with the label of each sample and lead, as an index.
CODE = "_code"
#: Name of the prediction among the models.
PREDICTION = "prediction"

_MOST_DRAWS = 2**22  # numbers of one sum, in all draws, that are in memory at a time

Sums = dict[str, Floats]


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
NUMBERS = ("count", "unpredicted", "gaps")
#: Sums of which a skill is 1 - prediction / baseline.
SKILLS = {"skill": "squared_error", "crps_skill": "crps"}


def score_rows(
    rows: xr.Dataset, by: Sequence[str], metrics: Sequence[str], bootstrap: Bootstrap
) -> xr.Dataset:
    """Return scores by labels, with ``_low`` and ``_high`` for all but numbers of cells.

    `rows` has the sums by variable, model, sample, lead and label.
    """
    counts = None if str(rows["weight"].dims[2]) in by else _counts(rows, bootstrap)
    grouped = _Grouped(rows, by)
    models = [str(name) for name in rows["model"].values]
    skills = [name for name in SKILLS if name == "skill" or "crps" in metrics]
    names = [*dict.fromkeys((*metrics, "count")), *(skills if len(models) > 1 else ())]
    found: dict[str, list[tuple[Floats, ...]]] = {name: [] for name in names}
    for sums, n_classes in zip(grouped.of_variables(), rows["classes"].values, strict=True):
        for name in names:
            formula = _skill_formula(SKILLS[name]) if name in SKILLS else FORMULAS[name]
            drawn = None if name in NUMBERS else counts
            entry = _with_interval(sums, formula, bootstrap, drawn)
            if name not in SKILLS:
                factor = _factor(name, int(n_classes))
                entry = tuple(factor * values for values in entry)
            found[name].append(entry)
    variables: dict[str, tuple[tuple[str, ...], Floats]] = {}
    for name, entries in found.items():
        dims = ("variable", "baseline" if name in SKILLS else "model", *grouped.dims)
        endings = ("",) if name in NUMBERS else ("", "_low", "_high")
        for i, ending in enumerate(endings):
            values = np.stack([entry[i] for entry in entries])
            variables[name + ending] = dims, values.reshape(*values.shape[:2], *grouped.shape)
    coords = {"variable": rows["variable"].values, "model": models, **grouped.coords}
    if len(models) > 1:
        coords["baseline"] = models[1:]
    result = xr.Dataset(variables, coords, rows.attrs).transpose("variable", ..., *by)
    result = result.assign(
        {name: result[name].astype(np.int64) for name in NUMBERS if name in result}
    )
    for label in grouped.of_dates:  # seasons and months that no date has
        is_present = result["count"].sum([d for d in result["count"].dims if d != label]) > 0
        result = result.isel({label: np.flatnonzero(is_present.values)})
    return result if "count" in metrics else result.drop_vars("count")


def samples_and_leads(rows: xr.Dataset) -> tuple[xr.DataArray, xr.DataArray | None]:
    """Return the dates of samples with a scored cell, and the lead times if it is a forecast."""
    samples = rows[str(rows["weight"].dims[2])].reset_coords(drop=True)
    leads = rows.coords[LEAD] if LEAD in rows.coords else None  # noqa: SIM401
    return samples[_is_used(rows)], leads


def _is_used(rows: xr.Dataset) -> NDArray[np.bool_]:
    """Return which samples have a scored cell."""
    count, dim = rows["count"], rows["count"].dims[2]
    return np.asarray(count.sum([d for d in count.dims if d != dim]).values > 0)


def _counts(rows: xr.Dataset, bootstrap: Bootstrap) -> Floats | None:
    """Return how often each draw has each sample; blocks consist of samples with a scored cell."""
    drawn = bootstrap.counts(*samples_and_leads(rows))
    if drawn is None:
        return None
    is_used = _is_used(rows)
    counts = np.zeros((len(drawn), len(is_used)))
    counts[:, is_used] = drawn
    return counts


def _factor(metric: str, n_classes: int) -> float:
    """Return NaN for a metric that does not apply to values, or to probabilities of classes."""
    if metric in NUMBERS:
        return 1
    if metric == "brier":
        return n_classes or math.nan
    return math.nan if n_classes else 1.0


def _skill_formula(field: str) -> Callable[[Sums], Floats]:
    def skill(sums: Sums) -> Floats:
        """Return 1 - prediction / baseline; 0 if both are perfect, which is a tie."""
        own, others = sums[field][..., :1, :], sums[field][..., 1:, :]
        with np.errstate(divide="ignore", invalid="ignore"):
            found = 1.0 - own / others
        found = np.where((own == 0) & (others == 0), 0.0, found)
        return np.where(sums["weight"][..., 1:, :] > 0, found, np.nan)

    return skill


def _with_interval(
    sums: Sums, formula: Callable[[Sums], Floats], bootstrap: Bootstrap, counts: Floats | None
) -> tuple[Floats, ...]:
    """Return a score, and its interval; the sums have the shape (samples, models, groups)."""
    value = formula({field: array.sum(0) for field, array in sums.items()})
    if counts is None:
        return value, np.full_like(value, np.nan), np.full_like(value, np.nan)
    low, high = np.empty_like(value), np.empty_like(value)
    n, n_models, n_groups = sums["weight"].shape
    size = max(1, _MOST_DRAWS // (len(counts) * n_models))
    for start in range(0, n_groups, size):
        part = slice(start, start + size)
        drawn = {
            field: (counts @ array[:, :, part].reshape(n, -1)).reshape(len(counts), n_models, -1)
            for field, array in sums.items()
        }
        low[:, part], high[:, part] = bootstrap.interval(formula(drawn))
    return value, low, high


class _Grouped:
    """Sums by the labels that are asked for, summed over all others."""

    def __init__(self, rows: xr.Dataset, by: Sequence[str]) -> None:
        self._rows = rows
        sample_dim, _, *cell_labels = (str(dim) for dim in rows["weight"].dims[2:])
        unknown = [
            name
            for name in by
            if name not in (sample_dim, LEAD, *cell_labels) and name + CODE not in rows
        ]
        if unknown:
            raise InvalidValueError(f"by must be among the labels of the scorecard, got {unknown}")
        # of each sample and lead, then of cells
        self._of_rows = [name for name in by if name not in cell_labels]
        self._of_cells = [name for name in by if name in cell_labels]
        self.of_dates = [name for name in self._of_rows if name not in (sample_dim, LEAD)]
        self._samples_apart = sample_dim in by
        self._sample_dim = sample_dim
        self.dims = (*self._of_rows, *self._of_cells)
        self.coords = {
            name: rows[name].reset_coords(drop=True).variable
            for name in self.dims
            if name in rows.coords
        }
        self.shape = tuple(rows.sizes[name] for name in self.dims)

    def of_variables(self) -> Iterator[Sums]:
        """Yield the sums of each variable, shape (samples, models, groups)."""
        rows = self._rows
        codes = self._codes()
        n, leads = codes.shape
        n_of_rows = math.prod(rows.sizes[name] for name in self._of_rows)
        others = [d for d in rows["weight"].dims[4:] if d not in self._of_cells]
        first = ("model", self._sample_dim, LEAD)
        used = [field for field in FIELDS if field in rows]
        for i in range(rows.sizes["variable"]):
            sums: Sums = {}
            for field in used:
                array = rows[field].isel(variable=i).sum(others).transpose(*first, *self._of_cells)
                values = np.moveaxis(array.values.astype(np.float64), 0, 2)
                n_models, of_cells = values.shape[2], math.prod(values.shape[3:])
                by_row = np.zeros((n, n_of_rows, *values.shape[2:]))
                for lead in range(leads):  # of one lead, each sample has one group
                    known = np.flatnonzero(codes[:, lead] >= 0)
                    by_row[known, codes[known, lead]] += values[known, lead]
                by_model = np.moveaxis(by_row, 1, 2)
                sums[field] = by_model.reshape(n, n_models, n_of_rows * of_cells)
            if self._samples_apart:  # each in a group of its own, so nothing is drawn
                sums = {field: array.sum(0, keepdims=True) for field, array in sums.items()}
            yield sums

    def _codes(self) -> np.ndarray:
        """Return the group of each sample and lead; -1 for none."""
        rows = self._rows
        n, leads = rows.sizes[self._sample_dim], rows.sizes[LEAD]
        code = np.zeros((n, leads), np.intp)
        for name in self._of_rows:
            if name == self._sample_dim:
                along = np.arange(n)[:, None]
            elif name == LEAD:
                along = np.arange(leads)[None, :]
            else:
                along = rows[name + CODE].values
            code = np.where((code < 0) | (along < 0), -1, code * rows.sizes[name] + along)
        return code
