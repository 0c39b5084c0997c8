"""What a command returns: its plan and its work; and what the work reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

#: Exit codes: something failed, the command was asked wrongly, there was nothing to do.
FAILED, WRONG, NOTHING, INTERRUPTED = 1, 2, 3, 130


class Keep(Protocol):
    """Writes the complete configuration of a command to a path, with some values replaced.

    `result` is the text of its result by path, which is written together with the configuration.
    """

    def __call__(self, path: str, result: Mapping[str, str] = ..., /, **replaced: Any) -> None:
        """Write the files."""


@dataclass(frozen=True)
class Report:
    """The result of a command."""

    # For ``--json``.
    values: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    exit_code: int = 0

    def as_json(self) -> str:
        """Return the values as JSON; numbers that JSON lacks are null."""
        from ml4cube.sampling.cf_encoding import as_json

        text = json.dumps(self.values, default=as_json)
        return json.dumps(json.loads(text, parse_constant=lambda _: None), indent=2)

    @classmethod
    def of(cls, **values: Any) -> Report:
        """Make a report of which the text has a line for each value."""
        return cls(values, "\n".join(f"{name}: {_cell(value)}" for name, value in values.items()))


@dataclass(frozen=True)
class Task:
    """What a command will do, with every argument checked."""

    # For ``--dry-run``.
    plan: Callable[[], Report]
    run: Callable[[Keep], Report]


def as_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as a table; nothing for None."""
    rows = list(rows)
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [[_cell(row.get(name)) for row in rows] for name in names]
    columns = [
        [text.ljust(max(map(len, column))) for text in column]
        for column in ([name, *texts] for name, texts in zip(names, cells, strict=True))
    ]
    return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{_cell(name)} {_cell(item)}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(_cell, value))
    if isinstance(value, float):
        return f"{value:.6g}"
    if type(value) is int:
        return f"{value:,}"
    return " ".join(str(value).split())
