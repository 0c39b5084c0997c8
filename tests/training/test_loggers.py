"""Loggers: files exact through kills and resumes, services called as their packages allow.

The stand-ins for W&B, MLflow and Neptune below take exactly the arguments listed in them. Each
call was made once with the real packages: wandb 0.31 offline, mlflow-skinny 3.17 on a file store
(a run continued by its id, its steps read back), neptune 1.14 offline.
"""

import csv
import math
import os
import sys
import types
from collections import namedtuple
from dataclasses import replace

import cloudpickle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.errors import InvalidTypeError, InvalidValueError, StoreError, StoreExistsError
from ml4cube.training.loggers import (
    CSVLogger,
    MLflowLogger,
    NeptuneLogger,
    TensorBoardLogger,
    WandBLogger,
)
from tests.distributed_runner import on_ranks
from tests.training_parts import At, Interrupt, trained


def read_csv(path):
    with open(path, newline="") as file:
        return [{k: v for k, v in row.items() if v != ""} for row in csv.DictReader(file)]


def events(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return found


# ------------------------------------------------------------------------- files


NAMES = ["loss", 'a "b", c', "näher", "lr"]
ROWS = st.lists(st.dictionaries(st.sampled_from(NAMES), st.floats(-9, 9), min_size=1), max_size=6)


@pytest.mark.slow
@settings(max_examples=40)
@given(lives=st.lists(st.tuples(st.integers(0, 6), ROWS, st.booleans()), min_size=1, max_size=4))
def test_files_hold_every_step_once_whatever_was_resumed(tmp_path_factory, lives):
    folder = tmp_path_factory.mktemp("logs")
    log = CSVLogger(folder / "log.csv")
    truth = {}
    for number, (start, rows, killed) in enumerate(lives):
        start = start if number else 0
        truth = {step: row for step, row in truth.items() if step <= start and start}
        new = dict(enumerate(rows, start=start + 1))
        log.start(start)
        for step, row in new.items():
            log.log(row, step)
        log.close()
        truth |= new
        if killed and truth:  # while the last line is written
            del truth[max(truth)]
            whole = log.path.read_bytes()
            log.path.write_bytes(whole[: whole[:-1].rfind(b"\n") + 1 + 4])
    log.start(99)
    as_text = [{"step": str(n), **{k: str(v) for k, v in row.items()}} for n, row in truth.items()]
    assert read_csv(folder / "log.csv") == as_text


def test_a_log_is_begun_like_any_file_that_must_survive(tmp_path):
    left = tmp_path / ".log.elsewhere-1.tmp"  # of a machine that died in a save, long ago
    left.touch()
    os.utime(left, (0, 0))
    CSVLogger(tmp_path / "log").log({"a": 1}, 1)
    assert os.listdir(tmp_path) == ["log"]
    with pytest.raises(StoreError, match=r"cannot be written.*give another path"):
        CSVLogger(tmp_path / "log" / "below").log({"a": 1}, 1)


@pytest.mark.parametrize("text", ["name,age\nann,3\n", "[1, 2]\n", "x", "step,a\nfirst,2\n"])
def test_a_file_of_someone_else_is_left_alone(tmp_path, text):
    path = tmp_path / "precious"
    path.write_text(text)
    with pytest.raises(StoreExistsError, match="precious was not written by"):
        CSVLogger(path).log({"a": 1}, 1)
    assert path.read_text() == text


# ------------------------------------------------------------------- TensorBoard


def test_tensorboard_shows_each_step_once_after_a_resume(tmp_path):
    for start, steps in ((0, (4, 8, 12)), (4, (8, 12, 16))):
        log = TensorBoardLogger(tmp_path / "tb", params={"lr": 0.1})
        log.start(start)
        for step in steps:
            log.log({"val_loss": step / 4}, step)
        log.close()
    found = events(tmp_path / "tb")
    scalars = [(event.step, event.value) for event in found.Scalars("val_loss")]
    assert scalars == [(4, 1.0), (8, 2.0), (12, 3.0), (16, 4.0)]
    assert (
        "| lr | 0.1 |"
        in found.Tensors("params/text_summary")[0].tensor_proto.string_val[0].decode()
    )
    assert [path.name for path in tmp_path.iterdir()] == ["tb"]


# ---------------------------------------------------------------------- services


class FakeWandB(types.ModuleType):
    """wandb.init(...) → run.log(data, step), run.finish()."""

    def __init__(self):
        super().__init__("wandb")
        self.calls = []

    def init(self, *, project, id, resume, config, name=None, dir=None, mode=None):
        assert resume == "allow"
        assert isinstance(id, str)
        self.calls.append(("init", project, name, dir, id, config, mode))
        return self

    def log(self, data, step=None):
        assert all(type(value) in (int, float) for value in data.values())
        self.calls.append(("log", data, step))

    def finish(self):
        self.calls.append(("finish",))


class FakeMLflow(types.ModuleType):
    """MlflowClient with one store for all clients."""

    def __init__(self):
        super().__init__("mlflow")
        self.experiments, self.runs, self.uris, self.uri_set = {}, {}, [], False
        self.entities = types.ModuleType("mlflow.entities")
        self.entities.Metric = namedtuple("Metric", "key value timestamp step")
        self.entities.Param = namedtuple("Param", "key value")

    def is_tracking_uri_set(self):
        return self.uri_set

    def MlflowClient(self, tracking_uri=None):
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name):
        number = self.experiments.get(name)
        return None if number is None else types.SimpleNamespace(experiment_id=number)

    def create_experiment(self, name):
        assert name not in self.experiments
        return self.experiments.setdefault(name, str(len(self.experiments)))

    def create_run(self, experiment_id, run_name=None):
        run_id = f"run{len(self.runs)}"
        self.runs[run_id] = {"metrics": [], "params": [], "status": "RUNNING", "name": run_name}
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id))

    def get_run(self, run_id):
        latest = {metric.key: metric.value for metric in self.runs[run_id]["metrics"]}
        return types.SimpleNamespace(data=types.SimpleNamespace(metrics=latest))

    def get_metric_history(self, run_id, key):
        return [metric for metric in self.runs[run_id]["metrics"] if metric.key == key]

    def log_batch(self, run_id, metrics=(), params=()):
        assert all(type(m.value) is float and type(m.timestamp) is int for m in metrics)
        self.runs[run_id]["metrics"] += metrics
        self.runs[run_id]["params"] += params

    def update_run(self, run_id, status=None):
        self.runs[run_id]["status"] = status

    def set_terminated(self, run_id, status=None):
        self.runs[run_id]["status"] = status


class FakeNeptune(types.ModuleType):
    """neptune.init_run(...) → run[field] = ..., run[field].append(value, step=), run.stop()."""

    def __init__(self):
        super().__init__("neptune")
        self.calls = []
        self.utils = types.ModuleType("neptune.utils")
        self.utils.stringify_unsupported = lambda value: {k: str(v) for k, v in value.items()}

    def init_run(self, *, project, custom_run_id, name=None, api_token=None, mode=None):
        assert len(custom_run_id) <= 36  # what Neptune takes
        self.calls.append(("init", project, name, custom_run_id, mode))
        return self

    def __setitem__(self, field, value):
        self.calls.append(("set", field, value))

    def __getitem__(self, field):
        def append(value, *, step):
            assert math.isfinite(value)
            self.calls.append(("append", field, value, step))

        return types.SimpleNamespace(append=append)

    def stop(self):
        self.calls.append(("stop",))


@pytest.fixture
def fakes(monkeypatch):
    made = {"wandb": FakeWandB(), "mlflow": FakeMLflow(), "neptune": FakeNeptune()}
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setitem(sys.modules, "mlflow.entities", made["mlflow"].entities)
    monkeypatch.setitem(sys.modules, "neptune.utils", made["neptune"].utils)
    return types.SimpleNamespace(**made)


def test_wandb_gets_config_numbers_and_the_same_run_when_resumed(fakes, tmp_path):
    log = WandBLogger("cubes", name="a", dir=tmp_path / "w", params={"lr": 0.1}, mode="offline")
    assert fakes.wandb.calls == []  # a rank that never logs opens no run
    log.start(0)
    log.log({"loss": torch.tensor(0.5), "epoch": 1}, 4)
    state = log.state_dict()
    log.close()
    run = state["run_id"]
    folder = tmp_path / "w"
    assert fakes.wandb.calls == [
        ("init", "cubes", "a", folder, run, {"lr": 0.1}, "offline"),
        ("log", {"loss": 0.5, "epoch": 1}, 4),
        ("finish",),
    ]
    assert (tmp_path / "w").is_dir()
    again = WandBLogger("cubes")
    again.load_state_dict(state)
    again.start(4)
    assert fakes.wandb.calls[-1] == ("init", "cubes", None, None, run, None, None)


def test_mlflow_continues_its_run_without_repeating_a_step(fakes):
    log = MLflowLogger("sst", tracking_uri="file:/a", run_name="n", params={"lr": 0.1})
    log.start(0)
    for step in (4, 8):
        log.log({"loss": 1 / step, "epoch": step // 4}, step)
    state = log.state_dict()
    log.close()
    assert fakes.mlflow.runs["run0"]["status"] == "FINISHED"
    again = MLflowLogger("sst", tracking_uri="file:/a", params={"lr": 0.1})
    again.load_state_dict(state)
    again.start(4)
    assert fakes.mlflow.runs["run0"]["status"] == "RUNNING"
    for step in (8, 12):
        again.log({"loss": 1 / step, "epoch": step // 4}, step)
    again.close()
    (run,) = fakes.mlflow.runs.values()
    assert run["params"] == [("lr", "0.1")]
    assert run["name"] == "n"
    assert [(m.key, m.step) for m in run["metrics"]] == [
        (name, step) for step in (4, 8, 12) for name in ("loss", "epoch")
    ]
    MLflowLogger("sst", tracking_uri="file:/a").start(0)  # another run of the same experiment
    assert fakes.mlflow.experiments == {"sst": "0"}
    assert len(fakes.mlflow.runs) == 2


def test_each_training_from_the_start_is_a_run_of_its_own_in_a_service(fakes):
    logs = [MLflowLogger(tracking_uri="file:/a"), WandBLogger("p"), NeptuneLogger("w/p")]
    for seed in (1, 2):  # folds with the same loggers
        trained(loggers=logs, epochs=2, seed=seed)
    for run in fakes.mlflow.runs.values():
        assert [m.step for m in run["metrics"] if m.key == "epoch"] == [10, 20]
    assert len(fakes.mlflow.runs) == 2
    for calls, id_at in ((fakes.wandb.calls, 4), (fakes.neptune.calls, 3)):
        assert len({call[id_at] for call in calls if call[0] == "init"}) == 2
    ran = trained(loggers=logs, epochs=1)
    ran._loop.options = replace(ran._loop.options, epochs=2)
    ran.train()  # trains on, in the same run
    assert len(fakes.mlflow.runs) == 3


def test_mlflow_takes_a_folder_only_from_the_user(fakes):
    fakes.mlflow.uri_set = True
    MLflowLogger("sst").start(0)
    assert fakes.mlflow.uris == [None]  # MLflow's own setting


def test_neptune_gets_params_numbers_and_the_same_run_when_resumed(fakes):
    log = NeptuneLogger("me/cubes", name="a", params={"lr": 0.1}, mode="offline")
    log.start(0)
    log.log({"loss": 0.5, "bad": math.nan}, 4)
    state = log.state_dict()
    log.close()
    run = state["run_id"]
    assert fakes.neptune.calls == [
        ("init", "me/cubes", "a", run, "offline"),
        ("set", "parameters", {"lr": "0.1"}),
        ("append", "loss", 0.5, 4),
        ("stop",),
    ]
    again = NeptuneLogger("me/cubes", params={"lr": 0.1})
    again.load_state_dict(state)
    again.log({"loss": 0.25}, 8)
    assert fakes.neptune.calls[4:] == [
        ("init", "me/cubes", None, run, None),
        ("append", "loss", 0.25, 8),
    ]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: CSVLogger(folder), "path must be a file"),
        (
            lambda folder: TensorBoardLogger(folder / "a", params=["lr", 0.1]),
            "params must be a mapping",
        ),
        (lambda folder: TensorBoardLogger(None), "log_dir must be a path"),
        (lambda folder: MLflowLogger("sst"), "tracking_uri must be given"),
        (lambda folder: WandBLogger("p", id="x"), "use run_id= instead"),
        (lambda folder: NeptuneLogger("p", with_id="x"), "use run_id= instead"),
    ],
)
def test_arguments_that_cannot_work_are_refused(fakes, tmp_path, make, message):
    with pytest.raises((InvalidTypeError, InvalidValueError), match=message):
        make(tmp_path)


@pytest.mark.parametrize(
    ("module", "package", "make"),
    [
        ("wandb", "wandb", lambda: WandBLogger("p")),
        ("mlflow", "mlflow-skinny", lambda: MLflowLogger("e", tracking_uri="file:/a")),
        ("neptune", "neptune", lambda: NeptuneLogger("p")),
        ("torch.utils.tensorboard", "tensorboard", lambda: TensorBoardLogger("tb")),
    ],
)
def test_a_missing_package_is_one_clear_error_when_the_logger_is_made(
    monkeypatch, tmp_path, module, package, make
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ModuleNotFoundError, match=f"run `pip install {package}`"):
        make()
    assert list(tmp_path.iterdir()) == []


def sent(log):
    return cloudpickle.loads(cloudpickle.dumps(log))


def test_loggers_can_be_sent_to_another_process_while_open(fakes, tmp_path):
    log = WandBLogger("cubes")
    log.log({"a": 1}, 1)
    assert sent(log).run_id == log.run_id
    table = sent(TensorBoardLogger(tmp_path / "tb"))
    table.log({"a": 1}, 1)
    table.close()
    assert events(tmp_path / "tb").Scalars("a")[0].value == 1.0


# --------------------------------------------------------------------- in training


def test_several_loggers_get_the_history_of_a_run(tmp_path, fakes):
    logs = [
        CSVLogger(tmp_path / "a.csv"),
        TensorBoardLogger(tmp_path / "tb"),
        MLflowLogger(tracking_uri="file:/a"),
    ]
    ran = trained(loggers=logs, epochs=2)
    wanted = ran.history["val_loss"]
    assert [float(row["val_loss"]) for row in read_csv(tmp_path / "a.csv")] == wanted
    shown = [event.value for event in events(tmp_path / "tb").Scalars("val_loss")]
    assert shown == pytest.approx(wanted)
    sent = [m.value for m in fakes.mlflow.get_metric_history("run0", "val_loss")]
    assert sent == wanted
    assert fakes.mlflow.runs["run0"]["status"] == "FINISHED"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.csv", "tb"]


def test_a_resumed_run_goes_on_in_the_same_log_and_run_of_the_service(tmp_path, fakes):
    def run(**arguments):
        logs = [CSVLogger(tmp_path / "a.csv"), MLflowLogger(tracking_uri="file:/a")]
        settings = {"snapshot_path": tmp_path / "s.pt", "save_every": 2, "epochs": 5}
        return trained(loggers=logs, **settings, **arguments)

    with pytest.raises(Interrupt):
        run(callbacks=[At(35)])  # in epoch 4; the snapshot is of epoch 2
    assert len(read_csv(tmp_path / "a.csv")) == 3
    ran = run()
    rows = read_csv(tmp_path / "a.csv")
    assert [row["step"] for row in rows] == ["10", "20", "30", "40", "50"]
    assert [float(row["val_loss"]) for row in rows] == ran.history["val_loss"]
    assert list(fakes.mlflow.runs) == ["run0"]
    steps = [m.step for m in fakes.mlflow.get_metric_history("run0", "epoch")]
    assert steps == [10, 20, 30, 40, 50]


def log_on_ranks(folder):
    log = CSVLogger(f"{folder}/log.csv")
    ran = trained(ranks=True, loggers=[log], epochs=2)
    return log._opened, ran.history["val_loss"]


@pytest.mark.slow
def test_only_rank_0_logs(tmp_path):
    results = on_ranks(2, log_on_ranks, str(tmp_path))
    rows = read_csv(tmp_path / "log.csv")
    assert [float(row["val_loss"]) for row in rows] == results[0][1]
    assert len(rows) == 2
