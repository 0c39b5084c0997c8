"""The slowest, most obvious scorecard: every pair of cells by itself."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from typing import Any

import numpy as np

BASELINES = ("persistence", "damped_persistence", "climatology", "anomaly_persistence")


def mean(values: list[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def climatology(truth: Any, train: Any, groups: list[Any]) -> dict[Any, float]:
    """Mean of the train values by group and cell; arrays (time, cell)."""
    values = defaultdict(list)
    for step, group in enumerate(groups):
        for cell, value in enumerate(truth[step]):
            if train[step, cell] and math.isfinite(value):
                values[group, cell].append(float(value))
    return {key: mean(found) for key, found in values.items()}


def damping(truth: Any, train: Any, groups: list[Any], normal: Any, lag: int) -> list[float]:
    """Slope of the later on the earlier of two train anomalies that are `lag` steps apart."""
    slopes = []
    for cell in range(truth.shape[1]):
        pairs = []
        for step in range(len(truth) - lag):
            both = [
                truth[i, cell] - normal.get((groups[i], cell), math.nan)
                if train[i, cell]
                else math.nan
                for i in (step, step + lag)
            ]
            if all(map(math.isfinite, both)):
                pairs.append(both)
        squares = math.fsum(a * a for a, _ in pairs)
        slopes.append(math.fsum(a * b for a, b in pairs) / squares if squares else 0.0)
    return slopes


def all_pairs(
    prediction: Any,
    truth: Any,
    train: Any,
    scored: Any,
    groups: list[Any],
    inits: list[int],
    lags: list[int],
    names: tuple[str, ...],
) -> list[dict[str, Any]]:
    """One row for each cell that is scored: init, lead, cell, truth, normal and all models.

    Arrays have the shape (time, cell), `prediction` (init, lead, cell). `inits` are steps of the
    truth, which may lie outside it, `lags` the leads in steps.
    """
    normal = climatology(truth, train, groups)
    rho = [damping(truth, train, groups, normal, lag) for lag in lags]

    def value(step: int, cell: int) -> float:
        return float(truth[step, cell]) if 0 <= step < len(truth) else math.nan

    def usual(step: int, cell: int) -> float:
        return normal.get((groups[step], cell), math.nan) if 0 <= step < len(truth) else math.nan

    rows = []
    for i, lead, cell in itertools.product(*map(range, prediction.shape)):
        init, valid = inits[i], inits[i] + lags[lead]
        true, anomaly = value(valid, cell), value(init, cell) - usual(init, cell)
        if not math.isfinite(true) or not scored[valid, cell]:
            continue
        models = {
            "prediction": float(prediction[i, lead, cell]),
            "persistence": value(init, cell),
            "climatology": usual(valid, cell),
            "damped_persistence": usual(valid, cell) + rho[lead][cell] * anomaly,
            "anomaly_persistence": usual(valid, cell) + anomaly,
        }
        models = {name: models[name] for name in ("prediction", *names)}
        row = {"init": i, "lead": lead, "cell": cell, "valid": valid, "truth": true}
        rows.append(row | {"normal": usual(valid, cell), "models": models})
    return rows


def scores(rows: list[dict[str, Any]], model: str, weights: Any) -> dict[str, float]:
    """The scores of a model over rows of which all models have a value; `weights` are by cell."""
    used = [row for row in rows if all(map(math.isfinite, row["models"].values()))]
    lacking = [row for row in rows if not math.isfinite(row["models"][model])]
    found: dict[str, float] = {"count": len(used), "unpredicted": len(lacking)}
    w = [float(weights[row["cell"]]) for row in used]
    errors = [row["models"][model] - row["truth"] for row in used]
    total = math.fsum(w)
    if not total:
        return found

    def average(values: list[float]) -> float:
        return math.fsum(a * b for a, b in zip(w, values, strict=True)) / total

    found["mse"] = average([e * e for e in errors])
    found["rmse"] = math.sqrt(found["mse"])
    found["mae"] = average([abs(e) for e in errors])
    found["bias"] = average(errors)
    own = [row["models"][model] - row["normal"] for row in used]
    true = [row["truth"] - row["normal"] for row in used]
    has_normal = [math.isfinite(row["normal"]) for row in used]

    def product(a: list[float], b: list[float]) -> float:
        terms = zip(w, a, b, has_normal, strict=True)
        return math.fsum(x * y * z for x, y, z, known in terms if known)

    spread = math.sqrt(product(own, own) * product(true, true))
    found["acc"] = product(own, true) / spread if spread else math.nan
    return found


def crps_of_members(members: list[float], truth: float) -> float:
    """The fair estimator, by its definition (Ferro 2014)."""
    m = len(members)
    score = mean([abs(x - truth) for x in members])
    if m == 1:
        return score
    return score - math.fsum(abs(a - b) for a in members for b in members) / (2 * m * (m - 1))


def crps_of_quantiles(levels: list[float], quantiles: list[float], truth: float) -> float:
    """Twice the pinball loss of the nearest of the levels, at many levels between 0 and 1."""
    score, n = 0.0, 20_000
    for i in range(n):
        tau = (i + 0.5) / n
        k = min(range(len(levels)), key=lambda j: abs(levels[j] - tau))
        d = truth - quantiles[k]
        score += 2 * max(levels[k] * d, (levels[k] - 1) * d) / n
    return score


def power(row: Any) -> list[float]:
    """Power at each wavenumber, from sums of sines and cosines."""
    n = len(row)
    found = []
    for k in range(n // 2 + 1):
        angles = 2 * np.pi * k * np.arange(n) / n
        a, b = (row * np.cos(angles)).sum() / n, (row * np.sin(angles)).sum() / n
        twice = 1 if k == 0 or 2 * k == n else 2
        found.append(float(twice * (a * a + b * b)))
    return found
