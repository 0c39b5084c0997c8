"""What the samples of a cube will be: how many in each part, and which windows are dropped."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.display import Summarized, Summary, Table
from ml4cube.core.errors import EmptyPartError, InvalidValueError, caller_level
from ml4cube.core.sample_facts import outcome_table
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import Statistics
from ml4cube.cube.absent_chunks import AbsentChunks
from ml4cube.recipe.recipe import Recipe
from ml4cube.sampling.outcomes import OUTCOMES, REASONS
from ml4cube.sampling.parts import expects_part
from ml4cube.sampling.samples import Schema
from ml4cube.store.precision import Precision


@dataclass(frozen=True, repr=False)
class SamplePlan(Summarized):
    """The result of sampling, known before anything is written."""

    parts: tuple[str, ...]
    # ``total`` windows, samples of each part, and drops by reason: ``edge`` (would pass the cube's
    # end), ``straddle`` (in two parts), ``buffer`` (touches excluded cells), ``mask``, ``gap``,
    # ``unused`` (in an unused block). Parts and reasons add up to the total.
    accounting: Mapping[str, int]
    # Of the float variables: those given, or those of the train samples before scaling.
    statistics: Statistics
    # Window shape and dtype of every stored variable.
    schema: Schema
    # Of a stored sample, along all dims.
    origin_bytes: int
    # Number of samples of each tile (a box of windows) and part.
    tile_samples: NDArray[np.int64]
    # Chunks that are missing from the source, by variable.
    absent: Mapping[str, AbsentChunks]
    # Windows that span missing dates; they are also counted by part or reason.
    over_missing_dates: int
    # Variables of the cube that are not sampled, with the reason.
    left_out: Mapping[str, str]
    # Variables with gaps that are filled, with the method.
    filled: Mapping[str, str]

    def stored_as(self, precision: Precision) -> SamplePlan:
        """Return the plan with the dtypes that samples have on disk."""
        precision.check_names(self.dtypes)
        schema = {
            name: (window, precision.dtype(name, dtype))
            for name, (window, dtype) in self.schema.items()
        }
        return replace(self, schema=schema)

    @property
    def dtypes(self) -> dict[str, str]:
        """Dtype of every stored variable."""
        return {name: dtype for name, (_, dtype) in self.schema.items()}

    @property
    def samples(self) -> dict[str, int]:
        """Samples of each part."""
        return {part: self.accounting[part] for part in self.parts}

    @property
    def sample_bytes(self) -> int:
        """Bytes of a sample with its origin, before compression."""
        arrays = self.schema.values()
        values = sum(math.prod(window) * np.dtype(dtype).itemsize for window, dtype in arrays)
        return values + self.origin_bytes

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes of the samples of each part, before compression."""
        return {part: n * self.sample_bytes for part, n in self.samples.items()}

    @property
    def dropped(self) -> dict[str, int]:
        """Windows that give no sample, by reason."""
        return {name: self.accounting[name] for name in ("edge", *REASONS)}

    def _summary(self) -> Summary:
        """Return what every part gets, what is dropped, and what to know about the source."""
        notes = [f"{name!r}: {chunks}" for name, chunks in self.absent.items()]
        if self.over_missing_dates:
            notes.append(f"{self.over_missing_dates:,} windows span missing dates")
        notes += [f"filled: gaps of {name!r} ({how!r})" for name, how in self.filled.items()]
        notes += [f"left out: {name!r} {why}" for name, why in self.left_out.items()]
        variables = {
            name: " ".join([" × ".join(map(str, window)), np.dtype(dtype).name]).strip()
            for name, (window, dtype) in self.schema.items()
        }
        return Summary(
            f"{sum(self.samples.values()):,} samples of {self.accounting['total']:,} windows",
            {"Variables": variables},
            {
                "Windows": outcome_table(self.accounting, self.parts, self.sample_bytes),
                "Notes": Table.listing(notes),
                "Statistics": self.statistics,
            },
        )


def warn_of_nothing_to_fill(recipe: Recipe, accounting: Mapping[str, int]) -> None:
    """Warn if samples were dropped for gaps that `fill_method` should fill."""
    dropped = accounting["gap"]
    if dropped and recipe.fill_method and recipe.drop_nan == "auto":
        warnings.warn(
            f"fill_method fills nothing, because drop_nan='auto' drops every sample with a gap "
            f"({dropped} of {accounting['total']} windows); give drop_nan='if_all_nan' or None to "
            "keep and fill them",
            stacklevel=caller_level(),
        )


def accounting_of(total: int, outcomes: NDArray[np.int64], parts: Iterable[str]) -> dict[str, int]:
    """Return the number of all windows, of samples of each part, and of drops by reason.

    `outcomes` are those of all windows inside the cube; the others pass its end.
    """
    counts = dict(zip(OUTCOMES, outcomes.tolist(), strict=True))
    names = (*parts, *REASONS)
    edge = total - sum(counts.values())
    return {"total": total, "edge": edge, **{name: counts[name] for name in names}}


def check_parts(
    split: Mapping[str, Any],
    accounting: Mapping[str, int],
    outcomes: NDArray[np.int64],
    parts: tuple[str, ...],
) -> None:
    """Refuse empty parts that should have samples, and samples of parts without a store."""
    for part, label in PARTS.items():
        if part not in parts and outcomes[label]:
            raise InvalidValueError(
                f"the split has {int(outcomes[label])} samples in the {part} part; give "
                f"{part}_cube a path"
            )
    empty = [part for part in parts if not accounting[part]]
    wanted = [part for part in empty if expects_part(split, part)]
    if wanted or len(empty) == len(parts):
        refuse_empty(accounting, wanted or empty, parts)


def refuse_empty(
    accounting: Mapping[str, int], empty: Sequence[str], parts: Sequence[str] = tuple(PARTS)
) -> NoReturn:
    """Raise an error that says why parts hold no sample."""
    drops = {k: n for k, n in accounting.items() if n and k not in ("total", *parts)}
    raise EmptyPartError(
        f"the {' and the '.join(empty)} part would hold no sample: "
        f"{sum(accounting[p] for p in parts)} of {accounting['total']} windows remain, dropped are "
        f"{drops}; use smaller windows or more blocks, or change drop_nan, the mask or "
        "the split"
    )
