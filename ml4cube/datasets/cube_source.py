"""Samples cut from a cube as they are read: the source behind a lazy data set."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidValueError, RunError, check_choice, check_whole
from ml4cube.core.sample_spec import SAMPLE_DIM
from ml4cube.core.shard import Ints
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import scale_values
from ml4cube.cube.variables import split_label
from ml4cube.datasets.callback_identity import name_of
from ml4cube.datasets.engines import local_engine
from ml4cube.datasets.extractor import Arrays, Extractor
from ml4cube.datasets.lead import (
    Lead,
    LeadArguments,
    LeadExtractor,
    LeadReader,
    of_inputs,
    target_name,
    with_lead,
    without_targets,
)
from ml4cube.datasets.provenance import provenance
from ml4cube.datasets.sample_plan import SamplePlan, make_plan
from ml4cube.datasets.sampling import Sampling
from ml4cube.datasets.shard_layout import scaling_of
from ml4cube.datasets.store import StoreMetadata

if TYPE_CHECKING:
    import xarray as xr

logger = logging.getLogger(__name__)

#: What `PTXrDataset` takes for cubes besides sizes, with the meaning of `MultiProcSampler`.
CUTTING_OPTIONS = (
    "apply_mask",
    "drop_sample",
    "fill_method",
    "const",
    "filter_var",
    "drop_nan",
    "scale_fn",
    "callback",
    "data_split",
    "val_split",
    "data_fraq",
    "rand_chunk",
    "seed",
    "nproc",
)


class CubeSource:
    """Samples cut from a cube as they are read: those that `MultiProcSampler` would write.

    A chunk is a tile of neighbouring windows, whose cells are read once whatever the overlap.

    Parameters
    ----------
    sampling : Sampling
        How the cube is read.
    extractor : Extractor
        Makes samples of tiles.
    plan : SamplePlan
        What every tile gives.
    part : {"train", "test", "val"}
        Whose samples.
    """

    def __init__(
        self, sampling: Sampling, extractor: Extractor, plan: SamplePlan, part: str
    ) -> None:
        self._reader, self._extractor, self._label = sampling.reader, extractor, PARTS[part]
        self._scaling = scaling_of(plan.statistics, extractor.spec.scale_fn)
        reader = sampling.reader
        self.lead: Lead | None = reader.lead if isinstance(reader, LeadReader) else None
        self._axes = {d: sampling.ds[d].variable for d in extractor.spec.dims if d in sampling.ds}
        self.slow = "://" in str(sampling.ds.encoding.get("source", ""))
        self.schema = plan.schema
        self.dims = {name: _window_dims(extractor, name, w) for name, (w, _) in self.schema.items()}
        self.counts = plan.tile_samples[:, plan.parts.index(part)]
        self._starts = np.concatenate([[0], np.cumsum(self.counts)])
        # which windows of a tile are samples, one bit each, from the first reading on
        self._kept: dict[int, NDArray[np.uint8]] = {}

    def read(self, chunk: int, out: Mapping[str, NDArray[Any]]) -> None:
        """Write the samples of a tile into one array per variable.

        Parameters
        ----------
        chunk : int
            Which tile.
        out : mapping of str to ndarray, shape (samples, ...)
            Where to write; values are cast.
        """
        extractor, tile = self._extractor, self._extractor.tiles.block(chunk)
        if chunk in self._kept:
            # only the first reading needs the other variables, to look for gaps
            extractor = extractor.only(out)
            cells = self._reader.only(extractor.reads).read(extractor.cells_of(tile))
        else:
            cells = self._look(chunk)
        samples = extractor.samples(cells, tile, self._keep(chunk))
        for name, target in out.items():
            values = samples[name]
            if name in self._scaling:
                values = scale_values(values, *self._scaling[name], values.dtype)
            target[...] = values

    def _keep(self, chunk: int) -> NDArray[np.intp]:
        """Which windows of a tile are samples."""
        if chunk not in self._kept:
            self._look(chunk)
        return np.flatnonzero(np.unpackbits(self._kept[chunk]))

    def _look(self, chunk: int) -> Arrays:
        """Read all cells of a tile, and note which of its windows are samples."""
        tile = self._extractor.tiles.block(chunk)
        cells = self._reader.read(self._extractor.cells_of(tile))
        keep = self._extractor.outcomes(cells, tile) == self._label
        if keep.sum() != self.counts[chunk]:
            raise RunError(
                f"{self.describe(chunk)} gave {self.counts[chunk]} samples when they were counted "
                f"and {keep.sum()} now: the cube changed meanwhile; open it again"
            )
        self._kept[chunk] = np.packbits(keep)
        return cells

    def describe(self, chunk: int) -> str:
        """Name a tile for an error message.

        Parameters
        ----------
        chunk : int
            Which tile.

        Returns
        -------
        str
            Its cells.
        """
        cells = self._extractor.cells_of(self._extractor.tiles.block(chunk))
        return "block " + ", ".join(f"{dim} {s.start}:{s.stop}" for dim, s in cells.items())

    def coords(self, samples: Ints) -> Arrays:
        """Find out where samples come from; reads their tiles if they were never read.

        Parameters
        ----------
        samples : ndarray of int64
            Which samples.

        Returns
        -------
        dict of str to ndarray
            Origin along every cube dim, as value and as index, as a store has them.
        """
        import xarray as xr

        result = self._origins(samples)
        attrs = {axis.name: axis.attrs for axis in self._extractor.axes}
        encoded = {
            name: xr.Variable(SAMPLE_DIM, values, attrs.get(name, {}))
            for name, values in result.items()
        }
        decoded = xr.decode_cf(xr.Dataset(encoded), decode_timedelta=False)
        return {str(name): np.asarray(v.values) for name, v in decoded.variables.items()}

    def _origins(self, samples: Ints) -> Arrays:
        """Where samples begin, as the extractor gives it."""
        chunks = np.searchsorted(self._starts, samples, side="right") - 1
        ascending = np.argsort(samples, kind="stable")
        result: Arrays = {}
        for chunk in np.unique(chunks).tolist():
            here = ascending[chunks[ascending] == chunk]
            keep = self._keep(chunk)[samples[here] - self._starts[chunk]]
            origins = self._extractor.origins(self._extractor.tiles.block(chunk), keep)
            for name, values in origins.items():
                result.setdefault(name, np.empty(len(samples), values.dtype))[here] = values
        return result

    def places(self, samples: Ints, dims: Iterable[str]) -> dict[str, Ints]:
        """Find out where samples begin; reads their tiles if they were never read.

        Parameters
        ----------
        samples : ndarray of int64
            Which samples.
        dims : iterable of str
            Dims of the cube.

        Returns
        -------
        dict of str to ndarray of int64
            Index of the first cell, by dim.
        """
        origins = self._origins(samples)
        return {dim: origins[f"{dim}_index"].astype(np.int64) for dim in dims}

    def axes(self) -> dict[str, xr.Variable]:
        """Coordinate values along each cube dim that has some.

        Returns
        -------
        dict of str to Variable, dims (dim,)
            As the cube has them.
        """
        return dict(self._axes)


def _window_dims(extractor: Extractor, name: str, window: tuple[int, ...]) -> tuple[str, ...]:
    """Dims of a sample's window; a callback may make windows that no dim of the cube has."""
    spec = extractor.spec
    if isinstance(extractor, LeadExtractor) and name.endswith(target_name("")):
        assert extractor.target is not None
        spec = extractor.target.spec
    if spec.window_shape == window:
        return spec.window_dims
    return tuple(f"{name}_{axis}" for axis in range(1, len(window) + 1))


def cut_cube(
    ds: xr.Dataset,
    part: str,
    sizes: Mapping[str, Any],
    lead: LeadArguments | None,
    options: dict[str, Any],
) -> tuple[CubeSource, StoreMetadata]:
    """Count the windows of a cube, reading it once; unless it has a split, all are training."""
    check_choice("part", part, PARTS)
    unsplit = options.get("data_split", 1.0) == 1.0 and not options.get("val_split")
    if part != "train" and unsplit and split_label(ds) is None:
        raise InvalidValueError(
            f"part={part!r}, but the cube has no split, so all its windows are training samples; "
            "label it first (ml4cube.splits), or give data_split="
        )
    nproc = options.pop("nproc", 1)
    check_whole("nproc", nproc, 1)
    sampling = whole = Sampling.of(ds, **sizes, **{"data_split": 1.0, **options})
    if lead is not None:
        sampling = with_lead(whole, lead)
    # whether other parts have samples is nothing to whom asks for this one
    counted = replace(sampling, recipe={"plan": {"fractions": {part: 1.0}}})
    with local_engine(int(nproc)) as engine:
        extractor, plan = make_plan(counted, engine, PARTS)
    logger.info("samples cut as they are read:\n%s", plan)
    settings = {"seed": int(extractor.seed), "callback": name_of(extractor.callback)}
    metadata = StoreMetadata(
        part=part,
        spec=whole.spec,
        statistics=without_targets(plan.statistics),
        accounting=plan.accounting,
        split=whole.recipe,
        provenance=provenance(whole, settings, ""),
        variables=whole.spec.variables if lead is not None else tuple(plan.schema),
        fill=extractor.fill,
    )
    return CubeSource(sampling, extractor, of_inputs(plan), part), metadata
