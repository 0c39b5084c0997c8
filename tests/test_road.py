"""Through split, sampler and loader: no cell leaks, no sample is lost, none comes twice.

Every cell of these cubes holds its own number, so a sample says where it came from.
"""

import itertools

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset, prep_dataloader
from ml4cube.errors import EmptyPartError
from ml4cube.splits import assign_block_split
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


@settings(
    max_examples=15,
    deadline=None,
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
