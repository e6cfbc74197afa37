"""What programs say of their parts, and what helps them. Ranks load it, so it imports only the standard library."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FOLDER = "SYMCOMM_PROGRAM_FOLDER"  # where ranks leave what they found


@dataclass(frozen=True)
class Part:
    """``values``: numbers that must be the same on both backends. ``seconds``: the median step's. ``said``: words for
    the table, which must be the same, too."""

    name: str
    values: list[float] = field(default_factory=list)
    seconds: float = 0.0
    said: str = ""


def timed(step: Callable[[int], Any], steps: int = 30, warm: int = 5) -> tuple[list[Any], float]:
    """What each step returned, and the median time of those after the first ones."""
    results, times = [], []
    for i in range(steps):
        begun = time.perf_counter()
        results.append(step(i))
        times.append(time.perf_counter() - begun)
    return results, statistics.median(times[warm:])


def training(find_loss: Callable[[], Any], optimizer: Any) -> Callable[[int], float]:
    """A step of it, for ``timed``."""

    def step(_: int) -> float:
        loss = find_loss()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


@contextlib.contextmanager
def joined(backend: str) -> Iterator[None]:
    """In the default group, with one thread for a rank."""
    import torch
    import torch.distributed as dist

    dist.init_process_group(backend)
    torch.set_num_threads(1)
    yield
    dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Outcomes:
    """A plugin of pytest that counts them."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome == "skipped":
            self.counts[report.outcome] += 1


def tested(name: str, *words: str) -> Part:
    """What pytest, called with these words, found."""
    import pytest

    outcomes, begun = Outcomes(), time.perf_counter()
    pytest.main(["-q", "-p", "no:cacheprovider", "--timeout", "200", "--tb", "line", *words], [outcomes])
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.counts.items()))
    return Part(name, seconds=time.perf_counter() - begun, said=said)


def numbers(*tensors: Any) -> list[float]:
    """Two sums of each tensor: one that no changed element leaves as it was, and one that no changed order does."""
    import torch

    found = []
    for tensor in tensors:
        flat = tensor.detach().to(torch.float64).flatten()
        found += [flat.sum().item(), (flat * torch.arange(1, flat.numel() + 1, dtype=torch.float64)).sum().item()]
    return found


def tell(main: Callable[[str], Iterator[Part]], rank: str | None = None) -> None:
    """What each program ends with: runs it on the backend that the command line names last."""
    rank = os.environ.get("RANK", "0") if rank is None else rank
    with open(Path(os.environ[FOLDER]) / f"{rank}.jsonl", "a") as out:
        for part in main(sys.argv[-1]):
            print(json.dumps(dataclasses.asdict(part)), file=out, flush=True)


def read(folder: Path) -> dict[str, list[Part]]:
    """By name, what the ranks said of each part, in their order."""
    found: dict[str, list[Part]] = {}
    for path in sorted(folder.glob("*.jsonl"), key=lambda path: int(path.stem)):
        for line in path.read_text().splitlines():
            part = Part(**json.loads(line))
            found.setdefault(part.name, []).append(part)
    return found
