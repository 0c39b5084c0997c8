"""Damage to what a sample store says about itself never passes, whoever reads it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ml4cube.core.errors import StoreError
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.store.format import StoreMetadata, open_axes, open_store
from tests.cubes import cell_id_cube

pytestmark = pytest.mark.soak


def flipped(content: bytes, rng: np.random.Generator) -> bytes:
    broken = bytearray(content)
    for place in rng.integers(len(content), size=rng.integers(1, 4)):
        broken[place] ^= 1 << int(rng.integers(8))
    return bytes(broken)


def overwritten(content: bytes, rng: np.random.Generator) -> bytes:
    """A few bytes of the file, put elsewhere in it."""
    broken = bytearray(content)
    size = int(rng.integers(1, min(40, len(content))))
    start, to = rng.integers(len(content) - size, size=2)
    broken[to : to + size] = content[start : start + size]
    return bytes(broken)


@pytest.mark.parametrize("damage", [flipped, overwritten])
def test_no_damage_of_metadata_passes(
    tmp_path: Path, damage: Callable[[bytes, np.random.Generator], bytes]
) -> None:
    """8,000 times, in any file of metadata; only readers of that file have to notice."""
    place = tmp_path / "train.zarr"
    MultiProcSampler(
        cell_id_cube({"time": 12, "lat": 6, "lon": 6}),
        train_cube=place,
        test_cube=tmp_path / "test.zarr",
        sample_size={"lat": 2, "lon": 2},
        block_size={"time": 3},
        nproc=1,
    ).run()
    files = {path: path.read_bytes() for path in sorted(place.rglob("zarr.json"))}
    everywhere, axes = [*files], [p for p in files if p.relative_to(place).parts[0] == "axes"]
    about = [place / "zarr.json", place / "manifest/zarr.json"]
    readers: list[tuple[Callable[[Path], object], list[Path]]] = [
        (open_store, everywhere),
        (PTXrDataset, everywhere),
        (open_axes, axes),
        (StoreMetadata.of, about),
    ]
    rng = np.random.default_rng(0)
    noticed = 0
    for k in range(8_000):
        read, reached = readers[k % len(readers)]
        path = reached[int(rng.integers(len(reached)))]
        broken = damage(files[path], rng)
        if broken == files[path]:
            continue
        path.write_bytes(broken)
        with pytest.raises(StoreError) as raised:
            read(place)
        assert path.relative_to(place).as_posix() in str(raised.value)
        path.write_bytes(files[path])
        noticed += 1
    assert noticed > 6_000
    for read, _ in readers:
        read(place)
