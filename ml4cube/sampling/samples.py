"""Make the samples of a tile: mask, cut, fill, callback.

Scaling comes later, when the statistics of all train samples are known.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import RunError
from ml4cube.core.grid import Block
from ml4cube.core.scaling import Scaling
from ml4cube.core.statistics import Statistics
from ml4cube.cube.variables import DATE_UNITS, holds_dtype
from ml4cube.recipe.fitted import fills_of
from ml4cube.recipe.preparation import Arrays, cut, mask_cells, prepare
from ml4cube.recipe.recipe import Recipe
from ml4cube.recipe.roles import INPUT
from ml4cube.sampling.tiling import Callback, TiledRecipe

#: Window shape and dtype of every variable of samples.
Schema = dict[str, tuple[tuple[int, ...], str]]


def make_samples(
    tiled: TiledRecipe,
    cells: Arrays,
    tile: Block,
    keep: NDArray[np.intp],
    role: str = INPUT,
    names: Iterable[str] | None = None,
) -> Arrays:
    """Make samples of the windows of a role in `keep`, of some variables; not scaled yet."""
    bound = tiled.bound.by_role[role]
    recipe = bound.recipe
    masked = mask_cells(cells, recipe.variables if names is None else names, bound.mask)
    floats = [name for name, values in masked.items() if values.dtype.kind == "f"]
    # Samples are scaled when the statistics are known, and after the callback.
    bound = replace(bound, fills=fills_of(recipe, floats, tiled.fill))
    # Most windows may be dropped, and their cells need no statistics to fill them by.
    prepared = prepare(masked, bound.cells_of(tile), bound, {}, by_window=masked.keys())
    windows = bound.windows_in(tile)
    index = np.unravel_index(keep, tuple(tile.shape.values()))
    samples = {name: cut(prepared, name, windows, index) for name in masked}
    if tiled.callback is None:
        return samples
    box = ", ".join(f"{dim} {s.start}:{s.stop}" for dim, s in prepared.box.items())
    where = f"{len(keep)} samples of tile {tile.id} (cells {box})"
    return _call(tiled.callback, samples, len(keep), where)


def variables_read(recipe: Recipe, names: Iterable[str] | None = None) -> tuple[str, ...]:
    """Return the variables of the cube that samples are made of."""
    mask = [recipe.filter_var] if recipe.filter_var and recipe.mask_makes_gaps else []
    return (*(recipe.variables if names is None else names), *mask)


def _call(callback: Callback, samples: Arrays, n: int, where: str) -> Arrays:
    """Return what the callback makes of samples; refuse what cannot be samples."""
    try:
        returned = callback(samples)
        is_dict = isinstance(returned, Mapping)
        result = {}
        if is_dict:
            result = {str(name): _in_date_units(values) for name, values in returned.items()}
    # sys.exit() would end the run and the script as if everything had been written
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        raise RunError(
            f"the callback failed on {where}: {type(error).__name__}: {error} "
            f"(line {frame.lineno} of {frame.filename}); fix it and run again"
        ) from error
    wrong: Any = {k: v.shape for k, v in result.items() if v.ndim == 0 or len(v) != n}
    wrong |= {k: v.dtype.name for k, v in result.items() if not holds_dtype(v.dtype)}
    if wrong or not result:
        empty = f"no variable: {result}" if is_dict else f"a {type(returned).__name__}"
        raise RunError(
            "the callback must return a dict of arrays of numbers (of up to 8 bytes), booleans or "
            "dates (up to nanoseconds), with as many samples along the first axis as it got; it "
            f"got {where} and returned {wrong or empty}"
        )
    return result


def _in_date_units(values: Any) -> NDArray[Any]:
    """Convert dates of other units, such as days, to one that stores have."""
    array = np.asarray(values)
    if array.dtype.kind != "M":
        return array
    unit = np.datetime_data(array.dtype)[0]
    target = np.dtype(f"M8[{unit if unit in DATE_UNITS else 's'}]")
    if np.can_cast(array.dtype, target):
        return array.astype(target, copy=False)
    return array


def schema_of(samples: Arrays) -> Schema:
    """Return window shape and dtype of every variable."""
    return {name: (values.shape[1:], values.dtype.str) for name, values in samples.items()}


def train_statistics(recipe: Recipe, samples: Arrays) -> Statistics:
    """Return the statistics of the variables of train samples that are scaled."""
    scaled = recipe.scaled_variables({name: values.dtype for name, values in samples.items()})
    return Statistics.of({name: samples[name] for name in scaled}, part="train")


def scale_samples(
    recipe: Recipe, samples: Arrays, scaling: Mapping[str, Scaling], origins: Arrays
) -> Arrays:
    """Return samples, of which those variables with a scaling are scaled."""
    first_cells = {dim: origins[f"{dim}_index"] for dim in recipe.dims}
    result = dict(samples)
    for name, of_variable in scaling.items():
        window = recipe.window_of(name, samples[name].shape[1:])
        result[name] = of_variable.scaled(samples[name], first_cells, window)
    return result
