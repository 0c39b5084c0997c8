"""Place the windows of a model on a cube, as the model was trained on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import xarray as xr

from ml4cube.core.axes import is_time
from ml4cube.core.errors import InvalidValueError, check_whole
from ml4cube.core.grid import SizesLike, parse_overlap, parse_sizes
from ml4cube.core.time_steps import WindowsOverTime
from ml4cube.cube.coordinates import find_time_dim, role_of
from ml4cube.cube.variables import cube_dims
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.loading.lead_time import warn_of_uneven_steps
from ml4cube.prediction.source import Source
from ml4cube.prediction.windows.dates import axis_of, choose_inits, extended
from ml4cube.prediction.windows.geometry import DimWindows, Windows
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import DimLead


@dataclass(frozen=True, kw_only=True)
class WindowOptions:
    """Arguments of `predict_cube` about windows; it documents them."""

    sample_size: SizesLike | None
    overlap: SizesLike | float | None
    init_times: Any
    rollout: int

    def __post_init__(self) -> None:
        """Check the arguments that need no cube."""
        check_whole("rollout", self.rollout, 1)


@dataclass(frozen=True)
class _Trained:
    """Windows that a model was trained on, by dim of the cube; along others they have one cell."""

    # Cells of a window of inputs, and cells that neighbours share.
    size: Mapping[str, int]
    overlap: Mapping[str, int]
    # First target cell in a window and number of target cells, where these differ from the inputs.
    targets: Mapping[str, tuple[int, int]]
    # Dims of a window of inputs and of targets, in the model's order.
    input_order: tuple[str, ...]
    target_order: tuple[str, ...]

    @classmethod
    def of(cls, shape: Mapping[str, int], source: Source) -> _Trained:
        """Return the windows of a data set or store; without one, single points."""
        recipe = source.recipe
        if source.data is not None and source.data.shifted:
            return cls._of_shifted(source.data, recipe)
        size = dict(zip(recipe.dims, recipe.size, strict=True))
        overlap = dict(zip(recipe.dims, recipe.overlap, strict=True))
        return cls(size, overlap, {}, recipe.window_dims, recipe.window_dims)

    @classmethod
    def _of_shifted(cls, data: PTXrDataset, recipe: Recipe) -> _Trained:
        """Return the windows of a data set whose targets lie elsewhere than the inputs."""
        assert data.lead is not None
        cube_dim = data._source.cube_dim
        x, y, *_ = data.step_sizes
        inputs = {cube_dim(dim): n for dim, n in x.items()}
        target_window = {cube_dim(dim): n for dim, n in y.items()}
        targets = {}
        for sample_dim, (offset, _) in data.lead.items():
            dim = cube_dim(sample_dim)
            n = target_window.get(dim, 1)
            if (offset, n) != (0, inputs.get(dim, 1)):
                targets[dim] = (offset, n)
        overlap = dict(zip(recipe.dims, recipe.overlap, strict=True))
        overlap = {dim: n for dim, n in overlap.items() if dim not in targets}
        size = {dim: inputs.get(dim, 1) for dim in recipe.dims}
        return cls(size, overlap, targets, tuple(inputs), tuple(target_window))


def place_windows(
    cube: xr.Dataset, source: Source, options: WindowOptions, forcing_dims: Collection[str]
) -> tuple[Windows, dict[str, xr.Variable]]:
    """Return windows over a cube, and its axes, that of a lead time with later dates.

    `forcing_dims` are the dims of features that a rollout cannot predict.
    """
    shape = {dim: cube.sizes[dim] for dim in cube_dims(cube)}
    trained = _Trained.of(shape, source)
    size, overlap = _sizes(shape, trained, options)
    axes = {dim: cube[dim].variable for dim in shape if dim in cube.coords}
    lead_dim = _lead_dim(trained, size, axes)
    if lead_dim is None:
        _refuse_forecast(options)
    else:
        _check_is_time(lead_dim, cube, shape)
    dims = {}
    for dim, n in shape.items():
        offset, target_size = trained.targets.get(dim, (0, size[dim]))
        if dim != lead_dim:
            dims[dim] = DimWindows.covering(n, size[dim], overlap[dim], offset, target_size)
            continue
        axis, lead = axis_of(cube, dim), DimLead(offset, size[dim], target_size)
        warn_of_uneven_steps({dim: lead}, {dim: axis})
        dims[dim] = _lead_windows(axis, lead, options, dim in forcing_dims)
        last = int(dims[dim].starts[-1]) + offset + dims[dim].target_size
        axes[dim] = extended(axis, last - n)
    input_steps = {dim: (windows.starts, windows.known_size) for dim, windows in dims.items()}
    WindowsOverTime.of(input_steps, {dim: axis.values for dim, axis in axes.items()}).warn()
    windows = Windows(dims, *_orders(trained, size), rollout=options.rollout)
    return windows.single(_only_targets(windows)), axes


def _orders(trained: _Trained, size: Mapping[str, int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the dims of a window of inputs and of targets, in the model's order.

    That is the order of the store, also of dims that it keeps with one cell.
    """
    kept = {dim for dim in trained.input_order if trained.size[dim] == 1}
    dims = dict.fromkeys((*trained.input_order, *size))
    input_order = tuple(dim for dim in dims if size[dim] > 1 or dim in kept)
    of_targets = {dim for dim in trained.target_order if dim in trained.targets}
    of_targets |= {dim for dim in input_order if dim not in trained.targets}
    dims = dict.fromkeys((*trained.target_order, *input_order))
    return input_order, tuple(dim for dim in dims if dim in of_targets)


def _only_targets(windows: Windows) -> list[str]:
    """Return the dims with targets at one cell of the only window, for which there is no use."""
    only = []
    for dim, of_dim in windows.dims.items():
        has_axis = dim in windows.target_order or of_dim.is_lead
        if not has_axis and of_dim.size > 1 and len(of_dim.starts) == 1:
            only.append(dim)
    return only


def _sizes(
    shape: Mapping[str, int], trained: _Trained, options: WindowOptions
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the cells of a window of inputs, and those that neighbouring targets share."""
    size = {dim: trained.size[dim] for dim in shape}
    if options.sample_size is None:
        too_long = {dim: n for dim, n in trained.size.items() if n > shape[dim]}
        if too_long:
            raise InvalidValueError(
                f"windows of the store have {too_long} cells, the cube only {dict(shape)}; predict "
                "a larger cube, or give sample_size if the model takes smaller windows"
            )
        if options.overlap is None:
            return size, {dim: trained.overlap.get(dim, 0) for dim in shape}
    else:
        sample_size = parse_sizes("sample_size", options.sample_size, shape)
        for dim, n in sample_size.items():
            if dim in trained.targets and n != trained.size[dim]:
                raise InvalidValueError(
                    f"sample_size along {dim!r}, where targets have an offset, must be that of the "
                    f"training, {trained.size[dim]}, got {n}"
                )
        size |= {dim: sample_size.get(dim, 1) for dim in shape if dim not in trained.targets}
    target_size = dict(size)
    target_size |= {dim: n for dim, (_, n) in trained.targets.items()}
    return size, parse_overlap("overlap", options.overlap, target_size)


def _lead_dim(
    trained: _Trained, size: Mapping[str, int], axes: Mapping[str, xr.Variable]
) -> str | None:
    """Return the dim along which targets have a lead time; along others they lie in the window."""
    dims = []
    for dim, (offset, n) in trained.targets.items():
        is_dated = dim in axes and is_time(axes[dim].values)
        if offset + n > size[dim] or is_dated:
            dims.append(dim)
    if len(dims) > 1:
        raise InvalidValueError(
            f"targets may lie beyond windows of inputs along one dim, got {dims}"
        )
    return dims[0] if dims else None


def _refuse_forecast(options: WindowOptions) -> None:
    """Refuse what only a data set with a lead time can do."""
    if options.init_times is not None:
        raise InvalidValueError(
            "init_times needs a data set with target_offset along time, got none"
        )
    if options.rollout > 1:
        raise InvalidValueError(
            f"rollout={options.rollout} needs a data set with target_offset along time, got none"
        )


def _check_is_time(lead_dim: str, cube: xr.Dataset, shape: Mapping[str, int]) -> None:
    """Refuse targets that lie beyond the inputs in space."""
    coords = list(cube.coords.values())
    time_dim = find_time_dim(coords, tuple(shape))
    if lead_dim == time_dim:
        return
    is_place = any(lead_dim in c.dims and role_of(c) in ("latitude", "longitude") for c in coords)
    if time_dim is not None or is_place:
        raise InvalidValueError(
            f"target_offset along {lead_dim!r} is no lead time: targets must lie beyond the inputs "
            "along time, or in their cells"
        )


def _lead_windows(
    axis: xr.Variable, lead: DimLead, options: WindowOptions, has_forcings: bool
) -> DimWindows:
    """Return windows of a forecast: one for each start that is asked for."""
    further = (options.rollout - 1) * lead.target_size
    last = len(axis) - 1
    if has_forcings:
        last -= further
    inits = choose_inits(axis, options.init_times, lead.input_size - 1, last)
    return DimWindows(
        len(axis),
        lead.input_size + further,
        inits - (lead.input_size - 1),
        lead.offset,
        lead.target_size + further,
        n_later=further,
        is_lead=True,
    )
