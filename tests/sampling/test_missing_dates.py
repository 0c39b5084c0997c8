"""Windows of several steps that span missing dates are counted and told, and nothing else is."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cftime
import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

from ml4cube.core.time_steps import TimeSteps, WindowsOverTime
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.datasets.xr_dataset import XrDataset
from ml4cube.prediction import predict_cube
from ml4cube.store.format import open_store
from ml4cube.store.metadata import StoreMetadata
from tests.samplestores import paths

SOME_DAYS = [day for day in range(40) if day not in (8, 9, 21)]


def cube(dates: Any) -> xr.Dataset:
    values = np.arange(len(dates) * 4, dtype="float32").reshape(len(dates), 4)
    return xr.Dataset({"a": (("time", "x"), values)}, {"time": dates})


def with_holes() -> xr.Dataset:
    return cube(xr.date_range("2000-01-01", periods=40)[SOME_DAYS])


def told(call: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in caught if "missing dates" in str(one.message)]


def sampler(ds: xr.Dataset, folder: Path, **options: Any) -> MultiProcSampler:
    given = {"nproc": 1, "block_size": {"time": 9}, "scale_fn": None, "data_split": 0.5}
    return MultiProcSampler(ds, **paths(folder), **{**given, **options})


def identity(x: Any) -> Any:
    return x


STAGES: dict[str, Callable[[xr.Dataset, Path, dict[str, Any]], Any]] = {
    "sampler": lambda ds, folder, cut: sampler(ds, folder, **cut),
    "PTXrDataset": lambda ds, folder, cut: PTXrDataset(ds, **cut),
    "XrDataset": lambda ds, folder, cut: XrDataset(ds, **cut),
    "predict_cube": lambda ds, folder, cut: predict_cube(identity, ds, progress=False, **cut),
}


@pytest.mark.parametrize("stage", STAGES)
def test_windows_over_missing_dates_are_told(tmp_path: Path, stage: str) -> None:
    cut = {"sample_size": {"time": 3, "x": 2}, "overlap": {"time": 2 / 3}}
    windows = [SOME_DAYS[i + 2] - SOME_DAYS[i] > 2 for i in range(len(SOME_DAYS) - 2)]
    (text,) = told(lambda: STAGES[stage](with_holes(), tmp_path, cut))
    assert text.startswith(
        f"{2 * sum(windows)} of {2 * len(windows)} windows span missing dates, and so more time "
        "than the others: steps along 'time' differ or go back in time: 1 to 3 days, with a median "
        "of 1; the longest is from 2000-01-08"
    )
    assert told(lambda: STAGES[stage](with_holes(), tmp_path, {"sample_size": {"x": 2}})) == []


def test_the_plan_counts_them_and_the_store_says_so(tmp_path: Path) -> None:
    made = sampler(with_holes(), tmp_path, sample_size={"time": 3})
    plan = made.plan()
    # windows of steps 6 to 8 (days 6, 7, 10) and 18 to 20 (days 20, 22, 23)
    expected = 4 * sum(SOME_DAYS[i + 2] - SOME_DAYS[i] > 2 for i in range(0, 35, 3))
    assert plan.over_missing_dates == expected > 0
    assert f"{expected} windows span missing dates" in str(plan)
    accounting = dict(plan.accounting)
    assert accounting.pop("total") == sum(accounting.values())
    made.run()
    for part in ("train", "test"):
        store = open_store(tmp_path / f"{part}.zarr")
        assert store.attrs["windows_over_missing_dates"] == expected
        assert store.attrs["accounting"] == dict(plan.accounting)
        assert StoreMetadata.of(store).over_missing_dates == expected
    data = PTXrDataset(with_holes(), sample_size={"time": 3})
    assert data.metadata is not None
    assert data.metadata.over_missing_dates == expected
    sampler(with_holes(), tmp_path / "even", sample_size={"time": 1}).run()
    assert "windows_over_missing_dates" not in open_store(tmp_path / "even/train.zarr").attrs


def test_pairs_of_windows_are_counted(tmp_path: Path) -> None:
    options: dict[str, Any] = {"overlap": {"time": 0.5}, "sample_size": {"time": 2}}
    data = PTXrDataset(with_holes(), "a", target_offset={"time": 2}, **options)
    starts = range(len(SOME_DAYS) - 3)  # whose targets lie in the cube
    assert data.metadata is not None
    assert data.metadata.over_missing_dates == 4 * sum(
        SOME_DAYS[i + 1] - SOME_DAYS[i] > 1 for i in starts
    )


REGULAR: dict[str, Any] = {
    "days": xr.date_range("2000-01-01", periods=40),
    "hours": xr.date_range("2000-01-01", periods=40, freq="6h"),
    "months": xr.date_range("2000-01-01", periods=40, freq="MS"),
    "ends of months": xr.date_range("2000-01-01", periods=40, freq="ME"),
    "seasons": xr.date_range("2000-01-01", periods=40, freq="QS-DEC"),
    "years": xr.date_range("2000-01-01", periods=40, freq="YS"),
    "backwards": xr.date_range("2000-01-01", periods=40)[::-1],
    "360 days": xr.date_range("2000-01-01", periods=400, calendar="360_day", use_cftime=True),
    "noleap": xr.date_range("2000-01-01", periods=400, calendar="noleap", use_cftime=True),
    "months of noleap": xr.date_range(
        "2000-01-01", periods=40, freq="MS", calendar="noleap", use_cftime=True
    ),
    # as of MODIS: every 8 days, again from each first of January
    "8 days": np.concatenate(
        [np.datetime64(f"{year}-01-01") + np.arange(0, 365, 8) for year in (2001, 2002)]
    ).astype("M8[ns]"),
    "numbers": np.arange(40) ** 2,
}


@pytest.mark.parametrize("kind", REGULAR)
def test_regular_steps_are_not_told(tmp_path: Path, kind: str) -> None:
    ds = cube(REGULAR[kind])
    for stage in STAGES.values():
        assert told(lambda stage=stage: stage(ds, tmp_path, {"sample_size": {"time": 3}})) == []  # type: ignore[misc]


@pytest.mark.parametrize("calendar", ["noleap", "360_day"])
def test_holes_in_other_calendars_are_told(tmp_path: Path, calendar: str) -> None:
    dates = xr.date_range("2000-01-01", periods=40, calendar=calendar, use_cftime=True)[SOME_DAYS]
    assert len(told(lambda: PTXrDataset(cube(dates), sample_size={"time": 3}))) == 1


def test_coordinates_without_steps() -> None:
    assert TimeSteps.of("time", np.array(["2000-01-01"], "M8[ns]")) is None
    assert TimeSteps.of("time", np.array(["2000-01-01", "NaT", "2000-01-03"], "M8[ns]")) is None
    assert TimeSteps.of("x", np.arange(4.0)) is None


@settings(max_examples=100, deadline=None)
@given(
    days=st.lists(st.integers(-3, 6), min_size=2, max_size=14),
    size=st.integers(2, 5),
    stride=st.integers(1, 4),
    others=st.integers(1, 3),
    in_cftime=st.booleans(),
)
def test_counts_equal_those_of_a_loop(
    days: list[int], size: int, stride: int, others: int, in_cftime: bool
) -> None:
    positions = np.concatenate([[0], np.cumsum(days)])
    dates: Any = np.datetime64("2000-01-01", "ns") + positions * np.timedelta64(1, "D")
    if in_cftime:
        first = cftime.DatetimeNoLeap(2000, 1, 1)
        dates = np.array([first + np.timedelta64(int(p), "D").astype(object) for p in positions])
    starts = np.arange(0, len(dates) - size + 1, stride)
    found = WindowsOverTime.of(
        {"time": (starts, size), "x": (np.arange(others), 1)}, {"time": dates}
    )
    median = np.median(days)
    spanning = 0
    for start in starts:
        steps = [days[i] * np.sign(median) for i in range(start, start + size - 1)]
        spanning += any(not 0 < step <= 1.5 * abs(median) for step in steps)
    assert found.over_missing_dates == spanning * others
    assert found.total == len(starts) * others


def test_two_dates_have_a_step_and_one_has_none():
    dates = np.array(["2000-01-01", "2000-01-03"], "M8[ns]")
    steps = TimeSteps.of("time", dates)
    assert steps.days.tolist() == [2.0]
    assert steps.go_forward
    assert not TimeSteps.of("time", dates[::-1]).go_forward
    assert TimeSteps.of("time", dates[:1]) is None
