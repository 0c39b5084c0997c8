"""Targets at a lead time: X is cut from one place of a cube and y from another.

A sample is then two windows, the inputs' and the targets', a fixed number of cells apart. Both
must lie in the same part and pass the same rules for masks and gaps; so no target ever comes from
another part, and the counts of dropped windows still add up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.core.grid import Block, Grid, SizesLike, parse_pairs
from ml4cube.core.sample_spec import SampleSpec
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import Statistics
from ml4cube.cube.reader import CubeReader, Slices
from ml4cube.sampling.extractor import OUTCOMES, Arrays, Extractor
from ml4cube.sampling.request import Sampling

_TARGET = "@target"


def target_name(name: str) -> str:
    """Name a variable as a target that lies elsewhere than the inputs."""
    return name + _TARGET


@dataclass(frozen=True)
class Lead:
    """Where targets lie, seen from the inputs, and how large they are."""

    # Make one with `Lead.parse`.

    dims: tuple[str, ...]
    # Cells from the first cell of the inputs to the first cell of the targets.
    offset: tuple[int, ...]
    # Cells of the inputs' window, and of the targets'.
    input_size: tuple[int, ...]
    size: tuple[int, ...]

    @classmethod
    def parse(
        cls, offset: SizesLike | None, size: SizesLike | None, window: Mapping[str, int]
    ) -> Lead:
        """Make a lead from what a user wrote."""
        cells = _whole("target_offset", offset, window, least=0)
        sizes = _whole("target_size", size, window, least=1)
        return cls(
            tuple(window),
            tuple(cells.get(dim, 0) for dim in window),
            tuple(window.values()),
            tuple(sizes.get(dim, n) for dim, n in window.items()),
        )

    @property
    def reach(self) -> tuple[int, ...]:
        """Cells by which the targets pass the end of the inputs."""
        parts = zip(self.offset, self.size, self.input_size, strict=True)
        return tuple(max(0, k + n - window) for k, n, window in parts)

    def targets_of(self, inputs: Slices, shape: tuple[int, ...]) -> dict[str, slice]:
        """Find the cells of the targets that belong to the cells of some inputs."""
        result = {}
        for dim, k, old, new, n in zip(
            self.dims, self.offset, self.input_size, self.size, shape, strict=True
        ):
            start = min(inputs[dim].start + k, n)
            result[dim] = slice(start, max(start, min(inputs[dim].stop + k + new - old, n)))
        return result


@dataclass(frozen=True)
class LeadArguments:
    """What a user wrote about targets at a lead time."""

    targets: tuple[str, ...]
    offset: SizesLike | None
    size: SizesLike | None
    # Variable that weighs the cells of the targets, so that it is cut where they are.
    weights: str | None = None

    def __post_init__(self) -> None:
        """Refuse a lead of nothing."""
        if not self.targets:
            raise InvalidTypeError(
                "target_offset and target_size need to_pred; name what to predict"
            )

    def elsewhere(self, variables: Iterable[str]) -> tuple[str, ...]:
        """Say which variables are cut where the targets lie."""
        wanted = dict.fromkeys(self.targets, "to_pred")
        if self.weights is not None:
            wanted.setdefault(self.weights, "weights")
        known = list(variables)
        for name, argument in wanted.items():
            if name not in known:
                raise InvalidValueError(
                    f"{argument} names {name!r}, there are {known}; choose of these"
                )
        return tuple(wanted)


def _whole(
    argument: str, given: SizesLike | None, dims: Mapping[str, int], least: int
) -> dict[str, int]:
    pairs = {} if given is None else parse_pairs(argument, given, tuple(dims))
    for dim, value in pairs.items():
        if isinstance(value, bool) or not isinstance(value, int | np.integer):
            raise InvalidTypeError(
                f"{argument}={given!r}: {value!r} along {dim!r} is a {type(value).__name__}; give "
                "a whole number of cells"
            )
        if value < least:
            raise InvalidValueError(
                f"{argument}={given!r}: {value} along {dim!r}; give at least {least}, counted "
                "from the first cell of the inputs"
            )
    return {dim: int(value) for dim, value in pairs.items()}


@dataclass(frozen=True)
class _InputSpec(SampleSpec):
    """A spec whose windows leave room for the targets; those that do not are `edge`."""

    reach: tuple[int, ...] = ()

    @property
    def windows(self) -> Grid:
        """The grid of windows whose targets lie inside the cube."""
        rows = zip(self.dims, self.shape, self.reach, strict=True)
        size = dict(zip(self.dims, self.size, strict=True))
        overlap = dict(zip(self.dims, self.overlap, strict=True))
        return Grid.windows({dim: n - reach for dim, n, reach in rows}, size, overlap)


@dataclass(frozen=True)
class LeadReader(CubeReader):
    """Reads the cells of inputs, and beside them those of their targets."""

    far: CubeReader = CubeReader((), (), {})  # noqa: RUF009 (frozen)
    lead: Lead = Lead((), (), (), ())
    # Whether the readers know no more than one region each.
    narrowed: bool = False

    @property
    def near(self) -> CubeReader:
        """Reads inputs alone."""
        return CubeReader(self.dims, self.shape, self.sources)

    def read(self, slices: Slices) -> Arrays:
        """Read the cells of some inputs and of their targets; cells of both are read once."""
        beyond = self.lead.targets_of(slices, self.shape)
        shared = () if self.narrowed or not _meet(slices, beyond) else self.far.variables
        both = [name for name in shared if name in self.sources]
        union = {
            dim: slice(min(s.start, beyond[dim].start), max(s.stop, beyond[dim].stop))
            for dim, s in slices.items()
        }
        whole = self.far.only(both).read(union)
        near = self.near.only([n for n in self.sources if n not in whole]).read(slices)
        near |= {name: cells[_inside(slices, union)] for name, cells in whole.items()}
        far = self.far.only([n for n in self.far.sources if n not in whole]).read(beyond)
        far |= {name: cells[_inside(beyond, union)] for name, cells in whole.items()}
        return near | {target_name(name): cells for name, cells in far.items()}

    def narrow(self, slices: Slices) -> LeadReader:
        """Return a reader of one region of inputs and of their targets."""
        far = self.far.narrow(self.lead.targets_of(slices, self.shape))
        sources = self.near.narrow(slices).sources
        return replace(self, sources=sources, far=far, narrowed=True)

    def only(self, names: Iterable[str]) -> LeadReader:
        """Return a reader of some variables."""
        names = list(names)
        far = [name.removesuffix(_TARGET) for name in names if name.endswith(_TARGET)]
        sources = self.near.only([n for n in names if not n.endswith(_TARGET)]).sources
        return replace(self, sources=sources, far=self.far.only(far))


def _meet(a: Slices, b: Slices) -> bool:
    return all(max(s.start, b[d].start) < min(s.stop, b[d].stop) for d, s in a.items())


def _inside(part: Slices, whole: Slices) -> tuple[slice, ...]:
    return tuple(slice(s.start - whole[d].start, s.stop - whole[d].start) for d, s in part.items())


@dataclass(frozen=True)
class _TargetExtractor(Extractor):
    """Decides about targets, whose windows lie `lead` beyond the tile's."""

    lead: Lead = Lead((), (), (), ())
    inputs: SampleSpec | None = None

    def cells_of(self, tile: Block) -> dict[str, slice]:
        """Cells that the targets of a tile's windows cover."""
        assert self.inputs is not None
        return {
            dim: slice(first * stride + k, (last - 1) * stride + k + size)
            for dim, first, last, stride, k, size in zip(
                self.lead.dims,
                tile.start,
                tile.stop,
                self.inputs.stride,
                self.lead.offset,
                self.lead.size,
                strict=True,
            )
        }


@dataclass(frozen=True)
class LeadExtractor(Extractor):
    """Decides about pairs of windows and makes samples of both; picklable."""

    # The same for the targets alone.
    target: Extractor | None = None

    @property
    def _targets(self) -> Extractor:
        assert self.target is not None
        return self.target

    @property
    def reads(self) -> tuple[str, ...]:
        """Variables of the reader that `samples` needs."""
        return (*super().reads, *map(target_name, self._targets.reads))

    def rules(self, dtypes: Mapping[str, np.dtype[Any]]) -> tuple[str, ...]:
        """Variables of the reader that `outcomes` needs."""
        return (*super().rules(dtypes), *map(target_name, self._targets.rules(dtypes)))

    def schema(self, dtypes: Mapping[str, np.dtype[Any]]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Tell window shape and dtype of samples without making one."""
        far = self._targets.schema(dtypes)
        return super().schema(dtypes) | {target_name(name): one for name, one in far.items()}

    def only(self, names: Iterable[str]) -> LeadExtractor:
        """Return an extractor of some variables."""
        names = list(names)
        far = [name.removesuffix(_TARGET) for name in names if name.endswith(_TARGET)]
        near = [name for name in names if not name.endswith(_TARGET)]
        return replace(self, spec=super().only(near).spec, target=self._targets.only(far))

    def outcomes(self, cells: Arrays, tile: Block) -> NDArray[np.uint8]:
        """Decide what becomes of each window: both halves must be samples of one part."""
        near, far = _apart(cells)
        inputs = super().outcomes(near, tile)
        targets = self._targets.outcomes(far, tile)
        pairs = np.where(inputs == targets, inputs, OUTCOMES.index("straddle"))
        pairs = np.where(targets >= len(PARTS), targets, pairs)
        return np.where(inputs >= len(PARTS), inputs, pairs).astype(np.uint8)

    def samples(self, cells: Arrays, tile: Block, keep: NDArray[np.intp]) -> Arrays:
        """Make samples of inputs and targets."""
        near, far = _apart(cells)
        targets = self._targets.samples(far, tile, keep)
        made = super().samples(near, tile, keep)
        return made | {target_name(name): values for name, values in targets.items()}

    def train_cells(self, reader: CubeReader, block: Block) -> Statistics:
        """Sum up the raw train cells of a box, as for inputs alone."""
        near = reader.near if isinstance(reader, LeadReader) else reader
        return super().train_cells(near, block)


def _apart(cells: Arrays) -> tuple[Arrays, Arrays]:
    near = {name: values for name, values in cells.items() if not name.endswith(_TARGET)}
    far = {n.removesuffix(_TARGET): v for n, v in cells.items() if n.endswith(_TARGET)}
    return near, far


def with_lead(sampling: Sampling, wanted: LeadArguments) -> Sampling:
    """Let the targets of a sampling lie elsewhere than its inputs."""
    spec, extractor = sampling.spec, sampling.extractor
    targets = wanted.elsewhere(spec.variables)
    if extractor.callback is not None:
        raise InvalidTypeError(
            "callback cannot be combined with target_offset or target_size, since it gets the "
            "inputs without their targets; compute the variable on the cube, or change batches "
            "with augment="
        )
    lead = Lead.parse(wanted.offset, wanted.size, dict(zip(spec.dims, spec.size, strict=True)))
    for dim, n, size, reach in zip(spec.dims, spec.shape, spec.size, lead.reach, strict=True):
        if size + reach > n:
            raise InvalidValueError(
                f"inputs and targets together span {size + reach} cells along {dim!r}, the cube "
                f"has {n}; choose a smaller target_offset, target_size or sample_size"
            )
    fields = {name: getattr(spec, name) for name in SampleSpec.__dataclass_fields__}
    inputs = _InputSpec(**fields, reach=lead.reach)
    # windows of targets lie as far apart as those of inputs, so they may leave cells between them
    apart = tuple(n - stride for n, stride in zip(lead.size, spec.stride, strict=True))
    far_spec = replace(
        spec,
        size=lead.size,
        overlap=apart,
        variables=targets,
        window_dims=(),
        array_dims=(),
        fill_method=None,  # they would be scored as if they had been measured
        const=None,
    )
    counts = dict(zip(spec.dims, inputs.windows.counts, strict=True))
    tile = dict(zip(spec.dims, extractor.tiles.tile, strict=True))
    tiles = Grid.blocks(counts, {dim: min(n, counts[dim]) for dim, n in tile.items()})
    shared: dict[str, Any] = {
        "axes": extractor.axes,
        "label": extractor.label,
        "seed": extractor.seed,
    }
    target = _TargetExtractor(spec=far_spec, tiles=tiles, lead=lead, inputs=inputs, **shared)
    pairs = LeadExtractor(
        spec=inputs, tiles=tiles, choice=extractor.choice, target=target, **shared
    )
    needed = [*targets, extractor.label, *([spec.filter_var] if spec.filter_var else [])]
    cube = sampling.reader
    reader = LeadReader(cube.dims, cube.shape, cube.sources, far=cube.only(needed), lead=lead)
    given = sampling.given
    if given is not None:
        far = {target_name(name): given[name] for name in targets if name in given}
        given = Statistics({**given, **far}, given.part)
    return replace(sampling, reader=reader, extractor=pairs, given=given)


def without_targets(statistics: Statistics) -> Statistics:
    """Drop the entries of targets, so that those of the inputs scale both alike."""
    known = {name: statistics[name] for name in statistics if not name.endswith(_TARGET)}
    return Statistics(known, statistics.part)
