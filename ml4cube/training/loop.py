"""THE loop: the only code that runs an epoch or a step.

Everything else in this package translates arguments into a `Loop`, or hangs on its callbacks.
What it is made of: `Feed` gives the batches, `Strategy` spreads the model over ranks, `Pulse` says
when ranks meet, `Tally` and `make_row` measure, `snapshot` saves.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ml4cube.core.errors import EmptyPartError, InvalidTypeError, InvalidValueError, RunError
from ml4cube.training import snapshot
from ml4cube.training.batches import exact_loader, loader_generator, to_device
from ml4cube.training.callbacks import Callback, logger
from ml4cube.training.checks import check_loader, check_parts
from ml4cube.training.dist import World, explained
from ml4cube.training.feed import Feed, Portion, Weight
from ml4cube.training.options import DTYPES, Options
from ml4cube.training.pulse import PERIOD_S, Pulse
from ml4cube.training.rows import Effort, make_row, mean_over_ranks
from ml4cube.training.scores import Meter, check_metrics
from ml4cube.training.signals import Signals
from ml4cube.training.state import History, TrainState, capture_rng, kept_rng, seeded
from ml4cube.training.steps import Step, StepResult, Supervised
from ml4cube.training.strategy import Strategy
from ml4cube.training.tally import Logs, Tally

__all__ = ["Loop", "Options", "StepResult", "Supervised"]

_HOOKS = (
    "on_train_start",
    "on_epoch_start",
    "on_step_end",
    "on_row",
    "on_epoch_end",
    "on_train_end",
    "on_close",
)


class Loop:
    """Train a model, validate it, and tell callbacks.

    Parameters
    ----------
    model : torch.nn.Module
        Moved to the device of `world`.
    step : callable
        ``step(module, batch)`` → `StepResult`, in training and in validation. Where it has a
        method ``weigh(batch)`` → scalar tensor, that is what the batch's mean loss weighs beside
        those of other batches and ranks; else it weighs its samples.
    optimizer : torch.optim.Optimizer, optional
        Over the model's parameters; a loop without one only evaluates.
    train : iterable, optional
        Loader of training batches; a loop without one trains on single batches only.
    val : iterable, optional
        Loader of validation batches; without one, nothing is validated.
    world : World
        The ranks and this rank's device.
    options : Options
        The settings.
    scheduler : object, optional
        A learning rate scheduler of torch.
    metrics : mapping, optional
        ``{name: metric}``, see `Scores`.
    callbacks : sequence of Callback
        Called in this order.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        If an argument cannot work, before anything starts.
    """

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        optimizer: Optimizer | None = None,
        train: Any = None,
        val: Any = None,
        *,
        world: World,
        options: Options,
        scheduler: Any = None,
        metrics: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        check_parts(model, optimizer, scheduler)
        for name, loader in (("train_data", train), ("test_data", val)):
            if loader is not None:
                check_loader(name, loader)
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise InvalidTypeError(
                    f"callbacks has {callback!r}, no Callback; subclass Callback"
                )
        self.world, self.options = world, options
        self.strategy = Strategy(world, find_unused_parameters=options.find_unused_parameters)
        self.model = self.strategy.place(model)
        self.module: nn.Module = self.model  # what training calls
        self._optimizer, self.scheduler = optimizer, scheduler
        self.feed = Feed(train, world, options, getattr(step, "weigh", None))
        self.val_loader = None if val is None else exact_loader(val, world)
        self.metrics = check_metrics(metrics)
        self.callbacks = list(callbacks)
        self.state, self.history = TrainState(), History()
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=options.precision == "fp16")
        self.pulse = Pulse(world)
        self.saved_at: tuple[int, int] | None = None  # epoch and step
        self.stop_reason: str | None = None
        self.resting_rng: dict[str, Any] | None = None  # while validation draws from generators
        self.step = step
        self._half = DTYPES[options.precision]
        self._scales = self.scaler.is_enabled()
        self._loss, self._logs, self._first_step = Meter(), Logs("train"), 0
        self._prepared = False
        self._signals = Signals(active=False)
        self._hooks = {name: _overridden(self.callbacks, name) for name in _HOOKS}

    @property
    def monitor(self) -> str:
        """Which loss judges an epoch."""
        return "train_loss" if self.val_loader is None else "val_loss"

    @property
    def optimizer(self) -> Optimizer:
        """What takes the steps."""
        if self._optimizer is None:
            raise InvalidTypeError("training needs an optimizer; this loop was given none")
        return self._optimizer

    def stop(self, reason: str) -> None:
        """End training after the epoch under way; any rank may ask for it.

        Parameters
        ----------
        reason : str
            For the log.
        """
        self.stop_reason = self.stop_reason or reason

    def run(self, *, resume: bool = True) -> nn.Module:
        """Train until the end, or from a snapshot on.

        Parameters
        ----------
        resume : bool
            Whether to look for a snapshot; without, the run goes on from memory.

        Returns
        -------
        torch.nn.Module
            The model that was given, as the callbacks left it.

        Raises
        ------
        RunError
            If a loss is not finite, another rank failed, or a signal asked to stop.
        """
        with ExitStack() as stack:
            stack.enter_context(seeded(self.options.seed, self.world))
            stack.enter_context(explained(self.world))
            stack.callback(self._call, "on_close")
            self._signals = stack.enter_context(
                Signals(active=self.options.snapshot_path is not None)
            )
            if resume:
                snapshot.resume(self)
            self._call("on_train_start")
            while not self._is_finished():
                self.run_epoch()
            self.module, self._prepared = self.model, False
            self.save_snapshot()
            self._call("on_train_end")
        self.model.eval()
        return self.model

    def save_snapshot(self) -> None:
        """Write the snapshot, if there is a path for it and something to add to the last one.

        Every rank must call this.
        """
        now = (self.state.epoch, self.state.step)
        if self.options.snapshot_path is not None and self.saved_at != now:
            snapshot.save(self)
            self.saved_at = now

    def train_batch(self, batch: Any) -> StepResult:
        """Take one optimizer step on one batch, outside any epoch; every rank.

        Parameters
        ----------
        batch : Any
            As a loader gives it.

        Returns
        -------
        StepResult
            What its forward pass gave.

        Raises
        ------
        EmptyPartError
            If some rank's batch holds no sample.
        """
        self._prepare()
        self.module.train()
        portion = self.feed.portion(batch)
        total = self.feed.total([portion] if portion.samples else [])
        if total is None:
            raise EmptyPartError("a batch to train on holds no sample; give one that does")
        return self.take_step([portion], total)

    def evaluate(self, loader: Any = None) -> dict[str, float]:
        """Validate once, outside any epoch, exactly on any number of ranks; every rank.

        Parameters
        ----------
        loader : iterable, optional
            Batches; default the loop's own validation loader.

        Returns
        -------
        dict
            ``val_loss``, metrics, and ``val_<name>`` for values that the step logs.

        Raises
        ------
        InvalidTypeError
            If there is no loader.
        EmptyPartError
            If it gives no sample.
        """
        chosen = self.val_loader if loader is None else exact_loader(loader, self.world)
        if chosen is None:
            raise InvalidTypeError("there is nothing to evaluate; give a loader")
        self.strategy.align(self.model)
        training = self.model.training
        with kept_rng(self.world.device):
            tally, _ = self._evaluate(chosen)
        self._refuse(tally.loss.flush(), "validation", "batch")
        self.model.train(training)
        return {"val_loss": mean_over_ranks(self.world, tally.loss)} | tally.compute(self.world)

    @torch.no_grad()
    def predict(
        self, batches: Iterable[Any], fn: Callable[[nn.Module, Any], Any] | None = None
    ) -> Iterator[Any]:
        """Run the model in eval mode, in the run's precision, on this rank alone.

        Parameters
        ----------
        batches : iterable
            As a loader gives them.
        fn : callable, optional
            ``fn(model, batch)`` → anything; default the step's result.

        Yields
        ------
        Any
            What `fn` returned, one per batch.
        """
        call = self.step if fn is None else fn
        self.model.eval()
        for batch in batches:
            with self._autocast():
                result = call(self.model, to_device(batch, self.world.device))
            yield result

    # ------------------------------------------------------------------ an epoch

    def run_epoch(self) -> dict[str, Any]:
        """Train for one epoch, or for what is left of it, and validate; every rank.

        Returns
        -------
        dict
            The row that the History got.
        """
        self._prepare()
        started = time.perf_counter()
        self._call("on_epoch_start")
        self._train()
        seconds = time.perf_counter() - started
        tally = self._validate() if self.val_loader is not None else None
        row = make_row(
            self.world,
            self.state.epoch + 1,
            self._loss,
            None if tally is None else tally.loss,
            self._columns(tally),
            Effort(seconds, self.feed.waited / max(seconds, 1e-9)),
        )
        self._call("on_row", row)
        self.history.append(row)
        self.state.epoch += 1
        self.state.start_epoch()
        self._step_scheduler(row)
        self._call("on_epoch_end", row)
        if any(self.world.maximum([self.stop_reason is not None])):
            self.stop("another rank asked to stop")
        if self.state.epoch % self.options.save_every == 0:
            self.save_snapshot()
        logger.info(
            "epoch %d: train loss %.6g, validation loss %s",
            row["epoch"],
            row["train_loss"],
            row.get("val_loss"),
        )
        return row

    def _is_finished(self) -> bool:
        if self.stop_reason is not None:
            logger.info("training ended after %d epochs: %s", self.state.epoch, self.stop_reason)
            return True
        limit = self.options.max_steps
        out_of_steps = limit is not None and self.state.step >= limit and self.state.batch == 0
        return self.state.epoch >= self.options.epochs or out_of_steps

    def _prepare(self) -> None:
        if not self._prepared:
            self.feed.agree()
            self.module = self.strategy.wrap(self.model, self.model)
            self._prepared = True

    def _columns(self, tally: Tally | None) -> dict[str, Any]:
        """What the History keeps of an epoch besides losses and the table of ranks."""
        columns: dict[str, Any] = self._logs.compute(self.world)
        if tally is not None:
            columns |= tally.compute(self.world)
        return columns | {"lr": float(self.optimizer.param_groups[0]["lr"])}

    def _step_scheduler(self, row: dict[str, Any]) -> None:
        if self.scheduler is None or self.options.scheduler_step_on_batch:
            return
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(row[self.monitor])
        else:
            self.scheduler.step()

    # ---------------------------------------------------------------- training

    def _train(self) -> None:
        """Train for one epoch, or for what is left of it."""
        state, pulse, step_end = self.state, self.pulse, self._hooks["on_step_end"]
        if self.feed.position is None:
            state.start_epoch()
        self._loss, self._logs, self._first_step = Meter(), Logs("train"), state.step
        if state.sums:
            self._loss.load_state_dict(state.sums["loss"])
            self._logs.load_state_dict(state.sums["logs"])
        self.resting_rng = None
        self.module.train()
        pulse.start(state.step)
        for portions, total in self.feed.open(state):
            if not self.model.training:
                self.module.train()
            self.take_step(portions, total)
            for hook in step_end:
                hook(self)
            if pulse.is_due(state.step):
                self._ask()
        self._ask()

    def take_step(self, portions: Sequence[Portion], total: Weight) -> StepResult:
        """Take one optimizer step over some batches, each by its weight; every rank.

        Parameters
        ----------
        portions : sequence of Portion
            The batches of this rank, from `Feed`.
        total : float or torch.Tensor
            What they weigh together, from `Feed`.

        Returns
        -------
        StepResult
            What the last of the batches gave.
        """
        self.optimizer.zero_grad(set_to_none=True)
        for portion in portions[:-1]:
            # Gradients travel between ranks once, with the last batch.
            with self.strategy.no_sync(self.module):
                self._backward(portion, total)
        result = self._backward(portions[-1], total)
        if self.options.gradient_clip is not None:
            self.scaler.unscale_(self.optimizer)
            self.strategy.clip(self.model, self.options.gradient_clip)
        if self._scales:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.state.step += 1
        if self.scheduler is not None and self.options.scheduler_step_on_batch:
            self.scheduler.step()
        return result

    def _backward(self, portion: Portion, total: Weight) -> StepResult:
        """Add a batch's share to the gradients, and its loss to what is measured."""
        result = self._forward(self.module, portion.batch)
        loss, weight = result.loss, portion.weight
        # A number is compared, a tensor is not: that would read it from the device.
        if isinstance(weight, torch.Tensor) or weight != total:
            loss = loss * (weight / total)
        torch.autograd.backward(self.scaler.scale(loss) if self._scales else loss)
        self._loss.add(result.loss.detach(), portion.samples, weight)
        if result.logs:
            self._logs.add(result.logs, portion.samples)
        return result

    def _forward(self, module: nn.Module, batch: Any) -> StepResult:
        """Run a step forward, in the precision asked for."""
        if self._half is None:
            result = self.step(module, batch)
        else:
            with self._autocast():
                result = self.step(module, batch)
        if result.loss.ndim:
            raise InvalidValueError(
                f"loss has shape {tuple(result.loss.shape)}, one number per batch is needed; "
                "use reduction='mean'"
            )
        return result

    # -------------------------------------------------------------- validation

    def _validate(self) -> Tally:
        """Evaluate the raw model: the wrapped one would wait for ranks with fewer batches."""
        self.strategy.align(self.model)
        generator = loader_generator(self.val_loader)
        own = None if generator is None else generator.get_state()
        with kept_rng(self.world.device):
            self.resting_rng = capture_rng(self.world.device)
            while True:
                tally, cut = self._evaluate(self.val_loader)
                if not self._ask(cut=cut):
                    break
            self._refuse(tally.loss.flush(), "validation", "batch")
        if generator is not None and own is not None:
            generator.set_state(own)
        self.resting_rng = None
        return tally

    @torch.no_grad()
    def _evaluate(self, loader: Any) -> tuple[Tally, bool]:
        """Run over a loader; whether it was cut off because this rank is wanted elsewhere."""
        tally = Tally(self.metrics, self.world.device)
        self.model.eval()
        asked = time.perf_counter()
        for batch in loader:
            portion = self.feed.portion(batch)
            if not portion.samples:
                continue
            tally.add(self._forward(self.model, portion.batch), portion)
            if self._signals.save or time.perf_counter() - asked > PERIOD_S:
                asked = time.perf_counter()
                if self._is_called():
                    return tally, True
        return tally, False

    def _is_called(self) -> bool:
        """Whether a signal came here or elsewhere; elsewhere is told without waiting."""
        if self.resting_rng is None:  # an evaluation outside any run
            return False
        if self._signals.save:
            self.world.raise_alarm(f"rank {self.world.rank}: received a signal")
            return True
        return self.world.alarm() is not None

    # ------------------------------------------------------- ranks ask one another

    def _ask(self, *, cut: bool = False) -> bool:
        """Look at losses and signals together with all ranks; return whether any was cut off."""
        bad = self._loss.flush()
        signals = self._signals
        broken, save, stop, any_cut = self.pulse.ask(
            self.state.step, [bad is not None, signals.save, signals.stop, cut]
        )
        if broken:
            window = self.options.gradient_accumulation_steps
            step = None if bad is None else (self._first_step + bad[0] // window, bad[1])
            self._refuse(step, "training", "step")
        if save:
            self._interrupt(stop=stop)
        return any_cut

    def _interrupt(self, *, stop: bool) -> None:
        if self.world.is_main:
            self.world.raise_alarm(None)
        self.state.sums = {"loss": self._loss.state_dict(), "logs": self._logs.state_dict()}
        snapshot.save(self)
        self._signals.deliver()
        if stop:
            raise RunError(
                f"stopped by SIGTERM; {self.options.snapshot_path} holds epoch "
                f"{self.state.epoch + 1} up to step {self.state.step}, start again to go on"
            )
        self._signals.save = False

    def _refuse(self, bad: tuple[int, float] | None, what: str, unit: str) -> None:
        """Raise on all ranks when a loss is not finite on any."""
        found = self.world.gather_objects(bad)
        for rank, entry in enumerate(found):
            if entry is not None:
                raise RunError(
                    f"the {what} loss is {entry[1]} on rank {rank}, epoch {self.state.epoch + 1}, "
                    f"{unit} {entry[0] + 1}; training stopped, the best model is as it was. Look "
                    "for gaps in that batch, or lower the learning rate"
                )

    # ------------------------------------------------------------------- pieces

    def _autocast(self) -> AbstractContextManager[Any]:
        if self._half is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=self._half)

    def _call(self, hook: str, *args: Any) -> None:
        for method in self._hooks[hook]:
            method(self, *args)


def _overridden(callbacks: Sequence[Callback], name: str) -> list[Callable[..., None]]:
    """Resolve hooks once: a step calls those that do something, and no others."""
    base = getattr(Callback, name)
    return [
        getattr(callback, name)
        for callback in callbacks
        if getattr(type(callback), name) is not base
    ]
