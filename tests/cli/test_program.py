"""The program as a process: what it loads, its entry point, and Ctrl-C."""

import json
import resource
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner

import ml4cube
from ml4cube.cli.by_name import load
from ml4cube.cli.main import main, program
from ml4cube.errors import StoreError
from tests.cli.running import ROOT, error_of, invoke

HELP = """
import json, sys
from ml4cube.cli.main import main
sys.argv = ["ml4cube", "--help"]
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def test_help_loads_nothing_heavy():
    done = subprocess.run([sys.executable, "-c", HELP], capture_output=True, text=True, check=True)
    heavy = {"torch", "xarray", "pandas", "zarr", "dask", "sklearn", "matplotlib"}
    assert heavy & set(json.loads(done.stderr)) == set()
    commands = ["inspect", "split", "stats", "sample", "train", "predict", "evaluate", "doctor"]
    places = [done.stdout.index(f"\n  {name} ") for name in [*commands, "rerun"]]
    assert places == sorted(places)


def test_the_entry_point_is_the_program():
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert load(scripts["ml4cube"]) is main
    assert invoke("--version").stdout == f"ml4cube, version {ml4cube.__version__}\n"


LITTLE_MEMORY = [
    RuntimeError("can't start new thread"),
    MemoryError("Unable to allocate 3 GiB"),
    ImportError("libtorch_cpu.so: failed to map segment from shared object"),
]


@pytest.mark.parametrize("error", LITTLE_MEMORY, ids=lambda error: type(error).__name__)
def test_a_limit_of_memory_is_named(monkeypatch, tmp_path, error):
    def fail(*args, **settings):
        raise error

    monkeypatch.setattr("ml4cube.cli.command.open_cube", fail)
    line = f"split cube.zarr --out {tmp_path}/split.json"
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (2**30, 2**30))
    assert "gets no more memory or threads (ulimit -v: 1024 MB): raise" in error_of(line, code=1)
    no_limit = (resource.RLIM_INFINITY,) * 2
    monkeypatch.setattr(resource, "getrlimit", lambda kind: no_limit)
    assert "gets no more memory or threads: raise the limit" in error_of(line, code=1)


CALLBACK = """
import pathlib, time

def slow(sample):
    pathlib.Path("started").touch()
    time.sleep(600)
"""


@pytest.mark.slow
def test_ctrl_c_ends_with_130_and_one_line(cube):
    Path("my_callbacks.py").write_text(CALLBACK)
    line = "sample cube.zarr --callback my_callbacks:slow --nproc 1 --set block_size.time=3"
    # what a shell starts in the background ignores Ctrl-C, and so would all that it starts
    code = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from ml4cube.cli.main import main; main()"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *line.split()], stderr=subprocess.PIPE, text=True
    )
    try:
        deadline_s = time.monotonic() + 120
        while not Path("started").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, told.strip()) == (130, "ml4cube: interrupted")
    assert not Path("train_cube.zarr").exists()


def test_debug_raises_the_error(folder):
    result = CliRunner().invoke(program, ["inspect", "none.zarr", "--debug"])
    assert isinstance(result.exception, StoreError)


def test_without_a_command_there_is_help(folder):
    assert invoke("").stdout == invoke("--help").stdout
    assert "No such command" in error_of("sampel")


def test_what_a_missing_torch_prevents_is_said_in_one_line(folder):
    code = "import sys; sys.modules['torch'] = None; from ml4cube.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", "--help"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "needs torch, which is not installed" in done.stderr
