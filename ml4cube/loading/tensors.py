"""PTXrDataset: samples of a store or a cube as PyTorch tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.display import Summarized, Summary, bytes_text, counted, one_line, shown
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, needs_torch, parse_names
from ml4cube.core.grid import Grid, SizesLike
from ml4cube.core.missing import FILL_FEATURES, FILLED_ATTR, warn_of_filled
from ml4cube.core.rank_shares import Ints
from ml4cube.core.sample_facts import variable_facts
from ml4cube.core.scaling import Scaling
from ml4cube.core.statistics import Statistics
from ml4cube.cube.opening import as_dataset
from ml4cube.loading.coordinate_features import add_coordinates
from ml4cube.loading.cube_source import CubeSource
from ml4cube.loading.opening import DatasetOptions, open_source
from ml4cube.loading.ring.arrays import Field
from ml4cube.loading.ring.ring import ChunkSource, read_chunk
from ml4cube.loading.sources import SampleSource, known_scaling
from ml4cube.loading.unbatch import to_dataset
from ml4cube.loading.views import (
    WEIGHTS,
    add_weights,
    refuse_inexact_integers,
    repeat_along_missing_dims,
)
from ml4cube.recipe.fitted import FittedRecipe
from ml4cube.recipe.roles import INPUT, TARGET, ArrayName, DimLead
from ml4cube.sampling.request import check_known
from ml4cube.store.format import store_facts

with needs_torch("ml4cube.datasets.pytorch"):
    import torch
    from torch import Tensor
    from torch.utils.data import Dataset

if TYPE_CHECKING:
    import xarray as xr

Batch = Any

_MB = 1 << 20
_SAMPLE_ANEW = (
    "sample the cube again with to_pred=, which leaves gaps in targets, or with "
    "fill_method={variable: method, ...} for the features alone"
)


class PTXrDataset(Summarized, Dataset[Any]):
    """Samples of a store or a cube as tensors; chunks are read when needed.

    Parameters
    ----------
    ds : Dataset, str, path, zarr store or group, or Icechunk session
        A sample store (opened, by path or URL, or a Dataset made by hand whose variables have
        the dim ``samples``), or a cube, which is cut into windows as it is read: the samples
        that `MultiProcSampler` would write for the same arguments. A path is that of a sample
        store unless one of the arguments for cubes is given. A cube is first read once, for all
        its parts, for the statistics, gaps and masks. Nothing is read before if none of these is
        needed: ``drop_nan=None`` (or no floats and dates), no mask, `statistics` or
        ``scale_fn=None``, no `callback`, and no gaps to fill by train means.
    to_pred : str or list of str, optional
        Target variables. Items are then pairs ``(X, y)``.
    features : str or list of str, optional
        Feature variables; by default those that the store was sampled with for the same
        `to_pred`, else all but the targets. Without `to_pred`, items are X.
    block_size : mapping or pairs, optional
        For a cube without a split, with `data_split` below 1: blocks of the split.
    sample_size : mapping or pairs, optional
        For a cube: cells of a window by dim.
    overlap : mapping, pairs or float, optional
        For a cube: fraction of a window that neighbours share, by dim.
    block_sizes : mapping or pairs, optional
        The same as `block_size`.
    target_offset : mapping or pairs, optional
        Cells from the first cell of X to the first cell of y, by dim: ``{"time": 1}`` to
        forecast one step ahead. All variables are features then unless `features` says
        otherwise, targets too. In a cube, both windows must lie in the same part; those whose
        targets would pass the cube's end are counted as ``edge``. In a store, whose samples
        must have several cells along that dim, X are the first cells of each sample and y
        those `target_offset` later.
    target_size : mapping or pairs, optional
        Cells of y, by dim, if others than those of X (`sample_size`).
    rollout : int
        Steps of a forecast whose output is its next input. With K steps X has
        ``n + (K - 1) * p`` cells along time and y ``K * p``, where n are those of `sample_size`,
        which `target_offset` must be, and p those of `target_size`. Windows begin at the dates at
        which they do with one step. The `rollout` of the trainers uses them.
    coord_features : str or list of str, optional
        Coordinates to add to X as channels, two each, sine and cosine: ``"lat"``, ``"lon"``,
        ``"dayofyear"``, ``"hour"``, or a dim in degrees by its own name.
    weights : str, mapping or array_like, optional
        Items are then ``(X, y, w)``: a variable of the samples (unscaled), ``{class: weight}``
        by the value of the target in each of its cells (0 in a gap), or one number per sample.
        w of samples has the shape () and w of cells (1, *window of y).
    part : {"train", "test", "val"}, optional
        For a cube: the part to take samples of, by default train. Without a split, all windows
        are training samples, and other parts are refused, as is a store of another part.
    dtype : str or dtype
        Type of the values.
    target_dtype : str or dtype, optional
        Type of the targets, if another (``"int64"`` for classes). Values that an integer type
        cannot hold, such as scaled ones, are refused.
    cache_mb : float
        Memory for decoded chunks when samples are read one by one.
    **cutting
        For a cube, as `MultiProcSampler` takes them: `apply_mask`, `drop_sample`,
        `fill_method`, `const`, `filter_var`, `drop_nan`, `scale_fn`, `callback`,
        `data_split` (1.0 unless given), `val_split`, `data_fraq`, `rand_chunk`, `seed`,
        `nproc`, `statistics`, `missing_chunks`, `progress`. Gaps of `to_pred` and of a variable
        given as `weights` are filled only where a mapping given as `fill_method` names them, and
        at a lead time never.

    Attributes
    ----------
    features, targets : tuple of str
        Variables of X and of y, in channel order.
    shifted : bool
        Whether targets lie elsewhere than the inputs (`target_offset`, `target_size`).
    lead : dict or None
        By dim, the cells from the first cell of X to the first of y, and the cells of y; None
        unless `shifted`.
    weights, rollout : object
        As given.
    coord_features : tuple of str
        As given.
    channels : tuple of str
        All channels of X: the features, then those of `coord_features`.
    layout : tuple of tuple of str
        Dims of each array of a batch, without samples and channels: of X, of y ...
    step_sizes : tuple of dict of str to int
        Cells by dim of each array in a single step of a `rollout`, without samples and channels.
    metadata : StoreMetadata or None
        Metadata of the store, or the same for a cube; None for samples made by hand.

    Raises
    ------
    StoreError
        If a shard of a store is missing or has the wrong size. A flipped bit is found when its
        chunk is read; the message names the chunk.
    InvalidValueError
        If a variable is unknown, or stacked variables differ in their windows.

    Notes
    -----
    With `to_pred` an item is ``(X, y)``, with `features` alone X, with neither a dict
    ``{variable: tensor}``. Variables are stacked as channels first: X has the shape
    (channels, *window), for points (channels,). A feature that lacks a dim of the others, such
    as a static field beside a series, is repeated along it.

    Examples
    --------
    >>> a, b = np.ones((4, 3)), np.arange(4)
    >>> import xarray as xr
    >>> ds = xr.Dataset({"a": (("samples", "lat"), a), "b": ("samples", b)})
    >>> PTXrDataset(ds, to_pred="b")[2]
    (tensor([[1., 1., 1.]]), tensor([2.]))
    >>> PTXrDataset(ds)[2]["b"]
    tensor(2.)
    """

    def __init__(
        self,
        ds: Any,
        to_pred: str | Sequence[str] | None = None,
        features: str | Sequence[str] | None = None,
        block_size: SizesLike | None = None,
        sample_size: SizesLike | None = None,
        overlap: SizesLike | float | None = None,
        *,
        block_sizes: SizesLike | None = None,
        target_offset: SizesLike | None = None,
        target_size: SizesLike | None = None,
        rollout: int = 1,
        coord_features: str | Sequence[str] | None = None,
        weights: Any = None,
        part: str | None = None,
        dtype: Any = "float32",
        target_dtype: Any = None,
        cache_mb: float = 256,
        **cutting: Any,
    ) -> None:
        options = DatasetOptions(
            to_pred=to_pred,
            features=features,
            block_size=block_size,
            sample_size=sample_size,
            overlap=overlap,
            block_sizes=block_sizes,
            target_offset=target_offset,
            target_size=target_size,
            rollout=rollout,
            coord_features=coord_features,
            weights=weights,
            part=part,
            dtype=dtype,
            target_dtype=target_dtype,
            cache_mb=cache_mb,
            cutting=cutting,
        )
        self.shifted = options.shifted
        self.weights, self.rollout = options.weights, options.rollout
        self.coord_features = parse_names("coord_features", options.coord_features)
        self._source: SampleSource
        self._source, self.metadata = open_source(ds, options)
        lead = {dim: [a.offset, a.target_size] for dim, a in self._source.lead.items()}
        self.lead = lead or None
        self._from_cube = isinstance(self._source, CubeSource)
        opened_from = getattr(ds, "encoding", {}).get("source", ds)
        is_path = isinstance(opened_from, str | os.PathLike) and not self._from_cube
        self._path = str(opened_from) if is_path else None
        self._choose_variables(options)
        self._warn_of_filled(ds, options)
        self._add_features()
        self._add_weights(options.weights)
        self._fields = self._make_fields(options)
        integers = [field for field in self._fields if field.dtype.kind in "iub"]
        if integers:
            dtypes = {name: field.dtype for field in integers for name in field.names}
            self._source = refuse_inexact_integers(self._source, dtypes)
        variables = self._source.variables
        self.layout = tuple(tuple(variables[f.names[0]].sizes) for f in self._fields)
        self.step_sizes = self._sizes_of_one_step()
        self._cache = _ChunkCache(self._source, self._fields, int(options.cache_mb * _MB))

    def _summary(self) -> Summary:
        """Return the arrays of an item, how samples are cut, and how they are read."""
        part, used_as = "", variable_facts(self.features, self.targets, {})
        if self.metadata is not None:
            part = f"{self.metadata.part} "
            used_as = store_facts(self.metadata, self.features, self.targets)
        sample_bytes = sum(field.nbytes for field in self._fields)
        counts = self._source.counts
        largest = int(counts.max(initial=0))
        facts = {
            **self._shapes(),
            **used_as,
            "Coordinates": self.coord_features,
            "Lead": {d: f"y begins {o:,} after X" for d, (o, _) in (self.lead or {}).items() if o},
            "Rollout": None if self.rollout == 1 else counted(self.rollout, "step"),
            "Weights": None if self.weights is None else one_line(self.weights),
            "Chunks": f"{len(counts):,} of up to {counted(largest, 'sample')}, "
            f"{bytes_text(largest * sample_bytes)}",
            "Store": self._path,
        }
        size = bytes_text(len(self) * sample_bytes)
        headline = f"{counted(len(self), f'{part}sample')}, {size} as tensors"
        return Summary(headline, facts, {"Statistics": self.statistics or None})

    def _shapes(self) -> dict[str, str]:
        """Return the dims and dtype of each array of an item."""
        names = ["X", "y", "w"]
        if not self._stacked:
            names = list(self.features)
        shapes = {}
        for name, field in zip(names, self._fields, strict=False):
            sizes = dict(self._source.variables[field.names[0]].sizes)
            if field.stacked:
                sizes = {"channels": len(field.names), **sizes}
            shapes[name] = f"{shown(sizes) or 'one value'}, {field.dtype.name}"
        return shapes

    @property
    def fitted(self) -> FittedRecipe | None:
        """How X and y of a single step are made; None for samples made by hand."""
        if self.metadata is None:
            return None
        fitted, cube_dim = self.metadata.fitted, self._source.cube_dim
        recipe = replace(fitted.recipe, features=self.features, targets=self.targets)
        fitted = replace(
            fitted, recipe=recipe, axes=self._source.axes, coord_features=self.coord_features
        )
        if not self.shifted:
            return fitted
        x, y, *_ = ({cube_dim(d): n for d, n in sizes.items()} for sizes in self.step_sizes)
        lead = {}
        for sample_dim, of_dim in self._source.lead.items():
            dim = cube_dim(sample_dim)
            lead[dim] = DimLead(of_dim.offset, x.get(dim, 1), y.get(dim, 1))
        recipe = replace(recipe, window_dims=tuple(x))
        return replace(fitted, recipe=recipe, lead=lead, target_dims=tuple(y))

    @property
    def statistics(self) -> Statistics | None:
        """Statistics that scaled the samples; None if they are not known."""
        if self.metadata:
            return self.metadata.statistics
        return None

    @property
    def scaling(self) -> dict[str, Scaling] | None:
        """Scaling of the features and targets; None if it is not known."""
        if self.metadata is None:
            return None
        scaling = known_scaling(self.metadata)
        names = [n for n in (*self.features, *self.targets) if n in self.metadata.variables]
        if not len(self):  # Variables without a known scaling may have one in other parts.
            return {name: scaling[name] for name in names if name in scaling}
        return {name: scaling.get(name, Scaling(name, 0.0, 1.0)) for name in names}

    def __len__(self) -> int:
        """Number of samples."""
        return int(self._source.starts[-1])

    def __getitem__(self, index: int) -> Any:
        """Return the sample at `index`; negative counts from the end."""
        if np.ndim(index):
            raise InvalidTypeError(
                f"index must be one whole number, got {index!r}; take(...) returns several samples"
            )
        return self._items(self.take([index]))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples, each chunk read once; torch's loaders call this."""
        return self._items(self.take(indices))

    def take(self, indices: Sequence[int] | NDArray[Any]) -> Batch:
        """Read several samples as one batch.

        Parameters
        ----------
        indices : sequence of int or of bool
            Numbers of the samples; negative ones count from the end. Or one bool per sample.

        Returns
        -------
        tuple of Tensor, Tensor or dict of str to Tensor
            As an item, with a leading axis of samples.

        Raises
        ------
        IndexError
            If there is no such sample.
        """
        wanted = self._rows(indices)
        chunks = self._source.chunks_of(wanted)
        out = [field.empty(len(wanted)) for field in self._fields]
        for chunk in np.unique(chunks).tolist():
            here = np.flatnonzero(chunks == chunk)
            inside = wanted[here] - self._source.starts[chunk]
            for array, values in zip(out, self._cache.get(chunk), strict=True):
                array[here] = values[inside]
        return self.pack([torch.from_numpy(array) for array in out])

    def coords(self, index: int | Sequence[int] | NDArray[Any]) -> dict[str, Any]:
        """Return the coordinates of samples.

        Parameters
        ----------
        index : int or sequence of int
            Number of the sample, or of several.

        Returns
        -------
        dict of str to value or ndarray
            Every coordinate along the samples: the origin along each cube dim, as value and
            as integer index (``lat``, ``lat_index``, ...). Empty if the data has none.
        """
        rows = np.atleast_1d(self._rows(index))
        coords = self._source.coords(rows)
        return {k: v if np.ndim(index) else v[0] for k, v in coords.items()}

    def to_dataset(
        self, batch: Batch, index: int | Sequence[int] | NDArray[Any], *, unscale: bool = False
    ) -> xr.Dataset:
        """Turn a batch back into an xarray Dataset, with names and coordinates.

        Parameters
        ----------
        batch : tuple of Tensor, Tensor or dict of str to Tensor
            Samples as from `take` or a loader; y may be replaced by a prediction of that shape.
        index : int or sequence of int
            Numbers of these samples.
        unscale : bool
            Whether to return values in physical units, with their attributes.

        Returns
        -------
        Dataset
            Variables (samples, *window), with the origins of samples as in `coords` and, where
            it is known, the coordinate of every cell of a window as ``<dim>_cells``. Targets
            that are features too are called ``<name>_target``.

        Raises
        ------
        InvalidValueError
            If the batch has other shapes, or the scaling is not known.

        Examples
        --------
        >>> import xarray as xr
        >>> cube = xr.Dataset({"t": (("time", "x"), np.arange(6.0).reshape(2, 3))})
        >>> data = PTXrDataset(cube, features="t", sample_size={"x": 3})
        >>> data.to_dataset(data.take([1]), [1], unscale=True)["t"].values.tolist()
        [[3.0, 4.0, 5.0]]
        """
        rows = np.atleast_1d(self._rows(index))
        tensors = [tensor.detach().cpu() for tensor in self.unpack(batch)]
        # Predictions under autocast may be bfloat16, which numpy lacks.
        arrays = [(t.float() if t.dtype == torch.bfloat16 else t).numpy() for t in tensors]
        if unscale:
            self._check_scaling_known()
        return to_dataset(self._source, self._fields, arrays, rows, self.metadata, unscale=unscale)

    def _check_scaling_known(self) -> None:
        if self.metadata is None:
            raise InvalidValueError(
                "unscale=True, but the scaling of samples made by hand is not known; undo it with "
                "their own statistics"
            )
        stored = self.metadata.variables
        if renamed := [n for n in (*self.features, *self.targets) if n not in stored]:
            raise InvalidValueError(
                f"unscale=True, but the store has no scaling of {renamed}, only of "
                f"{list(stored)}; rename the variables back"
            )

    def _rows(self, indices: Any) -> Ints:
        """Return the numbers of samples, negative ones counted from the end."""
        positions = np.asarray(indices)
        if positions.dtype == bool and positions.shape == (len(self),):
            return np.flatnonzero(positions)
        if positions.ndim > 1 or (positions.size and positions.dtype.kind not in "iu"):
            raise InvalidTypeError(
                "samples must be given as a whole number, a list of them, or one bool for each of "
                f"the {len(self)} samples, got {indices!r}"
            )
        wanted = positions.astype(np.int64)
        wanted = np.where(wanted < 0, wanted + len(self), wanted)
        if ((wanted < 0) | (wanted >= len(self))).any():
            raise IndexError(f"no sample {indices}; there are {len(self)} samples")
        return wanted

    def blocks(self, indices: Sequence[int] | NDArray[Any]) -> tuple[Ints, str]:
        """Return the block of every sample, to measure how well batches are mixed.

        Parameters
        ----------
        indices : sequence of int
            Numbers of the samples.

        Returns
        -------
        blocks : ndarray of int64
            Number of the block in which each sample begins.
        unit : str
            Kind of blocks: ``"blocks of the split"`` of a store if known, else ``"chunks"``.
        """
        rows = self._rows(indices)
        plan = {}
        if self.metadata:
            plan = self.metadata.split.get("plan", {})
        if "grid" not in plan or self._from_cube:
            return self._source.chunks_of(rows), "chunks"
        grid = Grid.from_json(json.dumps(plan["grid"]))
        first = self._source.first_cells(rows, grid.dims)
        windows = [first[dim] // n for dim, n in zip(grid.dims, grid.stride, strict=True)]
        return np.ravel_multi_index(windows, grid.counts).astype(np.int64), "blocks of the split"

    def pack(self, arrays: Sequence[Tensor]) -> Batch:
        """Return the arrays of a batch in the form of an item.

        Parameters
        ----------
        arrays : sequence of Tensor
            X, or X and y, or one per variable.

        Returns
        -------
        tuple of Tensor, Tensor or dict of str to Tensor
            A pair, X alone, or a dict.
        """
        if self.targets:
            return tuple(arrays)
        if self._stacked:
            return arrays[0]
        return dict(zip(self.features, arrays, strict=True))

    def unpack(self, batch: Batch) -> list[Tensor]:
        """Return the arrays of a batch, the inverse of `pack`.

        Parameters
        ----------
        batch : tuple of Tensor, Tensor or dict of str to Tensor
            A batch.

        Returns
        -------
        list of Tensor
            X, or X and y, or one per variable.
        """
        arrays: Any = [batch] if isinstance(batch, Tensor) else batch
        if isinstance(batch, Mapping):
            names = list(self.features)
            if self._stacked or list(batch) != names:
                expected = "X, or X and y"
                if not self._stacked:
                    expected = f"a dict of {names}"
                raise InvalidValueError(
                    f"the batch must be {expected}, as the data set returns it, got a dict of "
                    f"{list(batch)}"
                )
            arrays = batch.values()
        tensors = [torch.as_tensor(array) for array in arrays]
        if len(tensors) != len(self._fields):
            raise InvalidValueError(
                f"the batch must have {len(self._fields)} arrays, got {len(tensors)}"
            )
        return tensors

    def _items(self, batch: Batch) -> list[Any]:
        """Return the samples of a batch."""
        if isinstance(batch, Tensor):
            return list(batch)
        if isinstance(batch, tuple):
            return list(zip(*batch, strict=True))
        return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]

    def _sizes_of_one_step(self) -> tuple[dict[str, int], ...]:
        """Return the window of each array that samples of a single step have."""
        sizes = [dict(self._source.variables[f.names[0]].sizes) for f in self._fields]
        if self.rollout == 1:
            return tuple(sizes)
        dim, along = next((d, a) for d, a in self._source.lead.items() if a.offset)
        outputs = along.target_size // self.rollout
        for one, cells in zip(sizes, (along.offset, outputs, outputs), strict=False):
            if dim in one:  # Weights of samples have no window.
                one[dim] = cells
                if cells == 1 and self._from_cube:  # Stored samples keep dims of one cell.
                    del one[dim]
        return tuple(sizes)

    def _choose_variables(self, options: DatasetOptions) -> None:
        """Choose the variables of X and of y, and whether they are stacked."""
        self.targets = targets = options.targets
        stored = [name.variable for name in self._source.variables if name.role == INPUT]
        self._check_chosen(options, stored)
        # At a lead time, y has arrays of its own in the source, and targets are features too.
        y_role, not_features = INPUT, targets
        if self.shifted:
            y_role, not_features = TARGET, ()
        self._y_names = tuple(ArrayName(name, y_role) for name in targets)
        others = {*not_features, options.weights_variable, *self._source.auxiliary}
        self.features = options.chosen or self._default_features(stored, others)
        self._stacked = bool(options.chosen or targets)
        if not self.features:
            raise InvalidValueError(
                f"no variable is left to predict {list(targets)} from, the samples have "
                f"{stored}; name fewer in to_pred"
            )

    def _check_chosen(self, options: DatasetOptions, stored: Sequence[str]) -> None:
        """Refuse targets and features that the samples lack, or that are both."""
        reasons = {}
        if self.metadata:
            reasons = self.metadata.provenance.get("left_out", {})
        check_known("to_pred", options.targets, stored, reasons)
        check_known("features", options.chosen, stored, reasons)
        both = set(options.targets) & set(options.chosen)
        if both and not self.shifted:
            raise InvalidValueError(
                f"{sorted(both)} are in to_pred and in features; name each in one of them, or "
                "give target_offset if the targets lie elsewhere"
            )

    def _default_features(
        self, stored: Sequence[str], others: Collection[str | None]
    ) -> tuple[str, ...]:
        """Return the features that a store was sampled with for just these targets, or the rest."""
        rest = tuple(name for name in stored if name not in others)
        if self.metadata is None or self.shifted or not self.targets:
            return rest
        recipe = self.metadata.recipe
        if not recipe.features or self.targets != recipe.targets:
            return rest
        return tuple(name for name in recipe.features if name in stored)

    def _warn_of_filled(self, ds: Any, options: DatasetOptions) -> None:
        """Warn of targets or weights whose gaps were filled when they were sampled."""
        advice = FILL_FEATURES
        if self.metadata is None:  # The samples were made by hand.
            by_hand = as_dataset(ds)
            attrs = {name: by_hand[name].attrs for name in options.scored}
            filled = {n: found[FILLED_ATTR] for n, found in attrs.items() if FILLED_ATTR in found}
        elif self._from_cube:  # This call asks for `metadata.filled`: no need to warn of that.
            filled = self.metadata.invented(options.scored)
            filled = {name: how for name, how in filled.items() if name not in self.metadata.filled}
        else:
            filled, advice = self.metadata.invented(options.scored), _SAMPLE_ANEW
            if self.shifted:  # a fill that was meant for the inputs is in the targets too
                given = self.metadata.filled
                filled |= {name: given[name] for name in options.scored if name in given}
        warn_of_filled(
            "weights" if options.weights_variable in filled else "to_pred", filled, advice
        )

    def _add_features(self) -> None:
        """Repeat static features along the dims they lack, and add coordinates."""
        self.channels = self.features
        names = [ArrayName(name) for name in self.features]
        if self._stacked and len({self._source.variables[name].window for name in names}) > 1:
            self._source = repeat_along_missing_dims(self._source, names)
        if not self.coord_features:
            return
        if not self._stacked:
            raise InvalidTypeError(
                "coord_features are channels of X, so they need features or to_pred"
            )
        self._source = view = add_coordinates(self._source, self.coord_features, names[0])
        self.channels = (*self.features, *(name.variable for name in view.computed))

    def _add_weights(self, weights: Any) -> None:
        if weights is None:
            return
        if not self.targets:
            raise InvalidTypeError("weights are for the loss of y, so they need to_pred")
        if isinstance(weights, Mapping) and len(self.targets) != 1:
            raise InvalidTypeError(
                f"weights of classes need exactly one target, got {list(self.targets)}; give a "
                "variable of weights"
            )
        scaling = known_scaling(self.metadata)
        self._source = add_weights(self._source, weights, self._y_names[0], scaling)

    def _make_fields(self, options: DatasetOptions) -> tuple[Field, ...]:
        """Make the arrays of a batch: X, y and weights, or one per variable."""
        dtype = target_dtype = _numpy_dtype("dtype", options.dtype)
        if options.target_dtype is not None:
            target_dtype = _numpy_dtype("target_dtype", options.target_dtype)
        channels = tuple(ArrayName(name) for name in self.channels)
        if not self._stacked:
            return tuple(Field((n,), self._window(n), dtype, stacked=False) for n in channels)
        fields = [self._stacked_field(channels, dtype)]
        if self.targets:
            fields.append(self._stacked_field(self._y_names, target_dtype))
        if WEIGHTS in self._source.variables:
            # Weights of samples have no axes; those of cells have one channel, however many y has.
            window, sizes = self._window(WEIGHTS), self._source.variables[WEIGHTS].sizes
            target_sizes = self._source.variables[self._y_names[0]].sizes
            if sizes not in ({}, target_sizes):
                raise InvalidValueError(
                    f"weights must be one per sample, or per cell of the target's window "
                    f"{target_sizes}, got window {sizes}"
                )
            fields.append(Field((WEIGHTS,), window, np.dtype("float32"), stacked=window != ()))
        self._check_order_of_dims(fields)
        return tuple(fields)

    def _check_order_of_dims(self, fields: Sequence[Field]) -> None:
        """Refuse samples of which some are transposed, which square windows would hide."""
        variables = self._source.variables
        names = [name for field in fields for name in field.names]
        dims = {name.variable: tuple(variables[name].sizes) for name in names}
        orders = set(dims.values())
        if len({frozenset(order) for order in orders}) < len(orders):
            raise InvalidValueError(
                f"the variables of a sample must have their dims in one order, got {dims}; "
                "transpose them with ds.transpose"
            )

    def _stacked_field(self, names: tuple[ArrayName, ...], dtype: np.dtype[Any]) -> Field:
        windows = [self._window(name) for name in names]
        sizes = {name.variable: self._source.variables[name].sizes for name in names}
        if any(of_variable != sizes[names[0].variable] for of_variable in sizes.values()):
            raise InvalidValueError(
                f"variables with different windows cannot be stacked: {sizes}; choose some "
                "with features="
            )
        return Field(names, windows[0], dtype)

    def _window(self, name: ArrayName) -> tuple[int, ...]:
        variable = self._source.variables[name]
        if variable.dtype.kind not in "fiub":
            raise InvalidTypeError(
                f"variable {name.variable!r} has dtype {variable.dtype}, which tensors cannot "
                "have; choose others by features=, or leave it out with ds.drop_vars"
            )
        return variable.window


def _numpy_dtype(argument: str, given: Any) -> np.dtype[Any]:
    """Return a dtype of numpy or torch as one of numpy."""
    try:
        if isinstance(given, torch.dtype):
            given = torch.empty(0, dtype=given).numpy().dtype
        made: np.dtype[Any] = np.dtype(given)
        if made.kind not in "fiub":
            raise TypeError("it holds no real numbers")
        torch.from_numpy(np.empty(0, made))
        return made
    except TypeError as error:
        raise InvalidTypeError(
            f"{argument} must be a dtype of real numbers that both numpy and torch have, such as "
            f"'float32', got {given!r} ({error})"
        ) from error


class _ChunkCache:
    """Decoded chunks that were used last; bounded, shared by threads, empty after pickling."""

    def __init__(self, source: ChunkSource, fields: tuple[Field, ...], limit: int) -> None:
        self._arguments = source, fields, limit
        largest = int(source.counts.max(initial=1)) * sum(field.nbytes for field in fields)
        self.get = lru_cache(max(1, limit // max(1, largest)))(partial(_decoded, source, fields))

    def __reduce__(self) -> tuple[Any, ...]:
        return _ChunkCache, self._arguments


def _decoded(source: ChunkSource, fields: tuple[Field, ...], chunk: int) -> list[NDArray[Any]]:
    """Return the arrays of a chunk, one per field."""
    arrays = [field.empty(int(source.counts[chunk])) for field in fields]
    views = [field.views(array) for field, array in zip(fields, arrays, strict=True)]
    read_chunk(source, chunk, views)
    return arrays
