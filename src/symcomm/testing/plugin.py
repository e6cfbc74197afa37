"""Pytest's part of the kit: ``--symcomm-pdb RANK``, and what ``--pdb`` does.

Pytest finds it by its entry point, and loads it wherever Symcomm is installed: so it imports nothing."""

from __future__ import annotations

from typing import Any

ANY = -1
pdb_rank: int | None = None  # the rank that gets a debugger; ANY: the first that raises; None: none does


def pytest_addoption(parser: Any) -> None:
    group = parser.getgroup("symcomm")
    words = "open pdb where this rank of a symcomm.testing test raises; with --pdb, it is the first that raises"
    group.addoption("--symcomm-pdb", type=int, default=None, metavar="RANK", help=words)


def pytest_configure(config: Any) -> None:
    global pdb_rank
    wanted = config.getoption("--symcomm-pdb")
    pdb_rank = ANY if wanted is None and config.getoption("usepdb", False) else wanted
