"""Samples in words: how they are cut, and the outcomes of all windows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ml4cube.core.display import Table, bytes_text, shown
from ml4cube.core.sample_spec import SampleSpec

_DROPPED = {
    "auto": "samples with a gap are dropped",
    "if_all_nan": "samples whose variables are all gap are dropped",
    "masked": "samples without a cell inside the mask, or with a gap there, are dropped",
    None: "kept",
}


def cutting_facts(spec: SampleSpec) -> dict[str, object]:
    """Return cube, windows, and the treatment of gaps and masked cells."""
    sizes = zip(spec.dims, spec.size, spec.overlap, strict=True)
    window = {
        dim: f"{cells:,} (overlap {shared:,})" if shared else cells
        for dim, cells, shared in sizes
        if cells > 1
    }
    mask = None
    if spec.filter_var is not None:
        uses = {"drops samples": spec.mask_drops_samples, "makes gaps": spec.mask_makes_gaps}
        mask = f"{spec.filter_var}, {'; '.join(use for use, does in uses.items() if does)}"
    return {
        "Cube": dict(zip(spec.dims, spec.shape, strict=True)),
        "Window": window or "single cells",
        "Gaps": "; ".join([_DROPPED[spec.drop_nan], *_fills(spec)]),
        "Mask": mask,
    }


def _fills(spec: SampleSpec) -> list[str]:
    names: dict[str, list[str]] = {}
    for name in spec.variables:
        if (method := spec.fill_of(name)) is not None:
            names.setdefault(method, []).append(name)
    return [f"filled by {method!r}: {shown(filled)}" for method, filled in names.items()]


def variable_facts(
    features: Collection[str], targets: Collection[str], units: Mapping[str, Any]
) -> dict[str, object]:
    """Return features and targets with their units; without targets, all are variables."""

    def with_units(names: Collection[str]) -> list[str]:
        return [f"{name} ({units[name]})" if units.get(name) else name for name in names]

    if not targets:
        return {"Variables": with_units(features)}
    return {"Features": with_units(features), "Targets": with_units(targets)}


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
