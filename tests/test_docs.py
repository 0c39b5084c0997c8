"""Every Python block in README, CONTRIBUTING and the docs runs, page by page, as a script.

The reader's cube is stood in for by an awkward one: a 360-day calendar, land gaps, dims in
an odd order. Scripts are unguarded, as people write them.
"""

import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
import xarray as xr

from tests.seeds.running import run_scripts

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *(p for p in DOCS.rglob("*.md") if "_build" not in p.parts)])
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PROMISES = (DOCS / "reference" / "promises.md").read_text()
# The page that should be found first by a word.
FIRST = {
    "leak": "explanation/honest_splits.md",
    "forecast": "how_to/forecasts.md",
    "out of memory": "how_to/memory.md",
    "resume": "how_to/resume.md",
    "slurm": "how_to/clusters.md",
    "netcdf": "how_to/formats.md",
}
IDS = [page.relative_to(ROOT).as_posix() for page in PAGES]


def blocks(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def markdown(page: Path) -> str:
    if page.suffix == ".md":
        return page.read_text()
    cells = nbformat.read(page, as_version=4).cells
    return "\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def headings(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", markdown(page), flags=re.DOTALL | re.MULTILINE)
    return re.findall(r"^#+ (.+)", text, re.MULTILINE)


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
    texts = {
        name.replace("/", "-"): "\n".join(blocks(page))
        for name, page in zip(IDS, PAGES, strict=True)
        if blocks(page)
    }
    for name in texts:
        awkward_cube().to_zarr(tmp_path / name / "my_cube.zarr")
    run_scripts(tmp_path, texts)


@pytest.mark.slow
def test_blocks_run_on_the_cube_that_the_quickstart_makes(tmp_path):
    made = blocks(DOCS / "tutorials" / "quickstart.md")[0]
    pages = ["splits.md", "preprocessing.md", "sampling.md", "loading.md", "prediction.md"]
    texts = {page: "\n".join([made, *blocks(DOCS / "how_to" / page)]) for page in pages}
    run_scripts(tmp_path, texts)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_block_says_what_it_is(page):
    fences = re.findall(r"^```(\S*)", page.read_text(), re.MULTILINE)
    opening = fences[::2]
    assert len(fences) % 2 == 0
    # a {code-block} is code of another library, which is shown and not run; tests/cli/test_pages.py
    # runs bash and yaml
    known = {"", "python", "bash", "yaml", "{code-block}", "{toctree}", "{eval-rst}", "{figure}"}
    known |= {"{image}", "{literalinclude}"}
    assert set(opening) <= known, opening


@pytest.mark.parametrize("page", [*PAGES, *NOTEBOOKS], ids=lambda page: page.name)
def test_links_to_files_lead_somewhere(page):
    links = re.findall(r"\]\((?!https?:|#|mailto:)([^)#]+)", markdown(page))
    missing = [link for link in links if not (page.parent / link).exists()]
    assert missing == []


def test_every_picture_is_in_the_gallery():
    shown = set(re.findall(r"^:img-top: figures/(\S+)", (DOCS / "gallery.md").read_text(), re.M))
    assert shown == {path.name for path in (DOCS / "figures").iterdir()}


@pytest.mark.parametrize("word", FIRST)
def test_a_search_finds_the_right_page_first(word):
    """Searches rank titles and headings first, so no other page may have the word in one."""
    right = DOCS / FIRST[word]
    pages = [*PAGES, *NOTEBOOKS]
    found = {page for page in pages if any(word in heading.lower() for heading in headings(page))}
    assert found == {right}
    assert word in headings(right)[0].lower()


def test_the_tests_that_hold_the_promises_exist():
    named = re.findall(r"`(tests/[\w/]+\.py)::(?:(\w+)::)?(test_\w+)`", PROMISES)
    assert len(named) > 100
    missing = []
    for path, group, name in named:
        text = (ROOT / path).read_text()
        definition = rf"^class {group}:.*^    def {name}\(" if group else rf"^def {name}\("
        if not re.search(definition, text, re.MULTILINE | re.DOTALL):
            missing.append(f"{path}::{name}")
    assert missing == []


def test_every_promise_names_a_test():
    rows = re.findall(r"^\| .+", PROMISES, re.M)
    assert [row for row in rows if "test_" not in row and row != "| promise | tests |"] == []
