"""Names of the columns that estimators were fitted on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ml4cube.core.errors import InvalidValueError

# Where scikit-learn and xgboost, lightgbm, and catboost keep the names.
_ATTRIBUTES = ("feature_names_in_", "feature_name_", "feature_names_")


def fitted_columns(estimator: Any) -> list[str] | None:
    """Return the names of the columns that an estimator was fitted on; None if they had none."""
    for attribute in _ATTRIBUTES:
        names = getattr(estimator, attribute, None)
        if names is not None:
            names = [str(name) for name in names]
            return None if names in _numbered(len(names)) else names
    # A search has no names of its own if the first step of its best pipeline is left out.
    best = getattr(estimator, "best_estimator_", None)
    if best is not None:
        return fitted_columns(best)
    steps = getattr(estimator, "steps", None)
    if not isinstance(steps, list):  # of a pipeline; other estimators may count theirs
        return None
    applied = [step for _, step in steps if step not in (None, "passthrough")]
    return fitted_columns(applied[0]) if applied else None


def _numbered(n: int) -> list[list[str]]:
    """Return the names that lightgbm and catboost make up for columns without names."""
    return [[f"Column_{i}" for i in range(n)], [str(i) for i in range(n)]]


def refuse_method(model: Any) -> None:
    """Refuse a method of an estimator that was fitted on named columns."""
    owner = getattr(model, "__self__", None)
    if hasattr(owner, "fit") and fitted_columns(owner) is not None:
        raise InvalidValueError(
            f"the model must be the estimator itself, so that it gets its columns by name, got its "
            f"method {model.__name__}"
        )


def check_columns(estimator: Any, channels: Sequence[str], cells_per_window: int) -> None:
    """Refuse an estimator that was fitted on other columns than it will be given."""
    columns = fitted_columns(estimator)
    if columns is None:
        return
    if cells_per_window > 1:
        raise InvalidValueError(
            f"the model was fitted on the named columns {columns}, and windows of "
            f"{cells_per_window} cells make {cells_per_window * len(channels)} columns without "
            "names; fit it on an array (X.to_numpy()), or give it windows of one cell"
        )
    if sorted(columns) != sorted(channels):
        raise InvalidValueError(
            f"features must be the columns that the model was fitted on, {columns}, in any order, "
            f"got {list(channels)}; give these as features=, after ds.rename if the cube has other "
            "names"
        )
