"""Case: a labelled cube, opened and measured for the checks of a leakage report."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_numpy
from ml4cube.core.split_plan import EXCLUDED, PARTS, TRAIN
from ml4cube.cube.absent_chunks import heed_absent_chunks
from ml4cube.cube.coordinates import is_category
from ml4cube.cube.variables import check_left_out, data_variables
from ml4cube.splits.cube import Cube, CubeView
from ml4cube.splits.distances import ANY_TIME, Axes, Cells, Floats, distances
from ml4cube.splits.label_layout import Layout
from ml4cube.splits.leakage.expected_error import Neighbourhoods
from ml4cube.splits.validity import has_value

# By domain ("space", "time"), the unit, and the distances to train by name of the curve.
CurvesByDomain = dict[str, tuple[str, dict[str, Floats]]]

# Most cells of a label that is kept in memory once cells without a value are excluded.
_LABELS_AT_MOST = 1 << 26


@dataclass(frozen=True, eq=False)
class Case:
    """A labelled cube, and the deployment that it is judged by."""

    view: CubeView
    # Variables to examine, and whether the user named them.
    names: list[str]
    has_target: bool
    # The part to judge: "test", or "val" for a label without a test part.
    part: str
    axes: Axes
    # The label, and that of the cells with a value.
    layout: Layout
    valued: Layout
    deployed: Cells | None
    comparison: Comparison

    @classmethod
    def of(
        cls, ds: Cube, deployment: Any, var: str | list[str] | None, name: str, missing_chunks: str
    ) -> Case:
        """Open and measure a cube; refuse what cannot be judged."""
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
            labelled = Cells(axes, _all_labelled(layout, valid, axes), TRAIN)
        comparison = Comparison.of(part, axes, valued, labelled, deployed)
        is_named = var is not None
        return cls(view, names, is_named, part, axes, layout, valued, deployed, comparison)

    @cached_property
    def cut(self) -> list[str]:
        """The dims along which the label changes."""
        return [dim for dim, starts in self.layout.run_starts.items() if starts.size > 1]

    @cached_property
    def unordered(self) -> set[str]:
        """The dims whose neighbours are not alike."""
        dims = {dim for dim in self.view.dims if is_category(dim, self.view.dim_coord(dim))}
        if self.axes.station_dim is not None:
            dims.add(self.axes.station_dim)
        return dims - {self.axes.time_dim}

    @property
    def ordered(self) -> list[str]:
        """The dims along which the label changes and neighbours are alike."""
        return [dim for dim in self.cut if dim not in self.unordered]

    @cached_property
    def domains(self) -> dict[str, str]:
        """The dims of space and time, with these words."""
        domains = dict.fromkeys(self.axes.sizes, "space")
        if self.axes.time_dim is not None:
            domains[self.axes.time_dim] = "time"
        return domains


@dataclass(frozen=True, eq=False)
class Comparison:
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
        cls, part: str, axes: Axes, valued: Layout, labelled: Cells | None, deployed: Cells | None
    ) -> Comparison:
        """Measure distances; `labelled` are all cells with a label and a value."""
        train, test = Cells(axes, valued, TRAIN), Cells(axes, valued, PARTS[part])
        around = None
        if deployed is None or labelled is None:
            measured, unknown = compare_axes(axes, None)
            by_curve = {f"{part} → train": distances(test, train, measured)}
        else:
            measured, unknown = compare_axes(axes, deployed.axes)
            by_curve = {f"{part} → train": distances(test, train, measured)}
            trained, around = _training_cells(deployed, train, labelled, measured)
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

    def distances(self, curve: str) -> dict[str, Floats]:
        """Return the distances of the cells of a curve by domain."""
        return {domain: by[curve] for domain, (_, by) in self.curves.items() if curve in by}


def compare_axes(axes: Axes, other: Axes | None) -> tuple[set[str], dict[str, str]]:
    """Return which of "space" and "time" can be measured between two cubes, and why not others."""
    cubes = {"the cube": axes}
    if other is not None:
        cubes["the deployment"] = other
    unknown = _lacking_axes(cubes)
    frames = {name: cube.positions.frame for name, cube in cubes.items() if cube.positions}
    if len(set(frames.values())) > 1:
        of_cube, of_deployment = frames.values()
        why = f"the cube has {of_cube}, but the deployment has {of_deployment}"
        unknown.setdefault("space", why)
    has = {"space": axes.positions is not None, "time": axes.steps > 0}
    return {domain for domain in has if has[domain] and domain not in unknown}, unknown


def _lacking_axes(cubes: dict[str, Axes]) -> dict[str, str]:
    """Return which of "space" and "time" some cube needs that one of them lacks, and why."""
    has_positions = any(cube.positions is not None for cube in cubes.values())
    needs_space = cubes["the cube"].sizes or has_positions
    # A cube alone is measured by its steps.
    needs_time = len(cubes) > 1 and any(cube.steps for cube in cubes.values())
    unknown: dict[str, str] = {}
    for name, cube in cubes.items():
        if needs_space and cube.positions is None:
            why = "has no latitude and longitude, nor x and y in metres or kilometres"
            unknown.setdefault("space", f"{name} {why}")
        if needs_time and cube.times is None:
            unknown.setdefault("time", f"{name} has no times")
    return unknown


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
