"""Unfinished sample stores: the interface, and the files of a work folder.

Nothing appears at the target before the store is complete. Until then its files, the call that
makes them, the journal of finished tasks and a lock are in the work folder ``<path>.partial/``. It
is kept until all parts of a call are published.
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from types import TracebackType

from ml4cube.core.errors import StoreError
from ml4cube.store.folders import Files, Folder, LocalFolder
from ml4cube.store.locations import Location

logger = logging.getLogger(__name__)

#: Key of the owner in the files of a work folder, and of an interrupted copy.
KEY = "ml4cube_draft"
#: Warning that a draft is discarded, with the work folder.
OTHER_CALL = "%s was left by another call, or its cube or callback has changed; starting over"


class Draft(ABC):
    """An unfinished store, locked by one run; a context manager."""

    target: Location
    root: Folder
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

    @abstractmethod
    def begin(self, resume: bool = True) -> None:
        """Read the finished tasks; start over if another call made them, or unless `resume`."""

    @abstractmethod
    def record(self, task: int, files: Files) -> None:
        """Record durably that a task is finished, with its files."""

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


def call_of(folder: Folder) -> str | None:
    """Return the id of the call that made a work folder."""
    try:
        found: str = json.loads(folder.read("call.json"))[KEY]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return found


def journal_entry(note: bytes, location: str) -> tuple[int, Files]:
    """Parse the journal entry of a finished task."""
    try:
        entry = json.loads(note)
        files = {str(n): (int(size), str(hash)) for n, (size, hash) in entry["files"].items()}
        return int(entry["task"]), files
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{location} is damaged ({type(error).__name__}: {error}), so the finished tasks are "
            "unknown; run again with resume=False to start over"
        ) from error
