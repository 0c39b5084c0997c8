"""`fill_gaps`: fill gaps and score the filling; `hide_cells`: make artificial gaps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    caller_level,
    check_choice,
    check_flags,
    check_whole,
)
from ml4cube.core.grid import Grid
from ml4cube.core.missing import FILLED_ATTR
from ml4cube.core.sums.pairs import PairSums
from ml4cube.cube.absent_chunks import heed_absent_chunks
from ml4cube.cube.areas import cell_weights
from ml4cube.cube.chunks.blocks import chunk_sizes
from ml4cube.cube.classes import holds_classes
from ml4cube.cube.masks_and_labels import NAME_ATTR, ROLE_ATTR
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.variables import split_label
from ml4cube.gap_filling.artificial import LENGTHS, ArtificialGaps
from ml4cube.gap_filling.blocks import SCORES, SUMS, GapFiller
from ml4cube.gap_filling.methods import METHODS, Method, MethodOptions, Predicted
from ml4cube.preprocessing.statistics import chosen_variables

# Values of the flag variable.
_FLAGS = {"known": 0, "filled": 1, "gap": 2}

_ASSUMES = (
    "gaps do not depend on the values that they hide; where they do, the true errors are larger, "
    "and the bias of the real gaps does not show"
)


class FilledCube(NamedTuple):
    """The result of `fill_gaps`.

    Parameters
    ----------
    cube : Dataset
        The cube with gaps filled, and a flag variable ``<name>_filled`` for each variable.
    scores : Dataset
        Errors on artificial gaps, dims ``("variable", "gap_length")``.
    """

    cube: xr.Dataset
    scores: xr.Dataset


def fill_gaps(
    ds: Any,
    variables: str | Iterable[str] | None = None,
    method: Any = "linear",
    *,
    mask: xr.DataArray | str | None = None,
    beyond_ends: bool = False,
    cycle: str | int | None = None,
    neighbours: int = 8,
    split: str | None = "train",
    fraction: float = 1.0,
    seed: int = 42,
    data: Any = None,
    predict: Mapping[str, Any] | None = None,
    missing_chunks: str = "warn",
) -> FilledCube:
    """Fill gaps in time or space, and measure the error on artificial gaps of the same shapes.

    All gaps are copied to other time steps, by a shift along time. The known cells under the copies
    are hidden, filled like the others, and compared with their values.

    Parameters
    ----------
    ds : Dataset, DataArray, path, zarr store or group
        The cube; not changed. A gap is NaN or infinite.
    variables : str or iterable of str, optional
        Default: all floating-point data variables. Filled targets would be scored as measured.
    method : {"linear", "nearest", "climatology", "spatial"} or model
        ``"linear"``: between the known steps before and after, by their dates. ``"nearest"``: the
        nearest known step. ``"climatology"``: that of the known cells of the part `split` at the
        same place. ``"spatial"``: the mean of the nearest known
        cells of the same step, weighted by 1 / distance², along the great circle if there are
        latitudes and longitudes, else in cells. A model: what `predict_cube` returns.
    mask : DataArray or str, optional
        Cells that may be filled: an array along dims of the cube, or one of its variables. The
        others, such as land, stay as they are.
    beyond_ends : bool, default False
        Let ``"linear"`` repeat the first and last known value before and after them.
    cycle : str or int, optional
        The climatology, as in `evaluate`; default: by the step of the cube.
    neighbours : int, default 8
        Cells that ``"spatial"`` averages; 1 for the nearest.
    split : {"train", "val", "test", None}
        Part of the climatology, if `ds` has a split label; None for all cells.
    fraction : float, default 1.0
        Fraction of the time steps that get artificial gaps, in tenths; less if gaps are so many
        that hiding as many again would leave too little.
    seed : int, default 42
        Seed of the artificial gaps.
    data : PTXrDataset, store or path, optional
        How the data of a model's training were made: `store_or_stats` of `predict_cube`.
    predict : mapping, optional
        Further arguments of `predict_cube`.
    missing_chunks : {"warn", "raise", "drop"}
        What to do about chunks that the cube's zarr store lacks and that read as values: warn,
        refuse them, or fill them like other gaps.

    Returns
    -------
    FilledCube
        A pair. ``cube``: a Dataset with the same values in all known cells, and for each variable
        a flag variable ``<name>_filled``: 0 for known cells, 1 for filled ones and 2 for gaps that
        are left. It is lazy unless `ds` is in memory; its chunks are then blocks that suit the
        method. ``scores``: a Dataset with the dims ``variable`` and ``gap_length`` (all, and by
        the length of the gap along time in steps, real and artificial ones together), of
        ``rmse``, ``mae`` and ``bias`` in the variable's units, weighted by area if it is known;
        ``count``: cells scored, ``unpredicted``: hidden cells that the method cannot fill, and
        ``gaps``: cells in real gaps of that length, which may be weights of the errors.

    Raises
    ------
    InvalidValueError
        If an argument or name is invalid, or a method needs a time dim with increasing dates that
        the cube lacks.
    InvalidTypeError
        If a variable given by name does not hold floating-point numbers.

    Notes
    -----
    The scores are those of the real gaps only if gaps do not depend on the values that they hide,
    as ``scores.attrs["assumes"]`` says. Where clouds hide the cold cells, the true error is larger,
    up to twice in simulations, and the bias of the real gaps does not show at all.

    Artificial gaps need a time dim, and gaps that are not the same at all steps; a warning says if
    nothing could be scored. If `ds` has a split label, a model is scored outside its train part;
    without one, a warning says that it may have been trained on the hidden values. `hide_cells`
    makes the same artificial gaps, to train a model on.

    Blocks of all methods in time are whole along time, and read chunks again for each block unless
    these are long in time; those of ``"spatial"`` are whole along the map.

    Examples
    --------
    >>> time = xr.date_range("2000-01-01", periods=6)
    >>> ds = xr.Dataset({"t": ("time", [1.0, np.nan, 3.0, 4.0, np.nan, 6.0])}, {"time": time})
    >>> filled, scores = fill_gaps(ds)
    >>> filled.t.values, filled.t_filled.values
    (array([1., 2., 3., 4., 5., 6.]), array([0, 1, 0, 0, 1, 0], dtype=uint8))
    """
    check_flags({"beyond_ends": beyond_ends})
    check_whole("neighbours", neighbours, 1)
    if isinstance(method, str):
        check_choice("method", method, METHODS)
    cube, names = _checked(ds, variables, fraction, seed, missing_chunks)
    for name in names:
        if f"{name}_filled" in cube.variables:
            raise InvalidValueError(f"the cube must not have {name}_filled; drop it first")
    artificial = partial(ArtificialGaps.of, fraction=fraction, seed=seed)
    is_model = not isinstance(method, str)
    fillers = {name: GapFiller.of(cube, name, mask, split, artificial, is_model) for name in names}
    if isinstance(method, str):
        options = MethodOptions(method, beyond_ends, cycle, neighbours)
        methods = {n: options.method_of(cube[n], f.time_dim) for n, f in fillers.items()}
        methods_to_score, filled_by = methods, method
    else:
        filled_by = type(method).__name__
        predict = {"missing_chunks": missing_chunks, **(predict or {})}
        methods, methods_to_score = _methods_of_model(cube, fillers, method, data, predict)
    sums = {
        name: _score(filler, methods_to_score[name], cube[name]) for name, filler in fillers.items()
    }
    scores = _scores(cube, sums)
    if not (scores["count"] + scores["unpredicted"]).sel(gap_length="all").all():
        warnings.warn(
            "the error of filling is unknown for some variables: artificial gaps need a time dim, "
            "and gaps that are not the same at all steps",
            stacklevel=caller_level(),
        )
    result = cube
    for name, filler in fillers.items():
        result = result.assign(_filled(filler, methods[name], cube[name], filled_by))
    return FilledCube(result, scores)


def hide_cells(
    ds: Any,
    variables: str | Iterable[str] | None = None,
    *,
    mask: xr.DataArray | str | None = None,
    fraction: float = 1.0,
    seed: int = 42,
) -> xr.Dataset:
    """Hide known cells in gaps of the shape of real ones, such as to train a model that fills gaps.

    Parameters
    ----------
    ds : Dataset, DataArray, path, zarr store or group
        The cube; not changed.
    variables : str or iterable of str, optional
        Default: all floating-point data variables.
    mask : DataArray or str, optional
        Cells that may be hidden.
    fraction : float, default 1.0
        Fraction of the time steps that get artificial gaps, in tenths; less if gaps are so many
        that hiding as many again would leave too little.
    seed : int, default 42
        Seed; another one gives other gaps.

    Returns
    -------
    Dataset
        The cube with more gaps; lazy unless `ds` is in memory.

    Raises
    ------
    InvalidValueError
        If an argument or name is invalid.
    InvalidTypeError
        If a variable given by name does not hold floating-point numbers.

    Examples
    --------
    >>> ds = xr.Dataset({"t": ("time", np.r_[np.arange(8.0), np.nan, 9.0])})
    >>> [int(hide_cells(ds, seed=seed).t.isnull().sum()) for seed in range(6)]
    [2, 2, 2, 2, 2, 2]
    """
    cube, names = _checked(ds, variables, fraction, seed, "warn")
    artificial = partial(ArtificialGaps.of, fraction=fraction, seed=seed)
    fillers = {name: GapFiller.of(cube, name, mask, None, artificial) for name in names}
    return cube.assign({n: _hidden(f, cube[n]) for n, f in fillers.items()})


def _checked(
    ds: Any,
    variables: str | Iterable[str] | None,
    fraction: float,
    seed: int,
    missing_chunks: str,
) -> tuple[xr.Dataset, list[str]]:
    """Return the cube and the variables to fill."""
    check_whole("seed", seed)
    if not 0 < fraction <= 1:
        raise InvalidValueError(f"fraction must be above 0 and at most 1, got {fraction!r}")
    cube = as_dataset(ds)
    names = chosen_variables(cube, variables, ())
    wrong = [name for name in names if holds_classes(cube[name])]
    if variables is not None and wrong:
        raise InvalidTypeError(
            f"variables must hold floating-point numbers, got {wrong[0]!r} of dtype "
            f"{cube[wrong[0]].dtype}, which has no gaps, or holds classes by its flags"
        )
    if not (names := [name for name in names if name not in wrong]):
        raise InvalidTypeError(
            f"variables must hold floating-point numbers, the cube has {list(cube.data_vars)}"
        )
    return heed_absent_chunks(cube, names, missing_chunks).cube, names


def _methods_of_model(
    cube: xr.Dataset,
    fillers: Mapping[str, GapFiller],
    model: Any,
    data: Any,
    predict: dict[str, Any],
) -> tuple[dict[str, Method], dict[str, Method]]:
    """Return the predictions that fill the gaps of a cube, and those of cells that are hidden."""
    if split_label(cube) is None:
        warnings.warn(
            "the cube has no split label, so the model may have been trained on the cells that "
            "it is scored on, and its error may be larger than the scores say",
            stacklevel=caller_level(),
        )
    methods = _predicted(cube, fillers, model, data, predict)
    hidden = cube.assign({n: _hidden(f, cube[n]) for n, f in fillers.items()})
    without_out = {key: value for key, value in predict.items() if key != "out"}
    return methods, _predicted(hidden, fillers, model, data, without_out)


def _predicted(
    cube: xr.Dataset,
    fillers: Mapping[str, GapFiller],
    model: Any,
    data: Any,
    predict: dict[str, Any],
) -> dict[str, Method]:
    """Return the prediction of a model for each variable."""
    from ml4cube.prediction import predict_cube

    options: dict[str, Any] = {"keep_gaps": False}
    if data is None:
        options["targets"] = list(fillers)
    predicted = predict_cube(model, cube, data, **{**options, **predict})
    wanted = {name: set(cube[name].dims) for name in fillers}
    dims_by_variable = {str(name): set(array.dims) for name, array in predicted.data_vars.items()}
    if wrong := {
        name: dims_by_variable.get(name)
        for name in wanted
        if dims_by_variable.get(name) != wanted[name]
    }:
        raise InvalidValueError(
            f"the model must predict the variables to fill, with dims {wanted}, got {wrong}"
        )
    readers = {n: CubeReader.of(predicted, [n], f.reader.dims) for n, f in fillers.items()}
    return {n: Predicted((), readers[n], n, f.time_dim) for n, f in fillers.items()}


def _by_block(
    function: Callable[..., NDArray[Any]],
    grid: Grid,
    dtype: Any,
    *arrays: Any,
    is_lazy: bool,
) -> Any:
    """Return an array made block by block from a box, and from the same block of given arrays."""
    if not is_lazy:
        values = np.empty(grid.shape, dtype)
        for block in grid:
            index = tuple(block.slices.values())
            values[index] = function(*(array[index] for array in arrays), block.slices)
        return values
    import dask.array

    sizes = zip(grid.shape, grid.tile, strict=True)
    chunks = tuple(tuple(min(tile, n - at) for at in range(0, n, tile)) for n, tile in sizes)
    return dask.array.map_blocks(  # type: ignore[no-untyped-call]
        partial(_of_block, function, grid.dims), *arrays,
        chunks=chunks, dtype=dtype, meta=np.empty((0,) * len(grid.dims), dtype),
    )  # fmt: skip


def _of_block(
    function: Callable[..., NDArray[Any]],
    dims: tuple[str, ...],
    *arrays: NDArray[Any],
    block_info: Any,
) -> NDArray[Any]:
    """Make the block of a dask array that `block_info` describes."""
    ends = block_info[None]["array-location"]
    return function(*arrays, {d: slice(*of_dim) for d, of_dim in zip(dims, ends, strict=True)})


def _hidden(filler: GapFiller, array: xr.DataArray) -> xr.Variable:
    """Return a variable with artificial gaps."""
    is_lazy = not array.variable._in_memory
    grid = filler.blocks(chunk_sizes(array.variable), ())
    values = _by_block(filler.hide, grid, array.dtype, is_lazy=is_lazy)
    return xr.Variable(grid.dims, values, array.attrs).transpose(*array.dims)


def _filled(
    filler: GapFiller, method: Method, array: xr.DataArray, described: str
) -> dict[str, xr.Variable]:
    """Return a filled variable and its flags."""
    is_lazy = not array.variable._in_memory
    grid = filler.blocks(chunk_sizes(array.variable), method.whole)
    values = _by_block(partial(filler.fill, method), grid, array.dtype, is_lazy=is_lazy)
    flags = _by_block(filler.flags, grid, np.uint8, values, is_lazy=is_lazy)
    name, flag_name = str(array.name), f"{array.name}_filled"
    beside = f"{array.attrs.get('ancillary_variables', '')} {flag_name}".strip()
    attrs = {**array.attrs, "ancillary_variables": beside}
    if is_lazy or (flags == _FLAGS["filled"]).any():  # of a lazy one it is not known yet
        attrs[FILLED_ATTR] = described
    flag_attrs = {
        "long_name": f"origin of the values of {name}",
        "flag_values": np.array(list(_FLAGS.values()), np.uint8),
        "flag_meanings": " ".join(_FLAGS),
        ROLE_ATTR: "mask",  # so that it is no feature
        NAME_ATTR: flag_name,
    }
    made = {
        name: xr.Variable(grid.dims, values, attrs),
        flag_name: xr.Variable(grid.dims, flags, flag_attrs),
    }
    return {key: variable.transpose(*array.dims) for key, variable in made.items()}


def _score(
    filler: GapFiller, method: Method, array: xr.DataArray
) -> tuple[PairSums, NDArray[np.int64]]:
    """Return the errors on artificial gaps, and the cells in real ones, by length."""
    total, gaps = PairSums.empty(len(LENGTHS), SUMS), np.zeros(len(LENGTHS), np.int64)
    for block in filler.blocks(chunk_sizes(array.variable), method.whole):
        of_values, counts = filler.score(method, block.slices)
        total, gaps = total.merge(of_values), gaps + counts
    return total, gaps


def _scores(cube: xr.Dataset, sums: Mapping[str, tuple[PairSums, NDArray[np.int64]]]) -> xr.Dataset:
    """Return the scores of all variables, over all gaps and by their length."""
    by_metric: dict[str, list[Any]] = {metric: [] for metric in (*SCORES, "gaps")}
    for by_length, gaps in sums.values():
        overall = by_length.of_all_groups()
        for metric in SCORES:
            scores = np.concatenate([overall.score(metric), by_length.score(metric)])
            by_metric[metric].append(scores)
        by_metric["gaps"].append([gaps.sum(), *gaps])
    units = [str(cube[name].attrs.get("units", "")) for name in sums]
    weights = {name: cell_weights("area", cube[name], cube.variables).warn().rule for name in sums}
    return xr.Dataset(
        {metric: (("variable", "gap_length"), rows) for metric, rows in by_metric.items()},
        {
            "variable": list(sums),
            "units": ("variable", units),
            "gap_length": ("gap_length", ["all", *LENGTHS], {"long_name": "time steps of the gap"}),
        },
        {
            "weights": "; ".join(f"{name}: {how}" for name, how in weights.items()),
            "assumes": _ASSUMES,
        },
    )
