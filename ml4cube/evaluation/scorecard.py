"""`Scorecard`: the scores of a prediction and of baselines, and the sums that they follow from."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ml4cube.core.display import Summarized, Summary, Table
from ml4cube.core.errors import InvalidValueError
from ml4cube.core.metric_registry import SKILLS, squared
from ml4cube.cube.coordinates import LEAD
from ml4cube.evaluation.cells.cell_reader import CLASS
from ml4cube.evaluation.cells.probabilities import LEAST_LEVELS, QUANTILE, reliability_table
from ml4cube.evaluation.cells.timing import span
from ml4cube.evaluation.scores.intervals import Intervals
from ml4cube.evaluation.scores.tables import (
    ENDINGS,
    class_scores,
    samples_and_leads,
    score_rows,
)
from ml4cube.evaluation.scores.verdict import interval_text, lead_text, verdicts
from ml4cube.evaluation.sums.named_sums import NamedSums


@dataclass(frozen=True, eq=False, repr=False)
class Scorecard(Summarized):
    """The result of `evaluate`: scores with intervals, and the sums that they follow from.

    Printed, it says for each variable where the prediction is better than each baseline, and where
    not. Scorecards of parts of a prediction are merged with `merge`.

    Parameters
    ----------
    sums : NamedSums
        All sums of each variable, by model, date and label.
    by : tuple of str
        Labels of the scores.
    metrics : tuple of str
        Scores to show.
    intervals : Intervals
        How intervals are computed.

    Examples
    --------
    >>> import numpy as np, xarray as xr
    >>> from ml4cube.evaluation import evaluate
    >>> time = xr.date_range("2000-01-01", periods=40)
    >>> truth = xr.DataArray(np.arange(40.0), {"time": time}, ["time"], "t")
    >>> flat, late = xr.full_like(truth, 19.5), truth - 1
    >>> cards = [
    ...     evaluate(late[part], truth, baselines={"flat": flat}, metrics="rmse")
    ...     for part in (slice(0, 20), slice(20, 40))
    ... ]
    >>> card = cards[0].merge(cards[1])
    >>> card.table[["model", "metric", "value"]].iloc[:2].values.tolist()
    [['prediction', 'rmse', 1.0], ['flat', 'rmse', 11.543396380615196]]
    """

    sums: NamedSums
    by: tuple[str, ...]
    metrics: tuple[str, ...]
    intervals: Intervals

    @property
    def attrs(self) -> dict[str, Any]:
        """Return what the scores were computed with."""
        return dict(self.sums.attrs)

    @cached_property
    def scores(self) -> xr.Dataset:
        """Scores by variable, model and the labels asked for, with intervals."""
        scores = score_rows(self.sums.rows, self.by, self.metrics, self.intervals)
        scores = scores.assign_attrs(self.attrs)
        missing = int((~self.sums.first["has_truth"]).sum())
        dates = self._dates if set(self.by) <= {LEAD} else "the dates of a score"
        interval = interval_text(scores, dates, self.intervals)
        if "crps" in scores and self.few_levels:
            scores["crps"].attrs["long_name"] = "weighted quantile loss"
        if self.point_baselines:
            scores = scores.assign_attrs(point_baselines=self.point_baselines)
        return scores.assign_attrs(interval=interval, dates_without_truth=missing)

    @property
    def few_levels(self) -> dict[str, int]:
        """Number of quantiles of variables with too few for the CRPS."""
        few = {}
        for name, rows in self.sums.rows.items():
            numbers = rows["n_outputs"].values[rows["outputs"].values == QUANTILE]
            if numbers.size and numbers.min() < LEAST_LEVELS:
                few[name] = int(numbers.min())
        return few

    @property
    def point_baselines(self) -> str:
        """Baselines of one value beside members or quantiles of the prediction; "" if none."""
        names: dict[str, None] = {}
        for rows in self.sums.rows.values():
            outputs = rows["outputs"].values
            if outputs[0]:
                names |= dict.fromkeys(np.array(self.sums.models)[outputs == ""].tolist())
        if not names:
            return ""
        return f"{', '.join(names)}: a value, not a distribution; crps is its absolute error"

    @property
    def samples_and_leads(self) -> tuple[xr.DataArray, xr.DataArray | None]:
        """Dates of the scored samples, and their lead times if they have some."""
        return samples_and_leads(self.sums.rows)

    @property
    def why_no_interval(self) -> str:
        """Why no score over all labels has an interval; empty if one has."""
        text = interval_text(self._by_lead, self._dates, self.intervals)
        return text.removeprefix("none, ") if text.startswith("none") else ""

    @property
    def _dates(self) -> str:
        return f"{self.samples_and_leads[0].size} dates"

    @cached_property
    def _by_lead(self) -> xr.Dataset:
        by = (LEAD,) if self.has_leads else ()
        names = ["rmse", "mae"]
        if self._of_classes:
            names.append("accuracy")
        scores = score_rows(self.sums.rows, by, names, self.intervals)
        return scores.assign_attrs(self.attrs)

    @property
    def has_leads(self) -> bool:
        """True for forecasts with lead times."""
        return LEAD in self.sums.first.coords

    @property
    def verdict(self) -> list[str]:
        """For each variable and baseline: where the prediction is better, and where not.

        Only an interval of the skill decides. Where it includes 0, neither is clearly better; where
        there is none, the scores are given, and why they decide nothing.
        """
        groups = self.scores if self.by else self._by_lead
        return verdicts(self._by_lead, groups, self.intervals, self._dates)

    @property
    def table(self) -> pd.DataFrame:
        """The scores as a table: a row for each value, with its interval.

        Columns ``variable``, ``model``, ``metric``, ``baseline``, those of `by`, ``value``,
        ``low``, ``high`` and ``independent``: how many independent dates those of the score behave
        like. A skill is one of the prediction, against ``baseline``.
        """
        tables = []
        for name in self.scores.data_vars:
            metric = str(name)
            if metric.endswith(ENDINGS):
                continue
            ends = {"value": metric, **{end[1:]: metric + end for end in ENDINGS}}
            arrays = {end: self.scores[key] for end, key in ends.items() if key in self.scores}
            frame = xr.Dataset(arrays).to_dataframe().reset_index()
            frame = frame.assign(metric=metric)
            if metric in SKILLS:
                frame = frame.assign(model=self.sums.models[0])
            else:
                frame = frame.assign(baseline="")
            tables.append(frame)
        columns = ["variable", "model", "metric", "baseline", *self.by, "value"]
        columns += [ending[1:] for ending in ENDINGS]
        return pd.concat(tables, ignore_index=True).reindex(columns=columns)

    @property
    def map(self) -> xr.Dataset:
        """Scores of each cell, over all dates and lead times, each with the same weight.

        ``<variable>_rmse`` with dims ``("model", *cells)``, of classes ``<variable>_brier`` (twice
        the error rate of labels without probabilities), and ``<variable>_skill`` with dims
        ``("baseline", *cells)``; NaN where no cell is scored.
        """
        maps: dict[str, xr.DataArray] = {}
        for name, sums in self.sums.others.items():
            mse = sums["squared_error"] / sums["count"].where(sums["count"] > 0)
            units = sums.attrs.get("units", "")
            if "confusion" in sums:
                mse = mse.sum(CLASS, skipna=False).drop_vars("class_name", errors="ignore")
                maps[f"{name}_brier"] = mse.assign_attrs(units="1")
            else:
                maps[f"{name}_rmse"] = (mse**0.5).assign_attrs(units=units)
            own, others = mse.isel(model=0, drop=True), mse.isel(model=slice(1, None))
            if others.sizes["model"]:
                skill = (1 - own / others).where((own > 0) | (others > 0), 0).where(own.notnull())
                skill = skill.rename(model="baseline").transpose("baseline", ...)
                maps[f"{name}_skill"] = skill.assign_attrs(units="1")
        return xr.Dataset(maps)

    @property
    def spectrum(self) -> xr.Dataset:
        """Mean power of the rows of maps, of the prediction and the truth, by wavenumber.

        One variable for each that has rows, dims ``("source", "lead_time", "wavenumber")``, in its
        squared unit. The wavenumber counts cycles per row.
        """
        spectra = {}
        for name, sums in self.sums.others.items():
            if "power" not in sums:
                continue
            weight = sums["power_weight"]
            power = sums["power"] / weight.where(weight > 0)
            power = power.assign_coords(wavenumber=np.arange(power.sizes["wavenumber"]))
            units = squared(sums.attrs.get("units", ""))
            spectra[name] = power.assign_attrs(units=units, rows_along=sums.attrs["rows_along"])
        spectrum = xr.Dataset(spectra)
        if self.has_leads or LEAD not in spectrum.dims:
            return spectrum
        return spectrum.squeeze(LEAD)

    @property
    def reliability(self) -> dict[str, xr.Dataset]:
        """How often what was predicted with some probability happened, by variable.

        Members: ``rank_frequency`` of the truth among them; equal for all ranks if they are
        reliable. Quantiles: ``coverage``, how often the truth is below each. Probabilities of
        classes: mean ``probability``, ``observed_frequency`` and ``count`` by bin of probability.
        """
        return {
            name: reliability_table(sums["reliability"])
            for name, sums in self.sums.others.items()
            if "reliability" in sums
        }

    @cached_property
    def classes(self) -> dict[str, xr.Dataset]:
        """Scores of each class, by variable, with the labels asked for and intervals.

        ``precision``: how much of what is predicted as the class is of it; ``recall``: how much of
        the class is found; ``f1``, their harmonic mean; ``iou``, intersection over union;
        ``frequency`` of the class in the truth; with dims ``("model", "class", *by)``, and the
        coordinate ``class_name``. NaN where there is no such cell.
        """
        scored = {}
        for name, sums in self._of_classes.items():
            scores = class_scores(self.sums.rows[name], self.by, self.intervals)
            scored[name] = scores.assign_coords({key: sums[key] for key in (CLASS, "class_name")})
        return scored

    @property
    def confusion(self) -> dict[str, xr.DataArray]:
        """Share of the scored cells by true and predicted class, over all labels, by variable.

        With dims ``("model", "class", "predicted_class")``; the shares of a model add up to 1.
        """
        confusions = {}
        for name, sums in self._of_classes.items():
            pairs = sums["confusion"]
            shares = pairs / pairs.sum((CLASS, "predicted_class"))
            confusions[name] = shares.drop_vars("confusion", errors="ignore")
        return confusions

    @property
    def _of_classes(self) -> dict[str, xr.Dataset]:
        """Return the sums over all dates of the variables that hold classes."""
        return {name: sums for name, sums in self.sums.others.items() if "confusion" in sums}

    def merge(self, other: Scorecard) -> Scorecard:
        """Return the scorecard of the parts of a prediction that two scorecards are of.

        Parameters
        ----------
        other : Scorecard
            Of other dates, computed with the same arguments and the same climatology.

        Returns
        -------
        Scorecard
            As of one call with both parts, up to rounding; neither operand changes.

        Raises
        ------
        InvalidValueError
            If models, variables, lead times, labels, climatologies or options differ, or a date is
            in both.
        """
        for what, ours, theirs in (
            ("labels", self.by, other.by),
            ("metrics", self.metrics, other.metrics),
            ("options", self.intervals, other.intervals),
            ("descriptions", self.attrs, other.attrs),
        ):
            if ours != theirs:
                raise InvalidValueError(
                    f"scorecards of one prediction must have the same {what}, got {ours} and "
                    f"{theirs}"
                )
        sums = self.sums.merge(other.sums)
        return Scorecard(sums, self.by, self.metrics, self.intervals)

    def plot(self, baseline: str | None = None) -> Any:
        """Draw skill by lead time, the map of skill, and spectra, a row for each variable.

        Of classes, also recall and precision of each, and how often it is taken for another.

        Parameters
        ----------
        baseline : str, optional
            The one whose skill is mapped; default: the best of them.

        Returns
        -------
        matplotlib.figure.Figure
            Panels that do not apply are left out.
        """
        from ml4cube.plotting import scorecard_figure

        everything = Scorecard(self.sums, (), self.metrics, self.intervals)
        return scorecard_figure(
            self._by_lead,
            self.map,
            self.spectrum,
            baseline=baseline,
            classes=everything.classes,
            confusion=self.confusion,
        )

    def to_json(self) -> str:
        """Return the sums and options as JSON; every bit is kept.

        Returns
        -------
        str
            A JSON object.
        """
        options = {"by": self.by, "metrics": self.metrics, "intervals": asdict(self.intervals)}
        return json.dumps({**options, **self.sums.to_dict()})

    @classmethod
    def from_json(cls, text: str) -> Scorecard:
        """Read the text that `to_json` returned.

        Parameters
        ----------
        text : str
            A JSON object.

        Returns
        -------
        Scorecard
            Equal to the original.
        """
        raw = json.loads(text)
        by, metrics = tuple(raw["by"]), tuple(raw["metrics"])
        return cls(NamedSums.from_dict(raw), by, metrics, Intervals(**raw["intervals"]))

    def _summary(self) -> Summary:
        """Return errors by lead time, the verdict, and how the scores were computed."""
        samples, leads = self.samples_and_leads
        what = "dates" if leads is None else f"forecasts at {leads.size} lead times"
        how = [f"{name}: {text}" for name, text in self.scores.attrs.items()]
        return Summary(
            f"{samples.size} {what}, {span(samples)}",
            sections={
                **self._errors(),
                "Verdict": Table.listing(self.verdict),
                "Computed with": Table.listing(how),
            },
        )

    def _errors(self) -> dict[str, Table]:
        """Return the RMSE of quantities and the accuracy of classes, by lead time and model."""
        of_classes = np.array([name in self._of_classes for name in self.sums.rows])
        models = [str(name) for name in self._by_lead["model"].values]
        tables = {}
        for title, metric, chosen in (
            ("RMSE", "rmse", ~of_classes),
            ("Accuracy", "accuracy", of_classes),
        ):
            if not chosen.any():
                continue
            scores = self._by_lead[metric].isel(variable=np.flatnonzero(chosen))
            frame = scores.to_series().unstack("model").reset_index()
            if LEAD in frame:
                frame[LEAD] = [lead_text(lead) for lead in frame[LEAD].values]
            columns = [*(str(name) for name in frame if name not in models), *models]
            tables[title] = Table(columns, frame[columns].values.tolist())
        return tables
