"""Fingerprints of tiles, and of arrays, as sums: their pieces may be added in any order.

A cell's bits are mixed into a 64-bit word, multiplied with a random odd weight of its position in
the tile, and summed modulo 2**64, twice with other weights (multilinear hashing: Carter and
Wegman 1979, *Universal classes of hash functions*, J. Computer and System Sciences 18). Tiles
that differ in a cell agree by chance once in about 2**100 cases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

# Columns of a fingerprint: two hashes, the number of values that are not gaps, and two sums that
# show whether the values differ from one another.
FIRST, SECOND, KNOWN, SUM, SQUARES = range(5)
COLUMNS = 5

# Cells of the smallest informative tile whose values are all different.
_FEWEST_DIFFERENT = 8

#: The increment of SplitMix64: 2**64 over the golden ratio.
GOLDEN = 0x9E3779B97F4A7C15
_INCREMENT = np.uint64(GOLDEN)
_GAP = np.uint64(GOLDEN)  # the word of all gaps
_SALTS = (np.uint64(0xD1B54A32D192ED03), np.uint64(0x8CB92BA72F3D8DD7))


def mix(words: Words) -> Words:
    """Mix the bits of 64-bit words by a bijection."""
    # The finalizer of SplitMix64: Steele et al. 2014, OOPSLA
    words = words ^ (words >> np.uint64(30))
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)
    return words


def mix_number(number: int) -> int:
    """Mix the lowest 64 bits of a number."""
    return int(mix(np.array([number % 2**64], np.uint64))[0])


def words_of(values: NDArray[Any]) -> tuple[Words, NDArray[np.bool_]]:
    """Return the bits of values as 64-bit words, and which are not gaps."""
    # All gaps (NaN, NaT) are one word, and so are 0.0 and -0.0.
    values = values.astype(values.dtype.newbyteorder("="), copy=False)
    is_value = np.asarray(values == values)
    if values.dtype.kind == "f":
        if values.dtype.itemsize not in (2, 4, 8):
            values = values.astype(np.float64)
        bits = (values + values.dtype.type(0)).view(f"u{values.dtype.itemsize}")
    else:
        bits = values.astype(np.int64)
    return np.where(is_value, bits.astype(np.uint64), _GAP), is_value


def _position_weights(offsets: Sequence[NDArray[np.int64]], salt: np.uint64) -> Words:
    """Return a random odd weight of each cell, from its offset in the tile along each axis."""
    weights = np.full((1,) * len(offsets), salt)
    for offset in np.ix_(*offsets):
        weights = mix(weights + (offset.astype(np.uint64) + np.uint64(1)) * _INCREMENT)
    return weights | np.uint64(1)


def fingerprint_columns(
    values: NDArray[Any], offsets: Sequence[NDArray[np.int64]]
) -> Iterator[Words]:
    """Yield the five arrays whose sums over the cells of a tile are its fingerprint."""
    words, is_value = words_of(values)
    mixed = mix(words)
    yield mixed * _position_weights(offsets, _SALTS[0])
    yield mix(mixed ^ _SALTS[1]) * _position_weights(offsets, _SALTS[1])
    yield is_value.astype(np.uint64)
    highest_bits = np.where(is_value, mixed >> np.uint64(48), np.uint64(0))
    yield highest_bits
    yield highest_bits * highest_bits


def identify_cells(values: NDArray[Any], starts: Sequence[int]) -> Words:
    """Return two sums over the bits of a box of cells, which identify an array with others.

    `starts` are the first cells of the box in the array. The sums of all boxes of an array add up
    to the same numbers, however it is cut into boxes.
    """
    # Mixed bits, times a weight of the position along each axis: two arrays agree by chance once in
    # about 2**120 cases (Schwartz 1980, J. ACM 27, on zeros of polynomials).
    words = mix(values.view(f"u{values.dtype.itemsize}").astype(np.uint64))
    sums = []
    for salt in _SALTS:
        total = words
        for axis in reversed(range(values.ndim)):
            offsets = np.arange(starts[axis], starts[axis] + values.shape[axis], dtype=np.uint64)
            total = total @ (mix(offsets + mix(salt + np.full(1, axis, np.uint64))) | np.uint64(1))
        sums.append(total)
    return np.array(sums, np.uint64)


def are_informative(table: Words) -> NDArray[np.bool_]:
    """Return True for tiles with so many different values that equal tiles are no coincidence."""
    n = np.maximum(table[..., KNOWN].astype(float), 1.0)
    mean = table[..., SUM].astype(float) / n
    spread = table[..., SQUARES].astype(float) - n * mean**2
    # The squared difference of two random numbers of 16 bits is 2**32 / 6 on average. `spread` is
    # k (n - k) / n times as much if k of n values differ from the others, all of which are equal,
    # and n / 2 times as much if all values differ.
    return np.asarray(spread >= _FEWEST_DIFFERENT / 2 * 2.0**32 / 6)


def combine(tables: Sequence[Words]) -> Words:
    """Return one fingerprint of several variables, which depends on their order."""
    total = np.zeros_like(tables[0])
    for number, table in enumerate(tables, 1):
        salt = np.uint64(mix_number(number * GOLDEN))
        total[..., :KNOWN] += mix(table[..., :KNOWN] ^ salt)
        total[..., KNOWN:] += table[..., KNOWN:]
    return total
