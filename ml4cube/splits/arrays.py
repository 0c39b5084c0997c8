"""create_split: a cube or arrays with a `split` become X and y arrays for training and testing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.errors import EmptyPartError, InvalidTypeError, InvalidValueError
from ml4cube.core.missing import (
    FILL_FEATURES,
    FILLED_ATTR,
    find_gaps,
    plain,
    warn_of_filled,
)
from ml4cube.core.sample_spec import SAMPLE_DIM
from ml4cube.core.split_plan import TEST, TRAIN
from ml4cube.cube.roles import FILTER_VAR
from ml4cube.cube.variables import cube_variables
from ml4cube.splits.cube import CubeView

Arrays = dict[str, NDArray[Any]]


def create_split(
    data: xr.Dataset | Mapping[str, ArrayLike],
    to_pred: str | Iterable[str],
    exclude_vars: str | Iterable[str] = (),
    feature_vars: str | Iterable[str] | None = None,
    stack_axis: int = -1,
    filter_var: str | None = "filter_mask",
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Turn a cube or arrays with a `split` into feature and target arrays, in memory.

    Of a cube, every cell of a part becomes a row, in the order of the cube's dims, unless it is
    masked or has a gap in a feature or target: ready for scikit-learn. Of samples (a Dataset with
    a dim ``samples``, or arrays, whose first axis counts samples), every sample becomes one of X:
    cells of other parts become NaN, and a sample is dropped where a feature or target has no
    value left.

    Parameters
    ----------
    data : Dataset or mapping of str to array_like
        Variables of one shape and the label ``split`` (train 1 or True, test 0 or False;
        val and excluded cells go to neither). Variables of a Dataset may have other dim
        orders or lack dims; of arrays, ``split`` and the mask may also count samples only.
    to_pred : str or iterable of str
        Target variables.
    exclude_vars : str or iterable of str
        Variables that are no features.
    feature_vars : str or iterable of str, optional
        Feature variables; by default all but targets, `exclude_vars`, and labels and masks
        of any name.
    stack_axis : int
        Axis along which variables are stacked.
    filter_var : str, optional
        Mask of bools; cells where it is false go to neither part. Ignored if not in `data`.

    Returns
    -------
    tuple of ndarray
        X_train, X_test, y_train, y_test; variables along `stack_axis`, samples first. Those of a
        cube have shape (cells, variables).

    Raises
    ------
    InvalidTypeError
        If `data` is neither a Dataset nor a mapping, or a feature or target holds no numbers. A
        single target of points may hold anything, such as names of classes.
    InvalidValueError
        If a variable is unknown, shapes differ, there is no label, or no such axis.
    EmptyPartError
        If a part of the label is left without a sample.

    Examples
    --------
    >>> data = {"a": [1.0, 2.0, 3.0], "b": [4.0, np.nan, 6.0], "split": [1, 1, 0]}
    >>> X_train, X_test, y_train, y_test = create_split(data, to_pred="b")
    >>> X_train.tolist(), y_train.tolist(), X_test.tolist()
    ([[1.0]], [[4.0]], [[3.0]])
    >>> cube = xr.Dataset({name: (("y", "x"), [values] * 2) for name, values in data.items()})
    >>> create_split(cube, to_pred="b")[0].tolist()
    [[1.0], [1.0]]
    """
    if not isinstance(data, xr.Dataset | Mapping):
        raise InvalidTypeError(
            f"data is a {type(data).__name__}; give a Dataset or a dict of arrays with a 'split'"
        )
    names = [str(name) for name in (data.data_vars if isinstance(data, xr.Dataset) else data)]
    if "split" not in names:
        raise InvalidValueError(f"data has no 'split', only {names}; call assign_block_split first")
    targets, excluded = _names(to_pred), _names(exclude_vars)
    if feature_vars is None:
        left_out = {*targets, *excluded, "split", filter_var}
        features = [name for name in _candidates(data, names) if name not in left_out]
    else:
        features = _names(feature_vars)
    for argument, given in (
        ("to_pred", targets),
        ("exclude_vars", excluded),
        ("feature_vars", features),
    ):
        if unknown := [name for name in given if name not in names]:
            raise InvalidValueError(f"{argument} names {unknown}, data has {names}")
    if isinstance(data, xr.Dataset):
        attrs = {name: data[name].attrs for name in targets}
        filled = {name: own[FILLED_ATTR] for name, own in attrs.items() if FILLED_ATTR in own}
        warn_of_filled("to_pred", filled, FILL_FEATURES, stacklevel=3)
    if not targets or not features:
        raise InvalidValueError(
            f"features {features} and targets {targets}: there must be at least one of each"
        )
    if filter_var not in (None, FILTER_VAR, *names):
        raise InvalidValueError(f"filter_var={filter_var!r} is no variable of data, it has {names}")
    mask = [filter_var] if filter_var in names else []
    arrays = _aligned(data, [*features, *targets], ["split", *mask])
    by_cell = isinstance(data, xr.Dataset) and SAMPLE_DIM not in data.dims
    _check_numbers(arrays, features, targets, by_cell)
    axes = 2 if by_cell else arrays["split"].ndim + 1
    if not isinstance(stack_axis, int):
        raise InvalidTypeError(f"stack_axis={stack_axis!r} is no axis; give an int, as -1")
    if not -axes <= stack_axis < axes:
        raise InvalidValueError(
            f"stack_axis={stack_axis!r}, but stacked variables have {axes} axes; give "
            f"{-axes} to {axes - 1}"
        )
    # a mask may have become numbers on its way here: a gap in it allows nothing
    allowed = np.nan_to_num(arrays[mask[0]]).astype(bool) if mask else np.bool_(True)
    parts = {
        part: _take(
            arrays, (arrays["split"] == label) & allowed, [*features, *targets], part, by_cell
        )
        for part, label in (("train", TRAIN), ("test", TEST))
    }
    X_train, X_test = (_stack(parts[part], features, stack_axis) for part in parts)
    y_train, y_test = (_stack(parts[part], targets, stack_axis) for part in parts)
    return X_train, X_test, y_train, y_test


def _check_numbers(
    arrays: Arrays, features: Sequence[str], targets: Sequence[str], by_cell: bool
) -> None:
    """Refuse texts and dates, which numpy would stack as texts or fail on."""
    classes = len(targets) == 1 and (by_cell or arrays[targets[0]].ndim == 1)
    for name in (*features, *([] if classes else targets)):
        dtype = arrays[name].dtype
        if dtype.kind not in "biufc":
            raise InvalidTypeError(
                f"{name!r} holds {dtype}, X and y hold numbers; turn it into numbers, or leave it "
                f"out, as in exclude_vars=[{name!r}]"
            )


def _names(given: str | Iterable[str]) -> list[str]:
    return [given] if isinstance(given, str) else list(given)


def _candidates(data: xr.Dataset | Mapping[str, ArrayLike], names: list[str]) -> list[str]:
    """Variables that can be features: of a cube, those on its dims that hold numbers of its own."""
    if not isinstance(data, xr.Dataset):
        return names
    return [name for name in cube_variables(data)[0] if data[name].dtype.kind in "biuf"]


def _aligned(
    data: xr.Dataset | Mapping[str, ArrayLike], used: Sequence[str], labels: Sequence[str]
) -> Arrays:
    """All arrays in one shape, axes in the same order."""
    if isinstance(data, xr.Dataset):
        view = CubeView.of(data)
        return {name: _broadcast(data[name], view) for name in (*used, *labels)}
    arrays = {name: plain(data[name]) for name in (*used, *labels)}
    shape = arrays[used[0]].shape
    for name in used:
        if arrays[name].shape != shape or not shape:
            raise InvalidValueError(
                f"{name!r} has shape {arrays[name].shape}, {used[0]!r} has {shape}; variables "
                "need one shape, samples first"
            )
    for name in labels:
        label = arrays[name]
        if label.shape == shape[:1]:  # one value for each sample
            label = label.reshape(-1, *(1,) * (len(shape) - 1))
        try:
            arrays[name] = np.broadcast_to(label, shape)
        except ValueError:
            raise InvalidValueError(
                f"{name!r} has shape {arrays[name].shape}, the variables have {shape}; give one "
                "value for each cell or for each sample"
            ) from None
    return arrays


def _broadcast(variable: xr.DataArray, view: CubeView) -> NDArray[Any]:
    if not set(view.dims).issuperset(variable.dims):
        raise InvalidValueError(
            f"{variable.name!r} has dims {variable.dims}, the cube has {view.dims}; leave it out"
        )
    present = [dim for dim in view.dims if dim in variable.dims]
    values = variable.transpose(*present).values
    index = tuple(slice(None) if dim in present else None for dim in view.dims)
    return np.broadcast_to(values[index], tuple(view.sizes.values()))


def _take(
    arrays: Arrays, mine: NDArray[np.bool_], used: Sequence[str], part: str, by_cell: bool
) -> Arrays:
    """Cells or samples of one part, without those that have nothing left."""
    gaps = {name: ~mine | _is_gap(arrays[name]) for name in used}
    within = () if by_cell else tuple(range(1, mine.ndim))
    keep = ~np.any([gap.all(axis=within) for gap in gaps.values()], axis=0)
    if mine.any() and not keep.any():
        raise EmptyPartError(
            f"no {part} sample is left of {int(mine.sum())} {part} cells: everywhere one of "
            f"{list(used)} has gaps; leave a variable out or fill the gaps first"
        )
    taken = {name: arrays[name][keep] for name in used}
    if mine[keep].all():
        return taken
    return {name: np.where(mine[keep], values, np.nan) for name, values in taken.items()}


def _is_gap(values: NDArray[Any]) -> NDArray[np.bool_]:
    # names of classes may be missing: None or NaN among them
    return np.asarray(pd.isnull(values)) if values.dtype == object else find_gaps(values)


def _stack(arrays: Arrays, names: Sequence[str], axis: int) -> NDArray[Any]:
    return np.stack([arrays[name] for name in names], axis=axis)
