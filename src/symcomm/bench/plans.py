"""Ranks that run a whole plan by themselves, and of which the first writes a line now and then.

So ``bench gpu``, ``hosts`` and ``sites`` measure. For the ranks' part see ``read_plan`` and ``say`` in torch_worker.py.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from symcomm import errors
from symcomm.bench.run import KILL_DEADLINE
from symcomm.bench.whereabouts import SLOW, where_are


@contextlib.contextmanager
def running(
    call: str, module: str, workload: Any, world: int, env: Mapping[str, str], seconds: tuple[float, float],
    word: Callable[[str], str], start: Callable[..., subprocess.Popen[str]],
) -> Iterator[Iterator[str]]:  # fmt: skip
    """The lines of the first of ``world`` ranks that run ``module``; all are gone afterwards, whatever happened.

    ``start(rank, words)`` starts a rank; for ``seconds`` and ``word`` see ``lines_of``."""
    ranks: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        words = [sys.executable, "-m", module, folder, json.dumps(asdict(workload))]
        try:
            for rank in range(world):
                told = {**os.environ, **env, "WORLD_SIZE": str(world), "RANK": str(rank)}
                out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                with log.open("a") as said:
                    ranks.append(start(rank, words, env=told, stdout=out, stderr=said, text=True))
            yield lines_of(call, ranks, log, seconds, word)
            if ranks[0].wait(KILL_DEADLINE):
                raise errors.SymcommError(f"{call}: the ranks failed: {log.read_text()[-2000:]}")
        finally:
            for process in ranks:
                process.kill()
            for process in ranks:
                process.wait()


def lines_of(
    call: str, ranks: Sequence[subprocess.Popen[str]], log: Path, seconds: tuple[float, float],
    word: Callable[[str], str],
) -> Iterator[str]:  # fmt: skip
    """What the first of ``ranks`` writes, line by line, until it ends. DeadlineError, after a word sooner, when it has
    said nothing for ``seconds`` (before its first line, and after any other): ``call`` stands still, where ``word``
    says by the last line, and where all of them are."""
    lines = _read(ranks[0])
    (deadline, later), last, silent = seconds, "starting", 0.0
    while True:
        pause = min(SLOW, deadline) if silent == 0.0 else deadline - silent
        try:
            found = lines.get(timeout=max(0.0, pause))
        except queue.Empty:
            silent += pause
            if silent >= deadline:
                where = where_are({f"rank {i}": process.pid for i, process in enumerate(ranks)}, log)
                raise errors.deadline(f"{call}, {last}", deadline, fix=f"Where they are:\n{where}") from None
            words = f"{call}, {last}: nothing came for {silent:g} s; it has {deadline:g} s"
            print(f"# {words}", file=sys.stderr, flush=True)
            continue
        if found is None:
            return
        deadline, last, silent = later, word(found.strip())[:100], 0.0
        yield found


def _read(rank: subprocess.Popen[str]) -> queue.SimpleQueue[str | None]:
    """What it writes, line by line as it comes; None at its end."""
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()

    def read() -> None:
        for line in rank.stdout or ():
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, name="symcomm-bench-reader", daemon=True).start()
    return lines
