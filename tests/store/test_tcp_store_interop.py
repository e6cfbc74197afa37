"""PyTorch's TCPStore and ours, mixed in every direction, for every call."""

from __future__ import annotations

import os
import socket
import threading
import time
from datetime import timedelta

import pytest

from symcomm.errors import DeadlineError, StoreAuthError, StoreConnectionError
from symcomm.store.tcp import TCPStore
from tests.support.ports import free_port
from tests.support.ranks import run_ranks, until
from tests.support.tcp import in_thread

dist = pytest.importorskip("torch.distributed")

pytestmark = pytest.mark.torch_versions

TEN = timedelta(seconds=10)
SHORT = timedelta(milliseconds=100)
KINDS = {"ours": TCPStore, "torch": dist.TCPStore}
HAS_BARRIER = hasattr(dist.TCPStore, "barrier")  # since torch 2.13
PAIRS = [("ours", "ours"), ("ours", "torch"), ("torch", "ours"), ("torch", "torch")]


def meet(store, key: str, world: int) -> None:
    """All come before one goes on: by a barrier where both kinds of store have it."""
    if HAS_BARRIER:
        store.barrier(key, world, TEN)
    else:
        store.add(key, 1)
        assert until(lambda: store.add(key, 0) == world)


def serve(kind: str, **more):
    return KINDS[kind]("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TEN, **more)


def client(kind: str, port: int, timeout: timedelta = TEN, **more):
    return KINDS[kind]("127.0.0.1", port, timeout=timeout, **more)


@pytest.fixture(params=PAIRS, ids=lambda pair: f"{pair[1]}-client-on-{pair[0]}-server")
def pair(request):
    """(a client, the server's own store); torch on torch shows that the expectations are right."""
    server = serve(request.param[0])
    return client(request.param[1], server.port), server


# What each call returns must not depend on who is the client and who the server.
SCRIPT = [
    ("set", ("k", "v")),
    ("get", ("k",)),
    ("set", ("empty", "")),
    ("get", ("empty",)),
    ("add", ("n", 5)),
    ("add", ("n", -7)),
    ("get", ("n",)),
    ("add", ("large", 2**62)),
    ("set", ("padded", " 12x")),
    ("add", ("padded", 1)),
    ("compare_set", ("c", "", "1")),
    ("compare_set", ("c", "2", "3")),
    ("compare_set", ("c", "1", "3")),
    ("compare_set", ("absent", "x", "y")),
    ("check", (["k", "n"],)),
    ("check", (["k", "nothing"],)),
    ("check", ([],)),
    ("wait", (["k", "k", "n"],)),
    ("wait", ([],)),
    ("append", ("k", "w")),
    ("append", ("fresh", "w")),
    ("multi_get", (["k", "fresh", "empty"],)),
    ("multi_set", (["a", "b"], ["1", ""])),
    ("multi_get", (["b", "a"],)),
    ("multi_get", ([],)),
    ("delete_key", ("a",)),
    ("delete_key", ("a",)),
    ("num_keys", ()),
    ("queue_push", ("q", "1")),
    ("queue_push", ("q", "")),
    ("queue_len", ("q",)),
    ("check", (["q"],)),
    ("queue_pop", ("q",)),
    ("queue_pop", ("q", False)),
    ("queue_len", ("q",)),
    ("queue_len", ("other",)),
    ("num_keys", ()),
    *([("barrier", ("solo", 1, TEN)), ("get", ("solo",))] if HAS_BARRIER else []),
    ("has_extended_api", ()),
]


def play(store) -> list:
    return [getattr(store, call)(*args) for call, args in SCRIPT] + [sorted(store.list_keys())]


def test_every_call_returns_the_same(pair):
    expected = play(serve("torch"))
    assert play(pair[0]) == expected


def test_what_one_writes_the_other_reads(pair):
    one, other = pair
    for key, value in (("text", "v"), ("naïve kéy/ with /slashes", "ü"), ("", "empty key")):
        one.set(key, value)
        assert other.get(key) == value.encode()
    other.add("n", 41)
    assert one.add("n", 1) == 42
    other.queue_push("q", "x")
    assert one.queue_pop("q") == b"x"
    assert sorted(one.list_keys()) == sorted(other.list_keys())
    assert one.num_keys() == other.num_keys()


def test_binary_and_large_values(pair):
    one, other = pair
    binary = bytes(range(256)) * 3
    large = os.urandom(8 << 20)
    ours = one if isinstance(one, TCPStore) else other
    if isinstance(ours, TCPStore):  # torch's Python binding takes text only
        ours.set("binary", binary)
        ours.set("large", large)
        assert one.get("binary") == other.get("binary") == binary
        assert one.get("large") == other.get("large") == large
        assert one.multi_get(["binary", "large", "binary"]) == [binary, large, binary]
    text = "x" * (8 << 20)
    one.set("text", text)
    assert other.get("text") == text.encode()


def test_waits_time_out_and_the_connection_goes_on(pair):
    one, other = pair
    error = DeadlineError if isinstance(one, TCPStore) else dist.DistStoreError
    with pytest.raises(error, match="absent"):
        one.wait(["absent"], SHORT)
    if HAS_BARRIER:
        with pytest.raises(error, match="b2"):
            one.barrier("b2", 2, SHORT)
    one.set_timeout(SHORT)
    with pytest.raises(error, match="absent"):
        one.get("absent")
    with pytest.raises(error):
        one.queue_pop("absent")
    other.set("absent", "came")
    assert one.get("absent") == b"came"
    assert one.add("n", 1) == 1


@pytest.mark.skipif(HAS_BARRIER, reason="this torch's server knows barriers")
def test_an_older_server_knows_no_barrier():
    server = serve("torch")
    store = client("ours", server.port)
    with pytest.raises(StoreConnectionError, match=r"PyTorch before 2\.13, which knows no barrier"):
        store.barrier("b", 1, TEN)
    store.set("k", "v")
    assert store.get("k") == b"v"


def test_waits_end_when_somebody_sets(pair):
    one, other = pair
    for key, act in {
        "by set": lambda: other.set("by set", "1"),
        "by add": lambda: other.add("by add", 1),
        "by append": lambda: other.append("by append", "1"),
        "by compare_set": lambda: other.compare_set("by compare_set", "", "1"),
        "by multi_set": lambda: other.multi_set(["by multi_set"], ["1"]),
    }.items():
        value = in_thread(one.get, key)
        time.sleep(0.03)
        act()
        assert value() == b"1"
    item = in_thread(one.queue_pop, "q")
    time.sleep(0.03)
    other.queue_push("q", "item")
    assert item() == b"item"


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_a_mixed_crowd_on_one_server(kind):
    server = serve(kind)
    crowd = [client(["ours", "torch"][i % 2], server.port) for i in range(8)]

    def run(rank, store):
        store.add("arrived", 1)
        store.set(f"from{rank}", f"hello{rank}")
        values = store.multi_get([f"from{r}" for r in range(8)])
        meet(store, "all", 8)
        store.queue_push("work", str(rank))
        store.wait([f"from{r}" for r in range(8)], TEN)
        return values

    results = [in_thread(run, rank, store) for rank, store in enumerate(crowd)]
    assert all(result() == [f"hello{r}".encode() for r in range(8)] for result in results)
    assert server.add("arrived", 0) == 8
    assert sorted(crowd[i].queue_pop("work") for i in range(8)) == [str(r).encode() for r in range(8)]


def _join(rank, world, port, kinds):
    store = KINDS[kinds[rank]]("127.0.0.1", port, world, rank == 0, timeout=timedelta(seconds=30))
    store.set(f"rank{rank}", "here")
    store.wait([f"rank{r}" for r in range(world)])
    meet(store, "leave", world)
    time.sleep(0.3 if rank == 0 else 0)
    return store.num_keys()


@pytest.mark.parametrize(
    "kinds", [("ours", "torch", "ours"), ("torch", "ours", "torch")], ids=lambda k: f"{k[0]}-serves"
)
def test_workers_of_both_kinds_join(kinds):
    port = free_port()
    assert run_ranks(_join, 3, port, kinds) == [5, 5, 5]


def _gloo(rank, world, port):
    import torch

    store = TCPStore("127.0.0.1", port, is_master=True, timeout=30, wait_for_workers=False) if rank == 0 else None
    theirs = dist.TCPStore("127.0.0.1", port, world, False, timedelta(seconds=30), wait_for_workers=False)
    dist.init_process_group("gloo", store=theirs, rank=rank, world_size=world)
    tensor = torch.full((10,), float(rank + 1))
    dist.all_reduce(tensor)
    gathered = [None] * world
    dist.all_gather_object(gathered, f"rank {rank}")
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        while store.server_stats()["clients"] > 2:
            time.sleep(0.01)
    return tensor[0].item(), gathered


def test_gloo_meets_on_our_server():
    port = free_port()
    assert run_ranks(_gloo, 2, port, deadline=90) == [(3.0, ["rank 0", "rank 1"])] * 2


def test_pytorchs_server_without_libuv():
    """It closes the connection of a client that gets an absent key; ours then waits first, as PyTorch's client does."""
    server = serve("torch", use_libuv=False)
    ours = client("ours", server.port)
    server.set("k", "v")
    ours.set("mine", "1")
    assert ours.get("k") == b"v"
    later = in_thread(ours.get, "later")
    time.sleep(0.1)
    client("torch", server.port, use_libuv=False).set("later", "now")
    assert later() == b"now"
    assert ours.multi_get(["k", "mine"]) == [b"v", b"1"]
    knowing = client("ours", server.port, use_libuv=False)
    waiting = in_thread(knowing.multi_get, ["k", "last"])
    time.sleep(0.05)
    ours.set("last", "x")
    assert waiting() == [b"v", b"x"]


def test_a_pytorch_client_without_the_token_is_refused_and_the_log_says_why():
    server = serve("ours", token="secret")

    def attempt():
        with pytest.raises((dist.DistNetworkError, dist.DistStoreError)):
            client("torch", server.port, timedelta(seconds=1))

    in_thread(attempt)(60)
    assert until(lambda: any("ping without the job token" in line for line in server.server_stats()["reasons"]))
    assert server.add("n", 1) == 1


def test_our_token_is_not_accepted_by_a_pytorch_server():
    server = serve("torch")
    with pytest.raises(StoreAuthError, match="it has none"):
        client("ours", server.port, token="secret")


def test_our_clients_notice_that_a_pytorch_server_ended():
    server = serve("torch")
    ours = client("ours", server.port)
    waiting = in_thread(ours.get, "never")
    time.sleep(0.05)
    del server
    with pytest.raises(StoreConnectionError, match="closed the connection during get"):
        waiting()


def _record(server_port: int) -> tuple[socket.socket, bytearray, bytearray]:
    """A relay that remembers what passes to and from the server."""
    relay = socket.create_server(("127.0.0.1", 0))
    sent, received = bytearray(), bytearray()

    def pump(source, sink, record):
        while data := source.recv(65536):
            record.extend(data)
            sink.sendall(data)

    def accept():
        here, _ = relay.accept()
        there = socket.create_connection(("127.0.0.1", server_port))
        threading.Thread(target=pump, args=(there, here, received), daemon=True).start()
        pump(here, there, sent)

    threading.Thread(target=accept, daemon=True).start()
    return relay, sent, received


def _talk(kind: str, port: int) -> None:
    store = KINDS[kind]("127.0.0.1", port, 1, timeout=TEN)
    store.set("key", "value")
    store.add("n", 3)
    store.append("key", "more")
    store.compare_set("key", "valuemore", "x")
    store.check(["key", "n"])
    store.multi_set(["a", "b"], ["1", "2"])
    store.wait(["a", "b"], TEN)
    store.delete_key("a")
    store.num_keys()


def test_without_a_token_every_byte_is_pytorchs():
    """The same calls, recorded on the way (the ping's nonce is the process's id, so even that is the same)."""
    recorded = {}
    for server_kind in KINDS:
        for kind in KINDS:
            server = serve(server_kind)
            relay, sent, received = _record(server.port)
            in_thread(_talk, kind, relay.getsockname()[1])()
            relay.close()
            recorded[server_kind, kind] = (bytes(sent), bytes(received))
    assert len(set(recorded.values())) == 1
