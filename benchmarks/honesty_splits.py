"""What a split promises against what a model does where it is used: on simulated and real cubes.

A part of `benchmarks/honesty.py`. `summary` has the numbers of `docs/explanation/honest_splits.md`,
and `draw` its figures.

- Simulated fields, whose truth is known: five splits for each of four uses, and the report on each.
- Stations with a field that lasts: rows drawn at random, for a map of the same days.
- Sea surface temperature: OSTIA monthly means, 54 months around the equator.
- Air temperature: A1B, 240 years over North America. E1 shares its past.

On real cubes a sector of longitude (a new region) and the last years (the future) are put aside. A
split of what is left gives the promised error; a model of all that is left is then scored where it
would be used. All sectors take turns as the new region.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import iris_sample_data
import numpy as np
import pandas as pd
import xarray as xr
from sklearn.ensemble import RandomForestRegressor
from sklearn.neighbors import KNeighborsRegressor

from ml4cube.splits import (
    assign_block_split,
    assign_location_split,
    assign_rand_split,
    assign_region_split,
    assign_time_split,
    estimate_range,
    leakage_report,
)

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
SEEDS = 20
ROWS = 12_000  # for a fit, and for a score on real cubes; drawn anew for each seed
TEST_ROWS = 1_200  # for a score on simulated ones
Split = Callable[[xr.Dataset, int], xr.Dataset]


# ------------------------------------------------------------------ simulated fields


def simulate(steps: int, shape: tuple[int, int], length: float, lasting: float, seed: int) -> Any:
    """Return a Gaussian field (time, y, x) of unit variance on a padded torus.

    Its correlation is exp(-3 h / length) in space and exp(-3 / lasting) from step to step.
    """
    rng = np.random.default_rng(seed)
    padded = [2 * max(n, int(2 * length)) for n in shape]
    along = [np.minimum(np.arange(n), n - np.arange(n)) for n in padded]
    covariance = np.exp(-3 * np.hypot(along[0][:, None], along[1][None]) / length)
    amplitude = np.sqrt(np.maximum(np.fft.fft2(covariance).real, 0))
    step_correlation = np.exp(-3 / lasting)
    fields: list[Any] = []
    for _ in range(steps):
        noise = np.fft.fft2(rng.normal(size=padded))
        field = np.fft.ifft2(amplitude * noise).real
        if fields:
            field *= np.sqrt(1 - step_correlation**2)
            field += step_correlation * fields[-1]
        fields.append(field)
    return np.stack(fields)[:, : shape[0], : shape[1]]


def as_cube(values: Any) -> xr.Dataset:
    """Return a cube of days and cells of half a degree around the equator."""
    steps, rows, columns = values.shape
    coords = {
        "time": pd.date_range("2000", periods=steps),
        "lat": (np.arange(rows) - rows / 2) / 2,
        "lon": np.arange(columns) / 2,
    }
    return xr.Dataset({"y": (("time", "lat", "lon"), values)}, coords)


def at_stations(ds: xr.Dataset) -> xr.Dataset:
    """Return the cells with values as stations."""
    return ds.stack(station=["lat", "lon"]).dropna("station", how="all").reset_index("station")


def question(use: str, seed: int) -> tuple[xr.Dataset, xr.Dataset]:
    """Return the known cells and those of a deployment, of one simulated field."""
    full = as_cube(simulate(24, (24, 32), (6, 12)[seed % 2], 8, seed))
    rng = np.random.default_rng(seed + 1000)
    if use in ("interpolation", "stations"):
        is_known = full.y[0].copy(data=rng.permutation(24 * 32).reshape(24, 32) < 0.15 * 24 * 32)
        is_known = is_known.drop_vars("time")
        known, asked = full.where(is_known), full.where(~is_known)
        return (at_stations(known) if use == "stations" else known), asked
    if use == "region":
        return full.isel(lon=slice(0, 22)), full.isel(lon=slice(22, None))
    return full.isel(time=slice(0, 17)), full.isel(time=slice(19, None))


def at_random(ds: xr.Dataset, seed: int) -> xr.Dataset:
    """Deal single cells at random."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return assign_rand_split(ds, 0.8, seed=seed)


def left_out(ds: xr.Dataset, degrees: float) -> xr.Dataset:
    """Leave out the easternmost cells."""
    is_east = ds.lon > ds.lon.max() - degrees
    return assign_region_split(ds, is_east.drop_vars(["lat", "lon"], errors="ignore"))


def simulated_splits(use: str) -> dict[str, Split]:
    """Return the five splits of the experiment, and the natural one of this use."""
    blocks, buffer = {"lat": 6, "lon": 6}, {"lat": 2, "lon": 2}
    splits: dict[str, Split] = {
        "random cells": at_random,
        "blocks": lambda ds, seed: assign_block_split(ds, blocks, 0.8, seed=seed, valid="y"),
        "blocks, buffer": lambda ds, seed: assign_block_split(
            ds, blocks, 0.8, seed=seed, valid="y", buffer=buffer
        ),
        "quarter left out": lambda ds, seed: left_out(ds, float(np.ptp(ds.lon.values)) / 4),
        "forward, gap": lambda ds, seed: assign_time_split(ds, 0.75, gap=2, valid="y"),
    }
    if use == "stations":
        splits["blocks"] = lambda ds, seed: assign_block_split(ds, {"station": 1}, 0.8, seed=seed)
        splits["blocks, buffer"] = lambda ds, seed: assign_location_split(
            ds, 0.9, seed=seed, buffer="60km"
        )
    natural: dict[str, Split] = {
        "region": lambda ds, seed: left_out(ds, 5.0),
        "future": splits["forward, gap"],
    }
    default = lambda ds, seed: assign_location_split(ds, 0.8, seed=seed, valid="y")  # noqa: E731
    splits["natural"] = natural.get(use, default)
    return splits


def positions(ds: xr.Dataset, mask: Any) -> tuple[Any, Any]:
    """Return (time, lat, lon) and target of the cells in a mask that have values."""
    cells = ds.y.where(mask)
    table = cells.reset_coords(drop=False).to_dataframe().dropna(subset=["y"]).reset_index()
    days = (table["time"] - pd.Timestamp("2000")).dt.days
    return np.column_stack([days, table["lat"], table["lon"]]).astype(float), table["y"].values


def neighbours_error(train: tuple[Any, Any], test: tuple[Any, Any], seed: int) -> float:
    """Return the error of the five nearest neighbours, weighted by distance on scaled positions."""
    scale = np.maximum(train[0].std(axis=0), 1e-9)
    model = KNeighborsRegressor(5, weights="distance").fit(train[0] / scale, train[1])
    rows = np.random.default_rng(seed).permutation(len(test[1]))[:TEST_ROWS]
    return rmse(model, test[0][rows] / scale, test[1][rows])


def judge(labelled: xr.Dataset, asked: xr.Dataset, true: float, seed: int) -> dict[str, Any]:
    """Return what a split promises of the true error, and what the report says."""
    train, test = (positions(labelled, labelled.split == code) for code in (1, 0))
    report = leakage_report(labelled, asked, var="y")
    return {
        "promised": neighbours_error(train, test, seed) / true,
        "expected": float(report.table.found["promised error"]),
        "interval": report.table.limit["promised error"],
        "judgement": report.judgement,
    }


def run_simulated(use: str, seed: int) -> dict[str, Any]:
    """Judge all splits of one simulated field for one use."""
    known, asked = question(use, seed)
    everything = positions(known, known.y.notnull())
    true = neighbours_error(everything, positions(asked, asked.y.notnull()), seed)
    results: dict[str, Any] = {}
    for name, split in simulated_splits(use).items():
        results[name] = judge(split(known, seed), asked, true, seed)
    return results


def run_lasting(seed: int) -> dict[str, Any]:
    """Judge rows drawn at random, and whole stations, of 120 stations with a field that lasts."""
    full = as_cube(simulate(30, (24, 32), 6, 60, seed))
    rng = np.random.default_rng(seed)
    is_station = full.y[0].copy(data=rng.permutation(24 * 32).reshape(24, 32) < 120)
    is_station = is_station.drop_vars("time")
    known, asked = at_stations(full.where(is_station)), full.where(~is_station)
    everything = positions(known, known.y.notnull())
    true = neighbours_error(everything, positions(asked, asked.y.notnull()), seed)
    return {
        "random rows": judge(at_random(known, seed), asked, true, seed),
        "stations": judge(assign_location_split(known, 0.8, seed=seed), asked, true, seed),
    }


# ------------------------------------------------------------------ real cubes


def open_sst() -> xr.Dataset:
    """Sea surface temperature: (time, lat, lon), land as gaps."""
    return _open("ostia_monthly.nc", "surface_temperature")


def open_air(name: str) -> xr.Dataset:
    """Air temperature of one scenario: (time, lat, lon)."""
    return _open(f"{name}_north_america.nc", "air_temperature")


def _open(file: str, variable: str) -> xr.Dataset:
    with xr.open_dataset(Path(iris_sample_data.path) / file) as ds:
        values = ds[variable].load()
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


def rows_of(ds: xr.Dataset, mask: Any, seed: int, with_time: bool = True) -> tuple[Any, Any]:
    """Features and target of up to ROWS cells where `mask` holds and there is a value."""
    mask = mask.broadcast_like(ds.y)
    use = np.flatnonzero((mask & ds.y.notnull()).transpose("time", "lat", "lon").values.ravel())
    use = np.random.default_rng(seed).permutation(use)[:ROWS]
    X = features(ds, with_time).values
    return X.reshape(-1, X.shape[-1])[use], ds.y.values.ravel()[use]


def forest(seed: int) -> RandomForestRegressor:
    """The model whose error is promised."""
    return RandomForestRegressor(30, random_state=seed, min_samples_leaf=2)


def rmse(model: Any, X: Any, y: Any) -> float:
    """Root of the mean squared error."""
    return float(np.sqrt(np.mean((model.predict(X) - y) ** 2)))


def sectors(ds: xr.Dataset) -> xr.DataArray:
    """Six sectors of longitude of equal width."""
    part = np.arange(ds.sizes["lon"]) * 6 // ds.sizes["lon"]
    return xr.DataArray(part, dims="lon", coords={"lon": ds.lon}, name="sector")


def real_splits(block: dict[str, int], buffer: dict[str, int], gap: int) -> dict[str, Split]:
    """The splits that are compared on real cubes, by name."""

    def one_region(ds: xr.Dataset, seed: int) -> xr.Dataset:
        # Of the sectors that are left, one tests.
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


# Of each real cube: how to open it, the steps of its future, a gap, and splits.
REAL: dict[str, tuple[Callable[[], xr.Dataset], int, int, dict[str, Split]]] = {
    "sst": (open_sst, 12, 3, real_splits({"lat": 9, "lon": 36}, {"lat": 3, "lon": 9}, 3)),
    "air": (
        lambda: open_air("A1B"),
        50,
        5,
        real_splits({"lat": 12, "lon": 8}, {"lat": 3, "lon": 3}, 5),
    ),
}


def run_real(cube: str, new: int, seed: int) -> dict[str, Any]:
    """Promised errors by split, and the errors of a model of all known cells in two uses."""
    opened, future, gap, splits = REAL[cube]
    ds = opened()
    ds = ds.assign_coords(sector=sectors(ds))
    past = ds.isel(time=slice(0, ds.sizes["time"] - future))
    later = ds.isel(time=slice(gap - future, None))
    kept = np.flatnonzero(ds.sector.values != new)
    known, late = past.isel(lon=kept), later.isel(lon=kept)
    elsewhere = past.isel(lon=np.flatnonzero(ds.sector.values == new))
    model = forest(seed).fit(*rows_of(known, xr.ones_like(known.y, dtype=bool), seed))
    asked = {"region": elsewhere, "future": late}
    results: dict[str, Any] = {
        use: rmse(model, *rows_of(cells, cells.y.notnull(), seed + 1))
        for use, cells in asked.items()
    }
    for name, split in splits.items():
        labelled = split(known, new + seed * 6)
        model = forest(seed).fit(*rows_of(labelled, labelled.split == 1, seed))
        results[name] = {"promised": rmse(model, *rows_of(labelled, labelled.split == 0, seed + 1))}
        if seed == 0:
            for use, cells in asked.items():
                report = leakage_report(
                    labelled.drop_vars("sector"), cells.drop_vars("sector"), var="y"
                )
                results[name][use] = report.judgement
    return results


MODELS: dict[str, tuple[Callable[[int], Any], bool]] = {
    "neighbours, date": (lambda seed: KNeighborsRegressor(5, weights="distance"), True),
    "neighbours, season": (lambda seed: KNeighborsRegressor(15), False),
    "forest, date": (forest, True),
    "forest, season": (forest, False),
}
COMPARED = ("random cells", "blocks, buffer", "forward, gap")


def run_models(today: int, seed: int) -> dict[str, Any]:
    """Return the errors of four models that two splits promise, and those of the months to come.

    Two know the date and can copy what their neighbours in time were like; two know the season
    only, which gives the climatology. From `today` on, the months are the future.
    """
    ds, splits = open_sst(), REAL["sst"][3]
    ds = ds.assign_coords(sector=sectors(ds))
    past, later = ds.isel(time=slice(0, today)), ds.isel(time=slice(today + 3, today + 12))
    every = xr.ones_like(past.y, dtype=bool)
    errors: dict[str, Any] = {name: {} for name in (*COMPARED, "future")}
    for model, (make, dated) in MODELS.items():
        for name in COMPARED:
            labelled = splits[name](past, seed)
            fitted = make(seed).fit(*rows_of(labelled, labelled.split == 1, seed, dated))
            tested = rows_of(labelled, labelled.split == 0, seed + 1, dated)
            errors[name][model] = rmse(fitted, *tested)
        fitted = make(seed).fit(*rows_of(past, every, seed, dated))
        errors["future"][model] = rmse(fitted, *rows_of(later, later.y.notnull(), seed + 1, dated))
    return errors


def run_shared_past() -> dict[str, Any]:
    """A1B trains and E1 tests: what the years promise that both share."""
    a, e = open_air("A1B"), open_air("E1")
    both = xr.concat([a, e], "scenario").assign(split=("scenario", np.array([1, 0], "u1")))
    report = leakage_report(both)
    years = e.time.dt.year
    model = KNeighborsRegressor(1).fit(*all_rows(a))
    is_equal = (a.y.values == e.y.values).all(axis=(1, 2))
    return {
        "leaks": report.leaks,
        "duplicate_cells": int(report.table.found["duplicate cells"]),
        "duplicate_steps": int(is_equal.sum()),
        "promised_k": rmse(model, *all_rows(e)),
        "shared_years_k": rmse(model, *all_rows(e.isel(time=np.flatnonzero(years <= 1999)))),
        "own_years_k": rmse(model, *all_rows(e.isel(time=np.flatnonzero(years > 1999)))),
    }


def all_rows(ds: xr.Dataset) -> tuple[Any, Any]:
    """Features and target of every cell."""
    X = features(ds).values
    return X.reshape(-1, X.shape[-1]), ds.y.transpose("time", "lat", "lon").values.ravel()


# ------------------------------------------------------------------ cases and sums


def keys() -> list[str]:
    """Return the names of all cases."""
    uses = ("interpolation", "region", "future", "stations")
    simulated = [f"simulated-{use}-{seed}" for use in uses for seed in range(SEEDS)]
    lasting = [f"lasting-{seed}" for seed in range(SEEDS)]
    real = [f"{cube}-{new}-{seed}" for cube in REAL for new in range(6) for seed in range(3)]
    models = [f"models-{today}-{seed}" for today in (24, 30, 36, 42) for seed in range(2)]
    return [*simulated, *lasting, *real, *models, "ranges", "shared_past"]


def run(key: str) -> dict[str, Any]:
    """Compute one case."""
    kind, *arguments = key.split("-")
    numbers = [int(text) for text in arguments if text.isdigit()]
    if kind == "simulated":
        return run_simulated(arguments[0], *numbers)
    if kind == "lasting":
        return run_lasting(*numbers)
    if kind in REAL:
        return run_real(kind, *numbers)
    if kind == "models":
        return run_models(*numbers)
    if kind == "ranges":
        return {cube: dict(estimate_range(REAL[cube][0](), "y")) for cube in REAL}
    return run_shared_past()


def rows(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each bar."""
    reports, natural = [], []
    for key, result in results.items():
        if key.startswith("simulated-"):
            natural.append((key.split("-")[1], result["natural"]["judgement"]))
            reports += [report for name, report in result.items() if name != "natural"]
    lasting = [result for key, result in results.items() if key.startswith("lasting-")]
    table = [
        _row(
            f"the report decides on {len(reports)} simulated splits",
            "80 %",
            _percent([report["judgement"] != "undecided" for report in reports]),
            0.8,
        )
    ]
    for word, bar, least, holds in (
        ("too easy", "85 % promise < 0.95 of the true error", 0.85, lambda p: p < 0.95),
        ("fits", "85 % promise 0.85 to 1.15 of it", 0.85, lambda p: 0.85 <= p <= 1.15),
        ("too hard", "90 % promise > 1.05 of it", 0.9, lambda p: p > 1.05),
    ):
        promises = [r["promised"] for r in reports if r["judgement"] == word]
        holding = [holds(promised) for promised in promises]
        table.append(_row(f'splits called "{word}"', bar, _percent(holding), least))
    inverted = sum(
        (report["judgement"] == "too easy" and report["promised"] > 1)
        or (report["judgement"] == "too hard" and report["promised"] < 1)
        for report in reports
    )
    claim = "too easy though it promises more than the true error, too hard though less"
    measured = f"{inverted} of {len(reports)}"
    table.append({"claim": claim, "bar": "none", "measured": measured, "met": not inverted})
    known = [report for report in reports if report["interval"] is not None]
    covered = []
    for report in known:
        low, high = map(float, report["interval"].split(" to "))
        covered.append(low <= report["promised"] <= high)
    claim = "nine in ten promises lie in the interval that the report gives"
    table.append(_row(claim, "85 %", _percent(covered), 0.85))
    for use in dict.fromkeys(use for use, _ in natural):
        fits = [word == "fits" for other, word in natural if other == use]
        table.append(_row(f"the natural split for {use} fits", "18 of 20", _count(fits), 0.9))
    easy = [result["random rows"]["judgement"] == "too easy" for result in lasting]
    claim = "random rows of a field that lasts are too easy"
    table.append(_row(claim, "17 of 20", _count(easy), 0.85))
    return table


def _row(claim: str, bar: str, measured: tuple[str, float], least: float) -> dict[str, Any]:
    text, fraction = measured
    return {"claim": claim, "bar": bar, "measured": text, "met": fraction >= least}


def _percent(holding: list[bool]) -> tuple[str, float]:
    fraction = float(np.mean(holding)) if holding else float("nan")
    return f"{100 * fraction:.0f} % of {len(holding)}", fraction


def _count(holding: list[bool]) -> tuple[str, float]:
    return f"{sum(holding)} of {len(holding)}", float(np.mean(holding)) if holding else 0.0


def summary(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return the numbers of `docs/explanation/honest_splits.md`; {} before all are run."""
    if set(keys()) - set(results):
        return {}
    sums: dict[str, Any] = {"shared_past": results["shared_past"], "ranges": results["ranges"]}
    for cube, (_, _, _, splits) in REAL.items():
        cases = [result for key, result in results.items() if key.startswith(f"{cube}-")]
        truth = {use: [case[use] for case in cases] for use in ("region", "future")}
        of_cube: dict[str, Any] = {
            "runs": len(cases),
            "truth": {use: pooled(errors) for use, errors in truth.items()},
        }
        for name in splits:
            promised = [case[name]["promised"] for case in cases]
            of_split: dict[str, Any] = {"promised": pooled(promised), "judgements": {}}
            for use, errors in truth.items():
                each = np.array(errors) / np.array(promised)
                of_split[f"{use}_ratio"] = pooled(errors) / pooled(promised)
                of_split[f"{use}_ratio_10_90"] = np.percentile(each, [10, 90]).tolist()
                words = [case[name][use] for case in cases if use in case[name]]
                of_split["judgements"][use] = {
                    word: words.count(word) for word in sorted(set(words))
                }
            of_cube[name] = of_split
        sums[cube] = of_cube
    sums["which_model"] = _sum_models(
        [result for key, result in results.items() if key.startswith("models-")]
    )
    return sums


def _sum_models(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the errors of models by split, and what choosing by each split costs in the future."""
    errors: dict[str, Any] = {
        name: {model: pooled([case[name][model] for case in cases]) for model in MODELS}
        for name in (*COMPARED, "future")
    }
    future = errors["future"]
    # Also between the two that differ in nothing but the date.
    pair = [model for model in MODELS if model.startswith("neighbours")]
    sums: dict[str, Any] = {**errors, "runs": len(cases)}
    for prefix, models in (("", list(MODELS)), ("neighbours_", pair)):
        best = min(future[model] for model in models)
        sums[f"{prefix}worse_by_percent"] = {
            name: 100 * (future[min(models, key=errors[name].__getitem__)] / best - 1)
            for name in COMPARED
        }
    return sums


def pooled(errors: list[float]) -> float:
    """Root of the mean square over runs."""
    return float(np.sqrt(np.mean(np.square(errors))))


def draw() -> None:
    """Draw the figures of the page: blocks, and distances of three splits and a new region."""
    from ml4cube.plotting import distance_curves, split_map

    sst, splits = open_sst(), REAL["sst"][3]
    part = sectors(sst)
    known = sst.assign_coords(sector=part)
    # Half of the band, which is 36 times as long as high; the label is the same at each time.
    shown = splits["blocks, buffer"](known, 1).sel(lon=slice(40, 220)).isel(time=0, drop=True)
    figure = split_map(
        shown.split.drop_vars("sector"), valid=shown.y.notnull(), title="Blocks with a buffer"
    )
    figure.savefig(FIGURES / "honest_blocks.png")
    curves = {}
    inside = known.isel(lon=np.flatnonzero(part.values != 3))
    elsewhere = sst.isel(lon=np.flatnonzero(part.values == 3))
    for name in ("random cells", "blocks", "region left out"):
        report = leakage_report(splits[name](inside, 1), elsewhere, var="y")
        by_curve = report.distances["space"][1]
        curves[name] = by_curve["test → train"]
        if name == "region left out":
            curves["the new region"] = by_curve["deployment → train"]
    figure = distance_curves(curves, title="Sea cells: how far is the nearest train cell?")
    figure.savefig(FIGURES / "honest_distances.png")
