"""Optimizer steps and evaluation: the one place that runs a model forward and backward.

A step adds the gradients of one or more batches, each times its share of the step's total weight,
so that they are those of all samples of the step in one batch, on any number of ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from ml4cube.core.errors import EmptyPartError, InvalidTypeError, RunError, caller_level, listed
from ml4cube.core.same_scaling import check_same_scaling
from ml4cube.loading.handover import BatchCopy
from ml4cube.training.events import Callback
from ml4cube.training.inputs.batches import batch_limit, describe_batch, kept_generators
from ml4cube.training.inputs.checks import (
    bad_loss,
    check_loader,
    check_trainable,
    refuse_kept_workers,
)
from ml4cube.training.inputs.options import DTYPES, Options
from ml4cube.training.inputs.outside_model import (
    load_outside,
    outside_model,
    trained_parameters,
    untrained_names,
)
from ml4cube.training.inputs.steps import Portion, Step, StepResult, Weight
from ml4cube.training.measure.scores import NonFiniteLoss, check_metrics
from ml4cube.training.measure.validation import TrainMeasures, ValidationMeasures
from ml4cube.training.ranks.clock import StepClock
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.exact_validation import exact_loader
from ml4cube.training.ranks.fsdp import make_strategy
from ml4cube.training.ranks.polling import PollSchedule
from ml4cube.training.ranks.strategy import check_same_model
from ml4cube.training.run.compiling import compiled
from ml4cube.training.run.ema import Ema
from ml4cube.training.run.feed import Feed
from ml4cube.training.state import History, TrainState, kept_rng


class Engine:
    """Model, data and state of a run, which takes optimizer steps and evaluates."""

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
        callbacks: Iterable[Callback] = (),
    ) -> None:
        check_trainable(
            model,
            optimizer,
            scheduler,
            on_batch=options.scheduler_step_on_batch,
            mode=options.mode,
        )
        for name, loader in (("train_data", train), ("test_data", val)):
            if loader is not None:
                check_loader(name, loader)
        data = {"train_data": train, **sets_by_argument("test_data", val)}
        refuse_kept_workers(train, options.snapshot_path)
        check_same_scaling(data)
        step.prepare(options, data)
        self.world, self.options, self.step = world, options, step
        self.metrics = check_metrics(metrics)
        self._optimizer, self.scheduler = optimizer, scheduler
        self.strategy = make_strategy(world, options)
        self._set_model(self.strategy.place(model))
        self._outside: list[torch.Tensor] = []  # what is trained besides the model
        self.strategy.check_outside(self.outside())
        self.feed = Feed(train, world, options, step)
        self.val_loader = exact_loader(val, world)
        for batches in named_sets(self.val_loader).values():
            # Called here, so that an invalid limit is refused before an epoch is trained.
            batch_limit(batches, options.limit_val_batches, "limit_val_batches")
        self.state, self.history = TrainState(), History()
        self.callbacks = [c for c in callbacks if not (options.fast_dev_run and c.writes)]
        self.measures, self.clock = TrainMeasures(self.state), StepClock(world)  # of this epoch
        self.polls = PollSchedule(world)
        self.scaler = torch.amp.GradScaler(world.device.type, enabled=options.precision == "fp16")
        self._autocast_dtype = DTYPES[options.precision]
        self._parameters: list[nn.Parameter] = []  # of the model: torch is slow to collect them
        self._untrained: list[str] = []  # names of those that the optimizer does not hold
        # Which of them were trained when the model was wrapped; None before a run has begun.
        self._wrapped: list[bool] | None = None

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer."""
        if self._optimizer is None:
            raise InvalidTypeError("training needs an optimizer, got None")
        return self._optimizer

    @property
    def monitor(self) -> str:
        """The column of the History that judges the run."""
        return self.options.monitor or ("train_loss" if self.val_loader is None else "val_loss")

    @property
    def is_over(self) -> bool:
        """True if all epochs or steps have been trained."""
        out_of_steps = self._is_out_of_steps() and self.state.batch == 0
        return self.state.epoch >= self.options.epochs or out_of_steps

    def _is_out_of_steps(self) -> bool:
        return self.state.step >= self.feed.max_steps

    def outside(self) -> dict[str, torch.Tensor]:
        """Return by name the tensors that the optimizer trains besides the model."""
        return outside_model(self.model, self._optimizer, self.step.modules)

    def load_weights(
        self, weights: Mapping[str, Any] | None, outside: Mapping[str, Any] | None = None
    ) -> None:
        """Load weights that rank 0 holds into the model of all ranks; every rank.

        `outside` are values for the tensors that are trained besides the model.
        """
        self.strategy.load_from_main(self.model, weights)
        if outside is not None:
            load_outside(self.outside(), outside, "the state of the best epoch")
        self.world.broadcast_tensors(self.outside().values())
        if self.ema is not None:
            self.ema.restart()  # a later run averages from these weights

    def train_batch(self, batch: Any) -> StepResult:
        """Take one optimizer step on one batch, outside any epoch; every rank."""
        self.check_models()
        self._prepare()
        self.module.train()
        portion = self.feed.weigh(batch)
        total = self.feed.total_weight([portion] if portion.samples else [])
        if total is None:
            raise EmptyPartError("the batch to train on must have samples, got none")
        return self.take_step([portion], total)

    def evaluate(self, loader: Any = None) -> dict[str, float]:
        """Validate once, outside any epoch, exactly on any number of ranks; every rank."""
        if loader is not None:
            data = sets_by_argument("loader", loader)
            check_same_scaling({"train_data": self.feed.loader, **data})
            self.step.prepare(self.options, data)
        chosen = self.val_loader if loader is None else exact_loader(loader, self.world)
        if chosen is None:
            raise InvalidTypeError("there is nothing to evaluate; give a loader")
        self.check_models()
        self._shard()
        self.sync_buffers()
        training = self.model.training
        with kept_rng(self.world.device), kept_generators(named_sets(chosen).values()):
            measures, _ = self._evaluate(chosen)
        self.model.train(training)
        self._raise_if_not_finite(measures.loss.flush(), "validation", "batch")
        return measures.columns(self.world, "test_data" if loader is None else "loader")

    @torch.no_grad()
    def predict(self, batches: Iterable[Any], predict: Callable[[Any], Any]) -> Iterator[Any]:
        """Predict batches in eval mode, in the run's precision, on this rank alone."""
        self.model.eval()
        to_device = BatchCopy(self.world.device)
        for batch in batches:
            with self._autocast():
                result = predict(to_device(batch))
            yield result

    # ------------------------------------------------------------------- a step

    def take_step(self, portions: Sequence[Portion], total: Weight) -> StepResult:
        """Take one optimizer step over weighted batches, return the last result; every rank."""
        self.optimizer.zero_grad(set_to_none=True)
        *first, last = portions
        for portion in first:
            self.step.around_batch(partial(self._accumulate, portion, total), portion.batch)
        # The result comes back in a list, because a user's code may be called in between.
        results: list[StepResult] = []
        self.step.around_batch(partial(self._finish_step, last, total, results), last.batch)
        return results[0]

    def _accumulate(self, portion: Portion, total: Weight, batch: Any) -> None:
        """Add the gradients of a batch; they travel between ranks with the last one of the step."""
        with self.strategy.no_sync(self.module):
            self._backward(batch, portion, total)

    def _finish_step(
        self, portion: Portion, total: Weight, results: list[StepResult], batch: Any
    ) -> None:
        """Add the gradients of the last batch, and step the optimizer."""
        results.append(self._backward(batch, portion, total))
        self.strategy.average_gradients(self._outside)
        clip, logs = self.options.gradient_clip, self.options.log_grad_norm
        if clip is not None or logs:
            self.scaler.unscale_(self.optimizer)
            parameters = trained_parameters(self.model, self.optimizer)
            norm = self.strategy.clip(parameters, math.inf if clip is None else clip)
            if logs:
                self.measures.norms.add(norm.detach())
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.state.step += 1
        if self.ema is not None:
            self.ema.update()
        if self.scheduler is not None and self.options.scheduler_step_on_batch:
            self.scheduler.step()

    def _backward(self, batch: Any, portion: Portion, total: Weight) -> StepResult:
        """Add the gradients of a batch by its weight, and measure its loss."""
        result = self._forward(self.module, batch)
        loss, weight = result.loss, portion.weight
        # A number is compared, a tensor is not: that would read it from the device.
        if isinstance(weight, torch.Tensor) or weight != total:
            loss = loss * (weight / total)
        if not loss.requires_grad:
            raise bad_loss(loss)
        torch.autograd.backward(self.scaler.scale(loss))
        self.clock.end_backward()
        self.measures.add(result, portion)
        return result

    def _forward(self, module: nn.Module, batch: Any) -> StepResult:
        """Run a batch forward, in the run's precision."""
        try:
            with self._autocast():
                result = self.step(module, batch)
        except Exception as error:
            error.add_note(f"the batch held {describe_batch(batch)}")
            raise
        if not isinstance(result.loss, torch.Tensor) or result.loss.ndim:
            raise bad_loss(result.loss)
        return result

    def _set_model(self, model: nn.Module) -> None:
        """Set the model, and what is made from its tensors: the compiled model and the average."""
        self.model = model
        self.compiled = compiled(model, self.options.compile, self.world.device)
        # What training calls, wrapped on several ranks. Evaluation calls `compiled`, because the
        # wrapped module would wait for ranks that have fewer batches.
        self.module: nn.Module = self.compiled
        decay = self.options.ema
        self.ema = None if decay is None else Ema(model, decay, self.strategy)

    def _shard(self) -> None:
        """Shard the model over the ranks if the strategy does, and it is not sharded yet."""
        model = self.strategy.shard(self.model, self._optimizer)
        if model is not self.model:
            self._set_model(model)

    def check_models(self) -> None:
        """Refuse models that differ between ranks; every rank."""
        if self.world.size == 1:
            return
        tensors = {**self.model.state_dict(keep_vars=True), **self.outside()}
        tensors = {n: t for n, t in tensors.items() if isinstance(t, torch.Tensor)}
        check_same_model(tensors, self.world)

    def _prepare(self) -> None:
        """Prepare for steps, also after a callback froze or unfroze parameters; every rank."""
        if self._wrapped is None:
            self.feed.compare_sizes()
        self._parameters = list(self.model.parameters())
        self.strategy.sync_trainable(self._parameters)
        self._wrap()
        outside = self.outside()
        self.strategy.check_outside(outside)  # again, because callbacks may have added some
        self._outside = list(outside.values())
        self.world.broadcast_tensors(self._outside)
        self._warn_of_untrained()

    def sync_buffers(self) -> None:
        """Copy the buffers of rank 0 to all ranks, before evaluation; every rank."""
        self.strategy.sync_buffers(self.model)
        self.world.broadcast_tensors(t for t in self.outside().values() if not t.requires_grad)

    def _warn_of_untrained(self) -> None:
        """Warn of trainable parameters that the optimizer does not hold, when they change."""
        names = untrained_names(self.model, self.optimizer)
        if names and names != self._untrained and self.world.is_main:
            of_all = sum(p.requires_grad for p in self._parameters)
            shown = f"{listed(names[:3])}{' and others' if len(names) > 3 else ''}"
            warnings.warn(
                f"the optimizer does not hold {len(names)} of the model's {of_all} trainable "
                f"parameters, which so are not trained: {shown}; make the optimizer when the model "
                "is complete, or freeze them by requires_grad_(False)",
                stacklevel=caller_level(),
            )
        self._untrained = names

    def _wrap(self) -> None:
        """Wrap the model, if other parameters are trained than when it was wrapped; every rank."""
        flags = self.strategy.trainable_flags(self._parameters)
        if flags != self._wrapped:
            self.module = self.strategy.wrap(self.model, self.compiled)
            self._wrapped = flags

    # ------------------------------------------------------------------- a pass

    @torch.no_grad()
    def _evaluate(
        self, loader: Any, must_cut: Callable[[], bool] = lambda: False
    ) -> tuple[ValidationMeasures, bool]:
        """Evaluate a loader; return the sums, and True if `must_cut` ended the pass early."""
        limit, sets = self.options.limit_val_batches, named_sets(loader)
        names = [name for name in sets if name]  # none of a single set
        measures = ValidationMeasures(self.metrics, self.world.device, names)
        self.model.eval()
        weigh = partial(self.feed.weigh, training=False)
        for name, batches in sets.items():
            used = islice(batches, batch_limit(batches, limit, "limit_val_batches"))
            for portion in self.strategy.in_lockstep(map(weigh, used), must_cut):
                if portion is None:
                    return measures, True

                def run_batch(batch: Any, portion: Portion = portion, name: str = name) -> None:
                    result = self._forward(self.compiled, batch)
                    if portion.samples:
                        measures.add(result, portion, name)

                self.step.around_batch(run_batch, portion.batch)
        return measures, False

    def _raise_if_not_finite(self, bad: NonFiniteLoss | None, what: str, unit: str) -> None:
        """Raise on all ranks when a loss is not finite on any; every rank must call this."""
        for rank, found in enumerate(self.world.gather_objects(bad)):
            if found is not None:
                advice = (
                    "The targets of that batch have gaps (NaN); MaskedLoss of "
                    "ml4cube.training.losses leaves them out: loss=MaskedLoss(your_loss)"
                    if found.target_has_gaps
                    else "Look for gaps in that batch, or lower the learning rate"
                )
                raise RunError(
                    f"the {what} loss is {found.loss} on rank {rank}, "
                    f"epoch {self.state.epoch + 1}, {unit} {found.number + 1}; training stopped, "
                    f"the best model is as it was. {advice}"
                )

    def _with_average(self, on: bool = True) -> AbstractContextManager[None]:
        """Return a context in which the model has its averaged weights, or with `on=False` not."""
        return nullcontext() if self.ema is None else self.ema.applied(on)

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return a context of the run's precision."""
        if self._autocast_dtype is None:
            return nullcontext()
        return torch.autocast(self.world.device.type, dtype=self._autocast_dtype)


def named_sets(loader: Any) -> dict[str, Any]:
    """Return validation sets by name; the name of a single one is empty."""
    return dict(loader) if isinstance(loader, Mapping) else {"": loader}


def sets_by_argument(argument: str, loader: Any) -> dict[str, Any]:
    """Return validation sets by the expression that messages name them with: ``loader['sea']``."""
    sets = named_sets(loader).items()
    return {f"{argument}[{name!r}]" if name else argument: batches for name, batches in sets}
