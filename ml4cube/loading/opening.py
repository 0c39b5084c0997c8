"""Open samples in any form: a store, a Dataset made by hand, or a cube to be cut.

`open_source` chooses the source that fits what a user gave. Does not use torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

from ml4cube.core.errors import (
    InvalidTypeError,
    InvalidValueError,
    StoreError,
    check_choice,
    check_whole,
    parse_names,
)
from ml4cube.core.grid import SizesLike, parse_overlap, parse_sizes
from ml4cube.core.sample_facts import SAMPLE_DIM
from ml4cube.core.split_plan import PARTS
from ml4cube.cube.opening import as_dataset
from ml4cube.ledger.manifest import NoStoreError
from ml4cube.loading.cube_source import CUTTING, CubeOptions, cut_cube
from ml4cube.loading.lead_time import TargetOptions, whole_cells
from ml4cube.loading.memory import check_megabytes
from ml4cube.loading.sources import DatasetSource, SampleSource, source_of_store
from ml4cube.loading.views import cut_windows
from ml4cube.store.format import StoreMetadata, open_store

if TYPE_CHECKING:
    import xarray as xr


@dataclass(frozen=True, kw_only=True)
class DatasetOptions(TargetOptions):
    """Arguments of `PTXrDataset`, which documents them, checked when made."""

    features: str | Sequence[str] | None
    block_size: SizesLike | None
    sample_size: SizesLike | None
    overlap: SizesLike | float | None
    block_sizes: SizesLike | None
    coord_features: str | Sequence[str] | None
    part: str | None
    dtype: Any
    target_dtype: Any
    cache_mb: float
    rollout: int
    # Further arguments, for a cube.
    cutting: dict[str, Any]

    def __post_init__(self) -> None:
        """Check the arguments."""
        super().__post_init__()
        if self.block_size is not None and self.block_sizes is not None:
            raise InvalidTypeError(
                "block_size and block_sizes are two names of one argument; give one of them"
            )
        check_choice("part", self.part, (*PARTS, None))
        check_whole("rollout", self.rollout, 1)
        if self.rollout > 1 and self.target_offset is None:
            raise InvalidTypeError(
                f"rollout={self.rollout} needs target_offset along time, as {{'time': 1}}"
            )
        check_megabytes("cache_mb", self.cache_mb)
        for name in self.cutting:
            if name not in CUTTING:
                raise InvalidTypeError(
                    f"PTXrDataset has no argument {name!r}; for cubes it takes sample_size, "
                    f"overlap, block_size, {', '.join(CUTTING)}"
                )
        _ = self.targets, self.chosen  # Parsing checks them.

    @cached_property
    def chosen(self) -> tuple[str, ...]:
        """Variables of X, if they are named."""
        return parse_names("features", self.features)

    @property
    def for_cubes(self) -> dict[str, Any]:
        """The given arguments for cutting a cube."""
        sizes = {name: getattr(self, name) for name in ("sample_size", "overlap", "block_size")}
        if self.block_sizes is not None:
            sizes["block_size"] = self.block_sizes
        return {name: size for name, size in sizes.items() if size is not None} | self.cutting

    def with_all_steps(self, shape: Mapping[str, int], is_store: bool) -> Self:
        """Return the options of windows in which the steps of a rollout follow one another.

        `shape` is that of the cube, or of the stored windows.
        """
        if self.rollout == 1:
            return self
        offset = whole_cells("target_offset", self.target_offset, shape, least=0)
        dims = [dim for dim, cells in offset.items() if cells]
        if len(dims) != 1:
            raise InvalidValueError(
                f"rollout={self.rollout} needs target_offset along one dim, time, got {offset}"
            )
        dim = dims[0]
        # As without a rollout: windows of a cube have one cell, those in a store all that fit.
        default = {**shape, dim: offset[dim]} if is_store else dict.fromkeys(shape, 1)
        given = parse_sizes("sample_size", self.sample_size or {}, shape)
        inputs = default | given
        outputs = inputs | whole_cells("target_size", self.target_size, shape, least=1)
        self._check_one_step(dim, offset[dim], inputs, outputs)
        longer = inputs[dim] + (self.rollout - 1) * outputs[dim]
        if longer + outputs[dim] > shape[dim]:
            raise InvalidValueError(
                f"rollout={self.rollout} needs {longer + outputs[dim]} cells along {dim!r}, and "
                f"there are {shape[dim]}; choose a smaller rollout"
            )
        changes: dict[str, Any] = {
            "sample_size": {**given, dim: longer},
            "target_size": {dim: self.rollout * outputs[dim]},
        }
        if not is_store:  # Windows begin where they do without a rollout.
            shared = parse_overlap("overlap", self.overlap, inputs)
            fractions = {d: cells / inputs[d] for d, cells in shared.items() if cells}
            fractions[dim] = (shared[dim] + longer - inputs[dim]) / longer
            changes["overlap"] = fractions
        return replace(self, **changes)

    def _check_one_step(
        self, dim: str, offset: int, inputs: Mapping[str, int], outputs: Mapping[str, int]
    ) -> None:
        """Refuse a step whose output cannot become its next input."""
        if offset != inputs[dim]:
            raise InvalidValueError(
                f"target_offset along {dim!r} must be {inputs[dim]}, the cells of X, with rollout="
                f"{self.rollout}, because y has the next steps; got {offset}"
            )
        for other, cells in inputs.items():
            if other != dim and outputs[other] != cells:
                raise InvalidValueError(
                    f"target_size along {other!r} must be {cells}, the cells of X, with rollout="
                    f"{self.rollout}, because y becomes X; got {outputs[other]}"
                )


def open_source(ds: Any, options: DatasetOptions) -> tuple[SampleSource, StoreMetadata | None]:
    """Open samples in any form: a store, a Dataset made by hand, or a cube to be cut."""
    # `progress` may be given for a store too, which needs none.
    only_for_cubes = [name for name in options.for_cubes if name != "progress"]
    ds = _opened(ds, may_be_cube=bool(only_for_cubes))
    metadata, dim = None, SAMPLE_DIM
    if "ml4cube_format" in ds.attrs:
        metadata = StoreMetadata.of(ds)
        dim = _sample_dim(ds, metadata)
    shape = {str(d): n for d, n in ds.sizes.items() if d != dim}
    options = options.with_all_steps(shape, is_store=dim in ds.dims)
    if dim not in ds.dims:
        return cut_cube(ds, _cutting_options(options))
    _check_part(options.part, metadata)
    # At a lead time, `sample_size` is that of the inputs in a stored window.
    if only_for_cubes and not (options.shifted and only_for_cubes == ["sample_size"]):
        raise InvalidTypeError(
            f"{', '.join(only_for_cubes)} can be given for a cube only, and ds holds samples "
            f"already (dim {dim!r}); leave them out"
        )
    source = source_of_store(ds, metadata.recipe) if metadata else DatasetSource(ds)
    if options.shifted:
        return cut_windows(source, options, options.sample_size), metadata
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


def _cutting_options(options: DatasetOptions) -> CubeOptions:
    """Return the options that a cube is cut by."""
    cutting = options.for_cubes
    cutting["part"] = options.part or "train"
    if options.shifted:  # Targets have windows of their own, which are never filled.
        cutting["shifted_targets"] = options
    else:
        cutting["unfilled"] = options.scored
    return CubeOptions(**cutting)


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
