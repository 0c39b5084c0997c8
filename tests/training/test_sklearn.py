"""Estimators of scikit-learn: batch by batch or at once, measured exactly, saved without pickle."""

import pickle
import sys
import zipfile

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.cluster import DBSCAN, KMeans, MiniBatchKMeans
from sklearn.decomposition import PCA, IncrementalPCA
from sklearn.ensemble import RandomForestRegressor
from sklearn.linear_model import LinearRegression, SGDClassifier, SGDRegressor
from sklearn.metrics import f1_score, max_error, mean_absolute_error, r2_score, silhouette_score
from sklearn.mixture import GaussianMixture
from sklearn.neural_network import MLPRegressor
from torch.utils.data import DataLoader, TensorDataset

from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.errors import EmptyPartError, InvalidTypeError, InvalidValueError, RunError, StoreError
from ml4cube.evaluation.metrics import RMSE
from ml4cube.training.loggers import CSVLogger
from ml4cube.training.sklearn import Trainer, load_model, save_model
from tests.samplestores import write_store
from tests.training_parts import Planted


def numbers(samples=40, features=3, seed=0):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(samples, features)).astype("float32")
    return x, (x.sum(1) + generator.normal(scale=0.1, size=samples)).astype("float32")


X, Y = numbers()


def loader(x, y=None, size=7):
    tensors = [torch.from_numpy(np.asarray(a)) for a in (x, y) if a is not None]
    return DataLoader(TensorDataset(*tensors), batch_size=size)


# ---------------------------------------------------------------------- batch by batch


def test_partial_fit_sees_every_batch_of_every_epoch_in_order():
    model = Trainer(SGDRegressor(random_state=0), loader(X, Y), epochs=3).train()
    byhand = SGDRegressor(random_state=0)
    for _ in range(3):
        for start in range(0, 40, 7):
            byhand.partial_fit(X[start : start + 7], Y[start : start + 7])
    np.testing.assert_array_equal(model.coef_, byhand.coef_)


@settings(max_examples=15)
@given(samples=st.integers(3, 30), size=st.integers(1, 11))
def test_scores_do_not_depend_on_the_batches_of_validation(samples, size):
    x, y = numbers(50)
    test = numbers(samples, seed=1)
    metrics = {"r2": r2_score, "rmse": RMSE()}
    trainer = Trainer(SGDRegressor(random_state=0), loader(x, y), loader(*test, size), metrics)
    model = trainer.train()
    pred = model.predict(test[0])
    history = trainer.history.to_dict()
    assert history["r2"] == [pytest.approx(r2_score(test[1], pred), rel=1e-6, abs=1e-6)]
    error = np.square(pred - test[1]).mean()
    assert history["val_loss"] == [pytest.approx(error, rel=1e-5)]
    assert history["rmse"] == [pytest.approx(np.sqrt(error), rel=1e-5)]
    assert history["train_r2"] == [pytest.approx(r2_score(y, model.predict(x)), rel=1e-6)]
    assert metrics["rmse"].sums.count.item() == 0  # the user's own object was not fed


def test_classes_are_gathered_before_the_first_batch():
    x, _ = numbers(60)
    y = np.sort(np.digitize(x[:, 0], [-0.5, 0.5]))  # the first batches know one class only
    trainer = Trainer(
        SGDClassifier(random_state=0), loader(x, y), loader(x, y), {"f1": macro_f1}, epochs=2
    )
    model = trainer.train()
    assert model.classes_.tolist() == [0, 1, 2]
    wrong = (model.predict(x) != y).mean()
    assert trainer.history["val_loss"][trainer.best_epoch - 1] == pytest.approx(wrong)


def macro_f1(true, pred):
    return f1_score(true, pred, average="macro")


def test_classes_can_be_named_and_be_words():
    x, _ = numbers(8)
    words = np.array(["sea", "land"] * 4)
    batches = [(x[:4], words[:4]), (x[4:], words[4:])]
    model = Trainer(SGDClassifier(random_state=0), batches, classes=["ice", "land", "sea"]).train()
    assert model.classes_.tolist() == ["ice", "land", "sea"]


class Wanders(SGDRegressor):
    """Its third epoch of six is the best: the weight moves past the truth and away."""

    def partial_fit(self, X, y, sample_weight=None):
        self.epoch_ = getattr(self, "epoch_", 0) + 1
        self.coef_, self.intercept_ = np.full(3, [0.2, 0.6, 1.0, 1.5, 2.0, 3.0][self.epoch_ - 1]), 0
        return self


@pytest.mark.slow
def test_the_best_epoch_is_returned_and_saved(tmp_path):
    path = tmp_path / "deep" / "best.skops"
    trainer = Trainer(Wanders(), [(X, Y)], [(X, Y)], model_path=path, epochs=6)
    model = trainer.train()
    assert (trainer.best_epoch, len(trainer.history), model.epoch_) == (3, 6, 3)
    saved = load_model(path, trusted=[f"{Wanders.__module__}.Wanders"])
    np.testing.assert_array_equal(saved.predict(X), model.predict(X))
    assert [file.name for file in path.parent.iterdir()] == ["best.skops"]


def test_without_a_number_to_choose_by_no_estimator_is_returned():
    trainer = Trainer(SGDRegressor(), [(X, Y)], loss=lambda true, pred: np.nan)
    with pytest.raises(RunError, match="train_loss was not a number in any epoch"):
        trainer.train()


def test_patience_counts_epochs_without_improvement():
    for patience, how in ((2, {}), (1, {"monitor": "r2", "mode": "max"})):
        settings_ = {"metrics": {"r2": r2_score}, "epochs": 6, "patience": patience, **how}
        trainer = Trainer(Wanders(), [(X, Y)], [(X, Y)], **settings_)
        assert trainer.train().epoch_ == 3
        assert len(trainer.history) == 3 + patience


def test_weights_of_samples_reach_the_estimator_loss_and_metrics():
    weights = np.where(np.arange(40) < 20, 1.0, 0.0)
    all_ = Trainer(LinearRegression(), [(X, Y, weights)], batch_training=False).train()
    np.testing.assert_allclose(all_.coef_, LinearRegression().fit(X[:20], Y[:20]).coef_, rtol=1e-3)
    with pytest.raises(InvalidTypeError, match="takes no sample_weight"):
        Trainer(IncrementalPCA(1), [(X, Y, weights)], task_type="unsupervised").train()

    weights = np.arange(40) % 2
    batches = [(X[i : i + 7], Y[i : i + 7], weights[i : i + 7]) for i in range(0, 40, 7)]
    metrics = {"r2": r2_score, "worst": max_error}  # which takes no weights
    scored = Trainer(SGDRegressor(), batches, batches, metrics)
    pred = scored.train().predict(X)
    assert scored.history["val_loss"] == [pytest.approx(np.square(pred - Y)[1::2].mean())]
    assert scored.history["r2"] == [pytest.approx(r2_score(Y[1::2], pred[1::2]))]
    assert scored.history["worst"] == [pytest.approx(np.abs(pred - Y).max())]

    for mixed in ([(X, Y, weights), (X, Y)], [(X, Y), (X, Y, weights)]):
        errors = np.square(pred - Y)
        mean = (errors.sum() + errors[1::2].sum()) / 60  # samples without a weight have weight 1
        assert scored.evaluate(mixed)["val_loss"] == pytest.approx(mean)


# ---------------------------------------------------------------------- windows and stores


def test_windows_are_flattened_and_several_targets_kept():
    x = np.random.default_rng(0).normal(size=(12, 2, 3, 3)).astype("float32")
    y = x[:, :1, :2, 0]
    model = Trainer(MLPRegressor(random_state=0), loader(x, y, 6), loader(x, y, 5)).train()
    assert model.predict(x.reshape(12, -1)).shape == (12, 2)
    assert model.n_features_in_ == 18


def test_a_sample_store_goes_straight_in(tmp_path):
    write_store(tmp_path / "a.zarr", 50, ("a", "b"))  # b = a + 1000
    data = PTXrDataset(tmp_path / "a.zarr", to_pred="b")
    batches = prep_dataloader(data, batch_size=8, shuffle=False, drop_last=False)
    trainer = Trainer(LinearRegression(), batches, batches, batch_training=False)
    model = trainer.train()
    assert trainer.history["samples"] == [50]
    assert trainer.history["val_loss"][0] < 1e-2
    x, y = data[7]
    np.testing.assert_allclose(model.predict(x.numpy().reshape(1, -1)), y.reshape(1, -1), rtol=1e-4)


# ---------------------------------------------------------------------- without supervision


def test_a_transformer_is_measured_on_what_it_gives_back():
    x, _ = numbers(60)
    trainer = Trainer(IncrementalPCA(2), loader(x, size=20), loader(x), task_type="unsupervised")
    model = trainer.train()
    back = model.inverse_transform(model.transform(x))
    assert trainer.history["val_loss"] == [pytest.approx(np.square(back - x).mean(), rel=1e-5)]
    shapes = Trainer(
        PCA(1), x[:, :1], task_type="unsupervised", loss=lambda true, pred: true.shape == pred.shape
    )
    shapes.train()
    assert shapes.history["train_loss"] == [True]  # also if X has one feature


def test_a_clusterer_needs_no_score():
    x, _ = numbers(60)
    trainer = Trainer(
        MiniBatchKMeans(2, random_state=0), loader(x, size=20), task_type="unsupervised", epochs=2
    )
    model = trainer.train()
    assert "train_loss" not in trainer.history
    assert trainer.best_epoch == 2
    with pytest.raises(InvalidValueError, match="give loss= or metrics="):
        Trainer(MiniBatchKMeans(2), loader(x), task_type="unsupervised", patience=1)
    scored = Trainer(
        KMeans(2, n_init=1, random_state=0),
        x,
        metrics={"silhouette": silhouette_score},
        task_type="unsupervised",
    )
    model = scored.train()
    assert scored.history["train_silhouette"] == [
        pytest.approx(silhouette_score(x, model.predict(x)))
    ]


@pytest.mark.parametrize("model", [DBSCAN(), GaussianMixture(2)])
def test_what_gives_nothing_that_compares_with_x_has_no_loss(model):
    trainer = Trainer(model, numbers(features=1)[0], task_type="unsupervised")
    trainer.train()
    assert trainer.history.keys() == ["epoch", "samples", "seconds"]


# ---------------------------------------------------------------------- the ancestor's calls


class Run:
    """What is used of MLflow."""

    def __init__(self):
        self.metrics, self.artifacts = [], []

    def log_metric(self, name, value, step=None):
        self.metrics.append((name, value, step))

    def log_artifact(self, path, name=None):
        self.artifacts.append((path, name))


@pytest.mark.slow
def test_arrays_are_fitted_at_once_and_logged_as_the_ancestor_did(tmp_path):
    (x, y), test = numbers(), numbers(20, seed=1)
    run = Run()
    trainer = Trainer(
        model=LinearRegression(),
        train_data=(x, y),
        test_data=test,
        metrics={"mae": mean_absolute_error},
        model_path=str(tmp_path / "model.skops"),
        batch_training=False,
        mlflow_run=run,
        task_type="supervised",
    )
    model = trainer.train()
    np.testing.assert_array_equal(model.coef_, LinearRegression().fit(x, y).coef_)
    logged = {name: value for name, value, _ in run.metrics}
    assert logged["training_mae"] == pytest.approx(mean_absolute_error(y, model.predict(x)))
    assert logged["validation_mae"] == trainer.history["mae"][0]
    assert run.artifacts == [(str(tmp_path / "model.skops"), "model.skops")]
    unsupervised = Trainer(PCA(1), x, task_type="unsupervised").train()
    np.testing.assert_allclose(unsupervised.components_, PCA(1).fit(x).components_)


def test_a_loader_can_be_fitted_at_once_within_a_limit():
    model = Trainer(LinearRegression(), loader(X, Y), batch_training=False, max_samples=40).train()
    np.testing.assert_allclose(model.coef_, LinearRegression().fit(X, Y).coef_, rtol=1e-5)
    with pytest.raises(InvalidValueError, match="more than max_samples=39"):
        Trainer(LinearRegression(), loader(X, Y), batch_training=False, max_samples=39).train()


def test_loggers_get_every_epoch(tmp_path):
    log = CSVLogger(tmp_path / "log.csv")
    trainer = Trainer(SGDRegressor(random_state=0), loader(X, Y), epochs=2, loggers=[log])
    trainer.train()
    rows = (tmp_path / "log.csv").read_text().split()
    assert rows[0].startswith("step,epoch,train_loss")
    assert [row.split(",")[0] for row in rows[1:]] == ["6", "12"]  # batches


# ---------------------------------------------------------------------- saving


def test_a_planted_pickle_is_never_executed(tmp_path):
    plain, planted = tmp_path / "plain", pickle.dumps(Planted(tmp_path / "executed"))
    plain.write_bytes(planted)
    with pytest.raises(StoreError, match="damaged or not written by save_model"):
        load_model(plain)
    save_model(tmp_path / "zip", LinearRegression())
    with zipfile.ZipFile(tmp_path / "zip", "a") as archive:
        archive.writestr("planted.pkl", planted)
    load_model(tmp_path / "zip")
    assert not (tmp_path / "executed").exists()


def test_types_from_elsewhere_must_be_trusted_by_name(tmp_path):
    save_model(tmp_path / "a", Wanders())
    with pytest.raises(StoreError, match="Wanders"):
        load_model(tmp_path / "a")
    with pytest.raises(StoreError, match="does not exist"):
        load_model(tmp_path / "b")


def test_without_skops_a_path_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "skops.io", None)
    monkeypatch.setitem(sys.modules, "skops", None)
    with pytest.raises(ModuleNotFoundError, match="pip install skops"):
        Trainer(SGDRegressor(), loader(X, Y), model_path=tmp_path / "m")
    Trainer(SGDRegressor(), loader(X, Y)).train()  # not needed without a path


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"model": RandomForestRegressor()}, InvalidTypeError, "has no partial_fit"),
        ({"model": SGDRegressor}, InvalidTypeError, "model must be an estimator object"),
        ({"task_type": "supervized"}, InvalidValueError, "did you mean 'supervised'"),
        ({"mode": "best"}, InvalidValueError, "mode must be 'min' or 'max', got 'best'"),
        ({"epochs": 0}, InvalidValueError, "epochs must be an int of 1 or more, got 0"),
        ({"model_path": 3}, InvalidTypeError, "model_path must be a path"),
        ({"train_data": None}, InvalidTypeError, "train_data must be a loader of .*, got None"),
        ({"batch_training": False, "epochs": 2}, InvalidTypeError, "epochs must be 1"),
        ({"patience": 0}, InvalidValueError, "patience"),
        ({"mlflow_run": 3}, InvalidTypeError, "log_metric"),
        ({"monitor": "mae"}, InvalidValueError, "got 'mae'"),
        ({"metrics": [r2_score]}, InvalidTypeError, "mapping"),
        ({"loggers": [3]}, InvalidTypeError, "loggers"),
    ],
)
def test_arguments_that_cannot_work(arguments, error, said):
    settings_ = {"model": SGDRegressor(), "train_data": loader(X, Y)} | arguments
    with pytest.raises(error, match=said):
        Trainer(**settings_)


@pytest.mark.parametrize(
    ("batches", "error", "said"),
    [
        ([], EmptyPartError, "train_data must not be empty"),
        ([(np.ones((0, 2, 3)), np.ones(0))], EmptyPartError, "train_data must not be empty"),
        ([np.ones((2, 3))], InvalidTypeError, "X alone"),
        ([(np.ones((2, 3)), np.ones(3))], InvalidValueError, "got 3 and 2"),
        ([(np.ones((2, 3)), np.ones(2), np.ones((2, 3)))], InvalidTypeError, "one value per"),
        ([(1, 2, 3, 4)], InvalidTypeError, "4 items"),
    ],
)
def test_batches_that_cannot_work(batches, error, said):
    with pytest.raises(error, match=said):
        Trainer(SGDRegressor(), batches).train()


def test_targets_that_are_not_used_must_fit_their_samples_too():
    with pytest.raises(InvalidValueError, match="got 3 and 2"):
        Trainer(
            MiniBatchKMeans(1), [(np.ones((2, 3)), np.ones(3))], task_type="unsupervised"
        ).train()
