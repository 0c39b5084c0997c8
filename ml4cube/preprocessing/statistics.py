"""Statistics of a cube, read once, block by block."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core import statistics as core
from ml4cube.core.errors import EmptyPartError, InvalidTypeError, InvalidValueError, check_choice
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import VariableStatistics
from ml4cube.preprocessing import cubes

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
    ) -> Self:
        """Read each variable once and sum it up, with memory for a few blocks only.

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

        Returns
        -------
        Statistics
            One entry per variable; gaps and infinities are left out and counted.

        Raises
        ------
        InvalidValueError
            If a name or the part is unknown, nothing is left to sum up, or a variable holds
            packed integers that were not decoded.
        InvalidTypeError
            If a variable asked for by name holds no real numbers.
        EmptyPartError
            If the part has no cell.
        """
        cubes.check_cube(ds)
        excluded = cubes.names("exclude_vars", exclude_vars)
        wanted = None if variables is None else cubes.names("variables", variables)
        if not isinstance(ds, xr.Dataset | xr.DataArray):
            return cls._from_samples(ds, wanted, excluded, split)
        cube = cubes.as_dataset(ds)
        chosen = _chosen(cube, wanted, excluded, isinstance(ds, xr.DataArray))
        cells, part = cubes.cells_of_part(cube, split)
        table = {}
        for name in chosen:
            variable = cube.variables[name]
            where = None if cells is None else cubes.spread(cells, variable)
            table[name] = _named_errors(name, _summed, variable, where)
            _check_not_empty(name, table[name], part)
        return cls(table, part)

    @classmethod
    def _from_samples(
        cls,
        samples: Mapping[str, Any],
        wanted: tuple[str, ...] | None,
        excluded: tuple[str, ...],
        split: str | None,
    ) -> Self:
        """Sum up a dict of arrays (samples, *window)."""
        check_choice("split", split, (*PARTS, None))
        arrays = {name: np.asarray(values) for name, values in samples.items()}
        cubes.check_known("exclude_vars", excluded, arrays)
        cubes.check_known("variables", wanted or (), arrays)
        if wanted is None:
            wanted = tuple(n for n, a in arrays.items() if a.dtype.kind in "fiub")
            excluded = (*excluded, "split", cubes.FILTER_VAR)
        chosen = [name for name in wanted if name not in excluded]
        if not chosen:
            raise InvalidValueError(f"no variable of {list(arrays)} is left to sum up")
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
            table[name] = _named_errors(name, VariableStatistics.of, arrays[name], where)
            _check_not_empty(name, table[name], part)
        return cls(table, part)


def _chosen(
    cube: xr.Dataset, wanted: tuple[str, ...] | None, excluded: tuple[str, ...], single: bool
) -> list[str]:
    """Variables to sum up, checked before anything is read."""
    cubes.check_known("exclude_vars", excluded, cube.variables)
    cubes.check_known("variables", wanted or (), cube.variables)
    if wanted is None and single:
        wanted = tuple(str(name) for name in cube.data_vars)
    listed = cubes.data_variables(cube) if wanted is None else list(wanted)
    chosen = [name for name in listed if name not in excluded]
    if not chosen:
        raise InvalidValueError(
            f"no variable is left to sum up: the cube has {list(cube.data_vars)}, of which "
            f"{list(excluded)} are excluded and the rest are labels, masks or auxiliary"
        )
    for name in chosen:
        cubes.check_decoded(name, cube.variables[name])
        if cube.variables[name].dtype.kind not in "fiub":
            raise InvalidTypeError(
                f"variable {name!r} is of dtype {cube.variables[name].dtype}, statistics need "
                "real numbers; leave it out or convert it"
            )
    return chosen


def _named_errors(name: str, work: Any, *arguments: Any) -> VariableStatistics:
    """Run `work`, putting the variable's name before the message of its errors."""
    try:
        result: VariableStatistics = work(*arguments)
    except (InvalidTypeError, InvalidValueError) as error:
        raise type(error)(f"variable {name!r}: {error}") from error
    return result


def _check_not_empty(name: str, stats: VariableStatistics, part: str) -> None:
    """Refuse a part without cells, and say when there are cells but no value."""
    if stats.count + stats.gaps + stats.infs == 0:
        raise EmptyPartError(
            f"variable {name!r} has no cell in part {part!r}; choose another split, or "
            "split=None for all cells"
        )
    if stats.count == 0:
        logger.warning("variable %r has no finite cell in part %r", name, part)


def _summed(variable: xr.Variable, where: xr.Variable | None) -> VariableStatistics:
    """Sum up a variable block by block, merging in the order of blocks."""
    total = VariableStatistics()
    if variable.size == 0:
        return total
    if cubes.is_lazy(variable, where):
        return _summed_by_dask(variable, where)

    def sum_block(slices: dict[str, slice]) -> VariableStatistics:
        cells = None if where is None else where.isel(slices).values
        return VariableStatistics.of(variable.isel(slices).values, cells)

    # reading, decoding and summing release the GIL; sums come back in the order of blocks
    with ThreadPoolExecutor(_threads()) as pool:
        for stats in pool.map(sum_block, cubes.blocks(variable)):
            total = total.merge(stats)
    return total


def _threads() -> int:
    """Number of cores this process may use, up to eight."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return min(count or 1, 8)


def _summed_by_dask(variable: xr.Variable, where: xr.Variable | None) -> VariableStatistics:
    """Sum up each chunk where dask reads it; only the sums come back."""
    import dask.array as da

    if variable.chunks is None:
        variable = variable.chunk(cubes.block_shape(variable))
    arrays = [variable.data]
    if where is not None:
        arrays.append(
            where.chunk(dict(zip(variable.dims, variable.chunks or (), strict=True))).data
        )
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
    ds: cubes.Cube, exclude_vars: Iterable[str] = (), *, split: str | None = "train"
) -> dict[str, list[float]]:
    """Compute mean and standard deviation of each variable in one pass over the cube.

    Parameters
    ----------
    ds : Dataset, DataArray or dict of arrays (samples, *window)
        A cube of any dims, lazy or not, or samples.
    exclude_vars : iterable of str
        Variables to leave out; split labels, masks and auxiliary variables are left out anyway.
    split : {"train", "val", "test", None}
        Part to use if `ds` has a split label, which is said in the log; None for all cells.

    Returns
    -------
    dict of str to [float, float]
        ``{variable: [mean, std]}`` in the variable's units; the population standard deviation.
        Gaps and infinities are left out; NaN for a variable that is all gaps.

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
    >>> get_statistics({"t": np.array([1.0, 3.0, np.nan])})
    {'t': [2.0, 1.0]}
    """
    return Statistics.from_cube(ds, exclude_vars=exclude_vars, split=split).mean_std()


def get_range(
    ds: cubes.Cube, exclude_vars: Iterable[str] = (), *, split: str | None = "train"
) -> dict[str, list[float]]:
    """Find the least and greatest finite value of each variable in one pass over the cube.

    Parameters
    ----------
    ds : Dataset, DataArray or dict of arrays (samples, *window)
        A cube of any dims, lazy or not, or samples.
    exclude_vars : iterable of str
        Variables to leave out; split labels, masks and auxiliary variables are left out anyway.
    split : {"train", "val", "test", None}
        Part to use if `ds` has a split label, which is said in the log; None for all cells.

    Returns
    -------
    dict of str to [float, float]
        ``{variable: [min, max]}`` in the variable's units; NaN for a variable that is all gaps.

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
    return Statistics.from_cube(ds, exclude_vars=exclude_vars, split=split).range()
