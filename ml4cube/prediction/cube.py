"""`predict_cube`: run a model on windows of a cube and blend the results into a cube."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import xarray as xr

from ml4cube.core.axes import check_aligned
from ml4cube.core.errors import InvalidValueError, check_choice, check_flags, check_whole
from ml4cube.core.grid import SizesLike
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.variables import cube_dims
from ml4cube.prediction.binding import bind, check_fits, classes_of_targets
from ml4cube.prediction.layout import expected_results
from ml4cube.prediction.models import (
    Model,
    check_columns,
    is_estimator,
    parse_models,
    refuse_method,
)
from ml4cube.prediction.placing import place_windows, window_cells
from ml4cube.prediction.run import RunOptions, run
from ml4cube.prediction.source import fitted_recipe
from ml4cube.training.inputs.rollout import Rollout

_MASK = "_ml4cube_mask"  # name of a mask that is given as an array


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
        them to `out`, which they all must reach. The model is sent to them. An active client is
        used even if it is not named, unless the model is on a GPU or the cube in memory. The result
        has the bits of one made here if torch has as many threads here as in a worker (dask starts
        workers with one: ``torch.set_num_threads(1)``); other numbers of threads change last bits.
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
        If `out` exists, was not made by the same call, and is not to be replaced or appended to.
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
    check_whole("rollout", rollout, 1)
    if batch_size is not None:
        check_whole("batch_size", batch_size, 1)
    shape = {dim: cube.sizes[dim] for dim in cube_dims(cube)}
    fitted = fitted_recipe(store_or_stats, shape, features, targets)
    fitted = check_fits(cube, fitted, mask)
    size, shared = window_cells(fitted, shape, sample_size, overlap)
    windows = place_windows(cube, fitted, size, shared, init_times, rollout)
    if rollout > 1:
        windows = replace(windows, feedback=Rollout.of(store_or_stats))
    bound, mask = bind(cube, fitted, windows, mask)
    classes = classes_of_targets(cube, fitted, bound.scaling)
    expected = expected_results(fitted, windows, classes, models, outputs, reduce)
    for member in models:
        refuse_method(member)
    for member in filter(is_estimator, models):
        check_columns(member, bound.channels, math.prod(windows.input_window.values()))
    options = RunOptions(
        out=out,
        mask=mask,
        keep_gaps=keep_gaps,
        batch_size=batch_size,
        device=device,
        overwrite=overwrite,
        append=append,
        progress=progress,
        reduce=reduce,
        samples=samples,
        seed=seed,
        client=client,
        missing_chunks=missing_chunks,
    )
    return run(models, cube, bound, windows, expected, options)
