"""Whole regions left out: named or drawn, with buffers, rebuilt from the recipe alone."""

from __future__ import annotations

import json
import pickle

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.errors import EmptyPartError, InvalidTypeError, InvalidValueError
from ml4cube.splits import apply_split, assign_region_split, regions
from tests import oracle_splits as oracle
from tests.cubes import cell_id_cube

SHAPE = {"time": 6, "lat": 8, "lon": 10}


def map_of(kind, rng=None, dims=("lat", "lon")):
    """Ids of each cell of the map and the same as numbers; about a tenth are gaps."""
    rng = rng or np.random.default_rng(0)
    shape = tuple(SHAPE[dim] for dim in dims)
    codes = rng.integers(-1, 5, shape)
    words = np.array(["bog", "fen", "heath", "lake", "moor", None], dtype=object)
    ids = {
        "int": codes,  # -1 is a region of its own here
        "float": np.where(codes < 0, np.nan, codes * 0.1).astype("float32"),
        "word": words[codes],
    }[kind]
    return xr.DataArray(ids, dims=dims, name="biome"), codes


@pytest.mark.slow
@settings(max_examples=30)
@given(
    kind=st.sampled_from(["int", "float", "word"]),
    dims=st.sampled_from([("lat", "lon"), ("lon",), ("time", "lat"), ("lon", "time", "lat")]),
    chunks=st.sampled_from([None, {"time": 4, "lat": 3}, {"lon": 1}]),
    order=st.permutations(list(SHAPE)),
    buffer=st.sampled_from([None, 1, {"lon": 2}, {"lat": 1, "time": 1}]),
    background=st.sampled_from(["train", "excluded"]),
    seed=st.integers(0, 99),
)
def test_named_regions_cell_by_cell(kind, dims, chunks, order, buffer, background, seed):
    ids, codes = map_of(kind, np.random.default_rng(seed), dims)
    cube = cell_id_cube(SHAPE, "float64", dim_order=tuple(order), dask_chunks=chunks)
    named = {"int": ([1], [2, 0]), "float": (0.1, [0.2, 0.0]), "word": ("fen", ["heath", "bog"])}
    test, val = named[kind]
    of_code = {1: 0, 2: 2, 0: 2, -1: 1 if kind == "int" or background == "train" else 255}
    flat = np.vectorize(lambda code: of_code.get(code, 1))(codes).astype("uint8")
    plain = xr.DataArray(flat, dims=dims).broadcast_like(cube["a"]).transpose(*SHAPE).values
    steps = dict.fromkeys(SHAPE, 0)
    steps.update(dict.fromkeys(dims, buffer) if isinstance(buffer, int) else buffer or {})
    near = [
        oracle.near_in_cells(n, steps[dim], cyclic=dim == "lon" and steps[dim] > 0)
        for dim, n in SHAPE.items()
    ]
    expected = oracle.buffered(plain, near) if buffer else plain
    options = {"test": test, "val": val, "buffer": buffer, "background": background}
    asked = {dim for dim in buffer if buffer[dim]} if isinstance(buffer, dict) else set()
    if asked - set(dims):
        with pytest.raises(InvalidValueError, match="the split is not cut there"):
            assign_region_split(cube, ids, **options)
        return
    if {0, 1, 2} - set(codes.ravel().tolist()) or 1 not in expected:
        # a draw without one of the regions, or a buffer over all of train: an error
        with pytest.raises(InvalidValueError):
            assign_region_split(cube, ids, **options)
        return
    label = assign_region_split(cube, ids, **options)["split"]
    np.testing.assert_array_equal(label.transpose(*SHAPE).values, expected)
    assert label.dtype == np.uint8
    assert (label.chunks is None) == (chunks is None)


@pytest.mark.parametrize("order", [("time", "lat", "lon"), ("lon", "time", "lat")])
@pytest.mark.parametrize("chunks", [None, {"time": 2, "lon": 3}])
def test_drawn_regions_meet_the_fractions_of_valid_cells(order, chunks):
    shape = {"time": 4, "lat": 20, "lon": 20}
    ids = xr.DataArray(np.arange(400).reshape(20, 20) // 2 * 3, dims=("lat", "lon"))
    cube = cell_id_cube(shape, "float64", gaps=0.3, dim_order=order, dask_chunks=chunks)
    valid = cube["a"].notnull().transpose(*shape).values
    seen = set()
    for seed in range(5):
        label = assign_region_split(cube, ids, 0.7, val=0.1, seed=seed, valid="a")["split"]
        cells = label.transpose(*shape).values
        for code, wanted in {1: 0.7, 2: 0.1, 0: 0.2}.items():
            assert abs((cells[valid] == code).mean() - wanted) < 0.003
        for id in np.unique(ids):
            assert np.unique(cells[:, ids.values == id]).size == 1
        seen.add(cells.tobytes())
    assert len(seen) == 5
    plain = cell_id_cube(shape, "float64", gaps=0.3)
    again = assign_region_split(plain, ids, 0.7, val=0.1, seed=4, valid="a")["split"]
    np.testing.assert_array_equal(again.values, cells)


TEXTS = np.array(["bog", "fen", np.nan], np.dtypes.StringDType(na_object=np.nan))


@pytest.mark.parametrize(
    ("ids", "test", "expected"),
    [
        # most cells of the masks are tested, which no draw of regions would do
        (np.array([True, True, False]), None, [0, 0, 1]),
        (np.array([True, False, None, True], object), None, [0, 1, 255, 0]),  # as of pandas
        (np.array(["bog", "fen", "heath"]), ["bog", "heath"], [0, 1, 0]),
        (TEXTS, "fen", [1, 0, 255]),
    ],
)
def test_masks_and_texts_are_maps(ids, test, expected):
    zone = xr.DataArray(ids, dims="y")
    cube = xr.Dataset({"a": (("y", "x"), np.zeros((ids.size, 2)))}, {"zone": zone})
    for given_map in (zone, "zone"):
        label = assign_region_split(cube, given_map, test=test).split
        assert label[:, 0].values.tolist() == expected


def test_the_recipe_says_what_is_left_out():
    cube = cell_id_cube(SHAPE, "float64", dask_chunks={"time": 4})
    ids, _ = map_of("word")
    label = assign_region_split(cube, ids, test=["fen"], val="moor", buffer=1)["split"]
    recipe = json.loads(label.attrs["ml4cube_split"])
    assert recipe["made_by"] == "assign_region_split"
    assert recipe["plan"]["note"] == "regions of biome, test: fen; val: moor"
    shares = recipe["plan"]["fractions"]
    assert sum(shares.values()) == pytest.approx(1)
    assert shares["test"] == pytest.approx((ids == "fen").sum() / (ids.notnull()).sum())


def test_a_large_map_is_small_in_the_recipe_and_in_a_pickle():
    lat, lon = np.meshgrid(np.arange(720), np.arange(1440), indexing="ij")
    ids = xr.DataArray((lat // 30) * 100 + (lon + lat // 7) // 45, dims=("lat", "lon"))
    cube = xr.Dataset({"t": (("lat", "lon"), np.zeros((720, 1440)))}).chunk({"lat": 180})
    label = assign_region_split(cube, ids, 0.7, val=0.15)["split"]
    recipe = label.attrs["ml4cube_split"]
    assert len(recipe) < 100_000
    np.testing.assert_array_equal(apply_split(cube, recipe)["split"].values, label.values)
    assert len(pickle.dumps(label.data)) < 400_000


def test_maps_too_large_for_a_recipe_are_refused(monkeypatch):
    cube = cell_id_cube(SHAPE, "float64")
    ids, _ = map_of("int")
    monkeypatch.setattr(regions, "MAX_MAP_CELLS", 79)
    with pytest.raises(InvalidValueError, match=r"80 cells.* can hold 79.*coarser"):
        assign_region_split(cube, ids)
    monkeypatch.undo()
    monkeypatch.setattr(regions, "MAX_RECIPE_BYTES", 100)
    with pytest.raises(InvalidValueError, match=r"in the recipe.*coarser"):
        assign_region_split(cube, ids)


def along_lat(ids, coords=None):
    return xr.DataArray(ids, coords, dims="lat")


OTHER_LAT = {"lat": np.arange(8.0)}
BAD = [
    ({"test": ["tundra"]}, InvalidValueError, "unknown region 'tundra'; 'biome' has bog, fen"),
    ({"test": "fen", "val": ["fen"]}, InvalidValueError, "'fen' must be named once"),
    ({"test": []}, EmptyPartError, "must name at least one region"),
    ({"test": "fen", "split": 0.7}, InvalidValueError, "either .* got split=0.7, test='fen'"),
    ({"test": "fen", "val": 0.1}, InvalidValueError, r"val=0.1; .* use val=\[id\]"),
    ({"val": ["fen"]}, InvalidValueError, "test and val must name regions"),
    ({"split": 1.4}, InvalidValueError, "1.4"),
    ({"test": ["bog", "fen", "heath", "lake", "moor"]}, EmptyPartError, "train part.*background"),
    ({"test": "fen", "background": "test"}, InvalidValueError, "'excluded' or 'train'"),
    ({"test": "fen", "buffer": 99}, EmptyPartError, "takes every valid cell"),
    ({"seed": 0.5}, InvalidTypeError, "seed"),
    ({"regions": "biome"}, InvalidValueError, "regions must be .*, got 'biome'"),
    ({"regions": np.zeros(8)}, InvalidTypeError, "ndarray"),
    ({"regions": along_lat(np.zeros(7))}, InvalidValueError, "7 cells along 'lat'"),
    ({"regions": xr.DataArray(3)}, InvalidValueError, "must have dims"),
    ({"regions": along_lat(np.full(8, np.nan))}, InvalidValueError, "got only gaps"),
    ({"regions": along_lat(np.zeros(8))}, EmptyPartError, "1 of 1 regions"),
    ({"regions": along_lat(np.arange(8), OTHER_LAT)}, InvalidValueError, "other 'lat' coordinates"),
]


@pytest.mark.parametrize(("options", "error", "says"), BAD)
def test_bad_arguments_are_named(options, error, says):
    options = {"regions": map_of("word")[0], **options}
    with pytest.raises(error, match=says):
        assign_region_split(cell_id_cube(SHAPE, "float64"), **options)


@pytest.mark.parametrize(
    ("ids", "wanted", "known"),
    [
        (["AF", "AS", "EU"], "ASIA", "AF, AS, EU"),
        ([b"AF", b"AS", b"EU"], b"ASIA", "b'AF', b'AS', b'EU'"),
        (np.array(["7", "10", 8], dtype=object), 100, "10, 7, 8"),
        (["AF", "AS", "EU"], "A", "AF, AS, EU"),
        ([1, 2, 3], 2.5, "1, 2, 3"),
        ([1, 2, 3], "2x", "1, 2, 3"),
    ],
)
def test_a_longer_name_is_not_cut_to_that_of_another_region(ids, wanted, known):
    regions = xr.DataArray(np.repeat(np.array(ids), [2, 3, 3]), dims="lat", name="region")
    cube = cell_id_cube(SHAPE, "float64")
    with pytest.raises(InvalidValueError, match=f"'region' has {known}"):
        assign_region_split(cube, regions, test=[wanted])
    made = assign_region_split(cube, regions, test=[ids[1]])["split"].isel(time=0, lon=0)
    assert (made.values == 0).tolist() == [False] * 2 + [True] * 3 + [False] * 3
