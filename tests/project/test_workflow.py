"""What runs on GitHub is what runs here: targets that the Makefile has, versions that the docs name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
STEPS = [step for job in WORKFLOW["jobs"].values() for step in job["steps"]]


def test_commands_are_targets_of_the_makefile():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = [step["run"] for step in STEPS if "run" in step]
    assert {"make test", "make sanitize", "make prove"} < set(commands)
    for command in commands:
        make, target, *_ = command.split()
        assert make == "make" and target in targets, command


def test_versions_are_those_that_are_promised():
    promised = (ROOT / "docs/reference/compatibility.md").read_text()
    torches = WORKFLOW["jobs"]["torch"]["strategy"]["matrix"]["torch"]
    pythons = WORKFLOW["jobs"]["python"]["strategy"]["matrix"]["python"]
    assert torches and all(f"| {version} |" in promised for version in torches)
    assert pythons and all(version in promised for version in pythons)


def test_the_package_says_which_pythons_it_was_tested_on():
    package = (ROOT / "pyproject.toml").read_text()
    tested = {*WORKFLOW["jobs"]["python"]["strategy"]["matrix"]["python"], "3.11"}
    assert set(re.findall(r"Python :: (3\.\d+)\"", package)) == tested
    page = (ROOT / "docs/reference/compatibility.md").read_text()
    assert all(re.search(rf"\b{re.escape(version)}\b", page) for version in tested)


def test_both_kinds_of_machines_are_tested():
    for job in ("test", "wheels"):
        machines = WORKFLOW["jobs"][job]["strategy"]["matrix"]["machine"]
        assert {m.endswith("-arm") for m in machines} == {True, False}, job


def test_ruff_is_the_same_everywhere():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())
    ruff = next(repo for repo in hooks["repos"] if repo["repo"].endswith("ruff-pre-commit"))
    assert f'"ruff=={ruff["rev"].removeprefix("v")}"' in (ROOT / "pyproject.toml").read_text()
