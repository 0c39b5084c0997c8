"""`predict_cube`: run a model on windows of a cube and blend the results into a cube."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

from ml4cube.core.axes import check_aligned
from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    RunError,
    check_flags,
    check_whole,
)
from ml4cube.core.grid import Block, Grid, SizesLike, cell_ids, parse_overlap, parse_sizes
from ml4cube.core.missing import bool_mask, check_mask, fill_gaps, find_gaps
from ml4cube.core.sample_spec import parse_names
from ml4cube.core.scaling import Scaling
from ml4cube.core.statistics import (
    Statistics,
    check_decoded,
    offset_and_scale,
    scale_values,
    unscale_values,
)
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.variables import cube_dims, cube_variables
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.prediction.blending import Blend, Cover, Tile
from ml4cube.prediction.cf import describe
from ml4cube.prediction.output import Output, StoreOutput, check_free, parse_path
from ml4cube.preprocessing.scaler import CubeScaler
from ml4cube.preprocessing.scaling import given_statistics
from ml4cube.progress import Stage
from ml4cube.sampling.request import source_chunks
from ml4cube.sampling.rescaling import scaling_of
from ml4cube.store.format import StoreMetadata
from ml4cube.training.ranks.dist import World, pick_device

Model = torch.nn.Module | Callable[[torch.Tensor], torch.Tensor]

_BATCH_VALUES = 2**18  # input values in a batch of default size: 1 MB in float32
_MASK = "_ml4cube_mask"  # name of a mask that is given as an array
_TILE_CELLS = (2**14, 2**20)  # a tile is a 64th of the cube, but never below or above these


def predict_cube(
    model: Model,
    ds: Any,
    store_or_stats: Any = None,
    *,
    out: str | os.PathLike[str] | None = None,
    features: str | Iterable[str] | None = None,
    targets: str | Iterable[str] | None = None,
    sample_size: SizesLike | None = None,
    overlap: SizesLike | float | None = None,
    mask: str | xr.DataArray | None = None,
    keep_gaps: bool = True,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> xr.Dataset:
    """Predict every cell of a cube with a trained model, block by block, in physical units.

    Windows cover the whole cube (the last one along a dim is shifted inward). They are scaled as
    in training and given to the model; the results are blended where windows overlap, and
    unscaled. Memory does not grow with the cube. Inside a process group (``ddp_init()``) the
    ranks share the blocks, and each writes its own.

    Parameters
    ----------
    model : torch.nn.Module or callable
        Takes a batch of shape (windows, features, *window), for points (windows, features), as
        from `PTXrDataset`, and returns (windows, targets, *window), with one target also
        (windows, *window). It runs in eval mode without gradients; its mode is restored.
    ds : Dataset, DataArray, str, path, zarr store or group, or Icechunk session
        Cube with all features, in any order of dims.
    store_or_stats : store path, PTXrDataset, Dataset, Statistics, CubeScaler, mapping or None
        How the training data were made. A sample store has features, targets, window, overlap,
        scaling, fill method and mask; the `PTXrDataset` of the training has the same, with the
        features and targets given to it. Statistics (``{var: [mean, std]}``) or a scaler have only
        the scaling. None: no scaling. Scaling per level, pixel or month is matched with the cube
        by coordinates and dates.
    out : str or path, optional
        Path of a new ``.zarr`` or ``.nc``, which appears only when complete. None: the cube is
        returned in memory.
    features : str or iterable of str, optional
        Input variables of the model, in its order. Default: those of the data set or store, else
        all numeric variables except targets.
    targets : str or iterable of str, optional
        Output variables of the model, in its order. Default: those of the data set or store, else
        the features (the model reconstructs its input).
    sample_size : mapping or pairs, optional
        Cells of a window by dim; dims left out have one cell. Default: as in the store, else
        single points.
    overlap : mapping, pairs or float, optional
        Fraction of a window that neighbours share, by dim. Default: as in the store.
    mask : str or DataArray, optional
        Cells to predict: a variable of `ds`, or an array along some of its dims. Cells outside
        become gaps. Default: the mask of the store, if it was applied.
    keep_gaps : bool, default True
        Make a cell a gap if the target is a feature and has a gap there, or if all features have.
        False keeps what the model returns for filled gaps.
    batch_size : int, optional
        Windows per call of the model. Default: as many as hold about 260,000 input values.
    device : str or torch.device, optional
        Device to compute on. Default: that of the model.
    overwrite : bool, default False
        Replace a predicted cube at `out`. Nothing else is ever replaced.
    progress : bool
        On rank 0, show a bar in terminals and notebooks, else write a line to stderr for each
        tenth of a long prediction.

    Returns
    -------
    Dataset
        The targets on the grid of `ds`, with its order of dims, coordinates, bounds and grid
        mapping, and the targets' attributes. If `out` is given, it is opened lazily; dates with a
        time zone are then in UTC, and types that files lack (periods, sets) are strings. Values
        have the targets' float dtype, else float32. NaN are gaps by `mask` or `keep_gaps`, and
        cells without a finite prediction.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        If an argument is invalid, the model's result has an unexpected shape, a gap would have to
        be filled as before a callback (see Notes), or the data set has coordinate features or a
        target offset, which are not supported yet.
    StoreExistsError
        If `out` exists.
    StoreError
        If the cube or the sample store cannot be read.
    RunError
        On all other ranks, if one rank fails.

    Notes
    -----
    A store does not contain the `callback` that it was made with. Apply it to `ds` before you
    predict; results have the units that the targets had after it. Training filled gaps before the
    callback, so fill those of `ds` first, except for ``"sample_mean"``, which is applied here. Use
    `mask` to make them gaps again.

    Examples
    --------
    >>> import numpy as np, torch, xarray as xr
    >>> ds = xr.Dataset({"t": (("time", "lat"), np.arange(10.0).reshape(2, 5), {"units": "K"})})
    >>> cube = predict_cube(
    ...     torch.nn.Identity(), ds, {"t": [4.5, 2.9]}, sample_size={"lat": 3}, overlap=0.5
    ... )
    >>> bool(np.allclose(cube.t, ds.t)), cube.t.attrs["units"]
    (True, 'K')
    """
    check_flags({"keep_gaps": keep_gaps, "overwrite": overwrite})
    cube = as_dataset(ds)
    empty = [str(dim) for dim in cube_dims(cube) if not cube.sizes[dim]]
    if empty:
        raise InvalidValueError(f"the cube has no cell along {empty}")
    if isinstance(mask, xr.DataArray):
        check_aligned("mask", mask, cube)
        cube, mask = cube.assign({_MASK: mask.variable}), _MASK
    recipe = _Recipe.of(cube, store_or_stats, features, targets, sample_size, overlap, mask)
    if batch_size is None:
        cells = math.prod(recipe.cover.size.values())
        batch_size = max(1, _BATCH_VALUES // (cells * len(recipe.features)))
    check_whole("batch_size", batch_size, 1)
    path = None if out is None else parse_path(out)
    if path is not None:
        check_free(path, overwrite)

    if not callable(model):
        raise InvalidTypeError(f"model must be a torch module or another callable, got {model!r}")
    world = World.current()
    dtype = _input_dtype(model, cube, recipe)
    least, most = _TILE_CELLS
    cells = min(max(math.prod(recipe.cover.shape.values()) // 64, least), most)
    largest = max((cube[name].variable for name in cube_variables(cube)[0]), key=lambda v: v.ndim)
    tile_size = recipe.cover.tile_size(source_chunks(largest), cells)
    default = np.dtype("f8" if dtype == torch.float64 else "f4")
    own = {n: cube[n].dtype if n in cube.data_vars else default for n in recipe.targets}
    dtypes = {n: d.newbyteorder("=") if d.kind == "f" else default for n, d in own.items()}
    template = describe(cube, dtypes, recipe.attrs, tile_size, recipe.about(model))
    grid = Grid.blocks(recipe.cover.shape, tile_size)
    output = Output(template, recipe.targets, world)
    if path is not None:
        output = StoreOutput(template, recipe.targets, world, path, overwrite)
    with _ready(model, dtype, device) as runner:
        reads = dict.fromkeys(filter(None, (*recipe.features, recipe.mask)))
        predictor = _Predictor(runner, recipe, CubeReader.of(cube, reads), keep_gaps)
        return _run(predictor, output, grid, batch_size, world, progress)


@dataclass(frozen=True)
class _Recipe:
    """Windows of a prediction, their scaling, and the treatment of gaps."""

    features: tuple[str, ...]
    targets: tuple[str, ...]
    cover: Cover
    window_dims: tuple[str, ...]
    scaling: Mapping[str, Scaling]
    mask: str | None
    mask_features: bool
    # Of the store, if one was given.
    metadata: StoreMetadata | None

    @classmethod
    def of(
        cls,
        cube: xr.Dataset,
        source: Any,
        features: str | Iterable[str] | None,
        targets: str | Iterable[str] | None,
        sample_size: SizesLike | None,
        overlap: SizesLike | float | None,
        mask: str | None,
    ) -> _Recipe:
        """Take from the source what was not given, and check everything against the cube."""
        if isinstance(source, PTXrDataset):
            features = source.features if features is None else features
            targets = (source.targets or source.features) if targets is None else targets
        metadata = _metadata(source)
        shape = {dim: cube.sizes[dim] for dim in cube_dims(cube)}
        outputs = parse_names("targets", targets) or (metadata.targets if metadata else ())
        inputs = parse_names("features", features)
        if not inputs and metadata:
            inputs = tuple(name for name in metadata.features if name not in outputs)
        if not inputs:
            inputs = _all_features(cube, outputs, mask)
        unknown = [n for n in (*inputs, *outputs) if metadata and n not in metadata.variables]
        if metadata and unknown:
            raise InvalidValueError(
                f"unknown variables {unknown}; the store has {list(metadata.variables)}; rename "
                "variables of the cube, or give statistics"
            )
        spec = metadata.spec if metadata else None
        if spec is not None and set(spec.dims) != set(shape):
            raise InvalidValueError(
                f"the dims of the cube must be those of the store, {spec.dims}, got "
                f"{tuple(shape)}; rename them"
            )
        sizes, window_dims = _windows(shape, metadata, sample_size)
        if overlap is None and spec is not None and sample_size is None:
            shared = dict(zip(spec.dims, spec.overlap, strict=True))
            cells = {dim: shared[dim] for dim in shape}
        else:
            cells = parse_overlap("overlap", overlap, sizes)
        applied = spec.filter_var if spec and spec.apply_mask and mask is None else None
        recipe = cls(
            features=inputs,
            targets=outputs or inputs,
            cover=Cover(shape, sizes, cells),
            window_dims=window_dims,
            scaling=_scaling(source if metadata is None else metadata, cube, (*inputs, *outputs)),
            mask=applied if applied in cube.variables else mask,
            mask_features=applied in cube.variables,
            metadata=metadata,
        )
        recipe._check(cube)
        if recipe.settings.get("callback") is None:  # a callback may change units
            recipe._warn_of_units(cube)
        return recipe

    @property
    def settings(self) -> Mapping[str, Any]:
        """Settings of the call that made the store."""
        return self.metadata.provenance.get("settings", {}) if self.metadata else {}

    @property
    def attrs(self) -> dict[str, dict[str, Any]]:
        """Attributes of the variables that the store was made from."""
        known = self.metadata.provenance.get("variables", {}) if self.metadata else {}
        return {name: dict(about.get("attrs", {})) for name, about in known.items()}

    def _check(self, cube: xr.Dataset) -> None:
        for argument, names in (("features", self.features), ("mask", (self.mask,))):
            for name in names:
                if name is not None and name not in cube.variables:
                    raise InvalidValueError(
                        f"{argument}: unknown variable {name!r}; the cube has "
                        f"{list(cube.data_vars)}"
                    )
                if name is not None and not set(cube[name].dims) <= set(self.cover.shape):
                    raise InvalidValueError(
                        f"{argument} must lie along {tuple(self.cover.shape)}, got {name!r} with "
                        f"dims {cube[name].dims}"
                    )
        if self.mask is not None:
            check_mask("mask", cube[self.mask].dtype)
        for name in self.features:
            if cube[name].dtype.kind not in "fiub":
                raise InvalidTypeError(
                    f"features must be numbers, got {name!r} of dtype {cube[name].dtype}"
                )
            check_decoded(name, cube[name].dtype, cube[name].attrs)

    def _warn_of_units(self, cube: xr.Dataset) -> None:
        """Warn if a feature has other units than in training."""
        for name in self.features:
            now, then = (
                attrs.get("units") for attrs in (cube[name].attrs, self.attrs.get(name, {}))
            )
            if now is not None and then is not None and str(now).strip() != str(then).strip():
                warnings.warn(
                    f"features: {name!r} has units {now!r} in this cube and had {then!r} in "
                    "training; unless both mean the same unit, convert the cube, or every "
                    "prediction is wrong",
                    stacklevel=4,
                )

    def about(self, model: Model) -> dict[str, Any]:
        """Return a description for the attributes of the predicted cube, as JSON values."""
        kind = type(model) if isinstance(model, torch.nn.Module) else model
        return {
            "model": getattr(kind, "__name__", type(model).__name__),
            "features": self.features,
            "targets": self.targets,
            "window": self.cover.size,
            "overlap": self.cover.overlap,
        }


def _metadata(source: Any) -> StoreMetadata | None:
    """Return the metadata of a store or data set; refuse samples that a cube cannot give."""
    if isinstance(source, Mapping | CubeScaler) and not isinstance(source, xr.Dataset):
        return None
    if not isinstance(source, PTXrDataset):
        return source if isinstance(source, StoreMetadata | None) else StoreMetadata.of(source)
    if source.metadata is None:
        raise InvalidValueError(
            "the data set was made from arrays without metadata; give statistics, features, "
            "targets and sample_size instead"
        )
    added = source.channels[len(source.features) :]
    if added or source.shifted:
        found = f"coordinate features ({', '.join(added)})" if added else "a target offset"
        raise InvalidValueError(
            f"the data set has {found}, which predict_cube does not support; run the model over "
            "PTXrDataset.take and use its to_dataset"
        )
    return source.metadata


def _scaling(source: Any, cube: xr.Dataset, used: Iterable[str]) -> dict[str, Scaling]:
    """Return offset and scale of every scaled variable, in every cell of the cube."""
    if source is None or (isinstance(source, StoreMetadata) and source.spec.scale_fn is None):
        return {}
    are_pairs = isinstance(source, Mapping) and not isinstance(source, Statistics)
    given, how = (source, "standardize") if are_pairs else given_statistics(source, "standardize")
    # statistics of unused variables need not match this cube
    chosen = {name: given[name] for name in used if name in given}
    if given and not chosen:
        raise InvalidValueError(
            f"store_or_stats has statistics of {list(given)}, but not of the features or targets "
            f"{list(used)}"
        )
    if are_pairs:
        return {
            name: Scaling(name, *offset_and_scale(f"store_or_stats[{name!r}]", pair, how))
            for name, pair in chosen.items()
        }
    return scaling_of(Statistics(chosen, given.part), how, cube, cube_dims(cube))


def _all_features(cube: xr.Dataset, targets: tuple[str, ...], mask: str | None) -> tuple[str, ...]:
    """Return all numeric variables except targets, mask and split label."""
    names, _ = cube_variables(cube, mask)
    found = tuple(n for n in names if n not in targets and cube[n].dtype.kind in "fiub")
    if not found:
        raise InvalidValueError(
            f"no feature is left for the targets {list(targets)}; the cube has "
            f"{list(cube.data_vars)}"
        )
    return found


def _windows(
    shape: dict[str, int], metadata: StoreMetadata | None, sample_size: SizesLike | None
) -> tuple[dict[str, int], tuple[str, ...]]:
    """Return the window size along every dim, and the window's dims in the model's order."""
    if sample_size is None and metadata is not None:
        spec = metadata.spec
        sizes = dict(zip(spec.dims, spec.size, strict=True))
        too_long = {dim: n for dim, n in sizes.items() if n > shape[dim]}
        if too_long:
            raise InvalidValueError(
                f"windows of the store have {too_long} cells, the cube only {shape}; predict a "
                "larger cube, or give sample_size if the model takes smaller windows"
            )
        return {dim: sizes[dim] for dim in shape}, spec.window_dims
    given = parse_sizes("sample_size", sample_size, shape) if sample_size is not None else {}
    sizes = {dim: given.get(dim, 1) for dim in shape}
    order = metadata.spec.dims if metadata is not None else tuple(shape)
    return sizes, tuple(dim for dim in order if sizes[dim] > 1)


def _input_dtype(model: Model, cube: xr.Dataset, recipe: _Recipe) -> torch.dtype:
    """Return the dtype of the model's parameters, or that of the cube if it has none."""
    if not isinstance(model, torch.nn.Module):
        return torch.float32
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            return tensor.dtype
    double = any(cube[name].dtype == np.float64 for name in recipe.features)
    return torch.float64 if double else torch.float32


def _run_model(
    model: Model, device: torch.device, dtype: torch.dtype, x: NDArray[np.float64]
) -> NDArray[np.float64]:
    """Call a model with a numpy array."""
    with torch.no_grad():
        y = model(torch.from_numpy(x).to(dtype).to(device))
    if not isinstance(y, torch.Tensor):
        raise InvalidTypeError(f"the model must return one tensor, got {type(y).__name__}; wrap it")
    result: NDArray[np.float64] = y.detach().to("cpu", torch.float64).numpy()
    return result


@contextmanager
def _ready(
    model: Model, dtype: torch.dtype, device: str | torch.device | None
) -> Iterator[Callable[[NDArray[np.float64]], NDArray[np.float64]]]:
    """Set the model to eval mode on the device; restore its mode and device afterwards."""
    if not isinstance(model, torch.nn.Module):
        yield partial(_run_model, model, pick_device(device or "cpu"), dtype)
        return
    # the forward of a DDP wrapper broadcasts buffers, which would hang if ranks have unequal
    # numbers of blocks
    module = model.module if isinstance(model, DistributedDataParallel) else model
    tensors = [*module.parameters(), *module.buffers()]
    original = tensors[0].device if tensors else torch.device("cpu")
    target = original if device is None else pick_device(device)
    modes = {part: part.training for part in module.modules()}
    try:
        yield partial(_run_model, module.to(target).eval(), target, dtype)
    finally:
        for part, mode in modes.items():
            part.training = mode
        module.to(original)


@dataclass(frozen=True)
class _Predictor:
    """Prediction of one block of cells at a time."""

    run: Callable[[NDArray[np.float64]], NDArray[np.float64]]
    recipe: _Recipe
    reader: CubeReader
    keep_gaps: bool

    def block(self, block: Block, batch_size: int) -> NDArray[np.float64]:
        """Return the targets of a block, shape (targets, *block), in physical units."""
        recipe = self.recipe
        tile = Tile(recipe.cover, block, recipe.window_dims)
        cells = self.reader.read(tile.box)
        values = {name: np.ascontiguousarray(cells[name]).reshape(-1) for name in recipe.features}
        inside = np.ones(values[recipe.features[0]].shape, bool)
        if recipe.mask is not None:
            inside = bool_mask(cells[recipe.mask]).reshape(-1)
        if recipe.mask_features:
            for name, array in values.items():
                if array.dtype.kind == "f":
                    values[name] = np.where(inside, array, array.dtype.type(np.nan))
        gap_cells = self._gap_cells(values, inside)
        wanted = ~np.logical_and.reduce(gap_cells)
        scaling = {}
        for name in recipe.scaling.keys() & values.keys():
            pair = recipe.scaling[name].in_box(tile.box, values[name].reshape(tile.shape))
            scaling[name] = [
                np.broadcast_to(one, tile.shape).reshape(-1) if np.ndim(one) else one
                for one in pair
            ]
        blend = Blend(len(recipe.targets), tile)
        for positions in tile.batches(batch_size):
            # skip windows of only gaps
            positions = positions[np.take(wanted, positions).any(axis=1)]
            if len(positions):
                blend.add(positions, self._windows(values, positions, tile, scaling))
        result = blend.block()
        gaps = gap_cells.reshape(-1, *tile.shape)[(slice(None), *tile.inner)]
        for target, name in enumerate(recipe.targets):
            if name in recipe.scaling:
                offset, scale = recipe.scaling[name].in_box(block.slices)
                result[target] = unscale_values(result[target], offset, scale)
            result[target][gaps[target]] = np.nan
        return result

    def _gap_cells(
        self, values: Mapping[str, NDArray[Any]], inside: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return the cells of the box that become gaps, for each target."""
        targets = self.recipe.targets
        if not self.keep_gaps:
            return np.broadcast_to(~inside, (len(targets), inside.size))
        gaps = {name: find_gaps(array) for name, array in values.items()}
        everywhere = np.stack(list(gaps.values())).all(axis=0)
        return np.stack([~inside | gaps.get(name, everywhere) for name in targets])

    def _windows(
        self,
        values: Mapping[str, NDArray[Any]],
        positions: NDArray[np.intp],
        tile: Tile,
        scaling: Mapping[str, Sequence[Any]],
    ) -> NDArray[np.float64]:
        """Predict some windows; return the scaled results, shape (windows, targets, cells)."""
        recipe = self.recipe
        x = np.empty((len(positions), len(recipe.features), positions.shape[1]))
        for channel, (name, array) in enumerate(values.items()):
            samples = self._filled(name, array[positions], tile, positions)
            offset, scale = (
                one[positions] if np.ndim(one) else one for one in scaling.get(name, (0.0, 1.0))
            )
            x[:, channel] = scale_values(samples, offset, scale, np.float64)
        x = x.reshape(*x.shape[:2], *tile.window_shape)
        try:
            y = self.run(x)
        except Exception as error:
            window = {dim: recipe.cover.size[dim] for dim in recipe.window_dims}
            error.add_note(
                f"the model was given X of shape {x.shape}: features {list(recipe.features)}, "
                f"windows {window or 'of a single point (sample_size= makes larger ones)'}"
            )
            raise
        expected = (len(x), len(recipe.targets), *tile.window_shape)
        if y.shape != expected and not (
            len(recipe.targets) == 1 and y.shape == (len(x), *tile.window_shape)
        ):
            raise InvalidValueError(
                f"the model must return shape {expected} for the targets {list(recipe.targets)} "
                f"and X of shape {x.shape}, got {y.shape}"
            )
        return y.reshape(len(x), len(recipe.targets), -1)

    def _filled(
        self, name: str, samples: NDArray[Any], tile: Tile, positions: NDArray[np.intp]
    ) -> NDArray[Any]:
        """Fill the gaps of samples as in training."""
        metadata, settings = self.recipe.metadata, self.recipe.settings
        method = metadata.spec.fill_of(name) if metadata else None
        if metadata is None or method is None or samples.dtype.kind != "f":
            return samples
        if settings.get("callback") is not None:
            _check_filled(name, samples, method, settings["callback"])
        # stores of older versions have only the statistics of the samples
        known = (metadata.fill or metadata.statistics).get(name)
        ids = cell_ids(self.recipe.cover.shape, tile.box).ravel() if method == "noise" else None
        return fill_gaps(
            samples,
            method,
            train_stats=known,
            const=metadata.spec.const,
            seed=settings.get("seed", 0),
            positions=None if ids is None else ids[positions],
            variable=name,
        )


def _check_filled(name: str, samples: NDArray[Any], method: str, callback: str) -> None:
    """Refuse gaps that training filled before a callback, maybe in other units."""
    gaps = find_gaps(samples)
    if (gaps.all(axis=1) if method == "sample_mean" else gaps).any():
        raise InvalidValueError(
            f"{name!r} has gaps, which training filled ({method!r}) before the callback "
            f"{callback!r}; fill them in ds before you apply the callback to it, and give mask= to "
            "make them gaps again"
        )


@contextmanager
def _together(world: World) -> Iterator[None]:
    """Fail on every rank if one fails."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    reports = world.gather_objects(failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, report in enumerate(reports):
        if report is not None:
            raise RunError(f"prediction stopped because rank {rank} failed: {report}")


def _run(
    predictor: _Predictor,
    output: Output,
    grid: Grid,
    batch_size: int,
    world: World,
    progress: bool,
) -> xr.Dataset:
    """Predict all blocks, shared among the ranks."""
    targets = predictor.recipe.targets
    try:
        with _together(world):
            if world.is_main:
                output.begin()
        with _together(world):
            mine = range(world.rank, len(grid), world.size)
            show = progress and world.is_main
            with Stage("predicting", len(mine), "blocks", show=show) as stage:
                for id in mine:
                    block = grid.block(id)
                    values = predictor.block(block, batch_size)
                    cells = (xr.Variable(block.dims, one) for one in values)
                    output.write(block.slices, dict(zip(targets, cells, strict=True)))
                    stage.update()
        with _together(world):
            if world.is_main:
                output.publish()
    except BaseException:
        if world.is_main:
            output.discard()
        raise
    return output.result()
