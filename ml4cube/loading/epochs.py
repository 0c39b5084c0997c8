"""EpochPlan: the samples of a rank in every epoch, their order, and what is done of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ml4cube.core.display import Summarized, Summary, counted, one_line
from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_choice,
    check_flags,
    check_whole,
    needs_torch,
)
from ml4cube.core.rank_shares import EvalShare, Ints, TrainShare, permutation
from ml4cube.loading.handover import Augment, Collate
from ml4cube.loading.memory import Memory, check_megabytes
from ml4cube.loading.ring.ring import SamplesAt

with needs_torch("ml4cube.datasets.pytorch"):
    import torch
    import torch.distributed

Share = TrainShare | EvalShare


def _rank_and_world(parallel: bool) -> dict[str, int]:
    """Return this rank and the number of ranks; 0 and 1 without a process group."""
    dist = torch.distributed
    if parallel and dist.is_available() and dist.is_initialized():
        return {"rank": dist.get_rank(), "world": dist.get_world_size()}
    return {"rank": 0, "world": 1}


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Arguments of `prep_dataloader`, which documents them, checked when made."""

    batch_size: int
    callback: Collate | None
    num_workers: int
    parallel: bool
    shuffle: bool
    drop_last: bool
    seed: int
    buffer_mb: float
    workers: str
    persistent_workers: bool
    augment: Augment | Sequence[Augment] | None
    device: Any

    def __post_init__(self) -> None:
        """Check the arguments."""
        check_choice("workers", self.workers, ["threads", "processes"])
        flags = ("parallel", "shuffle", "drop_last", "persistent_workers")
        check_flags({name: getattr(self, name) for name in flags})
        for name, least in (("num_workers", 0), ("batch_size", 1), ("seed", 0)):
            check_whole(name, getattr(self, name), least)
            # Neither torch nor JSON, in which states are saved, takes numbers of numpy.
            object.__setattr__(self, name, int(getattr(self, name)))
        check_megabytes("buffer_mb", self.buffer_mb)
        if self.callback is not None and not callable(self.callback):
            raise InvalidTypeError(
                f"callback must be a function of a list of items, got {self.callback!r}"
            )
        if self.device is not None:
            object.__setattr__(self, "device", _device(self.device))


def _device(given: Any) -> torch.device:
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        raise InvalidValueError(
            f"device={given!r} cannot be used here ({str(error).splitlines()[0]}); give a device "
            "that torch finds, such as 'cpu' or 'cuda'"
        ) from error
    return device


class EpochPlan(Summarized):
    """The samples of this rank in every epoch, their order, and the progress of the epoch."""

    # Every iteration is a new epoch: the one that `set_epoch` named, else the next.

    def __init__(
        self, n: int, options: LoaderOptions, memory: Memory | None, *, train: bool
    ) -> None:
        self.n, self.train, self.memory = n, train, memory
        self.options, self.batch_size, self.seed = options, options.batch_size, options.seed
        self.parallel = options.parallel
        self.shuffle = train and options.shuffle
        self.drop_last = train and options.drop_last
        self._identity: dict[str, Any] = {"samples": n, "train": train}
        if self.shuffle:
            order = "whole"
            if memory:
                order = memory.order_name
            self._identity |= {"seed": self.seed, "order": order}
        # (epoch, samples done), of the iteration that began last and of the next one.
        self._now = self.upcoming = (0, 0)
        self.share()  # Refuses sizes that cannot work, before any work.

    def _summary(self) -> Summary:
        """Return batches, samples, their order, and the progress."""
        share, ranks = self.share(), _rank_and_world(self.parallel)
        epoch, done = self.upcoming
        order = "that of the data"
        if self.shuffle:
            order = f"shuffled, seed {self.seed}"
        if self.shuffle and self.memory is not None and not self.memory.fits:
            order += f", {self.memory.streams} chunks mixed at a time"
        augment = self.options.augment
        facts = {
            "Use": "training" if self.train else "validation or test",
            "Samples": f"{share.num_samples:,} of {self.n:,}",
            "Rank": "{rank} of {world}".format(**ranks) if self.parallel else None,
            "Order": order,
            "Last batch": "dropped if not full" if self.drop_last else None,
            "Memory": None if self.memory is None else self.memory.described,
            "Augment": None if augment is None or not self.train else one_line(augment),
            "Device": self.options.device,
            "Next epoch": f"{epoch}, after {done:,} samples" if done else str(epoch),
        }
        sizes = f"{counted(len(share), 'batch', 'batches')} of {counted(self.batch_size, 'sample')}"
        return Summary(sizes, facts)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration."""
        check_whole("epoch", epoch, 0)
        if epoch != self.upcoming[0]:
            self.upcoming = (int(epoch), 0)
        self._now = self.upcoming

    def begin(self) -> tuple[int, int]:
        """Begin an iteration: return its epoch and the samples of it that are done."""
        self._now = self.upcoming
        self.upcoming = (self._now[0] + 1, 0)
        return self._now

    def advance(self, share: Share, epoch: int, positions: Ints, start: int) -> None:
        """Count a batch as handed out, in training those of all ranks, else of this one."""
        if epoch == self._now[0]:  # Otherwise another iteration has begun.
            self._now = (epoch, share.end_of(positions, start))

    def finish(self, epoch: int) -> None:
        """Note the end of an epoch."""
        if epoch == self._now[0]:
            self._now = (epoch + 1, 0)

    def samples_at(self, epoch: int) -> SamplesAt:
        """Return the function of positions that gives the samples of an epoch."""
        if not self.shuffle:
            return lambda positions: positions
        if self.memory is None or self.memory.fits:
            return permutation(self.n, self.seed, epoch).__getitem__
        return self.memory.order(self.seed).samples(epoch).__getitem__

    def share(self) -> Share:
        """Return this rank's positions, for the process group as it is now."""
        ranks = _rank_and_world(self.parallel)
        if not self.train:
            return EvalShare(self.n, self.batch_size, **ranks)
        through_ring = self.shuffle and self.memory is not None and not self.memory.fits
        streams = None
        if self.memory is not None and through_ring:
            streams = self.memory.streams
        share = TrainShare(
            self.n, self.batch_size, **ranks, drop_last=self.drop_last, streams=streams
        )
        if not len(share):
            advice = "choose a smaller batch_size"
            if self.n < ranks["world"]:
                advice = "ds.attrs['accounting'] of a store counts why windows were dropped"
            elif self.drop_last:
                advice += " or drop_last=False"
            raise InvalidValueError(
                f"{self.n} training samples are too few for a batch of "
                f"batch_size={self.batch_size} on {ranks['world']} rank(s); {advice}"
            )
        return share

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the epoch: in training of all ranks, else of this one."""
        state = {**self._identity, "epoch": self._now[0], "done": self._now[1]}
        if state["done"] and not self.train:
            state |= _rank_and_world(self.parallel)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue where a state was taken."""
        ranks = {key: state[key] for key in ("rank", "world") if key in state}
        fields = {k: v for k, v in state.items() if k not in (*ranks, "epoch", "done")}
        if ranks and ranks != (here := _rank_and_world(self.parallel)):
            raise InvalidValueError(
                "the loader's state was saved inside a pass over test or validation samples on "
                f"{ranks}, and this is {here}; such a pass can continue only on the same "
                "rank of as many ranks"
            )
        if fields != self._identity or not {"epoch", "done"} <= set(state):
            raise InvalidValueError(
                f"the loader's state was saved with {fields}, this loader has {self._identity}; "
                "an epoch can continue only with the same data and order"
            )
        for name in ("epoch", "done"):
            check_whole(name, state[name], 0)
        if state["done"] > self.n:
            raise InvalidValueError(
                f"the loader's state has {state['done']} of {self.n} samples done; give one that "
                "state_dict returned"
            )
        self.upcoming = self._now = (int(state["epoch"]), int(state["done"]))
