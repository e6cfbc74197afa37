"""What hosts tell each other by: frames on a connection, the lines of a group, and messages."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
import time
import types
from typing import Any

import pytest
import torch

import symcomm
from symcomm import errors
from symcomm.group.buffers import Buffer
from symcomm.group.p2p import Message
from symcomm.hierarchical.connection import LENGTHS, ConnectionClosed, FramedConnection, ProtocolViolation
from symcomm.hierarchical.engines.base import TAGS, Move
from symcomm.hierarchical.leader_links import LeaderLinks
from symcomm.hierarchical.matcher import MessageMatcher
from symcomm.hierarchical.session import MAC_SIZE, Callee, Caller
from symcomm.types import DType


def strangers(secrets: tuple[bytes, bytes] = (b"s", b"s")) -> tuple[FramedConnection, FramedConnection]:
    ends = socket.socketpair()
    for end in ends:
        end.setblocking(False)
    return FramedConnection(ends[0], "b", Caller(secrets[0], "a", "b")), FramedConnection(
        ends[1], None, Callee(secrets[1], "b")
    )


def pair() -> tuple[FramedConnection, FramedConnection]:
    """Two ends that have proved to each other who they are."""
    one, other = strangers()
    assert not other.handshake() and one.handshake() and other.handshake()
    return one, other


def read(conn: FramedConnection, count: int) -> list:
    frames: list = []
    deadline = time.monotonic() + 10
    while len(frames) < count and time.monotonic() < deadline:
        frames += conn.receive()
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
    with pytest.raises(ConnectionClosed):
        read(other, 1)
    assert not one.send({"number": 9})


@pytest.mark.parametrize(
    "head",
    [b"x?", b"[]", b"[" * 4000, b'{"a":' * 4000, b"\xff\xfe", b'{"n": NaN}', b'{"n": 1' + b"0" * 5000 + b"}"],
    ids=range(7),
)
def test_a_signed_frame_whose_header_is_none_ends_the_connection(head):
    one, other = pair()
    first = LENGTHS.pack(len(head), len(head)) + head
    one.sock.sendall(first + one.session.outgoing.sign(first, b""))
    with pytest.raises(ProtocolViolation):
        read(other, 1)


@pytest.mark.parametrize("data", [LENGTHS.pack(1 << 30, 2), LENGTHS.pack(4, 5), LENGTHS.pack(2, 2) + b"{}" + bytes(16)])
def test_what_is_no_frame_ends_the_connection(data):
    one, other = pair()
    one.sock.sendall(data)
    with pytest.raises(ProtocolViolation):
        read(other, 1)


def taken(tap: socket.socket, conn: FramedConnection) -> bytearray:
    """One whole frame that ``conn`` sends, for somebody in the middle to play with."""
    frame = bytearray()
    while len(frame) < LENGTHS.size or len(frame) < LENGTHS.size + LENGTHS.unpack_from(frame)[0] + MAC_SIZE:
        frame += tap.recv(1 << 20)
        conn.push()
    return frame


@pytest.mark.parametrize("payload", [b"", b"abc", bytes(5000), bytes(70_000)], ids=len)
@pytest.mark.parametrize("what", ["nothing", "header", "payload", "mac", "twice", "swapped", "left out", "reflected"])
def test_a_frame_that_was_touched_on_its_way_is_never_seen(what, payload):
    one, other = pair()
    wire = one.sock
    tap, one.sock = socket.socketpair()
    one.sock.setblocking(False)
    frames = []
    for k in range(2):
        assert one.send({"number": k}, payload)
        frames.append(taken(tap, one))
    spot = {"header": 10, "payload": -MAC_SIZE - 1, "mac": -1}.get(what)
    if spot is not None:
        frames[0][spot] ^= 1
    sent = {"twice": [frames[0]] * 2, "swapped": frames[::-1], "left out": frames[1:]}.get(what, frames)
    reader, writer = (other, wire) if what != "reflected" else (one, other.sock)
    one.sock = wire
    writer.settimeout(10)
    pusher = threading.Thread(target=writer.sendall, args=(b"".join(sent),))
    pusher.start()
    reader.sock.settimeout(10)
    seen: list = []
    with contextlib.suppress(ProtocolViolation):
        while len(seen) < 2:
            for header, body in reader.receive():
                assert bytes(body) == payload
                seen.append(header["number"])
        seen.append("all")
    reader.close()
    pusher.join(10)
    assert seen == {"nothing": [0, 1, "all"], "twice": [0]}.get(what, [])


@pytest.mark.parametrize("secrets", [(b"s", b"t"), (b"s", b""), (b"", b"s")])
def test_neither_side_talks_to_one_that_holds_another_secret(secrets):
    one, other = strangers(secrets)
    one.send({"number": 1}, b"payload")
    assert not other.handshake()
    with pytest.raises(ProtocolViolation, match="another job token"):
        one.handshake()
    assert one.backlog and not one.wants_to_send  # not a byte of it has left
    with pytest.raises(ConnectionClosed):
        one.close()
        other.handshake()


def test_a_handshake_cannot_be_played_back():
    """What a rank said once opens nothing, though it was all heard."""
    one, other = strangers()
    greeting = bytes(other.sock.recv(4096, socket.MSG_PEEK))
    assert not other.handshake() and one.handshake()
    one.send({"number": 1})
    rest = bytes(other.sock.recv(4096, socket.MSG_PEEK))
    assert [header for header, _ in read(other, 1)] == [{"number": 1}]
    thief, victim = strangers()
    victim.sock.recv(4096)  # what the thief's own side said
    thief.sock.sendall(greeting)
    assert not victim.handshake()
    thief.sock.sendall(rest)
    with pytest.raises(ProtocolViolation):
        victim.handshake()


def test_what_is_said_early_is_held_back_and_then_comes_in_order():
    one, other = strangers()
    for k in range(3):
        assert one.send({"number": k}, bytes(k))
    assert one.has_backlog and not one.wants_to_send
    assert not other.handshake() and not list(one.receive())
    assert not one.has_backlog
    assert [(header["number"], len(payload)) for header, payload in read(other, 3)] == [(0, 0), (1, 1), (2, 2)]


def test_what_was_read_before_the_end_is_not_lost():
    """One thread reads the greeting, and more with it; another takes over when the other side has hung up."""
    one, other = pair()
    for k in range(3):
        one.send({"number": k})
    first = next(iter(other.receive()))
    one.close()
    rest = []
    with pytest.raises(ConnectionClosed):
        for frame in other.receive():
            rest.append(frame)
    assert [header["number"] for header, _ in [first, *rest]] == [0, 1, 2]


def test_the_lower_rank_calls_and_what_the_other_says_waits():
    ends, heard = pair(), ([], [])
    low = LeaderLinks(0, lambda rank: ends[0], lambda rank, frame: heard[0].append((rank, frame[0])))
    high = LeaderLinks(
        1,
        lambda rank: pytest.fail("the higher rank never calls"),
        lambda rank, frame: heard[1].append((rank, frame[0])),
    )
    high.send(0, {"from": "high"})
    assert high.has_backlog(0) and not high.is_closed(0)
    low.send(1, {"from": "low"})

    def until(lines: LeaderLinks, index: int, rank: int) -> None:
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
    assert high.is_closed(0)


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


def test_a_cancelled_message_is_made_up_for_and_no_other() -> None:
    """A receiver that has not heard yet makes a place for it: zeros of that size go there, and of no other."""
    told: list[dict[str, Any]] = []
    moved: list[tuple[int, int]] = []

    class Stub:
        size, rank, name, timeout = 2, 0, "stub", 1.0
        cond = threading.Condition()
        failures = types.SimpleNamespace(verdict=None)

        def tell(self, rank: int, header: dict[str, Any], payload: bytes = b"") -> bool:
            told.append(header)
            return True

        class engine:
            @staticmethod
            def start(moves: Any, then: Any) -> None:
                moved.extend((move.peer, move.nbytes) for move in moves)

    stub = Stub()
    matcher = MessageMatcher(stub)
    tensor = torch.zeros(100, dtype=torch.uint8)
    buffer = Buffer(tensor.data_ptr(), 100, DType.UINT8, tensor)
    works = [matcher.send(Message.send(tensor, 1), buffer, 0) for _ in range(2)]
    assert matcher.cancel(works[0]) and told[-1] == {"kind": "cancelled", "number": 0}
    for rank, number, nbytes in ((1, 0, 99), (1, 5, 100), (0, 1, 100), (1, 1, 1 << 40)):
        with pytest.raises(ProtocolViolation):
            matcher.on_clear_to_send(rank, {"number": number, "nbytes": nbytes})
    assert not moved
    matcher = MessageMatcher(stub)
    works = [matcher.send(Message.send(tensor, 1), buffer, 0) for _ in range(2)]
    assert matcher.cancel(works[0])
    matcher.on_clear_to_send(1, {"number": 0, "nbytes": 100})
    assert told[-1] == {"kind": "sending", "number": 0, "real": False} and moved == [(1, 100)]
    matcher.on_clear_to_send(1, {"number": 1, "nbytes": 100})
    assert told[-1] == {"kind": "sending", "number": 1, "real": True} and moved == [(1, 100)] * 2
    with pytest.raises(ProtocolViolation):
        matcher.on_clear_to_send(1, {"number": 0, "nbytes": 100})
