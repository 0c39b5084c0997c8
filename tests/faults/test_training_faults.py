"""Training survives: killed, told to stop, frozen, out of disk, it ends soon, and goes on later.

All with real processes. Those that torchrun starts run `training_job`, whose plan says what goes
wrong where; every test ends by looking for processes it has left running.
"""

from __future__ import annotations

import json
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
from tests.distributed_runner import on_ranks
from tests.faults import rank_work
from tests.faults.processes import Launcher, wait_for
from tests.faults.training_job import BATCHES, EPOCHS, STEPS, data, model

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
    folder = tmp_path_factory.mktemp("calm")
    launcher = Launcher(folder)
    run = launcher.torchrun(JOB, folder, {})
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
@pytest.mark.parametrize("seed", range(1, 11))
def test_rank_killed_at_a_random_step(launcher: Launcher, calm: dict[str, Any], seed: int) -> None:
    check_restarts(launcher, kills(seed, 1), calm)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_ranks_killed_three_times(launcher: Launcher, calm: dict[str, Any], seed: int) -> None:
    check_restarts(launcher, kills(100 + seed, 3), calm)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(3))
def test_rank_killed_from_outside_at_a_random_time(
    launcher: Launcher, calm: dict[str, Any], seed: int
) -> None:
    """In a step, in validation, in a save or in a collective: wherever the moment falls."""
    chance = random.Random(seed)
    folder = launcher.folder
    plan = {"pace_s": 0.03, "harm": [harm("step", 1, "all", "mark")]}
    run = launcher.torchrun(JOB, folder, plan, restarts=3)
    rank = chance.randrange(2)
    wait_for((folder / f"mark-{rank}").exists, run)
    time.sleep(chance.uniform(0, 1.5))
    psutil.Process(int((folder / f"mark-{rank}").read_text())).kill()
    assert run.finish(180) == 0, run.said
    assert result(folder) == calm


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
    launcher: Launcher, calm: dict[str, Any], stops: list[tuple[str, int, str]]
) -> None:
    """Each run resumes the one before; the last ends as the undisturbed one, bit for bit."""
    for when, number, target in stops:
        stop(launcher, when, number, target)
    run = launcher.torchrun(JOB, launcher.folder, {})
    assert run.finish(120) == 0, run.said
    assert result(launcher.folder) == calm


@pytest.mark.timeout(600)
def test_told_to_stop_again_and_again_it_goes_on_bit_for_bit(
    launcher: Launcher, calm: dict[str, Any]
) -> None:
    """SIGTERM to the launcher in a step and to a rank in validation.

    So this is resuming in mid-epoch and in a validation, with bf16, dropout, momentum, scheduler,
    BatchNorm and partial accumulation windows.
    """
    stop_again_and_again(launcher, calm, STOPS)


@pytest.mark.soak  # test_features and test_pytorch do so without torchrun
@pytest.mark.timeout(600)
def test_out_of_time_it_goes_on_and_a_finished_run_is_left_alone(
    launcher: Launcher, calm: dict[str, Any]
) -> None:
    """At last the finished run is started again: it takes no step and leaves its files alone."""
    run = launcher.torchrun(JOB, launcher.folder, {"pace_s": 0.3, "max_time": 1.0})
    assert run.finish(120) == 0, run.said
    assert state(launcher.folder)["step"] < STEPS * EPOCHS
    stop_again_and_again(launcher, calm, [])
    before = (launcher.folder / "snapshot.pt").read_bytes()
    for rank in (0, 1):
        (launcher.folder / f"result-{rank}.json").unlink()
    further = [harm("step", at, "all", "fail") for at in range(1, EPOCHS * STEPS + 2)]
    again = launcher.torchrun(JOB, launcher.folder, {"harm": further})
    assert again.finish(120) == 0, again.said
    assert result(launcher.folder) == calm
    assert (launcher.folder / "snapshot.pt").read_bytes() == before


@pytest.mark.soak  # test_training_distributed does so without torchrun
@pytest.mark.timeout(600)
def test_our_loader_that_has_given_all_when_it_is_told_to_stop(
    launcher: Launcher, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In validation: the loader then stands in an epoch that the run has not begun."""
    plan = {"ours": True}
    calm = tmp_path_factory.mktemp("calm")
    undisturbed = launcher.torchrun(JOB, calm, plan)
    assert undisturbed.finish(90) == 0, undisturbed.said
    stop(launcher, "validation", 25, "1", **plan)
    run = launcher.torchrun(JOB, launcher.folder, plan)
    assert run.finish(120) == 0, run.said
    assert result(launcher.folder) == result(calm)


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_told_to_stop_at_six_more_moments(launcher: Launcher, calm: dict[str, Any]) -> None:
    stop_again_and_again(launcher, calm, MORE_STOPS)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_told_to_stop_at_random_times(launcher: Launcher, calm: dict[str, Any], seed: int) -> None:
    chance = random.Random(seed)
    folder = launcher.folder
    for _ in range(3):
        mark = folder / "mark-1"
        mark.unlink(missing_ok=True)
        at = 1 + (state(folder)["step"] if (folder / "snapshot.pt").exists() else 0)
        plan = {"pace_s": 0.2, "harm": [harm("step", at, "all", "mark")]}
        run = launcher.torchrun(JOB, folder, plan)
        wait_for(mark.exists, run)
        time.sleep(chance.uniform(0, 1.5))
        told = time.time()
        whom = run.process.pid if chance.random() < 0.5 else int(mark.read_text())
        psutil.Process(whom).terminate()
        assert run.finish(60) != 0, run.said
        assert (folder / "snapshot.pt").stat().st_mtime - told < SNAPSHOT_WITHIN_S
    run = launcher.torchrun(JOB, folder, {})
    assert run.finish(90) == 0, run.said
    assert result(folder) == calm


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
HOWS = ("kill -9", "signal", "limit", "sync", "rename")
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
    few = {("top-1", "kill -9"), ("top-1", "rename"), ("best", "limit")}  # one function writes all
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


@pytest.mark.soak  # test_training_distributed does so without torchrun
def test_frozen_rank_is_noticed_within_its_timeout(launcher: Launcher) -> None:
    """SIGSTOP, as of a rank whose disk is gone: the other says so, and both are ended."""
    plan = {"timeout": 10, "harm": [harm("step", 9, 1, "freeze")]}
    run = launcher.torchrun(JOB, launcher.folder, plan)
    wait_for((launcher.folder / "mark-1").exists, run)
    froze = time.monotonic()
    assert run.finish(90) != 0
    assert time.monotonic() - froze < 60  # torchrun gives a rank 30 s to end before it kills
    assert "rank 0 lost the other ranks" in run.said, run.said
    assert state(launcher.folder)["epoch"] == 1


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


# ------------------------------------------------------------------- files of strangers


PLANT = """
import os, sys, torch
from pathlib import Path
from ml4cube.training.files import checkpoint
from tests.faults.training_job import Harm, make_trainer
folder = Path(sys.argv[1])
class Evil:
    def __reduce__(self):
        return open, (str(folder / "executed"), "w")
with (folder / "snapshot.pt").open("w+b") as file:
    torch.save({"ml4cube_snapshot": 1, "model": Evil()}, file)
    checkpoint._seal(file)
make_trainer(folder, Harm(folder, {}, 0), {}).train()
"""


def test_planted_snapshot_is_refused_by_name_and_never_executed(launcher: Launcher) -> None:
    """Not even when its checksum is right and the environment turns torch's safe default off."""
    run = launcher.python("-c", PLANT, str(launcher.folder), TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD="1")
    assert run.finish(60) != 0
    assert not (launcher.folder / "executed").exists()
    assert "StoreError" in run.said.splitlines()[-1], run.said
    assert "snapshot.pt" in run.said.splitlines()[-1]


# ------------------------------------------------------------------ as one process would


def close(one: Any, other: Any) -> None:
    """Equal to float rounding, whatever is nested."""
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        for name in one:
            close(one[name], other[name])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for a, b in zip(one, other, strict=True):
            close(a, b)
    else:
        assert one == pytest.approx(other, rel=2e-4, abs=2e-6)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with the files of a BatchNorm model, and what two ranks computed."""
    folder = tmp_path_factory.mktemp("two")
    return folder, on_ranks(2, rank_work.all_on_two, str(folder))


Two = tuple[Path, list[dict[str, Any]]]


def test_one_rank_of_8_and_two_of_4_train_equally(two: Two) -> None:
    source = data(64, seed=5)
    steps = [rank_work.cut(source, range(i, i + 8)) for i in range(0, 64, 8)]
    weights, losses = rank_work.halves()
    assert min(losses[3:]) == losses[5]  # the last epoch is the best, so its weights came back
    close(weights, rank_work.by_hand(steps))
    for found in two[1]:
        close(found["halves"], (weights, losses))


def test_partial_windows_weigh_every_sample_alike_on_two_ranks(two: Two) -> None:
    truth = rank_work.partial_windows_by_hand()
    for found in two[1]:
        close(found["windows"], truth)


def test_damaged_snapshot_is_refused_by_name_on_every_rank(two: Two) -> None:
    """One flipped bit in the middle; the best model's file is as it was."""
    for found in two[1]:
        said, unchanged = found["refused"]
        assert "snapshot.pt is damaged" in said
        assert unchanged


def test_reported_loss_of_a_batchnorm_model_follows_from_its_file(two: Two) -> None:
    """In another process, on the raw data, from the best model's and the checkpoint's file."""
    folder, found = two
    x, y = data(37, seed=2).tensors
    reported, lowest = found[0]["norm"]
    assert reported == lowest
    (top,) = (folder / "top").glob("*.pt")
    for weights in (read_file(folder / "best.pt"), read_file(top)["model"]):
        net = model()
        net.load_state_dict(weights)
        net.eval()
        with torch.no_grad():
            assert float(torch.nn.functional.mse_loss(net(x), y)) == pytest.approx(reported, 1e-5)


@pytest.mark.soak  # test_distributed holds it for 1, 2 and 3 ranks, also of too few samples
def test_metrics_are_exact_on_three_ranks_also_where_one_has_no_sample() -> None:
    """37 samples and 2; AUROC and R2 need all that there is in one place."""
    for found in on_ranks(3, rank_work.all_on_three):
        for samples, row in found.items():
            close(row, rank_work.scores_by_hand(samples))
