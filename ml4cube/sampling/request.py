"""What is to be sampled: a cube and a user's wishes, all that is known before a cell is read."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.core.grid import Grid, SizesLike, parse_sizes
from ml4cube.core.missing import FILL_FEATURES, FILLED_ATTR, check_mask, warn_of_filled
from ml4cube.core.partition import hash_ids
from ml4cube.core.sample_spec import SampleSpec
from ml4cube.core.scaling import Scaling
from ml4cube.core.split_plan import PARTS, check_fractions
from ml4cube.core.statistics import SCALE_FNS, Statistics
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.reader import ComputedSource, CubeReader
from ml4cube.cube.roles import RECIPE_ATTR
from ml4cube.cube.variables import cube_dims, cube_variables, split_label
from ml4cube.preprocessing.cubes import check_decoded
from ml4cube.preprocessing.scaling import given_statistics
from ml4cube.sampling.counting import Schema
from ml4cube.sampling.extractor import Axis, BlockChoice, Callback, Extractor, tiling
from ml4cube.sampling.rescaling import needed, scaling_of
from ml4cube.splits import assign_block_split
from ml4cube.splits.block_sizes import block_sizes
from ml4cube.splits.cube import CubeView
from ml4cube.splits.label import label_lookup, read_recipe
from ml4cube.store.format import AXES, MANIFEST

logger = logging.getLogger(__name__)

MIB = 2**20
# Samples of one shard, all arrays together: what a worker holds in memory at a time.
_SHARD_BYTES = (4 * MIB, 32 * MIB)
_SHARDS_WANTED = 64
#: Megabytes that one decoded chunk of the cube may have, unless asked otherwise.
MAX_CHUNK_MB = 2048.0
# A shard is mixed from that many tiles, so that neighbours in a store come from far apart.
_TILES_PER_SHARD = 16
# Samples of a tile are no more than that, unless chunks are larger: a tile that reaches over
# blocks of several parts is read for each of them.
_TILE_BYTES = MIB // 2
#: Bytes of a sample's origin along one dim: a value and an index.
ORIGIN_BYTES = 12
# Blocks that a cube without chunks is cut into where only some are used, about.
_BLOCKS_WANTED = 64
#: What the cells of a dim without a coordinate are called in a store: they have numbers, no places.
NUMBERED = "number of the cell, which has no coordinate"
# An id that no block has, hashed to a seed of its own for drawing blocks.
_DRAWING = [-1]


@dataclass(frozen=True)
class Sampling:
    """All that is known about samples before a cell is read."""

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
    # What scales the samples, if not the statistics of their own train part.
    given: Statistics | None = None

    @classmethod
    def of(
        cls,
        cube: Any,
        *,
        sample_size: SizesLike | None,
        overlap: SizesLike | float | None,
        array_dims: Any = None,
        to_pred: str | Iterable[str] | None = None,
        features: str | Iterable[str] | None = None,
        filter_var: str | None = "filter_mask",
        block_size: SizesLike | None = None,
        data_split: float = 0.8,
        val_split: float | None = None,
        wants_val: bool = False,
        seed: int = 42,
        data_fraq: float = 1.0,
        rand_chunk: bool = False,
        split_unlabelled: bool = True,
        callback: Callback | None = None,
        max_chunk_mb: float = MAX_CHUNK_MB,
        statistics: Any = None,
        **policy: Any,
    ) -> Sampling:
        """Check a user's wishes against a cube, and split the cube if it has no label."""
        if callback is not None and not callable(callback):
            raise InvalidTypeError(
                f"callback={callback!r} cannot be called; give a function of a dict of arrays"
            )
        check_fractions(data_split, val_split or 0.0, ("data_split", "val_split"))
        check_choice("scale_fn", policy.get("scale_fn"), SCALE_FNS)
        given = None
        if statistics is not None:
            given, policy["scale_fn"] = given_statistics(
                statistics, policy.get("scale_fn", SCALE_FNS[0])
            )
        ds = as_dataset(cube)
        mask = _mask_name(ds, filter_var, policy)
        shape = _shape(ds, filter_var)
        label = split_label(ds)
        labelled = label is not None
        # what is named as the mask is no data, whether it is applied or not
        names, left_out = cube_variables(ds, filter_var)
        filter_var = mask
        for name in names:
            check_decoded(name, ds[name])
            _check_chunk(name, ds[name].variable, max_chunk_mb)
        if left_out:
            logger.info("left out: %s", "; ".join(f"{n!r} {why}" for n, why in left_out.items()))
        if not names:
            raise InvalidValueError(f"the cube has no data variable to sample, only {list(ds)}")
        _check_policy(policy)
        _check_fillable(policy.get("fill_method"), {name: ds[name].dtype for name in names})
        spec = SampleSpec.parse(
            shape,
            names,
            sample_size=sample_size,
            overlap=overlap,
            array_dims=array_dims,
            to_pred=to_pred,
            features=features,
            filter_var=filter_var,
            **policy,
        )
        if callback is None:
            check_targets(spec, names)
        attrs = {name: ds[name].attrs for name in names if name in spec.targets}
        filled = {name: own[FILLED_ATTR] for name, own in attrs.items() if FILLED_ATTR in own}
        warn_of_filled("to_pred", filled, FILL_FEATURES)
        blocks = Grid.blocks(shape, _used_blocks(ds, spec, block_size))
        choice = _choice(blocks, data_fraq, rand_chunk, seed)
        if label is None and not split_unlabelled:
            label = "split"
            ds = ds.assign({label: ((), np.uint8(PARTS["train"]))})
        elif label is None:
            if val_split is None:
                val_split = (1 - data_split) / 2 if wants_val else 0.0
            fractions = check_fractions(data_split, val_split, ("data_split", "val_split"))
            view = CubeView.of(ds)
            sizes = block_sizes(block_size, view, fractions.values(), spec.windows, data_fraq)
            ds = assign_block_split(ds, sizes, data_split, val=val_split, seed=seed)
            label = "split"
        elif val_split:
            raise InvalidValueError(
                f"val_split={val_split!r} is of use for a cube without a label, this one has "
                f"{label!r}; drop val_split or the label"
            )
        elif not set(ds[label].dims) <= set(shape):
            raise InvalidValueError(
                f"the split label {label!r} has dims {ds[label].dims}, the cube {tuple(shape)}"
            )
        read = [*names, label, *([filter_var] if filter_var else [])]
        tiles = tiling(spec, _chunks(ds, read), *tile_bytes(spec, ds))
        extractor = Extractor(
            spec=spec,
            tiles=tiles,
            axes=tuple(_axis(ds, dim, spec) for dim in spec.dims),
            label=label,
            choice=choice,
            callback=callback,
            seed=seed,
        )
        sampling = cls(
            ds,
            _reader(ds, read, label),
            extractor,
            _recipe(ds[label]),
            left_out,
            blocks,
            labelled,
            given,
        )
        if given is not None:
            # refused before any work; what a callback makes of them is known later
            floats = [name for name in names if ds[name].dtype.kind == "f"]
            known = [n for n in floats if n in given] if callback is not None else floats
            sampling.scaling(needed(given, known))
        return sampling

    @property
    def spec(self) -> SampleSpec:
        """How samples are cut."""
        return self.extractor.spec

    def has_part(self, part: str, *, read: bool) -> bool:
        """Tell whether any cell has the label of a part."""
        name, code = self.extractor.label, PARTS[part]
        label = self.ds[name]
        if label_lookup(self.ds, name) is not None:
            plan, *_ = read_recipe(self.recipe)
            return part in dict(plan.fractions) or code in getattr(plan, "labels", b"")
        if label.variable._in_memory:
            return bool((label.values == code).any())
        reader = self.reader.only([name])
        return not read or any((reader.read(b.slices)[name] == code).any() for b in self.blocks)

    def scaling(self, statistics: Statistics, schema: Schema | None = None) -> dict[str, Scaling]:
        """Say how every variable is scaled, in every cell of the cube."""
        spec = self.spec
        found = scaling_of(statistics, spec.scale_fn, self.ds, spec.dims)
        size = dict(zip(spec.dims, spec.size, strict=True))
        for name, scaling in found.items():
            window = spec.window_shape if schema is None else schema[name][0]
            long = [dim for dim in scaling.dims if size[dim] > 1]
            if long and window != spec.window_shape:
                raise InvalidValueError(
                    f"the callback makes windows {window} of {name!r}, so its cells cannot be "
                    f"matched with statistics along {long}; give statistics without these dims"
                )
        return found

    def tile_tasks(self, ids: Iterable[int]) -> Iterator[tuple[int, CubeReader]]:
        """Prepare tiles for a worker."""
        common = self.reader.common()
        if type(self.reader) is type(common) and len(common.sources) == len(self.reader.sources):
            # every tile is read from the same files
            yield from ((int(id), common.only(())) for id in ids)
            return
        for id in ids:
            cells = self.extractor.cells_of(self.extractor.tiles.block(int(id)))
            yield int(id), self.reader.own(cells)


def _reader(ds: xr.Dataset, names: Iterable[str], label: str) -> CubeReader:
    """A reader that looks labels up in the split's plan where that is possible."""
    reader = CubeReader.of(ds, names)
    lookup = label_lookup(ds, label)
    if lookup is None:
        return reader
    dims = tuple(str(dim) for dim in ds[label].dims)
    computed = ComputedSource(dims, lookup, np.dtype(np.uint8))
    return replace(reader, sources={**reader.sources, label: computed})


def _shape(ds: xr.Dataset, filter_var: str | None) -> dict[str, int]:
    if odd := [dim for dim in ds.dims if not isinstance(dim, str)]:
        raise InvalidTypeError(f"dims are named by strings, found {odd}; use ds.rename")
    shape = {dim: ds.sizes[dim] for dim in cube_dims(ds, filter_var)}
    if empty := [dim for dim, n in shape.items() if n == 0]:
        raise InvalidValueError(f"the cube has no cells along {empty}")
    return shape


def _mask_name(ds: xr.Dataset, filter_var: str | None, policy: Mapping[str, Any]) -> str | None:
    """The mask to read, if there is one; a name that is not the default's must exist."""
    if filter_var is not None and not isinstance(filter_var, str):
        raise InvalidTypeError(f"filter_var={filter_var!r} is no variable name")
    known = filter_var is not None and filter_var in ds.variables
    if not known and filter_var not in (None, "filter_mask"):
        raise InvalidValueError(
            f"filter_var={filter_var!r} is no variable of the cube, it has {list(ds.variables)}"
        )
    if not known and policy.get("drop_nan") == "masked":
        raise InvalidValueError(
            "drop_nan='masked' needs a mask, the cube has no variable "
            f"{filter_var!r}; name one by filter_var, or make one with assign_mask"
        )
    if not known or not (policy.get("apply_mask", True) or policy.get("drop_nan") == "masked"):
        return None
    check_mask(f"filter_var={filter_var!r}", ds[filter_var].dtype)
    return filter_var


def _check_policy(policy: Mapping[str, Any]) -> None:
    for name in ("apply_mask", "drop_sample"):
        if not isinstance(policy.get(name, True), bool):
            raise InvalidTypeError(f"{name} must be True or False, got {policy[name]!r}")


def _check_fillable(fill_method: Any, dtypes: Mapping[str, np.dtype[Any]]) -> None:
    """Refuse to fill by name what cannot be; integers have no gaps."""
    for name, method in fill_method.items() if isinstance(fill_method, Mapping) else ():
        if method is not None and name in dtypes and dtypes[name].kind not in "fiub":
            raise InvalidTypeError(
                f"fill_method: variable {name!r} is of dtype {dtypes[name]}, only numbers can be "
                "filled; leave it out"
            )


def check_targets(spec: SampleSpec, stored: Iterable[str]) -> None:
    """Refuse targets and features that no sample will hold."""
    known = list(stored)
    for argument, names in (("to_pred", spec.targets), ("features", spec.features or ())):
        if unknown := [name for name in names if name not in known]:
            raise InvalidValueError(
                f"{argument} names {unknown}, the samples hold {known}; choose among these"
            )


def check_stored_names(spec: SampleSpec, stored: Iterable[str]) -> None:
    """Refuse names of variables and dims that a sample store needs itself, or cannot hold."""
    files = (MANIFEST.partition("/")[0], AXES, "zarr.json")
    origins = {_origin_name(dim, spec) for dim in spec.dims} | {f"{d}_index" for d in spec.dims}
    taken = {
        **dict.fromkeys(sorted(origins), "the coordinate of that name"),
        **dict.fromkeys(spec.array_dims, "the dim of that name"),
        **dict.fromkeys(files, "a file of that name"),
    }
    for name in spec.dims:
        if _is_odd(name) or name in files:
            raise InvalidValueError(f"dim {name!r} cannot be a folder of the store; rename it")
    for name in stored:
        odd = _is_odd(name)
        if name in taken or odd:
            why = "cannot be a folder's name" if odd else f"clashes with {taken[name]} in the store"
            raise InvalidValueError(
                f"variable {name!r} of the samples {why}; rename it (ds.rename, or in the callback)"
            )


def _is_odd(name: str) -> bool:
    """Whether something of that name would lie elsewhere than in a folder of its own."""
    # NUL ends a path, and a newline a line of any list of files
    odd = "/" in name or any(letter < " " for letter in name)
    return not name or odd or name in (".", "..") or name.startswith("__")


def _origin_name(dim: str, spec: SampleSpec) -> str:
    return f"{dim}_origin" if dim in spec.array_dims or dim in spec.variables else dim


def _source_chunks(variable: xr.Variable) -> dict[str, int]:
    """Largest chunk along each dim, of dask or of the file; nothing for arrays in memory."""
    if variable.chunks is not None:
        return {str(d): max(sizes) for d, sizes in variable.chunksizes.items()}
    if variable._in_memory:
        return {}
    return {str(d): int(n) for d, n in variable.encoding.get("preferred_chunks", {}).items()}


def _check_chunk(name: str, variable: xr.Variable, limit_mb: float) -> None:
    """Refuse chunks that would not fit a worker, by what the metadata declares."""
    if isinstance(limit_mb, bool) or not isinstance(limit_mb, int | float | np.number):
        raise InvalidTypeError(f"max_chunk_mb={limit_mb!r} is no number of megabytes")
    if not limit_mb > 0:
        raise InvalidValueError(f"max_chunk_mb={limit_mb!r} is not above 0")
    on_file = {} if variable._in_memory else variable.encoding.get("preferred_chunks") or {}
    for chunks in (_source_chunks(variable), on_file):
        cells = math.prod(chunks.get(str(d), n) for d, n in variable.sizes.items()) if chunks else 0
        found = cells * variable.dtype.itemsize / 1e6
        if found > limit_mb:
            raise InvalidValueError(
                f"variable {name!r} lies in chunks of {dict(chunks)}, {found:,.0f} MB once "
                f"decoded, and a worker holds a chunk whole; max_chunk_mb={limit_mb:g} allows "
                "less. Rechunk the cube, or give a higher max_chunk_mb"
            )


def _chunks(ds: xr.Dataset, names: Iterable[str]) -> dict[str, int]:
    chunks: dict[str, int] = {}
    for name in names:
        for dim, n in _source_chunks(ds[name].variable).items():
            chunks[dim] = max(n, chunks.get(dim, 1))
    return chunks


def _used_blocks(ds: xr.Dataset, spec: SampleSpec, block_size: SizesLike | None) -> dict[str, int]:
    """Blocks of which some are used: as asked for, else the chunks, else a few dozen of windows."""
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
    """Bytes of a sample, and of the samples that a tile should give."""
    one = sample_bytes(spec, {n: ds[n].dtype for n in spec.variables})
    return one, min(shard_bytes(len(spec.windows) * one) // _TILES_PER_SHARD, _TILE_BYTES)


def sample_bytes(spec: SampleSpec, dtypes: Mapping[str, np.dtype[Any]]) -> int:
    """Bytes of one stored sample, its coordinates included, before compression."""
    return math.prod(spec.size) * sum(d.itemsize for d in dtypes.values()) + ORIGIN_BYTES * len(
        spec.dims
    )


def shard_bytes(total: int) -> int:
    """Choose the bytes of a shard, all arrays together."""
    low, high = _SHARD_BYTES
    return min(max(total // _SHARDS_WANTED, low), high)


def _choice(blocks: Grid, fraction: float, at_random: bool, seed: int) -> BlockChoice | None:
    """The blocks to use: the first ones in the cube's order, or drawn at random."""
    advice = "give a fraction of the blocks, e.g. 0.5"
    if isinstance(fraction, bool) or not isinstance(fraction, int | float | np.number):
        raise InvalidTypeError(f"data_fraq={fraction!r} is a {type(fraction).__name__}; {advice}")
    if not 0 < fraction <= 1:
        raise InvalidValueError(f"data_fraq={fraction!r} is not above 0 and at most 1; {advice}")
    n = len(blocks)
    wanted = max(1, round(fraction * n))
    if wanted == n:
        return None
    used = np.zeros(n, bool)
    used[block_order(blocks, at_random, seed)[:wanted]] = True
    return BlockChoice(blocks, used.reshape(blocks.counts))


def block_order(blocks: Grid, at_random: bool, seed: int) -> NDArray[np.intp]:
    """Order in which blocks are used."""
    if not at_random:
        return np.arange(len(blocks))
    # with the seed itself, blocks would come in the order that the split has cut into parts
    drawing = int(hash_ids(seed, _DRAWING)[0])
    return np.argsort(hash_ids(drawing, _canonical_ids(blocks)), kind="stable")


def _canonical_ids(grid: Grid) -> NDArray[np.int64]:
    """Id of each tile in the grid of sorted dims, in the order of this grid."""
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
    """The coordinate along a dim, dates as numbers; positions where the cube has none."""
    name = _origin_name(dim, spec)
    if dim not in ds.coords:
        return Axis(name, np.arange(ds.sizes[dim]), {"long_name": NUMBERED})
    # without the encoding of the file it came from, which may pack values or round dates
    coordinate = in_numpy_dtype(ds[dim].variable.to_base_variable()).drop_encoding()
    coordinate.attrs = without_epoch(coordinate.attrs)
    try:
        encoded = xr.conventions.encode_cf_variable(coordinate)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(
            f"the coordinate {dim!r} (dtype {coordinate.dtype}) cannot be stored: {error}; assign "
            "it anew, as numbers, texts or datetime64 (ds.assign_coords)"
        ) from error
    values = np.asarray(encoded.values)
    if values.dtype.kind not in "fiub":
        values = as_texts(values)
    elif values.dtype.itemsize > 8:  # long doubles, which differ between machines
        values = values.astype(np.float64)
    return Axis(name, values, jsonable(encoded.attrs))


def in_numpy_dtype(coordinate: xr.Variable) -> xr.Variable:
    """Turn a coordinate in a dtype of pandas into one of numpy."""
    if isinstance(coordinate.dtype, np.dtype):
        return coordinate
    index = coordinate.to_index()
    plain = index.tz_convert(None) if isinstance(index, pd.DatetimeIndex) else index
    return xr.Variable(coordinate.dims, np.asarray(plain), coordinate.attrs)


def as_texts(values: NDArray[Any]) -> NDArray[Any]:
    """Turn objects or bytes into texts."""
    texts = [
        v.decode(errors="backslashreplace") if isinstance(v, bytes) else str(v) for v in values.flat
    ]
    return np.array(texts, dtype=object).reshape(values.shape)


def jsonable(attrs: Mapping[Any, Any]) -> dict[str, Any]:
    """Turn attributes into JSON values, leaving out what would make a reader decode again."""
    skip = {"_FillValue", "missing_value", "scale_factor", "add_offset", "_Unsigned", "dtype"}
    skip |= {"bounds", "climatology", "coordinates", "grid_mapping", RECIPE_ATTR}
    return {str(k): _plain(v) for k, v in attrs.items() if k not in skip}


def without_epoch(attrs: Mapping[Any, Any]) -> dict[Any, Any]:
    """Leave out units such as "days since 2000-01-01", by which a reader makes dates of numbers."""
    dated = "since" in str(attrs.get("units"))
    return {k: v for k, v in attrs.items() if not (dated and k in ("units", "calendar"))}


def as_json(value: Any) -> Any:
    """Take one step from a value that JSON does not have to one that it has."""
    if isinstance(value, np.ndarray | np.generic):
        return (value.astype(str) if value.dtype.kind in "mM" else value).tolist()
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)  # the order of a set differs between runs
    return value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)


def _plain(value: Any) -> Any:
    if not isinstance(value, Mapping | list | tuple | str | int | float | None):
        value = as_json(value)
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
