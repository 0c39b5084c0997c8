"""`score_cube`: scores of a predicted cube, block by block, area-weighted."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ml4cube.core.axes import check_aligned
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, check_choice, names_of
from ml4cube.core.metric_registry import PAIR_METRICS, defaults_of, sums_of
from ml4cube.core.statistics import check_decoded
from ml4cube.core.sums.pairs import PairSums, combined
from ml4cube.cube import areas, masks_and_labels
from ml4cube.cube.absent_chunks import heed_in_array
from ml4cube.cube.areas import Weights, find_latitudes
from ml4cube.cube.classes import is_flagged
from ml4cube.cube.reader import CubeReader
from ml4cube.cube.scan import Cells, blocks_of, scan
from ml4cube.cube.variables import check_left_out, data_variables

Cube = xr.Dataset | xr.DataArray

# Names of what is read beside the prediction; those of variables in files have no spaces.
_TRUTH, _WEIGHTS = "truth of {}", "weights of cells"


def area_weights(cube: xr.Dataset | xr.DataArray) -> xr.DataArray | None:
    """Return the areas of the cells of a cube, up to a common factor.

    Statistics, scores, losses and insights weight by these areas. The first rule that applies:

    1. ``cell_measures`` of a variable (``area: areacella``), if the cube has what it names;
    2. polygons between the bounds of latitude and longitude with three or more vertices, as of
       curvilinear grids and meshes;
    3. one latitude for each row, also of a rotated grid: sin(north edge) - sin(south edge) of its
       band, between its CF bounds, else halfway to the next rows and not beyond a pole; times the
       widths in longitude, if these differ;
    4. latitude and longitude of each cell: spherical quadrilaterals, whose corners are the means of
       the four centres around them, extrapolated at edges and next to
       missing centres, as those that neighbours share;
    5. x and y in metres or km alone: dx dy in the plane of the projection, with a warning unless
       its ``grid_mapping`` keeps areas.

    Parameters
    ----------
    cube : Dataset or DataArray
        Any cube. Of a Dataset the first data variable with a latitude counts. Latitudes and
        longitudes are known by ``standard_name``, units (``degrees_north``), or names such as
        ``lat``, ``nav_lat`` and ``rlat``; of several, those of a dim are taken.

    Returns
    -------
    DataArray or None
        Weights, 0 or more, along dims of the cube, 0 where a position is missing; its ``long_name``
        is the rule. None if all cells are equally large, or areas are unknown: there is no
        coordinate, only one row of latitude, or points (stations) along one dim; a warning says so
        where coordinates show a map.

    Raises
    ------
    InvalidValueError
        If latitudes lie outside [-90, 90] degrees, those of rows are not finite, or bounds do not
        fit.

    Examples
    --------
    >>> import xarray as xr
    >>> area_weights(xr.DataArray([0, 0], {"lat": [0.0, 60.0]}, "lat")).values.round(3).tolist()
    [1.0, 0.5]
    """
    variables = cube.variables if isinstance(cube, xr.Dataset) else {}
    arrays = list(_variables(cube).values()) or [xr.DataArray(0, cube.coords)]
    arrays.sort(key=lambda array: not find_latitudes(array.coords))
    weights = areas.cell_weights("area", arrays[0], variables).warn()
    if weights.array is None:
        return None
    attrs = {"long_name": weights.rule, "units": "1"}
    return weights.array.rename("area_weight").assign_attrs(attrs)


def score_cube(
    prediction: xr.Dataset | xr.DataArray,
    truth: xr.Dataset | xr.DataArray,
    *,
    metrics: str | Sequence[str] = defaults_of("score_cube"),
    by: str | xr.DataArray | Sequence[str | xr.DataArray] | None = None,
    weights: Weights = "area",
    missing_chunks: str = "warn",
) -> xr.Dataset:
    """Score a predicted cube against the true one, block by block, with bounded memory.

    Parameters
    ----------
    prediction, truth : Dataset or DataArray
        Cubes on the same grid, with any order of dims. The data variables that both have are
        scored; a DataArray is one variable.
    metrics : str or sequence of str, optional
        Metrics of single values, such as ``rmse``, ``mae``, ``bias``, ``r2``, ``correlation``; the
        error for an unknown name lists all, and so does the page on evaluation.
    by : str, DataArray or sequence of these, optional
        Separate scores for each step of a dim (``"time"``), or for each label of an array along
        dims of the cube (a map of regions; ``ds.time.dt.month``) or of a coordinate, given by
        name. Cells whose label is NaN are left out. Several are combined. A variable without a
        dim of the labels counts at each of its steps.
    weights : str, DataArray or None, default "area"
        Weight of each cell. ``"area"`` uses `area_weights` of the truth, and equal weights if areas
        are unknown; the name of a variable or coordinate of the truth (``"areacello"``), its
        values.
    missing_chunks : {"warn", "raise", "drop"}, default "warn"
        What to do about chunks that the zarr store of a cube lacks and that read as values: warn,
        refuse them, or take their cells for gaps.

    Returns
    -------
    Dataset
        One data variable per metric, dims ``("variable", *by)``. Gaps of the truth are left out;
        ``unpredicted`` counts cells that have a truth but no prediction. The attribute
        ``weights`` describes the weights, or says why they are equal.

    Raises
    ------
    InvalidTypeError
        If a cube, the weights or a label is not an xarray object, or values are not real numbers.
    InvalidValueError
        If a metric is unknown, the cubes share no variable or have different grids, a variable
        holds packed integers that were not decoded, a label in `by` does not lie along dims of
        the cube, two have the same name, or latitudes are invalid.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> truth = xr.DataArray(np.zeros((2, 2)), {"lat": [0.0, 60.0]}, ("time", "lat"), name="sst")
    >>> scores = score_cube(truth + [[1.0, 0.0], [0.0, 1.0]], truth, by="time")
    >>> scores.mae.sel(variable="sst").values.round(3).tolist()
    [0.667, 0.333]
    """
    metrics = names_of("metrics", metrics)
    for metric in metrics:
        check_choice("metrics", metric, list(PAIR_METRICS))
    _check_type("prediction", prediction)
    _check_type("truth", truth)
    pairs = _pairs(prediction, truth)
    largest = max((predicted for predicted, _ in pairs.values()), key=lambda array: array.ndim)
    groupings = [Grouping.of(label, largest) for label in as_list(by)]
    _check_names([grouping.name for grouping in groupings], metrics)
    # not of the prediction, which arithmetic may have changed with its values
    variables = _variables_of(truth)
    sums, descriptions = [], {}
    for name, pair in pairs.items():
        predicted, true = (heed_in_array(array, missing_chunks) for array in pair)
        of_cells, descriptions[name], _ = areas.cell_weights(weights, true, variables).warn()
        sums.append(_sum_variable(predicted, true, groupings, of_cells, sums_of(metrics)))
    coords = {grouping.name: grouping.labels for grouping in groupings}
    shape = [len(labels) for labels in coords.values()]
    scores = {
        metric: (
            ("variable", *coords),
            np.stack([variable.score(metric).reshape(shape) for variable in sums]),
        )
        for metric in metrics
    }
    attrs = {"weights": _description_of_all(descriptions)}
    return xr.Dataset(scores, {"variable": [str(name) for name in pairs], **coords}, attrs)


def _variables_of(cube: Cube) -> dict[Hashable, xr.Variable]:
    if isinstance(cube, xr.Dataset):
        return dict(cube.variables)
    return {}


def _check_type(argument: str, cube: object) -> None:
    if not isinstance(cube, xr.Dataset | xr.DataArray):
        raise InvalidTypeError(
            f"{argument} must be a Dataset or DataArray, got {type(cube).__name__}"
        )


def _check_names(labels: Sequence[str], metrics: Sequence[str]) -> None:
    """Refuse labels that cannot be dims of the scores."""
    if len({"variable", *metrics, *labels}) < 1 + len(set(metrics)) + len(labels):
        raise InvalidValueError(
            "by must hold labels of different names, other than 'variable' and those of metrics, "
            f"got {labels}; rename them, e.g. da.rename('region')"
        )


def _description_of_all(descriptions: Mapping[Hashable, str]) -> str:
    """Return the description of the weights, by variable if they differ."""
    if len(set(descriptions.values())) == 1:
        return next(iter(descriptions.values()))
    return "; ".join([f"{name}: {text}" for name, text in descriptions.items()])


def _pairs(prediction: Cube, truth: Cube) -> dict[Hashable, tuple[xr.DataArray, xr.DataArray]]:
    """Return the variables of both cubes, the truth's dims in the prediction's order."""
    if isinstance(prediction, xr.DataArray) and isinstance(truth, xr.DataArray):
        # two arrays are compared whatever their names
        name = truth.name if prediction.name is None else prediction.name
        prediction, truth = prediction.rename(name), truth.rename(name)
    if isinstance(prediction, xr.Dataset):
        check_left_out(prediction)
    predicted, true = _variables(prediction), _variables(truth)
    pairs: dict[Hashable, tuple[xr.DataArray, xr.DataArray]] = {}
    for name, p in predicted.items():
        if name not in true:
            continue
        t = true[name]
        if set(p.dims) != set(t.dims):
            raise InvalidValueError(
                f"prediction and truth of {name!r} must have the same dims, got {p.dims} and "
                f"{t.dims}"
            )
        check_aligned(f"prediction of {name!r}", p, t)
        for array in (p, t):
            check_decoded(str(name), array)
        if is_flagged(t.attrs) or is_flagged(p.attrs):
            raise InvalidValueError(
                f"{name!r} holds classes by its flags, which have no such errors; score it with "
                "evaluate, a map after expand_dims('time'), or select the other variables"
            )
        pairs[name] = p, t.transpose(*p.dims)
    if not pairs:
        raise InvalidValueError(
            f"prediction has variables {list(predicted)}, truth has {list(true)}, none in common"
        )
    return pairs


def as_list(by: Any) -> list[Any]:
    """Return one label, several or none as a list."""
    labels = list(by) if isinstance(by, list | tuple) else [by]
    return [label for label in labels if label is not None]


def _variables(cube: Cube) -> dict[Hashable, xr.DataArray]:
    if isinstance(cube, xr.DataArray):
        return {masks_and_labels.DATA_VAR if cube.name is None else cube.name: cube}
    return {name: cube[name] for name in data_variables(cube)}


@dataclass(frozen=True, eq=False)
class Grouping:
    """Labels of groups, and the code of each cell along dims of the cube; -1 is no group."""

    name: str
    labels: xr.DataArray
    codes: xr.DataArray

    @classmethod
    def of(cls, by: str | xr.DataArray, cube: Cube) -> Grouping:
        if isinstance(by, str) and by not in cube.dims:
            check_choice("by", by, sorted({str(name) for name in (*cube.dims, *cube.coords)}))
            by = cube.coords[by]
        if isinstance(by, str):
            steps = xr.DataArray(np.arange(cube.sizes[by]), dims=by)
            return cls(by, cube[by].reset_coords(drop=True), steps)
        if not isinstance(by, xr.DataArray):
            raise InvalidTypeError(f"by must hold names or DataArrays, got {type(by).__name__}")
        name = str(by.name) if by.name is not None else "group"
        check_aligned(f"by={name!r}", by, cube)
        values = by.values
        has_label = np.asarray(pd.notnull(values))  # xarray misses None in chunks
        labels, inverse = np.unique(values[has_label], return_inverse=True)
        if labels.dtype == object:  # numbers or texts beside None
            labels = np.array(labels.tolist())
        codes = np.full(values.shape, -1, dtype=np.intp)
        codes[has_label] = inverse.ravel()
        name = f"{name}_label" if name in cube.dims else name
        return cls(name, xr.DataArray(labels, dims=name), xr.DataArray(codes, dims=by.dims))


def _sum_variable(
    prediction: xr.DataArray,
    truth: xr.DataArray,
    groupings: list[Grouping],
    weights: xr.DataArray | None,
    names: Sequence[str],
) -> PairSums:
    """Sum over a variable, one block at a time, in a fixed order."""
    arrays = [grouping.codes for grouping in groupings]
    if weights is not None:
        arrays.append(weights)
    lacking = {d: n for a in arrays for d, n in a.sizes.items() if d not in prediction.dims}
    sizes = {**lacking, **prediction.sizes}
    if weights is not None:
        no_cells = np.broadcast_to(np.False_, tuple(sizes.values()))
        check_aligned("weights", weights, xr.DataArray(no_cells, prediction.coords, [*sizes]))
        areas.check_not_zero(weights)
    name = str(truth.name)
    cells = {name: prediction.variable, _TRUTH.format(name): truth.variable}
    if weights is not None:
        cells[_WEIGHTS] = weights.variable
    labels = {f"labels {grouping.name}": grouping for grouping in groupings}
    cells |= {key: grouping.codes.variable for key, grouping in labels.items()}
    reader = CubeReader.of_variables(cells, sizes)
    n_labels = {key: len(grouping.labels) for key, grouping in labels.items()}
    sum_block = partial(_sum_block, name, n_labels, names)
    sums = PairSums.empty(math.prod(n_labels.values()), names)
    for of_block in scan(reader, sum_block, blocks_of(reader)):
        sums = sums.merge(of_block)
    return sums


def _sum_block(
    name: str, n_labels: Mapping[str, int], names: Sequence[str], _: object, cells: Cells
) -> PairSums:
    """Sum up one block."""
    group = combined((cells[key], n) for key, n in n_labels.items())
    return PairSums.of(
        cells[name],
        cells[_TRUTH.format(name)],
        cells.get(_WEIGHTS),
        group,
        math.prod(n_labels.values()),
        names,
    )
