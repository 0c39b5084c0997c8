"""Folders behind a URL, where putting an object is atomic, and nothing can be renamed.

The files of an unfinished store are copied to the target, and the marker, without which they are
not a store, comes last. The lock is an object that its owner renews.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ml4cube.core.errors import InvalidValueError, RunError
from ml4cube.ledger.folders import (
    COPY_RECORD,
    FILES_AT_ONCE,
    LOCK,
    MARKER,
    Folder,
    Lock,
    filesystem,
    size_and_hash,
    work_location,
)

if TYPE_CHECKING:
    from zarr.storage import FsspecStore

logger = logging.getLogger(__name__)

_LOCK_RENEWED_EVERY_S = 20.0
_LOCK_EXPIRES_AFTER_S = 90.0


@dataclass(frozen=True)
class RemoteFolder(Folder):
    """A prefix of an object store, or of another file system of fsspec."""

    # Without wildcards. fsspec finds credentials and endpoints in every process (for s3: in the
    # environment or the AWS configuration files).
    url: str

    def write(self, path: str, *pieces: bytes) -> tuple[int, str]:
        fs, root = filesystem(self.url)
        data = b"".join(pieces)
        fs.pipe_file(f"{root}/{path}", data)
        return size_and_hash(data)

    def create(self, path: str, data: bytes) -> bool:
        """Put an object unless it exists; return whether it was put."""
        fs, root = filesystem(self.url)
        try:
            fs.pipe_file(f"{root}/{path}", data, mode="create")
        except FileExistsError:
            return False
        return True

    def read(self, path: str) -> bytes:
        fs, root = filesystem(self.url)
        fs.invalidate_cache()
        content: bytes = fs.cat_file(f"{root}/{path}")
        return content

    def size(self, path: str) -> int | None:
        fs, root = filesystem(self.url)
        try:
            return int(fs.info(f"{root}/{path}")["size"])
        except FileNotFoundError:
            return None

    def list(self) -> dict[str, int]:
        fs, root = filesystem(self.url)
        fs.invalidate_cache()
        objects = fs.find(root, detail=True)
        return {name[len(root) + 1 :]: int(info["size"]) for name, info in objects.items()}

    def copy_from(self, other: Folder, paths: Sequence[str]) -> None:
        """Copy objects from another folder of the same file system, on the server."""
        assert isinstance(other, RemoteFolder)
        fs, root = filesystem(self.url)
        _, other_root = filesystem(other.url)
        fs.copy(
            [f"{other_root}/{path}" for path in paths],
            [f"{root}/{path}" for path in paths],
            on_error="raise",
        )

    def remove(self, path: str) -> None:
        fs, root = filesystem(self.url)
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(f"{root}/{path}")

    def clear(self) -> None:
        fs, root = filesystem(self.url)
        fs.invalidate_cache()
        # not `fs.rm(names)`, which reads some of their characters as wildcards
        with ThreadPoolExecutor(FILES_AT_ONCE, "ml4cube-remove") as threads:
            list(threads.map(fs.rm_file, fs.find(root)))
        if fs.exists(root) and fs.isdir(root):  # file systems with folders
            fs.rm(root, recursive=True)

    def __str__(self) -> str:
        return self.url

    def lock(self, target: Folder) -> RemoteLock:
        return RemoteLock(self, target)

    def removals(self, old: set[str]) -> Sequence[Callable[[], None]]:
        return [partial(self.remove, MARKER), self.clear]

    def zarr_store(self) -> tuple[FsspecStore, RemoteFolder, str]:
        from zarr.storage import FsspecStore

        return FsspecStore.from_url(self.url), self, ""

    def system_and_path(self) -> tuple[Any, str]:
        return filesystem(self.url)

    def record_copy(self, files: Sequence[str]) -> None:
        RemoteFolder(work_location(self)).write(COPY_RECORD, json.dumps(files).encode())

    def half_copied(self) -> set[str]:
        try:
            return set(json.loads(RemoteFolder(work_location(self)).read(COPY_RECORD)))
        except (FileNotFoundError, ValueError, TypeError):
            return set()

    def check_target(self, argument: str) -> None:
        if glob.has_magic(self.system_and_path()[1]):
            raise InvalidValueError(
                f"{argument}={self.url!r} has one of '*', '?' and '[', which file systems of URLs "
                "read as wildcards; choose another name"
            )


class RemoteLock(Lock):
    """An object that its owner renews."""

    def __init__(self, folder: RemoteFolder, target: Folder) -> None:
        self._folder, self._target = folder, target
        self._owner = uuid.uuid4().hex
        self._renewal_ended = threading.Event()
        # so that this process does not read the lock while it is half written
        self._access = threading.RLock()
        self._take()
        self._renewer = threading.Thread(
            target=self._keep_renewing, daemon=True, name="ml4cube-lock"
        )
        self._renewer.start()

    def _take(self) -> None:
        if not self._folder.create(LOCK, self._note()):
            owner = self._read()
            if time.time() - owner.get("time", 0.0) < _LOCK_EXPIRES_AFTER_S:
                raise RunError(
                    f"another run is writing {self._target} (on {owner.get('host')}, it has locked "
                    f"{self._folder}); wait for it to end, or {_LOCK_EXPIRES_AFTER_S:.0f} s "
                    "if it was killed"
                )
            self._folder.write(LOCK, self._note())
        if not self.is_held:
            raise RunError(f"another run just started to write {self._target}; wait for it to end")

    def _note(self) -> bytes:
        note = {"owner": self._owner, "host": socket.gethostname(), "time": time.time()}
        return json.dumps(note).encode()

    def _read(self) -> dict[str, Any]:
        """Return the note of the lock's owner; nothing if there is none, or it is half written."""
        try:
            note: dict[str, Any] = json.loads(self._folder.read(LOCK))
        except (FileNotFoundError, ValueError):
            return {}
        return note

    def _keep_renewing(self) -> None:
        while not self._renewal_ended.wait(_LOCK_RENEWED_EVERY_S):
            try:
                with self._access:
                    if not self.is_held:
                        return
                    self._folder.write(LOCK, self._note())
            except Exception as error:  # file systems raise any exception
                logger.warning(
                    "could not renew the lock of %s, trying again: %s", self._folder, error
                )

    @property
    def is_open(self) -> bool:  # type: ignore[override]
        """True until it is released."""
        return not self._renewal_ended.is_set()

    @property
    def is_held(self) -> bool:  # type: ignore[override]
        """False if another run has taken over."""
        with self._access:
            return self._read().get("owner") == self._owner

    def check(self) -> None:
        if not self.is_held:
            raise RunError(
                f"another run took over {self._target}, because the lock of this run was not "
                f"renewed for {_LOCK_EXPIRES_AFTER_S:.0f} s or could not be read; wait for the "
                "other run to end, then run again"
            )

    def release(self) -> None:
        # or it would be put again after its release
        self._renewal_ended.set()
        self._renewer.join()
        if self.is_held:
            self._folder.remove(LOCK)
            if not self._folder.list():  # file systems with folders keep an empty one
                self._folder.clear()
