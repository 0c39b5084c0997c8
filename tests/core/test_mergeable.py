"""What is summed up: whatever the parts and their grouping, the sums are those of all cells."""

from __future__ import annotations

import importlib
import itertools
import pkgutil
import warnings
from functools import reduce

import numpy as np
import pytest
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st

import ml4cube
from ml4cube.core.climatology import ClimatologySums, Cycle, Design
from ml4cube.core.sums.fields import FieldStatistics, Moments
from ml4cube.core.sums.mergeable import Mergeable
from ml4cube.core.sums.moments import VariableStatistics
from ml4cube.core.sums.pairs import PairSums
from ml4cube.core.sums.quantiles import Histogram
from ml4cube.evaluation import evaluate
from ml4cube.evaluation.sums.named_sums import NamedSums
from ml4cube.insights.sums import ValueSums

N = 48
STEPS = xr.date_range("2001-01-01", periods=N, freq="11D").values
DESIGNS = {
    name: Design.of("cycle", Cycle.of("cycle", name), STEPS)
    for name in ("month", "dayofyear", "31D")
}


def _field(cells, steps):
    labels = {"x": np.array(["a", "b", "c"])}
    histogram = Histogram.of(cells.T, 8)
    moments = Moments.of(cells, (0,))
    return FieldStatistics(*moments, ("x",), labels, histogram, "area")


def _scorecard(cells, steps):
    cells = np.nan_to_num(cells)
    time, dims = {"time": STEPS[steps]}, ("time", "x")
    truth = xr.DataArray(np.roll(cells, 1, axis=1), time, dims, "t")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return evaluate(truth.copy(data=cells), truth, by="x", progress=False).sums


def _values(cells, steps):
    """Each row as other cells of one time step of the same places."""
    return reduce(ValueSums.merge, [ValueSums.of(row[np.newaxis], None, 0) for row in cells])


#: How each kind of sums is made of cells (steps, 3) with gaps and of the positions of these steps.
MADE = {
    VariableStatistics: lambda cells, steps: VariableStatistics.of(cells),
    Moments: lambda cells, steps: Moments.of(cells, (0,), None, 1.0 + steps[:, None] % [3, 4, 5]),
    FieldStatistics: _field,
    Histogram: lambda cells, steps: Histogram.of(cells.T, 8),
    ValueSums: _values,
    PairSums: lambda cells, steps: PairSums.of(
        cells, np.roll(cells, 1, axis=1), 1.0 + steps[:, None] % 3, steps[:, None] % 2, 2
    ),
}
MADE[NamedSums] = _scorecard
for name, design in DESIGNS.items():
    MADE[ClimatologySums, name] = lambda cells, steps, design=design: ClimatologySums.of(
        design, steps, cells
    )


def kinds(kind=Mergeable):
    for module in pkgutil.walk_packages(ml4cube.__path__, "ml4cube."):
        if module.name.startswith(("ml4cube.core", "ml4cube.evaluation", "ml4cube.insights")):
            importlib.import_module(module.name)
    own = {kind} - {Mergeable}
    return own.union(*(kinds(child) for child in kind.__subclasses__()))


def test_every_kind_of_sums_is_tested_here():
    made = {kind[0] if isinstance(kind, tuple) else kind for kind in MADE}
    assert made == kinds()


def numbers(value):
    """All numbers of some sums, in the order of their names."""
    if isinstance(value, xr.Dataset):
        value = {name: variable.values for name, variable in value.variables.items()}
    if isinstance(value, dict):
        return np.concatenate([numbers(value[name]) for name in sorted(value)] or [np.zeros(0)])
    if hasattr(value, "merge"):
        return numbers(vars(value))
    array = np.asarray(np.nan if value is None else value)
    if array.dtype.kind not in "fiub":
        return np.zeros(0)
    return array.ravel().astype(float)


def equal(one, other):
    np.testing.assert_allclose(numbers(one), numbers(other), rtol=1e-12, atol=1e-9)


@pytest.mark.parametrize("kind", MADE, ids=str)
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_sums_of_any_parts_in_any_grouping_are_those_of_all_cells(kind, data):
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    cells = 1e3 + rng.integers(-40, 40, (N, 3)) / 8
    cells[rng.random(cells.shape) < data.draw(st.sampled_from([0.0, 0.2, 1.0]))] = np.nan
    ends = [0, *sorted(data.draw(st.lists(st.integers(1, N - 1), max_size=4, unique=True))), N]
    make, steps = MADE[kind], np.arange(N)
    parts = [make(cells[a:b], steps[a:b]) for a, b in itertools.pairwise(ends)]
    before = [part.to_json() for part in parts]
    whole = make(cells, steps)
    equal(reduce(lambda total, part: total.merge(part), parts), whole)
    equal(reduce(lambda total, part: part.merge(total), reversed(parts)), whole)
    assert before == [part.to_json() for part in parts]


@pytest.mark.parametrize("kind", MADE, ids=str)
def test_json_keeps_every_bit(kind):
    cells = np.random.default_rng(0).normal(size=(N, 3))
    cells[5:9] = np.nan
    for some in (cells, cells[:0]):
        if kind in (NamedSums, ValueSums) and not len(some):
            continue  # there are no scores of no dates
        sums = MADE[kind](some, np.arange(len(some)))
        again = type(sums).from_json(sums.to_json())
        assert type(again) is type(sums)
        assert again.to_json() == sums.to_json()
        np.testing.assert_array_equal(numbers(again), numbers(sums))
