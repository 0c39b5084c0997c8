"""Is this callback the one of an earlier call? And a copy of it, as workers get one."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ml4cube.core.errors import InvalidTypeError
from ml4cube.datasets.cube_identity import hash_of


def identity_of(function: Callable[..., Any]) -> str:
    """Tell one callback from another, the same in every process.

    Parameters
    ----------
    function : callable
        The callback.

    Returns
    -------
    str
        Hash of its code, constants, defaults and closure, and of the globals it names; not of
        the file and lines it stands in. Helpers of an importable module count with their own
        code. What Python itself cannot look into is known by its pickle, which may differ
        between processes: then it counts as another callback.

    Raises
    ------
    InvalidTypeError
        If it holds what cannot be pickled, so that no other process could run it.
    """
    with _travelling(function):
        known = _Canonical().of(function, whole=True)
    return hashlib.sha256(repr(known).encode()).hexdigest()


def copy_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a callback as a worker process gets it.

    Parameters
    ----------
    function : callable
        The callback.

    Returns
    -------
    callable
        What it keeps for its next call is not seen by the original.

    Raises
    ------
    InvalidTypeError
        As `identity_of`.
    """
    import cloudpickle

    with _travelling(function):
        copied: Callable[..., Any] = cloudpickle.loads(cloudpickle.dumps(function))
    return copied


def name_of(function: Callable[..., Any] | None) -> str | None:
    """Say what a callback is called, so that samples tell that there was one.

    Parameters
    ----------
    function : callable, optional
        The callback.

    Returns
    -------
    str or None
        None if there is none.
    """
    if function is None:
        return None
    return str(getattr(function, "__qualname__", type(function).__name__))


@contextlib.contextmanager
def _travelling(function: Callable[..., Any]) -> Iterator[None]:
    """Name the callback that cannot be sent to another process."""
    try:
        yield
    # whatever a value's own way to be pickled raises
    except Exception as error:
        raise InvalidTypeError(
            f"callback={function!r} holds what other processes cannot get: {error}; locks, open "
            "files and the like must be made inside the callback, when it is called"
        ) from error


_OF_EVERY_CLASS = {"__dict__", "__weakref__", "__module__", "__firstlineno__"}


class _Canonical:
    """Writes values as tuples and texts that are the same in every process."""

    def __init__(self) -> None:
        # by id, with the value itself, so that no id is used again meanwhile
        self._seen: dict[int, tuple[int, Any]] = {}

    def of(self, value: Any, whole: bool = False) -> Any:
        """Describe a value; a function's closure and globals where it is no mere helper."""
        if value is None or isinstance(value, str | bytes | bool | int | float | complex):
            return repr(value)
        if isinstance(value, tuple):
            return "tuple", self._each(value)
        if isinstance(value, set | frozenset):
            # each by itself, so that nothing depends on the order in which they come
            return "set", sorted(repr(_Canonical().of(v)) for v in value)
        if isinstance(value, types.CodeType):
            names = (value.co_names, value.co_varnames, value.co_freevars)
            return "code", value.co_code, self._each(value.co_consts), names
        # a function that calls itself, a list that holds itself
        if id(value) in self._seen:
            return "again", self._seen[id(value)][0]
        self._seen[id(value)] = (len(self._seen), value)
        if isinstance(value, types.FunctionType):
            return self._of_function(value, whole or not _importable(value))
        if isinstance(value, type):
            return self._of_class(value)
        return self._of_object(value)

    def _each(self, values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(self.of(value) for value in values)

    def _of_function(self, function: types.FunctionType, whole: bool) -> Any:
        code, known = function.__code__, function.__globals__
        parts: list[Any] = [code, function.__defaults__, function.__kwdefaults__]
        if whole:
            parts.append([_content(cell) for cell in function.__closure__ or ()])
            parts.append({n: known[n] for n in sorted(_names(code) & set(known))})
        return "function", self._each(parts)

    def _of_class(self, kind: type) -> Any:
        if _importable(kind):
            return "named", kind.__module__, kind.__qualname__
        members = sorted((n, v) for n, v in vars(kind).items() if n not in _OF_EVERY_CLASS)
        return "class", kind.__qualname__, self._each(kind.__bases__), self._each(members)

    def _of_object(self, value: Any) -> Any:
        kind = type(value).__qualname__
        if isinstance(value, list):
            return kind, self._each(value)
        if isinstance(value, dict):
            return kind, self._each(value.items())
        if isinstance(value, np.ndarray | np.generic):
            return kind, hash_of(np.asarray(value))
        if isinstance(value, types.ModuleType):
            return kind, value.__name__
        if isinstance(value, types.MethodType):
            return kind, self._each((value.__self__, value.__func__))
        if isinstance(value, staticmethod | classmethod):
            return kind, self._each((value.__func__,))
        if isinstance(value, property):
            return kind, self._each((value.fget, value.fset, value.fdel))
        if isinstance(value, functools.partial):
            return kind, self._each((value.func, value.args, value.keywords))
        if _is_plain(value):
            return kind, self._each((type(value), vars(value)))
        return "pickle", _pickled(value)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _importable(value: Any) -> bool:
    """Whether another process finds it by its name; what a script or notebook defines, not."""
    module = getattr(value, "__module__", None)
    if module is None or module == "__main__":
        return False
    found: Any = sys.modules.get(module)
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _is_plain(value: Any) -> bool:
    """Whether an object is nothing but its class and attributes."""
    kind: Any = type(value)
    as_usual = kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__
    slots = any(vars(c).get("__slots__") for c in kind.__mro__)
    return as_usual and not slots and hasattr(value, "__dict__")


def _pickled(value: Any) -> str:
    import cloudpickle

    return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()


def _names(code: types.CodeType) -> set[str]:
    inner = [c for c in code.co_consts if isinstance(c, types.CodeType)]
    return set(code.co_names).union(*(_names(c) for c in inner))
