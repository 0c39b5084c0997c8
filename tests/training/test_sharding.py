"""FSDP: equal to DDP, resumed on any number of ranks, whole in the end."""

import os
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Subset

from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.callbacks import Callback, ModelCheckpoint
from ml4cube.training.files.checkpoint import read_file
from ml4cube.training.inputs.options import Options
from ml4cube.training.pytorch_distributed import Trainer
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.fsdp import Sharded, pick_groups
from ml4cube.training.trainer import AdvancedTrainer
from tests.distributed_runner import TwoRanks, assert_same_on_all_ranks, on_ranks
from tests.training_parts import (
    At,
    Counting,
    Interrupt,
    Save,
    Thaw,
    dataset,
    hooks,
    losses,
    meet_now,
    network,
    trainer,
    weights,
)

pytestmark = pytest.mark.slow

EVERY_STEP = hooks(on_step_end=meet_now)
GROUPS = {"strategy": "fsdp", "shard_modules": nn.Linear}


def run(strategy="fsdp", **arguments):
    """Train on the ranks there are; what a user sees of it."""
    if strategy == "fsdp":
        arguments = GROUPS | arguments
    arguments.setdefault("model", network(norm=True))
    ran = trainer(ranks=dist.is_initialized(), **arguments)
    model = ran.train()
    assert model is arguments["model"]
    assert not any(isinstance(value, dist.tensor.DTensor) for value in model.state_dict().values())
    if strategy == "fsdp" and dist.is_initialized():  # what a step waits for cannot be told
        assert all(row["communicate"] is None for row in ran.history["ranks"][-1])
    return weights(model), losses(ran), ran._loop.state.step


def interrupted(step, strategy="fsdp", **arguments):
    callbacks = [*arguments.pop("callbacks", ()), At(step)]
    with pytest.raises(Interrupt):
        run(strategy, callbacks=callbacks, **arguments)


def assert_equal(ran, truth):
    """Equal weights, losses and steps, to float rounding."""
    for name, values in truth[0].items():
        torch.testing.assert_close(torch.tensor(ran[0][name]), torch.tensor(values))
    for name, values in truth[1].items():
        assert ran[1][name] == pytest.approx(values, rel=1e-5), name
    assert ran[2] == truth[2] > 0


# -------------------------------------------------------------- what runs on two ranks

TWO_RANKS = TwoRanks()
on_two_ranks, ran = TWO_RANKS.add, TWO_RANKS.fixture()


SETTINGS = {
    "plain": {},
    "accumulated and clipped": {"gradient_accumulation_steps": 3, "gradient_clip": 0.05},
    "bf16": {"precision": "bf16"},
    "fp16, scaled": {"precision": "fp16", "gradient_clip": 0.5},
    "one group": {"shard_modules": 10_000},
    "averaged, norms logged": {"ema": 0.8, "log_grad_norm": True},
    "compiled": {"compile": "eager"},
}


@on_two_ranks
def training_equals_ddp(folder):
    found = {}
    for name, arguments in SETTINGS.items():
        plain = {k: v for k, v in arguments.items() if k != "shard_modules"}
        found[name] = run(epochs=2, **arguments)
        assert_equal(found[name], run("ddp", epochs=2, **plain))
    assert_same_on_all_ranks(found)  # every rank has the whole model
    assert found["bf16"][0] != found["plain"][0]


class Watched(nn.Linear):
    """Keeps the dtypes of its weight and of what it gets."""

    seen: ClassVar[set] = set()

    def forward(self, x):
        if self.training:
            Watched.seen.add((self.weight.dtype, x.dtype))
        return super().forward(x)


@on_two_ranks
def parameters_are_gathered_in_the_precision_of_the_run(folder):
    def train(precision, last=None, **more):
        Watched.seen.clear()
        layers = [Watched(3, 8), nn.ReLU(), Watched(8, 1), last or nn.Identity()]
        run(precision=precision, epochs=1, model=nn.Sequential(*layers), **more)
        return Watched.seen

    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        assert train(name) == {(dtype, dtype)}
        # BatchNorm has statistics in float32, and torch refuses a half-precision weight beside them
        normed = nn.Sequential(Watched(1, 1), nn.BatchNorm1d(1))
        found = train(name, normed, shard_modules=nn.Sequential)
        assert found == {(torch.float32, torch.float32), (torch.float32, dtype)}
    assert train("fp32") == {(torch.float32, torch.float32)}


class RowSums(torch.optim.SGD):
    """Keeps a state that has not its parameter's shape, as Adafactor does."""

    def step(self, closure=None):
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["rows"] = parameter.detach().sum(1)


@on_two_ranks
def optimizers_with_groups_and_frozen_parameters_train_as_under_ddp(folder):
    def train(make, **settings):
        model = network(norm=True)
        model[0].bias.requires_grad_(False)
        slow, fast = list(model[0].parameters())[:1], list(model[4].parameters())
        groups = [{"params": slow, "lr": 1e-3}, {"params": fast}, {"params": model[1].parameters()}]
        data = DataLoader(dataset(32), batch_size=4)
        settings |= {"epochs": 2, "device": "cpu", "seed": 3, "loss": nn.MSELoss()}
        ran = Trainer(model, data, data, make(groups, lr=1e-2), **settings)
        ran.train()
        return weights(model), losses(ran), ran._loop.state.step

    for make in (torch.optim.AdamW, torch.optim.Adagrad):  # the second has state from the start
        sharded = train(make, **GROUPS)
        assert_equal(sharded, train(make))
        assert sharded[0]["0.bias"] == network(norm=True).state_dict()["0.bias"].tolist()
    with pytest.raises(InvalidTypeError, match="RowSums keeps 'rows' in another shape"):
        train(RowSums, snapshot_path=f"{folder}/s.pt", save_every=1, **GROUPS)


@on_two_ranks
def ranks_that_start_from_unlike_weights_take_those_of_rank_0(folder):
    sharded = run(model=network(dist.get_rank(), norm=True), epochs=1)
    assert_equal(sharded, run("ddp", epochs=1))
    assert_same_on_all_ranks(sharded)


@on_two_ranks
def each_rank_holds_its_share_only(folder):
    strategy = Sharded(World.current("cpu"), Options(**GROUPS))
    model = network()
    cut = strategy.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    held = strategy.world.gather_objects(sum(p.to_local().numel() for p in cut.parameters()))
    total = sum(p.numel() for p in model.parameters())
    assert sum(held) == total
    assert max(held) <= total / 2 + 8


@on_two_ranks
def ranks_with_unequal_loaders_end_together(folder):
    own = Subset(dataset(16), [range(10), range(10, 16)][dist.get_rank()])

    def train(strategy, window=1):
        return run(
            strategy,
            train=DataLoader(own, batch_size=2),
            epochs=2,
            gradient_accumulation_steps=window,
            val=DataLoader(dataset(3, seed=1), batch_size=2),
        )

    sharded = train("fsdp")
    assert_equal(sharded, train("ddp"))
    assert_same_on_all_ranks(sharded)
    assert sharded[2] == 6
    # 5 batches and 3, two per step: the second step takes one of each rank.
    assert train("fsdp", 2)[2] == 4


@on_two_ranks
def validation_is_exact_also_for_fewer_samples_than_ranks(folder):
    for samples in (1, 5):
        val = DataLoader(dataset(samples, seed=1), batch_size=2)
        assert_equal(run(val=val, epochs=1), run("ddp", val=val, epochs=1))


@on_two_ranks
def tied_parameters_train_as_under_ddp(folder):
    def tied():
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1))
        model[1].weight = model[0].weight
        torch.manual_seed(0)
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        return model

    model = tied()
    assert_equal(run(model=model, epochs=2), run("ddp", model=tied(), epochs=2))
    assert model[0].weight is model[1].weight


@on_two_ranks
def scalar_parameters_are_refused_by_name(folder):
    model = network()
    model.gain = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(InvalidTypeError, match=r"scalar parameters \['gain'\]"):
        trainer(ranks=True, model=model, **GROUPS)


@on_two_ranks
def the_best_model_is_one_plain_file_and_on_every_rank(folder):
    model, path = network(norm=True), f"{folder}/best.pt"
    ran = trainer(ranks=True, model=model, epochs=4, best_model_path=path, **GROUPS)
    ran.train()
    assert ran.best_loss == min(ran.history["val_loss"])
    assert_same_on_all_ranks((weights(model), ran.best_loss))
    assert weights(model) == weights(path)
    assert os.listdir(folder) == ["best.pt"]


@on_two_ranks
def a_resumed_run_equals_an_undisturbed_one_bit_for_bit(folder):
    """Runs of 3 epochs of 5 steps, at an epoch's end and inside."""
    for number, more in enumerate(({}, {"ema": 0.8, "log_grad_norm": True})):
        truth = run(epochs=3, **more)
        end, inside = (
            {"snapshot_path": f"{folder}/{at}-{number}.pt", "epochs": 3, **more}
            for at in ("end", "inside")
        )
        end["save_every"] = 1
        interrupted(7, **end)
        assert run(**end) == truth
        assert run(**end) == truth  # finds an ended run
        # A signal reaches one rank.
        interrupted(9, callbacks=[Save(7)] if dist.get_rank() else [EVERY_STEP], **inside)
        state = read_file(inside["snapshot_path"])["state"]
        assert (state["step"], state["epoch"], state["batch"]) == (7, 1, 2)
        assert run(**inside) == truth


class Start(Callback):
    """Keep the whole weights as they are when a run starts or goes on."""

    def on_train_start(self, loop):
        state = loop.strategy.model_state(loop.model)
        found = {k: v.tolist() for k, v in state.items()} if loop.world.is_main else None
        self.weights = loop.world.broadcast(found)


def go_on(path, strategy):
    """Go on from a snapshot of 1 epoch; it must begin with the very weights that were saved."""
    saved = {name: tensor.tolist() for name, tensor in read_file(path)["model"].items()}
    start = Start()
    found = run(strategy, snapshot_path=path, epochs=3, callbacks=[start])
    assert start.weights == saved
    assert len(found[1]["epoch"]) == 3
    return found


@on_two_ranks
def a_snapshot_goes_on_with_any_strategy(folder):
    truth = run(epochs=3)
    for before, now in (("fsdp", "ddp"), ("ddp", "fsdp")):
        path = f"{folder}/{before}.pt"
        interrupted(7, before, snapshot_path=path, save_every=1, epochs=3)
        found = go_on(path, now)
        assert_equal(found, truth)
        assert_same_on_all_ranks(found)
    interrupted(7, snapshot_path=f"{folder}/kept.pt", save_every=1, epochs=3)


def test_a_snapshot_goes_on_with_any_number_of_ranks(ran):
    path = ran[0] / "a_snapshot_goes_on_with_any_strategy" / "kept.pt"
    content = path.read_bytes()
    first, *others = on_ranks(3, go_on, path, "fsdp")
    assert others == [first] * 2
    path.write_bytes(content)
    go_on(path, "fsdp")


@on_two_ranks
def checkpoints_and_snapshots_are_whole(folder):
    run(
        epochs=3,
        snapshot_path=f"{folder}/s.pt",
        callbacks=[ModelCheckpoint(f"{folder}/top", save_top_k=1)],
    )
    (top,) = os.listdir(f"{folder}/top")
    for file in ("s.pt", f"top/{top}"):
        content = read_file(f"{folder}/{file}")
        model = network(norm=True)
        model.load_state_dict(content["model"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        optimizer.load_state_dict(content["optimizer"])
        for parameter in model.parameters():
            momentum = optimizer.state[parameter]["momentum_buffer"]
            assert momentum.shape == parameter.shape
            assert momentum.abs().sum() > 0


@on_two_ranks
def a_second_fit_needs_a_new_optimizer_and_says_so(folder):
    model, loader = network(), DataLoader(dataset(16), batch_size=4)

    def fresh():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return AdvancedTrainer(model, optimizer, nn.MSELoss(), device="cpu", **GROUPS)

    first = fresh()
    first.fit(loader, epochs=1)
    with pytest.raises(InvalidValueError, match="holds shares of the model that an earlier"):
        first.fit(loader, epochs=1)
    assert len(fresh().fit(loader, epochs=1)) == 1


@on_two_ranks
def layers_frozen_and_unfrozen_through_the_users_model_train_as_under_ddp(folder):
    def train(strategy):
        model = network()
        model[0].requires_grad_(False)
        settings = {"epochs": 4, "early_stopping": False, "callbacks": Thaw(model)}
        ran = run(strategy, model=model, **settings)
        assert [p.requires_grad for p in model.parameters()] == [True, True, False, False]
        return ran

    assert_equal(train("fsdp"), train("ddp"))


@on_two_ranks
def state_that_is_no_tensor_is_that_of_rank_0_everywhere(folder):
    settings = {"snapshot_path": f"{folder}/s.pt", "save_every": 1}

    def train(strategy, **more):
        model = Counting(100 * dist.get_rank())
        more |= {"strategy": strategy, "epochs": 2, "schedule": False}
        ran = trainer(ranks=True, model=model, **more)
        assert ran.train() is model
        assert model.calls["train"] == 5 * ran.best_epoch
        assert ran._loop.state.step == 10

    train("ddp")
    train("fsdp")
    with pytest.raises(Interrupt):
        train("fsdp", callbacks=[At(8)], **settings)
    train("fsdp", **settings)


test_on_two_ranks = TWO_RANKS.test()


# ------------------------------------------------------------------------------ pieces


def block():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def test_groups_by_size_leave_out_what_may_not_be_called():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2)

    model = nn.Sequential(nn.ModuleList([block(), block()]), Attention(), nn.Linear(8, 2))
    assert list(pick_groups(model, 72)) == ["1", "0.1.0", "0.0.0"]
    assert list(pick_groups(model, 10**6)) == []
    assert list(pick_groups(model, [nn.MultiheadAttention, Attention])) == ["1.inner", "1"]
    with pytest.raises(InvalidValueError, match="no such module"):
        pick_groups(model, nn.Conv2d)


def test_one_rank_alone_trains_as_without():
    assert run(epochs=2) == run("ddp", epochs=2)
