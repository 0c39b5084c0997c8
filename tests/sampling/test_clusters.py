"""The sampler beside a dask cluster: what cannot work is refused before anything is written."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ml4cube.core.errors import InvalidValueError, RunError
from ml4cube.cube.engine import Threads, choose_engine
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.preprocessing import get_statistics
from ml4cube.store.format import open_store
from tests.clusters import local_cluster
from tests.cubes import cell_id_cube
from tests.samplestores import paths


def sampler(place: Any, ds: Any = None, **options: Any) -> MultiProcSampler:
    return MultiProcSampler(
        cell_id_cube({"time": 8, "lat": 6}, "float64") if ds is None else ds,
        block_size={"time": 2},
        nproc=1,
        scale_fn=None,
        **paths(place),
        **options,
    )


@pytest.fixture(params=["threads", "processes"])
def client(request: Any) -> Iterator[Any]:
    """The active client, of a cluster of either kind."""
    from distributed import Client, LocalCluster

    processes = request.param == "processes"
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": None}
    with LocalCluster(processes=processes, **options) as cluster, Client(cluster) as client:
        client.in_processes = processes
        yield client


@pytest.mark.slow
@pytest.mark.parametrize("named", [False, True])
def test_memory_is_seen_by_workers_of_this_process_only(client: Any, named: bool) -> None:
    place = f"memory://clusters-{client.id}"
    made = sampler(place, client=client if named else None)
    if client.in_processes:
        with pytest.raises(InvalidValueError, match=r"this process only.*close the client"):
            made.run()
    else:
        made.run()
        assert open_store(f"{place}/train.zarr", verify=True).sizes["samples"] == 36


def beside_an_asynchronous_client(work: Callable[[Any], Any]) -> Any:
    """Return what a function of an active asynchronous client returns."""
    from distributed import Client

    async def run(address: str) -> Any:
        async with Client(address, asynchronous=True) as client:
            return work(client)

    with local_cluster() as cluster:
        return asyncio.run(asyncio.wait_for(run(cluster.scheduler_address), 30))


def test_an_asynchronous_client_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidValueError, match=r"asynchronous=False"):
        beside_an_asynchronous_client(lambda client: sampler(tmp_path, client=client))
    assert not list(tmp_path.iterdir())


def test_work_beside_an_active_asynchronous_client_runs_here(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cube = cell_id_cube({"time": 8, "lat": 6}, dask_chunks={"time": 2}) * 2
    statistics = beside_an_asynchronous_client(lambda _: get_statistics(cube))
    assert "asynchronous=False" in caplog.text
    assert statistics == get_statistics(cube)
    beside_an_asynchronous_client(lambda _: sampler(tmp_path, ds=cube).run())
    assert open_store(f"{tmp_path}/train.zarr").sizes["samples"] == 36


@pytest.fixture
def scheduler() -> Iterator[Any]:
    """A cluster on loopback, to be stopped by the test."""
    with local_cluster() as cluster:
        yield cluster


def slow(_: object, task: int) -> int:
    time.sleep(0.1)
    return task


def test_a_client_that_is_closed_before(tmp_path: Path, scheduler: Any) -> None:
    from distributed import Client

    with Client(scheduler, set_as_default=False) as client:
        made = sampler(tmp_path, client=client)
    with pytest.raises(RunError, match=r"closed.*connect.*run again"):
        made.run()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("gone", ["client", "scheduler"])
@pytest.mark.parametrize("later", [False, True])
def test_a_client_or_scheduler_that_goes_meanwhile(scheduler: Any, gone: str, later: bool) -> None:
    from distributed import Client

    client = Client(scheduler, set_as_default=False)
    stop = client.close if gone == "client" else scheduler.close
    with choose_engine(Threads(1), client) as engine:
        run = engine.run(slow, None, range(50))
        next(run)
        threading.Timer(0.3, stop).start() if later else stop()
        with pytest.raises(RunError, match=r"is closed, or its scheduler is gone"):
            list(run)
    client.close()


def test_a_cluster_without_workers_is_warned_of(
    scheduler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    from distributed import Client

    with choose_engine(Threads(1), scheduler.scheduler_address):
        assert "has no workers" not in caplog.text
    with Client(scheduler, set_as_default=False) as client:
        client.retire_workers()
    with choose_engine(Threads(1), scheduler.scheduler_address):
        assert "has no workers" in caplog.text


def test_a_cube_kept_on_a_cluster_is_sampled(client: Any, tmp_path: Path) -> None:
    cube = cell_id_cube({"time": 8, "lat": 6}, "float64", dask_chunks={"time": 2})
    for number, kept in enumerate((cube.persist(), cube.persist() + 0)):
        train, _ = sampler(tmp_path / str(number), ds=kept).get_datasets()
        assert set(train.a.values.ravel()) <= set(cube.a.values.ravel())
        assert train.sizes["samples"] == 36
