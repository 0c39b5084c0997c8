"""The page about what numbers promise has the table that was measured."""

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "explanation" / "what_numbers_promise.md").read_text()
BARS = json.loads((ROOT / "benchmarks" / "results" / "honesty.json").read_text())["bars"]


def test_every_bar_is_on_the_page_as_it_was_measured():
    assert {bar["part"] for bar in BARS} >= {
        "areas",
        "climatology",
        "copies",
        "intervals",
        "splits",
    }
    rows = [
        "| {claim} | {bar} | {measured} | {met} |".format(
            **{**bar, "met": "yes" if bar["met"] else "**no**"}
        )
        for bar in BARS
    ]
    assert rows == [line for line in PAGE.splitlines() if line.startswith("| ")][1:]
