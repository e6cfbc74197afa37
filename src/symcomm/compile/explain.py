"""Explains what ``torch.compile`` makes of a function's collectives."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from symcomm.compile import report
from symcomm.compile.install import install


@dataclass
class Explanation:
    """One record for each collective, in the order in which graphs were compiled, and what the function returned."""

    records: list[report.Record]
    result: Any

    def as_rows(self) -> list[list[str]]:
        rows = []
        for r in self.records:
            size = "symbolic" if r.nbytes is None else f"{r.nbytes:,} B"
            wait = r.wait + (f", {r.between} kernels between" if r.between else "")
            shape = " x ".join(map(str, r.shape)) or "number"
            rows.append([r.op, f"{shape} {r.dtype}", size, r.plan, "yes" if r.zero_copy else f"no: {r.reason}", wait])
        return rows


HEAD = ["collective", "input", "size", "plan", "zero-copy", "wait"]


def explain(fn: Callable[..., Any], *args: Any, show: bool = True, **kwargs: Any) -> Explanation:
    """Compile ``fn``, call it once with these arguments, and print what became of each collective.

    This includes a backward pass if ``fn`` runs one. Every rank calls this; ``show=False`` prints nothing.

    Raises: what ``fn`` and its compilation raise.
    """
    from torch._inductor import config

    install()
    torch._dynamo.reset()
    with report.listening() as records, config.patch(force_disable_caches=True):
        result = torch.compile(fn, backend="inductor")(*args, **kwargs)
    found = Explanation(records, result)
    if show:
        _print(found)
    return found


def _print(found: Explanation) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for row in [HEAD, *found.as_rows()]:
            print("  ".join(row), file=sys.stdout)
        return
    table = Table(*HEAD, title=f"{len(found.records)} collectives")
    for row in found.as_rows():
        table.add_row(*row)
    Console().print(table)
