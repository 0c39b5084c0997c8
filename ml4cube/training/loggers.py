"""Log the numbers of a run to files, TensorBoard, MLflow, Weights & Biases or Neptune.

A logger is any object with ``log(values, step)`` and ``close()``. A Trainer calls it on rank 0
after every epoch; ``step`` is the number of optimizer steps taken. Nothing is opened before the
run starts, so a logger may be made on every rank and sent to other processes. Packages are imported
when their logger is made.
"""

from __future__ import annotations

import csv
import importlib
import io
import json
import math
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreExistsError
from ml4cube.training.files.checkpoint import write_bytes
from ml4cube.training.inputs.options import check_path
from ml4cube.training.state import nonfinite_to_none

__all__ = [
    "CSVLogger",
    "JSONLLogger",
    "Logger",
    "MLflowLogger",
    "NeptuneLogger",
    "TensorBoardLogger",
    "WandBLogger",
]


class Logger:
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

    def __init__(self, params: Mapping[str, Any] | None = None) -> None:
        if params is not None and not isinstance(params, Mapping):
            raise InvalidTypeError(f"params must be a mapping {{name: value}}, got {params!r}")
        self.params = dict(params or {})
        self._target: Any = None  # the open file, writer or run

    def start(self, step: int = 0) -> None:
        """Open the log for a run, without the entries of later steps.

        Parameters
        ----------
        step : int
            Optimizer steps taken: 0 for a new run, more for a resumed one.
        """
        if self._target is None:
            self._target = self._open(step)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers.

        Parameters
        ----------
        values : mapping of str to float
            Names and numbers.
        step : int
            Optimizer steps taken; not less than in the call before.
        """
        self.start(step - 1)
        # integers stay integers; tensors and numpy scalars become floats
        numbers = {n: v if type(v) in (int, float) else float(v) for n, v in values.items()}
        self._write(numbers, int(step))

    def close(self) -> None:
        """Close the log; a later `start` or `log` opens it again."""
        target, self._target = self._target, None
        if target is not None:
            self._close(target)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_target": None}

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    def _open(self, step: int) -> Any:
        raise NotImplementedError

    def _write(self, values: dict[str, float], step: int) -> None:
        raise NotImplementedError

    def _close(self, target: Any) -> None:
        """Close the target; loggers that keep nothing open need not override this."""


class _FileLogger(Logger):
    """A text file with a line per `log`, opened only to write it."""

    def __init__(self, path: str | Path, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(params)
        check_path("path", path, optional=False)
        self.path = Path(path)
        if self.path.is_dir():
            raise InvalidValueError(f"path must be a file, got the folder {str(path)!r}")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self.path)!r})"

    def _replace(self, lines: Iterable[str]) -> None:
        """Replace the file atomically."""
        write_bytes(self.path, "".join(lines).encode())

    def _append(self, line: str) -> None:
        with self.path.open("a", encoding="utf-8", newline="") as file:
            file.write(line)

    def _whole_lines(self) -> list[str]:
        """Return the lines of the file, without a last one that was cut off by a kill."""
        text = self._content().decode("utf-8", errors="replace")
        return list(io.StringIO(text[: text.rfind("\n") + 1], newline=""))

    def _content(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def _foreign(self) -> StoreExistsError:
        return StoreExistsError(
            f"{self.path} was not written by {type(self).__name__}; give another path, or delete it"
        )


class CSVLogger(_FileLogger):
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
        super().__init__(path)

    def _open(self, step: int) -> list[str]:
        rows = list(csv.reader(self._whole_lines()))
        if self._content() and (not rows or rows[0][:1] != ["step"]):
            raise self._foreign()
        columns = rows[0] if rows and step > 0 else ["step"]
        try:
            kept = [row for row in rows[1:] if row and int(row[0]) <= step]
        except ValueError:
            raise self._foreign() from None
        self._replace(map(_csv_line, [columns, *kept]))
        return columns

    def _write(self, values: dict[str, float], step: int) -> None:
        columns = self._target
        new = [name for name in values if name not in columns]
        if new:
            columns += new
            rows = list(csv.reader(self._whole_lines()))[1:]
            empty = [""] * len(columns)
            self._replace(_csv_line([*row, *empty[len(row) :]]) for row in [columns, *rows])
        row = {"step": step, **values}
        self._append(_csv_line([row.get(name, "") for name in columns]))


class JSONLLogger(_FileLogger):
    """Write one JSON object per line with ``step`` and the numbers; NaN and infinities as null.

    A resumed run continues the file and replaces the lines of steps that it repeats. A new run
    starts the file anew.

    Parameters
    ----------
    path : str or Path
        The file; missing folders are created.
    params : mapping, optional
        Hyperparameters, written as first line ``{"params": {...}}``.

    Raises
    ------
    InvalidValueError
        If `path` is a folder.

    Examples
    --------
    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = JSONLLogger(f"{folder}/log.jsonl", params={"lr": 0.1})
    ...     log.log({"train_loss": 0.5}, step=10)
    ...     print(log.path.read_text(), end="")
    {"params": {"lr": 0.1}}
    {"step": 10, "train_loss": 0.5}
    """

    def _open(self, step: int) -> bool:
        rows = [self._read(line) for line in self._whole_lines()]
        # A file without a whole line may be our own, killed while it wrote the first one.
        if not rows and not b'{"step":'.startswith(self._content()[:8]):
            raise self._foreign()
        kept = [row for row in rows if row.get("step", math.inf) <= step]
        old = [row for row in rows if "params" in row and step > 0]
        params = [{"params": self.params}] if self.params else old[:1]
        self._replace(map(_json_line, [*params, *kept]))
        return True

    def _write(self, values: dict[str, float], step: int) -> None:
        self._append(_json_line({"step": step, **values}))

    def _read(self, line: str) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError:
            raise self._foreign() from None
        if not isinstance(row, dict) or not row.keys() & {"step", "params"}:
            raise self._foreign()
        return row


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

    def __init__(self, log_dir: str | Path, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(params)
        check_path("log_dir", log_dir, optional=False)
        self.log_dir = Path(log_dir)
        _load("torch.utils.tensorboard", self, "tensorboard")

    def __repr__(self) -> str:
        return f"TensorBoardLogger({str(self.log_dir)!r})"

    def _open(self, step: int) -> Any:
        module = importlib.import_module("torch.utils.tensorboard")
        writer = module.SummaryWriter(str(self.log_dir), purge_step=step + 1)
        if self.params and step <= 0:
            rows = [f"| {name} | {value} |" for name, value in self.params.items()]
            writer.add_text("params", "\n".join(["| name | value |", "|---|---|", *rows]), 0)
        return writer

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._target.add_scalar(name, value, step)
        self._target.flush()

    def _close(self, target: Any) -> None:
        target.close()


class _Service(Logger):
    """A logger of a service whose runs have an id, which is part of the snapshot."""

    run_id: str | None

    def state_dict(self) -> dict[str, Any]:
        """Return the id of the run, so that a resumed training continues it."""
        return {"run_id": self.run_id}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the id from a snapshot."""
        self.run_id = state.get("run_id") or self.run_id

    def __repr__(self) -> str:
        return f"{type(self).__name__}(run_id={self.run_id!r})"


class WandBLogger(_Service):
    """Send numbers to Weights & Biases.

    A resumed run continues the same W&B run, which keeps its first values of repeated steps.

    Parameters
    ----------
    project : str, optional
        Default: taken from the environment by W&B.
    name : str, optional
        Name of the run.
    dir : str or Path, optional
        Folder for W&B's own files. Default: ``WANDB_DIR``, else ``./wandb``.
    run_id : str, optional
        A run to continue. Default: that of the snapshot, else a new one.
    params : mapping, optional
        Hyperparameters, the config of the run.
    **init : Any
        Further arguments of ``wandb.init``, such as ``entity``, ``group``, ``mode="offline"``.

    Raises
    ------
    ModuleNotFoundError
        If wandb is not installed.
    InvalidTypeError
        If `init` has an argument that the logger sets itself.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        name: str | None = None,
        dir: str | Path | None = None,
        run_id: str | None = None,
        params: Mapping[str, Any] | None = None,
        **init: Any,
    ) -> None:
        super().__init__(params)
        _check_free(init, {"id": "run_id", "config": "params", "resume": "run_id"})
        self.run_id = run_id
        folder = None if dir is None else str(dir)
        self._init = {"project": project, "name": name, "dir": folder, **init}
        _load("wandb", self, "wandb")

    def _open(self, step: int) -> Any:
        self.run_id = self.run_id or uuid.uuid4().hex[:8]
        if self._init["dir"] is not None:  # without the folder, W&B would use a temporary one
            Path(self._init["dir"]).mkdir(parents=True, exist_ok=True)
        wandb = importlib.import_module("wandb")
        config = self.params or None
        return wandb.init(id=self.run_id, resume="allow", config=config, **self._init)

    def _write(self, values: dict[str, float], step: int) -> None:
        self._target.log(values, step=step)

    def _close(self, target: Any) -> None:
        target.finish()


class MLflowLogger(_Service):
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

    def __init__(
        self,
        experiment: str = "ml4cube",
        *,
        tracking_uri: str | None = None,
        run_name: str | None = None,
        run_id: str | None = None,
        params: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(params)
        self.experiment, self.tracking_uri = experiment, tracking_uri
        self.run_name, self.run_id = run_name, run_id
        self._last = -1  # the last step in the run
        mlflow = _load("mlflow", self, "mlflow-skinny")
        if tracking_uri is None and not mlflow.is_tracking_uri_set():
            raise InvalidTypeError(
                "tracking_uri must be given, or set by mlflow.set_tracking_uri or "
                "MLFLOW_TRACKING_URI"
            )

    def _open(self, step: int) -> Any:
        client = importlib.import_module("mlflow").MlflowClient(tracking_uri=self.tracking_uri)
        if self.run_id is not None:
            known = client.get_run(self.run_id).data.metrics
            self._last = max(
                (m.step for name in known for m in client.get_metric_history(self.run_id, name)),
                default=-1,
            )
            client.update_run(self.run_id, status="RUNNING")
            return client
        found = client.get_experiment_by_name(self.experiment)
        number = client.create_experiment(self.experiment) if found is None else found.experiment_id
        self.run_id = client.create_run(number, run_name=self.run_name).info.run_id
        if self.params:
            kind = importlib.import_module("mlflow.entities").Param
            params = [kind(name, str(value)) for name, value in self.params.items()]
            client.log_batch(self.run_id, params=params)
        return client

    def _write(self, values: dict[str, float], step: int) -> None:
        if step <= self._last:
            return
        kind = importlib.import_module("mlflow.entities").Metric
        now = int(time.time() * 1000)
        metrics = [kind(name, float(value), now, step) for name, value in values.items()]
        self._target.log_batch(self.run_id, metrics=metrics)

    def _close(self, target: Any) -> None:
        target.set_terminated(self.run_id, "FINISHED")


class NeptuneLogger(_Service):
    """Send numbers to Neptune.

    A resumed run continues the same Neptune run, which keeps its first values of repeated steps.

    Parameters
    ----------
    project : str, optional
        ``"workspace/project"``. Default: taken from the environment by Neptune.
    api_token : str, optional
        Default: taken from the environment by Neptune.
    name : str, optional
        Name of the run.
    run_id : str, optional
        Custom id of a run to continue. Default: that of the snapshot, else a new one.
    params : mapping, optional
        Hyperparameters, the field ``parameters``.
    **init : Any
        Further arguments of ``neptune.init_run``, such as ``tags`` or ``mode="offline"``.

    Raises
    ------
    ModuleNotFoundError
        If neptune is not installed.
    InvalidTypeError
        If `init` has an argument that the logger sets itself.
    """

    def __init__(
        self,
        project: str | None = None,
        *,
        api_token: str | None = None,
        name: str | None = None,
        run_id: str | None = None,
        params: Mapping[str, Any] | None = None,
        **init: Any,
    ) -> None:
        super().__init__(params)
        _check_free(init, {"custom_run_id": "run_id", "with_id": "run_id"})
        self.run_id = run_id
        self._init = {"project": project, "api_token": api_token, "name": name, **init}
        _load("neptune", self, "neptune")

    def _open(self, step: int) -> Any:
        continued = self.run_id is not None
        self.run_id = self.run_id or uuid.uuid4().hex
        run = importlib.import_module("neptune").init_run(custom_run_id=self.run_id, **self._init)
        if self.params and not continued:
            utils = importlib.import_module("neptune.utils")
            run["parameters"] = utils.stringify_unsupported(self.params)
        return run

    def _write(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            if math.isfinite(value):  # Neptune refuses others
                self._target[name].append(value, step=step)

    def _close(self, target: Any) -> None:
        target.stop()


def _load(module: str, logger: Logger, package: str) -> Any:
    """Import a module; if it is missing, raise an error that names the package to install."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"{type(logger).__name__} needs {package}, which is not installed "
            f"(no module {error.name!r}); run `pip install {package}`",
            name=error.name,
        ) from error


def _check_free(init: Mapping[str, Any], taken: Mapping[str, str]) -> None:
    for name, ours in taken.items():
        if name in init:
            raise InvalidTypeError(f"{name} is set by the logger; use {ours}= instead")


def _csv_line(row: Iterable[Any]) -> str:
    line = io.StringIO(newline="")
    csv.writer(line).writerow(row)
    return line.getvalue()


def _json_line(row: Mapping[str, Any]) -> str:
    return json.dumps(nonfinite_to_none(row), default=str) + "\n"
