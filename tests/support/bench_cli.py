"""symcomm bench within this process."""

from __future__ import annotations

from typer.testing import CliRunner

from symcomm.cli import bench, command


def cli(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(bench.app, list(args))
    return result.exit_code, result.output


def refused(*args: str) -> str:
    code, output = cli(*args)
    assert code == command.REFUSED, output
    assert output.count("\n") == 1, output
    return output
