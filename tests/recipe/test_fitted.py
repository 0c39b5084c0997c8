"""One fitted recipe, whatever of the training is given to `predict_cube`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr

from ml4cube.datasets.pytorch import PTXrDataset
from ml4cube.prediction import predict_cube
from ml4cube.prediction.source import fitted_recipe
from ml4cube.recipe.fitted import FittedRecipe
from ml4cube.store.format import open_store
from ml4cube.store.metadata import StoreMetadata
from tests.cubes import cell_id_cube
from tests.samplestores import sampled

SHAPE = {"time": 6, "lat": 4, "lon": 5}
CUTTING = {
    "sample_size": {"lat": 2, "lon": 2},
    "fill_method": {"a": "mean"},
    "drop_nan": None,
    "to_pred": "b",
}
FORMS = {
    "path": lambda store: store,
    "opened": open_store,
    "metadata": StoreMetadata.of,
    "data set": lambda store: PTXrDataset(store, to_pred="b"),
}


@pytest.fixture(scope="module")
def cube() -> xr.Dataset:
    return cell_id_cube(SHAPE, gaps=0.2, names=("a", "b"))


@pytest.fixture(scope="module")
def store(cube, tmp_path_factory):
    return sampled(cube, tmp_path_factory.mktemp("fitted"), **CUTTING)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_store_is_the_same_fitted_recipe(cube, store, form):
    fitted = fitted_recipe(FORMS[form](store), SHAPE, None, None)
    metadata = StoreMetadata.of(store)
    assert (fitted.recipe.features, fitted.recipe.targets) == (("a",), ("b",))
    assert fitted.recipe.fill_of("a") == "mean"
    assert fitted.statistics == metadata.statistics
    assert fitted.fill == metadata.fill
    assert fitted.fill["a"].mean == pytest.approx(float(cube.a.mean(dtype=float)))
    assert set(fitted.variables) == {"a", "b"}
    assert fitted.window == {"time": 1, "lat": 2, "lon": 2}
    assert not fitted.shifted


def test_every_form_of_a_store_predicts_alike(cube, store):
    first, *others = [
        predict_cube(torch.nn.Identity(), cube, given(store), progress=False)
        for given in FORMS.values()
    ]
    for other in others:
        assert other.identical(first)


@pytest.mark.parametrize("statistics", [None, {}, {"a": [1.0, 2.0]}])
def test_without_samples_a_recipe_is_of_single_cells(statistics):
    fitted = fitted_recipe(statistics, SHAPE, "a", None)
    assert isinstance(fitted, FittedRecipe)
    assert set(fitted.window.values()) == {1}
    assert fitted.variables is None
    assert (fitted.recipe.scale_fn is None) == (statistics is None)


def test_a_data_set_bears_its_lead_and_its_coordinates(cube):
    data = PTXrDataset(
        cube,
        to_pred="b",
        features=["a", "b"],
        target_offset={"time": 2},
        target_size={"time": 1},
        sample_size={"time": 2, "lon": 2},
        coord_features="lat",
        drop_nan=None,
    )
    fitted = data.fitted
    assert (fitted.recipe.features, fitted.recipe.targets) == (("a", "b"), ("b",))
    assert fitted.coord_features == ("lat",)
    assert fitted.window == {"time": 2, "lat": 1, "lon": 2}
    ((dim, lead),) = fitted.shifted.items()
    assert (dim, lead.offset, lead.input_size, lead.target_size) == ("time", 2, 2, 1)
    assert np.array_equal(fitted.axes["lat"].values, cube.lat.values)
