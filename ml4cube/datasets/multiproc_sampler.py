"""MultiProcSampler: the batch job that turns a cube into training stores. Plans, then writes."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
import warnings
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xarray as xr

from ml4cube.core.errors import (
    CubeError,
    EmptyPartError,
    InvalidValueError,
    StoreExistsError,
    check_choice,
    check_flags,
    check_seed,
    check_whole,
)
from ml4cube.core.grid import SizesLike
from ml4cube.progress import Stage
from ml4cube.sampling.engines import (
    DaskCluster,
    Engine,
    check_client,
    choose_engine,
)
from ml4cube.sampling.extractor import Callback, Extractor
from ml4cube.sampling.identity.callback import checked_identity, copy_of, name_of
from ml4cube.sampling.identity.provenance import Call, provenance
from ml4cube.sampling.layout import ORDERS, chunk_samples, layout_of, shard_tasks
from ml4cube.sampling.plan import SamplePlan, check_missing_chunks, make_plan
from ml4cube.sampling.request import MAX_CHUNK_MB, Sampling, check_stored_names
from ml4cube.sampling.rescaling import places_of
from ml4cube.sampling.shards import ShardJob, make_shard
from ml4cube.store.encoding import Compressor
from ml4cube.store.folders import Files
from ml4cube.store.format import (
    StoreLayout,
    StoreMetadata,
    create,
    finish,
    open_store,
    write_axes,
)
from ml4cube.store.locations import Place, ZarrFolder
from ml4cube.store.precision import Precision
from ml4cube.store.publishing.draft import Draft, work_place
from ml4cube.store.publishing.local import put_back
from ml4cube.store.publishing.opening import open_draft, sweep, was_published
from ml4cube.store.publishing.overwriting import check_overwritable, is_taken
from ml4cube.store.publishing.targets import is_in_memory, targets_of
from ml4cube.store.write_errors import WriteErrors

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunSummary:
    """What a run of the sampler wrote.

    Parameters
    ----------
    plan : SamplePlan
        Samples of each part, drops by reason, statistics.
    nbytes : dict of str to int
        Bytes of samples on disk, by store.
    resumed : int
        Shards that an earlier, interrupted run of the same call had written.
    shards : int
        All shards.
    seconds : float
        Wall time of this run.
    """

    plan: SamplePlan
    nbytes: Mapping[str, int]
    resumed: int
    shards: int
    seconds: float

    def __str__(self) -> str:
        """A table for people."""
        rows = [str(self.plan)]
        rows += [f"{size / 1e6:>14,.1f} MB on disk: {place}" for place, size in self.nbytes.items()]
        earlier = f", {self.resumed} of them by an earlier run" if self.resumed else ""
        rate = sum(self.plan.samples.values()) / max(self.seconds, 1e-9)
        rows.append(
            f"{self.seconds:>14,.1f} s, {self.shards} shards{earlier}, {rate:,.0f} samples/s"
        )
        return "\n".join(rows)


class MultiProcSampler:
    """Cuts samples from a cube and writes them as one zarr store per part, on many processes.

    Windows lie on one grid over the whole cube, ``size - overlap`` cells apart. A window belongs
    to a part if all its cells do. Every window ends as a sample of one part or is counted as
    dropped with a reason. The order of work is label, mask, drop, fill, callback, scale; the
    statistics are those of the train samples after the callback. The same call gives the same
    bytes for any `nproc` and `chunk_batch`.

    Parameters
    ----------
    ds : Dataset, DataArray, str, path, zarr store or group, or Icechunk session
        The cube, of any dims; a path or URL of a zarr store works too. Variables that lack a
        dim are broadcast; bounds, scalars and texts are left out. If it carries a split label
        (see `assign_block_split`), that decides about parts.
    rand_chunk : bool
        With ``data_fraq < 1``: draw the blocks at random rather than take the first ones.
    data_fraq : float
        Fraction of the blocks to use, above 0 and up to 1; a window belongs to the block in
        which it starts. The others are counted as ``unused``.
    nproc : int
        Worker processes; 1 works in this process.
    apply_mask : bool
        Whether the mask is applied, if the cube has one.
    drop_sample : bool
        Whether a sample with a cell outside the mask is dropped. If not, such cells become
        gaps. Points outside the mask are dropped always; ``drop_nan="masked"`` brings its own
        rule, and cells outside the mask become gaps.
    fill_method : {"sample_mean", "mean", "constant", "noise", None} or mapping
        What stands in for gaps of float variables in samples that are kept: the sample's mean
        (or the train mean if it has none), the train mean, `const`, or seeded noise within the
        train range. One method fills all variables but those of `to_pred`; a mapping, as
        ``{"rain": "mean", "ndvi": None}``, fills those it names, targets too. With
        ``drop_nan="auto"`` no sample with a gap is kept, so that nothing is filled.
    const : float, optional
        The value for ``"constant"``.
    filter_var : str, optional
        The mask variable, true where cells count; a static one is enough. Not stored.
    chunk_size : int or sequence of int, optional
        Samples of a chunk in the stores (the first number; a chunk holds whole windows). By
        default chosen for training reads.
    train_cube, test_cube : str, path, zarr store or StorePath, or Icechunk session
        Where the stores will stand: paths, URLs that fsspec knows (``"s3://..."``;
        ``"memory://..."`` with one process and no cluster of others), or places inside a
        writable zarr store, such as ``StorePath(session.store, "train")`` of an Icechunk
        session, which you commit afterwards. Nothing is there before it is complete.
    drop_nan : {"auto", "if_all_nan", "masked", None}
        Which samples are dropped for gaps (NaN, infinite): those with any; those where all
        variables are all gap; those without a cell inside the mask or with a gap there; none.
    array_dims : sequence of str, optional
        Names of the stored dims, ``("samples", ...)``: cube dims to keep, also those of one
        cell, in any order; or new names for the dims that are kept anyway.
    data_split : float
        Fraction of blocks for training, if the cube has no split label.
    chunk_batch : int, optional
        Tiles that one counting task reads; speed only.
    callback : callable, optional
        Takes a dict of arrays ``(n, *window)`` and returns one; must treat each sample by itself.
        Variables that it adds are stored, those that it leaves out are not. It works as a copy,
        with one process too: what it appends to a list of yours is not seen. Modules are not
        copied: several processes import them anew. The call is another one once you have changed
        the callback's code, defaults or closure, or a function or value of yours that it names;
        installed libraries are not looked into. See also `version`.
    block_size : mapping or pairs, optional
        Blocks for `data_split` and `data_fraq`, in cells by dim; a dim that is missing is not
        cut. By default `data_split` shares out few large blocks of whole windows, with a warning,
        as `assign_block_split` does; and `data_fraq` counts chunks, or some dozens of blocks.
    sample_size : mapping or pairs, optional
        Cells of a window by dim, 1 for dims left out. None: single points.
    overlap : mapping, pairs or float, optional
        Fraction of a window that neighbours share by dim.
    scale_fn : {"standardize", "normalize", None}
        How float variables are scaled by the train statistics; others never are.
    val_cube : str, path, zarr store or StorePath, or Icechunk session, optional
        Where the validation store will stand, as for `train_cube`; needed if the label has a
        validation part, and refused if it has none.
    val_split : float, optional
        Fraction of blocks for validation, if the cube has no split label. By default, with a
        `val_cube`, half of what `data_split` leaves.
    seed : int
        Seeds the split, the order, `rand_chunk` and noise.
    overwrite : bool
        Replace stores of ours that stand at the paths; anything else is never replaced.
    resume : bool
        Go on where an interrupted run of the same call stopped.
    to_pred : str or list of str, optional
        Variables to predict; recorded in the stores.
    features : str or list of str, optional
        Variables to predict from; by default all others.
    order : {"shuffled", "grid"}
        Order of samples: tiles of neighbouring windows in seeded random order, mixed among a
        few dozen tiles; or tile by tile in the cube's order.
    client : dask.distributed Client or str, optional
        Sends the same tasks to a cluster, by its client or its scheduler's address; an active
        client is used without being named. Cube and paths must be where its workers see them.
    progress : bool
        Whether to show bars in terminals and notebooks, and elsewhere a line on stderr for each
        tenth of a long stage.
    compressors : {"lz4", "zstd", None} or zarr.codecs.BloscCodec
        How chunks are compressed: fast to read, smaller, not at all, or in detail. The names
        stand for blosc: "lz4" with byte shuffle, or bitshuffle if there is `bitround`; "zstd"
        with bitshuffle. A checksum is added always.
    dtype : dtype or mapping, optional
        Float dtype to store float variables in, of all or by variable: ``"float16"`` halves a
        store of scaled float32. Samples are cast after they are scaled.
    bitround : int or mapping, optional
        Bits of mantissa to keep of float variables, of all or by variable; the others become
        zero, which compresses well. 10 bits are about three digits.
    max_chunk_mb : float
        Most megabytes that a decoded chunk of the cube may have; a worker holds some at a time.
    missing_chunks : {"fill", "raise"}
        What of chunks that the cube's zarr store does not have, and which read as its fill value.
        They are counted in the plan, and warned of where that value is no gap; or refused.
    statistics : Statistics, CubeScaler, or a sample store or its path, optional
        What float variables are scaled by, instead of the statistics of this call's train
        samples: so that stores share their scaling, or to scale per level, pixel or month
        (``CubeScaler(per=("variable", "level"))``). Coordinates are matched by their values and
        dates by month, season or day. `scale_fn` says how ``Statistics`` scale; a scaler or store
        brings its own way.
    version : str or int, optional
        Version of `callback`, to be changed with it. By default its source code and what that
        names tell whether the callback is the same as before. Where they do not (it uses objects
        of your classes, a model, source that cannot be found), the call warns, resumes nothing and
        opens no store that exists, unless `version` is given.

    Warns
    -----
    UserWarning
        If the cube has no split label and `block_size` is not given: which blocks were chosen,
        and how to choose better ones. If nothing tells whether `callback` is that of an earlier
        call.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        If an argument cannot work; the message names it, its value and the choices.
    StoreError
        If no cube can be read from `ds`, or a zarr store that is named cannot be opened.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> cube = xr.Dataset({"t2m": (("time", "x"), np.arange(80.0).reshape(20, 4))})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     sampler = MultiProcSampler(
    ...         cube,
    ...         train_cube=f"{folder}/train.zarr",
    ...         test_cube=f"{folder}/test.zarr",
    ...         sample_size=[("x", 2)],
    ...         block_size=[("time", 4)],
    ...         nproc=1,
    ...     )
    ...     train, test = sampler.get_datasets()
    ...     print(dict(train.sizes), dict(test.sizes))
    {'samples': 32, 'x': 2} {'samples': 8, 'x': 2}
    """

    def __init__(
        self,
        ds: Any,
        rand_chunk: bool = False,
        data_fraq: float = 1.0,
        nproc: int = 4,
        apply_mask: bool = True,
        drop_sample: bool = True,
        fill_method: str | Mapping[str, str | None] | None = None,
        const: float | None = None,
        filter_var: str | None = "filter_mask",
        chunk_size: int | Sequence[int] | None = None,
        train_cube: Any = "train_cube.zarr",
        test_cube: Any = "test_cube.zarr",
        drop_nan: str | None = "auto",
        array_dims: Sequence[str] | None = None,
        data_split: float = 0.8,
        chunk_batch: int | None = None,
        callback: Callback | None = None,
        block_size: SizesLike | None = None,
        sample_size: SizesLike | None = None,
        overlap: SizesLike | float | None = None,
        scale_fn: str | None = "standardize",
        *,
        val_cube: Any = None,
        val_split: float | None = None,
        seed: int = 42,
        overwrite: bool = False,
        resume: bool = True,
        to_pred: str | Iterable[str] | None = None,
        features: str | Iterable[str] | None = None,
        order: str = "shuffled",
        client: Any = None,
        progress: bool = True,
        compressors: Any = "lz4",
        dtype: Any = None,
        bitround: Any = None,
        max_chunk_mb: float = MAX_CHUNK_MB,
        missing_chunks: str = "fill",
        statistics: Any = None,
        version: str | int | None = None,
    ) -> None:
        """Check every argument against the cube; read none of its cells."""
        check_client(client)
        self._client = client
        check_whole("nproc", nproc, 1)
        self.nproc = int(nproc)
        check_choice("order", order, ORDERS)
        if chunk_batch is not None:
            check_whole("chunk_batch", chunk_batch, 1)
        flags = {"rand_chunk": rand_chunk, "overwrite": overwrite, "resume": resume}
        check_flags({**flags, "progress": progress})
        self.targets = targets_of(
            {"train": train_cube, "test": test_cube, "val": val_cube},
            here=nproc == 1 or client is not None,
        )
        if val_split and val_cube is None:
            raise InvalidValueError(f"val_split={val_split!r} needs val_cube; give it a path")
        self._identity = checked_identity(callback, version)
        self.sampling = Sampling.of(
            ds,
            rand_chunk=rand_chunk,
            data_fraq=data_fraq,
            filter_var=filter_var,
            array_dims=array_dims,
            data_split=data_split,
            val_split=val_split,
            wants_val=val_cube is not None,
            callback=None if callback is None else copy_of(callback),
            block_size=block_size,
            sample_size=sample_size,
            overlap=overlap,
            seed=check_seed(seed),
            to_pred=to_pred,
            features=features,
            apply_mask=apply_mask,
            drop_sample=drop_sample,
            fill_method=fill_method,
            const=const,
            drop_nan=drop_nan,
            scale_fn=scale_fn,
            max_chunk_mb=max_chunk_mb,
            statistics=statistics,
        )
        self._check_val(read=False)
        check_missing_chunks(missing_chunks, self.sampling.reader)
        self._missing_chunks = missing_chunks
        self._precision = Precision.parse(dtype, bitround)
        self._compressor = Compressor.parse(compressors, rounded=bool(self._precision.keepbits))
        if callback is None:
            ds_dtypes = {n: self.sampling.ds[n].dtype for n in self.sampling.spec.variables}
            self._precision.check_names(ds_dtypes)
        # a callback may rename what the cube has, but not its dims
        check_stored_names(
            self.sampling.spec, self.sampling.spec.variables if callback is None else ()
        )
        self._chunk = chunk_samples(chunk_size, self.sampling.spec)
        self._batch = chunk_batch
        self._order = order
        self._overwrite = overwrite
        self._resume = resume
        self._progress = progress
        self._settings = {
            "order": order,
            "seed": int(seed),
            "data_fraq": float(data_fraq),
            "rand_chunk": bool(rand_chunk),
            "chunk_size": self._chunk,
            "parts": sorted(self.targets),
            "callback": name_of(callback),
            "compressor": asdict(self._compressor),
            "precision": asdict(self._precision),
        }
        if (given := self.sampling.given) is not None:
            self._settings["statistics"] = hashlib.sha256(given.to_json().encode()).hexdigest()
        # with the call, which is another one once the cube has changed
        self._planned: tuple[str, Extractor, SamplePlan] | None = None

    def plan(self) -> SamplePlan:
        """Read the cube once and count, without writing anything.

        Returns
        -------
        SamplePlan
            Samples of each part, drops by reason, bytes, statistics; prints as a table.

        Raises
        ------
        EmptyPartError
            If a part that was asked for would hold no sample.
        InvalidTypeError
            If other processes are to work, and the cube cannot be pickled.
        RunError, StoreError
            If the callback fails, a worker dies, or cells cannot be read.
        """
        with self._engine() as engine:
            return self._plan_on(engine, self._call())[1]

    def _check_val(self, *, read: bool) -> None:
        """Refuse a validation store of which the label knows nothing."""
        if "val" not in self.targets or not self.sampling.labelled:
            return
        if not self.sampling.has_part("val", read=read):
            raise EmptyPartError(
                f"val_cube={str(self.targets['val'])!r} is given, but the split label "
                f"{self.sampling.extractor.label!r} of the cube has no validation part (2); label "
                "the cube with one (assign_block_split(..., val=0.1)), or leave val_cube out"
            )

    def _call(self) -> Call:
        return Call.of(self.sampling, self._settings, self._identity, self._folders())

    def _plan_on(self, engine: Engine, call: Call) -> tuple[Extractor, SamplePlan]:
        if self._planned is None or self._planned[0] != call.id:
            self._check_val(read=True)
            with self._stage("counting", len(self.sampling.extractor.tiles), "tiles") as stage:
                extractor, plan = make_plan(
                    self.sampling,
                    engine,
                    self.targets,
                    batch=self._batch,
                    note=stage.update,
                    missing_chunks=self._missing_chunks,
                )
            check_stored_names(self.sampling.spec, plan.schema)
            scaled_by_train = self.sampling.spec.scale_fn and self.sampling.given is None
            if not plan.samples["train"] and scaled_by_train:
                raise EmptyPartError(
                    "the train part would hold no sample, and its statistics are what "
                    f"scale_fn={self.sampling.spec.scale_fn!r} scales by; give it blocks "
                    "(data_split, or the split label), statistics=, or scale_fn=None"
                )
            self.sampling.scaling(plan.statistics, plan.schema)
            dims = len(self.sampling.spec.dims)
            self._planned = call.id, extractor, plan.stored_as(self._precision, dims)
        return self._planned[1:]

    def run(self) -> RunSummary | None:
        """Write the stores that are not there yet; all of them, with ``overwrite=True``.

        Those that an interrupted run of the same call has replaced already stay.

        Returns
        -------
        RunSummary or None
            What was written, also logged; None if every store stood there already, made by the
            same call.

        Warns
        -----
        UserWarning
            If nothing was written, since every store stood there already.

        Raises
        ------
        StoreExistsError
            If something else stands at a path, also if it came there meanwhile.
        EmptyPartError, RunError, StoreError
            As `plan`; or if another run writes to the same path, or the disk is full. Nothing
            stands at the paths then, and the same call goes on where this one stopped.
        """
        summary = self._run()
        places = ", ".join(map(str, self.targets.values()))
        if summary is None:
            warnings.warn(
                f"nothing was written: {places} stand already, complete and made by the same call. "
                "get_datasets() opens them; overwrite=True writes them anew",
                UserWarning,
                stacklevel=2,
            )
        return summary

    def _run(self) -> RunSummary | None:
        started = time.perf_counter()
        call = self._call()
        summary = None
        with contextlib.ExitStack() as stack:
            if drafts := self._drafts(call, stack):
                plan, resumed = self._write(drafts, call)
                summary = RunSummary(
                    plan,
                    {str(draft.target): _size(draft.files) for draft in drafts.values()},
                    resumed,
                    sum(len(draft.done) for draft in drafts.values()),
                    time.perf_counter() - started,
                )
        for target in self.targets.values():
            sweep(target, call.id)
        # once written, the stores of this object are there to be opened, not replaced again
        self._overwrite = False
        logger.info("%s", summary or "every store stands already")
        return summary

    def _drafts(self, call: Call, stack: contextlib.ExitStack) -> dict[str, Draft]:
        """Take hold of the stores that are not there yet."""
        held: dict[str, Draft] = {}
        # in one order, or of two runs each could hold what the other needs
        for part in sorted(self._wanted(call), key=lambda part: str(self.targets[part])):
            with WriteErrors.of(self.targets[part]):
                draft = open_draft(self.targets[part], call.id)
            held[part] = stack.enter_context(draft)
        # another run may have ended before it gave its locks to this one
        return {part: held[part] for part in self._wanted(call) if part in held}

    def _wanted(self, call: Call) -> list[str]:
        """Parts whose stores are to be written."""
        wanted = [part for part, target in self.targets.items() if not self._stands(target, call)]
        # where all are replaced, that run was over, and this is asked for anew
        return list(self.targets) if self._overwrite and not wanted else wanted

    def _folders(self) -> list[Path]:
        """Where stores stand and grow on this machine's disk."""
        stores = [target for target in self.targets.values() if isinstance(target, Path)]
        return [*stores, *(Path(work_place(store)) for store in stores)]

    def _stands(self, target: Place, call: Call) -> bool:
        """Whether the very store of this call is there; refuse anything that is in the way."""
        with WriteErrors.of(target):
            put_back(target)
            if not is_taken(target):
                return False
            if self._overwrite:
                check_overwritable(target)
                # a run that failed later has replaced it already
                if not (self._resume and was_published(target, call.id)):
                    return False
        try:
            open_store(target)
            found = StoreMetadata.of(target).provenance
        except CubeError as error:
            if self._overwrite:
                return False
            raise StoreExistsError(
                f"{target} exists and is no complete store of this call ({error}); move it away, "
                "choose another path, or replace a store of ours by overwrite=True"
            ) from error
        same = bool(found.get("call") == call.id)
        if not same and not self._overwrite:
            raise StoreExistsError(
                f"{target} exists and was made by another call or from another cube: "
                f"{call.unlike(found)}. Choose another path, or overwrite=True to replace it"
            )
        return same

    def _write(self, drafts: dict[str, Draft], call: Call) -> tuple[SamplePlan, int]:
        """Write and publish; tell the plan and how many shards were there."""
        finished = []
        # stores are described and completed while workers write, the last while they stop
        with ThreadPoolExecutor(1, "ml4cube-finish") as finisher, self._engine() as engine:
            extractor, plan = self._plan_on(engine, call)
            # not before it is sure that this call has something to write
            for draft in drafts.values():
                with WriteErrors.of(draft.target):
                    draft.begin(self._resume)
            resumed = sum(len(draft.done) for draft in drafts.values())
            scaling = self.sampling.scaling(plan.statistics, plan.schema)
            layouts = {
                part: layout_of(
                    self.sampling,
                    plan,
                    part,
                    self._chunk,
                    scaling,
                    self._precision,
                    self._compressor,
                )
                for part in drafts
            }
            jobs = {
                part: ShardJob(
                    extractor,
                    part,
                    draft.root_of_workers(elsewhere=isinstance(engine, DaskCluster)),
                    WriteErrors.of(draft.target),
                    layouts[part],
                    scaling,
                    self._order == "shuffled",
                    self._precision,
                    self.sampling.reader.common(),
                )
                for part, draft in drafts.items()
            }
            described = {
                part: finisher.submit(self._describe, draft, layouts[part])
                for part, draft in drafts.items()
            }
            for part in self._written(engine, jobs, plan, drafts):
                metadata = self._metadata(extractor, plan, part, call)
                finished.append(
                    finisher.submit(
                        self._finish, drafts[part], layouts[part], metadata, described[part]
                    )
                )
        for done in finished:
            done.result()
        for draft in drafts.values():
            with WriteErrors.of(draft.target):
                draft.publish(self._overwrite)
        return plan, resumed

    def _describe(self, draft: Draft, layout: StoreLayout) -> Files:
        with WriteErrors.of(draft.target):
            files = create(draft.root, layout)
            return files | write_axes(draft.root, self._compressor, self._axes())

    def _finish(
        self,
        draft: Draft,
        layout: StoreLayout,
        metadata: StoreMetadata,
        described: Future[Files],
    ) -> None:
        files = described.result() | draft.files
        with WriteErrors.of(draft.target):
            finish(draft.root, layout, metadata.to_attrs(), files)

    def _axes(self) -> dict[str, tuple[Any, Mapping[str, Any]]]:
        extractor = self.sampling.extractor
        return {
            dim: (axis.values, axis.attrs)
            for dim, axis in zip(extractor.spec.dims, extractor.axes, strict=True)
        }

    def _written(
        self,
        engine: Engine,
        jobs: Mapping[str, ShardJob],
        plan: SamplePlan,
        drafts: Mapping[str, Draft],
    ) -> Iterator[str]:
        """Write all shards, of one part after the other, and yield each part that has them all."""
        # No worker waits for the end of a part.
        left = {part: job.layout.shards - len(drafts[part].done) for part, job in jobs.items()}
        recorded: deque[tuple[str, Future[None]]] = deque()
        total = sum(job.layout.shards for job in jobs.values())
        # recording waits for the disk, beside the work
        with (
            self._stage("writing", total, "shards") as stage,
            ThreadPoolExecutor(1, "ml4cube-record") as recorder,
        ):
            stage.update(total - sum(left.values()))
            yield from (part for part, shards in left.items() if shards == 0)

            def settled(wait: bool) -> Iterator[str]:
                while recorded and (wait or recorded[0][1].done()):
                    part, done = recorded.popleft()
                    done.result()
                    stage.update(1)
                    left[part] -= 1
                    if left[part] == 0:
                        yield part

            tasks = self._shard_tasks(plan, jobs, drafts)
            for _, (part, shard, files) in engine.run(make_shard, jobs, tasks):
                recorded.append((part, recorder.submit(_record, drafts[part], shard, files)))
                yield from settled(wait=False)
            yield from settled(wait=True)

    def _shard_tasks(
        self, plan: SamplePlan, jobs: Mapping[str, ShardJob], drafts: Mapping[str, Draft]
    ) -> Iterator[Any]:
        for part, job in jobs.items():
            done = set(drafts[part].done)
            for shard, pieces in shard_tasks(self.sampling, plan, part, job.layout, self._order):
                if shard not in done:
                    readers = self.sampling.tile_tasks(piece.tile for piece in pieces)
                    yield part, shard, pieces, [reader for _, reader in readers]

    def _metadata(
        self, extractor: Extractor, plan: SamplePlan, part: str, call: Call
    ) -> StoreMetadata:
        return StoreMetadata(
            part=part,
            spec=self.sampling.spec,
            statistics=plan.statistics,
            accounting=plan.accounting,
            split=self.sampling.recipe,
            provenance=provenance(self.sampling, self._settings)
            | {"call": call.id, "call_parts": call.parts}
            | {"absent_chunks": {name: found.number for name, found in plan.absent.items()}},
            variables=tuple(plan.schema),
            fill=extractor.fill,
            filled=plan.filled,
            places=places_of(self.sampling.scaling(plan.statistics, plan.schema)),
        )

    def get_datasets(self) -> tuple[xr.Dataset, ...]:
        """Open the stores, after writing those that are not there yet.

        Returns
        -------
        tuple of Dataset
            ``(train, test)``; with `val_cube` ``(train, test, val)``. Lazy, see `open_store`.

        Raises
        ------
        StoreExistsError, EmptyPartError, RunError, StoreError
            As `run`.
        """
        self._run()
        return tuple(open_store(path) for path in self.targets.values())

    def _engine(self) -> Engine:
        tiles = len(self.sampling.extractor.tiles)
        engine = choose_engine(min(self.nproc, tiles), self._client)
        if not isinstance(engine, DaskCluster):
            return engine
        for target in self.targets.values():
            if isinstance(target, ZarrFolder):
                raise InvalidValueError(
                    f"{target} is written by way of a folder of this machine, which a cluster's "
                    "workers may not see; give a path or URL that all of them see, then copy the "
                    "store: open_store(path).to_zarr(...)"
                )
            if is_in_memory(target) and not engine.is_here():
                raise InvalidValueError(
                    f"{target} lives in this process only, which the workers of a cluster "
                    "(client=, or the active client) do not see; close the client and write with "
                    "nproc=1, or give a path or URL that all of them see"
                )
        return engine

    def _stage(self, what: str, total: int, unit: str) -> Stage:
        return Stage(what, total, unit, show=self._progress)


def _record(draft: Draft, shard: int, files: Files) -> None:
    with WriteErrors.of(draft.target):
        draft.record(shard, files)


def _size(files: Files) -> int:
    return sum(size for size, _ in files.values())
