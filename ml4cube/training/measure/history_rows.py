"""The row of an epoch in the History, reduced over all ranks."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ml4cube.core.errors import EmptyPartError
from ml4cube.training.measure.scores import Meter, Sums, add_up
from ml4cube.training.ranks.dist import World


class Effort(NamedTuple):
    """The time that one rank spent on training in an epoch."""

    # From the start of the epoch to its last step.
    seconds: float
    # Fraction of it spent waiting for the loader, 0 to 1.
    data_wait: float
    # Fraction of it spent waiting for other ranks; NaN if unknown.
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
    own = (train.sums(), Sums() if val is None else val.sums(), effort)
    gathered = world.gather_objects((str(world.device), socket.gethostname(), *own))
    _, _, trains, vals, efforts = zip(*gathered, strict=True)
    row: dict[str, Any] = {"epoch": epoch, "train_loss": _mean("train_data", trains)}
    if val is not None:
        row["val_loss"] = _mean("test_data", vals)
    row |= values()
    row["seconds"] = max(each.seconds for each in efforts)
    row["ranks"] = [_rank_row(rank, *numbers) for rank, numbers in enumerate(gathered)]
    return world.share(row)


def mean_over_ranks(world: World, meter: Meter, name: str = "test_data") -> float:
    """Reduce one mean over all ranks; every rank must call this."""
    return _mean(name, world.gather_objects(meter.sums()))


def _mean(name: str, ranks: Sequence[Sums]) -> float:
    """Return the mean over ranks, or raise an error if no sample counts."""
    samples, _, weight = sums = add_up(ranks)
    if not samples and name == "train_data":
        raise EmptyPartError(
            "train_data gave no batch; it is empty, or drop_last dropped its only batch: use a "
            "smaller batch_size"
        )
    if not samples:
        raise EmptyPartError(f"{name} gave no sample; give a part that is not empty, or None")
    if not weight > 0:
        raise EmptyPartError(
            f"{name} gave samples, but not one value that counts in the loss; check the gaps of "
            "the target and the weights"
        )
    return float(sums.total / weight)


def _rank_row(
    rank: int, device: str, host: str, train: Sums, val: Sums, effort: Effort
) -> dict[str, Any]:
    known = not math.isnan(effort.communicate)
    return {
        "rank": rank,
        "device": device,
        "host": host,
        "train_n": train.samples,
        "train_loss": train.mean,
        "val_n": val.samples,
        "val_loss": val.mean,
        "seconds": effort.seconds,
        "data_wait": effort.data_wait,
        "communicate": effort.communicate if known else None,
        "compute": max(0.0, 1 - effort.data_wait - effort.communicate) if known else None,
    }
