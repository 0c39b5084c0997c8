"""The package as a whole: light to import, plain about what it needs, tidy examples."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
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


def run(folder, *command, **environment):
    done = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel, built from the unpacked sdist."""
    pytest.importorskip("setuptools", "77")
    folder = tmp_path_factory.mktemp("built")
    project, made = folder / "project", folder / "made"
    shutil.copytree(ROOT / "ml4cube", project / "ml4cube")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    build = (
        "import sys; from setuptools import build_meta as backend\n"
        "getattr(backend, sys.argv[1])(sys.argv[2])"
    )
    run(project, sys.executable, "-P", "-c", build, "build_sdist", made)
    shutil.unpack_archive(next(made.glob("*.tar.gz")), folder / "sdist")
    (unpacked,) = (folder / "sdist").iterdir()
    run(unpacked, sys.executable, "-P", "-c", build, "build_wheel", made)
    return next(made.glob("*.whl"))


def block(page, language):
    """The first block of a page in a language."""
    return (ROOT / page).read_text().split(f"```{language}\n")[1].partition("```")[0]


@pytest.mark.slow
def test_a_wheel_of_the_sdist_runs_what_the_readme_says_first(wheel, tmp_path):
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert "ml4cube = ml4cube.cli.main:main" in next(site.glob("*/entry_points.txt")).read_text()
    assert (site / "ml4cube" / "py.typed").exists()
    # what the wheel lacks is missing here, because the installed package comes after it
    for source in (ROOT / "ml4cube").rglob("*.py"):
        assert (site / source.relative_to(ROOT)).exists()
    python = (sys.executable, "-P", "-c")
    run(tmp_path, *python, block("docs/tutorials/quickstart.md", "python"), PYTHONPATH=str(site))
    main = "from ml4cube.cli.main import main; import ml4cube, sys; print(ml4cube.__file__); main()"
    first = next(x for x in (ROOT / "README.md").read_text().splitlines() if "ml4cube split" in x)
    told = run(tmp_path, *python, main, *first.split()[1:], PYTHONPATH=str(site))
    assert str(site) in told
    assert (tmp_path / "split.json").exists()


@pytest.mark.soak  # pip installs all that the wheel needs
@pytest.mark.timeout(900)
def test_the_wheel_in_an_empty_environment_runs_the_five_commands_of_the_readme(wheel, tmp_path):
    environment, work = tmp_path / "venv", tmp_path / "work"
    install = "import sys, setup_env as s; s.install_with_torch(s.Path(sys.argv[1]), sys.argv[2])"
    run(ROOT / "scripts", sys.executable, "-c", install, environment, wheel)
    assert not (environment / "bin" / "pytest").exists()
    work.mkdir()
    (work / "my_models.py").write_text(block("README.md", "python"))
    own = {"PATH": f"{environment / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": ""}
    run(work, "python", "-c", block("docs/tutorials/quickstart.md", "python"), **own)
    told = run(work, "bash", "-euc", block("README.md", "bash"), **own)
    assert "climatology" in told
    assert (work / "prediction.zarr" / "zarr.json").exists()
