"""Our stores as PyTorch's."""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore as TorchPrefixStore
from torch.distributed import Store as TorchStore

from symcomm.errors import wrong_type
from symcomm.group.torch_layout import places_of, pointed_to
from symcomm.store import Store

_AT = object.__basicsize__  # a pointer to the C++ half follows Python's object header
_kept: list[Any] = []  # stores that only C++ still holds


class KeptWhileInCpp(TorchStore):
    """A store that C++ can call. C++ keeps only its own half alive, but calls need the Python half. So a store that
    only C++ still references is kept here until C++ releases it."""

    def __init__(self) -> None:
        super().__init__()
        take_back()

    def __del__(self, is_ending: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_ending() and _is_held(self):  # Python calls this only once for each store
            _kept.append(self)


def take_back() -> None:
    """Drop kept stores that C++ has released."""
    _kept[:] = [store for store in _kept if _is_held(store)]


def _is_held(store: Any) -> bool:
    """Whether C++ holds a reference; True if that is unknown."""
    if _COUNT_AT is None:
        return True
    half = ctypes.c_void_p.from_address(id(store) + _AT).value
    return half is not None and ctypes.c_uint32.from_address(half + _COUNT_AT).value > 1  # one is the Python half's


def _count_at() -> int | None:
    """Where the C++ half of a store counts its references (see group/torch_layout.py), or None."""
    try:
        samples: list[tuple[bytes, int]] = []
        for count in (1, 2, 5, 3):
            store = TorchStore()
            holders = [TorchPrefixStore("", store) for _ in range(count - 1)]
            samples.append((pointed_to(store, _AT), 1 + len(holders)))
            del holders
        found = places_of(samples, 4)
    except (OSError, RuntimeError, TypeError):
        return None
    return found[0] if len(found) == 1 else None


_COUNT_AT = _count_at()


def _passed_on(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Store, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.store, name)(*args, **kwargs)

    return call


class _TorchStoreAdapter(KeptWhileInCpp):
    """One of our stores as one of PyTorch's. C++ calls some methods by other names than Python does."""

    def __init__(self, store: Any):
        super().__init__()
        self.store = store

    @property
    def timeout(self) -> timedelta:
        return self.store.timeout

    def clone(self) -> _TorchStoreAdapter:
        return as_torch_store(self.store.clone())

    def __getattr__(self, name: str) -> Any:
        """Attributes that only some stores have: ``host``, ``port``, ``path``, ``underlying_store``."""
        if name == "store":  # not there yet
            raise AttributeError(name)
        return getattr(self.store, name)


for _name in (
    "set", "get", "add", "check", "wait", "compare_set", "delete_key", "num_keys", "list_keys", "append", "multi_get",
    "multi_set", "queue_push", "queue_pop", "queue_len", "barrier", "has_extended_api", "set_timeout",
):  # fmt: skip
    setattr(_TorchStoreAdapter, _name, _passed_on(_name))
for _name, _in_cpp in (("delete_key", "deleteKey"), ("num_keys", "getNumKeys")):
    setattr(_TorchStoreAdapter, _in_cpp, vars(_TorchStoreAdapter)[_name])


_adapters: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()  # by the store's id


def as_torch_store(store: Any) -> Any:
    """``store`` as a ``torch.distributed.Store``; PyTorch's own, and those of symcomm.c10d, are returned as they are.

    Raises: WrongTypeError."""
    if isinstance(store, TorchStore):
        return store
    if not isinstance(store, Store):
        raise wrong_type("as_torch_store", "store", store, "a Store")
    known = _adapters.get(id(store))  # the adapter keeps the store alive, so its id is not reused
    if known is None:
        known = _adapters[id(store)] = _TorchStoreAdapter(store)
    return known
