"""What commands open: cubes, statistics, samples, and models by their names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ml4cube.cli.arguments import arguments_of
from ml4cube.cli.by_name import Names
from ml4cube.cli.configuration import check_known
from ml4cube.cli.files import read_text
from ml4cube.core.errors import InvalidTypeError, names_of

if TYPE_CHECKING:
    import torch
    import xarray as xr

    from ml4cube.datasets.pytorch import PTXrDataset

#: `open_cube` with the arguments of a call, which takes the path.
OpenCube = Callable[[str], Any]
Recipe = str | Mapping[str, Any]


def open_cube(
    cube: str,
    *,
    variables: str | Sequence[str] | None = None,
    recipe: str | None = None,
    engine: str | None = None,
) -> xr.Dataset:
    """Open a cube, select variables, and add the split label of a recipe.

    Parameters
    ----------
    cube : path or URL
        The cube: zarr or netCDF.
    variables : str or list of str, optional
        Variables to open, a mask too; those of the truth in evaluate. Default: all.
    recipe : path or URL, optional
        Recipe of the split label, as ml4cube split writes it.
    engine : str, optional
        How xarray opens the cube, such as cfgrib or rasterio. Default: as its ending says.
    """
    from ml4cube.cube.opening import as_dataset
    from ml4cube.cube.variables import named_by_attributes

    ds = as_dataset(cube, engine)
    if variables is not None:
        names = names_of("variables", variables)
        check_known(str(cube), names, sorted(map(str, ds.variables)), "variable")
        # areas of cells need bounds and the like, which are variables of their own
        others = named_by_attributes(ds)
        ds = ds[[*names, *(name for name in ds.data_vars if name in others and name not in names)]]
    if recipe is not None:
        from ml4cube.splits import apply_split

        ds = apply_split(ds, read_text(recipe))
    return ds


def read_statistics(path: str | None) -> Any:
    """Return the statistics in a file of `stats`; any other path is that of a sample store."""
    if path is None or not str(path).endswith(".json"):
        return path
    from ml4cube.preprocessing import Statistics

    return Statistics.from_json(read_text(path))


def samples_of(store: str, data: Mapping[str, Any] | None) -> PTXrDataset:
    """Open the samples of a store; its targets are predicted unless `data` names others."""
    from ml4cube.datasets.pytorch import PTXrDataset
    from ml4cube.datasets.store import StoreMetadata

    options = options_of("data", data, PTXrDataset, {"ds"})
    options.setdefault("to_pred", list(StoreMetadata.of(store).targets) or None)
    return PTXrDataset(store, **options)


def options_of(
    name: str, options: Any, function: Callable[..., Any], given: set[str]
) -> dict[str, Any]:
    """Return arguments for a function, checked, without those that it is given anyway."""
    if options is not None and not isinstance(options, Mapping):
        raise InvalidTypeError(f"{name} must be a mapping of arguments, got {options!r}")
    check_known(name, options or {}, arguments_of(function).keys() - given)
    return dict(options or {})


def model_of(recipe: Recipe, names: Names) -> torch.nn.Module:
    from ml4cube.training import torch

    module = names.make("model", recipe, call=True)
    if not isinstance(module, torch.nn.Module):
        raise InvalidTypeError(
            f"model must be, or return, a torch.nn.Module, {recipe!r} gave a "
            f"{type(module).__name__}"
        )
    return module
