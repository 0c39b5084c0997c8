"""A cube and how samples are cut from it: all that is known before a cell is read."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.display import one_line
from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    StoreError,
    caller_level,
    check_choice,
    check_flags,
    check_whole,
    listed,
)
from ml4cube.core.grid import Grid, SizesLike, parse_sizes
from ml4cube.core.missing import FILL_FEATURES, FILLED_ATTR, check_mask, warn_of_filled
from ml4cube.core.sample_facts import split_text, variable_facts
from ml4cube.core.scaling import Scaling
from ml4cube.core.split_plan import PARTS, check_fractions
from ml4cube.core.statistics import SCALE_FNS, Statistics, check_decoded
from ml4cube.core.time_steps import WindowsOverTime, starts_of
from ml4cube.cube.absent_chunks import (
    ABSENT,
    CHOICES,
    AbsentCells,
    AbsentChunks,
    HeededCube,
    find_absent_chunks,
    heed_absent_chunks,
)
from ml4cube.cube.chunks.blocks import file_chunks, source_chunks
from ml4cube.cube.classes import is_flagged
from ml4cube.cube.masks_and_labels import RECIPE_ATTR
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.reader import ComputedSource, CubeReader
from ml4cube.cube.variables import (
    check_left_out,
    cube_dims,
    cube_variables,
    split_label,
    why_not_held,
)
from ml4cube.ledger.manifest import MANIFEST
from ml4cube.preprocessing.cubes import present_mask
from ml4cube.preprocessing.rescaling import warn_of_erased
from ml4cube.preprocessing.scaling import given_statistics
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.recipe.fitted import scaling_of
from ml4cube.recipe.recipe import FillLike, Recipe
from ml4cube.sampling.cf_encoding import axis_of, origin_name
from ml4cube.sampling.rescaling import select_statistics
from ml4cube.sampling.samples import Schema
from ml4cube.sampling.tiling import Callback, TiledRecipe, UsedBlocks, block_order, name_of, tiling
from ml4cube.splits import assign_block_split
from ml4cube.splits.block_sizes import block_sizes
from ml4cube.splits.cube import CubeView
from ml4cube.splits.label import label_lookup
from ml4cube.store.format import AXES
from ml4cube.store.names import check_writable_names

logger = logging.getLogger(__name__)

MIB = 2**20
# Least and most bytes of the samples of one shard, all arrays together, which a worker holds in
# memory; between them, all parts together get about 64 shards.
_SHARD_BYTES = (4 * MIB, 32 * MIB)
_SHARDS_WANTED = 64
#: Megabytes that one decoded chunk of the cube may have, unless asked otherwise.
MAX_CHUNK_MB = 2048.0
# A shard is mixed from this many tiles, so that neighbours in a store come from far apart.
_TILES_PER_SHARD = 16
# Most bytes of the samples of a tile, unless chunks are larger: a tile that has blocks of several
# parts is read once for each of them.
_TILE_BYTES = MIB // 2
#: Bytes of a sample's origin along one dim: a value and an index.
ORIGIN_BYTES = 12
# Blocks of which `data_fraq` uses some, in a cube without chunks.
_BLOCKS_WANTED = 64
# How far the fraction of used blocks may be off `data_fraq` without a warning.
_CLOSE_FRACTION = 0.1


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Arguments for cutting samples from a cube, checked when made."""

    # Subclasses serve `MultiProcSampler`, `XrDataset` and `PTXrDataset`, which document the
    # arguments.

    rand_chunk: bool = False
    data_fraq: float = 1.0
    apply_mask: bool = True
    drop_sample: bool = True
    fill_method: FillLike = None
    const: float | None = None
    filter_var: str | None = "filter_mask"
    drop_nan: str | None = "auto"
    array_dims: Sequence[str] | None = None
    data_split: float = 0.8
    callback: Callback | None = None
    block_size: SizesLike | None = None
    sample_size: SizesLike | None = None
    overlap: SizesLike | float | None = None
    scale_fn: str | None = "standardize"
    val_split: float | None = None
    seed: int = 42
    to_pred: str | Iterable[str] | None = None
    features: str | Iterable[str] | None = None
    max_chunk_mb: float = MAX_CHUNK_MB
    statistics: Any = None
    missing_chunks: str = "warn"
    # Variables, such as weights, that are like targets filled only where a mapping names them.
    unfilled: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check the arguments."""
        flags = ("rand_chunk", "apply_mask", "drop_sample")
        check_flags({name: getattr(self, name) for name in flags})
        object.__setattr__(self, "seed", check_whole("seed", self.seed))
        check_fractions(self.data_split, self.val_split or 0.0, ("data_split", "val_split"))
        check_choice("scale_fn", self.scale_fn, SCALE_FNS)
        check_choice("missing_chunks", self.missing_chunks, CHOICES)
        if self.callback is not None and not callable(self.callback):
            raise InvalidTypeError(
                f"callback must be a function of a dict of arrays, got {one_line(self.callback)}"
            )
        if self.filter_var is not None and not isinstance(self.filter_var, str):
            raise InvalidTypeError(f"filter_var must be a variable name, got {self.filter_var!r}")
        _check_positive("data_fraq", self.data_fraq, 1)
        _check_positive("max_chunk_mb", self.max_chunk_mb)

    @property
    def default_val_split(self) -> float:
        """Fraction of the blocks for validation where `val_split` is None."""
        return 0.0

    @property
    def splits_unlabelled(self) -> bool:
        """Return True if a cube without a label is split, or all its samples are for training."""
        return True


@dataclass(frozen=True)
class Sampling:
    """A cube and how samples are cut from it; made by `Sampling.of`, before a cell is read."""

    # The cube, with its split label.
    ds: xr.Dataset
    # Reads the variables, the label and the mask.
    reader: CubeReader
    tiled: TiledRecipe
    # Recipe of the split label; empty for a label made by hand.
    split: Mapping[str, Any]
    # Variables that samples cannot hold, with the reason.
    left_out: Mapping[str, str]
    # The blocks of which `data_fraq` uses some, dims in the cube's order.
    blocks: Grid
    # Whether the cube came with its label.
    labelled: bool = False
    # To scale by, from the argument `statistics`; None for those of the train samples.
    given: Statistics | None = None
    # Chunks that the source lacks, by variable, and the variables in which they count as gaps.
    absent: Mapping[str, AbsentChunks] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    # Windows that span missing dates.
    over_missing_dates: int = 0

    @classmethod
    def of(cls, cube: Any, options: SamplingOptions) -> Sampling:
        """Check options against a cube, and split the cube if it has no label."""
        statistics, scale_fn = None, options.scale_fn
        if options.statistics is not None:
            statistics, scale_fn = given_statistics(options.statistics, scale_fn)
        ds = as_dataset(cube)
        mask = _mask_name(ds, options)
        shape = _shape(ds, options.filter_var)
        names, left_out = _variables(ds, options)
        # integers are known by the dtype of the samples, which a callback may change
        classes = sorted(name for name in names if is_flagged(ds[name].attrs))
        bound = BoundRecipe.parse(
            shape,
            names,
            sample_size=options.sample_size,
            overlap=options.overlap,
            array_dims=options.array_dims,
            to_pred=options.to_pred,
            features=options.features,
            fill_method=options.fill_method,
            unfilled=options.unfilled,
            const=options.const,
            drop_nan=options.drop_nan,
            apply_mask=options.apply_mask,
            drop_sample=options.drop_sample,
            filter_var=mask,
            scale_fn=scale_fn,
            classes=tuple(classes),
            callback=name_of(options.callback),
            seed=options.seed,
        )
        recipe = bound.recipe
        if options.callback is None:
            check_targets(recipe, names, ds)
        targets = {*recipe.targets, *options.unfilled}
        _check_classes(recipe, classes, targets, ds)
        _warn_of_filled_targets(recipe, names, ds)
        blocks = Grid.blocks(shape, _size_of_blocks(ds, bound, options.block_size))
        labelled = split_label(ds) is not None
        ds, label = _with_label(ds, bound, options)
        reader, heeded = _reader(ds, [*names, label], recipe.dims, label, mask, options)
        # a computed label has chunks too, of many chunks of a file, but is not read by them
        read = [n for n, s in reader.sources.items() if not isinstance(s, ComputedSource)]
        tiled = TiledRecipe(
            bound=bound,
            tiles=tiling(bound, _chunks(ds, read), sample_bytes(recipe, ds), tile_bytes(bound, ds)),
            axes=tuple(axis_of(ds, dim, recipe) for dim in recipe.dims),
            label=label,
            used_blocks=_used_blocks(blocks, options),
            callback=options.callback,
        )
        if mask and recipe.mask_makes_gaps:
            _warn_of_unmasked_targets(targets, mask, ds)
        windows = WindowsOverTime.of(starts_of(bound.windows), axis_values(ds, recipe.dims))
        windows.warn()
        sampling = cls(
            ds,
            reader,
            tiled,
            _split_recipe(ds[label]),
            left_out,
            blocks,
            labelled,
            statistics,
            heeded.absent,
            tuple(sorted(heeded.dropped)),
            windows.over_missing_dates,
        )
        sampling._check_given({name: ds[name].dtype for name in names})
        return sampling

    def _check_given(self, dtypes: Mapping[str, np.dtype[Any]]) -> None:
        """Refuse given statistics that cannot scale variables of some dtypes, before any work."""
        if self.given is None:
            return
        scaled = self.recipe.scaled_variables(dtypes)
        if self.tiled.callback is not None:  # what it makes is known later
            scaled = [name for name in scaled if name in self.given]
        chosen = select_statistics(self.given, scaled)
        self.scaling(chosen)
        warn_of_erased(chosen, str(self.recipe.scale_fn))

    @property
    def recipe(self) -> Recipe:
        """The windows, variables and gap policy of samples."""
        return self.tiled.recipe

    @property
    def facts(self) -> dict[str, object]:
        """How samples are cut, by label, to be printed."""
        recipe = self.recipe
        features = recipe.features or [n for n in recipe.variables if n not in recipe.targets]
        units = {name: self.ds[name].attrs.get("units") for name in recipe.variables}
        by = "the train samples" if self.given is None else "given statistics"
        return {
            **variable_facts(features, recipe.targets, units),
            "Cube": self.tiled.bound.sizes,
            **recipe.facts,
            "Scaling": f"{recipe.scale_fn}, by {by}" if recipe.scale_fn else "none",
            "Split": split_text(self.split),
        }

    def asks_for(self, part: str) -> bool:
        """Return True if the split should have a part; a label made by hand should have all."""
        fractions = self.split.get("plan", {}).get("fractions")
        return fractions is None or part in fractions

    def lacks(self, part: str) -> bool:
        """Return True if no cell has the label of a part, as far as known without reading."""
        label = self.ds[self.tiled.label]
        if label_lookup(self.ds, self.tiled.label) is not None:
            return not self.asks_for(part)
        return label.variable._in_memory and not bool((label.values == PARTS[part]).any())

    def scaling(self, statistics: Statistics, schema: Schema | None = None) -> dict[str, Scaling]:
        """Return the scaling of every variable, in every cell of the cube."""
        recipe = self.recipe
        sizes = self.tiled.bound.sizes
        coords = {dim: self.ds.indexes[dim].values for dim in sizes if dim in self.ds.indexes}
        scaling = scaling_of(statistics, recipe.scale_fn, sizes, coords)
        if schema is None:
            return scaling
        size = dict(zip(recipe.dims, recipe.size, strict=True))
        for name, of_variable in scaling.items():
            window, _ = schema[name]
            along = [dim for dim in of_variable.dims if size[dim] > 1]
            if along and window != recipe.window_shape:
                raise InvalidValueError(
                    f"the callback changes the windows of {name!r} to {window}, so they cannot be "
                    f"matched with statistics along {along}; give statistics without these dims"
                )
        return scaling

    def check_same_chunks(self) -> None:
        """Refuse a cube that lacks other chunks than when its options were checked."""
        sources = self.reader.sources.items()
        stored = [name for name, source in sources if not isinstance(source, ComputedSource)]
        now = find_absent_chunks(self.ds, stored, self.recipe.filter_var)
        if now != self.absent:
            changed = {n for n in (*now, *self.absent) if now.get(n) != self.absent.get(n)}
            raise StoreError(
                f"chunks of {listed(sorted(changed))} were removed or added since this sampler was "
                "made; make it again"
            )


def axis_values(ds: xr.Dataset, dims: Iterable[str]) -> dict[str, NDArray[Any]]:
    """Return the values of the coordinates along dims that have one."""
    return {dim: ds[dim].values for dim in dims if dim in ds.coords}


def _check_positive(name: str, value: Any, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise InvalidTypeError(f"{name} must be a number, got {value!r}")
    if not 0 < value <= most:
        limit = "" if most == math.inf else f" and at most {most}"
        raise InvalidValueError(f"{name} must be above 0{limit}, got {value!r}")


def _mask_name(ds: xr.Dataset, options: SamplingOptions) -> str | None:
    """Return the name of the mask to read, if any."""
    mask = present_mask(ds.variables, options.filter_var)
    is_required = options.drop_nan == "masked"
    if mask is None and is_required:
        raise InvalidValueError(
            f"drop_nan='masked' needs a mask, and the cube has no variable {options.filter_var!r}; "
            "name one by filter_var, or make one with assign_mask"
        )
    if mask is None or not (options.apply_mask or is_required):
        return None
    check_mask(f"filter_var={mask!r}", ds[mask].dtype)
    dims = cube_dims(ds, mask)
    if others := [dim for dim in ds[mask].dims if dim not in dims]:
        raise InvalidValueError(
            f"filter_var={mask!r} must have no dims but those of the cube, {dims}, got "
            f"{ds[mask].dims}; select a cell, ds[{mask!r}].isel({others[0]}=0)"
        )
    return mask


def _shape(ds: xr.Dataset, filter_var: str | None) -> dict[str, int]:
    """Return the cells of the cube along each dim; refuse a cube without cells."""
    shape = {dim: ds.sizes[dim] for dim in cube_dims(ds, filter_var)}
    if empty := [dim for dim, n in shape.items() if n == 0]:
        raise InvalidValueError(f"the cube has no cells along {empty}")
    return shape


def _variables(ds: xr.Dataset, options: SamplingOptions) -> tuple[list[str], dict[str, str]]:
    """Return the variables to sample, checked, and why others are left out."""
    # the mask is not sampled, whether it is applied or not
    names, left_out = cube_variables(ds, options.filter_var)
    for name in names:
        check_decoded(name, ds[name])
        _check_chunk(name, ds[name].variable, options.max_chunk_mb)
    if left_out:
        logger.info("left out: %s", "; ".join(f"{n!r} {why}" for n, why in left_out.items()))
    check_left_out(ds, left_out)
    if not names:
        raise InvalidValueError(f"the cube has no data variable to sample, only {list(ds)}")
    _check_fillable(options.fill_method, {name: ds[name].dtype for name in names})
    return names, left_out


def _check_chunk(name: str, variable: xr.Variable, limit_mb: float) -> None:
    """Refuse chunks that are too large for a worker, as the metadata declares them."""
    for chunks in filter(None, (source_chunks(variable), file_chunks(variable))):
        size_mb = math.prod(chunks.values()) * variable.dtype.itemsize / 1e6
        if size_mb > limit_mb:
            raise InvalidValueError(
                f"chunks of variable {name!r}, {chunks}, have {size_mb:,.0f} MB once "
                f"decoded, above max_chunk_mb={limit_mb:g}, and a worker holds whole chunks in "
                "memory; rechunk the cube, or raise max_chunk_mb"
            )


def _check_fillable(fill_method: Any, dtypes: Mapping[str, np.dtype[Any]]) -> None:
    """Refuse to fill variables by name that are not numbers; integers pass, without gaps."""
    methods = fill_method if isinstance(fill_method, Mapping) else {}
    for name, method in methods.items():
        if method is not None and name in dtypes and dtypes[name].kind not in "fiub":
            raise InvalidTypeError(
                f"fill_method: variable {name!r} has dtype {dtypes[name]}, and only numbers can "
                "be filled; leave it out"
            )


def _check_classes(
    recipe: Recipe, classes: Iterable[str], targets: Container[str], ds: xr.Dataset
) -> None:
    """Refuse to fill classes in floats by other numbers; warn of those that would be scaled."""
    in_floats = [name for name in classes if ds[name].dtype.kind == "f"]
    _refuse_means_of_classes(recipe, in_floats)
    unscaled = [name for name in in_floats if recipe.scale_fn and name not in targets]
    if unscaled:
        warnings.warn(
            f"{unscaled} hold classes by flag_values or flag_meanings, and are not scaled; "
            "drop these attributes if they hold numbers",
            stacklevel=caller_level(),
        )


def _warn_of_filled_targets(recipe: Recipe, names: Iterable[str], ds: xr.Dataset) -> None:
    """Warn of targets in which gaps were filled before."""
    methods = {name: ds[name].attrs.get(FILLED_ATTR) for name in names if name in recipe.targets}
    filled = {name: method for name, method in methods.items() if method is not None}
    warn_of_filled("to_pred", filled, FILL_FEATURES)


def _refuse_means_of_classes(recipe: Recipe, classes: Iterable[str]) -> None:
    """Refuse to fill the gaps of classes with numbers that are none of them."""
    for name in classes:
        if (method := recipe.fill_of(name)) not in (None, "constant"):
            raise InvalidValueError(
                f"fill_method: {name!r} holds classes by its flags, and {method!r} would fill its "
                f"gaps with values that are no class; give {{{name!r}: 'constant'}} or None"
            )


def check_targets(recipe: Recipe, stored: Iterable[str], ds: xr.Dataset) -> None:
    """Refuse targets and features that samples do not have."""
    stored, reasons = list(stored), why_not_held(ds, recipe.filter_var)
    check_known("to_pred", recipe.targets, stored, reasons)
    check_known("features", recipe.features or (), stored, reasons)


def check_known(
    argument: str,
    names: Iterable[str],
    known: Iterable[str],
    reasons: Mapping[str, str] | None = None,
) -> None:
    """Refuse names of variables that are not among those of the samples, with the reason."""
    known = list(known)
    unknown = [name for name in names if name not in known]
    reasons = reasons or {}
    if left_out := [f"{name!r} {reasons[name]}" for name in unknown if name in reasons]:
        raise InvalidValueError(
            f"{argument} must name variables of the samples, {known}, but {'; '.join(left_out)}"
        )
    if unknown:
        raise InvalidValueError(
            f"{argument}: unknown variables {unknown}; the samples have {known}"
        )


def _size_of_blocks(
    ds: xr.Dataset, bound: BoundRecipe, block_size: SizesLike | None
) -> dict[str, int]:
    """Return the size of the blocks for `data_fraq`: as given, or chunks, or a few dozen."""
    shape, recipe = bound.sizes, bound.recipe
    if block_size is not None:
        return parse_sizes("block_size", block_size, shape)
    chunks = _chunks(ds, recipe.variables)
    if chunks:
        return {dim: min(chunks.get(dim, n), n) for dim, n in shape.items()}
    blocks_per_dim = round(_BLOCKS_WANTED ** (1 / len(shape)))
    sizes = {}
    for dim, n, window in zip(recipe.dims, bound.shape, recipe.size, strict=True):
        windows_per_block = max(1, round(n / blocks_per_dim / window))
        sizes[dim] = min(window * windows_per_block, n)
    return sizes


def _chunks(ds: xr.Dataset, names: Iterable[str]) -> dict[str, int]:
    """Return the largest chunk of some variables along each dim; nothing if none is chunked."""
    chunks: dict[str, int] = {}
    for name in names:
        for dim, n in source_chunks(ds[name].variable).items():
            chunks[dim] = max(n, chunks.get(dim, 1))
    return chunks


def _with_label(
    ds: xr.Dataset, bound: BoundRecipe, options: SamplingOptions
) -> tuple[xr.Dataset, str]:
    """Return the cube with its split label, or one made for it, and the label's name."""
    label, val_split = split_label(ds), options.val_split
    if label is not None:
        if val_split:
            raise InvalidValueError(
                f"val_split={val_split!r} is for a cube without a split label, and this one has "
                f"{label!r}; drop val_split or the label"
            )
        dims = bound.recipe.dims
        if not set(ds[label].dims) <= set(dims):
            raise InvalidValueError(
                f"the split label {label!r} has dims {ds[label].dims}, the cube {dims}"
            )
        return ds, label
    if not options.splits_unlabelled:
        return ds.assign(split=((), np.uint8(PARTS["train"]))), "split"
    val = options.default_val_split if val_split is None else val_split
    fractions = check_fractions(options.data_split, val, ("data_split", "val_split"))
    shares = [options.data_fraq * fraction for fraction in fractions.values()]
    sizes = block_sizes(options.block_size, CubeView.of(ds), shares, bound.windows)
    return assign_block_split(ds, sizes, options.data_split, val=val, seed=options.seed), "split"


def sample_bytes(recipe: Recipe, ds: xr.Dataset) -> int:
    """Return the bytes of a sample and its origin, before compression."""
    values = math.prod(recipe.size) * sum(ds[name].dtype.itemsize for name in recipe.variables)
    return values + ORIGIN_BYTES * len(recipe.dims)


def tile_bytes(bound: BoundRecipe, ds: xr.Dataset) -> int:
    """Return the bytes that all samples of a tile should have."""
    total = len(bound.windows) * sample_bytes(bound.recipe, ds)
    return min(shard_bytes(total) // _TILES_PER_SHARD, _TILE_BYTES)


def shard_bytes(total: int) -> int:
    """Return the bytes that a shard should have, all arrays together, of a total of samples."""
    least, most = _SHARD_BYTES
    return min(max(total // _SHARDS_WANTED, least), most)


def _used_blocks(blocks: Grid, options: SamplingOptions) -> UsedBlocks | None:
    """Choose the blocks to use: the first ones in the cube's order, or some at random."""
    wanted = max(1, round(options.data_fraq * len(blocks)))
    if abs(wanted / len(blocks) - options.data_fraq) > _CLOSE_FRACTION:
        warnings.warn(
            f"data_fraq={options.data_fraq:g} uses {wanted} of {len(blocks)} blocks; give smaller "
            "ones by block_size to come closer",
            UserWarning,
            stacklevel=caller_level(),
        )
    if wanted == len(blocks):
        return None
    used = np.zeros(len(blocks), bool)
    used[block_order(blocks, options.rand_chunk, options.seed)[:wanted]] = True
    return UsedBlocks(blocks, used.reshape(blocks.counts))


def _warn_of_unmasked_targets(targets: Iterable[str], mask: str, ds: xr.Dataset) -> None:
    kept = sorted(n for n in targets if n in ds and ds[n].dtype.kind not in "fM")
    if kept:
        warnings.warn(
            f"to_pred: {kept} cannot hold gaps, so cells outside the mask {mask!r} keep "
            "their values, and losses and scores count them; convert these targets to float, or "
            "use drop_sample=True",
            stacklevel=caller_level(),
        )


def _reader(
    ds: xr.Dataset,
    names: Sequence[str],
    dims: Sequence[str],
    label: str,
    mask: str | None,
    options: SamplingOptions,
) -> tuple[CubeReader, HeededCube]:
    """Make a reader of some variables and the mask, and heed chunks that are absent.

    It computes labels from the split's recipe, if there is one, and the cells of absent chunks of
    integers, which hold no gaps.
    """
    lookup = label_lookup(ds, label)
    computed: dict[str, ComputedSource] = {}
    if lookup is not None:
        label_dims = tuple(str(dim) for dim in ds[label].dims)
        computed[label] = ComputedSource(dims=label_dims, dtype=np.dtype(np.uint8), function=lookup)
    names = [*names, *([mask] if mask else [])]
    heeded = heed_absent_chunks(
        ds,
        [name for name in names if name not in computed],
        options.missing_chunks,
        mask=mask,
        keep_integers=True,
    )
    without_gaps = {n: chunks for n, chunks in heeded.dropped.items() if ds[n].dtype.kind in "iub"}
    if without_gaps:
        cells = AbsentCells.of(ds, dims, without_gaps)
        computed[ABSENT] = ComputedSource(dims=tuple(dims), dtype=np.dtype(bool), function=cells)
    reader = CubeReader.of(heeded.cube, names, dims)
    return replace(reader, sources={**reader.sources, **computed}), heeded


def _split_recipe(label: xr.DataArray) -> dict[str, Any]:
    text = label.attrs.get(RECIPE_ATTR)
    if text is None:
        return {}
    recipe: dict[str, Any] = json.loads(text) if isinstance(text, str) else dict(text)
    return recipe


def check_stored_names(recipe: Recipe, stored: Iterable[str]) -> None:
    """Refuse names of variables and dims that a sample store uses itself or cannot hold."""
    files = {MANIFEST.partition("/")[0], AXES}
    origins = {origin_name(dim, recipe) for dim in recipe.dims} | {
        f"{d}_index" for d in recipe.dims
    }
    stored = tuple(stored)
    check_writable_names((*recipe.dims, *recipe.array_dims, *stored, *sorted(origins)))
    for kind, names, taken in (
        ("dim", recipe.dims, files),
        ("variable", stored, files | origins | set(recipe.array_dims)),
    ):
        if refused := [name for name in names if name in taken]:
            raise InvalidValueError(
                f"{kind} {refused[0]!r} of the samples must have another name than {sorted(taken)},"
                " which the store uses itself; rename it (ds.rename, or in the callback)"
            )
