"""Engines: the same results from one process or many, and clear errors when workers die."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from distributed import Client

from ml4cube.core.errors import InvalidTypeError, RunError, StoreError
from ml4cube.cube.engine import Engine, Threads, choose_engine, local_engine
from ml4cube.training.ranks.dist import launch
from ml4cube.training.ranks.engine import RankEngine
from ml4cube.training.ranks.world import World
from tests.clusters import local_cluster
from tests.distributed_runner import kept_ranks

ENGINES = {
    "caller": lambda: Threads(1),
    "threads": lambda: Threads(3),
    "processes": lambda: local_engine(2),
    "rank": lambda: RankEngine(World.single("cpu")),
}


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_every_task_once(make: Callable[[], Engine]) -> None:
    offset = 100  # functions are sent by value, with their closures
    with make() as engine:
        first = dict(engine.run(lambda shared, task: shared + task + offset, 1000, range(30)))
        second = dict(engine.run(lambda shared, task: (shared, task), "again", iter("ab")))
        squares = engine.run_in_order(lambda _, task: task**2, None, range(20))
        assert list(squares) == [k**2 for k in range(20)]
    assert first == {k: 1100 + k for k in range(30)}
    assert second == {0: ("again", "a"), 1: ("again", "b")}


@pytest.mark.parametrize("make", ENGINES.values(), ids=ENGINES)
def test_tasks_are_generated_when_needed(make: Callable[[], Engine]) -> None:
    made = []

    def tasks() -> Any:
        for k in range(100):
            made.append(k)
            yield k

    with make() as engine:
        run = engine.run(lambda _, task: task, None, tasks())
        next(run)
        assert len(made) < 20
        assert len(list(run)) == 99


@pytest.mark.parametrize("nproc", [1, 2])
def test_an_error_that_cannot_be_sent_is_described(nproc: int) -> None:
    class OfTwo(Exception):
        def __init__(self, what: str, where: str) -> None:
            super().__init__(f"{what} at {where}")

    def fail(_: object, task: int) -> int:
        if task == 1:
            raise OfTwo("nothing", "all")
        return task

    kind = OfTwo if nproc == 1 else RunError
    with local_engine(nproc) as engine:
        with pytest.raises(kind, match="nothing at all") as caught:
            list(engine.run(fail, None, range(2)))
        assert dict(engine.run(lambda _, task: task, None, range(2))) == {0: 0, 1: 1}
    if nproc == 2:
        assert "OfTwo: nothing at all" in str(caught.value)
        assert any("in fail" in note for note in caught.value.__notes__)


def test_an_error_whose_cause_cannot_be_sent_keeps_its_type() -> None:
    def fail(_: object, task: int) -> int:
        import tblib.pickling_support

        tblib.pickling_support.install()  # as distributed does: causes are sent along
        cause = ValueError("holds a lock")
        cause.lock = threading.Lock()  # type: ignore[attr-defined]
        raise StoreError("by design") from cause

    with (
        pytest.raises(StoreError, match="by design") as caught,
        local_engine(2) as engine,
    ):
        list(engine.run(fail, None, range(2)))
    assert str(caught.value) == "by design"
    assert any("holds a lock" in note for note in caught.value.__notes__)


def test_a_dead_worker_is_noticed() -> None:
    def die(_: object, task: int) -> int:
        if task == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return task

    with (
        pytest.raises(RunError, match=r"worker process died.*run again"),
        local_engine(2) as engine,
    ):
        list(engine.run(die, None, range(10)))


def test_a_worker_that_dies_between_tasks_is_noticed() -> None:
    with local_engine(2) as engine:
        workers = dict(engine.run(lambda *_: os.getpid(), None, range(2))).values()
        for worker in set(workers):
            os.kill(worker, signal.SIGKILL)
        # the second time the pool knows, and takes no task that could tell it by its result
        for _ in range(2):
            with pytest.raises(RunError, match=r"worker process died.*run again"):
                list(engine.run(lambda _, task: task, None, range(2)))


@pytest.fixture(scope="module")
def cluster() -> Any:
    """Two workers that listen on loopback only."""
    with local_cluster(2) as cluster:
        yield cluster


def test_a_cluster_by_address_by_client_and_by_itself(cluster: Any) -> None:

    wanted = {k: 1000 + k for k in range(20)}
    with choose_engine(Threads(1), cluster.scheduler_address) as engine:
        assert dict(engine.run(lambda shared, task: shared + task, 1000, range(20))) == wanted
    with Client(cluster) as client:
        for given in (client, None):
            with choose_engine(Threads(1), given) as engine:
                assert type(engine).__name__ == "DaskCluster"
                assert dict(engine.run(lambda a, b: a + b, 1000, range(20))) == wanted
        assert client.status == "running"
    assert type(choose_engine(Threads(1))).__name__ == "Threads"


@pytest.mark.parametrize("where", [1, 2, "cluster"])
def test_an_error_of_a_task_is_raised_unchanged(cluster: Any, where: Any) -> None:
    def fail(_: object, task: int) -> int:
        if task == 3:
            raise StoreError("task 3 by design")
        return task

    engine = choose_engine(Threads(1), cluster.scheduler_address)
    if where != "cluster":
        engine = local_engine(where)
    with pytest.raises(StoreError, match="task 3 by design"), engine:
        list(engine.run(fail, None, range(10)))


class Held:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("no pickle by design")


@pytest.mark.parametrize("failing", [0, 3, 17, 39])
def test_whichever_task_fails_on_a_cluster_is_raised(cluster: Any, failing: int) -> None:
    """Results come in batches, in which a failed one may stand at any place."""

    def work(_: object, task: int) -> int:
        if task == failing:
            raise StoreError(f"task {task} fails")
        return task

    engine = choose_engine(Threads(1), cluster.scheduler_address)
    with pytest.raises(StoreError, match=f"task {failing} fails"), engine:
        list(engine.run(work, None, range(40)))


def test_a_cluster_is_not_asked_for_its_workers_with_each_task(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    real = Client.scheduler_info

    def counting(self: Any, **options: Any) -> Any:
        asked.append(1)
        return real(self, **options)

    monkeypatch.setattr(Client, "scheduler_info", counting)
    began = time.monotonic()
    with choose_engine(Threads(1), cluster.scheduler_address) as engine:
        assert len(list(engine.run(lambda _, task: task, None, range(200)))) == 200
    assert len(asked) <= 3 + (time.monotonic() - began)


@pytest.mark.parametrize("where", ["processes", "cluster"])
def test_objects_that_cannot_be_sent_are_named(cluster: Any, where: str) -> None:
    client = cluster.scheduler_address if where == "cluster" else None
    for shared, tasks in ((Held(), [1]), (None, [Held()])):
        with (
            pytest.raises(InvalidTypeError, match=r"cube.*no pickle by design; open .*nproc=1"),
            choose_engine(local_engine(2), client) as engine,
        ):
            list(engine.run(lambda shared, task: None, shared, tasks))


def run_on_rank(failing: int | None) -> list[int]:
    """Square numbers on all ranks, one of which may fail."""

    def square(rank: int, task: int) -> int:
        if rank == failing:
            raise StoreError("by design")
        return task**2

    world = World.current("cpu")
    return list(RankEngine(world).run_in_order(square, world.rank, range(7)))


@pytest.mark.slow
def test_ranks_share_tasks_and_all_get_every_result() -> None:
    with kept_ranks():
        assert launch(run_on_rank, 2, None) == [k**2 for k in range(7)]
        with pytest.raises(RunError, match="rank 1 failed: StoreError: by design"):
            launch(run_on_rank, 2, 1)
