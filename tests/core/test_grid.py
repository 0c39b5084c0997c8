"""Grid and the parsing of sizes, against brute force."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.grid import Grid, parse_overlap, parse_sizes
from tests import oracle

NAMES = ("time", "lat", "lon", "level", "member")


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Blocks and windows over 1 to 5 dims."""
    n_dims = draw(st.integers(1, 5))
    names = draw(st.permutations(NAMES))[:n_dims]
    shape = {name: draw(st.integers(1, 7 if n_dims < 4 else 4)) for name in names}
    cut = draw(st.lists(st.sampled_from(names), unique=True))
    size = {name: draw(st.integers(1, shape[name])) for name in cut}
    if draw(st.booleans()):
        return Grid.blocks(shape, size)
    overlap = {name: draw(st.integers(0, n - 1)) for name, n in size.items()}
    return Grid.windows(shape, size, overlap)


@given(grids())
def test_tiles_are_those_of_brute_force(grid: Grid) -> None:
    expected = oracle.tiles(grid.shape, grid.tile, grid.stride, grid.ragged)
    assert len(grid) == len(expected) == math.prod(grid.counts)
    for i, (block, bounds) in enumerate(zip(grid, expected, strict=True)):
        assert tuple(zip(block.start, block.stop, strict=True)) == bounds
        assert block.slices == {d: slice(*ends) for d, ends in zip(grid.dims, bounds, strict=True)}
        assert block.shape == {d: b - a for d, (a, b) in zip(grid.dims, bounds, strict=True)}
        assert block.size == math.prod(b - a for a, b in bounds)
        assert (block.id, grid.id(grid.index(i)), grid.block(i)) == (i, i, block)


@given(grids())
def test_tile_of_cells_agrees_with_the_slices(grid: Grid) -> None:
    if not grid.ragged:
        return
    for axis, dim in enumerate(grid.dims):
        tile_of = grid.tile_of_cells(dim)
        for block in grid:
            assert (tile_of[block.slices[dim]] == block.index[axis]).all()
        some = np.arange(grid.shape[axis])[::-2]
        assert (grid.tile_of_cells(dim, some) == tile_of[some]).all()


@given(grids())
def test_json_and_pickle_give_back_an_equal_grid(grid: Grid) -> None:
    for copy in (Grid.from_json(grid.to_json()), pickle.loads(pickle.dumps(grid))):  # noqa: S301
        assert copy == grid
        assert hash(copy) == hash(grid)


@given(st.data())
def test_sizes_are_matched_by_name_in_any_form(data: st.DataObject) -> None:
    shape = {name: data.draw(st.integers(1, 9)) for name in NAMES}
    wanted = data.draw(st.lists(st.sampled_from(NAMES), unique=True))
    sizes = {name: data.draw(st.integers(1, shape[name])) for name in wanted}
    expected = {name: sizes[name] for name in NAMES if name in sizes}
    assert parse_sizes("block_size", sizes, shape) == expected
    assert parse_sizes("block_size", list(sizes.items()), shape) == expected
    assert list(parse_sizes("block_size", sizes, shape)) == list(expected)


@given(st.integers(1, 60), st.floats(0, 1, exclude_max=True))
def test_overlap_is_rounded_and_windows_advance(n: int, fraction: float) -> None:
    cells = parse_overlap("overlap", {"lat": fraction}, {"lat": n})["lat"]
    assert 0 <= cells < n
    if fraction == 0 or n == 1:
        assert cells == 0
    else:
        assert cells >= 1
        assert abs(cells - fraction * n) <= 0.5 or cells in (1, n - 1)


@pytest.mark.parametrize(
    ("given_sizes", "error", "words"),
    [
        ({"latitude": 2}, InvalidValueError, "latitude"),
        ([("lat", 2), ("lat", 3)], InvalidValueError, "twice"),
        ({"lat": 0}, InvalidValueError, "must be from 1 to 4"),
        ({"lat": 5}, InvalidValueError, "must be from 1 to 4"),
        ({"lat": 2.0}, InvalidTypeError, "must be an integer"),
        ({"lat": True}, InvalidTypeError, "must be an integer"),
        (7, InvalidTypeError, "mapping"),
        ("lat", InvalidTypeError, "mapping"),
    ],
)
def test_wrong_sizes_are_refused_by_name(given_sizes: object, error: type, words: str) -> None:
    with pytest.raises(error, match=words) as caught:
        parse_sizes("block_size", given_sizes, {"time": 3, "lat": 4})  # type: ignore[arg-type]
    assert "block_size" in str(caught.value)


@pytest.mark.parametrize("fraction", [1.0, -0.1, float("nan")])
def test_an_overlap_must_leave_windows_room_to_advance(fraction: float) -> None:
    with pytest.raises(InvalidValueError, match=r"overlap..lat"):
        parse_overlap("overlap", {"lat": fraction}, {"lat": 4})


def test_a_grid_refuses_tiles_that_do_not_fit() -> None:
    with pytest.raises(InvalidValueError, match="do not fit"):
        Grid(("lat",), (4,), (5,), (5,))
    with pytest.raises(InvalidValueError, match="one shape, tile and stride"):
        Grid(("lat", "lat"), (4, 4), (2, 2), (2, 2))
    with pytest.raises(InvalidTypeError, match="must be a tuple of names"):
        Grid("lat", (4, 4, 4), (2, 2, 2), (2, 2, 2))  # type: ignore[arg-type]
    grid = Grid.blocks({"lat": 4}, {"lat": 2})
    with pytest.raises(InvalidValueError, match="tile must be from 0 to 1, got 2"):
        grid.index(2)
    with pytest.raises(InvalidValueError, match="outside"):
        grid.id((2,))
