"""Every Python block in the README and on the docs' pages runs, page by page, as a script.

The reader's cube is stood in for by an awkward one: a 360-day calendar, land gaps, dims in
an odd order. Scripts are unguarded, as people write them.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from tests.seeds.running import run_scripts

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def awkward_cube() -> xr.Dataset:
    """Monthly cube (lon, time, lat) of two inputs and a target, a quarter of it land."""
    rng = np.random.default_rng(0)
    shape = {"lon": 36, "time": 48, "lat": 24}
    time = xr.date_range("2000-01-16", periods=48, freq="30D", calendar="360_day", use_cftime=True)
    season = np.cos(2 * np.pi * np.arange(48) / 12)[None, :, None]
    lat = np.linspace(-57.5, 57.5, 24)
    lon = np.arange(36) * 10.0
    land = (np.cos(np.deg2rad(lon))[:, None] + np.sin(np.deg2rad(3 * lat))[None, :]) > 1.0
    t2m = (
        290 - 0.3 * np.abs(lat) + 8 * season * np.sign(lat) + rng.normal(size=tuple(shape.values()))
    )
    precip = np.exp(rng.normal(size=t2m.shape))
    ndvi = 0.02 * (t2m - 280) + 0.1 * np.log(precip) + 0.02 * rng.normal(size=t2m.shape)
    sea_or_gap = ~np.broadcast_to(land[:, None, :], t2m.shape)
    variables = {"t2m": (t2m, "K"), "precip": (precip, "mm"), "ndvi": (ndvi, "1")}
    return xr.Dataset(
        {
            name: (
                tuple(shape),
                np.where(sea_or_gap, values, np.nan).astype("float32"),
                {"units": units},
            )
            for name, (values, units) in variables.items()
        },
        coords={"lon": lon, "time": time, "lat": lat},
    ).chunk({"time": 12, "lat": 12, "lon": 12})


@pytest.mark.slow
def test_blocks_run(tmp_path):
    texts = {page.name: "\n".join(blocks(page)) for page in PAGES if blocks(page)}
    for name in texts:
        awkward_cube().to_zarr(tmp_path / name / "my_cube.zarr")
    run_scripts(tmp_path, texts)


@pytest.mark.slow
def test_blocks_run_on_the_cube_that_the_quickstart_makes(tmp_path):
    made = blocks(ROOT / "docs" / "quickstart.md")[0]
    pages = ["splits.md", "preprocessing.md", "sampling.md", "loading.md", "prediction.md"]
    texts = {page: "\n".join([made, *blocks(ROOT / "docs" / page)]) for page in pages}
    run_scripts(tmp_path, texts)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_block_says_what_it_is(page):
    fences = re.findall(r"^```(\S*)", page.read_text(), re.MULTILINE)
    opening = fences[::2]
    assert len(fences) % 2 == 0
    # bash and yaml: run by tests/cli/test_pages.py
    known = {
        "",
        "python",
        "bash",
        "yaml",
        "{toctree}",
        "{eval-rst}",
        "{figure}",
        "{image}",
        "{literalinclude}",
    }
    assert set(opening) <= known, opening


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_to_files_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", page.read_text())
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []
