"""Objects made from their names: ``my_models:UNet``, ``AdamW``, ``{class: MaskedLoss, ...}``."""

from __future__ import annotations

import difflib
import functools
import importlib
import inspect
import os
import sys
from collections.abc import Mapping
from typing import Any

from ml4cube.cli.configuration import check_known
from ml4cube.core.errors import InvalidTypeError, InvalidValueError, listed

#: Arguments that are names, and the modules in which a name without a module is looked up.
MODULES: dict[str, tuple[str, ...]] = {
    "model": (),
    "callback": (),
    "loss": ("torch.nn", "ml4cube.training.losses"),
    "optimizer": ("torch.optim",),
    "scheduler": ("torch.optim.lr_scheduler", "ml4cube.training.schedulers"),
    "metrics": ("torch.nn", "ml4cube.training.losses", "ml4cube.evaluation.metrics"),
    "early_stopping": ("ml4cube.training.callbacks",),
    "callbacks": ("ml4cube.training.callbacks",),
    "loggers": ("ml4cube.training.loggers",),
    "augment": ("ml4cube.datasets.pytorch",),
}


def load(path: str) -> Any:
    """Return what ``module:name`` names; modules in the working directory can be imported."""
    module, _, name = path.partition(":")
    if not module or not name:
        raise InvalidValueError(f"a name must be module:name, such as my_models:UNet, got {path!r}")
    if (folder := os.getcwd()) not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the module was found, and lacks another
        raise InvalidValueError(
            f"{path!r}: there is no module {module!r}, neither in {folder} nor installed"
        ) from None
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=3)
            hint = f"; did you mean {listed(near, 'or')}?" if near else ""
            raise InvalidValueError(f"{path!r}: module {module!r} has no {part!r}{hint}")
        found = getattr(found, part)
    return found


def make(argument: str, recipe: Any, *first: Any, call: bool = False) -> Any:
    """Make what a recipe describes; anything that is no recipe is returned as it is.

    A recipe is a name, or a mapping with the name as ``class`` and arguments. A class is called
    with `first` and the arguments. A function is too if `call`, else it is the result itself, with
    the arguments bound. Lists and other mappings hold recipes.
    """
    if isinstance(recipe, str):
        return _made(argument, recipe, {}, first, call)
    if isinstance(recipe, Mapping) and "class" in recipe:
        arguments = {name: _nested(argument, v) for name, v in recipe.items() if name != "class"}
        return _made(argument, recipe["class"], arguments, first, call)
    if isinstance(recipe, Mapping):
        if call:
            raise InvalidValueError(f"{argument} needs the key 'class', a name, got {recipe!r}")
        return {name: make(argument, one) for name, one in recipe.items()}
    return [make(argument, one) for one in recipe] if isinstance(recipe, list | tuple) else recipe


def _nested(argument: str, value: Any) -> Any:
    """Make the recipes inside arguments, where texts are texts."""
    if isinstance(value, Mapping):
        if "class" in value:
            return make(argument, value)
        return {name: _nested(argument, one) for name, one in value.items()}
    return [_nested(argument, one) for one in value] if isinstance(value, list) else value


def _made(
    argument: str, name: Any, arguments: dict[str, Any], first: tuple[Any, ...], call: bool
) -> Any:
    found = _find(argument, name)
    _check_arguments(f"{argument} {name!r}", found, arguments, len(first))
    if isinstance(found, type) or call:
        return found(*first, **arguments)
    return functools.partial(found, **arguments) if arguments else found


def _find(argument: str, name: Any) -> Any:
    """Return the class or function of a name."""
    modules = MODULES[argument]
    if not isinstance(name, str):
        raise InvalidTypeError(f"{argument} must be the name of a class or function, got {name!r}")
    found: Any = None
    if ":" in name or not modules:
        found = load(name)
    else:
        known = {n: v for module in modules for n, v in _members(module)}
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3)
            hint = f"did you mean {listed(near, 'or')}?" if near else "or give module:name"
            raise InvalidValueError(
                f"{argument} must be a class or function of {listed(modules, 'or')}, got {name!r}; "
                f"{hint}"
            )
        found = known[name]
    if not callable(found):
        raise InvalidTypeError(f"{argument} must be a class or function, {name!r} is {found!r}")
    return found


def _members(module: str) -> list[tuple[str, Any]]:
    """Return the public classes and functions of a module, those that it only imports too."""
    members = inspect.getmembers(importlib.import_module(module))
    return [
        (name, member)
        for name, member in members
        if not name.startswith("_") and (inspect.isclass(member) or inspect.isroutine(member))
    ]


def _check_arguments(owner: str, found: Any, arguments: Mapping[str, Any], n_first: int) -> None:
    """Refuse arguments that a class or function does not take, and suggest those that are near."""
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except ValueError:  # of C
        return
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters):
        return
    check_known(owner, arguments, [parameter.name for parameter in parameters[n_first:]])
