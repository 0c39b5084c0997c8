"""leakage_report: judge whether the test score of a split will hold where the model is used."""

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
from ml4cube.core.statistics import check_decoded
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
    Axes,
    Cells,
    compare_axes,
    distances,
    spacing,
    stations_near_train,
)
from ml4cube.splits.leakage.duplicates import find_duplicates
from ml4cube.splits.leakage.label_layout import Layout, Separation, separate
from ml4cube.splits.leakage.stores import is_store, part_of_pair
from ml4cube.splits.ranges import ranges_of
from ml4cube.splits.validity import has_value

logger = logging.getLogger(__name__)

Cube = xr.Dataset | xr.DataArray

# Fewer effective pieces than this are regions; this many or more are blocks scattered among train.
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
        Whether the test score will be too optimistic.
    verdict : str
        The findings in one sentence.
    table : DataFrame
        One row per check, by name: ``found``, ``unit``, ``limit``, ``status`` ("ok", "leak",
        "warning", "unknown", or "" for a plain count) and ``meaning``.
    findings : tuple of str
        All problems and doubts, worst first.
    distances : dict of str to (str, dict of str to ndarray)
        For "space" and "time", the unit, and the distances to the nearest train cell by curve.
    shares : dict of str to float
        Fractions of the test cells that the figure shows; of all held-out cells where the name
        says so.

    Examples
    --------
    >>> from ml4cube.splits import assign_time_split
    >>> ds = xr.Dataset({"t2m": ("time", np.arange(20.0))})
    >>> report = leakage_report(assign_time_split(ds, 0.7, gap=3))
    >>> report.leaks, int(report.table.loc["train cells", "found"])
    (False, 11)
    >>> figure = report.plot()
    """

    leaks: bool
    verdict: str
    table: pd.DataFrame
    findings: tuple[str, ...] = ()
    distances: dict[str, tuple[str, dict[str, NDArray[np.float64]]]] = field(default_factory=dict)
    shares: dict[str, float] = field(default_factory=dict)

    def _summary(self) -> Summary:
        """Return the verdict, plain counts, and the checks, those that are not passed first."""
        columns = ["found", "unit", "limit", "status", "meaning"]
        known = self.table[columns].astype(object).where(self.table[columns].notna(), None)
        rows = [(str(name), *row) for name, row in zip(known.index, known.values, strict=True)]
        found = {
            name.replace(", ", " in "): number if unit in name else f"{shown(number)} {unit}"
            for name, number, unit, _, status, _ in rows
            if not status
        }
        checks = sorted((row for row in rows if row[4]), key=lambda row: _STATUSES.index(row[4]))
        sections = {"Checks": Table(["check", *columns], checks)}
        return Summary(self.verdict, {"Found": found}, sections)

    def plot(self) -> Any:
        """Plot the fractions of test cells that are too near, and the distances to train.

        Returns
        -------
        matplotlib.figure.Figure
            Bars, and one panel each for space and time.
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
    """Judge whether the test score of a split will hold where the model is used.

    The report answers four questions. Are test cells bitwise copies of train cells, or unchanged
    since the last train step at their location? Do test cells touch train cells? Are they within
    the range of autocorrelation of train cells (`estimate_range`)? If a deployment is given, are
    they as far from train as the cells where the model will be used, or nearer (too easy), or
    farther (too hard)? With a deployment, the last question replaces the second and the third.

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
        ``leaks``, ``verdict``, ``table`` and ``plot()``.

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
    - the fraction of held-out cells with the value of the last train step, or of the next, exceeds
      that of train cells by 2 %;
    - `assign_rand_split` made it;
    - the test part is scattered among train, and more than half of its cells touch a train cell
      or are within the range of one. Along dims without a sill, blocks that touch leak at any
      size: use a buffer;
    - all test cells touch a train cell, as those of a single step or row do. A region left out by
      `assign_region_split` may be that thin.

    A test part wholly on one side of train (forward in time) or in a few large pieces (regions)
    tests the model outside of train. Being within the range is then reported, but is not a leak.

    With a deployment, copies count as before, and the mean distances of test cells and of
    deployment cells to train are compared, in kilometres and in time (Milà et al. 2022, *Nearest
    neighbour distance matching*, Methods in Ecology and Evolution 13). A factor of more than 1.25
    either way, or a little more for few test cells, makes the test another task. The distance in
    time is to the nearest time with any train cell. The distance in space is to the nearest
    location that is train at that time. Distances below the spacing of train cells count as that
    spacing. The report names what could not be compared; for a split along such dims, copies,
    neighbours and range are judged as without a deployment.

    Every chunk is read once to find duplicates. Ranges, distances and values carried forward are
    estimated from seeded samples, so memory is bounded. Ranges are estimated for every variable:
    pass the target as ``var=`` for one. Duplicates are found by tiles, whose size is in the table:
    copies that are smaller, or are shifted by part of a tile, are not found, nor are values carried
    forward that many locations share. Cells with a gap in any of the variables are neither test nor
    train cells. A variable most of whose train fields repeat within train (a climatology, a
    constant field stored for each step) does not prove duplicates unless all others repeat with it.
    Constant fields, such as no rain anywhere, are not counted.

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
    label = _label(view, name)
    names = _variables(view, var)
    view = replace(view, ds=heed_absent_chunks(view.ds, [name, *names], missing_chunks).cube)
    axes = Axes.of(view)
    time_dim = axes.time_dim
    layout = Layout.of(label, tuple(axes.sizes))
    part = _part_to_judge(layout, name)
    deployed = None if deployment is None else Cells.of_deployment(deployment, axes)
    measured, unknown = compare_axes(axes, None if deployed is None else deployed.axes)
    valued = _with_values(layout, view, names, tuple(axes.sizes))
    for needed in ("train", part):
        if not valued.counts[PARTS[needed]]:
            raise InvalidValueError(
                f"no {needed} cell has a value in all of {names}; name the target by var="
            )

    train, test = Cells(axes, valued, TRAIN), Cells(axes, valued, PARTS[part])
    curves = {f"{part} → train": distances(test, train, measured)}
    if deployed is not None:
        curves["deployment → train"] = distances(deployed, train, measured)
        common = set.intersection(*(set(by_domain) for by_domain in curves.values()))
        for domain in measured - common:
            unknown[domain] = "latitudes or longitudes are missing where these cells are"
        if not common:
            reasons = "; ".join(dict.fromkeys(unknown.values()))
            raise InvalidValueError(f"the deployment cannot be compared with the cube: {reasons}")
    curves_by_domain: CurvesByDomain = {}
    for domain, unit in {"space": "km", "time": axes.time_unit}.items():
        if found := {curve: by[domain] for curve, by in curves.items() if domain in by}:
            curves_by_domain[domain] = (unit, found)

    # The dims along which the label changes, and those of them whose neighbours are alike.
    cut = [dim for dim, starts in layout.run_starts.items() if starts.size > 1]
    unordered = {
        dim for dim in view.dims if dim == axes.station_dim or is_category(dim, view.dim_coord(dim))
    }
    unordered -= {time_dim}
    ordered = [dim for dim in cut if dim not in unordered]
    ranges = _longest_ranges(view, names, ordered)
    separation = separate(layout, valued, view, unordered, ranges, PARTS[part])
    if axes.station_dim in cut:
        touching = max(separation.touching, stations_near_train(test, train))
        separation = replace(separation, touching=touching)
    recipe = label.attrs.get(RECIPE_ATTR)
    made_by = None if recipe is None else read_recipe(recipe)[1]
    placement = _placement(layout, separation, view, axes, part, made_by, cut, ordered)

    # Along dims that were not compared with the deployment, neighbours and range still decide.
    domain_of: dict[str | None, str] = {**dict.fromkeys(axes.sizes, "space"), time_dim: "time"}
    for dim in ordered:
        if dim not in domain_of:
            unknown[dim] = "it is neither a dim of space nor of time"
    decides = deployed is not None and not any(domain_of.get(dim, dim) in unknown for dim in cut)
    checks = Checks(part, deployment_decides=decides)
    checks.count_cells(layout, valued, view)
    checks.duplicates(find_duplicates(view, label, names), view)
    if time_dim is not None:
        checks.carried(find_carried(view, layout, names, time_dim))
    checks.changed_copies(find_changed_copies(view, layout, names, time_dim, var is not None))
    checks.neighbours(separation, placement, time_dim, made_by)
    checks.ranges(ranges, separation, ordered, placement)
    checks.distances(curves_by_domain, [dim for dim in cut if dim not in domain_of])
    if deployed is not None:
        cells = deployed.layout.counts[TRAIN]
        checks.deployment(curves_by_domain, spacing(train, measured), cells, unknown)
    return _report(checks, "cell", curves_by_domain)


audit = leakage_report


def _report(checks: Checks, unit: str, curves_by_domain: CurvesByDomain) -> LeakageReport:
    verdict = checks.verdict(unit)
    logger.info("%s", verdict)
    findings = (*checks.leaks, *checks.too_hard, *checks.warnings)
    leaks = bool(checks.leaks)
    return LeakageReport(leaks, verdict, checks.table(), findings, curves_by_domain, checks.shares)


def _open(given: Any) -> Any:
    """Open a path or URL; return anything else as it is."""
    if not isinstance(given, str | os.PathLike):
        return given
    found = as_dataset(given)
    if "ml4cube_format" not in found.attrs:
        return found
    # Every sample will be read, so a damaged file is refused now.
    from ml4cube.store.format import open_store

    return open_store(given, verify=True)


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
    found = view.ds.data_vars
    names = [var] if isinstance(var, str) else var
    if names is None:
        check_left_out(view.ds)
        names = [
            name
            for name in data_variables(view.ds, kinds="biufmM")
            if set(found[name].dims) == set(view.dims)
            and isinstance(found[name].dtype, np.dtype)  # not a nullable dtype of pandas
        ]
    if not isinstance(names, list | tuple):
        raise InvalidTypeError(f"var must be a name or a list of names, got {var!r}")
    if unknown := [n for n in names if n not in view.ds]:
        raise InvalidValueError(f"var: unknown variables {unknown}; the cube has {list(found)}")
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


def _with_values(
    layout: Layout, view: CubeView, names: list[str], map_dims: tuple[str, ...]
) -> Layout:
    """Return the label of cells with a value in every variable; all others are excluded."""
    on_cube = [view.ds[name] for name in names if set(view.ds[name].dims) <= set(view.dims)]
    valid = has_value(on_cube)
    if valid is None or bool(valid.all()):
        return layout
    label = layout.label.broadcast_like(valid).where(valid, np.uint8(EXCLUDED))
    if label.size <= _LABELS_AT_MOST:
        label = label.load()
    return Layout.of(label, map_dims)


def _longest_ranges(view: CubeView, names: list[str], dims: list[str]) -> dict[str, float]:
    """Return the longest range of the variables along each dim; inf without a sill."""
    longest: dict[str, float] = {}
    for name in names:
        if view.ds[name].dtype.kind not in "biuf":
            continue
        try:
            check_decoded(name, view.ds[name])
        except InvalidValueError as error:
            logger.warning("no range was estimated: %s", error)
            continue
        found = ranges_of(view.ds[name], [d for d in dims if d in view.ds[name].dims])
        for dim, cells in found.items():
            if dim in found.rising:
                cells = math.inf
            if not math.isnan(cells):
                longest[dim] = max(cells, longest.get(dim, 0.0))
    return longest


def _placement(
    layout: Layout,
    separation: Separation,
    view: CubeView,
    axes: Axes,
    part: str,
    made_by: str | None,
    cut: list[str],
    ordered: list[str],
) -> Placement:
    """Judge whether a part is on one side of train, scattered among it, or chosen by the user."""
    circle = view.lon_circle()
    gaps: dict[str | None, int | None] = {
        dim: layout.gap_on_one_side(dim, PARTS[part])
        for dim in ordered
        if not circle or dim != circle.dim  # around the globe, no longitude is on one side
    }
    one_sided = any(gap is not None for gap in gaps.values())
    deliberate = one_sided or made_by in ("assign_region_split", "LeaveRegionOut")
    many_pieces = separation.pieces >= _SCATTERED_PIECES
    runs = math.prod(starts.size for starts in layout.run_starts.values())
    ragged = runs >= _RAGGED_RUNS ** len(cut)
    ragged_in_time = ragged and len(cut) > 1 and axes.time_dim in cut
    scattered = not one_sided and (many_pieces or ragged)
    if axes.station_dim in cut:  # the order of stations, and so their pieces, mean nothing
        scattered = not deliberate
    return Placement(
        gap=gaps.get(axes.time_dim),
        one_sided=one_sided,
        scattered=scattered,
        scattered_in_time=not one_sided and (many_pieces or ragged_in_time),
        deliberate=deliberate,
    )
