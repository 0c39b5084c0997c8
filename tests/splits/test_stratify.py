"""Stratified splits: every class is shared out, counted in one pass, whatever the chunks."""

from __future__ import annotations

import itertools
import json
import threading
import warnings

import dask.array as da
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.core.grid import Grid
from ml4cube.core.partition import partition
from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.splits import assign_block_split, value_counts
from ml4cube.splits.cube import CubeView
from ml4cube.splits.strata import class_counts
from ml4cube.splits.validity import valid_mask
from tests.cubes import cell_id_cube

SHAPE = {"time": 12, "lat": 8, "lon": 9}
SIZES = {"time": 5, "lat": 3, "lon": 4}


def counts_cell_by_cell(classes, valid, names):
    """Every cell in turn: its block along (lat, lon, time), its class, one more."""
    shape = [-(-SHAPE[dim] // SIZES[dim]) for dim in ("lat", "lon", "time")]
    counts = np.zeros((*shape, len(names)), dtype=int)
    for t, i, j in itertools.product(*map(range, SHAPE.values())):
        block = i // SIZES["lat"], j // SIZES["lon"], t // SIZES["time"]
        if valid[t, i, j] and classes[t, i, j] in names:
            counts[(*block, names.index(classes[t, i, j]))] += 1
    return counts.reshape(-1, len(names))


def landcover(kind, rng):
    """Class of every cell by (time, lat, lon), what stands for it in a cube, its dims."""
    codes = rng.integers(0, 4, tuple(SHAPE.values()))
    if kind == "static":
        codes = np.broadcast_to(codes[0], codes.shape)
        return codes, codes[0].astype("uint8"), ("lat", "lon")
    words = np.array(["bog", "crop", "forest", "lake"])
    stored = {
        "int": codes.astype("int16") - 2,
        "huge": codes.astype("uint64") + np.uint64(2**64 - 5),
        "bool": codes > 1,
        "float": np.where(codes == 3, np.nan, codes * -1.5).astype("float32"),
        "text": words[codes],
        "object": np.where(codes == 3, None, words[codes].astype(object)),
        "date": np.datetime64("2000-01-01", "ns") + codes * np.timedelta64(1, "D"),
    }[kind]
    return codes, stored, tuple(SHAPE)


@pytest.mark.slow
@settings(max_examples=25)
@given(
    kind=st.sampled_from(["static", "int", "huge", "bool", "float", "text", "object", "date"]),
    chunks=st.sampled_from([None, {"time": 5, "lat": 4}, {"lon": 2}, {"time": 1, "lat": 3}]),
    order=st.permutations(list(SHAPE)),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_classes_of_any_kind_are_counted_as_cell_by_cell(kind, chunks, order, masked, seed):
    rng = np.random.default_rng(seed)
    codes, stored, dims = landcover(kind, rng)
    groups = {"bool": [(0, 1), (2, 3)], "float": [(2,), (1,), (0,)], "object": [(0,), (1,), (2,)]}
    groups = groups.get(kind, [(0,), (1,), (2,), (3,)])
    group_of = {code: place for place, group in enumerate(groups) for code in group}
    classes = np.vectorize(lambda code: group_of.get(code, -1))(codes)
    cube = cell_id_cube(SHAPE, "float64", gaps=0.3, seed=seed)
    valid = cube["a"].notnull().values if masked else np.ones(classes.shape, dtype=bool)
    cube["cover"] = (dims, stored)
    cube = cube.transpose(*order)
    cube = cube if chunks is None else cube.chunk(chunks)
    view = CubeView.of(cube)
    grid = Grid.blocks(view.sorted_sizes, SIZES)
    found = class_counts("cover", view, grid, valid_mask("a" if masked else None, view))
    expected = counts_cell_by_cell(classes, valid, list(range(len(groups))))
    words = kind in ("text", "object")  # they stand in the order of their codes
    counts = found.counts[:, np.argsort(found.class_names)] if words else found.counts
    np.testing.assert_array_equal(counts, expected)
    if masked:
        np.testing.assert_array_equal(found.weights.sum(), valid.sum())
        whole = counts_cell_by_cell(np.zeros_like(classes), valid, [0])
        np.testing.assert_array_equal(found.weights, whole[:, 0])


@settings(max_examples=25)
@given(
    dtype=st.sampled_from(["float32", "float64", "int16"]),
    chunks=st.sampled_from([None, {"time": 5, "lat": 4}, {"lon": 2}]),
    bins=st.integers(2, 7),
    few=st.booleans(),
    seed=st.integers(0, 99),
)
def test_quantile_bins_are_those_of_numpy(dtype, chunks, bins, few, seed):
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 50, tuple(SHAPE.values()))
    values = np.round(values / 30) if few else values
    values = values.astype(dtype)
    if dtype != "int16":
        values[rng.random(values.shape) < 0.2] = rng.choice([np.nan, np.inf, -np.inf])
    cube = xr.Dataset({"t": (tuple(SHAPE), values)})
    cube = cube if chunks is None else cube.chunk(chunks)
    view = CubeView.of(cube)
    grid = Grid.blocks(view.sorted_sizes, SIZES)
    found = class_counts({"t": bins}, view, grid, xr.DataArray(True))
    finite = np.isfinite(values)
    edges = np.quantile(values[finite], np.arange(1, bins) / bins, method="inverted_cdf")
    classes = np.searchsorted(edges, values)
    used = sorted(set(classes[finite].tolist()))
    np.testing.assert_array_equal(found.counts, counts_cell_by_cell(classes, finite, used))
    assert found.class_names == tuple(f"bin {k + 1} of {bins}" for k in used)


def test_where_memory_is_bounded_bins_are_rounded_and_still_no_chunking_shows(monkeypatch):
    rng = np.random.default_rng(3)
    values = rng.normal(280, 15, (40, 20, 20)).astype("float32")
    cube = xr.Dataset({"t": (("time", "lat", "lon"), values)})
    grid = Grid.blocks({"lat": 20, "lon": 20, "time": 40}, {"lat": 5, "lon": 5, "time": 10})
    monkeypatch.setattr(value_counts, "MAX_PAIRS", 4000)  # 16000 cells, all different, in 64 blocks
    counts = [
        class_counts({"t": 4}, CubeView.of(made), grid, xr.DataArray(True)).counts
        for made in (
            cube,
            cube.chunk({"time": 7, "lat": 3}),
            cube.chunk({"time": 1}),
            cube.transpose("lon", "time", "lat").chunk({"lon": 6}),
        )
    ]
    for other in counts[1:]:
        np.testing.assert_array_equal(other, counts[0])
    assert counts[0].sum() == values.size
    # keys are rounded by powers of two: quarters are off by about a step, of 1 K here
    assert abs(counts[0].sum(0) / values.size - 0.25).max() < 0.06
    held = value_counts.count_values(cube["t"], xr.DataArray(True), grid, classes=False)
    assert held.block.size <= 4000 < value_counts.MAX_PAIRS * 4
    assert held.digits_removed > 0


@pytest.mark.parametrize("stratify", [{"t": 4}, "cover"])
def test_data_are_read_once(stratify):
    reads = []
    lock = threading.Lock()

    def read(name, shape, block_info=None):
        with lock:
            reads.append((name, tuple(block_info[None]["chunk-location"])))
        return np.random.default_rng(1).integers(0, 3, shape).astype("float32")

    def lazy(name):
        return da.map_blocks(
            read, name, (4, 8, 9), chunks=((4, 4, 4), (8,), (9,)), dtype="float32",
            meta=np.empty((0, 0, 0), "float32"),
        )  # fmt: skip

    cube = xr.Dataset({name: (tuple(SHAPE), lazy(name)) for name in ("t", "cover")})
    assign_block_split(cube, SIZES, 0.6, stratify=stratify, valid=["t", "cover"])
    assert sorted(set(reads)) == sorted(reads)
    assert len(reads) == 6


@settings(max_examples=60)
@given(
    weights=st.lists(st.integers(1, 500), min_size=12, max_size=12),
    of_class=st.lists(st.integers(0, 4), min_size=12, max_size=12),
    split=st.floats(0.2, 0.8),
    seed=st.integers(0, 10**6),
)
@pytest.mark.parametrize("stratified", [False, True])
def test_strata_never_hurt_the_whole(weights, of_class, split, seed, stratified):
    classes = None
    if stratified:
        classes = np.zeros((12, 5))
        classes[np.arange(12), of_class] = weights
    parts = partition(weights, [split, 1 - split], seed, classes)
    held = np.bincount(parts, weights, minlength=2)
    assert (held > 0).all()
    assert abs(held[0] - split * sum(weights)) <= max(max(weights) / 2, min(weights)) + 1e-6


@pytest.mark.parametrize("calendar", ["standard", "360_day", "noleap"])
@pytest.mark.parametrize("kind", ["season", "month"])
def test_seasons_and_months_of_any_calendar(kind, calendar):
    time = xr.date_range("2001-01-01", periods=96, freq="MS", calendar=calendar)
    cube = xr.Dataset({"t": (("time", "x"), np.zeros((96, 4)))}, {"time": time})
    made = assign_block_split(cube, {"time": 1, "x": 2}, 0.75, stratify=kind)["split"]
    assert json.loads(made.attrs["ml4cube_split"])["plan"]["note"] == f"stratified by {kind}"
    label = made.transpose("time", "x").values
    month = np.tile(np.arange(1, 13), 8)
    classes = month if kind == "month" else month % 12 // 3
    for one in np.unique(classes):
        assert (label[classes == one] == 1).mean() == 0.75


def test_too_few_blocks_for_a_class_is_told():
    cube = xr.Dataset({"t": (("x",), np.zeros(100))})
    classes = xr.DataArray(np.where(np.arange(100) < 4, "bog", "crop"), dims="x", name="cover")
    with pytest.warns(UserWarning, match=r"bog \(1 blocks, none in .*smaller blocks"):
        assign_block_split(cube, {"x": 5}, 0.7, val=0.1, stratify=classes)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assign_block_split(cube, {"x": 1}, 0.6, val=0.2, stratify=classes)


BAD = [
    ("landcover", InvalidValueError, "'season' or 'month', got 'landcover'"),
    ({"a": 1}, InvalidValueError, "2 to 100"),
    ({"a": 2.5}, InvalidTypeError, "2.5"),
    ({"a": True}, InvalidTypeError, "True"),
    ({"a": 4, "b": 2}, InvalidValueError, "must have one variable"),
    ({}, InvalidValueError, "must have one variable"),
    ({"nothing": 4}, InvalidValueError, "nothing"),
    ({"word": 4}, InvalidTypeError, "write stratify='word'"),
    ("a", InvalidValueError, "at most 256 .* write stratify={'a': 4}"),
    (4, InvalidTypeError, "got int"),
    (["season"], InvalidTypeError, "got list"),
    (xr.DataArray(np.zeros(5), dims="lat"), InvalidValueError, "5 cells along 'lat'"),
    (xr.DataArray(np.zeros(8), dims="height"), InvalidValueError, "height"),
    (xr.DataArray(3, name="zone"), InvalidValueError, "'zone' must have dims .* got a scalar"),
    (xr.DataArray(np.full(8, np.nan), dims="lat"), InvalidValueError, "no valid cell has a value"),
    (xr.DataArray(np.zeros(8, complex), dims="lat"), InvalidTypeError, "complex"),
]


@pytest.mark.parametrize(("stratify", "error", "says"), BAD)
def test_wrong_strata_are_named(stratify, error, says):
    cube = cell_id_cube(SHAPE, "float64", names=("a", "b"))
    cube["word"] = ("lat", np.array(list("abcdefgh")))
    with pytest.raises(error, match=says):
        assign_block_split(cube, SIZES, stratify=stratify)


def test_a_season_needs_dates_and_a_map_must_lie_as_the_cube_does():
    cube = cell_id_cube(SHAPE, "float64")
    with pytest.raises(InvalidValueError, match="needs dates"):
        assign_block_split(cube.drop_vars("time"), SIZES, stratify="season")
    upside_down = (cube["lat"] > 0).isel(lat=slice(None, None, -1))
    for argument in ({"stratify": upside_down}, {"valid": upside_down}):
        with pytest.raises(InvalidValueError, match=r"other 'lat' coordinates.*reindex_like"):
            assign_block_split(cube, SIZES, **argument)
    rounded = (cube["lat"] > 0).assign_coords(lat=cube["lat"].astype("float32"))
    assign_block_split(cube, SIZES, stratify=rounded)


def test_classes_may_be_called_season():
    times = np.array([f"20{y:02}-{m:02}" for y in range(10) for m in range(1, 13)], "M8[ns]")
    cube = xr.Dataset({"a": (("time", "x"), np.zeros((120, 10)))}, {"time": times})
    few = xr.DataArray(np.where(np.arange(120) < 3, 7, 8), dims="time", name="season")
    for ds, stratify in ((cube, few), (cube.assign(season=few), "season")):
        with pytest.warns(UserWarning, match=r"too few blocks.*: 7 \(1 blocks"):
            assign_block_split(ds, {"time": 3, "x": 10}, stratify=stratify)


@pytest.mark.slow
@pytest.mark.parametrize("fractions", [[0.8, 0.2], [0.7, 0.1, 0.2]])
def test_rare_classes_among_many_blocks_are_shared_out(fractions):
    rng = np.random.default_rng(12)
    classes = np.zeros((3000, 13))
    classes[:, 0] = rng.integers(20, 60, 3000)
    for k in range(1, 13):
        classes[rng.choice(3000, 40, replace=False), k] = rng.integers(1, 15, 40)
    weights = classes.sum(axis=1)
    parts = partition(weights, fractions, 0, classes)
    shares = np.stack([classes[parts == p].sum(axis=0) for p in range(len(fractions))])
    off = np.abs(shares / classes.sum(axis=0) - np.array(fractions)[:, None])
    assert off.max() <= 0.05
    whole = np.bincount(parts, weights) / weights.sum()
    assert np.abs(whole - fractions).max() <= weights.max() / weights.sum() / 2
