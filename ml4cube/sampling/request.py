"""A cube and how samples are cut from it: all that is known before a cell is read."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Self

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_choice,
    check_flags,
    check_seed,
)
from ml4cube.core.grid import Grid, SizesLike, parse_sizes
from ml4cube.core.missing import FILL_FEATURES, FILLED_ATTR, check_mask, warn_of_filled
from ml4cube.core.partition import hash_ids
from ml4cube.core.sample_spec import FillLike, SampleSpec
from ml4cube.core.scaling import Scaling
from ml4cube.core.split_plan import PARTS, check_fractions
from ml4cube.core.statistics import SCALE_FNS, Statistics
from ml4cube.cube.masks_and_labels import RECIPE_ATTR
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.reader import ComputedSource, CubeReader
from ml4cube.cube.variables import cube_dims, cube_variables, split_label
from ml4cube.preprocessing.cubes import check_decoded
from ml4cube.preprocessing.scaling import given_statistics
from ml4cube.sampling.counting import Schema
from ml4cube.sampling.extractor import Axis, BlockChoice, Callback, Extractor, tiling
from ml4cube.sampling.rescaling import needed, scaling_of
from ml4cube.splits import assign_block_split
from ml4cube.splits.block_sizes import block_sizes, caller_level
from ml4cube.splits.cube import CubeView
from ml4cube.splits.label import label_lookup, read_recipe
from ml4cube.store.format import AXES, MANIFEST

logger = logging.getLogger(__name__)

MIB = 2**20
# Bytes of the samples of one shard, all arrays together, which a worker holds in memory.
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
# About so many blocks are made of a cube without chunks if only some are used.
_BLOCKS_WANTED = 64
#: Long name, in a store, of the cell numbers along a dim without a coordinate.
NUMBERED = "number of the cell, which has no coordinate"
# An id that no block has, hashed to the seed that draws blocks.
_DRAWING = [-1]


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Arguments for cutting samples from a cube, checked when made."""

    # `MultiProcSampler`, `XrDataset` and `PTXrDataset` have subclasses, and document the arguments.

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
    # Variables that, like targets, are filled only where a mapping names them.
    unfilled: tuple[str, ...] = ()

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Self:
        """Make options of the arguments of a constructor, as ``locals()`` gives them."""
        return cls(
            **{
                field.name: arguments[field.name]
                for field in fields(cls)
                if field.name in arguments
            }
        )

    def __post_init__(self) -> None:
        """Check the arguments."""
        flags = ("rand_chunk", "apply_mask", "drop_sample")
        check_flags({name: getattr(self, name) for name in flags})
        object.__setattr__(self, "seed", check_seed(self.seed))
        check_fractions(self.data_split, self.val_split or 0.0, ("data_split", "val_split"))
        check_choice("scale_fn", self.scale_fn, SCALE_FNS)
        if self.callback is not None and not callable(self.callback):
            raise InvalidTypeError(
                f"callback must be a function of a dict of arrays, got {self.callback!r}"
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
    """A cube and how samples are cut from it: all that is known before a cell is read."""

    # Make one with `Sampling.of`.

    # The cube, with its split label.
    ds: xr.Dataset
    # Reads the variables, the label and the mask.
    reader: CubeReader
    extractor: Extractor
    # Recipe of the split label; empty for a label made by hand.
    recipe: Mapping[str, Any]
    # Variables that samples cannot hold, with the reason.
    left_out: Mapping[str, str]
    # Blocks of the cube, dims in the cube's order.
    blocks: Grid
    # Whether the cube came with its label.
    labelled: bool = False
    # Statistics that a user gave to scale by, instead of those of the train samples.
    given: Statistics | None = None

    @classmethod
    def of(cls, cube: Any, options: SamplingOptions) -> Sampling:
        """Check options against a cube, and split the cube if it has no label."""
        given, scale_fn = None, options.scale_fn
        if options.statistics is not None:
            given, scale_fn = given_statistics(options.statistics, scale_fn)
        ds = as_dataset(cube)
        mask = _mask_name(ds, options)
        shape = _shape(ds, options.filter_var)
        # the variable named as the mask is no data, whether it is applied or not
        names, left_out = cube_variables(ds, options.filter_var)
        for name in names:
            check_decoded(name, ds[name])
            _check_chunk(name, ds[name].variable, options.max_chunk_mb)
        if left_out:
            logger.info("left out: %s", "; ".join(f"{n!r} {why}" for n, why in left_out.items()))
        if not names:
            raise InvalidValueError(f"the cube has no data variable to sample, only {list(ds)}")
        _check_fillable(options.fill_method, {name: ds[name].dtype for name in names})
        same = {f.name for f in fields(SampleSpec)} & {f.name for f in fields(SamplingOptions)}
        spec = SampleSpec.parse(
            shape,
            names,
            sample_size=options.sample_size,
            to_pred=options.to_pred,
            unfilled=options.unfilled,
            **{name: getattr(options, name) for name in same}
            | {"filter_var": mask, "scale_fn": scale_fn},
        )
        if options.callback is None:
            check_targets(spec, names)
        attrs = {name: ds[name].attrs for name in names if name in spec.targets}
        filled = {name: own[FILLED_ATTR] for name, own in attrs.items() if FILLED_ATTR in own}
        warn_of_filled("to_pred", filled, FILL_FEATURES)
        blocks = Grid.blocks(shape, _used_blocks(ds, spec, options.block_size))
        labelled = split_label(ds) is not None
        ds, label = _with_label(ds, spec, options)
        read = [*names, label, *([mask] if mask else [])]
        extractor = Extractor(
            spec=spec,
            tiles=tiling(spec, _chunks(ds, read), *tile_bytes(spec, ds)),
            axes=tuple(_axis(ds, dim, spec) for dim in spec.dims),
            label=label,
            choice=_choice(blocks, options),
            callback=options.callback,
            seed=options.seed,
        )
        if mask and extractor.mask_blanks:
            _warn_of_integers({*spec.targets, *options.unfilled}, mask, ds)
        reader, recipe = _reader(ds, read, label), _recipe(ds[label])
        sampling = cls(ds, reader, extractor, recipe, left_out, blocks, labelled, given)
        if given is not None:
            # refuse what cannot be scaled before any work; what a callback makes is known later
            floats = [name for name in names if ds[name].dtype.kind == "f"]
            known = [n for n in floats if n in given] if options.callback else floats
            sampling.scaling(needed(given, known))
        return sampling

    @property
    def spec(self) -> SampleSpec:
        """The windows, variables and gap policy of samples."""
        return self.extractor.spec

    def lacks(self, part: str) -> bool:
        """Return True if it is known without reading that no cell has the label of a part."""
        label = self.ds[self.extractor.label]
        if label_lookup(self.ds, self.extractor.label) is None:
            return label.variable._in_memory and not bool((label.values == PARTS[part]).any())
        plan, *_ = read_recipe(self.recipe)
        return part not in dict(plan.fractions) and PARTS[part] not in getattr(plan, "labels", b"")

    def scaling(self, statistics: Statistics, schema: Schema | None = None) -> dict[str, Scaling]:
        """Return the scaling of every variable, in every cell of the cube."""
        spec = self.spec
        found = scaling_of(statistics, spec.scale_fn, self.ds, spec.dims)
        size = dict(zip(spec.dims, spec.size, strict=True))
        for name, scaling in found.items():
            window = spec.window_shape if schema is None else schema[name][0]
            long = [dim for dim in scaling.dims if size[dim] > 1]
            if long and window != spec.window_shape:
                raise InvalidValueError(
                    f"the callback changes the windows of {name!r} to {window}, so they cannot be "
                    f"matched with statistics along {long}; give statistics without these dims"
                )
        return found

    def tile_tasks(self, ids: Iterable[int]) -> Iterator[tuple[int, CubeReader]]:
        """Yield each tile with a reader for a worker."""
        for id in ids:
            cells = self.extractor.cells_of(self.extractor.tiles.block(int(id)))
            yield int(id), self.reader.unshared(cells)


def _reader(ds: xr.Dataset, names: Iterable[str], label: str) -> CubeReader:
    """Make a reader that computes labels from the split's recipe, if there is one."""
    reader = CubeReader.of(ds, names)
    lookup = label_lookup(ds, label)
    if lookup is None:
        return reader
    dims = tuple(str(dim) for dim in ds[label].dims)
    computed = ComputedSource(dims=dims, dtype=np.dtype(np.uint8), function=lookup)
    return replace(reader, sources={**reader.sources, label: computed})


def _shape(ds: xr.Dataset, filter_var: str | None) -> dict[str, int]:
    shape = {dim: ds.sizes[dim] for dim in cube_dims(ds, filter_var)}
    if empty := [dim for dim, n in shape.items() if n == 0]:
        raise InvalidValueError(f"the cube has no cells along {empty}")
    return shape


def _mask_name(ds: xr.Dataset, options: SamplingOptions) -> str | None:
    """Return the mask to read, if there is one; a name other than the default must exist."""
    name = options.filter_var
    known = name in ds.variables
    masked = options.drop_nan == "masked"
    if not known and name not in (None, "filter_mask"):
        raise InvalidValueError(f"unknown filter_var={name!r}; the cube has {list(ds.variables)}")
    if not known and masked:
        raise InvalidValueError(
            f"drop_nan='masked' needs a mask, and the cube has no variable {name!r}; name one by "
            "filter_var, or make one with assign_mask"
        )
    if not known or not (options.apply_mask or masked):
        return None
    check_mask(f"filter_var={name!r}", ds[name].dtype)
    return name


def _with_label(
    ds: xr.Dataset, spec: SampleSpec, options: SamplingOptions
) -> tuple[xr.Dataset, str]:
    """Return the cube with its split label, or one made for it, and the label's name."""
    label, val_split = split_label(ds), options.val_split
    if label is not None:
        if val_split:
            raise InvalidValueError(
                f"val_split={val_split!r} is for a cube without a split label, and this one has "
                f"{label!r}; drop val_split or the label"
            )
        if not set(ds[label].dims) <= set(spec.dims):
            raise InvalidValueError(
                f"the split label {label!r} has dims {ds[label].dims}, the cube {spec.dims}"
            )
        return ds, label
    if not options.splits_unlabelled:
        return ds.assign(split=((), np.uint8(PARTS["train"]))), "split"
    val = options.default_val_split if val_split is None else val_split
    fractions = check_fractions(options.data_split, val, ("data_split", "val_split"))
    sizes = block_sizes(
        options.block_size, CubeView.of(ds), fractions.values(), spec.windows, options.data_fraq
    )
    return assign_block_split(ds, sizes, options.data_split, val=val, seed=options.seed), "split"


def _check_fillable(fill_method: Any, dtypes: Mapping[str, np.dtype[Any]]) -> None:
    """Refuse to fill variables by name that are not numbers; integers have no gaps."""
    for name, method in fill_method.items() if isinstance(fill_method, Mapping) else ():
        if method is not None and name in dtypes and dtypes[name].kind not in "fiub":
            raise InvalidTypeError(
                f"fill_method: variable {name!r} has dtype {dtypes[name]}, and only numbers can "
                "be filled; leave it out"
            )


def _warn_of_integers(targets: Iterable[str], mask: str, ds: xr.Dataset) -> None:
    kept = sorted(n for n in targets if n in ds and ds[n].dtype.kind not in "fM")
    if kept:
        warnings.warn(
            f"to_pred: {kept} cannot hold gaps, so cells outside the mask {mask!r} keep "
            "their values, and losses and scores count them; convert these targets to float, or "
            "use drop_sample=True",
            stacklevel=caller_level(),
        )


def check_targets(spec: SampleSpec, stored: Iterable[str]) -> None:
    """Refuse targets and features that samples do not have."""
    stored = list(stored)
    check_known("to_pred", spec.targets, stored)
    check_known("features", spec.features or (), stored)


def check_known(argument: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names of variables that are not among those of the samples."""
    known = list(known)
    if unknown := [name for name in names if name not in known]:
        raise InvalidValueError(
            f"{argument}: unknown variables {unknown}; the samples have {known}"
        )


def check_stored_names(spec: SampleSpec, stored: Iterable[str]) -> None:
    """Refuse names of variables and dims that a sample store uses itself or cannot hold."""
    files = {MANIFEST.partition("/")[0], AXES, "zarr.json"}
    origins = {_origin_name(dim, spec) for dim in spec.dims} | {f"{d}_index" for d in spec.dims}
    for kind, names, taken in (
        ("dim", spec.dims, files),
        ("variable", stored, files | origins | set(spec.array_dims)),
    ):
        if odd := [name for name in names if _is_odd(name) or name in taken]:
            raise InvalidValueError(
                f"{kind} {odd[0]!r} of the samples cannot name a folder of the store, which has "
                f"{sorted(taken)} of its own; rename it (ds.rename, or in the callback)"
            )


def _is_odd(name: str) -> bool:
    """Return True if a name cannot be that of a folder."""
    # NUL ends a path, and a newline ends a line in lists of files
    odd = "/" in name or any(letter < " " for letter in name)
    return not name or odd or name in (".", "..") or name.startswith("__")


def _origin_name(dim: str, spec: SampleSpec) -> str:
    return f"{dim}_origin" if dim in spec.array_dims or dim in spec.variables else dim


def _check_positive(name: str, value: Any, most: float = math.inf) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise InvalidTypeError(f"{name} must be a number, got {value!r}")
    if not 0 < value <= most:
        limit = "" if most == math.inf else f" and at most {most}"
        raise InvalidValueError(f"{name} must be above 0{limit}, got {value!r}")


def source_chunks(variable: xr.Variable) -> dict[str, int]:
    """Return the largest chunk along each dim, of dask or the file; nothing for memory."""
    if variable.chunks is not None:
        return {str(d): max(sizes) for d, sizes in variable.chunksizes.items()}
    if variable._in_memory:
        return {}
    return {str(d): int(n) for d, n in variable.encoding.get("preferred_chunks", {}).items()}


def _check_chunk(name: str, variable: xr.Variable, limit_mb: float) -> None:
    """Refuse chunks that are too large for a worker, as the metadata declares them."""
    on_file = {} if variable._in_memory else variable.encoding.get("preferred_chunks") or {}
    for chunks in (source_chunks(variable), on_file):
        cells = math.prod(chunks.get(str(d), n) for d, n in variable.sizes.items()) if chunks else 0
        found = cells * variable.dtype.itemsize / 1e6
        if found > limit_mb:
            raise InvalidValueError(
                f"chunks of variable {name!r}, {dict(chunks)}, have {found:,.0f} MB once decoded, "
                f"above max_chunk_mb={limit_mb:g}, and a worker holds whole chunks in memory; "
                "rechunk the cube, or raise max_chunk_mb"
            )


def _chunks(ds: xr.Dataset, names: Iterable[str]) -> dict[str, int]:
    chunks: dict[str, int] = {}
    for name in names:
        for dim, n in source_chunks(ds[name].variable).items():
            chunks[dim] = max(n, chunks.get(dim, 1))
    return chunks


def _used_blocks(ds: xr.Dataset, spec: SampleSpec, block_size: SizesLike | None) -> dict[str, int]:
    """Return the size of the blocks to use some of: as given, or chunks, or a few dozen."""
    shape = dict(zip(spec.dims, spec.shape, strict=True))
    if block_size is not None:
        return parse_sizes("block_size", block_size, shape)
    chunks = _chunks(ds, spec.variables)
    if chunks:
        return {dim: min(chunks.get(dim, n), n) for dim, n in shape.items()}
    per_dim = round(_BLOCKS_WANTED ** (1 / len(shape)))
    sizes = {}
    for dim, n, window in zip(spec.dims, spec.shape, spec.size, strict=True):
        sizes[dim] = min(window * max(1, round(n / per_dim / window)), n)
    return sizes


def tile_bytes(spec: SampleSpec, ds: xr.Dataset) -> tuple[int, int]:
    """Return the bytes of a sample, before compression, and of all samples of a tile."""
    values = math.prod(spec.size) * sum(ds[name].dtype.itemsize for name in spec.variables)
    one = values + ORIGIN_BYTES * len(spec.dims)
    return one, min(shard_bytes(len(spec.windows) * one) // _TILES_PER_SHARD, _TILE_BYTES)


def shard_bytes(total: int) -> int:
    """Return the bytes of a shard, all arrays together."""
    low, high = _SHARD_BYTES
    return min(max(total // _SHARDS_WANTED, low), high)


def _choice(blocks: Grid, options: SamplingOptions) -> BlockChoice | None:
    """Choose the blocks to use: the first ones in the cube's order, or some at random."""
    fraction = options.data_fraq
    n = len(blocks)
    wanted = max(1, round(fraction * n))
    if wanted == n:
        return None
    used = np.zeros(n, bool)
    used[block_order(blocks, options.rand_chunk, options.seed)[:wanted]] = True
    return BlockChoice(blocks, used.reshape(blocks.counts))


def block_order(blocks: Grid, at_random: bool, seed: int) -> NDArray[np.intp]:
    """Return the ids of blocks in the order in which they are used."""
    if not at_random:
        return np.arange(len(blocks))
    # the split uses the seed itself, and must be independent of this draw
    drawing = int(hash_ids(seed, _DRAWING)[0])
    return np.argsort(hash_ids(drawing, _canonical_ids(blocks)), kind="stable")


def _canonical_ids(grid: Grid) -> NDArray[np.int64]:
    """Return the id that each tile has in the grid of sorted dims."""
    dims = sorted(grid.dims)
    counts = dict(zip(grid.dims, grid.counts, strict=True))
    ids = np.arange(len(grid)).reshape([counts[dim] for dim in dims])
    return ids.transpose([dims.index(dim) for dim in grid.dims]).reshape(-1)


def _recipe(label: xr.DataArray) -> dict[str, Any]:
    text = label.attrs.get(RECIPE_ATTR)
    if text is None:
        return {}
    recipe: dict[str, Any] = json.loads(text) if isinstance(text, str) else dict(text)
    return recipe


def _axis(ds: xr.Dataset, dim: str, spec: SampleSpec) -> Axis:
    """Return the coordinate along a dim, dates as numbers; cell numbers if the cube has none."""
    name = _origin_name(dim, spec)
    if dim not in ds.coords:
        return Axis(name, np.arange(ds.sizes[dim]), {"long_name": NUMBERED})
    # the encoding of the source file may pack values or round dates
    coordinate = in_numpy_dtype(ds[dim].variable.to_base_variable()).drop_encoding()
    coordinate.attrs = without_epoch(coordinate.attrs)
    try:
        encoded = xr.conventions.encode_cf_variable(coordinate)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(
            f"coordinate {dim!r} of dtype {coordinate.dtype} cannot be stored: {error}; replace "
            "it by numbers, strings or datetime64 (ds.assign_coords)"
        ) from error
    values = np.asarray(encoded.values)
    if values.dtype.kind not in "fiub":
        values = as_texts(values)
    elif values.dtype.itemsize > 8:  # long doubles, which differ between machines
        values = values.astype(np.float64)
    return Axis(name, values, jsonable(encoded.attrs))


def in_numpy_dtype(coordinate: xr.Variable) -> xr.Variable:
    """Return a coordinate in a numpy dtype, if it has one of pandas."""
    if isinstance(coordinate.dtype, np.dtype):
        return coordinate
    index = coordinate.to_index()
    plain = index.tz_convert(None) if isinstance(index, pd.DatetimeIndex) else index
    return xr.Variable(coordinate.dims, np.asarray(plain), coordinate.attrs)


def as_texts(values: NDArray[Any]) -> NDArray[Any]:
    """Return objects or bytes as strings."""
    texts = [
        v.decode(errors="backslashreplace") if isinstance(v, bytes) else str(v) for v in values.flat
    ]
    return np.array(texts, dtype=object).reshape(values.shape)


def jsonable(attrs: Mapping[Any, Any]) -> dict[str, Any]:
    """Return attributes as JSON values, without those that make a reader decode again."""
    skip = {"_FillValue", "missing_value", "scale_factor", "add_offset", "_Unsigned", "dtype"}
    skip |= {"bounds", "climatology", "coordinates", "grid_mapping", RECIPE_ATTR}
    text = json.dumps({str(k): v for k, v in attrs.items() if k not in skip}, default=as_json)
    # JSON has no NaN and no infinity
    values: dict[str, Any] = json.loads(text, parse_constant=lambda name: str(float(name)))
    return values


def without_epoch(attrs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Drop units such as "days since 2000-01-01", which make a reader decode numbers as dates."""
    dated = "since" in str(attrs.get("units"))
    return {k: v for k, v in attrs.items() if not (dated and k in ("units", "calendar"))}


def as_json(value: Any) -> Any:
    """Return a value that JSON lacks as one that it has; the default of `json.dumps`."""
    if isinstance(value, np.ndarray | np.generic):
        return (value.astype(str) if value.dtype.kind in "mM" else value).tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)  # the order of a set differs between runs
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)
