"""Do intervals contain the truth, and have members of the climatology no skill? Simulated truth.

Errors of two equally good models on 4 cells are first-order autoregressions with unit variance.
One call of `evaluate` scores many of them: each draw is a label of its cells.
`benchmarks/honesty.py` runs the cases and shows the rows beside those of others.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.evaluation import evaluate

# Dates, dependence on the last error, draws of a case, seeds.
CASES = (
    (365, 0.0, 1000, 4),
    (1500, 0.0, 250, 16),
    (365, 0.8, 1000, 4),
    (1500, 0.95, 250, 16),
    (365, 0.95, 1000, 4),
    (60, 0.0, 2000, 2),
    (60, 0.8, 2000, 2),
    (120, 0.8, 2000, 2),
    (14, 0.0, 2000, 2),
    (14, 0.8, 2000, 2),
)
#: True values of the scores of the first model, and of its skill over the other: a tie.
TRUE = {"rmse": 1.0, "bias": 0.0, "skill": 0.0}
#: Seeds of members drawn from the climatology of 20 years.
MEMBERS = [f"members-seed{seed}" for seed in range(4)]
NAMES = {"rmse": "RMSE", "bias": "bias", "skill": "tie"}


def keys() -> list[str]:
    """Return the names of independent cases, each some seconds on one core."""
    of_errors = [
        f"n{n}-phi{phi:g}-seed{seed}" for n, phi, _, seeds in CASES for seed in range(seeds)
    ]
    return [*of_errors, *MEMBERS]


def run(key: str) -> dict[str, float | int | str]:
    """Return how many draws of a case have an interval, and how many of these the truth.

    Of members drawn from the climatology, the skill of their CRPS over it and over its mean.
    """
    if key in MEMBERS:
        return _skill_of_members(int(key.removeprefix("members-seed")))
    n, phi, seed = (part.lstrip("nphised") for part in key.split("-"))
    draws = next(draws for dates, p, draws, _ in CASES if (dates, p) == (int(n), float(phi)))
    scores = _scores(int(n), float(phi), draws, int(seed))
    result: dict[str, float | int | str] = {"draws": draws}
    for metric, true in TRUE.items():
        low, high = scores[f"{metric}_low"], scores[f"{metric}_high"]
        result[f"{metric}_intervals"] = int(low.notnull().sum())
        result[f"{metric}_contain"] = int(((low <= true) & (true <= high)).sum())
        result[f"{metric}_width"] = float((high - low).sum())
        result[f"{metric}_independent"] = float(scores[f"{metric}_independent"].median())
    return result


def _scores(n: int, phi: float, draws: int, seed: int) -> xr.Dataset:
    """Return the scores of each draw."""
    rng = np.random.default_rng([n, round(100 * phi), seed])
    dims = ("time", "cell", "draw")
    coords = {"time": xr.date_range("2000-01-01", periods=n), "draw": np.arange(draws)}
    own, other = (
        xr.DataArray(_errors(rng, (n, 4, draws), phi), coords, dims, "t") for _ in range(2)
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "scores have no intervals")
        card = evaluate(
            own, xr.zeros_like(own), baselines={"other": other}, by="draw",
            metrics=["rmse", "bias"], weights=None, progress=False,
        )  # fmt: skip
    return card.scores.isel(variable=0, model=0, baseline=0)


def _errors(
    rng: np.random.Generator, shape: tuple[int, ...], phi: float
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return stationary errors that are phi of the last ones and something new."""
    errors = rng.normal(size=shape)
    for t in range(1, shape[0]):
        errors[t] = phi * errors[t - 1] + (1 - phi**2) ** 0.5 * errors[t]
    return errors


def _skill_of_members(seed: int) -> dict[str, float | int | str]:
    """Score members that know the true climatology alone, of monthly data with 20 train years."""
    rng = np.random.default_rng(seed)
    time = xr.date_range("1960-01-01", periods=12 * 40, freq="MS")
    cycle = xr.DataArray(5 * np.cos(np.arange(480) * np.pi / 6), {"time": time}, "time")
    truth = xr.Dataset({"t": cycle + xr.DataArray(rng.normal(size=(480, 40)), dims=("time", "x"))})
    truth["split"] = "time", (np.arange(480) < 240).astype("uint8")
    noise = xr.DataArray(rng.normal(size=(480, 40, 20)), dims=("time", "x", "member"))
    members = (cycle + noise).isel(time=slice(240, None)).rename("t")
    card = evaluate(
        members, truth, baselines=["climatology", {"mean": (truth.t * 0 + cycle).rename("t")}],
        climatology="month", metrics=["crps"], progress=False,
    )  # fmt: skip
    over_distribution, over_mean = (
        card.scores["crps_skill"].squeeze().sel(baseline=["climatology", "mean"]).values
    )
    return {"over_distribution": float(over_distribution), "over_mean": float(over_mean)}


def rows(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a row for each bar, from whatever cases have run."""
    found = []
    for n, phi, _, _ in CASES:
        cases = [result for key, result in results.items() if key.startswith(f"n{n}-phi{phi:g}-")]
        if cases:
            found += [_row(n, phi, metric, cases) for metric in TRUE]
    members = [results[key] for key in MEMBERS if key in results]
    if members:
        over, over_mean = (
            float(np.mean([case[name] for case in members]))
            for name in ("over_distribution", "over_mean")
        )
        found.append(
            {
                "claim": "CRPS skill of members of the climatology over it, with 20 train years",
                "bar": "at most .06",
                "measured": f"{over:.3f}; over its mean {over_mean:.3f}",
                "met": over <= 0.06,
            }
        )
    return found


def _row(n: int, phi: float, metric: str, cases: list[Mapping[str, Any]]) -> dict[str, Any]:
    """Compare the coverage of one score with its bar."""
    draws, intervals, contain = (
        sum(int(case[name]) for case in cases)
        for name in ("draws", f"{metric}_intervals", f"{metric}_contain")
    )
    share, covers = intervals / draws, contain / max(intervals, 1)
    wrong = (intervals - contain) / draws
    if n < 15:
        bar, is_met = "no interval", not intervals
    elif phi == 0:
        bar, is_met = "covers .93 to .97", 0.93 <= covers <= 0.97
    elif (n, phi) in ((365, 0.8), (1500, 0.95)):
        bar = "in 95 % of runs an interval, covers .92 to .98"
        is_met = share >= 0.95 and 0.92 <= covers <= 0.98
    elif (n, phi) == (365, 0.95):
        bar, is_met = "covers .88 or more, or none", not intervals or covers >= 0.88
    else:
        bar, is_met = "a wrong interval in at most 10 % of runs", wrong <= 0.1
    measured = f"an interval in {share:.1%} of {draws} runs"
    if intervals:
        measured += f", covers {covers:.3f}, wrong in {wrong:.1%} of runs"
    return {
        "claim": f"95 % intervals of {NAMES[metric]}: {n} dates, errors of autocorrelation {phi:g}",
        "bar": bar,
        "measured": measured,
        "met": bool(is_met),
    }
