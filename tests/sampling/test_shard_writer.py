"""Samples of a shard are mixed in runs while they come, piece by piece."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ml4cube.sampling.shards import RunOrder
from ml4cube.store.format import ArrayLayout, StoreLayout


def order_of(n: int, cells: int, seed: int | None) -> RunOrder:
    arrays = (
        ArrayLayout("t", ("samples", "x"), (cells,), "<f4", 1),
        ArrayLayout("time", ("samples",), (), "<f8", 1, coordinate=True),
    )
    return RunOrder.of(StoreLayout(n, n, arrays), n, seed)


@given(
    n=st.integers(1, 300),
    cells=st.sampled_from([1, 16, 20, 64, 100, 500, 2000]),
    seed=st.none() | st.integers(0, 2**32),
    cuts=st.lists(st.integers(0, 300), max_size=6),
)
def test_pieces_of_any_size_are_mixed_in_runs(
    n: int, cells: int, seed: int | None, cuts: list[int]
) -> None:
    order = order_of(n, cells, seed)
    whole = n // order.run
    expected = np.arange(n)
    for run, target in enumerate(order.target):
        for i in range(order.run):
            expected[target * order.run + i] = run * order.run + i
    np.testing.assert_array_equal(np.sort(order.target), np.arange(whole))
    if seed is None:
        np.testing.assert_array_equal(expected, np.arange(n))

    numbers, windows = np.full(n, -1), np.full((n, 2, 3), -1)
    edges = sorted({0, n, *(c for c in cuts if c < n)})
    for first, last in itertools.pairwise(edges):
        piece = np.arange(first, last)
        order.put(numbers, first, piece)
        order.put(windows, first, np.broadcast_to(piece[:, None, None], (len(piece), 2, 3)))
    np.testing.assert_array_equal(numbers, expected)
    np.testing.assert_array_equal(windows[:, 1, 2], expected)
    assert (windows == windows[:, :1, :1]).all()
