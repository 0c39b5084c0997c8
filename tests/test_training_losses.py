"""Losses over cells with a value: the formula, its gradients, and exactness however data is cut."""

import itertools
import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ml4cube.errors import EmptyPartError, InvalidTypeError, InvalidValueError, RunError
from ml4cube.training.losses import MaskedLoss, area_weights, masked
from ml4cube.training.pytorch_distributed import Trainer
from tests.distributed_runner import on_ranks
from tests.oracle import band_areas
from tests.training_parts import dataset, network, trainer, weights

NAN = math.nan


def slow_mean(pred, target, weight, one_loss):
    """The formula, cell by cell."""
    above = below = 0.0
    for p, t, w in zip(pred.ravel(), target.ravel(), weight.ravel(), strict=True):
        if not math.isnan(t):
            above += w * one_loss(p, t)
            below += w
    return above / below if below else 0.0


def square(p, t):
    return (p - t) ** 2


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 99),
    gaps=st.sampled_from([0.0, 0.4, 1.0]),
    per=st.sampled_from(["sample", "cell", None]),
)
def test_loss_is_the_formula_over_cells_with_a_value(shape, seed, gaps, per):
    rng = np.random.default_rng(seed)
    pred, target = rng.normal(size=shape), rng.normal(size=shape)
    target[rng.random(shape) < gaps] = NAN
    rows = np.array([0.5, 1.0, 2.0])[: shape[1]].reshape(-1, 1)
    own = {"sample": rng.random(shape[0]), "cell": rng.random(shape), None: np.ones(shape[0])}[per]
    full = own.reshape(own.shape + (1,) * (3 - own.ndim)) * rows * np.ones(shape)
    loss = MaskedLoss(nn.MSELoss(), weights=rows)
    arguments = [torch.tensor(pred), torch.tensor(target)]
    if per is not None:
        arguments.append(torch.tensor(own))
    found = loss(*arguments).item()
    assert found == pytest.approx(slow_mean(pred, target, full, square), rel=1e-5, abs=1e-12)
    weight = loss.weigh(*arguments[1:]).item()
    assert weight == pytest.approx((full * ~np.isnan(target)).sum(), rel=1e-5, abs=1e-12)


class Squares(nn.Module):
    """A module that is told by the call how to reduce."""

    def forward(self, pred, target, reduction="mean"):
        return nn.functional.mse_loss(pred, target, reduction=reduction)


class Classes(nn.Module):
    """A module whose call knows an ignored index."""

    def forward(self, pred, target, ignore_index=-1, reduction="mean"):
        return nn.functional.cross_entropy(
            pred, target, ignore_index=ignore_index, reduction=reduction
        )


@pytest.mark.parametrize(
    "loss",
    [
        nn.MSELoss(),
        Squares(),
        nn.MSELoss(reduction="sum"),
        nn.functional.mse_loss,
        lambda p, t: (p - t) ** 2,
    ],
)
def test_modules_functions_and_own_losses_give_the_same(loss):
    pred, target = torch.tensor([1.0, 2.0, 5.0]), torch.tensor([0.0, NAN, 1.0])
    assert masked(loss)(pred, target).item() == pytest.approx((1 + 16) / 2)
    if isinstance(loss, nn.MSELoss):
        assert loss.reduction in ("mean", "sum")  # as the user made it


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (nn.CrossEntropyLoss(), -100),
        (nn.functional.cross_entropy, -100),
        (partial(nn.functional.cross_entropy, ignore_index=255), 255),
        (Classes(), -1),
    ],
)
def test_classes_with_an_ignored_index_weigh_what_is_left(loss, ignored):
    pred = torch.randn(4, 3, 2, 2, generator=torch.Generator().manual_seed(0))
    target = torch.tensor([0, 1, 2, ignored] * 4).reshape(4, 2, 2)
    assert MaskedLoss(loss)(pred, target).item() == pytest.approx(loss(pred, target).item())
    assert MaskedLoss(loss).weigh(target).item() == 12


@pytest.mark.parametrize("bad", [NAN, math.inf])
def test_no_gradient_passes_a_gap_not_even_of_zero_times_nan(bad):
    """Whatever model and loss do where there is no target."""
    start = torch.tensor([1.0, 2.0, 3.0], requires_grad=True)
    pred = start * torch.tensor([1.0, 1.0, bad])
    target = torch.tensor([2.0, NAN, NAN])
    for loss, value, slope in (
        (nn.MSELoss(), 1.0, -2.0),
        (lambda p, t: (p - t) ** 2 / t, 0.5, -1.0),  # 0 / 0 in the gaps
    ):
        start.grad = None
        found = MaskedLoss(loss)(pred, target)
        found.backward(retain_graph=True)
        assert found.item() == value
        assert start.grad[:2].tolist() == [slope, 0.0]


def test_weighted_by_area():
    lat = xr.DataArray([-75.0, 0.0, 30.0], dims="lat")
    areas = band_areas(lat)
    pred, target = torch.zeros(2, 1, 3, 2), torch.arange(12.0).reshape(2, 1, 3, 2)
    target[0, 0, 1, 0] = NAN
    full = np.broadcast_to(areas[:, None], (2, 1, 3, 2))
    found = MaskedLoss(nn.L1Loss(), weights=area_weights(lat))(pred, target).item()
    truth = slow_mean(pred.numpy(), target.numpy(), full, lambda p, t: abs(p - t))
    assert found == pytest.approx(truth, rel=1e-4)
    assert area_weights(lat, axis=-1).shape == (3,)
    assert area_weights([90.0, -90.0, 90.0000001]).tolist() == [[0.5], [1.0], [0.5]]
    assert area_weights([[0.0, 60.0], [60.0, 90.0]], axis=-3).squeeze(-1).tolist() == (
        [[1.0, 0.5], [0.5, 0.0]]
    )
    radians = np.deg2rad(lat).assign_attrs(units="radian")
    torch.testing.assert_close(area_weights(radians), area_weights(lat))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: MaskedLoss(3), InvalidTypeError, "loss=3"),
        (lambda: MaskedLoss(nn.MSELoss(), weights=[1.0, -1.0]), InvalidValueError, "0 or more"),
        (lambda: MaskedLoss(nn.MSELoss(), weights=[1.0, NAN]), InvalidValueError, "0 or more"),
        (lambda: MaskedLoss(nn.MSELoss(), weights=[0.0]), InvalidValueError, "above 0"),
        (lambda: area_weights([91.0]), InvalidValueError, "-90 to 90"),
        (lambda: area_weights([NAN]), InvalidValueError, "-90 to 90"),
        (lambda: area_weights([[[1.0]]]), InvalidValueError, "one per row, or one per cell"),
        (lambda: area_weights([1.0, 2.0], axis=2), InvalidValueError, "axis=2"),
        (lambda: area_weights([[1.0, 2.0]], axis=-1), InvalidValueError, "axis=-1"),
        (lambda: area_weights([1.0]), InvalidValueError, "bounds"),
        (
            lambda: MaskedLoss(lambda p, t: (p - t).mean())(torch.ones(3), torch.ones(3)),
            InvalidValueError,
            "value per cell",
        ),
        (
            lambda: MaskedLoss(nn.MSELoss(), weights=[1.0, 1.0])(torch.ones(1), torch.ones(1)),
            InvalidValueError,
            "weights do not fit",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, error, message):
    with pytest.raises(error) as caught:
        make()
    assert message in str(caught.value)


# ----------------------------------------------------- however the data is cut


def gappy(samples=24, cells=4):
    """Targets of several cells with gaps, unevenly spread, one sample with nothing at all."""
    x = dataset(samples).tensors[0]
    y = torch.randn(samples, cells, generator=torch.Generator().manual_seed(1))
    y[torch.rand(samples, cells, generator=torch.Generator().manual_seed(2)) < 0.5] = NAN
    y[5], y[8:12] = NAN, NAN
    return x, y


def own_weights(samples=24):
    return torch.rand(samples, generator=torch.Generator().manual_seed(3))


def fit(batches, *, weighted=False, rows=True, accumulate=1):
    """Train one step per window on given sample ranges; weights, losses and reported means."""
    x, y = gappy()
    rank = dist.get_rank() if dist.is_initialized() else 0
    chosen = [slice(*ends[rank]) for ends in batches]
    parts = [(x[c], y[c], own_weights()[c]) if weighted else (x[c], y[c]) for c in chosen]
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0]) if rows else None
    loss = nn.MSELoss() if weighted and not rows else MaskedLoss(nn.MSELoss(), weights=weight)
    model = nn.Linear(3, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    run = Trainer(
        model,
        parts,
        parts,
        torch.optim.SGD(model.parameters(), lr=0.05),
        loss=loss,
        metrics={"mae": MaskedLoss(nn.L1Loss(), weights=weight)} if not weighted else None,
        epochs=1,
        gradient_accumulation_steps=accumulate,
        device="cpu",
        validate_parallelism=False,
    )
    run.train()
    row = {name: run.history[name][0] for name in run.history if name in ("val_loss", "mae")}
    return weights(model)["weight"], row, run.history["train_loss"][0]


def assert_alike(found, truth):
    assert np.asarray(found[0]) == pytest.approx(np.asarray(truth[0]), rel=1e-5)
    assert found[1] == pytest.approx(truth[1], rel=1e-5)
    assert found[2] == pytest.approx(truth[2], rel=1e-5)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("rows", [False, True])
def test_accumulated_batches_count_by_their_cells(weighted, rows):
    """One batch, and the same samples cut unevenly, also one batch without any value."""
    kind = {"weighted": weighted, "rows": rows}
    one = fit([[(0, 24)]], **kind)
    for cuts in ([0, 5, 24], [0, 1, 8, 12, 20, 24]):
        cut = [[ends] for ends in itertools.pairwise(cuts)]
        assert_alike(fit(cut, accumulate=len(cut), **kind), one)


@pytest.fixture(scope="module")
def two_ranks():
    return on_ranks(2, on_two)


def on_two():
    return {weighted: cut_over_ranks(weighted=weighted) for weighted in (False, True)}


def cut_over_ranks(**kind):
    # equal lengths, unequal lengths, and a rank without any value; then accumulated
    return [
        fit([[(0, 12), (12, 24)]], **kind),
        fit([[(0, 3), (3, 24)]], **kind),
        fit([[(8, 12), (12, 24)], [(0, 4), (4, 8)]], accumulate=2, **kind),
    ]


@pytest.mark.parametrize("weighted", [False, True])
def test_ranks_count_by_their_cells(weighted, two_ranks):
    one = fit([[(0, 24)]], weighted=weighted)
    for results in two_ranks:
        for found in results[weighted]:
            assert_alike(found, one)


def test_nothing_to_learn_leaves_the_model_and_is_an_error_only_where_nothing_ever_counts():
    x, y = dataset(8).tensors
    void = torch.full_like(y, NAN)
    loss = MaskedLoss(nn.MSELoss())
    model = network()
    run = trainer(model=model, train=[(x, void), (x, y)], val=[(x, y)], loss=loss, epochs=1)
    run.train()
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    with pytest.raises(EmptyPartError, match="train_data gave samples, but not one value"):
        trainer(train=[(x, void)], val=[(x, y)], loss=loss).train()
    with pytest.raises(EmptyPartError, match="test_data gave samples, but not one value"):
        trainer(train=[(x, y)], val=[(x, void)], loss=loss).train()


def test_a_nan_loss_says_whether_it_comes_from_gaps_of_targets():
    x, y = dataset(8).tensors
    holes = y.clone()
    holes[3] = NAN
    targets = r"The targets of that batch have gaps \(NaN\); MaskedLoss .*: loss=MaskedLoss"
    # the gap is in one batch of many, and long before the losses are looked at
    with pytest.raises(RunError, match=r"epoch 1, step 2.*" + targets):
        trainer(train=[(x, y), (x, holes), (x, y)]).train()
    with pytest.raises(RunError, match=r"validation loss is nan.*batch 3.*" + targets):
        trainer(train=[(x, y)], val=[(x, y), (x, y), (x, holes)]).train()
    with pytest.raises(RunError, match="Look for gaps in that batch"):
        trainer(train=[(x * NAN, y)]).train()
    with pytest.raises(RunError, match="Look for gaps in that batch"):
        trainer(train=[(x * NAN, holes)], loss=MaskedLoss(nn.MSELoss())).train()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_masked_losses_work_in_half_precision(precision):
    x, y = gappy()
    run = trainer(
        model=nn.Linear(3, 4),
        train=[(x, y)] * 4,
        val=[(x, y)],
        loss=MaskedLoss(nn.MSELoss()),
        precision=precision,
        epochs=3,
    )
    run.train()
    assert run.history["val_loss"][-1] < run.history["val_loss"][0]
