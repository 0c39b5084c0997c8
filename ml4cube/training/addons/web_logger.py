"""Add-ons that log to the services of `ml4cube.training.loggers`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ml4cube.core.errors import InvalidTypeError, check_choice
from ml4cube.training.addons.core import MixinAddOn
from ml4cube.training.loggers import Logger, NeptuneLogger, WandBLogger, as_mapping


class WandBLoggerAddon(MixinAddOn):
    """Log every epoch to Weights & Biases.

    The Trainer takes ``web_logger={"wandb": {...}}`` with the arguments of
    `ml4cube.training.loggers.WandBLogger` or ``wandb.init``. It can be combined with
    `NeptuneLoggerAddon`.

    Examples
    --------
    >>> from ml4cube.training.trainer import Trainer
    >>> Trainer.add_on(WandBLoggerAddon).__name__
    'TrainerWithWandBLogger'
    """


class NeptuneLoggerAddon(MixinAddOn):
    """Log every epoch to Neptune, a service that ended in March 2026.

    The Trainer takes ``web_logger={"neptune": {...}}`` with the arguments of
    `ml4cube.training.loggers.NeptuneLogger`; ``project_name`` and ``api_tkn`` are accepted too.
    It can be combined with `WandBLoggerAddon`.

    Examples
    --------
    >>> from ml4cube.training.trainer import Trainer
    >>> Trainer.add_on(NeptuneLoggerAddon).__name__
    'TrainerWithNeptuneLogger'
    """


# By service: the add-on, its logger, and other names that users may give to arguments of the
# logger, because the functions of the service or of zae-engine have them.
_SERVICES: dict[str, tuple[type[MixinAddOn], type[Logger], dict[str, str]]] = {
    "wandb": (WandBLoggerAddon, WandBLogger, {"id": "run_id", "config": "params"}),
    "neptune": (
        NeptuneLoggerAddon,
        NeptuneLogger,
        {"project_name": "project", "api_tkn": "api_token", "custom_run_id": "run_id"},
    ),
}


def web_loggers(services: Any, add_ons: Collection[Any]) -> list[Logger]:
    """Make the loggers that a Trainer's argument `web_logger` names, if its add-ons allow them."""
    loggers = []
    for service, settings in as_mapping("web_logger", services or {}).items():
        check_choice("web_logger", service, _SERVICES)
        add_on, logger, argument_names = _SERVICES[service]
        if add_on not in add_ons:
            raise InvalidTypeError(
                f"web_logger has {service!r}, but this Trainer has no {add_on.__name__}; make it "
                f"with Trainer.add_on({add_on.__name__})"
            )
        settings = as_mapping(f"web_logger[{service!r}]", settings)
        arguments = {argument_names.get(name, name): value for name, value in settings.items()}
        loggers.append(logger(**arguments))
    return loggers
