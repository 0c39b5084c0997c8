"""Loaders and data sets besides an epoch: odd requests, copies, threads, two passes at once."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch.utils.data import TensorDataset

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.splits import assign_block_split
from tests.cubes import cell_id_cube
from tests.samplestores import write_store

N = 203
# three chunks fit into this, 21 do not: samples pass through a ring
RING_MB = 0.002


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("stores") / "train.zarr", N, ("a", "b"))


def epoch(loader: Any) -> list[list[int]]:
    return [x.reshape(len(x), -1)[:, 0].long().tolist() for x, _ in loader]


@pytest.mark.parametrize("buffer_mb", [64, RING_MB])
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


@pytest.mark.parametrize("buffer_mb", [64, RING_MB])
def test_threads_may_share_a_loader(store: Path, buffer_mb: float) -> None:
    loader = prep_dataloader(PTXrDataset(store, to_pred="b"), batch_size=16, buffer_mb=buffer_mb)
    with ThreadPoolExecutor(6) as threads:
        for found in threads.map(lambda _: epoch(loader), range(24)):
            seen = [k for batch in found for k in batch]
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


@pytest.mark.parametrize("buffer_mb", [64, RING_MB])
def test_an_iterator_that_is_never_asked_is_no_epoch(store: Path, buffer_mb: float) -> None:
    data = PTXrDataset(store, to_pred="b")
    loader, twin = (prep_dataloader(data, batch_size=16, buffer_mb=buffer_mb) for _ in range(2))
    iter(loader)
    assert epoch(loader) == epoch(twin)
    loader.load_state_dict({**twin.state_dict(), "done": 32})
    iter(loader)
    assert len(epoch(loader)) == N // 16 - 2


def test_one_part_is_asked_for_and_no_other_given(store: Path, tmp_path: Path) -> None:
    assert len(PTXrDataset(store, part="train")) == N
    with pytest.raises(InvalidValueError, match=r"part='test', but ds is the store of 'train'"):
        PTXrDataset(store, part="test")
    by_hand = xr.Dataset({"a": ("samples", np.arange(4.0))})
    with pytest.raises(InvalidValueError, match=r"part='val', but ds is made by hand"):
        PTXrDataset(by_hand, part="val")
    with pytest.raises(InvalidValueError, match=r"part must be .* got 'x'"):
        PTXrDataset(store, part="x")
    # a part that is empty matters only to whom asks for it
    cube = assign_block_split(cell_id_cube({"time": 4, "lat": 6}), {"time": 2}, split=1.0)
    assert len(PTXrDataset(cube, part="train")) == 24
    with pytest.raises(InvalidValueError, match=r"^the test part would hold no sample"):
        PTXrDataset(cube, part="test")


ODD: dict[str, tuple[Callable[[PTXrDataset], Any], type[Exception], str]] = {
    "an empty list": (lambda d: d[[]], InvalidTypeError, "one whole number.*take"),
    "a list": (lambda d: d[[1, 2]], InvalidTypeError, "one whole number.*take"),
    "nested": (lambda d: d.take([[1, 2]]), InvalidTypeError, "as a whole number, a list of them"),
    "coords nested": (lambda d: d.coords([[1]]), InvalidTypeError, "whole number"),
    "one array of two": (
        lambda d: d.to_dataset(d.take([1])[0], [1]),
        InvalidValueError,
        "the batch must have 2 arrays, got 1",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_what_is_no_sample_is_said_so(store: Path, name: str) -> None:
    ask, kind, message = ODD[name]
    with pytest.raises(kind, match=message):
        ask(PTXrDataset(store, to_pred="b"))


@pytest.mark.parametrize("dtype", ["datetime64[ns]", "S3", "complex64", "longdouble", "uint8x"])
def test_types_that_tensors_lack_are_refused(store: Path, dtype: str) -> None:
    with pytest.raises(InvalidTypeError, match="must be a dtype of real numbers"):
        PTXrDataset(store, dtype=dtype)


def test_sizes_and_epochs_that_cannot_be(store: Path) -> None:
    data = PTXrDataset(store, to_pred="b")
    for size, kind in (("x", InvalidTypeError), (-1, InvalidValueError)):
        with pytest.raises(kind, match="cache_mb must be"):
            PTXrDataset(store, cache_mb=size)  # type: ignore[arg-type]
    with pytest.raises(InvalidValueError, match="buffer_mb=0 is too small for two chunks"):
        prep_dataloader(data, buffer_mb=0)
    with pytest.raises(InvalidValueError, match="epoch"):
        prep_dataloader(data, batch_size=16).shuffle_report(epoch=-1)
    with pytest.raises(InvalidValueError, match=r"^0 training samples.*accounting.*windows"):
        prep_dataloader(TensorDataset(torch.empty(0, 2)))


def test_dims_that_would_leave_the_store_are_refused(tmp_path: Path) -> None:
    for dim in ("..", "a/b", "manifest", "axes", "__x"):
        cube = xr.Dataset({"a": (("time", dim), np.ones((40, 10)))})
        with pytest.raises(InvalidValueError, match="cannot name a folder of the store"):
            MultiProcSampler(
                cube,
                train_cube=tmp_path / "d" / "train.zarr",
                test_cube=tmp_path / "d" / "test.zarr",
                block_size={"time": 4},
                nproc=1,
            )
    assert not (tmp_path / "d").exists()


@pytest.mark.parametrize(
    "values", [np.full(40, np.nan), np.arange(40) * np.timedelta64(1, "h"), np.arange(40.0)]
)
def test_any_axis_can_be_sampled(tmp_path: Path, values: Any) -> None:
    cube = xr.Dataset({"a": (("step", "x"), np.ones((40, 10)))}, {"step": values})
    options: dict[str, Any] = {"block_size": {"step": 4}, "nproc": 1, "seed": 1}
    places = {part: tmp_path / part for part in ("train_cube", "test_cube")}
    train, test = MultiProcSampler(cube, **places, **options).get_datasets()
    assert train.sizes["samples"] + test.sizes["samples"] == 400


def test_fill_values_left_in_are_no_samples(tmp_path: Path) -> None:
    values = np.arange(240.0).reshape(40, 6)
    values[::3] = -9999
    cube = xr.Dataset({"a": (("time", "x"), values, {"_FillValue": -9999.0})})
    with pytest.raises(InvalidValueError, match=r"'a' holds its _FillValue -9999"):
        MultiProcSampler(
            cube,
            train_cube=tmp_path / "train",
            test_cube=tmp_path / "test",
            block_size={"time": 4},
            nproc=1,
            seed=1,
        ).run()
    assert not list(tmp_path.iterdir())
