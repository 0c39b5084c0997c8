"""Errors of one rank, told to all others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ml4cube.core.errors import RunError
from ml4cube.training.ranks.dist import World


@contextmanager
def all_ranks_or_none(world: World) -> Iterator[None]:
    """Fail on every rank if one fails; ranks may need any time."""
    world = world.patient()
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    messages = world.gather_objects(failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            raise RunError(f"prediction stopped because rank {rank} failed: {message}")
