"""Estimators that were fitted on named columns get their features by name."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from sklearn.base import BaseEstimator
from sklearn.compose import ColumnTransformer, TransformedTargetRegressor
from sklearn.ensemble import GradientBoostingRegressor, RandomForestClassifier, VotingRegressor
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.model_selection import GridSearchCV
from sklearn.multioutput import MultiOutputRegressor
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import StandardScaler

from ml4cube.core.errors import InvalidValueError
from ml4cube.prediction import predict_cube
from ml4cube.prediction.models import fitted_columns


def cube() -> xr.Dataset:
    rng = np.random.default_rng(0)
    dims, shape = ("time", "lat"), (30, 8)
    ds = xr.Dataset({name: (dims, rng.normal(size=shape)) for name in "abc"})
    return ds.assign(y=3 * ds.a - 5 * ds.b + 0.5 * ds.c)


def table(ds: xr.Dataset, columns: Any) -> pd.DataFrame:
    return pd.DataFrame({name: ds[name].values.ravel() for name in columns})


def scaled() -> Pipeline:
    return Pipeline([("scale", StandardScaler()), ("model", LinearRegression())])


def without_scaling() -> GridSearchCV:
    return GridSearchCV(scaled(), {"scale": ["passthrough"]}, cv=3)


def of_columns_by_name() -> Pipeline:
    parts = [("ab", StandardScaler(), ["b", "a"]), ("c", "passthrough", ["c"])]
    return make_pipeline(ColumnTransformer(parts), LinearRegression())


ESTIMATORS = {
    "plain": LinearRegression,
    "pipeline": scaled,
    "search": lambda: GridSearchCV(scaled(), {"model__fit_intercept": [True, False]}, cv=3),
    "search without the first step": without_scaling,
    "pipeline without the first step": lambda: scaled().set_params(scale="passthrough"),
    "columns by name": of_columns_by_name,
    "search over columns by name": lambda: GridSearchCV(
        of_columns_by_name(), {"linearregression__fit_intercept": [True]}, cv=3
    ),
    "transformed target": lambda: TransformedTargetRegressor(Ridge(1e-6)),
    "several targets": lambda: MultiOutputRegressor(Ridge(1e-6)),
    "vote": lambda: VotingRegressor([("a", LinearRegression()), ("b", Ridge(1e-6))]),
    "trees": lambda: GradientBoostingRegressor(n_estimators=5),
}


@pytest.mark.parametrize("kind", ESTIMATORS)
def test_columns_are_found_by_their_names_in_any_order(kind):
    ds = cube()
    model: BaseEstimator = ESTIMATORS[kind]()
    y = table(ds, "y").values
    model.fit(table(ds, "cab"), y if kind == "several targets" else y.ravel())
    expected = np.ravel(model.predict(table(ds, "cab"))).reshape(ds.y.shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # scikit-learn warns of columns without names
        for features in itertools.permutations("abc"):
            result = predict_cube(model, ds, features=list(features), targets="y", progress=False)
            np.testing.assert_allclose(result.y, expected, rtol=1e-5, atol=1e-5)


def test_probabilities_of_classifiers_are_those_of_the_named_columns():
    ds = cube().assign(y=lambda ds: (ds.y > 0).astype("i4"))
    model = RandomForestClassifier(5, random_state=0).fit(table(ds, "ba"), table(ds, "y").y)
    result = predict_cube(model, ds, features=["a", "b"], targets="y", reduce="argmax")
    np.testing.assert_array_equal(result.y.values.ravel(), model.predict(table(ds, "ba")))


def test_columns_that_do_not_match_are_refused_before_any_work():
    ds = cube()
    y = table(ds, "y").y

    class Counted(LinearRegression):
        def predict(self, X: Any) -> Any:
            raise AssertionError("no work is done")

    model = Counted().fit(table(ds, "ba"), y)
    for features in (["a", "c"], ["a"], ["a", "b", "c"]):
        with pytest.raises(
            InvalidValueError,
            match=r"features must be the columns .* \['b', 'a'\], in any order, got \['a'.*"
            "features=, after ds.rename",
        ):
            predict_cube(model, ds, features=features, targets="y")
    with pytest.raises(InvalidValueError, match=r"the estimator itself.*got its method predict"):
        predict_cube(model.predict, ds, features=["a", "b"], targets="y")
    with pytest.raises(InvalidValueError, match=r"named columns \['b', 'a'\], and windows of 2 ce"):
        predict_cube(model, ds, features=["a", "b"], targets="y", sample_size={"lat": 2})
    with pytest.raises(InvalidValueError, match="features must be the columns"):
        predict_cube(
            [LinearRegression().fit(table(ds, "ab"), y), Counted().fit(table(ds, "ac"), y)],
            ds,
            features=["a", "b"],
            targets="y",
        )


def test_estimators_of_arrays_take_the_order_of_the_features():
    ds = cube()
    model = LinearRegression().fit(table(ds, "ab").values, table(ds, "y").y)
    result = predict_cube(model, ds, features=["a", "b"], targets="y")
    expected = model.predict(table(ds, "ab").values).reshape(ds.y.shape)
    np.testing.assert_allclose(result.y, expected, rtol=1e-5, atol=1e-5)


class LikeLightgbm:
    feature_name_ = ("Column_0", "Column_1")


class LikeCatboost:
    feature_names_ = ("0", "1")


def test_names_that_a_library_made_up_are_none():
    assert fitted_columns(LikeLightgbm()) is None
    assert fitted_columns(LikeCatboost()) is None
    LikeLightgbm.feature_name_ = ("b", "a")
    assert fitted_columns(LikeLightgbm()) == ["b", "a"]


def test_an_estimator_that_counts_its_steps_is_no_pipeline():
    class OfSteps(LinearRegression):
        steps = 10

    ds = cube()
    model = OfSteps().fit(table(ds, "ab").to_numpy(), ds.y.values.ravel())
    assert fitted_columns(model) is None
    got = predict_cube(model, ds, features=["a", "b"], targets=["z"], progress=False)
    expected = model.predict(table(ds, "ab").to_numpy()).reshape(ds.y.shape)
    np.testing.assert_allclose(got.z, expected, rtol=1e-4, atol=1e-4)
