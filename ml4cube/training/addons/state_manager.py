"""An add-on that keeps the best state of a Trainer in a folder."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreError
from ml4cube.training.addons.core import AddOnBase
from ml4cube.training.files.checkpoint import read_file, write_bytes, write_file
from ml4cube.training.state import TrainState

FORMATS = (".ckpt", ".safetensor", ".safetensors")
_STATE = "state.ckpt"


class StateManagerAddon(AddOnBase):
    """Keep model, optimizer and scheduler of the best epoch in a folder, in a format you choose.

    The Trainer takes ``save_path``, the folder, and ``save_format``: ``"ckpt"`` (default),
    ``"safetensor"`` or ``"safetensors"``; the last two are one format, which needs the package
    safetensors. ``save_path="folder/name.safetensors"`` says both, and the name of the file.

    After every epoch that is the best so far there are two files: ``model.<format>`` with the
    weights, a plain state dict, and ``state.ckpt`` with optimizer, scheduler and epoch. They
    belong together at any moment, also if a save is cut off. With ``ema``, the weights are the
    average, not those that the optimizer was changing: only a snapshot goes on from both.

    The Trainer gets ``save_state()``, ``load_state()``, and a ``save_model`` and ``load_model``
    that read the format from the suffix of the file.

    Examples
    --------
    >>> import tempfile
    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> from ml4cube.training.trainer import Trainer
    >>> x = torch.linspace(0, 1, 32).reshape(-1, 1)
    >>> loader = DataLoader(TensorDataset(x, 2 * x), batch_size=8)
    >>> model = torch.nn.Linear(1, 1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     trainer = Trainer.add_on(StateManagerAddon)(
    ...         model,
    ...         device="cpu",
    ...         optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...         loss=torch.nn.MSELoss(),
    ...         save_path=folder,
    ...     )
    ...     _ = trainer.run(2, loader)
    ...     sorted(path.name for path in Path(folder).iterdir()), trainer.load_state()
    (['model.ckpt', 'state.ckpt'], 2)
    """

    @classmethod
    def apply(cls, base_cls: Any) -> Any:
        """Return a subclass that saves.

        Parameters
        ----------
        base_cls : type
            A Trainer class.

        Returns
        -------
        type
            The subclass.
        """
        return type(base_cls)("TrainerWithState", (_State, base_cls), {})


class _State:
    """Comes before a Trainer class."""

    model: torch.nn.Module
    optimizer: Any
    scheduler: Any
    best_epoch: int | None
    best_loss: float | None
    best_weights: dict[str, torch.Tensor] | None
    progress_checker: Any
    start_at: Callable[[TrainState], None]
    weights_now: Callable[[], dict[str, Any]]
    optimizer_now: Callable[[], dict[str, Any] | None]
    _options: Any
    _world: Any
    _load_weights: Callable[..., None]

    def __init__(
        self,
        *args: Any,
        save_path: str | Path | None = None,
        save_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.save_path, self._model_name = _place(save_path, save_format)
        super().__init__(*args, **kwargs)

    def check_better(self, cur_epoch: int, cur_loss: float) -> bool:
        """Save an epoch that is the best so far."""
        better: bool = super().check_better(cur_epoch, cur_loss)  # type: ignore[misc]
        if better and not self._options.fast_dev_run:
            self.save_state()
        return better

    def save_state(self) -> None:
        """Write model, optimizer and scheduler as they are now; every rank, rank 0 writes."""
        weights, optimizer = self.weights_now(), self.optimizer_now()
        if self._world.is_main:
            model, coming = self._settle()
            write_weights(coming, weights)
            state = {
                "optimizer": optimizer,
                "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
                "epoch": self.progress_checker.epoch,
                "step": self.progress_checker.step,
                "best": [self.best_epoch, self.best_loss],
                "model_sha256": _digest(coming),
            }
            write_file(self.save_path / _STATE, state)
            # From here on the state belongs to the coming model, which load_state knows.
            coming.replace(model)
        self._world.maximum([0.0])

    def load_state(self) -> int:
        """Read model, optimizer and scheduler back, to go on from there."""
        state = read_file(self.save_path / _STATE)
        mine = [path for path in self._files() if _is(path, state["model_sha256"])]
        if not mine:
            raise StoreError(
                f"{self._files()[0]} is missing, damaged, or of another save than {_STATE} beside "
                "it; give another save_path, or load the weights alone with load_model()"
            )
        for name in ("optimizer", "scheduler"):
            if (getattr(self, name) is None) != (state[name] is None):
                raise InvalidValueError(
                    f"{self.save_path / _STATE} has {'no' if state[name] is None else 'a'} {name}, "
                    "this Trainer the contrary; make it as the one that saved"
                )
        weights = read_weights(mine[0])
        self._load_weights(weights, str(mine[0]), True)
        for name in ("optimizer", "scheduler"):
            if state[name] is not None:
                getattr(self, name).load_state_dict(state[name])
        self.best_epoch, self.best_loss = state["best"]
        self.best_weights = weights if self.best_epoch == state["epoch"] else None
        self.start_at(TrainState(epoch=state["epoch"], step=state["step"]))
        epoch: int = state["epoch"]
        return epoch

    def _files(self) -> tuple[Path, Path]:
        """The model's file, and the one it is written to first."""
        model = self.save_path / self._model_name
        return model, model.with_name(f".coming-{model.name}")

    def _settle(self) -> tuple[Path, Path]:
        """Finish or forget what a save that was cut off has left."""
        model, coming = self._files()
        if coming.is_file():
            state = self.save_path / _STATE
            if state.is_file() and _is(coming, read_file(state)["model_sha256"]):
                coming.replace(model)
            else:
                coming.unlink()
        return model, coming

    def save_model(self, filename: str | Path) -> None:
        """Write the model's weights in the format that the suffix names; every rank."""
        _check_suffix(Path(filename))
        weights = self.weights_now()
        if self._world.is_main:
            write_weights(Path(filename), weights)
        self._world.maximum([0.0])

    def load_model(self, filename: str | Path, strict: bool = True) -> None:
        """Read weights into the model, in the format that the suffix names."""
        _check_suffix(Path(filename))
        self._load_weights(read_weights(Path(filename)), str(filename), strict)


def write_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Write a state dict in the format of the path's suffix, whole or not at all."""
    if path.suffix == ".ckpt":
        return write_file(path, weights)
    save = _safetensors().save
    odd = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    if odd:
        raise InvalidTypeError(
            f"the model's state has {odd}, which are no tensors, and {path.suffix} files hold "
            "nothing else; use save_format='ckpt'"
        )
    # Copies, since parameters that share memory are refused.
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    return write_bytes(path, save(tensors, metadata={"format": "pt"}))


def read_weights(path: Path) -> dict[str, Any]:
    """Read what `write_weights` wrote; no code in the file is run."""
    if path.suffix == ".ckpt":
        return read_file(path)
    load = _safetensors().load
    if not path.is_file():
        raise StoreError(f"{path} does not exist; give the path of a file written in training")
    try:
        tensors: dict[str, Any] = load(path.read_bytes())
    except Exception as error:
        raise StoreError(f"{path} is damaged, or no safetensors file ({error})") from error
    return tensors


def _place(save_path: Any, save_format: str | None) -> tuple[Path, str]:
    """Return the folder and the name of the model's file."""
    if save_path is None:
        raise InvalidTypeError(
            "save_path=None: StateManagerAddon needs a folder to save to; give save_path"
        )
    path, name = Path(save_path), "model"
    suffix = ".ckpt" if save_format is None else f".{save_format.removeprefix('.')}"
    if suffix not in FORMATS:
        raise _unknown(f"save_format={save_format!r}")
    if path.suffix in FORMATS:
        if save_format is not None and suffix != path.suffix:
            raise InvalidTypeError(
                f"save_path={str(save_path)!r} and save_format={save_format!r} contradict; "
                "give one of them"
            )
        path, name, suffix = path.parent, path.stem, path.suffix
    if f"{name}{suffix}" == _STATE:
        raise InvalidValueError(
            f"save_path={str(save_path)!r} is where optimizer and scheduler go; use another name"
        )
    if path.is_file():
        raise InvalidValueError(f"save_path={str(save_path)!r} is a file; give a folder")
    if suffix != ".ckpt":
        _safetensors()  # missing now, not after the first epoch
    return path, f"{name}{suffix}"


def _check_suffix(path: Path) -> None:
    if path.suffix not in FORMATS:
        raise _unknown(f"filename={str(path)!r}")


def _unknown(what: str) -> InvalidValueError:
    return InvalidValueError(f"{what} names no known format; use one of {', '.join(FORMATS)}")


def _is(path: Path, digest: str) -> bool:
    return path.is_file() and _digest(path) == digest


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _safetensors() -> Any:
    try:
        return importlib.import_module("safetensors.torch")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "the safetensors format needs the package safetensors, which is not installed; run "
            "`pip install safetensors`, or use save_format='ckpt'",
            name="safetensors",
        ) from error
