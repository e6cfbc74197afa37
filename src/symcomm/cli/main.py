"""The ``symcomm`` command: a table of subcommands, each loaded only when it is used."""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from symcomm import __version__, errors
from symcomm.cli.command import UsageError, one_sentence, reword

# name -> (module, one line for the list). A module has an ``app``, a Typer of one command or of several.
# One that is not installed is left out.
LAZY_COMMANDS = {
    "run": ("symcomm.cli.run", "Start a script as N ranks, with torchrun's environment variables."),
    "trace": ("symcomm.cli.trace", "Say what went wrong with a job, from its dumps or while it runs."),
    "demo": ("symcomm.cli.demo", "Several ranks at work on this machine, explained as they go."),
    "bench": ("symcomm.cli.bench", "Measure this machine."),
    "simulate": ("symcomm.cli.simulate", "What a collective would take on a cluster that is only described."),
    "top": ("symcomm.cli.top", "Watch a running job: a live page, or in the terminal."),
    "doctor": ("symcomm.cli.doctor", "Check this machine, and say what to change."),
    "bits": ("symcomm.cli.bits", "Hash the same sum over ranks, hosts, threads and processes."),
    "completion": ("symcomm.cli.completion", "Complete commands and options in your shell."),
    "version": ("symcomm.cli.version", "Say which Symcomm, Python, C core and torch this is."),
}


class LazyGroup(TyperGroup):
    """Lists commands from the table; imports one when it is about to run."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name, (module, _) in LAZY_COMMANDS.items() if importlib.util.find_spec(module)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Only a name and a line of help: what listings and completion ask for."""
        if cmd_name not in self.list_commands(ctx):
            return None
        return TyperCommand(cmd_name, short_help=LAZY_COMMANDS[cmd_name][1], rich_markup_mode=None)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given = list(args)
        with one_sentence("symcomm"):
            try:
                return super().parse_args(ctx, args)
            except UsageError as error:
                if not given:
                    raise  # which shows the help
                raise reword(error, "symcomm", ctx, given) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if not ctx.resilient_parsing and not args[0].startswith("-"):
            _check_command(args[0], self.list_commands(ctx))
        name, command, rest = super().resolve_command(ctx, args)
        if name is None or command is None:
            return name, command, rest
        module = importlib.import_module(LAZY_COMMANDS[name][0])
        loaded = typer.main.get_command(module.app)
        loaded.name = name
        return name, loaded, rest


def _check_command(name: str, known: list[str]) -> None:
    with one_sentence("symcomm"):
        if name.endswith(".py"):
            fix = f"a script is started with `symcomm run {name}`"
            raise errors.bad_argument("symcomm", "COMMAND", name, f"one of {', '.join(known)}", fix)
        if name not in known:
            raise errors.bad_choice("symcomm", "COMMAND", name, known)


app = typer.Typer(
    cls=LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"symcomm {__version__}")
        raise typer.Exit()


@app.callback()
def symcomm(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_say_version)
    ] = False,
) -> None:
    """PyTorch's communication layer on symmetric memory.

    \b
    Examples:
      symcomm run -n 4 train.py --lr 0.1   start a script as four ranks
      symcomm trace --live                 my job hangs: who is missing, and where it is
      symcomm run --help                   everything about a command
      symcomm completion --install         complete commands in your shell
    """


def main() -> None:
    if "_SYMCOMM_COMPLETE" in os.environ:
        importlib.import_module("typer.completion").completion_init()
    app(prog_name="symcomm")
