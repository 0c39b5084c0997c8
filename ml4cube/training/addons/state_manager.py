"""An add-on that saves the best state of a Trainer to a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreError, check_choice
from ml4cube.training.addons.core import MixinAddOn, TrainerBase
from ml4cube.training.files.checkpoint import read_file, refuse_foreign, write_bytes, write_file
from ml4cube.training.files.paths import absolute_path, check_writable
from ml4cube.training.inputs.checks import import_package
from ml4cube.training.inputs.outside_model import load_outside, state_of
from ml4cube.training.state import TrainState

FORMATS = (".ckpt", ".safetensor", ".safetensors")
_STATE_FILE = "state.ckpt"  # holds weights, optimizer, scheduler and counts


class _State(TrainerBase):  # type: ignore[misc]
    """Mixin that saves the best state."""

    _best_step: int | None = None  # at which `best_weights` were those of the model

    def __init__(
        self,
        *args: Any,
        save_path: str | Path | None = None,
        save_format: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.save_path, self._model_name = _folder_and_name(save_path, save_format)
        super().__init__(*args, **kwargs)
        if self._world.is_main and not self._options.fast_dev_run:
            check_writable(self.save_path / self._model_name)
            refuse_foreign(self.save_path / _STATE_FILE)
            # Weights in other formats have no mark, but the state beside them.
            if self._model_name.endswith(".ckpt") or not (self.save_path / _STATE_FILE).exists():
                refuse_foreign(self.save_path / self._model_name)

    def check_better(self, cur_epoch: int, cur_loss: float) -> bool:
        """Save the state if the epoch is the best so far."""
        better: bool = super().check_better(cur_epoch, cur_loss)
        if better:
            self._best_step = self.progress_checker.step
        if better and not self._options.fast_dev_run:
            self.save_state()
        return better

    def save_state(self) -> None:
        """Write model, optimizer and scheduler; every rank, rank 0 writes."""
        weights, optimizer = self.weights_now(), self.optimizer_now()
        if self._world.is_main:
            state = {
                "model": weights,
                "outside": self._outside(),
                "optimizer": optimizer,
                "scheduler": state_of(self.scheduler),
                "epoch": self.progress_checker.epoch,
                "step": self.progress_checker.step,
                "best": [self.best_epoch, self.best_loss, self._best_step],
            }
            write_weights(self.save_path / self._model_name, weights)
            write_file(self.save_path / _STATE_FILE, state)
        self._world.barrier()

    def load_state(self) -> int:
        """Load model, optimizer and scheduler, to continue from there; return the epoch."""
        file = self.save_path / _STATE_FILE
        state = read_file(file)
        if "model" not in state:
            raise StoreError(f"{file} was not written by save_state()")
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        for name, part in parts.items():
            if (part is None) != (state[name] is None):
                saved, here = ("no", "one") if state[name] is None else ("a", "none")
                raise InvalidValueError(f"{file} has {saved} {name}, this Trainer has {here}")
        self._load_weights(state["model"], str(file), strict=True)
        load_outside(self._outside(), state.get("outside", {}), str(file))
        for name, part in parts.items():
            if part is not None:
                part.load_state_dict(state[name])
        epoch, value, self._best_step = state["best"]
        best = {"epoch": epoch, "value": value, "weights": None, "outside": None}
        # By the step, because the best may be a validation inside an epoch.
        if self._best_step == state["step"]:
            best |= {"weights": state["model"], "outside": state.get("outside")}
        self._best.load_state_dict(best)
        self.start_at(TrainState(epoch=state["epoch"], step=state["step"]))
        return int(state["epoch"])

    def save_model(self, filename: str | Path) -> None:
        """Write the weights in the format of the file's suffix; every rank."""
        check_choice("the suffix of filename", Path(filename).suffix, FORMATS)
        weights = self.weights_now()
        if self._world.is_main:
            write_weights(Path(filename), weights)
        self._world.barrier()

    def load_model(self, filename: str | Path, strict: bool = True) -> None:
        """Load weights from a file in the format of its suffix."""
        check_choice("the suffix of filename", Path(filename).suffix, FORMATS)
        self._load_weights(read_weights(Path(filename)), str(filename), strict)


class StateManagerAddon(MixinAddOn):
    """Save model, optimizer and scheduler of the best epoch to a folder.

    The Trainer takes ``save_path``, the folder, and ``save_format``: ``"ckpt"`` (default),
    ``"safetensor"`` or ``"safetensors"``; the last two are the same format, which needs the package
    safetensors. ``save_path="folder/name.safetensors"`` gives folder, file name and format at once.

    After every best epoch two files are written: ``model.<format>``, a plain state dict of the
    weights, and ``state.ckpt`` with weights, optimizer, scheduler and epoch, from which training
    can continue. Each is replaced atomically. With ``ema``, the weights are the average and not
    those of the optimizer; use a snapshot to continue with both.

    The Trainer gets ``save_state()``, ``load_state()``, and ``save_model`` and ``load_model``,
    which take the format from the suffix of the file.

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

    mixin = _State


def write_weights(path: Path, weights: Mapping[str, Any]) -> None:
    """Write a state dict in the format of the path's suffix, atomically."""
    if path.suffix == ".ckpt":
        return write_file(path, weights)
    save = _safetensors().save
    others = [name for name, value in weights.items() if not isinstance(value, torch.Tensor)]
    if others:
        raise InvalidTypeError(
            f"{path.suffix} files can hold only tensors, but the model's state has {others}; use "
            "save_format='ckpt'"
        )
    # Copies, because safetensors refuses parameters that share memory.
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in weights.items()}
    return write_bytes(path, save(tensors, metadata={"format": "pt"}))


def read_weights(path: Path) -> dict[str, Any]:
    """Read a state dict from a file of `write_weights`, without executing code."""
    if path.suffix == ".ckpt":
        return read_file(path)
    load, path = _safetensors().load, path.expanduser()
    if not path.is_file():
        raise StoreError(f"{path} does not exist")
    try:
        return dict(load(path.read_bytes()))
    except Exception as error:
        raise StoreError(f"{path} is damaged or not a safetensors file: {error}") from error


def _folder_and_name(save_path: Any, save_format: str | None) -> tuple[Path, str]:
    """Return the folder and the name of the model's file."""
    if save_path is None:
        raise InvalidTypeError(
            "save_path must be given: the folder in which StateManagerAddon saves"
        )
    path, name = absolute_path("save_path", save_path), "model"
    suffix = ".ckpt"
    if save_format is not None:
        suffix = f".{save_format.removeprefix('.')}"
    check_choice("save_format", suffix, FORMATS)
    if path.suffix in FORMATS:
        if save_format is not None and suffix != path.suffix:
            raise InvalidTypeError(
                f"save_format must be {path.suffix!r} like the suffix of save_path, "
                f"got {save_format!r}"
            )
        path, name, suffix = path.parent, path.stem, path.suffix
    if f"{name}{suffix}" == _STATE_FILE:
        raise InvalidValueError(
            f"save_path must not name the file {_STATE_FILE}, which has optimizer and scheduler"
        )
    if path.is_file():
        raise InvalidValueError(f"save_path must be a folder, got the file {str(save_path)!r}")
    if suffix != ".ckpt":
        _safetensors()  # raises now, not after the first epoch
    return path, f"{name}{suffix}"


def _safetensors() -> Any:
    return import_package("safetensors.torch", "safetensors", "this format")
