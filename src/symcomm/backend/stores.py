"""Our stores in PyTorch's hands."""

from __future__ import annotations

import functools
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch.distributed import Store as TorchStore

from symcomm.errors import wrong_type
from symcomm.store import Store

__all__ = ["as_torch_store", "lend_to_default_group", "take_back"]

# C++ keeps its half of a dressed store only, and does not say how long. So the Python half lives as long as the
# process, or as the default group where only that group uses it.
_alive: list[Any] = []
_of_default_group: list[Any] = []


def _passed_on(name: str) -> Callable[..., Any]:
    @functools.wraps(getattr(Store, name))
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.store, name)(*args, **kwargs)

    return call


class _DressedStore(TorchStore):
    """One of our stores as one of PyTorch's. C++ knows some calls by other names than Python does."""

    def __init__(self, store: Any):
        super().__init__()
        self.store = store

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
        return as_torch_store(self.store.clone())

    def __getattr__(self, name: str) -> Any:
        """What only some stores have: ``host``, ``port``, ``path``, ``underlying_store``."""
        if name == "store":  # not there yet
            raise AttributeError(name)
        return getattr(self.store, name)


def as_torch_store(store: Any) -> Any:
    """``store`` as a ``torch.distributed.Store``; PyTorch's own come back as they are."""
    return _dressed(store, _alive)


def lend_to_default_group(store: Any) -> Any:
    """The same, until the default group is destroyed."""
    return _dressed(store, _of_default_group)


def take_back() -> None:
    """The default group is destroyed."""
    _of_default_group.clear()


def _dressed(store: Any, keep: list[Any]) -> Any:
    if isinstance(store, TorchStore):
        return store
    if not isinstance(store, Store):
        raise wrong_type("as_torch_store", "store", store, "a Store")
    known = next((dressed for dressed in (*_alive, *_of_default_group) if dressed.store is store), None)
    if known is None:
        known = _DressedStore(store)
        keep.append(known)
    return known
