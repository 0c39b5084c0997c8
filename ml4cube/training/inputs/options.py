"""The options of a run, checked when they are made."""

from __future__ import annotations

import difflib
import inspect
import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.training.files.paths import absolute_path
from ml4cube.training.inputs.checks import COUNT, above_zero, check_count, is_count

logger = logging.getLogger(__name__)

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_COUNTS = (
    "epochs",
    "max_steps",
    "gradient_accumulation_steps",
    "save_every",
    "validate_every",
    "validate_every_steps",
    "rollout_gradient",
)
_ROLLOUT = "an int of 1 or more, or {epoch: steps} with epochs counted from 1"
_BATCH_LIMIT = (
    "a count of batches (an int from 1) or a fraction of them (a float above 0, up to 1.0)"
)
_BATCH_LIMITS = ("limit_train_batches", "limit_val_batches")


@dataclass(frozen=True)
class Options:
    """The options of a run, checked when they are made."""

    # Epochs to train at most.
    epochs: int = 10
    # Optimizer steps to take at most.
    max_steps: int | None = None
    # Batches per optimizer step, weighted by their samples.
    gradient_accumulation_steps: int = 1
    # Largest norm of the gradients, taken over all parameters.
    gradient_clip: float | None = None
    # Precision of the forward pass; fp16 scales its gradients.
    precision: str = "fp32"
    # True: the scheduler steps after every optimizer step, not every epoch.
    scheduler_step_on_batch: bool = False
    # Seeds the random generators for the time of training; rank r gets ``seed + r``.
    seed: int | None = None
    # File to save to and resume from.
    snapshot_path: str | Path | None = None
    save_every: int = 10
    # True: some parameters may get no gradient in a step, on several ranks.
    find_unused_parameters: bool = False
    # Time after which to end: seconds, ``"HH:MM:SS"`` or ``"DD:HH:MM:SS"``. It counts from the call
    # that trains, also of a resumed run.
    max_time: float | str | timedelta | None = None
    # Batches of each loader to use at most: a count, or a share of it between 0 and 1.0 (at least
    # one batch).
    limit_train_batches: float | None = None
    limit_val_batches: float | None = None
    # Try everything once and write nothing: one epoch of that many batches (True: one) in training
    # and in each validation set.
    fast_dev_run: bool | int = False
    # Decay of a moving average of the weights, which is then evaluated and saved.
    ema: float | None = None
    # True, or a backend or arguments of `torch.compile`: compile the model.
    compile: bool | str | Mapping[str, Any] = False
    # True: add the norm of the gradients, mean and largest of each epoch, to the History.
    log_grad_norm: bool = False
    # Layout of the model on several ranks: "ddp", whole on each, or "fsdp", cut into shares.
    strategy: str = "ddp"
    # With "fsdp", the modules that are fetched on their own.
    shard_modules: Any = None
    # Column of the History that chooses the best epoch. Default: ``val_loss``, or ``train_loss``
    # where nothing is validated.
    monitor: str | None = None
    # "min" or "max": the better direction of `monitor`.
    mode: str = "min"
    # Epochs between validations; the last epoch is always validated.
    validate_every: int = 1
    # Optimizer steps between validations, which are then rows of the History of their own, with a
    # column ``step``.
    validate_every_steps: int | None = None
    # Steps of a forecast that are trained, or by the epoch from which they are. Default: those that
    # the training data have.
    rollout: int | Mapping[int, int] | None = None
    # Last steps of a forecast through which gradients are computed. Default: all.
    rollout_gradient: int | None = None
    # Number or text that is changed with what the loss or a metric computes: in a resumed run, the
    # choice of the best epoch then starts anew. Else these are known by their names only.
    version: str | int | None = None

    def __post_init__(self) -> None:
        self._check("seed", "an int from 0", _is_seed)
        self._check("version", "a number or a text", lambda v: isinstance(v, str | int))
        self._check("monitor", "the name of a column of the History", lambda v: isinstance(v, str))
        self._check("rollout", _ROLLOUT, _is_rollout)
        self._check("gradient_clip", "a norm above 0", above_zero)
        self._check(
            "ema", "a decay between 0 and 1, such as 0.999", lambda v: above_zero(v) and v < 1
        )
        self._check(
            "compile",
            "True, the name of a backend, or a dict of torch.compile's arguments",
            lambda v: isinstance(v, bool | str | Mapping),
        )
        for name in _BATCH_LIMITS:
            self._check(name, _BATCH_LIMIT, _is_batch_limit)
        for name in _COUNTS:
            self._check(name, COUNT, is_count)
        if self.max_time is not None:
            _as_seconds(self.max_time)
        check_choice("precision", self.precision, DTYPES)
        if self.snapshot_path is not None:
            absolute = absolute_path("snapshot_path", self.snapshot_path)
            object.__setattr__(self, "snapshot_path", absolute)  # the dataclass is frozen
        check_choice("strategy", self.strategy, ["ddp", "fsdp"])
        check_choice("mode", self.mode, ["min", "max"])
        self._refuse_contradictions()
        if self.fast_dev_run is not False:
            self._shorten()

    def _refuse_contradictions(self) -> None:
        if self.validate_every_steps is not None and self.validate_every != 1:
            raise InvalidValueError(
                f"validate_every={self.validate_every} and "
                f"validate_every_steps={self.validate_every_steps} exclude each other; give one"
            )
        if self.strategy == "ddp" and self.shard_modules is not None:
            raise InvalidValueError(
                "shard_modules needs strategy='fsdp'; give both, or leave shard_modules out"
            )
        if self.strategy == "fsdp" and self.find_unused_parameters:
            raise InvalidValueError(
                "find_unused_parameters=True and strategy='fsdp' contradict: every rank must use "
                "the same parameters in a step; give one of them"
            )

    def _shorten(self) -> None:
        """Apply `fast_dev_run` to the other options."""
        batches = self.fast_dev_run
        if self.fast_dev_run is True:
            batches = 1
        check_count("fast_dev_run", batches)
        changes = {"epochs": 1, "snapshot_path": None, **dict.fromkeys(_BATCH_LIMITS, batches)}
        if self.rollout is not None:
            changes["rollout"] = max(self.rollout_steps)  # what may need too much memory
        for name, value in changes.items():
            object.__setattr__(self, name, value)

    @classmethod
    def choose(
        cls, trainer: type, keywords: Mapping[str, Any], train_call: str, **settled: Any
    ) -> Options:
        """Make the options of a trainer from further keywords of its constructor.

        `train_call` is the call that takes the number of epochs, for an error message.
        """
        names = {field.name for field in fields(cls)} - {"epochs"}
        for name in keywords.keys() - names:
            taken = {*inspect.signature(trainer).parameters, *names} - {"options"}
            near = difflib.get_close_matches(name, taken, n=1)
            hint = f"it takes {', '.join(sorted(taken))}"
            if "epoch" in name:
                hint = f"give the number of epochs to {train_call}"
            elif near:
                hint = f"did you mean {near[0]!r}?"
            raise InvalidTypeError(f"{trainer.__name__}() has no argument {name!r}; {hint}")
        return cls(**settled, **keywords)

    @property
    def max_seconds(self) -> float | None:
        """The time limit in seconds."""
        if self.max_time is None:
            return None
        return _as_seconds(self.max_time)

    @property
    def rollout_steps(self) -> set[int]:
        """The numbers of steps that `rollout` asks for in some epoch; empty for the default."""
        if isinstance(self.rollout, Mapping):
            return {self.rollout_in(1) or 1, *self.rollout.values()}
        if self.rollout is None:
            return set()
        return {self.rollout}

    def rollout_in(self, epoch: int) -> int | None:
        """Return the steps that `rollout` asks for in an epoch, from 1; None for the default."""
        if isinstance(self.rollout, Mapping):
            begun = [first for first in self.rollout if first <= epoch]
            if begun:
                return self.rollout[max(begun)]
            return 1
        return self.rollout

    def _check(self, name: str, expected: str, is_valid: Callable[[Any], bool]) -> None:
        """Refuse an invalid value; None is valid where it is the default."""
        value, is_optional = getattr(self, name), getattr(Options, name) is None
        if not is_valid(value) and not (is_optional and value is None):
            expected += ", or None" if is_optional else ""
            raise InvalidValueError(f"{name} must be {expected}, got {value!r}")


def pick_precision(use_amp: bool, precision: str | None, device: torch.device) -> str:
    """Return the precision that two arguments ask for; of `use_amp`, bf16 where there is any."""
    check_choice("precision", precision, [*DTYPES, None])
    if use_amp and precision == "fp32":
        raise InvalidTypeError("use_amp=True and precision='fp32' contradict; give one of them")
    if precision is not None or not use_amp:
        return precision or "fp32"
    half = "fp16"
    if has_bf16(device):
        half = "bf16"
    logger.info("use_amp=True: %s computes in %s", device, half)
    return half


def has_bf16(device: torch.device) -> bool:
    """Return True if a device computes in bf16, not only emulates it."""
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _is_rollout(value: Any) -> bool:
    if isinstance(value, Mapping):
        return bool(value) and all(map(is_count, [*value.keys(), *value.values()]))
    return is_count(value)


def _is_seed(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and 0 <= int(value) < 2**63


def _is_batch_limit(value: Any) -> bool:
    if isinstance(value, float):
        return 0 < value <= 1
    return is_count(value)


def _as_seconds(value: Any) -> float:
    seconds = math.nan
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, str):
        parts = value.split(":")
        if 3 <= len(parts) <= 4 and all(part.strip().isdigit() for part in parts):
            days, hours, minutes, seconds = (float(part) for part in ["0", *parts][-4:])
            seconds += 60 * (minutes + 60 * (hours + 24 * days))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        seconds = float(value)
    if not 0 < seconds < math.inf:
        raise InvalidValueError(
            f"max_time must be seconds, 'HH:MM:SS', 'DD:HH:MM:SS' or a timedelta, got {value!r}"
        )
    return seconds
