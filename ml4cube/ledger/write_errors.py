"""Errors of file systems, raised as StoreError with location, cause and advice."""

from __future__ import annotations

import errno
import tempfile
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from ml4cube.core.errors import CubeError, StoreError
from ml4cube.ledger.locations import Location, folder_of

# Errors that no room on the disk mends.
_NOT_ALLOWED = (errno.EROFS, errno.EACCES, errno.EPERM)


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
            advice = self._advice(error)
            raise StoreError(f"{self.location} cannot be written: {error}; {advice}") from error

    def _advice(self, error: BaseException) -> str:
        if isinstance(error, OSError) and error.errno in _NOT_ALLOWED:
            return "choose a path in a folder that you may write to"
        if not self.through_tmpdir:
            return "make room or choose another path, then run again: finished tasks are kept"
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            folder = tempfile.gettempdir()
            return f"make room in {folder} (TMPDIR), where its files are first, then run again"
        return "run again"
