"""`NamedSums`: the sums of a scorecard with names and coordinates, which merge and become JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.axes import date_keys
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.metric_registry import CLASS_SUMS, PROBABILITY
from ml4cube.core.sums.mergeable import Mergeable, decoded, encoded
from ml4cube.cube.classes import as_text, class_names
from ml4cube.cube.coordinates import LEAD
from ml4cube.evaluation.cells.baselines import PREDICTION
from ml4cube.evaluation.cells.cell_reader import CLASS
from ml4cube.evaluation.cells.labels import Labels
from ml4cube.evaluation.sums.score_sums import ScoreSums
from ml4cube.evaluation.sums.scored_variable import ScoredVariable

#: Ending of the variable with the label of each sample and lead, as an index.
CODE = "_code"


@dataclass(frozen=True, eq=False)
class NamedSums(Mergeable):
    """All sums of a scorecard, by variable.

    `rows` has those by model, date, lead time and label of cells, the index of the label of each
    date and lead time, the time elapsed until it, and the dim and number of several outputs of
    models. `others` has those of each cell, of spectra and of reliability, over all dates.
    """

    rows: Mapping[str, xr.Dataset]
    others: Mapping[str, xr.Dataset]
    attrs: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        sums: Mapping[str, tuple[ScoredVariable, ScoreSums]],
        truth: xr.Dataset,
        labels: Labels,
        attrs: Mapping[str, Any],
    ) -> NamedSums:
        """Name the sums of all variables."""
        rows, others = {}, {}
        for name, (variable, of_variable) in sums.items():
            rows[name] = _named_rows(variable, of_variable, labels, truth[name].attrs)
            others[name] = _named_others(variable, of_variable, truth[name])
        return cls(rows, others, attrs)

    @property
    def first(self) -> xr.Dataset:
        """Rows of the first variable: all have the same models, dates and labels."""
        return next(iter(self.rows.values()))

    @property
    def models(self) -> list[str]:
        """Names of the models, the prediction first."""
        return [str(name) for name in self.first["model"].values]

    def merge(self, other: NamedSums) -> NamedSums:
        """Return the sums of both, which are of other dates, in the order of dates."""
        if self.rows.keys() != other.rows.keys():
            raise InvalidValueError(
                f"scorecards to merge must have the same variables, got {list(self.rows)} and "
                f"{list(other.rows)}"
            )
        dim = str(self.first["weight"].dims[1])
        for name, ours in self.rows.items():
            _check_same(
                *(part.drop_vars(dim, errors="ignore") for part in (ours, other.rows[name]))
            )
            _check_same(self.others[name], other.others[name])
        keys = np.concatenate([date_keys(part.first[dim].values)[0] for part in (self, other)])
        if len(np.unique(keys)) < len(keys):
            raise InvalidValueError(
                f"scorecards to merge must be of different {dim!r}, got the same one twice"
            )
        order = np.argsort(keys, kind="stable")
        rows, others = {}, {}
        for name, ours in self.rows.items():
            parts = [ours, other.rows[name]]
            both = xr.concat(parts, dim, data_vars="minimal", coords="minimal", compat="override")
            rows[name] = both.isel({dim: order})
            of_cells, theirs = self.others[name], other.others[name]
            others[name] = of_cells.assign({n: of_cells[n] + theirs[n] for n in of_cells.data_vars})
        return NamedSums(rows, others, self.attrs)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; arrays are compressed and base64-encoded."""
        rows = {name: _to_dict(sums) for name, sums in self.rows.items()}
        others = {name: _to_dict(sums) for name, sums in self.others.items()}
        return {"rows": rows, "others": others, "attrs": dict(self.attrs)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> NamedSums:
        """Read the dict that `to_dict` returned."""
        rows = {name: _from_dict(sums) for name, sums in raw["rows"].items()}
        others = {name: _from_dict(sums) for name, sums in raw["others"].items()}
        return cls(rows, others, raw["attrs"])


def _named_rows(
    variable: ScoredVariable, sums: ScoreSums, labels: Labels, attrs: Mapping[str, Any]
) -> xr.Dataset:
    """Name the sums by date and label of one variable, in the order of dates."""
    timing = variable.timing
    sizes = [len(label.labels) for label in labels.of_cells]
    dims = ("model", timing.sample_dim, LEAD, *(label.name for label in labels.of_cells))
    rows: dict[str, Any] = {}
    for name, values in sums.rows.items():
        named, shape = dims, (len(values), *timing.valid_steps.shape, *sizes)
        if name in CLASS_SUMS:
            named, shape = (*dims, CLASS), (*shape, variable.n_classes)
        rows[name] = named, values.reshape(shape)
    coords: dict[str, Any] = {label.name: label.labels for label in labels.of_cells}
    by_row = timing.sample_dim, LEAD
    for name, (of_dates, codes) in labels.of_dates.items():
        coords[name] = of_dates
        rows[name + CODE] = by_row, codes
    outputs, n_outputs = _described_outputs(variable)
    rows |= {"outputs": ("model", outputs), "n_outputs": ("model", n_outputs)}
    rows["elapsed"] = by_row, timing.valid_keys - timing.sample_keys[:, None]
    rows["has_truth"] = by_row, timing.valid_steps >= 0
    coords["model"] = variable.models
    coords[timing.sample_dim] = timing.samples
    if timing.is_forecast:
        coords[LEAD] = timing.leads
    in_order = np.argsort(timing.sample_keys, kind="stable")
    described = {
        "units": str(attrs.get("units", "")),
        "has_probabilities": PROBABILITY in variable.predictions,
    }
    return xr.Dataset(rows, coords, described).isel({timing.sample_dim: in_order})


def _described_outputs(variable: ScoredVariable) -> tuple[list[str], list[int]]:
    """Return the dim and the number of the values for a cell, by model; "" if one."""
    dims, numbers = [], []
    for model in variable.models:
        outputs = variable.several.get(model)
        if outputs is None or variable.n_classes:
            dims.append("")
            numbers.append(1)
        else:
            dims.append(outputs.dim)
            numbers.append(len(outputs.levels))
    return dims, numbers


def _named_others(variable: ScoredVariable, sums: ScoreSums, truth: xr.DataArray) -> xr.Dataset:
    """Name the sums over all dates, with the coordinates of the truth."""
    timing, cells = variable.timing, tuple(variable.sizes)
    dims: dict[str, tuple[str, ...]] = {
        "squared_error": ("model", *cells),
        "count": cells,
        "confusion": ("model", CLASS, "predicted_class"),
        "power": ("source", LEAD, "wavenumber"),
        "power_weight": (LEAD,),
        "reliability": tuple(variable.reliability_coords),
    }
    named = {name: (dims[name], values) for name, values in {**sums.cells, **sums.total}.items()}
    coords: dict[str, Any] = {"model": variable.models, **variable.reliability_coords}
    attrs = {"units": str(truth.attrs.get("units", ""))}
    of_cells = truth.isel({timing.time_dim: 0}, drop=True)
    for name, coord in of_cells.coords.items():
        if coord.ndim and coord.dtype.kind in "fiuUM":
            coords[str(name)] = coord.reset_coords(drop=True).variable
    if timing.is_forecast:
        coords[LEAD] = timing.leads.variable
    classes = variable.truth.classes
    if classes is not None:
        names = class_names(truth)
        shown = [names.get(label, as_text(label)) for label in classes.tolist()]
        coords |= {CLASS: classes, "predicted_class": classes, "class_name": (CLASS, shown)}
    if variable.row_dim is not None:
        coords["source"] = [PREDICTION, "truth"]
        attrs["rows_along"] = variable.row_dim
    return xr.Dataset(named, coords, attrs)


def _check_same(ours: xr.Dataset, theirs: xr.Dataset) -> None:
    """Refuse sums of other variables, models, cells, lead times or labels."""
    names = {*ours.variables, *theirs.variables}
    differing = [name for name in names if name not in ours or name not in theirs]
    differing += [n for n in ours.coords if n in theirs and not ours[n].equals(theirs[n])]
    if differing:
        raise InvalidValueError(
            f"scorecards to merge must have the same {sorted(map(str, differing))}, got others; "
            "score the parts of one prediction with the same arguments"
        )


def _to_dict(ds: xr.Dataset) -> dict[str, Any]:
    """Return a Dataset as JSON values."""
    entries: dict[str, Any] = {"data": {}, "coords": {}, "attrs": dict(ds.attrs)}
    for name, variable in ds.variables.items():
        kind = "coords" if name in ds.coords else "data"
        attrs = {str(key): str(value) for key, value in variable.attrs.items()}
        entries[kind][str(name)] = [list(variable.dims), encoded(variable.values), attrs]
    return entries


def _from_dict(raw: Mapping[str, Any]) -> xr.Dataset:
    data, coords = (
        {name: (dims, decoded(values), attrs) for name, (dims, values, attrs) in raw[part].items()}
        for part in ("data", "coords")
    )
    return xr.Dataset(data, coords, raw["attrs"])
