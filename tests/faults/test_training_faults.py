"""Training survives: killed, told to stop, frozen, out of disk, it ends soon, and goes on later.

All with real processes. Those that torchrun starts run `training_job`, whose plan says what goes
wrong where; every test ends by looking for processes it has left running.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ml4cube.training.files.checkpoint import read_file
from tests.faults.processes import Launcher, wait_for
from tests.faults.training_job import BATCHES, EPOCHS, STEPS

pytestmark = pytest.mark.slow
HERE = Path(__file__).parent
JOB = HERE / "training_job.py"
SNAPSHOT_WITHIN_S = 10


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    started = Launcher(tmp_path)
    yield started
    started.assert_nothing_left()


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the job gives when nothing disturbs it."""
    return undisturbed(tmp_path_factory)


def undisturbed(tmp_path_factory: pytest.TempPathFactory, **plan: Any) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("calm")
    launcher = Launcher(folder)
    run = launcher.torchrun(JOB, folder, plan)
    assert run.finish(90) == 0, run.said
    launcher.assert_nothing_left()
    return result(folder)


def result(folder: Path) -> dict[str, Any]:
    """What both ranks wrote, and the best model's file; they agree."""
    found: list[dict[str, Any]] = [
        json.loads((folder / f"result-{rank}.json").read_text()) for rank in (0, 1)
    ]
    best = torch.load(folder / "best.pt", weights_only=True)
    assert found[0] == found[1]
    assert found[0]["weights"] == {name: tensor.tolist() for name, tensor in best.items()}
    return found[0]


def state(folder: Path) -> dict[str, Any]:
    """Where the snapshot stands."""
    found: dict[str, Any] = read_file(folder / "snapshot.pt")["state"]
    return found


def harm(when: str, number: int, rank: int | str, act: str, attempt: int = 0) -> dict[str, Any]:
    """One entry of a plan."""
    return {"when": when, "number": number, "rank": rank, "act": act, "attempt": attempt}


# ---------------------------------------------------------------- killed and restarted


def kills(seed: int, number: int) -> list[dict[str, Any]]:
    """Random steps and ranks, one for every start that is to fail, each later than the last."""
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(1, EPOCHS * STEPS + 1), number))
    return [harm("step", at, chance.randrange(2), "kill", i) for i, at in enumerate(steps)]


def check_restarts(launcher: Launcher, plan: list[dict[str, Any]], calm: dict[str, Any]) -> str:
    run = launcher.torchrun(JOB, launcher.folder, {"harm": plan}, restarts=3)
    assert run.finish(240) == 0, (plan, run.said)
    # not "exitcode: -9": torchrun may name a rank that it ended itself after the killed one
    assert run.said.count("failed (exitcode: ") >= len(plan), run.said
    assert result(launcher.folder) == calm, plan
    return run.said


@pytest.mark.timeout(600)
def test_ranks_killed_and_failed_end_with_the_weights_of_the_undisturbed_run(
    launcher: Launcher, calm: dict[str, Any]
) -> None:
    """Under ``--max-restarts 3``, as a cluster runs it; here a kill and an error in one run."""
    plan = [*kills(0, 1), harm("step", 35, 1, "fail", attempt=1)]
    said = check_restarts(launcher, plan, calm)
    assert "ZeroDivisionError: division by zero, as planned" in said
    assert "rank 0 lost the other ranks: rank 1: ZeroDivisionError" in said, said


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("seed", "number"), [*((i, 1) for i in range(1, 11)), (100, 3), (101, 3)])
def test_ranks_killed_at_random_steps(
    launcher: Launcher, calm: dict[str, Any], seed: int, number: int
) -> None:
    check_restarts(launcher, kills(seed, number), calm)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("seed", "number"), [(0, 2), *(pytest.param(i, 5, marks=pytest.mark.soak) for i in range(1, 5))]
)
def test_ranks_of_two_nodes_killed_at_random_steps(
    launcher: Launcher, calm: dict[str, Any], seed: int, number: int
) -> None:
    """Two agents of torchrun, each of which counts its own restarts; every kill is survived.

    The nodes share no disk for snapshots.
    """
    plan = kills(seed, number)
    given = {"harm": plan, "apart": True}
    runs = launcher.agents(JOB, launcher.folder, given, restarts=2 * number)
    for run in runs:
        assert run.finish(120 * (number + 1)) == 0, (plan, run.said)
    assert len(list(launcher.folder.glob("harmed-*"))) == number
    assert result(launcher.folder) == calm, plan


def test_a_rank_that_fails_is_named_before_torch_ends_the_others(launcher: Launcher) -> None:
    """Under nccl no Python error follows in them."""
    plan = {"harm": [harm("step", 9, 1, "fail")], "abort": True}
    run = launcher.torchrun(JOB, launcher.folder, plan)
    assert run.finish(120) != 0
    assert (launcher.folder / "aborted").exists()
    assert "rank 0 lost the other ranks: rank 1: ZeroDivisionError" in run.said, run.said


def test_tasks_of_srun_train_as_the_ranks_of_torchrun(
    launcher: Launcher, calm: dict[str, Any]
) -> None:
    """A stand-in starts two processes with the variables that srun gives its tasks."""
    step = {
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_NODEID": "0",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2",
    }
    job = [str(JOB), str(launcher.folder), "{}"]
    runs = [
        launcher.python(*job, SLURM_PROCID=rank, SLURM_LOCALID=rank, **step) for rank in ("0", "1")
    ]
    for run in runs:
        assert run.finish(120) == 0, run.said
    assert result(launcher.folder) == calm


# ------------------------------------------------------------------------ told to stop


def stop(launcher: Launcher, when: str, number: int, target: str, **plan: Any) -> None:
    """Start, wait until a rank stands at the moment, send SIGTERM; all end, a snapshot is there."""
    folder = launcher.folder
    marks = [folder / f"mark-{rank}" for rank in (0, 1)]
    for mark in marks:
        mark.unlink(missing_ok=True)
    whose: int | str = 0 if when == "saving" else "all"  # rank 0 writes
    # ranks ask one another about signals once a second: slow steps leave that inside the epoch
    pace_s = 0.3 if when == "step" else 0.01
    plan |= {"pace_s": pace_s, "harm": [harm(when, number, whose, "dwell")]}
    run = launcher.torchrun(JOB, folder, plan)
    wait_for(lambda: all(mark.exists() for mark in (marks[:1] if when == "saving" else marks)), run)
    told, clock = time.monotonic(), time.time()
    pid = run.process.pid if target == "launcher" else int((folder / f"mark-{target}").read_text())
    psutil.Process(pid).terminate()
    assert run.finish(60) != 0, run.said
    seconds = time.monotonic() - told
    written = (folder / "snapshot.pt").stat().st_mtime - clock
    assert 0 < written < SNAPSHOT_WITHIN_S, (when, target, written, run.said)
    assert seconds < 30, (when, target, seconds)  # torchrun would kill then
    batch = state(folder)["batch"]
    if when == "step":
        assert 0 < batch < BATCHES, (number, target, state(folder))
    if when == "validation":
        assert batch == BATCHES, (number, target, state(folder))


STOPS = [
    # the number counts steps of the whole run; samples and saves of each start
    ("step", 3, "launcher"),
    ("validation", 25, "1"),
]
MORE_STOPS = [
    ("step", 4, "1"),
    ("validation", 5, "launcher"),
    ("step", 16, "0"),
    ("saving", 1, "launcher"),
    ("validation", 2, "0"),
    ("saving", 3, "0"),
]


def stop_again_and_again(
    launcher: Launcher, calm: dict[str, Any], stops: list[tuple[str, int, str]], **plan: Any
) -> None:
    """Each run resumes the one before; the last ends as the undisturbed one, bit for bit."""
    for when, number, target in stops:
        stop(launcher, when, number, target, **plan)
    assert_ends_calm(launcher, calm, **plan)


def assert_ends_calm(launcher: Launcher, calm: dict[str, Any], **plan: Any) -> None:
    run = launcher.torchrun(JOB, launcher.folder, plan)
    assert run.finish(120) == 0, run.said
    assert result(launcher.folder) == calm


@pytest.mark.soak  # test_features does so without torchrun
@pytest.mark.timeout(600)
def test_told_to_stop_again_and_again_it_goes_on_bit_for_bit(
    launcher: Launcher, calm: dict[str, Any]
) -> None:
    """SIGTERM to the launcher in a step and to a rank in validation.

    So this is resuming in mid-epoch and in a validation, with bf16, dropout, momentum, scheduler,
    BatchNorm and partial accumulation windows.
    """
    stop_again_and_again(launcher, calm, STOPS)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_usr1_reaches_the_ranks_through_torchrun(launcher: Launcher, calm: dict[str, Any]) -> None:
    """They save and go on, until torchrun ends them."""
    folder = launcher.folder
    plan = {"pace_s": 0.3, "harm": [harm("step", 3, "all", "mark")]}
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    signals = "--signals-to-handle=SIGTERM,SIGUSR1"
    run = launcher.python(*torchrun, signals, str(JOB), str(folder), json.dumps(plan))
    wait_for((folder / "mark-1").exists, run)
    run.process.send_signal(signal.SIGUSR1)
    wait_for((folder / "snapshot.pt").exists, run)
    assert state(folder)["step"] < STEPS * EPOCHS
    run.finish(60)
    assert_ends_calm(launcher, calm)


@pytest.mark.soak  # test_features and test_pytorch do so without torchrun
@pytest.mark.timeout(600)
def test_out_of_time_it_goes_on_and_a_finished_run_is_left_alone(
    launcher: Launcher, calm: dict[str, Any]
) -> None:
    """At last the finished run is started again: it takes no step and leaves its files alone."""
    run = launcher.torchrun(JOB, launcher.folder, {"pace_s": 0.3, "max_time": 1.0})
    assert run.finish(120) == 0, run.said
    assert state(launcher.folder)["step"] < STEPS * EPOCHS
    assert_ends_calm(launcher, calm)
    before = (launcher.folder / "snapshot.pt").read_bytes()
    for rank in (0, 1):
        (launcher.folder / f"result-{rank}.json").unlink()
    further = [harm("step", at, "all", "fail") for at in range(1, EPOCHS * STEPS + 2)]
    again = launcher.torchrun(JOB, launcher.folder, {"harm": further})
    assert again.finish(120) == 0, again.said
    assert result(launcher.folder) == calm
    assert (launcher.folder / "snapshot.pt").read_bytes() == before


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_ranks_with_shares_of_a_model_killed_and_told_to_stop(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Killed in a step and in a save; then stopped in a step and in validation."""
    plan = {"strategy": "fsdp"}
    calm = undisturbed(tmp_path_factory, **plan)
    harms = [harm("step", 17, 1, "kill"), harm("saving", 3, 0, "kill", attempt=1)]
    run = launcher.torchrun(JOB, launcher.folder, plan | {"harm": harms}, restarts=3)
    assert run.finish(300) == 0, run.said
    killed = {path.name for path in launcher.folder.glob("harmed-*")}
    assert killed == {"harmed-0", "harmed-1"}
    assert result(launcher.folder) == calm
    (launcher.folder / "snapshot.pt").unlink()
    stop_again_and_again(launcher, calm, [("step", 3, "1"), ("validation", 3, "1")], **plan)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_told_to_stop_at_six_more_moments(launcher: Launcher, calm: dict[str, Any]) -> None:
    stop_again_and_again(launcher, calm, MORE_STOPS)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_killed_and_told_to_stop_at_random_times(
    launcher: Launcher, calm: dict[str, Any], seed: int
) -> None:
    """In a step, in validation, in a save or in a collective: wherever the moment falls."""
    chance, folder = random.Random(seed), launcher.folder
    for restarts in (0, 3, 0):
        mark = folder / "mark-1"
        mark.unlink(missing_ok=True)
        at = 1 + (state(folder)["step"] if (folder / "snapshot.pt").exists() else 0)
        plan = {"pace_s": 0.2, "harm": [harm("step", at, "all", "mark")]}
        run = launcher.torchrun(JOB, folder, plan, restarts=restarts)
        wait_for(mark.exists, run)
        time.sleep(chance.uniform(0, 1.5))
        told = time.time()
        if restarts:
            psutil.Process(int(mark.read_text())).kill()
            time.sleep(chance.uniform(5, 8))  # into the restarted run
        run.process.terminate()
        assert run.finish(60) != 0, run.said
        assert restarts or (folder / "snapshot.pt").stat().st_mtime - told < SNAPSHOT_WITHIN_S
    assert_ends_calm(launcher, calm)


# -------------------------------------------------------------------- saves cut off


def saves(launcher: Launcher, cases: list[tuple[str, str]], offsets: list[int]) -> dict[str, Any]:
    """Run `saving_job` and return what it found."""
    folder = launcher.folder / "saves"
    folder.mkdir()
    script = str(HERE / "saving_job.py")
    run = launcher.python(script, str(folder), json.dumps(cases), json.dumps(offsets))
    assert run.finish(280) == 0, run.said
    found: dict[str, Any] = json.loads(run.said.splitlines()[-1])
    return found


SNAPSHOT_BYTES = 156_000  # of the job; its other files are smaller
TARGETS = ("snapshot", "top-1", "best")
HOWS = ("kill", "limit", "sync", "rename")
KILLED = (-signal.SIGKILL, -signal.SIGXFSZ)


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.soak)])
def test_a_save_cut_off_anywhere_leaves_a_valid_file(launcher: Launcher, count: int) -> None:
    """Snapshot, best model and the only file of top-k = 1, at many offsets, and between the steps.

    Every file that has its name is whole after each try, the snapshot is the last or the new one,
    a full disk is an error that names the file, and the run that at last goes on ends as one that
    nothing disturbed, with nothing lying about.
    """
    offsets = [round(SNAPSHOT_BYTES * i / count) for i in range(count)]
    every = [(target, how) for target in TARGETS for how in HOWS]
    few = {("top-1", "kill"), ("top-1", "rename"), ("best", "limit")}  # one function writes all
    cases = [case for case in every if count > 4 or case[0] == "snapshot" or case in few]
    for name, found in saves(launcher, cases, offsets).items():
        assert len(found["tries"]) == (2 if name.endswith(("sync", "rename")) else count)
        for where, code, epoch, files, said in found["tries"]:
            if name.endswith("limit"):
                assert code == 3, (name, where, code, said)  # a StoreError
                assert ".pt cannot be written" in said, (name, where, said)
            else:
                ended = code in KILLED or (name, where) == ("snapshot rename", 2)
                assert ended, (name, where, code, said)
            assert epoch in (1, 2), (name, where)
            assert "snapshot.pt" in files
            if name.startswith("top-1"):
                assert any(file.startswith("top/") for file in files), (name, where, files)
            if name.startswith("best"):
                assert "best.pt" in files
        assert found["as_undisturbed"], name
        assert found["left_aside"] == [], name


# --------------------------------------------------------------------- one rank goes


SPAWN = """
import os, sys, time
from ml4cube.training.pytorch_distributed import dist_train
def work(folder):
    import torch.distributed as dist
    from pathlib import Path
    from tests.faults.training_job import Harm, make_trainer
    harm = Harm(Path(folder), {"harm": [
        {"when": "step", "number": 9, "rank": "all", "act": "mark"},
        {"when": "step", "number": 10, "rank": "all", "act": "dwell"},
    ]}, dist.get_rank())
    make_trainer(Path(folder), harm, {"pace_s": 0.05}).train()
dist_train(work, 2, sys.argv[1])
"""


@pytest.mark.parametrize(
    "spawned",
    [True, pytest.param(False, marks=pytest.mark.soak)],
    ids=["dist_train", "torchrun"],
)
def test_killed_parent_of_ranks_leaves_none(launcher: Launcher, spawned: bool) -> None:
    plan = {"harm": [harm("step", 9, "all", "dwell")]}
    run = (
        launcher.python("-c", SPAWN, str(launcher.folder))
        if spawned
        else launcher.torchrun(JOB, launcher.folder, plan)
    )
    wait_for(lambda: all((launcher.folder / f"mark-{rank}").exists() for rank in (0, 1)), run)
    ranks = [psutil.Process(int((launcher.folder / f"mark-{r}").read_text())) for r in (0, 1)]
    run.process.kill()
    run.process.wait()
    assert psutil.wait_procs(ranks, timeout=10)[1] == []
