"""Batches on their way to a device, and threads, on machines that are stood in for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ml4cube.core.errors import InvalidTypeError
from ml4cube.loading.handover import BatchCopy, to_device
from ml4cube.loading.loaders import useful_threads


@pytest.mark.parametrize(("kind", "non_blocking"), [("cuda", True), ("mps", False), ("xpu", False)])
def test_only_cuda_copies_while_the_host_goes_on(
    kind: str, non_blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the others, memory that is used again would be read too late (pytorch#139550)."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda _, *args, **kw: calls.append((args, kw)))
    device = torch.device(kind)
    batch = (torch.zeros(2), {"y": torch.zeros(3)})
    copy = BatchCopy(device) if kind != "cuda" else lambda batch: to_device(batch, device)
    copy(batch)
    assert calls == [((device,), {"non_blocking": non_blocking})] * 2


def test_main_memory_is_full_when_a_copy_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "to", lambda _, *args, **kw: calls.append(kw))
    to_device(torch.zeros(2, device="meta"), torch.device("cpu"))
    assert calls == [{"non_blocking": False}]


def test_doubles_are_refused_by_a_device_that_has_none() -> None:
    batch = (torch.zeros(2), torch.zeros(2, dtype=torch.float64))
    with pytest.raises(InvalidTypeError, match=r"'mps' has no float64.*dtype='float32'"):
        to_device(batch[1], torch.device("mps"))


@pytest.mark.parametrize(
    ("own", "every", "ranks", "threads"),
    [
        (2, 2, 1, 2),  # a laptop
        (64, 64, 1, 4),
        (64, 64, 8, 4),  # ranks that share all cores
        (16, 16, 8, 2),
        (4, 4, 8, 1),
        (2, 16, 8, 2),  # each is bound to cores of its own
        (1, 16, 8, 1),
        (8, 16, 8, 2),  # bound to half of a machine, with half of the ranks
        (4, 1, 1, 4),  # started by a process that is bound to fewer
    ],
)
def test_ranks_use_the_cores_that_they_have_once(
    own: int, every: int, ranks: int, threads: int
) -> None:
    assert useful_threads(own, every, ranks) == threads
