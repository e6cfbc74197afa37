"""Groups that are left: by another thread while a call waits, before their works are asked, in the middle of a call.

Every call returns, and what was the group's is somebody else's: tensors that are allocated in its place keep their
values, here and on the peers.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from symcomm._core import native
from symcomm.group import leaving, meeting
from symcomm.group.p2p import Message
from symcomm.group.process_group import ProcessGroup
from tests.support.faults import attempt, run_group
from tests.support.halted_calls import PATTERN
from tests.support.page_gate import Words, ordinary, symmetric
from tests.support.ranks import returned, until

N = 16_384  # elements: a message of so many is read where it lies, if that is symmetric
PROMPT = 5.0  # seconds, far below the deadlines here


pytestmark = [pytest.mark.long, pytest.mark.usefixtures("nothing_is_left")]


def extent(team: ProcessGroup) -> tuple[int, int]:
    """Where this rank's part of a group begins and ends."""
    start = team.arena.base + team._offset
    return start, start + meeting.layout(team.size, team.plan_limits)[2]


class Claim:
    """Symmetric tensors in the place of what was freed before, all of one value."""

    def __init__(self, start: int, end: int, count: int = 65_536, most: int = 128):
        self.tensors: list[torch.Tensor] = []
        self.covers = False
        while len(self.tensors) < most and not self.covers:
            self.tensors.append(symmetric(count).fill_(PATTERN))
            at = self.tensors[-1].data_ptr()
            self.covers = at < end <= at + 4 * count or at >= end > start >= self.tensors[0].data_ptr()

    def touched(self) -> int:
        return sum(int((t != PATTERN).sum()) for t in self.tensors)


def new_team(g: ProcessGroup, timeout: float = 20.0) -> ProcessGroup:
    g.barrier()  # whoever comes later than ``timeout`` would be too late for the new group
    team = g.new_group(range(g.size), timeout=timeout)
    assert team is not None
    return team


# --- works and groups that are asked after they were left ---------------------------------------------------------


def start_send(team: ProcessGroup, make: Callable) -> Any:
    return team.isend(make(N).fill_(1.0), 1 - team.rank, tag=7)


def start_long_send(team: ProcessGroup, make: Callable) -> Any:
    """More than the ring of a channel has room for."""
    return team.isend(make(32 * N).fill_(1.0), 1 - team.rank, tag=7)


def start_receive(team: ProcessGroup, make: Callable) -> Any:
    return team.irecv(make(N).fill_(1.0), 1 - team.rank, tag=8)


def start_all_reduce(team: ProcessGroup, make: Callable) -> Any:
    return team.all_reduce(make(N).fill_(1.0), async_op=True)


STARTS = (start_send, start_long_send, start_receive, start_all_reduce)


def ask(work: Any, team: ProcessGroup) -> list[str]:
    """Calls that did not come back in time."""
    calls = {
        "is_completed": work.is_completed, "is_success": work.is_success, "exception": work.exception,
        "wait with a timeout": lambda: work.wait(0.1), "wait": work.wait, "abort": team.abort,
        "barrier": team.barrier, "send": lambda: team.send(torch.ones(N), 1 - team.rank), "destroy": team.destroy,
    }  # fmt: skip
    late = []
    for name, call in calls.items():
        started = time.monotonic()
        attempt(call)
        if time.monotonic() - started > PROMPT:
            late.append(name)
    return late


def _ask_after(g: ProcessGroup, start: Callable, make: Callable, first: int, turns: int) -> list[str]:
    """The ranks leave a group one after the other, ``first`` first, and use its memory for something else."""
    bad: list[str] = []
    for _ in range(turns):
        team = new_team(g, 0.3)
        mine = extent(team)
        works = [start(team, make)] if g.rank == 0 or start is not start_all_reduce else []
        g.barrier()
        for rank in (first, 1 - first):
            if g.rank == rank:
                team.destroy()
            g.barrier()
        if g.rank != first:
            leaving.free_retired()  # who left first learns of the other when it makes its next group
        claim = Claim(*mine) if leaving.retired_count() == 0 else None
        g.barrier()
        late = [name for work in works if g.rank == first for name in ask(work, team)]
        attempt(team.abort)
        g.barrier()
        bad += [f"rank {g.rank}: {name} did not return" for name in late]
        if claim is not None and claim.touched():
            bad.append(f"rank {g.rank}: {claim.touched()} elements of new tensors were written")
        if claim is None and g.rank != first:
            bad.append(f"rank {g.rank}: the group's memory was not given back")
        del claim, works, team
    return bad


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("make", [symmetric, ordinary], ids=lambda make: make.__name__)
@pytest.mark.parametrize("start", STARTS, ids=lambda start: start.__name__)
def test_asked_after_everybody_left(start: Callable, make: Callable, first: int):
    bad = [text for value in returned(run_group(_ask_after, 2, start, make, first, 3)) for text in value]
    assert not bad, "\n".join(bad)


def _torch_aborts_late(g: ProcessGroup, path: str) -> int:
    import torch.distributed as dist

    dist.init_process_group("symcomm", store=dist.FileStore(path, 2), rank=g.rank, world_size=2)
    group = dist.new_group([0, 1])
    dist.all_reduce(torch.ones(4), group=group)
    core = group.core
    mine = extent(core)
    g.barrier()
    for rank in (0, 1):
        if g.rank == rank:
            dist.destroy_process_group(group)
        g.barrier()
    claim = Claim(*mine) if g.rank == 1 else None
    g.barrier()
    if g.rank == 0:
        group.abort()
    g.barrier()
    return claim.touched() if claim is not None and claim.covers else -g.rank


def test_torch_aborts_a_group_that_was_destroyed(tmp_path):
    assert returned(run_group(_torch_aborts_late, 2, str(tmp_path / "torch"))) == [0, 0]


# --- another thread waits ------------------------------------------------------------------------------------------


def wait_in_collective(team: ProcessGroup) -> None:
    team.all_reduce(torch.ones(N))


def wait_in_small_collective(team: ProcessGroup) -> None:
    team.barrier()


def wait_in_receive(team: ProcessGroup) -> None:
    team.recv(torch.ones(N), 1 - team.rank)


def wait_in_send(team: ProcessGroup) -> None:
    team.send(symmetric(N), 1 - team.rank)


def wait_in_work(team: ProcessGroup) -> None:
    work = team.all_reduce(torch.ones(N), async_op=True)
    assert work is not None
    work.wait()


def wait_in_message(team: ProcessGroup) -> None:
    team.irecv(torch.ones(N), 1 - team.rank).wait()


WAITS = (
    wait_in_collective, wait_in_small_collective, wait_in_receive, wait_in_send, wait_in_work, wait_in_message,
)  # fmt: skip


class VoteFirst:
    """What a thread of rank 0 says of its failed call comes right after what shrink() says there in its first exchange,
    and before rank 1 looks."""

    EXCHANGE = 2  # the vote is said before

    def __init__(self) -> None:
        self._real, self._count = native.Group.publish, 0
        self._said = threading.Event()
        native.Group.publish = lambda *args: self._publish(*args)

    def _publish(self, handle: Any, kind: int, text: bytes) -> None:
        if threading.current_thread() is not threading.main_thread():
            self._said.wait(1.0)
            self._real(handle, kind, text)
            return
        self._real(handle, kind, text)
        self._count += 1
        if self._count == self.EXCHANGE:
            self._said.set()
            until(lambda: handle.records(native.RECORD_CALL)[0] is not None, 0.1)

    def undo(self) -> None:
        native.Group.publish = self._real


def wait_in_threads(team: ProcessGroup, waiting: Callable, ends: list[str]) -> list[threading.Thread]:
    """Several where they can wait at the same time: each wakes at another moment."""
    count = 8 if waiting in (wait_in_receive, wait_in_send, wait_in_message) else 1
    before = team.handle.report()["seq"]
    threads = [
        threading.Thread(target=lambda: ends.append(attempt(lambda: waiting(team))), daemon=True) for _ in range(count)
    ]
    for thread in threads:
        thread.start()
    until(lambda: team.handle.report()["seq"] > before, 0.02)  # messages are not counted there
    return threads


def leave(team: ProcessGroup, how: str) -> ProcessGroup | None:
    if how == "shrink":
        order = VoteFirst()
        try:
            return team.shrink(timeout=2.0)
        finally:
            order.undo()
    if how == "abort" and team.rank == 0:
        team.abort()
    if how == "destroy":
        team.destroy()
        until(lambda: leaving.free_retired() or leaving.retired_count() == 0, 0.05)
    return None


def _leave_while_waiting(g: ProcessGroup, waiting: Callable, how: str, turns: int) -> list[str]:
    bad: list[str] = []
    for _ in range(turns):
        team = new_team(g, 1.0)
        mine = extent(team)
        ends: list[str] = []
        threads = wait_in_threads(team, waiting, ends) if g.rank == 0 else []
        g.barrier()
        smaller = leave(team, how)
        claim = Claim(*mine)
        g.barrier()
        for thread in threads:
            thread.join(PROMPT)
            bad += ["the call that waited did not return"] if thread.is_alive() else []
        bad += ["the call that waited returned as if all was well"] if "" in ends else []
        if how == "abort" and g.rank and not attempt(team.barrier):
            bad.append("a call on an aborted group returned")
        if smaller is not None:
            smaller.all_reduce(x := torch.full((N,), float(g.rank + 1)))
            bad += ["wrong values after shrink"] if (x != 3.0).any() else []
            smaller.destroy()
        g.barrier()
        team.destroy()
        bad += [f"rank {g.rank}: {claim.touched()} elements of new tensors written"] if claim.touched() else []
        del claim, team, smaller
    return bad


@pytest.mark.parametrize("how", ["destroy", "abort", "shrink"])
@pytest.mark.parametrize("waiting", WAITS, ids=lambda waiting: waiting.__name__)
def test_left_while_another_thread_waits(waiting: Callable, how: str):
    outcomes = run_group(_leave_while_waiting, 2, waiting, how, 5, deadline=25)
    bad = [text for value in returned(outcomes) for text in value]
    assert not bad, "\n".join(bad)


# --- lists that another thread empties ------------------------------------------------------------------------------


def _emptied(g: ProcessGroup, call: str, make: Callable, n: int, words: Words) -> Any:
    """Rank 0 waits in a call with a list of tensors; another thread empties the list, and others get the memory."""
    x, out = make(n).fill_(g.rank + 1.0), make(n)
    listed = [make(n).fill_(r + 1.0) for r in range(g.size)] if g.rank == 0 or call == "all_gather" else None

    def run() -> None:
        if call == "all_gather":
            g.all_gather(listed, x)
        elif call == "gather":
            g.gather(listed, x, 0)
        else:
            g.scatter(out, listed, 0)

    run()  # the second call takes the core's fast path
    g.barrier()
    out.fill_(0.0)
    if g.rank == 1:
        words.reach(0, 1)
        raised = attempt(run)
        return [0 if raised or call != "scatter" else int((out != 2.0).sum())]
    fresh: list[torch.Tensor] = []

    def empty() -> None:
        until(lambda: g.handle.report()["seq"] == 3)
        listed.clear()
        gc.collect()
        fresh.extend(make(n).fill_(PATTERN) for _ in range(8))
        words[0] = 1

    thread = threading.Thread(target=empty)
    thread.start()
    attempt(run)
    thread.join()
    return [sum(int((t != PATTERN).sum()) for t in fresh)]


@pytest.mark.parametrize("make", [symmetric, ordinary], ids=lambda make: make.__name__)
@pytest.mark.parametrize("call", ["all_gather", "gather", "scatter"])
def test_a_list_is_emptied_while_its_call_waits(call: str, make: Callable):
    outcomes = run_group(_emptied, 2, call, make, 64 * N, Words())
    assert returned(outcomes) == [[0], [0]], "elements of other tensors were written, or read"


# --- interrupted between the start of an operation and the note of it ------------------------------------------------


class Interrupter:
    """Raises KeyboardInterrupt at the ``line``-th line of our own that runs after ``started`` became true."""

    def __init__(self, line: int):
        self.line, self.started, self.raised = line, False, False

    def __enter__(self) -> Interrupter:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: Any, event: str, arg: object) -> Any:
        return self._line if os.path.join("symcomm", "group", "") in frame.f_code.co_filename else None

    def _line(self, frame: Any, event: str, arg: object) -> Any:
        if self.started and event == "line" and not self.raised:
            if self.line == 0:
                self.raised = True
                raise KeyboardInterrupt
            self.line -= 1
        return self._line


POSTED_BY: dict[str, tuple[Any, str]] = {
    "all_reduce": (native.Group, "submit"),
    "irecv": (native.MessageRequest, "post"),  # where the core cannot start it alone
}


def _interrupted(g: ProcessGroup, start: str, words: Words) -> list[str]:
    kind, function = POSTED_BY[start]
    real, bad, line = getattr(kind, function), [], 0
    while True:
        team = new_team(g)
        g.barrier()
        if g.rank == 1:
            words.reach(0, line + 1)
            if start == "all_reduce":
                team.all_reduce(torch.ones(N))
            else:
                team.send(torch.full((N,), 5.0), 0)
            team.barrier()
            g.barrier()
            if words[1]:
                return bad
            line += 1
            continue
        with Interrupter(line) as interrupter:

            def noted(*args: Any, interrupter: Interrupter = interrupter) -> Any:
                result = real(*args)
                interrupter.started = True
                return result

            setattr(kind, function, noted)
            t = symmetric(N).fill_(1.0)
            work = None
            try:
                if start == "all_reduce":
                    work = team.all_reduce(t, async_op=True)
                else:
                    work = team.messages.post(Message.receive(t, 1), "irecv", True)
            except KeyboardInterrupt:
                pass
        setattr(kind, function, real)
        assert interrupter.started
        if work is None:
            del t
            gc.collect()
        fresh = [symmetric(N).fill_(PATTERN) for _ in range(8)]
        words[1] = int(not interrupter.raised)
        words[0] = line + 1
        team.barrier()
        if work is not None:
            work.wait()
        touched = sum(int((x != PATTERN).sum()) for x in fresh)
        bad += [f"line {line}: {touched} elements of other tensors written"] if touched else []
        g.barrier()
        if not interrupter.raised:
            return bad if line > 0 else ["nothing was interrupted"]
        line += 1
        del fresh, team, work


@pytest.mark.parametrize("start", POSTED_BY)
def test_interrupted_before_the_work_is_kept(start: str):
    bad = [text for value in returned(run_group(_interrupted, 2, start, Words())) for text in value]
    assert not bad, "\n".join(bad)


# --- a forked child ------------------------------------------------------------------------------------------------


def _fork_with_work(g: ProcessGroup, start: str) -> Any:
    team = new_team(g)
    x = torch.full((N,), float(g.rank + 1))
    if g.rank == 1:
        g.barrier()
        if start == "all_reduce":
            team.all_reduce(x)
        elif start == "isend":
            team.recv(x, 0)
        else:
            team.send(x, 0)
        return int((x != {"all_reduce": 3.0, "isend": 1.0, "irecv": 2.0}[start]).sum())
    if start == "all_reduce":
        work: Any = team.all_reduce(x, async_op=True)
    else:
        work = team.isend(symmetric(N).fill_(1.0), 1) if start == "isend" else team.irecv(x, 1)
    pid = os.fork()
    if pid == 0:
        first, second = attempt(lambda: work.wait()), attempt(lambda: work.wait(0.1))
        work.is_completed()
        os._exit(7 if first and second else 8)
    ended = until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT), PROMPT)
    if not ended:
        os.kill(pid, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    g.barrier()
    work.wait()
    wrong = int((x != {"all_reduce": 3.0, "isend": 1.0, "irecv": 2.0}[start]).sum())
    return [status, wrong]


@pytest.mark.parametrize("start", ["all_reduce", "isend", "irecv"])
def test_a_forked_child_waits_for_its_parents_work(start: str):
    (status, wrong), peer = returned(run_group(_fork_with_work, 2, start))
    assert wrong == peer == 0
    assert status == 7, "the child waited for ever" if status < 0 else "the child was told that all was well"
