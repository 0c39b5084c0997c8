"""Samples in words: their variables, their split, and the outcomes of all windows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ml4cube.core.display import Table, bytes_text, shown

#: Dim of the samples in arrays of many, unless a user names another.
SAMPLE_DIM = "samples"


def variable_facts(
    features: Collection[str], targets: Collection[str], units: Mapping[str, Any]
) -> dict[str, object]:
    """Return features and targets with their units; without targets, all are variables."""

    facts: dict[str, object] = {}
    labels = ("Features", "Targets") if targets else ("Variables",)
    for label, names in zip(labels, (features, targets), strict=False):
        texts = {name: f"{name} ({units[name]})" for name in names if units.get(name)}
        facts[label] = [texts.get(name, name) for name in names]
    return facts


def split_text(recipe: Mapping[str, Any]) -> str | None:
    """Return the split of a recipe in words: its function, fractions and blocks."""
    plan = recipe.get("plan", {})
    if not plan.get("fractions"):
        return None
    parts = ", ".join(f"{part} {fraction:.0%}" for part, fraction in plan["fractions"].items())
    text = f"{recipe.get('made_by', 'by hand')}, {parts}"
    grid = plan.get("grid", {"dims": (), "shape": (), "tile": ()})
    sizes = zip(grid["dims"], grid["shape"], grid["tile"], strict=True)
    blocks = {dim: tile for dim, n, tile in sizes if tile < n}
    if blocks:
        return f"{text}, blocks of {shown(blocks)}"
    return text


def outcome_table(
    accounting: Mapping[str, int], parts: Collection[str], sample_bytes: int | None = None
) -> Table:
    """Return the windows of each part and those dropped, by reason."""
    total = max(accounting["total"], 1)
    rows: list[tuple[object, ...]] = []
    for name, n in sorted(accounting.items(), key=lambda item: item[0] not in parts):
        if name == "total" or not (n or name in parts):
            continue
        label = f"{name} samples" if name in parts else f"dropped: {name}"
        size = None
        if name in parts and sample_bytes:
            size = bytes_text(n * sample_bytes)
        rows.append((label, n, f"{n / total:.1%}", size))
    columns = ("", "windows", "of all", "before compression")
    if sample_bytes is None:
        return Table(columns[:-1], [row[:-1] for row in rows])
    return Table(columns, rows)
