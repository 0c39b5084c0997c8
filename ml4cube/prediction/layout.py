"""The layout of what a model returns: which variables, further dims and dims of the window.

`Layout.of` reads it from the shape of the first result, and from the argument `outputs`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_whole
from ml4cube.prediction.geometry import Windows
from ml4cube.prediction.models import Model, Result, classes_of
from ml4cube.recipe.fitted import FittedRecipe

#: Dim of the outputs that are probabilities of classes.
CLASS = "class"
#: Name of the variable that a model without targets returns, and its dim.
EMBEDDING, FEATURE = "embedding", "feature"
#: Names of outputs in the unit of the target that say how far, not where.
_SPREADS = ("std", "stddev", "spread", "sigma", "scale", "uncertainty")
_VARIANCES = ("var", "variance")


@dataclass(frozen=True)
class Outputs:
    """Several outputs per target, as a user names them: along a dim, or each a variable."""

    # The dim of the outputs; None if each is a variable of its own, or there is one.
    dim: str | None = None
    # Coordinates along the dim, or names; None to count them.
    labels: tuple[Any, ...] | None = None

    @classmethod
    def parse(cls, outputs: Any, dims: Iterable[str]) -> Self:
        """Read the argument `outputs`."""
        if outputs is None:
            return cls()
        if isinstance(outputs, str):
            outputs = {outputs: None}
        if isinstance(outputs, Mapping):
            return cls._along_dim(outputs, dims)
        names = _distinct("outputs", outputs)
        if not all(isinstance(name, str) for name in names):
            raise InvalidTypeError(
                f"outputs must be names, or a dim with its coordinates such as "
                f"{{'quantile': [0.05, 0.5, 0.95]}}, got {outputs!r}"
            )
        return cls(None, names)

    @classmethod
    def _along_dim(cls, outputs: Mapping[Any, Any], dims: Iterable[str]) -> Self:
        if len(outputs) != 1:
            raise InvalidValueError(
                f"outputs must have one dim, such as {{'quantile': [0.05, 0.5, 0.95]}}, got "
                f"{outputs!r}"
            )
        ((dim, labels),) = outputs.items()
        if not isinstance(dim, str) or dim in dims:
            raise InvalidValueError(
                f"outputs must name a dim that the result does not have yet, got {dim!r}; it "
                f"has {list(dims)}"
            )
        if labels is None:
            return cls(dim)
        if isinstance(labels, int | np.integer):
            labels = range(check_whole(f"outputs[{dim!r}]", labels, 1))
        return cls(dim, _distinct(f"outputs[{dim!r}]", labels))

    @property
    def names(self) -> tuple[Any, ...]:
        """Names of outputs that are variables of their own."""
        if self.dim is not None or self.labels is None:
            return ()
        return self.labels


def _distinct(argument: str, labels: Any) -> tuple[Any, ...]:
    if isinstance(labels, str | bytes) or not isinstance(labels, Iterable):
        raise InvalidTypeError(f"{argument} must be a list, got {labels!r}")
    entries = []
    for label in labels:
        if isinstance(label, np.generic):
            label = label.item()
        entries.append(label)
    if not entries or len(set(entries)) < len(entries):
        raise InvalidValueError(f"{argument} must have distinct entries, got {labels!r}")
    return tuple(entries)


@dataclass(frozen=True)
class Variable:
    """A variable of the result."""

    name: str
    # The target whose values it has; None for an embedding.
    target: str | None
    # Its dim beside those of the cube, with the coordinates along it.
    dim: str | None = None
    labels: tuple[Any, ...] = ()
    # The power of the target's scale in its values: 1, for variances 2.
    power: int = 1
    # Whether its values contain the target's offset; a spread does not.
    has_offset: bool = True
    # Whether its values are labels of classes, of which there is no mean.
    is_label: bool = False
    # By name, the numbers of classes that the target's flags list.
    numbers: Mapping[str, float] = field(default_factory=dict)

    @property
    def channels(self) -> int:
        """Numbers for each cell."""
        return 1 if self.dim is None else len(self.labels)

    @property
    def has_numbers(self) -> bool:
        """Whether the labels along its dim are numbers."""
        return np.array(self.labels).dtype.kind in "iufb"

    @property
    def class_values(self) -> NDArray[np.float64]:
        """Numbers of the classes: their labels, those of their names, or their positions."""
        if self.has_numbers:
            return np.array(self.labels).astype(float)
        if self.numbers.keys() >= set(self.labels):
            return np.array([self.numbers[name] for name in self.labels])
        return np.arange(float(len(self.labels)))

    @property
    def is_probability(self) -> bool:
        """Whether its values are probabilities of classes."""
        return self.dim == CLASS


class _Part(NamedTuple):
    """The result of one target, or one output of it."""

    target: str
    # The name of the output; None if the target has one, or several along a dim.
    output: str | None
    # Shape (windows, [outputs,] *window).
    values: NDArray[Any]

    @property
    def name(self) -> str:
        """Name of the variable of the result."""
        return self.target if self.output is None else f"{self.target}_{self.output}"


@dataclass(frozen=True)
class Expected:
    """What is known of results before the first one."""

    # Variables that the model predicts.
    targets: tuple[str, ...]
    # Whether the targets were named; a model without may also return an embedding.
    are_named: bool
    # Cells of a window of targets by dim, in the model's order.
    window: Mapping[str, int]
    # Targets that are classes, with the labels of these where they are known.
    classes: Mapping[str, tuple[Any, ...] | None]
    outputs: Outputs
    # By target and name, the numbers of classes that flags list.
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    # Attributes of targets in the cube of the training.
    attrs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def parts(self, result: Result) -> list[_Part]:
        """Return the results of each target; none if they cannot be told apart."""
        if isinstance(result, dict):
            return self._parts_of_dict(result)
        if isinstance(result, tuple):
            return self._parts_of_tuple(result)
        return self._parts_of_array(result)

    def _parts_of_dict(self, result: Mapping[str, NDArray[Any]]) -> list[_Part]:
        if set(result) == set(self.targets):
            return [_Part(target, None, result[target]) for target in self.targets]
        names = self.outputs.names or tuple(result)
        if len(self.targets) > 1 or set(result) != set(names):
            return []
        return [_Part(self.targets[0], name, result[name]) for name in names]

    def _parts_of_tuple(self, result: tuple[NDArray[Any], ...]) -> list[_Part]:
        target, names = self.targets[0], self.outputs.names
        if len(self.targets) == 1:
            if names and len(result) == len(names):
                return [_Part(target, name, a) for name, a in zip(names, result, strict=True)]
            if self.outputs.dim is not None and len(result) > 1:
                return [_Part(target, None, np.stack(result, axis=1))]
        if len(result) != len(self.targets):
            return []
        return [_Part(target, None, a) for target, a in zip(self.targets, result, strict=True)]

    def _parts_of_array(self, result: NDArray[Any]) -> list[_Part]:
        n_targets, names = len(self.targets), self.outputs.names
        window = tuple(self.window.values())
        if window and result.shape[1:] == (n_targets * math.prod(window),):  # rows of estimators
            result = result.reshape(-1, n_targets, *window)
        if n_targets == 1:
            arrays = [result]
        elif result.shape[1:2] == (n_targets,):
            arrays = [result[:, i] for i in range(n_targets)]
        else:
            return []
        by_target = list(zip(self.targets, arrays, strict=True))
        if not names:
            return [_Part(target, None, array) for target, array in by_target]
        if any(array.shape[1:2] != (len(names),) for array in arrays):
            return []
        return [_Part(t, o, array[:, i]) for t, array in by_target for i, o in enumerate(names)]

    def refuse(self, result: Result, x_shape: tuple[int, ...]) -> InvalidValueError:
        """Return the error for a result of another form."""
        shape = (x_shape[0], len(self.targets), *self.window.values())
        if isinstance(result, tuple):
            got = f"{len(result)} arrays"
        elif isinstance(result, dict):
            got = f"a dict of {list(result)}"
        else:
            got = str(result.shape)
        named = ""
        if self.outputs.labels is not None:
            named = f" with the outputs {self.outputs.labels}"
        return InvalidValueError(
            f"the model must return shape {shape} for the targets {list(self.targets)} and X of "
            f"shape {x_shape}{named}, got {got}; name several outputs per target with outputs=, "
            "such as {'quantile': [0.05, 0.5, 0.95]}, {'class': 4} or ['mean', 'std']"
        )


@dataclass(frozen=True)
class Layout:
    """The variables of a model's results, and the dims that a window of results lacks."""

    variables: tuple[Variable, ...]
    # Dims of the window of targets along which a result has no axis.
    lacking: tuple[str, ...]
    expected: Expected

    @classmethod
    def of(cls, result: Result, expected: Expected, x_shape: tuple[int, ...]) -> Self:
        """Read the layout from the result of a batch of inputs."""
        parts = expected.parts(result)
        fits = [fit for fit in (_fit(part, expected) for part in parts) if fit is not None]
        if not fits or len(fits) < len(parts):
            if expected.are_named or not isinstance(result, np.ndarray) or result.ndim < 2:
                raise expected.refuse(result, x_shape)
            return cls._of_embedding(result, expected, x_shape)
        counts, lacking = zip(*fits, strict=True)
        if len(set(lacking)) > 1:
            raise InvalidValueError(
                "all outputs of the model must have the same dims of the window, got some that "
                f"lack {sorted(set(lacking))}"
            )
        variables = [_variable(p, n, expected) for p, n in zip(parts, counts, strict=True)]
        return cls(tuple(variables), lacking[0], expected)

    @classmethod
    def _of_embedding(
        cls, result: NDArray[Any], expected: Expected, x_shape: tuple[int, ...]
    ) -> Self:
        fits = _lacking(result.shape[2:], expected.window)
        if not fits:
            raise expected.refuse(result, x_shape)
        lacking = _only(fits, expected.window)
        labels = tuple(range(result.shape[1]))
        return cls((Variable(EMBEDDING, None, FEATURE, labels),), lacking, expected)

    @property
    def window(self) -> tuple[int, ...]:
        """Cells of a window of results along each dim, in the model's order."""
        return _without(self.expected.window, self.lacking)

    @classmethod
    def plain(cls, expected: Expected) -> Self:
        """Return the layout of one number per target and cell."""
        return cls(tuple(Variable(name, name) for name in expected.targets), (), expected)

    def channels(self, result: Result, x_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the results of a batch, shape (windows, channels, cells of a window)."""
        n, cells = x_shape[0], math.prod(self.window)
        if self.variables[0].target is None and isinstance(result, np.ndarray):
            by_name = {EMBEDDING: result}
        else:
            by_name = {part.name: part.values for part in self.expected.parts(result)}
        # A dict may have another order than that of the first result.
        arrays = [by_name.pop(v.name) for v in self.variables if v.name in by_name]
        shapes = [(n, variable.channels, cells) for variable in self.variables]
        if by_name or [np.size(a) for a in arrays] != [math.prod(shape) for shape in shapes]:
            raise self.expected.refuse(result, x_shape)
        for i, (variable, shape) in enumerate(zip(self.variables, shapes, strict=True)):
            arrays[i] = arrays[i].reshape(shape)
            if variable.is_probability:
                arrays[i] = _probabilities(arrays[i])
        return join_channels(arrays)


def expected_results(
    fitted: FittedRecipe,
    windows: Windows,
    flags_of_classes: Mapping[str, Mapping[float, str]],
    models: Sequence[Model],
    outputs: Any,
    reduce: str | None,
) -> Expected:
    """Return what is known of the results of a model."""
    recipe = fitted.recipe
    named = Outputs.parse(outputs, windows.result_shape)
    labels = _labels_of(models)
    classes: dict[str, tuple[Any, ...] | None] = {}
    numbers = {}
    for target, flags in flags_of_classes.items():
        classes[target] = tuple(map(int_if_whole, flags)) or None
        numbers[target] = {name: label for label, name in flags.items()}
    if labels:  # of fitted models; they come before those that the flags of the targets list
        classes = dict.fromkeys(recipe.predicted, labels)
    if reduce == "argmax" and not classes and named.dim != CLASS:
        raise InvalidValueError(
            "reduce='argmax' needs targets that are classes: integers, or outputs={'class': ...}"
        )
    return Expected(
        targets=recipe.predicted,
        are_named=bool(recipe.targets),
        window=windows.target_window,
        classes=classes,
        outputs=named,
        numbers=numbers,
        attrs={target: fitted.attrs_of(target) for target in recipe.predicted},
    )


def _labels_of(models: Sequence[Model]) -> tuple[Any, ...] | None:
    """Return the labels of the classes that fitted classifiers know."""
    of_models = [classes_of(model) for model in models]
    labels = {tuple(classes.tolist()): None for classes in of_models if classes is not None}
    if len(labels) > 1:
        raise InvalidValueError(f"all members must have the same classes, got {[*labels]}")
    return next(iter(labels), None)


def int_if_whole(number: float) -> float:
    """Return a whole number as an integer, as labels of classes are written."""
    return int(number) if number.is_integer() else number


def join_channels(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    """Return the channels of several arrays (windows, channels, cells) as one."""
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays, axis=1)


def _fit(part: _Part, expected: Expected) -> tuple[int, tuple[str, ...]] | None:
    """Return the number of outputs along a dim, 0 without, and the dims that a result lacks."""
    sizes = part.values.shape[1:]
    forms = [sizes]
    if sizes[:1] == (1,):  # which may stand for the target
        forms.append(sizes[1:])
    has_dim = part.output is None and expected.outputs.dim is not None
    are_classes = part.output is None and part.target in expected.classes
    fits = []
    for form in forms:
        if not has_dim:
            fits.append((0, _lacking(form, expected.window)))
        # Of one number per cell, a target of classes is predicted as a number.
        if (has_dim and form[:1] > (0,)) or (are_classes and form[:1] > (1,)):
            fits.append((form[0], _lacking(form[1:], expected.window)))
    fits = [(count, lacking) for count, lacking in fits if lacking]
    # Of several, the one that lacks the fewest dims; with outputs, if that is equal.
    best = min(fits, key=lambda fit: (len(fit[1][0]), fit[0] == 0), default=None)
    return None if best is None else (best[0], _only(best[1], expected.window))


def _without(window: Mapping[str, int], dims: Collection[str]) -> tuple[int, ...]:
    """Return the cells of a window along all but some dims."""
    return tuple(n for dim, n in window.items() if dim not in dims)


def _lacking(sizes: tuple[int, ...], window: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return which dims of a window a result of some sizes may lack; none if it does not fit."""
    n_lacking = max(len(window) - len(sizes), 0)
    return [dims for dims in combinations(window, n_lacking) if _without(window, dims) == sizes]


def _only(fits: list[tuple[str, ...]], window: Mapping[str, int]) -> tuple[str, ...]:
    """Return the dims that a result lacks; refuse results that may lack one or another."""
    if len(fits) > 1:
        sizes = _without(window, fits[0])
        raise InvalidValueError(
            f"the model returned windows of {sizes} cells for windows {dict(window)}, which may "
            f"lack any of {fits}; say which with target_size of the data set"
        )
    return fits[0]


def _variable(part: _Part, count: int, expected: Expected) -> Variable:
    """Return the variable of a part of the results, with some outputs along a dim or without."""
    target, outputs = part.target, expected.outputs
    if part.output is not None:
        is_variance = part.output in _VARIANCES
        has_offset = not is_variance and part.output not in _SPREADS
        return Variable(part.name, target, power=1 + is_variance, has_offset=has_offset)
    if not count:
        is_label = target in expected.classes and part.values.dtype.kind in "iub"
        return Variable(target, target, is_label=is_label)
    dim = outputs.dim or CLASS
    labels, origin = outputs.labels, "outputs has"
    if labels is None and dim == CLASS:
        labels, origin = expected.classes.get(target), f"flag_values of {target!r} have"
    if labels is None:
        labels = tuple(range(count))
    if len(labels) != count:
        raise InvalidValueError(
            f"{origin} {len(labels)} entries along {dim!r}, {labels}, but the model returns "
            f"{count} per target; name them by outputs={{{dim!r}: [...]}}"
        )
    return Variable(target, target, dim, labels, numbers=expected.numbers.get(target, {}))


def _probabilities(values: NDArray[Any]) -> NDArray[Any]:
    """Return probabilities along the second axis; other numbers are logits.

    Cells whose probabilities are all 0 are those that a model has masked.
    """
    total = values.sum(axis=1)
    total = total[np.isfinite(total) & (values != 0).any(axis=1)]
    # Rounded to bfloat16, shares differ by up to 1/512 of them.
    if total.size and not (values < 0).any() and np.allclose(total, 1, atol=1e-2):
        return values
    powers = np.exp(values - values.max(axis=1, keepdims=True))
    shares: NDArray[Any] = powers / powers.sum(axis=1, keepdims=True)
    return shares
