"""Windows of flags and filling, against the oracle, 1-D to 5-D."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.missing import (
    fill_gaps,
    find_gaps,
    masked_to_gaps,
    set_gaps,
    uniform_noise,
    window_all,
    window_any,
)
from ml4cube.core.statistics import VariableStatistics
from tests import oracle

SHAPES = hnp.array_shapes(min_dims=1, max_dims=5, max_side=4)
ELEMENTS = st.sampled_from([0.0, 1.5, -3.0, math.nan, math.nan, math.inf])
fill = partial(fill_gaps, variable="t")


def stats(mean: float) -> VariableStatistics:
    """Statistics of train cells between 0 and twice their mean."""
    return VariableStatistics(4, mean, 0.0, 0.0, 2 * mean)


@settings(max_examples=300)
@given(st.data())
def test_windows_are_reduced_as_the_oracle_does(data: st.DataObject) -> None:
    shape = data.draw(hnp.array_shapes(min_dims=1, max_dims=4, max_side=6))
    if data.draw(st.booleans()):
        shape = (*shape[:1], 40)  # long enough for the doubling of runs
    flags = data.draw(hnp.arrays(bool, shape))
    flags = flags if data.draw(st.booleans()) else ~(flags & np.roll(flags, 1))
    size = [data.draw(st.integers(1, n + 1)) for n in shape]
    stride = [data.draw(st.integers(1, 4)) for _ in shape]
    before = flags.copy()
    every, some = window_all(flags, size, stride), window_any(flags, size, stride)
    found = list(oracle.windows(flags, size, stride))
    assert every.size == some.size == len(found)
    for index, cells in found:
        assert every[index] == cells.all()
        assert some[index] == cells.any()
    assert (flags == before).all()


def test_gaps_of_every_dtype() -> None:
    assert find_gaps(np.array([1, np.nan, np.inf], "f2")).tolist() == [False, True, True]
    assert find_gaps(np.array(["2000-01-01", "NaT"], "M8[D]")).tolist() == [False, True]
    assert not find_gaps(np.array([0, 1, -(2**31)])).any()
    assert not find_gaps(np.array([True, False])).any()
    assert not find_gaps(np.array(["nan"])).any()


@given(hnp.arrays(np.float64, SHAPES, elements=ELEMENTS))
def test_sample_mean_falls_back_to_the_train_mean(values: np.ndarray) -> None:
    filled = fill(values, "sample_mean", train_stats=stats(7.5))
    means = oracle.sample_means(values, 7.5).reshape(-1, *(1,) * (values.ndim - 1))
    expected = np.where(np.isfinite(values), values, means)
    np.testing.assert_allclose(filled, expected, rtol=1e-15)


def test_noise_is_even_and_differs_by_seed_and_variable() -> None:
    positions = np.arange(200_000, dtype=np.uint64)
    drawn = uniform_noise(positions, 1, "t")
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.histogram(drawn, 50, (0, 1))[0]
    assert ((counts - 4000) ** 2 / 4000).sum() < 90  # chi-square, 49 degrees of freedom
    for other in (uniform_noise(positions, 2, "t"), uniform_noise(positions, 1, "u")):
        assert abs(np.corrcoef(drawn, other)[0, 1]) < 0.01
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.01


@pytest.mark.parametrize("method", ["sample_mean", "mean", "constant", "noise"])
@given(hnp.arrays(st.sampled_from([">f4", "<f4", ">f8", "<f8", ">f2"]), SHAPES, elements=ELEMENTS))
def test_the_dtype_never_depends_on_whether_there_are_gaps(method: str, values: np.ndarray) -> None:
    ids = np.arange(values.size, dtype=np.uint64).reshape(values.shape)
    filled = fill(values, method, train_stats=stats(1.0), const=1.0, positions=ids)
    assert filled.dtype.str == values.dtype.str
    assert np.isfinite(filled).all()
    gaps = ~np.isfinite(values)
    np.testing.assert_array_equal(filled[~gaps], values[~gaps])


def test_constants_and_means_keep_the_dtype_and_other_kinds_are_refused() -> None:
    values = np.array([[1, np.nan], [np.inf, 4]], "float32")
    assert fill(values, "constant", const=-9).tolist() == [[1, -9], [-9, 4]]
    assert fill(values, "mean", train_stats=stats(2.5)).dtype == np.float32
    assert fill(np.array([1, 2]), "mean").tolist() == [1, 2]
    for method, words in [("constant", "needs const"), ("mean", "needs mean"), ("noise", "low")]:
        with pytest.raises(InvalidValueError, match=f"{words}.*'t'"):
            fill(values, method, positions=np.zeros(values.shape, np.uint64))
    with pytest.raises(InvalidValueError, match="train part may be all gaps"):
        fill(values, "mean", train_stats=stats(math.nan))
    with pytest.raises(InvalidTypeError, match="must be of a float dtype"):
        fill(np.array(["NaT"], "M8[D]"), "constant", const=0)
    with pytest.raises(InvalidValueError, match="did you mean 'sample_mean'"):
        fill(values, "samplemean")


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">c16", ">M8[s]", "f2", "m8[D]"])
def test_blanked_cells_keep_dtype_and_byte_order(dtype: str) -> None:
    values = np.array([1, 2], dtype)
    found = set_gaps(values, np.array([[True, False]]))
    assert (found.dtype, found.shape) == (values.dtype, (1, 2))
    assert find_gaps(found).tolist() == [[True, False]]
    assert found[0, 1] == values[1]


@pytest.mark.parametrize("dtype", ["f4", "f8", "c16", "i2", "i8", "u1", "?", "M8[s]", "m8[D]"])
def test_masked_cells_of_numpy_are_gaps(dtype: str) -> None:
    values = np.ma.masked_array(np.arange(4).astype(dtype), [False, True, False, False])
    read = masked_to_gaps(values)
    assert not np.ma.isMaskedArray(read)
    assert find_gaps(read).tolist() == [False, True, False, False]
    np.testing.assert_array_equal(read[2:].astype(dtype), values.data[2:])
    assert masked_to_gaps(values[2:]).dtype == values.dtype  # nothing masked, nothing converted


def test_masked_texts_are_refused() -> None:
    with pytest.raises(InvalidTypeError, match="cannot have gaps"):
        masked_to_gaps(np.ma.masked_array(["a", "b"], [False, True]))


@pytest.mark.parametrize(("dtype", "const"), [("f4", math.inf), ("f8", -np.inf), ("f2", 1e6)])
def test_values_that_are_not_finite_fill_no_gap(dtype: str, const: float) -> None:
    values = np.array([[1.0, math.nan]], dtype)
    with pytest.raises(InvalidValueError, match=r"const must be finite in float.* 't', got"):
        fill(values, "constant", const=const)
    with pytest.raises(InvalidValueError, match=r"mean must be finite"):
        fill(values, "mean", train_stats=stats(const))
    assert fill(values[:, :1], "constant", const=const).tolist() == [[1]]
