"""Through split, sampler and loader: no cell leaks, no sample is lost, none comes twice.

Every cell of these cubes holds its own number, so a sample says where it came from.
"""

import itertools
import math
import warnings

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.datasets.xr_dataset import XrDataset
from ml4cube.errors import EmptyPartError
from ml4cube.prediction import predict_cube
from ml4cube.preprocessing import fill_nan_values
from ml4cube.splits import assign_block_split
from ml4cube.training.losses import MaskedLoss
from ml4cube.training.pytorch import Trainer
from tests.cubes import cell_id_cube

SHAPE = {"time": 15, "lat": 10, "lon": 11}
PARTS = ("train", "test", "val")


@st.composite
def roads(draw):
    """A cube, a way to split it and a way to cut it."""
    dims = draw(st.permutations(list(SHAPE)))
    return {
        "cube": {
            "gaps": draw(st.sampled_from([0.0, 0.05])),
            "dim_order": tuple(dims),
            "dask_chunks": draw(st.sampled_from([None, {"time": 4, "lat": 5, "lon": 6}])),
        },
        "block_size": draw(st.sampled_from([{"time": 3}, {"time": 5, "lat": 5, "lon": 6}])),
        "buffer": draw(st.sampled_from([None, 1])),
        "sample_size": draw(st.sampled_from([None, {"lat": 2, "lon": 3}, {"time": 2, "lat": 2}])),
        "overlap": draw(st.sampled_from([None, 0.5])),
        "seed": draw(st.integers(0, 99)),
    }


def used_up(labelled, road):
    """Whether some part holds no window whose cells are all its own and no gaps, by a loop."""
    size = {dim: (road["sample_size"] or {}).get(dim, 1) for dim in SHAPE}
    share = road["overlap"] or 0
    step = {
        d: n - (max(1, int(share * n + 0.5)) if share and n > 1 else 0) for d, n in size.items()
    }
    cube = labelled.transpose(*SHAPE)
    label = np.broadcast_to(cube["split"].broadcast_like(cube["a"]), tuple(SHAPE.values()))
    usable = np.where(np.isfinite(cube["a"].values), label, 255)
    found = set()
    starts = (range(0, n - size[d] + 1, step[d]) for d, n in SHAPE.items())
    for start in itertools.product(*starts):
        box = tuple(slice(a, a + n) for a, n in zip(start, size.values(), strict=True))
        if len(here := set(usable[box].ravel().tolist())) == 1:
            found |= here
    return not {0, 1, 2} <= found


def cells_of(batches):
    """The cell numbers of every sample, one row a sample."""
    rows = [np.asarray(x, dtype="float64").reshape(len(x), -1) for x in batches]
    return np.concatenate(rows) if rows else np.empty((0, 1))


@pytest.mark.slow
@settings(
    max_examples=15,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(road=roads())
def test_no_leak_no_loss_no_duplicate(tmp_path_factory, road):
    folder = tmp_path_factory.mktemp("road")
    cube = cell_id_cube(SHAPE, dtype="float64", seed=road["seed"], **road["cube"])
    labelled = assign_block_split(
        cube,
        block_size=road["block_size"],
        split=0.6,
        val=0.2,
        seed=road["seed"],
        buffer=road["buffer"],
    )
    sampler = MultiProcSampler(
        labelled,
        sample_size=road["sample_size"],
        overlap=road["overlap"] if road["sample_size"] else None,
        scale_fn=None,
        nproc=1,
        train_cube=str(folder / "train.zarr"),
        test_cube=str(folder / "test.zarr"),
        val_cube=str(folder / "val.zarr"),
        seed=road["seed"],
    )
    try:
        opened = sampler.get_datasets()
    except EmptyPartError:  # right only where buffer and straddlers do use up a part
        assert used_up(labelled, road)
        assert not list(folder.iterdir())
        return
    stores = dict(zip(PARTS, opened, strict=True))

    datasets = {part: PTXrDataset(store, features=["a"]) for part, store in stores.items()}
    seen = {}
    for part, dataset in datasets.items():
        loader = prep_dataloader(dataset, batch_size=4, drop_last=False, seed=road["seed"])
        seen[part] = cells_of(loader)

    accounting = dict(sampler.plan().accounting)
    total = accounting.pop("total")
    assert sum(accounting.values()) == total
    label = {
        number: part
        for part, code in {"train": 1, "test": 0, "val": 2}.items()
        for number in cube["a"].values[
            labelled["split"].broadcast_like(cube["a"]).transpose(*cube["a"].dims).values == code
        ]
    }
    for part, rows in seen.items():
        assert len(rows) == accounting[part] == len(datasets[part])
        assert len(np.unique(rows, axis=0)) == len(rows)
        assert np.isfinite(rows).all()
        assert {label[number] for number in np.unique(rows)} <= {part}


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_a_loader_that_drops_its_last_batch_drops_less_than_a_batch(tmp_path, batch_size):
    cube = assign_block_split(cell_id_cube(SHAPE, dtype="float64"), block_size={"time": 3})
    train, test = MultiProcSampler(
        cube,
        scale_fn=None,
        nproc=1,
        train_cube=str(tmp_path / "train.zarr"),
        test_cube=str(tmp_path / "test.zarr"),
    ).get_datasets()
    loader, honest = prep_dataloader(
        PTXrDataset(train, features=["a"]), PTXrDataset(test, features=["a"]), batch_size=batch_size
    )
    assert train.sizes["samples"] - len(cells_of(loader)) == train.sizes["samples"] % batch_size
    assert len(np.unique(cells_of(honest))) == test.sizes["samples"]


WINDOW = {"lat": 4, "lon": 4}


def gappy_cube():
    """b is twice a; a has gaps, b has others, and cells weigh more to the north."""
    shape = {"time": 20, "lat": 8, "lon": 8}
    rng = np.random.default_rng(0)
    a = rng.normal(280, 5, tuple(shape.values()))
    b = 2 * a
    a[rng.random(a.shape) < 0.1] = np.nan
    b[rng.random(b.shape) < 0.3] = np.nan
    b[:, :2, :2] = np.nan  # as land in a sea
    return xr.Dataset(
        {"a": (tuple(shape), a), "b": (tuple(shape), b), "w": ("lat", np.arange(1.0, 9))},
        coords={dim: np.arange(n) for dim, n in shape.items()},
    ).assign(split=("time", [1] * 12 + [0] * 4 + [2] * 4))


class Same(torch.nn.Module):
    """Gives X back, and learns nothing."""

    def __init__(self):
        super().__init__()
        self.none = torch.nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + 0 * self.none


def scored(cube, fill, scale_fn):
    """Weighted mean square over measured cells of the validation part, by a loop over cells."""
    train = cube.isel(time=cube.split == 1)
    moments = {}
    filled = cube.a.fillna({"mean": float(train.a.mean()), "constant": -3.0}[fill]).values
    for name, values in (("a", filled[:12]), ("b", train.b.values)):
        finite = values[np.isfinite(values)]
        moments[name] = (finite.mean(), finite.std()) if scale_fn else (0.0, 1.0)
    total, weight, b = 0.0, 0.0, cube.b.values
    for time, lat, lon in itertools.product(range(16, 20), range(8), range(8)):
        truth = b[time, lat, lon]
        if math.isnan(truth):
            continue
        (mean_a, std_a), (mean_b, std_b) = moments["a"], moments["b"]
        x = (filled[time, lat, lon] - mean_a) / std_a
        total += (lat + 1) * (x - (truth - mean_b) / std_b) ** 2
        weight += lat + 1
    return filled, moments, total / weight


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fill", "scale_fn", "lazy"),
    [("mean", "standardize", False), ("constant", None, False), ("mean", "standardize", True)],
)
def test_gaps_of_targets_count_nothing_from_cube_to_score(tmp_path, fill, scale_fn, lazy, recwarn):
    """Inputs are filled, targets are not, so a validation loss is that of the measured cells."""
    cube = gappy_cube()
    cut = {"sample_size": WINDOW, "drop_nan": None, "scale_fn": scale_fn, "fill_method": fill}
    cut["const"] = -3.0 if fill == "constant" else None
    if lazy:
        parts = {part: PTXrDataset(cube, "b", "a", weights="w", part=part, **cut) for part in PARTS}
    else:
        MultiProcSampler(
            cube,
            to_pred="b",
            nproc=1,
            **{f"{part}_cube": tmp_path / f"{part}.zarr" for part in PARTS},
            **cut,
        ).run()
        parts = {
            part: PTXrDataset(tmp_path / f"{part}.zarr", "b", "a", weights="w") for part in PARTS
        }
    train, val = prep_dataloader(parts["train"], batch_size=3, val_ds=parts["val"])
    model = Same()
    trainer = Trainer(
        model,
        train_data=train,
        test_data=val,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=MaskedLoss(torch.nn.MSELoss()),
        epochs=1,
    )
    trainer.train()
    filled, moments, expected = scored(cube, fill, scale_fn)
    assert trainer.history["val_loss"][0] == pytest.approx(expected, rel=1e-4)

    source = parts["train"] if lazy else tmp_path / "train.zarr"
    predicted = predict_cube(model, cube, source, features="a", targets="b", keep_gaps=False)
    (mean_a, std_a), (mean_b, std_b) = moments["a"], moments["b"]
    right = (filled - mean_a) / std_a * std_b + mean_b
    np.testing.assert_allclose(predicted.b, right, rtol=1e-5)
    assert not [w for w in recwarn if "fill" in str(w.message)]


def filled_in(values):
    """How many cells hold the stand-in of these tests."""
    return int((np.asarray(values) == -3).sum())


@pytest.mark.slow
def test_targets_are_filled_only_by_name(tmp_path):
    """However samples are made; b has 30 % of gaps."""
    cube = gappy_cube()
    cut = {"sample_size": WINDOW, "drop_nan": None, "scale_fn": None, "const": -3.0}
    gaps = {name: int(cube[name].isel(time=cube.split == 1).isnull().sum()) for name in "ab"}
    for number, (fill, wanted) in enumerate(
        [
            ("constant", ["a"]),
            ({"a": "constant", "b": None}, ["a"]),
            ({"b": "constant"}, ["b"]),
            ({"a": "constant", "b": "constant"}, ["a", "b"]),
        ]
    ):
        expected = [gaps["a"] if "a" in wanted else 0, gaps["b"] if "b" in wanted else 0]
        (x, y), _ = XrDataset(
            cube, to_pred="b", features="a", fill_method=fill, **cut
        ).get_datasets()
        assert [filled_in(x), filled_in(y)] == expected
        data = PTXrDataset(cube, "b", "a", fill_method=fill, **cut)
        assert [filled_in(values) for values in data.take(range(len(data)))] == expected
        if number not in (0, 2):
            continue
        folder = tmp_path / str(number)
        sampler = MultiProcSampler(
            cube,
            to_pred="b",
            fill_method=fill,
            nproc=1,
            **{f"{part}_cube": folder / f"{part}.zarr" for part in PARTS},
            **cut,
        )
        train = sampler.get_datasets()[0]
        assert [filled_in(train[name]) for name in "ab"] == expected
        assert train.attrs["filled"] == dict.fromkeys(wanted, "constant")
        assert ("gaps of 'b'" in str(sampler.plan())) == ("b" in wanted)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # whoever named b knows
            PTXrDataset(folder / "train.zarr", "b")


def test_a_target_that_was_filled_before_is_named(tmp_path):
    """By the sampler without to_pred, or in the cube: its values cannot be told from real ones."""
    cube = gappy_cube()
    cube["whole"] = cube.a.fillna(280.0)
    paths = {f"{part}_cube": tmp_path / f"{part}.zarr" for part in PARTS}
    cut = {"sample_size": WINDOW, "drop_nan": None}
    MultiProcSampler(cube, fill_method="mean", nproc=1, **paths, **cut).run()
    store = tmp_path / "train.zarr"
    for options in ({}, {"target_offset": {"lat": 1}}):
        with pytest.warns(UserWarning, match=r"to_pred: gaps of 'b' \('mean'\) were filled"):
            PTXrDataset(store, "b", **options)
    with pytest.warns(UserWarning, match=r"weights: gaps of 'a' \('mean'\) were filled"):
        PTXrDataset(store, "whole", "w", weights="a")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        PTXrDataset(store, "whole", weights="w")  # neither had gaps
        PTXrDataset(store, features="b")

    filled = fill_nan_values(cube)
    assert "ml4cube_filled" not in filled.whole.attrs
    anew = {f"{part}_cube": tmp_path / f"{part}2.zarr" for part in PARTS}
    samples = xr.Dataset({"b": ("samples", [1.0, np.nan]), "a": ("samples", [1.0, 2.0])})
    for make in (
        lambda: MultiProcSampler(filled, to_pred="b", **anew, **cut),
        lambda: XrDataset(filled, to_pred="b", **cut),
        lambda: PTXrDataset(filled.chunk(), "b", **cut),
        lambda: PTXrDataset(fill_nan_values(samples), "b"),
    ):
        with pytest.warns(UserWarning, match=r"to_pred: gaps of 'b' \('mean'\) were filled"):
            make()
    apart = fill_nan_values(cube, method={"a": "mean", "b": None})
    assert apart.b.variable.identical(cube.b.variable)
    assert apart.a.isnull().sum() == 0


def test_filling_what_is_dropped_anyway_is_named(tmp_path):
    cube = gappy_cube()
    paths = {f"{part}_cube": tmp_path / f"{part}.zarr" for part in PARTS}
    for make in (
        lambda: MultiProcSampler(cube, fill_method="mean", nproc=1, **paths).plan(),
        lambda: XrDataset(cube, fill_method={"a": "mean"}),
        lambda: PTXrDataset(cube, "b", fill_method="mean"),
    ):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            make()
        told = [w for w in caught if "drop_nan='auto' drops every sample" in str(w.message)]
        assert [warning.filename for warning in told] == [__file__]


@pytest.mark.parametrize("drop_sample", [False, True])
def test_integer_targets_outside_a_mask_are_warned_of(drop_sample):
    shape = {"time": 8, "lat": 4}
    cube = cell_id_cube(shape, "float64", names=("a", "b"))
    cube = cube.assign(b=cube.b.astype("int16"), sea=cube.a.isel(time=0, drop=True) > 1)
    asked = {"to_pred": "b", "filter_var": "sea", "drop_sample": drop_sample}
    asked |= {"sample_size": {"time": 2}, "drop_nan": None}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        PTXrDataset(cube, block_size={"time": 2}, **asked)
    said = [w for w in caught if "cannot hold gaps" in str(w.message)]
    assert [w.filename for w in said] == [__file__] * (not drop_sample)
