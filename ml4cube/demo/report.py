"""Outputs of the demo: figures, a report to read, and its numbers as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xarray as xr

from ml4cube.demo.downscaling import LAT, LON
from ml4cube.plotting import field_maps, split_map

NEEDED_GAIN = 0.15
# Codes of the split label; the excluded months are the buffer behind train.
CODES_IN_TIME_ORDER = {"train": 1, "excluded": 255, "val": 2, "test": 0}


def draw_split(truth: xr.DataArray, label: xr.DataArray, path: Path) -> None:
    """Draw the split over time, and one month of each part as a map."""
    part_of_month = label.max([LAT, LON]).values
    steps = [int((part_of_month == code).argmax()) for code in CODES_IN_TIME_ORDER.values()]
    split_map(
        label, steps=steps, valid=truth.notnull(), title="Months of each part, cells of one month"
    ).savefig(path, dpi=150)


def draw_maps(
    truth: xr.DataArray, baseline: xr.DataArray, name: str, predicted: xr.DataArray, path: Path
) -> None:
    """Draw truth, baseline, prediction and both errors for one month."""
    sea = truth.notnull()
    field_maps(
        {"truth": truth, f"baseline: {name}": baseline.where(sea), "network": predicted},
        {
            "baseline − truth": (baseline - truth).where(sea),
            "network − truth": (predicted - truth).where(sea),
        },
        title=f"Sea surface temperature, {str(truth['time'].values)[:7]} (a held-out month)",
    ).savefig(path, dpi=150)


def judge(scores: Mapping[str, float]) -> dict[str, Any]:
    """Compare the network with the strongest baseline."""
    baselines = {name: rmse for name, rmse in scores.items() if name != "network"}
    best = min(baselines, key=baselines.__getitem__)
    gain = 1 - scores["network"] / baselines[best]
    return {
        "rmse_model_k": scores["network"],
        "rmse_best_baseline_k": baselines[best],
        "best_baseline": best,
        "improvement": gain,
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
    verdict = "beats" if report["beats_baseline"] else "does **not** beat"
    epoch = report["best_epoch"]
    return f"""# Sea surface temperature, six times finer

The network {verdict} the strongest simple baseline ({report["best_baseline"]}) by the
required {report["needed_improvement"]:.0%}: {kelvin(report["rmse_model_k"])} K against
{kelvin(report["rmse_best_baseline_k"])} K, {report["improvement"]:.1%} less, on
{report["months"]["test"]} held-out months.

OSTIA monthly means on {report["grid"]} cells are averaged over 6 × 6 cells and predicted back.
This is **perfect-model downscaling**: the coarse field is made from the fine one. A real coarse
product has errors that are absent here.

| prediction | RMSE (K), weighted by cell area |
|---|---|
{_rows((name, kelvin(value)) for name, value in report["rmse_k"].items())}

## Split

Months in time order: {", ".join(f"{n} {part}" for part, n in report["months"].items())}
(excluded is the buffer between train and the rest). The network and the baselines are fitted to
train months only.

![split](split_map.png)

## Training

{report["ranks"]} ranks, best epoch {epoch}. That epoch by rank:

{_table(report["rank_table"])}

The mean of the ranks' losses, weighted by their samples, is the loss of the epoch.

![loss](loss_curve.png)

## Result

![maps](maps.png)

The samples of each part, and the seconds of each stage, are in `report.json`.
"""


def _rows(pairs: Any) -> str:
    return "\n".join(f"| {' | '.join(map(str, pair))} |" for pair in pairs)


def _table(rows: list[dict[str, Any]]) -> str:
    names = list(rows[0])
    body = ([f"{v:.4g}" if isinstance(v, float) else v for v in row.values()] for row in rows)
    return "\n".join([_rows([names]), "|---" * len(names) + "|", _rows(body)])
