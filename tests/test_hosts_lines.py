"""What hosts meet by: frames on a connection, and the lines of a group."""

from __future__ import annotations

import itertools
import socket
import threading
import time

import pytest
import torch

import symcomm
from symcomm import errors
from symcomm.hosts.engine import TAGS, Move
from symcomm.hosts.lines import Lines
from symcomm.hosts.link import LENGTHS, Broken, Link


def pair() -> tuple[Link, Link]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return Link(ends[0], "a"), Link(ends[1], "b")


def read(link: Link, count: int) -> list:
    frames: list = []
    deadline = time.monotonic() + 10
    while len(frames) < count and time.monotonic() < deadline:
        frames += link.receive()
    return frames


@pytest.mark.parametrize("sizes", [[0, 1, 0, 5000], [100_000, 3, 70_000, 0], [3_000_000, 1]])
def test_frames_arrive_whole_and_in_order(sizes):
    one, other = pair()
    sent = [({"number": k}, bytes([k + 1]) * n) for k, n in enumerate(sizes)]
    for header, payload in sent:
        assert one.send(header, payload)
    pusher = threading.Thread(
        target=lambda: [(one.push(), time.sleep(0.001)) for _ in iter(lambda: one.has_backlog, False)]
    )
    pusher.start()
    assert [(header, bytes(payload)) for header, payload in read(other, len(sent))] == sent
    pusher.join(10)
    assert one.backlog == 0
    one.close()
    with pytest.raises(Broken):
        read(other, 1)
    assert not one.send({"number": 9})


@pytest.mark.parametrize(
    "data", [LENGTHS.pack(1 << 30, 2), LENGTHS.pack(4, 5), LENGTHS.pack(2, 2) + b"x?", LENGTHS.pack(2, 2) + b"[]"]
)
def test_what_is_no_frame_ends_the_connection(data):
    one, other = pair()
    one.sock.sendall(data)
    with pytest.raises(Broken):
        read(other, 1)


def test_what_was_read_before_the_end_is_not_lost():
    """One thread reads the greeting, and more with it; another takes over when the other side has hung up."""
    one, other = pair()
    for k in range(3):
        one.send({"number": k})
    first = next(iter(other.receive()))
    one.close()
    rest = []
    with pytest.raises(Broken):
        for frame in other.receive():
            rest.append(frame)
    assert [header["number"] for header, _ in [first, *rest]] == [0, 1, 2]


def test_strangers_may_not_say_much():
    one, other = pair()
    other.peer = None
    one.send({"token": "x" * 5000})
    with pytest.raises(Broken):
        read(other, 1)


def test_the_lower_rank_calls_and_what_the_other_says_waits():
    ends, heard = pair(), ([], [])
    low = Lines(0, lambda rank: ends[0], lambda rank, frame: heard[0].append((rank, frame[0])))
    high = Lines(
        1,
        lambda rank: pytest.fail("the higher rank never calls"),
        lambda rank, frame: heard[1].append((rank, frame[0])),
    )
    high.send(0, {"from": "high"})
    assert high.has_backlog(0) and not high.is_over(0)
    low.send(1, {"from": "low"})

    def until(lines: Lines, index: int, rank: int) -> None:
        deadline = time.monotonic() + 10
        lines.listen(
            [rank], lambda: 0.0 if heard[index] and not lines.has_backlog(rank) else deadline - time.monotonic()
        )

    threads = [threading.Thread(target=until, args=args) for args in ((low, 0, 1), (high, 1, 0))]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    high.add(0, ends[1])  # wakes the one that listens already
    for thread in threads:
        thread.join(10)
    assert heard == ([(1, {"from": "high"})], [(0, {"from": "low"})])
    low.close()
    rounds = iter([1.0, 0.0])
    high.listen([0], lambda: next(rounds))
    assert high.is_over(0)


def test_operations_have_labels_of_their_own():
    moves = [Move(True, 0, 1, 0, tag, match) for tag in (0, 1) for match in (0, 5, (1 << 27) - 1)]
    assert len({m.label(1 << 30) for m in moves}) == len(moves)
    assert all(m.label(32767) % TAGS == m.tag and m.label(32767) <= 32767 for m in moves)


def test_a_rank_may_leave_as_soon_as_its_call_returned():
    """Its farewell may overtake its arrival, which came by another connection."""

    def rank(group):
        for _ in range(8):
            team = group.split(0)
            x = torch.ones(1000)
            team.all_reduce(x)
            team.destroy()
            assert (x == group.size).all()
        return True

    assert all(symcomm.spawn(rank, 3, mode="threads", hosts=[1, 2], deadline=60, timeout=20))


@pytest.mark.parametrize("hosts", [[1, 1], [2, 2]])
def test_large_calls_that_differ_never_meet(hosts):
    """What was sent before the hosts had met is not taken for something else's."""
    count, size = 300_000, sum(hosts)
    pieces = [torch.ones(count) for _ in range(size)]

    def calls(group):
        mine = torch.ones(count)
        return [
            lambda g: g.scatter(mine, pieces if g.rank == 0 else None, 0),
            lambda g: g.scatter(mine, pieces if g.rank == 1 else None, 1),
            lambda g: g.gather([torch.ones(count) for _ in range(size)] if g.rank == 0 else None, mine, 0),
            lambda g: g.all_to_all_single(torch.ones(count * size), torch.ones(count * size)),
            lambda g: g.all_to_all_single(torch.ones(2 * count * size), torch.ones(2 * count * size)),
            lambda g: g.broadcast(mine, 0),
        ]

    def rank(group):
        made = calls(group)
        for one, other in itertools.pairwise(made):
            team = group.split(0)
            with pytest.raises(errors.CollectiveMismatchError):
                (other if group.rank == size - 1 else one)(team)
            team.destroy()
        return True

    assert all(symcomm.spawn(rank, size, mode="threads", hosts=hosts, deadline=60, timeout=20))
