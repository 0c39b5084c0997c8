"""Layout and metadata of the sample store; no other module knows them.

A store is a zarr v3 group that ``xr.open_zarr`` reads. Every array has the samples as first dim
and is cut into shards along it, with the same samples in shard *k* of every array, so that one
writer writes shard *k* of all arrays. Because zarr reads a missing or empty shard as fill values,
a manifest (the attributes of the subgroup ``manifest``) lists every file with its size and hash.
It is written last, and a store without a matching manifest is refused.

Layout of ``train.zarr``, for a variable ``sst`` of windows over lat and lon::

    zarr.json                 attributes (see StoreMetadata), metadata of all arrays
    sst/zarr.json             dims (samples, lat, lon); sharding: chunks of whole samples,
    sst/c/0/0/0               blosc-lz4, sorted by byte, unless asked; a crc32c on each
    sst/c/1/0/0
    time/c/0, time_index/c/0  origin of each sample along each dim of the cube, as value
    lat_origin/...            and as index; <dim>_origin where the window keeps that dim
    axes/lat/..., axes/time/...   the cube's coordinate along each dim, all cells; see `open_axes`
    manifest/zarr.json        size and sha256 of every other file
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import StoreError
from ml4cube.core.missing import FILLED_ATTR
from ml4cube.core.sample_spec import SampleSpec
from ml4cube.core.scaling import Entries, decode_entries, encode_entries
from ml4cube.core.statistics import Statistics
from ml4cube.cube.variables import DATE_UNITS
from ml4cube.store.folders import FILES_AT_ONCE, HASH, Files, Folder, digest
from ml4cube.store.locations import Location, ZarrFolder, folder_of, location_of
from ml4cube.store.shard_encoding import Compressor, encode_shard

if TYPE_CHECKING:
    import xarray as xr

FORMAT = 1
#: File that is written last.
MANIFEST = "manifest/zarr.json"
#: Subgroup of the cube's coordinates.
AXES = "axes"
_FILL = "fill_statistics"
_PLACES = "scaling_places"
_NO_DATE = np.iinfo(np.int64).min


class NoStoreError(StoreError):
    """There is no sample store at a location, not even a damaged one."""


@dataclass(frozen=True)
class ArrayLayout:
    """Layout of one array of a store, apart from the number of samples."""

    # Name of the variable or coordinate.
    name: str
    # Names of the dims, the sample dim first.
    dims: tuple[str, ...]
    # Cells along the dims after the first.
    window: tuple[int, ...]
    # Dtype as `numpy.dtype` reads it; dates are stored as int64, strings as ``"O"``.
    dtype: str
    # Samples of one chunk; a divisor of the layout's `shard`.
    chunk: int
    attrs: Mapping[str, Any] = field(default_factory=dict)
    # Whether it is a coordinate of the samples.
    coordinate: bool = False

    @property
    def stored_dtype(self) -> np.dtype[Any]:
        """Dtype on disk, little-endian."""
        kind = np.dtype(self.dtype)
        return np.dtype("<i8") if kind.kind == "M" else kind.newbyteorder("<")

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample before compression."""
        return int(np.prod(self.window, dtype=np.int64)) * self.stored_dtype.itemsize


@dataclass(frozen=True)
class StoreLayout:
    """All arrays of a store and how they are cut into shards."""

    samples: int
    shard: int
    arrays: tuple[ArrayLayout, ...]
    compressor: Compressor = Compressor()  # noqa: RUF009 (frozen)

    @property
    def shards(self) -> int:
        """Shards of each array."""
        return -(-self.samples // self.shard)

    def bounds(self, shard: int) -> tuple[int, int]:
        """Return the first sample of a shard, and one past the last."""
        return shard * self.shard, min((shard + 1) * self.shard, self.samples)


def create(root: Folder, layout: StoreLayout) -> Files:
    """Write the metadata of every array."""
    files: Files = {}
    for array in layout.arrays:
        text = json.dumps(_array_metadata(layout, array), indent=1)
        path = f"{array.name}/zarr.json"
        files[path] = root.write(path, text.encode())
    return files


def write_axes(
    root: Folder, compressor: Compressor, axes: Mapping[str, tuple[NDArray[Any], Mapping[str, Any]]]
) -> Files:
    """Write the whole coordinates of the cube that samples come from."""
    node = {"zarr_format": 3, "node_type": "group", "attributes": {}}
    files: Files = {f"{AXES}/zarr.json": root.write(f"{AXES}/zarr.json", _json(node))}
    for dim, (values, attrs) in axes.items():
        kind = "O" if values.dtype.kind == "O" else values.dtype.str
        array = ArrayLayout(f"{AXES}/{dim}", (dim,), (), kind, len(values), attrs)
        layout = StoreLayout(len(values), len(values), (array,), compressor)
        files |= create(root, layout) | write_shard(root, layout, 0, {array.name: values})
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
    names = [n for n in files if n.startswith(f"{AXES}/") and _is_metadata(n)]
    if not names:
        return xr.Dataset()
    for name in names:
        read_metadata(location, files, name)
    return _open_zarr(location, AXES)


def write_shard(
    root: Folder, layout: StoreLayout, shard: int, values: Mapping[str, NDArray[Any]]
) -> Files:
    """Write one shard of every array; a repeated call writes the same bytes."""
    first, last = layout.bounds(shard)
    written: dict[str, Future[tuple[int, str]]] = {}
    # encode one file while others are written
    with ThreadPoolExecutor(FILES_AT_ONCE, "ml4cube-write") as threads:
        for array in layout.arrays:
            samples = values[array.name]
            assert samples.shape == (last - first, *array.window), (array.name, samples.shape)
            path = "/".join([array.name, "c", str(shard), *("0" for _ in array.window)])
            pieces = encode_shard(
                samples,
                layout.compressor,
                dtype=array.stored_dtype,
                fill=_fill(array),
                chunk=array.chunk,
                shard=layout.shard,
            )
            written[path] = threads.submit(root.write, path, *pieces)
    return {path: future.result() for path, future in written.items()}


def finish(root: Folder, layout: StoreLayout, attrs: Mapping[str, Any], files: Files) -> None:
    """Write the group's metadata and, last of all, the manifest."""
    # CF separates these names by spaces, so names with spaces are left out; see `open_store`
    names = [a.name for a in layout.arrays if a.coordinate and len(a.name.split()) == 1]
    arrays = {a.name: json.loads(root.read(f"{a.name}/zarr.json")) for a in layout.arrays}
    group = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": {"ml4cube_format": FORMAT, **attrs, "coordinates": " ".join(names)},
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": arrays},
    }
    listed = dict(sorted(files.items()))
    listed["zarr.json"] = root.write("zarr.json", _json(group))
    root.settle()
    root.write(MANIFEST, _manifest(listed))
    root.settle()


def _manifest(files: Files) -> bytes:
    """Return the bytes of the manifest of these files."""
    manifest = {"algorithm": HASH, "digest": digest(_json(files)), "files": files}
    return _json({"zarr_format": 3, "node_type": "group", "attributes": manifest})


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, allow_nan=False).encode()


def _array_metadata(layout: StoreLayout, array: ArrayLayout) -> dict[str, Any]:
    """Return the array's ``zarr.json``, as zarr itself makes it."""
    import zarr
    from zarr.storage import MemoryStore

    text = array.stored_dtype.kind == "O"
    sharded = array.chunk != layout.shard
    made = zarr.create_array(
        MemoryStore(),
        shape=(layout.samples, *array.window),
        chunks=(array.chunk, *array.window),
        shards=(layout.shard, *array.window) if sharded else None,
        dtype=str if text else array.stored_dtype,
        fill_value="" if text else _fill(array),
        compressors=layout.compressor.codecs(1 if text else array.stored_dtype.itemsize),
        dimension_names=array.dims,
        attributes=_stored_attrs(array, layout.samples),
        zarr_format=3,
    )
    metadata: dict[str, Any] = json.loads(json.dumps(made.metadata.to_dict()))
    return metadata


def _fill(array: ArrayLayout) -> Any:
    if np.dtype(array.dtype).kind == "M":
        return _NO_DATE
    return np.nan if array.stored_dtype.kind == "f" else array.stored_dtype.type(0)


def _stored_attrs(array: ArrayLayout, samples: int) -> dict[str, Any]:
    """Return attributes on disk: dates have their CF encoding."""
    if samples == 0:
        # xarray cannot decode an empty array of dates in a non-standard calendar
        return {k: v for k, v in array.attrs.items() if k not in ("units", "calendar")}
    if np.dtype(array.dtype).kind != "M":
        return dict(array.attrs)
    unit = np.datetime_data(np.dtype(array.dtype))[0]
    return {
        **array.attrs,
        "units": f"{DATE_UNITS[unit]} since 1970-01-01",
        "calendar": "proleptic_gregorian",
        "_FillValue": _NO_DATE,
    }


def read_manifest(location: Location) -> Files:
    """Return the files that a store must have."""
    try:
        raw = folder_of(location).read(MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise NoStoreError(
            f"{location} is not a sample store, or not a complete one (it has no manifest); make "
            "it again with MultiProcSampler"
        ) from None
    except OSError as error:
        raise StoreError(f"{MANIFEST} of {location} cannot be read: {error}") from error
    try:
        listed = json.loads(raw)["attributes"]["files"]
        files = {str(name): (int(size), str(hash)) for name, (size, hash) in listed.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        files = {}
    # compared as bytes, which include its own hash and all other fields
    if raw != _manifest(files):
        raise StoreError(
            f"{MANIFEST} (the manifest) of {location} is damaged; make the store again"
        )
    return files


def _is_metadata(name: str) -> bool:
    return name.rpartition("/")[2] == "zarr.json"


def read_metadata(location: Location, files: Files, name: str) -> dict[str, Any]:
    """Return the content of a ``zarr.json`` of a store, after checking its hash."""
    raw: bytes | None = None
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        raw = folder_of(location).read(name)
    _refuse(location, [fault] if (fault := _fault(name, files[name], raw)) else [])
    assert raw is not None
    found: dict[str, Any] = json.loads(raw)
    return found


def _fault(name: str, written: tuple[int, str], found: bytes | int | None) -> str | None:
    """Describe how a file differs from the manifest, given its content or only its size."""
    size = found if isinstance(found, int) or found is None else len(found)
    if size is None:
        return f"{name} is missing"
    if size != written[0]:
        return f"{name} has {size} bytes instead of {written[0]}"
    if isinstance(found, bytes) and digest(found) != written[1]:
        return f"{name} has changed since it was written"
    return None


def _refuse(location: Location, faults: Sequence[str]) -> None:
    if faults:
        more = f" and {len(faults) - 3} more" if len(faults) > 3 else ""
        raise StoreError(
            f"the store {location} is damaged: {'; '.join(faults[:3])}{more}; make it again"
        )


def verify_store(location: Location, *, hashes: bool = True) -> None:
    """Check that every file of a store exists and is unchanged.

    Parameters
    ----------
    location : str, path or ZarrFolder
        Location of the store.
    hashes : bool
        Read and hash every file. Otherwise only files of metadata are hashed, in which no checksum
        of a chunk would show a flipped bit; of the others the size is checked.

    Raises
    ------
    StoreError
        If a file is missing or has changed; the message names up to three of them.
    """
    folder, files = folder_of(location), read_manifest(location)

    def fault(name: str) -> str | None:
        found: bytes | int | None = sizes.get(name)
        if found == files[name][0] and (hashes or _is_metadata(name)):
            found = folder.read(name)
        return _fault(name, files[name], found)

    try:
        sizes = folder.list()
        with ThreadPoolExecutor(FILES_AT_ONCE, "ml4cube-verify") as threads:
            faults = list(threads.map(fault, files))
    except OSError as error:
        raise StoreError(f"{location} cannot be read: {error}") from error
    _refuse(location, list(filter(None, faults)))


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
    if ds.attrs.get("ml4cube_format") != FORMAT:
        raise StoreError(
            f"{location} has store format {ds.attrs.get('ml4cube_format')!r}, this version reads "
            f"{FORMAT}; make it again"
        )
    variables = list(ds.attrs["variables"])
    return ds.set_coords([name for name in ds.data_vars if name not in variables])[variables]


def _open_zarr(location: str | ZarrFolder, group: str | None = None) -> xr.Dataset:
    """Open a store, or a group inside it; ``encoding["source"]`` is its location."""
    import xarray as xr
    from zarr.storage import LocalStore

    ds: xr.Dataset
    source: str | LocalStore
    if isinstance(location, ZarrFolder):
        # not every zarr store supports consolidated metadata
        inside = "/".join(filter(None, [location.path, group])) or None
        ds = xr.open_zarr(location.store, group=inside, consolidated=False, decode_timedelta=False)
        ds.encoding["source"] = location
    else:
        # absolute, so that a store opened twice is recognized
        location = location if "://" in location else os.path.abspath(location)
        whole, source = group is None, location
        if "://" not in location and set(location) & set("?#;"):
            # zarr from 3.4 on takes these for parts of a URL
            source = LocalStore(location, read_only=True)
        ds = xr.open_zarr(source, group=group, consolidated=whole, decode_timedelta=False)
        ds.encoding["source"] = location
    return ds


@dataclass(frozen=True)
class StoreMetadata:
    """Metadata of a sample store.

    Parameters
    ----------
    part : {"train", "test", "val"}
        Part of the cube.
    spec : SampleSpec
        How samples were cut, and how their gaps were treated.
    statistics : Statistics
        Statistics that scaled the samples: of the float variables of the train part before scaling,
        or those given to the sampler.
    accounting : dict of str to int
        ``total``, samples of each part, and dropped windows by reason; parts and reasons add up to
        the total.
    split : dict
        Recipe that rebuilds the split label.
    provenance : dict
        Source, attributes of the cube and its variables, settings, library versions.
    variables : tuple of str
        Stored variables, in order.
    fill : Statistics, optional
        Statistics of the raw train cells that fill gaps; None where none do, and for stores of
        older versions.
    filled : dict of str to str
        Variables with filled gaps, and the method.
    places : mapping of str to tuple
        For variables whose scaling varies: the entry of `statistics` for each cell of the cube.
    """

    part: str
    spec: SampleSpec
    statistics: Statistics
    accounting: Mapping[str, int]
    split: Mapping[str, Any]
    provenance: Mapping[str, Any]
    variables: tuple[str, ...]
    fill: Statistics | None = None
    filled: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, Entries] = field(default_factory=dict)

    @property
    def features(self) -> tuple[str, ...]:
        """Variables to predict from: as requested, or all stored ones that are not targets."""
        if self.spec.features is not None:
            return self.spec.features
        return tuple(name for name in self.variables if name not in self.spec.targets)

    @property
    def targets(self) -> tuple[str, ...]:
        """Variables to predict; empty if none was named."""
        return self.spec.targets

    def invented(self, names: Iterable[str]) -> dict[str, str]:
        """Return variables to predict whose gaps were filled without being named.

        Parameters
        ----------
        names : iterable of str
            Variables to predict, or weights.

        Returns
        -------
        dict of str to str
            How their gaps were filled, in the cube or by the sampler.
        """
        described = self.provenance.get("variables", {})
        found = {}
        for name in names:
            before = described.get(name, {}).get("attrs", {}).get(FILLED_ATTR)
            if before or (name in self.filled and name not in self.targets):
                found[name] = str(before or self.filled[name])
        return found

    @classmethod
    def of(cls, source: Any) -> StoreMetadata:
        """Read a store's metadata.

        Parameters
        ----------
        source : Dataset, str, path, zarr store or group, or Icechunk session
            The store, opened or not.

        Returns
        -------
        StoreMetadata
            The metadata.

        Raises
        ------
        StoreError
            If `source` has no metadata of a sample store.
        """
        import xarray as xr

        attrs: Mapping[str, Any]
        if isinstance(source, xr.Dataset):
            attrs = source.attrs
        else:
            location = location_of("store", source)
            attrs = read_metadata(location, read_manifest(location), "zarr.json")["attributes"]
        try:
            return cls(
                part=attrs["part"],
                spec=SampleSpec.from_json(json.dumps(attrs["spec"])),
                statistics=_statistics(attrs["statistics"]),
                accounting=dict(attrs["accounting"]),
                split=attrs["split"],
                provenance=attrs["provenance"],
                variables=tuple(attrs["variables"]),
                fill=_statistics(attrs[_FILL]) if _FILL in attrs else None,
                filled=dict(attrs.get("filled", {})),
                places={n: decode_entries(one) for n, one in attrs.get(_PLACES, {}).items()},
            )
        except (KeyError, TypeError) as error:
            raise StoreError(
                f"source is not a sample store of MultiProcSampler: its attributes lack {error}"
            ) from error

    def to_attrs(self) -> dict[str, Any]:
        """Return the store's attributes, as JSON values.

        Returns
        -------
        dict
            The attributes that `of` reads.
        """
        fill = {} if self.fill is None else {_FILL: json.loads(self.fill.to_json())}
        places = {name: encode_entries(one) for name, one in self.places.items()}
        return {
            "part": self.part,
            "variables": list(self.variables),
            "spec": json.loads(self.spec.to_json()),
            "statistics": json.loads(self.statistics.to_json()),
            "accounting": dict(self.accounting),
            "split": dict(self.split),
            "provenance": dict(self.provenance),
            "filled": dict(self.filled),
            **fill,
            **({_PLACES: places} if places else {}),
        }


def _statistics(values: Any) -> Statistics:
    return Statistics.from_json(json.dumps(values))
