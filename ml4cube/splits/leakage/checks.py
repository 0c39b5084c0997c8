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
from ml4cube.core.sample_spec import SAMPLE_DIM
from ml4cube.core.split_plan import EXCLUDED, HELD_OUT, TEST, TRAIN, VAL
from ml4cube.splits.cube import CubeView
from ml4cube.splits.leakage.carried_forward import Carried
from ml4cube.splits.leakage.changed_copies import ChangedCopies
from ml4cube.splits.leakage.duplicates import Duplicates
from ml4cube.splits.leakage.label_layout import Layout, Separation
from ml4cube.splits.leakage.stores import count_copies, count_near

# For "space" and "time", the unit, and the distances to train by name of the curve.
CurvesByDomain = dict[str, tuple[str, dict[str, NDArray[np.float64]]]]

# A split leaks when more than this fraction of its test cells touch train, or are within the range.
_MAX_NEAR = 0.5
# A region of some size has a smaller fraction of its cells at its border. A thinner one passes only
# if the user named it.
_NEARLY_ALL = 0.95
# If values were filled forward, the fraction of unchanged held-out cells exceeds that of train
# cells by more than this.
_MAX_CARRIED = 0.02
# Most test cells at the location of a train cell: those of a pole, or of a fold of the grid.
_MAX_SAME = 0.02
# A test part that is so many times nearer to train than the deployment, or farther, is another
# task. In synthetic fields, blocks beyond this factor promise 1.2 to 1.8 times the true error, and
# random cells are within a tenth of 1 in 20 of 20 draws.
_MAX_FACTOR = 1.25


@dataclass(frozen=True)
class Placement:
    """The position of the test part relative to train."""

    # Steps of time between train and a test part wholly on one side of it; else None.
    gap: int | None
    # Whether the test part is wholly on one side of train along some dim.
    one_sided: bool
    # Whether test cells are scattered among train cells: in many pieces, or with ragged borders.
    scattered: bool
    # Whether they are so in more than the borders of regions that stay the same over time.
    scattered_in_time: bool
    # Whether the test part is on one side of train or a region that the user named.
    deliberate: bool


class Checks:
    """The rows of a report's table and its findings, added check by check."""

    def __init__(self, part: str, deployment_decides: bool = False) -> None:
        self.part = part
        # If so, the checks of neighbours and range add rows, but no findings.
        self.deployment_decides = deployment_decides
        self.rows: dict[str, dict[str, Any]] = {}
        self.leaks: list[str] = []
        self.too_hard: list[str] = []
        self.fits: list[str] = []
        self.warnings: list[str] = []
        # What was compared for copies ("tiles of 16 lat x 16 lon cells"), for the verdict.
        self.compared = ""
        # Fractions of the held-out cells or samples, for the figure.
        self.shares: dict[str, float] = {}

    def row(
        self, name: str, found: Any, unit: str, meaning: str, limit: Any = None, status: str = ""
    ) -> None:
        """Add the row of a check; the status is "ok", "leak", "warning", "unknown" or ""."""
        row = {"found": found, "unit": unit, "limit": limit, "status": status, "meaning": meaning}
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
        status = "leak" if shared else "ok"
        self.row("shared cells", shared * cells_per_label, "cells", meaning, 0, status)
        self.leaks += [
            f"{percent(cells / held_out)} of the held-out cells are {where} that occurs twice in "
            "the cube and is also in train"
            for where, cells in repeated.items()
            if cells
        ]

    def duplicates(self, copies: dict[str, Duplicates], view: CubeView) -> None:
        """Judge copies in all variables together, and in each that does not repeat by nature."""
        by_variable = {name: found for name, found in copies.items() if name}
        judged = [found for found in by_variable.values() if not found.repeats]
        if copies:
            judged.append(copies.get("") or next(iter(copies.values())))
        worst = max(judged, key=lambda found: found.cells, default=None)
        cells, status = 0, "unknown"
        if worst is not None:
            cells, status = worst.cells, "leak" if worst.cells else "ok"
            self.compared = worst.tiles
            parts = (
                " (test and val)" if self.part == "test" and self.rows["val cells"]["found"] else ""
            )
            fraction = cells / max(worst.held_out_cells, 1)
            self.shares[f"bitwise copies of train{parts}"] = fraction
            if cells:
                self.leaks.append(
                    f"{percent(fraction)} of the held-out cells are bitwise copies of train cells"
                    f"{_format_span(worst.span, view)}"
                )
        meaning = f"held-out cells in {self.compared or 'tiles'} that are bitwise equal in train"
        self.row("duplicate cells", cells, "cells", meaning, 0, status)
        for name, found in by_variable.items() if len(by_variable) > 1 else ():
            meaning = "the variable also repeats within train" if found.repeats else "its copies"
            status = "ok" if not found.cells else "warning" if found.repeats else "leak"
            self.row(f"duplicate cells of {name}", found.cells, "cells", meaning, 0, status)

    def carried(self, found: dict[str, Carried]) -> None:
        """Judge filled values: test cells that stay unchanged more often than train cells."""
        if not found:
            return
        worst = max(found.values(), key=lambda carried: carried.held_out - carried.train)
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

    def changed_copies(self, found: list[ChangedCopies]) -> None:
        """Add what holds train values, or the target, in another form."""
        for copies in found:
            unit = f"fraction of {copies.of}"
            self.row(copies.name, copies.share, unit, copies.text, 0, copies.status)
            sentences = self.leaks if copies.status == "leak" else self.warnings
            sentences.append(copies.text)

    def neighbours(
        self,
        separation: Separation,
        placement: Placement,
        time_dim: str | None,
        made_by: str | None,
    ) -> None:
        """Judge test cells that touch train cells."""
        if made_by == "assign_rand_split" and not self.deployment_decides:
            self.leaks.append("single cells were assigned at random, next to train cells")
        fraction = separation.touching
        self.shares["touch a train cell"] = fraction
        leaks = (fraction > _MAX_NEAR and placement.scattered) or (
            fraction > _NEARLY_ALL and not placement.deliberate
        )
        text = f"{percent(fraction)} of the {self.part} cells touch a train cell"
        status = self._grade(leaks, fraction > 0.02, text)
        status = "unknown" if math.isnan(fraction) else status
        unit, meaning = f"fraction of {self.part} cells", "cells next to a train cell"
        self.row("touching cells", fraction, unit, meaning, _MAX_NEAR, status)
        if placement.gap is not None:
            meaning = f"steps between train and {self.part}, which is wholly on one side of it"
            self.row(f"gap along {time_dim}", placement.gap, "steps", meaning, None, "ok")

    def _grade(self, leaks: bool, warns: bool, text: str) -> str:
        """Add a finding, unless a deployment decides; return its status."""
        if self.deployment_decides:
            return ""
        if leaks or warns:
            (self.leaks if leaks else self.warnings).append(text)
        return "leak" if leaks else "warning" if warns else "ok"

    def ranges(
        self, ranges: dict[str, float], separation: Separation, cut: list[str], placement: Placement
    ) -> None:
        """Judge test cells within the range of autocorrelation of train cells.

        `ranges` are in cells, inf without a sill; `cut` are the ordered dims that the label cuts.
        """
        for dim in cut:
            cells, length = ranges.get(dim, math.nan), separation.run_length[dim]
            meaning = "distance up to which values are alike"
            if math.isinf(cells):
                meaning = "no sill: values differ more and more over all distances examined"
            self.row(f"range along {dim}", cells, "cells", meaning)
            fine = length >= cells or placement.one_sided or self.deployment_decides
            status = "ok" if fine else "warning"
            if not math.isfinite(cells) or math.isnan(length):
                status = "unknown"
            meaning = f"median length of runs of {self.part} cells, to compare with the range"
            self.row(f"block along {dim}", length, "cells", meaning, cells, status)
            meaning = (
                f"median distance from {self.part} cells to their nearest train cell, estimated"
            )
            self.row(f"separation along {dim}", separation.cells_to_train[dim], "cells", meaning)
        meaning = f"separate pieces of the {self.part} part, weighted by size"
        self.row("pieces", separation.pieces, "", meaning)
        cut_ranges = {dim: cells for dim, cells in ranges.items() if dim in cut}
        name, unit = "cells within the range", f"fraction of {self.part} cells"
        if not cut_ranges:
            meaning = "no range is known along the dims that are cut"
            self.row(name, math.nan, unit, meaning, _MAX_NEAR, "unknown")
            return
        self.shares["within the range of a train cell"] = separation.within_range
        text = (
            f"{percent(separation.within_range)} of the {self.part} cells are within the range of "
            f"autocorrelation of a train cell ({_format_ranges(cut_ranges)})"
        )
        status = self._grade(
            separation.within_range > _MAX_NEAR and placement.scattered_in_time,
            separation.within_range > 0.1,
            text,
        )
        without_sill = [dim for dim, cells in cut_ranges.items() if math.isinf(cells)]
        if (
            placement.scattered_in_time
            and not self.deployment_decides
            and not separation.touching
            and without_sill
        ):
            self.warnings.append(
                f"no buffer along {', '.join(without_sill)} can be shown to be wide enough, "
                "because the variogram has no sill there"
            )
        meaning = "cells nearer to train than the range of autocorrelation"
        self.row(name, separation.within_range, unit, meaning, _MAX_NEAR, status)

    def distances(self, by_domain: CurvesByDomain, others: list[str]) -> None:
        """Add the median distances to train; `others` are dims that the label cuts beside these."""
        nearest = {"space": "location, at the nearest time", "time": "time, at any location"}
        for domain, (unit, curves) in by_domain.items():
            for name, values in curves.items():
                meaning = f"median distance to the nearest train {nearest[domain]}, estimated"
                self.row(f"{name}, {domain}", float(np.median(values)), unit, meaning)
        of_test = {domain: next(iter(curves.values())) for domain, (_, curves) in by_domain.items()}
        self._same_places(of_test, others)

    def _same_places(self, found: dict[str, NDArray[np.float64]], others: list[str]) -> None:
        """Judge test cells at the location of a train cell, as at poles and folds of a grid."""
        if len({values.size for values in found.values()}) != 1 or "space" not in found:
            return  # not measured, or not of the same cells
        fraction = float(np.logical_and.reduce([values == 0 for values in found.values()]).mean())
        unit, meaning = f"fraction of {self.part} cells", "at the location and time of a train cell"
        if others:  # such as members: other values, of the same dates
            meaning += f" of another {' or '.join(others)}"
        status = "ok"
        if fraction and not self.rows["shared cells"]["found"]:
            status = "leak" if fraction > _MAX_SAME and not others else "warning"
            text = f"{percent(fraction)} of the {self.part} cells are {meaning}"
            (self.leaks if status == "leak" else self.warnings).append(text)
        self.row("cells at train locations", fraction, unit, meaning, _MAX_SAME, status)

    def deployment(
        self,
        by_domain: CurvesByDomain,
        spacing: dict[str, float],
        cells: int,
        unknown: dict[str, str],
    ) -> None:
        """Compare the distances of the test part and of the deployment to train.

        `spacing` is that of train by domain, and `unknown` says why a domain was not compared.
        """
        self.row("deployment cells", cells, "cells", "cells of the deployment with a value")
        for domain, why in unknown.items():
            self.warnings.append(f"distances in {domain} were not compared because {why}")
            name = f"{self.part} against deployment, {domain}"
            self.row(name, math.nan, "ratio", f"not compared because {why}", None, "unknown")
        for domain, (unit, curves) in by_domain.items():
            if domain in unknown:
                continue
            of_test, of_deployment = curves.values()
            test_mean, deployment_mean = float(np.mean(of_test)), float(np.mean(of_deployment))
            # Distances below the spacing of train cells are inside the train part.
            floor = max(spacing[domain], 1e-9)
            factor = max(test_mean, floor) / max(deployment_mean, floor)
            # A few test cells give only an uncertain mean.
            limit = _MAX_FACTOR + float(np.std(of_test)) / max(test_mean, floor) / of_test.size**0.5
            text = (
                f"in {domain}, the mean distance to train is {_round(test_mean)} {unit} for the "
                f"{self.part} part and {_round(deployment_mean)} {unit} for the deployment, a "
                f"factor of {_round(factor)}"
            )
            if floor > min(test_mean, deployment_mean) and factor != 1:
                # Without this note, the numbers would seem to contradict one another.
                text += (
                    f" (distances below the spacing of train cells count as {_round(floor)} {unit})"
                )
            status = "ok"
            if factor * limit < 1:
                status = "leak"
                self.leaks.append(f"it is too easy for the deployment, because {text}")
            elif factor > limit:
                status = "warning"
                self.too_hard.append(text)
            else:
                self.fits.append(text)
            meaning = "ratio of mean distances to train: too easy far below 1, too hard far above 1"
            self.row(
                f"{self.part} against deployment, {domain}", factor, "ratio", meaning, limit, status
            )

    def stores(self, train: xr.Dataset, held_out: xr.Dataset) -> None:
        """Judge two sample stores."""
        part, samples = self.part, held_out.sizes[SAMPLE_DIM]
        shared, near = count_near(train, held_out) or (None, None)
        copies = count_copies(train, held_out)
        self.compared = "" if copies is None else "samples"
        self.row("train samples", train.sizes[SAMPLE_DIM], "samples", "samples of the train store")
        self.row(f"{part} samples", samples, "samples", f"samples of the {part} store")
        checks = [
            ("shared cells", shared, "cover a cell that a train sample covers", "leak"),
            ("duplicate samples", copies, "are bitwise copies of train samples", "leak"),
            ("touching samples", near, "touch a train sample or share a cell with it", "warning"),
        ]
        for name, found, text, status in checks:
            meaning = f"{part} samples that {text}"
            if found is None:
                self.row(name, math.nan, "samples", meaning, 0, "unknown")
                continue
            self.row(name, found, "samples", meaning, 0, status if found else "ok")
            self.shares[text] = found / samples
            if found and (status == "leak" or not self.leaks):
                findings = self.leaks if status == "leak" else self.warnings
                findings.append(f"{percent(self.shares[text])} of the {part} samples {text}")
        if near is None:
            self.warnings.append(
                "the positions of the samples were not compared because the stores were not cut "
                "alike from one cube"
            )

    def verdict(self, unit: str) -> str:
        """Return one sentence on the findings; `unit` is "cell" or "sample"."""
        # With a deployment, the verdict also names what was not compared.
        minor = self.warnings if "deployment cells" in self.rows else []
        if self.leaks:
            minor = [*self.too_hard, *minor]
        note = f" Note also that {'; '.join(minor)}." if minor else ""
        score = f"so its {self.part} score will be too"
        for judgement, findings in (
            (f"leaks, {score} optimistic", self.leaks),
            (f"is too hard for the deployment, {score} pessimistic", self.too_hard),
            ("fits the deployment", self.fits),
        ):
            if findings:
                return f"This split {judgement}: {'; '.join(findings)}.{note}"
        if self.warnings:
            return f"No leak was found, but note that {'; '.join(self.warnings)}."
        copies = "nothing could be compared for copies"
        if self.compared:
            copies = f"no {self.compared} are copies of those in train"
        return (
            f"No leak was found: no {self.part} {unit} is too near to a train {unit}, and {copies}."
        )


def percent(share: float) -> str:
    """Write a fraction in percent, with two digits below 10 %."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


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


def _format_ranges(ranges: dict[str, float]) -> str:
    return ", ".join(
        f"{dim}: {cells:.3g} cells" if math.isfinite(cells) else f"{dim}: no sill"
        for dim, cells in ranges.items()
    )
