"""Scaling of a variable: one offset and scale, or those of each level, pixel or month."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ml4cube.core.axes import is_time, same_coordinate
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.statistics import scale_parameters, scale_values, unscale_values
from ml4cube.core.sums.fields import FieldStatistics, decoded, encoded
from ml4cube.core.sums.moments import VariableStatistics

Ints = NDArray[np.intp]
_NUMBERS = {
    "standardize": ("mean", "std"),
    "normalize": ("least value", "range"),
    "robust": ("median", "interquartile range"),
}
#: Attribute of a stored variable: the entry of the statistics for each cell of the cube.
PLACES_ATTR = "ml4cube_places"
#: Along each axis of the statistics: a dim of the cube, and the entry of each of its cells.
Places = tuple[tuple[str, Ints], ...]

#: Labels of the groups of a climatology. A day of the year counts from 1; calendars without leap
#: days have only 365, or 360.
GROUPS: dict[str, NDArray[Any]] = {
    "month": np.arange(1, 13),
    "season": np.array(["DJF", "MAM", "JJA", "SON"]),
    "dayofyear": np.arange(1, 367),
}


def group_numbers(dates: NDArray[Any], by: str) -> NDArray[np.int64]:
    """Return the group number of each date."""
    if dates.dtype.kind == "M":
        months = dates.astype("M8[M]").astype(np.int64) % 12
        days = (dates.astype("M8[D]") - dates.astype("M8[Y]").astype("M8[D]")).astype(np.int64)
    else:
        months = np.array([date.month - 1 for date in dates], np.int64)
        days = np.array([date.dayofyr - 1 for date in dates], np.int64)
    return days if by == "dayofyear" else months if by == "month" else (months + 1) % 12 // 3


def dated_dim(coords: Mapping[str, NDArray[Any]], dims: Sequence[Any]) -> str:
    """Return the time dim: the one whose coordinate holds dates."""
    dated = [name for name, values in coords.items() if is_time(values)]
    if len(dated) == 1 or "time" in dated:
        return "time" if "time" in dated else dated[0]
    raise InvalidValueError(
        f"a climatology needs one dim with dates as coordinates, got {dated or 'none'} among "
        f"{list(dims)}; decode the times, or name the right dim 'time'"
    )


def match_places(
    name: str,
    dims: Sequence[str],
    offset: Any,
    labels: Mapping[str, NDArray[Any]],
    sizes: Mapping[str, int],
    coords: Mapping[str, NDArray[Any]],
) -> Places:
    """Return the entry of the statistics for every cell along the dims of a cube."""
    found = []
    for axis, (dim, size) in enumerate(zip(dims, np.shape(offset), strict=True)):
        if dim in GROUPS and dim not in sizes:
            along = dated_dim(coords, list(sizes))
            dates = coords[along]
            if (dates != dates).any():
                raise InvalidValueError(f"{along!r} must not have missing dates; drop those steps")
            entries = group_numbers(dates, dim).astype(np.intp)
            empty = np.isnan(offset).all(axis=tuple(a for a in range(len(dims)) if a != axis))
            missing = [GROUPS[dim][n].item() for n in np.unique(entries) if empty[n]]
            if missing:
                raise InvalidValueError(
                    f"no statistics of {dim} {missing[:6]} for {name!r}; use a split with train "
                    "cells there, or a coarser climatology"
                )
            found.append((along, entries))
            continue
        if dim not in sizes:
            raise InvalidValueError(
                f"statistics of {name!r} have dims {list(dims)}, the data have {list(sizes)}; "
                f"compute them for this cube, or without {dim!r}"
            )
        found.append((dim, _entries(name, dim, size, labels, sizes[dim], coords)))
    return tuple(found)


def encoded_places(places: Places) -> list[list[Any]]:
    """Return places as JSON values."""
    return [[dim, encoded(along.astype(np.int64))] for dim, along in places]


def decoded_places(written: Sequence[Sequence[Any]]) -> Places:
    """Return places from the JSON values of `encoded_places`."""
    return tuple((str(dim), decoded(along).astype(np.intp)) for dim, along, *_ in written)


def _entries(
    name: str,
    dim: str,
    size: int,
    labels: Mapping[str, NDArray[Any]],
    cells: int,
    coords: Mapping[str, NDArray[Any]],
) -> Ints:
    """Return the entry of each cell along one dim."""
    if dim not in labels or dim not in coords:
        if size != cells:
            raise InvalidValueError(
                f"statistics of {name!r} have length {size} along {dim!r}, the data {cells}; "
                "compute them for this cube"
            )
        return np.arange(cells)
    known, wanted = labels[dim], coords[dim]
    # coordinates that are equal up to rounding, such as float32, are matched by position
    if same_coordinate(known, wanted):
        return np.arange(cells)
    if known.dtype.kind == wanted.dtype.kind == "M":
        unit = np.result_type(known, wanted)
        known, wanted = known.astype(unit), wanted.astype(unit)
    entries = {label: entry for entry, label in enumerate(known.tolist())}
    if len(entries) < len(known):
        raise InvalidValueError(
            f"statistics of {name!r} have duplicate coordinates along {dim!r}, and the data have "
            "others; drop the duplicates"
        )
    found = np.array([entries.get(label, -1) for label in wanted.tolist()], np.intp)
    if (found < 0).any():
        raise InvalidValueError(
            f"no statistics of {name!r} at {dim} {_shown(wanted[found < 0])}, only at "
            f"{_shown(known)} ...; compute them there too"
        )
    return found


def _shown(labels: NDArray[Any]) -> list[Any]:
    """Return the first coordinates, for a message."""
    few = labels[:3]
    return list(few.astype(str).tolist() if few.dtype.kind in "mM" else few.tolist())


def _span(numbers: Any) -> str:
    """Return a number, or the least and greatest of many."""
    low, high = np.nanmin(numbers), np.nanmax(numbers)
    return f"{low:.6g}" if low == high else f"{low:.6g} to {high:.6g}"


@dataclass(frozen=True, eq=False)
class Scaling:
    """Offset and scale of a variable, in each cell of a cube; picklable."""

    name: str
    # From `scale_parameters`: one number, or one per entry of the statistics.
    offset: Any
    scale: Any
    # For each axis of the two, a dim of the cube, and the entry of each cell along it.
    places: Places = ()
    # Names of the two numbers, for messages.
    how: str | None = None

    @classmethod
    def of(
        cls,
        name: str,
        stats: VariableStatistics,
        scale_fn: str | None,
        sizes: Mapping[str, int],
        coords: Mapping[str, NDArray[Any]],
    ) -> Self:
        """Match statistics with a cube."""
        offset, scale = scale_parameters(stats, scale_fn)
        places: Places = ()
        if isinstance(stats, FieldStatistics) and scale_fn is not None:
            places = match_places(name, stats.dims, offset, stats.labels, sizes, coords)
        return cls(name, offset, scale, places, scale_fn)

    @property
    def dims(self) -> tuple[str, ...]:
        """Dims of the cube along which the scaling varies."""
        return tuple(dim for dim, _ in self.places)

    @property
    def described(self) -> str:
        """Description of the scaling, for messages."""
        if self.how is None:
            return "not at all"
        words = zip(_NUMBERS[self.how], (self.offset, self.scale), strict=True)
        shown = " and ".join(f"{word} {_span(numbers)}" for word, numbers in words)
        return f"by {shown}" + (f" along {', '.join(self.dims)}" if self.places else "")

    def at(
        self, cells: Mapping[str, NDArray[Any]], values: NDArray[Any] | None = None
    ) -> tuple[Any, Any]:
        """Return offset and scale of some cells; raise if one of `values` has none."""
        if not self.places:
            return self.offset, self.scale
        entries = tuple(place[cells[dim]] for dim, place in self.places)
        offset, scale = self.offset[entries], self.scale[entries]
        if values is not None:
            self._check_known(values, offset, scale, cells)
        return offset, scale

    def in_box(
        self, box: Mapping[str, slice], values: NDArray[Any] | None = None
    ) -> tuple[Any, Any]:
        """Return offset and scale of a box of cells."""
        cells = np.meshgrid(
            *(np.arange(s.start, s.stop) for s in box.values()), indexing="ij", sparse=True
        )
        return self.at(dict(zip(box, cells, strict=True)), values)

    def scaled(
        self,
        values: NDArray[Any],
        first: Mapping[str, NDArray[Any]],
        window: Mapping[str, int],
        dtype: DTypeLike,
    ) -> NDArray[Any]:
        """Scale samples by the entry of each cell."""
        return scale_values(values, *self.at(self._cells(first, window), values), dtype)

    def unscaled(
        self,
        values: NDArray[Any],
        first: Mapping[str, NDArray[Any]],
        window: Mapping[str, int],
    ) -> NDArray[Any]:
        """Undo `scaled`."""
        return unscale_values(values, *self.at(self._cells(first, window)))

    def _check_known(
        self, values: NDArray[Any], offset: Any, scale: Any, cells: Mapping[str, NDArray[Any]]
    ) -> None:
        """Raise where a value has no statistics, and would become a gap."""
        unknown = np.isnan(offset) | np.isnan(scale)
        if not unknown.any():
            return
        lost = unknown & np.isfinite(values)
        if lost.any():
            at = tuple(axis[0] for axis in np.nonzero(lost))
            places = ", ".join(
                f"{dim} {int(np.broadcast_to(cells[dim], lost.shape)[at])}" for dim in self.dims
            )
            raise InvalidValueError(
                f"variable {self.name!r} has values without statistics to scale them, as in cell "
                f"{places}; compute the statistics there too, or over more dims"
            )

    def _cells(
        self, first: Mapping[str, NDArray[Any]], window: Mapping[str, int]
    ) -> dict[str, NDArray[Any]]:
        """Return the positions of all cells of some windows along each dim that the scaling has."""
        cells = {}
        for dim in self.dims:
            along = np.asarray(first[dim]).reshape(-1, *(1 for _ in window))
            if dim in window:
                shape = [1, *(n if d == dim else 1 for d, n in window.items())]
                along = along + np.arange(window[dim]).reshape(shape)
            cells[dim] = along
        return cells
