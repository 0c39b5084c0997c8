"""Read a cube for samples: its variables, mask and label, and the chunks that its source lacks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ml4cube.core.errors import StoreError, listed
from ml4cube.cube.absent_chunks import (
    ABSENT,
    AbsentCells,
    AbsentChunks,
    find_absent_chunks,
    heed_absent_chunks,
)
from ml4cube.cube.reader import ComputedSource, CubeReader
from ml4cube.splits.label import label_lookup

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True)
class HeededReader:
    """A reader of a cube, and the chunks that the source of the cube lacks."""

    cells: CubeReader
    # By variable.
    absent: Mapping[str, AbsentChunks]
    # Variables in which they count as gaps.
    dropped: tuple[str, ...]

    @classmethod
    def of(
        cls,
        ds: xr.Dataset,
        names: Iterable[str],
        dims: Sequence[str],
        label: str,
        mask: str | None,
        missing_chunks: str,
    ) -> HeededReader:
        """Make a reader of some variables, the label and the mask.

        It computes labels from the split's recipe, if there is one, and the cells of absent chunks
        of integers, which hold no gaps.
        """
        stored = [*names, label, *([mask] if mask else [])]
        read, computed = list(stored), {}
        if (lookup := label_lookup(ds, label)) is not None:
            label_dims = tuple(map(str, ds[label].dims))
            of_label = ComputedSource(dims=label_dims, dtype=np.dtype(np.uint8), function=lookup)
            computed[label] = of_label
            read.remove(label)
        heeded = heed_absent_chunks(ds, read, missing_chunks, mask=mask, keep_integers=True)
        integers = {n: chunks for n, chunks in heeded.dropped.items() if ds[n].dtype.kind in "iub"}
        if integers:
            cells = AbsentCells.of(ds, dims, integers)
            of_dims = tuple(dims)
            computed[ABSENT] = ComputedSource(dims=of_dims, dtype=np.dtype(bool), function=cells)
        reader = CubeReader.of(heeded.cube, stored, dims)
        reader = replace(reader, sources={**reader.sources, **computed})
        return cls(reader, heeded.absent, tuple(sorted(heeded.dropped)))

    @property
    def stored(self) -> list[str]:
        """Variables that are not computed."""
        sources = self.cells.sources.items()
        return [name for name, source in sources if not isinstance(source, ComputedSource)]

    def check_same_chunks(self, ds: xr.Dataset, mask: str | None) -> None:
        """Refuse a cube that lacks other chunks than when this reader was made."""
        now = find_absent_chunks(ds, self.stored, mask)
        if now != self.absent:
            changed = {n for n in (*now, *self.absent) if now.get(n) != self.absent.get(n)}
            raise StoreError(
                f"chunks of {listed(sorted(changed))} were removed or added since this sampler was "
                "made; make it again"
            )
