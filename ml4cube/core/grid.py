"""Tilings of named dims: blocks and windows, their ids, indices and slices.

Sizes are always matched by name. Inside the package they are `{dim: cells}` dicts, which
`parse_sizes` and `parse_overlap` make from the user's arguments.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_whole, listed

#: A number for each dim as a user writes it, such as ``{"time": 10}`` or ``[("time", 10)]``.
SizesLike = Mapping[str, Any] | Iterable[tuple[str, Any]]


def parse_pairs(argument: str, sizes: SizesLike, dims: Sequence[str]) -> dict[str, Any]:
    """Return ``{dim: value}`` of pairs or a mapping; raise for unknown and repeated dims."""
    items: Iterable[Any] = sizes
    if isinstance(sizes, Mapping):
        items = sizes.items()
    try:
        pairs = [(dim, value) for dim, value in items]
    except (TypeError, ValueError):
        raise InvalidTypeError(
            f"{argument} must be a mapping such as {{{dims[0]!r}: 10}} or a list of pairs, got "
            f"{sizes!r}"
        ) from None
    result: dict[str, Any] = {}
    for dim, value in pairs:
        if dim not in dims:
            raise InvalidValueError(f"{argument}: unknown dim {dim!r}; the cube has {listed(dims)}")
        if dim in result:
            raise InvalidValueError(f"{argument} has dim {dim!r} twice")
        result[dim] = value
    return result


def parse_sizes(argument: str, sizes: SizesLike, shape: Mapping[str, int]) -> dict[str, int]:
    """Return ``{dim: cells}`` in the order of `shape`, each from 1 to the dim's length."""
    pairs = parse_pairs(argument, sizes, tuple(shape))
    for dim, size in pairs.items():
        check_whole(f"{argument}[{dim!r}]", size)
        if not 1 <= size <= shape[dim]:
            raise InvalidValueError(
                f"{argument}[{dim!r}] must be from 1 to {shape[dim]}, the length of the dim, "
                f"got {size}"
            )
    return {dim: int(pairs[dim]) for dim in shape if dim in pairs}


def parse_overlap(
    argument: str, overlap: SizesLike | float | None, size: Mapping[str, int]
) -> dict[str, int]:
    """Return overlaps in cells, from fractions of a window by dim, or one fraction for all dims."""
    if overlap is None:
        overlap = {}
    elif isinstance(overlap, int | float | np.number):
        overlap = dict.fromkeys(size, overlap)
    cells = dict.fromkeys(size, 0)
    for dim, fraction in parse_pairs(argument, overlap, tuple(size)).items():
        if isinstance(fraction, bool) or not isinstance(fraction, int | float | np.number):
            raise InvalidTypeError(
                f"{argument}[{dim!r}] must be a number from 0 to below 1, got {fraction!r}"
            )
        if not 0 <= fraction < 1:
            raise InvalidValueError(
                f"{argument}[{dim!r}] must be a fraction of the window from 0 to below 1, "
                f"got {fraction}"
            )
        n = size[dim]
        if fraction > 0 and n > 1:
            # Rounded half up (round() goes to even); at most n - 1, so that windows advance.
            cells[dim] = min(max(math.floor(float(fraction) * n + 0.5), 1), n - 1)
    return cells


def cell_ids(shape: Mapping[str, int], box: Mapping[str, slice]) -> NDArray[np.uint64]:
    """Return the id of each cell of a box, one axis per dim of `box`, in its order.

    A cell's id is its row-major position in the whole cube, with dims sorted by name.
    """
    ids = np.zeros((), np.uint64)
    for dim, cells in box.items():
        step = np.uint64(math.prod(n for other, n in shape.items() if other > dim))
        ids = np.add.outer(ids, np.arange(cells.start, cells.stop, dtype=np.uint64) * step)
    return ids


@dataclass(frozen=True)
class Block:
    """One tile of a `Grid`: its id, index and cells.

    Parameters
    ----------
    id : int
        Position in the grid's order (row-major over `dims`).
    dims : tuple of str
        Dims of the grid.
    index : tuple of int
        Position along each dim, in tiles.
    start, stop : tuple of int
        First cell, and one past the last, along each dim.

    Examples
    --------
    >>> Grid.blocks({"time": 5, "lat": 4}, {"time": 2}).block(2)
    Block(id=2, dims=('time', 'lat'), index=(2, 0), start=(4, 0), stop=(5, 4))
    """

    id: int
    dims: tuple[str, ...]
    index: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def slices(self) -> dict[str, slice]:
        """Slices for ``ds.isel(block.slices)``."""
        return {d: slice(a, b) for d, a, b in zip(self.dims, self.start, self.stop, strict=True)}

    @property
    def shape(self) -> dict[str, int]:
        """Cells along each dim."""
        return {d: b - a for d, a, b in zip(self.dims, self.start, self.stop, strict=True)}

    @property
    def size(self) -> int:
        """Number of cells."""
        return math.prod(self.shape.values())


@dataclass(frozen=True)
class Grid:
    """A regular tiling of a box of named dims; tiles have ids, indices and slices.

    Make one with `Grid.blocks` (the tiles cover every cell, the last along a dim may be
    smaller) or `Grid.windows` (every tile is whole, tiles may overlap, cells past the last
    whole tile belong to none).

    Parameters
    ----------
    dims : tuple of str
        Names, in the order of ids (last dim fastest).
    shape : tuple of int
        Cells along each dim.
    tile : tuple of int
        Cells of a tile along each dim.
    stride : tuple of int
        Cells between the starts of neighbouring tiles.
    ragged : bool
        Whether the last tile along a dim may be smaller.

    Examples
    --------
    >>> grid = Grid.blocks({"time": 5, "lat": 4}, {"time": 2, "lat": 2})
    >>> grid.counts, len(grid)
    ((3, 2), 6)
    >>> grid.block(5).slices
    {'time': slice(4, 5, None), 'lat': slice(2, 4, None)}
    >>> len(Grid.windows({"time": 5, "lat": 4}, {"time": 2, "lat": 2}, {"lat": 1}))
    6
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    tile: tuple[int, ...]
    stride: tuple[int, ...]
    ragged: bool = True

    def __post_init__(self) -> None:
        """Check that lengths agree, dims are unique and tiles fit."""
        if isinstance(self.dims, str):
            raise InvalidTypeError(f"dims must be a tuple of names, got {self.dims!r}")
        lengths = {len(self.dims), len(self.shape), len(self.tile), len(self.stride)}
        if len(lengths) != 1 or len(set(self.dims)) != len(self.dims):
            raise InvalidValueError(
                f"a Grid needs one shape, tile and stride per dim, got dims={self.dims}, "
                f"shape={self.shape}, tile={self.tile}, stride={self.stride}"
            )
        for dim, n, tile, stride in zip(self.dims, self.shape, self.tile, self.stride, strict=True):
            if n < 1 or not 1 <= tile <= n or stride < 1 or (self.ragged and stride != tile):
                raise InvalidValueError(
                    f"tiles of {tile} cells with stride {stride} do not fit {dim!r} of {n} cells"
                )

    @classmethod
    def blocks(cls, shape: Mapping[str, int], size: Mapping[str, int]) -> Grid:
        """Make a grid of blocks that cover `shape`; a dim missing from `size` is not cut.

        Parameters
        ----------
        shape : mapping of str to int
            Dims and lengths.
        size : mapping of str to int
            Block size along the dims to cut.

        Returns
        -------
        Grid
            A grid whose last blocks may be smaller.
        """
        tile = tuple(size.get(dim, n) for dim, n in shape.items())
        return cls(tuple(shape), tuple(shape.values()), tile, tile)

    @classmethod
    def windows(
        cls,
        shape: Mapping[str, int],
        size: Mapping[str, int],
        overlap: Mapping[str, int] | None = None,
    ) -> Grid:
        """Make a grid of whole windows in `shape`; a dim missing from `size` has windows of 1.

        Parameters
        ----------
        shape : mapping of str to int
            Dims and lengths.
        size : mapping of str to int
            Window size along each dim.
        overlap : mapping of str to int, optional
            Cells that neighbours share along each dim; fewer than the window's size.

        Returns
        -------
        Grid
            A grid of equal windows that starts at the first cell.
        """
        shared = overlap or {}
        tile = tuple(size.get(dim, 1) for dim in shape)
        stride = tuple(n - shared.get(dim, 0) for dim, n in zip(shape, tile, strict=True))
        return cls(tuple(shape), tuple(shape.values()), tile, stride, ragged=False)

    @property
    def counts(self) -> tuple[int, ...]:
        """Tiles along each dim."""
        if self.ragged:
            return tuple(-(-n // s) for n, s in zip(self.shape, self.stride, strict=True))
        return tuple(
            (n - t) // s + 1 for n, t, s in zip(self.shape, self.tile, self.stride, strict=True)
        )

    def __len__(self) -> int:
        """Number of tiles."""
        return math.prod(self.counts)

    def __iter__(self) -> Iterator[Block]:
        """Yield every tile, in the order of ids."""
        return (self.block(i) for i in range(len(self)))

    def index(self, id: int) -> tuple[int, ...]:
        """Return the index of tile `id` along each dim.

        Parameters
        ----------
        id : int
            From 0 to ``len(grid) - 1``.

        Returns
        -------
        tuple of int
            One position per dim.

        Raises
        ------
        InvalidValueError
            If the grid has no such tile.
        """
        counts = self.counts
        if not 0 <= id < math.prod(counts):
            raise InvalidValueError(f"tile must be from 0 to {len(self) - 1}, got {id}")
        return tuple(int(position) for position in np.unravel_index(id, counts))

    def id(self, index: Sequence[int]) -> int:
        """Return the id of the tile at `index`.

        Parameters
        ----------
        index : sequence of int
            Position along each dim, in tiles.

        Returns
        -------
        int
            The tile's id.

        Raises
        ------
        InvalidValueError
            If the position lies outside the grid.
        """
        if len(index) != len(self.dims) or any(
            not 0 <= i < n for i, n in zip(index, self.counts, strict=True)
        ):
            raise InvalidValueError(f"index {tuple(index)} is outside a grid of {self.counts}")
        result = 0
        for i, n in zip(index, self.counts, strict=True):
            result = result * n + i
        return result

    def block(self, id: int) -> Block:
        """Return tile `id`.

        Parameters
        ----------
        id : int
            From 0 to ``len(grid) - 1``.

        Returns
        -------
        Block
            Its index and its cells.
        """
        index = self.index(id)
        start = tuple(i * s for i, s in zip(index, self.stride, strict=True))
        stop = tuple(min(a + t, n) for a, t, n in zip(start, self.tile, self.shape, strict=True))
        return Block(id, self.dims, index, start, stop)

    def tile_of_cells(self, dim: str, cells: NDArray[np.intp] | None = None) -> NDArray[np.intp]:
        """Return the index of the tile of each cell along `dim`, for tilings without overlap.

        Parameters
        ----------
        dim : str
            One of `dims`.
        cells : ndarray of int, optional
            Cells along `dim`; all of them if not given.

        Returns
        -------
        ndarray of int, shape (cells,)
            Tile index of each cell.
        """
        axis = self.dims.index(dim)
        if cells is None:
            cells = np.arange(self.shape[axis])
        return cells // self.stride[axis]

    def to_json(self) -> str:
        """Return the grid as JSON.

        Returns
        -------
        str
            A JSON object.
        """
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Grid:
        """Read a grid from the JSON of `to_json`.

        Parameters
        ----------
        text : str
            A JSON object.

        Returns
        -------
        Grid
            Equal to the one that was written.
        """
        raw = json.loads(text)
        fields = {name: tuple(raw[name]) for name in ("dims", "shape", "tile", "stride")}
        return cls(**fields, ragged=bool(raw["ragged"]))
