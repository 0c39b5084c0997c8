"""Losses over cells with a value: the formula, its gradients, and exactness however data is cut."""

import inspect
import itertools
import math
import warnings
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
from ml4cube.training.inputs.batches import StepResult
from ml4cube.training.losses import MaskedLoss, area_weights, masked
from ml4cube.training.measure.means import Meter, Meters
from ml4cube.training.measure.scores import Scores, check_metrics
from ml4cube.training.run.steps import Supervised
from tests.distributed_runner import on_ranks
from tests.oracle import band_areas, quadrilateral_areas
from tests.training_parts import dataset, network, trained, trainer, weights

NAN = math.nan


def slow_mean(pred, target, weight, one_loss):
    """The formula, cell by cell."""
    above = below = 0.0
    for p, t, w in zip(pred.ravel(), target.ravel(), weight.ravel(), strict=True):
        if math.isfinite(t):
            above += w * one_loss(p, t)
            below += w
    return above / below if below else 0.0


def square(p, t):
    return (p - t) ** 2


@settings(max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3)),
    seed=st.integers(0, 99),
    gaps=st.sampled_from([0.0, 0.4, 1.0]),
    per=st.sampled_from(["sample", "cell", None]),
)
def test_loss_is_the_formula_over_cells_with_a_value(shape, seed, gaps, per):
    rng = np.random.default_rng(seed)
    pred, target = rng.normal(size=shape), rng.normal(size=shape)
    target[rng.random(shape) < gaps] = rng.choice([NAN, math.inf, -math.inf])
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
    assert weight == pytest.approx((full * np.isfinite(target)).sum(), rel=1e-5, abs=1e-12)


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


def test_no_gradient_passes_an_ignored_class():
    pred = torch.randn(2, 3, 4)
    pred[0, :, 1] = NAN
    pred.requires_grad_()
    target = torch.tensor([[0, 9, 1, 2], [2, 1, 0, 0]])
    loss = MaskedLoss(nn.CrossEntropyLoss(ignore_index=9))(pred, target)
    loss.backward()
    others = pred.detach().nan_to_num()
    truth = nn.functional.cross_entropy(others, target, ignore_index=9)
    assert loss.item() == pytest.approx(truth.item())
    assert pred.grad[0, :, 1].tolist() == [0.0, 0.0, 0.0]
    assert pred.grad.isfinite().all()


def test_weights_may_be_a_tensor_of_any_precision():
    loss = MaskedLoss(nn.MSELoss(), weights=torch.tensor([1, 3], dtype=torch.bfloat16))
    assert loss(torch.zeros(1, 2), torch.tensor([[0.0, 2.0]])).item() == 3.0


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
    lats, lons = np.array([[0.0, 5, 10], [1, 6, 11]]), np.array([[0.0, 1, 2], [5, 6, 7]])
    expected = torch.from_numpy(quadrilateral_areas(lats, lons)).float().unsqueeze(-1)
    torch.testing.assert_close(
        area_weights(lats, axis=-3, longitude=lons), expected, rtol=1e-3, atol=0
    )
    radians = np.deg2rad(lat).assign_attrs(units="radian")
    torch.testing.assert_close(area_weights(radians), area_weights(lat))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MaskedLoss(3), "loss must be a loss function"),
        (lambda: MaskedLoss(nn.MSELoss(), weights=[1.0, -1.0]), "0 or more"),
        (lambda: MaskedLoss(nn.MSELoss(), weights=[1.0, NAN]), "0 or more"),
        (
            lambda: MaskedLoss(nn.MSELoss(), weights=[0.0]),
            "at least one positive",
        ),
        (lambda: area_weights([91.0]), "-90 to 90"),
        (lambda: area_weights([NAN]), "-90 to 90"),
        (lambda: area_weights([[0.0, 60.0]]), "latitude need longitudes along"),
        (lambda: area_weights([[[1.0]]]), "one value per row or per cell"),
        (lambda: area_weights([1.0, 2.0], axis=2), "axis must be at most -1"),
        (lambda: area_weights([[1.0, 2.0]], axis=-1), "axis must be at most -2"),
        (lambda: area_weights([1.0]), "bounds"),
        (
            lambda: MaskedLoss(lambda p, t: (p - t).mean())(torch.ones(3), torch.ones(3)),
            "value per cell",
        ),
        (
            lambda: MaskedLoss(nn.MSELoss(), weights=[1.0, 1.0])(torch.ones(1), torch.ones(1)),
            "weights must broadcast",
        ),
    ],
)
def test_what_cannot_work_is_refused(make, message):
    with pytest.raises((InvalidTypeError, InvalidValueError), match=message):
        make()


# ------------------------------------------------ every loss of torch, however the data is cut

SHAPE, CLASSES = (3, 2), 4
WEIGHT = torch.tensor([0.2, 1.0, 3.0, 0.0])
REAL = [lambda g, n: torch.randn(n, *SHAPE, generator=g)] * 2
SHARE = [lambda g, n: torch.rand(n, *SHAPE, generator=g)] * 2
SIGN = [REAL[0], lambda g, n: torch.randint(0, 2, (n, *SHAPE), generator=g) * 2.0 - 1]
LOGITS = lambda g, n: torch.randn(n, CLASSES, *SHAPE, generator=g).log_softmax(1)  # noqa: E731


def classes(ignored=-100):
    """Some targets are ignored, some samples wholly."""

    def draw(g, n):
        target = torch.randint(0, CLASSES, (n, *SHAPE), generator=g)
        target[torch.rand(target.shape, generator=g) < 0.3] = ignored
        target[torch.rand(n, generator=g) < 0.3] = ignored
        return target

    return [LOGITS, draw]


ONE_CLASS = [
    lambda g, n: torch.randn(n, CLASSES, generator=g),
    lambda g, n: torch.randint(0, CLASSES, (n,), generator=g),
]
PROBABILITIES = [LOGITS, lambda g, n: torch.rand(n, CLASSES, *SHAPE, generator=g).softmax(1)]
LABELS = [ONE_CLASS[0], lambda g, n: torch.randint(0, 2, (n, CLASSES), generator=g).float()]
LABEL_SETS = [ONE_CLASS[0], lambda g, n: torch.randint(-1, CLASSES, (n, CLASSES), generator=g)]
PAIR = lambda g, n: torch.randn(n, 2, 5, generator=g)  # noqa: E731
SIGN_EACH = [PAIR, lambda g, n: torch.randint(0, 2, (n,), generator=g) * 2 - 1]
ANCHORED = [PAIR, lambda g, n: torch.randn(n, 5, generator=g)]


CTC = [
    lambda g, n: torch.randn(n, 8, 5, generator=g),
    lambda g, n: torch.randint(1, 5, (n, 3), generator=g),
]
LINEAR = [lambda g, n: torch.randn(n, 5, generator=g), ONE_CLASS[1]]


def of_two(loss, kind):
    """A loss of three arguments, as a function of the prediction, which holds two of them."""
    if kind == "margin":
        return lambda p, t: loss(p[:, 0, 0], p[:, 1, 0], t)
    if kind == "variance":
        return lambda p, t: loss(p[:, 0], t, p[:, 1].exp())
    if kind == "anchor":
        return lambda p, t: loss(t, p[:, 0], p[:, 1])
    if kind == "time":
        return lambda p, t: loss(
            p.log_softmax(2).transpose(0, 1), t, torch.full((len(p),), 8), torch.full((len(p),), 3)
        )
    return lambda p, t: loss(p[:, 0], p[:, 1], t)


def linear(**settings):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.LinearCrossEntropyLoss(5, CLASSES, **settings).requires_grad_(False)


# name of the loss: what it may be set to, how it is made, what it is given
LOSSES = {
    "L1Loss": [({}, REAL)],
    "MSELoss": [({}, REAL)],
    "SmoothL1Loss": [({"beta": 0.3}, REAL)],
    "HuberLoss": [({"delta": 0.5}, REAL)],
    "PoissonNLLLoss": [({"full": True}, [REAL[0], lambda g, n: 3 * SHARE[0](g, n)])],
    "KLDivLoss": [({}, [REAL[0], SHARE[1]]), ({"log_target": True}, REAL)],
    "BCELoss": [({}, SHARE), ({"weight": torch.tensor([0.5, 2.0])}, SHARE)],
    "BCEWithLogitsLoss": [({"pos_weight": torch.tensor([0.5, 2.0])}, [REAL[0], SHARE[1]])],
    "HingeEmbeddingLoss": [({}, SIGN)],
    "SoftMarginLoss": [({}, SIGN)],
    "MultiLabelMarginLoss": [({}, LABEL_SETS)],
    "MultiLabelSoftMarginLoss": [({"weight": WEIGHT}, LABELS)],
    "MultiMarginLoss": [({"weight": WEIGHT}, ONE_CLASS)],
    "NLLLoss": [({}, classes()), ({"weight": WEIGHT, "ignore_index": 255}, classes(255))],
    "CrossEntropyLoss": [
        ({}, classes()),
        ({"weight": WEIGHT}, classes()),
        ({"ignore_index": 1}, classes(1)),
        ({"weight": WEIGHT, "ignore_index": 2, "label_smoothing": 0.1}, classes(2)),
        ({"weight": WEIGHT, "label_smoothing": 0.1}, PROBABILITIES),
    ],
    "LinearCrossEntropyLoss": [({}, LINEAR), ({"weight": WEIGHT, "ignore_index": 1}, LINEAR)],
    "GaussianNLLLoss": [({}, ANCHORED, "variance")],
    "CosineEmbeddingLoss": [({}, SIGN_EACH, "two")],
    "MarginRankingLoss": [({}, SIGN_EACH, "margin")],
    "TripletMarginLoss": [({}, ANCHORED, "anchor")],
    "TripletMarginWithDistanceLoss": [({}, ANCHORED, "anchor")],
    "CTCLoss": [({}, CTC, "time")],
}


def every_loss():
    """Each loss, how it reduces, and what makes predictions and targets."""
    for name, kinds in LOSSES.items():
        if not hasattr(nn, name):  # of a newer torch
            continue
        for how, drawn, *more in kinds:
            make = linear if name == "LinearCrossEntropyLoss" else getattr(nn, name)
            if more:  # a function of one's own says nothing of sums, and is to be a mean
                yield pytest.param(of_two(make(**how), *more), "mean", drawn, id=name)
                continue
            for reduction in ("mean", "sum") + (("batchmean",) if name == "KLDivLoss" else ()):
                loss = make(reduction=reduction, **how)
                yield pytest.param(loss, reduction, drawn, id=f"{name}-{reduction}-{[*how]}")
    for function, drawn in (
        (nn.functional.mse_loss, REAL),
        (nn.functional.cross_entropy, classes()),
        (nn.functional.nll_loss, classes()),
    ):
        yield pytest.param(function, "mean", drawn, id=f"{function.__name__}")
        yield pytest.param(partial(function, reduction="sum"), "sum", drawn, id="partial-sum")
    some = partial(nn.functional.cross_entropy, weight=WEIGHT, ignore_index=3)
    yield pytest.param(some, "mean", classes(3), id="partial-weight")


def test_every_loss_of_torch_is_looked_at():
    names = nn.modules.loss.__all__
    taken = {n for n in names if "reduction" in inspect.signature(getattr(nn, n)).parameters}
    assert taken <= set(LOSSES)


def cut_and_dealt(n, g):
    """Batches of uneven sizes, dealt to three ranks of which one may get none."""
    ends = sorted({0, n, *torch.randint(0, n, (4,), generator=g).tolist()})
    batches = [slice(*pair) for pair in itertools.pairwise(ends)]
    return [(int(torch.randint(0, 3, (), generator=g)), batch) for batch in batches]


@pytest.mark.parametrize(("loss", "reduction", "given"), [*every_loss()])
def test_batches_and_ranks_give_the_loss_of_all_at_once(loss, reduction, given):
    """Torch's own loss of all samples together, its gradient, and ours over batches and ranks."""
    for seed in range(6):
        g = torch.Generator().manual_seed(seed)
        n = 9
        pred, target = (draw(g, n) for draw in given)
        pred.requires_grad_()
        truth = loss(pred, target) / (n if reduction == "sum" else 1)
        (slope,) = torch.autograd.grad(truth, pred)
        step, meters, parts = Supervised(loss), [Meter(), Meter(), Meter()], []
        scores, means = Scores({"score": loss}, torch.device("cpu")), Meters()
        for rank, cut in cut_and_dealt(n, g):
            batch = pred[cut], target[cut]
            result, weight = step(nn.Identity(), batch), step.weigh(batch)
            parts.append((result.loss, len(batch[1]) if weight is None else weight))
            meters[rank].add(result.loss.detach(), len(batch[1]), weight)
            detached = StepResult(result.loss, *(part.detach() for part in batch))
            scores.update(detached, len(batch[1]), means)
        below = sum(meter.sums().weight for meter in meters)
        found = sum(meter.sums().total for meter in meters) / below
        assert found == pytest.approx(truth.item(), rel=1e-5)
        assert means.sums()["score"].mean == pytest.approx(found, rel=1e-6)
        joint = sum(part * (weight / below) for part, weight in parts)
        torch.testing.assert_close(torch.autograd.grad(joint, pred)[0], slope)


@pytest.mark.parametrize(
    ("loss", "ignored", "weight"),
    [
        (nn.CrossEntropyLoss(), -100, torch.ones(CLASSES)),
        (nn.functional.cross_entropy, -100, torch.ones(CLASSES)),
        (partial(nn.functional.cross_entropy, ignore_index=255), 255, torch.ones(CLASSES)),
        (Classes(), -1, torch.ones(CLASSES)),
        (nn.CrossEntropyLoss(weight=WEIGHT, ignore_index=2), 2, WEIGHT),
        (nn.NLLLoss(weight=WEIGHT, ignore_index=2), 2, WEIGHT),
        (torch.compile(nn.CrossEntropyLoss(weight=WEIGHT), backend="eager"), -100, WEIGHT),
    ],
)
def test_masked_classes_are_those_of_torch_and_may_be_weighted(loss, ignored, weight):
    g = torch.Generator().manual_seed(0)
    pred, target = (draw(g, 9) for draw in classes(ignored))
    assert MaskedLoss(loss)(pred, target).item() == pytest.approx(loss(pred, target).item())
    each = nn.functional.nll_loss(pred, target, weight, ignore_index=ignored, reduction="none")
    counts = weight[target.clamp(0, CLASSES - 1)] * (target != ignored)
    for own in (torch.ones(9), torch.rand(9, generator=g)):
        below = (counts * own.reshape(9, 1, 1)).sum()
        truth = (each * own.reshape(9, 1, 1)).sum() / below
        assert MaskedLoss(loss).weigh(target, own).item() == pytest.approx(below.item())
        assert MaskedLoss(loss)(pred, target, own).item() == pytest.approx(truth.item())


class Focal(nn.CrossEntropyLoss):
    """A loss over classes that divides by what it likes."""

    def forward(self, pred, target):
        return super().forward(pred, target) ** 2


def test_a_loss_that_divides_by_nobody_knows_what_is_warned_of_and_may_say_it():
    with pytest.warns(UserWarning, match=r"loss=Focal\(\) has an ignore_index.*weigh"):
        step = Supervised(Focal())
    batch = torch.randn(4, 3), torch.tensor([0, 1, -100, 2])
    assert step.weigh(batch) is None
    with pytest.warns(UserWarning, match=r"metrics\['focal'\]=Focal"):
        check_metrics({"focal": Focal()})
    Focal.weigh = lambda self, target: (target != self.ignore_index).sum()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert Supervised(Focal()).weigh(batch).item() == 3
            check_metrics({"focal": Focal()})
    finally:
        del Focal.weigh


def test_a_loss_is_left_alone_by_batches_without_weights():
    class ReadOnly(nn.Module):
        reduction = property(lambda self: "mean")

        def forward(self, pred, target):
            return (pred - target).square().mean()

    for loss in (torch.jit.script(nn.MSELoss()), ReadOnly()):
        assert Supervised(loss)(nn.Identity(), (torch.zeros(2), torch.ones(2))).loss == 1
    compiled = torch.compile(nn.MSELoss(), backend="eager")
    Supervised(compiled)
    assert compiled.reduction == "mean"


# ------------------------------------------- predictions that would be broadcast, and weights

F = nn.functional


@pytest.mark.parametrize(
    "loss",
    [
        *(nn.MSELoss(), nn.L1Loss(), nn.SmoothL1Loss(), nn.HuberLoss(), nn.KLDivLoss()),
        *(nn.BCELoss(), nn.BCEWithLogitsLoss(), nn.SoftMarginLoss(), nn.PoissonNLLLoss()),
        *(nn.HingeEmbeddingLoss(), nn.MultiLabelSoftMarginLoss()),
        *(F.mse_loss, partial(F.l1_loss, reduction="sum"), MaskedLoss(nn.MSELoss())),
        lambda p, t: ((p - t) ** 2).mean(),
        lambda p, t: torch.abs(t - p).mean(),
        lambda p, t: F.mse_loss(p, t),
    ],
)
def test_a_prediction_that_would_be_broadcast_is_refused(loss):
    x = torch.rand(5, 4, 4)
    for pred, target in ((x, x.unsqueeze(1)), (x[:, 0, :1], x[:, 0, 0])):
        with pytest.raises(InvalidValueError, match="must have the shape of the target") as caught:
            Supervised(loss)(nn.Identity(), (pred, target))
        assert str(tuple(pred.shape)) in str(caught.value)
        assert str(tuple(target.shape)) in str(caught.value)
        result = StepResult(torch.zeros(()), pred, target)
        with pytest.raises(InvalidValueError, match=r"metrics\['m'\]|^loss="):
            Scores({"m": loss}, torch.device("cpu")).update(result, 5, Meters())


@pytest.mark.parametrize(
    ("loss", "pred", "target"),
    [
        (nn.CrossEntropyLoss(), (4, 4, 2, 2), (4, 2, 2)),
        (lambda p, t: F.mse_loss(p.squeeze(1), t), (4, 1, 2, 2), (4, 2, 2)),
        (lambda p, t: ((p - t) * torch.tensor([0.1, 0.5, 0.9])).mean(), (4, 3), (4, 1)),
    ],
)
def test_a_prediction_of_another_shape_is_fine_where_the_loss_knows(loss, pred, target):
    """As many classes as samples; a dim less; quantiles of one target."""
    y = torch.ones(target, dtype=torch.long if len(pred) == 4 and pred[1] == 4 else torch.float)
    x = torch.rand(pred)
    for _ in range(2):
        assert Supervised(loss)(nn.Identity(), (x, y)).loss == loss(x, y)


@pytest.mark.parametrize("third", [torch.arange(8), torch.arange(8, dtype=torch.uint8)])
def test_an_integer_third_item_is_no_weight(third):
    x, y = dataset(8).tensors
    for loss in (nn.MSELoss(), MaskedLoss(nn.MSELoss())):
        with pytest.raises(InvalidTypeError, match=r"third item.*got torch\.\w*int"):
            trainer(train=[(x, y, third)], val=[(x, y)], loss=loss).train()
    some = third > 2  # what is true or false counts, or does not
    found = Supervised(nn.MSELoss())(nn.Identity(), (x[:, :1], y, some)).loss
    assert found.item() == pytest.approx(F.mse_loss(x[some, :1], y[some]).item())


# ------------------------------------------------------- gaps and weights, however it is cut


def gappy(samples=24, cells=4):
    """Targets of several cells with gaps, unevenly spread, one sample with nothing at all."""
    x = dataset(samples).tensors[0]
    y = torch.randn(samples, cells, generator=torch.Generator().manual_seed(1))
    y[torch.rand(samples, cells, generator=torch.Generator().manual_seed(2)) < 0.5] = NAN
    y[5], y[8:12] = NAN, NAN
    return x, y


def own_weights(samples=24):
    return torch.rand(samples, generator=torch.Generator().manual_seed(3))


def fit(batches, *, weighted=False, rows=True, classes=False, accumulate=1):
    """Train one step per window on given sample ranges; weights, losses and reported means."""
    x, y = gappy()
    if classes:
        y = y.nan_to_num(0).abs().mul(3).long().amax(1) % 4
    rank = dist.get_rank() if dist.is_initialized() else 0
    chosen = [slice(*ends[rank]) for ends in batches]
    parts = [(x[c], y[c], own_weights()[c]) if weighted else (x[c], y[c]) for c in chosen]
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0]) if rows else None
    loss = nn.MSELoss() if weighted and not rows else MaskedLoss(nn.MSELoss(), weights=weight)
    if classes:
        loss = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.0, 3.0, 0.5]), ignore_index=1)
    model = nn.Linear(3, 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.5)
    metrics = None if classes else {"mae": MaskedLoss(nn.L1Loss(), weights=weight)}
    settings = {"loss": loss, "metrics": metrics, "gradient_accumulation_steps": accumulate}
    settings |= {"lr": 0.05, "schedule": False, "epochs": 1}
    run = trained(ranks=True, model=model, train=parts, val=parts, **settings)
    row = {name: run.history[name][0] for name in run.history if name in ("val_loss", "mae")}
    return np.asarray(weights(model)["weight"]), row, run.history["train_loss"][0]


def assert_alike(found, truth):
    for one, other in zip(found, truth, strict=True):
        assert one == pytest.approx(other, rel=1e-5)


def test_metrics_are_weighted_by_the_weights_in_batches_as_the_loss_is():
    x, y = gappy()
    weights, model = own_weights(), nn.Linear(3, 4)
    cuts = [slice(0, 5), slice(5, 24)]
    parts = [(x[c], y[c], weights[c]) for c in cuts]
    metrics = {"torch": nn.functional.l1_loss, "masked": masked(nn.L1Loss())}
    metrics["own"] = lambda pred, target: (pred - target).nanmean()
    settings = {"loss": nn.L1Loss(), "metrics": metrics, "lr": 0.0, "epochs": 1}
    run = trained(model=model, train=parts, val={"a": parts}, **settings)
    pred, has_value = model(x).detach(), ~y.isnan()
    cells = has_value * weights[:, None]
    wanted = ((pred - y.nan_to_num(0)).abs() * cells).sum() / cells.sum()
    for column in ("val_loss", "torch", "masked", "torch/a", "masked/a"):
        assert run.history[column] == [pytest.approx(wanted.item(), rel=1e-5)], column
    own = sum(len(p[1]) * (model(p[0]) - p[1]).nanmean().item() for p in parts) / 24
    assert run.history["own"] == [pytest.approx(own, rel=1e-5)]  # it cannot be weighted


KINDS = [{}, {"weighted": True}, {"classes": True}]


@pytest.mark.parametrize("kind", [*KINDS, {"rows": False}, {"weighted": True, "rows": False}])
def test_accumulated_batches_count_by_what_their_losses_divide_by(kind):
    """One batch, and the same samples cut unevenly, also one batch without any value."""
    one = fit([[(0, 24)]], **kind)
    for cuts in ([0, 5, 24], [0, 1, 8, 12, 20, 24]):
        cut = [[ends] for ends in itertools.pairwise(cuts)]
        assert_alike(fit(cut, accumulate=len(cut), **kind), one)


class Relative:
    """A loss that is divided by the sizes of the targets."""

    def __init__(self, as_number):
        self.as_number = as_number

    def __call__(self, pred, target):
        return (pred - target).square().sum() / self.weigh(target)

    def weigh(self, target):
        weight = target.abs().sum() + 1
        return float(weight) if self.as_number else weight


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_weight_may_be_a_number(accumulate):
    runs = [
        trainer(loss=Relative(as_number), epochs=2, gradient_accumulation_steps=accumulate)
        for as_number in (True, False)
    ]
    found = [weights(run.train()) for run in runs]
    assert found[0] == found[1]
    assert runs[0].history["val_loss"] == pytest.approx(runs[1].history["val_loss"])


def fitted_on_ranks():
    """Equal lengths, unequal lengths, and a rank without any value; then accumulated."""
    cuts = [[(0, 12), (12, 24)]], [[(0, 3), (3, 24)]], [[(8, 12), (12, 24)], [(0, 4), (4, 8)]]
    return [[fit(cut, accumulate=len(cut), **kind) for cut in cuts] for kind in KINDS]


@pytest.mark.slow
def test_ranks_count_by_what_their_losses_divide_by():
    ones = [fit([[(0, 24)]], **kind) for kind in KINDS]
    for results in on_ranks(2, fitted_on_ranks):
        for one, found in zip(ones, results, strict=True):
            for each in found:
                assert_alike(each, one)


def test_nothing_to_learn_leaves_the_model_and_is_an_error_only_where_nothing_ever_counts():
    x, y = dataset(8).tensors
    void = torch.full_like(y, NAN)
    loss = MaskedLoss(nn.MSELoss())
    model = network()
    trained(model=model, train=[(x, void), (x, y)], val=[(x, y)], loss=loss, epochs=1)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())
    for name, train, val in (("train_data", void, y), ("test_data", y, void)):
        with pytest.raises(EmptyPartError, match=f"{name} gave samples, but not one value"):
            trainer(train=[(x, train)], val=[(x, val)], loss=loss).train()


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
    run = trained(
        model=nn.Linear(3, 4),
        train=[(x, y)] * 4,
        val=[(x, y)],
        loss=MaskedLoss(nn.MSELoss()),
        precision=precision,
        epochs=3,
    )
    assert run.history["val_loss"][-1] < run.history["val_loss"][0]
