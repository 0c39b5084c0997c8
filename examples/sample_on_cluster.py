"""Turn a cube into training stores on a cluster; the same script runs on a laptop.

    python examples/sample_on_cluster.py                                      # this machine
    python examples/sample_on_cluster.py /data/cube.zarr --scheduler tcp://10.0.0.5:8786
    python examples/sample_on_cluster.py /data/cube.zarr --slurm-jobs 8 --partition compute

With --slurm-jobs the workers are jobs that dask-jobqueue submits. All workers must see the cube
and --out. Tasks of a dead worker run again; after an interruption, the same command resumes.
"""

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import xarray as xr
from distributed import Client, LocalCluster

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.splits import assign_block_split


def made_cube(path: Path) -> Path:
    """Make a small noisy field, to try the script without data."""
    values = np.random.default_rng(0).normal(280, 5, (48, 24, 36)).astype("float32")
    cube = xr.Dataset({"temperature": (("time", "lat", "lon"), values, {"units": "K"})})
    cube.chunk({"time": 12, "lat": 12, "lon": 12}).to_zarr(path, mode="w", consolidated=False)
    return path


def slurm_cluster(args: argparse.Namespace) -> Any:
    """Start workers as SLURM jobs, one process per core."""
    from dask_jobqueue import SLURMCluster

    node = {"cores": 8, "processes": 8, "memory": "16GB", "walltime": "00:30:00"}
    node |= {"queue": args.partition, "interface": args.interface}
    # stop before SLURM kills the job, so that tasks move to other workers
    cluster = SLURMCluster(**node, worker_extra_args=["--lifetime", "25m"])
    cluster.scale(jobs=args.slurm_jobs)
    return cluster


def main() -> None:
    """Connect, split the cube, print the plan and write the stores."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cube", nargs="?", help="path or URL of a zarr cube; a made one if absent")
    parser.add_argument("--out", type=Path, default=Path("cluster-stores"))
    parser.add_argument("--scheduler", help="address of a dask scheduler that runs already")
    parser.add_argument("--slurm-jobs", type=int, default=0)
    parser.add_argument("--partition")
    parser.add_argument("--interface", help="network of the nodes, such as ib0")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cube = xr.open_zarr(args.cube or made_cube(args.out / "cube.zarr"))
    cube = assign_block_split(cube, split=0.8, seed=1)
    with ExitStack() as stack:
        client: Any = args.scheduler
        if args.slurm_jobs:
            cluster = stack.enter_context(slurm_cluster(args))
            client = stack.enter_context(Client(cluster))
        elif client is None:
            local = LocalCluster(n_workers=2, host="127.0.0.1", dashboard_address=None)
            client = stack.enter_context(Client(stack.enter_context(local)))
        sampler = MultiProcSampler(
            cube,
            sample_size={"lat": 4, "lon": 4},
            train_cube=args.out / "train.zarr",
            test_cube=args.out / "test.zarr",
            client=client,
        )
        print(sampler.plan())
        train, test = sampler.get_datasets()
    print(f"{train.sizes['samples']} train and {test.sizes['samples']} test samples in {args.out}")


if __name__ == "__main__":
    main()
