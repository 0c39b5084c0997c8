"""PTXrDataset: samples of a store or a cube as PyTorch tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.display import Summarized, Summary, bytes_text, counted, one_line, shown
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, needs_torch
from ml4cube.core.grid import SizesLike
from ml4cube.core.scaling import Scaling
from ml4cube.core.statistics import Statistics
from ml4cube.loading.dataset_options import SIZES, DatasetOptions
from ml4cube.loading.items import fitted_of, items_of, sizes_of_one_step
from ml4cube.loading.ring.ring import ChunkCache
from ml4cube.loading.sources import blocks_of, facts_of, scaling_of
from ml4cube.loading.unbatch import to_dataset
from ml4cube.recipe.fitted import FittedRecipe

with needs_torch("ml4cube.datasets.pytorch"):
    import torch
    from torch import Tensor
    from torch.utils.data import Dataset

if TYPE_CHECKING:
    import xarray as xr

Batch = Any

_MB = 1 << 20


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
        if block_size is not None and block_sizes is not None:
            raise InvalidTypeError(
                "block_size and block_sizes are two names of one argument; give one of them"
            )
        blocks = block_sizes if block_size is None else block_size
        for name, sizes in zip(SIZES, (sample_size, overlap, blocks), strict=True):
            if sizes is not None:
                cutting[name] = sizes
        options = DatasetOptions(
            to_pred=to_pred,
            features=features,
            target_offset=target_offset,
            target_size=target_size,
            rollout=rollout,
            coord_features=coord_features,
            weights=weights,
            part=part,
            dtype=_numpy_dtype("dtype", dtype),
            target_dtype=_numpy_dtype(
                "target_dtype", dtype if target_dtype is None else target_dtype
            ),
            cache_mb=cache_mb,
            cutting=cutting,
        )
        self.shifted, self.targets = options.shifted, options.targets
        self.weights, self.rollout = options.weights, options.rollout
        self.coord_features = options.coordinates
        self._items = items = items_of(ds, options)
        source = self._source = items.source
        self._fields = items.fields
        self.metadata, self.features, self.channels = items.metadata, items.features, items.channels
        lead = {dim: [a.offset, a.target_size] for dim, a in source.lead.items()}
        self.lead = lead or None
        opened_from = getattr(ds, "encoding", {}).get("source", ds)
        is_path = isinstance(opened_from, str | os.PathLike) and not source.is_cut
        self._path = str(opened_from) if is_path else None
        self.layout = tuple(tuple(source.variables[f.names[0]].sizes) for f in self._fields)
        self.step_sizes = sizes_of_one_step(items, options.rollout)
        self._cache = ChunkCache(source, items.fields, int(options.cache_mb * _MB))

    def _summary(self) -> Summary:
        """Return the arrays of an item, how samples are cut, and how they are read."""
        part = ""
        if self.metadata is not None:
            part = f"{self.metadata.part} "
        sample_bytes = sum(field.nbytes for field in self._fields)
        counts = self._source.counts
        largest = int(counts.max(initial=0))
        facts = {
            **self._shapes(),
            **facts_of(self.metadata, self.features, self.targets),
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
        if not self._items.stacked:
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
        steps = self.step_sizes if self.shifted else ()
        return fitted_of(self._items, self.targets, self.coord_features, steps)

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
        return scaling_of(self.metadata, (*self.features, *self.targets), len(self) > 0)

    def __len__(self) -> int:
        """Number of samples."""
        return int(self._source.starts[-1])

    def __getitem__(self, index: int) -> Any:
        """Return the sample at `index`; negative counts from the end."""
        if np.ndim(index):
            raise InvalidTypeError(
                f"index must be one whole number, got {index!r}; take(...) returns several samples"
            )
        return self._split(self.take([index]))[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return several samples, each chunk read once; torch's loaders call this."""
        return self._split(self.take(indices))

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
        if np.ndim(index):
            return dict(coords)
        return {name: values[0] for name, values in coords.items()}

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
        arrays = []
        for tensor in self.unpack(batch):
            # Predictions under autocast may be bfloat16, which numpy lacks.
            if tensor.dtype == torch.bfloat16:
                tensor = tensor.float()
            arrays.append(tensor.detach().cpu().numpy())
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

    def _rows(self, indices: Any) -> NDArray[np.int64]:
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

    def blocks(self, indices: Sequence[int] | NDArray[Any]) -> tuple[NDArray[np.int64], str]:
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
        return blocks_of(self._source, self.metadata, self._rows(indices))

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
        if self._items.stacked:
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
            if self._items.stacked or list(batch) != names:
                expected = "X, or X and y"
                if not self._items.stacked:
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

    def _split(self, batch: Batch) -> list[Any]:
        """Return the samples of a batch."""
        if isinstance(batch, Tensor):
            return list(batch)
        if isinstance(batch, tuple):
            return list(zip(*batch, strict=True))
        return [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]


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
