"""What all subcommands share: how their help looks, and how they refuse: one sentence on stderr, and exit status 2.

This file knows Typer's exceptions by name, because they come from Click or from Typer's copy of it."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.core import TyperCommand

from symcomm import errors

# 1 is a finding: `trace` saw something wrong, `doctor` a machine that is not fit, `bench` a side that stood still
LATE, REFUSED, INTERRUPTED = 1, 2, 130
UsageError: Any = typer.BadParameter.__mro__[1]


class Command(TyperCommand):
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param for param in self.params if param.param_type_name == "argument"]
        return ["[OPTIONS]", *map(_usage_of, arguments)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for kind, title in (("argument", "Arguments"), ("option", "Options")):
            params = [param for param in self.get_params(ctx) if param.param_type_name == kind]
            found = [(param, record) for param in params if (record := param.get_help_record(ctx))]
            if found:
                with formatter.section(title):
                    formatter.write_dl([(_label(param, record[0]), record[1]) for param, record in found])

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given, call = list(args), f"symcomm {self.name}"
        with one_sentence(call):
            try:
                return super().parse_args(ctx, args)
            except UsageError as error:
                raise reword(error, call, ctx, given) from None

    def invoke(self, ctx: Any) -> Any:
        with one_sentence(f"symcomm {self.name}"):
            return super().invoke(ctx)


@contextlib.contextmanager
def one_sentence(call: str) -> Iterator[None]:
    """Turns what is raised inside into a sentence that begins with ``call``, and an exit status."""
    try:
        yield
    except errors.SymcommError as error:
        words = str(error)
        typer.echo(words if words.startswith(call) else f"{call}: {words}", err=True)
        raise typer.Exit(LATE if isinstance(error, errors.DeadlineError) else REFUSED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def choices(*names: str) -> Callable[[str], list[str]]:
    """A completer for a shell; values may be a list with commas."""

    def complete(incomplete: str) -> list[str]:
        given, comma, last = incomplete.rpartition(",")
        return [f"{given}{comma}{name}" for name in names if name.startswith(last)]

    return complete


def argument(metavar: str, words: str, *values: str) -> Any:
    """A positional argument: its name, its help, and what a shell completes it to."""
    return typer.Argument(metavar=metavar, help=words, **_shown(words, values))


def option(names: str, metavar: str, words: str, *values: str) -> Any:
    """An option that takes a value, likewise."""
    return typer.Option(*names.split(), metavar=metavar, help=words, **_shown(words, values))


def flag(names: str, words: str) -> Any:
    return typer.Option(*names.split(), help=words, **_shown(words))


def _shown(words: str, values: tuple[str, ...] = ()) -> dict[str, Any]:
    """Shows a default unless the help words it."""
    return {"show_default": "[default:" not in words, "autocompletion": choices(*values) if values else None}


def _label(param: Any, words: str) -> str:
    """An argument has no type beside its name."""
    return param.metavar if param.param_type_name == "argument" else words


def _usage_of(argument: Any) -> str:
    name = argument.metavar if argument.required else f"[{argument.metavar}]"
    return name if argument.nargs == 1 else f"{name}..."


def reword(error: Any, call: str, ctx: Any, given: list[str]) -> errors.BadArgumentError:
    """Typer's refusal of ``given``, in our form."""
    usage = f"`{call} {' '.join(ctx.command.collect_usage_pieces(ctx))}`"
    kind = type(error).__name__
    if kind == "MissingParameter":
        return errors.BadArgumentError(f"{call}: {error.param.metavar} is missing; say {usage}.")
    if kind == "NoSuchOption":
        return _unknown_option(error.option_name, call, ctx)
    if kind == "BadOptionUsage":
        return _bad_value(error.option_name, call, ctx)
    values, extra, _ = ctx.command.make_parser(ctx).parse_args(list(given))
    if kind == "BadParameter":
        allowed = "a whole number" if "valid int" in error.message else "a number"  # int or integer, by version
        return errors.bad_argument(call, error.param.opts[-1], values.get(error.param.name), allowed)
    return errors.BadArgumentError(f"{call}: {extra[0]!r} is one argument too many; say {usage}.")


def _unknown_option(name: str, call: str, ctx: Any) -> errors.BadArgumentError:
    params = ctx.command.get_params(ctx)
    known = [option for param in params for option in (*param.opts, *param.secondary_opts) if option.startswith("--")]
    near = difflib.get_close_matches(name.lstrip("-"), [option[2:] for option in known], n=1)
    fix = f"did you mean --{near[0]}?" if near else f"`{call} --help` lists them."
    return errors.BadArgumentError(f"{call}: there is no option {name}; {fix}")


def _bad_value(name: str, call: str, ctx: Any) -> errors.BadArgumentError:
    param = next(param for param in ctx.command.get_params(ctx) if name in (*param.opts, *param.secondary_opts))
    if param.is_flag:
        return errors.BadArgumentError(f"{call}: {name} takes no value; say {name} alone.")
    return errors.BadArgumentError(f"{call}: {name} has no value; say `{name} {param.metavar}`.")
