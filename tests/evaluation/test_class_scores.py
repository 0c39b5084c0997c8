"""Scores of classes, held to scikit-learn: weights, gaps, baselines, parts, intervals."""

import itertools

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sk

from ml4cube.errors import InvalidValueError
from ml4cube.evaluation import evaluate, score_cube
from ml4cube.evaluation.scorecard import Scorecard

LAT, LABELS, NAMES = np.array([-60.0, 0.0, 60.0]), (3, 7, 9), "water land ice"
FLAGS = {"flag_values": np.array(LABELS, "i1"), "flag_meanings": NAMES}
AREAS = np.array([[0.5], [1.0], [0.5]])  # of the bands with bounds at 30 degrees
DIMS = ("time", "lat", "lon")
QUICK = {"progress": False}


def cubes(seed=0, gaps=0.1, dtype="float32", flags=FLAGS):
    """Labels of 24 months with gaps, of which 12 are for training, and probabilities of them."""
    rng = np.random.default_rng(seed)
    time = xr.date_range("2000-01-01", periods=24, freq="MS")
    coords = {"time": time, "lat": LAT, "lon": np.arange(4) * 90.0}
    labels = rng.choice(LABELS, (24, 3, 4), p=[0.5, 0.4, 0.1]).astype(dtype)
    if np.dtype(dtype).kind == "f":
        labels[rng.random(labels.shape) < gaps] = np.nan
    truth = xr.Dataset({"cover": (DIMS, labels, flags)}, coords)
    truth["split"] = "time", (np.arange(24) < 12).astype("uint8")
    raw = rng.random((24, 3, 3, 4)) + np.stack([labels == c for c in LABELS], 1) / 2
    raw /= raw.sum(1, keepdims=True)
    coords["class"] = list(LABELS)
    prediction = xr.Dataset({"cover": (("time", "class", "lat", "lon"), raw)}, coords)
    return prediction.isel(time=slice(12, 24)), truth


def as_map(prediction, attrs=FLAGS):
    best = np.array(LABELS)[prediction.cover.argmax("class").values]
    return xr.Dataset({"cover": (DIMS, best, attrs)}, prediction.drop_vars("class").coords)


def pairs(prediction, truth):
    """Return the true class, probabilities and weight of each scored cell, in one list."""
    p = prediction.cover.transpose("time", "lat", "lon", "class").values
    t = truth.cover.sel(time=prediction.time).values
    known = np.isfinite(t)
    weights = np.broadcast_to(AREAS, t.shape)
    return t[known], p[known], weights[known]


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 99), gaps=st.sampled_from([0.0, 0.3]), is_map=st.booleans())
def test_scores_are_those_of_scikit_learn(seed, gaps, is_map):
    prediction, truth = cubes(seed, gaps)
    t, p, w = pairs(prediction, truth)
    best = np.array(LABELS)[p.argmax(1)]
    card = evaluate(as_map(prediction) if is_map else prediction, truth, **QUICK)
    scores = card.scores.squeeze(drop=True)
    expected = {
        "accuracy": sk.accuracy_score(t, best, sample_weight=w),
        "balanced_accuracy": sk.recall_score(
            t, best, labels=np.unique(t), average="macro", sample_weight=w
        ),
        "kappa": sk.cohen_kappa_score(t, best, sample_weight=w),
    }
    if not is_map:
        expected["log_loss"] = sk.log_loss(t, p, labels=LABELS, sample_weight=w)
        squares = ((p - (t[:, None] == LABELS)) ** 2).sum(1)
        expected["brier"] = np.average(squares, weights=w)
    for name, value in expected.items():
        assert scores[name].item() == pytest.approx(value), name
    assert scores["count"].item() == len(t)
    assert set(scores) == {*expected, "count", "unpredicted"} | {
        f"{name}_{end}" for name in expected for end in ("low", "high", "independent")
    }
    each = card.classes["cover"].sel(model="prediction")
    options = {"labels": LABELS, "average": None, "sample_weight": w, "zero_division": np.nan}
    precision, recall, f1, _ = sk.precision_recall_fscore_support(t, best, **options)
    np.testing.assert_allclose(each.precision, precision)
    np.testing.assert_allclose(each.recall, recall)
    np.testing.assert_allclose(each.f1, f1)
    np.testing.assert_allclose(
        each.iou, sk.jaccard_score(t, best, **{**options, "zero_division": 0})
    )
    assert each.class_name.values.tolist() == NAMES.split()
    matrix = sk.confusion_matrix(t, best, labels=LABELS, sample_weight=w)
    np.testing.assert_allclose(card.confusion["cover"][0], matrix / matrix.sum())


def test_the_climatology_has_the_frequencies_of_the_train_cells_alone():
    prediction, truth = cubes(gaps=0.0)
    options = {"baselines": "climatology", "climatology": "mean", **QUICK}
    card = evaluate(prediction, truth, **options)
    train = truth.cover[:12].values
    shares = np.stack([(train == c).mean(0) for c in LABELS], -1)
    t = truth.cover[12:].values
    w = np.broadcast_to(AREAS, t.shape).ravel()
    usual = np.broadcast_to(shares, (*t.shape, 3)).reshape(-1, 3)
    scores = card.scores.sel(variable="cover", model="climatology")
    likely = np.array(LABELS)[usual.argmax(1)]
    t = t.ravel()
    assert scores.accuracy.item() == pytest.approx(sk.accuracy_score(t, likely, sample_weight=w))
    squares = ((usual - (t[:, None] == LABELS)) ** 2).sum(1)
    assert scores.brier.item() == pytest.approx(np.average(squares, weights=w))
    # other test labels do not change the climatology: it is worse or better, not another one
    changed = truth.copy(deep=True)
    changed.cover[12:] = 3
    other = evaluate(prediction, changed, **options).confusion["cover"].sel(model="climatology")
    predicted = other.sum("class")
    by_class = [np.average(likely == c, weights=w) for c in LABELS]
    np.testing.assert_allclose(predicted, by_class)


def test_maps_of_labels_are_compared_with_the_labels_of_baselines():
    prediction, truth = cubes()
    card = evaluate(as_map(prediction), truth, baselines="climatology", climatology="mean", **QUICK)
    accuracy = card.scores.accuracy.sel(variable="cover")
    rates = 1 - accuracy
    skill = card.scores.skill.sel(variable="cover", baseline="climatology").item()
    assert skill == pytest.approx(1 - (rates[0] / rates[1]).item())
    assert card.verdict == [
        "cover cannot be compared with climatology: the climatology is from one year."
    ]
    assert "rmse" not in card.scores
    assert "RMSE" not in repr(card)
    assert "Accuracy" in repr(card)
    assert card.map.cover_brier.max() <= 2
    assert "cover_rmse" not in card.map
    assert not card.reliability


def test_parts_merge_and_become_json():
    prediction, truth = cubes()
    options = {"baselines": "climatology", "climatology": "mean", "block_length": 2, **QUICK}
    whole = evaluate(prediction, truth, **options)
    parts = [evaluate(prediction.isel(time=t), truth, **options) for t in ([0, 2, 4], [1, 3])]
    rest = evaluate(prediction.isel(time=slice(5, None)), truth, **options)
    merged = parts[0].merge(rest).merge(parts[1])
    again = Scorecard.from_json(merged.to_json())
    xr.testing.assert_allclose(again.sums.rows["cover"], whole.sums.rows["cover"])
    for name in ("precision", "recall", "f1", "iou", "frequency"):
        xr.testing.assert_allclose(again.classes["cover"][name], whole.classes["cover"][name])
    xr.testing.assert_allclose(again.confusion["cover"], whole.confusion["cover"])
    inside = whole.scores.sel(variable="cover", model="prediction")
    assert inside.accuracy_low < inside.accuracy < inside.accuracy_high
    ice = whole.classes["cover"].sel({"model": "prediction", "class": 9})
    assert ice.recall_low < ice.recall < ice.recall_high


def test_scores_by_label_and_beside_a_quantity():
    prediction, truth = cubes()
    truth["t"] = truth.cover * 0 + 5.0
    truth["t"].attrs = {"units": "K"}
    prediction["t"] = truth.t[12:] + 1
    card = evaluate(prediction, truth, by="lat", **QUICK)
    at = prediction.cover.sel(lat=0.0).transpose("time", "lon", "class").values
    true = truth.cover.sel(lat=0.0, time=prediction.time).values
    known = np.isfinite(true)
    true, best = true[known], np.array(LABELS)[at.argmax(-1)][known]
    scores = card.scores.sel(model="prediction", lat=0.0)
    assert scores.accuracy.sel(variable="cover").item() == pytest.approx(np.mean(true == best))
    recall = sk.recall_score(true, best, labels=LABELS, average=None)
    each = card.classes["cover"].sel(model="prediction", lat=0.0)
    np.testing.assert_allclose(each.recall, recall)
    assert scores.rmse.sel(variable="t").item() == pytest.approx(1)
    assert np.isnan(scores.accuracy.sel(variable="t"))
    assert np.isnan(scores.rmse.sel(variable="cover"))


def test_classes_may_be_named_and_in_another_order():
    prediction, truth = cubes()
    expected = evaluate(prediction, truth, **QUICK).table
    turned = prediction.isel({"class": [2, 0, 1]}).assign_coords(
        {"class": ["ice", "water", "land"]}
    )
    found = evaluate(turned, truth, **QUICK).table
    np.testing.assert_allclose(found.value, expected.value)
    both = evaluate(prediction, truth, baselines={"turned": turned}, **QUICK).scores
    np.testing.assert_allclose(both.brier.sel(model="turned"), both.brier.sel(model="prediction"))


def test_booleans_of_both_are_classes():
    prediction, truth = cubes(dtype="int16", flags={})
    truth["cover"] = truth.cover == 9
    labels = as_map(prediction, {}).assign(cover=as_map(prediction, {}).cover == 9)
    scores = evaluate(labels, truth, **QUICK).scores
    t = truth.cover.sel(time=labels.time)
    w = np.broadcast_to(AREAS, t.shape).ravel()
    expected = sk.accuracy_score(t.values.ravel(), labels.cover.values.ravel(), sample_weight=w)
    assert scores.accuracy.sel(variable="cover").item() == pytest.approx(expected)


@pytest.mark.parametrize("dtype", ["int16", "float64"])
def test_integers_without_flags_are_quantities(dtype):
    prediction, truth = cubes(dtype="int16", flags={})
    counts = as_map(prediction, {}).astype(dtype)
    scores = evaluate(counts, truth, **QUICK).scores
    assert "accuracy" not in scores
    error = (counts.cover.astype("float64") - truth.cover).values
    rmse = np.sqrt(np.average(error**2, weights=np.broadcast_to(AREAS, error.shape)))
    assert scores.rmse.sel(variable="cover", model="prediction").item() == pytest.approx(rmse)


def test_a_cell_without_the_probability_of_a_class_is_not_predicted():
    prediction, truth = cubes(gaps=0.0)
    prediction.cover[0, 1, 0, 0] = np.nan
    with pytest.warns(
        UserWarning, match="'prediction' does in 1 cells with a truth, 143 are scored"
    ):
        card = evaluate(prediction, truth, **QUICK)
    scores = card.scores.sel(variable="cover", model="prediction")
    assert (scores["count"], scores.unpredicted) == (143, 1)
    prediction.cover[0, :, 0, 0] = np.nan
    with pytest.warns(UserWarning, match="143 are scored"):
        same = evaluate(prediction, truth, **QUICK)
    np.testing.assert_array_equal(same.table.value, card.table.value)


def test_what_is_no_class_is_refused():
    prediction, truth = cubes()
    other = as_map(prediction)
    other.cover[0, 0, 0] = 5
    with pytest.raises(
        InvalidValueError, match=r"'cover' has the label 5, but its classes are \[3"
    ):
        evaluate(other, truth, **QUICK)
    lacking = prediction.isel({"class": [0, 1]})
    with pytest.raises(InvalidValueError, match=r"'cover' has the label 9, but its classes are"):
        evaluate(lacking, truth, **QUICK)
    with pytest.raises(InvalidValueError, match=r"must have the classes \[3, 7, 9\], got \[3, 7\]"):
        evaluate(prediction, truth, baselines={"b": lacking}, **QUICK)
    with pytest.raises(
        InvalidValueError, match="must have probabilities from 0 to 1 along 'class'"
    ):
        evaluate(prediction * 4 - 2, truth, **QUICK)
    members = as_map(prediction).expand_dims(member=2)
    with pytest.raises(InvalidValueError, match="must have probabilities along 'class' if it has"):
        evaluate(members, truth, **QUICK)
    with pytest.raises(
        InvalidValueError, match="'cover' holds classes by its flags, which have no"
    ):
        score_cube(as_map(prediction), truth[["cover"]].isel(time=slice(12, 24)))
    labels = truth[["cover"]].isel(time=slice(12, 24))
    with pytest.raises(
        InvalidValueError, match="'cover' holds classes by its flags, which have no"
    ):
        score_cube(labels, labels.drop_attrs())


@pytest.mark.parametrize("dtype", ["U5", object, np.dtypes.StringDType()])  # of numpy, in files
def test_classes_may_have_the_names_of_the_flags(dtype):
    prediction, truth = cubes()
    named = prediction.assign_coords({"class": np.array(NAMES.split(), dtype)})
    found, expected = (evaluate(p, truth, **QUICK) for p in (named, prediction))
    xr.testing.assert_identical(found.scores, expected.scores)


@pytest.mark.parametrize("n", [2, 9])  # 9 members have as many ranks as there are bins
def test_members_are_scored_as_the_mean_of_their_probabilities(n):
    prediction, truth = cubes()
    orders = [np.roll(np.arange(3), k) for k in range(n)]
    members = [prediction.cover.copy(data=prediction.cover.values[:, order]) for order in orders]
    ensemble = xr.concat(members, "member").to_dataset()
    found, expected = (evaluate(p, truth, **QUICK) for p in (ensemble, ensemble.mean("member")))
    for metric in ("accuracy", "brier", "log_loss"):
        np.testing.assert_allclose(found.scores[metric], expected.scores[metric])
    xr.testing.assert_allclose(found.reliability["cover"], expected.reliability["cover"])


def test_the_figure_has_the_scores_of_each_class_and_the_confusion_matrix():
    prediction, truth = cubes()
    card = evaluate(prediction, truth, baselines="climatology", climatology="mean", progress=False)
    figure = card.plot()
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert titles[:4] == ["cover", "Skill over climatology", "Scores by class", "Confusion matrix"]
    matrix = figure.axes[3].images[0].get_array()
    t, p, w = pairs(prediction, truth)
    expected = sk.confusion_matrix(
        t, np.array(LABELS)[p.argmax(1)], labels=LABELS, sample_weight=w, normalize="true"
    )
    np.testing.assert_allclose(matrix, 100 * expected)
    recalls = figure.axes[2].containers[0][0].get_xdata()
    np.testing.assert_allclose(recalls, np.diag(expected))
    assert figure.axes[2].get_xlabel() == "score (1 is perfect); without a bar: no interval"
    card = evaluate(prediction, truth, block_length=1, **QUICK)
    assert card.plot().axes[1].get_xlabel() == "score (1 is perfect)"


def test_the_names_of_many_classes_do_not_overlap():
    rng = np.random.default_rng(0)
    time = xr.date_range("2000-01-01", periods=10, freq="MS")
    flags = {
        "flag_values": np.arange(20),
        "flag_meanings": " ".join(f"closed_forest_{i}" for i in range(20)),
    }
    labels = rng.integers(0, 20, (10, 4, 40))
    coords = {"time": time, "lat": np.arange(4.0), "lon": np.arange(40.0)}
    truth = xr.Dataset({"cover": (DIMS, labels, flags)}, coords)
    figure = evaluate(truth, truth, **QUICK).plot()
    figure.draw_without_rendering()
    scores, matrix = figure.axes[1:3]
    for texts in (scores.get_yticklabels(), matrix.get_yticklabels(), matrix.get_xticklabels()):
        assert len(texts) == 20
        boxes = [text.get_window_extent() for text in texts]
        assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))
