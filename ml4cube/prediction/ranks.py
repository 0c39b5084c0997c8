"""Errors of one rank, told to all others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ml4cube.core.errors import RunError
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.failures import is_lost_connection


@contextmanager
def all_ranks_or_none(world: World) -> Iterator[None]:
    """Fail on every rank if one fails; ranks may need any time."""
    world = world.patient()
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    try:
        messages = world.gather_objects(failure and f"{type(failure).__name__}: {failure}")
    except RuntimeError as error:
        if failure is None and is_lost_connection(error):
            raise RunError("prediction stopped because another rank ended") from error
        raise failure or error from None
    if failure is not None:
        raise failure
    for rank, message in enumerate(messages):
        if message is not None:
            raise RunError(f"prediction stopped because rank {rank} failed: {message}")
