"""MultiProcSampler: no leak, no loss, no duplicate, the same bytes, never half done."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import re
import shutil
import subprocess
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import dask
import netCDF4
import numpy as np
import pandas as pd
import pytest
import xarray as xr
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ml4cube.core.errors import (
    CubeError,
    EmptyPartError,
    InvalidTypeError,
    RunError,
    StoreError,
    StoreExistsError,
)
from ml4cube.cube import engine
from ml4cube.datasets import multiproc_sampler
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.xr_dataset import XrDataset
from ml4cube.ledger.draft import Draft
from ml4cube.ledger.local import LocalLock
from ml4cube.preprocessing import assign_mask
from ml4cube.sampling import planning, tiling
from ml4cube.sampling.identity import provenance
from ml4cube.splits import apply_split, assign_block_split
from ml4cube.splits import cube as cube_of_splits
from ml4cube.store.format import SAMPLES, open_axes, open_store, verify_store
from ml4cube.store.metadata import StoreMetadata
from tests import oracle_splits
from tests.clusters import local_cluster
from tests.cubes import cell_id_cube
from tests.faults.test_sampling_faults import tree
from tests.oracle_sampler import sample_cube
from tests.samplestores import paths

SHAPE = {"time": 8, "lat": 9, "lon": 10}


@pytest.fixture(autouse=True)
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores of several shards and cubes of several tiles, though the test cubes are tiny."""
    monkeypatch.setattr(tiling, "_SHARD_BYTES", (2048, 8192))
    monkeypatch.setattr(planning, "_COUNT_BYTES", 2048)


def sampler(ds: Any, folder: Path, **options: Any) -> MultiProcSampler:
    given = {**paths(folder), "nproc": 1, "scale_fn": None, **options}
    return MultiProcSampler(ds, **given)


def split_cube(**options: Any) -> xr.Dataset:
    cube = cell_id_cube(SHAPE, "float64", **options)
    return assign_block_split(cube, {"time": 4, "lat": 3, "lon": 5}, split=0.6, val=0.2)


def of_three_parts(folder: Path, **options: Any) -> MultiProcSampler:
    return sampler(split_cube(), folder, val_cube=folder / "v", **options)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    dims = draw(st.lists(st.sampled_from("tyxzw"), min_size=1, max_size=5, unique=True))
    # the first dim is that of the split
    shape = {d: draw(st.integers(2, {3: 6, 4: 4, 5: 3}.get(len(dims), 9))) for d in dims}
    shape[dims[0]], most = 12, {dims[0]: 3}
    size = {
        d: draw(st.integers(1, most.get(d, n))) for d, n in shape.items() if draw(st.booleans())
    }
    overlap = {d: draw(st.sampled_from([0, 0.3, 0.5])) for d in size}
    chunked = draw(st.booleans())
    return {
        "shape": shape,
        "size": size,
        "overlap": overlap,
        "chunks": {d: draw(st.integers(1, n)) for d, n in shape.items()} if chunked else None,
        "gaps": draw(st.sampled_from([0.0, 0.1, 0.6])),
        "seed": draw(st.integers(0, 5)),
        "drop_nan": draw(st.sampled_from(["auto", "if_all_nan", "masked", None])),
        "drop_sample": draw(st.booleans()),
        "mask": draw(st.booleans()),
        "order": draw(st.sampled_from(["shuffled", "grid"])),
        "static": draw(st.booleans()),
    }


def made_cube(case: dict[str, Any]) -> xr.Dataset:
    shape, rng = case["shape"], np.random.default_rng(case["seed"])
    ds = cell_id_cube(
        shape,
        "float64",
        gaps=case["gaps"],
        seed=case["seed"],
        names=("a", "b"),
        dask_chunks=case["chunks"],
    )
    if case["static"]:
        last = list(shape)[-1]
        ds["c"] = (last, rng.normal(size=shape[last]))
    if case["mask"]:
        lasts = list(shape)[1:] or list(shape)
        ds["filter_mask"] = (lasts, rng.random([shape[d] for d in lasts]) < 0.8)
    dim, n = next(iter(shape.items()))
    parts = [*rng.permutation([0, 1, 2]), *rng.choice([1, 0, 2, 255], size=n)]
    ds["split"] = (dim, np.repeat(parts, rng.integers(2, 5, len(parts)))[:n].astype("u1"))
    return ds


@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(case=cases())
def test_same_samples_as_the_oracle(tmp_path_factory: Any, case: dict[str, Any]) -> None:
    if case["drop_nan"] == "masked" and not case["mask"]:
        case["drop_nan"] = "auto"
    folder = tmp_path_factory.mktemp("case")
    ds = made_cube(case)
    names = [n for n in ds.data_vars if n not in ("split", "filter_mask")]
    try:
        made = MultiProcSampler(
            ds,
            **paths(folder, val=True),
            nproc=1,
            scale_fn=None,
            sample_size=case["size"] or None,
            overlap=case["overlap"] or None,
            drop_nan=case["drop_nan"],
            drop_sample=case["drop_sample"],
            order=case["order"],
            seed=case["seed"],
        )
    except EmptyPartError:  # said before any work
        assert 2 not in ds["split"].values
        return
    cells = dict(zip(made.cube.recipe.dims, made.cube.recipe.overlap, strict=True))
    size = dict(zip(made.cube.recipe.dims, made.cube.recipe.size, strict=True))
    counts, samples = sample_cube(
        ds,
        names,
        size,
        cells,
        drop_nan=case["drop_nan"],
        mask="filter_mask" if case["mask"] else None,
        drop_sample=case["drop_sample"],
    )
    if not all(samples.values()):
        with pytest.raises(EmptyPartError, match="no sample"):
            made.get_datasets()
        assert not list(folder.iterdir())
        return
    stores = dict(zip(("train", "test", "val"), made.get_datasets(), strict=True))
    accounting = dict(stores["train"].attrs["accounting"])
    assert accounting.pop("unused") == 0
    assert accounting == counts
    assert accounting.pop("total") == sum(accounting.values())
    for part, store in stores.items():
        index = np.stack([store[f"{d}_index"].values for d in made.cube.recipe.dims], axis=1)
        wanted = dict(samples[part])
        assert sorted(map(tuple, index.tolist())) == sorted(wanted)
        for name in names:
            right = np.array([wanted[tuple(i)][name] for i in index.tolist()])
            kept = [n for n in size.values() if n > 1]
            np.testing.assert_array_equal(store[name].values, right.reshape(-1, *kept))


def test_inputs_stay_as_they_are(tmp_path: Path) -> None:
    ds = split_cube(gaps=0.1)
    ds["a"].attrs["units"] = "K"
    before = ds.copy(deep=True)

    def spoil(samples: dict[str, Any]) -> dict[str, Any]:
        samples["a"] += 1
        return samples

    sampler(ds, tmp_path, val_cube=tmp_path / "v", callback=spoil, drop_nan=None).run()
    xr.testing.assert_identical(ds, before)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["shuffled", "grid"])
def test_same_bytes_for_any_number_of_workers_and_on_a_cluster(tmp_path: Path, order: str) -> None:
    ds = split_cube(gaps=0.02, dask_chunks={"time": 3, "lat": 4, "lon": 10})
    results = {}
    with local_cluster(2, threads_per_worker=2) as cluster:
        address = cluster.scheduler_address
        ways = [(1, None, None), (1, 3, address)]
        if order == "shuffled":
            ways += [(2, 1, None), (3, 7, None)]
        for way in ways:
            nproc, batch, client = way
            folder = tmp_path / str(len(results))
            sampler(
                ds,
                folder,
                val_cube=folder / "val.zarr",
                nproc=nproc,
                chunk_batch=batch,
                client=client,
                sample_size={"lat": 2, "lon": 3},
                overlap=0.5,
                scale_fn="standardize",
                fill_method="noise",
                drop_nan="if_all_nan",
                callback=lambda samples: {**samples, "twice": samples["a"] * 2},
                order=order,
            ).run()
            results[way] = tree(folder)
    assert [way for way, files in results.items() if files != results[ways[0]]] == []
    assert sum("train.zarr/a/c/" in name for name in results[ways[0]]) > 3


@pytest.mark.slow
def test_order(tmp_path: Path) -> None:
    ds = cell_id_cube(SHAPE, "float64").assign(split=("time", np.array([1] * 6 + [0] * 2)))
    grid = sampler(ds, tmp_path / "g", order="grid").get_datasets()[0]
    shuffled, again = (
        sampler(ds, tmp_path / str(k), order="shuffled", seed=1).get_datasets()[0] for k in range(2)
    )
    other = sampler(ds, tmp_path / "o", order="shuffled", seed=2).get_datasets()[0]
    assert (np.sort(shuffled.a.values) == np.sort(grid.a.values)).all()
    np.testing.assert_array_equal(shuffled.a.values, again.a.values)
    assert (shuffled.a.values != other.a.values).any()
    # neighbours in the store come from all over the cube
    near = np.abs(np.diff(shuffled.lat_index.values)) + np.abs(np.diff(shuffled.lon_index.values))
    ordered = np.abs(np.diff(grid.lat_index.values)) + np.abs(np.diff(grid.lon_index.values))
    assert near.mean() > ordered.mean()
    assert shuffled.attrs["provenance"]["settings"]["order"] == "shuffled"


@pytest.mark.slow
@pytest.mark.parametrize("scale_fn", ["standardize", "normalize"])
def test_floats_alone_are_scaled_and_can_be_scaled_back(tmp_path: Path, scale_fn: str) -> None:
    ds = cell_id_cube(SHAPE, "float32", gaps=0.05).assign(
        n=(tuple(SHAPE), np.arange(720, dtype="i2").reshape(8, 9, 10)),
        flag=(tuple(SHAPE), np.arange(720).reshape(8, 9, 10) % 2 == 0),
        when=("time", np.datetime64("2001-01-01", "ns") + np.arange(8).astype("m8[D]")),
    )
    ds = assign_block_split(ds, {"lat": 1, "lon": 1}, 0.6)  # all that is read together is mixed
    train, test = sampler(ds, tmp_path, scale_fn=scale_fn).get_datasets()
    stats = StoreMetadata.of(train).statistics
    assert (stats.part, list(stats)) == ("train", ["a"])
    if scale_fn == "standardize":
        found, wanted = [train.a.mean(), train.a.std()], [0, 1]
    else:
        found, wanted = [train.a.min(), train.a.max()], [0, 1]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    for store in (train, test):
        at = {d: xr.DataArray(store[f"{d}_index"].values, dims="samples") for d in SHAPE}
        raw = ds.drop_vars("split").isel(at)
        assert {n: v.dtype for n, v in store.items()} == {n: v.dtype for n, v in raw.items()}
        offset, scale = store.a.attrs["ml4cube_offset"], store.a.attrs["ml4cube_scale"]
        np.testing.assert_allclose(store.a * scale + offset, raw.a, rtol=1e-5, atol=1e-3)
        for name in ("n", "flag", "when"):
            np.testing.assert_array_equal(store[name], raw[name])


def test_statistics_are_those_after_the_callback(tmp_path: Path) -> None:
    ds = cell_id_cube(SHAPE, "float64").assign(split=("time", np.array([1] * 6 + [0] * 2)))

    def shift(samples: dict[str, Any]) -> dict[str, Any]:
        mean = samples["a"].mean(axis=(1, 2))
        return {"moved": samples["a"] + 1000, "level": mean, "sign": samples["a"] > 100}

    train, _ = sampler(
        ds, tmp_path, callback=shift, sample_size={"lat": 3, "lon": 5}, scale_fn="standardize"
    ).get_datasets()
    assert list(train.data_vars) == ["moved", "level", "sign"]
    assert train.level.dims == ("samples",)
    assert train.moved.dims == ("samples", "lat", "lon")
    raw = ds.a.values[:6] + 1000
    stats = StoreMetadata.of(train).statistics
    assert list(stats) == ["moved", "level"]
    assert stats["moved"].mean == pytest.approx(raw.mean())
    assert float(train.moved.mean()) == pytest.approx(0, abs=1e-9)
    assert train.sign.dtype == bool


def test_what_a_callback_returns_is_stored_also_where_the_last_cells_make_no_sample(
    tmp_path: Path,
) -> None:
    ds = cell_id_cube({"time": 900}, "float64")  # of several tiles
    ds["split"] = ("time", np.repeat(np.array([1, 0, 255], "u1"), 300))

    def halved(samples: dict[str, Any]) -> dict[str, Any]:
        return {"half": (samples["a"] / 2).astype("f4")}

    for store in sampler(ds, tmp_path, callback=halved).get_datasets():
        assert {name: v.dtype for name, v in store.data_vars.items()} == {"half": np.float32}
        np.testing.assert_array_equal(store.half, store.time_index / 2)


def test_the_order_in_which_workers_end_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = split_cube()
    ds["a"] = ds.a.copy(data=np.random.default_rng(0).normal(size=ds.a.shape))
    options = {"val_cube": tmp_path / "v", "scale_fn": "standardize"}
    plan = sampler(ds, tmp_path, **options).plan()
    run = engine.Threads.run

    def backwards(*given: Any) -> Iterator[Any]:
        yield from reversed(list(run(*given)))

    monkeypatch.setattr(engine.Threads, "run", backwards)
    assert sampler(ds, tmp_path, **options).plan().statistics == plan.statistics


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "const"),
    [("mean", None), ("sample_mean", None), ("constant", -9.0), ("noise", None)],
)
def test_fill(tmp_path: Path, method: str, const: float | None) -> None:
    ds = cell_id_cube(SHAPE, "float64", gaps=0.2).assign(split=("time", [1] * 6 + [0] * 2))
    options = {"sample_size": {"lat": 3}, "drop_nan": None, "order": "grid"}
    plain, _ = sampler(ds, tmp_path / "plain", **options).get_datasets()
    filled, _ = sampler(
        ds, tmp_path / "filled", fill_method=method, const=const, **options
    ).get_datasets()
    gaps = np.isnan(plain.a.values)
    assert gaps.any()
    np.testing.assert_array_equal(filled.a.values[~gaps], plain.a.values[~gaps])
    raw = ds.a.values[:6]
    found = filled.a.values[gaps]
    if method == "constant":
        assert (found == const).all()
    elif method == "mean":
        np.testing.assert_allclose(found, np.nanmean(raw))
    elif method == "noise":
        assert found.min() >= np.nanmin(raw)
        assert found.max() <= np.nanmax(raw)
        assert len(np.unique(found)) > 10
    else:
        partial = gaps.any(axis=1) & ~gaps.all(axis=1)
        rows = plain.a.values[partial]
        right = np.broadcast_to(np.nanmean(rows, axis=1, keepdims=True), rows.shape)
        np.testing.assert_allclose(filled.a.values[partial][np.isnan(rows)], right[np.isnan(rows)])


def test_the_mean_that_fills_is_that_of_train_cells_inside_the_mask(tmp_path: Path) -> None:
    ds = cell_id_cube({"time": 4, "x": 4}, "float64").assign(split=("time", [1, 1, 1, 0]))
    ds["filter_mask"] = ("x", [True, True, True, False])
    ds.a[0, 1] = np.nan
    options = {"sample_size": {"x": 4}, "drop_sample": False, "drop_nan": None, "order": "grid"}
    train, _ = sampler(ds, tmp_path, fill_method="mean", **options).get_datasets()
    mean = np.nanmean(ds.a.values[:3, :3])
    assert train.a.values[0].tolist() == [0.0, mean, 2.0, mean]


def test_samples_with_a_missing_date_or_a_gap_that_the_mask_makes_are_dropped(
    tmp_path: Path,
) -> None:
    ds = cell_id_cube({"time": 4, "x": 6}, "float64").assign(split=("time", [1, 1, 1, 0]))
    options = {"sample_size": {"x": 3}, "drop_nan": "auto", "order": "grid"}
    seen = np.arange("2000-01-01", "2000-01-05", dtype="M8[D]").astype("M8[ns]")
    seen[1] = "NaT"
    dated, _ = sampler(ds.assign(seen=("time", seen)), tmp_path / "d", **options).get_datasets()
    assert dated.time_index.values.tolist() == [0, 0, 2, 2]
    assert dated.attrs["accounting"]["gap"] == 2
    ds["filter_mask"] = ("x", [True, True, True, True, False, True])
    options["drop_sample"] = False
    masked, _ = sampler(ds, tmp_path / "m", **options).get_datasets()
    assert masked.x_index.values.tolist() == [0, 0, 0]
    assert masked.attrs["accounting"]["gap"] == 4


def test_the_byte_order_of_a_cube_is_nothing_to_a_store(tmp_path: Path) -> None:
    """Also where some tiles have gaps to fill and others none."""
    ds = cell_id_cube({"time": 16, "x": 4}, "float32").assign(split=("time", [1] * 12 + [0] * 4))
    ds.a[5, 1] = np.nan
    options = {"sample_size": {"x": 4}, "drop_nan": None, "fill_method": "sample_mean"}
    trains = []
    for order in "<>":
        cube = ds.assign(a=ds.a.astype(f"{order}f4"))
        trains.append(sampler(cube, tmp_path / order, **options).get_datasets()[0].a.values)
    np.testing.assert_array_equal(*trains)


def test_origins_values_and_calendar(tmp_path: Path) -> None:
    ds = cell_id_cube(SHAPE, "float64", calendar="360_day").assign(
        split=("time", np.array([1] * 6 + [0] * 2))
    )
    train, _ = sampler(ds, tmp_path, sample_size={"lat": 2, "lon": 2}).get_datasets()
    assert set(train.coords) == {
        *("time", "time_index", "lat_origin", "lat_index", "lon_origin", "lon_index")
    }
    np.testing.assert_array_equal(train.time.values, ds.time.values[train.time_index.values])
    np.testing.assert_array_equal(train.lat_origin.values, ds.lat.values[train.lat_index.values])
    assert train.lat_origin.attrs["units"] == "degrees_north"
    xr.testing.assert_identical(
        open_axes(tmp_path / "train.zarr").load(),
        ds.coords.to_dataset().drop_encoding().drop_attrs(deep=False),
    )


@pytest.mark.parametrize("zarr_format", [2, 3])
def test_origins_are_the_values_however_the_file_packs_them(
    tmp_path: Path, zarr_format: Any
) -> None:
    ds = cell_id_cube({"time": 8, "lat": 6, "lon": 10}, "float64")
    hours = np.datetime64("2000-01-01T05:00", "ns") + np.arange(8) * np.timedelta64(7, "h")
    ds = ds.assign_coords(
        lat=np.linspace(60.25, 50.25, 6), lon=np.linspace(0.1, 9.1, 10).astype("f4"), time=hours
    )
    ds["lat"].encoding = {"dtype": "int16", "scale_factor": 0.25, "_FillValue": -32768}
    ds["time"].encoding = {"units": "days since 1999-12-31", "dtype": "float64"}
    ds.to_zarr(tmp_path / "cube.zarr", zarr_format=zarr_format, consolidated=False)
    cube = xr.open_zarr(tmp_path / "cube.zarr", consolidated=False)
    train, test = sampler(cube, tmp_path, block_size={"time": 2}).get_datasets()
    for store in (train, test):
        for dim in ("time", "lat", "lon"):
            wanted = cube[dim].values[store[f"{dim}_index"].values]
            np.testing.assert_array_equal(store[dim].values, wanted)
            assert store[dim].dtype.kind == cube[dim].dtype.kind
        assert store.lon.dtype == np.float32
    axes = open_axes(tmp_path / "train.zarr")
    for dim in ("time", "lat", "lon"):
        np.testing.assert_array_equal(axes[dim].values, cube[dim].values)
        assert axes[dim].dtype.kind == cube[dim].dtype.kind
    assert axes.lon.dtype == np.float32


ODD_AXES = {
    "bytes": (np.array([b"s\xc3\xbc0", b"s1", b"s2", b"s3"]), ["sü0", "s1", "s2", "s3"]),
    "categories": (pd.CategoricalIndex(list("bacd")), list("bacd")),
    "numbers as categories": (pd.CategoricalIndex([3, 1, 2, 9]), np.array([3, 1, 2, 9])),
    "integers of pandas": (pd.Index([3, 1, 2, 9], dtype="Int64"), np.array([3, 1, 2, 9])),
    "intervals": (pd.interval_range(0, 4), ["(0, 1]", "(1, 2]", "(2, 3]", "(3, 4]"]),
    "cut": (pd.CategoricalIndex(pd.interval_range(0, 4))[[0, 1, 1, 2]], None),
    "periods": (
        pd.period_range("2000-01", periods=4, freq="M"),
        ["2000-01", "2000-02", "2000-03", "2000-04"],
    ),
    "time zone": (
        pd.date_range("2000-01-01T01:00", periods=4, tz="Europe/Berlin"),
        np.arange("2000-01-01", "2000-01-05", dtype="M8[D]").astype("M8[ns]"),
    ),
    "long doubles": (np.arange(4).astype("longdouble") / 4, np.arange(4) / 4),
}


@pytest.mark.parametrize("kind", ODD_AXES)
def test_coordinates_of_odd_dtypes_are_stored_as_what_they_stand_for(
    tmp_path: Path, kind: str
) -> None:
    given, wanted = ODD_AXES[kind]
    wanted = [str(v) for v in given] if wanted is None else wanted
    ds = cell_id_cube({"time": 4, "x": 3}, "float64").assign(split=("time", [1, 0, 1, 1]))
    train, _ = sampler(ds.assign_coords(time=given), tmp_path, order="grid").get_datasets()
    np.testing.assert_array_equal(open_axes(tmp_path / "train.zarr").time.values, wanted)
    np.testing.assert_array_equal(train.time.values[::3], np.asarray(wanted)[[0, 2, 3]])


def test_a_coordinate_that_cannot_be_stored_is_named(tmp_path: Path) -> None:
    ds = split_cube()
    ds.time.attrs["units"] = "UTC"  # where the units of the encoded dates have to go
    with pytest.raises(TypeError, match=r"coordinate 'time' .*assign_coords") as caught:
        sampler(ds, tmp_path)
    assert isinstance(caught.value, CubeError)


@pytest.mark.parametrize(
    ("names", "dims", "shape"),
    [
        (None, ("samples", "lat", "lon"), (2, 3)),
        (("samples", "lon", "lat"), ("samples", "lon", "lat"), (3, 2)),
        (("n", "time", "lat", "lon"), ("n", "time", "lat", "lon"), (1, 2, 3)),
        (("n", "y", "x"), ("n", "y", "x"), (2, 3)),
    ],
)
def test_array_dims(tmp_path: Path, names: Any, dims: Any, shape: Any) -> None:
    train, _ = sampler(
        cell_id_cube(SHAPE, "float64"),
        tmp_path,
        sample_size={"lat": 2, "lon": 3},
        array_dims=names,
        block_size={"time": 2},
    ).get_datasets()
    assert train.a.dims == dims
    assert train.a.shape[1:] == shape


def test_chunk_size(tmp_path: Path) -> None:
    ds = split_cube()
    train, *_ = sampler(ds, tmp_path, val_cube=tmp_path / "v", chunk_size=(7,)).get_datasets()
    assert train.a.chunks[0][0] == 7


@pytest.mark.slow
@pytest.mark.parametrize("window", [{}, {"lat": 9, "lon": 9, "time": 5}])
def test_a_split_that_nobody_asked_for_is_of_few_large_blocks(
    tmp_path: Path, window: dict[str, int]
) -> None:
    """Chunks of one step each, as reanalyses have them, are no blocks."""
    pytest.importorskip("torch")
    from ml4cube.datasets.pytorch import PTXrDataset

    cube = cell_id_cube({"time": 60, "lat": 40, "lon": 90}, "float64", names=("a", "b"))
    given: dict[str, Any] = {"sample_size": window or None, "overlap": 0.2}
    labels = []
    for chunks in ({"time": 1}, {"lat": 20, "lon": 9}):
        ds = cube.chunk(chunks)
        for make in (
            lambda ds: sampler(ds, tmp_path, **given).cube.split,
            lambda ds: XrDataset(ds, to_pred="b", num_chunks=3, **given)._cube.split,
            lambda ds: PTXrDataset(ds, to_pred="b", data_split=0.8, **given).metadata.split,
        ):
            with pytest.warns(UserWarning, match="no block_size is given") as told:
                recipe = make(ds)
            assert [warning.filename for warning in told] == [__file__]
            labels.append(apply_split(cube, recipe)["split"].values)
    assert all((label == labels[0]).all() for label in labels[1:])
    assert oracle_splits.touching(labels[0], [False, False, True]) <= 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a size or a label was given: nothing to say
        sampler(cube, tmp_path, block_size={"time": 20}, **given)
        sampler(cube.assign(split=(cube.a.dims, labels[0])), tmp_path, **given)
        sampler(cube, tmp_path, data_split=1.0, **given)
    plan = sampler(cube, tmp_path, **given).plan()
    assert plan.accounting["straddle"] < 0.2 * plan.accounting["total"]


def test_too_few_blocks_for_data_fraq_are_warned_of(tmp_path: Path) -> None:
    ds = cell_id_cube({"time": 40, "lat": 6}, dask_chunks={"time": 40, "lat": 6})
    with pytest.warns(UserWarning, match=r"data_fraq=0\.1 uses 1 of 1 blocks; give smaller ones"):
        sampler(ds, tmp_path, data_fraq=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        sampler(ds, tmp_path, data_fraq=0.1, block_size={"time": 4})


@pytest.mark.parametrize("at_random", [False, True])
def test_data_fraq(tmp_path: Path, at_random: bool) -> None:
    ds = cell_id_cube({"time": 20, "x": 5}, "float64").assign(split=("time", [1, 0] * 10))
    numpy_numbers: Any = {"data_fraq": np.float32(0.3), "max_chunk_mb": np.int64(9)}
    made = sampler(
        ds,
        tmp_path,
        **numpy_numbers,
        chunk_batch=np.int64(3),
        rand_chunk=at_random,
        block_size={"time": 2},
        seed=3,
    )
    plan = made.plan()
    assert plan.accounting["unused"] == 70
    assert plan.samples == {"train": 15, "test": 15}
    train, _ = made.get_datasets()
    used = set((train.time_index.values // 2).tolist())
    assert (used == {0, 1, 2}) != at_random


def test_tiles_are_chunks_of_the_file_however_it_was_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers hold a tile in memory; the label of a large cube without dask has larger chunks."""
    cell_id_cube({"time": 40, "lat": 20}, "float64").chunk(time=10, lat=10).to_zarr(tmp_path / "z")
    monkeypatch.setattr(cube_of_splits, "_LABELS_IN_CHUNK", 400)
    for chunks in (None, {}):
        with xr.open_zarr(tmp_path / "z", chunks=chunks) as ds:
            made = sampler(assign_block_split(ds, {"time": 5}), tmp_path)
            assert made.cube.ds.split.chunks is not None
            assert made.cube.tiled.tiles.tile == (10, 10)


def test_chunks_of_a_file_whose_dims_were_renamed(tmp_path: Path) -> None:
    """xarray keeps the file's names in the encoding: the chunk along a new name is not known."""
    cube = cell_id_cube({"time": 40, "latitude": 40, "longitude": 40}, "float64")
    cube.chunk(latitude=10, longitude=10).to_zarr(tmp_path / "cube.zarr")
    with xr.open_zarr(tmp_path / "cube.zarr", chunks=None) as ds:
        ds = ds.rename(latitude="lat", longitude="lon")
        plan = sampler(ds, tmp_path, data_fraq=0.25, max_chunk_mb=0.04, seed=3).plan()
    assert sum(plan.samples.values()) == pytest.approx(0.25 * 40**3, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize("at_random", [False, True])
def test_every_part_is_in_the_blocks_that_are_used(tmp_path: Path, at_random: bool) -> None:
    ds = cell_id_cube({"time": 2000, "x": 2}, "float64", dask_chunks={"time": 5})
    made = sampler(ds, tmp_path, data_fraq=0.15, rand_chunk=at_random)
    samples = made.plan().samples
    assert sum(samples.values()) == 0.15 * 4000
    assert 0.6 <= samples["train"] / 600 <= 0.95


@pytest.mark.parametrize("change", ["taken off", "moved"])
def test_labels_are_those_of_the_cube_whatever_became_of_its_coordinates(
    tmp_path: Path, change: str
) -> None:
    ds = cell_id_cube({"time": 60, "x": 3}, "float64", dask_chunks={"time": 15})
    ds = assign_block_split(ds, {"time": 10}, split=0.5, buffer="3D")
    slower = ds.time[0] + 3 * (ds.time - ds.time[0])
    ds = ds.drop_vars("time") if change == "taken off" else ds.assign_coords(time=slower)
    for store, part in zip(sampler(ds, tmp_path).get_datasets(), (1, 0), strict=True):
        assert sorted(store.a.values.ravel()) == ds.a.values[ds.split.values == part].tolist()


def test_blocks_are_drawn_whatever_their_part(tmp_path: Path) -> None:
    """The split puts blocks in random order too: drawing in its order would give train first."""
    ds = cell_id_cube({"time": 400, "x": 2}, "float64")
    shares = []
    for seed in range(12):
        options = {"data_fraq": 0.5, "rand_chunk": True, "block_size": {"time": 4}, "seed": seed}
        samples = sampler(ds, tmp_path, **options).plan().samples
        assert sum(samples.values()) == 400
        shares.append(samples["train"] / 400)
    # 50 of 100 blocks, 80 of them train: four standard deviations of such a draw are 0.16
    assert 0.64 <= min(shares) < max(shares) <= 0.96
    assert np.mean(shares) == pytest.approx(0.8, abs=0.05)


@pytest.mark.parametrize(
    "options",
    [
        {"fill_method": "noise", "drop_nan": None},
        {"data_fraq": 0.5, "rand_chunk": True, "block_size": {"time": 2, "lat": 3, "lon": 5}},
    ],
    ids=["noise", "random blocks"],
)
def test_dim_order_and_chunks_change_no_sample(tmp_path: Path, options: dict[str, Any]) -> None:
    stores = []
    for dims, chunks in (("time lat lon", {"time": 2}), ("lon time lat", {"lat": 3, "lon": 7})):
        ds = split_cube(gaps=0.2, dim_order=dims.split(), dask_chunks=chunks)
        folder = tmp_path / dims
        store, *_ = sampler(ds, folder, val_cube=folder / "v", seed=5, **options).get_datasets()
        stores.append(np.sort(store.a.values))
    np.testing.assert_array_equal(*stores)


def test_names_of_dims_may_hold_spaces(tmp_path: Path) -> None:
    """CF parts the names of coordinates by spaces: `a x` must not make `a` one."""
    ds = cell_id_cube({"time": 8, "lat": 4}, "float64", names=("a", "b"))
    plain, spaced = (
        sampler(cube, tmp_path / name, block_size={"time": 2}).get_datasets()[0]
        for name, cube in (("plain", ds), ("spaced", ds.rename(lat="a x")))
    )
    assert list(spaced.data_vars) == ["a", "b"]
    assert set(spaced.coords) == {"time", "time_index", "a x", "a x_index"}
    for there, here in (("lat", "a x"), ("lat_index", "a x_index"), ("b", "b")):
        np.testing.assert_array_equal(spaced[here].values, plain[there].values)


def test_split_by_blocks_without_a_label(tmp_path: Path) -> None:
    ds = cell_id_cube({"time": 40, "x": 6}, "float64", dask_chunks={"time": 4})
    train, test = sampler(ds, tmp_path, sample_size={"time": 2}).get_datasets()
    assert (train.sizes["samples"], test.sizes["samples"]) == (96, 24)
    blocks = [set((s.time_index.values // 4).tolist()) for s in (train, test)]
    assert not blocks[0] & blocks[1]
    assert train.attrs["split"]["made_by"] == "assign_block_split"


def test_a_part_that_nobody_asked_for_is_an_empty_store(tmp_path: Path) -> None:
    ds = cell_id_cube({"time": 40, "x": 6}, "float64", calendar="360_day")
    train, test = sampler(ds, tmp_path, data_split=1.0).get_datasets()
    assert (train.sizes["samples"], test.sizes["samples"]) == (240, 0)
    verify_store(tmp_path / "test.zarr")


def bad(**options: Any) -> Any:
    return pytest.param(options, id="-".join(map(str, options.items()))[:60])


@pytest.mark.parametrize(
    "options",
    [
        bad(scale_fn="standardise"),
        bad(drop_nan="any"),
        bad(fill_method="median"),
        bad(const=1.0),
        bad(sample_size={"latitude": 3}),
        bad(sample_size={"lat": 2}, overlap={"lat": 1.0}),
        bad(block_size=[("tme", 2)]),
        bad(filter_var="land"),
        bad(drop_nan="masked"),
        bad(to_pred="b"),
        bad(nproc=0),
        bad(nproc="4"),
        bad(nproc=True),
        bad(seed=1.5),
        bad(order="random"),
        bad(data_fraq=0),
        bad(data_fraq=2.0),
        bad(chunk_batch=0),
        bad(chunk_batch=1.5),
        bad(max_chunk_mb=-1),
        bad(max_chunk_mb="1"),
        bad(chunk_size=0),
        bad(array_dims=("lat", "samples")),
        bad(callback="no function"),
        bad(apply_mask="yes"),
        bad(test_cube="gopher://bucket/test.zarr"),
        bad(client=3),
        bad(val_split=0.1),
        bad(data_split=1.4),
        bad(data_split="most"),
        *(bad(**{flag: "no"}) for flag in ("overwrite", "resume", "progress", "rand_chunk")),
    ],
)
def test_bad_arguments_are_refused_before_any_work(tmp_path: Path, options: Any) -> None:
    ds = cell_id_cube(SHAPE, "float64").assign(split=("time", [1] * 6 + [0] * 2))
    with pytest.raises((ValueError, TypeError)) as caught:
        sampler(ds, tmp_path, **options)
    assert isinstance(caught.value, CubeError)
    assert next(reversed(options)) in str(caught.value)
    assert not list(tmp_path.iterdir())


STORES_OWN = ["lat_index", "lat_origin", "samples", "manifest", "axes"]


@pytest.mark.parametrize(
    ("name", "made_by"),
    [
        *((name, "cube") for name in STORES_OWN),
        *((name, "callback") for name in (*STORES_OWN, "time", "lat")),
    ],
)
def test_names_that_a_store_uses_itself(tmp_path: Path, name: str, made_by: str) -> None:
    ds, options = split_cube(), {"sample_size": {"lat": 2}, "val_cube": tmp_path / "v"}
    if made_by == "callback":
        options["callback"] = lambda samples: {**samples, name: samples["a"] + 1}
    else:
        ds[name] = ds["a"] + 1
    with pytest.raises(ValueError, match=re.escape(f"variable {name!r} of the samples")):
        sampler(ds, tmp_path, **options).run()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("units", ["days since 2000-01-01", "days since the last rain"])
def test_numbers_with_units_of_dates_stay_numbers(tmp_path: Path, units: str) -> None:
    """As in a cube that was opened without decoding; a store is opened with."""
    ds = cell_id_cube({"time": 8, "x": 4}, "int32", names=("a", "b"))
    ds["b"] = ds.b.astype("float32")
    cube = ds.assign_coords(x=[3, 1, 2, 9])
    for name in ("a", "b", "x"):
        cube[name].attrs = {"units": units, "calendar": "standard", "long_name": name}
    train, _ = sampler(cube, tmp_path, block_size={"time": 2}).get_datasets()
    plain = xr.open_zarr(tmp_path / "train.zarr")
    for store in (train, plain):
        assert {n: store[n].dtype for n in "abx"} == {n: cube[n].dtype for n in "abx"}
        assert store.a.attrs["long_name"] == "a"
    assert open_axes(tmp_path / "train.zarr").x.values.tolist() == [3, 1, 2, 9]
    told = train.attrs["provenance"]
    assert told["variables"]["a"]["attrs"]["units"] == units
    assert told["coordinates"]["x"]["attrs"]["units"] == units


@pytest.mark.parametrize(
    ("returned", "told"),
    [
        (None, "must return a dict.* and returned a NoneType"),
        ([1], "must return a dict.* and returned a list"),
        ({}, "returned no variable"),
        ({"a": np.timedelta64(1, "D")}, "timedelta64"),
        ({"a": 1j}, "complex128"),
        ({"a": np.longdouble(1)}, r"up to 8 bytes.*\{'a': 'float128'\}"),
        ({"a": np.datetime64(1, "ps")}, r"up to nanoseconds.*\{'a': 'datetime64\[ps\]'\}"),
    ],
    ids=str,
)
def test_what_a_callback_may_not_return(tmp_path: Path, returned: Any, told: str) -> None:
    def callback(samples: dict[str, Any]) -> Any:
        if not returned or isinstance(returned, list):
            return returned
        return {"a": np.full(len(samples["a"]), returned["a"])}

    with pytest.raises(RunError, match=told):
        of_three_parts(tmp_path, callback=callback).run()
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["M", "D", "25s", ">s", "ns"])
def test_a_callback_may_return_dates_of_any_unit(tmp_path: Path, dtype: str) -> None:
    day = np.datetime64("1999-12-30").astype(f"M8[{dtype.strip('>')}]")
    kind = day.dtype.newbyteorder(">") if ">" in dtype else day.dtype

    def callback(samples: dict[str, Any]) -> dict[str, Any]:
        return {**samples, "day": np.full(len(samples["a"]), day).astype(kind)}

    made = of_three_parts(tmp_path, callback=callback)
    for store in made.get_datasets():
        assert (store.day.values == day).all()


def test_no_train_samples_to_scale_by(tmp_path: Path) -> None:
    cube = split_cube().drop_vars("split")
    options = {"data_split": 0.0, "block_size": {"time": 4}, "scale_fn": "standardize"}
    with pytest.raises(EmptyPartError, match=r"train part would hold no sample.*data_split"):
        sampler(cube, tmp_path, **options).run()
    assert not list(tmp_path.iterdir())


def test_the_plan_tells_what_is_dropped_and_left_out_and_writes_nothing(tmp_path: Path) -> None:
    ds = split_cube(gaps=0.1)
    ds["other"] = (("time", "lat2"), np.zeros((8, 2)))
    ds["lat_bnds"] = ds["a"] * 2
    plan = sampler(ds, tmp_path, val_cube=tmp_path / "v").plan()
    assert not list(tmp_path.iterdir())
    assert plan.accounting["total"] == 720
    told = ["train samples", "dropped: gap", "left out: 'lat_bnds' is bounds of cells"]
    told += ["left out: 'other' has dims ('time', 'lat2') outside the cube's"]
    assert [words for words in told if words not in str(plan)] == []


def test_a_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    sampler = MultiProcSampler(
        cell_id_cube({"time": 4}, "float32"), train_cube="~/train.zarr", test_cube="~/test.zarr"
    )
    assert sampler.targets["train"] == tmp_path / "train.zarr"


@pytest.mark.parametrize("what", ["all gaps", "all masked", "val without a path", "one block"])
def test_hopeless_cubes_leave_nothing_behind(tmp_path: Path, what: str) -> None:
    ds = split_cube(gaps=1.0 if what == "all gaps" else 0.0)
    if what == "all masked":
        ds["filter_mask"] = ("lat", np.zeros(9, bool))
    options: dict[str, Any] = {"val_cube": tmp_path / "val.zarr"}
    if what == "val without a path":
        options = {}
    if what == "one block":
        ds = ds.drop_vars("split")
        options = {"block_size": dict(ds.sizes)}
    with pytest.raises(ValueError, match=r"val_cube|no sample|block"):
        sampler(ds, tmp_path, **options).run()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("error", [SystemExit(0), ZeroDivisionError("by design")])
def test_a_callback_that_raises_is_named(tmp_path: Path, nproc: int, error: Any) -> None:
    def fail(samples: dict[str, Any]) -> None:
        raise error

    said = rf"callback failed on .* tile \d+ \(cells time \d+:\d+.*{type(error).__name__}: {error}"
    with pytest.raises(RunError, match=said):
        sampler(points(), tmp_path, nproc=nproc, callback=fail).run()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("value", [np.nan, 1.0])
def test_a_cube_that_changes_while_it_is_sampled_is_refused(tmp_path: Path, value: float) -> None:
    ds = xr.Dataset({"a": ("time", [0.0, 1, 2, np.nan]), "split": ("time", [1, 0, 1, 1])})
    ds.to_zarr(tmp_path / "cube.zarr", consolidated=False)

    def spoil(samples: dict[str, Any]) -> dict[str, Any]:
        zarr.open_group(tmp_path / "cube.zarr")["a"][:] = value
        return samples

    with pytest.raises(RunError, match="the cube has changed since"):
        sampler(tmp_path / "cube.zarr", tmp_path / "out", callback=spoil).run()
    assert not list((tmp_path / "out").glob("*.zarr"))


def test_a_cube_that_other_processes_cannot_get_is_told(tmp_path: Path) -> None:
    split_cube().to_netcdf(tmp_path / "a.nc", engine="netcdf4")
    options: dict[str, Any] = {"val_cube": tmp_path / "v"}
    with netCDF4.Dataset(tmp_path / "a.nc") as file:
        source = xr.open_dataset(xr.backends.NetCDF4DataStore(file))
        with pytest.raises(InvalidTypeError, match=r"sent to other processes.*open the cube by"):
            sampler(source, tmp_path / "out", nproc=2, **options).run()
        assert not list((tmp_path / "out").iterdir())
        assert sampler(source, tmp_path / "out", **options).run() is not None


def die(*_: Any) -> None:
    """Stop as Ctrl-C does."""
    raise KeyboardInterrupt


def stop_before_publishing(made: MultiProcSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(Draft, "publish", die)
        with pytest.raises(KeyboardInterrupt):
            made.run()


class TestTargets:
    """What may stand at the paths, and what becomes of it."""

    def test_the_same_call_opens_what_is_there_and_says_so(self, tmp_path: Path) -> None:
        made = of_three_parts(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert made.run() is not None
            made.get_datasets()  # to open what was written is no surprise
        before = tree(tmp_path)
        stamps = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
        for again in (made, of_three_parts(tmp_path)):
            with pytest.warns(UserWarning, match=r"nothing was written: .*train.zarr.* overwrite="):
                assert again.run() is None
        assert tree(tmp_path) == before
        assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")} == stamps

    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("options", "change", "said"),
        [
            ({"seed": 7}, None, r"spec: seed was 42 and is 7\. Choose"),
            ({"drop_nan": None}, None, r"spec: drop_nan was 'auto' and is None\. Choose"),
            (
                {"sample_size": {"lon": 2}, "order": "grid"},
                None,
                r"settings: order was 'shuffled' and is 'grid'; spec: sample_size was "
                r"\[1, 1, 1\] and is \[1, 1, 2\], array_dims was .* and is .*",
            ),
            (
                {"callback": lambda samples: samples},
                None,
                r".*; callback: code, values or version\. Choose",
            ),
            (
                {},
                lambda ds: ds.assign(a=ds.a.copy(data=ds.a + 1)),
                r"source: cells of 'a' \(a file opened lazily",
            ),
            (
                {},
                lambda ds: ds.assign(b=ds.a * 2),
                r"spec: variables was \['a'\] and is \['a', 'b'\]; source: cells of 'b', descr",
            ),
            ({}, lambda ds: ds.assign_coords(lat=range(9)), r"source: coordinate 'lat', attr"),
            (
                {},
                lambda ds: assign_block_split(ds, {"time": 4, "lat": 3}, 0.6, val=0.2, seed=1),
                r"split: blocks, seed was 42 and is 1\. Choose",
            ),
            ({}, lambda ds: ds.assign(split=(ds.split + 1) % 3), r"derived: labels\. Choose"),
        ],
    )
    def test_another_call_is_refused_and_what_differs_is_named(
        self,
        tmp_path: Path,
        options: dict[str, Any],
        change: Callable[[xr.Dataset], xr.Dataset] | None,
        said: str,
    ) -> None:
        of_three_parts(tmp_path).run()
        before = tree(tmp_path)
        other = split_cube() if change is None else change(split_cube())
        with pytest.raises(FileExistsError, match="another call or from another cube: " + said):
            sampler(other, tmp_path, val_cube=tmp_path / "v", **options).run()
        assert tree(tmp_path) == before

    def test_other_versions_are_named(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        of_three_parts(tmp_path).run()
        monkeypatch.setattr(provenance, "version", lambda name: "0.1")
        with pytest.raises(FileExistsError, match=r"cube: versions: numpy was '.*' and is '0.1', "):
            of_three_parts(tmp_path).run()

    @pytest.mark.parametrize("overwrite", [False, True])
    @pytest.mark.parametrize("foreign", ["file", "folder", "zarr"])
    def test_foreign_things_stay(self, tmp_path: Path, foreign: str, overwrite: bool) -> None:
        target = tmp_path / "train.zarr"
        if foreign == "file":
            target.write_text("mine")
        elif foreign == "folder":
            target.mkdir()
            (target / "notes.txt").write_text("mine")
        else:
            xr.Dataset({"a": ("x", [1])}).to_zarr(target, consolidated=False)
        before = tree(tmp_path)
        with pytest.raises(FileExistsError, match=r"move it away"):
            of_three_parts(tmp_path, overwrite=overwrite).run()
        assert tree(tmp_path) == before

    def test_foreign_files_inside_a_store_of_ours_stay(self, tmp_path: Path) -> None:
        of_three_parts(tmp_path).run()
        (tmp_path / "train.zarr/a/best_model.pt").write_text("mine")
        before = tree(tmp_path)
        with pytest.raises(FileExistsError, match=r"1 files .* such as 'a/best_model.pt'"):
            of_three_parts(tmp_path, overwrite=True, seed=3).run()
        assert tree(tmp_path) == before

    def test_a_store_whose_values_were_changed_stays(self, tmp_path: Path) -> None:
        of_three_parts(tmp_path).run()
        array: Any = zarr.open_array(tmp_path / "train.zarr", path="a", mode="r+")
        array[0] = -1
        before = tree(tmp_path)
        with pytest.raises(FileExistsError, match=r"changed since, such as 'a/c/0.*by hand"):
            of_three_parts(tmp_path, overwrite=True, seed=3).run()
        assert tree(tmp_path) == before

    @pytest.mark.parametrize(
        ("train", "test"),
        [
            ("o", "./o"),
            ("o", "o/test.zarr"),
            ("o/train.zarr", "o"),
            ("o.partial/train.zarr", "o"),
            ("o", "o.partial"),
            ("o", "o.partial/store"),
            ("o.partial", "o.partial.partial"),
            ("real/a", "link/a"),
            ("real/a", "link/a/b"),
        ],
    )
    def test_one_place_twice_or_inside_another_is_refused(
        self, tmp_path: Path, train: str, test: str
    ) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        places = {"train_cube": f"{tmp_path}/{train}", "test_cube": f"{tmp_path}/{test}"}
        with pytest.raises(ValueError, match=r"also the target of another|are inside one another"):
            sampler(points(), tmp_path, **places)
        sampler(points(), tmp_path, train_cube=tmp_path / "o", test_cube=tmp_path / "o2")

    @pytest.mark.slow
    @pytest.mark.parametrize("overwrite", [True, False])
    def test_a_link_stays_and_the_store_lies_where_it_leads(
        self, tmp_path: Path, overwrite: bool
    ) -> None:
        (tmp_path / "disk").mkdir()
        (tmp_path / "train.zarr").symlink_to(tmp_path / "disk/train.zarr")
        if overwrite:
            of_three_parts(tmp_path).run()
        options = {"val_cube": tmp_path / "v", "seed": 3, "overwrite": overwrite}
        sampler(split_cube(), tmp_path, **options).run()
        assert (tmp_path / "train.zarr").is_symlink()
        assert [p.name for p in (tmp_path / "disk").iterdir()] == ["train.zarr"]
        train = open_store(tmp_path / "train.zarr", verify=True)
        assert train.attrs["spec"]["seed"] == 3
        with pytest.raises(ValueError, match="also the target of another part"):
            sampler(split_cube(), tmp_path, test_cube=tmp_path / "disk/train.zarr")

    def test_a_damaged_store_is_refused(self, tmp_path: Path) -> None:
        of_three_parts(tmp_path).run()
        (tmp_path / "train.zarr/a/c/0").unlink()
        with pytest.raises(FileExistsError, match="missing"):
            of_three_parts(tmp_path).run()
        of_three_parts(tmp_path, overwrite=True).run()
        verify_store(tmp_path / "train.zarr")

    def test_a_store_of_another_call_goes_with_its_draft(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        target = tmp_path / "train.zarr"
        with Draft(target, "one", SAMPLES) as left:
            left.begin()
            left.store_folder.write("a/c/0", b"one")
            left.record(0, {})
        with Draft(target, "two", SAMPLES) as draft:
            draft.begin()
            assert "train.zarr.partial was left by another call" in caplog.text
            folders = {p for p in draft.work_folder.root.rglob("*") if p.is_dir()}
            assert folders == {draft.store_folder.root, draft.journal.root}
            with pytest.raises(FileNotFoundError):
                left.store_folder.write("a/c/0", b"late")

    @pytest.mark.parametrize("when", ["held", "counted"])
    def test_a_store_that_appears_during_a_run_stays(
        self, tmp_path: Path, monkeypatch: Any, when: str
    ) -> None:
        sampler(points(), tmp_path / "other", seed=7).run()
        right = tree(tmp_path / "other/train.zarr")
        called = tmp_path / "called"

        def appear() -> None:
            if not (tmp_path / "train.zarr").exists():
                shutil.copytree(tmp_path / "other/train.zarr", tmp_path / "train.zarr")

        def work(samples: dict[str, Any]) -> dict[str, Any]:
            called.touch()
            if when == "counted":
                appear()
            return samples

        def hold(*args: Any) -> Any:
            if when == "held":
                appear()
            return Draft(*args)

        monkeypatch.setattr(multiproc_sampler, "Draft", hold)
        with pytest.raises(StoreExistsError, match=r"train\.zarr (exists|did not exist when)"):
            sampler(points(), tmp_path, callback=work).run()
        assert called.exists() == (when == "counted")
        assert tree(tmp_path / "train.zarr") == right

    def test_a_run_that_may_not_start_leaves_drafts_as_they_are(self, tmp_path: Path) -> None:
        with Draft(tmp_path / "train.zarr", "another", SAMPLES) as left:
            left.begin()
            left.record(0, left.store_folder.list())
        before = tree(tmp_path)
        with (
            Draft(tmp_path / "test.zarr", "another", SAMPLES),
            pytest.raises(RunError, match=r"another run is writing .*test\.zarr"),
        ):
            sampler(points(), tmp_path).run()
        assert tree(tmp_path) == before

    def test_a_process_forked_meanwhile_does_not_keep_the_lock(self, tmp_path: Path) -> None:
        with Draft(tmp_path / "train.zarr", "call", SAMPLES) as held:
            assert isinstance(held.lock, LocalLock)
            fd = held.lock._file.fileno()
            child = subprocess.Popen(["sleep", "60"], pass_fds=[fd])
        Draft(tmp_path / "train.zarr", "call", SAMPLES).close()
        child.kill()
        child.wait()

    def test_a_lock_that_was_removed_and_made_anew_meanwhile_is_that_of_another_run(
        self, tmp_path: Path, monkeypatch: Any
    ) -> None:
        target, lock = tmp_path / "train.zarr", fcntl.flock
        others: list[Draft] = []

        def late(*args: Any) -> None:
            monkeypatch.setattr(fcntl, "flock", lock)
            Draft(target, "one", SAMPLES).close()
            others.append(Draft(target, "two", SAMPLES))
            lock(*args)

        monkeypatch.setattr(fcntl, "flock", late)
        with pytest.raises(RunError, match=r"another run is writing .*train\.zarr"):
            Draft(target, "call", SAMPLES)
        others[0].close()
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize(
        "step",
        [
            "draft.Draft._remove_ours",
            "local.LocalLock._remove",
            "local.LocalFolder._is_half_replaced",
        ],
    )
    def test_an_interrupt_leaves_nothing_locked_in_this_process(
        self, tmp_path: Path, monkeypatch: Any, step: str
    ) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(f"ml4cube.ledger.{step}", die)
            with pytest.raises(KeyboardInterrupt) as kept:  # with all objects of its frames
                Draft(tmp_path / "train.zarr", "call", SAMPLES).discard()
        Draft(tmp_path / "train.zarr", "call", SAMPLES).close()
        assert kept.tb is not None

    @pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
    def test_a_disk_without_locks_is_named_and_nothing_left_there(
        self, tmp_path: Path, monkeypatch: Any, number: int
    ) -> None:
        def refuse(*_: Any) -> None:
            raise OSError(number, os.strerror(number))

        with Draft(tmp_path / "left.zarr", "call", SAMPLES) as left:
            left.begin()
            left.record(0, {})
        there = tree(left.journal.root)
        monkeypatch.setattr("fcntl.flock", refuse)
        with pytest.raises(StoreError, match=r"cannot lock .*lock: .*choose a path"):
            sampler(points(), tmp_path).run()
        with pytest.raises(StoreError, match="cannot lock"):
            Draft(tmp_path / "left.zarr", "call", SAMPLES)
        assert tree(left.journal.root) == there
        assert [path.name for path in tmp_path.iterdir()] == ["left.zarr.partial"]

    def test_what_the_journal_has_and_the_disk_has_not_is_made_again(
        self, tmp_path: Path, monkeypatch: Any
    ) -> None:
        """As after a power cut on a disk that does not keep its promises."""

        of_three_parts(tmp_path / "calm").run()
        stop_before_publishing(of_three_parts(tmp_path), monkeypatch)
        (root,) = (tmp_path / "train.zarr.partial").glob("ml4cube-store-*")
        cut, gone, *_ = sorted(path for path in (root / "a/c").rglob("*") if path.is_file())
        cut.write_bytes(cut.read_bytes()[:-1])
        gone.unlink()
        done = of_three_parts(tmp_path).run()
        assert 0 < done.resumed < done.shards
        assert "samples/s" not in str(done)
        assert tree(tmp_path / "train.zarr") == tree(tmp_path / "calm/train.zarr")

    def test_a_place_that_cannot_be_written_leaves_no_work_folder_of_the_others(
        self, tmp_path: Path
    ) -> None:
        with pytest.raises(StoreError, match="cannot be written"):
            sampler(split_cube(), tmp_path, val_cube="/dev/null/v").run()
        assert not list(tmp_path.iterdir())


class Killed(BaseException):
    """Stands for a signal: nothing on disk changes any more, whatever is cleaned up meanwhile."""


def kill_when_publishing(patch: pytest.MonkeyPatch, steps: int) -> None:
    """Let that many changes of folders happen from the first publishing on, and none after.

    A folder that is removed with all that is in it counts as one.
    """
    publish, left = Draft.publish, None

    def begin(self: Draft, overwrite: bool) -> None:
        nonlocal left
        left = steps if left is None else left
        publish(self, overwrite)

    def watched(change: Any) -> Any:
        def step(*args: Any, **options: Any) -> Any:
            nonlocal left
            if left is not None and options.get("dir_fd") is None:
                left -= 1
                if left < 0:
                    raise Killed
            return change(*args, **options)

        return step

    patch.setattr(Draft, "publish", begin)
    for name in ("rename", "replace", "unlink", "rmdir", "mkdir"):
        patch.setattr(os, name, watched(getattr(os, name)))


def killed_at_every_step(folder: Path, run: Any) -> Iterator[Path]:
    """Folders in which a run was killed while it published, one step later each time."""
    for steps in itertools.count():
        here = folder / str(steps)
        with pytest.MonkeyPatch.context() as patch:
            kill_when_publishing(patch, steps)
            try:
                run(here)
            except Killed:
                pass
            else:
                assert steps >= 10
                return
        yield here


def points() -> xr.Dataset:
    return cell_id_cube({"time": 4}, "float64").assign(split=("time", [1, 0, 1, 1]))


@pytest.mark.slow
def test_killed_at_any_step_of_the_end(tmp_path: Path) -> None:
    for folder in killed_at_every_step(tmp_path, lambda here: sampler(points(), here).run()):
        sampler(points(), folder).run()
        assert {p.name for p in folder.iterdir()} == {"train.zarr", "test.zarr"}
        for store in folder.iterdir():
            verify_store(store)


@pytest.mark.slow
def test_killed_at_any_step_of_replacing_stores(tmp_path: Path) -> None:
    old, new = points(), points() + 1
    new["split"] = old.split
    sampler(old, tmp_path / "old").run()
    sampler(new, tmp_path / "new").run()
    right = {name: tree(tmp_path / name / "train.zarr") for name in ("old", "new")}

    def replace(folder: Path) -> None:
        shutil.copytree(tmp_path / "old", folder)
        sampler(new, folder, overwrite=True).run()

    for folder in killed_at_every_step(tmp_path / "out", replace):
        try:
            sampler(old, folder).run()
            now = "old"
        except StoreExistsError:
            now = "new"
        # one of both stands again, before anything is sampled
        assert tree(folder / "train.zarr") == right[now]
        sampler(new, folder, overwrite=True).run()
        assert {p.name for p in folder.iterdir()} == {"train.zarr", "test.zarr"}
        assert tree(folder / "train.zarr") == right["new"]


def test_a_store_that_was_replaced_does_not_come_back(tmp_path: Path, monkeypatch: Any) -> None:
    sampler(points(), tmp_path).run()
    new = points() + 1
    new["split"] = points().split
    for step in ("local.sync_path", "draft.Draft.publish"):  # once replaced, and before that
        with monkeypatch.context() as patch:
            patch.setattr(f"ml4cube.ledger.{step}", die)
            with pytest.raises(KeyboardInterrupt):
                sampler(new, tmp_path, overwrite=True).run()
        shutil.rmtree(tmp_path / "train.zarr", ignore_errors=True)
    with pytest.raises(StoreExistsError, match=r"test\.zarr"):
        sampler(new, tmp_path).run()
    assert not (tmp_path / "train.zarr").exists()


def test_a_call_that_cannot_be_planned_leaves_the_draft_of_another(
    tmp_path: Path, monkeypatch: Any
) -> None:
    stop_before_publishing(sampler(points(), tmp_path), monkeypatch)
    with pytest.raises(RunError, match="KeyError: 'b'"):
        sampler(points(), tmp_path, callback=lambda samples: {"a": samples["b"]}).run()
    done = sampler(points(), tmp_path).run()
    assert done is not None
    assert done.resumed > 0


@pytest.mark.slow
@pytest.mark.parametrize(("part", "nproc"), [("train", 1), ("test", 2), ("val", 1)])
def test_a_part_whose_disk_is_full_is_the_one_that_is_named(
    tmp_path: Path, monkeypatch: Any, part: str, nproc: int
) -> None:
    monkeypatch.setattr(tiling, "_SHARD_BYTES", (2000, 2000))
    options = {"sample_size": {"lat": 2}, "nproc": nproc}
    calm, places = paths(tmp_path / "calm", val=True), paths(tmp_path / "full", val=True)
    MultiProcSampler(split_cube(), **calm, **options).run()
    sync = os.fsync

    def full(handle: int) -> None:
        if f"{part}.zarr" in (path := os.readlink(f"/proc/self/fd/{handle}")) and "/c/" in path:
            raise OSError(28, "No space left on device")
        sync(handle)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StoreError, match=rf"full/{part}\.zarr cannot be written: .*No space"):
            MultiProcSampler(split_cube(), **places, **options).run()
    assert not list((tmp_path / "full").glob("*.zarr"))
    done = MultiProcSampler(split_cube(), **places, **options).run()
    assert done is not None
    # beside train, the other process may have written a shard of the next part
    assert (done.resumed > 0) == (part != "train") or (part, nproc) == ("train", 2)
    assert tree(tmp_path / "full") == tree(tmp_path / "calm")


def test_what_the_journal_says_is_on_disk(tmp_path: Path, monkeypatch: Any) -> None:
    synced: set[str] = set()
    told: list[str] = []
    sync = os.fsync

    def watched(handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        if "/ml4cube-journal-" in path:
            (root,) = Path(path).parents[1].glob("ml4cube-store-*")
            names = [str(root / name) for name in json.loads(Path(path).read_text())]
            assert synced.issuperset(names)
            told.extend(names)
        sync(handle)
        synced.add(path)

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(tiling, "_SHARD_BYTES", (2000, 2000))
    sampler(split_cube(), tmp_path, sample_size={"lat": 2}, val_cube=tmp_path / "val.zarr").run()
    shards = {name for name in told if "/c/" in name}
    assert len(shards) > 30


def test_what_is_made_of_a_mask_is_named_where_it_is_left_out(tmp_path: Path) -> None:
    ds = assign_mask(points(), points().a > 0, "land")
    ds["sea"] = ~ds.land
    made = sampler(ds, tmp_path, filter_var="land")
    assert made.cube.recipe.variables == ("a",)
    assert made.cube.left_out == {"sea": "is a mask by its ml4cube_role"}


def test_a_mask_has_no_say_in_the_order_of_dims(tmp_path: Path) -> None:
    cube = cell_id_cube({"time": 4, "lat": 6, "lon": 6}, "float64")
    mask = xr.ones_like(cube["a"], dtype=bool).transpose("time", "lon", "lat")
    options: dict[str, Any] = {"sample_size": {"lat": 3, "lon": 2}, "block_size": {"time": 1}}
    made = []
    for variables in (["land", "a"], ["a", "land"]):
        ds = xr.Dataset({"land": mask, "a": cube["a"]})[variables]
        made_by = sampler(ds, tmp_path / variables[0], filter_var="land", **options)
        made.append(made_by.get_datasets()[0]["a"].load())
    assert made[0].size
    xr.testing.assert_identical(*made)


def test_a_mask_with_other_dims_than_the_cube_is_refused(tmp_path: Path) -> None:
    ds = points().assign(land=lambda ds: (ds.a >= 0).expand_dims(depth=3))
    with pytest.raises(ValueError, match=r"filter_var='land' must .*\.isel\(depth=0\)"):
        sampler(ds, tmp_path, filter_var="land").plan()


def test_attributes_are_written_alike_in_every_run(tmp_path: Path) -> None:
    ds = points()
    ds["a"].attrs = {"sources": {"b", "a", "c"}, "since": np.datetime64("2000-01-01", "ns")}
    train, _ = sampler(ds, tmp_path).get_datasets()
    attrs = train.attrs["provenance"]["variables"]["a"]["attrs"]
    assert attrs == {"sources": ["a", "b", "c"], "since": "2000-01-01T00:00:00.000000000"}


def test_summary(tmp_path: Path) -> None:
    ds = cell_id_cube({"time": 24, "lat": 8}, "float64").assign(split=("time", [1] * 16 + [0] * 8))
    summary = sampler(ds, tmp_path).run()
    assert summary is not None
    assert summary.plan.samples == {"train": 16 * 8, "test": 8 * 8}
    for place, size in summary.nbytes.items():
        chunks = Path(place).rglob("c/**/*")
        on_disk = [p for p in chunks if p.is_file() and "axes" not in p.parts]
        assert size == sum(p.stat().st_size for p in on_disk)
    written = [p for part in summary.nbytes for p in (Path(part) / "a" / "c").rglob("*")]
    assert (summary.resumed, summary.shards) == (0, len([p for p in written if p.is_file()]))
    assert f" {summary.shards} shards, " in str(summary)
    assert "samples/s" in str(summary)
    assert sampler(ds, tmp_path).run() is None
    before = tree(tmp_path)
    shutil.rmtree(tmp_path / "test.zarr")
    rest = sampler(ds, tmp_path).run()
    assert rest is not None
    assert tree(tmp_path) == before
    assert list(rest.nbytes) == [str(tmp_path / "test.zarr")]
    assert "samples/s" not in str(rest)  # most were there before


def test_progress_with_rate_and_time_left(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    sampler(split_cube(), tmp_path / "a", val_cube=tmp_path / "a/v", progress=True).run()
    shown = capsys.readouterr().err
    for work, unit in (("counting", "tiles"), ("writing", "shards")):
        # done of all, time since and time left, rate
        assert re.search(rf"{work}.*100%.*\[\d\d:\d\d<\d\d:\d\d, .*{unit}/s\]", shown), shown
    sampler(split_cube(), tmp_path / "b", val_cube=tmp_path / "b/v", progress=False).run()
    assert capsys.readouterr().err == ""


def test_nothing_of_a_lazy_cube_is_read_by_the_constructor(tmp_path: Path) -> None:
    ds = split_cube(dask_chunks={"time": 2})
    with dask.config.set(scheduler=lambda *_, **__: pytest.fail("computed")):
        sampler(ds, tmp_path, val_cube=tmp_path / "v")


@pytest.mark.parametrize("label", ["recipe", "by hand", "stored"])
def test_a_validation_store_for_a_label_without_that_part_is_refused(
    tmp_path: Path, label: str
) -> None:
    ds = cell_id_cube(SHAPE, "float64", dask_chunks={"time": 2})
    ds = assign_block_split(ds, {"time": 4, "lat": 3, "lon": 5}, split=0.6)
    if label == "by hand":
        ds["split"] = ("time", [1, 0] * 4)
    if label == "stored":  # the constructor, which reads no cell, cannot know
        ds.to_zarr(tmp_path / "cube.zarr", consolidated=False)
        ds = xr.open_zarr(tmp_path / "cube.zarr", consolidated=False)
        with pytest.raises(EmptyPartError, match="the val part would hold no sample"):
            sampler(ds, tmp_path, val_cube=tmp_path / "v").run()
    else:
        with pytest.raises(EmptyPartError, match=r"val_cube='.*/v' .* 'split' .* no validation"):
            sampler(ds, tmp_path, val_cube=tmp_path / "v")
    # one cell is enough, whatever a recipe says
    codes = xr.where(ds.a == 719, 2, ds.split).astype("u1")
    ds["split"] = codes.transpose(*ds.a.dims).assign_attrs(ds.split.attrs)
    assert sampler(ds, tmp_path, val_cube=tmp_path / "v").plan().samples["val"] == 1


def test_a_validation_store_without_a_label_gets_half_of_what_train_leaves(tmp_path):
    cube = cell_id_cube({"time": 40, "x": 4}, dtype="float64")
    made = sampler(cube, tmp_path, val_cube=tmp_path / "val.zarr", block_size={"time": 2})
    train, test, val = made.get_datasets()
    assert [s.sizes["samples"] for s in (train, test, val)] == [128, 16, 16]
