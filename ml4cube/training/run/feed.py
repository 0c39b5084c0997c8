"""The training batches of an epoch, in the groups that one optimizer step takes."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ml4cube.loading.handover import to_device
from ml4cube.training.inputs.batches import (
    fixed_sizes,
    limit_of,
    loader_generator,
    set_epoch,
)
from ml4cube.training.inputs.options import Options
from ml4cube.training.inputs.steps import Portion, Step, Weight
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.unshared_data import share_out
from ml4cube.training.state import TrainState, capture_rng, restore_rng

logger = logging.getLogger(__name__)


class Feed:
    """The training loader, the position of the run in it, and the weights of its batches."""

    def __init__(self, loader: Any, world: World, options: Options, step: Step) -> None:
        # even: all ranks have equal batches
        self.loader, self.even = loader, world.size == 1
        # seconds of this epoch: waiting for batches, and for other ranks
        self.waited = self.asked = 0.0
        self.epoch_rng: dict[str, Any] = {}
        self.position: dict[str, Any] | None = None
        self.paused: dict[str, Any] | None = None  # the position, while validation runs
        # ended: some rank has no more batches, so the epoch is over; used_up: this loader has none
        self.ended = self.used_up = False
        self._world, self._step = world, step
        self._lockstep = options.strategy == "fsdp"
        self._size, self._max_steps = options.gradient_accumulation_steps, options.max_steps
        self._share = options.limit_train_batches
        self._limit = limit_of(loader, self._share, "limit_train_batches")

    def share_out(self) -> None:
        """Share the training samples out among ranks; every rank."""
        if share_out(self.loader, self._world):
            self._limit = limit_of(self.loader, self._share, "limit_train_batches")

    @property
    def steps(self) -> int | None:
        """Optimizer steps of an epoch; None if the loader has no length."""
        sizes = fixed_sizes(self.loader)
        if sizes is None:
            return None
        return self.steps_of(sizes[0] if self._limit is None else min(sizes[0], self._limit))

    def steps_of(self, batches: int) -> int:
        """Return the number of optimizer steps for a number of batches."""
        return -(-batches // self._size)

    def agree(self) -> None:
        """Compare the number and sizes of batches on all ranks; every rank must call this."""
        sizes = self._world.gather_objects(self._sizes())
        self.even = self._world.size == 1 or (None not in sizes and len(set(sizes)) == 1)
        if not self.even and None not in sizes:
            logger.warning(
                "ranks have unequal training batches (batches, size, last) %s; every epoch ends "
                "when the rank with the fewest batches has none left",
                sizes,
            )

    def open(self, state: TrainState) -> Iterator[tuple[list[Portion], Weight]]:
        """Yield the batches of each step and their total weight; start at `position` if set."""
        batches = self._open_loader(state)
        if self.ended:
            return
        clock, size, max_steps = time.perf_counter, self._size, self._max_steps
        while max_steps is None or state.step < max_steps:
            started = clock()
            portions = []
            for batch in batches:
                state.batch += 1
                portion = self.portion(batch)
                if portion.samples:
                    portions.append(portion)
                    if len(portions) == size:
                        break
            else:  # the loader has no more batches, or reached the limit
                self.used_up = self._limit is None or state.batch < self._limit
            drawn = clock()
            self.waited += drawn - started
            if self._lockstep and not self.even:
                # Ranks fetch parameters from one another in every batch of a step, so all use as
                # many batches as the rank with the fewest.
                (missing,) = self._world.maximum([size - len(portions)])
                portions = portions[: size - int(missing)]
            total = self.total(portions)
            self.asked += clock() - drawn
            if total is None:
                self.ended = True
                return
            yield portions, total

    def portion(self, batch: Any, training: bool = True) -> Portion:
        """Return a batch on the device, with its weight."""
        batch = to_device(batch, self._world.device)
        samples = self._step.count(batch, training)
        if not samples:
            return Portion(batch, 0, 0.0)
        weight = self._step.weigh(batch, training)
        return Portion(batch, samples, samples if weight is None else weight)

    def total(self, portions: list[Portion]) -> Weight | None:
        """Return the total weight of a step's batches, or None if a rank has none; every rank."""
        if self.even and not portions:
            return None
        weighed = bool(portions) and isinstance(portions[0].weight, torch.Tensor)
        if self.even and not weighed:
            return portions[0].weight if self._size == 1 else sum(p.samples for p in portions)
        world, samples = self._world, float(sum(p.samples for p in portions))
        if not self.even:
            samples, ready = world.total([samples, bool(portions)])
            if ready < world.size:
                return None
        if not weighed:
            return samples / world.size
        weights = torch.stack([torch.as_tensor(portion.weight) for portion in portions])
        everywhere = world.sum_tensor(weights.sum().to(world.device, torch.float32))
        # A step in which nothing counts has loss 0 and gradients 0, and not 0 / 0.
        return everywhere.clamp_min(torch.finfo(torch.float32).tiny) / world.size

    def place(self, state: TrainState) -> dict[str, Any]:
        """Return the state of the generators and, inside an epoch, of the loader."""
        knows = state.batch > 0 and hasattr(self.loader, "load_state_dict")
        return {
            "rng": capture_rng(self._world.device),
            "loader": self.loader.state_dict() if knows else None,
        }

    def capture_rng(self) -> dict[str, Any]:
        """Return the state of all generators that decide the order of the next epoch."""
        generator = loader_generator(self.loader)
        own = {} if generator is None else {"loader": generator.get_state()}
        return capture_rng(self._world.device) | own

    def restore_rng(self, state: Mapping[str, Any]) -> None:
        """Restore the generators from `capture_rng`."""
        restore_rng(state, self._world.device)
        generator = loader_generator(self.loader)
        if generator is not None and "loader" in state:
            generator.set_state(state["loader"])

    def _sizes(self) -> tuple[int, int, int] | None:
        sizes = None if self._step.counts_itself else fixed_sizes(self.loader)
        if sizes is None or self._limit is None or self._limit >= sizes[0]:
            return sizes
        return self._limit, sizes[1], sizes[1]  # the last batch is then a full one

    def _open_loader(self, state: TrainState) -> Iterator[Any]:
        loader, position = self.loader, self.position
        self.position, self.ended, self.used_up = None, False, False
        self.waited = self.asked = 0.0
        set_epoch(loader, state.epoch)
        if position is None:
            self.epoch_rng = self.capture_rng()
            return itertools.islice(loader, self._limit)
        self.epoch_rng = position["epoch_rng"]
        self.restore_rng(self.epoch_rng)
        left = None if self._limit is None else max(0, self._limit - state.batch)
        self.ended, used_up = position.get("ended", False), position.get("used_up", False)
        self.used_up = used_up
        done = self._max_steps is not None and state.step >= self._max_steps
        if self.ended or used_up or done:
            left = 0
        if position["loader"] is None:
            batches = iter(loader)
            for _ in range(state.batch + used_up):
                next(batches, None)
        else:
            loader.load_state_dict(position["loader"])
            batches = iter(loader)
            if left == 0:
                # The loader must be iterated once, or its next epoch would start at this position.
                more = next(batches, None)
                batches = iter(())
                if used_up and more is not None:
                    # It was at the start of the next epoch, to which this batch belongs.
                    loader.load_state_dict(position["loader"])
        restore_rng(position["rng"], self._world.device)
        return itertools.islice(batches, left)
