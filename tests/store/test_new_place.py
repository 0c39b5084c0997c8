"""A new place for stores is one class of folders: nothing else knows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr

from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.datasets.store import open_store
from ml4cube.errors import StoreExistsError
from ml4cube.ledger.folders import Folder, size_and_hash


class Vault(Folder):
    """Files in a dict, as a service of keys and values would hold them."""

    is_session = True

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def __str__(self) -> str:
        return "the vault"

    def write(self, path: str, *pieces: bytes) -> tuple[int, str]:
        self.files[path] = b"".join(pieces)
        return size_and_hash(self.files[path])

    def read(self, path: str) -> bytes:
        if path not in self.files:
            raise FileNotFoundError(path)
        return self.files[path]

    def size(self, path: str) -> int | None:
        return len(self.files[path]) if path in self.files else None

    def list(self) -> dict[str, int]:
        return {path: len(content) for path, content in self.files.items()}

    def remove(self, path: str) -> None:
        self.files.pop(path, None)

    def zarr_store(self) -> Any:
        from zarr.core.buffer import default_buffer_prototype
        from zarr.storage import MemoryStore

        as_buffer = default_buffer_prototype().buffer.from_bytes
        content = {path: as_buffer(content) for path, content in self.files.items()}
        return MemoryStore(content), self, ""

    def system_and_path(self) -> tuple[Any, str]:
        return id(self.files), ""


def test_stores_are_made_opened_refused_and_replaced_in_a_new_place() -> None:
    cube = xr.Dataset({"a": (("time", "x"), np.arange(80.0).reshape(20, 4))})
    train, test = Vault(), Vault()

    def sampler(**arguments: Any) -> MultiProcSampler:
        places = {"train_cube": train, "test_cube": test, "block_size": [("time", 4)]}
        return MultiProcSampler(cube, nproc=1, scale_fn=None, **places, **arguments)

    stores = sampler().get_datasets()
    assert np.sort(np.concatenate([s["a"].values for s in stores])).tolist() == list(range(80))
    before = dict(train.files)
    with pytest.warns(UserWarning, match="nothing was written: the vault"):
        assert sampler().run() is None
    with pytest.raises(StoreExistsError, match=r"the vault exists .* seed was 42 and is 3"):
        sampler(seed=3).run()
    assert train.files == before
    sampler(seed=3, overwrite=True).run()
    assert train.files.keys() == before.keys()
    assert open_store(train)["a"].values.tolist() != stores[0]["a"].values.tolist()
    train.files["note.txt"] = b"mine"
    with pytest.raises(StoreExistsError, match=r"did not write.*'note\.txt'"):
        sampler(overwrite=True).run()
