"""A cube that changes while it is read: nothing is published, and the next call starts over."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr

from ml4cube.core.errors import RunError, StoreError
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.prediction import predict_cube
from ml4cube.sampling.identity.cube import SourceState
from ml4cube.store.format import open_store
from tests.faults.test_sampling_faults import tree
from tests.samplestores import paths

STEPS = 24
REFUSED = (
    r"files of 'a' were written, replaced or removed while the cube was read, so .* would mix old "
    r"and new cells, and was not written; run again when the cube is complete: the run starts over"
)


def write(path: Path, first: float) -> None:
    """Write a cube of a value and up, in place of one that is there."""
    values = first + np.arange(STEPS * 8, dtype="float32").reshape(STEPS, 8)
    cube = xr.Dataset({"a": (("time", "lat"), values)})
    cube.to_zarr(path, encoding={"a": {"chunks": (2, 8)}}, consolidated=False, mode="w")


def replace_chunk(path: Path) -> None:
    other = path.with_name("other.zarr")
    write(other, 1000.0)
    shutil.copy(other / "a/c/11/0", path / "a/c/11/0")


def remove_chunk(path: Path) -> None:
    (path / "a/c/11/0").unlink()


def touch_chunk(path: Path) -> None:
    os.utime(path / "a/c/11/0", ns=(1, 1))


CHANGES: dict[str, Callable[[Path], None]] = {
    "replaced": lambda path: write(path, 1000.0),
    "a chunk replaced": replace_chunk,
    "a chunk removed": remove_chunk,
    "a chunk touched": touch_chunk,
}


class Changing:
    """A model or callback that changes the cube in its second call."""

    def __init__(self, change: Callable[[], None]) -> None:
        self.change, self.calls = change, 0

    def __call__(self, given: Any) -> Any:
        self.calls += 1
        if self.calls == 2:
            self.change()
        return given


def sampler(path: Path, folder: Path, **more: Any) -> MultiProcSampler:
    options: dict[str, Any] = {"nproc": 1, "block_size": {"time": 2}, "data_split": 0.5}
    return MultiProcSampler(path, **paths(folder), scale_fn=None, **options, **more)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("when", ["while counting", "while writing"])
def test_samples_of_a_cube_that_changes_are_not_published(
    tmp_path: Path, change: str, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, out = tmp_path / "cube.zarr", tmp_path / "out"
    write(path, 0.0)
    made = sampler(path, out)
    method = "_plan_on" if when == "while counting" else "_write_shards"
    real = getattr(MultiProcSampler, method)

    def and_change(*args: Any) -> Any:
        result = real(*args)
        CHANGES[change](path)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(MultiProcSampler, method, and_change)
        # removed before samples are cut, a chunk changes their number
        with pytest.raises((StoreError, RunError), match=rf"{REFUSED}|the cube has changed since"):
            made.run()
    assert list(out.iterdir()) == []
    # neither the plan nor the shards of the cube as it was are used
    if change == "a chunk removed":
        with pytest.raises(StoreError, match="chunks of 'a' were removed or added since this"):
            made.run()
        made = sampler(path, out)
    made.run()
    sampler(path, tmp_path / "undisturbed").run()
    assert tree(out) == tree(tmp_path / "undisturbed")


def test_shards_of_a_changed_cube_are_not_resumed_after_a_kill(tmp_path: Path) -> None:
    """The cube changes, the run is killed, the cube stays as it is: the identity is another."""
    path, out = tmp_path / "cube.zarr", tmp_path / "out"
    write(path, 0.0)

    def fail_after_change(samples: Any) -> Any:
        if Path(tmp_path / "armed").exists():
            write(path, 1000.0)
            raise KeyboardInterrupt
        return samples

    made = sampler(path, out, callback=fail_after_change, version=1)
    made.plan()
    (tmp_path / "armed").touch()
    with pytest.raises(KeyboardInterrupt):
        made.run()
    (tmp_path / "armed").unlink()
    summary = sampler(path, out, callback=fail_after_change, version=1).run()
    assert summary is not None
    assert summary.resumed == 0
    values = np.concatenate([open_store(out / f"{p}.zarr")["a"].values for p in ("train", "test")])
    np.testing.assert_array_equal(np.sort(values), 1000 + np.arange(STEPS * 8))


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", ["out.zarr", "out.nc"])
def test_a_prediction_of_a_cube_that_changes_is_not_published(
    tmp_path: Path, change: str, name: str
) -> None:
    path, out = tmp_path / "cube.zarr", tmp_path / "out" / name
    out.parent.mkdir()
    write(path, 0.0)
    model = Changing(lambda: CHANGES[change](path))
    options: dict[str, Any] = {"out": out, "batch_size": 8, "progress": False}
    with pytest.raises(StoreError, match=REFUSED):
        predict_cube(model, path, **options)
    assert list(out.parent.iterdir()) == []
    found = predict_cube(lambda x: x, path, **options)
    np.testing.assert_array_equal(found["a"], xr.open_zarr(path, consolidated=False)["a"])


def test_other_files_beside_the_cube_and_the_run_itself_may_change(tmp_path: Path) -> None:
    """Outputs inside the folder of the cube, and other variables of it."""
    path = tmp_path / "cube.zarr"
    write(path, 0.0)

    def add_variable() -> None:
        other = xr.Dataset({"later": ("x", np.arange(3.0))})
        other.to_zarr(path, mode="a", consolidated=False)

    cube = xr.open_zarr(path, consolidated=False)
    model = Changing(add_variable)
    predict_cube(model, cube, out=path / "predicted.zarr", batch_size=8, progress=False)
    assert model.calls > 2
    sampler(path, path / "samples").run()


def test_what_cannot_be_known_is_published(tmp_path: Path) -> None:
    values = np.zeros((STEPS, 8), "float32")
    cube = xr.Dataset({"a": (("time", "lat"), values)})
    model = Changing(lambda: values.fill(1.0))
    predict_cube(model, cube, out=tmp_path / "out.zarr", batch_size=8, progress=False)
    assert (tmp_path / "out.zarr").exists()


class Listing:
    """An object store whose objects have tags."""

    storage_args = ()
    storage_options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, tags: dict[str, str], may_list: bool = True) -> None:
        self.tags, self.may_list = tags, may_list

    def invalidate_cache(self, path: str) -> None:
        pass

    def find(self, path: str, detail: bool) -> dict[str, Any]:
        if not self.may_list:
            raise PermissionError(path)
        return {key: {"size": 4, "ETag": tag} for key, tag in self.tags.items()}


def test_objects_behind_a_url_are_known_by_their_tags() -> None:
    from ml4cube.sampling.identity.cube import _location_in_file_system

    def identity(tags: dict[str, str], may_list: bool = True) -> str | None:
        return _location_in_file_system(Listing(tags, may_list), "bucket/a", str)

    before = identity({"a/c/0": "x", "a/c/1": "y"})
    assert before == identity({"a/c/1": "y", "a/c/0": "x"})
    assert len({before, identity({"a/c/0": "x", "a/c/1": "z"}), identity({"a/c/0": "x"})}) == 3
    assert identity({}, may_list=False) == identity({"a": "x"}, may_list=False) is not None


def test_a_source_that_is_gone_is_an_error(tmp_path: Path) -> None:
    write(tmp_path / "cube.zarr", 0.0)
    cube = xr.open_zarr(tmp_path / "cube.zarr", consolidated=False)
    state = SourceState.of({"a": cube.variables["a"]}, ())
    state.check_unchanged("out.zarr")
    shutil.rmtree(tmp_path / "cube.zarr")
    with pytest.raises(StoreError, match=r"out\.zarr would mix"):
        state.check_unchanged("out.zarr")


def test_models_of_torch_too(tmp_path: Path) -> None:
    path = tmp_path / "cube.zarr"
    write(path, 0.0)

    class Net(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            replace_chunk(path)
            return x

    with pytest.raises(StoreError, match=REFUSED):
        predict_cube(Net(), path, out=tmp_path / "out.zarr", progress=False)
    assert not list(tmp_path.glob("out*"))
