"""Whoever connects to a rank's control channel without being a rank of the job, and ranks that send what none does:
each loses its connection, is logged and counted, and nobody else notices."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch

import symcomm
from symcomm import errors
from symcomm.group.default import join_ranks
from symcomm.group.factory import make_group
from symcomm.hierarchical import listener
from symcomm.hierarchical.connection import LENGTHS, FramedConnection, ProtocolViolation
from symcomm.hierarchical.connection import ConnectionClosed as LinkOver
from symcomm.hierarchical.control_channel import ControlChannel, Endpoint
from symcomm.hierarchical.frames import AGREEMENT_STEPS, FIELDS, check
from symcomm.hierarchical.operation import Operation
from symcomm.store import HashStore, TCPStore, tcp_server
from symcomm.store.address import LOOPBACK
from symcomm.windows.hosts import Arrivals, _inbox_of
from tests.support.ranks import until

GARBAGE = {
    "http": b"GET / HTTP/1.0\r\n\r\n",
    "no object": LENGTHS.pack(5, 5) + b"[1,2]",
    "lone surrogate": LENGTHS.pack(18, 18) + b'{"token":"\\ud800"}',
    "surrogate as name": LENGTHS.pack(35, 35) + b'{"from":"\\ud800","nonce":"' + b"a" * 8 + b'"}',
    "nested": LENGTHS.pack(4000, 4000) + b"[" * 4000,
    "nested objects": LENGTHS.pack(4000, 4000) + b'{"a":' * 800,
    "not text": LENGTHS.pack(2, 2) + b"\xff\xfe",
    "huge": LENGTHS.pack(1 << 30, 1 << 30),
    "header beyond the frame": LENGTHS.pack(3, 5),
    "a greeting with a payload": LENGTHS.pack(3, 2) + b"{}x",
    "empty": LENGTHS.pack(2, 2) + b"{}",
    "types": LENGTHS.pack(20, 20) + b'{"from":1,"nonce":2}',
    "a list for a group": LENGTHS.pack(38, 38) + b'{"from":"x","nonce":"y","group":["z"]}',
    "nothing at all": b"",
}


def run(fn: Any, hosts: list[int], *args: Any, timeout: float = 10) -> list[Any]:
    return symcomm.spawn(fn, sum(hosts), args, mode="threads", hosts=hosts, deadline=60, timeout=timeout)


def hung_up(sock: socket.socket) -> bool:
    """Whether the other side ends the connection, after what it may have said."""
    sock.settimeout(10)
    with contextlib.suppress(ConnectionResetError):
        while sock.recv(1 << 16):
            pass
    return True


class Group:
    """A group, as its control channel knows it, that keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, dict[str, Any], bytes]] = []
        self.lost: list[str] = []

    def on_message(self, sender: str, header: dict[str, Any], payload: bytes | bytearray) -> None:
        self.told.append((sender, header, bytes(payload)))

    def on_leader_link(self, sender: str, group: FramedConnection) -> None:
        group.close()

    def on_lost(self, nonce: str) -> None:
        self.lost.append(nonce)


class Pair:
    """Two control channels, and whether they still get through to each other."""

    def __init__(self) -> None:
        self.groups = Group(), Group()
        self.channels = ControlChannel("aa.1"), ControlChannel("bb.2")
        for channel, group in zip(self.channels, self.groups, strict=True):
            assert channel.join("g", group)
        self.endpoints = [channel.open_endpoint(LOOPBACK) for channel in self.channels]
        self._numbers = itertools.count()

    def knock(self, data: bytes = b"") -> socket.socket:
        sock = socket.create_connection((LOOPBACK, self.endpoints[0].port), 10)
        sock.sendall(data)
        return sock

    def still_work(self) -> bool:
        number = next(self._numbers)
        sent = self.channels[1].send(self.endpoints[0], {"group": "g", "number": number}, b"payload")
        arrived = until(lambda: ("bb.2", {"group": "g", "number": number}, b"payload") in self.groups[0].told)
        return sent and arrived and self.channels[0]._thread.is_alive()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    assert made.still_work()
    for channel in made.channels:
        channel.close()
        assert not channel._thread.is_alive()


# --- strangers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [False, True], ids=["before a rank has called", "after"])
def test_garbage_ends_its_own_connection_only(pair: Pair, known: bool, caplog: pytest.LogCaptureFixture) -> None:
    assert not known or pair.still_work()
    with caplog.at_level(logging.WARNING, "symcomm.hosts"):
        for data in GARBAGE.values():
            sock = pair.knock(data)
            sock.shutdown(socket.SHUT_WR)
            assert hung_up(sock)
    stats = pair.channels[0].stats()
    assert stats["refused"] == len(GARBAGE) == len(stats["reasons"]) and not stats["strangers"]
    assert sum("127.0.0.1 port" in record.getMessage() for record in caplog.records) == len(GARBAGE)
    assert not pair.groups[0].lost


def test_a_wrong_proof_is_not_let_in(pair: Pair) -> None:
    right = pair.endpoints[0]
    other = ControlChannel("cc.3")
    group = Group()
    assert other.join("g", group)
    assert other.send(right._replace(secret="something else"), {"group": "g", "number": 1})
    assert until(lambda: "aa.1" in group.lost) and not other.backlog("aa.1")
    assert all(sender != "cc.3" for sender, _, _ in pair.groups[0].told)
    other.close()


def test_an_impostor_is_told_nothing(pair: Pair) -> None:
    """Somebody else listens where a rank was: not a frame reaches it."""
    with socket.create_server((LOOPBACK, 0)) as fake:
        impostor = Endpoint("aa.1", LOOPBACK, fake.getsockname()[1], pair.endpoints[0].secret)
        assert pair.channels[1].send(impostor, {"group": "g", "secret": "word"}, b"secret payload")
        sock, _ = fake.accept()
        sock.settimeout(10)
        said = sock.recv(1 << 16)
        answer = json.dumps({"nonce": "00" * 32, "proof": "00" * 32}).encode()
        sock.sendall(LENGTHS.pack(len(answer), len(answer)) + answer)
        while more := sock.recv(1 << 16):
            said += more
    assert b"word" not in said and b"payload" not in said and pair.endpoints[0].secret.encode() not in said
    assert until(lambda: pair.groups[1].lost == ["aa.1"])
    pair.channels[1]._lost.clear()  # the impostor is gone, and the rank it posed as was never met


def test_strangers_are_few_and_not_for_long(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four hundred that say nothing: descriptors stay, ranks get in at once, and after a while no stranger is left."""
    monkeypatch.setattr(listener, "ROOM_S", 0.05)
    before = len(os.listdir("/proc/self/fd"))
    silent = [pair.knock() for _ in range(400)]
    assert pair.still_work()
    assert len(os.listdir("/proc/self/fd")) - before <= len(silent) + listener.STRANGERS + 4
    assert pair.channels[0].stats()["strangers"] <= listener.STRANGERS
    monkeypatch.setattr(listener, "GREETING_S", 0.1)
    assert until(lambda: not pair.channels[0].stats()["strangers"])
    assert all(hung_up(sock) for sock in silent)
    for sock in silent:
        sock.close()
    assert len(os.listdir("/proc/self/fd")) - before <= 4  # what the two ranks have for each other


def test_a_greeting_has_five_seconds_and_a_proof_thirty(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (listener.GREETING_S, listener.PROOF_S) == (5.0, 30.0)
    monkeypatch.setattr(listener, "GREETING_S", 0.2)
    monkeypatch.setattr(listener, "PROOF_S", 1.5)
    greeting = json.dumps({"from": "zz.9", "nonce": "00" * 32}).encode()
    begun = time.monotonic()
    silent, slow = pair.knock(), pair.knock(LENGTHS.pack(len(greeting), len(greeting)) + greeting)
    assert hung_up(silent) and hung_up(slow) and time.monotonic() - begun >= 1.4
    assert [reason.split(" ", 3)[3] for reason in pair.channels[0].stats()["reasons"]] == [
        "sent no greeting in 0.2 s", "did not prove in 1.5 s who it is",
    ]  # fmt: skip


def test_young_strangers_are_not_pushed_out(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """When many ranks call at once, those that are too many wait in the kernel; nobody is refused."""
    monkeypatch.setattr(listener, "STRANGERS", 3)
    monkeypatch.setattr(listener, "ROOM_S", 60.0)
    others = [ControlChannel(f"{i:02x}.9") for i in range(20)]
    for i, channel in enumerate(others):
        assert channel.join("g", Group()) and channel.send(pair.endpoints[0], {"group": "g", "number": i})
    assert until(lambda: len(pair.groups[0].told) == len(others))
    assert not pair.channels[0].stats()["refused"]
    for channel in others:
        channel.close()


def test_out_of_descriptors_the_door_waits(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    knocks = [socket.socket() for _ in range(3)]
    channel = pair.channels[0]
    highest = max(map(int, os.listdir("/proc/self/fd"))) + 1
    fillers = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.open("/dev/null", os.O_RDONLY))
        with caplog.at_level(logging.WARNING, "symcomm.hosts"):
            for sock in knocks:
                sock.connect((LOOPBACK, pair.endpoints[0].port))
            assert until(lambda: channel.stats()["pauses"])
            used, begun, pauses = time.process_time(), time.monotonic(), channel.stats()["pauses"]
            time.sleep(0.5)
            seconds, more = time.monotonic() - begun, channel.stats()["pauses"] - pauses
            assert time.process_time() - used < 0.6 * seconds and more <= seconds / listener.NO_DESCRIPTOR_S + 1, (
                "it spins"
            )
    finally:
        for fd in fillers:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "accepts no connections for 1 s" in caplog.text and "ulimit -n" in caplog.text
    assert until(lambda: channel.stats()["strangers"] == len(knocks))
    for sock in knocks:
        sock.close()


def test_the_log_cannot_be_flooded(caplog: pytest.LogCaptureFixture) -> None:
    refusals = listener.RefusalLog()
    with caplog.at_level(logging.WARNING, "symcomm.hosts"):
        for k in range(1000):
            refusals.note("somebody", f"came {k} times")
    assert refusals.refused == 1000 and len(refusals.reasons) == listener.REASONS
    assert len(caplog.records) <= 2 * tcp_server.LINES_A_SECOND + 1


# --- where it listens -------------------------------------------------------------------------------------------------


def test_ranks_of_one_machine_listen_on_loopback_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SYMCOMM_ADDRESS", "127.0.0.2")

    def rank(g: Any) -> list[Any]:
        g.barrier()
        return [g.control.listener.addresses, g._endpoints[g.rank].port]

    for addresses, port in run(rank, [1, 1]):
        assert addresses == [(LOOPBACK, port)]


def test_it_listens_at_the_address_of_its_card_and_nowhere_else() -> None:
    channel = ControlChannel("aa.1")
    endpoint = channel.open_endpoint("127.0.0.2")
    assert channel.listener.addresses == [("127.0.0.2", endpoint.port)]
    with socket.create_connection(("127.0.0.2", endpoint.port), 10):
        pass
    ours = [c.laddr for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert [at for at in ours if at[1] == endpoint.port] == [("127.0.0.2", endpoint.port)]
    assert channel.open_endpoint("127.0.0.2") == endpoint
    channel.settle("127.0.0.2", needed=False)
    assert channel.listener.addresses
    channel.settle("127.0.0.2", needed=True)
    channel.open_endpoint("127.0.0.2")
    channel.settle("127.0.0.2", needed=False)
    assert channel.listener.addresses  # a group still needs it
    assert channel.open_endpoint(LOOPBACK) and len(channel.listener.addresses) == 2
    channel.settle(LOOPBACK, needed=False)
    assert len(channel.listener.addresses) == 1
    channel.close()


def test_an_address_of_nobody_is_said(caplog: pytest.LogCaptureFixture) -> None:
    channel = ControlChannel("aa.1")
    endpoint = channel.open_endpoint("192.0.2.77")
    with socket.create_connection((LOOPBACK, endpoint.port), 10):
        assert "192.0.2.77 is no address of this machine" in caplog.text
    channel.close()


# --- the secret -------------------------------------------------------------------------------------------------------


class Spying(HashStore):
    """Keeps all that was ever written to it."""

    written: list[str]

    def set(self, key: str, value: Any) -> None:
        self.written.append(str(value))
        super().set(key, value)

    def multi_set(self, keys: Any, values: Any) -> None:
        self.written.extend(map(str, values))
        super().multi_set(keys, values)


@pytest.mark.parametrize("token", ["", "a job's long random token"], ids=["without a token", "with a token"])
def test_no_secret_stays_in_the_store(monkeypatch: pytest.MonkeyPatch, token: str) -> None:
    """With a job token none is ever written there; without, control channels' own, which are removed when all have read
    them."""
    monkeypatch.setenv("SYMCOMM_TOKEN", token)
    store = Spying()
    store.written = []
    tokens: list[str] = []

    def rank(g: Any) -> tuple[str, bool, str]:
        team = join_ranks(store, g.rank, 2, 30, make_group)
        if g.rank == 0:  # the engine's store is closed to strangers, too
            with pytest.raises(errors.StoreAuthError):
                TCPStore(LOOPBACK, team.engine._served.port, token="", timeout=10)
            tokens.append(team.engine._served._token.decode())
        x = torch.ones(3)
        team.all_reduce(x)
        assert x.tolist() == [2.0] * 3
        return team.control._secret, team.control.has_token, repr(team.peer_info)

    (first, has_token, infos), (second, _, others) = run(rank, [1, 1])
    everything = " ".join(store.written)
    left = " ".join(store.get(key).decode("latin-1") for key in store.list_keys())
    assert has_token == bool(token) and (tokens[0] in everything) != has_token and tokens[0] not in left
    for secret in (first, second):
        if token:
            assert not secret
        else:
            assert len(secret) == 64 and secret in everything and secret not in left + infos + others
    assert '"has_token"' in everything and "127.0.0.1" not in left


def test_ranks_of_which_only_some_have_the_token_are_told() -> None:
    made = threading.Lock()

    def rank(g: Any) -> str:
        from symcomm.hierarchical import control_channel as channel

        store = stores[0]
        with pytest.MonkeyPatch.context() as patch, made:
            if g.rank:
                patch.setenv("SYMCOMM_TOKEN", "x")
            g.control._job = channel.job_secret()
        with pytest.raises(errors.CollectiveMismatchError) as info:
            join_ranks(store, g.rank, 2, 30, make_group)
        return str(info.value)

    stores = [HashStore()]
    assert set(run(rank, [1, 1])) == {
        "groups across hosts: SYMCOMM_TOKEN is missing on rank 0, but the others have it; "
        "set the same one on all hosts."
    }


# --- ranks that send what none does -----------------------------------------------------------------------------------


def _tampered(kind: str) -> Iterator[dict[str, Any]]:
    """Headers of a kind with one field missing, or of another type, or out of range."""
    good: dict[str, Any] = {
        "number": 1, "tag": 0, "dtype": 0, "nbytes": 4, "inline": False, "real": True, "survey": 0, "seq": 1,
        "call": "x", "site": "y", "awaits": "", "ended": {}, "place": "w", "where": True,
        "fault": "gone", "story": "z", "ranks": [], "origin": 0, "seconds": 1.0,
        "topic": "t", "item": "x", "signature": [0] * 6, "step": "accept", "proposal": [1, 1],
        "value": [1, 1, "AQ==", True, 1], "told": '[1, "why", "where"]',
    }  # fmt: skip
    odd = [None, -1, 1 << 70, "\ud800", [], {"a": []}, [[]], 1.5, True, float("inf"), "x" * 10]
    fields = _fields(kind)
    for name, is_good in fields.items():
        base = {"kind": kind, **{field: good[field] for field in fields}}
        yield {field: value for field, value in base.items() if field != name}
        for value in odd:
            with contextlib.suppress(TypeError):
                if is_good(value):
                    continue
            yield {**base, name: value}


def _fields(kind: str) -> dict[str, Any]:
    return {**FIELDS[kind], **(AGREEMENT_STEPS["accept"] if kind == "agree" else {})}


@pytest.mark.parametrize("kind", sorted(FIELDS.keys() - {"arrival"}))
def test_every_field_of_every_message_is_checked(kind: str) -> None:
    tried = 0
    for header in _tampered(kind):
        tried += 1
        with pytest.raises(ProtocolViolation):
            check(kind, header, b"", 2)
    with pytest.raises(ProtocolViolation):
        check(kind, {**next(iter(_whole(kind)))}, b"payload of another length", 2)
    assert tried >= 5 * len(_fields(kind))


def _whole(kind: str) -> Iterator[dict[str, Any]]:
    values = {"fault": "gone", "item": "", "ranks": [], "ended": {}, "inline": True, "real": True, "seconds": 1.0}
    values |= {"step": "here", "where": True}
    texts = {"call", "site", "awaits", "story", "topic", "place"}
    yield {"kind": kind, **{name: values.get(name, "x" if name in texts else 0) for name in FIELDS[kind]}}


ENVELOPE = {"kind": "envelope", "number": 0, "tag": 0, "dtype": 0, "nbytes": 16, "inline": True}
BAD = {
    "longer than announced": (ENVELOPE, 64),
    "shorter than announced": (ENVELOPE, 4),
    "no such kind": ({"kind": "nonsense"}, 0),
    "kind of another type": ({"kind": ["envelope"]}, 0),
    "a place for what was not sent": ({"kind": "clear_to_send", "number": 7, "nbytes": 1 << 40}, 0),
    "an answer without anything": ({"kind": "answer"}, 0),
    "a rank beyond the group": (
        {"kind": "fail", "fault": "gone", "story": "", "ranks": [99], "origin": 1, "seconds": 0}, 0,
    ),
    "a put beyond any window": ({"kind": "window", "window": 0, "start": 1 << 40}, 8),
    "a put before the window": ({"kind": "window", "window": 0, "start": -8}, 8),
    "a window that is none": ({"kind": "window", "window": []}, 0),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_a_rank_that_sends_what_none_does_loses_its_connection(what: str) -> None:
    """And writes nowhere: the receive was for 16 bytes, and what lies behind them stays."""
    header, nbytes = BAD[what]
    done = threading.Barrier(2)

    def rank(g: Any) -> Any:
        memory = torch.full((64,), 7, dtype=torch.uint8)
        _inbox_of(g)[0] = window = Arrivals(memory[:16], g.cond)
        work = g.irecv(memory[:16], 1) if g.rank == 0 else None
        done.wait(30)
        if g.rank == 1:
            assert g.tell(0, header, b"\x09" * nbytes)
        if work is not None:
            assert until(lambda: g.control.stats()["refused"])
            with pytest.raises(errors.RankFailedError):
                work.wait(5)
        done.wait(30)
        del window
        return memory.unique().tolist(), g.control._thread.is_alive(), g.control.stats()["refused"]

    results = run(rank, [1, 1])
    assert results[0][:2] == ([7], True) and results[0][2] >= 1
    assert results[1][:2] == ([7], True)


@pytest.mark.parametrize("size", [8, 3000, 0])
def test_an_arrival_of_another_length_is_not_used(size: int) -> None:
    """Leaders agree on how many bytes come with an arrival; a host that sends others is cut off before any is used."""

    def rank(g: Any) -> Any:
        x = torch.arange(4.0)
        if g.rank == 0:
            with pytest.raises(errors.RankFailedError, match="sent .* bytes with an arrival that has 16") as info:
                g.all_reduce(x)
            return x.tolist(), info.value.ranks
        speak = Operation.send_arrivals
        Operation.send_arrivals = lambda op, say: speak(
            op, {h: bytes(size) if op.layout.rank else s for h, s in say.items()}
        )
        try:
            with contextlib.suppress(errors.SymcommError):
                g.all_reduce(x)  # it may have all it needs
        finally:
            Operation.send_arrivals = speak
        with pytest.raises(errors.SymcommError):
            g.barrier()
        return None

    assert run(rank, [1, 1])[0] == ([0.0, 1.0, 2.0, 3.0], [1])


def test_little_is_kept_for_groups_that_are_not_made_yet(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symcomm.hierarchical.control_channel.EARLY_FRAMES", 10)
    other, group = ControlChannel("cc.3"), Group()
    assert other.join("g", group)
    for k in range(11):
        other.send(pair.endpoints[0], {"group": f"not yet {k % 3}", "number": k}, b"12345")
    assert until(lambda: "aa.1" in group.lost)
    channel = pair.channels[0]
    assert "more than can be kept" in channel.stats()["reasons"][-1] and "cc.3" in channel._banned
    assert (channel._early_frames, channel._early_bytes) == (10, 50)
    late = Group()
    assert channel.join("not yet 0", late) and [header["number"] for _, header, _ in late.told] == [0, 3, 6, 9]
    assert (channel._early_frames, channel._early_bytes) == (6, 30)
    other.close()


def test_what_came_early_is_checked_as_well(pair: Pair) -> None:
    class Strict(Group):
        def on_message(self, sender: str, header: dict[str, Any], payload: bytes | bytearray) -> None:
            raise ProtocolViolation("sent what no rank sends")

    other, group = ControlChannel("cc.3"), Group()
    assert other.join("g", group) and other.send(pair.endpoints[0], {"group": "later"})
    assert until(lambda: pair.channels[0]._early_frames)
    assert pair.channels[0].join("later", strict := Strict())
    assert until(lambda: "aa.1" in group.lost) and strict.lost == ["cc.3"]
    other.close()


def test_a_rank_that_was_refused_does_not_come_back(pair: Pair) -> None:
    pair.channels[0]._banned.add("cc.3")
    other, group = ControlChannel("cc.3"), Group()
    assert other.join("g", group)
    other.send(pair.endpoints[0], {"group": "g", "number": 1})
    assert until(lambda: "aa.1" in group.lost)
    assert all(sender != "cc.3" for sender, _, _ in pair.groups[0].told)
    other.close()


def test_an_error_of_ours_ends_one_connection_and_not_the_channel(pair: Pair) -> None:
    class ConnectionClosed(Group):
        def on_message(self, sender: str, header: dict[str, Any], payload: bytes | bytearray) -> None:
            raise ZeroDivisionError

    broken = ConnectionClosed()
    assert pair.channels[0].join("broken", broken)
    other, group = ControlChannel("cc.3"), Group()
    assert other.join("g", group) and other.send(pair.endpoints[0], {"group": "broken"})
    assert until(lambda: "aa.1" in group.lost) and pair.channels[0].stats()["unforeseen"] == 1
    other.close()


@pytest.mark.parametrize("what", ["twice", "far ahead", "no signature", "a word for a number"])
def test_arrivals_that_no_host_sends_end_the_line(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("symcomm.hierarchical.leader_links.MOST_ARRIVALS", 20)
    good = {"seq": 7, "signature": [0] * 6}
    sent = {
        "twice": [good, good], "far ahead": [{**good, "seq": 100 + k} for k in range(21)],
        "no signature": [{"seq": 7}], "a word for a number": [{**good, "seq": "7"}],
    }[what]  # fmt: skip

    def rank(g: Any) -> Any:
        if g.rank == 0:  # the lower one calls
            for header in sent:
                g.leader_links.send(1, header)
            with pytest.raises(errors.SymcommError):
                for _ in range(2):  # the other one's arrival was there, maybe
                    g.barrier(timeout=20)
            return None
        with pytest.raises(errors.RankFailedError) as info:
            g.barrier(timeout=20)
        return info.value.ranks, g.control.stats()["refused"], len(g.arrivals) <= 20

    assert run(rank, [1, 1])[1] == ([0], 1, True)


def test_a_second_line_of_a_rank_is_not_taken() -> None:
    def rank(g: Any) -> Any:
        g.barrier()
        if g.rank == 0:
            second = g.control.dial(g._endpoints[1], g._key)
            assert until(lambda: _is_over(second))
        else:
            assert until(lambda: g.control.stats()["refused"])
        x = torch.ones(3)
        g.all_reduce(x)
        return x.tolist(), g.control.stats()["refused"]

    assert run(rank, [1, 1]) == [([2.0] * 3, 0), ([2.0] * 3, 1)]


def _is_over(conn: FramedConnection) -> bool:
    try:
        list(conn.receive())
    except LinkOver:
        return True
    return False
