"""SampleSpec: checked when made, the same after JSON, plain about mistakes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.missing import DROP_POLICIES, FILL_METHODS
from ml4cube.core.sample_spec import SampleSpec, parse_names
from ml4cube.core.statistics import SCALE_FNS

SHAPE = {"time": 10, "lat": 8, "lon": 9}


@st.composite
def specs(draw: st.DrawFn) -> SampleSpec:
    dims = draw(st.lists(st.sampled_from("tyxz"), min_size=1, max_size=4, unique=True))
    shape = {d: draw(st.integers(1, 12)) for d in dims}
    method = draw(st.sampled_from([*FILL_METHODS, None]))
    return SampleSpec.parse(
        shape,
        ["a", "b"],
        sample_size={d: draw(st.integers(1, n)) for d, n in shape.items()},
        overlap=draw(st.sampled_from([None, 0.25, 0.9])),
        to_pred=draw(st.sampled_from([None, "a", ["b"]])),
        drop_nan=draw(st.sampled_from(DROP_POLICIES)),
        fill_method=method,
        const=1.5 if method == "constant" else None,
        scale_fn=draw(st.sampled_from(SCALE_FNS)),
        filter_var=draw(st.sampled_from([None, "mask"])),
    )


@given(spec=specs())
def test_round_trips(spec: SampleSpec) -> None:
    assert SampleSpec.from_json(spec.to_json()) == spec
    assert hash(SampleSpec.from_json(spec.to_json())) == hash(spec)
    assert pickle.loads(pickle.dumps(spec)) == spec  # noqa: S301
    assert eval(repr(spec)) == spec


@given(spec=specs())
def test_windows_are_those_that_fit(spec: SampleSpec) -> None:
    starts = [range(0, n, s) for n, s in zip(spec.shape, spec.stride, strict=True)]
    whole = total = 1
    for line, n, size in zip(starts, spec.shape, spec.size, strict=True):
        total *= len(line)
        whole *= sum(a + size <= n for a in line)
    assert (spec.total, len(spec.windows), spec.edge) == (total, whole, total - whole)
    assert spec.window_shape == tuple(n for n in spec.size if n > 1)
    assert spec.array_dims == ("samples", *spec.window_dims)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sample_size": {"latitude": 2}}, r"sample_size: unknown dim 'latitude'"),
        ({"sample_size": {"lat": 99}}, r"sample_size..lat.* from 1 to 8.* got 99"),
        ({"sample_size": {"lat": 0}}, r"sample_size..lat.* from 1 to 8.* got 0"),
        ({"overlap": {"lat": 1}, "sample_size": {"lat": 2}}, "below 1"),
        ({"drop_nan": "all"}, "drop_nan must be .*, got 'all'"),
        ({"fill_method": "zero"}, "fill_method must be .*, got 'zero'"),
        ({"scale_fn": "normalise"}, "did you mean 'normalize'"),
        ({"const": 3.0}, "const=3.0 needs fill_method='constant'"),
        ({"to_pred": "a", "features": ["a"]}, "must differ"),
        ({"to_pred": ["a", "a"]}, "twice"),
        ({"array_dims": ("lat", "x")}, "must begin with a name for the sample dim"),
        (
            {"array_dims": ("samples", "x"), "sample_size": {"lat": 2, "lon": 2}},
            "array_dims must be .* new names",
        ),
        (
            {"array_dims": ("samples", "lat"), "sample_size": {"lat": 2, "lon": 2}},
            "array_dims must be .* new names",
        ),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidValueError, match=message):
        SampleSpec.parse(SHAPE, ["a"], **options)


def test_wrong_kinds_are_named() -> None:
    for wrong in (None, True, "0"):
        with pytest.raises(InvalidTypeError, match=f"const={wrong!r}"):
            SampleSpec.parse(SHAPE, ["a"], fill_method="constant", const=wrong)
    for gap in (float("nan"), float("inf")):
        with pytest.raises(InvalidValueError, match=f"const must be finite, got {gap!r}"):
            SampleSpec.parse(SHAPE, ["a"], fill_method="constant", const=gap)
    with pytest.raises(InvalidTypeError, match="to_pred"):
        parse_names("to_pred", [1])
    with pytest.raises(InvalidValueError, match="variables must name at least one"):
        SampleSpec.parse(SHAPE, [])


def test_a_number_of_numpy_is_a_const() -> None:
    spec = SampleSpec.parse(SHAPE, ["a"], fill_method="constant", const=np.float32(0.5))
    assert SampleSpec.from_json(spec.to_json()) == spec
    assert type(spec.const) is float


def test_windows_along_a_dim_named_samples_need_another_sample_dim() -> None:
    shape, size = {"samples": 8, "lat": 4}, {"samples": 2, "lat": 2}
    with pytest.raises(InvalidValueError, match="array_dims must name the sample dim"):
        SampleSpec.parse(shape, ["a"], sample_size=size)
    names = ("n", "samples", "lat")
    assert SampleSpec.parse(shape, ["a"], sample_size=size, array_dims=names).array_dims == names
