"""Losses over classes: targets as data sets give them, gaps, weights, labels of any numbers."""

import math

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.prediction import predict_cube
from ml4cube.training.losses import CrossEntropy, MaskedLoss, area_weights, balanced_weights
from ml4cube.training.measure.scores import BatchMean
from ml4cube.training.pytorch import Trainer

LABELS = (30, 10, 20)


def slow_cross_entropy(pred, target, weights):
    """The formula, cell by cell; pred (N, C, H, W), target (N, 1, H, W) of positions."""
    above = below = 0.0
    for (n, _, i, j), label in np.ndenumerate(target):
        if math.isfinite(label):
            logits = pred[n, :, i, j]
            p = math.exp(logits[int(label)]) / sum(map(math.exp, logits))
            above -= weights[n, 0, i, j] * math.log(p)
            below += weights[n, 0, i, j]
    return above / below if below else 0.0


@settings(max_examples=30, deadline=None)
@given(
    seed=st.integers(0, 999),
    gaps=st.sampled_from([0.0, 0.3, 1.0]),
    by_class=st.booleans(),
    per=st.sampled_from(["sample", "cell", None]),
)
def test_cross_entropy_is_the_formula_over_cells_with_a_class(seed, gaps, by_class, per):
    rng = np.random.default_rng(seed)
    pred, position = rng.normal(size=(3, 3, 2, 4)), rng.integers(0, 3, (3, 1, 2, 4)).astype(float)
    position[rng.random(position.shape) < gaps] = np.nan
    labels = np.where(
        np.isnan(position), np.nan, np.array(LABELS)[np.nan_to_num(position).astype(int)]
    )
    own = {"sample": rng.random(3), "cell": rng.random((3, 1, 2, 4)), None: np.ones(3)}[per]
    of_classes = np.array([0.5, 3.0, 1.0]) if by_class else np.ones(3)
    rows = np.array([0.5, 2.0]).reshape(2, 1)
    full = own.reshape(3, -1, *[1] * 2) if per != "cell" else own
    full = full * rows * of_classes[np.nan_to_num(position).astype(int)]
    classes = dict(zip(LABELS, of_classes, strict=True)) if by_class else LABELS
    loss, given_weights = CrossEntropy(classes, rows), None if per is None else torch.tensor(own)
    found = loss(torch.tensor(pred), torch.tensor(labels), given_weights)
    assert found.item() == pytest.approx(slow_cross_entropy(pred, position, full), rel=1e-5)
    weight = full[np.isfinite(position)].sum()
    assert loss.weigh(torch.tensor(labels), given_weights).item() == pytest.approx(weight, rel=1e-5)
    # torch's own loss takes the same targets, of positions
    other = MaskedLoss(nn.CrossEntropyLoss(torch.tensor(of_classes)), rows)
    assert other(torch.tensor(pred), torch.tensor(position), given_weights).item() == pytest.approx(
        found.item(), rel=1e-5
    )
    assert other.weigh(torch.tensor(position), given_weights).item() == pytest.approx(
        weight, rel=1e-5
    )


def test_no_gradient_reaches_cells_without_a_class():
    pred = torch.randn(2, 3, 4, requires_grad=True)
    target = torch.tensor([[[0.0, math.nan, 2, 1]], [[math.nan, 1, 1, 0]]])
    for loss in (CrossEntropy([0, 1, 2]), BatchMean("loss", nn.CrossEntropyLoss())):
        pred.grad = None
        extra = (2,) if isinstance(loss, BatchMean) else ()
        loss(pred, target, *extra).backward()
        assert (pred.grad.abs().sum(1) > 0).equal(target[:, 0].isfinite())


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_torchs_own_loss_takes_the_targets_of_a_data_set(dtype):
    pred, target = torch.randn(4, 3, 2, 2), torch.randint(3, (4, 1, 2, 2))
    expected = nn.functional.cross_entropy(pred, target[:, 0])
    mean = BatchMean("loss", nn.CrossEntropyLoss())
    torch.testing.assert_close(mean(pred, target.to(dtype), 4), expected)
    assert mean.weigh(target.to(dtype)).item() == target.numel()


def test_the_axis_of_a_window_of_one_cell_is_no_channel():
    pred, target = torch.randn(4, 3, 1, 5), torch.randint(3, (4, 1, 5))
    expected = nn.functional.cross_entropy(pred, target)
    torch.testing.assert_close(MaskedLoss(nn.CrossEntropyLoss())(pred, target), expected)


def test_probabilities_as_targets_are_taken_as_torch_does():
    pred, target = torch.randn(4, 3, 5), torch.rand(4, 3, 5)
    expected = nn.functional.cross_entropy(pred, target)
    torch.testing.assert_close(BatchMean("loss", nn.CrossEntropyLoss())(pred, target, 4), expected)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: CrossEntropy([1]), InvalidValueError, "two or more distinct labels, got"),
        (lambda: CrossEntropy([1, 1]), InvalidValueError, "two or more distinct labels, got"),
        (lambda: CrossEntropy({0: 1, 1: -1}), InvalidValueError, "weights must be 0 or more"),
        (
            lambda: CrossEntropy([0, 1])(torch.ones(1, 2, 1), torch.tensor([[[5.0]]])),
            InvalidValueError,
            r"the target has the label 5, but classes are \[0, 1\]; add it, or make it a gap",
        ),
        (
            lambda: CrossEntropy([0, 1])(torch.ones(1, 3, 1), torch.ones(1, 1, 1)),
            InvalidValueError,
            r"one channel for each of the 2 classes, \(N, 2, ...\), got \(1, 3, 1\)",
        ),
        (
            lambda: BatchMean("loss", nn.CrossEntropyLoss())(
                torch.ones(1, 3, 1), torch.tensor([[[0.3]]]), 1
            ),
            InvalidValueError,
            "must be whole numbers, got 0.3; if the target was scaled",
        ),
        (lambda: balanced_weights([1, 2]), InvalidTypeError, "data must be a PTXrDataset with one"),
    ],
)
def test_wrong_classes_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def cover_cube(steps=40):
    """Land cover with gaps, as xarray decodes it, that follows from a field `x` with noise."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps, 6, 8)).astype("float32")
    labels = np.array([10.0, 20.0, 30.0])[
        np.digitize(x + rng.normal(size=x.shape) / 4, [-0.5, 1.4])
    ]
    labels[rng.random(x.shape) < 0.05] = np.nan
    attrs = {"flag_values": np.array([10, 20, 30], "i1"), "flag_meanings": "water land ice"}
    dims = ("time", "lat", "lon")
    time = xr.date_range("2000-01-01", periods=steps, freq="MS")
    coords = {"time": time, "lat": np.linspace(-75, 75, 6), "lon": np.arange(8) * 45.0}
    return xr.Dataset({"x": (dims, x), "cover": (dims, labels.astype("float32"), attrs)}, coords)


WINDOW = {"sample_size": {"lat": 3, "lon": 4}, "drop_nan": "if_all_nan"}


def test_balanced_weights_are_those_of_scikit_learn():
    cube = cover_cube()
    found = balanced_weights(PTXrDataset(cube, "cover", **WINDOW))
    labels = cube.cover.values[np.isfinite(cube.cover.values)]
    expected = compute_class_weight("balanced", classes=np.array([10, 20, 30]), y=labels)
    assert list(found) == [10, 20, 30]
    np.testing.assert_allclose(list(found.values()), expected)
    assert balanced_weights(PTXrDataset(cube, "cover", scale_fn=None, **WINDOW)) == found
    with pytest.raises(InvalidValueError, match="1 to 64 classes, 'x' has more"):
        balanced_weights(PTXrDataset(cube, "x", features="cover", **WINDOW))
    with pytest.raises(InvalidValueError, match=r"labels must be whole numbers.* if it was scaled"):
        balanced_weights(PTXrDataset(cube.drop_attrs(), "cover", **WINDOW))


def test_balanced_weights_are_in_the_order_of_the_channels_that_predict_cube_expects():
    cube = cover_cube()
    cube.cover.attrs["flag_values"] = [30, 10, 20]
    cube["x"] = cube.cover.fillna(10).drop_attrs()
    data = PTXrDataset(cube, "cover", scale_fn=None, **WINDOW)
    labels = [*balanced_weights(data)]
    assert labels == [30, 10, 20]

    class Perfect(nn.Module):
        def forward(self, x):
            return torch.cat([-((x - label) ** 2) for label in labels], dim=1)

    found = predict_cube(Perfect(), cube, data, reduce="argmax", progress=False)["cover"]
    known = cube.cover.notnull()
    np.testing.assert_array_equal(found.where(known), cube.cover)


def test_torchs_own_loss_trains_on_targets_with_gaps_as_ours_does():
    cube = cover_cube()
    cube["cover"] = (cube.cover / 10 - 1).assign_attrs(cube.cover.attrs)
    found = []
    for loss in (nn.CrossEntropyLoss(), CrossEntropy([0, 1, 2])):
        data = PTXrDataset(cube, "cover", **WINDOW)
        torch.manual_seed(0)
        model = nn.Conv2d(1, 3, 1)
        loaders = (
            prep_dataloader(data, batch_size=32, seed=0),
            prep_dataloader(data, batch_size=7),
        )
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        trainer = Trainer(model, *loaders, optimizer, loss=loss, epochs=2, progress=False)
        trainer.train()
        found.append(trainer.history.to_dict()["val_loss"])
    assert np.isfinite(found).all()
    np.testing.assert_allclose(*found, rtol=1e-5)


def test_labels_with_flags_are_not_scaled_and_train():
    data = PTXrDataset(cover_cube(), "cover", **WINDOW)
    labels = data.take(range(len(data)))[1]
    assert set(labels[labels.isfinite()].tolist()) == {10.0, 20.0, 30.0}
    assert "cover" not in data.statistics
    loss = CrossEntropy([10, 20, 30], area_weights([-60.0, 0.0, 60.0]))
    torch.manual_seed(0)
    model = nn.Conv2d(1, 3, 1)
    trainer = Trainer(
        model,
        prep_dataloader(data, batch_size=32),
        prep_dataloader(data, batch_size=7, shuffle=False, drop_last=False),
        torch.optim.Adam(model.parameters(), 0.1),
        loss=loss,
        epochs=8,
        progress=False,
    )
    trained = trainer.train()
    losses = trainer.history.to_dict()["val_loss"]
    assert losses[-1] < 0.6 * losses[0]
    features, target = data.take(range(len(data)))
    with torch.no_grad():  # validation in batches is the loss of all cells at once
        whole = loss(trained(features), target).item()
    assert min(losses) == pytest.approx(whole, rel=1e-5)
