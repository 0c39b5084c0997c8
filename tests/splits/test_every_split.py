"""What every way of splitting promises, also those that are added to `ml4cube.splits`."""

from __future__ import annotations

import inspect
import itertools
import json
import warnings

import numpy as np
import pytest
import xarray as xr

import ml4cube.accessor  # noqa: F401  # it registers itself
from ml4cube import splits
from ml4cube.cube.masks_and_labels import RECIPE_ATTR
from ml4cube.errors import EmptyPartError
from ml4cube.splits import apply_split
from ml4cube.splits.folds.protocol import CubeSplitter
from tests.cubes import cell_id_cube

SHAPE = {"time": 12, "lat": 6, "lon": 10}
WAYS = {name: way for name, way in vars(splits).items() if name.startswith("assign_")}
SPLITTERS = {
    name: splitter
    for name, splitter in vars(splits).items()
    if isinstance(splitter, type) and issubclass(splitter, CubeSplitter)
}
# Arguments that some ways need, and those that the tests set where a way has them.
ARGUMENTS = {"regions": "zone", "block_size": {"time": 3, "lat": 2, "lon": 5}}
CODES = {"train": 1, "val": 2, "test": 0}

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def cube_of(**options):
    cube = cell_id_cube(SHAPE, "float64", gaps=0.2, seed=3, names=("t",), **options)
    return cube.assign_coords(zone=("lat", ["a", "b", "c", "d", "e", "f"]))


def arguments_of(way, **asked):
    """The arguments that a way has, of those that it needs and those that are asked for."""
    parameters = inspect.signature(way).parameters
    return {name: value for name, value in {**ARGUMENTS, **asked}.items() if name in parameters}


def label_of(way, cube, **asked):
    return way(cube, **arguments_of(way, **asked))["split"].transpose(*SHAPE)


def cells_of_rows(rows, size):
    """The cells of windows of `size` times that begin at the cells of these rows."""
    steps, places = np.divmod(rows, SHAPE["lat"] * SHAPE["lon"])
    return {(t + k, p) for t, p in zip(steps, places, strict=True) for k in range(size)}


def test_there_are_ways_and_splitters():
    assert {"assign_block_split", "assign_location_split"} <= WAYS.keys()
    assert {"BlockKFold", "LeaveLocationTimeOut"} <= SPLITTERS.keys()


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("seed", [1, 2])
def test_every_part_has_valid_cells_and_nothing_but_the_cells_decides(name, seed):
    cube = cube_of()
    label = label_of(WAYS[name], cube, val=0.2, split=0.5, seed=seed, valid="t")
    assert set(np.unique(label)) <= {*CODES.values(), 255}
    for code in CODES.values():
        assert ((label == code) & cube.t.notnull()).any()
    other = cube.transpose("lon", "time", "lat").chunk({"time": 5, "lat": 4})
    same = label_of(WAYS[name], other, val=0.2, split=0.5, seed=seed, valid="t")
    assert same.chunks is not None
    np.testing.assert_array_equal(same, label)
    rebuilt = apply_split(other, label.attrs[RECIPE_ATTR])["split"].transpose(*SHAPE)
    np.testing.assert_array_equal(rebuilt, label)
    assert json.loads(label.attrs[RECIPE_ATTR])["made_by"] == name


@pytest.mark.parametrize("name", WAYS)
def test_a_buffer_leaves_no_train_cell_beside_one_that_is_held_out(name):
    way, cube = WAYS[name], cube_of()
    distance = arguments_of(way, buffer=1).keys() & {"buffer"} or arguments_of(way, gap=1).keys()
    distance -= ARGUMENTS.keys()
    if not distance:
        pytest.skip(f"{name} deals single cells, so it has neither buffer nor gap")
    plain = label_of(way, cube, split=0.95)
    label = label_of(way, cube, split=0.95, **dict.fromkeys(distance, 1))
    np.testing.assert_array_equal(label.where(label != 255, 1), plain)
    grid = json.loads(label.attrs[RECIPE_ATTR])["plan"]["grid"]
    cut = [d for d, n, t in zip(grid["dims"], grid["shape"], grid["tile"], strict=True) if t < n]
    around = label.pad(dict.fromkeys(cut, 1), constant_values=255)
    for steps in itertools.product(range(3), repeat=len(cut)):
        beside = around.isel({d: slice(k, k + SHAPE[d]) for d, k in zip(cut, steps, strict=True)})
        assert not ((label.values == 1) & np.isin(beside, (0, 2))).any()


@pytest.mark.parametrize("name", WAYS)
def test_a_part_that_would_be_empty_is_refused(name):
    one = xr.zeros_like(cube_of().t, dtype=bool)
    one[0, 0, 0] = True
    cube = cube_of()
    if "valid" not in arguments_of(WAYS[name], valid=one):
        cube = cube.isel(lat=[0], lon=[0], time=[0])
    with pytest.raises(EmptyPartError):
        label_of(WAYS[name], cube, split=0.5, valid=one)


@pytest.mark.parametrize("name", WAYS)
def test_the_accessor_has_every_way(name):
    method = name.removeprefix("assign_").removesuffix("_split")
    cube = cube_of()
    made = cube.ml4cube.split(method, **arguments_of(WAYS[name], split=0.5))
    xr.testing.assert_identical(made, WAYS[name](cube, **arguments_of(WAYS[name], split=0.5)))


@pytest.mark.parametrize("name", SPLITTERS)
@pytest.mark.parametrize("size", [1, 3])
def test_folds_train_on_no_cell_that_they_test(name, size):
    cube = cube_of()
    asked = arguments_of(SPLITTERS[name], cube=cube, n_splits=3, sample_size={"time": size})
    folds = SPLITTERS[name](**asked)
    rows = np.zeros((cube.t.size, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        labels = [label["split"].transpose(*SHAPE).values.ravel() for label in folds.split_cube()]
        parts = list(folds.split(rows))
    assert len(parts) == len(labels) == folds.get_n_splits(rows)
    again = SPLITTERS[name](**folds.get_params())
    for (train, test), (same_train, same_test), label in zip(
        parts, again.split(rows), labels, strict=True
    ):
        np.testing.assert_array_equal(train, same_train)
        np.testing.assert_array_equal(test, same_test)
        assert train.size
        assert test.size
        assert not cells_of_rows(train, size) & cells_of_rows(test, size)
        assert (label[train] == 1).all()
        assert (label[test] == 0).all()
        if size == 1:
            np.testing.assert_array_equal(np.flatnonzero(label == 1), train)
            np.testing.assert_array_equal(np.flatnonzero(label == 0), test)


@pytest.mark.parametrize("name", SPLITTERS)
def test_folds_without_a_valid_cell_are_refused(name):
    one = xr.zeros_like(cube_of().t, dtype=bool)
    one[0, 0, 0] = True
    folds = SPLITTERS[name](**arguments_of(SPLITTERS[name], cube=cube_of(), valid=one))
    with pytest.raises(EmptyPartError):
        list(folds.split_cube())
