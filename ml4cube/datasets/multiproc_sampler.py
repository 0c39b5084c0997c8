"""MultiProcSampler: the batch job that cuts samples from a cube into stores."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import logging
import time
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import xarray as xr

from ml4cube.core.display import Summarized, Summary, Table, bytes_text, counted
from ml4cube.core.errors import (
    CubeError,
    EmptyPartError,
    InvalidValueError,
    StoreExistsError,
    check_choice,
    check_flags,
    check_whole,
    listed,
)
from ml4cube.core.grid import SizesLike
from ml4cube.core.scaling import Scaling
from ml4cube.cube.engine import DaskCluster, Engine, check_client, choose_engine, local_engine
from ml4cube.ledger.draft import Draft, WriteErrors, remove_work_folder
from ml4cube.ledger.folders import Files
from ml4cube.ledger.locations import Location, folder_of, is_in_memory, paths_of, targets_of
from ml4cube.progress import Stage
from ml4cube.sampling.cf_encoding import check_stored_names
from ml4cube.sampling.identity.callback import checked_identity, copy_of
from ml4cube.sampling.identity.cube import SourceChangedError
from ml4cube.sampling.identity.provenance import Call, provenance
from ml4cube.sampling.layout import ORDERS, chunk_samples, layout_of, shard_tasks
from ml4cube.sampling.parts import Parts, has_no_cells_of
from ml4cube.sampling.plan import SamplePlan, refuse_empty
from ml4cube.sampling.planning import make_plan
from ml4cube.sampling.rescaling import entries_of, scaling_of_samples
from ml4cube.sampling.sampled_cube import MAX_CHUNK_MB, sample_cube
from ml4cube.sampling.shards import Piece, ShardJob, make_shard
from ml4cube.sampling.tiling import Callback, TiledRecipe
from ml4cube.store.format import SAMPLES, open_store, write_axes, write_metadata
from ml4cube.store.metadata import StoreMetadata
from ml4cube.store.precision import Precision
from ml4cube.store.shard_encoding import Compressor

logger = logging.getLogger(__name__)


@dataclass(frozen=True, repr=False)
class RunSummary(Summarized):
    """Summary of a run of the sampler.

    Parameters
    ----------
    plan : SamplePlan
        Samples of each part, drops by reason, statistics.
    nbytes : dict of str to int
        Bytes of samples on disk, by store that did not exist yet.
    resumed : int
        Shards that an earlier, interrupted run of the same call had written.
    shards : int
        Number of all shards of these stores.
    seconds : float
        Wall time of this run.
    """

    plan: SamplePlan
    nbytes: Mapping[str, int]
    resumed: int
    shards: int
    seconds: float

    def _summary(self) -> Summary:
        """Return the plan, the stores and the time."""
        earlier = f", {self.resumed} of them by an earlier run" if self.resumed else ""
        rate = ""
        if not self.resumed and len(self.nbytes) == len(self.plan.parts):  # this run wrote all
            samples = sum(self.plan.samples.values())
            rate = f", {samples / max(self.seconds, 1e-9):,.0f} samples/s"
        stores = Table.listing(
            [f"{bytes_text(size)} on disk: {path}" for path, size in self.nbytes.items()]
        )
        headline = f"{self.seconds:,.1f} s, {self.shards} shards{earlier}{rate}"
        plan = self.plan._summary()
        return Summary(headline, plan.facts, {**plan.sections, "Stores": stores})


class _Planned(NamedTuple):
    """A plan, and what writing its samples needs besides."""

    tiled: TiledRecipe
    plan: SamplePlan
    scaling: dict[str, Scaling]


class MultiProcSampler(Summarized):
    """Cut samples from a cube and write one zarr store per part, on many processes.

    Windows lie on one grid over the whole cube, ``size - overlap`` cells apart. A window belongs
    to a part if all its cells do. Every window becomes a sample of one part or is counted as
    dropped with a reason. The order of work is label, mask, drop, fill, callback, scale; the
    statistics are those of the train samples after the callback. The same call gives the same
    bytes for any `nproc` and `chunk_batch`.

    Parameters
    ----------
    ds : Dataset, DataArray, str, path, zarr store or group, or Icechunk session
        The cube, of any dims; a path or URL of a zarr store works too. Variables that lack a
        dim are broadcast; bounds, scalars and texts are left out. If it carries a split label
        (see `assign_block_split`), it defines the parts.
    rand_chunk : bool
        With ``data_fraq < 1``: draw the blocks at random instead of taking the first ones.
    data_fraq : float
        Fraction of the blocks to use, above 0 and up to 1; a window belongs to the block in
        which it starts. The others are counted as ``unused``.
    nproc : int
        Worker processes; 1 works in this process.
    apply_mask : bool
        Whether to apply the mask, if the cube has one.
    drop_sample : bool
        Whether to drop samples with a cell outside the mask. If not, or with
        ``drop_nan="masked"``, which has its own rule, such cells become gaps. Points outside
        the mask are always dropped.
    fill_method : {"sample_mean", "mean", "constant", "noise", None} or mapping
        How to fill gaps of float variables in samples that are kept: by the sample's mean (or
        the train mean if it has none), the train mean, `const`, or seeded noise within the
        train range. One method fills all variables but those of `to_pred`; a mapping, as
        ``{"rain": "mean", "ndvi": None}``, fills those it names, targets too. With
        ``drop_nan="auto"`` no sample with a gap is kept, so nothing is filled.
    const : float, optional
        The value for ``"constant"``.
    filter_var : str, optional
        The mask variable, true where cells count; a static one is enough. Not stored.
    chunk_size : int or sequence of int, optional
        Samples per chunk of the stores (the first number; a chunk holds whole windows). By
        default chosen for fast reading in training.
    train_cube, test_cube : str, path, zarr store or StorePath, or Icechunk session
        Where to write the stores: paths, URLs that fsspec knows (``"s3://..."``;
        ``"memory://..."`` with one process and no cluster), or paths inside a writable zarr
        store, such as ``StorePath(session.store, "train")`` of an Icechunk session, which you
        commit afterwards. Nothing appears there before it is complete.
    drop_nan : {"auto", "if_all_nan", "masked", None}
        Samples to drop for gaps (NaN, infinite): those with any; those where all variables are
        all gap; those without a cell inside the mask or with a gap there; none.
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
        copied: several processes import them again. The call counts as another once you have
        changed the callback's code, defaults or closure, or a function or value of yours that it
        names; installed libraries are not looked into. See also `version`.
    block_size : mapping or pairs, optional
        Blocks for `data_split` and `data_fraq`, in cells by dim; a dim that is missing is not
        cut. By default `data_split` uses few large blocks of whole windows, with a warning, as
        `assign_block_split` does, and `data_fraq` uses chunks, or some dozens of blocks.
    sample_size : mapping or pairs, optional
        Cells of a window by dim, 1 for dims left out. None: single points.
    overlap : mapping, pairs or float, optional
        Fraction of a window that neighbours share by dim.
    scale_fn : {"standardize", "normalize", None}
        How to scale float variables by the train statistics; others are never scaled.
    val_cube : str, path, zarr store or StorePath, or Icechunk session, optional
        Where to write the validation store, as for `train_cube`; needed if the label has a
        validation part, and refused if it has none.
    val_split : float, optional
        Fraction of blocks for validation, if the cube has no split label. By default, with a
        `val_cube`, half of what `data_split` leaves.
    seed : int
        Seeds the split, the order, `rand_chunk` and noise.
    overwrite : bool
        Replace sample stores that exist at the paths and are as they were written, which is seen by
        the hashes of all files; anything else is never replaced.
    resume : bool
        Continue where an interrupted run of the same call stopped.
    to_pred : str or list of str, optional
        Variables to predict; recorded in the stores.
    features : str or list of str, optional
        Variables to predict from; by default all others.
    order : {"shuffled", "grid"}
        Order of samples: tiles of neighbouring windows in seeded random order, mixed among a
        few dozen tiles; or tile by tile in the cube's order.
    client : dask.distributed Client or str, optional
        Runs the same tasks on a cluster, by its client or its scheduler's address; an active
        client is used even if it is not named. Its workers must see the cube and the paths.
    progress : bool
        Whether to show bars in terminals and notebooks, and elsewhere a line on stderr for each
        tenth of a long stage.
    compressors : {"lz4", "zstd", None} or zarr.codecs.BloscCodec
        How chunks are compressed: fast to read, smaller, not at all, or by your own codec. The
        names mean blosc: "lz4" with byte shuffle, or bitshuffle with `bitround`; "zstd" with
        bitshuffle. A checksum is always added.
    dtype : dtype or mapping, optional
        Float dtype to store float variables in, of all or by variable: ``"float16"`` halves a
        store of scaled float32. Samples are cast after they are scaled.
    bitround : int or mapping, optional
        Bits of mantissa to keep of float variables, of all or by variable; the others become
        zero, which compresses well. 10 bits are about three digits.
    max_chunk_mb : float
        Most megabytes that a decoded chunk of the cube may have; a worker holds some in memory.
    missing_chunks : {"warn", "raise", "drop"}
        What to do about chunks that the cube's zarr store lacks, and which read as its fill
        value. If that is a gap, they are counted in the plan. If it is a value: warn, refuse them,
        or take their cells for gaps; samples that touch such a chunk of integers are dropped as
        ``gap``, whatever `drop_nan` is. "raise" refuses those that read as gaps, too.
    statistics : Statistics, CubeScaler, or a sample store or its path, optional
        Statistics to scale float variables by, instead of those of this call's train samples:
        to share the scaling between stores, or to scale per level, pixel or month
        (``CubeScaler(per=("variable", "level"))``). Coordinates are matched by their values and
        dates by month, season or day. `scale_fn` applies to ``Statistics``; a scaler or store has
        its own method.
    version : str or int, optional
        Version of `callback`, to be changed with it. By default its source code and what that
        names tell whether the callback is the same as before. Where they do not (it uses objects
        of your classes, a model, source that cannot be found), the call warns, resumes nothing and
        opens no store that exists, unless `version` is given.

    Warns
    -----
    UserWarning
        If the cube has no split label and `block_size` is not given; names the blocks used, and
        how to choose better ones. If nothing tells whether `callback` is that of an earlier call.
        If the source lacks chunks that read as values, once for each variable. If windows of
        several steps span missing dates.

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
        missing_chunks: str = "warn",
        statistics: Any = None,
        version: str | int | None = None,
    ) -> None:
        """Check every argument against the cube; read none of its cells."""
        check_client(client)
        self._client, self._nproc = client, check_whole("nproc", nproc, 1)
        check_choice("order", order, ORDERS)
        if chunk_batch is not None:
            check_whole("chunk_batch", chunk_batch, 1)
        check_flags({"overwrite": overwrite, "resume": resume, "progress": progress})
        if val_split and val_cube is None:
            raise InvalidValueError(f"val_split={val_split!r} needs val_cube; give it a path")
        parts = Parts(
            block_size=block_size,
            data_split=data_split,
            val_split=val_split,
            data_fraq=data_fraq,
            rand_chunk=rand_chunk,
            has_val=val_cube is not None,
        )
        self.targets = targets_of(
            {"train": train_cube, "test": test_cube, "val": val_cube},
            allow_memory=nproc == 1 or client is not None,
        )
        self.cube = sample_cube(
            ds,
            parts,
            apply_mask=apply_mask,
            drop_sample=drop_sample,
            fill_method=fill_method,
            const=const,
            filter_var=filter_var,
            drop_nan=drop_nan,
            array_dims=array_dims,
            callback=None if callback is None else copy_of(callback),
            sample_size=sample_size,
            overlap=overlap,
            scale_fn=scale_fn,
            seed=seed,
            to_pred=to_pred,
            features=features,
            max_chunk_mb=max_chunk_mb,
            missing_chunks=missing_chunks,
            statistics=statistics,
        )
        # Before any call of the callback, which may change its state.
        self._identity = checked_identity(callback, version)
        recipe = self.cube.recipe
        label = self.cube.tiled.label
        if (
            "val" in self.targets
            and self.cube.is_labelled
            and has_no_cells_of("val", self.cube.ds, label)
        ):
            raise EmptyPartError(
                f"val_cube={str(val_cube)!r} is given, but the split label {label!r} of the cube "
                "has no validation part (2); label the cube with one (assign_block_split(..., "
                "val=0.1)), or leave val_cube out"
            )
        self._precision = Precision.parse(dtype, bitround)
        self._compressor = Compressor.parse(compressors, rounded=bool(self._precision.keepbits))
        if callback is None:
            self._precision.check_names({n: self.cube.ds[n].dtype for n in recipe.variables})
        # A callback may rename variables of the cube, but not its dims.
        check_stored_names(recipe, recipe.variables if callback is None else ())
        self._chunk = chunk_samples(chunk_size, recipe)
        self._settings = {
            "order": order,
            "data_fraq": float(data_fraq),
            "rand_chunk": rand_chunk,
            "chunk_size": self._chunk,
            "parts": sorted(self.targets),
            "compressor": asdict(self._compressor),
            "precision": asdict(self._precision),
        }
        if (given := self.cube.given) is not None:
            self._settings["statistics"] = hashlib.sha256(given.to_json().encode()).hexdigest()
        if self.cube.reader.dropped:
            self._settings["missing_chunks"] = missing_chunks
        self._order, self._chunk_batch, self._progress = order, chunk_batch, progress
        self._overwrite, self._resume = overwrite, resume
        # The last plan, by the id of its call, which changes when the cube does.
        self._planned: dict[str, _Planned] = {}
        self._is_written = False

    def _summary(self) -> Summary:
        """Return how samples are cut, where they go, and what is known of them so far."""
        sampled = self.cube
        plan = next((found.plan for found in self._planned.values()), None)
        state = f"{counted(sampled.tiled.bound.total, 'window')}; plan() counts the samples"
        if plan is not None:
            state = f"{counted(sum(plan.samples.values()), 'sample')}; run() writes them"
        if self._is_written:
            state = "written; get_datasets() opens the stores"
        facts = {
            **sampled.facts,
            "Callback": sampled.recipe.callback,
            **{f"{part.capitalize()} store": str(t) for part, t in self.targets.items()},
        }
        return Summary(state, facts, {"Plan": plan})

    def plan(self) -> SamplePlan:
        """Count the samples of every part, without writing anything; reads the cube once.

        Returns
        -------
        SamplePlan
            Samples of each part, drops by reason, bytes, statistics; prints as a table.

        Raises
        ------
        EmptyPartError
            If a part that was asked for has no sample.
        InvalidTypeError
            If there are other processes, and the cube cannot be pickled.
        RunError, StoreError
            If the callback fails, a worker dies, or cells cannot be read.
        """
        with self._engine() as engine:
            return self._plan_on(engine, self.call()).plan

    def call(self) -> Call:
        """Return what decides about the bytes of the stores, to compare with that of others.

        Returns
        -------
        Call
            Its ``id`` is the same for the same call on the same cube, and is in the provenance of
            every store; ``unlike`` names what differs from the provenance of another store.

        Raises
        ------
        StoreError
            If the cube cannot be read, where only its cells identify it.
        """
        return Call.of_samples(self.cube, self._settings, self._identity, self._outputs())

    def _plan_on(self, engine: Engine, call: Call) -> _Planned:
        if call.id not in self._planned:
            self.cube.reader.check_same_chunks(self.cube.ds, self.cube.recipe.filter_var)
            tiles, show = len(self.cube.tiled.tiles), self._progress
            with Stage("counting", tiles, "tiles", show=show) as stage:
                tiled, plan = make_plan(
                    self.cube,
                    engine,
                    self.targets,
                    tiles_per_task=self._chunk_batch,
                    note=stage.update,
                )
            if self.cube.is_labelled and not plan.samples.get("val", 1):
                refuse_empty(plan.accounting, ["val"], plan.parts)
            check_stored_names(self.cube.recipe, plan.schema)
            scaled_by_train = self.cube.recipe.scale_fn and self.cube.given is None
            if not plan.samples["train"] and scaled_by_train:
                raise EmptyPartError(
                    "the train part would hold no sample, so there are no statistics for "
                    f"scale_fn={self.cube.recipe.scale_fn!r}; give it blocks (data_split, or "
                    "the split label), statistics=, or scale_fn=None"
                )
            scaling = scaling_of_samples(
                plan.statistics, plan.schema, self.cube.recipe, self.cube.ds
            )
            stored_plan = plan.stored_as(self._precision)
            if self.cube.recipe.scale_fn is None:
                self._precision.check_unscaled(plan.statistics, plan.dtypes)
            self._planned = {call.id: _Planned(tiled, stored_plan, scaling)}
        return self._planned[call.id]

    def run(self) -> RunSummary | None:
        """Write the stores that do not exist yet; all of them, with ``overwrite=True``.

        Returns
        -------
        RunSummary or None
            What was written, also logged; None if every store existed already, made by the same
            call.

        Warns
        -----
        UserWarning
            If nothing was written, because every store existed already.

        Raises
        ------
        StoreExistsError
            If something else exists at a path, or appears there during the run.
        EmptyPartError, RunError, StoreError
            As `plan`; or if another run writes to the same path, or the disk is full. Then
            nothing exists at the paths, and the same call continues where this one stopped. If
            files of the cube changed while it was read, the next call starts over.
        """
        summary = self._run()
        paths = ", ".join(map(str, self.targets.values()))
        if summary is None:
            warnings.warn(
                f"nothing was written: {paths} exist already, complete and made by the same call. "
                "get_datasets() opens them; overwrite=True writes them again",
                UserWarning,
                stacklevel=2,
            )
        return summary

    def _run(self) -> RunSummary | None:
        started = time.perf_counter()
        call = self.call()
        summary = None
        with contextlib.ExitStack() as stack:
            if drafts := self._drafts(call, stack):
                plan, resumed = self._write(drafts, call)
                nbytes = {
                    str(draft.target): sum(size for size, _ in draft.files.values())
                    for draft in drafts.values()
                }
                shards = sum(len(draft.finished_tasks) for draft in drafts.values())
                seconds = time.perf_counter() - started
                summary = RunSummary(plan, nbytes, resumed, shards, seconds)
        for target in self.targets.values():
            remove_work_folder(target, call.id, SAMPLES)
        # From now on, get_datasets() opens the stores, and does not replace them again.
        self._overwrite, self._is_written = False, True
        logger.info("%s", summary or "every store exists already")
        return summary

    def _drafts(self, call: Call, stack: contextlib.ExitStack) -> dict[str, Draft]:
        """Lock the stores that are to be written."""
        locked: dict[str, Draft] = {}
        # In one order, so that two runs cannot block one another.
        for part in sorted(self._unwritten(call), key=lambda part: str(self.targets[part])):
            with WriteErrors.of(self.targets[part]):
                draft = Draft(self.targets[part], call.id, SAMPLES)
            locked[part] = stack.enter_context(draft)
        # Another run may have written some before this one got their locks.
        return {part: locked[part] for part in self._unwritten(call) if part in locked}

    def _unwritten(self, call: Call) -> list[str]:
        """Return the parts whose stores are to be written."""
        return [part for part, target in self.targets.items() if not self._exists(target, call)]

    def _outputs(self) -> list[str]:
        """Return the paths of the stores, also of unfinished ones."""
        return [path for target in self.targets.values() for path in paths_of(target)]

    def _exists(self, target: Location, call: Call) -> bool:
        """Return True if the store of this call exists; refuse anything else at its path."""
        with WriteErrors.of(target):
            if SAMPLES.may_write(folder_of(target), self._overwrite):
                return False
        try:
            made_from = StoreMetadata.of(open_store(target)).provenance
        except CubeError as error:
            raise StoreExistsError(
                f"{target} exists and is not a complete store of this call ({error}); move it "
                "away, choose another path, or replace a sample store by overwrite=True"
            ) from error
        call.check_made(target, made_from)
        return True

    def _write(self, drafts: dict[str, Draft], call: Call) -> tuple[SamplePlan, int]:
        """Write and publish the stores; return the plan and the number of shards found."""
        with self._engine() as engine:
            tiled, plan, scaling = self._plan_on(engine, call)
            # Only now is it certain that there is something to write.
            for draft in drafts.values():
                with WriteErrors.of(draft.target):
                    draft.begin(self._resume)
            resumed = sum(len(draft.finished_tasks) for draft in drafts.values())
            chunk, precision, compressor = self._chunk, self._precision, self._compressor
            shared_reader, own_reader = self.cube.reader.cells.split(engine.shares_memory)
            jobs = {
                part: ShardJob(
                    tiled=tiled,
                    part=part,
                    folder=draft.folder_for_workers(isinstance(engine, DaskCluster)),
                    write_errors=WriteErrors.of(draft.target),
                    layout=layout_of(self.cube, plan, part, chunk, scaling, precision, compressor),
                    scaling=scaling,
                    is_shuffled=self._order == "shuffled",
                    precision=precision,
                    shared_reader=shared_reader,
                )
                for part, draft in drafts.items()
            }
            order = self._order
            tasks = itertools.chain.from_iterable(
                shard_tasks(
                    self.cube,
                    plan,
                    part,
                    job.layout,
                    order,
                    own_reader,
                    drafts[part].finished_tasks,
                )
                for part, job in jobs.items()
            )
            self._write_shards(engine, jobs, tasks, drafts)
        try:
            call.source.check_unchanged(listed([str(draft.target) for draft in drafts.values()]))
        except SourceChangedError:
            # shards of old and new cells must not be resumed
            for draft in drafts.values():
                draft.discard()
            raise
        named = zip(self.cube.recipe.dims, tiled.axes, strict=True)
        axes = {dim: (axis.values, axis.attrs) for dim, axis in named}
        made_from = provenance(self.cube, self._settings) | {
            **call.record,
            "absent_chunks": {name: chunks.number for name, chunks in plan.absent.items()},
        }
        for part, draft in drafts.items():
            metadata = StoreMetadata(
                part=part,
                bound=tiled.bound,
                statistics=plan.statistics,
                accounting=plan.accounting,
                split=self.cube.split,
                provenance=made_from,
                variables=tuple(plan.schema),
                fill=tiled.fill,
                filled=plan.filled,
                places=entries_of(scaling),
                over_missing_dates=plan.over_missing_dates,
            )
            with WriteErrors.of(draft.target):
                files = draft.files | write_axes(draft.store_folder, self._compressor, axes)
                write_metadata(draft.store_folder, jobs[part].layout, metadata.to_attrs(), files)
        for draft in drafts.values():
            with WriteErrors.of(draft.target):
                draft.publish(self._overwrite)
        return plan, resumed

    def _write_shards(
        self,
        engine: Engine,
        jobs: Mapping[str, ShardJob],
        tasks: Iterable[tuple[str, int, list[Piece]]],
        drafts: Mapping[str, Draft],
    ) -> None:
        recorded: deque[Future[None]] = deque()
        total = sum(job.layout.shard_count for job in jobs.values())
        # Recording waits for the disk, so it has a thread of its own.
        with (
            Stage("writing", total, "shards", show=self._progress) as stage,
            ThreadPoolExecutor(1, "ml4cube-record") as recorder,
        ):
            stage.update(sum(len(draft.finished_tasks) for draft in drafts.values()))
            for _, (part, shard, files) in engine.run(make_shard, jobs, tasks):
                recorded.append(recorder.submit(_record, drafts[part], shard, files))
                while recorded and recorded[0].done():
                    recorded.popleft().result()
                    stage.update(1)
            for done in recorded:
                done.result()
                stage.update(1)

    def get_datasets(self) -> tuple[xr.Dataset, ...]:
        """Open the stores, after writing those that do not exist yet.

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
        tiles = len(self.cube.tiled.tiles)
        engine = choose_engine(local_engine(min(self._nproc, tiles)), self._client)
        if not isinstance(engine, DaskCluster):
            return engine
        for target in self.targets.values():
            if folder_of(target).is_session:
                raise InvalidValueError(
                    f"{target} is written through a folder of this machine, which a cluster's "
                    "workers may not see; give a path or URL that all of them see, then copy the "
                    "store: open_store(path).to_zarr(...)"
                )
            if is_in_memory(target) and not engine.runs_in_this_process():
                raise InvalidValueError(
                    f"{target} exists in this process only, so the workers of a cluster "
                    "(client=, or the active client) cannot see it; close the client and use "
                    "nproc=1, or give a path or URL that all of them see"
                )
        return engine


def _record(draft: Draft, shard: int, files: Files) -> None:
    with WriteErrors.of(draft.target):
        draft.record(shard, files)
