"""Variables with gaps filled, or with artificial ones, made block by block."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.grid import Grid
from ml4cube.core.missing import FILLED_ATTR
from ml4cube.cube.chunks.blocks import chunk_sizes
from ml4cube.cube.masks_and_labels import NAME_ATTR, ROLE_ATTR
from ml4cube.gap_filling.blocks import GapFiller
from ml4cube.gap_filling.methods import Method

# Values of the flag variable.
_FLAGS = {"known": 0, "filled": 1, "gap": 2}


def hidden_variable(filler: GapFiller, array: xr.DataArray) -> xr.Variable:
    """Return a variable with artificial gaps."""
    is_lazy = not array.variable._in_memory
    grid = filler.blocks(chunk_sizes(array.variable), ())
    values = _by_block(filler.hide, grid, array.dtype, is_lazy=is_lazy)
    return xr.Variable(grid.dims, values, array.attrs).transpose(*array.dims)


def filled_variables(
    filler: GapFiller, method: Method, array: xr.DataArray, described: str
) -> dict[str, xr.Variable]:
    """Return a filled variable and its flags."""
    is_lazy = not array.variable._in_memory
    grid = filler.blocks(chunk_sizes(array.variable), method.uncut_dims)
    values = _by_block(partial(filler.fill, method), grid, array.dtype, is_lazy=is_lazy)
    flags = _by_block(filler.flags, grid, np.uint8, values, is_lazy=is_lazy)
    name, flag_name = str(array.name), f"{array.name}_filled"
    beside = f"{array.attrs.get('ancillary_variables', '')} {flag_name}".strip()
    attrs = {**array.attrs, "ancillary_variables": beside}
    if is_lazy or (flags == _FLAGS["filled"]).any():  # of a lazy one it is not known yet
        attrs[FILLED_ATTR] = described
    flag_attrs = {
        "long_name": f"origin of the values of {name}",
        "flag_values": np.array(list(_FLAGS.values()), np.uint8),
        "flag_meanings": " ".join(_FLAGS),
        ROLE_ATTR: "mask",  # so that it is no feature
        NAME_ATTR: flag_name,
    }
    made = {
        name: xr.Variable(grid.dims, values, attrs),
        flag_name: xr.Variable(grid.dims, flags, flag_attrs),
    }
    return {key: variable.transpose(*array.dims) for key, variable in made.items()}


def _by_block(
    function: Callable[..., NDArray[Any]],
    grid: Grid,
    dtype: Any,
    *arrays: Any,
    is_lazy: bool,
) -> Any:
    """Return an array made block by block from a box, and from the same block of given arrays."""
    if not is_lazy:
        values = np.empty(grid.shape, dtype)
        for block in grid:
            index = tuple(block.slices.values())
            values[index] = function(*(array[index] for array in arrays), block.slices)
        return values
    import dask.array

    sizes = zip(grid.shape, grid.tile, strict=True)
    chunks = tuple(tuple(min(tile, n - at) for at in range(0, n, tile)) for n, tile in sizes)
    return dask.array.map_blocks(  # type: ignore[no-untyped-call]
        partial(_of_block, function, grid.dims), *arrays,
        chunks=chunks, dtype=dtype, meta=np.empty((0,) * len(grid.dims), dtype),
    )  # fmt: skip


def _of_block(
    function: Callable[..., NDArray[Any]],
    dims: tuple[str, ...],
    *arrays: NDArray[Any],
    block_info: Any,
) -> NDArray[Any]:
    """Make the block of a dask array that `block_info` describes."""
    ends = block_info[None]["array-location"]
    return function(*arrays, {d: slice(*of_dim) for d, of_dim in zip(dims, ends, strict=True)})
