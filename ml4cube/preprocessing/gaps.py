"""Masks and gaps: drop samples or cells, and fill gaps.

Samples are dicts of arrays (samples, *window) or Datasets with a dim ``samples``; there, whole
samples are dropped. On any other cube each cell is a sample. A grid cannot lose cells, so a
dropped cell becomes a gap: by `apply_filter` in all numbers and dates, by `drop_nan_values` in
floating-point variables.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core import statistics as core
from ml4cube.core.axes import check_aligned
from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_choice,
    check_flags,
    check_names,
    check_numpy,
    check_real_number,
    check_whole,
    names_of,
)
from ml4cube.core.missing import (
    DROP_POLICIES,
    FILL_METHODS,
    FILLED_ATTR,
    fill_gaps,
    find_gaps,
    set_gaps,
)
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.core.statistics import VariableStatistics, check_decoded, scaled_dtype
from ml4cube.cube import masks_and_labels
from ml4cube.cube.chunks.blocks import read_in_blocks
from ml4cube.cube.variables import (
    check_left_out,
    cube_dims,
    cube_variables,
    data_variables,
    not_data,
)
from ml4cube.preprocessing import cubes
from ml4cube.preprocessing.counts import (
    KEPT,
    MASK,
    Stage,
    add_dropped_samples,
    gap_codes,
    mask_codes,
    read_counts,
    variable_to_count,
    with_counts,
    with_stage_counts,
)
from ml4cube.preprocessing.samples import as_cube, like_given
from ml4cube.preprocessing.statistics import Statistics

logger = logging.getLogger(__name__)

# Kinds of dtypes whose gaps are known; integers have none.
_GAP_KINDS = "fciubmM"


def assign_mask(
    ds: xr.Dataset, mask: Any, mask_name: str | None = None, stack_dim: str | None = "time"
) -> xr.Dataset:
    """Add a mask to a cube, broadcast along the dims that it lacks.

    Parameters
    ----------
    ds : Dataset
        Not changed.
    mask : DataArray, or array (numpy or dask)
        True, or a number other than 0, for cells that count; NaN is False. A DataArray is matched
        by the names of its dims. An array has the dims of the cube in order, with or without
        `stack_dim`.
    mask_name : str, optional
        Name of the new variable. Default: ``"filter_mask"``.
    stack_dim : str, optional
        The dim that an array with one dim less lacks.

    Returns
    -------
    Dataset
        With the mask as a bool variable on the cube's dims, chunked like the cube. It takes no
        more memory than the given mask.

    Raises
    ------
    InvalidValueError
        If a dim is unknown, the shape or the coordinates do not fit, or the cube has a dim,
        coordinate or variable of that name that is not a mask.
    InvalidTypeError
        If `ds` is not a Dataset, the mask is one, or the name is not a string.

    Examples
    --------
    >>> ds = xr.Dataset({"t": (("time", "lat"), np.zeros((2, 3)))})
    >>> assign_mask(ds, np.array([True, False, True])).filter_mask.values
    array([[ True, False,  True],
           [ True, False,  True]])
    """
    if not isinstance(ds, xr.Dataset):
        raise InvalidTypeError(f"ds must be a Dataset, got {type(ds).__name__}")
    check_names((*ds.variables, *ds.dims))
    name = mask_name
    if mask_name is None:
        name = masks_and_labels.FILTER_VAR
    if not isinstance(name, str) or not name:
        raise InvalidTypeError(f"mask_name must be a string such as 'land', got {name!r}")
    if name in ds.dims or (name in ds.variables and not_data(ds).get(name) != "a mask"):
        raise InvalidValueError(
            f"mask_name must be unused or a mask, got {name!r}, which the cube already has"
        )
    dims = cube_dims(ds)
    # samples cannot hold complex numbers, but a mask fits them
    held, others = cube_variables(ds)
    largest = next(ds[n] for n in (*held, *others) if ds[n].dims == dims)
    flags = cubes.as_flags(_with_dims(mask, largest, stack_dim))
    flags = cubes.broadcast_to(flags, largest.sizes)
    if largest.chunks is not None:
        flags = flags.chunk(largest.variable.chunksizes)
    flags.attrs = {masks_and_labels.ROLE_ATTR: "mask", masks_and_labels.NAME_ATTR: name}
    return ds.assign({name: flags})


def _with_dims(mask: Any, cube: xr.DataArray, stack_dim: str | None) -> xr.Variable:
    """Return the mask with dims of the cube; refuse one that does not fit."""
    if isinstance(mask, xr.Dataset):
        raise InvalidTypeError(
            f"mask must be one variable, got a Dataset of {list(mask.data_vars)}"
        )
    if isinstance(mask, xr.DataArray):
        check_aligned("mask", mask, cube)
        return mask.variable
    array = mask
    if not hasattr(mask, "ndim"):
        array = np.asarray(mask)
    dims = cube.dims
    if array.ndim == cube.ndim - 1:
        if stack_dim not in cube.dims:
            raise InvalidValueError(
                f"stack_dim must be the dim of {cube.dims} that a mask of shape {array.shape} "
                f"lacks, got {stack_dim!r}"
            )
        dims = tuple(dim for dim in cube.dims if dim != stack_dim)
    expected = tuple(cube.sizes[dim] for dim in dims)
    if array.shape != expected:
        raise InvalidValueError(
            f"mask must have shape {expected} for {dims}, got {array.shape}; transpose it, or give "
            "a DataArray, which is matched by name"
        )
    return xr.Variable(dims, array)


def apply_filter(
    ds: cubes.Cube, filter_var: str | None = masks_and_labels.FILTER_VAR, drop_sample: bool = False
) -> Any:
    """Apply a mask: drop samples with cells outside it, or turn those cells into gaps.

    Parameters
    ----------
    ds : dict of arrays (samples, *window), Dataset or DataArray
        Not changed. The mask is one of its variables; it may lack dims, also the samples.
    filter_var : str, optional
        Name of the mask; None applies none. Without a variable ``"filter_mask"`` there is no
        mask; any other unknown name is an error.
    drop_sample : bool
        Drop samples with a cell outside the mask. If False, cells outside become gaps, or,
        if all variables are points, these are dropped. On a cube without samples, cells become
        gaps.

    Returns
    -------
    Samples (a dict), Dataset or DataArray
        Of the kind given; a lazy cube stays lazy. Floats and dates keep their dtype. Integers and
        booleans become floats if cells become gaps. `accounting` returns the counts.

    Raises
    ------
    InvalidValueError
        If the mask is unknown or does not fit the data, or a variable holds packed integers that
        were not decoded.
    InvalidTypeError
        If the mask holds neither booleans nor numbers, or `drop_sample` is not a bool.

    Examples
    --------
    >>> samples = {"t": np.array([[1.0, 2.0], [3.0, 4.0]]), "filter_mask": np.array([True, False])}
    >>> apply_filter(samples)["t"]
    array([[ 1.,  2.],
           [nan, nan]])
    >>> apply_filter(samples, drop_sample=True)["t"]
    array([[1., 2.]])
    """
    check_flags({"drop_sample": drop_sample})
    ds = cubes.opened(ds)
    cube = as_cube(ds, filter_var)
    mask_name = cubes.present_mask(cube.variables, filter_var)
    if mask_name is None:
        return like_given(cube, ds)
    mask = cubes.as_flags(cube.variables[mask_name])
    data = data_variables(cube, [mask_name], _GAP_KINDS)
    check_left_out(cube)
    if SAMPLE_DIM in cube.dims and (drop_sample or all(cube[name].ndim == 1 for name in data)):
        in_mask = mask.all([dim for dim in mask.dims if dim != SAMPLE_DIM]).values
        codes = np.where(np.broadcast_to(in_mask, cube.sizes[SAMPLE_DIM]), KEPT, MASK)
        return like_given(_drop_samples(cube, codes), ds)
    for name in data:
        check_decoded(name, cube[name])
    masked = {
        name: _with_gaps(cube[name], ~cubes.broadcast_to(mask, cube[name].sizes)) for name in data
    }
    result = cubes.with_arrays(cube, masked)
    if SAMPLE_DIM not in cube.dims:
        # a mask applies to every variable, so the largest one has all the cells to count
        counted = max(data, key=lambda name: cube[name].size, default=mask_name)
        stage = Stage(gap_variables=[], mode="masked", mask=mask_name, counted=counted)
        cell_codes = mask_codes(cube.variables[mask_name], cube.variables[counted])
        result = with_stage_counts(result, cube, stage, cell_codes)
    return like_given(result, ds)


def _with_gaps(array: xr.DataArray, cells: xr.Variable) -> Any:
    """Turn cells of a variable into gaps, lazily if it is lazy."""
    return xr.apply_ufunc(
        set_gaps,
        read_in_blocks(array),
        cells,
        dask="parallelized",
        output_dtypes=[array.dtype if array.dtype.kind in "fcmM" else scaled_dtype(array.dtype)],
        keep_attrs="override",
    )


def _drop_samples(cube: xr.Dataset, codes: NDArray[Any]) -> xr.Dataset:
    """Drop the samples whose reason code is not `KEPT`; add to the counts of the Dataset."""
    earlier = {name: int(count.values) for name, count in read_counts(cube)[0].items()}
    kept = cube.isel({SAMPLE_DIM: np.flatnonzero(codes == KEPT)})
    return with_counts(kept, add_dropped_samples(earlier, codes))


def drop_nan_values(
    ds: cubes.Cube,
    vars: Iterable[str] | None = None,
    mode: str | None = "auto",
    filter_var: str | None = masks_and_labels.FILTER_VAR,
) -> Any:
    """Drop samples with gaps, independently of other samples.

    Parameters
    ----------
    ds : dict of arrays (samples, *window), Dataset or DataArray
        Not changed.
    vars : iterable of str, optional
        Variables whose gaps count. Default: all data variables that hold real numbers; dates count
        only if they are listed.
    mode : {"auto", "if_all_nan", "masked", None}
        ``"auto"`` drops samples with any gap; ``"if_all_nan"`` those in which every variable of
        `vars` has only gaps (default: every floating-point variable); ``"masked"`` those
        without a mask-true cell or with a gap in a mask-true cell. None drops none.
    filter_var : str, optional
        Name of the mask for ``"masked"``; it may lack dims, also the samples.

    Returns
    -------
    Samples (a dict), Dataset or DataArray
        Of the kind given; all variables keep the same samples. On a cube without samples, each
        cell is one: dropped cells become gaps in every floating-point variable that has all dims
        of the variables whose gaps count. A lazy cube stays lazy. `accounting` returns the
        counts.

    Raises
    ------
    InvalidValueError
        If a name or the mode is unknown, `vars` has no data variable, no variable has all dims of
        those whose gaps count, the mask for ``"masked"`` is missing, or a variable holds packed
        integers that were not decoded.
    InvalidTypeError
        If a variable in `vars` holds strings or other objects.

    Examples
    --------
    >>> samples = {"t": np.array([[1.0, np.nan], [3.0, 4.0], [np.nan, np.nan]])}
    >>> drop_nan_values(samples, ["t"])["t"]
    array([[3., 4.]])
    >>> drop_nan_values(samples, ["t"], mode="if_all_nan").accounting
    {'total': 3, 'kept': 2, 'gap': 1}
    """
    check_choice("mode", mode, DROP_POLICIES)
    ds = cubes.opened(ds)
    cube = as_cube(ds, filter_var)
    kinds = _GAP_KINDS
    if vars is None:
        kinds = "fiub"
    data = data_variables(cube, [filter_var] if filter_var else [], kinds)
    gap_variables = _gap_variables(cube, data, vars, mode, filter_var)
    if mode is None:
        return like_given(cube, ds)
    to_decode = gap_variables
    if vars is None:
        check_left_out(cube)
        to_decode = data
    for name in to_decode:
        check_decoded(name, cube[name])
    mask_name = None
    if mode == "masked":
        mask_name = filter_var
    if mode == "masked" and mask_name not in cube.variables:
        raise InvalidValueError(
            f"mode='masked' needs the mask filter_var={filter_var!r}, got only "
            f"{list(cube.variables)}; add it with assign_mask, or use mode='auto'"
        )
    if not gap_variables:
        return like_given(cube, ds)
    if SAMPLE_DIM in cube.dims:
        codes = gap_codes(cube, gap_variables, mode, mask_name)
        return like_given(_drop_samples(cube, codes.values), ds)
    return like_given(_drop_cells(cube, data, gap_variables, mode, mask_name), ds)


def _drop_cells(
    cube: xr.Dataset,
    data: list[str],
    gap_variables: list[str],
    mode: str,
    mask_name: str | None,
) -> xr.Dataset:
    """Make gaps of the dropped cells of a cube without samples, in all data on their dims."""
    counted = variable_to_count(cube, gap_variables, mask_name)
    if counted is None:
        dims = {name: cube[name].dims for name in filter(None, [*gap_variables, mask_name])}
        raise InvalidValueError(
            f"the gaps of {dims} count, but no variable has all of these dims; list variables of "
            "one grid in vars, and call once for each grid"
        )
    codes = gap_codes(cube, gap_variables, mode, mask_name)
    dropped = {}
    for name in data:
        if cube[name].dtype.kind == "f" and set(codes.dims) <= set(cube[name].dims):
            check_numpy(f"variable {name!r}", cube[name].dtype)
            dropped[name] = _with_gaps(cube[name], codes != KEPT)
    stage = Stage(gap_variables, mode, mask_name, counted)
    return with_stage_counts(cubes.with_arrays(cube, dropped), cube, stage, codes)


def _gap_variables(
    cube: xr.Dataset,
    data: list[str],
    vars: Iterable[str] | None,
    mode: str | None,
    filter_var: str | None,
) -> list[str]:
    """Return the variables whose gaps count."""
    if vars is None:
        # an integer has no gaps, so it would keep every sample
        return [name for name in data if mode != "if_all_nan" or cube[name].dtype.kind == "f"]
    listed = cubes.only_data("vars", names_of("vars", vars), cube, filter_var)
    for name in listed:
        if cube[name].dtype.kind not in _GAP_KINDS:
            raise InvalidTypeError(
                f"vars must be variables of numbers or dates, got {name!r} of dtype "
                f"{cube[name].dtype}"
            )
    return [name for name in data if name in listed]


def fill_nan_values(
    ds: cubes.Cube,
    vars: Iterable[str] | None = None,
    method: str | Mapping[str, str | None] = "mean",
    const: float | None = None,
    *,
    statistics: core.Statistics | None = None,
    split: str | None = "train",
    seed: int = 42,
) -> Any:
    """Fill gaps with numbers, lazily if the cube is lazy.

    Parameters
    ----------
    ds : dict of arrays (samples, *window), Dataset or DataArray
        Not changed.
    vars : iterable of str, optional
        Variables to fill. Default: all floating-point data variables. Do not fill targets: filled
        gaps look like measurements.
    method : {"mean", "sample_mean", "constant", "noise"} or mapping of str to str or None
        One method for all, or one by variable, as ``{"rain": "mean", "ndvi": None}``; variables
        that the mapping lacks are not filled. ``"mean"`` is the mean of the training cells;
        ``"sample_mean"`` the mean of the sample's finite cells, or the training mean if there is
        none (as in points and in cells of a cube without samples); ``"constant"`` is `const`;
        ``"noise"`` is uniform over the range of the training cells.
    const : float, optional
        Value for ``"constant"``.
    statistics : Statistics, optional
        Of the training cells. Default: computed from `ds` if needed, in one pass.
    split : {"train", "val", "test", None}
        Part to compute them from, if `ds` has a split label; None for all cells.
    seed : int
        Seed of the noise, which depends only on it, the variable and the position of a cell.

    Returns
    -------
    Samples (a dict), Dataset or DataArray
        Of the kind given, with the same dtypes; a lazy cube stays lazy. `accounting` returns the
        number of filled cells. Filled variables of a cube have the attribute ``ml4cube_filled``;
        samplers, data sets and `create_split` warn if a target has it.

    Raises
    ------
    InvalidValueError
        If a name or the method is unknown, `vars` has no data variable, ``"constant"`` lacks
        `const`, a variable holds packed integers that were not decoded, or (when a gap is filled)
        `const` is not finite in the variable's dtype.
    InvalidTypeError
        If a variable in `vars` holds no numbers, `const` is not a real number, `seed` not an
        integer, or `statistics` keep dims.

    Notes
    -----
    On a cube without samples, cells dropped by `drop_nan_values` or `apply_filter` are gaps, and
    are filled too; a warning is logged. Fill first, or cut samples.

    The result does not depend on the chunking, except for the last bit of a float64 mean that is
    computed here.

    Examples
    --------
    >>> samples = {"t": np.array([[1.0, np.nan], [np.nan, np.nan]])}
    >>> fill_nan_values(samples, ["t"], method="sample_mean")["t"]
    array([[1., 1.],
           [1., 1.]])
    >>> fill_nan_values(samples, ["t"], method="constant", const=-1)["t"]
    array([[ 1., -1.],
           [-1., -1.]])
    """
    seed = check_whole("seed", seed)
    if const is not None:
        check_real_number("const", const)
    ds = cubes.opened(ds)
    cube = as_cube(ds)
    methods = _fill_methods(cube, vars, method)
    if const is None and "constant" in methods.values():
        raise InvalidValueError("const must be a number if method='constant', got None")
    with_statistics = [name for name, how in methods.items() if how != "constant"]
    if statistics is None and with_statistics:
        statistics = Statistics.from_cube(cube, with_statistics, split=split)
    options: dict[str, dict[str, Any]] = {}
    for name, how in methods.items():
        options[name] = {"method": how, "const": const, "seed": seed, "variable": name}
        if how != "constant":
            options[name]["train_stats"] = _without_dims(name, statistics or {})
    return like_given(_fill_cube(cube, options), ds)


def _fill_methods(cube: xr.Dataset, vars: Iterable[str] | None, method: Any) -> dict[str, str]:
    """Return the method of each variable to fill: of floats that are neither label nor mask."""
    argument = "vars"
    if not isinstance(method, Mapping):
        check_choice("method", method, FILL_METHODS)
    elif vars is not None:
        raise InvalidTypeError(
            f"vars must be left out if method is a mapping, got vars={vars!r} and "
            f"method={dict(method)!r}"
        )
    else:
        cubes.check_known("method", method, cube.variables)
        for name, how in method.items():
            check_choice(f"method[{name!r}]", how, (*FILL_METHODS, None))
        argument, vars = "method", [name for name, how in method.items() if how is not None]
    if vars is None:
        names = data_variables(cube)
        check_left_out(cube)
    else:
        names = list(cubes.only_data(argument, names_of(argument, vars), cube))
    for name in names:
        if cube[name].dtype.kind not in "fiub":
            raise InvalidTypeError(
                f"vars must be variables of numbers, got {name!r} of dtype {cube[name].dtype}"
            )
        check_decoded(name, cube[name])
    floats = [name for name in names if cube[name].dtype.kind == "f"]
    if not isinstance(method, Mapping):
        return dict.fromkeys(floats, method)
    return {name: method[name] for name in floats}


def _without_dims(name: str, statistics: Mapping[str, VariableStatistics]) -> VariableStatistics:
    """Return the statistics of a variable; refuse those that are missing or keep dims."""
    if name not in statistics:
        raise InvalidValueError(f"statistics must have {name!r}, got {list(statistics)}")
    if np.ndim(statistics[name].mean):
        raise InvalidTypeError(
            f"statistics must not keep dims, as those of {name!r} do; compute them without dims "
            "and by"
        )
    return statistics[name]


def _fill_cube(cube: xr.Dataset, options: Mapping[str, dict[str, Any]]) -> xr.Dataset:
    """Fill variables by the options of `fill_gaps`, lazily if they are lazy; count filled cells."""
    lazy_counts, stages = read_counts(cube)
    if lazy_counts.keys() & {"gap", "mask"} and SAMPLE_DIM not in cube.dims:
        logger.warning(
            "cells that drop_nan_values or apply_filter dropped are gaps, which are filled too; "
            "fill before dropping, or cut samples first"
        )
    counts = {name: count.data for name, count in lazy_counts.items()}
    filled = {}
    for name in options:
        array = read_in_blocks(cube[name])
        gaps = xr.apply_ufunc(
            find_gaps, array.variable, dask="parallelized", output_dtypes=[np.bool_]
        )
        counts["filled"] = counts.get("filled", 0) + gaps.sum().data
        filled[name] = _filled(array, options[name])
        # it is not known yet whether a lazy one has gaps
        if array.chunks is not None or gaps.any():
            filled[name].attrs[FILLED_ATTR] = options[name]["method"]
    return with_counts(cubes.with_arrays(cube, filled), counts, stages)


def _filled(array: xr.DataArray, options: Mapping[str, Any]) -> Any:
    """Fill one variable of a cube."""
    window = []
    if SAMPLE_DIM in array.dims:
        window = [dim for dim in array.dims if dim != SAMPLE_DIM]
    if not window and options["method"] == "sample_mean":
        options = {**options, "method": "mean"}  # a single cell has no mean of its own
    inputs = [array]
    if options["method"] == "noise":
        inputs.append(_positions(array))
    filled = xr.apply_ufunc(
        _fill_block,
        *inputs,
        input_core_dims=[window] * len(inputs),
        output_core_dims=[window],
        kwargs=options,
        dask="parallelized",
        dask_gufunc_kwargs={"allow_rechunk": True},
        output_dtypes=[array.dtype],
        keep_attrs="override",
    ).transpose(*array.dims)
    # undo the rechunking to whole windows
    if array.chunks is None:
        return filled
    return filled.chunk(array.variable.chunksizes)


def _fill_block(
    values: NDArray[Any], positions: NDArray[np.uint64] | None = None, **options: Any
) -> NDArray[Any]:
    """Fill one block of cells, or of samples (samples, *window)."""
    return fill_gaps(values, positions=positions, **options)


def _positions(array: xr.DataArray) -> xr.DataArray:
    """Return the id of each cell, lazily if the array is lazy, as `cell_ids`."""
    ids = xr.DataArray(np.uint64(0))
    for dim, n in array.sizes.items():
        step = math.prod(m for other, m in array.sizes.items() if str(other) > str(dim))
        along = xr.DataArray(np.arange(n, dtype=np.uint64) * np.uint64(step), dims=[dim])
        if array.chunks is not None:
            along = along.chunk({dim: array.variable.chunksizes[dim]})
        ids = ids + along
    return ids.transpose(*array.dims)
