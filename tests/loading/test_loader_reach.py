"""Loaders in other hands: remote stores that wait, trainers of other libraries, dask before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import xarray as xr
from torch.utils.data import TensorDataset
from torch.utils.data.distributed import DistributedSampler
from zarr.storage import FsspecStore

from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from tests.cubes import cell_id_cube
from tests.samplestores import write_store

DEPTH = 12


@pytest.fixture
def remote(tmp_path: Path) -> Iterator[str]:
    memory = fsspec.filesystem("memory")
    path = write_store(tmp_path / "s.zarr", 400, ("a", "b", "c"))
    memory.put(str(path), "/reach.zarr", recursive=True)
    yield "memory://reach.zarr"
    memory.rm("/reach.zarr", recursive=True)


class Gate:
    """Lets requests through only when so many of them wait at once; no clock decides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
        self._get, self._depth, self.passed = FsspecStore.get, depth, 0
        self._open = asyncio.Event()
        monkeypatch.setattr(FsspecStore, "get", lambda *args, **options: self(*args, **options))

    async def __call__(self, *args: Any, **options: Any) -> Any:
        self.passed += 1
        if self.passed == self._depth:
            self._open.set()
        await asyncio.wait_for(self._open.wait(), timeout=60)
        return await self._get(*args, **options)


@pytest.mark.parametrize("buffer_mb", [64, 0.008])
def test_many_reads_of_a_remote_store_wait_at_once(
    remote: str, buffer_mb: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = PTXrDataset(remote, features="a")
    data.take(range(0, 400, 40))  # the indices of the shards are known
    gate = Gate(monkeypatch, DEPTH)
    loader = prep_dataloader(data, batch_size=8, buffer_mb=buffer_mb)
    # a loader that asked for fewer chunks at a time would wait for ever
    assert sorted(int(x) for b in loader for x in b[:, 0, 0, 0]) == list(range(400))
    assert gate.passed == 40


def test_all_variables_of_a_chunk_wait_at_once(
    remote: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = PTXrDataset(remote, features=["a", "b", "c"], cache_mb=0)
    data[0]  # the indices of the shards are known
    gate = Gate(monkeypatch, 3)
    assert data[15][:, 0, 0].tolist() == [15, 1015, 2015]
    assert gate.passed == 3


def test_a_remote_cube_is_known_to_be_slow() -> None:
    cell_id_cube({"time": 4, "lat": 4, "lon": 4}).to_zarr("memory://cube.zarr", consolidated=False)
    cube = xr.open_zarr("memory://cube.zarr", consolidated=False)
    assert PTXrDataset(cube, sample_size={"lat": 2})._source.remote
    assert not PTXrDataset(cube.load().drop_encoding(), sample_size={"lat": 2})._source.remote
    fsspec.filesystem("memory").rm("/cube.zarr", recursive=True)


@pytest.mark.parametrize("parallel", [True, False])
def test_other_libraries_share_out_no_loader_again(parallel: bool) -> None:
    """Lightning asks for the sampler's type, accelerate for a mark, on torch's loaders only.

    ``make bench-loaders_in_trainers`` runs their trainers themselves.
    """
    data = TensorDataset(torch.arange(24.0))
    loader = prep_dataloader(data, batch_size=4, parallel=parallel)
    assert isinstance(loader.sampler, DistributedSampler)
    loader.sampler.set_epoch(3)
    assert loader.state_dict()["epoch"] == 3
    assert loader._is_accelerate_prepared == parallel
