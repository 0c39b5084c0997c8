"""Samples: dicts of arrays that carry the count of what each stage removed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.missing import plain
from ml4cube.preprocessing import cubes

#: Dim along which a Dataset holds samples.
SAMPLES = "samples"


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


def sample_arrays(
    samples: Mapping[str, Any], filter_var: str | None
) -> tuple[dict[str, NDArray[Any]], list[str], int]:
    """Read a dict of arrays; give label and mask a samples dim if they lack it."""
    arrays = {name: plain(values) for name, values in samples.items()}
    data = [name for name in arrays if name not in (filter_var, "split")]
    lengths = {name: arrays[name].shape[:1] for name in data}
    if len(set(lengths.values())) != 1 or () in lengths.values():
        raise InvalidValueError(f"arrays of samples must have equal first lengths, got {lengths}")
    for name in set(arrays).difference(data):
        arrays[name] = cubes.with_samples(arrays[name], arrays[data[0]].shape, name)
    return arrays, data, int(lengths[data[0]][0])
