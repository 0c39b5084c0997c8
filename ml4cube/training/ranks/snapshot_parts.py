"""Snapshots in several files: what each rank holds, in a file of its own.

Beside ``snapshot.pt`` lies one file per rank, ``snapshot.pt.000001.0-of-2`` and so on. They are
written first; ``snapshot.pt`` itself, which names them with their checksums, is replaced last,
and only then are older ones removed. So there is a whole snapshot at every moment, and any number
of ranks can go on from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ml4cube.core.errors import StoreError
from ml4cube.training.files.checkpoint import read_file, write_file
from ml4cube.training.ranks.dist import World

FORMAT = 1
_SEAL = 64  # hex digits of the checksum that ends every file of `write_file`


def write_shards(
    path: str | Path, world: World, states: Mapping[str, Any], rows: Mapping[str, Any]
) -> dict[str, Any]:
    """Write what this rank holds into a file of its own; every rank must call this."""
    main = Path(path)
    generation = world.share(max(_generations(main), default=0) + 1)
    file = shard_file(main, generation, world.rank, world.size)
    with agreed(world) as outcome:
        write_file(file, {"ml4cube_shard": FORMAT, "states": states})
        outcome.append(_seal(file))
    seals = world.gather_objects(outcome[0])
    return {"format": FORMAT, "generation": generation, "seals": seals, "rows": rows}


def read_shards(
    path: str | Path, shards: Mapping[str, Any], rank: int = 0, size: int = 1
) -> dict[str, Any]:
    """Put together what one of `size` ranks holds, from the shards of any number of ranks."""
    if shards["format"] != FORMAT:
        raise StoreError(f"{path} has shards of format {shards['format']}, not {FORMAT}")
    seals = shards["seals"]
    of = len(seals)
    # What is not cut (buffers, counters) comes from the rank's own file, or from rank 0's.
    order = [rank] if of == size else range(of)
    result: dict[str, Any] = {}
    for number in order:
        file = shard_file(Path(path), shards["generation"], number, of)
        content = read_file(file)
        if _seal(file) != seals[number]:
            raise StoreError(f"{file} is of another snapshot than {path}; restore a copy of both")
        _collect(result, "", content["states"], shards["rows"], (number, of), (rank, size))
    joined: dict[str, Any] = _joined(result[""])
    return joined


@contextmanager
def agreed(world: World) -> Iterator[list[Any]]:
    """Raise on every rank what the body raises on one, so that none waits for it."""
    trouble: OSError | None = None
    try:
        yield []
    except OSError as error:
        trouble = error
    said = None if trouble is None else f"rank {world.rank}: {trouble}"
    for message in world.gather_objects(said):
        if message is not None:
            raise StoreError(message) from trouble


def remove_old(path: str | Path) -> None:
    """Remove shard files next to a snapshot that it does not list."""
    main = Path(path)
    shards = read_file(main).get("shards")
    for generation, files in _generations(main).items():
        if shards is None or generation != shards["generation"]:
            for file in files:
                file.unlink(missing_ok=True)


class _Pieces(list[torch.Tensor]):
    """Runs of rows of one tensor, in order."""


def _collect(
    into: dict[Any, Any],
    key: Any,
    value: Any,
    rows: Any,
    source: tuple[int, int],
    wanted: tuple[int, int],
) -> None:
    """Take out of one rank's state the rows that another rank wants."""
    if isinstance(value, Mapping):
        inner = into.setdefault(key, {})
        for name, item in value.items():
            below = rows.get(name) if isinstance(rows, Mapping) else None
            _collect(inner, name, item, below, source, wanted)
    elif isinstance(rows, int):
        first, end = row_range(rows, *source)
        start, stop = row_range(rows, *wanted)
        pieces = into.setdefault(key, _Pieces())
        low, high = max(first, start), min(end, stop)
        pieces.append(value[low - first : max(high, low) - first] if low < end else value[:0])
    else:
        into.setdefault(key, value)


def _joined(value: Any) -> Any:
    if isinstance(value, _Pieces):
        return value[0] if len(value) == 1 else torch.cat(value)
    if isinstance(value, dict):
        return {key: _joined(item) for key, item in value.items()}
    return value


def row_range(rows: int, rank: int, size: int) -> tuple[int, int]:
    """Return which rows of a tensor are a rank's, as `fully_shard` cuts: like `torch.chunk`."""
    each = -(-rows // size)
    return min(rank * each, rows), min((rank + 1) * each, rows)


def shard_file(main: Path, generation: int, rank: int, size: int) -> Path:
    """Return where a rank's file lies."""
    return main.with_name(f"{main.name}.{generation:06d}.{rank}-of-{size}")


def _generations(main: Path) -> dict[int, list[Path]]:
    """Shard files next to a snapshot, by the snapshot they were written for."""
    pattern = re.compile(re.escape(main.name) + r"\.(\d{6})\.\d+-of-\d+")
    found: dict[int, list[Path]] = {}
    for file in main.parent.iterdir() if main.parent.is_dir() else ():
        match = pattern.fullmatch(file.name)
        if match:
            found.setdefault(int(match[1]), []).append(file)
    return found


def _seal(file: Path) -> str:
    """The checksum that ends a file of `write_file`."""
    with file.open("rb") as handle:
        handle.seek(-_SEAL, os.SEEK_END)
        return handle.read().decode()
