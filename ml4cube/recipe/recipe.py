"""Recipe: how samples are cut from any cube, their variables, gaps and scaling."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ml4cube.core.display import shown
from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    check_choice,
    check_flags,
    check_whole,
    listed,
    parse_names,
)
from ml4cube.core.grid import SizesLike, parse_overlap, parse_sizes
from ml4cube.core.missing import DROP_POLICIES, FILL_METHODS
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.core.statistics import SCALINGS

#: `fill_method` as a user writes it, and as a recipe stores it: pairs of variable and method.
FillLike = str | Mapping[str, str | None] | None
Fills = tuple[tuple[str, str], ...]

_DROPPED = {
    "auto": "samples with a gap are dropped",
    "if_all_nan": "samples whose variables are all gap are dropped",
    "masked": "samples without a cell inside the mask, or with a gap there, are dropped",
    None: "kept",
}


@dataclass(frozen=True)
class Recipe:
    """How samples are made of any cube: windows, variables, treatment of gaps, scaling.

    Make one from a user's arguments with `Recipe.parse`. A store keeps its recipe, so that
    training and prediction need no repeated settings.

    Parameters
    ----------
    dims : tuple of str
        Dims of the cube, in the cube's order.
    size : tuple of int
        Cells of a window along each dim.
    stride : tuple of int
        Cells from the start of a window to that of the next one along each dim.
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
    classes : tuple of str
        Variables that hold classes, which are not scaled, although they may be floats.
    callback : str, optional
        Name of the function that samples were given to between filling and scaling.
    seed : int
        Seeds noise and the order of samples.

    Examples
    --------
    >>> recipe = Recipe.parse(
    ...     {"time": 4, "lat": 8, "lon": 8},
    ...     ["sst"],
    ...     sample_size={"lat": 4, "lon": 4},
    ...     overlap={"lon": 0.5},
    ... )
    >>> recipe.size, recipe.stride, recipe.array_dims
    ((1, 4, 4), (1, 4, 2), ('samples', 'lat', 'lon'))
    >>> Recipe.from_json(recipe.to_json()) == recipe
    True
    """

    dims: tuple[str, ...]
    size: tuple[int, ...]
    stride: tuple[int, ...]
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
    classes: tuple[str, ...] = ()
    callback: str | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        """Check the options."""
        if not self.variables:
            raise InvalidValueError(
                "variables must name at least one variable of the cube, got none"
            )
        check_choice("drop_nan", self.drop_nan, DROP_POLICIES)
        check_flags({"apply_mask": self.apply_mask, "drop_sample": self.drop_sample})
        object.__setattr__(self, "seed", check_whole("seed", self.seed))
        object.__setattr__(
            self, "fill_method", _parse_fill_method(self.fill_method, self.variables)
        )
        check_choice("scale_fn", self.scale_fn, SCALINGS)
        if isinstance(self.const, np.number):
            object.__setattr__(self, "const", self.const.item())
        self._check_const()
        if not self.array_dims:
            size = dict(zip(self.dims, self.size, strict=True))
            window_dims, array_dims = _stored_dims(size, None)
            object.__setattr__(self, "window_dims", window_dims)
            object.__setattr__(self, "array_dims", array_dims)

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
    ) -> Recipe:
        """Make a recipe from a user's arguments.

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
            `drop_nan`, `const`, `apply_mask`, `drop_sample`, `filter_var`, `scale_fn`,
            `classes`, `callback`, `seed`.

        Returns
        -------
        Recipe
            Checked and complete.

        Raises
        ------
        InvalidTypeError, InvalidValueError
            If an argument is invalid; the message names it, its value and the choices.
        """
        sizes = parse_sizes("sample_size", sample_size, shape) if sample_size is not None else {}
        size = {dim: sizes.get(dim, 1) for dim in shape}
        shared = parse_overlap("overlap", overlap, size)
        window_dims, stored_dims = _stored_dims(size, array_dims)
        feature_names = parse_names("features", features)
        targets = parse_names("to_pred", to_pred)
        if both := set(targets) & set(feature_names):
            raise InvalidValueError(
                f"features and targets (to_pred) must differ, got {sorted(both)} in both"
            )
        if isinstance(fill_method, str):
            check_choice("fill_method", fill_method, FILL_METHODS)
            left_out = {*targets, *unfilled}
            fill_method = {name: fill_method for name in variables if name not in left_out}
            if not fill_method:
                policy = {**policy, "const": None}  # a recipe refuses a const that fills nothing
        elif isinstance(fill_method, Mapping):
            for name in fill_method:
                check_choice("fill_method: variable", name, variables)
        return cls(
            dims=tuple(shape),
            size=tuple(size.values()),
            stride=tuple(cells - shared[dim] for dim, cells in size.items()),
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

    def scaled_variables(self, dtypes: Mapping[str, Any]) -> list[str]:
        """Return the variables of samples that are scaled, by their dtypes.

        Parameters
        ----------
        dtypes : mapping of str to dtype
            Of all variables of samples.

        Returns
        -------
        list of str
            Those of floats that are no classes.
        """
        floats = [name for name, dtype in dtypes.items() if np.dtype(dtype).kind == "f"]
        return [name for name in floats if name not in self.classes]

    @property
    def predicted(self) -> tuple[str, ...]:
        """Variables that a model returns: the targets, or else the features, as they are."""
        return self.targets or self.features or ()

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
    def overlap(self) -> tuple[int, ...]:
        """Cells that neighbouring windows share along each dim."""
        return tuple(n - stride for n, stride in zip(self.size, self.stride, strict=True))

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
    def facts(self) -> dict[str, object]:
        """Windows and the treatment of gaps and masked cells, by label, to be printed."""
        window: dict[str, object] = {}
        for dim, cells, stride in zip(self.dims, self.size, self.stride, strict=True):
            if cells > 1:
                overlap = f" (overlap {cells - stride:,})" if cells > stride else ""
                window[dim] = f"{cells:,}{overlap}"
        filled: dict[str, list[str]] = {}
        for name in self.variables:
            if (method := self.fill_of(name)) is not None:
                filled.setdefault(method, []).append(name)
        gaps = [_DROPPED[self.drop_nan]]
        gaps += [f"filled by {method!r}: {shown(names)}" for method, names in filled.items()]
        mask = None
        if self.filter_var is not None:
            uses = {"drops samples": self.mask_drops_samples, "makes gaps": self.mask_makes_gaps}
            mask = f"{self.filter_var}, {'; '.join(use for use, does in uses.items() if does)}"
        return {"Window": window or "single cells", "Gaps": "; ".join(gaps), "Mask": mask}

    def to_json(self) -> str:
        """Write the recipe as JSON; `from_json` reads it back.

        Returns
        -------
        str
            A JSON object.
        """
        return json.dumps({**dataclasses.asdict(self), "fill_method": self._fills})

    @classmethod
    def from_json(cls, text: str) -> Recipe:
        """Read a recipe that `to_json` wrote.

        Parameters
        ----------
        text : str
            A JSON object.

        Returns
        -------
        Recipe
            Equal to the one that was written.
        """
        fields = json.loads(text)
        for name, value in fields.items():
            if isinstance(value, list):
                fields[name] = tuple(value)
        return cls(**fields)


def _parse_fill_method(given: Any, variables: Sequence[str]) -> Fills:
    """Return pairs of variable and method, sorted by name."""
    if given is None or isinstance(given, str):
        # `Recipe.parse` never comes here with a text; in a recipe made directly, it fills all.
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
