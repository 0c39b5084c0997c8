"""The settings of a run, checked when made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from ml4cube.core.errors import InvalidValueError, check_choice

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
_COUNTS = ("epochs", "max_steps", "gradient_accumulation_steps", "save_every")


@dataclass(frozen=True)
class Options:
    """The settings of a run, checked when made.

    Parameters
    ----------
    epochs : int
        How many to train at most.
    max_steps : int, optional
        Optimizer steps to take at most.
    gradient_accumulation_steps : int
        Batches per optimizer step, weighted by their samples.
    gradient_clip : float, optional
        Largest norm of the gradients, taken over all parameters.
    precision : {"fp32", "bf16", "fp16"}
        What the forward pass computes in; fp16 scales its gradients.
    scheduler_step_on_batch : bool
        Whether the scheduler moves on after every optimizer step, not every epoch.
    seed : int, optional
        Seeds the random generators for the time of training; rank r gets ``seed + r``.
    snapshot_path : str or Path, optional
        File to save to and resume from.
    save_every : int
        Epochs between snapshots.
    find_unused_parameters : bool
        Whether some parameters may get no gradient in a step, on several ranks.

    Raises
    ------
    InvalidValueError
        If a value cannot work.

    Examples
    --------
    >>> Options(epochs=3).precision
    'fp32'
    """

    epochs: int = 10
    max_steps: int | None = None
    gradient_accumulation_steps: int = 1
    gradient_clip: float | None = None
    precision: str = "fp32"
    scheduler_step_on_batch: bool = False
    seed: int | None = None
    snapshot_path: str | Path | None = None
    save_every: int = 10
    find_unused_parameters: bool = False

    def __post_init__(self) -> None:
        check_choice("precision", self.precision, DTYPES)
        for name in _COUNTS:
            value = getattr(self, name)
            if value is None and name == "max_steps":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InvalidValueError(f"{name}={value!r} is not a count; use 1 or more")
        if self.gradient_clip is not None and not self.gradient_clip > 0:
            raise InvalidValueError(
                f"gradient_clip={self.gradient_clip!r} is not a positive norm; None clips nothing"
            )
