"""Turn a cube into training stores on a cluster; the same script runs on a laptop.

    python examples/sample_on_cluster.py                                      # this machine
    python examples/sample_on_cluster.py /data/cube.zarr --scheduler tcp://10.0.0.5:8786
    python examples/sample_on_cluster.py /data/cube.zarr --slurm-jobs 8 --partition compute

With --slurm-jobs the workers are SLURM jobs that dask-jobqueue submits (pip install
dask-jobqueue). The cube and --out must lie where every worker sees them. A job that SLURM ends, or
a worker that dies, costs its tasks; the same command goes on where an interrupted run stopped.
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
    """A small field with gaps, so that the script can be tried without data."""
    rng = np.random.default_rng(0)
    values = rng.normal(280, 5, (48, 24, 36)).astype("float32")
    values[rng.random(values.shape) < 0.001] = np.nan
    cube = xr.Dataset({"temperature": (("time", "lat", "lon"), values, {"units": "K"})})
    cube.chunk({"time": 12, "lat": 12, "lon": 12}).to_zarr(path, mode="w", consolidated=False)
    return path


def slurm_cluster(args: argparse.Namespace) -> Any:
    """Workers as SLURM jobs, one process each; memory for one is bounded and flat."""
    from dask_jobqueue import SLURMCluster

    cluster = SLURMCluster(
        queue=args.partition,
        cores=args.cores_per_job,
        processes=args.cores_per_job,
        memory=args.memory_per_job,
        walltime=args.walltime,
        interface=args.interface,
        # a worker leaves before SLURM kills it, and its tasks move elsewhere
        worker_extra_args=["--lifetime", "25m", "--lifetime-stagger", "4m"],
        job_extra_directives=["--requeue"],
    )
    cluster.scale(jobs=args.slurm_jobs)
    return cluster


def main() -> None:
    """Connect, split, plan, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cube", nargs="?", help="path or URL of a zarr cube; a made one if absent")
    parser.add_argument("--out", type=Path, default=Path("cluster-stores"))
    parser.add_argument("--window", type=int, default=4, help="cells along lat and lon")
    parser.add_argument("--scheduler", help="address of a dask scheduler that runs already")
    parser.add_argument("--slurm-jobs", type=int, default=0)
    parser.add_argument("--partition")
    parser.add_argument("--cores-per-job", type=int, default=8)
    parser.add_argument("--memory-per-job", default="16GB")
    parser.add_argument("--walltime", default="00:30:00")
    parser.add_argument("--interface", help="network interface of the nodes, such as ib0")
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
            local = LocalCluster(
                n_workers=2, threads_per_worker=1, host="127.0.0.1", dashboard_address=None
            )
            client = stack.enter_context(Client(stack.enter_context(local)))
        sampler = MultiProcSampler(
            cube,
            sample_size={"lat": args.window, "lon": args.window},
            train_cube=args.out / "train.zarr",
            test_cube=args.out / "test.zarr",
            client=client,
        )
        print(sampler.plan())
        train, test = sampler.get_datasets()
    print(f"{train.sizes['samples']} train and {test.sizes['samples']} test samples in {args.out}")


if __name__ == "__main__":
    main()
