"""estimate_range: the range of autocorrelation by dim; suggest_block_size: blocks of that size."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from ml4cube.core.display import Summarized, Summary, Table
from ml4cube.core.distance.variogram import (
    FEWEST_LAGS,
    Semivariances,
    Variogram,
    differ,
    fit_variogram,
    pool,
    semivariances,
    with_interval,
)
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_whole, listed
from ml4cube.core.statistics import check_decoded
from ml4cube.cube import masks_and_labels
from ml4cube.cube.absent_chunks import heed_in_array
from ml4cube.cube.coordinates import map_dims
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.variables import data_variables
from ml4cube.splits import residuals
from ml4cube.splits.cube import Cube, CubeView, in_chunks
from ml4cube.splits.residuals import (
    Residuals,
    cycles_of,
    remove_trend_and_season,
    sample_lines,
)

logger = logging.getLogger(__name__)


class Ranges(Summarized, dict[str, float]):
    """Range of autocorrelation by dim, in cells: a dict with intervals and variograms.

    Parameters
    ----------
    variograms : mapping of str to Variogram
        One for each dim.
    var : str
        The variable.

    Attributes
    ----------
    variograms : dict of str to Variogram
        Lags, semivariances, pairs and the fitted model by dim.
    reasons : dict of str to str
        Why a dim has no range; only dims without one.
    intervals : dict of str to tuple of float
        Ends of the 90 % interval of the range by dim, in cells: the upper one is inf if the range
        may be over a third of the dim, and both are NaN if nothing is known.
    var : str
        The variable.
    rising : frozenset of str
        Dims without a sill because the semivariance rises over all distances examined.

    Examples
    --------
    >>> steps = np.random.default_rng(0).normal(size=(40, 500)).cumsum(axis=1)
    >>> smooth = xr.DataArray(steps[:, 10:] - steps[:, :-10], dims=("y", "x"), name="a")
    >>> ranges = estimate_range(smooth)
    >>> low, high = ranges.intervals["x"]
    >>> bool(low < ranges["x"] < high)
    True
    """

    def __init__(self, variograms: dict[str, Variogram], var: str) -> None:
        super().__init__({dim: float(variogram.range) for dim, variogram in variograms.items()})
        self.variograms = dict(variograms)
        self.reasons = {
            dim: variogram.reason for dim, variogram in variograms.items() if variogram.reason
        }
        self.intervals = {dim: fitted.interval for dim, fitted in variograms.items()}
        self.var = var
        self.rising = frozenset(dim for dim, variogram in variograms.items() if variogram.rising)

    def _summary(self) -> Summary:
        rows = [(dim, *self._texts(dim), self.reasons.get(dim, "")) for dim in self]
        columns = ("dim", "range", "90 % interval", "why there is none")
        headline = f"range of autocorrelation of {self.var!r}, in cells"
        return Summary(headline, sections={"dims": Table(columns, rows)})

    def _texts(self, dim: str) -> tuple[str, str]:
        """Return the range and its interval as texts."""
        cells, (low, high) = self[dim], self.intervals[dim]
        if math.isnan(low):
            return "unknown", "unknown"
        interval = f"{low:.3g} or more" if math.isinf(high) else f"{low:.3g} to {high:.3g}"
        return "unknown" if math.isnan(cells) else f"{cells:.3g}", interval

    def doubts(self) -> dict[str, str]:
        """Return what is not known of the range, by dim; only dims with something to say.

        Returns
        -------
        dict of str to str
            Why there is no range, or that it may be much longer, with its interval.

        Examples
        --------
        >>> ranges = estimate_range(xr.DataArray(np.zeros((3, 90)), dims=("y", "x")))
        >>> ranges.doubts()["x"].split(",")[0]
        'no sill: all values along it are equal'
        """
        doubts = {}
        for dim, (_, high) in self.intervals.items():
            cells, interval = self._texts(dim)
            if dim in self.rising:
                doubts[dim] = f"{self.reasons[dim]}; 90 % interval of the range: {interval} cells"
            elif dim in self.reasons:
                doubts[dim] = self.reasons[dim]
            elif math.isinf(high):
                doubts[dim] = (
                    f"the range may be too short: it is {cells} cells, 90 % interval {interval}, "
                    "because few ranges fit into the cube"
                )
        return doubts

    def plot(self) -> Any:
        """Plot the variograms with their ranges and sills.

        Returns
        -------
        matplotlib.figure.Figure
            One panel per dim.
        """
        from ml4cube.plotting import variogram_plot

        return variogram_plot(self.variograms, title=f"Variograms of {self.var}")


def estimate_range(
    ds: Cube,
    var: str | None = None,
    dims: str | Iterable[str] | None = None,
    detrend: bool = True,
    deseason: bool = True,
    *,
    missing_chunks: str = "warn",
) -> Ranges:
    """Estimate the range of autocorrelation along each dim.

    The empirical variogram of the cells along the dim, over at most half its length, is fitted
    with a linear, a spherical, an exponential, a gaussian or one of two Matérn models by weighted
    least squares. The range is the practical one: where the model reaches 95 % of its sill, and
    values have a correlation of 0.05. It must fit into the dim three times, or it cannot be
    distinguished from that of a larger field. The fewer ranges fit into the cube, the less it is
    known, and the more often it is too short: ``intervals`` has the 90 % interval, and the log
    warns if it has no upper end. For synthetic fields of two and three dims and a length of 30
    ranges, the error is below 25 %; a field of one dim needs some 100 ranges.

    The two dims of a map have one range, from the pairs along both, unless their variograms differ
    by more than chance allows: by a factor of exp(2 / √n) up to a quarter of the range, for the n
    times that the area of a range fits into the field.

    Parameters
    ----------
    ds : Dataset or DataArray
        The cube, of any dims, lazy or not.
    var : str, optional
        The variable, of numbers or bools; optional if there is only one.
    dims : str or iterable of str, optional
        Dims to examine; by default all of the variable's.
    detrend : bool
        Remove one linear trend along all dims first.
    deseason : bool
        Remove the yearly cycle of every cell (and the daily one, for steps of 6 hours or less)
        first: two harmonics, if a dim of dates spans two years or more.
    missing_chunks : {"warn", "raise", "drop"}, default "warn"
        What to do about chunks that the zarr store of a cube lacks and that read as values: warn,
        refuse them, or take their cells for gaps.

    Returns
    -------
    Ranges
        A dict {dim: cells}, with ``intervals``, ``variograms``, ``reasons`` and ``plot()``. NaN if
        there is no sill, fewer than three ranges fit into the dim, fewer than three distances have
        30 pairs of values, or the dim lists stations: ``reasons`` has the reason, and the log a
        warning. A rough (exponential) field smaller than its range may still get a range, which is
        too short; its interval has no upper end. A range below one cell counts as one. If cells are
        not equally spaced, a cell is the median spacing. Months count as equally spaced. Spreads of
        up to two steps of the dtype have no range.

    Raises
    ------
    InvalidValueError
        If the variable or a dim is unknown, or the variable holds no numbers, packed integers
        that were not decoded, or values too large to be squared.
    InvalidTypeError
        If `var` names several variables.

    Notes
    -----
    Gaps (NaN, ±inf) are left out of the pairs. If the cube has more than 2 million cells, a
    sample is read for each dim, so memory is bounded; it is the same for any chunking and order
    of dims. For formulas see `ml4cube.core.distance.variogram`.

    Examples
    --------
    >>> steps = np.random.default_rng(0).normal(size=(40, 500)).cumsum(axis=1)
    >>> smooth = steps[:, 10:] - steps[:, :-10]  # Alike over 10 cells.
    >>> ds = xr.Dataset({"a": (("y", "x"), smooth)})
    >>> 8 < estimate_range(ds, "a", "x")["x"] < 12
    True
    """
    array = heed_in_array(_variable(ds, var), missing_chunks)
    return ranges_of(array, dims, detrend, deseason)


def ranges_of(
    array: xr.DataArray,
    dims: str | Iterable[str] | None,
    detrend: bool = True,
    deseason: bool = True,
) -> Ranges:
    """Estimate the ranges of a variable whose absent chunks were heeded."""
    array = in_chunks(_variable(array, None))
    wanted = _dims(array, dims)
    stations = station_dim(array)
    on_map = map_dims(array.coords.values(), array.dims)
    if len(on_map) != 2 or stations in on_map or not set(on_map) & set(wanted):
        on_map = ()
    lines = _lines_by_dim(array, {*wanted, *on_map}, detrend, deseason)
    if stations in wanted:
        reason = f"no sill: {stations!r} lists stations, whose order does not follow their distance"
        lines[str(stations)] = _Lines(reason=reason)
    variograms = {dim: of_dim.fit() for dim, of_dim in lines.items()}
    pooled = {}
    if on_map:
        pooled = _pooled(lines, variograms, on_map)
    variograms |= pooled
    n_patches = math.prod(lines[dim].ranges_in(variograms[dim]) for dim in lines)
    for dim in wanted:
        same = [dim]
        if dim in pooled:
            same = list(pooled)
        longest = max(same, key=lambda name: lines[name].length)
        n_lines = n_patches / lines[longest].ranges_in(variograms[dim])
        length = lines[longest].length
        variograms[dim] = with_interval(variograms[dim], length, n_lines, len(same))
    ranges = Ranges({dim: variograms[dim] for dim in wanted}, str(array.name))
    for dim, doubt in ranges.doubts().items():
        logger.warning("%s along %s: %s", array.name, dim, doubt)
    return ranges


def _lines_by_dim(
    array: xr.DataArray, wanted: set[str], detrend: bool, deseason: bool
) -> dict[str, _Lines]:
    """Return the lines along all dims but that of stations; none if only that is wanted."""
    stations = station_dim(array)
    dims = [dim for dim in map(str, array.dims) if dim != stations]
    asked = wanted.intersection(dims)
    if not asked:
        return {}
    cycles = {}
    if deseason:
        cycles = cycles_of(array)
    is_sampled = array.size > residuals.CELLS_AT_MOST
    lines: dict[str, _Lines] = {}
    values: Residuals | None = None
    for dim in sorted(dims, key=lambda dim: dim not in asked):
        # In a large cube, dims that nobody asked for are looked at in the last sample.
        if values is None or (is_sampled and dim in asked):
            cells = array
            if is_sampled:
                cells = sample_lines(array, dim, deseason)
            values = remove_trend_and_season(cells, detrend, cycles)
        lines[dim] = _lines(values, dim, array.dtype)
    return lines


class _Lines(NamedTuple):
    """The semivariances along a dim, and what else its range is estimated from."""

    semivariances: Semivariances = Semivariances(
        np.empty(0), np.empty(0), np.empty(0, dtype=np.int64)
    )
    variance: float | None = None
    # From end to end, in units of the median distance of cells, and no more than there are cells.
    length: float = 1.0
    # Why it has no range, whatever the semivariances.
    reason: str = ""

    def fit(self) -> Variogram:
        """Return the variogram with the model fitted to it."""
        if self.reason:
            return Variogram(*self.semivariances, reason=self.reason)
        return fit_variogram(*self.semivariances, self.variance)

    def ranges_in(self, variogram: Variogram) -> float:
        """Return how many ranges the dim is long, at least one."""
        cells = variogram.longest_seen if variogram.rising else variogram.range
        if math.isfinite(cells):
            return max(self.length / cells, 1.0)
        return 1.0


def _lines(values: Residuals, dim: str, dtype: np.dtype[Any]) -> _Lines:
    """Return the semivariances of residuals along a dim."""
    axis = list(values.positions).index(dim)
    lines = np.moveaxis(values.values, axis, -1).reshape(-1, values.values.shape[axis])
    positions = values.positions[dim]
    of_lines = semivariances(lines, positions)
    variance = None
    if np.isfinite(lines).any():
        variance = float(np.nanvar(lines))
    reason = ""
    if (
        of_lines.lags.size >= FEWEST_LAGS
        and math.sqrt(of_lines.semivariance.max()) <= values.rounding
    ):
        reason = (
            "no sill: all values along it are equal, or vary by no more than a few steps of "
            f"{dtype.name if dtype.kind == 'f' else 'float64'}, which may be rounding"
        )
    length = 1.0
    if positions.size:
        length = min(float(positions[-1] - positions[0]) + 1, positions.size)
    return _Lines(of_lines, variance, length, reason)


def _pooled(
    lines: Mapping[str, _Lines], variograms: Mapping[str, Variogram], dims: Sequence[str]
) -> dict[str, Variogram]:
    """Return one model for both dims of a map, unless they differ by more than chance allows."""
    first, second = (lines[dim] for dim in dims)
    if first.reason or second.reason or first.variance is None or second.variance is None:
        return {}
    counts = {dim: lines[dim].ranges_in(variograms[dim]) for dim in lines}
    area = math.prod(lines[dim].length / counts[dim] for dim in dims)
    patches = math.prod(counts.values())
    if differ(first.semivariances, second.semivariances, math.sqrt(area), patches):
        return {}
    both = first._replace(
        semivariances=pool(first.semivariances, second.semivariances),
        variance=(first.variance + second.variance) / 2,
    )
    pooled = both.fit()
    return {dim: replace(pooled, **lines[dim].semivariances._asdict()) for dim in dims}


def suggest_block_size(
    ds: Cube,
    var: str | None = None,
    dims: str | Iterable[str] | None = None,
    *,
    min_blocks: int = 10,
    detrend: bool = True,
    deseason: bool = True,
) -> dict[str, int]:
    """Suggest blocks for `assign_block_split` that are at least as long as the range.

    Along each dim the cube is cut into the most equal blocks that are no shorter than the range
    from `estimate_range`, and so long that fewer than half the cells of a block touch another
    one: 5 cells if one dim may be cut, 7 for two dims, 10 for three. A dim without a sill, or
    shorter than two such blocks, is not cut. If there would be fewer than `min_blocks` blocks,
    they are made shorter where that matters least, and the log warns: such a cube needs a buffer,
    or a split that leaves out a region or a period of time.

    Parameters
    ----------
    ds : Dataset or DataArray
        The cube.
    var : str, optional
        The variable whose range is used, best the target.
    dims : str or iterable of str, optional
        Dims that may be cut; by default all of the variable's.
    min_blocks : int
        Fewest blocks in total.
    detrend, deseason : bool
        As for `estimate_range`.

    Returns
    -------
    dict of str to int
        Cells of a block by dim, or the dim's length if it is not cut; for
        ``assign_block_split(block_size=...)``. Blocks that touch still leak along their edges:
        use a ``buffer`` as well.

    Raises
    ------
    InvalidValueError
        If `min_blocks` is below 2, or as for `estimate_range`.
    InvalidTypeError
        If `min_blocks` is not an integer, or `var` names several variables.

    Examples
    --------
    >>> steps = np.random.default_rng(0).normal(size=(40, 500)).cumsum(axis=1)
    >>> ds = xr.Dataset({"a": (("y", "x"), steps[:, 10:] - steps[:, :-10])})
    >>> suggest_block_size(ds, "a", "x", min_blocks=4)["x"] >= 10
    True
    """
    check_whole("min_blocks", min_blocks, 2)
    array = _variable(ds, var)
    ranges = estimate_range(array, None, dims, detrend, deseason)
    stations = station_dim(array)
    if list(ranges) == [stations]:
        raise InvalidValueError(
            f"blocks along {stations!r} are not regions because its stations are in no order; "
            "leave out groups of stations with assign_region_split"
        )
    lengths = {dim: array.sizes[dim] for dim in ranges}
    wanted = _wanted_lengths(ranges, lengths)
    counts = {dim: _most_blocks(lengths[dim], wanted[dim]) for dim in ranges}
    n_long_blocks = math.prod(counts.values())
    if n_long_blocks < min_blocks:
        _add_blocks(counts, min_blocks, lengths, ranges, stations)
    sizes = {dim: math.ceil(lengths[dim] / counts[dim]) for dim in counts}
    if n_long_blocks < min_blocks:
        remedy = ""
        if short := [dim for dim in sizes if sizes[dim] < min(lengths[dim], wanted[dim])]:
            remedy = f", so shorter ones are suggested along {listed(short)}"
        logger.warning(
            "%s: only %d blocks as long as the range fit in the cube, fewer than %d%s. Values on "
            "both sides of an edge are alike: add a buffer, or leave out a region or a period of "
            "time",
            array.name,
            n_long_blocks,
            min_blocks,
            remedy,
        )
    return sizes


def _wanted_lengths(ranges: Ranges, lengths: Mapping[str, int]) -> dict[str, float]:
    """Return the least length of a block along each dim: the whole dim without a sill."""
    # Fewer than half the cells of a block touch another one if this fraction of each side does not.
    # Two cells of each side touch others, one at either end.
    inner_fraction = 0.5 ** (1 / max(len(ranges), 1))
    shortest = math.floor(2 / (1 - inner_fraction)) + 1
    wanted = {}
    for dim, cells in ranges.items():
        wanted[dim] = float(lengths[dim])
        if math.isfinite(cells):
            wanted[dim] = max(cells, shortest)
    return wanted


def _add_blocks(
    counts: dict[str, int],
    min_blocks: int,
    lengths: Mapping[str, int],
    ranges: Ranges,
    stations: str | None,
) -> None:
    """Add blocks until there are `min_blocks`, or no dim can be cut further."""
    may_be_cut = [dim for dim in counts if lengths[dim] >= 4 and dim != stations]
    # Cuts of dims without a sill are made where they leave the longest blocks.
    scales = _wanted_lengths(ranges, lengths)
    for dim, (low, _) in ranges.intervals.items():
        if math.isnan(ranges[dim]) and low > 0:
            scales[dim] = low
    while math.prod(counts.values()) < min_blocks:
        # Cut the dim whose blocks stay longest relative to the range. Prefer dims with a known
        # range, because without a sill it is unknown how alike blocks are.
        priority = {
            dim: (math.isfinite(ranges[dim]), lengths[dim] / (counts[dim] + 1) / scales[dim])
            for dim in may_be_cut
            if math.ceil(lengths[dim] / counts[dim]) > 1
        }
        if not priority:
            break
        dim = max(priority, key=lambda name: priority[name])
        # One block more may leave the size of a block as it is, and so cut nothing.
        smaller_size = math.ceil(lengths[dim] / counts[dim]) - 1
        counts[dim] = math.ceil(lengths[dim] / smaller_size)


def _most_blocks(length: int, shortest: float) -> int:
    """Return the largest number of equal blocks (but the last), none shorter than `shortest`."""
    for count in range(int(length // shortest), 1, -1):
        size = math.ceil(length / count)
        last = length - size * (count - 1)
        if last >= shortest:
            return count
    return 1


def _variable(ds: Cube, var: str | None) -> xr.DataArray:
    if not (var is None or isinstance(var, Hashable)):
        raise InvalidTypeError(f"var must be the name of one variable, got {var!r}")
    if isinstance(ds, xr.DataArray) and var in (None, ds.name):
        array = ds
        if ds.name is None:
            array = ds.rename(masks_and_labels.DATA_VAR)
    else:
        ds = as_dataset(ds)
        numeric = data_variables(ds)
        if var is None and len(numeric) != 1:
            raise InvalidValueError(f"pass var to name one of the variables {numeric}")
        if var is None:
            var = numeric[0]
        if var not in ds:
            raise InvalidValueError(f"unknown variable {var!r}; the cube has {numeric}")
        array = ds[var]
    if array.dtype.kind not in "biuf":
        raise InvalidValueError(f"{array.name!r} must hold numbers, got {array.dtype}")
    if not array.ndim:
        raise InvalidValueError(f"{array.name!r} must have dims, got a scalar")
    check_decoded(str(array.name), array)
    return array


def _dims(array: xr.DataArray, dims: str | Iterable[str] | None) -> list[str]:
    if dims is None:
        return [str(dim) for dim in array.dims]
    if isinstance(dims, str):
        dims = [dims]
    wanted = list(dims)
    if unknown := [dim for dim in wanted if dim not in array.dims]:
        raise InvalidValueError(f"unknown dims {unknown}; {array.name!r} has {array.dims}")
    return wanted


def station_dim(array: xr.DataArray) -> str | None:
    """Return the dim of stations, along which both latitude and longitude lie, or None."""
    view = CubeView.of(array.rename(None))  # A name could make it bounds.
    lat, lon = view.axis_of("latitude"), view.axis_of("longitude")
    if lat is None or lon is None or lat.dims != lon.dims:
        return None
    dim = str(lat.dims[0])
    if dim == view.dim_of_time:
        return None
    return dim
