"""A sample store under way behind a URL, where nothing can be renamed.

The files are copied to their place, and the manifest, without which they are no store, comes last.
A finished task is an object of its own, and the lock is one that its owner renews.
"""

from __future__ import annotations

import json
import logging
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable
from functools import partial
from typing import Any

from ml4cube.core.errors import RunError, StoreExistsError
from ml4cube.store.folders import Files, RemoteFolder
from ml4cube.store.format import MANIFEST
from ml4cube.store.publishing.draft import (
    KEY,
    OTHER_CALL,
    Draft,
    call_of,
    journal_entry,
    store_name,
    work_place,
)
from ml4cube.store.publishing.overwriting import PUBLISHING, check_free, ours_at

logger = logging.getLogger(__name__)

#: Object of the work folder that tells that the store was put to its place.
PUBLISHED = "published.json"
# The owner of a remote lock renews it that often; one that was not for that long is dead.
_RENEW_S = 20.0
_DEAD_S = 90.0
_COPIED_AT_ONCE = 256
# What tasks and runs that outlive their work folder still put there.
_LATE = re.compile(r"(store|journal)-[0-9a-f]{12}/")


class RemoteDraft(Draft):
    """A store under way behind a URL."""

    def __init__(self, target: str, fingerprint: str) -> None:
        """Take the lock."""
        self.target: str = target
        self.folder = RemoteFolder(str(work_place(target)))
        self.root: RemoteFolder = RemoteFolder(f"{self.folder}/{store_name(fingerprint)}")
        # as the store: a run that slept while another took over may still note a task
        self._journal = f"journal-{fingerprint[:12]}"
        self.done = {}
        self._fingerprint = fingerprint
        self._me = uuid.uuid4().hex
        self._ended = threading.Event()
        # not all file systems put an object in one step
        self._lock_use = threading.RLock()
        self._take_lock()
        self._renewer = threading.Thread(target=self._renew, daemon=True, name="ml4cube-lock")
        self._renewer.start()

    def begin(self, resume: bool = True) -> None:
        """Read the journal, or start over."""
        found = call_of(self.folder)
        if not resume or found != self._fingerprint:
            if resume and found:
                logger.warning(OTHER_CALL, self.folder)
            self._start_over()
        self._read_journal()

    def _take_lock(self) -> None:
        ours = KEY in self._read_lock() or call_of(self.folder) is not None
        if not ours and not all(map(_LATE.match, self.folder.list())):
            raise StoreExistsError(
                f"{self.folder} is needed as work folder, but holds something else; move it away"
            )
        if not self.folder.create("lock.json", self._lock_note()):
            owner = self._read_lock()
            if time.time() - owner.get("time", 0.0) < _DEAD_S:
                raise RunError(
                    f"another run is writing {self.target} (on {owner.get('host')}, it holds "
                    f"{self.folder}); wait for it to end, or {_DEAD_S:.0f} s if it was killed"
                )
            self.folder.write("lock.json", self._lock_note())
        if not self._is_mine():
            raise RunError(f"another run has just begun to write {self.target}; wait for it to end")

    def _lock_note(self) -> bytes:
        note = {KEY: self._me, "host": socket.gethostname(), "time": time.time()}
        return json.dumps(note).encode()

    def _read_lock(self) -> dict[str, Any]:
        try:
            found: Any = json.loads(self.folder.read("lock.json"))
        except (FileNotFoundError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW_S):
            try:
                with self._lock_use:
                    if not self._is_mine():
                        return
                    self.folder.write("lock.json", self._lock_note())
            except Exception as error:  # of any kind: file systems raise what they like
                logger.warning(
                    "the lock of %s is not renewed, trying again: %s", self.folder, error
                )

    def _is_mine(self) -> bool:
        with self._lock_use:
            return self._read_lock().get(KEY) == self._me

    def _check_mine(self) -> None:
        if not self._is_mine():
            raise RunError(
                f"another run took over {self.target}, since this one had not renewed its lock for "
                f"{_DEAD_S:.0f} s; wait for it to end, then run again"
            )

    def _start_over(self) -> None:
        # ours all the time, and no call's until all is gone
        self.folder.write("call.json", json.dumps({KEY: ""}).encode())
        for name in self.folder.list():
            if name not in ("lock.json", "call.json", PUBLISHING):
                self.folder.remove(name)
        self.folder.write("call.json", json.dumps({KEY: self._fingerprint}).encode())

    def _read_journal(self) -> None:
        """Believe every entry whose files are there with their sizes."""
        there = self.root.list()
        for name in sorted(n for n in self.folder.list() if n.startswith(f"{self._journal}/")):
            task, files = journal_entry(self.folder.read(name), f"{self.folder}/{name}")
            if all(there.get(path) == size for path, (size, _) in files.items()):
                self.done[task] = files

    def record(self, task: int, files: Files) -> None:
        """Note that a task is finished, in an object of its own."""
        self._check_mine()
        self.done[task] = files
        note = json.dumps({"task": task, "files": files}).encode()
        self.folder.write(f"{self._journal}/{task}.json", note)

    def publish(self, overwrite: bool = False) -> None:
        """Copy the finished store to its place, the manifest last."""
        self._check_mine()
        if not overwrite:
            check_free(self.target)
        place = RemoteFolder(self.target)
        ours = ours_at(place, self._noted()) | set(self.root.list())
        self.folder.write(PUBLISHING, json.dumps(sorted(ours)).encode())
        *names, group, manifest = sorted(
            self.root.list(), key=lambda name: (name == MANIFEST, name == "zarr.json")
        )
        starts = range(0, len(names), _COPIED_AT_ONCE)
        copies = [names[start : start + _COPIED_AT_ONCE] for start in starts]
        steps: list[Callable[[], None]] = [
            partial(place.remove, MANIFEST),  # from here on what was there is no store any more
            place.clear,
            *(partial(place.take, self.root, some) for some in [*copies, [group], [manifest]]),
        ]
        # a run that slept meanwhile must not go on in the store of the one that took over
        for step in steps:
            self._check_mine()
            step()
        self.folder.write(PUBLISHED, b"{}")

    def _noted(self) -> set[str]:
        """What a copying that was cut off has noted that it would remove and put."""
        cut_off = self.folder.size(PUBLISHING) is not None
        return set(json.loads(self.folder.read(PUBLISHING))) if cut_off else set()

    def discard(self) -> None:
        """Remove the work folder and all that is in it, what tells that it is ours last."""
        self._end()
        if not self._is_mine():
            return
        there = {name.partition("/")[0] for name in self.folder.list()}
        for name in sorted(there - {"lock.json", "call.json"}):
            RemoteFolder(f"{self.folder}/{name}").clear()
        self.folder.clear()

    def close(self) -> None:
        """Give the lock back; a work folder in which no task is finished is removed."""
        if self._ended.is_set():
            return
        self._end()
        # what was copied already is known as ours by the note of it alone
        if not any(name.startswith(("journal-", PUBLISHING)) for name in self.folder.list()):
            self.discard()
        elif self._is_mine():
            self.folder.remove("lock.json")

    def _end(self) -> None:
        """Stop renewing the lock; it would be there again after it was given back."""
        self._ended.set()
        self._renewer.join()
