"""Distribution of weighted items to parts: seeded, exact, the same on every machine.

The order of items comes from a hash of (seed, item id), never from a generator's stream, so
that it cannot change with a numpy version, a worker count or the order of calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.errors import EmptyPartError
from ml4cube.core.fingerprint import mix

_GOLDEN = 0x9E3779B97F4A7C15
_MASK64 = 0xFFFFFFFFFFFFFFFF

# Items of each part that the refinement considers: 512 x 512 exchanges include one that is close
# enough, and the cost does not grow with the number of items. With classes, some candidates are
# items of classes of which the part has too much, found among the first 65,536, because few blocks
# may have a class. The others are any items, to exchange them for.
_CANDIDATES = 512
_CANDIDATES_OF_CLASSES = 144
_BY_NEED, _LOOKED_THROUGH = 16, 65_536
_MAX_EXCHANGES = 200

# Change of the error, and the items that two parts give each other; None for no item.
_Exchange = tuple[float, int | None, int | None]


def hash_ids(seed: int, ids: ArrayLike) -> NDArray[np.uint64]:
    """Return a hash of (seed, id), uniform over 64 bits."""
    x = np.asarray(ids).astype(np.uint64) * np.uint64(_GOLDEN)
    x += np.uint64(_mix_int((seed * _GOLDEN + 1) & _MASK64))
    return mix(x)


def _mix_int(x: int) -> int:
    return int(mix(np.array([x], np.uint64))[0])


def rank_of(
    ids: NDArray[np.unsignedinteger | np.signedinteger], n: int, seed: int
) -> NDArray[np.uint64]:
    """Return the position of each id in a seeded permutation of ``range(n)``, without a table."""
    # A bijection of b-bit numbers, repeated until the result is below n (cycle walking): at
    # most two tries on average, because 2**(b-1) < n.
    bits = max((n - 1).bit_length(), 1)
    mask, shift = np.uint64((1 << bits) - 1), np.uint64(bits // 2 + 1)
    keys = [_mix_int((seed * 8 + round_) * _GOLDEN & _MASK64) for round_ in range(4)]
    ranks = np.asarray(ids).astype(np.uint64).ravel()
    outside = np.arange(ranks.size)
    while outside.size:
        x = ranks[outside]
        for key in keys:
            # odd factor, constant offset and right xor-shift are each a bijection of b bits
            x = (x * np.uint64(key | 1) + np.uint64(key >> 17)) & mask
            x = x ^ (x >> shift)
        ranks[outside] = x
        outside = outside[x >= n]
    return ranks.reshape(np.shape(ids))


def check_enough(parts: int, weights: NDArray[Any], what: str) -> None:
    """Refuse more parts than there are blocks, regions or times with valid cells or samples."""
    usable = int((weights > 0).sum())
    if usable < parts:
        raise EmptyPartError(
            f"{parts} parts are needed, but only {usable} of {weights.size} {what} hold samples or "
            "valid cells; use fewer parts, smaller blocks or more regions"
        )


def partition(
    weights: ArrayLike,
    fractions: Sequence[float],
    seed: int,
    classes: NDArray[np.float64] | None = None,
    what: str = "blocks",
) -> NDArray[np.intp]:
    """Distribute items so that the weight of each part is as near its fraction as possible."""
    # Items in random order are cut where the cumulative weight is nearest to the fractions. Then
    # items are exchanged between parts while that improves the fractions. With two parts, no error
    # is larger than half the heaviest item, unless a part would be empty otherwise.
    weights = np.asarray(weights, dtype=np.float64).ravel()
    check_enough(len(fractions), weights, what)
    parts = np.zeros(weights.size, dtype=np.intp)
    order = np.argsort(hash_ids(seed, np.arange(weights.size)), kind="stable")
    heavy = order[weights[order] > 0]
    light = order[weights[order] == 0]
    parts[light] = cut_in_order(np.ones(light.size), fractions, keep_one=False)
    if classes is None:
        cut = cut_in_order(weights[heavy], fractions, keep_one=True)
        parts[heavy] = _refine(cut, weights[heavy, None] / weights.sum(), np.asarray(fractions))
    else:
        parts[heavy] = _share_by_class(weights[heavy], fractions, classes[heavy])
    return parts


def _share_by_class(
    weights: NDArray[np.float64], fractions: Sequence[float], classes: NDArray[np.float64]
) -> NDArray[np.intp]:
    """Distribute items by class; the total counts more and more until its fractions are met."""
    parts = _cut_by_class(weights, fractions, classes)
    occurring = classes[:, classes.sum(axis=0) > 0]
    by_class = occurring / occurring.sum(axis=0)
    whole = weights / weights.sum()
    wanted = np.asarray(fractions)
    for factor in (2.0, 8.0, 32.0, 1024.0):
        # the total must have as much weight as all columns of classes together
        heavier = factor * np.sqrt(max(by_class.shape[1], 1))
        parts = _refine(parts, np.column_stack([heavier * whole, by_class]), wanted)
        held = np.bincount(parts, whole, minlength=wanted.size)
        if np.abs(held - wanted).max() <= whole.max() / 2:
            break
    return parts


def cut_in_order(
    weights: NDArray[np.float64], fractions: Sequence[float], *, keep_one: bool = True
) -> NDArray[np.intp]:
    """Cut a sequence of items where its cumulative weight is nearest to the fractions."""
    n, k = weights.size, len(fractions)
    running = np.concatenate([[0.0], np.cumsum(weights)])
    cuts = [0]
    for part in range(1, k):
        target = sum(fractions[:part]) * running[-1]
        cut = int(np.argmin(np.abs(running - target)))
        if keep_one:
            cut = min(max(cut, cuts[-1] + 1), n - (k - part))
        cuts.append(max(cut, cuts[-1]))
    return np.repeat(np.arange(k), np.diff([*cuts, n]))


def starts_in_order(
    weights: NDArray[Any], fractions: Sequence[float], what: str = "blocks"
) -> NDArray[np.intp]:
    """Cut a sequence like `cut_in_order`; return the first item of each part but the first."""
    check_enough(len(fractions), weights, what)
    heavy = np.flatnonzero(weights > 0)
    part = cut_in_order(weights[heavy], fractions)
    return heavy[np.searchsorted(part, np.arange(1, len(fractions)))]


def _cut_by_class(
    weights: NDArray[np.float64], fractions: Sequence[float], classes: NDArray[np.float64]
) -> NDArray[np.intp]:
    """Cut the items of each dominant class by the same fractions; leave no part empty."""
    parts = np.zeros(weights.size, dtype=np.intp)
    dominant = np.argmax(classes, axis=1)
    for label in np.unique(dominant):
        of_class = np.flatnonzero(dominant == label)
        parts[of_class] = cut_in_order(weights[of_class], fractions, keep_one=False)
    counts = np.bincount(parts, minlength=len(fractions))
    for empty in np.flatnonzero(counts == 0):
        donor = np.flatnonzero(parts == np.argmax(counts))[0]
        counts[parts[donor]] -= 1
        parts[donor], counts[empty] = empty, 1
    return parts


def _refine(
    parts: NDArray[np.intp], shares: NDArray[np.float64], fractions: NDArray[np.float64]
) -> NDArray[np.intp]:
    """Exchange items between two parts, best first, while the fractions improve."""
    parts = parts.copy()
    wanted = fractions[:, None] * shares.sum(axis=0)
    pairs = list(itertools.combinations(range(fractions.size), 2))
    found: dict[tuple[int, int], _Exchange] = {}
    error = np.stack([shares[parts == p].sum(axis=0) for p in range(fractions.size)]) - wanted
    # the cost of an exchange grows with the classes, so many classes get fewer exchanges
    for _ in range(min(_MAX_EXCHANGES, 10_000 // shares.shape[1])):
        for a, b in pairs:
            if (a, b) not in found:
                found[a, b] = _best_exchange(parts, shares, error[a] - error[b], a, b)
        best = min(pairs, key=lambda pair: found[pair][0], default=None)
        if best is None or found[best][0] >= 0:
            break
        (a, b), (_, from_a, from_b) = best, found[best]
        found = {pair: e for pair, e in found.items() if not {a, b} & set(pair)}
        for item, giver, taker in ((from_a, a, b), (from_b, b, a)):
            if item is not None:
                parts[item] = taker
                error[giver] -= shares[item]
                error[taker] += shares[item]
    return parts


def _best_exchange(
    parts: NDArray[np.intp],
    shares: NDArray[np.float64],
    surplus: NDArray[np.float64],
    a: int,
    b: int,
) -> _Exchange:
    """Return the exchange that brings parts a and b nearest to their fractions."""
    # The squared error changes by ``2 (d.d - d.surplus)`` when items whose fractions differ by d
    # are exchanged; an exchange for no item is a move.
    in_a, in_b = np.flatnonzero(parts == a), np.flatnonzero(parts == b)
    mine, theirs = _candidates(in_a, shares, surplus), _candidates(in_b, shares, -surplus)
    nothing = np.zeros((1, shares.shape[1]))
    from_a = np.concatenate([nothing, shares[mine]])
    from_b = np.concatenate([nothing, shares[theirs]])
    change = np.zeros((len(from_a), len(from_b)))
    for column, more in enumerate(surplus):  # no matrix product: it rounds by machine
        differ = from_a[:, None, column] - from_b[None, :, column]
        change += 2 * differ * (differ - more)
    change[0, 0] = np.inf
    if in_a.size == 1:
        change[1:, 0] = np.inf  # a part keeps its last item
    if in_b.size == 1:
        change[0, 1:] = np.inf
    change = np.round(change, 12)  # equal gains are equal: the first in random order wins
    x, y = np.unravel_index(np.argmin(change), change.shape)
    i = int(mine[x - 1]) if x else None
    j = int(theirs[y - 1]) if y else None
    return float(change[x, y]), i, j


def _candidates(
    items: NDArray[np.intp], shares: NDArray[np.float64], surplus: NDArray[np.float64]
) -> NDArray[np.intp]:
    """Return the items of a part that are considered for exchange, in the order of all."""
    if shares.shape[1] == 1 or items.size <= _CANDIDATES_OF_CLASSES:
        return items[:_CANDIDATES]
    items = items[:_LOOKED_THROUGH]
    change, held = np.zeros(items.size), shares[items]
    for column, more in enumerate(surplus):
        change += held[:, column] * (held[:, column] - more)
    change = np.round(change, 12)
    # the first of equal items, which np.argpartition does not guarantee
    last = np.partition(change, _BY_NEED)[_BY_NEED]
    better, equal = np.flatnonzero(change < last), np.flatnonzero(change == last)
    any_ = np.arange(_CANDIDATES_OF_CLASSES - _BY_NEED)
    chosen: NDArray[np.intp] = np.unique(
        np.concatenate([better, equal[: _BY_NEED - better.size], any_])
    )
    return items[chosen]
