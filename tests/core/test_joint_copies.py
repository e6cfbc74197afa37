"""Large messages between symmetric tensors, which both ranks copy: the sender writes into the receiver's tensor.

Rank 0 sends again and again until it stands in the middle of such a write (see page_gate.py). Then it is stopped or
killed, and rank 1's receive ends in one way or another.
"""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch

from symcomm.group.process_group import ProcessGroup
from tests.support.faults import attempt, run_group
from tests.support.halted_calls import PATTERN, of_rank
from tests.support.large_messages import each_way, receive
from tests.support.page_gate import PAGE, Gate, Words, stop, symmetric
from tests.support.ranks import returned

pytestmark = [
    pytest.mark.usefixtures("nothing_is_left"),
    pytest.mark.unused_process,  # ranks that other tests have left in it count as sharing the cores
]

HIT, RAISED, WROTE = 0, 1, 2  # words: rank 0 is stopped; rank 1 has its tensor back; rank 0 has ended its call
COUNT = (1 << 20) + 3  # elements, of several pieces


def _halt_in_write(g: ProcessGroup, how: str, gate: Gate, words: Words) -> Any:
    x, y = symmetric(COUNT), symmetric(COUNT)
    window = g.new_window(y)
    x.copy_(of_rank(0, COUNT))
    g.barrier()
    if g.rank == 0:
        gate.close(window.map_remote_tensor(1).data_ptr() + 4 * COUNT - PAGE)  # where its first piece ends
        while not words[RAISED] and not attempt(lambda: g.send(x, 1)):
            pass
        words[WROTE] = 1
        return "" if how != "deadline" else attempt(lambda: g.send(torch.ones(1), 1, tag=9))
    wrong, raised = 0, ""
    while not raised and not words[HIT]:
        y.fill_(0.5)
        raised = receive(g, how, y, words, HIT)
        wrong += 0 if raised else int((y != of_rank(0, COUNT)).sum())
    y.fill_(PATTERN)
    words[RAISED] = 1
    after = attempt(lambda: g.recv(torch.zeros(1), 0, tag=9)) if how == "deadline" else ""  # the group can be used
    if how != "death":
        assert words.reach(WROTE, 1)
    return [raised, wrong, int((y != PATTERN).sum()), after]


def halt_in_write(how: str) -> list:
    gate, words = Gate(), Words()
    hits: list[bool] = []

    def during(pids: list[int]) -> None:
        hits.append(gate.await_hit())
        stop(pids[0])
        if how == "death":
            os.kill(pids[0], signal.SIGKILL)
        words[HIT] = 1
        words.reach(RAISED, 1)
        if how != "death":
            gate.open()
            os.kill(pids[0], signal.SIGCONT)

    outcomes = run_group(_halt_in_write, 2, how, gate, words, timeout=8, during=during)
    gate.discard()
    assert hits == [True], "the sender has copied nothing"
    return outcomes


@pytest.mark.parametrize(
    ("how", "error"), [("deadline", "DeadlineError"), ("abort", "GroupUnusableError"), ("leave", "left")]
)
def test_a_receive_that_gave_up_is_not_written_to(how: str, error: str):
    """Whatever its end, the tensor is its caller's when the call returns, though the sender goes on later."""
    _, (raised, wrong, touched, after) = returned(halt_in_write(how))
    assert raised == error and wrong == 0 and not after
    assert touched == 0, f"{touched} elements were written after the receive had ended"


def test_the_receiver_takes_over_what_a_dead_sender_was_copying():
    died, outcome = halt_in_write("death")
    assert died.kind == "died" and outcome.kind == "returned", f"{died}\n{outcome}"
    raised, wrong, _, _ = outcome.value
    assert not raised and wrong == 0


def test_both_ways_at_once():
    assert returned(run_group(each_way, 2, symmetric, timeout=20)) == [0, 0]
