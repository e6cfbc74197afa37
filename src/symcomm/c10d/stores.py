"""Stores: ours by PyTorch's names, each of them a ``torch.distributed.Store`` too, so that C++ takes them.

They are those of symcomm.store, which need no torch, with a C++ half (see torch_backend/stores.py). As in PyTorch, a
time is a timedelta or a float here; those of symcomm.store take whole seconds, too. ``as_torch_store`` gives a C++ half
to a store that was made without one. Our ``PrefixStore`` and ``_StoreCollectives`` take stores of all kinds.
"""

from __future__ import annotations

import functools
import inspect
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from symcomm import errors
from symcomm.errors import wrong_type
from symcomm.store import FileStore as OwnFileStore
from symcomm.store import HashStore as OwnHashStore
from symcomm.store import PrefixStore as OwnPrefixStore
from symcomm.store import QueueEmptyError, StoreCollectives
from symcomm.store import Store as OwnStore
from symcomm.store.file_formats import RECORDS
from symcomm.store.tcp import TCPStore as OwnTCPStore
from symcomm.torch_backend.stores import KeptWhileInCpp, as_torch_store
from symcomm.torch_backend.torch_patches import store_errors

__all__ = [
    "FakeStore", "FileStore", "HashStore", "PrefixStore", "QueueEmptyError", "Store", "TCPStore", "_ControlCollectives",
    "_StoreCollectives", "_test_python_store", "as_torch_store",
]  # fmt: skip

store_errors.apply()


class _AnyStore(type(dist.Store)):  # type: ignore[misc]
    """``isinstance(s, Store)`` holds for stores that were made without torch, and for PyTorch's."""

    def __instancecheck__(cls, instance: object) -> bool:
        return super().__instancecheck__(instance) or (cls is Store and isinstance(instance, (OwnStore, dist.Store)))


class Store(OwnStore, KeptWhileInCpp, metaclass=_AnyStore):
    """What every store can do; a subclass defines what it offers, and calls ``super().__init__()``.

    Raises: CallerError (which is a NotImplementedError) for calls that the subclass does not define."""

    def __init__(self) -> None:
        KeptWhileInCpp.__init__(self)


_Class = TypeVar("_Class", bound=type)
_LEFT_OUT = object()


def _times_as_in_pytorch(store: _Class) -> _Class:
    """A class decorator: ``wait``, ``barrier`` and ``set_timeout`` take the times that PyTorch's take."""
    wait, barrier, set_timeout = store.wait, store.barrier, store.set_timeout  # type: ignore[attr-defined]

    @functools.wraps(wait)
    def checked_wait(self: Any, keys: Any, timeout: Any = _LEFT_OUT) -> None:
        if timeout is _LEFT_OUT:
            return wait(self, keys)
        return wait(self, keys, _to_time(f"{store.__name__}.wait", timeout))

    @functools.wraps(barrier)
    def checked_barrier(self: Any, key: Any, world_size: Any, timeout: Any = None) -> None:
        time = None if timeout is None else _to_time(f"{store.__name__}.barrier", timeout)
        return barrier(self, key, world_size, time)

    @functools.wraps(set_timeout)
    def checked_set_timeout(self: Any, timeout: Any) -> None:
        _to_time(f"{store.__name__}.set_timeout", timeout)
        return set_timeout(self, timeout)  # which refuses a negative one: no later wait could end well

    for name, checked in (("wait", checked_wait), ("barrier", checked_barrier), ("set_timeout", checked_set_timeout)):
        setattr(store, name, checked)
    return store


def _to_time(call: str, timeout: Any) -> timedelta | float:
    """A time that is over counts as 0: a program may have subtracted."""
    if isinstance(timeout, timedelta):
        return max(timeout, timedelta(0))
    if not isinstance(timeout, float):
        raise wrong_type(call, "timeout", timeout, "a timedelta, or a float of seconds")
    return 0.0 if timeout < 0 else timeout


@_times_as_in_pytorch
class HashStore(OwnHashStore, Store):
    __doc__ = OwnHashStore.__doc__

    def __init__(self) -> None:
        Store.__init__(self)
        OwnHashStore.__init__(self)


@_times_as_in_pytorch
class FileStore(OwnFileStore, Store):
    __doc__ = OwnFileStore.__doc__
    _preferred = RECORDS

    def __init__(self, file_name: str, world_size: int = -1) -> None:
        Store.__init__(self)
        OwnFileStore.__init__(self, file_name, world_size)

    @staticmethod
    def _another(*args: Any, **named: Any) -> FileStore:
        return FileStore(*args, **named)

    def num_keys(self) -> int:
        """PyTorch keeps two numbers under keys, of the open and of the closed stores, and counts these keys."""
        return self._look(lambda table: len(table.values) + 1 + (table.closed_stores > 0))  # type: ignore[attr-defined]

    def delete_key(self, key: str) -> bool:
        """True, as in PyTorch, which does not look whether the key is there. But a queue is not a key."""
        return super().delete_key(key) or self.queue_len(key) == 0


@_times_as_in_pytorch
class PrefixStore(OwnPrefixStore, Store):
    __doc__ = OwnPrefixStore.__doc__

    def __init__(self, prefix: str, store: Any) -> None:
        Store.__init__(self)
        OwnPrefixStore.__init__(self, prefix, store)

    @staticmethod
    def _another(prefix: str, store: Any) -> PrefixStore:
        return PrefixStore(prefix, store)


@_times_as_in_pytorch
class TCPStore(OwnTCPStore, Store):
    __doc__ = OwnTCPStore.__doc__

    def __init__(self, *args: Any, **named: Any) -> None:
        Store.__init__(self)
        OwnTCPStore.__init__(self, *args, **named)

    __init__.__signature__ = inspect.signature(OwnTCPStore.__init__)  # type: ignore[attr-defined]

    @staticmethod
    def _another(*args: Any, **named: Any) -> TCPStore:
        return TCPStore(*args, **named)

    def __reduce__(self) -> Any:
        _, (host, port, timeout, use_libuv, token) = super().__reduce__()
        return functools.partial(TCPStore, timeout=timeout, use_libuv=use_libuv, token=token), (host, port)


class FakeStore(Store):
    """Answers at once and keeps nothing, for fake groups: every key is there, and every value is empty.

    Raises: CallerError (which is a NotImplementedError) for ``append`` and other calls that it does not have."""

    def set(self, key: str, value: Any) -> None:
        """Forgotten."""

    def get(self, key: str) -> bytes:
        return b""

    def add(self, key: str, amount: int) -> int:
        return amount

    def check(self, keys: Any) -> bool:
        return True

    def wait(self, keys: Any, timeout: Any = None) -> None:
        """There is nothing to wait for."""

    def delete_key(self, key: str) -> bool:
        return True

    def num_keys(self) -> int:
        return 0

    def multi_get(self, keys: Any) -> list[bytes]:
        return [b""] * len(keys)

    def multi_set(self, keys: Any, values: Any) -> None:
        """Forgotten."""

    def append(self, key: str, value: Any) -> None:
        raise self._lacks("append")

    def has_extended_api(self) -> bool:
        return False

    def barrier(self, *_: Any, **__: Any) -> None:
        """Nobody else comes."""

    def clone(self) -> FakeStore:
        return FakeStore()


# --- tests and collectives ----------------------------------------------------------------------------------------


def _test_python_store(store: Any) -> None:
    """Make the calls that a store written in Python has to answer, and check the answers.

    Values are bytes, as PyTorch's C++ passes them to such a store. Calls that PyTorch's test does not make are made
    only if the class defines them itself.

    Raises: WrongTypeError, CallerError that names the call whose answer was wrong."""
    if not isinstance(store, Store):
        raise wrong_type("_test_python_store", "store", store, "a Store")

    def expect(call: str, got: Any, wanted: Any) -> None:
        if got != wanted:
            raise errors.CallerError(f"_test_python_store: {type(store).__name__}.{call} gave {got!r}, not {wanted!r}.")

    def defines(call: str) -> bool:
        return getattr(type(store), call) not in (getattr(OwnStore, call), getattr(dist.Store, call))

    store.add("key", 1)
    expect("add", store.add("key", 2), 3)
    store.set("key0", b"value0")
    store.set("key1", b"value1")
    expect("get", [store.get("key"), store.get("key0"), store.get("key1")], [b"3", b"value0", b"value1"])
    if defines("compare_set"):
        expect("compare_set", store.compare_set("key0", b"value0", b"new"), b"new")
    if defines("check"):
        expect("check", store.check(["key0", "key1"]), True)
    if defines("wait"):
        store.wait(["key0"])
    if defines("append"):
        store.append("key2", b"ab")
        store.append("key2", b"cd")
        expect("append", store.get("key2"), b"abcd")
    if defines("multi_set"):
        store.multi_set(["key3", "key4"], [b"3", b"4"])
        expect("multi_set", [store.get("key3"), store.get("key4")], [b"3", b"4"])
    if defines("multi_get"):
        expect("multi_get", store.multi_get(["key", "key1"]), [b"3", b"value1"])


class _ControlCollectives:
    """Base class of ``_StoreCollectives``. Raises: TypeError, since only a subclass can be made."""

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
    """Collectives among ``world_size`` ranks with nothing but a store, ours or PyTorch's.

    Raises: what [StoreCollectives][symcomm.store.StoreCollectives] raises, and WrongTypeError."""

    def __init__(self, store: Any, rank: int, world_size: int):
        if not isinstance(store, Store):
            raise wrong_type("_StoreCollectives", "store", store, "a Store")
        StoreCollectives.__init__(self, store, rank, world_size)
