"""``symcomm version``: what a bug report needs. Imports no torch."""

from __future__ import annotations

import platform
import sys

import typer

import symcomm
from symcomm.cli.command import Command
from symcomm.observe.health.bits import version_of

app = typer.Typer(rich_markup_mode=None, add_completion=False)


def core_line() -> str:
    """Where the C core is and which Python ABI it was built for, or why it cannot be loaded."""
    try:
        from symcomm._core import native
    except ImportError as error:
        return f"cannot be loaded ({error}); build it with `python setup.py build_ext --inplace`"
    path = str(native.__file__)
    stable = ".abi3." in path
    return f"{path} ({'abi3: any Python from 3.10 on' if stable else 'for this Python only'})"


@app.command(name="version", cls=Command)
def version() -> None:
    """Say which Symcomm, Python, C core and torch this is.

    \b
    Example:
      symcomm version
    """
    typer.echo(f"symcomm {symcomm.__version__}")
    typer.echo(f"python  {platform.python_version()} ({sys.executable})")
    typer.echo(f"system  {platform.system()} {platform.release()} {platform.machine()}")
    typer.echo(f"C core  {core_line()}")
    typer.echo(f"torch   {version_of('torch')}")
