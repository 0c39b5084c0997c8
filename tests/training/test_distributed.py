"""Several ranks: exact, agreed, equal to one process, and ended with a clear error."""

import gc
import itertools
import math
import os
import signal
import subprocess
import sys
import time
import warnings

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, SubsetRandomSampler
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import Metric, R2Score
from torchmetrics.classification import BinaryAUROC

from ml4cube.datasets.pytorch import Flip, PTXrDataset, prep_dataloader
from ml4cube.errors import InvalidTypeError, InvalidValueError, RunError
from ml4cube.evaluation.metrics import RMSE
from ml4cube.training.callbacks import Callback
from ml4cube.training.distributed import DistributedTrainer, GradientAccumulator
from ml4cube.training.inputs.batches import fixed_sizes
from ml4cube.training.pytorch_distributed import Trainer, dist_train
from ml4cube.training.ranks.dist import World, ddp_init
from ml4cube.training.ranks.exact_validation import exact_loader
from ml4cube.training.ranks.unshared_data import unshared
from ml4cube.training.run import loop
from tests.distributed_runner import on_ranks
from tests.samplestores import write_store
from tests.training_parts import (
    ROOT,
    At,
    Interrupt,
    Standing,
    Thaw,
    dataset,
    losses,
    meet_now,
    network,
    trainer,
    weights,
)

pytestmark = pytest.mark.slow


def raise_interrupt():
    raise Interrupt


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """What each of two ranks found, by what was asked; `other_topology` leaves a snapshot."""
    folder = tmp_path_factory.mktemp("ranks")
    write_store(folder / "store", 37, ("a", "b"), window={}, targets=("b",))
    return folder, on_ranks(2, all_on_two_ranks, str(folder), timeout=120.0)


def all_on_two_ranks(folder):
    """All in one group: starting ranks takes longer than what they do here."""
    return {
        "samples validated": count_samples_validated(),
        "validation": validate_all(),
        "shares": train_shares([[4, 1, 4, 2], [4, 7, 4, 1]]),
        "unfrozen": unfreeze(),
        "accumulated": accumulate(),
        "unequal": unequal(),
        "unequal, resumed": unequal_resumed(folder),
        "agreement": agree(folder),
        "our loaders": with_our_loaders(folder),
        "shared out": shared_out(folder),
        "other topology": other_topology(f"{folder}/s.pt"),
        "after a failure": train_after_a_failure(),
    }


def metrics():
    return {
        "mae": nn.functional.l1_loss,
        "auroc": AboveZero(),
        "r2": R2Score(),
        "rmse": RMSE(),
    }


class AboveZero(BinaryAUROC):
    """AUROC of "the target is above zero": only its own reduction gives it over ranks."""

    def update(self, pred, target):
        super().update(pred.sigmoid(), (target > 0).int())


# ------------------------------------------------------------------ exact validation


def val_loaders(samples):
    """One data set, as users hand it to several ranks."""
    data = dataset(samples, seed=1)
    rank, size = World.current("cpu").rank, World.current("cpu").size
    own = torch.utils.data.Subset(data, range(rank, samples, size))
    return {
        "whole on each rank": DataLoader(data, batch_size=5),
        "padding sampler": DataLoader(
            data, batch_size=5, sampler=DistributedSampler(data, size, rank)
        ),
        "dropping sampler": DataLoader(
            data, batch_size=5, sampler=DistributedSampler(data, size, rank, drop_last=True)
        ),
        "made for training, whole on each rank": prep_dataloader(data, batch_size=min(5, samples)),
        "sharded by hand": DataLoader(own, batch_size=5),
        "list of batches": list(DataLoader(own, batch_size=3)),
    } | (
        {}
        if samples < size
        else {
            "made for training, shared out": prep_dataloader(
                data, batch_size=min(5, samples // size), parallel=True
            )
        }
    )


def validate_all():
    rows = {}
    for samples in (37, 2, 1):
        for kind, val in val_loaders(samples).items():
            scores = metrics() if samples == 37 else {"mae": nn.functional.l1_loss}
            run = trainer(
                ranks=True,
                model=network(norm=True),
                samples=12,
                # The same batches on every rank and learning rate 0: only validation differs.
                train=DataLoader(dataset(12), batch_size=4),
                val=val,
                metrics=scores,
                epochs=1,
                schedule=False,
            )
            run._loop.optimizer.param_groups[0]["lr"] = 0.0
            run.train()
            row = losses(run)
            rows[samples, kind] = {name: row[name][0] for name in ("val_loss", *scores)}
            ranks = run.history["ranks"][0]
            seen = sum(r["val_n"] for r in ranks)
            mean = sum(r["val_n"] * (r["val_loss"] or 0.0) for r in ranks) / seen
            assert mean == pytest.approx(row["val_loss"][0], rel=1e-12)
            assert seen == samples * (World.current("cpu").size if "each" in kind else 1)
    return rows


class Samples(Metric):
    """A plain count, which shows when states are added up more than once."""

    def __init__(self):
        super().__init__()
        self.add_state("n", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, pred, target):
        self.n += len(pred)

    def compute(self):
        return self.n.float()


def count_samples_validated():
    ranks = dist.is_initialized()
    _, val = prep_dataloader(dataset(8), dataset(5), batch_size=2, parallel=ranks)
    run = trainer(val=val, epochs=2, metrics={"n": Samples()}, ranks=ranks)
    run.train()
    return run.history["n"]


def test_states_of_torchmetrics_are_added_up_once(two_ranks):
    assert count_samples_validated() == [5.0, 5.0]
    assert [found["samples validated"] for found in two_ranks[1]] == [[5.0, 5.0]] * 2


def test_validation_is_the_same_on_1_2_and_3_ranks(two_ranks):
    """37 samples, and fewer than ranks; loss, plain metric, AUROC, R2 and our own RMSE."""
    one = validate_all()
    for rows in (*(found["validation"] for found in two_ranks[1]), *on_ranks(3, validate_all)):
        for case, row in rows.items():
            truth = one[case[0], "whole on each rank"]
            for name, value in row.items():
                assert value == pytest.approx(truth[name], rel=1e-5), (case, name)


@pytest.mark.parametrize("batched", [False, True])
def test_exact_loader_gives_every_sample_once(batched):
    class Mine(DistributedSampler):
        """Of a user, who changed something else."""

    data = dataset(11)
    seen = []
    for rank in range(4):
        sampler = Mine(data, 4, rank)
        padded = (
            DataLoader(data, batch_sampler=BatchSampler(sampler, 2, True))
            if batched
            else DataLoader(data, batch_size=2, sampler=sampler)
        )
        exact = exact_loader(padded, World(rank, 4, torch.device("cpu")))
        seen += [row.tolist() for x, _ in exact for row in x]
    assert sorted(seen) == sorted(data.tensors[0].tolist())


# ----------------------------------------------------------- training over ranks


def train_shares(sizes):
    """Train one epoch on batches cut from one data set: `sizes[rank]` samples each step."""
    rank = World.current("cpu").rank
    data, batches, start = dataset(64), [], 0
    for step in zip(*sizes, strict=True):
        own = slice(start + sum(step[:rank]), start + sum(step[: rank + 1]))
        batches.append((data.tensors[0][own], data.tensors[1][own]))
        start += sum(step)
    run = trainer(
        ranks=True,
        model=nn.Linear(3, 1),
        train=batches,
        epochs=1,
        schedule=False,
    )
    with torch.no_grad():
        for parameter in run.model.parameters():
            parameter.fill_(0.5)
    model = run.train()
    return weights(model), run.history["train_loss"]


def test_ranks_train_as_one_process_on_their_joint_batches(two_ranks):
    one = train_shares([[8, 8, 8, 3]])
    for model, loss in (found["shares"] for found in two_ranks[1]):
        assert loss == pytest.approx(one[1], rel=1e-5)
        assert model["weight"][0] == pytest.approx(one[0]["weight"][0], rel=1e-5)


def unfreeze():
    """The first layer from epoch 2 on, the last not in epoch 3, nor from step 2 of epoch 4 on."""
    rank, size = World.current("cpu").rank, World.current("cpu").size
    eights, each, found = list(DataLoader(dataset(32), batch_size=8)), 8 // size, []
    mine = [(x[rank * each :][:each], y[rank * each :][:each]) for x, y in eights]
    for only_main in (False, True):
        model = network()
        model[2].p = 0.0
        model[0].requires_grad_(False)
        run = Trainer(
            model,
            mine,
            eights,
            torch.optim.AdamW(model.parameters(), lr=0.01),
            loss=nn.MSELoss(),
            epochs=4,
            early_stopping=False,
            device="cpu",
            callbacks=Thaw(model, only_main),
        )
        run.train()
        again = run._loop.evaluate()["val_loss"]
        found.append((weights(model), run.history["val_loss"], run.best_loss, again))
    return found


def test_layers_frozen_and_unfrozen_in_a_run_train_as_in_one_process(two_ranks):
    one = unfreeze()
    assert one[0][1] != one[1][1]  # the last epoch differs
    first, second = (rank["unfrozen"] for rank in two_ranks[1])
    assert first == second
    for (model, curve, best, again), (wanted, wanted_curve, _, _) in zip(first, one, strict=True):
        assert curve == pytest.approx(wanted_curve, rel=1e-5)
        assert best == pytest.approx(again, rel=1e-6)
        for name, values in wanted.items():
            torch.testing.assert_close(torch.tensor(model[name]), torch.tensor(values))


SIZES = [[4, 4, 4, 4, 4], [2, 1, 3]]  # batches of two ranks, in windows of two


def accumulate():
    """A loop of one's own, on batches of unequal sizes and in unequal numbers."""
    rank, passed = dist.get_rank(), []
    x, y = dataset(64).tensors
    x, y = x[32 * rank :], y[32 * rank :]
    model = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1, eps=0.0, affine=False).eval())
    with torch.no_grad():
        model[0].weight.fill_(0.5)
        model[0].bias.zero_()
    spread = DistributedTrainer(model, device="cpu").model
    spread.register_comm_hook(passed, lambda state, bucket: state.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    accumulator = GradientAccumulator(spread, optimizer, 2, max_grad_norm=1.0)
    for start, size in zip(itertools.accumulate([0, *SIZES[rank]]), SIZES[rank], strict=False):
        own = slice(start, start + size)
        model[1].running_mean.fill_(float(rank))  # as of other data; kept away from the loss
        shift = model[1].running_mean * 1.0
        accumulator.step(nn.functional.mse_loss(spread(x[own]) + shift, y[own]), size)
    assert accumulator.flush()
    assert not accumulator.flush()
    alone = spread.require_backward_grad_sync
    del accumulator
    gc.collect()
    return weights(model), passed, alone, spread.require_backward_grad_sync


def accumulated_by_hand():
    x, y = dataset(64).tensors
    model = nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(0.5)
        model.bias.zero_()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for first, second in (((0, 8), (0, 3)), ((8, 16), (3, 6)), ((16, 20), (0, 0))):
        rows = [*range(*first), *(32 + row for row in range(*second))]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return weights(model)


def test_an_accumulator_steps_over_the_samples_of_all_ranks(two_ranks):
    (model, *rest), (other, *same) = (rank["accumulated"] for rank in two_ranks[1])
    assert model == other
    assert rest == same == [[], False, True]
    for name, values in accumulated_by_hand().items():
        torch.testing.assert_close(torch.tensor(model[f"0.{name}"]), torch.tensor(values))


def unequal():
    """Lists and loaders of unequal lengths, also with accumulation, and an empty rank."""
    rank = dist.get_rank()
    results = []
    for own in ((5, 3)[rank], (2, 4)[rank]):
        batches = [(torch.ones(4, 3), torch.ones(4, 1))] * own
        run = trainer(ranks=True, train=batches, epochs=2)
        run.train()
        results.append([r["train_n"] for r in run.history["ranks"][-1]])
    loader = DataLoader(dataset((20, 12)[rank]), batch_size=4)
    run = trainer(ranks=True, train=loader, epochs=2, gradient_accumulation_steps=2)
    run.train()
    results.append([r["train_n"] for r in run.history["ranks"][-1]])
    with pytest.raises(InvalidValueError, match="train_data gave no batch"):
        trainer(ranks=True, train=[] if rank else [(torch.ones(4, 3), torch.ones(4, 1))]).train()
    return results


def test_unequal_loaders_end_together(two_ranks):
    for found in two_ranks[1]:
        assert found["unequal"] == [[12, 12], [8, 8], [16, 12]]


class Noisy(Dataset):
    """Draws from torch's generator for every sample."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, item):
        x = torch.randn(3)
        return x, x.sum(0, keepdim=True) + item / 10


def unequal_resumed(folder):
    """The rank with more batches drew one that no step took, before the snapshots."""
    epochs = []
    for kind in ("plain", "standing"):

        def fresh(kind=kind, **more):
            train = DataLoader(Noisy((24, 12)[dist.get_rank()]), batch_size=4)
            if kind == "standing":
                torch.manual_seed(0)
                train = Standing(list(train))
            return trainer(ranks=True, train=train, **more)

        class Save(Callback):
            def on_step_end(self, loop):
                loop._signals.save |= loop.state.step == 3

            def on_epoch_start(self, loop):
                loop._signals.save |= loop.feed.position is not None

        whole = fresh()
        model = weights(whole.train())
        path = f"{folder}/{kind}.pt"
        for _ in range(2):
            with pytest.raises(Interrupt):
                fresh(snapshot_path=path, callbacks=[Save(), At(4, raise_interrupt)]).train()
        ranks = torch.load(path, weights_only=True)["ranks"]
        assert [rank["state"]["batch"] for rank in ranks] == [4, 3]
        resumed = fresh(snapshot_path=path)
        assert weights(resumed.train()) == model
        assert losses(resumed) == losses(whole)
        for row in resumed.history["ranks"]:
            assert [rank["train_n"] for rank in row] == [12, 12]
        epochs.append(len(resumed.history))
    return epochs


def test_unequal_loaders_go_on_from_a_snapshot_as_undisturbed(two_ranks):
    assert [found["unequal, resumed"] for found in two_ranks[1]] == [[3, 3]] * 2


def test_sizes_are_promised_only_where_they_hold():
    data = dataset(10)
    assert fixed_sizes(DataLoader(data, batch_size=4)) == (3, 4, 2)
    assert fixed_sizes(DataLoader(data, batch_size=4, drop_last=True)) == (2, 4, 4)
    assert fixed_sizes(DataLoader(data, batch_size=5)) == (2, 5, 5)
    assert fixed_sizes(DataLoader(data, batch_size=4, collate_fn=list)) is None
    assert fixed_sizes([1, 2]) is None


@pytest.mark.parametrize("ours", [False, True])
def test_what_may_leave_out_samples_promises_no_sizes(ours, tmp_path):
    write_store(tmp_path / "store", 10, ("a", "b"), targets=("b",))
    data = PTXrDataset(tmp_path / "store", to_pred="b") if ours else dataset(10)

    def sizes(**more):
        return fixed_sizes(prep_dataloader(data, batch_size=4, **more))

    def fewer(batch, generator):
        return [tensor[:2] for tensor in batch]

    def noise(batch, generator):
        return [tensor + 0.1 for tensor in batch]

    noise.keeps_samples = True
    assert sizes() == (2, 4, 4)
    assert sizes(augment=fewer) is None
    assert sizes(augment=noise) == (2, 4, 4)
    assert sizes(augment=[noise, fewer]) is None
    assert sizes(callback=list) is None
    if ours:
        assert sizes(augment=Flip("lon")) == (2, 4, 4)
        assert sizes(augment=[Flip("lon"), fewer]) is None


class EveryStep(Callback):
    """Let ranks look for signals after every step, so that the test says where."""

    def on_step_end(self, loop):
        meet_now(loop)


def agree(folder):
    """Early stop, best model and its file, and resuming, on ranks with different data."""
    best, snapshot = f"{folder}/best.pt", f"{folder}/snapshot.pt"
    torch.manual_seed(dist.get_rank())  # ranks start from different weights
    arguments = {"ranks": True, "model": None, "epochs": 4}

    def fresh(**more):
        return trainer(**arguments | {"model": network(norm=True)} | more)

    whole = fresh(best_model_path=best)
    model = whole.train()
    saved = torch.load(best, weights_only=True)
    assert weights(model) == {name: tensor.tolist() for name, tensor in saved.items()}
    assert not any(name.startswith("module.") for name in saved)
    for at in (20, 13):
        stop = [At(at, raise_interrupt)]
        if at == 13:
            # Only one rank is told; all save at the same step.
            told = At(12, lambda: dist.get_rank() or os.kill(os.getpid(), signal.SIGUSR1))
            stop = [told, *stop, EveryStep()]
        with pytest.raises(Interrupt):
            fresh(snapshot_path=f"{snapshot}{at}", save_every=1, callbacks=stop).train()
        step = torch.load(f"{snapshot}{at}", weights_only=True)["state"]["step"]
        assert step == (15 if at == 20 else 12), step
        resumed = fresh(snapshot_path=f"{snapshot}{at}", save_every=1)
        assert weights(resumed.train()) == weights(model)
        assert losses(resumed) == losses(whole)
    return weights(model), losses(whole)


def test_best_model_file_and_resume_agree_on_all_ranks(two_ranks):
    first, second = (found["agreement"] for found in two_ranks[1])
    assert first == second


def with_our_loaders(folder):
    """Loaders of `prep_dataloader` over a store and over tensors: nothing is asked per step."""
    results = []
    for kind in ("store", "tensors"):

        def fresh(kind=kind, **more):
            data = dataset(37)
            if kind == "store":
                data = PTXrDataset(f"{folder}/store", to_pred="b")
            train, val = prep_dataloader(data, data, batch_size=4, parallel=True, seed=2)
            scores = {"rmse": RMSE()}
            torch.manual_seed(0)
            model = network() if kind == "tensors" else nn.Linear(1, 1)
            return trainer(
                ranks=True,
                model=model,
                train=train,
                val=val,
                metrics=scores,
                loss=nn.L1Loss(),
                **more,
            )

        whole = fresh()
        model = weights(whole.train())
        assert whole._loop.feed.even
        assert sum(r["val_n"] for r in whole.history["ranks"][0]) == 37
        # inside an epoch, and after its last batch, when the loader stands in the next one
        for step, callbacks in ((6, [EveryStep()]), (8, [])):
            path = f"{folder}/{kind}-{step}.pt"
            told = At(step, lambda: os.kill(os.getpid(), signal.SIGUSR1))
            stops = [told, At(step + 1, raise_interrupt), *callbacks]
            with pytest.raises(Interrupt):
                fresh(snapshot_path=path, callbacks=stops).train()
            assert torch.load(path, weights_only=True)["state"]["step"] == step
            resumed = fresh(snapshot_path=path)
            assert weights(resumed.train()) == model
            assert losses(resumed) == losses(whole)
        results.append(losses(whole)["val_loss"])
    return results


def test_our_loaders_train_validate_and_resume_on_ranks(two_ranks):
    one, two = (found["our loaders"] for found in two_ranks[1])
    assert one == two


class Stream(IterableDataset):
    """Items from one source that can be read only once, as from a file or a queue."""

    def __init__(self, data):
        self.items = iter([data[i] for i in range(len(data))])

    def __iter__(self):
        yield from self.items


def shared_out(folder):
    """By what kind of loader: the weights, what each rank trained on, and what was warned of."""
    found = {}
    data, rank = dataset(37), dist.get_rank()
    own = torch.utils.data.Subset(data, range(rank, 37, 2))
    ours = prep_dataloader(data, batch_size=4, seed=2)
    for name, train, val in (
        ("ours", ours, None),
        ("ours, told", prep_dataloader(data, batch_size=4, seed=2, parallel=True), None),
        ("ours, of its own", prep_dataloader(own, batch_size=4, seed=2), None),
        ("ours, validated too", (again := prep_dataloader(data, batch_size=4)), again),
        ("plain", DataLoader(data, batch_size=4, shuffle=True), None),
        ("plain, of its own", DataLoader(own, batch_size=4, shuffle=True), None),
        ("sampler", DataLoader(data, batch_size=4, sampler=DistributedSampler(data)), None),
        ("list", [tuple(data[:4])], None),
        ("stream", DataLoader(Stream(data), batch_size=4), None),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = trainer(ranks=True, train=train, val=val, epochs=1)
            model = weights(run.train())
        told = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
        found[name] = model, [r["train_n"] for r in run.history["ranks"][0]], told
    own_val = torch.ones(2, 1), torch.ones(2, 1)
    store = prep_dataloader(PTXrDataset(f"{folder}/store", to_pred="b"), batch_size=4)
    run = trainer(ranks=True, model=nn.Linear(1, 1), train=store, val=[own_val], epochs=1)
    run.train()
    found["parallel"] = ours.parallel, store.parallel
    return found


def test_loaders_that_are_not_shared_out_are_shared_or_warned_of(two_ranks):
    for rank, found in enumerate(found["shared out"] for found in two_ranks[1]):
        model, counts, told = found["ours"]
        assert (model, counts, []) == found["ours, told"]
        assert found["parallel"] == (True, True)
        assert counts == [16, 16]  # whole batches of 4, of 37 samples, one for each rank
        # its length has changed, and with it how long a scheduler must be
        said = ["9 batches are now shared out over 2 ranks, 4 each" in message for message in told]
        assert said == [True] * (rank == 0)
        assert found["ours, validated too"][1] == [16, 16]
        for kind, counts in (("ours", [16, 16]), ("plain", [19, 18])):
            assert found[f"{kind}, of its own"][1:] == (counts, [])
        assert found["sampler"][1:] == ([19, 19], [])
        assert found["stream"][1:] == ([37, 37], [])  # not a sample of it was lost
        for kind, count, text in (
            ("plain", 37, "train_data (DataLoader of TensorDataset, 37 samples)"),
            ("list", 4, "train_data (list, 1 batches)"),
        ):
            _, counts, told = found[kind]
            assert counts == [count, count]
            assert [text in message for message in told] == [True] * (rank == 0)


class Drawn(Dataset):
    """Adds noise to every item, from a generator that no seed reaches."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.full((2,), float(index)) + torch.rand(2, generator=GENERATOR)


GENERATOR = torch.Generator()


def test_what_a_rank_takes_is_told_apart_by_its_content():
    """Without ranks: the same is equal, other data, choices and sizes are not, shared is None."""
    x = torch.arange(12.0).reshape(6, 2)

    def of(data, **more):
        return unshared(DataLoader(data, batch_size=2, **more))

    assert of(x) == of(x.clone()) == of(x, shuffle=True)
    assert of(Drawn()) == of(Drawn())
    for other in (x[:5], x + 1, x.double()):
        assert of(x) != of(other)
    chosen = [of(x, sampler=SubsetRandomSampler(c)) for c in ([0, 1, 2], [3, 4, 5], [0, 1, 2])]
    assert chosen[0] == chosen[2] != chosen[1]
    assert unshared([(x, x)]) == unshared([(x.clone(), x)]) != unshared([(x, x + 1)])
    shared = DistributedSampler(x, 2, 0)
    assert of(x, sampler=shared) is None
    assert unshared(DataLoader(x, batch_sampler=BatchSampler(shared, 2, False))) is None
    assert unshared(prep_dataloader(x, parallel=True)) is None
    assert unshared(prep_dataloader(x)) is not None
    once = Stream(x)
    assert of(once) is None
    assert torch.equal(next(iter(once)), x[0])  # it was not read


def other_topology(path):
    run = trainer(ranks=True, snapshot_path=path, epochs=3)
    run.train()
    return len(run.history)


def test_snapshot_of_two_ranks_resumes_on_one(two_ranks):
    folder, ranks = two_ranks
    assert [found["other topology"] for found in ranks] == [3, 3]
    run = trainer(snapshot_path=folder / "s.pt", epochs=5)
    run.train()
    assert len(run.history) == 5


# --------------------------------------------------------------- when a rank fails


def fail(how):
    rank = dist.get_rank()
    if how == "raise in validation":

        class Bad(list):
            def __iter__(self):
                yield from super().__iter__()
                if rank == 1:
                    raise OSError("chunk 7 cannot be read")

        trainer(ranks=True, val=Bad([(torch.ones(4, 3), torch.ones(4, 1))])).train()
    if how == "kill":
        stop = At(2, lambda: rank == 1 and os.kill(os.getpid(), signal.SIGKILL))
        trainer(ranks=True, callbacks=[stop]).train()
    if how == "freeze":
        trainer(ranks=True, callbacks=[At(2, lambda: rank == 1 and time.sleep(120))]).train()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise in validation", "rank 1 of 2 failed: OSError: chunk 7 cannot be read"),
        ("kill", "died|terminated|lost"),
        ("freeze", "lost the other ranks|froze"),
    ],
)
def test_failing_rank_ends_all_soon_with_a_clear_error(how, message):
    before, started = set(_children()), time.monotonic()
    with pytest.raises(RunError, match=message):
        dist_train(fail, 2, how, timeout=5 if how == "freeze" else 60)
    assert time.monotonic() - started < 40
    assert not [p for p in _children() if p not in before and "loky" in _line(p)]


class Passes(list):
    """Validation batches that count how often they are asked for, and see when that has no end."""

    passes = 0

    def __iter__(self):
        self.passes += 1
        assert self.passes < 9, "validates for ever"
        return super().__iter__()


def train_after_a_failure():
    gaps = torch.full((4, 3), torch.nan if dist.get_rank() == 1 else 1.0)
    val = Passes([(torch.ones(4, 3), torch.ones(4, 1))] * 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "PERIOD_S", 0.0)  # every batch of a validation is a moment to look
        with pytest.raises(RunError, match="training loss is nan on rank 1, epoch 1, step 1"):
            trainer(ranks=True, train=[(gaps, torch.ones(4, 1))] * 3).train()
        trainer(ranks=True, val=val, epochs=2).train()
    return val.passes


def test_a_run_that_failed_on_all_ranks_is_over_for_the_next(two_ranks):
    assert [found["after a failure"] for found in two_ranks[1]] == [2, 2]


def _children():
    return psutil.Process().children(recursive=True)


def _line(process):
    try:
        line = " ".join(process.cmdline())
    except psutil.Error:
        return ""
    return "" if "resource_tracker" in line else line


def test_dist_train_spawns_what_stands_in_an_unguarded_script(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist\n"
        "from ml4cube.training.pytorch_distributed import dist_train\n"
        "print('once')\n"
        "add = lambda a, b=0: a + b + dist.get_world_size() * 100\n"
        "print(dist_train(add, 2, 1, b=2))\n"
    )
    done = subprocess.run(
        [sys.executable, script],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "once\n203\n", done.stderr


def test_dist_train_refuses_what_does_not_fit():
    with pytest.raises(InvalidTypeError, match="needs nproc"):
        dist_train(print)
    with pytest.raises(InvalidTypeError, match="must be a Trainer or a function"):
        dist_train(3, 2)
    with pytest.raises(InvalidTypeError, match="takes no other arguments"):
        dist_train(trainer(), 2)
    with pytest.raises(InvalidValueError, match="nproc must be a positive integer, got 0"):
        dist_train(print, 0)
    with pytest.raises(InvalidValueError, match="did you mean 'gloo'"):
        ddp_init(backend="glo")
    with pytest.raises(InvalidValueError, match=r"timeout must be .* got -1"):
        ddp_init(timeout=-1)
    for timeout in ("x", None, math.nan, math.inf, True):
        with pytest.raises(InvalidValueError, match="timeout must be a positive number"):
            ddp_init(timeout=timeout)


def test_group_of_the_caller_is_left_alone(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert ddp_init().size == ddp_init().size == 1
        model = network()
        loader = DataLoader(dataset(8), batch_size=4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        dist_train(Trainer(model, loader, loader, optimizer, loss=nn.MSELoss(), epochs=1))
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
    assert ddp_init().size == 1
    assert not dist.is_initialized()
