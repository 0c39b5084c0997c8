"""`NamedSums`: the sums of a scorecard with names and coordinates, which merge and become JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import xarray as xr

from ml4cube.core.axes import date_keys
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.metric_registry import CLASS_SUMS
from ml4cube.core.sums.fields import decoded, encoded
from ml4cube.cube.classes import as_text, class_names
from ml4cube.cube.coordinates import LEAD
from ml4cube.evaluation.cells.cell_reader import CLASS
from ml4cube.evaluation.cells.labels import Labels
from ml4cube.evaluation.sums.block_sums import ScoreSums
from ml4cube.evaluation.sums.scoring import ScoredVariable

#: Ending of the variable with the label of each sample and lead, as an index.
CODE = "_code"
#: Dim of the classes in sums of these; variables with fewer have zeros.
CLASS_NUMBER = "class_number"
#: Name of the prediction among the models.
PREDICTION = "prediction"


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
    def of(
        cls,
        variables: Sequence[ScoredVariable],
        sums: Sequence[ScoreSums],
        models: Sequence[str],
        labels: Labels,
        attrs: Mapping[str, str],
    ) -> NamedSums:
        """Name the sums of all variables."""
        timing = variables[0].timing
        sizes = {one.name: len(one.labels) for one in labels.of_cells}
        dims = ("variable", "model", timing.sample_dim, LEAD, *sizes)
        rows: dict[str, Any] = _stacked(sums, dims, tuple(sizes.values()))
        coords: dict[str, Any] = {one.name: one.labels for one in labels.of_cells}
        for name, (of_dates, codes) in labels.of_dates.items():
            coords[name] = of_dates
            rows[name + CODE] = (timing.sample_dim, LEAD), codes
        rows["classes"] = "variable", [one.n_classes for one in variables]
        has_probabilities = [one.n_classes > 0 and not one.is_map for one in variables]
        rows["probabilities"] = "variable", has_probabilities
        rows["outputs"], rows["n_outputs"] = _described_outputs(sums, models)
        elapsed = timing.valid_keys - timing.sample_keys[:, None]
        rows["elapsed"] = (timing.sample_dim, LEAD), elapsed
        rows["has_truth"] = (timing.sample_dim, LEAD), timing.valid_steps >= 0
        coords |= {"variable": [one.name for one in variables], "model": list(models)}
        units = [str(one.truth.array.attrs.get("units", "")) for one in variables]
        coords |= {"units": ("variable", units), timing.sample_dim: timing.samples}
        if timing.is_forecast:
            coords[LEAD] = timing.leads
        others = {one.name: _others(one, s, models) for one, s in zip(variables, sums, strict=True)}
        in_order = {timing.sample_dim: np.argsort(timing.sample_keys, kind="stable")}
        return cls(xr.Dataset(rows, coords, dict(attrs)).isel(in_order), others)

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
    most_classes = max(one.n_classes for one in sums)
    names = dict.fromkeys(name for one in sums for name in one.rows)
    stacked = {}
    for name in names:
        of_classes = (CLASS_NUMBER,) if name in CLASS_SUMS else ()
        shape = (*sums[0].rows["weight"].shape[:3], *labels, *(most_classes for _ in of_classes))
        values = np.zeros((len(sums), *shape))
        for i, one in enumerate(sums):
            if name in one.rows:
                array = one.rows[name]
                part = values[i, ..., : array.shape[-1]] if of_classes else values[i]
                part[...] = array.reshape(part.shape)
        stacked[name] = xr.Variable((*dims, *of_classes), values)
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


def _described_outputs(
    sums: Sequence[ScoreSums], models: Sequence[str]
) -> tuple[xr.Variable, xr.Variable]:
    """Return the dim and the number of the values for a cell, by variable and model; "" if one."""
    dims, numbers = np.zeros((2, len(sums), len(models)), object)
    dims[:], numbers[:] = "", 1
    for i, one in enumerate(sums):
        for name, outputs in one.outputs.items():
            if not one.n_classes:
                dims[i, models.index(name)] = outputs.dim
                numbers[i, models.index(name)] = len(outputs.levels)
    along = ("variable", "model")
    return xr.Variable(along, dims.astype(str)), xr.Variable(along, numbers.astype(np.int64))


def _others(scored: ScoredVariable, sums: ScoreSums, models: Sequence[str]) -> xr.Dataset:
    """Name the sums that are not by date."""
    dims = tuple(scored.sizes)
    array = scored.truth.array
    first = array.isel({scored.timing.time_dim: 0}, drop=True)
    coords = {
        name: coord.reset_coords(drop=True).variable
        for name, coord in first.coords.items()
        if coord.ndim and coord.dtype.kind in "fiuUM"
    }
    if scored.truth.classes is not None:
        names = class_names(array)
        shown = [names.get(label, as_text(label)) for label in scored.truth.classes.tolist()]
        coords[CLASS] = xr.Variable((CLASS,), scored.truth.classes)
        coords["predicted_class"] = xr.Variable(("predicted_class",), scored.truth.classes)
        coords["class_name"] = xr.Variable((CLASS,), np.array(shown))
    found: dict[str, Any] = {
        "squared_error": (("model", *dims), sums.cell_errors),
        "count": (dims, sums.cell_count),
    }
    attrs = {"units": str(array.attrs.get("units", ""))}
    if scored.n_classes:
        found["confusion"] = ("model", CLASS, "predicted_class"), sums.confusion
    if scored.row_dim is not None:
        found["power"] = ("source", LEAD, "wavenumber"), sums.power
        found["power_weight"] = (LEAD,), sums.power_weight
        coords["source"] = xr.Variable(("source",), [PREDICTION, "truth"])
        attrs["rows_along"] = scored.row_dim
    if scored.timing.is_forecast:
        coords[LEAD] = scored.timing.leads.variable
    if sums.reliability is not None:
        found["reliability"] = sums.reliability
    return xr.Dataset(found, {**coords, "model": list(models)}, attrs)


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
