"""What happened to each collective of a graph. ``SYMCOMM_DEBUG=compile`` prints it, explain() makes a table of it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass
class Record:
    """One collective of one compiled graph."""

    op: str
    shape: tuple[int | str, ...]  # of its input, the first one's if there are several; symbols are words
    dtype: str
    nbytes: int | None  # of all inputs; None if that is known only at run time
    group: str
    plan: str  # how it runs, and why
    zero_copy: bool
    reason: str = ""  # why not
    wait: str = ""  # what became of its wait
    name: str = ""  # of its result in the generated code
    between: int = 0  # kernels that run while it does

    def words(self) -> str:
        size = "symbolic size" if self.nbytes is None else f"{self.nbytes} bytes"
        copy = "no copy" if self.zero_copy else f"copied: {self.reason}"
        return f"{self.op} {list(self.shape)} {self.dtype} ({size}) on {self.group}: {self.plan}; {copy}; {self.wait}"


_listeners: list[list[Record]] = []


def is_debugging() -> bool:
    return "compile" in os.environ.get("SYMCOMM_DEBUG", "").split(",")


def note(record: Record) -> None:
    for listener in _listeners:
        listener.append(record)
    say(record.words())


def say(text: str) -> None:
    if is_debugging():
        print(f"symcomm compile: {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def listening() -> Iterator[list[Record]]:
    """Within it, collects the records of all that is compiled."""
    records: list[Record] = []
    _listeners.append(records)
    try:
        yield records
    finally:
        _listeners.remove(records)


def placed(name: str, between: int) -> None:
    """Called when the schedule is known: how many kernels run between a launch and its wait."""
    for listener in _listeners:
        for record in listener:
            if record.name == name and not record.between:
                record.between = between
    if between:
        say(f"{name}: {between} kernels between its launch and its wait")
