"""Samples as PyTorch tensors: `PTXrDataset` and the loaders of `prep_dataloader`."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice, needs_torch
from ml4cube.core.grid import Grid, SizesLike
from ml4cube.core.sample_spec import parse_names
from ml4cube.core.shard import (
    ChunkOrder,
    EvalShare,
    Ints,
    ShuffleReport,
    TrainShare,
    check_whole,
    permutation,
    stream_count,
    worker_seed,
)
from ml4cube.core.statistics import Statistics
from ml4cube.datasets.cursor import EpochCursor
from ml4cube.datasets.ring import Buffers, ChunkSource, Field, Resident, Ring, read_chunk
from ml4cube.datasets.sources import CubeSource, open_source

with needs_torch("ml4cube.datasets.pytorch"):
    import torch
    import torch.distributed
    from torch import Tensor
    from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

Batch = Any
Share = TrainShare | EvalShare
Collate = Callable[[list[Any]], Any]

_MB = 1 << 20
# A remote read mostly waits, so this many may be under way at once.
_SLOW_READS = 32


class PTXrDataset(Dataset[Any]):
    """Samples of a store or a cube as tensors; reads chunks when they are asked for.

    Parameters
    ----------
    ds : Dataset, str, path or zarr group
        A sample store (opened, by path or URL, or a Dataset made by hand whose variables have
        the dim ``samples``), or a cube, which is cut into windows as it is read: the samples
        that `MultiProcSampler` would write for the same arguments. The cube is read once
        beforehand, to count samples and for the statistics. A path is taken for a sample
        store unless one of the arguments for cubes is given.
    to_pred : str or list of str, optional
        Target variables. Items are then pairs ``(X, y)``.
    features : str or list of str, optional
        Feature variables; by default all that are no targets. Without `to_pred`, items are X.
    block_size : mapping or pairs, optional
        For a cube without a split, with `data_split` below 1: blocks of the split.
    sample_size : mapping or pairs, optional
        For a cube: cells of a window by dim.
    overlap : mapping, pairs or float, optional
        For a cube: fraction of a window that neighbours share, by dim.
    block_sizes : mapping or pairs, optional
        The same as `block_size`.
    part : {"train", "test", "val"}
        For a cube: whose samples. Without a split, all windows are training samples.
    dtype : str or dtype
        Type of the values.
    target_dtype : str or dtype, optional
        Type of the targets, if another (``"int64"`` for classes).
    cache_mb : float
        Memory for decoded chunks when samples are asked for one by one.
    **cutting
        For a cube, as `MultiProcSampler` takes them: `apply_mask`, `drop_sample`,
        `fill_method`, `const`, `filter_var`, `drop_nan`, `scale_fn`, `callback`,
        `data_split` (1.0 unless given), `val_split`, `data_fraq`, `rand_chunk`, `seed`,
        `nproc`.

    Attributes
    ----------
    features, targets : tuple of str
        Variables of X and of y, in channel order.
    metadata : StoreMetadata or None
        What a store says about itself, or the same about a cube; None for samples made by
        hand.

    Raises
    ------
    StoreError
        If a store is not whole: a shard is missing or has the wrong size. A flipped bit is
        noticed when its chunk is read; the message names the chunk.
    InvalidValueError
        If a variable is unknown, or stacked variables differ in their windows.

    Notes
    -----
    With `to_pred` an item is ``(X, y)``, with `features` alone X, with neither a dict
    ``{variable: tensor}``. Variables are stacked as channels first: X has the shape
    (channels, *window), for points (channels,).

    Examples
    --------
    >>> a, b = np.ones((4, 3)), np.arange(4)
    >>> import xarray as xr
    >>> ds = xr.Dataset({"a": (("samples", "lat"), a), "b": ("samples", b)})
    >>> PTXrDataset(ds, to_pred="b")[2]
    (tensor([[1., 1., 1.]]), tensor([2.]))
    >>> PTXrDataset(ds)[2]["b"]
    tensor(2.)
    """

    def __init__(
        self,
        ds: Any,
        to_pred: str | Sequence[str] | None = None,
        features: str | Sequence[str] | None = None,
        block_size: SizesLike | None = None,
        sample_size: SizesLike | None = None,
        overlap: SizesLike | float | None = None,
        *,
        block_sizes: SizesLike | None = None,
        part: str = "train",
        dtype: Any = "float32",
        target_dtype: Any = None,
        cache_mb: float = 256,
        **cutting: Any,
    ) -> None:
        if block_size is not None and block_sizes is not None:
            raise InvalidTypeError("block_size and block_sizes are the same; give one of them")
        self._source, self.metadata = open_source(
            ds,
            part=part,
            sample_size=sample_size,
            overlap=overlap,
            block_size=block_size if block_size is not None else block_sizes,
            options=cutting,
        )
        self._choose_variables(parse_names("to_pred", to_pred), parse_names("features", features))
        self._fields = self._make_fields(np.dtype(dtype), np.dtype(target_dtype or dtype))
        self._starts = np.concatenate([[0], np.cumsum(self._source.counts)])
        self._cache = _ChunkCache(self._source, self._fields, int(cache_mb * _MB))

    @property
    def statistics(self) -> Statistics | None:
        """Statistics that scaled the samples; None if they are not known."""
        return self.metadata.statistics if self.metadata else None

    def __len__(self) -> int:
        """How many samples."""
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Any:
        """Sample at `index`; negative counts from the end."""
        return self._items(self.take([index]))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Several samples at once, each chunk read once; torch's loaders call this."""
        return self._items(self.take(indices))

    def take(self, indices: Sequence[int] | NDArray[Any]) -> Batch:
        """Read several samples as one batch.

        Parameters
        ----------
        indices : sequence of int
            Which samples; negative numbers count from the end.

        Returns
        -------
        tuple of Tensor, Tensor or dict of str to Tensor
            As an item, with a leading axis of samples.

        Raises
        ------
        IndexError
            If there is no such sample.
        """
        wanted = self._rows(indices)
        chunks = np.searchsorted(self._starts, wanted, side="right") - 1
        out = [field.empty(len(wanted)) for field in self._fields]
        for chunk in np.unique(chunks).tolist():
            here = np.flatnonzero(chunks == chunk)
            inside = wanted[here] - self._starts[chunk]
            for target, values in zip(out, self._cache.get(chunk), strict=True):
                target[here] = values[inside]
        return self.pack([torch.from_numpy(array) for array in out])

    def coords(self, index: int | Sequence[int]) -> dict[str, Any]:
        """Where samples come from.

        Parameters
        ----------
        index : int or sequence of int
            Which sample, or samples.

        Returns
        -------
        dict of str to value or ndarray
            Every coordinate along the samples: the origin along each cube dim, as value and
            as integer index (``lat``, ``lat_index``, ...). Empty if the data has none.
        """
        rows = np.atleast_1d(self._rows(index))
        found = self._source.coords(rows)
        return {k: v if np.ndim(index) else v[0] for k, v in found.items()}

    def _rows(self, indices: Any) -> Ints:
        """Count negative indices from the end, and refuse those that do not exist."""
        wanted = np.asarray(indices, np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if ((wanted < 0) | (wanted >= len(self))).any():
            raise IndexError(f"sample {indices} of {len(self)} samples")
        return wanted

    def blocks(self, indices: Sequence[int] | NDArray[Any]) -> tuple[Ints, str]:
        """Say which samples belong together, to judge how well batches are mixed.

        Parameters
        ----------
        indices : sequence of int
            Which samples.

        Returns
        -------
        blocks : ndarray of int64
            Number of the block in which each sample begins.
        unit : str
            What a block is: ``"blocks of the split"`` for a store that knows them, else
            ``"chunks"``.
        """
        rows = self._rows(indices)
        plan = self.metadata.split.get("plan", {}) if self.metadata else {}
        if "grid" not in plan or isinstance(self._source, CubeSource):
            return np.searchsorted(self._starts, rows, side="right") - 1, "chunks"
        grid = Grid.from_json(json.dumps(plan["grid"]))
        origins = self._source.coords(rows)
        along = [
            origins[f"{dim}_index"] // stride
            for dim, stride in zip(grid.dims, grid.stride, strict=True)
        ]
        return np.ravel_multi_index(along, grid.counts).astype(np.int64), "blocks of the split"

    def pack(self, arrays: Sequence[Tensor]) -> Batch:
        """Put the arrays of a batch into the form of an item.

        Parameters
        ----------
        arrays : sequence of Tensor
            X, or X and y, or one per variable.

        Returns
        -------
        tuple of Tensor, Tensor or dict of str to Tensor
            A pair, X alone, or a dict.
        """
        if self.targets:
            return tuple(arrays)
        if self._stacked:
            return arrays[0]
        return {field.variables[0]: a for field, a in zip(self._fields, arrays, strict=True)}

    def _items(self, batch: Batch) -> list[Any]:
        """Take a batch apart into samples."""
        if isinstance(batch, Tensor):
            return list(batch)
        if isinstance(batch, tuple):
            return list(zip(*batch, strict=True))
        return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]

    def _choose_variables(self, targets: tuple[str, ...], chosen: tuple[str, ...]) -> None:
        """Settle which variables are X and which are y, and whether they are stacked."""
        stored = tuple(self._source.schema)
        for argument, names in (("to_pred", targets), ("features", chosen)):
            unknown = [name for name in names if name not in stored]
            if unknown:
                raise InvalidValueError(
                    f"{argument} names {unknown}, the samples have {list(stored)}; choose of these"
                )
        both = set(targets) & set(chosen)
        if both:
            raise InvalidValueError(f"{sorted(both)} are in to_pred and in features; drop them")
        self.targets = targets
        self.features = chosen or tuple(name for name in stored if name not in targets)
        self._stacked = bool(chosen or targets)
        if not self.features:
            raise InvalidValueError(
                f"no variable is left to predict {list(targets)} from, the samples have "
                f"{list(stored)}; name fewer in to_pred"
            )

    def _make_fields(self, dtype: np.dtype[Any], target_dtype: np.dtype[Any]) -> tuple[Field, ...]:
        windows = {name: self._window(name) for name in (*self.features, *self.targets)}
        if not self._stacked:
            return tuple(Field((n,), windows[n], dtype, stacked=False) for n in self.features)
        fields = []
        for names, kind in ((self.features, dtype), (self.targets, target_dtype)):
            sizes = {name: windows[name] for name in names}
            if len(set(sizes.values())) > 1:
                raise InvalidValueError(
                    f"variables with different windows cannot be stacked: {sizes}; choose some "
                    "with features="
                )
            if names:
                fields.append(Field(names, windows[names[0]], kind))
        return tuple(fields)

    def _window(self, name: str) -> tuple[int, ...]:
        window, dtype = self._source.schema[name]
        if np.dtype(dtype).kind not in "fiub":
            raise InvalidTypeError(
                f"variable {name!r} is of dtype {np.dtype(dtype)}, which no tensor can hold; "
                "leave it out with features="
            )
        return window


class _ChunkCache:
    """The chunks used last, decoded; bounded, shared by threads, empty after pickling."""

    def __init__(self, source: ChunkSource, fields: tuple[Field, ...], limit: int) -> None:
        self._source, self._fields, self._limit = source, fields, limit
        self._chunks: OrderedDict[int, list[NDArray[Any]]] = OrderedDict()
        self._lock = Lock()
        self._held = 0

    def __reduce__(self) -> tuple[Any, ...]:
        return _ChunkCache, (self._source, self._fields, self._limit)

    def get(self, chunk: int) -> list[NDArray[Any]]:
        """Return the arrays of a chunk, one per field."""
        with self._lock:
            if chunk in self._chunks:
                self._chunks.move_to_end(chunk)
                return self._chunks[chunk]
        arrays = [field.empty(int(self._source.counts[chunk])) for field in self._fields]
        read_chunk(self._source, chunk, self._fields, arrays)
        with self._lock:
            if chunk not in self._chunks:
                self._chunks[chunk] = arrays
                self._held += sum(array.nbytes for array in arrays)
            while self._held > self._limit and len(self._chunks) > 1:
                _, oldest = self._chunks.popitem(last=False)
                self._held -= sum(array.nbytes for array in oldest)
        return arrays


def _rank_and_world(parallel: bool) -> tuple[int, int]:
    """This rank and the number of ranks; (0, 1) where no process group was initialised."""
    dist = torch.distributed
    if parallel and dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


class _Plan:
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
            raise InvalidValueError(
                f"{self.n} training samples make no batch of batch_size={self.batch_size} on "
                f"{world} rank(s); choose a smaller batch_size"
                + (" or drop_last=False" if self.n >= world and self.drop_last else "")
            )
        return share

    def advance(self, share: Share, epoch: int, start: int, batches: int) -> None:
        """Note that so many batches were handed out: of all ranks in training, else of this."""
        if isinstance(share, TrainShare):
            done = min(start + batches * share.global_batch, share.stop(start))
        else:
            done = min(start + batches * share.batch_size, share.num_samples)
        self.cursor.advance(epoch, done)


class SampleLoader:
    """Batches of a `PTXrDataset`, decoded by threads; made by `prep_dataloader`.

    Iterates like a DataLoader. If the samples fit into `buffer_mb` they are read once and
    shuffled as a whole; else chunks pass through a ring of slots, and a batch mixes samples
    of many chunks (see `ml4cube.core.shard.ChunkOrder`).

    Parameters
    ----------
    dataset : PTXrDataset
        Where samples come from.
    plan : object
        Whose turn it is; made by `prep_dataloader`.
    memory : object
        What of the samples fits into memory; made by `prep_dataloader`.
    callback : callable, optional
        Makes a batch of a list of items.
    threads : int
        Chunks decoded at once.

    Attributes
    ----------
    batch_size : int
        Samples in a batch of one rank.
    parallel : bool
        Whether ranks share the samples.
    """

    def __init__(
        self,
        dataset: PTXrDataset,
        plan: _Plan,
        memory: _Memory,
        callback: Collate | None,
        threads: int,
    ) -> None:
        self.dataset, self.callback = dataset, callback
        self.batch_size, self.parallel = plan.batch_size, plan.parallel
        self._plan, self._threads = plan, threads
        self._memory = memory
        self._resident: tuple[range, Resident] | None = None
        self._idle_ring: tuple[int, Ring] | None = None
        self._buffers = [Buffers(field, self.batch_size) for field in dataset._fields]

    def __len__(self) -> int:
        """Batches of this rank in one epoch."""
        return len(self._plan.share())

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
        return self._plan.cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where a state was taken, on any number of ranks.

        Parameters
        ----------
        state : mapping
            From `state_dict`.

        Raises
        ------
        InvalidValueError
            If the state belongs to other data or another order.
        """
        self._plan.cursor.load_state_dict(state)

    def shuffle_report(self, epoch: int = 0, batches: int = 32) -> ShuffleReport:
        """Say how well the batches of this rank are mixed.

        Samples that lie near one another resemble one another, so a batch of few blocks is
        worth fewer samples than it has. The remedy is a larger `buffer_mb`, or a store written
        in shuffled order (the sampler's default).

        Parameters
        ----------
        epoch : int
            Which epoch.
        batches : int
            How many batches to look at, evenly spaced over the epoch.

        Returns
        -------
        ShuffleReport
            The effective batch size, and the least number of blocks in a batch.

        Raises
        ------
        InvalidValueError
            If the loader has no batch on this rank.
        """
        check_whole("batches", batches, 1)
        share = self._plan.share()
        if not len(share):
            raise InvalidValueError("the loader has no batch on this rank, so nothing is mixed")
        order = self._order(epoch)
        chosen = set(np.linspace(0, len(share) - 1, batches).astype(int).tolist())
        found = [
            self.dataset.blocks(positions if order is None else order[positions])
            for number, positions in enumerate(share.batches())
            if number in chosen
        ]
        return ShuffleReport.of([blocks for blocks, _ in found], found[0][1])

    def _order(self, epoch: int) -> Ints | None:
        """All samples in the order of an epoch; None if that is the order they are stored in."""
        if not self._plan.shuffle:
            return None
        if self._memory.fits:
            return permutation(self._plan.n, self._plan.seed, epoch)
        return self._memory.order(self._plan.seed).samples(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Iterate over one epoch: the one that was set, else the next."""
        share = self._plan.share()
        epoch, start = self._plan.cursor.begin()
        return self._count(share, epoch, start, self._batches(share, epoch, start))

    def _count(self, share: Share, epoch: int, start: int, batches: Iterator[Any]) -> Iterator[Any]:
        for number, batch in enumerate(batches, 1):
            self._plan.advance(share, epoch, start, number)
            yield batch
        self._plan.cursor.finish(epoch)

    def _batches(self, share: Share, epoch: int, start: int) -> Iterator[Any]:
        tensors: list[Tensor] = []

        def take(rows: int) -> list[NDArray[Any]]:
            tensors[:] = self._tensors(rows)
            return [tensor.numpy() for tensor in tensors]

        chunks = self._memory.resident_chunks(share)
        if chunks is None:
            arrays = self._through_ring(share, epoch, start, take)
        else:
            arrays = self._from_memory(chunks, share, epoch, start, take)
        for _ in arrays:
            batch = self.dataset.pack(tensors)
            tensors = []
            yield batch if self.callback is None else self.callback(self.dataset._items(batch))
            del batch

    def _tensors(self, rows: int) -> list[Tensor]:
        if torch.cuda.is_available():
            # torch's own pinned memory knows of copies to the GPU that are still under way
            return [
                torch.from_numpy(field.empty(0)).new_empty((rows, *field.shape), pin_memory=True)
                for field in self.dataset._fields
            ]
        return [torch.from_numpy(buffer.take(rows)) for buffer in self._buffers]

    def _from_memory(
        self, chunks: range, share: Share, epoch: int, start: int, take: Any
    ) -> Iterator[Any]:
        if self._resident is None or self._resident[0] != chunks:
            source, fields = self.dataset._source, self.dataset._fields
            self._resident = chunks, Resident(source, fields, self._threads, chunks)
        resident = self._resident[1]
        order = None
        if self._plan.shuffle:
            order = permutation(self._plan.n, self._plan.seed, epoch)
        for positions in share.batches(start):
            out = take(len(positions))
            resident.gather(positions if order is None else order[positions], out)
            yield out

    def _through_ring(self, share: Share, epoch: int, start: int, take: Any) -> Iterator[Any]:
        order = self._memory.order(self._plan.seed if self._plan.shuffle else None)
        if isinstance(share, TrainShare):
            tour = order.tour(epoch, start, share.stop(start), share.rank, share.world)
        else:
            tour = order.tour(epoch, share.begin + start, share.end)
        slots = self._memory.slots(order, share)
        threads = self._threads
        if self.dataset._source.slow:
            threads = max(threads, min(_SLOW_READS, slots))
        if self._idle_ring is not None and self._idle_ring[0] == slots:
            ring, self._idle_ring = self._idle_ring[1], None
        else:
            ring = Ring(self.dataset._source, self.dataset._fields, slots, threads)
        try:
            yield from ring.batches(tour, share.batches(start), take)
        finally:
            self._idle_ring = slots, ring


class _Memory:
    """What of a data set fits into a loader's memory, and the order that follows from it."""

    def __init__(self, dataset: PTXrDataset, buffer_mb: float) -> None:
        self._counts = dataset._source.counts
        self._starts = dataset._starts
        self._sample_bytes = max(1, sum(field.nbytes for field in dataset._fields))
        self._bytes = int(buffer_mb * _MB)
        self._buffer_mb = buffer_mb
        chunk_bytes = int(self._counts.max(initial=1)) * self._sample_bytes
        self._room = self._bytes // max(chunk_bytes, 1)
        self.fits = int(self._starts[-1]) * self._sample_bytes <= self._bytes
        if self._room < 2 and not self.fits:
            raise InvalidValueError(
                f"buffer_mb={buffer_mb} does not hold two chunks of {chunk_bytes / _MB:.3g} MB; "
                f"give at least {2 * chunk_bytes / _MB:.3g}, or store smaller chunks"
            )

    @property
    def streams(self) -> int:
        """Chunks that a shuffled batch mixes when the samples do not fit."""
        return stream_count(int((self._counts > 0).sum()), self._room)

    @property
    def order_name(self) -> str:
        """The kind of shuffle, for the loader's state."""
        return "whole" if self.fits else f"{self.streams} streams"

    def resident_chunks(self, share: Share) -> range | None:
        """Chunks to hold in memory for good; None if they do not fit."""
        if isinstance(share, TrainShare):
            return range(len(self._counts)) if self.fits else None
        if share.begin == share.end:
            return range(0)
        first = int(np.searchsorted(self._starts, share.begin, side="right")) - 1
        stop = int(np.searchsorted(self._starts, share.end, side="left"))
        held = int(self._starts[stop] - self._starts[first])
        return range(first, stop) if held * self._sample_bytes <= self._bytes else None

    def order(self, seed: int | None) -> ChunkOrder:
        """Return the order of samples that pass through a ring."""
        return ChunkOrder(self._counts, 1 if seed is None else self.streams, seed)

    def slots(self, order: ChunkOrder, share: Share) -> int:
        """Chunks in this rank's ring: its share of the memory, and never too few."""
        used, room = order.streams, self._room
        if isinstance(share, TrainShare) and used % share.world == 0:
            used, room = used // share.world, room // share.world
        return min(max(used + 1, room), max(len(self._counts), used + 1))


class ShareSampler(Sampler[int]):
    """Samples of one rank, in the order of an epoch, for a torch DataLoader.

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

    def __init__(self, plan: _Plan, order: Callable[[int], Ints] | None = None) -> None:
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

    @property
    def parallel(self) -> bool:
        """Whether ranks share the samples."""
        return self.sampler.plan.parallel

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
        return self.sampler.plan.cursor.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iteration go on where a state was taken, on any number of ranks.

        Parameters
        ----------
        state : mapping
            From `state_dict`.

        Raises
        ------
        InvalidValueError
            If the state belongs to other data or another order.
        """
        self.sampler.plan.cursor.load_state_dict(state)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Iterate over one epoch: the one that was set, else the next."""
        plan = self.sampler.plan
        # torch draws the seed of its workers when it starts: from this generator, so that the
        # global random state is neither read nor changed
        assert self.generator is not None
        self.generator.manual_seed(worker_seed(plan.seed, plan.cursor.coming))
        return self._count(super().__iter__())

    def _count(self, batches: Iterator[Any]) -> Iterator[Any]:
        plan, begun = self.sampler.plan, None
        share = plan.share()
        for number, batch in enumerate(batches, 1):
            begun = begun or self.sampler.begun
            plan.advance(share, *begun, number)
            yield batch
        plan.cursor.finish((begun or self.sampler.begun)[0])


def prep_dataloader(
    train_ds: Any,
    test_ds: Any = None,
    batch_size: int = 1,
    callback: Collate | None = None,
    num_workers: int = 0,
    parallel: bool = False,
    shuffle: bool = True,
    drop_last: bool = True,
    *,
    val_ds: Any = None,
    seed: int = 42,
    buffer_mb: float = 512,
    workers: str = "threads",
) -> Any:
    """Make loaders for training, and for testing and validation if asked for.

    Parameters
    ----------
    train_ds : PTXrDataset or map-style data set
        Samples to train on.
    test_ds : PTXrDataset or map-style data set, optional
        Samples to test on.
    batch_size : int
        Samples in a batch of one rank.
    callback : callable, optional
        Makes a batch of a list of items; by default tensors are stacked.
    num_workers : int
        For a `PTXrDataset`: decode threads, 0 for as many as help. For other data sets:
        worker processes, 0 for none. They are never forked and never run the calling script
        again, so no ``if __name__ == "__main__"`` is needed.
    parallel : bool
        Whether the ranks of the process group share the samples. Rank and world are read
        when an epoch begins; without an initialised group there is one rank.
    shuffle : bool
        Whether the training samples are shuffled, anew each epoch.
    drop_last : bool
        Whether a last training batch that is not full is left out. With ``False`` it is
        kept, equal on all ranks, so fewer than one sample per rank is left out.
    val_ds : PTXrDataset or map-style data set, optional
        Samples to validate on.
    seed : int
        Seed of the shuffle. The order is a function of the seed and the epoch alone: the
        same global batches for any number of ranks, threads and processes.
    buffer_mb : float
        For a `PTXrDataset`: memory of each loader for decoded samples. The order depends on
        it where the samples do not fit.
    workers : {"threads", "processes"}
        "processes" loads a `PTXrDataset` in `num_workers` processes instead of threads: for
        a slow `callback` in Python, else slower.

    Returns
    -------
    SampleLoader or MapLoader, or tuple of them
        One loader, or one for each data set given: train, test, val. Test and validation
        loaders are never shuffled and never drop samples: every sample comes exactly once
        over all ranks, without padding, so that ranks may differ in their batches.

    Raises
    ------
    InvalidTypeError
        If a data set has no length or cannot be indexed.
    InvalidValueError
        If a number cannot work, or there are fewer training samples than one global batch.

    Examples
    --------
    >>> from torch.utils.data import TensorDataset
    >>> data = TensorDataset(torch.arange(10.0))
    >>> train, test = prep_dataloader(data, data, batch_size=4)
    >>> [len(x) for (x,) in train], [x.tolist() for (x,) in test]
    ([4, 4], [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0]])
    """
    check_choice("workers", workers, ["threads", "processes"])
    check_whole("num_workers", num_workers, 0)

    def loader(argument: str, data: Any, train: bool) -> SampleLoader | MapLoader:
        _check_dataset(argument, data)
        memory = _Memory(data, buffer_mb) if isinstance(data, PTXrDataset) else None
        plan = _Plan(
            len(data),
            batch_size=batch_size,
            train=train,
            shuffle=train and shuffle,
            drop_last=drop_last,
            parallel=parallel,
            seed=seed,
            order=memory.order_name if memory else "whole",
        )
        if memory and workers == "threads":
            return SampleLoader(data, plan, memory, callback, num_workers or _useful_threads())
        return _map_loader(data, plan, memory, callback, num_workers)

    loaders = [loader("train_ds", train_ds, True)]
    for argument, data in (("test_ds", test_ds), ("val_ds", val_ds)):
        if data is not None:
            loaders.append(loader(argument, data, False))
    return loaders[0] if len(loaders) == 1 else tuple(loaders)


prepare_dataloader = prep_dataloader


def _map_loader(
    data: Any, plan: _Plan, memory: _Memory | None, callback: Collate | None, processes: int
) -> MapLoader:
    order = None
    if memory and not memory.fits:
        order = memory.order(plan.seed).samples
    context = None
    if processes:
        from loky.backend import get_context

        context = get_context("loky")
    return MapLoader(
        data,
        batch_size=plan.batch_size,
        sampler=ShareSampler(plan, order),
        collate_fn=callback,
        num_workers=processes,
        multiprocessing_context=context,
        generator=torch.Generator(),
        pin_memory=torch.cuda.is_available(),
    )


def _check_dataset(argument: str, data: Any) -> None:
    if isinstance(data, IterableDataset) or not (
        hasattr(data, "__len__") and hasattr(data, "__getitem__")
    ):
        raise InvalidTypeError(
            f"{argument} is a {type(data).__name__}, which has no length or cannot be indexed; "
            "give a PTXrDataset, a TensorDataset or another map-style data set"
        )


def _useful_threads() -> int:
    """Decode threads that help: up to four, shared among the ranks of this machine."""
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    here = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(4, (available or 1) // here))
