"""Metrics: sums of parts are the sums of the whole, and both equal a plain loop."""

from __future__ import annotations

import itertools
import math
import re
from pathlib import Path

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.core.metric_registry import METRICS, PAIR_METRICS, SCORECARD_METRICS, Cells
from ml4cube.core.sums.pairs import Groups, merged_along, without
from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.evaluation import evaluate
from ml4cube.evaluation.metrics import (
    MAE,
    RMSE,
    Metric,
    PairSums,
    score_cube,
)
from tests import oracle_metrics
from tests.cubes import cell_id_cube
from tests.oracle import band_areas

COUNTS = {"count", "gaps", "unpredicted"}
OF_PAIRS = sorted({*PAIR_METRICS} - COUNTS)
OF_SCORECARDS = sorted({*OF_PAIRS} & {*SCORECARD_METRICS})


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
@settings(max_examples=60, deadline=None)
@given(
    arrays,
    st.lists(st.integers(0, 30), max_size=4),
    # 1e8 takes the digits of the spread from a sum of squares of the values
    st.sampled_from([0.0, 2.0**20, 1e8]),
)
def test_merged_parts_equal_the_whole_and_the_oracle(pair, cuts, offset):
    """Of every metric in the registry, so a new one needs an oracle and keeps its digits."""
    prediction, truth, weights = pair[0] + offset, pair[1] + offset, pair[2]
    bounds = [0, *sorted(min(cut, len(truth)) for cut in cuts), len(truth)]
    for name in OF_PAIRS:
        wanted = oracle_metrics.score(name, prediction, truth, weights)
        whole = Metric(name)
        whole.update(prediction, truth, weights)
        merged = Metric(name)
        for a, b in itertools.pairwise(bounds):
            part = Metric(name)
            part.update(prediction[a:b], truth[a:b], weights[a:b])
            merged = merged.merge(part)
        for metric in (whole, merged):
            assert metric.compute() == pytest.approx(wanted, rel=1e-6, abs=1e-6, nan_ok=True), name
        assert merged.sums.count == whole.sums.count
        assert merged.sums.gaps == np.isnan(truth).sum()
        assert merged.sums.unpredicted == (np.isnan(prediction) & ~np.isnan(truth)).sum()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:scores have no intervals")
@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**16), st.sampled_from([0.0, 1e8]), st.sampled_from([None, "season"]))
def test_scorecards_and_cubes_give_the_same_metrics_as_the_oracle(seed, offset, by):
    rng = np.random.default_rng(seed)
    time = xr.date_range("2001-01-01", periods=40, freq="9D")
    truth, errors = (rng.integers(-40, 40, (40, 3, 2)) / 8 for _ in range(2))
    truth[rng.random(truth.shape) < 0.1] = np.nan
    dims = ("time", "lat", "lon")
    true = xr.DataArray(truth + offset, {"time": time, "lat": [-60.0, 0, 60]}, dims, "t")
    predicted = true + errors
    weights = xr.DataArray([1.0, 2.0, 0.5], dims="lat")
    options = {"weights": weights, "by": by and time_label(true)}
    card = evaluate(predicted, true, metrics=OF_SCORECARDS, progress=False, **options)
    cube = score_cube(predicted, true, metrics=OF_PAIRS, **options)
    weights = weights.broadcast_like(true).transpose(*dims).values
    for label in ["DJF", "MAM", "JJA", "SON"] if by else [None]:
        used = np.full(40, True) if label is None else time_label(true).values == label
        cells = [a[used] for a in (predicted.values, true.values, weights)]
        at = {} if label is None else {"season": label}
        for name in OF_PAIRS:
            wanted = oracle_metrics.score(name, *cells)
            scores = [cube[name].sel(at).item()]
            if name in OF_SCORECARDS:
                scores.append(card.scores[name].sel(at).item())
            for score in scores:
                assert score == pytest.approx(wanted, rel=1e-6, abs=1e-6, nan_ok=True), name


def time_label(array):
    return array.time.dt.season.rename("season")


@pytest.mark.parametrize("metric", OF_SCORECARDS)
def test_a_date_left_out_of_a_scorecard_leaves_the_others(metric):
    """The intervals follow from scores without each date, also of sums that are no plain sums."""
    rng = np.random.default_rng(0)
    groups = Groups(np.repeat(np.arange(9), 5), rng.random(45), 9)
    cells = Cells(rng.normal(size=45) + 1e8, rng.normal(size=45) + 1e8)
    names = METRICS[metric].sums
    by_date = groups.sums(cells, names)
    rest = without(merged_along(by_date, 0), by_date)
    for date in range(9):
        used = groups.of_cell != date
        one = Groups(np.zeros(40, int), groups.weights[used], 1)
        expected = one.sums(Cells(cells.prediction[used], cells.truth[used]), names)
        for name in expected:
            assert rest[name][date] == pytest.approx(expected[name][0], rel=1e-6, abs=1e-6)


@settings(max_examples=60)
@given(arrays, st.integers(1, 4), st.integers(0, 2**16))
def test_groups_are_scored_as_if_alone(pair, n_groups, seed):
    prediction, truth, weights = pair
    groups = np.random.default_rng(seed).integers(-1, n_groups, len(truth))
    sums = PairSums.of(prediction, truth, weights, groups, n_groups)
    for group in range(n_groups):
        alone = PairSums.of(*(a[groups == group] for a in pair))
        for name in alone.arrays:
            assert sums[name][group] == pytest.approx(alone[name][0], abs=1e-9)
    together = sums.of_all_groups()
    inside = PairSums.of(*(a[groups >= 0] for a in pair))
    again = PairSums.from_json(together.to_json())
    for name in inside.arrays:
        assert together[name] == pytest.approx(inside[name], abs=1e-9)
        np.testing.assert_array_equal(again[name], together[name])


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
    assert not sums["truth_m2"].any()
    assert not sums["product_m2"].any()


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
    with pytest.raises(InvalidTypeError, match="cannot merge mae with rmse"):
        Metric("mae").merge(Metric("rmse"))
    with pytest.raises(InvalidValueError, match=r"name must be .* got 'rsme'; did you mean 'rmse'"):
        Metric("rsme")
    with pytest.raises(InvalidValueError, match="cannot merge sums with the names"):
        PairSums.empty(names=["error"]).merge(PairSums.empty(names=["squared_error"]))
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
    arrays = prediction.values, truth.values, weights
    given_truth = truth.transpose(*order)
    if chunks:
        prediction, given_truth = prediction.chunk(chunks), given_truth.chunk(chunks)
    scores = score_cube(prediction, given_truth, metrics=["rmse", "bias", "r2", "correlation"])
    for name in scores:
        assert scores[name].item() == pytest.approx(oracle_metrics.score(name, *arrays), rel=1e-4)


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
            true = np.where(inside, truth.sel(time=step).values, np.nan)
            arrays = prediction.sel(time=step).values, true, weights
            cell = scores.sel(variable="t", time=step, region=label)
            for name in ("rmse", "r2"):
                wanted = oracle_metrics.score(name, *arrays)
                assert cell[name].item() == pytest.approx(wanted, rel=1e-4)


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
    monkeypatch.setattr("ml4cube.cube.chunks.blocks.BLOCK_CELLS", 7)
    truth, prediction = sphere(seed=1), sphere(seed=2)
    whole = oracle_metrics.score("rmse", prediction.values, truth.values, np.ones(truth.shape))
    scores = score_cube(prediction, truth, weights=None)
    assert scores.rmse.item() == pytest.approx(whole, rel=1e-12)


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


def test_every_metric_has_an_oracle():
    assert {*OF_PAIRS} == {*oracle_metrics.ORACLES, "max_error"}


def test_the_docs_list_every_metric():
    page = (Path(__file__).parent.parent / "docs" / "how_to" / "evaluation.md").read_text()
    for name, metric in METRICS.items():
        scored = ", ".join(metric.predictions)
        row = f"| `{name}` | {metric.long_name} | {metric.unit} | {scored} |"
        assert row in page, f"add this row to the table of metrics:\n{row}"


def test_a_metric_of_batches_has_the_name_of_its_class_or_that_in_the_registry():
    for metric_class in Metric.__subclasses__():
        metric = metric_class()
        assert metric.name == re.sub(r"(?<=[a-z])(?=[A-Z])", "_", metric_class.__name__).lower()
        metric.update(PREDICTION, TRUTH)
        same = Metric(metric.name)
        same.update(PREDICTION, TRUTH)
        assert metric.compute() == same.compute()


PREDICTION, TRUTH = np.array([1.0, 2.0, 4.0]), np.array([1.0, 3.0, 2.0])
