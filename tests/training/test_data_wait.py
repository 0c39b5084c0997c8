"""How long the device waits for batches, with a GPU that is stood in for by a clock."""

from __future__ import annotations

import pytest
import torch

from ml4cube.training.run import epoch_times
from ml4cube.training.run.epoch_times import Spans


class Machine:
    """A host and a GPU that computes what the host queued; both have read no clock but this."""

    def __init__(self) -> None:
        self.host = self.gpu = 0.0  # when the host is, and when the GPU has computed all

    def fetch(self, seconds: float) -> None:
        self.host += seconds

    def compute(self, seconds: float) -> None:
        self.gpu = max(self.host, self.gpu) + seconds


class Event:
    """As torch.cuda.Event: the moment at which the GPU passes it."""

    machine: Machine

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.moment = max(self.machine.host, self.machine.gpu)

    def query(self) -> bool:
        return self.moment <= self.machine.host

    def synchronize(self) -> None:
        self.machine.host = max(self.machine.host, self.moment)

    def elapsed_time(self, end: Event) -> float:
        return (end.moment - self.moment) * 1000


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    Event.machine = machine = Machine()
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(epoch_times.time, "perf_counter", lambda: machine.host)
    return machine


@pytest.mark.parametrize(
    ("fetch", "compute", "on_gpu"),
    [
        (1.0, 3.0, 1.0),  # the first batch only: the GPU is busy when it gets the others
        (3.0, 1.0, 3.0 + 19 * 2.0),  # it computes for a third of the time in which it waits
        (2.0, 2.0, 2.0),
    ],
)
def test_a_busy_gpu_does_not_wait_while_the_host_does(
    machine: Machine, fetch: float, compute: float, on_gpu: float
) -> None:
    on_host = Spans(torch.device("cpu"))
    wait = Spans(torch.device("cuda"))
    for _ in range(20):
        with on_host, wait:
            machine.fetch(fetch)
        machine.compute(compute)
        assert len(wait._under_way) <= 21
    assert wait.seconds == pytest.approx(on_gpu)
    assert on_host.seconds == pytest.approx(20 * fetch)


def test_waits_that_are_over_are_not_kept(machine: Machine) -> None:
    wait = Spans(torch.device("cuda"))
    for _ in range(100):
        with wait:
            machine.fetch(1.0)
        machine.compute(0.5)
        assert len(wait._under_way) <= 1
    assert wait.seconds == pytest.approx(1 + 99 * 0.5)
