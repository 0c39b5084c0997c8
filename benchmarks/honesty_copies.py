"""Does the leakage report find planted copies, and does it accuse clean cubes?

Monthly fields with an annual cycle, split forward with a gap where a case says nothing else. A case
is one plant, or one clean cube, with one seed; the report must name a plant by its kind.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.splits import (
    assign_block_split,
    assign_rand_split,
    assign_region_split,
    assign_time_split,
    leakage_report,
)

STEPS, ROWS, COLUMNS = 120, 32, 40
TRAIN_STEPS = 84
SEEDS = 3
Floats = NDArray[np.float64]
Maker = Callable[[int], xr.Dataset]


def smooth_noise(rng: np.random.Generator, rows: int, columns: int, reach: float) -> Floats:
    """Draw one Gaussian field of unit variance with the covariance exp(-3 h / reach)."""
    y = np.minimum(np.arange(2 * rows), 2 * rows - np.arange(2 * rows))
    x = np.minimum(np.arange(2 * columns), 2 * columns - np.arange(2 * columns))
    covariance = np.exp(-3 * np.hypot(y[:, None], x) / reach)
    power = np.maximum(np.fft.fft2(covariance).real, 0.0)
    noise = np.fft.fft2(rng.normal(size=power.shape))
    return np.fft.ifft2(noise * np.sqrt(power)).real[:rows, :columns]


def drifting_fields(seed: int, steps: int = STEPS, reach: float = 5.0) -> Floats:
    """Draw fields that follow one another by an AR(1) process of range three steps."""
    rng = np.random.default_rng(seed)
    memory = np.exp(-3 / 3)
    fields = [smooth_noise(rng, ROWS, COLUMNS, reach)]
    while len(fields) < steps:
        fresh = smooth_noise(rng, ROWS, COLUMNS, reach)
        fields.append(memory * fields[-1] + np.sqrt(1 - memory**2) * fresh)
    return np.stack(fields)


def as_cube(values: NDArray[Any], **others: NDArray[Any]) -> xr.Dataset:
    """Return a monthly cube with the variable `y` and more."""
    coords = {
        "time": np.datetime64("2000-01", "M").astype("datetime64[ns]")
        if len(values) == 1
        else np.arange("2000-01", STEPS, dtype="datetime64[M]").astype("datetime64[ns]"),
        "lat": np.linspace(60, -18, ROWS),
        "lon": np.linspace(0, 97.5, COLUMNS),
    }
    dims = ("time", "lat", "lon")
    variables = {name: (dims, field) for name, field in {"y": values, **others}.items()}
    return xr.Dataset(variables, coords)


def annual_cycle(amplitude: float = 8.0) -> Floats:
    """Return a cycle that is stronger in the north, for every month and row."""
    months = np.arange(STEPS)[:, None, None]
    strength = np.linspace(1.0, 0.3, ROWS)[:, None]
    return amplitude * strength * np.cos(2 * np.pi * months / 12) * np.ones(COLUMNS)


def temperatures(seed: int) -> Floats:
    """Return the fields that most cases begin with, in kelvin."""
    return 280 + 5 * drifting_fields(seed) + annual_cycle()


def forward(values: NDArray[Any], gap: int = 6, **others: NDArray[Any]) -> xr.Dataset:
    """Split forward in time, the first 70 % to train."""
    return assign_time_split(as_cube(values, **others), 0.7, gap=gap)


def copied_months(seed: int, change: Callable[[Floats, np.random.Generator], Floats]) -> xr.Dataset:
    """Put 24 changed train months into the test part."""
    values = temperatures(seed)
    values[-24:] = change(values[12:36].copy(), np.random.default_rng(seed + 1000))
    return forward(values.astype("float32"))


def ten_steps(seed: int) -> xr.Dataset:
    values = temperatures(seed)
    values[-10:] = values[20:30]
    return forward(values)


def patch(seed: int, rows: int, columns: int) -> xr.Dataset:
    values = temperatures(seed)
    place = (slice(8 + rows, 24 + rows), slice(10 + columns, 26 + columns))
    values[(slice(-6, None), *place)] = values[30:36, 8:24, 10:26]
    return forward(values)


def years_again(seed: int) -> xr.Dataset:
    values = temperatures(seed)
    values[-30:] = values[-66:-36]
    return forward(values)


def means_of_neighbours(seed: int) -> xr.Dataset:
    values = temperatures(seed)
    values[1:-1:2] = (values[:-2:2] + values[2::2]) / 2
    cube = as_cube(values)
    odd = (np.arange(STEPS) % 2).astype(bool)
    return cube.assign(split=("time", np.where(odd, 0, 1).astype("uint8")))


def upsampled(seed: int) -> xr.Dataset:
    coarse = as_cube(temperatures(seed)).isel(lat=slice(0, None, 4), lon=slice(0, None, 4))
    fine = as_cube(temperatures(seed))
    fine["y"] = coarse["y"].interp(lat=fine.lat, lon=fine.lon, kwargs={"fill_value": "extrapolate"})
    return assign_block_split(fine, {"lat": 8, "lon": 8}, 0.7, buffer=1, seed=seed)


def with_predictor(seed: int, make: Callable[[Floats], Floats]) -> xr.Dataset:
    values = temperatures(seed)
    return forward(values, x=make(values))


def all_years(values: Floats) -> Floats:
    by_year = values.reshape(-1, 12, ROWS, COLUMNS)
    return np.broadcast_to(by_year.mean(axis=0), by_year.shape).reshape(values.shape)


def train_years(values: Floats) -> Floats:
    by_year = values.reshape(-1, 12, ROWS, COLUMNS)
    mean = by_year[: TRAIN_STEPS // 12].mean(axis=0)
    return np.broadcast_to(mean, by_year.shape).reshape(values.shape)


def carried(seed: int, share: float) -> xr.Dataset:
    values = temperatures(seed)
    places = np.random.default_rng(seed + 1000).random((ROWS, COLUMNS)) < share
    values[TRAIN_STEPS - 6 :, places] = values[TRAIN_STEPS - 7, places]
    return forward(values)


def standardised(seed: int) -> xr.Dataset:
    values = temperatures(seed)
    return forward((values - values.mean(axis=0)) / values.std(axis=0))


def running_mean(values: Floats) -> Floats:
    padded = np.concatenate([values[:6], values, values[-5:]])
    return np.lib.stride_tricks.sliding_window_view(padded, 12, axis=0).mean(axis=-1)


def random_without_recipe(seed: int) -> xr.Dataset:
    cube = assign_rand_split(as_cube(temperatures(seed)), 0.7, seed=seed)
    cube["split"].attrs.clear()
    return cube


def checkerboard(seed: int) -> xr.Dataset:
    cube = as_cube(temperatures(seed))
    board = (np.arange(ROWS)[:, None] + np.arange(COLUMNS)) % 2
    return cube.assign(split=(("lat", "lon"), board.astype("uint8")))


def half_resolution(values: Floats, _: np.random.Generator) -> Floats:
    coarse = values.reshape(-1, ROWS // 2, 2, COLUMNS // 2, 2).mean(axis=(2, 4))
    return coarse.repeat(2, axis=1).repeat(2, axis=2)


def one_ulp(values: Floats, _: np.random.Generator) -> Floats:
    return np.nextafter(values.astype("float32"), np.float32(np.inf)).astype("float64")


# Each plant, and a word of the sentence that names its kind.
PLANTS: dict[str, tuple[str, Maker]] = {
    "ten steps": ("are bitwise copies", ten_steps),
    "patch": ("copies of", lambda seed: patch(seed, 0, 0)),
    "moved patch": ("copies of", lambda seed: patch(seed, 3, 1)),
    "years again": ("are bitwise copies", years_again),
    "means of neighbours": ("interpolated", means_of_neighbours),
    "upsampled": ("interpolated", upsampled),
    "in °C": ("contains the target", lambda s: with_predictor(s, lambda y: y - 273.15)),
    "predictor is target": ("contains the target", lambda s: with_predictor(s, np.copy)),
    "climatology of all years": ("mean of all years", lambda s: with_predictor(s, all_years)),
    "carried": ("adjacent", lambda seed: carried(seed, 1.0)),
    "carried at 30 %": ("adjacent", lambda seed: carried(seed, 0.3)),
    "standardised by all years": ("statistics of all", standardised),
    "noise of 0.01 K": (
        "are near copies",
        lambda s: copied_months(s, lambda y, rng: y + 0.01 * rng.normal(size=y.shape)),
    ),
    "running mean": ("running mean", lambda s: forward(running_mean(temperatures(s)), gap=0)),
    "running mean as predictor": (
        "contains the target",
        lambda s: with_predictor(s, running_mean),
    ),
    "random cells": (
        "at random",
        lambda s: assign_rand_split(as_cube(temperatures(s)), 0.7, seed=s),
    ),
    "random cells without recipe": ("at random", random_without_recipe),
    "checkerboard": ("touch a train", checkerboard),
    "next month as predictor": (
        "contains the target",
        lambda s: with_predictor(s, lambda y: np.concatenate([y[1:], y[:1]])),
    ),
    "noise of 1e-4": (
        "are near copies",
        lambda s: copied_months(s, lambda y, rng: y * (1 + 1e-4 * rng.normal(size=y.shape))),
    ),
    "half resolution": ("are near copies", lambda s: copied_months(s, half_resolution)),
    "flipped": ("are near copies", lambda s: copied_months(s, lambda y, _: y[:, ::-1])),
    "in °F": ("are near copies", lambda s: copied_months(s, lambda y, _: y * 1.8 - 459.67)),
    "one ulp": ("are near copies", lambda s: copied_months(s, one_ulp)),
}


def region_with_buffer(seed: int) -> xr.Dataset:
    cube = as_cube(temperatures(seed))
    regions = xr.DataArray((np.arange(COLUMNS) >= 28).astype(int), dims="lon")
    return assign_region_split(cube, regions, test=[1], buffer={"lon": 4})


def blocks_with_buffer(values: NDArray[Any], seed: int) -> xr.Dataset:
    return assign_block_split(
        as_cube(values), {"lat": 8, "lon": 8}, 0.7, buffer={"lat": 4, "lon": 4}, seed=seed
    )


def rain_beside(seed: int) -> xr.Dataset:
    rain = np.maximum(drifting_fields(seed + 500) - 0.52, 0.0)
    return forward(temperatures(seed), rain=rain)


def static_and_train_climatology(seed: int) -> xr.Dataset:
    values = temperatures(seed)
    static = np.broadcast_to(drifting_fields(seed + 500, steps=1), values.shape)
    return forward(values, height=static, normal=train_years(values))


def half_land(seed: int) -> xr.Dataset:
    values = temperatures(seed)
    land = smooth_noise(np.random.default_rng(seed + 500), ROWS, COLUMNS, 12.0) > 0
    return forward(np.where(land, np.nan, values))


def five_classes(seed: int) -> xr.Dataset:
    return forward(np.digitize(drifting_fields(seed), [-1, -0.3, 0.3, 1]).astype("int8"))


def sea_ice(seed: int) -> xr.Dataset:
    return forward(np.clip(0.5 + drifting_fields(seed) + annual_cycle(0.5), 0, 1))


def white_noise(seed: int) -> xr.Dataset:
    values = np.random.default_rng(seed).normal(size=(STEPS, ROWS, COLUMNS))
    return blocks_with_buffer(values, seed)


def land_use(seed: int) -> xr.Dataset:
    yearly = np.digitize(drifting_fields(seed, steps=STEPS // 12), [-1, 0, 1]).astype("int8")
    return forward(yearly.repeat(12, axis=0), gap=0)


CLEAN: dict[str, Maker] = {
    "forward with gap": lambda seed: forward(temperatures(seed)),
    "region with buffer": region_with_buffer,
    "blocks with buffer": lambda seed: blocks_with_buffer(temperatures(seed), seed),
    "rain beside": rain_beside,
    "static field and train climatology": static_and_train_climatology,
    "half land": half_land,
    "five classes": five_classes,
    "sea ice": sea_ice,
    "whole kelvins": lambda seed: forward(np.round(temperatures(seed))),
    "white noise": white_noise,
    "land use by year": land_use,
}


def keys() -> list[str]:
    """Return the names of the cases."""
    names = [f"plant: {name}" for name in PLANTS] + [f"clean: {name}" for name in CLEAN]
    return [f"{name}, seed {seed}" for seed in range(SEEDS) for name in names]


def run(key: str) -> dict[str, Any]:
    """Return what the report says of one cube."""
    case, _, seed = key.rpartition(", seed ")
    group, _, name = case.partition(": ")
    make = PLANTS[name][1] if group == "plant" else CLEAN[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        report = leakage_report(make(int(seed)), var="y")
    sentences = " ".join((report.verdict, *report.findings))
    named = group == "plant" and PLANTS[name][0] in sentences
    return {"named": named, "leaks": report.leaks, "verdict": report.verdict}


def rows(results: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the bars: plants named, clean cubes accused."""
    plants = {key: case["named"] for key, case in results.items() if key.startswith("plant")}
    accused = [key for key, case in results.items() if key.startswith("clean") and case["leaks"]]
    by_plant = {name: [plants[k] for k in plants if f": {name}, " in k] for name in PLANTS}
    found = sum(all(of_seeds) for of_seeds in by_plant.values() if of_seeds)
    missed = [name for name, of_seeds in by_plant.items() if of_seeds and not all(of_seeds)]
    return [
        {
            "claim": "planted copies named by kind, with every seed",
            "bar": "≥ 20 of 24",
            "measured": f"{found} of {len(PLANTS)}" + (f"; not {', '.join(missed)}" * bool(missed)),
            "met": found >= 20,
        },
        {
            "claim": "clean cubes accused",
            "bar": "0 of 11",
            "measured": f"{len(accused)}{': ' * bool(accused)}{'; '.join(accused)}",
            "met": not accused,
        },
    ]
