"""Narrower dtypes and fewer bits: what is lost is what was asked for, and never a number."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from ml4cube.core.errors import CubeError, InvalidValueError, RunError
from ml4cube.datasets.multiproc_sampler import MultiProcSampler
from ml4cube.store.precision import Precision
from tests.samplestores import paths

FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


def spacing(value: float, bits: int) -> float:
    """Return the distance of neighbours that differ in the last bit of mantissa: the oracle."""
    return float(2.0 ** (np.floor(np.log2(abs(value))) - bits))


@given(npst.arrays(np.float32, st.integers(1, 20), elements=FLOATS), st.integers(1, 23))
def test_rounded_to_the_nearest(values: np.ndarray, bits: int) -> None:
    rounded = Precision.parse(None, bits).apply("t", values)
    assert rounded.dtype == values.dtype
    finite = np.isfinite(values)
    np.testing.assert_array_equal(rounded[~finite], values[~finite])
    for before, after in zip(values[finite].tolist(), rounded[finite].tolist(), strict=True):
        if abs(before) < np.finfo(np.float32).tiny:
            continue  # subnormal numbers have fewer bits
        step = spacing(before, bits)
        if np.isfinite(after):
            assert abs(after - before) <= step / 2
            assert after / step == int(after / step)
        else:  # rounded up past the largest number
            assert abs(before) + step / 2 > float(np.finfo(np.float32).max)


@pytest.mark.parametrize("dtype", [">f2", ">f4", ">f8"])
def test_the_byte_order_of_netcdf_3_does_not_matter(dtype: str) -> None:
    values = np.append(np.random.default_rng(0).normal(size=(3, 4)), [[np.nan, np.inf, 0, 1]], 0)
    big, little = values.astype(dtype), values.astype(dtype.replace(">", "<"))
    rounded = Precision.parse(None, 5).apply("t", big)
    np.testing.assert_array_equal(rounded, Precision.parse(None, 5).apply("t", little))
    assert rounded.dtype == big.dtype
    assert (rounded != big)[np.isfinite(big)].any()


@given(npst.arrays(np.float64, 8, elements=st.floats(-6e4, 6e4)))
def test_cast(values: np.ndarray) -> None:
    stored = Precision.parse({"t": "float16"}, None).apply("t", values)
    np.testing.assert_array_equal(stored, values.astype(np.float16))
    assert Precision.parse({"u": "float16"}, None).apply("t", values) is values


def test_a_number_is_never_made_infinite() -> None:
    values = np.array([1.0, np.inf, np.nan, 70_000.0])
    with pytest.raises(
        RunError, match=r"'t' has the value 70000.*float16 \(at most 65504\).*scale"
    ):
        Precision.parse("float16", None).apply("t", values)
    kept = Precision.parse("float16", None).apply("t", values[:3])
    np.testing.assert_array_equal(kept, values[:3].astype(np.float16))


def test_fluxes_that_would_become_0_are_refused(tmp_path: Path) -> None:
    flux = np.random.default_rng(0).uniform(0, 1e-8, (20, 4)).astype("float32")
    cube = xr.Dataset({"nbp": (("time", "lat"), flux)})
    options: Any = {"block_size": {"time": 5}, "nproc": 1, "progress": False, **paths(tmp_path)}
    with pytest.raises(InvalidValueError, match=r"'nbp'.*at most 9.*e-09.*float16 loses digits"):
        MultiProcSampler(cube, dtype="float16", scale_fn=None, **options).run()
    train, _ = MultiProcSampler(cube, dtype="float16", **options).get_datasets()
    assert abs(float(train.nbp.astype(float).std()) - 1) < 1e-3


def test_every_nan_stays_one() -> None:
    """Also those whose bits rounding would carry over into the sign."""
    nans = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFFFFFFF], "u4").view("f4")
    assert np.isnan(Precision.parse(None, 5).apply("t", nans)).all()


def test_integers_are_not_changed() -> None:
    numbers = np.arange(4)
    assert Precision.parse("float32", 5).apply("n", numbers) is numbers


@pytest.mark.parametrize(
    ("dtype", "bits", "message"),
    [
        ("int16", None, "dtype"),
        ("flot16", None, "dtype must be 'float16', 'float32' or 'float64'"),
        ({"t": "float128x"}, None, "dtype must be 'float16', 'float32' or 'float64'"),
        (None, 0, "bitround must be at least 1, got 0"),
        (None, True, "bitround must be an integer, got True"),
        (None, 2.5, r"bitround must be an integer, got 2\.5"),
        (None, {"x": 5}, "bitround: unknown variable 'x'; the samples have"),
        ({"x": "float16"}, None, "dtype: unknown variable 'x'"),
        ({"n": "float16"}, None, "'n' must be a float variable, got dtype int16"),
        ("float16", 11, "bitround of 't' must be at most 10, .* got 11"),
    ],
)
def test_wrong_arguments_are_refused(dtype: Any, bits: Any, message: str) -> None:
    with pytest.raises(CubeError, match=message):
        Precision.parse(dtype, bits).check_names({"t": "float32", "n": "int16"})
