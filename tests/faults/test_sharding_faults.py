"""Ranks that hold shares of a model, killed and stopped: the run ends as the undisturbed one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.processes import Launcher

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


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ranks_killed_in_a_step_and_in_a_save_end_with_the_same_weights(
    launcher: Launcher, tmp_path: Path
) -> None:
    """Three kills in one run: in a step, while a share is saved, while the main file is."""
    calm, hurt = tmp_path / "calm", tmp_path / "hurt"
    for folder in (calm, hurt):
        folder.mkdir()
    run = launcher.torchrun(JOB, calm, FSDP)
    assert run.finish(120) == 0, run.said
    harm = [
        {"when": "step", "number": 17, "rank": 1, "act": "kill", "attempt": 0},
        # Syncs of rank 1: the share, then its folder. Of rank 0 too: best model, share, main file.
        {"when": "saving", "number": 3, "rank": 1, "act": "kill", "attempt": 1},
        {"when": "saving", "number": 5, "rank": 0, "act": "kill", "attempt": 2},
    ]
    run = launcher.torchrun(JOB, hurt, FSDP | {"harm": harm}, restarts=3)
    assert run.finish(300) == 0, run.said
    assert run.said.count("exitcode: -9") >= len(harm), run.said
    assert result(hurt) == result(calm)
    shards = [path.name for path in hurt.glob("snapshot.pt.*")]
    assert len(shards) == 2, shards  # what was half written is gone
