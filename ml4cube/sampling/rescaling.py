"""Choose the statistics that scale samples: those of their train part, or given ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.scaling import Places, Scaling
from ml4cube.core.statistics import SCALE_FNS, Statistics
from ml4cube.preprocessing.scaler import CubeScaler
from ml4cube.store.format import StoreMetadata

if TYPE_CHECKING:
    import xarray as xr


def given_statistics(given: Any, scale_fn: str | None) -> tuple[Statistics, str]:
    """Read the argument ``statistics=``; return the statistics and how they scale."""
    if scale_fn is None:
        raise InvalidValueError(
            "statistics= and scale_fn=None contradict each other: samples are scaled by the "
            "statistics, or not at all; drop one of them"
        )
    if isinstance(given, Statistics):
        return given, scale_fn
    found: Statistics
    if isinstance(given, CubeScaler):
        found, how = given.fitted_statistics(), given.method
    else:
        metadata = _metadata_of(given)
        if metadata.spec.scale_fn is None:
            raise InvalidValueError(
                "statistics= is a store that is not scaled (scale_fn=None); give its "
                "StoreMetadata.of(...).statistics, or a CubeScaler"
            )
        found, how = metadata.statistics, metadata.spec.scale_fn
    if scale_fn not in (how, SCALE_FNS[0]):
        raise InvalidValueError(
            f"scale_fn={scale_fn!r}, but statistics= scales by {how!r}; drop scale_fn, or give "
            "only its Statistics"
        )
    return found, how


def _metadata_of(given: Any) -> StoreMetadata:
    """Return the metadata of a store, given as a dataset, a path or its metadata."""
    found = getattr(given, "metadata", given)  # of a PTXrDataset
    if isinstance(found, StoreMetadata):
        return found
    try:
        return StoreMetadata.of(given)
    except InvalidTypeError:
        raise InvalidTypeError(
            "statistics must be Statistics (Statistics.from_cube), a fitted CubeScaler, or a "
            f"sample store or its path, got a {type(given).__name__}"
        ) from None


def needed(given: Statistics, names: Iterable[str]) -> Statistics:
    """Choose the statistics of some variables."""
    names = list(names)
    if missing := [name for name in names if name not in given]:
        raise InvalidValueError(
            f"statistics= has {list(given)}, but the samples also have {missing}; add statistics "
            "of these, or drop them from the cube"
        )
    return Statistics({name: given[name] for name in names}, given.part)


def scaling_of(
    statistics: Statistics,
    scale_fn: str | None,
    cube: xr.Dataset | None = None,
    dims: Sequence[str] = (),
) -> dict[str, Scaling]:
    """Return offset and scale of every variable that is scaled, in every cell of a cube."""
    if scale_fn is None:
        return {}
    sizes: dict[str, int] = {}
    coords: dict[str, Any] = {}
    if cube is not None:
        sizes = {dim: cube.sizes[dim] for dim in dims}
        coords = {dim: cube.indexes[dim].values for dim in dims if dim in cube.indexes}
    scaling = {}
    for name, stats in statistics.items():
        try:
            scaling[name] = Scaling.of(name, stats, scale_fn, sizes, coords)
        except InvalidValueError as error:
            part = f" of the {statistics.part} part" if statistics.part else ""
            raise InvalidValueError(f"variable {name!r}{part}: {error}") from None
    return scaling


def places_of(scaling: Mapping[str, Scaling]) -> dict[str, Places]:
    """Return the scaling of variables whose scaling differs between cells."""
    return {name: one.places for name, one in scaling.items() if one.places}
