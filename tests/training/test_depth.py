"""The way from `train()` to the model is short enough to be read in a traceback."""

import sys
from pathlib import Path

import numpy as np
import torch
import xarray as xr
from torch import nn

import ml4cube
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.training.pytorch import Trainer

PACKAGE = str(Path(ml4cube.__file__).parent)
MOST_FRAMES = 18


class Depth:
    """The most frames of the package that lie on one another in its body."""

    def __enter__(self):
        self.frames = self.deepest = 0
        sys.setprofile(self.note)
        return self

    def __exit__(self, *_):
        sys.setprofile(None)

    def note(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return
        if event == "call":
            self.frames += 1
            self.deepest = max(self.deepest, self.frames)
        elif event == "return":
            self.frames -= 1


def test_an_epoch_is_at_most_so_many_frames_deep(tmp_path):
    values = np.random.default_rng(0).normal(size=(48, 4, 4)).astype("float32")
    cube = xr.Dataset(dict.fromkeys("ab", (("time", "lat", "lon"), values)))
    data = PTXrDataset(cube, to_pred="b", sample_size={"lat": 2, "lon": 2}, scale_fn=None)
    train, val = prep_dataloader(data, val_ds=data, batch_size=32)
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.Unflatten(1, (1, 2, 2)))
    trainer = Trainer(
        model,
        train,
        val,
        torch.optim.SGD(model.parameters(), lr=0.1),
        loss=nn.MSELoss(),
        metrics={"mae": nn.functional.l1_loss},
        epochs=1,
        gradient_clip=1.0,
        ema=0.9,
        snapshot_path=tmp_path / "s.pt",
        save_every=1,
        progress=False,
    )
    with Depth() as depth:
        trainer.train()
    assert len(trainer.history) == 1
    assert 5 < depth.deepest <= MOST_FRAMES
