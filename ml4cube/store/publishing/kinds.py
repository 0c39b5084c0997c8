"""Kinds of stores that are published."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

from ml4cube.store.format import MANIFEST, read_manifest
from ml4cube.store.locations import Location


@dataclass(frozen=True)
class StoreKind:
    """How a complete store of one kind is recognized, and which files belong to it."""

    # What writes such stores, as messages call it.
    writer: str
    # The file without which there is no such store; it is put last where nothing can be renamed.
    marker: str
    # Returns the files of the store at a location; raises StoreError if there is none.
    files: Callable[[Location], Collection[str]]


def _files_of_samples(location: Location) -> Collection[str]:
    return {*read_manifest(location), MANIFEST}


SAMPLES = StoreKind("the sampler", MANIFEST, _files_of_samples)
