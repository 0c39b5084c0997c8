"""Sizes of the blocks of a split: given by the user, or a few large ones with a warning."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from ml4cube.core.errors import InvalidValueError, caller_level
from ml4cube.core.grid import Grid, SizesLike, parse_sizes
from ml4cube.core.large_blocks import LargeBlocks, blocks_wanted, large_blocks
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.cube.coordinates import is_latitude, is_longitude
from ml4cube.splits.cube import CubeView
from ml4cube.splits.ranges import station_dim

ADVICE_FOR_SAMPLES = (
    "Samples of different parts may be neighbours or share cells, so the test score will be too "
    "optimistic. Split the cube with assign_block_split, then cut samples from it"
)

# Names of map dims without a coordinate that identifies them.
_MAP_DIMS = {"x", "y", "i", "j", "easting", "northing", "xc", "yc", "nlat", "nlon", "nx", "ny"}


def block_sizes(
    block_size: SizesLike | None,
    view: CubeView,
    shares: Sequence[float],
    windows: Grid | None = None,
) -> dict[str, int]:
    """Return the user's block size in cells by dim, or a chosen one.

    `shares` are the fractions of the cube that the parts get. If samples are cut from the cube,
    `windows` are their windows.
    """
    if block_size is not None:
        return parse_sizes("block_size", block_size, view.sizes)
    if len(shares) < 2:
        return {}
    blocks = _choose(view, shares, windows)
    if blocks.count > 1:
        too_few = blocks.count * min(shares) < 1
        warnings.warn(_describe(blocks, too_few, view), UserWarning, stacklevel=caller_level())
    return blocks.sizes


def _choose(view: CubeView, shares: Sequence[float], windows: Grid | None) -> LargeBlocks:
    """Choose blocks on the map or in time; cut other dims only if the cube is too small."""
    times = _ordered_time_dims(view)
    on_map = [dim for dim in _map_dims(view) if dim not in times]
    others = [dim for dim in view.sorted_sizes if dim not in (*on_map, *times)]
    circle = view.lon_circle()
    cut = partial(
        large_blocks,
        view.sorted_sizes,
        wanted=blocks_wanted(shares),
        fewest=len(shares),
        windows=windows,
        cyclic=[circle.dim] if circle else [],
    )
    blocks = cut([on_map, times])
    if blocks.is_apart:
        return blocks
    return cut([on_map, times, others])


def _map_dims(view: CubeView) -> list[str]:
    """Return the dims along which neighbouring cells are neighbours on the map."""
    lat, lon = view.axis_of("latitude"), view.axis_of("longitude")
    if lat is not None and lon is not None and lat.dims == lon.dims:
        return []  # Neighbours in a list of stations, or along a track, may be far apart.
    on_map = {dim for dim in view.dims if dim.lower() in _MAP_DIMS or _is_horizontal(dim, {})}
    for coord in view.ds.coords.values():
        is_axis = coord.ndim == 1 and str(coord.attrs.get("axis")).upper() in ("X", "Y")
        if is_axis or (coord.ndim < 3 and _is_horizontal(coord.name, coord.attrs)):
            on_map |= set(map(str, coord.dims))
    circle = view.lon_circle()
    if circle and circle.columns < view.sizes[circle.dim]:
        on_map.discard(circle.dim)  # Blocks at both ends would share the columns that are repeated.
    return sorted(on_map & set(view.dims))


def _is_horizontal(name: object, attrs: Mapping[Any, Any]) -> bool:
    """Return True if a coordinate is a latitude or longitude, possibly of a rotated grid."""
    return is_latitude(name, attrs, rotated=True) or is_longitude(name, attrs, rotated=True)


def _ordered_time_dims(view: CubeView) -> list[str]:
    """Return the time dim in a list, or an empty one if its times are not sorted and distinct."""
    try:
        dim = view.time_dim("block_size")
        view.time_ranks(dim)
    except InvalidValueError:  # There is none, or its times are not sorted.
        return []
    if view.repeated_times(dim):
        return []
    return [dim]


def _describe(blocks: LargeBlocks, too_few: bool, view: CubeView) -> str:
    """Return a warning that names the chosen blocks, and how to choose better ones."""
    if SAMPLE_DIM in blocks.sizes:  # Neighbours in a store are not neighbours in the cube.
        return (
            f"no block_size is given: the samples are split into {blocks.count} blocks of "
            f"{blocks.sizes}, by their order in the store. {ADVICE_FOR_SAMPLES}"
        )
    uncut = ", ".join(repr(dim) for dim in view.dims if dim not in blocks.sizes)
    chosen = (
        f"no block_size is given: the cube is split into {blocks.count} blocks of {blocks.sizes} "
        f"cells{f', whole along {uncut}' if uncut else ''}"
    )
    data = [v for v in view.ds.data_vars.values() if set(v.dims) == set(view.dims)]
    if data and (stations := station_dim(data[0])) in blocks.sizes:
        return (
            f"{chosen}. The stations along {stations!r} may be in any order, so stations of one "
            "part may be neighbours of those of another, and the test score will be too "
            "optimistic. Leave out groups of stations with assign_region_split, or give sizes"
        )
    var = next((f", {v.name!r}" for v in data if v.dtype.kind in "biuf"), "")
    return (
        f"{chosen}{', too few to meet the fractions closely' if too_few else ''}. Up to "
        f"{blocks.touching:.0%} of the cells of a part touch another part, and the range of "
        "autocorrelation was not estimated: if values are alike over longer distances, the test "
        "score will be too optimistic. Choose blocks from the data, block_size="
        f"ml4cube.splits.suggest_block_size(ds{var}), or give sizes"
    )
