"""Sentences: where a prediction is better than each baseline, where not, and what is unknown."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.climatology import is_one_year
from ml4cube.cube.coordinates import LEAD
from ml4cube.evaluation.cells.baselines import FROM_CLIMATOLOGY
from ml4cube.evaluation.scores.intervals import Intervals

Flags = NDArray[np.bool_]
Values = NDArray[np.float64]


def verdicts(
    by_lead: xr.Dataset, groups: xr.Dataset, intervals: Intervals, dates: str
) -> list[str]:
    """Return what can be said of each variable and baseline, from scores by lead time and group."""
    if "skill" not in by_lead:
        return []
    verdict = []
    for variable in by_lead["variable"].values:
        for baseline in by_lead["baseline"].values:
            if baseline in FROM_CLIMATOLOGY and is_one_year(by_lead.attrs):
                verdict.append(
                    f"{variable} cannot be compared with {baseline}: the climatology is from one "
                    "year."
                )
                continue
            scores = by_lead.sel(variable=variable, baseline=baseline)
            name, compared = str(variable), _Compared(scores, str(baseline))
            of_groups = groups.sel(variable=variable, baseline=baseline)
            sentences = [
                compared.decided(name),
                compared.undecided(name, dates, intervals.block_length),
                compared.by_mae(),
                _in_groups(of_groups, intervals.level),
            ]
            verdict.append(" ".join(sentence for sentence in sentences if sentence))
    return verdict


class _Compared:
    """One variable of a prediction beside one baseline, by lead time if there are some."""

    def __init__(self, scores: xr.Dataset, baseline: str) -> None:
        self._scores, self._baseline = scores, baseline
        self._leads = scores[LEAD].values if LEAD in scores["skill"].dims else None
        self._skill = np.atleast_1d(scores["skill"].values)
        self._better, self._worse, self._even = _decisions(scores)

    def decided(self, variable: str) -> str:
        """Say what intervals decide."""
        decisions = {  # and the word that joins it with the baseline
            ("better", "than"): self._better,
            ("not clearly different", "from"): self._even,
            ("worse", "than"): self._worse,
            ("not comparable", "with"): np.isnan(self._skill),
        }
        phrases: list[str] = []
        for (text, joint), where in decisions.items():
            if where.any():
                named = "" if phrases else f" {joint} {self._baseline}"
                phrases.append(text + named + self._at(where))
        return f"{variable} is {', '.join(phrases)}." if phrases else ""

    def undecided(self, variable: str, dates: str, block_length: int | None) -> str:
        """Give the numbers where there is no interval, and say why."""
        where = ~(self._better | self._worse | self._even | np.isnan(self._skill))
        if not where.any():
            return ""
        metric = "rmse" if np.isfinite(self._of("rmse", "prediction")[where]).any() else "accuracy"
        independent = np.atleast_1d(self._scores["skill_independent"].values)[where]
        reason = f"{self._baseline} has no error"
        if not np.isinf(self._skill[where]).all():
            reason = too_few(dates, independent, block_length)
        return (
            f"Whether {variable} is better than {self._baseline}{self._at(where)} cannot be "
            f"decided: {self._numbers(metric, where)}; {reason}."
        )

    def by_mae(self) -> str:
        """Say where the mean absolute error disagrees with the squared one."""
        own, other = (self._of("mae", model) for model in ("prediction", self._baseline))
        where = np.sign(other - own) * np.sign(self._skill) < 0
        if not where.any():
            return ""
        return f"By MAE it is the other way round{self._at(where)}: {self._numbers('mae', where)}."

    def _of(self, metric: str, model: str) -> Values:
        if metric not in self._scores:
            return np.full(self._skill.shape, np.nan)
        return np.atleast_1d(self._scores[metric].sel(model=model).values)

    def _numbers(self, metric: str, where: Flags) -> str:
        """Return the scores of both models: "RMSE 1.2 to 1.4, of persistence 1.3 to 1.6"."""
        name = metric if metric == "accuracy" else metric.upper()
        own, other = (
            span_text([f"{value:.3g}" for value in np.sort(self._of(metric, model)[where])])
            for model in ("prediction", self._baseline)
        )
        return f"{name} {own}, of {self._baseline} {other}"

    def _at(self, where: Flags) -> str:
        return "" if self._leads is None else f" at {_listed(self._leads, where)}"


def _decisions(scores: xr.Dataset) -> tuple[Flags, Flags, Flags]:
    """Return where the interval of a skill is above 0, is below, and includes 0."""
    low, high = (np.atleast_1d(scores[f"skill{end}"].values) for end in ("_low", "_high"))
    has_interval = np.isfinite(low) & np.isfinite(high)
    better, worse = has_interval & (low > 0), has_interval & (high < 0)
    return better, worse, has_interval & ~(better | worse)


def _in_groups(groups: xr.Dataset, level: float) -> str:
    """Say in how many groups the prediction is better or worse, and how many chance makes so."""
    n = int(groups["skill"].notnull().sum())
    if n < 2:
        return ""
    better, worse, even = (int(flags.sum()) for flags in _decisions(groups))
    decided = better + worse + even
    chance = f"{(1 - level) * decided:.2g} would differ by chance."
    if groups["skill"].dims == (LEAD,):  # each is named already
        return f"Of {decided} equally good lead times {chance}" if decided > 1 else ""
    labels = " and ".join(str(dim) for dim in groups["skill"].dims)
    if not decided:
        return f"By {labels} it cannot be decided in any of {n} groups."
    undecided = f", cannot be decided in {n - decided}" if decided < n else ""
    return (
        f"By {labels} it is better in {better} and worse in {worse} of {n} groups{undecided}; of "
        f"{decided} equally good ones {chance}"
    )


def interval_text(scores: xr.Dataset, dates: str, intervals: Intervals) -> str:
    """Say which scores have intervals, and from how many independent dates."""
    metrics = [str(name) for name in scores if f"{name}_low" in scores]
    n, n_with = (
        sum(int(scores[name + ending].notnull().sum()) for name in metrics)
        for ending in ("", "_low")
    )
    independent = _of_prediction(scores, metrics)
    length = intervals.block_length
    if not n:
        return "none, there is no score but numbers of cells"
    if not n_with:
        return f"none, {too_few(dates, independent, length)}"
    some = "" if n_with == n else f" for {n_with} of {n} scores"
    if length is not None:
        return f"{intervals.level:g}{some}, blocks of {length} dates"
    return f"{intervals.level:g}{some}, {_behave(dates, independent)}"


def _of_prediction(scores: xr.Dataset, metrics: Sequence[str]) -> Values:
    """Return the independent dates of the prediction in the first metric that has some."""
    for name in metrics:
        independent = scores[f"{name}_independent"]
        if "model" in independent.dims and bool(independent.notnull().any()):
            return np.asarray(independent.isel(model=0).values)
    return np.full(1, np.nan)


def too_few(dates: str, independent: Values, block_length: int | None) -> str:
    """Say that dates decide nothing."""
    if np.isnan(independent).all():  # of a single date
        return "a single date is too few to decide"
    if block_length is not None:
        return f"{dates} are fewer than two blocks of {block_length}"
    return f"{_behave(dates, independent)}: too few to decide"


def _behave(dates: str, independent: Values) -> str:
    whole = np.sort(independent[np.isfinite(independent)]).astype(int).clip(min=1)
    ones = "one" if whole[-1] == 1 else "ones"
    return f"{dates} behave like {span_text([str(n) for n in whole])} independent {ones}"


def span_text(ordered: Sequence[str]) -> str:
    """Return the first and the last text: "4 to 8", or only one if they are equal."""
    first, last = ordered[0], ordered[-1]
    return first if first == last else f"{first} to {last}"


def _listed(leads: NDArray[np.generic], where: Flags) -> str:
    """Return lead times as a phrase: "all lead times", "1 d to 3 d and 5 d"."""
    if where.all():
        return "all lead times" if len(leads) > 1 else f"a lead time of {lead_text(leads[0])}"
    edges = np.flatnonzero(np.diff(np.concatenate([[False], where, [False]]).astype(int)))
    runs = []
    for first, end in zip(edges[::2], edges[1::2], strict=True):
        shown = [lead_text(lead) for lead in leads[[first, end - 1]]]
        runs.append(shown[0] if end - first == 1 else " to ".join(shown))
    return " and ".join(runs)


def lead_text(lead: np.generic) -> str:
    """Return a lead time as a short text: "6 h", "31 d"."""
    if not isinstance(lead, np.timedelta64):
        return f"{lead}"
    hours = lead / np.timedelta64(1, "h")
    in_days = hours % 24 == 0 or hours >= 72
    return f"{hours / 24:.4g} d" if in_days else f"{hours:g} h"
