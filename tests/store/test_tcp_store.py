"""TCPStore by itself: every call, who waits for whom, where it listens, and what happens when it dies.

What PyTorch's own store makes of it is in test_tcp_store_interop.py, what strangers make of it
(and the job token against them) in test_tcp_store_hostile.py.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing as mp
import os
import pickle
import resource
import signal
import socket
import time
import warnings
from datetime import timedelta

import pytest

from symcomm.errors import (
    BadArgumentError,
    DeadlineError,
    ResourceError,
    StoreConnectionError,
)
from symcomm.store.base import QueueEmptyError
from symcomm.store.tcp import StoreLimits, TCPStore
from symcomm.store.tcp_server import _bind_addresses
from tests.support.ports import free_port
from tests.support.ranks import run_ranks, until
from tests.support.tcp import TEN, client, in_thread, serve

pytestmark = pytest.mark.without_torch


@pytest.fixture
def store():
    return serve()


# --- calls -------------------------------------------------------------------------------------------


def shut_down(store: TCPStore) -> None:
    """End its connection as if the host had."""
    with socket.socket(fileno=os.dup(store._connection.fd)) as sock:
        sock.shutdown(socket.SHUT_RDWR)


def test_a_store_that_is_dropped_warns_of_nothing():
    """Neither a client nor a server, nor one whose server is gone or never was."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TEN)
        other = client(server.port)
        descriptors = len(os.listdir("/proc/self/fd"))
        twin = client(server.port)
        del twin
        gc.collect()
        assert until(lambda: len(os.listdir("/proc/self/fd")) <= descriptors)
        port = server.port
        del server
        gc.collect()
        with pytest.raises(StoreConnectionError):
            other.get("a")
        with pytest.raises(StoreConnectionError):
            client(port, timeout=0.05)
        del other
        gc.collect()
    assert not [str(warning.message) for warning in seen]


def test_values(store):
    store.set("k", "text")
    store.set("raw", bytes(range(256)))
    store.set("empty", b"")
    assert store.get("k") == b"text"
    assert store.get("raw") == bytes(range(256))
    assert store.get("empty") == b""
    assert store.multi_get(["k", "empty", "raw"]) == [b"text", b"", bytes(range(256))]
    store.multi_set(["a", "b"], ["1", b"2"])
    assert store.multi_get(["b", "a"]) == [b"2", b"1"]
    assert store.multi_get([]) == []
    store.append("a", "23")
    store.append("new", "x")
    assert store.multi_get(["a", "new"]) == [b"123", b"x"]
    assert sorted(store.list_keys()) == ["a", "b", "empty", "k", "new", "raw"]
    assert store.num_keys() == 6
    assert store.delete_key("k") is True
    assert store.delete_key("k") is False
    assert store.check(["a", "b"]) and not store.check(["a", "k"]) and store.check([])


def test_numbers(store):
    assert store.add("n", 5) == 5
    assert store.add("n", -7) == -2
    assert store.get("n") == b"-2"
    store.set("n", " 41 apples")
    assert store.add("n", 1) == 42
    assert store.add("big", 2**63 - 1) == 2**63 - 1
    with pytest.raises(IndexError, match=r"9223372036854775807 \+ 1 does not fit in 64 bits; 'big' stays"):
        store.add("big", 1)
    assert store.get("big") == b"9223372036854775807"
    store.set("more", "99999999999999999999")
    with pytest.raises(IndexError, match="the value of 'more' does not fit in 64 bits, got b'99999999999999999999'"):
        store.add("more", -1)
    store.set("zeros", "0" * 100 + "7")
    assert store.add("zeros", 1) == 8
    with pytest.raises(BadArgumentError, match="fits in 64 bits"):
        store.add("n", 2**63)
    store.set("nothing", "")
    assert store.add("nothing", 3) == 3
    store.set("text", "seven")
    with pytest.raises(BadArgumentError, match="the value of 'text' must be a decimal number, got b'seven'"):
        store.add("text", 1)
    with pytest.raises(StoreConnectionError, match="refused to count on a value that is not a number"):
        store.barrier("text", 1)
    assert store.get("text") == b"seven"


def test_compare_set(store):
    assert store.compare_set("k", "", "1") == b"1"
    assert store.compare_set("k", "2", "3") == b"1"
    assert store.compare_set("k", "1", "3") == b"3"
    assert store.compare_set("absent", "x", "y") == b"x"
    assert not store.check(["absent"])


def test_queue(store):
    store.queue_push("q", "1")
    store.queue_push("q", b"")
    assert store.queue_len("q") == 2 and store.check(["q"]) and store.num_keys() == 0
    assert store.queue_pop("q") == b"1"
    assert store.queue_pop("q", block=False) == b""
    assert store.queue_len("q") == 0 and store.queue_len("never") == 0
    with pytest.raises(QueueEmptyError, match="'q'.*empty"):
        store.queue_pop("q", block=False)


def test_large_values_and_many_keys(store):
    value = os.urandom(1 << 20) * 24
    store.set("large", value)
    assert store.get("large") == value
    store.append("large", b"!")
    assert store.get("large") == value + b"!"
    keys = [f"key/{i}" for i in range(20000)]
    store.multi_set(keys, [str(i) for i in range(20000)])
    assert store.multi_get(keys) == [str(i).encode() for i in range(20000)]
    assert len(store.list_keys()) == 20001
    store.wait(keys)


def test_nothing_is_left_behind(store):
    store.num_keys()
    time.sleep(0.05)
    before = store.server_stats()["bytes"]
    for turn in range(3):
        store.set("large", bytes(1 << 20))
        store.append("large", bytes(100))
        store.set("large", "small")
        store.multi_set([f"{i}" for i in range(100)], ["v"] * 100)
        store.add("n", 1)
        store.compare_set("c", "", "x")
        store.queue_push("q", bytes(1000))
        store.queue_pop("q")
        for call in (lambda: store.wait(["x", "y"], 0.001), lambda: store.barrier("b", 2, 0.001)):
            with pytest.raises(DeadlineError):
                call()
        other = client(store.port)
        waiting = in_thread(other.get, "never")
        assert until(lambda turn=turn: store.server_stats()["requests"] > turn)
        shut_down(other)
        with pytest.raises(StoreConnectionError):
            waiting()
        other.close()
        assert all(store.delete_key(key) for key in store.list_keys())
    assert until(lambda: store.server_stats()["clients"] == 1)
    assert store.num_keys() == 0
    assert until(lambda: store.server_stats()["bytes"] <= before + 2048)  # what its buffers keep


def test_waiting_for_very_many_keys(store):
    keys = [f"key/{i}" for i in range(100_000)]
    waiting = in_thread(client(store.port).wait, keys)
    time.sleep(0.1)
    store.multi_set(keys[::2], ["1"] * 50_000)
    store.multi_set(keys[1::2], ["1"] * 50_000)
    waiting()
    with pytest.raises(DeadlineError, match="nobody set keys 'no/0', .* and 248 more"):
        store.wait([f"no/{i}" for i in range(100_000)], 0.05)


@pytest.mark.parametrize(
    "call",
    [
        lambda s: s.set("k", 5),
        lambda s: s.set(5, "v"),
        lambda s: s.get(None),
        lambda s: s.get(b"\xff"),
        lambda s: s.set(["k"], "v"),
        lambda s: s.add(["k"], 1),
        lambda s: s.barrier("b", 2**63),
        lambda s: s.barrier("b", "1"),
        lambda s: s.check(["fine", 5]),
        lambda s: s.set("lone surrogate \ud800", "v"),
        lambda s: s.set("k", "\ud800"),
        lambda s: s.wait("k"),
        lambda s: s.multi_set(["a"], []),
        lambda s: s.barrier("b", 0),
        lambda s: s.wait(["k"], -1),
    ],
)
def test_bad_calls_are_refused_and_leave_the_connection_alone(store, call):
    store.set("before", "1")
    with pytest.raises(BadArgumentError, match="must be"):
        call(store)
    assert store.get("before") == b"1"


def test_a_negative_world_size_means_any_number_as_in_pytorch():
    assert TCPStore("127.0.0.1", 0, -1, True, timeout=TEN).num_keys() == 0


@pytest.mark.parametrize("args", [(5, 1), ("localhost", -1), ("localhost", "x"), ("localhost", 0, 0)])
def test_bad_constructor_arguments(args):
    with pytest.raises(BadArgumentError, match="TCPStore"):
        TCPStore(*args)


# --- waiting -------------------------------------------------------------------------------------------


def test_get_waits_for_another_client(store):
    other = client(store.port)
    value = in_thread(other.get, "later")
    time.sleep(0.05)
    store.set("later", "now")
    assert value() == b"now"


def test_wait_needs_all_keys(store):
    waiting = in_thread(client(store.port).wait, ["a", "b", "b", "c"])
    for key in "abc":
        time.sleep(0.01)
        store.set(key, "1")
    assert waiting() is None  # raises what wait raised


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda s: s.get("absent"), "get timed out.*'absent'"),
        (lambda s: s.multi_get(["there", "absent"]), "multi_get timed out.*nobody set key 'absent'"),
        (lambda s: s.wait(["there", "x", "y"]), "wait timed out.*nobody set keys 'x', 'y'"),
        (lambda s: s.queue_pop("absent"), r"queue_pop\('absent'\) timed out"),
        (lambda s: s.barrier("b", 2), r"barrier\('b'\) timed out.*fewer than 2"),
    ],
)
def test_deadlines_name_what_is_missing_and_the_connection_goes_on(store, call, words):
    store.set("there", "1")
    short = client(store.port)
    short.set_timeout(0.3)
    with pytest.raises(DeadlineError, match=words):
        call(short)
    assert short.get("there") == b"1"
    store.set("absent", "came")
    assert short.get("absent") == b"came"
    assert store.server_stats()["refused"] == 0


def test_a_wait_with_no_time_at_all(store):
    store.set("k", "1")
    for _ in range(200):  # the answer and the cancelling cross each other in any order
        try:
            store.wait(["k"], 0)
        except DeadlineError:
            pass
        assert store.add("count", 0) == 0


def test_barrier_again_and_again_with_one_key(store):
    stores = [client(store.port) for _ in range(3)]
    arrived = []

    def run(own, rank):
        for turn in range(5):
            time.sleep(0.003 * rank)
            arrived.append(turn)
            own.barrier("b", 3)
            assert arrived.count(turn) == 3

    for result in [in_thread(run, own, rank) for rank, own in enumerate(stores)]:
        result()


def test_a_caller_that_gave_up_is_not_counted_at_a_barrier(store):
    impatient, dying = client(store.port), client(store.port)
    with pytest.raises(DeadlineError):
        impatient.barrier("b", 2, 0.02)
    gone = in_thread(dying.barrier, "b", 2)
    assert until(lambda: store.get("b") == b"1")
    shut_down(dying)
    with pytest.raises(StoreConnectionError):
        gone()
    assert until(lambda: store.get("b") == b"0")
    first = in_thread(client(store.port).barrier, "b", 2)
    assert until(lambda: store.get("b") == b"1")
    store.barrier("b", 2)
    first()


def test_each_item_of_a_queue_goes_to_one_waiter(store):
    stores = [client(store.port) for _ in range(5)]
    results = [in_thread(own.queue_pop, "q") for own in stores]
    time.sleep(0.05)
    for i in range(5):
        store.queue_push("q", str(i))
    assert sorted(result() for result in results) == [b"0", b"1", b"2", b"3", b"4"]


def test_an_item_promised_to_a_client_that_dies_goes_to_the_next(store):
    """The first waiter is woken and closes without taking the item; the second must get it."""
    first, second = client(store.port), client(store.port)
    raw = socket.socket(fileno=os.dup(first._connection.fd))
    raw.sendall(b"\x06" + (1).to_bytes(8, "little") + (2).to_bytes(8, "little") + b"/q")  # waits, will never pop
    store.add("sync", 0)
    assert until(lambda: store.server_stats()["requests"] >= 8)
    result = in_thread(second.queue_pop, "q")
    time.sleep(0.05)
    store.queue_push("q", "item")
    assert raw.recv(1) == b"\x00"
    time.sleep(0.02)
    raw.close()
    first.close()
    assert result() == b"item"


def test_threads_share_one_store(store):
    def run(rank):
        for i in range(200):
            store.add("sum", 1)
            store.set(f"{rank}", str(i))
            assert store.get(f"{rank}") == str(i).encode()

    for result in [in_thread(run, rank) for rank in range(6)]:
        result()
    assert store.add("sum", 0) == 1200


def test_a_signal_ends_a_wait(store):
    def stop(number, frame):
        raise InterruptedError("a signal")

    before = signal.signal(signal.SIGALRM, stop)
    try:
        for call in (lambda: store.get("never"), lambda: store.wait(["never"], 5), lambda: store.barrier("b", 2, 0.9)):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(InterruptedError, match="a signal"):
                call()
            assert store.add("n", 1) > 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


# --- starting and ending -------------------------------------------------------------------------------


def test_a_client_may_come_before_the_server():
    port = free_port()
    early = in_thread(client, port)
    time.sleep(0.2)
    server = TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False, timeout=TEN)
    server.set("k", "v")
    assert early().get("k") == b"v"


def test_nobody_answers():
    port = free_port()
    with pytest.raises(DeadlineError, match=rf"no store answered at 127.0.0.1:{port} in 200 ms.*refused.*is_master"):
        client(port, timeout=0.2)


def _join(rank, world, port, master):
    store = TCPStore("127.0.0.1", port, world, rank == master, timeout=TEN)
    store.set(f"rank{rank}", "here")
    store.wait([f"rank{r}" for r in range(world)])
    store.add("left", 1)
    while rank == master and store.add("left", 0) < world:
        time.sleep(0.01)
    return store.port


def test_workers_join():
    port = free_port()
    assert run_ranks(_join, 3, port, 1) == [port] * 3


def test_missing_workers_are_counted():
    with pytest.raises(DeadlineError, match="1 of 2 workers joined .*; start the missing ranks with"):
        TCPStore("127.0.0.1", 0, 2, True, timeout=0.1)


def test_clone_pickle_and_properties(store):
    store.set("k", "v")
    twin = store.clone()
    copy = pickle.loads(pickle.dumps(store))
    assert twin.get("k") == copy.get("k") == b"v"
    assert copy.port == store.port and copy.host == "127.0.0.1" and copy.timeout == TEN
    assert store.libuvBackend and store.has_extended_api()
    assert store.server_stats()["clients"] == 3 and copy.server_stats() == {}
    assert "serving" in repr(store) and "serving" not in repr(copy)
    store.set_timeout(timedelta(milliseconds=20))
    with pytest.raises(DeadlineError, match=r"20 ms"):
        store.get("absent")


def test_multi_tenant_stores_share_a_server_in_one_process(store):
    first = TCPStore("127.0.0.1", 0, is_master=True, multi_tenant=True, timeout=TEN)
    second = TCPStore("127.0.0.1", first.port, is_master=True, multi_tenant=True, timeout=TEN)
    first.set("k", "v")
    assert second.get("k") == b"v"
    first.close()
    assert second.get("k") == b"v"
    with pytest.raises(StoreConnectionError, match="Address already in use.*another server"):
        TCPStore("127.0.0.1", store.port, is_master=True, timeout=TEN)


def test_a_listening_socket_is_adopted():
    sock = socket.create_server(("127.0.0.1", 0))
    port = sock.getsockname()[1]
    with pytest.raises(BadArgumentError, match=f"{port}"):
        TCPStore("127.0.0.1", port + 1, is_master=True, master_listen_fd=sock.fileno())
    store = TCPStore("127.0.0.1", port, is_master=True, master_listen_fd=sock.detach(), timeout=TEN)
    assert store.port == port and store.add("n", 1) == 1
    with open(os.devnull) as file, pytest.raises(BadArgumentError, match="bound TCP socket"):
        TCPStore("127.0.0.1", 0, is_master=True, master_listen_fd=file.fileno())


def test_closing_the_last_server_handle_frees_the_port_and_ends_waits(store):
    other = client(store.port)
    waiting = in_thread(other.get, "never")
    time.sleep(0.05)
    port = store.port
    store.close()
    with pytest.raises(StoreConnectionError, match=rf"127.0.0.1:{port} closed the connection during get\('never'\)"):
        waiting()
    with pytest.raises(StoreConnectionError, match="is gone"):
        other.set("k", "v")
    again = TCPStore("127.0.0.1", port, is_master=True, timeout=TEN)
    other.set("k", "v")  # reconnects
    assert again.get("k") == b"v"


def test_a_child_made_by_fork_uses_a_connection_of_its_own_and_keeps_no_socket_of_the_server(store):
    store.set("k", "parent")
    mine = client(store.port)
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            assert mine.get("k") == b"parent" and store.get("k") == b"parent"
            mine.set("child", "here")
            os.write(write, b"ok")
            time.sleep(20)  # outlives the server
        finally:
            os._exit(0)
    try:
        os.close(write)
        assert os.read(read, 2) == b"ok"
        assert mine.get("child") == b"here"
        waiting = in_thread(mine.get, "never")
        time.sleep(0.05)
        store.close()
        with pytest.raises(StoreConnectionError):
            waiting(5)  # although the child still lives
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _serve_until_killed(pipe):
    store = TCPStore("127.0.0.1", 0, is_master=True, timeout=60)
    pipe.send(store.port)
    time.sleep(60)


def test_clients_notice_at_once_that_the_server_was_killed():
    ctx = mp.get_context("spawn")
    receive, send = ctx.Pipe(duplex=False)
    process = ctx.Process(target=_serve_until_killed, args=(send,), daemon=True)
    process.start()
    assert receive.poll(30)
    port = receive.recv()
    clients = [client(port, timeout=60) for _ in range(8)]
    calls = [lambda s: s.get("never"), lambda s: s.wait(["x", "y"]), lambda s: s.queue_pop("q")]
    results = [in_thread(calls[i % 3], own) for i, own in enumerate([*clients[:7]])]
    time.sleep(0.1)
    os.kill(process.pid, signal.SIGKILL)
    killed = time.monotonic()
    for result in results:
        with pytest.raises(StoreConnectionError, match="closed the connection during"):
            result()
    assert time.monotonic() - killed < 30  # far below the 60 s they would have waited
    process.join(5)
    with pytest.raises(StoreConnectionError):
        clients[7].set("k", "v")


def test_five_hundred_clients(store):
    clients = [client(store.port) for _ in range(500)]
    assert [own.add("n", 1) for own in clients] == list(range(1, 501))
    assert store.server_stats()["clients"] == 501
    for own in clients:
        own.close()
    assert until(lambda: store.server_stats()["clients"] == 1)


def test_too_few_descriptors_is_said_before_anything_starts():
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with pytest.raises(ResourceError, match=rf"needs \d+ file descriptors.*limit is {hard}"):
        TCPStore("127.0.0.1", 0, hard + 1, is_master=True)


# --- where it listens -----------------------------------------------------------------------------------


def test_loopback_unless_told_otherwise():
    assert set(_bind_addresses("localhost", None)) <= {"127.0.0.1", "::1"}
    assert _bind_addresses("127.0.0.1", None) == ["127.0.0.1"]
    assert _bind_addresses("10.1.2.3", None) == ["10.1.2.3"]
    assert _bind_addresses("localhost", "0.0.0.0") == ["0.0.0.0"]
    assert _bind_addresses("localhost", ["127.0.0.1", "::1"]) == ["127.0.0.1", "::1"]
    assert _bind_addresses("10.1.2.3", "*") == ["::"]


def test_a_machines_own_name_that_means_loopback_is_served_on_all_addresses(monkeypatch):
    """Debian's /etc/hosts says 127.0.1.1 for the machine's name; its peers know it by another address."""
    answer = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.1.1", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer)
    assert _bind_addresses("node7", None) == ["::"]
    assert _bind_addresses("localhost", None) == ["127.0.1.1"]


def test_a_name_that_is_not_ours_listens_everywhere_and_says_so(caplog):
    with caplog.at_level(logging.WARNING, "symcomm.store"):
        store = TCPStore("192.0.2.7", 0, is_master=True, timeout=TEN)  # an address nobody has
    assert store.add("n", 1) == 1 and "192.0.2.7 is no address of this machine" in caplog.text
    with pytest.raises(StoreConnectionError, match=r"cannot listen on 192.0.2.7"):
        TCPStore("127.0.0.1", 0, is_master=True, bind="192.0.2.7")
    with pytest.raises(StoreConnectionError, match="has no address"):
        TCPStore("no-such-host.invalid", 0, is_master=True, timeout=timedelta(milliseconds=50))


def test_a_name_may_come_to_be_known_later(monkeypatch, caplog):
    """Names of pods are not known to the cluster before they have started."""
    known, asked = socket.getaddrinfo, []

    def late(host, *args, **kwargs):
        asked.append(host)
        if asked.count("pod-0") < 3 and host == "pod-0":
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return known("127.0.0.1" if host == "pod-0" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", late)
    monkeypatch.setattr("symcomm.store.tcp_server._NAME_PAUSE", 0.01)
    store = TCPStore("pod-0", 0, 1, is_master=True, timeout=TEN)
    assert store.add("n", 1) == 1 and asked.count("pod-0") >= 3
    assert caplog.text.count("'pod-0' has no address") == 1 and "Trying again for 10 s" in caplog.text


def test_where_the_agent_serves_everybody_is_a_client(monkeypatch):
    agents = TCPStore("localhost", 0, 1, is_master=True, timeout=TEN)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_PORT", str(agents.port + 1))
    with pytest.raises(StoreConnectionError, match="Address already in use"):
        TCPStore("localhost", agents.port, 1, is_master=True, timeout=TEN)
    monkeypatch.setenv("MASTER_PORT", str(agents.port))
    worker = TCPStore("localhost", agents.port, 1, is_master=True, timeout=TEN)
    worker.set("k", "v")
    assert agents.get("k") == b"v" and worker.server_stats() == {}


def test_every_address_of_localhost_has_the_same_port():
    store = TCPStore("localhost", 0, is_master=True, timeout=TEN)
    for *_, address in socket.getaddrinfo("localhost", store.port, type=socket.SOCK_STREAM):
        if ":" in address[0] and not socket.has_ipv6:
            continue
        assert TCPStore(address[0], store.port, timeout=TEN).add("n", 1) >= 1


# --- limits ----------------------------------------------------------------------------------------------


def test_limits_are_the_servers_to_choose():
    store = serve(limits=StoreLimits(max_value=100, max_memory=1 << 20))
    store.set("k", b"x" * 100)
    store.set("k", b"x" * 101)  # gets no answer
    with pytest.raises(StoreConnectionError, match=r"during get\('k'\).*refused the call or the set before it"):
        store.get("k")
    assert store.get("k") == b"x" * 100  # reconnected
    assert any("a value of 101 bytes in set; the limit is 100" in line for line in store.server_stats()["reasons"])
