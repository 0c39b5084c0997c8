"""Add-ons that log to services: thin over `ml4cube.training.loggers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ml4cube.core.errors import InvalidTypeError
from ml4cube.training.addons.core import AddOnBase
from ml4cube.training.events import listed
from ml4cube.training.loggers import NeptuneLogger, WandBLogger


class _WandB:
    """Comes before a Trainer class."""

    def __init__(
        self, *args: Any, web_logger: Any = None, loggers: Iterable[Any] = (), **kwargs: Any
    ) -> None:
        rest, mine = _take(web_logger, "wandb", WandBLogger, {"id": "run_id", "config": "params"})
        both = [*listed(loggers), *mine]
        super().__init__(*args, web_logger=rest, loggers=both, **kwargs)  # type: ignore[call-arg]


class _Neptune:
    """Comes before a Trainer class."""

    def __init__(
        self, *args: Any, web_logger: Any = None, loggers: Iterable[Any] = (), **kwargs: Any
    ) -> None:
        names = {"project_name": "project", "api_tkn": "api_token", "custom_run_id": "run_id"}
        rest, mine = _take(web_logger, "neptune", NeptuneLogger, names)
        both = [*listed(loggers), *mine]
        super().__init__(*args, web_logger=rest, loggers=both, **kwargs)  # type: ignore[call-arg]


def _take(
    web_logger: Any, service: str, kind: Callable[..., Any], names: Mapping[str, str]
) -> tuple[Any, list[Any]]:
    """Take one service out of `web_logger`, and leave the others to other add-ons."""
    if not isinstance(web_logger, Mapping) or service not in web_logger:
        return web_logger, []
    given = web_logger[service]
    if not isinstance(given, Mapping):
        raise InvalidTypeError(
            f"web_logger[{service!r}]={given!r} is no mapping; write "
            f"{{{service!r}: {{'project': 'name'}}}}"
        )
    rest = {name: value for name, value in web_logger.items() if name != service}
    return rest, [kind(**{names.get(name, name): value for name, value in given.items()})]


class WandBLoggerAddon(AddOnBase):
    """Log every epoch to Weights & Biases.

    The Trainer takes ``web_logger={"wandb": {...}}`` with the arguments of
    `ml4cube.training.loggers.WandBLogger`, or those of ``wandb.init``. It goes together with
    `NeptuneLoggerAddon`.

    Examples
    --------
    >>> from ml4cube.training.trainer import Trainer
    >>> Trainer.add_on(WandBLoggerAddon).__name__
    'TrainerWithWandB'
    """

    @classmethod
    def apply(cls, base_cls: Any) -> Any:
        """Return a subclass that logs.

        Parameters
        ----------
        base_cls : type
            A Trainer class.

        Returns
        -------
        type
            The subclass.
        """
        return type(base_cls)("TrainerWithWandB", (_WandB, base_cls), {})


class NeptuneLoggerAddon(AddOnBase):
    """Log every epoch to Neptune.

    The Trainer takes ``web_logger={"neptune": {...}}`` with the arguments of
    `ml4cube.training.loggers.NeptuneLogger`; ``project_name`` and ``api_tkn`` are understood
    too. It goes together with `WandBLoggerAddon`.

    Examples
    --------
    >>> from ml4cube.training.trainer import Trainer
    >>> Trainer.add_on(NeptuneLoggerAddon).__name__
    'TrainerWithNeptune'
    """

    @classmethod
    def apply(cls, base_cls: Any) -> Any:
        """Return a subclass that logs.

        Parameters
        ----------
        base_cls : type
            A Trainer class.

        Returns
        -------
        type
            The subclass.
        """
        return type(base_cls)("TrainerWithNeptune", (_Neptune, base_cls), {})
