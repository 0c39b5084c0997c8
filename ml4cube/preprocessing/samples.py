"""Samples: dicts of arrays that carry the counts of what each stage removed.

Every stage works on a Dataset: `as_cube` makes one of samples, and `like_given` samples of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.missing import masked_to_gaps
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.cube import masks_and_labels
from ml4cube.cube.opening import as_dataset
from ml4cube.preprocessing import cubes
from ml4cube.preprocessing.counts import accounting, is_count, with_counts


class Samples(dict[str, NDArray[Any]]):
    """Dict of arrays (samples, *window) with counts of the dropped samples.

    Parameters
    ----------
    arrays : mapping of str to ndarray
        By variable, all with the same number of samples.
    accounting : mapping of str to int
        ``total`` at the start, ``kept`` now, and the dropped ones by reason (``mask``, ``gap``),
        which add up to the total. ``filled`` counts cells, not samples.

    Examples
    --------
    >>> import numpy as np
    >>> from ml4cube.preprocessing import drop_nan_values
    >>> result = drop_nan_values({"t": np.array([[1.0, np.nan], [2.0, 3.0]])}, ["t"])
    >>> result["t"], result.accounting
    (array([[2., 3.]]), {'total': 2, 'kept': 1, 'gap': 1})
    """

    def __init__(
        self, arrays: Mapping[str, NDArray[Any]], accounting: Mapping[str, int] | None = None
    ) -> None:
        """Store the arrays and copy the counts."""
        super().__init__(arrays)
        self.accounting: dict[str, int] = dict(accounting or {})


def as_cube(ds: cubes.Cube, filter_var: str | None = masks_and_labels.FILTER_VAR) -> xr.Dataset:
    """Return a cube of any kind as a Dataset; samples get dims by position and length."""
    ds = cubes.opened(ds)
    if isinstance(ds, xr.Dataset | xr.DataArray):
        return as_dataset(ds)
    arrays = {name: masked_to_gaps(values) for name, values in ds.items()}
    shapes = _data_shapes(arrays, filter_var)
    data_shapes = [s for s in shapes.values() if len(s) > 1] or [*shapes.values()]
    for name in arrays.keys() - shapes.keys():
        # it must fit the windows of all data, and then all give the same array
        arrays[name] = [_with_samples(arrays[name], shape, name) for shape in data_shapes][-1]
    # fastpath: dates and objects stay as they are
    variables = {n: xr.Variable(_dims(v.shape), v, fastpath=True) for n, v in arrays.items()}
    _check_names(variables)
    counts = {name: n for name, n in getattr(ds, "accounting", {}).items() if name != "kept"}
    return as_dataset(with_counts(xr.Dataset(variables), counts))


def _data_shapes(
    arrays: Mapping[str, NDArray[Any]], filter_var: str | None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all arrays but labels and masks; refuse different numbers of samples."""
    shapes = {n: array.shape for n, array in arrays.items() if n not in (filter_var, "split")}
    lengths = {name: shape[:1] for name, shape in shapes.items()}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        raise InvalidValueError(f"arrays of samples must have equal first lengths, got {lengths}")
    return shapes


def _check_names(variables: Mapping[str, xr.Variable]) -> None:
    """Refuse variables named like a dim of samples or a count."""
    dims = {dim for variable in variables.values() for dim in variable.dims}
    if taken := [name for name in variables if name in dims or is_count(name)]:
        raise InvalidValueError(f"variables of samples must not be named {taken}; rename them")


def _dims(shape: tuple[int, ...]) -> list[str]:
    """Return names of dims, the same for windows of different ranks that end in equal lengths."""
    # numbered from the last, so that sorted names, by which noise is seeded, are in order
    window = [f"window{99 - i}_{n}" for i, n in enumerate(reversed(shape[1:]))]
    return [SAMPLE_DIM, *reversed(window)]


def _with_samples(array: NDArray[Any], shape: tuple[int, ...], name: str) -> NDArray[Any]:
    """Add a leading samples dim to a label or mask that lacks it."""
    n, window = shape[0], shape[1:]
    if array.shape == shape:
        return array
    by_sample = array.shape[:1] == (n,) and _ends_with(window, array.shape[1:])
    static = _ends_with(window, array.shape)
    # one dim as long as both samples and window is that of the samples, as of a label
    if by_sample and static and array.ndim > 1:
        raise InvalidValueError(
            f"{name} of shape {array.shape} is ambiguous for data of shape {shape}: with or "
            "without samples; give it the full shape"
        )
    if not by_sample and not static:
        raise InvalidValueError(
            f"{name} has shape {array.shape}, the data {shape}; give one value per "
            "sample, per window cell, or per cell"
        )
    if by_sample:
        return array
    return np.broadcast_to(array, (n, *array.shape))


def _ends_with(shape: tuple[int, ...], ending: tuple[int, ...]) -> bool:
    return len(ending) <= len(shape) and shape[len(shape) - len(ending) :] == ending


def like_given(result: xr.Dataset, given: cubes.Opened) -> Any:
    """Return a result of `as_cube` as the kind of cube that was given to it."""
    if isinstance(given, xr.Dataset):
        return result
    if isinstance(given, xr.DataArray):
        name = masks_and_labels.DATA_VAR if given.name is None else str(given.name)
        return result[name].rename(given.name)
    n = result.sizes[SAMPLE_DIM]
    counts = {"total": n, "kept": n, **accounting(result)}
    # copies, because what a stage left as it was still lies in the memory of the given arrays
    return Samples({name: np.array(result[name].values) for name in given}, counts)
