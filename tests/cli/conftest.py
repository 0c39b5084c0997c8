"""Every test has a working directory of its own, from which modules can be imported."""

import sys

import pytest

from tests.cli.running import small_cube


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.startswith("my_"):
            del sys.modules[name]


@pytest.fixture
def cube(folder):
    small_cube().to_zarr("cube.zarr")
    return "cube.zarr"
