"""torch.compile, tested before training relies on it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn

from ml4cube.core.errors import RunError


def compiled(
    model: nn.Module, setting: bool | str | Mapping[str, Any], device: torch.device
) -> nn.Module:
    """Return a model that computes the same through `torch.compile`."""
    if setting is False:
        return model
    arguments: Mapping[str, Any] = {}
    if isinstance(setting, str):
        arguments = {"backend": setting}
    elif isinstance(setting, Mapping):
        arguments = setting
    try:
        # Without this trial, a missing compiler is an error deep inside the first step, after all
        # loaders have started.
        torch.compile(lambda x: x * 2, **arguments)(torch.ones(2, device=device))
    except Exception as error:
        # Backends and what they call raise all kinds of errors.
        reason = str(error).strip().split("\n")[0]
        raise RunError(
            f"compile={setting!r}: torch.compile fails here ({type(error).__name__}: {reason}); "
            "install a C++ compiler (on GPUs Triton), or leave compile out"
        ) from error
    return cast(nn.Module, torch.compile(model, **arguments))
