"""An add-on that chooses what the forward pass computes in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice
from ml4cube.training.addons.core import AddOnBase

_KNOWN = ("fp32", "bf16", "fp16")


class PrecisionMixerAddon(AddOnBase):
    """Compute in mixed precision: the argument `precision` takes more than a name.

    It may be ``"auto"``, the default, which is bf16 where the device computes in it, else fp16
    on a GPU, else fp32; a name; or a list of names, of which the first that the device can is
    taken. The History's losses and metrics are means in full precision in any case.

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

    @classmethod
    def apply(cls, base_cls: Any) -> Any:
        """Return a subclass that chooses.

        Parameters
        ----------
        base_cls : type
            A Trainer class.

        Returns
        -------
        type
            The subclass.
        """
        return type(base_cls)("TrainerWithPrecision", (_Precision, base_cls), {})


class _Precision:
    """Comes before a Trainer class."""

    def _pick_precision(self, use_amp: bool, precision: Any, device: torch.device) -> str:
        if use_amp and precision == "fp32":
            raise InvalidTypeError("use_amp=True and precision='fp32' contradict; give one of them")
        return choose_precision("auto" if precision is None else precision, device)


def choose_precision(asked: str | Sequence[str], device: torch.device) -> str:
    """Return the first precision of those asked for that a device computes in."""
    if isinstance(asked, str):
        check_choice("precision", asked, ["auto", *_KNOWN])
        names = ["bf16", "fp16", "fp32"] if asked == "auto" else [asked]
        # A CPU can do bf16, but many only slowly: it is for those who ask for it.
        names = ["fp32"] if asked == "auto" and device.type == "cpu" else names
    else:
        names = list(asked)
        for name in names:
            check_choice("precision", name, _KNOWN)
    able = [name for name in names if _can(device, name)]
    if not able:
        raise InvalidValueError(
            f"precision={asked!r}, but {device} computes in none of these; use 'auto' or 'fp32'"
        )
    return able[0]


def _can(device: torch.device, name: str) -> bool:
    if device.type == "cuda" and name == "bf16":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return True
