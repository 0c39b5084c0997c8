"""What the optimizer holds is what is trained: also learned weights of a loss, a second module."""

import copy
import re
import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.training import pytorch, pytorch_distributed
from ml4cube.training.addons import MultiGPUAddon, StateManagerAddon
from ml4cube.training.callbacks import ModelCheckpoint
from ml4cube.training.distributed import DistributedTrainer
from ml4cube.training.trainer import Trainer
from tests.distributed_runner import TwoRanks, assert_same_on_all_ranks
from tests.training_parts import At, Interrupt, dataset, hooks, losses, network, weights

TWO_RANKS = TwoRanks()
on_two_ranks, ran = TWO_RANKS.add, TWO_RANKS.fixture()


class LearnedLoss(nn.Module):
    """A squared error with a learned variance, as in a sum of several tasks."""

    def __init__(self, start=0.0):
        super().__init__()
        self.log_var = nn.Parameter(torch.tensor([start]))

    def forward(self, pred, target):
        """Return the loss."""
        error = nn.functional.mse_loss(pred, target)
        return (error * torch.exp(-self.log_var) + self.log_var).sum()


class InAnObject:
    """Has such a loss as an attribute."""

    def __init__(self, start=0.0):
        self.inner = LearnedLoss(start)

    def __call__(self, pred, target):
        """Return the loss."""
        return self.inner(pred, target)

    def parameters(self):
        """The learned variance."""
        return self.inner.parameters()


class OfNoModule:
    """Has a parameter that is no attribute of a module."""

    def __init__(self, start=0.0):
        self._parameters = (nn.Parameter(torch.tensor([start])),)

    def __call__(self, pred, target):
        """Return the loss."""
        (log_var,) = self._parameters
        error = nn.functional.mse_loss(pred, target)
        return (error * torch.exp(-log_var) + log_var).sum()

    def parameters(self):
        """The learned variance."""
        return list(self._parameters)


def with_loss(loss, *, ranks=False, **arguments):
    """A Trainer whose optimizer has the parameters of the loss too."""
    model = network()
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.02, momentum=0.9)
    kind = pytorch_distributed.Trainer if ranks else pytorch.Trainer
    train = DataLoader(dataset(40), batch_size=4, shuffle=True)
    val = DataLoader(dataset(17, seed=1), batch_size=5)
    arguments = {"seed": 3, "device": "cpu", "epochs": 3, "save_every": 1} | arguments
    return kind(model, train, val, optimizer, loss=loss, progress=False, **arguments)


def values(loss):
    return [parameter.detach().clone() for parameter in loss.parameters()]


@pytest.mark.parametrize("step", [10, 13])  # at the end of an epoch, and inside of one
@pytest.mark.parametrize("kind", [LearnedLoss, InAnObject, OfNoModule])
def test_a_resumed_run_has_the_learned_weights_of_the_loss(tmp_path, kind, step):
    whole_loss, cut_loss, resumed_loss = kind(), kind(), kind()
    whole = with_loss(whole_loss)
    whole.train()
    path = tmp_path / "snapshot.pt"

    def save(loop):
        loop.requests.signals.must_save |= loop.state.step == step
        loop.requests._next_step = 0

    callbacks = [hooks(on_step_end=save), At(step + 1)]
    with pytest.raises(Interrupt):
        with_loss(cut_loss, snapshot_path=path, callbacks=callbacks).train()
    resumed = with_loss(resumed_loss, snapshot_path=path)
    resumed.train()
    assert values(whole_loss)[0].abs().item() > 0.01
    assert values(resumed_loss) == values(whole_loss)
    assert weights(resumed.model) == weights(whole.model)
    assert losses(resumed) == losses(whole)


def test_a_group_of_the_loss_that_a_callback_added_is_resumed(tmp_path):
    def train(loss, **arguments):
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

        def add(loop):
            if loop.state.epoch == 1 and len(optimizer.param_groups) == 1:
                optimizer.add_param_group({"params": list(loss.parameters())})

        added, last = hooks(on_epoch_start=add), arguments.pop("last", [])
        arguments |= {"seed": 3, "device": "cpu", "epochs": 4, "save_every": 1, "progress": False}
        data = DataLoader(dataset(40), batch_size=4, shuffle=True)
        callbacks = [added, *last]
        pytorch.Trainer(
            model, data, None, optimizer, loss=loss, callbacks=callbacks, **arguments
        ).train()
        return weights(model)

    whole_loss, resumed_loss, path = LearnedLoss(), LearnedLoss(), tmp_path / "snapshot.pt"
    whole = train(whole_loss)
    with pytest.raises(Interrupt):
        train(LearnedLoss(), snapshot_path=path, last=[At(33)])
    assert train(resumed_loss, snapshot_path=path) == whole
    assert values(resumed_loss) == values(whole_loss)


class TwoModules(Trainer):
    """An encoder beside the model, with statistics of its own."""

    def __init__(self, model, *args, encoder, **arguments):
        parameters = [{"params": model.parameters()}, {"params": encoder.parameters(), "lr": 0.05}]
        optimizer = torch.optim.SGD(parameters, lr=0.02, momentum=0.9)
        arguments = {"log_bar": False, "seed": 3, "save_every": 1} | arguments
        super().__init__(model, *args, optimizer=optimizer, **arguments)
        self.encoder = encoder

    def train_step(self, batch):
        """Encode, then predict."""
        features, target = batch
        self.encoder.train(self.mode == "train")
        pred = self.model(self.encoder(features))
        return {"loss": nn.functional.mse_loss(pred, target), "output": pred, "target": target}

    def test_step(self, batch):
        """As in training."""
        return self.train_step(batch)


def encoder(seed=1):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))


def two_modules(*add_ons, seed=1, **arguments):
    kind = TwoModules.add_on(*add_ons)
    return kind(network(), encoder=encoder(seed), **{"device": "cpu", **arguments})


def data():
    train = DataLoader(dataset(40), batch_size=4, shuffle=True)
    return train, DataLoader(dataset(17, seed=1), batch_size=5)


def test_a_resumed_run_has_the_second_module_with_its_statistics(tmp_path):
    whole = two_modules()
    whole.run(3, *data())
    path = tmp_path / "snapshot.pt"
    with pytest.raises(Interrupt):
        two_modules(snapshot_path=path, callbacks=[At(13)]).run(3, *data())
    resumed = two_modules(snapshot_path=path)
    resumed.run(3, *data())
    assert weights(resumed.encoder) == weights(whole.encoder) != weights(encoder())
    assert losses(resumed) == losses(whole)


def test_the_best_epoch_is_that_of_the_loss_and_of_the_second_module_too(tmp_path):
    seen = {}

    def remember(loop, row):
        seen[row["epoch"]] = copy.deepcopy(loop.outside())

    def worsen(loop):  # so that the first epoch is the best
        if loop.state.epoch == 1:
            loop.model[3].bias.data += 5
            for group in loop.optimizer.param_groups:
                group["lr"] = 1e-4

    loss = LearnedLoss()
    callbacks = [hooks(on_check=remember, on_epoch_start=worsen)]
    run = with_loss(loss, callbacks=callbacks, epochs=2)
    run.train()
    assert run.best_epoch == 1
    assert loss.log_var.item() == seen[1]["loss.log_var"].item() != seen[2]["loss.log_var"].item()

    seen.clear()
    run = two_modules(callbacks=callbacks, snapshot_path=tmp_path / "s.pt")
    run.run(2, *data())
    again = two_modules(callbacks=callbacks, snapshot_path=tmp_path / "s.pt")
    with pytest.warns(UserWarning, match="already complete"):
        again.run(2, *data())
    for each in (run, again):
        assert each.best_epoch == 1
        each.apply_weights()
        state = {f"trainer.encoder.{name}": t for name, t in each.encoder.state_dict().items()}
        assert all(torch.equal(tensor, seen[1][name]) for name, tensor in state.items())


def test_a_snapshot_without_them_is_refused(tmp_path):
    path = tmp_path / "snapshot.pt"
    with_loss(nn.MSELoss(), snapshot_path=path, epochs=1).train()
    with pytest.raises(InvalidValueError, match=r"parameters: loss.log_var was None and is \[1\]"):
        with_loss(LearnedLoss(), snapshot_path=path).train()


def test_an_unequal_shape_is_refused(tmp_path):
    path = tmp_path / "snapshot.pt"
    with_loss(LearnedLoss(), snapshot_path=path, epochs=1).train()
    other = LearnedLoss()
    other.log_var = nn.Parameter(torch.zeros(2))
    with pytest.raises(InvalidValueError, match=r"parameters: loss.log_var was \[1\] and is \[2\]"):
        with_loss(other, snapshot_path=path).train()


def test_other_files_hold_them_too(tmp_path):
    kept = ModelCheckpoint(tmp_path / "best")
    saved = two_modules(StateManagerAddon, save_path=tmp_path, callbacks=[kept])
    saved.run(1, *data())
    loaded = two_modules(StateManagerAddon, seed=2, save_path=tmp_path)
    loaded.load_state()
    assert weights(loaded.encoder) == weights(saved.encoder)
    (file,) = (tmp_path / "best").iterdir()
    outside = torch.load(file, weights_only=True)["outside"]
    assert {f"trainer.encoder.{name}" for name in saved.encoder.state_dict()} == outside.keys()

    own, loss = DistributedTrainer(network()), LearnedLoss(0.5)
    optimizer = torch.optim.SGD([*own.model.parameters(), *loss.parameters()], lr=0.1)
    own.save_checkpoint(tmp_path / "own.pt", optimizer=optimizer)
    with torch.no_grad():
        loss.log_var.fill_(2.0)
    own.load_checkpoint(tmp_path / "own.pt", optimizer)
    assert loss.log_var.item() == 0.5


# ------------------------------------------------------------------- on several ranks


def batches(first, step):
    """Batches of eight samples, of which a rank has every second sample."""
    x, y = dataset(40).tensors
    return [(x[i : i + 8][first::step], y[i : i + 8][first::step]) for i in range(0, 40, 8)]


def plain(train, loss, ranks, **arguments):
    """A Trainer without any chance, so that ranks can be compared with one process."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*model.parameters(), *loss.parameters()], lr=0.05, momentum=0.9)
    kind = pytorch_distributed.Trainer if ranks else pytorch.Trainer
    settings = {"device": "cpu", "epochs": 2, "progress": False, **arguments}
    return kind(model, train, None, optimizer, loss=loss, **settings)


@on_two_ranks
def ranks_train_the_loss_as_one_process_does(folder):
    rank = torch.distributed.get_rank()
    for settings in (
        {},
        {"gradient_accumulation_steps": 2},
        {"gradient_clip": 0.5, "log_grad_norm": True},
        {"find_unused_parameters": True},
    ):
        for kind in (LearnedLoss, OfNoModule):
            shared, alone = kind(float(rank)), kind(0.0)  # that of rank 0 counts
            on_ranks = plain(batches(rank, 2), shared, ranks=True, **settings)
            one = plain(batches(0, 1), alone, ranks=False, **settings)
            for run in (on_ranks, one):
                run.train()
            assert_same_on_all_ranks([value.tolist() for value in values(shared)])
            torch.testing.assert_close(values(shared), values(alone))
            torch.testing.assert_close(on_ranks.model.weight, one.model.weight)
            norms = [run.history.to_dict().get("grad_norm", []) for run in (on_ranks, one)]
            torch.testing.assert_close(*norms)


class Sometimes(LearnedLoss):
    """Uses its parameter on rank 0 alone."""

    def forward(self, pred, target):
        """Return the loss."""
        if torch.distributed.get_rank() == 1:
            return nn.functional.mse_loss(pred, target)
        return super().forward(pred, target)


@on_two_ranks
def a_parameter_that_one_rank_uses_stays_alike(folder):
    loss, rank = Sometimes(), torch.distributed.get_rank()
    plain(batches(rank, 2), loss, ranks=True).train()
    assert loss.log_var.item() != 0
    assert_same_on_all_ranks(loss.log_var.item())


@on_two_ranks
def ranks_go_on_bit_for_bit(folder):
    rank = torch.distributed.get_rank()
    whole, cut, resumed = LearnedLoss(), LearnedLoss(), LearnedLoss(float(rank))
    settings = {"ranks": True, "save_every": 1, "epochs": 3}
    plain(batches(rank, 2), whole, **settings).train()
    settings["snapshot_path"] = f"{folder}/snapshot.pt"
    with pytest.raises(Interrupt):
        plain(batches(rank, 2), cut, callbacks=[At(7)], **settings).train()
    plain(batches(rank, 2), resumed, **settings).train()
    assert values(resumed) == values(whole)


@on_two_ranks
def shards_refuse_them_by_name(folder):
    match = r"parameters of the model alone, got 'loss.log_var' besides; .* strategy='ddp'"
    with pytest.raises(InvalidTypeError, match=match):
        plain(batches(0, 1), LearnedLoss(), ranks=True, strategy="fsdp")


test_on_two_ranks = TWO_RANKS.test()


@pytest.mark.slow
def test_processes_of_the_add_on_give_them_back():
    run = two_modules(MultiGPUAddon, device=["cpu", "cpu"])
    run.run(1, *data())
    assert weights(run.encoder) != weights(encoder())
    assert weights(run.encoder)["1.num_batches_tracked"] > 0


# ------------------------------------------------------------------- what is not trained


def head_replaced(model):
    model[3] = nn.Linear(8, 1)


def unfrozen(model):
    model[0].requires_grad_(True)


@pytest.mark.parametrize(
    ("held", "change", "names"),
    [
        (lambda model: model[3].parameters(), lambda model: None, "'0.weight' and '0.bias'"),
        (lambda model: model.parameters(), head_replaced, "'3.weight' and '3.bias'"),
        (lambda model: model[3].parameters(), unfrozen, "'0.weight' and '0.bias'"),
    ],
)
def test_parameters_that_no_optimizer_holds_are_a_warning(held, change, names):
    model = network()
    run = pytorch.Trainer(
        model,
        *data(),
        torch.optim.SGD(held(model), lr=0.1),
        loss=nn.MSELoss(),
        device="cpu",
        epochs=2,
    )
    change(model)
    match = f"does not hold 2 of the 4 trainable parameters of the.*: {re.escape(names)}; make"
    with pytest.warns(UserWarning, match=match) as caught:
        run.train()
    assert len([w for w in caught if "does not hold" in str(w.message)]) == 1  # not every epoch


class Weighed(nn.Module):
    def __init__(self):
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def forward(self, output, target):
        return ((output - target) ** 2).mean() * torch.exp(-self.log_scale) + self.log_scale


def test_parameters_of_a_loss_that_no_optimizer_holds_are_a_warning():
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = pytorch.Trainer(model, *data(), optimizer, loss=Weighed(), device="cpu", epochs=1)
    with pytest.warns(UserWarning, match=r"hold 1 of the 5 trainable .*: 'loss\.log_scale'; make"):
        run.train()


def test_frozen_parameters_are_no_warning():
    model = network()
    model[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
    run = pytorch.Trainer(model, *data(), optimizer, loss=nn.MSELoss(), device="cpu", epochs=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run.train()


@pytest.mark.filterwarnings("ignore:the optimizer does not hold")
def test_gradients_of_what_is_not_trained_do_not_count_in_the_norm():
    def norms(frozen):
        model = network()
        model[0].requires_grad_(not frozen)
        optimizer = torch.optim.SGD(model[3].parameters(), lr=0.1)
        settings = {"loss": nn.MSELoss(), "device": "cpu", "epochs": 1, "seed": 1}
        run = pytorch.Trainer(model, *data(), optimizer, log_grad_norm=True, **settings)
        run.train()
        return run.history["grad_norm"]

    assert norms(frozen=False) == norms(frozen=True)
