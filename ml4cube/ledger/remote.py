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
from ml4cube.ledger.draft import (
    OUR_PREFIX,
    Draft,
    StoreKind,
    calls_with_tasks,
    journal_name,
    store_name,
    work_location,
)
from ml4cube.ledger.folders import FILES_AT_ONCE, Files, Folder, filesystem, size_and_hash
from ml4cube.ledger.overwriting import check_free, replaceable_files

if TYPE_CHECKING:
    from zarr.storage import FsspecStore

logger = logging.getLogger(__name__)

_LOCK = f"{OUR_PREFIX}lock.json"
_LOCK_RENEWED_EVERY_S = 20.0
_LOCK_EXPIRES_AFTER_S = 90.0
_COPIED_AT_ONCE = 256
# Lists the files that a copy to the target removes and puts.
_COPY_RECORD = f"{OUR_PREFIX}publishing.json"


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

    def copy_from(self, other: RemoteFolder, paths: Sequence[str]) -> None:
        """Copy objects from another folder of the same file system, on the server."""
        fs, root = filesystem(self.url)
        _, other_root = filesystem(other.url)
        fs.copy(
            [f"{other_root}/{path}" for path in paths],
            [f"{root}/{path}" for path in paths],
            on_error="raise",
        )

    def remove(self, path: str) -> None:
        """Remove an object if it exists."""
        fs, root = filesystem(self.url)
        with contextlib.suppress(FileNotFoundError):
            fs.rm_file(f"{root}/{path}")

    def clear(self) -> None:
        """Remove all objects."""
        fs, root = filesystem(self.url)
        fs.invalidate_cache()
        # not `fs.rm(names)`, which reads some of their characters as wildcards
        with ThreadPoolExecutor(FILES_AT_ONCE, "ml4cube-remove") as threads:
            list(threads.map(fs.rm_file, fs.find(root)))
        if fs.exists(root) and fs.isdir(root):  # file systems with folders
            fs.rm(root, recursive=True)

    def __str__(self) -> str:
        return self.url

    def draft(self, call_id: str, kind: StoreKind) -> RemoteDraft:
        return RemoteDraft(self.url, call_id, kind)

    def zarr_store(self) -> tuple[FsspecStore, RemoteFolder, str]:
        from zarr.storage import FsspecStore

        return FsspecStore.from_url(self.url), self, ""

    def system_and_path(self) -> tuple[Any, str]:
        return filesystem(self.url)

    def half_copied(self) -> set[str]:
        try:
            return set(json.loads(RemoteFolder(work_location(self)).read(_COPY_RECORD)))
        except (FileNotFoundError, ValueError, TypeError):
            return set()

    def check_target(self, argument: str) -> None:
        if glob.has_magic(self.system_and_path()[1]):
            raise InvalidValueError(
                f"{argument}={self.url!r} has one of '*', '?' and '[', which file systems of URLs "
                "read as wildcards; choose another name"
            )


class RemoteDraft(Draft):
    """An unfinished store behind a URL."""

    def __init__(self, target: str, call_id: str, kind: StoreKind) -> None:
        self.target: RemoteFolder = RemoteFolder(target)
        self.kind = kind
        self.work_folder: RemoteFolder = RemoteFolder(work_location(target))
        self.store_folder: RemoteFolder = RemoteFolder(f"{self.work_folder}/{store_name(call_id)}")
        # named by call, like the store: a run that was suspended may still record a task
        self.journal: RemoteFolder = RemoteFolder(f"{self.work_folder}/{journal_name(call_id)}")
        self.call_id = call_id
        self.finished_tasks = {}
        self._owner = uuid.uuid4().hex
        self._renewal_ended = threading.Event()
        # so that this process does not read the lock while it is half written
        self._lock_access = threading.RLock()
        self._take_lock()
        self._renewer = threading.Thread(
            target=self._keep_renewing, daemon=True, name="ml4cube-lock"
        )
        self._renewer.start()

    def _take_lock(self) -> None:
        if not self.work_folder.create(_LOCK, self._lock_note()):
            owner = self._read_lock()
            if time.time() - owner.get("time", 0.0) < _LOCK_EXPIRES_AFTER_S:
                raise RunError(
                    f"another run is writing {self.target} (on {owner.get('host')}, it has locked "
                    f"{self.work_folder}); wait for it to end, or {_LOCK_EXPIRES_AFTER_S:.0f} s "
                    "if it was killed"
                )
            self.work_folder.write(_LOCK, self._lock_note())
        if not self._holds_lock():
            raise RunError(f"another run just started to write {self.target}; wait for it to end")

    def _lock_note(self) -> bytes:
        note = {"owner": self._owner, "host": socket.gethostname(), "time": time.time()}
        return json.dumps(note).encode()

    def _read_lock(self) -> dict[str, Any]:
        """Return the note of the lock's owner; nothing if there is none, or it is half written."""
        try:
            note: dict[str, Any] = json.loads(self.work_folder.read(_LOCK))
        except (FileNotFoundError, ValueError):
            return {}
        return note

    def _keep_renewing(self) -> None:
        while not self._renewal_ended.wait(_LOCK_RENEWED_EVERY_S):
            try:
                with self._lock_access:
                    if not self._holds_lock():
                        return
                    self.work_folder.write(_LOCK, self._lock_note())
            except Exception as error:  # file systems raise any exception
                logger.warning(
                    "could not renew the lock of %s, trying again: %s", self.work_folder, error
                )

    def _holds_lock(self) -> bool:
        with self._lock_access:
            return self._read_lock().get("owner") == self._owner

    def _check_lock(self) -> None:
        if not self._holds_lock():
            raise RunError(
                f"another run took over {self.target}, because the lock of this run was not "
                f"renewed for {_LOCK_EXPIRES_AFTER_S:.0f} s or could not be read; wait for the "
                "other run to end, then run again"
            )

    def _clear(self, keep_this_call: bool) -> None:
        kept = [_LOCK, _COPY_RECORD]
        if keep_this_call:
            kept += [f"{store_name(self.call_id)}/", f"{journal_name(self.call_id)}/"]
        for name in self.work_folder.list():
            if name.startswith(OUR_PREFIX) and not name.startswith(tuple(kept)):
                self.work_folder.remove(name)

    def record(self, task: int, files: Files) -> None:
        """Record a finished task, unless another run took over."""
        self._check_lock()
        super().record(task, files)

    def publish(self, overwrite: bool = False) -> None:
        """Copy the finished store to its target, the marker last."""
        self._check_lock()
        if not overwrite:
            check_free(self.target, self.kind)
        new_files = set(self.store_folder.list())
        ours = replaceable_files(self.target, self.kind) | new_files
        self.work_folder.write(_COPY_RECORD, json.dumps(sorted(ours)).encode())
        last_copied = dict.fromkeys(["zarr.json", self.kind.marker])
        first_copied = sorted(new_files - set(last_copied))
        starts = range(0, len(first_copied), _COPIED_AT_ONCE)
        batches = [first_copied[start : start + _COPIED_AT_ONCE] for start in starts]
        folder = self.target
        # a store is not valid without its marker: the old one is removed first, the new put last
        steps: list[Callable[[], None]] = [partial(folder.remove, self.kind.marker), folder.clear]
        for batch in (*batches, *([name] for name in last_copied)):
            steps.append(partial(folder.copy_from, self.store_folder, batch))
        for step in steps:
            # a run that was suspended must not write into the store of a run that took over
            self._check_lock()
            step()

    def discard(self) -> None:
        """Remove our part of the work folder, the lock last."""
        self._stop_renewing()
        if not self._holds_lock():
            return
        names = {name.partition("/")[0] for name in self.work_folder.list()}
        ours = [name for name in names if name.startswith(OUR_PREFIX)]
        for name in sorted(ours, key=lambda name: name == _LOCK):
            RemoteFolder(f"{self.work_folder}/{name}").clear()  # also a single object
        if not self.work_folder.list():  # file systems with folders keep an empty one
            self.work_folder.clear()

    def close(self) -> None:
        """Release the lock; remove a work folder without finished tasks."""
        if self._renewal_ended.is_set():
            return
        self._stop_renewing()
        # without its record, files that were copied already would not be known as ours
        if not calls_with_tasks(self.work_folder) and self.work_folder.size(_COPY_RECORD) is None:
            self.discard()
        elif self._holds_lock():
            self.work_folder.remove(_LOCK)

    def _stop_renewing(self) -> None:
        """Stop renewing the lock, which would be put again after its release."""
        self._renewal_ended.set()
        self._renewer.join()
