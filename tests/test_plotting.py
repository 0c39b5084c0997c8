"""Figures show what they are given, need no display and do not import pyplot."""

import io
import sys

import matplotlib.colors
import numpy as np
import pandas as pd
import pytest
import xarray as xr
from matplotlib.figure import Figure

from ml4cube.core.distance.variogram import Variogram, fit_variogram
from ml4cube.errors import InvalidTypeError, InvalidValueError
from ml4cube.plotting import (
    distance_curves,
    field_maps,
    fold_bars,
    leakage_figure,
    loss_curve,
    split_map,
    split_timeline,
    variogram_plot,
)
from ml4cube.plotting.splits import PART_COLORS
from ml4cube.splits import assign_block_split, assign_time_split
from tests.cubes import cell_id_cube

SIZES = {"time": 12, "lat": 8, "lon": 10}
PARTS = {1: "train", 0: "test", 2: "val", 255: "excluded"}
COLORS = {code: PART_COLORS[part] for code, part in PARTS.items()}
LAGS = np.arange(1.0, 21)
ONE_MAP = xr.DataArray(np.ones((8, 10), "u1"), dims=("lat", "lon"), name="split")
ONE_LINE = ONE_MAP[:, 0]
LINES = ONE_MAP.rename(lat="time")


def rendered(figure):
    """The figure drawn into memory: a layout or a text that cannot be drawn would raise."""
    assert isinstance(figure, Figure)
    figure.savefig(io.BytesIO(), dpi=40)
    return figure


def label_of_time():
    return assign_time_split(cell_id_cube(SIZES), 0.5, val=0.25, gap=1).split


def label_of_blocks():
    return assign_block_split(cell_id_cube(SIZES), {"lat": 4, "lon": 5}, 0.5, val=0.25).split


def hex_of(color):
    return matplotlib.colors.to_hex(color).upper()


def titles(panels):
    return [axes.get_title(loc="left") for axes in panels]


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_timeline_shows_the_part_of_every_step():
    label = label_of_time()
    axes = rendered(split_timeline(label)).axes[0]
    shown = {}
    for bar in axes.patches:
        if bar.get_height() > 0:
            step = round(bar.get_x() + bar.get_width() / 2)
            shown[step] = hex_of(bar.get_facecolor())
            assert bar.get_height() == 100
    assert shown == {step: COLORS[code] for step, code in enumerate(label[:, 0, 0].values)}
    assert axes.get_ylabel() == "cells (%)"


def test_maps_of_steps_and_of_all_of_them():
    label = label_of_blocks()
    figure = rendered(split_map(label, steps=[0, 5], aggregated=True, title="T"))
    assert [axes.get_title(loc="left") for axes in figure.axes[1:]] == [
        "all steps", "2000-01-01", "2000-01-06",
    ]  # fmt: skip
    shown = figure.axes[1].collections[0].get_facecolors()
    assert [hex_of(color) for color in shown] == [COLORS[code] for code in label[0].values.flat]


def test_aggregated_maps_show_fractions_where_cells_change_their_part():
    label = assign_block_split(cell_id_cube(SIZES), {"time": 3, "lat": 4}, 0.5).split
    figure = rendered(split_map(label, aggregated=True))
    by_title = {axes.get_title(loc="left"): axes for axes in figure.axes}
    share = by_title["fraction of time in train"].collections[0].get_array().reshape(8, 10)
    np.testing.assert_allclose(share, 100 * (label == 1).mean("time"))


def test_cells_without_a_value_do_not_make_parts_change_over_time():
    valid = xr.DataArray(np.arange(8) < 4, dims="lat")
    figure = rendered(split_map(label_of_blocks(), aggregated=True, valid=valid))
    assert [axes.get_title(loc="left") for axes in figure.axes[1:]] == ["all steps"]
    assert np.ma.getmaskarray(figure.axes[1].collections[0].get_array()).sum() == 40


def test_a_label_without_time_is_one_map():
    figure = rendered(split_map(label_of_blocks()[0].drop_vars("time")))
    assert len(figure.axes) == 1
    assert figure.axes[0].get_xlim() == (0, 360)


def test_every_cell_of_a_map_is_seen():
    """Also if longitudes jump from 180 to -180, or a dim has one cell."""
    values = xr.DataArray(np.arange(8.0).reshape(2, 4), dims=("lat", "lon"))
    field = values.assign_coords(lat=[1.0, -1.0], lon=[0.0, 90.0, -180.0, -90.0])
    for one in (field, field[:1], field[:, :1], values[:1]):
        axes = rendered(field_maps({"a": one})).axes[0]
        (mesh,) = axes.collections
        corners = mesh.get_coordinates()
        shown = mesh.get_array().reshape(one.shape)
        ordered = one.sortby([dim for dim in one.dims if dim in one.coords])
        np.testing.assert_array_equal(shown, ordered)
        assert (np.diff(corners[0, :, 0]) > 0).all()
        assert (np.diff(corners[:, 0, 1]) > 0).all()


def test_infinite_values_do_not_change_the_colours():
    rain = xr.DataArray(np.array([[-np.inf, 1.0, 2.0]]), dims=("lat", "lon"))
    for axes in rendered(field_maps({"a": rain}, {"error": rain})).axes[:2]:
        assert axes.collections[0].get_clim()[1] == pytest.approx(1.98)


def test_the_colours_of_errors_cover_those_below_zero_too():
    errors = xr.DataArray([[-3.0, -3.0, 1.0]], dims=("lat", "lon"))
    axes = rendered(field_maps({"a": errors}, {"error": errors})).axes[1]
    assert axes.collections[0].get_clim() == (-3, 3)


def test_gaps_do_not_count():
    label = label_of_time()
    valid = xr.DataArray(np.arange(8) < 4, dims="lat")
    figure = rendered(split_map(label, steps=[0], valid=valid))
    assert "no data" in [text.get_text() for text in figure.legends[0].get_texts()]
    assert np.ma.getmaskarray(figure.axes[1].collections[0].get_array()).sum() == 40
    # the grey of excluded cells is another one
    (gaps,) = {hex_of(patch.get_facecolor()) for patch in figure.legends[0].get_patches()[-1:]}
    cell_colors = {hex_of(color) for color in figure.axes[1].collections[0].get_facecolors()}
    assert cell_colors == {COLORS[int(label[0, 0, 0])], gaps}
    assert gaps not in COLORS.values()


def test_valid_cells_may_be_rounded_or_a_mask_with_gaps():
    label = xr.DataArray([1, 1, 255, 0], {"lat": [0.1, 0.2, 0.3, 0.4]}, "lat", name="split")
    mask = xr.DataArray([True, False, True, True], {"lat": label.lat.astype("f4")}, "lat")
    for valid in (mask, xr.DataArray([1.0, np.nan, 1.0, 1.0], dims="lat")):
        axes = rendered(fold_bars([label], valid=valid)).axes[0]
        assert texts(axes) == ["33 %", "33 %", "33 %"]
    with pytest.raises(InvalidValueError, match="valid has other 'lat' coordinates"):
        fold_bars([label], valid=mask.assign_coords(lat=label.lat[::-1].values))


def test_a_cube_is_drawn_by_its_label():
    cube = xr.Dataset({"split": ("time", np.array([1, 1, 0], "u1"))})
    assert len(split_map(cube).axes) == len(split_map(cube.split).axes) == 1
    assert len(split_timeline(cube).axes) == 1


def test_fold_bars_show_shares():
    label = xr.DataArray([1] * 12 + [0] * 4 + [2] * 3 + [255], dims="x", name="split")
    for folds in ([label], {"a": label}, [label.to_dataset()]):
        axes = rendered(fold_bars(folds)).axes[0]
        assert texts(axes) == ["60 %", "5 %", "15 %", "20 %"]
        widths = [bar.get_width() for bar in axes.patches]
        assert sum(widths) == pytest.approx(100)
    (name,) = rendered(fold_bars({"a": label})).axes[0].get_yticklabels()
    assert name.get_text() == "a"


def test_curves_are_cumulative_shares():
    figure = rendered(distance_curves({"test": [3.0, 1.0, np.nan, 2.0], "use": [10.0]}, range_=4.0))
    axes = figure.axes[0]
    x, y = axes.lines[0].get_data()
    assert x[1:4].tolist() == [1, 2, 3]
    np.testing.assert_allclose(y[1:4], [100 / 3, 200 / 3, 100])
    assert axes.get_xlabel() == "distance to the nearest train cell (km)"
    assert len({(line.get_color(), line.get_linestyle()) for line in axes.lines}) == 3
    many = rendered(distance_curves({str(n): [n] for n in range(6)}))
    assert len({line.get_color() for line in many.axes[0].lines}) == 6


def test_curves_are_not_covered_by_their_legend():
    figure = rendered(distance_curves({"test": [0.0, 1.0], "use": [90.0, 95.0]}))
    (axes,) = figure.axes
    panel = axes.get_window_extent()
    assert axes.get_legend().get_window_extent().y1 < panel.y0
    assert axes.get_legend().get_window_extent().y0 > 0
    assert not texts(axes)


def test_distances_of_zero_are_labelled():
    axes = rendered(distance_curves({"test": [0.0, 0.0], "use": [0.0]})).axes[0]
    assert texts(axes) == ["all at 0 km"]
    assert axes.get_xticks().tolist() == [0]


def test_one_cell_and_one_distance_are_singular():
    one = fit_variogram(LAGS[:1], np.ones(1), np.full(1, 30))
    short = Variogram(LAGS, np.ones(20), np.ones(20, int), "exponential", 0.0, 1.0, 1.0)
    first, second = rendered(variogram_plot({"y": one, "x": short})).axes
    assert texts(first)[0].replace("\n", " ") == "no sill: only 1 distance has 30 pairs of values"
    assert texts(second)[0].startswith("range 1 cell\n")
    assert all(tick == int(tick) for tick in first.get_xticks())


@pytest.mark.slow
def test_variograms_show_range_sill_or_why_there_is_none():
    found = fit_variogram(LAGS, 1 - np.exp(-3 * LAGS / 8), np.full(20, 50))
    endless = fit_variogram(LAGS, LAGS**2, np.full(20, 50))
    empty = fit_variogram(LAGS[:0], LAGS[:0], np.zeros(0, int))
    figure = rendered(variogram_plot({"x": found, "y": endless, "z": empty, "w": found}))
    first, second, third = figure.axes[:3]
    assert texts(first)[0] == f"range {found.range:.3g} cells\n(exponential)"
    assert any(line.get_xdata()[0] == found.range for line in first.lines)
    assert "no sill" in texts(second)[0]
    assert "no sill" in texts(third)[0]
    np.testing.assert_allclose(first.collections[0].get_offsets(), np.c_[LAGS, found.semivariance])


def test_leakage_figure_shows_verdict_shares_and_curves():
    domains = {"space": ("km", {"test": [1.0]}), "time": ("days", {"test": [2.0]})}
    figure = rendered(leakage_figure("It leaks badly.", True, domains, {"a": 0.25, "b": 1.0}))
    assert figure.get_suptitle() == "It leaks badly."
    assert [bar.get_width() for bar in figure.axes[0].patches] == [25, 100]
    assert titles(figure.axes) == ["too close to train", "space", "time"]


def test_loss_curves_mark_the_best_epoch():
    train, val = [9.0, 0.5, 0.4, 0.3], [None, 0.6, np.nan, 0.5]
    for curves, best in (((train,), (4, 0.3)), ((train, val), (4, 0.5))):
        (axes,) = rendered(loss_curve(*curves)).axes
        assert [line.get_ydata()[-1] for line in axes.lines[:-1]] == [c[-1] for c in curves]
        assert all(np.isfinite(line.get_ydata()).all() for line in axes.lines)
        assert [v[0] for v in axes.lines[-1].get_data()] == list(best)
        assert axes.get_yscale() == "log"
    assert len(rendered(loss_curve([1.0, 2.0], [None, None])).axes[0].lines) == 2
    (axes,) = rendered(loss_curve(train, val, x=[2, 4, 6, 8], xlabel="step")).axes
    assert axes.get_legend_handles_labels()[1][-1] == "lowest: 0.5 (step 8)"


def test_pyplot_is_not_imported():
    before = set(sys.modules)
    rendered(split_timeline(label_of_time()))
    assert "matplotlib.pyplot" not in set(sys.modules) - before


def ticks(figure):
    return [tick.get_text() for tick in figure.axes[0].get_xticklabels()]


@pytest.mark.slow
@pytest.mark.parametrize("use_cftime", [False, True])
@pytest.mark.parametrize("dim", ["time", "obs"])
@pytest.mark.parametrize(
    ("freq", "second"),
    [("6h", "2000-01-03\n00:00"), ("D", "2000-01-09"), ("MS", "2000-09"), ("20s", "\n00:02:40")],
)
def test_any_axis_of_dates_is_a_timeline(dim, use_cftime, freq, second):
    dates = xr.date_range("2000-01-01", periods=49, freq=freq, use_cftime=use_cftime)
    cube = xr.Dataset({"a": (dim, np.zeros(49))}, {"time": (dim, dates)})
    figure = rendered(split_timeline(assign_time_split(cube, 0.7)))
    assert ticks(figure)[1].endswith(second)
    assert len(set(ticks(figure))) == 7


def test_a_dim_that_is_called_like_time_is_a_timeline():
    label = xr.DataArray(np.array([1, 1, 0], "u1"), dims="t", name="split")
    assert ticks(rendered(split_timeline(label))) == ["step 0", "step 1", "step 2"]
    dates = pd.to_datetime(["2000-01-02", "2000-01-01", "2000-01-03"])
    numbered = label.assign_coords(t=[4, 5, 6], start=("t", dates))
    assert ticks(rendered(split_timeline(numbered))) == ["4", "5", "6"]
    numbered["start"] = ("t", np.sort(dates))
    assert ticks(rendered(split_timeline(numbered))) == ["2000-01-01", "2000-01-02", "2000-01-03"]


def test_one_step_is_drawn_without_a_warning(recwarn):
    label = label_of_time().isel(time=[0])
    assert rendered(split_map(label, steps=[0])).axes[1].get_title(loc="left") == "2000-01-01"
    assert not recwarn.list


@pytest.mark.parametrize(
    ("draw", "given", "error", "says"),
    [
        (split_map, {"steps": 3}, InvalidTypeError, "steps must be a list of integers"),
        (split_map, {"steps": [True]}, InvalidTypeError, "steps must be a list of integers"),
        (split_map, {"steps": [0, 12]}, InvalidValueError, r"from 0 to 11, got \[12\]"),
        (split_map, {"label": ONE_MAP, "steps": [0]}, InvalidValueError, "no time dim"),
        (split_map, {"label": ONE_LINE}, InvalidValueError, "two dims apart from time"),
        (split_map, {"label": LINES, "steps": [0]}, InvalidValueError, "two dims apart from time"),
        (split_timeline, {"label": ONE_MAP}, InvalidValueError, "must have a time dim"),
        (split_map, {"valid": np.ones(3)}, InvalidTypeError, "valid must be a DataArray"),
        (split_map, {"valid": ONE_LINE.astype(str)}, InvalidTypeError, "valid must hold booleans"),
        *(
            (draw, {"label": label}, error, says)
            for draw in (split_map, split_timeline)
            for label, error, says in (
                (xr.Dataset(), InvalidValueError, "label must have a 'split'"),
                (np.ones(3), InvalidTypeError, "label must be .*, got ndarray"),
            )
        ),
        (fold_bars, {"folds": []}, InvalidValueError, "at least one label"),
        (distance_curves, {"distances": {"a": [np.nan]}}, InvalidValueError, "no finite distance"),
        (variogram_plot, {"variograms": {}}, InvalidValueError, "empty"),
        *(
            (loss_curve, {"train": [1, 2, 3], name: [1, 2]}, InvalidValueError, "3, as train has")
            for name in ("val", "x")
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, given, error, says):
    if draw in (split_map, split_timeline):
        given = {"label": label_of_time(), **given}
    with pytest.raises(error, match=says):
        draw(**given)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["datetime64", "cftime"])
@pytest.mark.parametrize("missing", [1, 7, 11])
def test_steps_without_dates_are_labelled_by_position(kind, missing):
    dates = xr.date_range("2000-01-01", periods=12, use_cftime=kind == "cftime").values
    dates = np.array(dates)
    dates[1 : 1 + missing] = np.datetime64("NaT") if kind == "datetime64" else None
    label = xr.DataArray(np.ones(12, "u1"), {"time": dates}, dims="time", name="split")
    found = ticks(rendered(split_timeline(label)))
    assert found[0] == "2000-01-01"
    assert (found[1] == "step 2") == (missing > 1)


def test_notebooks_show_figures_without_pyplot():
    assert loss_curve([1.0, 0.5], [2.0, 1.0])._repr_png_().startswith(b"\x89PNG")
