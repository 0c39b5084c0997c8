"""Statistics: accuracy against long double, merging, scaling and back."""

from __future__ import annotations

import json
import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.statistics import (
    Statistics,
    VariableStatistics,
    scale_parameters,
    scale_values,
    scaled_dtype,
    unscale_values,
)
from ml4cube.core.sums.fields import FieldStatistics, Moments
from tests import oracle

FLOATS = st.floats(-1e6, 1e6, width=32)
CELLS = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=1, max_dims=5, max_side=4),
    elements=FLOATS | st.sampled_from([math.nan, math.inf, -math.inf]),
)


def assert_close(stats: VariableStatistics, expected: dict[str, object]) -> None:
    """Counts and range are exact, moments to the contract's 1e-6, in fact far better."""
    for name in ("count", "gaps", "infs"):
        assert getattr(stats, name) == expected[name], name
    if stats.count == 0:
        assert math.isnan(stats.mean)
        assert math.isnan(stats.std)
        assert math.isnan(stats.min)
        return
    assert stats.min == expected["min"]
    assert stats.max == expected["max"]
    size = max(abs(stats.min), abs(stats.max))
    assert abs(stats.mean - expected["mean"]) <= 1e-14 * size
    assert abs(stats.std - expected["std"]) <= 1e-12 * size


OFFSETS = [
    ("float32", 273.15, 0.01, 0.0),
    ("float32", 5e5, 50.0, 0.0),
    ("float32", 101325.0, 1.0, 0.1),
    ("float64", 1e6, 0.01, 0.0),
]


@given(CELLS, st.data())
def test_where_selects_cells_and_the_others_have_no_influence(
    cells: np.ndarray, data: st.DataObject
) -> None:
    where = data.draw(hnp.arrays(bool, cells.shape))
    stats = VariableStatistics.of(cells, where)
    assert_close(stats, oracle.moments(cells, where))
    changed = np.where(where, cells, np.float32(1e9))
    assert VariableStatistics.of(changed, where) == stats


@given(CELLS, st.data())
def test_merged_parts_are_the_whole(cells: np.ndarray, data: st.DataObject) -> None:
    flat = cells.ravel()
    cuts = sorted(data.draw(st.lists(st.integers(0, flat.size), max_size=6)))
    merged = VariableStatistics()
    for piece in np.split(flat, cuts):
        merged = merged.merge(VariableStatistics.of(piece))
    assert_close(merged, oracle.moments(cells))
    nothing = VariableStatistics()
    assert merged.merge(nothing) == nothing.merge(merged) == merged


def test_blocks_longer_than_a_part_agree_in_any_memory_order() -> None:
    cells = np.random.default_rng(0).normal(5, 2, (3, 200, 301))
    cells[0, 0, :7] = np.nan
    cells[2, 5, 5] = np.inf
    for view in (cells, cells.T, cells[:, ::2, ::-1], np.asfortranarray(cells)):
        assert_close(VariableStatistics.of(view), oracle.moments(view))


@pytest.mark.slow
@pytest.mark.parametrize(
    "size", [1023, 1025, 2**17 - 1, 2**17, 2**17 + 1, 2**21 - 1, 2**21 + 1, 2**21 + 132_097]
)
@pytest.mark.parametrize("offset", [0, -400_000])
def test_every_cell_counts_once_where_buffers_end(size: int, offset: int) -> None:
    """Integers in float32, summed up without rounding: a cell too many or few would show."""
    cells = (np.arange(size) % 4099 + offset).astype("float32")
    cells[::7] = np.nan
    VariableStatistics.of(np.full(140_000, np.nan, "float32"))  # leaves gaps in the buffers
    stats = VariableStatistics.of(cells)
    clean = cells[~np.isnan(cells)].astype("int64")
    assert (stats.count, stats.gaps) == (clean.size, size - clean.size)
    assert stats.mean == pytest.approx(clean.sum() / clean.size, rel=1e-15)
    assert stats.variance == pytest.approx(float(oracle.moments(cells)["std"]) ** 2, rel=1e-12)
    assert (stats.min, stats.max) == (clean.min(), clean.max())


@pytest.mark.parametrize(("dtype", "bits"), [("f4", 0x7F8007A2), ("f8", 0x7FF00000000007A2)])
@pytest.mark.filterwarnings("error")
def test_numbers_beside_signaling_nans_count(dtype: str, bits: int) -> None:
    """Such as R's NA; where numpy's vectors end, the least number before one could get lost."""
    rng = np.random.default_rng(0)
    for size in [*range(1, 300), 131_072 + 5, 262_144 + 77]:
        quiet = rng.integers(-1, 2, size).astype(dtype)
        missing = rng.random(size) < 0.5
        signaling = quiet.copy()
        quiet[missing] = np.nan
        signaling.view(f"u{dtype[1]}")[missing] = bits
        assert VariableStatistics.of(signaling) == VariableStatistics.of(quiet)
        for offset in (1.0, np.ones(size)):
            scaled = scale_values(signaling, offset, 2.0)
            np.testing.assert_array_equal(scaled, scale_values(quiet, offset, 2.0))
            np.testing.assert_array_equal(unscale_values(signaling, offset, 2.0), quiet * 2 + 1)


def test_earlier_sums_change_no_bit() -> None:
    """The sign of a zero depends on the way to the greatest: it must not be told."""
    texts = set()
    for before in (np.ones(9, "float32"), np.full(9, np.nan, "float32")):
        for zeros in ([0.0, -0.0], [-0.0, 0.0]):
            Statistics.of({"x": before})
            cells = np.append(np.resize(zeros, 64), -1.0).astype("float32")
            texts.add(Statistics.of({"x": cells}).to_json())
    assert len(texts) == 1


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("centre", "spread", "outlier"),
    [(0, 1, None), (10, 20, None), (280, 10, None), (-280, 10, None), (280, 0.01, -9999.0)],
)
def test_gaps_and_outliers_cost_no_digit_whatever_the_sign(
    dtype: str, centre: float, spread: float, outlier: float | None
) -> None:
    rng = np.random.default_rng(7)
    cells = rng.normal(centre, spread, 280_001).astype(dtype)
    cells[rng.random(cells.size) < 0.3] = np.nan
    cells[1000:9000] = np.nan
    cells[140_000] = cells[5] if outlier is None else outlier
    cells[[3, 279_000]] = np.inf, -np.inf
    stats, expected = VariableStatistics.of(cells), oracle.moments(cells)
    assert_close(stats, expected)
    assert abs(stats.std / expected["std"] - 1) <= 1e-11
    clean = cells[np.isfinite(cells)]
    assert_close(VariableStatistics.of(clean), oracle.moments(clean))


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int16", "int32", "int64", "uint64", "bool", ">f4", ">i2", "f2", "g"]
)
def test_every_real_dtype_is_right(dtype: str) -> None:
    cells = np.arange(300).reshape(3, 100) % 2 if dtype == "bool" else np.arange(100)
    cells = cells.astype(dtype)
    assert_close(VariableStatistics.of(cells), oracle.moments(cells))


@pytest.mark.parametrize("dtype", ["M8[ns]", "m8[s]", "U3", "c16", "O"])
def test_other_dtypes_are_refused_by_name(dtype: str) -> None:
    with pytest.raises(InvalidTypeError, match=r"'when'.*real numbers"):
        Statistics.of({"when": np.zeros(3, "i8").astype(dtype)})


@pytest.mark.parametrize("dtype", ["int64", "uint64", ">i8"])
def test_integers_are_exact_or_refused(dtype: str) -> None:
    steps = np.arange(100_000) % 100
    cells = (2**53 - 99 + steps).astype(dtype)
    assert VariableStatistics.of(cells).std == pytest.approx(np.std(steps), rel=1e-12)
    for start in (2**53 - 98, 2**60, 2**63 - 100):
        with pytest.raises(InvalidValueError, match=rf"got {start + 99}; .*subtract an offset"):
            VariableStatistics.of((start + steps).astype(dtype))
    unused = np.where(steps < 50, cells, np.array(2**60, cells.dtype))
    assert VariableStatistics.of(unused, steps < 50).max == 2**53 - 50


def test_fill_values_left_undecoded_are_refused_where_squares_overflow() -> None:
    with pytest.raises(InvalidValueError, match="fill value"):
        VariableStatistics.of(np.array([1e300, 1.0]))


@pytest.mark.parametrize("value", [0.1, 273.15, -1e30, 0.0, 101325.3])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_constant_is_its_mean_with_std_0_and_scales_to_0_and_back(
    value: float, dtype: str
) -> None:
    cells = np.full(100_003, value, dtype)
    stats = VariableStatistics.of(cells[:1000]).merge(VariableStatistics.of(cells[1000:]))
    assert stats.mean == cells[0]
    assert stats.std == 0
    for scale_fn in ("standardize", "normalize"):
        offset, scale = scale_parameters(stats, scale_fn)
        scaled = scale_values(cells, offset, scale)
        assert (scaled == 0).all()
        assert (unscale_values(scaled, offset, scale) == cells).all()


def test_no_cells_and_gaps_only_give_nan_and_cannot_scale() -> None:
    empty = VariableStatistics.of(np.empty((0, 3)))
    gaps = VariableStatistics.of(np.full(5, np.nan))
    assert (empty.count, empty.gaps, gaps.count, gaps.gaps) == (0, 0, 0, 5)
    assert empty == VariableStatistics()
    assert math.isnan(gaps.std)
    with pytest.raises(InvalidValueError, match="all gaps, without a finite cell"):
        scale_parameters(gaps, "standardize")
    with pytest.raises(InvalidValueError, match="did you mean 'standardize'"):
        scale_parameters(gaps, "standardise")


@pytest.mark.slow
@given(st.dictionaries(st.text(max_size=5), CELLS, max_size=3), st.sampled_from(["train", None]))
def test_json_and_pickle_keep_every_bit(tables: dict[str, np.ndarray], part: str | None) -> None:
    stats = Statistics.of(tables, part=part)
    for copy in (Statistics.from_json(stats.to_json()), pickle.loads(pickle.dumps(stats))):  # noqa: S301
        assert copy == stats
        assert hash(copy) == hash(stats)
        assert copy.part == part
        assert copy.variables == stats.variables
        for name in stats:
            assert repr(copy[name]) == repr(stats[name])


def test_statistics_are_an_immutable_mapping() -> None:
    table = {"a": VariableStatistics.of(np.array([1.0, 3.0]))}
    stats = Statistics(table, part="train")
    table["b"] = VariableStatistics()
    assert list(stats) == ["a"]
    assert stats.mean_std() == {"a": [2.0, 1.0]}
    assert stats.range() == {"a": [1.0, 3.0]}
    with pytest.raises(TypeError):
        stats["b"] = VariableStatistics()  # type: ignore[index]
    with pytest.raises(KeyError, match="no statistics of 'b'"):
        stats["b"]


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Statistics.empty(["b"], "train"), r"\['a'\].*\['b'\]"),
        (Statistics.empty(["a"], "all"), "part"),
    ],
)
def test_only_statistics_of_one_kind_merge(other: Statistics, words: str) -> None:
    with pytest.raises(InvalidValueError, match=words):
        Statistics.empty(["a"], "train").merge(other)


@pytest.mark.parametrize("text", ["", "[]", '{"variables": {}}', '{"part": 1, "variables": {}}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(InvalidValueError):
        Statistics.from_json(text)


def test_damaged_arrays_in_json_are_refused() -> None:
    kept = FieldStatistics(*Moments.of(np.eye(2), axes=(1,)), dims=("lat",))
    raw = json.loads(Statistics({"a": kept}).to_json())
    raw["variables"]["a"]["mean"]["zlib"] = "AAAA"
    with pytest.raises(InvalidValueError, match="text must be what to_json"):
        Statistics.from_json(json.dumps(raw))


@pytest.mark.parametrize(("dtype", "centre", "spread", "gaps"), OFFSETS)
def test_scaling_is_rounded_once(dtype: str, centre: float, spread: float, gaps: float) -> None:
    cells = np.random.default_rng(0).normal(centre, spread, (70, 1000)).astype(dtype)
    stats = VariableStatistics.of(cells)
    offset, scale = scale_parameters(stats, "standardize")
    scaled = scale_values(cells, offset, scale)
    assert (scaled == ((cells.astype("f8") - offset) / scale).astype(dtype)).all()
    assert (scale_values(cells.T, offset, scale) == scaled.T).all()
    per_row = scale_values(cells, np.full((70, 1), offset), np.full((70, 1), scale))
    assert (per_row == scaled).all()
    assert abs(VariableStatistics.of(scaled).std - 1) < 1e-5


def test_scaled_dtypes() -> None:
    for dtype, expected in [("f4", "f4"), ("f8", "f8"), (">f8", "f8"), ("i2", "f4"), ("i4", "f8")]:
        assert scaled_dtype(dtype) == np.dtype(expected)
        assert scale_values(np.array([1, 2], dtype), 0.0, 1.0).dtype == np.dtype(expected)
    assert scale_values(np.arange(3), 0.0, 1.0, "float32").dtype == np.float32
