"""The demo: its science against loops, its manners with folders, and the whole of it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from matplotlib.figure import Figure

from ml4cube.demo.__main__ import OUTPUTS, main, prepare_folder
from ml4cube.demo.downscaling import (
    FACTOR,
    PENALTY,
    TARGET,
    baselines,
    build_cube,
    first_guess,
    interpolate,
    keep_means,
    open_truth,
    regress,
    train_steps,
)
from ml4cube.demo.report import PREDICTIONS, draw_maps, judge, write_report
from ml4cube.errors import StoreExistsError
from ml4cube.splits import assign_time_split


@pytest.fixture(scope="module")
def truth():
    return open_truth()


@pytest.fixture(scope="module")
def label(truth):
    return assign_time_split(truth, 34 / 54, val=6 / 54, gap=1)["split"]


def test_the_split_is_the_one_that_is_reported(label):
    months = label.max(["latitude", "longitude"]).values
    assert months.tolist() == [1] * 33 + [255] + [2] * 6 + [0] * 14


def test_interpolation_equals_a_loop_over_cells(truth):
    month = truth.isel(time=slice(3, 4))
    field = month.values[0].astype("float64")
    rows, columns = (n // FACTOR for n in field.shape)
    means = np.full((rows, columns), np.nan)
    for i in range(rows):
        for j in range(columns):
            block = field[i * FACTOR : (i + 1) * FACTOR, j * FACTOR : (j + 1) * FACTOR]
            if np.isfinite(block).any():
                means[i, j] = np.nanmean(block)
    got = interpolate(month).values[0]
    for i in range(0, field.shape[0], 2):
        for j in [0, 1, 2, 3, 100, 215, 216, 428, 430, 431]:
            y = min(max((i + 0.5) / FACTOR - 0.5, 0), rows - 1)
            x = (j + 0.5) / FACTOR - 0.5
            total = weight = 0.0
            for a in {int(np.floor(y)), int(np.floor(y)) + 1}:
                for b in (int(np.floor(x)), int(np.floor(x)) + 1):
                    share = max(0.0, 1 - abs(y - a)) * (1 - abs(x - b))
                    value = means[min(a, rows - 1), b % columns]
                    if share > 0 and np.isfinite(value):
                        total, weight = total + share * value, weight + share
            expected = total / weight if weight > 1e-9 else np.nan
            assert got[i, j] == pytest.approx(expected, abs=1e-9, nan_ok=True)


def test_what_is_fitted_sees_train_months_only(truth, label):
    later = (label != 1).any(["latitude", "longitude"])
    changed = truth.where(~later, truth + 1000)
    for make in (build_cube, baselines):
        before, after = make(truth, label), make(changed, label)
        train = ~later
        for name in before.data_vars:
            if "time" in before[name].dims:
                same = before[name].isel(time=train.values), after[name].isel(time=train.values)
            else:
                same = before[name], after[name]
            xr.testing.assert_equal(*same)


def test_the_interpolation_error_written_out(truth, label):
    test = (label == 0).all(["latitude", "longitude"]).values
    error = (interpolate(truth) - truth).values[test].astype("float64")
    weight = np.broadcast_to(np.cos(np.deg2rad(truth.latitude.values))[:, None], error.shape[1:])
    sea = np.isfinite(error)
    expected = np.sqrt((np.where(sea, error, 0) ** 2 * weight).sum() / (sea * weight).sum())
    assert expected == pytest.approx(0.2783, abs=2e-4)


def test_the_penalty_does_best_where_train_months_are_left_out(truth, label):
    train = train_steps(label)
    months = np.flatnonzero(train.values)
    errors = dict.fromkeys((0.3, 1.0, PENALTY, 10.0), 0.0)
    for left_out in np.array_split(months, 5):
        known = train & ~truth["time"].isin(truth["time"][left_out])
        detail = truth - first_guess(truth, known)
        for penalty in errors:
            error = (regress(detail, truth, known, penalty) - detail).isel(time=left_out)
            errors[penalty] += float((error**2).sum())
    assert min(errors, key=errors.get) == PENALTY


def scores_of(network, half=0.01):
    """The table of a scorecard: baselines with an error of 1 K and more, the network's given."""
    errors = dict.fromkeys(PREDICTIONS, 2.0) | {"ridge regression": 1.0, "network": network}
    rows = [
        {"metric": "rmse", "model": name.replace("network", "prediction"), "value": rmse}
        for name, rmse in errors.items()
    ]
    for name in set(PREDICTIONS) - {"network"}:
        skill = 1 - (network / errors[name]) ** 2
        ends = {"value": skill, "low": skill - half, "high": skill + half, "independent": 9.6}
        rows.append({"metric": "skill", "model": "prediction", "baseline": name} | ends)
    return pd.DataFrame(rows)


def test_the_verdict_takes_the_strongest_baseline():
    verdict = judge(scores_of(0.8))
    assert verdict["best_baseline"] == "ridge regression"
    assert list(verdict["rmse_k"])[:2] == ["network", "ridge regression"]
    assert verdict["improvement"] == pytest.approx(0.2)
    low, high = verdict["improvement_interval"]
    assert (low, high) == pytest.approx((1 - 0.65**0.5, 1 - 0.63**0.5))
    assert verdict["beats_baseline"]
    assert not judge(scores_of(0.99))["beats_baseline"]


@pytest.mark.parametrize(
    ("network", "headline", "verdict"),
    [(0.8, "20.0% less", "passed"), (0.99, "1.0% less", "**not"), (1.1, "10.0% more", "**not")],
)
def test_the_report_begins_with_its_result(tmp_path, network, headline, verdict):
    counts = {"train": 33, "excluded": 1, "val": 6, "test": 14}
    rest = {"grid": "54 × 18 × 432", "ranks": 2, "epochs": 40, "best_epoch": 39}
    write_report(tmp_path, judge(scores_of(network)) | rest | {"months": counts})
    page = (tmp_path / "report.md").read_text()
    assert page.splitlines()[0] == f"# {headline} error than the strongest baseline"
    text = " ".join(page.split())
    assert f"The bar of 2% in these months is {verdict}" in text
    assert "For other months like these the difference would lie between" in text
    assert page.count("![") == 1
    assert f"| network | {network:.3f} |" in page
    assert "perfect-model downscaling" in page


def test_few_months_decide_nothing_of_others(tmp_path):
    counts = {"train": 33, "excluded": 1, "val": 6, "test": 14}
    rest = {"grid": "54 × 18 × 432", "ranks": 2, "epochs": 40, "best_epoch": 39}
    verdict = judge(scores_of(0.8, half=np.nan))
    assert verdict["improvement_interval"] is None
    write_report(tmp_path, verdict | rest | {"months": counts})
    text = " ".join((tmp_path / "report.md").read_text().split())
    assert "cannot be decided: 14 months behave like 9 independent ones." in text
    assert "95 %" not in text
    assert json.loads((tmp_path / "report.json").read_text())["improvement_interval"] is None


def test_every_baseline_is_explained_in_the_report(truth, label):
    assert {"network", *baselines(truth, label)} == set(PREDICTIONS)


def test_the_maps_of_the_report_have_the_aspect_of_the_equator(truth, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, _: drawn.append(figure))
    month = truth.isel(time=40)
    draw_maps(month, month + 1, "bilinear", month - 1, tmp_path / "maps.png")
    maps = [axes for axes in drawn[0].axes if axes.get_label() != "<colorbar>"]
    assert len(maps) == 5
    for axes in maps:
        assert axes.get_aspect() == pytest.approx(1, abs=0.01)
        np.testing.assert_allclose(axes.get_xlim(), maps[0].get_xlim(), atol=1e-3)
        np.testing.assert_allclose(axes.get_ylim(), maps[0].get_ylim(), atol=1e-3)
    low, high = maps[-1].collections[0].get_clim()
    assert low == -high


def test_a_folder_with_foreign_things_is_refused_untouched(tmp_path):
    (tmp_path / "thesis.docx").write_text("years of work")
    (tmp_path / "report.md").write_text("mine")
    with pytest.raises(StoreExistsError, match=r"thesis\.docx"):
        prepare_folder(tmp_path)
    assert (tmp_path / "report.md").read_text() == "mine"
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(StoreExistsError, match="is a file"):
        prepare_folder(file)


@pytest.mark.parametrize("option", ["--ranks", "--epochs"])
def test_no_ranks_and_no_epochs_are_refused_before_the_work(tmp_path, monkeypatch, capsys, option):
    monkeypatch.setattr("sys.argv", ["demo", "--out", str(tmp_path / "out"), option, "0"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "at least 1, got" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", OUTPUTS)
def test_the_docs_name_what_the_demo_writes(name):
    page = (Path(__file__).parent.parent / "docs" / "tutorials" / "demo.md").read_text()
    assert name in page or name in ("train.zarr", "val.zarr", "test.zarr") or name.endswith(".png")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("epochs", [4, pytest.param(30, marks=pytest.mark.soak)])
def test_the_whole_demo(tmp_path, epochs):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "ml4cube.demo", "--out", str(out), "--epochs", str(epochs)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert "rank  device" in done.stdout + done.stderr

    report = json.loads((out / "report.json").read_text())
    assert done.returncode == (not report["beats_baseline"]), done.stdout + done.stderr
    if epochs == 30:
        assert report["rmse_model_k"] <= 0.98 * report["rmse_best_baseline_k"]
        assert report["improvement_interval"] is None  # 14 months
    else:
        assert report["rmse_model_k"] < report["rmse_k"]["bilinear + mean detail"]
    rows = report["rank_table"]
    assert [row["rank"] for row in rows] == [0, 1]
    assert sum(row["val_n"] for row in rows) == 6
    assert {"split", "statistics", "sampling", "training", "prediction", "scores"} <= set(
        report["seconds"]
    )
    for picture in ("split_map.png", "loss_curve.png", "maps.png"):
        assert (out / picture).read_bytes()[:4] == b"\x89PNG"

    truth = open_truth()
    for name in ("sst.zarr", "sst.nc"):
        with xr.open_dataset(out / name) as cube:
            assert cube.attrs["Conventions"].startswith("CF-")
            assert cube["sst"].attrs["units"] == "K"
            assert cube["sst"].dims == truth.dims
            xr.testing.assert_equal(cube["time"].drop_attrs(), truth["time"].drop_attrs())
            assert (cube["sst"].isnull() == truth.isnull()).all()


def test_the_target_is_what_is_left(truth, label):
    cube = build_cube(truth, label)
    rebuilt = first_guess(truth, train_steps(label)) + cube[TARGET]
    assert float(abs(rebuilt - truth).max()) < 1e-3


def means_of_blocks(field):
    return field.coarsen(latitude=FACTOR, longitude=FACTOR).mean()


def test_predictions_from_the_coarse_field_keep_its_means(truth, label):
    coarse = means_of_blocks(truth.astype("float64"))
    kept = keep_means(truth * 0 + 280.0, truth)
    for field in (kept, *baselines(truth, label).drop_vars("monthly climatology").values()):
        missing = means_of_blocks(field.where(truth.notnull())) - coarse
        assert float(abs(missing).max()) < 1e-6


@pytest.mark.parametrize(("row", "column"), [(0, 0), (1, 40), (2, 71)])
def test_the_ridge_regression_of_a_block_written_out(truth, label, row, column):
    train = train_steps(label)
    guess = first_guess(truth, train)
    coarse = means_of_blocks(truth.astype("float64")).values
    anomaly = np.nan_to_num(coarse - coarse[train.values].mean(0))
    angle = 2 * np.pi * truth["time"].dt.month.values / 12
    inputs = [
        anomaly[:, min(max(row + i, 0), 2), (column + j) % 72]
        for i in (-1, 0, 1)
        for j in (-1, 0, 1)
    ]
    inputs = np.stack([*inputs, np.sin(angle), np.cos(angle)], 1)
    cells = {
        "latitude": slice(6 * row, 6 * row + 6),
        "longitude": slice(6 * column, 6 * column + 6),
    }
    detail = (truth - guess).isel(cells).transpose("time", ...).values.reshape(54, -1)
    detail = np.nan_to_num(detail)

    months = np.flatnonzero(train.values)

    def fitted(months, alpha):
        x, y = inputs[months], detail[months]
        x_mean, y_mean = x.mean(0), y.mean(0)
        x, y = x - x_mean, y - y_mean
        slope = np.linalg.solve(x.T @ x + alpha * np.eye(11), x.T @ y)
        return (inputs - x_mean) @ slope + y_mean

    expected = guess.isel(cells) + fitted(months, PENALTY).reshape(54, 6, 6)
    expected = expected + (truth - expected).mean(["latitude", "longitude"])
    got = baselines(truth, label)["ridge regression"].isel(cells)
    sea = truth.isel(cells).notnull()
    xr.testing.assert_allclose(got.where(sea), expected.where(sea), atol=1e-6)
