"""XrDataset: the sampler's windows and rules, in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr

from ml4cube.core.errors import CubeError, EmptyPartError
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.xr_dataset import XrDataset
from ml4cube.preprocessing import CubeScaler, Statistics
from ml4cube.splits import assign_block_split
from tests.cubes import cell_id_cube
from tests.oracle_sampler import sample_cube

SHAPE = {"time": 8, "lat": 9, "lon": 10}
BLOCKS = {"time": 2, "lat": 5, "lon": 4}


def split_cube(**options: Any) -> Any:
    cube = cell_id_cube(SHAPE, "float64", names=("a", "b"), **options)
    return assign_block_split(cube, {"time": 2}, split=0.7)


@pytest.mark.parametrize("size", [None, {"lat": 2, "lon": 3}, {"time": 2, "lat": 9}])
@pytest.mark.parametrize("at_random", [False, True])
def test_same_samples_as_the_oracle(size: Any, at_random: bool) -> None:
    ds = split_cube(gaps=0.01)
    made = XrDataset(
        ds, sample_size=size, block_size=BLOCKS, rand_chunk=at_random, scale_fn=None, overlap=0.5
    )
    data = made.get_datasets()
    full = {d: (size or {}).get(d, 1) for d in SHAPE}
    cells = {d: int(np.floor(n * 0.5 + 0.5)) if n > 1 else 0 for d, n in full.items()}
    counts, samples = sample_cube(ds, ["a", "b"], full, cells)
    for part, label in (("train", 1), ("test", 0)):
        wanted = sorted(window["a"].ravel().tolist() for _, window in samples[part])
        found = data["a"][data["split"] == label]
        assert sorted(found.reshape(len(found), -1).tolist()) == wanted
    assert {k: n for k, n in made.accounting.items() if k != "unused"} == counts
    assert made.accounting["unused"] == 0


def test_features_and_targets_scaled_by_train_alone() -> None:
    ds = split_cube()
    (x, y), (x2, y2) = XrDataset(
        ds, sample_size={"lat": 3, "lon": 5}, to_pred="b", rand_chunk=False
    ).get_datasets()
    assert x.shape[1:] == y.shape[1:] == (1, 3, 5)
    raw = ds.a.values[(ds.split.broadcast_like(ds.a) == 1).values]
    assert x.mean() == pytest.approx(0, abs=1e-12)
    assert x.std() == pytest.approx(1)
    first = ds.a.values[(ds.split.broadcast_like(ds.a) == 0).values].min()
    assert x2.min() == pytest.approx((first - raw.mean()) / raw.std())
    assert y2.shape[0] == x2.shape[0]


@pytest.mark.parametrize("form", ["statistics", "scaler", "per level", "store"])
def test_scaled_by_given_statistics(tmp_path: Path, form: str) -> None:
    """As the sampler scales the same windows by the same statistics."""
    ds = split_cube()
    other = ds * 3 + ds.lat
    other["split"] = ds["split"]
    per = ("variable", "lat") if form == "per level" else ("variable",)
    given: Any = CubeScaler(method="normalize", per=per).fit(other)
    if form == "statistics":
        given = Statistics.from_cube(other)
    options: dict[str, Any] = {"sample_size": {"lat": 2, "lon": 5}, "block_size": BLOCKS}
    stores = {name: tmp_path / name for name in ("train_cube", "test_cube")}
    if form == "store":
        MultiProcSampler(other, **options, nproc=1, **stores).run()
        given = stores["train_cube"]
        stores = {name: tmp_path / "own" / name for name in stores}
    own = MultiProcSampler(ds, **options, statistics=given, nproc=1, order="grid", **stores)
    made = XrDataset(ds, **options, statistics=given, rand_chunk=False)
    data = made.get_datasets()
    assert abs(data["a"].mean()) > 0.05  # not by its own statistics
    for store, label in zip(own.get_datasets(), (1, 0), strict=True):
        wanted = np.sort(store["a"].values.reshape(len(store.samples), -1), axis=0)
        found = data["a"][data["split"] == label]
        np.testing.assert_array_equal(np.sort(found.reshape(len(found), -1), axis=0), wanted)


def test_given_statistics_must_know_every_variable() -> None:
    with pytest.raises(CubeError, match=r"statistics=.*'b'"):
        XrDataset(split_cube(), statistics=Statistics.from_cube(split_cube()[["a", "split"]]))
    with pytest.raises(CubeError, match="scale_fn=None"):
        XrDataset(split_cube(), statistics=Statistics.from_cube(split_cube()), scale_fn=None)


def test_points_have_channels_last_and_only() -> None:
    (x, y), _ = XrDataset(split_cube(), to_pred=["b"], block_size={"time": 2}).get_datasets()
    assert x.shape[1:] == y.shape[1:] == (1,)


def test_num_chunks_uses_that_many_blocks_of_both_parts() -> None:
    ds = cell_id_cube({"time": 40, "x": 6}, "float64", names=("a", "b"), dask_chunks={"time": 4})
    made = XrDataset(ds, num_chunks=np.int64(5), rand_chunk=False, to_pred="b")
    (x, _), (x2, _) = made.get_datasets()
    assert len(x) + len(x2) == 5 * 4 * 6
    assert len(x2)
    assert made.accounting["unused"] == 5 * 24
    again = XrDataset(ds, num_chunks=5, rand_chunk=True, to_pred="b", seed=1)
    assert sum(len(pair[0]) for pair in again.get_datasets()) == 120


def test_a_later_block_replaces_the_last_one_where_a_part_would_be_empty() -> None:
    ds = cell_id_cube({"time": 40}, "float64", names=("a", "b"), dask_chunks={"time": 4})
    ds["split"] = ("time", np.repeat(np.uint8([1, 0]), [36, 4]))
    made = XrDataset(ds, num_chunks=3, rand_chunk=False, to_pred="b", scale_fn=None)
    (x, _), (x2, _) = made.get_datasets()
    assert (x.ravel().tolist(), x2.ravel().tolist()) == ([*range(8)], [*range(36, 40)])
    assert (made.accounting["train"], made.accounting["unused"]) == (8, 28)


def test_blocks_in_which_no_window_starts_do_not_count_for_patience() -> None:
    ds = cell_id_cube({"time": 40}, "float64", dask_chunks={"time": 1})
    made = XrDataset(ds, sample_size={"time": 10}, rand_chunk=False, patience=5)
    assert made.accounting["train"] == 4


def test_blocks_given_up_for_patience_are_warned_of() -> None:
    ds = cell_id_cube({"time": 40}, "float64", dask_chunks={"time": 4})
    is_gap = xr.DataArray(np.repeat([False, True, False], [4, 28, 8]), dims="time")
    with pytest.warns(UserWarning, match=r"5 blocks in a row .* not read .* patience="):
        made = XrDataset(ds.where(~is_gap), rand_chunk=False, patience=5)
    assert (made.accounting["train"], made.accounting["unused"]) == (4, 16)


def test_dates_cannot_be_stacked_with_numbers() -> None:
    ds = split_cube()
    ds["when"] = ds["a"].astype("M8[s]")
    made = XrDataset(ds, to_pred="b")
    with pytest.raises(CubeError, match=r"got dates \['when'\]; choose others by features="):
        made.get_datasets()


def test_all_of_a_cube_without_label() -> None:
    data = XrDataset(cell_id_cube(SHAPE), scale_fn="normalize").get_datasets()
    assert list(data) == ["a"]
    assert (data["a"].min(), data["a"].max(), data["a"].size) == (0, 1, 720)
    assert data["a"].dtype == np.float32


def test_chunk_indices() -> None:
    ds = cell_id_cube({"time": 40}, "float64", dask_chunks={"time": 4})
    data = XrDataset(ds, chunk_indices=[2, 0], scale_fn=None).get_datasets()
    assert data["a"].tolist() == [8, 9, 10, 11, 0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chunk_indices": [9999]}, "chunk_indices"),
        ({"chunk_indices": [0, 2, 0]}, "each block once"),
        ({"num_chunks": 0}, "num_chunks must be at least 1"),
        ({"num_chunks": 1.5}, "num_chunks must be an integer"),
        ({"rand_chunk": "no"}, "rand_chunk must be True or False, got 'no'"),
        ({"to_pred": "c"}, "to_pred"),
        ({"to_pred": ["a", "b"]}, "no variable to predict from"),
        ({"drop_nan": "never"}, "drop_nan"),
        ({"seed": "x"}, "seed"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        XrDataset(split_cube(), **options).get_datasets()
    assert isinstance(caught.value, CubeError)


def test_scaling_needs_a_train_sample_in_the_blocks_used() -> None:
    ds = cell_id_cube({"time": 8}, "float64", dask_chunks={"time": 4})
    ds["split"] = ("time", np.repeat(np.uint8([0, 1]), 4))
    options: dict[str, Any] = {"rand_chunk": False, "num_chunks": 1}
    with pytest.raises(EmptyPartError, match=r"no train sample, .*num_chunks"):
        XrDataset(ds, **options)
    assert XrDataset(ds, **options, scale_fn=None).get_datasets()["split"].tolist() == [0] * 4


def test_all_gaps() -> None:
    with pytest.raises(EmptyPartError, match="no sample"):
        XrDataset(split_cube(gaps=1.0))
