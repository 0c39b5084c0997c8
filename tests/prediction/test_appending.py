"""Steps appended along time: readers see all of them or none, and a kill loses nothing."""

from __future__ import annotations

import itertools
import json
import math
import random
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dask.array as da
import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given
from hypothesis import strategies as st
from zarr.storage import MemoryStore

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreError, StoreExistsError
from ml4cube.core.grid import Grid
from ml4cube.ledger.local import LocalFolder
from ml4cube.prediction import predict_cube
from ml4cube.prediction.output.appending import _chunks, _copy
from ml4cube.prediction.output.opening import make_output, output_location
from ml4cube.training.ranks.dist import World
from tests.faults.processes import Launcher, wait_for
from tests.faults.test_sampling_faults import tree
from tests.prediction.output_job import Logged, source


@pytest.fixture
def model(tmp_path: Path) -> Logged:
    return Logged(tmp_path / "log", 1.0)


def appended(model: Any, ds: xr.Dataset, out: Any, **options: Any) -> xr.Dataset:
    return predict_cube(model, ds, **{"out": out, "append": True, "progress": False} | options)


def assert_is_source(cube: xr.Dataset, *parts: tuple[int, int]) -> None:
    """Compare with the sources of some first steps and lengths."""
    whole = xr.concat([source(first, steps) for first, steps in parts], "time")
    assert cube.time.equals(whole.time)
    np.testing.assert_array_equal(cube.t, whole.t)
    assert cube.t.attrs["units"] == "K"


def places() -> dict[str, Any]:
    icechunk = pytest.importorskip("icechunk")
    repository = icechunk.Repository.create(icechunk.in_memory_storage())
    return {
        "path": "cube.zarr",
        "url": "memory://appended/cube.zarr",
        "zarr store": MemoryStore(),
        "session": repository.writable_session("main"),
    }


@pytest.mark.slow
@pytest.mark.parametrize("place", ["path", "url", "zarr store", "session"])
@pytest.mark.parametrize("first_appends", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_a_forecast_grows_every_day_while_others_read_it(tmp_path, model, place, first_appends):
    out = tmp_path / "cube.zarr" if place == "path" else places()[place]
    if place == "url":
        out += f"/{first_appends}.zarr"
    # with 10 steps in chunks of 4, the last chunk is cut
    readers = [appended(model, source(0, 10), out, append=first_appends)]
    days = [(0, 10), (10, 1), (11, 1), (12, 9), (40, 2)]
    for number in range(1, len(days)):
        readers.append(appended(model, source(*days[number]), out))
        calls = model.calls
        again = appended(model, source(*days[number]), out)  # the job runs twice on that day
        assert model.calls <= calls + 1  # for the layout of its results
        for length, reader in enumerate((*readers, again), 1):
            assert_is_source(reader, *days[: min(length, number + 1)])
    if place == "path":
        assert sorted(p.name for p in tmp_path.iterdir()) == ["cube.zarr", "log"]
        assert_is_source(xr.open_zarr(out, consolidated=False), *days)


def test_every_step_of_an_append_leaves_what_was_there_or_all(tmp_path, model, monkeypatch):
    """After each file that is written, and wherever writing stops."""
    path, write = tmp_path / "cube.zarr", LocalFolder.write
    before, both = [(0, 10)], [(0, 10), (10, 7)]
    predict_cube(model, source(0, 10), out=tmp_path / "undisturbed.zarr", progress=False)
    appended(model, source(10, 7), tmp_path / "undisturbed.zarr")
    expected = tree(tmp_path / "undisturbed.zarr")
    predict_cube(model, source(0, 10), out=path, progress=False)

    def watched(self: LocalFolder, *args: Any) -> Any:
        if self.root != path:  # of the draft
            return write(self, *args)
        left[0] -= 1
        if left[0] == 0:
            raise OSError("no space left")
        result = write(self, *args)
        assert_is_source(xr.open_zarr(path), *(both if args[0] == "zarr.json" else before))
        return result

    for allowed in itertools.count(1):
        left = [allowed]
        with monkeypatch.context() as patch:
            patch.setattr(LocalFolder, "write", watched)
            try:
                appended(model, source(10, 7), path)
                break
            except StoreError:
                assert left[0] == 0
        assert_is_source(xr.open_zarr(path), *before)
    # chunks of the target, one of dates, metadata, list of files
    assert allowed - 1 == 3 + 1 + 3 + 1
    assert tree(path) == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cube.zarr", "log", "undisturbed.zarr"]


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_an_append_killed_again_and_again_ends_in_the_same_bytes(tmp_path, model, seed):
    parts, path, launcher = [(0, 10), (10, 40)], tmp_path / "cube.zarr", Launcher(tmp_path)
    model = Logged(model.log, 2.0)
    for out in (path, tmp_path / "undisturbed.zarr"):
        predict_cube(model, source(*parts[0]), out=out, progress=False)
    appended(model, source(*parts[1]), tmp_path / "undisturbed.zarr")
    expected, rng = tree(tmp_path / "undisturbed.zarr"), random.Random(seed)
    for kill in range(6):
        calls = model.calls
        job = Path(__file__).with_name("output_job.py"), model.log, path, *parts[1]
        run = launcher.python(*map(str, job), SLEEP_S="0.02")
        if kill < 5:
            wait_for(
                lambda calls=calls, run=run: model.calls > calls or run.process.poll() == 0, run
            )
            time.sleep(rng.random() / 4)
            run.process.kill()
        run.finish(60)
        cube = xr.open_zarr(path)
        assert cube.sizes["time"] in (10, 50)
        whole = xr.concat([source(*part) for part in parts], "time")
        np.testing.assert_array_equal(cube.t, 2 * whole.t[: cube.sizes["time"]])
    assert tree(path) == expected
    assert not Path(f"{path}.partial").exists()


def test_what_a_kill_after_the_last_step_left_is_removed(tmp_path, model, monkeypatch):
    path = tmp_path / "cube.zarr"
    appended(model, source(0, 3), path)
    with monkeypatch.context() as patch:
        patch.setattr("ml4cube.ledger.draft.Draft.discard", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            appended(model, source(3, 3), path)
    assert Path(f"{path}.partial").exists()
    calls = model.calls
    assert_is_source(appended(model, source(3, 3), path), (0, 3), (3, 3))
    assert model.calls <= calls + 1  # for the layout of its results
    assert not Path(f"{path}.partial").exists()


def test_a_model_that_was_trained_again_may_append(tmp_path, model):
    appended(model, source(0, 3), tmp_path / "cube.zarr")
    cube = appended(Logged(model.log, 3.0), source(3, 3), tmp_path / "cube.zarr")
    np.testing.assert_array_equal(cube.t[3:], 3 * source(3, 3).t)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "some steps": (
        {"ds": source(2, 5)},
        InvalidValueError,
        r"has 2 of the 5 steps along 'time' already, such as 2000-01-03.*; predict only those",
    ),
    "earlier": (
        {"ds": source(-9, 3)},
        InvalidValueError,
        "steps along 'time' must be later than .* ends at 2000-01-04.*, got 1999-12-23",
    ),
    "unsorted": (
        {"ds": source(9, 3).isel(time=[1, 0, 2])},
        InvalidValueError,
        "steps along 'time' must be later than",
    ),
    "grid": (
        {"ds": source(9, 3).assign_coords(lon=np.arange(64.0) + 1)},
        InvalidValueError,
        r"'lon' of the new steps differs from that of .*cube.zarr; write to another path",
    ),
    "size": ({"ds": source(9, 3).isel(lon=slice(9))}, InvalidValueError, "'lon' of the new steps"),
    "dtype": ({"ds": source(9, 3).astype("f8")}, InvalidValueError, "'t' of the new steps differs"),
    "names": (
        {"ds": source(9, 3).assign_coords(height=2.0)},
        InvalidValueError,
        r"either .*cube.zarr or the new steps lack \['height'\]",
    ),
    "targets": (
        {"ds": source(9, 3).rename(t="u")},
        InvalidValueError,
        r"was predicted with (targets|features) \['t'\], and the new steps are with \['u'\]",
    ),
    "windows": (
        {"ds": source(9, 3), "sample_size": {"lat": 2}},
        InvalidValueError,
        "was predicted with window .*'lat': 1.*, and the new steps are with .*'lat': 2",
    ),
    "no dates": (
        {"ds": source(9, 3).drop_vars("time").rename(time="z")},
        InvalidValueError,
        "append=True needs a cube with coordinates along time, got .*'z': 3",
    ),
    "calendar": (
        {"ds": source(9, 3).convert_calendar("360_day", align_on="date")},
        InvalidValueError,
        "'time' is stored as .*'proleptic_gregorian'.* steps need .*'360_day'",
    ),
    "overwrite": ({"overwrite": True}, InvalidValueError, "append must be False with overwrite"),
    "memory": ({"out": None}, InvalidValueError, "append must be False without out=, got True"),
    "netCDF": ({"out": "x.nc"}, InvalidValueError, "append must be False with out='.*x.nc', got"),
    "flag": ({"append": 1}, InvalidTypeError, "append must be True or False, got 1"),
}


@pytest.fixture(scope="module")
def three_days(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three_days")
    appended(Logged(folder / "log", 1.0), source(0, 4), folder / "cube.zarr")
    return folder / "cube.zarr"


@pytest.mark.parametrize("kind", BAD)
def test_what_cannot_be_appended_is_refused_before_any_work(three_days, model, kind):
    options, error, message = BAD[kind]
    before = tree(three_days)
    with pytest.raises(error, match=message):
        appended(model, **{"ds": source(9, 3), "out": three_days, **options})
    assert model.calls <= 1  # for the layout of its results
    assert tree(three_days) == before
    assert not Path(f"{three_days}.partial").exists()


@pytest.mark.parametrize("kind", ["zarr", "notes"])
def test_nothing_is_appended_to_what_is_not_ours(tmp_path, model, kind):
    if kind == "zarr":
        source(0, 3).to_zarr(tmp_path / "cube.zarr")
    else:
        (tmp_path / "cube.zarr").mkdir()
    with pytest.raises(StoreExistsError, match="was not written by predict_cube, so nothing is"):
        appended(model, source(9, 3), tmp_path / "cube.zarr")


def test_steps_are_appended_to_a_cube_of_a_version_without_a_list_of_files(tmp_path, model):
    out = tmp_path / "cube.zarr"
    predict_cube(model, source(0, 3), out=out, progress=False)
    shutil.rmtree(out / "manifest")
    assert_is_source(appended(model, source(3, 2), out), (0, 3), (3, 2))
    assert not (out / "manifest").exists()  # it would vouch for files that nobody has compared
    with pytest.raises(StoreExistsError, match="has lost the list of what was written"):
        predict_cube(model, source(0, 3), out=out, overwrite=True, progress=False)


def test_hours_follow_days_if_the_first_call_appends_too(tmp_path, model):
    hour = np.timedelta64(6, "h")
    later = source(3, 2).assign_coords(time=source(3, 2).time + hour)
    first = source(0, 3)
    appended(model, first, tmp_path / "cube.zarr")
    cube = appended(model, later, tmp_path / "cube.zarr")
    assert (cube.time[3:].values == later.time.values).all()
    predict_cube(model, first, out=tmp_path / "days.zarr", progress=False)
    with pytest.raises(InvalidValueError, match=r"'time' is stored as .*'days .* need .*'hours "):
        appended(model, later, tmp_path / "days.zarr")


@pytest.mark.parametrize("times", ["noleap", "numbers"])
def test_calendars_and_numbers_of_steps_are_appended(tmp_path, model, times):
    whole = source(0, 12)
    if times == "noleap":
        whole = whole.convert_calendar("noleap", align_on="date")
    else:
        whole = whole.assign_coords(time=np.arange(12))
    bounds = xr.concat([whole.time, whole.time], "bnds").transpose()
    whole = whole.assign_coords(time_bnds=bounds)
    whole.time.attrs["bounds"] = "time_bnds"
    for first, last in ((0, 5), (5, 7), (7, 12)):
        cube = appended(model, whole.isel(time=slice(first, last)), tmp_path / "cube.zarr")
    assert (cube.time.values == whole.time.values).all()
    assert (cube.time_bnds.values == whole.time_bnds.values).all()
    np.testing.assert_array_equal(cube.t, whole.t)


# --- forecast cubes, of which the output takes any -------------------------------------------


def forecast(starts: np.ndarray, leads: int, monthly: bool = True) -> xr.Dataset:
    """Return a forecast from each start, with another value in each cell."""
    unit = "M" if monthly else "D"
    starts = starts.astype(f"M8[{unit}]")
    valid = (starts[:, None] + np.arange(1, leads + 1)).astype("M8[ns]")
    inits = starts.astype("M8[ns]")
    shape = (len(inits), leads, 5, 6)
    values = starts.astype(int)[:, None, None, None] * 1000.0 + np.arange(
        math.prod(shape[1:])
    ).reshape(shape[1:])
    lead = np.median((valid - inits[:, None]).astype(int), axis=0).astype("m8[ns]")
    return xr.Dataset(
        {"t": (("init_time", "lead_time", "lat", "lon"), values.astype("f4"))},
        coords={
            "init_time": inits,
            "lead_time": lead,
            "valid_time": (("init_time", "lead_time"), valid),
            "lat": np.linspace(-80, 80, 5),
            "lon": np.arange(6.0),
        },
        attrs={"ml4cube_prediction": json.dumps({"targets": ["t"]})},
    )


def put(ds: xr.Dataset, out: Any, chunks: Mapping[str, int], **options: Any) -> xr.Dataset:
    """Write a cube through the output, block by block."""
    sizes = {dim: min(chunks.get(str(dim), n), n) for dim, n in ds.sizes.items()}
    shape = tuple(sizes[dim] for dim in ds.t.dims)
    gaps = da.full(ds.t.shape, np.nan, dtype="f4", chunks=shape)
    template = ds.assign(t=ds.t.variable.copy(data=gaps))
    template.t.encoding = {"chunks": shape, "_FillValue": np.float32("nan")}
    output = make_output(output_location(out), template, ("t",), World.single("cpu"), **options)
    if not output.is_written:
        output.begin()
        blocks = Grid.blocks(dict(ds.t.sizes), sizes)
        for number in range(len(blocks)):
            slices = blocks.block(number).slices
            output.writer(number, {"t": (slices, ds.t.variable.isel(slices))})
        output.publish()
    return output.result()


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [{}, {"init_time": 3, "lead_time": 1, "lat": 2}])
def test_monthly_forecasts_are_appended_though_their_leads_differ_in_days(tmp_path, chunks):
    starts = np.arange("2000-01", "2002-01", dtype="M8[M]")
    parts = np.split(starts, [7, 8, 9, 12])
    for part in parts:
        cube = put(forecast(part, 2), tmp_path / "cube.zarr", chunks, append=True)
    whole = forecast(starts, 2)
    for name in ("t", "init_time", "valid_time", "lat"):
        np.testing.assert_array_equal(cube[name], whole[name], err_msg=name)
    later = forecast(starts + 24, 3).isel(lead_time=slice(1, None))
    with pytest.raises(InvalidValueError, match="'lead_time' of the new steps differs"):
        put(later, tmp_path / "cube.zarr", chunks, append=True)


def test_daily_leads_must_be_equal(tmp_path):
    days = np.arange("2000-01-01", "2000-01-05", dtype="M8[D]")
    put(forecast(days, 10, monthly=False).isel(lead_time=[9]), tmp_path / "a.zarr", {}, append=True)
    later = forecast(days + 9, 11, monthly=False).isel(lead_time=[10])
    with pytest.raises(InvalidValueError, match="'lead_time' of the new steps differs"):
        put(later, tmp_path / "a.zarr", {}, append=True)


def test_two_runs_at_once_do_not_write_over_one_another(tmp_path):
    """The second one began before the first one had appended."""
    months = np.arange("2000-01", "2001-01", dtype="M8[M]")
    put(forecast(months[:3], 2), tmp_path / "cube.zarr", {}, append=True)
    late, path = forecast(months[4:6], 2), tmp_path / "cube.zarr"
    gaps = late.assign(t=late.t.variable.copy(data=da.full(late.t.shape, np.nan, dtype="f4")))
    gaps.t.encoding = {"chunks": late.t.shape, "_FillValue": np.float32("nan")}
    output = make_output(path, gaps, ("t",), World.single("cpu"), append=True)
    put(forecast(months[3:4], 2), path, {}, append=True)
    output.begin()
    slices = {str(dim): slice(0, n) for dim, n in late.t.sizes.items()}
    output.writer(0, {"t": (slices, late.t.variable)})
    output.publish()
    np.testing.assert_array_equal(output.result().t, forecast(months[:6], 2).t)


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 4)), min_size=1, max_size=3),
    st.data(),
)
def test_steps_are_copied_chunk_by_chunk(sizes, data):
    shape, chunks = zip(*sizes, strict=True)
    axis = data.draw(st.integers(0, len(shape) - 1))
    first = data.draw(st.integers(0, shape[axis] - 1))
    target = zarr.create_array(MemoryStore(), shape=shape, chunks=chunks, dtype="f8")
    target[...] = before = np.arange(math.prod(shape)).reshape(shape) + 1.0
    added = -np.take(before, range(first, shape[axis]), axis)
    _copy(added, target, axis, first)
    expected = np.concatenate([np.take(before, range(first), axis), added], axis)
    np.testing.assert_array_equal(target[...], expected)
    parts = list(_chunks(shape, chunks, axis, first))
    assert len({tuple(s.start // c for s, c in zip(p, chunks, strict=True)) for p in parts}) == len(
        parts
    )
