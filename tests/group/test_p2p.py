"""Point-to-point messages: order, tags, sizes, sources, many threads, and what a timeout leaves behind."""

from __future__ import annotations

import os
import random
import re
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import symcomm
from symcomm import ANY_SOURCE, Message, errors, testing
from symcomm.group.process_group import ProcessGroup
from tests.support.faults import run_group
from tests.support.page_gate import Words
from tests.support.ranks import until

SIZES = (0, 1, 7, 1000, 65_536, 100_000, 1_000_001)  # elements: below and above the ring's 256 KiB


def threads(fn: Callable, n: int, *args: object, timeout: float = 20) -> list:
    return symcomm.spawn(fn, n, args, mode="threads", timeout=timeout, deadline=60)


def filled(value: float, count: int, g: ProcessGroup | None = None) -> torch.Tensor:
    """``count`` float32, in symmetric memory when a group is given."""
    if g is None:
        return torch.full((count,), float(value))
    raw = torch.frombuffer(g.arena.buffer(max(4 * count, 4)), dtype=torch.float32)[:count]
    return raw.fill_(value)


def _ring(g: ProcessGroup) -> None:
    after, before = (g.rank + 1) % g.size, (g.rank - 1) % g.size
    for size in SIZES:
        for source in (None, g):
            for target in (None, g):
                sent, got = filled(g.rank, size, source), filled(-1, size, target)
                work = g.isend(sent, after, tag=size)
                assert g.recv(got, before, tag=size) == before
                work.wait()
                assert torch.equal(got, filled(before, size)), (size, source is g, target is g)


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_sizes_and_kinds_of_memory(world: int):
    threads(_ring, world)


def test_between_processes():
    outcomes = run_group(_ring, 3)
    assert all(o.kind == "returned" for o in outcomes), "\n".join(map(str, outcomes))


def _both_ways(g: ProcessGroup) -> None:
    """Everybody sends to everybody before anybody receives."""
    sent = [g.isend(filled(10 * g.rank + r, 300_000), r) for r in range(g.size)]
    got = [torch.empty(300_000) for _ in range(g.size)]
    works = [g.irecv(got[r], r) for r in range(g.size)]
    for work in works + sent:
        assert work.wait()
    assert all(torch.equal(got[r], filled(10 * r + g.rank, 300_000)) for r in range(g.size))


def test_everybody_to_everybody():
    threads(_both_ways, 4)
    assert all(o.kind == "returned" for o in run_group(_both_ways, 4))


@testing.ranks(2)
def test_tags_out_of_order(g: ProcessGroup):
    tags = list(range(30))
    if g.rank == 0:
        works = [g.isend(filled(tag, 1 + 5000 * (tag % 3)), 1, tag) for tag in tags]
        for work in works:
            work.wait()
    else:
        random.Random(1).shuffle(tags)
        for tag in tags:
            got = torch.empty(1 + 5000 * (tag % 3))
            g.recv(got, 0, tag)
            assert got.unique().tolist() == [tag]


def _order(g: ProcessGroup) -> list[float]:
    """Messages of one sender and tag come in the order they were sent, whatever else is on its way."""
    n, got = 400, []
    if g.rank == 0:
        works = [g.isend(filled(i, 1 + 997 * (i % 5)), 1, tag=i % 2) for i in range(n)]
        for work in works:
            work.wait()
        return []
    for i in range(0, n, 2):  # all of tag 1 first: tag 0 is set aside meanwhile
        t = torch.empty(1 + 997 * ((i + 1) % 5))
        g.recv(t, 0, tag=1)
        got.append(t[0].item())
    for i in range(0, n, 2):
        t = torch.empty(1 + 997 * (i % 5))
        g.recv(t, 0, tag=0)
        got.append(t[0].item())
    return got


def test_order_within_a_tag():
    assert threads(_order, 2)[1] == [*range(1, 400, 2), *range(0, 400, 2)]


def _receive_of_what_is_being_set_aside(g: ProcessGroup) -> list[float]:
    if g.rank == 0:
        g.isend(filled(1, 20_000_000), 1, tag=1)
        g.isend(filled(2, 4), 1, tag=2).wait()
        g.barrier()
        return []
    second, first, again = torch.zeros(4), torch.zeros(20_000_000), torch.zeros(20_000_000)
    early = g.irecv(second, 0, tag=2)  # makes room: tag 1 is set aside, 80 MB of it
    time.sleep(0.005)
    late = g.irecv(first, 0, tag=1)  # asked for while half of it is there
    early.wait()
    late.wait(10)
    with pytest.raises(errors.DeadlineError):
        g.recv(again, 0, tag=1, timeout=0.01)
    g.barrier()
    return [first[0].item(), first[-1].item(), second[0].item()]


def test_a_receive_posted_while_its_message_is_being_set_aside():
    assert threads(_receive_of_what_is_being_set_aside, 2)[1] == [1.0, 1.0, 2.0]


def _any_source(g: ProcessGroup) -> list[int]:
    if g.rank:
        g.send(filled(g.rank, 10), 0, tag=4)
        return []
    sources = []
    for _ in range(g.size - 1):
        t = torch.empty(10)
        source = g.recv(t, ANY_SOURCE, tag=4)
        assert t.unique().tolist() == [source]
        sources.append(source)
    return sorted(sources)


def test_any_source():
    assert threads(_any_source, 6)[0] == [1, 2, 3, 4, 5]


@testing.ranks([1, 2])
def test_to_myself(g: ProcessGroup):
    got = torch.zeros(100_000)
    work = g.irecv(got, g.rank)
    g.send(filled(5, 100_000), g.rank)
    work.wait()
    assert got.unique().tolist() == [5.0]
    g.send(filled(6, 10), g.rank)  # small ones wait in the ring
    g.recv(got[:10], g.rank)
    assert got[:10].unique().tolist() == [6.0]


@testing.ranks(3)
def test_batch(g: ProcessGroup):
    after, before = (g.rank + 1) % g.size, (g.rank - 1) % g.size
    got = [torch.zeros(50_000), torch.zeros(3)]
    works = g.batch(
        [
            Message.send(filled(g.rank, 50_000), after),
            Message.receive(got[0], before),
            Message.send(filled(7, 3), before, tag=1),
            Message.receive(got[1], after, tag=1),
        ]
    )
    for work in works:
        assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
    assert got[0].unique().tolist() == [before] and got[1].tolist() == [7.0] * 3
    assert works[1].source == before and works[1].result()[0] is got[0]


@testing.ranks(2)
def test_many_threads_on_one_group(g: ProcessGroup):
    """Several threads of each rank use the group at once: messages, and collectives in an order all agree on."""
    problems: list[BaseException] = []

    def talk(tag: int) -> None:
        try:
            for i in range(50):
                count = 1 + (i * 7919) % 20_000
                work = g.isend(filled(1000 * tag + i, count), 1 - g.rank, tag)
                got = torch.empty(count)
                g.recv(got, 1 - g.rank, tag)
                work.wait()
                assert got.unique().tolist() == [1000.0 * tag + i]
        except BaseException as error:
            problems.append(error)

    team = [threading.Thread(target=talk, args=(tag,)) for tag in range(6)]
    for thread in team:
        thread.start()
    for _ in range(50):
        t = torch.ones(1000)
        g.all_reduce(t)
        assert t[0].item() == 2.0
    for thread in team:
        thread.join()
    assert not problems, problems


@testing.ranks(2)
def test_dropped_works(g: ProcessGroup):
    """Works that nobody keeps still finish, and their tensors live until then."""
    if g.rank == 0:
        for i in range(200):
            g.isend(torch.full((30_000,), float(i)), 1, tag=i)
    for i in range(200) if g.rank == 1 else []:
        got = torch.empty(30_000)
        g.recv(got, 0, tag=i)
        assert got.unique().tolist() == [i]
    g.barrier()


def _wrong_size(g: ProcessGroup) -> list[str]:
    words = []
    for sent, got in (
        (torch.ones(10), torch.ones(9)),
        (torch.ones(100_000), torch.ones(3)),
        (torch.ones(10), torch.ones(10, dtype=torch.int32)),
    ):
        if g.rank == 0:
            g.send(sent, 1)
        else:
            with pytest.raises(errors.BadArgumentError) as caught:
                g.recv(got, 0)
            words.append(str(caught.value))
    if g.rank == 0:
        g.send(torch.full((4,), 3.0), 1)
    else:
        t = torch.empty(4)
        g.recv(t, 0)
        assert t.tolist() == [3.0] * 4
    g.barrier()
    return words


def test_wrong_size_or_dtype_is_an_error_and_the_next_message_is_fine():
    size, long, dtype = threads(_wrong_size, 2)[1]
    assert "rank 0 sent 40 bytes of float32, the tensor here has 36 of float32; make size and dtype equal." in size
    assert "rank 0 sent 400000 bytes" in long
    assert "rank 0 sent 40 bytes of float32, the tensor here has 40 of int32" in dtype


def _timeouts(g: ProcessGroup) -> str:
    t = torch.ones(10)
    message = ""
    if g.rank == 0:
        with pytest.raises(errors.DeadlineError) as caught:
            g.recv(t, 1, tag=9, timeout=0.05)
        message = str(caught.value)
        work = g.irecv(t, ANY_SOURCE, tag=10)
        with pytest.raises(errors.DeadlineError):
            work.wait(0.05)
        with pytest.raises(errors.DeadlineError):
            work.wait()  # it was withdrawn: the answer stays
    g.barrier()
    if g.rank == 1:
        g.send(torch.full((10,), 8.0), 0, tag=9)
    else:
        g.recv(t, 1, tag=9)
        assert t.tolist() == [8.0] * 10
    g.all_reduce(t)
    return message


def test_a_timeout_leaves_the_group_usable():
    message = threads(_timeouts, 2)[0]
    assert re.fullmatch(  # rank 1 may have come to its barrier already
        r"receive from rank 1, tag 9, on group 'world' timed out after 50 ms: the other side did not come"
        r"(: rank 1 waits in barrier\(\) #1, which this rank has not called)?\. The group can still be used\.",
        message,
    )


def _send_that_nobody_takes(g: ProcessGroup) -> None:
    if g.rank == 0:
        g.send(torch.ones(1_000_000), 1, timeout=0.2)
    else:
        time.sleep(0.5)
        g.barrier()


def test_a_large_send_that_nobody_takes_ends_the_group():
    """Half of it is in the ring, so what would come next could not be read."""
    outcomes = run_group(_send_that_nobody_takes, 2)
    assert [type(o.error) for o in outcomes] == [errors.DeadlineError] * 2, "\n".join(map(str, outcomes))
    story = "rank 0 gave up a message to rank 1 of which it had sent a part"
    assert str(outcomes[0].error).startswith(f"send to rank 1, tag 0, on group 'world' failed: {story}")
    assert str(outcomes[1].error).startswith(f"barrier #1 on group 'world' failed: {story}")


def _threads() -> set[str]:
    return set(os.listdir("/proc/self/task"))


def _times_woken(thread: str) -> int:
    status = Path(f"/proc/self/task/{thread}/status").read_text()
    return int(re.search(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.MULTILINE)[1])


def _blocking_after_a_batch(g: ProcessGroup) -> int:
    """How often the thread of unattended messages was woken by the last of many blocking ones."""
    peer, x, y = 1 - g.rank, torch.ones(2), torch.zeros(2)
    before = _threads()
    for work in g.batch([Message.send(x, peer), Message.receive(y, peer)]):
        work.wait()
    (thread,) = _threads() - before
    for _ in range(10):
        woken = _times_woken(thread)
        for _ in range(1000):
            (g.send(x, peer), g.recv(y, peer)) if g.rank else (g.recv(y, peer), g.send(x, peer))
        most = torch.tensor([_times_woken(thread) - woken])
        g.all_reduce(most, symcomm.ReduceOp.MAX)
        if most.item() == 0:
            break
    works = [g.irecv(y, peer), g.isend(x, peer)]  # it is back when it is needed
    assert until(lambda: all(work.is_completed() for work in works))
    return int(most.item())


def test_blocking_messages_wake_no_thread_once_nothing_is_unattended():
    outcomes = run_group(_blocking_after_a_batch, 2)
    assert [o.value for o in outcomes] == [0, 0], "\n".join(map(str, outcomes))


def _asynchronous_and_awaited(g: ProcessGroup) -> int:
    """How often the thread of unattended messages was woken by the last of many that were waited for at once."""
    peer, x, y = 1 - g.rank, torch.ones(2), torch.zeros(2)
    before, most = _threads(), torch.tensor([0])
    g.isend(x, peer).wait()
    g.recv(y, peer)
    (thread,) = _threads() - before
    for _ in range(20):
        woken = _times_woken(thread)
        for _ in range(500):
            for work in (g.irecv(y, peer), g.isend(x, peer)):
                work.wait()
        most = torch.tensor([_times_woken(thread) - woken])
        g.all_reduce(most, symcomm.ReduceOp.MAX)
        if most.item() < 100:
            break
    return int(most.item())


def test_messages_that_are_waited_for_at_once_are_left_to_their_callers():
    """Of 1,000 messages the thread hears only by looking now and then."""
    outcomes = run_group(_asynchronous_and_awaited, 2)
    assert all(o.value is not None and o.value < 100 for o in outcomes), "\n".join(map(str, outcomes))


def _unattended_after_a_pause(g: ProcessGroup, words: Words) -> float:
    """Rank 1 posts a receive when its thread has rested, and looks at nothing but memory until rank 0 has sent."""
    x = torch.full((100_000,), float(g.rank))  # larger than the ring: it does not leave without the thread
    for number in range(1, 4):
        if g.rank == 0:
            assert words.reach(1, number)
            g.send(x + number, 1)
            words[0] = number
        else:
            time.sleep(0.03)  # the thread rests after 10 ms without work
            work = g.irecv(x, 0)
            words[1] = number
            assert words.reach(0, number), "nobody took the message"
            work.wait()
    return x[-1].item()


def test_an_unattended_message_is_taken_by_a_thread_that_has_rested():
    outcomes = run_group(_unattended_after_a_pause, 2, Words())
    assert outcomes[1].value == 3.0, "\n".join(map(str, outcomes))


def _send_and_go(g: ProcessGroup, count: int) -> float:
    if g.rank == 1:
        g.send(filled(4, count), 0)
        g.destroy()
        return 0.0
    t = torch.empty(count)
    g.recv(t, 1)
    return t.sum().item()


@pytest.mark.parametrize("count", [10, 200_000])
def test_a_message_outlives_its_sender(count: int):
    for _ in range(20):
        assert threads(_send_and_go, 2, count)[0] == 4.0 * count


BAD = {
    "rank": (lambda g, t: g.send(t, 2), "send: peer must be a rank of this group, 0 to 1, got 2"),
    "any for send": (lambda g, t: g.send(t, -1), "send: peer must be a rank of this group, 0 to 1, got -1"),
    "receive": (lambda g, t: g.recv(t, -2), r"recv: peer must be .*, or ANY_SOURCE \(-1\), got -2"),
    "name": (lambda g, t: g.irecv(t, "1"), "irecv: peer must be a rank"),
    "tag": (lambda g, t: g.isend(t, 0, tag="a"), "isend: tag must be a whole number"),
    "large tag": (lambda g, t: g.isend(t, 0, tag=1 << 70), "isend: tag must be a whole number of at most 64 bits"),
    "timeout": (lambda g, t: g.recv(t, 0, timeout=-3), "recv: timeout must be a positive number"),
    "tensor": (lambda g, t: g.send([1, 2], 0), "send: tensor must be a tensor"),
    "read-only": (lambda g, t: g.recv(np.broadcast_to(np.ones(1), 4), 0), "tensor must be writable"),
    "expanded": (lambda g, t: g.recv(torch.ones(1).expand(4), 0), "tensor must be .*, got 'an expanded tensor'"),
}


@testing.ranks(2)
def test_bad_arguments(g: ProcessGroup):
    for name, (call, words) in BAD.items():
        with pytest.raises(errors.BadArgumentError, match=words) as caught:
            call(g, torch.ones(3))
        assert "\n" not in str(caught.value), name
    _ring(g)


def _tensors_go(g: ProcessGroup) -> list[bool]:
    """Whether somebody holds a tensor whose message has been waited for, or a collective."""
    peer, alive = 1 - g.rank, []
    for start in (
        lambda t: g.isend(t, peer) if g.rank == 0 else g.irecv(t, peer),
        lambda t: g.all_reduce(t, async_op=True),
    ):
        for _ in range(3):
            tensor = torch.ones(64)
            work = start(tensor)
            work.wait()
            gone = weakref.ref(tensor)
            del tensor, work
            alive.append(gone() is not None)
    return alive


def test_a_tensor_is_let_go_once_its_operation_was_waited_for():
    assert threads(_tensors_go, 2) == [[False] * 6] * 2
