"""`NamedSums`: the sums of a scorecard with names and coordinates, which merge and become JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.axes import date_keys
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.metric_registry import CLASS_SUMS, PROBABILITY
from ml4cube.core.sums.mergeable import decoded, encoded
from ml4cube.cube.coordinates import LEAD
from ml4cube.evaluation.sums.score_sums import ScoreSums

#: Ending of the variable with the label of each sample and lead, as an index.
CODE = "_code"
#: Dim of the classes in sums of these; variables with fewer have zeros.
CLASS_NUMBER = "class_number"


@dataclass(frozen=True, eq=False)
class NamedSums:
    """All sums of a scorecard.

    `rows` has those by variable, model, date, lead time and label of cells, the index of the label
    of each date and lead time, the time elapsed until it, the number of classes, and the dim and
    number of several outputs of models. `others` has
    by variable those of each cell, of spectra and of reliability, over all dates.
    """

    rows: xr.Dataset
    others: Mapping[str, xr.Dataset]

    @classmethod
    def of(cls, sums: Sequence[ScoreSums], attrs: Mapping[str, Any]) -> NamedSums:
        """Name the sums of all variables."""
        variables = [of_variable.variable for of_variable in sums]
        options = variables[0].options
        timing, labels = options.timing, options.labels
        sizes = {label.name: len(label.labels) for label in labels.of_cells}
        dims = ("variable", "model", timing.sample_dim, LEAD, *sizes)
        rows: dict[str, Any] = _stacked(sums, dims, tuple(sizes.values()))
        coords: dict[str, Any] = {label.name: label.labels for label in labels.of_cells}
        for name, (of_dates, codes) in labels.of_dates.items():
            coords[name] = of_dates
            rows[name + CODE] = (timing.sample_dim, LEAD), codes
        has_probabilities = [PROBABILITY in variable.predictions for variable in variables]
        rows["classes"] = "variable", [variable.n_classes for variable in variables]
        rows["probabilities"] = "variable", has_probabilities
        rows |= _described_outputs(sums)
        elapsed = timing.valid_keys - timing.sample_keys[:, None]
        rows["elapsed"] = (timing.sample_dim, LEAD), elapsed
        rows["has_truth"] = (timing.sample_dim, LEAD), timing.valid_steps >= 0
        units = [of_variable.others.attrs["units"] for of_variable in sums]
        coords["variable"] = [variable.name for variable in variables]
        coords["model"] = sums[0].others["model"].variable
        coords["units"] = "variable", units
        coords[timing.sample_dim] = timing.samples
        if timing.is_forecast:
            coords[LEAD] = timing.leads
        others = {of_variable.variable.name: of_variable.others for of_variable in sums}
        in_order = {timing.sample_dim: np.argsort(timing.sample_keys, kind="stable")}
        return cls(xr.Dataset(rows, coords, dict(attrs)).isel(in_order), others)

    @property
    def models(self) -> list[str]:
        """Names of the models, the prediction first."""
        return [str(name) for name in self.rows["model"].values]

    def merge(self, other: NamedSums) -> NamedSums:
        """Return the sums of both, which are of other dates, in the order of dates."""
        rows = [self.rows, other.rows]
        dim = str(self.rows["weight"].dims[2])
        _check_same(*(part.drop_vars(dim, errors="ignore") for part in rows))
        for name, ours in self.others.items():
            _check_same(ours, other.others[name])
        keys = np.concatenate([date_keys(part[dim].values)[0] for part in rows])
        if len(np.unique(keys)) < len(keys):
            raise InvalidValueError(
                f"scorecards to merge must be of different {dim!r}, got the same one twice"
            )
        merged = xr.concat(rows, dim, data_vars="minimal", coords="minimal", compat="override")
        others = {
            name: ours.assign({n: ours[n] + other.others[name][n] for n in ours.data_vars})
            for name, ours in self.others.items()
        }
        order = np.argsort(keys, kind="stable")
        return NamedSums(merged.isel({dim: order}), others)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; arrays are compressed and base64-encoded."""
        others = {name: _to_dict(sums) for name, sums in self.others.items()}
        return {"rows": _to_dict(self.rows), "others": others}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> NamedSums:
        """Read the dict that `to_dict` returned."""
        others = {name: _from_dict(sums) for name, sums in raw["others"].items()}
        return cls(_from_dict(raw["rows"]), others)


def _stacked(
    sums: Sequence[ScoreSums], dims: tuple[str, ...], labels: tuple[int, ...]
) -> dict[str, xr.Variable]:
    """Return the sums of all variables by name; those that a variable lacks are 0."""
    first = max(sums, key=lambda of_variable: of_variable.n_classes)
    stacked = {}
    for name, largest in first.rows.items():
        shape = (*largest.shape[:3], *labels, *largest.shape[4:])
        values = np.zeros((len(sums), *shape))
        for i, of_variable in enumerate(sums):
            if name in of_variable.rows:
                array = of_variable.rows[name]
                part = values[i, ..., : array.shape[-1]]
                if name not in CLASS_SUMS:
                    part = values[i]
                part[...] = array.reshape(part.shape)
        stacked[name] = xr.Variable((*dims, CLASS_NUMBER)[: values.ndim], values)
    return stacked


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


def _described_outputs(sums: Sequence[ScoreSums]) -> dict[str, Any]:
    """Return the dim and the number of the values for a cell, by variable and model; "" if one."""
    models = sums[0].others["model"].values.tolist()
    dims = np.full((len(sums), len(models)), "", "U8")
    numbers = np.ones(dims.shape, np.int64)
    for i, of_variable in enumerate(sums):
        if of_variable.n_classes:
            continue
        for model, outputs in of_variable.variable.several.items():
            at = i, models.index(model)
            dims[at], numbers[at] = outputs.dim, len(outputs.levels)
    both = ("variable", "model")
    return {"outputs": (both, dims), "n_outputs": (both, numbers)}


def _to_dict(ds: xr.Dataset) -> dict[str, Any]:
    """Return a Dataset as JSON values."""

    def entries(variables: Any) -> dict[str, Any]:
        return {
            str(name): [list(v.dims), encoded(v.values), {str(k): str(v.attrs[k]) for k in v.attrs}]
            for name, v in variables.items()
        }

    return {"data": entries(ds.data_vars), "coords": entries(ds.coords), "attrs": dict(ds.attrs)}


def _from_dict(raw: Mapping[str, Any]) -> xr.Dataset:
    data, coords = (
        {name: (dims, decoded(values), attrs) for name, (dims, values, attrs) in raw[part].items()}
        for part in ("data", "coords")
    )
    return xr.Dataset(data, coords, raw["attrs"])
