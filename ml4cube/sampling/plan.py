"""Pass 1: read the cube once; count the samples of each part and the drops by reason."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import EmptyPartError, InvalidValueError, StoreError, check_choice
from ml4cube.core.grid import Grid
from ml4cube.core.sample_spec import SampleSpec
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import Statistics
from ml4cube.cube.absent_chunks import AbsentChunks
from ml4cube.cube.reader import CubeReader
from ml4cube.preprocessing.cubes import check_no_fill_value
from ml4cube.sampling.counting import Schema, count_tiles, same_schema, train_cells
from ml4cube.sampling.extractor import OUTCOMES, REASONS, Extractor
from ml4cube.sampling.request import MIB, ORIGIN_BYTES, Sampling, check_targets, tile_bytes
from ml4cube.sampling.rescaling import needed
from ml4cube.sampling.workers import TaskEngine
from ml4cube.store.precision import Precision

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

# Work of one counting task, and the most tasks of one pass.
_COUNT_BYTES = 16 * MIB
_MAX_TASKS = 20_000


@dataclass(frozen=True)
class SamplePlan:
    """The result of sampling, known before anything is written."""

    parts: tuple[str, ...]
    # ``total`` windows, samples of each part, and drops by reason: ``edge`` (would pass the cube's
    # end), ``straddle`` (in two parts), ``buffer`` (touches excluded cells), ``mask``, ``gap``,
    # ``unused`` (in an unused block). Parts and reasons add up to the total.
    accounting: Mapping[str, int]
    # Of the float variables: those given, or those of the train samples before scaling.
    statistics: Statistics
    # Window shape and dtype of every stored variable.
    schema: Schema
    # Bytes of each part's samples before compression.
    nbytes: Mapping[str, int]
    # Samples by tile and part.
    tile_samples: NDArray[np.int64]
    # Chunks that are missing from the source and read as its fill value, by variable.
    absent: Mapping[str, AbsentChunks]
    # Variables of the cube that are not sampled, with the reason.
    left_out: Mapping[str, str]
    # Variables with gaps that are filled, with the method.
    filled: Mapping[str, str] = field(default_factory=dict)

    def stored_as(self, precision: Precision, dims: int) -> SamplePlan:
        """Return the plan with the dtypes that samples have on disk."""
        precision.check_names({name: dtype for name, (_, dtype) in self.schema.items()})
        schema = {n: (w, precision.dtype(n, d)) for n, (w, d) in self.schema.items()}
        return replace(self, schema=schema, nbytes=_nbytes(self.samples, schema, dims))

    @property
    def samples(self) -> dict[str, int]:
        """Samples of each part."""
        return {part: self.accounting[part] for part in self.parts}

    @property
    def dropped(self) -> dict[str, int]:
        """Windows that give no sample, by reason."""
        return {name: self.accounting[name] for name in ("edge", *REASONS)}

    def __str__(self) -> str:
        """Return a table."""
        total = max(self.accounting["total"], 1)
        rows = [f"{self.accounting['total']:>14,} windows"]
        for part, n in self.samples.items():
            size = self.nbytes[part] / MIB
            rows.append(f"{n:>14,} {part} samples ({n / total:.1%}), {size:,.1f} MiB raw")
        for reason, n in self.dropped.items():
            if n:
                rows.append(f"{n:>14,} dropped: {reason} ({n / total:.1%})")
        for name, absent in self.absent.items():
            rows.append(
                f"{absent.number:>14,} chunks of {name!r} are missing from the source and read as "
                f"{absent.reads_as}"
            )
        rows += [f"{'filled':>14}: gaps of {n!r} ({how!r})" for n, how in self.filled.items()]
        rows += [f"{'left out':>14}: {name!r} {why}" for name, why in self.left_out.items()]
        return "\n".join(rows)


def make_plan(
    sampling: Sampling,
    engine: TaskEngine,
    parts: Iterable[str],
    *,
    batch: int | None = None,
    note: Callable[[int], object] = lambda _: None,
    missing_chunks: str = "fill",
    sparing: bool = False,
) -> tuple[Extractor, SamplePlan]:
    """Read the cube and count the outcomes of all windows."""
    parts = tuple(parts)
    extractor = sampling.extractor
    if sampling.spec.fills_from_train:
        extractor = replace(extractor, fill=fill_statistics(sampling, engine, batch))
    sparing = sparing and not makes_samples(sampling)
    dtypes = sampling.reader.dtypes
    if sparing:
        sampling = replace(sampling, reader=sampling.reader.only(extractor.rules(dtypes)))
    batches = _batches(len(extractor.tiles), sampling, batch)
    tasks = (list(sampling.tile_tasks(ids)) for ids in batches)
    counts = np.zeros((len(extractor.tiles), len(OUTCOMES)), np.int64)
    found: Statistics | None = None
    schema: Schema | None = None
    absent: dict[str, AbsentChunks] = {}
    filled: set[str] = set()
    shared = extractor, sampling.reader.shared(), not sparing
    for results in _in_order(engine.run(count_tiles, shared, tasks)):
        for result in results:
            counts[result.id] = result.outcomes
            filled.update(result.filled)
            if missing_chunks == "raise":
                _refuse_absent(result.absent)
            absent |= {n: chunks.merge(absent.get(n)) for n, chunks in result.absent.items()}
            schema = same_schema(schema, result.schema)
            if result.statistics is not None:
                found = result.statistics if found is None else found.merge(result.statistics)
        note(len(results))
    _warn_of_absent(absent)
    accounting = accounting_of(sampling.spec, counts.sum(axis=0), parts)
    warn_of_nothing_to_fill(sampling.spec, accounting)
    _check_parts(sampling, accounting, counts.sum(axis=0), parts)
    schema = extractor.schema(dtypes) if schema is None else schema
    check_targets(sampling.spec, schema)
    floats = [name for name, (_, dtype) in schema.items() if np.dtype(dtype).kind == "f"]
    statistics = found or Statistics.empty([] if sparing else floats, part="train")
    # attributes name the gaps of the source's values, not of those that a callback makes
    for name in statistics if extractor.callback is None else ():
        if name in sampling.ds:
            check_no_fill_value(name, statistics[name], sampling.ds[name])
    if sampling.given is not None:
        statistics = needed(sampling.given, floats)
    samples = {part: accounting[part] for part in parts}
    return extractor, SamplePlan(
        parts,
        accounting,
        statistics,
        schema,
        _nbytes(samples, schema, len(sampling.spec.dims)),
        counts[:, [PARTS[part] for part in parts]],
        dict(sorted(absent.items())),
        sampling.left_out,
        {name: str(sampling.spec.fill_of(name)) for name in sorted(filled)},
    )


def makes_samples(sampling: Sampling) -> bool:
    """Return True if planning needs samples: for statistics, or the variables of a callback."""
    if sampling.extractor.callback is not None:
        return True
    return sampling.spec.scale_fn is not None and sampling.given is None


def check_missing_chunks(missing_chunks: str, reader: CubeReader) -> None:
    """Check `missing_chunks`; refuse "raise" where missing chunks cannot be found."""
    check_choice("missing_chunks", missing_chunks, ("fill", "raise"))
    hidden = [name for name, source in reader.sources.items() if source.hides_absent_chunks]
    if missing_chunks == "raise" and hidden:
        raise InvalidValueError(
            f"missing_chunks='raise' is not possible for {hidden}: only in an unchanged zarr "
            "store can missing chunks be found, not in what dask computes or in a selection; give "
            "the path of the store, or missing_chunks='fill'"
        )


def _refuse_absent(absent: Mapping[str, AbsentChunks]) -> None:
    for name, found in absent.items():
        raise StoreError(
            f"variable {name!r}: chunk {found.first!r} is missing from the source, its cells would "
            f"read as {found.reads_as}; repair the source, or give missing_chunks='fill' if its "
            "writer leaves out chunks that hold only this value"
        )


def _warn_of_absent(absent: Mapping[str, AbsentChunks]) -> None:
    """Warn of missing chunks that read as values; those that read as gaps are counted as gaps."""
    for name, found in absent.items():
        if not found.is_gap:
            logger.warning(
                "%d chunks of variable %r are missing from the source (one is %r) and read as %s. "
                "This is right if its writer leaves out chunks that hold only this value, as zarr "
                "does, and wrong if files were lost; missing_chunks='raise' refuses them",
                found.number,
                name,
                found.first,
                found.reads_as,
            )


def warn_of_nothing_to_fill(spec: SampleSpec, accounting: Mapping[str, int]) -> None:
    """Warn if samples were dropped for gaps that `fill_method` should fill."""
    dropped = accounting["gap"]
    if dropped and spec.fill_method and spec.drop_nan == "auto":
        warnings.warn(
            f"fill_method fills nothing, because drop_nan='auto' drops every sample with a gap "
            f"({dropped} of {accounting['total']} windows); give drop_nan='if_all_nan' or None to "
            "keep and fill them",
            stacklevel=3,
        )


def _nbytes(samples: Mapping[str, int], schema: Schema, dims: int) -> dict[str, int]:
    one = sum(math.prod(w) * np.dtype(d).itemsize for w, d in schema.values())
    one += ORIGIN_BYTES * dims
    return {part: n * one for part, n in samples.items()}


def _in_order(results: Iterable[tuple[int, Result]]) -> Iterator[Result]:
    """Yield the results of tasks in the order of the tasks, in whatever order they end."""
    waiting: dict[int, Result] = {}
    following = 0
    for position, result in results:
        waiting[position] = result
        while following in waiting:
            yield waiting.pop(following)
            following += 1


def _batches(n: int, sampling: Sampling, batch: int | None) -> Iterator[range]:
    """Divide `n` tiles into tasks of `batch` tiles, by default some megabytes of samples."""
    if batch is None:
        one, target = tile_bytes(sampling.spec, sampling.ds)
        tile = math.prod(sampling.extractor.tiles.tile) * one
        batch = max(1, _COUNT_BYTES // max(tile, target))
    batch = max(batch, -(-n // _MAX_TASKS))
    for first in range(0, n, batch):
        yield range(first, min(first + batch, n))


def fill_statistics(sampling: Sampling, engine: TaskEngine, batch: int | None) -> Statistics:
    """Return the statistics of the raw train cells, each counted once."""
    spec, tiles = sampling.spec, sampling.extractor.tiles
    shape = dict(zip(spec.dims, spec.shape, strict=True))
    size = {
        dim: min(n * stride, shape[dim])
        for dim, n, stride in zip(spec.dims, tiles.tile, spec.stride, strict=True)
    }
    boxes = Grid.blocks(shape, size)
    tasks = (
        [(boxes.block(id), sampling.reader.unshared(boxes.block(id).slices)) for id in ids]
        for ids in _batches(len(boxes), sampling, batch)
    )
    shared = sampling.extractor, sampling.reader.shared()
    boxes_of_tasks = _in_order(engine.run(train_cells, shared, tasks))
    return functools.reduce(Statistics.merge, itertools.chain.from_iterable(boxes_of_tasks))


def accounting_of(
    spec: SampleSpec, counts: NDArray[np.int64], parts: Iterable[str]
) -> dict[str, int]:
    """Return the number of all windows, of samples of each part, and of drops by reason."""
    found = dict(zip(OUTCOMES, counts.tolist(), strict=True))
    names = (*parts, *REASONS)
    return {"total": spec.total, "edge": spec.edge, **{name: found[name] for name in names}}


def _check_parts(
    sampling: Sampling,
    accounting: Mapping[str, int],
    counts: NDArray[np.int64],
    parts: tuple[str, ...],
) -> None:
    """Refuse empty parts that should have samples, and samples of parts without a store."""
    for part, label in PARTS.items():
        if part not in parts and counts[label]:
            raise InvalidValueError(
                f"the split has {int(counts[label])} samples in the {part} part; give "
                f"{part}_cube a path"
            )
    empty = [part for part in parts if not accounting[part]]
    missed = [part for part in empty if _is_wanted(sampling.recipe, part)]
    if missed or len(empty) == len(parts):
        refuse_empty(accounting, missed or empty, parts)


def refuse_empty(
    accounting: Mapping[str, int], empty: Sequence[str], parts: Sequence[str] = tuple(PARTS)
) -> NoReturn:
    """Raise an error that says why parts hold no sample."""
    drops = {k: n for k, n in accounting.items() if n and k not in ("total", *parts)}
    raise EmptyPartError(
        f"the {' and the '.join(empty)} part would hold no sample: "
        f"{sum(accounting[p] for p in parts)} of {accounting['total']} windows remain, dropped are "
        f"{drops}; use smaller windows or more blocks, or change drop_nan, the mask or "
        "the split"
    )


def _is_wanted(recipe: Mapping[str, Any], part: str) -> bool:
    """Return True if the split should have a part; a label made by hand should have all."""
    fractions = recipe.get("plan", {}).get("fractions")
    return fractions is None or part in dict(fractions)
