"""Several ranks: exact, agreed, equal to one process, and ended with a clear error."""

import gc
import itertools
import math
import os
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler
from torchmetrics import MeanSquaredError, Metric, MetricCollection, R2Score
from torchmetrics.classification import BinaryAUROC
from torchmetrics.wrappers import MinMaxMetric

from ml4cube.datasets.pytorch import Flip, PTXrDataset, prep_dataloader
from ml4cube.errors import InvalidTypeError, InvalidValueError, RunError, StoreError
from ml4cube.evaluation.metrics import RMSE
from ml4cube.training.addons import MultiGPUAddon
from ml4cube.training.distributed import DistributedTrainer, GradientAccumulator
from ml4cube.training.inputs.batches import fixed_sizes
from ml4cube.training.pytorch_distributed import dist_train
from ml4cube.training.ranks import dist as ranks_dist
from ml4cube.training.ranks import messages, world
from ml4cube.training.ranks.dist import World, ddp_init, pick_device
from ml4cube.training.ranks.shared_data import exact_loader, find_unshared
from ml4cube.training.trainer import Trainer as AddonTrainer
from tests.distributed_runner import TwoRanks, assert_same_on_all_ranks, on_ranks
from tests.samplestores import write_store
from tests.training_parts import (
    ROOT,
    At,
    Interrupt,
    Save,
    Standing,
    Thaw,
    assert_end_alike,
    dataset,
    hooks,
    losses,
    meet_now,
    network,
    resumed_alike,
    squared_error,
    trained,
    trainer,
    weights,
)

pytestmark = pytest.mark.slow

# ---------------------------------------------------------- what runs on two ranks

TWO_RANKS = TwoRanks()
on_two_ranks, ran = TWO_RANKS.add, TWO_RANKS.fixture()


def tell_usr1():
    os.kill(os.getpid(), signal.SIGUSR1)


EVERY_STEP = hooks(on_step_end=meet_now)  # ranks look for signals after it: the test says where


def assert_close(model, truth):
    """Equal weights, to float rounding."""
    assert model.keys() == truth.keys()
    for name, values in truth.items():
        torch.testing.assert_close(torch.tensor(model[name]), torch.tensor(values))


def trained_on(run, epoch=0):
    return [row["train_n"] for row in run.history["ranks"][epoch]]


# ------------------------------------------------------------------ exact validation


class AboveZero(BinaryAUROC):
    """AUROC of "the target is above zero": only its own reduction gives it over ranks."""

    def update(self, pred, target):
        super().update(pred.sigmoid(), (target > 0).int())


class Pair(RMSE):
    """Two numbers at once."""

    def compute(self):
        return torch.tensor([super().compute(), 1.0])


def val_loaders(samples):
    """One data set, as users hand it to several ranks."""
    data = dataset(samples, seed=1)
    rank, size = dist.get_rank(), dist.get_world_size()
    own, few = Subset(data, range(rank, samples, size)), min(5, samples)
    loaders = {
        "whole on each rank": DataLoader(data, batch_size=5),
        "made for training, whole on each rank": prep_dataloader(data, batch_size=few),
        "sharded by hand": DataLoader(own, batch_size=5),
        "list of batches": list(DataLoader(own, batch_size=3)),
    }
    for drop in (False, True):
        sampler = DistributedSampler(data, size, rank, drop_last=drop)
        loaders[f"sampler, {drop}"] = DataLoader(data, batch_size=5, sampler=sampler)
    if samples >= size:
        few = min(5, samples // size)
        loaders["ours, shared out"] = prep_dataloader(data, batch_size=few, parallel=True)
    return loaders


@on_two_ranks
def validation_is_exact(folder=None):
    """37 samples, and fewer than ranks; loss, plain metric, AUROC, R2 and our own RMSE."""
    for samples in (37, 2, 1):
        scores = {"mae": nn.functional.l1_loss}
        if samples == 37:
            scores |= {"auroc": AboveZero(), "r2": R2Score(), "rmse": RMSE(), "pair": Pair()}
            # Metrics of torchmetrics that are made of others.
            made_of = {"range": MinMaxMetric(MeanSquaredError()), "r2": R2Score()}
            scores |= {"twice": R2Score() * 2, "made_of": MetricCollection(made_of)}

        def validate(val, scores=scores, ranks=True):
            return trained(
                ranks=ranks,
                model=network(norm=True),
                # The same batches on every rank and learning rate 0: only validation differs.
                train=DataLoader(dataset(12), batch_size=4),
                val=val,
                metrics=scores,
                epochs=1,
                lr=0.0,
            )

        truth = validate(DataLoader(dataset(samples, seed=1), batch_size=5), ranks=False)
        named = {"pair_0", "pair_1", "made_of_raw", "made_of_r2"}
        for kind, val in val_loaders(samples).items():
            run = validate(val)
            for name in {"val_loss", *scores, *named} & truth.history.to_dict().keys():
                wanted = pytest.approx(truth.history[name], rel=1e-5)
                assert run.history[name] == wanted, (samples, kind, name)
            (rows,) = run.history["ranks"]
            seen = sum(row["val_n"] for row in rows)
            assert seen == samples * (len(rows) if "each" in kind else 1)
            mean = sum(row["val_n"] * (row["val_loss"] or 0.0) for row in rows) / seen
            assert mean == pytest.approx(run.history["val_loss"][0], rel=1e-12)


def test_validation_is_exact_on_three_ranks():
    on_ranks(3, validation_is_exact)


class Samples(Metric):
    """A plain count, which shows when states are added up more than once."""

    def __init__(self):
        super().__init__()
        self.add_state("n", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, pred, target):
        self.n += len(pred)

    def compute(self):
        return self.n.float()


@on_two_ranks
def states_of_torchmetrics_are_added_up_once(folder=None):
    ranks = dist.is_initialized()
    _, val = prep_dataloader(dataset(8), dataset(5), batch_size=2, parallel=ranks)
    run = trained(val=val, epochs=2, metrics={"n": Samples()}, ranks=ranks)
    assert run.history["n"] == [5.0, 5.0]


def test_states_of_torchmetrics_are_those_of_one_process():
    states_of_torchmetrics_are_added_up_once()


@on_two_ranks
def a_trainer_of_one_device_measures_its_own_data(folder=None):
    val = DataLoader(dataset(17, seed=dist.get_rank()), batch_size=5)
    run = trained(val=val, epochs=1, metrics={"mse": MeanSquaredError()})
    assert run.history["mse"] == pytest.approx(run.history["val_loss"])


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


def test_exact_loader_keeps_what_a_subclass_does_to_batches():
    class Doubled(DataLoader):
        def __iter__(self):
            return (2 * x for x, _ in super().__iter__())

    data = dataset(4)
    exact = exact_loader(
        Doubled(data, sampler=DistributedSampler(data, 2, 1)), World(1, 2, torch.device("cpu"))
    )
    assert torch.equal(torch.cat(list(exact)), 2 * data.tensors[0][1::2])


def test_exact_loader_keeps_all_settings():
    """Also those that only the installed torch has."""
    data = dataset(11)
    given = {"batch_size": 3, "collate_fn": list, "generator": torch.Generator()}
    given |= {"in_order": False} if hasattr(DataLoader(data), "in_order") else {}
    loader = DataLoader(data, sampler=DistributedSampler(data, 2, 0), **given)
    exact = exact_loader(loader, World(0, 2, torch.device("cpu")))
    assert {name: getattr(exact, name) for name in given} == given


# ----------------------------------------------------------- training over ranks


@on_two_ranks
def ranks_train_as_one_process_on_their_joint_batches(folder):
    """Batches cut from one data set, of unequal sizes; also two to an optimizer step."""
    sizes = [[4, 1, 4, 2], [4, 7, 4, 1]]

    def train(sizes, rank, **more):
        data, batches, start = dataset(64), [], 0
        for step in zip(*sizes, strict=True):
            own = slice(start + sum(step[:rank]), start + sum(step[: rank + 1]))
            batches.append((data.tensors[0][own], data.tensors[1][own]))
            start += sum(step)
        model = nn.Linear(3, 1)
        nn.init.constant_(model.weight, 0.5)
        nn.init.constant_(model.bias, 0.5)
        run = trainer(model=model, train=batches, epochs=1, schedule=False, **more)
        return weights(run.train()), run.history["train_loss"]

    for joint, window in ([8, 8, 8, 3], 1), ([16, 11], 2):
        wanted, loss = train([joint], 0)
        more = {"ranks": True, "gradient_accumulation_steps": window}
        model, own_loss = train(sizes, dist.get_rank(), **more)
        assert_close(model, wanted)
        if window == 1:
            assert own_loss == pytest.approx(loss, rel=1e-5)


@on_two_ranks
def layers_frozen_and_unfrozen_in_a_run_train_as_in_one_process(folder):
    """The first layer from epoch 2 on, the last not in epoch 3, nor from step 2 of epoch 4 on."""
    rank, eights = dist.get_rank(), list(DataLoader(dataset(32), batch_size=8))
    fours = [(x[rank * 4 :][:4], y[rank * 4 :][:4]) for x, y in eights]

    def train(batches, only_main, **more):
        model = network()
        model[2].p = 0.0
        model[0].requires_grad_(False)
        more |= {"epochs": 4, "early_stopping": False, "callbacks": Thaw(model, only_main)}
        run = trainer(model=model, train=batches, val=eights, schedule=False, **more)
        return run, weights(run.train())

    curves = []
    for only_main in (False, True):
        one, wanted = train(eights, only_main)
        run, model = train(fours, only_main, ranks=True)
        assert_close(model, wanted)
        assert_same_on_all_ranks(model)
        assert run.history["val_loss"] == pytest.approx(one.history["val_loss"], rel=1e-5)
        assert run.best_loss == pytest.approx(run._loop.evaluate()["val_loss"], rel=1e-6)
        curves.append(run.history["val_loss"])
    assert curves[0] != curves[1]  # the last epoch differs


SIZES = [[4, 4, 4, 4, 4], [2, 1, 3]]  # batches of two ranks, in windows of two


@on_two_ranks
def an_accumulator_steps_over_the_samples_of_all_ranks(folder):
    """A loop of one's own, on batches of unequal sizes and in unequal numbers."""
    rank, passed = dist.get_rank(), []
    x, y = dataset(64).tensors
    x, y = x[32 * rank :], y[32 * rank :]
    model = nn.Sequential(nn.Linear(3, 1), nn.BatchNorm1d(1, eps=1e-30, affine=False).eval())
    nn.init.constant_(model[0].weight, 0.5)
    nn.init.zeros_(model[0].bias)
    spread = DistributedTrainer(model, device="cpu").model
    spread.register_comm_hook(passed, lambda state, bucket: state.append(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    compiled = torch.compile(spread, backend="eager")
    accumulator = GradientAccumulator(compiled, optimizer, 2, max_grad_norm=1.0)
    for start, size in zip(itertools.accumulate([0, *SIZES[rank]]), SIZES[rank], strict=False):
        own = slice(start, start + size)
        model[1].running_mean.fill_(float(rank))  # as of other data; kept away from the loss
        shift = model[1].running_mean * 1.0
        accumulator.step(nn.functional.mse_loss(spread(x[own]) + shift, y[own]), size)
    assert accumulator.flush()
    assert not accumulator.flush()
    assert passed == []
    assert not spread.require_backward_grad_sync
    del accumulator
    gc.collect()
    assert spread.require_backward_grad_sync
    assert_close(weights(model[0]), accumulated_by_hand())


def accumulated_by_hand():
    x, y = dataset(64).tensors
    model = nn.Linear(3, 1)
    nn.init.constant_(model.weight, 0.5)
    nn.init.zeros_(model.bias)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for first, second in (((0, 8), (0, 3)), ((8, 16), (3, 6)), ((16, 20), (0, 0))):
        rows = [*range(*first), *(32 + row for row in range(*second))]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x[rows]), y[rows]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return weights(model)


@on_two_ranks
def unequal_loaders_end_together(folder):
    """Lists and loaders of unequal lengths, also with accumulation, and an empty rank."""
    rank, four = dist.get_rank(), (torch.ones(4, 3), torch.ones(4, 1))
    for lengths, window, wanted in (
        ((5, 3), 1, [12, 12]),
        ((2, 4), 1, [8, 8]),
        ((5, 3), 2, [16, 12]),
    ):
        for train in ([four] * lengths[rank], DataLoader(dataset(4 * lengths[rank]), batch_size=4)):
            run = trained(ranks=True, train=train, epochs=2, gradient_accumulation_steps=window)
            assert trained_on(run) == trained_on(run, 1) == wanted
    with pytest.raises(InvalidValueError, match="train_data gave no batch"):
        trainer(ranks=True, train=[] if rank else [four]).train()


class Noisy(Dataset):
    """Draws from torch's generator for every sample."""

    def __init__(self, samples):
        self.samples = samples

    def __len__(self):
        return self.samples

    def __getitem__(self, item):
        x = torch.randn(3)
        return x, x.sum(0, keepdim=True) + item / 10


@on_two_ranks
def unequal_loaders_go_on_from_a_snapshot_as_undisturbed(folder):
    """The rank with more batches drew one that no step took, before the snapshots."""
    for kind in ("plain", "standing"):

        def fresh(kind=kind, **more):
            train = DataLoader(Noisy((24, 12)[dist.get_rank()]), batch_size=4)
            if kind == "standing":
                torch.manual_seed(0)
                train = Standing(list(train))
            return trainer(ranks=True, train=train, **more)

        def save_again(loop):
            loop.requests.signals.must_save |= loop.feed.position is not None

        path = f"{folder}/{kind}.pt"
        saves = [Save(3, meet=False), hooks(on_epoch_start=save_again)]
        for _ in range(2):
            with pytest.raises(Interrupt):
                fresh(snapshot_path=path, callbacks=[*saves, At(4)]).train()
        ranks = torch.load(path, weights_only=True)["ranks"]
        assert [rank["state"]["batch"] for rank in ranks] == [4, 3]
        resumed = fresh(snapshot_path=path)
        assert_end_alike(resumed, fresh())
        assert [trained_on(resumed, epoch) for epoch in range(3)] == [[12, 12]] * 3


def test_sizes_are_promised_only_where_they_hold(tmp_path):
    """Else ranks compare them in every step."""
    data = dataset(10)
    assert fixed_sizes(DataLoader(data, batch_size=4)) == (3, 4, 2)
    assert fixed_sizes(DataLoader(data, batch_size=4, drop_last=True)) == (2, 4, 4)
    assert fixed_sizes(DataLoader(data, batch_size=5)) == (2, 5, 5)
    assert fixed_sizes(DataLoader(data, batch_size=4, collate_fn=list)) is None
    assert fixed_sizes([1, 2]) is None

    def fewer(batch, generator):
        return [tensor[:2] for tensor in batch]

    def noise(batch, generator):
        return [tensor + 0.1 for tensor in batch]

    noise.keeps_samples = True
    write_store(tmp_path / "store", 10, ("a", "b"), targets=("b",))
    ours = PTXrDataset(tmp_path / "store", to_pred="b")
    whole = [{}, {"augment": noise}]
    unknown = [{"augment": fewer}, {"augment": [noise, fewer]}, {"callback": list}]
    for given, more in itertools.product((data, ours), whole + unknown):
        sizes = fixed_sizes(prep_dataloader(given, batch_size=4, **more))
        assert sizes == (None if more in unknown else (2, 4, 4))
    assert fixed_sizes(prep_dataloader(ours, batch_size=4, augment=Flip("lon"))) == (2, 4, 4)


@on_two_ranks
def best_model_file_and_resume_agree_on_all_ranks(folder):
    """Early stop, best model and its file, and resuming, on ranks with different data."""
    best, snapshot = f"{folder}/best.pt", f"{folder}/snapshot.pt"
    torch.manual_seed(dist.get_rank())  # ranks start from different weights

    def fresh(**more):
        return trainer(ranks=True, epochs=4, model=network(norm=True), **more)

    whole = fresh(best_model_path=best)
    returned = whole.train()
    model = weights(returned)
    assert model == weights(best)
    assert_same_on_all_ranks((model, losses(whole)))
    # the loss that was reported is that of the file, batch norm included
    assert whole.best_loss == pytest.approx(squared_error(returned), rel=1e-5)
    # Only one rank is told; all save at the same step.
    told = At(12, lambda: dist.get_rank() or tell_usr1())
    for at, step, callbacks in ((20, 15, []), (13, 12, [told, EVERY_STEP])):
        stops = [*callbacks, At(at)]
        position, _ = resumed_alike(f"{snapshot}{at}", fresh, *stops, save_every=1)
        assert position["step"] == step
    dist.barrier()
    if dist.get_rank() == 0:
        content = bytearray(Path(f"{snapshot}13").read_bytes())
        content[len(content) // 2] ^= 1
        Path(f"{snapshot}13").write_bytes(content)
    dist.barrier()
    before = Path(best).read_bytes()
    with pytest.raises(StoreError, match=r"snapshot\.pt13 is damaged"):
        fresh(snapshot_path=f"{snapshot}13", best_model_path=best).train()
    assert Path(best).read_bytes() == before


@on_two_ranks
def our_loaders_train_validate_and_resume_on_ranks(folder):
    """Loaders of `prep_dataloader` over a store and over tensors: nothing is asked per step."""
    if dist.get_rank() == 0:
        write_store(Path(folder) / "store", 37, ("a", "b"), window={}, targets=("b",))
    dist.barrier()
    store = PTXrDataset(f"{folder}/store", to_pred="b")
    for kind, data, inputs in (("store", store, 1), ("tensors", dataset(37), 3)):

        def fresh(data=data, inputs=inputs, **more):
            train, val = prep_dataloader(data, data, batch_size=4, parallel=True, seed=2)
            torch.manual_seed(0)
            more |= {"metrics": {"rmse": RMSE()}, "loss": nn.L1Loss()}
            model = nn.Linear(inputs, 1)
            return trainer(ranks=True, model=model, train=train, val=val, **more)

        whole = fresh()
        whole.train()
        assert whole._loop.feed.is_even
        assert sum(r["val_n"] for r in whole.history["ranks"][0]) == 37
        # inside an epoch, and after its last batch, when the loader stands in the next one
        for step, callbacks in ((6, [EVERY_STEP]), (8, [])):
            stops = At(step, tell_usr1), At(step + 1), *callbacks
            position, _ = resumed_alike(f"{folder}/{kind}-{step}.pt", fresh, *stops)
            assert position["step"] == step
        assert_same_on_all_ranks(losses(whole))


class Stream(IterableDataset):
    """Items from one source that can be read only once, as from a file or a queue."""

    def __init__(self, data):
        self.items = iter([data[i] for i in range(len(data))])

    def __iter__(self):
        yield from self.items


class Augmented(Dataset):
    """Adds noise from torch's generator to every item."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return x + torch.rand(3), y


@on_two_ranks
def loaders_that_are_not_shared_out_are_shared_or_warned_of(folder):
    """What each rank trains on, and what rank 0 warns of."""
    data, rank = dataset(37), dist.get_rank()
    own = Subset(data, range(rank, 37, 2))
    of_4 = {"batch_size": 4, "seed": 2}
    ours, told = prep_dataloader(data, **of_4), prep_dataloader(data, **of_4, parallel=True)
    # its length changes, and with it how long a scheduler must be
    shared = "9 batches are now shared out over 2 ranks, 4 each"
    models = []
    for train, counts, warned in (
        (ours, [16, 16], shared),  # whole batches of 4, of 37 samples, one for each rank
        (told, [16, 16], None),
        (prep_dataloader(own, **of_4), [16, 16], None),
        (prep_dataloader(Augmented(Subset(data, range(rank, 36, 2))), **of_4), [16, 16], None),
        (prep_dataloader(Augmented(data), **of_4), [16, 16], shared),
        (DataLoader(own, batch_size=4, shuffle=True), [19, 18], None),
        (DataLoader(data, batch_size=4, sampler=DistributedSampler(data)), [19, 19], None),
        (DataLoader(Stream(data), batch_size=4), [37, 37], None),  # not a sample of it was lost
        (DataLoader(data, batch_size=4), [37, 37], "train_data (DataLoader of TensorDataset, 37 "),
        ([tuple(data[:4])], [4, 4], "train_data (list, 1 batches)"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = trainer(ranks=True, train=train, epochs=1)
            models.append(weights(run.train()))
        said = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
        assert trained_on(run) == counts
        assert [warned in message for message in said] == [True] * (
            rank == 0 and warned is not None
        )
    assert models[0] == models[1]
    assert ours.parallel
    both = prep_dataloader(data, **of_4)
    run = trained(ranks=True, train=both, val=both, epochs=1)
    assert trained_on(run) == [16, 16]


GENERATOR = torch.Generator()


class Drawn(Dataset):
    """Adds noise to every item, from a generator that no seed reaches."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return torch.full((2,), float(index)) + torch.rand(2, generator=GENERATOR)


def test_what_a_rank_takes_is_told_apart_by_its_content():
    """Without ranks: the same is equal, other data, choices and sizes are not, shared is None."""
    x = torch.arange(12.0).reshape(6, 2)

    def of(data, **more):
        return find_unshared(DataLoader(data, batch_size=2, **more))

    assert of(x) == of(x.clone()) == of(x, shuffle=True)
    assert of(Drawn()) == of(Drawn())
    for other in (x[:5], x + 1, x.double()):
        assert of(x) != of(other)
    chosen = [of(x, sampler=SubsetRandomSampler(c)) for c in ([0, 1, 2], [3, 4, 5], [0, 1, 2])]
    assert chosen[0] == chosen[2] != chosen[1]
    assert find_unshared([(x, x)]) == find_unshared([(x.clone(), x)]) != find_unshared([(x, x + 1)])
    shared = DistributedSampler(x, 2, 0)
    assert of(x, sampler=shared) is None
    assert find_unshared(DataLoader(x, batch_sampler=BatchSampler(shared, 2, False))) is None
    assert find_unshared(prep_dataloader(x, parallel=True)) is None
    assert find_unshared(prep_dataloader(x)) is not None
    once = Stream(x)
    assert of(once) is None
    assert torch.equal(next(iter(once)), x[0])  # it was not read


@on_two_ranks
def a_snapshot_goes_on_with_another_number_of_ranks(folder):
    trainer(ranks=True, snapshot_path=f"{folder}/s.pt", epochs=3).train()


def test_a_snapshot_of_two_ranks_goes_on_with_one(ran):
    path = ran[0] / "a_snapshot_goes_on_with_another_number_of_ranks" / "s.pt"
    run = trained(snapshot_path=path, epochs=5)
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


@on_two_ranks
def a_run_that_failed_on_all_ranks_is_over_for_the_next(folder):
    gaps = torch.full((4, 3), torch.nan if dist.get_rank() == 1 else 1.0)
    val = Passes([(torch.ones(4, 3), torch.ones(4, 1))] * 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(messages, "PERIOD_S", 0.0)  # every batch of a validation is a moment to look
        with pytest.raises(RunError, match="training loss is nan on rank 1, epoch 1, step 1"):
            trainer(ranks=True, train=[(gaps, torch.ones(4, 1))] * 3).train()
        trainer(ranks=True, val=val, epochs=2).train()
    assert val.passes == 2


test_on_two_ranks = TWO_RANKS.test()


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


@pytest.mark.slow
def test_what_cannot_be_sent_to_ranks_is_named():
    class Opened:
        def __init__(self):
            self.file = sqlite3.connect(":memory:")

    data = Opened()
    with pytest.raises(InvalidTypeError, match=r"Opened\.file, a Connection, cannot be sent"):
        dist_train(print, 2, data)
    with pytest.raises(InvalidTypeError, match=r"data\.file, a Connection, cannot be sent"):
        dist_train(lambda: data, 2)
    single, held = nn.Linear(1, 1), DataLoader([Opened()])
    optimizer = torch.optim.SGD(single.parameters(), 0.1)
    run = AddonTrainer.add_on(MultiGPUAddon)(
        single, ["cpu", "cpu"], optimizer=optimizer, loss=nn.MSELoss()
    )
    with pytest.raises(InvalidTypeError, match=r"DataLoader\.dataset, a list, cannot be sent"):
        run.run(1, held)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: dist_train(print), "needs nproc"),
        (lambda: dist_train(3, 2), "must be a Trainer or a function"),
        (lambda: dist_train(trainer(), 2), "takes no other arguments"),
        (lambda: dist_train(trainer(), timeout=5.0), "takes no other arguments"),
        (lambda: dist_train(print, 0), "nproc must be a positive integer, got 0"),
        (lambda: ddp_init(backend="glo"), "did you mean 'gloo'"),
        *(
            (lambda timeout=timeout: ddp_init(timeout=timeout), "timeout must be a positive number")
            for timeout in (-1, "x", None, math.nan, math.inf, True)
        ),
    ],
)
def test_what_does_not_fit_is_refused(call, said):
    with pytest.raises((InvalidTypeError, InvalidValueError), match=said):
        call()


def test_gpus_that_torch_counts_but_cannot_use_are_not_picked(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device().type == "cpu"
    with pytest.raises(InvalidValueError):
        pick_device("cuda")


def test_every_address_has_a_store_of_its_own(monkeypatch):
    served = []
    monkeypatch.setattr(
        ranks_dist, "rendezvous", lambda *_, **__: iter([(served.append(0) or len(served), 0, 1)])
    )
    limit = timedelta(seconds=1)
    stores = [ranks_dist._served_store(name, 0, 1, limit) for name in ("a.test", "b.test")]
    ranks_dist._served_store.cache_clear()
    assert stores == [1, 2]


def test_group_of_the_caller_is_left_alone(tmp_path):
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert ddp_init().size == ddp_init().size == 1
        dist_train(trainer(ranks=True, epochs=1))
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
    assert ddp_init().size == 1
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("backends", "sent_from"),
    [
        ("cpu:gloo,cuda:nccl", ["cpu", "cuda"]),  # as ddp_init makes it
        ("cuda:nccl", ["cpu", "cuda"]),  # of the caller
        ("cpu:gloo,cuda:gloo,mps:gloo", ["cpu", "cpu"]),
    ],
)
def test_tensors_are_sent_from_a_device_that_a_group_can_use(monkeypatch, backends, sent_from):
    monkeypatch.setattr(dist, "get_backend_config", lambda: backends)
    wanted = [torch.device("cpu"), torch.device("cuda:0")]
    assert [world._sending_device(device).type for device in wanted] == sent_from
