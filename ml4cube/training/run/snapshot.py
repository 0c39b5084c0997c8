"""Snapshots: the whole state of a run in one file, to be resumed on any number of ranks."""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ml4cube.core.errors import InvalidValueError, StoreError
from ml4cube.training.files.checkpoint import read_file, to_plain, write_file
from ml4cube.training.inputs.batches import data_facts
from ml4cube.training.run.engine import Engine
from ml4cube.training.run.resume_changes import (
    POSITION,
    Changes,
    compare,
    describe,
    group_names,
    merged,
    merged_group,
    named_callbacks,
    new_requests,
    requests,
)
from ml4cube.training.state import History, TrainState, restore_rng

logger = logging.getLogger(__name__)

FORMAT = 5
# By optimizer, how its last run left what users request, and what was requested of that run.
_LAST: WeakKeyDictionary[Optimizer, tuple[dict[str, Any], dict[str, Any]]] = WeakKeyDictionary()


class Snapshot:
    """The snapshot of a run."""

    def __init__(self, run: Engine, path: str | Path) -> None:
        self.path = path
        self._run = run
        self._requested = new_requests(requests(run), *_LAST.get(run.optimizer, ({}, {})))
        self._description = describe(run, self._requested)
        self._saved_at: tuple[int, int] | None = None

    def leave(self) -> None:
        """Remember how the run leaves its optimizer, for the next run of the same one."""
        _LAST[self._run.optimizer] = (requests(self._run), self._requested)

    @property
    def is_current(self) -> bool:
        """True if no step was taken since the snapshot was written or resumed."""
        return self._saved_at == (self._run.state.epoch, self._run.state.step)

    def save(self) -> None:
        """Write the snapshot; every rank must call this, rank 0 writes."""
        run = self._run
        ranks = run.world.gather_objects(to_plain(self._rank_state()))
        model = run.strategy.model_state(run.model)
        optimizer = run.strategy.optimizer_state(run.optimizer)
        ema = None if run.ema is None else run.ema.state_dict(run.strategy.whole)
        callbacks = named_callbacks(run.callbacks)
        if run.world.is_main:
            write_file(
                self.path,
                {
                    "ml4cube_snapshot": FORMAT,
                    "model": model,
                    "optimizer": optimizer,
                    "scheduler": None if run.scheduler is None else run.scheduler.state_dict(),
                    "scaler": run.scaler.state_dict(),
                    "ema": ema,
                    "state": run.state.to_dict(),
                    "history": run.history.to_dict(),
                    "callbacks": {name: c.state_dict() for name, c in callbacks.items()},
                    "ranks": ranks,
                    "data": data_facts(run.feed.loader),
                    "run": self._description,
                    "groups": group_names(run.model, run.optimizer),
                    "trained": requests(run)["trained"],
                },
            )
            logger.info("snapshot of epoch %d written to %s", run.state.epoch, self.path)
        # No rank trains on before the file is there: a launcher may kill it once rank 0 is done.
        run.world.wait()
        self._saved_at = (run.state.epoch, run.state.step)

    def resume(self) -> bool:
        """Go on from the file if there is one; every rank, rank 0 decides whether there is."""
        run, path = self._run, self.path
        if not run.world.share(Path(path).exists()):
            return False
        # Ranks that each copy a shard share the memory of the file. What stays in use is copied,
        # because the file will be replaced.
        content = read_file(path, mmap=run.strategy.is_sharded)
        large = ("model", "optimizer", "ema")
        content |= copy.deepcopy({name: v for name, v in content.items() if name not in large})
        if content.get("ml4cube_snapshot") != FORMAT:
            raise StoreError(
                f"{path} is not a snapshot of format {FORMAT}; give another snapshot_path, or "
                "delete it"
            )
        changes = run.world.share(compare(content["run"], self._description))
        if changes.refused:
            raise InvalidValueError(
                f"{path} is a snapshot of another run: {'; '.join(changes.refused)}. Restore the "
                "settings of that run, or start over: give another snapshot_path or delete it"
            )
        try:
            self._load_parts(content, changes)
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise InvalidValueError(
                f"{path} is a snapshot of another model, optimizer or scheduler ({error}); give "
                "another snapshot_path, or delete it"
            ) from error
        restarted = []
        if self._load_rank(content["ranks"], changes):
            restarted.append("the current epoch")
        if self._load_callbacks(content["callbacks"], changes):
            restarted.append("the choice of the best epoch")
        self._saved_at = (run.state.epoch, run.state.step)
        if changes.changed and run.world.is_main:
            warnings.warn(
                f"{path} is a snapshot of a run with other settings. The run continues with "
                f"the current ones: {'; '.join(changes.changed.values())}"
                + (f". Restarted: {', '.join(restarted)}" if restarted else ""),
                stacklevel=2,
            )
        logger.info("resumed from %s after epoch %d", path, run.state.epoch)
        return True

    def _rank_state(self) -> dict[str, Any]:
        feed, state, model = self._run.feed, self._run.state, self._run.model
        return {
            **(feed.position_before_validation or feed.current_position(state)),
            "epoch_rng": feed.epoch_rng if state.batch else feed.capture_rng(),
            "ended": feed.ended,
            "used_up": feed.used_up,
            "state": state.to_dict(),
            # Other strategies copy those of rank 0 to all ranks in every step.
            "buffers": dict(model.named_buffers()) if self._run.strategy.is_sharded else {},
        }

    def _load_parts(self, content: dict[str, Any], changes: Changes) -> None:
        run = self._run
        if run.ema is not None:
            run.ema.apply(False)  # an earlier run in this process may have left the average applied
        parameters = dict(run.model.named_parameters())
        # Callbacks may have added groups of parameters to the optimizer.
        for names in content["groups"][len(run.optimizer.param_groups) :]:
            run.optimizer.add_param_group({"params": [parameters[name] for name in names]})
        run.strategy.load_model(run.model, content["model"])
        run.strategy.load_optimizer(run.optimizer, content["optimizer"])
        self._honour(content, changes)
        if content["scaler"]:  # else that run had no scale
            run.scaler.load_state_dict(content["scaler"])
        if run.ema is not None and content["ema"] is not None:
            run.ema.load_state_dict(content["ema"], run.strategy.parts)
        run.state = TrainState(**content["state"])
        run.history = History(content["history"])

    def _honour(self, content: dict[str, Any], changes: Changes) -> None:
        """Go on with optimizer, scheduler and frozen layers as requested now."""
        run, now, before = self._run, self._requested, content["run"]["requested"]
        groups = run.optimizer.param_groups
        same_class = "scheduler" not in changes.changed
        for group, old, new in zip(groups, before["groups"], now["groups"], strict=False):
            saved = {name: group[name] for name in group if name not in ("params", "param_names")}
            # A scheduler of another class begins where its optimizer was made.
            group.update(merged_group(old, saved, new) if same_class else new)
        if run.scheduler is not None and same_class:
            state = merged(before["scheduler"], content["scheduler"], now["scheduler"])
            if "_last_lr" in state:
                state["_last_lr"] = [group["lr"] for group in groups]
            run.scheduler.load_state_dict(state)
        asked = "parameters to train" in changes.changed
        trained = now["trained"] if asked else content["trained"]
        for name, parameter in run.model.named_parameters():
            parameter.requires_grad_(name in trained)

    def _load_rank(self, ranks: list[dict[str, Any]], changes: Changes) -> bool:
        """Restore this rank's position; return True if the epoch is restarted."""
        run, rank = self._run, self._run.world.rank
        same = len(ranks) == run.world.size
        if same:
            run.state = TrainState(**ranks[rank]["state"])
            for name, value in ranks[rank]["buffers"].items():
                run.model.get_buffer(name).copy_(value)
        if run.state.step:
            # So that torch knows that the optimizer stepped before the scheduler does.
            run.optimizer._opt_called = True  # type: ignore[attr-defined]
        begins = bool(changes.changed.keys() & POSITION) and run.state.batch > 0
        if begins:
            run.state.start_epoch()
        if rank < len(ranks) and "seed" not in changes.changed:
            restore_rng(ranks[rank]["rng"], run.world.device)
            if same and run.state.batch:
                run.feed.position = ranks[rank]
            elif same:
                run.feed.restore_rng(ranks[rank]["epoch_rng"])
        return begins

    def _load_callbacks(self, states: dict[str, Any], changes: Changes) -> bool:
        """Restore the callbacks; return True if any is reset."""
        run = self._run
        for name, callback in named_callbacks(run.callbacks).items():
            if name in states:
                callback.load_state_dict(states[name])
            if name in changes.stale and not run.is_over:  # else the best is final
                callback.forget()
        if "ReduceLROnPlateau" in changes.stale and isinstance(run.scheduler, ReduceLROnPlateau):
            run.scheduler._reset()  # else it would wait for values of the old kind to come back
        return bool(changes.stale - {"ReduceLROnPlateau"}) and not run.is_over
