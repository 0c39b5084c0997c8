"""Objects made from their names: ``my_models:UNet``, ``AdamW``, ``{class: MaskedLoss, ...}``.

A name can come from a file that somebody else wrote. So nothing is imported or called by its name
before `Names` has allowed it.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ml4cube.cli.configuration import check_known, near
from ml4cube.core.display import one_line
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, listed


class Place(NamedTuple):
    """An argument whose values are made from names."""

    # Where a name without a module is looked up.
    modules: tuple[str, ...]
    # Of which classes those are that a received file may name: none that writes a file, since one
    # whose place and content are chosen by others may be executed later.
    bases: tuple[str, ...]


_LOSSES = "ml4cube.training.losses"
_CALLBACKS = "ml4cube.training.callbacks"
_STOPPING = f"{_CALLBACKS}:EarlyStopping"

PLACES: dict[str, Place] = {
    "model": Place((), ("torch.nn:Module",)),
    "callback": Place((), ()),
    "loss": Place(("torch.nn", _LOSSES), ("torch.nn:Module", f"{_LOSSES}:MaskedLoss")),
    "optimizer": Place(("torch.optim",), ("torch.optim:Optimizer",)),
    "scheduler": Place(
        ("torch.optim.lr_scheduler", "ml4cube.training.schedulers"),
        ("torch.optim.lr_scheduler:LRScheduler",),
    ),
    "metrics": Place(
        ("torch.nn", _LOSSES, "ml4cube.evaluation.metrics"),
        ("torch.nn:Module", f"{_LOSSES}:MaskedLoss", "ml4cube.evaluation.metrics:Metric"),
    ),
    "early_stopping": Place((_CALLBACKS,), (_STOPPING,)),
    "callbacks": Place(
        (_CALLBACKS,), (_STOPPING, f"{_CALLBACKS}:Progress", f"{_CALLBACKS}:RankReport")
    ),
    "loggers": Place(("ml4cube.training.loggers",), ()),
    "loader.augment": Place(("ml4cube.datasets.pytorch",), ("ml4cube.loading.augmentation:_Turn",)),
    "loader.callback": Place((), ()),
}
# Whose classes a received file may name.
_PACKAGES = ("torch.nn", "torch.optim", "ml4cube")


@dataclass(frozen=True)
class Names:
    """The names that a call may import: those that the user typed, and those of safe classes.

    Safe are classes of torch.nn, torch.optim and ml4cube in the place of their kind, such as an
    optimizer as the optimizer, that write no files.
    """

    typed: frozenset[str] = frozenset()
    # With ``--trust``: every name may be imported.
    trusts: bool = False

    def make(self, argument: str, recipe: Any, *first: Any, call: bool = False) -> Any:
        """Make what a recipe describes; anything that is no recipe is returned as it is.

        A recipe is a name, or a mapping with the name as ``class`` and arguments. A class is called
        with `first` and the arguments. A function is too if `call`, else it is the result itself,
        with the arguments bound. Lists and other mappings hold recipes.
        """
        return _Making(self, argument, recipe).make(recipe, first, call)

    def check(self, argument: str, name: str, arguments: Mapping[str, Any], whole: Any) -> None:
        """Refuse a name of a received file that is not safe, before it is imported."""
        if self.trusts or name in self.typed or _is_safe(argument, name):
            return
        bound = ", ".join(f"{key}={one_line(value)}" for key, value in arguments.items())
        raise InvalidValueError(
            f"{argument} is {name}({bound}) in a received file, and no class of torch.nn, "
            "torch.optim or ml4cube that writes no files; it was neither imported nor called. If "
            f"you trust it, add {_option(argument, whole)}, or --trust"
        )


@dataclass(frozen=True)
class _Making:
    """The making of one argument from its recipe."""

    names: Names
    argument: str
    whole: Any

    def make(self, recipe: Any, first: tuple[Any, ...] = (), call: bool = False) -> Any:
        if isinstance(recipe, str):
            return self._call(recipe, {}, first, call)
        if isinstance(recipe, Mapping) and "class" in recipe:
            arguments = {name: self._inside(v) for name, v in recipe.items() if name != "class"}
            return self._call(recipe["class"], arguments, first, call)
        if isinstance(recipe, Mapping):
            if call:
                raise InvalidValueError(
                    f"{self.argument} needs the key 'class', a name, got {recipe!r}"
                )
            return {name: self.make(value) for name, value in recipe.items()}
        if isinstance(recipe, list | tuple):
            return [self.make(value) for value in recipe]
        return recipe

    def _inside(self, value: Any) -> Any:
        """Make the recipes inside arguments, where texts are texts."""
        if isinstance(value, Mapping):
            if "class" in value:
                return self.make(value)
            return {name: self._inside(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [self._inside(inner) for inner in value]
        return value

    def _call(
        self, name: Any, arguments: dict[str, Any], first: tuple[Any, ...], call: bool
    ) -> Any:
        if not isinstance(name, str):
            raise InvalidTypeError(
                f"{self.argument} must be the name of a class or function, got {name!r}"
            )
        self.names.check(self.argument, name, arguments, self.whole)
        named = _find(self.argument, name)
        _check_arguments(f"{self.argument} {name!r}", named, arguments, len(first))
        if isinstance(named, type) or call:
            try:
                return named(*first, **arguments)
            except (TypeError, ValueError) as error:
                raise InvalidValueError(f"{self.argument} {name!r}: {error}") from error
        if arguments:
            return functools.partial(named, **arguments)
        return named


def _option(argument: str, value: Any) -> str:
    """Return the option, quoted for a shell, that gives an argument a value."""
    # which is YAML
    text = value
    if not isinstance(value, str):
        text = json.dumps(value)
    if "." in argument:
        return f"--set {shlex.quote(f'{argument}={text}')}"
    return f"--{argument.replace('_', '-')} {shlex.quote(text)}"


def _is_safe(argument: str, name: str) -> bool:
    """Return True for a class that a received file may name; imports no other module."""
    module, colon, attribute = name.partition(":")
    is_public = attribute.isidentifier() and not any(
        part.startswith("_") for part in (*module.split("."), attribute)
    )
    if colon and not (is_public and _is_of_safe_package(module)):
        return False
    named = _find(argument, name)
    # modules also show what they only import
    is_class = isinstance(named, type) and _is_of_safe_package(named.__module__)
    return is_class and issubclass(named, tuple(map(load, PLACES[argument].bases)))


def _is_of_safe_package(module: str) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in _PACKAGES)


def load(path: str) -> Any:
    """Return what ``module:name`` names in an installed module."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise InvalidValueError(f"a name must be module:name, such as my_models:UNet, got {path!r}")
    try:
        named: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module was found, and lacks another
        raise InvalidValueError(
            f"{path!r}: there is no module {module!r}, neither installed nor in {os.getcwd()}"
        ) from None
    origin = f"{module!r} ({getattr(named, '__file__', None) or 'built in'})"
    for part in name.split("."):
        if not hasattr(named, part):
            hint = near(part, dir(named), "give a name that it has")
            raise InvalidValueError(f"{path!r}: module {origin} has no {part!r}; {hint}")
        named = getattr(named, part)
    return named


def _load_of_user(path: str) -> Any:
    """Return what ``module:name`` names, in a module of the working directory or an installed one.

    The directory is searched last, so that a pandas.py in it is not taken for pandas.
    """
    module, colon, _ = path.partition(":")
    if colon and not _is_of_safe_package(module) and os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    return load(path)


def _find(argument: str, name: str) -> Any:
    """Return the class or function of a name."""
    modules = PLACES[argument].modules
    if ":" in name or not modules:
        named = _load_of_user(name)
    else:
        members = {n: v for module in modules for n, v in _members(module)}
        if name not in members:
            hint = near(name, members, "or give module:name")
            raise InvalidValueError(
                f"{argument} must be a class or function of {listed(modules, 'or')}, got {name!r}; "
                f"{hint}"
            )
        named = members[name]
    if not callable(named):
        raise InvalidTypeError(f"{argument} must be a class or function, {name!r} is {named!r}")
    return named


def _members(module: str) -> list[tuple[str, Any]]:
    """Return the public classes and functions of a module, those that it only imports too."""
    members = inspect.getmembers(importlib.import_module(module))
    return [
        (name, member)
        for name, member in members
        if not name.startswith("_") and (inspect.isclass(member) or inspect.isroutine(member))
    ]


def _check_arguments(owner: str, target: Any, arguments: Mapping[str, Any], n_first: int) -> None:
    """Refuse arguments that a class or function does not take, and suggest those that are near."""
    try:
        parameters = list(inspect.signature(target).parameters.values())
    except ValueError:  # of C
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return
    check_known(owner, arguments, [parameter.name for parameter in parameters[n_first:]])


def texts_in(value: Any) -> set[str]:
    """Return all texts in a value of YAML."""
    if isinstance(value, str):
        return {value}
    if isinstance(value, Mapping):
        value = [*value.values()]
    if not isinstance(value, list):
        return set()
    return set().union(*map(texts_in, value))
