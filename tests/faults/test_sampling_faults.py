"""Sampling is never half done: killed anywhere, out of disk, it says so, and goes on later."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from ml4cube.splits import assign_block_split
from ml4cube.store.format import verify_store
from tests.cubes import cell_id_cube

pytestmark = pytest.mark.slow
SOAK = pytest.mark.soak
ROOT = Path(__file__).parents[2]

SCRIPT = """
import glob, os, resource, signal, sys, time
import xarray as xr
from ml4cube.sampling import tiling
tiling._SHARD_BYTES = (2048, 4096)
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
cube, folder, nproc, fault = sys.argv[1:]
if fault.startswith("limit="):
    size = int(fault.partition("=")[2])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
def work(samples):
    # by the environment: a global that differs by target would make it another call
    fault, _, part = os.environ["FAULT"].partition("=")
    written = os.environ["TARGET"] + f"/{part}.zarr.partial/ml4cube-store-*/a/c"
    time.sleep(0.01)
    if fault == "worker" and glob.glob(written):
        os.kill(os.getpid(), signal.SIGKILL)
    return samples
MultiProcSampler(
    xr.open_zarr(cube), train_cube=folder + "/train.zarr", test_cube=folder + "/test.zarr",
    nproc=int(nproc), callback=work, sample_size=dict(lat=2, lon=2),
).run()
"""


def tree(folder: Path) -> dict[str, bytes]:
    return {
        p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()
    }


class Job:
    """One call of the sampler in a process of its own, and what it should give."""

    def __init__(self, folder: Path) -> None:
        ds = cell_id_cube({"time": 24, "lat": 8, "lon": 8}, "float64")
        ds = assign_block_split(ds, {"time": 4}).chunk({"time": 4})
        ds.to_zarr(folder / "cube.zarr")
        (folder / "run.py").write_text(textwrap.dedent(SCRIPT))
        self.folder = folder
        self.started = time.monotonic()
        _, error = self.start(folder / "whole", 1).communicate()
        assert "Error" not in error
        self.seconds = time.monotonic() - self.started
        self.right = tree(folder / "whole")

    def start(self, target: Path, nproc: int, fault: str = "none") -> subprocess.Popen[str]:
        target.mkdir(exist_ok=True)
        script, cube = self.folder / "run.py", self.folder / "cube.zarr"
        command = [sys.executable, script, cube, target, str(nproc), fault]
        env = {**os.environ, "TARGET": str(target), "FAULT": fault}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, cwd=ROOT, env=env, text=True, **pipes)

    def finish(self, target: Path, nproc: int) -> None:
        """Run again without a fault: now it completes, with the bytes of an undisturbed run."""
        process = self.start(target, nproc)
        printed, error = process.communicate()
        assert process.returncode == 0, error
        assert printed == ""
        assert "it/s" not in error
        assert tree(target) == self.right


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("faults"))


def absent_or_complete(target: Path) -> None:
    for part in ("train.zarr", "test.zarr"):
        if (target / part).exists():
            verify_store(target / part)


@SOAK  # the next test kills at one point, test_multiproc_sampler at every step of publishing
@pytest.mark.parametrize("nproc", [1, 2])
def test_killed_at_random_points(job: Job, nproc: int, tmp_path: Path) -> None:
    chance = random.Random(nproc)
    target = tmp_path / "out"
    for _ in range(4):
        process = job.start(target, nproc)
        # most points after the imports, where work is done
        time.sleep(job.seconds * chance.uniform(0.4, 1.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        absent_or_complete(target)
    job.finish(target, nproc)


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=SOAK), 2])
def test_killed_when_something_is_written(job: Job, nproc: int, tmp_path: Path) -> None:
    """The script that runs again, without a main guard, makes only the other shards."""
    target = tmp_path / "out"
    work_folder = target / "train.zarr.partial"
    process = job.start(target, nproc)
    while not any(work_folder.glob("ml4cube-journal-*/*.json")) and process.poll() is None:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (target / "train.zarr").exists()
    (growing,) = work_folder.glob("ml4cube-store-*")
    kept = min((growing / "a/c").glob("*"))
    stamp = kept.stat().st_mtime_ns
    job.finish(target, nproc)
    moved = target / "train.zarr" / kept.relative_to(growing)
    assert moved.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("part", ["train", pytest.param("test", marks=SOAK)])
def test_a_worker_killed_while_writing(job: Job, part: str, tmp_path: Path) -> None:
    """The first part, and the last one, when all others are written."""
    target = tmp_path / "out"
    process = job.start(target, 2, f"worker={part}")
    _, error = process.communicate()
    assert process.returncode != 0
    assert "RunError: a worker process died" in error
    assert not (target / "train.zarr").exists()
    assert not (target / "test.zarr").exists()
    job.finish(target, 2)


@pytest.mark.parametrize(
    ("limit", "nproc"),
    [
        (200, 2),
        (9000, 1),
        *(pytest.param(*case, marks=SOAK) for case in [(200, 1), (1500, 1), (1500, 2), (9000, 2)]),
    ],
)
def test_no_room_for_a_file(job: Job, limit: int, nproc: int, tmp_path: Path) -> None:
    """The smaller limits stop shards, the larger ones the metadata."""
    target = tmp_path / "out"
    process = job.start(target, nproc, f"limit={limit}")
    _, error = process.communicate()
    assert process.returncode != 0
    assert "StoreError" in error
    assert "cannot be written" in error
    assert "run again" in error
    assert not (target / "train.zarr").exists()
    assert not (target / "test.zarr").exists()
    job.finish(target, nproc)
