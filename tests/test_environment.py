"""environment.yml, the conda recipe and CITATION.cff agree with pyproject.toml."""

import re
import tomllib
from pathlib import Path

import yaml

import ml4cube

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
# Extras that no other may pull in: their packages hold back or downgrade what others need.
SERVICES = {"wandb", "mlflow"}
# Extras for those who work on ml4cube, and not with it.
DEVELOPERS = {"demo", "docs", "lint", "test", "test-core", "dev"}
RECIPE = yaml.safe_load((ROOT / "conda-recipe" / "recipe.yaml").read_text())
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


def normalised(requirement: str) -> str:
    name, floor = re.fullmatch(r"([\w.-]+)(?:\[.*\])?(.*)", requirement.replace(" ", "")).groups()
    name = name.lower().replace("_", "-")
    return CONDA_NAMES.get(name, name) + floor


def test_conda_environment_is_in_step_with_pyproject():
    groups = [PROJECT["dependencies"], *(r for name, r in EXTRAS.items() if name not in SERVICES)]
    wanted = {normalised(r) for group in groups for r in group if not r.startswith("ml4cube[")}
    wanted.add("python" + PROJECT["requires-python"])

    listed = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    found = {normalised(r) for r in listed if isinstance(r, str)} - {"pip"}

    assert found == wanted


def test_dev_extra_holds_every_other_extra_but_the_services():
    nested = " ".join(r for group in EXTRAS.values() for r in group if r.startswith("ml4cube["))
    unreachable = {name for name in EXTRAS if name != "dev" and name not in nested}
    assert unreachable == SERVICES


def test_conda_recipe_is_in_step_with_pyproject():
    run = {normalised(r) for r in PROJECT["dependencies"]}
    run.add("python" + PROJECT["requires-python"])
    extras = (group for name, group in EXTRAS.items() if name not in SERVICES | DEVELOPERS)

    requirements = RECIPE["requirements"]
    assert {normalised(r) for r in requirements["run"]} == run
    assert {normalised(r) for r in requirements["run_constraints"]} == {
        normalised(r) for group in extras for r in group
    }


def test_every_file_has_the_version_and_licence_of_pyproject():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    versions = {ml4cube.__version__, citation["version"], RECIPE["context"]["version"]}
    assert versions == {PROJECT["version"]}
    assert {citation["license"], RECIPE["about"]["license"]} == {PROJECT["license"]}
