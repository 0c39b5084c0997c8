"""`inspect`, `split`, `stats`, `sample`, `doctor` and `rerun` do what the functions do."""

import contextlib
import errno
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dask
import distributed
import numpy as np
import pytest
import xarray as xr
from xarray.backends import BackendEntrypoint

from ml4cube.cli import files
from ml4cube.cube.engine import DaskCluster
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.store import StoreMetadata, open_store
from ml4cube.ledger.folders import whole_file
from ml4cube.ledger.manifest import read_manifest
from ml4cube.preprocessing import Statistics
from ml4cube.splits import assign_block_split, assign_region_split, assign_time_split
from tests.cli.running import error_of, invoke, small_cube
from tests.clusters import local_cluster

TARGETS = "--train-cube train.zarr --test-cube test.zarr --val-cube val.zarr --nproc 1"
SAMPLE = f"sample cube.zarr --recipe split.json --sample-size '{{lat: 2, lon: 2}}' {TARGETS}"


@pytest.fixture
def recipe(cube):
    invoke("split cube.zarr --method time --split 0.5 --val 0.25 --out split.json")


@pytest.fixture
def stores(recipe):
    return json.loads(invoke(f"{SAMPLE} --to-pred y --json").stdout)


def report_of(line, code=0):
    return json.loads(invoke(f"{line} --json", code=code).stdout)


# ------------------------------------------------------------------ split and stats


@pytest.mark.parametrize(
    "line",
    [
        "inspect cube.dat",
        "split cube.dat --method time --split 0.5 --out none.json --overwrite",
        "stats cube.dat --recipe split.json",
        f"{SAMPLE} --dry-run".replace("cube.zarr", "cube.dat"),
        "evaluate cube.zarr cube.dat --dry-run",
    ],
)
def test_engine_says_how_xarray_opens_a_file(recipe, line):
    pytest.importorskip("netCDF4")
    xr.open_zarr("cube.zarr").drop_encoding().to_netcdf("cube.dat", format="NETCDF3_64BIT")
    invoke(f"{line} --engine scipy")
    assert "cube.dat cannot be opened as a cube" in error_of(f"{line} --engine h5netcdf")


@pytest.mark.parametrize(
    ("line", "function"),
    [
        (
            "--block-size '{lat: 3, lon: 4}' --split 0.5 --val 0.25 --seed 7",
            lambda ds: assign_block_split(ds, {"lat": 3, "lon": 4}, 0.5, val=0.25, seed=7),
        ),
        (
            "--method time --split 0.5 --gap 1",
            lambda ds: assign_time_split(ds, 0.5, gap=1),
        ),
        (
            "--method region --regions region --test '[b]'",
            lambda ds: assign_region_split(ds, "region", test=["b"]),
        ),
    ],
)
def test_split_writes_the_recipe_of_the_function(cube, line, function):
    ds = small_cube().assign_coords(region=("lat", list("aabbcc")))
    ds.to_zarr("regions.zarr")
    shares = report_of(f"split regions.zarr {line} --out s.json")
    label = function(xr.open_zarr("regions.zarr")).split
    assert json.loads(Path("s.json").read_text()) == json.loads(label.attrs["ml4cube_split"])
    for part, code in {"train": 1, "test": 0, "val": 2, "excluded": 255}.items():
        assert shares[part] == pytest.approx(float((label == code).mean()))
    assert "method" in Path("s.json.yaml").read_text()
    assert "s.json exists" in error_of(f"split regions.zarr {line} --out s.json")
    invoke(f"split regions.zarr {line} --out s.json --overwrite")
    invoke("split --config s.json.yaml --out again.json --no-overwrite")
    assert Path("again.json").read_bytes() == Path("s.json").read_bytes()


WRITING = {
    "split": "split cube.zarr --method time --split 0.5 --out out.json",
    "stats": "stats cube.zarr --out out.json",
    "evaluate": "evaluate cube.zarr cube.zarr --out out.json",
}


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize("is_repeat", [False, True])
@pytest.mark.parametrize("writes", [0, 1])
def test_a_full_disk_leaves_all_or_nothing_and_the_repeat_works(
    cube, monkeypatch, command, is_repeat, writes
):
    line = WRITING[command]
    if is_repeat:
        invoke(f"{line} --variables [a]")
        line += " --overwrite"
    before = {path.name: path.read_bytes() for path in Path().glob("out*")}
    left = [writes]

    @contextlib.contextmanager
    def full(path: Path) -> Iterator[Any]:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with whole_file(path) as file:
            yield file

    with monkeypatch.context() as patch:
        patch.setattr(files, "whole_file", full)
        said = invoke(line, code=1).stderr.splitlines()[-1]  # after warnings
    assert "out.json" in said
    assert "No space left on device; make room" in said
    assert {path.name: path.read_bytes() for path in Path().glob("out*")} == before
    invoke(line)
    assert Path("out.json").exists()
    assert sorted(path.name for path in Path().glob("out*")) == ["out.json", "out.json.yaml"]


def test_samples_whose_settings_found_no_room_are_completed_by_the_repeat(recipe, monkeypatch):
    @contextlib.contextmanager
    def full(path: Path) -> Iterator[Any]:
        if path.name == "val.zarr.yaml":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with whole_file(path) as file:
            yield file

    with monkeypatch.context() as patch:
        patch.setattr(files, "whole_file", full)
        said = invoke(SAMPLE, code=1).stderr
    assert "val.zarr.yaml cannot be written: No space left on device; make room" in said
    assert not list(Path().glob("*.tmp"))
    invoke(SAMPLE, code=3)
    assert {path.name for path in Path().glob("*.zarr.yaml")} == {
        f"{part}.zarr.yaml" for part in ("train", "val", "test")
    }


@pytest.mark.parametrize("command", WRITING)
@pytest.mark.parametrize("mine", ["foreign", "changed"])
def test_only_a_result_that_is_as_it_was_written_is_overwritten(cube, command, mine):
    if mine == "changed":
        invoke(WRITING[command])
    Path("out.json").write_text("{}")
    said = error_of(f"{WRITING[command]} --overwrite")
    assert "out.json exists, and is not as a command of ml4cube wrote it" in said
    assert "remove it by hand" in said
    assert Path("out.json").read_text() == "{}"


def test_stats_are_those_of_the_train_part(recipe):
    report = report_of("stats cube.zarr --recipe split.json --out stats.json")
    ds = assign_time_split(xr.open_zarr("cube.zarr"), 0.5, val=0.25)
    expected = Statistics.from_cube(ds)
    assert Statistics.from_json(Path("stats.json").read_text()) == expected
    assert report["part"] == "train"
    train = small_cube().b.isel(time=slice(0, 6))
    assert report["variables"]["b"]["gaps"] == int(train.isnull().sum()) == 6
    assert report["variables"]["b"]["mean"] == pytest.approx(float(train.mean()))
    months = report_of("stats cube.zarr --recipe split.json --by season --variables '[a]'")
    assert months["variables"]["a"]["dims"] == ["season"]
    assert len(months["variables"]["a"]["mean"]) == 4
    middle = report_of("stats cube.zarr --recipe split.json --quantiles '[0.5]'")["variables"]["a"]
    assert middle["q0.5"] == pytest.approx(small_cube().a[:6].quantile(0.5).item(), abs=0.5)
    shown = invoke("stats cube.zarr --recipe split.json --dims time --quantiles '[0.5]'").stdout
    assert shown.splitlines()[1].split()[-1] == "q0.5"


def test_areas_are_those_of_the_bounds_also_of_chosen_variables(cube):
    ds = small_cube()
    edges = np.stack([ds.lat - 0.1, ds.lat + 0.1 * np.arange(1, ds.lat.size + 1)], -1)
    ds["lat_bnds"] = ("lat", "bnds"), edges
    ds.lat.attrs["bounds"] = "lat_bnds"
    ds.to_zarr("bounded.zarr")
    expected = Statistics.from_cube(ds[["a", "lat_bnds"]], weights="area")["a"].mean
    assert expected != pytest.approx(Statistics.from_cube(ds[["a"]], weights="area")["a"].mean)
    chosen = report_of("stats bounded.zarr --weights area --variables '[a]'")["variables"]
    assert list(chosen) == ["a"]
    assert chosen["a"]["mean"] == pytest.approx(expected)


@pytest.mark.parametrize("command", ["split cube.zarr --method time", "stats cube.zarr"])
def test_results_lie_in_the_home_folder(cube, command, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    invoke(f"{command} --out '~/result.json'")
    assert {path.name for path in tmp_path.glob("result*")} == {"result.json", "result.json.yaml"}
    assert "result.json exists" in error_of(f"{command} --out '~/result.json'")
    invoke(f"{command} --out '~/result.json' --overwrite")


def test_texts_lie_at_urls_too(cube):
    invoke("split cube.zarr --method time --out memory://cli/split.json")
    line = "stats cube.zarr --recipe memory://cli/split.json --out memory://cli/stats.json"
    report = report_of(line)
    assert report["part"] == "train"
    assert "memory://cli/stats.json exists" in error_of(line)
    invoke("stats --config memory://cli/stats.json.yaml --overwrite")


# ------------------------------------------------------------------ sample


def test_sample_writes_the_bytes_of_the_sampler(stores):
    ds = assign_time_split(xr.open_zarr("cube.zarr"), 0.5, val=0.25)
    targets = {f"{part}_cube": f"python/{part}.zarr" for part in ("train", "test", "val")}
    size = {"lat": 2, "lon": 2}
    sampler = MultiProcSampler(ds, sample_size=size, to_pred="y", nproc=1, **targets)
    sampler.run()
    for part in ("train", "test", "val"):
        assert read_manifest(f"{part}.zarr") == read_manifest(f"python/{part}.zarr")
    assert stores["accounting"] == dict(sampler.plan().accounting)
    assert report_of(f"{SAMPLE} --to-pred y", code=3)["stores"] == stores["stores"]
    assert "made by another call" in error_of(f"{SAMPLE} --to-pred a")


def test_the_stored_configuration_makes_the_same_stores(stores):
    line = "sample --config train.zarr.yaml --set train_cube=b/train.zarr"
    invoke(f"{line} --test-cube b/test.zarr --val-cube b/val.zarr")
    assert read_manifest("b/train.zarr") == read_manifest("train.zarr")


def test_a_dry_run_counts_and_makes_nothing(recipe):
    before = sorted(Path().rglob("*"))
    plan = report_of(f"{SAMPLE} --dry-run")
    assert "train samples" in invoke(f"{SAMPLE} --dry-run").stdout
    assert sorted(Path().rglob("*")) == before
    assert plan["accounting"]["gap"] == 12
    invoke(SAMPLE)
    assert plan["accounting"] == dict(StoreMetadata.of("train.zarr").accounting)


def test_given_statistics_scale(recipe):
    invoke("stats cube.zarr --out stats.json")
    invoke(f"{SAMPLE} --statistics stats.json")
    stored = StoreMetadata.of("train.zarr").statistics
    assert stored["a"].mean == pytest.approx(float(small_cube().a.mean()))


# ------------------------------------------------------------------ inspect


def test_inspect_tells_roles_chunks_gaps_and_what_is_awkward(cube):
    report = report_of("inspect cube.zarr")
    assert {row["dim"]: row["role"] for row in report["dims"]} == {
        "time": "time",
        "lat": "latitude",
        "lon": "longitude",
    }
    by_name = {row["variable"]: row for row in report["variables"]}
    assert by_name["b"]["gaps"] == float(small_cube().b.isnull().mean())
    assert by_name["a"]["gaps"] == 0
    assert by_name["a"]["chunks"] == {"time": 12, "lat": 6, "lon": 8}
    assert by_name["a"]["megabytes"] == small_cube().a.nbytes / 1e6
    notes = " ".join(report["notes"])
    for word in ("'b' has gaps", "steps of 29 to 31 days", "no split label"):
        assert word in notes
    assert report_of("inspect cube.zarr --no-gaps")["variables"][0].keys().isdisjoint({"gaps"})
    assert "no split label" in invoke("inspect cube.zarr").stdout


def test_inspect_of_awkward_cubes(folder):
    ds = small_cube()
    other_grid = ("time", "row", "column"), np.zeros((12, 3, 3), "float32")
    ds.assign(other=other_grid).to_zarr("two.zarr")
    notes = " ".join(report_of("inspect two.zarr")["notes"])
    assert "the dims of the cube are ambiguous" in notes
    ds["time"] = xr.date_range("2000-01-01", periods=12, calendar="360_day", use_cftime=True)
    ds["label"] = "lat", list("abcdef")
    ds["a"] = ds.a.astype("int16").assign_attrs(scale_factor=0.1)
    ds = ds.rename(lon="depth").assign_coords(depth=[np.nan, *range(7)])
    ds.isel(time=[1, 0, *range(2, 12)]).drop_vars("lat").to_zarr("odd.zarr")
    report = report_of("inspect odd.zarr")
    assert report["dims"][0]["calendar"] == "360_day"
    assert report["left_out"].keys() == {"label"}
    expected = [
        "'time' is not in increasing order",
        "'lat' has no coordinate",
        "'depth' has missing values",
        "no coordinates are latitude",
    ]
    for words in expected:
        assert words in " ".join(report["notes"])


# ------------------------------------------------------------------ rerun


def test_rerun_gives_the_same_bytes(stores):
    report = report_of("rerun train.zarr --out again")
    assert report["differing"] == []
    assert read_manifest("again/test.zarr") == read_manifest("test.zarr")
    before = sorted(Path().rglob("*"))
    assert "byte-equal" in invoke("rerun val.zarr").stdout
    assert sorted(Path().rglob("*")) == before


def test_rerun_finds_damage_and_writes_beside_no_other_store(stores):
    invoke("rerun train.zarr --out again")
    assert "has these stores already" in invoke("rerun train.zarr --out again", code=2).stderr
    chunk = next(path for path in Path("train.zarr").rglob("c/**/*") if path.is_file())
    chunk.write_bytes(bytes([chunk.read_bytes()[0] ^ 1]) + chunk.read_bytes()[1:])
    assert "train.zarr is damaged" in invoke("rerun train.zarr", code=1).stdout


def test_a_stored_configuration_replaces_nothing(stores):
    assert "overwrite: false" in Path("train.zarr.yaml").read_text()
    invoke("sample --config train.zarr.yaml --seed 7 --overwrite")
    assert "overwrite: false" in Path("train.zarr.yaml").read_text()
    error_of("sample --config train.zarr.yaml --seed 8")
    Path("stats.json.yaml").write_text("mine\n")
    assert "no command of ml4cube made it" in error_of("stats cube.zarr --out stats.json")


OPTIONS = [
    "--data-split 0.6 --val-split 0.2 --block-size '{time: 3}' --data-fraq 0.7 --rand-chunk",
    "--overlap '{lat: 0.5}' --sample-size '{lat: 2, time: 2}' --drop-nan if_all_nan --bitround 10",
    "--fill-method '{b: constant}' --const -1 --drop-nan null --compressors zstd --dtype float16",
    "--to-pred '[y, a]' --features b --scale-fn normalize --order grid --chunk-size 5 --seed 3",
    "--array-dims '[cases, lon, time]' --sample-size '{lon: 2}' --compressors null --scale-fn null",
    "--variables '[y, b]' --scale-fn normalize",
    "--statistics stats.json",
]


@pytest.mark.parametrize("options", OPTIONS)
def test_rerun_of_calls_with_many_options(cube, options):
    invoke("stats cube.zarr --out stats.json")
    split = "" if "--data-split" in options else "--data-split 0.5"
    invoke(f"sample cube.zarr {TARGETS} {split} --block-size '{{time: 3}}' {options}")
    assert "byte-equal" in invoke("rerun train.zarr").stdout


def test_rerun_with_statistics_of_more_variables_than_the_store_has(recipe):
    invoke("stats cube.zarr --out stats.json")
    invoke(f"{SAMPLE} --variables '[y, b]' --statistics stats.json")
    assert "cannot be rerun: settings: statistics" in error_of("rerun train.zarr")
    assert "byte-equal" in invoke("rerun train.zarr --statistics stats.json").stdout


class OnlyNamed(BackendEntrypoint):
    """An engine that xarray chooses for no file by itself."""

    def open_dataset(self, path, *, drop_variables=None):
        return small_cube()


def test_rerun_of_a_source_that_needs_an_engine(folder, monkeypatch):
    monkeypatch.setattr("xarray.backends.plugins.list_engines", lambda: {"named": OnlyNamed()})
    Path("cube.txt").write_text("cells")
    invoke(f"sample cube.txt --engine named {TARGETS} --data-split 0.5 --block-size '{{time: 3}}'")
    assert "the call was given an engine, give --engine" in error_of("rerun train.zarr")
    assert "byte-equal" in invoke("rerun train.zarr --engine named").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "line", ["stats cube.zarr --recipe split.json --out {}.json", f"{SAMPLE} --scale-fn null"]
)
def test_a_scheduler_does_the_work_of_any_command(recipe, monkeypatch, line):
    runs = []
    run = DaskCluster.run
    monkeypatch.setattr(DaskCluster, "run", lambda *given: runs.append(1) or run(*given))
    with local_cluster(1) as cluster:
        invoke(f"{line.replace('{}', 'there')} --scheduler {cluster.scheduler_address}")
    assert runs
    with pytest.raises(ValueError, match="client"):
        distributed.default_client()  # it is disconnected
    if "stats" in line:
        invoke(line.replace("{}", "here"))
        assert Path("here.json").read_bytes() == Path("there.json").read_bytes()


def test_a_scheduler_that_is_not_there(recipe):
    with dask.config.set({"distributed.comm.timeouts.connect": "0.2s"}):
        told = error_of("stats cube.zarr --scheduler tcp://127.0.0.1:9", code=1)
    assert "the dask scheduler 'tcp://127.0.0.1:9' cannot be reached" in told


CALLBACK = """
def {name}(sample):
    return {{**sample, "double": {factor} * sample["a"]}}
"""


def test_rerun_with_a_callback(recipe):
    Path("my_callbacks.py").write_text(CALLBACK.format(name="doubled", factor=2))
    invoke(f"{SAMPLE} --callback my_callbacks:doubled")
    assert StoreMetadata.of("train.zarr").provenance["callback"] == "my_callbacks:doubled"
    assert "If you trust it, add --callback my_callbacks:doubled" in error_of("rerun train.zarr")
    line = "rerun train.zarr --callback my_callbacks:doubled"
    assert "byte-equal" in invoke(line).stdout
    assert "byte-equal" in invoke("rerun train.zarr --trust").stdout
    Path("my_others.py").write_text(CALLBACK.format(name="doubled", factor=3))
    told = error_of("rerun train.zarr --callback my_others:doubled")
    assert "cannot be rerun: callback" in told
    shutil.move("my_callbacks.py", "gone.py")
    del sys.modules["my_callbacks"]
    assert "there is no module 'my_callbacks'" in error_of(line)


def test_what_cannot_be_rerun_is_refused(stores):
    ds = xr.open_zarr("cube.zarr")
    by_hand = ("time", np.repeat(np.array([1, 0], "uint8"), 6))
    for name, cube, options, message in (
        ("memory", small_cube(), {}, "it was made from a cube in memory"),
        ("part", ds.isel(lat=slice(2)), {}, "the recipe is for a cube of"),
        ("hand", ds.assign(split=by_hand), {}, "its split label was made by hand"),
        ("lambda", ds, {"callback": lambda sample: sample}, "its callback 'test_what_cannot_be"),
    ):
        targets = {f"{part}_cube": f"{name}/{part}.zarr" for part in ("train", "test")}
        MultiProcSampler(cube, nproc=1, block_size={"time": 3}, **targets, **options).run()
        assert f"{name}/train.zarr cannot be rerun: {message}" in error_of(
            f"rerun {name}/train.zarr"
        )
    os.utime("cube.zarr/a/zarr.json", (1, 1))
    before = sorted(Path().rglob("*"))
    assert "train.zarr cannot be rerun: source: cells of 'a'" in error_of("rerun train.zarr")
    shutil.move("cube.zarr", "moved.zarr")
    assert "cube.zarr cannot be opened" in error_of("rerun train.zarr")
    shutil.move("moved.zarr", "cube.zarr")
    assert sorted(Path().rglob("*")) == before


# ------------------------------------------------------------------ doctor


def findings_of(line, code=0):
    return {
        f"{row['subject']} {row['level']}": f"{row['found']} {row['advice']}"
        for row in report_of(line, code)["findings"]
    }


def test_doctor_of_a_store(stores):
    pytest.importorskip("torch")
    found = findings_of("doctor train.zarr")
    samples = open_store("train.zarr").sizes["samples"]
    assert f"train: {samples} samples, every byte is as written" in found["files ok"]
    assert "gap 12" in found["windows ok"]
    assert "a batch of 32 is worth" in " ".join(found.values())
    shard = next(path for path in Path("train.zarr/a/c").rglob("*") if path.is_file())
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    assert "has changed since it was written" in findings_of("doctor train.zarr", 1)["files error"]
    assert "files ok" in findings_of("doctor train.zarr --no-verify")
    assert "is not a sample store" in findings_of("doctor cube.zarr", 1)["files error"]


def test_doctor_names_what_drops_most_windows_and_a_source_that_is_gone(cube):
    pytest.importorskip("torch")
    invoke(
        f"sample cube.zarr {TARGETS} --sample-size '{{lat: 6, lon: 4}}' --block-size '{{time: 3}}'"
    )
    shutil.rmtree("cube.zarr")
    found = findings_of("doctor train.zarr")
    assert "50% of 24 dropped: gap 12" in found["windows ok"]
    assert "is gone" in found["source warning"]


def test_doctor_shows_what_netcdf_needs(monkeypatch):
    needed = [
        "netCDF4>=1.7; extra == 'netcdf'",
        "s3fs; extra == 's3'",
        "numpy>=2; python_version > '3'",
    ]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: needed)
    assert "netCDF4 ok" in findings_of("doctor")
    version = importlib.metadata.version

    def lacks_netcdf(name):
        if name == "netCDF4":
            raise importlib.metadata.PackageNotFoundError
        return version(name)

    monkeypatch.setattr(importlib.metadata, "version", lacks_netcdf)
    rows = json.loads(invoke("doctor --json").stdout)["findings"]
    (row,) = [row for row in rows if row["subject"] == "netCDF4"]
    assert (row["level"], row["advice"]) == ("warning", 'pip install "netCDF4>=1.7"')
    assert "s3fs" not in {row["subject"] for row in rows}


def test_doctor_of_the_environment():
    found = findings_of("doctor")
    assert "numpy ok" in found
    assert "cores ok" in found
