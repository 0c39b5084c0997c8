"""Paths that users give: absolute from the call on, and tried before training needs them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from ml4cube.core.errors import InvalidTypeError, StoreError
from ml4cube.ledger.folders import temporary_path


def absolute_path(name: str, path: Any) -> Path:
    """Return a path that a later change of the working directory does not move, ``~`` expanded."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidTypeError(f"{name} must be a path such as 'run/model.pt', got {path!r}")
    return Path(os.path.abspath(os.path.expanduser(path)))


def check_writable(path: Path) -> None:
    """Refuse the path of a file that cannot be written; no folder is made for it yet."""
    try:
        if path.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        folder = next(parent for parent in path.parents if parent.exists())
        attempt = temporary_path(folder / path.name)
        try:
            attempt.touch()
        finally:
            with suppress(OSError):
                attempt.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror
        raise StoreError(f"{path} cannot be written: {reason}; give another path") from error
