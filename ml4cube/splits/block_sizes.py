"""Sizes of the blocks of a split: those that are given, or few large ones with a warning."""

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

# What dims of a map are called where no coordinate tells.
_MAP_DIMS = {"x", "y", "i", "j", "easting", "northing", "xc", "yc", "nlat", "nlon", "nx", "ny"}


def block_sizes(
    block_size: SizesLike | None,
    view: CubeView,
    fractions: Iterable[float],
    windows: Grid | None = None,
    used: float = 1.0,
) -> dict[str, int]:
    """Turn the block size as a user writes it into cells by dim, or choose one."""
    if block_size is not None:
        return parse_sizes("block_size", block_size, view.sizes)
    shares = [used * fraction for fraction in fractions]
    if len(shares) < 2:
        return {}
    chosen = _choose(view, shares, windows)
    if chosen.count > 1:
        few = chosen.count * min(shares) < 1
        warnings.warn(_say(chosen, few, view), UserWarning, stacklevel=_outside())
    return chosen.sizes


def _choose(view: CubeView, shares: list[float], windows: Grid | None) -> LargeBlocks:
    """Blocks on the map or in time; along other dims only where the cube is too small there."""
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
            least=len(shares),
            windows=windows,
            around=[turn[0]] if turn else [],
        )
        if blocks.is_apart:
            break
    return blocks


def _map_dims(view: CubeView) -> list[str]:
    """Dims along which neighbouring cells are neighbours on the map."""
    lat, lon = view.axis_of("lat"), view.axis_of("lon")
    if lat is not None and lon is not None and lat.dims == lon.dims:
        return []  # stations, a track or a mesh: neighbours in the file may be far apart
    found = {str(axis.dims[0]) for axis in (lat, lon) if axis is not None}
    for coord in view.ds.coords.values():
        if _is_place(coord.name, coord.attrs):
            found |= set(map(str, coord.dims)) if coord.ndim < 3 else set()
        elif coord.ndim == 1 and str(coord.attrs.get("axis")).upper() in ("X", "Y"):
            found.add(str(coord.dims[0]))
    found |= {dim for dim in view.dims if dim.lower() in _MAP_DIMS or _is_place(dim, {})}
    turn = view.lon_turn()
    if turn is not None and turn[1] < view.sizes.get(turn[0], 0):
        found.discard(turn[0])  # its first columns stand at its end once more
    return sorted(found & set(view.dims))


def _is_place(name: object, attrs: Mapping[Any, Any]) -> bool:
    """Whether a coordinate is a latitude or longitude, of a rotated grid, too."""
    rotated = {"rotated": True}
    return is_latitude(name, attrs, **rotated) or is_longitude(name, attrs, **rotated)


def _time_dims(view: CubeView) -> list[str]:
    """The dim of time, if its steps follow one another."""
    try:
        dim = view.time_dim("block_size")
        view.is_forward(dim)
    except InvalidValueError:  # none, or its times are in no order
        return []
    return [] if view.repeated_times(dim) else [dim]


def _say(chosen: LargeBlocks, few: bool, view: CubeView) -> str:
    """Which blocks were chosen, what nobody looked at, and the line that chooses better."""
    whole = [dim for dim in view.dims if dim not in chosen.sizes]
    apart = f", whole along {', '.join(map(repr, whole))}" if whole else ""
    data = [v for v in view.ds.data_vars.values() if set(v.dims) == set(view.dims)]
    var = next((f", {v.name!r}" for v in data if v.dtype.kind in "biuf"), "")
    said = (
        f"no block_size is given: the cube is split into {chosen.count} blocks of {chosen.sizes} "
    )
    if data and (places := station_dim(data[0])) in chosen.sizes:
        return (
            f"{said}cells{apart}. {places!r} lists places that may lie in no order, so those of "
            "one part may lie beside those of another, and the test score will flatter: leave out "
            "groups of places with assign_region_split, or give sizes"
        )
    few_blocks = ", too few to meet the fractions closely" if few else ""
    if SAMPLE_DIM in chosen.sizes:  # neighbours in a store are none in the cube
        return (
            f"no block_size is given: the samples are split into {chosen.count} blocks of "
            f"{chosen.sizes}, by their order in the store, which says nothing of where they lie: "
            "samples of different parts may be neighbours or share cells, and the test score will "
            "flatter. Split the cube (assign_block_split), then cut samples from it"
        )
    return (
        f"{said}cells{apart}{few_blocks}. Up to {chosen.touching:.0%} of the cells of a part touch "
        "another part, and "
        "no range of autocorrelation was looked at: if values are alike over longer distances, the "
        "test score will flatter. Choose blocks by the data, block_size="
        f"ml4cube.splits.suggest_block_size(ds{var}), or give sizes"
    )


def _outside() -> int:
    """Level of the stack, for a warning of the caller, at which code outside of us called us."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    return level


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]
