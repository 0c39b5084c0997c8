"""estimate_range: how far the values of a cube are alike; suggest_block_size: blocks as large."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Hashable, Iterable
from typing import Any, NamedTuple

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.axes import is_time
from ml4cube.core.distance.variogram import FEWEST_LAGS, Variogram, fit_variogram, semivariances
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_whole
from ml4cube.core.statistics import check_decoded
from ml4cube.cube import roles
from ml4cube.cube.coordinates import find_time_dim
from ml4cube.cube.opening import as_dataset
from ml4cube.cube.variables import data_variables
from ml4cube.splits.cube import CubeView, in_chunks, microseconds

logger = logging.getLogger(__name__)

Cube = xr.Dataset | xr.DataArray
Floats = NDArray[np.float64]

# Cells looked at for one dim: 16 MB of float64, a few hundred MB with all that is worked out.
_CELLS_AT_MOST = 1 << 21
_RUNS = 8
_YEAR_DAYS = {"360_day": 360.0, "noleap": 365.0, "365_day": 365.0, "all_leap": 366.0}
_HARMONICS = 2
# Rounding to a float dtype leaves a spread of 0.3 of its steps, of a few operations a bit more;
# what is worked out here, in float64, is off by some tens of its eps at most.
_STEPS_OF_ROUNDING = 2
_EPS_OF_ROUNDING = 64
# Share of a cell by which equally far cells may be off: months are of 28 to 31 days.
_ABOUT_EQUAL = 0.15
# Sums of squares of larger differences overflow.
_TOO_LARGE = 1e150
_MICROSECONDS_PER_DAY = 86_400_000_000


class Ranges(dict[str, float]):
    """Range of autocorrelation by dim, in cells; a dict that also knows how it was found.

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
        Why a dim has no range, in plain words; only dims without one.
    var : str
        The variable.

    Examples
    --------
    >>> found = Ranges({"x": Variogram(np.ones(1), np.ones(1), np.ones(1), reason="no sill")}, "a")
    >>> found, found.reasons
    ({'x': nan}, {'x': 'no sill'})
    """

    def __init__(self, variograms: dict[str, Variogram], var: str) -> None:
        super().__init__({dim: float(found.range) for dim, found in variograms.items()})
        self.variograms = dict(variograms)
        self.reasons = {dim: found.reason for dim, found in variograms.items() if found.reason}
        self.var = var

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.variograms, self.var)

    def plot(self) -> Any:
        """Draw the variograms with their ranges and sills.

        Returns
        -------
        matplotlib.figure.Figure
            One panel by dim.
        """
        from ml4cube.plotting import variogram_plot

        return variogram_plot(self.variograms, title=f"Variograms of {self.var}")


def estimate_range(
    ds: Cube,
    var: str | None = None,
    dims: str | Iterable[str] | None = None,
    detrend: bool = True,
    deseason: bool = True,
) -> Ranges:
    """Estimate along each dim how far apart values must be to be no longer alike.

    The empirical variogram of the cells along the dim, over at most half its length, gets a
    linear, a spherical, an exponential, a gaussian or one of two Matérn models by weighted least
    squares. The range is the practical one: where the model reaches 95 % of its sill, and values
    have a correlation of 0.05 left. It must fit into the dim five times, else it cannot be told
    from that of a larger field. Made fields of two and three dims and 30 ranges' length are met
    within 25 %; a short dim says less, and a field of one dim needs some 100 ranges.

    Parameters
    ----------
    ds : Dataset or DataArray
        The cube, of any dims, lazy or not.
    var : str, optional
        The variable, of numbers or bools; may be left out where there is only one.
    dims : str or iterable of str, optional
        Dims to look along; by default all of the variable's.
    detrend : bool
        Take one linear trend along all dims off first.
    deseason : bool
        Take the yearly cycle of every cell (and the daily one, of steps of 6 hours or less)
        off first: two harmonics, where a dim of dates spans two years and more.

    Returns
    -------
    Ranges
        A dict {dim: cells}, with ``variograms``, ``reasons`` and ``plot()``. NaN where there is
        no sill, fewer than five ranges fit into the dim, fewer than three distances have 30 pairs
        of values, or the dim lists stations: ``reasons`` says why, and the log warns. Of a rough
        (exponential) field smaller than its range, one dim in five still gets one, too short.
        A range below one cell counts as one. Where cells of a dim are unequally far apart, a cell
        is the median of their distances. Months count as equally far apart. Spreads of up to two
        steps of the dtype have no range.

    Raises
    ------
    InvalidValueError
        If the variable or a dim is unknown, or the variable holds no numbers, packed integers
        that were not decoded, or values too large to be squared.
    InvalidTypeError
        If `var` names several variables.

    Notes
    -----
    Gaps (NaN, ±inf) make no pairs and are no trouble otherwise. Of a cube of more than 2
    million cells, a sample is read for each dim: the same cells for any chunking and order of
    dims; memory stays bounded. Formulas: see `ml4cube.core.distance.variogram`.

    Examples
    --------
    >>> steps = np.random.default_rng(0).normal(size=(40, 500)).cumsum(axis=1)
    >>> smooth = steps[:, 10:] - steps[:, :-10]  # alike over 10 cells
    >>> ds = xr.Dataset({"a": (("y", "x"), smooth)})
    >>> 8 < estimate_range(ds, "a", "x")["x"] < 12
    True
    """
    array = _variable(ds, var)
    wanted = _wanted_dims(array, dims)
    whole: _Residuals | None = None
    order = sorted(str(dim) for dim in array.dims)
    found: dict[str, Variogram] = {}
    stations = station_dim(array)
    for dim in wanted:
        if dim == stations:
            reason = f"no sill: {dim!r} lists places, the next of which is no nearer than others"
            none = np.empty(0)
            found[dim] = Variogram(none, none, none.astype(np.int64), reason=reason)
            continue
        if array.size <= _CELLS_AT_MOST:
            whole = whole or _residuals(array, order, detrend, deseason)
            left = whole
        else:
            left = _residuals(_sample(array, dim, deseason), order, detrend, deseason)
        lines = np.moveaxis(left.values, order.index(dim), -1)
        lines = lines.reshape(-1, lines.shape[-1])
        lags, half, pairs = semivariances(lines, left.positions[dim])
        if lags.size >= FEWEST_LAGS and math.sqrt(half.max()) <= left.rounding:
            reason = _nothing_left(array, left.equal[dim], detrend or deseason)
            found[dim] = Variogram(lags, half, pairs, reason=reason)
            continue
        spread = float(np.nanvar(lines)) if np.isfinite(lines).any() else None
        found[dim] = fit_variogram(lags, half, pairs, spread)
    ranges = Ranges(found, str(array.name))
    for dim, reason in ranges.reasons.items():
        logger.warning("%s along %s: %s", array.name, dim, reason)
    return ranges


def suggest_block_size(
    ds: Cube,
    var: str | None = None,
    dims: str | Iterable[str] | None = None,
    *,
    min_blocks: int = 10,
    detrend: bool = True,
    deseason: bool = True,
) -> dict[str, int]:
    """Suggest blocks for `assign_block_split` that are at least as long as values are alike.

    Along each dim the cube is cut into as many equal blocks as are no shorter than the range
    that `estimate_range` finds, and so long that fewer than half the cells of a block touch
    another one: 5 cells where one dim may be cut, 7 of two dims, 10 of three. A dim without a
    sill, or shorter than two such blocks, is not cut. If fewer than `min_blocks` blocks would be
    left to share out, blocks are made shorter where that does least harm, and the log warns: a
    split of such a cube needs a region or a stretch of time left out, or a buffer.

    Parameters
    ----------
    ds : Dataset or DataArray
        The cube.
    var : str, optional
        The variable whose range counts, best the target.
    dims : str or iterable of str, optional
        Dims that may be cut; by default all of the variable's.
    min_blocks : int
        Fewest blocks that are to be left in all.
    detrend, deseason : bool
        As for `estimate_range`.

    Returns
    -------
    dict of str to int
        Cells of a block by dim, the dim's length where it is not cut; goes straight into
        ``assign_block_split(block_size=...)``. Blocks that touch still leak along their
        edges: give a ``buffer`` as well.

    Raises
    ------
    InvalidValueError
        If `min_blocks` is below 2, or as for `estimate_range`.
    InvalidTypeError
        If `min_blocks` is no integer, or `var` names several variables.

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
            f"{stations!r} lists places in no order, so that no block of it is a region; leave out "
            "groups of places with assign_region_split"
        )
    cells = {dim: array.sizes[dim] for dim in ranges}
    # share of a block's length that touches no other block
    inside = 0.5 ** (1 / max(len(ranges), 1))
    shortest = math.floor(2 / (1 - inside)) + 1
    least = {
        dim: max(r, shortest) if np.isfinite(r) else float(cells[dim]) for dim, r in ranges.items()
    }
    count = {dim: _equal_blocks(cells[dim], least[dim]) for dim in ranges}
    full = math.prod(count.values())
    while math.prod(count.values()) < min_blocks:
        # the dim whose blocks, cut once more, stay the longest for what they should be; a known
        # range goes first, since nobody knows how alike blocks are along a dim without a sill
        left = {
            dim: (bool(np.isfinite(ranges[dim])), cells[dim] / (count[dim] + 1) / least[dim])
            for dim in count
            if math.ceil(cells[dim] / count[dim]) > 1 and cells[dim] >= 4 and dim != stations
        }
        if not left:
            break
        dim = max(left, key=lambda name: left[name])
        # a count that gives the size that some other count gives too would cut nothing
        size = math.ceil(cells[dim] / count[dim]) - 1
        count[dim] = math.ceil(cells[dim] / size)
    sizes = {dim: math.ceil(cells[dim] / count[dim]) for dim in count}
    if full < min_blocks:
        logger.warning(
            "%s: %s", array.name, _too_short(sizes, cells, least, ranges, full, min_blocks)
        )
    return sizes


def _equal_blocks(cells: int, shortest: float) -> int:
    """Most blocks of equal size, but for the last, none of them shorter than `shortest`."""
    for count in range(max(int(cells // max(shortest, 1.0)), 1), 1, -1):
        size = math.ceil(cells / count)
        last = cells - size * (count - 1)
        if last >= shortest:
            return count
    return 1


def _too_short(
    sizes: dict[str, int],
    cells: dict[str, int],
    least: dict[str, float],
    ranges: Ranges,
    full: int,
    min_blocks: int,
) -> str:
    short = [
        f"{dim}: blocks of {sizes[dim]} cells, "
        + (f"range {ranges[dim]:.3g}" if np.isfinite(ranges[dim]) else ranges.reasons[dim])
        for dim in sizes
        if sizes[dim] < min(cells[dim], least[dim])
    ]
    if not short:
        return f"{full} blocks can be cut in all, fewer than {min_blocks}: the cube is too small"
    return (
        f"blocks as long as the range, most of whose cells touch no other block, would be {full} "
        f"in all, fewer than {min_blocks}; shorter ones are suggested ({'; '.join(short)}), so "
        "values on both sides of an edge are alike: add a buffer, or leave a region or a stretch "
        "of time out"
    )


def _variable(ds: Cube, var: str | None) -> xr.DataArray:
    if not (var is None or isinstance(var, Hashable)):
        raise InvalidTypeError(f"var={var!r} is a {type(var).__name__}; name one variable")
    if isinstance(ds, xr.DataArray) and var in (None, ds.name):
        array = ds if ds.name is not None else ds.rename(roles.DATA_VAR)
    else:
        ds = as_dataset(ds)
        numeric = data_variables(ds)
        if var is None and len(numeric) != 1:
            raise InvalidValueError(f"var is missing, the cube has {numeric}; name one")
        var = numeric[0] if var is None else var
        if var not in ds:
            raise InvalidValueError(f"var={var!r} is no variable of the cube, it has {numeric}")
        array = ds[var]
    if array.dtype.kind not in "biuf":
        raise InvalidValueError(f"{array.name!r} is of {array.dtype}; give a variable of numbers")
    if not array.ndim:
        raise InvalidValueError(f"{array.name!r} has no dims; give a variable with dims")
    check_decoded(str(array.name), array.dtype, array.attrs)
    return in_chunks(array)


def station_dim(array: xr.DataArray) -> str | None:
    """Return the dim whose cells are places in no order: latitude and longitude lie along it."""
    view = CubeView.of(array.rename(None))  # whose name may be that of bounds
    lat, lon = view.axis_of("lat"), view.axis_of("lon")
    if lat is None or lon is None or lat.dims != lon.dims:
        return None
    dim = str(lat.dims[0])
    return None if dim == find_time_dim(view.ds.coords.values(), view.dims) else dim


def _wanted_dims(array: xr.DataArray, dims: str | Iterable[str] | None) -> list[str]:
    if dims is None:
        return [str(dim) for dim in array.dims]
    wanted = [dims] if isinstance(dims, str) else list(dims)
    if unknown := [dim for dim in wanted if dim not in array.dims]:
        raise InvalidValueError(f"dims names {unknown}, {array.name!r} has {array.dims}")
    return wanted


def _sample(array: xr.DataArray, dim: str, deseason: bool) -> xr.DataArray:
    """Whole lines along `dim`, spread over the cube, few enough to be read into memory."""
    # Lines come in a few runs of neighbours, so that not every chunk has to be read. Where the
    # yearly cycle is taken off, a good part of the steps along time is kept for every line.
    rng = np.random.default_rng(0)
    sizes = {str(name): n for name, n in sorted(array.sizes.items(), key=lambda item: str(item[0]))}
    n = min(sizes[dim], _CELLS_AT_MOST)
    start = int(rng.integers(sizes[dim] - n + 1))
    taken: dict[str, Any] = {dim: slice(start, start + n)}
    room = max(_CELLS_AT_MOST // n, 1)
    dated = [name for name in sizes if name != dim and deseason and _dates(array, name) is not None]
    others = sorted((name for name in sizes if name != dim and name not in dated), key=sizes.get)  # type: ignore[arg-type]
    for name in dated:
        keep = min(sizes[name], max(room // 16, min(room, 120)))
        taken[name] = np.sort(rng.choice(sizes[name], keep, replace=False))
        room = max(room // keep, 1)
    for place, name in enumerate(others):
        keep = min(sizes[name], max(int(room ** (1 / (len(others) - place))), 1))
        taken[name] = _runs(sizes[name], keep, rng)
        room = max(room // len(taken[name]), 1)
    return array.isel(taken)


def _runs(n: int, keep: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """About `keep` of n positions, in up to `_RUNS` runs of neighbours."""
    if keep >= n:
        return np.arange(n)
    runs = min(_RUNS, keep)
    length = keep // runs
    # one run in each of as many equal stretches
    edges = np.linspace(0, n, runs + 1).astype(int)
    starts = [int(rng.integers(a, max(b - length, a) + 1)) for a, b in itertools.pairwise(edges)]
    return np.unique(np.concatenate([np.arange(s, min(s + length, n)) for s in starts]))


class _Residuals(NamedTuple):
    values: Floats  # without trend and season, gaps as NaN
    positions: dict[str, Floats]
    rounding: float  # a spread up to which values may be nothing but rounding
    equal: dict[str, bool]  # dims along which the values were equal from the start


def _residuals(array: xr.DataArray, order: list[str], detrend: bool, deseason: bool) -> _Residuals:
    """Values without trend and season, axes in `order`, and what else is to be known of them."""
    array = array.transpose(*order)
    values = np.array(array.values, dtype=np.float64)
    values[~np.isfinite(values)] = np.nan
    positions = {}
    for dim in order:
        positions[dim] = _positions(array, dim)
    known = np.isfinite(values)
    equal = {
        dim: not (np.fmax.reduce(values, axis) > np.fmin.reduce(values, axis)).any()
        for axis, dim in enumerate(order)
        if array.sizes[dim]
    }
    if not known.any():
        return _Residuals(values, positions, 0.0, equal)
    largest = float(np.abs(values[known]).max())
    if largest > _TOO_LARGE:
        raise InvalidValueError(
            f"{array.name!r} holds values of {largest:.3g}, too large to be squared in float64; is "
            "a fill value left undecoded?"
        )
    values -= values[known].mean()
    if deseason:
        for axis, dim in enumerate(order):
            values = _without_season(values, axis, array, dim, positions[dim])
    if detrend:
        values = _without_trend(values, [positions[dim] for dim in order])
    rounding = _EPS_OF_ROUNDING * float(np.finfo(np.float64).eps) * largest
    if array.dtype.kind == "f":
        top = array.dtype.type(largest)
        step = float(top - np.nextafter(top, array.dtype.type(0)))
        rounding = max(rounding, _STEPS_OF_ROUNDING * step)
    return _Residuals(values, positions, rounding, equal)


def _nothing_left(array: xr.DataArray, equal: bool, taken_off: bool) -> str:
    """Why values that differ by nothing but rounding have no range."""
    if equal:
        return "no sill: all values along it are equal"
    name = array.dtype.name if array.dtype.kind == "f" else "float64"
    what = "what trend and season leave of the values varies" if taken_off else "the values vary"
    return f"no sill: {what} by no more than a few steps of {name}, which may be mere rounding"


def _positions(array: xr.DataArray, dim: str) -> Floats:
    """Where each cell lies, in units of the median distance of neighbours."""
    n = array.sizes[dim]
    coord = array.coords.get(dim)
    plain = np.arange(float(n))
    if coord is None or n < 2:
        return plain
    if is_time(coord):
        if coord.isnull().any():
            return plain
        places = microseconds(coord).astype(float)
    elif coord.dtype.kind in "fiu":
        places = coord.astype("float64").values
    else:
        return plain
    step = float(np.median(np.abs(np.diff(places)))) if np.isfinite(places).all() else 0.0
    if step == 0:
        return plain
    places = np.abs(places - places[0]) / step
    if not (np.diff(places) >= 0).all():
        logger.warning("%s is in no order; its cells are taken as equally far apart", dim)
        return plain
    evenly = places * ((n - 1) / places[-1])
    return plain if np.abs(evenly - plain).max() <= _ABOUT_EQUAL else places


def _dates(array: xr.DataArray, dim: str) -> tuple[Floats, float] | None:
    """Days since the first date along a dim, and the days of its calendar's year."""
    coord = array.coords.get(dim)
    if coord is None or coord.size < 2 or not is_time(coord) or coord.isnull().any():
        return None
    days = microseconds(coord) / _MICROSECONDS_PER_DAY
    calendar = "standard" if coord.dtype.kind == "M" else coord.values[0].calendar
    return days, _YEAR_DAYS.get(calendar, 365.2425)


def _without_season(
    values: Floats, axis: int, array: xr.DataArray, dim: str, places: Floats
) -> Floats:
    """Take the yearly cycle, and the daily one, of every line along time off."""
    # Mean and trend of a line are fitted along with it, else cycles would be bent to a trend's
    # shape, but are left in.
    dates = _dates(array, dim)
    if dates is None:
        return values
    days, year = dates
    if np.ptp(days) + np.median(np.abs(np.diff(days))) < 2 * year:
        return values
    cycles = [year] if np.median(np.abs(np.diff(days))) > 0.26 else [year, 1.0]
    columns = [np.ones_like(days), (places - places.mean()) / places.std()]
    for length in cycles:
        for harmonic in range(1, _HARMONICS + 1):
            angle = 2 * np.pi * harmonic * days / length
            columns += [np.cos(angle), np.sin(angle)]
    design = np.stack(columns, axis=1)
    lines = np.moveaxis(values, axis, 0).reshape(days.size, -1)
    for start in range(0, lines.shape[1], 4096):
        part = lines[:, start : start + 4096]
        known = np.isfinite(part)
        normal = np.einsum("tk,tl,tc->ckl", design, design, known, optimize=True)
        right = np.einsum("tk,tc->ck", design, np.where(known, part, 0.0), optimize=True)
        fit = np.einsum("ckl,cl->ck", np.linalg.pinv(normal, rcond=1e-9, hermitian=True), right)
        fit[known.sum(axis=0) < 3 * (design.shape[1] - 1)] = 0.0  # too few values to tell a season
        part -= design[:, 2:] @ fit[:, 2:].T
    return np.moveaxis(lines.reshape(np.moveaxis(values, axis, 0).shape), 0, axis)


def _without_trend(values: Floats, positions: list[Floats]) -> Floats:
    """Take one plane through all cells off."""
    known = np.isfinite(values)
    columns = []
    for axis, places in enumerate(positions):
        if places.size > 1:
            shape = [-1 if a == axis else 1 for a in range(values.ndim)]
            columns.append(((places - places.mean()) / places.std()).reshape(shape))
    bare = np.where(known, values, 0.0)
    rows = [known.astype(float), *(known * column for column in columns)]
    normal = np.array([[np.sum(a * b) for b in rows] for a in rows])
    slopes = np.linalg.pinv(normal, rcond=1e-12) @ np.array([np.sum(row * bare) for row in rows])
    for slope, column in zip(slopes[1:], columns, strict=True):
        values = values - slope * column
    return values
