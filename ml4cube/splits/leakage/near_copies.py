"""Find held-out steps that are near copies of train steps: rescaled, noisy, coarser or flipped.

The correlation of whole fields, without the patterns of mean, trend and season, is below that of
neighbouring steps for all but copies. It does not depend on units.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ml4cube.splits.leakage.coarse_fields import Bools, CoarseFields, Floats, Steps

# What a copy may lack in correlation: at most this, and this much of what neighbouring steps lack.
_MOST_LACKING = 1e-3
_SHARE_OF_NEIGHBOURS = 0.02
# Of neighbouring train steps, the nearest are this fraction.
_NEAREST = 0.05
_FEWEST_CELLS = 24
_FEWEST_NEIGHBOURS = 4
# If a variable repeats by nature, train steps have copies in train as well.
_EXCESS = 0.02
# One field of a rare class may equal another by chance.
_FEWEST_COPIES = 3
_STEPS_AT_ONCE = 256


@dataclass(frozen=True)
class NearCopies:
    """Held-out steps that follow from train steps."""

    # Fraction of the held-out steps.
    share: float
    first: int
    last: int
    # Dims along which the copies are flipped.
    flipped: tuple[str, ...] = ()


def find_near_copies(fields: CoarseFields, steps: Steps) -> NearCopies | None:
    """Compare each held-out step with all train steps."""
    patterns = _Patterns.of(fields.flat(), steps)
    if patterns is None:
        return None
    train, held_out = np.flatnonzero(steps.train), np.flatnonzero(steps.held_out)
    of_train = _unit(patterns.residuals(fields.flat()[train]))
    pairs = np.flatnonzero(np.diff(train) == 1)
    lacking = 1 - np.einsum("ij,ij->i", of_train[pairs], of_train[pairs + 1])
    limit = _limit(lacking)
    if limit == 0:
        return None
    repeats = _has_copy(of_train, of_train, limit, without_itself=True).mean()
    nearest = None
    for dims, flipped in _orientations(fields, held_out):
        of_held_out = _unit(patterns.residuals(flipped))
        is_copy = _has_copy(of_held_out, of_train, limit)
        share = float(is_copy.mean())
        is_enough = is_copy.sum() >= _FEWEST_COPIES and share > repeats + _EXCESS
        if is_enough and (nearest is None or share > nearest.share):
            copies = held_out[is_copy]
            nearest = NearCopies(share, int(copies[0]), int(copies[-1]), dims)
    return nearest


def find_interpolated_steps(fields: CoarseFields, steps: Steps) -> NearCopies | None:
    """Find held-out steps that are weighted means of the train steps before and after them."""
    patterns = _Patterns.of(fields.flat(), steps)
    if patterns is None:
        return None
    train, held_out = np.flatnonzero(steps.train), np.flatnonzero(steps.held_out)
    residuals = patterns.residuals(fields.flat())
    after = np.searchsorted(train, held_out)
    between = (after > 0) & (after < train.size)
    if not between.any():
        return None
    held_out, after = held_out[between], after[between]
    unexplained = _unexplained(residuals, held_out, train[after - 1], train[after])
    by_nature = _unexplained(residuals, train[1:-1], train[:-2], train[2:])
    # A smooth process lacks the less, the nearer its steps are, by the square of this product.
    apart = (held_out - train[after - 1]) * (train[after] - held_out)
    apart_by_nature = np.median(np.diff(train)[:-1] * np.diff(train)[1:])
    nearness = np.minimum(apart / apart_by_nature, 1.0) ** 2
    is_copy = unexplained < _limit(by_nature) * nearness
    share = float(is_copy.sum() / steps.held_out.sum())
    if share <= _EXCESS:
        return None
    return NearCopies(share, int(held_out[is_copy][0]), int(held_out[is_copy][-1]))


@dataclass(frozen=True, eq=False)
class _Patterns:
    """The fields of mean, trend and season, which are alike in all steps."""

    # Orthonormal patterns, and the mean field that fills gaps: (patterns, cells), (cells,).
    patterns: Floats
    mean: Floats

    @classmethod
    def of(cls, values: Floats, steps: Steps) -> _Patterns | None:
        """Fit the patterns to the train steps; None if there are too few steps or cells."""
        if (
            steps.train.sum() < _FEWEST_NEIGHBOURS + steps.basis.shape[1]
            or not steps.held_out.any()
        ):
            return None
        train = values[steps.train]
        is_finite = np.isfinite(train)
        if (is_finite.any(axis=0)).sum() < _FEWEST_CELLS:
            return None
        counts = is_finite.sum(axis=0)
        mean = np.where(is_finite, train, 0.0).sum(axis=0) / np.maximum(counts, 1)
        filled = np.where(is_finite, train, mean)
        fit = np.linalg.lstsq(steps.basis[steps.train], filled, rcond=None)[0]
        _, strength, patterns = np.linalg.svd(
            np.vstack([np.ones_like(mean), fit]), full_matrices=False
        )
        return cls(patterns[strength > 1e-9 * strength[0]], mean)

    def residuals(self, values: Floats) -> Floats:
        """Return fields without the patterns; 0 for fields of too few values to be compared."""
        is_finite = np.isfinite(values)
        filled = np.where(is_finite, values, self.mean)
        rest = filled - (filled @ self.patterns.T) @ self.patterns
        return np.where(is_finite.sum(axis=1, keepdims=True) < _FEWEST_CELLS, 0.0, rest)


def _limit(lacking: Floats) -> float:
    """Return what a copy may lack, from what steps lack that are neighbours by nature."""
    if lacking.size < _FEWEST_NEIGHBOURS:
        return 0.0
    by_nature = float(np.quantile(lacking, _NEAREST))
    # rounding in float64 lacks about 1e-15
    if by_nature > 1e-12:
        return min(_MOST_LACKING, _SHARE_OF_NEIGHBOURS * by_nature)
    return 0.0


def _unit(residuals: Floats) -> Floats:
    """Return fields of norm 1; constant ones stay 0, so that they are copies of none."""
    norm = np.linalg.norm(residuals, axis=1, keepdims=True)
    largest = float(norm.max(initial=0.0))
    is_constant = norm <= 1e-9 * largest
    return np.where(is_constant, 0.0, residuals / np.where(is_constant, 1.0, norm))


def _orientations(
    fields: CoarseFields, held_out: NDArray[np.intp]
) -> Iterator[tuple[tuple[str, ...], Floats]]:
    """Yield the held-out fields as they are, and flipped along each choice of map dims."""
    values = fields.values[held_out]
    for n in range(len(fields.inner) + 1):
        for dims in itertools.combinations(fields.inner, n):
            axes = tuple(2 + fields.inner.index(dim) for dim in dims)
            yield dims, np.flip(values, axes).reshape(len(values), -1)


def _has_copy(some: Floats, train: Floats, limit: float, without_itself: bool = False) -> Bools:
    """Return which fields have a correlation of 1, within the limit, with a train field."""
    has_copy = np.zeros(len(some), dtype=bool)
    for start in range(0, len(some), _STEPS_AT_ONCE):
        correlations = some[start : start + _STEPS_AT_ONCE] @ train.T
        if without_itself:
            rows = np.arange(len(correlations))
            correlations[rows, start + rows] = -1.0
        has_copy[start : start + _STEPS_AT_ONCE] = correlations.max(axis=1) > 1 - limit
    return has_copy


def _unexplained(
    residuals: Floats,
    at: NDArray[np.intp],
    before: NDArray[np.intp],
    after: NDArray[np.intp],
) -> Floats:
    """Return the fraction of each field's variance that two others do not explain."""
    y, a, b = residuals[at], residuals[before], residuals[after]

    def dot(left: Floats, right: Floats) -> Floats:
        return np.asarray(np.einsum("ij,ij->i", left, right))

    aa, bb, ab, ay, by, yy = dot(a, a), dot(b, b), dot(a, b), dot(a, y), dot(b, y), dot(y, y)
    determinant = aa * bb - ab**2
    can_tell = (determinant > 1e-12 * aa * bb) & (yy > 0)
    safe = np.where(can_tell, determinant, 1.0)
    explained = (ay**2 * bb - 2 * ay * by * ab + by**2 * aa) / safe
    return np.where(can_tell, 1 - explained / np.where(can_tell, yy, 1.0), 1.0)
