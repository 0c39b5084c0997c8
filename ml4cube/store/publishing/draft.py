"""A sample store under way: what a draft does, wherever it grows.

Nothing stands at the path itself before the store is complete. Until then its files, the call that
makes them, finished tasks and a lock are in ``<path>.partial/`` beside it, the work folder. That
outlives the step to the path, until all parts of a call have made it.
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
from ml4cube.store.locations import Place

logger = logging.getLogger(__name__)

#: Under this key the work folder, and what stands where a copying was cut off, tell whose they are.
KEY = "ml4cube_draft"
#: Warning that a draft is thrown away; takes the work folder.
OTHER_CALL = "%s was left by another call, or its cube or callback has changed; starting over"


class Draft(ABC):
    """A store under way, held by one run at a time; a context manager."""

    target: Place
    root: Folder
    done: dict[int, Files]

    @property
    def files(self) -> Files:
        """Everything that recorded tasks wrote."""
        return {name: entry for files in self.done.values() for name, entry in files.items()}

    def root_of_workers(self, elsewhere: bool) -> Folder:
        """Return the folder that workers write to; on this machine they need not wait for disks."""
        if elsewhere or not isinstance(self.root, LocalFolder):
            return self.root
        return replace(self.root, waits=False)

    @abstractmethod
    def begin(self, resume: bool = True) -> None:
        """Find out what is done; throw away what another call has left, or all unless `resume`."""

    @abstractmethod
    def record(self, task: int, files: Files) -> None:
        """Note durably that a task is finished, and what it wrote."""

    @abstractmethod
    def publish(self, overwrite: bool = False) -> None:
        """Put the finished store at its place; only if told to, in place of what stands there."""

    @abstractmethod
    def discard(self) -> None:
        """Remove the work folder and all that is in it, and give the lock back."""

    @abstractmethod
    def close(self) -> None:
        """Give the lock back; what is done stays, for the next run to resume."""

    def __enter__(self) -> Draft:
        """Hold the draft."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close; that this fails hides no error of the work, nor does it undo what is published."""
        try:
            self.close()
        except Exception as failure:  # of any kind: file systems raise what they like
            logger.warning("the work folder of %s is left as it is: %s", self.target, failure)


def work_place(target: Path | str) -> Path | str:
    """Return the work folder of a place."""
    folder = f"{target}.partial"
    return Path(folder) if isinstance(target, Path) else folder


def store_name(call: str) -> str:
    """Name the folder inside a work folder in which a store grows."""
    return f"store-{call[:12]}"


def call_of(folder: Folder) -> str | None:
    """Tell which call a work folder belongs to."""
    try:
        found: str = json.loads(folder.read("call.json"))[KEY]
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return None
    return found


def journal_entry(note: bytes, place: str) -> tuple[int, Files]:
    """Read what was noted of a finished task."""
    try:
        entry = json.loads(note)
        files = {str(n): (int(size), str(hash)) for n, (size, hash) in entry["files"].items()}
        return int(entry["task"]), files
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(
            f"{place} is damaged ({type(error).__name__}: {error}), so what is finished is not "
            "known; run again with resume=False to start over"
        ) from error
