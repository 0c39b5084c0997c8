"""Learning rates against their formulas, in chains, and after a resume at any iteration."""

import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.optim.lr_scheduler import MultiStepLR, StepLR

from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.files.checkpoint import read_file, write_file
from ml4cube.training.schedulers import (
    CosineAnnealingScheduler,
    CosineRestartScheduler,
    LinearScheduler,
    PolynomialScheduler,
    SchedulerChain,
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
    LinearScheduler: lambda t, n, base, low: base + (low - base) * t / n if t < n else low,
    PolynomialScheduler: lambda t, n, base, low: (
        low + (base - low) * (1 - t / n) ** 2 if t < n else low
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


def test_restarts_repeat_one_cycle():
    cycles = rates(CosineRestartScheduler(optimizer(1.0), 12, 0.1, cycles=3), 14)
    single = rates(CosineAnnealingScheduler(optimizer(1.0), 4, 0.1), 4)
    flat = [rate[0] for rate in cycles]
    assert flat == pytest.approx([r[0] for r in single] * 3 + [0.1, 0.1])


BUILD = {
    "chain": lambda opt: SchedulerChain(
        WarmUpScheduler(opt, 3), LinearScheduler(opt, 4, 0.1), CosineAnnealingScheduler(opt, 5)
    ),
    "milestones": lambda opt: SchedulerChain(WarmUpScheduler(opt, 3), MultiStepLR(opt, [2, 5])),
    "cosine": lambda opt: CosineAnnealingScheduler(opt, 7, 0.01),
    "restarts": lambda opt: CosineRestartScheduler(opt, 9, cycles=2),
    "polynomial": lambda opt: PolynomialScheduler(opt, 7, power=0.5),
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
def test_chain_runs_its_links_in_turn(second):
    opt = optimizer(1.0, 0.5)
    chain = SchedulerChain(WarmUpScheduler(opt, 4), second(opt))
    expected = rates(WarmUpScheduler(optimizer(1.0, 0.5), 4), 4)
    expected += rates(second(optimizer(1.0, 0.5)), 8)
    assert rates(chain, 12) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda opt: CosineAnnealingScheduler(opt, 0), r"total_iters.*0"),
        (lambda opt: CosineAnnealingScheduler(opt, 2.5), r"total_iters.*2\.5"),
        (lambda opt: WarmUpScheduler(opt, 5, eta_min=-1), r"eta_min must .* got -1"),
        (lambda opt: WarmUpScheduler(opt, 5, eta_min="low"), r"eta_min must .* got 'low'"),
        (lambda opt: PolynomialScheduler(opt, 3, power="2"), r"power must .* got '2'"),
        (lambda opt: PolynomialScheduler(opt, 3, power=0), r"power must .* got 0"),
        (lambda opt: LinearScheduler("adam", 5), r"optimizer must .* got 'adam'"),
        (lambda opt: CosineRestartScheduler(opt, 3), "at most total_iters=3, got 4"),
        (lambda opt: SchedulerChain(), "at least one scheduler"),
        (lambda opt: SchedulerChain([WarmUpScheduler(opt, 2)]), "one by one"),
        (lambda opt: SchedulerChain(SchedulerChain(WarmUpScheduler(opt, 2))), "no chain of them"),
        (lambda opt: SchedulerChain(StepLR(opt, 2), StepLR(optimizer(1.0), 2)), "same optimizer"),
        (lambda opt: SchedulerChain(StepLR(opt, 2), StepLR(opt, 3)), "1 of the chain, StepLR, has"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises((InvalidValueError, InvalidTypeError), match=message):
        make(optimizer(1.0))


@pytest.mark.parametrize("cycles", [3, 22, 49])
def test_every_cycle_begins_with_the_initial_rate(cycles):
    # 15 / 22 * 22 < 15 in floats
    scheduler = CosineRestartScheduler(optimizer(1.0), np.int64(10 * cycles), cycles=cycles)
    assert [rate for (rate,) in rates(scheduler, 10 * cycles)][::10] == [1.0] * cycles
