"""Which calls are the same: across processes, and after a cube was changed in place."""

from __future__ import annotations

import collections
import copy
import enum
import hashlib
import importlib
import io
import json
import os
import subprocess
import sys
import threading
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock

import cftime
import dask
import dask.array as da
import fsspec
import icechunk
import numpy as np
import pytest
import torch
import xarray as xr
import zarr
from fsspec import AbstractFileSystem
from fsspec.implementations.asyn_wrapper import AsyncFileSystemWrapper
from fsspec.implementations.dirfs import DirFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.reference import ReferenceFileSystem
from fsspec.implementations.zip import ZipFileSystem
from scipy.spatial import KDTree
from xarray.core import indexing
from zarr.core.buffer import cpu
from zarr.storage import (
    FsspecStore,
    LocalStore,
    LoggingStore,
    MemoryStore,
    StorePath,
    WrapperStore,
    ZipStore,
)

from ml4cube.core.errors import InvalidTypeError, RunError, StoreError, StoreExistsError
from ml4cube.datasets import multiproc_sampler
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.sampling.identity import cube as cube_identity
from ml4cube.sampling.identity.callback import identity_of
from ml4cube.sampling.identity.cube import hash_of
from ml4cube.sampling.identity.provenance import Call
from ml4cube.sampling.request import Sampling
from tests.cubes import cell_id_cube

SCRIPT = """
import collections, dataclasses, enum, functools, typing
from types import MappingProxyType
from numpy import clip
from scipy.stats import gamma, norm
from ml4cube.sampling.identity.callback import identity_of
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
class Mode(enum.Enum):
    TIMES = {number}
class Code(enum.IntEnum):
    ONE = 1
@dataclasses.dataclass(slots=True)
class Slotted:
    by: float = {number}
class Named(typing.NamedTuple):
    by: float
    def __call__(self, samples):
        return {{k: v * self.by * {number} for k, v in samples.items()}}
class Words(set):
    pass
class Generic(typing.Generic[typing.TypeVar("T")]):
    def __call__(self, samples):
        return samples
SLOTTED, WORDS = Slotted(), Words("abc")
GAMMA = gamma(2.0, scale={number})
PROXY = MappingProxyType({{"half": half}})
DEFAULT = collections.defaultdict(lambda: {number}, a=1)
callbacks = [
    lambda s: {{k: v * 2 if k in {{"t2m", "ndvi", "sst"}} else v for k, v in s.items()}},
    lambda s: {{k: half(v) for k, v in s.items() if k in NAMES or LIST}},
    Scale(3),
    functools.partial(lambda names, s: half(s), {{"p", "q", "r"}}),
    again,
    lambda s: {{k: v * Mode.TIMES.value for k, v in s.items()}},
    lambda s: {{k: v * Code.ONE for k, v in s.items()}},
    lambda s: {{k: v * SLOTTED.by for k, v in s.items()}},
    Named(2.0),
    lambda s: {{k: v for k, v in s.items() if k in WORDS}},
    lambda s: {{k: v * DEFAULT[k] for k, v in s.items()}},
    lambda s: {{k: clip(v, 0, 1) for k, v in s.items()}},
    Generic(),
    lambda s: {{k: norm.cdf(v) * GAMMA.mean() for k, v in s.items()}},
    lambda s: {{k: PROXY["half"](v) for k, v in s.items()}},
]
print([identity_of(f) for f in callbacks])
"""


HELPERS = """
import functools, threading
import numpy as np
import torch
from scipy.spatial import KDTree
from . import helpers as itself
LOCK = threading.Lock()
BY = {number}
def scale(x):
    with LOCK:
        return x * BY
@functools.cache
def table(n):
    return n * {number}
class Prep:
    def __call__(self, samples):
        return {{k: itself.scale(v) for k, v in samples.items()}}
class Slotted:
    __slots__ = ()
    def __call__(self, samples):
        return {{k: v * table(2) for k, v in samples.items()}}
class Listed:
    handlers = {{scale, table}}
    def __call__(self, samples):
        return {{k: np.abs(v) for k, v in samples.items()}}
class Other:
    def __call__(self, samples):
        return samples
TENSOR = torch.full((4,), {number})[1:]
NET = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2))
for parameter in NET.parameters():
    torch.nn.init.constant_(parameter, {number})
TREE = KDTree(np.arange(100.0).reshape(50, 2) * {number})
"""
CALLBACKS = """
import numpy as np
import work.helpers
from ml4cube.sampling.identity.callback import identity_of
from work import helpers
callbacks = [
    lambda s: helpers.scale(s),
    lambda s: work.helpers.table(s),
    helpers.scale,
    helpers.Prep(),
    helpers.Prep().__call__,
    helpers.Slotted(),
    helpers.Listed(),
    lambda s: helpers.TENSOR,
    lambda s: helpers.NET,
    lambda s: helpers.TREE,
    helpers.Other(),
    lambda s: np.abs(s),
]
print([identity_of(f) for f in callbacks])
"""


def printed(script: Path, seed: int) -> list[str]:
    ran = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env={"PYTHONHASHSEED": str(seed), "PYTHONPATH": str(Path(__file__).parents[2])},
        check=True,
    )
    return list(eval(ran.stdout))


def identities(folder: Path, seed: int, comment: str = "", number: int = 2) -> list[str]:
    script = folder / f"script-{seed}.py"
    script.write_text(SCRIPT.format(comment=comment, number=number))
    return printed(script, seed)


@pytest.mark.slow
def test_a_callback_is_the_same_in_every_process(tmp_path: Path) -> None:
    """Whatever the hash seed, the file and the lines it stands in; not if what it does changes."""
    first = identities(tmp_path, 1)
    assert identities(tmp_path, 2, comment="# one line more") == first
    pairs = zip(identities(tmp_path, 3, number=3), first, strict=True)
    assert [n for n, (a, b) in enumerate(pairs) if a != b] == [1, 2, 3, 5, 7, 8, 10, 13, 14]


@pytest.mark.slow
def test_an_edit_in_a_module_of_the_users_makes_another_callback(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "script.py").write_text(CALLBACKS)

    def found(seed: int, number: int) -> list[str]:
        (tmp_path / "work/helpers.py").write_text(HELPERS.format(number=number))
        return printed(tmp_path / "script.py", seed)

    first = found(1, 2)
    assert found(2, 2) == first
    changed = [a != b for a, b in zip(found(3, 30), first, strict=True)]
    assert changed == [True] * 10 + [False] * 2


def test_what_tells_callbacks_apart() -> None:
    def made(by: Any) -> Any:
        return lambda samples: {k: v * by for k, v in samples.items()}

    values = [1, 2, 1.0, "1", (1,), [1], {1}, {"a": 1}, np.arange(2), np.arange(3), None]
    assert len({identity_of(made(v)) for v in values}) == len(values)
    assert identity_of(made({1, 2})) == identity_of(made({2, 1}))


class Words(set[str]):
    """Holds an attribute of its own."""

    def __init__(self, by: float) -> None:
        super().__init__("abc")
        self.by = by


def named(by: float) -> Any:
    class Prep(NamedTuple):
        a: int

        def times(self, x: Any) -> Any:
            return x * by

    return Prep(1)


def missing(by: float) -> Any:
    class Table(dict[str, float]):
        def __missing__(self, name: str) -> float:
            return by

    return Table(a=1)


def with_attribute(kind: type) -> Callable[[float], Any]:
    made = type("Made", (kind,), {})

    def of(by: float) -> Any:
        value = made()
        value.by = by
        return value

    return of


TOLD_APART: dict[str, Callable[[float], Any]] = {
    "state in C": lambda by: KDTree([[by], [2 * by]]),
    "named tuple": named,
    "dict with a method": missing,
    "default factory": lambda by: collections.defaultdict(lambda: by),
    "order": lambda by: collections.OrderedDict([("a", by)]),
    "set with an attribute": Words,
    "member": lambda by: enum.Enum("Mode", {"A": by}).A,  # type: ignore[attr-defined]
    "int member": lambda by: enum.IntEnum("Mode", {"A": 1, "B": int(by)}).A,
    "mask": lambda by: np.ma.masked_equal([1.0, 2.0], by),
    "array of objects": lambda by: np.array([str(by), by], object),
    "tensor": lambda by: torch.full((2,), by),
    **{kind.__name__: with_attribute(kind) for kind in (list, tuple, str, int, float, bytes)},
}


@pytest.mark.parametrize("of", TOLD_APART)
def test_what_subclasses_and_others_hold_tells_callbacks_apart(of: str) -> None:
    def made(value: Any) -> Any:
        return lambda samples: samples if value else None

    values = [TOLD_APART[of](by) for by in (1.0, 1.0, 2.0)]
    first, again, other = (identity_of(made(value)) for value in values)
    assert first == again != other


def test_members_and_subclasses_are_not_what_they_equal() -> None:
    def made(value: Any) -> Any:
        return lambda samples: samples if value else None

    code = enum.IntEnum("Code", {"ONE": 1})
    pairs = [(code(1), 1), (collections.OrderedDict(a=1), {"a": 1}), (Words(1), set("abc"))]
    assert all(identity_of(made(one)) != identity_of(made(two)) for one, two in pairs)


class Plain:
    """Neither copied nor pickled so far."""


def test_what_others_do_beside_a_callback_does_not_change_it() -> None:
    space: dict[str, Any] = {"held": Plain(), "Plain": Plain}
    exec("def work(s): return {k: v - v.mean() for k, v in s.items() if held or Plain}", space)
    before = identity_of(space["work"])
    space["mean"] = 3.0  # a global that is called like an attribute
    copy.deepcopy(Plain())
    assert identity_of(space["work"]) == before


@pytest.mark.parametrize(
    ("one", "two"), [("*x", "x"), ("**x", "x"), ("x", "*, x"), ("x", "x, /"), ("x", "y, x")]
)
def test_kinds_of_parameters_tell_functions_apart(one: str, two: str) -> None:
    def made(parameters: str) -> Any:
        space: dict[str, Any] = {}
        exec(f"def half({parameters}): return x\ndef work(s): return half(s)", space)
        return space["work"]

    assert identity_of(made(one)) == identity_of(made(one)) != identity_of(made(two))


def test_attributes_of_functions_tell_them_apart() -> None:
    def work(samples: Any) -> Any:
        return {k: v * work.by for k, v in samples.items()}  # type: ignore[attr-defined]

    ids = []
    for by in (1.0, 2.0, 1.0):
        work.by = by  # type: ignore[attr-defined]
        ids.append(identity_of(work))
    assert ids[0] == ids[2] != ids[1]


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
    cube(value).to_zarr(path, mode="w", consolidated=False, **options)


def cube(value: float) -> xr.Dataset:
    return cell_id_cube({"time": 8, "lat": 6}, "float64") * 0 + value


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


@pytest.mark.slow
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


@pytest.mark.slow
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


def call(cube: Any) -> str:
    sampling = Sampling.of(cube, sample_size=None, overlap=None, block_size={"time": 1})
    return Call.of(sampling, {}).id


ENGINES = ["netcdf4", "h5netcdf", "scipy"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_what_is_shown_of_a_file_tells_cubes_apart(tmp_path: Path, engine: str) -> None:
    """Group, variable, selection and decoding, whether a coordinate shows them or not."""
    path, groups = tmp_path / "a.nc", [None] if engine == "scipy" else ["a", "b"]
    encoding = {"a": {"_FillValue": 3.0}}
    cube = cell_id_cube({"level": 2, "time": 8, "lat": 6}, "float64", names=("a", "b"))
    for i, group in enumerate(groups):
        cube.to_netcdf(path, mode="a" if i else "w", group=group, engine=engine, encoding=encoding)

    def shown() -> list[xr.Dataset]:
        lazy = [xr.open_dataset(path, engine=engine, group=group) for group in groups]
        computed = xr.open_dataset(path, engine=engine, group=groups[0], chunks={})
        raw = xr.open_dataset(path, engine=engine, group=groups[0], mask_and_scale=False)
        del raw["a"].attrs["_FillValue"]
        return [
            *lazy,
            raw,
            lazy[0][["a"]],
            lazy[0][["b"]].rename(b="a"),
            *(lazy[0].isel(level=i, drop=drop) for i in (0, 1) for drop in (True, False)),
            *(lazy[0].isel(time=half).drop_vars("time") for half in (slice(4), slice(4, 8))),
            lazy[0].isel(lat=[0, 2]).drop_vars("lat"),
            lazy[0].isel(lat=[0, 3]).drop_vars("lat"),
            *(computed.isel(level=i, drop=True) for i in (0, 1)),
        ]

    calls = [call(cube) for cube in shown()]
    assert len(set(calls)) == len(calls)
    assert [call(cube) for cube in shown()] == calls


def test_scalar_dates_of_two_calendars_tell_cubes_apart() -> None:
    dates = [cftime.datetime(2000, 1, 1, calendar=name) for name in ("noleap", "360_day")]
    assert len({call(cube(1.0).assign_coords(run=date)) for date in dates}) == 2


def test_scalar_coordinates_tell_cubes_apart() -> None:
    cube = cell_id_cube({"time": 8, "lat": 6})
    assert call(cube.assign_coords(level=500)) != call(cube.assign_coords(level=1000))


def opened(path: Path) -> xr.Dataset:
    return xr.open_zarr(path, consolidated=False)


COMPUTED: dict[str, Callable[[Path], xr.Dataset]] = {
    "fillna": lambda p: opened(p).fillna(0.0),
    "anomalies": lambda p: opened(p) - opened(p).mean("time"),
    "rolling": lambda p: opened(p).rolling(lat=2, min_periods=1).mean(),
    "clip": lambda p: xr.Dataset({"a": opened(p).a.clip(-5, 5)}),
    "persisted": lambda p: opened(p).persist(),
    "fused": lambda p: opened(p).fillna(0.0).map(lambda v: v.copy(data=dask.optimize(v.data)[0])),
    "inside": lambda p: xr.open_dataset(
        p, engine="zarr", chunks={}, consolidated=False, inline_array=True
    ),
    "dask alone": lambda p: xr.Dataset({"a": (("time", "lat"), da.from_zarr(str(p / "a")))}),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", COMPUTED)
def test_what_dask_computes_of_a_changed_cube_is_another_call(tmp_path: Path, how: str) -> None:
    path = tmp_path / "a.zarr"
    write(path, 1.0)
    first = call(COMPUTED[how](path))
    assert call(COMPUTED[how](path)) == first
    changed = cell_id_cube({"time": 8, "lat": 6}, "float64") * 0 + 2.0
    changed.drop_vars(["time", "lat"]).to_zarr(
        path, region={"time": slice(0, 8)}, consolidated=False
    )
    assert call(COMPUTED[how](path)) != first


def test_a_chunk_replaced_by_an_older_one_of_its_size_is_noticed(tmp_path: Path) -> None:
    """As `cp -p` and `rsync -t` do."""
    write(tmp_path / "a.zarr", 1.0)
    array = tmp_path / "a.zarr" / "a"
    chunk = array / "c" / "0" / "0"
    kept = chunk.stat()
    os.utime(array / "zarr.json", ns=(kept.st_atime_ns, kept.st_mtime_ns + 10**9))
    first = call(tmp_path / "a.zarr")
    os.utime(chunk, ns=(kept.st_atime_ns, kept.st_mtime_ns - 10**9))
    assert call(tmp_path / "a.zarr") != first
    os.utime(chunk, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    assert call(tmp_path / "a.zarr") == first


def write_zip(path: Path, value: float) -> None:
    with ZipStore(path, mode="w") as store:
        write(store, value)  # type: ignore[arg-type]


def write_file(path: Path, value: float) -> None:
    path.unlink(missing_ok=True)
    cube(value).to_netcdf(path, engine="h5netcdf")


def opened_file(path: Path, chunks: Any) -> xr.Dataset:
    file = fsspec.filesystem("file").open(str(path))
    return xr.open_dataset(file, engine="h5netcdf", chunks=chunks)


def shown(fs: Any, path: str = "") -> xr.Dataset:
    return xr.open_zarr(fs.get_mapper(path), consolidated=False)


def references(path: Path) -> dict[str, Any]:
    """A zarr group as kerchunk describes it: metadata in place, chunks elsewhere."""
    files = [file for file in path.rglob("*") if file.is_file()]
    return {
        str(f.relative_to(path)): f.read_text() if f.name == "zarr.json" else [str(f)]
        for f in files
    }


def in_json(path: Path) -> str:
    file = path.with_suffix(".json")
    file.write_text(json.dumps(references(path)))
    return str(file)


# how it is written, named and opened
LOCAL: dict[str, tuple[Callable[[Path, float], None], Callable[[Path], Any]]] = {
    "file URL": (write, lambda p: f"file://{p}"),
    "lazy file URL": (
        write,
        lambda p: xr.open_zarr(f"file://{p}", consolidated=False, chunks=None),
    ),
    "computed of file URL": (
        write,
        lambda p: xr.open_zarr(f"file://{p}", consolidated=False).fillna(0.0),
    ),
    "zip store": (write_zip, lambda p: ZipStore(p, mode="r")),
    "zip URL": (write_zip, lambda p: f"zip://::{p}"),
    "zip by its path": (write_zip, lambda p: shown(ZipFileSystem(str(p)))),
    "zip by a Path": (write_zip, lambda p: shown(fsspec.filesystem("zip", fo=p))),
    "zip by its URL": (write_zip, lambda p: shown(ZipFileSystem(f"file://{p}"))),
    "open zip": (write_zip, lambda p: shown(ZipFileSystem(fsspec.open(f"local://{p}").open()))),
    "references": (write, lambda p: shown(ReferenceFileSystem(references(p)))),
    "references in a file": (write, lambda p: shown(fsspec.filesystem("reference", fo=in_json(p)))),
    "store in a store": (write, lambda p: LoggingStore(LocalStore(p), log_level="ERROR")),
    "folder of a file system": (
        write,
        lambda p: FsspecStore(
            AsyncFileSystemWrapper(DirFileSystem(p.parent, LocalFileSystem()), asynchronous=True),
            path=p.name,
        ),
    ),
    "cached file system": (write, lambda p: f"simplecache::file://{p}"),
    "open file": (write_file, lambda p: opened_file(p, None)),
    "open file in chunks": (write_file, lambda p: opened_file(p, {})),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize("reached", LOCAL)
def test_files_behind_local_urls_are_looked_at(tmp_path: Path, reached: str) -> None:
    made, name = LOCAL[reached]
    made(tmp_path / "a", 1.0)
    made(tmp_path / "b", 1.0)
    first = call(name(tmp_path / "a"))
    assert call(name(tmp_path / "a")) == first != call(name(tmp_path / "b"))
    made(tmp_path / "a", 2.0)
    assert call(name(tmp_path / "a")) != first


class Remote(AbstractFileSystem):
    """Of a host that has the files of this machine."""

    def __init__(self, host: str, password: str | None = None) -> None:
        super().__init__()
        self.on_host = LocalFileSystem()

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return self.on_host.ls(path, detail)

    def info(self, path: str, **kwargs: Any) -> Any:
        return self.on_host.info(path)

    def cat_file(self, path: str, start: Any = None, end: Any = None, **kwargs: Any) -> Any:
        return self.on_host.cat_file(path, start, end)


def test_a_path_on_another_host_is_another_cube(tmp_path: Path) -> None:
    write(tmp_path / "a", 1.0)
    hosts = Remote("one"), Remote(host="one", password="new"), Remote("two")
    first, again, other = (call(shown(host, str(tmp_path / "a"))) for host in hosts)
    assert first == again != other


def test_references_tell_host_and_url_and_ask_a_host_once(tmp_path: Path, monkeypatch: Any) -> None:
    for name in "ab":
        write(tmp_path / name, 1.0, encoding={"a": {"chunks": (2, 6)}})

    def told(name: str, host: str) -> str:
        fs = ReferenceFileSystem(references(tmp_path / name), fs=Remote(host))
        return call(shown(fs))

    first = told("a", "one")
    assert told("a", "one") == first
    assert len({first, told("a", "two"), told("b", "one")}) == 3
    where = Mock(wraps=cube_identity._where)
    monkeypatch.setattr(cube_identity, "_where", where)
    told("a", "one")
    assert where.call_count == 1


def test_a_cube_is_the_same_by_any_name_of_its_folder(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path / "a", 1.0)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    names = [LocalStore("a"), LocalStore(tmp_path / "a"), f"file://{tmp_path}/a", "link"]
    assert len({call(name) for name in names}) == 1


def test_links_in_a_cube_that_lead_nowhere_or_back_are_passed_over(tmp_path: Path) -> None:
    write(tmp_path / "a", 1.0)
    (tmp_path / "a/a/lost").symlink_to(tmp_path / "nothing")
    (tmp_path / "a/a/up").symlink_to(tmp_path / "a")
    (tmp_path / "a/a/self").symlink_to("self")
    assert call(tmp_path / "a") == call(tmp_path / "a")


def test_a_snapshot_of_icechunk_is_one_cube_and_what_is_not_committed_counts() -> None:
    repository = icechunk.Repository.create(icechunk.in_memory_storage())
    session = repository.writable_session("main")
    write(session.store, 1.0)  # type: ignore[arg-type]
    draft = call(session.store)
    write(session.store, 2.0)  # type: ignore[arg-type]
    assert call(session.store) != draft
    session.commit("a")
    first, again = (repository.readonly_session("main").store for _ in range(2))
    assert call(first) == call(again) == call(session.store)


def test_stores_in_the_session_of_the_cube_are_no_change_of_it() -> None:
    repository = icechunk.Repository.create(icechunk.in_memory_storage())
    session = repository.writable_session("main")
    cube(1.0).to_zarr(session.store, group="cube", consolidated=False)
    session.commit("a")
    session = repository.writable_session("main")
    made = MultiProcSampler(
        zarr.open_group(session.store, path="cube", mode="r"),
        nproc=1,
        block_size={"time": 2},
        scale_fn=None,
        train_cube=StorePath(session.store, "train"),
        test_cube=StorePath(session.store, "test"),
    )
    assert made.run() is not None
    assert float(made.get_datasets()[0]["a"].mean()) == 1.0
    cube(2.0).drop_vars(["time", "lat"]).to_zarr(
        session.store, group="cube", region={"time": slice(0, 8)}, consolidated=False
    )
    with pytest.raises(StoreExistsError, match="another cube"):
        made.run()


class Store(LocalStore):
    """Of a user, with a session that is none of Icechunk's."""

    session = object()


def test_a_store_that_has_a_session_is_looked_into(tmp_path: Path) -> None:
    write(tmp_path / "a", 1.0)
    assert call(Store(tmp_path / "a")) == call(LocalStore(tmp_path / "a"))


class Ones(xr.backends.BackendArray):
    """Of a file format that is not known here."""

    shape, dtype = (8, 6), np.dtype("float64")

    def __init__(self, value: float) -> None:
        self.value = value

    def __getitem__(self, key: Any) -> Any:
        def get(key: Any) -> Any:
            return np.full((8, 6), self.value)[key]

        return indexing.explicit_indexing_adapter(
            key, self.shape, indexing.IndexingSupport.BASIC, get
        )


def stored(value: float) -> MemoryStore:
    store = MemoryStore()
    write(store, value)  # type: ignore[arg-type]
    return store


def in_memory_store(value: float) -> xr.Dataset:
    return xr.open_zarr(stored(value), consolidated=False, chunks=None)


def zip_in_memory(value: float) -> xr.Dataset:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as file:
        for name, part in stored(value)._store_dict.items():
            file.writestr(name, part.to_bytes())
    return shown(ZipFileSystem(content))


def references_to_memory(value: float) -> xr.Dataset:
    memory, refs = fsspec.filesystem("memory"), {}
    for name, part in stored(value)._store_dict.items():
        memory.pipe_file(f"/refs/{name}", part.to_bytes())
        refs[name] = [f"memory://refs/{name}"]
    return shown(ReferenceFileSystem(refs))


def unpicklable(value: float) -> xr.Dataset:
    lock = threading.Lock()
    array = da.zeros((8, 6)).map_blocks(lambda block: block + (value if lock else 0))
    return xr.Dataset({"a": (("time", "lat"), array)})


class Around(WrapperStore[MemoryStore]):
    """What it does to keys and bytes is not known."""


def wrapped_store(value: float) -> xr.Dataset:
    return xr.open_zarr(Around(stored(value)), consolidated=False).fillna(0.0)


def open_file(value: float) -> xr.Dataset:
    content = io.BytesIO()
    cube(value).to_netcdf(content, engine="h5netcdf")
    return xr.open_dataset(content, engine="h5netcdf", chunks={})


UNKNOWN: dict[str, Callable[[float], xr.Dataset]] = {
    "file": lambda v: xr.Dataset({"a": (("time", "lat"), indexing.LazilyIndexedArray(Ones(v)))}),
    "zarr in memory": in_memory_store,
    "zip in memory": zip_in_memory,
    "references to memory": references_to_memory,
    "open file": open_file,
    "store of a user's around another": wrapped_store,
    "dask": unpicklable,
}


@pytest.mark.slow
@pytest.mark.parametrize("of", UNKNOWN)
def test_what_nothing_else_tells_apart_is_known_by_its_cells(of: str) -> None:
    made = UNKNOWN[of]
    assert call(made(1.0)) == call(made(1.0)) != call(made(2.0))


def test_a_damaged_chunk_is_named_where_only_cells_tell() -> None:
    store = stored(1.0)
    store._store_dict["a/c/0/0"] = cpu.Buffer.from_bytes(b"damaged")
    with pytest.raises(StoreError, match=r"'a' cannot be read at time 0:1"):
        call(xr.open_zarr(store, consolidated=False))


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path / "a", 1.0)
    cube = opened(tmp_path / "a")

    def refuse(folder: str) -> Any:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StoreError, match=r"'a' cannot be looked at.*denied.*a/a.*run again"):
        call(cube)


@pytest.mark.parametrize("gone", ["a/c/0/0", "a/c"])
def test_what_goes_while_it_is_looked_at_is_gone(
    tmp_path: Path, monkeypatch: Any, gone: str
) -> None:
    write(tmp_path / "a", 1.0)
    cube, scandir = opened(tmp_path / "a"), os.scandir

    def scan(folder: str) -> Any:
        entries = list(scandir(folder))
        if folder == str((tmp_path / "a" / gone).parent):
            (tmp_path / "a" / gone).rename(tmp_path / "gone")
        return entries

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scan)
        first = call(cube)
    assert (tmp_path / "gone").exists()
    assert call(cube) == first


@pytest.mark.parametrize(
    "values",
    [
        np.float32(1.5),
        np.empty((0, 3)),
        np.arange(12).reshape(3, 4)[:, ::2],
        np.arange(3, dtype=">i2"),
        np.array(["2000-01-01", "NaT"], "M8[ns]"),
        np.array(["a", "bc"]),
        np.array([(1, 2.0)], "i4,f8"),
        np.broadcast_to(np.arange(2.0), (3, 2)),
        np.arange(2**20).reshape(2**10, -1).T,
        np.ma.masked_array([1, 2, 3], [True, False, True]),
    ],
    ids=repr,
)
def test_an_array_is_hashed_by_its_bytes(values: Any) -> None:
    values = np.asanyarray(values)
    data = np.asarray(values).tobytes()
    if np.ma.isMaskedArray(values):
        data += np.ma.getmaskarray(values).tobytes()
    wanted = f"{values.dtype} {values.shape} {hashlib.sha256(data).hexdigest()}"
    assert hash_of(values) == wanted


def test_an_array_of_several_fields_is_hashed_with_the_objects_in_them() -> None:
    one, same, text, number = (
        np.array([row, (3, "c")], [("n", "i4"), ("o", object)])
        for row in ((1, "a"), (1, "a"), (1, "b"), (2, "a"))
    )
    assert hash_of(one) == hash_of(same)
    assert len({hash_of(one), hash_of(text), hash_of(number)}) == 3


@pytest.mark.parametrize("turned", [False, True])
def test_an_array_is_hashed_without_a_copy_of_it_all(turned: bool) -> None:
    values = np.zeros((2**12, 2**10))
    tracemalloc.start()
    hash_of(values.T if turned else values)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < values.nbytes / 4


class Future:
    """Of a cluster: what it stands for does not tell it apart."""

    def __init__(self, value: float) -> None:
        self.value = value

    def __reduce__(self) -> Any:
        return float, (0.0,)

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return np.asarray(self.value, dtype)


def test_a_scalar_on_a_cluster_is_known_by_its_value(monkeypatch: Any) -> None:
    monkeypatch.setattr(Future, "__module__", "distributed.client")

    def with_scalar(value: float) -> xr.Dataset:
        scalar = da.Array({("s",): Future(value)}, "s", (), dtype="float64")
        return cell_id_cube({"time": 8, "lat": 6}).assign_coords(s=((), scalar))

    calls = [call(with_scalar(value)) for value in (1.0, 1.0, 2.0)]
    assert calls[0] == calls[1] != calls[2]


def test_a_cube_changed_after_it_was_planned_is_planned_again(tmp_path: Path) -> None:
    paths = {f"{part}_cube": tmp_path / f"{part}.zarr" for part in ("train", "test")}
    cube = cell_id_cube({"time": 8, "lat": 6}, "float64")
    cube.to_zarr(tmp_path / "a.zarr", consolidated=False)
    sampler = MultiProcSampler(tmp_path / "a.zarr", nproc=1, block_size={"time": 2}, **paths)
    before = sampler.plan()
    assert sampler.plan() is before
    (cube * 10 + 5).drop_vars(["time", "lat"]).to_zarr(
        tmp_path / "a.zarr", region={"time": slice(0, 8)}, consolidated=False
    )
    assert float(sampler.get_datasets()[0]["a"].mean()) == pytest.approx(0, abs=1e-9)


class Caching:
    """Keeps on its first call what it needs for the next; fails while told to."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock, self.by = folder, None, None  # type: ignore[var-annotated]

    def __call__(self, samples: Any) -> Any:
        if self.lock is None:
            self.lock, self.by = threading.Lock(), np.ones(2)
        if (self.folder / "fail").exists():
            raise ValueError("asked to fail")
        return samples


CACHE: dict[str, float] = {}


def caching(samples: Any) -> Any:
    by = CACHE.setdefault("by", 1.0)
    return {name: values * by for name, values in samples.items()}


def test_what_a_callback_keeps_does_not_make_it_another(tmp_path: Path) -> None:
    CACHE.clear()
    cube = cell_id_cube({"time": 8, "lat": 6}, "float64")

    def sampler(callback: Any, name: str) -> MultiProcSampler:
        paths = {f"{part}_cube": tmp_path / name / f"{part}.zarr" for part in ("train", "test")}
        return MultiProcSampler(
            cube, nproc=1, block_size={"time": 2}, scale_fn=None, callback=callback, **paths
        )

    made = sampler(caching, "module")
    assert made.run() is not None
    assert made.run() is None
    callback = Caching(tmp_path)
    (tmp_path / "fail").touch()
    with pytest.raises(RunError, match="asked to fail"):
        sampler(callback, "object").run()
    (tmp_path / "fail").unlink()
    made = sampler(callback, "object")
    assert made.run() is not None
    assert made.run() is None
    assert sampler(callback, "object").run() is None


KEEPING = """
import numpy as np
BY, TABLE, CALLS = 1.0, None, 0
def scale(x):
    global TABLE, CALLS
    if TABLE is None:
        TABLE = np.ones(4)
    CALLS += 1
    return x * TABLE[0] * BY
"""


def test_what_a_module_keeps_of_calls_does_not_make_a_callback_another(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """Modules are not copied; an interrupted run goes on, and a change of the user's counts."""
    (tmp_path / "keeping.py").write_text(KEEPING)
    monkeypatch.syspath_prepend(tmp_path)
    keeping = importlib.import_module("keeping")
    monkeypatch.setitem(sys.modules, "keeping", keeping)

    def sampler() -> MultiProcSampler:
        return MultiProcSampler(
            cell_id_cube({"time": 64, "lat": 6}, "float64"),
            nproc=1,
            block_size={"time": 2},
            chunk_size=12,
            scale_fn=None,
            callback=lambda samples: {k: keeping.scale(v) for k, v in samples.items()},
            train_cube=tmp_path / "train.zarr",
            test_cube=tmp_path / "test.zarr",
        )

    def interrupt(*args: Any) -> None:
        record(*args)
        raise KeyboardInterrupt

    first = sampler()
    first.plan()
    record = multiproc_sampler._record
    with monkeypatch.context() as patch:
        patch.setattr(multiproc_sampler, "_record", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sampler().run()
    written = sampler().run()
    assert written is not None
    assert written.resumed > 0
    assert first.run() is sampler().run() is None
    keeping.BY = 2.0
    with pytest.raises(StoreExistsError, match="another call"):
        sampler().run()
