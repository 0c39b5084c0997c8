"""Engines: the same results from one process or many, and clear errors when workers die."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest

from ml4cube.core.errors import InvalidTypeError, RunError, StoreError
from ml4cube.sampling.workers import choose_engine
from tests.clusters import local_cluster


@pytest.mark.parametrize("nproc", [1, 2])
def test_every_task_once(nproc: int) -> None:
    offset = 100  # functions are sent by value, with their closures
    with choose_engine(nproc) as engine:
        first = dict(engine.run(lambda shared, task: shared + task + offset, 1000, range(30)))
        second = dict(engine.run(lambda shared, task: (shared, task), "again", iter("ab")))
    assert first == {k: 1100 + k for k in range(30)}
    assert second == {0: ("again", "a"), 1: ("again", "b")}


def test_tasks_are_generated_when_needed() -> None:
    made = []

    def tasks() -> Any:
        for k in range(100):
            made.append(k)
            yield k

    with choose_engine(2) as engine:
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
    with choose_engine(nproc) as engine:
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
        choose_engine(2) as engine,
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
        choose_engine(2) as engine,
    ):
        list(engine.run(die, None, range(10)))


def test_a_worker_that_dies_between_tasks_is_noticed() -> None:
    with choose_engine(2) as engine:
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
    from distributed import Client

    wanted = {k: 1000 + k for k in range(20)}
    with choose_engine(1, cluster.scheduler_address) as engine:
        assert dict(engine.run(lambda shared, task: shared + task, 1000, range(20))) == wanted
    with Client(cluster) as client:
        for given in (client, None):
            with choose_engine(1, given) as engine:
                assert type(engine).__name__ == "DaskCluster"
                assert dict(engine.run(lambda a, b: a + b, 1000, range(20))) == wanted
        assert client.status == "running"
    assert type(choose_engine(1)).__name__ == "InProcess"


@pytest.mark.parametrize("where", [1, 2, "cluster"])
def test_an_error_of_a_task_is_raised_unchanged(cluster: Any, where: Any) -> None:
    def fail(_: object, task: int) -> int:
        if task == 3:
            raise StoreError("task 3 by design")
        return task

    given = (1, cluster.scheduler_address) if where == "cluster" else (where,)
    with pytest.raises(StoreError, match="task 3 by design"), choose_engine(*given) as engine:
        list(engine.run(fail, None, range(10)))


class Held:
    """Cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("no pickle by design")


@pytest.mark.parametrize("where", ["processes", "cluster"])
def test_objects_that_cannot_be_sent_are_named(cluster: Any, where: str) -> None:
    client = cluster.scheduler_address if where == "cluster" else None
    for shared, tasks in ((Held(), [1]), (None, [Held()])):
        with (
            pytest.raises(InvalidTypeError, match=r"cube.*no pickle by design; open .*nproc=1"),
            choose_engine(2, client) as engine,
        ):
            list(engine.run(lambda shared, task: None, shared, tasks))
