"""Who may still need a store that we opened. The last holder to let go closes it."""

from __future__ import annotations

import contextlib
import threading
from typing import Any


def root_of(store: Any) -> Any:
    """The store itself, below all prefixes; ours or PyTorch's."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return store


class Lease:
    """One holder's claim on ``store``. Groups that come from a group have a share in its store."""

    def __init__(self, store: Any):
        self._store = root_of(store)
        self._holders = 1
        self._lock = threading.Lock()

    def share(self) -> Lease:
        """A claim for one more holder."""
        with self._lock:
            self._holders += 1
        return self

    @property
    def serves_others(self) -> bool:
        """Whether releasing it would end a server that other processes use."""
        return self._holders == 1 and bool(getattr(self._store, "is_serving", False))

    def release(self) -> None:
        with self._lock:
            self._holders -= 1
            close = getattr(self._store, "close", None) if self._holders == 0 else None
        if close is not None:
            with contextlib.suppress(OSError):
                close()
