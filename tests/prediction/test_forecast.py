"""Forecast cubes: every init, lead and cell is what a slow loop over windows gives."""

from __future__ import annotations

import datetime
import itertools
import math

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from ml4cube.cube.reader import CubeReader
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.errors import InvalidValueError
from ml4cube.prediction import predict_cube
from ml4cube.prediction.placing import extended
from ml4cube.training.ranks.dist import launch
from tests.cubes import cell_id_cube
from tests.distributed_runner import kept_ranks


def mixing(x: np.ndarray, leads: int) -> np.ndarray:
    """One target from all channels, steps and cells of a window: (C, n_in, ...) -> (leads, ...)."""
    cells = 1 + np.arange(x[0, 0].size).reshape(x.shape[2:])
    summed = sum((c + 1) * x[c, step] * (step + 1) for c, step in np.ndindex(*x.shape[:2]))
    return np.stack([cells * summed + lead + x[0].mean() for lead in range(leads)])


class Mixing(torch.nn.Module):
    """`mixing` of batches whose windows have some dims; without that of time there is one step."""

    def __init__(self, leads: int, layout=(("time", "lat", "lon"), ("lat", "lon"))) -> None:
        super().__init__()
        self.leads, (self.x_dims, self.y_dims) = leads, layout

    def forward(self, x):
        windows = xr.DataArray(x.double().numpy(), dims=("n", "c", *self.x_dims))
        windows = windows if "time" in self.x_dims else windows.expand_dims("time")
        windows = windows.transpose("n", "c", "time", ...)
        y = np.stack([mixing(window, self.leads) for window in windows.values])
        result = xr.DataArray(y, dims=("n", *windows.dims[2:]))
        result = result if "time" in self.y_dims else result.isel(time=0)
        return torch.from_numpy(result.transpose("n", *self.y_dims).values[:, None])


@st.composite
def forecasts(draw):
    dims = draw(st.permutations(["time", "lat", "lon"]))[: draw(st.integers(2, 3))]
    assume_time = "time" if "time" in dims else dims[0]
    dims = ["time" if dim == assume_time else dim for dim in dims]
    n_in, leads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    offset = n_in + draw(st.integers(0, 1))
    shape = {
        dim: offset + leads + draw(st.integers(2, 4)) if dim == "time" else draw(st.integers(2, 6))
        for dim in dims
    }
    cube = cell_id_cube(
        shape,
        np.float64,
        gaps=draw(st.sampled_from([0.0, 0.2, 0.6])),
        seed=draw(st.integers(0, 99)),
        calendar=draw(st.sampled_from([None, "noleap", "360_day"])),
        dask_chunks=draw(st.none() | st.fixed_dictionaries({d: st.integers(1, 4) for d in dims})),
        names=("a", "b"),
    )
    cube = cube.assign(h=cube.a.isel(time=0, drop=True).fillna(0) / 10)
    cube["a"] = cube.a.transpose(*draw(st.permutations(dims)))
    assume(np.isfinite(cube.a).any() and np.isfinite(cube.b).any())
    size = {dim: draw(st.integers(1, n)) for dim, n in shape.items() if dim != "time"}
    overlap = {dim: draw(st.sampled_from([0.0, 0.5])) for dim in size}
    return cube, n_in, leads, offset, size, overlap


def taper(size: int, shared: int) -> list[float]:
    return [
        math.sin(math.pi / 2 * min((min(i, size - 1 - i) + 0.5) / shared, 1)) ** 2 if shared else 1
        for i in range(size)
    ]


def slow_forecast(cube, data, n_in, leads, offset, size, overlap):
    """Every init and every window by hand, one cell at a time."""
    dims = [dim for dim in cube.sizes if dim != "time"]
    order = ("time", *dims)
    channels, gaps = [], {}
    for name in data.features:
        values = np.broadcast_to(
            cube[name].transpose(*(d for d in order if d in cube[name].dims)).values,
            [cube.sizes[d] for d in order],
        )
        gaps[name] = np.isnan(values)
        s = data.statistics[name]
        filled = np.where(gaps[name], data.metadata.fill[name].mean, values)
        channels.append((filled - s.mean) / (s.std or 1))
    channels = np.stack(channels)
    n_time = cube.sizes["time"]
    inits = range(n_in - 1, n_time)
    shared, starts = [], []
    for dim in dims:
        n, fraction = size[dim], overlap[dim]
        cells = min(max(math.floor(fraction * n + 0.5), 1), n - 1) if fraction and n > 1 else 0
        shared.append(cells)
        last = cube.sizes[dim] - n
        starts.append(sorted({*range(0, last + 1, n - cells), last}))
    shape = [cube.sizes[dim] for dim in dims]
    result = np.full((len(inits), leads, *shape), np.nan)
    target = data.statistics["a"]
    for i, init in enumerate(inits):
        steps = slice(init - n_in + 1, init + 1)
        total, weight = np.zeros((leads, *shape)), np.zeros((leads, *shape))
        for corner in itertools.product(*starts):
            window = tuple(slice(c, c + size[d]) for c, d in zip(corner, dims, strict=True))
            y = mixing(channels[(slice(None), steps, *window)], leads)
            for cell in np.ndindex(*(size[dim] for dim in dims)):
                w = math.prod(
                    taper(size[d], s)[c] for d, s, c in zip(dims, shared, cell, strict=True)
                )
                place = tuple(a + b for a, b in zip(corner, cell, strict=True))
                for lead in range(leads):
                    total[(lead, *place)] += w * y[(lead, *cell)]
                    weight[(lead, *place)] += w
        result[i] = total / weight * (target.std or 1) + target.mean
        result[i][:, gaps["a"][steps].all(axis=0)] = np.nan
    return xr.DataArray(result, dims=("init_time", "lead_time", *dims)), inits


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(forecasts(), st.integers(1, 9), st.sampled_from([1, 40, 10**6]))
def test_forecasts_are_those_of_a_slow_loop(case, batch_size, block_cells):
    cube, n_in, leads, offset, size, overlap = case
    data = PTXrDataset(
        cube,
        "a",
        ["a", "b", "h"],
        sample_size={"time": n_in, **size},
        target_offset={"time": offset},
        target_size={"time": leads},
        fill_method={"a": "mean", "b": "mean", "h": "mean"},
        drop_nan=None,
        dtype="float64",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ml4cube.prediction.sharing._BLOCK_CELLS", (block_cells, block_cells))
        result = predict_cube(
            Mixing(leads, data.layout[:2]), cube, data, overlap=overlap, batch_size=batch_size
        )
    expected, inits = slow_forecast(cube, data, n_in, leads, offset, size, overlap)
    assert result.a.dims == ("init_time", "lead_time", *(d for d in cube.a.dims if d != "time"))
    np.testing.assert_allclose(
        result.a.transpose(*expected.dims), expected, rtol=2e-5, atol=1e-4 * cube.a.size
    )
    assert (result.init_time.values == cube.time.values[list(inits)]).all()
    for i, j in np.ndindex(*result.valid_time.shape):
        lead = offset - n_in + 1 + j
        later = pd.Index([cube.time.values[inits[i]]])[0] + datetime.timedelta(days=lead)
        assert pd.Index([result.valid_time.values[i, j]])[0] == later
        assert result.lead_time.values[j] == np.timedelta64(lead, "D")


def daily(n: int = 9, **more) -> xr.Dataset:
    return cell_id_cube({"time": n, "lat": 4, "lon": 6}, names=("a", "b"), **more)


def one_step(cube: xr.Dataset, **more) -> PTXrDataset:
    windows = {"sample_size": {"lat": 2, "lon": 3}, "target_offset": {"time": 1}}
    return PTXrDataset(cube, "a", **{"features": ["a", "b"], **windows, **more})


def first(x):
    return x[:, :1]


def test_the_samples_of_a_data_set_and_the_cube_agree(tmp_path):
    """Of a cube and of a store, whose samples hold inputs and targets."""
    cube = daily()
    options = {"target_offset": {"time": 2}, "target_size": {"time": 1}}
    model = Mixing(1)
    whole = {"sample_size": {"time": 3, "lat": 2, "lon": 3}, "data_split": 1.0}
    path = tmp_path / "train.zarr"
    MultiProcSampler(cube, train_cube=path, test_cube=tmp_path / "t.zarr", nproc=1, **whole).run()
    for data in (
        PTXrDataset(cube, "a", ["a", "b"], sample_size={"time": 2, "lat": 2, "lon": 3}, **options),
        PTXrDataset(path, "a", ["a", "b"], sample_size={"time": 2}, **options),
    ):
        result = predict_cube(model, cube, data)
        x, y = data.take(range(len(data)))
        y = model(x).float().reshape(y.shape)
        rows = data.to_dataset((x, y), range(len(data)), unscale=True)
        for row in range(len(data)):
            sample = rows.isel(samples=row)
            lat, lon = int(sample.lat_index), int(sample.lon_index)
            found = result.a.isel(lat=slice(lat, lat + 2), lon=slice(lon, lon + 3)).sel(
                init_time=cube.time[int(sample.time_index) + 1]
            )
            np.testing.assert_allclose(
                found[0],
                sample.a_target.values.reshape(2, 3),
                rtol=1e-4,
                atol=1e-2,
                err_msg=str(row),
            )


def test_a_persistence_model_gives_the_source_and_the_future_has_dates():
    cube = daily()
    result = predict_cube(first, cube, one_step(cube), overlap=0.5)
    np.testing.assert_allclose(result.a[:, 0], cube.a, rtol=1e-5, atol=1e-4)
    assert result.valid_time.values[-1, 0] == np.datetime64("2000-01-10")
    assert result.valid_time.attrs["standard_name"] == "time"
    assert result.init_time.attrs["standard_name"] == "forecast_reference_time"
    assert result.lead_time.attrs["standard_name"] == "forecast_period"
    assert "time" not in result.variables


def test_what_is_written_is_what_is_returned(tmp_path):
    cube = daily(calendar="noleap")
    data = one_step(cube)
    whole = predict_cube(first, cube, data)
    for name in ("cube.zarr", "cube.nc"):
        predict_cube(first, cube, data, out=tmp_path / name)
        with xr.open_dataset(tmp_path / name, decode_timedelta=True) as written:
            np.testing.assert_array_equal(written.a, whole.a)
            assert (written.valid_time.values == whole.valid_time.values).all()
            assert (written.lead_time.values == whole.lead_time.values).all()


def test_coordinate_features_are_those_of_training():
    cube = daily()
    data = one_step(cube, coord_features=["lat", "dayofyear"])
    seen = []

    def model(x):
        seen.append(x)
        return x[:, :1]

    predict_cube(model, cube, data, init_times=cube.time[:-1], batch_size=1000)
    trained, _ = data.take(range(len(data)))
    assert data.channels[2:] == (
        "sin(lat)", "cos(lat)", "sin(dayofyear)", "cos(dayofyear)",
    )  # fmt: skip
    key = [tuple(window.ravel().tolist()) for window in trained.numpy().round(4)]
    assert sorted(key) == sorted(
        tuple(window.ravel().tolist()) for window in torch.cat(seen).numpy().round(4)
    )


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ("2000-01-03", [2]),
        (["2000-01-03", np.datetime64("2000-01-05")], [2, 4]),
        (slice("2000-01-03", "2000-01-05"), [2, 3, 4]),
        (pd.Timestamp("2000-01-09"), [8]),
        ("2000", list(range(1, 9))),
    ],
)
def test_init_times_choose_the_starts(wanted, found):
    cube = daily()
    data = one_step(cube, sample_size={"time": 2, "lat": 4}, target_offset={"time": 2})
    if wanted == "2000":
        cube = cube.isel(time=slice(1, None)).assign_coords(time=cube.time[:-1])
        with pytest.raises(InvalidValueError, match=r"init_times: .*2000-01-01.* too little past"):
            predict_cube(first, cube, data, init_times=wanted)
        return
    result = predict_cube(lambda x: x[:, :1], cube, data, init_times=wanted)
    assert (result.init_time.values == cube.time.values[found]).all()


def test_starts_far_apart_are_read_one_by_one(monkeypatch):
    read = []
    original = CubeReader.read

    def noting(self, slices):
        read.append(slices["time"].stop - slices["time"].start)
        return original(self, slices)

    cube = daily(400)
    data = one_step(cube.isel(time=slice(0, 9)))
    monkeypatch.setattr(CubeReader, "read", noting)
    result = predict_cube(first, cube, data, init_times=cube.time[[0, 200, 399]])
    assert result.sizes["init_time"] == 3
    assert max(read) == 1


@pytest.mark.parametrize("freq", ["MS", "ME", "15D", "YS", "mid"])
@pytest.mark.parametrize("calendar", ["standard", "noleap"])
def test_dates_beyond_the_end_follow_the_calendar(freq, calendar):
    n, later = 14, 3
    if freq == "mid":
        starts = xr.date_range("2000-01-01", periods=n + later, freq="MS", calendar=calendar)
        days = xr.DataArray(starts, dims="time").dt.days_in_month.values
        halves = [pd.Timedelta(days=int(d)).to_pytimedelta() / 2 for d in days]
        dates = pd.Index([date + half for date, half in zip(starts, halves, strict=True)])
    else:
        dates = xr.date_range("2000-01-01", periods=n + later, freq=freq, calendar=calendar)
    cube = daily(n).assign_coords(time=np.asarray(dates)[:n])
    data = one_step(cube, target_size={"time": later}, sample_size={"lat": 4})
    result = predict_cube(lambda x: x[:, :1, None].expand(-1, -1, later, -1), cube, data)
    expected = np.lib.stride_tricks.sliding_window_view(np.asarray(dates)[1:], later)
    assert (result.valid_time.values == expected).all()
    if freq in ("MS", "ME"):
        assert result.lead_time.dtype.kind == "m"
        assert "median" in result.lead_time.attrs["comment"]


def test_a_rollout_gives_back_results_as_inputs_and_takes_forcings_of_their_time():
    cube = daily()
    data = one_step(cube)
    a, b = data.statistics["a"], data.statistics["b"]

    def step(x):
        return 0.5 * x[:, :1] + x[:, 1:]

    result = predict_cube(step, cube, data, rollout=3)
    assert result.sizes["init_time"] == cube.sizes["time"] - 2  # forcings of two later steps
    for init in range(result.sizes["init_time"]):
        state = (cube.a.values[init] - a.mean) / a.std
        for lead in range(3):
            state = 0.5 * state + (cube.b.values[init + lead] - b.mean) / b.std
            expected = state * a.std + a.mean
            np.testing.assert_allclose(result.a[init, lead], expected, rtol=1e-4, atol=1e-3)
    alone = predict_cube(first, cube[["a"]], one_step(cube[["a"]], features=["a"]), rollout=4)
    assert alone.sizes["init_time"] == cube.sizes["time"]
    np.testing.assert_allclose(alone.a[:, 3], cube.a, rtol=1e-5, atol=1e-4)
    assert predict_cube(step, cube, data, rollout=1).a.equals(predict_cube(step, cube, data).a)


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.permutations(["time", "lat", "lon"]),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(2, 3),
    st.integers(1, 3),
)
def test_rollouts_are_those_of_a_slow_loop(dims, n_in, p, calls, trained_calls):
    sizes = {"time": n_in + 3 * p + 2, "lat": 2, "lon": 3}
    cube = cell_id_cube({dim: sizes[dim] for dim in dims}, np.float64, names=("a", "b"))
    cube["b"] = cube.b * np.sin(cube.b)
    data = PTXrDataset(
        cube,
        "a",
        ["b", "a"],
        sample_size={"time": n_in, "lat": 2, "lon": 3},
        target_offset={"time": n_in},
        target_size={"time": p},
        rollout=trained_calls,
        dtype="float64",
    )

    def reduced(x):  # so that results stay small
        return 0.01 * Mixing(p, tuple(map(tuple, data.step_sizes[:2])))(x)

    result = predict_cube(reduced, cube, data, rollout=calls)
    assert result.sizes["lead_time"] == calls * p
    assert result.sizes["init_time"] == sizes["time"] - n_in + 1 - (calls - 1) * p
    scaled = {
        name: (cube[name] - data.statistics[name].mean) / data.statistics[name].std
        for name in ("b", "a")
    }
    order = [dim for dim in dims if dim != "time"]  # in which the model counts cells
    b, a = (scaled[name].transpose("time", *order).values for name in ("b", "a"))
    for init in range(result.sizes["init_time"]):
        state = list(a[init : init + n_in])
        for call in range(calls):
            steps = slice(init + call * p, init + call * p + n_in)
            x = np.stack([b[steps], np.stack(state[-n_in:])])
            state += list(0.01 * mixing(x, p))
        expected = np.stack(state[n_in:]) * data.statistics["a"].std + data.statistics["a"].mean
        found = result.a.isel(init_time=init).transpose("lead_time", *order)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


def test_a_rollout_of_several_steps_a_call_keeps_gaps_filled():
    cube = daily(10)
    cube.a[:, 1, 2] = np.nan  # land
    data = PTXrDataset(
        cube,
        "a",
        ["a"],
        sample_size={"time": 3, "lat": 4, "lon": 6},
        target_offset={"time": 3},
        target_size={"time": 2},
        fill_method={"a": "constant"},
        const=7.0,
        drop_nan=None,
        scale_fn=None,
    )
    seen = []

    def model(x):
        seen.append(x)
        return x[:, :, -2:] + 1

    result = predict_cube(model, cube, data, rollout=2, batch_size=1000)
    np.testing.assert_array_equal(torch.cat(seen)[:, 0, :, 1, 2], 7)
    assert result.a[:, :, 1, 2].isnull().all()
    for init in range(result.sizes["init_time"]):
        known = cube.a.values[init + 1 : init + 3]
        np.testing.assert_allclose(result.a[init, :2], known + 1)
        np.testing.assert_allclose(result.a[init, 2:], known + 2)


@pytest.mark.parametrize("calendar", ["standard", "noleap", "360_day"])
@pytest.mark.parametrize("place", ["start", "15th", "20th", "middle", "end"])
@pytest.mark.parametrize(("first", "n"), [(0, 2), (6, 2), (6, 3), (1, 5), (0, 14), (5, 20)])
def test_dates_of_months_keep_their_place_in_the_month(calendar, place, first, n):
    starts = xr.date_range("2003-01-01", periods=30, freq="MS", calendar=calendar)
    lengths = xr.DataArray(starts, dims="time").dt.days_in_month.values
    days = {"start": 0, "15th": 14, "20th": 19, "middle": lengths / 2, "end": lengths - 1}[place]
    into = [datetime.timedelta(days=float(day)) for day in np.broadcast_to(days, len(starts))]
    dates = pd.Index([date + far for date, far in zip(starts, into, strict=True)]).values
    known = xr.Variable("time", dates[first : first + n])
    assert (extended(known, 4).values == dates[first : first + n + 4]).all()


@pytest.mark.parametrize("fill", ["mean", "sample_mean", "constant", None])
@pytest.mark.parametrize("n_in", [1, 2])
def test_a_rollout_does_not_see_what_the_cube_has_later(fill, n_in):
    cube = daily(9, gaps=0.5)  # clouds: later there are values in the same cells
    windows = {"sample_size": {"time": n_in, "lat": 4, "lon": 6}}
    data = one_step(
        cube,
        features=["a"],
        target_offset={"time": n_in},
        target_size={"time": 1},
        fill_method={"a": fill} if fill else None,
        const=7.0 if fill == "constant" else None,
        drop_nan=None,
        **windows,
    )

    def model(x):
        last = x[:, :, -1] if n_in > 1 else x
        return last.nan_to_num(3.0) + last.nan_to_num(3.0).mean((2, 3), keepdim=True)

    def forecast(part):
        return predict_cube(
            model, part, data, rollout=3, init_times=cube.time[4], keep_gaps=False
        ).a.values

    np.testing.assert_array_equal(forecast(cube), forecast(cube.isel(time=slice(5))))


def test_every_step_of_a_rollout_draws_its_own_random_numbers():
    cube = daily(3)[["a"]]
    data = one_step(cube, features=["a"], scale_fn=None, sample_size={"lat": 4, "lon": 6})
    result = predict_cube(lambda x: x + torch.randn_like(x), cube, data, rollout=4, samples=200)
    spread = result.a_spread.mean(("init_time", "lat", "lon"))
    np.testing.assert_allclose(spread, np.sqrt([1, 2, 3, 4]), rtol=0.1)


def test_bad_forecasts_are_refused_in_one_line():
    cube = daily()
    data, plain = one_step(cube), PTXrDataset(cube, features=["a"], sample_size={"lat": 2})
    steps = one_step(cube, sample_size={"time": 2, "lat": 4}, target_offset={"time": 3})
    bad = [
        (plain, {"init_times": "2000-01-02"}, "init_times needs a data set with target_offset"),
        (plain, {"rollout": 2}, "rollout=2 needs a data set with target_offset"),
        (data, {"rollout": 0}, "rollout must be at least 1, got 0"),
        (data, {"init_times": "2003"}, "init_times must be among the dates of 'time', 2000-01-01"),
        (data, {"init_times": ["2000-01-02", "2003-01-01"]}, "init_times must be among the dates"),
        (data, {"rollout": 3, "init_times": "2000-01-08"}, "too little future"),
        (steps, {"init_times": "2000-01-01"}, "too little past"),
        (steps, {"rollout": 2}, "target_offset along 'time' must be 2, the cells of X, got 3"),
        (steps, {"sample_size": {"time": 3}}, "must be that of the training, 2, got 3"),
        (
            one_step(cube, features=["b"]),
            {"rollout": 2},
            r"one of the targets \['a'\] must be a feature",
        ),
        (one_step(cube, target_size={"time": 3}), {}, "must return 3 steps along 'time'"),
    ]
    for source, more, message in bad:
        with pytest.raises(InvalidValueError, match=message):
            predict_cube(first, cube, source, **more)
    with pytest.raises(InvalidValueError, match="unknown variable 'b'"):
        predict_cube(first, cube[["a"]], data)


def forecast_on_rank(path: str | None) -> dict:
    torch.set_num_threads(1)
    cube = daily(12, gaps=0.1)
    data = one_step(cube, fill_method={"a": "mean", "b": "mean"}, drop_nan=None)
    result = predict_cube(first, cube, data, overlap=0.5, rollout=2, out=path)
    return result.a.load().to_dict()


@pytest.mark.slow
@pytest.mark.parametrize("suffix", [None, ".zarr"])
def test_two_ranks_forecast_what_one_does(tmp_path, suffix):
    path = suffix and str(tmp_path / f"cube{suffix}")
    with kept_ranks():
        result = xr.DataArray.from_dict(launch(forecast_on_rank, 2, path))
    alone = xr.DataArray.from_dict(forecast_on_rank(None))
    np.testing.assert_array_equal(result, alone)


def test_missing_dates_are_warned_of():
    cube = daily(12)
    data = one_step(cube)
    with pytest.warns(UserWarning, match="target_offset counts cells, but steps along 'time'"):
        predict_cube(first, cube.isel(time=[0, 1, 2, 3, 7, 8, 9]), data)


def test_targets_beyond_the_inputs_in_space_are_no_forecast():
    lat, lon = np.meshgrid(np.linspace(50, 60, 12), np.linspace(0, 10, 14), indexing="ij")
    coords = {"lat": (("y", "x"), lat), "lon": (("y", "x"), lon)}
    ds = xr.Dataset({"t": (("y", "x"), np.random.default_rng(0).normal(size=lat.shape))}, coords)
    data = PTXrDataset(ds, to_pred="t", sample_size={"x": 2}, target_offset={"x": 2})
    with pytest.raises(InvalidValueError, match="target_offset along 'x' is no lead time"):
        predict_cube(torch.nn.Identity(), ds, data, progress=False)
