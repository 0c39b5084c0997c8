"""Bind a user's arguments to a cube: all that is known of samples before a cell is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xarray as xr

from ml4cube.core.sample_facts import split_text, variable_facts
from ml4cube.core.statistics import Statistics
from ml4cube.cube.opening import as_dataset
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.recipe.recipe import FillLike, Recipe
from ml4cube.sampling import selection
from ml4cube.sampling.cf_encoding import axis_of
from ml4cube.sampling.dates import check_dates
from ml4cube.sampling.parts import Parts, largest_chunks, split_of
from ml4cube.sampling.reading import HeededReader
from ml4cube.sampling.rescaling import check_statistics, parse_statistics
from ml4cube.sampling.tiling import Callback, TiledRecipe, name_of, sample_bytes, tiling

#: Megabytes that one decoded chunk of the cube may have, unless asked otherwise.
MAX_CHUNK_MB = 2048.0


@dataclass(frozen=True)
class SampledCube:
    """A cube, and how samples are cut from it; made by `sample_cube`."""

    # The cube, with its split label.
    ds: xr.Dataset
    reader: HeededReader
    tiled: TiledRecipe
    # Whether the cube came with its label.
    is_labelled: bool
    # To scale by, from the argument `statistics`; None for those of the train samples.
    given: Statistics | None
    # Variables that samples cannot hold, with the reason.
    left_out: Mapping[str, str]
    # Windows that span missing dates.
    over_missing_dates: int

    @property
    def recipe(self) -> Recipe:
        """The windows, variables and gap policy of samples."""
        return self.tiled.recipe

    @property
    def split(self) -> Mapping[str, Any]:
        """The recipe of the split label; empty for a label made by hand."""
        return split_of(self.ds[self.tiled.label])

    @property
    def facts(self) -> dict[str, object]:
        """How samples are cut, by label, to be printed."""
        recipe = self.recipe
        features = recipe.features or [n for n in recipe.variables if n not in recipe.targets]
        units = {name: self.ds[name].attrs.get("units") for name in recipe.variables}
        by = "the train samples" if self.given is None else "given statistics"
        return {
            **variable_facts(features, recipe.targets, units),
            "Cube": self.tiled.bound.sizes,
            **recipe.facts,
            "Scaling": f"{recipe.scale_fn}, by {by}" if recipe.scale_fn else "none",
            "Split": split_text(self.split),
        }


def sample_cube(
    cube: Any,
    parts: Parts,
    *,
    apply_mask: bool = True,
    drop_nan: str | None = "auto",
    filter_var: str | None = "filter_mask",
    fill_method: FillLike = None,
    scale_fn: str | None = "standardize",
    statistics: Any = None,
    callback: Callback | None = None,
    missing_chunks: str = "warn",
    max_chunk_mb: float = MAX_CHUNK_MB,
    **windows: Any,
) -> SampledCube:
    """Check arguments against a cube, and split the cube if it has no label.

    `windows` are further arguments of `BoundRecipe.parse`.
    """
    given, scale_fn = parse_statistics(statistics, scale_fn)
    ds = as_dataset(cube)
    of_mask: dict[str, Any] = {"apply_mask": apply_mask, "drop_nan": drop_nan}
    selected = selection.select(ds, filter_var, max_chunk_mb=max_chunk_mb, **of_mask)
    bound = BoundRecipe.parse(
        selected.shape,
        selected.variables,
        fill_method=fill_method,
        filter_var=selected.mask,
        scale_fn=scale_fn,
        classes=selected.classes,
        callback=name_of(callback),
        **of_mask,
        **windows,
    )
    recipe = bound.recipe
    if callback is None:
        selection.check_targets(recipe, recipe.variables, ds)
    selection.check_fills(recipe, ds, fill_method if isinstance(fill_method, Mapping) else ())
    selection.check_targets_elsewhere(bound, selected.left_out, callback)
    selection.warn_of_targets(recipe, ds, () if bound.targets else windows.get("scored", ()))
    as_given = ds
    ds, label = parts.label(ds, bound)
    mask, names = recipe.filter_var, recipe.variables
    reader = HeededReader.of(ds, names, recipe.dims, label, mask, missing_chunks)
    nbytes = sample_bytes(recipe, reader.cells.dtypes)
    tiled = TiledRecipe(
        bound,
        tiling(bound, largest_chunks(ds, reader.stored), nbytes),
        tuple(axis_of(ds, dim, recipe) for dim in recipe.dims),
        label,
        parts.used_blocks(ds, bound),
        callback=callback,
    )
    missing_dates = check_dates(ds, bound)
    if given is not None:
        check_statistics(given, recipe, ds, may_be_others=callback is not None)
    return SampledCube(ds, reader, tiled, ds is as_given, given, selected.left_out, missing_dates)
