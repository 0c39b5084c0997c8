"""SampleLoader and MapLoader: one epoch of batches, in an order that seed and epoch decide."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, check_whole, needs_torch
from ml4cube.core.shares import (
    EvalShare,
    Ints,
    ShuffleReport,
    TrainShare,
    permutation,
    worker_seed,
)
from ml4cube.loading.delivery import Handover
from ml4cube.loading.memory import Memory
from ml4cube.loading.ring.cursor import EpochCursor
from ml4cube.loading.ring.gathering import Gatherers
from ml4cube.loading.ring.ring import Resident, Ring
from ml4cube.loading.ring.slots import Buffers
from ml4cube.loading.tensors import PTXrDataset

with needs_torch("ml4cube.datasets.pytorch"):
    import torch
    import torch.distributed
    from torch import Tensor
    from torch.utils.data import DataLoader
    from torch.utils.data.distributed import DistributedSampler

if TYPE_CHECKING:
    import xarray as xr

Share = TrainShare | EvalShare
Arrays = list[NDArray[Any]]
Take = Callable[[int], Arrays]

# Batches that are gathered together at most.
_TOGETHER = 1024
# A remote read mostly waits, so this many may be under way at once.
_SLOW_READS = 64
# Memory gives no more to more threads.
_GATHERERS = 4


def _rank_and_world(parallel: bool) -> tuple[int, int]:
    """This rank and the number of ranks; (0, 1) where no process group was initialised."""
    dist = torch.distributed
    if parallel and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class Plan:
    """What the loaders share: whose turn it is, which epoch, and how far."""

    def __init__(
        self,
        n: int,
        *,
        batch_size: int,
        train: bool,
        shuffle: bool,
        drop_last: bool,
        parallel: bool,
        seed: int,
        order: str,
    ) -> None:
        check_whole("seed", seed, 0)
        self.n, self.batch_size, self.parallel = n, batch_size, parallel
        self.train, self.shuffle, self.drop_last, self.seed = train, shuffle, drop_last, seed
        identity: dict[str, Any] = {"samples": n, "train": train}
        identity |= {"seed": seed, "order": order} if shuffle else {}
        self.cursor = EpochCursor(identity)
        assert self.share() is not None  # refuses sizes that cannot work, before any work

    def share(self) -> Share:
        """Return this rank's positions, in the world as it is now."""
        rank, world = _rank_and_world(self.parallel)
        if not self.train:
            return EvalShare(self.n, self.batch_size, rank, world)
        share = TrainShare(self.n, self.batch_size, rank, world, self.drop_last)
        if not len(share):
            advice = "choose a smaller batch_size" + (
                " or drop_last=False" if self.drop_last else ""
            )
            if self.n < world:
                advice = (
                    "each rank needs one; the accounting of a store (ds.attrs['accounting']) says "
                    "what became of all windows"
                )
            raise InvalidValueError(
                f"{self.n} training samples make no batch of batch_size={self.batch_size} on "
                f"{world} rank(s); {advice}"
            )
        return share

    def for_validation(self) -> Plan:
        """Return a plan that gives every sample exactly once over all ranks, in stored order."""
        return Plan(
            self.n,
            batch_size=self.batch_size,
            train=False,
            shuffle=False,
            drop_last=False,
            parallel=self.parallel,
            seed=self.seed,
            order="whole",
        )

    def advance(self, share: Share, epoch: int, start: int, batches: int) -> None:
        """Note that so many batches were handed out: of all ranks in training, else of this."""
        if isinstance(share, TrainShare):
            done = min(start + batches * share.global_batch, share.stop(start))
        else:
            done = min(start + batches * share.batch_size, share.num_samples)
        self.cursor.advance(epoch, done)

    def state_dict(self) -> dict[str, Any]:
        """Say how far the epoch is: in training for all ranks, else for this one alone."""
        state = self.cursor.state_dict()
        if not self.train and state["done"]:
            state |= self._place()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was taken."""
        given = {key: value for key, value in state.items() if key not in ("rank", "world")}
        place = {key: value for key, value in state.items() if key not in given}
        if place and place != self._place():
            raise InvalidValueError(
                "the loader's state was saved inside a pass over test or validation samples with "
                f"{place}, this is {self._place()}; such a pass goes on only on the same rank of "
                "as many ranks, begin it anew"
            )
        self.cursor.load_state_dict(given)

    def _place(self) -> dict[str, Any]:
        return dict(zip(("rank", "world"), _rank_and_world(self.parallel), strict=True))


class SampleLoader:
    """Batches of a `PTXrDataset`, decoded by threads; made by `prep_dataloader`.

    Iterates like a DataLoader. If the samples fit into `buffer_mb` they are read once and
    shuffled as a whole; else chunks pass through a ring of slots, and a batch mixes samples
    of many chunks (see `ml4cube.core.shares.ChunkOrder`).

    Parameters
    ----------
    dataset : PTXrDataset
        Where samples come from.
    plan : object
        Whose turn it is; made by `prep_dataloader`.
    memory : object
        What of the samples fits into memory; made by `prep_dataloader`.
    handover : object
        What is done to a batch last; made by `prep_dataloader`.
    threads : int
        Chunks decoded at once.

    Attributes
    ----------
    batch_size : int
        Samples in a batch of one rank.
    parallel : bool
        Whether ranks share the samples.
    callback, collate_fn : callable or None
        Makes a batch of a list of items.
    num_workers : int
        Chunks decoded at once.
    drop_last : bool
        Whether a last batch that is not full is left out.
    """

    def __init__(
        self,
        dataset: PTXrDataset,
        plan: Plan,
        memory: Memory,
        handover: Handover,
        threads: int,
    ) -> None:
        self.dataset = dataset
        self.callback = self.collate_fn = handover.callback
        self.num_workers, self.drop_last = threads, plan.train and plan.drop_last
        self.batch_size, self.parallel = plan.batch_size, plan.parallel
        self._plan, self._threads, self._handover = plan, threads, handover
        self._memory = memory
        self._resident: tuple[range, Resident] | None = None
        self._idle_rings: list[tuple[int, Ring]] = []
        batch_bytes = sum(field.nbytes for field in dataset._fields) * self.batch_size
        # small batches are gathered several at a time, for the price of one call
        self._together = max(1, min(memory.group_bytes // max(batch_bytes, 1), _TOGETHER))
        rows = min(self.batch_size * self._together, plan.n)
        self._buffers = [Buffers(field, rows) for field in dataset._fields]
        self._orders: dict[int, Ints | None] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is in memory, which is read again."""
        return {**self.__dict__, "_resident": None, "_idle_rings": [], "_orders": {}}

    def __len__(self) -> int:
        """Batches of this rank in one epoch."""
        return len(self._plan.share())

    def share_out(self) -> None:
        """Let the ranks of the process group share the samples, as ``parallel=True`` does."""
        self.parallel = self._plan.parallel = True

    def for_validation(self) -> SampleLoader:
        """Return a loader that gives every sample exactly once over all ranks.

        Returns
        -------
        SampleLoader
            Itself, unless it was made for training; then one that neither shuffles nor drops.
        """
        if not self._plan.train:
            return self
        plan, handover = self._plan.for_validation(), copy.copy(self._handover)
        return SampleLoader(self.dataset, plan, self._memory, handover, self._threads)

    @property
    def keeps_samples(self) -> bool:
        """Whether batches surely have the samples that they were made of."""
        return self._handover.keeps_samples

    @property
    def num_samples(self) -> int:
        """Samples that this rank yields in one epoch."""
        return self._plan.share().num_samples

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is; without it, the next one.

        Parameters
        ----------
        epoch : int
            From 0. The order is a function of the seed and the epoch.
        """
        self._plan.cursor.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Say how far the epoch is, counted in batches that were handed out.

        Returns
        -------
        dict
            Plain numbers and words, for `load_state_dict`.
        """
        return self._plan.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where a state was taken.

        In training on any number of ranks; a pass over test or validation samples goes on only
        on the same rank of as many ranks.

        Parameters
        ----------
        state : mapping
            From `state_dict`.

        Raises
        ------
        InvalidValueError
            If the state belongs to other data, another order, or the pass of another rank.
        """
        self._plan.load_state_dict(state)

    def samples(self, batch: Any) -> Ints:
        """Say which samples a batch holds.

        Parameters
        ----------
        batch : tuple of Tensor, Tensor or dict of str to Tensor
            One of the last 64 batches that were handed out, as it was handed out: a copy on
            another device is not known.

        Returns
        -------
        ndarray of int64, shape (batch,)
            Numbers of the samples, for the methods of the data set.

        Raises
        ------
        InvalidValueError
            If this loader did not hand it out, or too long ago.
        """
        epoch, positions = self._handover.find(batch)
        if epoch not in self._orders:
            self._orders = {epoch: self._order(epoch)}
        order = self._orders[epoch]
        return positions if order is None else order[positions]

    def coords(self, batch: Any) -> dict[str, Any]:
        """Say where the samples of a batch come from.

        Parameters
        ----------
        batch : tuple of Tensor, Tensor or dict of str to Tensor
            As for `samples`.

        Returns
        -------
        dict of str to ndarray
            As `PTXrDataset.coords` gives them.
        """
        return self.dataset.coords(self.samples(batch))

    def to_dataset(self, batch: Any, *, unscale: bool = False) -> xr.Dataset:
        """Turn a batch back into an xarray Dataset.

        Parameters
        ----------
        batch : tuple of Tensor, Tensor or dict of str to Tensor
            As for `samples`.
        unscale : bool
            Whether to give values in physical units.

        Returns
        -------
        Dataset
            As `PTXrDataset.to_dataset` gives it.

        Raises
        ------
        InvalidValueError
            If the batch is not known, or was augmented, so that its cells lie elsewhere.
        """
        self._handover.refuse_augmented()
        return self.dataset.to_dataset(batch, self.samples(batch), unscale=unscale)

    def shuffle_report(self, epoch: int = 0, batches: int = 32) -> ShuffleReport:
        """Say how well the batches of this rank are mixed.

        Samples that lie near one another resemble one another, so a batch of few blocks is
        worth fewer samples than it has. How many a perfect shuffle would make of it depends on how
        many blocks the data has; where a batch is worth less than that, the remedy is a larger
        `buffer_mb`, or a store written in shuffled order (the sampler's default).

        Parameters
        ----------
        epoch : int
            Which epoch.
        batches : int
            How many batches to look at, evenly spaced over the epoch.

        Returns
        -------
        ShuffleReport
            The effective batch size, that of a perfect shuffle, and the least number of blocks in
            a batch. Printed, it says what limits them.

        Raises
        ------
        InvalidValueError
            If the loader has no batch on this rank.
        """
        check_whole("epoch", epoch, 0)
        check_whole("batches", batches, 1)
        share = self._plan.share()
        if not len(share):
            raise InvalidValueError("the loader has no batch on this rank, so nothing is mixed")
        order = self._order(epoch)
        chosen = set(np.linspace(0, len(share) - 1, batches).astype(int).tolist())
        block, unit = self.dataset.blocks(np.arange(self._plan.n))
        found = [
            block[positions if order is None else order[positions]]
            for number, positions in enumerate(share.batches())
            if number in chosen
        ]
        return ShuffleReport.of(found, unit, np.unique(block, return_counts=True)[1])

    def _order(self, epoch: int) -> Ints | None:
        """All samples in the order of an epoch; None if that is the order they are stored in."""
        if not self._plan.shuffle:
            return None
        if self._memory.fits:
            return permutation(self._plan.n, self._plan.seed, epoch)
        return self._memory.order(self._plan.seed).samples(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch, the one that was set, else the next, from its first batch on."""
        # a generator, so that an iterator that is never asked (Lightning makes one) begins none
        size, pack, plan = self.batch_size, self.dataset.pack, self._plan
        share = plan.share()
        epoch, start = plan.cursor.begin()
        hand, number = self._handover.hand, 0
        with closing(self._groups(share, epoch, start)) as groups:
            for positions, tensors in groups:
                parts: Iterable[Sequence[Tensor]] = [tuple(tensors)]
                if len(positions) > size:
                    parts = zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
                # the arrays come back for other batches when nobody holds them any more
                del tensors
                for first, arrays in zip(range(0, len(positions), size), parts, strict=True):
                    number += 1
                    plan.advance(share, epoch, start, number)
                    yield hand(pack(arrays), epoch, positions, first)
                del arrays, parts
        plan.cursor.finish(epoch)

    def _groups(self, share: Share, epoch: int, start: int) -> Generator[tuple[Ints, list[Tensor]]]:
        """Several batches at a time, end to end: their positions and arrays."""
        tensors: deque[list[Tensor]] = deque()
        waiting: deque[Ints] = deque()

        def take(rows: int) -> Arrays:
            tensors.append(self._tensors(rows))
            return [tensor.numpy() for tensor in tensors[-1]]

        def positions() -> Iterator[Ints]:
            for group in share.batches(start, self._together):
                waiting.append(group)
                yield group

        chunks = self._memory.resident_chunks(share)
        if chunks is None:
            arrays = self._through_ring(share, epoch, start, positions(), take)
        else:
            arrays = self._from_memory(chunks, epoch, positions(), take)
        with closing(arrays):
            for _ in arrays:
                yield waiting.popleft(), tensors.popleft()

    def _tensors(self, rows: int) -> list[Tensor]:
        if torch.cuda.is_available():
            # torch's own pinned memory knows of copies to the GPU that are still under way
            return [
                torch.from_numpy(field.empty(0)).new_empty((rows, *field.shape), pin_memory=True)
                for field in self.dataset._fields
            ]
        return [torch.from_numpy(buffer.take(rows)) for buffer in self._buffers]

    def _reads_at_once(self, room: int) -> int:
        """Threads that read: more where they mostly wait, as far as there is room."""
        if self.dataset._source.slow:
            return max(self._threads, min(_SLOW_READS, room))
        return self._threads

    def _from_memory(
        self, chunks: range, epoch: int, groups: Iterator[Ints], take: Take
    ) -> Generator[Arrays]:
        if self._resident is None or self._resident[0] != chunks:
            source, fields = self.dataset._source, self.dataset._fields
            threads = self._reads_at_once(len(chunks))
            self._resident = chunks, Resident(source, fields, threads, chunks)
        resident = self._resident[1]
        order = None
        if self._plan.shuffle:
            order = permutation(self._plan.n, self._plan.seed, epoch)
        with Gatherers(min(self._threads, _GATHERERS)) as gatherers:
            for positions in groups:
                while not gatherers.has_room():
                    yield gatherers.finish()
                samples = positions if order is None else order[positions]
                out = take(len(positions))

                def gather(rows: slice, samples: Ints = samples, out: Arrays = out) -> None:
                    resident.gather(samples[rows], [array[rows] for array in out])

                gatherers.begin(out)
                gatherers.fill(positions, slice(0, len(positions)), gather)
            while len(gatherers):
                yield gatherers.finish()

    def _through_ring(
        self, share: Share, epoch: int, start: int, groups: Iterator[Ints], take: Take
    ) -> Generator[Arrays]:
        order = self._memory.order(self._plan.seed if self._plan.shuffle else None)
        if isinstance(share, TrainShare):
            tour = order.tour(epoch, start, share.stop(start), share.rank, share.world)
        else:
            tour = order.tour(epoch, share.begin + start, share.end)
        slots = self._memory.slots(order, share)
        ring = self._idle_ring(slots)
        if ring is None:
            reads, gatherers = self._reads_at_once(slots), min(self._threads, _GATHERERS)
            ring = Ring(self.dataset._source, self.dataset._fields, slots, reads, gatherers)
        try:
            with closing(ring.batches(tour, groups, take)) as arrays:
                yield from arrays
        finally:
            if ring.is_resting:
                self._idle_rings[:] = [(slots, ring)]

    def _idle_ring(self, slots: int) -> Ring | None:
        """Take the ring that the last epoch left, if it fits; nobody else gets it then."""
        try:
            size, ring = self._idle_rings.pop()
        except IndexError:
            return None
        return ring if size == slots else None


class ShareSampler(DistributedSampler[int]):
    """Samples of one rank, in the order of an epoch, for a torch DataLoader.

    It is a DistributedSampler by name, not by what it does: it pads nothing. By that name
    Lightning and ignite know that samples are shared among ranks already, and leave it alone.

    Parameters
    ----------
    plan : object
        Whose turn it is; made by `prep_dataloader`.
    order : callable, optional
        All samples in the order of an epoch; by default, shuffled as a whole.

    Attributes
    ----------
    begun : tuple of int
        Epoch that was begun last, and samples of it that were done before.
    """

    def __init__(self, plan: Plan, order: Callable[[int], Ints] | None = None) -> None:
        # not DistributedSampler's own, which asks for a process group and copies the samples
        self.plan = plan
        self._order = order
        self.begun = (0, 0)

    def __len__(self) -> int:
        """Samples of this rank in one epoch."""
        return self.plan.share().num_samples

    def __iter__(self) -> Iterator[int]:
        """Begin an epoch: the one that was set, else the next."""
        self.begun = epoch, start = self.plan.cursor.begin()
        samples = self._samples(epoch)
        for positions in self.plan.share().batches(start):
            yield from (positions if samples is None else samples[positions]).tolist()

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is.

        Parameters
        ----------
        epoch : int
            From 0.
        """
        self.plan.cursor.set_epoch(epoch)

    def _samples(self, epoch: int) -> Ints | None:
        if not self.plan.shuffle:
            return None
        if self._order is None:
            return permutation(self.plan.n, self.plan.seed, epoch)
        return self._order(epoch)


class MapLoader(DataLoader[Any]):
    """A torch DataLoader over any map-style data set, with a `ShareSampler`.

    Made by `prep_dataloader`; takes the arguments of a DataLoader.

    Attributes
    ----------
    sampler : ShareSampler
        Says which samples are this rank's.
    """

    sampler: ShareSampler
    handover: Handover
    # by this name accelerate's `prepare` knows what it shared out already: it leaves that alone
    _is_accelerate_prepared: bool

    @property
    def parallel(self) -> bool:
        """Whether ranks share the samples."""
        return self.sampler.plan.parallel

    def share_out(self) -> None:
        """Let the ranks of the process group share the samples, as ``parallel=True`` does."""
        self.sampler.plan.parallel = self._is_accelerate_prepared = True

    def for_validation(self) -> MapLoader:
        """Return a loader that gives every sample exactly once over all ranks.

        Returns
        -------
        MapLoader
            Itself, unless it was made for training; then one that neither shuffles nor drops.
        """
        if not self.sampler.plan.train:
            return self
        plan = self.sampler.plan.for_validation()
        loader = MapLoader(
            self.dataset,
            batch_size=plan.batch_size,
            sampler=ShareSampler(plan),
            collate_fn=self.collate_fn,
            num_workers=self.num_workers,
            multiprocessing_context=self.multiprocessing_context if self.num_workers else None,
            generator=torch.Generator(),
            pin_memory=self.pin_memory,
        )
        loader.handover = copy.copy(self.handover)
        loader._is_accelerate_prepared = self._is_accelerate_prepared
        return loader

    @property
    def keeps_samples(self) -> bool:
        """Whether batches surely have the samples that they were made of."""
        return self.handover.keeps_samples

    @property
    def num_samples(self) -> int:
        """Samples that this rank yields in one epoch."""
        return len(self.sampler)

    def set_epoch(self, epoch: int) -> None:
        """Say which epoch the next iteration is; without it, the next one.

        Parameters
        ----------
        epoch : int
            From 0. The order is a function of the seed and the epoch.
        """
        self.sampler.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Say how far the epoch is, counted in batches that were handed out.

        Returns
        -------
        dict
            Plain numbers and words, for `load_state_dict`.
        """
        return self.sampler.plan.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where a state was taken.

        In training on any number of ranks; a pass over test or validation samples goes on only
        on the same rank of as many ranks.

        Parameters
        ----------
        state : mapping
            From `state_dict`.

        Raises
        ------
        InvalidValueError
            If the state belongs to other data, another order, or the pass of another rank.
        """
        self.sampler.plan.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Iterate over one epoch: the one that was set, else the next."""
        plan = self.sampler.plan
        # torch draws the seed of its workers when it starts: from this generator, so that the
        # global random state is neither read nor changed
        assert self.generator is not None
        self.generator.manual_seed(worker_seed(plan.seed, plan.cursor.coming))
        batches = super().__iter__()
        # with worker processes the epoch has begun here, without at the first batch
        return self._count(batches, self.sampler.begun if self.num_workers else None)

    def _count(self, batches: Iterator[Any], begun: tuple[int, int] | None) -> Iterator[Any]:
        plan = self.sampler.plan
        share, positions = plan.share(), None
        for number, batch in enumerate(batches, 1):
            begun = begun or self.sampler.begun
            positions = positions or share.batches(begun[1])
            plan.advance(share, *begun, number)
            yield self.handover.hand(batch, begun[0], next(positions), 0)
        plan.cursor.finish((begun or self.sampler.begun)[0])
