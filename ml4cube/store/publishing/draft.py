"""Unfinished sample stores: the interface, and the files of a work folder.

Nothing appears at the target before the store is complete. Until then its work folder
``<path>.partial/`` holds the files in ``ml4cube-store-<call>/``, a note of each finished task in
``ml4cube-journal/<call>/``, and a lock. It is kept until all parts of a call are published. Files
with other names in it are never touched.
"""

from __future__ import annotations

import contextlib
import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from ml4cube.store.folders import Files, Folder, LocalFolder
from ml4cube.store.locations import Location, folder_of

logger = logging.getLogger(__name__)

#: Key of the owner of a remote lock, and of the files of an interrupted copy.
KEY = "ml4cube_draft"
#: Names in a work folder that begin so are ours.
OURS = "ml4cube-"
_JOURNAL = f"{OURS}journal"


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
        """Read the finished tasks of this call, or start over; remove what other calls left."""
        if resume and calls_with_tasks(self.target) - {short(self.call_id)}:
            logger.warning(
                "%s was left by another call, or its cube or callback has changed; starting over",
                self.folder,
            )
        self._clear(keep=resume)
        size_of = self._sizes()
        for name in sorted(self.journal.list()):
            # a note that was cut off or is damaged: the task is done again
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                noted = json.loads(self.journal.read(name))
                files = {str(path): (int(size), str(hash)) for path, (size, hash) in noted.items()}
                if all(size_of(path) == size for path, (size, _) in files.items()):
                    self.done[int(name.removesuffix(".json"))] = files

    def record(self, task: int, files: Files) -> None:
        """Record durably that a task is finished, with its files."""
        self.done[task] = files
        self.journal.write(f"{task}.json", json.dumps(files).encode())

    @abstractmethod
    def _clear(self, keep: bool) -> None:
        """Remove what earlier runs left, except the lock, and what this call left if `keep`."""

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


def work_location(target: Location) -> Path | str:
    """Return the work folder of a target."""
    folder = f"{target}.partial"
    return Path(folder) if isinstance(target, Path) else folder


def short(call_id: str) -> str:
    """Return the part of a call's id that names its files."""
    return call_id[:12]


def store_name(call_id: str) -> str:
    """Return the name of the unfinished store inside a work folder."""
    return f"{OURS}store-{short(call_id)}"


def journal_name(call_id: str) -> str:
    """Return the name of the journal inside a work folder."""
    return f"{_JOURNAL}/{short(call_id)}"


def calls_with_tasks(target: Location) -> set[str]:
    """Return the calls, by `short`, that have finished tasks in the work folder of a target."""
    journal = folder_of(f"{work_location(target)}/{_JOURNAL}")
    return {name.partition("/")[0] for name in journal.list()}
