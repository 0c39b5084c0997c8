"""The commands on the pages run as they stand there, one after the other."""

import json
import subprocess
from pathlib import Path

import pytest
import xarray as xr

from tests.cli.running import ROOT, invoke, make_quickstart_cube, run_page

pytest.importorskip("torch")


@pytest.mark.slow
def test_readme_goes_from_a_cube_to_scored_predictions_in_five_commands():
    make_quickstart_cube()
    assert len(run_page("README.md")) == 5
    predicted, cube = xr.open_zarr("prediction.zarr"), xr.open_zarr("my_cube.zarr")
    assert predicted.ndvi.attrs["units"] == cube.ndvi.attrs["units"]
    assert predicted.ndvi.shape == cube.ndvi.shape
    report = json.loads(
        invoke(
            "evaluate prediction.zarr my_cube.zarr --recipe split.json --baselines climatology "
            "--json"
        ).stdout
    )
    scores = {(r["model"], r["metric"]): r["value"] for r in report["scores"]}
    # of a field whose noise-free truth the network can learn
    assert scores["prediction", "rmse"] < 0.1 * scores["climatology", "rmse"]


@pytest.mark.slow
def test_how_to():
    make_quickstart_cube()
    assert len(run_page("docs/how_to/command_line.md")) > 10
    assert xr.open_zarr("train.zarr").sizes["lon"] == 3
    assert Path("masked/log.csv").read_text().count("\n") == 3


def test_slurm_lines_are_those_of_the_help_and_start_the_command(folder):
    """A shell runs them, with stand-ins for what only a cluster has."""
    page = (ROOT / "docs/how_to/command_line.md").read_text()
    script = page[page.index("#!/bin/bash") :].partition("```")[0]
    told = [" ".join(line.split()) for line in invoke("train --help").stdout.splitlines()]
    lines = [" ".join(line.split()) for line in script.splitlines()]
    assert " ".join(lines) in " ".join(told)
    stand_ins = """
        srun() { "$@"; }
        scontrol() { echo node1; echo node2; }
        torchrun() { printf '%s\\n' "$@"; }
        SLURM_JOB_NUM_NODES=2 SLURM_JOB_ID=17 SLURM_JOB_NODELIST='node[1-2]'
    """
    done = subprocess.run(
        ["bash", "-euc", stand_ins + script], capture_output=True, text=True, check=True
    )
    started = done.stdout.splitlines()
    assert started[:2] == ["--nnodes=2", "--nproc-per-node=4"]
    assert "--rdzv-endpoint=node1:29400" in started
    assert started[-5:] == ["-m", "ml4cube", "train", "--config", "train.yaml"]
