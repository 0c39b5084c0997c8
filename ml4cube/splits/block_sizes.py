"""Sizes of the blocks of a split: given by the user, or a few large ones with a warning."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

from ml4cube.core.errors import InvalidValueError
from ml4cube.core.grid import Grid, SizesLike, parse_sizes
from ml4cube.core.large_blocks import LargeBlocks, blocks_wanted, large_blocks
from ml4cube.core.sample_spec import SAMPLE_DIM
from ml4cube.cube.coordinates import is_latitude, is_longitude
from ml4cube.splits.cube import CubeView
from ml4cube.splits.ranges import station_dim

SPLIT_SAMPLES = (
    "Samples of different parts may be neighbours or share cells, so the test score will be too "
    "optimistic. Split the cube with assign_block_split, then cut samples from it"
)

# Names of map dims without a coordinate that identifies them.
_MAP_DIMS = {"x", "y", "i", "j", "easting", "northing", "xc", "yc", "nlat", "nlon", "nx", "ny"}


def block_sizes(
    block_size: SizesLike | None,
    view: CubeView,
    fractions: Iterable[float],
    windows: Grid | None = None,
    used: float = 1.0,
) -> dict[str, int]:
    """Parse the user's block size into cells by dim, or choose one."""
    if block_size is not None:
        return parse_sizes("block_size", block_size, view.sizes)
    shares = [used * fraction for fraction in fractions]
    if len(shares) < 2:
        return {}
    chosen = _choose(view, shares, windows)
    if chosen.count > 1:
        few = chosen.count * min(shares) < 1
        warnings.warn(_describe(chosen, few, view), UserWarning, stacklevel=caller_level())
    return chosen.sizes


def _choose(view: CubeView, shares: list[float], windows: Grid | None) -> LargeBlocks:
    """Choose blocks on the map or in time; cut other dims only if the cube is too small."""
    times = _time_dims(view)
    on_map = [dim for dim in _map_dims(view) if dim not in times]
    others = [dim for dim in view.canonical if dim not in (*on_map, *times)]
    turn = view.lon_turn()
    blocks = LargeBlocks({}, 1, 0.0)
    for groups in ([on_map, times], [on_map, times, others]):
        blocks = large_blocks(
            view.canonical,
            groups,
            blocks_wanted(shares),
            fewest=len(shares),
            windows=windows,
            cyclic=[turn[0]] if turn else [],
        )
        if blocks.is_apart:
            break
    return blocks


def _map_dims(view: CubeView) -> list[str]:
    """Return the dims along which neighbouring cells are neighbours on the map."""
    lat, lon = view.axis_of("lat"), view.axis_of("lon")
    if lat is not None and lon is not None and lat.dims == lon.dims:
        return []  # stations, a track or a mesh: neighbours in the file may be far apart
    found = {str(axis.dims[0]) for axis in (lat, lon) if axis is not None}
    for coord in view.ds.coords.values():
        if _is_horizontal(coord.name, coord.attrs):
            found |= set(map(str, coord.dims)) if coord.ndim < 3 else set()
        elif coord.ndim == 1 and str(coord.attrs.get("axis")).upper() in ("X", "Y"):
            found.add(str(coord.dims[0]))
    found |= {dim for dim in view.dims if dim.lower() in _MAP_DIMS or _is_horizontal(dim, {})}
    turn = view.lon_turn()
    if turn is not None and turn[1] < view.sizes.get(turn[0], 0):
        found.discard(turn[0])  # its first columns are repeated at its end
    return sorted(found & set(view.dims))


def _is_horizontal(name: object, attrs: Mapping[Any, Any]) -> bool:
    """Return True if a coordinate is a latitude or longitude, possibly of a rotated grid."""
    return is_latitude(name, attrs, rotated=True) or is_longitude(name, attrs, rotated=True)


def _time_dims(view: CubeView) -> list[str]:
    """Return the time dim if its steps are sorted and distinct, in a list."""
    try:
        dim = view.time_dim("block_size")
        view.moments(dim)
    except InvalidValueError:  # none, or its times are not sorted
        return []
    return [] if view.repeated_times(dim) else [dim]


def _describe(chosen: LargeBlocks, few: bool, view: CubeView) -> str:
    """Return a warning that names the chosen blocks, and how to choose better ones."""
    if SAMPLE_DIM in chosen.sizes:  # neighbours in a store are not neighbours in the cube
        return (
            f"no block_size is given: the samples are split into {chosen.count} blocks of "
            f"{chosen.sizes}, by their order in the store. {SPLIT_SAMPLES}"
        )
    whole = [dim for dim in view.dims if dim not in chosen.sizes]
    apart = f", whole along {', '.join(map(repr, whole))}" if whole else ""
    data = [v for v in view.ds.data_vars.values() if set(v.dims) == set(view.dims)]
    var = next((f", {v.name!r}" for v in data if v.dtype.kind in "biuf"), "")
    text = (
        f"no block_size is given: the cube is split into {chosen.count} blocks of {chosen.sizes} "
        f"cells{apart}"
    )
    if data and (stations := station_dim(data[0])) in chosen.sizes:
        return (
            f"{text}. The stations along {stations!r} may be in any order, so stations of one part "
            "may be neighbours of those of another, and the test score will be too optimistic. "
            "Leave out groups of stations with assign_region_split, or give sizes"
        )
    return (
        f"{text}{', too few to meet the fractions closely' if few else ''}. Up to "
        f"{chosen.touching:.0%} of the cells of a part touch another part, and the range of "
        "autocorrelation was not estimated: if values are alike over longer distances, the test "
        "score will be too optimistic. Choose blocks from the data, block_size="
        f"ml4cube.splits.suggest_block_size(ds{var}), or give sizes"
    )


def caller_level() -> int:
    """Return the stack level of the code outside ml4cube, for a warning of the calling function."""
    ours = __name__.partition(".")[0]
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == ours:
        level, frame = level + 1, frame.f_back
    return level
