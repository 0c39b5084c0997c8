"""Identify a callback, so that a later call can be compared, and copy it as a worker gets it.

A callback is known by its source code, its defaults, the values that it closes over, and all of the
user's functions and values that its source names; those of installed libraries count by name, where
they can be found by it. Where it uses anything but functions, numbers, texts, paths, arrays and
collections of these, the call warns and starts over, unless the user gives a ``version``, which
replaces all of this.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import linecache
import sys
import sysconfig
import types
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from ml4cube.core.errors import InvalidTypeError, InvalidValueError
from ml4cube.sampling.identity.cube import hash_of
from ml4cube.sampling.tiling import name_of

_SIMPLE = (type(None), bool, int, float, complex, str, bytes, type(Path()))
_STDLIB = Path(sysconfig.get_path("stdlib"))


class UnknownCallbackError(InvalidTypeError):
    """It is unknown whether a callback is the same as an earlier one."""


def checked_identity(function: Callable[..., Any] | None, version: str | int | None) -> str | None:
    """Identify a callback by its version or code; if neither tells, warn and make up a new id."""
    if version is not None:
        if function is None:
            raise InvalidValueError(
                f"version={version!r} is the version of callback=, which is not given"
            )
        if not isinstance(version, str | int) or isinstance(version, bool):
            raise InvalidTypeError(f"version must be a number or a text, got {version!r}")
        return f"version {version!r}"
    if function is None:
        return None
    try:
        return identity_of(function)
    except UnknownCallbackError as error:
        warnings.warn(
            f"cannot tell whether the callback is that of an earlier call: {error}. This call "
            "therefore starts over: it resumes nothing and opens no existing store. To allow both, "
            "give version=, a number or text that you change with the callback",
            UserWarning,
            stacklevel=3,
        )
        return f"unknown {uuid.uuid4()}"


def identity_of(function: Callable[..., Any]) -> str:
    """Hash a callback's source code and what it uses; the same in every process."""
    return hashlib.sha256(_Description().of(function, "callback").encode()).hexdigest()


def copy_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a callback as a worker process gets it."""
    import cloudpickle

    try:
        copied: Callable[..., Any] = cloudpickle.loads(cloudpickle.dumps(function))
    # whatever pickling a value raises
    except Exception as error:
        raise InvalidTypeError(
            f"callback={function!r} cannot be sent to other processes: {error}; create locks, "
            "open files and the like inside the callback, when it is called"
        ) from error
    return copied


def path_of(function: Callable[..., Any] | None) -> str | None:
    """Return ``module:name`` by which a callback can be imported; None if it cannot."""
    if function is None:
        return None
    module, name = str(getattr(function, "__module__", None)), str(name_of(function))
    if module == "__main__" or _value_at(module, name) is not function:
        return None
    return f"{module}:{name}"


def _value_at(module: str, name: str) -> Any:
    """Return what a module that is imported holds under a name with dots; None if nothing."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value


class _Description:
    """Describes values as texts that are the same in every process."""

    def __init__(self, seen: Mapping[int, tuple[int, Any]] | None = None) -> None:
        # number and value by id; keeping the value keeps its id from being used again
        self._seen = dict(seen or {})

    def of(self, value: Any, name: str) -> str:
        """Describe a function or value; one that was described already by its number."""
        if type(value) in _SIMPLE:
            return repr(value)
        if is_installed(value):
            return f"{value.__module__}.{value.__qualname__}"
        if isinstance(value, types.ModuleType) and _is_library_module(value):
            return value.__name__
        if id(value) in self._seen:
            return f"#{self._seen[id(value)][0]}"
        self._seen[id(value)] = len(self._seen), value
        return self._of_new(value, name)

    def _of_new(self, value: Any, name: str) -> str:
        """Describe a value by what it holds."""
        kind = type(value)
        if kind in (list, tuple):
            return f"{kind.__name__} {[self.of(v, name) for v in value]}"
        if kind is dict:
            return f"dict {[(self.of(k, name), self.of(v, name)) for k, v in value.items()]}"
        if kind in (set, frozenset):
            # Each element starts from the same numbers, because sets have another order in every
            # process.
            return f"set {sorted(_Description(self._seen).of(v, name) for v in value)}"
        if (kind is np.ndarray or isinstance(value, np.generic)) and not value.dtype.hasobject:
            return hash_of(np.asarray(value))
        if kind is functools.partial:
            return f"partial {self.of((value.func, value.args, value.keywords), name)}"
        if isinstance(value, types.FunctionType):
            return f"function {self._of_function(value)}"
        raise UnknownCallbackError(
            f"{name} is, or holds, an object of type {kind.__module__}.{kind.__qualname__}"
        )

    def _of_function(self, function: types.FunctionType) -> str:
        name, code = function.__qualname__, function.__code__
        source = source_of(code, function.__globals__)
        if source is None:
            raise UnknownCallbackError(
                f"the source code of {name} cannot be found, or has changed since it was imported"
            )
        for module in _imported(source):
            if not _is_library(module):
                raise UnknownCallbackError(f"{name} imports {module} when it is called")
        globals_and_attributes = {n for inner in _codes(code) for n in inner.co_names}
        globals_and_locals = {n.id for n in ast.walk(source) if isinstance(n, ast.Name)}
        globals_used = globals_and_attributes & globals_and_locals
        # A wrapper that calls what it wraps holds it in its closure, too.
        attributes = {n: v for n, v in vars(function).items() if n != "__wrapped__"}
        defaults = function.__defaults__, function.__kwdefaults__, attributes
        used = _used(function, globals_used, globals_and_attributes)
        values = [f"{n} {self.of(v, f'{n} in {name}')}" for n, v in sorted(used.items())]
        return f"{ast.unparse(source)} {self.of(defaults, name)} {values}"


def _used(function: types.FunctionType, named: set[str], loaded: set[str]) -> dict[str, Any]:
    """Find the values that a function closes over or names, also in modules of the user.

    `named` are the names in its code; `loaded`, these and the attributes that it reads.
    """
    queue = [(f"closure {name}", value) for name, value in closure_of(function)]
    queue += [(n, v) for n, v in function.__globals__.items() if n in named]
    used: dict[str, Any] = {}
    searched: list[types.ModuleType] = []
    while queue:
        name, value = queue.pop()
        if not isinstance(value, types.ModuleType) or _is_library_module(value):
            used[name] = value
        elif value not in searched:
            searched.append(value)
            queue += [(f"{value.__name__}.{n}", v) for n, v in vars(value).items() if n in loaded]
    return used


def closure_of(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield the variables that a function closes over and their values, if they have one yet."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with contextlib.suppress(ValueError):
            yield name, cell.cell_contents


def source_of(code: types.CodeType, module_globals: dict[str, Any]) -> ast.AST | None:
    """Find the source of a function; None if there is none or several."""
    linecache.checkcache(code.co_filename)
    try:
        tree = ast.parse("".join(linecache.getlines(code.co_filename, module_globals)))
        compiled = compile(tree, code.co_filename, "exec", dont_inherit=True)
    except SyntaxError:
        return None
    # an edited file that was not imported again does not say what the function does
    if sum(inner == code for inner in _codes(compiled)) != 1:
        return None
    functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.Lambda))
    wanted = code.co_name, code.co_firstlineno
    same = [node for node in functions if _name_and_first_line(node) == wanted]
    if len(same) == 1:
        return same[0]
    return None


def _name_and_first_line(function: ast.FunctionDef | ast.Lambda) -> tuple[str, int]:
    """Return both as the compiled code has them: it begins with the first decorator."""
    if isinstance(function, ast.Lambda):
        return "<lambda>", function.lineno
    lines = [decorator.lineno for decorator in function.decorator_list]
    return function.name, min([function.lineno, *lines])


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a code object and those of the functions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _imported(source: ast.AST) -> Iterable[str]:
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield "." * node.level + (node.module or "")


def is_installed(value: Any) -> bool:
    """Return True if an installed library holds a value under its name."""
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or not isinstance(getattr(value, "__qualname__", None), str):
        return False
    return _is_library(module) and _value_at(module, value.__qualname__) is value


def _is_library_module(module: types.ModuleType) -> bool:
    # a file of the user, loaded by its path, may have the name of a library
    return sys.modules.get(module.__name__) is module and _is_library(module.__name__)


def _is_library(module: str) -> bool:
    """Return True if a module is Python's own or installed, and not one of the user's."""
    top = module.partition(".")[0]
    if not top or top == "__main__":
        return False
    if top == __name__.partition(".")[0]:
        return True
    try:
        spec = find_spec(top)
    except ValueError:  # made by hand
        return False
    if spec is None or spec.origin is None:
        return False
    if spec.origin in ("built-in", "frozen"):
        return True
    origin = Path(spec.origin)
    return _STDLIB in origin.parents or bool({"site-packages", "dist-packages"} & set(origin.parts))
