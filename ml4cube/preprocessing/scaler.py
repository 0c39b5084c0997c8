"""`CubeScaler`: statistics and scaling in scikit-learn's protocol."""

from __future__ import annotations

import inspect
from typing import Any, Self

from ml4cube.core.errors import InvalidValueError, RunError, check_choice
from ml4cube.core.statistics import scale_parameters, scale_values, unscale_values
from ml4cube.preprocessing import cubes
from ml4cube.preprocessing.scaling import rescale
from ml4cube.preprocessing.statistics import Statistics

METHODS = ("standardize", "normalize")


class CubeScaler:
    """Learn a scaling from a cube's training part, apply it, and take it back exactly.

    It speaks scikit-learn's protocol (`fit`, `partial_fit`, `transform`, `inverse_transform`,
    `get_params`, `set_params`; `sklearn.base.clone` and pickle work), with cubes for `X`.

    Parameters
    ----------
    method : {"standardize", "normalize"}
        To mean 0 and standard deviation 1, or to the range 0 to 1.

    Attributes
    ----------
    statistics_ : Statistics
        What `fit` learned.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> ds = xr.Dataset({"t": ("time", np.array([280.0, 282.0, np.nan], "float32"))})
    >>> scaler = CubeScaler().fit(ds)
    >>> scaled = scaler.transform(ds)
    >>> scaled.t.values
    array([-1.,  1., nan], dtype=float32)
    >>> scaler.inverse_transform(scaled).t.values
    array([280., 282.,  nan], dtype=float32)
    """

    statistics_: Statistics

    def __init__(self, method: str = "standardize") -> None:
        """Store the parameters; they are checked by `fit`."""
        self.method = method

    def fit(self, X: cubes.Cube, y: object = None) -> Self:
        """Learn the statistics of a cube, of its training part if it has a split label.

        Parameters
        ----------
        X : Dataset, DataArray or dict of arrays (samples, *window)
            A cube of any dims, lazy or not; read once.
        y : object
            Ignored.

        Returns
        -------
        CubeScaler
            Itself.

        Raises
        ------
        InvalidValueError
            If `method` is unknown, or there is nothing to learn from.
        """
        self._check()
        self.statistics_ = Statistics.from_cube(X)
        return self

    def partial_fit(self, X: cubes.Cube, y: object = None) -> Self:
        """Learn from one more cube of the same variables; the order does not matter.

        Parameters
        ----------
        X : Dataset, DataArray or dict of arrays (samples, *window)
            Cells not seen before.
        y : object
            Ignored.

        Returns
        -------
        CubeScaler
            Itself, as if it had been fitted to all cells together, to rounding.

        Raises
        ------
        InvalidValueError
            If `method` is unknown, or the variables are not those seen before.
        """
        self._check()
        new = Statistics.from_cube(X)
        self.statistics_ = self.statistics_.merge(new) if self._is_fitted() else new
        return self

    def merge(self, other: CubeScaler) -> Self:
        """Combine with a scaler fitted to other cells.

        Parameters
        ----------
        other : CubeScaler
            Fitted, with the same parameters.

        Returns
        -------
        CubeScaler
            A new one, as if fitted to all cells together, to rounding.

        Raises
        ------
        InvalidValueError
            If parameters or variables differ.
        RunError
            If one of the two is not fitted.
        """
        if self.get_params() != other.get_params():
            raise InvalidValueError(f"cannot merge {self!r} with {other!r}; give equal parameters")
        merged = type(self)(**self.get_params())
        merged.statistics_ = self._fitted().merge(other._fitted())
        return merged

    def transform(self, X: cubes.Cube) -> Any:
        """Scale a cube.

        Parameters
        ----------
        X : Dataset, DataArray or dict of arrays (samples, *window)
            Left as it is; a lazy cube stays lazy. Variables not fitted are not scaled.

        Returns
        -------
        Dataset, DataArray or dict
            Of the kind given, without units. Gaps stay gaps.

        Raises
        ------
        InvalidValueError
            If no variable was fitted, or one was fitted to gaps only.
        RunError
            If the scaler is not fitted.
        """
        return rescale(X, self._parameters(), scale_values)

    def inverse_transform(self, X: cubes.Cube) -> Any:
        """Take the scaling back.

        Parameters
        ----------
        X : Dataset, DataArray or dict of arrays (samples, *window)
            Scaled; left as it is, and a lazy cube stays lazy.

        Returns
        -------
        Dataset, DataArray or dict
            Of the kind given, in physical units: for float32 within 2 units in the last place
            of the larger of value and offset.

        Raises
        ------
        InvalidValueError
            If no variable was fitted, or one was fitted to gaps only.
        RunError
            If the scaler is not fitted.
        """
        return rescale(X, self._parameters(), unscale_values)

    def fit_transform(self, X: cubes.Cube, y: object = None) -> Any:
        """Learn from a cube and scale it.

        Parameters
        ----------
        X : Dataset, DataArray or dict of arrays (samples, *window)
            A cube.
        y : object
            Ignored.

        Returns
        -------
        Dataset, DataArray or dict
            Of the kind given, scaled.
        """
        return self.fit(X, y).transform(X)

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """List the constructor's parameters.

        Parameters
        ----------
        deep : bool
            Without effect; there is no estimator inside.

        Returns
        -------
        dict
            By name.
        """
        return {name: getattr(self, name) for name in self._parameter_names()}

    def set_params(self, **params: Any) -> Self:
        """Change constructor parameters.

        Parameters
        ----------
        **params : object
            By name.

        Returns
        -------
        CubeScaler
            Itself.

        Raises
        ------
        InvalidValueError
            If there is no such parameter.
        """
        for name, value in params.items():
            check_choice("parameter", name, self._parameter_names())
            setattr(self, name, value)
        return self

    def __sklearn_is_fitted__(self) -> bool:
        """Answer `sklearn.utils.validation.check_is_fitted`."""
        return self._is_fitted()

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn what this is; only scikit-learn calls it, so it is imported here."""
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags(preserves_dtype=["float64", "float32", "float16"]),
            input_tags=InputTags(two_d_array=False, three_d_array=True, allow_nan=True),
        )

    def __repr__(self) -> str:
        """Text that evaluates back to an unfitted copy."""
        given = ", ".join(f"{name}={value!r}" for name, value in self.get_params().items())
        return f"{type(self).__name__}({given})"

    @classmethod
    def _parameter_names(cls) -> list[str]:
        """Names of the constructor's parameters."""
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def _check(self) -> None:
        """Refuse unknown parameters before any work starts."""
        check_choice("method", self.method, METHODS)

    def _is_fitted(self) -> bool:
        """Whether there are statistics."""
        return hasattr(self, "statistics_")

    def _fitted(self) -> Statistics:
        """Statistics, or an error that says what to do."""
        if not self._is_fitted():
            raise RunError(f"{self!r} is not fitted; call fit first")
        return self.statistics_

    def _parameters(self) -> dict[str, tuple[float, float]]:
        """Offset and scale by variable."""
        return {name: scale_parameters(s, self.method) for name, s in self._fitted().items()}
