"""Messages of 1 MiB and more, which both ranks copy."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from symcomm.group.process_group import ProcessGroup
from tests.support.faults import attempt
from tests.support.halted_calls import of_rank
from tests.support.page_gate import Words
from tests.support.ranks import until


def receive(g: ProcessGroup, how: str, y: torch.Tensor, words: Words, hit: int) -> str:
    """One receive from rank 0. If rank 0 is stopped in its middle, it ends in this way: "deadline", "abort" or
    "leave"."""
    if how == "leave":
        work = g.irecv(y, 0)
        until(lambda: work.is_completed() or words[hit], 20)
        return "" if work.is_completed() else attempt(g.destroy) or "left"
    if how == "abort":
        threading.Thread(target=lambda: words.reach(hit, 1, 20) and g.abort(), daemon=True).start()
    return attempt(lambda: g.recv(y, 0, timeout=1.0 if how == "deadline" else None))


def each_way(g: ProcessGroup, make: Callable) -> int:
    """Both ranks send at once, sizes that are no multiple of pieces; some receives take any rank's message."""
    wrong, peer = 0, 1 - g.rank
    for number, count in enumerate([(1 << 18) - 1, 1 << 18, (1 << 18) + 1, 1_000_001] * 3):
        x, y = make(count), make(count)
        x.copy_(of_rank(g.rank, count) + number)
        y.fill_(0.5)
        works = [g.isend(x, peer), g.irecv(y, -1 if number % 2 else peer)]
        for work in works[:: 1 if g.rank else -1]:
            work.wait()
        wrong += int((y != of_rank(peer, count) + number).sum())
        g.barrier()  # a symmetric tensor that is freed may be the next one's place
    return wrong
