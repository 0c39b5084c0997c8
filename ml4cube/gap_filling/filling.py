"""`fill_gaps`: fill gaps and score the filling; `hide_cells`: make artificial gaps."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple

import xarray as xr

from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    caller_level,
    check_choice,
    check_flags,
    check_whole,
)
from ml4cube.cube.absent_chunks import heed_absent_chunks
from ml4cube.cube.classes import holds_classes
from ml4cube.cube.opening import as_dataset
from ml4cube.gap_filling.arrays import filled_variables, hidden_variable
from ml4cube.gap_filling.artificial import ArtificialGaps
from ml4cube.gap_filling.blocks import GapFiller
from ml4cube.gap_filling.methods import METHODS, MethodOptions
from ml4cube.gap_filling.model import methods_of_model
from ml4cube.gap_filling.scoring import errors_and_gaps, scores_of
from ml4cube.preprocessing.statistics import chosen_variables


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
    >>> import numpy as np
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
        options = MethodOptions(beyond_ends, cycle, neighbours)
        make = METHODS[method]
        methods = {n: make(cube[n], f.time_dim, options) for n, f in fillers.items()}
        methods_to_score, filled_by = methods, method
    else:
        filled_by = type(method).__name__
        predict = {"missing_chunks": missing_chunks, **(predict or {})}
        methods, methods_to_score = methods_of_model(cube, fillers, method, data, predict)
    sums = {
        name: errors_and_gaps(filler, methods_to_score[name], cube[name])
        for name, filler in fillers.items()
    }
    scores = scores_of(cube, sums)
    if not (scores["count"] + scores["unpredicted"]).sel(gap_length="all").all():
        warnings.warn(
            "the error of filling is unknown for some variables: artificial gaps need a time dim, "
            "and gaps that are not the same at all steps",
            stacklevel=caller_level(),
        )
    result = cube
    for name, filler in fillers.items():
        result = result.assign(filled_variables(filler, methods[name], cube[name], filled_by))
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
    >>> import numpy as np
    >>> ds = xr.Dataset({"t": ("time", np.r_[np.arange(8.0), np.nan, 9.0])})
    >>> [int(hide_cells(ds, seed=seed).t.isnull().sum()) for seed in range(6)]
    [2, 2, 2, 2, 2, 2]
    """
    cube, names = _checked(ds, variables, fraction, seed, "warn")
    artificial = partial(ArtificialGaps.of, fraction=fraction, seed=seed)
    fillers = {name: GapFiller.of(cube, name, mask, None, artificial) for name in names}
    return cube.assign({n: hidden_variable(f, cube[n]) for n, f in fillers.items()})


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
