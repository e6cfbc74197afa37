"""Our objects in PyTorch's hands, and PyTorch's in ours: stores, reduce operations, options, hooks."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from datetime import timedelta

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

import symcomm
from symcomm.backend import stores
from symcomm.backend.register import register
from tests.c10d_compare import on_two_ranks, ours, theirs

SOON = timedelta(seconds=20)

# --- stores -------------------------------------------------------------------------------------------------------


class Dict(ours.Store):
    """Somebody's own store."""

    def __init__(self) -> None:
        super().__init__()
        self.data: dict[str, bytes] = {}

    def set(self, key, value):
        self.data[key] = value.encode() if isinstance(value, str) else value

    def get(self, key):
        return self.data[key]

    def add(self, key, amount):
        self.data[key] = b"%d" % (int(self.data.get(key, 0)) + amount)
        return int(self.data[key])

    def compare_set(self, key, expected, desired):
        if self.data.get(key, b"") == expected:
            self.data[key] = desired
        return self.data.get(key, expected)

    def check(self, keys):
        return all(key in self.data for key in keys)


KINDS = {
    "hash": lambda tmp: ours.HashStore(),
    "file": lambda tmp: ours.FileStore(str(tmp / "store"), 1),
    "tcp": lambda tmp: ours.TCPStore("localhost", 0, 1, True, SOON),
    "prefix": lambda tmp: ours.PrefixStore("p", ours.HashStore()),
    "prefix of theirs": lambda tmp: ours.PrefixStore("p", theirs.HashStore()),
    "python": lambda tmp: Dict(),
    "made without torch": lambda tmp: ours.as_torch_store(symcomm.HashStore()),
}


@pytest.fixture(params=KINDS)
def make(request, tmp_path):
    return lambda: KINDS[request.param](tmp_path)


def test_cpp_takes_our_stores(make):
    store = make()
    assert isinstance(store, dist.Store)
    part = theirs.PrefixStore("a", store)
    part.set("x", "1")
    assert part.append("x", "2") is None and part.get("x") == b"12" and part.add("n", 3) == 3
    assert store.get("a/x") == b"12" and part.underlying_store is store
    theirs._test_python_store(make())
    if hasattr(theirs, "_StoreCollectives"):
        assert theirs._StoreCollectives(store, 0, 1).all_sum("sum", 7, SOON) == 7


def test_what_cpp_holds_answers_for_as_long_as_that(make):
    store = make()
    outside = theirs.PrefixStore("a", store)
    gone = weakref.ref(store)
    outside.set("x", "1")
    del store
    gc.collect()
    stores.take_back()
    assert outside.get("x") == b"1" and gone() is not None
    clone = outside.clone()  # of which C++ is the only owner from the start
    gc.collect()
    clone.set("y", "2")
    assert outside.get("y") == b"2" or clone.get("y") == b"2"
    del outside, clone
    stores.take_back()
    assert gone() is None


def test_what_nobody_holds_goes_at_once(make):
    gone = weakref.ref(make())
    assert gone() is None


def test_a_store_in_a_cycle_answers_too():
    store = Dict()
    store.myself = store
    outside = theirs.PrefixStore("a", store)
    gone = weakref.WeakSet([store])
    del store
    gc.collect()
    outside.set("x", "1")
    assert outside.get("x") == b"1"
    del outside
    gone.clear()


def test_a_server_ends_when_cpp_lets_go():
    outside = theirs.PrefixStore("a", ours.TCPStore("localhost", 0, 1, True, SOON))
    port = outside.underlying_store.port
    client = theirs.TCPStore("localhost", port, timeout=SOON)
    outside.set("x", "1")
    assert client.get("a/x") == b"1"
    del outside
    stores.take_back()
    with pytest.raises(dist.DistError):
        ours.TCPStore("localhost", port, timeout=timedelta(milliseconds=200))


def test_a_group_keeps_the_store_that_was_given_to_it():
    register()
    for backend in ("gloo", "symcomm"):
        store = ours.HashStore()
        gone = weakref.ref(store)
        dist.init_process_group(backend, store=store, rank=0, world_size=1)
        del store
        gc.collect()
        try:
            part = dist.new_group([0])
            tensor = torch.ones(2)
            dist.all_reduce(tensor, group=part)
            assert tensor.tolist() == [1, 1] and gone() is not None
            del part
        finally:
            dist.destroy_process_group()
        gc.collect()
        stores.take_back()
        assert gone() is None, backend


RPC = """
import torch, symcomm
from symcomm import c10d
import torch.distributed.rpc as rpc

kinds = [c10d.HashStore, lambda: c10d.PrefixStore("p", c10d.TCPStore("localhost", 0, 1, True)), symcomm.HashStore]
torch.distributed.rendezvous.__globals__["register_rendezvous_handler"](
    "ours", lambda url, **_: iter([(kinds.pop()(), 0, 1)])
)
options = rpc.TensorPipeRpcBackendOptions(init_method="ours://")
while kinds:
    rpc.init_rpc("worker", rank=0, world_size=1, rpc_backend_options=options)
    assert rpc.rpc_sync("worker", torch.add, (torch.ones(2), 1)).tolist() == [2, 2]
    rpc.shutdown()
held = torch.distributed.PrefixStore("a", c10d.HashStore())  # until the process ends
print("done")
"""


@pytest.mark.skipif(not dist.rpc.is_available(), reason="this build of torch has no RPC")
def test_rpc_on_our_stores():
    ran = subprocess.run([sys.executable, "-c", RPC], capture_output=True, text=True, timeout=120)
    assert ran.returncode == 0 and ran.stdout == "done\n", ran.stderr


def test_where_the_count_is_not_found_stores_are_kept(monkeypatch):
    monkeypatch.setattr(stores, "_count_at", lambda: None)
    outside = theirs.PrefixStore("a", ours.HashStore())
    gc.collect()
    outside.set("x", "1")
    stores.take_back()
    assert outside.get("x") == b"1"
    monkeypatch.undo()
    del outside
    stores.take_back()


def test_stores_are_what_they_were():
    """Those of symcomm.c10d are those that need no torch, and more."""
    for name in ("Store", "HashStore", "FileStore", "TCPStore", "PrefixStore"):
        assert issubclass(getattr(ours, name), getattr(symcomm, name))
        assert issubclass(getattr(ours, name), dist.Store)
    assert isinstance(symcomm.HashStore(), ours.Store) and isinstance(theirs.HashStore(), ours.Store)
    assert not isinstance(3, ours.Store) and not isinstance(theirs.HashStore(), ours.HashStore)
    register()
    part = theirs.PrefixStore("a", symcomm.HashStore())  # a prefix is the way in for those, too
    part.set("x", "1")
    assert theirs.PrefixStore(prefix="b", store=part).check(["x"]) is False and part.get("x") == b"1"
