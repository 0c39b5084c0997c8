"""Samples of a shard are mixed in runs: windows as they come, numbers when all are there."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from ml4cube.datasets.shard_writer import _mixed, _run_order, _run_starts


@given(n=st.integers(1, 300), run=st.integers(1, 70), seed=st.integers(0, 2**32))
def test_numbers_and_windows_are_mixed_alike(n: int, run: int, seed: int) -> None:
    order = _run_order(n, run, seed)
    place = np.arange(n)
    expected = np.full(n, -1)
    expected[_run_starts(n, run, order)[place // run] + place % run] = place
    np.testing.assert_array_equal(np.sort(expected), place)
    np.testing.assert_array_equal(_mixed(place, run, order), expected)
    # neighbours stay together: only the ends of runs are cut
    assert (np.diff(expected) != 1).sum() <= -(-n // run) - 1
