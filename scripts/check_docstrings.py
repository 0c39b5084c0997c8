"""Validate the docstrings of all names that docs/reference/api.md publishes, and of no others.

Internal names have one plain line or none, so numpydoc's own hook, which checks all names, does not
suit. The checks are those of [tool.numpydoc_validation] in pyproject.toml.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from numpydoc.validate import validate

ROOT = Path(__file__).resolve().parent.parent
ENTRY = re.compile(r"\.\. auto(module|class):: (ml4cube[\w.]*)(\n   :imported-members:)?")


def published() -> Iterator[str]:
    """Yield the dotted names of published classes, their public methods, and functions."""
    for kind, name, imported in ENTRY.findall((ROOT / "docs" / "reference" / "api.md").read_text()):
        if kind == "class":
            module, _, attribute = name.rpartition(".")
            yield from members(name, getattr(importlib.import_module(module), attribute))
            continue
        module = importlib.import_module(name)
        for attribute in getattr(module, "__all__", vars(module)):
            found = getattr(module, attribute)
            defined_in = getattr(found, "__module__", "")
            is_listed = defined_in == name or (imported and defined_in.startswith("ml4cube"))
            if attribute.startswith("_") or not is_listed:
                continue
            if inspect.isclass(found) or inspect.isfunction(found):
                yield from members(f"{name}.{attribute}", found)


def members(name: str, found: Any) -> Iterator[str]:
    """Yield a name and, of a class, those of the public methods that it defines."""
    has_constructor = "__init__" in vars(found) and Protocol not in getattr(found, "__bases__", ())
    if not inspect.isclass(found) or has_constructor:  # else a base documents it, if anything
        yield name
    for attribute in vars(found) if inspect.isclass(found) else ():
        member = inspect.unwrap(getattr(found, attribute, None))
        # a method that overrides another is documented there
        overrides = any(hasattr(base, attribute) for base in found.__bases__)
        is_method = inspect.isfunction(member) or inspect.ismethod(member)
        if is_method and not overrides and not attribute.startswith("_"):
            yield f"{name}.{attribute}"


def main() -> int:
    """Print what is wrong, a line each; return how many docstrings are wrong."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["numpydoc_validation"]
    wrong = 0
    for name in dict.fromkeys(published()):
        found = validate(name)["errors"]
        errors = [error for error in found if error[0] in settings["checks"]]
        wrong += bool(errors)
        for code, message in errors:
            print(f"{name}: {code} {message}")
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 1))
