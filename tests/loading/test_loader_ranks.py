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
from tests.samplestores import numbered, numbers, write_store

pytestmark = pytest.mark.slow

N = 101
SMALL_MB = 0.0012


def data_set(path: str | None) -> Any:
    if path is None:
        return TensorDataset(torch.from_numpy(numbered(N)))
    return PTXrDataset(path, features="a")


def loaders(path: str | None, global_batch: int) -> Any:
    data = data_set(path)
    size = global_batch // dist.get_world_size()
    return prep_dataloader(data, data, batch_size=size, parallel=True, buffer_mb=SMALL_MB)


def one_epoch_and_a_half(path: str | None, global_batch: int) -> dict[str, Any]:
    """Epoch 0, four batches of epoch 1, the state after them, and a pass over the test data."""
    train, test = loaders(path, global_batch)
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


def go_on(path: str | None, global_batch: int, state: Any) -> list[Any]:
    loader, _ = loaders(path, global_batch)
    loader.load_state_dict(state)
    return [numbers(batch) for batch in loader]


def on_this_rank(paths: dict[str, Any], global_batch: int, states: Any) -> dict[str, Any]:
    """All that a rank is asked for, by form of the data: starting processes is what takes time."""
    found = {}
    for form, path in paths.items():
        found[form] = one_epoch_and_a_half(path, global_batch)
        # without a state of others, the whole of the epoch that was begun
        state = states[form] if states else {**found[form]["state"], "done": 0}
        found[form]["rest"] = go_on(path, global_batch, state)
    return found


def together(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Global batches: what all ranks read in each step."""
    return [sorted(k for batch in step for k in batch) for step in zip(*ranks, strict=True)]


FORMS = ("store", "tensors")


@pytest.fixture(scope="module")
def by_world(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What one, two and three ranks found; three go on from the state of two."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = {"store": str(write_store(folder / "train.zarr", N)), "tensors": None}
    found = {world: on_ranks(world, on_this_rank, paths, 12, None) for world in (1, 2)}
    states = {form: found[2][0][form]["state"] for form in FORMS}
    return {**found, 3: on_ranks(3, on_this_rank, paths, 12, states)}


@pytest.mark.parametrize("form", FORMS)
def test_ranks_share_every_epoch_alike(
    by_world: dict[int, list[dict[str, Any]]], form: str
) -> None:
    alone, pair, three = ([rank[form] for rank in by_world[world]] for world in (1, 2, 3))
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
    begun, rest = together([r["begun"] for r in pair]), together([r["rest"] for r in three])
    assert begun + rest == together([r["rest"] for r in alone])


def small_test_set(path: str) -> list[int]:
    _, test = prep_dataloader(
        data_set(None), PTXrDataset(path, features="a"), batch_size=4, parallel=True
    )
    return [k for batch in test for k in numbers(batch)]


def test_fewer_samples_than_ranks(tmp_path: Path) -> None:
    path = write_store(tmp_path / "test.zarr", 2)
    assert sorted(on_ranks(3, small_test_set, str(path))) == [[], [0], [1]]
