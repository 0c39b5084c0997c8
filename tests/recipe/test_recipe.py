"""Recipes: checked when made, the same after JSON, plain about mistakes."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, parse_names
from ml4cube.core.missing import DROP_POLICIES, FILL_METHODS
from ml4cube.core.statistics import SCALE_FNS
from ml4cube.recipe.bound import BoundRecipe
from ml4cube.recipe.recipe import Recipe

SHAPE = {"time": 10, "lat": 8, "lon": 9}


@st.composite
def bound_recipes(draw: st.DrawFn) -> BoundRecipe:
    dims = draw(st.lists(st.sampled_from("tyxz"), min_size=1, max_size=4, unique=True))
    shape = {d: draw(st.integers(1, 12)) for d in dims}
    method = draw(st.sampled_from([*FILL_METHODS, None]))
    return BoundRecipe.parse(
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
        classes=draw(st.sampled_from([(), ("a",)])),
        callback=draw(st.sampled_from([None, "double"])),
        seed=draw(st.integers(0, 9)),
    )


@given(bound=bound_recipes())
def test_round_trips(bound: BoundRecipe) -> None:
    assert BoundRecipe.from_json(bound.to_json()) == bound
    recipe = bound.recipe
    assert Recipe.from_json(recipe.to_json()) == recipe
    assert hash(Recipe.from_json(recipe.to_json())) == hash(recipe)
    assert pickle.loads(pickle.dumps(bound)) == bound  # noqa: S301
    assert eval(repr(bound)) == bound


@given(bound=bound_recipes())
def test_windows_are_those_that_fit(bound: BoundRecipe) -> None:
    recipe = bound.recipe
    starts = [range(0, n, s) for n, s in zip(bound.shape, recipe.stride, strict=True)]
    whole = total = 1
    for line, n, size in zip(starts, bound.shape, recipe.size, strict=True):
        total *= len(line)
        whole *= sum(a + size <= n for a in line)
    assert (bound.total, len(bound.windows)) == (total, whole)
    assert recipe.window_shape == tuple(n for n in recipe.size if n > 1)
    assert recipe.array_dims == ("samples", *recipe.window_dims)


def test_windows_larger_than_the_cube_are_refused() -> None:
    recipe = Recipe.parse(SHAPE, ["a"], sample_size={"lat": 8})
    with pytest.raises(InvalidValueError, match="7"):
        _ = BoundRecipe(recipe, (10, 7, 9)).windows


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
        Recipe.parse(SHAPE, ["a"], **options)


def test_wrong_kinds_are_named() -> None:
    for wrong in (None, True, "0"):
        with pytest.raises(InvalidTypeError, match=f"const={wrong!r}"):
            Recipe.parse(SHAPE, ["a"], fill_method="constant", const=wrong)
    for gap in (float("nan"), float("inf")):
        with pytest.raises(InvalidValueError, match=f"const must be finite, got {gap!r}"):
            Recipe.parse(SHAPE, ["a"], fill_method="constant", const=gap)
    with pytest.raises(InvalidTypeError, match="to_pred"):
        parse_names("to_pred", [1])
    with pytest.raises(InvalidValueError, match="variables must name at least one"):
        Recipe.parse(SHAPE, [])


def test_a_number_of_numpy_is_a_const() -> None:
    spec = Recipe.parse(SHAPE, ["a"], fill_method="constant", const=np.float32(0.5))
    assert Recipe.from_json(spec.to_json()) == spec
    assert type(spec.const) is float


def test_windows_along_a_dim_named_samples_need_another_sample_dim() -> None:
    shape, size = {"samples": 8, "lat": 4}, {"samples": 2, "lat": 2}
    with pytest.raises(InvalidValueError, match="array_dims must name the sample dim"):
        Recipe.parse(shape, ["a"], sample_size=size)
    names = ("n", "samples", "lat")
    assert Recipe.parse(shape, ["a"], sample_size=size, array_dims=names).array_dims == names
