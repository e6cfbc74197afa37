"""The page of all commands gets what their own --help says."""

from __future__ import annotations

import importlib
from typing import Any

import click
import typer


def on_page_markdown(markdown: str, page: Any, **kwargs: Any) -> str:
    return f"{markdown}\n{commands()}" if page.file.src_uri == "reference/cli.md" else markdown


def commands() -> str:
    main = importlib.import_module("symcomm.cli.main")
    parts = []
    for name, (module, line) in main.LAZY_COMMANDS.items():
        command = typer.main.get_command(importlib.import_module(module).app)
        parts.append(f"## symcomm {name}\n\n{line}\n")
        parts += describe(command, f"symcomm {name}")
    return "\n".join(parts)


def describe(command: Any, path: str) -> list[str]:
    settings = {"terminal_width": 110, "max_content_width": 110}
    with command.make_context(path, [], resilient_parsing=True, **settings) as context:
        found = [f"```text\n{click.unstyle(command.get_help(context)).rstrip()}\n```\n"]
        for name in command.list_commands(context) if hasattr(command, "list_commands") else []:
            found.append(f"### {path} {name}\n")
            found += describe(command.get_command(context, name), f"{path} {name}")
    return found
