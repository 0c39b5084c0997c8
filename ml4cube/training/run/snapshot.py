"""Snapshots: the whole state of a run in one file, to be resumed on any number of ranks."""

from __future__ import annotations

import copy
import logging
import warnings
from pathlib import Path
from typing import Any, NamedTuple

from torch.optim.lr_scheduler import ReduceLROnPlateau

from ml4cube.core.errors import InvalidValueError, StoreError
from ml4cube.ledger.call import differing, in_words
from ml4cube.training.files.checkpoint import read_file, stored_digest, to_plain, write_file
from ml4cube.training.files.paths import check_writable
from ml4cube.training.inputs.batches import data_facts
from ml4cube.training.inputs.outside_model import load_outside
from ml4cube.training.run.run_id import (
    asked,
    asked_in_vain,
    group_names,
    judged_anew,
    named_callbacks,
    run_id,
    trained_parameters,
    trained_settings,
)
from ml4cube.training.state import History, TrainState, restore_rng

logger = logging.getLogger(__name__)

FORMAT = 7
# Settings without which the position inside an epoch has no meaning.
_POSITION_SETTINGS = {"batch_size", "seed", "loader seed", "ranks"}

Words = dict[str, dict[str, str]]
"""What differs, by kind and name."""


class Changes(NamedTuple):
    """In what a call differs from the one that wrote the snapshot."""

    # What makes it another run; empty if it is the same.
    refused: str
    # What it asks for, and gets.
    changed: Words
    # What it asks of optimizer, scheduler and parameters, which are as in the snapshot.
    in_vain: Words
    # Names of callbacks, or "ReduceLROnPlateau", whose best value so far no longer counts.
    judged_anew: set[str]

    @property
    def settings(self) -> set[str]:
        """Names of the settings that have changed."""
        return set(self.changed.get("settings", {}))


class Snapshot:
    """The file that a run saves its state to, and resumes from."""

    # `run` is a Loop, which cannot be named here, because it makes its Snapshot.

    def __init__(self, run: Any, path: str | Path) -> None:
        self.path = Path(path)
        if run.world.is_main:
            check_writable(self.path)
        self._run = run
        self._id, self._asked = run_id(run), asked(run)
        # What optimizer and scheduler were set to when training began.
        self._settings = trained_settings(run)
        self._saved_at: tuple[int, int] | None = None

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
        ema = None if run.engine.ema is None else run.engine.ema.state_dict()
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
                    "run": self._id.parts,
                    "asked": self._asked,
                    "settings": [self._settings, trained_settings(run)],
                    "groups": group_names(run),
                    "outside": run.outside(),
                    "trained": trained_parameters(run),
                    "gradient_order": run.strategy.gradient_order,
                },
            )
            logger.info("snapshot of epoch %d written to %s", run.state.epoch, self.path)
        # All ranks wait for the file: a launcher may end rank 0 once another rank has ended.
        run.world.barrier()
        self._saved_at = (run.state.epoch, run.state.step)

    def resume(self) -> bool:
        """Continue from the file, if rank 0 sees one; return True if so; every rank."""
        run, path = self._run, self.path
        if not run.world.broadcast(Path(path).exists()):
            return False
        content = self._read()
        # What is not copied into a model or optimizer is copied here, because the file, which may
        # be mapped into memory, will be replaced.
        mapped = ("model", "optimizer", "ema", "outside")
        content |= copy.deepcopy({name: v for name, v in content.items() if name not in mapped})
        if content.get("ml4cube_snapshot") != FORMAT:
            raise StoreError(
                f"{path} is not a snapshot of format {FORMAT}; give another snapshot_path"
            )
        changes = run.world.broadcast(self._compare(content))
        if changes.refused:
            raise InvalidValueError(
                f"{path} is a snapshot of another run: {changes.refused}. Restore the settings of "
                "that run, or start over: give another snapshot_path or delete it"
            )
        try:
            self._load_state(content, changes)
        except (RuntimeError, ValueError, LookupError, TypeError) as error:
            raise InvalidValueError(
                f"{path} is a snapshot of another model, optimizer or scheduler ({error}); give "
                "another snapshot_path"
            ) from error
        restarted = []
        if self._load_position(content["ranks"], changes):
            restarted.append("the current epoch")
        if self._load_callbacks(content["callbacks"], changes):
            restarted.append("the choice of the best epoch")
        self._saved_at = (run.state.epoch, run.state.step)
        self._settings = content["settings"][0]
        if run.world.is_main:
            _warn(path, changes, restarted)
        logger.info("resumed from %s after epoch %d", path, run.state.epoch)
        return True

    def _compare(self, content: dict[str, Any]) -> Changes:
        run = self._run
        refused = differing(content["run"], self._id.parts)
        groups, saved_groups = group_names(run), content["groups"]
        # Callbacks may have added groups to the optimizer since.
        if not refused and saved_groups[: len(groups)] != groups:
            refused["optimizer"] = {"": f"parameters were {saved_groups} and are {groups}"}
        changed = differing(content["asked"], self._asked)
        # A callback of an earlier call may be left out, and a new one has compared nothing yet.
        for name in self._asked.keys() ^ content["asked"].keys():
            if "monitor" in changed.get(name, {}):
                del changed[name]
        before, reached = content["settings"]
        in_vain = asked_in_vain(self._settings, before, reached)
        if "scheduler" in changed.get("settings", {}):  # another class, with other settings
            in_vain.pop("scheduler", None)
        return Changes(in_words(refused), changed, in_vain, set(judged_anew(run, changed)))

    def _read(self) -> dict[str, Any]:
        """Return what is in the file that rank 0 sees; every rank."""
        run, path = self._run, self.path
        digests = run.world.gather_objects(stored_digest(path))
        if len(set(digests)) == 1:
            # Ranks that need only their shards map the file into memory, which they then share.
            return read_file(path, mmap=run.strategy.is_sharded)
        # The file is on a disk that not all nodes share.
        if run.strategy.is_sharded:
            others = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
            raise StoreError(
                f"{path} must be on a disk that all ranks share for strategy='fsdp', but ranks "
                f"{others} do not see the file of rank 0; give another snapshot_path"
            )
        content: dict[str, Any] | StoreError = {}
        if run.world.is_main:
            try:
                content = read_file(path)
            except StoreError as error:
                content = error
        content = run.world.broadcast(content)
        if isinstance(content, StoreError):
            raise content
        return content

    def _rank_state(self) -> dict[str, Any]:
        run, feed = self._run, self._run.feed
        return {
            **(feed.position_before_validation or feed.current_position(run.state)),
            "state": run.state.to_dict(),
            # If not sharded, the model of the snapshot has them: all ranks get those of rank 0.
            "buffers": dict(run.model.named_buffers()) if run.strategy.is_sharded else {},
        }

    def _load_state(self, content: dict[str, Any], changes: Changes) -> None:
        run = self._run
        run.engine.use_average(False)  # an earlier run in this process may have left it applied
        modules = {**run.step.modules, "": run.model}
        parameters = {n: p for prefix, m in modules.items() for n, p in m.named_parameters(prefix)}
        # Callbacks may have added groups of parameters to the optimizer.
        for names in content["groups"][len(run.optimizer.param_groups) :]:
            run.optimizer.add_param_group({"params": [parameters[name] for name in names]})
        run.strategy.load_model(run.model, content["model"])
        load_outside(run.outside(), content["outside"], str(self.path))
        groups = [dict(group) for group in run.optimizer.param_groups]
        run.strategy.load_optimizer(run.optimizer, content["optimizer"])
        run.strategy.gradient_order = content["gradient_order"]
        if "scheduler" in changes.settings:
            self._keep_settings_of_scheduler(groups)
        elif run.scheduler is not None:
            self._load_scheduler(content["scheduler"])
        # Callbacks may have frozen others than the call did.
        for name, parameter in run.model.named_parameters():
            parameter.requires_grad_(name in content["trained"])
        if content["scaler"]:  # empty if that run did not scale its gradients
            run.scaler.load_state_dict(content["scaler"])
        if run.engine.ema is not None and content["ema"] is not None:
            run.engine.ema.load_state_dict(content["ema"])
        run.state = TrainState(**content["state"])
        run.history = History(content["history"])

    def _load_scheduler(self, state: dict[str, Any]) -> None:
        scheduler = self._run.scheduler
        if isinstance(scheduler, ReduceLROnPlateau):
            state["mode"] = scheduler.mode  # belongs to the monitored column
        scheduler.load_state_dict(state)

    def _keep_settings_of_scheduler(self, groups: list[dict[str, Any]]) -> None:
        """Keep what a scheduler of another class than before has added to groups of parameters."""
        optimizer = self._run.optimizer
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.update({n: v for n, v in before.items() if n not in optimizer.defaults})

    def _load_position(self, ranks: list[dict[str, Any]], changes: Changes) -> bool:
        """Restore this rank's position in the data; return True if the epoch is restarted."""
        run, rank = self._run, self._run.world.rank
        same_size = len(ranks) == run.world.size
        if same_size:
            run.state = TrainState(**ranks[rank]["state"])
            for name, value in ranks[rank]["buffers"].items():
                run.model.get_buffer(name).copy_(value)
        if run.state.step:
            # So that torch knows that the optimizer stepped before the scheduler does.
            run.optimizer._opt_called = True
        restarts = run.state.batch > 0 and bool(changes.settings & _POSITION_SETTINGS)
        if restarts:
            run.state.start_epoch()
        if rank < len(ranks) and "seed" not in changes.settings:
            restore_rng(ranks[rank]["rng"], run.world.device)
            if same_size and run.state.batch:  # inside an epoch, the feed restores its generators
                run.feed.position = ranks[rank]
            elif same_size:
                run.feed.restore_rng(ranks[rank]["epoch_rng"])
        return restarts

    def _load_callbacks(self, states: dict[str, Any], changes: Changes) -> bool:
        """Restore the callbacks; return True if any forgets its best value."""
        run = self._run
        # The best value of a run that is over is final.
        forgetting = set() if run.is_over else changes.judged_anew - {"ReduceLROnPlateau"}
        for name, callback in named_callbacks(run.callbacks).items():
            if name in states:
                callback.load_state_dict(states[name])
            if name in forgetting:
                callback.forget()
        if "ReduceLROnPlateau" in changes.judged_anew and isinstance(
            run.scheduler, ReduceLROnPlateau
        ):
            run.scheduler._reset()  # or it would wait for values of the old kind to come back
        return bool(forgetting)


def _warn(path: Path, changes: Changes, restarted: list[str]) -> None:
    """List what a call asks for otherwise than the one that wrote the snapshot."""
    texts = []
    if changes.changed:
        texts.append(f"The run continues with those of this call: {in_words(changes.changed)}")
    if changes.in_vain:
        texts.append(
            "Optimizer and scheduler keep those of the snapshot, although this call asks for "
            f"others: {in_words(changes.in_vain)}"
        )
    if restarted:
        texts.append(f"Restarted: {', '.join(restarted)}")
    if texts:
        warnings.warn(
            f"{path} is a snapshot of a run with other settings. {'. '.join(texts)}", stacklevel=3
        )
