"""The numbers on the page about honest splits are those that were measured."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from benchmarks import honesty_splits
from ml4cube.splits import leakage_report

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "explanation" / "honest_splits.md"
PAGE = PATH.read_text()
TEXT = " ".join(PAGE.split())
SPLITS = ("random cells", "blocks", "blocks, buffer", "region left out", "forward, gap")

MEASURED = json.loads((ROOT / "benchmarks" / "results" / "honesty.json").read_text())[
    "honest_splits"
]
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split("|"))
    for line in PAGE.splitlines()
    if line.startswith("| ") and not line.startswith(("| split", "| model"))
]


def with_spread(found, use):
    low, high = found[f"{use}_ratio_10_90"]
    return f"{found[f'{use}_ratio']:.2f} ({low:.1f} to {high:.1f})"


def test_predicted_and_true_errors():
    expected = []
    for found in (MEASURED["sst"], MEASURED["air"]):
        assert f"{found['truth']['region']:.2f} K in a new region" in TEXT
        assert f"{found['truth']['future']:.2f} K in the" in TEXT
        assert f"over {found['runs']} runs" in TEXT
        for name in SPLITS:
            promised = f"{found[name]['promised']:.2f} K"
            ratios = [with_spread(found[name], use) for use in ("region", "future")]
            expected.append((name, promised, *ratios))
    assert ROWS[: len(expected)] == expected


@pytest.mark.slow
@pytest.mark.parametrize("cube", ["sst", "air"])
def test_random_cells_are_too_easy_for_both_uses(cube):
    opened, future, gap, splits = honesty_splits.REAL[cube]
    ds = opened().isel(lat=slice(None, None, 2), lon=slice(None, None, 2))
    sector = honesty_splits.sectors(ds).values
    past = ds.isel(time=slice(0, ds.sizes["time"] - future))
    known = past.isel(lon=np.flatnonzero(sector != 3))
    later = ds.isel(time=slice(gap - future, None), lon=np.flatnonzero(sector != 3))
    for asked in (past.isel(lon=np.flatnonzero(sector == 3)), later):
        report = leakage_report(splits["random cells"](known, 0), asked, var="y")
        assert report.judgement == "too easy"


def test_which_model():
    found = MEASURED["which_model"]
    columns = ("random cells", "forward, gap", "future")
    expected = [
        (model, *(f"{found[column][model]:.2f}" for column in columns)) for model in found["future"]
    ]
    assert ROWS[10 : 10 + len(expected)] == expected  # after two cubes with five splits each
    assert f"{found['worse_by_percent']['random cells']:.0f} % worse than the best" in TEXT
    worse = found["neighbours_worse_by_percent"]
    assert f"the one that is {worse['random cells']:.0f} % worse" in TEXT
    assert found["worse_by_percent"]["forward, gap"] == 0 == worse["forward, gap"]


def test_shared_past():
    found = MEASURED["shared_past"]
    assert found["leaks"]
    assert found["duplicate_cells"] == found["duplicate_steps"] * 37 * 49
    assert f"{found['duplicate_steps']} time steps" in TEXT
    assert f"{100 * found['duplicate_steps'] / 240:.0f} % of the test cells" in TEXT
    assert f"{found['promised_k']:.2f} K in that test: {found['shared_years_k']:.2f} K" in TEXT
    assert f"{found['own_years_k']:.2f} K in the years that are only in E1" in TEXT


def test_what_the_page_concludes_is_so():
    cells = [
        MEASURED[cube]["random cells"][f"{use}_ratio"]
        for cube in ("sst", "air")
        for use in ("region", "future")
    ]
    assert f"{min(cells):.1f} to {max(cells):.1f} times too small" in TEXT
    for cube in ("sst", "air"):
        found = MEASURED[cube]
        assert 0.8 < found["region left out"]["region_ratio"] < 1.25
        assert found["region left out"]["future_ratio"] < 0.8
        assert 1 < found["forward, gap"]["future_ratio"] < found["random cells"]["future_ratio"] / 2
        assert found["blocks, buffer"]["region_ratio"] < found["blocks"]["region_ratio"]


def test_figures_are_there():
    for path in re.findall(r"\{image\} (\S+)", PAGE):
        assert (PATH.parent / path).stat().st_size > 5000
