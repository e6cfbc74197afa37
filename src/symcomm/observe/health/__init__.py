"""Checks whether ranks will run well on a machine (``symcomm doctor``).

A check is a function without arguments that returns a ``Finding`` (or several), never raises for what it finds, and
says what to change. ``memory.py`` checks memory, ``machine.py`` processors, clocks and limits, ``network.py`` names and
ports, ``software.py`` our C core, torch and GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

__all__ = ["FAIL", "OK", "WARN", "Finding", "run_checks"]

OK, WARN, FAIL = "ok", "warn", "fail"


@dataclass(frozen=True)
class Finding:
    """``fix`` says what to change; empty when all is well."""

    check: str
    state: str
    found: str
    fix: str = ""


Check = Callable[[], "Finding | list[Finding]"]


def run_checks(checks: Iterable[tuple[str, Check]]) -> list[Finding]:
    """Every check's findings. A check that raises is a finding too."""
    findings: list[Finding] = []
    for name, check in checks:
        begun = time.monotonic()
        try:
            found = check()
        except Exception as error:
            seconds = time.monotonic() - begun
            why = f"the check itself failed after {seconds:.1f} s: {type(error).__name__}: {error}"
            found = Finding(name, WARN, why, "please report this, with the output of `symcomm version`")
        findings += found if isinstance(found, list) else [found]
    return findings
