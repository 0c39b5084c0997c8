"""The classes of a variable that holds labels, which are scored as one number for each class."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, check_real
from ml4cube.core.grid import Block
from ml4cube.cube.classes import MOST_CLASSES, class_names, is_flagged
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.scan import Cells, blocks_of, scan
from ml4cube.evaluation.cells.cell_reader import CLASS, Floats

# Of probabilities in bfloat16.
_ROUNDING = 1e-2


def class_labels(prediction: xr.DataArray, truth: xr.DataArray) -> NDArray[Any] | None:
    """Return the labels by which a prediction and its truth are compared; None for quantities.

    Integers without flags are quantities, such as counts.
    """
    if CLASS in prediction.dims and CLASS not in truth.dims:
        return labels_along(prediction, truth)
    are_flagged = is_flagged(truth.attrs) or is_flagged(prediction.attrs)
    if not are_flagged and not truth.dtype.kind == prediction.dtype.kind == "b":
        return None
    listed = class_names(truth) or class_names(prediction)
    labels = np.array([*listed])
    if not listed:
        labels = _labels_in(truth, prediction)
    if len(labels) > MOST_CLASSES:
        raise InvalidValueError(
            f"{truth.name!r} holds classes, of which at most {MOST_CLASSES} are scored, got "
            f"{len(labels)}; drop its flags if they are numbers"
        )
    return labels


def labels_along(array: xr.DataArray, truth: xr.DataArray) -> NDArray[Any]:
    """Return the labels along the dim of classes; names are looked up in the truth's flags."""
    labels = np.asarray(array[CLASS].values)
    numbers = {name: label for label, name in class_names(truth).items()}
    if labels.dtype.kind in "OTU" and numbers.keys() >= set(labels.tolist()):
        labels = np.array([numbers[name] for name in labels.tolist()])
    check_real(f"labels along {CLASS!r} of {array.name!r}", labels.dtype)
    return labels


def in_order(array: xr.DataArray, truth: xr.DataArray, labels: NDArray[Any]) -> xr.DataArray:
    """Return probabilities in the order of the labels."""
    own = labels_along(array, truth).tolist()
    if lacking := [label for label in labels.tolist() if label not in own]:
        raise InvalidValueError(
            f"probabilities of {array.name!r} must have the classes {labels.tolist()}, got {own} "
            f"without {lacking}"
        )
    return array.isel({CLASS: [own.index(label) for label in labels.tolist()]})


def refuse_logits(name: Hashable, values: NDArray[Any]) -> None:
    """Refuse numbers that are no probabilities, up to rounding."""
    wrong = values[(values < -_ROUNDING) | (values > 1 + _ROUNDING)]
    if wrong.size:
        raise InvalidValueError(
            f"{name!r} must have probabilities from 0 to 1 along {CLASS!r}, got {wrong[0]:g}; turn "
            "logits into probabilities by a softmax, as predict_cube does"
        )


def _labels_in(*arrays: xr.DataArray) -> Floats:
    """Return the different values of arrays, no more than show that there are too many."""
    labels = np.zeros(0)
    for array in arrays:
        reader = CubeReader.of_variables({str(array.name): array.variable})
        for values in scan(reader, _labels_in_block, blocks_of(reader)):
            labels = np.union1d(labels, values)
            if len(labels) > MOST_CLASSES:
                return labels
    return labels


def _labels_in_block(_: Block, cells: Cells) -> Floats:
    (values,) = cells.values()
    labels = np.unique(values.astype(np.float64))
    return labels[np.isfinite(labels)]


def known_in_all(probabilities: Floats, axis: int) -> Floats:
    """Return probabilities as NaN where that of a class is unknown."""
    is_known = np.isfinite(probabilities).all(axis, keepdims=True)
    return np.where(is_known, probabilities, np.nan)


def most_likely(probabilities: Floats, axis: int) -> Floats:
    """Return 1 for the most likely class and 0 for the others; NaN where one is unknown."""
    best = np.nan_to_num(probabilities, nan=-1.0).argmax(axis)
    is_best = np.zeros(probabilities.shape, bool)
    np.put_along_axis(is_best, np.expand_dims(best, axis), True, axis)
    return np.where(np.isfinite(probabilities).all(axis, keepdims=True), is_best, np.nan)
