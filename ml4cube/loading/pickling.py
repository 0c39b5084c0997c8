"""What keeps a data set, or a function with its arguments, from being sent to processes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

from ml4cube.core.errors import InvalidTypeError

_MAX_DEPTH = 4  # of objects inside objects


def explain_unpicklable(data: Any, error: Exception) -> None:
    """Raise an error that names the attribute for which a data set cannot be pickled, if any."""
    path, value = _culprit(type(data).__name__, data)
    if value is data:
        return
    raise InvalidTypeError(
        f"the data set cannot be sent to worker processes, because {path}, a "
        f"{type(value).__name__}, cannot be pickled ({error}); open it when the first sample is "
        "read, in __getitem__, or use num_workers=0"
    ) from error


def explain_unsendable(
    function: Callable[..., Any], arguments: Iterable[Any], error: BaseException
) -> None:
    """Raise an error that names what of a function or its arguments cannot be pickled, if any."""
    named = [(type(value).__name__, value) for value in (function, *arguments)]
    if inspect.isfunction(function):
        used = inspect.getclosurevars(function)
        named[:1] = [*used.globals.items(), *used.nonlocals.items()]
    for name, sent in named:
        if not _can_be_pickled(sent):
            path, value = _culprit(name, sent)
            raise InvalidTypeError(
                f"{path}, a {type(value).__name__}, cannot be sent to the processes of the ranks, "
                "because it cannot be pickled; open it inside the function, or when the first "
                "sample is read, in __getitem__"
            ) from error


def _culprit(path: str, value: Any, depth: int = 0) -> tuple[str, Any]:
    """Return the innermost attribute that cannot be pickled, and its path."""
    attributes = {} if depth == _MAX_DEPTH else getattr(value, "__dict__", {})
    for name, item in attributes.items():
        if not _can_be_pickled(item):
            return _culprit(f"{path}.{name}", item, depth + 1)
    return path, value


def _can_be_pickled(value: Any) -> bool:
    import cloudpickle

    try:
        cloudpickle.dumps(value)
    # Whatever pickling raises.
    except Exception:
        return False
    return True
