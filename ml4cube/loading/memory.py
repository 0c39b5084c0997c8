"""Memory: the part of a data set that a loader holds in memory, and the order of samples."""

from __future__ import annotations

import numpy as np

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.rank_shares import ChunkOrder, EvalShare, Ints, TrainShare, stream_count

_MB = 1 << 20
# Most bytes of small batches that are gathered together, also as a part of the buffer.
_GROUP_BYTES = 4 << 20
_GROUP_PART = 16


def check_megabytes(argument: str, value: object) -> None:
    """Refuse anything but a number of megabytes."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise InvalidTypeError(f"{argument} must be a number of megabytes, got {value!r}")
    if not 0 <= value < np.inf:
        raise InvalidValueError(f"{argument} must be at least 0 and finite, got {value!r}")


class Memory:
    """The part of a data set that a loader holds in memory, and the order of samples."""

    def __init__(self, counts: Ints, sample_bytes: int, buffer_mb: float) -> None:
        self._counts = counts
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._sample_bytes = max(1, sample_bytes)
        self._bytes = int(buffer_mb * _MB)
        chunk_bytes = int(self._counts.max(initial=1)) * self._sample_bytes
        self._chunks_that_fit = self._bytes // max(chunk_bytes, 1)
        self.fits = int(self._starts[-1]) * self._sample_bytes <= self._bytes
        if self._chunks_that_fit < 2 and not self.fits:
            raise InvalidValueError(
                f"buffer_mb={buffer_mb} is too small for two chunks of {chunk_bytes / _MB:.3g} MB; "
                f"give at least {2 * chunk_bytes / _MB:.3g}, or store smaller chunks"
            )

    @property
    def group_bytes(self) -> int:
        """Most bytes of small batches that are gathered together."""
        return min(_GROUP_BYTES, self._bytes // _GROUP_PART)

    @property
    def streams(self) -> int:
        """Number of chunks that a shuffled batch mixes if the samples do not fit."""
        return stream_count(int((self._counts > 0).sum()), self._chunks_that_fit)

    @property
    def order_name(self) -> str:
        """The kind of shuffle, for the loader's state."""
        return "whole" if self.fits else f"{self.streams} streams"

    def resident_chunks(self, share: TrainShare | EvalShare) -> range | None:
        """Return the chunks to hold in memory all the time; None if they do not fit."""
        if isinstance(share, TrainShare):
            return range(len(self._counts)) if self.fits else None
        if share.begin == share.end:
            return range(0)
        first = int(np.searchsorted(self._starts, share.begin, side="right")) - 1
        stop = int(np.searchsorted(self._starts, share.end, side="left"))
        held = int(self._starts[stop] - self._starts[first])
        return range(first, stop) if held * self._sample_bytes <= self._bytes else None

    def order(self, seed: int | None) -> ChunkOrder:
        """Return the order of samples that pass through a ring."""
        return ChunkOrder(self._counts, 1 if seed is None else self.streams, seed)

    def slots(self, order: ChunkOrder, share: TrainShare | EvalShare) -> int:
        """Return the number of chunks in one rank's ring: its share of the memory, if enough."""
        in_use, fit = order.streams, self._chunks_that_fit
        if isinstance(share, TrainShare) and in_use % share.world == 0:
            in_use, fit = in_use // share.world, fit // share.world
        return max(in_use + 1, min(fit, len(self._counts)))
