"""The exception types, and checks of arguments that all folders share."""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np


class CubeError(Exception):
    """Base class of all errors of ml4cube."""


class InvalidValueError(CubeError, ValueError):
    """An argument has an invalid value: a typo, an unknown dim, a size out of range."""


class InvalidTypeError(CubeError, TypeError):
    """An argument has an invalid type, is missing, or contradicts another."""


class EmptyPartError(InvalidValueError):
    """A requested part (train, val or test) would have no sample."""


class StoreExistsError(CubeError, FileExistsError):
    """The target path exists and must not be overwritten."""


class StoreError(CubeError, OSError):
    """A store or file is missing, damaged, or was not written by ml4cube."""


class RunError(CubeError, RuntimeError):
    """A run had to stop: a task failed, a worker died, a loss became NaN."""


def listed(names: Collection[object], word: str = "and") -> str:
    """Return names as a phrase: 'a', 'b' and 'c'."""
    *first, last = map(repr, names) if names else ["nothing"]
    if first:
        return f"{', '.join(first)} {word} {last}"
    return last


def check_choice(argument: str, value: object, choices: Iterable[str | None]) -> None:
    """Raise InvalidValueError unless `value` is one of `choices`, and suggest the most similar."""
    names = list(choices)
    if value in names:
        return
    similar = difflib.get_close_matches(str(value), [c for c in names if c is not None], n=1)
    hint = ""
    if similar:
        hint = f"; did you mean {similar[0]!r}?"
    raise InvalidValueError(f"{argument} must be {listed(names, 'or')}, got {value!r}{hint}")


def check_flags(flags: Mapping[str, object]) -> None:
    """Raise InvalidTypeError unless every value is True or False."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidTypeError(f"{name} must be True or False, got {value!r}")


def check_whole(name: str, value: object, least: int | None = None) -> int:
    """Return `value` as an int; raise unless it is an integer of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidTypeError(f"{name} must be an integer, got {value!r}")
    if least is not None and value < least:
        raise InvalidValueError(f"{name} must be at least {least}, got {value}")
    return int(value)


def check_positive(name: str, value: Any, most: float = math.inf) -> None:
    """Raise unless `value` is a number above 0 and at most `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.number):
        raise InvalidTypeError(f"{name} must be a number, got {value!r}")
    if not 0 < value <= most:
        limit = "" if most == math.inf else f" and at most {most}"
        raise InvalidValueError(f"{name} must be above 0{limit}, got {value!r}")


def check_real_number(argument: str, value: object) -> None:
    """Raise unless `value` is a real number that a float can hold."""
    if not isinstance(value, int | float | np.integer | np.floating | np.bool_):
        raise InvalidTypeError(f"{argument} must be a real number, got {value!r}")
    try:
        float(value)
    except OverflowError:
        raise InvalidValueError(
            f"{argument} must fit into a float, got an integer of {int(value).bit_length()} bits"
        ) from None


def check_numpy(subject: str, dtype: Any) -> None:
    """Raise for a dtype that only pandas knows, such as ``Int64``, whose gaps numpy misses."""
    if not isinstance(dtype, np.dtype) and getattr(dtype, "kind", "") in ("f", "i", "u", "b", "c"):
        raise InvalidTypeError(
            f"{subject} must have a numpy dtype, got pandas' dtype {dtype}; convert it with "
            'astype("float64")'
        )


def check_real(subject: str, dtype: Any) -> None:
    """Raise InvalidTypeError unless a dtype holds real numbers."""
    check_numpy(subject, dtype)
    if dtype.kind not in "fiub":
        raise InvalidTypeError(
            f"{subject} must hold real numbers, got dtype {dtype}; leave it out or convert it"
        )


@contextmanager
def prefixed(prefix: str) -> Iterator[None]:
    """Start the messages of wrong values and types with a prefix, such as a variable's name."""
    try:
        yield
    except (InvalidTypeError, InvalidValueError) as error:
        raise type(error)(f"{prefix}: {error}") from None


@contextmanager
def needs_torch(module: str) -> Iterator[None]:
    """Tell the user that `module` needs torch, if importing it in the ``with`` block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"{module} needs torch, which is not installed; run `pip install torch`, or install "
            "the build for your machine",
            name="torch",
        ) from error


def check_names(names: Iterable[Hashable]) -> None:
    """Raise InvalidTypeError unless every name of a variable or dim is a string."""
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise InvalidTypeError(
            f"names of variables and dims must be strings, got {wrong}; rename them with ds.rename"
        )


def names_of(argument: str, texts: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return one name, several names or None as a tuple of names."""
    if texts is None:
        return ()
    is_one = isinstance(texts, str) or not isinstance(texts, Iterable)
    names: tuple[str, ...] = (texts,) if is_one else tuple(texts)  # type: ignore[assignment]
    if not all(isinstance(name, str) for name in names):
        raise InvalidTypeError(f"{argument} must be a name or a list of names, got {texts!r}")
    return names


def parse_names(argument: str, texts: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return names as a tuple; refuse a name that is given twice."""
    names = names_of(argument, texts)
    if len(set(names)) != len(names):
        raise InvalidValueError(f"{argument} must not name a variable twice, got {texts!r}")
    return names


def caller_level() -> int:
    """Return the stack level of the code outside ml4cube, for a warning of the calling function."""
    ours = __name__.partition(".")[0]
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] == ours:
        level, frame = level + 1, frame.f_back
    return level
