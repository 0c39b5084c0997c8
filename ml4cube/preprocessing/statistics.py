"""Statistics of a cube, read once, block by block."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core import statistics as core
from ml4cube.core.errors import EmptyPartError, InvalidTypeError, InvalidValueError, check_choice
from ml4cube.core.missing import plain
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import VariableStatistics
from ml4cube.core.sums.fields import FieldStatistics
from ml4cube.cube import roles
from ml4cube.cube.chunks.blocks import block_shape, blocks
from ml4cube.cube.chunks.opened import straight
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.rescaling import labelled
from ml4cube.cube.variables import data_variables
from ml4cube.preprocessing import cubes
from ml4cube.preprocessing.blocks import threads
from ml4cube.preprocessing.fields import Form, field_statistics, form_of
from ml4cube.preprocessing.weights import Weights

logger = logging.getLogger(__name__)


class Statistics(core.Statistics):
    """Statistics of a cube's variables, computed from the training part where there is one.

    An immutable mapping of names to `VariableStatistics`; parts of a cube that were summed up
    apart are merged by `merge`, and `to_json`/`from_json` keep every bit.

    Parameters
    ----------
    variables : mapping of str to VariableStatistics
        One entry per variable.
    part : {"train", "val", "test", "all"}, optional
        Part of the cube that was summed up; None where that is not known.

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
    ) -> Self:
        """Read each variable once and sum it up, with memory for a few blocks and the result.

        Parameters
        ----------
        ds : Dataset, DataArray or dict of arrays (samples, *window)
            A cube of any dims, lazy or not, or samples.
        variables : iterable of str, optional
            What to sum up. If not given: every data variable, leaving out split labels, masks,
            bounds, grid mappings, scalars, dates and texts.
        exclude_vars : iterable of str
            Variables to leave out.
        split : {"train", "val", "test", None}
            Part to use if `ds` has a split label; None for all cells. ``"train"`` on a cube
            without a label means all cells.
        dims : str or iterable of str, optional
            Dims to sum up along, as xarray's ``dim``; the others are kept. All if not given. A
            variable that lacks one of them is summed up along the rest.
        by : {"month", "season", "dayofyear"}, optional
            Climatology: statistics of each of the 12 months, of DJF, MAM, JJA and SON, or of
            each of 366 days of the year, along a dim of that name. Any calendar.
        weights : {"area"} or DataArray, optional
            Weights of cells: their area, which is that of latitude bands for one latitude per row
            and cos(latitude) for one per cell, or numbers matched by the names of dims, not
            negative. Cells of weight 0 are left out.
        quantiles : sequence of float
            If any are given, a histogram is kept, from which ``stats[name].quantile(p)`` reads
            these and any other quantile, with an error below ``stats[name].quantile_error``.
            Where that is 0 it is the one of numpy's ``method="inverted_cdf"``, exactly.

        Returns
        -------
        Statistics
            One entry per variable; gaps and infinities are left out and counted. With `dims`,
            `by`, `weights` or `quantiles` entries are `FieldStatistics`, whose numbers are
            arrays.

        Raises
        ------
        InvalidValueError
            If a name, dim or the part is unknown, nothing is left to sum up, a variable holds
            packed integers that were not decoded, or there are no dates or latitudes where
            they are needed.
        InvalidTypeError
            If a variable asked for by name holds no real numbers, or dims of unnamed arrays are
            asked for.
        EmptyPartError
            If the part has no cell.

        Notes
        -----
        Blocks are merged in order: the same chunks give the same bits under any scheduler, other
        chunks the same numbers to rounding of float64.
        """
        cubes.check_cube(ds)
        excluded = cubes.names("exclude_vars", exclude_vars)
        wanted = None if variables is None else cubes.names("variables", variables)
        along = None if dims is None else cubes.names("dims", dims)
        counted = _check_quantiles(quantiles)
        if not isinstance(ds, xr.Dataset | xr.DataArray):
            if not (along is None and by is None and weights is None):
                raise InvalidTypeError(
                    "dims, by and weights need names of dims, ds is a dict of arrays; give a "
                    "Dataset"
                )
            return cls._from_samples(ds, wanted, excluded, split, counted)
        cube = as_dataset(ds)
        chosen = _chosen(cube, wanted, excluded, isinstance(ds, xr.DataArray))
        cells, part = cubes.cells_of_part(cube, split)
        form = form_of(cube, chosen, along, by, weights, counted)
        table = {}
        for name in chosen:
            variable = cube.variables[name]
            where = None if cells is None else cubes.fitted(cells, variable)
            table[name] = _named_errors(name, _summed, variable, where, form)
            _check_not_empty(name, table[name], part, variable.shape, form.weights is not None)
            cubes.check_no_fill_value(name, table[name], variable)
        return cls(table, part)

    @classmethod
    def of_core(cls, statistics: core.Statistics) -> Self:
        """View statistics from elsewhere, e.g. from a sample store, as those of a cube.

        Parameters
        ----------
        statistics : core.statistics.Statistics
            Of any variables.

        Returns
        -------
        Statistics
            The same numbers.
        """
        return statistics if isinstance(statistics, cls) else cls(statistics, statistics.part)

    @classmethod
    def _from_samples(
        cls,
        samples: Mapping[str, Any],
        wanted: tuple[str, ...] | None,
        excluded: tuple[str, ...],
        split: str | None,
        counted: bool,
    ) -> Self:
        """Sum up a dict of arrays (samples, *window)."""
        check_choice("split", split, (*PARTS, None))
        arrays = {name: plain(values) for name, values in samples.items()}
        cubes.check_known("exclude_vars", excluded, arrays)
        cubes.check_known("variables", wanted or (), arrays)
        if wanted is None:
            wanted = tuple(n for n, a in arrays.items() if a.dtype.kind in "fiub")
            excluded = (*excluded, "split", roles.FILTER_VAR)
        chosen = [name for name in wanted if name not in excluded]
        if not chosen:
            raise InvalidValueError(_nothing_left(arrays, excluded))
        part = "all" if split is None or "split" not in arrays else split
        if part == "all" and split not in ("train", None):
            raise InvalidValueError(f"split={split!r} asks for a part, but there is no 'split'")
        table = {}
        for name in chosen:
            where = None
            if part != "all":
                label = arrays["split"] == PARTS[part]
                label = cubes.with_samples(label, arrays[name].shape, "split")
                where = cubes.to_shape(label, arrays[name].shape, "split")
            if counted:
                dims = [f"axis{i}" for i in range(arrays[name].ndim)]
                cells = None if where is None else xr.Variable(dims, where)
                cube = xr.Variable(dims, arrays[name])
                table[name] = _named_errors(name, _summed, cube, cells, Form(counted=True))
            else:
                table[name] = _named_errors(name, VariableStatistics.of, arrays[name], where)
            _check_not_empty(name, table[name], part, arrays[name].shape)
        return cls(table, part)

    def mean_std(self) -> dict[str, list[Any]]:
        """Mean and population standard deviation by variable.

        Returns
        -------
        dict of str to [float, float] or [DataArray, DataArray]
            ``{variable: [mean, std]}``; DataArrays where dims are kept. NaN where there is no
            finite cell.
        """
        return {name: [labelled(s, s.mean), labelled(s, s.std)] for name, s in self.items()}

    def range(self) -> dict[str, list[Any]]:
        """Least and greatest finite value by variable.

        Returns
        -------
        dict of str to [float, float] or [DataArray, DataArray]
            ``{variable: [min, max]}``; DataArrays where dims are kept. NaN where there is no
            finite cell.
        """
        return {name: [labelled(s, s.min), labelled(s, s.max)] for name, s in self.items()}

    def quantiles(self, probabilities: Sequence[float]) -> dict[str, list[Any]]:
        """Quantiles by variable, of statistics that were computed with some.

        Parameters
        ----------
        probabilities : sequence of float
            From 0 to 1.

        Returns
        -------
        dict of str to list of float or DataArray
            One value per probability, each off by less than the variable's ``quantile_error``
            from that of numpy's ``method="inverted_cdf"``, a value of the cells; that itself
            where the error is 0.

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
            name: [labelled(s, _counted(name, s).quantile(p)) for p in probabilities]
            for name, s in self.items()
        }


def _counted(name: str, stats: VariableStatistics) -> FieldStatistics:
    """Statistics with a histogram."""
    if not isinstance(stats, FieldStatistics):
        raise InvalidValueError(
            f"the statistics of {name!r} have no histogram; compute them with "
            "quantiles=(0.25, 0.5, 0.75)"
        )
    return stats


def _check_quantiles(quantiles: Sequence[float]) -> bool:
    """Whether quantiles are wanted; refuse what is none."""
    if not isinstance(quantiles, Iterable):
        raise InvalidTypeError(
            f"quantiles={quantiles!r} is no sequence; give one, as ({quantiles!r},)"
        )
    for probability in quantiles:
        if not isinstance(probability, int | float | np.number) or not 0 <= probability <= 1:
            raise InvalidValueError(f"quantiles={quantiles!r}; give numbers from 0 to 1")
    return len(quantiles) > 0


def _chosen(
    cube: xr.Dataset, wanted: tuple[str, ...] | None, excluded: tuple[str, ...], single: bool
) -> list[str]:
    """Variables to sum up, checked before anything is read."""
    cubes.check_known("exclude_vars", excluded, cube.variables)
    cubes.check_known("variables", wanted or (), cube.variables)
    if wanted is None and single:
        wanted = tuple(str(name) for name in cube.data_vars)
    listed = data_variables(cube, excluded) if wanted is None else list(wanted)
    chosen = [name for name in listed if name not in excluded]
    if not chosen:
        raise InvalidValueError(_nothing_left(cube.data_vars, excluded))
    for name in chosen:
        cubes.check_decoded(name, cube.variables[name])
        if cube.variables[name].dtype.kind not in "fiub":
            raise InvalidTypeError(
                f"variable {name!r} is of dtype {cube.variables[name].dtype}, statistics need "
                "real numbers; leave it out or convert it"
            )
    return chosen


def _nothing_left(held: Mapping[Any, Any], excluded: tuple[str, ...]) -> str:
    """What there is, where none of it is to be summed up."""
    shown = ", ".join(f"{str(n)!r} ({v.dtype}, {v.ndim} dims)" for n, v in held.items())
    return (
        f"no variable is left to sum up: there are {shown or 'none'}, of which "
        f"{[name for name in excluded if name in held]} are excluded and the rest are labels, "
        "masks, auxiliary, scalars or no real numbers; name or convert what you want"
    )


def _named_errors(name: str, work: Any, *arguments: Any) -> VariableStatistics:
    """Run `work`, putting the variable's name before the message of its errors."""
    try:
        result: VariableStatistics = work(*arguments)
    except (InvalidTypeError, InvalidValueError) as error:
        raise type(error)(f"variable {name!r}: {error}") from error
    return result


def _check_not_empty(
    name: str, stats: VariableStatistics, part: str, shape: tuple[int, ...], weighted: bool = False
) -> None:
    """Refuse a part without cells, and say when there are cells but no value."""
    if np.sum(stats.count) + np.sum(stats.gaps) + np.sum(stats.infs) == 0:
        if 0 in shape:
            raise EmptyPartError(
                f"variable {name!r} has no cell, its shape is {shape}; give a cube that has some"
            )
        if part == "all":
            raise EmptyPartError(
                f"variable {name!r} has only cells of weight 0; give other weights"
            )
        only = ", or only cells of weight 0" if weighted else ""
        raise EmptyPartError(
            f"variable {name!r} has no cell in part {part!r}{only}; choose another split"
            f"{' or other weights' if weighted else ''}, or split=None for all cells"
        )
    if np.sum(stats.count) == 0:
        logger.warning("variable %r has no finite cell in part %r", name, part)


def _summed(variable: xr.Variable, where: xr.Variable | None, form: Form) -> VariableStatistics:
    """Sum up a variable block by block, merging in the order of blocks."""
    if not form.plain:
        return field_statistics(variable, where, form)
    total = VariableStatistics()
    if variable.size == 0:
        return total
    variable = straight(variable)
    if cubes.is_lazy(variable, where):
        return _summed_by_dask(variable, where)
    if where is not None:
        where = cubes.spread(where, variable)

    def sum_block(slices: dict[str, slice]) -> VariableStatistics:
        cells = None if where is None else where.isel(slices).values
        return VariableStatistics.of(variable.isel(slices).values, cells)

    # reading, decoding and summing release the GIL; sums come back in the order of blocks
    with ThreadPoolExecutor(threads()) as pool:
        for stats in pool.map(sum_block, blocks(variable)):
            total = total.merge(stats)
    return total


def _summed_by_dask(variable: xr.Variable, where: xr.Variable | None) -> VariableStatistics:
    """Sum up each chunk where dask reads it; only the sums come back."""
    import dask.array as da

    if variable.chunks is None:
        variable = variable.chunk(block_shape(variable))
    arrays = [variable.data]
    if where is not None:
        # cut before it is repeated, or dask would look at every copy
        chunks = dict(zip(variable.dims, variable.chunks or (), strict=True))
        cut = where.chunk({dim: chunks[dim] for dim in where.dims})
        arrays.append(cubes.spread(cut, variable).chunk(chunks).data)
    sums = da.map_blocks(  # type: ignore[no-untyped-call]
        _block_statistics,
        *arrays,
        dtype=object,
        chunks=tuple((1,) * n for n in variable.data.numblocks),
        meta=np.empty((0,) * variable.ndim, object),
    ).compute()
    total = VariableStatistics()
    for stats in sums.flat:
        total = total.merge(stats)
    return total


def _block_statistics(
    values: NDArray[Any], where: NDArray[np.bool_] | None = None
) -> NDArray[np.object_]:
    """Sum up one chunk, as an array of one object."""
    result = np.empty((1,) * values.ndim, object)
    result[...] = VariableStatistics.of(values, where)
    return result


def get_statistics(
    ds: cubes.Cube,
    exclude_vars: Iterable[str] = (),
    *,
    split: str | None = "train",
    dims: str | Iterable[str] | None = None,
    by: str | None = None,
    weights: Weights = None,
) -> dict[str, list[Any]]:
    """Compute mean and standard deviation of each variable in one pass over the cube.

    Parameters
    ----------
    ds : Dataset, DataArray or dict of arrays (samples, *window)
        A cube of any dims, lazy or not, or samples.
    exclude_vars : iterable of str
        Variables to leave out; split labels, masks and auxiliary variables are left out anyway.
    split : {"train", "val", "test", None}
        Part to use if `ds` has a split label, which is said in the log; None for all cells.
    dims : str or iterable of str, optional
        Dims to reduce over, as xarray's ``dim``; the others are kept: ``dims=["time", "lat",
        "lon"]`` gives statistics per level, ``dims="time"`` per pixel. All if not given.
    by : {"month", "season", "dayofyear"}, optional
        Climatology: one value for each month, season (DJF, MAM, JJA, SON) or day of the year.
    weights : {"area"} or DataArray, optional
        Weights of cells: their area, which is that of latitude bands for one latitude per row and
        cos(latitude) for one per cell, or numbers matched by the names of dims.

    Returns
    -------
    dict of str to [float, float] or [DataArray, DataArray]
        ``{variable: [mean, std]}`` in the variable's units; the population standard deviation.
        DataArrays where dims are kept or a climatology is asked for, as `standardize` takes
        them. Gaps and infinities are left out; NaN where there are only such.

    Raises
    ------
    InvalidValueError
        If a name, dim or the part is unknown, nothing is left to sum up, or a variable holds
        packed integers that were not decoded.
    EmptyPartError
        If the part has no cell.

    Notes
    -----
    Blocks are merged in order: the same chunks give the same bits under any scheduler, other
    chunks the same numbers to rounding of float64.

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
        ds, exclude_vars=exclude_vars, split=split, dims=dims, by=by, weights=weights
    )
    return stats.mean_std()


def get_range(
    ds: cubes.Cube,
    exclude_vars: Iterable[str] = (),
    *,
    split: str | None = "train",
    dims: str | Iterable[str] | None = None,
    by: str | None = None,
) -> dict[str, list[Any]]:
    """Find the least and greatest finite value of each variable in one pass over the cube.

    Parameters
    ----------
    ds : Dataset, DataArray or dict of arrays (samples, *window)
        A cube of any dims, lazy or not, or samples.
    exclude_vars : iterable of str
        Variables to leave out; split labels, masks and auxiliary variables are left out anyway.
    split : {"train", "val", "test", None}
        Part to use if `ds` has a split label, which is said in the log; None for all cells.
    dims : str or iterable of str, optional
        Dims to reduce over, as xarray's ``dim``; the others are kept. All if not given.
    by : {"month", "season", "dayofyear"}, optional
        Climatology: one value for each month, season (DJF, MAM, JJA, SON) or day of the year.

    Returns
    -------
    dict of str to [float, float] or [DataArray, DataArray]
        ``{variable: [min, max]}`` in the variable's units; DataArrays where dims are kept or a
        climatology is asked for. NaN where there is no finite cell.

    Raises
    ------
    InvalidValueError
        If a name or the part is unknown, nothing is left to sum up, or a variable holds packed
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
        ds, exclude_vars=exclude_vars, split=split, dims=dims, by=by
    ).range()
