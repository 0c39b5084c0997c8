"""Ranks that hold shares of a model, killed and stopped: the run ends as the undisturbed one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from ml4cube.training.files.checkpoint import read_file
from tests.faults.processes import Launcher, wait_for
from tests.faults.training_job import BATCHES

JOB = Path(__file__).parent / "training_job.py"
FSDP = {"strategy": "fsdp"}


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    started = Launcher(tmp_path)
    yield started
    started.assert_nothing_left()


def result(folder: Path) -> list[Any]:
    """What both ranks wrote; they agree."""
    found = [json.loads((folder / f"result-{rank}.json").read_text()) for rank in (0, 1)]
    assert found[0] == found[1]
    return found


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What the job gives when nothing disturbs it."""
    folder = tmp_path_factory.mktemp("calm")
    run = Launcher(folder).torchrun(JOB, folder, FSDP)
    assert run.finish(120) == 0, run.said
    return result(folder)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_ranks_killed_in_a_step_and_in_a_save_end_with_the_same_weights(
    launcher: Launcher, tmp_path: Path, calm: list[Any]
) -> None:
    """Three kills in one run: in a step, while a share is saved, while the main file is."""
    harm = [
        {"when": "step", "number": 17, "rank": 1, "act": "kill", "attempt": 0},
        # Syncs of rank 1: the share, then its folder. Of rank 0 too: best model, share, main file.
        {"when": "saving", "number": 3, "rank": 1, "act": "kill", "attempt": 1},
        {"when": "saving", "number": 5, "rank": 0, "act": "kill", "attempt": 2},
    ]
    run = launcher.torchrun(JOB, tmp_path, FSDP | {"harm": harm}, restarts=3)
    assert run.finish(300) == 0, run.said
    # torchrun's log may name a rank that it ended itself after the killed one
    assert {path.name for path in tmp_path.glob("killed-*")} == {"killed-0", "killed-1", "killed-2"}
    assert result(tmp_path) == calm
    shards = [path.name for path in tmp_path.glob("snapshot.pt.*")]
    assert len(shards) == 2, shards  # what was half written is gone


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("when", ["step", "validation"])
def test_a_rank_told_to_stop_leaves_a_snapshot_to_go_on_from(
    launcher: Launcher, tmp_path: Path, calm: list[Any], when: str
) -> None:
    harm = {"when": when, "number": 3, "rank": 1, "act": "dwell", "attempt": 0}
    pace_s = 0.3 if when == "step" else 0.01
    run = launcher.torchrun(JOB, tmp_path, FSDP | {"harm": [harm], "pace_s": pace_s})
    mark = tmp_path / "mark-1"
    wait_for(mark.exists, run)
    psutil.Process(int(mark.read_text())).terminate()
    assert run.finish(60) != 0, run.said
    batch = read_file(tmp_path / "snapshot.pt")["state"]["batch"]
    assert 0 < batch < BATCHES if when == "step" else batch == BATCHES
    run = launcher.torchrun(JOB, tmp_path, FSDP)
    assert run.finish(120) == 0, run.said
    assert result(tmp_path) == calm
