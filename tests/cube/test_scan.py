"""One walk over the cells: the same blocks and bits on every engine and for every way to open."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import given
from hypothesis import strategies as st

from ml4cube.core.grid import Block
from ml4cube.cube.engine import DaskCluster, Engine, LocalProcesses, Threads
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.scan import Cells, blocks_of, scan
from ml4cube.evaluation import evaluate, score_cube
from ml4cube.insights import get_insights
from ml4cube.preprocessing import Statistics
from ml4cube.splits import assign_block_split
from tests.clusters import local_cluster

SIZES = {"time": 13, "lat": 10, "lon": 12}
CHUNKS = {"time": 4, "lat": 5, "lon": 12}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cube on disk whose sums differ with the order of summing."""
    rng = np.random.default_rng(0)
    values = rng.normal(280, 10, tuple(SIZES.values()))
    values[rng.random(values.shape) < 0.1] = np.nan
    coords = {
        "time": np.datetime64("2001-01-01", "ns") + np.arange(13) * np.timedelta64(30, "D"),
        "lat": np.linspace(-40, 50, 10),
    }
    ds = xr.Dataset({"a": (tuple(SIZES), values), "b": (tuple(SIZES), values**2)}, coords)
    ds = assign_block_split(ds, {"time": 3, "lat": 5}, 0.7)
    path = tmp_path_factory.mktemp("scan") / "cube.zarr"
    encoding = {name: {"chunks": tuple(CHUNKS.values())} for name in ("a", "b")}
    ds.to_zarr(path, encoding=encoding, consolidated=False)
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two workers that listen on loopback only."""
    with local_cluster(2) as cluster:
        yield cluster


OPENINGS: dict[str, Callable[[Path], xr.Dataset]] = {
    "lazily": lambda path: xr.open_zarr(path, consolidated=False, chunks=None),
    "by dask": lambda path: xr.open_zarr(path, consolidated=False),
    "in other chunks": lambda path: xr.open_zarr(path, consolidated=False).chunk(time=3, lon=5),
    "and loaded": lambda path: xr.open_zarr(path, consolidated=False, chunks=None).load(),
}
ENGINES: dict[str, Callable[[Any], Engine]] = {
    "1 thread": lambda _: Threads(1),
    "2 threads": lambda _: Threads(2),
    "5 threads": lambda _: Threads(5),
    "processes": lambda _: LocalProcesses(2),
    "cluster": lambda cluster: DaskCluster(cluster.scheduler_address),
}


def total_of(ds: xr.Dataset, engine: Engine | None = None) -> float:
    """Sum in an order that shows in the last bits."""
    reader = CubeReader.of_variables({"a": ds["a"].variable})
    blocks = blocks_of(reader, budget=300)
    assert len(blocks) > 5
    return float(sum(scan(reader, _sum, blocks, engine=engine)))


def _sum(_: Block, cells: Cells) -> float:
    return float(np.nansum(cells["a"].ravel()))


@pytest.mark.parametrize("opening", OPENINGS)
@pytest.mark.parametrize("engine", ENGINES)
def test_the_same_bits(path: Path, cluster: Any, engine: str, opening: str) -> None:
    expected = total_of(OPENINGS["lazily"](path), Threads(1))
    assert total_of(OPENINGS[opening](path), ENGINES[engine](cluster)) == expected


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:climatology|.*lacks a value|scores have no intervals")
@pytest.mark.parametrize("opening", OPENINGS)
def test_statistics_insights_and_scores_have_the_same_bits_on_a_cluster(
    path: Path, cluster: Any, opening: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from distributed import Client

    monkeypatch.setattr("ml4cube.cube.chunks.blocks.BLOCK_CELLS", 300)

    def results() -> list[Any]:
        ds = OPENINGS[opening](path)
        plain, weighted = Statistics.from_cube(ds), Statistics.from_cube(ds, weights="area")
        by_month = Statistics.from_cube(ds, dims=["time", "lon"], by="month", quantiles=[0.5])
        insights = get_insights(ds[["a", "b"]])  # files list their arrays in any order
        scores = score_cube(ds["a"], ds["b"].rename("a"), by="lat")
        card = evaluate(
            ds[["b"]].rename(b="a"), ds, baselines="climatology", by="lat", progress=False
        )
        numbers = [insights["mean"], insights["correlation"], scores["rmse"]]
        return [
            plain,
            weighted,
            by_month,
            card.to_json(),
            *(array.values.tobytes() for array in numbers),
        ]

    here = results()
    with Client(cluster):
        assert results() == here
    monkeypatch.setattr("ml4cube.cube.scan.usable_cores", lambda: 1)
    opening = "lazily"
    assert results() == here


class CountingStore(zarr.storage.MemoryStore):
    """Counts the reads of each object; copies of it, which zarr makes, too."""

    reads: ClassVar[Counter[str]] = Counter()

    async def get(self, key: str, *rest: Any, **more: Any) -> Any:
        if "/c/" in key:
            self.reads[key] += 1
        return await super().get(key, *rest, **more)


@given(
    shape=st.tuples(*[st.integers(1, 9)] * 3),
    chunks=st.tuples(*[st.integers(1, 5)] * 3),
    budget=st.integers(1, 300),
    uncut=st.sampled_from([(), ("x",), ("z", "y")]),
)
def test_each_chunk_is_read_once_and_the_budget_holds(
    shape: tuple[int, ...], chunks: tuple[int, ...], budget: int, uncut: tuple[str, ...]
) -> None:
    chunks = tuple(min(c, n) for c, n in zip(chunks, shape, strict=True))
    store = CountingStore()
    cells = np.arange(math.prod(shape)).reshape(shape)
    encoding = {"a": {"chunks": chunks, "compressors": None}}
    dims = ("x", "y", "z")
    xr.Dataset({"a": (dims, cells + 1)}).to_zarr(store, encoding=encoding, consolidated=False)
    store.reads.clear()
    variable = xr.open_zarr(store, consolidated=False, chunks=None)["a"].variable
    reader = CubeReader.of_variables({"a": variable})
    blocks = blocks_of(reader, uncut=uncut, budget=budget)
    parts = list(scan(reader, lambda _, cells: cells["a"], blocks, engine=Threads(1)))
    assert sorted(np.concatenate([part.ravel() for part in parts])) == list(cells.ravel() + 1)
    assert set(store.reads.values()) == {1}
    least = [
        n if dim in uncut else chunk for dim, n, chunk in zip(dims, shape, chunks, strict=True)
    ]
    for block in blocks:
        assert block.size <= max(budget, math.prod(least))
        assert all(
            block.shape[dim] == n for dim, n in zip(dims, shape, strict=True) if dim in uncut
        )


@given(st.data())
def test_blocks_within_a_region_have_each_of_its_cells_once(data: st.DataObject) -> None:
    cells = xr.Variable(
        tuple(SIZES), np.arange(math.prod(SIZES.values())).reshape([*SIZES.values()])
    )
    cells.encoding["preferred_chunks"] = CHUNKS
    region = {}
    for dim, n in SIZES.items():
        start = data.draw(st.integers(0, n - 1))
        region[dim] = slice(start, data.draw(st.integers(start + 1, n)))
    uncut = data.draw(st.sets(st.sampled_from([*SIZES])))
    reader = CubeReader.of_variables({"a": cells})
    budget = data.draw(st.sampled_from([1, 50, 10**4]))
    blocks = blocks_of(reader, uncut=uncut, budget=budget, within=region)
    read = [reader.read(block.slices)["a"].ravel() for block in blocks]
    assert sorted(np.concatenate(read)) == sorted(cells.isel(region).values.ravel())
    for dim in uncut:
        assert {(b.slices[dim].start, b.slices[dim].stop) for b in blocks} == {
            (region[dim].start, region[dim].stop)
        }


@given(st.lists(st.integers(0, 12), min_size=1, unique=True), st.sampled_from([None, 4]))
def test_steps_are_read_in_order_whatever_lies_between(
    wanted: list[int], chunk: int | None
) -> None:
    values = np.arange(13 * 3).reshape(13, 3)
    cells = xr.Variable(("time", "x"), values)
    if chunk is not None:
        cells.encoding["preferred_chunks"] = {"time": chunk}
    reader = CubeReader.of_variables({"a": cells, "b": xr.Variable("x", np.arange(3))})
    steps = np.array(sorted(wanted))
    read = reader.read_steps("time", steps, {"x": slice(1, 3)})
    np.testing.assert_array_equal(read["a"], values[steps, 1:])
    np.testing.assert_array_equal(read["b"], np.broadcast_to([1, 2], (len(steps), 2)))


def test_a_variable_without_cells_has_no_blocks() -> None:
    reader = CubeReader.of_variables({"a": xr.Variable(("x", "y"), np.empty((0, 3)))})
    assert list(scan(reader, _sum, blocks_of(reader))) == []


def test_what_a_cluster_holds_is_scanned(path: Path, cluster: Any) -> None:
    from distributed import Client

    ds = OPENINGS["by dask"](path)
    with Client(cluster):
        assert total_of(ds.persist()) == total_of(ds)


def test_a_task_of_a_cluster_scans_in_its_own_thread(path: Path) -> None:
    """It would wait for ever for its own cluster, of which it holds the only thread."""
    from distributed import Client

    with local_cluster(1) as cluster, Client(cluster) as client:
        task = client.submit(lambda: total_of(OPENINGS["lazily"](path)))
        assert task.result(timeout=60) == total_of(OPENINGS["lazily"](path))
