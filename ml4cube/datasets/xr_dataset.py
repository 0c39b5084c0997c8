"""XrDataset: samples of a cube as arrays in memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.display import Summarized, Summary, bytes_text, counted
from ml4cube.core.errors import (
    EmptyPartError,
    InvalidTypeError,
    InvalidValueError,
    check_flags,
    check_whole,
)
from ml4cube.core.grid import Grid, SizesLike
from ml4cube.core.sample_facts import outcome_table
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import Statistics
from ml4cube.recipe.preparation import Arrays
from ml4cube.sampling.block_samples import BlockReader
from ml4cube.sampling.parts import Parts
from ml4cube.sampling.plan import warn_of_nothing_to_fill
from ml4cube.sampling.rescaling import scaling_of_samples, select_statistics
from ml4cube.sampling.sampled_cube import sample_cube
from ml4cube.sampling.samples import scale_samples, schema_of, train_statistics
from ml4cube.sampling.selection import check_targets
from ml4cube.sampling.tiling import Callback, block_order

Pair = tuple[NDArray[Any], NDArray[Any]]


class XrDataset(Summarized):
    """Cut samples from blocks of a cube into arrays in memory.

    The windows, the rules for gaps and the statistics are those of `MultiProcSampler`: a window
    belongs to the block in which it starts, and to a part if all its cells do; float variables
    are scaled by the statistics of the train samples alone.

    Parameters
    ----------
    ds : Dataset, DataArray, str, path, zarr store or group, or Icechunk session
        The cube; its split label, if it has one, defines the parts.
    chunk_indices : sequence of int, optional
        Ids of the blocks to use, each once, in row-major order of the cube's dims.
    rand_chunk : bool
        Take blocks in seeded random order instead of the cube's order.
    drop_nan : {"auto", "if_all_nan", "masked", None}
        Samples to drop for gaps, as in `MultiProcSampler`.
    apply_mask, drop_sample : bool
        How to use the mask, as in `MultiProcSampler`.
    fill_method : {"sample_mean", "mean", "constant", "noise", None} or mapping
        How to fill gaps in samples that are kept, as in `MultiProcSampler`: one method fills all
        variables but those of `to_pred`, a mapping those it names.
    const : float, optional
        The value for ``"constant"``.
    filter_var : str, optional
        The mask variable.
    patience : int
        Blocks in a row without a sample to use after which no other block is read, with a
        warning. Blocks in which no window starts do not count.
    block_size : mapping or pairs, optional
        Blocks, in cells by dim; by default the chunks, and for the split of a cube without a
        label few large blocks, with a warning, as in `assign_block_split`.
    sample_size : mapping or pairs, optional
        Cells of a window by dim. None: single points.
    overlap : mapping, pairs or float, optional
        Fraction of a window that neighbours share by dim.
    callback : callable, optional
        Takes a dict of arrays ``(n, *window)`` and returns one, sample by sample.
    num_chunks : int, optional
        Number of blocks with samples to use; all if not given. With `to_pred` the next blocks
        replace the last of them if train or test would be empty otherwise; they are added if no
        block can be spared.
    to_pred : str or list of str, optional
        Variables to predict.
    scale_fn : {"standardize", "normalize", None}
        How to scale float variables.
    features : str or list of str, optional
        Variables to predict from; by default all others.
    data_split : float
        Fraction of blocks for training, if `to_pred` is given and the cube has no label.
    seed : int
        Seeds split, order and noise.
    statistics : Statistics, CubeScaler, or a sample store or its path, optional
        Statistics to scale float variables by, instead of those of the train samples, as in
        `MultiProcSampler`.
    missing_chunks : {"warn", "raise", "drop"}
        What to do about chunks that the cube's zarr store lacks and that read as values, as in
        `MultiProcSampler`.

    Attributes
    ----------
    statistics : Statistics
        Statistics that scaled the float variables: of the train samples, or those given.
    accounting : dict of str to int
        Windows of the blocks used, and of those without a sample, by outcome, as in
        `SamplePlan`; windows of other blocks are counted as ``unused``.

    Raises
    ------
    InvalidTypeError, InvalidValueError
        If an argument cannot work.
    EmptyPartError
        If there is no sample, or with `to_pred` none for training or testing.

    Examples
    --------
    >>> import xarray as xr
    >>> values = np.arange(40.0).reshape(10, 4)
    >>> cube = xr.Dataset({"a": (("time", "x"), values), "b": (("time", "x"), -values)})
    >>> data = XrDataset(cube, sample_size={"x": 4}, rand_chunk=False).get_datasets()
    >>> data["a"].shape
    (10, 4)
    """

    def __init__(
        self,
        ds: Any,
        chunk_indices: Sequence[int] | None = None,
        rand_chunk: bool = True,
        drop_nan: str | None = "auto",
        apply_mask: bool = True,
        drop_sample: bool = False,
        fill_method: str | Mapping[str, str | None] | None = None,
        const: float | None = None,
        filter_var: str | None = "filter_mask",
        patience: int = 500,
        block_size: SizesLike | None = None,
        sample_size: SizesLike | None = None,
        overlap: SizesLike | float | None = None,
        callback: Callback | None = None,
        num_chunks: int | None = None,
        to_pred: str | Iterable[str] | None = None,
        scale_fn: str | None = "standardize",
        *,
        features: str | Iterable[str] | None = None,
        data_split: float = 0.8,
        seed: int = 42,
        statistics: Any = None,
        missing_chunks: str = "warn",
    ) -> None:
        """Check every argument, then read the blocks."""
        check_flags({"rand_chunk": rand_chunk})
        check_whole("patience", patience, 1)
        if num_chunks is not None:
            check_whole("num_chunks", num_chunks, 1)
        parts = Parts(
            block_size=block_size,
            data_split=data_split,
            splits_unlabelled=to_pred is not None,
        )
        self._cube = sample_cube(
            ds,
            parts,
            drop_nan=drop_nan,
            apply_mask=apply_mask,
            drop_sample=drop_sample,
            fill_method=fill_method,
            const=const,
            filter_var=filter_var,
            sample_size=sample_size,
            overlap=overlap,
            callback=callback,
            to_pred=to_pred,
            scale_fn=scale_fn,
            features=features,
            seed=seed,
            statistics=statistics,
            missing_chunks=missing_chunks,
        )
        blocks = parts.blocks(self._cube.ds, self._cube.tiled.bound)
        ids = _block_ids(blocks, chunk_indices, rand_chunk, self._cube.recipe.seed)
        reader, recipe = BlockReader(self._cube, blocks), self._cube.recipe
        read = reader.read(ids, num_chunks, patience)
        check_targets(recipe, read.samples, self._cube.ds)
        self._labels, self.accounting = read.labels, reader.accounting
        self.statistics = self._statistics_of(read.samples)
        schema = schema_of(read.samples)
        scaling = scaling_of_samples(self.statistics, schema, recipe, self._cube.ds)
        self._samples = scale_samples(recipe, read.samples, scaling, read.origins)
        warn_of_nothing_to_fill(recipe, self.accounting)

    def _summary(self) -> Summary:
        """Return how samples were cut, and what became of all windows."""
        nbytes = sum(values.nbytes for values in self._samples.values())
        return Summary(
            f"{counted(len(self._labels), 'sample')} in memory, {bytes_text(nbytes)}",
            self._cube.facts,
            {"Windows": outcome_table(self.accounting, PARTS), "Statistics": self.statistics},
        )

    def _statistics_of(self, samples: Arrays) -> Statistics:
        """Return the statistics to scale by: those given, else of the train samples."""
        recipe = self._cube.recipe
        scaled = recipe.scaled_variables({name: v.dtype for name, v in samples.items()})
        if (given := self._cube.given) is not None:
            return select_statistics(given, scaled)
        train = self._labels == PARTS["train"]
        if recipe.scale_fn and scaled and not train.any():
            raise EmptyPartError(
                "the blocks used hold no train sample, so there are no statistics for "
                f"scale_fn={recipe.scale_fn!r}; use more blocks (num_chunks, chunk_indices), or "
                "give statistics= or scale_fn=None"
            )
        return train_statistics(recipe, {name: v[train] for name, v in samples.items()})

    def get_datasets(self) -> dict[str, NDArray[Any]] | tuple[Pair, Pair]:
        """Return the samples.

        Returns
        -------
        dict of str to ndarray, or tuple of pairs
            Without `to_pred` all samples, ``{variable: (samples, *window)}``, and their part as
            ``split`` (1 train, 0 test, 2 val) if the cube has a label. With `to_pred`
            ``((X_train, y_train), (X_test, y_test))``, variables stacked as channels after the
            sample axis: ``(samples, channels, *window)``; samples of a validation part are in
            the dict only.
        """
        recipe = self._cube.recipe
        if not recipe.targets:
            # A cube that is not split has a label without dims.
            label = self._cube.ds[self._cube.tiled.label]
            return self._samples | ({"split": self._labels} if label.ndim else {})
        features = recipe.features or [n for n in self._samples if n not in recipe.targets]
        if not features:
            raise InvalidValueError(
                f"to_pred={list(recipe.targets)} leaves no variable to predict from; name fewer"
            )
        dates = [n for n in (*features, *recipe.targets) if self._samples[n].dtype.kind == "M"]
        if dates:
            raise InvalidTypeError(
                f"features and targets must be numbers or booleans, got dates {dates}; choose "
                "others by features= and to_pred=, or leave them out with ds.drop_vars"
            )
        x, y = (
            np.stack([self._samples[name] for name in names], axis=1)
            for names in (features, recipe.targets)
        )
        train, test = (self._labels == PARTS[part] for part in ("train", "test"))
        return (x[train], y[train]), (x[test], y[test])


def _block_ids(blocks: Grid, chosen: Sequence[int] | None, at_random: bool, seed: int) -> list[int]:
    """Return the ids of the blocks to use, in their order."""
    if chosen is None:
        return list(map(int, block_order(blocks, at_random, seed)))
    unknown = [id for id in chosen if not 0 <= id < len(blocks)]
    if unknown or not len(chosen):
        raise InvalidValueError(
            f"chunk_indices={list(chosen)!r} names {unknown or 'no'} blocks; the cube has "
            f"{len(blocks)}, 0 to {len(blocks) - 1}"
        )
    if len({*chosen}) < len(chosen):
        raise InvalidValueError(f"chunk_indices must name each block once, got {list(chosen)!r}")
    return [int(id) for id in chosen]
