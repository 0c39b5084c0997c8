"""Targets at a lead time: y is cut from other cells of a cube than X.

A sample is then a pair of windows, a fixed number of cells apart. Both must lie in the same part
and pass the same rules for masks and gaps. So no target comes from another part, and the counts
of dropped windows still add up.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from ml4cube.core.errors import InvalidTypeError, InvalidValueError, caller_level, check_whole
from ml4cube.core.grid import Block, Grid, SizesLike, parse_pairs
from ml4cube.core.sample_spec import SampleSpec, parse_names
from ml4cube.core.split_plan import PARTS
from ml4cube.core.statistics import Statistics
from ml4cube.core.time_steps import TimeSteps, WindowsOverTime
from ml4cube.cube.absent_chunks import ABSENT
from ml4cube.cube.reader import CubeReader, Slices
from ml4cube.sampling.extractor import OUTCOMES, Arrays, Extractor
from ml4cube.sampling.request import Sampling, axis_values, check_known

if TYPE_CHECKING:
    import xarray as xr

_TARGET = "@target"


def target_name(name: str) -> str:
    """Return the name of a variable as a target at a lead time."""
    return name + _TARGET


def is_target(name: str) -> bool:
    """Return True if a name is that of a target at a lead time."""
    return name.endswith(_TARGET)


def base_name(name: str) -> str:
    """Return the variable behind a name, a target's or not."""
    return name.removesuffix(_TARGET)


class DimLead(NamedTuple):
    """Cells of inputs and targets along one dim."""

    # From the first cell of the inputs to the first cell of the targets.
    offset: int
    input_size: int
    target_size: int

    @property
    def reach(self) -> int:
        """Cells by which the targets extend past the end of the inputs."""
        return max(0, self.offset + self.target_size - self.input_size)


# By dim of the cube or of stored windows; empty if the targets are in the same cells as the inputs.
Lead = Mapping[str, DimLead]


@dataclass(frozen=True, kw_only=True)
class TargetOptions:
    """Arguments of `PTXrDataset` about targets."""

    to_pred: str | Sequence[str] | None
    target_offset: SizesLike | None
    target_size: SizesLike | None
    weights: Any

    def __post_init__(self) -> None:
        """Refuse a lead without targets."""
        if self.shifted and not self.targets:
            raise InvalidTypeError(
                "target_offset and target_size need to_pred; name the variables to predict"
            )

    @property
    def shifted(self) -> bool:
        """True if the targets lie elsewhere than the inputs."""
        return self.target_offset is not None or self.target_size is not None

    @cached_property
    def targets(self) -> tuple[str, ...]:
        """Variables of y."""
        return parse_names("to_pred", self.to_pred)

    @property
    def weights_variable(self) -> str | None:
        """The variable that holds the weights, if one does."""
        return self.weights if isinstance(self.weights, str) else None

    @property
    def scored(self) -> tuple[str, ...]:
        """Variables used by a loss: cut with the targets, and filled only on request."""
        weights = () if self.weights_variable is None else (self.weights_variable,)
        return tuple(dict.fromkeys((*self.targets, *weights)))

    def lead_of(self, inputs: Mapping[str, int], available: Mapping[str, int], where: str) -> Lead:
        """Return the lead for windows of inputs, by dim; pairs must fit into the available cells.

        `where` names in messages what has these cells.
        """
        offset = whole_cells("target_offset", self.target_offset, inputs, least=0)
        size = whole_cells("target_size", self.target_size, inputs, least=1)
        lead = {d: DimLead(offset.get(d, 0), n, size.get(d, n)) for d, n in inputs.items()}
        for dim, along in lead.items():
            if (span := along.input_size + along.reach) > available[dim]:
                raise InvalidValueError(
                    f"inputs and targets together span {span} cells along {dim!r}, and {where} has "
                    f"{available[dim]}; choose a smaller target_offset, target_size or sample_size"
                )
        return lead


def whole_cells(
    argument: str, given: SizesLike | None, dims: Mapping[str, int], least: int
) -> dict[str, int]:
    """Return the cells by dim that a user gave."""
    pairs = {} if given is None else parse_pairs(argument, given, tuple(dims))
    for dim, value in pairs.items():
        check_whole(f"{argument} along {dim!r}", value, least)
    return {dim: int(value) for dim, value in pairs.items()}


def warn_of_uneven_steps(lead: Lead, axes: Mapping[str, xr.Variable]) -> None:
    """Warn if a lead, which counts cells, is not the same time everywhere, or lies in the past."""
    for dim, along in lead.items():
        steps = TimeSteps.of(dim, axes[dim].values) if along.offset and dim in axes else None
        if steps is None or steps.go_forward:
            continue
        warnings.warn(
            f"target_offset counts cells, but {steps}. Targets there lie at another lead time; "
            f"sort the cube along {dim!r} and reindex it to even steps, whose gaps are then "
            "dropped",
            stacklevel=caller_level(),
        )


def with_lead(sampling: Sampling, options: TargetOptions) -> Sampling:
    """Return a sampling whose targets lie elsewhere than its inputs."""
    spec, extractor, targets = sampling.spec, sampling.extractor, options.scored
    check_known("to_pred", options.targets, spec.variables, sampling.left_out)
    check_known("weights", targets, spec.variables)  # The variables of y are known by now.
    if extractor.callback is not None:
        raise InvalidTypeError(
            "callback cannot be combined with target_offset or target_size, because it gets the "
            "inputs without their targets; compute the variable on the cube, or use augment="
        )
    size, shape = (dict(zip(spec.dims, cells, strict=True)) for cells in (spec.size, spec.shape))
    lead = options.lead_of(size, shape, "the cube")
    warn_of_uneven_steps(lead, {d: sampling.ds[d].variable for d in lead if d in sampling.ds})
    inputs = _InputSpec(**vars(spec), reach=tuple(along.reach for along in lead.values()))
    target_size = tuple(along.target_size for along in lead.values())
    # Targets have the stride of the inputs. Negative where cells lie between windows of targets.
    target_overlap = tuple(n - stride for n, stride in zip(target_size, spec.stride, strict=True))
    target_spec = replace(
        spec,
        size=target_size,
        overlap=target_overlap,
        variables=targets,
        window_dims=(),
        array_dims=(),
        fill_method=None,  # Filled targets would be scored like measured ones.
        const=None,
    )
    counts = dict(zip(spec.dims, inputs.windows.counts, strict=True))
    tile = dict(zip(spec.dims, extractor.tiles.tile, strict=True))
    # Windows without a whole target in the cube are left out.
    tiles = Grid.blocks(counts, {dim: min(n, counts[dim]) for dim, n in tile.items()})
    extractor = replace(extractor, tiles=tiles)
    target = replace(extractor, spec=target_spec, used_blocks=None)
    pairs = LeadExtractor(**{**vars(extractor), "spec": inputs}, target=target)
    needed = [*targets, extractor.label, *([spec.filter_var] if spec.filter_var else [])]
    needed += [name for name in sampling.reader.sources if name == ABSENT]
    target_reader = sampling.reader.only(needed)
    reader = LeadReader(**vars(sampling.reader), target_reader=target_reader, lead=lead)
    given = sampling.given
    if given is not None:  # The plan asks for statistics of every variable.
        of_targets = {target_name(name): given[name] for name in targets if name in given}
        given = Statistics({**given, **of_targets}, given.part)
    windows = WindowsOverTime.of(inputs.window_starts, axis_values(sampling.ds, spec.dims))
    return replace(
        sampling,
        reader=reader,
        extractor=pairs,
        given=given,
        over_missing_dates=windows.over_missing_dates,
    )


@dataclass(frozen=True)
class _InputSpec(SampleSpec):
    """A spec whose windows have their targets inside the cube; all others are `edge`."""

    # Cells by which the targets extend past the end of the inputs, by dim.
    reach: tuple[int, ...] = ()

    @property
    def windows(self) -> Grid:
        """The grid of windows whose targets lie inside the cube."""
        shape = tuple(n - reach for n, reach in zip(self.shape, self.reach, strict=True))
        return Grid(self.dims, shape, self.size, self.stride, ragged=False)


@dataclass(frozen=True, kw_only=True)
class LeadReader(CubeReader):
    """Reader of the cells of inputs and of their targets."""

    target_reader: CubeReader
    lead: Lead
    # Whether each of the two readers can read only one region.
    is_narrowed: bool = False

    @property
    def input_reader(self) -> CubeReader:
        """Reader of inputs alone."""
        return CubeReader(self.dims, self.shape, self.sources)

    def read(self, slices: Slices) -> Arrays:
        """Read the cells of some inputs and of their targets; cells of both are read once."""
        target_slices = self._target_slices(slices)
        union = {
            dim: slice(min(s.start, target_slices[dim].start), max(s.stop, target_slices[dim].stop))
            for dim, s in slices.items()
        }
        read_once: Arrays = {}
        if not self.is_narrowed and _overlap(slices, target_slices):
            shared = [name for name in self.target_reader.sources if name in self.sources]
            read_once = self.target_reader.only(shared).read(union)

        def cells_of(reader: CubeReader, region: Slices) -> Arrays:
            cells = reader.only([n for n in reader.sources if n not in read_once]).read(region)
            return cells | {n: values[_within(region, union)] for n, values in read_once.items()}

        targets = cells_of(self.target_reader, target_slices)
        inputs = cells_of(self.input_reader, slices)
        return inputs | {target_name(name): cells for name, cells in targets.items()}

    def narrow(self, slices: Slices) -> Self:
        """Return a reader of one region of inputs and of their targets."""
        targets = self.target_reader.narrow(self._target_slices(slices))
        return replace(super().narrow(slices), target_reader=targets, is_narrowed=True)

    def only(self, names: Iterable[str]) -> Self:
        """Return a reader of some variables."""
        inputs, targets = _separate_names(names)
        return replace(super().only(inputs), target_reader=self.target_reader.only(targets))

    def _target_slices(self, inputs: Slices) -> dict[str, slice]:
        """Return the cells of targets that belong to cells of inputs, cut at the cube's end."""
        result = {}
        for (dim, along), n in zip(self.lead.items(), self.shape, strict=True):
            start = min(inputs[dim].start + along.offset, n)
            start_of_last_input = inputs[dim].stop - along.input_size
            stop = start_of_last_input + along.offset + along.target_size
            result[dim] = slice(start, max(start, min(stop, n)))
        return result


def _overlap(a: Slices, b: Slices) -> bool:
    return all(max(s.start, b[d].start) < min(s.stop, b[d].stop) for d, s in a.items())


def _within(part: Slices, whole: Slices) -> tuple[slice, ...]:
    """Return the slices of a part in the array of the whole."""
    return tuple(slice(s.start - whole[d].start, s.stop - whole[d].start) for d, s in part.items())


@dataclass(frozen=True, kw_only=True)
class LeadExtractor(Extractor):
    """Extractor of pairs of windows, inputs and targets; picklable."""

    # The extractor of the targets.
    target: Extractor

    @property
    def sample_variables(self) -> tuple[str, ...]:
        """Variables of the reader that `samples` needs."""
        return (*super().sample_variables, *map(target_name, self.target.sample_variables))

    def outcome_variables(self, dtypes: Mapping[str, np.dtype[Any]]) -> tuple[str, ...]:
        """Variables of the reader that `outcomes` needs."""
        of_targets = self.target.outcome_variables(dtypes)
        return (*super().outcome_variables(dtypes), *map(target_name, of_targets))

    def schema(self, dtypes: Mapping[str, np.dtype[Any]]) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return window shape and dtype of samples without making one."""
        targets = self.target.schema(dtypes)
        return super().schema(dtypes) | {target_name(n): entry for n, entry in targets.items()}

    def only(self, names: Iterable[str]) -> LeadExtractor:
        """Return an extractor of some variables."""
        inputs, targets = _separate_names(names)
        return replace(self, spec=super().only(inputs).spec, target=self.target.only(targets))

    def outcomes(self, cells: Arrays, tile: Block) -> NDArray[np.uint8]:
        """Classify pairs of windows; both must be samples of the same part."""
        input_cells, target_cells = _separate(cells)
        inputs = super().outcomes(input_cells, tile)
        targets = self.target.outcomes(target_cells, tile)
        # A pair is dropped for the reason of its inputs, else for that of its targets.
        pairs = np.where(inputs == targets, inputs, OUTCOMES.index("straddle"))
        pairs = np.where(targets >= len(PARTS), targets, pairs)
        return np.where(inputs >= len(PARTS), inputs, pairs).astype(np.uint8)

    def samples(self, cells: Arrays, tile: Block, keep: NDArray[np.intp]) -> Arrays:
        """Make samples of inputs and targets."""
        input_cells, target_cells = _separate(cells)
        inputs = super().samples(input_cells, tile, keep)
        targets = self.target.samples(target_cells, tile, keep)
        return inputs | {target_name(name): values for name, values in targets.items()}

    def train_cell_statistics(self, reader: CubeReader, block: Block) -> Statistics:
        """Return the statistics of the train cells of a block, of inputs alone."""
        assert isinstance(reader, LeadReader)
        return super().train_cell_statistics(reader.input_reader, block)


def _separate_names(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """Return the names of inputs, and those of targets without their mark."""
    names = list(names)
    return [n for n in names if not is_target(n)], [base_name(n) for n in names if is_target(n)]


def _separate(cells: Arrays) -> tuple[Arrays, Arrays]:
    """Return the cells of inputs, and those of targets by the names that they have in the cube."""
    inputs, targets = _separate_names(cells)
    return {n: cells[n] for n in inputs}, {n: cells[target_name(n)] for n in targets}
