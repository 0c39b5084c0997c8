"""Columns of the History over all ranks: mean losses, and the table of ranks."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from ml4cube.core.errors import EmptyPartError
from ml4cube.training.measure.scores import Meter, Sums, add_up
from ml4cube.training.ranks.dist import World


def mean_over_ranks(world: World, meter: Meter, data: str) -> float:
    """Return the mean over all ranks; every rank must call this.

    `data` names the argument that gave the batches, for the error if no sample counts.
    """
    samples, total, weight = add_up(world.gather_objects(meter.sums()))
    if not samples and data == "train_data":
        raise EmptyPartError(
            "train_data gave no batch; it is empty, or drop_last dropped its only batch: use a "
            "smaller batch_size"
        )
    if not samples:
        raise EmptyPartError(f"{data} gave no sample; give a part that is not empty, or None")
    if not weight > 0:
        raise EmptyPartError(
            f"{data} gave samples, but not one value that counts in the loss; check the gaps of "
            "the target and the weights"
        )
    return total / weight


def rank_columns(
    world: World, train: Meter, val: Meter | None, times: Mapping[str, float | None]
) -> dict[str, Any]:
    """Return the seconds of the slowest rank, and the table of ranks; every rank must call this.

    `times` are the columns of the table that say how this rank spent the epoch.
    """
    train_sums, val_sums = train.sums(), Sums() if val is None else val.sums()
    rank_row: dict[str, Any] = {
        "rank": world.rank,
        "device": str(world.device),
        "host": socket.gethostname(),
        "train_n": train_sums.samples,
        "train_loss": train_sums.mean,
        "val_n": val_sums.samples,
        "val_loss": val_sums.mean,
        **times,
    }
    rank_rows = world.gather_objects(rank_row)
    return {"seconds": max(row["seconds"] for row in rank_rows), "ranks": rank_rows}
