"""Arrays that hold samples: of a batch, and of the chunks that batches are gathered from.

Nothing here knows torch or where samples come from.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.shares import Ints

Array = NDArray[Any]

# Variables whose samples are smaller are held sample by sample, all variables together.
_SMALL_BYTES = 64
# So many arrays for batches are kept for later ones; a user may have held all of an epoch.
_IDLE = 8


@dataclass(frozen=True)
class Field:
    """One array of a batch: a variable, or several variables stacked as channels."""

    variables: tuple[str, ...]
    # Cells of one sample of one variable.
    window: tuple[int, ...]
    # Type of the values handed over.
    dtype: np.dtype[Any]
    # Whether there is a channel axis; without it there is exactly one variable.
    stacked: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return (len(self.variables), *self.window) if self.stacked else self.window

    @property
    def nbytes(self) -> int:
        """Bytes of one sample."""
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize

    def empty(self, samples: int) -> Array:
        """Make room for samples."""
        return np.empty((samples, *self.shape), self.dtype)

    def views(self, array: Array) -> dict[str, Array]:
        """View each variable's part of an array made by `empty`."""
        if not self.stacked:
            return {self.variables[0]: array}
        return {name: array[:, channel] for channel, name in enumerate(self.variables)}


class Room:
    """Room for many samples of a field, from which batches are gathered."""

    # The samples of each variable lie end to end, as they do in a file: a chunk is decoded straight
    # to where it is gathered from, and not copied in between. Only where a sample of a variable is
    # as small as a point, all variables of a sample lie together.

    def __init__(self, field: Field, samples: int) -> None:
        self._field = field
        channels = len(field.variables) if field.stacked else 1
        cells = int(np.prod(field.window, dtype=np.int64))
        if channels == 1 or cells * field.dtype.itemsize < _SMALL_BYTES:
            self._samples = field.empty(samples)
            self._flat = self._samples.reshape(samples, channels * cells)
            self._channels: Ints | None = None
        else:
            self._samples = np.empty((channels, samples, *field.window), field.dtype)
            self._flat = self._samples.reshape(channels * samples, cells)
            self._channels = np.arange(channels) * samples

    def views(self, rows: slice) -> dict[str, Array]:
        """View each variable's part of some rows."""
        if self._channels is None:
            return self._field.views(self._samples[rows])
        return dict(zip(self._field.variables, self._samples[:, rows], strict=True))

    def gather(self, rows: Ints, out: Array) -> None:
        """Copy samples into a batch."""
        if self._channels is not None:
            rows = (rows[:, None] + self._channels).reshape(-1)
        # mode="clip" lets numpy write straight into the target; all rows are in range
        target = out.reshape(len(rows), self._flat.shape[1])
        np.take(self._flat, rows, axis=0, out=target, mode="clip")


class Buffers:
    """Arrays for batches, used again as soon as nobody holds the batch any more."""

    # A fresh array costs page faults, which is as much as filling it. An array is taken back when
    # the last reference to what `take` returned is gone, so a batch that is kept is safe.

    def __init__(self, field: Field, samples: int) -> None:
        self._field, self._samples = field, samples
        self._idle: list[Array] = []
        self._lent: dict[int, tuple[weakref.ref[Array], Array]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Buffers, (self._field, self._samples)

    def take(self, rows: int) -> Array:
        """Hand out an array for a batch."""
        try:
            base = self._idle.pop()  # in one step, since several threads may take
        except IndexError:
            base = self._field.empty(self._samples)
        view = base[:rows]
        key = id(base)
        self._lent[key] = weakref.ref(view, lambda _: self._take_back(key)), base
        return view

    def _take_back(self, key: int) -> None:
        base = self._lent.pop(key)[1]
        if len(self._idle) < _IDLE:
            self._idle.append(base)
