"""THE loop: the only code that runs an epoch or a step.

Everything else in this package translates arguments into a `Loop`, or hangs on its callbacks.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from ml4cube.core.errors import (
    EmptyPartError,
    InvalidTypeError,
    InvalidValueError,
    RunError,
    check_choice,
)
from ml4cube.training import snapshot
from ml4cube.training.batches import (
    as_pair,
    count_samples,
    exact_loader,
    fixed_sizes,
    loader_generator,
    set_epoch,
    to_device,
)
from ml4cube.training.callbacks import Callback, logger
from ml4cube.training.dist import World, is_broken_link
from ml4cube.training.scores import Meter, Scores, check_metrics
from ml4cube.training.signals import Signals
from ml4cube.training.state import History, TrainState, capture_rng, kept_rng, restore_rng

_PULSE_S = 1.0  # how long ranks may run without asking one another
_MAX_PULSE_STEPS = 256
_HOOKS = (
    "on_train_start",
    "on_epoch_start",
    "on_step_end",
    "on_epoch_end",
    "on_train_end",
    "on_close",
)
_DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


class StepResult(NamedTuple):
    """What one forward pass gives the loop.

    Parameters
    ----------
    loss : torch.Tensor
        Scalar, the mean over the batch's samples, with its graph.
    pred : torch.Tensor, optional
        For metrics.
    target : torch.Tensor, optional
        For metrics.
    """

    loss: torch.Tensor
    pred: Any = None
    target: Any = None


Step = Callable[[nn.Module, Any], StepResult]


@dataclass(frozen=True)
class Supervised:
    """The usual step: ``loss(model(X), y)``, with a batch read by `as_pair`.

    Parameters
    ----------
    loss : callable
        ``loss(pred, target)`` → scalar tensor.
    """

    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

    def __call__(self, module: nn.Module, batch: Any) -> StepResult:
        """Run the model forward on one batch.

        Parameters
        ----------
        module : torch.nn.Module
            The model, wrapped for several ranks where there are some.
        batch : Any
            On the device already.

        Returns
        -------
        StepResult
            Loss, prediction and target.
        """
        features, target = as_pair(batch)
        pred = module(features)
        loss = self.loss(pred, target)
        if getattr(self.loss, "reduction", "mean") == "sum":
            loss = loss / count_samples(batch)
        return StepResult(loss, pred, target)


@dataclass(frozen=True)
class Options:
    """The settings of a run, checked when made.

    Parameters
    ----------
    epochs : int
        How many to train at most.
    max_steps : int, optional
        Optimizer steps to take at most.
    gradient_accumulation_steps : int
        Batches per optimizer step, weighted by their samples.
    gradient_clip : float, optional
        Largest norm of the gradients, taken over all parameters.
    precision : {"fp32", "bf16", "fp16"}
        What the forward pass computes in; fp16 scales its gradients.
    scheduler_step_on_batch : bool
        Whether the scheduler moves on after every optimizer step, not every epoch.
    seed : int, optional
        Seeds the random generators for the time of training; rank r gets ``seed + r``.
    snapshot_path : str or Path, optional
        File to save to and resume from.
    save_every : int
        Epochs between snapshots.
    find_unused_parameters : bool
        Whether some parameters may get no gradient in a step, on several ranks.

    Raises
    ------
    InvalidValueError
        If a value cannot work.

    Examples
    --------
    >>> Options(epochs=3).precision
    'fp32'
    """

    epochs: int = 10
    max_steps: int | None = None
    gradient_accumulation_steps: int = 1
    gradient_clip: float | None = None
    precision: str = "fp32"
    scheduler_step_on_batch: bool = False
    seed: int | None = None
    snapshot_path: str | Path | None = None
    save_every: int = 10
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, _DTYPES)
        for name in ("epochs", "max_steps", "gradient_accumulation_steps", "save_every"):
            value = getattr(self, name)
            if value is None and name == "max_steps":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidValueError(f"{name}={value!r} is not a count; use 1 or more")
        if self.gradient_clip is not None and not self.gradient_clip > 0:
            raise InvalidValueError(
                f"gradient_clip={self.gradient_clip!r} is not a positive norm; None clips nothing"
            )


class Loop:
    """Train a model, validate it, and tell callbacks.

    Parameters
    ----------
    model : torch.nn.Module
        Moved to the device of `world`.
    step : callable
        ``step(module, batch)`` → `StepResult`, in training and in validation.
    optimizer : torch.optim.Optimizer
        Over the model's parameters.
    train : iterable
        Loader of training batches.
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
        optimizer: Optimizer,
        train: Any,
        val: Any = None,
        *,
        world: World,
        options: Options,
        scheduler: Any = None,
        metrics: Mapping[str, Any] | None = None,
        callbacks: Sequence[Callback] = (),
    ) -> None:
        _check_parts(model, optimizer, train, val, scheduler)
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise InvalidTypeError(
                    f"callbacks has {callback!r}, no Callback; subclass Callback"
                )
        self.world, self.options = world, options
        self.model = model.to(world.device)
        self.module: nn.Module = self.model
        self.step, self.optimizer, self.scheduler = step, optimizer, scheduler
        self.train_loader = train
        self.val_loader = None if val is None else exact_loader(val, world)
        self.metrics = check_metrics(metrics)
        self.callbacks = list(callbacks)
        self.state, self.history = TrainState(), History()
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=options.precision == "fp16")
        self.saved_at: tuple[int, int] | None = None  # epoch and step
        self._scales = self.scaler.is_enabled()
        self._window = options.gradient_accumulation_steps
        self.stop_reason: str | None = None
        self.resting_rng: dict[str, Any] | None = None  # while validation draws from generators
        self.epoch_rng: dict[str, Any] = {}  # where the loader's order came from
        self.position: dict[str, Any] | None = None  # of this rank, in an epoch to be resumed
        self._signals = Signals(active=False)
        self._hooks = {name: _overridden(self.callbacks, name) for name in _HOOKS}

    @property
    def monitor(self) -> str:
        """Which loss judges an epoch."""
        return "train_loss" if self.val_loader is None else "val_loss"

    def stop(self, reason: str) -> None:
        """End training after the epoch under way; any rank may ask for it.

        Parameters
        ----------
        reason : str
            For the log.
        """
        self.stop_reason = self.stop_reason or reason

    def run(self) -> nn.Module:
        """Train until the end, or from a snapshot on.

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
            stack.enter_context(self._seeded())
            stack.enter_context(self._explained())
            stack.callback(self._call, "on_close")
            self._signals = stack.enter_context(
                Signals(active=self.options.snapshot_path is not None)
            )
            snapshot.resume(self)
            self._prepare()
            self._call("on_train_start")
            while not self._is_finished():
                self._run_epoch()
            self.module = self.model
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

    # ------------------------------------------------------------------ an epoch

    def _run_epoch(self) -> None:
        started = time.perf_counter()
        self._call("on_epoch_start")
        train, waited = self._train()
        trained = time.perf_counter() - started
        val, scores = self._validate()
        row = self._make_row(train, val, scores, trained, waited / max(trained, 1e-9))
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

    def _is_finished(self) -> bool:
        if self.stop_reason is not None:
            logger.info("training ended after %d epochs: %s", self.state.epoch, self.stop_reason)
            return True
        limit = self.options.max_steps
        out_of_steps = limit is not None and self.state.step >= limit and self.state.batch == 0
        return self.state.epoch >= self.options.epochs or out_of_steps

    # ---------------------------------------------------------------- training

    def _train(self) -> tuple[Meter, float]:
        """Train for one epoch, or for what is left of it."""
        self.resting_rng = None
        if self.position is None:
            self.state.start_epoch()
        self._meter = meter = Meter()
        meter.total, meter.samples = self.state.loss_sum, self.state.samples
        self._waited, self._first_step = 0.0, self.state.step
        self._start_pulse()
        for window, scale in self._windows(self._open_loader()):
            if not self.model.training:
                self.module.train()
            self._take_step(window, scale)
            self._call("on_step_end")
            if self.state.step >= self._next_pulse:
                self._pulse()
        self._pulse()
        return meter, self._waited

    def _take_step(self, window: list[tuple[Any, int]], scale: float) -> None:
        """One optimizer step over a window of batches, each weighted by its samples."""
        self.optimizer.zero_grad(set_to_none=True)
        for number, (batch, samples) in enumerate(window, start=1):
            # Gradients travel between ranks once, with the window's last batch.
            with self._no_sync() if number < len(window) else nullcontext():
                result = self._forward(self.module, batch)
                weight = samples * scale
                loss = result.loss if weight == 1.0 else result.loss * weight
                torch.autograd.backward(self.scaler.scale(loss) if self._scales else loss)
            self._meter.add(result.loss.detach(), samples)
        if self.options.gradient_clip is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.options.gradient_clip)
        if self._scales:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.state.step += 1
        if self.scheduler is not None and self.options.scheduler_step_on_batch:
            self.scheduler.step()

    def _forward(self, module: nn.Module, batch: Any) -> StepResult:
        with self._autocast():
            result = self.step(module, batch)
        if result.loss.ndim:
            raise InvalidValueError(
                f"loss has shape {tuple(result.loss.shape)}, one number per batch is needed; "
                "use reduction='mean'"
            )
        return result

    def _windows(self, batches: Iterator[Any]) -> Iterator[tuple[list[tuple[Any, int]], float]]:
        """Yield the batches of each optimizer step, and what one sample weighs in it."""
        world, size = self.world, self._window
        while self.options.max_steps is None or self.state.step < self.options.max_steps:
            started = time.perf_counter()
            window = list(itertools.islice(self._move(batches), size))
            self._waited += time.perf_counter() - started
            samples = float(sum(n for _, n in window))
            if not self._even:
                samples, ready = world.total([samples, bool(window)])
                if ready < world.size:
                    # Some rank has no batch left: all end here, or those others would wait
                    # for it in the next step.
                    return
                samples /= world.size
            if not window:
                return
            yield window, 1.0 / samples

    def _move(self, batches: Iterator[Any]) -> Iterator[tuple[Any, int]]:
        for batch in batches:
            self.state.batch += 1
            samples = count_samples(batch)
            if samples:  # a collate function may have dropped every sample
                yield to_device(batch, self.world.device), samples

    def _open_loader(self) -> Iterator[Any]:
        """Start the epoch's batches, or go on where a snapshot inside the epoch left them."""
        loader, position = self.train_loader, self.position
        self.position = None
        self.module.train()
        set_epoch(loader, self.state.epoch)
        if position is None:
            self.epoch_rng = self.capture_loader_rng()
            first: Iterator[Any] = iter(loader)
            return first
        self.epoch_rng = position["epoch_rng"]
        self.restore_loader_rng(self.epoch_rng)
        if position["loader"] is not None:
            loader.load_state_dict(position["loader"])
        batches: Iterator[Any] = iter(loader)
        if position["loader"] is None:
            for _ in range(self.state.batch):
                next(batches, None)
        restore_rng(position["rng"], self.world.device)
        return batches

    def capture_loader_rng(self) -> dict[str, Any]:
        """Return the state of all generators that decide on the order of the next epoch.

        Returns
        -------
        dict
            As `capture_rng`, and ``loader`` for a generator of the loader's own.
        """
        generator = loader_generator(self.train_loader)
        own = {} if generator is None else {"loader": generator.get_state()}
        return capture_rng(self.world.device) | own

    def restore_loader_rng(self, state: Mapping[str, Any]) -> None:
        """Put all those generators back.

        Parameters
        ----------
        state : mapping
            From `capture_loader_rng`.
        """
        restore_rng(state, self.world.device)
        generator = loader_generator(self.train_loader)
        if generator is not None and "loader" in state:
            generator.set_state(state["loader"])

    # -------------------------------------------------------------- validation

    def _validate(self) -> tuple[Meter, dict[str, float]]:
        """Evaluate the raw model: the wrapped one would wait for ranks with fewer batches."""
        if self.val_loader is None:
            return Meter(), {}
        self.world.spread(self.model.buffers())
        generator = loader_generator(self.val_loader)
        own = None if generator is None else generator.get_state()
        with kept_rng(self.world.device), torch.no_grad():
            self.resting_rng = capture_rng(self.world.device)
            self.model.eval()
            while True:
                meter, scores, cut = self._evaluate(self.val_loader)
                if not self._pulse(cut=cut):
                    break
            bad = meter.flush()
            self._refuse(bad, "validation", "batch")
            result = scores.compute(self.world)
        if generator is not None and own is not None:
            generator.set_state(own)
        self.resting_rng = None
        self.module.train()
        return meter, result

    def _evaluate(self, loader: Any) -> tuple[Meter, Scores, bool]:
        meter, scores = Meter(), Scores(self.metrics, self.world.device)
        asked = time.perf_counter()
        for batch in loader:
            samples = count_samples(batch)
            if not samples:
                continue
            result = self._forward(self.model, to_device(batch, self.world.device))
            meter.add(result.loss, samples)
            if self.metrics:
                scores.update(_full(result.pred), _full(result.target), samples)
            if self._signals.save or time.perf_counter() - asked > _PULSE_S:
                asked = time.perf_counter()
                if self._is_called():
                    return meter, scores, True
        return meter, scores, False

    def _is_called(self) -> bool:
        """Whether a signal came here or elsewhere; elsewhere is told without waiting."""
        if self._signals.save:
            self.world.raise_alarm(f"rank {self.world.rank}: received a signal")
            return True
        return self.world.alarm() is not None

    # ------------------------------------------------------- ranks ask one another

    def _start_pulse(self) -> None:
        self._next_pulse = self.state.step + 1
        self._pulse_from = (self.state.step, time.perf_counter())

    def _pulse(self, *, cut: bool = False) -> bool:
        """Look at losses and signals together with all ranks; return whether any was cut off."""
        bad = self._meter.flush()
        steps, since = self._pulse_from
        pace = (time.perf_counter() - since) / max(self.state.step - steps, 1)
        broken, save, stop, any_cut, slowest = self.world.maximum(
            [bad is not None, self._signals.save, self._signals.stop, cut, pace]
        )
        if broken:
            step = None if bad is None else (self._first_step + bad[0] // self._window, bad[1])
            self._refuse(step, "training", "step")
        if save:
            self._interrupt(stop=bool(stop))
        self._start_pulse()
        steps = int(_PULSE_S / max(slowest, 1e-9))
        self._next_pulse = self.state.step + max(1, min(steps, _MAX_PULSE_STEPS))
        return bool(any_cut)

    def _interrupt(self, *, stop: bool) -> None:
        if self.world.is_main:
            self.world.raise_alarm(None)
        self.state.loss_sum, self.state.samples = self._meter.total, self._meter.samples
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

    def _prepare(self) -> None:
        sizes = self.world.gather_objects(fixed_sizes(self.train_loader))
        # Where all ranks are known to get the same batches, no step needs to ask.
        self._even = self.world.size == 1 or (None not in sizes and len(set(sizes)) == 1)
        self._host = socket.gethostname()
        if not self._even and None not in sizes:
            logger.warning(
                "ranks get unequal training batches (batches, size, last) %s; every epoch ends "
                "with the rank that has least",
                sizes,
            )
        if self.world.size > 1 and not self._is_finished():
            cuda = self.world.device.type == "cuda"
            self.module = DistributedDataParallel(
                self.model,
                device_ids=[self.world.device] if cuda else None,
                find_unused_parameters=self.options.find_unused_parameters,
                gradient_as_bucket_view=True,
            )

    def _make_row(
        self, train: Meter, val: Meter, scores: dict[str, float], seconds: float, wait: float
    ) -> dict[str, Any]:
        """Reduce the epoch to one row; rank 0's, so that all decide on the same bits."""
        numbers = [train.samples, train.total, val.samples, val.total, seconds, wait]
        gathered = self.world.gather(numbers)
        places = self.world.gather_objects((str(self.world.device), self._host))
        _check_seen(gathered, self.val_loader is not None)
        row: dict[str, Any] = {
            "epoch": self.state.epoch + 1,
            "train_loss": sum(g[1] for g in gathered) / sum(g[0] for g in gathered),
        }
        if self.val_loader is not None:
            row["val_loss"] = sum(g[3] for g in gathered) / sum(g[2] for g in gathered)
        row |= scores
        row["lr"] = float(self.optimizer.param_groups[0]["lr"])
        row["seconds"] = max(g[4] for g in gathered)
        row["ranks"] = [
            _rank_row(rank, place, values)
            for rank, (place, values) in enumerate(zip(places, gathered, strict=True))
        ]
        return self.world.share(row)

    def _step_scheduler(self, row: dict[str, Any]) -> None:
        if self.scheduler is None or self.options.scheduler_step_on_batch:
            return
        if isinstance(self.scheduler, ReduceLROnPlateau):
            self.scheduler.step(row[self.monitor])
        else:
            self.scheduler.step()

    def _call(self, hook: str, *args: Any) -> None:
        for method in self._hooks[hook]:
            method(self, *args)

    def _no_sync(self) -> AbstractContextManager[None]:
        if isinstance(self.module, DistributedDataParallel):
            return self.module.no_sync()
        return nullcontext()

    def _autocast(self) -> AbstractContextManager[Any]:
        dtype = _DTYPES[self.options.precision]
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=dtype)

    @contextmanager
    def _seeded(self) -> Iterator[None]:
        """Seed the global generators, which dropout reads, and give them back afterwards."""
        if self.options.seed is None:
            yield
            return
        with kept_rng(self.world.device):
            torch.manual_seed(self.options.seed + self.world.rank)
            yield

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Tell the other ranks of an error here, and say here what broke elsewhere."""
        try:
            yield
        except Exception as error:
            cause = self.world.alarm()
            if is_broken_link(error):
                said = cause or "no rank said why: one was killed or froze"
                raise RunError(f"rank {self.world.rank} lost the other ranks: {said}") from error
            if cause is None:
                self.world.raise_alarm(f"rank {self.world.rank}: {type(error).__name__}: {error}")
            raise


def _rank_row(rank: int, place: tuple[str, str], values: Sequence[float]) -> dict[str, Any]:
    train_n, train_sum, val_n, val_sum, seconds, wait = values
    return {
        "rank": rank,
        "device": place[0],
        "host": place[1],
        "train_n": int(train_n),
        "train_loss": train_sum / train_n if train_n else None,
        "val_n": int(val_n),
        "val_loss": val_sum / val_n if val_n else None,
        "seconds": seconds,
        "data_wait": wait,
    }


def _check_parts(model: Any, optimizer: Any, train: Any, val: Any, scheduler: Any) -> None:
    if not isinstance(model, nn.Module):
        raise InvalidTypeError(f"model={model!r} is no torch.nn.Module; give the model itself")
    if not isinstance(optimizer, Optimizer):
        raise InvalidTypeError(f"optimizer={optimizer!r} is no torch.optim.Optimizer")
    mine = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not mine:
        raise InvalidValueError("model has no parameter to train; check requires_grad")
    if not any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
        raise InvalidValueError(
            "optimizer holds none of the model's parameters; make it from model.parameters() of "
            "the model that is trained"
        )
    for name, loader in (("train_data", train), ("test_data", val)):
        _check_loader(name, loader, optional=name == "test_data")
    if scheduler is not None and not callable(getattr(scheduler, "step", None)):
        raise InvalidTypeError(f"scheduler={scheduler!r} has no step(); give one of torch's")


def _check_loader(name: str, loader: Any, *, optional: bool) -> None:
    if loader is None and optional:
        return
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise InvalidTypeError(f"{name}={loader!r} cannot be iterated; give a loader of batches")
    if isinstance(loader, Iterator):
        raise InvalidTypeError(
            f"{name} is an iterator, which is used up after one epoch; give a loader or a list"
        )


def _check_seen(gathered: list[list[float]], validates: bool) -> None:
    if not sum(g[0] for g in gathered):
        raise EmptyPartError(
            "train_data gave no batch; it is empty, or drop_last dropped its only batch: use a "
            "smaller batch_size"
        )
    if validates and not sum(g[2] for g in gathered):
        raise EmptyPartError("test_data gave no sample; give a part that is not empty, or None")


def _overridden(callbacks: Sequence[Callback], name: str) -> list[Callable[..., None]]:
    """Resolve hooks once: a step calls those that do something, and no others."""
    base = getattr(Callback, name)
    return [
        getattr(callback, name)
        for callback in callbacks
        if getattr(type(callback), name) is not base
    ]


def _full(value: Any) -> Any:
    """Metrics compute in full precision, whatever the forward pass did."""
    if isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16):
        return value.float()
    return value
