"""The package as a whole: light to import, plain about what it needs, tidy examples."""

import json
import subprocess
import sys
from pathlib import Path

import nbformat
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


@pytest.mark.parametrize("module", LIGHT_MODULES)
def test_importing_loads_nothing_heavy(module):
    code = f"import sys, json, {module}; print(json.dumps(sorted({HEAVY!r} & set(sys.modules))))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
    assert done.stderr == ""


@pytest.mark.parametrize(
    "module", ["ml4cube", "ml4cube.sampling.counting", "ml4cube.sampling.shards"]
)
def test_workers_load_little(module):
    """Every worker process pays for what its tasks import: half a second and 70 MB for these."""
    unwanted = {"xarray", "dask", "pandas", "scipy"}
    code = f"import sys, {module}; print(sorted({unwanted!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(
    "module", ["ml4cube.datasets.pytorch", "ml4cube.training.pytorch", "ml4cube.prediction"]
)
def test_without_torch_the_message_says_what_to_install(module):
    code = f"import sys; sys.modules['torch'] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode != 0
    assert "pip install torch" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.name)
def test_examples_are_short(example):
    assert len(example.read_text().splitlines()) <= 80


NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebooks_are_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
