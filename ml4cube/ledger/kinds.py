"""Kinds of stores that are published."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ml4cube.ledger.locations import Location
from ml4cube.ledger.manifest import MANIFEST, find_foreign


@dataclass(frozen=True)
class StoreKind:
    """How a complete store of one kind is recognized, and what in it is not ours to replace."""

    # What writes such stores, as messages call it.
    writer: str
    # The file without which there is no such store; it is put last where nothing can be renamed.
    marker: str
    # Returns what at a location the writer did not write, or what has changed since; raises
    # StoreError if there is no such store.
    find_foreign: Callable[[Location], Sequence[str]]


SAMPLES = StoreKind("the sampler", MANIFEST, find_foreign)
