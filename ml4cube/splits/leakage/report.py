"""leakage_report: find what was copied from train, and judge how near the test part is to it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ml4cube.core.display import Summarized, Summary, Table, shown
from ml4cube.splits.cube import Cube
from ml4cube.splits.leakage.carried_forward import check_carried
from ml4cube.splits.leakage.case import Case, CurvesByDomain
from ml4cube.splits.leakage.changed_copies import check_changed_copies
from ml4cube.splits.leakage.deployment import check_deployment, check_distances, check_same_places
from ml4cube.splits.leakage.duplicates import check_duplicates
from ml4cube.splits.leakage.findings import Findings
from ml4cube.splits.leakage.separation import check_counts, check_neighbours
from ml4cube.splits.leakage.stores import check_stores, is_store, open_cube_or_store, part_of_pair

logger = logging.getLogger(__name__)

# Of the checks, the worst first.
_STATUSES = ("leak", "warning", "unknown", "ok")


@dataclass(frozen=True, eq=False, repr=False)
class LeakageReport(Summarized):
    """The result of `leakage_report`.

    Parameters
    ----------
    leaks : bool
        Whether test cells, or what a model would need to know of them, are copied from train.
    judgement : {"leaks", "too easy", "fits", "too hard", "undecided"}
        The word that the verdict stands for.
    verdict : str
        The judgement with its reasons.
    table : DataFrame
        One row per check, by name: ``found``, ``unit``, ``limit``, ``status`` ("ok", "leak",
        "warning", "unknown", or "" for a plain count) and ``meaning``.
    findings : tuple of str
        What was copied, then other doubts.
    distances : dict of str to (str, dict of str to ndarray)
        For "space" (at the nearest time), "space at any time" and "time", the unit, and the
        distances to the nearest train cell by curve.
    shares : dict of str to float
        Fractions of the test cells that the figure shows; of all held-out cells where the name
        says so.

    Examples
    --------
    >>> import xarray as xr
    >>> from ml4cube.splits import assign_time_split
    >>> ds = xr.Dataset({"t2m": ("time", np.arange(20.0))})
    >>> report = leakage_report(assign_time_split(ds, 0.7, gap=3))
    >>> report.judgement, int(report.table.loc["train cells", "found"])
    ('undecided', 11)
    >>> figure = report.plot()
    """

    leaks: bool
    judgement: str
    verdict: str
    table: pd.DataFrame
    findings: tuple[str, ...] = ()
    distances: dict[str, tuple[str, dict[str, NDArray[np.float64]]]] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)

    def _summary(self) -> Summary:
        """Return the verdict, plain counts, and the checks, those that are not passed first."""
        columns = ["found", "unit", "limit", "status", "meaning"]
        shown_rows = self.table[columns].astype(object).where(self.table[columns].notna(), None)
        rows = [
            (str(name), *row) for name, row in zip(shown_rows.index, shown_rows.values, strict=True)
        ]
        facts = {}
        for name, number, unit, _, status, _ in rows:
            fact = number
            if unit not in name:
                fact = f"{shown(number)} {unit}"
            if not status:
                facts[name.replace(", ", " in ")] = fact
        checks = sorted((row for row in rows if row[4]), key=lambda row: _STATUSES.index(row[4]))
        sections = {"Checks": Table(["check", *columns], checks)}
        return Summary(self.verdict, {"Found": facts}, sections)

    def plot(self) -> Any:
        """Plot the fractions of test cells that are copied or near, and the distances to train.

        Returns
        -------
        matplotlib.figure.Figure
            Bars, and one panel for each domain of `distances`.
        """
        from ml4cube.plotting import leakage_figure

        return leakage_figure(self.verdict, self.leaks, self.distances, self.shares)


def leakage_report(
    ds: Cube,
    deployment: Any = None,
    *,
    var: str | list[str] | None = None,
    name: str = "split",
    missing_chunks: str = "warn",
) -> LeakageReport:
    """Find what was copied from train, and judge how near the test part is to it.

    The report makes two kinds of statement. **Copied**: test cells are bitwise equal to train
    cells, are in both parts, or have kept the value of the last train step; such a split *leaks*.
    **Nearer or farther than the deployment**, if one is given: what the distances to train do to
    the error, as the expected ratio of the promised to the true error. The split is then *too
    easy*, *fits*, is *too hard*, or *undecided*. Without a deployment the report says what the test
    part tests.

    Parameters
    ----------
    ds : Dataset, DataArray or path
        A cube with a split label (train 1, test 0, val 2, excluded 255 or NaN), of any dims, lazy
        or not. The label may lack some of the cube's dims. Or a train store of samples, with the
        test store as second argument: the report then looks for cells that samples of both cover,
        for samples that are bitwise equal, and for test samples that touch a train sample.
    deployment : Dataset, DataArray or path, optional
        The cells where the model will be used: a cube on a grid, curvilinear or not, or along
        points, with latitude and longitude, or times, or both. Cells with a value in any variable
        count; for a mask, pass ``cube.where(mask)``.
    var : str or list of str, optional
        Variables to examine, best the target. By default all with every dim of the cube, except
        masks and labels.
    name : str
        Name of the label.
    missing_chunks : {"warn", "raise", "drop"}, default "warn"
        What to do about chunks that the zarr store of a cube lacks and that read as values: warn,
        refuse them, or take their cells for gaps.

    Returns
    -------
    LeakageReport
        ``leaks``, ``judgement``, ``verdict``, ``table`` and ``plot()``.

    Raises
    ------
    InvalidValueError
        If there is no label, or it has other values; if no train or no test cell has a value; if a
        variable is unknown; if latitude and longitude are data variables instead of coordinates;
        if the deployment shares neither locations nor times with the cube.
    InvalidTypeError
        If the deployment is not a cube, the second of two stores is not a store, or `var` is not a
        name or a list of names.
    StoreError
        If nothing can be read at a path, or a store is damaged.

    Notes
    -----
    A split leaks if

    - held-out cells have duplicates in train;
    - a meridian or a time that occurs twice is both held out and in train;
    - more than 2 % of the test cells are at the location and time of a train cell;
    - the fraction of held-out cells with the value of the last train step, or of the next, exceeds
      that of train cells by 2 %.

    With a deployment, the expected error of a plain prediction is computed for a sample of test
    cells and of deployment cells: that of the mean of the five train cells that are most like them
    by the variogram in space and time. The variogram is estimated from the train cells, without
    yearly and daily cycles (De Iaco, Myers and Posa 2001, *Space-time analysis using a general
    product-sum model*, Statistics and Probability Letters 52). A test part *fits* if it promises
    0.92 to 1.09 of the error. It is *too easy* or *too hard* if it promises less or more, and the
    ratio would be below or above 1 in nine of ten draws of such a field; else the report is
    *undecided*, as it is without a variogram at the distances that occur. The deployment is
    compared with all cells that have a label and a value, because the model used will be trained on
    them; if it has held-out cells itself, it is compared with the train cells. Its cells that the
    model is trained on are left out. Of several variables, that with the ratio farthest from 1
    counts: pass the target as ``var=``.

    Distances are in kilometres on the sphere, by latitudes and longitudes of grids, rotated and
    curvilinear grids, and stations, or on the plane of a projection, by x and y in metres or
    kilometres. The distance in time is to the nearest time with any train cell. The distance in
    space is to the nearest location that is train at that time, and to the nearest that is train at
    any time. The report names what could not be compared (Milà et al. 2022, *Nearest neighbour
    distance matching*, Methods in Ecology and Evolution 13).

    Every chunk is read once to find duplicates. Variograms, distances and values carried forward
    are estimated from seeded samples, so memory is bounded. Duplicates are found by tiles, whose
    size is in the table: copies that are smaller, or are shifted by part of a tile, are not found,
    nor are values carried forward that many locations share. Cells with a gap in any of the
    variables are neither test nor train cells. A variable most of whose train fields repeat within
    train (a climatology, a constant field stored for each step) does not prove duplicates unless
    all others repeat with it. Constant fields, such as no rain anywhere, are not counted.

    Examples
    --------
    >>> import xarray as xr
    >>> from ml4cube.splits import assign_time_split
    >>> values = np.random.default_rng(0).normal(size=(60, 12, 12)).cumsum(axis=0)
    >>> ds = xr.Dataset({"t2m": (("time", "lat", "lon"), values)})
    >>> leakage_report(assign_time_split(ds, 0.7, gap=3)).leaks
    False
    """
    ds, deployment = open_cube_or_store(ds), open_cube_or_store(deployment)
    if is_store(ds):
        findings = Findings(part_of_pair(ds, deployment))
        check_stores(ds, deployment, findings)
        return _report(findings, "sample", {})
    case = Case.of(ds, deployment, var, name, missing_chunks)
    findings = Findings(case.part)
    for check in CHECKS:
        check(case, findings)
    return _report(findings, "cell", case.comparison.curves)


audit = leakage_report

# Each adds its rows and sentences, in this order, or nothing where it does not apply.
CHECKS: tuple[Callable[[Case, Findings], None], ...] = (
    check_counts,
    check_duplicates,
    check_carried,
    check_changed_copies,
    check_neighbours,
    check_distances,
    check_same_places,
    check_deployment,
)


def _report(findings: Findings, unit: str, curves_by_domain: CurvesByDomain) -> LeakageReport:
    verdict = findings.verdict(unit)
    logger.info("%s", verdict)
    judgement = findings.judgement
    return LeakageReport(
        judgement == "leaks",
        judgement,
        verdict,
        findings.table(),
        (*findings.leaks, *findings.doubts),
        curves_by_domain,
        findings.shares,
    )
