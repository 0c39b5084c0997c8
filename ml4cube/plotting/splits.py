"""`split_map`, `split_timeline`, `fold_bars`: the parts of a split in space and time."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence

import numpy as np
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ml4cube.core.axes import check_aligned
from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.missing import check_mask
from ml4cube.core.split_plan import EXCLUDED, PARTS
from ml4cube.cube.coordinates import dates_along, find_time_dim
from ml4cube.plotting.fields import GAP_COLOR, axis_name, draw_field

PART_COLORS = {"train": "#0072B2", "val": "#E69F00", "test": "#D55E00", "excluded": "#999999"}
_PART_LABELS = {**PARTS, "excluded": EXCLUDED}
_ORDER = ("train", "excluded", "val", "test")
_NO_DATA_HATCH = "////"


def split_map(
    label: xr.DataArray | xr.Dataset,
    *,
    steps: Sequence[int] = (),
    aggregated: bool = False,
    valid: xr.DataArray | None = None,
    title: str = "Split",
) -> Figure:
    """Draw the parts over time, and maps of single steps or of all steps together.

    Parameters
    ----------
    label : DataArray or Dataset
        A split label, or a cube with a ``split``. Its time dim is the first one with dates, or
        that named ``time``, ``t`` or ``date``; maps need two other dims. Without a time dim, the
        label is the only map.
    steps : sequence of int
        Positions along time to draw as maps.
    aggregated : bool
        Draw a map of each part: the fraction of time that a cell belongs to it. One map if no
        cell changes its part.
    valid : DataArray of bool, optional
        Cells with a value, along dims of `label`; the others are grey and do not count.
    title : str
        Heading.

    Returns
    -------
    matplotlib.figure.Figure
        A stacked bar per time step, above the maps.

    Raises
    ------
    InvalidValueError
        If a map is requested and the label does not have two dims apart from time, or a step is
        out of range.

    Examples
    --------
    >>> label = xr.DataArray(np.ones((3, 2, 2), "u1"), dims=("time", "lat", "lon"), name="split")
    >>> len(split_map(label, steps=[0]).axes)
    2
    """
    label = _label_of(label, "label")
    time = find_time_dim(label.coords.values(), label.dims)
    map_dims = [str(dim) for dim in label.dims if dim != time]
    steps = _positions(steps, label, time)
    if (steps or aggregated or time is None) and len(map_dims) != 2:
        raise InvalidValueError(
            f"label must have two dims apart from time for maps, got {map_dims}; select one cell "
            "of the others" + ("" if time is None else ", or leave out steps and aggregated")
        )
    cells = _counting_cells(label, valid)
    # Heading and field of each map, and the part whose percentages it shows; None: labels.
    maps: list[tuple[str, xr.DataArray, str | None]]
    if time is None:
        maps = [("", cells, None)]
    else:
        maps = [(_step_name(label, time, step), cells.isel({time: step}), None) for step in steps]
    if time is not None and aggregated:
        greatest, least = cells.max(time), cells.min(time)
        if bool((greatest == least).where(greatest.notnull(), True).all()):
            maps.insert(0, ("all steps", greatest, None))
        else:
            maps += [
                (f"fraction of time in {part}", percentages, part)
                for part, percentages in _percentages(cells, [time]).items()
                if (percentages > 0).any()
            ]
    heights = [1.5] * (time is not None) + [1.0] * len(maps)
    figure = Figure(figsize=(8, 0.6 + 1.35 * sum(heights)), layout="constrained")
    panels = list(figure.subplots(len(heights), 1, squeeze=False, height_ratios=heights)[:, 0])
    panels[0].set_title(title)
    if time is not None:
        _draw_timeline(panels.pop(0), cells, time, map_dims)
    for axes, (heading, field, part) in zip(panels, maps, strict=True):
        field = field.transpose(*map_dims)
        if part is None:
            _draw_parts(axes, field)
        else:
            ramp = LinearSegmentedColormap.from_list(part, ["white", PART_COLORS[part]])
            mesh = draw_field(axes, field, cmap=ramp, vmin=0, vmax=100)
            figure.colorbar(mesh, ax=axes, label="%", ticks=[0, 50, 100], aspect=10)
        axes.set_title(heading, fontsize=9, loc="left")
        # Hatched, to differ from the grey of excluded cells.
        axes.patch.set(hatch=_NO_DATA_HATCH, edgecolor="white")
        axes.tick_params(labelbottom=axes is panels[-1])
        if axes is panels[-1]:
            axes.set_xlabel(axis_name(field, 1), fontsize=9)
    present = [part for part in _ORDER if bool((cells == _PART_LABELS[part]).any())]
    _legend(figure, present, has_gaps=bool(maps) and valid is not None)
    return figure


def split_timeline(
    label: xr.DataArray | xr.Dataset,
    *,
    valid: xr.DataArray | None = None,
    title: str = "Split over time",
) -> Figure:
    """Draw the parts over time.

    Parameters
    ----------
    label : DataArray or Dataset
        A split label with a time dim, or a cube with a ``split``.
    valid : DataArray of bool, optional
        Cells that count, along dims of `label`.
    title : str
        Heading.

    Returns
    -------
    matplotlib.figure.Figure
        A stacked bar per time step.

    Raises
    ------
    InvalidValueError
        If there is no time dim.

    Examples
    --------
    >>> label = xr.DataArray([1, 1, 255, 0], dims="time", name="split")
    >>> len(split_timeline(label).axes)
    1
    """
    label = _label_of(label, "label")
    if find_time_dim(label.coords.values(), label.dims) is None:
        raise InvalidValueError(f"label must have a time dim, got {label.dims}")
    return split_map(label, valid=valid, title=title)


def fold_bars(
    folds: Sequence[xr.DataArray | xr.Dataset] | Mapping[str, xr.DataArray | xr.Dataset],
    *,
    valid: xr.DataArray | None = None,
    title: str = "Cells of each fold",
) -> Figure:
    """Draw the fraction of cells in each part, for every fold.

    Parameters
    ----------
    folds : sequence or mapping of str to DataArray or Dataset
        Labels, or cubes with a ``split``; the keys of a mapping name the folds.
    valid : DataArray of bool, optional
        Cells that count, along dims of the labels.
    title : str
        Heading.

    Returns
    -------
    matplotlib.figure.Figure
        A stacked bar per fold.

    Raises
    ------
    InvalidValueError
        If there is no fold, or a cube has no split label.
    InvalidTypeError
        If a fold is neither a label nor a cube.

    Examples
    --------
    >>> fold = xr.DataArray([1, 1, 1, 0], dims="x", name="split")
    >>> [text.get_text() for text in fold_bars({"a": fold}).axes[0].texts]
    ['75 %', '25 %']
    """
    if isinstance(folds, Mapping):
        named = dict(folds)
    else:
        named = {f"fold {number}": fold for number, fold in enumerate(folds, 1)}
    if not named:
        raise InvalidValueError("folds must have at least one label, got none")
    shares: dict[str, dict[str, float]] = {}
    for name, fold in named.items():
        label = _label_of(fold, name)
        found = _percentages(_counting_cells(label, valid), label.dims)
        shares[name] = {part: float(share.fillna(0)) for part, share in found.items()}
    figure = Figure(figsize=(7, 1.3 + 0.36 * len(named)), layout="constrained")
    axes = figure.add_subplot()
    rows = np.arange(len(named))
    left = np.zeros(len(named))
    present = [part for part in _ORDER if any(share[part] for share in shares.values())]
    for part in present:
        width = np.array([share[part] for share in shares.values()])
        bars = axes.barh(
            rows, width, left=left, color=PART_COLORS[part], edgecolor="white", height=0.8
        )
        # The number does not fit a smaller bar.
        numbers = [f"{value:.0f} %" if value >= 5 else "" for value in width]
        color = "black" if part in ("val", "excluded") else "white"
        axes.bar_label(bars, numbers, label_type="center", color=color, fontsize=8)
        left = left + width
    axes.set(xlim=(0, 100), xlabel="fraction of cells (%)", title=title)
    axes.set_yticks(rows, list(named))
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    _legend(figure, present, has_gaps=False)
    return figure


def _label_of(fold: xr.DataArray | xr.Dataset, name: str) -> xr.DataArray:
    if isinstance(fold, xr.Dataset):
        if "split" not in fold:
            raise InvalidValueError(f"{name} must have a 'split', got {list(fold.data_vars)}")
        return fold["split"]
    if not isinstance(fold, xr.DataArray):
        raise InvalidTypeError(f"{name} must be a split label or a cube, got {type(fold).__name__}")
    return fold


def _counting_cells(label: xr.DataArray, valid: object) -> xr.DataArray:
    """Return the label with gaps for cells that do not count."""
    if valid is None:
        return label
    if not isinstance(valid, xr.DataArray):
        raise InvalidTypeError(f"valid must be a DataArray of bool, got {type(valid).__name__}")
    check_aligned("valid", valid, label)
    check_mask("valid", valid.dtype)
    # Without coordinates: if these differ by rounding, xarray would count cells as valid.
    bare = xr.DataArray(valid.variable)
    return label.where((bare != 0) & bare.notnull())


def _positions(steps: Sequence[int], label: xr.DataArray, time: str | None) -> list[int]:
    """Return the positions along time; refuse those out of range."""
    positions = np.asarray(steps)
    if positions.ndim != 1 or (positions.size and positions.dtype.kind not in "iu"):
        raise InvalidTypeError(f"steps must be a list of integers, as [0, 6], got {steps!r}")
    n = 0 if time is None else label.sizes[time]
    if beyond := [int(step) for step in positions if not -n <= step < n]:
        raise InvalidValueError(
            f"steps must be from 0 to {n - 1}, got {beyond}"
            if n
            else f"steps must be left out because the label has no time dim, got {beyond}"
        )
    return [int(step) for step in positions]


def _percentages(cells: xr.DataArray, dims: Collection[Hashable]) -> dict[str, xr.DataArray]:
    """Return the percentage of the cells along dims in each part; NaN where none counts."""
    known = cells.notnull().sum(dims)
    return {
        part: (100 * (cells == _PART_LABELS[part]).sum(dims) / known.where(known > 0)).compute()
        for part in _ORDER
    }


def _draw_parts(axes: Axes, field: xr.DataArray) -> None:
    """Draw a map of labels, each in the colour of its part."""
    color_index = xr.full_like(field, np.nan, dtype="float64")
    for index, part in enumerate(PART_COLORS):
        color_index = color_index.where(field != _PART_LABELS[part], index)
    colors = ListedColormap(list(PART_COLORS.values()))
    draw_field(axes, color_index, cmap=colors, vmin=0, vmax=len(PART_COLORS) - 1)


def _draw_timeline(axes: Axes, cells: xr.DataArray, time: str, map_dims: list[str]) -> None:
    """Draw a stacked bar per time step."""
    steps = np.arange(cells.sizes[time])
    # With many steps, white lines would cover the bars.
    line_width = 0.4 if steps.size <= 120 else 0.0
    bottom = np.zeros(steps.size)
    for part, share in _percentages(cells, map_dims).items():
        height = share.fillna(0).values
        axes.bar(
            steps, height, bottom=bottom, width=1.0, color=PART_COLORS[part],
            edgecolor="white" if line_width else PART_COLORS[part], lw=line_width,
        )  # fmt: skip
        bottom = bottom + height
    axes.set(xlim=(-0.5, steps.size - 0.5), ylim=(0, 100), ylabel="cells (%)")
    axes.set_yticks([0, 50, 100])
    ticks = np.unique(np.linspace(0, steps.size - 1, min(7, steps.size)).round().astype(int))
    names = [_step_name(cells, time, i) for i in ticks]
    # The hour is written below the day.
    axes.set_xticks(ticks, [name.replace(" ", "\n") if ":" in name else name for name in names])


def _step_name(array: xr.DataArray, time: str, step: int) -> str:
    """Return the date of a step, as precise as tells steps apart; else its value or position."""
    coord = dates_along(array.coords.values(), time)
    if coord is None:
        return f"{array.coords[time].values[step]}" if time in array.coords else f"step {step}"
    if coord.isnull()[step]:
        return f"step {step}"
    dates = {str(date) for date in coord.values[coord.notnull().values][:1000]}
    to_month, to_day, to_minute, to_second = 7, 10, 16, 19
    lengths = (to_month, to_day, to_minute) if len(dates) > 1 else (to_day,)
    length = next((n for n in lengths if len({d[:n] for d in dates}) == len(dates)), to_second)
    return str(coord.values[step])[:length].replace("T", " ")


def _legend(figure: Figure, parts: Sequence[str], *, has_gaps: bool) -> None:
    no_data = Patch(facecolor=GAP_COLOR, hatch=_NO_DATA_HATCH, edgecolor="white", label="no data")
    figure.legend(
        handles=[Patch(color=PART_COLORS[part], label=part) for part in parts]
        + ([no_data] if has_gaps else []),
        loc="outside lower center",
        ncols=5,
        frameon=False,
    )
