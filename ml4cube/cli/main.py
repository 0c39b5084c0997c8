"""The commands, and the program that runs them."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

import ml4cube
from ml4cube.cli import cubes, doctor, inspection, predictions, rerun, runs
from ml4cube.cli.task import INTERRUPTED


class _Program(click.Group):
    """The group of all commands: exit codes, and errors in one line."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which they are used."""
        return list(self.commands)

    def main(self, *args: Any, **extra: Any) -> Any:
        """Run a command and exit with its code."""
        extra |= {"prog_name": "ml4cube", "standalone_mode": False}
        try:
            code = super().main(*args, **extra)
        except click.ClickException as error:
            click.echo(f"ml4cube: {' '.join(error.format_message().split())}", err=True)
            code = error.exit_code
        except click.Abort:
            click.echo("ml4cube: interrupted", err=True)
            code = INTERRUPTED
        sys.exit(code)


@click.group(
    cls=_Program,
    context_settings={"help_option_names": ["-h", "--help"]},
    invoke_without_command=True,
)
@click.version_option(ml4cube.__version__, prog_name="ml4cube")
@click.pass_context
def program(ctx: click.Context) -> None:
    """From a geospatial data cube to a trained model, and back to a cube.

    Options and YAML files have the names of the Python arguments; values are YAML, such as 0.5,
    '[t2m, precip]' or '{lat: 2, lon: 2}'. Defaults yield to --config, that to options, and these to
    --set. The complete configuration is stored beside what a command makes.

    Exit codes: 0 done, 1 failed, 2 asked wrongly, 3 nothing to do, 130 interrupted.
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


for _command in (
    inspection.INSPECT,
    cubes.SPLIT,
    cubes.STATS,
    cubes.SAMPLE,
    runs.TRAIN,
    predictions.PREDICT,
    predictions.EVALUATE,
    doctor.DOCTOR,
    rerun.RERUN,
):
    program.add_command(_command)


def main() -> None:
    """Run the command line of this process."""
    # worker processes would search the working directory first, too
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    program()
