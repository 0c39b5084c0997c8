"""Turn a cube into train, validation and test stores, on any number of processes.

    python examples/distributed_dataset_creation.py                     # on a synthetic cube
    python examples/distributed_dataset_creation.py my_cube.zarr --target ndvi --nproc 8

The stores are written to --out. Then: torchrun --nproc-per-node 2 examples/distributed_training.py
"""

import argparse
from pathlib import Path

import numpy as np
import xarray as xr

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.splits import assign_block_split


def made_cube() -> xr.Dataset:
    """Make two years of weekly fields with gaps, and a target that a network can learn."""
    rng = np.random.default_rng(0)
    time = np.datetime64("2020-01-01", "ns") + np.arange(96) * np.timedelta64(7, "D")
    lat, lon = np.linspace(-60, 60, 48), np.arange(0, 360, 5.0)
    season = np.sin(2 * np.pi * np.arange(96) / 52)[:, None, None]
    warm = 300 - 0.4 * np.abs(lat)[None, :, None] + 5 * season + rng.normal(size=(96, 48, 72))
    wet = rng.gamma(2.0, 2.0, size=warm.shape)
    green = 0.02 * (warm - 280) + 0.05 * np.sqrt(wet)
    green[rng.random(green.shape) < 0.005] = np.nan  # clouds
    fields = {"temperature": (warm, "K"), "rain": (wet, "mm d-1"), "greenness": (green, "1")}
    dims = ("time", "lat", "lon")
    return xr.Dataset(
        {k: (dims, v.astype("float32"), {"units": units}) for k, (v, units) in fields.items()},
        coords={"time": time, "lat": lat, "lon": lon},
    ).chunk({"time": 24, "lat": 24, "lon": 36})


def main() -> None:
    """Split the cube, print the plan and write the stores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cube", nargs="?", help="path or URL of a zarr cube; a made one if absent")
    parser.add_argument("--target", default="greenness")
    parser.add_argument("--out", type=Path, default=Path("stores"))
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--window", type=int, default=6, help="cells along each space dim")
    parser.add_argument("--space", nargs=2, default=["lat", "lon"], help="names of the space dims")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)

    cube = xr.open_zarr(args.cube) if args.cube else made_cube()
    space = dict.fromkeys(args.space, 2 * args.window)
    cube = assign_block_split(cube, block_size=space, split=0.7, val=0.15, seed=1)

    sampler = MultiProcSampler(
        cube,
        train_cube=str(args.out / "train.zarr"),
        test_cube=str(args.out / "test.zarr"),
        val_cube=str(args.out / "val.zarr"),
        sample_size=dict.fromkeys(args.space, args.window),
        to_pred=args.target,
        nproc=args.nproc,
    )
    print(sampler.plan())
    for store in sampler.get_datasets():
        print(dict(store.sizes))


if __name__ == "__main__":
    main()
