"""Splitters in scikit-learn's own tools, against the cells they label and against brute force."""

from __future__ import annotations

import dask
import numpy as np
import pandas as pd
import pytest
import sklearn
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.model_selection import GridSearchCV, cross_val_score

from ml4cube import MultiProcSampler
from ml4cube.errors import EmptyPartError, InvalidTypeError, InvalidValueError
from ml4cube.splits import (
    BlockKFold,
    BlockShuffleSplit,
    ForwardChaining,
    LeaveRegionOut,
    assign_block_split,
)
from tests.cubes import cell_id_cube, dates_after

SHAPE = {"time": 12, "lat": 8, "lon": 10}
SIZES = {"time": 4, "lat": 3, "lon": 4}
BIOME = xr.DataArray(
    np.array(["bog", "fen", "heath", None], dtype=object)[
        (np.arange(8)[:, None] // 5 + np.arange(10)) // 3 % 4
    ],
    dims=("lat", "lon"),
    name="biome",
)


def cube_of(**options):
    return cell_id_cube(SHAPE, "float64", **options)


def every_splitter(**options):
    return [
        BlockKFold(3, SIZES, **options),
        BlockShuffleSplit(3, SIZES, test_size=0.3, **options),
        ForwardChaining(3, **options),
        LeaveRegionOut(BIOME, **options),
    ]


def labels_of(folds):
    """The label of each fold, by time, lat and lon."""
    return [made["split"].transpose(*SHAPE).values for made in folds.split_cube()]


def rows_of(cube):
    """One row for each cell, in the order of the cube's dims."""
    return np.stack([cube[name].values.ravel() for name in cube.data_vars], axis=1)


# --- in scikit-learn ------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("which", range(4))
def test_they_work_in_cross_val_score_and_grid_search_as_they_are(which):
    cube = cube_of(names=("a", "b"))
    folds = every_splitter(cube=cube)[which]
    X = rows_of(cube)
    assert cross_val_score(Ridge(), X, X[:, 1], cv=folds).shape == (3,)
    search = GridSearchCV(Ridge(), {"alpha": [0.1, 1.0]}, cv=folds)
    assert search.fit(X, X[:, 1]).best_params_
    assert clone(search).cv.get_params()["cube"] is cube, "the cube is not copied"
    table = cube.to_dataframe().sample(frac=0.7, random_state=0)
    assert cross_val_score(Ridge(), table[["a"]], table["b"], cv=folds).shape == (3,)
    # nested: the inner split sees some rows of a table, which know their places
    if which == 2:  # of which the first are all of few time steps
        search = clone(search).set_params(cv=clone(folds).set_params(n_splits=2))
    nested = cross_val_score(search, table[["a"]], table["b"], cv=folds, error_score="raise")
    assert nested.shape == (3,)


@pytest.mark.parametrize("routing", [False, True])
def test_groups_say_where_rows_of_a_plain_array_lie(routing):
    cube = cube_of(names=("a", "b"))
    table = cube.to_dataframe().sample(frac=0.5, random_state=1)
    places = table.index.to_frame(index=False)
    X, y = table[["a"]].to_numpy(), table["b"].to_numpy()
    folds = BlockKFold(4, SIZES, cube=cube)
    with sklearn.config_context(enable_metadata_routing=routing):
        options = {"params": {"groups": places}} if routing else {"groups": places}
        scores = cross_val_score(Ridge(), X, y, cv=folds, **options)
    expected = cross_val_score(Ridge(), table[["a"]], table["b"], cv=folds)
    np.testing.assert_allclose(scores, expected)


def test_parameters_are_cloned_set_and_shown():
    cube = cube_of()
    for folds in every_splitter(cube=cube):
        again = clone(folds)
        assert again is not folds
        assert again.get_params() == folds.get_params()
        assert "cube=<Dataset time: 12, lat: 8, lon: 10>" in repr(folds)
    folds = BlockKFold(3, SIZES, seed=7)
    assert repr(folds) == f"BlockKFold(n_splits=3, block_size={SIZES!r}, seed=7)"
    assert folds.set_params(n_splits=4, cube=cube) is folds
    assert len(list(folds.split(rows_of(cube)))) == folds.get_n_splits() == 4
    with pytest.raises(InvalidValueError, match="did you mean 'n_splits'"):
        folds.set_params(nsplits=3)
    with pytest.raises(InvalidValueError, match="n_splits must be at least 2, got 1"):
        folds.set_params(n_splits=1)


# --- against the cells ----------------------------------------------------------------------


@pytest.mark.slow
@settings(max_examples=25)
@given(
    which=st.integers(0, 3),
    order=st.permutations(list(SHAPE)),
    chunks=st.sampled_from([None, {"time": 5, "lat": 4}, {"lon": 3}]),
    buffer=st.booleans(),
    scheduler=st.sampled_from(["synchronous", "threads"]),
    shuffled=st.integers(0, 5),
)
def test_samples_get_the_part_of_their_cells(which, order, chunks, buffer, scheduler, shuffled):
    cube = cube_of(dim_order=tuple(order), dask_chunks=chunks)
    folds = every_splitter(cube=cube)[which]
    if buffer:
        folds.set_params(**({"gap": 1} if which == 2 else {"buffer": 1}))
    plain = clone(folds).set_params(cube=cube_of())
    table = cube.to_dataframe().sample(frac=1, random_state=shuffled)
    cells = table["a"].to_numpy().astype(int)  # ids count along lat, lon, time
    i, j, t = np.unravel_index(cells, (8, 10, 12))
    with dask.config.set(scheduler=scheduler):
        by_rows = list(folds.split(rows_of(cube)))
        by_table = list(folds.split(table))
        labels = labels_of(folds)
    assert len(by_rows) == len(by_table) == len(labels) == folds.get_n_splits(table)
    for rows, tabled, label, other in zip(by_rows, by_table, labels, labels_of(plain), strict=True):
        np.testing.assert_array_equal(label, other)
        for part, code in ((0, 1), (1, 0)):
            expected = np.flatnonzero((label == code)[t, i, j])
            np.testing.assert_array_equal(tabled[part], expected)
            ids = rows_of(cube)[rows[part], 0]
            assert sorted(ids) == sorted(cells[expected])


@settings(max_examples=20)
@given(
    folds=st.integers(2, 6),
    gaps=st.floats(0, 0.9),
    seed=st.integers(0, 99),
    sizes=st.sampled_from([{"time": 2, "lat": 2}, {"lon": 2, "lat": 4}, SIZES]),
)
def test_block_folds_partition_the_valid_cells_evenly(folds, gaps, seed, sizes):
    cube = cube_of(gaps=gaps, seed=seed)
    table = cube.to_dataframe().dropna()
    splitter = BlockKFold(folds, sizes, cube=cube, seed=seed, valid="a")
    tests = [test for _, test in splitter.split(table)]
    assert sorted(np.concatenate(tests)) == list(range(len(table)))
    labels = labels_of(splitter)
    valid = cube["a"].transpose(*SHAPE).notnull().values
    assert ((np.stack(labels) == 0).sum(axis=0) == 1).all(), "a block tests once"
    held = [int((label[valid] == 0).sum()) for label in labels]
    assert held == [test.size for test in tests]
    cells = xr.DataArray(valid.astype(float), dims=tuple(SHAPE))
    assert max(held) - min(held) <= cells.coarsen(SHAPE | sizes, boundary="pad").sum().max()


def test_draws_differ_and_meet_the_size():
    cube = cell_id_cube({"time": 20, "lat": 20, "lon": 20}, "float64", gaps=0.3)
    table = cube.to_dataframe().dropna()
    draws = BlockShuffleSplit(6, {"time": 4, "lat": 4, "lon": 4}, test_size=0.25, cube=cube)
    tests = [test for _, test in draws.split(table)]
    assert len({test.tobytes() for test in tests}) == 6
    assert all(abs(test.size / len(table) - 0.25) < 0.005 for test in tests)
    other = [test for _, test in clone(draws).set_params(seed=1).split(table)]
    assert not any(np.array_equal(a, b) for a, b in zip(tests, other, strict=True))


def test_folds_share_classes_out():
    cube = cell_id_cube({"time": 360, "lat": 6, "lon": 6}, "float64", calendar="360_day")
    values = cube["a"].transpose("time", "lat", "lon").values
    thirds = np.searchsorted(np.quantile(values, [1 / 3, 2 / 3], method="inverted_cdf"), values)
    folds = BlockKFold(4, {"time": 15, "lat": 2, "lon": 3}, stratify={"a": 3}, cube=cube)
    for label, (_, rows) in zip(labels_of(folds), folds.split(values.reshape(-1, 1)), strict=True):
        for third in range(3):
            inside = thirds == third
            assert abs((label[inside] == 0).mean() - 0.25) <= 0.05
            assert abs(np.isin(np.flatnonzero(inside), rows).mean() - 0.25) <= 0.05


# --- forward in time ------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    calendar=st.sampled_from(["standard", "360_day"]),
    order=st.sampled_from([1, -1]),
    steps=st.lists(st.integers(0, 40), min_size=8, max_size=24),
    n_splits=st.integers(1, 4),
    gap=st.sampled_from([None, 1, 2, "1D", "30D", "45D"]),
    known=st.sampled_from(["cube", "column", "index"]),
)
def test_forward_chaining_never_sees_the_future(calendar, order, steps, n_splits, gap, known):
    days = np.cumsum(steps)[::order]
    times = dates_after("2000-01-01", days, calendar)
    n = times.size
    cube = xr.Dataset({"t": (("time", "x"), np.arange(2.0 * n).reshape(n, 2))}, {"time": times})
    X = pd.DataFrame({"t": cube["t"].values.ravel(), "time": np.repeat(times, 2)})
    X = {"index": X.set_index("time"), "column": X, "cube": X[["t"]]}[known]
    folds = ForwardChaining(n_splits, gap, cube=cube if known == "cube" else None)
    if np.unique(days).size < n_splits + 1:
        with pytest.raises(EmptyPartError, match="time steps"):
            list(folds.split(X))
        return
    try:
        found = list(folds.split(X))
    except EmptyPartError:
        assert gap is not None  # which took all of train
        return
    positions = np.unique(days, return_inverse=True)[1]
    assert len(found) == n_splits
    latest = -1
    for train, test in found:
        when, then = days[train // 2], days[test // 2]
        assert when.max() < then.min()
        assert when.min() == days.min()
        assert then.min() > latest, "test parts move on"
        latest = then.max()
        for side in (train, test):  # all cells of a time share a part
            assert np.isin(np.flatnonzero(np.isin(days, days[side // 2])) * 2, side).all()
        between = np.setdiff1d(np.flatnonzero(days < then.min()), train // 2)
        apart = np.abs(positions[:, None] - positions[test // 2]).min(axis=1)
        if isinstance(gap, str):
            apart = np.abs(days[:, None] - then).min(axis=1)
        allowed = 0 if gap is None else int(str(gap).removesuffix("D"))
        assert (apart[train // 2] > allowed).all()
        assert (apart[between] <= allowed).all(), "no more than the gap is left out"
    assert latest == days.max()


@pytest.mark.parametrize("known", ["time", "time_index", "cube"])
@pytest.mark.parametrize("kept", [1.0, 0.8])
def test_windows_of_forward_folds_end_before_the_test_part(known, kept):
    times = pd.date_range("2000-01-01", periods=60)
    rows = np.flatnonzero(np.random.default_rng(0).random(60) < kept)
    column = rows if known == "time_index" else times[rows]
    X = pd.DataFrame({"time_index" if known == "time_index" else "time": column})
    cube = xr.Dataset({"a": ("time", np.zeros(60))}, {"time": times}) if known == "cube" else None
    found = list(ForwardChaining(3, cube=cube, sample_size={"time": 8}).split(X))
    assert len(found) == 3
    for train, test in found:
        assert rows[train].max() + 8 <= rows[test].min()
    with pytest.raises(InvalidValueError, match="sample_size: unknown dim 'tiem'"):
        list(ForwardChaining(3, cube=cube, sample_size={"tiem": 8}).split(X))


def test_forward_folds_are_of_equal_numbers_of_valid_cells():
    cube = cell_id_cube({"time": 300, "x": 5}, "float64")
    rising = np.random.default_rng(0).random((300, 5)) < np.linspace(0.1, 1, 300)[:, None]
    cube["a"] = cube["a"].where(xr.DataArray(rising, dims=("time", "x")))
    table = cube.to_dataframe().dropna()
    folds = ForwardChaining(5, cube=cube, valid="a")
    sizes = np.array([test.size for _, test in folds.split(table)])
    assert abs(sizes / len(table) - 1 / 6).max() < 0.01


# --- regions --------------------------------------------------------------------------------


def test_each_region_tests_once_and_the_rest_train():
    cube = cube_of()
    folds = LeaveRegionOut(BIOME, cube=cube)
    biome = BIOME.broadcast_like(cube["a"]).transpose(*cube["a"].dims).values.ravel()
    left_out_in_turn = ["bog", "fen", "heath"]
    for (train, test), left_out in zip(folds.split(rows_of(cube)), left_out_in_turn, strict=True):
        assert set(biome[test]) == {left_out}
        assert set(biome[train]) == {"bog", "fen", "heath"} - {left_out}
        assert test.size == (biome == left_out).sum()
    everything = clone(folds).set_params(background="train")
    for train, test in everything.split(rows_of(cube)):
        assert train.size + test.size == biome.size


def test_regions_without_samples_or_valid_cells_make_no_fold():
    cube = cube_of(names=("a", "b")).assign_coords(biome=BIOME)
    table = cube[["a", "b"]].to_dataframe()
    table = table[table["biome"].isin(["bog", "heath"])]
    folds = LeaveRegionOut("biome", cube=cube)
    assert folds.get_n_splits() == 3
    assert folds.get_n_splits(table) == len(list(folds.split(table))) == 2
    search = GridSearchCV(Ridge(), {"alpha": [1.0, 2.0]}, cv=folds)
    assert search.fit(table[["a"]], table["b"]).n_splits_ == 2
    folds.set_params(valid=BIOME.isin(["bog", "heath"]))
    assert folds.get_n_splits() == len(list(folds.split_cube())) == 2


# --- sample stores --------------------------------------------------------------------------


def test_windows_of_a_sample_store_are_in_a_part_with_all_their_cells(tmp_path):
    cube = cube_of(dask_chunks={"time": 6})
    store, _ = MultiProcSampler(
        cube,
        train_cube=tmp_path / "all.zarr",
        test_cube=tmp_path / "none.zarr",
        nproc=1,
        scale_fn=None,
        data_split=1.0,
        sample_size={"lat": 2, "lon": 3},
        overlap={"lat": 0.5, "lon": 0.34},
    ).get_datasets()
    cells = store["a"].values.astype(int).reshape(store.sizes["samples"], -1)
    i, j, t = np.unravel_index(cells, (8, 10, 12))
    without_cube = [
        BlockKFold(3, SIZES, buffer={"lon": 1}),
        BlockShuffleSplit(2, SIZES, test_size=0.4),
        ForwardChaining(3, gap="1D"),
        LeaveRegionOut(BIOME, background="train"),
    ]
    for folds in without_cube:
        known = clone(folds).set_params(cube=cube)
        np.testing.assert_equal(list(folds.split(store)), list(known.split(store)))
    # against the cells: the table weighs by samples, so take the labels of the same plan
    for folds in (without_cube[2], without_cube[3]):
        labels = labels_of(clone(folds).set_params(cube=cube))
        for parts, label in zip(folds.split(store), labels, strict=True):
            for part, code in zip(parts, (1, 0), strict=True):
                inside = (label[t, i, j] == code).all(1)
                np.testing.assert_array_equal(part, np.flatnonzero(inside))


@pytest.mark.parametrize("form", ["mapping", "series", "stacked"])
def test_other_forms_of_x_know_their_places(form):
    cube = cube_of()
    folds = BlockKFold(3, SIZES, cube=cube)
    expected = [cube["a"].values.ravel()[test] for _, test in folds.split(rows_of(cube))]
    table = cube["a"].to_dataframe().sample(frac=1, random_state=2)
    X = {
        "mapping": {"a": table["a"].to_numpy(), **dict(table.index.to_frame().items())},
        "series": table["a"],
        "stacked": cube["a"].stack(sample=("lon", "time", "lat")),
    }[form]
    values = np.asarray(X["a"] if form == "mapping" else X)
    for (_, test), ids in zip(folds.split(X), expected, strict=True):
        assert sorted(values[test]) == sorted(ids)


@pytest.mark.parametrize("order", [("time", "lat", "lon"), ("lon", "time", "lat")])
def test_rows_may_be_the_valid_cells_in_order(order):
    cube = cube_of(gaps=0.3, dim_order=order, dask_chunks={"time": 5})
    values = cube["a"].values.ravel()
    rows = values[np.isfinite(values)][:, None]
    folds = BlockKFold(3, SIZES, cube=cube, valid="a")
    for (train, test), label in zip(folds.split(rows), labels_of(folds), strict=True):
        of_id = label.transpose(1, 2, 0).ravel()
        assert (of_id[rows[train, 0].astype(int)] == 1).all()
        assert (of_id[rows[test, 0].astype(int)] == 0).all()
        assert train.size + test.size == len(rows)
    with pytest.raises(InvalidValueError, match=r"and [0-9]+ valid cells"):
        list(folds.split(rows[1:]))


def test_coordinates_in_metres_are_told_apart_by_a_cell():
    # far from zero, a cell is less than what rounding to float32 may be of degrees
    y = 5_000_000 + 30.0 * np.arange(20)
    cube = xr.Dataset({"a": (("y", "x"), np.zeros((20, 8)))}, {"y": y, "x": 30.0 * np.arange(8)})
    moved = xr.DataArray(np.arange(20) > 3, {"y": y + 30}, "y")
    with pytest.raises(InvalidValueError, match="other 'y' coordinates"):
        assign_block_split(cube, {"y": 2}, valid=moved)
    folds = BlockKFold(2, {"y": 5}, cube=cube)
    rows = pd.DataFrame({"y": y.astype("float32"), "x": 0.0})
    assert sorted(np.concatenate([test for _, test in folds.split(rows)])) == list(range(20))
    for off in (5.0, 15.0, 600.0):
        with pytest.raises(InvalidValueError, match="some 'y' of the samples are not"):
            list(folds.split(pd.DataFrame({"y": y + off, "x": 0.0})))


def test_features_named_like_dims_are_refused_unless_groups_give_positions():
    cube = cube_of()
    folds = BlockKFold(3, SIZES, cube=cube)
    table = cube["a"].to_dataframe().reset_index()
    scaled = pd.DataFrame({"lat": table["lat"] / 90, "lon": table["lon"], "a": table["a"]})
    for X in (scaled, scaled[["lat", "a"]]):
        with pytest.raises(InvalidValueError, match="some 'lat' of the samples are not"):
            list(folds.split(X))
    positions = table[["time", "lat", "lon"]]
    by_groups = folds.split(scaled, groups=positions)
    for found, expected in zip(by_groups, folds.split(rows_of(cube)), strict=True):
        np.testing.assert_array_equal(found[1], expected[1])


@pytest.mark.parametrize("known", ["groups", "groups_index", "level"])
def test_places_along_some_dims_go_before_the_order_of_rows(known):
    # as many rows as cells, but not in the order of the cube's dims
    ds = xr.Dataset(
        {"a": (("lat", "lon", "time"), np.arange(240.0).reshape(4, 5, 12))},
        {"time": pd.date_range("2000", periods=12)},
    )
    step = np.repeat(np.arange(12), 20)
    rows = ds["a"].transpose("time", "lat", "lon").values.reshape(-1, 1)
    column = {"groups_index": {"time_index": step}}.get(known, {"time": ds["time"].values[step]})
    X, places = rows, pd.DataFrame(column)
    if known == "level":
        X, places = pd.DataFrame({"a": rows[:, 0]}, pd.Index(column["time"], name="time")), None
    for train, test in ForwardChaining(3, cube=ds).split(X, groups=places):
        assert step[train].max() < step[test].min()
    for train, test in BlockKFold(4, {"time": 3}, cube=ds).split(X, groups=places):
        assert not set(step[train]) & set(step[test])
        assert train.size + test.size == 240
    says = r"along 'lat', but they are known only along \['time'\]"
    with pytest.raises(InvalidValueError, match=says):
        list(BlockKFold(2, {"lat": 2}, cube=ds).split(X, groups=places))


@pytest.mark.slow
def test_few_samples_of_a_huge_cube_take_little():
    shape = {"time": 40_000, "lat": 1800, "lon": 3600}
    rng = np.random.default_rng(0)
    places = pd.DataFrame({f"{d}_index": rng.integers(0, n - 8, 600) for d, n in shape.items()})
    places.iloc[-1] = [n - 8 for n in shape.values()]
    size = {"lat": 8, "lon": 8}
    sizes = {"time": 1000, "lat": 100, "lon": 100}
    folds = BlockKFold(5, sizes, buffer={"time": 5}, sample_size=size)
    tests = np.concatenate([test for _, test in folds.split(np.zeros(600), groups=places)])
    assert np.unique(tests).size == tests.size
    within = [(places[f"{d}_index"] % 100 <= 92).to_numpy() for d in ("lat", "lon")]
    assert np.isin(np.flatnonzero(within[0] & within[1]), tests).all()
    assert tests.size < 600, "windows over two blocks are in one fold only by chance"


# --- errors ---------------------------------------------------------------------------------

BAD = [
    (lambda c: BlockKFold(1), InvalidValueError, "n_splits must be at least 2, got 1"),
    (lambda c: BlockKFold(True), InvalidTypeError, "n_splits must be an integer"),
    (lambda c: BlockKFold(3, seed=None), InvalidTypeError, "seed must be an integer"),
    (lambda c: BlockKFold(40, SIZES, cube=c), EmptyPartError, "40 parts are needed, but only 27"),
    (lambda c: BlockKFold(3, {"lat": 3}, buffer=9, cube=c), EmptyPartError, "smaller buffer"),
    (
        lambda c: BlockKFold(3, SIZES, buffer="30D", cube=c[["a"]].drop_vars("time")),
        InvalidValueError,
        "needs dates",
    ),
    (lambda c: BlockShuffleSplit(3, test_size=0), InvalidValueError, "must be above 0 and below 1"),
    (lambda c: BlockShuffleSplit(3, test_size="half"), InvalidTypeError, "got 'half'"),
    (lambda c: ForwardChaining(0), InvalidValueError, "n_splits must be at least 1"),
    (lambda c: ForwardChaining(12, cube=c), EmptyPartError, "13 parts .* 12 of 12 time steps"),
    (
        lambda c: ForwardChaining(3, gap=12, cube=c),
        EmptyPartError,
        r"fold 1 of ForwardChaining\(n_splits=3, gap=12.* has 0 train",
    ),
    (lambda c: ForwardChaining(3, dim="t", cube=c), InvalidValueError, "dim must be .* got 't'"),
    (lambda c: LeaveRegionOut(BIOME == "x", cube=c), EmptyPartError, "2 parts .* 1 of 1 regions"),
    (
        lambda c: LeaveRegionOut(BIOME, background="test"),
        InvalidValueError,
        "background must be .* got 'test'",
    ),
    (lambda c: LeaveRegionOut(BIOME, cube=c, buffer=20), EmptyPartError, "smaller buffer"),
]


@pytest.mark.parametrize(("make", "error", "says"), BAD)
def test_bad_parameters_are_named(make, error, says):
    cube = cube_of()
    with pytest.raises(error, match=says):
        list(make(cube).split(rows_of(cube)))


TWO = np.zeros((2, 1))
NOWHERE = [
    (np.zeros((7, 2)), None, "7 rows.*960 cells.*to_dataframe"),
    (TWO, {"lat_index": [0, 9]}, "must be from 0 to 7, got 0 to 9"),
    (TWO, {"lat_index": [0, 1, 2]}, "got 3 values for 2 samples"),
    (TWO, {"lat_index": [0, 1]}, "along 'lon'"),
    (TWO, {"year": [0, 1]}, "need columns named like the .*'year'"),
    (pd.DataFrame({"lat": [0.1], "lon": [3.0]}), None, "'lat' of the samples are not"),
    (
        pd.DataFrame({"lat": [0.1], "lon_index": [3], "time_index": [1]}),
        None,
        r"along 'lat', .* \(some 'lat' of the samples are not",
    ),
    (3, None, "X must be an array or table .* got int"),
    (TWO, np.zeros(2), "groups must be a table .* got"),
]


@pytest.mark.parametrize(("X", "groups", "says"), NOWHERE)
def test_samples_of_nowhere_are_named(X, groups, says):
    with pytest.raises((InvalidValueError, InvalidTypeError), match=says):
        list(BlockKFold(3, SIZES, cube=cube_of()).split(X, groups=groups))


@pytest.mark.parametrize("form", ["index", "column", "mapping"])
def test_times_with_a_zone_are_those_of_utc(form):
    times = pd.date_range("2000-03-25", periods=12, tz="UTC").tz_convert("Europe/Berlin")
    X = {
        "index": pd.DataFrame({"a": range(12)}, index=times.rename("time")),
        "column": pd.DataFrame({"time": times}),
        "mapping": {"time": times},
    }[form]
    expected = [([0], [3, 4, 5]), ([0, 1, 2, 3], [6, 7, 8])]
    cube = xr.Dataset({"a": ("time", np.zeros(12))}, {"time": times.tz_localize(None).normalize()})
    for at_hand in (None, cube):
        folds = ForwardChaining(3, gap="2D", cube=at_hand).split(X)
        found = [(train.tolist(), test.tolist()) for train, test in folds]
        assert found[:2] == expected


@pytest.mark.parametrize(
    ("times", "gap"), [(np.arange(12.0), np.nan), (np.arange(12).astype("M8[D]"), "NaT")]
)
def test_a_missing_time_is_called_missing(times, gap):
    times[3] = gap
    with pytest.raises(InvalidValueError, match=r"'time' has missing .*; fill or drop them"):
        list(ForwardChaining(3).split(pd.DataFrame({"time": times})))


def test_dates_as_text_are_refused_because_their_order_is_not_that_of_time():
    dates = pd.date_range("2020-01-05", periods=12, freq="10D").strftime("%d/%m/%Y")
    with pytest.raises(InvalidTypeError, match=r"'time' must hold dates.*pd\.to_datetime"):
        list(ForwardChaining(3).split(pd.DataFrame({"time": dates})))


def test_times_are_found_beside_columns_of_positions():
    X = pd.DataFrame({"time": pd.date_range("2000", periods=12), "lat_index": np.arange(12) % 3})
    found = list(ForwardChaining(3).split(X))
    alone = list(ForwardChaining(3).split(X[["time"]]))
    np.testing.assert_equal(found, alone)


def test_without_cube_or_places_the_error_says_what_to_give():
    for folds in every_splitter():
        with pytest.raises(InvalidTypeError, match=r"cube=ds.*'lat_index'"):
            list(folds.split(np.zeros((10, 2))))
        with pytest.raises(InvalidTypeError, match="has no cube"):
            list(folds.split_cube())
    with pytest.raises(InvalidTypeError, match="has no cube"):
        LeaveRegionOut(BIOME).get_n_splits()


def test_times_that_stand_twice_tell_no_cells():
    cube = cube_of()
    cube = cube.assign_coords(time=cube.time.values[np.arange(12) // 2])
    table = cube.to_dataframe().reset_index().iloc[:-5]
    folds = BlockKFold(3, SIZES, cube=cube)
    with pytest.raises(InvalidValueError, match=r"'time' more than once.*time_index"):
        next(folds.split(table))


def test_a_feature_named_like_a_dim_without_a_coordinate_is_no_position():
    """Hours of the day in a column `time` are not the time steps of the rows."""
    values = np.random.default_rng(0).normal(size=(48, 4, 4))
    cube = xr.Dataset({"a": (("time", "y", "x"), values)})
    steps = np.repeat(np.arange(48), 16)
    X = pd.DataFrame({"a": values.ravel(), "time": steps % 24})
    train, test = next(iter(ForwardChaining(3, gap=2, cube=cube).split(X)))
    assert steps[train].max() + 2 < steps[test].min()
    whole = cube.to_dataframe().reset_index().sample(frac=1, random_state=0)
    train, test = next(iter(ForwardChaining(3, gap=2, cube=cube).split(whole)))
    assert whole["time"].values[train].max() + 2 < whole["time"].values[test].min()


def test_ids_of_a_coordinate_without_an_index_are_not_positions():
    ids = np.roll(np.arange(12), 6)
    cube = xr.Dataset({"a": ("x", np.arange(12.0))}, {"x": ids}).drop_indexes("x")
    rows = pd.DataFrame({"a": np.arange(12.0), "x": ids})
    splitter = BlockKFold(4, {"x": 3}, cube=cube)
    by_id = [set(test) for _, test in splitter.split(rows)]
    by_position = [set(test) for _, test in splitter.split(rows[["a"]])]
    assert by_id == by_position


@pytest.mark.parametrize("unit", ["Y", "M", "W", "D", "s"])
def test_dates_of_any_unit_are_times_of_samples(unit):
    dates = np.array([2000, 2002, 2003, 2005]) - 1970 if unit == "Y" else np.array([0, 2, 3, 5])
    groups = {"time_index": np.array([0, 2, 3, 5]), "time": dates.astype(f"M8[{unit}]")}
    assert len(list(ForwardChaining(2).split(np.zeros((4, 1)), groups=groups))) == 2
