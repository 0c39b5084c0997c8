"""The sample store: what is written is read back, and damage never passes for data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from zarr.storage import MemoryStore

import ml4cube.accessor  # noqa: F401 (registers it)
from ml4cube.core.errors import InvalidTypeError, StoreError, StoreExistsError
from ml4cube.core.statistics import Statistics
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.ledger.local import LocalFolder
from ml4cube.ledger.locations import folder_of, location_of
from ml4cube.ledger.manifest import read_manifest
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.store.format import (
    ArrayLayout,
    StoreLayout,
    open_axes,
    open_store,
    verify_store,
    write_axes,
    write_metadata,
    write_shard,
)
from ml4cube.store.metadata import StoreMetadata
from ml4cube.store.shard_encoding import Compressor

RNG = np.random.default_rng(0)
N = 23

VALUES = {
    "sst": RNG.normal(size=(N, 3, 2)).astype("f4"),
    "flag": RNG.random((N, 3, 2)) > 0.5,
    "count": RNG.integers(-5, 5, (N, 3, 2)).astype("i2"),
    "when": np.datetime64("2001-01-01", "ns") + RNG.integers(0, 9, (N, 3, 2)).astype("m8[D]"),
    "time": np.arange(N) * 30,
    "station": np.array([f"stätion {i}" for i in range(N)], dtype=object),
}
VALUES["when"][4, 1, 1] = np.datetime64("NaT")
VALUES["sst"][3, 0, 0] = np.nan


def layout(samples: int = N, shard: int = 8, chunk: int = 2) -> StoreLayout:
    window = ("samples", "lat", "lon")
    variables = [
        ArrayLayout(name, window, (3, 2), VALUES[name].dtype.str, chunk, {"units": "K"})
        for name in ("sst", "flag", "count")
    ]
    variables.append(ArrayLayout("when", window, (3, 2), VALUES["when"].dtype.str, chunk))
    calendar = {"units": "days since 2000-01-01", "calendar": "360_day"}
    coordinates = [
        ArrayLayout("time", ("samples",), (), "<i8", shard, calendar, is_coordinate=True),
        ArrayLayout("station", ("samples",), (), "O", shard, is_coordinate=True),
    ]
    return StoreLayout(samples, shard, (*variables, *coordinates), Compressor())


def metadata(samples: int = N) -> StoreMetadata:
    bound = BoundRecipe.parse(
        {"time": N, "lat": 3, "lon": 2},
        list(VALUES)[:4],
        sample_size={"lat": 3, "lon": 2},
        to_pred="sst",
    )
    return StoreMetadata(
        part="train",
        bound=bound,
        statistics=Statistics.of({"sst": VALUES["sst"]}, part="train"),
        accounting={"total": samples, "train": samples},
        split={"kind": "none"},
        provenance={},
        variables=("sst", "flag", "count", "when"),
    )


def write(root: Path, plan: StoreLayout) -> Path:
    root.mkdir(exist_ok=True)
    axes = {"lat": (np.arange(3.0), {"units": "degrees_north"})}
    files = write_axes(LocalFolder(root), plan.compressor, axes)
    for k in range(plan.shard_count):
        first, last = plan.bounds(k)
        files |= write_shard(
            LocalFolder(root), plan, k, {n: v[first:last] for n, v in VALUES.items()}
        )
    write_metadata(LocalFolder(root), plan, metadata(plan.samples).to_attrs(), files)
    return root


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write(tmp_path / "train.zarr", layout())


@pytest.mark.slow
@pytest.mark.parametrize(("shard", "chunk"), [(8, 2), (8, 8), (30, 3), (23, 23), (1, 1)])
def test_values_are_read_back_equal(tmp_path: Path, shard: int, chunk: int) -> None:
    ds = open_store(write(tmp_path / "s", layout(shard=shard, chunk=chunk)), verify=True)
    for name in ("sst", "flag", "count", "when"):
        np.testing.assert_array_equal(ds[name].values, VALUES[name])
        assert ds[name].dtype == VALUES[name].dtype
        assert ds[name].dims == ("samples", "lat", "lon")
    assert list(ds.data_vars) == ["sst", "flag", "count", "when"]
    assert ds.time.values[1].isoformat() == "2000-02-01T00:00:00"
    assert ds.station.values[5] == "stätion 5"
    assert set(ds.coords) == {"time", "station"}
    assert ds.sst.attrs["units"] == "K"


def test_plain_xarray_and_zarr_read_it(store: Path, recwarn: pytest.WarningsRecorder) -> None:
    ds = xr.open_zarr(store)
    np.testing.assert_array_equal(ds.sst.values, VALUES["sst"])
    assert set(ds.coords) == {"time", "station"}
    group = zarr.open_group(store, mode="r")
    np.testing.assert_array_equal(np.asarray(group["count"]), VALUES["count"])
    assert not [w for w in recwarn if issubclass(w.category, RuntimeWarning | UserWarning)]


def test_empty_store(tmp_path: Path) -> None:
    ds = open_store(write(tmp_path / "s", layout(samples=0)), verify=True)
    assert ds.sizes["samples"] == 0
    assert ds.sst.values.shape == (0, 3, 2)
    assert ds.sst.attrs["units"] == "K"


def test_metadata_round_trip(store: Path) -> None:
    wanted = metadata()
    assert StoreMetadata.of(store) == wanted
    assert StoreMetadata.of(open_store(store)) == wanted
    assert StoreMetadata.of(zarr.open_group(store, mode="r")) == wanted
    assert wanted.targets == ("sst",)
    assert wanted.features == ("flag", "count", "when")


def every_file(store: Path) -> list[Path]:
    return sorted(p for p in store.rglob("*") if p.is_file())


def test_metadata_are_read_from_attributes_that_became_json(store: Path, tmp_path: Path) -> None:
    """As in a netCDF file, which has no mappings."""
    ds = open_store(store)
    ds.ml4cube.to_netcdf(tmp_path / "store.nc")
    assert isinstance(ds.attrs["accounting"], dict)
    with xr.open_dataset(tmp_path / "store.nc") as found:
        assert StoreMetadata.of(found) == StoreMetadata.of(store)


def test_any_missing_emptied_or_cut_file_is_refused(tmp_path: Path) -> None:
    store = write(tmp_path / "s", layout())
    for path in every_file(store):
        content = path.read_bytes()
        for broken in (None, b"", content[:-1]):
            path.unlink()
            if broken is not None:
                path.write_bytes(broken)
            with pytest.raises(StoreError, match=r"make it again|make the store again"):
                open_store(store)
            path.write_bytes(content)
    open_store(store, verify=True)


@pytest.mark.parametrize("missing", [3, 4, 6])
def test_the_first_three_faults_are_named_and_the_others_counted(store: Path, missing: int) -> None:
    for path in every_file(store)[-missing:]:
        path.unlink()
    with pytest.raises(StoreError) as raised:
        verify_store(store)
    more = {3: "", 4: " and 1 more", 6: " and 3 more"}[missing]
    assert str(raised.value).count("is missing") == 3
    assert str(raised.value).endswith(f" is missing{more}; make it again")


def flip(raw: bytes, rng: np.random.Generator, within: bytes = b"") -> bytes:
    """Flip one bit, anywhere or after some text."""
    start = raw.index(within)
    broken = bytearray(raw)
    broken[int(rng.integers(start, len(raw)))] ^= 1 << int(rng.integers(8))
    return bytes(broken)


@pytest.mark.slow
@pytest.mark.parametrize("verify", [False, True])
def test_any_flipped_bit_is_noticed(store: Path, verify: bool) -> None:
    """In metadata at every opening, which names the file."""
    rng = np.random.default_rng(1)
    for path in every_file(store):
        metadata, content = path.name == "zarr.json", path.read_bytes()
        for _ in range(40 if metadata else int(verify)):
            path.write_bytes(flip(content, rng))
            told = f"(damaged: |^){path.relative_to(store)}"
            with pytest.raises(StoreError, match=told if metadata else None):
                verify_store(store, hashes=verify)
            path.write_bytes(content)
    verify_store(store)


def test_flipped_bit_raises_when_read(store: Path) -> None:
    path = store / "sst/c/1/0/0"
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 4
    path.write_bytes(content)
    ds = open_store(store)
    with pytest.raises(ValueError, match="checksum"):
        ds.sst.values  # noqa: B018


@pytest.mark.parametrize("foreign", ["nothing", "file", "zarr"])
def test_foreign_path_is_refused(tmp_path: Path, foreign: str) -> None:
    path = tmp_path / "x.zarr"
    if foreign == "file":
        path.write_text("hello")
    if foreign == "zarr":
        xr.Dataset({"a": ("x", [1])}).to_zarr(path, consolidated=False)
    with pytest.raises(StoreError, match="not a sample store"):
        open_store(path)
    with pytest.raises(StoreError, match="not a sample store"):
        StoreMetadata.of(path)


def test_other_kinds_are_refused() -> None:
    with pytest.raises(InvalidTypeError, match=r"store must be a path.* got 3"):
        open_store(3)
    with pytest.raises(StoreError, match="not a sample store"):
        StoreMetadata.of(xr.Dataset())


@pytest.mark.parametrize("version", [1, 99])
def test_other_formats_are_refused_by_name(store: Path, version: int) -> None:
    group = json.loads((store / "zarr.json").read_text())
    group["attributes"]["ml4cube_format"] = version
    plan = layout()
    files = {n: f for n, f in read_manifest(store).items() if n != "zarr.json"}
    attrs = group["attributes"]
    write_metadata(LocalFolder(store), plan, attrs, files)
    for opened in (open_store, StoreMetadata.of):
        with pytest.raises(StoreError, match=f"format {version}, this version reads 2; make it"):
            opened(store)


def test_leftovers_of_killed_writers_vanish(tmp_path: Path) -> None:
    root = tmp_path / "s"
    (root / "sst").mkdir(parents=True)
    (root / "sst/zarr.json.123.tmp").write_text("half")
    write(root, layout())
    assert not list(root.rglob("*.tmp"))
    verify_store(root)


def readers_of(cube: xr.Dataset, place: Any, test: Any) -> dict[str, Callable[[], object]]:
    """Return every public function that reads a store."""
    nn = pytest.importorskip("torch").nn
    from ml4cube.datasets.pytorch import PTXrDataset
    from ml4cube.prediction import predict_cube

    return {
        "open_store": lambda: open_store(place),
        "open_axes": lambda: open_axes(place),
        "StoreMetadata": lambda: StoreMetadata.of(place),
        "PTXrDataset": lambda: PTXrDataset(place),
        "predict_cube": lambda: predict_cube(nn.Identity(), cube, place),
        "run again": sampler(cube, place, test).run,
    }


def sampler(cube: xr.Dataset, place: Any, test: Any) -> MultiProcSampler:
    return MultiProcSampler(
        cube, train_cube=place, test_cube=test, data_split=1.0, sample_size={"x": 2}, nproc=1
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["path", "url", "zarr"])
def test_every_reader_refuses_damaged_metadata_by_name(tmp_path: Path, kind: str) -> None:
    values = np.random.default_rng(0).normal(280, 9, (6, 4)).astype("f4")
    cube = xr.Dataset({"t": (("time", "x"), values)}, {"x": np.arange(4.0)})
    place, test = {
        "path": (str(tmp_path / "train.zarr"), str(tmp_path / "test.zarr")),
        "url": (f"memory://{tmp_path.name}/train.zarr", f"memory://{tmp_path.name}/test.zarr"),
        "zarr": (MemoryStore(), MemoryStore()),
    }[kind]
    sampler(cube, place, test).run()
    folder = folder_of(location_of("store", place))
    files = {n: folder.read(n) for n in folder.list() if n.endswith("zarr.json")}
    rng = np.random.default_rng(2)
    readers = readers_of(cube, place, test)
    seen = {
        "zarr.json": [name for name in readers if name != "open_axes"],
        "t/zarr.json": ["open_store", "PTXrDataset", "run again"],
        "axes/x/zarr.json": ["open_store", "open_axes", "PTXrDataset", "run again"],
        "manifest/zarr.json": [*readers],
    }
    for name, refusing in seen.items():
        for reader in refusing:
            within = b'"statistics"' if name == "zarr.json" else b""
            folder.write(name, flip(files[name], rng, within))
            with pytest.raises(StoreExistsError if reader == "run again" else StoreError) as raised:
                readers[reader]()
            assert name in str(raised.value)
            folder.write(name, files[name])
    for read in readers.values():
        read()
