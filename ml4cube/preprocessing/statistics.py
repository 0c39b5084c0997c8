"""Statistics of a cube, computed in one pass, block by block."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import xarray as xr

from ml4cube.core import statistics as core
from ml4cube.core.errors import (
    EmptyPartError,
    InvalidTypeError,
    InvalidValueError,
    caller_level,
    check_real,
    names_of,
)
from ml4cube.core.statistics import VariableStatistics, check_decoded
from ml4cube.core.sums.fields import quantile_of
from ml4cube.cube.absent_chunks import heed_absent_chunks
from ml4cube.cube.areas import Weights
from ml4cube.cube.classes import is_flagged
from ml4cube.cube.variables import check_left_out, data_variables, split_label
from ml4cube.preprocessing import cubes
from ml4cube.preprocessing.fields import FieldOptions, statistics_of_part
from ml4cube.preprocessing.rescaling import labelled
from ml4cube.preprocessing.samples import as_cube

logger = logging.getLogger(__name__)


class Statistics(core.Statistics):
    """Statistics of a cube's variables, computed from the training part if there is one.

    An immutable mapping of names to `VariableStatistics`. `merge` combines statistics of
    different cells, and `to_json`/`from_json` keep every bit.

    Parameters
    ----------
    variables : mapping of str to VariableStatistics
        One entry per variable.
    part : {"train", "val", "test", "all"}, optional
        Part of the cube that they describe; None if unknown.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> ds = xr.Dataset({"t": ("time", np.array([1.0, 3.0, np.nan, 99.0], "float32"))})
    >>> ds["split"] = ("time", np.array([1, 1, 1, 0], "uint8"))
    >>> stats = Statistics.from_cube(ds)
    >>> stats.part, stats["t"].mean, stats["t"].gaps
    ('train', 2.0, 1)
    >>> Statistics.from_json(stats.to_json()) == stats
    True
    """

    __slots__ = ()

    @classmethod
    def from_cube(
        cls,
        ds: cubes.Cube,
        variables: Iterable[str] | None = None,
        *,
        exclude_vars: Iterable[str] = (),
        split: str | None = "train",
        dims: str | Iterable[str] | None = None,
        by: str | None = None,
        weights: Weights = None,
        quantiles: Sequence[float] = (),
        missing_chunks: str = "warn",
    ) -> Self:
        """Compute statistics of each variable in one pass, a few blocks at a time.

        Parameters
        ----------
        ds : Dataset, DataArray, path, zarr store or group, or dict of arrays (samples, *window)
            A cube of any dims, lazy or not, or samples.
        variables : iterable of str, optional
            Default: every data variable except split labels, masks, bounds, grid mappings,
            scalars, dates, texts, and classes by CF's ``flag_values`` or ``flag_meanings``.
        exclude_vars : iterable of str
            Variables to exclude.
        split : {"train", "val", "test", None}
            Part to use if `ds` has a split label; None for all cells. ``"train"`` on a cube
            without a label means all cells.
        dims : str or iterable of str, optional
            Dims to reduce over, as xarray's ``dim``; the others are kept. Default: all. A
            variable that lacks one of them is reduced over the rest.
        by : {"month", "season", "dayofyear"}, optional
            Climatology: statistics of each of the 12 months, of DJF, MAM, JJA and SON, or of
            each of 366 days of the year, along a dim of that name. Any calendar.
        weights : str or DataArray, optional
            Weights of cells: ``"area"`` are their areas, see `ml4cube.evaluation.area_weights`; the
            name of a variable or coordinate (``"areacello"``), which holds them. A DataArray is
            matched by the names of its dims and must not be negative. Cells of weight 0 are left
            out. ``weighting`` of the result says by which rule.
        quantiles : sequence of float
            If any are given, a histogram is kept. ``stats[name].quantile(p)`` reads these and any
            other quantile from it, with an error below ``stats[name].quantile_error``. If that is
            0, the quantile is exactly that of numpy's ``method="inverted_cdf"``.
        missing_chunks : {"warn", "raise", "drop"}
            What to do about chunks that the cube's zarr store lacks and that read as values: warn,
            refuse them, or count their cells as gaps.

        Returns
        -------
        Statistics
            One entry per variable; gaps and infinities are left out and counted. With `dims`,
            `by`, `weights` or `quantiles`, entries are `FieldStatistics`, whose numbers are
            arrays.

        Raises
        ------
        InvalidValueError
            If a name, dim or the part is unknown, no variable is left, a variable holds packed
            integers that were not decoded, or required dates or latitudes are missing.
        InvalidTypeError
            If a variable given by name holds no real numbers, or `dims`, `by` or `weights` are
            given for a dict of arrays.
        EmptyPartError
            If the part has no cell.

        Notes
        -----
        The same stored chunks give the same bits on any number of cores, on a cluster, and
        whatever chunks dask opens them in. Other chunks give the same numbers up to float64
        rounding.
        """
        ds = cubes.opened(ds)
        cube = as_cube(ds)
        reduced_dims = None
        if dims is not None:
            reduced_dims = names_of("dims", dims)
        _check_quantiles(quantiles)
        needs_dims = any(option is not None for option in (dims, by, weights))
        if needs_dims and not isinstance(ds, xr.Dataset | xr.DataArray):
            raise InvalidTypeError(
                "ds must be a Dataset or DataArray if dims, by or weights are given, got a dict of "
                "arrays"
            )
        if variables is None and isinstance(ds, xr.DataArray):
            variables = map(str, cube.data_vars)
        chosen = chosen_variables(cube, variables, exclude_vars)
        if variables is None:
            chosen = _without_classes(cube, chosen)
        label_name = None
        if split is not None:
            label_name = split_label(cube)
        read = [*chosen, *([] if label_name is None else [label_name])]
        cube = heed_absent_chunks(cube, read, missing_chunks).cube
        options = FieldOptions.of(cube, chosen, reduced_dims, by, weights, len(quantiles) > 0)
        label, part = cubes.label_of_part(cube, split)
        statistics = {}
        for name in chosen:
            variable = cube.variables[name]
            statistics[name] = statistics_of_part(name, variable, label, part, options)
            _check_not_empty(name, statistics[name], part, variable.shape)
            cubes.check_no_fill_value(name, statistics[name], variable)
        return cls(statistics, part)

    def mean_std(self) -> dict[str, list[Any]]:
        """Return mean and population standard deviation by variable.

        Returns
        -------
        dict of str to [float, float] or [DataArray, DataArray]
            ``{variable: [mean, std]}``; DataArrays if dims are kept. NaN without a finite cell.
            Those of days of the year are smooth: three harmonics, fitted to all days.
        """
        pairs = {name: core.usual_mean_and_std(stats) for name, stats in self.items()}
        return {
            name: [labelled(self[name], number) for number in pair] for name, pair in pairs.items()
        }

    def range(self) -> dict[str, list[Any]]:
        """Return the minimum and maximum of the finite values by variable.

        Returns
        -------
        dict of str to [float, float] or [DataArray, DataArray]
            ``{variable: [min, max]}``; DataArrays if dims are kept. NaN without a finite cell.
        """
        return {name: [labelled(s, s.min), labelled(s, s.max)] for name, s in self.items()}

    def quantiles(self, probabilities: Sequence[float]) -> dict[str, list[Any]]:
        """Return quantiles by variable, if the statistics were computed with quantiles.

        Parameters
        ----------
        probabilities : sequence of float
            From 0 to 1.

        Returns
        -------
        dict of str to list of float or DataArray
            One value per probability. It differs from that of numpy's ``method="inverted_cdf"``
            by less than the variable's ``quantile_error``.

        Raises
        ------
        InvalidValueError
            If the statistics were computed without quantiles.

        Examples
        --------
        >>> import numpy as np
        >>> stats = Statistics.from_cube({"t": np.arange(101.0)}, quantiles=(0.5,))
        >>> abs(stats.quantiles([0.5])["t"][0] - 50) <= stats["t"].quantile_error
        np.True_
        """
        return {
            name: [labelled(s, quantile_of(s, p)) for p in probabilities]
            for name, s in self.items()
        }


def _check_quantiles(quantiles: Sequence[float]) -> None:
    if not isinstance(quantiles, Iterable):
        raise InvalidTypeError(f"quantiles must be a sequence of numbers, got {quantiles!r}")
    for probability in quantiles:
        if not isinstance(probability, int | float | np.number) or not 0 <= probability <= 1:
            raise InvalidValueError(f"quantiles must be numbers from 0 to 1, got {quantiles!r}")


def chosen_variables(
    cube: xr.Dataset, variables: Iterable[str] | None, exclude_vars: Iterable[str]
) -> list[str]:
    """Return the variables to use, checked before any cell is read."""
    excluded = names_of("exclude_vars", exclude_vars)
    cubes.check_known("exclude_vars", excluded, cube.variables)
    if variables is None:
        chosen = data_variables(cube, excluded)
        check_left_out(cube.drop_vars(excluded))
    else:
        wanted = names_of("variables", variables)
        cubes.check_known("variables", wanted, cube.variables)
        chosen = [name for name in wanted if name not in excluded]
    if not chosen:
        shown = ", ".join(
            f"{str(n)!r} ({v.dtype}, {v.ndim} dims)" for n, v in cube.data_vars.items()
        )
        raise InvalidValueError(
            f"no variable is left: the data have {shown or 'none'}; "
            f"{[name for name in excluded if name in cube.data_vars]} are excluded, the others are "
            "labels, masks, auxiliary, scalar or not real numbers; name or convert those you want"
        )
    for name in chosen:
        check_decoded(name, cube.variables[name])
        check_real(f"variable {name!r}", cube.variables[name].dtype)
    return chosen


def _without_classes(cube: xr.Dataset, names: list[str]) -> list[str]:
    """Leave out variables that hold classes by their CF attributes."""
    classes = [name for name in names if is_flagged(cube[name].attrs)]
    if classes == names:
        raise InvalidValueError(
            f"no variable is left: {classes} hold classes by flag_values or flag_meanings, which "
            "have no mean; name them in variables= if you want one"
        )
    if classes:
        warnings.warn(
            f"{classes} hold classes by flag_values or flag_meanings, and have no statistics; drop "
            "these attributes if they hold numbers",
            stacklevel=caller_level(),
        )
    return [name for name in names if name not in classes]


def _check_not_empty(
    name: str, stats: VariableStatistics, part: str, shape: tuple[int, ...]
) -> None:
    """Refuse a part without cells; warn if none of its cells has a finite value."""
    if np.sum(stats.count) + np.sum(stats.gaps) + np.sum(stats.infs) == 0:
        if 0 in shape:
            raise EmptyPartError(f"variable {name!r} has no cell, its shape is {shape}")
        raise EmptyPartError(
            f"variable {name!r} has no cell in part {part!r}, or only cells of weight 0; choose "
            "another split or other weights, or split=None for all cells"
        )
    if np.sum(stats.count) == 0:
        logger.warning("variable %r has no finite cell in part %r", name, part)


def get_statistics(
    ds: cubes.Cube,
    exclude_vars: Iterable[str] = (),
    *,
    split: str | None = "train",
    dims: str | Iterable[str] | None = None,
    by: str | None = None,
    weights: Weights = None,
    missing_chunks: str = "warn",
) -> dict[str, list[Any]]:
    """Compute mean and standard deviation of each variable in one pass over the cube.

    Parameters
    ----------
    ds : Dataset, DataArray, path, zarr store or group, or dict of arrays (samples, *window)
        A cube of any dims, lazy or not, or samples.
    exclude_vars : iterable of str
        Variables to exclude; split labels, masks, auxiliary variables, and classes by CF's
        ``flag_values`` or ``flag_meanings`` always are.
    split : {"train", "val", "test", None}
        Part to use if `ds` has a split label (the log says so); None for all cells.
    dims : str or iterable of str, optional
        Dims to reduce over, as xarray's ``dim``; the others are kept: ``dims=["time", "lat",
        "lon"]`` gives statistics per level, ``dims="time"`` per pixel. Default: all.
    by : {"month", "season", "dayofyear"}, optional
        Climatology: one value for each month, season (DJF, MAM, JJA, SON) or day of the year. Those
        of days are smooth, three harmonics of the year: a day has as few values as there are years.
    weights : str or DataArray, optional
        Weights of cells, as in `Statistics.from_cube`.
    missing_chunks : {"warn", "raise", "drop"}
        What to do about chunks that the cube's zarr store lacks and that read as values: warn,
        refuse them, or count their cells as gaps.

    Returns
    -------
    dict of str to [float, float] or [DataArray, DataArray]
        ``{variable: [mean, std]}`` in the variable's units; the population standard deviation.
        DataArrays if dims are kept or `by` is given, as `standardize` takes them. Gaps and
        infinities are left out; NaN if there is no finite cell.

    Raises
    ------
    InvalidValueError
        If a name, dim or the part is unknown, no variable is left, or a variable holds packed
        integers that were not decoded.
    EmptyPartError
        If the part has no cell.

    Notes
    -----
    The same chunks give the same bits under any scheduler. Other chunks give the same numbers up
    to float64 rounding.

    Examples
    --------
    >>> import numpy as np
    >>> get_statistics({"t": np.array([1.0, 3.0, np.nan])})
    {'t': [2.0, 1.0]}
    >>> ds = xr.Dataset({"t": (("time", "level"), [[1.0, 10.0], [3.0, np.nan]])})
    >>> mean, std = get_statistics(ds, dims="time")["t"]
    >>> mean.values, std.values
    (array([ 2., 10.]), array([1., 0.]))
    """
    stats = Statistics.from_cube(
        ds,
        exclude_vars=exclude_vars,
        split=split,
        dims=dims,
        by=by,
        weights=weights,
        missing_chunks=missing_chunks,
    )
    return stats.mean_std()


def get_range(
    ds: cubes.Cube,
    exclude_vars: Iterable[str] = (),
    *,
    split: str | None = "train",
    dims: str | Iterable[str] | None = None,
    by: str | None = None,
    missing_chunks: str = "warn",
) -> dict[str, list[Any]]:
    """Compute the minimum and maximum of each variable in one pass over the cube.

    Parameters
    ----------
    ds : Dataset, DataArray, path, zarr store or group, or dict of arrays (samples, *window)
        A cube of any dims, lazy or not, or samples.
    exclude_vars : iterable of str
        Variables to exclude; split labels, masks, auxiliary variables, and classes by CF's
        ``flag_values`` or ``flag_meanings`` always are.
    split : {"train", "val", "test", None}
        Part to use if `ds` has a split label (the log says so); None for all cells.
    dims : str or iterable of str, optional
        Dims to reduce over, as xarray's ``dim``; the others are kept. Default: all.
    by : {"month", "season", "dayofyear"}, optional
        Climatology: one value for each month, season (DJF, MAM, JJA, SON) or day of the year.
    missing_chunks : {"warn", "raise", "drop"}
        What to do about chunks that the cube's zarr store lacks, as in `get_statistics`.

    Returns
    -------
    dict of str to [float, float] or [DataArray, DataArray]
        ``{variable: [min, max]}`` of the finite values, in the variable's units. DataArrays if
        dims are kept or `by` is given. NaN if there is no finite cell.

    Raises
    ------
    InvalidValueError
        If a name, dim or the part is unknown, no variable is left, or a variable holds packed
        integers that were not decoded.
    EmptyPartError
        If the part has no cell.

    Examples
    --------
    >>> import numpy as np
    >>> get_range({"t": np.array([1.0, 3.0, np.nan])})
    {'t': [1.0, 3.0]}
    """
    return Statistics.from_cube(
        ds,
        exclude_vars=exclude_vars,
        split=split,
        dims=dims,
        by=by,
        missing_chunks=missing_chunks,
    ).range()
