"""Place the windows of a model on a cube, as the model was trained on."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import xarray as xr

from ml4cube.core.axes import is_time
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.grid import parse_overlap, parse_sizes
from ml4cube.core.sample_spec import SampleSpec
from ml4cube.core.time_steps import WindowsOverTime
from ml4cube.cube.coordinates import find_time_dim, role_of
from ml4cube.cube.variables import cube_dims
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.loading.lead_time import warn_of_uneven_steps
from ml4cube.prediction.options import PredictionOptions
from ml4cube.prediction.windows.dates import axis_of, choose_inits, extended
from ml4cube.prediction.windows.geometry import DimWindows, Windows
from ml4cube.recipe.roles import DimLead
from ml4cube.store.format import StoreMetadata
from ml4cube.training.inputs.rollout import Rollout


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
    def of(cls, shape: Mapping[str, int], source: PTXrDataset | StoreMetadata | None) -> _Trained:
        """Return the windows of a data set or store; without one, single points."""
        metadata = source.metadata if isinstance(source, PTXrDataset) else source
        spec = metadata.spec if metadata else SampleSpec.parse(dict(shape), ["any"])
        if isinstance(source, PTXrDataset) and source.shifted:
            return cls._of_shifted(source, spec)
        size = dict(zip(spec.dims, spec.size, strict=True))
        overlap = dict(zip(spec.dims, spec.overlap, strict=True))
        return cls(size, overlap, {}, spec.window_dims, spec.window_dims)

    @classmethod
    def _of_shifted(cls, data: PTXrDataset, spec: SampleSpec) -> _Trained:
        source = data._source
        x, y = (
            {source.cube_dim(dim): n for dim, n in sizes.items()} for sizes in data.step_sizes[:2]
        )
        assert data.lead is not None
        targets = {}
        for sample_dim, (offset, _) in data.lead.items():
            dim = source.cube_dim(sample_dim)
            if (offset, y.get(dim, 1)) != (0, x.get(dim, 1)):
                targets[dim] = (offset, y.get(dim, 1))
        known = dict(zip(spec.dims, spec.overlap, strict=True))
        overlap = {dim: known[dim] for dim in known if dim not in targets}
        return cls({d: x.get(d, 1) for d in spec.dims}, overlap, targets, tuple(x), tuple(y))


def place_windows(
    cube: xr.Dataset,
    source: PTXrDataset | StoreMetadata | None,
    options: PredictionOptions,
    forcing_dims: Collection[str],
) -> tuple[Windows, dict[str, xr.Variable]]:
    """Return windows over a cube, and its axes, that of a lead time with later dates.

    `forcing_dims` are the dims of features that a rollout cannot predict.
    """
    shape = {dim: cube.sizes[dim] for dim in cube_dims(cube)}
    trained = _Trained.of(shape, source)
    size, overlap = _sizes(shape, trained, options)
    axes = {dim: cube[dim].variable for dim in shape if dim in cube.coords}
    lead_dim = _lead_dim(trained, size, axes)
    _check_is_time(lead_dim, cube, shape)
    if lead_dim is None and options.init_times is not None:
        raise InvalidValueError(
            "init_times needs a data set with target_offset along time, got none"
        )
    if lead_dim is None and options.rollout > 1:
        raise InvalidValueError(
            f"rollout={options.rollout} needs a data set with target_offset along time, got none"
        )
    dims = {}
    for dim, n in shape.items():
        offset, target_size = trained.targets.get(dim, (0, size[dim]))
        if dim == lead_dim:
            axis = axis_of(cube, dim)
            warn_of_uneven_steps({dim: DimLead(offset, size[dim], target_size)}, {dim: axis})
            dims[dim] = _lead_windows(
                axis, size[dim], offset, target_size, options, dim in forcing_dims
            )
            last = int(dims[dim].starts[-1]) + offset + dims[dim].target_size
            axes[dim] = extended(axis, last - n)
        else:
            dims[dim] = DimWindows.covering(n, size[dim], overlap[dim], offset, target_size)
    # The model takes dims in the order of the store, also those that it keeps with one cell.
    kept = {dim for dim in trained.input_order if trained.size[dim] == 1}
    order = dict.fromkeys((*trained.input_order, *shape))
    input_order = tuple(dim for dim in order if size[dim] > 1 or dim in kept)
    target_order = tuple(
        dim
        for dim in dict.fromkeys((*trained.target_order, *input_order))
        if dim in (trained.target_order if dim in trained.targets else input_order)
    )
    known = {dim: (along.starts, along.known_size) for dim, along in dims.items()}
    WindowsOverTime.of(known, {dim: axis.values for dim, axis in axes.items()}).warn()
    windows = Windows(dims, input_order, target_order)
    if options.rollout > 1 and isinstance(source, PTXrDataset):
        lead_axis = Rollout.of(source).axis - 2  # after samples and channels
        windows = replace(windows, rollout=options.rollout, lead_axis=lead_axis)
    # Targets at one cell of the only window: the result has no use for the dim.
    only = [
        dim
        for dim, along in dims.items()
        if dim not in target_order
        and not along.is_lead
        and along.size > 1
        and len(along.starts) == 1
    ]
    return windows.single(only), axes


def _sizes(
    shape: Mapping[str, int], trained: _Trained, options: PredictionOptions
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the cells of a window of inputs, and those that neighbouring targets share."""
    if options.sample_size is not None:
        given = parse_sizes("sample_size", options.sample_size, shape)
        for dim, n in given.items():
            if dim in trained.targets and n != trained.size[dim]:
                raise InvalidValueError(
                    f"sample_size along {dim!r}, where targets have an offset, must be that of the "
                    f"training, {trained.size[dim]}, got {n}"
                )
        size = {d: trained.size[d] if d in trained.targets else given.get(d, 1) for d in shape}
    else:
        too_long = {dim: n for dim, n in trained.size.items() if n > shape[dim]}
        if too_long:
            raise InvalidValueError(
                f"windows of the store have {too_long} cells, the cube only {dict(shape)}; predict "
                "a larger cube, or give sample_size if the model takes smaller windows"
            )
        size = {dim: trained.size[dim] for dim in shape}
    target_size = {dim: trained.targets.get(dim, (0, n))[1] for dim, n in size.items()}
    if options.sample_size is None and options.overlap is None:
        return size, {dim: trained.overlap.get(dim, 0) for dim in shape}
    return size, parse_overlap("overlap", options.overlap, target_size)


def _lead_dim(
    trained: _Trained, size: Mapping[str, int], axes: Mapping[str, xr.Variable]
) -> str | None:
    """Return the dim along which targets have a lead time; along others they lie in the window."""
    found = [
        dim
        for dim, (offset, n) in trained.targets.items()
        if offset + n > size[dim] or (dim in axes and is_time(axes[dim].values))
    ]
    if len(found) > 1:
        raise InvalidValueError(
            f"targets may lie beyond windows of inputs along one dim, got {found}"
        )
    return found[0] if found else None


def _check_is_time(lead_dim: str | None, cube: xr.Dataset, shape: Mapping[str, int]) -> None:
    """Refuse targets that lie beyond the inputs in space."""
    coords = list(cube.coords.values())
    time_dim = find_time_dim(coords, tuple(shape))
    if lead_dim in (None, time_dim):
        return
    is_place = any(lead_dim in c.dims and role_of(c) in ("latitude", "longitude") for c in coords)
    if time_dim is not None or is_place:
        raise InvalidValueError(
            f"target_offset along {lead_dim!r} is no lead time: targets must lie beyond the inputs "
            "along time, or in their cells"
        )


def _lead_windows(
    axis: xr.Variable,
    size: int,
    offset: int,
    target_size: int,
    options: PredictionOptions,
    has_forcings: bool,
) -> DimWindows:
    """Return windows of a forecast: one for each start that is asked for."""
    further = (options.rollout - 1) * target_size
    last = len(axis) - 1 - (further if has_forcings else 0)
    inits = choose_inits(axis, options.init_times, size - 1, last)
    return DimWindows(
        len(axis),
        size + further,
        inits - (size - 1),
        offset,
        target_size + further,
        n_later=further,
        is_lead=True,
    )
