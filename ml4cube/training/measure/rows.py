"""One epoch's row of the History: what the ranks measured, brought together once."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

from ml4cube.core.errors import EmptyPartError
from ml4cube.training.measure.scores import Meter
from ml4cube.training.ranks.dist import World


class Effort(NamedTuple):
    """What the training of one epoch took on one rank."""

    # From its start to its last step.
    seconds: float
    # Share of it spent waiting for the loader, 0 to 1.
    data_wait: float
    # Share of it spent waiting for other ranks and the wire; NaN where it is not known.
    communicate: float


def make_row(
    world: World,
    epoch: int,
    train: Meter,
    val: Meter | None,
    values: Callable[[], Mapping[str, Any]],
    effort: Effort,
) -> dict[str, Any]:
    """Reduce an epoch to one row; every rank must call this."""
    seen = Meter() if val is None else val
    mine = [*_numbers(train), *_numbers(seen), *effort]
    gathered = world.gather(mine)
    places = world.gather_objects((str(world.device), _host()))
    _check_seen(gathered, "test_data", trains=True, validates=val is not None)
    row: dict[str, Any] = {"epoch": epoch, "train_loss": _mean(gathered, 0)}
    if val is not None:
        row["val_loss"] = _mean(gathered, 3)
    row |= values()
    row["seconds"] = max(numbers[6] for numbers in gathered)
    row["ranks"] = [
        _rank_row(rank, place, numbers)
        for rank, (place, numbers) in enumerate(zip(places, gathered, strict=True))
    ]
    return world.share(row)


def mean_over_ranks(world: World, meter: Meter, name: str = "test_data") -> float:
    """Reduce one mean; every rank must call this."""
    meter.flush()
    gathered = world.gather([0.0, 0.0, 0.0, *_numbers(meter)])
    _check_seen(gathered, name, trains=False, validates=True)
    return _mean(gathered, 3)


@cache
def _host() -> str:
    return socket.gethostname()


def _numbers(meter: Meter) -> list[float]:
    return [float(meter.samples), meter.total, meter.weight]


def _mean(gathered: list[list[float]], start: int) -> float:
    return sum(g[start + 1] for g in gathered) / sum(g[start + 2] for g in gathered)


def _rank_row(rank: int, place: tuple[str, str], numbers: Sequence[float]) -> dict[str, Any]:
    train_n, train_sum, train_weight, val_n, val_sum, val_weight, *effort = numbers
    seconds, wait, communicate = effort
    known = not math.isnan(communicate)
    return {
        "rank": rank,
        "device": place[0],
        "host": place[1],
        "train_n": int(train_n),
        "train_loss": train_sum / train_weight if train_weight else None,
        "val_n": int(val_n),
        "val_loss": val_sum / val_weight if val_weight else None,
        "seconds": seconds,
        "data_wait": wait,
        "communicate": communicate if known else None,
        "compute": max(0.0, 1 - wait - communicate) if known else None,
    }


def _check_seen(
    gathered: list[list[float]], val_name: str, *, trains: bool, validates: bool
) -> None:
    if trains and not sum(g[0] for g in gathered):
        raise EmptyPartError(
            "train_data gave no batch; it is empty, or drop_last dropped its only batch: use a "
            "smaller batch_size"
        )
    if validates and not sum(g[3] for g in gathered):
        raise EmptyPartError(f"{val_name} gave no sample; give a part that is not empty, or None")
    for name, start in (("train_data", 0), (val_name, 3)):
        if sum(g[start] for g in gathered) and not sum(g[start + 2] for g in gathered) > 0:
            raise EmptyPartError(
                f"{name} gave samples, but not one value that counts in the loss; look at the "
                "gaps of the target and at the weights"
            )
