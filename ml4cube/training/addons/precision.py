"""An add-on that chooses the precision of the forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.training.addons.core import MixinAddOn
from ml4cube.training.inputs.options import DTYPES, has_bf16


class _Precision:
    """Mixin that chooses the precision by the device."""

    def _pick_precision(self, use_amp: bool, precision: Any, device: torch.device) -> str:
        if use_amp and precision == "fp32":
            raise InvalidTypeError("precision must not be 'fp32' with use_amp=True")
        if precision is None:
            precision = "auto"
            if use_amp:
                precision = ["bf16", "fp16"]
        return choose_precision(precision, device)


class PrecisionMixerAddon(MixinAddOn):
    """Choose the precision of the forward pass by the device.

    The Trainer's argument `precision` may be ``"auto"`` (the default: on a GPU bf16 if it
    supports that, else fp16; on a CPU fp32), a name, or a list of names, of which the first that
    the device supports is used. The default with ``use_amp=True`` is ``["bf16", "fp16"]``, also on
    a CPU. Losses and metrics are always averaged in full precision.

    Examples
    --------
    >>> from ml4cube.training.trainer import Trainer
    >>> model = torch.nn.Linear(1, 1)
    >>> trainer = Trainer.add_on(PrecisionMixerAddon)(
    ...     model,
    ...     device="cpu",
    ...     optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    ...     loss=torch.nn.MSELoss(),
    ...     precision=["bf16", "fp16"],
    ... )
    >>> trainer.precision
    'bf16'
    """

    mixin = _Precision


def choose_precision(precision: str | Sequence[str], device: torch.device) -> str:
    """Return the first of several precisions that a device supports."""
    names = precision
    if isinstance(precision, str):
        names = [precision]
    for name in names:
        check_choice("precision", name, ["auto", *DTYPES] if name == precision else DTYPES)
    if precision == "auto":
        # On a CPU, bf16 must be chosen by name, because many CPUs compute slowly in it.
        names = ["bf16", "fp16"]
        if device.type == "cpu":
            names = ["fp32"]
    for name in names:
        if name != "bf16" or has_bf16(device):
            return name
    raise InvalidValueError(
        f"{device} supports none of precision={precision!r}; use 'auto' or 'fp32'"
    )
