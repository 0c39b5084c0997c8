"""Unfinished sample stores: the interface, and the files of a work folder.

Nothing appears at the target before the store is complete. Until then its work folder
``<path>.partial/`` holds the files in ``store-<call>/``, a note of each finished task in
``journal-<call>/``, the call in ``call.json`` and a lock. It is kept until all parts of a call are
published.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from ml4cube.core.errors import StoreError
from ml4cube.store.folders import Files, Folder, LocalFolder
from ml4cube.store.locations import Location

logger = logging.getLogger(__name__)

#: Key of the owner in the files of a work folder, and of an interrupted copy.
KEY = "ml4cube_draft"


class Draft(ABC):
    """An unfinished store, locked by one run; a context manager."""

    target: Location
    # The work folder, and in it the unfinished store and the notes of finished tasks.
    folder: Folder
    root: Folder
    journal: Folder
    call_id: str
    done: dict[int, Files]

    @property
    def files(self) -> Files:
        """All files of recorded tasks."""
        return {name: entry for files in self.done.values() for name, entry in files.items()}

    def root_of_workers(self, elsewhere: bool) -> Folder:
        """Return the folder that workers write to; on this machine they need not wait for disks."""
        if elsewhere or not isinstance(self.root, LocalFolder):
            return self.root
        return replace(self.root, waits=False)

    def begin(self, resume: bool = True) -> None:
        """Read the finished tasks; start over if another call made them, or unless `resume`."""
        found = call_of(self.folder)
        if resume and found and found != self.call_id:
            logger.warning(
                "%s was left by another call, or its cube or callback has changed; starting over",
                self.folder,
            )
        if not (resume and found == self.call_id):
            self._clear()
            self._note_call(self.call_id)
        size_of = self._sizes()
        for name in sorted(self.journal.list()):
            if not name.endswith(".json"):  # a run was killed while it wrote this note
                continue
            task, files = self._noted_task(name)
            if all(size_of(path) == size for path, (size, _) in files.items()):
                self.done[task] = files

    def _noted_task(self, name: str) -> tuple[int, Files]:
        try:
            noted = json.loads(self.journal.read(name))
            files = {str(path): (int(size), str(hash)) for path, (size, hash) in noted.items()}
            return int(name.removesuffix(".json")), files
        except (ValueError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{self.journal}/{name} is damaged ({type(error).__name__}: {error}), so the "
                "finished tasks are unknown; run again with resume=False to start over"
            ) from error

    def record(self, task: int, files: Files) -> None:
        """Record durably that a task is finished, with its files."""
        self.done[task] = files
        self.journal.write(f"{task}.json", json.dumps(files).encode())

    def _note_call(self, call_id: str) -> None:
        self.folder.write("call.json", json.dumps({KEY: call_id}).encode())

    @abstractmethod
    def _clear(self) -> None:
        """Remove what earlier runs left, except the lock; the call first."""

    def _sizes(self) -> Callable[[str], int | None]:
        """Return a function that tells the size of a file of the store, None if it is missing."""
        return self.root.list().get

    @abstractmethod
    def publish(self, overwrite: bool = False) -> None:
        """Move the finished store to its target, which is replaced only with `overwrite`."""

    @abstractmethod
    def discard(self) -> None:
        """Remove the work folder and release the lock."""

    @abstractmethod
    def close(self) -> None:
        """Release the lock; finished tasks are kept for the next run."""

    def __enter__(self) -> Draft:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; a failure to do so does not hide an error of the run."""
        try:
            self.close()
        except Exception as failure:  # file systems raise any exception
            logger.warning("could not close the work folder of %s: %s", self.target, failure)


def work_location(target: Path | str) -> Path | str:
    """Return the work folder of a target."""
    folder = f"{target}.partial"
    return Path(folder) if isinstance(target, Path) else folder


def store_name(call: str) -> str:
    """Return the name of the unfinished store inside a work folder."""
    return f"store-{call[:12]}"


def journal_name(call: str) -> str:
    """Return the name of the journal inside a work folder."""
    return f"journal-{call[:12]}"


def call_of(folder: Folder) -> str | None:
    """Return the id of the call that made a work folder."""
    try:
        found: str = json.loads(folder.read("call.json"))[KEY]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return found
