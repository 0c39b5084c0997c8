"""SampleLoader and MapLoader: epochs of batches, in an order that seed and epoch decide."""

from __future__ import annotations

import os
import random
import shutil
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ml4cube.core.display import Summarized, Summary, counted
from ml4cube.core.errors import (
    InvalidValueError,
    RunError,
    check_whole,
    needs_torch,
)
from ml4cube.core.rank_shares import (
    ChunkSchedule,
    Ints,
    ShuffleReport,
    worker_seed,
)
from ml4cube.loading.augmentation import bind_augmentations
from ml4cube.loading.epochs import EpochPlan, LoaderOptions, Share
from ml4cube.loading.handover import Handover
from ml4cube.loading.memory import Memory
from ml4cube.loading.pickling import explain_unpicklable
from ml4cube.loading.ring.arrays import Array, Buffers
from ml4cube.loading.ring.ring import MakeArrays, Resident, Ring, SamplesAt
from ml4cube.loading.tensors import PTXrDataset

with needs_torch("ml4cube.datasets.pytorch"):
    import torch
    import torch.distributed
    from torch import Tensor
    from torch.utils.data import DataLoader, get_worker_info
    from torch.utils.data.distributed import DistributedSampler

if TYPE_CHECKING:
    import xarray as xr

# Remote reads mostly wait, so up to this many run at once.
_REMOTE_READS = 64
# More threads copy no faster.
_MOST_GATHER_THREADS = 4
# As many are chosen at most; a user may ask for more.
_MOST_DECODE_THREADS = 4
# Where processes hand tensors over, and what torch says when there is no room.
_SHARED_MEMORY = "/dev/shm"
_SHARED_MEMORY_IS_FULL = (
    "unable to allocate shared memory",
    "Bus error",
    "unable to write to file",
)


class EpochLoader(Summarized):
    """Base of `SampleLoader` and `MapLoader`: epochs that ranks share, and that can be resumed.

    Every iteration is one epoch: the one that `set_epoch` named, else the next.

    Attributes
    ----------
    parallel : bool
        Whether ranks share the samples.
    keeps_samples : bool
        Whether no batch can lose or gain samples after it was gathered.
    num_samples : int
        Samples that this rank yields in one epoch.
    """

    dataset: Any
    plan: EpochPlan
    handover: Handover
    num_workers: int
    _readers = ("process", "processes")

    def _summary(self) -> Summary:
        """Return the plan of epochs, how batches are made, and the data."""
        plan, data = self.plan._summary(), self.dataset
        facts = {
            **plan.facts,
            "Read by": counted(self.num_workers, *self._readers) if self.num_workers else None,
            "Data": None if isinstance(data, Summarized) else type(data).__name__,
        }
        sections = {"Data": data if isinstance(data, Summarized) else None}
        return Summary(plan.headline, facts, sections)

    @property
    def parallel(self) -> bool:
        """Return True if ranks share the samples."""
        return self.plan.parallel

    @property
    def keeps_samples(self) -> bool:
        """Return True if no batch can lose or gain samples after it was gathered."""
        return self.handover.keeps_samples

    @property
    def num_samples(self) -> int:
        """Samples that this rank yields in one epoch."""
        return self.plan.share().num_samples

    def share_out(self) -> None:
        """Let the ranks of the process group share the samples, as ``parallel=True`` does."""
        self.plan.parallel = True

    def for_validation(self) -> EpochLoader:
        """Return a loader that gives every sample exactly once over all ranks.

        Returns
        -------
        SampleLoader or MapLoader
            Itself, unless it was made for training; then one that does not shuffle, drop or
            augment.
        """
        if not self.plan.train:
            return self
        options = replace(self.plan.options, parallel=self.parallel)
        return make_loader(self.dataset, options, train=False)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        Parameters
        ----------
        epoch : int
            From 0. The order is a function of the seed and the epoch.
        """
        self.plan.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Return the progress of the epoch, in samples of the batches that were handed out.

        Returns
        -------
        dict
            Plain numbers and strings, for `load_state_dict`.
        """
        return self.plan.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration continue where a state was taken.

        In training on any number of ranks; a pass over test or validation samples continues only
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
        self.plan.load_state_dict(state)


class SampleLoader(EpochLoader):
    """Batches of a `PTXrDataset`, decoded by threads; made by `prep_dataloader`.

    Iterates like a DataLoader. If the samples fit into `buffer_mb` they are read once and
    shuffled as a whole; else chunks pass through a ring of slots, and a batch mixes samples
    of many chunks (see `ml4cube.core.rank_shares.ChunkOrder`).

    Parameters
    ----------
    dataset : PTXrDataset
        Where samples come from.
    plan : object
        Order and progress of epochs; made by `prep_dataloader`.
    handover : object
        Last steps of a batch; made by `prep_dataloader`.
    threads : int
        Chunks decoded at once.

    Attributes
    ----------
    batch_size : int
        Samples in a batch of one rank.
    callback, collate_fn : callable or None
        Makes a batch of a list of items.
    num_workers : int
        Chunks decoded at once.
    drop_last : bool
        Whether a last batch that is not full is left out.
    """

    dataset: PTXrDataset
    _readers = ("thread", "threads")

    def __init__(
        self, dataset: PTXrDataset, plan: EpochPlan, handover: Handover, threads: int
    ) -> None:
        assert plan.memory is not None  # The samples of a PTXrDataset have a size.
        self.dataset, self.plan, self.handover, self._memory = dataset, plan, handover, plan.memory
        self.callback = self.collate_fn = plan.options.callback
        self.num_workers, self.batch_size, self.drop_last = threads, plan.batch_size, plan.drop_last
        self._gather_threads = min(threads, _MOST_GATHER_THREADS)
        self._resident: Resident | None = None
        # The ring of an epoch that ended, so that no thread writes into its slots, by their number.
        # A dict, because `pop` is atomic and threads may share a loader.
        self._idle_rings: dict[int, Ring] = {}
        self._batches_in_group = self._memory.batches_together(self.batch_size)
        rows = min(self.batch_size * self._batches_in_group, plan.n)
        self._buffers = [Buffers(field, rows) for field in dataset._fields]
        # The order of the epoch whose batch `samples` was last asked about.
        self._samples_at: dict[int, SamplesAt] = {}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what is in memory, which is read again."""
        return {**self.__dict__, "_resident": None, "_idle_rings": {}, "_samples_at": {}}

    def __len__(self) -> int:
        """Batches of this rank in one epoch."""
        return len(self.plan.share())

    def samples(self, batch: Any) -> Ints:
        """Return the numbers of the samples in a batch.

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
            If this loader did not hand it out, or too many batches ago.
        """
        epoch, positions = self.handover.find(batch)
        if epoch not in self._samples_at:
            self._samples_at = {epoch: self.plan.samples_at(epoch)}
        return self._samples_at[epoch](positions)

    def coords(self, batch: Any) -> dict[str, Any]:
        """Return the coordinates of the samples in a batch.

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
            If the batch is not known, or was augmented, which may move cells.
        """
        self.handover.refuse_augmented()
        return self.dataset.to_dataset(batch, self.samples(batch), unscale=unscale)

    def shuffle_report(self, epoch: int = 0, batches: int = 32) -> ShuffleReport:
        """Return how well the batches of this rank are mixed.

        Samples near one another are alike, so a batch from few blocks is worth fewer samples than
        it has. A perfect shuffle of the same blocks is the reference; if a batch is worth less,
        use a larger `buffer_mb`, or a store written in shuffled order (the sampler's default).

        Parameters
        ----------
        epoch : int
            The epoch.
        batches : int
            Number of batches to look at, evenly spaced over the epoch.

        Returns
        -------
        ShuffleReport
            The effective batch size, that of a perfect shuffle, and the least number of blocks in
            a batch. Printed, it names what limits them.

        Raises
        ------
        InvalidValueError
            If the loader has no batch on this rank.
        """
        check_whole("epoch", epoch, 0)
        check_whole("batches", batches, 1)
        share, samples_at = self.plan.share(), self.plan.samples_at(epoch)
        if not len(share):
            raise InvalidValueError("the loader has no batch on this rank")
        chosen = set(np.linspace(0, len(share) - 1, batches).astype(int).tolist())
        block, unit = self.dataset.blocks(np.arange(self.plan.n))
        found = [
            block[samples_at(positions)]
            for number, positions in enumerate(share.batches())
            if number in chosen
        ]
        return ShuffleReport.of(found, unit, np.unique(block, return_counts=True)[1])

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch: the one that was set, else the next."""
        # A generator, so that an iterator that is never used (Lightning makes one) begins no epoch.
        size, plan = self.batch_size, self.plan
        share = plan.share()
        epoch, start = plan.begin()
        with closing(self._groups(share, epoch, start)) as groups:
            for positions, tensors in groups:
                batches = zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)
                del tensors  # Arrays that nobody holds are used again for other batches.
                for first, arrays in zip(range(0, len(positions), size), batches, strict=True):
                    of_batch = positions[first : first + size]
                    plan.advance(share, epoch, of_batch, start)
                    batch = self.dataset.pack(arrays)
                    if self.callback is not None:
                        batch = self.callback(self.dataset._split(batch))
                    yield self.handover.complete(batch, epoch, of_batch)
                del arrays, batch, batches
        plan.finish(epoch)

    def _groups(self, share: Share, epoch: int, start: int) -> Generator[tuple[Ints, list[Tensor]]]:
        """Yield the positions and arrays of several batches at a time, end to end."""
        # Groups whose arrays are being filled, in this order.
        groups: deque[tuple[Ints, list[Tensor]]] = deque()

        def make_arrays(positions: Ints) -> list[Array]:
            tensors = self._tensors(len(positions))
            groups.append((positions, tensors))
            return [tensor.numpy() for tensor in tensors]

        positions = share.batches(start, self._batches_in_group)
        needed = range(self.plan.n) if self.plan.train else share.span()
        chunks = self._memory.resident_chunks(needed)
        if chunks is None:
            filled = self._through_ring(share, epoch, start, positions, make_arrays)
        else:
            filled = self._resident_of(chunks).batches(
                positions, self.plan.samples_at(epoch), make_arrays, self._gather_threads
            )
        with closing(filled):
            for _ in filled:
                yield groups.popleft()

    def _tensors(self, rows: int) -> list[Tensor]:
        """Return tensors for some samples, one per field, of undefined values."""
        if torch.cuda.is_available():
            # Torch does not reuse its pinned memory before copies to the GPU have ended.
            return [
                torch.from_numpy(field.empty(0)).new_empty((rows, *field.shape), pin_memory=True)
                for field in self.dataset._fields
            ]
        return [torch.from_numpy(buffer.take(rows)) for buffer in self._buffers]

    def _reads_at_once(self, chunks: int) -> int:
        """Return the number of reading threads: more if reads mostly wait, up to `chunks`."""
        if self.dataset._source.remote:
            return max(self.num_workers, min(_REMOTE_READS, chunks))
        return self.num_workers

    def _resident_of(self, chunks: range) -> Resident:
        """Return the samples of some chunks in memory, read if they are not there yet."""
        resident = self._resident
        if resident is None or resident.chunks != chunks:
            source, fields = self.dataset._source, self.dataset._fields
            resident = Resident(source, fields, chunks, self._reads_at_once(len(chunks)))
            self._resident = resident
        return resident

    def _through_ring(
        self,
        share: Share,
        epoch: int,
        start: int,
        positions: Iterator[Ints],
        make_arrays: MakeArrays,
    ) -> Generator[list[Array]]:
        """Gather batches from chunks that pass through a ring."""
        order = self._memory.order(self.plan.seed if self.plan.shuffle else None)
        schedule = ChunkSchedule(order, epoch, share.span(start), share.own_streams(start))
        slots = self._memory.slots
        ring = self._idle_rings.pop(slots, None)
        if ring is None:
            source, fields = self.dataset._source, self.dataset._fields
            ring = Ring(source, fields, slots, self._reads_at_once(slots), self._gather_threads)
        with closing(ring.batches(schedule, positions, make_arrays)) as filled:
            yield from filled
        self._idle_rings = {slots: ring}


class _FirstOfBatch(int):
    """The number of a sample, which seeds the worker process that it is sent to.

    So what transforms draw in workers depends on the seed, the epoch and the batch alone, also if
    workers are kept alive, or a run was resumed.
    """

    seed = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what makes the plain number in another process."""
        return _seed_worker, (int(self), self.seed)


def _seed_worker(number: int, seed: int) -> int:
    """Seed the global generators in a worker process, and return the number."""
    if get_worker_info() is not None:  # not where a list of samples is unpickled
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)  # noqa: NPY002
    return number


class ShareSampler(Summarized, DistributedSampler[int]):
    """Samples of one rank, in the order of an epoch, for a torch DataLoader.

    It derives from DistributedSampler, so that Lightning and ignite know that samples are shared
    among ranks already and leave it alone; but it pads nothing.

    Parameters
    ----------
    plan : object
        Order and progress of epochs; made by `prep_dataloader`.
    """

    def __init__(self, plan: EpochPlan) -> None:
        # DistributedSampler's own __init__ asks for a process group.
        self.plan = plan

    def _summary(self) -> Summary:
        """Return the plan of epochs."""
        return self.plan._summary()

    def __len__(self) -> int:
        """Samples of this rank in one epoch."""
        return self.plan.share().num_samples

    def __iter__(self) -> Iterator[int]:
        """Begin an epoch: the one that was set, else the next."""
        epoch, start = self.plan.begin()
        samples_at = self.plan.samples_at(epoch)
        for positions in self.plan.share().batches(start):
            first, *others = samples_at(positions).tolist()
            marked = _FirstOfBatch(first)
            marked.seed = worker_seed(self.plan.seed, epoch, int(positions[0]))
            yield from (marked, *others)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration.

        Parameters
        ----------
        epoch : int
            From 0.
        """
        self.plan.set_epoch(epoch)


class MapLoader(EpochLoader, DataLoader[Any]):
    """A torch DataLoader over any map-style data set, with a `ShareSampler`.

    Made by `prep_dataloader`; takes the arguments of a DataLoader.

    Attributes
    ----------
    sampler : ShareSampler
        Chooses the samples of this rank.
    """

    sampler: ShareSampler
    # Accelerate's `prepare` does not change a loader that has this mark.
    _is_accelerate_prepared: bool

    def share_out(self) -> None:
        """Let the ranks of the process group share the samples, as ``parallel=True`` does."""
        super().share_out()
        self._is_accelerate_prepared = True

    def __getstate__(self) -> dict[str, Any]:
        """Leave out worker processes, which are started anew."""
        return {**self.__dict__, "_iterator": None}

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Iterate over one epoch: the one that was set, else the next."""
        # A generator, as in `SampleLoader`.
        plan, share = self.plan, self.plan.share()
        # The sampler begins this epoch when torch asks for the first sample.
        epoch, start = plan.upcoming
        # Torch draws the seed of its workers from this generator, not from the global one.
        assert self.generator is not None
        self.generator.manual_seed(worker_seed(plan.seed, epoch))
        for batch, of_batch in zip(self._batches(), share.batches(start), strict=True):
            plan.advance(share, epoch, of_batch, start)
            yield self.handover.complete(batch, epoch, of_batch)
        plan.finish(epoch)

    def _batches(self) -> Iterator[Any]:
        """Yield the batches of an epoch; say why workers cannot start, or hand a batch over."""
        try:
            batches = super().__iter__()
        except Exception as error:  # what pickling raises, where worker processes start
            if self.num_workers:
                explain_unpicklable(self.dataset, error)
            raise
        try:
            yield from batches
        except RuntimeError as error:
            is_too_small = any(words in str(error) for words in _SHARED_MEMORY_IS_FULL)
            if not is_too_small or not os.path.isdir(_SHARED_MEMORY):
                raise
            size = shutil.disk_usage(_SHARED_MEMORY).total // 2**20
            raise RunError(
                f"{_SHARED_MEMORY} ({size} MB) is too small for the batches that num_workers="
                f"{self.num_workers} processes hand over there; enlarge it (docker run "
                "--shm-size=8g), or choose a smaller batch_size or num_workers=0"
            ) from error


def make_loader(data: Any, options: LoaderOptions, *, train: bool) -> EpochLoader:
    """Make the loader for a data set."""
    memory = None
    if isinstance(data, PTXrDataset):
        sample_bytes = sum(field.nbytes for field in data._fields)
        memory = Memory(data._source.counts, sample_bytes, options.buffer_mb)
    plan = EpochPlan(len(data), options, memory, train=train)
    threads = memory is not None and options.workers == "threads"
    if options.persistent_workers and threads:
        raise InvalidValueError(
            "persistent_workers=True needs workers='processes' for a PTXrDataset, whose threads "
            "are kept anyway"
        )
    if options.persistent_workers and not options.num_workers:
        raise InvalidValueError(
            "persistent_workers=True needs num_workers, the number of worker processes, got 0"
        )
    augment = bind_augmentations(options.augment, data) if train else ()
    handover = Handover(options.callback, options.device, augment, options.seed)
    if threads:
        ranks = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        decoding = options.num_workers or useful_threads(*_cores(), ranks)
        return SampleLoader(data, plan, handover, decoding)
    context = None
    if options.num_workers:
        from loky.backend import get_context

        context = get_context("loky")  # It never forks.
    loader = MapLoader(
        data,
        batch_size=options.batch_size,
        sampler=ShareSampler(plan),
        collate_fn=options.callback,
        num_workers=options.num_workers,
        multiprocessing_context=context,
        generator=torch.Generator(),
        pin_memory=torch.cuda.is_available(),
        persistent_workers=options.persistent_workers,
    )
    loader.plan, loader.handover = plan, handover
    loader._is_accelerate_prepared = plan.parallel
    return loader


def useful_threads(own_cores: int, all_cores: int, ranks: int) -> int:
    """Return up to four decode threads for one of some ranks that have all these cores together.

    A launcher may bind each rank to cores of its own, or all ranks may use the same.
    """
    return max(1, min(_MOST_DECODE_THREADS, own_cores, max(own_cores, all_cores) // ranks))


def _cores() -> tuple[int, int]:
    """Return the cores that this process may use, and those of the process that started it."""
    if not hasattr(os, "sched_getaffinity"):
        return (os.cpu_count() or 1,) * 2
    own = len(os.sched_getaffinity(0))
    try:
        return own, len(os.sched_getaffinity(os.getppid()))
    except OSError:
        return own, own
