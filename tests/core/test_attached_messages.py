"""Large messages of ordinary tensors, which both ranks copy by system call (``cooperative_copy.c``, ``cma.c``).

The sender writes into the receiver's memory, which nobody can take away from it. Rank 0 sends again and again until it
stands where its first write begins; then it is stopped or killed, and rank 1's receive ends in one way or another.
"""

from __future__ import annotations

import ctypes
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from symcomm import errors
from symcomm.group.process_group import ProcessGroup
from symcomm.observe.recorder import records
from tests.support.call_gate import CallGate, refuse
from tests.support.faults import attempt, join_group, run_group
from tests.support.halted_calls import PATTERN, of_rank
from tests.support.halted_messages import BACK, COUNT, HIT, NOBODY, RAISED, WROTE, halted_in_kernel
from tests.support.large_messages import each_way, receive
from tests.support.page_gate import PAGE, Words, ordinary, stop
from tests.support.pager import Pager, needs_pager
from tests.support.ranks import Outcome, returned, until

pytestmark = [
    pytest.mark.usefixtures("nothing_is_left"),
    pytest.mark.unused_process,  # ranks that other tests have left in it count as sharing the cores
    pytest.mark.skipif(platform.machine() != "x86_64", reason="elsewhere such messages go through shared memory"),
]

_libc = ctypes.CDLL(None, use_errno=True)


def plans(g: ProcessGroup) -> set[str]:
    """How messages of 1 MiB and more went, but for the first from each rank, by which ranks find out how they can."""
    sent = [op for op in records.operations_of(g)[g.rank] if op.call in ("send", "recv") and op.nbytes >= 1 << 20]
    return {op.plan for op in sent[2:]}


def _both_ways(g: ProcessGroup, refused: str, rank: int) -> tuple[int, set[str]]:
    if g.rank == rank:
        refuse(refused)
    return each_way(g, ordinary), plans(g)


def test_both_ways_at_once():
    assert returned(run_group(_both_ways, 2, "", -1, timeout=20)) == [(0, {"attached"})] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_a_sender_that_may_not_write_leaves_all_to_the_receiver(rank):
    told = returned(run_group(_both_ways, 2, "process_vm_writev", rank, timeout=20))
    assert told == [(0, {"attached"})] * 2


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_receiver_may_not_read_goes_through_shared_memory(rank):
    told = returned(run_group(_both_ways, 2, "process_vm_readv", rank, timeout=20))
    assert [wrong for wrong, _ in told] == [0, 0]
    assert all("" in ways for _, ways in told), told


def _held_receiver(g: ProcessGroup, gate: CallGate, words: Words) -> tuple[bool, int]:
    """Rank 1 is held where it reads its first piece, until it has found the last one and the second in its tensor."""
    x, y = ordinary(COUNT), ordinary(COUNT)
    for _ in range(2):  # the next one is attached
        attempt((lambda: g.send(x, 1)) if g.rank == 0 else (lambda: g.recv(y, 0)))
    x.copy_(of_rank(0, COUNT))
    y.fill_(0.5)
    g.barrier()
    if g.rank == 0:
        return g.send(x, 1) is None, 0

    def look() -> None:
        words[WROTE] = until(lambda: bool(y[-1] != 0.5 and y[1 << 16] != 0.5), 5)
        gate.open()

    threading.Thread(target=look, daemon=True).start()
    gate.close("process_vm_readv")
    g.recv(y, 0)
    return bool(words[WROTE]), int((y != of_rank(0, COUNT)).sum())


def _join_pinned(rank: int, world: int, folder: str, timeout: float) -> ProcessGroup:
    """On a core of its own: ranks that a busy machine has put on one do not copy together."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    return join_group(rank, world, folder, timeout)


@pytest.mark.skipif(
    len(os.sched_getaffinity(0)) < 2, reason="needs two cores; `make test` where there are more runs it"
)
def test_a_sender_that_waits_copies_all_that_its_receiver_leaves():
    words = Words()
    gate = CallGate(words, HIT)
    assert returned(run_group(_held_receiver, 2, gate, words, join=_join_pinned)) == [(True, 0)] * 2
    gate.discard()


def _in_any_order(g: ProcessGroup) -> tuple[int, set[str]]:
    """Messages are received in another order than they were sent, so that some are set aside."""
    count, wrong = 1 << 18, 0
    for turn in range(4):
        x = [torch.full((count,), 10.0 * turn + tag) for tag in range(3)]
        if g.rank == 0:
            for work in [g.isend(x[tag], 1, tag=tag) for tag in range(3)]:
                work.wait()
        else:
            for tag in (2, 0, 1):
                y = torch.zeros(count)
                g.recv(y, 0, tag=tag)
                wrong += int((y != x[tag]).sum())
    return wrong, plans(g)


def test_messages_may_be_received_in_another_order():
    (wrong, ways), (_, received) = returned(run_group(_in_any_order, 2, timeout=20))
    assert wrong == 0 and ways == {"attached"} and "attached" in received


def _mismatched(g: ProcessGroup) -> list[str]:
    told = []
    for size in (COUNT, COUNT, COUNT + 1, COUNT):
        x = torch.full((COUNT,), float(size))
        y = torch.zeros(size)
        told.append(attempt(partial(g.send, x, 1) if g.rank == 0 else partial(g.recv, y, 0)))
        if g.rank == 1:
            assert bool((y == (size if size == COUNT else 0)).all())
    return told


def test_a_receive_of_another_size_is_told_and_not_written_to():
    sender, receiver = returned(run_group(_mismatched, 2, timeout=20))
    assert sender == ["", "", "", ""] and receiver == ["", "", "BadArgumentError", ""]


# --- a sender that stands where its write begins -------------------------------------------------------------------


def _halt_at_write(g: ProcessGroup, how: str, gate: CallGate, words: Words) -> Any:
    x, y = ordinary(COUNT), ordinary(COUNT)
    x.copy_(of_rank(0, COUNT))
    g.barrier()
    if g.rank == 0:
        gate.close("process_vm_writev")
        while not words[RAISED] and not attempt(lambda: g.send(x, 1)):
            pass
        words[WROTE] = 1
        return [attempt(lambda: g.send(x, 1, tag=9)) for _ in range(3)] if how == "deadline" else []
    wrong, raised = 0, ""
    while not raised and not words[HIT]:
        y.fill_(0.5)
        raised = receive(g, how, y, words, HIT)
        wrong += 0 if raised else int((y != of_rank(0, COUNT)).sum())
    y.fill_(PATTERN)
    words[RAISED] = 1
    if how == "deadline":  # the group can be used
        for _ in range(3):
            z = ordinary(COUNT)
            g.recv(z, 0, tag=9)
            wrong += int((z != of_rank(0, COUNT)).sum())
    if how != "death":
        assert words.reach(WROTE, 1)
    return [raised, wrong, int((y != PATTERN).sum())]


def halt_at_write(how: str) -> list[Outcome]:
    words = Words()
    gate = CallGate(words, HIT)
    seconds = []

    def during(pids: list[int]) -> None:
        assert words.reach(HIT, 1), "the sender has copied nothing"
        begun = time.monotonic()
        if how == "death":
            os.kill(pids[0], signal.SIGKILL)
        else:
            stop(pids[0])
        words.reach(RAISED, 1)
        seconds.append(time.monotonic() - begun)
        if how != "death":
            gate.open()
            os.kill(pids[0], signal.SIGCONT)

    outcomes = run_group(_halt_at_write, 2, how, gate, words, timeout=8, during=during)
    gate.discard()
    assert seconds[0] < 5, "it was waited for, though it was stopped"
    return outcomes


@pytest.mark.parametrize(
    ("how", "error"), [("deadline", "DeadlineError"), ("abort", "GroupUnusableError"), ("leave", "left")]
)
def test_a_receive_that_gave_up_is_not_written_to(how: str, error: str):
    """Whatever its end, the tensor is its caller's when the call returns, though the sender goes on later."""
    sender, (raised, wrong, touched) = returned(halt_at_write(how))
    assert raised == error and wrong == 0
    assert touched == 0, f"{touched} elements were written after the receive had ended"
    assert sender == (["", "", ""] if how == "deadline" else [])


def _halt_in_row(g: ProcessGroup, gate: CallGate, words: Words) -> Any:
    x, row = ordinary(COUNT), [ordinary(COUNT) for _ in range(8)]
    x.copy_(of_rank(0, COUNT))
    g.barrier()
    if g.rank == 0:
        gate.close("process_vm_writev")
        while not words[RAISED]:
            for work in [g.isend(x, 1) for _ in row]:
                work.wait()
        words[WROTE] = 1
        return ""
    raised: list[str] = []
    wrong = 0
    while not words[HIT]:
        raised = [attempt(partial(g.recv, y.fill_(0.5), 0, timeout=3.0)) for y in row]  # not before it is stopped
        wrong += sum(int((y != of_rank(0, COUNT)).sum()) for y, error in zip(row, raised, strict=True) if not error)
    for y in row:
        y.fill_(PATTERN)
    words[RAISED] = 1
    assert words.reach(WROTE, 1)
    return [sorted(raised), wrong, sum(int((y != PATTERN).sum()) for y in row)]


def test_the_next_messages_of_a_stopped_sender_grant_no_writes():
    words = Words()
    gate = CallGate(words, HIT)

    def during(pids: list[int]) -> None:
        assert words.reach(HIT, 1, 20)
        stop(pids[0])
        assert words.reach(RAISED, 1, 20)
        gate.open()
        os.kill(pids[0], signal.SIGCONT)

    _, (raised, wrong, touched) = returned(run_group(_halt_in_row, 2, gate, words, during=during))
    gate.discard()
    assert raised == [""] * 7 + ["DeadlineError"] and (wrong, touched) == (0, 0)


def test_a_sender_that_dies_at_its_write_is_named():
    died, outcome = halt_at_write("death")
    assert died.kind == "died" and outcome.value == ["RankFailedError", 0, 0]


# --- ranks that stand in the middle of a copy ------------------------------------------------------------------------


def halt_in_kernel(who: str) -> list[tuple[str, int]]:
    needs_pager()
    words = Words()
    gate = CallGate(words, NOBODY)
    told = returned(run_group(halted_in_kernel, 2, who, gate, words))
    gate.discard()
    assert words[HIT] == 1
    return told


def test_a_receive_that_gives_up_waits_for_a_write_that_has_begun():
    """Rank 0 is in the kernel, which waits for a page of rank 1's tensor, so revoking is too late."""
    assert halt_in_kernel("receiver gives up") == [("", 0), ("DeadlineError", 0)]


def test_what_a_sender_overwrites_after_its_deadline_is_no_result():
    """Rank 1 stands in its read when the sender gets its tensor back."""
    sender, (raised, wrong) = halt_in_kernel("sender gives up")
    assert sender == ("DeadlineError", 0) and (raised, wrong) == ("DeadlineError", 0)


def _unmapped(g: ProcessGroup, where: int, at: int) -> str:
    x, y = ordinary(COUNT), ordinary(COUNT)
    exchange: Callable[[], None] = (lambda: g.send(x, 1)) if g.rank == 0 else (lambda: g.recv(y, 0))
    exchange(), exchange()
    g.barrier()
    if g.rank == where:
        page = (x if where == 0 else y).data_ptr() + at // PAGE * PAGE
        assert _libc.mprotect(ctypes.c_void_p(page), ctypes.c_size_t(PAGE), 0) == 0
    try:
        exchange()
    except errors.SymcommError as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("at", [4 * PAGE, BACK])
def test_memory_that_is_not_there_is_an_error_on_both_ranks(where, at):
    for words in returned(run_group(_unmapped, 2, where, at)):
        assert words.startswith("GroupUnusableError") and "rank 1 could not copy out of the tensor of rank 0" in words


def _kill_in_row(g: ProcessGroup, words: Words) -> tuple[str, int]:
    x, y = ordinary(COUNT), ordinary(COUNT)
    wrong, raised = 0, ""
    for number in range(1 << 20):
        if g.rank == 0:
            x.fill_(float(number))
            g.send(x, 1)
            words[HIT] = number
        else:
            y.fill_(0.5)
            raised = attempt(lambda: g.recv(y, 0))
            if raised:
                break
            wrong += int((y != number).sum())
    y.fill_(PATTERN)
    time.sleep(0.1)
    return raised, wrong + int((y != PATTERN).sum())


@pytest.mark.parametrize("turn", range(3))
def test_a_receive_that_returned_is_right_when_the_sender_is_killed(turn):
    words = Words()

    def during(pids: list[int]) -> None:
        assert words.reach(HIT, 10 + 3 * turn)
        os.kill(pids[0], signal.SIGKILL)

    sender, receiver = run_group(_kill_in_row, 2, words, during=during)
    assert (sender.kind, receiver.value) == ("died", ("RankFailedError", 0))


# --- pids of other processes ---------------------------------------------------------------------------------------


def in_namespace(*arguments: str) -> list[str]:
    """What other_pids.py prints."""
    if subprocess.run(["unshare", "--pid", "--fork", "--mount-proc", "true"], capture_output=True).returncode != 0:
        pytest.skip("needs pid namespaces; `make test` as root runs it")
    *options, what = arguments
    program = [sys.executable, "-m", "tests.support.other_pids", what]
    done = subprocess.run(
        ["unshare", "--pid", "--fork", *options, *program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("how", ["read", "write"])
def test_a_process_with_a_dead_ranks_pid_is_neither_read_nor_written(how):
    raised, got, overwritten = in_namespace("--mount-proc", how)
    assert (raised, overwritten) == ("RankFailedError", "0")
    assert how == "read" or got == "0"


def test_a_pid_of_another_namespace_is_not_believed():
    needs_pager()
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        stop(stranger.pid)
        assert in_namespace(str(stranger.pid)) == ["DeadlineError", "0", "1"]
    finally:
        stranger.kill()
        stranger.wait()


def _leave_during_receive(g: ProcessGroup, words: Words) -> tuple[str, int]:
    x, y = ordinary(COUNT), ordinary(COUNT)
    for _ in range(2):
        attempt((lambda: g.send(x, 1)) if g.rank == 0 else (lambda: g.recv(y, 0)))
    g.barrier()
    if g.rank == 0:
        words.reach(RAISED, 1)
        raised = attempt(lambda: g.send(x, 1))
        words[WROTE] = 1
        return raised, 0
    pager = Pager()
    held = pager.tensor(COUNT, 0)
    work = g.irecv(y, 0)
    g.all_reduce(held, async_op=True)
    assert pager.await_hit()  # whoever leaves waits for this one
    leaving = threading.Thread(target=g.leave)
    leaving.start()
    assert until(lambda: bool(attempt(lambda: g.recv(torch.zeros(1), 0, tag=9, timeout=0.01)) == "GroupUnusableError"))
    raised = attempt(work.wait)
    y.fill_(PATTERN)
    words[RAISED] = 1
    words.reach(WROTE, 1, 1.0)
    touched = int((y != PATTERN).sum())
    pager.give()
    leaving.join()
    return raised, touched


def test_a_wait_that_finds_its_group_left_has_its_tensor_back():
    needs_pager()
    sender, receiver = returned(run_group(_leave_during_receive, 2, Words()))
    assert sender[0] == "RankFailedError" and receiver == ("GroupUnusableError", 0)
