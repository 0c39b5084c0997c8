"""`inspect`: what is in a cube, from its metadata and one pass for gaps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ml4cube.cli.command import Command
from ml4cube.cli.inputs import OpenCube
from ml4cube.cli.task import Keep, Report, Task, as_table
from ml4cube.core.errors import InvalidTypeError, InvalidValueError

if TYPE_CHECKING:
    import xarray as xr

# A source with so many chunks of fewer bytes than this is slow to read.
_MANY_CHUNKS, _SMALL_CHUNK_BYTES = 10_000, 2**16

Rows = list[dict[str, Any]]


def inspect(
    cube: str,
    /,
    *,
    gaps: bool = True,
    open_cube: OpenCube,
) -> Task:
    """Show what is in a cube, what will be awkward, and what to do about it.

    Dims with their roles, variables with their chunks and gaps, the calendar, the split label.

    Parameters
    ----------
    cube : path or URL
        The cube: zarr or netCDF.
    gaps : bool
        Whether to count gaps, for which all variables of floats are read once, block by block.
    """
    ds = open_cube(cube)

    def run(keep: Keep) -> Report:
        return _report(cube, ds, gaps)

    plan = Report.of(cube=cube, gaps=gaps, megabytes=ds.nbytes / 1e6)
    return Task(lambda: plan, run)


def _report(cube: str, ds: xr.Dataset, count_gaps: bool) -> Report:
    from ml4cube.cube.variables import cube_dims, cube_variables, split_label

    notes: list[str] = []
    held: list[str] = []
    left_out: dict[str, str] = {}
    cells: Sequence[str] = [str(dim) for dim in ds.dims]
    try:
        cells, (held, left_out) = cube_dims(ds), cube_variables(ds)
    except InvalidValueError as error:
        notes.append(str(error))
    dims = [_describe_dim(ds, dim) for dim in cells]
    rows = [_describe_variable(ds, name) for name in held]
    if count_gaps:
        _add_gaps(ds, rows, notes)
    label = split_label(ds)
    notes += [*_notes_on_dims(ds, dims), *_notes_on_variables(ds, rows)]
    if "ml4cube_format" in ds.attrs:
        notes.append("this is a sample store, not a cube: ml4cube doctor checks it")
    elif label is None:
        notes.append("no split label: ml4cube split writes the recipe of one")
    values = {
        "cube": cube,
        "megabytes": ds.nbytes / 1e6,
        "dims": dims,
        "variables": rows,
        "left_out": left_out,
        "split_label": label,
        "notes": notes,
    }
    blocks = [
        f"{cube}: {ds.nbytes / 1e6:,.1f} MB decoded, split label: {label}",
        as_table(dims),
        as_table(map(_with_percent, rows)),
        as_table([{"left out": name, "reason": why} for name, why in left_out.items()]),
        "\n".join(f"- {note}" for note in notes),
    ]
    return Report(values, "\n\n".join(filter(None, blocks)))


def _with_percent(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a variable with its gaps in percent."""
    counted = [name for name in ("gaps", "infinite") if row.get(name) is not None]
    return row | {name: f"{100 * row[name]:.3g} %" for name in counted}


def _describe_dim(ds: xr.Dataset, dim: str) -> dict[str, Any]:
    """Describe a dim by the coordinate that has its name, or by the dates along it."""
    from ml4cube.core.axes import is_time
    from ml4cube.cube.coordinates import dates_along, is_category, role_of

    coord = ds[dim] if dim in ds.coords else dates_along(ds.coords.values(), dim)
    row: dict[str, Any] = {"dim": dim, "size": ds.sizes[dim]}
    if coord is None:
        return {**row, "role": "category" if is_category(dim, None) else None}
    role = role_of(coord) or ("category" if is_category(dim, coord) else None)
    row |= {"role": role, "first": None, "last": None, "step": None, "calendar": None}
    if coord.size:
        row |= {"first": _shown(coord.values[0]), "last": _shown(coord.values[-1])}
    if is_time(coord):
        row["calendar"] = coord.dt.calendar
    if coord.dtype.kind in "iuf" or is_time(coord):
        row["step"] = _step(coord)
    return row


def _shown(value: Any) -> Any:
    """Return a number as it is, a date without its zeros, and everything else as text."""
    plain = value
    if hasattr(value, "item") and value.dtype.kind in "iuf":
        plain = value.item()
    if isinstance(plain, int | float):
        return plain
    return str(plain).removesuffix(".000000000")


def _step(coord: Any) -> str | None:
    """Return the step between cells: "0.25", "1 days", or the least and largest."""
    import numpy as np

    from ml4cube.core.axes import is_time
    from ml4cube.splits.cube import microseconds

    if coord.size < 2 or coord.isnull().any():
        return None
    is_date = is_time(coord)
    places = microseconds(coord) / 8.64e10 if is_date else coord.values.astype(np.float64)
    steps = np.diff(places)
    least, most = float(steps.min()), float(steps.max())
    # numbers may have been rounded to 32 bits
    rounding = 0.0
    if not is_date:
        rounding = 1e-6 * float(np.abs(places).max())
    is_regular = math.isclose(least, most, rel_tol=1e-3, abs_tol=rounding)
    step = f"{most:.6g}" if is_regular else f"{least:.6g} to {most:.6g}"
    if is_date:
        return f"{step} days"
    return step


def _describe_variable(ds: xr.Dataset, name: str) -> dict[str, Any]:
    from ml4cube.cube.chunks.blocks import source_chunks

    variable = ds[name].variable
    chunks = source_chunks(variable)
    return {
        "variable": name,
        "dtype": str(variable.dtype),
        "dims": list(map(str, variable.dims)),
        "units": variable.attrs.get("units"),
        "megabytes": variable.nbytes / 1e6,
        "chunks": chunks or None,
        "chunk_megabytes": math.prod(chunks.values()) * variable.dtype.itemsize / 1e6
        if chunks
        else None,
    }


def _add_gaps(ds: xr.Dataset, rows: Rows, notes: list[str]) -> None:
    """Count gaps and infinite cells of float variables, in one pass over each."""
    from ml4cube.preprocessing import Statistics

    for row in rows:
        name = row["variable"]
        row["gaps"] = row["infinite"] = None
        if ds[name].dtype.kind != "f":
            continue
        try:
            counted = Statistics.from_cube(ds, [name], split=None)[name]
        except (InvalidValueError, InvalidTypeError) as error:
            notes.append(str(error))
            continue
        cells = counted.count + counted.gaps + counted.infs
        row |= {"gaps": counted.gaps / cells, "infinite": counted.infs / cells}


def _notes_on_dims(ds: xr.Dataset, dims: Rows) -> Iterator[str]:
    from ml4cube.cube.coordinates import find_time_dim, role_of

    roles = {role_of(coord) for coord in ds.coords.values()}  # also those along several dims
    for row in dims:
        dim, step, role = row["dim"], row.get("step"), row["role"]
        if role == "time" and step and " to " in step:
            if step.startswith("-") or step.startswith("0 "):
                yield f"{dim!r} is not in increasing order or has equal dates; sort it: ds.sortby"
            else:
                yield f"{dim!r} has steps of {step}: lead times count steps, not days"
        if dim in ds.coords and ds[dim].isnull().any():
            yield f"{dim!r} has missing values in its coordinate; fill or drop them"
        if "first" not in row and role is None:
            yield f"{dim!r} has no coordinate: cells are numbered, buffers count cells"
    if find_time_dim(ds.coords.values(), ds.dims) is None:
        yield "no dim is the time: give its coordinate dates, or the attribute standard_name='time'"
    if not {"latitude", "longitude"} <= roles:
        yield (
            "no coordinates are latitude and longitude: no buffers in km, no areas of cells; if "
            "there are some, give them the attribute standard_name"
        )


def _notes_on_variables(ds: xr.Dataset, rows: Rows) -> Iterator[str]:
    from ml4cube.core.statistics import check_decoded
    from ml4cube.preprocessing.cubes import nodata_values, valid_range
    from ml4cube.sampling.sampled_cube import MAX_CHUNK_MB

    for row in rows:
        name, chunk_mb = row["variable"], row["chunk_megabytes"]
        try:
            check_decoded(name, ds[name])
        except InvalidValueError as error:
            yield str(error)
        if nodata := nodata_values(ds[name]):
            yield f"{name!r} has attributes for gaps, {nodata}, which xarray does not apply"
        low, high = valid_range(ds[name])
        if math.isfinite(low) or math.isfinite(high):
            yield f"{name!r} is valid from {low:g} to {high:g}; other values are no gaps by this"
        if chunk_mb is not None and chunk_mb > MAX_CHUNK_MB:
            yield (
                f"chunks of {name!r} have {chunk_mb:,.0f} MB, and a worker holds some; rechunk the "
                "cube, or raise --max-chunk-mb of ml4cube sample"
            )
        small = chunk_mb is not None and chunk_mb * 1e6 < _SMALL_CHUNK_BYTES
        if small and row["megabytes"] / chunk_mb > _MANY_CHUNKS:
            yield f"{name!r} has more than {_MANY_CHUNKS:,} small chunks, slow to read; rechunk it"
        if row.get("gaps") == 1:
            yield f"{name!r} has no value at all; leave it out (--variables)"
        elif row.get("gaps"):
            yield (
                f"{name!r} has gaps: ml4cube sample drops every window with one, unless --drop-nan "
                "says otherwise; --fill-method fills those of features"
            )
        if row.get("infinite"):
            yield f"{name!r} has infinite values, which count as gaps"
        if row["units"] is None:
            yield f"{name!r} has no units, so that predictions have none"


INSPECT = Command(inspect, without=["recipe"])
