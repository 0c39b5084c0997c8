"""Checks: the rows of a leakage report, the findings, and the verdict that sums them up."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import is_time
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.core.split_plan import EXCLUDED, HELD_OUT, TEST, TRAIN, VAL
from ml4cube.splits.cube import CubeView
from ml4cube.splits.leakage.carried_forward import Carried
from ml4cube.splits.leakage.changed_copies import ChangedCopies
from ml4cube.splits.leakage.deployment import ANY_TIME
from ml4cube.splits.leakage.duplicates import Duplicates
from ml4cube.splits.leakage.expected_error import Promise
from ml4cube.splits.leakage.label_layout import Layout, Separation
from ml4cube.splits.leakage.stores import count_copies, count_near

# By domain ("space", "time"), the unit, and the distances to train by name of the curve.
CurvesByDomain = dict[str, tuple[str, dict[str, NDArray[np.float64]]]]

# Test cells scattered among train are single cells among their neighbours if more than this
# fraction of them touch a train cell.
_MAX_NEAR = 0.5
# If values were filled forward, the fraction of unchanged held-out cells exceeds that of train
# cells by more than this.
_MAX_CARRIED = 0.02
# Most test cells at the location of a train cell: those of a pole, or of a fold of the grid.
_MAX_SAME = 0.02
# Locations of a deployment are scattered among train if their median distance to it is at most so
# many times that between neighbouring train locations.
_SCATTERED = 3.0


@dataclass(frozen=True)
class Placement:
    """The position of the test part relative to train."""

    # Steps of time between train and a test part wholly on one side of it; else None.
    gap: int | None
    # Whether test cells are scattered among train cells: in many pieces, or with ragged borders.
    scattered: bool


class Checks:
    """The rows of a report's table and its findings, added check by check."""

    def __init__(self, part: str) -> None:
        self.part = part
        self.rows: dict[str, dict[str, Any]] = {}
        # What was copied from train.
        self.leaks: list[str] = []
        # What else must be known to trust the score, and that test cells are scattered among
        # train cells, which a deployment settles.
        self.warnings: list[str] = []
        self.scattered: list[str] = []
        # Nearness to train compared with that of the deployment: a word, and what it says.
        self.nearness = "undecided"
        self.promise = ""
        # What the test part tests, and a split that would fit the deployment.
        self.tested = ""
        self.advice = ""
        # What was compared for copies ("tiles of 16 lat x 16 lon cells"), for the verdict.
        self.compared = ""
        # Fractions of the held-out cells or samples, for the figure.
        self.shares: dict[str, float] = {}

    def row(
        self, name: str, value: Any, unit: str, meaning: str, limit: Any = None, status: str = ""
    ) -> None:
        """Add the row of a check; the status is "ok", "leak", "warning", "unknown" or ""."""
        row = {"found": value, "unit": unit, "limit": limit, "status": status, "meaning": meaning}
        self.rows[name] = row

    def table(self) -> pd.DataFrame:
        """Return the rows as a table."""
        return pd.DataFrame.from_dict(self.rows, orient="index").rename_axis("check")

    def count_cells(self, layout: Layout, valued: Layout, view: CubeView) -> None:
        """Count the cells of each part; `valued` is the label of cells with a value."""
        cells_per_label = valued.cells_per_label(view)
        for part, code in {"train": TRAIN, "val": VAL, "test": TEST}.items():
            meaning = f"cells labelled {part} with a value"
            self.row(f"{part} cells", valued.counts[code] * cells_per_label, "cells", meaning)
        excluded = layout.counts[EXCLUDED] * layout.cells_per_label(view)
        self.row("excluded cells", excluded, "cells", "cells labelled excluded")
        if gaps := valued.counts[EXCLUDED] * cells_per_label - excluded:
            meaning = "cells of the parts that are ignored because they have no value"
            self.row("cells without a value", gaps, "cells", meaning)
        held_out = sum(valued.counts[code] for code in HELD_OUT)
        repeated = valued.shared_cells(view)
        shared = sum(repeated.values())
        meaning = "held-out cells whose location and time are also in train, because a meridian "
        meaning += "(0 and 360) or a time occurs twice in the cube"
        status = "ok"
        if shared:
            status = "leak"
        self.row("shared cells", shared * cells_per_label, "cells", meaning, 0, status)
        self.leaks += [
            f"{percent(cells / held_out)} of the held-out cells are {where} that occurs twice in "
            "the cube and is also in train"
            for where, cells in repeated.items()
            if cells
        ]

    def duplicates(self, copies: dict[str, Duplicates], view: CubeView) -> None:
        """Judge copies in all variables together, and in each that does not repeat by nature."""
        by_variable = {name: duplicates for name, duplicates in copies.items() if name}
        judged = [duplicates for duplicates in by_variable.values() if not duplicates.repeats]
        if copies:
            judged.append(copies.get("") or next(iter(copies.values())))
        worst = max(judged, key=lambda duplicates: duplicates.cells, default=None)
        cells, status = 0, "unknown"
        if worst is not None:
            cells, status = worst.cells, "ok"
            if cells:
                status = "leak"
            self._note_copies(worst, view)
        meaning = f"held-out cells in {self.compared or 'tiles'} that are bitwise equal in train"
        self.row("duplicate cells", cells, "cells", meaning, 0, status)
        if len(by_variable) > 1:
            for name, duplicates in by_variable.items():
                self._row_of_variable(name, duplicates)

    def _note_copies(self, worst: Duplicates, view: CubeView) -> None:
        """Note which fraction of the held-out cells are copies, and that they are a leak."""
        self.compared = worst.tiles
        parts = ""
        if self.part == "test" and self.rows["val cells"]["found"]:
            parts = " (test and val)"
        fraction = worst.cells / max(worst.held_out_cells, 1)
        self.shares[f"bitwise copies of train{parts}"] = fraction
        if worst.cells:
            self.leaks.append(
                f"{percent(fraction)} of the held-out cells are bitwise copies of train cells"
                f"{_format_span(worst.span, view)}"
            )

    def _row_of_variable(self, name: str, duplicates: Duplicates) -> None:
        meaning, status_of_copies = "its copies", "leak"
        if duplicates.repeats:
            meaning, status_of_copies = "the variable also repeats within train", "warning"
        status = "ok"
        if duplicates.cells:
            status = status_of_copies
        self.row(f"duplicate cells of {name}", duplicates.cells, "cells", meaning, 0, status)

    def carried(self, by_variable: dict[str, Carried]) -> None:
        """Judge filled values: test cells that stay unchanged more often than train cells."""
        if not by_variable:
            return
        worst = max(by_variable.values(), key=lambda carried: carried.held_out - carried.train)
        leaks = worst.held_out - worst.train > _MAX_CARRIED
        meaning = "cells with the value of the last train step, or of the next, at their location; "
        meaning += "the limit depends on the fraction of such train cells"
        unit, status = "fraction of held-out cells", "leak" if leaks else "ok"
        limit = worst.train + _MAX_CARRIED
        self.row("cells carried forward", worst.held_out, unit, meaning, limit, status)
        if leaks:
            self.leaks.append(
                f"{percent(worst.held_out)} of the held-out cells have the value of the adjacent "
                f"train step at their location, compared with {percent(worst.train)} of the train "
                "cells"
            )

    def changed_copies(self, kinds: list[ChangedCopies]) -> None:
        """Add what holds train values, or the target, in another form."""
        for copies in kinds:
            unit = f"fraction of {copies.of}"
            self.row(copies.name, copies.share, unit, copies.text, 0, copies.status)
            sentences = self.leaks if copies.status == "leak" else self.warnings
            sentences.append(copies.text)

    def neighbours(
        self,
        separation: Separation,
        placement: Placement,
        time_dim: str | None,
        cut: list[str],
        made_by: str | None,
    ) -> None:
        """Describe how near the test cells are to train cells along the dims that are cut."""
        fraction = separation.touching
        self.shares["touch a train cell"] = fraction
        warns = fraction > _MAX_NEAR and placement.scattered
        if warns:
            self.scattered.append(
                f"{percent(fraction)} of the {self.part} cells touch a train cell and lie "
                "scattered among train cells, as if dealt at random, so the score holds for gaps "
                "between train cells only"
            )
        status = "unknown" if math.isnan(fraction) else "warning" if warns else "ok"
        unit, meaning = f"fraction of {self.part} cells", "cells next to a train cell"
        self.row("touching cells", fraction, unit, meaning, _MAX_NEAR, status)
        if placement.gap is not None:
            meaning = f"steps between train and {self.part}, which is wholly on one side of it"
            self.row(f"gap along {time_dim}", placement.gap, "steps", meaning)
        for dim in cut:
            meaning = f"median length of runs of {self.part} cells"
            self.row(f"block along {dim}", separation.run_length[dim], "cells", meaning)
            meaning = f"median distance from {self.part} cells to the nearest train cell, estimated"
            self.row(f"separation along {dim}", separation.cells_to_train[dim], "cells", meaning)
        meaning = f"separate pieces of the {self.part} part, weighted by size"
        self.row("pieces", separation.pieces, "", meaning)
        if made_by is not None:
            self.row("made by", made_by, "", "the function in the label's recipe, which it is")
        apart = [
            f"{_round(separation.cells_to_train[dim])} cells along {dim}"
            for dim in cut
            if not math.isnan(separation.cells_to_train[dim])
        ]
        if apart:
            self.tested = f"its {self.part} cells lie {listed_and(apart)} from train (medians)"

    def distances(self, by_domain: CurvesByDomain, all_measured: bool) -> None:
        """Add the median distances to train.

        Unless all that the label cuts is measured, the verdict has the cells along dims instead.
        """
        nearest = {
            "space": "location, at the nearest time",
            "time": "time, at any location",
            ANY_TIME: "location, at any time",
        }
        for domain, (unit, curves) in by_domain.items():
            for name, values in curves.items():
                meaning = f"median distance to the nearest train {nearest[domain]}, estimated"
                self.row(f"{name}, {domain}", float(np.median(values)), unit, meaning)
        units = {domain: unit for domain, (unit, _) in by_domain.items()}
        text = describe(_of_test(by_domain), units)
        if text and all_measured:
            self.tested = f"its {self.part} part tests {text}"

    def same_places(self, by_domain: CurvesByDomain, others: list[str]) -> None:
        """Judge test cells at the location of a train cell, as at poles and folds of a grid.

        The label is cut along `others` beside the domains.
        """
        of_test = _of_test(by_domain)
        if len({values.size for values in of_test.values()}) != 1 or "space" not in of_test:
            return  # not measured, or not of the same cells
        fraction = float(np.logical_and.reduce([values == 0 for values in of_test.values()]).mean())
        unit, meaning = f"fraction of {self.part} cells", "at the location and time of a train cell"
        if others:  # such as members: other values, of the same dates
            meaning += f" of another {' or '.join(others)}"
        status = "ok"
        if fraction and not self.rows["shared cells"]["found"]:
            status = "warning"
            if fraction > _MAX_SAME and not others:
                status = "leak"
            text = f"{percent(fraction)} of the {self.part} cells are {meaning}"
            (self.leaks if status == "leak" else self.warnings).append(text)
        self.row("cells at train locations", fraction, unit, meaning, _MAX_SAME, status)

    def deployment(
        self,
        by_domain: CurvesByDomain,
        spacing: float,
        cells: int,
        unknown: dict[str, str],
        promise: Promise,
    ) -> None:
        """Judge what the distances to train promise of the error in the deployment.

        `spacing` is that of train locations, and `unknown` says why a domain was not compared.
        """
        self.row("deployment cells", cells, "cells", "cells of the deployment with a value")
        for domain, why in unknown.items():
            self.warnings.append(f"distances in {domain} were not compared because {why}")
            name = f"{self.part} against deployment, {domain}"
            self.row(name, math.nan, "ratio", f"not compared because {why}", None, "unknown")
        self.nearness = promise.judgement
        of_deployment = {
            domain: curves["deployment → train"]
            for domain, (_, curves) in by_domain.items()
            if "deployment → train" in curves
        }
        units = {domain: unit for domain, (unit, _) in by_domain.items()}
        asks = describe(of_deployment, units)
        self.promise = self._text_of(promise, asks)
        if self.nearness in ("too easy", "too hard"):
            self.advice = f"Try {fitting_split(of_deployment, spacing)}."
        status = {"fits": "ok", "undecided": "unknown"}.get(self.nearness, "warning")
        meaning = "expected error of the test part by that in the deployment, from the variogram"
        if promise.variable:
            meaning += f" of {promise.variable}"
        limit = None
        if not promise.unknown:
            limit = f"{promise.low:.2g} to {promise.high:.2g}"
        self.row("promised error", promise.ratio, "ratio", meaning, limit, status)
        for domain, length in promise.ranges.items():
            meaning = "distance up to which train cells are alike"
            if math.isinf(length):
                meaning = "no sill: values differ more and more over all distances examined"
            self.row(f"range in {domain}", length, units[domain], meaning)

    def _text_of(self, promise: Promise, asks: str) -> str:
        """Say what is promised of the error in a deployment that asks for such distances."""
        contrast = ""
        if asks and self.tested:
            contrast = f"{self.tested}, and the deployment asks for {asks}"
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

    def stores(self, train: xr.Dataset, held_out: xr.Dataset) -> None:
        """Judge two sample stores."""
        part, samples = self.part, held_out.sizes[SAMPLE_DIM]
        shared, near = count_near(train, held_out) or (None, None)
        copies = count_copies(train, held_out)
        self.compared = "" if copies is None else "samples"
        self.tested = f"the {part} samples are looked for in the train store"
        self.row("train samples", train.sizes[SAMPLE_DIM], "samples", "samples of the train store")
        self.row(f"{part} samples", samples, "samples", f"samples of the {part} store")
        checks = [
            ("shared cells", shared, "cover a cell that a train sample covers", "leak"),
            ("duplicate samples", copies, "are bitwise copies of train samples", "leak"),
            ("touching samples", near, "touch a train sample or share a cell with it", "warning"),
        ]
        for name, number, text, status in checks:
            meaning = f"{part} samples that {text}"
            if number is None:
                self.row(name, math.nan, "samples", meaning, 0, "unknown")
                continue
            self.row(name, number, "samples", meaning, 0, status if number else "ok")
            self.shares[text] = number / samples
            if number and (status == "leak" or not self.leaks):
                findings = self.leaks if status == "leak" else self.warnings
                findings.append(f"{percent(self.shares[text])} of the {part} samples {text}")
        if near is None:
            self.warnings.append(
                "the positions of the samples were not compared because the stores were not cut "
                "alike from one cube"
            )

    @property
    def judgement(self) -> str:
        """Return "leaks" if something is copied, else the word on nearness."""
        if self.leaks:
            return "leaks"
        return self.nearness

    @property
    def doubts(self) -> list[str]:
        """What else must be known to trust the score."""
        return self.warnings + (self.scattered if self.nearness == "undecided" else [])

    def verdict(self, unit: str) -> str:
        """Return the judgement with its reasons; `unit` is "cell" or "sample"."""
        notes = list(self.doubts)
        word = self.judgement
        if word == "leaks":
            text = f"This split leaks, so its {self.part} score will be too optimistic: "
            text += "; ".join(self.leaks)
            if self.promise:
                notes.insert(0, f"without what is copied, {self.promise}")
        elif self.promise:
            words = {
                "too easy": "is too easy for the deployment",
                "fits": "fits the deployment",
                "too hard": "is too hard for the deployment",
                "undecided": "is undecided",
            }
            text = f"This split {words[word]}: {self.promise}"
        else:
            copies = "nothing could be compared for copies"
            if self.compared:
                copies = f"no {self.compared} are copies of those in train"
            tested = self.tested or f"how far {self.part} {unit}s are from train is not known"
            text = f"This split is undecided, because no deployment is given: {tested}; {copies}"
        note = ""
        if notes:
            note = f" Note that {'; '.join(notes)}."
        return f"{text}.{note} {self.advice}".rstrip()


def describe(distances: dict[str, NDArray[np.float64]], units: dict[str, str]) -> str:
    """Return where cells lie relative to train, by their distances in each domain."""
    space, time = distances.get(ANY_TIME, distances.get("space")), distances.get("time")
    what = []
    if space is not None:
        what.append("new places" if np.median(space) > 0 else "places of train")
    if time is not None:
        what.append("new times" if np.median(time) > 0 else "times of train")
    apart = [
        f"{_span(values)} {units[domain]} from train in {domain}"
        for domain, values in distances.items()
        if domain != ANY_TIME or _span(values) != _span(distances["space"])
    ]
    if what:
        return f"{' at '.join(what)} ({', '.join(apart)})"
    return ""


def _span(values: NDArray[np.float64]) -> str:
    """Return the distances between which eight in ten lie."""
    low, high = (_round(float(number)) for number in np.quantile(values, [0.1, 0.9]))
    if low == high:
        return low
    return f"{low} to {high}"


def fitting_split(distances: dict[str, NDArray[np.float64]], spacing: float) -> str:
    """Return the split whose test part is about as far from train as a deployment is."""
    space, time = distances.get(ANY_TIME, distances.get("space")), distances.get("time")
    far = 0.0
    if space is not None:
        far = float(np.median(space))
    later = 0.0
    if time is not None:
        later = float(np.median(time))
    if far > 0 and later > 0:
        return "LeaveLocationTimeOut, which leaves out places and times together"
    if later > 0:
        return "assign_time_split with a gap as long as that before the deployment"
    if far > _SCATTERED * spacing:
        return "assign_region_split with regions as large as the deployment"
    if far > 0:
        return "assign_location_split, which leaves out whole places"
    return "assign_rand_split, which leaves out single cells, or places and times apart"


def _of_test(by_domain: CurvesByDomain) -> dict[str, NDArray[np.float64]]:
    """Return the distances of the test part, whose curves are the first."""
    return {domain: next(iter(curves.values())) for domain, (_, curves) in by_domain.items()}


def percent(share: float) -> str:
    """Write a fraction in percent, with two digits below 10 %."""
    if share >= 0.1:
        return f"{100 * share:.0f} %"
    return f"{100 * share:.2g} %"


def _format_span(span: tuple[str, int, int] | None, view: CubeView) -> str:
    """Return the first and last position of duplicates along a dim, in brackets."""
    if span is None:
        return ""
    dim, *positions = span
    coord = view.ds[dim]  # without a coordinate, the positions
    ends = [str(coord.values[i]) for i in positions]
    if is_time(coord):
        ends = [end[:10] for end in ends]  # the day
    return f" ({dim} {' to '.join(dict.fromkeys(ends))})"


def _round(number: float) -> str:
    """Round to three digits, without powers of ten for thousands of kilometres."""
    return f"{float(f'{number:.3g}'):,.7g}"


def listed_and(texts: list[str]) -> str:
    """Join texts with commas and "and"."""
    return " and ".join(filter(None, [", ".join(texts[:-1]), texts[-1]]))
