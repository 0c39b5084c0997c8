"""`predict_cube`: run a model on windows of a cube and blend the results into a cube."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import xarray as xr

from ml4cube.core.axes import check_aligned
from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_choice,
    check_flags,
    check_whole,
)
from ml4cube.core.grid import Grid, SizesLike
from ml4cube.cube.absent_chunks import heed_absent_chunks
from ml4cube.cube.engine import DaskCluster, Engine, check_client
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.variables import cube_dims, cube_variables
from ml4cube.prediction.block import BlockPredictor
from ml4cube.prediction.columns import check_columns, refuse_method
from ml4cube.prediction.identity import call_id, source_state
from ml4cube.prediction.models import (
    Model,
    classes_of,
    device_of,
    input_dtype,
    is_estimator,
    parse_models,
    running,
)
from ml4cube.prediction.output.memory import Block, Output
from ml4cube.prediction.output.opening import check_output, make_output, output_location
from ml4cube.prediction.results.layout import CLASS, Expected, Layout, Outputs, int_if_whole
from ml4cube.prediction.results.template import make_template
from ml4cube.prediction.source import Source
from ml4cube.prediction.spec import PredictionSpec, bind
from ml4cube.prediction.windows.placing import WindowOptions
from ml4cube.progress import Stage
from ml4cube.sampling.request import source_chunks
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.engine import RankEngine, all_ranks_or_none

# Bytes of inputs in a batch of default size: what a core's cache holds, and what keeps a GPU busy.
_CPU_BATCH_BYTES, _GPU_BATCH_BYTES = 2**19, 2**26
_MASK = "_ml4cube_mask"  # name of a mask that is given as an array
# A block is a 16th of the cube, within these if windows are not larger.
_BLOCK_CELLS = (2**14, 2**20)
_BYTES_PER_CELL = 64  # of a block, with its inputs and sums, that the most cells allow


def predict_cube(
    model: Model | Sequence[Model],
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
    outputs: str | Sequence[str] | Mapping[str, Any] | None = None,
    reduce: str | None = None,
    init_times: Any = None,
    rollout: int = 1,
    samples: int | None = None,
    seed: int = 42,
    client: Any = None,
    missing_chunks: str = "warn",
) -> xr.Dataset:
    """Predict every cell of a cube with a trained model, block by block, in physical units.

    Windows cover the whole cube (the last one along a dim is shifted inward). They are scaled as
    in training and given to the model; the results are blended where windows overlap, and
    unscaled. A data set with a target offset along time gives a forecast cube. Memory does not
    grow with the cube. Inside a process group (``ddp_init()``) the ranks share the blocks, and
    each writes its own.

    Parameters
    ----------
    model : torch.nn.Module, exported program, estimator, callable, or list of these
        Takes a batch of shape (windows, channels, *window), for points (windows, channels), as
        from `PTXrDataset`, and returns (windows, targets, *window of targets), with one target
        also (windows, *window of targets); or a dict of these by target, or a tuple in their
        order. Modules run in eval mode without gradients; their mode is restored. An estimator
        (scikit-learn, xgboost) gets every window as one row, and classifiers give probabilities;
        one that was fitted on named columns gets the features by these names, in any order.
        The members of a list give the mean and ``<target>_spread``, the standard deviation over
        members (as numpy's, divided by their number).
    ds : Dataset, DataArray, str, path, zarr store or group, or Icechunk session
        Cube with all features, in any order of dims.
    store_or_stats : store path, PTXrDataset, Dataset, Statistics, CubeScaler, mapping or None
        How the training data were made. A sample store has features, targets, window, overlap,
        scaling, fill method and mask; the `PTXrDataset` of the training has the same, with the
        features, targets, lead time and coordinate features given to it. Statistics
        (``{var: [mean, std]}``) or a scaler have only the scaling. None: no scaling. Scaling per
        level, pixel or month is matched with the cube by coordinates and dates.
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
        Windows per call of the model. Default: as many as hold 512 KiB of inputs on a CPU, which
        suits its cache, and 64 MiB on a GPU; a block of the cube has no more than its windows.
    device : str or torch.device, optional
        Device to compute on. Default: that of the module; the CPU for another callable.
    overwrite : bool, default False
        Replace a predicted cube at `out` that is as it was written: every file is read and compared
        with the list of hashes in it. Nothing else is ever replaced.
    append : bool, default False
        Append to the predicted cube at `out`, if it exists, the steps along time (for forecasts
        ``init_time``), which must be later than its last one. Readers see all new steps or none.
        If it has all of them already, nothing is done. Everything else must be as in the cube; the
        model may have been trained again. The result is the whole cube.
    progress : bool
        On rank 0, show a bar in terminals and notebooks, else write a line to stderr for each
        tenth of a long prediction.
    outputs : mapping, sequence of str or str, optional
        Several outputs per target: a dim with its coordinates, such as ``{"quantile": [0.05, 0.5,
        0.95]}``, ``{"member": 10}`` or ``{"class": ["forest", "water"]}``, which the model returns
        as an axis before the window; or names, such as ``["mean", "std"]``, which make variables
        ``<target>_mean``. Outputs named std, stddev, spread, sigma, scale or uncertainty are
        unscaled without the offset, var and variance by the squared scale.
    reduce : {"argmax", None}
        "argmax" returns the label of the most likely class instead of the probabilities, with the
        target's ``flag_values`` and ``flag_meanings``. Names of classes given by `outputs` are
        looked up in ``flag_meanings``; unknown names are numbered from 0.
    init_times : date, sequence of dates, slice or str, optional
        Dates of the last input step of each forecast, as in ``ds.sel(time=...)``. Default: every
        date from which the model can start.
    rollout : int, default 1
        Calls of the model for one forecast. The targets that it returns are inputs of the next
        call, other features that vary in time must be known in the future.
    samples : int, optional
        Runs of a model with dropout, which is active then (Monte Carlo dropout), or of a function
        that draws from torch's generator. The result has mean and ``<target>_spread``.
    seed : int, default 42
        Seed of `samples`. They do not depend on the number of ranks or workers.
    client : dask.distributed.Client or str, optional
        A cluster, or the address of its scheduler, whose workers predict the blocks, and write
        them to `out`, which they all must reach. The model is sent to them.
    missing_chunks : {"warn", "raise", "drop"}
        What to do about chunks of features and mask that the cube's zarr store lacks and that read
        as values: warn, refuse them, or take their cells for gaps, of integers too.

    Returns
    -------
    Dataset
        The targets on the grid of `ds`, with its order of dims, coordinates, bounds and grid
        mapping, and the targets' attributes. Forecasts have the dims ``init_time`` (the last input
        step) and ``lead_time`` instead of time, and the coordinate ``valid_time`` along both.
        Targets that are integers, or have CF's ``flag_values``, of which the model returns several
        numbers, are classes: their probabilities along the dim ``class``, with the labels in
        ``flag_values``. Numbers below 0, or that do not add up to 1 in each cell, are taken as
        logits: softmax turns each window's into probabilities, before these are blended and
        averaged. A model without targets that returns other channels than the features gives the
        variable ``embedding`` with the dim ``feature``. A result without axes of the window has
        one entry per window along those dims, or lacks them if there is one window.

        If `out` is given, the result is opened lazily; dates with a time zone are then in UTC, and
        types that files lack (periods, sets) are strings. Values have the targets' float dtype,
        else float32. NaN are gaps by `mask` or `keep_gaps`, and cells without a finite prediction.

    Raises
    ------
    InvalidValueError, InvalidTypeError
        If an argument is invalid, the model's result has an unexpected shape, an init time has too
        little past or future, or a gap would have to be filled as before a callback (see Notes).
    StoreExistsError
        If `out` exists, and is not to be replaced or appended to.
    StoreError
        If the cube or the sample store cannot be read, or `out` cannot be written; if files of the
        cube changed while it was read, so that the next call starts over.
    RunError
        If another run is writing `out`; on all other ranks, if one rank fails.

    Notes
    -----
    A store does not contain the `callback` that it was made with. Apply it to `ds` before you
    predict; results have the units that the targets had after it. Training filled gaps before the
    callback, so fill those of `ds` first, except for ``"sample_mean"``, which is applied here. Use
    `mask` to make them gaps again.

    In a forecast, a cell is a gap if the target, where it is a feature, or else every feature is a
    gap there at all input steps, or `mask` excludes it at all of them.

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
    check_choice("reduce", reduce, ["argmax", None])
    models = parse_models(model, samples)
    cube = as_dataset(ds)
    empty = [str(dim) for dim in cube_dims(cube) if not cube.sizes[dim]]
    if empty:
        raise InvalidValueError(f"the cube has no cell along {empty}")
    if isinstance(mask, xr.DataArray):
        check_aligned("mask", mask, cube)
        cube, mask = cube.assign({_MASK: mask.variable}), _MASK
    options = WindowOptions(
        sample_size=sample_size, overlap=overlap, init_times=init_times, rollout=rollout
    )
    spec = bind(cube, Source.of(store_or_stats), features, targets, mask, options)
    expected = _expected(spec, models, outputs, reduce)
    for member in models:
        refuse_method(member)
    for member in filter(is_estimator, models):
        check_columns(member, spec.channels, math.prod(spec.windows.input_window.values()))
    has_doubles = any(cube[name].dtype == np.float64 for name in spec.features)
    dtype = input_dtype(models, has_doubles)
    if batch_size is None:
        batch_size = _windows_per_call(spec, dtype, device_of(models[0], device))
    check_whole("batch_size", batch_size, 1)
    location = output_location(out)
    dtypes = {name: cube[name].dtype for name in spec.targets if name in cube.data_vars}
    names = (*spec.targets, *spec.windows.dims, *map(str, cube.coords))
    check_output(location, names, dtypes, overwrite=overwrite, append=append)

    read, cube_mask = spec.read_variables, spec.mask or spec.preparation.mask
    heeded = heed_absent_chunks(cube, read, missing_chunks, mask=cube_mask)
    source = source_state(cube, read, location)
    world = World.current("cpu")  # blocks travel in main memory
    check_client(client)
    if client is not None and world.size > 1:
        raise InvalidTypeError(
            f"client must be None in a group of {world.size} ranks, which share the blocks already"
        )
    with running(models, device, dtype, samples, seed, spec.channels) as members:
        predictor = BlockPredictor(
            members,
            spec,
            Layout.plain(expected),
            CubeReader.of(heeded.cube, read, tuple(spec.windows.dims)),
            keep_gaps,
            reduce,
            members.fixed_batch or batch_size,
        )
        predictor = _with_layout(predictor, cube, expected, world)
        blocks = _blocks(predictor, cube)
        template = make_template(
            cube,
            predictor.spec,
            predictor.layout,
            dict(zip(blocks.dims, blocks.tile, strict=True)),
            np.dtype("f8" if dtype == torch.float64 else "f4"),
            _description(models, spec, expected),
            with_spread=len(members) > 1,
            reduce=reduce,
        )
        names = tuple(str(name) for name, v in template.data_vars.items() if v.chunks is not None)
        # The template has the layout of the results.
        settings = [spec, keep_gaps, reduce, predictor.batch_size, str(device), samples, seed]
        settings += sorted(heeded.dropped)
        id = call_id(models, template, [*settings, append], location, source)
        output = make_output(
            location, template, names, world, overwrite=overwrite, append=append, call_id=id
        )
        if output.is_written:
            return output.result()
        engine = RankEngine(world) if client is None else DaskCluster(client)

        def check_source() -> None:
            if source is not None:
                source.check_unchanged(location)

        return _predict_blocks(predictor, blocks, output, world, engine, progress, check_source)


def _windows_per_call(spec: PredictionSpec, dtype: torch.dtype, device: torch.device) -> int:
    """Return the default number of windows per call of the model."""
    values = math.prod(spec.windows.input_window.values()) * len(spec.channels)
    window_bytes = values * dtype.itemsize
    budget = _CPU_BATCH_BYTES if device.type == "cpu" else _GPU_BATCH_BYTES
    return max(1, budget // window_bytes)


def _expected(
    spec: PredictionSpec, models: Sequence[Model], outputs: Any, reduce: str | None
) -> Expected:
    """Return what is known of the results of a model."""
    named = Outputs.parse(outputs, spec.windows.result_shape)
    labels = _labels_of(models)
    classes: dict[str, tuple[Any, ...] | None] = {}
    numbers = {}
    for target, flags in spec.classes.items():
        classes[target] = tuple(map(int_if_whole, flags)) or None
        numbers[target] = {name: label for label, name in flags.items()}
    if labels:  # of fitted models; they come before those that the flags of the targets list
        classes = dict.fromkeys(spec.targets, labels)
    if reduce == "argmax" and not classes and named.dim != CLASS:
        raise InvalidValueError(
            "reduce='argmax' needs targets that are classes: integers, or outputs={'class': ...}"
        )
    window = spec.windows.target_window
    return Expected(spec.targets, spec.are_targets_named, window, classes, named, numbers)


def _labels_of(models: Sequence[Model]) -> tuple[Any, ...] | None:
    """Return the labels of the classes that fitted classifiers know."""
    of_models = [classes_of(model) for model in models]
    labels = {tuple(classes.tolist()): None for classes in of_models if classes is not None}
    if len(labels) > 1:
        raise InvalidValueError(f"all members must have the same classes, got {[*labels]}")
    return next(iter(labels), None)


def _with_layout(
    predictor: BlockPredictor, cube: xr.Dataset, expected: Expected, world: World
) -> BlockPredictor:
    """Return the predictor with the layout of the first result, which rank 0 makes."""
    probed = predictor
    with all_ranks_or_none(world):
        if world.is_main:
            blocks = _blocks(predictor, cube)
            probed = predictor.find_layout(blocks, expected)
            if probed is not predictor:  # else there are only gaps
                _check_layout(probed)
            if _blocks(probed, cube) != blocks:  # whose first batch has other windows
                probed.probe_results.clear()
    layout, windows = world.broadcast((probed.layout, probed.spec.windows))
    return replace(probed, layout=layout, spec=replace(probed.spec, windows=windows))


def _check_layout(predictor: BlockPredictor) -> None:
    """Refuse results that cannot become the cube that was asked for."""
    layout, windows = predictor.layout, predictor.spec.windows
    lacking = {dim for dim in layout.lacking if windows.dims[dim].is_single}
    if windows.lead_dim in lacking:
        raise InvalidValueError(
            f"the model must return {windows.n_leads} steps along {windows.lead_dim!r}, as the "
            "targets of the data set have, got results without that axis"
        )
    several = [v.name for v in layout.variables if v.name != v.target or v.channels > 1]
    if windows.rollout > 1 and (several or lacking):
        raise InvalidValueError(
            f"rollout={windows.rollout} needs a model that returns one number per target and cell, "
            f"to be its next input, got {several or f'none along {lacking}'}"
        )
    if predictor.reduce == "argmax" and not any(v.is_probability for v in layout.variables):
        raise InvalidValueError(
            "reduce='argmax' needs a model that returns one number for each class, got one for "
            f"{[variable.name for variable in layout.variables]}"
        )
    _refuse_means_of_labels(predictor)
    for variable in layout.variables:
        scaling = predictor.spec.preparation.scaling.get(variable.target or "")
        if scaling is not None and (both := lacking & set(scaling.dims)):
            raise InvalidValueError(
                f"{variable.target!r} was scaled per {sorted(both)}, and the model returns one "
                "value for a whole window along it, which cannot be unscaled"
            )


def _refuse_means_of_labels(predictor: BlockPredictor) -> None:
    """Refuse labels of classes where a cell has several results."""
    labels = [variable.name for variable in predictor.layout.variables if variable.is_label]
    overlap = any(axis.has_overlaps for axis in predictor.spec.windows.axes)
    if labels and (overlap or len(predictor.members) > 1):
        raise InvalidValueError(
            f"the model must return a number for each class of {labels}, got labels, which would "
            "be averaged over members and windows that overlap; choose with reduce='argmax'"
        )


def _blocks(predictor: BlockPredictor, cube: xr.Dataset) -> Grid:
    """Choose the blocks that are predicted and written, near the cube's chunks."""
    windows = predictor.spec.windows
    fewest, most = _BLOCK_CELLS
    # Inputs as read and scaled, with flags of gaps; sums, weights and means of results.
    n_leads = max(windows.n_leads, 1)
    n_inputs = math.prod(windows.dims[dim].size for dim in windows.lost_dims)
    n_bytes = 9 * n_inputs * len(predictor.spec.features)
    n_bytes += 24 * len(predictor.members) * predictor.channels * n_leads
    # Of all leads together.
    cells = math.prod(windows.result_shape.values()) // n_leads
    cells = min(max(cells // 16, fewest), most)
    cells = max(cells * _BYTES_PER_CELL // max(n_bytes, _BYTES_PER_CELL), 1)
    variables = (cube[name].variable for name in cube_variables(cube)[0])
    largest = max(variables, key=lambda variable: variable.ndim)
    chunks = {d: n for d, n in source_chunks(largest).items() if d not in windows.lost_dims}
    return Grid.blocks(windows.result_shape, windows.block_size(chunks, cells * n_leads))


def _description(
    models: Sequence[Model], spec: PredictionSpec, expected: Expected
) -> dict[str, Any]:
    """Describe model and windows in JSON values, for the attributes of the predicted cube."""
    named = type(models[0]) if not hasattr(models[0], "__name__") else models[0]
    windows = spec.windows
    description: dict[str, Any] = {
        "model": getattr(named, "__name__", type(models[0]).__name__),
        "features": spec.channels,
        "targets": spec.targets,
        "window": {dim: of_dim.known_size for dim, of_dim in windows.dims.items()},
        "overlap": {dim: of_dim.overlap for dim, of_dim in windows.dims.items()},
    }
    if windows.rollout > 1:
        description["rollout"] = windows.rollout
    return description


def _predict_blocks(
    predictor: BlockPredictor,
    blocks: Grid,
    output: Output,
    world: World,
    engine: Engine,
    progress: bool,
    check_source: Callable[[], None],
) -> xr.Dataset:
    """Predict all blocks, by the ranks or the workers of a cluster.

    `check_source` is called before the result is published.
    """
    _keep_freed_memory()
    try:
        done = output.begin()
        ids = [id for id in range(len(blocks)) if id not in done]
        shared, own = predictor.reader.split(engine.shares_memory)
        job = replace(predictor, reader=shared), blocks, output.writer
        tasks = ((id, own.narrow(predictor.cells_of(blocks.block(id)))) for id in ids)
        show = progress and world.is_main
        with Stage("predicting", len(ids), "blocks", show=show) as stage, engine:
            for _, block in engine.run(_predict_block, job, tasks):
                if block is not None:
                    output.collect(block)
                stage.update()
        with all_ranks_or_none(world):
            if world.is_main:
                check_source()
                output.publish()
    except BaseException as error:
        if world.is_main:
            output.discard(error)
        raise
    return output.result()


def _keep_freed_memory() -> None:
    """Make glibc keep up to 64 MB that are freed, or a model gets new pages for every batch.

    It keeps twice the size of the largest array that was freed, of those up to 32 MB. Other
    allocators do not care. The array is never touched, so it takes no memory itself.
    """
    np.empty(2**25 - 2**16, np.uint8)


def _predict_block(
    job: tuple[BlockPredictor, Grid, Callable[[int, Block], None] | None],
    task: tuple[int, CubeReader],
) -> Block | None:
    """Predict a block and write it; return it if it can only be written by the caller."""
    predictor, blocks, write = job
    id, own_cells = task
    predictor = replace(predictor, reader=own_cells.joined(predictor.reader))
    block = predictor.predict(blocks.block(id))
    if write is None:
        return block
    write(id, block)
    return None
