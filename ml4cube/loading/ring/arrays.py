"""Arrays of samples: of a batch, and of the chunks that batches are gathered from."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.rank_shares import Ints
from ml4cube.recipe.roles import ArrayName

Array = NDArray[Any]

# Variables with smaller samples are stored together, sample by sample.
_SMALL_BYTES = 64
# Idle arrays kept for later batches at most; a user may have held the batches of a whole epoch.
_IDLE = 8


@dataclass(frozen=True)
class Field:
    """One array of a batch: a variable, or several variables stacked as channels."""

    names: tuple[ArrayName, ...]
    # Cells of one sample of one variable.
    window: tuple[int, ...]
    # Dtype of the batch.
    dtype: np.dtype[Any]
    # Whether there is a channel axis; without it there is exactly one variable.
    stacked: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        if self.stacked:
            return (len(self.names), *self.window)
        return self.window

    @property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def empty(self, samples: int) -> Array:
        """Return an array (samples, [channels,] *window) of undefined values."""
        return np.empty((samples, *self.shape), self.dtype)

    def views(self, array: Array) -> dict[ArrayName, Array]:
        """Return the part of each variable in an array made by `empty`, as views."""
        if not self.stacked:
            return {self.names[0]: array}
        return {name: array[:, channel] for channel, name in enumerate(self.names)}


class SampleArray:
    """Samples of a field, from which batches are gathered."""

    # The samples of one variable are contiguous, as in a file, so that a chunk is decoded without
    # a copy. Only if they are as small as points, all variables of a sample are contiguous.

    def __init__(self, field: Field, samples: int) -> None:
        self._field = field
        channels = 1
        if field.stacked:
            channels = len(field.names)
        cells = int(np.prod(field.window, dtype=np.int64))
        if channels == 1 or cells * field.dtype.itemsize < _SMALL_BYTES:
            self._samples = field.empty(samples)
            self._rows = self._samples.reshape(samples, channels * cells)
            self._channel_starts: Ints | None = None
        else:
            self._samples = np.empty((channels, samples, *field.window), field.dtype)
            self._rows = self._samples.reshape(channels * samples, cells)
            self._channel_starts = np.arange(channels) * samples

    def views(self, rows: slice) -> dict[ArrayName, Array]:
        """Return the part (samples, *window) of each variable in some rows, as views."""
        if self._channel_starts is None:
            return self._field.views(self._samples[rows])
        return dict(zip(self._field.names, self._samples[:, rows], strict=True))

    def gather(self, rows: Ints, out: Array) -> None:
        """Copy samples into a batch (samples, [channels,] *window)."""
        if self._channel_starts is not None:
            rows = (rows[:, None] + self._channel_starts).reshape(-1)
        # All rows are in range, so `mode` changes no value, but lets numpy write into the target.
        target = out.reshape(len(rows), self._rows.shape[1])
        np.take(self._rows, rows, axis=0, out=target, mode="clip")


class Buffers:
    """Arrays for batches, used again as soon as nobody holds the batch any more."""

    # Page faults of a new array take as long as filling it. An array is reused when the last
    # reference to what `take` returned is gone: a tensor made of it, or of a part of it, holds one,
    # so a batch that a user holds does not change. A numpy slice of it holds none.

    def __init__(self, field: Field, samples: int) -> None:
        self._field, self._samples = field, samples
        self._idle: list[Array] = []
        self._lent: dict[int, tuple[weakref.ref[Array], Array]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Buffers, (self._field, self._samples)

    def take(self, rows: int) -> Array:
        """Return an array for a batch."""
        try:
            base = self._idle.pop()  # Atomic, because several threads may call this.
        except IndexError:
            base = self._field.empty(self._samples)
        lent = base[:rows]
        key = id(base)
        self._lent[key] = weakref.ref(lent, lambda _: self._take_back(key)), base
        return lent

    def _take_back(self, key: int) -> None:
        _, base = self._lent.pop(key)
        if len(self._idle) < _IDLE:
            self._idle.append(base)


class Scratch(threading.local):
    """Arrays that each thread uses again; they are not pickled."""

    def __init__(self) -> None:
        self._arrays: dict[Hashable, Array] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Scratch, ()

    def take(self, name: Hashable, shape: tuple[int, ...], dtype: Any) -> Array:
        """Return an array that is valid until the next call for the same name."""
        array = self._arrays.get(name)
        kind = shape[1:], np.dtype(dtype)
        if array is None or (array.shape[1:], array.dtype) != kind or len(array) < shape[0]:
            array = self._arrays[name] = np.empty(shape, dtype)
        return array[: shape[0]]
