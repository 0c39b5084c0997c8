"""`CubeScaler`: statistics and scaling with the interface of scikit-learn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import xarray as xr

from ml4cube.core.climatology import DAY, GROUPS
from ml4cube.core.display import PrintedAsCall, Summary
from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    RunError,
    check_choice,
    names_of,
)
from ml4cube.core.statistics import QUARTILES, scale_values, unscale_values
from ml4cube.cube.areas import Weights
from ml4cube.preprocessing import cubes
from ml4cube.preprocessing.fields import check_free
from ml4cube.preprocessing.rescaling import RescaleValues, rescale
from ml4cube.preprocessing.statistics import Statistics

METHODS = ("standardize", "normalize", "robust")
_PARAMETERS = ("method", "per", "climatology", "weights")


class CubeScaler(PrintedAsCall):
    """Scaler of cubes, fitted to the training part and exactly invertible.

    It has the interface of scikit-learn's transformers, with cubes for `X`.
    `sklearn.base.clone` and pickle work.

    Parameters
    ----------
    method : {"standardize", "normalize", "robust"}
        Scale to mean 0 and standard deviation 1, to the range 0 to 1, or to median 0 and
        interquartile range 1, which a few extremes do not change. Quartiles are those of numpy's
        ``method="inverted_cdf"``, read from a histogram. Their error is usually below 1/32767 of
        the variable's range, and ``statistics_[name].quantile_error`` bounds it. If the quartiles
        are closer together than this error, as of rain on mostly dry days, values are only
        shifted.
    per : sequence of str
        What is scaled separately: ``("variable",)``, and any dims, e.g. ``("variable",
        "level")``, or ``("variable", "lat", "lon")`` for each pixel. Variables always are; a dim
        named ``"variable"``, as from `Dataset.to_array`, must be listed.
    climatology : {"month", "season", "dayofyear"}, optional
        Scale each month, season or day of the year separately. The result is the (standardized)
        anomaly. Means and standard deviations of days are smooth, three harmonics of the year,
        since a day has as few values as there are years; days more than a month from all fitted
        ones are refused, and other methods than standardizing refuse days.
    weights : str or DataArray, optional
        Weights of cells in the statistics, as in `get_statistics`.

    Attributes
    ----------
    statistics_ : Statistics
        The fitted statistics.

    Notes
    -----
    The same chunks give the same bits under any scheduler. Other chunks give the same numbers up
    to float64 rounding.

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
    # Unfitted, with the parameters of the first fit.
    _as_fitted: CubeScaler

    def __init__(
        self,
        method: str = "standardize",
        per: str | Sequence[str] = ("variable",),
        climatology: str | None = None,
        weights: Weights = None,
    ) -> None:
        """Store the parameters, which `fit` checks."""
        self.method = method
        self.per = per
        self.climatology = climatology
        self.weights = weights

    def fit(self, X: cubes.Cube, y: object = None) -> Self:
        """Fit to a cube, or to its training part if it has a split label.

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
            If a parameter is unknown, or no variable or cell is left to fit to.
        InvalidTypeError
            If `per` has dims, but `X` is a dict of arrays, which have none.
        """
        self.statistics_ = self._statistics_of(X)
        # a list may be changed in place
        per = self.per if isinstance(self.per, str) else tuple(self.per)
        self._as_fitted = type(self)(**{**self.get_params(), "per": per})
        return self

    def partial_fit(self, X: cubes.Cube, y: object = None) -> Self:
        """Fit to one more cube with the same variables; the order does not matter.

        Parameters
        ----------
        X : Dataset, DataArray or dict of arrays (samples, *window)
            Cells not seen before.
        y : object
            Ignored.

        Returns
        -------
        CubeScaler
            Itself, as if fitted to all cells together, up to rounding.

        Raises
        ------
        InvalidValueError
            If a parameter is unknown, or parameters, variables or coordinates differ from those
            of the first fit.
        """
        if not self.__sklearn_is_fitted__():
            return self.fit(X)
        self.statistics_ = self.fitted_statistics().merge(self._statistics_of(X))
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
            A new one, as if fitted to all cells together, up to rounding.

        Raises
        ------
        InvalidValueError
            If parameters or variables differ.
        InvalidTypeError
            If `other` is not a CubeScaler.
        RunError
            If one of the two is not fitted.
        """
        if not isinstance(other, CubeScaler):
            raise InvalidTypeError(f"other must be a fitted CubeScaler, got {type(other).__name__}")
        if not self._same_parameters(other):
            raise InvalidValueError(f"cannot merge {self!r} and {other!r}; their parameters differ")
        merged = type(self)(**self.get_params())
        merged.statistics_ = self.fitted_statistics().merge(other.fitted_statistics())
        merged._as_fitted = self._as_fitted
        return merged

    def transform(self, X: cubes.Cube) -> Any:
        """Scale a cube.

        Parameters
        ----------
        X : Dataset, DataArray or dict of arrays (samples, *window)
            Not changed; a lazy cube stays lazy. Variables not fitted are not scaled.

        Returns
        -------
        Dataset, DataArray or dict
            As from `standardize`. A level, pixel or month without a training cell becomes a
            gap.

        Raises
        ------
        InvalidValueError
            If no variable was fitted, one was fitted to gaps only, a coordinate or month of `X`
            has no statistics, or parameters were changed after the fit.
        RunError
            If the scaler is not fitted.
        """
        return self._rescaled(X, scale_values)

    def inverse_transform(self, X: cubes.Cube) -> Any:
        """Undo the scaling.

        Parameters
        ----------
        X : Dataset, DataArray or dict of arrays (samples, *window)
            Scaled; not changed, and a lazy cube stays lazy.

        Returns
        -------
        Dataset, DataArray or dict
            Of the kind given, in physical units; float16 becomes float32. float32 values return
            within 2 units in the last place of the larger of value and offset, which is all that a
            scaled float32 can hold. To get float32 values back exactly, convert the cube to float64
            before `transform`.

        Raises
        ------
        InvalidValueError
            As `transform`.
        RunError
            If the scaler is not fitted.
        """
        return self._rescaled(X, unscale_values)

    def fit_transform(self, X: cubes.Cube, y: object = None) -> Any:
        """Fit to a cube and scale it.

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

    def fitted_statistics(self) -> Statistics:
        """Return the statistics, after checking that the parameters are those of the fit.

        Returns
        -------
        Statistics
            The fitted statistics.

        Raises
        ------
        RunError
            If the scaler is not fitted.
        InvalidValueError
            If its parameters were changed after the fit.
        """
        if not self.__sklearn_is_fitted__():
            raise RunError(f"{self!r} is not fitted; call fit first")
        if not self._same_parameters(self._as_fitted):
            raise InvalidValueError(
                f"{self!r} was fitted as {self._as_fitted!r}; restore its parameters or call fit "
                "again"
            )
        return self.statistics_

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the constructor's parameters.

        Parameters
        ----------
        deep : bool
            Ignored; there is no nested estimator.

        Returns
        -------
        dict
            By name.
        """
        return {name: getattr(self, name) for name in _PARAMETERS}

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
            If a parameter is unknown.
        """
        for name, value in params.items():
            check_choice("parameter", name, _PARAMETERS)
            setattr(self, name, value)
        return self

    def __sklearn_is_fitted__(self) -> bool:
        """Return True if the scaler is fitted, for `check_is_fitted` of scikit-learn."""
        return hasattr(self, "statistics_")

    def __sklearn_tags__(self) -> Any:
        """Return the tags of scikit-learn."""
        # only scikit-learn calls this, so it is installed
        from sklearn.utils import InputTags, Tags, TargetTags, TransformerTags

        return Tags(
            estimator_type=None,
            target_tags=TargetTags(required=False),
            transformer_tags=TransformerTags(preserves_dtype=["float64", "float32", "float16"]),
            input_tags=InputTags(two_d_array=False, three_d_array=True, allow_nan=True),
        )

    def _summary(self) -> Summary:
        """Return the parameters and, once fitted, the statistics."""
        headline = "not fitted; call fit"
        if self.__sklearn_is_fitted__():
            headline = "fitted"
        sections = {"Statistics": getattr(self, "statistics_", None)}
        return Summary(headline, super()._summary().facts, sections)

    def _statistics_of(self, X: cubes.Cube) -> Statistics:
        """Compute the statistics that the parameters ask for."""
        check_choice("method", self.method, METHODS)
        check_choice("climatology", self.climatology, (*GROUPS, None))
        if self.climatology == DAY and self.method != "standardize":
            raise InvalidValueError(
                f"climatology='dayofyear' needs method='standardize', got {self.method!r}, which "
                "needs more values than a day has; use 'month' or 'season'"
            )
        X = cubes.opened(X)
        dims = None
        if isinstance(X, xr.Dataset | xr.DataArray):
            dims = X.dims
        # to_array() makes a dim of that name
        per = [n for n in names_of("per", self.per) if n != "variable" or n in (dims or ())]
        reduced_dims = None
        if per and dims is not None:
            cubes.check_known("per", per, dims)
            reduced_dims = [str(dim) for dim in dims if dim not in per]
        elif per:
            raise InvalidTypeError(
                f"X must be a Dataset or DataArray if per={self.per!r}, got a dict of arrays"
            )
        return Statistics.from_cube(
            X,
            dims=reduced_dims,
            by=self.climatology,
            weights=self.weights,
            quantiles=QUARTILES if self.method == "robust" else (),
        )

    def _same_parameters(self, other: CubeScaler) -> bool:
        """Compare the parameters; the order of dims does not matter."""
        mine, theirs = (
            {**scaler.get_params(), "per": set(names_of("per", scaler.per))}
            for scaler in (self, other)
        )
        # `==` of arrays is an array
        my_weights, their_weights = (
            xr.DataArray(scaler.pop("weights")) for scaler in (mine, theirs)
        )
        return mine == theirs and my_weights.equals(their_weights)

    def _rescaled(self, X: cubes.Cube, rescale_values: RescaleValues) -> Any:
        """Scale a cube, or undo that."""
        statistics = self.fitted_statistics()
        if isinstance(X, xr.Dataset | xr.DataArray):
            check_free(self.climatology, X.dims)
        return rescale(X, statistics, "statistics_", self.method, rescale_values)
