"""A posted receive is served whatever its owner does, from any source or not, on any host; and two ranks that wait for
each other across hosts are named. Threads as ranks, pretended hosts, real Gloo; processes where one stops or dies."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import symcomm
from symcomm import errors
from symcomm.hierarchical.p2p import EAGER_MAX_NONBLOCKING
from tests.support.ranks import run_ranks, until

ANY = symcomm.ANY_SOURCE
SIZES = [0, 25, 3072, 200_000]  # elements: nothing, eager, just beyond, large; all of them tens of ms at most
assert SIZES[1] * 4 <= EAGER_MAX_NONBLOCKING < SIZES[2] * 4


def run(fn: Callable, hosts: list[int], *args: Any, **more: Any) -> list[Any]:
    more = {"timeout": 20.0, "deadline": 60, **more}
    return symcomm.spawn(fn, sum(hosts), args, mode="threads", hosts=hosts, **more)


def full(count: int, value: float) -> torch.Tensor:
    return torch.full((count,), value)


# --- the owner does something else --------------------------------------------------------------------------------


def _in_a_collective(g: Any, x: torch.Tensor) -> None:
    g.all_reduce(x)


def _in_a_barrier(g: Any, x: torch.Tensor) -> None:
    g.barrier()


def _in_a_wait_for_another_work(g: Any, x: torch.Tensor) -> None:
    g.all_reduce(x, async_op=True).wait()


OWNERS = {"collective": _in_a_collective, "barrier": _in_a_barrier, "work": _in_a_wait_for_another_work}


def served(g: Any, owner: str, source: int) -> list[Any]:
    """Rank 0 posts receives and goes on; the others wait for their sends first."""
    said = []
    for count in SIZES:
        if g.rank == 0:
            tensors = [torch.zeros(count) for _ in range(1, g.size)]
            works = [g.irecv(x, source if source == ANY else i + 1, 5) for i, x in enumerate(tensors)]
            g.barrier()
            OWNERS[owner](g, torch.ones(70_000))
            for x, work in zip(tensors, works, strict=True):
                said.append((work.wait(), bool((x == work.source).all())))
        else:
            g.barrier()
            g.isend(full(count, float(g.rank)), 0, 5).wait()
            OWNERS[owner](g, torch.ones(70_000))
    return said


@pytest.mark.parametrize("hosts", [[1, 1], [2, 1], [1, 2, 1]], ids=str)
@pytest.mark.parametrize("owner", OWNERS)
def test_a_posted_receive_from_any_rank_is_served_while_its_owner_is_in(owner: str, hosts: list[int]):
    said = run(served, hosts, owner, ANY)[0]
    assert said == [(True, True)] * len(SIZES) * (sum(hosts) - 1)


def owner_computes(g: Any, done: threading.Event) -> float:
    """Rank 0 does not call us at all until the senders are through."""
    if g.rank:
        g.barrier()
        g.isend(full(200_000, float(g.rank)), 0).wait()
        done.set()
        return 0.0
    x = torch.zeros(200_000)
    work = g.irecv(x)
    g.barrier()
    assert done.wait(30)
    assert until(work.is_completed, 20)  # a sender is done when the kernel has its bytes
    return x.mean().item()


def test_a_posted_receive_is_served_while_its_owner_does_not_call_us():
    assert run(owner_computes, [1, 1], threading.Event())[0] == 1.0


# --- order --------------------------------------------------------------------------------------------------------


def in_order(g: Any, where: str) -> list[list[float]]:
    """One sender, one tag, sizes that take different ways. Receives of either kind get them in the order of posting."""
    sender, counts = g.size - 1, [3, 3072, 5, 70_000, 4, 4, 20_000, 2]
    kinds = [ANY, sender, ANY, ANY, sender, ANY, sender, ANY]
    if where == "posted before" and g.rank != 0:
        g.barrier()
    if g.rank == sender:
        works = [g.isend(full(n, float(i)), 0, 9) for i, n in enumerate(counts)]
        if where == "posted after":
            g.barrier()
        for work in works:
            work.wait()
        return []
    if where == "posted after":
        g.barrier()
    if g.rank:
        return []
    tensors = [torch.full((n,), -1.0) for n in counts]
    works = [g.irecv(x, kind, 9) for x, kind in zip(tensors, kinds, strict=True)]
    if where == "posted before":
        g.barrier()
    for work in reversed(works):
        work.wait()
        assert work.source == sender
    return [x.unique().tolist() for x in tensors]


@pytest.mark.parametrize("hosts", [[1, 1], [2, 1], [1, 2]], ids=str)
@pytest.mark.parametrize("where", ["posted before", "posted after"])
def test_messages_of_one_sender_arrive_in_order_whatever_the_receives_name(where: str, hosts: list[int]):
    assert run(in_order, hosts, where)[0] == [[float(i)] for i in range(8)]


def from_both_sides(g: Any, rounds: int) -> dict[int, list[float]]:
    """Ranks beside the receiver and of other hosts, and the receiver itself, send at once."""
    counts = [10, 3072, 40_000]
    sends = [g.isend(full(n, float(i)), 0, n) for n in counts for i in range(rounds)]
    found: dict[int, list[float]] = {}
    if g.rank == 0:
        for n in counts:
            tensors = [torch.full((n, 2), -1.0)[:, 0] for _ in range(rounds * g.size)]  # not contiguous
            works = [g.irecv(x, tag=n) for x in tensors]
            for x, work in zip(tensors, works, strict=True):
                work.wait()
                (value,) = x.unique().tolist()
                found.setdefault(work.source, []).append(value)
    for work in sends:
        work.wait()
    g.barrier()
    return found


def test_a_receive_from_any_rank_takes_messages_of_this_host_and_of_others():
    """Each message once, and those of a sender in order."""
    rounds = 8
    for hosts in ([2, 2], [1, 1, 2]):
        found = run(from_both_sides, hosts, rounds)[0]
        assert found == {rank: [float(i) for i in range(rounds)] * 3 for rank in range(sum(hosts))}


def reposted(g: Any) -> list[float]:
    """Rank 2 takes a message back that rank 0 has accepted already: the receive is posted again, in its old place."""
    if g.rank == 2:
        with pytest.raises(errors.DeadlineError, match="can still be used"):
            g.send(full(100_000, 1.0), 0, 9, timeout=0.1)
    if g.rank == 0:
        g.matcher.on_cancelled = lambda rank, header: None
    g.barrier()
    if g.rank == 0:
        first, second = torch.zeros(100_000), torch.zeros(100_000)
        works = [g.irecv(first, ANY, 9)]
        assert until(lambda: works[0].moving, 20) or works[0].sender == ANY
        works.append(g.irecv(second, ANY, 9))
        assert until(lambda: not works[0].moving, 20)
        g.barrier()
        for work in works:
            work.wait()
        return [first.mean().item(), second.mean().item()]
    g.barrier()
    if g.rank == 1:
        for value in (2.0, 3.0):
            g.send(full(100_000, value), 0, 9)
    return []


def test_a_receive_whose_message_was_taken_back_keeps_its_place():
    assert run(reposted, [2, 1])[0] == [2.0, 3.0]


# --- receives that end without a message --------------------------------------------------------------------------


def given_up(g: Any, sender: int) -> list[float]:
    """A receive that raised is not written to: the next one gets the message."""
    x, y = torch.zeros(3072), torch.zeros(3072)
    if g.rank == 0:
        with pytest.raises(errors.DeadlineError, match="receive from any rank, tag 0, .*can still be used") as caught:
            g.irecv(x).wait(0.2)
        assert caught.value.missing == []
    g.barrier()
    if g.rank == sender:
        g.isend(full(3072, 7.0), 0).wait()
    if g.rank == 0:
        assert g.irecv(y).wait() and (x == 0).all()
    g.barrier()
    return [x.mean().item(), y.mean().item()]


@pytest.mark.parametrize("sender", [0, 1, 2])
def test_a_receive_from_any_rank_that_gave_up_is_not_written_to(sender: int):
    assert run(given_up, [2, 1], sender)[0] == [0.0, 7.0]


def of_another_size(g: Any) -> list[str]:
    said = []
    for sender in (1, 2):
        for source in (sender, ANY):
            if g.rank == sender:
                g.send(torch.empty(3), 3, 2)
            if g.rank == 3:
                with pytest.raises(errors.BadArgumentError) as caught:
                    g.recv(torch.empty(2), source, 2)
                said.append(str(caught.value))
            g.barrier()
    return said


def test_a_message_of_another_size_is_told_with_the_ranks_of_the_group():
    for i, said in enumerate(run(of_another_size, [2, 2])[3]):
        assert f"on group 'world': rank {1 + i // 2} sent 12 bytes of float32, the tensor here has 8" in said, said


def group_fails(g: Any, told: threading.Event) -> tuple[str, float, float]:
    """The group fails while receives are posted; what comes afterwards is written nowhere."""
    named, anyone = torch.zeros(10), torch.zeros(10)
    if g.rank == 0:
        works = [g.irecv(named, 1, 1), g.irecv(anyone, ANY, 2)]
        g.barrier()
        said = ""
        for work in works:
            with pytest.raises(errors.GroupUnusableError) as caught:
                work.wait()
            said = str(caught.value)
        told.set()
        time.sleep(0.3)  # for what rank 1 sends, which nobody may notice
        return said, named.sum().item(), anyone.sum().item()
    header = {"kind": "envelope", "number": 10**6, "dtype": 0, "nbytes": 40, "inline": True}
    g.barrier()
    send = g.isend(torch.ones(10), 0, 77)  # the header's dtype is that of this one
    send.wait()
    g.failures.abort()
    assert told.wait(30)
    for tag in (1, 2):
        g.tell(0, {**header, "dtype": int(send.buffer.dtype), "tag": tag}, torch.ones(10).numpy().tobytes())
    return "", 0.0, 0.0


def test_receives_that_raised_because_the_group_failed_are_not_written_to():
    said, named, anyone = run(group_fails, [1, 1], threading.Event())[0]
    assert "aborted by rank 1" in said and named == anyone == 0


def leaves(g: Any, gone: threading.Event) -> str:
    """The receive's owner destroys the group: the sender is told."""
    x = torch.zeros(3072)
    if g.rank == 0:
        work = g.irecv(x)
        g.barrier()
        g.destroy()
        gone.set()
        with pytest.raises(errors.GroupUnusableError):
            work.wait()
        return ""
    g.barrier()
    assert gone.wait(30)
    with pytest.raises(errors.RankFailedError, match="left the group") as caught:
        g.isend(x, 0).wait()
    assert caught.value.ranks == [0]
    return "told"


def test_a_sender_is_told_that_the_receiver_has_left():
    assert run(leaves, [1, 1], threading.Event())[1] == "told"


def leaves_in_the_middle(g: Any, over: threading.Event) -> tuple[str, float]:
    """A rank leaves while the engine fills its tensor: from then on it is the caller's own."""
    n = 8 << 20
    x = torch.ones(n) if g.rank else torch.zeros(n)
    if g.rank:
        g.barrier()
        with pytest.raises(errors.SymcommError):
            for _ in range(50):
                g.isend(x, 0).wait()
        assert over.wait(30)
        return "", 0.0
    start, begun = g.engine.start, threading.Event()
    g.engine.start = lambda *args: (start(*args), begun.set())[0]
    work = g.irecv(x)
    g.barrier()
    assert begun.wait(30)
    g.destroy()
    x.fill_(-5.0)
    time.sleep(0.3)
    over.set()
    return ("completed" if work.is_success() else "raised"), (x != -5.0).sum().item()


def test_nothing_is_written_after_the_group_was_destroyed():
    assert run(leaves_in_the_middle, [1, 1], threading.Event())[0][1] == 0


# --- ranks that end or stop ---------------------------------------------------------------------------------------


def _join(rank: int, world: int, path: str, hosts: list[int], timeout: float = 30.0) -> Any:
    os.environ["SYMCOMM_HOST_ID"] = str(hosts[rank])
    return symcomm.init(store=symcomm.FileStore(path, world), rank=rank, world_size=world, timeout=timeout)


def _waits_for_the_dead(rank: int, world: int, path: str, hosts: list[int], source: int) -> list[int]:
    """Rank 0 waits for rank 3, which it has never talked to, or for anybody; rank 3 dies."""
    g = _join(rank, world, path, hosts)
    x = torch.zeros(3072)
    g.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == 0:
        with pytest.raises(errors.RankFailedError) as caught:
            g.irecv(x, source).wait()
        assert "rank 3" in str(caught.value) and (x == 0).all()
        return caught.value.ranks
    return []


@pytest.mark.parametrize("hosts", [[0, 0, 1, 1], [0, 1, 1, 0]], ids=["there", "here"])
@pytest.mark.parametrize("source", [3, ANY], ids=["named", "any"])
def test_a_rank_that_died_is_noticed_by_whoever_waits_for_its_message(tmp_path, hosts: list[int], source: int):
    outcomes = run_ranks(_waits_for_the_dead, 4, str(tmp_path / "store"), hosts, source, outcomes=True)
    assert outcomes[0].value == [3], list(map(str, outcomes))


def _dies_half_way(rank: int, world: int, path: str) -> tuple[list[int], list[float]]:
    """Rank 1 dies once the engine has begun to carry its message."""
    g = _join(rank, world, path, [0, 1])
    n = 16 << 20
    x = torch.full((n,), float(rank))
    if rank == 1:
        start = g.engine.start

        def dying(*args: Any) -> Any:
            threading.Timer(0.002, os.kill, (os.getpid(), signal.SIGKILL)).start()
            return start(*args)

        g.barrier()
        g.engine.start = dying
        g.isend(x, 0).wait()
        time.sleep(30)
    work = g.irecv(x)
    g.barrier()
    try:
        work.wait()
        assert (x == 1).all()  # a busy machine may kill it too late
        return [1], [5.0]
    except errors.RankFailedError as error:
        x.fill_(5.0)
        time.sleep(0.2)
        return error.ranks, x.unique().tolist()


def test_a_sender_that_dies_half_way_is_named_and_its_message_is_over(tmp_path):
    outcomes = run_ranks(_dies_half_way, 2, str(tmp_path / "store"), outcomes=True)
    assert outcomes[0].value == ([1], [5.0]), list(map(str, outcomes))


def _is_stopped(rank: int, world: int, path: str, hosts: list[int]) -> str:
    """The owner of the receive stops; its sender is told so, and the message is withdrawn."""
    g = _join(rank, world, path, hosts)
    x = torch.full((400_000,), float(rank))
    g.barrier()
    if rank == 0:
        g.barrier()
        os.kill(os.getpid(), signal.SIGSTOP)
        g.irecv(x).wait()
        g.barrier()
        return f"{x.mean().item()}"
    pid = g.peer_info[0]["pid"]
    g.barrier()

    def stopped() -> bool:
        with open(f"/proc/{pid}/status") as file:
            return "State:\tT" in file.read()

    assert until(stopped, 20)
    try:
        with pytest.raises(errors.DeadlineError) as caught:
            g.isend(x, 0).wait(0.3)
    finally:
        os.kill(pid, signal.SIGCONT)
    g.isend(x * 2, 0).wait()
    g.barrier()
    return str(caught.value)


def test_a_sender_is_told_that_the_receiver_is_stopped(tmp_path):
    value, said = run_ranks(_is_stopped, 2, str(tmp_path / "store"), [0, 1])
    assert value == "2.0"
    assert said == (
        "send to rank 0, tag 0, on group 'world' timed out after 300 ms: the other side did not come: "
        "rank 0 does not answer (stopped, or cut off?). The group can still be used."
    )


# --- stand-offs ---------------------------------------------------------------------------------------------------


class Heard(logging.Handler):
    """Keeps the warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def heard():
    handler, log = Heard(), logging.getLogger("symcomm.group.standoff")
    log.addHandler(handler)
    yield handler
    log.removeHandler(handler)


def stands_off(g: Any, who: int, how: str) -> str:
    """``who`` waits for a message to or from rank 0, or from any; all others are in the collective."""
    g.barrier()
    total = torch.full((4,), float(g.rank + 1))
    said = ""
    if g.rank == who:
        tensor = torch.zeros(1 << 20)
        with pytest.raises(errors.DeadlineError) as caught:
            if how == "send":
                g.isend(tensor, 0, tag=7).wait(2.5)
            else:
                g.recv(tensor, ANY if how == "any" else 0, tag=7, timeout=2.5)
        said = str(caught.value)
    g.all_reduce(total)  # nothing was harmed
    assert total.eq(sum(range(1, g.size + 1))).all()
    return said


@pytest.mark.parametrize(("how", "who"), [("recv", 1), ("any", 1), ("send", 2), ("recv", 2), ("any", 2)])
def test_a_message_and_a_collective_that_wait_for_each_other_are_named(heard: Heard, how: str, who: int):
    said = run(stands_off, [2, 1], who, how)[who]
    others = f"ranks 0, {3 - who} wait" if how == "any" else "rank 0 waits"
    what = {"send": "send to rank 0", "recv": "receive from rank 0", "any": "receive from any rank"}[how]
    words = f"{others} in all_reduce(float32 x 4, SUM) #2, which"
    assert said == (
        f"{what}, tag 7, on group 'world' timed out after 2.5 s: the other side did not come: "
        f"{words} this rank has not called. The group can still be used."
    )
    (line,) = heard.lines
    assert line.startswith(f"{what}, tag 7, on group 'world': {words} rank {who} has not called, and rank {who} waits")


def half_sent(g: Any) -> str:
    """To a rank of the same host the first part of a message leaves at once: who gives up then ends the group."""
    g.barrier()
    with pytest.raises(errors.DeadlineError) as caught:
        if g.rank == 1:
            g.isend(torch.zeros(1 << 20), 0, tag=7).wait(1.5)
        else:
            g.all_reduce(torch.ones(4))
    return str(caught.value)


def test_a_stand_off_in_the_middle_of_a_message_is_named_as_well():
    words = "rank 0 did not go on when the message was half way (rank 0 waits in all_reduce(float32 x 4, SUM) #2"
    for said in run(half_sent, [2, 1]):
        assert f"{words}, which rank 1 has not called)" in said


def is_late(g: Any) -> str:
    if g.rank == 1:
        with pytest.raises(errors.SymcommError):
            g.recv(torch.zeros(1), 0, tag=3)
        return ""
    assert until(lambda: g.failures.survey([1])[1]["awaits"], 20)
    with pytest.raises(errors.DeadlineError) as caught:
        g.all_reduce(torch.ones(4), timeout=0.7)
    assert caught.value.missing == [1]
    return str(caught.value)


def test_a_collective_that_is_late_says_that_the_missing_rank_waits_for_a_message():
    assert (
        "rank 1 was last seen before its first operation and waits for a message from rank 0" in run(is_late, [1, 1])[0]
    )


def is_only_slow(g: Any, kind: str) -> None:
    """Another thread of the receiver is in the collective, or its sender does something else: nobody waits in vain."""
    x = torch.zeros(5)
    if g.rank == 0:
        work = g.all_reduce(torch.ones(5), async_op=True) if kind == "queued" else None
        g.recv(x, 1)
        if work is not None:
            work.wait()
        return
    if kind == "queued":
        g.all_reduce(torch.ones(5), async_op=True)
    time.sleep(1.6)
    g.send(x, 0)


@pytest.mark.parametrize("kind", ["queued", "busy"])
def test_ranks_that_are_only_slow_are_not_spoken_of(heard: Heard, kind: str):
    run(is_only_slow, [1, 1], kind)
    assert heard.lines == []
