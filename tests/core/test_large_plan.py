"""A cube of a million blocks is labelled and planned from its metadata, in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = '''
import json, sys, time
import cloudpickle
import numpy as np
import xarray as xr
import zarr
from ml4cube.core.statistics import Statistics
from ml4cube.sampling import planning
from ml4cube.sampling.counting import TileCount
from ml4cube.store.shard_encoding import Compressor
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.store.precision import Precision
from ml4cube.sampling.layout import layout_of, shard_tasks
from ml4cube.sampling.parts import Parts
from ml4cube.splits import apply_split, assign_block_split

def peak_megabytes():
    # not ru_maxrss, which begins with the memory of the process that started this one
    (peak,) = (line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
    return int(peak) / 1024

folder = sys.argv[1]
BLOCK = {"time": 8, "lat": 64, "lon": 64}
zarr.create_group(folder + "/cube.zarr").create_array(
    "t", shape=(8000, 6400, 640), chunks=tuple(BLOCK.values()), dtype="float32",
    dimension_names=tuple(BLOCK), fill_value=np.nan,
)

unread = xr.open_zarr(folder + "/cube.zarr", chunks=None, consolidated=False)
start = time.monotonic()
label = assign_block_split(unread, BLOCK, val=0.1, buffer=1)["split"]
assert label.chunks is not None and label.chunksizes["lat"][0] % 64 == 0
corner = label[:16, :64, :64].values
assert set(np.unique(corner)) <= {0, 1, 2, 255}
again = apply_split(unread, label.attrs["ml4cube_split"])["split"]
np.testing.assert_array_equal(again[:16, :64, :64].values, corner)
label_seconds, label_mb = time.monotonic() - start, peak_megabytes()

cube = assign_block_split(xr.open_zarr(folder + "/cube.zarr", consolidated=False), BLOCK, seed=1)

class Pretend:
    """An engine that takes tasks as a cluster does, and returns made-up counts."""
    tasks = largest = package = 0
    def run(self, fn, shared, tasks):
        self.package = len(cloudpickle.dumps((fn, shared)))
        found = Statistics.of({"t": np.ones(3, np.float32)}, part="train")
        counts, schema = (5, 16, 0, 0, 0, 0, 0, 0), {"t": ((8, 16, 16), "<f4")}
        for position, task in enumerate(tasks):
            self.tasks += 1
            if position % 500 == 0:
                self.largest = max(self.largest, len(cloudpickle.dumps(task)))
            yield position, [TileCount(i, counts, found, schema) for i, _ in task]

sampler = MultiProcSampler(
    cube, sample_size={"time": 8, "lat": 16, "lon": 16},
    train_cube=folder + "/train.zarr", test_cube=folder + "/test.zarr",
)
engine = Pretend()
_, plan = planning.make_plan(sampler.cube, engine, sampler.targets)
layout = layout_of(
    sampler.cube, plan, "train", None, {},
    Precision.parse(None, None), Compressor(),
)
shards, blocks_of_a_shard = 0, []
_, own_reader = sampler.cube.reader.cells.split(shares_memory=False)
tasks = shard_tasks(sampler.cube, plan, "train", layout, "shuffled", own_reader)
for _, shard, pieces in tasks:
    shards += 1
    if shard + 1 < layout.shard_count:
        tiles = [sampler.cube.tiled.tiles.block(piece.tile) for piece in pieces]
        blocks_of_a_shard.append(len({tuple(np.array(t.start) // (1, 4, 4)) for t in tiles}))
print(json.dumps({
    "blocks": len(Parts().blocks(sampler.cube.ds, sampler.cube.tiled.bound)),
    "tasks": engine.tasks, "largest": engine.largest,
    "package": engine.package, "shards": shards, "wanted": layout.shard_count,
    "mb": peak_megabytes(), "least_blocks": min(blocks_of_a_shard),
    "label_mb": label_mb, "label_seconds": label_seconds,
}))
'''


@pytest.mark.soak  # half a minute
def test_a_million_blocks(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path], cwd=ROOT, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["label_mb"] < 500  # of a cube that was opened without dask
    assert found["label_seconds"] < 60
    assert found["blocks"] == 1_000_000
    assert found["tasks"] <= 20_000
    assert found["mb"] < 1000
    assert found["least_blocks"] >= 16  # of one task, which owns whole shards
    assert found["largest"] < 5000  # bytes of a task; what all share is sent once
    assert found["package"] < 2_000_000
    assert found["shards"] == found["wanted"]
