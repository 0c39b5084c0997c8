"""Which variables of a cube samples hold, and which of them a user may name."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Container, Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, caller_level, check_positive
from ml4cube.core.missing import FILL_FEATURES, FILLED_ATTR, check_mask, warn_of_filled
from ml4cube.core.statistics import check_decoded
from ml4cube.cube.chunks.blocks import file_chunks, source_chunks
from ml4cube.cube.classes import is_flagged
from ml4cube.cube.variables import check_left_out, cube_dims, cube_variables, why_not_held
from ml4cube.preprocessing.cubes import present_mask
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.recipe.recipe import Recipe

if TYPE_CHECKING:
    import xarray as xr

logger = logging.getLogger(__name__)


class Selection(NamedTuple):
    """What of a cube samples hold."""

    # Cells of the cube along each dim.
    shape: Mapping[str, int]
    variables: list[str]
    # Variables of classes; integers among them are known by the dtype of samples, too.
    classes: tuple[str, ...]
    # Name of the mask, if it is heeded.
    mask: str | None
    # Variables that samples cannot hold, with the reason.
    left_out: Mapping[str, str]


def select(
    ds: xr.Dataset,
    filter_var: str | None,
    *,
    apply_mask: bool,
    drop_nan: str | None,
    max_chunk_mb: float,
) -> Selection:
    """Choose the variables of samples and check them; the mask is none, heeded or not."""
    check_positive("max_chunk_mb", max_chunk_mb)
    mask = _mask_name(ds, filter_var, needs_mask=drop_nan == "masked")
    if mask is not None:
        if apply_mask or drop_nan == "masked":
            _check_mask(mask, ds)
        else:
            mask = None
    shape = {dim: ds.sizes[dim] for dim in cube_dims(ds, filter_var)}
    if empty := [dim for dim, n in shape.items() if n == 0]:
        raise InvalidValueError(f"the cube has no cells along {empty}")
    names, left_out = cube_variables(ds, filter_var)
    for name in names:
        check_decoded(name, ds[name])
        _check_chunk(name, ds[name].variable, max_chunk_mb)
    if left_out:
        logger.info("left out: %s", "; ".join(f"{n!r} {why}" for n, why in left_out.items()))
    check_left_out(ds, left_out)
    if not names:
        raise InvalidValueError(f"the cube has no data variable to sample, only {list(ds)}")
    classes = tuple(sorted(name for name in names if is_flagged(ds[name].attrs)))
    return Selection(shape, names, classes, mask, left_out)


def _mask_name(ds: xr.Dataset, filter_var: str | None, *, needs_mask: bool) -> str | None:
    """Return the name of the mask, if there is one."""
    if filter_var is not None and not isinstance(filter_var, str):
        raise InvalidTypeError(f"filter_var must be a variable name, got {filter_var!r}")
    mask = present_mask(ds.variables, filter_var)
    if mask is None and needs_mask:
        raise InvalidValueError(
            f"drop_nan='masked' needs a mask, and the cube has no variable {filter_var!r}; name "
            "one by filter_var, or make one with assign_mask"
        )
    return mask


def _check_mask(mask: str, ds: xr.Dataset) -> None:
    """Refuse a variable that can be no mask."""
    check_mask(f"filter_var={mask!r}", ds[mask].dtype)
    dims = cube_dims(ds, mask)
    if others := [dim for dim in ds[mask].dims if dim not in dims]:
        raise InvalidValueError(
            f"filter_var={mask!r} must have no dims but those of the cube, {dims}, got "
            f"{ds[mask].dims}; select a cell, ds[{mask!r}].isel({others[0]}=0)"
        )


def _check_chunk(name: str, variable: xr.Variable, limit_mb: float) -> None:
    """Refuse chunks that are too large for a worker, as the metadata declares them."""
    for chunks in filter(None, (source_chunks(variable), file_chunks(variable))):
        size_mb = math.prod(chunks.values()) * variable.dtype.itemsize / 1e6
        if size_mb > limit_mb:
            raise InvalidValueError(
                f"chunks of variable {name!r}, {chunks}, have {size_mb:,.0f} MB once "
                f"decoded, above max_chunk_mb={limit_mb:g}, and a worker holds whole chunks in "
                "memory; rechunk the cube, or raise max_chunk_mb"
            )


def check_fills(recipe: Recipe, ds: xr.Dataset, named: Iterable[str]) -> None:
    """Refuse to fill variables that are `named` and no numbers, and classes by other numbers."""
    for name in named:
        if recipe.fill_of(name) and ds[name].dtype.kind not in "fiub":  # Integers have no gaps.
            raise InvalidTypeError(
                f"fill_method: variable {name!r} has dtype {ds[name].dtype}, and only numbers can "
                "be filled; leave it out"
            )
    for name in recipe.classes:
        method = recipe.fill_of(name)
        if ds[name].dtype.kind == "f" and method not in (None, "constant"):
            raise InvalidValueError(
                f"fill_method: {name!r} holds classes by its flags, and {method!r} would fill its "
                f"gaps with values that are no class; give {{{name!r}: 'constant'}} or None"
            )


def warn_of_targets(recipe: Recipe, ds: xr.Dataset, scored: Iterable[str]) -> None:
    """Warn of classes that are not scaled, of filled targets, and of targets that hold no gaps."""
    scored = {*recipe.targets, *scored}
    _warn_of_unscaled(recipe, ds, scored)
    attrs = {name: ds[name].attrs for name in recipe.variables if name in recipe.targets}
    filled = {name: of_var[FILLED_ATTR] for name, of_var in attrs.items() if FILLED_ATTR in of_var}
    warn_of_filled("to_pred", filled, FILL_FEATURES)
    if recipe.filter_var is not None and recipe.mask_makes_gaps:
        _warn_of_unmasked(recipe.filter_var, ds, scored)


def _warn_of_unscaled(recipe: Recipe, ds: xr.Dataset, scored: Container[str]) -> None:
    unscaled = [n for n in recipe.classes if ds[n].dtype.kind == "f" and n not in scored]
    if unscaled and recipe.scale_fn:
        warnings.warn(
            f"{unscaled} hold classes by flag_values or flag_meanings, and are not scaled; "
            "drop these attributes if they hold numbers",
            stacklevel=caller_level(),
        )


def _warn_of_unmasked(mask: str, ds: xr.Dataset, scored: Iterable[str]) -> None:
    kept = sorted(name for name in scored if name in ds and ds[name].dtype.kind not in "fM")
    if kept:
        warnings.warn(
            f"to_pred: {kept} cannot hold gaps, so cells outside the mask {mask!r} "
            "keep their values, and losses and scores count them; convert these targets to float, "
            "or use drop_sample=True",
            stacklevel=caller_level(),
        )


def check_targets(recipe: Recipe, stored: Iterable[str], ds: xr.Dataset) -> None:
    """Refuse targets and features that samples do not have."""
    stored, reasons = list(stored), why_not_held(ds, recipe.filter_var)
    check_known("to_pred", recipe.targets, stored, reasons)
    check_known("features", recipe.features or (), stored, reasons)


def check_targets_elsewhere(
    bound: BoundRecipe, left_out: Mapping[str, str], callback: object
) -> None:
    """Refuse what cannot be combined with targets in other cells than the inputs."""
    if bound.targets is None:
        return
    scored, stored = bound.targets.recipe.variables, bound.recipe.variables
    check_known("to_pred or weights", scored, stored, left_out)
    if callback is not None:
        raise InvalidTypeError(
            "callback cannot be combined with target_offset or target_size, because it gets the "
            "inputs without their targets; compute the variable on the cube, or use augment="
        )


def check_known(
    argument: str,
    names: Iterable[str],
    stored: Iterable[str],
    reasons: Mapping[str, str] | None = None,
) -> None:
    """Refuse names of variables that samples do not have, with the reason."""
    stored, reasons = list(stored), reasons or {}
    unknown = [name for name in names if name not in stored]
    if left_out := [f"{name!r} {reasons[name]}" for name in unknown if name in reasons]:
        raise InvalidValueError(
            f"{argument} must name variables of the samples, {stored}, but {'; '.join(left_out)}"
        )
    if unknown:
        raise InvalidValueError(
            f"{argument}: unknown variables {unknown}; the samples have {stored}"
        )
