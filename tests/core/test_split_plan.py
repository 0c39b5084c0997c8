"""core.partition, core.buffer and core.split_plan against the plain versions in the oracle."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.core.distance.reach import AxisReach, SphereReach
from ml4cube.core.errors import EmptyPartError, InvalidTypeError, InvalidValueError
from ml4cube.core.grid import Grid
from ml4cube.core.partition import hash_ids, partition, shuffled_positions
from ml4cube.core.split_plan import CellPlan, SplitPlan, check_fractions
from tests import oracle_splits as oracle

SEEDS = st.integers(-(2**70), 2**70)


@given(n=st.integers(1, 300), seed=SEEDS)
def test_permutation_gives_every_rank_once(n: int, seed: int) -> None:
    assert sorted(shuffled_positions(np.arange(n), n, seed).tolist()) == list(range(n))


def test_permutation_mixes_far_and_near() -> None:
    n = 100_000
    position = shuffled_positions(np.arange(n), n, 4).astype(float)
    assert abs(np.corrcoef(position[:-1], position[1:])[0, 1]) < 0.02
    shares = (position.reshape(100, 1000) < n / 2).mean(axis=1)
    assert abs(shares - 0.5).max() < 5 * 0.5 / np.sqrt(1000)


def test_the_hash_never_changes() -> None:
    # SplitMix64; a changed hash would change published splits
    assert hash_ids(42, np.arange(2)).tolist() == [12897160439454039513, 14683772372732499137]


@st.composite
def _weights_and_fractions(draw: st.DrawFn) -> tuple[list[int], list[float]]:
    weights = draw(st.lists(st.integers(0, 500), min_size=3, max_size=60))
    shares = draw(st.lists(st.integers(1, 20), min_size=1, max_size=4))
    return weights, [s / sum(shares) for s in shares]


@given(case=_weights_and_fractions(), seed=SEEDS)
def test_partition_leaves_no_part_empty(case: tuple[list[int], list[float]], seed: int) -> None:
    weights, fractions = case
    if sum(w > 0 for w in weights) < len(fractions):
        with pytest.raises(EmptyPartError):
            partition(weights, fractions, seed)
        return
    parts = partition(weights, fractions, seed)
    held = np.bincount(parts, weights, minlength=len(fractions))
    assert (held > 0).all()
    assert parts.max() < len(fractions)


@given(seed=SEEDS, weights=st.lists(st.integers(0, 300), min_size=100, max_size=200))
@settings(max_examples=40)
def test_hundred_blocks_meet_the_fractions(seed: int, weights: list[int]) -> None:
    total = sum(weights)
    if sum(w > 0 for w in weights) < 80:
        return
    parts = partition(weights, [0.7, 0.1, 0.2], seed)
    shares = np.bincount(parts, weights, minlength=3) / total
    assert abs(shares - [0.7, 0.1, 0.2]).max() <= 0.005


def test_equal_blocks_are_met_exactly_and_seeds_differ() -> None:
    tables = {bytes(partition([7] * 10, [0.8, 0.2], seed)) for seed in range(40)}
    assert all(np.frombuffer(t, dtype=np.intp).sum() == 2 for t in tables)
    assert len(tables) > 20


@pytest.mark.parametrize(
    ("split", "val", "expected"),
    [
        (0.8, 0.0, {"train": 0.8, "test": 0.2}),
        (1.0, 0.0, {"train": 1.0}),
        (0, 0.5, {"val": 0.5, "test": 0.5}),
        (0.9, 0.1, {"train": 0.9, "val": 0.1}),
        (np.float32(0.8), np.float32(0.2), {"train": 0.8, "val": 0.2}),
        (0.7, 0.30000001, {"train": 0.7, "val": 0.3}),
    ],
)
def test_fractions(split: float, val: float, expected: dict[str, float]) -> None:
    fractions = check_fractions(split, val)
    assert fractions == pytest.approx(expected)
    assert sum(fractions.values()) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize(
    ("split", "val", "error", "says"),
    [
        (1.2, 0, InvalidValueError, "split must be from 0 to 1, got 1.2"),
        (float("nan"), 0, InvalidValueError, "split must be from 0 to 1"),
        (0.9, 0.2, InvalidValueError, "= 1.1"),
        (0.8, 0.200002, InvalidValueError, "= 1.000002"),
        ("0.8", 0, InvalidTypeError, "split must be a number"),
        (True, 0, InvalidTypeError, "split must be a number"),
        (0.5, None, InvalidTypeError, "val must be a number"),
    ],
)
def test_bad_fractions(split: float, val: float, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        check_fractions(split, val)


def _labels(grid: Grid) -> st.SearchStrategy[list[int]]:
    return st.lists(st.sampled_from([0, 1, 1, 2]), min_size=len(grid), max_size=len(grid))


@st.composite
def _labelled_grid(draw: st.DrawFn) -> tuple[Grid, SplitPlan]:
    dims = ["lat", "lon", "time"][: draw(st.integers(1, 3))]
    shape = {d: draw(st.integers(2, 7)) for d in dims}
    size = {d: draw(st.integers(1, n)) for d, n in shape.items()}
    grid = Grid.blocks(shape, size)
    return grid, SplitPlan(grid, bytes(draw(_labels(grid))))


def _every_cell(grid: Grid) -> dict[str, np.ndarray]:
    return {dim: np.arange(n) for dim, n in zip(grid.dims, grid.shape, strict=True)}


@given(case=_labelled_grid(), data=st.data())
@settings(max_examples=150)
def test_buffer_in_cells_is_that_of_brute_force(
    case: tuple[Grid, SplitPlan], data: st.DataObject
) -> None:
    grid, plan = case
    near, reaches = [], []
    for dim, n in zip(grid.dims, grid.shape, strict=True):
        cells, cyclic = data.draw(st.integers(0, n + 1)), data.draw(st.booleans())
        near.append(oracle.near_in_cells(n, cells, cyclic))
        reaches.append(AxisReach.of_cells(dim, n, cells, cyclic))
    everywhere = _every_cell(grid)
    found = plan.label_cells(everywhere, reaches)
    assert np.array_equal(found, oracle.buffered(plan.label_cells(everywhere), near))
    # and any box of cells, in any order, has the labels of the whole
    some = {
        d: np.array(data.draw(st.permutations(p.tolist())))[: len(p) // 2 + 1]
        for d, p in everywhere.items()
    }
    part = plan.label_cells(some, reaches)
    assert np.array_equal(part, found[np.ix_(*some.values())])


@given(
    lats=st.lists(st.floats(-90, 90), min_size=1, max_size=7),
    lons=st.lists(st.floats(-180, 360), min_size=1, max_size=7),
    km=st.floats(1, 21000),
    data=st.data(),
)
@settings(max_examples=150)
def test_buffer_on_the_sphere_is_that_of_brute_force(
    lats: list[float], lons: list[float], km: float, data: st.DataObject
) -> None:
    shape = {"lat": len(lats), "lon": len(lons)}
    grid = Grid.blocks(shape, {d: data.draw(st.integers(1, n)) for d, n in shape.items()})
    plan = SplitPlan(grid, bytes(data.draw(_labels(grid))))
    reach = SphereReach("lat", "lon", np.array(lats), np.array(lons), km)
    cells = _every_cell(grid)
    found = plan.label_cells(cells, [reach])

    def apart(a: tuple[int, ...], b: tuple[int, ...]) -> float:
        return oracle.great_circle_km(lats[a[0]], lons[a[1]], lats[b[0]], lons[b[1]])

    anywhere = [lambda i, j: True] * 2
    plain = plan.label_cells(cells)
    # a pair at the very distance may round either way: bracket it by ten metres
    least = oracle.buffered(plain, anywhere, lambda a, b: apart(a, b) < km - 0.01)
    most = oracle.buffered(plain, anywhere, lambda a, b: apart(a, b) <= km + 0.01)
    assert (found[least == 255] == 255).all()
    assert (found[most != 255] != 255).all()


@pytest.mark.parametrize("km", [1150.0, 2500.0])
def test_a_buffer_on_a_fine_grid_is_a_circle_on_the_sphere(km: float) -> None:
    lats, lons = np.arange(40.0, 81, 4), np.arange(0.0, 360, 3)
    grid = Grid.blocks({"lat": lats.size, "lon": lons.size}, {"lat": 1, "lon": 1})
    labels = np.ones(grid.counts, np.uint8)
    labels[5, 30] = 0  # a test cell at 60 degrees north
    plan = SplitPlan(grid, labels.tobytes())
    found = plan.label_cells(_every_cell(grid), [SphereReach("lat", "lon", lats, lons, km)])
    apart = np.array(
        [[oracle.great_circle_km(lats[5], lons[30], y, x) for x in lons] for y in lats]
    )
    labels[(apart <= km) & (apart > 0)] = 255
    assert np.array_equal(found, labels)


@given(case=_labelled_grid())
def test_plan_survives_json_pickle_and_hash(case: tuple[Grid, SplitPlan]) -> None:
    grid, bare = case
    plan = SplitPlan(
        grid, bare.labels, 3, (("train", 0.8), ("test", 0.2)), (("lat", "150km"),), ("lon",)
    )
    again = SplitPlan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(pickle.loads(pickle.dumps(plan)))  # noqa: S301 our own bytes
    assert np.array_equal(again.table, plan.table)


def test_cell_plan_survives_json_and_meets_fractions_to_the_cell() -> None:
    plan = CellPlan((("a", 7), ("b", 11)), (("train", 0.6), ("val", 0.1), ("test", 0.3)), 5)
    assert CellPlan.from_json(plan.to_json()) == plan
    labels = plan.label_cells({"a": np.arange(7), "b": np.arange(11)})
    assert [int((labels == k).sum()) for k in (1, 2, 0)] == [46, 8, 23]


@pytest.mark.parametrize("text", ['{"kind": "blocks"}', '{"grid": 3, "labels": ""}', "[]"])
def test_damaged_plans_are_refused(text: str) -> None:
    with pytest.raises(InvalidValueError, match="not a split plan"):
        SplitPlan.from_json(text)


def test_invalid_plans_are_refused() -> None:
    with pytest.raises(InvalidValueError, match="sorted by name"):
        SplitPlan(Grid.blocks({"time": 2, "lat": 2}, {}), b"\x01")
    with pytest.raises(InvalidValueError, match="as many labels"):
        SplitPlan(Grid.blocks({"lat": 2}, {"lat": 1}), b"\x01")
    with pytest.raises(InvalidValueError, match="labels must be 0, 1, 2 or 255"):
        SplitPlan(Grid.blocks({"lat": 2}, {}), b"\x07")
    with pytest.raises(EmptyPartError, match="got a cube of 1"):
        CellPlan((("a", 1),), (("train", 0.5), ("test", 0.5)), 0)
