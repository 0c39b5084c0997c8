"""The package as a whole: light to import, plain about what it needs, tidy examples."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = {"torch", "sklearn", "matplotlib"}
LIGHT_MODULES = [
    "ml4cube",
    "ml4cube.splits",
    "ml4cube.preprocessing",
    "ml4cube.postprocessing",
    "ml4cube.errors",
]


def loaded(modules, of):
    """Which of some packages are there once the modules are imported in a fresh process."""
    code = f"import sys, json, {', '.join(modules)}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return of & set(json.loads(done.stdout))


@pytest.mark.slow
def test_importing_loads_nothing_heavy():
    assert loaded(LIGHT_MODULES, HEAVY) == set()


def test_workers_load_little():
    """Every worker process pays for what its tasks import: half a second and 70 MB for these."""
    modules = ["ml4cube.sampling.counting", "ml4cube.sampling.shards"]
    assert loaded(modules, {"xarray", "dask", "pandas", "scipy"}) == set()


@pytest.mark.slow
def test_without_torch_the_message_says_what_to_install():
    modules = ["ml4cube.datasets.pytorch", "ml4cube.training.pytorch", "ml4cube.prediction"]
    code = f"""
import importlib, sys
sys.modules["torch"] = None
for module in {modules}:
    try:
        importlib.import_module(module)
    except ImportError as error:
        print(str(error).splitlines()[-1])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    told = done.stdout.splitlines()
    assert ["pip install torch" in line for line in told] == [True] * len(modules), told


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short(example):
    assert len(example.read_text().splitlines()) <= 80
