"""A source of samples that are cut from a cube as they are read."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
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
from ml4cube.core.rank_shares import Ints
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import Statistics
from ml4cube.cube.engine import local_engine
from ml4cube.cube.variables import split_label
from ml4cube.loading.lead_time import TargetOptions, with_lead
from ml4cube.loading.sources import SampleSource, SampleVariable, first_cells_of, known_scaling
from ml4cube.progress import Stage
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import INPUT, TARGET, ArrayName, Lead
from ml4cube.sampling.extractor import Arrays, CellsByRole, Extractor, Schema
from ml4cube.sampling.identity.callback import identity_of
from ml4cube.sampling.identity.provenance import Call, provenance
from ml4cube.sampling.plan import SamplePlan, make_plan, makes_samples, refuse_empty
from ml4cube.sampling.request import Sampling, SamplingOptions
from ml4cube.sampling.rescaling import entries_of
from ml4cube.store.format import StoreMetadata

if TYPE_CHECKING:
    import xarray as xr

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class CubeOptions(SamplingOptions):
    """Arguments of `PTXrDataset` for cutting a cube, checked when made."""

    part: str = "train"
    data_split: float = 1.0
    # The options about targets, if these lie elsewhere than the inputs.
    shifted_targets: TargetOptions | None = None
    nproc: int = 1
    progress: bool = True

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        check_choice("part", self.part, PARTS)
        check_flags({"progress": self.progress})
        check_whole("nproc", self.nproc, 1)


# Options that `PTXrDataset` names itself or does not take.
_NOT_CUTTING = {
    *("part", "shifted_targets", "unfilled", "to_pred", "features", "array_dims", "max_chunk_mb"),
    *("sample_size", "overlap", "block_size"),
}
#: Arguments that `PTXrDataset` takes by ``**cutting``.
CUTTING = tuple(f.name for f in fields(CubeOptions) if f.name not in _NOT_CUTTING)


class CubeSource(SampleSource):
    """Samples cut from a cube as they are read: those that `MultiProcSampler` would write."""

    # A chunk is a tile of neighbouring windows, whose cells are read once despite the overlap.

    def __init__(
        self, sampling: Sampling, extractor: Extractor, plan: SamplePlan, metadata: StoreMetadata
    ) -> None:
        part = metadata.part
        self._reader, self._extractor, self._label = sampling.reader, extractor, PARTS[part]
        self._scaling = known_scaling(metadata)
        self.cube_dims: Mapping[str, str] = {}  # Samples have dims of the same names as the cube.
        self.lead: Lead = extractor.lead
        self.axes = {d: sampling.ds[d].variable for d in extractor.recipe.dims if d in sampling.ds}
        self.remote = "://" in str(sampling.ds.encoding.get("source", ""))
        self.variables = _variables_of(INPUT, extractor.recipe, plan.schema)
        if extractor.targets is not None:
            schema = extractor.targets.schema(sampling.reader.dtypes)
            self.variables |= _variables_of(TARGET, extractor.targets.recipe, schema)
        self.counts = plan.tile_samples[:, plan.parts.index(part)]
        # One bit per window of each tile that was classified: is it a sample?
        self._sample_bits: dict[int, NDArray[np.uint8]] = {}

    def read(self, chunk: int, out: Mapping[ArrayName, NDArray[Any]]) -> None:
        """Write the samples of a tile into one array per variable."""
        by_role = self._extractor.by_role
        extractors: dict[str, Extractor] = {}
        needed: dict[str, tuple[str, ...]] = dict.fromkeys(by_role, ())
        for role in {name.role for name in out}:
            extractors[role] = by_role[role].only(n.variable for n in out if n.role == role)
            needed[role] = extractors[role].sample_variables
        tile = self._extractor.tiles.block(chunk)
        if chunk in self._sample_bits:
            # Variables that only decide about windows were read before.
            cells = self._extractor.read(self._reader, tile, needed)
        else:
            cells = self._classify(chunk, needed)
        keep = self._sample_windows(chunk)
        samples = {
            role: extractor.samples(cells[role], tile, keep)
            for role, extractor in extractors.items()
        }
        for name, target in out.items():
            values, scaling = samples[name.role][name.variable], self._scaling.get(name.variable)
            if scaling is not None:
                first_cells = first_cells_of(self, name, self.rows(chunk), scaling.dims)
                values = scaling.scaled(values, first_cells, self.window_in_cube(name))
            target[...] = values

    def _sample_windows(self, chunk: int) -> NDArray[np.intp]:
        """Return the windows of a tile that are samples."""
        if chunk not in self._sample_bits:
            self._classify(chunk)
        return np.flatnonzero(np.unpackbits(self._sample_bits[chunk]))

    def _classify(
        self, chunk: int, further: Mapping[str, tuple[str, ...]] | None = None
    ) -> CellsByRole:
        """Note which windows of a tile are samples; return its cells, also of further variables."""
        tile = self._extractor.tiles.block(chunk)
        names = self._extractor.outcome_variables(self._reader.dtypes)
        for role, of_samples in (further or {}).items():
            names[role] = tuple(dict.fromkeys((*names[role], *of_samples)))
        cells = self._extractor.read(self._reader, tile, names)
        keep = self._extractor.outcomes(cells, tile) == self._label
        if keep.sum() != self.counts[chunk]:
            raise RunError(
                f"{self.describe(chunk)} had {self.counts[chunk]} samples when they were counted "
                f"and has {keep.sum()} now, so the cube has changed; open it again"
            )
        self._sample_bits[chunk] = np.packbits(keep)
        return cells

    def describe(self, chunk: int) -> str:
        """Describe a tile for an error message."""
        cells = self._extractor.bound.cells_of(self._extractor.tiles.block(chunk))
        return "block " + ", ".join(f"{dim} {s.start}:{s.stop}" for dim, s in cells.items())

    def coords(self, samples: Ints) -> Arrays:
        """Return coordinates of samples; reads their tiles if they were never read."""
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
        """Return the origins of samples, dates as numbers."""
        chunks = self.chunks_of(samples)
        ascending = np.argsort(samples, kind="stable")
        result: Arrays = {}
        for chunk in np.unique(chunks).tolist():
            here = ascending[chunks[ascending] == chunk]
            keep = self._sample_windows(chunk)[samples[here] - self.starts[chunk]]
            origins = self._extractor.origins(self._extractor.tiles.block(chunk), keep)
            for name, values in origins.items():
                result.setdefault(name, np.empty(len(samples), values.dtype))[here] = values
        return result

    def first_cells(self, samples: Ints, dims: Iterable[str]) -> dict[str, Ints]:
        """Return the index of the first cell of samples; reads tiles that were never read."""
        origins = self._origins(samples)
        return {dim: origins[f"{dim}_index"].astype(np.int64) for dim in dims}


def _variables_of(role: str, recipe: Recipe, schema: Schema) -> dict[ArrayName, SampleVariable]:
    """Return the variables of one role; dims that a callback makes get new names."""
    return {
        ArrayName(name, role): SampleVariable(recipe.window_of(name, window), np.dtype(dtype))
        for name, (window, dtype) in schema.items()
    }


def cut_cube(ds: xr.Dataset, options: CubeOptions) -> tuple[CubeSource, StoreMetadata]:
    """Count the windows of a cube; without a split, all are training samples."""
    # Only variables that decide about windows, fills and scaling are read, once for all parts.
    part = options.part
    unsplit = options.data_split == 1.0 and not options.val_split
    if part != "train" and unsplit and split_label(ds) is None:
        raise InvalidValueError(
            f"part={part!r}, but the cube has no split, so all its windows are training samples; "
            "label it first (ml4cube.splits), or give data_split="
        )
    sampling = Sampling.of(ds, options)
    if options.shifted_targets is not None:
        sampling = with_lead(sampling, options.shifted_targets)
    extractor, plan = _planned(sampling, int(options.nproc), options.progress)
    if not plan.accounting[part]:
        refuse_empty(plan.accounting, [part])
    logger.info("samples cut as they are read:\n%s", plan)
    # The statistics of the inputs scale the targets at a lead time too.
    scaling = sampling.scaling(plan.statistics, plan.schema)
    settings = {}
    if sampling.dropped:
        settings["missing_chunks"] = options.missing_chunks
    metadata = StoreMetadata(
        part=part,
        bound=sampling.extractor.bound,
        statistics=plan.statistics,
        accounting=plan.accounting,
        split=sampling.split,
        provenance=provenance(sampling, settings),
        variables=tuple(plan.schema),
        fill=extractor.fill,
        filled=plan.filled,
        places=entries_of(scaling),
        over_missing_dates=plan.over_missing_dates,
    )
    return CubeSource(sampling, extractor, plan, metadata), metadata


#: The last plans, by the identity of the call, for the other parts of the same cube.
_counted: dict[str, tuple[Statistics | None, SamplePlan]] = {}
_MOST_COUNTED = 8


def _planned(sampling: Sampling, nproc: int, progress: bool) -> tuple[Extractor, SamplePlan]:
    """Count the windows of all parts, unless that was done for another part before."""
    extractor = sampling.extractor
    by_role = extractor.outcome_variables(sampling.reader.dtypes)
    rules = itertools.chain.from_iterable(by_role.values())
    fills = sampling.recipe.fills_from_train
    # Labels alone are counted at once, without a progress bar or a plan to remember.
    reads_cells = fills or makes_samples(sampling) or {*rules} != {extractor.label}
    call = None
    if reads_cells:
        call = _identity_of(sampling)
    if call is not None and (known := _counted.get(call)) is not None:
        return replace(extractor, fill=known[0]), known[1]
    # Without fractions, no other part is refused for being empty.
    sampling = replace(sampling, split={"plan": {"fractions": {}}})
    stage = Stage("counting", len(extractor.tiles), "tiles", show=progress and reads_cells)
    with local_engine(nproc) as engine, stage:
        extractor, plan = make_plan(sampling, engine, PARTS, note=stage.update, sparing=True)
    if call is not None:
        _counted[call] = extractor.fill, plan
        while len(_counted) > _MOST_COUNTED:
            _counted.pop(next(iter(_counted)), None)
    return extractor, plan


def _identity_of(sampling: Sampling) -> str | None:
    """Return the identity of a call, or None if it cannot be known without reading the cube."""
    extractor = sampling.extractor
    settings: dict[str, Any] = {"ds": [str(d) for d in sampling.ds.dims]}
    if sampling.given is not None:
        settings["statistics"] = hashlib.sha256(sampling.given.to_json().encode()).hexdigest()
    settings["dropped"] = sampling.dropped
    if extractor.targets is not None:
        settings["lead"] = [extractor.lead, extractor.targets.recipe.variables]
    try:
        callback = None
        if extractor.callback is not None:
            callback = identity_of(extractor.callback)
        return Call.of_samples(sampling, settings, callback, may_read=False).id
    except (CubeError, OSError):
        return None
