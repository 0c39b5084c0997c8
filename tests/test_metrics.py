"""Metrics: sums of parts are the sums of the whole, and both equal a plain loop."""

from __future__ import annotations

import itertools
import math

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.evaluation import evaluate
from ml4cube.evaluation.metrics import (
    MAE,
    RMSE,
    Metric,
    PairSums,
    score_cube,
)
from ml4cube.evaluation.pair_sums import FORMULAS
from tests.cubes import cell_id_cube
from tests.oracle import band_areas

CLASSES = Metric.__subclasses__()


def oracle(prediction, truth, weights) -> dict[str, float]:
    """Every metric by its textbook formula, in exact sums, cell by cell."""
    rows = [
        (float(p), float(t), float(w))
        for p, t, w in zip(prediction.ravel(), truth.ravel(), weights.ravel(), strict=True)
        if math.isfinite(p) and math.isfinite(t)
    ]
    total = math.fsum(w for *_, w in rows)
    if total == 0:
        return {"max_error": max((abs(p - t) for p, t, _ in rows), default=math.nan)}

    def mean(values):
        return math.fsum(w * v for v, (_, _, w) in zip(values, rows, strict=True)) / total

    p_mean, t_mean = mean([p for p, *_ in rows]), mean([t for _, t, _ in rows])
    p_var = mean([(p - p_mean) ** 2 for p, *_ in rows])
    t_var = mean([(t - t_mean) ** 2 for _, t, _ in rows])
    mse = mean([(p - t) ** 2 for p, t, _ in rows])
    scores = {
        "mse": mse,
        "rmse": math.sqrt(mse),
        "mae": mean([abs(p - t) for p, t, _ in rows]),
        "bias": mean([p - t for p, t, _ in rows]),
        "max_error": max(abs(p - t) for p, t, _ in rows),
    }
    if t_var > 0:
        scores |= {"r2": 1 - mse / t_var, "std_ratio": math.sqrt(p_var / t_var)}
        if p_var > 0:
            product = mean([(p - p_mean) * (t - t_mean) for p, t, _ in rows])
            scores["correlation"] = product / math.sqrt(p_var * t_var)
    return scores


# Whole numbers over a power of two, so that the variance of a constant is exactly 0 in the
# oracle; the offset makes every formula with a difference of large sums fail.
values = st.one_of(st.integers(-400, 400).map(lambda i: i / 8), st.just(math.nan))
arrays = st.integers(1, 30).flatmap(
    lambda n: st.tuples(
        hnp.arrays(float, n, elements=values),
        hnp.arrays(float, n, elements=values),
        hnp.arrays(float, n, elements=st.sampled_from([0.0, 0.25, 1.0, 3.0])),
    )
)


@pytest.mark.slow
@settings(max_examples=150)
@given(arrays, st.lists(st.integers(0, 30), max_size=4), st.sampled_from([0.0, 2.0**20]))
def test_merged_parts_equal_the_whole_and_the_oracle(pair, cuts, offset):
    prediction, truth, weights = pair[0] + offset, pair[1] + offset, pair[2]
    expected = oracle(prediction, truth, weights)
    bounds = [0, *sorted(min(cut, len(truth)) for cut in cuts), len(truth)]
    for metric_class in CLASSES:
        whole = metric_class()
        whole.update(prediction, truth, weights)
        merged = metric_class()
        for a, b in itertools.pairwise(bounds):
            part = metric_class()
            part.update(prediction[a:b], truth[a:b], weights[a:b])
            merged = merged.merge(part)
        wanted = expected.get(metric_class.name, math.nan)
        assert whole.compute() == pytest.approx(wanted, rel=1e-9, abs=1e-9, nan_ok=True)
        assert merged.compute() == pytest.approx(wanted, rel=1e-9, abs=1e-9, nan_ok=True)
        assert merged.sums.count == whole.sums.count
        assert merged.sums.gaps == np.isnan(truth).sum()
        assert merged.sums.unpredicted == (np.isnan(prediction) & ~np.isnan(truth)).sum()


@settings(max_examples=60)
@given(arrays, st.integers(1, 4), st.integers(0, 2**16))
def test_groups_are_scored_as_if_alone(pair, n_groups, seed):
    prediction, truth, weights = pair
    groups = np.random.default_rng(seed).integers(-1, n_groups, len(truth))
    sums = PairSums.of(prediction, truth, weights, groups, n_groups)
    for group in range(n_groups):
        alone = PairSums.of(*(a[groups == group] for a in pair))
        for name in vars(alone):
            assert getattr(sums, name)[group] == pytest.approx(getattr(alone, name)[0], abs=1e-9)


@settings(max_examples=60)
@given(
    # means of the smallest floats lose digits
    st.just(0.0) | st.floats(1e-290, 1e6) | st.floats(-1e6, -1e-290),
    st.integers(1, 3000),
    st.integers(1, 3),
    st.integers(0, 99),
)
def test_a_constant_has_no_spread_whatever_it_and_its_weights_round_to(constant, n, n_groups, seed):
    rng = np.random.default_rng(seed)
    prediction, truth = rng.normal(size=n), np.full(n, constant)
    weights, groups = rng.random(n), rng.integers(0, n_groups, n)
    sums = PairSums.empty(n_groups)
    for cells in (slice(n // 2), slice(n // 2, n)):
        arrays = (a[cells] for a in (prediction, truth, weights, groups))
        sums = sums.merge(PairSums.of(*arrays, n_groups))
    assert not sums.truth_m2.any()
    assert not sums.product_m2.any()


def test_unpredicted_and_infinite_predictions_are_counted():
    metric = MAE()
    metric.update(np.array([1.0, np.nan, np.inf, 4.0]), np.array([2.0, 1.0, 1.0, np.nan]))
    assert metric.compute() == 1.0
    assert (metric.sums.count, metric.sums.unpredicted, metric.sums.gaps) == (1, 2, 1)


def test_tensors_with_gradients_and_reset():
    torch = pytest.importorskip("torch")
    metric = RMSE()
    metric.update(torch.ones(2, 2, requires_grad=True), torch.zeros(2, 2))
    assert metric.compute() == 1.0
    metric.reset()
    assert math.isnan(metric.compute())


def test_masked_cells_are_gaps():
    """As netCDF4 reads them: the number under the mask is the fill value."""
    values = np.ma.masked_values([1.0, 3.0, -9999.0], -9999.0)
    for dtype in ("float64", "int16"):
        metric = RMSE()
        metric.update(np.zeros(3), values.astype(dtype))
        assert (metric.compute(), metric.sums.gaps.item()) == (math.sqrt(5), 1)
    for dtype in ("int64", "uint8"):
        groups = np.ma.masked_equal(np.array([1, 0, 1], dtype), 0)
        sums = PairSums.of(values, np.zeros(3), groups=groups, n_groups=2)
        assert (sums.count.tolist(), sums.unpredicted.tolist()) == ([0, 1], [0, 1])


def test_batches_in_bfloat16_are_scored():
    torch = pytest.importorskip("torch")
    metric = MAE()
    metric.update(torch.tensor([1.5, 2.0], dtype=torch.bfloat16), torch.tensor([1, 1]))
    assert metric.compute() == 0.75


def test_durations_and_complex_numbers_are_refused():
    """The missing duration is the smallest integer, and a complex number loses a part."""
    hours = np.array([1, "NaT"], "timedelta64[h]")
    for values in (hours, hours.astype("timedelta64[ns]"), np.array([1j, 2.0])):
        with pytest.raises(InvalidTypeError, match="must be numbers, got dtype"):
            PairSums.of(np.ones(2), values)
    with pytest.raises(InvalidTypeError, match=r"np\.timedelta64\(1, 'h'\)"):
        score_cube(xr.DataArray(np.ones(2), dims="x"), xr.DataArray(hours, dims="x"))


def test_bad_input_is_refused_by_name():
    with pytest.raises(InvalidValueError, match=r"same shape, got \(2,\) and \(3,\)"):
        RMSE().update(np.zeros(2), np.zeros(3))
    with pytest.raises(InvalidValueError, match="weights must be finite and not negative"):
        RMSE().update(np.zeros(2), np.zeros(2), np.array([1.0, -1.0]))
    with pytest.raises(InvalidTypeError, match="cannot merge RMSE with MAE"):
        RMSE().merge(MAE())
    with pytest.raises(InvalidValueError, match="of 1 and 2 groups"):
        PairSums.empty(1).merge(PairSums.empty(2))


def sphere(time=3, lat=4, lon=5, seed=0) -> xr.DataArray:
    values = np.random.default_rng(seed).normal(size=(time, lat, lon))
    values[0, 1, 2] = np.nan
    coords = {"time": np.arange(time), "lat": np.linspace(-75, 60, lat), "lon": np.arange(lon)}
    return xr.DataArray(values, coords, ("time", "lat", "lon"), name="t")


@pytest.mark.parametrize("chunks", [None, {"time": 2, "lat": 3, "lon": 2}])
@pytest.mark.parametrize("order", [("time", "lat", "lon"), ("lon", "time", "lat")])
def test_score_cube_is_area_weighted_whatever_the_chunks_and_dim_order(chunks, order):
    truth, prediction = sphere(seed=1), sphere(seed=2)
    weights = np.broadcast_to(band_areas(truth.lat)[:, None], truth.shape)
    wanted = oracle(prediction.values, truth.values, weights)
    given_truth = truth.transpose(*order)
    if chunks:
        prediction, given_truth = prediction.chunk(chunks), given_truth.chunk(chunks)
    scores = score_cube(prediction, given_truth, metrics=["rmse", "bias", "r2", "correlation"])
    for name in scores:
        assert scores[name].item() == pytest.approx(wanted[name], rel=1e-4)


def test_score_cube_by_time_and_region_equals_each_cell_group_alone():
    truth, prediction = sphere(seed=1), sphere(seed=2)
    region = xr.DataArray(
        [["b", "a"], ["b", "b"], ["a", "a"], ["b", "a"]], dims=("lat", "lon")
    ).isel(lon=[0, 1, 0, 1, 1])
    scores = score_cube(prediction, truth, by=["time", region.rename("region")])
    assert scores.rmse.dims == ("variable", "time", "region")
    for step in truth.time.values:
        for label in "ab":
            inside = (region == label).values
            weights = band_areas(truth.lat)[:, None] * inside
            wanted = oracle(
                prediction.sel(time=step).values,
                np.where(inside, truth.sel(time=step).values, np.nan),
                weights,
            )
            cell = scores.sel(variable="t", time=step, region=label)
            assert cell.rmse.item() == pytest.approx(wanted["rmse"], rel=1e-4)
            assert cell.r2.item() == pytest.approx(wanted["r2"], rel=1e-4)


def test_labels_with_gaps_leave_cells_out_and_months_are_labels():
    truth = sphere(time=4)
    month = xr.DataArray([1.0, 2.0, np.nan, 1.0], dims="time", name="month")
    scores = score_cube(truth + month.fillna(50.0), truth, by=month)
    assert scores.month.values.tolist() == [1.0, 2.0]
    assert scores.bias.sel(variable="t").values == pytest.approx([1.0, 2.0])


def test_labels_may_be_missing_in_a_chunked_map():
    labels = xr.DataArray(np.array([True, None, False, True], object), dims="lat", name="land")
    scores = score_cube(sphere(), sphere(), by=labels.chunk(), metrics="count")
    assert scores.land.values.tolist() == [False, True]
    assert scores["count"].values.tolist() == [[15, 30]]


def test_a_dataset_is_scored_by_variable_and_only_where_both_have_it():
    truth = xr.Dataset({"a": sphere(seed=1), "b": sphere(seed=2), "c": sphere(seed=3)})
    scores = score_cube(truth[["b", "a"]] + 2.0, truth, metrics=["bias", "gaps"])
    assert scores.variable.values.tolist() == ["b", "a"]
    assert scores.bias.values == pytest.approx([2.0, 2.0])
    assert scores.gaps.values.tolist() == [1, 1]


def test_static_variables_are_scored_beside_others_and_what_describes_the_grid_is_not():
    truth = sphere().to_dataset(name="t").assign(height=sphere(seed=3).isel(time=0, drop=True))
    edges = np.stack([truth.lat - 22.5, truth.lat + 22.5], -1)
    truth = truth.assign(crs=0, lat_bnds=(("lat", "bnds"), edges))
    truth.lat.attrs["bounds"], truth.t.attrs["grid_mapping"] = "lat_bnds", "crs"
    zone = xr.DataArray([0, 1, 1, 0], dims="lat", name="zone")
    truth = truth.assign_coords(zone=zone)
    found = truth + 1.0
    for order in (["t", "height"], ["height", "t"]):
        scores = score_cube(found[[*order, "crs", "lat_bnds"]], truth, by=["time", "zone"])
        assert scores["variable"].values.tolist() == order
    static = score_cube(found.height, truth.height, by=zone, metrics="mae")
    for step in scores.mae.sel(variable="height").transpose("time", "zone").values:
        np.testing.assert_allclose(step, static.mae.values[0])
    steps = xr.DataArray([1.0, 0.0, 2.0], dims="time")
    assert score_cube(found, truth, weights=steps).mae.values == pytest.approx([1.0, 1.0])


def test_score_cube_refuses_other_grids_and_typos():
    truth = sphere()
    with pytest.raises(InvalidValueError, match="did you mean 'rmse'"):
        score_cube(truth, truth, metrics=["rsme"])
    with pytest.raises(InvalidValueError, match="4 cells along 'lon'"):
        score_cube(truth.isel(lon=slice(4)), truth)
    with pytest.raises(InvalidValueError, match="other 'lon' coordinates"):
        score_cube(truth.assign_coords(lon=truth.lon + 1), truth)
    turned = xr.zeros_like(truth.isel(time=0)).isel(lat=slice(None, None, -1))
    for arguments in ({"by": turned.rename("zone")}, {"weights": turned}):
        with pytest.raises(InvalidValueError, match="other 'lat' coordinates"):
            score_cube(truth, truth, **arguments)
    fine = truth.assign_coords(lat=truth.lat / 7)
    rounded = fine.assign_coords(lat=fine.lat.astype("f4"))
    xr.testing.assert_allclose(score_cube(rounded, fine), score_cube(fine, fine))
    with pytest.raises(InvalidValueError, match="none in common"):
        score_cube(truth.to_dataset(name="x"), truth.to_dataset(name="y"))
    with pytest.raises(InvalidValueError, match=r"by must be .*, got 'lev'"):
        score_cube(truth, truth, by="lev")
    for arguments in ({"prediction": 3}, {"by": np.ones(4)}, {"weights": np.ones(4)}):
        with pytest.raises(InvalidTypeError, match=r"must (be|hold) .*, got (int|ndarray)"):
            score_cube(**{"prediction": truth, "truth": truth, **arguments})
    with pytest.raises(InvalidValueError, match="by='zone' has 2 cells along 'lat'"):
        score_cube(truth, truth, by=xr.DataArray([0, 1], dims="lat", name="zone"))


def test_labels_of_one_name_are_refused():
    """Two maps without a name would be scored as one if the first has only one label."""
    truth = sphere()
    land, zone = xr.DataArray(np.zeros(4), dims="lat"), xr.DataArray(np.arange(5) // 2, dims="lon")
    for by in ([land, zone], ["time", "time"], land.rename("variable"), land.rename("mae")):
        with pytest.raises(InvalidValueError, match="labels of different names"):
            score_cube(truth, truth, by=by)
    assert score_cube(truth, truth, by=[land, zone.rename("zone")]).sizes["zone"] == 3


def test_packed_integers_are_refused():
    packed = xr.zeros_like(sphere(), dtype="int16").assign_attrs(_FillValue=-9999)
    for pair in ((packed, sphere()), (sphere(), packed)):
        with pytest.raises(InvalidValueError, match="has packed int16 values"):
            score_cube(*pair)


def test_scoring_reads_in_blocks_that_fit(monkeypatch):
    monkeypatch.setattr("ml4cube.evaluation.cube_scores.BLOCK_CELLS", 7)
    truth, prediction = sphere(seed=1), sphere(seed=2)
    whole = oracle(prediction.values, truth.values, np.ones(truth.shape))
    scores = score_cube(prediction, truth, weights=None)
    assert scores.rmse.item() == pytest.approx(whole["rmse"], rel=1e-12)


def test_dims_need_not_be_texts():
    prediction = xr.DataArray(np.ones((2, 3)), dims=(0, 1), name="a")
    assert float(score_cube(prediction, prediction * 0)["mae"].squeeze()) == 1.0


def test_weights_of_zeros_are_refused():
    """They would give scores of NaN."""
    truth = cell_id_cube({"time": 40, "lat": 4}, "float64")
    zeros = xr.DataArray(np.zeros(4), dims="lat")
    for weights in (zeros, zeros.chunk()):
        for score in (score_cube, evaluate):
            with pytest.raises(InvalidValueError, match="above 0 in some cell, got zeros only"):
                score(truth, truth, weights=weights)


def test_every_metric_has_a_formula_and_an_oracle():
    names = {metric_class.name for metric_class in CLASSES}
    assert names == FORMULAS.keys() - {"count", "gaps", "unpredicted"}
    prediction, truth = np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 2.0])
    assert oracle(prediction, truth, np.ones(3)).keys() == names
    cubes = (xr.DataArray(values, dims="x") for values in (prediction, truth))
    scores = score_cube(*cubes, metrics=list(FORMULAS))
    assert scores.data_vars.keys() == FORMULAS.keys()
    for name, value in oracle(prediction, truth, np.ones(3)).items():
        assert scores[name].item() == pytest.approx(value)
