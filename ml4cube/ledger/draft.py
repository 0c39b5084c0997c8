"""Unfinished stores, and what may be replaced by them.

Nothing appears at the target before the store is complete. Until then its work folder
``<path>.partial/`` holds the files in ``ml4cube-store-<call>/``, a note of each finished task in
``ml4cube-journal-<call>/``, and a lock. It is kept until all parts of a call are published. Files
with other names in it are never touched. What goes into a session of a zarr store has its work
folder in the temporary folder of this machine, so that no later run can resume it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ml4cube.core.errors import CubeError, StoreError, StoreExistsError
from ml4cube.ledger.folders import (
    COPY_RECORD,
    JOURNAL_PREFIX,
    LOCK,
    MARKER,
    OUR_PREFIX,
    STORE_PREFIX,
    Files,
    Folder,
    work_location,
)
from ml4cube.ledger.locations import Location, folder_of

logger = logging.getLogger(__name__)

# Errors that no room on the disk mends.
_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)


@dataclass(frozen=True)
class StoreKind:
    """How a complete store of one kind is recognized, and what in it is not ours to replace."""

    # What writes such stores, as messages call it.
    writer: str
    # Returns what in a folder the writer did not write, or what has changed since; raises
    # StoreError if there is no such store.
    find_foreign: Callable[[Folder], Sequence[str]]

    def may_write(self, target: Folder, overwrite: bool) -> bool:
        """Return True if nothing is at a target, or a store of ours that `overwrite` replaces."""
        target.restore()
        if not is_taken(target):
            return True
        if overwrite:
            self.check_overwritable(target)
        return overwrite

    def check_overwritable(self, target: Folder) -> None:
        """Raise StoreExistsError unless a store of this kind, and nothing else, is there."""
        target.check_removable()
        try:
            foreign = self.find_foreign(target)
        except StoreError:
            raise StoreExistsError(
                f"{target} exists and was not written by {self.writer}, or has lost the list of "
                "what was written, so overwrite=True does not replace it; move it away or choose "
                "another path"
            ) from None
        self._check_none_foreign(target, foreign)

    def replaceable_files(self, target: Folder) -> set[str]:
        """Return the files that may be replaced: a whole store, or those of a copy of ours."""
        recorded = target.half_copied()
        if target.exists() and not recorded:
            self.check_overwritable(target)
            return set(target.list())
        self._check_none_foreign(target, sorted(target.list().keys() - recorded))
        return recorded

    def _check_none_foreign(self, target: Folder, foreign: Sequence[str]) -> None:
        if foreign:
            raise StoreExistsError(
                f"{target} has {len(foreign)} files that {self.writer} did not write, or that have "
                f"changed since, such as {', '.join(map(repr, foreign[:3]))}, so it is not "
                "overwritten; move it away, or remove it by hand"
            )


def is_taken(target: Folder) -> bool:
    """Return True if anything exists at a target but the rest of an interrupted copy of ours."""
    if not target.exists():
        return False
    # the marker is copied last; of a session, it is the record of the copy until then
    is_complete = not target.is_session and target.size(MARKER) is not None
    return is_complete or not target.half_copied()


class Draft(AbstractContextManager["Draft"]):
    """An unfinished store, locked by one run; a context manager. Its content is kept until `begin`.

    Tasks may also be recorded by other processes (`record_task`), each complete or absent; whoever
    reads the journal afterwards sees them, and publishes when all are there.
    """

    def __init__(self, target: Location, call_id: str, kind: StoreKind) -> None:
        self.target, self.kind = folder_of(target), kind
        work_folder: Location = work_location(target)
        if self.target.is_session:
            work_folder = Path(tempfile.mkdtemp(prefix=OUR_PREFIX))
        self.work_folder = folder_of(work_folder)
        # named by call: a run that was suspended may still write here
        self._short_id = _short(call_id)
        self._own = [f"{STORE_PREFIX}{self._short_id}", f"{JOURNAL_PREFIX}{self._short_id}"]
        self.store_folder, self.journal = (folder_of(f"{work_folder}/{n}") for n in self._own)
        # Files by the number of the task that wrote them.
        self.finished_tasks: dict[int, Files] = {}
        self.lock = self.work_folder.lock(self.target)

    def begin(self, resume: bool = True) -> None:
        """Read the finished tasks of this call, or start over; remove what other calls left."""
        if resume and calls_with_tasks(self.work_folder) - {self._short_id}:
            logger.warning(
                "%s was left by another call, or its cube or callback has changed; starting over",
                self.work_folder,
            )
        # The record says which files of an interrupted copy are ours.
        self._remove_ours({LOCK, COPY_RECORD, *(self._own if resume else ())})
        for folder in (self.store_folder, self.journal):
            folder.make()
        self.finished_tasks = {}
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
        """Record durably that a task is finished, with its files, unless another run took over."""
        self.lock.check()
        self.store_folder.sync(files)
        self.finished_tasks[task] = files
        record_task(self.journal, task, files)

    @property
    def files(self) -> Files:
        """All files of finished tasks."""
        tasks = self.finished_tasks.values()
        return {path: size_and_hash for files in tasks for path, size_and_hash in files.items()}

    def publish(self, overwrite: bool = False, finished: Folder | None = None) -> None:
        """Move the finished store to its target, which is replaced only with `overwrite`.

        `finished` is what was made of the store, if that is another file.
        """
        self.lock.check()
        if not overwrite and is_taken(self.target):
            raise StoreExistsError(
                f"{self.target} did not exist when this run began and exists now, so it is not "
                "replaced; move it away, then run again"
            )
        old = self.kind.replaceable_files(self.target)
        self.target.replace(finished or self.store_folder, old, overwrite, self.lock.check)

    def discard(self) -> None:
        """Remove the work folder, or our part of it, and release the lock."""
        try:
            if self.lock.is_held:
                self._remove_ours({LOCK})
        finally:
            self.lock.release()

    def close(self) -> None:
        """Release the lock; finished tasks are kept for the next run."""
        if not self.lock.is_open:
            return
        # without its record, files that were copied already would not be known as ours
        is_copied = self.work_folder.size(COPY_RECORD) is not None
        if self.target.is_session or not (is_copied or calls_with_tasks(self.work_folder)):
            self.discard()
        else:
            self.lock.release()

    def _remove_ours(self, kept: set[str]) -> None:
        for name in self.work_folder.entries():
            if name.startswith(OUR_PREFIX) and name not in kept:
                folder_of(f"{self.work_folder}/{name}").clear()

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


def _short(call_id: str) -> str:
    """Return the part of a call's id that names its files."""
    return call_id[:12]


def calls_with_tasks(work_folder: Folder) -> set[str]:
    """Return the short ids of calls that have finished tasks in a work folder."""
    notes = [name for name in work_folder.list() if name.startswith(JOURNAL_PREFIX)]
    return {name.partition("/")[0].removeprefix(JOURNAL_PREFIX) for name in notes}


def remove_work_folder(target: Location, call_id: str, kind: StoreKind) -> None:
    """Remove the work folder of a published store, unless another call has finished tasks there."""
    if folder_of(target).is_session:
        return
    work_folder = folder_of(work_location(target))
    try:
        if work_folder.exists() and not calls_with_tasks(work_folder) - {_short(call_id)}:
            with Draft(target, call_id, kind) as draft:
                draft.discard()
    except Exception as error:  # file systems raise any exception
        # it may be in use, not ours, or not writable for this user
        logger.debug("could not remove %s: %s", work_folder, error)


@dataclass(frozen=True)
class WriteErrors(AbstractContextManager["WriteErrors"]):
    """A context that turns errors of a location's file system into StoreError; picklable."""

    location: str
    # All errors that its file system raises.
    errors: type[Exception]
    # Files of a session are written to a temporary folder first, so no run can resume.
    through_tmpdir: bool

    @classmethod
    def of(cls, target: Location) -> Self:
        """Make the context for a location."""
        folder = folder_of(target)
        return cls(str(target), folder.errors, folder.is_session)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise `StoreError` for errors of the file system."""
        unrelated = CubeError | MemoryError | AssertionError
        if isinstance(error, self.errors) and not isinstance(error, unrelated):
            advice = self._advice(getattr(error, "errno", None))
            raise StoreError(f"{self.location} cannot be written: {error}; {advice}") from error

    def _advice(self, number: int | None) -> str:
        if number in _NOT_ALLOWED:
            return "choose a path in a folder that you may write to"
        if not self.through_tmpdir:
            return "make room or choose another path, then run again: finished tasks are kept"
        if number == errno.ENOSPC:
            folder = tempfile.gettempdir()
            return f"make room in {folder} (TMPDIR), where its files are first, then run again"
        return "run again"
