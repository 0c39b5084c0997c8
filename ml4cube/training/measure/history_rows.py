"""The row of an epoch in the History, reduced over all ranks."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ml4cube.core.errors import EmptyPartError
from ml4cube.training.measure.scores import Meter, Sums, add_up
from ml4cube.training.ranks.dist import World


class EpochTime(NamedTuple):
    """The time that one rank spent on training in an epoch, and its fractions (0 to 1)."""

    # From the start of the epoch to its last step.
    seconds: float
    # Fraction spent waiting for the loader.
    data_wait: float
    # Fraction spent waiting for other ranks; NaN if unknown.
    communicate: float


def make_row(
    world: World,
    epoch: int,
    train: Meter,
    val: Meter | None,
    further_columns: Callable[[], Mapping[str, Any]],
    time: EpochTime,
) -> dict[str, Any]:
    """Reduce an epoch to one row; every rank must call this."""
    sums = (train.sums(), Sums() if val is None else val.sums())
    gathered = world.gather_objects((_rank_row(world, *sums, time), *sums))
    rank_rows, train_sums, val_sums = zip(*gathered, strict=True)
    row: dict[str, Any] = {"epoch": epoch, "train_loss": _mean("train_data", train_sums)}
    if val is not None:
        row["val_loss"] = _mean("test_data", val_sums)
    # After `_mean` has refused an empty part, of which metrics cannot be computed.
    row |= further_columns()
    row["seconds"] = max(rank_row["seconds"] for rank_row in rank_rows)
    row["ranks"] = list(rank_rows)
    return world.broadcast(row)


def mean_over_ranks(world: World, meter: Meter, name: str = "test_data") -> float:
    """Reduce one mean over all ranks; every rank must call this."""
    return _mean(name, world.gather_objects(meter.sums()))


def _mean(name: str, ranks: Sequence[Sums]) -> float:
    """Return the mean over ranks, or raise an error if no sample counts."""
    samples, total, weight = add_up(ranks)
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
    return float(total / weight)


def _rank_row(world: World, train: Sums, val: Sums, time: EpochTime) -> dict[str, Any]:
    is_timed = not math.isnan(time.communicate)
    return {
        "rank": world.rank,
        "device": str(world.device),
        "host": socket.gethostname(),
        "train_n": train.samples,
        "train_loss": train.mean,
        "val_n": val.samples,
        "val_loss": val.mean,
        "seconds": time.seconds,
        "data_wait": time.data_wait,
        "communicate": time.communicate if is_timed else None,
        "compute": max(0.0, 1 - time.data_wait - time.communicate) if is_timed else None,
    }
