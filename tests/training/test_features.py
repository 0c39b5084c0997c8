"""What a run can be told besides its parts: limits, time, averages, compiling, several sets."""

import itertools
import math
import signal
import time
from datetime import timedelta
from functools import partial, reduce

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
)
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MeanSquaredError, R2Score
from torchmetrics.classification import BinaryAUROC

from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.errors import EmptyPartError, InvalidTypeError, InvalidValueError, RunError
from ml4cube.evaluation.metrics import RMSE
from ml4cube.plotting import loss_curve
from ml4cube.training.callbacks import Callback, ModelCheckpoint, RankReport
from ml4cube.training.inputs.options import Options
from ml4cube.training.losses import MaskedLoss
from ml4cube.training.pytorch import Trainer
from ml4cube.training.seeding import seed_everything
from ml4cube.training.trainer import Trainer as StepTrainer
from tests.distributed_runner import TwoRanks, assert_same_on_all_ranks
from tests.samplestores import write_store
from tests.training_parts import (
    At,
    Interrupt,
    Save,
    Standing,
    Stateful,
    assert_end_alike,
    dataset,
    hooks,
    interrupt,
    losses,
    meet_now,
    network,
    resumed_alike,
    squared_error,
    trained,
    trainer,
    weights,
)

TWO_RANKS = TwoRanks()
on_two_ranks, ran = TWO_RANKS.add, TWO_RANKS.fixture()


class Seen(list):
    """Batches that note how many were taken."""

    taken = 0

    def __iter__(self):
        for batch in super().__iter__():
            self.taken += 1
            yield batch


def batches(count, size=4):
    data = dataset(count * size)
    return Seen(DataLoader(data, batch_size=size))


# ---------------------------------------------------------------------------- limits


@pytest.mark.parametrize(
    ("limit", "used"),
    # in binary, 0.29 of 100 is a little less than 29
    [(3, 3), (0.29, 29), (0.001, 1), (1.0, 100), (999, 100), (1, 1), (None, 100)],
)
def test_limited_loaders_give_so_many_batches(limit, used):
    train, val = batches(100), batches(100)
    run = trained(
        train=train, val=val, limit_train_batches=limit, limit_val_batches=limit, epochs=2
    )
    assert run._loop.state.step == 2 * used
    assert [rows[0]["train_n"] for rows in run.history["ranks"]] == [4 * used] * 2
    assert [rows[0]["val_n"] for rows in run.history["ranks"]] == [4 * used] * 2
    assert train.taken == val.taken == 2 * used


def test_a_limited_epoch_is_resumed_inside_and_ends_as_undisturbed(tmp_path):
    def fresh(**more):
        return trainer(limit_train_batches=7, limit_val_batches=2, epochs=3, **more)

    position, _ = resumed_alike(tmp_path / "s.pt", fresh, Save(10), At(12))
    assert position["batch"] == 3


KINDS = {"stateful": Stateful, "standing": Standing}


@pytest.mark.slow
@pytest.mark.parametrize("limit", [None, 5, pytest.param(9, marks=pytest.mark.soak)])
@pytest.mark.parametrize("kind", ["store", "tensors", *KINDS])
def test_a_snapshot_after_the_last_batch_trains_on_none_of_the_next_epoch(tmp_path, kind, limit):
    """A loader that has given all stands at the start of its next epoch, the run does not."""
    last = limit or 9
    if kind == "store":
        write_store(tmp_path / "store", 36, ("a", "b"), window={}, targets=("b",))

    def fresh(**more):
        data = PTXrDataset(tmp_path / "store", to_pred="b") if kind == "store" else dataset(36)
        torch.manual_seed(0)
        model = nn.Linear(1, 1) if kind == "store" else network()
        train, val = prep_dataloader(data, data, batch_size=4, seed=2)
        if kind in KINDS:
            train = KINDS[kind](list(train))
        options = {"loss": nn.L1Loss(), "limit_train_batches": limit, **more}
        return trainer(model=model, train=train, val=val, **options)

    stops = Save(last, meet=False), At(last + 1)
    position, resumed = resumed_alike(tmp_path / "s.pt", fresh, *stops)
    assert (position["epoch"], position["batch"]) == (0, last)
    assert [rows[0]["train_n"] for rows in resumed.history["ranks"]] == [4 * last] * 3


def test_a_share_of_a_stream_is_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            yield from dataset(8)

    stream = DataLoader(Stream(), batch_size=4)
    with pytest.raises(InvalidTypeError, match=r"limit_train_batches=0\.5 is a fraction"):
        trainer(train=stream, limit_train_batches=0.5)
    for val in (stream, {"known": batches(1), "stream": stream}):
        with pytest.raises(InvalidTypeError, match=r"limit_val_batches=0\.5 is a fraction"):
            trainer(val=val, limit_val_batches=0.5)


@pytest.mark.parametrize("several", [1, True, 3])
def test_fast_dev_run_tries_everything_and_writes_nothing(several, tmp_path):
    train, val = batches(10), {"a": batches(5), "b": batches(4)}
    seen = []

    class Logger:
        def log(self, values, step):
            seen.append(values)

    run = trained(
        train=train,
        val=val,
        epochs=50,
        fast_dev_run=several,
        snapshot_path=tmp_path / "s.pt",
        best_model_path=tmp_path / "b.pt",
        create_loss_plot=True,
        loggers=[Logger()],
        callbacks=[ModelCheckpoint(tmp_path / "top")],
        metrics={"mae": nn.functional.l1_loss},
    )
    n = int(several)
    assert (train.taken, val["a"].taken, val["b"].taken) == (n, n, n)
    assert len(run.history) == 1
    assert not list(tmp_path.iterdir())
    assert seen == []


def test_losses_are_drawn_by_epoch_where_only_a_later_run_counts_steps(tmp_path, monkeypatch):
    files = {"snapshot_path": tmp_path / "s.pt", "best_model_path": tmp_path / "b.pt"}
    drawn = []
    monkeypatch.setattr(
        "ml4cube.plotting.loss_curve",
        lambda history: drawn.append(loss_curve(history)) or drawn[-1],
    )
    trainer(val=batches(2), epochs=1, **files).train()
    later = {"val": batches(2), "validate_every_steps": 2, "create_loss_plot": True}
    trainer(epochs=2, **later, **files).train()
    trainer(epochs=1, **later, best_model_path=tmp_path / "c.pt").train()
    by_epoch, by_step = (figure.axes[0] for figure in drawn)
    assert by_epoch.get_xlabel() == "epoch"
    assert np.isfinite(by_epoch.lines[0].get_xdata()).all()
    assert by_step.get_xlabel() == "step"


# ------------------------------------------------------------------------- time limit


@pytest.mark.parametrize(
    ("given", "seconds"),
    [(90, 90), (0.5, 0.5), ("00:01:30", 90), ("1:00:00:00", 86400), (timedelta(hours=2), 7200)],
)
def test_times_are_read(given, seconds):
    assert Options(max_time=given).max_seconds == seconds


def make_slow(loop):
    """Make steps long, so that a time limit comes inside an epoch."""
    meet_now(loop)
    time.sleep(0.05)


SLOW = hooks(on_step_end=make_slow)


def test_time_limit_leaves_a_snapshot_inside_the_epoch_that_is_resumed(tmp_path):
    path = tmp_path / "s.pt"
    cut = trainer(epochs=2, snapshot_path=path, callbacks=SLOW, max_time=0.2)
    started = time.monotonic()
    cut.train()  # ends in order
    assert time.monotonic() - started < 5
    state = torch.load(path, weights_only=True)["state"]
    assert state["epoch"] == 0
    assert 0 < state["batch"] < 10
    assert len(cut.history) == 0
    resumed = trainer(epochs=2, snapshot_path=path)
    assert_end_alike(resumed, trainer(epochs=2))
    assert resumed.history["ranks"][0][0]["seconds"] > 0.15  # with those before the cut


def test_the_time_of_training_is_without_that_of_a_validation_that_was_cut_off(tmp_path):
    slow = hooks(on_validation_start=lambda loop: time.sleep(0.5))
    path = tmp_path / "s.pt"
    with pytest.raises(Interrupt):
        trainer(epochs=1, snapshot_path=path, callbacks=[slow, *SAVED_IN_VALIDATION]).train()
    resumed = trained(epochs=1, snapshot_path=path)
    assert resumed.history["seconds"][0] < 0.5


def test_the_time_of_training_is_without_that_of_validations_between_steps():
    slow = hooks(on_validation_start=lambda loop: time.sleep(0.5))
    run = trained(epochs=1, validate_every_steps=4, callbacks=slow)
    assert max(run.history["seconds"]) < 0.5


@pytest.mark.parametrize("every", [None, 3])
def test_a_validation_of_the_training_loader_that_is_cut_off_is_made_again_in_full(tmp_path, every):
    def stop(*_):
        raise Interrupt

    calls = itertools.count(1)

    def count(pred, target, *, cut):
        if cut and next(calls) == 9:
            signal.raise_signal(signal.SIGTERM)
        return float(len(pred))

    def fresh(**more):
        both = prep_dataloader(test_ds=dataset(40), batch_size=4)
        return trainer(train=both, val=both, validate_every_steps=every, **more)

    path = tmp_path / "s.pt"
    cut = fresh(snapshot_path=path, metrics={"n": partial(count, cut=True)})
    before = signal.signal(signal.SIGTERM, stop)
    try:
        with pytest.raises(Interrupt):
            cut.train()
    finally:
        signal.signal(signal.SIGTERM, before)
    metrics = {"n": partial(count, cut=False)}
    assert_end_alike(fresh(snapshot_path=path, metrics=metrics), fresh(metrics=metrics))


@pytest.mark.slow
def test_time_limit_in_validation_leaves_it_to_the_resumed_run(tmp_path):
    class Late(DataLoader):
        def __iter__(self):
            for batch in super().__iter__():
                time.sleep(0.6)
                yield batch

    path = tmp_path / "s.pt"
    val = dataset(17, seed=1)
    cut = trainer(epochs=1, val=Late(val, batch_size=5), snapshot_path=path, max_time=1.0)
    started = time.monotonic()
    cut.train()
    assert time.monotonic() - started < 2.4  # the whole validation takes that long
    assert torch.load(path, weights_only=True)["state"]["batch"] == 10
    assert_end_alike(trainer(epochs=1, snapshot_path=path), trainer(epochs=1))


def save_soon(loop):
    """Ask for a snapshot; a validation that was begun is then made again."""
    loop.requests.signals.must_save = True


SAVE_IN_VALIDATION = hooks(on_validation_start=save_soon)
SAVED_IN_VALIDATION = [SAVE_IN_VALIDATION, hooks(on_validation_end=lambda *_: interrupt())]


@pytest.mark.parametrize("max_steps", [None, 5])
def test_a_snapshot_saved_in_validation_does_not_change_the_run(tmp_path, max_steps):
    """Neither the run that goes on, nor that which is resumed from it.

    A loader that also trains begins a pass that is made again in another order.
    """

    def fresh(**more):
        train = prep_dataloader(dataset(36), batch_size=4, seed=2)
        val = DataLoader(dataset(17, seed=1), batch_size=5, shuffle=True)
        val = val if max_steps is None else train
        spread = {"spread": lambda pred, target: pred.std().item()}
        return trainer(train=train, val=val, metrics=spread, max_steps=max_steps, **more)

    resumed_alike(tmp_path / "s.pt", fresh, *SAVED_IN_VALIDATION)
    assert_end_alike(fresh(snapshot_path=tmp_path / "t.pt", callbacks=SAVE_IN_VALIDATION), fresh())


def test_an_order_inside_a_batch_sampler_changes_by_epoch_and_is_resumed(tmp_path):
    seen = []

    class Watched(Dataset):
        def __len__(self):
            return 8

        def __getitem__(self, i):
            seen.append(i)
            return torch.full((3,), float(i)), torch.full((1,), float(i))

    data = Watched()
    sampler = DistributedSampler(data, num_replicas=1, rank=0, seed=1)
    batches = DataLoader(data, batch_sampler=BatchSampler(sampler, 4, False))
    trainer(train=batches, val=[next(iter(batches))], epochs=2).train()
    assert sorted(seen[-16:-8]) == sorted(seen[-8:]) == list(range(8))
    assert seen[-16:-8] != seen[-8:]

    def fresh(**more):
        source = dataset(40)
        drawn = RandomSampler(source, generator=torch.Generator().manual_seed(5))
        return trainer(
            train=DataLoader(source, batch_sampler=BatchSampler(drawn, 4, False)), **more
        )

    resumed_alike(tmp_path / "s.pt", fresh, At(14), save_every=1)


def test_time_limit_without_snapshot_validates_what_there_is(tmp_path):
    path = tmp_path / "best.pt"
    run = trained(callbacks=SLOW, max_time=timedelta(seconds=0.2), best_model_path=path)
    assert len(run.history) == 1
    assert run.history["ranks"][0][0]["train_n"] < 40
    assert path.exists()


def test_no_epoch_begins_if_time_was_over_in_validation():
    def end_time(loop, row):
        loop.requests.deadline_s = 0.0

    run = trained(max_time=100, callbacks=hooks(on_validation_end=end_time))
    assert len(run.history) == 1


@on_two_ranks
def the_time_limit_of_one_rank_ends_all_in_order(folder):
    path = f"{folder}/s.pt"
    late = 0.2 if dist.get_rank() else 60.0
    trainer(ranks=True, snapshot_path=path, callbacks=SLOW, max_time=late).train()
    assert 0 < torch.load(path, weights_only=True)["state"]["step"] < 5
    resumed = trainer(ranks=True, snapshot_path=path)
    assert_end_alike(resumed, trainer(ranks=True))
    assert_same_on_all_ranks((weights(resumed.model), losses(resumed)))


# --------------------------------------------------------------------- averaged weights


def test_average_is_that_of_torch_and_what_is_evaluated_saved_and_returned(tmp_path):
    path = tmp_path / "best.pt"
    model = network(norm=True)
    oracle = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.8), use_buffers=True)

    seen = []
    compared = hooks(
        on_step_end=lambda loop: oracle.update_parameters(loop.model),
        on_epoch_end=lambda _, row: seen.append((row["val_loss"], squared_error(oracle.module))),
    )
    settings = {"early_stopping": False, "epochs": 4}
    run = trainer(model=model, ema=0.8, best_model_path=path, callbacks=compared, **settings)
    returned = run.train()
    for reported, mean in seen:
        assert reported == pytest.approx(mean, rel=1e-5)
    assert weights(returned) == weights(path)
    (counted,) = (n for name, n in weights(returned).items() if name.endswith("_tracked"))
    assert counted == 10 * run.best_epoch  # batches
    again = network(seed=5, norm=True)
    again.load_state_dict(torch.load(path, weights_only=True))
    assert squared_error(again) == pytest.approx(run.best_loss, rel=1e-5)
    plain = trained(model=network(norm=True), **settings)
    assert losses(plain)["train_loss"] == losses(run)["train_loss"]  # training goes on unaveraged
    assert losses(plain)["val_loss"] != losses(run)["val_loss"]


def test_complex_weights_are_averaged_too():
    class Spectral(nn.Linear):
        def __init__(self):
            super().__init__(3, 1)
            self.scale = nn.Parameter(torch.ones(1, dtype=torch.complex64))

        def forward(self, x):
            return super().forward(x) * (self.scale * (1 + 1j)).real

    steps = []
    keep = hooks(on_step_end=lambda loop: steps.append(loop.model.scale.detach().clone()))
    returned = trainer(model=Spectral(), ema=0.8, epochs=1, callbacks=keep).train()
    average = reduce(lambda mean, value: 0.8 * mean + 0.2 * value, steps)
    torch.testing.assert_close(returned.scale.detach(), average)


@on_two_ranks
def averages_are_resumed_bit_for_bit(folder):
    """At an epoch's end, inside an epoch, and inside a validation."""
    ranks = dist.is_initialized()

    def fresh(**more):
        return trainer(ranks=ranks, model=network(norm=True), ema=0.9, epochs=3, **more)

    steps = 5 if ranks else 10
    _, resumed = resumed_alike(f"{folder}/end.pt", fresh, At(3 * steps - 2), save_every=1)
    for name, save in (("inside", Save(steps + 3)), ("validation", SAVE_IN_VALIDATION)):
        resumed_alike(f"{folder}/{name}.pt", fresh, save, At(steps + 5))
    if ranks:
        assert_same_on_all_ranks((weights(resumed.model), losses(resumed)))


def test_averages_of_one_process_are_resumed_bit_for_bit(tmp_path):
    averages_are_resumed_bit_for_bit(tmp_path)


def test_an_average_of_weights_in_half_precision_is_refused():
    with pytest.raises(InvalidTypeError, match=r"needs weights of float32, got torch\.bfloat16"):
        trainer(model=network().bfloat16(), ema=0.999)
    model = network()
    model[0].requires_grad_(False).bfloat16()  # what is not trained does not change
    trainer(model=model, ema=0.999)


@pytest.mark.parametrize("ema", [None, 0.9])
def test_a_second_run_trains_on_from_the_best_weights(ema):
    far = [(torch.full((4, 3), 5.0), torch.zeros(4, 1))]  # gets worse with every epoch
    run = trainer(epochs=20, ema=ema, val=far, patience=2, schedule=False)
    best = weights(run.train())
    assert run.best_epoch < len(run.history)
    run._loop.optimizer.param_groups[0]["lr"] = 0.0
    first = len(run.history)
    assert weights(run.train()) == best
    assert len(run.history) > first
    assert run.history["val_loss"][first:] == pytest.approx(
        [run.best_loss] * (len(run.history) - first)
    )


def test_snapshot_with_an_average_is_resumed_without_where_that_is_asked_for(tmp_path):
    path = tmp_path / "s.pt"
    trainer(ema=0.9, snapshot_path=path, epochs=1).train()
    content = torch.load(path, weights_only=True)
    begun = []
    look = hooks(on_train_start=lambda loop: begun.append(weights(loop.model)))
    with pytest.warns(UserWarning, match=r"ema was 0\.9 and is None"):
        trainer(snapshot_path=path, epochs=2, callbacks=look).train()
    assert begun == [{name: value.tolist() for name, value in content["model"].items()}]


@on_two_ranks
def batch_norm_over_ranks_is_reproduced_from_the_file(folder):
    """Ranks see different batches; what is reported is what the file gives."""
    path = f"{folder}/best.pt"
    run = trained(ranks=True, model=network(norm=True), best_model_path=path, ema=0.9)
    model = network(seed=5, norm=True)
    model.load_state_dict(torch.load(path, weights_only=True))
    assert squared_error(model) == pytest.approx(run.best_loss, rel=1e-6)


# ------------------------------------------------------------------------ compiling


def test_compiled_model_trains_the_same_and_saves_its_own_names(tmp_path):
    path = tmp_path / "best.pt"
    plain, fast = trainer(), trainer(compile="eager", best_model_path=path, ema=None)
    plain.train()
    model = fast.train()
    assert type(model) is nn.Sequential
    assert fast.history["val_loss"] == pytest.approx(plain.history["val_loss"], rel=1e-5)
    assert weights(path).keys() == network().state_dict().keys()
    assert weights(model) == weights(path)


@on_two_ranks
def a_compiled_model_trains_the_same_on_ranks(folder):
    run = trainer(ranks=True, compile={"backend": "aot_eager"}, epochs=1)
    plain = trainer(ranks=True, epochs=1)
    run.train()
    plain.train()
    assert run.history["val_loss"] == pytest.approx(plain.history["val_loss"], rel=1e-5)


@on_two_ranks
def a_compiled_model_reduces_gradients_while_it_computes_others(folder):
    """A graph for each bucket of gradients; of one graph, all would come when it has ended."""
    graphs = []

    def backend(module, inputs):
        graphs.append(len(module.graph.nodes))
        return module.forward

    wide = [nn.Linear(3, 600), *(nn.Linear(600, 600) for _ in range(3)), nn.Linear(600, 1)]
    model = nn.Sequential(*wide)
    trainer(
        ranks=True, model=model, compile={"backend": backend}, epochs=1, val=None, samples=8
    ).train()
    _, *of_model = graphs  # the first is a trial
    assert len(of_model) == 2


def test_missing_compiler_is_one_clear_error_before_training(monkeypatch):
    def no_compiler(*args, **kwargs):
        raise RuntimeError("InvalidCxxCompiler: No working C++ compiler found")

    monkeypatch.setattr(torch, "compile", no_compiler)
    with pytest.raises(RunError, match="install a C\\+\\+ compiler"):
        trainer(compile=True)
    monkeypatch.undo()
    with pytest.raises(RunError, match="compile='no_such_backend'"):
        trainer(compile="no_such_backend")


# --------------------------------------------------------------------- what is logged


@pytest.mark.parametrize("clip", [None, 0.5])
def test_gradient_norms_are_mean_and_largest_of_the_epoch(clip):
    seen = []

    def see_norm(loop):
        grads = [p.grad.flatten() for p in loop.model.parameters()]
        seen.append(torch.cat(grads).norm().item())

    plain = trained(callbacks=hooks(on_step_end=see_norm), epochs=2)
    run = trained(log_grad_norm=True, gradient_clip=clip, epochs=2)
    first = seen[:10]
    if clip is None:
        assert run.history["grad_norm"][0] == pytest.approx(sum(first) / 10, rel=1e-5)
        assert run.history["grad_norm_max"][0] == pytest.approx(max(first), rel=1e-5)
        assert losses(plain)["train_loss"] == losses(run)["train_loss"]
    else:  # the norm before it was clipped
        assert run.history["grad_norm_max"][0] > clip


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_are_clipped_after_they_are_unscaled(precision):
    run = trainer(precision=precision, gradient_clip=0.01, epochs=1)
    model = run.train()
    norm = torch.cat([p.grad.flatten() for p in model.parameters()]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-3)


def test_learning_rates_of_all_groups_are_logged():
    model = network()
    optimizer = torch.optim.SGD(
        [
            {"params": model[0].parameters(), "lr": 0.1, "name": "first"},
            {"params": model[3].parameters(), "lr": 0.01},
        ]
    )
    loader = DataLoader(dataset(8), batch_size=4)
    run = Trainer(model, loader, loader, optimizer, loss=nn.MSELoss(), epochs=1, device="cpu")
    run.train()
    assert run.history["lr"] == run.history["lr/first"] == [0.1]
    assert run.history["lr/1"] == [0.01]


def test_seed_everything_refuses_what_numpy_cannot_take():
    for bad in (-1, 2**32, 1.5, True, None):
        with pytest.raises(InvalidValueError, match="seed must be an integer"):
            seed_everything(bad)


# ------------------------------------------------------------- several validation sets


@on_two_ranks
def several_validation_sets_are_each_exact_and_together(folder):
    """As one process validates each set, and all samples, alone."""
    north, south = dataset(17, seed=1), dataset(6, seed=2)
    scores = {"mae": nn.functional.l1_loss, "rmse": RMSE()}

    def validated(val, ranks=False):
        model, train = nn.Linear(3, 1), DataLoader(dataset(12), batch_size=4)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
        settings = {"metrics": scores, "epochs": 1, "lr": 0.0}
        run = trained(ranks=ranks, model=model, train=train, val=val, **settings)
        return {name: run.history[name][0] for name in run.history}

    def own(data):
        shares = Subset(data, range(dist.get_rank(), len(data), dist.get_world_size()))
        return DataLoader(shares, batch_size=5)

    def alone(data):
        return validated(DataLoader(data, batch_size=5))

    found = validated({"north": own(north), "south": own(south)}, ranks=True)
    truths = {"/north": alone(north), "/south": alone(south), "": alone(north + south)}
    for column in ("val_loss", *scores):
        for name, truth in truths.items():
            assert found[f"{column}{name}"] == pytest.approx(truth[column], rel=1e-5)
    assert not math.isclose(found["val_loss/north"], found["val_loss/south"])


def test_an_empty_validation_set_is_named():
    val = {"full": batches(1), "void": []}
    with pytest.raises(EmptyPartError, match=r"test_data\['void'\] gave no sample"):
        trainer(val=val).train()


@on_two_ranks
def validation_without_a_sample_is_named_whatever_the_metric(folder):
    for metric in (MeanSquaredError(), R2Score(), BinaryAUROC()):
        with pytest.raises(EmptyPartError, match="test_data gave no sample"):
            trainer(ranks=dist.is_initialized(), val=[], metrics={"m": metric}).train()


def test_validation_without_a_sample_is_named_in_one_process():
    validation_without_a_sample_is_named_whatever_the_metric("")


# -------------------------------------------------------------- where the time goes


class SlowLoader(Seen):
    """Batches that take long to come."""

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.05)
            yield batch


class SlowModel(nn.Sequential):
    """A forward pass that takes long."""

    def forward(self, x):
        time.sleep(0.05)
        return super().forward(x)


@on_two_ranks
def the_table_says_which_rank_is_slow_and_why(folder):
    """Rank 1, for one reason and for another, with and without buffers that travel."""
    is_slow = dist.get_rank() == 1
    for norm, reason in itertools.product((False, True), ("data_wait", "compute")):
        kind = SlowLoader if is_slow and reason == "data_wait" else Seen
        model = network(norm=norm)
        if is_slow and reason == "compute":
            model = SlowModel(*model)
        train = kind(DataLoader(dataset(96), batch_size=4))
        run = trained(ranks=True, model=model, train=train, epochs=1)
        quick, slow = rows = run.history["ranks"][0]
        assert_same_on_all_ranks(rows)
        assert quick["communicate"] > slow["communicate"] + 0.3, rows
        for row in rows:
            shares = [row[name] for name in ("data_wait", "communicate", "compute")]
            assert sum(shares) == pytest.approx(1)
            assert min(shares) >= 0
        assert slow[reason] > quick[reason] + 0.3
        said = RankReport.table({"epoch": 1, "train_loss": 1.0, "ranks": rows})
        cause = "waits for data" if reason == "data_wait" else "computes longer"
        assert said.endswith(f"the others wait for rank 1, which {cause}")


def test_starting_a_loader_is_waiting_for_data():
    class SlowStart(DataLoader):
        def __iter__(self):
            time.sleep(0.5)
            return super().__iter__()

    run = trained(train=SlowStart(dataset(8), batch_size=4), epochs=1)
    assert run.history["ranks"][0][0]["data_wait"] > 0.5


def test_one_process_waits_for_nobody():
    run = trained(validate_parallelism=True, epochs=1)
    (row,) = run.history["ranks"][0]
    assert row["communicate"] == 0.0
    assert row["data_wait"] + row["compute"] == pytest.approx(1)


READS = ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__")


class Reads(Callback):
    """Count what makes the host wait for the device, step by step."""

    def __init__(self, monkeypatch):
        self.count, self.per_step, self.asked = 0, [], []
        for name in READS:
            real = getattr(torch.Tensor, name)

            def counted(tensor, *args, _real=real, **kwargs):
                self.count += 1
                return _real(tensor, *args, **kwargs)

            monkeypatch.setattr(torch.Tensor, name, counted)

    def on_epoch_start(self, loop):
        self.before = self.count
        real = loop.requests.are_due

        def is_due(step):
            self.per_step.append(self.count - self.before)
            due = real(step)
            self.asked.append(due)
            return due

        loop.requests.are_due = is_due

    def on_step_end(self, loop):
        if self.asked and self.asked[-1]:
            self.before = self.count  # what was read at the meeting does not count


def plain_batches(count):
    data = dataset(4 * count)
    return list(zip(data.tensors[0].split(4), data.tensors[1].split(4), strict=True))


class OwnSteps(StepTrainer):
    """Returns a second number beside the loss."""

    def train_step(self, batch):
        error = self.model(batch[0]) - batch[1]
        return {"loss": error.pow(2).mean(), "mae": error.abs().mean()}


@pytest.mark.parametrize(
    ("own_steps", "more"),
    [
        (True, {}),
        (False, {}),
        (False, {"loss": MaskedLoss(nn.MSELoss())}),
        (False, {"gradient_clip": 1.0, "log_grad_norm": True, "ema": 0.9, "precision": "bf16"}),
        (False, {"gradient_accumulation_steps": 3, "scheduler_step_on_batch": True}),
    ],
)
def test_a_step_reads_nothing_from_the_device(own_steps, more, monkeypatch):
    """Between two meetings no call makes the host wait for a value."""
    reads = Reads(monkeypatch)
    model = network(norm=True)
    settings = {"callbacks": [reads], **more}
    if own_steps:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        run = OwnSteps(model, "cpu", optimizer=optimizer, **settings)
        run.run(1, plain_batches(90))
    else:
        settings |= {"validate_parallelism": True, "epochs": 1}
        trainer(train=plain_batches(90), model=model, **settings).train()
    assert reads.count > 0  # the meetings do read
    assert len(reads.per_step) >= 30
    between = [n for n, due in zip(reads.per_step[1:], reads.asked[:-1], strict=True) if not due]
    assert len(between) >= 20
    assert between[0] == max(between), reads.per_step
    assert set(between) == {0}


test_on_two_ranks = TWO_RANKS.test()
