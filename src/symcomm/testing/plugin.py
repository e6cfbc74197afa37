"""Pytest's part of the kit: ``--symcomm-pdb RANK``. Pytest finds it by its entry point."""

from __future__ import annotations

from typing import Any

from symcomm.testing import decorator


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("symcomm")
    words = "open pdb where this rank of a symcomm.testing test raises (its deadline still counts)"
    group.addoption("--symcomm-pdb", type=int, default=None, metavar="RANK", help=words)


def pytest_configure(config: Any) -> None:
    decorator.pdb_rank = config.getoption("--symcomm-pdb")
