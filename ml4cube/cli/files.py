"""Texts at a path or URL: read, and written whole or not at all."""

from __future__ import annotations

import os

from ml4cube.core.errors import InvalidValueError, StoreError, StoreExistsError
from ml4cube.store.folders import Folder
from ml4cube.store.locations import folder_of


def read_text(path: str) -> str:
    """Return the text in a file."""
    folder, name = _split(path)
    try:
        return folder.read(name).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(f"{path} cannot be read: {error}") from error


def write_text(path: str, text: str) -> None:
    """Write a text, in place of one that is there."""
    folder, name = _split(path)
    try:
        folder.write(name, text.encode("utf-8"))
    except OSError as error:
        raise StoreError(f"{path} cannot be written: {error}") from error


def check_free(out: str, overwrite: bool) -> None:
    """Refuse a path for JSON that exists, unless it may be overwritten, or cannot be written."""
    if not str(out).endswith(".json"):
        raise InvalidValueError(f"out must end in .json, got {out!r}")
    folder, name = _split(out)
    if "://" not in out and not os.path.isdir(os.path.dirname(out) or "."):
        raise InvalidValueError(f"out={out!r} is in a folder that does not exist")
    if os.path.isdir(out) or (folder.size(name) is not None and not overwrite):
        raise StoreExistsError(f"{out} exists; choose another path or pass --overwrite")


def _split(path: str) -> tuple[Folder, str]:
    folder, name = os.path.split(path)
    return folder_of(folder or "."), name
