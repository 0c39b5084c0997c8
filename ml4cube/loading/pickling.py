"""What keeps a data set from being sent to worker processes."""

from __future__ import annotations

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
