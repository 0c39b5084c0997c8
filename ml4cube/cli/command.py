"""`Command`: a function, and public callables whose arguments it passes on, as a click command."""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import click

import ml4cube
from ml4cube.cli.arguments import Argument, arguments_of, summary_of
from ml4cube.cli.by_name import PLACES, Names, load, texts_in
from ml4cube.cli.configuration import (
    as_yaml,
    check_known,
    merged,
    read_file,
    read_value,
)
from ml4cube.cli.files import MADE_BY, hash_line, is_copy, write_texts
from ml4cube.cli.inputs import open_cube
from ml4cube.cli.limits import memory_limit
from ml4cube.cli.task import FAILED, WRONG, Keep, Report, Task
from ml4cube.core.display import printable
from ml4cube.core.errors import (
    CubeError,
    InvalidTypeError,
    InvalidValueError,
    StoreError,
    StoreExistsError,
    check_choice,
)
from ml4cube.cube.engine import active_cluster

_NO_RESULT: Mapping[str, str] = {}
_COMMON = {
    "config": "YAML file of arguments; options and --set have precedence.",
    "set": "One argument, or one key of it: --set overlap.lat=0.5. May be repeated.",
    "print_config": "Write the complete configuration to stdout, and do nothing.",
    "dry_run": "Write the plan to stdout; make nothing, and check only what the plan needs.",
    "json": "Report in JSON.",
    "debug": "Show the traceback of an error.",
}
_SCHEDULER = (
    "Address of a dask scheduler, on whose workers cubes are read, such as tcp://HOST:8786."
)
_TRUST = "Import and call also what a file names that a command wrote: of a run, of a store."
# Arguments that a command makes for its function: the names of objects that it may import, and
# `open_cube` with the arguments of the call.
_NAMES, _OPEN_CUBE = "names", "open_cube"


class Command(click.Command):
    """A command that calls a function with its arguments, and with those of public callables.

    The callables are ``module:name``, imported when the arguments are needed. If there are several,
    they have names, and the argument `choice` of the function says which one is meant.
    """

    def __init__(
        self,
        function: Callable[..., Task],
        calls: Mapping[str, str] | str | None = None,
        *,
        without: Sequence[str] = (),
        choice: str | None = None,
        epilog: str | None = None,
    ) -> None:
        summary = summary_of(function)
        super().__init__(
            function.__name__, help=summary, short_help=summary.splitlines()[0], epilog=epilog
        )
        self._function, self._choice = function, choice
        self._calls = {"": calls} if isinstance(calls, str) else dict(calls or {})
        own = inspect.signature(function).parameters.values()
        self._positional = [p.name for p in own if p.kind is inspect.Parameter.POSITIONAL_ONLY]
        self._made = {_NAMES, _OPEN_CUBE} & {p.name for p in own}
        self._without = {*without}

    def arguments(self, chosen: str | None = None) -> dict[str, Argument]:
        """Return all arguments, or those for one of the callables."""
        functions: list[Callable[..., Any]] = [self._function]
        if _OPEN_CUBE in self._made:
            functions.append(open_cube)
        functions += [load(path) for name, path in self._calls.items() if chosen in (None, name)]
        arguments: dict[str, Argument] = {}
        for function in functions:
            for name, argument in arguments_of(function).items():
                arguments.setdefault(name, argument)
        return {n: a for n, a in arguments.items() if n not in self._without | self._made}

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options; the callables are imported only now."""
        if not self.params:
            try:
                arguments = self.arguments().values()
            except ImportError as error:  # without torch
                raise click.ClickException(str(error)) from error
            self.params = [*map(self._parameter, arguments), *_common_options()]
            if _NAMES in self._made:
                self.params.append(click.Option(["--trust"], is_flag=True, help=_TRUST))
            if _OPEN_CUBE in self._made:
                option = click.Option(["--scheduler"], metavar="ADDRESS", help=_SCHEDULER)
                self.params.append(option)
        return super().get_params(ctx)

    def _parameter(self, argument: Argument) -> click.Parameter:
        if argument.name in self._positional:
            # required ones too may be given in a file
            metavar = (
                argument.name.upper() if argument.is_required else f"[{argument.name.upper()}]"
            )
            return click.Argument([argument.name], required=False, metavar=metavar)
        default = "required"
        if not argument.is_required:
            default = f"default: {_shown(argument.default)}"
        kind = re.sub(", (optional|default .*)$", "", argument.kind)
        kind = "" if argument.is_flag else f"{kind}; "
        option = f"--{argument.name.replace('_', '-')}"
        if argument.is_flag:
            option += f"/--no-{argument.name.replace('_', '-')}"
        return click.Option(
            [option, argument.name],
            default=None,  # not given
            is_flag=argument.is_flag,
            metavar=None if argument.is_flag else "VALUE",
            help=f"{argument.text} [{kind}{default}{self._owners(argument.name)}]",
        )

    def _owners(self, name: str) -> str:
        """Say which of the callables have an argument, unless all or none have it."""
        owners = [key for key, path in self._calls.items() if name in arguments_of(load(path))]
        if 0 < len(owners) < len(self._calls):
            return f"; for {', '.join(owners)}"
        return ""

    def invoke(self, ctx: click.Context) -> int:
        """Run the command and return its exit code; an error is one line on stderr."""
        common = {name: ctx.params.pop(name) for name in _COMMON}
        common["trust"] = ctx.params.pop("trust", False)
        scheduler = ctx.params.pop("scheduler", None)
        wrong = InvalidTypeError, InvalidValueError, StoreExistsError
        # what cannot be opened before the work was asked wrongly too
        asked_wrongly: tuple[type[Exception], ...] = (*wrong, StoreError)
        try:
            with _plain_warnings(), active_cluster(scheduler):
                work = self._prepare(ctx.params, common)
                asked_wrongly = wrong
                return work()
        except Exception as error:
            if common["debug"]:
                raise
            said = f"{_described(error)}{memory_limit(error)}"
            click.echo(f"{ctx.command_path}: {said}", err=True)
            if isinstance(error, asked_wrongly):
                return WRONG
            return FAILED

    def _prepare(self, options: Mapping[str, Any], common: Mapping[str, Any]) -> Callable[[], int]:
        """Check all arguments, and return the work, whose result is the exit code."""
        file = {}
        if common["config"]:
            file = read_file(common["config"])
        chosen, arguments = self._merge(options, file, common["set"])
        if common["print_config"]:
            return partial(_show, self._as_yaml(chosen, arguments))
        lacking = [n for n, a in arguments.items() if a.is_required and chosen.get(n) is None]
        if lacking:
            raise InvalidValueError(f"{self.name} needs {', '.join(lacking)}; see --help")
        passed = dict(chosen)
        positional = [passed.pop(n, arguments[n].default) for n in self._positional]
        if _NAMES in self._made:
            passed[_NAMES] = self._names(options, file, common)
        if _OPEN_CUBE in self._made:
            of_cube = passed.keys() & arguments_of(open_cube)
            passed[_OPEN_CUBE] = partial(open_cube, **{name: passed.pop(name) for name in of_cube})
        task = self._function(*positional, **passed)
        chosen |= dict(zip(self._positional, positional, strict=True))
        return partial(_run, task, partial(self._keep, chosen, arguments), common)

    def _keep(
        self,
        chosen: Mapping[str, Any],
        arguments: Mapping[str, Argument],
        path: str,
        result: Mapping[str, str] = _NO_RESULT,
        /,
        **replaced: Any,
    ) -> None:
        """Write the arguments of a call to a file, and texts that it made to others."""
        # who uses it again has not asked to replace anything
        made = {n: v for n, v in chosen.items() if n not in ("overwrite", "append")}
        if is_main():
            text = self._as_yaml({**made, **replaced}, arguments)
            hashes = [f"{hash_line(out, content)}\n" for out, content in result.items()]
            settings = f"{MADE_BY} {ml4cube.__version__}\n{text}{''.join(hashes)}"
            write_texts({path: settings, **result})

    def _names(
        self, options: Mapping[str, Any], file: Mapping[str, Any], common: Mapping[str, Any]
    ) -> Names:
        """Return the names that may be imported: those of the options, and of the user's file."""
        is_typed = common["config"] and not is_copy(common["config"])
        typed, _ = self._merge(options, file if is_typed else {}, common["set"])
        return Names(frozenset(texts_in(typed)), common["trust"])

    def _merge(
        self, options: Mapping[str, Any], file: Mapping[str, Any], settings: Sequence[str]
    ) -> tuple[dict[str, Any], dict[str, Argument]]:
        """Return the values that are given, and all arguments that apply."""
        all_arguments = self.arguments()
        read = {name: value for name, value in options.items() if value is not None}
        for name, value in read.items():
            if isinstance(value, str) and not all_arguments[name].is_path:
                read[name] = read_value(name, value)
        settings_of_call = merged(file, read, settings, PLACES)
        chosen = None
        if self._choice is not None:
            chosen = settings_of_call.get(
                self._choice, arguments_of(self._function)[self._choice].default
            )
            check_choice(self._choice, chosen, self._calls)
        arguments = self.arguments(chosen)
        owner = self.name if chosen is None else f"{self.name} with {self._choice}={chosen!r}"
        check_known(str(owner), settings_of_call, arguments)
        for name, value in settings_of_call.items():
            if arguments[name].is_path and not isinstance(value, str | None):
                raise InvalidTypeError(f"{name} must be a path or URL, got {value!r}")
        return settings_of_call, arguments

    def _as_yaml(self, settings: Mapping[str, Any], arguments: Mapping[str, Argument]) -> str:
        defaults = dict.fromkeys(arguments)
        for name, argument in arguments.items():
            if not argument.is_required:
                defaults[name] = argument.default
        kinds = {n: f"{a.kind}{'; required' * a.is_required}" for n, a in arguments.items()}
        return as_yaml(str(self.name), {**defaults, **settings}, kinds)


def _show(text: str) -> int:
    click.echo(text, nl=False)
    return 0


def _run(task: Task, keep: Keep, common: Mapping[str, Any]) -> int:
    """Do the work of a task, or plan it; write what it reports, and return the exit code."""
    make: Callable[[], Report] = partial(task.run, keep)
    if common["dry_run"]:
        make = task.plan
    report = make()
    text = report.text
    if common["json"]:
        text = report.as_json()
    if is_main() and text:
        click.echo(printable(text))
    return report.exit_code


def _common_options() -> Iterator[click.Option]:
    for name, text in _COMMON.items():
        option = f"--{name.replace('_', '-')}"
        if name == "config":
            yield click.Option([option, name], metavar="FILE", help=text)
        elif name == "set":
            yield click.Option([option, name], metavar="NAME=VALUE", multiple=True, help=text)
        else:
            yield click.Option([option, name], is_flag=True, help=text)


def _shown(default: Any) -> str:
    if default is None or default == ():
        return "none"
    return str(default)


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """Show each warning as one line on stderr."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_, **__: click.echo(
            f"warning: {_in_one_line(message)}", err=True
        )
        yield


def _described(error: Exception) -> str:
    """Return an error in one line; its type too, if it is none of ours."""
    text = _in_one_line(error)
    if isinstance(error, CubeError):
        return text
    return f"{type(error).__name__}: {text}"


def _in_one_line(text: object) -> str:
    return printable(" ".join(str(text).split()))


def is_main() -> bool:
    """Return True unless torchrun says that this process has another rank than 0."""
    return os.environ.get("RANK", "0") == "0"
