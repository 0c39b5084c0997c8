"""create_split: turn a cube or arrays with a `split` into X and y arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.errors import EmptyPartError, InvalidTypeError, InvalidValueError, names_of
from ml4cube.core.missing import (
    FILL_FEATURES,
    FILLED_ATTR,
    bool_mask,
    find_gaps,
    masked_to_gaps,
    warn_of_filled,
)
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.core.split_plan import TEST, TRAIN
from ml4cube.core.statistics import check_decoded
from ml4cube.cube.absent_chunks import heed_absent_chunks
from ml4cube.cube.masks_and_labels import FILTER_VAR
from ml4cube.cube.variables import check_left_out, cube_variables
from ml4cube.splits.cube import CubeView

Arrays = dict[str, NDArray[Any]]


def create_split(
    data: xr.Dataset | Mapping[str, ArrayLike],
    to_pred: str | Iterable[str],
    exclude_vars: str | Iterable[str] = (),
    feature_vars: str | Iterable[str] | None = None,
    stack_axis: int = -1,
    filter_var: str | None = "filter_mask",
    *,
    missing_chunks: str = "warn",
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]:
    """Turn a cube or arrays with a `split` into feature and target arrays, in memory.

    In a cube, every cell of a part becomes a row, in the order of the cube's dims, unless it is
    masked or has a gap in a feature or target: ready for scikit-learn. In samples (a Dataset with
    a dim ``samples``, or arrays with samples along the first axis), every sample becomes a sample
    of X: cells of other parts become NaN, and a sample is dropped if a feature or target has no
    value left.

    Parameters
    ----------
    data : Dataset or mapping of str to array_like
        Variables of one shape and the label ``split`` (train 1 or True, test 0 or False;
        val and excluded cells go to neither). Variables of a Dataset may have other dim
        orders or lack dims. For arrays, ``split`` and the mask may have one value per sample,
        or per cell of a window.
    to_pred : str or iterable of str
        Target variables.
    exclude_vars : str or iterable of str
        Variables that are not features. Ignored if `feature_vars` is given.
    feature_vars : str or iterable of str, optional
        Feature variables; by default all except targets, `exclude_vars`, labels and masks.
    stack_axis : int
        Axis of X and y along which variables are stacked, as for ``numpy.stack``: X of samples
        has one axis more than a variable, X of cells has two. By default the last.
    filter_var : str, optional
        Mask of bools; cells where it is false go to neither part. Ignored if not in `data`.
    missing_chunks : {"warn", "raise", "drop"}, default "warn"
        What to do about chunks that the zarr store of a cube lacks and that read as values: warn,
        refuse them, or take their cells for gaps.

    Returns
    -------
    tuple of ndarray
        X_train, X_test, y_train, y_test; samples first, variables along `stack_axis`. For a cube
        the shape is (cells, variables).

    Raises
    ------
    InvalidTypeError
        If `data` is neither a Dataset nor a mapping, or the label, a feature or a target does not
        hold numbers. A single target of cells or points may also be dates or names of classes.
    InvalidValueError
        If a variable is unknown or holds packed integers that were not decoded, shapes differ,
        there is no label, or `stack_axis` is out of range.
    EmptyPartError
        If a part has cells, but each of its samples has a gap.

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
    features, targets, mask = _variables(data, to_pred, exclude_vars, feature_vars, filter_var)
    used = [*features, *targets]
    if isinstance(data, xr.Dataset):
        read = [*used, "split", *([] if mask is None else [mask])]
        data = heed_absent_chunks(data, read, missing_chunks, mask=mask).cube
    arrays = _align(data, used, ["split"] if mask is None else ["split", mask])
    by_cell = isinstance(data, xr.Dataset) and SAMPLE_DIM not in data.dims
    _check_numbers(arrays, features, targets, by_cell)
    n_axes = 2
    if not by_cell:
        n_axes = arrays["split"].ndim + 1
    if not isinstance(stack_axis, int):
        raise InvalidTypeError(f"stack_axis must be an integer, got {stack_axis!r}")
    if not -n_axes <= stack_axis < n_axes:
        raise InvalidValueError(
            f"stack_axis must be from {-n_axes} to {n_axes - 1}, got {stack_axis}"
        )
    unmasked: NDArray[np.bool_] | bool = True
    if mask is not None:
        unmasked = bool_mask(arrays[mask])
    variables = {name: arrays[name] for name in used}
    train = _select(variables, (arrays["split"] == TRAIN) & unmasked, "train", by_cell)
    test = _select(variables, (arrays["split"] == TEST) & unmasked, "test", by_cell)
    X_train, X_test, y_train, y_test = (
        np.stack([part[name] for name in names], axis=stack_axis)
        for names in (features, targets)
        for part in (train, test)
    )
    return X_train, X_test, y_train, y_test


def _variables(
    data: Any,
    to_pred: str | Iterable[str],
    exclude_vars: str | Iterable[str],
    feature_vars: str | Iterable[str] | None,
    filter_var: str | None,
) -> tuple[Sequence[str], Sequence[str], str | None]:
    """Return the names of the features, of the targets, and of the mask if there is one."""
    names = _names_in(data)
    if filter_var not in (None, FILTER_VAR, *names):
        raise InvalidValueError(f"filter_var: unknown variable {filter_var!r}; data has {names}")
    targets = names_of("to_pred", to_pred)
    excluded = names_of("exclude_vars", exclude_vars)
    features = names_of("feature_vars", feature_vars)
    if feature_vars is None:
        features = _default_features(data, names, {*targets, *excluded, "split", filter_var})
    arguments = {"to_pred": targets, "exclude_vars": excluded, "feature_vars": features}
    for argument, variables in arguments.items():
        if unknown := [name for name in variables if name not in names]:
            raise InvalidValueError(f"{argument}: unknown variables {unknown}; data has {names}")
    if not targets or not features:
        raise InvalidValueError(
            f"there must be at least one feature and one target, got features {features} and "
            f"targets {targets}"
        )
    if isinstance(data, xr.Dataset):
        _check_values(data, features, targets)
    if filter_var not in names:
        filter_var = None
    return features, targets, filter_var


def _names_in(data: Any) -> list[str]:
    """Return the names of all variables or arrays, of which one is the split."""
    if not isinstance(data, xr.Dataset | Mapping):
        raise InvalidTypeError(
            f"data must be a Dataset or a dict of arrays with a 'split', got {type(data).__name__}"
        )
    variables: Iterable[Any] = data
    if isinstance(data, xr.Dataset):
        variables = data.data_vars
    names = [str(name) for name in variables]
    if "split" not in names:
        raise InvalidValueError(f"data has no 'split', only {names}; call assign_block_split first")
    return names


def _default_features(data: Any, names: list[str], left_out: set[str | None]) -> tuple[str, ...]:
    """Return the variables of a cube that hold numbers, or all arrays, but those left out."""
    candidates = names
    if isinstance(data, xr.Dataset):
        held, reasons = cube_variables(data)
        check_left_out(data, reasons)
        candidates = [name for name in held if data[name].dtype.kind in "biuf"]
    return tuple(name for name in candidates if name not in left_out)


def _check_values(data: xr.Dataset, features: Sequence[str], targets: Sequence[str]) -> None:
    """Refuse variables that are not decoded, and warn of targets whose gaps were filled."""
    for name in (*features, *targets):
        check_decoded(name, data[name])
    attrs = {name: data[name].attrs for name in targets}
    filled = {name: has[FILLED_ATTR] for name, has in attrs.items() if FILLED_ATTR in has}
    warn_of_filled("to_pred", filled, FILL_FEATURES)


def _align(
    data: xr.Dataset | Mapping[str, ArrayLike], used: Sequence[str], labels: Sequence[str]
) -> Arrays:
    """Return variables and labels (the split and the mask) as arrays of one shape."""
    names = (*used, *labels)
    if isinstance(data, xr.Dataset):
        sizes = CubeView.of(data).sizes
        if SAMPLE_DIM in sizes:
            sizes = {SAMPLE_DIM: sizes[SAMPLE_DIM], **sizes}
        for name in names:
            if not set(sizes).issuperset(data[name].dims):
                raise InvalidValueError(
                    f"{name!r} has dims {data[name].dims}, but the cube has {tuple(sizes)}; leave "
                    "it out"
                )
        return {name: np.asarray(data[name].variable.set_dims(sizes).values) for name in names}  # type: ignore[no-untyped-call]
    arrays = {name: masked_to_gaps(data[name]) for name in names}
    shape = arrays[used[0]].shape
    for name, array in arrays.items():
        per_sample = name in labels and array.shape == shape[:1]
        # The last axes are those of a window.
        per_window_cell = name in labels and array.shape == shape[len(shape) - array.ndim :]
        if per_sample:
            arrays[name] = array.reshape(array.shape + (1,) * (len(shape) - 1))
        elif not shape or not (array.shape == shape or per_window_cell):
            raise InvalidValueError(
                "variables must have one shape, samples first, and labels too, or one value per "
                f"sample or per cell of a window, got {array.shape} for {name!r} and {shape} for "
                f"{used[0]!r}"
            )
    return {name: np.broadcast_to(array, shape) for name, array in arrays.items()}


def _check_numbers(
    arrays: Arrays, features: Sequence[str], targets: Sequence[str], by_cell: bool
) -> None:
    """Refuse texts and dates, which numpy cannot stack with numbers, and texts as a label."""
    if arrays["split"].dtype.kind not in "biuf":
        raise InvalidTypeError(
            f"'split' must hold numbers (train {TRAIN}, test {TEST}), got {arrays['split'].dtype}"
        )
    may_be_classes = len(targets) == 1 and (by_cell or arrays[targets[0]].ndim == 1)
    for name in features if may_be_classes else (*features, *targets):
        dtype = arrays[name].dtype
        if dtype.kind not in "biufc":
            raise InvalidTypeError(
                f"{name!r} must hold numbers, got {dtype}; convert it, or leave it out with "
                f"exclude_vars=[{name!r}]"
            )


def _select(variables: Arrays, in_part: NDArray[np.bool_], part: str, by_cell: bool) -> Arrays:
    """Return the cells, or the samples, of a part that have a value in each variable.

    Cells of a sample that are not in the part become NaN.
    """
    window_axes: tuple[int, ...] = ()
    if not by_cell:
        window_axes = tuple(range(1, in_part.ndim))
    has_values = np.ones(in_part.shape if by_cell else len(in_part), dtype=bool)
    for values in variables.values():
        # Names of classes may be missing: None or NaN.
        gaps = pd.isnull(values) if values.dtype == object else find_gaps(values)
        has_values &= (in_part & ~gaps).any(axis=window_axes)
    if in_part.any() and not has_values.any():
        raise EmptyPartError(
            f"no {part} sample is left of {int(in_part.sum())} {part} cells because each has a gap "
            f"in one of {list(variables)}; leave a variable out or fill the gaps first"
        )
    selected = {name: values[has_values] for name, values in variables.items()}
    in_part = in_part[has_values]
    if in_part.all():
        return selected
    return {name: np.where(in_part, values, np.nan) for name, values in selected.items()}
