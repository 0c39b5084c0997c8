"""How long a GPU waits for data while a small U-Net trains on a sample store.

Writes `benchmarks/results/gpu_feed.json`: the share of step time spent waiting for the next batch,
for our loader (pinned memory, copies that overlap with computing) and for torch's DataLoader over a
TensorDataset in main memory. Waiting is time on the GPU's own clock between the end of one step and
the arrival of the next batch, so copies that overlap with computing do not count.

It needs a GPU, and says so where there is none. ``--device cpu`` only tries the program out, with a
thin U-Net over few samples, in less than a minute: its figures mean nothing and are not written.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader

RESULTS = Path(__file__).parent / "results" / "gpu_feed.json"
BATCH = 256


def make_store(folder: Path, scale: float) -> Path:
    """Samples of two inputs and a target on 64 x 64 cells."""
    shape = (max(1, int(400 * scale)), 64, 6400)
    rng = np.random.default_rng(0)
    values = {n: rng.normal(size=shape).round(2).astype("f4") for n in "aby"}
    cube = xr.Dataset({n: (("time", "lat", "lon"), v) for n, v in values.items()})
    where = {"train_cube": folder / "train.zarr", "test_cube": folder / "test.zarr"}
    window = {"lat": 64, "lon": 64}
    MultiProcSampler(
        cube, sample_size=window, data_split=1.0, block_size={"time": 1}, **where
    ).run()
    return folder / "train.zarr"


def block(inside: int, out: int) -> nn.Sequential:
    """Two convolutions."""
    layers = [nn.Conv2d(inside, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(out, out, 3, padding=1), nn.BatchNorm2d(out), nn.ReLU())


class UNet(nn.Module):
    """Three levels of 32, 64 and 128 channels, or of others in these proportions."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        one, two, four = width, 2 * width, 4 * width
        self.down = nn.ModuleList([block(2, one), block(one, two), block(two, four)])
        self.up = nn.ModuleList([block(four + two, two), block(two + one, one)])
        self.head = nn.Conv2d(one, 1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 2, lat, lon) to (batch, 1, lat, lon)."""
        passed = []
        for level, layer in enumerate(self.down):
            x = layer(x if level == 0 else nn.functional.max_pool2d(x, 2))
            passed.append(x)
        for layer, other in zip(self.up, (passed[1], passed[0]), strict=True):
            x = layer(torch.cat([nn.functional.interpolate(x, scale_factor=2), other], dim=1))
        return self.head(x)


def train(loader: Iterable[Any], device: torch.device) -> dict[str, float]:
    """One epoch; which part of it the device waited."""
    on_gpu = device.type == "cuda"
    model = UNet(32 if on_gpu else 2).to(device)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    marks: list[tuple[Any, Any]] = []
    waited, batches, ended = 0.0, iter(loader), None
    began = time.perf_counter()
    while True:
        asked = time.perf_counter()
        batch = next(batches, None)
        if batch is None:
            break
        X, y = (tensor.to(device, non_blocking=True) for tensor in batch)
        waited += time.perf_counter() - asked
        if on_gpu:
            started = torch.cuda.Event(enable_timing=True)
            started.record()
            if ended is not None:
                marks.append((ended, started))
        with torch.autocast(device.type, torch.bfloat16, enabled=on_gpu):
            loss = nn.functional.mse_loss(model(X), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if on_gpu:
            ended = torch.cuda.Event(enable_timing=True)
            ended.record()
    if on_gpu:
        torch.cuda.synchronize()
        waited = sum(a.elapsed_time(b) for a, b in marks) / 1e3
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "waiting": waited / seconds}


def main() -> None:
    """Measure in turns, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, help="1 for 40,000 samples, the default on a GPU")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    device = torch.device(args.device)
    on_gpu = device.type == "cuda"
    if on_gpu and not torch.cuda.is_available():
        sys.exit(
            "no GPU here, so how long one waits for data is not measured and nothing is written; "
            "--device cpu tries the program out"
        )
    if args.scale is None:
        args.scale = 1.0 if on_gpu else 0.01
    with tempfile.TemporaryDirectory() as folder:
        data = PTXrDataset(make_store(Path(folder), args.scale), to_pred="y")
        size = min(BATCH, len(data) // 2)
        small = max(1.0, 512 * args.scale)
        tensors = TensorDataset(*data.take(range(len(data))))
        loaders: dict[str, Any] = {
            "ml4cube": prep_dataloader(data, batch_size=size, buffer_mb=small, device=device),
            "tensordataset": DataLoader(tensors, size, shuffle=True, drop_last=True),
        }
        found: dict[str, list[dict[str, float]]] = {name: [] for name in loaders}
        for _ in range(args.repeats + 1):
            for name, loader in loaders.items():
                found[name].append(train(loader, device))
    results: dict[str, Any] = {
        "machine": {
            "cpus": os.cpu_count(),
            "platform": f"{platform.system()} {platform.machine()}",
            "device": str(device),
        },
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "settings": {"batch_size": size, "samples": len(data), "buffer_mb": small},
    }
    for name, turns in found.items():
        results[name] = {
            "waiting": round(statistics.median(turn["waiting"] for turn in turns[1:]), 4),
            "seconds": round(statistics.median(turn["seconds"] for turn in turns[1:]), 3),
        }
    print(json.dumps(results, indent=1))
    if not on_gpu:
        print("on a CPU: the program ran, its figures say nothing about a GPU; nothing is written")
        return
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
