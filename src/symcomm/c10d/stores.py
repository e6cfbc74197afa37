"""Stores: ours by PyTorch's names, and the bridge between the two kinds.

Our ``PrefixStore`` and ``_StoreCollectives`` take PyTorch's stores as they are. The other way, ``as_torch_store``
dresses one of ours as a ``torch.distributed.Store``: ``init_process_group(store=as_torch_store(ours), ...)``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from symcomm import errors
from symcomm.c10d.words import wrong_type
from symcomm.store import FileStore, HashStore, PrefixStore, QueueEmptyError, Store, StoreCollectives
from symcomm.store.tcp import TCPStore

__all__ = [
    "FileStore",
    "HashStore",
    "PrefixStore",
    "QueueEmptyError",
    "Store",
    "TCPStore",
    "_ControlCollectives",
    "_StoreCollectives",
    "_test_python_store",
    "as_torch_store",
]


def _is_store(store: Any) -> bool:
    return isinstance(store, (Store, dist.Store))


# --- ours for PyTorch ---------------------------------------------------------------------------------------------


@contextmanager
def _in_torch_words() -> Iterator[None]:
    """PyTorch's code catches its own exceptions of a store: a time-out, a lost server, an empty queue."""
    try:
        yield
    except QueueEmptyError as error:
        raise dist.QueueEmptyError(str(error)) from error
    except errors.StoreConnectionError as error:
        raise dist.DistNetworkError(str(error)) from error
    except errors.DeadlineError as error:
        raise dist.DistStoreError(str(error)) from error


def _passed_on(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Store, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _in_torch_words():
            return getattr(self.store, name)(*args, **kwargs)

    return call


_alive: list[Any] = []  # C++ keeps its half of a dressed store only, so the Python half lives as long as the process


class _DressedStore(dist.Store):
    """One of our stores as one of PyTorch's. C++ knows some calls by other names than Python does."""

    def __init__(self, store: Any):
        super().__init__()
        self.store = store
        _alive.append(self)

    set = _passed_on("set")
    get = _passed_on("get")
    add = _passed_on("add")
    check = _passed_on("check")
    wait = _passed_on("wait")
    compare_set = _passed_on("compare_set")
    delete_key = deleteKey = _passed_on("delete_key")
    num_keys = getNumKeys = _passed_on("num_keys")
    list_keys = _passed_on("list_keys")
    append = _passed_on("append")
    multi_get = _passed_on("multi_get")
    multi_set = _passed_on("multi_set")
    queue_push = _passed_on("queue_push")
    queue_pop = _passed_on("queue_pop")
    queue_len = _passed_on("queue_len")
    barrier = _passed_on("barrier")
    has_extended_api = _passed_on("has_extended_api")
    set_timeout = _passed_on("set_timeout")

    @property
    def timeout(self) -> timedelta:
        return self.store.timeout

    def clone(self) -> _DressedStore:
        return _DressedStore(self.store.clone())


def as_torch_store(store: Any) -> Any:
    """``store`` as a ``torch.distributed.Store``; PyTorch's own come back as they are."""
    if isinstance(store, dist.Store):
        return store
    if not isinstance(store, Store):
        raise wrong_type("as_torch_store", "store", store, "a Store")
    known = next((dressed for dressed in _alive if dressed.store is store), None)
    return known or _DressedStore(store)


# --- tests and collectives ----------------------------------------------------------------------------------------


def _test_python_store(store: Any) -> None:
    """Make the calls of a store that a subclass written in Python has to answer, and check what comes back."""
    if not _is_store(store):
        raise wrong_type("_test_python_store", "store", store, "a Store")

    def expect(call: str, got: Any, wanted: Any) -> None:
        if got != wanted:
            raise errors.CallerError(f"_test_python_store: {type(store).__name__}.{call} gave {got!r}, not {wanted!r}.")

    store.add("key", 1)
    expect("add", store.add("key", 2), 3)
    store.set("key0", "value0")
    store.set("key1", "value1")
    expect("get", [store.get("key0"), store.get("key1")], [b"value0", b"value1"])
    expect("compare_set", store.compare_set("key0", "value0", "new"), b"new")
    expect("check", store.check(["key0", "key1"]), True)
    store.wait(["key0"])
    store.append("key2", "ab")
    store.append("key2", "cd")
    expect("append", store.get("key2"), b"abcd")
    store.multi_set(["key3", "key4"], ["3", "4"])
    expect("multi_get", store.multi_get(["key3", "key4"]), [b"3", b"4"])


class _ControlCollectives:
    """What collectives that only set things up can do: see StoreCollectives for each."""

    def __init__(self, *_: Any):
        raise TypeError("_ControlCollectives cannot be made; use _StoreCollectives(store, rank, world_size).")

    barrier: Any = StoreCollectives.barrier
    broadcast_send: Any = StoreCollectives.broadcast_send
    broadcast_recv: Any = StoreCollectives.broadcast_recv
    gather_send: Any = StoreCollectives.gather_send
    gather_recv: Any = StoreCollectives.gather_recv
    scatter_send: Any = StoreCollectives.scatter_send
    scatter_recv: Any = StoreCollectives.scatter_recv
    all_gather: Any = StoreCollectives.all_gather
    all_sum: Any = StoreCollectives.all_sum


class _StoreCollectives(StoreCollectives, _ControlCollectives):
    """Collectives among ``world_size`` ranks with nothing but a store, ours or PyTorch's."""

    def __init__(self, store: Any, rank: int, world_size: int):
        if not _is_store(store):
            raise wrong_type("_StoreCollectives", "store", store, "a Store")
        StoreCollectives.__init__(self, store, rank, world_size)
