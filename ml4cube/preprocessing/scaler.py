"""`CubeScaler`: statistics and scaling in scikit-learn's protocol."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import xarray as xr

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, RunError, check_choice
from ml4cube.core.statistics import QUARTILES, scale_parameters, scale_values, unscale_values
from ml4cube.cube.rescaling import labelled, no_zero
from ml4cube.preprocessing import cubes
from ml4cube.preprocessing.climatology import check_free, check_group
from ml4cube.preprocessing.scaling import Parameters, Rescale, pairs, rescale
from ml4cube.preprocessing.statistics import Statistics
from ml4cube.preprocessing.weights import Weights

METHODS = ("standardize", "normalize", "robust")


class CubeScaler:
    """Learn a scaling from a cube's training part, apply it, and take it back exactly.

    It speaks scikit-learn's protocol (`fit`, `partial_fit`, `transform`, `inverse_transform`,
    `get_params`, `set_params`; `sklearn.base.clone` and pickle work), with cubes for `X`.

    Parameters
    ----------
    method : {"standardize", "normalize", "robust"}
        To mean 0 and standard deviation 1; to the range 0 to 1; or to median 0 and interquartile
        range 1, which a few extremes do not move. Quartiles, those of numpy's
        ``method="inverted_cdf"``, are read from a histogram: off by less than 1/32767 of the
        range of the variable, a few values far out left aside
        (``statistics_[name].quantile_error`` says how much; more at many places). Where they
        are not that far apart, as of rain on mostly dry days, values are only shifted.
    per : sequence of str
        What has numbers of its own: ``("variable",)``, and any dims, e.g. ``("variable",
        "level")``, or ``("variable", "lat", "lon")`` for each pixel. Variables always have; along
        a dim of that name, as `Dataset.to_array` makes, it has to be listed.
    climatology : {"month", "season", "dayofyear"}, optional
        Whether each month, season or day of the year has numbers of its own, so that what is
        left is the (standardized) anomaly.
    weights : {"area"} or DataArray, optional
        Weights of cells in the statistics, as in `get_statistics`.

    Attributes
    ----------
    statistics_ : Statistics
        What `fit` learned.

    Notes
    -----
    Blocks are merged in order: the same chunks give the same bits under any scheduler, other
    chunks the same numbers to rounding of float64.

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
    # parameters of the first fit, which later ones must share
    _first: CubeScaler | None = None

    def __init__(
        self,
        method: str = "standardize",
        per: str | Sequence[str] = ("variable",),
        climatology: str | None = None,
        weights: Weights = None,
    ) -> None:
        """Store the parameters; they are checked by `fit`."""
        self.method = method
        self.per = per
        self.climatology = climatology
        self.weights = weights

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
            If a parameter is unknown, or there is nothing to learn from.
        InvalidTypeError
            If dims are named, but `X` is a dict of arrays, which have none.
        """
        self.statistics_ = self._learned(X)
        # a list may be changed in place
        per = self.per if isinstance(self.per, str) else tuple(self.per)
        self._first = type(self)(**{**self.get_params(), "per": per})
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
            If a parameter is unknown, or parameters, variables or coordinates are not those of
            the first fit.
        """
        if not self._is_fitted():
            return self.fit(X)
        self.statistics_ = self.fitted_statistics().merge(self._learned(X))
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
        InvalidTypeError
            If `other` is no CubeScaler.
        RunError
            If one of the two is not fitted.
        """
        if not isinstance(other, CubeScaler):
            raise InvalidTypeError(f"other is a {type(other).__name__}; give a fitted CubeScaler")
        if not self._same_parameters(other):
            raise InvalidValueError(f"cannot merge {self!r} with {other!r}; give equal parameters")
        merged = type(self)(**self.get_params())
        merged.statistics_ = self.fitted_statistics().merge(other.fitted_statistics())
        merged._first = self._first
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
            Of the kind given, with its coordinates and attributes; ``units`` become ``"1"`` and
            the old ones ``unscaled_units`` until `inverse_transform`, as in `standardize`. Gaps
            stay gaps. A place (level, pixel,
            ...) without a training cell becomes a gap; one that was constant is shifted to 0.

        Raises
        ------
        InvalidValueError
            If no variable was fitted, one was fitted to gaps only, a coordinate or month of `X`
            has no statistics, or parameters are not those of the fit.
        RunError
            If the scaler is not fitted.
        """
        return self._rescaled(X, scale_values)

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
            of the larger of value and offset, which is all that a scaled float32 can hold
            (of values much nearer to 0 than the mean it keeps fewer digits). A cube turned to
            float64 before `transform` comes back to the float32 values themselves, but for
            those a hundred million times smaller than the offset.

        Raises
        ------
        InvalidValueError
            As `transform`.
        RunError
            If the scaler is not fitted.
        """
        return self._rescaled(X, unscale_values)

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

    def fitted_statistics(self) -> Statistics:
        """Return the statistics, if they suit the parameters.

        Returns
        -------
        Statistics
            What `fit` learned.

        Raises
        ------
        RunError
            If the scaler is not fitted.
        InvalidValueError
            If its parameters were changed since.
        """
        if not self._is_fitted():
            raise RunError(f"{self!r} is not fitted; call fit first")
        if self._first is not None and not self._same_parameters(self._first):
            raise InvalidValueError(
                f"{self!r} was fitted as {self._first!r}; set its parameters back, or call fit to "
                "start anew"
            )
        return self.statistics_

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
        unset = type(self)()
        given = ", ".join(
            f"{name}={value!r}"
            for name, value in self.get_params().items()
            if name == "method" or value is not getattr(unset, name)
        )
        return f"{type(self).__name__}({given})"

    @classmethod
    def _parameter_names(cls) -> list[str]:
        """Names of the constructor's parameters."""
        return [name for name in inspect.signature(cls.__init__).parameters if name != "self"]

    def _learned(self, X: cubes.Cube) -> Statistics:
        """Statistics of a cube, in the form that the parameters ask for."""
        check_choice("method", self.method, METHODS)
        check_group("climatology", self.climatology)
        cubes.check_cube(X)
        dims = X.dims if isinstance(X, xr.Dataset | xr.DataArray) else None
        # to_array() makes a dim of that name
        per = [n for n in cubes.names("per", self.per) if n != "variable" or n in (dims or ())]
        along = None
        if per and dims is not None:
            cubes.check_known("per", per, dims)
            along = [str(dim) for dim in dims if dim not in per]
        elif per:
            raise InvalidTypeError(
                f"per={self.per!r} names dims, but a dict of arrays has none; give a Dataset"
            )
        return Statistics.from_cube(
            X,
            dims=along,
            by=self.climatology,
            weights=self.weights,
            quantiles=QUARTILES if self.method == "robust" else (),
        )

    def _same_parameters(self, other: CubeScaler) -> bool:
        """Whether two scalers are made alike; weights may be DataArrays, dims in any order."""
        mine, theirs = (
            {**one.get_params(), "per": set(cubes.names("per", one.per))} for one in (self, other)
        )
        weights, others = mine.pop("weights"), theirs.pop("weights")
        if isinstance(weights, xr.DataArray) and isinstance(others, xr.DataArray):
            return mine == theirs and weights.equals(others)
        return mine == theirs and type(weights) is type(others) and weights == others

    def _is_fitted(self) -> bool:
        """Whether there are statistics."""
        return hasattr(self, "statistics_")

    def _rescaled(self, X: cubes.Cube, arithmetic: Rescale) -> Any:
        """Scale a cube or take the scaling back."""
        parameters = self._parameters()
        if isinstance(X, xr.Dataset | xr.DataArray):
            check_free(self.climatology, X.dims)
        return rescale(X, parameters, arithmetic)

    def _parameters(self) -> Parameters:
        """Offset and scale by variable."""
        statistics = self.fitted_statistics()
        if self.method == "standardize":
            found = pairs(statistics.mean_std(), "fitted", lambda mean, std: no_zero(std))
        elif self.method == "normalize":
            found = pairs(statistics.range(), "fitted", lambda low, high: no_zero(high - low))
        else:
            quartiles = {
                name: [labelled(stats, values) for values in scale_parameters(stats, "robust")]
                for name, stats in statistics.items()
                if np.any(stats.count)
            }
            gaps = {name: [np.nan, np.nan] for name in statistics if name not in quartiles}
            found = pairs(quartiles | gaps, "fitted", lambda _, spread: spread)
        return found
