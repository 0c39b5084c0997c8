"""Memory: the part of a data set that a loader holds in memory, and the order of samples."""

from __future__ import annotations

import numpy as np

from ml4cube.core.display import bytes_text
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.rank_shares import ChunkOrder, Ints, stream_count

_MB = 1 << 20
# Most bytes of small batches that are gathered together, also as a part of the buffer.
_GROUP_BYTES = 4 << 20
_GROUP_PART = 16
# Most batches that are gathered together.
_MOST_IN_GROUP = 1024


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

    def batches_together(self, batch_size: int) -> int:
        """Return how many batches are gathered at once: small ones, which takes as long as one."""
        group_bytes = min(_GROUP_BYTES, self._bytes // _GROUP_PART)
        fit = group_bytes // (batch_size * self._sample_bytes)
        return max(1, min(fit, _MOST_IN_GROUP))

    @property
    def streams(self) -> int:
        """Number of chunks that a shuffled batch mixes if the samples do not fit."""
        return stream_count(int((self._counts > 0).sum()), self._chunks_that_fit)

    @property
    def described(self) -> str:
        """What is held in memory, in words."""
        if self.fits:
            return f"all samples, {bytes_text(int(self._starts[-1]) * self._sample_bytes)}"
        return (
            f"{self._chunks_that_fit:,} of {len(self._counts):,} chunks, {bytes_text(self._bytes)}"
        )

    @property
    def order_name(self) -> str:
        """The kind of shuffle, for the loader's state."""
        if self.fits:
            return "whole"
        return f"{self.streams} streams"

    def resident_chunks(self, samples: range) -> range | None:
        """Return the chunks of some samples, to be held all the time; None if they do not fit."""
        if not samples:
            return range(0)
        first = int(np.searchsorted(self._starts, samples.start, side="right")) - 1
        stop = int(np.searchsorted(self._starts, samples.stop, side="left"))
        held = int(self._starts[stop] - self._starts[first])
        if held * self._sample_bytes <= self._bytes:
            return range(first, stop)
        return None

    def order(self, seed: int | None) -> ChunkOrder:
        """Return the order of samples that pass through a ring."""
        return ChunkOrder(self._counts, 1 if seed is None else self.streams, seed)

    @property
    def slots(self) -> int:
        """Number of chunks in a ring, on each rank."""
        return min(self._chunks_that_fit, len(self._counts))
