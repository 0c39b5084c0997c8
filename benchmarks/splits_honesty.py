"""What a split promises against what the model does where it is used, on real cubes.

Writes `benchmarks/results/splits_honesty.json` and the figures of
`docs/explanation/honest_splits.md`. Two cubes, two uses. A sector of longitude (a new region) and
the last years (the future) are put aside. A split of what is left gives the promised error; a model
of all that is left is then scored where it would be used. All sectors take turns as the new region.

- Sea surface temperature: OSTIA monthly means, 54 months around the equator.
- Air temperature: A1B, 240 years over North America. E1 shares its past.

Run it as ``make bench-splits_honesty``; it takes a few CPU minutes.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import iris_sample_data
import numpy as np
import sklearn
import xarray as xr
from sklearn.ensemble import RandomForestRegressor
from sklearn.neighbors import KNeighborsRegressor

from ml4cube.plotting import distance_curves, split_map
from ml4cube.splits import (
    assign_block_split,
    assign_rand_split,
    assign_region_split,
    assign_time_split,
    estimate_range,
    leakage_report,
)

RESULTS = Path(__file__).parent / "results" / "splits_honesty.json"
FIGURES = Path(__file__).parents[1] / "docs" / "figures"
ROWS = 12_000  # for a fit, and for a score; drawn anew for each seed
Split = Callable[[xr.Dataset, int], xr.Dataset]


def open_sst() -> xr.Dataset:
    """Sea surface temperature: (time, lat, lon), land as gaps."""
    with xr.open_dataset(Path(iris_sample_data.path) / "ostia_monthly.nc") as ds:
        values = ds["surface_temperature"].load()
    values = values.rename(latitude="lat", longitude="lon")
    return values.drop_vars([n for n in values.coords if n not in values.dims]).to_dataset(name="y")


def open_air(name: str) -> xr.Dataset:
    """Air temperature of one scenario: (time, lat, lon)."""
    with xr.open_dataset(Path(iris_sample_data.path) / f"{name}_north_america.nc") as ds:
        values = ds["air_temperature"].load()
    values = values.rename(latitude="lat", longitude="lon")
    return values.drop_vars([n for n in values.coords if n not in values.dims]).to_dataset(name="y")


def features(ds: xr.Dataset, with_time: bool = True) -> xr.DataArray:
    """Where and when a cell lies: latitude, longitude, season and (as asked) years."""
    years = (ds.time.dt.year + (ds.time.dt.dayofyear - 1) / 366).astype(float)
    angle = 2 * np.pi * ds.time.dt.month / 12
    columns = [ds.lat / 5, ds.lon / 10, 2 * np.sin(angle), 2 * np.cos(angle)]
    if with_time:
        columns.append(years)
    template = ds.y.astype(float)
    stacked = [(xr.zeros_like(template).fillna(0) + column) for column in columns]
    return xr.concat(stacked, "feature").transpose("time", "lat", "lon", "feature")


def rows(ds: xr.Dataset, mask: Any, seed: int, with_time: bool = True) -> tuple[Any, Any]:
    """Features and target of up to ROWS cells where `mask` holds and there is a value."""
    mask = mask.broadcast_like(ds.y) if isinstance(mask, xr.DataArray) else mask
    use = np.flatnonzero((mask & ds.y.notnull()).transpose("time", "lat", "lon").values.ravel())
    use = np.random.default_rng(seed).permutation(use)[:ROWS]
    X = features(ds, with_time).values
    return X.reshape(-1, X.shape[-1])[use], ds.y.values.ravel()[use]


def forest(seed: int) -> RandomForestRegressor:
    """The model whose error is promised."""
    return RandomForestRegressor(30, random_state=seed, min_samples_leaf=2)


def rmse(model: Any, X: Any, y: Any) -> float:
    """Root of the mean squared error, in kelvin."""
    return float(np.sqrt(np.mean((model.predict(X) - y) ** 2)))


def sectors(ds: xr.Dataset, number: int) -> xr.DataArray:
    """Sectors of longitude of equal width."""
    part = np.arange(ds.sizes["lon"]) * number // ds.sizes["lon"]
    return xr.DataArray(part, dims="lon", coords={"lon": ds.lon}, name="sector")


def splits_of(block: dict[str, int], buffer: dict[str, int], gap: int) -> dict[str, Split]:
    """The splits that are compared, by name."""

    def at_random(ds: xr.Dataset, seed: int) -> xr.Dataset:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return assign_rand_split(ds, 0.8, seed=seed)

    def one_region(ds: xr.Dataset, seed: int) -> xr.Dataset:
        # the sectors that are left, one of them tests
        left = ds.sector.rename("regions")
        ids = np.unique(left)
        return assign_region_split(ds, left, test=[int(ids[seed % ids.size])])

    return {
        "random cells": at_random,
        "blocks": lambda ds, seed: assign_block_split(ds, block, 0.8, seed=seed, valid="y"),
        "blocks, buffer": lambda ds, seed: assign_block_split(
            ds, block, 0.8, seed=seed, buffer=buffer, valid="y"
        ),
        "region left out": one_region,
        "forward, gap": lambda ds, seed: assign_time_split(ds, 0.8, gap=gap),
    }


def promise_and_truth(
    ds: xr.Dataset, number: int, future: int, gap: int, splits: dict[str, Split], seeds: int
) -> dict[str, Any]:
    """Promised error by split; the error of a model of all known cells where it is used."""
    part = sectors(ds, number)
    ds = ds.assign_coords(sector=part)
    steps = ds.sizes["time"]
    past, later = ds.isel(time=slice(0, steps - future)), ds.isel(time=slice(gap - future, None))
    promised: dict[str, list[float]] = {name: [] for name in splits}
    truth: dict[str, list[float]] = {"region": [], "future": []}
    leaks: dict[str, bool] = {}
    for new in range(number):
        kept = np.flatnonzero(part.values != new)
        known = past.isel(lon=kept)
        every = xr.ones_like(known.y, dtype=bool)
        for seed in range(seeds):
            model = forest(seed).fit(*rows(known, every, seed))
            truth["region"].append(rmse(model, *rows(past, part == new, seed + 1)))
            late = later.isel(lon=kept)
            truth["future"].append(rmse(model, *rows(late, late.y.notnull(), seed + 1)))
            for name, split in splits.items():
                labelled = split(known, new + seed * number)
                model = forest(seed).fit(*rows(labelled, labelled.split == 1, seed))
                tested = rows(labelled, labelled.split == 0, seed + 1)
                promised[name].append(rmse(model, *tested))
                if name not in leaks:
                    report = leakage_report(labelled.drop_vars("sector"), var="y")
                    leaks[name] = bool(report.leaks)
    found: dict[str, Any] = {"truth": {use: pooled(errors) for use, errors in truth.items()}}
    found["runs"] = len(truth["region"])
    true = found["truth"]
    print(f"  true: new region {true['region']:.2f} K, future {true['future']:.2f} K")
    for name, errors in promised.items():
        found[name] = {"promised": pooled(errors), "leaks": leaks[name]}
        for use, actual in truth.items():
            each = np.array(actual) / np.array(errors)
            found[name][f"{use}_ratio"] = found["truth"][use] / found[name]["promised"]
            found[name][f"{use}_ratio_10_90"] = np.percentile(each, [10, 90]).tolist()
        print(
            f"  {name:16s} promised {found[name]['promised']:.2f} K, true over promised: region "
            f"{found[name]['region_ratio']:.2f}, future {found[name]['future_ratio']:.2f}, "
            f"leaks: {found[name]['leaks']}"
        )
    return found


def pooled(errors: list[float]) -> float:
    """Root of the mean square over runs."""
    return float(np.sqrt(np.mean(np.square(errors))))


MODELS: dict[str, tuple[Callable[[int], Any], bool]] = {
    "neighbours, date": (lambda seed: KNeighborsRegressor(5, weights="distance"), True),
    "neighbours, season": (lambda seed: KNeighborsRegressor(15), False),
    "forest, date": (forest, True),
    "forest, season": (forest, False),
}


def which_model(ds: xr.Dataset, gap: int, splits: dict[str, Split], seeds: int) -> dict[str, Any]:
    """Which of several models a split prefers, and how they do in the months to come.

    Two know the date and can copy what their neighbours in time were like; two know the season
    only, which gives the climatology. Four times, the months from then on are the future.
    """
    errors: dict[str, dict[str, list[float]]] = {
        name: {model: [] for model in MODELS} for name in (*splits, "future")
    }
    ds = ds.assign_coords(sector=sectors(ds, 6))
    for today in (24, 30, 36, 42):
        past, later = ds.isel(time=slice(0, today)), ds.isel(time=slice(today + gap, today + 12))
        every = xr.ones_like(past.y, dtype=bool)
        for seed in range(seeds):
            for model, (make, dated) in MODELS.items():
                for name, split in splits.items():
                    labelled = split(past, seed)
                    fitted = make(seed).fit(*rows(labelled, labelled.split == 1, seed, dated))
                    tested = rows(labelled, labelled.split == 0, seed + 1, dated)
                    errors[name][model].append(rmse(fitted, *tested))
                fitted = make(seed).fit(*rows(past, every, seed, dated))
                actual = rows(later, later.y.notnull(), seed + 1, dated)
                errors["future"][model].append(rmse(fitted, *actual))
    found: dict[str, Any] = {
        name: {model: pooled(values) for model, values in by_model.items()}
        for name, by_model in errors.items()
    }
    future = found["future"]
    found["runs"] = 4 * seeds
    found["chosen"] = {name: min(found[name], key=found[name].get) for name in splits}
    found["worse_by_percent"] = {
        name: 100 * (future[model] / min(future.values()) - 1)
        for name, model in found["chosen"].items()
    }
    # the same choice between the two that differ in nothing but the date
    pair = [model for model in MODELS if model.startswith("neighbours")]
    found["chosen_of_neighbours"] = {name: min(pair, key=found[name].get) for name in splits}
    found["neighbours_worse_by_percent"] = {
        name: 100 * (future[model] / min(future[m] for m in pair) - 1)
        for name, model in found["chosen_of_neighbours"].items()
    }
    return found


def shared_past() -> dict[str, Any]:
    """A1B trains and E1 tests: what the years promise that both share."""
    a, e = open_air("A1B"), open_air("E1")
    both = xr.concat([a, e], "scenario").assign(split=("scenario", np.array([1, 0], "u1")))
    report = leakage_report(both)
    years = e.time.dt.year
    model = KNeighborsRegressor(1).fit(*rows_all(a))
    old, new = years <= 1999, years > 1999
    return {
        "leaks": report.leaks,
        "verdict": report.verdict,
        "duplicate_cells": int(report.table.found["duplicate cells"]),
        "duplicate_steps": int(sum(
            bool((a.y.values[i] == e.y.values[i]).all()) for i in range(a.sizes["time"])
        )),
        "promised_k": rmse(model, *rows_all(e)),
        "shared_years_k": rmse(model, *rows_all(e.isel(time=np.flatnonzero(old)))),
        "own_years_k": rmse(model, *rows_all(e.isel(time=np.flatnonzero(new)))),
    }  # fmt: skip


def rows_all(ds: xr.Dataset) -> tuple[Any, Any]:
    """Features and target of every cell."""
    X = features(ds).values
    return X.reshape(-1, X.shape[-1]), ds.y.transpose("time", "lat", "lon").values.ravel()


def draw(ds: xr.Dataset, splits: dict[str, Split]) -> None:
    """The two figures of the page: three splits, and their distances against a new region's."""
    part = sectors(ds, 6)
    known = ds.assign_coords(sector=part)
    # half of the band, which is 36 times as long as high; the label is the same at each time
    shown = splits["blocks, buffer"](known, 1).sel(lon=slice(40, 220)).isel(time=0, drop=True)
    figure = split_map(
        shown.split.drop_vars("sector"), valid=shown.y.notnull(), title="Blocks with a buffer"
    )
    figure.savefig(FIGURES / "honest_blocks.png")
    curves = {}
    inside = known.isel(lon=np.flatnonzero(part.values != 3))
    elsewhere = ds.isel(lon=np.flatnonzero(part.values == 3))
    for name in ("random cells", "blocks", "region left out"):
        report = leakage_report(splits[name](inside, 1), elsewhere, var="y")
        by_curve = report.distances["space"][1]
        curves[name] = by_curve["test → train"]
        if name == "region left out":
            curves["the new region"] = by_curve["deployment → train"]
    figure = distance_curves(curves, title="Sea cells: how far is the nearest train cell?")
    figure.savefig(FIGURES / "honest_distances.png")


def main() -> None:
    """Run all, print the tables and write the figures and the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="fits for each sector")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--no-figures", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    sst, air = open_sst(), open_air("A1B")
    for_sst = splits_of({"lat": 9, "lon": 36}, {"lat": 3, "lon": 9}, gap=3)
    for_air = splits_of({"lat": 12, "lon": 8}, {"lat": 3, "lon": 3}, gap=5)
    found: dict[str, Any] = {"ranges": {}, "rows": ROWS}
    print("sea surface temperature")
    found["ranges"]["sst"] = estimate_range(sst, "y")
    found["sst"] = promise_and_truth(sst, 6, 12, 3, for_sst, args.seeds)
    print("air temperature")
    found["ranges"]["air"] = estimate_range(air, "y")
    found["air"] = promise_and_truth(air, 6, 50, 5, for_air, args.seeds)
    some = {name: for_sst[name] for name in ("random cells", "blocks, buffer", "forward, gap")}
    found["which_model"] = which_model(sst, 3, some, 2)
    print("which model", json.dumps(found["which_model"], indent=1))
    found["shared_past"] = shared_past()
    print("shared past", json.dumps(found["shared_past"], indent=1))
    found["machine"] = {
        "cores": os.cpu_count(), "python": platform.python_version(), "sklearn": sklearn.__version__
    }  # fmt: skip
    if not args.no_figures:
        draw(sst, for_sst)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(found, indent=2, default=float)
    args.out.write_text(text.replace("NaN", "null") + "\n")


if __name__ == "__main__":
    main()
