"""symcomm bench within this process."""

from __future__ import annotations

from typer.testing import CliRunner

from symcomm.cli import bench, refusals


def cli(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(bench.app, list(args))
    return result.exit_code, result.output


def refused(*args: str) -> str:
    code, output = cli(*args)
    assert code in (refusals.BAD_USAGE, refusals.FAILED), output
    assert output.count("\n") == 1, output
    return output
