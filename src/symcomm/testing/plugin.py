"""Pytest's part of the kit: ``--symcomm-pdb RANK``, and what ``--pdb`` does. Pytest finds it by its entry point."""

from __future__ import annotations

from typing import Any

from symcomm.testing import decorator


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("symcomm")
    words = "open pdb where this rank of a symcomm.testing test raises; with --pdb, it is the first that raises"
    group.addoption("--symcomm-pdb", type=int, default=None, metavar="RANK", help=words)


def pytest_configure(config: Any) -> None:
    wanted = config.getoption("--symcomm-pdb")
    decorator.pdb_rank = decorator.ANY if wanted is None and config.getoption("usepdb", False) else wanted
