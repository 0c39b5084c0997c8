"""Add-ons that log to the services of `ml4cube.training.loggers`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ml4cube.core.errors import InvalidTypeError
from ml4cube.training.addons.core import MixinAddOn
from ml4cube.training.events import listed
from ml4cube.training.loggers import NeptuneLogger, WandBLogger


class _WandB:
    """Mixin that logs to Weights & Biases."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = {"id": "run_id", "config": "params"}
        super().__init__(*args, **_with_logger(kwargs, "wandb", WandBLogger, names))


class _Neptune:
    """Mixin that logs to Neptune."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        names = {"project_name": "project", "api_tkn": "api_token", "custom_run_id": "run_id"}
        super().__init__(*args, **_with_logger(kwargs, "neptune", NeptuneLogger, names))


def _with_logger(
    kwargs: Mapping[str, Any], service: str, logger: Callable[..., Any], names: Mapping[str, str]
) -> dict[str, Any]:
    """Move one service from the argument `web_logger` to `loggers`."""
    services = kwargs.get("web_logger")
    if not isinstance(services, Mapping) or service not in services:
        return dict(kwargs)
    given = services[service]
    if not isinstance(given, Mapping):
        raise InvalidTypeError(
            f"web_logger[{service!r}] must be a mapping, such as {{'project': 'name'}}, "
            f"got {given!r}"
        )
    made = logger(**{names.get(name, name): value for name, value in given.items()})
    others = {name: value for name, value in services.items() if name != service}
    loggers = [*listed(kwargs.get("loggers", ())), made]
    return {**kwargs, "web_logger": others, "loggers": loggers}


class WandBLoggerAddon(MixinAddOn):
    """Log every epoch to Weights & Biases.

    The Trainer takes ``web_logger={"wandb": {...}}`` with the arguments of
    `ml4cube.training.loggers.WandBLogger` or ``wandb.init``. It can be combined with
    `NeptuneLoggerAddon`.

    Examples
    --------
    >>> from ml4cube.training.trainer import Trainer
    >>> Trainer.add_on(WandBLoggerAddon).__name__
    'TrainerWithWandB'
    """

    mixin = _WandB


class NeptuneLoggerAddon(MixinAddOn):
    """Log every epoch to Neptune.

    The Trainer takes ``web_logger={"neptune": {...}}`` with the arguments of
    `ml4cube.training.loggers.NeptuneLogger`; ``project_name`` and ``api_tkn`` are accepted too.
    It can be combined with `WandBLoggerAddon`.

    Examples
    --------
    >>> from ml4cube.training.trainer import Trainer
    >>> Trainer.add_on(NeptuneLoggerAddon).__name__
    'TrainerWithNeptune'
    """

    mixin = _Neptune
