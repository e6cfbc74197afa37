"""PrefixStore: a part of another store, where every key begins with ``prefix/``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from symcomm.errors import wrong_type
from symcomm.store.base import Store, Timeout, Value, to_bytes, to_key, to_keys, to_pairs


class PrefixStore(Store):
    """Forwards every call to ``store`` with ``prefix/`` before the keys, so that users of a store cannot collide.

    ``store`` may be any object with a store's methods, also one of PyTorch's; it receives values as bytes. The timeout
    is the inner store's. ``list_keys`` shows the keys under the prefix only; ``num_keys`` counts the whole inner store,
    as in PyTorch.

    Raises: WrongTypeError, and what the inner store raises.
    """

    def __init__(self, prefix: str, store: Store) -> None:
        has_calls = callable(getattr(store, "get", None)) and callable(getattr(store, "set", None))
        if isinstance(store, type) or not has_calls:
            raise wrong_type("PrefixStore", "store", store, "a Store")
        self._prefix = to_key("PrefixStore", prefix)
        self._store = store

    @property
    def underlying_store(self) -> Store:
        """The store given to us, which may have a prefix itself."""
        return self._store

    @property
    def _underlying_non_prefix_store(self) -> Store:
        """The store below all prefixes."""
        inner = self._store
        return inner._underlying_non_prefix_store if isinstance(inner, PrefixStore) else inner

    def set(self, key: str, value: Value) -> None:
        self._store.set(self._name(key), to_bytes("PrefixStore.set", value))

    def get(self, key: str) -> bytes:
        return self._store.get(self._name(key))

    def check(self, keys: Sequence[str]) -> bool:
        return self._store.check(self._names(keys))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        limit = () if timeout is None else (timedelta(seconds=self._seconds(timeout)),)
        self._store.wait(self._names(keys), *limit)

    def add(self, key: str, amount: int) -> int:
        return self._store.add(self._name(key), amount)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        call = "PrefixStore.compare_set"
        return self._store.compare_set(self._name(key), to_bytes(call, expected), to_bytes(call, desired))

    def append(self, key: str, value: Value) -> None:
        self._store.append(self._name(key), to_bytes("PrefixStore.append", value))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._store.multi_get(self._names(keys))

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        pairs = to_pairs("PrefixStore.multi_set", keys, values)
        self._store.multi_set([self._name(key) for key, _ in pairs], [value for _, value in pairs])

    def delete_key(self, key: str) -> bool:
        return self._store.delete_key(self._name(key))

    def list_keys(self) -> list[str]:
        start = f"{self._prefix}/"
        return [key.removeprefix(start) for key in self._store.list_keys() if key.startswith(start)]

    def num_keys(self) -> int:
        return self._store.num_keys()

    def queue_push(self, key: str, value: Value) -> None:
        self._store.queue_push(self._name(key), to_bytes("PrefixStore.queue_push", value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        return self._store.queue_pop(self._name(key), block)

    def queue_len(self, key: str) -> int:
        return self._store.queue_len(self._name(key))

    @staticmethod
    def _another(prefix: str, store: Store) -> PrefixStore:
        """For ``clone``: a subclass overrides this to make clones of its own class."""
        return PrefixStore(prefix, store)

    def clone(self) -> PrefixStore:
        return self._another(self._prefix, self._store.clone())

    def has_extended_api(self) -> bool:
        return self._store.has_extended_api()

    @property
    def timeout(self) -> timedelta:
        return self._store.timeout

    def set_timeout(self, timeout: Timeout) -> None:
        self._store.set_timeout(timeout)

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{to_key('PrefixStore', key)}"

    def _names(self, keys: Sequence[str]) -> list[str]:
        return [self._name(key) for key in to_keys("PrefixStore", keys)]
