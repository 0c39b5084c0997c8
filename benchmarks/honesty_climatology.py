"""Skill over our climatology of a forecast that knows nothing but the true season.

Series of daily data are the cycle 8 cos(year) plus AR(1) noise with a coefficient of 0.9. The
forecast is the cycle itself, which is what an infinite record would give as the climatology: its
skill over a climatology of some train years, and its anomaly correlation, are noise of the
climatology alone. That of a fit with 7 coefficients to n days of this noise, which count as n / 19
independent ones, is 133 / n of its variance: .07 after five years, a skill of .065 at most, where
a mean of each day has 1/5, a skill of .17.

A part of `benchmarks/honesty.py`, which calls `keys`, `run` and `rows`.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.evaluation import evaluate

_YEARS = (1, 2, 5, 10, 20)
_SEEDS, _SERIES, _TEST_YEARS, _PERSISTENCE = 20, 40, 2, 0.9
_BARS = {5: 0.06}


def keys(only: str = "") -> list[str]:
    """Return numbers of train years with seeds; those that start with a text."""
    found = [f"{years} years, seed {seed}" for years in _YEARS for seed in range(_SEEDS)]
    return [key for key in found if key.startswith(only)]


def run(key: str) -> dict[str, Any]:
    """Return the skill and anomaly correlation of the true cycle, and the verdicts."""
    years, seed = (int(word) for word in key.replace(" years, seed", "").split())
    rng = np.random.default_rng([years, seed])
    time = xr.date_range("1991-01-01", f"{1990 + years + _TEST_YEARS}-12-31", freq="D")
    day, length = time.dayofyear.values, np.where(time.is_leap_year, 366, 365)
    season = 8 * np.cos(2 * np.pi * (day - 20) / length)
    noise = rng.normal(size=(time.size, _SERIES))
    for step in range(1, time.size):
        noise[step] = _PERSISTENCE * noise[step - 1] + np.sqrt(1 - _PERSISTENCE**2) * noise[step]
    cycle = np.broadcast_to(season[:, None], noise.shape)
    coords = {"time": time, "series": np.arange(_SERIES)}
    truth = xr.Dataset({"t": (("time", "series"), 280 + cycle + noise)}, coords)
    truth["split"] = "time", (time.year <= 1990 + years).astype("uint8")
    forecast = truth[["t"]].copy(data={"t": 280 + cycle}).sel(time=time.year > 1990 + years)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        card = evaluate(forecast, truth, baselines="climatology", progress=False)
    scores = card.scores.sel(variable="t")
    return {
        "years": years,
        "skill": float(scores.skill.sel(baseline="climatology")),
        "acc": float(scores.acc.sel(model="prediction")),
        "verdict": card.verdict[0],
        "described": card.attrs["climatology"],
        "warned": any("fewer than 10 years" in str(one.message) for one in shown),
    }


def rows(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each number of train years, and for what the card says."""
    table = []
    for years in _YEARS:
        found = [one for one in results.values() if one["years"] == years]
        if not found:
            continue
        skills = [one["skill"] for one in found]
        accs = [one["acc"] for one in found]
        better = sum(" better " in one["verdict"] for one in found)
        measured = (
            f"skill {np.mean(skills):.3f} ({min(skills):.3f} to {max(skills):.3f}), ACC "
            f"{np.mean(accs):.2f}, {better} of {len(found)} verdicts 'better'"
        )
        name = f"skill of the true cycle over a climatology of {years} years"
        if years in _BARS:
            bar = f"at most {_BARS[years]:.2f} in the mean over seeds"
            is_met = bool(np.mean(skills) <= _BARS[years])
        elif years == 1:
            bar, is_met = "no verdict over a climatology of one year", better == 0
        else:
            bar, is_met = "none; shown", True
        table.append({"claim": name, "bar": bar, "measured": measured, "met": is_met})
        said = sum(one["warned"] == (years < 10) for one in found)
        table.append(
            {
                "claim": f"{years} train years are {'warned of' if years < 10 else 'enough'}",
                "bar": "a warning below 10 years, none from 10 on",
                "measured": f"{said} of {len(found)}",
                "met": said == len(found),
            }
        )
    return table
