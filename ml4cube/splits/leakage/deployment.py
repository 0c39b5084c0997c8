"""Judge distances of the test part to train, also by those of the cells where a model is used."""

from __future__ import annotations

import math

import numpy as np

from ml4cube.core.split_plan import TRAIN
from ml4cube.splits.distances import ANY_TIME, Floats, spacing
from ml4cube.splits.leakage.case import Case
from ml4cube.splits.leakage.expected_error import Neighbourhoods, Promise, expected_promise
from ml4cube.splits.leakage.findings import Findings, percent, rounded

# By domain ("space", "time"), distances to train.
Distances = dict[str, Floats]

# Most test cells at the location of a train cell: those of a pole, or of a fold of the grid.
_MAX_SAME = 0.02
# Locations of a deployment are scattered among train if their median distance to it is at most so
# many times that between neighbouring train locations.
_SCATTERED = 3.0
_NEAREST = {
    "space": "location, at the nearest time",
    "time": "time, at any location",
    ANY_TIME: "location, at any time",
}


def check_distances(case: Case, findings: Findings) -> None:
    """Add the median distances to train.

    Unless all that the label cuts is measured, the verdict has the cells along dims instead.
    """
    curves = case.comparison.curves
    for domain, (unit, of_domain) in curves.items():
        for name, values in of_domain.items():
            meaning = f"median distance to the nearest train {_NEAREST[domain]}, estimated"
            findings.row(f"{name}, {domain}", float(np.median(values)), unit, meaning)
    text = _describe(case, f"{case.part} → train")
    if text and all(case.domains.get(dim) in curves for dim in case.ordered):
        findings.tested = f"its {case.part} part tests {text}"


def check_same_places(case: Case, findings: Findings) -> None:
    """Judge test cells at the location of a train cell, as at poles and folds of a grid."""
    of_test = case.comparison.distances(f"{case.part} → train")
    if not {case.domains[dim] for dim in case.cut if dim in case.domains} <= of_test.keys():
        return  # not measured
    if len({values.size for values in of_test.values()}) != 1 or "space" not in of_test:
        return  # not of the same cells
    others = [dim for dim in case.cut if dim not in case.domains]
    fraction = float(np.logical_and.reduce([values == 0 for values in of_test.values()]).mean())
    meaning = "at the location and time of a train cell"
    if others:  # such as members: other values, of the same dates
        meaning += f" of another {' or '.join(others)}"
    status = "ok"
    if fraction and not findings.rows["shared cells"]["found"]:
        status = "warning"
        if fraction > _MAX_SAME and not others:
            status = "leak"
        findings.say(f"{percent(fraction)} of the {case.part} cells are {meaning}", status)
    unit = f"fraction of {case.part} cells"
    findings.row("cells at train locations", fraction, unit, meaning, _MAX_SAME, status)


def check_deployment(case: Case, findings: Findings) -> None:
    """Judge what the distances to train promise of the error in the deployment."""
    if case.deployed is None:
        return
    promise, comparison = _promise(case), case.comparison
    cells, meaning = case.deployed.layout.counts[TRAIN], "cells of the deployment with a value"
    findings.row("deployment cells", cells, "cells", meaning)
    for domain, why in comparison.unknown.items():
        findings.say(f"distances in {domain} were not compared because {why}", "warning")
        name = f"{case.part} against deployment, {domain}"
        findings.row(name, math.nan, "ratio", f"not compared because {why}", None, "unknown")
    findings.nearness = promise.judgement
    asks = _describe(case, "deployment → train")
    findings.promise = _text_of(promise, findings.tested, asks)
    if promise.judgement in ("too easy", "too hard"):
        apart = spacing(comparison.train, comparison.measured)
        split = fitting_split(comparison.distances("deployment → train"), apart)
        findings.advice = f"Try {split}."
    status = {"fits": "ok", "undecided": "unknown"}.get(promise.judgement, "warning")
    meaning = "expected error of the test part by that in the deployment, from the variogram"
    if promise.variable:
        meaning += f" of {promise.variable}"
    limit = None
    if not promise.unknown:
        limit = f"{promise.low:.2g} to {promise.high:.2g}"
    findings.row("promised error", promise.ratio, "ratio", meaning, limit, status)
    for domain, length in promise.ranges.items():
        meaning = "distance up to which train cells are alike"
        if math.isinf(length):
            meaning = "no sill: values differ more and more over all distances examined"
        findings.row(f"range in {domain}", length, comparison.curves[domain][0], meaning)


def _promise(case: Case) -> Promise:
    """Return what the test part promises of the error in the deployment."""
    comparison = case.comparison
    for dim in case.ordered:
        if dim not in case.domains:
            comparison.unknown[dim] = "it is neither a dim of space nor of time"
    not_compared = [dim for dim in case.cut if case.domains.get(dim, dim) in comparison.unknown]
    if not_compared:
        return Promise.without(f"the split is cut along {', '.join(not_compared)}")
    of_test = Neighbourhoods.of(comparison.test, comparison.train, comparison.measured)
    variables = [case.view.ds[name] for name in case.names]
    return expected_promise(
        variables, comparison.train, of_test, comparison.around, comparison.measured
    )


def _text_of(promise: Promise, tested: str, asks: str) -> str:
    """Say what is promised of the error in a deployment that asks for such distances."""
    contrast = ""
    if asks and tested:
        contrast = f"{tested}, and the deployment asks for {asks}"
    if promise.unknown:
        text, joint = f"nothing is claimed of errors, because {promise.unknown}", "; "
    else:
        number = f"{promise.ratio:.2g} ({promise.low:.2g} to {promise.high:.2g})"
        text, joint = f"it promises about {number} of the error in the deployment", ", because "
        if promise.judgement == "undecided":
            return f"{text}, which may be more or less than all of it"
    if contrast and promise.judgement != "fits":
        text += joint + contrast
    return text


def _describe(case: Case, curve: str) -> str:
    """Return where cells lie relative to train, by their distances in each domain."""
    distances = case.comparison.distances(curve)
    what = []
    if distances.keys() & {"space", ANY_TIME}:
        what.append("new places" if _median_in_space(distances) > 0 else "places of train")
    if "time" in distances:
        what.append("new times" if np.median(distances["time"]) > 0 else "times of train")
    apart = [
        f"{_span(values)} {case.comparison.curves[domain][0]} from train in {domain}"
        for domain, values in distances.items()
        if domain != ANY_TIME or _span(values) != _span(distances["space"])
    ]
    if what:
        return f"{' at '.join(what)} ({', '.join(apart)})"
    return ""


def _median_in_space(distances: Distances) -> float:
    """Return the median distance to train at any time, or at the nearest one; 0 if unknown."""
    for domain in (ANY_TIME, "space"):
        if domain in distances:
            return float(np.median(distances[domain]))
    return 0.0


def _span(values: Floats) -> str:
    """Return the distances between which eight in ten lie."""
    low, high = (rounded(float(number)) for number in np.quantile(values, [0.1, 0.9]))
    if low == high:
        return low
    return f"{low} to {high}"


def fitting_split(distances: Distances, spacing: float) -> str:
    """Return the split whose test part is about as far from train as a deployment is.

    `spacing` is the distance between neighbouring train locations.
    """
    far, later = _median_in_space(distances), float(np.median(distances.get("time", 0.0)))
    if far > 0 and later > 0:
        return "LeaveLocationTimeOut, which leaves out places and times together"
    if later > 0:
        return "assign_time_split with a gap as long as that before the deployment"
    if far > _SCATTERED * spacing:
        return "assign_region_split with regions as large as the deployment"
    if far > 0:
        return "assign_location_split, which leaves out whole places"
    return "assign_rand_split, which leaves out single cells, or places and times apart"
