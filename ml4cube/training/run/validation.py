"""Passes over the validation data, exact on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import islice
from typing import Any

import torch

from ml4cube.core.errors import InvalidTypeError
from ml4cube.core.same_scaling import check_same_scaling
from ml4cube.training.inputs.batches import (
    Portion,
    StepResult,
    batch_limit,
    kept_generators,
    named_sets,
    sets_by_argument,
)
from ml4cube.training.measure.means import Meters, refuse_non_finite
from ml4cube.training.measure.scores import Scores, check_metrics
from ml4cube.training.ranks.shared_data import exact_loader
from ml4cube.training.ranks.world import World
from ml4cube.training.run.engine import Engine
from ml4cube.training.state import kept_rng


class ValidationMeasures:
    """Loss, metrics and logged values of a validation pass, also of each named set."""

    def __init__(
        self, metrics: Mapping[str, Any], device: torch.device, sets: Iterable[str] = ()
    ) -> None:
        self._meters, self._scores = Meters(), Scores(metrics, device)
        self.loss = self._meters["val_loss"]
        self._sets = {name: ValidationMeasures(metrics, device) for name in sets}

    def add(self, result: StepResult, portion: Portion, set_name: str = "") -> None:
        """Add one batch, of a named set if there are several."""
        if set_name:
            self._sets[set_name].add(result, portion)
        self.loss.add(result.loss.detach(), portion.samples, portion.weight, result.gaps)
        self._scores.update(result, portion.samples, self._meters)
        self._meters.add_logs("val_", result, portion.samples)

    def columns(self, world: World, data: str = "test_data") -> dict[str, float]:
        """Reduce to columns of the History over all ranks; every rank must call this.

        `data` names the argument that gave the batches, for an error.
        """
        columns = self._meters.columns(world, "val_loss", data) | self._scores.compute(world)
        for name, measures in self._sets.items():
            set_columns = measures.columns(world, f"{data}[{name!r}]")
            columns |= {f"{column}/{name}": value for column, value in set_columns.items()}
        return columns


class Validation:
    """The validation data of a run, one set or several by name, and its metrics."""

    def __init__(self, engine: Engine, data: Any, metrics: Mapping[str, Any] | None) -> None:
        self._engine = engine
        self.metrics = check_metrics(metrics)
        self.loader = exact_loader(data, engine.world)
        for batches in named_sets(self.loader).values():
            self._limit(batches)  # so that an invalid limit is refused before an epoch is trained

    def evaluate(self, loader: Any, train: Any) -> dict[str, float]:
        """Validate once, outside any epoch; by default the run's own data; every rank."""
        engine, argument, chosen = self._engine, "test_data", self.loader
        if loader is not None:
            argument = "loader"
            sets = sets_by_argument(argument, loader)
            check_same_scaling({"train_data": train, **sets})
            engine.step.prepare(engine.options, sets)
            chosen = exact_loader(loader, engine.world)
        if chosen is None:
            raise InvalidTypeError("there is nothing to evaluate; give a loader")
        engine.check_models()
        engine.shard()
        engine.sync_buffers()
        training = engine.model.training
        measures, _ = self.measure(lambda run_pass: run_pass(chosen), lambda: False, chosen)
        engine.model.train(training)
        self.refuse_non_finite(measures)
        return measures.columns(engine.world, argument)

    def measure(
        self,
        around_pass: Callable[[Callable[[Any], None]], None],
        must_cut: Callable[[], bool],
        loader: Any = None,
    ) -> tuple[ValidationMeasures, bool]:
        """Run a pass that changes no random state; return True too if `must_cut` ended it early.

        `around_pass` calls what it is given with a loader: the run's own, or that of a user.
        """
        passes: list[tuple[ValidationMeasures, bool]] = []
        sets = named_sets(self.loader if loader is None else loader).values()
        with kept_rng(self._engine.world.device), kept_generators(sets):
            around_pass(partial(self._run_pass, passes, must_cut))
        return passes[-1]

    def refuse_non_finite(self, measures: ValidationMeasures) -> None:
        """Refuse a validation loss that is not finite on any rank; every rank."""
        engine = self._engine
        epoch = engine.run_state.counters.epoch + 1
        refuse_non_finite(engine.world, measures.loss.flush(), "validation", epoch, "batch")

    @torch.no_grad()
    def _run_pass(
        self,
        passes: list[tuple[ValidationMeasures, bool]],
        must_cut: Callable[[], bool],
        loader: Any,
    ) -> None:
        """Evaluate a loader, and add its measures to the passes."""
        engine, sets = self._engine, named_sets(loader)
        names = [name for name in sets if name]  # none of a single set
        measures = ValidationMeasures(self.metrics, engine.world.device, names)
        engine.model.eval()
        weigh = partial(engine.weigh, training=False)
        for name, batches in sets.items():
            used = islice(batches, self._limit(batches))
            for portion in engine.strategy.in_lockstep(map(weigh, used), must_cut):
                if portion is None:
                    passes.append((measures, True))
                    return
                run_batch = partial(self._run_batch, measures, portion, name)
                engine.step.around_batch(run_batch, portion.batch)
        passes.append((measures, False))

    def _run_batch(
        self, measures: ValidationMeasures, portion: Portion, name: str, batch: Any
    ) -> None:
        result = self._engine.forward(self._engine.compiled, batch)
        if portion.samples:
            measures.add(result, portion, name)

    def _limit(self, batches: Any) -> int | None:
        limit = self._engine.options.limit_val_batches
        return batch_limit(batches, limit, "limit_val_batches")
