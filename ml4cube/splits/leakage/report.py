"""leakage_report: does a split measure what it promises?"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.split_plan import EXCLUDED, HELD_OUT, PARTS, TEST, TRAIN, VAL
from ml4cube.core.statistics import check_decoded, check_numpy
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.roles import RECIPE_ATTR
from ml4cube.cube.variables import data_variables
from ml4cube.splits.cube import CubeView
from ml4cube.splits.leakage.carried import Carried, find_carried
from ml4cube.splits.leakage.deployment import (
    Axes,
    Cells,
    Measure,
    beside_stations,
    distances,
    spacing,
)
from ml4cube.splits.leakage.duplicates import Duplicates, find_duplicates, map_dims
from ml4cube.splits.leakage.layout import Layout, Separation, separate
from ml4cube.splits.leakage.stores import StorePair, compare_stores, is_store
from ml4cube.splits.ranges import estimate_range
from ml4cube.splits.validity import has_value

logger = logging.getLogger(__name__)

Cube = xr.Dataset | xr.DataArray

# Dims along which a neighbour is no nearer than any other index.
_CATEGORIES = {
    "scenario", "member", "ensemble", "realization", "model", "experiment", "run", "source",
    "variable", "band", "channel",
}  # fmt: skip
# A split leaks when more than this share of its test cells touch train, or lie within the range.
_MOST = 0.5
# A region of any size has a smaller share of its cells at its border. A thinner one passes only
# if it was asked for by name.
_ALL = 0.95
# Fewer pieces than this are regions, that many or more are blocks dealt out among train.
_SCATTERED = 3.5
# A label that changes more often than this along each dim is no matter of a few regions, even if
# all its pieces hang together, as half of all cells do when dealt out one by one.
_FEW_RUNS = 5
# If values were filled forward, the share of unchanged held-out cells exceeds that of train cells
# by more than this.
_CARRIED = 0.02
# A test part that lies so many times nearer to train than the deployment, or farther, is another
# task: of made fields, blocks beyond it promise 1.2 to 1.8 times the true error, and random cells
# in 20 of 20 draws lie within a tenth of 1.
_FACTOR = 1.25
# Labels of so many cells are kept in memory once it is known which of them have a value.
_LABELS_AT_MOST = 1 << 26


@dataclass(frozen=True, eq=False)
class LeakageReport:
    """What `leakage_report` found.

    Parameters
    ----------
    leaks : bool
        Whether the test score will promise more than the model holds.
    verdict : str
        One plain sentence.
    table : DataFrame
        One row for each check, by name: ``found``, ``unit``, ``limit``, ``status`` ("ok",
        "leak", "warning", "unknown" or "" for a mere count) and ``meaning``.
    findings : tuple of str
        All that is wrong or doubtful, worst first.
    distances : dict of str to (str, dict of str to ndarray)
        For "space" and "time", the unit, and distances to the nearest train cell by curve.
    shares : dict of str to float
        Shares of the test cells that the figure shows; of all held out where it says so.

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

    def __str__(self) -> str:
        columns = self.table[["found", "unit", "status"]]
        shown = columns.to_string(na_rep="", float_format="{:.6g}".format)
        return f"{self.verdict}\n\n{shown}"

    def plot(self) -> Any:
        """Draw shares of the test cells that are too near, and the curves of distances.

        Returns
        -------
        matplotlib.figure.Figure
            Bars, and one panel each for space and time.
        """
        from ml4cube.plotting import leakage_figure

        curves = {
            domain: (unit, by_curve)
            for domain, (unit, by_curve) in self.distances.items()
            if any(values.size for values in by_curve.values())
        }
        return leakage_figure(self.verdict, self.leaks, curves, self.shares)


def leakage_report(
    ds: Cube,
    deployment: Any = None,
    *,
    var: str | list[str] | None = None,
    name: str = "split",
) -> LeakageReport:
    """Judge whether a split's test score will hold where the model is used.

    Four questions. Are tiles of test cells bitwise copies of tiles of train cells, wherever they
    lie, or single cells unchanged since the last train step at their place? Do test cells touch
    train cells, so that a neighbour gives them away? Are they nearer to train than values are alike
    (`estimate_range`)? With a deployment, the fourth decides in place of the second and third: are
    they as far from train as the cells where the model will be used, nearer (too easy), or farther
    (too hard)?

    Parameters
    ----------
    ds : Dataset, DataArray or path
        A cube with a split label (train 1, test 0, val 2, excluded 255), of any dims, lazy or
        not, on all or some of the cube's dims. Or a train store of samples, with the test store as
        second argument: then cells that samples of both cover, and samples that are bitwise the
        same, are looked for.
    deployment : Dataset, DataArray or path, optional
        Where the model will be used: a cube on a grid, curvilinear or not, or along points, with
        coordinates. Its cells with a value in any variable are those; of a mask, give
        ``cube.where(mask)``.
    var : str or list of str, optional
        Variables to look at, best the target; by default all that have every dim of the cube,
        but no masks and labels.
    name : str
        Name of the label.

    Returns
    -------
    LeakageReport
        ``leaks``, ``verdict``, ``table`` and ``plot()``.

    Raises
    ------
    InvalidValueError
        If there is no label, or it has no train or no test cells with a value; if a variable is
        unknown; if the deployment has no places and no times that the cube has, too.
    InvalidTypeError
        If the deployment is no cube, the second of two stores is none, or a variable has no
        string as name.
    StoreError
        If nothing can be read at a path, or a store is damaged.

    Notes
    -----
    A split leaks if cells held out have duplicates in train; if a meridian or a time that stands
    twice is held out and trains; if more of them than of the train
    cells, by 2 %, have kept the value of the last train step, or have that of the next; if
    `assign_rand_split` made it; if the test part is scattered among train, and more than half of
    its cells touch a train cell, or lie within the range of one (blocks that touch, along dims
    without a sill, do so at any size: give them a buffer); if all test cells touch a train cell,
    as those of a single step or row among train do (a region that `assign_region_split` left out
    may be that thin). A part that lies wholly to one side of train (forward in time) or in few
    large pieces (regions) is used for what lies outside of train, so being within the range is
    reported and not held against it.

    With a deployment, copies count as before, and the mean distances of test cells and of
    deployment cells to train are compared, in kilometres and in time (Milà et al. 2022, *Nearest
    neighbour distance matching*, Methods in Ecology and Evolution 13): a factor of 1.25 either way,
    or a little more of few test cells, makes the test another task. A cell is as far in time as the
    nearest time that trains somewhere, and as far in space as the nearest place that trains then.
    Distances below the spacing of train cells count as that. What cannot be measured is said; of a
    split along such dims, copies, neighbours and range are judged as without a deployment.

    Every chunk is read once for the duplicates, and sums of it are kept; ranges, separation and
    values carried on in time are taken from seeded samples; memory is bounded. Ranges, too, are
    estimated for every variable: name the target by ``var=`` to look at one. Duplicates are looked
    for tile by tile, of the size that the table tells: copies that are smaller, or begin elsewhere
    in a tile, are not found, nor are values carried on that many places share. Cells with a gap in
    any of the variables are neither test nor train cells. A variable most of whose train fields
    repeat in train (a climatology, a constant field stored for each step) is no proof of
    duplicates unless all others repeat with it. Fields that do not change at all, such as no rain
    anywhere, are not counted.

    Examples
    --------
    >>> from ml4cube.splits import assign_time_split
    >>> values = np.random.default_rng(0).normal(size=(60, 12, 12)).cumsum(axis=0)
    >>> ds = xr.Dataset({"t2m": (("time", "lat", "lon"), values)})
    >>> leakage_report(assign_time_split(ds, 0.7, gap=3)).leaks
    False
    """
    ds, deployment = _opened(ds), _opened(deployment)
    if is_store(ds):
        return _report_of_stores(compare_stores(ds, deployment))  # type: ignore[arg-type]
    view = CubeView.of(ds)
    label = _label(view, name)
    names = _variables(view, var)
    axes = Axes.of(view, map_dims(view))
    layout = Layout.of(label, tuple(axes.sizes))
    part, part_name = _part_to_judge(layout, name)
    asked = None if deployment is None else Cells.of_deployment(deployment, axes)
    measure = Measure.of(axes, None if asked is None else asked.axes)
    if asked is not None and not (measure.space or measure.time):
        raise InvalidValueError(f"deployment cannot be compared: {_told(measure.unknown)}")
    known = _with_values(layout, view, names)
    for code, called in ((TRAIN, "train"), (part, part_name)):
        if not known.counts[code]:
            raise InvalidValueError(
                f"no {called} cell has a value in all of {names}; name the target by var="
            )

    copies = find_duplicates(view, label, names)
    cut = [dim for dim, starts in layout.starts.items() if starts.size > 1]
    # dims along which the next index is no nearer than any other
    loose = {dim for dim in view.dims if _categorical(view, dim) or dim == axes.station_dim}
    time_dim = axes.time_dim
    carried = find_carried(view, layout, names, time_dim) if time_dim else {}
    ranges = _longest_ranges(view, names, [dim for dim in cut if dim not in loose])
    apart = separate(layout, known, view, partial(_units, known, loose, ranges), part)
    train, test = Cells(axes, known, TRAIN), Cells(axes, known, part)
    stations = axes.station_dim in cut
    if stations:
        apart = replace(apart, touching=max(apart.touching, beside_stations(test, train)))
    curves = {f"{part_name} → train": distances(test, train, measure)}
    unknown = dict(measure.unknown)
    if asked is not None:
        curves["deployment → train"] = distances(asked, train, measure)
        common = set.intersection(*(set(found) for found in curves.values()))
        for domain, wanted in (("space", measure.space), ("time", measure.time)):
            if wanted and domain not in common:
                unknown[domain] = "latitudes or longitudes are missing where these cells lie"
        if not common:
            raise InvalidValueError(f"deployment cannot be compared: {_told(unknown)}")

    domains = dict.fromkeys(axes.sizes, "space")
    if time_dim:
        domains[time_dim] = "time"
    cuts = {dim: domains.get(dim, dim) for dim in cut if dim not in loose or dim in axes.sizes}
    unknown |= {
        dim: "it is a dim of neither places nor times" for dim in cuts if dim not in domains
    }
    # where the split cuts along dims that were not compared, its neighbours are judged as ever
    judge = _Judge(part_name, asked is not None and not unknown.keys() & cuts.values())
    judge.count_cells(layout, known, view)
    judge.duplicates(copies, view)
    judge.carried(carried)
    gap = layout.one_sided(time_dim, part) if time_dim else None
    # of places that lie all around the globe, none are to one side of others
    around, _ = view.lon_turn() or (None, 0)
    sided = gap is not None or any(
        layout.one_sided(dim, part) is not None for dim in cut if dim != around and dim not in loose
    )
    runs = math.prod(starts.size for starts in layout.starts.values())
    scattered = apart.pieces >= _SCATTERED
    ragged = runs >= _FEW_RUNS ** len(cut)
    made_by = _maker(view.ds[name])
    whole = sided or made_by in ("assign_region_split", "LeaveRegionOut")
    among = not sided and (scattered or ragged or stations) and not (stations and whole)
    # regions may be ragged, but they stay where they are
    mixed = not sided and (scattered or (ragged and len(cut) > 1 and time_dim in cut))
    judge.cell_by_cell(made_by)
    judge.neighbours(apart, gap, time_dim, among, whole)
    judge.ranges(ranges, apart, [dim for dim in cut if dim not in loose], sided, mixed)
    units = {"space": "km", "time": axes.numbers(axes)[1]}
    judge.distances(curves, units)
    if asked is not None:
        judge.deployment(curves, units, spacing(train, measure), asked, unknown)
    return judge.report(curves, units, apart)


def audit(
    ds: Cube,
    deployment: Any = None,
    *,
    var: str | list[str] | None = None,
    name: str = "split",
) -> LeakageReport:
    """Judge a split: another name of `leakage_report`.

    Parameters
    ----------
    ds : Dataset, DataArray or path
        A cube with a split label.
    deployment : Dataset, DataArray or path, optional
        Where the model will be used.
    var : str or list of str, optional
        Variables to look at.
    name : str
        Name of the label.

    Returns
    -------
    LeakageReport
        As `leakage_report` returns it.

    Examples
    --------
    >>> label = xr.DataArray(np.array([1] * 15 + [255] + [0] * 4, "u1"), dims="time", name="split")
    >>> ds = xr.Dataset({"t2m": ("time", np.arange(20.0)), "split": label})
    >>> audit(ds).leaks
    False
    """
    return leakage_report(ds, deployment, var=var, name=name)


def _opened(given: Any) -> Any:
    """Open what is given as a path or URL; leave all else as it is."""
    if not isinstance(given, str | os.PathLike):
        return given
    found = as_dataset(given)
    if "ml4cube_format" not in found.attrs:
        return found
    # every sample will be read; a damaged one is told by its file before
    from ml4cube.store.format import open_store

    return open_store(given, verify=True)


def _label(view: CubeView, name: str) -> xr.DataArray:
    if name not in view.ds:
        raise InvalidValueError(
            f"the cube has no label {name!r}, only {list(view.ds.data_vars)}; call "
            "assign_block_split first, or name the label"
        )
    label = view.ds[name]
    if unknown := [dim for dim in label.dims if dim not in view.dims]:
        raise InvalidValueError(f"the label {name!r} has dims {unknown}, the cube has {view.dims}")
    if label.dtype.kind == "b":
        return label.astype(np.uint8)
    if label.dtype.kind not in "iuf":
        raise InvalidValueError(f"the label {name!r} is of {label.dtype}; it holds 0, 1, 2 or 255")
    return label


def _maker(label: xr.DataArray) -> str | None:
    """Function that made a label of ours; None for a label of somebody else's."""
    try:
        recipe = json.loads(label.attrs.get(RECIPE_ATTR, "{}"))
    except (TypeError, json.JSONDecodeError):
        return None
    return recipe.get("made_by") if isinstance(recipe, dict) else None


def _variables(view: CubeView, var: str | list[str] | None) -> list[str]:
    found = view.ds.data_vars
    names: list[Any]
    if var is None:
        names = [
            name
            for name in data_variables(view.ds, kinds="biufmM")
            if set(found[name].dims) == set(view.dims)
            and isinstance(found[name].dtype, np.dtype)  # those of pandas have gaps of their own
        ]
    else:
        names = [var] if isinstance(var, str) or not isinstance(var, Iterable) else list(var)
    if odd := [name for name in names if not isinstance(name, str)]:
        raise InvalidTypeError(f"variables are named by strings, found {odd}; use ds.rename")
    if unknown := [n for n in names if n not in view.ds]:
        raise InvalidValueError(f"var names {unknown}, the cube has {list(found)}")
    for name in names:
        check_numpy(name, view.ds[name].dtype)
    return names


def _part_to_judge(layout: Layout, name: str) -> tuple[int, str]:
    if not layout.counts[TRAIN]:
        raise InvalidValueError(
            f"the label {name!r} marks no train cell (1){_other(layout)}; there is nothing to judge"
        )
    for part in ("test", "val"):
        if layout.counts[PARTS[part]]:
            return PARTS[part], part
    raise InvalidValueError(
        f"the label {name!r} marks no test cell (0){_other(layout)}; there is nothing to judge"
    )


def _other(layout: Layout) -> str:
    """What else a label holds, for a message."""
    if not layout.unknown:
        return ""
    return f", and {layout.unknown} of its values are none of 0, 1, 2 and 255"


def _categorical(view: CubeView, dim: str) -> bool:
    coord = view.ds.coords.get(dim)
    if (
        coord is not None
        and coord.dtype.kind in "USO"
        and not hasattr(coord.values.flat[0], "year")
    ):
        return True
    return dim.lower() in _CATEGORIES


def _with_values(layout: Layout, view: CubeView, names: list[str]) -> Layout:
    """The label of cells with a value in every variable; all others belong to no part."""
    here = [view.ds[name] for name in names if set(view.ds[name].dims) <= set(view.dims)]
    valid = has_value(here)
    if valid is None or bool(valid.all()):
        return layout
    label = layout.label.broadcast_like(valid).where(valid, np.uint8(EXCLUDED))
    if label.size <= _LABELS_AT_MOST:
        label = label.load()
    return Layout.of(label, layout.wanted)


def _longest_ranges(view: CubeView, names: list[str], dims: list[str]) -> dict[str, float]:
    """Longest range of the variables along each dim; inf without a sill."""
    longest: dict[str, float] = {}
    for name in names:
        if view.ds[name].dtype.kind not in "biuf":
            continue
        try:
            check_decoded(name, view.ds[name].dtype, view.ds[name].attrs)
        except InvalidValueError as error:
            logger.warning("no range is estimated: %s", error)
            continue
        found = estimate_range(view.ds[name], None, [d for d in dims if d in view.ds[name].dims])
        for dim, cells in found.items():
            if "grow apart" in found.reasons.get(dim, ""):
                cells = math.inf
            if not math.isnan(cells):
                longest[dim] = max(cells, longest.get(dim, 0.0))
    return longest


def _units(
    layout: Layout, loose: set[str], ranges: dict[str, float], touching: bool
) -> dict[str, float]:
    """Range along each dim of the label: where unknown, one cell; between scenarios, none."""
    unit = {}
    for dim in layout.starts:
        cells = math.nan if dim in loose else ranges.get(dim, 1.0)
        # without a sill no distance is enough; but a buffer is given the benefit of the doubt
        unit[dim] = 1.0 if math.isinf(cells) and not touching else cells
    return unit


class _Judge:
    """Collects rows of the table and findings."""

    def __init__(self, part: str, asked: bool = False) -> None:
        self.part = part
        self.asked = asked  # distances to a deployment decide, and not how near test cells are
        self.fits: list[str] = []
        self.hard: list[str] = []
        self.rows: dict[str, dict[str, Any]] = {}
        self.leaks: list[str] = []
        self.warnings: list[str] = []
        self.compared = ""  # what was looked at for copies

    def row(
        self, name: str, found: Any, unit: str, meaning: str, limit: Any = None, status: str = ""
    ) -> None:
        self.rows[name] = {
            "found": found, "unit": unit, "limit": limit, "status": status, "meaning": meaning,
        }  # fmt: skip

    def count_cells(self, layout: Layout, known: Layout, view: CubeView) -> None:
        # a label that lacks dims holds for all their indices
        times = math.prod(n for dim, n in view.sizes.items() if dim not in layout.starts)
        each = math.prod(n for dim, n in view.sizes.items() if dim not in known.starts)
        named = {"train": TRAIN, "val": VAL, "test": TEST}
        for part, code in named.items():
            cells = known.counts[code] * each
            self.row(f"{part} cells", cells, "cells", f"cells labelled {part}, with a value")
        cells = layout.counts[EXCLUDED] * times
        self.row("excluded cells", cells, "cells", "cells labelled excluded")
        gaps = known.counts[EXCLUDED] * each - cells
        if gaps:
            self.row("cells without a value", gaps, "cells", "of the parts; they count for nothing")
        if unknown := layout.unknown * times:
            meaning = "cells whose label is a gap or no part's number, in no part"
            self.row("unlabelled cells", unknown, "cells", meaning, 0, "warning")
            share = unknown / math.prod(view.sizes.values())
            self.warnings.append(
                f"{_percent(share)} of the cells have a label that is a gap or no part's number, "
                "so they count as excluded"
            )
        held_out = sum(known.counts[code] for code in HELD_OUT)
        twice = {
            "on a meridian": known.twice(view),
            "at a time": known.at_one_time(view),
        }
        shared = sum(twice.values())
        self.row(
            "shared cells", shared * each, "cells", "held-out cells whose place and time trains, "
            "too: a cell has one label, but a meridian (0 and 360) or a time may stand twice", 0,
            "leak" if shared else "ok",
        )  # fmt: skip
        self.leaks += [
            f"{_percent(cells / held_out)} of the held-out cells lie {where} that stands twice in "
            "the cube, and trains, too"
            for where, cells in twice.items()
            if cells
        ]

    def duplicates(self, copies: dict[str, Duplicates], view: CubeView) -> None:
        """A variable counts unless it repeats by nature; all variables together always do."""
        together = copies.get("") or next(iter(copies.values()), None)
        counted = [found for name, found in copies.items() if name and not found.repeats]
        worst = max(
            [*counted, *([together] if together else [])], key=lambda d: d.cells, default=None
        )
        cells = worst.cells if worst else 0
        self.compared = worst.tiles if worst else ""
        self.row(
            "duplicate cells", cells, "cells",
            f"held-out cells in {self.compared or 'tiles'} that are bit for bit in train, too", 0,
            ("leak" if cells else "ok") if worst else "unknown",
        )  # fmt: skip
        if len(copies) > 2:
            for name, found in copies.items():
                if name:
                    self.row(
                        f"duplicate cells of {name}", found.cells, "cells",
                        "repeats within train, too" if found.repeats else "of this variable", 0,
                        "ok" if not found.cells else "warning" if found.repeats else "leak",
                    )  # fmt: skip
        if worst and cells:
            where = _when(worst, view)
            share = _percent(cells / max(worst.of, 1))
            self.leaks.append(
                f"{share} of the held-out cells are bitwise copies of train cells{where}"
            )

    def carried(self, found: dict[str, Carried]) -> None:
        """Filling forward is told by how much more often than train the test part stands still."""
        if not found:
            return
        worst = max(found.values(), key=lambda carried: carried.beyond_nature)
        leaks = worst.beyond_nature > _CARRIED
        self.row(
            "cells carried on", worst.held_out, "share of held-out cells",
            "cells that have kept the value of the last train step at their place, or have that of "
            "the next, against the share of train cells that do", worst.train + _CARRIED,
            "leak" if leaks else "ok",
        )  # fmt: skip
        if leaks:
            self.leaks.append(
                f"{_percent(worst.held_out)} of the held-out cells keep the value of the train "
                f"step next to them at their place (of the train cells, {_percent(worst.train)})"
            )

    def cell_by_cell(self, made_by: str | None) -> None:
        if made_by == "assign_rand_split" and not self.asked:
            self.leaks.append("cells were dealt out one by one, among their neighbours")

    def neighbours(
        self,
        found: Separation,
        gap: int | None,
        time_dim: str | None,
        among: bool,
        whole: bool,
    ) -> None:
        status = "ok"
        share = found.touching
        if self.asked:
            status = ""
        elif (share > _MOST and among) or (share > _ALL and not whole):
            status = "leak"
            self.leaks.append(f"{_percent(share)} of the {self.part} cells touch a train cell")
        elif share > 0.02:
            status = "warning"
            self.warnings.append(f"{_percent(share)} of the {self.part} cells touch a train cell")
        self.row(
            "touching cells", share, f"share of {self.part} cells", "cells beside a train cell",
            _MOST, status if share == share else "unknown",
        )  # fmt: skip
        if gap is not None:
            self.row(
                f"gap along {time_dim}", gap, "steps",
                f"steps between train and {self.part}, which lies wholly to one side", None, "ok",
            )  # fmt: skip

    def ranges(
        self,
        ranges: dict[str, float],
        found: Separation,
        cut: list[str],
        sided: bool,
        mixed: bool,
    ) -> None:
        for dim in cut:
            cells = ranges.get(dim, math.nan)
            meaning = "values are alike up to there"
            if math.isinf(cells):
                meaning = "no sill: values grow apart over all distances looked at"
            self.row(f"range along {dim}", cells, "cells", meaning)
            long_enough = found.block[dim] >= cells
            comparable = math.isfinite(cells) and found.block[dim] == found.block[dim]
            self.row(
                f"block along {dim}", found.block[dim], "cells",
                f"median length of stretches of {self.part} cells, against the range", cells,
                ("ok" if long_enough or sided or self.asked else "warning")
                if comparable
                else "unknown",
            )  # fmt: skip
            self.row(
                f"separation along {dim}",
                found.steps[dim],
                "cells",
                f"median distance from {self.part} cells to their nearest train cell",
            )
        self.row(
            "pieces", found.pieces, "", f"separate pieces of the {self.part} part, weighted by size"
        )
        known = {dim: cells for dim, cells in ranges.items() if dim in cut}
        if not known:
            self.row(
                "cells within the range", math.nan, f"share of {self.part} cells",
                "no range is known along the dims that are cut", _MOST, "unknown",
            )  # fmt: skip
            return
        near = found.near > _MOST
        status = "" if self.asked else "ok"
        said = (
            f"{_percent(found.near)} of the {self.part} cells lie within the range of a train cell "
            f"({_named(known)})"
        )
        if self.asked:
            pass
        elif near and mixed:
            status = "leak"
            self.leaks.append(said)
        elif found.near > 0.1:
            status = "warning"
            self.warnings.append(said)
        if (
            mixed
            and not self.asked
            and not found.touching
            and any(math.isinf(cells) for cells in known.values())
        ):
            endless = [dim for dim, cells in known.items() if math.isinf(cells)]
            self.warnings.append(
                f"no buffer along {', '.join(endless)} can be shown to be wide enough, since "
                "values there have no sill"
            )
        self.row(
            "cells within the range", found.near, f"share of {self.part} cells",
            "cells nearer to train than values are alike", _MOST, status,
        )  # fmt: skip

    def distances(self, curves: dict[str, dict[str, Any]], units: dict[str, str]) -> None:
        for name, by_domain in curves.items():
            for domain, values in by_domain.items():
                self.row(
                    f"{name}, {domain}", float(np.median(values)), units[domain],
                    "median distance to the nearest train "
                    + ("place, at the nearest time" if domain == "space" else "time, at any place"),
                )  # fmt: skip

    def deployment(
        self,
        curves: dict[str, dict[str, Any]],
        units: dict[str, str],
        least: dict[str, float],
        asked: Cells,
        unknown: dict[str, str],
    ) -> None:
        """Hold the test part's distances against the deployment's; they decide, both ways."""
        test, use = curves.values()
        cells = asked.layout.counts[TRAIN]
        self.row("deployment cells", cells, "cells", "cells of the deployment with a value")
        for domain, why in unknown.items():
            self.warnings.append(f"distances in {domain} were not compared, since {why}")
            name = f"{self.part} against deployment, {domain}"
            self.row(name, math.nan, "ratio", f"not compared: {why}", None, "unknown")
        for domain in ("space", "time"):
            if domain in unknown or domain not in test:
                continue
            # what lies nearer than one train cell to the next is inside of train
            mean = {n: float(np.mean(d[domain])) for n, d in (("test", test), ("use", use))}
            floor = max(least[domain], 1e-9)
            factor = max(mean["test"], floor) / max(mean["use"], floor)
            # few test cells tell a mean by chance
            values = test[domain]
            limit = _FACTOR + float(np.std(values)) / max(mean["test"], floor) / values.size**0.5
            test_lies, use_lies = (f"{_short(value)} {units[domain]}" for value in mean.values())
            said = (
                f"in {domain} its {self.part} part lies {test_lies} from train and the deployment "
                f"{use_lies}, a factor of {_short(factor)}"
            )
            if floor > min(mean.values()) and factor != 1:
                # else the three numbers would contradict one another
                said += f" (one train cell lies {_short(floor)} {units[domain]} from the next, and "
                said += "what is nearer counts as that)"
            status = "ok"
            if factor * limit < 1:
                status = "leak"
                self.leaks.append(f"it is too easy for the deployment, since {said}")
            elif factor > limit:
                status = "warning"
                self.hard.append(said)
            else:
                self.fits.append(said)
            self.row(
                f"{self.part} against deployment, {domain}", factor, "ratio",
                "of mean distances to train: the test is too easy far below 1, too hard far above",
                limit, status,
            )  # fmt: skip

    def verdict(self, thing: str) -> str:
        """One sentence on what was found; `thing` is what the parts are made of."""
        minor = self.warnings if self.asked or self.fits or self.hard else []
        if self.leaks:
            minor = [*self.hard, *minor]
        mind = f" Mind that {'; '.join(minor)}." if minor else ""
        if self.leaks:
            return (
                f"This split leaks: {'; '.join(self.leaks)}; its {self.part} score will "
                f"flatter.{mind}"
            )
        if self.hard:
            return (
                f"This split is too hard for the deployment, since {'; '.join(self.hard)}; its "
                f"{self.part} score will be too bad.{mind}"
            )
        if self.fits:
            return f"This split fits the deployment: {'; '.join(self.fits)}.{mind}"
        if self.warnings:
            return f"No leak was found, but mind that {'; '.join(self.warnings)}."
        copies = "nothing was compared for copies"
        if self.compared:
            copies = f"no {self.compared} are copies of train ones"
        near = f"no {self.part} {thing} is too near to a train {thing}"
        return f"No leak was found: {near}, and {copies}."

    def table(self) -> pd.DataFrame:
        """Collect the rows."""
        table = pd.DataFrame.from_dict(self.rows, orient="index")
        table.index.name = "check"
        return table

    def report(
        self,
        curves: dict[str, dict[str, Any]],
        units: dict[str, str],
        apart: Separation,
    ) -> LeakageReport:
        verdict = self.verdict("cell")
        table = self.table()
        by_domain: dict[str, tuple[str, dict[str, Any]]] = {}
        for domain in ("space", "time"):
            found = {name: values[domain] for name, values in curves.items() if domain in values}
            if found:
                by_domain[domain] = (units[domain], found)
        copies = self.rows["duplicate cells"]["found"]
        val = self.rows["val cells"]["found"]
        also = " (test and val)" if val and self.part == "test" else ""
        shares = {
            f"bitwise copies of train{also}": copies / (self.rows["test cells"]["found"] + val),
            "touch a train cell": apart.touching,
        }
        if apart.near == apart.near and self.rows["cells within the range"]["status"] != "unknown":
            shares["within the range of a train cell"] = apart.near
        logger.info("%s", verdict)
        findings = (*self.leaks, *self.hard, *self.warnings)
        return LeakageReport(bool(self.leaks), verdict, table, findings, by_domain, shares)


def _report_of_stores(pair: StorePair) -> LeakageReport:
    """Judge two sample stores."""
    judge = _Judge(pair.part)
    judge.compared = "" if pair.copies is None else "samples"
    judge.row("train samples", pair.train, "samples", "samples of the train store")
    judge.row(f"{pair.part} samples", pair.held_out, "samples", f"samples of the {pair.part} store")
    checks = [
        ("shared cells", pair.shared, "cover a cell that a train sample covers", "leak"),
        ("duplicate samples", pair.copies, "are bitwise copies of train samples", "leak"),
        ("touching samples", pair.touching, "share a cell with a train sample, or touch one",
         "warning"),
    ]  # fmt: skip
    shares = {}
    for name, found, said, status in checks:
        meaning = f"{pair.part} samples that {said}"
        if found is None:
            judge.row(name, math.nan, "samples", meaning, 0, "unknown")
            continue
        judge.row(name, found, "samples", meaning, 0, status if found else "ok")
        shares[said] = found / pair.held_out
        if found and (status == "leak" or not judge.leaks):
            told = judge.leaks if status == "leak" else judge.warnings
            told.append(f"{_percent(found / pair.held_out)} of the {pair.part} samples {said}")
    if pair.shared is None:
        judge.warnings.append(
            "the stores were not cut alike from one cube, so positions say nothing"
        )
    verdict = judge.verdict("sample")
    logger.info("%s", verdict)
    findings = (*judge.leaks, *judge.warnings)
    return LeakageReport(bool(judge.leaks), verdict, judge.table(), findings, {}, shares)


def _when(found: Duplicates, view: CubeView) -> str:
    """Where along the first outer dim duplicates lie."""
    if found.dim is None or not found.steps:
        return ""
    first, last = found.steps[0], found.steps[-1]
    coord = view.ds.coords.get(found.dim)
    ends = [str(coord.values[i])[:10] if coord is not None else str(i) for i in (first, last)]
    return f" ({found.dim} {ends[0]}" + (f" to {ends[1]})" if last > first else ")")


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _told(unknown: dict[str, str]) -> str:
    return "; ".join(dict.fromkeys(unknown.values()))


def _short(number: float) -> str:
    """Three digits, but no powers of ten for some thousand kilometres."""
    return f"{float(f'{number:.3g}'):,.7g}"


def _named(ranges: dict[str, float]) -> str:
    return ", ".join(
        f"{dim}: {cells:.3g} cells" if math.isfinite(cells) else f"{dim}: no sill"
        for dim, cells in ranges.items()
    )
