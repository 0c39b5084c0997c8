"""`predict_cube`: run a model on windows of a cube and blend the results into a cube."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
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
    check_flags,
    check_whole,
)
from ml4cube.core.grid import Block, Grid, SizesLike
from ml4cube.core.missing import bool_mask, fill_gaps, find_gaps, set_gaps
from ml4cube.core.statistics import scale_values, unscale_values
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.variables import cube_dims, cube_variables
from ml4cube.prediction.blending import Blend, Cover, Tile
from ml4cube.prediction.cf import empty_prediction
from ml4cube.prediction.identity import call_id
from ml4cube.prediction.output.memory import Output
from ml4cube.prediction.output.opening import make_output, output_location
from ml4cube.prediction.ranks import all_ranks_or_none
from ml4cube.prediction.spec import PredictionSpec
from ml4cube.progress import Stage
from ml4cube.sampling.request import source_chunks
from ml4cube.training.ranks.dist import World, pick_device

Model = torch.nn.Module | Callable[[torch.Tensor], torch.Tensor]
RunModel = Callable[[NDArray[np.float64]], NDArray[np.float64]]
_OffsetScale = tuple[Any, Any]

_BATCH_VALUES = 2**18  # input values in a batch of default size: 1 MB in float32
_MASK = "_ml4cube_mask"  # name of a mask that is given as an array
# A block is a 64th of the cube, within these if windows are not larger.
_BLOCK_CELLS = (2**14, 2**20)


def predict_cube(
    model: Model,
    ds: Any,
    store_or_stats: Any = None,
    *,
    out: Any = None,
    features: str | Iterable[str] | None = None,
    targets: str | Iterable[str] | None = None,
    sample_size: SizesLike | None = None,
    overlap: SizesLike | float | None = None,
    mask: str | xr.DataArray | None = None,
    keep_gaps: bool = True,
    batch_size: int | None = None,
    device: str | torch.device | None = None,
    overwrite: bool = False,
    append: bool = False,
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
    out : path, URL, zarr store or group, or Icechunk session, optional
        Where to write a new zarr store, or with a path that ends in ``.nc`` a netCDF file, which
        appears only when complete. A killed run leaves its finished blocks in ``<out>.partial``,
        and the same call goes on from there. Of an Icechunk session you commit the result. None:
        the cube is returned in memory.
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
        Fraction of a window that neighbours share, by dim. Default: as in the store, but none if
        `sample_size` is given.
    mask : str or DataArray, optional
        Cells to predict: a variable of `ds`, or an array along some of its dims. Cells outside
        become gaps. Default: the mask of the store, if it was applied.
    keep_gaps : bool, default True
        Make a cell a gap if the target is a feature and has a gap there, or if all features have.
        False keeps what the model returns for filled gaps.
    batch_size : int, optional
        Windows per call of the model. Default: as many as hold about 260,000 input values.
    device : str or torch.device, optional
        Device to compute on. Default: that of the module; the CPU for another callable.
    overwrite : bool, default False
        Replace a predicted cube at `out`. Nothing else is ever replaced.
    append : bool, default False
        Append to the predicted cube at `out`, if it exists, the steps along time (for forecasts
        ``init_time``), which must be later than its last one. Readers see all new steps or none.
        If it has all of them already, nothing is done. Everything else must be as in the cube; the
        model may have been trained again. The result is the whole cube.
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
        If `out` exists, and is not to be replaced or appended to.
    StoreError
        If the cube or the sample store cannot be read, or `out` cannot be written.
    RunError
        If another run is writing `out`; on all other ranks, if one rank fails.

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
    check_flags({"keep_gaps": keep_gaps, "overwrite": overwrite, "append": append})
    cube = as_dataset(ds)
    empty = [str(dim) for dim in cube_dims(cube) if not cube.sizes[dim]]
    if empty:
        raise InvalidValueError(f"the cube has no cell along {empty}")
    if isinstance(mask, xr.DataArray):
        check_aligned("mask", mask, cube)
        cube, mask = cube.assign({_MASK: mask.variable}), _MASK
    spec = PredictionSpec.of(cube, store_or_stats, features, targets, sample_size, overlap, mask)
    if batch_size is None:
        window_values = math.prod(spec.cover.window.values()) * len(spec.features)
        batch_size = max(1, _BATCH_VALUES // window_values)
    check_whole("batch_size", batch_size, 1)
    location = output_location(out)
    if not callable(model):
        raise InvalidTypeError(f"model must be a torch module or another callable, got {model!r}")

    world = World.current()
    input_dtype = _input_dtype(model, cube, spec)
    dtypes = _target_dtypes(cube, spec.targets, input_dtype)
    block_size = _block_size(cube, spec.cover)
    description = _description(model, spec)
    template = empty_prediction(cube, dtypes, spec.source_attrs, block_size, description)
    read = dict.fromkeys(filter(None, (*spec.features, spec.mask, spec.feature_mask)))
    settings = [spec, keep_gaps, batch_size, str(device), append]
    id = call_id(model, cube, read, template, settings, location)
    output = make_output(
        location, template, spec.targets, world, overwrite=overwrite, append=append, call_id=id
    )
    if output.is_written:
        return output.result()
    with _model_runner(model, input_dtype, device) as run_model:
        reader = CubeReader.of(cube, read, tuple(spec.cover.shape))
        predictor = _BlockPredictor(run_model, spec, reader, keep_gaps, batch_size)
        blocks = Grid.blocks(spec.cover.shape, block_size)
        return _predict_blocks(predictor, blocks, output, world, progress)


def _input_dtype(model: Model, cube: xr.Dataset, spec: PredictionSpec) -> torch.dtype:
    """Return the dtype of a module's parameters, or if it has none, that of the features."""
    if not isinstance(model, torch.nn.Module):
        return torch.float32
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            return tensor.dtype
    double = any(cube[name].dtype == np.float64 for name in spec.features)
    return torch.float64 if double else torch.float32


def _target_dtypes(
    cube: xr.Dataset, targets: Iterable[str], input_dtype: torch.dtype
) -> dict[str, np.dtype[Any]]:
    """Return the dtype of each predicted target: its own in the cube if that is a float."""
    default = np.dtype("f8" if input_dtype == torch.float64 else "f4")
    dtypes = {}
    for name in targets:
        given = cube[name].dtype if name in cube.data_vars else default
        dtypes[name] = given.newbyteorder("=") if given.kind == "f" else default
    return dtypes


def _block_size(cube: xr.Dataset, cover: Cover) -> dict[str, int]:
    """Choose the size of the blocks that are predicted and written, near the cube's chunks."""
    fewest, most = _BLOCK_CELLS
    cells = min(max(math.prod(cover.shape.values()) // 64, fewest), most)
    variables = (cube[name].variable for name in cube_variables(cube)[0])
    largest = max(variables, key=lambda variable: variable.ndim)
    return cover.block_size(source_chunks(largest), cells)


def _description(model: Model, spec: PredictionSpec) -> dict[str, Any]:
    """Describe model and windows in JSON values, for the attributes of the predicted cube."""
    named = type(model) if isinstance(model, torch.nn.Module) else model
    return {
        "model": getattr(named, "__name__", type(model).__name__),
        "features": spec.features,
        "targets": spec.targets,
        "window": spec.cover.window,
        "overlap": spec.cover.overlap,
    }


@contextmanager
def _model_runner(
    model: Model, dtype: torch.dtype, device: str | torch.device | None
) -> Iterator[RunModel]:
    """Yield a function that runs the model in eval mode; restore its mode and device at the end."""
    if not isinstance(model, torch.nn.Module):
        yield partial(_run_model, model, pick_device(device or "cpu"), dtype)
        return
    # The forward of a DDP wrapper broadcasts buffers, which would hang if ranks have unequal
    # numbers of blocks.
    module = model.module if isinstance(model, DistributedDataParallel) else model
    tensors = [*module.parameters(), *module.buffers()]
    original_device = tensors[0].device if tensors else torch.device("cpu")
    target_device = original_device if device is None else pick_device(device)
    training_modes = {part: part.training for part in module.modules()}
    try:
        yield partial(_run_model, module.to(target_device).eval(), target_device, dtype)
    finally:
        for part, mode in training_modes.items():
            part.training = mode
        module.to(original_device)


def _run_model(
    model: Model, device: torch.device, dtype: torch.dtype, x: NDArray[np.float64]
) -> NDArray[np.float64]:
    with torch.no_grad():
        y = model(torch.from_numpy(x).to(dtype).to(device))
    if not isinstance(y, torch.Tensor):
        raise InvalidTypeError(f"the model must return one tensor, got {type(y).__name__}; wrap it")
    result: NDArray[np.float64] = y.detach().to("cpu", torch.float64).numpy()
    return result


def _predict_blocks(
    predictor: _BlockPredictor, blocks: Grid, output: Output, world: World, progress: bool
) -> xr.Dataset:
    """Predict all blocks, shared among the ranks."""
    try:
        done = output.begin()
        with all_ranks_or_none(world):
            ids = [id for id in range(len(blocks)) if id not in done][world.rank :: world.size]
            show = progress and world.is_main
            with Stage("predicting", len(ids), "blocks", show=show) as stage:
                for id in ids:
                    block = blocks.block(id)
                    values = predictor.predict(block)
                    output.write(id, {name: (block.slices, v) for name, v in values.items()})
                    stage.update()
        with all_ranks_or_none(world):
            if world.is_main:
                output.publish()
    except BaseException as error:
        if world.is_main:
            output.discard(error)
        raise
    return output.result()


@dataclass(frozen=True)
class _BlockPredictor:
    """Prediction of one block of cells at a time.

    The windows of a block cover a box, somewhat larger than the block. Arrays of cells are
    flattened: row-major over the box.
    """

    run_model: RunModel
    spec: PredictionSpec
    reader: CubeReader
    keep_gaps: bool
    batch_size: int

    def predict(self, block: Block) -> dict[str, xr.Variable]:
        """Return the targets in a block, in physical units."""
        spec = self.spec
        tile = Tile(spec.cover, block, spec.window_dims)
        values, in_mask = self._read(tile)
        gaps = self._gaps(values, in_mask)
        predictable = ~np.logical_and.reduce(gaps)
        scaling = self._scaling(values, tile)
        blend = Blend(len(spec.targets), tile)
        for positions in tile.batches(self.batch_size):
            # Windows without a cell to predict are skipped.
            positions = positions[predictable[positions].any(axis=1)]
            if len(positions):
                blend.add(positions, self._predict_windows(values, positions, tile, scaling))
        means = blend.mean_in_block()
        gaps_in_block = tile.in_block(gaps)
        for target, name in enumerate(spec.targets):
            if name in spec.scaling:
                offset, scale = spec.scaling[name].in_box(block.slices)
                means[target] = unscale_values(means[target], offset, scale)
            means[target][gaps_in_block[target]] = np.nan
        return {n: xr.Variable(block.dims, m) for n, m in zip(spec.targets, means, strict=True)}

    def _read(self, tile: Tile) -> tuple[dict[str, NDArray[Any]], NDArray[np.bool_]]:
        """Return the features in the box of a tile, and its cells inside the mask."""
        spec = self.spec
        cells = {name: array.reshape(-1) for name, array in self.reader.read(tile.box).items()}
        values = {name: cells[name] for name in spec.features}
        if spec.feature_mask is not None:
            outside = ~bool_mask(cells[spec.feature_mask])
            for name, array in values.items():
                if array.dtype.kind == "f":
                    values[name] = set_gaps(array, outside)
        if spec.mask is None:
            return values, np.ones(math.prod(tile.shape), bool)
        return values, bool_mask(cells[spec.mask])

    def _gaps(
        self, values: Mapping[str, NDArray[Any]], in_mask: NDArray[np.bool_]
    ) -> NDArray[np.bool_]:
        """Return the cells of the box that become gaps, shape (targets, cells)."""
        targets = self.spec.targets
        if not self.keep_gaps:
            return np.broadcast_to(~in_mask, (len(targets), in_mask.size))
        gaps = {name: find_gaps(array) for name, array in values.items()}
        in_all_features = np.stack(list(gaps.values())).all(axis=0)
        return np.stack([~in_mask | gaps.get(name, in_all_features) for name in targets])

    def _scaling(self, values: Mapping[str, NDArray[Any]], tile: Tile) -> dict[str, _OffsetScale]:
        """Return offset and scale of each feature: numbers, or one for each cell of the box."""
        scaling = {}
        for name in self.spec.scaling.keys() & values.keys():
            # The values show whether any cell lacks statistics, which is refused.
            pair = self.spec.scaling[name].in_box(tile.box, values[name].reshape(tile.shape))
            offset, scale = (
                np.broadcast_to(number, tile.shape).reshape(-1) if np.ndim(number) else number
                for number in pair
            )
            scaling[name] = offset, scale
        return scaling

    def _predict_windows(
        self,
        values: Mapping[str, NDArray[Any]],
        positions: NDArray[np.intp],
        tile: Tile,
        scaling: Mapping[str, _OffsetScale],
    ) -> NDArray[np.float64]:
        """Return the scaled targets of some windows, shape (windows, targets, cells)."""
        spec = self.spec
        x = np.empty((len(positions), len(spec.features), positions.shape[1]))
        for channel, (name, array) in enumerate(values.items()):
            samples = self._fill(name, array[positions], tile, positions)
            offset, scale = (
                number[positions] if np.ndim(number) else number
                for number in scaling.get(name, (0.0, 1.0))
            )
            x[:, channel] = scale_values(samples, offset, scale, np.float64)
        x = x.reshape(*x.shape[:2], *tile.window_shape)
        try:
            y = self.run_model(x)
        except Exception as error:
            window = {dim: spec.cover.window[dim] for dim in spec.window_dims}
            error.add_note(
                f"the model was given X of shape {x.shape}: features {list(spec.features)}, "
                f"windows {window or 'of a single point (sample_size= makes larger ones)'}"
            )
            raise
        expected = (len(x), len(spec.targets), *tile.window_shape)
        if y.shape != expected and not (
            len(spec.targets) == 1 and y.shape == (len(x), *tile.window_shape)
        ):
            raise InvalidValueError(
                f"the model must return shape {expected} for the targets {list(spec.targets)} "
                f"and X of shape {x.shape}, got {y.shape}"
            )
        return y.reshape(len(x), len(spec.targets), -1)

    def _fill(
        self, name: str, samples: NDArray[Any], tile: Tile, positions: NDArray[np.intp]
    ) -> NDArray[Any]:
        """Fill the gaps of samples as in training."""
        metadata, settings = self.spec.metadata, self.spec.store_settings
        method = metadata.spec.fill_of(name) if metadata else None
        if metadata is None or method is None or samples.dtype.kind != "f":
            return samples
        if settings.get("callback") is not None:
            _check_filled(name, samples, method, settings["callback"])
        # `fill` has the statistics of train cells, before any callback; older stores lack it
        known = (metadata.fill or metadata.statistics).get(name)
        return fill_gaps(
            samples,
            method,
            train_stats=known,
            const=metadata.spec.const,
            seed=settings.get("seed", 0),
            positions=tile.cell_ids[positions] if method == "noise" else None,
            variable=name,
        )


def _check_filled(name: str, samples: NDArray[Any], method: str, callback: str) -> None:
    """Refuse gaps that training filled before a callback, maybe in other units.

    A sample's own mean has its units, but a sample of only gaps was filled with the train mean.
    """
    gaps = find_gaps(samples)
    if (gaps.all(axis=1) if method == "sample_mean" else gaps).any():
        raise InvalidValueError(
            f"{name!r} has gaps, which training filled ({method!r}) before the callback "
            f"{callback!r}; fill them in ds before you apply the callback to it, and give mask= to "
            "make them gaps again"
        )
