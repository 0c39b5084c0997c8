"""What a model may return, and which models there are: every one becomes a cube."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LinearRegression, RidgeClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.prediction import predict_cube
from ml4cube.prediction.layout import Expected, Layout, Outputs
from ml4cube.preprocessing import Statistics
from ml4cube.training.ranks.dist import launch
from tests.cubes import cell_id_cube
from tests.distributed_runner import kept_ranks

WINDOWS = {"sample_size": {"lat": 2, "lon": 3}}


def cube(**more) -> xr.Dataset:
    made = cell_id_cube({"time": 3, "lat": 4, "lon": 6}, names=("a", "b"), **more)
    made["kind"] = (made.a.fillna(0).astype(int) % 3).assign_attrs(flag_meanings="x y z")
    return made


def of_a(x):
    return x[:, :1]


# --- several outputs -------------------------------------------------------------------------


def test_quantiles_get_a_dim_and_are_unscaled_and_blended():
    data = PTXrDataset(cube(), "b", ["a"], **WINDOWS)
    b = data.statistics["b"]
    shift = torch.tensor([-1.0, 0.0, 1.0])[:, None, None]
    result = predict_cube(
        lambda x: x + shift, cube(), data, outputs={"quantile": [0.1, 0.5, 0.9]}, overlap=0.5
    )
    assert result.b.dims == ("quantile", "time", "lat", "lon")
    assert result["quantile"].values.tolist() == [0.1, 0.5, 0.9]
    scaled = (cube().a - data.statistics["a"].mean) / data.statistics["a"].std
    for n, quantile in enumerate((-1, 0, 1)):
        expected = (scaled + quantile) * b.std + b.mean
        np.testing.assert_allclose(result.b[n], expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("form", ["axis", "tuple", "dict"])
def test_named_outputs_are_variables_and_a_spread_has_no_offset(form):
    data = PTXrDataset(cube(), "a", ["b"], **WINDOWS)
    a = data.statistics["a"]

    def model(x):
        mean, std, var = x[:, 0], torch.full_like(x[:, 0], 2), torch.full_like(x[:, 0], 9)
        if form == "axis":
            return torch.stack([mean, std, var], 1)
        if form == "tuple":
            return mean, std, var
        return {"var": var, "mean": mean[:, None], "std": std}

    result = predict_cube(model, cube(), data, outputs=["mean", "std", "var"])
    assert set(result.data_vars) == {"a_mean", "a_std", "a_var"}
    np.testing.assert_allclose(result.a_std, 2 * a.std, rtol=1e-5)
    np.testing.assert_allclose(result.a_var, 9 * a.std**2, rtol=1e-5)
    scaled = (cube().b - data.statistics["b"].mean) / data.statistics["b"].std
    np.testing.assert_allclose(result.a_mean, scaled * a.std + a.mean, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("form", ["dict", "tuple"])
def test_targets_come_by_name_or_in_order(form):
    data = PTXrDataset(cube(), features=["a", "b"], **WINDOWS)

    def model(x):
        if form == "dict":
            return {"b": x[:, 1], "a": x[:, :1]}
        return x[:, 0], x[:, 1]

    result = predict_cube(model, cube(), data)
    xr.testing.assert_allclose(
        result[["a", "b"]].drop_attrs(), cube()[["a", "b"]].drop_attrs(), atol=1e-3
    )


def test_classes_are_probabilities_blended_before_the_most_likely_is_chosen():
    made = cube()
    data = PTXrDataset(made, "kind", ["a"], scale_fn=None, **WINDOWS)

    def model(x):  # logits that depend on where in the window a cell lies
        at = torch.arange(6.0).reshape(2, 3)
        return torch.stack([x[:, 0] % 3 * at, 1 + at.expand(len(x), 2, 3), 0 * x[:, 0]], 1)

    result = predict_cube(model, made, data, overlap=0.5)
    assert result.kind.dims == ("class", "time", "lat", "lon")
    assert result["class"].values.tolist() == [0, 1, 2]
    np.testing.assert_allclose(result.kind.sum("class"), 1, rtol=1e-6)
    assert "flag_meanings" not in result.kind.attrs
    best = predict_cube(model, made, data, overlap=0.5, reduce="argmax")
    assert best.kind.dims == ("time", "lat", "lon")
    np.testing.assert_array_equal(best.kind, result.kind.argmax("class"))
    assert best.kind.attrs["flag_meanings"] == "x y z"
    again = predict_cube(
        lambda x: model(x).softmax(1), made, data, overlap=0.5, outputs={"class": [5, 7, 9]}
    )
    np.testing.assert_allclose(again.kind, result.kind, atol=1e-6)
    assert again["class"].values.tolist() == [5, 7, 9]
    names = {"class": ["x", "y", "z"]}
    named = predict_cube(model, made, data, outputs=names, reduce="argmax")
    assert named.kind.attrs["flag_values"] == [0, 1, 2]


@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_labels_of_classes_are_those_of_the_flags(dtype):
    made, flags = cube(), {"flag_values": [10, 20, 30], "flag_meanings": "x y z"}
    made["kind"] = (10 + 10 * made.kind).astype(dtype).assign_attrs(flags)
    data = PTXrDataset(made, "kind", ["a"], **WINDOWS)
    model = nn.Conv2d(1, 3, 1)
    found = predict_cube(model, made, data)
    assert found["class"].values.tolist() == [10, 20, 30]
    best = predict_cube(model, made, data, reduce="argmax").kind
    np.testing.assert_array_equal(best, 10 + 10 * found.kind.argmax("class"))
    assert {key: best.attrs[key] for key in flags} == flags
    # names are looked up, whatever their order
    turned = {"outputs": {"class": ["z", "x", "y"]}, "reduce": "argmax"}
    named = predict_cube(lambda x: model(x)[:, [2, 0, 1]], made, data, **turned).kind
    xr.testing.assert_identical(named.drop_attrs(), best.drop_attrs())
    assert {key: named.attrs[key] for key in flags} == flags
    others = predict_cube(model, made, data, outputs={"class": [1, 2, 3]}, reduce="argmax").kind
    assert others.attrs["flag_values"] == [1, 2, 3]
    assert "flag_meanings" not in others.attrs
    with pytest.raises(
        InvalidValueError, match=r"flag_values of 'kind' have 3 entries .* name them"
    ):
        predict_cube(nn.Conv2d(1, 4, 1), made, data)


def test_labels_have_no_units_of_what_they_were_computed_from():
    made = cube()
    made["warm"] = (made.a > made.a.median()).assign_attrs(units="K")  # as xarray may keep them
    data = PTXrDataset(made, "warm", ["a"], **WINDOWS)
    best = predict_cube(nn.Conv2d(1, 2, 1), made, data, reduce="argmax").warm
    assert best.attrs["flag_values"] == [0, 1]
    assert "units" not in best.attrs


def test_a_number_for_an_integer_target_stays_a_number():
    data = PTXrDataset(cube(), "kind", ["a"], scale_fn=None, **WINDOWS)
    np.testing.assert_allclose(predict_cube(of_a, cube(), data).kind, cube().a)


def test_windows_of_equal_sides_may_have_numbers_of_integers_and_one_output():
    square, made = {"sample_size": {"lat": 2, "lon": 2}}, cube()
    data = PTXrDataset(made, "kind", ["a"], scale_fn=None, **square)
    np.testing.assert_allclose(predict_cube(of_a, made, data).kind, made.a)
    one = predict_cube(of_a, made, features="a", outputs={"member": 1}, **square)
    np.testing.assert_allclose(one.a[0], made.a)


def test_probabilities_have_no_scaling_even_if_the_target_has_statistics():
    made = cube()
    result = predict_cube(
        lambda x: torch.cat([x, 1 - x, 0 * x], 1).softmax(1),
        made,
        {"a": [0.0, 100.0], "kind": [1.0, 0.8]},
        features="a",
        targets="kind",
        outputs={"class": 3},
    )
    np.testing.assert_allclose(result.kind.sum("class"), 1, rtol=1e-6)


def test_rounded_probabilities_are_not_taken_as_logits():
    model = nn.Sequential(nn.Conv2d(1, 40, 1), nn.Softmax(1))
    data = PTXrDataset(cube(), "kind", ["a"], **WINDOWS)
    exact = predict_cube(model, cube(), data).kind
    rounded = predict_cube(model.bfloat16(), cube(), data).kind
    np.testing.assert_allclose(rounded, exact, rtol=0.1, atol=2e-3)


@pytest.mark.parametrize("batch_size", [None, 7])
def test_many_outputs_make_smaller_blocks_than_those_of_the_first_result(batch_size):
    made = cell_id_cube({"lat": 150, "lon": 240}, gaps=0.5)
    shift = torch.arange(40.0)[:, None, None]
    result = predict_cube(
        lambda x: x + shift,
        made,
        keep_gaps=False,
        outputs={"member": 40},
        batch_size=batch_size if batch_size is None else batch_size * 200,
        sample_size={"lat": 3, "lon": 4},
    )
    np.testing.assert_allclose(result.a, made.a.values + shift.numpy())


def test_an_embedding_has_a_feature_dim():
    data = PTXrDataset(cube(), features=["a", "b"], **WINDOWS)
    result = predict_cube(lambda x: torch.cat([x, x, x], 1)[:, :5], cube(), data)
    assert result.embedding.dims == ("feature", "time", "lat", "lon")
    assert result.sizes["feature"] == 5
    patches = predict_cube(lambda x: x.mean((2, 3)).repeat(1, 2), cube(), data)
    assert dict(patches.sizes) == {"feature": 4, "time": 3, "lat": 2, "lon": 2}
    expected = cube().a.coarsen(lat=2, lon=3).mean()
    scaled = (expected - data.statistics["a"].mean) / data.statistics["a"].std
    np.testing.assert_allclose(patches.embedding[0], scaled, atol=1e-4)
    np.testing.assert_allclose(patches.lat, expected.lat)
    np.testing.assert_allclose(patches.lon, expected.lon)


# --- windows that become one number ----------------------------------------------------------


def test_a_window_of_a_whole_dim_that_becomes_one_number_loses_the_dim():
    made = cube()
    series = predict_cube(lambda x: x.mean((2, 3)), made[["a"]], sample_size={"lat": 4, "lon": 6})
    assert series.a.dims == ("time",)
    assert "lat" not in series.coords
    np.testing.assert_allclose(series.a, made.a.mean(("lat", "lon")), rtol=1e-5)
    maps = predict_cube(lambda x: x[:, :, -1], made[["a"]], sample_size={"time": 3})
    assert maps.a.dims == ("lat", "lon")
    np.testing.assert_array_equal(maps.a, made.a[-1])


def test_windows_side_by_side_that_become_numbers_get_a_coarser_grid():
    made = cube()
    result = predict_cube(lambda x: x.mean((1, 2, 3)), made[["a"]], **WINDOWS, overlap={"lat": 0.5})
    assert dict(result.sizes) == {"time": 3, "lat": 3, "lon": 2}
    expected = made.a.rolling(lat=2, lon=3).mean()[:, 1:, 2::3]
    np.testing.assert_allclose(result.a, expected, rtol=1e-5)
    np.testing.assert_allclose(result.lat, (made.lat.values[1:] + made.lat.values[:-1]) / 2)


def test_one_axis_of_several_may_be_lost():
    made = cube()
    size = {"time": 3, "lat": 2, "lon": 4}
    result = predict_cube(lambda x: x.mean(2), made[["a"]].isel(lon=slice(4)), sample_size=size)
    assert result.a.dims == ("lat", "lon")
    np.testing.assert_allclose(result.a, made.a.mean("time")[:, :4], rtol=1e-5)
    with pytest.raises(InvalidValueError, match=r"may lack any of \[\('lat',\), \('lon',\)\]"):
        predict_cube(lambda x: x.mean(3), made[["a"]], sample_size={"time": 3, "lat": 2, "lon": 2})


def test_the_cell_in_the_middle_of_a_window_is_predicted_where_there_is_a_window():
    made = cube()
    lead = {"target_offset": {"lat": 1, "lon": 1}, "target_size": {"lat": 1, "lon": 1}}
    data = PTXrDataset(made, "a", ["a", "b"], sample_size={"lat": 3, "lon": 3}, **lead)
    result = predict_cube(lambda x: x[:, :1, 1, 1], made, data)
    assert result.a.dims == ("time", "lat", "lon")
    inner = {"lat": slice(1, -1), "lon": slice(1, -1)}
    np.testing.assert_allclose(result.a.isel(inner), made.a.isel(inner), rtol=1e-5)
    assert int(result.a.notnull().sum()) == 3 * 2 * 4


def test_gaps_are_those_of_the_target_cell_also_if_there_is_one_window():
    made = cell_id_cube({"time": 9, "lev": 4, "lon": 6}, gaps=0.3, names=("a", "b"))
    lead = {"target_offset": {"lev": 2}, "target_size": {"lev": 1}}
    data = PTXrDataset(
        made, "a", ["a", "b"], sample_size={"lev": 4}, drop_nan=None, scale_fn=None, **lead
    )
    mask = xr.DataArray(np.add.outer(range(4), range(6)) % 3 > 0, dims=("lev", "lon"))
    result = predict_cube(lambda x: 0 * x[:, :1, 2].nan_to_num() + 1, made, data, mask=mask)
    known = (made.a.notnull() & mask).isel(lev=2)
    np.testing.assert_array_equal(result.a.notnull(), known)


def test_a_column_becomes_the_value_at_one_level():
    made = cell_id_cube({"time": 3, "lev": 4, "lon": 6}, names=("a", "b"))
    lead = {"target_offset": {"lev": 2}, "target_size": {"lev": 1}}
    data = PTXrDataset(made, "a", ["a", "b"], sample_size={"lev": 4}, **lead)
    result = predict_cube(lambda x: x[:, :1, 2], made, data)
    assert result.a.dims == ("time", "lon")
    assert result.lev.item() == made.lev.values[2]
    np.testing.assert_allclose(result.a, made.a.isel(lev=2), rtol=1e-5, atol=1e-4)


# --- models ----------------------------------------------------------------------------------


def test_estimators_get_rows_and_give_cubes():
    made = cube()
    data = PTXrDataset(made, "b", ["a"], **WINDOWS)
    x, y = (t.reshape(len(t), -1).numpy() for t in data.take(range(len(data))))
    model = make_pipeline(StandardScaler(), LinearRegression()).fit(x, y)
    result = predict_cube(model, made, data)
    np.testing.assert_allclose(result.b, made.b, rtol=1e-3, atol=1e-2)
    points = PTXrDataset(made, "b", ["a"])
    x, y = (t.numpy() for t in points.take(range(len(points))))
    plain = predict_cube(LinearRegression().fit(x, y[:, 0]), made, points)
    np.testing.assert_allclose(plain.b, made.b, rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("model", [RandomForestClassifier(5, random_state=0), RidgeClassifier()])
def test_classifiers_give_probabilities_of_their_classes(model):
    made = cube()
    made["kind"] = made.kind.where(made.kind > 0, 7)
    points = PTXrDataset(made, "kind", ["a", "b"])
    x, y = (t.numpy() for t in points.take(range(len(points))))
    model.fit(x, y[:, 0].astype(int))
    result = predict_cube(model, made, points)
    assert result["class"].values.tolist() == [1, 2, 7]
    rows = model.predict(x).reshape(made.kind.shape)
    best = predict_cube(model, made, points, reduce="argmax")
    np.testing.assert_array_equal(best.kind, rows)


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, False])
def test_exported_programs_run_also_with_a_fixed_batch(dynamic):
    made = cube()
    data = PTXrDataset(made, "b", ["a"], **WINDOWS)
    module = nn.Conv2d(1, 1, 3, padding=1, dtype=torch.float64)
    shapes = ({0: torch.export.Dim("batch")},) if dynamic else None
    example = torch.zeros(5, 1, 2, 3, dtype=torch.float64)
    program = torch.export.export(module, (example,), dynamic_shapes=shapes)
    np.testing.assert_allclose(
        predict_cube(program, made, data).b, predict_cube(module, made, data).b, rtol=1e-5
    )


def test_a_list_of_models_gives_mean_and_spread():
    made = cube(gaps=0.1)
    members = [nn.Conv2d(1, 1, 3, padding=1) for _ in range(3)]
    options = {"features": "a", "overlap": 0.5, **WINDOWS}
    each = np.stack([predict_cube(member, made, **options).a.values for member in members])
    result = predict_cube(members, made, **options)
    assert list(result.data_vars) == ["a", "a_spread"]
    np.testing.assert_allclose(result.a, each.mean(0), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(result.a_spread, each.std(0), rtol=1e-3, atol=1e-3)
    assert result.a_spread.attrs["long_name"] == "standard deviation of a over members"


def test_members_may_work_in_place_and_return_dicts_of_another_order():
    made = cube()

    def add(x):
        x += 1
        return {"mean": x[:, 0], "std": 0 * x[:, 0] + 5}

    def add_reversed(x):
        return dict(reversed(add(x).items()))

    result = predict_cube([add, add_reversed], made, features="a", **WINDOWS)
    np.testing.assert_array_equal(result.a_mean, made.a + 1)
    np.testing.assert_array_equal(result.a_std, 5)
    assert not result.a_mean_spread.any()
    assert not result.a_std_spread.any()


def dropped_out(rank_count: int = 1) -> dict:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 8, 1), nn.Dropout(0.5), nn.Conv2d(8, 1, 1)).train()
    made = cube()[["a"]]
    result = predict_cube(model, made, {"a": [100.0, 60.0]}, samples=20, batch_size=4, **WINDOWS)
    assert model.training
    return result.load().to_dict()


def test_samples_of_dropout_have_a_seed_of_their_own():
    before = torch.random.get_rng_state()
    first, second = (xr.Dataset.from_dict(dropped_out()) for _ in range(2))
    assert first.identical(second)
    assert float(first.a_spread.min()) > 0
    torch.manual_seed(0)
    assert before is not None
    model = nn.Sequential(nn.Conv2d(1, 8, 1), nn.Dropout(0.5), nn.Conv2d(8, 1, 1)).eval()
    exact = predict_cube(model, cube()[["a"]], {"a": [100.0, 60.0]}, **WINDOWS)
    distance = abs(first.a - exact.a) / (first.a_spread / np.sqrt(20))
    assert float((distance < 4).mean()) > 0.95


class Sequences(nn.Module):
    """A part that makes sequences (windows, steps, 8) of others, between linear ones."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.start, self.part, self.end = nn.Linear(1, 8), part, nn.Linear(8, 1)

    def forward(self, x):
        inner = self.start(x.transpose(1, 2))
        of_attention = isinstance(self.part, nn.MultiheadAttention)
        inner = self.part(inner, inner, inner) if of_attention else self.part(inner)
        inner = inner[0] if isinstance(inner, tuple) else inner
        return self.end(inner).transpose(1, 2)


@pytest.mark.parametrize(
    "part",
    [
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5, batch_first=True),
        nn.MultiheadAttention(8, 2, dropout=0.5, batch_first=True),
        nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True),
    ],
)
def test_dropout_inside_attention_and_recurrent_layers_is_sampled_too(part):
    model = Sequences(part)
    result = predict_cube(
        model, cube(), {"a": [100.0, 60.0]}, features="a", sample_size={"time": 3}, samples=5
    )
    assert float(result.a_spread.min()) > 0
    assert model.part.training
    assert torch.backends.mha.get_fastpath_enabled()


@pytest.mark.slow
def test_samples_do_not_depend_on_the_number_of_ranks(monkeypatch):
    monkeypatch.setattr("ml4cube.prediction.sharing._BLOCK_CELLS", (12, 12))
    with kept_ranks():
        shared = xr.Dataset.from_dict(launch(dropped_out, 2))
    monkeypatch.undo()
    assert shared.equals(xr.Dataset.from_dict(dropped_out()))


# --- refusals --------------------------------------------------------------------------------


def test_results_that_fit_nothing_are_refused():
    made = cube()
    data = PTXrDataset(made, "b", ["a"], **WINDOWS)
    three = nn.Conv2d(1, 3, 1)
    quantiles = {"quantile": [0.1, 0.9]}
    bad = [
        (three, {}, InvalidValueError, "must return shape .12, 1, 2, 3. .* name several outputs"),
        (three, {"outputs": quantiles}, InvalidValueError, "outputs has 2 entries .* returns 3"),
        (three, {"outputs": ["mean", "std"]}, InvalidValueError, r"outputs \('mean', 'std'\), got"),
        (three, {"outputs": {"lat": 3}}, InvalidValueError, "dim that the result does not have"),
        (three, {"outputs": {"member": 0}}, InvalidValueError, "must be at least 1, got 0"),
        (three, {"outputs": {"q": [1, 1, 2]}}, InvalidValueError, "distinct entries"),
        (three, {"outputs": {}}, InvalidValueError, "must have one dim"),
        (three, {"outputs": 3}, InvalidTypeError, "outputs must be a list, got 3"),
        (of_a, {"reduce": "argmax"}, InvalidValueError, "needs targets that are classes"),
        (of_a, {"reduce": "max"}, InvalidValueError, "reduce must be 'argmax' or None, got 'max'"),
        (three, {"samples": 3}, InvalidValueError, "needs a model with dropout layers"),
        (of_a, {"samples": 0}, InvalidValueError, "samples must be at least 1, got 0"),
        ([of_a, of_a], {"samples": 2}, InvalidTypeError, "a list of 2; give one of the two"),
        ([], {}, InvalidValueError, "got an empty list"),
        ([of_a, 3], {}, InvalidTypeError, "or a list of them, got 3"),
        (lambda x: {"c": x, "d": x, "b": 1}, {}, InvalidTypeError, "one entry per window, got int"),
        (lambda x: (x, x), {}, InvalidValueError, "got 2 arrays"),
    ]
    for model, more, error, message in bad:
        with pytest.raises(error, match=message):
            predict_cube(model, made, data, **more)


def test_classes_that_cannot_be_told_apart_are_refused():
    made = cube()
    integers = PTXrDataset(made, "kind", ["a"], **WINDOWS)
    with pytest.raises(InvalidValueError, match=r"one number for each class, got one for .'kind'"):
        predict_cube(of_a, made, integers, reduce="argmax")
    with pytest.raises(InvalidValueError, match=r"each class of .'kind'., got labels"):
        predict_cube(lambda x: x[:, 0].long() % 3, made, integers, overlap=0.5)
    stats = {"a": [0.0, 1.0]}
    labels = predict_cube(
        lambda x: x[:, 0].long() % 3, made, stats, features="a", targets="kind", **WINDOWS
    )
    np.testing.assert_array_equal(labels.kind, made.a % 3)
    named = made.rename(kind="class")
    with pytest.raises(InvalidValueError, match="cannot have the name of a dim, 'class'"):
        predict_cube(nn.Conv2d(1, 3, 1), named, PTXrDataset(named, "class", ["a"], **WINDOWS))
    x = made.a.values.reshape(-1, 1)
    members = [RandomForestClassifier(2).fit(x, made.kind.values.ravel() + n) for n in (0, 1)]
    with pytest.raises(InvalidValueError, match=r"the same classes, got .\(0, 1, 2\), \(1, 2, 3\)"):
        predict_cube(members, made, features="a", targets="kind")


def test_a_layout_reads_probabilities_and_logits_alike():
    expected = Expected(("k",), True, {"x": 4}, {"k": None}, Outputs.parse(None, ()))
    logits = np.random.default_rng(0).normal(size=(3, 5, 4))
    layout = Layout.of(logits, expected, (3, 2, 4))
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    np.testing.assert_allclose(layout.channels(logits, (3, 2, 4)), shares)
    shares[0] = np.nan
    np.testing.assert_allclose(layout.channels(shares, (3, 2, 4)), shares)


def test_cells_that_a_model_masks_do_not_turn_the_probabilities_of_others():
    expected = Expected(("k",), True, {"x": 4}, {"k": None}, Outputs.parse(None, ()))
    shares = np.random.default_rng(0).dirichlet(np.ones(5), size=(3, 4)).transpose(0, 2, 1)
    shares[0, :, 2] = 0.0
    layout = Layout.of(shares, expected, (3, 2, 4))
    np.testing.assert_array_equal(layout.channels(shares, (3, 2, 4)), shares)
    untrained = layout.channels(np.zeros((3, 5, 4)), (3, 2, 4))  # logits
    np.testing.assert_allclose(untrained, 0.2)


@pytest.mark.parametrize("given", ["statistics", "pairs"])
def test_statistics_of_integers_do_not_tell_whether_a_model_got_them_scaled(given):
    made = cube().assign(height=cube().a.round().astype("int16"))
    statistics = Statistics.from_cube(made, ["a", "height"])
    of_cube = statistics if given == "statistics" else statistics.mean_std()
    with pytest.raises(InvalidValueError, match=r"statistics of \['height'\], which hold integers"):
        predict_cube(nn.Conv2d(1, 1, 1), made, of_cube, features="height", targets="a")
    predict_cube(nn.Identity(), made, of_cube, features="a", targets="a")


def test_probabilities_in_half_precision_are_no_logits():
    logits = 3 * torch.randn(500, 4, generator=torch.Generator().manual_seed(0))
    probabilities = torch.softmax(logits.bfloat16(), 1).float().numpy()
    assert np.abs(probabilities.sum(axis=1) - 1).max() > 1e-3
    expected = Expected(("k",), True, {}, {"k": None}, Outputs())
    layout = Layout.of(probabilities, expected, (500, 1))
    channels = layout.channels(probabilities, (500, 1))
    np.testing.assert_array_equal(channels[:, :, 0], probabilities)
