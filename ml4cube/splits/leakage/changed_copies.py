"""Find train values that a held-out step holds in another form, and predictors with the target."""

from __future__ import annotations

from typing import Any

from ml4cube.cube.variables import data_variables
from ml4cube.splits.cube import CubeView, dates_of
from ml4cube.splits.leakage.case import Case
from ml4cube.splits.leakage.coarse_fields import CoarseFields, Floats, Steps
from ml4cube.splits.leakage.findings import Findings
from ml4cube.splits.leakage.near_copies import find_interpolated_steps, find_near_copies
from ml4cube.splits.leakage.predictors import (
    find_target,
    is_centred_by_all_steps,
    is_mean_of_all_steps,
)
from ml4cube.splits.leakage.smoothed import coarse_spacing, running_mean_window
from ml4cube.splits.leakage.value_pairs import copied_share


def check_changed_copies(case: Case, findings: Findings) -> None:
    """Compare coarse fields of steps, and of variables if the user named the targets."""
    view, layout, names, time_dim = case.view, case.layout, case.names, case.axes.time_dim
    for name in names:
        if coarse := coarse_spacing(view, layout, name):
            dim, spacing, apart = coarse
            text = (
                f"{name} was interpolated along {dim} from points {spacing} cells apart, and test "
                f"cells lie {apart} cells from train cells, so that both come from the same points"
            )
            findings.copied(f"{name} interpolated along {dim}", spacing, "cells", text)
        if share := copied_share(view, layout.label, name):
            text = (
                f"{share:.2g} of the held-out cells of {name} are copies of cells that stand "
                "elsewhere in train, with their neighbours"
            )
            findings.copied(f"copied cells of {name}", share, "held-out cells", text)
    if time_dim is None:
        return
    steps = Steps.of(view, layout, time_dim)
    others = []
    if case.has_target:
        others = [name for name in data_variables(view.ds) if name not in names]
    for name in names:
        fields = CoarseFields.of(view, name, time_dim)
        if fields is None:
            continue
        if steps.held_out.any() and steps.train.any():
            _add_copied_steps(findings, view, name, fields, steps)
            _add_smoothed(findings, name, fields.flat(), steps)
        for other in others:
            predictor = CoarseFields.of(view, other, time_dim)
            if predictor is not None:
                text = _target_in(name, other, fields.flat(), predictor.flat(), steps)
                if text:
                    findings.copied(f"{name} in {other}", 1.0, "the predictor", text)


def _add_copied_steps(
    findings: Findings, view: CubeView, name: str, fields: CoarseFields, steps: Steps
) -> None:
    """Add near copies and interpolated steps."""
    if copies := find_near_copies(fields, steps):
        flipped = ""
        if copies.flipped:
            flipped = f", flipped along {' and '.join(copies.flipped)}"
        text = (
            f"{copies.share:.0%} of the held-out steps of {name} are near copies of train steps"
            f"{flipped}{_span(view, steps.dim, copies.first, copies.last)}"
        )
        findings.copied(f"near copies of {name}", copies.share, "held-out steps", text)
    if means := find_interpolated_steps(fields, steps):
        text = (
            f"{means.share:.0%} of the held-out steps of {name} are interpolated between the train "
            f"steps before and after{_span(view, steps.dim, means.first, means.last)}"
        )
        findings.copied(f"interpolated steps of {name}", means.share, "held-out steps", text)


def _add_smoothed(findings: Findings, name: str, values: Floats, steps: Steps) -> None:
    """Add what was done with the values of all steps before the split."""
    window = running_mean_window(values)
    if window is not None and (apart := steps.least_distance()) < window:
        text = (
            f"{name} is a running mean of {window} steps, and test steps lie {apart} steps from "
            "train steps, so that both hold the same values"
        )
        findings.copied(f"running mean of {name}", window, "steps", text)
    if is_centred_by_all_steps(values, steps):
        text = f"{name} was scaled with statistics of all steps, the held-out ones included"
        findings.copied(f"scaling of {name}", 1.0, "steps", text, "warning")


def _target_in(target: str, other: str, values: Floats, predictor: Floats, steps: Steps) -> str:
    """Say how a predictor holds the target; "" if it does not."""
    if held := find_target(values, predictor, steps):
        when = "means of its present and later values"
        if held.lag == 0:
            when = "its values, perhaps in other units"
        elif held.lag is not None:
            when = f"its values {held.lag} steps later"
        return f"{other} contains the target {target}: {when}"
    if steps.train.any() and is_mean_of_all_steps(values, predictor, steps):
        return f"{other} is the mean of all years of {target}, the held-out ones included"
    return ""


def _span(view: CubeView, dim: str, first: int, last: int) -> str:
    """Return the first and last step in brackets, as dates if there are some."""
    dates = dates_of(view.ds, dim)
    ends: list[Any] = [first, last]
    if dates is not None:
        ends = list(dates.values[ends])
    texts = [str(end)[:10] for end in ends]
    return f" ({dim} {' to '.join(dict.fromkeys(texts))})"
