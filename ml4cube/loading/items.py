"""What an item holds: the variables of X and y, and the arrays that are made of them.

Does not use torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.missing import FILL_FEATURES, warn_of_filled
from ml4cube.loading.coordinate_features import add_coordinates
from ml4cube.loading.dataset_options import DatasetOptions
from ml4cube.loading.opening import open_source
from ml4cube.loading.ring.arrays import Field
from ml4cube.loading.sources import SampleSource, known_scaling
from ml4cube.loading.views import (
    WEIGHTS,
    add_weights,
    refuse_inexact_integers,
    repeat_along_missing_dims,
)
from ml4cube.recipe.fitted import FittedRecipe
from ml4cube.recipe.roles import INPUT, TARGET, ArrayName, DimLead
from ml4cube.sampling.selection import check_known
from ml4cube.store.metadata import StoreMetadata

_SAMPLE_ANEW = (
    "sample the cube again with to_pred=, which leaves gaps in targets, or with "
    "fill_method={variable: method, ...} for the features alone"
)
Names = tuple[ArrayName, ...]


@dataclass(frozen=True)
class Items:
    """The variables of an item, and its arrays."""

    # Of all variables, also computed ones.
    source: SampleSource
    # None for samples made by hand.
    metadata: StoreMetadata | None
    features: tuple[str, ...]
    # The features, and coordinates.
    channels: tuple[str, ...]
    # Whether variables are stacked as channels; without that an item is a dict.
    stacked: bool
    # Of X, of y, of weights; or of each variable.
    fields: tuple[Field, ...]


def items_of(ds: Any, options: DatasetOptions) -> Items:
    """Open samples, choose the variables of X, y and weights, and make the arrays of an item."""
    source, metadata = open_source(ds, options)
    stored = [name.variable for name in source.variables if name.role == INPUT]
    _check_chosen(metadata, options, stored)
    _warn_of_filled(source, metadata, options)
    others = {options.weights_variable, *source.auxiliary}
    features = options.chosen or _default_features(metadata, options, stored, others)
    role_of_y = INPUT
    if options.shifted:  # y has arrays of its own in the source
        role_of_y = TARGET
    x = tuple(ArrayName(name) for name in features)
    y = tuple(ArrayName(name, role_of_y) for name in options.targets)
    is_dict = not (options.chosen or y)
    source, x = _with_channels(source, x, options, is_dict)
    if options.weights is not None:
        _check_weights(options)
        source = add_weights(source, options.weights, y[0], known_scaling(metadata))
    if is_dict:
        fields = [Field((n,), _window(source, n), options.dtype, stacked=False) for n in x]
    else:
        fields = _stacked_fields(source, x, y, options)
    source = refuse_inexact_integers(source, fields)
    channels = tuple(name.variable for name in x)
    return Items(source, metadata, features, channels, not is_dict, tuple(fields))


def _with_channels(
    source: SampleSource, x: Names, options: DatasetOptions, is_dict: bool
) -> tuple[SampleSource, Names]:
    """Repeat static features along the dims they lack, and add coordinates."""
    if is_dict and options.coordinates:
        raise InvalidTypeError("coord_features are channels of X, so they need features or to_pred")
    if not is_dict and len({source.variables[name].window for name in x}) > 1:
        source = repeat_along_missing_dims(source, x)
    if options.coordinates:
        source = view = add_coordinates(source, options.coordinates, x[0])
        x += tuple(view.computed)
    return source, x


def _check_chosen(
    metadata: StoreMetadata | None, options: DatasetOptions, stored: Sequence[str]
) -> None:
    """Refuse targets and features that the samples lack, or that are both."""
    reasons = {}
    if metadata:
        reasons = metadata.provenance.get("left_out", {})
    check_known("to_pred", options.targets, stored, reasons)
    check_known("features", options.chosen, stored, reasons)
    both = set(options.targets) & set(options.chosen)
    if both and not options.shifted:
        raise InvalidValueError(
            f"{sorted(both)} are in to_pred and in features; name each in one of them, or "
            "give target_offset if the targets lie elsewhere"
        )


def _default_features(
    metadata: StoreMetadata | None,
    options: DatasetOptions,
    stored: Sequence[str],
    others: Collection[str | None],
) -> tuple[str, ...]:
    """Return the features that a store was sampled with for just these targets, or the rest."""
    if not options.shifted:  # else targets are features too
        others = {*others, *options.targets}
    features = [name for name in stored if name not in others]
    if metadata and options.targets and not options.shifted:
        recipe = metadata.recipe
        if recipe.features and options.targets == recipe.targets:
            features = [name for name in recipe.features if name in stored]
    if not features:
        raise InvalidValueError(
            f"no variable is left to predict {list(options.targets)} from, the samples have "
            f"{stored}; name fewer in to_pred"
        )
    return tuple(features)


def _warn_of_filled(
    source: SampleSource, metadata: StoreMetadata | None, options: DatasetOptions
) -> None:
    """Warn of targets or weights whose gaps were filled when they were sampled."""
    advice, filled, of_call = FILL_FEATURES, source.filled, source.filled
    if metadata:
        filled, of_call = metadata.invented(options.scored), metadata.filled
    if source.is_cut:  # This call asks for `metadata.filled`: no need to warn of that.
        filled = {name: how for name, how in filled.items() if name not in of_call}
    elif metadata:
        advice = _SAMPLE_ANEW
        if options.shifted:  # A fill that was meant for the inputs is in the targets too.
            filled = {**filled, **of_call}
    filled = {name: how for name, how in filled.items() if name in options.scored}
    warn_of_filled("weights" if options.weights_variable in filled else "to_pred", filled, advice)


def _check_weights(options: DatasetOptions) -> None:
    if not options.targets:
        raise InvalidTypeError("weights are for the loss of y, so they need to_pred")
    if isinstance(options.weights, Mapping) and len(options.targets) != 1:
        raise InvalidTypeError(
            f"weights of classes need exactly one target, got {list(options.targets)}; give a "
            "variable of weights"
        )


def _stacked_fields(
    source: SampleSource, x: Names, y: Names, options: DatasetOptions
) -> list[Field]:
    """Make the arrays of X, y and weights."""
    fields = [_stacked_field(source, x, options.dtype)]
    if y:
        fields.append(_stacked_field(source, y, options.target_dtype))
    if WEIGHTS in source.variables:
        # Weights of samples have no axes; those of cells have one channel, however many y has.
        window, sizes = _window(source, WEIGHTS), source.variables[WEIGHTS].sizes
        target_sizes = source.variables[y[0]].sizes
        if sizes not in ({}, target_sizes):
            raise InvalidValueError(
                f"weights must be one per sample, or per cell of the target's window "
                f"{target_sizes}, got window {sizes}"
            )
        fields.append(Field((WEIGHTS,), window, np.dtype("float32"), stacked=window != ()))
    # Square windows would hide that some samples are transposed.
    names = [name for field in fields for name in field.names]
    dims = {name.variable: tuple(source.variables[name].sizes) for name in names}
    orders = set(dims.values())
    if len({frozenset(order) for order in orders}) < len(orders):
        raise InvalidValueError(
            f"the variables of a sample must have their dims in one order, got {dims}; "
            "transpose them with ds.transpose"
        )
    return fields


def _stacked_field(source: SampleSource, names: Names, dtype: np.dtype[Any]) -> Field:
    windows = [_window(source, name) for name in names]
    sizes = {name.variable: source.variables[name].sizes for name in names}
    if any(of_variable != sizes[names[0].variable] for of_variable in sizes.values()):
        raise InvalidValueError(
            f"variables with different windows cannot be stacked: {sizes}; choose some "
            "with features="
        )
    return Field(names, windows[0], dtype)


def _window(source: SampleSource, name: ArrayName) -> tuple[int, ...]:
    variable = source.variables[name]
    if variable.dtype.kind not in "fiub":
        raise InvalidTypeError(
            f"variable {name.variable!r} has dtype {variable.dtype}, which tensors cannot "
            "have; choose others by features=, or leave it out with ds.drop_vars"
        )
    return variable.window


def sizes_of_one_step(items: Items, rollout: int) -> tuple[dict[str, int], ...]:
    """Return the window of each array that samples of a single step have."""
    source = items.source
    sizes = [dict(source.variables[field.names[0]].sizes) for field in items.fields]
    if rollout == 1:
        return tuple(sizes)
    dim, along = next((d, a) for d, a in source.lead.items() if a.offset)
    outputs = along.target_size // rollout
    for of_array, cells in zip(sizes, (along.offset, outputs, outputs), strict=False):
        if dim in of_array:  # Weights of samples have no window.
            of_array[dim] = cells
            if cells == 1 and source.is_cut:  # Stored samples keep dims of one cell.
                del of_array[dim]
    return tuple(sizes)


def fitted_of(
    items: Items,
    targets: tuple[str, ...],
    coordinates: tuple[str, ...],
    step_sizes: Sequence[Mapping[str, int]] = (),
) -> FittedRecipe | None:
    """Return how X and y of a single step are made; None for samples made by hand."""
    source, metadata = items.source, items.metadata
    if metadata is None:
        return None
    fitted, cube_dim = metadata.fitted, source.cube_dim
    recipe = replace(fitted.recipe, features=items.features, targets=targets)
    fitted = replace(fitted, recipe=recipe, axes=source.axes, coord_features=coordinates)
    if not step_sizes:  # y has the windows of X
        return fitted
    x, y, *_ = ({cube_dim(d): n for d, n in sizes.items()} for sizes in step_sizes)
    lead = {}
    for sample_dim, of_dim in source.lead.items():
        dim = cube_dim(sample_dim)
        lead[dim] = DimLead(of_dim.offset, x.get(dim, 1), y.get(dim, 1))
    recipe = replace(recipe, window_dims=tuple(x))
    return replace(fitted, recipe=recipe, lead=lead, target_dims=tuple(y))
