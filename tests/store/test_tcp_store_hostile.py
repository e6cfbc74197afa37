"""Clients that break the rules or lack the job token: each is closed with a reason, and nobody else notices."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import multiprocessing as mp
import os
import pickle
import random
import resource
import signal
import socket
import struct
import threading
import time

import pytest

from symcomm._core import native
from symcomm.errors import DeadlineError, StoreAuthError, StoreConnectionError
from symcomm.store.tcp import StoreLimits, TCPStore
from tests.support.ranks import until
from tests.support.tcp import client, in_thread, serve

pytestmark = pytest.mark.without_torch

HELLO = b"\x00" + struct.pack("=I", 0x3C85F7CE)


def u64(n: int) -> bytes:
    return struct.pack("=Q", n)


def field(data: bytes) -> bytes:
    return u64(len(data)) + data


def raw(port: int, data: bytes = HELLO) -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", port), timeout=10)
    sock.sendall(data)
    return sock


def closed(sock: socket.socket) -> bool:
    """Whether the other side ends the connection (after what it may still have sent)."""
    try:
        while sock.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


@pytest.fixture
def store():
    """A server whose own client must come through everything unharmed."""
    store = serve(limits=StoreLimits(max_value=1 << 20, max_frame=4 << 20, max_memory=64 << 20, handshake_s=2))
    store.set("healthy", "1")
    yield store
    assert store.get("healthy") == b"1"
    assert client(store.port).add("healthy", 1) == 2


def last_reason(store: TCPStore) -> str:
    assert until(lambda: store.server_stats()["reasons"])
    return store.server_stats()["reasons"][-1]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "sent an unknown command (71)"),
        (b"\x01" + field(b"k") + field(b"v"), "did not say hello"),
        (b"\x00\x01\x02\x03\x04", "wrong magic number 0x04030201"),
        (HELLO + b"\x63", "unknown command (99)"),
        (HELLO + HELLO, "called hello out of turn"),
        (HELLO + b"\xa8" + bytes(32), "called token proof out of turn"),
        (HELLO + b"\x01" + u64(2**63), "sent a key of 9223372036854775808 bytes in set; the limit is 65536"),
        (HELLO + b"\x03" + u64(2**64 - 1), "sent a key of 18446744073709551615 bytes in get"),
        (HELLO + b"\x01" + field(b"k") + u64((1 << 20) + 1), "sent a value of 1048577 bytes in set; the limit is"),
        (HELLO + b"\x06" + u64(2**61), "sent 2305843009213693952 keys in one wait call"),
        (HELLO + b"\x0b" + u64(6) + (field(b"k") + field(bytes(900 << 10))) * 6, "a multi_set call of more than"),
        (
            HELLO + b"\x01" + field(b"t") + field(b"x") + b"\x04" + field(b"t") + u64(1),
            "add on a key whose value is not",
        ),
        (
            HELLO + b"\x01" + field(b"t") + field(b"-") + b"\x12" + field(b"t") + u64(2),
            "barrier on a key whose value is",
        ),
        (
            HELLO + b"\x01" + field(b"t") + field(b"9" * 20) + b"\x04" + field(b"t") + u64(1),
            "add where the value, or the sum, does not fit in 64 bits",
        ),
        (
            HELLO + (b"\x04" + field(b"t") + u64(2**63 - 1)) * 2,
            "add where the value, or the sum, does not fit in 64 bits",
        ),
        (
            HELLO + b"\x04" + field(b"t") + u64(2**63 - 1) + b"\x12" + field(b"t") + u64(2),
            "barrier where the value, or the sum, does not fit in 64 bits",
        ),
        (HELLO + (b"\x06" + u64(1) + field(b"absent")) * 2, "started a wait before its last one had ended"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_a_store_does_not_understand(store, data, reason):
    sock = raw(store.port, b"")
    try:
        sock.sendall(data)
    except (BrokenPipeError, ConnectionResetError):
        pass
    assert closed(sock)
    assert reason in last_reason(store)
    assert f"127.0.0.1 port {sock.getsockname()[1]}" in last_reason(store)


def test_a_frame_that_ends_too_early(store):
    sock = raw(store.port, HELLO + b"\x01" + field(b"key") + u64(1000) + b"only a bit")
    sock.close()
    assert until(lambda: store.server_stats()["refused"] == 1)
    assert "left in the middle of a set call (30 of at least 1020 bytes)" in last_reason(store)
    assert not store.check(["key"])


def test_a_frame_that_comes_byte_by_byte(store):
    sock = raw(store.port)
    for byte in b"\x0b" + u64(2) + field(b"/a") + field(b"1") + field(b"/b") + field(b"22") + b"\x03" + field(b"/b"):
        sock.sendall(bytes([byte]))
        time.sleep(0.0005)
    assert sock.recv(100) == field(b"22")
    assert store.multi_get(["a", "b"]) == [b"1", b"22"]


def test_a_client_that_never_says_hello(store):
    silent = raw(store.port, b"")
    halfway = raw(store.port, HELLO[:3])
    assert closed(silent) and closed(halfway)
    assert "did not finish its hello in 2 s" in last_reason(store)


def test_a_promise_of_a_large_value_costs_nothing(store):
    before = store.server_stats()["bytes"]
    socks = [raw(store.port, HELLO + b"\x01" + field(b"k") + u64(1 << 20) + b"x") for _ in range(100)]
    assert until(lambda: store.server_stats()["accepted"] == 101)
    time.sleep(0.05)
    assert store.server_stats()["bytes"] - before < 100 * 8192
    for sock in socks:
        sock.close()
    assert until(lambda: store.server_stats()["clients"] == 1)
    store.add("sync", 1)
    assert store.server_stats()["bytes"] < before + 4096


def test_a_client_that_asks_and_never_reads(store):
    """It asks for 1 MiB ten thousand times; the server holds at most about one answer and stops listening to it."""
    store.set("large", bytes(1 << 20))
    assert store.check(["large"])
    sock = raw(store.port)
    sock.setblocking(False)
    request = (b"\x03" + field(b"/large")) * 10000
    try:
        sock.send(request)
    except BlockingIOError:
        pass
    for _ in range(50):
        assert store.add("meanwhile", 1) > 0
    assert store.server_stats()["bytes"] < 6 << 20
    sock.setblocking(True)
    received = 0
    while received < 5 * ((1 << 20) + 8):  # when it does read, the answers are right
        received += len(sock.recv(1 << 20))
    sock.close()


def test_an_answer_that_would_be_far_larger_than_its_question(store):
    store.set("large", bytes(1 << 20))
    assert store.check(["large"])
    sock = raw(store.port, HELLO + b"\x0a" + u64(1000) + field(b"/large") * 1000)
    assert closed(sock)
    assert "in one multi_get; the limit is" in last_reason(store)


def test_filling_the_store(store):
    sock = raw(store.port)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        for i in range(1000):
            sock.sendall(b"\x01" + field(b"/%d" % i) + field(bytes(1 << 20)))
    assert "memory" in last_reason(store)
    for i in range(1000):
        store.delete_key(str(i))
    store.set("space again", bytes(1 << 20))


def test_appending_without_end(store):
    sock = raw(store.port)
    with pytest.raises((BrokenPipeError, ConnectionResetError)):
        for _ in range(1000):
            sock.sendall(b"\x09" + field(b"/k") + field(bytes(100 << 10)))
            time.sleep(0.001)
    assert "appended to a value until it passed the limit" in last_reason(store)


def _half_a_frame(port):
    half = raw(port, HELLO + b"\x01" + field(b"/victim") + u64(1 << 19) + bytes(1000))
    client(port, timeout=60).get("never")
    half.close()


def test_clients_that_are_killed_in_a_frame_or_a_wait(store):
    ctx = mp.get_context("spawn")
    processes = [ctx.Process(target=_half_a_frame, args=(store.port,), daemon=True) for _ in range(3)]
    for process in processes:
        process.start()
    others = [in_thread(client(store.port).get, "never") for _ in range(3)]
    assert until(lambda: store.server_stats()["clients"] == 1 + 3 + 6, 30)
    time.sleep(0.1)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
        process.join(5)
    assert until(lambda: store.server_stats()["clients"] == 4)
    assert not store.check(["victim"])
    store.set("never", "after all")
    assert [other() for other in others] == [b"after all"] * 3


@contextlib.contextmanager
def no_descriptor_left():
    """This process, and so its server too, cannot open anything."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(free, 60) + 1, hard))
    fillers = []
    try:
        with contextlib.suppress(OSError):
            while True:
                fillers.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for filler in fillers:
            os.close(filler)


@pytest.mark.parametrize("others", ["idle", "busy"])
def test_running_out_of_descriptors(store, others):
    """The server says so, goes on with the clients it has, and takes new ones when there is room again, whatever the
    clients that it has do meanwhile."""
    other, ended = client(store.port), threading.Event()

    def work() -> int:
        calls = 0
        while not ended.is_set():
            calls = other.add("calls", 1)
        return calls

    waiting = [socket.socket() for _ in range(20)]
    with no_descriptor_left():
        working = in_thread(work) if others == "busy" else None
        for sock in waiting:
            sock.connect(("127.0.0.1", store.port))
        assert until(lambda: any("cannot accept" in line for line in store.server_stats()["reasons"]))
        assert store.add("n", 1) == 1
        time.sleep(0.5)
    try:
        assert until(lambda: store.server_stats()["accepted"] == 22)
        assert client(store.port).add("n", 1) == 2
        assert sum("cannot accept" in line for line in store.server_stats()["reasons"]) == 1
    finally:
        ended.set()
    if working:
        assert working() > 0
    for sock in waiting:
        sock.close()


# --- servers that lie -----------------------------------------------------------------------------------


def lying_server(answer: bytes) -> int:
    """Takes one client, answers its hello rightly and the next call with ``answer``; returns its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve_one() -> None:
        sock, _ = listener.accept()
        with sock, listener:
            hello = sock.recv(10, socket.MSG_WAITALL)
            sock.sendall(hello[-4:])
            sock.recv(65536)
            sock.sendall(answer)
            closed(sock)

    threading.Thread(target=serve_one, daemon=True).start()
    return listener.getsockname()[1]


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


LIES = {
    "a value of 4 EiB": ("get", "k", u64(1 << 62) + bytes(100)),
    "a value of 8 EiB": ("get", "k", u64((1 << 63) - 1) + bytes(100)),
    "a value of less than nothing": ("get", "k", u64(1 << 63)),
    "a value of 64 GiB": ("get", "k", u64(1 << 36) + bytes(3 << 20)),
    "as many keys": ("list_keys", u64(1 << 62)),
    "fewer keys than none": ("list_keys", u64(1 << 63)),
    "a key of 64 GiB": ("list_keys", u64(2) + field(b"/k") + u64(1 << 36)),
    "an item of 64 GiB": ("queue_pop", "q", u64(1) + u64(1 << 36)),
    "the second of two values": ("multi_get", ["k", "l"], field(b"v") + u64(1 << 36)),
}


@pytest.mark.parametrize("lie", LIES)
def test_memory_is_taken_for_bytes_that_came_not_for_those_announced(lie: str):
    """The address space is kept small, so that taking what was announced would fail as on a small machine."""
    call, *args, answer = LIES[lie]
    other = client(lying_server(answer), timeout=0.5)
    with open("/proc/self/statm") as file:
        used = int(file.read().split()[0]) * resource.getpagesize()
    known, peak = resource.getrlimit(resource.RLIMIT_AS), peak_bytes()
    resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), known[1]))
    try:
        with pytest.raises((StoreConnectionError, DeadlineError)) as info:
            getattr(other, call)(*args)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, known)
    assert str(info.value).startswith(("the store at 127.0.0.1", "the connection to the store at 127.0.0.1"))
    assert str(info.value).count(". ") == 0 and str(info.value).endswith(".") and call in str(info.value)
    assert peak_bytes() - peak < 64 << 20


@pytest.mark.parametrize("size", [(1 << 20) - 1, 1 << 20, (1 << 20) + 1, (3 << 20) + 7, 40 << 20])
def test_large_values_come_whole(size: int):
    value = random.Random(size).randbytes(size)
    server = serve()
    server.set("k", value)
    assert client(server.port).get("k") == value and client(server.port).multi_get(["k", "k"]) == [value, value]


# --- the job token ---------------------------------------------------------------------------------------


def test_our_hmac_is_hmac():
    for key_size in (0, 1, 31, 63, 64, 65, 200):
        for size in (0, 1, 55, 56, 63, 64, 65, 119, 120, 1000):
            key, message = os.urandom(key_size), os.urandom(size)
            assert native.store_hmac(key, message) == hmac.new(key, message, hashlib.sha256).digest()


def test_the_same_token_on_both_sides():
    store = serve(token="our secret")
    other = client(store.port, token=b"our secret")
    store.set("k", "v")
    assert other.get("k") == b"v" and other.clone().get("k") == b"v"
    assert pickle.loads(pickle.dumps(other)).get("k") == b"v"


def test_the_token_of_the_environment(monkeypatch):
    monkeypatch.setenv("SYMCOMM_TOKEN", "from outside")
    store = serve()
    assert client(store.port).add("n", 1) == 1
    assert b"from outside" not in pickle.dumps(store)
    assert pickle.loads(pickle.dumps(store)).add("n", 1) == 2
    with pytest.raises(StoreAuthError, match="wants a job token and this client has none"):
        client(store.port, token="")


@pytest.mark.parametrize(
    ("server", "ours", "words", "reason"),
    [
        ("a", None, "wants a job token and this client has none.*SYMCOMM_TOKEN", "called ping without the job token"),
        ("a", "b", "holds another job token", "left in|^$"),
        (None, "b", "has no job token", "^$"),
    ],
)
def test_a_missing_or_wrong_token_is_refused_with_words(server, ours, words, reason, caplog):
    caplog.set_level(logging.WARNING, "symcomm.store")
    store = serve(token=server)
    with pytest.raises(StoreAuthError, match=words):
        client(store.port, token=ours)
    if "called" in reason:
        assert until(lambda: any(reason in line for line in store.server_stats()["reasons"]))
        assert until(lambda: reason in caplog.text)
    assert store.add("n", 1) == 1


def test_a_client_that_lies_about_its_token_is_refused(monkeypatch):
    from symcomm.store import tcp_wire

    store = serve(token="right")
    honest = tcp_wire.sign
    monkeypatch.setattr(
        tcp_wire, "sign", lambda token, role, nonces: honest(b"right" if role == "server" else b"wrong", role, nonces)
    )
    with pytest.raises(StoreAuthError, match="did not accept"):
        client(store.port, token="wrong")
    assert until(lambda: any("holds another job token" in line for line in store.server_stats()["reasons"]))


def test_the_token_never_travels():
    """Every byte of a handshake is recorded by a relay in between."""
    store = serve(token="a-very-secret-token")
    seen = bytearray()
    relay = socket.create_server(("127.0.0.1", 0))

    def pump(source, sink):
        while data := source.recv(65536):
            seen.extend(data)
            sink.sendall(data)

    def accept():
        here, _ = relay.accept()
        there = socket.create_connection(("127.0.0.1", store.port))
        threading.Thread(target=pump, args=(there, here), daemon=True).start()
        pump(here, there)

    threading.Thread(target=accept, daemon=True).start()
    other = client(relay.getsockname()[1], token="a-very-secret-token")
    assert other.add("n", 1) == 1
    assert len(seen) > 100 and b"a-very-secret-token" not in seen
    other.close()
    relay.close()


# --- fuzzing -----------------------------------------------------------------------------------------------

FRAMES = [
    HELLO,
    b"\x0d" + struct.pack("=I", 7),
    b"\x01" + field(b"/key") + field(b"value"),
    b"\x02" + field(b"/key") + field(b"value") + field(b"new"),
    b"\x03" + field(b"/key"),
    b"\x04" + field(b"/n") + u64(3),
    b"\x05" + u64(2) + field(b"/key") + field(b"/n"),
    b"\x06" + u64(2) + field(b"/key") + field(b"/absent"),
    b"\x07",
    b"\x08" + field(b"/key"),
    b"\x09" + field(b"/key") + field(b"more"),
    b"\x0a" + u64(2) + field(b"/key") + field(b"/n"),
    b"\x0b" + u64(2) + field(b"/a") + field(b"1") + field(b"/b") + field(b"2"),
    b"\x0c",
    b"\x0e" + field(b"/q") + field(b"item"),
    b"\x0f" + field(b"/q"),
    b"\x10" + field(b"/q"),
    b"\x11",
    b"\x12" + field(b"/barrier") + u64(2),
    b"\xa7" + bytes(32),
    b"\xa8" + bytes(32),
]
EDGES = [0, 1, 255, 2**16, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1]


def mutate(rng: random.Random, frame: bytes) -> bytes:
    data = bytearray(frame)
    for _ in range(rng.randrange(4)):
        what = rng.randrange(5)
        at = rng.randrange(len(data) + 1)
        if what == 0 and data:
            data[at % len(data)] = rng.randrange(256)
        elif what == 1:
            del data[at:]
        elif what == 2:
            data[at:at] = rng.randbytes(rng.randrange(20))
        elif what == 3:
            data[at : at + 8] = u64(rng.choice(EDGES))
        else:
            del data[at : at + rng.randrange(9)]
    return bytes(data)


def resident_kib() -> int:
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))


@pytest.mark.parametrize("token", [None, "secret"])
def test_three_thousand_mangled_frames(token):
    rng = random.Random(20240229)
    store = serve(token=token, limits=StoreLimits(max_value=1 << 20, max_frame=4 << 20, max_memory=64 << 20))
    healthy = store.clone()
    healthy.set("mine/alone", "safe")
    before = resident_kib()
    sent = 0
    while sent < 3000:
        socks = []
        for _ in range(10):
            sock = raw(store.port, HELLO if rng.random() < 0.95 else b"")
            try:
                for _ in range(rng.randrange(1, 6)):
                    sock.sendall(mutate(rng, rng.choice(FRAMES)))
                    sent += 1
            except (BrokenPipeError, ConnectionResetError):
                pass
            socks.append(sock)
        for sock in socks:
            if rng.random() < 0.5:  # some leave with a reset, some in good order
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.close()
        assert healthy.add("mine/count", 1) > 0
    assert healthy.get("mine/alone") == b"safe"
    assert until(lambda: store.server_stats()["clients"] == 2)
    assert store.server_stats()["refused"] > 100
    assert resident_kib() - before < 32 << 10
    client(store.port, token=token).set("after", "all")
