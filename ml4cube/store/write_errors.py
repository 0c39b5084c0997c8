"""How the refusal of a file system is told: where, why, and what to do."""

from __future__ import annotations

import errno
import tempfile
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from ml4cube.core.errors import CubeError, StoreError
from ml4cube.store.locations import Place, ZarrFolder


@dataclass(frozen=True)
class WriteErrors:
    """A context in which errors of a place's file system become one that says where; picklable."""

    # What is written, as the user knows it.
    place: str
    # Whether it is a folder of this machine, whose file system raises nothing but `OSError`; others
    # raise what they like, but for what is a fault of this process.
    local: bool
    # Whether its files grow in a temporary folder first, and nothing is kept for another run.
    by_way_of_tmpdir: bool

    @classmethod
    def of(cls, target: Place) -> Self:
        """Describe a place."""
        return cls(str(target), isinstance(target, Path), isinstance(target, ZarrFolder))

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Raise `StoreError` for what the file system raised; other errors go on as they are."""
        if isinstance(error, CubeError) or not isinstance(error, Exception):
            return
        if self.local and not isinstance(error, OSError):
            return
        if isinstance(error, MemoryError | AssertionError):
            return
        advice = "make room or choose another path, then run again: what is finished is kept"
        if self.by_way_of_tmpdir:
            advice = "run again"
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                folder = tempfile.gettempdir()
                advice = (
                    f"its files grow in {folder} (TMPDIR) first, make room there, then {advice}"
                )
        raise StoreError(f"{self.place} cannot be written: {error}; {advice}") from error
