"""Optimizer steps and forward passes: the one place that runs a model forward and backward.

A step adds the gradients of one or more batches, each times its share of the step's total weight,
so that they are those of all samples of the step in one batch, on any number of ranks.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ml4cube.core.errors import RunError, caller_level, listed
from ml4cube.loading.handover import BatchCopy
from ml4cube.training.inputs.batches import Portion, StepResult, Weight, describe_batch
from ml4cube.training.inputs.checks import bad_loss, check_trainable
from ml4cube.training.inputs.options import DTYPES, Options
from ml4cube.training.inputs.outside_model import (
    held_parameters,
    load_outside,
    outside_model,
    trainable,
    trained_parameters,
)
from ml4cube.training.ranks.fsdp import make_strategy
from ml4cube.training.ranks.world import World
from ml4cube.training.run.ema import Ema
from ml4cube.training.run.run_state import RunState
from ml4cube.training.run.steps import Step

_NO_CONTEXT: AbstractContextManager[Any] = nullcontext()


class Engine:
    """A model on this rank, which takes optimizer steps and predicts."""

    def __init__(
        self,
        model: nn.Module,
        step: Step,
        optimizer: Optimizer | None = None,
        scheduler: Any = None,
        *,
        world: World,
        options: Options,
        run_state: RunState | None = None,
    ) -> None:
        check_trainable(model, optimizer, scheduler, options)
        self.world, self.options, self.step = world, options, step
        self.optimizer: Any = optimizer
        self.scheduler = scheduler
        self.run_state = run_state or RunState()
        if self.run_state.scaler is None:
            kind, is_half = world.device.type, options.precision == "fp16"
            self.run_state.scaler = torch.amp.GradScaler(kind, enabled=is_half)
        self.strategy = make_strategy(world, options)
        self._set_model(self.strategy.place(model))
        if self.ema is not None:
            self.ema.continue_from(self.run_state.average)
        self._outside: list[Tensor] = []  # what is trained besides the model
        self.strategy.check_outside(self.outside())
        self.begin_measures()
        self._to_device = BatchCopy(world.device)
        self._scales = self.run_state.scaler.is_enabled()
        self._autocast_dtype = DTYPES[options.precision]
        self._parameters: list[nn.Parameter] = []  # of the model: torch is slow to collect them
        self._untrained: list[str] = []  # names of those that the optimizer does not hold
        # Which of them were trained when the model was wrapped; None before a run has begun.
        self._wrapped: list[bool] | None = None

    def begin_measures(self) -> None:
        """Begin to measure losses and times."""
        self.run_state.measure(self.world, times_steps=not self.strategy.is_sharded)

    def outside(self) -> dict[str, Tensor]:
        """Return by name the tensors that the optimizer trains besides the model."""
        return outside_model(self.model, self.optimizer, self.step.modules)

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

    # ------------------------------------------------------------------- the model

    def _set_model(self, model: nn.Module) -> None:
        """Set the model, and what is made from its tensors: the compiled model and the average."""
        self.model = model
        self.compiled = compiled(model, self.options.compile, self.world.device)
        # What training calls, wrapped on several ranks. Evaluation calls `compiled`, because the
        # wrapped module would wait for ranks that have fewer batches.
        self.module: nn.Module = self.compiled
        self.ema: Ema | None = None
        if self.options.ema is not None:
            self.ema = Ema(model, self.options.ema, self.strategy)

    def shard(self) -> None:
        """Shard the model over the ranks if the strategy does, and it is not sharded yet."""
        model = self.strategy.shard(self.model, self.optimizer)
        if model is not self.model:
            self._set_model(model)

    def check_models(self) -> None:
        """Refuse models that differ between ranks; every rank."""
        if self.world.size > 1:
            self.strategy.check_same({**self.model.state_dict(keep_vars=True), **self.outside()})

    def prepare(self) -> None:
        """Prepare for steps, also after a callback froze or unfroze parameters; every rank."""
        self._parameters = list(self.model.parameters())
        self.strategy.sync_trainable(self._parameters)
        self.wrap()
        outside = self.outside()
        self.strategy.check_outside(outside)  # again, because callbacks may have added some
        self._outside = list(outside.values())
        self.world.broadcast_tensors(self._outside)
        self._warn_of_untrained()

    def wrap(self) -> None:
        """Wrap the model, if other parameters are trained than when it was wrapped; every rank."""
        flags = self.strategy.trainable_flags(self._parameters)
        if flags != self._wrapped:
            self.module = self.strategy.wrap(self.model, self.compiled)
            self._wrapped = flags

    def unwrap(self) -> None:
        """Take the wrapper off at the end of a run."""
        self.module, self._wrapped = self.compiled, None

    def sync_buffers(self) -> None:
        """Copy the buffers of rank 0 to all ranks, before evaluation; every rank."""
        self.strategy.sync_buffers(self.model)
        self.world.broadcast_tensors(t for t in self.outside().values() if not t.requires_grad)

    def with_average(self, on: bool = True) -> AbstractContextManager[None]:
        """Return a context in which the model has its averaged weights, or with `on=False` not."""
        if self.ema is None:
            return nullcontext()
        return self.ema.applied(on)

    def use_average(self, on: bool) -> None:
        """Give the model its averaged weights, or its own, if there is an average."""
        if self.ema is not None:
            self.ema.apply(on)

    def _warn_of_untrained(self) -> None:
        """Warn of trainable parameters that the optimizer does not hold, when they change."""
        every, held = trainable(self.model, self.step.modules), set(held_parameters(self.optimizer))
        names = [name for name, parameter in every.items() if parameter not in held]
        if names and names != self._untrained and self.world.is_main:
            shown = listed(names[:3])
            if len(names) > 3:
                shown += " and others"
            warnings.warn(
                f"the optimizer does not hold {len(names)} of the {len(every)} trainable "
                f"parameters of the model and its loss, which so are not trained: {shown}; make "
                "the optimizer when the model is complete, or freeze them by requires_grad_(False)",
                stacklevel=caller_level(),
            )
        self._untrained = names

    # ------------------------------------------------------------------- batches

    def weigh(self, batch: Any, training: bool = True) -> Portion:
        """Return a batch on the device, with its weight."""
        batch = self._to_device(batch)
        samples = self.step.count(batch, training)
        if not samples:
            return Portion(batch, 0, 0.0)
        weight = self.step.weigh(batch, training)
        if weight is None:
            return Portion(batch, samples, samples)
        # A loss of a user may return a number, which would be taken for a number of samples.
        return Portion(batch, samples, torch.as_tensor(weight, device=self.world.device))

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

    def forward(self, module: nn.Module, batch: Any) -> StepResult:
        """Run a batch forward, in the run's precision."""
        try:
            with self._autocast():
                result = self.step(module, batch)
        except Exception as error:
            error.add_note(f"the batch held {describe_batch(batch)}")
            raise
        if not isinstance(result.loss, Tensor) or result.loss.ndim:
            raise bad_loss(result.loss)
        return result

    @torch.no_grad()
    def predict(self, batches: Iterable[Any], predict: Callable[[Any], Any]) -> Iterator[Any]:
        """Predict batches in eval mode, in the run's precision, on this rank alone."""
        self.model.eval()
        for batch in batches:
            with self._autocast():
                result = predict(self._to_device(batch))
            yield result

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
        self._clip()
        if self._scales:
            self.run_state.scaler.step(self.optimizer)
            self.run_state.scaler.update()
        else:
            self.optimizer.step()
        self.run_state.counters.step += 1
        if self.ema is not None:
            self.ema.update()
        if self.scheduler is not None and self.options.scheduler_step_on_batch:
            self.scheduler.step()

    def _clip(self) -> None:
        """Clip the gradients, and measure their norm, as far as that is asked for."""
        limit = self.options.gradient_clip
        if limit is None and not self.options.log_grad_norm:
            return
        self.run_state.scaler.unscale_(self.optimizer)
        parameters = trained_parameters(self.model, self.optimizer)
        norm = self.strategy.clip(parameters, limit or math.inf)
        if self.options.log_grad_norm:
            self.run_state.measures.add_norm(norm.detach())

    def _backward(self, batch: Any, portion: Portion, total: Weight) -> StepResult:
        """Add the gradients of a batch by its weight, and measure its loss."""
        result = self.forward(self.module, batch)
        loss, weight = result.loss, portion.weight
        # A number is compared, a tensor is not: that would read it from the device.
        if isinstance(weight, Tensor) or weight != total:
            loss = loss * (weight / total)
        if not loss.requires_grad:
            raise bad_loss(loss)
        if self._scales:
            loss = self.run_state.scaler.scale(loss)
        torch.autograd.backward(loss)
        self.run_state.times.step_clock.end_backward()
        self.run_state.measures.add(result, portion)
        return result

    def _autocast(self) -> AbstractContextManager[Any]:
        """Return a context of the run's precision."""
        if self._autocast_dtype is None:
            return _NO_CONTEXT
        return torch.autocast(self.world.device.type, dtype=self._autocast_dtype)


def compiled(
    model: nn.Module, setting: bool | str | Mapping[str, Any], device: torch.device
) -> nn.Module:
    """Return a model that computes the same through `torch.compile`."""
    if setting is False:
        return model
    arguments: Mapping[str, Any] = {}
    if isinstance(setting, str):
        arguments = {"backend": setting}
    elif isinstance(setting, Mapping):
        arguments = setting
    try:
        # Without this trial, a missing compiler is an error deep inside the first step, after all
        # loaders have started.
        torch.compile(lambda x: x * 2, **arguments)(torch.ones(2, device=device))
    except Exception as error:
        # Backends and what they call raise all kinds of errors.
        reason = str(error).strip().split("\n")[0]
        raise RunError(
            f"compile={setting!r}: torch.compile fails here ({type(error).__name__}: {reason}); "
            "install a C++ compiler (on GPUs Triton), or leave compile out"
        ) from error
    return cast(nn.Module, torch.compile(model, **arguments))
