"""What transforms draw in worker processes: the same numbers, kept alive, started anew, resumed."""

import os
import pickle
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ml4cube.datasets.pytorch import prep_dataloader
from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.training.callbacks import Callback
from ml4cube.training.pytorch import Trainer
from tests.training_parts import At, Interrupt, losses, network, weights


class Drawing(Dataset):
    """Draws from the three global generators, and knows the process that did."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        """Return the number of the sample, what it drew, and the process."""
        drawn = [torch.rand(()).item(), np.random.random(), random.random()]  # noqa: NPY002
        return torch.tensor([index, *drawn]), os.getpid()


def drawn(loader, epochs=3):
    """The batches of each epoch, and the processes that made them."""
    passes = [list(loader) for _ in range(epochs)]
    batches = [torch.stack([batch for batch, _ in batches]) for batches in passes]
    return batches, [{int(pid) for _, pids in batches for pid in pids} for batches in passes]


def loader(**arguments):
    return prep_dataloader(Drawing(), batch_size=4, seed=1, **{"num_workers": 2, **arguments})


@pytest.mark.slow
def test_numbers_depend_on_seed_epoch_and_batch_alone():
    anew, pids = drawn(loader(num_workers=1), epochs=2)
    assert len(set.union(*pids)) == 2
    keeping = loader(persistent_workers=True)
    kept, pids = drawn(keeping, epochs=2)
    assert len(set.union(*pids)) == 2
    assert all(map(torch.equal, kept, anew))
    numbers = torch.cat([epoch[:, :, 1:].flatten() for epoch in anew])
    assert len(numbers.unique()) == len(numbers) == 2 * 24 * 3
    # After an epoch that was left early, and in one that is continued.
    _ = next(iter(keeping))
    keeping.set_epoch(1)
    assert torch.equal(drawn(keeping, epochs=1)[0][0], anew[1])
    keeping.load_state_dict({**keeping.state_dict(), "epoch": 1, "done": 8})
    assert torch.equal(drawn(keeping, epochs=1)[0][0], anew[1][2:])
    # Live workers do not keep it from being sent to other processes.
    copied = pickle.loads(pickle.dumps(keeping))  # noqa: S301
    assert copied.state_dict() == keeping.state_dict()


def test_numbers_of_samples_seed_nothing_elsewhere():
    sampler = loader(num_workers=0).sampler
    before = torch.get_rng_state(), random.getstate()
    numbers = pickle.loads(pickle.dumps(list(sampler)))  # noqa: S301
    assert sorted(numbers) == list(range(24))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


class Noisy(Dataset):
    """Adds noise to its samples."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        """Return a sample."""
        x = torch.full((3,), float(index)) / 24 + torch.randn(3)
        return x, x.sum(0, keepdim=True)


class SaveAt(Callback):
    """Save a snapshot after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, loop):
        """Save."""
        if loop.state.step == self.step:
            loop._save()


def training(path=None, callbacks=()):
    train = prep_dataloader(Noisy(), None, 4, num_workers=1, persistent_workers=True, seed=1)
    model = network()
    return Trainer(
        model,
        train,
        None,
        torch.optim.SGD(model.parameters(), lr=0.05),
        loss=nn.MSELoss(),
        epochs=2,
        seed=3,
        save_every=1,
        device="cpu",
        snapshot_path=path,
        callbacks=callbacks,
        progress=False,
    )


@pytest.mark.slow
def test_a_resumed_run_draws_as_an_uninterrupted_one(tmp_path):
    whole = training()
    whole.train()
    path = tmp_path / "snapshot.pt"
    with pytest.raises(Interrupt):  # inside the second epoch
        training(path, [SaveAt(9), At(10)]).train()
    resumed = training(path)
    resumed.train()
    assert weights(resumed.model) == weights(whole.model)
    assert losses(resumed) == losses(whole)


def test_a_loader_of_torch_that_keeps_its_workers_is_refused_with_a_snapshot(tmp_path):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train = DataLoader(Noisy(), batch_size=4, num_workers=2, persistent_workers=True)
    arguments = {"loss": nn.MSELoss(), "device": "cpu"}
    Trainer(model, train, None, optimizer, **arguments)  # nothing is to be resumed
    match = r"train_data must not have persistent_workers=True with snapshot_path=.*s.pt'"
    with pytest.raises(InvalidValueError, match=match):
        Trainer(model, train, None, optimizer, snapshot_path=tmp_path / "s.pt", **arguments)


class Holding(Dataset):
    """Holds an open file."""

    def __init__(self, path):
        self.reader = Reader(path)

    def __len__(self):
        return 4

    def __getitem__(self, index):
        """Return a sample."""
        return torch.tensor([index])


class Reader:
    """Opens a file."""

    def __init__(self, path):
        self.file = path.open("rb")


def test_a_data_set_that_cannot_be_sent_to_workers_says_which_attribute_it_is(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"")
    data = torch.utils.data.Subset(Holding(path), range(3))
    match = (
        r"because Subset\.dataset\.reader\.file, a BufferedReader, cannot be pickled \(.*\); open"
    )
    with pytest.raises(InvalidTypeError, match=match):
        next(iter(prep_dataloader(data, num_workers=1)))
    assert len(list(prep_dataloader(data))) == 3
    data.dataset.reader.file.close()
