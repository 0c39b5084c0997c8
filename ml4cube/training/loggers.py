"""Log the numbers of a run to a CSV file, TensorBoard, MLflow, Weights & Biases or Neptune.

A logger is any object with ``log(values, step)`` and ``close()``. A Trainer calls it on rank 0
after every epoch; ``step`` is the number of optimizer steps taken. Nothing is opened before the
run starts, so a logger may be made on every rank and sent to other processes. Packages are imported
when their logger is made.
"""

from __future__ import annotations

import csv
import importlib
import io
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from ml4cube.core.display import PrintedAsCall
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreExistsError
from ml4cube.training.files.checkpoint import write_bytes
from ml4cube.training.files.paths import absolute_path
from ml4cube.training.inputs.checks import import_package

__all__ = [
    "CSVLogger",
    "Logger",
    "MLflowLogger",
    "NeptuneLogger",
    "TensorBoardLogger",
    "WandBLogger",
]


class Logger(PrintedAsCall, ABC):
    """Base class of the loggers, opened by `start` or by the first `log`.

    Parameters
    ----------
    params : mapping, optional
        Hyperparameters, logged once when a run starts.

    Raises
    ------
    InvalidTypeError
        If `params` is not a mapping.
    """

    # The module that the logger imports, and the package that must be installed for it.
    _module, _package = "", ""

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        self.params = dict(as_mapping("params", {} if params is None else params))
        if self._package:
            import_package(self._module, self._package, type(self).__name__)
        self._opened: Any = None  # what `_open` returned; None while the log is closed

    def start(self, step: int = 0) -> None:
        """Open the log for a run, without the entries of later steps.

        Parameters
        ----------
        step : int
            Optimizer steps taken: 0 for a new run, more for a resumed one.
        """
        if self._opened is None:
            self._opened = self._open(step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers.

        Parameters
        ----------
        values : mapping of str to float
            Names and numbers.
        step : int
            Optimizer steps taken; not less than in the call before.
        """
        self.start(step - 1)  # without entries of this step, which are written again
        # Scalars of torch and numpy become floats.
        numbers = dict(values)
        for name, value in values.items():
            if type(value) not in (int, float):
                numbers[name] = float(value)
        self._write(numbers, int(step))

    def close(self) -> None:
        """Close the log; a later `start` or `log` opens it again."""
        opened, self._opened = self._opened, None
        if opened is not None:
            self._close(opened)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_opened": None}

    @abstractmethod
    def _open(self, step: int) -> Any:
        """Open the log without the entries of steps after `step`; return what `_write` needs."""

    @abstractmethod
    def _write(self, values: dict[str, float], step: int) -> None:
        """Write the numbers of a step."""

    def _close(self, opened: Any) -> None:
        """Close what `_open` returned; loggers that keep nothing open need not override this."""


class CSVLogger(Logger):
    """Write a CSV table: a column ``step``, then one per name.

    A name that first appears later gets a new column, empty in earlier rows. A resumed run
    continues the file and replaces the rows of steps that it repeats. A new run starts the file
    anew.

    Parameters
    ----------
    path : str or Path
        The file; missing folders are created.

    Raises
    ------
    InvalidValueError
        If `path` is a folder.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = CSVLogger(f"{folder}/log.csv")
    ...     log.log({"train_loss": 0.5}, step=10)
    ...     log.log({"train_loss": 0.25, "val_loss": 0.75}, step=20)
    ...     print(log.path.read_text().replace("\\r", ""), end="")
    step,train_loss,val_loss
    10,0.5,
    20,0.25,0.75
    """

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self.path = absolute_path("path", path)
        if self.path.is_dir():
            raise InvalidValueError(f"path must be a file, got the folder {str(path)!r}")

    def _open(self, step: int) -> list[str]:
        rows = self._rows(step)
        columns = ["step"]
        if rows:
            columns = list(rows[0])
        self._rewrite(columns, rows)
        return columns

    def _write(self, values: dict[str, float], step: int) -> None:
        columns = self._opened
        new = [name for name in values if name not in columns]
        if new:
            rows = self._rows(math.inf)
            columns += new
            self._rewrite(columns, rows)
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(_csv_lines(columns, [{"step": step, **values}]))

    def _rows(self, step: float) -> list[dict[str, Any]]:
        """Return the rows up to a step, without a last line that was cut off by a kill."""
        if not self.path.exists():
            return []
        text = self.path.read_bytes().decode("utf-8", errors="replace")
        whole_lines = text[: text.rfind("\n") + 1]
        reader = csv.DictReader(io.StringIO(whole_lines, newline=""))
        try:
            if (text and not whole_lines) or (reader.fieldnames or ["step"])[0] != "step":
                raise ValueError
            rows: list[dict[str, Any]] = [row | {"step": int(row["step"])} for row in reader]
        except (TypeError, ValueError):
            raise StoreExistsError(
                f"{self.path} was not written by CSVLogger; give another path"
            ) from None
        return [row for row in rows if row["step"] <= step]

    def _rewrite(self, columns: list[str], rows: Iterable[Mapping[str, Any]]) -> None:
        header = dict(zip(columns, columns, strict=True))
        write_bytes(self.path, _csv_lines(columns, [header, *rows]).encode())


class TensorBoardLogger(Logger):
    """Write event files for TensorBoard.

    A resumed run adds a file to the same folder; TensorBoard then hides the earlier values of the
    steps that are repeated.

    Parameters
    ----------
    log_dir : str or Path
        Folder of the event files, created if missing.
    params : mapping, optional
        Hyperparameters, shown as a table under TEXT.

    Raises
    ------
    ModuleNotFoundError
        If tensorboard is not installed.
    """

    _module, _package = "torch.utils.tensorboard", "tensorboard"

    def __init__(self, log_dir: str | Path, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(params)
        self.log_dir = absolute_path("log_dir", log_dir)

    def _open(self, step: int) -> Any:
        module = importlib.import_module(self._module)
        writer = module.SummaryWriter(str(self.log_dir), purge_step=step + 1)
        if self.params and step <= 0:
            rows = [f"| {name} | {value} |" for name, value in self.params.items()]
            writer.add_text("params", "\n".join(["| name | value |", "|---|---|", *rows]), 0)
        return writer

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._opened.add_scalar(name, value, step)
        self._opened.flush()

    def _close(self, opened: Any) -> None:
        opened.close()


class _ServiceLogger(Logger):
    """A logger of a service whose runs have an id, which is part of the snapshot."""

    def __init__(self, run_id: str | None, params: Mapping[str, Any] | None) -> None:
        super().__init__(params)
        self.run_id = self._given_id = run_id

    def start(self, step: int = 0) -> None:
        """Open the log; a training that starts at step 0, such as the next fold's, is a new run."""
        if self._opened is None and step <= 0:
            self.run_id = self._given_id
        super().start(step)

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the run, so that a resumed training continues it."""
        return {"run_id": self.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the id from a snapshot."""
        self.run_id = state.get("run_id") or self.run_id


class _InitLogger(_ServiceLogger):
    """A logger of a service whose function ``init`` makes a run; further arguments go to it."""

    # The arguments of the function that the logger sets: {argument: argument to give instead}.
    _replaced_arguments: ClassVar[Mapping[str, str]]

    def __init__(
        self,
        project: str | None = None,
        *,
        run_id: str | None = None,
        params: Mapping[str, Any] | None = None,
        **init: Any,
    ) -> None:
        super().__init__(run_id, params)
        for name, instead in self._replaced_arguments.items():
            if name in init:
                raise InvalidTypeError(f"{name} is set by the logger; use {instead}= instead")
        self._init = {"project": project, **init}
        if init.get("dir") is not None:
            self._init["dir"] = absolute_path("dir", init["dir"])


class WandBLogger(_InitLogger):
    """Send numbers to Weights & Biases.

    A resumed run continues the same W&B run, which keeps its first values of repeated steps.

    Parameters
    ----------
    project : str, optional
        Default: taken from the environment by W&B.
    run_id : str, optional
        A run to continue. Default: that of the snapshot, else a new one.
    params : mapping, optional
        Hyperparameters, the config of the run.
    **init : Any
        Further arguments of ``wandb.init``, such as ``name``, ``entity``, ``group``,
        ``mode="offline"`` and ``dir``, the folder for W&B's own files (by default ``WANDB_DIR``,
        else ``./wandb``).

    Raises
    ------
    ModuleNotFoundError
        If wandb is not installed.
    InvalidTypeError
        If `init` has an argument that the logger sets itself.
    """

    _module = _package = "wandb"
    _replaced_arguments: ClassVar = {"id": "run_id", "config": "params", "resume": "run_id"}

    def _open(self, step: int) -> Any:
        self.run_id = self.run_id or uuid.uuid4().hex[:8]
        if self._init.get("dir") is not None:  # without it, W&B would use a temporary folder
            Path(self._init["dir"]).mkdir(parents=True, exist_ok=True)
        wandb = importlib.import_module("wandb")
        config = self.params or None
        return wandb.init(id=self.run_id, resume="allow", config=config, **self._init)

    def _write(self, values: dict[str, float], step: int) -> None:
        self._opened.log(values, step=step)

    def _close(self, opened: Any) -> None:
        opened.finish()


class MLflowLogger(_ServiceLogger):
    """Send numbers to MLflow.

    A resumed run continues the same MLflow run and logs no step twice.

    Parameters
    ----------
    experiment : str
        Name of the experiment, created if missing.
    tracking_uri : str, optional
        The server or store. Default: as set by ``mlflow.set_tracking_uri`` or
        MLFLOW_TRACKING_URI. MLflow's own default, a store in the current folder, is not used.
    run_name : str, optional
        Name of the run.
    run_id : str, optional
        A run to continue. Default: that of the snapshot, else a new one.
    params : mapping, optional
        Hyperparameters.

    Raises
    ------
    ModuleNotFoundError
        If mlflow is not installed.
    InvalidTypeError
        If no tracking URI is given or set.
    """

    _module, _package = "mlflow", "mlflow-skinny"

    def __init__(
        self,
        experiment: str = "ml4cube",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(run_id, params)
        self.experiment, self.tracking_uri, self.run_name = experiment, tracking_uri, run_name
        self._last_step = -1  # that the run already has
        mlflow = importlib.import_module("mlflow")
        if tracking_uri is None and not mlflow.is_tracking_uri_set():
            raise InvalidTypeError(
                "tracking_uri must be given, or set by mlflow.set_tracking_uri or "
                "MLFLOW_TRACKING_URI"
            )

    def _open(self, step: int) -> Any:
        client = importlib.import_module("mlflow").MlflowClient(tracking_uri=self.tracking_uri)
        if self.run_id is not None:
            names = client.get_run(self.run_id).data.metrics
            metrics = [m for name in names for m in client.get_metric_history(self.run_id, name)]
            self._last_step = max((metric.step for metric in metrics), default=-1)
            client.update_run(self.run_id, status="RUNNING")
            return client
        experiment = client.get_experiment_by_name(self.experiment)
        if experiment is None:
            experiment_id = client.create_experiment(self.experiment)
        else:
            experiment_id = experiment.experiment_id
        self.run_id = client.create_run(experiment_id, run_name=self.run_name).info.run_id
        self._last_step = -1
        if self.params:
            entities = importlib.import_module("mlflow.entities")
            params = [entities.Param(name, str(value)) for name, value in self.params.items()]
            client.log_batch(self.run_id, params=params)
        return client

    def _write(self, values: dict[str, float], step: int) -> None:
        if step <= self._last_step:
            return
        entities = importlib.import_module("mlflow.entities")
        now_ms = int(time.time() * 1000)
        metrics = [entities.Metric(n, float(v), now_ms, step) for n, v in values.items()]
        self._opened.log_batch(self.run_id, metrics=metrics)

    def _close(self, opened: Any) -> None:
        opened.set_terminated(self.run_id, "FINISHED")


class NeptuneLogger(_InitLogger):
    """Send numbers to Neptune, a service that ended in March 2026.

    It works with a Neptune server of your own, and with ``mode="offline"``; no extra of ml4cube
    installs the package.

    A resumed run continues the same Neptune run, which keeps its first values of repeated steps.

    Parameters
    ----------
    project : str, optional
        ``"workspace/project"``. Default: taken from the environment by Neptune.
    run_id : str, optional
        Custom id of a run to continue. Default: that of the snapshot, else a new one.
    params : mapping, optional
        Hyperparameters, the field ``parameters``.
    **init : Any
        Further arguments of ``neptune.init_run``, such as ``name``, ``tags``, ``mode="offline"``
        and ``api_token`` (by default taken from the environment by Neptune).

    Raises
    ------
    ModuleNotFoundError
        If neptune is not installed.
    InvalidTypeError
        If `init` has an argument that the logger sets itself.
    """

    _module = _package = "neptune"
    _replaced_arguments: ClassVar = {"custom_run_id": "run_id", "with_id": "run_id"}

    def _open(self, step: int) -> Any:
        is_continued = self.run_id is not None
        self.run_id = self.run_id or uuid.uuid4().hex
        run = importlib.import_module("neptune").init_run(custom_run_id=self.run_id, **self._init)
        if self.params and not is_continued:
            utils = importlib.import_module("neptune.utils")
            run["parameters"] = utils.stringify_unsupported(self.params)
        return run

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            if math.isfinite(value):  # Neptune refuses others
                self._opened[name].append(value, step=step)

    def _close(self, opened: Any) -> None:
        opened.stop()


def as_mapping(name: str, value: Any) -> Mapping[str, Any]:
    """Return a mapping, or refuse anything else."""
    if not isinstance(value, Mapping):
        raise InvalidTypeError(f"{name} must be a mapping {{name: value}}, got {value!r}")
    return value


def _csv_lines(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    text = io.StringIO(newline="")
    csv.DictWriter(text, columns, restval="").writerows(rows)
    return text.getvalue()
