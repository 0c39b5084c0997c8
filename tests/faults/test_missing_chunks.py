"""Chunks that a zarr source lacks: one rule in every stage that reads a cube."""

from __future__ import annotations

import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.core.errors import InvalidValueError, StoreError
from ml4cube.cube.absent_chunks import AbsentCells, heed_absent_chunks
from ml4cube.cube.chunks import presence
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.datasets.xr_dataset import XrDataset
from ml4cube.evaluation import evaluate, score_cube
from ml4cube.gap_filling import fill_gaps
from ml4cube.insights import get_insights
from ml4cube.prediction import predict_cube
from ml4cube.preprocessing import CubeScaler, Statistics, get_range, get_statistics
from ml4cube.splits import assign_time_split, create_split, estimate_range, leakage_report
from ml4cube.store.format import open_store
from tests.samplestores import paths

SHAPE = {"time": 24, "lat": 8}
CHUNK = {"time": 4, "lat": 8}
LOST = slice(4, 8)  # steps of the chunk that is lost
SELDOM = "ignore:no block_size is given"


def values(dtype: str = "int16") -> np.ndarray[Any, Any]:
    return np.arange(11, 11 + 24 * 8).reshape(24, 8).astype(dtype)


def whole_cube(dtype: str = "int16") -> xr.Dataset:
    dims = ("time", "lat")
    return xr.Dataset(
        {"a": (dims, values(dtype)), "b": (dims, values("float32") / 7)},
        {"time": xr.date_range("2000-01-01", periods=24), "lat": np.linspace(-70, 70, 8)},
    )


def lossy(
    folder: Path, dtype: str = "int16", encoding: dict[str, Any] | None = None, version: int = 3
) -> Path:
    """Write a cube, and lose the second chunk of `a`."""
    path = folder / "cube.zarr"
    whole_cube(dtype).to_zarr(
        path,
        encoding={
            "a": {"chunks": tuple(CHUNK.values()), **(encoding or {})},
            "b": {"chunks": tuple(CHUNK.values())},
        },
        zarr_format=version,  # type: ignore[arg-type]
        consolidated=False,
    )
    lose(path, version)
    return path


def lose(path: Path, version: int = 3) -> None:
    (path / "a" / ("c/1/0" if version == 3 else "1.0")).unlink()


def opened(path: Path, **how: Any) -> xr.Dataset:
    return xr.open_zarr(path, consolidated=False, **how)


def told(call: Callable[[], Any]) -> list[str]:
    """Return the warnings of a call about missing chunks."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    texts = [str(one.message) for one in caught if "missing_chunks" in str(one.message)]
    # of one line of the user, Python shows equal warnings once
    return list(dict.fromkeys(texts))


def identity(x: Any) -> Any:
    return x


def labelled(path: Path) -> xr.Dataset:
    return assign_time_split(opened(path), 0.7)


Stage = Callable[[Path, Path], Callable[..., Any]]
STAGES: dict[str, Callable[..., Any]] = {
    "get_statistics": lambda path, out, **how: get_statistics(opened(path), **how),
    "get_range": lambda path, out, **how: get_range(opened(path, chunks=None), **how),
    "per month": lambda path, out, **how: get_statistics(opened(path), by="month", **how),
    "sampler": lambda path, out, **how: MultiProcSampler(
        path, **paths(out), nproc=1, data_split=0.5, block_size={"time": 2}, **how
    ).plan(),
    "PTXrDataset": lambda path, out, **how: PTXrDataset(path, "b", sample_size={"lat": 2}, **how),
    "lead time": lambda path, out, **how: PTXrDataset(
        path, "b", sample_size={"time": 1}, target_offset={"time": 1}, **how
    ),
    "XrDataset": lambda path, out, **how: XrDataset(path, sample_size={"lat": 2}, **how),
    "predict_cube": lambda path, out, **how: predict_cube(identity, path, progress=False, **how),
    "score_cube": lambda path, out, **how: score_cube(opened(path)[["a"]], whole_cube(), **how),
    "evaluate": lambda path, out, **how: evaluate(whole_cube(), path, progress=False, **how),
    "evaluate a model": lambda path, out, **how: evaluate(identity, path, progress=False, **how),
    "get_insights": lambda path, out, **how: get_insights(path, **how),
    "estimate_range": lambda path, out, **how: estimate_range(opened(path), "a", **how),
    "leakage_report": lambda path, out, **how: leakage_report(labelled(path), **how),
    "create_split": lambda path, out, **how: create_split(labelled(path), "b", **how),
}


@pytest.mark.filterwarnings(SELDOM)
@pytest.mark.parametrize("stage", STAGES)
def test_every_stage_warns_of_a_lost_chunk_of_integers_or_refuses_it(
    tmp_path: Path, stage: str
) -> None:
    path = lossy(tmp_path)
    found = told(lambda: STAGES[stage](path, tmp_path))
    assert len(found) == 1
    assert found[0].startswith(
        "variable 'a': 1 chunk is missing from the source ('c/1/0', time 4:8, lat 0:8) and reads "
        "as 0. This is right if its writer leaves out chunks that hold only this value, as zarr "
        "does, and wrong if files were lost; missing_chunks='raise' refuses them"
    )
    with pytest.raises(StoreError, match=r"'a': 1 chunk is missing .*; repair the source, or"):
        STAGES[stage](path, tmp_path, missing_chunks="raise")
    with pytest.raises(InvalidValueError, match=r"missing_chunks must be .warn.*got .ignore"):
        STAGES[stage](path, tmp_path, missing_chunks="ignore")


@pytest.mark.filterwarnings(SELDOM)
@pytest.mark.parametrize("stage", STAGES)
def test_no_stage_warns_of_a_whole_cube_or_of_gaps(tmp_path: Path, stage: str) -> None:
    # of floats of zarr v2, absent chunks read as NaN
    path = lossy(tmp_path, "float32", {"_FillValue": np.nan}, version=2)
    assert told(lambda: STAGES[stage](path, tmp_path)) == []


def test_filling_gaps_of_packed_floats(tmp_path: Path) -> None:
    packed = {"dtype": "int16", "scale_factor": 0.5, "add_offset": 100.0}
    path = lossy(tmp_path, "float64", packed)
    assert "and reads as 100.0" in told(lambda: fill_gaps(path, ["a"]))[0]
    with pytest.raises(StoreError, match=r"reads as 100\.0; repair"):
        fill_gaps(path, ["a"], missing_chunks="raise")
    filled = fill_gaps(path, ["a"], missing_chunks="drop").cube
    np.testing.assert_allclose(filled["a"], values("float64"))  # which is linear in time
    assert (filled["a_filled"][LOST] == 1).all()
    assert int(filled["a_filled"].sum()) == 4 * 8


def test_a_scaler_warns(tmp_path: Path) -> None:
    assert len(told(lambda: CubeScaler().fit(opened(lossy(tmp_path))))) == 1


def gappy() -> xr.Dataset:
    """The cube with gaps where the chunk is lost, as "drop" reads it."""
    cube = whole_cube("float64")
    cube["a"][LOST] = np.nan
    return cube


@pytest.mark.parametrize("chunks", [None, {}], ids=["no dask", "dask"])
def test_dropped_chunks_are_gaps_for_statistics(tmp_path: Path, chunks: Any) -> None:
    cube, expected = opened(lossy(tmp_path), chunks=chunks), Statistics.from_cube(gappy())
    found = Statistics.from_cube(cube, missing_chunks="drop")
    assert found["a"].gaps == 4 * 8
    assert found["a"].mean == pytest.approx(expected["a"].mean)
    assert get_range(cube, missing_chunks="drop") == get_range(gappy())


def test_dropped_chunks_are_gaps_of_a_prediction(tmp_path: Path) -> None:
    path = lossy(tmp_path)
    found = predict_cube(identity, path, missing_chunks="drop", progress=False)
    np.testing.assert_allclose(found["a"], gappy()["a"])
    np.testing.assert_allclose(found["b"], gappy()["b"])
    with pytest.warns(UserWarning, match="reads as 0"):
        zero = predict_cube(identity, path, progress=False)
    assert (zero["a"][LOST] == 0).all()


def test_dropped_chunks_are_not_scored(tmp_path: Path) -> None:
    path, one_off = lossy(tmp_path), whole_cube() + 1
    scores = score_cube(one_off, opened(path), missing_chunks="drop").sel(variable="a")
    assert (scores["mae"], scores["count"]) == (1, 24 * 8 - 32)
    card = evaluate(one_off, path, missing_chunks="drop", progress=False)
    assert card.scores.mae.sel(variable="a", model="prediction").item() == pytest.approx(1)


def test_rows_of_dropped_chunks_are_left_out(tmp_path: Path) -> None:
    cube = labelled(lossy(tmp_path))
    found = create_split(cube, "b", missing_chunks="drop")
    expected = create_split(gappy().assign(split=cube["split"]), "b")
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.filterwarnings(SELDOM)
@pytest.mark.parametrize("drop_nan", ["auto", "if_all_nan", None])
@pytest.mark.parametrize("size", [1, 3])
def test_samples_that_touch_a_dropped_chunk_of_integers(
    tmp_path: Path, drop_nan: str | None, size: int
) -> None:
    """They are counted as gaps, and integers stay integers."""
    path, window = lossy(tmp_path), {"time": size, "lat": 2}
    options: dict[str, Any] = {"nproc": 1, "sample_size": window, "drop_nan": drop_nan}
    options |= {"overlap": {"time": 0.7}, "scale_fn": None, "data_split": 0.5}

    def sampled(cube: Any, folder: Path, **more: Any) -> tuple[set[tuple[int, int]], int]:
        """Return the first cells of all samples, and the number of windows that are gaps."""
        made = MultiProcSampler(cube, **paths(folder), **options, **more)
        accounting = made.plan().accounting
        assert sum(accounting.values()) == 2 * accounting["total"]
        made.run()
        stores = [open_store(folder / f"{part}.zarr") for part in ("train", "test")]
        for store in stores:
            assert store["a"].dtype == np.int16
            assert (store["a"] > 0).all()
        origins = [
            zip(
                store["time_index"].values.tolist(), store["lat_index"].values.tolist(), strict=True
            )
            for store in stores
        ]
        return set().union(*origins), accounting["gap"]

    whole, no_gaps = sampled(whole_cube().chunk(CHUNK), tmp_path / "whole")
    kept, gaps = sampled(path, tmp_path / "lossy", missing_chunks="drop")
    touching = {(t, lat) for t, lat in whole if t < LOST.stop and t + size > LOST.start}
    assert (kept, gaps) == (whole - touching, len(touching))
    assert no_gaps == 0 < len(touching)
    cut = PTXrDataset(path, "b", sample_size=window, drop_nan=drop_nan, missing_chunks="drop")
    everything = PTXrDataset(whole_cube(), "b", sample_size=window, drop_nan=drop_nan)
    assert len(cut) == sum(
        t >= LOST.stop or t + size <= LOST.start
        for t in everything.coords(range(len(everything)))["time_index"]
    )


@pytest.mark.filterwarnings(SELDOM)
def test_targets_at_a_lead_time_in_a_dropped_chunk(tmp_path: Path) -> None:
    options: dict[str, Any] = {"sample_size": {"time": 1, "lat": 8}, "target_offset": {"time": 1}}
    data = PTXrDataset(lossy(tmp_path), "a", ["b"], missing_chunks="drop", **options)
    steps = sorted(int(step) for step in data.coords(range(len(data)))["time_index"])
    assert steps == [t for t in range(23) if not 3 <= t < 8]  # neither X nor y


def test_booleans_cannot_be_dropped(tmp_path: Path) -> None:
    path = lossy(tmp_path, "bool")
    with pytest.raises(InvalidValueError, match="'a' of dtype bool cannot hold; convert it"):
        get_statistics(opened(path), missing_chunks="drop")


def test_insights_have_no_drop(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match="missing_chunks must be 'warn' or 'raise', got"):
        get_insights(lossy(tmp_path), missing_chunks="drop")


def test_a_mask_that_reads_as_false_is_counted_and_true_is_told(tmp_path: Path) -> None:
    for fill in (False, True):
        path = tmp_path / f"{fill}.zarr"
        whole_cube().assign(filter_mask=(("time", "lat"), values() > 11)).to_zarr(
            path,
            encoding={"filter_mask": {"chunks": (4, 8), "fill_value": fill}},
            consolidated=False,
        )
        shutil.rmtree(path / "filter_mask/c/1", ignore_errors=True)
        found = told(
            lambda path=path: MultiProcSampler(  # type: ignore[misc]
                path, **paths(tmp_path), nproc=1, block_size={"time": 2}, data_split=0.5
            ).plan()
        )
        assert len(found) == int(fill)


@pytest.mark.parametrize("shards", [None, (8, 8)])
def test_shards_and_chunks_are_found_by_their_files(tmp_path: Path, shards: Any) -> None:
    path = lossy(tmp_path, encoding={"shards": shards} if shards else {})
    if shards:
        # an empty file is a shard without chunks for zarr
        (path / "a/c/2/0").write_bytes(b"")
    found = heed_absent_chunks(opened(path), ["a"], "drop").absent["a"]
    assert (found.number, found.first) == ((2 if shards else 1), "c/1/0")
    assert found.cells == ("time 8:16, lat 0:8" if shards else "time 4:8, lat 0:8")


BOXES: dict[str, Any] = {
    "steps before": (slice(0, 4), None),
    "a step in it": (5, "lat 0:8"),
    "steps that cut it": (slice(6, 24), "time 0:2, lat 0:8"),
    "steps around it": (slice(1, 9), "time 3:7, lat 0:8"),
}


@pytest.mark.parametrize("case", BOXES)
@pytest.mark.parametrize("dtype", ["int16", "packed"])
def test_a_selection_has_the_chunks_that_it_touches(tmp_path: Path, case: str, dtype: str) -> None:
    packed = {"dtype": "int16", "scale_factor": 2.0}
    path = lossy(tmp_path, *(("int16",) if dtype == "int16" else ("float32", packed)))
    steps, cells = BOXES[case]
    cube = opened(path, chunks=None).isel(time=steps)
    found = heed_absent_chunks(cube, ["a"], "drop")
    assert (found.absent["a"].cells if found.absent else None) == cells
    expected = np.full((24, 8), False)
    expected[LOST] = True
    np.testing.assert_array_equal(np.isnan(found.cube["a"].astype(float)), expected[steps])


def test_what_cannot_be_known_is_refused_by_raise_alone(tmp_path: Path) -> None:
    path = lossy(tmp_path)
    for cube in (
        xr.where(opened(path).isel(time=slice(0, 4)) > 0, 1, 0),
        opened(path, chunks=None).isel(time=slice(None, None, 2)),
    ):
        assert told(lambda cube=cube: get_statistics(cube)) == []  # type: ignore[misc]
        for how in ("raise", "drop"):
            with pytest.raises(
                InvalidValueError, match=rf"'{how}' is not possible for \['a', 'b'\]"
            ):
                get_statistics(cube, missing_chunks=how)


DASK: dict[str, Callable[[xr.Dataset], xr.Dataset]] = {
    "a range": lambda ds: ds.isel(time=slice(6, 20)),
    "labels": lambda ds: ds.sel(time=slice("2000-01-08", "2000-01-12")),
    "arithmetic": lambda ds: ds + 1,
    "a range in other chunks": lambda ds: ds.isel(time=slice(3, 9)).chunk({"time": 2}),
    "concatenated": lambda ds: xr.concat([ds.isel(time=slice(0, 5)), ds.isel(time=[20])], "time"),
    "one row": lambda ds: ds.isel(lat=3),
}


@pytest.mark.parametrize("case", DASK)
def test_what_dask_computes_from_a_lost_chunk_is_told(tmp_path: Path, case: str) -> None:
    found = told(lambda: get_statistics(DASK[case](opened(lossy(tmp_path)))))
    assert len(found) == 1
    assert "'a': 1 chunk is missing from the source ('c/1/0', " in found[0]
    with pytest.raises(StoreError, match="'a': 1 chunk is missing"):
        get_statistics(DASK[case](opened(tmp_path / "cube.zarr")), missing_chunks="raise")


def test_what_dask_selects_beside_a_lost_chunk_is_not_told(tmp_path: Path) -> None:
    cube = opened(lossy(tmp_path))
    for part in (cube.isel(time=slice(8, 24)), cube.isel(time=[0, 1, 20]), cube.isel(time=2)):
        assert told(lambda part=part: get_statistics(part)) == []  # type: ignore[misc]


class CountingMemory(zarr.storage.MemoryStore):
    """A store that counts how often objects and listings are asked for."""

    # of all stores, because xarray opens a copy
    gets: ClassVar[list[str]] = []
    lists: ClassVar[list[str]] = []

    async def get(self, key: str, *args: Any, **kwargs: Any) -> Any:
        self.gets.append(key)
        return await super().get(key, *args, **kwargs)

    async def exists(self, key: str) -> bool:
        self.gets.append(key)
        return await super().exists(key)

    async def list_prefix(self, prefix: str) -> Any:
        self.lists.append(prefix)
        async for key in super().list_prefix(prefix):
            yield key


def test_a_store_that_is_no_folder_is_listed_once_for_each_variable() -> None:
    store = CountingMemory()
    cube = whole_cube().drop_vars("b")
    cube.to_zarr(store, encoding={"a": {"chunks": (4, 8)}}, consolidated=False)
    store._store_dict.pop("a/c/1/0")
    opened_cube = xr.open_zarr(store, consolidated=False, chunks=None)
    store.gets.clear()
    store.lists.clear()
    assert len(told(lambda: get_statistics(opened_cube))) == 1
    assert store.lists == ["a/"]
    # the six chunks, and one cell of the absent chunk, to know its value
    assert sorted(key for key in store.gets if "/c/" in key) == sorted(
        [*(f"a/c/{i}/0" for i in range(6)), "a/c/1/0"]
    )


def test_a_store_that_cannot_be_listed_is_not_suspected(tmp_path: Path) -> None:
    class Unlisted(CountingMemory):
        async def list_prefix(self, prefix: str) -> Any:
            if prefix:
                raise PermissionError("AccessDenied")
            async for key in super().list_prefix(prefix):
                yield key

    class Empty(CountingMemory):
        async def list_prefix(self, prefix: str) -> Any:
            if not prefix:
                async for key in super().list_prefix(prefix):
                    yield key

    for kind in (Unlisted, Empty):
        store = kind()
        whole_cube().to_zarr(store, consolidated=False)
        cube = xr.open_zarr(store, consolidated=False, chunks=None)
        assert told(lambda cube=cube: get_statistics(cube)) == []  # type: ignore[misc]
        with pytest.raises(InvalidValueError, match="is not possible"):
            get_statistics(cube, missing_chunks="raise")


@pytest.mark.parametrize("few", [True, False])
def test_a_store_behind_a_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: bool) -> None:
    """A few keys are asked for, since a listing also has the million others of an archive."""
    listed = []
    list_prefix = zarr.storage.FsspecStore.list_prefix

    def counted(store: Any, prefix: str) -> Any:
        listed.append(prefix)
        return list_prefix(store, prefix)

    monkeypatch.setattr(zarr.storage.FsspecStore, "list_prefix", counted)
    monkeypatch.setattr(presence, "_FEW_KEYS", 100 if few else 0)
    url = f"memory://{tmp_path.name}/cube.zarr"
    whole_cube().to_zarr(url, encoding={"a": {"chunks": (4, 8)}}, consolidated=False)
    fs = fsspec.filesystem("memory")
    fs.rm(f"/{tmp_path.name}/cube.zarr/a/c/1/0")
    listed.clear()
    assert "('c/1/0', time 4:8, lat 0:8)" in told(lambda: get_insights(url))[0]
    assert bool(listed) == (not few)
    fs.rm(f"/{tmp_path.name}", recursive=True)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_flags_of_cells_equal_those_of_a_loop(data: Any) -> None:
    """Variables with some of the cube's dims, in any order, and chunks cut by a selection."""
    from ml4cube.cube.chunks.presence import ChunkPresence

    sizes = {"t": data.draw(st.integers(1, 7)), "y": data.draw(st.integers(1, 5)), "x": 3}
    dims, parts, expected = list(sizes), {}, np.zeros(tuple(sizes.values()), bool)
    cube = xr.Dataset()
    for name in ("a", "b"):
        own = data.draw(st.permutations(dims))[: data.draw(st.integers(1, 3))]
        chunks = tuple(data.draw(st.integers(1, 4)) for _ in own)
        before = tuple(data.draw(st.integers(0, n - 1)) for n in chunks)
        counts = [-(-(sizes[d] + b) // n) for d, b, n in zip(own, before, chunks, strict=True)]
        present = np.array(
            data.draw(st.lists(st.booleans(), min_size=(n := int(np.prod(counts))), max_size=n))
        )
        parts[name] = ChunkPresence(present.reshape(counts), chunks, before, None)
        cube[name] = tuple(own), np.zeros([sizes[d] for d in own])
        for cell in np.ndindex(*sizes.values()):
            at = dict(zip(dims, cell, strict=True))
            index = tuple((at[d] + b) // n for d, b, n in zip(own, before, chunks, strict=True))
            expected[cell] |= not parts[name].is_present[index]
    found = AbsentCells.of(cube, dims, parts)(*(np.arange(n) for n in sizes.values()))
    np.testing.assert_array_equal(found, expected)


DAMAGED: dict[str, Callable[[Path], Any]] = {
    "statistics": lambda path: get_statistics(opened(path)),
    "statistics without dask": lambda path: get_statistics(opened(path, chunks=None)),
    "score_cube": lambda path: score_cube(opened(path), whole_cube()),
    "evaluate": lambda path: evaluate(whole_cube(), path, progress=False),
    "get_insights": lambda path: get_insights(path),
    "predict_cube": lambda path: predict_cube(identity, path, progress=False),
    "XrDataset": lambda path: XrDataset(path),
    "fill_gaps": lambda path: fill_gaps(opened(path), ["b"]).cube.load(),
}


@pytest.mark.parametrize("stage", DAMAGED)
def test_a_chunk_that_cannot_be_read_is_an_error_that_names_variable_and_cells(
    tmp_path: Path, stage: str
) -> None:
    path = tmp_path / "cube.zarr"
    whole_cube().to_zarr(
        path,
        encoding={name: {"chunks": (4, 8)} for name in ("a", "b")},
        consolidated=False,
    )
    (path / "b/c/1/0").write_bytes(b"damaged")
    with pytest.raises(StoreError, match=r"'b' cannot be read at .*lat 0:8") as error:
        DAMAGED[stage](path)
    assert re.search(r"time \d+:\d+", str(error.value))


def test_the_model_is_not_called_before_chunks_are_refused(tmp_path: Path) -> None:
    calls: list[torch.Tensor] = []
    with pytest.raises(StoreError):
        predict_cube(calls.append, lossy(tmp_path), missing_chunks="raise", progress=False)
    assert not calls
