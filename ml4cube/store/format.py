"""Layout and metadata of the sample store; no other module knows them.

A store is a zarr v3 group that ``xr.open_zarr`` reads. Every array has the samples as first dim
and is cut into shards along it, with the same samples in shard *k* of every array, so that one
writer writes shard *k* of all arrays. Because zarr reads a missing or empty shard as fill values,
a manifest (the attributes of the subgroup ``manifest``) lists every file with its size and hash.
It is written last, and a store without a matching manifest is refused.

Layout of ``train.zarr``, for a variable ``sst`` of windows over lat and lon::

    zarr.json                 attributes (see `metadata`), metadata of all arrays
    sst/zarr.json             dims (samples, lat, lon); sharding: chunks of whole samples,
    sst/c/0/0/0               blosc-lz4, shuffled by byte (by default); a crc32c on each
    sst/c/1/0/0
    time/c/0, time_index/c/0  origin of each sample along each dim of the cube, as value
    lat_origin/...            and as index; <dim>_origin where the window keeps that dim
    axes/lat/..., axes/time/...   the cube's coordinate along each dim, all cells; see `open_axes`
    manifest/zarr.json        size and sha256 of every other file
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import StoreError
from ml4cube.cube.variables import DATE_UNITS
from ml4cube.ledger.draft import StoreKind
from ml4cube.ledger.folders import FILES_AT_ONCE, MARKER, Files, Folder, group_json, json_bytes
from ml4cube.ledger.locations import Location, folder_of, location_of
from ml4cube.ledger.manifest import (
    fault_of,
    find_faults,
    find_foreign,
    is_metadata,
    read_manifest,
    write_manifest,
)
from ml4cube.store.shard_encoding import Compressor, encode_shard

if TYPE_CHECKING:
    import xarray as xr

FORMAT = 2
SAMPLES = StoreKind("the sampler", find_foreign)
#: Subgroup of the cube's coordinates.
AXES = "axes"
_NO_DATE = np.iinfo(np.int64).min  # NaT as int64


@dataclass(frozen=True)
class ArrayLayout:
    """Layout of one array of a store, apart from the number of samples."""

    name: str
    # The sample dim first.
    dims: tuple[str, ...]
    # Cells along the other dims.
    window: tuple[int, ...]
    # As `numpy.dtype` reads it, that of objects for strings; dates are stored as int64.
    dtype: str
    # Divides the layout's `samples_per_shard`.
    samples_per_chunk: int
    attrs: Mapping[str, Any] = field(default_factory=dict)
    is_coordinate: bool = False

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """Dtype on disk, little-endian."""
        dtype = np.dtype(self.dtype)
        if dtype.kind == "M":
            return np.dtype("<i8")
        return dtype.newbyteorder("<")

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample before compression."""
        return math.prod(self.window) * self.stored_dtype.itemsize


@dataclass(frozen=True)
class StoreLayout:
    """All arrays of a store and how they are cut into shards."""

    samples: int
    samples_per_shard: int
    arrays: tuple[ArrayLayout, ...]
    compressor: Compressor

    @property
    def shard_count(self) -> int:
        """Shards of each array."""
        return math.ceil(self.samples / self.samples_per_shard)

    def bounds(self, shard: int) -> tuple[int, int]:
        """Return the first sample of a shard, and one past the last."""
        first = shard * self.samples_per_shard
        return first, min(first + self.samples_per_shard, self.samples)


def write_array_metadata(folder: Folder, layout: StoreLayout) -> Files:
    """Write the ``zarr.json`` of every array."""
    files: Files = {}
    for array in layout.arrays:
        path = f"{array.name}/zarr.json"
        files[path] = folder.write(path, json_bytes(_array_metadata(layout, array)))
    return files


def write_axes(
    folder: Folder,
    compressor: Compressor,
    axes: Mapping[str, tuple[NDArray[Any], Mapping[str, Any]]],
) -> Files:
    """Write the whole coordinates of the cube that samples come from: values and attributes."""
    path = f"{AXES}/zarr.json"
    files: Files = {path: folder.write(path, group_json({}))}
    for dim, (values, attrs) in axes.items():
        array = ArrayLayout(f"{AXES}/{dim}", (dim,), (), values.dtype.str, len(values), attrs)
        layout = StoreLayout(len(values), len(values), (array,), compressor)
        files |= write_array_metadata(folder, layout)
        files |= write_shard(folder, layout, 0, {array.name: values})
    return files


def open_axes(source: Any) -> xr.Dataset:
    """Open the coordinates of the cube that a store's samples come from.

    Parameters
    ----------
    source : str, path, zarr store or group, or Icechunk session
        The store.

    Returns
    -------
    Dataset
        One coordinate for each dim, with dates decoded, or positions where the cube had none; empty
        for stores of older versions.

    Raises
    ------
    StoreError
        If `source` is not a sample store, or its manifest cannot be read.
    InvalidTypeError
        If `source` has another type.

    Examples
    --------
    >>> import tempfile
    >>> import xarray as xr
    >>> from ml4cube import MultiProcSampler
    >>> lat = [50.0, 51.0, 52.0, 53.0]
    >>> cube = xr.Dataset({"t2m": (("time", "lat"), np.ones((20, 4)))}, {"lat": lat})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     train, test = f"{folder}/train.zarr", f"{folder}/test.zarr"
    ...     summary = MultiProcSampler(cube, train_cube=train, test_cube=test, nproc=1).run()
    ...     print(open_axes(train)["lat"].values)
    [50. 51. 52. 53.]
    """
    import xarray as xr

    location = location_of("store", source)
    files = read_manifest(location)
    metadata_paths = [p for p in files if p.startswith(f"{AXES}/") and is_metadata(p)]
    if not metadata_paths:
        return xr.Dataset()
    for path in metadata_paths:
        read_metadata(location, files, path)
    return _open_zarr(location, AXES)


def write_shard(
    folder: Folder, layout: StoreLayout, shard: int, values: Mapping[str, NDArray[Any]]
) -> Files:
    """Write one shard of every array; a repeated call writes the same bytes."""
    first, last = layout.bounds(shard)
    written: dict[str, Future[tuple[int, str]]] = {}  # size and hash by path
    # encode one file while others are written
    with ThreadPoolExecutor(FILES_AT_ONCE, "ml4cube-write") as threads:
        for array in layout.arrays:
            samples = values[array.name]
            assert samples.shape == (last - first, *array.window), (array.name, samples.shape)
            # shards are cut along the samples only
            path = "/".join([array.name, "c", str(shard), *("0" for _ in array.window)])
            pieces = encode_shard(
                samples,
                layout.compressor,
                stored_dtype=array.stored_dtype,
                fill=_fill(array),
                samples_per_chunk=array.samples_per_chunk,
                samples_per_shard=layout.samples_per_shard,
            )
            written[path] = threads.submit(folder.write, path, *pieces)
    return {path: future.result() for path, future in written.items()}


def write_metadata(
    folder: Folder, layout: StoreLayout, attrs: Mapping[str, Any], files: Files
) -> None:
    """Write the metadata of arrays and group; last of all the manifest, with the given files."""
    listed = files | write_array_metadata(folder, layout)
    # CF separates these names by spaces, so names with spaces are left out; see `open_store`
    coordinates = [a.name for a in layout.arrays if a.is_coordinate and len(a.name.split()) == 1]
    arrays = {a.name: json.loads(folder.read(f"{a.name}/zarr.json")) for a in layout.arrays}
    group = group_json(
        {"ml4cube_format": FORMAT, **attrs, "coordinates": " ".join(coordinates)},
        consolidated_metadata={"kind": "inline", "must_understand": False, "metadata": arrays},
    )
    listed = dict(sorted(listed.items()))
    listed["zarr.json"] = folder.write("zarr.json", group)
    folder.make_durable()
    write_manifest(folder, listed)
    folder.make_durable()


def _array_metadata(layout: StoreLayout, array: ArrayLayout) -> dict[str, Any]:
    """Return the array's ``zarr.json``, as zarr itself makes it."""
    import zarr
    from zarr.storage import MemoryStore

    is_text = array.stored_dtype.kind == "O"
    is_sharded = array.samples_per_chunk != layout.samples_per_shard
    made = zarr.create_array(
        MemoryStore(),
        shape=(layout.samples, *array.window),
        chunks=(array.samples_per_chunk, *array.window),
        shards=(layout.samples_per_shard, *array.window) if is_sharded else None,
        dtype=str if is_text else array.stored_dtype,
        fill_value=_fill(array),
        compressors=layout.compressor.codecs(1 if is_text else array.stored_dtype.itemsize),
        dimension_names=array.dims,
        attributes=_stored_attrs(array, layout.samples),
        zarr_format=3,
    )
    metadata: dict[str, Any] = made.metadata.to_dict()
    return metadata


def _fill(array: ArrayLayout) -> Any:
    if np.dtype(array.dtype).kind == "M":
        return _NO_DATE
    fills = {"f": np.nan, "O": ""}
    return fills.get(array.stored_dtype.kind, array.stored_dtype.type(0))


def _stored_attrs(array: ArrayLayout, samples: int) -> dict[str, Any]:
    """Return attributes on disk: dates have their CF encoding."""
    if samples == 0 and "calendar" in array.attrs:
        # xarray cannot decode an empty array of dates in a non-standard calendar
        return {k: v for k, v in array.attrs.items() if k not in ("units", "calendar")}
    if samples == 0 or np.dtype(array.dtype).kind != "M":
        return dict(array.attrs)
    unit, _ = np.datetime_data(np.dtype(array.dtype))
    return {
        **array.attrs,
        "units": f"{DATE_UNITS[unit]} since 1970-01-01",
        "calendar": "proleptic_gregorian",
        "_FillValue": _NO_DATE,
    }


def read_metadata(location: Location, files: Files, path: str) -> dict[str, Any]:
    """Return the content of a ``zarr.json`` of a store, after checking its hash."""
    try:
        content = folder_of(location).read(path)
    except (FileNotFoundError, NotADirectoryError):
        raise _damaged(location, [f"{path} is missing"]) from None
    if fault := fault_of(path, files[path], len(content), content):
        raise _damaged(location, [fault])
    metadata: dict[str, Any] = json.loads(content)
    return metadata


def read_attributes(source: Any) -> Mapping[str, Any]:
    """Return the attributes of a store, opened or not; on disk, their hash is checked."""
    import xarray as xr

    if isinstance(source, xr.Dataset):
        return {str(name): value for name, value in source.attrs.items()}
    location = location_of("store", source)
    group = read_metadata(location, read_manifest(location), MARKER)
    attributes: dict[str, Any] = group["attributes"]
    return attributes


def _damaged(location: Location, faults: Sequence[str]) -> StoreError:
    more = ""
    if len(faults) > 3:
        more = f" and {len(faults) - 3} more"
    return StoreError(
        f"the store {location} is damaged: {'; '.join(faults[:3])}{more}; make it again"
    )


def verify_store(location: Location, *, hashes: bool = True) -> None:
    """Check that every file of a store exists and is unchanged.

    Parameters
    ----------
    location : str, path or Folder
        Location of the store.
    hashes : bool
        Read and hash every file. Otherwise only files of metadata are hashed, in which no checksum
        of a chunk would show a flipped bit; of the others the size is checked.

    Raises
    ------
    StoreError
        If a file is missing or has changed; the message names up to three of them.
    """
    files = read_manifest(location)
    try:
        faults = find_faults(location, files, hashes=hashes)
    except OSError as error:
        raise StoreError(f"{location} cannot be read: {error}") from error
    if faults:
        raise _damaged(location, list(faults.values()))


def open_store(source: Any, *, verify: bool = False) -> xr.Dataset:
    """Open a sample store as a lazy Dataset, after checking that it is complete.

    Parameters
    ----------
    source : str, path, zarr store or group, or Icechunk session
        A store written by `MultiProcSampler`.
    verify : bool
        Read and hash every file. By default, every file must exist with its size, and files of
        metadata are hashed; flipped bits of a chunk are detected when it is read.

    Returns
    -------
    Dataset
        Dims ``samples`` and the window's dims; the origin of each sample as coordinates; the
        store's metadata in `attrs` (see `StoreMetadata`).

    Raises
    ------
    StoreError
        If `source` is not a sample store, or a file is missing or damaged.
    InvalidTypeError
        If `source` has another type.

    Examples
    --------
    >>> import tempfile
    >>> import xarray as xr
    >>> from ml4cube import MultiProcSampler
    >>> cube = xr.Dataset({"t2m": (("time", "lat"), np.ones((20, 4)))})
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     train, test = f"{folder}/train.zarr", f"{folder}/test.zarr"
    ...     sampler = MultiProcSampler(
    ...         cube,
    ...         train_cube=train,
    ...         test_cube=test,
    ...         sample_size={"lat": 2},
    ...         block_size={"time": 4},
    ...         nproc=1,
    ...     )
    ...     summary = sampler.run()
    ...     print(dict(open_store(train, verify=True).sizes))
    {'samples': 32, 'lat': 2}
    """
    location = location_of("store", source)
    verify_store(location, hashes=verify)
    ds = _open_zarr(location)
    check_format(str(location), ds.attrs)
    variables = list(ds.attrs["variables"])
    return ds.set_coords([name for name in ds.data_vars if name not in variables])[variables]


def check_format(store: str, attrs: Mapping[str, Any]) -> None:
    if (written := attrs.get("ml4cube_format")) != FORMAT:
        raise StoreError(
            f"{store} has store format {written!r}, this version reads {FORMAT}; make it again"
        )


def _open_zarr(location: str | Folder, group: str | None = None) -> xr.Dataset:
    """Open a store, or a group inside it; ``encoding["source"]`` is its location."""
    import xarray as xr
    from zarr.storage import LocalStore

    from ml4cube.cube.chunks.bounded import bounded_decoding

    source: Any
    if isinstance(location, Folder):
        source, _, path = location.zarr_store()
        group = "/".join(filter(None, [path, group])) or None
        consolidated = False  # not every zarr store supports it
    else:
        is_path = "://" not in location
        source = location
        if is_path and set(location) & set("?#;"):
            # zarr from 3.4 on takes these for parts of a URL
            source = LocalStore(location, read_only=True)
        consolidated = group is None
    ds: xr.Dataset
    with bounded_decoding():
        ds = xr.open_zarr(source, group=group, consolidated=consolidated, decode_timedelta=False)
    ds.encoding["source"] = location
    return ds
