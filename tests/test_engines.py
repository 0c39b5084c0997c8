"""Engines: the same results from one process or many, and plain words when something dies."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, RunError, StoreError
from ml4cube.datasets.engines import check_nproc, local_engine


@pytest.mark.parametrize("nproc", [1, 2])
def test_every_task_once(nproc: int) -> None:
    offset = 100  # functions travel by value, with what they close over
    with local_engine(nproc) as engine:
        first = dict(engine.run(lambda shared, task: shared + task + offset, 1000, range(30)))
        second = dict(engine.run(lambda shared, task: (shared, task), "again", iter("ab")))
    assert first == {k: 1100 + k for k in range(30)}
    assert second == {0: ("again", "a"), 1: ("again", "b")}


def test_tasks_are_made_as_they_are_needed() -> None:
    made = []

    def tasks() -> Any:
        for k in range(100):
            made.append(k)
            yield k

    with local_engine(2) as engine:
        run = engine.run(lambda _, task: task, None, tasks())
        next(run)
        assert len(made) < 20
        assert len(list(run)) == 99


@pytest.mark.parametrize("nproc", [1, 2])
def test_an_error_of_a_task_comes_as_it_is(nproc: int) -> None:
    def fail(_: object, task: int) -> int:
        if task == 3:
            raise StoreError("task 3 by design")
        return task

    with pytest.raises(StoreError, match="task 3 by design"), local_engine(nproc) as engine:
        list(engine.run(fail, None, range(10)))


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


@pytest.mark.parametrize(("nproc", "error"), [(0, InvalidValueError), (True, InvalidTypeError)])
def test_nproc(nproc: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"nproc={nproc}"):
        check_nproc(nproc)
