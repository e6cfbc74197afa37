"""StoreCollectives against PyTorch's, over every kind of store."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest

from symcomm.errors import BadArgumentError, CallerError, DeadlineError
from symcomm.store import HashStore, PrefixStore, Store, StoreCollectives
from tests.support.stores import MinimalStore, TinyStore, dist

pytestmark = [pytest.mark.torch_versions, pytest.mark.without_torch]

SHORT = timedelta(seconds=0.3)

WORLDS: dict[str, tuple[Any, Callable[[], Any]]] = {
    "HashStore": (StoreCollectives, HashStore),
    "MinimalStore": (StoreCollectives, MinimalStore),
    "TinyStore": (StoreCollectives, TinyStore),
    "PrefixStore on TinyStore": (StoreCollectives, lambda: PrefixStore("p", TinyStore())),
}
if dist is not None:
    WORLDS["our collectives on torch HashStore"] = (StoreCollectives, dist.HashStore)
    from torch._C import _distributed_c10d

    if theirs := getattr(_distributed_c10d, "_StoreCollectives", None):  # torch has had none since 2.14
        WORLDS["torch"] = (theirs, dist.HashStore)


@pytest.fixture(params=WORLDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


def everywhere(kind: str, world: int, fn: Callable[[Any, int], Any]) -> list[Any]:
    """``fn(collectives, rank)`` on ``world`` threads that share a store; what they returned or raised."""
    collectives, make = WORLDS[kind]
    store = make()

    def go(rank: int) -> Any:
        try:
            return fn(collectives(store, rank, world), rank)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(world) as pool:
        return list(pool.map(go, range(world), timeout=60))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_values(kind, world):
    def work(c: Any, rank: int) -> list[Any]:
        root = world - 1
        done: list[Any] = [c.barrier("barrier")]
        done += [c.broadcast_send("b", b"\x00b") if rank == root else c.broadcast_recv("b")]
        done += [c.gather_recv("g", f"g{rank}") if rank == root else c.gather_send("g", f"g{rank}")]
        parts = [f"s{r}" for r in range(world)]
        done += [c.scatter_send("s", parts) if rank == root else c.scatter_recv("s")]
        done += [c.all_gather("a", f"a{rank}"), c.all_sum("n", 10 - 5 * rank)]
        return done

    got = everywhere(kind, world, work)
    for rank, done in enumerate(got):
        assert done == [
            None,
            None if rank == world - 1 else b"\x00b",
            [b"g%d" % r for r in range(world)] if rank == world - 1 else None,
            b"s%d" % rank,
            [b"a%d" % r for r in range(world)],
            sum(10 - 5 * r for r in range(world)),
        ]


def test_barrier_without_blocking(kind):
    def work(c: Any, rank: int) -> None:
        if rank == 0:
            time.sleep(0.1)
        c.barrier("b", SHORT, block=rank == 0)

    assert everywhere(kind, 3, work) == [None] * 3


CALLS: dict[str, Callable[..., Any]] = {
    "barrier": lambda c, limit=SHORT: c.barrier("key", limit),
    "broadcast_recv": lambda c, limit=SHORT: c.broadcast_recv("key", limit),
    "gather_recv": lambda c, limit=SHORT: c.gather_recv("key", "x", limit),
    "scatter_recv": lambda c, limit=SHORT: c.scatter_recv("key", limit),
    "all_gather": lambda c, limit=SHORT: c.all_gather("key", "x", limit),
    "all_sum": lambda c, limit=SHORT: c.all_sum("key", 1, limit),
}
SENDS: dict[str, Callable[..., Any]] = {
    "broadcast_send": lambda c, limit=SHORT: c.broadcast_send("key", "x", limit),
    "gather_send": lambda c, limit=SHORT: c.gather_send("key", "x", limit),
    "scatter_send": lambda c, limit=SHORT: c.scatter_send("key", ["x", "y", "z"], limit),
}


@pytest.mark.parametrize("call", CALLS)
def test_timeout_is_for_the_whole_call_and_names_the_missing(kind, call):
    collectives, make = WORLDS[kind]
    store = make()
    c = collectives(store, 1, 4)
    helper = collectives(store, 3, 4)
    helper.barrier("key", block=False)  # leaves the mark of rank 3, for any of these calls
    if call == "all_sum":
        collectives(store, 3, 4).barrier("key/barrier", block=False)
    start = time.monotonic()
    with pytest.raises(RuntimeError) as info:
        CALLS[call](c)
    assert 0.2 < time.monotonic() - start < 10
    if kind == "torch":
        return
    assert isinstance(info.value, DeadlineError)
    assert f"{call}('key') timed out after 300 ms" in str(info.value)
    if call in ("broadcast_recv", "scatter_recv"):
        assert call.replace("recv", "send") in str(info.value)
    else:
        assert info.value.missing == [0, 2]
        assert "ranks 0, 2 did not come (there: 1, 3)" in str(info.value)
        assert pickle.loads(pickle.dumps(info.value)).missing == [0, 2]


@pytest.mark.parametrize("call", [*CALLS, *SENDS])
def test_a_key_serves_once(kind, call):
    collectives, make = WORLDS[kind]
    c = collectives(make(), 0, 3)
    if call in SENDS:
        SENDS[call](c)
    else:
        with pytest.raises(RuntimeError):
            CALLS[call](c, timedelta(seconds=0.01))
    with pytest.raises(RuntimeError, match="Key key has already been used|key 'key' was used before"):
        (CALLS | SENDS)[call](c)
    with pytest.raises(RuntimeError):
        c.barrier("key", SHORT)


def test_bad_arguments():
    store = HashStore()
    for bad in ((3, 3), (-1, 3), (0, 0), ("0", 1)):
        with pytest.raises(BadArgumentError, match="StoreCollectives: "):
            StoreCollectives(store, *bad)
    c = StoreCollectives(store, 0, 3)
    for call, match in (
        (lambda: c.scatter_send("a", ["x", "y"]), "a list of 3 items"),
        (lambda: c.scatter_send("a", "xyz"), "a list of 3 items"),
        (lambda: c.all_sum("a", "1"), "data must be an int"),
        (lambda: c.broadcast_send("a", 1), "str or bytes"),
        (lambda: c.barrier("a", "soon"), "barrier: timeout must be"),
        (lambda: c.barrier(1), "key must be a str"),
    ):
        with pytest.raises(BadArgumentError, match=match):
            call()
    assert store.num_keys() == 0, "refused before anything happened"
    c.broadcast_send("a", "x")  # and the key is still free


def test_a_lost_store_is_not_taken_for_a_timeout():
    class Broken(Store):
        def wait(self, keys, timeout=None):
            raise RuntimeError("the cable is out")

    with pytest.raises(RuntimeError, match="the cable is out"):
        StoreCollectives(Broken(), 0, 2).broadcast_recv("key")
    with pytest.raises(CallerError, match=r"Broken.set"):
        StoreCollectives(Broken(), 0, 2).all_gather("key", "x")
