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
from ml4cube.core.fingerprint import GOLDEN, Words, mix, mix_number

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

# The refinement considers so many items of each part: 512 x 512 exchanges include one that is close
# enough, and the cost does not grow with the number of items.
_CANDIDATES = 512
# With classes it considers fewer, because an exchange costs more. Some of them are the items that
# reduce the error most, found among the first of the part, because few items may have a class. The
# others are any items, to exchange them for.
_CANDIDATES_WITH_CLASSES = 144
_BEST_CANDIDATES, _SEARCHED_FOR_BEST = 16, 65_536
_MAX_EXCHANGES = 200

# Change of the error, and the items that two parts give each other; None for no item.
_Exchange = tuple[float, int | None, int | None]


def hash_ids(seed: int, ids: ArrayLike) -> Words:
    """Return a hash of (seed, id), uniform over 64 bits."""
    words = np.asarray(ids).astype(np.uint64) * np.uint64(GOLDEN)
    words += np.uint64(mix_number(seed * GOLDEN + 1))
    return mix(words)


def shuffled_positions(
    ids: NDArray[np.unsignedinteger | np.signedinteger], n: int, seed: int
) -> Words:
    """Return the position of each id in a seeded permutation of ``range(n)``, without a table."""
    # A bijection of b-bit numbers, repeated until the result is below n (cycle walking): at
    # most two tries on average, because 2**(b-1) < n.
    bits = max((n - 1).bit_length(), 1)
    mask, shift = np.uint64((1 << bits) - 1), np.uint64(bits // 2 + 1)
    keys = [mix_number((seed * 8 + round_) * GOLDEN) for round_ in range(4)]
    positions = np.asarray(ids).astype(np.uint64).ravel()
    pending = np.arange(positions.size)
    while pending.size:
        x = positions[pending]
        for key in keys:
            # An odd factor, a constant offset and a right xor-shift are bijections of b bits.
            x = (x * np.uint64(key | 1) + np.uint64(key >> 17)) & mask
            x = x ^ (x >> shift)
        positions[pending] = x
        pending = pending[x >= n]
    return positions.reshape(np.shape(ids))


def partition(
    weights: ArrayLike,
    fractions: Sequence[float],
    seed: int,
    classes: Floats | None = None,
    what: str = "blocks",
) -> Ints:
    """Return the part of each item, so that weights of parts are as near `fractions` as possible.

    `classes` (items, classes) are the weights of each item by class.
    """
    # Items in random order are cut where the cumulative weight is nearest to the fractions. Then
    # items are exchanged between parts while that improves the fractions. With two parts, no error
    # is larger than half the heaviest item, unless a part would be empty otherwise.
    weights = np.asarray(weights, dtype=np.float64).ravel()
    check_enough(len(fractions), weights, what)
    parts = np.zeros(weights.size, dtype=np.intp)
    order = np.argsort(hash_ids(seed, np.arange(weights.size)), kind="stable")
    usable = order[weights[order] > 0]
    unusable = order[weights[order] == 0]  # gets parts too, by the number of items
    parts[unusable] = cut_in_order(np.ones(unusable.size), fractions, may_be_empty=True)
    if classes is None:
        cut = cut_in_order(weights[usable], fractions)
        parts[usable] = _refine(cut, weights[usable, None] / weights.sum(), np.asarray(fractions))
    else:
        parts[usable] = _partition_by_class(weights[usable], fractions, classes[usable])
    return parts


def check_enough(parts: int, weights: NDArray[Any], what: str) -> None:
    """Refuse more parts than there are blocks, regions or times with valid cells or samples."""
    usable = int((weights > 0).sum())
    if usable < parts:
        raise EmptyPartError(
            f"{parts} parts are needed, but only {usable} of {weights.size} {what} hold samples or "
            "valid cells; use fewer parts, smaller blocks or more regions"
        )


def _partition_by_class(weights: Floats, fractions: Sequence[float], classes: Floats) -> Ints:
    """Distribute items so that the total, and every class, is as near `fractions` as possible."""
    parts = _cut_by_class(weights, fractions, classes)
    occurring = classes[:, classes.sum(axis=0) > 0]
    shares_of_classes = occurring / occurring.sum(axis=0)
    shares_of_total = weights / weights.sum()
    wanted = np.asarray(fractions)
    # The total counts more and more, until its fractions are met.
    for factor in (2.0, 8.0, 32.0, 1024.0):
        # As much as all classes together, times the factor.
        total_factor = factor * np.sqrt(max(shares_of_classes.shape[1], 1))
        columns = np.column_stack([total_factor * shares_of_total, shares_of_classes])
        parts = _refine(parts, columns, wanted)
        shares = np.bincount(parts, shares_of_total, minlength=wanted.size)
        if np.abs(shares - wanted).max() <= shares_of_total.max() / 2:
            break
    return parts


def _cut_by_class(weights: Floats, fractions: Sequence[float], classes: Floats) -> Ints:
    """Cut the items of each dominant class by the same fractions; leave no part empty."""
    parts = np.zeros(weights.size, dtype=np.intp)
    dominant = np.argmax(classes, axis=1)
    for label in np.unique(dominant):
        of_class = np.flatnonzero(dominant == label)
        parts[of_class] = cut_in_order(weights[of_class], fractions, may_be_empty=True)
    counts = np.bincount(parts, minlength=len(fractions))
    for empty in np.flatnonzero(counts == 0):
        donor = np.flatnonzero(parts == np.argmax(counts))[0]
        counts[parts[donor]] -= 1
        parts[donor], counts[empty] = empty, 1
    return parts


def cut_in_order(
    weights: Floats, fractions: Sequence[float], *, may_be_empty: bool = False
) -> Ints:
    """Return the part of each item of a sequence that is cut where weights fit fractions best."""
    n, parts = weights.size, len(fractions)
    cumulative = np.concatenate([[0.0], np.cumsum(weights)])
    cuts = [0]
    for part in range(1, parts):
        wanted = sum(fractions[:part]) * cumulative[-1]
        cut = int(np.argmin(np.abs(cumulative - wanted)))
        if not may_be_empty:  # one item at least for this part, and for each one that follows
            cut = min(max(cut, cuts[-1] + 1), n - (parts - part))
        cuts.append(max(cut, cuts[-1]))
    return np.repeat(np.arange(parts), np.diff([*cuts, n]))


def starts_in_order(
    weights: NDArray[Any], fractions: Sequence[float], what: str = "blocks"
) -> Ints:
    """Cut a sequence like `cut_in_order`; return the first item of each part but the first."""
    check_enough(len(fractions), weights, what)
    usable = np.flatnonzero(weights > 0)
    parts = cut_in_order(weights[usable], fractions)
    return usable[np.searchsorted(parts, np.arange(1, len(fractions)))]


def _refine(parts: Ints, shares: Floats, fractions: Floats) -> Ints:
    """Exchange items between two parts, best first, while the fractions improve.

    `shares` (items, columns) are the fractions of each total that an item has.
    """
    parts = parts.copy()
    wanted = fractions[:, None] * shares.sum(axis=0)
    # By part and column: how much more than wanted the part has.
    surplus = np.stack([shares[parts == p].sum(axis=0) for p in range(fractions.size)]) - wanted
    pairs = list(itertools.combinations(range(fractions.size), 2))
    exchanges: dict[tuple[int, int], _Exchange] = {}
    # The cost of an exchange grows with the classes, so many classes get fewer exchanges.
    for _ in range(min(_MAX_EXCHANGES, 10_000 // shares.shape[1])):
        for a, b in pairs:
            if (a, b) not in exchanges:
                exchanges[a, b] = _best_exchange(parts, shares, surplus[a] - surplus[b], a, b)
        best = min(pairs, key=lambda pair: exchanges[pair][0], default=None)
        if best is None or exchanges[best][0] >= 0:
            break
        (a, b), (_, from_a, from_b) = best, exchanges[best]
        # The exchanges of these two parts with others must be found again.
        exchanges = {pair: e for pair, e in exchanges.items() if not {a, b} & set(pair)}
        for item, giver, taker in ((from_a, a, b), (from_b, b, a)):
            if item is not None:
                parts[item] = taker
                surplus[giver] -= shares[item]
                surplus[taker] += shares[item]
    return parts


def _best_exchange(
    parts: Ints,
    shares: Floats,
    surplus: Floats,
    a: int,
    b: int,
) -> _Exchange:
    """Return the exchange that brings parts a and b nearest to their fractions.

    `surplus` is by how much more a has too much than b, in each column.
    """
    # The squared error changes by ``2 (d.d - d.surplus)`` when items whose fractions differ by d
    # are exchanged; an exchange for no item (row or column 0) is a move.
    in_a, in_b = np.flatnonzero(parts == a), np.flatnonzero(parts == b)
    of_a, of_b = _candidates(in_a, shares, surplus), _candidates(in_b, shares, -surplus)
    no_item = np.zeros((1, shares.shape[1]))
    shares_a = np.concatenate([no_item, shares[of_a]])
    shares_b = np.concatenate([no_item, shares[of_b]])
    change = np.zeros((len(shares_a), len(shares_b)))
    for column, surplus_here in enumerate(surplus):  # no matrix product: it rounds by machine
        difference = shares_a[:, None, column] - shares_b[None, :, column]
        change += 2 * difference * (difference - surplus_here)
    change[0, 0] = np.inf
    if in_a.size == 1:
        change[1:, 0] = np.inf  # a part keeps its last item
    if in_b.size == 1:
        change[0, 1:] = np.inf
    change = np.round(change, 12)  # equal gains are equal: the first in random order wins
    row, column = (int(i) for i in np.unravel_index(np.argmin(change), change.shape))
    from_a = None
    if row:
        from_a = int(of_a[row - 1])
    from_b = None
    if column:
        from_b = int(of_b[column - 1])
    return float(change[row, column]), from_a, from_b


def _candidates(items: Ints, shares: Floats, surplus: Floats) -> Ints:
    """Return the items of a part that are considered for exchange, in the order of all."""
    if shares.shape[1] == 1 or items.size <= _CANDIDATES_WITH_CLASSES:
        return items[:_CANDIDATES]
    items = items[:_SEARCHED_FOR_BEST]
    change = np.zeros(items.size)  # of the squared error, if the part gives the item away
    for share, surplus_here in zip(shares[items].T, surplus, strict=True):
        change += share * (share - surplus_here)
    change = np.round(change, 12)
    limit = np.partition(change, _BEST_CANDIDATES - 1)[_BEST_CANDIDATES - 1]
    good = np.flatnonzero(change <= limit)
    # The first of equal items, which np.argpartition does not guarantee.
    best = good[np.argsort(change[good], kind="stable")][:_BEST_CANDIDATES]
    first = np.arange(_CANDIDATES_WITH_CLASSES - _BEST_CANDIDATES)
    chosen: Ints = items[np.unique(np.concatenate([best, first]))]
    return chosen
