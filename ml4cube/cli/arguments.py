"""The arguments of a callable: names and defaults of its signature, texts of its docstring."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Argument:
    """One argument of a callable."""

    name: str
    # Without one, `is_required`.
    default: Any
    # As the docstring says it: "mapping or pairs, optional".
    kind: str
    text: str

    @property
    def is_required(self) -> bool:
        """True if there is no default."""
        return self.default is inspect.Parameter.empty

    @property
    def is_flag(self) -> bool:
        """True if the default is True or False, and it is no mapping either."""
        return isinstance(self.default, bool) and "mapping" not in self.kind

    @property
    def is_path(self) -> bool:
        """True if it is a path, which is no YAML."""
        return self.kind.startswith("path")


def arguments_of(function: Callable[..., Any]) -> dict[str, Argument]:
    """Return the arguments of a function or class, apart from ``*args`` and ``**kwargs``."""
    documented = _documented(inspect.getdoc(function) or "")
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {
        name: Argument(name, parameter.default, *documented.get(name, ("", "")))
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind not in variable
    }


def _documented(doc: str) -> dict[str, tuple[str, str]]:
    """Return type and description of each argument in a numpydoc docstring."""
    lines = doc.splitlines()
    if "Parameters" not in lines:
        return {}
    lines = lines[lines.index("Parameters") + 2 :]
    documented: dict[str, tuple[str, str]] = {}
    names: list[str] = []
    for line, next_line in zip(lines, [*lines[1:], ""], strict=True):
        if next_line and not next_line.strip("-"):  # the title of the next section
            break
        if line.startswith(" "):
            documented |= {
                name: (documented[name][0], f"{documented[name][1]} {line.strip()}")
                for name in names
            }
        elif line:
            head, _, kind = line.partition(" : ")
            names = [name.strip() for name in head.split(",")]
            documented |= dict.fromkeys(names, (kind, ""))
    return {
        name: (kind, text.replace("``", "").strip()) for name, (kind, text) in documented.items()
    }


def summary_of(function: Callable[..., Any]) -> str:
    """Return the docstring of a function, up to its first section."""
    return (inspect.getdoc(function) or "").partition("\nParameters\n")[0].strip()
