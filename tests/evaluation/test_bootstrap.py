"""Draws of the block bootstrap, and how often their intervals contain the truth."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import xarray as xr
from scipy import stats

from ml4cube.evaluation.scores.bootstrap import Bootstrap

STEP = np.timedelta64(1, "D").astype("m8[ns]")


def days(n):
    return xr.DataArray(np.datetime64("2000-01-01", "ns") + STEP * np.arange(n), dims="init_time")


def leads(*numbers):
    return xr.DataArray(86_400e6 * np.array(numbers), dims="lead_time")  # as date_keys


def test_draws_consist_of_blocks_that_may_go_around():
    draws = Bootstrap(0.95, 500, 3, 1).draw(days(15), None)
    blocks = np.array(
        [np.bincount((np.arange(3) + start) % 15, minlength=15) for start in range(15)]
    )
    sums = {tuple(a) for a in blocks}
    for _ in range(4):
        sums = {tuple(np.add(a, b)) for a, b in itertools.product(sums, blocks)}
    assert {tuple(row) for row in draws.counts.astype(int)} <= sums
    np.testing.assert_allclose(draws.counts.mean(0), 1, atol=0.2)


@pytest.mark.parametrize(
    ("n", "given", "expected"),
    [(100, leads(1, 3), 5), (100, leads(1, 12), 12), (100, None, 5), (1, None, 1)],
)
def test_a_block_has_the_longest_lead_or_the_cube_root(n, given, expected):
    assert Bootstrap(0.95, 9, None, 1).length(days(n), given) == expected
    assert Bootstrap(0.95, 9, 7, 1).length(days(n), given) == 7


def test_a_lead_between_two_starts_counts_as_the_later_one():
    weekly = days(200)[::7]
    assert Bootstrap(0.95, 9, None, 1).length(weekly, leads(30)) == 5


def test_intervals_are_wider_where_blocks_are_few():
    """The quantiles of Hesterberg (2015), section 3.1: t for z, and sqrt(n / (n - 1))."""
    for n in (5, 10, 40):
        tail = Bootstrap(0.9, 9, 1, 1).draw(days(n), None).tail
        z = stats.t.ppf(0.95, n - 1) * (n / (n - 1)) ** 0.5
        assert stats.norm.ppf(tail) == pytest.approx(-z)


@pytest.mark.slow
@pytest.mark.parametrize(("n", "longest"), [(40, 1), (60, 6), (120, 6)])
def test_intervals_contain_the_skill_of_equally_good_forecasts(n, longest):
    draws = Bootstrap(0.95, 500, None, 0).draw(days(n), leads(longest))
    rng = np.random.default_rng(0)
    contained = 0
    for _ in range(200):
        noise = rng.normal(size=(2, n + longest - 1))
        errors = [np.convolve(one, np.ones(longest), "valid") ** 2 for one in noise]
        own, other = (draws.counts @ squared for squared in errors)
        low, high = draws.interval(1 - own / other)
        contained += low <= 0 <= high
    assert 0.85 * 200 <= contained <= 0.99 * 200
