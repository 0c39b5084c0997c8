"""Sources that change the samples of another source: parts of windows, static fields, weights.

A `View` is a `SampleSource` around a `SampleSource`, so loaders need not know it. It computes some
variables, and passes on all else. Every function here returns a view of a source. Does not use
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.grid import SizesLike, parse_sizes
from ml4cube.core.rank_shares import Ints
from ml4cube.core.scaling import Scaling
from ml4cube.loading.ring.arrays import Field, Scratch
from ml4cube.loading.sources import SampleSource, SampleVariable, unscaled
from ml4cube.recipe.lead_time import parse_lead, warn_of_uneven_steps, whole_cells
from ml4cube.recipe.preparation import Arrays
from ml4cube.recipe.roles import TARGET, WEIGHT, ArrayName
from ml4cube.sampling.selection import check_known

if TYPE_CHECKING:
    import xarray as xr

#: The weights of the loss, which a view adds.
WEIGHTS = ArrayName("weights", WEIGHT)


class Computed(NamedTuple):
    """A variable that a view computes from variables of its source."""

    variable: SampleVariable
    # Variables of the source that it is computed from.
    inputs: tuple[ArrayName, ...]
    # Takes the number of a chunk and the inputs of its samples, and returns values of the shape
    # (samples, *window), or one that can be broadcast to it; picklable.
    compute: Callable[..., NDArray[Any]]


class View(SampleSource):
    """A source that computes some variables, and passes on all else of another source."""

    def __init__(self, source: SampleSource, computed: Mapping[ArrayName, Computed]) -> None:
        self._source, self.computed = source, computed
        self.variables = source.variables | {name: c.variable for name, c in computed.items()}
        self.lead, self.cube_dims = source.lead, source.cube_dims
        self.counts, self.remote = source.counts, source.remote
        self.auxiliary, self.filled, self.is_cut = source.auxiliary, source.filled, source.is_cut
        self._scratch = Scratch()

    def read(self, chunk: int, out: Mapping[ArrayName, NDArray[Any]]) -> None:
        """Write the samples of a chunk into one array per variable."""
        passed = {name: array for name, array in out.items() if name not in self.computed}
        computed = {name: self.computed[name] for name in out if name in self.computed}
        needed = {name for of_array in computed.values() for name in of_array.inputs}
        inputs = {
            name: self._scratch.take(name, (int(self.counts[chunk]), *v.window), v.dtype)
            for name, v in self._source.variables.items()
            if name in needed
        }
        self._source.read(chunk, {**passed, **inputs})
        for name in passed.keys() & inputs.keys():
            passed[name][...] = inputs[name]
        for name, of_array in computed.items():
            out[name][...] = of_array.compute(chunk, *(inputs[n] for n in of_array.inputs))

    def describe(self, chunk: int) -> str:
        """Describe a chunk for an error message."""
        return self._source.describe(chunk)

    def coords(self, samples: Ints) -> Arrays:
        """Return coordinates of samples, one array per coordinate."""
        return self._source.coords(samples)

    def first_cells(self, samples: Ints, dims: Iterable[str]) -> dict[str, Ints]:
        """Return the index of the first cell of samples along cube dims."""
        return self._source.first_cells(samples, dims)

    @cached_property
    def axes(self) -> dict[str, xr.Variable]:
        """The coordinate of every cell along each cube dim where it is known."""
        return self._source.axes


def cut_windows(
    source: SampleSource,
    scored: Iterable[str],
    sample_size: SizesLike | None,
    target_offset: SizesLike | None,
    target_size: SizesLike | None,
) -> View:
    """Cut stored windows in two: the first cells are inputs, later ones of `scored` are targets."""
    check_known("to_pred or weights", scored, [name.variable for name in source.variables])
    stored: dict[str, int] = {}
    for stored_variable in source.variables.values():
        stored |= stored_variable.sizes
    offset = whole_cells("target_offset", target_offset, stored, least=0)
    cells = {dim: max(1, n - offset.get(dim, 0)) for dim, n in stored.items()}
    if sample_size is not None:
        cells |= parse_sizes("sample_size", sample_size, stored)
    of_targets = {"target_offset": target_offset, "target_size": target_size}
    lead = parse_lead(cells, stored, "a stored window", **of_targets)
    inputs = {dim: slice(0, dim_lead.input_size) for dim, dim_lead in lead.items()}
    targets = {d: slice(a.offset, a.offset + a.target_size) for d, a in lead.items()}
    computed = {name: _cut(source, name, inputs) for name in source.variables}
    for variable in scored:
        computed[ArrayName(variable, TARGET)] = _cut(source, ArrayName(variable), targets)
    axes = {dim: source.axes.get(source.cube_dim(dim)) for dim in lead}
    warn_of_uneven_steps(lead, {dim: axis for dim, axis in axes.items() if axis is not None})
    view = View(source, computed)
    view.lead = lead
    return view


def _cut(source: SampleSource, name: ArrayName, cells: Mapping[str, slice]) -> Computed:
    """Return a variable as some of its cells, given the slice along each stored dim."""
    sizes, dtype = source.variables[name]
    slices = {dim: cells[dim] for dim in sizes}
    variable = SampleVariable({dim: s.stop - s.start for dim, s in slices.items()}, dtype)
    return Computed(variable, (name,), partial(_indexed, (slice(None), *slices.values())))


def _indexed(index: tuple[slice | None, ...], chunk: int, values: NDArray[Any]) -> NDArray[Any]:
    return values[index]


def repeat_along_missing_dims(source: SampleSource, names: Iterable[ArrayName]) -> View:
    """Repeat static fields and scalars along the dims of the window that they lack."""
    variables = {name: source.variables[name] for name in names}
    window = max((v.sizes for v in variables.values()), key=len)
    computed = {}
    for name, (sizes, dtype) in variables.items():
        has_order_of_window = list(sizes) == [dim for dim in window if dim in sizes]
        is_smaller = sizes.items() < window.items()
        if is_smaller and has_order_of_window:
            axes = dict.fromkeys(window, np.newaxis) | dict.fromkeys(sizes, slice(None))
            repeated = partial(_indexed, (slice(None), *axes.values()))
            computed[name] = Computed(SampleVariable(window, dtype), (name,), repeated)
    return View(source, computed)


def refuse_inexact_integers(source: SampleSource, fields: Iterable[Field]) -> SampleSource:
    """Refuse gaps, fractions and too large numbers that are read as integers, which change them."""
    checked = {}
    for name, dtype in [(name, field.dtype) for field in fields for name in field.names]:
        variable = source.variables[name]
        if dtype.kind in "iub" and not np.can_cast(variable.dtype, dtype):
            exact = partial(_exact, source, name.variable, dtype)
            checked[name] = Computed(variable, (name,), exact)
    if not checked:
        return source
    return View(source, checked)


def _exact(
    source: SampleSource, name: str, dtype: np.dtype[Any], chunk: int, values: NDArray[Any]
) -> NDArray[Any]:
    if not np.isfinite(values).all():
        raise InvalidValueError(
            f"{name!r} has gaps in {source.describe(chunk)}, which cannot be read as "
            f"{dtype}; drop or fill them, or read floats"
        )
    with np.errstate(invalid="ignore"):
        changed = values.astype(dtype) != values
    if changed.any():
        raise InvalidValueError(
            f"{name!r} has {values[changed].flat[0].item()!r} in {source.describe(chunk)}, which "
            f"{dtype} cannot hold; if it was scaled, store it as integers or use scale_fn=None, "
            "else read floats"
        )
    return values


def add_weights(
    source: SampleSource,
    weights: str | Mapping[Any, float] | ArrayLike,
    target: ArrayName,
    scaling: Mapping[str, Scaling],
) -> View:
    """Add `WEIGHTS`: one number per sample, or one per cell of the target."""
    sizes: Mapping[str, int] = {}
    inputs: tuple[ArrayName, ...] = ()
    if isinstance(weights, str):
        check_known("weights", [weights], [name.variable for name in source.variables])
        variable_of_weights = ArrayName(weights, target.role)
        inputs, sizes = (variable_of_weights,), source.variables[variable_of_weights].sizes
        compute = partial(_unscaled_weights, source, variable_of_weights, scaling.get(weights))
    elif isinstance(weights, Mapping):
        if target.variable in scaling:
            raise InvalidTypeError(
                f"weights of classes need a target of classes, but {target.variable!r} was scaled "
                "as a number; store it as integers, or use scale_fn=None"
            )
        if not weights:
            raise InvalidValueError("weights={} has no class; give {class: weight}")
        # Classes of the target as stored, because the dtype of the batch may merge them.
        inputs, sizes = (target,), source.variables[target].sizes
        classes, order = np.unique(np.array(list(weights)), return_index=True)
        values = _checked(list(weights.values()))[order]
        compute = partial(_weights_of_classes, source, target.variable, classes, values)
    else:
        values = _checked(weights)
        samples = int(source.starts[-1])
        if values.shape != (samples,):
            raise InvalidValueError(
                f"weights must be one per sample, of which there are {samples}, got shape "
                f"{values.shape}"
            )
        compute = partial(_weights_of_samples, source, values)
    variable = SampleVariable(dict(sizes), np.dtype(np.float32))
    return View(source, {WEIGHTS: Computed(variable, inputs, compute)})


def _unscaled_weights(
    source: SampleSource, name: ArrayName, scaling: Scaling | None, chunk: int, values: NDArray[Any]
) -> NDArray[np.float32]:
    if scaling is not None:
        values = unscaled(scaling, name, values, source, source.rows(chunk))
    return _checked(values, source.describe(chunk))


def _weights_of_classes(
    source: SampleSource,
    name: str,
    classes: NDArray[Any],
    weights: NDArray[np.float32],
    chunk: int,
    values: NDArray[Any],
) -> NDArray[np.float32]:
    """Return the weight of each cell, 0 for gaps."""
    position = np.searchsorted(classes, values).clip(max=len(classes) - 1)
    is_class = classes[position] == values
    gaps = values != values
    if not (is_class | gaps).all():
        raise InvalidValueError(
            f"{name!r} has class {values[~is_class & ~gaps].flat[0].item()!r} in "
            f"{source.describe(chunk)}, but weights has only {classes.tolist()}; give "
            "every class a weight"
        )
    return np.where(is_class, weights[position], np.float32(0))


def _weights_of_samples(
    source: SampleSource, weights: NDArray[np.float32], chunk: int
) -> NDArray[np.float32]:
    return weights[source.rows(chunk)]


def _checked(weights: ArrayLike, where: str = "") -> NDArray[np.float32]:
    """Return weights as float32; refuse negative and missing ones."""
    try:
        values = np.asarray(weights, np.float32)
    except (TypeError, ValueError) as error:
        raise InvalidTypeError(
            f"weights must be a variable, one number per sample, or {{class: weight}}, got "
            f"{weights!r}"
        ) from error
    wrong = ~(values >= 0) | np.isinf(values)
    if wrong.any():
        raise InvalidValueError(
            f"weights must be finite and not negative, got {values[wrong].flat[0]}"
            + (f" in {where}" if where else "")
        )
    if not where and values.size and not values.any():
        raise InvalidValueError("weights must be above 0 somewhere, got zeros only")
    return values
