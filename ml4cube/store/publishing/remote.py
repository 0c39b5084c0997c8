"""Unfinished stores behind a URL, where nothing can be renamed.

The files are copied to the target, and the manifest, without which they are not a store, comes
last. The lock is an object that its owner renews.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from ml4cube.core.errors import RunError
from ml4cube.store.folders import Files, RemoteFolder
from ml4cube.store.format import MANIFEST
from ml4cube.store.publishing.draft import (
    KEY,
    OURS,
    Draft,
    calls_with_tasks,
    journal_name,
    store_name,
    work_location,
)
from ml4cube.store.publishing.overwriting import PUBLISHING, check_free, ours_at

logger = logging.getLogger(__name__)

#: Object of the work folder that marks the store as published.
PUBLISHED = f"{OURS}published.json"
_LOCK = f"{OURS}lock.json"
# Seconds between renewals of a remote lock, and after which its owner counts as dead.
_RENEW_S = 20.0
_DEAD_S = 90.0
_COPIED_AT_ONCE = 256


class RemoteDraft(Draft):
    """An unfinished store behind a URL."""

    def __init__(self, target: str, call_id: str) -> None:
        self.target: str = target
        self.folder: RemoteFolder = RemoteFolder(str(work_location(target)))
        self.root: RemoteFolder = RemoteFolder(f"{self.folder}/{store_name(call_id)}")
        # named by call, like the store: a run that was suspended may still record a task
        self.journal: RemoteFolder = RemoteFolder(f"{self.folder}/{journal_name(call_id)}")
        self.done = {}
        self.call_id = call_id
        self._me = uuid.uuid4().hex
        self._ended = threading.Event()
        # not all file systems put an object atomically
        self._lock_use = threading.RLock()
        self._take_lock()
        self._renewer = threading.Thread(target=self._renew, daemon=True, name="ml4cube-lock")
        self._renewer.start()

    def _take_lock(self) -> None:
        if not self.folder.create(_LOCK, self._lock_note()):
            owner = self._read_lock()
            if time.time() - owner.get("time", 0.0) < _DEAD_S:
                raise RunError(
                    f"another run is writing {self.target} (on {owner.get('host')}, it has locked "
                    f"{self.folder}); wait for it to end, or {_DEAD_S:.0f} s if it was killed"
                )
            self.folder.write(_LOCK, self._lock_note())
        if not self._is_mine():
            raise RunError(f"another run just started to write {self.target}; wait for it to end")

    def _lock_note(self) -> bytes:
        note = {KEY: self._me, "host": socket.gethostname(), "time": time.time()}
        return json.dumps(note).encode()

    def _read_lock(self) -> dict[str, Any]:
        try:
            found: Any = json.loads(self.folder.read(_LOCK))
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW_S):
            try:
                with self._lock_use:
                    if not self._is_mine():
                        return
                    self.folder.write(_LOCK, self._lock_note())
            except Exception as error:  # file systems raise any exception
                logger.warning(
                    "could not renew the lock of %s, trying again: %s", self.folder, error
                )

    def _is_mine(self) -> bool:
        with self._lock_use:
            return self._read_lock().get(KEY) == self._me

    def _check_mine(self) -> None:
        if not self._is_mine():
            raise RunError(
                f"another run took over {self.target}, because this run had not renewed its lock "
                f"for {_DEAD_S:.0f} s; wait for it to end, then run again"
            )

    def _clear(self, keep: bool) -> None:
        own = [f"{folder}/".removeprefix(f"{self.folder}/") for folder in (self.root, self.journal)]
        kept = (_LOCK, PUBLISHING, *(own if keep else ()))
        for name in self.folder.list():
            if name.startswith(OURS) and not name.startswith(kept):
                self.folder.remove(name)

    def record(self, task: int, files: Files) -> None:
        """Record a finished task, unless another run took over."""
        self._check_mine()
        super().record(task, files)

    def publish(self, overwrite: bool = False) -> None:
        """Copy the finished store to its target, the manifest last."""
        self._check_mine()
        if not overwrite:
            check_free(self.target)
        location = RemoteFolder(self.target)
        ours = ours_at(location, self._noted()) | set(self.root.list())
        self.folder.write(PUBLISHING, json.dumps(sorted(ours)).encode())
        *names, group, manifest = sorted(
            self.root.list(), key=lambda name: (name == MANIFEST, name == "zarr.json")
        )
        starts = range(0, len(names), _COPIED_AT_ONCE)
        copies = [names[start : start + _COPIED_AT_ONCE] for start in starts]
        steps: list[Callable[[], None]] = [
            partial(location.remove, MANIFEST),  # from here on the old store is not valid
            location.clear,
            *(partial(location.take, self.root, some) for some in [*copies, [group], [manifest]]),
        ]
        # a run that was suspended must not write into the store of a run that took over
        for step in steps:
            self._check_mine()
            step()
        self.folder.write(PUBLISHED, b"{}")

    def _noted(self) -> set[str]:
        """Return the files that an interrupted copy wanted to remove and put."""
        cut_off = self.folder.size(PUBLISHING) is not None
        return set(json.loads(self.folder.read(PUBLISHING))) if cut_off else set()

    def discard(self) -> None:
        """Remove our part of the work folder, the lock last."""
        self._end()
        if not self._is_mine():
            return
        names = {name.partition("/")[0] for name in self.folder.list() if name.startswith(OURS)}
        for name in sorted(names, key=lambda name: (name == _LOCK, name)):
            RemoteFolder(f"{self.folder}/{name}").clear()
        if not self.folder.list():  # file systems with folders
            self.folder.clear()

    def close(self) -> None:
        """Release the lock; remove a work folder without finished tasks."""
        if self._ended.is_set():
            return
        self._end()
        # without this record, files that were copied already would not be known as ours
        if not calls_with_tasks(self.target) and self.folder.size(PUBLISHING) is None:
            self.discard()
        elif self._is_mine():
            self.folder.remove(_LOCK)

    def _end(self) -> None:
        """Stop renewing the lock, which would be put again after its release."""
        self._ended.set()
        self._renewer.join()
