"""Make the pictures of docs/figures: from the output of the demo, and of all plots on real data.

The pictures of docs/explanation/honest_splits.md come with its numbers, from
``benchmarks/honesty.py --draw``.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Callable
from pathlib import Path

import iris_sample_data
import numpy as np
import xarray as xr
from matplotlib.figure import Figure

from ml4cube.evaluation import evaluate
from ml4cube.insights import get_insights
from ml4cube.plotting import difference_map, field_map, plot_insights, split_map, time_maps
from ml4cube.splits import assign_block_split, assign_time_split, leakage_report

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
OF_DEMO = {"maps": "demo_maps", "split_map": "demo_split", "loss_curve": "demo_loss"}


def open_air() -> xr.DataArray:
    """Open yearly air temperatures over North America, 1860 to 2099."""
    path = Path(iris_sample_data.path) / "A1B_north_america.nc"
    with xr.open_dataset(path) as ds:
        air = ds["air_temperature"].load()
    return air.drop_vars([name for name in air.coords if name not in air.dims])


def open_ocean() -> xr.DataArray:
    """Open sea surface temperatures on the curvilinear grid of an ocean model."""
    path = Path(iris_sample_data.path) / "NEMO" / "nemo_1m_20150101-20150201_grid-T.nc"
    with xr.open_dataset(path) as ds:
        sst = ds["tos"].squeeze(drop=True).load()
    return sst.where(sst != 0)


def open_sea() -> xr.Dataset:
    """Open monthly sea surface temperatures along the equator."""
    return xr.open_dataset(Path(iris_sample_data.path) / "ostia_monthly.nc")[
        ["surface_temperature"]
    ]


def plots() -> dict[str, Callable[[], Figure]]:
    """Return what draws each picture of docs/how_to/plotting.md and insights.md."""
    air = open_air()
    cube = air.to_dataset(name="air")
    blocks = {"latitude": 8, "longitude": 8, "time": 40}
    in_blocks = assign_block_split(cube, blocks, 0.7, val=0.1)
    in_time = assign_time_split(cube, 0.6, val=0.1)
    # a forecast of one to three years ahead: the mean of the last five years
    starts, leads = np.arange(170, 230), np.arange(1, 4)
    means = cube.rolling(time=5).mean().isel(time=("init_time", starts))
    forecast = means.expand_dims(lead_time=leads, axis=1).assign_coords(
        init_time=air.time.values[starts],
        valid_time=(("init_time", "lead_time"), air.time.values[starts[:, None] + leads]),
    )
    card = evaluate(
        forecast.drop_vars("time", errors="ignore"), in_time,
        baselines=["persistence", "climatology"], by="lead_time", progress=False,
    )  # fmt: skip
    return {
        "field": lambda: field_map(open_ocean(), title="January 2015"),
        "difference": lambda: difference_map(
            air[-10:].mean("time", keep_attrs=True), air[:10].mean("time", keep_attrs=True),
            title="2090 to 2099 minus 1860 to 1869",
        ),
        "time": lambda: time_maps(air),
        "split": lambda: split_map(in_blocks, steps=[0, 80, 160], title="Blocks in space and time"),
        "leakage": leakage_report(in_blocks, var="air").plot,
        "scorecard": card.plot,
        "insights": lambda: plot_insights(
            get_insights(open_sea(), sample_size={"time": 12, "latitude": 6, "longitude": 6})
        ),
    }  # fmt: skip


def main() -> None:
    """Copy the pictures of a demo, if given, and draw the others."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--demo", type=Path, help="output of `make demo`, to copy its pictures")
    args = parser.parse_args()
    for theirs, ours in OF_DEMO.items() if args.demo else ():
        shutil.copy(args.demo / f"{theirs}.png", FIGURES / f"{ours}.png")
    for name, draw in plots().items():
        draw().savefig(FIGURES / f"plot_{name}.png", dpi=110)
        print(f"plot_{name}.png", flush=True)


if __name__ == "__main__":
    main()
