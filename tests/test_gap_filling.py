"""Filling gaps, against loops over single cells; and scores on artificial gaps."""

import warnings

import dask
import iris_sample_data
import numpy as np
import pytest
import scipy.ndimage
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.core.missing import FILLED_ATTR
from ml4cube.cube.variables import data_variables
from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.evaluation import area_weights
from ml4cube.gap_filling import fill_gaps, hide_cells
from ml4cube.gap_filling.methods import METHODS
from ml4cube.splits import assign_time_split
from tests.cubes import no_compute

LONGEST = {"1": 1, "2": 2, "3-4": 4, "5-8": 8, "9-16": 16, "17-32": 32, ">32": 10**9}


def gappy_cube(seed=0, dims=("time", "lat", "lon"), calendar="noleap", share=0.3, n=26):
    """A season at every place plus noise, irregular dates, gaps of one step and of several."""
    rng = np.random.default_rng(seed)
    days = np.cumsum(rng.integers(20, 40, n))
    first = xr.date_range("2001-01-05", periods=1, calendar=calendar, use_cftime=True)
    time = first.values[0] + np.array([np.timedelta64(int(d), "D").astype(object) for d in days])
    # so that no two cells are equally far from a third
    lat, lon = np.array([-50.0, -11.0, 1.0, 43.0]), np.array([10.0, 93.0, 190.0, 350.0, 357.0])
    season = 10 * np.cos(2 * np.pi * days / 365)[:, None, None]
    values = season + lat[None, :, None] / 10 + rng.normal(0, 1, (n, 4, 5))
    gaps = rng.random(values.shape) < share
    gaps[5:9, 1, :3] = True
    values[gaps] = rng.choice([np.nan, np.inf], gaps.sum())
    values[:, 3, 4] = np.nan  # land
    ds = xr.Dataset(
        {"t": (("time", "lat", "lon"), values.astype("f4"), {"units": "K"})},
        {
            "time": ("time", time),
            "lat": ("lat", lat, {"units": "degrees_north"}),
            "lon": ("lon", lon, {"units": "degrees_east"}),
        },
    )
    return ds.transpose(*dims)


def day_numbers(ds):
    since = ds["time"].values - ds["time"].values[0]
    return [d.total_seconds() / 86400 for d in since]


def great_circle(lat1, lon1, lat2, lon2):
    a, b, c, d = np.deg2rad([lat1, lon1, lat2, lon2])
    h = np.sin((c - a) / 2) ** 2 + np.cos(a) * np.cos(c) * np.sin((d - b) / 2) ** 2
    return 2 * np.arcsin(np.sqrt(min(h, 1.0)))


def one_estimate(method, values, known, used, ds, t, i, j, beyond_ends, neighbours):
    """The value in one gap, the slow way; NaN if there is none."""
    days, months = day_numbers(ds), ds["time"].dt.month.values
    if method == "climatology":
        found = [
            values[s, i, j]
            for s in range(len(days))
            if months[s] == months[t] and known[s, i, j] and used[s]
        ]
        return np.mean(found) if found else np.nan
    if method == "spatial":
        lat, lon = ds["lat"].values, ds["lon"].values
        near = sorted(
            (great_circle(lat[i], lon[j], lat[a], lon[b]), a, b)
            for a in range(4)
            for b in range(5)
            if known[t, a, b]
        )[:neighbours]
        weights = [1 / distance**2 for distance, _, _ in near]
        total = sum(w * values[t, a, b] for w, (_, a, b) in zip(weights, near, strict=True))
        return total / sum(weights) if near else np.nan
    assert method in {"linear", "nearest"}
    before = [s for s in range(t) if known[s, i, j]]
    after = [s for s in range(t, len(days)) if known[s, i, j]]
    if before and after and method == "linear":
        a, b = before[-1], after[0]
        share = (days[t] - days[a]) / (days[b] - days[a])
        return values[a, i, j] + share * (values[b, i, j] - values[a, i, j])
    if not (before or after) or (method == "linear" and not beyond_ends):
        return np.nan
    ends = before[-1:] + after[:1]
    return values[min(ends, key=lambda s: abs(days[s] - days[t])), i, j]


def estimates(method, values, known, wanted, used, ds, beyond_ends, neighbours):
    found = np.full(values.shape, np.nan)
    for t, i, j in np.argwhere(wanted):
        found[t, i, j] = one_estimate(
            method, values, known, used, ds, t, i, j, beyond_ends, neighbours
        )
    return found


def lengths_of_gaps(known):
    """Steps of the gap along time that each cell is in, 0 in known cells."""
    lengths = np.zeros(known.shape, int)
    for t, i, j in np.argwhere(~known):
        first = last = t
        while first > 0 and not known[first - 1, i, j]:
            first -= 1
        while last < len(known) - 1 and not known[last + 1, i, j]:
            last += 1
        lengths[t, i, j] = last - first + 1
    return lengths


@pytest.mark.slow
@settings(max_examples=15)
@given(
    seed=st.integers(0, 99),
    dims=st.permutations(("time", "lat", "lon")),
    calendar=st.sampled_from(["standard", "noleap", "360_day"]),
    method=st.sampled_from([*METHODS]),
    beyond_ends=st.booleans(),
    neighbours=st.sampled_from([1, 3, 50]),
    has_mask=st.booleans(),
    has_split=st.booleans(),
    chunks=st.sampled_from([None, {"time": 7, "lat": 3}]),
)
def test_cells_and_scores_are_those_of_a_loop_over_cells(
    seed, dims, calendar, method, beyond_ends, neighbours, has_mask, has_split, chunks
):
    ds = gappy_cube(seed, dims, calendar)
    used = np.ones(26, bool)
    if has_split:
        ds = assign_time_split(ds, 0.6)
        used = (ds["split"] == 1).all([d for d in ds["split"].dims if d != "time"]).values
    sea = xr.DataArray(np.random.default_rng(seed).random((4, 5)) < 0.8, dims=("lat", "lon"))
    mask = sea if has_mask else None
    given_cube = ds if chunks is None else ds.chunk(chunks)
    filled, scores = fill_gaps(
        given_cube, "t", method, mask=mask, beyond_ends=beyond_ends, cycle="month",
        neighbours=neighbours, seed=seed,
    )  # fmt: skip
    values = ds["t"].transpose("time", "lat", "lon").values.astype("f8")
    known = np.isfinite(values)
    allowed = np.broadcast_to(sea.values if has_mask else True, values.shape)
    args = (ds, beyond_ends, neighbours)
    found = estimates(method, values, known, ~known & allowed, used, *args)
    shown = filled["t"].transpose("time", "lat", "lon").values
    flags = filled["t_filled"].transpose("time", "lat", "lon").values
    is_filled = np.isfinite(found)
    np.testing.assert_allclose(shown[is_filled], found[is_filled], rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(shown[~is_filled], values[~is_filled].astype("f4"))
    np.testing.assert_array_equal(flags, np.where(known, 0, np.where(is_filled, 1, 2)))
    assert filled["t"].dims == ds["t"].dims
    assert filled["t"].dtype == np.float32

    # hidden are the known cells under gaps that are shifted by one number of steps
    hidden_cube = hide_cells(given_cube, "t", mask=mask, seed=seed)
    still_known = np.isfinite(hidden_cube["t"].transpose("time", "lat", "lon").values)
    hidden = known & ~still_known
    shifts = [np.roll(~known, s, axis=0) & known & allowed for s in range(1, 26)]
    assert any((hidden == shifted).all() for shifted in shifts)
    estimated = estimates(method, values, still_known, hidden, used, *args)
    lengths, real_lengths = lengths_of_gaps(still_known), lengths_of_gaps(known)
    areas = area_weights(ds) * xr.ones_like(ds["t"], dtype=float)
    weights = areas.transpose("time", "lat", "lon").values
    shortest = 0
    for name, longest in {**LONGEST, "all": None}.items():
        here = hidden if longest is None else hidden & (lengths > shortest) & (lengths <= longest)
        real = ~known & allowed
        if longest is not None:
            real &= (real_lengths > shortest) & (real_lengths <= longest)
        shortest = shortest if longest is None else longest
        scored = here & np.isfinite(estimated)
        one = scores.sel(variable="t", gap_length=name)
        assert one["gaps"] == real.sum()
        assert one["count"] == scored.sum()
        assert one["unpredicted"] == (here & ~scored).sum()
        if scored.any():
            error, weight = (estimated - values)[scored], weights[scored]
            np.testing.assert_allclose(one["bias"], np.average(error, weights=weight), atol=1e-6)
            rmse = np.sqrt(np.average(error**2, weights=weight))
            np.testing.assert_allclose(one["rmse"], rmse, atol=1e-6)
        else:
            assert np.isnan(one["rmse"])


@pytest.mark.parametrize("method", METHODS)
def test_lazy_cubes_stay_lazy_and_long_blocks_do_not_matter(method, monkeypatch):
    ds = gappy_cube()
    expected = fill_gaps(ds, method=method)
    monkeypatch.setattr("ml4cube.gap_filling.blocks._BLOCK_CELLS", 40)
    found = fill_gaps(ds.chunk(time=5), method=method)
    with dask.config.set(scheduler=no_compute):
        assert found.cube["t"].chunks is not None
        assert found.cube["t_filled"].chunks is not None
    xr.testing.assert_equal(found.cube.compute(), expected.cube)
    xr.testing.assert_allclose(found.scores, expected.scores)


@pytest.mark.parametrize("method", METHODS)
def test_what_a_method_learns_it_learns_from_train_cells(method):
    """Gaps whose neighbours in time and place are of train, with other values in the test part."""
    ds = assign_time_split(gappy_cube(n=60), 0.6)
    is_train = (ds["split"] == 1).all(["lat", "lon"]).values
    ds["t"][is_train.sum() - 1] = 1.0  # the last step of train has no gap
    other = ds.copy()
    other["t"] = ds["t"].where(ds["split"] == 1, 3 * ds["t"] + 50)
    filled, of_other = (fill_gaps(cube, "t", method, cycle="month").cube for cube in (ds, other))
    assert (filled["t_filled"].values[is_train] == 1).any()
    xr.testing.assert_equal(filled.isel(time=is_train), of_other.isel(time=is_train))


def test_a_fraction_of_the_steps_gets_artificial_gaps():
    ds = gappy_cube(n=40)
    all_hidden, some_hidden = (
        (hide_cells(ds, fraction=f)["t"].isnull() & np.isfinite(ds["t"])).values for f in (1.0, 0.3)
    )
    steps = some_hidden.any((1, 2))
    assert 0 < steps.sum() <= 12  # three of ten stretches of four steps
    np.testing.assert_array_equal(some_hidden[steps], all_hidden[steps])
    others = hide_cells(ds, fraction=0.3, seed=1)["t"].isnull() & np.isfinite(ds["t"])
    assert (some_hidden != others.values).any()


def test_levels_are_filled_one_by_one():
    ds = gappy_cube().expand_dims(level=[1.0, 2.0]).copy(deep=True)
    ds["level"].attrs["axis"] = "Z"
    ds["t"][1] += 100
    filled = fill_gaps(ds.transpose("lat", "level", "time", "lon"), method="spatial").cube
    one = fill_gaps(gappy_cube(), method="spatial").cube
    for level, offset in ((1, 0), (2, 100)):
        np.testing.assert_allclose(
            filled["t"].sel(level=level).transpose("time", "lat", "lon"), one["t"] + offset, 1e-5
        )


def test_maps_without_coordinates_are_filled_by_distance_in_cells():
    ds = xr.Dataset({"z": (("y", "x"), [[1.0, np.nan, 5.0], [np.nan, np.nan, 7.0]])})
    with pytest.warns(UserWarning, match="error of filling is unknown"):
        filled = fill_gaps(ds, method="spatial", neighbours=2).cube
    weights = [1.0, 1.0]
    assert filled["z"][0, 1] == np.average([1.0, 5.0], weights=weights)
    assert filled["z"][1, 0] == pytest.approx(np.average([1.0, 7.0], weights=[1, 1 / 4]))


def test_a_filled_variable_is_marked_and_its_flags_are_no_feature():
    ds = gappy_cube()
    filled = fill_gaps(ds).cube
    assert filled["t"].attrs[FILLED_ATTR] == "linear"
    assert filled["t"].attrs["ancillary_variables"] == "t_filled"
    assert filled["t_filled"].attrs["flag_meanings"] == "known filled gap"
    assert data_variables(filled) == ["t"]
    assert FILLED_ATTR not in ds["t"].attrs


def twice(batch):
    """A model of one feature."""
    return batch[:, :1] * 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["function", "module"])
def test_a_model_fills_what_it_predicts_and_is_scored_outside_train(kind):
    torch = pytest.importorskip("torch")
    model = twice
    if kind == "module":
        model = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.constant_(model.weight, 2.0)
    ds = gappy_cube()
    ds["x"] = ds["t"].copy(data=np.random.default_rng(1).normal(size=ds["t"].shape).astype("f4"))
    ds = assign_time_split(ds, 0.5)
    filled, scores = fill_gaps(ds, "t", model, predict={"progress": False})
    gaps = ~np.isfinite(ds["t"].values)
    np.testing.assert_allclose(filled["t"].values[gaps], 2 * ds["x"].values[gaps], rtol=1e-6)
    np.testing.assert_array_equal(filled["t"].values[~gaps], ds["t"].values[~gaps])
    hidden = hide_cells(ds, "t")["t"].isnull() & np.isfinite(ds["t"])
    scored = hidden & (ds["split"] != 1)
    one = scores.sel(variable="t", gap_length="all")
    assert one["count"] == scored.sum()
    error = (2 * ds["x"] - ds["t"]).where(scored).weighted(area_weights(ds))
    np.testing.assert_allclose(one["bias"], error.mean(), rtol=1e-5)
    with pytest.warns(UserWarning, match="has no split label"):
        fill_gaps(ds.drop_vars("split"), "t", model, predict={"progress": False})


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_the_score_tells_the_error_in_the_real_gaps(method):
    """In sea surface temperatures with gaps like clouds, whose values are known to the test."""
    with xr.open_dataset(f"{iris_sample_data.path}/ostia_monthly.nc") as ds:
        sst = ds["surface_temperature"].load()
    noise = np.random.default_rng(0).normal(size=sst.shape)
    clouds = scipy.ndimage.gaussian_filter(noise, (0.7, 2, 4)) > 0.03
    sea = sst.notnull().any("time")
    filled, scores = fill_gaps(sst.where(~clouds).to_dataset(), method=method, mask=sea)
    error = (filled["surface_temperature"] - sst).where(clouds)
    true_rmse = np.sqrt((error**2).weighted(area_weights(sst.to_dataset())).mean()).item()
    rmse = scores["rmse"].sel(variable="surface_temperature", gap_length="all").item()
    assert 0.8 < rmse / true_rmse < 1.3
    # hiding makes gaps longer; with the lengths of real gaps the error is nearer
    by_length = scores.isel(variable=0, gap_length=slice(1, None))
    weights = by_length["gaps"].where(by_length["rmse"].notnull(), 0)
    weighted = np.sqrt((by_length["rmse"] ** 2).weighted(weights).mean()).item()
    assert 0.85 < weighted / true_rmse < 1.15
    assert bool(filled["surface_temperature"].where(~sea).isnull().all())


def test_what_cannot_be_filled_is_refused():
    ds = gappy_cube()
    with pytest.raises(InvalidValueError, match=r"method must be 'linear'.*did you mean 'linear'"):
        fill_gaps(ds, method="linaer")
    with pytest.raises(InvalidValueError, match="needs a time dim, 't' has"):
        fill_gaps(ds.isel(time=0))
    with pytest.raises(InvalidValueError, match="increasing dates along 'time'; sort them"):
        fill_gaps(ds.isel(time=slice(None, None, -1)))
    with pytest.raises(InvalidTypeError, match="floating-point numbers, got 'n' of dtype int64"):
        fill_gaps(ds.assign(n=("time", np.arange(26))), ["n"])
    with pytest.raises(InvalidValueError, match="must not have t_filled"):
        fill_gaps(fill_gaps(ds).cube, ["t"])
    with pytest.raises(InvalidValueError, match="cycle must be"):
        fill_gaps(ds, method="climatology", cycle="week")
    with pytest.raises(InvalidValueError, match=r"fraction must be above 0 and at most 1, got 0"):
        fill_gaps(ds, fraction=0)
    with pytest.raises(InvalidValueError, match="mask has the dim 'x'"):
        fill_gaps(ds, mask=xr.DataArray([True], dims="x"))


@pytest.mark.filterwarnings("ignore:.*artificial")  # too few steps for one
@pytest.mark.parametrize("dim", ["time", "record"])
def test_dates_need_not_be_the_index_of_the_time_dim(dim):
    days = np.array(["2000-01-01", "2000-01-02", "2000-01-11"], "M8[ns]")
    ds = xr.Dataset({"t": (dim, [0.0, np.nan, 10.0])}, {"time": (dim, days)})
    assert fill_gaps(ds).cube.t.values.tolist() == [0, 1, 10]


def test_cells_as_far_away_as_the_last_neighbour_count_too():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(3, 20, 20))
    values[rng.random(values.shape) < 0.4] = np.nan
    ds = xr.Dataset({"t": (("time", "y", "x"), values)}, {"time": np.arange(3)})
    filled = fill_gaps(ds, method="spatial").cube.t
    mirrored = fill_gaps(ds.isel(x=slice(None, None, -1)), method="spatial").cube.t
    np.testing.assert_allclose(mirrored.values[:, :, ::-1], filled.values)


def test_scores_say_how_cells_are_weighted_and_what_cannot_be_filled_is_refused():
    values = np.random.default_rng(0).normal(size=(12, 4))
    values[3:5, 1] = np.nan
    coords = {"time": np.arange(12), "lat": np.arange(4.0)}
    ds = xr.Dataset({"t": (("time", "lat"), values)}, coords)
    assert fill_gaps(ds).scores.attrs["weights"] == "t: area of the bands of lat"
    with pytest.raises(InvalidTypeError, match=r"floating-point numbers, the cube has \['t'\]"):
        fill_gaps(ds.fillna(0).astype(int))


@pytest.mark.parametrize("depends", [False, True])
def test_scores_hold_where_gaps_do_not_depend_on_the_value(depends):
    """A simulated truth: 30 % of the cells are hidden, at random or where they are low."""
    rng = np.random.default_rng(0)
    values = np.zeros((300, 8, 8))
    for step in range(1, 300):
        values[step] = 0.8 * values[step - 1] + 0.6 * rng.normal(size=(8, 8))
    truth = xr.DataArray(values, dims=("time", "lat", "lon"), name="t")
    truth = truth.assign_coords(time=xr.date_range("2000-01-01", periods=300))
    low = values < np.quantile(values, 0.3)
    hidden = low if depends else rng.permutation(low.ravel()).reshape(low.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        filled, scores = fill_gaps(truth.where(~hidden).to_dataset())
    errors = (filled["t"] - truth).values[hidden]
    errors = errors[np.isfinite(errors)]
    by_length = scores.isel(variable=0, gap_length=slice(1, None))
    share = (by_length.gaps / by_length.gaps.sum()).fillna(0.0)
    promised = np.sqrt((share * by_length.rmse.fillna(0.0) ** 2).sum().item())
    ratio = promised / np.sqrt(np.mean(errors**2))
    assert "do not depend on the values" in scores.attrs["assumes"]
    if depends:
        assert ratio < 0.85
        assert errors.mean() > 0.3
    else:
        assert 0.9 < ratio < 1.1
        assert abs(errors.mean()) < 0.05
