"""assign_location_split: leave whole locations out as test or validation part."""

from __future__ import annotations

from collections.abc import Iterable

import xarray as xr

from ml4cube.core.errors import EmptyPartError, InvalidValueError, check_whole, names_of
from ml4cube.core.grid import Grid
from ml4cube.core.split_plan import SplitPlan, check_fractions
from ml4cube.splits.buffers import BufferLike, CyclicLike, cut_dims, plan_buffer
from ml4cube.splits.cube import Cube, CubeView
from ml4cube.splits.label import CountInBlocks, add_label
from ml4cube.splits.regions import MAX_MAP_CELLS, check_recipe_size
from ml4cube.splits.validity import Counts, ValidLike


def assign_location_split(
    ds: Cube,
    split: float = 0.8,
    *,
    val: float = 0.0,
    seed: int = 42,
    dims: str | Iterable[str] | None = None,
    buffer: BufferLike | None = None,
    cyclic: CyclicLike | None = None,
    valid: ValidLike | None = None,
    name: str = "split",
) -> xr.Dataset:
    """Assign whole locations to train, validation and test, at random, each with all its times.

    A model that fills a map between stations, or between the cells of a map that have values, must
    be tested at locations it was not trained on: the other times of a location tell much about it.

    Parameters
    ----------
    ds : Dataset or DataArray
        The cube: a map or stations, with or without times.
    split : float
        Fraction of the cells for training; met as closely as whole locations allow, before the
        buffer is taken off.
    val : float
        Fraction for validation; the test part gets the rest.
    seed : int
        Seed of the draw.
    dims : str or iterable of str, optional
        Dims of the locations; by default those of latitude and longitude, of x and y, or of the
        stations.
    buffer : int, str or mapping, optional
        Distance kept between train and the other parts, taken from train, as for
        `assign_block_split`.
    cyclic : str, list of str or bool, optional
        Dims along which the first cell follows the last, as for `assign_block_split`.
    valid : str, list of str or DataArray, optional
        Cells that count for the fractions, as for `assign_block_split`. Locations without any are
        drawn last.
    name : str
        Name of the label.

    Returns
    -------
    Dataset
        The cube with the label added, as `assign_block_split` does. The recipe holds the label of
        every location, compressed; more than 33 million locations are refused.

    Raises
    ------
    EmptyPartError
        If a requested part would hold no valid cell.
    InvalidValueError
        If the cube has no dim of locations, a dim is unknown, or a fraction is out of range.

    See Also
    --------
    LeaveLocationOut : folds of whole locations.

    Examples
    --------
    >>> import numpy as np
    >>> ds = xr.Dataset({"t2m": (("time", "station"), np.zeros((3, 5)))})
    >>> assign_location_split(ds, 0.6).split.isel(time=0).values.tolist()
    [1, 0, 1, 1, 0]
    """
    seed = check_whole("seed", seed)
    fractions = check_fractions(split, val)

    def assign_locations(view: CubeView, count: CountInBlocks) -> tuple[SplitPlan, Counts]:
        grid = location_grid(view, dims)
        apart = plan_buffer(buffer, None, cyclic, view, cut_dims(grid))
        weights, _ = count(grid, None)
        if not weights.any():
            raise EmptyPartError("no location has a valid cell")
        plan = SplitPlan.assign(grid, weights, fractions, seed, *apart)
        check_recipe_size(plan, "of locations")
        return plan, weights

    return add_label(ds, assign_locations, "assign_location_split", name, valid)


def location_grid(view: CubeView, dims: str | Iterable[str] | None) -> Grid:
    """Return a grid with one block for each location."""
    wanted = view.dims_of_map
    if dims is not None:
        wanted = names_of("dims", dims)
    if unknown := [dim for dim in wanted if dim not in view.dims]:
        raise InvalidValueError(f"dims: unknown {unknown}; the cube has {view.dims}")
    if not wanted:
        raise InvalidValueError(
            f"the cube must have dims of locations, got {view.dims}; name them by dims=, or use "
            "assign_time_split"
        )
    grid = Grid.blocks(view.sorted_sizes, dict.fromkeys(wanted, 1))
    if len(grid) > MAX_MAP_CELLS:
        raise InvalidValueError(
            f"the cube has {len(grid)} locations along {list(wanted)}, but the recipe can hold "
            f"{MAX_MAP_CELLS}; use assign_block_split with small blocks"
        )
    return grid
