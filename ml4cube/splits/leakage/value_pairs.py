"""Find held-out cells whose values, with those of their neighbours, also stand somewhere in train.

A patch is found wherever it was moved to. Pairs of neighbouring values are hashed, and those whose
hash is divisible by a number are kept, so that a pair and its copy are both kept or both not. This
tells only where values have many digits: pairs of whole numbers repeat by nature.
"""

from __future__ import annotations

import math
from typing import Any

import dask
import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.fingerprint import Words, mix, words_of
from ml4cube.core.split_plan import HELD_OUT, TRAIN
from ml4cube.splits.cube import CubeView, in_chunks

# About the most pairs that are kept.
_PAIRS_AT_MOST = 1 << 18
_FEWEST_PAIRS = 8
# Fraction of the held-out pairs that may be equal to others by chance.
_SHARE = 1e-3
# If more of the distinct pairs of train repeat there, values are rounded, or a climatology.
_REPEATED = 0.01
# Copies are more than this many times the pairs that rounded values have in common by chance.
_BEYOND_CHANCE = 3.0


def copied_share(view: CubeView, label: xr.DataArray, name: str) -> float:
    """Return the fraction of held-out pairs of neighbours that train holds too; 0 if few do."""
    array = view.ds[name]
    inner = sorted(view.dims_of_map)
    if array.dtype.kind != "f" or set(array.dims) != set(view.dims) or not inner:
        return 0.0
    outer = [dim for dim in view.sorted_sizes if dim not in inner]
    values = xr.DataArray(in_chunks(array).variable).transpose(*outer, *inner)
    codes = xr.DataArray(label.variable).broadcast_like(values).transpose(*outer, *inner)
    divisor = np.uint64(max(math.prod(values.shape) // _PAIRS_AT_MOST, 1))
    pieces = [(values.data, codes.data)]
    if values.chunks is not None:
        codes = codes.chunk(values.chunksizes)
        pieces = list(
            zip(values.data.to_delayed().ravel(), codes.data.to_delayed().ravel(), strict=True)
        )
    hashes = dask.compute(*(dask.delayed(_pairs)(*piece, divisor) for piece in pieces))  # type: ignore[attr-defined, no-untyped-call]
    train = np.concatenate([of_train for of_train, _ in hashes])
    held_out = np.concatenate([of_held_out for _, of_held_out in hashes])
    pairs, counts = np.unique(train, return_counts=True)
    repeated = pairs[counts > 1]
    by_chance = _common_by_chance(train, held_out)
    # A single pair may repeat by nature, such as no ice beside all ice
    held_out = held_out[~np.isin(held_out, repeated)]
    if held_out.size < _FEWEST_PAIRS or repeated.size > _REPEATED * pairs.size:
        return 0.0
    is_copy = np.isin(held_out, pairs)
    share = float(is_copy.mean())
    is_enough = is_copy.sum() >= _FEWEST_PAIRS and share > _SHARE
    if is_enough and share > _BEYOND_CHANCE * by_chance:
        return share
    return 0.0


def _common_by_chance(train: Words, held_out: Words) -> float:
    """Return a bound of the fraction of held-out pairs that equal a train pair without a copy.

    By the inequality of Cauchy and Schwarz, it follows from how often pairs repeat within each.
    """
    repeats = []
    for hashes in (train, held_out):
        counts = np.unique(hashes, return_counts=True)[1]
        # each pair has as many chances as there are others of its part
        repeats.append(float((counts * (counts - 1)).sum()) / max(hashes.size, 1) ** 2)
    return train.size * math.sqrt(math.prod(repeats))


def _pairs(values: NDArray[Any], codes: NDArray[Any], divisor: np.uint64) -> tuple[Words, Words]:
    """Return the hashes of the kept pairs along the last axis, of train and of held-out cells."""
    words, is_known = words_of(np.asarray(values))
    left, right = words[..., :-1], words[..., 1:]
    hashes = mix(left ^ mix(right))
    codes = np.asarray(codes)
    same_part = codes[..., :-1] == codes[..., 1:]
    kept = (hashes % divisor == 0) & (left != right) & same_part
    kept &= is_known[..., :-1] & is_known[..., 1:]
    of_cell = codes[..., :-1]
    return hashes[kept & (of_cell == TRAIN)], hashes[kept & np.isin(of_cell, HELD_OUT)]
