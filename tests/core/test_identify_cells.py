"""Arrays are identified by their cells, however these are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st

from ml4cube.core.fingerprint import identify_cells
from ml4cube.sampling.identity.cube import hash_cells
from tests.cubes import cell_id_cube


@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dtype=st.sampled_from(["float32", "float64", "int16", "bool", "datetime64[s]"]),
    data=st.data(),
)
def test_sums_of_boxes_are_those_of_the_whole_and_of_no_other_array(
    shape: list[int], dtype: str, data: Any
) -> None:
    values = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    whole = identify_cells(values, (0,) * values.ndim)
    axis = data.draw(st.integers(0, values.ndim - 1))
    cut = data.draw(st.integers(0, shape[axis]))
    starts = [0] * values.ndim
    starts[axis] = cut
    first, second = np.split(values, [cut], axis)
    sums = identify_cells(first, (0,) * values.ndim) + identify_cells(second, starts)
    assert sums.tolist() == whole.tolist()
    for other in (np.roll(values, 1), np.flip(values, axis)):
        is_same = np.array_equal(other, values)
        assert (identify_cells(other, (0,) * values.ndim).tolist() == whole.tolist()) == is_same


def test_two_signs_that_change_together_are_noticed() -> None:
    values = np.ones((4, 4))
    changed = values.copy()
    changed[1, 2] = changed[3, 0] = -1
    sums = [identify_cells(array, (0, 0)).tolist() for array in (values, changed)]
    assert sums[0] != sums[1]


def test_the_hash_of_a_cube_does_not_depend_on_its_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ml4cube.cube.chunks.blocks.BLOCK_CELLS", 100)
    cube = cell_id_cube({"time": 8, "lat": 6, "lon": 10}, gaps=0.1)
    hashes = set()
    for chunks in ({"time": 8, "lat": 6, "lon": 10}, {"time": 1}, {"lat": 4, "lon": 3}):
        lazy = xr.Dataset({"a": cube.a.chunk(chunks) + 0})
        hashes.add(hash_cells("a", lazy.a.variable))
    hashes.add(hash_cells("a", (cube.a + 0).variable))
    assert len(hashes) == 1
    assert hash_cells("a", (cube.a + 1).variable) not in hashes
