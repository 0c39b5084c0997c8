"""Samples of several steps of a forecast: the right cells, from the same dates, or one error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.core.errors import CubeError
from ml4cube.cube.reader import CubeReader
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.sampling import tiling
from tests.cubes import cell_id_cube
from tests.samplestores import sampled

SHAPE = {"time": 12, "lat": 2, "lon": 3}


def forecasts(
    cube: Any, inputs: int = 1, outputs: int | None = None, **options: Any
) -> PTXrDataset:
    """Samples of whole maps, not scaled."""
    return PTXrDataset(
        cube,
        to_pred="b",
        sample_size={"time": inputs, "lat": 2, "lon": 3},
        target_offset={"time": inputs},
        target_size=None if outputs is None else {"time": outputs},
        scale_fn=None,
        dtype="float64",
        **options,
    )


@settings(max_examples=30)
@given(
    inputs=st.integers(1, 3),
    outputs=st.integers(1, 3),
    steps=st.integers(1, 3),
    overlap=st.sampled_from([None, 0.5, {"time": 0.9}]),
    dim_order=st.sampled_from([None, ("lon", "time", "lat")]),
    gaps=st.sampled_from([0.0, 0.02]),
)
def test_samples_are_those_of_a_plain_loop(
    inputs: int, outputs: int, steps: int, overlap: Any, dim_order: Any, gaps: float
) -> None:
    cube = cell_id_cube(SHAPE, "float32", names=("a", "b"), dim_order=dim_order, gaps=gaps)
    fraction = overlap["time"] if isinstance(overlap, dict) else overlap or 0
    shared = min(int(np.floor(fraction * inputs + 0.5)), inputs - 1)
    expected = []
    for start in range(0, SHAPE["time"], inputs - shared):
        end_of_x = start + inputs + (steps - 1) * outputs
        end_of_y = start + inputs + steps * outputs
        if end_of_y > SHAPE["time"]:
            break
        x = cube.isel(time=slice(start, end_of_x)).to_array().values
        y = cube[["b"]].isel(time=slice(start + inputs, end_of_y)).to_array().values
        if not np.isnan(x).any() and not np.isnan(y).any():
            expected.append((start, x, y))
    if not expected:
        return
    # Maps overlap along time only.
    overlap = overlap if overlap is None or isinstance(overlap, dict) else {"time": overlap}
    data = forecasts(cube, inputs, outputs, rollout=steps, overlap=overlap)
    assert data.coords(range(len(data)))["time_index"].tolist() == [e[0] for e in expected]
    assert data.rollout == steps
    for item, (_, x, y) in zip(map(data.__getitem__, range(len(data))), expected, strict=True):
        for found, true in zip(item, (x, y), strict=True):
            np.testing.assert_array_equal(found.numpy(), true.reshape(found.shape))


def test_one_step_changes_nothing() -> None:
    cube = cell_id_cube(SHAPE, names=("a", "b"), gaps=0.02)
    default, one = forecasts(cube, 2, 1), forecasts(cube, 2, 1, rollout=1)
    for a, b in zip(default.take(range(len(default))), one.take(range(len(one))), strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
    assert default.layout == one.layout
    assert one.step_sizes == ({"time": 2, "lat": 2, "lon": 3}, {"lat": 2, "lon": 3})


def test_one_number_for_the_overlap_of_all_dims_is_that_of_a_single_step() -> None:
    cube = cell_id_cube({"time": 12, "lat": 4, "lon": 4}, names=("a", "b"))
    cube["time_bnds"] = (("time", "bnds"), np.zeros((12, 2)))

    def origins(rollout: int) -> Any:
        data = PTXrDataset(
            cube,
            to_pred="b",
            sample_size={"time": 2, "lat": 2},
            target_offset={"time": 2},
            overlap=0.5,
            rollout=rollout,
        )
        found = data.coords(range(len(data)))
        return set(
            zip(*(found[f"{d}_index"].tolist() for d in ("time", "lat", "lon")), strict=True)
        )

    assert origins(2) == {origin for origin in origins(1) if origin[0] <= 12 - 6}


def test_coordinates_and_static_fields_belong_to_the_dates_of_their_own_step() -> None:
    cube = cell_id_cube(SHAPE, names=("b",))
    cube["height"] = cube["b"].isel(time=0, drop=True)
    long = forecasts(cube, rollout=3, coord_features=["dayofyear"])
    short = forecasts(cube, coord_features=["dayofyear"])
    assert long.channels == ("b", "height", "sin(dayofyear)", "cos(dayofyear)")
    for step in range(3):
        np.testing.assert_array_equal(long[1][0][:, step], short[1 + step][0])
        np.testing.assert_array_equal(long[1][1][:, step], short[1 + step][1])


def test_cells_of_one_step() -> None:
    cube = cell_id_cube(SHAPE, names=("a", "b"))
    for inputs, outputs in ((1, 1), (2, 1), (1, 2), (2, 2)):
        one = forecasts(cube, inputs, outputs, weights="a")
        two = forecasts(cube, inputs, outputs, weights="a", rollout=2)
        assert two.step_sizes == one.step_sizes
        assert list(map(tuple, two.step_sizes)) == list(one.layout)


def test_only_the_steps_of_the_samples_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "_TILE_BYTES", 1)  # each window by itself
    read: list[tuple[int, int]] = []
    original = CubeReader.read

    def noted(reader: CubeReader, slices: Any) -> Any:
        read.append((slices["time"].start, slices["time"].stop))
        return original(reader, slices)

    cube = cell_id_cube(SHAPE, names=("b",))
    for steps, most in ((1, 1), (3, 4)):  # X and y of one step are read one after the other
        data = forecasts(cube, rollout=steps)
        read.clear()
        with monkeypatch.context() as patched:
            patched.setattr(CubeReader, "read", noted)
            data.take(range(len(data)))
        assert max(stop - start for start, stop in read) == most


def test_a_store_gives_what_its_cube_does(tmp_path: Path) -> None:
    cube = cell_id_cube(SHAPE, names=("a", "b"))
    size = {"time": 6, "lat": 2, "lon": 3}
    store = sampled(cube, tmp_path, sample_size=size, overlap={"time": 0.9}, scale_fn=None)
    options: dict[str, Any] = {
        "to_pred": "b",
        "target_offset": {"time": 2},
        "target_size": {"time": 1},
        "rollout": 3,
        "dtype": "float64",
    }
    stored = PTXrDataset(store, **options)
    x, y = stored[0]
    assert x.shape == (2, 4, 2, 3)
    assert y.shape == (1, 3, 2, 3)
    cut = forecasts(cube, 2, 1, rollout=3)
    np.testing.assert_array_equal(x, cut[0][0])
    np.testing.assert_array_equal(y, cut[0][1])
    # Dims of one cell stay in windows of a store.
    assert stored.step_sizes == (
        {"time": 2, "lat": 2, "lon": 3},
        {"time": 1, "lat": 2, "lon": 3},
    )
    with pytest.raises(CubeError, match="rollout=5 needs 7 cells along 'time', and there are 6"):
        PTXrDataset(store, **{**options, "rollout": 5})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollout": 0}, "rollout must be at least 1, got 0"),
        ({"rollout": 2.5}, "rollout must be an integer, got 2.5"),
        ({"target_offset": None}, "rollout=2 needs target_offset along time, as {'time': 1}"),
        (
            {"target_offset": {"time": 3}},
            "target_offset along 'time' must be 2, the cells of X, with rollout=2, because y has "
            "the next steps; got 3",
        ),
        (
            {"target_offset": {"time": 2, "lat": 1}},
            "rollout=2 needs target_offset along one dim, time, got {'time': 2, 'lat': 1}",
        ),
        (
            {"target_size": {"lat": 1}},
            "target_size along 'lat' must be 2, the cells of X, with rollout=2, because y becomes "
            "X; got 1",
        ),
        (
            {"rollout": 6},
            "rollout=6 needs 14 cells along 'time', and there are 12; choose a smaller rollout",
        ),
        ({"overlap": {"space": 0.5}}, "overlap: unknown dim 'space'"),
    ],
)
def test_bad_input(options: dict[str, Any], message: str) -> None:
    cube = cell_id_cube(SHAPE, names=("a", "b"))
    given: dict[str, Any] = {
        "to_pred": "b",
        "sample_size": {"time": 2, "lat": 2, "lon": 3},
        "target_offset": {"time": 2},
        "rollout": 2,
        **options,
    }
    with pytest.raises(CubeError) as error:
        PTXrDataset(cube, **given)
    assert message in str(error.value)
