"""Cubes and stores behind URLs: object storage, memory, zarr stores, Icechunk sessions."""

from __future__ import annotations

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import numpy as np
import pytest
import xarray as xr
import zarr
from moto.server import ThreadedMotoServer
from zarr.storage import StorePath

from ml4cube import open_store
from ml4cube.core.errors import CubeError, RunError, StoreError, StoreExistsError
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.ledger import folders, local, remote
from ml4cube.ledger.draft import Draft, WriteErrors
from ml4cube.ledger.folders import LOCK, filesystem
from ml4cube.ledger.in_zarr import ZarrFolder
from ml4cube.ledger.locations import folder_of, location_of
from ml4cube.ledger.remote import RemoteFolder, RemoteLock
from ml4cube.sampling.identity.provenance import Call
from ml4cube.sampling.parts import Parts
from ml4cube.sampling.sampled_cube import sample_cube
from ml4cube.store.format import SAMPLES
from tests.cubes import cell_id_cube
from tests.faults.test_sampling_faults import tree
from tests.samplestores import paths

OPTIONS: dict[str, Any] = {"sample_size": {"lat": 2}, "block_size": {"time": 4}, "progress": False}


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """An S3 server on loopback."""
    with pytest.MonkeyPatch.context() as patch:
        moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
        moto.start()
        host, port = moto.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        yield host
        moto.stop()


@pytest.fixture
def bucket(server: str, tmp_path: Path) -> str:
    """A new bucket."""
    fsspec.filesystem("s3").clear_instance_cache()
    filesystem.cache_clear()
    name = f"bucket-{abs(hash(tmp_path))}"
    fsspec.filesystem("s3").mkdir(name)
    return f"s3://{name}"


def cube() -> xr.Dataset:
    return cell_id_cube({"time": 24, "lat": 6}, "float32", dask_chunks={"time": 4, "lat": 6})


def sample(source: Any, place: str, nproc: int, **more: Any) -> MultiProcSampler:
    return MultiProcSampler(source, nproc=nproc, **paths(place), **(OPTIONS | more))


def contents(place: str) -> dict[str, bytes]:
    fs, root = filesystem(place)
    fs.invalidate_cache()
    return {name[len(root) + 1 :]: fs.cat_file(name) for name in fs.find(root)}


def local_bytes(source: Any, folder: Path) -> dict[str, bytes]:
    sample(source, str(folder), 1).run()
    return tree(folder)


GONE = ConnectionError("the network is gone")


def offline(*args: Any, **options: Any) -> Any:
    raise GONE


def counted(
    call: Callable[..., Any], left: list[int], error: BaseException = GONE
) -> Callable[..., Any]:
    """Let calls succeed as long as steps are left, then none."""

    def step(*args: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return call(*args, **options)

    return step


def run_offline(what: str, *args: Any, **options: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"ml4cube.ledger.{what}", offline)
        with pytest.raises(StoreError, match="network is gone"):
            sample(*args, **options).run()


def wait_until(condition: Callable[[], bool], timeout_s: float = 30) -> None:
    """Wait for a condition, and fail if it does not come true in time."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.05)


@pytest.mark.slow
def test_stores_on_s3_are_the_same_bytes(bucket: str, tmp_path: Path) -> None:
    train, _ = sample(cube(), bucket, 2).get_datasets()
    assert contents(bucket) == local_bytes(cube(), tmp_path / "local")
    loaded(f"{bucket}/train.zarr", train)


def loaded(place: Any, train: xr.Dataset) -> Any:
    """Load all samples of a store, which are those of `train`; return what loads them."""
    pytest.importorskip("torch")
    from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader

    samples = PTXrDataset(place, features="a")
    loader = prep_dataloader(samples, batch_size=8, drop_last=False)
    seen = np.concatenate([np.asarray(batch) for batch in loader])
    assert sorted(seen[:, 0, 0]) == sorted(train["a"].values[:, 0])
    return samples


def test_stores_in_memory(tmp_path: Path) -> None:
    place = f"memory://{tmp_path.name}"
    train, _ = sample(cube(), place, 1).get_datasets()
    again = sample(cube(), place, 1)
    assert again.run() is None  # they exist already
    assert train.sizes == again.get_datasets()[0].sizes
    assert set(fsspec.filesystem("memory").ls(f"/{tmp_path.name}", detail=False)) == {
        f"/{tmp_path.name}/train.zarr",
        f"/{tmp_path.name}/test.zarr",
    }
    with pytest.raises(CubeError, match="this process only; write it with nproc=1"):
        sample(cube(), place, 2)


@pytest.mark.slow
def test_killed_at_any_step_of_cleaning_up(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(remote, "_LOCK_EXPIRES_AFTER_S", 0.0)
    memory = type(fsspec.filesystem("memory"))
    options = {"sample_size": None, "block_size": {"time": 2}}
    source = cell_id_cube({"time": 4}, "float32")
    for steps in itertools.count():
        place, left = f"memory://{tmp_path.name}/{steps}", [steps]
        with monkeypatch.context() as patch:
            patch.setattr(memory, "rm_file", counted(memory.rm_file, left, KeyboardInterrupt()))
            with contextlib.suppress(KeyboardInterrupt):
                sample(source, place, 1, **options).run()
                break
        sample(source, place, 1, **options).run()
        assert not [name for name in contents(place) if ".partial" in name]
        open_store(f"{place}/train.zarr", verify=True)
    assert steps > 20


@pytest.mark.parametrize("local", [False, True])
def test_a_task_whose_note_is_damaged_is_done_again(tmp_path: Path, local: bool) -> None:
    place = tmp_path / "train.zarr" if local else f"memory://{tmp_path.name}/train.zarr"
    notes = b"\xff", b"[1]", b'{"a/c/0": 1}', b"{"
    with Draft(place, "call", SAMPLES) as held:
        held.begin()
        for task in range(len(notes) + 1):
            held.record(task, {})
        for task, note in enumerate(notes):
            held.journal.write(f"{task}.json", note)
        held.journal.write("9.json.0a.tmp", b"{}")  # killed while it was written
    with Draft(place, "call", SAMPLES) as held:
        held.begin()
        assert held.finished_tasks == {len(notes): {}}
    with Draft(place, "call", SAMPLES) as held:
        held.begin(resume=False)
        assert held.journal.list() == {}


@pytest.mark.parametrize("local", [False, True])
def test_other_files_in_a_work_folder_stay(tmp_path: Path, local: bool) -> None:
    place = str(tmp_path) if local else f"memory://{tmp_path.name}"
    fs, root = filesystem(f"{place}/train.zarr.partial")
    fs.makedirs(root)
    # the others as tasks of a stopped run may write them
    for name in ("lock", "ml4cube-store-0123456789ab/0", "ml4cube-journal-0123456789ab/0.json"):
        folder_of(f"{place}/train.zarr.partial").write(name, b"mine")
    sample(cube(), place, 1).run()
    assert contents(f"{place}/train.zarr.partial") == {"lock": b"mine"}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["exp[1]", "exp*", "exp?"])
def test_wildcards_in_urls_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CubeError, match=r"train_cube='memory:.*as wildcards.*choose another name"):
        sample(cube(), f"memory://{tmp_path.name}/{name}", 1)
    sample(cube(), f"file://{tmp_path}/{name}", 1).run()
    sample(cube(), str(tmp_path / name), 1, seed=5, overwrite=True).run()
    assert open_store(tmp_path / name / "train.zarr", verify=True).sizes["samples"]


@pytest.mark.slow
def test_variables_may_be_named_like_wildcards(bucket: str) -> None:
    source = cube().rename(a="a[1]")
    sample(source, bucket, 1).run()
    sample(source, bucket, 1, seed=5, overwrite=True).run()
    assert not [name for name in contents(bucket) if ".partial" in name]
    open_store(f"{bucket}/train.zarr", verify=True)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("memory://same", "memory:///same"),
        ("memory://same/", "memory://same"),
        ("memory://same", "memory:///same.partial"),
        ("memory://same.partial/a", "memory:///same"),
        ("memory://same.partial", "memory:///same.partial.partial"),
    ],
)
def test_one_location_with_two_names_is_refused(one: str, other: str) -> None:
    for train, test in ((one, other), (other, one)):
        with pytest.raises(CubeError, match=r"another part(; give each|'s target)"):
            MultiProcSampler(cube(), train_cube=train, test_cube=test, nproc=1)
    MultiProcSampler(cube(), train_cube=one, test_cube="memory://same2", nproc=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "zarr_format"),
    [("s3", 3), ("memory", 2), ("MemoryStore", 3), ("icechunk", 3)],
)
def test_cubes_anywhere(bucket: str, tmp_path: Path, kind: str, zarr_format: int) -> None:
    """Two workers read them; cells in the memory of this process are sent, not read as gaps."""
    ds = cube()
    source: Any
    if kind == "icechunk":
        source = icechunk_cube(ds, tmp_path / "repository")
    elif kind == "MemoryStore":
        source = zarr.storage.MemoryStore()
        ds.to_zarr(source, zarr_format=zarr_format, consolidated=False)
    else:
        source = f"{bucket}/c.zarr" if kind == "s3" else f"memory://{tmp_path.name}/c.zarr"
        ds.to_zarr(source, zarr_format=zarr_format)
    found = sample(source, str(tmp_path / "out"), 2).get_datasets()
    wanted = sample(ds, str(tmp_path / "wanted"), 1).get_datasets()
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(ours["a"].values, theirs["a"].values)


def icechunk_cube(ds: xr.Dataset, path: Path) -> Any:
    import icechunk

    repository = icechunk.Repository.create(icechunk.local_filesystem_storage(str(path)))
    session = repository.writable_session("main")
    ds.compute().to_zarr(session.store, consolidated=False)
    session.commit("a cube")
    return repository.readonly_session("main").store


@pytest.mark.slow
def test_a_bucket_or_server_that_is_not_there_is_named(
    bucket: str, tmp_path: Path, monkeypatch: Any
) -> None:
    with pytest.raises(StoreError, match=r"s3://nobody/train.zarr cannot be written: .*bucket"):
        sample(cube(), "s3://nobody", 1).run()

    def fail(self: RemoteFolder) -> dict[str, int]:
        raise RuntimeError("Could not connect")  # errors of botocore are not OSErrors

    monkeypatch.setattr(RemoteFolder, "list", fail)
    with pytest.raises(StoreError, match=r"train.zarr cannot be written: Could not connect"):
        sample(cube(), f"memory://{tmp_path.name}", 1).run()


@pytest.mark.parametrize("appears", ["a file", "a store", "a file after an outage"])
def test_files_that_appear_during_a_run_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, appears: str
) -> None:
    place = f"memory://{tmp_path.name}"
    fs, root = filesystem(place)
    sample(cube(), f"{place}/other", 1, seed=5).run()
    if appears == "a file after an outage":
        run_offline("remote.RemoteFolder.copy_from", cube(), place, 1)
    publish = Draft.publish

    def appear(self: Draft, overwrite: bool) -> None:
        if appears == "a store":
            fs.copy(f"{root}/other/train.zarr", f"{root}/train.zarr", recursive=True)
        else:
            fs.pipe_file(f"{root}/train.zarr/notes.txt", b"mine")
        publish(self, overwrite)

    with monkeypatch.context() as patch:
        patch.setattr(Draft, "publish", appear)
        told = r"has 1 files .* such as 'notes.txt'|did not exist when this run began"
        with pytest.raises(StoreExistsError, match=rf"train.zarr ({told})"):
            sample(cube(), place, 1, seed=5).run()
    if appears == "a store":
        assert contents(f"{place}/train.zarr") == contents(f"{place}/other/train.zarr")
        return
    assert fs.cat_file(f"{root}/train.zarr/notes.txt") == b"mine"
    fs.rm_file(f"{root}/train.zarr/notes.txt")
    sample(cube(), place, 1).run()
    open_store(f"{place}/train.zarr", verify=True)


@pytest.mark.slow
@pytest.mark.parametrize("allowed", range(0, 60, 7))
def test_an_outage_is_reported_and_the_run_is_resumed(
    tmp_path: Path, monkeypatch: Any, allowed: int
) -> None:
    """Cleaning up then fails too, which does not hide the error."""
    place, steps = f"memory://{tmp_path.name}", [allowed]
    with monkeypatch.context() as patch:
        for name in ("write", "create", "read", "size", "list", "copy_from", "remove", "clear"):
            patch.setattr(RemoteFolder, name, counted(getattr(RemoteFolder, name), steps))
        with pytest.raises(StoreError, match=r"t(rain|est)\.zarr cannot be written: the net"):
            sample(cube(), place, 1).run()
    monkeypatch.setattr(remote, "_LOCK_EXPIRES_AFTER_S", 0.0)
    sample(cube(), place, 1).run()
    assert contents(place) == local_bytes(cube(), tmp_path / "local")


def written(draft: Draft, content: bytes) -> dict[str, bytes]:
    names = ("a/c/0", "a/c/1", "zarr.json", "manifest/zarr.json")
    for name in names:
        draft.store_folder.write(name, content)
    return dict.fromkeys(names, content)


def test_a_run_that_wakes_late_writes_into_no_other_store(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(remote, "_LOCK_EXPIRES_AFTER_S", 0.0)
    place = f"memory://{tmp_path.name}/train.zarr"
    with Draft(place, "one", SAMPLES) as late, Draft(place, "two", SAMPLES) as held:
        held.begin()
        new = written(held, b"new")
        written(late, b"old")
        held.publish()
    assert contents(place) == new


@pytest.mark.parametrize("step", [("remove", "zarr.json"), ("copy_from", ["a/c/0"])])
def test_a_run_that_slept_while_publishing_spares_its_successor(
    step: tuple[str, Any], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(remote, "_LOCK_EXPIRES_AFTER_S", 0.0)
    monkeypatch.setattr(folders, "COPIED_AT_ONCE", 1)
    place = f"memory://{tmp_path.name}/train.zarr"
    method, argument = step
    does = getattr(RemoteFolder, method)

    def sleeps(self: RemoteFolder, *given: Any) -> None:
        does(self, *given)
        if given[-1] == argument:
            monkeypatch.setattr(RemoteFolder, method, does)
            with Draft(place, "two", SAMPLES) as held:
                held.begin()
                written(held, b"new")
                held.publish()

    with Draft(place, "one", SAMPLES) as late:
        late.begin()
        old = written(late, b"old")
        monkeypatch.setattr(RemoteFolder, method, sleeps)
        with pytest.raises(RunError, match="another run took over"):
            late.publish()
    assert contents(place) == dict.fromkeys(old, b"new")


def test_an_interrupted_copy_is_replaced_also_after_a_run_that_finished_no_task(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(folders, "COPIED_AT_ONCE", 1)
    place = f"memory://{tmp_path.name}/train.zarr"
    with Draft(place, "one", SAMPLES) as cut_off, monkeypatch.context() as patch:
        cut_off.begin()
        cut_off.record(0, {})
        written(cut_off, b"old")
        patch.setattr(RemoteFolder, "copy_from", counted(RemoteFolder.copy_from, [1]))
        with pytest.raises(ConnectionError):
            cut_off.publish()
    assert contents(place) == {"manifest/zarr.json": b"old"}
    with Draft(place, "two", SAMPLES) as held:
        held.begin()
    with Draft(place, "three", SAMPLES) as held:
        held.begin()
        new = written(held, b"new")
        held.publish()
    assert contents(place) == new


def test_a_released_lock_is_not_renewed(tmp_path: Path, monkeypatch: Any) -> None:
    memory = type(fsspec.filesystem("memory"))
    put = memory.pipe_file

    def slow(*args: Any, **options: Any) -> None:
        time.sleep(0.02)
        put(*args, **options)

    monkeypatch.setattr(memory, "pipe_file", slow)
    monkeypatch.setattr(remote, "_LOCK_RENEWED_EVERY_S", 0.01)
    for number in range(10):
        place = f"memory://{tmp_path.name}/{number}"
        with Draft(place, "call", SAMPLES) as held:
            held.begin()
            held.record(0, {})
            time.sleep(0.003 * number)
        time.sleep(0.03)
        assert LOCK not in held.work_folder.list()


@pytest.mark.slow
def test_two_runs_on_one_target(bucket: str, monkeypatch: Any) -> None:
    target = f"{bucket}/train.zarr"
    with Draft(target, "call", SAMPLES):
        with pytest.raises(RunError, match="another run is writing"):
            Draft(target, "call", SAMPLES)
        monkeypatch.setattr(
            remote, "_LOCK_EXPIRES_AFTER_S", 0.0
        )  # as if its owner had been killed long ago
        Draft(target, "call", SAMPLES).close()


def test_a_lock_is_renewed_when_the_network_is_back(
    tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(remote, "_LOCK_RENEWED_EVERY_S", 0.02)
    put = RemoteFolder.write
    with Draft(f"memory://{tmp_path.name}/train.zarr", "call", SAMPLES) as held:
        monkeypatch.setattr(RemoteFolder, "write", offline)
        wait_until(lambda: "trying again: the network is gone" in caplog.text)
        first = held.work_folder.read(LOCK)
        monkeypatch.setattr(RemoteFolder, "write", put)
        wait_until(lambda: held.work_folder.read(LOCK) != first)


def test_errors_that_are_not_of_the_file_system_are_passed_on() -> None:
    for error in (MemoryError(), AssertionError("broken")):
        with pytest.raises(type(error)), WriteErrors.of("memory://train.zarr"):
            raise error


def test_a_run_that_was_taken_over_ends(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(remote, "_LOCK_RENEWED_EVERY_S", 0.02)
    monkeypatch.setattr(remote, "_LOCK_EXPIRES_AFTER_S", 0.0)
    place = f"memory://{tmp_path.name}/train.zarr"
    with Draft(place, "call", SAMPLES) as first:
        lock = first.lock
        assert isinstance(lock, RemoteLock)
        lock._renewal_ended.set()  # as if it had been without network
        with Draft(place, "call", SAMPLES) as second:
            lock._renewal_ended.clear()
            lock._keep_renewing()  # ends by itself
            for step in (first.publish, lambda: first.record(0, {})):
                with pytest.raises(RunError, match="another run took over memory://"):
                    step()
            first.discard()
            assert second.lock.is_held


@pytest.mark.slow
def test_cubes_on_two_hosts_are_not_the_same(bucket: str, monkeypatch: Any) -> None:
    cube().to_zarr(f"{bucket}/a", consolidated=False)
    host = os.environ["AWS_ENDPOINT_URL"]
    other = host.replace("127.0.0.1", "localhost")

    def call(**options: Any) -> str:
        source = xr.open_zarr(f"{bucket}/a", consolidated=False, storage_options=options)
        sampled = sample_cube(source, Parts(block_size={"time": 4}))
        return Call.of_samples(sampled, {}).id

    first = call()
    for name in ({"endpoint_url": host}, {"client_kwargs": {"endpoint_url": host}}):
        assert call(**name) == call(**name)
    assert call(endpoint_url=other) not in (first, call(endpoint_url=host))
    assert call(key="test", secret="test") == first
    monkeypatch.setenv("AWS_ENDPOINT_URL", other)
    assert call(skip_instance_cache=True) != first


def inside(kind: str) -> tuple[Any, Any]:
    """Return a writable zarr store that is not a folder of files, and what makes it durable."""
    if kind == "MemoryStore":
        return zarr.storage.MemoryStore(), lambda: None
    import icechunk

    repository = icechunk.Repository.create(icechunk.in_memory_storage())
    session = repository.writable_session("main")
    return session.store, lambda: session.commit("samples")


def files_in(store: Any) -> dict[str, bytes]:
    folder = ZarrFolder(store)
    return {name: folder.read(name) for name in folder.list()}


def into(store: Any, source: Any, nproc: int = 1, **more: Any) -> MultiProcSampler:
    return MultiProcSampler(
        source,
        train_cube=StorePath(store, "train.zarr"),
        test_cube=StorePath(store, "test.zarr"),
        nproc=nproc,
        **(OPTIONS | more),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "nproc"), [("MemoryStore", 1), ("icechunk", 2)])
def test_stores_inside_zarr_stores_are_the_same_bytes(
    tmp_path: Path, kind: str, nproc: int
) -> None:
    store, commit = inside(kind)
    train, _ = into(store, cube(), nproc).get_datasets()
    commit()
    found = files_in(store)
    del found["zarr.json"]  # the group above the stores, which is made too
    assert found == local_bytes(cube(), tmp_path / "local")
    place = StorePath(store, "train.zarr")
    assert into(store, cube()).run() is None  # they exist already
    plain = xr.open_zarr(store, group="train.zarr", consolidated=False)
    for opened in (open_store(place, verify=True), plain):
        np.testing.assert_array_equal(opened["a"].values, train["a"].values)
    here, local = loaded(place, train), loaded(tmp_path / "local/train.zarr", train)
    for name, values in here.coords(range(9)).items():
        np.testing.assert_array_equal(values, local.coords(range(9))[name])
    with pytest.raises(StoreExistsError, match=r"at 'train.zarr' exists and was made by another"):
        into(store, cube(), seed=5).run()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["MemoryStore", "icechunk"])
def test_a_zarr_store_is_overwritten_only_by_whole_stores(kind: str) -> None:
    store, _ = inside(kind)
    into(store, cube()).run()
    before = files_in(store)

    def fail(sample: Any) -> Any:
        raise ValueError("no such luck")

    with pytest.raises(RunError, match="no such luck"):
        into(store, cube(), callback=fail, overwrite=True).run()
    assert files_in(store) == before
    into(store, cube(), overwrite=True, seed=5).run()
    assert open_store(StorePath(store, "train.zarr"), verify=True).sizes["samples"] == 60
    zarr.create_group(store, path="train.zarr/notes")
    with pytest.raises(StoreExistsError, match=r"has 1 files that the sampler did not write"):
        into(store, cube(), overwrite=True).run()


@pytest.mark.slow
@pytest.mark.parametrize(("overwrite", "kind"), [(False, "MemoryStore"), (True, "icechunk")])
def test_a_write_into_a_zarr_store_that_was_cut_off_is_done_again(
    kind: str, overwrite: bool, monkeypatch: Any
) -> None:
    store, _ = inside(kind)
    if overwrite:
        into(store, cube(), seed=5).run()
    left = [0]
    for name in ("write", "remove"):
        monkeypatch.setattr(ZarrFolder, name, counted(getattr(ZarrFolder, name), left))
    source = cell_id_cube({"time": 4}, "float32")
    options = {"sample_size": None, "block_size": {"time": 2}, "overwrite": overwrite}
    told = set()
    for steps in itertools.count(0, 2):
        left[0] = steps
        try:
            into(store, source, **options).run()
            break
        except StoreError as error:
            told.add(str(error).partition("written: ")[2])
    assert told == {"the network is gone; run again"}  # TMPDIR is not named, as it has room
    assert steps > 15
    for part in ("train.zarr", "test.zarr"):
        open_store(StorePath(store, part), verify=True)


def test_targets_that_cannot_be_written_are_named(tmp_path: Path) -> None:
    store, first, second, old = (zarr.storage.MemoryStore() for _ in range(4))
    zarr.create_group(old, zarr_format=2).create_array("field", shape=(2,), dtype="f4")
    missing = zarr.storage.ZipStore(tmp_path / "missing.zip", mode="r", read_only=False)
    inside_itself = r"'MemoryStore at 'a'' and another part's target|inside one another"
    for train, test, told in (
        ("gopher://x/train.zarr", "test", r"train_cube='gopher://x/train.zarr' cannot be reached"),
        (f"zip://a::{tmp_path}/missing.zip", "test", r"'zip:.*' cannot be reached: .*missing.zip"),
        (missing, "test", r"train_cube: zip:.*missing.zip cannot be opened: "),
        (store, StorePath(store, "a"), inside_itself),
        (first, first, "is also the target of another part"),
        (store.with_read_only(True), tmp_path, r"train_cube: the MemoryStore is read-only; give a"),
        (zarr.storage.LocalStore(tmp_path, read_only=True), "test", "the LocalStore is read-only"),
        (3, "test", r"train_cube must be a path, a URL, a zarr .* got 3"),
        ("", "test", r"train_cube must be a path.* got ''"),
        (
            StorePath(old, "train"),
            "test",
            r"at 'train'\" is inside the group 'MemoryStore' of zarr v2",
        ),
    ):
        with pytest.raises(CubeError, match=told):
            MultiProcSampler(cube(), train_cube=train, test_cube=test)
    MultiProcSampler(cube(), train_cube=first, test_cube=second)
    client = SimpleNamespace(submit=None, scheduler_info=None)
    with pytest.raises(CubeError, match=r"MemoryStore at 'train.zarr' is written through a folder"):
        into(store, cube(), client=client).run()


def test_zarr_stores_of_files_are_used_by_their_paths(tmp_path: Path) -> None:
    place = zarr.storage.LocalStore(tmp_path / "train.zarr")
    sampler = MultiProcSampler(
        cube(), train_cube=place, test_cube=tmp_path / "test.zarr", nproc=1, **OPTIONS
    )
    assert sampler.targets["train"] == tmp_path / "train.zarr"
    url = "memory://a/train.zarr"
    assert location_of("store", zarr.storage.FsspecStore.from_url(url)).startswith("memory://")


def test_a_full_temporary_folder_is_named_when_writing_into_a_zarr_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store, _ = inside("MemoryStore")

    def full(path: Path, *pieces: bytes, sync: bool = True) -> tuple[int, str]:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(local, "write_file", full)
    with pytest.raises(
        StoreError, match=r"No space left.*make room in .*\(TMPDIR\), where its files are first"
    ):
        into(store, cube()).run()
    assert not ZarrFolder(store).list()


@pytest.mark.filterwarnings("error:Duplicate name")
def test_a_zip_store_is_opened_and_not_overwritten(tmp_path: Path) -> None:
    def fail(sample: Any) -> Any:
        raise ValueError("asked for before it was refused")

    store = zarr.storage.ZipStore(tmp_path / "a.zip", mode="w")
    into(store, cube()).run()
    with pytest.raises(StoreExistsError, match=r"ZipStore at 'train\.zarr' exists.* a new one"):
        into(store, cube(), overwrite=True, callback=fail).run()
    store.close()
    again = zarr.storage.ZipStore(tmp_path / "a.zip", mode="r")
    assert open_store(StorePath(again, "train.zarr"), verify=True).sizes["samples"] == 60
