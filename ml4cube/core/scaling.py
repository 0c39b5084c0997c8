"""Scaling of a variable: one offset and scale, or those of each level, pixel or month.

Statistics with dims have many entries, such as twelve months. `match_entries` finds the entry of
each cell of a cube, and `Scaling` uses it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.axes import is_time, rounding_of, same_coordinate
from ml4cube.core.climatology import GROUPS, group_numbers
from ml4cube.core.distance.separation import nearest_on_axis
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.statistics import scale_parameters, scale_values, unscale_values
from ml4cube.core.sums.fields import FieldStatistics
from ml4cube.core.sums.mergeable import decoded, encoded
from ml4cube.core.sums.moments import VariableStatistics

Indices = NDArray[np.intp]
#: For each axis of the statistics: a dim of the cube, and the index on that axis for each cell
#: along this dim.
Entries = tuple[tuple[str, Indices], ...]
#: Attribute of a stored variable with its `Entries`.
ENTRIES_ATTR = "ml4cube_places"


def dated_dim(coords: Mapping[str, NDArray[Any]], dims: Sequence[Any]) -> str:
    """Return the time dim: the one whose coordinate holds dates."""
    dated = [name for name, values in coords.items() if is_time(values)]
    if len(dated) == 1 or "time" in dated:
        if "time" in dated:
            return "time"
        return dated[0]
    raise InvalidValueError(
        f"a climatology needs one dim with dates as coordinates, got {dated or 'none'} among "
        f"{list(dims)}; decode the times, or name the right dim 'time'"
    )


def match_entries(
    name: str,
    dims: Sequence[str],
    offset: Any,
    labels: Mapping[str, NDArray[Any]],
    sizes: Mapping[str, int],
    coords: Mapping[str, NDArray[Any]],
) -> Entries:
    """Return the entry of the statistics for every cell along the dims of a cube.

    `dims`, `offset` and `labels` belong to the statistics, `sizes` and `coords` to the cube.
    """
    wrong = []
    for axis, (dim, size) in enumerate(zip(dims, np.shape(offset), strict=True)):
        if dim in GROUPS and dim not in sizes:
            time_dim = dated_dim(coords, list(sizes))
            other_axes = tuple(other for other in range(len(dims)) if other != axis)
            is_empty = np.isnan(offset).all(axis=other_axes)
            wrong.append((time_dim, _groups_along(name, dim, time_dim, coords[time_dim], is_empty)))
        elif dim in sizes:
            wrong.append((dim, _entries_along(name, dim, size, labels, sizes[dim], coords)))
        else:
            raise InvalidValueError(
                f"statistics of {name!r} have dims {list(dims)}, the data have {list(sizes)}; "
                f"compute them for this cube, or without {dim!r}"
            )
    return tuple(wrong)


def encode_entries(entries: Entries) -> list[list[Any]]:
    """Return entries as JSON values."""
    return [[dim, encoded(entry_of_cell.astype(np.int64))] for dim, entry_of_cell in entries]


def decode_entries(encoded_entries: Sequence[Sequence[Any]]) -> Entries:
    """Return entries from the JSON values of `encode_entries`, which stores extend."""
    return tuple(
        (str(dim), decoded(encoded_dim).astype(np.intp)) for dim, encoded_dim, *_ in encoded_entries
    )


def _groups_along(
    name: str, by: str, time_dim: str, dates: NDArray[Any], is_empty: NDArray[np.bool_]
) -> Indices:
    """Return the group of each date; raise if it is an empty one."""
    if (dates != dates).any():
        raise InvalidValueError(f"{time_dim!r} must not have missing dates; drop those steps")
    groups = group_numbers(dates, by).astype(np.intp)
    if missing := [GROUPS[by][n].item() for n in np.unique(groups) if is_empty[n]]:
        raise InvalidValueError(
            f"no statistics of {by} {missing[:6]} for {name!r}; use a split with train cells "
            "there, or a coarser climatology"
        )
    return groups


def _entries_along(
    name: str,
    dim: str,
    size: int,
    labels: Mapping[str, NDArray[Any]],
    cells: int,
    coords: Mapping[str, NDArray[Any]],
) -> Indices:
    """Return the entry with the coordinate of each cell along one dim."""
    if dim not in labels or dim not in coords:
        if size != cells:
            raise InvalidValueError(
                f"statistics of {name!r} have length {size} along {dim!r}, the data {cells}; "
                "compute them for this cube"
            )
        return np.arange(cells)
    labels_of_dim, wanted = labels[dim], coords[dim]
    # Without looking for duplicates, which are at the same positions.
    if same_coordinate(labels_of_dim, wanted):
        return np.arange(cells)
    if labels_of_dim.dtype.kind == wanted.dtype.kind == "M":
        unit = np.result_type(labels_of_dim, wanted)
        labels_of_dim, wanted = labels_of_dim.astype(unit), wanted.astype(unit)
    entry_of_label = {label: entry for entry, label in enumerate(labels_of_dim.tolist())}
    if len(entry_of_label) < len(labels_of_dim):
        raise InvalidValueError(
            f"statistics of {name!r} have duplicate coordinates along {dim!r}, and the data have "
            "others; drop the duplicates"
        )
    if (
        labels_of_dim.dtype.kind == wanted.dtype.kind == "f"
    ):  # equal up to rounding, such as float32
        entries = nearest_on_axis(wanted.astype(np.float64), labels_of_dim.astype(np.float64))
        entries[~(np.abs(labels_of_dim[entries] - wanted) <= rounding_of(labels_of_dim))] = -1
    else:
        entries = np.array([entry_of_label.get(label, -1) for label in wanted.tolist()], np.intp)
    if (entries < 0).any():
        raise InvalidValueError(
            f"no statistics of {name!r} at {dim} {_first_labels(wanted[entries < 0])}, only at "
            f"{_first_labels(labels_of_dim)} ...; compute them there too"
        )
    return entries


def _first_labels(labels: NDArray[Any]) -> list[Any]:
    """Return the first coordinates, for a message."""
    few = labels[:3]
    return list(few.astype(str).tolist() if few.dtype.kind in "mM" else few.tolist())


@dataclass(frozen=True, eq=False)
class Scaling:
    """Offset and scale of a variable, in each cell of a cube; picklable.

    Both are one number, or an array with the entries of the statistics. `scale_fn` is only used to
    describe the scaling in messages.
    """

    name: str
    offset: Any
    scale: Any
    entries: Entries = ()
    scale_fn: str | None = None

    @classmethod
    def of(
        cls,
        name: str,
        stats: VariableStatistics,
        scale_fn: str,
        sizes: Mapping[str, int],
        coords: Mapping[str, NDArray[Any]],
    ) -> Self:
        """Match statistics with a cube."""
        offset, scale = scale_parameters(stats, scale_fn)
        entries: Entries = ()
        if isinstance(stats, FieldStatistics):
            entries = match_entries(name, stats.dims, offset, stats.labels, sizes, coords)
        return cls(name, offset, scale, entries, scale_fn)

    @property
    def dims(self) -> tuple[str, ...]:
        """Dims of the cube along which the scaling varies."""
        return tuple(dim for dim, _ in self.entries)

    @property
    def described(self) -> str:
        """Phrase for messages: "by mean 0.5 and std 2 to 3 along level", or "not at all"."""
        if self.scale_fn is None:
            return "not at all"
        offset_name, scale_name = _NAMES[self.scale_fn]
        dims_text = ""
        if self.entries:
            dims_text = f" along {', '.join(self.dims)}"
        return (
            f"by {offset_name} {_span(self.offset)} and {scale_name} {_span(self.scale)}{dims_text}"
        )

    def at(
        self, cells: Mapping[str, NDArray[Any]], values: NDArray[Any] | None = None
    ) -> tuple[Any, Any]:
        """Return offset and scale of cells, given by arrays of their index along each dim.

        Raise if one of the cells' `values` has none.
        """
        if not self.entries:
            return self.offset, self.scale
        index = tuple(entry_of_cell[cells[dim]] for dim, entry_of_cell in self.entries)
        offset, scale = self.offset[index], self.scale[index]
        if values is not None:
            self._check_known(values, offset, scale, cells)
        return offset, scale

    def in_box(
        self, box: Mapping[str, slice], values: NDArray[Any] | None = None
    ) -> tuple[Any, Any]:
        """Return offset and scale of a box of cells, as `at` does."""
        cells = np.ix_(
            *(np.arange(cells_of_dim.start, cells_of_dim.stop) for cells_of_dim in box.values())
        )
        return self.at(dict(zip(box, cells, strict=True)), values)

    def scaled(
        self,
        values: NDArray[Any],
        origins: Mapping[str, NDArray[Any]],
        window: Mapping[str, int],
    ) -> NDArray[Any]:
        """Scale samples (samples, *window); `origins` are the first cells of each by dim."""
        return scale_values(values, *self.at(self._cells(origins, window), values), values.dtype)

    def unscaled(
        self,
        values: NDArray[Any],
        origins: Mapping[str, NDArray[Any]],
        window: Mapping[str, int],
    ) -> NDArray[Any]:
        """Undo `scaled`."""
        return unscale_values(values, *self.at(self._cells(origins, window)))

    def _check_known(
        self, values: NDArray[Any], offset: Any, scale: Any, cells: Mapping[str, NDArray[Any]]
    ) -> None:
        """Raise where a value has no statistics, and would become a gap."""
        unknown = np.isnan(offset) | np.isnan(scale)
        if not unknown.any():
            return
        lost = unknown & np.isfinite(values)
        if lost.any():
            first = tuple(np.argwhere(lost)[0])
            cell = ", ".join(
                f"{dim} {int(np.broadcast_to(cells[dim], lost.shape)[first])}" for dim in self.dims
            )
            raise InvalidValueError(
                f"variable {self.name!r} has values without statistics to scale them, as in cell "
                f"{cell}; compute the statistics there too, or over more dims"
            )

    def _cells(
        self, origins: Mapping[str, NDArray[Any]], window: Mapping[str, int]
    ) -> dict[str, NDArray[Any]]:
        """Return the cells of samples along each of `dims`, to broadcast to (samples, *window)."""
        cells = {}
        for dim in self.dims:
            cells[dim] = np.asarray(origins[dim]).reshape(-1, *(1 for _ in window))
            if dim in window:
                in_window = dict.fromkeys(window, 1) | {dim: window[dim]}
                cells[dim] = cells[dim] + np.arange(window[dim]).reshape(*in_window.values())
        return cells


# Names of offset and scale, for messages.
_NAMES = {
    "standardize": ("mean", "std"),
    "normalize": ("least value", "range"),
    "robust": ("median", "interquartile range"),
}


def _span(numbers: Any) -> str:
    """Return a number, or the least and greatest of many."""
    low, high = np.nanmin(numbers), np.nanmax(numbers)
    if low == high:
        return f"{low:.6g}"
    return f"{low:.6g} to {high:.6g}"
