"""The Trainer with steps of one's own: against a hand-written loop, its logs, its modes."""

import logging
import pickle
import time
import warnings
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ml4cube.errors import (
    EmptyPartError,
    InvalidTypeError,
    InvalidValueError,
    RunError,
    StoreError,
)
from ml4cube.training.callbacks import Callback
from ml4cube.training.schedulers import CosineAnnealingScheduler
from ml4cube.training.trainer import EarlyStopping, ModelCheckpoint, Trainer
from tests.distributed_runner import on_ranks
from tests.training_parts import At, Interrupt, dataset, loader, losses, network, weights


class Regression(Trainer):
    """Returns a second number beside the loss."""

    def train_step(self, batch):
        features, target = batch
        error = self.model(features) - target
        return {"loss": error.pow(2).mean(), "mae": error.abs().mean()}

    def test_step(self, batch):
        return self.train_step(batch)


def make(kind=Regression, *, model=None, optimizer=True, schedule=False, **arguments):
    model = network() if model is None else model
    if optimizer:
        arguments["optimizer"] = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    if schedule:
        arguments["scheduler"] = CosineAnnealingScheduler(arguments["optimizer"], 20)
    return kind(model, **{"device": "cpu", **arguments})


# ------------------------------------------------------------- against a loop by hand


@pytest.mark.parametrize("on_batch", [False, True])
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_run_equals_a_loop_written_by_hand(on_batch, clip):
    torch.manual_seed(5)
    run = make(schedule=True, scheduler_step_on_batch=on_batch, gradient_clip=clip)
    history = run.run(n_epoch=3, loader=loader(), valid_loader=loader(9, seed=1))

    torch.manual_seed(5)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    scheduler = CosineAnnealingScheduler(optimizer, 20)
    train, val = [], []
    for _ in range(3):
        model.train()
        seen = []
        for x, y in loader():
            optimizer.zero_grad()
            error = model(x) - y
            error.pow(2).mean().backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            if on_batch:
                scheduler.step()
            seen.append(error.detach())
        if not on_batch:
            scheduler.step()
        error = torch.cat(seen)
        train.append((error.pow(2).mean().item(), error.abs().mean().item()))
        model.eval()
        x, y = dataset(9, seed=1).tensors
        with torch.no_grad():
            error = model(x) - y
        val.append((error.pow(2).mean().item(), error.abs().mean().item()))

    assert weights(run.model) == weights(model)
    assert history is run.history
    for name, expected in (("train", train), ("val", val)):
        assert history[f"{name}_loss"] == pytest.approx([e[0] for e in expected], rel=1e-6)
        assert history[f"{name}_mae"] == pytest.approx([e[1] for e in expected], rel=1e-6)


def test_a_loss_is_the_same_as_steps_that_compute_it():
    def trained(**arguments):
        torch.manual_seed(1)
        run = make(**arguments)
        run.run(2, loader(shuffle=True), loader(7, seed=2))
        return weights(run.model), losses(run)

    (model, found), (other, more) = trained(kind=Trainer, loss=nn.MSELoss()), trained()
    assert model == other
    assert found == {name: values for name, values in more.items() if "mae" not in name}


def test_metrics_loggers_and_options_are_those_of_the_loop():
    class Collect:
        rows = ()

        def log(self, values, step):
            self.rows = (*self.rows, (step, sorted(values)))

    log = Collect()
    run = make(
        Trainer,
        loss=nn.MSELoss(),
        metrics={"l1": nn.L1Loss()},
        loggers=[log],
        gradient_accumulation_steps=4,
        max_steps=3,
        precision="bf16",
    )
    history = run.run(5, loader(), loader(9))
    assert len(history) == 2  # 6 batches are 2 steps
    assert run.progress_checker.step == 3
    assert log.rows[0] == (2, ["epoch", "l1", "lr", "seconds", "train_loss", "val_loss"])
    assert run.precision == "bf16"


def test_run_goes_on_where_it_ended():
    def trained(parts, **arguments):
        torch.manual_seed(2)
        run = make(schedule=True, **arguments)
        for epochs in parts:
            run.run(epochs, loader(shuffle=True), loader(7, seed=2))
        return weights(run.model), losses(run), run.progress_checker.epoch

    for arguments in ({}, {"seed": 3}, {"gradient_accumulation_steps": 4}):
        assert trained([4], **arguments) == trained([1, 2, 1], **arguments)


def test_run_after_an_early_stop_trains_as_many_epochs_as_asked():
    run = make(callbacks=EarlyStopping(patience=1, monitor="lr"))  # which never improves
    run.run(5, loader())
    assert len(run.history) == 2
    run.run(2, loader())
    assert len(run.history) == 4


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"gradient_cliping": 1.0}, r"Trainer\(\) has no argument .*did you mean 'gradient_clip'"),
        ({"limit_train_batch": 1}, "did you mean 'limit_train_batches'"),
        ({"epochs": 3}, r"give the number of epochs to run\(n_epoch"),
        ({"xyz": 3}, "it takes callbacks, compile, device, "),
    ],
)
def test_a_misspelt_option_is_named_at_once(option, message):
    with pytest.raises(InvalidTypeError, match=message):
        make(**option)


# ------------------------------------------------------------------- single batches


def test_run_epoch_gives_its_row_and_run_batch_takes_one_of_its_steps():
    batches = list(loader(12))
    torch.manual_seed(4)
    whole = make(scheduler_step_on_batch=True, schedule=True)
    row = whole.run_epoch(batches)
    assert row["train_mae"] == whole.history["train_mae"][0]
    assert "val_loss" not in row
    assert (row["epoch"], whole.progress_checker.get_epoch()) == (1, 2)
    torch.manual_seed(4)
    single = make(scheduler_step_on_batch=True, schedule=True)
    found = [single.run_batch(batch) for batch in batches]
    assert weights(single.model) == weights(whole.model)
    assert single.progress_checker.step == 3
    assert single.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]
    mean = sum(f["mae"] for f in found) / 3
    assert whole.history["train_mae"][0] == pytest.approx(mean, rel=1e-6)
    assert len(single.log_train["loss"]) == 3


def test_steps_of_run_batch_count_in_a_run_that_follows(tmp_path):
    def trained(path):
        torch.manual_seed(8)
        run = make(snapshot_path=path)
        run.run(1, loader())
        run.run_batch(next(iter(loader())))
        assert run.progress_checker.step == 7
        run.run(1, loader())  # not from the snapshot, which knows nothing of the batch
        assert run.progress_checker.step == 13
        return weights(run.model)

    assert trained(tmp_path / "s.pt") == trained(None)


# ------------------------------------------------------------------------- test mode


def test_test_mode_needs_no_optimizer_and_changes_nothing():
    model = network(norm=True)
    run = make(model=model, optimizer=False, mode="test")
    before = weights(model)
    state = torch.get_rng_state()
    tested = run.run(2, loader(9))
    x, y = dataset(9).tensors
    error = (model.eval()(x) - y).detach()
    assert tested["val_loss"] == pytest.approx([error.pow(2).mean().item()] * 2, rel=1e-6)
    assert tested["val_mae"] == pytest.approx([error.abs().mean().item()] * 2, rel=1e-6)
    assert weights(model) == before
    assert torch.equal(torch.get_rng_state(), state)
    assert (run.progress_checker.epoch, run.progress_checker.step) == (2, 6)
    assert len(run.log_test["loss"]) == 3
    assert len(run.history) == 0
    one = run.run_batch(next(iter(loader(9))))
    assert one["mae"] == pytest.approx(error[:4].abs().mean().item(), rel=1e-6)
    with pytest.raises(InvalidTypeError, match="leave valid_loader out"):
        run.run(1, loader(), loader())
    run.toggle()
    with pytest.raises(InvalidTypeError, match="got None; give one, or mode='test'"):
        run.run(1, loader())


def test_inference_is_in_order_on_the_cpu_and_without_dropout():
    run = make(schedule=True)
    run.run(1, loader())
    x, _ = dataset(9).tensors
    expected = run.model.eval()(x).detach()
    run.model.train()
    found = run.inference(loader(9))
    assert found.device.type == "cpu"
    # batches of another size round differently on some processors
    torch.testing.assert_close(found, expected)
    assert not found.requires_grad
    assert run.log_test == {}  # nothing of it is logged
    with pytest.raises(EmptyPartError, match="no batch to predict"):
        run.inference([])

    plain = make(Trainer, loss=nn.MSELoss(), model=run.model)
    without_target = plain.inference([x[:4], x[4:]])
    torch.testing.assert_close(without_target, expected)


def test_inference_takes_the_output_of_the_step_and_nested_ones():
    class Both(Regression):
        def test_step(self, batch):
            return {**super().test_step(batch), "output": -batch[0]}

    class Nested(Regression):
        def predict_step(self, batch):
            return {"x": batch[0], "pair": (batch[1], self.model(batch[0]))}

    x, y = dataset(9).tensors
    assert torch.equal(make(Both).inference(loader(9)), -x)
    nested = make(Nested).inference(loader(9))
    assert torch.equal(nested["x"], x)
    assert torch.equal(nested["pair"][0], y)

    class Wrong(Regression):
        def predict_step(self, batch):
            return "seven"

    with pytest.raises(InvalidTypeError, match=r"predict_step must return .* got a str"):
        make(Wrong).inference(loader(9))


# ------------------------------------------------------------------------------ logs


class Classify(Trainer):
    """Keeps its outputs, to judge them once an epoch is over."""

    def train_step(self, batch):
        features, target = batch
        output = self.model(features)
        return {"loss": (output - target).pow(2).mean(), "output": output, "label": target}

    test_step = train_step

    def metric_on_epoch_end(self):
        assert set(self.log_test) == {"loss", "output", "label"}
        output, label = torch.cat(self.log_test["output"]), torch.cat(self.log_test["label"])
        self.lengths = len(self.log_train["loss"]), len(self.log_test["loss"])
        return {"hits": (output.sign() == label.sign()).float().mean(), "n": len(output)}


def test_metric_on_epoch_end_sees_the_logs_and_lands_in_the_history():
    run = make(Classify, callbacks=[EarlyStopping(patience=1, mode="max", monitor="n")])
    history = run.run(3, loader(), loader(9))
    assert history["n"] == [9.0, 9.0]  # stopped after two, since n no longer grew
    x, y = dataset(9).tensors
    hits = (run.model.eval()(x).sign() == y.sign()).float().mean().item()
    assert history["hits"][-1] == pytest.approx(hits)
    assert run.lengths == (6, 3)
    assert "val_output" not in history
    assert all(value.device.type == "cpu" for value in run.log_train["loss"])
    assert np.mean(run.log_test["loss"]) > 0  # as users of numpy read it


def test_what_a_step_returns_stands_in_the_history_beside_the_norms_of_gradients():
    run, plain = make(seed=3, log_grad_norm=True), make(seed=3)
    history, without = (one.run(2, loader(), loader(9)) for one in (run, plain))
    assert set(history) - set(without) == {"grad_norm", "grad_norm_max"}
    assert history["train_mae"] == without["train_mae"]


def test_logs_survive_loaders_that_use_their_memory_again():
    class Reuses:
        def __iter__(self):
            box = torch.empty(4, 3)
            for start in range(0, 8, 4):
                box.copy_(dataset(8).tensors[0][start : start + 4])
                yield box, box.sum(1, keepdim=True)

    class Keep(Regression):
        def test_step(self, batch):
            return {**super().test_step(batch), "x": batch[0]}

    run = make(Keep, mode="test")
    run.run(1, Reuses())
    assert torch.equal(torch.cat(run.log_test["x"]), dataset(8).tensors[0])


# ----------------------------------------------------------------- what it says and keeps


def test_best_weights_are_kept_and_can_be_put_back(tmp_path):
    class Spoil(Callback):
        def on_epoch_start(self, loop):
            if loop.state.epoch == 2:
                with torch.no_grad():
                    loop.model[0].weight.mul_(-10)

    data, checkpoint = loader(), ModelCheckpoint(tmp_path / "kept")
    run = make(callbacks=[Spoil(), checkpoint], gradient_clip=0.1)
    with pytest.raises(RunError, match="no epoch was trained yet"):
        run.apply_weights()
    history = run.run(3, data, data)
    spoilt = weights(run.model)
    assert run.best_epoch == 1 + int(np.argmin(history["val_loss"])) < 3
    run.apply_weights()
    best = weights(run.model)
    assert best != spoilt
    run.toggle("test")
    assert run.run(1, data)["val_loss"][0] == pytest.approx(run.best_loss, rel=1e-6)
    assert run.history["epoch"] == [1, 2, 3]  # not touched by the test
    path = tmp_path / "deep" / "best.pt"
    run.save_model(path)
    assert weights(path) == best
    other = make(model=network(seed=9))
    for load, file in (
        (other.load_model, path),
        (other.load_model, checkpoint.paths[0]),
        (other.apply_weights, path),
    ):
        other.model.load_state_dict(network(seed=9).state_dict())
        load(file)
        assert weights(other.model) == best
    with pytest.raises(InvalidValueError, match="weights of another model"):
        make(model=nn.Linear(3, 1)).load_model(path)
    with pytest.raises(StoreError, match="does not exist"):
        other.load_model(tmp_path / "no.pt")


@pytest.mark.parametrize("step", [2, 6, 9, 13])
def test_a_run_cut_off_anywhere_goes_on_bit_for_bit(tmp_path, step):
    def trained(path, *calls):
        run = make(schedule=True, seed=3, snapshot_path=path, save_every=1, callbacks=calls)
        run.run(3, loader(shuffle=True), loader(9))
        return run

    whole = trained(None)
    with pytest.raises(Interrupt):
        trained(tmp_path / "s.pt", At(step))
    again = trained(tmp_path / "s.pt")
    assert weights(again.model) == weights(whole.model)
    assert losses(again) == losses(whole)
    assert (again.best_epoch, again.best_loss) == (whole.best_epoch, whole.best_loss)
    assert again.progress_checker.step == whole.progress_checker.step == 18
    again.apply_weights()
    whole.apply_weights()
    assert weights(again.model) == weights(whole.model)


@pytest.mark.parametrize(
    ("methods", "message"),
    [
        ({"train_step": lambda self, batch: None}, r"Bad\.train_step must .*'loss' is a tensor"),
        ({"train_step": lambda self, batch: 0.5}, r"'loss' is a tensor.*got a float"),
        ({"train_step": lambda self, batch: {"mae": 1}}, r"'loss' is a tensor.*got a dict of"),
        ({"train_step": lambda self, batch: {"loss": 0.5}}, "'loss' is a tensor"),
        ({"metrics": True}, r"Bad\.test_step must return 'output' .* got a dict of \['loss'"),
        ({"metric_on_epoch_end": lambda self: [1.0]}, "must return a dict"),
        ({"metric_on_epoch_end": lambda self: {"val_loss": 1.0}}, r"\['val_loss'\], which are col"),
        ({"count_samples": lambda self, batch: "3"}, r"Bad\.count_samples\(\) must .* got '3'"),
        ({"count_samples": lambda self, batch: 2.5}, r"Bad\.count_samples\(\) must .* got 2\.5"),
        ({"count_samples": lambda self, batch: -1}, r"Bad\.count_samples\(\) must .* got -1"),
    ],
)
def test_what_a_method_must_not_return_is_refused(methods, message):
    methods = dict(methods)
    metrics = {"l1": nn.L1Loss()} if methods.pop("metrics", False) else None
    run = make(type("Bad", (Regression,), methods), metrics=metrics)
    with pytest.raises((InvalidTypeError, InvalidValueError), match=message):
        run.run(1, loader(), loader(4))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: make(Trainer), InvalidTypeError, "Trainer has neither train_step"),
        (lambda: make(Trainer, mode="test"), InvalidTypeError, "neither test_step"),
        (lambda: make(Trainer, loss="mse"), InvalidTypeError, "loss must be a loss function"),
        (lambda: make(optimizer=False), InvalidTypeError, r"optimizer must be .* got None"),
        (lambda: Regression("net", "cpu"), InvalidTypeError, r"a torch\.nn\.Module, got 'net'"),
        (lambda: make(mode="trian"), InvalidValueError, "did you mean 'train'"),
        (lambda: make(device=3.5), InvalidValueError, r"be a torch device .* got 3\.5"),
        (lambda: make(device=[]), InvalidValueError, r"device must name a device, got \[\]"),
        (lambda: make().run(0, loader()), InvalidValueError, r"n_epoch must be .* got 0"),
    ],
)
def test_what_cannot_work_is_refused_at_once(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_a_test_step_is_needed_only_to_validate():
    class NoTest(Trainer):
        def train_step(self, batch):
            return Regression.train_step(self, batch)

    run = make(NoTest)
    with pytest.raises(InvalidTypeError, match="neither test_step"):
        run.run(1, loader(), loader())
    run.run(1, loader())


def test_of_several_devices_one_process_says_which_it_takes(caplog):
    with caplog.at_level(logging.WARNING, "ml4cube"):
        run = make(device=["cpu", torch.device("cpu")])
    assert "names 2 devices, but there is one process" in caplog.text
    assert run.device == torch.device("cpu")


def test_a_trainer_pickled_before_its_first_step_trains_without_a_warning():
    """Torch warns where a scheduler's optimizer is not the one that it was made with."""
    run = pickle.loads(pickle.dumps(make(schedule=True)))  # noqa: S301
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.run(1, loader())


# --------------------------------------------------------------------- several ranks


def _on_a_rank():
    from torch.utils.data.distributed import DistributedSampler

    data, test = dataset(24), dataset(7, seed=1)
    run = make(Classify)
    sampler = DistributedSampler(data, shuffle=False)
    run.run(
        2,
        DataLoader(data, batch_size=4, sampler=sampler),
        DataLoader(test, batch_size=2, sampler=DistributedSampler(test)),
    )
    run.apply_weights()
    return losses(run), weights(run.model), len(run.log_test["loss"])


@pytest.mark.slow
def test_two_ranks_judge_all_batches_and_agree():
    (one, first, seen), (two, second, other) = on_ranks(2, _on_a_rank)
    assert one == two
    assert first == second
    assert one["n"] == [7.0, 7.0]  # every sample once, though the sampler pads
    assert (seen, other) == (2, 2)
    x, y = dataset(7, seed=1).tensors
    model = network()
    model.load_state_dict({name: torch.tensor(value) for name, value in first.items()})
    hits = (model.eval()(x).sign() == y.sign()).float().mean().item()
    best = int(np.argmin(one["val_loss"]))
    assert one["hits"][best] == pytest.approx(hits)
    loss = (model(x) - y).pow(2).mean().item()
    assert one["val_loss"][best] == pytest.approx(loss, rel=1e-5)


class Graph:
    """A batch as graph libraries make it: nothing of torch, but it can be moved."""

    def __init__(self, nodes, target, graphs):
        self.nodes, self.target, self.graphs, self.moved = nodes, target, graphs, False

    def to(self, device):
        moved = Graph(self.nodes.to(device), self.target.to(device), self.graphs)
        moved.moved = True
        return moved


@dataclass(frozen=True)
class Bag:
    nodes: torch.Tensor
    target: torch.Tensor


class OfNodes(Trainer):
    """The mean over nodes, of whatever a batch is."""

    def train_step(self, batch):
        if isinstance(batch, torch.Tensor):
            return {"loss": self.model(batch.expand(1, 3)).mean()}
        if isinstance(batch, dict):
            batch = Bag(batch["nodes"], batch["target"])
        return {"loss": nn.functional.mse_loss(self.model(batch.nodes), batch.target)}

    test_step = train_step


class OfGraphs(OfNodes):
    def count_samples(self, batch):
        assert batch.moved
        return batch.graphs


def graphs():
    x, y = dataset(12).tensors
    return [Graph(x[:4], y[:4], 1), Graph(x[4:], y[4:], 5)]


def test_a_step_says_how_many_samples_its_batches_have():
    """In the means of the History, and in a step over several batches, as by hand."""
    model, other = nn.Linear(3, 1), nn.Linear(3, 1)
    other.load_state_dict(model.state_dict())
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    run = OfGraphs(model, device="cpu", optimizer=sgd, gradient_accumulation_steps=2)
    history = run.run(1, graphs(), graphs())
    one, two = (nn.functional.mse_loss(other(g.nodes), g.target) for g in graphs())
    truth = (one + 5 * two) / 6
    assert history["train_loss"][0] == pytest.approx(truth.item())
    truth.backward()
    with torch.no_grad():
        other.weight -= 0.1 * other.weight.grad
        other.bias -= 0.1 * other.bias.grad
    torch.testing.assert_close(model.weight, other.weight)
    one, two = (nn.functional.mse_loss(other(g.nodes), g.target).item() for g in graphs())
    assert history["val_loss"][0] == pytest.approx((one + 5 * two) / 6)
    assert history["ranks"][0][0]["val_n"] == 6


@pytest.mark.parametrize(
    "make_batch",
    [
        lambda x, y: Graph(x, y, 3),
        lambda x, y: {"target": y, "edges": torch.zeros(2, 9), "nodes": x},
        lambda x, y: y.mean(),
    ],
)
def test_where_samples_are_not_known_batches_count_alike_and_a_warning_says_so(make_batch):
    x, y = dataset(12).tensors
    batches = [make_batch(x[:3], y[:3]), make_batch(x[3:], y[3:])]
    run = make(OfNodes, model=nn.Linear(3, 1))
    with pytest.warns(UserWarning, match=r"define OfNodes\.count_samples\(self, batch\)") as found:
        run.run(1, batches, batches)
    assert len(found) == 2  # in training and in validation
    alike = [run.test_step(batch)["loss"].item() for batch in batches]
    assert run.history["val_loss"][0] == pytest.approx(sum(alike) / 2)


def test_tensors_that_agree_are_counted_and_those_that_agree_by_chance_refused():
    x, y = dataset(12).tensors
    run = make(OfNodes, model=nn.Linear(3, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.run(1, [Bag(x, y)], [Bag(x[:3], y[:3]), Bag(x[3:], y[3:])])
    ends = [run.test_step(Bag(x[c], y[c]))["loss"].item() for c in (slice(3), slice(3, 12))]
    assert run.history["val_loss"][0] == pytest.approx((3 * ends[0] + 9 * ends[1]) / 12)
    static = torch.zeros(8, 2)
    some = [{"map": static, "nodes": x[c], "target": y[c]} for c in (slice(8), slice(8, 12))]
    with pytest.raises(InvalidTypeError, match=r"not of this one \(dict\)"):
        make(OfNodes, model=nn.Linear(3, 1)).run(1, some)


def test_a_loss_given_for_testing_alone_divides_as_it_does():
    """The step of training is one's own, that of testing is the loss."""
    model = nn.Linear(3, 3)

    class Half(Trainer):
        def train_step(self, batch):
            return {"loss": self.model(batch[0]).pow(2).mean()}

    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 5.0]))
    x, y = dataset(12).tensors[0], torch.arange(12) % 3
    y[4:] = 0
    run = make(Half, model=model, loss=loss)
    history = run.run(1, [(x, y)], [(x[:4], y[:4]), (x[4:], y[4:])])
    assert history["val_loss"][0] == pytest.approx(loss(model(x), y).item(), rel=1e-5)


# ------------------------------------------------------------- settings of the loop


def test_an_average_of_the_weights_goes_on_with_the_next_run(tmp_path):
    def trained(parts, path=None):
        torch.manual_seed(9)
        run = make(ema=0.5, schedule=True, snapshot_path=path)
        for epochs in parts:
            run.run(epochs, loader(), loader(9))
        return run

    whole, parts = trained([3]), trained([1, 2])
    assert weights(parts.model) == weights(whole.model)
    assert losses(parts) == losses(whole)
    assert whole.history["val_loss"][-1] == pytest.approx(
        make(model=whole.model, mode="test").run(1, loader(9))["val_loss"][0], rel=1e-6
    )
    for one in (whole, parts := pickle.loads(pickle.dumps(parts))):  # noqa: S301
        torch.manual_seed(10)
        one.run_batch(next(iter(loader())))
        one.run(1, loader())
    assert weights(parts.model) == weights(whole.model)
    assert weights(parts.model) != weights(make(model=network()).model)


@pytest.mark.parametrize("load", ["load_model", "apply_weights", "the best", "the model itself"])
def test_weights_that_are_loaded_are_those_the_next_run_averages_from(tmp_path, load):
    path = tmp_path / "other.pt"
    make(model=network(seed=5)).save_model(path)
    run = make(ema=0.9)
    run.run(2, loader())
    if load == "the best":
        run.apply_weights()
    elif load == "the model itself":
        run.model.load_state_dict(network(seed=5).state_dict())
        run.evaluate(loader(9))
    else:
        getattr(run, load)(path)
    loaded = weights(run.model)
    run.optimizer.param_groups[0]["lr"] = 0.0
    run.run(1, loader())
    assert weights(run.model) == loaded


@pytest.mark.parametrize("load", ["load_model", "apply_weights"])
def test_weights_loaded_after_an_interrupt_are_not_replaced_by_those_of_the_snapshot(
    tmp_path, load
):
    run = make(snapshot_path=tmp_path / "s.pt", save_every=1, callbacks=At(14))
    with pytest.raises(Interrupt):
        run.run(9, loader(), loader(9))
    if load == "load_model":
        make(model=network(seed=5)).save_model(tmp_path / "other.pt")
        run.load_model(tmp_path / "other.pt")
    else:
        run._best.weights = network(seed=5).state_dict()
        run.apply_weights()
    run.optimizer.param_groups[0]["lr"] = 0.0
    epochs = run.progress_checker.epoch
    run.run(1, loader())
    assert weights(run.model) == weights(network(seed=5))
    assert len(run.history) == epochs + 1


@pytest.mark.slow
def test_limits_several_sets_norms_and_a_compiled_model():
    limits = {"limit_train_batches": 0.34, "limit_val_batches": 1}
    run = make(log_grad_norm=True, compile="eager", **limits)
    history = run.run(1, loader(), {"north": loader(9), "south": loader(9, seed=3)})
    row = history["ranks"][0][0]
    assert (row["train_n"], row["val_n"]) == (8, 8)
    assert {"val_loss/north", "val_loss/south", "grad_norm"} <= set(history)
    assert len(run.log_test["loss"]) == 2
    assert run.inference(loader(9)).shape == (9, 1)


@pytest.mark.parametrize("ema", [None, 0.5])
def test_what_a_time_limit_left_is_finished_by_the_next_run(tmp_path, ema):
    class Slow(Regression):
        def train_step(self, batch):
            time.sleep(self.pause)
            return super().train_step(batch)

    def trained(max_time, pause):
        path = tmp_path / f"{pause}.pt"
        run = make(Slow, seed=3, ema=ema, max_time=max_time, snapshot_path=path)
        run.pause = pause
        run.run(2, loader(shuffle=True), loader(9))
        return run

    run = trained(0.3, 0.1)
    assert 0 < run.progress_checker.step < 12
    run.pause, run._options = 0.0, replace(run._options, max_time=None)
    run.run(2, loader(shuffle=True), loader(9))
    assert len(run.history) == 2
    whole = trained(None, 0)
    assert weights(run.model) == weights(whole.model)
    assert losses(run) == losses(whole)
