"""Snapshots: all that a run is, in one file, on the same and on other topologies."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from ml4cube.core.errors import InvalidValueError, StoreError
from ml4cube.training.files.checkpoint import read_file, to_plain, write_file
from ml4cube.training.files.description import (
    Asked,
    Difference,
    compare,
    group_names,
    merged,
    merged_group,
    named_callbacks,
)
from ml4cube.training.run.batches import data_facts
from ml4cube.training.state import History, TrainState, restore_rng

if TYPE_CHECKING:
    from ml4cube.training.run.loop import Loop

logger = logging.getLogger(__name__)

FORMAT = 3


def save(loop: Loop) -> None:
    """Write the snapshot; every rank must call this, rank 0 writes."""
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
                "run": loop.description,
                "groups": group_names(loop.model, loop.optimizer),
                "trained": Asked.now(loop).trained,
            },
        )
        logger.info("snapshot of epoch %d written to %s", loop.state.epoch, path)
    # Nobody trains on, and none may be killed by a launcher that sees rank 0 done, before it is.
    loop.world.maximum([0.0])
    loop.strategy.saved(path)


def resume(loop: Loop) -> bool:
    """Go on from the snapshot if there is one; rank 0 says whether there is."""
    path = loop.options.snapshot_path
    if path is None or not loop.world.share(Path(path).exists()):
        return False
    content = read_file(path)
    if content.get("ml4cube_snapshot") != FORMAT:
        raise StoreError(
            f"{path} is no snapshot of format {FORMAT}; give another snapshot_path, or delete it"
        )
    difference = loop.world.share(compare(content["run"], loop.description))
    if difference.refused:
        raise InvalidValueError(
            f"{path} is a snapshot of {' and '.join(difference.kinds)}: "
            f"{'; '.join(difference.refused)}. Go on with what that run had, or give another "
            "snapshot_path or delete the file, to start a run of its own"
        )
    try:
        _load_parts(loop, content, difference)
    except (RuntimeError, ValueError, KeyError, TypeError) as error:
        raise InvalidValueError(
            f"{path} is a snapshot of another model, optimizer or scheduler ({error}); give "
            "another snapshot_path, or delete it"
        ) from error
    begins = _load_rank(loop, content["ranks"], difference)
    loop.saved_at = (loop.state.epoch, loop.state.step)
    if loop.state.step:
        # The steps before count, when torch asks whether one came before the scheduler's.
        loop.optimizer._opt_called = True  # type: ignore[attr-defined]
    anew = ["the epoch under way"] if begins else []
    anew += ["the choice of the best epoch"] if _load_callbacks(loop, content, difference) else []
    if difference.changed and loop.world.is_main:
        warnings.warn(
            f"{path} is a snapshot of a run with other settings, which goes on with those given "
            f"now: {'; '.join(difference.changed)}"
            + (f". Begun anew: {', '.join(anew)}" if anew else ""),
            stacklevel=2,
        )
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


def _load_parts(loop: Loop, content: dict[str, Any], difference: Difference) -> None:
    path = loop.options.snapshot_path or ""
    if loop.ema is not None:
        loop.ema.apply(False)  # an earlier run in this process may have left the average in place
    _add_groups(loop, content["groups"])
    loop.strategy.load_parts(path, content, loop.model, loop.optimizer)
    _honour(loop, content, difference)
    if content["scaler"]:  # else that run had no scale
        loop.scaler.load_state_dict(content["scaler"])
    if loop.ema is not None and content["ema"] is not None:
        loop.ema.load_state_dict(content["ema"], loop.strategy.parts)
    loop.state = TrainState(**content["state"])
    loop.history = History(content["history"])


def _add_groups(loop: Loop, groups: list[list[str]]) -> None:
    """Give the optimizer the groups of parameters that callbacks gave it in the run before."""
    named = dict(loop.model.named_parameters())
    for names in groups[len(loop.optimizer.param_groups) :]:
        loop.optimizer.add_param_group({"params": [named[name] for name in names]})


def _honour(loop: Loop, content: dict[str, Any], difference: Difference) -> None:
    """Go on with optimizer, scheduler and frozen layers, changed as the user asked for."""
    asked, before = loop.asked, content["run"]["asked"]
    if asked is None:
        return
    groups = loop.optimizer.param_groups
    same_kind = "scheduler" not in difference.names
    for group, old, new in zip(groups, before["groups"], asked.groups, strict=False):
        saved = {name: group[name] for name in group if name not in ("params", "param_names")}
        # A scheduler of another kind begins where its optimizer was made.
        group.update(merged_group(old, saved, new) if same_kind else new)
    if loop.scheduler is not None and same_kind:
        state = merged(before["scheduler"], content["scheduler"], asked.scheduler)
        if "_last_lr" in state and "lr" in difference.names:
            state["_last_lr"] = [group["lr"] for group in groups]
        loop.scheduler.load_state_dict(state)
    trained = asked.trained if "trained" in difference.names else content["trained"]
    for name, parameter in loop.model.named_parameters():
        parameter.requires_grad_(name in trained)


def _load_rank(loop: Loop, ranks: list[dict[str, Any]], difference: Difference) -> bool:
    """Go on where this rank stood; return whether the epoch under way begins anew."""
    same = len(ranks) == loop.world.size
    rank = loop.world.rank
    if same:
        loop.state = TrainState(**ranks[rank]["state"])
    begins = difference.moves_place and loop.state.batch > 0
    if begins:  # where a rank stood in the epoch says nothing about other batches
        loop.state.start_epoch()
    if rank >= len(ranks) or "seed" in difference.names:
        return begins
    restore_rng(ranks[rank]["rng"], loop.world.device)
    if not same:
        return begins
    if loop.state.batch:
        loop.feed.position = ranks[rank]
    else:
        loop.feed.restore_rng(ranks[rank]["epoch_rng"])
    return begins


def _load_callbacks(loop: Loop, content: dict[str, Any], difference: Difference) -> bool:
    """Give callbacks their states; return whether any judges anew."""
    states, anew = content["callbacks"], False
    for name, callback in named_callbacks(loop.callbacks).items():
        if name in states:
            callback.load_state_dict(states[name])
        judged = hasattr(callback, "monitor")
        stale = judged and (name in difference.monitors or difference.is_stale(callback.monitor))
        if stale and not loop.is_over:  # else the best is what that run came to
            callback.forget()
            anew = True
    scheduler = loop.scheduler
    if isinstance(scheduler, ReduceLROnPlateau) and (
        "ReduceLROnPlateau" in difference.monitors or difference.is_stale(loop.monitor)
    ):
        scheduler._reset()  # else it would wait for values of the old kind to come back
    return anew


def _callback_states(loop: Loop) -> dict[str, Any]:
    return {name: c.state_dict() for name, c in named_callbacks(loop.callbacks).items()}
