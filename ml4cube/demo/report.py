"""Outputs of the demo: figures, a page to read, and its numbers as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr

from ml4cube.demo.downscaling import FACTOR, LAT, LON
from ml4cube.plotting import field_maps, split_timeline

NEEDED_GAIN = 0.02
# Codes of the split label; the excluded months are the buffer behind train.
CODES_IN_TIME_ORDER = {"train": 1, "excluded": 255, "val": 2, "test": 0}

# Columns of the eastern Pacific, 135°W to 75°W, whole blocks: the band is 36 times as long as high.
SHOWN = slice(270, 342)
PREDICTIONS = {
    "network": "the mean of three small convolutional networks",
    "bilinear": "the coarse means, interpolated to the cells",
    "bilinear + mean detail": "interpolated, plus the mean of what is missing",
    "ridge regression": "on nine neighbouring coarse anomalies and the season, block by block",
    "monthly climatology": "the mean of each calendar month",
}


def draw_split(truth: xr.DataArray, label: xr.DataArray, path: Path) -> None:
    """Draw the part of each month."""
    split_timeline(label, valid=truth.notnull(), title="Months of each part").savefig(path)


def draw_maps(
    truth: xr.DataArray, baseline: xr.DataArray, name: str, predicted: xr.DataArray, path: Path
) -> None:
    """Draw truth, coarse input, prediction and the errors of baseline and prediction."""
    month = str(truth["time"].values)[:7]
    truth, baseline, predicted = (f.isel({LON: SHOWN}) for f in (truth, baseline, predicted))
    coarse, sea = truth.coarsen({LAT: FACTOR, LON: FACTOR}).mean(), truth.notnull()
    fields = {
        "truth": truth.assign_attrs(long_name="sea surface temperature"),
        "input: means over 6 × 6 cells": coarse.assign_attrs(truth.attrs),
        "network": predicted,
    }
    errors = {
        f"strongest baseline ({name}) − truth": (baseline - truth).where(sea),
        "network − truth": (predicted - truth).where(sea),
    }
    title = f"Eastern Pacific, {month}, a month held out from training"
    field_maps(fields, errors, title=title).savefig(path)


def judge(scores: pd.DataFrame) -> dict[str, Any]:
    """Compare the network with the strongest baseline, in the table of a scorecard."""
    rows = scores[scores["metric"] == "rmse"].replace({"model": {"prediction": "network"}})
    rmse = rows.set_index("model")["value"].sort_values()
    best = str(rmse.drop("network").index[0])
    # A skill is one of squared errors.
    skill = scores[(scores["metric"] == "skill") & (scores["baseline"] == best)].iloc[0]
    gain, low, high = (float(1 - (1 - skill[end]) ** 0.5) for end in ("value", "low", "high"))
    return {
        "rmse_k": rmse.to_dict(),
        "rmse_model_k": float(rmse["network"]),
        "rmse_best_baseline_k": float(rmse[best]),
        "best_baseline": best,
        "improvement": gain,
        "improvement_interval": [low, high] if pd.notna(low) else None,
        "independent_months": int(skill["independent"]),
        "needed_improvement": NEEDED_GAIN,
        "beats_baseline": gain >= NEEDED_GAIN,
    }


def kelvin(rmse: float) -> str:
    """Format an error in kelvin, with the same digits in summary, report and docs."""
    return f"{rmse:.3f}"


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write ``report.json`` and ``report.md``."""
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    (folder / "report.md").write_text(_page(report))


def _page(report: Mapping[str, Any]) -> str:
    gain, months = report["improvement"], report["months"]
    verdict = "**not passed**"
    if report["beats_baseline"]:
        verdict = "passed"
    return f"""# {abs(gain):.1%} {"less" if gain >= 0 else "more"} error than the strongest baseline

**Sea surface temperature, six times finer.** A network is given monthly means over 6 × 6 cells, and
predicts the cells. On {months["test"]} months held out from training, its error is
**{kelvin(report["rmse_model_k"])} K**; that of the strongest baseline, {report["best_baseline"]},
is {kelvin(report["rmse_best_baseline_k"])} K. {_of_other_months(report)} The bar of
{report["needed_improvement"]:.0%} in these months is {verdict}.

![Truth, coarse input, network, and the errors of baseline and network](maps.png)

| prediction | RMSE (K) | what it is |
|---|---|---|
{_rows((name, kelvin(rmse), PREDICTIONS[name]) for name, rmse in report["rmse_k"].items())}

## How to read it

- **Maps**: the eastern Pacific in one held-out month; land is grey. The upper three share their
  colours, and so do the errors: red is too warm, blue too cold, white right.
- **Table**: the error over all sea cells around the equator, weighted by their areas, and over
  all held-out months. The data are OSTIA monthly means, {report["grid"]} cells (months, latitudes,
  longitudes).
- **Fair**: network and baselines are fitted to the same {months["train"]} earliest months. The next
  {months["val"]} choose the epoch ({report["best_epoch"]} of {report["epochs"]}), after a buffer of
  {months["excluded"]} that is left out. See [the split](split_map.png) and
  [the losses](loss_curve.png).
- **Other months**: months that follow one another have errors in common, so few of them say
  little of others, and nothing of other years or networks.
- **Limit**: this is **perfect-model downscaling**: the coarse field is made from the fine one. A
  real coarse product has errors that are absent here.

Trained on {report["ranks"]} ranks. Their rows, the samples of each part, and the seconds of each
stage are in `report.json`.
"""


def _of_other_months(report: Mapping[str, Any]) -> str:
    """Say what is known of months that were not scored."""
    if report["improvement_interval"] is None:
        return (
            f"Whether it would be so in other months like these cannot be decided:\n"
            f"{report['months']['test']} months behave like {report['independent_months']} "
            "independent ones."
        )
    low, high = report["improvement_interval"]
    return (
        f"For other months like these the difference would\nlie between {low:.1%} and {high:.1%} "
        "(95 % interval)."
    )


def _rows(pairs: Any) -> str:
    return "\n".join(f"| {' | '.join(map(str, pair))} |" for pair in pairs)
