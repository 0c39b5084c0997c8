"""Snapshots: all that a run is, in one file, on the same and on other topologies."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ml4cube.core.errors import InvalidValueError, StoreError
from ml4cube.training.batches import data_facts
from ml4cube.training.checkpoint import read_file, to_plain, write_file
from ml4cube.training.state import History, TrainState, restore_rng

if TYPE_CHECKING:
    from ml4cube.training.loop import Loop

logger = logging.getLogger(__name__)

FORMAT = 2


def save(loop: Loop) -> None:
    """Write the snapshot; every rank must call this, rank 0 writes.

    Parameters
    ----------
    loop : Loop
        Between two steps.
    """
    path = loop.options.snapshot_path
    if path is None:
        return
    ranks = loop.world.gather_objects(to_plain(_rank_state(loop)))
    parts = loop.strategy.save_parts(path, loop.model, loop.optimizer)
    ema = None if loop.ema is None else loop.ema.state_dict(loop.strategy.whole)
    if loop.world.is_main:
        write_file(
            path,
            {
                "ml4cube_snapshot": FORMAT,
                **parts,
                "scheduler": None if loop.scheduler is None else loop.scheduler.state_dict(),
                "scaler": loop.scaler.state_dict(),
                "ema": ema,
                "state": loop.state.to_dict(),
                "history": loop.history.to_dict(),
                "callbacks": _callback_states(loop),
                "ranks": ranks,
                "data": data_facts(loop.feed.loader),
            },
        )
        logger.info("snapshot of epoch %d written to %s", loop.state.epoch, path)
    # Nobody trains on, and none may be killed by a launcher that sees rank 0 done, before it is.
    loop.world.maximum([0.0])
    loop.strategy.saved(path)


def resume(loop: Loop) -> bool:
    """Go on from the snapshot if there is one; rank 0 says whether there is.

    Parameters
    ----------
    loop : Loop
        Before its first step.

    Returns
    -------
    bool
        Whether there was one.

    Raises
    ------
    StoreError
        If the snapshot is damaged or of an unknown format.
    InvalidValueError
        If it is of another model, optimizer or scheduler.
    """
    path = loop.options.snapshot_path
    if path is None or not loop.world.share(Path(path).exists()):
        return False
    content = read_file(path)
    if content.get("ml4cube_snapshot") != FORMAT:
        raise StoreError(
            f"{path} is no snapshot of format {FORMAT}; give another snapshot_path, or delete it"
        )
    try:
        _load_parts(loop, content)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise InvalidValueError(
            f"{path} is a snapshot of another model, optimizer or scheduler ({error}); give "
            "another snapshot_path, or delete it"
        ) from error
    _load_rank(loop, content["ranks"])
    loop.saved_at = (loop.state.epoch, loop.state.step)
    if loop.state.step:
        # The steps before count, when torch asks whether one came before the scheduler's.
        loop.optimizer._opt_called = True  # type: ignore[attr-defined]
    logger.info("resumed from %s after epoch %d", path, loop.state.epoch)
    return True


def _rank_state(loop: Loop) -> dict[str, Any]:
    inside = loop.state.batch > 0
    return {
        **(loop.resting or loop.feed.place(loop.state)),
        "epoch_rng": loop.feed.epoch_rng if inside else loop.feed.capture_rng(),
        "ended": loop.feed.ended,
        "used_up": loop.feed.used_up,
        "state": loop.state.to_dict(),
    }


def _load_parts(loop: Loop, content: dict[str, Any]) -> None:
    path = loop.options.snapshot_path or ""
    if loop.ema is not None:
        loop.ema.apply(False)  # an earlier run in this process may have left the average in place
    loop.strategy.load_parts(path, content, loop.model, loop.optimizer)
    if (loop.scheduler is None) != (content["scheduler"] is None):
        raise ValueError("one has a scheduler, the other none")
    if loop.scheduler is not None:
        loop.scheduler.load_state_dict(content["scheduler"])
    loop.scaler.load_state_dict(content["scaler"])
    if (loop.ema is None) != (content["ema"] is None):
        raise ValueError("one has a moving average (ema), the other none")
    if loop.ema is not None:
        loop.ema.load_state_dict(content["ema"], loop.strategy.parts)
    loop.state = TrainState(**content["state"])
    loop.history = History(content["history"])
    for name, callback in _named(loop).items():
        if name in content["callbacks"]:
            callback.load_state_dict(content["callbacks"][name])


def _load_rank(loop: Loop, ranks: list[dict[str, Any]]) -> None:
    same = len(ranks) == loop.world.size
    if not same:
        logger.warning(
            "a snapshot of %d ranks is resumed on %d: the order of samples and random numbers "
            "differ from an uninterrupted run",
            len(ranks),
            loop.world.size,
        )
        if loop.state.batch:
            # Where each rank stood in the epoch says nothing about other ranks: start it anew.
            loop.state.start_epoch()
            return
    if loop.world.rank >= len(ranks):
        return
    mine = ranks[loop.world.rank]
    restore_rng(mine["rng"], loop.world.device)
    if not same:
        return
    loop.state = TrainState(**mine["state"])
    if loop.state.batch:
        loop.feed.position = mine
    else:
        loop.feed.restore_rng(mine["epoch_rng"])


def _named(loop: Loop) -> dict[str, Any]:
    """Callbacks by class and, where a class comes twice, by their number."""
    named: dict[str, Any] = {}
    for callback in loop.callbacks:
        kind = type(callback).__name__
        twins = sum(name.startswith(f"{kind}.") for name in named)
        named[f"{kind}.{twins}"] = callback
    return named


def _callback_states(loop: Loop) -> dict[str, Any]:
    return {name: callback.state_dict() for name, callback in _named(loop).items()}
