"""Augmentation: what it draws, that X and y are turned alike, and that the grid stays one."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xarray as xr
from torch.utils.data import TensorDataset

from ml4cube.core.errors import CubeError, InvalidTypeError, InvalidValueError
from ml4cube.datasets.pytorch import Flip, PTXrDataset, Rotate90, prep_dataloader
from tests.cubes import cell_id_cube
from tests.samplestores import write_store

SHAPE = {"time": 24, "y": 4, "x": 4}


def data_of(**options: Any) -> PTXrDataset:
    cube = cell_id_cube(SHAPE, "float32", names=("a", "b"))
    sizes = {"y": 4, "x": 4, **options.pop("sizes", {})}
    options = {"to_pred": "b", "features": "a", "scale_fn": None, **options}
    return PTXrDataset(cube, sample_size=sizes, **options)


def batches(loader: Any) -> list[tuple[np.ndarray, ...]]:
    return [tuple(t.numpy() for t in batch) for batch in loader]


@pytest.mark.parametrize("turn", [Flip("x"), Flip(["y", "x"], p=0.3), Rotate90(("y", "x"))])
def test_x_and_y_of_a_sample_are_turned_alike_into_one_of_its_images(turn: Any) -> None:
    data = data_of(weights=None)
    plain = prep_dataloader(data, batch_size=6, seed=3)
    turned = prep_dataloader(data, batch_size=6, seed=3, augment=turn)
    images = []
    if isinstance(turn, Flip):
        images = [lambda v, axis=axis: np.flip(v, axis) for axis in ((), -1, -2, (-1, -2))]
        images = images if len(turn.dims) == 2 else images[:2]
    else:
        images = [lambda v, k=k: np.rot90(v, k, (-2, -1)) for k in range(4)]
    seen = set()
    for (x, y), (x_turned, y_turned) in zip(batches(plain), batches(turned), strict=True):
        for sample in range(len(x)):
            k = next(
                k for k, f in enumerate(images) if np.array_equal(f(x[sample]), x_turned[sample])
            )
            np.testing.assert_array_equal(images[k](y[sample]), y_turned[sample])
            seen.add(k)
    assert seen == set(range(len(images)))


def test_time_and_unequal_windows() -> None:
    data = data_of(sizes={"time": 2}, target_offset={"time": 2}, target_size={"time": 1})
    turn = Rotate90(("y", "x"), p=1).bind(data)
    x, y = data.take([0, 1])
    x_turned, y_turned = turn((x, y), torch.Generator().manual_seed(0))
    assert x_turned.shape == x.shape == (2, 1, 2, 4, 4)
    assert y_turned.shape == y.shape == (2, 1, 4, 4)
    for sample in range(2):
        k = next(
            k
            for k in (1, 2, 3)
            if torch.equal(torch.rot90(x[sample], k, (-2, -1)), x_turned[sample])
        )
        assert torch.equal(torch.rot90(y[sample], k, (-2, -1)), y_turned[sample])


def test_a_target_without_the_dims_stays_and_weights_turn() -> None:
    ds = xr.Dataset(
        {
            "a": (("samples", "y", "x"), np.arange(18.0).reshape(2, 3, 3)),
            "kind": ("samples", [4, 5]),
        }
    )
    data = PTXrDataset(ds, to_pred="kind", weights=[1.0, 2.0])
    x, y, w = data.take([0, 1])
    flipped = Flip("x", p=1).bind(data)((x, y, w), torch.Generator())
    assert torch.equal(flipped[0], x.flip(-1))
    assert flipped[1].tolist() == [[4.0], [5.0]]
    assert flipped[2].tolist() == [1.0, 2.0]
    by_name = PTXrDataset(ds.drop_vars("kind"))
    turned = Flip("x", p=1).bind(by_name)(by_name.take([1]), torch.Generator())
    assert torch.equal(turned["a"], x[1, :, :].flip(-1))


@pytest.mark.parametrize("form", ["store", "tensors", "processes"])
def test_draws_are_a_function_of_seed_epoch_and_batch(tmp_path: Path, form: str) -> None:
    path = write_store(tmp_path / "s.zarr", 50)

    def noise(batch: Any, generator: torch.Generator) -> Any:
        x = batch[0] if isinstance(batch, list) else batch
        return torch.rand(x.shape, generator=generator)

    def loader(seed: int = 1) -> Any:
        data: Any = PTXrDataset(path, features="a")
        if form == "tensors":
            data = TensorDataset(data.take(range(50)))
        options = {"workers": "processes"} if form == "processes" else {}
        return prep_dataloader(data, batch_size=8, seed=seed, augment=noise, **options)

    one = loader()
    first, second = list(one), list(one)
    assert all(map(torch.equal, first, loader()))
    drawn = [*first, *second, *loader(seed=2)]
    for a, b in itertools.combinations(drawn, 2):
        assert not torch.equal(a, b)

    left, resumed = loader(), loader()
    assert len(list(itertools.islice(left, 3))) == 3
    resumed.load_state_dict(left.state_dict())
    assert all(map(torch.equal, first[3:], resumed))


def test_several_in_turn_and_only_in_training() -> None:
    data = data_of()
    order = []

    def noting(name: str) -> Any:
        def step(batch: Any, generator: torch.Generator) -> Any:
            order.append(name)
            return batch

        return step

    train, test = prep_dataloader(
        data, data, batch_size=24, augment=[noting("one"), Flip("x", p=1), noting("two")]
    )
    ((x, _),) = train
    assert order == ["one", "two"]
    ((plain, _),) = test
    assert order == ["one", "two"]
    assert set(map(tuple, x.flip(-1).flatten(1).tolist())) == set(
        map(tuple, plain.flatten(1).tolist())
    )


def test_batches_are_made_on_the_device_asked_for() -> None:
    data = data_of()

    # meta stands for a device that is not main memory
    loader = prep_dataloader(data, batch_size=8, device="meta")
    assert {t.device.type for batch in loader for t in batch} == {"meta"}
    tensors = prep_dataloader(TensorDataset(torch.zeros(8, 2)), batch_size=8, device="meta")
    assert [x.device.type for (x,) in tensors] == ["meta"]
    both = prep_dataloader(data, batch_size=8, device="cpu", augment=Flip("x"))
    assert len(list(both)) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Flip("z").bind(data_of()), "unknown dims"),
        (lambda: Flip([]).bind(data_of()), "unknown dims"),
        (lambda: Flip("x", p=2), "must be a probability"),
        (lambda: Flip("x")(torch.zeros(1), torch.Generator()), "does not know the dims yet"),
        (lambda: Rotate90(("x",)), "must be two dims"),
        (lambda: Rotate90(("lat", "lon")), "swap latitude and longitude"),
        (lambda: Rotate90(("nav_lat", "Long")), "swap latitude and longitude"),
        (lambda: Rotate90(("y", "x")).bind(data_of(sizes={"y": 2})), "of one size"),
        (lambda: Rotate90(("time", "x")).bind(data_of()), "must have both dims"),
        (lambda: Flip("x").bind(TensorDataset(torch.zeros(3))), "got a TensorDataset"),
        (lambda: prep_dataloader(data_of(), augment="flip"), "augment must be a function"),
    ],
)
def test_turns_that_cannot_be(make: Any, message: str) -> None:
    with pytest.raises((InvalidTypeError, InvalidValueError), match=message):
        make()


def test_latitude_is_known_by_its_attributes_too() -> None:
    cube = cell_id_cube({"time": 3, "lat": 4, "lon": 4}, names=("a",)).rename(lat="y", lon="x")
    cube["y"].attrs, cube["x"].attrs = {"units": "degrees_north"}, {"units": "degrees_east"}
    data = PTXrDataset(cube, features="a", sample_size={"y": 4, "x": 4})
    with pytest.raises(InvalidValueError, match="swap latitude and longitude"):
        Rotate90(("y", "x")).bind(data)


def test_latitude_is_turned_into_longitude_when_that_is_meant() -> None:
    cube = cell_id_cube({"time": 3, "lat": 4, "lon": 4}, names=("a",))
    data = PTXrDataset(cube, features="a", sample_size={"lat": 4, "lon": 4})
    turn = Rotate90(("lat", "lon"), p=1, geographic=True).bind(data)
    assert not torch.equal(turn(data.take([0]), torch.Generator()), data.take([0]))


def test_a_loader_knows_its_last_batches() -> None:
    data = data_of()
    loader = prep_dataloader(data, batch_size=5, seed=1)
    kept = list(loader)
    for x, y in (kept[-1], kept[0]):
        samples = loader.samples((x, y))
        for ours, theirs in zip((x, y), data.take(samples), strict=True):
            assert torch.equal(ours, theirs)
        assert loader.coords((x, y)).keys() == data.coords(samples).keys()
        shown = loader.to_dataset((x, y), unscale=True)
        np.testing.assert_array_equal(shown["a"], x[:, 0])
        guess = loader.to_dataset((x, torch.zeros_like(y)))
        assert (guess["b"] == 0).all()
    with pytest.raises(InvalidValueError, match=r"one of the last 64 .* no copy"):
        loader.samples((x.clone(), y))
    turned = prep_dataloader(data, batch_size=5, augment=Flip("x"))
    batch = next(iter(turned))
    assert len(turned.coords(batch)["time"]) == 5
    with pytest.raises(CubeError, match="may have moved cells"):
        turned.to_dataset(batch)


# in memory or not, gathered one batch at a time or several
@pytest.mark.parametrize("buffer_mb", [64, 0.009, 0.004, 0.0012])
@pytest.mark.parametrize("part", ["train", "test"])
def test_every_batch_of_any_order_is_known(tmp_path: Path, buffer_mb: float, part: str) -> None:
    data = PTXrDataset(write_store(tmp_path / "s.zarr", 203), features="a")
    loaders = prep_dataloader(data, data, batch_size=4, buffer_mb=buffer_mb, drop_last=False)
    loader = loaders[("train", "test").index(part)]
    for _ in range(2):
        for batch in loader:
            samples = loader.samples(batch)
            assert samples.tolist() == batch[:, 0, 0, 0].int().tolist()


def test_windows_with_centres_of_their_own_are_not_turned() -> None:
    """Turned each about its own, y would lie on the other side of X than it does in the cube."""
    cube = cell_id_cube({"time": 8, "x": 10}, names=("a",))
    options: dict[str, Any] = {"to_pred": "a", "sample_size": {"time": 2, "x": 4}}
    for lead in (
        {"target_offset": {"x": 2}},
        {"target_size": {"x": 2}},
        {"target_offset": {"time": 3}, "target_size": {"time": 1}},
    ):
        data = PTXrDataset(cube, **options, **lead)
        dim = next(iter(lead.get("target_offset", lead.get("target_size", {}))))
        with pytest.raises(
            InvalidValueError,
            match=rf"along '{dim}' the centre of the targets .* is not that of the inputs",
        ):
            Flip(dim).bind(data)
    inner = PTXrDataset(cube, **options, target_offset={"x": 1}, target_size={"x": 2})
    x, y = Flip("x", p=1).bind(inner)(inner.take([0]), torch.Generator())
    assert torch.equal(x[..., 1:3], y)
