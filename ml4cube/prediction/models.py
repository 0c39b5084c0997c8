"""Models of any kind as functions from a batch of inputs to results.

Torch modules, exported programs, estimators with scikit-learn's interface and functions; several of
them, or one with dropout run several times, are the members of an ensemble.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch.export import ExportedProgram
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parallel import DistributedDataParallel

from ml4cube.core.display import one_line
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_whole
from ml4cube.core.fingerprint import mix_number
from ml4cube.training.ranks.dist import pick_device
from ml4cube.training.state import kept_rng

# Torch has one generator per process, and workers of a cluster may be threads.
_RANDOM_NUMBERS = Lock()
# Where scikit-learn and xgboost, lightgbm, and catboost keep the names.
_ATTRIBUTES = ("feature_names_in_", "feature_name_", "feature_names_")


class Estimator(Protocol):
    """A model with scikit-learn's interface."""

    def predict(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return the predictions of rows of features."""


Model = torch.nn.Module | Callable[[torch.Tensor], Any] | Estimator | ExportedProgram
#: What a model returns: an array, or several by position or name.
Result = NDArray[Any] | tuple[NDArray[Any], ...] | dict[str, NDArray[Any]]


def parse_models(model: Any, samples: int | None) -> tuple[Model, ...]:
    """Return the members of an ensemble, or one model; refuse what cannot be run."""
    models = tuple(model) if isinstance(model, list | tuple) else (model,)
    if not models:
        raise InvalidValueError(
            "model must be a model or a list of at least one, got an empty list"
        )
    for one in models:
        if not (callable(one) or is_estimator(one) or isinstance(one, ExportedProgram)):
            raise InvalidTypeError(
                f"model must be a torch module, an exported program, an estimator with predict() "
                f"or another callable, or a list of them, got {one_line(one)}"
            )
    if samples is not None:
        check_whole("samples", samples, 1)
        if len(models) > 1:
            raise InvalidTypeError(
                f"samples={samples} draws from one model, got a list of {len(models)}; give one "
                "of the two"
            )
        if is_estimator(models[0]) or isinstance(models[0], ExportedProgram):
            raise InvalidTypeError("samples needs a torch module with dropout, or a function")
        if isinstance(models[0], torch.nn.Module) and not _dropouts(models[0]):
            raise InvalidValueError(
                f"samples={samples} needs a model with dropout layers, and this has none, so all "
                "samples would be the same; wrap a model that draws numbers itself in a function, "
                "as in lambda x: model(x)"
            )
    return models


def is_estimator(model: Any) -> bool:
    """Return True for a model with scikit-learn's interface."""
    return not isinstance(model, torch.nn.Module) and callable(getattr(model, "predict", None))


def classes_of(model: Any) -> NDArray[Any] | None:
    """Return the classes of a classifier of scikit-learn."""
    classes = getattr(model, "classes_", None) if is_estimator(model) else None
    if isinstance(classes, list):  # one array for each of several targets
        raise InvalidValueError(
            "model must be a classifier of one target, got one with several; give one for each"
        )
    return classes


def input_dtype(models: Sequence[Model], has_doubles: bool) -> torch.dtype:
    """Return the dtype that models take: of exported programs, or of the first parameters.

    Modules without parameters take that of the cube.
    """
    modules = [model for model in models if isinstance(model, torch.nn.Module)]
    programs = [model for model in models if isinstance(model, ExportedProgram)]
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    for tensor in (*map(_example_input, programs), *tensors):
        if tensor.is_floating_point():
            return tensor.dtype
    return torch.float64 if modules and has_doubles else torch.float32


def device_of(model: Model, device: str | torch.device | None) -> torch.device:
    """Return the device to compute on; without one given, that of the model."""
    if device is not None:
        return pick_device(device)
    tensors: list[torch.Tensor] = []
    if isinstance(model, torch.nn.Module):
        tensors = [*model.parameters(), *model.buffers()]
    elif isinstance(model, ExportedProgram):
        tensors = [*model.state_dict.values()]
    return tensors[0].device if tensors else pick_device("cpu")


@dataclass(frozen=True)
class Members:
    """Models that are ready to run."""

    run: tuple[Callable[[torch.Tensor], Any], ...]
    dtype: torch.dtype
    # Windows that the model takes per call, if it takes no other number.
    fixed_batch: int | None = None
    # How often the model is sampled; None if it is not.
    samples: int | None = None
    seed: int = 0

    @property
    def input_dtype(self) -> np.dtype[Any]:
        """Dtype of arrays of inputs; numpy does not have all of torch's."""
        return np.dtype("f8" if self.dtype == torch.float64 else "f4")

    def __len__(self) -> int:
        """Number of members."""
        return len(self.run) if self.samples is None else self.samples

    @torch.no_grad()
    def __call__(self, x: NDArray[Any], batch: tuple[int, ...], member: int) -> Result:
        """Return the results of a member; `batch` identifies the batch for random numbers."""
        # A copy, because a model may work in place, and `x` is also for the other members, and for
        # the next step of a rollout.
        tensor = torch.from_numpy(x).to(self.dtype, copy=True)
        n = len(tensor)
        if self.fixed_batch is not None and n < self.fixed_batch:
            tensor = torch.cat([tensor, tensor[-1:].expand(self.fixed_batch - n, *x.shape[1:])])
        if self.samples is None:
            return _as_arrays(self.run[member](tensor), n)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        with _RANDOM_NUMBERS, kept_rng(device):
            torch.manual_seed(_seed_of(self.seed, *batch, member))
            return _as_arrays(self.run[0](tensor), n)


@contextmanager
def running(
    models: Sequence[Model],
    device: str | torch.device | None,
    dtype: torch.dtype,
    samples: int | None,
    seed: int,
    channels: Sequence[str],
) -> Iterator[Members]:
    """Prepare models to run without gradients; restore their modes and devices at the end.

    `channels` are the names of the inputs, by which estimators find their columns.
    """
    with ExitStack() as stack:
        run = tuple(
            stack.enter_context(_ready(model, device, channels, with_dropout=samples is not None))
            for model in models
        )
        batches = {_fixed_batch(model) for model in models} - {None}
        if len(batches) > 1:
            raise InvalidValueError(
                f"the exported programs must take batches of one size, got {sorted(batches)}; "  # type: ignore[type-var]
                "export them with a dynamic batch dim"
            )
        yield Members(run, dtype, next(iter(batches), None), samples, seed)


@contextmanager
def _ready(
    model: Model,
    device: str | torch.device | None,
    channels: Sequence[str],
    *,
    with_dropout: bool,
) -> Iterator[Callable[[torch.Tensor], Any]]:
    """Yield a function of a batch in main memory."""
    if isinstance(model, ExportedProgram):
        model, exported = model.module(), True
    else:
        exported = False
    if is_estimator(model):
        yield _Rows(model, channels)
        return
    target = device_of(model, device)
    if not isinstance(model, torch.nn.Module):
        yield lambda x: model(x.to(target))  # type: ignore[operator]
        return
    # The forward of a DDP wrapper broadcasts buffers, which would hang if ranks have unequal
    # numbers of blocks.
    module = model.module if isinstance(model, DistributedDataParallel) else model
    original_device = device_of(module, None)
    training_modes = {part: part.training for part in module.modules()}
    # On it transformers in eval mode leave out the dropout of their parts.
    has_fast_path = torch.backends.mha.get_fastpath_enabled()
    try:
        module.to(target)
        if not exported:  # an exported program has one mode, in which it was exported
            module.eval()
        for part in _dropouts(module) if with_dropout else ():
            part.train()
        if with_dropout:
            torch.backends.mha.set_fastpath_enabled(False)
        yield lambda x: module(x.to(target))
    finally:
        torch.backends.mha.set_fastpath_enabled(has_fast_path)
        for part, mode in training_modes.items():
            part.training = mode
        module.to(original_device)


def _dropouts(module: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the parts with dropout, also those that have it between their own layers."""
    own = (torch.nn.RNNBase, torch.nn.MultiheadAttention)
    return [
        part
        for part in module.modules()
        if isinstance(part, _DropoutNd) or (isinstance(part, own) and part.dropout > 0)
    ]


def _fixed_batch(model: Model) -> int | None:
    """Return the number of windows that an exported program takes, if it takes no other."""
    if not isinstance(model, ExportedProgram):
        return None
    first = _example_input(model).shape[0]
    return first if isinstance(first, int) else None


def _example_input(program: ExportedProgram) -> torch.Tensor:
    """Return a batch, without values, of the shape and dtype that an exported program takes."""
    names = set(program.graph_signature.user_inputs)
    inputs = (node for node in program.graph.nodes if node.op == "placeholder")
    tensor: torch.Tensor = next(node for node in inputs if node.name in names).meta["val"]
    return tensor


@dataclass(frozen=True)
class _Rows:
    """An estimator, which takes every window as one row; classifiers give probabilities."""

    estimator: Any
    channels: Sequence[str]

    def __call__(self, x: torch.Tensor) -> Any:
        rows: Any = x.reshape(len(x), -1).numpy()
        columns = fitted_columns(self.estimator)
        if columns is not None:
            rows = pd.DataFrame(rows, columns=list(self.channels))[columns]
        classes = classes_of(self.estimator)
        if classes is None:
            return self.estimator.predict(rows)
        if hasattr(self.estimator, "predict_proba"):
            return self.estimator.predict_proba(rows)
        return (np.asarray(self.estimator.predict(rows))[:, None] == classes).astype(np.float64)


def _seed_of(*numbers: int) -> int:
    """Return a seed that differs for different numbers."""
    seed = 0
    for number in numbers:
        seed = mix_number((seed ^ number) + 0x9E3779B97F4A7C15)
    return seed % 2**63


def _as_arrays(result: Any, n: int) -> Result:
    """Return what a model returned as arrays, without windows that filled up a batch."""
    if isinstance(result, Mapping):
        return {str(name): _as_array(output, n) for name, output in result.items()}
    if isinstance(result, list | tuple):
        return tuple(_as_array(output, n) for output in result)
    return _as_array(result, n)


def _as_array(result: Any, n: int) -> NDArray[Any]:
    if isinstance(result, torch.Tensor):
        result = result.detach().cpu()
        if result.dtype == torch.bfloat16:  # which numpy lacks
            result = result.float()
        result = result.numpy()
    if not isinstance(result, np.ndarray) or not result.ndim:
        raise InvalidTypeError(
            f"the model must return tensors or arrays with one entry per window, got "
            f"{type(result).__name__}"
        )
    return result[:n]


def fitted_columns(estimator: Any) -> list[str] | None:
    """Return the names of the columns that an estimator was fitted on; None if they had none."""
    for attribute in _ATTRIBUTES:
        names = getattr(estimator, attribute, None)
        if names is not None:
            names = [str(name) for name in names]
            return None if names in _numbered(len(names)) else names
    # A search has no names of its own if the first step of its best pipeline is left out.
    best = getattr(estimator, "best_estimator_", None)
    if best is not None:
        return fitted_columns(best)
    steps = getattr(estimator, "steps", None)
    if not isinstance(steps, list):  # of a pipeline; other estimators may count theirs
        return None
    applied = [step for _, step in steps if step not in (None, "passthrough")]
    return fitted_columns(applied[0]) if applied else None


def _numbered(n: int) -> list[list[str]]:
    """Return the names that lightgbm and catboost make up for columns without names."""
    return [[f"Column_{i}" for i in range(n)], [str(i) for i in range(n)]]


def refuse_method(model: Any) -> None:
    """Refuse a method of an estimator that was fitted on named columns."""
    owner = getattr(model, "__self__", None)
    if hasattr(owner, "fit") and fitted_columns(owner) is not None:
        raise InvalidValueError(
            f"the model must be the estimator itself, so that it gets its columns by name, got its "
            f"method {model.__name__}"
        )


def check_columns(estimator: Any, channels: Sequence[str], cells_per_window: int) -> None:
    """Refuse an estimator that was fitted on other columns than it will be given."""
    columns = fitted_columns(estimator)
    if columns is None:
        return
    if cells_per_window > 1:
        raise InvalidValueError(
            f"the model was fitted on the named columns {columns}, and windows of "
            f"{cells_per_window} cells make {cells_per_window * len(channels)} columns without "
            "names; fit it on an array (X.to_numpy()), or give it windows of one cell"
        )
    if sorted(columns) != sorted(channels):
        raise InvalidValueError(
            f"features must be the columns that the model was fitted on, {columns}, in any order, "
            f"got {list(channels)}; give these as features=, after ds.rename if the cube has other "
            "names"
        )
