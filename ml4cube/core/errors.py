"""The few exception types. Every message says what was asked, what was found, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy as np


class CubeError(Exception):
    """Base of every error that ml4cube raises on purpose."""


class InvalidValueError(CubeError, ValueError):
    """An argument has a value that cannot work: a typo, an unknown dim, a size out of range."""


class InvalidTypeError(CubeError, TypeError):
    """An argument is of a kind that cannot work, is missing, or contradicts another."""


class EmptyPartError(InvalidValueError):
    """A part (train, val or test) that was asked for would hold no sample."""


class StoreExistsError(CubeError, FileExistsError):
    """The target path is taken, and nothing there may be overwritten."""


class StoreError(CubeError, OSError):
    """A store or a file is missing, damaged, or not one of ours."""


class RunError(CubeError, RuntimeError):
    """Work under way had to stop: a task failed, a worker died, a loss became NaN."""


def check_choice(argument: str, value: object, choices: Iterable[str | None]) -> None:
    """Raise InvalidValueError unless `value` is one of `choices`, naming the nearest of them."""
    known = list(choices)
    if any(value is choice or value == choice for choice in known):
        return
    near = difflib.get_close_matches(str(value), [c for c in known if c is not None], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise InvalidValueError(
        f"{argument}={value!r} is not one of {', '.join(map(repr, known))}{hint}"
    )


def check_flags(flags: Mapping[str, object]) -> None:
    """Raise InvalidTypeError where an argument that is True or False is something else."""
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise InvalidTypeError(f"{name}={value!r} is no bool; give True or False")


def check_whole(name: str, value: object, least: int) -> None:
    """Refuse what is no whole number, or too small a one."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise InvalidTypeError(f"{name}={value!r} is a {type(value).__name__}; give a whole number")
    if value < least:
        raise InvalidValueError(f"{name}={value}; give at least {least}")


def check_seed(seed: object) -> int:
    """Refuse a seed that is no integer."""
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise InvalidTypeError(f"seed={seed!r} is a {type(seed).__name__}; give an integer")
    return int(seed)


@contextmanager
def needs_torch(module: str) -> Iterator[None]:
    """Say what to install where importing torch fails because there is none.

    Parameters
    ----------
    module : str
        The module that needs torch, for the message.

    Yields
    ------
    None
        Import torch inside the block.

    Raises
    ------
    ModuleNotFoundError
        If torch is not installed.

    Examples
    --------
    >>> with needs_torch("ml4cube.training"):
    ...     import math  # where the module itself imports torch
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ModuleNotFoundError(
            f"{module} needs torch, which is not installed; run `pip install torch`, or install "
            "the build of it that fits your machine",
            name="torch",
        ) from error


def check_names(names: Iterable[Hashable]) -> None:
    """Refuse names of variables and dims that are no texts, such as the numbers of bands."""
    if odd := [name for name in names if not isinstance(name, str)]:
        raise InvalidTypeError(
            f"variables or dims of the cube are called {odd}, which is no text; rename them, by "
            "ds.rename"
        )
