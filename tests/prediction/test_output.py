"""Where predictions are written: complete or absent, resumed after a kill, with the same bytes."""

from __future__ import annotations

import errno
import functools
import json
import os
import random
import resource
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from zarr.storage import MemoryStore, StorePath

from ml4cube.core.errors import InvalidValueError, RunError, StoreError, StoreExistsError
from ml4cube.ledger.draft import Draft
from ml4cube.ledger.folders import filesystem, size_and_hash
from ml4cube.ledger.in_zarr import ZarrFolder
from ml4cube.ledger.local import LocalFolder
from ml4cube.ledger.locations import folder_of, location_of, target_of
from ml4cube.ledger.manifest import MANIFEST, read_manifest
from ml4cube.prediction import predict_cube
from ml4cube.prediction.output.files import PREDICTIONS, open_prediction
from ml4cube.prediction.output.netcdf import find_foreign_in_netcdf
from ml4cube.training.ranks.dist import launch
from ml4cube.training.ranks.engine import all_ranks_or_none
from tests.distributed_runner import kept_ranks
from tests.faults.processes import Launcher, wait_for
from tests.faults.test_sampling_faults import tree
from tests.prediction.output_job import CALLS, GAP_BLOCK, STEPS, Logged, source
from tests.store.test_remote import bucket, server  # noqa: F401 (fixtures)

# Calls that a resumed run makes again: those of the block at which it stopped, and of the first
# batch, from which the layout of results is known.
AGAIN = 2
JOB = Path(__file__).with_name("output_job.py")


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The files of an undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    predict_cube(Logged(folder / "log"), source(), out=folder / "cube.zarr", progress=False)
    assert (folder / "log").stat().st_size == CALLS
    return without_call(tree(folder / "cube.zarr"))


@pytest.fixture
def model(tmp_path: Path) -> Logged:
    return Logged(tmp_path / "log")


def without_call(files: dict[str, bytes]) -> dict[str, Any]:
    """Files but for the call, which has the path of the model's log."""
    group = json.loads(files["zarr.json"])
    attributes = group["attributes"]
    description = json.loads(attributes["ml4cube_prediction"])
    assert description.pop("call_parts")["source"]
    assert len(description.pop("call")) == 64
    attributes["ml4cube_prediction"] = description
    listed = json.loads(files[MANIFEST])["attributes"]["files"]
    assert listed.pop("zarr.json") == list(size_and_hash(files["zarr.json"]))
    return {**files, "zarr.json": group, MANIFEST: listed}


def stopped(stop_at: int, stop_by: str, *args: Any, **options: Any) -> None:
    """Predict until the model's call `stop_at`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STOP_AT", str(stop_at))
        patch.setenv("STOP_BY", stop_by)
        error = {"interrupt": KeyboardInterrupt, "error": ZeroDivisionError}[stop_by]
        with pytest.raises(error):
            predict_cube(*args, progress=False, **options)


def contents(url: str) -> dict[str, bytes]:
    fs, root = filesystem(url)
    return {name[len(root) + 1 :]: fs.cat_file(name) for name in fs.find(root)}


# --- killed and run again --------------------------------------------------------------------


@pytest.mark.slow
def test_a_killed_run_goes_on_and_ends_in_the_same_bytes(tmp_path, expected):
    log, path, launcher = tmp_path / "log", tmp_path / "cube.zarr", Launcher(tmp_path)
    killed = launcher.python(str(JOB), str(log), str(path), STOP_AT="4", STOP_BY="kill")
    assert killed.finish(60) == -signal.SIGKILL, killed.said
    assert not path.exists()
    again = launcher.python(str(JOB), str(log), str(path))
    assert again.finish(60) == 0, again.said
    assert log.stat().st_size == CALLS + AGAIN
    assert without_call(tree(path)) == expected
    assert not Path(f"{path}.partial").exists()


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4))
def test_a_run_killed_again_and_again_ends_in_the_same_bytes(tmp_path, expected, seed):
    log, path, launcher = tmp_path / "log", tmp_path / "cube.zarr", Launcher(tmp_path)
    rng = random.Random(seed)
    for kill in range(6):
        calls = log.stat().st_size if log.exists() else 0
        run = launcher.python(str(JOB), str(log), str(path), SLEEP_S="0.05")
        if kill == 5:
            assert run.finish(60) == 0, run.said
            break
        wait_for(lambda calls=calls: log.exists() and log.stat().st_size > calls, run)
        time.sleep(rng.random() / 10)
        if run.process.poll() is not None:
            break
        run.process.kill()
        run.finish(60)
        assert not path.exists()
    assert log.stat().st_size <= CALLS + 5 * AGAIN
    assert without_call(tree(path)) == expected
    assert not Path(f"{path}.partial").exists()


@pytest.mark.parametrize("where", ["cube.zarr", "cube.nc", "memory"])
def test_only_the_rest_is_computed_after_an_interruption(tmp_path, model, expected, where):
    out = f"memory://{tmp_path.name}/cube.zarr" if where == "memory" else tmp_path / where
    stopped(7, "interrupt", model, source(), out=out)
    if where == "memory":
        assert not any(
            name.startswith("cube.zarr/") for name in contents(f"memory://{tmp_path.name}")
        )
    else:
        assert sorted(p.name for p in tmp_path.iterdir()) == [f"{where}.partial", "log"]
    result = predict_cube(model, source(), out=out, progress=False)
    assert model.calls == CALLS + AGAIN
    np.testing.assert_array_equal(result.t, 2 * source().t)
    if where == "memory":
        assert without_call(contents(out)) == expected
    else:
        assert sorted(p.name for p in tmp_path.iterdir()) == [where, "log"]


CHANGES = {
    "weights": lambda log: {"model": Logged(log, 3.0)},
    "cells": lambda log: {"ds": source() + 1},
    "coordinates": lambda log: {"ds": source(first=1)},
    "attributes": lambda log: {"ds": source().assign_attrs(title="new")},
    "scaling": lambda log: {"store_or_stats": {"t": [0.0, 2.0]}},
    "batches": lambda log: {"batch_size": 2**14},
}


@pytest.mark.parametrize("changed", CHANGES)
def test_another_call_starts_over_and_removes_the_blocks_of_the_first(tmp_path, model, changed):
    call = {"model": model, "ds": source(), "out": tmp_path / "cube.zarr", "progress": False}
    stopped(7, "interrupt", **{k: v for k, v in call.items() if k != "progress"})
    predict_cube(**{**call, **CHANGES[changed](model.log)})
    assert model.calls == 7 + CALLS
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cube.zarr", "log"]


def test_a_source_on_disk_is_known_by_its_files(tmp_path, model):
    source().chunk(time=8).to_zarr(tmp_path / "source.zarr")
    # the output lies inside the folder of the source, which then changes
    out = tmp_path / "source.zarr" / "cube.zarr"
    stopped(7, "interrupt", model, tmp_path / "source.zarr", out=out)
    predict_cube(model, tmp_path / "source.zarr", out=out, progress=False)
    calls = 10  # in blocks like these chunks, none has only gaps
    assert model.calls == calls + AGAIN
    stopped(7 + model.calls, "interrupt", model, tmp_path / "source.zarr", out=out, overwrite=True)
    source().chunk(time=8).to_zarr(tmp_path / "source.zarr", mode="a")  # touched
    predict_cube(model, tmp_path / "source.zarr", out=out, overwrite=True, progress=False)
    assert model.calls == calls + AGAIN + 7 + calls


def test_what_cannot_be_identified_is_not_resumed_and_leaves_nothing(tmp_path, model):
    def closing_over(x):
        return model(x)

    stopped(7, "interrupt", closing_over, source(), out=tmp_path / "cube.zarr")
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


# --- a finished cube ----------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
def test_a_finished_cube_is_opened_by_the_same_call_and_refused_to_another(tmp_path, model, suffix):
    path = tmp_path / f"cube{suffix}"
    call = {"model": model, "ds": source(), "out": path, "progress": False}
    predict_cube(**call).close()
    before, calls = path.stat().st_mtime_ns, model.calls
    with pytest.warns(
        UserWarning, match=rf"nothing was predicted: .*cube{suffix} exists already, c"
    ):
        again = predict_cube(**call)
    np.testing.assert_array_equal(again.t, 2 * source().t)
    again.close()
    assert (path.stat().st_mtime_ns, model.calls) == (before, calls + 1)
    named = {
        "weights": "model: weights and code",
        "cells": "source: cells of 't'",
        "coordinates": "source: cells of 't'; result: 'time'",
        "attributes": "attributes: title was None and is \"'new'\"",
        "scaling": "settings: scaling",
        "batches": "settings: batch_size was",
    }
    assert named.keys() == CHANGES.keys()
    for change, words in named.items():
        with pytest.raises(StoreExistsError, match=rf"cube{suffix} exists .*another cube: {words}"):
            predict_cube(**{**call, **CHANGES[change](model.log)})
    assert path.stat().st_mtime_ns == before


def test_what_cannot_be_identified_opens_nothing(tmp_path, model):
    path = tmp_path / "cube.zarr"

    def closing_over(x):
        return model(x)

    def refused(told: str, model: Any) -> None:
        with pytest.raises(StoreExistsError, match=rf"exists, and {told}; choose"):
            predict_cube(model, source(), out=path, progress=False)

    predict_cube(model, source(), out=path, progress=False)
    refused("this call cannot be identified", closing_over)
    predict_cube(model, source(STEPS, 3), out=path, append=True, progress=False)
    refused("does not say which call made it", model)
    predict_cube(closing_over, source(), out=path, overwrite=True, progress=False)
    calls = model.calls
    refused("does not say which call made it", model)
    assert model.calls == calls


def test_what_is_no_complete_cube_is_refused_before_any_work(tmp_path, model):
    path = tmp_path / "cube.zarr"
    predict_cube(model, source(), out=path, progress=False)
    calls = model.calls
    (path / "t/c/0/0/0").unlink()
    source().to_zarr(tmp_path / "mine.zarr")
    (tmp_path / "mine.nc").write_bytes(b"mine")
    for name, why in (
        ("cube.zarr", r"t/c/0/0/0 is missing"),
        ("mine.zarr", "no manifest"),
        ("mine.nc", ""),
    ):
        told = rf"{name} exists and is not a complete cube of predict_cube \(.*{why}"
        with pytest.raises(StoreExistsError, match=told):
            predict_cube(model, source(), out=tmp_path / name, progress=False)
    assert model.calls == calls


# --- complete or absent ----------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".zarr", ".nc"])
@pytest.mark.parametrize(("left", "some_done"), [(0, False), (9, False), (21, True)])
def test_a_full_disk_is_said_and_the_run_goes_on_once_there_is_room(
    tmp_path, model, expected, monkeypatch, suffix, left, some_done
):
    write, path, room = LocalFolder.write, tmp_path / f"cube{suffix}", [left]

    def full(self: LocalFolder, *args: Any) -> Any:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(LocalFolder, "write", full)
        with pytest.raises(
            StoreError, match=r"cube.* cannot be written: .*No space left.*run again"
        ):
            predict_cube(model, source(), out=path, progress=False)
    assert not path.exists()
    done = len(list(tmp_path.rglob("ml4cube-journal-*/*.json")))
    assert (done > 0) == Path(f"{path}.partial").exists() == some_done
    calls = model.calls
    predict_cube(model, source(), out=path, progress=False)
    again = done > 0  # the first batch, from which the layout of results is known
    assert model.calls == calls + CALLS - (done - (done > GAP_BLOCK)) + again
    assert suffix == ".nc" or without_call(tree(path)) == expected
    assert sorted(p.name for p in tmp_path.iterdir()) == [path.name, "log"]


def test_a_netcdf_without_room_is_refused_before_hdf5_fills_the_disk(tmp_path, model, monkeypatch):
    path = tmp_path / "cube.nc"
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**20))
        patch.setattr(xr.Dataset, "to_netcdf", lambda *_, **__: pytest.fail("was begun"))
        with pytest.raises(StoreError, match="No space left on device; make room"):
            predict_cube(model, source(), out=path, progress=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=2**21))
    predict_cube(model, source(), out=path, progress=False)


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_folder_that_may_not_be_written_to_is_named(tmp_path, model, monkeypatch, number):
    def refused(self: LocalFolder, *args: Any) -> Any:
        raise OSError(number, os.strerror(number), str(self))

    monkeypatch.setattr(LocalFolder, "write", refused)
    with pytest.raises(StoreError, match=r"cannot be written.*; choose .* folder that you may wr"):
        predict_cube(model, source(), out=tmp_path / "cube.zarr", progress=False)


def test_an_error_of_the_call_leaves_nothing_even_late(tmp_path):
    class Narrow(torch.nn.Module):
        def forward(self, x):
            return x[:-1] if x.max() > 1e5 else x

    with pytest.raises(InvalidValueError, match="must return shape"):
        predict_cube(Narrow(), source(), out=tmp_path / "cube.zarr", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_two_runs_do_not_write_to_one_path(tmp_path, model):
    path = tmp_path / "cube.zarr"
    with (
        Draft(path, "another", PREDICTIONS),
        pytest.raises(RunError, match=r"another run is writing .*cube.zarr"),
    ):
        predict_cube(model, source(), out=path, progress=False)
    assert [p.name for p in tmp_path.iterdir()] == ["log"]


# --- URLs and zarr stores --------------------------------------------------------------------


def icechunk_session() -> Any:
    icechunk = pytest.importorskip("icechunk")
    repository = icechunk.Repository.create(icechunk.in_memory_storage())
    return repository.writable_session("main")


@pytest.mark.parametrize("kind", ["memory", "session", "group in a session"])
def test_a_zarr_store_gets_the_same_bytes(tmp_path, model, expected, kind):
    session = MemoryStore() if kind == "memory" else icechunk_session()
    out = session
    if kind.startswith("group"):
        out = StorePath(session.store, "forecasts/daily")
    stopped(7, "interrupt", model, source(), out=out)
    store = getattr(session, "store", session)
    assert ZarrFolder(store).list().keys() <= {"zarr.json"}  # Icechunk has a root from the start
    result = predict_cube(model, source(), out=out, progress=False)
    np.testing.assert_array_equal(result.t, 2 * source().t)
    calls = model.calls
    with pytest.warns(UserWarning, match=r"nothing was predicted: .* exists already"):
        again = predict_cube(model, source(), out=out, progress=False)
    assert model.calls == calls + 1  # the first batch, from which the layout is known
    np.testing.assert_array_equal(again.t, result.t)
    with pytest.raises(StoreExistsError, match=r"made by another call.*model: weights and code\."):
        predict_cube(Logged(model.log, 3.0), source(), out=out, progress=False)
    result = predict_cube(Logged(model.log, 3.0), source(), out=out, overwrite=True, progress=False)
    np.testing.assert_array_equal(result.t, 3 * source().t)
    assert json.loads(result.attrs["ml4cube_prediction"])["model"] == "Logged"
    if kind != "memory":
        session.commit("a forecast")
    elif kind == "memory":
        predict_cube(model, source(), out=out, overwrite=True, progress=False)
        files = {key: value.to_bytes() for key, value in session._store_dict.items()}
        assert without_call(files) == expected


def test_files_that_show_a_folder_do_not_keep_it_from_being_replaced(tmp_path, model):
    path = tmp_path / "cube.zarr"
    predict_cube(model, source(), out=path, progress=False)
    for folder in (path, path / "t"):
        (folder / ".DS_Store").write_bytes(b"positions of icons")
    predict_cube(model, source(), out=path, overwrite=True, progress=False)
    assert not list(path.rglob(".DS_Store"))


def test_a_foreign_store_is_not_replaced(tmp_path, model):
    store = MemoryStore()
    predict_cube(model, source(), out=store, progress=False)
    zarr.create_array(store, name="mine", shape=3, dtype="f4")
    with pytest.raises(StoreExistsError, match=r"has 1 files that predict_cube did not write"):
        predict_cube(model, source(), out=store, overwrite=True)
    source().to_zarr(f"memory://{tmp_path.name}/cube.zarr")
    with pytest.raises(StoreExistsError, match="was not written by predict_cube, or has lost"):
        predict_cube(model, source(), out=f"memory://{tmp_path.name}/cube.zarr", overwrite=True)


def places(tmp_path: Path) -> dict[str, Any]:
    return {
        "path": tmp_path / "cube.zarr",
        "url": f"memory://{tmp_path.name}/cube.zarr",
        "zarr store": MemoryStore(),
        "session": StorePath(icechunk_session().store, "forecasts"),
    }


def add_variable(out: Any) -> str:
    cube = predicted(out)
    mine = cube.t.rename("mine").drop_encoding().to_dataset()
    if isinstance(out, StorePath):
        mine.to_zarr(out.store, group=out.path, mode="a", consolidated=False)
    else:
        mine.to_zarr(out, mode="a", consolidated=False)
    return "mine/c/0/0/0"


def change_values(out: Any) -> str:
    group = out if isinstance(out, MemoryStore | StorePath) else str(out)
    array: Any = zarr.open_array(group, path="t", mode="r+")
    array[0, 63, 63] = -1.0
    return "t/c/0/0/0"


def change_attributes(out: Any) -> str:
    group = out if isinstance(out, MemoryStore | StorePath) else str(out)
    zarr.open_array(group, path="t", mode="r+").attrs["units"] = "degC"
    return "t/zarr.json"


def put_a_file_below(out: Any) -> str:
    folder_of(out if isinstance(out, Path | str) else location_of("out", out)).write(
        "t/notes.txt", b"mine"
    )
    return "t/notes.txt"


def predicted(out: Any) -> xr.Dataset:
    return open_prediction(target_of("out", out))


EDITS = [add_variable, change_values, change_attributes, put_a_file_below]


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("place", ["path", "url", "zarr store", "session"])
def test_what_a_user_changed_or_added_is_never_replaced(tmp_path, model, place, edit):
    if edit is put_a_file_below and place == "session":
        pytest.skip("Icechunk holds arrays only")
    out = places(tmp_path)[place]
    predict_cube(model, source(), out=out, progress=False)
    path = edit(out)
    folder = folder_of(target_of("out", out))
    before = {name: folder.read(name) for name in folder.list()}
    calls = model.calls
    with pytest.raises(
        StoreExistsError,
        match=rf"files that predict_cube did not write, or that have changed since.*'{path}'.*"
        "remove it by hand",
    ):
        predict_cube(model, source(), out=out, overwrite=True, progress=False)
    assert model.calls == calls
    assert {name: folder.read(name) for name in folder.list()} == before


@pytest.mark.parametrize("place", ["path", "url", "zarr store", "session"])
def test_appended_steps_are_ours_to_replace(tmp_path, model, place):
    out = places(tmp_path)[place]
    for first in (0, 5, 7):
        predict_cube(model, source(first, 5 if not first else 2), out=out, append=True)
    folder = folder_of(target_of("out", out))
    assert read_manifest(folder if isinstance(folder, ZarrFolder) else out).keys() == (
        folder.list().keys() - {MANIFEST}
    )
    predict_cube(model, source(3, 4), out=out, overwrite=True, progress=False)
    np.testing.assert_array_equal(predicted(out).t, 2 * source(3, 4).t)
    predict_cube(model, source(7, 2), out=out, append=True, progress=False)
    change_values(out)
    with pytest.raises(StoreExistsError, match=r"changed since, such as 't/c/0/0/0', so"):
        predict_cube(model, source(), out=out, overwrite=True, progress=False)


def test_what_a_user_changed_during_the_run_is_not_replaced(tmp_path):
    out = tmp_path / "cube.zarr"
    predict_cube(torch.nn.Identity(), source(), out=out, progress=False)

    def late(x: torch.Tensor) -> torch.Tensor:
        (out / "t" / "notes.txt").write_text("mine")
        return 2 * x

    with pytest.raises(StoreExistsError, match=r"has 1 files .*'t/notes.txt'"):
        predict_cube(late, source(), out=out, overwrite=True, progress=False)
    np.testing.assert_array_equal(predicted(out).t, source().t)
    assert (out / "t" / "notes.txt").read_text() == "mine"


def test_a_variable_named_as_the_list_of_files_is_refused(tmp_path, model):
    cube = source().rename(t="manifest")
    with pytest.raises(InvalidValueError, match=r"'manifest' .*predicted cube.*rename"):
        predict_cube(model, cube, out=tmp_path / "cube.zarr")
    assert "manifest" in predict_cube(model, cube, progress=False)


# --- netCDF ----------------------------------------------------------------------------------


def saved_again(path: Path, change: Any) -> None:
    with xr.open_dataset(path) as opened:
        cube = opened.load()
    change(cube).to_netcdf(path)


NETCDF_EDITS = {
    "added variable": lambda cube: cube.assign(mine=cube.t.mean("time")),
    "values": lambda cube: cube.assign(t=cube.t.where(cube.lon != 63, -1)),
    "one bit of an attribute": lambda cube: cube.assign_attrs(title="mine"),
    "attribute of a variable": lambda cube: cube.assign(t=cube.t.assign_attrs(units="degC")),
    "dims": lambda cube: cube.rename(lat="y"),
    "type": lambda cube: cube.astype("f8"),
}


@pytest.mark.parametrize("edit", NETCDF_EDITS)
def test_a_netcdf_file_that_a_user_saved_again_is_not_replaced(tmp_path, model, edit):
    path = tmp_path / "cube.nc"
    predict_cube(model, source(), out=path, progress=False)
    saved_again(path, NETCDF_EDITS[edit])
    before, calls = path.read_bytes(), model.calls
    with pytest.raises(StoreExistsError, match=r"cube.nc.* changed since.*remove it by hand"):
        predict_cube(model, source(), out=path, overwrite=True, progress=False)
    assert model.calls == calls
    assert path.read_bytes() == before


@pytest.mark.parametrize("engine", ["netcdf4", "h5netcdf"])
def test_a_netcdf_file_is_known_by_its_digest_whatever_library_reads_it(
    tmp_path, model, monkeypatch, engine
):
    path = tmp_path / "cube.nc"
    names = xr.Dataset(coords={"name": ("lat", [f"town {i}" for i in range(64)])}).name
    cube = source().assign_coords(name=names, time_bnds=("time", np.arange(STEPS)))
    cube = cube.assign_attrs(levels=[1, 2], height=2.5, note="ü", names=["a", "b"])
    predict_cube(model, cube, out=path, progress=False)
    monkeypatch.setattr(xr, "open_dataset", functools.partial(xr.open_dataset, engine=engine))
    assert find_foreign_in_netcdf(path) == []
    predict_cube(model, cube + 1, out=path, overwrite=True, progress=False)


def test_netcdf_files_of_the_same_call_are_equal(tmp_path, model):
    paths = [tmp_path / f"{number}.nc" for number in range(3)]
    for path in paths:
        predict_cube(model, source(), out=path, progress=False)
        time.sleep(1.1)  # times in files would differ
    assert len({path.read_bytes() for path in paths}) == 1


def noise() -> xr.Dataset:
    values = np.random.default_rng(0).normal(size=(40, 64, 64)).astype("f4")
    return source().assign(t=(("time", "lat", "lon"), values))


@pytest.mark.parametrize("share", [0.2, 0.6, 0.999])
def test_a_netcdf_file_that_does_not_fit_says_why_and_is_written_once_there_is_room(
    tmp_path, model, share
):
    pytest.importorskip("netCDF4")  # h5py may end the process when a disk is full
    undisturbed, path = tmp_path / "undisturbed.nc", tmp_path / "cube.nc"
    predict_cube(model, noise(), out=undisturbed, progress=False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = int(share * undisturbed.stat().st_size)  # the blocks are smaller
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, limits[1]))
    try:
        with pytest.raises(StoreError, match=r"cube.nc cannot be written: .*too large.*again"):
            predict_cube(model, noise(), out=path, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not path.exists()
    assert not list(tmp_path.rglob("ml4cube-store-*/cube.nc"))
    calls = model.calls
    predict_cube(model, noise(), out=path, progress=False)
    assert model.calls == calls + 1  # for the layout of its results
    assert path.read_bytes() == undisturbed.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cube.nc", "log", "undisturbed.nc"]


# --- URLs ------------------------------------------------------------------------------------


def test_a_url_is_written_and_replaced(tmp_path, model, expected):
    url = f"memory://{tmp_path.name}/cube.zarr"
    predict_cube(Logged(model.log, 3.0), source(), out=url, progress=False)
    with pytest.raises(StoreExistsError, match="made by another call"):
        predict_cube(model, source(), out=url)
    predict_cube(model, source(), out=url, overwrite=True, progress=False)
    assert without_call(contents(url)) == expected
    assert contents(f"memory://{tmp_path.name}").keys() == {f"cube.zarr/{n}" for n in expected}


@pytest.mark.slow
def test_an_object_store_is_written_resumed_and_appended_to(bucket, model, expected):  # noqa: F811
    url = f"{bucket}/cube.zarr"
    stopped(4, "interrupt", model, source(), out=url)
    assert not any("/cube.zarr/" in name for name in contents(bucket))
    predict_cube(model, source(), out=url, progress=False)
    assert model.calls == CALLS + AGAIN
    assert without_call(contents(url)) == expected
    result = predict_cube(model, source(STEPS, 3), out=url, append=True, progress=False)
    np.testing.assert_array_equal(result.t[:STEPS], 2 * source().t)
    np.testing.assert_array_equal(result.t[STEPS:], 2 * source(STEPS, 3).t)
    assert {name.partition("/")[0] for name in contents(bucket)} == {"cube.zarr"}


def test_places_that_cannot_be_written_are_named(tmp_path, model):
    bad: list[tuple[Any, type[Exception], str]] = [
        ("memory://x/cube.nc", InvalidValueError, "netCDF file is written to a local path only"),
        ("nowhere://x/cube.zarr", InvalidValueError, "cannot be reached"),
        ("memory://x/cube[1].zarr", InvalidValueError, "wildcards"),
        (f"file://{tmp_path}/cube.tif", InvalidValueError, r"end in '\.zarr' or '\.nc', got"),
        (MemoryStore(read_only=True), InvalidValueError, "out: the MemoryStore is read-only"),
    ]
    for out, error, message in bad:
        with pytest.raises(error, match=message):
            predict_cube(model, source(), out=out)
    assert list(tmp_path.iterdir()) == []


# --- many ranks ------------------------------------------------------------------------------


def predict_on_rank(log: str, out: Any) -> None:
    torch.set_num_threads(1)
    predict_cube(Logged(Path(log)), source(), out=out, progress=False)


@pytest.mark.slow
def test_other_ranks_go_on_where_one_stopped(tmp_path, expected):
    log, path = tmp_path / "log", tmp_path / "cube.zarr"
    stopped(4, "interrupt", Logged(log), source(), out=path)
    with kept_ranks():
        launch(predict_on_rank, 2, str(log), str(path))
        assert log.stat().st_size == CALLS + AGAIN
        assert without_call(tree(path)) == expected
        with pytest.raises(RunError, match="by one process only; with several ranks"):
            launch(predict_on_rank, 2, str(log), "memory://x/cube.zarr")


@pytest.mark.parametrize(
    ("raised_here", "lost", "expected"),
    [
        (None, "gloo: connection closed by peer", (RunError, "because another rank ended")),
        (None, "something else", (RuntimeError, "something else")),
        (KeyError("mine"), "gloo: connection closed by peer", (KeyError, "mine")),
    ],
)
def test_a_rank_that_ended_is_told_apart_from_errors_of_ones_own(raised_here, lost, expected):
    class Unreachable:
        def patient(self):
            return self

        def gather_objects(self, _):
            raise RuntimeError(lost)

    with pytest.raises(expected[0], match=expected[1]), all_ranks_or_none(Unreachable()):
        raise_unless_none(raised_here)


def raise_unless_none(error):
    if error is not None:
        raise error
