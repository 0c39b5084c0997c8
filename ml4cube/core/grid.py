"""Tilings of named dims: blocks and windows, their ids, indices and slices.

Sizes are always matched by name. Inside the package they are plain `{dim: cells}` dicts;
`parse_sizes` and `parse_overlap` turn what a user wrote into them once, at the door.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError

SizesLike = Mapping[str, Any] | Iterable[tuple[str, Any]]


def parse_pairs(argument: str, given: SizesLike, dims: Sequence[str]) -> dict[str, Any]:
    """Turn pairs or a mapping into a dict, and refuse unknown and repeated dims.

    Parameters
    ----------
    argument : str
        Name of the argument, for messages.
    given : mapping or iterable of (str, value)
        ``{"time": 10}`` or ``[("time", 10)]``.
    dims : sequence of str
        Dims of the cube.

    Returns
    -------
    dict
        ``{dim: value}`` in the order given.

    Raises
    ------
    InvalidTypeError
        If `given` is neither a mapping nor pairs.
    InvalidValueError
        If a dim is unknown or named twice.
    """
    if isinstance(given, Mapping):
        pairs = list(given.items())
    else:
        try:
            pairs = [(dim, value) for dim, value in given]
        except (TypeError, ValueError):
            raise InvalidTypeError(
                f"{argument}={given!r} is neither a mapping nor a list of pairs; "
                f"write {{{dims[0]!r}: 10}} or [({dims[0]!r}, 10)]"
            ) from None
    result: dict[str, Any] = {}
    for dim, value in pairs:
        if dim not in dims:
            raise InvalidValueError(
                f"{argument} has dim {dim!r}, the cube has {tuple(dims)}; rename or drop it"
            )
        if dim in result:
            raise InvalidValueError(f"{argument} names dim {dim!r} twice; keep one of them")
        result[dim] = value
    return result


def parse_sizes(argument: str, given: SizesLike, shape: Mapping[str, int]) -> dict[str, int]:
    """Turn sizes as a user writes them into ``{dim: cells}``, each from 1 to the dim's length.

    Parameters
    ----------
    argument : str
        Name of the argument, for messages.
    given : mapping or iterable of (str, int)
        ``{"time": 10}`` or ``[("time", 10)]``; any order, any subset of the dims.
    shape : mapping of str to int
        The cube's dims and lengths.

    Returns
    -------
    dict of str to int
        The dims that were given, in the order of `shape`.

    Raises
    ------
    InvalidTypeError
        If a size is not an integer, or `given` is neither a mapping nor pairs.
    InvalidValueError
        If a dim is unknown or repeated, or a size is < 1 or longer than its dim.

    Examples
    --------
    >>> parse_sizes("block_size", [("lon", 4), ("time", 2)], {"time": 10, "lat": 8, "lon": 8})
    {'time': 2, 'lon': 4}
    """
    pairs = parse_pairs(argument, given, tuple(shape))
    for dim, size in pairs.items():
        if isinstance(size, bool) or not isinstance(size, int | np.integer):
            raise InvalidTypeError(
                f"{argument} of {dim!r} is {size!r}, a {type(size).__name__}; give whole cells"
            )
        if not 1 <= size <= shape[dim]:
            raise InvalidValueError(
                f"{argument} of {dim!r} is {size}, the cube has {shape[dim]} cells along it; "
                f"choose 1 to {shape[dim]}"
            )
    return {dim: int(pairs[dim]) for dim in shape if dim in pairs}


def parse_overlap(
    argument: str, given: SizesLike | float | None, size: Mapping[str, int]
) -> dict[str, int]:
    """Turn overlaps given as fractions of a window into cells.

    A fraction f of n cells is round(f * n) cells, at least 1 where f > 0 and n > 1, and at
    most n - 1, so that windows always advance.

    Parameters
    ----------
    argument : str
        Name of the argument, for messages.
    given : mapping, iterable of (str, float), float or None
        Fraction from 0 up to, not including, 1 for each dim; a single number counts for every
        dim; None is 0.
    size : mapping of str to int
        Window size in cells, for every dim of the cube.

    Returns
    -------
    dict of str to int
        Overlap in cells for every dim of `size`.

    Raises
    ------
    InvalidTypeError
        If a fraction is not a number.
    InvalidValueError
        If a dim is unknown or repeated, or a fraction is outside [0, 1).

    Examples
    --------
    >>> parse_overlap("overlap", [("lat", 0.33)], {"time": 1, "lat": 3})
    {'time': 0, 'lat': 1}
    """
    if given is None:
        pairs: dict[str, Any] = {}
    elif isinstance(given, int | float | np.number):
        pairs = dict.fromkeys(size, given)
    else:
        pairs = parse_pairs(argument, given, tuple(size))
    cells = dict.fromkeys(size, 0)
    for dim, fraction in pairs.items():
        if isinstance(fraction, bool) or not isinstance(fraction, int | float | np.number):
            raise InvalidTypeError(
                f"{argument} of {dim!r} is {fraction!r}, a {type(fraction).__name__}; "
                "give a fraction from 0 to below 1"
            )
        if not 0 <= fraction < 1:
            raise InvalidValueError(
                f"{argument} of {dim!r} is {fraction}; give a fraction from 0 to below 1 "
                "(0.5 lets windows share half their cells)"
            )
        n = size[dim]
        if fraction > 0 and n > 1:
            # floor(x + 0.5): half goes up, as a person rounds; Python's round() goes to even
            cells[dim] = min(max(math.floor(float(fraction) * n + 0.5), 1), n - 1)
    return cells


@dataclass(frozen=True)
class Block:
    """One tile of a `Grid`: where it stands and which cells it covers.

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
        """Cells in all."""
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
        Names, in the order that ids count (last dim fastest).
    shape : tuple of int
        Cells along each dim.
    tile : tuple of int
        Cells of a tile along each dim.
    stride : tuple of int
        Cells from one tile's start to the next one's.
    ragged : bool
        Whether a smaller last tile stands where the tiling does not come out even.

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
        """Refuse lengths that differ, repeated dims and sizes that no tiling can have."""
        if isinstance(self.dims, str):
            raise InvalidTypeError(f"dims={self.dims!r} is one string; give a tuple of names")
        lengths = {len(self.dims), len(self.shape), len(self.tile), len(self.stride)}
        if len(lengths) != 1 or len(set(self.dims)) != len(self.dims):
            raise InvalidValueError(
                f"a Grid needs one shape, tile and stride per dim, found dims={self.dims}, "
                f"shape={self.shape}, tile={self.tile}, stride={self.stride}"
            )
        for dim, n, tile, stride in zip(self.dims, self.shape, self.tile, self.stride, strict=True):
            if n < 1 or not 1 <= tile <= n or stride < 1 or (self.ragged and stride != tile):
                raise InvalidValueError(
                    f"along {dim!r} tiles of {tile} cells every {stride} do not fit {n} cells"
                )

    @classmethod
    def blocks(cls, shape: Mapping[str, int], size: Mapping[str, int]) -> Grid:
        """Tile every cell of `shape`; a dim that is missing from `size` is not cut.

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
        """Lay whole windows over `shape`; a dim that is missing from `size` has windows of 1.

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
        """Tiles in all."""
        return math.prod(self.counts)

    def __iter__(self) -> Iterator[Block]:
        """Every tile, in the order of ids."""
        return (self.block(i) for i in range(len(self)))

    def index(self, id: int) -> tuple[int, ...]:
        """Position of tile `id` along each dim, in tiles.

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
        if not 0 <= id < len(self):
            raise InvalidValueError(f"tile {id} is not in a grid of {len(self)} tiles")
        position: list[int] = []
        for count in reversed(self.counts):
            id, rest = divmod(id, count)
            position.append(rest)
        return tuple(reversed(position))

    def id(self, index: Sequence[int]) -> int:
        """Id of the tile at `index`; the inverse of `index`.

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
        """Tile `id` with the cells it covers.

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
        """Index of the tile that each cell along `dim` belongs to, for tilings without overlap.

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
        cells = np.arange(self.shape[axis]) if cells is None else cells
        return cells // self.stride[axis]

    def to_json(self) -> str:
        """Write the grid as JSON; `from_json` reads it back.

        Returns
        -------
        str
            A JSON object.
        """
        return json.dumps(
            {
                "dims": self.dims,
                "shape": self.shape,
                "tile": self.tile,
                "stride": self.stride,
                "ragged": self.ragged,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> Grid:
        """Read a grid that `to_json` wrote.

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
