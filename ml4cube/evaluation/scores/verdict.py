"""Sentences: where a prediction is better than each baseline, and where it is not."""

from __future__ import annotations

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.climatology import is_one_year
from ml4cube.cube.coordinates import LEAD
from ml4cube.evaluation.cells.baselines import FROM_CLIMATOLOGY


def verdicts(scores: xr.Dataset) -> list[str]:
    """Return a sentence for each variable and baseline, from its skill by lead time, if any."""
    if "skill" not in scores:
        return []
    sentences = []
    for variable in scores["variable"].values:
        for baseline in scores["baseline"].values:
            if baseline in FROM_CLIMATOLOGY and is_one_year(scores.attrs):
                sentences.append(
                    f"{variable} cannot be compared with {baseline}: the climatology is from one "
                    "year."
                )
                continue
            one = scores.sel(variable=variable, baseline=baseline)
            sentences.append(f"{variable} {_compared(one, str(baseline))}")
    return sentences


def _compared(one: xr.Dataset, baseline: str) -> str:
    skill, low, high = (np.atleast_1d(one[f"skill{end}"].values) for end in ("", "_low", "_high"))
    has_interval = np.isfinite(low) & np.isfinite(high)
    better = np.where(has_interval, low > 0, skill > 0)
    worse = np.where(has_interval, high < 0, skill < 0)
    unknown = ~np.isfinite(skill) & ~worse
    even = ~(better | worse | unknown)
    found = {  # and the word that joins it with the baseline
        ("better", "than"): better,
        ("not clearly different", "from"): even & has_interval,
        ("as good", "as"): even & ~has_interval,
        ("worse", "than"): worse,
        ("not comparable", "with"): unknown,
    }
    phrases: list[str] = []
    for (text, joint), where in found.items():
        if where.any():
            named = "" if phrases else f" {joint} {baseline}"
            at = f" at {_listed(one[LEAD].values, where)}" if LEAD in one["skill"].dims else ""
            phrases.append(text + named + at)
    without = "" if has_interval[~unknown].all() else " (without intervals)"
    return f"is {', '.join(phrases)}{without}."


def _listed(leads: NDArray[np.generic], where: NDArray[np.bool_]) -> str:
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
