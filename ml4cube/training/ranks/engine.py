"""Tasks shared among ranks, and errors of one rank, told to all others."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from ml4cube.core.errors import RunError
from ml4cube.cube.engine import Engine
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.messages import is_lost_connection

Task = TypeVar("Task")
Result = TypeVar("Result")
Shared = TypeVar("Shared")


class RankEngine(Engine):
    """Shares tasks among ranks, which all give the same tasks and all get every result."""

    shares_memory = True

    def __init__(self, world: World) -> None:
        self._world = world

    def run(
        self, fn: Callable[[Shared, Task], Result], shared: Shared, tasks: Iterable[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Run one task on each rank at a time, then exchange the results."""
        world = self._world.patient()
        queue = enumerate(tasks)
        while batch := list(itertools.islice(queue, world.size)):
            own: list[tuple[int, Result]] = []
            failure: Exception | None = None
            try:
                for position, task in batch[world.rank : world.rank + 1]:
                    own.append((position, fn(shared, task)))
            except Exception as error:
                failure = error
            for results in _exchange(world, own, failure):
                yield from results


@contextmanager
def all_ranks_or_none(world: World) -> Iterator[None]:
    """Fail on every rank if one fails; ranks may need any time."""
    world = world.patient()
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    _exchange(world, None, failure)


def _exchange(world: World, result: Result, failure: Exception | None) -> list[Result]:
    """Return the results of all ranks; raise on every rank if one failed."""
    message = failure and f"{type(failure).__name__}: {failure}"
    try:
        outcomes = world.gather_objects((result, message))
    except RuntimeError as error:
        if failure is None and is_lost_connection(error):
            raise RunError("prediction stopped because another rank ended") from error
        raise failure or error from None
    if failure is not None:
        raise failure
    for rank, (_, message) in enumerate(outcomes):
        if message is not None:
            raise RunError(f"prediction stopped because rank {rank} failed: {message}")
    return [result for result, _ in outcomes]
