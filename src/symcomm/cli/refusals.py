"""How commands refuse: an error of ours is one line on stderr and an exit code."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from symcomm import errors

__all__ = ["refusals_in_words"]

BAD_USAGE, FAILED, INTERRUPTED = 2, 1, 130


@contextlib.contextmanager
def refusals_in_words() -> Iterator[None]:
    try:
        yield
    except errors.SymcommError as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(BAD_USAGE if isinstance(error, errors.BadArgumentError) else FAILED) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None
