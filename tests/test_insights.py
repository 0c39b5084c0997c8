"""What a cube holds, against plain numpy on all cells at once; and the page that shows it."""

import io
from itertools import combinations

import iris_sample_data
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.evaluation import area_weights
from ml4cube.insights import get_insights
from ml4cube.plotting import plot_insights
from ml4cube.splits import estimate_range
from tests.cubes import cell_id_cube, coordinates

SEASONS = {m: ("DJF", "MAM", "JJA", "SON")[m % 12 // 3] for m in range(1, 13)}


def random_cube(seed=0, dims=("time", "lat", "lon"), calendar="noleap", gaps=0.3, days=20):
    """Two correlated variables with gaps, one of them without time, and land cover classes."""
    rng = np.random.default_rng(seed)
    sizes = {"time": 30, "lat": 4, "lon": 5}
    time = xr.date_range(
        "2001-01-05", periods=30, freq=f"{days}D", calendar=calendar, use_cftime=True
    )
    coords = coordinates(sizes, calendar) | {"time": ("time", time)}
    warm = rng.normal(10, 3, tuple(sizes.values()))
    wet = 2 * warm + rng.normal(0, 4, warm.shape)
    for values in (warm, wet):
        values[rng.random(warm.shape) < gaps] = rng.choice([np.nan, np.inf])
    cover = rng.integers(0, 3, (4, 5)).astype("int8")
    flags = {"flag_values": np.arange(3, dtype="int8"), "flag_meanings": "forest crop bare"}
    ds = xr.Dataset(
        {
            "warm": (tuple(sizes), warm, {"units": "degC", "long_name": "warmth"}),
            "wet": (tuple(sizes), wet, {"units": "mm", "standard_name": "wetness"}),
            "height": (("lat", "lon"), rng.normal(100, 30, (4, 5)), {"units": "m"}),
            "cover": (("lat", "lon"), cover, flags),
        },
        coords,
    )
    order = [dim for dim in dims if dim in ds.dims]
    return ds.isel({dim: 0 for dim in sizes if dim not in dims}).transpose(*order, ...)


def weighted(values, weights):
    known = np.isfinite(values)
    w = np.where(known, weights, 0.0)
    x = np.where(known, values, 0.0)
    mean = (w * x).sum() / w.sum()
    return mean, np.sqrt((w * (x - mean) ** 2).sum() / w.sum())


@pytest.mark.slow
@settings(max_examples=6)
@given(
    seed=st.integers(0, 99),
    dims=st.permutations(("time", "lat", "lon")),
    calendar=st.sampled_from(["standard", "noleap", "360_day"]),
    chunks=st.sampled_from([None, {"time": 7, "lat": 3}, {"time": -1, "lon": 2}]),
    gaps=st.sampled_from([0.0, 0.3, 0.9]),
)
def test_numbers_are_those_of_numpy(seed, dims, calendar, chunks, gaps):
    ds = random_cube(seed, dims, calendar, gaps)
    found = get_insights(ds if chunks is None else ds.chunk(chunks))
    warm = ds["warm"].transpose("time", "lat", "lon")
    areas = area_weights(ds).values[None, :, None] * np.ones(warm.shape)
    known = np.isfinite(warm.values)
    one = found.sel(variable="warm")

    assert one["cells"] == warm.size
    share = 1 - (areas * known).sum() / areas.sum()
    np.testing.assert_allclose(one["gap_fraction"], share, atol=1e-12)
    mean, std = weighted(warm.values, areas)
    np.testing.assert_allclose([one["mean"], one["std"]], [mean, std])
    np.testing.assert_allclose(
        found["warm_gaps_by_place"].transpose("lat", "lon"), (~known).mean(0), atol=1e-12
    )
    by_time = 1 - (areas * known).sum((1, 2)) / areas.sum((1, 2))
    np.testing.assert_allclose(found["warm_gaps_by_time"], by_time, atol=1e-12)
    with np.errstate(invalid="ignore"):
        means = (areas * np.where(known, warm, 0)).sum((1, 2)) / (areas * known).sum((1, 2))
    np.testing.assert_allclose(found["warm_mean_by_time"], means)
    months = ds["time"].dt.month.values
    for month in range(1, 13):
        here = months == month
        expected = weighted(warm.values[here], areas[here])[0] if known[here].any() else np.nan
        np.testing.assert_allclose(one["mean_by_month"].sel(month=month), expected)
        spread = np.nanstd(means[here]) if np.isfinite(means[here]).any() else np.nan
        np.testing.assert_allclose(one["std_by_month"].sel(month=month), spread, atol=1e-12)


@pytest.mark.slow
@settings(max_examples=6)
@given(seed=st.integers(0, 99), dims=st.permutations(("time", "lat", "lon")))
def test_distribution_is_that_of_the_known_cells(seed, dims):
    ds = random_cube(seed, dims).drop_vars(["lat", "lon"])  # so that each cell counts alike
    one = get_insights(ds).sel(variable="warm")
    cells = ds["warm"].values[np.isfinite(ds["warm"].values)]
    probabilities = one["probability"].values
    expected = np.quantile(cells, probabilities, method="inverted_cdf")
    np.testing.assert_array_equal(one["quantile"], expected)
    low, high = one["quantile"].sel(probability=[0.005, 0.995]).values
    counts, edges = np.histogram(cells, 40, (low, high))
    np.testing.assert_allclose(one["bin_edge"], edges)
    np.testing.assert_allclose(one["histogram"], counts / cells.size)


@pytest.mark.slow
@settings(max_examples=6)
@given(seed=st.integers(0, 99), dims=st.permutations(("time", "lat", "lon")))
def test_correlations_are_over_the_cells_where_both_are_known(seed, dims):
    ds = random_cube(seed, dims)
    found = get_insights(ds)
    areas = area_weights(ds)
    for pair in combinations(["warm", "wet", "height"], 2):
        a, b, w = xr.broadcast(*(ds[name] for name in pair), areas)
        both = np.isfinite(a.values) & np.isfinite(b.values)
        matrix = np.cov(a.values[both], b.values[both], aweights=w.values[both], ddof=0)
        expected = matrix[0, 1] / np.sqrt(matrix[0, 0] * matrix[1, 1])
        for one, other in (pair, pair[::-1]):
            at = {"variable": one, "other_variable": other}
            np.testing.assert_allclose(found["correlation"].sel(at), expected)
            assert found["pairs"].sel(at) == both.sum()
    assert found["correlation"].sel(variable="warm", other_variable="warm") == 1
    assert found["correlation"].sel(variable="cover").isnull().all()


def test_classes_are_counted_by_name():
    ds = random_cube().drop_vars(["lat", "lon"])
    ds["wetness"] = ds["wet"] > 20
    found = get_insights(ds)
    cover = found.sel(variable="cover")
    for value, name in enumerate(["forest", "crop", "bare"]):
        expected = (ds["cover"] == value).mean()
        np.testing.assert_allclose(cover["class_fraction"].sel({"class": value}), expected)
        assert cover["class_name"].sel({"class": value}) == name
    flags = found.sel(variable="wetness", **{"class": [0, 1]})
    np.testing.assert_allclose(flags["class_fraction"][1], ds["wetness"].mean())
    assert flags["class_name"].values.tolist() == ["False", "True"]
    for name in ("mean", "quantile", "histogram", "range", "mean_by_month"):
        assert found[name].sel(variable=["cover", "wetness"]).isnull().all()
    assert found["class_fraction"].sel(variable="warm").isnull().all()
    assert "wetness_mean_by_time" not in found


def test_a_cube_of_classes_alone_has_no_means():
    found = get_insights(random_cube()[["cover"]])
    for name in ("mean", "std", "quantile"):
        assert found[name].isnull().all()
    assert "histogram" not in found
    assert len(plot_insights(found).axes) > 0


def test_classes_with_gaps_are_floats_with_flags_and_many_integers_are_numbers():
    ds = random_cube()
    ds["cover"] = ds["cover"].astype("f4").where(ds["cover"] > 0).assign_attrs(ds["cover"].attrs)
    ds["count"] = ("time", np.arange(30) * 7 % 90)
    ds["id"] = ("x", np.arange(65))
    found = get_insights(ds)
    shares = found["class_fraction"].sel(variable="cover", **{"class": [1.0, 2.0]})
    np.testing.assert_allclose(shares.sum(), 1)
    assert found["mean"].sel(variable="id") == 32
    assert np.isnan(found["mean"].sel(variable="count"))


@pytest.mark.parametrize(("days", "cycle"), [(1, "month"), (91, "season"), (365, None)])
def test_the_cycle_suits_the_step(days, cycle):
    ds = random_cube(days=days)[["warm"]].drop_vars("lat")
    found = get_insights(ds)
    present = [by for by in ("month", "season") if f"mean_by_{by}" in found]
    assert present == ([cycle] if cycle else [])
    if cycle == "season":
        label = xr.DataArray([SEASONS[m] for m in ds["time"].dt.month.values], dims="time")
        cells = ds["warm"].where(np.isfinite(ds["warm"]))
        for season in np.unique(label):
            expected = cells.where(label == season).mean()
            np.testing.assert_allclose(found["mean_by_season"].sel(season=season)[0], expected)


def test_ranges_are_those_of_estimate_range_and_categories_have_none():
    steps = np.random.default_rng(0).normal(size=(3, 40, 300)).cumsum(axis=2)
    smooth = steps[:, :, 10:] - steps[:, :, :-10]
    ds = xr.Dataset({"a": (("member", "y", "x"), smooth)})
    found = get_insights(ds).sel(variable="a")
    assert found["range"].sel(dim="x") == estimate_range(ds, "a", "x")["x"]
    assert np.isnan(found["range"].sel(dim="member"))
    assert "categories" in str(found["range_reason"].sel(dim="member").values)
    assert found["range_reason"].sel(dim="x") == ""


def test_chunks_per_window_are_counted_window_by_window(tmp_path):
    cell_id_cube({"time": 23, "lat": 9, "lon": 10}).to_zarr(
        tmp_path / "cube.zarr", encoding={"a": {"chunks": (5, 4, 10)}}
    )
    size, step, chunk, n = (6, 3, 1), (3, 2, 1), (5, 4, 10), (23, 9, 10)
    touched, cells = [], []
    for start in np.ndindex(*((m - s) // t + 1 for m, s, t in zip(n, size, step, strict=True))):
        first = [i * t // c for i, t, c in zip(start, step, chunk, strict=True)]
        last = [(i * t + s - 1) // c for i, t, s, c in zip(start, step, size, chunk, strict=True)]
        touched.append(np.prod([b - a + 1 for a, b in zip(first, last, strict=True)]))
        cells.append(
            np.prod(
                [
                    min((b + 1) * c, m) - a * c
                    for a, b, c, m in zip(first, last, chunk, n, strict=True)
                ]
            )
        )
    for source in (tmp_path / "cube.zarr", xr.open_zarr(tmp_path / "cube.zarr", chunks=None)):
        found = get_insights(
            source, sample_size={"time": 6, "lat": 3}, overlap={"time": 0.5, "lat": 0.4}
        ).sel(variable="a")
        assert found["chunk_size"].values.tolist() == [5, 4, 10]
        np.testing.assert_allclose(found["chunks_per_window"], np.mean(touched))
        assert found["most_chunks_per_window"] == max(touched)
        np.testing.assert_allclose(found["read_amplification"], np.mean(cells) / 18)


def test_a_cube_in_memory_has_no_chunks():
    found = get_insights(random_cube(), sample_size={"time": 3})
    assert found["chunk_size"].isnull().all()
    assert found["chunks_per_window"].isnull().all()


def test_missing_positions_on_land_weigh_nothing():
    lat = np.array([[10.0, 11, 9.97e36], [20.0, 21, 9.97e36], [30, 31, 32]])
    lon = np.array([[10.0, 20, 9.97e36], [10.0, 20, 9.97e36], [10, 20, 30]])
    values = np.array([[1.0, 2, np.nan], [3.0, 4, np.nan], [5, 6, 7]])
    coords = {"nav_lat": (("y", "x"), lat), "nav_lon": (("y", "x"), lon)}
    ds = xr.Dataset({"t": (("y", "x"), values)}, coords)
    found = get_insights(ds)
    weights = area_weights(ds)
    assert ((weights == 0) == (lat > 90)).all()
    np.testing.assert_allclose(found["mean"].item(), ds["t"].weighted(weights).mean())
    assert "cells without a position weigh 0" in found.attrs["weights"]


def test_cubes_without_time_without_places_and_without_values():
    nothing = xr.Dataset({"t": ("time", np.full(4, np.nan)), "z": (("y", "x"), np.zeros((2, 3)))})
    found = get_insights(nothing)
    assert found["gap_fraction"].values.tolist() == [1.0, 0.0]
    assert np.isnan(found["mean"][0])
    assert found["mean"][1] == 0
    assert "t_gaps_by_place" not in found
    assert "z_gaps_by_time" not in found
    assert np.isnan(found["correlation"]).all()
    plot_insights(found).savefig(io.BytesIO(), dpi=40)


def test_a_climatology_may_have_a_dim_of_months():
    found = get_insights(xr.Dataset({"normal": (("month", "x"), np.arange(24.0).reshape(12, 2))}))
    assert found["normal_gaps_by_place"].dims == ("month", "x")
    assert "mean_by_month" not in found


def test_the_result_can_be_stored(tmp_path):
    found = get_insights(random_cube(), sample_size={"time": 3})
    found.to_netcdf(tmp_path / "insights.nc")
    with xr.open_dataset(tmp_path / "insights.nc", decode_timedelta=False) as stored:
        xr.testing.assert_equal(stored.load(), found)


def test_what_cannot_be_described_is_refused():
    ds = random_cube()
    with pytest.raises(InvalidValueError, match="did you mean 'warm'"):
        get_insights(ds, ["warn"])
    with pytest.raises(InvalidTypeError, match="overlap needs sample_size"):
        get_insights(ds, overlap=0.5)
    with pytest.raises(InvalidValueError, match="unknown dim 'level'"):
        get_insights(ds, sample_size={"level": 2})
    with pytest.raises(InvalidValueError, match=r"must not be named 'bin'.*rename"):
        get_insights(ds.rename(lat="bin"))
    with pytest.raises(InvalidValueError, match="must not be named 'month'"):
        get_insights(ds.assign(normal=("month", np.arange(12.0))))
    with pytest.raises(InvalidValueError, match="must have dims and cells, got 'warm'"):
        get_insights(ds.isel(time=slice(0)))
    with pytest.raises(InvalidValueError, match="at most 6, got 7"):
        plot_insights(
            get_insights(xr.Dataset({name: ("x", np.arange(3.0)) for name in "abcdefg"})),
            list("abcdefg"),
        )


def test_the_page_shows_every_variable():
    found = get_insights(random_cube(), sample_size={"time": 3})
    figure = plot_insights(found)
    figure.savefig(io.BytesIO(), dpi=40)
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert "warm: warmth (degC)" in titles
    assert "wet: wetness (mm)" in titles
    assert titles[-3:] == ["Correlation", "Range of autocorrelation (cells)", "Chunks (cells)"]
    numbers = [text.get_text() for text in figure.axes[-3].texts]
    at = {"variable": "wet", "other_variable": "warm"}
    assert f"{found['correlation'].sel(at).item():.2f}" in numbers
    assert len(plot_insights(found, "wet").axes) < len(figure.axes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ostia_monthly.nc", "A1B_north_america.nc", "orca2_votemper.nc"])
def test_real_cubes(name):
    with xr.open_dataset(f"{iris_sample_data.path}/{name}", decode_timedelta=False) as ds:
        found = get_insights(ds)
        variable = str(found["variable"].values[0])
        cells = ds[variable].astype("f8")
        weights = area_weights(ds).fillna(0)
        one = found.isel(variable=0)
        np.testing.assert_allclose(one["mean"], cells.weighted(weights).mean(), rtol=1e-6)
        assert one["pairs"][0] == cells.notnull().sum()
        figure = plot_insights(found)
        figure.savefig(io.BytesIO(), dpi=40)


def test_coordinates_along_several_dims_are_kept_where_all_are():
    starts = np.datetime64("2000-01-01", "ns") + np.arange(5) * np.timedelta64(1, "D")
    leads = np.arange(3) * np.timedelta64(1, "D")
    coords = {"init_time": starts, "lead_time": leads, "lat": np.arange(4.0)}
    coords["valid_time"] = (("init_time", "lead_time"), starts[:, None] + leads)
    values = np.random.default_rng(0).normal(size=(5, 3, 4))
    found = get_insights(xr.Dataset({"t": (("init_time", "lead_time", "lat"), values)}, coords))
    assert found["mean"].item() == pytest.approx(values.mean(), rel=1e-2)


@pytest.mark.parametrize("value", [0.0, 1e17, 9.96921e36])
def test_equal_values_have_one_full_bin(value):
    found = get_insights(xr.Dataset({"t": (("time", "x"), np.full((4, 5), value))}))
    assert found["mean"].item() == pytest.approx(value)
    assert sorted(found["histogram"].values.ravel())[-1] == 1


def test_names_of_the_result_are_refused_before_the_work():
    ds = xr.Dataset({"z": (("time", "range"), np.zeros((4, 5)))}, {"range": np.arange(5.0)})
    with pytest.raises(InvalidValueError, match="must not be named 'range'"):
        get_insights(ds)


def test_large_integers_name_their_classes_whole():
    days = np.random.default_rng(0).integers(20200101, 20200104, (24, 6))
    found = get_insights(xr.Dataset({"d": (("time", "x"), days)}))
    assert set(found["class_name"].values.ravel()) == {"20200101", "20200102", "20200103"}


def test_a_page_shows_the_places_of_a_curvilinear_grid_with_levels_last():
    lat, lon = np.meshgrid(np.linspace(50, 60, 6), np.linspace(0, 10, 7), indexing="ij")
    values = np.random.default_rng(0).normal(size=(24, 6, 7, 3))
    values[:, 2, 3] = np.nan
    values[3, 4, 5] = np.nan
    coords = {"lat": (("y", "x"), lat), "lon": (("y", "x"), lon)}
    found = get_insights(xr.Dataset({"t": (("time", "y", "x", "depth"), values)}, coords))
    mesh = plot_insights(found).axes[0].collections[0]
    assert mesh.get_array().shape == (6, 7)
