"""Files that survive a kill: written under another name, synced, renamed; verified when loaded.

A file is what `torch.save` writes, with a SHA-256 of its bytes in the comment at the end of the
archive. So any `torch.load(path, weights_only=True)` reads it, and `read_file` also notices a
single flipped bit.
"""

from __future__ import annotations

import glob
import hashlib
import os
import pickle
import socket
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ml4cube.core.errors import InvalidTypeError, StoreError
from ml4cube.store.folders import sync_path

_MARK = b"ml4cube sha256 "
_DIGEST = 64  # hex digits
_HOST = socket.gethostname()
_DAY_S = 86_400.0


def write_file(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write tensors and plain Python values so that `path` is always whole: old or new."""
    target = Path(path)
    plain = to_plain(content)

    def save(file: BinaryIO) -> None:
        torch.save(plain, file)
        _seal(file)

    _replace(target, save)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file of another format, so that `path` is always whole: old or new."""
    _replace(Path(path), lambda file: file.write(data))


def read_file(path: str | Path, *, mmap: bool = False) -> dict[str, Any]:
    """Read what `write_file` wrote, on the CPU, after checking every byte."""
    file = Path(path)
    if not file.is_file():
        raise StoreError(f"{file} does not exist; give the path of a file written in training")
    _verify(file)
    # Said here and not left to the default: an environment variable can turn the default off,
    # and a pickle from disk could then run code.
    try:
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:  # its message says how to load the file all the same
        raise StoreError(
            f"{file} holds more than tensors and plain values; it was not written by ml4cube, and "
            "nothing of it has been executed. Delete it or restore a copy"
        ) from None
    return content


def to_plain(value: Any, name: str = "state") -> Any:
    """Turn a state into what a safe load accepts: CPU tensors and plain Python."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        # A view would drag its whole storage into the file.
        whole = tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
        return tensor if whole else tensor.clone()
    if isinstance(value, np.generic):  # also float64, which is a float: its pickle names numpy
        return value.item()
    if value is None or isinstance(value, bool | int | float | str | bytes):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(value))
    if isinstance(value, Mapping):
        plain = {
            to_plain(key, f"key of {name}"): to_plain(item, f"{name}[{key!r}]")
            for key, item in value.items()
        }
        # Milestones of a scheduler, which asks them for what a dict cannot do.
        return Counter(plain) if isinstance(value, Counter) else plain
    if isinstance(value, tuple):
        return tuple(to_plain(item, f"{name}[{i}]") for i, item in enumerate(value))
    if isinstance(value, list | set | frozenset):
        return [to_plain(item, f"{name}[{i}]") for i, item in enumerate(value)]
    raise InvalidTypeError(
        f"{name} is a {type(value).__name__}, which cannot be loaded safely; keep tensors, "
        "numbers, strings, lists and dicts in state_dict()"
    )


def _replace(target: Path, save: Callable[[BinaryIO], Any]) -> None:
    # Host and process keep two runs that share a path from writing into one another's file.
    aside = target.with_name(f".{target.name}.{_HOST}-{os.getpid()}.tmp")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _sweep(target)
        with aside.open("w+b") as file:
            save(file)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(target)
        if os.name == "posix":
            sync_path(target.parent)  # makes the rename itself durable
    except (OSError, RuntimeError) as error:
        # torch raises a RuntimeError about positions when a disk is full.
        why = error.strerror if isinstance(error, OSError) else "only a part could be written"
        raise StoreError(
            f"{target} cannot be written: {why}; free space or give another path, then run again. "
            "The file that was there is unchanged"
        ) from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def _sweep(target: Path) -> None:
    """Remove temporary files of killed processes: of this machine, or older than a day."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.*.tmp"):
        host, _, pid = left.name[len(target.name) + 2 : -len(".tmp")].rpartition("-")
        mine = host == _HOST and pid.isdigit() and not _is_running(int(pid))
        with suppress(OSError):  # another rank may have been faster
            if mine or time.time() - left.stat().st_mtime > _DAY_S:
                left.unlink()


def _is_running(pid: int) -> bool:
    if os.name != "posix":
        return True  # asking by a signal would end it there
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _seal(file: Any) -> None:
    """Append the digest as the archive's comment, whose length is in its last two bytes."""
    end = file.seek(0, os.SEEK_END)
    file.seek(end - 2)
    file.write(struct.pack("<H", len(_MARK) + _DIGEST) + _MARK)
    file.flush()
    digest = _digest(file, end + len(_MARK))
    file.seek(0, os.SEEK_END)
    file.write(digest.encode())


def _verify(path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        file.seek(max(0, size - _DIGEST - len(_MARK)))
        mark, digest = file.read(len(_MARK)), file.read(_DIGEST)
        if mark != _MARK:
            raise StoreError(
                f"{path} is cut short or was not written by ml4cube; delete it or restore a copy"
            )
        if _digest(file, size - _DIGEST).encode() != digest:
            raise StoreError(
                f"{path} is damaged: its bytes do not match their checksum; "
                "delete it or restore a copy"
            )


def _digest(file: Any, size: int) -> str:
    sha = hashlib.sha256()
    file.seek(0)
    while size > 0 and (piece := file.read(min(size, 1 << 20))):
        sha.update(piece)
        size -= len(piece)
    return sha.hexdigest()
