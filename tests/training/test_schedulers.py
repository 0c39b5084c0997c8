"""Learning rates against their formulas, in chains, and after a resume at any iteration."""

import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.files.checkpoint import read_file, write_file
from ml4cube.training.schedulers import (
    CosineAnnealingScheduler,
    CosineRestartScheduler,
    LinearScheduler,
    PolynomialScheduler,
    SchedulerBase,
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


@settings(max_examples=30, deadline=None)
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


def test_cosine_equals_torch_until_its_end():
    ours = rates(CosineAnnealingScheduler(optimizer(0.3), 50, eta_min=0.01), 51)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer(0.3), 50, eta_min=0.01)
    theirs = rates(reference, 51)
    assert [r[0] for r in ours] == pytest.approx([r[0] for r in theirs], rel=1e-9)


def test_restarts_repeat_one_cycle():
    cycles = rates(CosineRestartScheduler(optimizer(1.0), 12, 0.1, cycles=3), 14)
    single = rates(CosineAnnealingScheduler(optimizer(1.0), 4, 0.1), 4)
    flat = [rate[0] for rate in cycles]
    assert flat == pytest.approx([r[0] for r in single] * 3 + [0.1, 0.1])


def build(name, opt):
    if name == "chain":
        return SchedulerChain(
            WarmUpScheduler(opt, 3),
            SchedulerChain(LinearScheduler(opt, 4, 0.1), CosineAnnealingScheduler(opt, 5)),
        )
    if name == "milestones":
        later = torch.optim.lr_scheduler.MultiStepLR(opt, [2, 5])
        return SchedulerChain(WarmUpScheduler(opt, 3), later)
    return {
        "cosine": lambda: CosineAnnealingScheduler(opt, 7, 0.01),
        "restarts": lambda: CosineRestartScheduler(opt, 9, cycles=2),
        "polynomial": lambda: PolynomialScheduler(opt, 7, power=0.5),
    }[name]()


@pytest.mark.parametrize("name", ["chain", "milestones", "cosine", "restarts", "polynomial"])
@pytest.mark.parametrize("cut", [0, 2, 3, 6, 7, 11])
def test_resumed_rates_are_the_same_bits(tmp_path, name, cut):
    whole = rates(build(name, optimizer(0.5, 0.25)), 14)
    first = build(name, optimizer(0.5, 0.25))
    rates(first, cut)
    state = {"scheduler": first.state_dict(), "optimizer": first.optimizer.state_dict()}
    write_file(tmp_path / "s.pt", state)
    content = read_file(tmp_path / "s.pt")

    again = build(name, optimizer(0.5, 0.25))
    again.optimizer.load_state_dict(content["optimizer"])
    again.load_state_dict(content["scheduler"])
    assert rates(again, 14 - cut) == whole[cut:]


def test_chain_runs_its_links_in_turn():
    opt = optimizer(1.0, 0.5)
    chain = SchedulerChain(WarmUpScheduler(opt, 4), CosineAnnealingScheduler(opt, 6, 0.1))
    assert chain.total_iters == 10
    expected = rates(WarmUpScheduler(optimizer(1.0, 0.5), 4), 4)
    expected += rates(CosineAnnealingScheduler(optimizer(1.0, 0.5), 6, 0.1), 8)
    assert rates(chain, 12) == expected


def test_chain_takes_schedulers_of_torch():
    opt = optimizer(1.0)
    step = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    assert [r[0] for r in rates(SchedulerChain(WarmUpScheduler(opt, 2), step), 6)] == [
        0.5,
        1.0,
        1.0,
        1.0,
        0.5,
        0.5,
    ]
    with pytest.raises(InvalidValueError, match="scheduler 1 of the chain, StepLR, has no"):
        SchedulerChain(
            torch.optim.lr_scheduler.StepLR(opt, 2), CosineAnnealingScheduler(opt, total_iters=3)
        )


def test_bad_arguments_are_refused():
    opt = optimizer(1.0)
    with pytest.raises(InvalidValueError, match=r"total_iters.*0"):
        CosineAnnealingScheduler(opt, 0)
    with pytest.raises(InvalidValueError, match=r"total_iters.*2\.5"):
        CosineAnnealingScheduler(opt, 2.5)
    with pytest.raises(InvalidValueError, match=r"eta_min must .* got -1"):
        WarmUpScheduler(opt, 5, eta_min=-1)
    with pytest.raises(InvalidValueError, match=r"eta_min must .* got 'low'"):
        WarmUpScheduler(opt, 5, eta_min="low")
    with pytest.raises(InvalidValueError, match=r"power must .* got '2'"):
        PolynomialScheduler(opt, 3, power="2")
    with pytest.raises(InvalidTypeError, match=r"optimizer must .* got 'adam'"):
        LinearScheduler("adam", 5)
    with pytest.raises(InvalidValueError, match="cycles must be at most total_iters=3, got 4"):
        CosineRestartScheduler(opt, 3)
    with pytest.raises(InvalidValueError, match=r"power must .* got 0"):
        PolynomialScheduler(opt, 3, power=0)
    with pytest.raises(InvalidValueError, match="at least one scheduler"):
        SchedulerChain()
    with pytest.raises(InvalidTypeError, match="one by one"):
        SchedulerChain([WarmUpScheduler(opt, 2)])
    with pytest.raises(InvalidValueError, match="same optimizer"):
        SchedulerChain(WarmUpScheduler(opt, 2), WarmUpScheduler(optimizer(1.0), 2))
    with pytest.raises(TypeError, match="abstract"):
        SchedulerBase(opt, 5)
