"""A large message whose receiver, or sender, gives up while a rank stands in the kernel, in the middle of a copy."""

from __future__ import annotations

import threading

import torch

from symcomm.group.process_group import ProcessGroup
from tests.support.call_gate import CallGate, refuse
from tests.support.faults import attempt
from tests.support.halted_calls import PATTERN, of_rank
from tests.support.page_gate import PAGE, Words, ordinary
from tests.support.pager import Pager

# Words: rank 0 stands at its write; rank 1 has its tensor back; rank 0 has ended its call
HIT, RAISED, WROTE, NOBODY = 0, 1, 2, 3
COUNT = (1 << 20) + 3  # elements, of several pieces
BACK = 4 * (COUNT - (1 << 15))  # bytes: a place in the piece that the sender begins with


def halted_in_kernel(g: ProcessGroup, who: str, gate: CallGate, words: Words) -> tuple[str, int]:
    """A page of rank 1's tensor comes 3 s after a rank began to wait for it, or when the sender gave up. The waiting
    rank is rank 0, before rank 1 reads anything, or rank 1 itself, alone."""
    x, y = ordinary(COUNT), ordinary(COUNT)
    for _ in range(2):  # the next one is attached
        attempt((lambda: g.send(x, 1)) if g.rank == 0 else (lambda: g.recv(y, 0)))
    x.copy_(of_rank(0, COUNT))
    if g.rank == 0 and who == "sender gives up":
        refuse("process_vm_writev")
    if g.rank == 1:
        pager = Pager()
        y = pager.tensor(COUNT, 0 if who == "sender gives up" else BACK // PAGE * PAGE)

        def serve() -> None:
            words[HIT] = pager.await_hit()
            gate.open()
            words.reach(RAISED, 1, 3.0)
            words[WROTE] = 1
            pager.give()

        threading.Thread(target=serve, daemon=True).start()
        if who == "receiver gives up":
            gate.close("process_vm_readv")
    g.barrier()
    if g.rank == 0:
        raised = attempt(lambda: g.send(x, 1, timeout=1.0 if who == "sender gives up" else 20.0))
        x.fill_(PATTERN)
        words[RAISED] = who == "sender gives up"
        if not raised:
            g.send(torch.zeros(1), 1, tag=9)
        return raised, 0
    raised = attempt(lambda: g.recv(y, 0, timeout=1.0 if who == "receiver gives up" else 20.0))
    written = words[WROTE]
    y.fill_(PATTERN)
    if who == "receiver gives up":
        g.recv(torch.zeros(1), 0, tag=9)
    return raised, int((y != PATTERN).sum()) if written else COUNT
