"""Unfinished stores: the interface, and the files of a work folder.

Nothing appears at the target before the store is complete. Until then its work folder
``<path>.partial/`` holds the files in ``ml4cube-store-<call>/``, a note of each finished task in
``ml4cube-journal/<call>/``, and a lock. It is kept until all parts of a call are published. Files
with other names in it are never touched.
"""

from __future__ import annotations

import contextlib
import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

from ml4cube.ledger.folders import Files, Folder

logger = logging.getLogger(__name__)

#: Names in a work folder that begin so are ours.
OUR_PREFIX = "ml4cube-"
_JOURNAL = f"{OUR_PREFIX}journal"


@dataclass(frozen=True)
class StoreKind:
    """How a complete store of one kind is recognized, and what in it is not ours to replace."""

    # What writes such stores, as messages call it.
    writer: str
    # The file without which there is no such store; it is put last where nothing can be renamed.
    marker: str
    # Returns what in a folder the writer did not write, or what has changed since; raises
    # StoreError if there is no such store.
    find_foreign: Callable[[Folder], Sequence[str]]


class Draft(AbstractContextManager["Draft"]):
    """An unfinished store, locked by one run; a context manager."""

    target: Folder
    kind: StoreKind
    store_folder: Folder
    # Files by the number of the task that wrote them.
    finished_tasks: dict[int, Files]
    # Stores that go into a zarr store have none of these, because no later run can resume them.
    call_id: str
    work_folder: Folder
    journal: Folder

    def begin(self, resume: bool = True) -> None:
        """Read the finished tasks of this call, or start over; remove what other calls left."""
        if resume and calls_with_tasks(self.work_folder) - {short_id(self.call_id)}:
            logger.warning(
                "%s was left by another call, or its cube or callback has changed; starting over",
                self.work_folder,
            )
        self._clear(keep_this_call=resume)
        self.read_journal()

    def read_journal(self) -> None:
        """Read which tasks are finished, also those that other processes have recorded."""
        sizes = self.store_folder.list()
        for name in sorted(self.journal.list()):
            # if its note was cut off or is damaged, a task is done again
            with contextlib.suppress(ValueError, TypeError, AttributeError):
                note = json.loads(self.journal.read(name))
                files = {str(path): (int(size), str(hash)) for path, (size, hash) in note.items()}
                if all(sizes.get(path) == size for path, (size, _) in files.items()):
                    self.finished_tasks[int(name.removesuffix(".json"))] = files

    def folder_for_workers(self, on_other_machines: bool) -> Folder:
        """Return the folder that workers write to; `record` syncs files written on this machine."""
        return self.store_folder if on_other_machines else self.store_folder.for_workers()

    def record(self, task: int, files: Files) -> None:
        """Record durably that a task is finished, with its files."""
        self.finished_tasks[task] = files
        record_task(self.journal, task, files)

    @property
    def files(self) -> Files:
        """All files of finished tasks."""
        tasks = self.finished_tasks.values()
        return {path: size_and_hash for files in tasks for path, size_and_hash in files.items()}

    @abstractmethod
    def publish(self, overwrite: bool = False) -> None:
        """Move the finished store to its target, which is replaced only with `overwrite`."""

    @abstractmethod
    def discard(self) -> None:
        """Remove the work folder and release the lock."""

    @abstractmethod
    def close(self) -> None:
        """Release the lock; finished tasks are kept for the next run."""

    @abstractmethod
    def _clear(self, keep_this_call: bool) -> None:
        """Remove what earlier runs left in the work folder, except the lock."""

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


def record_task(journal: Folder, task: int, files: Files) -> None:
    """Write the note of a finished task, durably."""
    journal.write(f"{task}.json", json.dumps(files).encode())


def work_location(target: object) -> str:
    """Return the work folder of a target."""
    return f"{target}.partial"


def short_id(call_id: str) -> str:
    """Return the part of a call's id that names its files."""
    return call_id[:12]


def store_name(call_id: str) -> str:
    """Return the name of the unfinished store inside a work folder."""
    return f"{OUR_PREFIX}store-{short_id(call_id)}"


def journal_name(call_id: str) -> str:
    """Return the name of the journal inside a work folder."""
    return f"{_JOURNAL}/{short_id(call_id)}"


def calls_with_tasks(work_folder: Folder) -> set[str]:
    """Return the short ids of calls that have finished tasks in a work folder."""
    notes = [name for name in work_folder.list() if name.startswith(f"{_JOURNAL}/")]
    return {name.split("/")[1] for name in notes}
