"""Open samples in any form: a store, a Dataset made by hand, or a cube to be cut.

`open_source` chooses the source that fits what a user gave. Does not use torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, StoreError
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.cube.opening import as_dataset
from ml4cube.ledger.manifest import NoStoreError
from ml4cube.loading.cube_source import cut_cube
from ml4cube.loading.dataset_options import DatasetOptions
from ml4cube.loading.sources import SampleSource
from ml4cube.loading.store_files import open_samples
from ml4cube.loading.views import cut_windows
from ml4cube.store.format import open_store
from ml4cube.store.metadata import StoreMetadata

if TYPE_CHECKING:
    import xarray as xr


def open_source(ds: Any, options: DatasetOptions) -> tuple[SampleSource, StoreMetadata | None]:
    """Open samples in any form: a store, a Dataset made by hand, or a cube to be cut."""
    # `progress` may be given for a store too, which needs none.
    only_for_cubes = [name for name in options.cutting if name != "progress"]
    ds = _opened(ds, may_be_cube=bool(only_for_cubes))
    metadata, dim = None, SAMPLE_DIM
    if "ml4cube_format" in ds.attrs:
        metadata = StoreMetadata.of(ds)
        dim = _sample_dim(ds, metadata)
    shape = {str(d): n for d, n in ds.sizes.items() if d != dim}
    options = options.with_all_steps(shape, is_store=dim in ds.dims)
    if dim not in ds.dims:
        part = options.part or "train"
        return cut_cube(ds, part, scored=options.scored, **options.of_targets, **options.cutting)
    _check_part(options.part, metadata)
    # At a lead time, `sample_size` is that of the inputs in a stored window.
    if only_for_cubes and not (options.shifted and only_for_cubes == ["sample_size"]):
        raise InvalidTypeError(
            f"{', '.join(only_for_cubes)} can be given for a cube only, and ds holds samples "
            f"already (dim {dim!r}); leave them out"
        )
    source = open_samples(ds, metadata.recipe if metadata else None)
    if options.shifted:
        size = options.cutting.get("sample_size")
        return cut_windows(source, options.scored, size, **options.of_targets), metadata
    return source, metadata


def _sample_dim(ds: xr.Dataset, metadata: StoreMetadata) -> str:
    """Return the dim of the samples of a store; refuse a store that has lost it."""
    dim = metadata.recipe.array_dims[0]
    if dim not in ds.dims:
        raise InvalidValueError(
            f"ds is a sample store but has no dim {dim!r}, only {list(ds.dims)}; rename the dim "
            f"back, or select one sample by isel({dim}=[0])"
        )
    return dim


def _check_part(part: str | None, metadata: StoreMetadata | None) -> None:
    """Refuse samples of another part than the one asked for."""
    if part is None or (metadata and metadata.part == part):
        return
    described = "made by hand"
    if metadata:
        described = f"the store of {metadata.part!r}"
    raise InvalidValueError(f"part={part!r}, but ds is {described}; open that of {part!r}")


def _opened(source: Any, *, may_be_cube: bool) -> xr.Dataset:
    """Open a sample store, or a cube if there may be one and there is no sample store."""
    import xarray as xr

    if isinstance(source, xr.Dataset | xr.DataArray):
        return as_dataset(source)
    try:
        return open_store(source)
    except NoStoreError:
        found = as_dataset(source)
        if "ml4cube_format" in found.attrs or not found.sizes:
            raise
    if may_be_cube:
        return found
    raise StoreError(
        f"{source} is a cube with dims {dict(found.sizes)}, not a sample store; to cut samples "
        "from it, give sample_size= (or scale_fn=, ...), or open it by xarray first"
    )
