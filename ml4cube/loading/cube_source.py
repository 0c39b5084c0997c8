"""Samples cut from a cube as they are read: the source behind a lazy data set."""

from __future__ import annotations

import functools
import hashlib
import logging
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import (
    CubeError,
    InvalidValueError,
    RunError,
    check_choice,
    check_flags,
    check_whole,
)
from ml4cube.core.sample_spec import SAMPLE_DIM
from ml4cube.core.shares import Ints
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import Statistics
from ml4cube.cube.variables import split_label
from ml4cube.loading.known_scaling import KnownScaling
from ml4cube.loading.lead import (
    Lead,
    LeadArguments,
    LeadExtractor,
    LeadReader,
    target_name,
    with_lead,
    without_targets,
)
from ml4cube.progress import Stage
from ml4cube.sampling.engines import local_engine
from ml4cube.sampling.extractor import Arrays, Extractor
from ml4cube.sampling.identity.callback import identity_of, name_of
from ml4cube.sampling.identity.cube import identity_of_variable, state_of
from ml4cube.sampling.identity.provenance import Call, provenance
from ml4cube.sampling.plan import SamplePlan, make_plan, makes_samples, refuse_empty
from ml4cube.sampling.request import Sampling
from ml4cube.sampling.rescaling import places_of
from ml4cube.store.format import StoreMetadata

if TYPE_CHECKING:
    import xarray as xr

logger = logging.getLogger(__name__)

#: What `PTXrDataset` takes for cubes besides sizes, with the meaning of `MultiProcSampler`.
CUTTING_OPTIONS = (
    "apply_mask",
    "drop_sample",
    "fill_method",
    "const",
    "filter_var",
    "drop_nan",
    "scale_fn",
    "callback",
    "data_split",
    "val_split",
    "data_fraq",
    "rand_chunk",
    "seed",
    "nproc",
    "statistics",
    "progress",
)


class CubeSource:
    """Samples cut from a cube as they are read: those that `MultiProcSampler` would write."""

    # A chunk is a tile of neighbouring windows, whose cells are read once whatever the overlap.

    def __init__(
        self, sampling: Sampling, extractor: Extractor, plan: SamplePlan, metadata: StoreMetadata
    ) -> None:
        part = metadata.part
        self._reader, self._extractor, self._label = sampling.reader, extractor, PARTS[part]
        # dims of these samples have the names that they have in the cube
        self._scaling = KnownScaling(KnownScaling.of(metadata).scaling, {})
        reader = sampling.reader
        self.lead: Lead | None = reader.lead if isinstance(reader, LeadReader) else None
        self._axes = {d: sampling.ds[d].variable for d in extractor.spec.dims if d in sampling.ds}
        self.slow = "://" in str(sampling.ds.encoding.get("source", ""))
        self.schema = plan.schema
        self.dims = {name: _window_dims(extractor, name, w) for name, (w, _) in self.schema.items()}
        self.counts = plan.tile_samples[:, plan.parts.index(part)]
        self._starts = np.concatenate([[0], np.cumsum(self.counts)])
        # which windows of a tile are samples, one bit each, from the first reading on
        self._kept: dict[int, NDArray[np.uint8]] = {}

    def read(self, chunk: int, out: Mapping[str, NDArray[Any]]) -> None:
        """Write the samples of a tile into one array per variable."""
        extractor, tile = self._extractor, self._extractor.tiles.block(chunk)
        extractor = extractor.only(out)
        if chunk in self._kept:
            # only the first reading needs the other variables, to look for gaps
            cells = self._reader.only(extractor.reads).read(extractor.cells_of(tile))
        else:
            cells = self._look(chunk, extractor.reads)
        keep = self._keep(chunk)
        samples = extractor.samples(cells, tile, keep)
        first = None
        for name, target in out.items():
            values = samples[name]
            if name in self._scaling:
                if first is None and self._scaling.dims(name):
                    origins = extractor.origins(tile, keep)
                    first = {dim: origins[f"{dim}_index"] for dim in extractor.spec.dims}
                values = self._scaling.scaled(name, values, self, first or {})
            target[...] = values

    def _keep(self, chunk: int) -> NDArray[np.intp]:
        """Which windows of a tile are samples."""
        if chunk not in self._kept:
            self._look(chunk)
        return np.flatnonzero(np.unpackbits(self._kept[chunk]))

    def _look(self, chunk: int, wanted: Iterable[str] = ()) -> Arrays:
        """Read what decides about the windows of a tile, and note which of them are samples."""
        tile = self._extractor.tiles.block(chunk)
        rules = self._extractor.rules(self._reader.dtypes)
        read = self._reader.only(dict.fromkeys((*rules, *wanted)))
        cells = read.read(self._extractor.cells_of(tile))
        keep = self._extractor.outcomes(cells, tile) == self._label
        if keep.sum() != self.counts[chunk]:
            raise RunError(
                f"{self.describe(chunk)} gave {self.counts[chunk]} samples when they were counted "
                f"and {keep.sum()} now: the cube changed meanwhile; open it again"
            )
        self._kept[chunk] = np.packbits(keep)
        return cells

    def describe(self, chunk: int) -> str:
        """Name a tile for an error message."""
        cells = self._extractor.cells_of(self._extractor.tiles.block(chunk))
        return "block " + ", ".join(f"{dim} {s.start}:{s.stop}" for dim, s in cells.items())

    def coords(self, samples: Ints) -> Arrays:
        """Find out where samples come from; reads their tiles if they were never read."""
        import xarray as xr

        result = self._origins(samples)
        attrs = {axis.name: axis.attrs for axis in self._extractor.axes}
        encoded = {
            name: xr.Variable(SAMPLE_DIM, values, attrs.get(name, {}))
            for name, values in result.items()
        }
        decoded = xr.decode_cf(xr.Dataset(encoded), decode_timedelta=False)
        return {str(name): np.asarray(v.values) for name, v in decoded.variables.items()}

    def _origins(self, samples: Ints) -> Arrays:
        """Where samples begin, as the extractor gives it."""
        chunks = np.searchsorted(self._starts, samples, side="right") - 1
        ascending = np.argsort(samples, kind="stable")
        result: Arrays = {}
        for chunk in np.unique(chunks).tolist():
            here = ascending[chunks[ascending] == chunk]
            keep = self._keep(chunk)[samples[here] - self._starts[chunk]]
            origins = self._extractor.origins(self._extractor.tiles.block(chunk), keep)
            for name, values in origins.items():
                result.setdefault(name, np.empty(len(samples), values.dtype))[here] = values
        return result

    def places(self, samples: Ints, dims: Iterable[str]) -> dict[str, Ints]:
        """Find out where samples begin; reads their tiles if they were never read."""
        origins = self._origins(samples)
        return {dim: origins[f"{dim}_index"].astype(np.int64) for dim in dims}

    def axes(self) -> dict[str, xr.Variable]:
        """Coordinate values along each cube dim that has some."""
        return dict(self._axes)


def _window_dims(extractor: Extractor, name: str, window: tuple[int, ...]) -> tuple[str, ...]:
    """Dims of a sample's window; a callback may make windows that no dim of the cube has."""
    spec = extractor.spec
    if isinstance(extractor, LeadExtractor) and name.endswith(target_name("")):
        assert extractor.target is not None
        spec = extractor.target.spec
    return tuple(spec.window_of(name, window))


def cut_cube(
    ds: xr.Dataset,
    part: str,
    sizes: Mapping[str, Any],
    lead: LeadArguments | None,
    unfilled: Iterable[str],
    options: dict[str, Any],
) -> tuple[CubeSource, StoreMetadata]:
    """Count the windows of a cube; unless it has a split, all are training."""
    # Only what decides about windows, fills and scales is read, once for all parts.
    check_choice("part", part, PARTS)
    progress = options.pop("progress", True)
    check_flags({"progress": progress})
    unsplit = options.get("data_split", 1.0) == 1.0 and not options.get("val_split")
    if part != "train" and unsplit and split_label(ds) is None:
        raise InvalidValueError(
            f"part={part!r}, but the cube has no split, so all its windows are training samples; "
            "label it first (ml4cube.splits), or give data_split="
        )
    nproc = options.pop("nproc", 1)
    check_whole("nproc", nproc, 1)
    sampling = whole = Sampling.of(ds, unfilled=unfilled, **sizes, **{"data_split": 1.0, **options})
    if lead is not None:
        sampling = with_lead(whole, lead)
    extractor, plan = _planned(sampling, int(nproc), progress)
    if not plan.accounting[part]:
        refuse_empty(plan.accounting, [part])
    logger.info("samples cut as they are read:\n%s", plan)
    statistics = without_targets(plan.statistics)
    scaling = whole.scaling(statistics, plan.schema)
    settings = {"seed": int(extractor.seed), "callback": name_of(extractor.callback)}
    metadata = StoreMetadata(
        part=part,
        spec=whole.spec,
        statistics=statistics,
        accounting=plan.accounting,
        split=whole.recipe,
        provenance=provenance(whole, settings),
        variables=whole.spec.variables if lead is not None else tuple(plan.schema),
        fill=extractor.fill,
        filled=plan.filled,
        places=places_of(scaling),
    )
    return CubeSource(sampling, extractor, plan, metadata), metadata


#: What was counted last, by the identity of the call, for the other parts of the same cube.
_counted: OrderedDict[str, tuple[Statistics | None, SamplePlan]] = OrderedDict()
_COUNTED_AT_MOST = 8
_lock = Lock()


def _planned(sampling: Sampling, nproc: int, progress: bool) -> tuple[Extractor, SamplePlan]:
    """Count the windows of all parts, or recall what was counted for another part."""
    extractor = sampling.extractor
    rules = extractor.rules(sampling.reader.dtypes)
    fills = sampling.spec.fills_from_train
    labels = {extractor.label, target_name(extractor.label)}
    reads = fills or makes_samples(sampling) or not labels.issuperset(rules)
    call = _identity_of(sampling) if reads else None
    with _lock:
        if call is not None and call in _counted:
            _counted.move_to_end(call)
            fill, plan = _counted[call]
            return replace(extractor, fill=fill), plan
    # whether a part has samples is nothing to whom asks for another one
    asked = replace(sampling, recipe={"plan": {"fractions": {}}})
    stage = Stage("counting", len(extractor.tiles), "tiles", show=progress and reads)
    with local_engine(nproc) as engine, stage:
        extractor, plan = make_plan(asked, engine, PARTS, note=stage.update, sparing=True)
    if call is not None:
        with _lock:
            _counted[call] = extractor.fill, plan
            while len(_counted) > _COUNTED_AT_MOST:
                _counted.popitem(last=False)
    return extractor, plan


def _identity_of(sampling: Sampling) -> str | None:
    """Tell a call from others; None where only reading the cube would tell."""
    state = functools.cache(functools.partial(state_of, outputs=frozenset()))
    extractor, reader = sampling.extractor, sampling.reader
    settings: dict[str, Any] = {"seed": extractor.seed, "ds": [str(d) for d in sampling.ds.dims]}
    if sampling.given is not None:
        settings["statistics"] = hashlib.sha256(sampling.given.to_json().encode()).hexdigest()
    if isinstance(reader, LeadReader):
        settings["lead"] = [asdict(reader.lead), list(reader.far.variables)]
    try:
        callback = None if extractor.callback is None else identity_of(extractor.callback)
        for name in reader.variables:
            variable = sampling.ds.variables[name]
            lazy = variable.dims and not variable._in_memory
            if lazy and identity_of_variable(variable, state) is None:
                return None
        return Call.of(sampling, settings, callback).id
    except (CubeError, OSError):
        return None
