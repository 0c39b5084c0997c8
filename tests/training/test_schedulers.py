"""Learning rates against their formulas, in sequence, and after a resume at any iteration."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import MultiStepLR, SequentialLR, StepLR

from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.files.checkpoint import read_file, write_file
from ml4cube.training.schedulers import (
    CosineAnnealingScheduler,
    WarmUpScheduler,
)


def optimizer(*rates):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in rates]
    return torch.optim.SGD(groups)


def rates(scheduler, iterations):
    """What every iteration would train with; warnings of torch are errors."""
    seen = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(iterations):
            groups = scheduler.optimizer.param_groups
            assert [group["lr"] for group in groups] == list(scheduler.get_last_lr())
            seen.append([group["lr"] for group in groups])
            scheduler.optimizer.step()
            scheduler.step()
    return seen


# Slow and obvious: rate of iteration t (from 0) of total n, from base and low.
FORMULAS = {
    CosineAnnealingScheduler: lambda t, n, base, low: (
        low + (base - low) * 0.5 * (1 + math.cos(math.pi * t / n)) if t < n else low
    ),
    WarmUpScheduler: lambda t, n, base, low: low + (base - low) * (t + 1) / n if t < n else base,
}


@settings(max_examples=30)
@given(
    kind=st.sampled_from(list(FORMULAS)),
    total=st.integers(1, 20),
    bases=st.lists(st.floats(1e-4, 10), min_size=1, max_size=3),
    low=st.floats(0, 1e-4),
)
def test_rates_follow_the_formula_and_stay_at_the_end(kind, total, bases, low):
    scheduler = kind(optimizer(*bases), total, eta_min=low)
    for t, seen in enumerate(rates(scheduler, total + 5)):
        expected = [FORMULAS[kind](t, total, base, low) for base in bases]
        assert seen == pytest.approx(expected, rel=1e-9, abs=1e-15)


def in_sequence(first, second):
    return SequentialLR(first.optimizer, [first, second], milestones=[first.total_iters])


BUILD = {
    "sequence": lambda opt: in_sequence(
        WarmUpScheduler(opt, 3), CosineAnnealingScheduler(opt, 5, 0.1)
    ),
    "milestones": lambda opt: in_sequence(WarmUpScheduler(opt, 3), MultiStepLR(opt, [2, 5])),
    "cosine": lambda opt: CosineAnnealingScheduler(opt, 7, 0.01),
}


@pytest.mark.parametrize("build", BUILD.values(), ids=BUILD)
@pytest.mark.parametrize("cut", [0, 2, 3, 6, 7, 11])
def test_resumed_rates_are_the_same_bits(tmp_path, build, cut):
    whole = rates(build(optimizer(0.5, 0.25)), 14)
    first = build(optimizer(0.5, 0.25))
    rates(first, cut)
    state = {"scheduler": first.state_dict(), "optimizer": first.optimizer.state_dict()}
    write_file(tmp_path / "s.pt", state)
    content = read_file(tmp_path / "s.pt")

    again = build(optimizer(0.5, 0.25))
    again.optimizer.load_state_dict(content["optimizer"])
    again.load_state_dict(content["scheduler"])
    assert rates(again, 14 - cut) == whole[cut:]


@pytest.mark.parametrize(
    "second",
    [
        lambda opt: CosineAnnealingScheduler(opt, 6, 0.1),
        lambda opt: StepLR(opt, 2, 0.5),
    ],
)
def test_a_sequence_runs_its_schedulers_in_turn(second):
    opt = optimizer(1.0, 0.5)
    sequence = in_sequence(WarmUpScheduler(opt, 4), second(opt))
    expected = rates(WarmUpScheduler(optimizer(1.0, 0.5), 4), 4)
    expected += rates(second(optimizer(1.0, 0.5)), 8)
    assert rates(sequence, 12) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda opt: CosineAnnealingScheduler(opt, 0), r"total_iters.*0"),
        (lambda opt: CosineAnnealingScheduler(opt, 2.5), r"total_iters.*2\.5"),
        (lambda opt: WarmUpScheduler(opt, 5, eta_min=-1), r"eta_min must .* got -1"),
        (lambda opt: WarmUpScheduler(opt, 5, eta_min="low"), r"eta_min must .* got 'low'"),
        (lambda opt: WarmUpScheduler("adam", 5), r"optimizer must .* got 'adam'"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises((InvalidValueError, InvalidTypeError), match=message):
        make(optimizer(1.0))
