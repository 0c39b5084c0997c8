"""Two sample stores beside each other: what they share is found, by positions and by bits."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.errors import InvalidTypeError, InvalidValueError, StoreError
from ml4cube.splits import BlockKFold, assign_block_split, assign_region_split, leakage_report

SHAPE = {"time": 8, "lat": 12, "lon": 16}
WINDOW = {"lat": 3, "lon": 4}


def cube(seed: int = 0) -> xr.Dataset:
    values = np.random.default_rng(seed).normal(size=tuple(SHAPE.values())).astype("float32")
    coords = {
        "time": pd.date_range("2000", periods=8, freq="MS"),
        "lat": np.linspace(-60, 60, 12),
        "lon": np.arange(16.0),
    }
    return xr.Dataset({"a": (tuple(SHAPE), values)}, coords)


def stores(path: Path, ds: xr.Dataset, block: dict[str, int], **options: Any) -> list[xr.Dataset]:
    paths = {f"{part}_cube": path / f"{part}.zarr" for part in ("train", "test")}
    labelled = assign_block_split(ds, block, 0.6, seed=1)
    sampler = MultiProcSampler(
        labelled, **paths, nproc=1, scale_fn=None, sample_size=WINDOW, **options
    )
    return list(sampler.get_datasets())


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> list[xr.Dataset]:
    path = tmp_path_factory.mktemp("apart")
    return stores(path, cube(), {"time": 2, "lat": 6}, overlap={"lat": 0.67, "lon": 0.5})


def windows(store: xr.Dataset) -> list[tuple[int, ...]]:
    return list(zip(*(store[f"{dim}_index"].values.tolist() for dim in SHAPE), strict=True))


def near(a: tuple[int, ...], b: tuple[int, ...], reach: int = 0) -> bool:
    """Return True if windows share a cell, or lie no more than `reach` - 1 cells apart."""
    sizes = (1, 3, 4)
    return all(abs(x - y) < n + reach for x, y, n in zip(a, b, sizes, strict=True))


@pytest.mark.slow
def test_stores_of_one_split_share_nothing_and_touching_samples_are_counted(
    apart: list[xr.Dataset],
) -> None:
    train, test = apart
    report = leakage_report(train, test)
    assert not report.leaks
    found = report.table.found
    assert found["train samples"] == train.sizes["samples"] > 50
    assert found["test samples"] == test.sizes["samples"] > 50
    assert found["shared cells"] == found["duplicate samples"] == 0
    touching = sum(any(near(w, t, 1) for t in windows(train)) for w in windows(test))
    assert found["touching samples"] == touching > 0
    assert "test samples touch a train sample" in report.verdict
    assert report.plot().axes


@pytest.mark.slow
def test_samples_touch_around_the_globe(tmp_path: Path) -> None:
    ds = cube().assign_coords(lon=np.arange(16) * 22.5)
    part = xr.where(ds.lon < 45, 1, xr.where(ds.lon >= 315, 2, 3))
    labelled = assign_region_split(ds, part, test=2, val=3)
    paths = {f"{part}_cube": tmp_path / part for part in ("train", "test", "val")}
    train, test, _ = MultiProcSampler(labelled, **paths, nproc=1).get_datasets()
    found = leakage_report(train, test).table.found
    assert found["touching samples"] == test.sizes["samples"] / 2  # the column at 337.5
    train, test = (store.assign_coords(lon=store.lon / 2) for store in (train, test))
    assert leakage_report(train, test).table.found["touching samples"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("loaded", [0, 1])
def test_one_store_of_two_may_be_in_memory(tmp_path: Path, loaded: int) -> None:
    dates = xr.date_range("2000", periods=8, freq="MS", calendar="noleap", use_cftime=True)
    both = stores(tmp_path, cube().assign_coords(time=dates), {"time": 2, "lat": 6})
    told = leakage_report(*both).table
    both[loaded] = both[loaded].compute()
    pd.testing.assert_frame_equal(leakage_report(*both).table, told)


def test_samples_are_read_once(tmp_path: Path) -> None:
    paths = {f"{part}_cube": tmp_path / f"{part}.zarr" for part in ("train", "test")}
    train, test = MultiProcSampler(cube(), **paths, nproc=1, scale_fn=None).get_datasets()
    assert train.a.dims == ("samples",)
    read = []

    def noted(block: Any, block_info: Any) -> Any:
        read.append(block_info[0]["array-location"])
        return block

    lazy = train.a.chunk(samples=-1).data.map_blocks(noted, dtype="f4", meta=np.empty(0, "f4"))
    leakage_report(train.assign(a=train.a.copy(data=lazy)), test)
    assert len(read) == 1


@pytest.mark.slow
def test_overlapping_and_copied_samples_are_counted(
    apart: list[xr.Dataset], tmp_path: Path
) -> None:
    train, test = apart
    other = stores(tmp_path, cube(), {"time": 3, "lat": 4}, overlap={"lat": 0.67})[1]
    report = leakage_report(train, other)
    assert report.leaks
    shared = sum(any(near(w, t) for t in windows(train)) for w in windows(other))
    assert report.table.found["shared cells"] == shared > 0
    copies = len(set(windows(other)) & set(windows(train)))
    assert report.table.found["duplicate samples"] == copies > 0
    assert "bitwise copies of train samples" in report.verdict
    # the same values elsewhere: a second cube that repeats the first
    moved = test.isel(samples=slice(0, 0))
    moved = xr.concat([moved, train.isel(samples=[3, 8])], "samples", combine_attrs="override")
    moved = moved.assign_coords(time_index=("samples", [7, 0]))
    assert leakage_report(train, moved).table.found["duplicate samples"] == 2


def test_stores_of_other_cubes_are_judged_by_their_values_alone(
    apart: list[xr.Dataset], tmp_path: Path
) -> None:
    later = cube(1).assign_coords(time=pd.date_range("2050", periods=8, freq="MS"))
    other = stores(tmp_path, later, {"time": 2})[1]
    report = leakage_report(apart[0], other)
    assert not report.leaks
    assert report.table.status["shared cells"] == "unknown"
    assert "not cut alike from one cube" in report.verdict
    constant = [store.assign(a=store.a * 0) for store in apart]
    assert leakage_report(*constant).table.status["duplicate samples"] == "unknown"


@pytest.mark.parametrize("value", [0.0, np.nan])
def test_windows_of_one_value_are_no_copies(tmp_path: Path, value: float) -> None:
    ds = xr.full_like(cube(), value)
    ds = ds.assign(dict.fromkeys("bcd", ds["a"]))
    found = stores(tmp_path, ds, {"time": 2}, drop_nan=None)
    assert leakage_report(*found).table.status["duplicate samples"] == "unknown"


def test_neighbours_along_categories_do_not_touch(tmp_path: Path) -> None:
    texts = np.array(list("abcdefgh"), np.dtypes.StringDType())
    for name, values in {"member": np.arange(8), "crop": texts}.items():
        ds = cube().rename(time=name).assign_coords({name: values})
        train, test = stores(tmp_path / name, ds, {name: 2})
        assert leakage_report(train, test).table.found["touching samples"] == 0
        labelled = assign_block_split(ds, {name: 2}, 0.6, seed=1)
        assert leakage_report(labelled).table.found["touching cells"] == 0


def test_paths_of_stores_are_opened(apart: list[xr.Dataset], tmp_path: Path) -> None:
    made = stores(tmp_path, cube(), {"time": 2, "lat": 6})
    report = leakage_report(str(tmp_path / "train.zarr"), tmp_path / "test.zarr")
    pd.testing.assert_frame_equal(report.table, leakage_report(*made).table)
    shards = [path for path in (tmp_path / "test.zarr" / "a" / "c").rglob("*") if path.is_file()]
    whole = shards[0].read_bytes()
    for damaged in (b"", bytes([whole[0] ^ 4]) + whole[1:]):
        shards[0].write_bytes(damaged)
        with pytest.raises(StoreError, match=r"a/c/"):
            leakage_report(tmp_path / "train.zarr", tmp_path / "test.zarr")


def test_what_is_no_pair_of_stores_is_refused(apart: list[xr.Dataset]) -> None:
    train, test = apart
    for second in (None, cube(), test["a"]):
        with pytest.raises(InvalidTypeError, match="must be the opened test store"):
            leakage_report(train, second)
    empty = test.isel(samples=slice(0, 0))
    for pair in itertools.permutations((train, empty)):
        with pytest.raises(InvalidValueError, match="must have samples"):
            leakage_report(*pair)
    with pytest.raises(InvalidValueError, match=r"variable in common.*{'a': {.*}} and {'b': {"):
        leakage_report(train, test.rename(a="b"))


def test_splitting_overlapping_samples_warns(apart: list[xr.Dataset], tmp_path: Path) -> None:
    store = apart[0]
    said = r"overlap by {'time': 0, 'lat': 2, 'lon': 2} cells.*share cells"
    with pytest.warns(UserWarning, match=said):
        assign_block_split(store, {"samples": 10})
    with pytest.warns(UserWarning, match=said):
        next(BlockKFold(3, {"samples": 10}).split_cube(store))
    separate = stores(tmp_path, cube(), {"time": 2, "lat": 6})[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assign_block_split(separate, {"samples": 10})


@pytest.mark.parametrize("dim", ["time", "lat"])
def test_a_store_of_other_cells_than_those_of_the_cube_is_refused(tmp_path: Path, dim: str) -> None:
    """Its positions count from the first cell of the part that it was cut from."""
    ds = cube()
    part = ds.isel({dim: slice(SHAPE[dim] // 2, None)})
    store = stores(tmp_path, part, {"time": 1})[0]
    for source in (part, part.assign_coords(lat=part.lat.astype("float32"))):
        assert len(list(BlockKFold(2, {"time": 1}, cube=source).split(store))) == 2
    with pytest.raises(InvalidValueError, match=f"not from this cube: sample 0 is at '{dim}'"):
        next(BlockKFold(2, {"time": 1}, cube=ds).split(store))
