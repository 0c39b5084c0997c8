"""Reading regions of any cube."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import xarray as xr

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreError
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.variables import cube_dims, cube_variables, data_variables
from tests.cubes import cell_id_cube

SHAPE = {"time": 6, "lat": 5, "lon": 7}
REGION = {"time": slice(1, 4), "lat": slice(0, 5), "lon": slice(3, 7)}


def backed(kind: str, folder: Path) -> xr.Dataset:
    ds = cell_id_cube(SHAPE, "float64")
    ds["flipped"] = ds["a"].transpose("lon", "time", "lat") * 2
    ds["static"] = ("lat", np.arange(5))
    if kind == "memory":
        return ds
    if kind == "dask":
        return ds.chunk({"time": 2, "lon": 3})
    if kind == "graph":
        return ds.chunk({"time": 2}).map(lambda v: v + 0)
    if kind == "netcdf":
        ds.to_netcdf(folder / "cube.nc")
        return xr.open_dataset(folder / "cube.nc")
    ds.to_zarr(folder / "cube.zarr", zarr_format=2 if kind == "zarr2" else 3)
    return xr.open_zarr(folder / "cube.zarr", chunks=None if kind == "lazy" else {})


@pytest.mark.parametrize("kind", ["memory", "dask", "graph", "netcdf", "zarr2", "zarr3", "lazy"])
def test_reads_what_isel_reads(tmp_path: Path, kind: str) -> None:
    ds = backed(kind, tmp_path)
    reader = CubeReader.of(ds, list(ds), ("time", "lat", "lon"))
    right = ds.isel(REGION)
    there = pickle.loads(pickle.dumps(reader.narrow(REGION)))  # noqa: S301
    for cells in (reader.read(REGION), there.read(REGION)):
        for name in ("a", "flipped"):
            wanted = right[name].transpose("time", "lat", "lon").values
            np.testing.assert_array_equal(cells[name], wanted)
        np.testing.assert_array_equal(cells["static"][2, :, 1], right.static.values)
        assert cells["static"].shape == (3, 5, 4)


@pytest.mark.parametrize("kind", ["memory", "dask"])
def test_a_narrow_reader_is_small(kind: str) -> None:
    ds = xr.Dataset({"a": (("t", "x"), np.zeros((1000, 1000)))})
    ds = ds.chunk({"t": 10}) if kind == "dask" else ds
    part = CubeReader.of(ds, "a", ("t", "x")).narrow({"t": slice(0, 2), "x": slice(0, 2)})
    assert len(pickle.dumps(part)) < (1_000 if kind == "memory" else 200_000)


def test_unreadable_cells_are_named() -> None:
    def fail(block: Any) -> Any:
        raise OSError("disk on fire")

    array = da.zeros((6, 4), chunks=3).map_blocks(fail, dtype=float, meta=np.empty((0, 0)))
    reader = CubeReader.of(xr.Dataset({"t": (("y", "x"), array)}), "t", ("y", "x"))
    with pytest.raises(StoreError, match=r"variable 't' cannot be read at y 0:2, x 1:3.*on fire"):
        reader.read({"y": slice(0, 2), "x": slice(1, 3)})


def test_dims_and_variables_of_a_cube() -> None:
    ds = xr.Dataset(
        {
            "t": (("time", "lat"), np.zeros((3, 2))),
            "time_bnds": (("time", "bnds"), np.zeros((3, 9))),
            "named": (("time", "nv"), np.zeros((3, 9))),
            "area": ("lat", np.zeros(2)),
            "crs": ((), 1),
            "code": ("time", list("abc")),
            "long": (("time", "lat"), np.zeros((3, 2), np.longdouble)),
            "covariance": xr.Variable(("lat", "lat"), np.eye(2)),
            "spectrum": (("time", "lat", "wave"), np.zeros((3, 2, 4), complex)),
            "age": (("time", "lat", "member"), np.zeros((3, 2, 5), "m8[s]")),
        },
        coords={"time": ("time", np.arange(3), {"bounds": "named"})},
    )
    assert cube_dims(ds) == ("time", "lat")
    kept, others = cube_variables(ds)
    assert kept == ["t", "area"]
    described = {"time_bnds", "named", "crs", "code", "long", "covariance"}
    assert set(others) == described | {"spectrum", "age"}
    assert "covariance" not in data_variables(ds)
    with pytest.raises(
        InvalidValueError, match=r"'covariance' must have every dim once, got \('lat', 'lat'\)"
    ):
        CubeReader.of(ds, ["covariance"], ("time", "lat"))
    with pytest.raises(InvalidValueError, match="no data variable"):
        cube_dims(ds[["crs", "code", "covariance"]])


def test_cubes_in_any_form(tmp_path: Path) -> None:
    ds = cell_id_cube(SHAPE)
    ds.to_zarr(tmp_path / "cube.zarr")
    assert as_dataset(ds) is ds
    assert list(as_dataset(ds.a)) == ["a"]
    assert list(as_dataset(ds.a.rename(None))) == ["data"]
    for source in (tmp_path / "cube.zarr", str(tmp_path / "cube.zarr")):
        xr.testing.assert_equal(as_dataset(source), ds)
    with pytest.raises(InvalidTypeError, match=r"ds must be an xarray .* got int"):
        as_dataset(3)
    for nameless in (ds.a.rename(3), ds.rename(a=3), xr.Dataset({"a": ((3,), [1.0])})):
        with pytest.raises(InvalidTypeError, match=r"must be strings, got \[3\]; rename"):
            as_dataset(nameless)
    with pytest.raises(StoreError, match="cannot be opened as a cube"):
        as_dataset(tmp_path / "nothing.zarr")


def test_bounds_among_the_coordinates_of_a_store_without_consolidated_metadata(
    tmp_path: Path,
) -> None:
    ds = cell_id_cube(SHAPE)
    ds = ds.assign_coords(lat_bnds=(("lat", "bnds"), np.stack([ds.lat, ds.lat + 1], axis=1)))
    ds.to_zarr(tmp_path / "cube.zarr", consolidated=False)
    xr.testing.assert_equal(as_dataset(tmp_path / "cube.zarr"), ds)


def test_a_task_gets_only_its_own_cells_of_a_cube_in_memory() -> None:
    ds = xr.Dataset({"a": (("t", "x"), np.zeros((1000, 100)))})
    reader = CubeReader.of(ds, "a", ("t", "x"))
    shared, own = reader.split(shares_memory=False)
    assert list(shared.sources) == []
    part = own.narrow({"t": slice(10, 12), "x": slice(0, 100)})
    assert len(pickle.dumps(part)) < 3000
    assert [list(one.sources) for one in reader.split(shares_memory=True)] == [["a"], []]


def test_of_a_cube_joined_from_many_files_a_block_looks_at_its_own(tmp_path: Path) -> None:
    """Reading all blocks must not take time by the square of the number of files."""
    pieces = []
    for i in range(60):
        piece = xr.Dataset({"a": (("t", "x"), np.full((2, 3), i, "f4"))})
        piece.to_zarr(tmp_path / f"{i}.zarr", consolidated=False)
        pieces.append(xr.open_zarr(tmp_path / f"{i}.zarr", consolidated=False))
    joined = xr.concat(pieces, "t")
    reader = CubeReader.of(joined, ["a"], ("t", "x"))
    box = {"t": slice(41, 43), "x": slice(1, 3)}
    np.testing.assert_array_equal(reader.read(box)["a"], [[20, 20], [21, 21]])
    layers = reader.sources["a"].array.dask.layers  # type: ignore[attr-defined]
    assert len(layers) == 1
    own = pickle.dumps(reader.narrow(box))
    assert len(own) < len(pickle.dumps(reader)) / 10
    read = pickle.loads(own).read(box)["a"]  # noqa: S301, our own bytes
    np.testing.assert_array_equal(read, [[20, 20], [21, 21]])
