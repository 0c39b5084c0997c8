"""Recognition of the same call: in other processes, and after a change of cube or callback."""

from __future__ import annotations

import collections
import functools
import importlib.machinery
import io
import logging
import os
import subprocess
import sys
import threading
import tracemalloc
import types
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cftime
import dask
import dask.array as da
import icechunk
import numpy as np
import pytest
import xarray as xr
import zarr
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.zip import ZipFileSystem
from scipy.spatial import KDTree
from xarray.core import indexing
from zarr.storage import LocalStore, MemoryStore, StorePath

from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    StoreError,
    StoreExistsError,
)
from ml4cube.datasets import multiproc_sampler
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.sampling.identity.callback import UnknownCallbackError, identity_of
from ml4cube.sampling.identity.cube import hash_of
from ml4cube.sampling.identity.provenance import Call
from ml4cube.sampling.parts import Parts
from ml4cube.sampling.sampled_cube import sample_cube
from ml4cube.store.metadata import StoreMetadata
from tests.cubes import cell_id_cube
from tests.samplestores import paths

SCRIPT = """
import functools
from numpy import clip
from scipy import stats
from ml4cube.sampling.identity.callback import identity_of
NAMES = {{"t2m", "ndvi", "sst", "lai"}}
LIST = [NAMES, {{"a": frozenset("xyz")}}]
{comment}
def half(x):
    return x / {number}
def again(samples, n=3):
    return samples if n == 0 else again(samples, n - 1)
def twice(function):
    @functools.wraps(function)
    def wrapped(samples):
        return function(function(samples))
    return wrapped
@twice
def wrapped(samples):
    return {{k: v * {number} for k, v in samples.items()}}
callbacks = [
    lambda s: {{k: v * 2 if k in {{"t2m", "ndvi", "sst"}} else v for k, v in s.items()}},
    lambda s: {{k: half(v) for k, v in s.items() if k in NAMES or LIST}},
    functools.partial(lambda names, s: half(s), {{"p", "q", "r"}}),
    again,
    lambda s: {{k: clip(v, 0, 1) for k, v in s.items()}},
    lambda s: {{k: stats.norm.cdf(v) * {number} for k, v in s.items()}},
    wrapped,
]
print([identity_of(f) for f in callbacks])
"""


HELPERS = """
import numpy as np
from . import helpers as itself
BY = {number}
def scale(x):
    return itself.times(x)
def times(x):
    return x * BY
def other(x):
    return x
"""
CALLBACKS = """
import numpy as np
import work.helpers
from ml4cube.sampling.identity.callback import identity_of
from work import helpers
callbacks = [
    lambda s: helpers.scale(s),
    lambda s: work.helpers.scale(s),
    helpers.scale,
    lambda s: helpers.BY,
    lambda s: helpers.other(s),
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
    """For every hash seed, file and line that it stands in; not if what it does changes."""
    first = identities(tmp_path, 1)
    assert identities(tmp_path, 2, comment="# one line more") == first
    pairs = zip(identities(tmp_path, 3, number=3), first, strict=True)
    assert [n for n, (a, b) in enumerate(pairs) if a != b] == [1, 2, 5, 6]


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
    assert changed == [True] * 4 + [False] * 2


def closing_over(value: Any) -> Any:
    return lambda samples: samples if value else None


def test_values_tell_callbacks_apart() -> None:
    values = [1, 2, 1.0, True, "1", b"1", (1,), [1], {1}, {"a": 1}, None]
    values += [np.arange(2), np.arange(3), np.arange(2.0), np.float32(1)]
    assert len({identity_of(closing_over(v)) for v in values}) == len(values)
    assert identity_of(closing_over({1, 2})) == identity_of(closing_over({2, 1}))


def test_defaults_and_attributes_tell_callbacks_apart() -> None:
    def made(by: float, other: float = 0.0, attribute: float = 0.0) -> Any:
        def work(samples: Any, by: float = by, *, other: float = other) -> Any:
            return {k: v * by + other + work.to for k, v in samples.items()}  # type: ignore[attr-defined]

        work.to = attribute  # type: ignore[attr-defined]
        return work

    ids = [identity_of(made(*given)) for given in [(1,), (1,), (2,), (1, 1), (1, 0, 1)]]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4


def test_a_global_with_the_name_of_an_attribute_or_argument_is_not_used() -> None:
    globals()["mean"], globals()["k"] = Plain(), Plain()
    try:
        identity_of(lambda samples: {k: v - v.mean() for k, v in samples.items()})
    finally:
        del globals()["mean"], globals()["k"]


class Plain:
    """An object of the user's."""

    def __call__(self, samples: Any) -> Any:
        return samples


def without_source() -> Any:
    space: dict[str, Any] = {}
    exec("def work(samples): return samples", space)
    return space["work"]


def importing(samples: Any) -> Any:
    from tests import cubes

    return samples if cubes else None


def work_in(file: Path, name: str, returned: Any) -> Any:
    """A function of a file that is loaded by its path, as a module of some name."""
    file.write_text(f"def work(samples): return {returned}\n")
    loader = importlib.machinery.SourceFileLoader(name, str(file))
    module = types.ModuleType(name)
    loader.exec_module(module)
    return module.work


def edited(folder: Path) -> Any:
    """A function whose file was changed after it was imported."""
    work = work_in(folder / "edited.py", "edited", "samples")
    (folder / "edited.py").write_text("def work(samples): return 2 * samples\n")
    return work


PAIR = (lambda samples: samples, lambda samples: None)
UNKNOWN_CALLBACKS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "object": (lambda _: Plain(), "of type .*Plain"),
    "method": (lambda _: Plain().__call__, "of type builtins.method"),
    "class": (lambda _: closing_over(Plain), "value in .*of type builtins.type"),
    "tree": (lambda _: closing_over(KDTree([[1.0], [2.0]])), "KDTree"),
    "tensor": (
        lambda _: closing_over(pytest.importorskip("torch").ones(2)),
        "of type torch.Tensor",
    ),
    "subclass": (lambda _: closing_over(collections.OrderedDict()), "OrderedDict"),
    "objects": (lambda _: closing_over(np.array([Plain()])), "numpy.ndarray"),
    "mask": (lambda _: closing_over(np.ma.masked_equal([1.0], 1.0)), "MaskedArray"),
    "import": (lambda _: importing, "importing imports tests when it is called"),
    "no source": (lambda _: without_source(), "source code of .*work cannot be found"),
    "two in a line": (lambda _: PAIR[0], "source code of .* cannot be found"),
    "edited": (edited, "source code of .*work cannot be found"),
}


@pytest.mark.parametrize("of", UNKNOWN_CALLBACKS)
def test_a_callback_that_cannot_be_identified_is_refused(tmp_path: Path, of: str) -> None:
    made, told = UNKNOWN_CALLBACKS[of]
    with pytest.raises(UnknownCallbackError, match=told):
        identity_of(made(tmp_path))


def sampler(cube: Any, folder: Path, **options: Any) -> MultiProcSampler:
    given = {"nproc": 1, "block_size": {"time": 2}, "scale_fn": None, **paths(folder)}
    return MultiProcSampler(cube, **(given | options))


def with_callback(folder: Path, callback: Any, **options: Any) -> MultiProcSampler:
    cube = cell_id_cube({"time": 64, "lat": 6}, "float64")
    return sampler(cube, folder, chunk_size=12, callback=callback, **options)


def interrupted(sampler: MultiProcSampler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run until the first shard is recorded."""
    record = multiproc_sampler._record

    def interrupt(*args: Any) -> None:
        record(*args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(multiproc_sampler, "_record", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sampler.run()


def test_an_unknown_callback_starts_anew_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made() -> MultiProcSampler:
        with pytest.warns(UserWarning, match=r"of type .*Plain.*starts over.*give version="):
            return with_callback(tmp_path, Plain())

    interrupted(made(), monkeypatch)
    second = made()
    written = second.run()
    assert written is not None
    assert written.resumed == 0
    assert second.run() is None  # the same object knows its own stores
    with pytest.raises(StoreExistsError, match="callback: code, values or version"):
        made().run()


def test_a_version_stands_for_the_callback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def made(version: Any) -> MultiProcSampler:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            return with_callback(tmp_path, Plain(), version=version)

    interrupted(made(1), monkeypatch)
    written = made(1).run()
    assert written is not None
    assert written.resumed > 0
    assert made(1).run() is None
    with pytest.raises(StoreExistsError, match="was 'version 1' and is 'version 2'"):
        made(2).run()


def test_other_objects_are_refused_as_version(tmp_path: Path) -> None:
    with pytest.raises(InvalidTypeError, match=r"version must be a number or a text, got 1\.5"):
        with_callback(tmp_path, Plain(), version=1.5)
    with pytest.raises(InvalidValueError, match="version=1 is the version of callback="):
        with_callback(tmp_path, None, version=1)


mean = 0.0  # has the name of a variable that the callbacks below close over, and of a method


def closing_over_a_name_that_is_global_too(mean: float) -> Callable[[Any], Any]:
    return lambda samples: {n: v * 0 + v.mean() * mean for n, v in samples.items()}


def test_a_closure_counts_where_a_global_has_its_name() -> None:
    made = [closing_over_a_name_that_is_global_too(value) for value in (1.0, 1.0, 2.0)]
    first, again, other = map(identity_of, made)
    assert first == again != other


def test_a_closure_without_a_value_yet_is_no_error() -> None:
    def made(late: bool) -> Callable[[Any], Any]:
        def work(samples: Any) -> Any:
            return helper(samples)

        known = identity_of(work) if late else None
        helper = len
        return known or identity_of(work)

    assert made(True) != made(False)


def test_a_module_of_the_users_with_the_name_of_a_library_counts(tmp_path: Path) -> None:
    found = [
        identity_of(closing_over(work_in(tmp_path / "h.py", "profile", number)))
        for number in (1, 22)
    ]
    assert found[0] != found[1]


def test_a_callback_that_wraps_a_function_of_a_library_counts_by_its_own_code() -> None:
    def lowered(samples: Any) -> Any:
        return {k: np.clip(v, 0, 1) for k, v in samples.items()}

    def raised(samples: Any) -> Any:
        return {k: np.clip(v, 1, 2) for k, v in samples.items()}

    one, other = functools.wraps(np.clip)(lowered), functools.wraps(np.clip)(raised)
    assert (other.__module__, other.__qualname__) == (np.clip.__module__, "clip")
    assert len({identity_of(f) for f in (np.clip, one, other)}) == 3


def test_the_mask_of_a_masked_array_behind_dask_counts() -> None:
    def cube(rows: int) -> xr.Dataset:
        mask = np.repeat(np.arange(8) < rows, 4).reshape(8, 4)
        values = np.ma.masked_array(np.arange(32.0).reshape(8, 4), mask)
        array = da.from_array(values, chunks=4, name="given")
        return xr.Dataset({"a": (("time", "x"), array)})

    assert call(cube(0)) == call(cube(0)) != call(cube(3))


@pytest.mark.parametrize("held", [threading.Lock(), (k for k in "ab")])
def test_a_callback_that_cannot_be_sent_is_named(tmp_path: Path, held: Any) -> None:
    with pytest.raises(InvalidTypeError, match=r"callback=.*lambda.*inside the callback"):
        with_callback(tmp_path, closing_over(held), version=1)


def write(path: Path, value: float, **options: Any) -> None:
    cube(value).to_zarr(path, mode="w", consolidated=False, **options)


def cube(value: float) -> xr.Dataset:
    return cell_id_cube({"time": 8, "lat": 6}, "float64") * 0 + value


def change(path: Any, **options: Any) -> None:
    """Write other cells in place."""
    cells = cube(2.0).drop_vars(["time", "lat"])
    cells.to_zarr(path, region={"time": slice(0, 8)}, consolidated=False, **options)


def run(cube: Any, folder: Path) -> float:
    return float(sampler(cube, folder).get_datasets()[0]["a"].mean())


OPENED = {
    "dask": lambda p: xr.open_zarr(p, consolidated=False),
    "lazy": lambda p: xr.open_zarr(p, consolidated=False, chunks=None),
    "dataset": lambda p: xr.open_dataset(p, engine="zarr", consolidated=False),
    "selection": lambda p: xr.open_zarr(p, consolidated=False).isel(time=slice(0, 6)),
    "lazy selection": lambda p: xr.open_zarr(p, consolidated=False, chunks=None).isel(lat=[0, 2]),
    "path": lambda p: p,
    "file URL": lambda p: f"file://{p}",
}


@pytest.mark.parametrize(
    "opened",
    ["dask", *(pytest.param(how, marks=pytest.mark.slow) for how in OPENED if how != "dask")],
)
def test_a_cube_elsewhere_or_changed_in_place_is_another_call(tmp_path: Path, opened: str) -> None:
    """But stores written into its folder are no change of it."""
    path, show = tmp_path / "a.zarr", OPENED[opened]
    write(path, 1.0)
    write(tmp_path / "b.zarr", 2.0)
    out = tmp_path if opened == "selection" else path / "samples"
    for _ in range(2):
        assert run(show(path), out) == 1.0
    with pytest.raises(StoreExistsError, match="another cube"):
        run(show(tmp_path / "b.zarr"), out)
    change(path)
    with pytest.raises(StoreExistsError, match="another cube"):
        run(show(path), out)


def test_a_cube_whose_variables_come_in_another_order_is_the_same(tmp_path: Path) -> None:
    """As they do in a zarr store without consolidated metadata."""
    cube = cell_id_cube({"time": 8, "lat": 6}, names=("a", "b"))
    assert sampler(cube[["a", "b"]], tmp_path).run() is not None
    assert sampler(cube[["b", "a"]], tmp_path).run() is None


def call(cube: Any) -> str:
    sampled = sample_cube(cube, Parts(block_size={"time": 1}))
    return Call.of_samples(sampled, {}).id


ENGINES = ["netcdf4", "h5netcdf", "scipy"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_group_selection_and_decoding_tell_cubes_apart(tmp_path: Path, engine: str) -> None:
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


def test_scalar_coordinates_tell_cubes_apart() -> None:
    """Also dates of two calendars."""
    dates = [cftime.datetime(2000, 1, 1, calendar=name) for name in ("noleap", "360_day")]
    given = [{"level": 500}, {"level": 1000}, *({"run": date} for date in dates)]
    assert len({call(cube(1.0).assign_coords(scalar)) for scalar in given}) == 4


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
def test_what_dask_computes_of_a_changed_cube_is_another_call(
    tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Which is known without reading the cube once more."""
    path = tmp_path / "a.zarr"
    write(path, 1.0)
    with caplog.at_level(logging.INFO):
        first = call(COMPUTED[how](path))
        assert call(COMPUTED[how](path)) == first
        change(path)
        assert call(COMPUTED[how](path)) != first
    assert "in full" not in caplog.text


def test_a_scalar_coordinate_counts_by_its_value(tmp_path: Path) -> None:
    cube(1.0).assign_coords(height=2.0).to_zarr(tmp_path / "a.zarr", consolidated=False)
    opened = xr.open_zarr(tmp_path / "a.zarr", chunks=None, consolidated=False)
    read = opened.assign_coords(height=opened.height.load())
    assert call(opened) == call(read)
    assert call(opened) != call(opened.assign_coords(height=3.0))


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


def shown(fs: Any, path: str = "") -> xr.Dataset:
    return xr.open_zarr(fs.get_mapper(path), consolidated=False)


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
    hosts = Remote(host="one"), Remote(host="one", password="new"), Remote(host="two")
    first, again, other = (call(shown(host, str(tmp_path / "a"))) for host in hosts)
    assert first == again != other


def test_a_cube_is_the_same_by_any_name_of_its_folder(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path / "a", 1.0)
    (tmp_path / "link").symlink_to(tmp_path / "a")
    monkeypatch.chdir(tmp_path)
    names = [LocalStore("a"), LocalStore(tmp_path / "a"), f"file://{tmp_path}/a", "link"]
    assert len({call(name) for name in names}) == 1


def test_a_change_behind_a_link_to_a_folder_is_another_cube(tmp_path: Path) -> None:
    write(tmp_path / "a", 1.0)
    (tmp_path / "a/a/c").rename(tmp_path / "elsewhere")
    (tmp_path / "a/a/c").symlink_to(tmp_path / "elsewhere")
    before = call(tmp_path / "a")
    chunk = next(path for path in (tmp_path / "elsewhere").rglob("*") if path.is_file())
    os.utime(chunk, (1, 1))
    assert call(tmp_path / "a") != before


def test_broken_and_circular_links_are_ignored(tmp_path: Path) -> None:
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
    source = zarr.open_group(session.store, path="cube", mode="r")
    places = {f"{part}_cube": StorePath(session.store, part) for part in ("train", "test")}
    made = sampler(source, Path(), **places)
    assert made.run() is not None
    assert float(made.get_datasets()[0]["a"].mean()) == 1.0
    change(session.store, group="cube")
    with pytest.raises(StoreExistsError, match="another cube"):
        made.run()


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


def unpicklable(value: float) -> xr.Dataset:
    lock = threading.Lock()
    array = da.zeros((8, 6)).map_blocks(lambda block: block + (value if lock else 0))
    return xr.Dataset({"a": (("time", "lat"), array)})


def open_file(value: float) -> xr.Dataset:
    content = io.BytesIO()
    cube(value).to_netcdf(content, engine="h5netcdf")
    return xr.open_dataset(content, engine="h5netcdf", chunks={})


UNKNOWN: dict[str, Callable[[float], xr.Dataset]] = {
    "file": lambda v: xr.Dataset({"a": (("time", "lat"), indexing.LazilyIndexedArray(Ones(v)))}),
    "zarr in memory": in_memory_store,
    "zip in memory": zip_in_memory,
    "open file": open_file,
    "dask": unpicklable,
}


@pytest.mark.slow
@pytest.mark.parametrize("of", UNKNOWN)
def test_other_cubes_are_known_by_their_cells(of: str) -> None:
    made = UNKNOWN[of]
    assert call(made(1.0)) == call(made(1.0)) != call(made(2.0))


def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, monkeypatch: Any) -> None:
    write(tmp_path / "a", 1.0)
    cube = opened(tmp_path / "a")

    def refuse(folder: str) -> Any:
        raise PermissionError(13, "Permission denied", folder)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(StoreError, match=r"'a' has changed: .*denied.*a/a.*run again"):
        call(cube)


def test_a_cube_changed_after_it_was_planned_is_planned_again(tmp_path: Path) -> None:
    write(tmp_path / "a.zarr", 1.0)
    made = sampler(tmp_path / "a.zarr", tmp_path)
    before = made.plan()
    assert made.plan() is before
    change(tmp_path / "a.zarr")
    assert StoreMetadata.of(made.get_datasets()[0]).statistics["a"].mean == 2.0


@pytest.mark.parametrize("shape", [(2**12, 2**10), (2**22,)])
def test_an_array_is_hashed_by_its_values_without_a_copy_of_it_all(shape: tuple[int, ...]) -> None:
    values = np.arange(np.prod(shape)).reshape(shape)[::-1]
    tracemalloc.start()
    found = [hash_of(values), hash_of(values.T)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < values.nbytes / 4
    assert found == [hash_of(values.copy()), hash_of(values.T.copy())]
    values[-1] += 1
    assert hash_of(values) != found[0]
