"""leakage_report: find what was copied from train, and judge how near the test part is to it."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.display import Summarized, Summary, Table, shown
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_numpy
from ml4cube.core.split_plan import EXCLUDED, PARTS, TRAIN
from ml4cube.cube.absent_chunks import heed_absent_chunks
from ml4cube.cube.coordinates import is_category
from ml4cube.cube.masks_and_labels import RECIPE_ATTR
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.variables import check_left_out, data_variables
from ml4cube.splits.cube import CubeView
from ml4cube.splits.label import read_recipe
from ml4cube.splits.leakage.carried_forward import find_carried
from ml4cube.splits.leakage.changed_copies import find_changed_copies
from ml4cube.splits.leakage.checks import Checks, CurvesByDomain, Placement
from ml4cube.splits.leakage.deployment import (
    ANY_TIME,
    Axes,
    Cells,
    compare_axes,
    distances,
    spacing,
    stations_near_train,
)
from ml4cube.splits.leakage.duplicates import find_duplicates
from ml4cube.splits.leakage.expected_error import Neighbourhoods, Promise, expected_promise
from ml4cube.splits.leakage.label_layout import Layout, Separation, separate
from ml4cube.splits.leakage.stores import is_store, part_of_pair
from ml4cube.splits.validity import has_value

logger = logging.getLogger(__name__)

Cube = xr.Dataset | xr.DataArray

# Fewer effective pieces than this are regions; this many or more are scattered among train.
_SCATTERED_PIECES = 3.5
# A label with at least this many runs along each dim is ragged: it does not consist of a few
# regions, even if it is connected, as half of all cells are when assigned one by one.
_RAGGED_RUNS = 5
# Of the checks, the worst first.
_STATUSES = ("leak", "warning", "unknown", "ok")
# Most cells of a label that is kept in memory once cells without a value are excluded.
_LABELS_AT_MOST = 1 << 26


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
    >>> from ml4cube.splits import assign_time_split
    >>> values = np.random.default_rng(0).normal(size=(60, 12, 12)).cumsum(axis=0)
    >>> ds = xr.Dataset({"t2m": (("time", "lat", "lon"), values)})
    >>> leakage_report(assign_time_split(ds, 0.7, gap=3)).leaks
    False
    """
    ds, deployment = _open(ds), _open(deployment)
    if is_store(ds):
        checks = Checks(part_of_pair(ds, deployment))
        checks.stores(ds, deployment)
        return _report(checks, "sample", {})
    view = CubeView.of(ds)
    label, names = _label(view, name), _variables(view, var)
    view = replace(view, ds=heed_absent_chunks(view.ds, [name, *names], missing_chunks).cube)
    axes = Axes.of(view)
    layout = Layout.of(label, tuple(axes.sizes))
    part = _part_to_judge(layout, name)
    deployed = None
    if deployment is not None:
        deployed = Cells.of_deployment(deployment, axes)
    valid = _valid_cells(view, names)
    valued = layout
    if valid is not None:
        valued = Layout.of(_exclude(layout.label, ~valid), tuple(axes.sizes))
    _check_values(valued, part, names)
    labelled = None
    if deployed is not None:
        labelled = _all_labelled(layout, valid, axes)
    comparison = _Comparison.of(part, axes, valued, labelled, deployed)
    cut = _CutDims.of(view, layout, axes)

    checks = Checks(part)
    checks.count_cells(layout, valued, view)
    checks.duplicates(find_duplicates(view, label, names), view)
    if axes.time_dim is not None:
        checks.carried(find_carried(view, layout, names, axes.time_dim))
    named = var is not None
    checks.changed_copies(find_changed_copies(view, layout, names, axes.time_dim, named))
    separation = separate(layout, valued, view, cut.unordered, PARTS[part])
    if axes.station_dim in cut.dims:
        near = stations_near_train(comparison.test, comparison.train)
        separation = replace(separation, touching=max(separation.touching, near))
    placement = _placement(layout, separation, view, axes, part, cut)
    checks.neighbours(separation, placement, axes.time_dim, cut.ordered, _made_by(label))
    all_measured = all(cut.domains.get(dim) in comparison.curves for dim in cut.ordered)
    others = [dim for dim in cut.dims if dim not in cut.domains]
    cut_domains = {cut.domains[dim] for dim in cut.dims if dim in cut.domains}
    checks.distances(comparison.curves, all_measured)
    if cut_domains <= comparison.curves.keys():
        checks.same_places(comparison.curves, others)
    if deployed is not None:
        promise = comparison.promise([view.ds[name] for name in names], cut)
        checks.deployment(
            comparison.curves,
            spacing(comparison.train, comparison.measured),
            deployed.layout.counts[TRAIN],
            comparison.unknown,
            promise,
        )
    return _report(checks, "cell", comparison.curves)


audit = leakage_report


def _report(checks: Checks, unit: str, curves_by_domain: CurvesByDomain) -> LeakageReport:
    verdict = checks.verdict(unit)
    logger.info("%s", verdict)
    findings = (*checks.leaks, *checks.doubts)
    judgement = checks.judgement
    leaks = judgement == "leaks"
    table = checks.table()
    return LeakageReport(
        leaks, judgement, verdict, table, findings, curves_by_domain, checks.shares
    )


@dataclass(frozen=True, eq=False)
class _CutDims:
    """The dims along which a label changes."""

    dims: list[str]
    # Those of them whose neighbours are alike, and all dims of the cube whose are not.
    ordered: list[str]
    unordered: set[str]
    # "space" or "time" by dim.
    domains: dict[str, str]

    @classmethod
    def of(cls, view: CubeView, layout: Layout, axes: Axes) -> _CutDims:
        """Find them."""
        dims = [dim for dim, starts in layout.run_starts.items() if starts.size > 1]
        unordered = {dim for dim in view.dims if is_category(dim, view.dim_coord(dim))}
        if axes.station_dim is not None:
            unordered.add(axes.station_dim)
        domains = dict.fromkeys(axes.sizes, "space")
        if axes.time_dim is not None:
            unordered.discard(axes.time_dim)
            domains[axes.time_dim] = "time"
        return cls(dims, [dim for dim in dims if dim not in unordered], unordered, domains)


@dataclass(frozen=True, eq=False)
class _Comparison:
    """Distances of the test part, and of a deployment, to train."""

    train: Cells
    test: Cells
    # Train cells around the deployment.
    around: Neighbourhoods | None
    measured: set[str]
    # Why a domain or a dim was not compared.
    unknown: dict[str, str]
    curves: CurvesByDomain

    @classmethod
    def of(
        cls, part: str, axes: Axes, valued: Layout, labelled: Layout | None, deployed: Cells | None
    ) -> _Comparison:
        """Measure distances; `labelled` has all cells with a value as train."""
        measured, unknown = compare_axes(axes, None if deployed is None else deployed.axes)
        train, test = Cells(axes, valued, TRAIN), Cells(axes, valued, PARTS[part])
        by_curve = {f"{part} → train": distances(test, train, measured)}
        around = None
        if deployed is not None and labelled is not None:
            everything = Cells(axes, labelled, TRAIN)
            trained, around = _training_cells(deployed, train, everything, measured)
            by_curve["deployment → train"] = distances(deployed, trained, measured)
            common = set.intersection(*(set(by_domain) for by_domain in by_curve.values()))
            for domain in measured - common:
                unknown[domain] = "latitudes or longitudes are missing where these cells are"
            if not common:
                reasons = "; ".join(dict.fromkeys(unknown.values()))
                raise InvalidValueError(
                    f"the deployment cannot be compared with the cube: {reasons}"
                )
        curves: CurvesByDomain = {}
        for domain, unit in {"space": "km", "time": axes.time_unit, ANY_TIME: "km"}.items():
            of_domain = {name: by[domain] for name, by in by_curve.items() if domain in by}
            if of_domain:
                curves[domain] = (unit, of_domain)
        return cls(train, test, around, measured, unknown, curves)

    def promise(self, variables: list[xr.DataArray], cut: _CutDims) -> Promise:
        """Return what the test part promises of the error in the deployment."""
        for dim in cut.ordered:
            if dim not in cut.domains:
                self.unknown[dim] = "it is neither a dim of space nor of time"
        not_compared = [dim for dim in cut.dims if cut.domains.get(dim, dim) in self.unknown]
        if not_compared:
            return Promise.without(f"the split is cut along {', '.join(not_compared)}")
        of_test = Neighbourhoods.of(self.test, self.train, self.measured)
        return expected_promise(variables, self.train, of_test, self.around, self.measured)


def _made_by(label: xr.DataArray) -> str | None:
    """Return the function in a label's recipe, for the table only."""
    recipe = label.attrs.get(RECIPE_ATTR)
    if recipe is None:
        return None
    return read_recipe(recipe)[1]


def _open(path_or_cube: Any) -> Any:
    """Open a path or URL; return anything else as it is."""
    if not isinstance(path_or_cube, str | os.PathLike):
        return path_or_cube
    cube = as_dataset(path_or_cube)
    if "ml4cube_format" not in cube.attrs:
        return cube
    # Every sample will be read, so a damaged file is refused now.
    from ml4cube.store.format import open_store

    return open_store(path_or_cube, verify=True)


def _label(view: CubeView, name: str) -> xr.DataArray:
    """Return the label as numbers; refuse another dtype, or dims that the cube lacks."""
    if name not in view.ds:
        raise InvalidValueError(
            f"the cube has no label {name!r}, only {list(view.ds.data_vars)}; call "
            "assign_block_split first, or pass the name of the label"
        )
    label = view.ds[name]
    if unknown := [dim for dim in label.dims if dim not in view.dims]:
        raise InvalidValueError(
            f"the label {name!r} has dims {unknown}, but the cube has {view.dims}"
        )
    if label.dtype.kind == "b":
        return label.astype(np.uint8)
    if label.dtype.kind not in "iuf":
        raise InvalidValueError(f"the label {name!r} must hold 0, 1, 2 or 255, got {label.dtype}")
    return label


def _variables(view: CubeView, var: str | list[str] | None) -> list[str]:
    """Return the names of the variables to examine."""
    arrays = view.ds.data_vars
    names = var
    if isinstance(var, str):
        names = [var]
    if names is None:
        check_left_out(view.ds)
        names = [
            name
            for name in data_variables(view.ds, kinds="biufmM")
            if set(arrays[name].dims) == set(view.dims)
            and isinstance(arrays[name].dtype, np.dtype)  # not a nullable dtype of pandas
        ]
    if not isinstance(names, list | tuple):
        raise InvalidTypeError(f"var must be a name or a list of names, got {var!r}")
    if unknown := [n for n in names if n not in view.ds]:
        raise InvalidValueError(f"var: unknown variables {unknown}; the cube has {list(arrays)}")
    for name in names:
        check_numpy(f"variable {name!r}", view.ds[name].dtype)
    return names


def _part_to_judge(layout: Layout, name: str) -> str:
    """Return "test", or "val" for a label without a test part."""
    if not layout.counts[TRAIN]:
        raise InvalidValueError(f"the label {name!r} must have train cells (1), got none")
    for part in ("test", "val"):
        if layout.counts[PARTS[part]]:
            return part
    raise InvalidValueError(f"the label {name!r} must have test cells (0), got none")


def _valid_cells(view: CubeView, names: list[str]) -> xr.DataArray | None:
    """Return where every variable has a value; None if it has one everywhere."""
    on_cube = [view.ds[name] for name in names if set(view.ds[name].dims) <= set(view.dims)]
    valid = has_value(on_cube)
    if valid is None or bool(valid.all()):
        return None
    if valid.size <= _LABELS_AT_MOST:
        return valid.load()
    return valid


def _exclude(label: xr.DataArray, cells: xr.DataArray) -> xr.DataArray:
    """Return the label with some cells excluded."""
    label = label.broadcast_like(cells).where(~cells, np.uint8(EXCLUDED))
    if label.size <= _LABELS_AT_MOST:
        return label.load()
    return label


def _check_values(valued: Layout, part: str, names: list[str]) -> None:
    """Refuse a label without a train or a test cell that has a value."""
    for needed in ("train", part):
        if not valued.counts[PARTS[needed]]:
            raise InvalidValueError(
                f"no {needed} cell has a value in all of {names}; name the target by var="
            )


def _all_labelled(layout: Layout, valid: xr.DataArray | None, axes: Axes) -> Layout:
    """Return a layout in which all cells with a value are train."""
    label = xr.ones_like(layout.label, dtype=np.uint8)
    return Layout.of(label if valid is None else _exclude(label, ~valid), tuple(axes.sizes))


def _training_cells(
    deployed: Cells, train: Cells, labelled: Cells, measured: set[str]
) -> tuple[Cells, Neighbourhoods | None]:
    """Return the cells that the model in use is trained on, and those around the deployment.

    They are all cells with a label and a value, unless the deployment holds some of them out.
    """
    of_labelled = Neighbourhoods.of(deployed, labelled, measured)
    of_train = Neighbourhoods.of(deployed, train, measured)
    if of_labelled is None or of_train is None or (of_labelled.same() & ~of_train.same()).any():
        return train, of_train
    return labelled, of_labelled


def _placement(
    layout: Layout,
    separation: Separation,
    view: CubeView,
    axes: Axes,
    part: str,
    cut: _CutDims,
) -> Placement:
    """Judge whether a part is on one side of train, or scattered among it."""
    circle = view.lon_circle()
    gaps: dict[str | None, int | None] = {
        dim: layout.gap_on_one_side(dim, PARTS[part])
        for dim in cut.ordered
        if not circle or dim != circle.dim  # around the globe, no longitude is on one side
    }
    one_sided = any(gap is not None for gap in gaps.values())
    runs = math.prod(starts.size for starts in layout.run_starts.values())
    scattered = separation.pieces >= _SCATTERED_PIECES or runs >= _RAGGED_RUNS ** len(cut.dims)
    if axes.station_dim in cut.dims:  # the order of stations, and so their pieces, mean nothing
        scattered = True
    return Placement(gap=gaps.get(axes.time_dim), scattered=scattered and not one_sided)
