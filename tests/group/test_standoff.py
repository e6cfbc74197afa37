"""A rank in a collective, another in a message to or from it: each waits for the other.

Whether that is for ever cannot be known: another thread may still send. So it is said, and not refused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import symcomm
from symcomm import errors
from symcomm.group.process_group import ProcessGroup
from tests.support.ranks import until

LOGGER = "symcomm.group.standoff"


class Heard(logging.Handler):
    """Keeps the warnings, and lets threads wait for the first."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.warnings: list[str] = []
        self.some = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.warnings.append(record.getMessage())
        self.some.set()


@contextmanager
def hearing() -> Iterator[Heard]:
    heard = Heard()
    logging.getLogger(LOGGER).addHandler(heard)
    try:
        yield heard
    finally:
        logging.getLogger(LOGGER).removeHandler(heard)


def on_threads(fn, *args):
    return symcomm.spawn(fn, 2, args, mode="threads", timeout=20, deadline=50)


def _waits_for_a_message(g: ProcessGroup, how: str) -> str:
    g.barrier()
    total = torch.full((4,), float(g.rank + 1))
    if g.rank == 0:
        g.all_reduce(total)
        assert total.eq(3).all()
        return ""
    tensor = torch.zeros(1 << 20)  # more than the ring of a channel
    with pytest.raises(errors.DeadlineError) as caught:
        if how == "irecv":
            g.irecv(tensor, 0, tag=7).wait(1.6)
        elif how == "any source":
            g.recv(tensor, tag=7, timeout=1.6)
        else:
            g.recv(tensor, 0, tag=7, timeout=1.6)
    g.all_reduce(total)  # nothing was harmed
    assert total.eq(3).all()
    return str(caught.value)


@pytest.mark.parametrize("how", ["recv", "irecv", "any source"])
def test_both_sides_are_named_after_a_second_and_at_the_deadline(how: str):
    with hearing() as heard:
        message = on_threads(_waits_for_a_message, how)[1]
    who = "any rank" if how == "any source" else "rank 0"
    assert message == (
        f"receive from {who}, tag 7, on group 'world' timed out after 1.6 s: the other side did not come: "
        "rank 0 waits in all_reduce(float32 x 4, SUM) #2, which this rank has not called. The group can still be used."
    )
    (line,) = heard.warnings
    assert line.startswith(
        f"receive from {who}, tag 7, on group 'world': rank 0 waits in all_reduce(float32 x 4, SUM) #2, "
        "which rank 1 has not called, and rank 1 waits for it"
    )


def _another_thread_sends(g: ProcessGroup, heard: Heard) -> list[float]:
    """A right program, however long its threads take: it runs to its end, and its data are right."""
    total = torch.full((4,), float(g.rank + 1))
    if g.rank == 1:
        tensor = torch.zeros(3)
        g.recv(tensor, 0)
        g.all_reduce(total)
        return [*tensor.tolist(), total[0].item()]

    def send() -> None:
        assert heard.some.wait(20)
        g.send(torch.tensor([1.0, 2.0, 3.0]), 1)

    sender = threading.Thread(target=send)
    sender.start()
    g.all_reduce(total)
    sender.join()
    return [total[0].item()]


def test_a_program_whose_other_thread_sends_is_not_refused():
    with hearing() as heard:
        assert on_threads(_another_thread_sends, heard) == [[3.0], [1.0, 2.0, 3.0, 3.0]]
    assert len(heard.warnings) == 1


def _under_a_name_taken_over(g: ProcessGroup, heard: Heard) -> list[float]:
    later = g.new_group([0, 1], name=g.name)
    result = _another_thread_sends(g, heard)
    later.destroy()
    return result


def test_a_group_is_spoken_of_whose_name_a_later_one_has():
    with hearing() as heard:
        assert on_threads(_under_a_name_taken_over, heard) == [[3.0], [1.0, 2.0, 3.0, 3.0]]
    assert len(heard.warnings) == 1


def _is_late(g: ProcessGroup) -> str:
    if g.rank == 1:
        with pytest.raises(errors.SymcommError) as caught:
            g.recv(torch.zeros(1), 0, tag=3)
        return str(caught.value)
    assert until(lambda: g.handle.report()["ranks"][1]["message"], 20)  # it sleeps there
    with pytest.raises(errors.DeadlineError) as caught:
        g.all_reduce(torch.ones(4), timeout=0.7)
    assert caught.value.missing == [1]
    return str(caught.value)


def test_a_collective_that_is_late_says_that_the_missing_rank_waits_for_a_message():
    late, told = on_threads(_is_late)
    assert "rank 1 was last seen before its first operation and waits for a message from rank 0" in late
    assert "receive from rank 0, tag 3," in told and "did not come: 1; arrived: 0" in told


def _is_only_slow(g: ProcessGroup, slow: threading.Event) -> None:
    if g.rank == 1:
        g.recv(torch.zeros(1), 0)
        return
    slow.wait(1.3)  # nobody sets it: this rank does something else, which is no reason to warn
    g.send(torch.zeros(1), 1)


def test_a_sender_that_is_only_late_is_not_spoken_of():
    with hearing() as heard:
        on_threads(_is_only_slow, threading.Event())
    assert heard.warnings == []
