"""SampleSpec: how samples are cut from a cube, their variables, and how their gaps are treated."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice, listed, names_of
from ml4cube.core.grid import Grid, SizesLike, parse_overlap, parse_sizes
from ml4cube.core.missing import DROP_POLICIES, FILL_METHODS
from ml4cube.core.statistics import SCALINGS

SAMPLE_DIM = "samples"

#: `fill_method` as a user writes it, and as a spec stores it: pairs of variable and method.
FillLike = str | Mapping[str, str | None] | None
Fills = tuple[tuple[str, str], ...]


def parse_names(argument: str, given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return names as a tuple; refuse a name that is given twice."""
    names = names_of(argument, given)
    if len(set(names)) != len(names):
        raise InvalidValueError(f"{argument} must not name a variable twice, got {given!r}")
    return names


@dataclass(frozen=True)
class SampleSpec:
    """Specification of samples: windows, variables, treatment of gaps, scaling.

    Make one from a user's arguments with `SampleSpec.parse`. A store keeps its spec, so that
    training and prediction need no repeated settings.

    Parameters
    ----------
    dims : tuple of str
        Dims of the cube, in the cube's order.
    shape : tuple of int
        Cells of the cube along each dim.
    size : tuple of int
        Cells of a window along each dim.
    overlap : tuple of int
        Cells that neighbouring windows share along each dim.
    variables : tuple of str
        Variables that are read from the cube, in the cube's order.
    targets : tuple of str
        Variables to predict; empty if none was named.
    features : tuple of str, optional
        Variables to predict from; None means all stored variables that are not targets.
    array_dims : tuple of str
        Names of a stored array's dims, the sample dim first.
    window_dims : tuple of str
        Cube dims of a stored sample, in stored order; by default those where a window has more
        than one cell.
    drop_nan : {"auto", "if_all_nan", "masked", None}
        Which samples are dropped for their gaps.
    fill_method : tuple of (str, str)
        Variables whose gaps are filled, each with its method ("sample_mean", "mean", "constant",
        "noise"). May be given as one method for every variable, a mapping
        ``{variable: method or None}`` or None.
    const : float, optional
        The value for ``fill_method="constant"``.
    apply_mask : bool
        Whether cells where `filter_var` is false count as gaps.
    drop_sample : bool
        Whether a sample with a masked cell is dropped whole.
    filter_var : str, optional
        The mask variable, if the cube has one.
    scale_fn : {"standardize", "normalize", "robust", None}
        How float variables are scaled.

    Examples
    --------
    >>> spec = SampleSpec.parse(
    ...     {"time": 4, "lat": 8, "lon": 8},
    ...     ["sst"],
    ...     sample_size={"lat": 4, "lon": 4},
    ...     overlap={"lon": 0.5},
    ... )
    >>> spec.size, spec.overlap, spec.array_dims
    ((1, 4, 4), (0, 0, 2), ('samples', 'lat', 'lon'))
    >>> len(spec.windows), spec.total, spec.edge
    (24, 32, 8)
    >>> SampleSpec.from_json(spec.to_json()) == spec
    True
    """

    dims: tuple[str, ...]
    shape: tuple[int, ...]
    size: tuple[int, ...]
    overlap: tuple[int, ...]
    variables: tuple[str, ...]
    targets: tuple[str, ...] = ()
    features: tuple[str, ...] | None = None
    array_dims: tuple[str, ...] = ()
    window_dims: tuple[str, ...] = ()
    drop_nan: str | None = "auto"
    fill_method: Fills | FillLike = ()
    const: float | None = None
    apply_mask: bool = True
    drop_sample: bool = True
    filter_var: str | None = None
    scale_fn: str | None = "standardize"

    def __post_init__(self) -> None:
        """Check the options."""
        if not self.variables:
            raise InvalidValueError(
                "variables must name at least one variable of the cube, got none"
            )
        check_choice("drop_nan", self.drop_nan, DROP_POLICIES)
        object.__setattr__(
            self, "fill_method", _parse_fill_method(self.fill_method, self.variables)
        )
        check_choice("scale_fn", self.scale_fn, SCALINGS)
        if isinstance(self.const, np.number):
            object.__setattr__(self, "const", self.const.item())
        self._check_const()
        _ = self.windows  # a Grid checks that dims, sizes and overlaps fit
        if not self.array_dims:
            size = dict(zip(self.dims, self.size, strict=True))
            window_dims, array_dims = _stored_dims(size, None)
            object.__setattr__(self, "window_dims", window_dims)
            object.__setattr__(self, "array_dims", array_dims)
        if both := set(self.targets) & set(self.features or ()):
            raise InvalidValueError(
                f"features and targets (to_pred) must differ, got {sorted(both)} in both"
            )

    def _check_const(self) -> None:
        if "constant" in self._fills.values():
            if isinstance(self.const, bool) or not isinstance(self.const, int | float):
                raise InvalidTypeError(
                    f"fill_method='constant' needs a number as const, got const={self.const!r}"
                )
            if not math.isfinite(self.const):
                raise InvalidValueError(f"const must be finite, got {self.const!r}")
        elif self.const is not None:
            raise InvalidValueError(
                f"const={self.const!r} needs fill_method='constant', got "
                f"fill_method={self._fills or None!r}"
            )

    @classmethod
    def parse(
        cls,
        shape: Mapping[str, int],
        variables: Sequence[str],
        *,
        sample_size: SizesLike | None = None,
        overlap: SizesLike | float | None = None,
        array_dims: Sequence[str] | None = None,
        to_pred: str | Iterable[str] | None = None,
        features: str | Iterable[str] | None = None,
        fill_method: FillLike = None,
        unfilled: Iterable[str] = (),
        **policy: Any,
    ) -> SampleSpec:
        """Make a spec from a user's arguments.

        Parameters
        ----------
        shape : mapping of str to int
            The cube's dims and lengths, in the cube's order.
        variables : sequence of str
            Variables to read.
        sample_size : mapping or pairs, optional
            Cells of a window by dim; dims left out have one cell. None: single points.
        overlap : mapping, pairs or float, optional
            Fraction of a window that neighbours share, by dim.
        array_dims : sequence of str, optional
            Names of the stored dims, the sample dim first. Names of cube dims select which dims
            are kept and in which order, also dims of one cell; other names rename the dims that
            a sample has by default.
        to_pred : str or iterable of str, optional
            The target variables.
        features : str or iterable of str, optional
            The feature variables.
        fill_method : str or mapping of str to str or None, optional
            Method that fills gaps: of all variables that are not targets, or by variable.
        unfilled : iterable of str
            Variables that, like targets, are filled only where a mapping names them.
        **policy
            `drop_nan`, `const`, `apply_mask`, `drop_sample`, `filter_var`, `scale_fn`.

        Returns
        -------
        SampleSpec
            Checked and complete.

        Raises
        ------
        InvalidTypeError, InvalidValueError
            If an argument is invalid; the message names it, its value and the choices.
        """
        sizes = parse_sizes("sample_size", sample_size, shape) if sample_size is not None else {}
        size = {dim: sizes.get(dim, 1) for dim in shape}
        overlap_cells = parse_overlap("overlap", overlap, size)
        window_dims, stored_dims = _stored_dims(size, array_dims)
        feature_names = parse_names("features", features)
        targets = parse_names("to_pred", to_pred)
        if isinstance(fill_method, str):
            check_choice("fill_method", fill_method, FILL_METHODS)
            left_out = {*targets, *unfilled}
            fill_method = {name: fill_method for name in variables if name not in left_out}
            if not fill_method:
                policy = {**policy, "const": None}  # a spec refuses a const that fills nothing
        elif isinstance(fill_method, Mapping):
            for name in fill_method:
                check_choice("fill_method: variable", name, variables)
        return cls(
            dims=tuple(shape),
            shape=tuple(shape.values()),
            size=tuple(size.values()),
            overlap=tuple(overlap_cells.values()),
            variables=tuple(variables),
            targets=targets,
            features=feature_names or None,
            array_dims=stored_dims,
            window_dims=window_dims,
            fill_method=fill_method,
            **policy,
        )

    @property
    def _fills(self) -> dict[str, str]:
        """`fill_method` as ``{variable: method}``."""
        return dict(self.fill_method)  # type: ignore[arg-type]

    def fill_of(self, variable: str) -> str | None:
        """Return the method that fills the gaps of a variable.

        Parameters
        ----------
        variable : str
            A variable of the cube.

        Returns
        -------
        str or None
            The method; None where gaps stay gaps.
        """
        return self._fills.get(variable)

    @property
    def fills_from_train(self) -> bool:
        """True if filling needs statistics of the train cells."""
        return any(method != "constant" for method in self._fills.values())

    @property
    def mask_drops_samples(self) -> bool:
        """True if a masked cell drops its sample; "masked" has its own rule for windows."""
        is_point = math.prod(self.size) == 1
        drops_windows = self.drop_sample and self.drop_nan != "masked"
        return self.apply_mask and (is_point or drops_windows)

    @property
    def mask_makes_gaps(self) -> bool:
        """True if masked cells are gaps in the samples."""
        return self.apply_mask and not self.mask_drops_samples

    @property
    def windows(self) -> Grid:
        """The grid of all whole windows of the cube."""
        return Grid(self.dims, self.shape, self.size, self.stride, ragged=False)

    @property
    def stride(self) -> tuple[int, ...]:
        """Cells between the starts of neighbouring windows, along each dim."""
        return tuple(n - o for n, o in zip(self.size, self.overlap, strict=True))

    @property
    def window_shape(self) -> tuple[int, ...]:
        """Cells of a stored sample along `window_dims`."""
        size = dict(zip(self.dims, self.size, strict=True))
        return tuple(size[dim] for dim in self.window_dims)

    def window_of(self, name: str, shape: tuple[int, ...]) -> dict[str, int]:
        """Return the dims of a variable's samples, which a callback may have changed.

        Parameters
        ----------
        name : str
            The variable.
        shape : tuple of int
            Cells of one of its samples.

        Returns
        -------
        dict of str to int
            Dims of the cube if they are `window_dims`, else generated names.
        """
        if shape == self.window_shape:
            return dict(zip(self.window_dims, shape, strict=True))
        return {f"{name}_{axis}": n for axis, n in enumerate(shape, 1)}

    @property
    def cube_dims(self) -> dict[str, str]:
        """Dim of the cube for each dim of a stored sample, which may have another name."""
        return dict(zip(self.array_dims[1:], self.window_dims, strict=True))

    @property
    def total(self) -> int:
        """Windows that start inside the cube, including those that exceed its end."""
        return math.prod(-(-n // s) for n, s in zip(self.shape, self.stride, strict=True))

    @property
    def edge(self) -> int:
        """Windows that exceed the end of the cube and make no sample."""
        return self.total - len(self.windows)

    def replace(self, **changes: Any) -> SampleSpec:
        """Return a spec with some fields changed.

        Parameters
        ----------
        **changes
            Fields and their new values.

        Returns
        -------
        SampleSpec
            A new, checked spec.
        """
        return dataclasses.replace(self, **changes)

    def to_json(self) -> str:
        """Write the spec as JSON; `from_json` reads it back.

        Returns
        -------
        str
            A JSON object.
        """
        return json.dumps({**dataclasses.asdict(self), "fill_method": self._fills})

    @classmethod
    def from_json(cls, text: str) -> SampleSpec:
        """Read a spec that `to_json` wrote.

        Parameters
        ----------
        text : str
            A JSON object.

        Returns
        -------
        SampleSpec
            Equal to the one that was written.
        """
        raw = json.loads(text)
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in raw.items()}
        return cls(**fields)


def _parse_fill_method(given: Any, variables: Sequence[str]) -> Fills:
    """Return pairs of variable and method, sorted by name."""
    if given is None or isinstance(given, str):
        # `SampleSpec.parse` never comes here with a text; in a spec made directly, it fills all.
        check_choice("fill_method", given, (*FILL_METHODS, None))
        given = dict.fromkeys(variables, given)
    are_pairs = isinstance(given, tuple) and all(isinstance(pair, tuple) for pair in given)
    if not (are_pairs or isinstance(given, Mapping)):
        raise InvalidTypeError(
            f"fill_method must be {listed(FILL_METHODS, 'or')}, a dict {{variable: method}} or "
            f"None, got {given!r}"
        )
    methods: dict[str, str | None] = dict(given)
    for name, method in methods.items():
        check_choice(f"fill_method[{name!r}]", method, (*FILL_METHODS, None))
    return tuple(sorted((name, method) for name, method in methods.items() if method is not None))


def _stored_dims(
    size: Mapping[str, int], array_dims: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the cube dims of a stored sample, and the names of the stored array's dims."""
    default = tuple(dim for dim, n in size.items() if n > 1)
    if array_dims is None:
        if SAMPLE_DIM in default:
            raise InvalidValueError(
                f"array_dims must name the sample dim if windows lie along a dim {SAMPLE_DIM!r} of "
                f"the cube, got None; give for example {('sample', *default)}"
            )
        return default, (SAMPLE_DIM, *default)
    names = parse_names("array_dims", array_dims)
    if not names or names[0] in size:
        raise InvalidValueError(
            f"array_dims must begin with a name for the sample dim that the cube does not have, "
            f"for example {(SAMPLE_DIM, *default)}, got {array_dims!r}"
        )
    others = names[1:]
    if set(default) <= set(others) <= set(size):  # dims of the cube, to choose and order them
        return others, names
    if len(others) == len(default) and not set(others) & set(size):  # new names of the dims
        return default, names
    raise InvalidValueError(
        f"array_dims must be {(SAMPLE_DIM, *default)}, in any order after the first, or have "
        f"{len(default)} new names after the first, got {array_dims!r}"
    )
