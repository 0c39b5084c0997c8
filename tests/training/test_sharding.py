"""FSDP: equal to DDP, saved in shards, resumed on any number of ranks, whole in the end."""

import copy
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader

from ml4cube.errors import InvalidTypeError, InvalidValueError, StoreError
from ml4cube.training.callbacks import Callback, ModelCheckpoint
from ml4cube.training.files.checkpoint import read_file
from ml4cube.training.inputs.options import Options
from ml4cube.training.pytorch_distributed import Trainer
from ml4cube.training.ranks import snapshot_parts
from ml4cube.training.ranks.dist import World
from ml4cube.training.ranks.fsdp import Sharded, pick_groups
from ml4cube.training.ranks.snapshot_parts import read_shards, row_range
from ml4cube.training.trainer import AdvancedTrainer
from tests.distributed_runner import on_ranks
from tests.training_parts import (
    At,
    Counting,
    Interrupt,
    Thaw,
    dataset,
    losses,
    meet_now,
    network,
    trainer,
    weights,
)

pytestmark = pytest.mark.slow

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


def close(a, b):
    """Equal to float rounding."""
    return all(
        torch.allclose(torch.tensor(a[name]), torch.tensor(b[name]), rtol=1e-5, atol=1e-6)
        for name in a.keys() | b.keys()
    )


def same_numbers(a, b):
    return all(x == pytest.approx(y, rel=1e-5) for x, y in zip(a.values(), b.values(), strict=True))


# -------------------------------------------------------------- what runs on two ranks
#
# Starting ranks takes longer than what they do, so all scenes are played by the same two.


@pytest.fixture(scope="module")
def stage(tmp_path_factory):
    """What each scene gave on two ranks: ``{name: [rank 0's, rank 1's]}``."""
    folder = tmp_path_factory.mktemp("stage")
    ranks = on_ranks(2, play, str(folder), timeout=120)
    return {name: [rank[name] for rank in ranks] for name in ranks[0]} | {"folder": folder}


def play(folder):
    done = {}
    for name, scene in SCENES.items():
        place = os.path.join(folder, name)
        if dist.get_rank() == 0:
            os.mkdir(place)
        dist.barrier()
        done[name] = scene(place)
    return done


def interrupt():
    raise Interrupt


def interrupted(step, strategy="fsdp", **arguments):
    def stop():
        raise Interrupt

    callbacks = [At(step, stop), *arguments.pop("callbacks", ())]
    with pytest.raises(Interrupt):
        run(strategy, callbacks=callbacks, **arguments)


SETTINGS = {
    "plain": {},
    "accumulated and clipped": {"gradient_accumulation_steps": 3, "gradient_clip": 0.05},
    "bf16": {"precision": "bf16"},
    "fp16, scaled": {"precision": "fp16", "gradient_clip": 0.5},
    "one group": {"shard_modules": 10_000},
    "averaged, norms logged": {"ema": 0.8, "log_grad_norm": True},
    "compiled": {"compile": "eager"},
}


def equal(folder):
    results = {}
    for name, arguments in SETTINGS.items():
        plain = {k: v for k, v in arguments.items() if k != "shard_modules"}
        results[name] = (run("ddp", epochs=2, **plain), run(epochs=2, **arguments))
    return results


class RowSums(torch.optim.SGD):
    """Keeps a state that has not its parameter's shape, as Adafactor does."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.ndim == 2:
                    self.state[parameter]["rows"] = parameter.detach().sum(1)


OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "Adagrad": lambda groups: torch.optim.Adagrad(groups, lr=1e-2),  # has state from the start
    "RowSums": lambda groups: RowSums(groups, lr=1e-2),
}


def optimizers(folder):
    """Parameter groups, a frozen parameter, and states of several kinds."""

    def train(make, **settings):
        model = network(norm=True)
        model[0].bias.requires_grad_(False)
        slow, fast = list(model[0].parameters())[:1], list(model[4].parameters())
        groups = [{"params": slow, "lr": 1e-3}, {"params": fast}, {"params": model[1].parameters()}]
        data = DataLoader(dataset(32), batch_size=4)
        settings |= {"epochs": 2, "device": "cpu", "seed": 3, "loss": nn.MSELoss()}
        Trainer(model, data, data, make(groups), **settings).train()
        return weights(model)

    results = {}
    for name in ("AdamW", "Adagrad"):
        make = OPTIMIZERS[name]
        results[name] = train(make), train(make, **GROUPS)
    with pytest.raises(InvalidTypeError, match="RowSums keeps 'rows' in another shape"):
        train(OPTIMIZERS["RowSums"], snapshot_path=f"{folder}/s.pt", save_every=1, **GROUPS)
    return results


def unlike(folder):
    fsdp = run(model=network(dist.get_rank(), norm=True), epochs=1)
    return run("ddp", epochs=1)[0], fsdp[0]


def shares(folder):
    strategy = Sharded(World.current("cpu"), shard_modules=nn.Linear)
    model = network()
    cut = strategy.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    held = sum(p.to_local().numel() for p in cut.parameters())
    return held, sum(p.numel() for p in model.parameters())


def uneven(folder):
    rank, counts = dist.get_rank(), (10, 6)
    own = torch.utils.data.Subset(dataset(16), range(10 * rank, 10 + 6 * rank))
    assert len(own) == counts[rank]

    def train(strategy, window=1):
        return run(
            strategy,
            train=DataLoader(own, batch_size=2),
            epochs=2,
            gradient_accumulation_steps=window,
            val=DataLoader(dataset(3, seed=1), batch_size=2),
        )

    return train("ddp"), train("fsdp"), train("fsdp", 2)


def few_samples(folder):
    results = {}
    for samples in (1, 5):
        val = DataLoader(dataset(samples, seed=1), batch_size=2)
        results[samples] = [run(strategy, val=val, epochs=1)[1] for strategy in ("ddp", "fsdp")]
    return results


def tied(folder):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 1)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.c(self.b(self.a(x)))

    torch.manual_seed(0)
    ddp = Tied()
    fsdp = copy.deepcopy(ddp)
    run("ddp", model=ddp, epochs=2)
    run(model=fsdp, epochs=2)
    assert fsdp.a.weight is fsdp.b.weight
    return weights(ddp), weights(fsdp)


def scalar(folder):
    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.gain = nn.Linear(3, 1), nn.Parameter(torch.tensor(1.0))

    with pytest.raises(InvalidTypeError, match=r"scalar parameters \['gain'\]"):
        trainer(ranks=True, model=Scale(), **GROUPS)


def best(folder):
    model = network(norm=True)
    path = f"{folder}/best.pt"
    ran = trainer(ranks=True, model=model, epochs=4, best_model_path=path, **GROUPS)
    ran.train()
    return weights(model), ran.best_loss, ran.history["val_loss"]


def undisturbed(folder):
    return run(epochs=3)


def between(folder):
    """Stopped in epoch 2 of 3, of 5 steps each; the snapshot is of epoch 1."""
    settings = {"snapshot_path": f"{folder}/s.pt", "save_every": 1, "epochs": 3}
    interrupted(7, **settings)
    return [run(**settings), run(**settings)]  # the second finds an ended run


def averaged(folder):
    """As `between`, with a moving average of the weights, which is what comes back."""
    settings = {"epochs": 3, "ema": 0.8, "log_grad_norm": True}
    truth = run(**settings)
    settings |= {"snapshot_path": f"{folder}/s.pt", "save_every": 1}
    interrupted(7, **settings)
    return run(**settings), truth


def top_k(folder):
    """Files with the full state of the best epochs."""
    run(epochs=3, callbacks=[ModelCheckpoint(folder, save_top_k=1)])


class Called(At):
    """A signal reaches rank 1 in a step, and the ranks meet after it."""

    def __init__(self, step):
        super().__init__(step, None)

    def on_step_end(self, loop):
        if loop.state.step == self.step:
            loop._signals.save = loop.world.rank == 1
            meet_now(loop)


def inside(folder):
    settings = {"snapshot_path": f"{folder}/s.pt", "save_every": 9, "epochs": 3}
    interrupted(9, callbacks=[Called(7)], **settings)
    state = read_file(f"{folder}/s.pt")["state"]
    return [run(**settings), (state["step"], state["epoch"], state["batch"])]


def kept(folder):
    """Stopped as in `between`, and left so."""
    settings = {"snapshot_path": f"{folder}/s.pt", "save_every": 1, "epochs": 3}
    interrupted(7, **settings)


class Start(Callback):
    """Keep the whole weights as they are when a run starts or goes on."""

    def on_train_start(self, loop):
        state = loop.strategy.model_state(loop.model)
        found = {k: v.tolist() for k, v in state.items()} if loop.world.is_main else None
        self.weights = loop.world.share(found)


def go_on(folder, strategy):
    start = Start()
    settings = {"snapshot_path": f"{folder}/s.pt", "epochs": 3, "callbacks": [start]}
    model, history, _ = run(strategy, **settings)
    return model, start.weights, history


def to_ddp(folder):
    kept(folder)
    return go_on(folder, "ddp")


def from_ddp(folder):
    interrupted(7, "ddp", snapshot_path=f"{folder}/s.pt", save_every=1, epochs=3)
    return run("fsdp", snapshot_path=f"{folder}/s.pt", epochs=3)


def harmed(folder):
    """Each harm is refused, and the run goes on once it is undone."""
    kept(folder)
    shard = Path(folder) / "s.pt.000001.1-of-2"
    whole, other = shard.read_bytes(), (Path(folder) / "s.pt.000001.0-of-2").read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    said = {}
    for name, content in (("flipped", flipped), ("swapped", other), ("missing", None)):
        dist.barrier()
        if dist.get_rank() == 0:
            shard.unlink() if content is None else shard.write_bytes(content)
        dist.barrier()
        with pytest.raises(StoreError) as caught:
            run(snapshot_path=f"{folder}/s.pt", epochs=3)
        said[name] = str(caught.value)
    return said


def torn(folder):
    """The disk is full while rank 1 writes its share of epoch 2."""
    settings = {"snapshot_path": f"{folder}/s.pt", "save_every": 1, "epochs": 3}
    plain = snapshot_parts.write_file

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    def fill():
        snapshot_parts.write_file = full if dist.get_rank() == 1 else plain

    try:
        with pytest.raises(StoreError, match=r"rank 1: .*No space left"):
            run(callbacks=[At(7, fill)], **settings)
    finally:
        snapshot_parts.write_file = plain
    epoch = read_file(f"{folder}/s.pt")["state"]["epoch"]
    return epoch, run(**settings)


def again(folder):
    """What a second `fit` says, and that it fits once there is a new optimizer."""
    model, loader = network(), DataLoader(dataset(16), batch_size=4)

    def fresh():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return AdvancedTrainer(model, optimizer, nn.MSELoss(), device="cpu", **GROUPS)

    first = fresh()
    first.fit(loader, epochs=1)
    with pytest.raises(InvalidValueError) as caught:
        first.fit(loader, epochs=1)
    return str(caught.value), len(fresh().fit(loader, epochs=1))


def thawed(folder):
    """Layers frozen and unfrozen through the model that the user has."""

    def train(strategy):
        model = network()
        model[0].requires_grad_(False)
        settings = {"epochs": 4, "early_stopping": False, "callbacks": Thaw(model)}
        done = run(strategy, model=model, **settings)
        return done, [p.requires_grad for p in model.parameters()]

    return train("ddp"), train("fsdp")


def counted(folder):
    """A model with a state that is no tensor, another one on each rank."""
    settings = {"snapshot_path": f"{folder}/s.pt", "save_every": 1}

    def train(strategy, **more):
        model = Counting(100 * dist.get_rank())
        more |= {"strategy": strategy, "epochs": 2, "schedule": False}
        ran = trainer(ranks=True, model=model, **more)
        assert ran.train() is model
        return model.calls["train"] - 5 * ran.best_epoch, ran._loop.state.step

    found = [train("ddp"), train("fsdp")]
    with pytest.raises(Interrupt):
        train("fsdp", callbacks=[At(8, interrupt)], **settings)
    return [*found, train("fsdp", **settings)]


SCENES = {
    scene.__name__: scene
    for scene in (
        equal,
        optimizers,
        unlike,
        shares,
        uneven,
        few_samples,
        tied,
        scalar,
        best,
        undisturbed,
        between,
        inside,
        averaged,
        top_k,
        kept,
        to_ddp,
        from_ddp,
        harmed,
        torn,
        again,
        thawed,
        counted,
    )
}


# -------------------------------------------------------------------- equal to DDP


@pytest.mark.parametrize("name", SETTINGS)
def test_training_equals_ddp(stage, name):
    first, second = (rank[name] for rank in stage["equal"])
    assert first == second  # every rank has the whole model
    (ddp, ddp_losses, steps), (fsdp, fsdp_losses, fsdp_steps) = first
    assert fsdp_steps == steps > 0
    assert close(ddp, fsdp)
    assert same_numbers(ddp_losses, fsdp_losses)
    if name == "bf16":
        assert first[1][0] != stage["equal"][0]["plain"][1][0]


@pytest.mark.parametrize("name", ["AdamW", "Adagrad"])
def test_optimizers_with_groups_and_frozen_parameters_train_as_under_ddp(stage, name):
    ddp, fsdp = stage["optimizers"][0][name]
    assert close(ddp, fsdp)
    assert fsdp["0.bias"] == network(norm=True).state_dict()["0.bias"].tolist()


def test_ranks_that_start_from_unlike_weights_take_those_of_rank_0(stage):
    ddp, fsdp = stage["unlike"][0]
    assert close(ddp, fsdp)
    assert fsdp == stage["unlike"][1][1]


def test_each_rank_holds_its_share_only(stage):
    (first, total), (second, _) = stage["shares"]
    assert first + second == total
    assert max(first, second) <= total / 2 + 8


def test_tied_parameters_train_as_under_ddp(stage):
    ddp, fsdp = stage["tied"][0]
    assert close(ddp, fsdp)


def test_ranks_with_unequal_loaders_end_together(stage):
    (ddp, ddp_history, ddp_steps), (fsdp, history, steps), windows = stage["uneven"][0]
    assert steps == ddp_steps == 6
    assert close(fsdp, ddp)
    assert same_numbers(history, ddp_history)
    assert stage["uneven"][1][1][0] == fsdp
    # 5 batches and 3, two per step: the second step takes one of each rank.
    assert windows[2] == 4


def test_validation_is_exact_also_for_fewer_samples_than_ranks(stage):
    for truth, history in stage["few_samples"][0].values():
        assert same_numbers(history, truth)


# ------------------------------------------------------------------ best model, snapshots


def test_the_best_model_is_one_plain_file_and_on_every_rank(stage):
    first, second = stage["best"]
    assert first == second
    assert first[1] == min(first[2])
    folder = stage["folder"] / "best"
    model = network(norm=True)
    model.load_state_dict(torch.load(folder / "best.pt", weights_only=True))
    assert weights(model) == first[0]
    assert [path.name for path in folder.iterdir()] == ["best.pt"]


def test_a_resumed_run_equals_an_undisturbed_one_bit_for_bit(stage):
    truth = stage["undisturbed"]
    for rank in (0, 1):
        assert stage["between"][rank] == [truth[rank]] * 2
        again, where = stage["inside"][rank]
        assert again == truth[rank]
        assert where == (7, 1, 2)
    names = sorted(path.name for path in (stage["folder"] / "kept").iterdir())
    assert names == ["s.pt", "s.pt.000001.0-of-2", "s.pt.000001.1-of-2"]
    assert len(list((stage["folder"] / "between").iterdir())) == 3  # older shards are gone


def test_an_averaged_run_is_resumed_exactly(stage):
    for again, truth in stage["averaged"]:
        assert again == truth


def test_checkpoints_of_the_best_epochs_are_whole(stage):
    (file,) = (stage["folder"] / "top_k").iterdir()
    content = read_file(file)
    model = network(norm=True)
    model.load_state_dict(content["model"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    optimizer.load_state_dict(content["optimizer"])
    for parameter in model.parameters():
        assert optimizer.state[parameter]["momentum_buffer"].shape == parameter.shape


def test_shards_hold_the_whole_state(stage):
    path = stage["folder"] / "kept" / "s.pt"
    whole = read_shards(path, read_file(path)["shards"])
    model = network(norm=True)
    model.load_state_dict(whole["model"])
    moments = whole["optimizer"]["state"]
    for parameter, entry in zip(model.parameters(), moments.values(), strict=True):
        assert entry["momentum_buffer"].shape == parameter.shape
        assert entry["momentum_buffer"].abs().sum() > 0


def test_a_snapshot_goes_on_with_any_number_of_ranks_and_any_strategy(stage, tmp_path):
    kept = stage["folder"] / "kept"
    path = kept / "s.pt"
    saved = read_shards(path, read_file(path)["shards"])["model"]
    saved = {name: tensor.tolist() for name, tensor in saved.items()}
    for name in ("three", "one"):
        shutil.copytree(kept, tmp_path / name)
    ended = [
        on_ranks(3, go_on, str(tmp_path / "three"), "fsdp"),
        [go_on(tmp_path / "one", "fsdp")],
        stage["to_ddp"],
    ]
    for ranks in ended:
        assert all(rank == ranks[0] for rank in ranks)
        _, start, history = ranks[0]
        assert start == saved  # it went on from the very weights that were saved
        assert len(history["epoch"]) == 3
    assert len(list((tmp_path / "three").iterdir())) == 4


def test_a_ddp_snapshot_goes_on_under_fsdp(stage):
    assert close(stage["from_ddp"][0][0], stage["undisturbed"][0][0])


def test_a_bad_shard_is_refused_by_name_on_every_rank(stage):
    for said in stage["harmed"]:
        assert said.keys() == {"flipped", "swapped", "missing"}
        assert all("rank 1: " in text for text in said.values())
        assert all("s.pt.000001.1-of-2" in text for text in said.values())
        assert "do not match" in said["flipped"]
        assert "another snapshot" in said["swapped"]
        assert "does not exist" in said["missing"]


def test_a_snapshot_that_failed_on_one_rank_leaves_the_one_before(stage):
    for rank in (0, 1):
        assert stage["torn"][rank] == (1, stage["undisturbed"][rank])
    assert len(list((stage["folder"] / "torn").iterdir())) == 3  # what was left over is gone


def test_a_second_fit_needs_a_new_optimizer_and_says_so(stage):
    for said, epochs in stage["again"]:
        assert (
            "holds shares of the model that an earlier training with strategy='fsdp' left" in said
        )
        assert epochs == 1


# ------------------------------------------------------------------------------ pieces


@given(rows=st.integers(0, 40), size=st.integers(1, 9))
def test_row_ranges_are_those_of_chunk(rows, size):
    pieces = list(torch.arange(rows).chunk(size)) if rows else []
    for rank in range(size):
        start, stop = row_range(rows, rank, size)
        expected = pieces[rank].tolist() if rank < len(pieces) else []
        assert list(range(start, stop)) == expected


def block():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


def test_groups_by_size_leave_out_what_may_not_be_called():
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.MultiheadAttention(8, 2)

    model = nn.Sequential(nn.ModuleList([block(), block()]), Attention(), nn.Linear(8, 2))
    assert list(pick_groups(model, 72)) == ["0.0.0", "0.1.0", "1"]
    assert list(pick_groups(model, 10**6)) == []
    assert list(pick_groups(model, [nn.MultiheadAttention, Attention])) == ["1.inner", "1"]


def test_tied_parameters_stay_together():
    model = nn.Sequential(block(), block(), block())
    model[2][0].weight = model[0][0].weight
    assert list(pick_groups(model, nn.Linear)) == ["1.0"]
    assert list(pick_groups(model, 1)) == ["1.0"]


def test_scalar_parameters_are_refused_by_name(stage):
    assert stage["scalar"] == [None, None]  # the scene itself checks


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"strategy": "fdsp"}, InvalidValueError, "did you mean 'fsdp'"),
        ({"shard_modules": 5}, InvalidValueError, "needs strategy='fsdp'"),
        ({"strategy": "fsdp", "find_unused_parameters": True}, InvalidValueError, "contradict"),
    ],
)
def test_options_that_contradict(arguments, error, said):
    with pytest.raises(error, match=said):
        Options(**arguments)


@pytest.mark.parametrize("groups", ["Linear", 0, [nn.Linear, 3], True, int])
def test_shard_modules_must_be_a_size_or_classes(groups):
    with pytest.raises((InvalidTypeError, InvalidValueError), match="shard_modules"):
        trainer(strategy="fsdp", shard_modules=groups)


def test_a_class_that_the_model_lacks_is_an_error():
    with pytest.raises(InvalidValueError, match="no such module"):
        pick_groups(network(), nn.Conv2d)


def test_one_rank_alone_trains_as_without(tmp_path):
    alone = run(epochs=2, snapshot_path=tmp_path / "s.pt")
    assert alone == run("ddp", epochs=2)
    assert [path.name for path in tmp_path.iterdir()] == ["s.pt"]


def test_frozen_and_unfrozen_layers_train_as_with_ddp(stage):
    for ddp, fsdp in stage["thawed"]:
        assert close(fsdp[0][0], ddp[0][0])
        assert fsdp[0][1]["val_loss"] == pytest.approx(ddp[0][1]["val_loss"], rel=1e-5)
        assert fsdp[1] == ddp[1] == [True, True, False, False]


def test_state_that_is_no_tensor_is_that_of_rank_0_everywhere(stage):
    for rank in stage["counted"]:
        assert rank == [(0, 10)] * 3
