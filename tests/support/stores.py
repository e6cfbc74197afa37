"""Stores as users would write them."""

from __future__ import annotations

import threading

from symcomm.store import Store

try:
    import torch.distributed as dist
except ModuleNotFoundError:
    dist = None  # type: ignore[assignment]


class MinimalStore(Store):
    """A store as a user would write it: the primitives on a dict, and nothing else."""

    def __init__(self) -> None:
        self.data: dict[str, bytes] = {}
        self.lock = threading.Lock()

    def set(self, key, value):
        with self.lock:
            self.data[key] = value.encode() if isinstance(value, str) else bytes(value)

    def get(self, key):
        self.wait([key])
        return self.data[key]

    def check(self, keys):
        return all(key in self.data for key in keys)

    def add(self, key, amount):
        with self.lock:
            total = int(self.data.get(key, b"0")) + amount
            self.data[key] = str(total).encode()
            return total

    def compare_set(self, key, expected, desired):
        old, new = (v.encode() if isinstance(v, str) else v for v in (expected, desired))
        with self.lock:
            if self.data.get(key, b"") == old:
                self.data[key] = new
            return self.data.get(key, old)

    def delete_key(self, key):
        with self.lock:
            return self.data.pop(key, None) is not None

    def list_keys(self):
        return list(self.data)


class TinyStore(Store):
    """The smallest store: no compare_set, no delete."""

    def __init__(self):
        self.data = {}

    set = MinimalStore.set
    get = MinimalStore.get
    check = MinimalStore.check
    add = MinimalStore.add
    lock = threading.Lock()
