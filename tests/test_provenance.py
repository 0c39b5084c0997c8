"""Which calls are the same: across processes, and after a cube was changed in place."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from ml4cube.core.errors import InvalidTypeError, StoreExistsError
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.provenance import identity_of
from tests.cubes import cell_id_cube

SCRIPT = """
import functools
from ml4cube.datasets.provenance import identity_of
NAMES = {{"t2m", "ndvi", "sst", "lai"}}
LIST = [NAMES, {{"a": frozenset("xyz")}}]
{comment}
def half(x):
    return x / {number}
class Scale:
    def __init__(self, by):
        self.by, self.names = by, set("abcdef")
    @staticmethod
    def more(x):
        return x * {number}
    def __call__(self, samples):
        return {{k: self.more(v) * self.by for k, v in samples.items()}}
def again(samples, n=3):
    return samples if n == 0 else again(samples, n - 1)
callbacks = [
    lambda s: {{k: v * 2 if k in {{"t2m", "ndvi", "sst"}} else v for k, v in s.items()}},
    lambda s: {{k: half(v) for k, v in s.items() if k in NAMES or LIST}},
    Scale(3),
    functools.partial(lambda names, s: half(s), {{"p", "q", "r"}}),
    again,
]
print([identity_of(f) for f in callbacks])
"""


def identities(folder: Path, seed: int, comment: str = "", number: int = 2) -> list[str]:
    script = folder / f"script-{seed}.py"
    script.write_text(SCRIPT.format(comment=comment, number=number))
    ran = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(Path(__file__).parents[1])},
        check=True,
    )
    return list(eval(ran.stdout))


def test_a_callback_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Whatever the hash seed, the file and the lines it stands in; not if what it does changes."""
    first = identities(tmp_path, 1)
    assert identities(tmp_path, 2, comment="# one line more") == first
    changed = [a != b for a, b in zip(identities(tmp_path, 3, number=3), first, strict=True)]
    assert changed == [False, True, True, True, False]


def test_what_tells_callbacks_apart() -> None:
    def made(by: Any) -> Any:
        return lambda samples: {k: v * by for k, v in samples.items()}

    values = [1, 2, 1.0, "1", (1,), [1], {1}, {"a": 1}, np.arange(2), np.arange(3), None]
    assert len({identity_of(made(v)) for v in values}) == len(values)
    assert identity_of(made({1, 2})) == identity_of(made({2, 1}))


@pytest.mark.parametrize("held", [threading.Lock(), (k for k in "ab")])
def test_a_callback_that_cannot_travel_is_named(tmp_path: Path, held: Any) -> None:
    def work(samples: Any) -> Any:
        return samples if held else None

    with pytest.raises(InvalidTypeError, match=r"callback=.*work.*inside the callback"):
        MultiProcSampler(
            cell_id_cube({"time": 8, "lat": 6}, "float64"),
            callback=work,
            block_size={"time": 2},
            train_cube=tmp_path / "train.zarr",
            test_cube=tmp_path / "test.zarr",
        )


def write(path: Path, value: float, **options: Any) -> None:
    cube = cell_id_cube({"time": 8, "lat": 6}, "float64") * 0 + value
    cube.to_zarr(path, mode="w", consolidated=False, **options)


def run(cube: Any, folder: Path) -> float:
    made = MultiProcSampler(
        cube,
        nproc=1,
        block_size={"time": 2},
        scale_fn=None,
        train_cube=folder / "train.zarr",
        test_cube=folder / "test.zarr",
    )
    return float(made.get_datasets()[0]["a"].mean())


OPENED = {
    "dask": lambda p: xr.open_zarr(p, consolidated=False),
    "lazy": lambda p: xr.open_zarr(p, consolidated=False, chunks=None),
    "dataset": lambda p: xr.open_dataset(p, engine="zarr", consolidated=False),
    "selection": lambda p: xr.open_zarr(p, consolidated=False).isel(time=slice(0, 6)),
    "lazy selection": lambda p: xr.open_zarr(p, consolidated=False, chunks=None).isel(lat=[0, 2]),
    "path": lambda p: p,
}


@pytest.mark.parametrize("opened", OPENED)
def test_another_cube_is_another_call(tmp_path: Path, opened: str) -> None:
    write(tmp_path / "a.zarr", 1.0)
    write(tmp_path / "b.zarr", 2.0)
    assert run(OPENED[opened](tmp_path / "a.zarr"), tmp_path) == 1.0
    with pytest.raises(StoreExistsError, match="another cube"):
        run(OPENED[opened](tmp_path / "b.zarr"), tmp_path)
    assert run(OPENED[opened](tmp_path / "a.zarr"), tmp_path) == 1.0


@pytest.mark.parametrize("opened", OPENED)
def test_a_cube_changed_in_place_is_another_call(tmp_path: Path, opened: str) -> None:
    path = tmp_path / "a.zarr"
    write(path, 1.0)
    assert run(OPENED[opened](path), tmp_path) == 1.0
    changed = cell_id_cube({"time": 8, "lat": 6}, "float64") * 0 + 2.0
    changed.drop_vars(["time", "lat"]).to_zarr(
        path, region={"time": slice(0, 8)}, consolidated=False
    )
    with pytest.raises(StoreExistsError, match="another cube"):
        run(OPENED[opened](path), tmp_path)


@pytest.mark.parametrize("opened", ["dask", "lazy", "dataset", "lazy selection", "path"])
def test_stores_inside_the_cube_are_no_change_of_it(tmp_path: Path, opened: str) -> None:
    path = tmp_path / "a.zarr"
    write(path, 1.0)
    for _ in range(2):
        assert run(OPENED[opened](path), path / "samples") == 1.0
    changed = cell_id_cube({"time": 8, "lat": 6}, "float64") * 0 + 2.0
    changed.drop_vars(["time", "lat"]).to_zarr(
        path, region={"time": slice(0, 8)}, consolidated=False
    )
    with pytest.raises(StoreExistsError, match="another cube"):
        run(OPENED[opened](path), path / "samples")


def test_two_selections_of_one_cube_are_two_calls(tmp_path: Path) -> None:
    cube = cell_id_cube({"time": 8, "lat": 6}, "float64")
    cube.to_zarr(tmp_path / "a.zarr", consolidated=False)
    lazy = xr.open_zarr(tmp_path / "a.zarr", consolidated=False, chunks=None)
    run(lazy.isel(lat=slice(0, 3)).drop_vars("lat"), tmp_path)
    with pytest.raises(StoreExistsError, match="another cube"):
        run(lazy.isel(lat=slice(3, 6)).drop_vars("lat"), tmp_path)


def test_a_cube_whose_variables_come_in_another_order_is_the_same(tmp_path: Path) -> None:
    """As they do in a zarr store without consolidated metadata."""
    cube = cell_id_cube({"time": 8, "lat": 6}, names=("a", "b"))
    paths = {f"{part}_cube": tmp_path / f"{part}.zarr" for part in ("train", "test")}
    first = MultiProcSampler(cube[["a", "b"]], nproc=1, **paths)
    assert first.run() is not None
    assert MultiProcSampler(cube[["b", "a"]], nproc=1, **paths).run() is None
