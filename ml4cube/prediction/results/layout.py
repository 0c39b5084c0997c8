"""The layout of what a model returns: which variables, further dims and dims of the window.

`Layout.of` reads it from the shape of the first result, and from the argument `outputs`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_whole
from ml4cube.prediction.models import Result

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

    # The dim of the outputs; None if each is a variable of its own.
    dim: str | None
    # Coordinates along the dim, or names; None to count them.
    labels: tuple[Any, ...] | None

    @classmethod
    def parse(cls, given: Any, dims: Iterable[str]) -> Self | None:
        """Read the argument `outputs`."""
        if given is None:
            return None
        if isinstance(given, str):
            given = {given: None}
        if isinstance(given, Mapping):
            if len(given) != 1:
                raise InvalidValueError(
                    f"outputs must have one dim, such as {{'quantile': [0.05, 0.5, 0.95]}}, got "
                    f"{given!r}"
                )
            ((dim, labels),) = given.items()
            if not isinstance(dim, str) or dim in dims:
                raise InvalidValueError(
                    f"outputs must name a dim that the result does not have yet, got {dim!r}; it "
                    f"has {list(dims)}"
                )
            if isinstance(labels, int | np.integer):
                labels = range(check_whole(f"outputs[{dim!r}]", labels, 1))
            return cls(dim, None if labels is None else _distinct(f"outputs[{dim!r}]", labels))
        names = _distinct("outputs", given)
        if not all(isinstance(name, str) for name in names):
            raise InvalidTypeError(
                f"outputs must be names, or a dim with its coordinates such as "
                f"{{'quantile': [0.05, 0.5, 0.95]}}, got {given!r}"
            )
        return cls(None, names)


def _distinct(argument: str, labels: Any) -> tuple[Any, ...]:
    if isinstance(labels, str | bytes) or not isinstance(labels, Iterable):
        raise InvalidTypeError(f"{argument} must be a list, got {labels!r}")
    found = tuple(label.item() if isinstance(label, np.generic) else label for label in labels)
    if not found or len(set(found)) < len(found):
        raise InvalidValueError(f"{argument} must have distinct entries, got {labels!r}")
    return found


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
    def class_values(self) -> NDArray[np.float64]:
        """Numbers of the classes: their labels, those of their names, or their positions."""
        labels = np.array(self.labels)
        if labels.dtype.kind in "iufb":
            return labels.astype(float)
        if self.numbers.keys() >= set(self.labels):
            return np.array([self.numbers[name] for name in self.labels])
        return np.arange(float(len(labels)))

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
    outputs: Outputs | None
    # By target and name, the numbers of classes that flags list.
    numbers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def parts(self, result: Result) -> list[_Part] | None:
        """Return the results of each target; None if they cannot be told apart."""
        names = self.outputs.labels if self.outputs and self.outputs.dim is None else None
        if isinstance(result, dict):
            return self._parts_by_name(result)
        only = self.targets[0] if len(self.targets) == 1 else None
        if isinstance(result, tuple):
            if names and only and len(result) == len(names):
                return [_Part(only, name, a) for name, a in zip(names, result, strict=True)]
            if self.outputs and self.outputs.dim and only and len(result) > 1:
                return [_Part(only, None, np.stack(result, axis=1))]
            if len(result) == len(self.targets):
                return [_Part(t, None, a) for t, a in zip(self.targets, result, strict=True)]
            return None
        n, *sizes = result.shape
        window = tuple(self.window.values())
        if window and sizes == [len(self.targets) * math.prod(window)]:  # rows of estimators
            result = result.reshape(n, len(self.targets), *window)
        if not only and (result.ndim < 2 or result.shape[1] != len(self.targets)):
            return None
        by_target = (
            {only: result} if only else {t: result[:, i] for i, t in enumerate(self.targets)}
        )
        if not names:
            return [_Part(target, None, values) for target, values in by_target.items()]
        if any(a.ndim < 2 or a.shape[1] != len(names) for a in by_target.values()):
            return None
        return [_Part(t, o, a[:, i]) for t, a in by_target.items() for i, o in enumerate(names)]

    def _parts_by_name(self, result: Mapping[str, NDArray[Any]]) -> list[_Part] | None:
        if set(result) == set(self.targets):
            return [_Part(target, None, result[target]) for target in self.targets]
        names = self.outputs.labels if self.outputs and self.outputs.dim is None else (*result,)
        if len(self.targets) == 1 and set(result) == set(names or ()):
            return [_Part(self.targets[0], name, result[name]) for name in names or ()]
        return None

    def refuse(self, result: Result, x_shape: tuple[int, ...]) -> InvalidValueError:
        """Return the error for a result of another form."""
        shape = (x_shape[0], len(self.targets), *self.window.values())
        if isinstance(result, tuple):
            got = f"{len(result)} arrays"
        elif isinstance(result, dict):
            got = f"a dict of {list(result)}"
        else:
            got = str(result.shape)
        named = "" if self.outputs is None else f" with the outputs {self.outputs.labels}"
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
        fits = [_fit(part, expected) for part in parts or ()]
        if not fits or None in fits:
            if expected.are_named or not isinstance(result, np.ndarray) or result.ndim < 2:
                raise expected.refuse(result, x_shape)
            return cls._of_embedding(result, expected, x_shape)
        counts, lacking = zip(*(fit for fit in fits if fit is not None), strict=True)
        if len(set(lacking)) > 1:
            raise InvalidValueError(
                "all outputs of the model must have the same dims of the window, got some that "
                f"lack {sorted(set(lacking))}"
            )
        variables = [_variable(p, n, expected) for p, n in zip(parts or (), counts, strict=True)]
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
        return tuple(n for dim, n in self.expected.window.items() if dim not in self.lacking)

    @classmethod
    def plain(cls, expected: Expected) -> Self:
        """Return the layout of one number per target and cell."""
        return cls(tuple(Variable(name, name) for name in expected.targets), (), expected)

    def channels(self, result: Result, x_shape: tuple[int, ...]) -> NDArray[Any]:
        """Return the results of a batch, shape (windows, channels, cells of a window)."""
        n, cells = x_shape[0], math.prod(self.window)
        is_embedding = self.variables[0].target is None and isinstance(result, np.ndarray)
        parts = None if is_embedding else self.expected.parts(result)
        by_name = {part.name: part.values for part in parts or ()}
        if is_embedding:
            by_name = {EMBEDDING: np.asarray(result)}
        # A dict may have another order than that of the first result.
        arrays = [by_name.pop(v.name) for v in self.variables if v.name in by_name]
        shapes = [(n, variable.channels, cells) for variable in self.variables]
        if by_name or [np.size(a) for a in arrays] != [math.prod(shape) for shape in shapes]:
            raise self.expected.refuse(result, x_shape)
        found = [
            _probabilities(array.reshape(shape))
            if variable.is_probability
            else array.reshape(shape)
            for variable, array, shape in zip(self.variables, arrays, shapes, strict=True)
        ]
        return found[0] if len(found) == 1 else np.concatenate(found, axis=1)


def _fit(part: _Part, expected: Expected) -> tuple[int | None, tuple[str, ...]] | None:
    """Return the number of outputs along a dim, and the dims that a result lacks."""
    sizes, outputs = part.values.shape[1:], expected.outputs
    has_dim = part.output is None and outputs is not None and outputs.dim is not None
    may_have_dim = has_dim or (part.output is None and part.target in expected.classes)
    # An axis of length 1 may stand for the target.
    forms = [sizes, sizes[1:]] if sizes[:1] == (1,) else [sizes]
    found = [
        (form[0] if with_dim else None, lacking)
        for form in forms
        for with_dim in (may_have_dim, has_dim)
        # Of one number per cell, a target of classes is predicted as a number.
        if not with_dim or form[:1] > ((0,) if has_dim else (1,))
        if (lacking := _lacking(form[with_dim:], expected.window))
    ]
    fit = min(found, key=lambda fit: len(fit[1][0]), default=None)
    return None if fit is None else (fit[0], _only(fit[1], expected.window))


def _lacking(sizes: tuple[int, ...], window: Mapping[str, int]) -> list[tuple[str, ...]]:
    """Return which dims of a window a result of some sizes may lack; none if it does not fit."""
    return [
        dims
        for dims in combinations(window, max(len(window) - len(sizes), 0))
        if tuple(n for dim, n in window.items() if dim not in dims) == sizes
    ]


def _only(fits: list[tuple[str, ...]], window: Mapping[str, int]) -> tuple[str, ...]:
    """Return the dims that a result lacks; refuse results that may lack one or another."""
    if len(fits) > 1:
        sizes = tuple(n for dim, n in window.items() if dim not in fits[0])
        raise InvalidValueError(
            f"the model returned windows of {sizes} cells for windows {dict(window)}, which may "
            f"lack any of {fits}; say which with target_size of the data set"
        )
    return fits[0]


def _variable(part: _Part, count: int | None, expected: Expected) -> Variable:
    """Return the variable of a part of the results."""
    target, outputs = part.target, expected.outputs
    if part.output is not None:
        is_variance = part.output in _VARIANCES
        has_offset = not is_variance and part.output not in _SPREADS
        return Variable(part.name, target, power=1 + is_variance, has_offset=has_offset)
    if count is None:
        is_label = target in expected.classes and part.values.dtype.kind in "iub"
        return Variable(target, target, is_label=is_label)
    dim = CLASS if outputs is None or outputs.dim is None else outputs.dim
    labels = None if outputs is None else outputs.labels
    given = "outputs has"
    if labels is None and dim == CLASS:
        labels, given = expected.classes.get(target), f"flag_values of {target!r} have"
    labels = tuple(range(count)) if labels is None else labels
    if len(labels) != count:
        raise InvalidValueError(
            f"{given} {len(labels)} entries along {dim!r}, {labels}, but the model returns "
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
