"""Compare two sample stores: cells and samples that both contain."""

from __future__ import annotations

import math
import os
from typing import Any, TypeGuard

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.fingerprint import (
    COLUMNS,
    FIRST,
    SECOND,
    combine,
    fingerprint_columns,
    words_of,
)
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.cube.coordinates import is_category
from ml4cube.cube.opening import as_dataset
from ml4cube.splits.folds.samples import Samples, origin_name, store_spec
from ml4cube.splits.leakage.findings import Findings, percent

# Cells whose fingerprints are computed at once.
_CELLS_AT_ONCE = 1 << 21
# Samples with fewer distinct values, added up over the variables, may be equal by chance.
_FEWEST_VALUES = 4


def open_cube_or_store(path_or_cube: Any) -> Any:
    """Open a path or URL; return anything else as it is."""
    if not isinstance(path_or_cube, str | os.PathLike):
        return path_or_cube
    cube = as_dataset(path_or_cube)
    if "ml4cube_format" not in cube.attrs:
        return cube
    # Every sample will be read, so a damaged file is refused now.
    from ml4cube.store.format import open_store

    return open_store(path_or_cube, verify=True)


def is_store(ds: object) -> TypeGuard[xr.Dataset]:
    """Return True if an object is an opened sample store."""
    return isinstance(ds, xr.Dataset) and SAMPLE_DIM in ds.dims and bool(store_spec(ds))


def part_of_pair(train: xr.Dataset, held_out: Any) -> str:
    """Return the part of the second of two stores ("test"); raise unless both have samples."""
    if not is_store(held_out):
        raise InvalidTypeError(
            "the second argument must be the opened test store because the first is a sample "
            f"store, got {type(held_out).__name__}"
        )
    part = str(held_out.attrs.get("part", "test"))
    for name, store in (("train", train), (part, held_out)):
        if not store.sizes[SAMPLE_DIM]:
            raise InvalidValueError(f"the {name} store must have samples, got none")
    return part


def check_stores(train: xr.Dataset, held_out: xr.Dataset, findings: Findings) -> None:
    """Judge two sample stores."""
    part, samples = findings.part, held_out.sizes[SAMPLE_DIM]
    shared, near = count_near(train, held_out) or (None, None)
    copies = count_copies(train, held_out)
    findings.compared = "" if copies is None else "samples"
    findings.tested = f"the {part} samples are looked for in the train store"
    findings.row("train samples", train.sizes[SAMPLE_DIM], "samples", "samples of the train store")
    findings.row(f"{part} samples", samples, "samples", f"samples of the {part} store")
    checks = [
        ("shared cells", shared, "cover a cell that a train sample covers", "leak"),
        ("duplicate samples", copies, "are bitwise copies of train samples", "leak"),
        ("touching samples", near, "touch a train sample or share a cell with it", "warning"),
    ]
    for name, number, text, status in checks:
        meaning = f"{part} samples that {text}"
        if number is None:
            findings.row(name, math.nan, "samples", meaning, 0, "unknown")
            continue
        findings.row(name, number, "samples", meaning, 0, status if number else "ok")
        findings.shares[text] = number / samples
        if number and (status == "leak" or not findings.leaks):
            findings.say(f"{percent(number / samples)} of the {part} samples {text}", status)
    if near is None:
        findings.warnings.append(
            "the positions of the samples were not compared because the stores were not cut "
            "alike from one cube"
        )


def count_near(train: xr.Dataset, held_out: xr.Dataset) -> tuple[int, int] | None:
    """Return how many held-out samples cover a cell of a train sample, and how many at least touch.

    None if the stores were not cut alike from one cube.
    """
    if not _one_cube(train, held_out):
        return None
    from scipy.spatial import KDTree

    spec, both = train.attrs["spec"], _join(train, held_out)
    # In units of the window size, samples share cells below a distance of 1, and touch at 1, give
    # or take `half_cell`. Along categories they do not touch: the unit is half a cell less, so that
    # neighbours are farther than 1 + `half_cell`.
    units = dict(zip(spec["dims"], spec["size"], strict=True))
    for dim in units:
        if is_category(dim, train.coords.get(origin_name(dim, train.coords))):
            units[dim] -= 0.5
    circle = both.view.lon_circle()
    periods = [0.0] * len(units)
    if circle and circle.dim in units:
        periods[list(units).index(circle.dim)] = circle.columns / units[circle.dim]
    origins = np.stack([both.origin[dim] / unit for dim, unit in units.items()], axis=-1)
    for axis, period in enumerate(periods):
        if period:
            origins[:, axis] %= period
    train_origins, held_out_origins = np.split(origins, [train.sizes[SAMPLE_DIM]])
    nearest = KDTree(train_origins, boxsize=periods).query(held_out_origins, p=np.inf)[0]
    half_cell = 0.5 / max(spec["size"])
    return int((nearest < 1 - half_cell).sum()), int((nearest < 1 + half_cell).sum())


def _join(train: xr.Dataset, held_out: xr.Dataset) -> Samples:
    """Return the positions of all samples, first those of `train`, in the cube of both."""
    coords = {
        name: (SAMPLE_DIM, np.concatenate([coord.values, held_out[name].values]), coord.attrs)
        for name, coord in train.coords.items()
        if name in held_out.coords and coord.dtype.kind in "fiu"
    }
    return Samples.locate(xr.Dataset({}, coords, train.attrs))


def _one_cube(train: xr.Dataset, held_out: xr.Dataset) -> bool:
    """Return True if equal positions of two stores are the same cells."""
    (spec, source), (other_spec, other_source) = (
        (store.attrs["spec"], (store.attrs.get("provenance") or {}).get("source"))
        for store in (train, held_out)
    )
    same_windows = all(spec[key] == other_spec[key] for key in ("dims", "shape", "size"))
    if source != other_source or not same_windows:
        return False
    return all(_same_coordinates(train, held_out, dim) for dim in spec["dims"])


def _same_coordinates(train: xr.Dataset, held_out: xr.Dataset, dim: str) -> bool:
    """Return True if equal positions along a dim have equal coordinates."""
    name = origin_name(dim, train.coords)
    if name not in train.coords or name not in held_out.coords:
        return name not in train.coords and name not in held_out.coords
    at_position = []
    for store in (train, held_out):
        positions, first = np.unique(store[f"{dim}_index"].values, return_index=True)
        at_position.append(dict(zip(positions.tolist(), store[name].values[first], strict=True)))
    ours, theirs = at_position
    return all(ours[i] == theirs[i] for i in ours.keys() & theirs.keys())


def count_copies(train: xr.Dataset, held_out: xr.Dataset) -> int | None:
    """Return the number of held-out samples that equal a train sample in all variables.

    None if samples have too few distinct values to tell.
    """
    names = [
        str(name)
        for name, variable in train.data_vars.items()
        if name in held_out
        and variable.dtype.kind in "biufmM"
        and SAMPLE_DIM in variable.dims
        and {**variable.sizes, SAMPLE_DIM: 0} == {**held_out[name].sizes, SAMPLE_DIM: 0}
    ]
    if not names:
        raise InvalidValueError(
            "the stores must have a variable in common, with windows of the same shape, got "
            f"{_window_shapes(train)} and {_window_shapes(held_out)}"
        )
    train_prints, _ = _fingerprints([train[name] for name in names])
    prints, distinct = _fingerprints([held_out[name] for name in names])
    if distinct.any():
        return int(np.isin(prints[distinct], train_prints).sum())
    return None


def _window_shapes(store: xr.Dataset) -> dict[str, dict[str, int]]:
    return {
        str(name): {str(dim): n for dim, n in variable.sizes.items() if dim != SAMPLE_DIM}
        for name, variable in store.data_vars.items()
    }


def _fingerprints(variables: list[xr.DataArray]) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return a fingerprint of each sample, and whether its values are distinct enough."""
    tables = []
    n_values = np.zeros(variables[0].sizes[SAMPLE_DIM], dtype=np.int64)
    for variable in variables:
        variable = variable.transpose(SAMPLE_DIM, ...)
        n, *window = variable.shape
        offsets = [np.arange(size) for size in window]
        table = np.zeros((n, COLUMNS), dtype=np.uint64)
        step = max(_CELLS_AT_ONCE // max(int(np.prod(window)), 1), 1)
        for start in range(0, n, step):
            some = slice(start, start + step)
            values = np.asarray(variable.isel({SAMPLE_DIM: some}).values)
            for column, words in enumerate(fingerprint_columns(values, offsets)):
                table[some, column] = words.reshape(len(words), -1).sum(-1, dtype=np.uint64)
            words, is_value = words_of(values)
            cells = np.sort(words.reshape(len(values), -1), axis=-1)
            n_changes = (cells[:, 1:] != cells[:, :-1]).sum(-1)
            # A window with a single value in all its cells counts as none.
            is_point = cells.shape[1] == 1 and is_value.reshape(len(values))
            n_values[some] += np.where(n_changes > 0, n_changes + 1, is_point)
        tables.append(table)
    # Both hashes of a sample are joined to one sortable value.
    pairs = np.ascontiguousarray(combine(tables)[:, [FIRST, SECOND]])
    prints = pairs.view([("first", np.uint64), ("second", np.uint64)]).ravel()
    return prints, n_values >= _FEWEST_VALUES
