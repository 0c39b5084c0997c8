"""What a data set adds to its samples: static features, coordinates, weights, names again."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from ml4cube.core.errors import CubeError, InvalidTypeError, InvalidValueError
from ml4cube.cube.chunks.stored import ChunkFiles
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.sampling import tiling
from ml4cube.store.format import open_store
from tests.cubes import cell_id_cube
from tests.samplestores import sampled

SHAPE = {"time": 6, "lat": 4, "lon": 6}
WINDOW = {"time": 2, "lat": 2, "lon": 3}


def cube(calendar: str | None = None) -> xr.Dataset:
    """A cube of numbered cells, a static field, classes and weights of points."""
    ds = cell_id_cube(SHAPE, "float32", names=("a", "b"), calendar=calendar)
    ids = np.arange(24).reshape(4, 6)
    ds["static"] = (("lat", "lon"), ids.astype("f4"))
    ds["kind"] = (("time", "lat", "lon"), np.tile(ids % 3, (6, 1, 1)).astype("i4"))
    ds["trust"] = (("time", "lat", "lon"), 1 + np.tile(ids / 10, (6, 1, 1)))
    return ds


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sampled(cube(), tmp_path_factory.mktemp("views"), sample_size=WINDOW)


def data_of(form: str, store: Path, **options: Any) -> PTXrDataset:
    if form == "store":
        return PTXrDataset(store, **options)
    return PTXrDataset(cube(), sample_size=WINDOW, **options)


def phases(name: str, times: Any) -> np.ndarray:
    """The angle of a coordinate, one value at a time."""
    found = []
    for t in times:
        if name == "hour":
            found.append((t.hour + t.minute / 60) / 24)
        else:
            begin = t.replace(month=1, day=1, hour=0, minute=0, second=0)
            year = t.replace(year=t.year + 1, month=1, day=1, hour=0, minute=0, second=0) - begin
            found.append((t - begin) / year)
    return 2 * np.pi * np.array(found)


@pytest.mark.parametrize("form", ["cube", "store"])
def test_coordinates_are_channels(store: Path, form: str) -> None:
    data = data_of(form, store, features=["a"], coord_features=["lat", "lon", "dayofyear"])
    names = [f"{f}({n})" for n in ("lat", "lon", "dayofyear") for f in ("sin", "cos")]
    assert data.channels == ("a", *names)
    assert data.features == ("a",)
    X = data.take(range(len(data))).numpy()
    assert X.shape == (len(data), 7, 2, 2, 3)
    where = data.coords(range(len(data)))
    ds = cube()
    times = [t.to_pydatetime() for t in ds.indexes["time"]]
    tables = {
        "lat": np.deg2rad(ds["lat"].values),
        "lon": np.deg2rad(ds["lon"].values),
        "dayofyear": phases("dayofyear", times),
    }
    for sample in range(len(data)):
        start = {d: int(where[f"{d}_index"][sample]) for d in SHAPE}
        for cell in np.ndindex(2, 2, 3):
            t, i, j = (start[d] + k for d, k in zip(("time", "lat", "lon"), cell, strict=True))
            expected = [
                f(tables[n][k])
                for n, k in (("lat", i), ("lon", j), ("dayofyear", t))
                for f in (np.sin, np.cos)
            ]
            np.testing.assert_allclose(X[(sample, slice(1, None), *cell)], expected, atol=2e-6)


@pytest.mark.parametrize("calendar", [None, "360_day", "noleap", "standard"])
@pytest.mark.parametrize("name", ["dayofyear", "hour"])
def test_time_turns_in_every_calendar(calendar: str | None, name: str) -> None:
    n = 900
    cftime = calendar is not None
    times = xr.date_range(
        "2003-12-30T06", periods=n, freq="31h", calendar=calendar or "standard", use_cftime=cftime
    )
    ds = xr.Dataset({"a": ("time", np.arange(n, dtype="f4"))}, {"time": times})
    X = PTXrDataset(ds, features="a", coord_features=name).take(range(n)).numpy()
    angle = phases(name, times if cftime else [t.to_pydatetime() for t in times])
    np.testing.assert_allclose(X[:, 1], np.sin(angle), atol=1e-6)
    np.testing.assert_allclose(X[:, 2], np.cos(angle), atol=1e-6)


def test_time_of_stored_points_in_another_calendar(tmp_path: Path) -> None:
    ds = cube("360_day")
    data = PTXrDataset(sampled(ds, tmp_path), features="a", coord_features="dayofyear")
    times = data.coords(range(len(data)))["time"]
    X = data.take(range(len(data))).numpy()
    np.testing.assert_allclose(X[:, 1], np.sin(phases("dayofyear", times)), atol=1e-6)
    assert len(data.coords([])["time"]) == 0


def test_coordinates_of_points_and_of_other_names(tmp_path: Path) -> None:
    ds = cube().rename(lat="latitude", lon="x")
    data = PTXrDataset(ds, features="a", coord_features=["lat", "x", "hour"])
    X = data.take(range(len(data))).numpy()
    where = data.coords(range(len(data)))
    np.testing.assert_allclose(X[:, 1], np.sin(np.deg2rad(where["latitude"])), atol=1e-6)
    np.testing.assert_allclose(X[:, 4], np.cos(np.deg2rad(where["x"])), atol=1e-6)
    assert np.ptp(X[:, 5]) == 0


def test_coordinates_in_radians_are_read_as_such() -> None:
    degrees = cube()
    lat = degrees["lat"].copy(data=np.deg2rad(degrees["lat"].values))
    radians = degrees.assign_coords(lat=lat.assign_attrs(units="radian"))
    of_degrees, of_radians = (
        PTXrDataset(ds, features="a", coord_features="lat").take(range(20)).numpy()
        for ds in (degrees, radians)
    )
    np.testing.assert_allclose(of_radians, of_degrees, atol=1e-6)


@pytest.mark.parametrize("names", [("T", "Y", "X"), ("lon", "lat", "time")])
def test_coordinates_of_a_store_with_other_names_or_order_of_dims(
    store: Path, tmp_path: Path, names: tuple[str, ...]
) -> None:
    """`array_dims` renames what a sample keeps: a cell's place is not that of the first cell."""
    renamed = sampled(cube(), tmp_path, sample_size=WINDOW, array_dims=["samples", *names])
    options: dict[str, Any] = {"features": ["a"], "coord_features": ["lat", "dayofyear"]}
    plain, other = (PTXrDataset(s, **options) for s in (store, renamed))
    rows = range(len(plain))
    cells, moved = plain.take(rows), other.take(rows)
    if names[0] == "lon":
        moved = moved.movedim((2, 3, 4), (4, 3, 2))
    np.testing.assert_array_equal(moved, cells)
    first, second = plain.to_dataset(cells[:1], [0]), other.to_dataset(other.take([0]), [0])
    for here, there in zip(("T", "Y", "X"), ("time", "lat", "lon"), strict=True):
        found = second[f"{here}_cells" if names[0] == "T" else f"{there}_cells"]
        np.testing.assert_array_equal(found.values, first[f"{there}_cells"].values)
    in_memory = open_store(renamed).load()
    in_memory.encoding.clear()  # so that the axes are found from the origins of samples
    np.testing.assert_array_equal(PTXrDataset(in_memory, **options).take(rows), other.take(rows))


def test_coordinates_along_a_dim_that_was_renamed_are_not_guessed(store: Path) -> None:
    renamed = open_store(store).rename(lat="Y")
    with pytest.raises(InvalidValueError, match=r"windows extend along 'lat', .*rename it back"):
        PTXrDataset(renamed, features="a", coord_features="lat")


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("level", "matches no coordinate; the coordinates known at every cell are"),
        ("time", "must be an angle"),
        (["lat", "lat"], "twice"),
    ],
)
def test_coordinates_that_are_none(wanted: Any, message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        PTXrDataset(cube(), features="a", coord_features=wanted)
    with pytest.raises(InvalidTypeError, match="channels of X"):
        PTXrDataset(cube(), coord_features="lat")


def test_the_latitude_of_a_rotated_grid_is_not_that_on_earth() -> None:
    kinds = {"lat": "latitude", "lon": "longitude"}
    ds = cube().rename({name: f"r{name}" for name in kinds})
    for name, kind in kinds.items():
        attrs = {"standard_name": f"grid_{kind}", "units": "degrees"}
        ds = ds.assign_coords({f"r{name}": (f"r{name}", ds[f"r{name}"].values, attrs)})
    with pytest.raises(InvalidValueError, match=r"'lat' matches no coord.* can be variables of"):
        PTXrDataset(ds, features="a", coord_features="lat")
    assert PTXrDataset(ds, features="a", coord_features="rlat").channels[1] == "sin(rlat)"


def test_a_dim_called_hour_is_not_the_hour_of_the_dates() -> None:
    ds = cube().drop_vars("lon").rename(lon="hour").assign_coords(hour=range(6))
    with pytest.raises(InvalidValueError, match="'hour' must be an angle"):
        PTXrDataset(ds, features="a", coord_features="hour")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "datetime64[ns]"])
@pytest.mark.parametrize("form", ["store", "by hand"])
def test_cells_have_the_cubes_coordinates(tmp_path: Path, dtype: str, form: str) -> None:
    lat = np.arange(40) * (7 if dtype[0] in "id" else 0.1) - 30
    ds = cell_id_cube({"time": 6, "lat": 40}, "float32").assign_coords(lat=lat.astype(dtype))
    samples: Any = sampled(ds, tmp_path, sample_size={"lat": 4})
    if form == "by hand":
        samples = open_store(samples).load().drop_encoding()
    data = PTXrDataset(samples, features="a")
    rows = np.arange(len(data))
    found = data.to_dataset(data.take(rows), rows)
    expected = ds["lat"].values[found["lat_index"].values[:, None] + np.arange(4)]
    assert found["lat_cells"].dtype == dtype
    np.testing.assert_array_equal(found["lat_cells"][:, 0], found["lat_origin"])
    rounding = 1e-6 if dtype[0] == "f" and form == "by hand" else 0
    np.testing.assert_allclose(
        found["lat_cells"].values.astype("f8"), expected.astype("f8"), rtol=0, atol=rounding * 30
    )


def test_cells_between_origins_that_are_not_even_are_not_guessed(tmp_path: Path) -> None:
    lat = np.arange(16) * 0.25
    lat[8] += 1e-3
    ds = cell_id_cube({"time": 6, "lat": 16}, "float32").assign_coords(lat=lat)
    path = sampled(ds, tmp_path, sample_size={"lat": 4})
    stored = PTXrDataset(path, features="a", coord_features="lat")
    found = stored.to_dataset(stored.take([2]), [2])["lat_cells"].values[0]
    assert set(found) <= set(lat)
    np.testing.assert_allclose(stored[2][1], np.sin(np.deg2rad(found)), atol=1e-6)
    by_hand = open_store(path).load().drop_encoding()
    data = PTXrDataset(by_hand, features="a")
    assert "lat_cells" not in data.to_dataset(data.take([0]), [0]).coords
    with pytest.raises(InvalidValueError, match="give the cube itself"):
        PTXrDataset(by_hand, features="a", coord_features="lat")


def test_dates_of_cells_may_be_centuries_apart() -> None:
    times = np.datetime64("0001-01-01", "s") + 200_000 * np.arange(4) * np.timedelta64(1, "D")
    ds = xr.Dataset(
        {"a": (("samples", "time"), np.ones((2, 2)))},
        {"time_origin": ("samples", times[::2]), "time_index": ("samples", [0, 2])},
    )
    data = PTXrDataset(ds, features="a")
    cells = data.to_dataset(data.take([0, 1]), [0, 1])["time_cells"]
    np.testing.assert_array_equal(cells, times.reshape(2, 2))


def test_static_features_of_samples_made_by_hand() -> None:
    rng = np.random.default_rng(0)
    ds = xr.Dataset(
        {
            "series": (("samples", "time", "lat"), rng.normal(size=(5, 3, 2))),
            "soil": (("samples", "lat"), rng.normal(size=(5, 2))),
            "height": ("samples", rng.normal(size=5)),
            "y": ("samples", np.arange(5.0)),
        }
    )
    data = PTXrDataset(ds, to_pred="y", dtype="float64")
    X, y = data.take([3, 1])
    assert X.shape == (2, 3, 3, 2)
    assert y.tolist() == [[3.0], [1.0]]
    for row, sample in enumerate((3, 1)):
        for t in range(3):
            np.testing.assert_array_equal(X[row, 0, t], ds["series"][sample, t])
            np.testing.assert_array_equal(X[row, 1, t], ds["soil"][sample])
            assert (X[row, 2, t] == float(ds["height"][sample])).all()


@pytest.mark.parametrize(
    "chosen", [{"features": ["a", "b"]}, {"to_pred": "b"}, {"to_pred": "a", "weights": "b"}]
)
def test_square_windows_that_are_transposed_are_refused(chosen: dict[str, Any]) -> None:
    values = np.arange(18.0).reshape(2, 3, 3)
    ds = xr.Dataset(dict.fromkeys(("a", "c"), (("samples", "y", "x"), values)))
    ds["b"] = ds["a"].transpose("samples", "x", "y")
    with pytest.raises(InvalidValueError, match=r"dims in one order, got .*: \('x', 'y'\)"):
        PTXrDataset(ds, **chosen)
    assert len(PTXrDataset(ds)[0]) == 3
    PTXrDataset(ds.transpose("samples", "y", "x"), **chosen)


@pytest.mark.parametrize("chosen", [{"features": ["a", "b"]}, {"to_pred": "a", "weights": "b"}])
def test_windows_along_other_dims_are_refused_though_as_long(chosen: dict[str, Any]) -> None:
    along_x, along_y = ((("samples", dim), np.ones((2, 3))) for dim in "xy")
    ds = xr.Dataset({"a": along_x, "b": along_y, "c": along_x})
    with pytest.raises(InvalidValueError, match=r"window.*{'x': 3}.*{'y': 3}"):
        PTXrDataset(ds, **chosen)


def test_weights_of_samples_in_several_chunks() -> None:
    own = np.arange(9.0)
    ds = xr.Dataset({"a": ("samples", own), "b": ("samples", own)}).chunk(samples=4)
    data = PTXrDataset(ds, to_pred="b", weights=own)
    assert data.take(range(9))[2].tolist() == own.tolist()


@pytest.mark.parametrize("form", ["cube", "store"])
def test_weights_by_variable_class_and_sample(store: Path, form: str) -> None:
    pair = {"to_pred": "kind", "target_dtype": "int64"}
    data = data_of(form, store, weights="trust", **pair)
    assert "trust" not in data.features
    _, y, w = data.take(range(len(data)))
    assert w.shape == y.shape == (len(data), 1, 2, 2, 3)
    whole = data_of(form, store, features="trust").take(range(len(data)))
    plain = whole * data.statistics["trust"].std + data.statistics["trust"].mean
    np.testing.assert_allclose(w, plain, rtol=1e-5)

    table = {0: 1.0, 1: 5.0, 2: 0.0}
    data = data_of(form, store, weights=table, **pair)
    _, y, w = data.take(range(len(data)))
    np.testing.assert_array_equal(w, np.vectorize(table.get)(y))

    own = np.random.default_rng(1).random(len(data))
    data = data_of(form, store, weights=own, **pair)
    _, _, w = data.take([4, 0, 7])
    np.testing.assert_array_equal(w, own[[4, 0, 7]].astype("f4"))
    again = pickle.loads(pickle.dumps(data))  # noqa: S301
    assert torch.equal(again.take([4])[2], w[:1])
    seen = [w for _, _, w in prep_dataloader(data, batch_size=len(data))]
    np.testing.assert_array_equal(np.sort(seen[0]), np.sort(own.astype("f4")))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "trust"}, "they need to_pred"),
        ({"to_pred": "a", "weights": "thrust"}, "weights.*'thrust'"),
        ({"to_pred": "a", "weights": {0: 1}}, "was scaled as a number"),
        ({"to_pred": "a", "scale_fn": None, "weights": {}}, "weights={} has no class"),
        ({"to_pred": ["a", "b"], "weights": {0: 1}}, "need exactly one target"),
        ({"to_pred": "a", "weights": [1.0, 2.0]}, "of which there are 144"),
        ({"to_pred": "a", "weights": [-1.0] * 144}, "finite and not negative"),
        ({"to_pred": "a", "weights": [0.0] * 144}, "above 0 somewhere, got zeros only"),
        ({"to_pred": "a", "weights": ["x"] * 144}, "one number per sample"),
    ],
)
def test_weights_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CubeError, match=message):
        PTXrDataset(cube(), **options)


def test_classes_are_told_apart_as_they_are_stored() -> None:
    """Also where the values handed over are one and the same in float32."""
    codes = 2**24 + np.arange(6).reshape(2, 3) % 2
    ds = xr.Dataset({"a": (("t", "x"), np.ones((2, 3))), "code": (("t", "x"), codes)})
    table = {2**24: 1.0, 2**24 + 1: 5.0}
    data = PTXrDataset(ds, to_pred="code", features="a", weights=table, sample_size={"x": 3})
    _, y, w = data.take([0, 1])
    assert y.dtype == torch.float32
    np.testing.assert_array_equal(y[:, 0], codes.astype("f4"))
    np.testing.assert_array_equal(w[:, 0], np.vectorize(table.get)(codes))


def test_a_class_without_a_weight_is_named(store: Path) -> None:
    data = PTXrDataset(store, to_pred="kind", weights={0: 1.0, 1: 2.0})
    with pytest.raises(InvalidValueError, match=r"'kind' has class 2 in samples"):
        data.take(range(len(data)))


@pytest.mark.parametrize("form", ["cube", "store"])
@pytest.mark.parametrize("unscale", [True, False])
def test_a_batch_is_a_dataset_again(store: Path, form: str, unscale: bool) -> None:
    ds = cube()
    ds["a"].attrs["units"] = "K"
    data = data_of(form, store, to_pred="b", features=["a", "static"], coord_features="lat")
    samples = [5, 0, 2]
    batch = data.take(samples)
    shown = data.to_dataset(batch, samples, unscale=unscale)
    assert dict(shown["a"].sizes) == {"samples": 3, "time": 2, "lat": 2, "lon": 3}
    assert set(shown) == {"a", "static", "b", "sin(lat)", "cos(lat)"}
    assert shown["sample"].values.tolist() == samples
    where = data.coords(samples)
    for row in range(3):
        start = {d: int(where[f"{d}_index"][row]) for d in SHAPE}
        box = ds.isel({d: slice(start[d], start[d] + WINDOW[d]) for d in SHAPE})
        one = shown.isel(samples=row)
        for d in SHAPE:
            assert one[f"{d}_origin"] == box[d][0]
            np.testing.assert_allclose(
                one[f"{d}_cells"].astype(float), box[d].astype(float), rtol=1e-6
            )
        if unscale:
            for name in ("a", "b"):
                np.testing.assert_allclose(one[name], box[name], rtol=1e-5, atol=1e-4)
        else:
            np.testing.assert_array_equal(one["a"], batch[0][row, 0])
    with pytest.raises(InvalidValueError, match="must have the shape"):
        data.to_dataset(batch, [1, 2])
    plain = data_of(form, store)
    shown = plain.to_dataset(plain.take([1]), [1])
    assert set(shown) == set(cube())


def test_a_prediction_under_autocast_is_a_dataset_again() -> None:
    ds = xr.Dataset({name: ("samples", np.arange(4.0)) for name in "ab"})
    X, y = (data := PTXrDataset(ds, to_pred="b")).take([2, 3])
    shown = data.to_dataset((X, y.bfloat16()), [2, 3])
    assert shown["b"].values.tolist() == [2.0, 3.0]


def test_variables_that_were_renamed_do_not_know_their_scaling(store: Path) -> None:
    data = PTXrDataset(open_store(store).rename(a="t"), features=["t", "b"], coord_features="lat")
    batch = data.take([2])
    assert "t" in data.to_dataset(batch, [2])
    with pytest.raises(InvalidValueError, match=r"store has no scaling of \['t'\]"):
        data.to_dataset(batch, [2], unscale=True)


def test_samples_made_by_hand_do_not_know_their_scaling() -> None:
    ds = xr.Dataset({"a": ("samples", np.arange(4.0))})
    data = PTXrDataset(ds, features="a")
    assert data.to_dataset(data.take([2]), [2])["a"].values.tolist() == [2.0]
    with pytest.raises(InvalidValueError, match="the scaling of samples made by hand is not known"):
        data.to_dataset(data.take([2]), [2], unscale=True)


@pytest.mark.parametrize(
    ("overlap", "most"), [(None, 1), ({"lat": 0.5}, 2), ({"lat": 0.5, "lon": 0.25}, 4)]
)
def test_chunks_of_a_cube_are_decoded_once_and_again_only_for_windows_that_reach_over(
    tmp_path: Path, overlap: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many windows lie over a chunk: its own tile reads it, and those whose windows end
    in it."""
    monkeypatch.setattr(tiling, "_SHARD_BYTES", (1, 1))  # a tile is a chunk
    ds = cell_id_cube({"time": 4, "lat": 32, "lon": 48}, "float32")
    ds.to_zarr(tmp_path / "cube.zarr", encoding={"a": {"chunks": (2, 16, 16)}}, consolidated=False)
    lazy = xr.open_zarr(tmp_path / "cube.zarr", consolidated=False)
    data = PTXrDataset(lazy, features="a", sample_size={"lat": 4, "lon": 4}, overlap=overlap)
    loader = prep_dataloader(data, batch_size=8, buffer_mb=0.02)
    assert not loader._memory.fits
    decoded: Counter[Any] = Counter()
    real = ChunkFiles._decode

    def counting(self: Any, chunk: Any, *rest: Any) -> None:
        decoded[chunk] += 1
        real(self, chunk, *rest)

    monkeypatch.setattr(ChunkFiles, "_decode", counting)
    assert sum(len(batch) for batch in loader) == len(data) // 8 * 8 >= 4 * 8 * 12
    assert len(decoded) == 2 * 2 * 3
    assert max(decoded.values()) == most


@pytest.mark.parametrize(
    "added", [{}, {"coord_features": "lat"}, {"weights": "trust"}, {"target_dtype": "int64"}]
)
def test_targets_at_a_lead_time_know_their_cells_whatever_is_added(added: Any) -> None:
    ds = cube()
    data = PTXrDataset(
        ds, "a", ["b"], sample_size=WINDOW, target_offset={"time": 2}, scale_fn=None, **added
    )
    found = data.to_dataset(data.take([3]), [3])
    first = int(found["time_index"][0])
    times = ds["time"].values
    np.testing.assert_array_equal(found["time_cells"][0], times[first : first + 2])
    np.testing.assert_array_equal(found["time_target_cells"][0], times[first + 2 : first + 4])
    assert found["a"].dims == ("samples", "time_target", "lat", "lon")


@pytest.mark.parametrize("form", ["cube", "store"])
@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gappy", {"scale_fn": None}, r"'gappy' has gaps in .* read as int64"),
        ("kind", {}, r"'kind' has -?\d\.\d+ in .* int64 cannot hold"),
    ],
)
def test_gaps_and_scaled_classes_are_no_whole_numbers(
    tmp_path: Path, form: str, name: str, options: dict[str, Any], message: str
) -> None:
    plain: Any = cube()[["a", "b"]]
    ds = plain.assign(kind=plain["b"] % 4, gappy=plain["b"])  # Floats, as with a fill value.
    ds["gappy"][2, 1, 1] = np.nan
    options = {"sample_size": WINDOW, "drop_nan": None, **options}
    if form == "store":
        ds, options = sampled(ds, tmp_path, **options), {}
    classes = PTXrDataset(ds, to_pred=name, target_dtype="int64", **options)
    with pytest.raises(InvalidValueError, match=message):
        list(prep_dataloader(classes, batch_size=2))
    if name == "gappy":
        _, y = PTXrDataset(ds, to_pred="a", target_dtype="int64", **options).take(range(12))
        assert y.dtype == torch.int64
        assert y.min() >= 0


def test_numbers_that_an_integer_type_cannot_hold_are_refused() -> None:
    ds = xr.Dataset({"a": ("samples", [1.0, 2.0]), "kind": ("samples", [3, 300])})
    assert PTXrDataset(ds, to_pred="kind", target_dtype="int16")[1][1].tolist() == [300]
    with pytest.raises(InvalidValueError, match=r"'kind' has 300 in .* uint8 cannot hold"):
        PTXrDataset(ds, to_pred="kind", target_dtype="uint8")[1]


def test_cells_of_a_dim_without_a_coordinate_are_no_degrees(tmp_path: Path) -> None:
    ds = cube().drop_vars("lat")
    path = sampled(ds, tmp_path, sample_size=WINDOW)
    for form, options in ((ds, {"sample_size": WINDOW}), (path, {})):
        with pytest.raises(InvalidValueError, match="'lat' matches no coordinate"):
            PTXrDataset(form, features="a", coord_features="lat", **options)
        data = PTXrDataset(form, features="a", coord_features="lon", **options)
        assert "lat_cells" not in data.to_dataset(data.take([0]), [0])
