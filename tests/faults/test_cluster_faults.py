"""On a cluster a worker killed in mid-run costs its tasks and nothing else."""

from __future__ import annotations

import glob
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from ml4cube.core.errors import RunError
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.sampling import planning, tiling
from tests.clusters import local_cluster
from tests.cubes import cell_id_cube
from tests.faults.test_sampling_faults import tree
from tests.samplestores import paths

pytestmark = pytest.mark.slow


def sample(folder: Path, callback: Any, client: Any = None) -> None:
    cube = cell_id_cube({"time": 48, "lat": 8}, "float64", dask_chunks={"time": 4, "lat": 8})
    MultiProcSampler(
        cube,
        **paths(folder),
        sample_size={"lat": 2},
        block_size={"time": 4},
        callback=callback,
        nproc=1,
        client=client,
    ).run()


@pytest.mark.parametrize("when", ["writing", pytest.param("counting", marks=pytest.mark.soak)])
def test_a_killed_worker(tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "_SHARD_BYTES", (256, 512))  # many tasks
    monkeypatch.setattr(planning, "_COUNT_BYTES", 256)
    flag, calls = tmp_path / "killed", str(tmp_path / "calls")
    notes = str(tmp_path / "out/train.zarr.partial/ml4cube-journal-*/*.json")

    def work(samples: dict[str, Any]) -> dict[str, Any]:
        with open(os.environ.get("CALLS", calls), "a") as file:  # appends of one byte do not mix
            file.write(".")
        writing = bool(glob.glob(notes))
        if os.environ.get("DASK_WORKER_FAULT") and writing == (when == "writing"):
            try:
                os.close(os.open(flag, os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return samples
            os.kill(os.getpid(), signal.SIGKILL)
        return samples

    sample(tmp_path / "wanted", work)
    undisturbed = os.path.getsize(calls)
    env = {"DASK_WORKER_FAULT": "1", "CALLS": f"{calls} on the cluster"}
    with (
        local_cluster(2, processes=True, env=env) as cluster,
        Client(cluster) as client,
    ):
        sample(tmp_path / "out", work, client)
    assert flag.exists()
    # the tasks that the dead worker had are done again, no others
    assert undisturbed < os.path.getsize(f"{calls} on the cluster") < 1.5 * undisturbed
    assert tree(tmp_path / "out") == tree(tmp_path / "wanted")


def test_a_task_that_kills_every_worker(tmp_path: Path) -> None:
    def deadly(samples: dict[str, Any]) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGKILL)
        return samples

    with (
        local_cluster(2, processes=True) as cluster,
        Client(cluster) as client,
        pytest.raises(RunError, match=r"the cluster gave up a task.*run again"),
    ):
        sample(tmp_path, deadly, client)
    assert not (tmp_path / "train.zarr").exists()
