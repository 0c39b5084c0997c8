"""The training batches of an epoch, grouped into optimizer steps, and the position among them.

The epoch of all ranks ends as soon as one has no batch for a step, so that no rank waits for ever.
"""

from __future__ import annotations

import itertools
import logging
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ml4cube.training.inputs.batches import (
    Portion,
    Weight,
    batch_limit,
    fixed_sizes,
    loader_generator,
    set_epoch,
)
from ml4cube.training.ranks.shared_data import share_out
from ml4cube.training.run.engine import Engine
from ml4cube.training.run.run_state import RunState
from ml4cube.training.state import TrainState, capture_rng, restore_rng

logger = logging.getLogger(__name__)


class Feed:
    """The training loader, the position of the run in it, and the weights of its batches."""

    def __init__(self, loader: Any, engine: Engine) -> None:
        self.loader, self._engine = loader, engine
        self._world, self._options = engine.world, engine.options
        # All ranks have batches of the same number and sizes.
        self.is_even = engine.world.size == 1
        self.epoch_rng: dict[str, Any] = {}  # the state of all generators when the epoch began
        self.position: Mapping[str, Any] | None = None  # from a snapshot: where to open the loader
        # Set during a validation: what a snapshot that is saved then holds, because the loader may
        # also be the one that is validated.
        self.position_before_validation: Mapping[str, Any] | None = None
        self.ended = False  # the epoch is over: some rank has no more batches
        self.used_up = False  # this rank's loader has no more batches
        self._max_steps = self._options.max_steps or sys.maxsize
        self._set_max_batches()

    def share_out(self) -> None:
        """Share the training samples out among ranks; every rank."""
        if share_out(self.loader, self._world):
            self._set_max_batches()  # which may be a fraction of the loader
        self.compare_sizes()

    @property
    def is_out_of_steps(self) -> bool:
        """True if all optimizer steps of the run are done."""
        return self._engine.run_state.counters.step >= self._max_steps

    @property
    def steps(self) -> int | None:
        """Optimizer steps of an epoch; None if the loader has no length."""
        sizes = self._used_sizes()
        if sizes is None:
            return None
        return self.steps_of(sizes[0])

    def steps_of(self, batches: int) -> int:
        """Return the number of optimizer steps for a number of batches."""
        return -(-batches // self._options.gradient_accumulation_steps)

    def compare_sizes(self) -> None:
        """Compare the number and sizes of batches on all ranks; every rank must call this."""
        own_sizes = None
        if not self._engine.step.counts_itself:
            own_sizes = self._used_sizes()
        sizes = self._world.gather_objects(own_sizes)
        self.is_even = self._world.size == 1 or (None not in sizes and len(set(sizes)) == 1)
        if not self.is_even and None not in sizes:
            logger.warning(
                "ranks have unequal training batches (batches, size, last) %s; every epoch ends "
                "when the rank with the fewest batches has none left",
                sizes,
            )

    def open(self, run_state: RunState) -> Iterator[tuple[list[Portion], Weight]]:
        """Yield the batches of each step and their total weight; start at `position` if set."""
        state, times = run_state.counters, run_state.times
        with times.data_wait:
            # Loaders may start workers, and skip the batches that a resumed epoch has had.
            batches = self._open_loader(state)
        if self.ended:
            return
        batches_per_step = self._options.gradient_accumulation_steps
        needs_equal_counts = self._options.strategy == "fsdp" and not self.is_even
        while not self.is_out_of_steps:
            portions = []
            with times.data_wait:
                for batch in batches:
                    state.batch += 1
                    portion = self._engine.weigh(batch)
                    if portion.samples:
                        portions.append(portion)
                        if len(portions) == batches_per_step:
                            break
                else:  # the loader has no more batches, or reached the limit
                    self.used_up = state.batch < self._max_batches
            drawn = time.perf_counter()
            if needs_equal_counts:
                # Ranks fetch parameters from one another in every batch of a step, so all use as
                # many batches as the rank with the fewest.
                (most_missing,) = self._world.maximum([batches_per_step - len(portions)])
                portions = portions[: batches_per_step - int(most_missing)]
            total = self.total_weight(portions)
            times.rank_wait_s += time.perf_counter() - drawn
            if total is None:
                self.ended = True
                return
            yield portions, total

    def total_weight(self, portions: list[Portion]) -> Weight | None:
        """Return the mean over ranks of the weight of a step's batches; every rank.

        The mean, because gradients are averaged over ranks, too. None if a rank has no batch.
        """
        # Either all batches of a run have weights, as tensors, or their numbers of samples count.
        has_weights = bool(portions) and isinstance(portions[0].weight, torch.Tensor)
        world = self._world
        samples: float = sum(portion.samples for portion in portions)
        if not self.is_even:
            samples, ranks_with_batches = world.total([samples, bool(portions)])
            if ranks_with_batches < world.size:
                return None
            samples /= world.size
        if not has_weights:
            return samples or None
        weights = torch.stack([torch.as_tensor(portion.weight) for portion in portions])
        total = world.sum_tensor(weights.sum().to(world.device, torch.float32))
        # Not 0, so that the loss and gradients of a step in which nothing counts are 0, not NaN.
        return total.clamp_min(torch.finfo(torch.float32).tiny) / world.size

    def current_position(self, state: TrainState) -> dict[str, Any]:
        """Return the state of the generators and, inside an epoch, the position in the loader."""
        has_state = state.batch > 0 and hasattr(self.loader, "load_state_dict")
        return {
            "rng": capture_rng(self._world.device),
            "loader": self.loader.state_dict() if has_state else None,
            "epoch_rng": self.epoch_rng if state.batch else self.capture_rng(),
            "ended": self.ended,
            "used_up": self.used_up,
        }

    def capture_rng(self) -> dict[str, Any]:
        """Return the state of all generators that decide the order of the next epoch."""
        generator = loader_generator(self.loader)
        state = {}
        if generator is not None:
            state = {"loader": generator.get_state()}
        return capture_rng(self._world.device) | state

    def restore_rng(self, state: Mapping[str, Any]) -> None:
        """Restore the generators from `capture_rng`."""
        restore_rng(state, self._world.device)
        generator = loader_generator(self.loader)
        if generator is not None and "loader" in state:
            generator.set_state(state["loader"])

    def _set_max_batches(self) -> None:
        limit = self._options.limit_train_batches
        self._max_batches = batch_limit(self.loader, limit, "limit_train_batches") or sys.maxsize

    def _used_sizes(self) -> tuple[int, int, int] | None:
        """Return the number of batches used, their size, and that of the last; None if unknown."""
        sizes = fixed_sizes(self.loader)
        if sizes is None or self._max_batches >= sizes[0]:
            return sizes
        return self._max_batches, sizes[1], sizes[1]  # the last batch is then a full one

    def _open_loader(self, state: TrainState) -> Iterator[Any]:
        """Iterate over the batches of an epoch, or over those left of it from `position`."""
        loader, position = self.loader, self.position
        self.position, self.ended, self.used_up = None, False, False
        set_epoch(loader, state.epoch)
        if position is None:
            self.epoch_rng = self.capture_rng()
            return itertools.islice(loader, self._max_batches)
        self.epoch_rng = position["epoch_rng"]
        self.restore_rng(self.epoch_rng)
        self.ended, self.used_up = position["ended"], position["used_up"]
        remaining = max(0, self._max_batches - state.batch)
        if self.ended or self.used_up or self.is_out_of_steps:
            remaining = 0
        if position["loader"] is None:
            batches = iter(loader)
            # A loader that is used up was also asked for a batch after its last one.
            for _ in range(state.batch + self.used_up):
                next(batches, None)
        else:
            loader.load_state_dict(position["loader"])
            batches = iter(loader)
            if remaining == 0:
                # The loader must be iterated once, or its next epoch would start at this position.
                next_batch = next(batches, None)
                batches = iter(())
                if self.used_up and next_batch is not None:
                    # It was at the start of the next epoch, to which this batch belongs.
                    loader.load_state_dict(position["loader"])
        restore_rng(position["rng"], self._world.device)
        return itertools.islice(batches, remaining)
