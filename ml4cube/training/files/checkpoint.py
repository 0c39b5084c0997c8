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
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from ml4cube.core.errors import InvalidTypeError, StoreError, StoreExistsError
from ml4cube.ledger.folders import HOST, sync_path, whole_file

_MARK = b"ml4cube sha256 "
_DIGEST_BYTES = 64  # hex digits
# Of a zip archive, which torch.save writes: its first bytes, and those of its last record, which
# ends within so many bytes of the file's end.
_ZIP_START, _ZIP_END, _MAX_ZIP_END_BYTES = b"PK\x03\x04", b"PK\x05\x06", 22 + 0xFFFF
_DAY_S = 86_400.0
#: Stands in files of other formats that training writes: near their start, or at their end.
WRITTEN_BY = "written by ml4cube"
_MAX_START_BYTES = 256


def write_file(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write tensors and plain Python values so that `path` is always whole: old or new.

    Only a file that was written so is replaced.
    """
    refuse_foreign(Path(path))
    plain = to_plain(content)

    def write(file: BinaryIO) -> None:
        torch.save(plain, file)
        _append_digest(file)

    _replace(Path(path), write)


def refuse_foreign(path: Path) -> None:
    """Refuse a path where there is a file that training did not write."""
    if not path.exists():
        return
    with path.open("rb") as file:
        start = file.read(_MAX_START_BYTES)
        file.seek(max(0, file.seek(0, os.SEEK_END) - _DIGEST_BYTES - len(_MARK)))
        end = file.read()
    if not end.startswith(_MARK) and WRITTEN_BY.encode() not in start + end:
        raise StoreExistsError(
            f"{path} exists and was not written by ml4cube, so it is not replaced; move it away or "
            "give another path"
        )


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file of another format, so that `path` is always whole: old or new."""
    _replace(Path(path), lambda file: file.write(data))


def read_file(path: str | Path, *, mmap: bool = False) -> dict[str, Any]:
    """Read what `write_file` wrote, on the CPU, after checking every byte."""
    file = Path(path).expanduser()
    if not file.is_file():
        raise StoreError(f"{file} does not exist; give the path of a file written in training")
    _check_digest(file)
    _check_zip(file)
    try:
        # weights_only is the default, but an environment variable can turn that off, and a pickle
        # from disk could then run code.
        content: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError:  # its message says how to load the file all the same
        raise StoreError(
            f"{file} holds more than tensors and plain values; it was not written by ml4cube, and "
            "nothing of it has been executed. Delete it or restore a copy"
        ) from None
    return content


def read_entry(path: Path, name: str) -> Any:
    """Return an entry of a file of `write_file`, without checking its bytes; None without it."""
    try:
        _check_zip(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError):
        return None
    return content.get(name) if isinstance(content, Mapping) else None


def stored_digest(path: str | Path) -> bytes | None:
    """Return the digest of a file of `write_file`, as it is written in it; None without a file."""
    with suppress(OSError), Path(path).open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _DIGEST_BYTES))
        return file.read()
    return None


def to_plain(value: Any, name: str = "state") -> Any:
    """Turn a state into what a safe load accepts: CPU tensors and plain Python."""
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
        if tensor.layout != torch.strided:  # sparse, and so without a storage of its own
            return tensor
        # A view would bring its whole storage into the file.
        is_view = tensor.untyped_storage().nbytes() != tensor.numel() * tensor.element_size()
        return tensor.clone() if is_view else tensor
    if isinstance(value, np.generic):  # before float, because np.float64 is one
        value = value.item()  # not always plain: a date for example
    # Not their subclasses, such as enums, which a safe load refuses.
    if value is None or type(value) in (bool, int, float, complex, str, bytes):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        native = value.dtype.newbyteorder("=")
        return torch.from_numpy(np.asarray(value, dtype=native, order="C"))
    if isinstance(value, Mapping):
        plain: dict[Any, Any] = {}
        if isinstance(value, Counter):  # MultiStepLR keeps its milestones in one, and needs it
            plain = Counter()
        for key, item in value.items():
            plain[to_plain(key, f"key of {name}")] = to_plain(item, f"{name}[{key!r}]")
        return plain
    if isinstance(value, tuple | list | set | frozenset):
        items = []
        for number, item in enumerate(value):
            items.append(to_plain(item, f"{name}[{number}]"))
        return tuple(items) if isinstance(value, tuple) else items
    raise InvalidTypeError(
        f"{name} is a {type(value).__name__}, which cannot be loaded safely; keep tensors, "
        "numbers, strings, lists and dicts in state_dict()"
    )


def _replace(target: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file whole or not at all."""
    target = target.expanduser()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(target)
        with whole_file(target) as file:
            write(file)
        if os.name == "posix":
            sync_path(target.parent)  # makes the rename itself durable
    except (OSError, RuntimeError) as error:
        # torch raises a RuntimeError about positions when a disk is full.
        reason = error.strerror if isinstance(error, OSError) else "only a part could be written"
        raise StoreError(
            f"{target} cannot be written: {reason}; free space or give another path, then run "
            "again. The file that was there is unchanged"
        ) from error


def _remove_abandoned(target: Path) -> None:
    """Remove temporary files of killed processes: of this machine, or older than a day."""
    prefix, suffix = f".{target.name}.", ".tmp"
    for file in target.parent.glob(f"{glob.escape(prefix)}*{suffix}"):
        host, _, pid = file.name[len(prefix) : -len(suffix)].rpartition("-")
        process_ended = host.endswith(f".{HOST}") and pid.isdigit() and not _is_running(int(pid))
        with suppress(OSError):  # another process may have removed it
            if process_ended or time.time() - file.stat().st_mtime > _DAY_S:
                file.unlink()


def _is_running(pid: int) -> bool:
    if os.name != "posix":
        return True  # on Windows, os.kill with signal 0 would end it
    try:
        os.kill(pid, 0)
    except OSError as error:
        return not isinstance(error, ProcessLookupError)
    return True


def _append_digest(file: BinaryIO) -> None:
    """Append mark and digest as the comment of a zip archive."""
    # The last two bytes of an archive without a comment are the comment's length.
    archive_size = file.seek(0, os.SEEK_END)
    file.seek(archive_size - 2)
    file.write(struct.pack("<H", len(_MARK) + _DIGEST_BYTES) + _MARK)
    file.flush()
    digest = _digest_of_start(file, archive_size + len(_MARK))
    file.seek(0, os.SEEK_END)
    file.write(digest)


def _check_digest(path: Path) -> None:
    digest_start = path.stat().st_size - _DIGEST_BYTES
    with path.open("rb") as file:
        file.seek(max(0, digest_start - len(_MARK)))
        mark, digest = file.read(len(_MARK)), file.read()
        if mark != _MARK:
            raise StoreError(f"{path} {_describe_unmarked(file)}")
        if _digest_of_start(file, digest_start) != digest:
            raise StoreError(
                f"{path} is damaged: its bytes do not match their checksum; "
                "delete it or restore a copy"
            )


def _check_zip(path: Path) -> None:
    """Refuse the older formats of torch, in which releases before 2.6 execute pickles."""
    with path.open("rb") as file:
        if file.read(len(_ZIP_START)) != _ZIP_START:
            raise StoreError(f"{path} is not in the zip format of torch.save")


def _describe_unmarked(file: BinaryIO) -> str:
    """Say why a file does not end with the mark: it is cut short, or was written by others."""
    file.seek(0)
    start = file.read(len(_ZIP_START))
    size = file.seek(0, os.SEEK_END)
    file.seek(max(0, size - _MAX_ZIP_END_BYTES))
    end = file.read()
    at = end.rfind(_ZIP_END)
    # The record is 22 bytes, of which the last two are the length of the comment that follows.
    comment_bytes = int.from_bytes(end[at + 20 : at + 22], "little")
    is_whole = at >= 0 and len(end) == at + 22 + comment_bytes
    if start == _ZIP_START and not is_whole:
        return "is cut short; restore a copy of it"
    return (
        "was not written by ml4cube, so it has no checksum. If torch.save wrote it, load it by "
        "model.load_state_dict(torch.load(path, weights_only=True))"
    )


def _digest_of_start(file: BinaryIO, size: int) -> bytes:
    """Return the SHA-256 of the first bytes of a file, in hexadecimal."""
    sha = hashlib.sha256()
    file.seek(0)
    while size > 0 and (piece := file.read(min(size, 1 << 20))):
        sha.update(piece)
        size -= len(piece)
    return sha.hexdigest().encode()
