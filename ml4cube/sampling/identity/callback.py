"""Is this callback the one of an earlier call? And a copy of it, as workers get one."""

from __future__ import annotations

import contextlib
import copyreg
import dis
import functools
import hashlib
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from ml4cube.core.errors import InvalidTypeError
from ml4cube.sampling.identity.cube import hash_of


def identity_of(function: Callable[..., Any]) -> str:
    """Tell one callback from another, the same in every process."""
    found = _hash(function)
    return _BEFORE.get(found, found)


@contextlib.contextmanager
def staying_same(function: Callable[..., Any] | None) -> Iterator[None]:
    """Let a callback work in this process, and stay the one it was before."""
    if function is None:
        yield
        return
    before = identity_of(function)
    try:
        yield
    finally:
        _BEFORE[_hash(function)] = before


def copy_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """Copy a callback as a worker process gets it."""
    import cloudpickle

    try:
        copied: Callable[..., Any] = cloudpickle.loads(cloudpickle.dumps(function))
    # whatever a value's own way to be pickled raises
    except Exception as error:
        raise InvalidTypeError(
            f"callback={function!r} holds what other processes cannot get: {error}; locks, open "
            "files and the like must be made inside the callback, when it is called"
        ) from error
    return copied


def name_of(function: Callable[..., Any] | None) -> str | None:
    """Say what a callback is called, so that samples tell that there was one."""
    if function is None:
        return None
    return str(getattr(function, "__qualname__", type(function).__name__))


# by the hash of a callback after its calls, the one before
_BEFORE: dict[str, str] = {}
# their pickles have pointers
_KD_TREES = {("scipy.spatial._kdtree", "KDTree"), ("scipy.spatial._ckdtree", "cKDTree")}
_SIMPLE = {type(None), str, bool, int, float, complex}
# the last is there once an object of the class was pickled
_OF_EVERY_CLASS = {"__dict__", "__weakref__", "__module__", "__firstlineno__", "__slotnames__"}
_VARIADIC = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS
_OF_GLOBALS = {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"}
_STDLIB = Path(sysconfig.get_path("stdlib"))


def _hash(function: Callable[..., Any]) -> str:
    """Hash a callback as it is now."""
    return hashlib.sha256(_Canonical().text(function).encode()).hexdigest()


class _Canonical:
    """Writes values as tuples and texts that are the same in every process."""

    def __init__(self, seen: Mapping[int, tuple[int, Any]] | None = None) -> None:
        # by id, with the value itself, so that no id is used again meanwhile
        self._seen = dict(seen or {})
        self._left: list[Any] = []

    def text(self, function: Any) -> str:
        """Describe a callback, and one after the other all that it leads to, however deep."""
        told = [self.of(function)]
        for value in self._left:  # grows meanwhile
            told.append(self._described(value, whole=value is function))
        return repr(told)

    def of(self, value: Any) -> Any:
        """Describe a value; what may lead to others, or to itself, by its number."""
        # of exactly these classes; others may have attributes and methods of their own
        if type(value) in _SIMPLE:
            return repr(value)
        if type(value) is bytes:
            return "bytes", hashlib.sha256(value).hexdigest()
        if type(value) is tuple:
            return "tuple", self._each(value)
        if type(value) in (set, frozenset):
            # each by itself, so that nothing depends on the order in which they come
            return "set", sorted(_Canonical(self._seen).text(v) for v in value)
        if isinstance(value, types.CodeType):
            names = (value.co_names, value.co_varnames, value.co_freevars)
            counts = (value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount)
            called = (*counts, value.co_flags & _VARIADIC)
            return "code", value.co_code, self._each(value.co_consts), names, called
        if id(value) not in self._seen:
            self._seen[id(value)] = (len(self._seen), value)
            self._left.append(value)
        return "number", self._seen[id(value)][0]

    def _each(self, values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(self.of(value) for value in values)

    def _described(self, value: Any, whole: bool) -> Any:
        """A function's closure and globals count too where it is the callback or not installed."""
        if isinstance(value, types.FunctionType):
            return self._of_function(value, whole or not _installed(value))
        if isinstance(value, type):
            return self._of_class(value)
        return "object", self._each((type(value), *_parts(value)))

    def _of_function(self, function: types.FunctionType, whole: bool) -> Any:
        code = function.__code__
        parts: list[Any] = [code, function.__defaults__, function.__kwdefaults__]
        if whole:
            cells = map(_content, function.__closure__ or ())
            closure = dict(zip(code.co_freevars, cells, strict=True))
            parts.append(_named(code, function.__globals__, closure))
            parts.append({n: v for n, v in vars(function).items() if n != "__wrapped__"})
        return "function", self._each(parts)

    def _of_class(self, kind: type) -> Any:
        if _installed(kind) or _is_compiled(_origin(kind.__module__)):
            return "named", kind.__module__, kind.__qualname__
        members = sorted((n, v) for n, v in vars(kind).items() if n not in _OF_EVERY_CLASS)
        return "class", kind.__qualname__, self._each(kind.__bases__), self._each(members)


def _parts(value: Any) -> tuple[Any, ...]:
    """Take an object apart; its class tells the rest."""
    kind = type(value)
    if kind is list:
        return tuple(value)
    if kind is dict:
        return tuple(value.items())
    if isinstance(value, set | frozenset):
        return frozenset(value), value.__getstate__()  # its pickle has them in any order
    exact = kind in (np.ndarray, np.memmap) or isinstance(value, np.generic)
    if exact and not value.dtype.hasobject:
        return (hash_of(np.asarray(value)),)
    if value is np.random.mtrand._rand:
        return ("numpy.random",)  # seeded anew by each process
    if kind is types.MappingProxyType:
        return (dict(value),)
    if kind.__module__ == "torch.storage":
        return _parts_of_storage(value)
    if (kind.__module__, kind.__name__) in _KD_TREES:
        return value.data, value.indices, value.leafsize, value.boxsize
    if isinstance(value, types.ModuleType):
        return (value.__name__,)
    if isinstance(value, types.MethodType):
        return value.__self__, value.__func__
    if isinstance(value, staticmethod | classmethod):
        return (value.__func__,)
    if isinstance(value, property):
        return value.fget, value.fset, value.fdel
    if isinstance(value, functools._lru_cache_wrapper):
        return (value.__wrapped__,)
    # the pickles of these differ between processes
    if isinstance(value, types.GetSetDescriptorType):
        return value.__objclass__, value.__name__
    if isinstance(value, TypeVar):
        return value.__name__, value.__bound__, value.__constraints__
    return _reduced(value)


def _parts_of_storage(storage: Any) -> tuple[Any, ...]:
    """Take apart what holds a tensor's cells, whose pickle tells where they lie, too."""
    torch = sys.modules["torch"]
    # its public way to them warns
    untyped = getattr(storage, "_untyped_storage", storage).cpu()
    cells = torch.empty(0, dtype=torch.uint8).set_(untyped)
    return str(getattr(storage, "dtype", None)), hash_of(cells.numpy())


def _reduced(value: Any) -> tuple[Any, ...]:
    """Take an object apart as to pickle it."""
    reduce = copyreg.dispatch_table.get(type(value))
    # whatever a value's own way to be pickled raises
    with contextlib.suppress(Exception):
        found = value.__reduce_ex__(4) if reduce is None else reduce(value)
        if isinstance(found, tuple):  # and not the name of a global, in whatever module
            return tuple(list(part) if isinstance(part, Iterator) else part for part in found)
    return (_pickled(value),)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _named(
    code: types.CodeType, known: Mapping[str, Any], closure: Mapping[str, Any]
) -> dict[str, Any]:
    """Find what names in code stand for: also attributes of modules of the user's."""
    of_globals, names = _names(code)
    found: dict[str, Any] = {}
    modules: set[str] = set()
    left = [("globals", known, of_globals), ("closure", closure, set(closure))]
    for space, held, wanted in left:  # grows meanwhile
        for name in sorted(wanted & set(held)):
            value = found[f"{space}.{name}"] = held[name]
            module = value.__name__ if isinstance(value, types.ModuleType) else None
            if module is not None and module not in modules and not _is_library(module):
                modules.add(module)
                left.append((f"module {module}", vars(value), names))
    return found


def _installed(value: Any) -> bool:
    """Whether an installed library holds it under its name."""
    module = getattr(value, "__module__", None)
    if not isinstance(module, str) or not _is_library(module):
        return False
    found: Any = sys.modules[module]
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value


def _is_library(module: str) -> bool:
    """Whether a module is Python's own, installed or compiled, and not a script of the user's."""
    origin = _origin(module)
    if origin is None or module == "__main__":
        return False
    installed = {"site-packages", "dist-packages"} & set(origin.parts)
    return _is_compiled(origin) or bool(installed) or _STDLIB in origin.parents


def _is_compiled(origin: Path | None) -> bool:
    return origin is not None and origin.suffix != ".py"


def _origin(module: str) -> Path | None:
    """File of a module; other words of one that Python has built in."""
    spec = getattr(sys.modules.get(module), "__spec__", None)
    return Path(spec.origin) if spec is not None and spec.origin else None


def _pickled(value: Any) -> str | None:
    """Hash the pickle of a value; None of one that has none, as a module of the user's may hold."""
    import cloudpickle

    try:
        return hashlib.sha256(cloudpickle.dumps(value)).hexdigest()
    # whatever a value's own way to be pickled raises
    except Exception:
        return None


def _names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Names of globals that code looks up, and all names in it: of attributes, too."""
    of_globals = {i.argval for i in dis.get_instructions(code) if i.opname in _OF_GLOBALS}
    names = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more_globals, more = _names(inner)
            of_globals |= more_globals
            names |= more
    return of_globals, names
