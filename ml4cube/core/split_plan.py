"""SplitPlan: the part of every block, computed once and then only looked up."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.display import Summarized, Summary, Table, counted
from ml4cube.core.distance.reach import Reach, cells_near
from ml4cube.core.errors import EmptyPartError, InvalidTypeError, InvalidValueError
from ml4cube.core.grid import Grid
from ml4cube.core.partition import partition, shuffled_positions, starts_in_order

TRAIN = 1
TEST = 0
VAL = 2
EXCLUDED = 255
PARTS = {"train": TRAIN, "test": TEST, "val": VAL}
HELD_OUT = (TEST, VAL)

# Fractions of train and val that add up to 1 within this, such as those of float32, leave no test
# part.
_ROUNDING = 1e-7

Labels = NDArray[np.uint8]
# Distances between parts by dim: cells, or a text such as "30D" or "150km".
Buffer = tuple[tuple[str, int | str], ...]
Positions = Mapping[str, NDArray[np.int64]]


def check_fractions(
    split: float, val: float = 0.0, names: tuple[str, str] = ("split", "val")
) -> dict[str, float]:
    """Return the fraction of each part, without parts of 0; test gets the rest, the sum is 1."""
    for name, value in zip(names, (split, val), strict=True):
        if isinstance(value, bool) or not isinstance(value, int | float | np.number):
            raise InvalidTypeError(f"{name} must be a number from 0 to 1, got {value!r}")
        if not 0 <= value <= 1:
            raise InvalidValueError(f"{name} must be from 0 to 1, got {value!r}")
    fractions = {"train": float(split), "val": float(val)}
    total = sum(fractions.values())
    if total > 1 + _ROUNDING:
        raise InvalidValueError(
            f"{names[0]} + {names[1]} must be at most 1 (the rest is the test part), got {split} + "
            f"{val} = {total:.9g}"
        )
    if total > 1 - _ROUNDING:
        fractions = {part: fraction / total for part, fraction in fractions.items()}
    else:  # in this order, because 1 - given may differ from stored recipes in the last digit
        fractions["test"] = 1 - float(split) - float(val)
    return {part: fraction for part, fraction in fractions.items() if fraction > 0}


@dataclass(frozen=True, repr=False)
class SplitPlan(Summarized):
    """The part of every block of a cube, with the settings that made it.

    Make one with `SplitPlan.assign`. The dims of `grid` are sorted by name, so that a plan does not
    depend on the order of the cube's dims.

    Parameters
    ----------
    grid : Grid
        The blocks.
    labels : bytes
        One uint8 for each block, in the grid's order: 1 train, 0 test, 2 val, 255 excluded.
    seed : int, optional
        Seed of the random order.
    fractions : tuple of (str, float)
        Requested fractions.
    buffer : tuple of (str, int or str)
        Distance between train and the other parts: cells, a time ("30D") or a distance on the
        sphere ("150km") by dim. Train cells nearer than that are excluded.
    cyclic : tuple of str
        Dims along which the first cell follows the last.
    note : str, optional
        Further remarks on how the labels were made.

    Examples
    --------
    >>> grid = Grid.blocks({"lat": 4, "time": 10}, {"time": 2})
    >>> plan = SplitPlan.assign(grid, [8] * 5, {"train": 0.8, "test": 0.2}, seed=1)
    >>> plan.table.tolist()
    [[1, 1, 0, 1, 1]]
    >>> plan == SplitPlan.from_json(plan.to_json())
    True
    """

    grid: Grid
    labels: bytes
    seed: int | None = None
    fractions: tuple[tuple[str, float], ...] = ()
    buffer: Buffer = ()
    cyclic: tuple[str, ...] = ()
    note: str | None = None

    def __post_init__(self) -> None:
        """Check the order of dims and the labels."""
        if list(self.grid.dims) != sorted(self.grid.dims):
            raise InvalidValueError(f"dims of a plan must be sorted by name, got {self.grid.dims}")
        if len(self.labels) != len(self.grid):
            raise InvalidValueError(
                f"a plan of {len(self.grid)} blocks needs as many labels, got {len(self.labels)}"
            )
        occurring = np.bincount(np.frombuffer(self.labels, dtype=np.uint8), minlength=256)
        if unknown := set(np.flatnonzero(occurring).tolist()) - {TRAIN, TEST, VAL, EXCLUDED}:
            raise InvalidValueError(f"labels must be 0, 1, 2 or 255, got {sorted(unknown)}")

    @classmethod
    def assign(
        cls,
        grid: Grid,
        weights: ArrayLike,
        fractions: Mapping[str, float],
        seed: int,
        buffer: Buffer = (),
        cyclic: tuple[str, ...] = (),
        note: str | None = None,
        classes: NDArray[np.float64] | None = None,
    ) -> SplitPlan:
        """Assign blocks to parts by their weight, at random.

        Parameters
        ----------
        grid : Grid
            The blocks; dims sorted by name.
        weights : array_like of float
            Valid cells of each block, in the grid's order.
        fractions : mapping of str to float
            Fraction of "train", "test" and "val"; sums to 1, a part of 0 gets no block.
        seed : int
            Any integer.
        buffer, cyclic, note : object
            See `SplitPlan`; they do not change which block gets which part.
        classes : ndarray of float, shape (blocks, classes), optional
            Valid cells of each block by class; each class is split by `fractions` too.

        Returns
        -------
        SplitPlan
            The plan, as near to `fractions` as whole blocks allow.

        Raises
        ------
        EmptyPartError
            If a requested part would get no block with valid cells.
        """
        wanted = {part: float(f) for part, f in fractions.items() if f > 0}
        parts = partition(weights, list(wanted.values()), seed, classes)
        return cls(
            grid=grid,
            labels=labels_of(wanted)[parts].tobytes(),
            seed=int(seed),
            fractions=tuple(wanted.items()),
            buffer=buffer,
            cyclic=cyclic,
            note=note,
        )

    @classmethod
    def in_order(cls, grid: Grid, weights: ArrayLike, fractions: Mapping[str, float]) -> SplitPlan:
        """Cut a sequence of blocks into parts, in the order in which `fractions` names them.

        Parameters
        ----------
        grid : Grid
            Blocks along one dim.
        weights : array_like of float
            Valid cells of each block.
        fractions : mapping of str to float
            Fraction of each part, in order; sums to 1.

        Returns
        -------
        SplitPlan
            The plan, as near to `fractions` as whole blocks allow.

        Raises
        ------
        EmptyPartError
            If a requested part would get no block with valid cells.
        """
        wanted = {part: float(f) for part, f in fractions.items() if f > 0}
        starts = starts_in_order(np.asarray(weights, dtype=np.float64), list(wanted.values()))
        parts = np.searchsorted(starts, np.arange(len(grid)), side="right")
        return cls(grid, labels_of(wanted)[parts].tobytes(), None, tuple(wanted.items()))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle as JSON, whose labels are compressed: a map of regions has millions."""
        return SplitPlan.from_json, (self.to_json(),)

    def _summary(self) -> Summary:
        """Return the blocks of every part, and the settings that made them."""
        numbers = np.bincount(np.frombuffer(self.labels, dtype=np.uint8), minlength=256)
        asked_for = {part: f"{fraction:.1%}" for part, fraction in self.fractions}
        rows = [
            (part, numbers[label], f"{numbers[label] / len(self.grid):.1%}", asked_for.get(part))
            for part, label in {**PARTS, "excluded": EXCLUDED}.items()
            if numbers[label]
        ]
        facts = {
            "Cube": self.cube_shape,
            "Block": dict(zip(self.grid.dims, self.grid.tile, strict=True)),
            "Buffer": dict(self.buffer),
            "Cyclic": self.cyclic,
            "Seed": None if self.seed is None else str(self.seed),
            "Note": self.note,
        }
        parts = Table(("", "blocks", "of all", "asked for"), rows)
        return Summary(counted(len(self.grid), "block"), facts, {"Parts": parts})

    @property
    def cube_shape(self) -> dict[str, int]:
        """Cells of the cube along each dim, sorted by name."""
        return dict(zip(self.grid.dims, self.grid.shape, strict=True))

    @property
    def table(self) -> Labels:
        """Label of each block, read-only, in the shape of ``grid.counts``."""
        return np.frombuffer(self.labels, dtype=np.uint8).reshape(self.grid.counts)

    def label_cells(self, positions: Positions, reaches: Sequence[Reach] = ()) -> Labels:
        """Look up the labels of cells; any box of cells has the same labels as in the whole.

        Parameters
        ----------
        positions : mapping of str to ndarray of int
            For each dim of the grid, the cells to look at.
        reaches : sequence of AxisReach or SphereReach
            The buffer, for the cube's coordinates.

        Returns
        -------
        ndarray of uint8
            One label per cell, axes in the order of ``grid.dims``.
        """
        table = self.table
        block_of_cells = (self.grid.tile_of_cells(dim, positions[dim]) for dim in self.grid.dims)
        # Along each dim: the blocks that occur, and for each cell the index of its block in these.
        along_dims = [np.unique(blocks, return_inverse=True) for blocks in block_of_cells]
        labels = table[np.ix_(*(blocks for blocks, _ in along_dims))]
        # Every block was looked up once. Repeat whole rows and planes, from the last axis on.
        for axis, (_, block_of_cell) in reversed(list(enumerate(along_dims))):
            labels = labels.take(block_of_cell, axis)
        if reaches:
            near = cells_near(np.isin(table, HELD_OUT), self.grid, reaches, positions)
            labels[near & (labels == TRAIN)] = EXCLUDED
        return labels

    def to_json(self) -> str:
        """Write the plan as JSON; `from_json` reads it back.

        Returns
        -------
        str
            A JSON object.
        """
        raw = {
            "kind": "blocks",
            "grid": dataclasses.asdict(self.grid),
            "labels": base64.b64encode(zlib.compress(self.labels, 9)).decode("ascii"),
            "seed": self.seed,
            "fractions": dict(self.fractions),
            "buffer": dict(self.buffer),
            "cyclic": list(self.cyclic),
        }
        if self.note is not None:
            raw["note"] = self.note
        return json.dumps(raw)

    @classmethod
    def from_json(cls, text: str) -> SplitPlan:
        """Read a plan that `to_json` wrote.

        Parameters
        ----------
        text : str
            A JSON object.

        Returns
        -------
        SplitPlan
            Equal to the one that was written.

        Raises
        ------
        InvalidValueError
            If the text holds no plan.
        """
        raw = json.loads(text)
        with _checked_reading("a split plan of blocks"):
            grid = Grid.from_json(json.dumps(raw["grid"]))
            # At most one byte more than blocks: a damaged recipe must not fill the memory.
            compressed = base64.b64decode(raw["labels"])
            labels = zlib.decompressobj().decompress(compressed, len(grid) + 1)
            return cls(
                grid=grid,
                labels=labels,
                seed=raw["seed"],
                fractions=tuple(raw["fractions"].items()),
                buffer=tuple(raw["buffer"].items()),
                cyclic=tuple(raw["cyclic"]),
                note=raw.get("note"),
            )


@dataclass(frozen=True)
class CellPlan:
    """The part of every single cell, drawn at random: a seeded permutation of cell ids.

    Parameters
    ----------
    shape : tuple of (str, int)
        Dims, sorted by name, and lengths.
    fractions : tuple of (str, float)
        Fraction of each part; sums to 1.
    seed : int
        Any integer.

    Examples
    --------
    >>> plan = CellPlan((("lat", 2), ("time", 5)), (("train", 0.8), ("test", 0.2)), seed=0)
    >>> int((plan.label_cells({"lat": np.arange(2), "time": np.arange(5)}) == TRAIN).sum())
    8
    >>> plan == CellPlan.from_json(plan.to_json())
    True
    """

    shape: tuple[tuple[str, int], ...]
    fractions: tuple[tuple[str, float], ...]
    seed: int

    def __post_init__(self) -> None:
        """Check the order of dims, and that no part is empty."""
        if list(self.shape) != sorted(self.shape):
            raise InvalidValueError(f"dims of a plan must be sorted by name, got {self.shape}")
        if self.size < len(self.fractions):
            raise EmptyPartError(
                f"{len(self.fractions)} parts need as many cells, got a cube of {self.size}"
            )

    @property
    def cube_shape(self) -> dict[str, int]:
        """Cells of the cube along each dim, sorted by name."""
        return dict(self.shape)

    @property
    def size(self) -> int:
        """Cells in all."""
        return math.prod(n for _, n in self.shape)

    def label_cells(self, positions: Positions, reaches: Sequence[Reach] = ()) -> Labels:
        """Label cells; any box of cells has the same labels as in the whole.

        Parameters
        ----------
        positions : mapping of str to ndarray of int
            For each dim, the cells to look at.
        reaches : sequence of AxisReach or SphereReach
            Ignored, because a plan of cells has no buffer.

        Returns
        -------
        ndarray of uint8
            One label per cell, axes in the order of `shape`.
        """
        ids = np.zeros((), dtype=np.int64)
        for dim, n in self.shape:
            ids = ids[..., None] * n + positions[dim].astype(np.int64)
        shuffled = shuffled_positions(ids, self.size, self.seed)
        ends = np.asarray(self._ends(), dtype=np.uint64)
        parts = np.searchsorted(ends, shuffled, side="right")
        return labels_of(dict(self.fractions))[parts]

    def _ends(self) -> list[int]:
        """Return where each part ends in the shuffled cells; every part has at least one cell."""
        ends = [0]
        total = 0.0
        for number, (_, fraction) in enumerate(self.fractions, 1):
            total += fraction
            end = min(round(total * self.size), self.size - len(self.fractions) + number)
            ends.append(max(end, ends[-1] + 1))
        return [*ends[1:-1], self.size]

    def to_json(self) -> str:
        """Write the plan as JSON; `from_json` reads it back.

        Returns
        -------
        str
            A JSON object.
        """
        raw: dict[str, Any] = {"kind": "cells", "shape": dict(self.shape)}
        return json.dumps({**raw, "fractions": dict(self.fractions), "seed": self.seed})

    @classmethod
    def from_json(cls, text: str) -> CellPlan:
        """Read a plan that `to_json` wrote.

        Parameters
        ----------
        text : str
            A JSON object.

        Returns
        -------
        CellPlan
            Equal to the one that was written.

        Raises
        ------
        InvalidValueError
            If the text holds no plan.
        """
        raw = json.loads(text)
        with _checked_reading("a split plan of cells"):
            return cls(tuple(raw["shape"].items()), tuple(raw["fractions"].items()), raw["seed"])


def labels_of(parts: Iterable[str]) -> Labels:
    """Return the label of each part."""
    return np.array([PARTS[part] for part in parts], dtype=np.uint8)


@contextlib.contextmanager
def _checked_reading(what: str) -> Iterator[None]:
    """Turn the errors of reading a damaged plan into one clear error."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, zlib.error, ValueError) as error:
        raise InvalidValueError(f"this is not {what}: {error!r}; make the split again") from error


def label_box(
    *positions: NDArray[np.int64],
    dims: tuple[str, ...],
    plan: SplitPlan | CellPlan,
    reaches: tuple[Reach, ...] = (),
) -> Labels:
    """Look up the labels of a box of cells, in the order of a cube's dims."""
    labels = plan.label_cells(dict(zip(dims, positions, strict=True)), reaches)
    sorted_dims = sorted(dims)
    return labels.transpose([sorted_dims.index(dim) for dim in dims])
