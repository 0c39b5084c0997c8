"""Errors of file systems, raised as StoreError with location, cause and advice."""

from __future__ import annotations

import errno
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ml4cube.core.errors import CubeError, StoreError
from ml4cube.store.locations import Location, ZarrFolder


@dataclass(frozen=True)
class WriteErrors:
    """A context that turns errors of a location's file system into StoreError."""

    # Location, as the user wrote it.
    location: str
    # Whether it is a local folder, whose file system raises only `OSError`; other file systems may
    # raise any exception.
    local: bool
    # Whether its files are first written to a temporary folder, so that no run can resume.
    by_way_of_tmpdir: bool

    @classmethod
    def of(cls, target: Location) -> Self:
        """Make the context for a location."""
        return cls(str(target), isinstance(target, Path), isinstance(target, ZarrFolder))

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise `StoreError` for errors of the file system."""
        expected = OSError if self.local else Exception
        if not isinstance(error, expected):
            return
        if isinstance(error, CubeError | MemoryError | AssertionError):
            return
        advice = "make room or choose another path, then run again: finished tasks are kept"
        if self.by_way_of_tmpdir:
            advice = "run again"
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                folder = tempfile.gettempdir()
                advice = f"make room in {folder} (TMPDIR), where its files are first, then {advice}"
        raise StoreError(f"{self.location} cannot be written: {error}; {advice}") from error
