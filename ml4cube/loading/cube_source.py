"""A source of samples that are cut from a cube as they are read."""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import (
    CubeError,
    InvalidValueError,
    RunError,
    check_flags,
    check_whole,
)
from ml4cube.core.rank_shares import Ints
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import Statistics
from ml4cube.cube.engine import local_engine
from ml4cube.cube.reader import CubeReader, Slices
from ml4cube.cube.variables import split_label
from ml4cube.loading.sources import SampleSource, SampleVariable, first_cells_of, known_scaling
from ml4cube.progress import Stage
from ml4cube.recipe.preparation import Arrays
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import INPUT, TARGET, ArrayName, Lead
from ml4cube.sampling.identity.callback import identity_of
from ml4cube.sampling.identity.provenance import Call, provenance
from ml4cube.sampling.outcomes import CellsByRole, classify, deciding_variables
from ml4cube.sampling.parts import PART_ARGUMENTS, Parts
from ml4cube.sampling.plan import SamplePlan, refuse_empty
from ml4cube.sampling.planning import make_plan, makes_samples
from ml4cube.sampling.rescaling import entries_of, scaling_of_samples
from ml4cube.sampling.sampled_cube import SampledCube, sample_cube
from ml4cube.sampling.samples import Schema, make_samples, variables_read
from ml4cube.sampling.tiling import TiledRecipe
from ml4cube.store.metadata import StoreMetadata

if TYPE_CHECKING:
    import xarray as xr

logger = logging.getLogger(__name__)


#: Arguments for cutting a cube that `PTXrDataset` takes by ``**cutting``.
CUTTING = (
    *("rand_chunk", "data_fraq", "apply_mask", "drop_sample", "fill_method", "const", "filter_var"),
    *("drop_nan", "data_split", "callback", "scale_fn", "val_split", "seed", "statistics"),
    *("missing_chunks", "nproc", "progress"),
)


class CubeSource(SampleSource):
    """Samples cut from a cube as they are read: those that `MultiProcSampler` would write."""

    # A chunk is a tile of neighbouring windows, whose cells are read once despite the overlap.

    is_cut = True

    def __init__(
        self, sampled: SampledCube, tiled: TiledRecipe, plan: SamplePlan, metadata: StoreMetadata
    ) -> None:
        part = metadata.part
        self._reader, self._tiled, self._label = sampled.reader.cells, tiled, PARTS[part]
        self._scaling = known_scaling(metadata)
        self.cube_dims: Mapping[str, str] = {}  # Samples have dims of the same names as the cube.
        self.lead: Lead = tiled.bound.lead
        self.axes = {d: sampled.ds[d].variable for d in tiled.recipe.dims if d in sampled.ds}
        self.remote = "://" in str(sampled.ds.encoding.get("source", ""))
        self.variables = _variables_of(INPUT, tiled.recipe, plan.schema)
        if tiled.bound.targets is not None:
            recipe, dtypes = tiled.bound.targets.recipe, sampled.reader.cells.dtypes
            schema = {name: (recipe.window_shape, dtypes[name].str) for name in recipe.variables}
            self.variables |= _variables_of(TARGET, recipe, schema)
        self.counts = plan.tile_samples[:, plan.parts.index(part)]
        # One bit per window of each tile that was classified: is it a sample?
        self._sample_bits: dict[int, NDArray[np.uint8]] = {}

    def read(self, chunk: int, out: Mapping[ArrayName, NDArray[Any]]) -> None:
        """Write the samples of a tile into one array per variable."""
        wanted: dict[str, list[str]] = {}
        for name in out:
            wanted.setdefault(name.role, []).append(name.variable)
        if self._tiled.callback is not None:  # It gets all variables.
            wanted = {INPUT: list(self._tiled.recipe.variables)}
        needed = {}
        for role, bound in self._tiled.bound.by_role.items():
            needed[role] = variables_read(bound.recipe, wanted[role]) if role in wanted else ()
        tile = self._tiled.tiles.block(chunk)
        if chunk in self._sample_bits:
            # Variables that only decide about windows were read before.
            cells = _read_roles(self._reader, self._tiled.bound.boxes(tile), needed)
        else:
            cells = self._classify(chunk, needed)
        keep = self._sample_windows(chunk)
        samples = {
            role: make_samples(self._tiled, cells[role], tile, keep, role, names)
            for role, names in wanted.items()
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
        tile = self._tiled.tiles.block(chunk)
        names = deciding_variables(self._tiled, self._reader.dtypes)
        for role, of_samples in (further or {}).items():
            names[role] = tuple(dict.fromkeys((*names[role], *of_samples)))
        cells = _read_roles(self._reader, self._tiled.bound.boxes(tile), names)
        keep = classify(self._tiled, cells, tile) == self._label
        if keep.sum() != self.counts[chunk]:
            raise RunError(
                f"{self.describe(chunk)} had {self.counts[chunk]} samples when they were counted "
                f"and has {keep.sum()} now, so the cube has changed; open it again"
            )
        self._sample_bits[chunk] = np.packbits(keep)
        return cells

    def describe(self, chunk: int) -> str:
        """Describe a tile for an error message."""
        cells = self._tiled.bound.cells_of(self._tiled.tiles.block(chunk))
        return "block " + ", ".join(f"{dim} {s.start}:{s.stop}" for dim, s in cells.items())

    def coords(self, samples: Ints) -> Arrays:
        """Return coordinates of samples; reads their tiles if they were never read."""
        import xarray as xr

        result = self._origins(samples)
        attrs = {axis.name: axis.attrs for axis in self._tiled.axes}
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
            origins = self._tiled.origins(self._tiled.tiles.block(chunk), keep)
            for name, values in origins.items():
                result.setdefault(name, np.empty(len(samples), values.dtype))[here] = values
        return result

    def first_cells(self, samples: Ints, dims: Iterable[str]) -> dict[str, Ints]:
        """Return the index of the first cell of samples; reads tiles that were never read."""
        origins = self._origins(samples)
        return {dim: origins[f"{dim}_index"].astype(np.int64) for dim in dims}


def _read_roles(
    reader: CubeReader, boxes: Mapping[str, Slices], names: Mapping[str, Collection[str]]
) -> CellsByRole:
    """Read some variables of each role; cells of both roles are read once."""
    union, read_once = boxes[INPUT], Arrays()
    if TARGET in boxes and _overlap(boxes[INPUT], boxes[TARGET]):
        of_dims = {dim: (s, boxes[TARGET][dim]) for dim, s in boxes[INPUT].items()}
        union = {
            dim: slice(min(a.start, b.start), max(a.stop, b.stop))
            for dim, (a, b) in of_dims.items()
        }
        of_both = [name for name in names[INPUT] if name in names[TARGET]]
        read_once = reader.only(of_both).read(union)
    cells: CellsByRole = {}
    for role, box in boxes.items():
        cells[role] = reader.only(n for n in names[role] if n not in read_once).read(box)
        inside = tuple(
            slice(s.start - union[dim].start, s.stop - union[dim].start) for dim, s in box.items()
        )
        cells[role] |= {name: values[inside] for name, values in read_once.items()}
    return cells


def _overlap(a: Slices, b: Slices) -> bool:
    return all(max(s.start, b[d].start) < min(s.stop, b[d].stop) for d, s in a.items())


def _variables_of(role: str, recipe: Recipe, schema: Schema) -> dict[ArrayName, SampleVariable]:
    """Return the variables of one role; dims that a callback makes get new names."""
    return {
        ArrayName(name, role): SampleVariable(recipe.window_of(name, window), np.dtype(dtype))
        for name, (window, dtype) in schema.items()
    }


def cut_cube(
    ds: xr.Dataset,
    part: str,
    *,
    nproc: int = 1,
    progress: bool = True,
    data_split: float = 1.0,
    **arguments: Any,
) -> tuple[CubeSource, StoreMetadata]:
    """Count the windows of a cube; without a split, all are training samples.

    `arguments` are those of `Parts` and of `sample_cube`.
    """
    # Only variables that decide about windows, fills and scaling are read, once for all parts.
    check_flags({"progress": progress})
    nproc = check_whole("nproc", nproc, 1)
    of_parts = {name: arguments.pop(name) for name in PART_ARGUMENTS if name in arguments}
    parts = Parts(data_split=data_split, **of_parts)
    unsplit = data_split == 1.0 and not parts.val_split
    if part != "train" and unsplit and split_label(ds) is None:
        raise InvalidValueError(
            f"part={part!r}, but the cube has no split, so all its windows are training samples; "
            "label it first (ml4cube.splits), or give data_split="
        )
    sampled = sample_cube(ds, parts, **arguments)
    tiled, plan = _planned(sampled, nproc, progress)
    if not plan.accounting[part]:
        refuse_empty(plan.accounting, [part])
    logger.info("samples cut as they are read:\n%s", plan)
    # The statistics of the inputs scale the targets at a lead time too.
    scaling = scaling_of_samples(plan.statistics, plan.schema, sampled.recipe, sampled.ds)
    settings = {}
    if sampled.reader.dropped:
        settings["missing_chunks"] = arguments["missing_chunks"]
    metadata = StoreMetadata(
        part=part,
        bound=tiled.bound,
        statistics=plan.statistics,
        accounting=plan.accounting,
        split=sampled.split,
        provenance=provenance(sampled, settings),
        variables=tuple(plan.schema),
        fill=tiled.fill,
        filled=plan.filled,
        places=entries_of(scaling),
        over_missing_dates=plan.over_missing_dates,
    )
    return CubeSource(sampled, tiled, plan, metadata), metadata


#: The last plans, by the identity of the call, for the other parts of the same cube.
_counted: dict[str, tuple[Statistics | None, SamplePlan]] = {}
_MOST_COUNTED = 8


def _planned(sampled: SampledCube, nproc: int, progress: bool) -> tuple[TiledRecipe, SamplePlan]:
    """Count the windows of all parts, unless that was done for another part before."""
    tiled = sampled.tiled
    by_role = deciding_variables(tiled, sampled.reader.cells.dtypes)
    rules = itertools.chain.from_iterable(by_role.values())
    fills = sampled.recipe.fills_from_train
    # Labels alone are counted at once, without a progress bar or a plan to remember.
    reads_cells = fills or makes_samples(sampled) or {*rules} != {tiled.label}
    call = None
    if reads_cells:
        call = _identity_of(sampled)
    if call is not None and (known := _counted.get(call)) is not None:
        return replace(tiled, fill=known[0]), known[1]
    stage = Stage("counting", len(tiled.tiles), "tiles", show=progress and reads_cells)
    with local_engine(nproc) as engine, stage:
        tiled, plan = make_plan(sampled, engine, PARTS, note=stage.update, is_lazy=True)
    if call is not None:
        _counted[call] = tiled.fill, plan
        while len(_counted) > _MOST_COUNTED:
            _counted.pop(next(iter(_counted)), None)
    return tiled, plan


def _identity_of(sampled: SampledCube) -> str | None:
    """Return the identity of a call, or None if it cannot be known without reading the cube."""
    tiled = sampled.tiled
    settings: dict[str, Any] = {"ds": [str(d) for d in sampled.ds.dims]}
    if sampled.given is not None:
        settings["statistics"] = hashlib.sha256(sampled.given.to_json().encode()).hexdigest()
    settings["dropped"] = sampled.reader.dropped
    if tiled.bound.targets is not None:
        settings["lead"] = [tiled.bound.lead, tiled.bound.targets.recipe.variables]
    try:
        callback = None
        if tiled.callback is not None:
            callback = identity_of(tiled.callback)
        return Call.of_samples(sampled, settings, callback, may_read=False).id
    except (CubeError, OSError):
        return None
