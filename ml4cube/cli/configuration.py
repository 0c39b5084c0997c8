"""YAML files and values, and how those of a file, of options and of ``--set`` are merged."""

from __future__ import annotations

import copy
import difflib
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import yaml

from ml4cube.cli.files import read_text
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, listed

# The core schema of YAML 1.2. PyYAML reads 1.1, where the variable "no" is False, 1e-3 a string and
# 11:30 a number of base 60.
_RESOLVERS = {
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?(0|[1-9][0-9]*)", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        "-+.0123456789",
    ),
}


# The other types of PyYAML, such as dates, are texts.
_TYPES = ("null", "bool", "int", "float", "str", "seq", "map")
# Values in a file; those behind an alias count every time, and one inside itself without end.
_MOST_VALUES = 100_000
_SHOWN_LETTERS = 60  # of a text in a message


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012, PyYAML's own attribute
    yaml_constructors = {  # noqa: RUF012, PyYAML's own attribute
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in _TYPES
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Refuse keys that are given twice."""
        mapping = super().construct_mapping(node, deep)
        keys = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice")
            keys.add(key)
        return mapping


class _Dumper(yaml.SafeDumper):
    """Quotes what YAML 1.1 or 1.2 would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write every value in full."""
        return True


for _name, (_pattern, _first) in _RESOLVERS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_name}",
            re.compile(rf"^(?:{_pattern})$"),
            [letter.strip("\0") for letter in _first],
        )


def read_value(name: str, text: str) -> Any:
    """Return the value of a text in YAML: ``0.5``, ``[t2m, precip]``, ``{lat: 2}``."""
    try:
        return _read(text)
    except ValueError as error:
        shown = text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…"
        raise InvalidValueError(
            f"{name} must be YAML, such as 0.5, [a, b] or {{lat: 2}}, got {shown!r}: {error}"
        ) from None


def read_file(path: str) -> dict[str, Any]:
    """Return the mapping in a YAML file, on disk or behind a URL."""
    text = read_text(path)
    try:
        values = _read(text)
    except ValueError as error:
        raise InvalidValueError(f"{path} is not YAML: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise InvalidTypeError(f"{path} must hold names of arguments and their values")
    return values


def _read(text: str) -> Any:
    """Return what is in YAML; ValueError, of one line, if it is broken or too large."""
    try:
        value = yaml.load(text, _Loader)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    # of tags that do not fit their text, and of numbers of thousands of digits
    except (yaml.YAMLError, ValueError, LookupError) as error:
        raise ValueError(" ".join(str(error).split())) from None
    waiting, n_values = [value], 0
    while waiting:
        inner = waiting.pop()
        n_values += 1
        if n_values > _MOST_VALUES:
            raise ValueError(f"it has more than {_MOST_VALUES:,} values, or one inside itself")
        if isinstance(inner, dict):
            waiting += inner.values()
        elif isinstance(inner, list):
            waiting += inner
    return value


def as_yaml(command: str, values: Mapping[str, Any], kinds: Mapping[str, str]) -> str:
    """Return a complete configuration, with the type of each argument above it."""
    lines = [f"# ml4cube {command} --config FILE"]
    for name, value in values.items():
        lines += [f"# {kinds[name]}"] if kinds.get(name) else []
        lines.append(yaml.dump({name: _plain(value)}, Dumper=_Dumper, width=10_000).rstrip())
    return "\n".join(lines) + "\n"


def _plain(value: Any) -> Any:
    """Return a value with lists in place of tuples."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def set_value(values: dict[str, Any], setting: str, named: Collection[str]) -> None:
    """Set one value, as ``overlap.lat=0.5`` says.

    The arguments in `named` are names of classes or mappings with the key ``class``, so that
    ``optimizer.lr=0.01`` adds to ``optimizer: AdamW``.
    """
    path, has_value, text = setting.partition("=")
    *parents, last = names = path.strip().split(".")
    if not has_value or not all(names):
        raise InvalidValueError(f"--set must be NAME=VALUE or NAME.KEY=VALUE, got {setting!r}")
    inside = values
    for name in parents:
        value = inside.get(name)
        if isinstance(value, str) and names[0] in named:
            value = {"class": value}
        if not isinstance(value, Mapping | None):
            raise InvalidValueError(
                f"--set {path}: {name} is {value!r}, which has no keys; give the whole of it"
            )
        inside[name] = dict(value or {})
        inside = inside[name]
    inside[last] = read_value(path, text)


def merged(
    file: Mapping[str, Any],
    options: Mapping[str, Any],
    settings: Iterable[str],
    named: Collection[str],
) -> dict[str, Any]:
    """Merge a file, options and ``--set``, of which later ones win."""
    values = {**copy.deepcopy(dict(file)), **options}
    for setting in settings:
        set_value(values, setting, named)
    return values


def check_known(
    owner: str, given: Iterable[str], known: Iterable[str], what: str = "argument"
) -> None:
    """Refuse names that are not among those known, and suggest those that are near."""
    known = list(known)
    for name in given:
        if name not in known:
            hint = near(name, known, f"it has {listed(known)}")
            raise InvalidValueError(f"{owner} has no {what} {name!r}; {hint}")


def near(name: str, known: Iterable[str], otherwise: str) -> str:
    """Suggest the names that are near one, else something else."""
    names = difflib.get_close_matches(str(name), known, n=3)
    if not names:
        return otherwise
    return f"did you mean {listed(names, 'or')}?"
