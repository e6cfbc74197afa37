"""Usage lines, errors and examples of every subcommand: one form for all."""

from __future__ import annotations

import re
import shlex

import pytest
import typer

from symcomm.cli import main
from symcomm.cli.bench import COLLECTIVES, OTHERS
from symcomm.simulate.predict import COLLECTIVES as PREDICTED
from tests.support.command import symcomm

pytestmark = pytest.mark.without_torch

USAGE = {
    "run": "[OPTIONS] SCRIPT [ARGS]...", "trace": "[OPTIONS] [DIR]", "demo": "[OPTIONS]", "bench": "[OPTIONS] [WHAT]",
    "simulate": "[OPTIONS] [WHAT]", "top": "[OPTIONS] [JOB]",
    "doctor": "[OPTIONS]", "bits": "[OPTIONS]", "completion": "[OPTIONS] [SHELL]", "version": "[OPTIONS]",
}  # fmt: skip
# Examples that take a second or so. The others are parsed, and their choices looked up.
QUICK = r"symcomm (version|completion|doctor|run -n [24] |trace dumps|simulate (all_reduce|ddp))"


def load(name: str) -> typer.core.TyperCommand:
    group = typer.main.get_command(main.app)
    return group.resolve_command(group.make_context("symcomm", [name], resilient_parsing=True), [name])[1]


def examples(name: str) -> list[str]:
    """As written in the help, less the remarks that stand beside some."""
    listed = load(name).help.partition("Example")[2].partition("\n")[2].split("\n\n")[0]
    return [re.split(r" {2,}", line.strip())[0] for line in listed.splitlines()]


def commands_in(example: str) -> list[list[str]]:
    """The arguments of each ``symcomm`` that a line of shell runs."""
    return [shlex.split(part.partition("symcomm ")[2].removesuffix(')"')) for part in example.split(";")]


@pytest.mark.parametrize("name", main.LAZY_COMMANDS)
def test_usage_lines_are_in_the_form_that_people_know(name):
    shown = symcomm(name, "--help").stdout
    assert shown.startswith(f"Usage: symcomm {name} {USAGE[name]}\n\n")
    assert not re.search(r"<\w+>|\{|\[\[", shown), "types beside names, braces, doubled brackets"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("run", "SCRIPT is missing; say `symcomm run [OPTIONS] SCRIPT [ARGS]...`."),
        ("run -n", "-n has no value; say `-n N`."),
        ("run --no-pythn prog", "there is no option --no-pythn; did you mean --no-python?"),
        ("run --module=3 prog", "--module takes no value; say --module alone."),
        ("run --grace soon x.py", "--grace must be a number, got 'soon'."),
        ("bench --ranks=two", "--ranks must be a whole number, got 'two'."),
        ("bench all p2p", "'p2p' is one argument too many; say `symcomm bench [OPTIONS] [WHAT]`."),
        ("bench --nonsense", "there is no option --nonsense; `symcomm bench --help` lists them."),
        ("demo --steps 1.5", "--steps must be a whole number, got '1.5'."),
        ("demo --steps 0", "--steps must be 1 or more, got 0."),
        ("simulate --compute-ms x", "--compute-ms must be a number, got 'x'."),
        ("top --portt 1", "there is no option --portt; did you mean --port?"),
        ("trace", "give the folder with the ranks' dumps, or --live for what runs now."),
        ("trace a b", "'b' is one argument too many; say `symcomm trace [OPTIONS] [DIR]`."),
        ("doctor -n 0", "--ranks must be 1 or more, got 0."),
        ("doctor -nx", "--ranks must be a whole number, got 'x'."),
        ("version x", "'x' is one argument too many; say `symcomm version [OPTIONS]`."),
        ("--versoin", "there is no option --versoin; did you mean --version?"),
    ],
)
def test_every_error_is_one_sentence_and_status_2(arguments, sentence):
    words = arguments.split()
    result = symcomm(*words)
    call = "symcomm" if words[0].startswith("-") else f"symcomm {words[0]}"
    assert (result.returncode, result.stdout, result.stderr) == (2, "", f"{call}: {sentence}\n")


@pytest.mark.parametrize("name", main.LAZY_COMMANDS)
def test_examples_parse(name):
    shown = examples(name)
    assert shown and all("symcomm " in example for example in shown)
    for example in shown:
        for first, *rest in commands_in(example):
            parsed = load(first).make_context(f"symcomm {first}", rest).params
            if first == "bench":
                assert parsed["collective"] in (*COLLECTIVES, *OTHERS, "all", "window")
            if first == "simulate":
                assert parsed["what"] in (*PREDICTED, "ddp", "fsdp")


@pytest.mark.parametrize(
    "example", [e for name in main.LAZY_COMMANDS for e in examples(name) if re.match(QUICK, e)], ids=str
)
def test_examples_run(tmp_path, example):
    (tmp_path / "train.py").write_text("import sys; assert sys.argv[1:] in (['--lr', '0.1'], [])")
    (tmp_path / "prog").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "prog").chmod(0o755)
    for arguments in commands_in(example):
        if "--plot" in arguments:
            pytest.importorskip("matplotlib")
        result = symcomm(*arguments, cwd=tmp_path, HOME=str(tmp_path), SHELL="/bin/bash")
        findings = arguments[0] == "doctor" and result.returncode == 1
        nothing_failed = arguments[0] == "trace" and "there are no dumps in dumps" in result.stderr
        assert result.returncode == 0 or findings or nothing_failed, result.stderr
