"""Loaders on real ranks: gloo processes that meet through a file, so that no port can clash."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import TensorDataset

from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from tests.distributed_runner import on_ranks
from tests.samplestores import numbered, write_store

N = 101
SMALL_MB = 0.0012


def numbers(batch: Any) -> list[int]:
    x = batch[0] if isinstance(batch, list) else batch
    return x.reshape(len(x), -1)[:, 0].long().tolist()


def data_set(path: str | None) -> Any:
    if path is None:
        return TensorDataset(torch.from_numpy(numbered(N)))
    return PTXrDataset(path, features="a")


def one_epoch_and_a_half(path: str | None, global_batch: int, buffer_mb: float) -> dict[str, Any]:
    """Epoch 0, four batches of epoch 1, the state after them, and a pass over the test data."""
    data = data_set(path)
    train, test = prep_dataloader(
        data,
        data,
        batch_size=global_batch // dist.get_world_size(),
        parallel=True,
        buffer_mb=buffer_mb,
    )
    epoch = [numbers(batch) for batch in train]
    batches = iter(train)
    begun = [numbers(next(batches)) for _ in range(4)]
    return {
        "epoch": epoch,
        "begun": begun,
        "state": train.state_dict(),
        "test": [k for batch in test for k in numbers(batch)],
        "sizes": [len(train), train.num_samples, len(test), test.num_samples],
    }


def go_on(path: str | None, global_batch: int, buffer_mb: float, state: Any) -> list[Any]:
    loader = prep_dataloader(
        data_set(path),
        batch_size=global_batch // dist.get_world_size(),
        parallel=True,
        buffer_mb=buffer_mb,
    )
    loader.load_state_dict(state)
    return [numbers(batch) for batch in loader]


def together(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Global batches: what all ranks read in each step."""
    return [sorted(k for batch in step for k in batch) for step in zip(*ranks, strict=True)]


@pytest.mark.parametrize("form", ["store", "tensors"])
def test_ranks_share_every_epoch_alike(tmp_path: Path, form: str) -> None:
    path = str(write_store(tmp_path / "train.zarr", N)) if form == "store" else None
    args = (path, 12, SMALL_MB)
    alone, pair, three = (on_ranks(world, one_epoch_and_a_half, *args) for world in (1, 2, 3))
    for ranks in (alone, pair, three):
        assert together([r["epoch"] for r in ranks]) == together([r["epoch"] for r in alone])
        assert together([r["begun"] for r in ranks]) == together([r["begun"] for r in alone])
        seen = [k for r in ranks for batch in r["epoch"] for k in batch]
        assert len(seen) == len(set(seen)) == N // 12 * 12
        assert [k for r in ranks for k in r["test"]] == list(range(N))
        for r in ranks:
            assert r["sizes"][:2] == [N // 12, N // 12 * 12 // len(ranks)]
            assert r["sizes"][3] == len(r["test"])
        assert [r["state"] for r in ranks] == [alone[0]["state"]] * len(ranks)
    # the epoch that two ranks began goes on with three, as it would have gone on with one
    rest = on_ranks(3, go_on, *args, pair[0]["state"])
    whole = on_ranks(1, go_on, *args, {**alone[0]["state"], "done": 0})
    assert together([r["begun"] for r in pair]) + together(rest) == together(whole)


def small_test_set(path: str) -> list[int]:
    _, test = prep_dataloader(
        data_set(None), PTXrDataset(path, features="a"), batch_size=4, parallel=True
    )
    return [k for batch in test for k in numbers(batch)]


def test_fewer_samples_than_ranks(tmp_path: Path) -> None:
    path = write_store(tmp_path / "test.zarr", 2)
    assert sorted(on_ranks(3, small_test_set, str(path))) == [[], [0], [1]]
