"""`PredictionOptions`: arguments of `predict_cube`, checked when made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ml4cube.core.errors import check_whole
from ml4cube.core.grid import SizesLike


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """Arguments of `predict_cube` about inputs and windows; it documents them."""

    features: str | Iterable[str] | None
    targets: str | Iterable[str] | None
    sample_size: SizesLike | None
    overlap: SizesLike | float | None
    mask: str | None
    init_times: Any
    rollout: int

    def __post_init__(self) -> None:
        """Check the arguments that need no cube."""
        check_whole("rollout", self.rollout, 1)
