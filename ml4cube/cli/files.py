"""Texts at a path or URL: read, and written whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack

from ml4cube.core.errors import InvalidValueError, StoreError, StoreExistsError
from ml4cube.ledger.folders import Folder, digest, whole_file
from ml4cube.ledger.local import LocalFolder
from ml4cube.ledger.locations import folder_of, full_path

#: How a configuration begins that a command wrote.
MADE_BY = "# made by ml4cube"
#: Files of a run: the arguments of `train`, the weights of the best epoch, the state of the run.
CONFIG, BEST, SNAPSHOT = "config.yaml", "best_model.pt", "snapshot.pt"
HISTORY = "history.json"


def read_text(path: str) -> str:
    """Return the text in a file."""
    folder, name = _split(path)
    try:
        return folder.read(name).decode("utf-8")
    except Exception as error:  # object stores raise errors of many types
        raise StoreError(f"{path} cannot be read: {error}") from error


def write_texts(texts: Mapping[str, str]) -> None:
    """Write texts by path, in place of those that are there; on disk all of them or none."""
    path = ""
    try:
        with ExitStack() as files:
            for path, text in texts.items():
                folder, name = _split(path)
                if isinstance(folder, LocalFolder):
                    file = files.enter_context(whole_file(folder.root / name))
                    file.write(text.encode("utf-8"))
                    file.flush()  # a full disk is noticed before any file is replaced
                else:
                    folder.write(name, text.encode("utf-8"))
    except OSError as error:
        raise StoreError(
            f"{path} cannot be written: {error.strerror or error}; make room or choose another "
            "path, then run again: nothing was changed"
        ) from error


def hash_line(path: str, text: str) -> str:
    """Return the comment of a configuration by which `check_free` knows a result of its command."""
    return f"# sha256 of {os.path.basename(path)}: {digest(text.encode('utf-8'))}"


def check_ours(path: str) -> None:
    """Refuse the path of a configuration where there is a file that no command wrote."""
    folder, name = _split(path)
    if folder.size(name) is not None and not read_text(path).startswith(MADE_BY):
        raise StoreExistsError(
            f"{path} exists, and no command of ml4cube made it; move it away or choose another path"
        )


def is_copy(path: str) -> bool:
    """Return True for a configuration that a command wrote, or that lies in the folder of a run.

    Who passes a file of another kind has written it for the call, or has read it.
    """
    folder, name = os.path.split(path)
    beside = [os.path.exists(os.path.join(folder, weights)) for weights in (BEST, SNAPSHOT)]
    is_of_run = name == CONFIG and any(beside)
    return is_of_run or read_text(path).startswith(MADE_BY)


def check_free(out: str, overwrite: bool) -> None:
    """Refuse a path for JSON that exists, unless it may be overwritten, or cannot be written."""
    check_ours(f"{out}.yaml")
    if not str(out).endswith(".json"):
        raise InvalidValueError(f"out must end in .json, got {out!r}")
    folder, name = _split(out)
    out = full_path(out)
    if "://" not in out and not os.path.isdir(os.path.dirname(out) or "."):
        raise InvalidValueError(f"out={out!r} is in a folder that does not exist")
    exists = os.path.isdir(out) or folder.size(name) is not None
    if exists and not overwrite:
        raise StoreExistsError(f"{out} exists; choose another path or pass --overwrite")
    if exists and not _is_as_written(out):
        raise StoreExistsError(
            f"{out} exists, and is not as a command of ml4cube wrote it (its hash is not in "
            f"{out}.yaml), so it is not overwritten; move it away, or remove it by hand"
        )


def _is_as_written(out: str) -> bool:
    """Return True for a file whose hash is in the configuration beside it."""
    try:
        return hash_line(out, read_text(out)) in read_text(f"{out}.yaml").splitlines()
    except StoreError:
        return False


def _split(path: str) -> tuple[Folder, str]:
    folder, name = os.path.split(path)
    return folder_of(folder or "."), name
