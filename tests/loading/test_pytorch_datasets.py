"""PTXrDataset and its loaders: right items, nothing lost or twice, exact resume, clear errors."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import pickle
import subprocess
import sys
import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from torch.utils.data import DataLoader, TensorDataset

from ml4cube.core.errors import (
    CubeError,
    InvalidTypeError,
    InvalidValueError,
    RunError,
    StoreError,
)
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader, prepare_dataloader
from ml4cube.ledger.manifest import MANIFEST
from ml4cube.loading import epochs
from ml4cube.sampling import shards as shard_writer
from ml4cube.sampling import tiling
from ml4cube.splits import assign_block_split
from ml4cube.store.format import open_store
from tests.cubes import cell_id_cube
from tests.interruption import interrupt_shutdowns
from tests.samplestores import numbered, numbers, sampled, write_store

N = 203
# 203 samples of 24 bytes in chunks of 10 are 4.9 kB: three chunks fit into this, 21 do not
SMALL_MB = 0.002


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("stores") / "train.zarr", N, ("a", "b"))


@pytest.fixture(scope="module")
def points(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stores") / "points.zarr"
    return write_store(root, N, ("a", "b"), window={})


@pytest.fixture
def samples(store: Path) -> PTXrDataset:
    return PTXrDataset(store, features="a")


@pytest.fixture(params=["path", "tensors"])
def data(request: pytest.FixtureRequest, samples: PTXrDataset) -> Any:
    """Numbered samples, for each of the two kinds of loaders."""
    if request.param == "tensors":
        return TensorDataset(torch.from_numpy(numbered(N)))
    return samples


TOO_SMALL = [
    "Caught RuntimeError in DataLoader worker process 0.\nRuntimeError: unable to allocate shared "
    "memory(shm) for file </torch_1>: Success (0)",
    "DataLoader worker (pid 9) is killed by signal: Bus error. It is possible that dataloader's "
    "workers are out of shared memory.",
]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no shared memory in a folder")
@pytest.mark.parametrize("said", TOO_SMALL)
def test_shared_memory_that_is_too_small_is_named(monkeypatch: Any, said: str) -> None:
    def failing(self: Any) -> Any:
        yield torch.zeros(8)
        raise RuntimeError(said)

    monkeypatch.setattr(DataLoader, "__iter__", failing)
    loader = prep_dataloader(TensorDataset(torch.zeros(64)), batch_size=8, num_workers=2)
    with pytest.raises(RunError, match=r"^/dev/shm \(\d+ MB\) is too small .*num_workers=2 .*=0$"):
        list(loader)


def test_other_errors_of_workers_stay(monkeypatch: Any) -> None:
    def failing(self: Any) -> Any:
        raise RuntimeError("mine")
        yield

    monkeypatch.setattr(DataLoader, "__iter__", failing)
    with pytest.raises(RuntimeError, match=r"^mine$"):
        list(prep_dataloader(TensorDataset(torch.zeros(64)), num_workers=2))


def epoch(loader: Any) -> list[list[int]]:
    return [numbers(batch) for batch in loader]


def flat(batches: list[list[int]]) -> list[int]:
    return [k for batch in batches for k in batch]


FORMS = ["path", "str", "group", "dataset", "numpy", "dask", "url"]


def in_form(path: Path, form: str) -> Any:
    by_hand = xr.Dataset(
        {
            name: (("samples", "lat", "lon"), numbered(N, 1000 * k))
            for k, name in enumerate(["a", "b"])
        }
    )
    return {
        "path": path,
        "str": str(path),
        "url": f"file://{path}",
        "group": zarr.open_group(path, mode="r"),
        "dataset": open_store(path),
        "numpy": by_hand,
        "dask": by_hand.chunk(samples=17),
    }[form]


@pytest.mark.parametrize(
    ("form", "buffer_mb"),
    [(form, mb) for form in FORMS for mb in (64, SMALL_MB) if (form, mb) != ("numpy", SMALL_MB)],
)
def test_every_form_of_samples_gives_the_same_items(
    store: Path, form: str, buffer_mb: float
) -> None:
    data = PTXrDataset(in_form(store, form), to_pred="b")
    assert len(data) == N
    x, y = data[7]
    assert x.dtype == y.dtype == torch.float32
    assert x.shape == y.shape == (1, 2, 3)
    np.testing.assert_array_equal(x[0], numbered(N)[7])
    np.testing.assert_array_equal(y[0], numbered(N, 1000)[7])
    train, test = prep_dataloader(data, data, batch_size=16, buffer_mb=buffer_mb)
    seen = epoch(train)
    assert [len(batch) for batch in seen] == [16] * (N // 16)
    assert len(set(flat(seen))) == N // 16 * 16
    assert flat(epoch(test)) == list(range(N))
    for x, y in train:
        np.testing.assert_array_equal(x.numpy(), numbered(N)[numbers(x)][:, None])
        np.testing.assert_array_equal(y.numpy(), x.numpy() + 1000)


def test_items_are_pairs_or_features_or_dicts(store: Path) -> None:
    pair, named = PTXrDataset(store, to_pred="b"), PTXrDataset(store)
    alone, both = (PTXrDataset(store, features=names) for names in (["b"], ["b", "a"]))
    assert [type(item) for item in (pair[0], alone[0], named[0])] == [tuple, torch.Tensor, dict]
    assert numbers(alone.take([3])) == [1003]
    assert both[0].shape == (2, 2, 3)
    assert both[0][:, 0, 0].tolist() == [1000, 0]
    assert list(named[5]) == ["a", "b"]
    assert named[5]["a"].shape == (2, 3)
    assert (pair.features, pair.targets) == (("a",), ("b",))
    batch = next(iter(prep_dataloader(named, batch_size=4)))
    assert {name: tuple(v.shape) for name, v in batch.items()} == dict.fromkeys("ab", (4, 2, 3))


def test_points_have_channels_only(points: Path) -> None:
    x, y = PTXrDataset(points, to_pred="b")[3]
    assert (x.tolist(), y.tolist()) == ([3.0], [1003.0])
    x, y = PTXrDataset(points, to_pred="b").take([3, 4])
    assert x.shape == (2, 1)
    assert PTXrDataset(points)[3]["a"].shape == ()


def test_types_are_as_asked(store: Path, points: Path) -> None:
    data = PTXrDataset(points, to_pred="b", dtype="float64", target_dtype="int64")
    x, y = data[9]
    assert (x.dtype, y.dtype) == (torch.float64, torch.int64)
    assert PTXrDataset(store, features="b", dtype=torch.float16)[9].dtype == torch.float16
    (x, y) = next(iter(prep_dataloader(data, batch_size=4)))
    assert (x.dtype, y.dtype) == (torch.float64, torch.int64)


def test_negative_and_impossible_indices(samples: PTXrDataset) -> None:
    assert numbers(samples.take([-1, 0, -N])) == [N - 1, 0, 0]
    for index in (N, -N - 1):
        with pytest.raises(IndexError, match=str(N)):
            samples[index]
    mask = np.arange(N) % 100 == 3
    assert numbers(samples.take(mask)) == [3, 103]
    assert samples.coords(mask)["lat_index"].tolist() == [6, 206]
    assert numbers(samples.take(torch.tensor([4, 5]))) == [4, 5]
    assert numbers(samples[torch.tensor(4)][None]) == [4]
    assert len(samples.take([])) == 0
    wrong: list[Any] = [1.7, [1.0, 2.0], mask[:5], slice(2, 5), True, "1", None]
    for index in wrong:
        with pytest.raises(InvalidTypeError, match="whole number"):
            samples.coords(index)


def test_samples_know_where_they_come_from(samples: PTXrDataset) -> None:
    assert samples.coords(4) == {"lat_index": 8, "lon_index": 12}
    assert samples.coords([4, 5])["lon_index"].tolist() == [12, 15]
    assert samples.metadata.part == "train"
    assert samples.statistics["a"].count == N * 6


def test_inputs_are_not_changed_and_several_threads_may_read(store: Path) -> None:
    ds = open_store(store)
    before = ds.copy(deep=True)
    data = PTXrDataset(ds, features="a", cache_mb=0.0005)
    with ThreadPoolExecutor(8) as pool:
        rows = list(pool.map(lambda k: numbers(data.take([k, (k * 37) % N])), range(N)))
    assert rows == [[k, (k * 37) % N] for k in range(N)]
    xr.testing.assert_identical(ds, before)


def test_each_chunk_is_decoded_once(samples: PTXrDataset, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    real = type(samples._source).read

    def counting(self: Any, chunk: int, out: Any) -> None:
        reads.append(chunk)
        real(self, chunk, out)

    monkeypatch.setattr(type(samples._source), "read", counting)
    chunks = len(samples._source.counts)
    loader = prep_dataloader(samples, batch_size=16)  # all fits: read once for all epochs
    for _ in range(3):
        list(loader)
    assert sorted(reads) == list(range(chunks))
    reads.clear()
    samples.__getitems__(range(N))
    samples.__getitems__(range(N))
    assert sorted(reads) == list(range(chunks))


@pytest.mark.parametrize("buffer_mb", [64, SMALL_MB])
def test_epochs_differ_and_are_a_function_of_seed_and_epoch(data: Any, buffer_mb: float) -> None:
    options = {"batch_size": 16, "buffer_mb": buffer_mb}
    loader = prep_dataloader(data, **options)
    first, second = epoch(loader), epoch(loader)
    assert first != second
    assert set(range(N)) - set(flat(first)) != set(range(N)) - set(flat(second))
    again = prep_dataloader(data, num_workers=3 * isinstance(data, PTXrDataset), **options)
    again.set_epoch(np.int64(1))
    assert epoch(again) == second
    again.set_epoch(0)
    assert epoch(again) == first
    assert epoch(prep_dataloader(data, seed=1, **options)) != first
    in_order = prep_dataloader(data, shuffle=False, **options)
    assert flat(epoch(in_order)) == list(range(N // 16 * 16))
    kept = prep_dataloader(data, drop_last=False, **options)
    assert sorted(flat(epoch(kept))) == list(range(N))
    assert len(kept) == len(epoch(kept)) == N // 16 + 1
    assert kept.num_samples == N


@pytest.mark.parametrize("buffer_mb", [64, SMALL_MB])
@pytest.mark.parametrize("stops", [[0], [1], [5], [12], [3, 2]])
def test_an_epoch_goes_on_where_it_was_left(data: Any, buffer_mb: float, stops: list[int]) -> None:
    def fresh() -> Any:
        # numbers of numpy, as they come from a table of settings
        return prep_dataloader(data, batch_size=np.int64(16), seed=np.uint8(3), buffer_mb=buffer_mb)

    whole = fresh()
    expected = [epoch(whole), epoch(whole), epoch(whole)]
    loader, seen = fresh(), []
    epoch(loader)
    for stop in stops:
        seen += epoch(itertools.islice(loader, stop))
        state = json.loads(json.dumps(loader.state_dict()))
        loader = fresh()
        loader.load_state_dict(state)
        loader.set_epoch(1)  # a trainer names the epoch it goes on with
    assert seen + epoch(loader) == expected[1]
    assert epoch(loader) == expected[2]


def test_foreign_state_is_refused(samples: PTXrDataset) -> None:
    loader = prep_dataloader(samples, batch_size=16)
    for other in (
        prep_dataloader(samples, batch_size=16, seed=3),
        prep_dataloader(samples, batch_size=16, buffer_mb=SMALL_MB),
        prep_dataloader(TensorDataset(torch.zeros(5)), batch_size=2),
    ):
        with pytest.raises(InvalidValueError, match="same data and order"):
            loader.load_state_dict(other.state_dict())


def test_a_pass_over_test_samples_goes_on_only_on_its_rank(
    data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def on(rank: int, world: int) -> Any:
        ranks = {"rank": rank, "world": world}
        monkeypatch.setattr(epochs, "_rank_and_world", lambda parallel: ranks)
        return prep_dataloader(test_ds=data, batch_size=8, parallel=True)

    first = on(1, 2)
    seen = epoch(itertools.islice(first, 2))
    inside = first.state_dict()
    again = on(1, 2)
    again.load_state_dict(inside)
    assert flat(seen + epoch(again)) == list(range(N // 2, N))
    done = again.state_dict()
    for rank, world in ((0, 1), (0, 2), (1, 3)):
        other = on(rank, world)
        with pytest.raises(InvalidValueError, match=r"'rank': 1, 'world': 2.*same rank"):
            other.load_state_dict(inside)
        other.load_state_dict(done)  # between two passes nothing is lost
        assert len(flat(epoch(other))) == other.num_samples


def test_batches_that_are_kept_do_not_change(samples: PTXrDataset) -> None:
    for buffer_mb in (64, SMALL_MB):
        loader = prep_dataloader(samples, batch_size=16, buffer_mb=buffer_mb)
        kept = list(loader)
        rows = [x[2:5] for x in loader]
        for x in [*kept, *rows]:
            np.testing.assert_array_equal(x.numpy(), numbered(N)[numbers(x)][:, None])


def test_callback_makes_the_batch_of_a_list_of_items(store: Path) -> None:
    def collate(items: list[Any]) -> tuple[int, list[int]]:
        assert isinstance(items, list)
        return len(items), [int(item["a"][0, 0]) for item in items]

    data = PTXrDataset(store)
    for workers in ({}, {"num_workers": 2}):
        train, test = prep_dataloader(data, data, batch_size=16, callback=collate, **workers)
        assert [size for size, _ in train] == [16] * (N // 16)
        assert [k for _, ks in test for k in ks] == list(range(N))


def test_one_loader_for_each_data_set(samples: PTXrDataset) -> None:
    small = torch.utils.data.Subset(samples, range(5))
    assert prepare_dataloader is prep_dataloader
    train, test, val = prep_dataloader(samples, small, 4, val_ds=samples)
    assert [len(flat(epoch(x))) for x in (train, test, val)] == [N // 4 * 4, 5, N]
    train, val = prep_dataloader(samples, val_ds=small)
    assert epoch(val) == [[0], [1], [2], [3], [4]]
    assert isinstance(test, DataLoader)
    assert (test.batch_size, train.batch_size, test.dataset is small) == (4, 1, True)
    assert not train.parallel
    train, test = prep_dataloader(samples, samples, 4, num_workers=3, callback=list)
    assert (train.num_workers, train.drop_last, test.drop_last) == (3, True, False)
    assert train.collate_fn is list
    assert not hasattr(train, "sampler")  # Lightning takes what has one for a DataLoader


def test_without_a_process_group_there_is_one_rank(samples: PTXrDataset) -> None:
    alone, shared = (prep_dataloader(samples, batch_size=8, parallel=p) for p in (False, True))
    assert shared.parallel
    assert epoch(alone) == epoch(shared)


def test_an_empty_test_set_gives_no_batch(tmp_path: Path) -> None:
    empty = PTXrDataset(write_store(tmp_path / "test.zarr", 0), features="a")
    full = TensorDataset(torch.zeros(4, 1))
    _, test = prep_dataloader(full, empty, batch_size=2)
    assert (len(empty), len(test), list(test)) == (0, 0, [])


def test_any_map_style_data_set_has_the_same_loader() -> None:
    train, test = prep_dataloader(
        torch.arange(20.0), [torch.tensor([k]) for k in range(5)], batch_size=6
    )
    assert isinstance(train, DataLoader)
    seen = flat(epoch(train))
    assert len(seen) == len(set(seen)) == 18
    assert epoch(test) == [[0, 1, 2, 3, 4]]


def test_what_is_no_data_set_yet_is_refused_before_the_first_batch(store: Path) -> None:
    ds = open_store(store)
    for wrong in (ds, ds["a"], str(store), store):
        with pytest.raises(
            InvalidTypeError, match=r"val_ds must be a data set, got a \w+; give PTXrDataset"
        ):
            prep_dataloader(val_ds=wrong)
    with pytest.raises(InvalidTypeError, match=r"store must be .* got array"):
        PTXrDataset(np.ones(2), to_pred="a")  # type: ignore[arg-type]


def test_loading_leaves_the_global_random_state_alone(data: Any) -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].tolist()  # noqa: NPY002
    for loader in prep_dataloader(data, data, batch_size=5):
        epoch(loader)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.random.get_state()[1].tolist() == before[1]  # noqa: NPY002


SCRIPT = """
import sys
import torch, xarray as xr
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader

print("script starts")
xr.open_zarr(sys.argv[1])["a"].mean().compute()       # zarr and dask used in the parent
data = PTXrDataset(sys.argv[1], features="a")
data[0]

class Doubled(torch.utils.data.Dataset):              # made in the script itself
    def __len__(self):
        return len(data)
    def __getitem__(self, index):
        return 2 * data[index]

callback = lambda items: torch.stack(items)
loader = prep_dataloader(Doubled(), None, 16, callback, num_workers=2)
print(len({float(x) for batch in loader for x in batch[:, 0, 0, 0]}))
loader = prep_dataloader(data, None, 16, callback, num_workers=1, workers="processes")
print(len(next(iter(loader))))                        # a consumer that stops half-way
print("script ends")
"""


@pytest.mark.slow
def test_processes_start_from_an_unguarded_script(store: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), str(store)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:-1] == ["script starts", "192", "16", "script ends"]


def shard_of(path: Path) -> Path:
    return sorted(path.glob("a/c/*/0/0"))[1]


@pytest.mark.parametrize("buffer_mb", [64, 0.0012])
def test_a_flipped_bit_raises_and_names_the_chunk(tmp_path: Path, buffer_mb: float) -> None:
    path = write_store(tmp_path / "train.zarr", 100)
    shard = shard_of(path)
    raw = bytearray(shard.read_bytes())
    raw[60] ^= 4
    shard.write_bytes(raw)
    data = PTXrDataset(path, features="a")
    with pytest.raises(StoreError, match="40"):
        data[41]
    before = threading.active_count()
    with pytest.raises(StoreError, match="40"):
        list(prep_dataloader(data, batch_size=10, buffer_mb=buffer_mb))
    gc.collect()
    assert threading.active_count() == before


def test_a_consumer_that_stops_half_way_leaves_no_thread(samples: PTXrDataset) -> None:
    before = threading.active_count()
    loader = prep_dataloader(samples, batch_size=16, buffer_mb=SMALL_MB)
    batches = iter(loader)
    next(batches)
    del batches
    gc.collect()
    assert threading.active_count() == before
    both = [(numbers(x), numbers(y)) for x, y in zip(loader, loader, strict=True)]
    assert len(both) == N // 16
    assert all(x != y for x, y in both)  # two iterations at once are two epochs


CUBE = {"time": 6, "lat": 9, "lon": 10}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim_order", "chunks", "options"),
    [
        (("time", "lat", "lon"), None, {}),
        (("lon", "time", "lat"), {"time": 4, "lat": 5}, {"overlap": {"lat": 0.5}}),
        (("time", "lat", "lon"), {"lon": 4}, {"drop_nan": None, "fill_method": "noise"}),
        (("time", "lat", "lon"), None, {"sample_size": None, "scale_fn": "normalize"}),
        (("lat", "time", "lon"), {"lat": 4}, {"drop_nan": "masked", "fill_method": "mean"}),
    ],
)
@pytest.mark.parametrize("part", ["train", "test"])
def test_a_cube_gives_the_samples_that_the_sampler_writes(
    tmp_path: Path, dim_order: Any, chunks: Any, options: dict[str, Any], part: str
) -> None:
    cube = cell_id_cube(
        CUBE, "float32", gaps=0.02, dim_order=dim_order, dask_chunks=chunks, names=("a", "b")
    )
    if options.get("drop_nan") == "masked":
        land = np.random.default_rng(3).random((CUBE["lat"], CUBE["lon"])) < 0.3
        cube["filter_mask"] = (("lat", "lon"), ~land)
    labelled = assign_block_split(cube, {"time": 2}, 0.7, seed=1)
    options = {"sample_size": {"lat": 4, "lon": 3}, **options}
    written = MultiProcSampler(
        labelled,
        train_cube=tmp_path / "train.zarr",
        test_cube=tmp_path / "test.zarr",
        nproc=1,
        order="grid",
        to_pred="b",
        **options,
    ).get_datasets()
    stored = PTXrDataset(written[("train", "test").index(part)], to_pred="b")
    before = labelled.copy(deep=True)
    lazy = PTXrDataset(labelled, to_pred="b", part=part, **options)
    xr.testing.assert_identical(labelled, before)
    assert len(lazy) == len(stored) > 0
    everything = range(len(stored))
    for ours, theirs in zip(lazy.take(everything), stored.take(everything), strict=True):
        np.testing.assert_array_equal(ours.numpy(), theirs.numpy())
    ours, theirs = lazy.coords(everything), stored.coords(everything)
    assert set(ours) == set(theirs)
    assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    assert lazy.metadata.accounting.items() >= stored.metadata.accounting.items()
    assert lazy.statistics == stored.statistics
    train, test = prep_dataloader(lazy, lazy, batch_size=4, buffer_mb=64)
    assert sum(len(x) for x, _ in test) == len(lazy)
    assert len(train) == len(lazy) // 4


def test_the_path_of_a_cube_is_known_as_one(tmp_path: Path) -> None:
    cell_id_cube(CUBE).to_zarr(tmp_path / "cube.zarr", consolidated=False)
    with pytest.raises(StoreError, match=r"cube\.zarr is a cube with dims"):
        PTXrDataset(tmp_path / "cube.zarr")
    assert len(PTXrDataset(tmp_path / "cube.zarr", sample_size={"lat": 3})) == 6 * 3 * 10
    broken = write_store(tmp_path / "broken.zarr", 20)
    (broken / MANIFEST).unlink()
    with pytest.raises(StoreError, match="no manifest"):
        PTXrDataset(broken)


def test_features_that_a_store_records_are_its_features(tmp_path: Path) -> None:
    cube = cell_id_cube(CUBE, names=("a", "b", "c"))
    store = sampled(cube, tmp_path, sample_size={"lat": 3}, features=["b"], to_pred="c")
    assert PTXrDataset(store, to_pred="c").features == ("b",)
    assert PTXrDataset(store, to_pred="c", features=["b", "a"]).features == ("b", "a")
    assert PTXrDataset(store, to_pred="a").features == ("b", "c")
    assert list(PTXrDataset(store)[0]) == ["a", "b", "c"]


def test_a_cube_without_a_split_is_all_training() -> None:
    cube = cell_id_cube(CUBE, names=("a",))
    data = PTXrDataset(cube, features="a", sample_size={"lat": 3, "lon": 5}, scale_fn=None)
    assert len(data) == 6 * 3 * 2
    assert data[0].shape == (1, 3, 5)
    assert data.coords(1) == {
        **{"time": cube.time.values[0], "time_index": 0},
        **{"lat_origin": cube.lat.values[0], "lat_index": 0},
        **{"lon_origin": cube.lon.values[5], "lon_index": 5},
    }
    points = PTXrDataset(cube["a"], features="a", scale_fn=None)
    assert sorted(numbers(points.take(range(540)))) == list(range(540))
    for part in ("test", "val"):
        with pytest.raises(InvalidValueError, match=f"part='{part}', but the cube has no split"):
            PTXrDataset(cube, part=part)
    assert len(PTXrDataset(cube, part="test", data_split=0.5, block_size={"time": 2})) > 0


@pytest.mark.parametrize("order", ["shuffled", "grid"])
def test_the_quality_of_the_shuffle_is_told(tmp_path: Path, order: str) -> None:
    cube = cell_id_cube({"time": 40, "lat": 40, "lon": 40})
    labelled = assign_block_split(cube, {"time": 4, "lat": 10, "lon": 10}, 0.8)
    options = {"order": order, "sample_size": {"lat": 4, "lon": 4}, "chunk_size": 64}
    data = PTXrDataset(sampled(labelled, tmp_path, **options), features="a")
    blocks, unit = data.blocks(range(len(data)))
    assert unit == "blocks of the split"
    assert len(np.unique(blocks)) == 128
    for index in (0, len(data) - 1):
        place = data.coords(index)
        along = [place[f"{dim}_index"] // n for dim, n in (("lat", 10), ("lon", 10), ("time", 4))]
        assert blocks[index] == np.ravel_multi_index(along, (4, 4, 10))
    whole = prep_dataloader(data, batch_size=32).shuffle_report()
    assert whole.batch_size == 32
    assert whole.effective_batch_size > 20
    few = prep_dataloader(data, batch_size=32, buffer_mb=0.03)
    report = few.shuffle_report(epoch=3, batches=1000)
    few.set_epoch(3)
    seen = [data.blocks(few.samples(batch))[0] for batch in few]
    assert report.least_blocks == min(len(np.unique(batch)) for batch in seen)
    assert "independent samples" in str(report)
    assert prep_dataloader(PTXrDataset(labelled), batch_size=8).shuffle_report().unit == "chunks"
    none = PTXrDataset(write_store(tmp_path / "none.zarr", 0), features="a")
    _, empty = prep_dataloader(data, none)
    with pytest.raises(InvalidValueError, match="no batch"):
        empty.shuffle_report()


@pytest.mark.slow
def test_a_store_in_shuffled_order_is_mixed_well_with_the_default_buffer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store of 2 GB in chunks and shards as the sampler makes them, 1024 times smaller."""
    monkeypatch.setattr(tiling, "_SHARD_BYTES", (32 << 10, 32 << 10))
    monkeypatch.setattr(shard_writer, "_RUN_BYTES", 4)
    cube = cell_id_cube({"time": 400, "lat": 8, "lon": 160}, "float32")
    blocks, size = {"time": 4, "lat": 4, "lon": 16}, {"lat": 4, "lon": 4}
    path = sampled(cube, tmp_path, block_size=blocks, sample_size=size)
    data = PTXrDataset(path, features="a")
    loader = prep_dataloader(data, batch_size=256, buffer_mb=0.3)
    assert not loader._memory.fits
    for epoch in (0, 1):
        report = loader.shuffle_report(epoch, batches=10_000)
        assert report.blocks == 2000
        assert 200 <= report.effective_batch_size <= 1.02 * report.perfect
        assert report.least_blocks >= 15


def test_memory_stays_within_the_buffer(tmp_path: Path) -> None:
    path = write_store(
        tmp_path / "s.zarr", 16_000, window={"lat": 16, "lon": 16}, chunk=100, shard=800
    )
    data = PTXrDataset(path, features="a")  # 16 MB
    loader = prep_dataloader(data, batch_size=64, buffer_mb=2)
    tracemalloc.start()
    try:
        for _ in range(2):
            assert sum(len(x) for x in loader) == 16_000
        peak = tracemalloc.get_traced_memory()[1] / 2**20
    finally:
        tracemalloc.stop()
    # the ring, batches under way (1 MB at a time), and what threads read and decode with
    assert 2 < peak < 2 + 4


def test_a_store_of_few_blocks_says_so(tmp_path: Path) -> None:
    few = PTXrDataset(write_store(tmp_path / "few.zarr", 120), features="a")
    report = prep_dataloader(few, batch_size=64).shuffle_report()
    assert report.least_blocks == report.blocks == 12
    assert str(report).endswith("12 chunks are few: no loader can mix more")
    many = PTXrDataset(write_store(tmp_path / "many.zarr", 4000), features="a")
    mixed = prep_dataloader(many, batch_size=64).shuffle_report()
    assert mixed.effective_batch_size == pytest.approx(mixed.perfect, rel=0.1)
    assert str(mixed).endswith("of 400 chunks")
    poor = prep_dataloader(many, batch_size=64, buffer_mb=SMALL_MB).shuffle_report()
    assert poor.effective_batch_size < 10
    assert str(poor).endswith("a larger buffer_mb, or a store in shuffled order, mixes better")


REFUSED = [
    # of samples
    (PTXrDataset, "samples", {"to_pred": "x"}, "to_pred.*'x'.*'a'"),
    (PTXrDataset, "samples", {"to_pred": 3}, "to_pred must be a name or a list of names"),
    (PTXrDataset, "samples", {"to_pred": "a", "features": "a"}, "in to_pred and in features"),
    (PTXrDataset, "samples", {"to_pred": ["a", "b", "c"]}, "no variable is left"),
    (PTXrDataset, "samples", {"features": ["a", "c"]}, "different windows"),
    (PTXrDataset, "samples", {"to_pred": ["a", "b"]}, "different windows"),
    (PTXrDataset, "dated", {}, "'when' has dtype datetime64"),
    (PTXrDataset, "samples", {"sample_size": {"lat": 2}}, "sample_size can be"),
    (PTXrDataset, "samples", {"drop_na": None}, "has no argument .drop_na."),
    (PTXrDataset, "samples", {"dtype": torch.bfloat16}, "dtype must be.*torch.bfloat16"),
    (PTXrDataset, "samples", {"dtype": "datetime64[ns]"}, "must be a dtype of real numbers"),
    (PTXrDataset, "samples", {"target_dtype": "flat"}, "target_dtype must be.*'flat'"),
    (PTXrDataset, "samples", {"cache_mb": "x"}, "cache_mb must be"),
    (PTXrDataset, "no file", {}, "no.zarr cannot be opened"),
    (PTXrDataset, "no url", {}, "no.zarr cannot be opened"),
    (PTXrDataset, "number", {}, "store must be a path.*got 3"),
    # of a cube
    (PTXrDataset, "cube", {"block_size": {"lat": 1}, "block_sizes": {"lat": 1}}, "two names of"),
    (PTXrDataset, "cube", {"sample_size": {"lat": 20}}, "sample_size..lat.* got 20"),
    (PTXrDataset, "cube", {"part": "training"}, "part must be .*'training'; did you mean 'train'"),
    (PTXrDataset, "cube", {"apply_mask": "yes"}, "apply_mask.*'yes'"),
    (PTXrDataset, "cube", {"seed": 1.5}, "seed must be an integer, got 1.5"),
    (PTXrDataset, "cube", {"callback": 3}, "callback must be"),
    (PTXrDataset, "cube", {"max_chunk_mb": 1}, "no argument 'max_chunk_mb'"),
    # of loaders
    (prep_dataloader, "endless", {}, "train_ds must be.*ChainDataset"),
    (prep_dataloader, "number", {}, "train_ds must be.* int"),
    (prep_dataloader, "list", {"test_ds": 3}, "test_ds must be.* int"),
    (prep_dataloader, "list", {"batch_size": 2}, "drop_last=False"),
    (prep_dataloader, "empty", {"drop_last": False}, "^0 training samples.*accounting.*windows"),
    (prep_dataloader, "list", {"batch_size": 0}, "batch_size must be at least 1, got 0"),
    (prep_dataloader, "list", {"num_workers": 1.5}, "num_workers must be an integer"),
    (prep_dataloader, "list", {"workers": "fork"}, "workers must be .* got 'fork'"),
    (prep_dataloader, "list", {"shuffle": "no"}, "shuffle must be True or False, got 'no'"),
    (prep_dataloader, "list", {"persistent_workers": True}, "needs num_workers, .* got 0"),
    (prep_dataloader, "data", {"persistent_workers": True}, "needs workers='processes' for a PT"),
    (prep_dataloader, "list", {"callback": 3}, "callback must be.*3"),
    (prep_dataloader, "list", {"device": "gpu"}, "device='gpu' cannot be"),
    (prep_dataloader, "data", {"buffer_mb": 1e-4}, "buffer_mb=0.0001 is too small for two chunks"),
    (prep_dataloader, "list", {"buffer_mb": "512"}, "buffer_mb must be.*'512'"),
    (prep_dataloader, "list", {"buffer_mb": float("nan")}, "buffer_mb must be.*nan"),
]


@pytest.mark.parametrize(("call", "given", "options", "message"), REFUSED)
def test_bad_input_gives_one_clear_error(
    store: Path, call: Any, given: str, options: Any, message: str
) -> None:
    ds = xr.Dataset({"a": (("samples", "lat"), np.ones((4, 3))), "b": ("samples", np.arange(4))})
    ds["c"] = (("samples", "lon"), np.ones((4, 2)))
    forms = {
        "samples": ds,
        "dated": ds.assign(when=("samples", np.arange(4).astype("datetime64[ns]"))),
        "no file": "no.zarr",
        "no url": "memory://no.zarr",
        "cube": cell_id_cube(CUBE),
        "endless": torch.utils.data.ChainDataset([]),
        "data": PTXrDataset(store),
        **{"number": 3, "list": [1], "empty": []},
    }
    with pytest.raises(CubeError, match=message):
        call(forms[given], **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda d, loader: d[[1, 2]], "one whole number.*take"),
        (lambda d, loader: d.take([[1, 2]]), "as a whole number, a list of them"),
        (lambda d, loader: d.to_dataset(d.take([1])[0], [1]), "must have 2 arrays, got 1"),
        (
            lambda d, loader: d.to_dataset({"y": 0, "X": 0}, [1]),
            r"must be X, or X and y, .*got a dict of \['y', 'X'\]",
        ),
        (lambda d, loader: loader.shuffle_report(epoch=-1), "epoch must be at least 0"),
        (lambda d, loader: loader.set_epoch(1.0), "epoch must be an integer"),
        (lambda d, loader: loader.load_state_dict(changed(loader, epoch=-1)), "epoch must be at l"),
        (lambda d, loader: loader.load_state_dict(changed(loader, done=N + 1)), "204 of 203"),
    ],
)
def test_bad_requests_give_one_clear_error(store: Path, call: Any, message: str) -> None:
    data = PTXrDataset(store, to_pred="b")
    with pytest.raises(CubeError, match=message):
        call(data, prep_dataloader(data))


def test_a_dict_must_have_the_names_in_their_order(store: Path) -> None:
    data = PTXrDataset(store)
    batch = data.take([1])
    assert len(data.unpack(batch)) == 2
    with pytest.raises(CubeError, match=r"must be a dict of \['a', 'b'\], .*of \['b', 'a'\]"):
        data.unpack(dict(reversed(batch.items())))


def changed(loader: Any, **changes: int) -> dict[str, Any]:
    return {**loader.state_dict(), **changes}


def test_an_abandoned_epoch_does_not_count(data: Any) -> None:
    loader = prep_dataloader(data, batch_size=16)
    first, second = iter(loader), iter(loader)
    next(first)
    next(second)
    assert len(list(first)) == N // 16 - 1
    state = loader.state_dict()
    assert (state["epoch"], state["done"]) == (1, 16)


def test_a_batch_may_be_larger_than_the_data(tmp_path: Path) -> None:
    data = PTXrDataset(write_store(tmp_path / "s.zarr", 60), features="a")
    loader = prep_dataloader(test_ds=data, batch_size=sys.maxsize)
    assert [len(x) for x in loader] == [60]


def test_an_interrupted_end_of_an_epoch_leaves_no_wrong_rows(
    samples: PTXrDataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that outlive an epoch write into its slots, which no other epoch may use then."""
    loader = prep_dataloader(samples, batch_size=4, buffer_mb=SMALL_MB)
    batches = iter(loader)
    next(batches)
    with monkeypatch.context() as patch:
        interrupt_shutdowns(patch)
        with pytest.raises(KeyboardInterrupt):
            batches.close()
    assert not loader._idle_rings
    for batch in loader:
        np.testing.assert_array_equal(batch, samples.take(loader.samples(batch)))
    assert len(loader._idle_rings) == 1


@pytest.mark.parametrize("form", ["tensor", "number"])
def test_samples_of_a_batch_that_lost_some_are_not_guessed(samples: PTXrDataset, form: str) -> None:
    def callback(items: list[Any]) -> Any:
        kept = torch.stack(items[::2])
        return kept if form == "tensor" else kept.mean()

    loader = prep_dataloader(samples, batch_size=4, callback=callback)
    batch = next(iter(loader))
    with pytest.raises(InvalidValueError, match="callback or augment changed the number"):
        loader.coords(batch)


@pytest.mark.parametrize("buffer_mb", [64, SMALL_MB])
def test_a_loader_that_was_used_is_copied_without_its_samples(
    store: Path, buffer_mb: float
) -> None:
    loader = prep_dataloader(PTXrDataset(store, to_pred="b"), batch_size=16, buffer_mb=buffer_mb)
    fresh = len(pickle.dumps(loader))
    held = next(iter(loader))
    for twin in (pickle.loads(pickle.dumps(loader)), copy.deepcopy(loader)):  # noqa: S301
        twin.set_epoch(3)
        loader.set_epoch(3)
        assert epoch(twin) == epoch(loader)
    assert len(pickle.dumps(loader)) < 1.1 * fresh
    assert len(held[0]) == 16


@pytest.mark.parametrize("buffer_mb", [64, SMALL_MB])
def test_threads_may_share_a_loader(store: Path, buffer_mb: float) -> None:
    loader = prep_dataloader(PTXrDataset(store, to_pred="b"), batch_size=16, buffer_mb=buffer_mb)
    with ThreadPoolExecutor(6) as threads:
        for seen in threads.map(lambda _: flat(epoch(loader)), range(24)):
            assert len(seen) == len(set(seen)) == N // 16 * 16


@pytest.mark.slow
def test_two_passes_at_once_with_processes_keep_their_own_epochs() -> None:
    data = TensorDataset(torch.arange(12.0))
    loader = prep_dataloader(
        data, batch_size=4, num_workers=1, augment=lambda batch, generator: batch
    )
    first, second = iter(loader), iter(loader)
    with_one = [next(first), next(second), next(first), next(second)]
    epochs = [loader.handover.find(batch)[0] for batch in with_one]
    assert epochs == [0, 1, 0, 1]


@pytest.mark.parametrize("buffer_mb", [64, SMALL_MB])
def test_an_iterator_that_is_never_asked_is_no_epoch(data: Any, buffer_mb: float) -> None:
    loader, twin = (prep_dataloader(data, batch_size=16, buffer_mb=buffer_mb) for _ in range(2))
    iter(loader)
    assert epoch(loader) == epoch(twin)
    loader.load_state_dict({**twin.state_dict(), "done": 32})
    iter(loader)
    assert len(epoch(loader)) == N // 16 - 2


@pytest.mark.parametrize("options", [{}, {"target_offset": {"time": 1}}])
def test_a_label_of_samples_made_by_hand_is_no_input(options: dict[str, Any]) -> None:
    windows = (("samples", "time"), np.arange(12.0).reshape(4, 3))
    by_hand = xr.Dataset({"a": windows, "b": windows, "split": ("samples", np.ones(4, "uint8"))})
    assert "split" not in PTXrDataset(by_hand, "b", **options).features


def test_one_part_is_asked_for_and_no_other_given(store: Path, tmp_path: Path) -> None:
    assert len(PTXrDataset(store, part="train")) == N
    with pytest.raises(InvalidValueError, match=r"part='test', but ds is the store of 'train'"):
        PTXrDataset(store, part="test")
    by_hand = xr.Dataset({"a": ("samples", np.arange(4.0))})
    label = ("samples", np.array([1, 1, 0, 0], np.uint8))
    assert PTXrDataset(by_hand.assign(b=by_hand.a, split=label), "b").features == ("a",)
    with pytest.raises(InvalidValueError, match=r"part='val', but ds is made by hand"):
        PTXrDataset(by_hand, part="val")
    # a part that is empty matters only to whom asks for it
    cube = assign_block_split(cell_id_cube({"time": 4, "lat": 6}), {"time": 2}, split=1.0)
    assert len(PTXrDataset(cube, part="train")) == 24
    with pytest.raises(InvalidValueError, match=r"^the test part would hold no sample"):
        PTXrDataset(cube, part="test")


def test_dims_that_would_leave_the_store_are_refused(tmp_path: Path) -> None:
    for dim in ("..", "a/b", "manifest", "axes", "__x"):
        cube = xr.Dataset({"a": (("time", dim), np.ones((40, 10)))})
        with pytest.raises(
            InvalidValueError, match=r"must (be without '/'|have another name than)"
        ):
            sampled(cube, tmp_path / "d")
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    "values", [np.full(40, np.nan), np.arange(40) * np.timedelta64(1, "h"), np.arange(40.0)]
)
def test_any_axis_can_be_sampled(tmp_path: Path, values: Any) -> None:
    cube = xr.Dataset({"a": (("step", "x"), np.ones((40, 10)))}, {"step": values})
    assert len(PTXrDataset(sampled(cube, tmp_path))) == 400


def test_fill_values_left_in_are_no_samples(tmp_path: Path) -> None:
    values = np.arange(240.0).reshape(40, 6)
    values[::3] = -9999
    cube = xr.Dataset({"a": (("time", "x"), values, {"_FillValue": -9999.0})})
    with pytest.raises(InvalidValueError, match=r"'a' holds its _FillValue -9999"):
        sampled(cube, tmp_path)
    assert not list(tmp_path.iterdir())
