"""StoreCollectives: collectives that need only a store. Use them for setup, not for data.

Each call needs its own key; the keys in the store are ``key`` or ``key/rank``. A timeout covers the whole call, and the
error names the ranks that did not come.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from symcomm.errors import CallerError, DeadlineError, StoreDeadlineError, bad_argument, deadline
from symcomm.store.base import DEFAULT_TIMEOUT, Store, Timeout, Value, to_bytes, to_int, to_key, to_seconds


class StoreCollectives:
    """Collectives among ``world_size`` ranks that share ``store``, which may also be one of PyTorch's.

    Raises: BadArgumentError, DeadlineError that names the missing ranks, CallerError for a key that was used before."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        if not isinstance(world_size, int) or world_size < 1:
            raise bad_argument("StoreCollectives", "world_size", world_size, "a positive int")
        if not isinstance(rank, int) or not 0 <= rank < world_size:
            raise bad_argument("StoreCollectives", "rank", rank, f"an int from 0 to {world_size - 1}")
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._used: set[str] = set()

    def barrier(self, key: str, timeout: Timeout = DEFAULT_TIMEOUT, block: bool = True) -> None:
        """Return once every rank has called. With ``block=False``, announce this rank and do not wait."""
        name, seconds, _ = self._begin("barrier", key, timeout)
        self._barrier(f"barrier({key!r})", name, seconds, block)

    def broadcast_send(self, key: str, data: Value, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Give ``data`` to all other ranks, which call ``broadcast_recv``. Does not wait for them."""
        key, _, [own] = self._begin("broadcast_send", key, timeout, data)
        self._store.set(key, own)

    def broadcast_recv(self, key: str, timeout: Timeout = DEFAULT_TIMEOUT) -> bytes:
        """The data of the rank that called ``broadcast_send``."""
        key, seconds, _ = self._begin("broadcast_recv", key, timeout)
        return self._receive("broadcast", key, key, seconds)

    def gather_send(self, key: str, data: Value, timeout: Timeout = DEFAULT_TIMEOUT) -> None:
        """Give ``data`` to the rank that calls ``gather_recv``. Does not wait for it."""
        key, _, [own] = self._begin("gather_send", key, timeout, data)
        self._store.set(f"{key}/{self._rank}", own)

    def gather_recv(self, key: str, data: Value, timeout: Timeout = DEFAULT_TIMEOUT) -> list[bytes]:
        """Every rank's data in rank order; ``data`` is this rank's."""
        key, seconds, [own] = self._begin("gather_recv", key, timeout, data)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        found = self._from_ranks(f"gather_recv({key!r})", key, others, seconds)
        return [*found[: self._rank], own, *found[self._rank :]]

    def scatter_send(self, key: str, data: Sequence[Value], timeout: Timeout = DEFAULT_TIMEOUT) -> bytes:
        """Give ``data[r]`` to each rank r, which calls ``scatter_recv``; returns this rank's part."""
        to_seconds(timeout, "scatter_send")
        if isinstance(data, str | bytes) or len(data) != self._world_size:
            raise bad_argument("scatter_send", "data", data, f"a list of {self._world_size} items, one for each rank")
        key, _, parts = self._begin("scatter_send", key, timeout, *data)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        self._store.multi_set([f"{key}/{rank}" for rank in others], [parts[rank] for rank in others])
        return parts[self._rank]

    def scatter_recv(self, key: str, timeout: Timeout = DEFAULT_TIMEOUT) -> bytes:
        """This rank's part of the data of the rank that called ``scatter_send``."""
        key, seconds, _ = self._begin("scatter_recv", key, timeout)
        return self._receive("scatter", key, f"{key}/{self._rank}", seconds)

    def all_gather(self, key: str, data: Value, timeout: Timeout = DEFAULT_TIMEOUT) -> list[bytes]:
        """Every rank's data in rank order, on every rank."""
        key, seconds, [own] = self._begin("all_gather", key, timeout, data)
        self._store.set(f"{key}/{self._rank}", own)
        return self._from_ranks(f"all_gather({key!r})", key, list(range(self._world_size)), seconds)

    def all_sum(self, key: str, data: int, timeout: Timeout = DEFAULT_TIMEOUT) -> int:
        """The sum of every rank's number, on every rank."""
        own = to_int("all_sum", "data", data)
        key, seconds, _ = self._begin("all_sum", key, timeout)
        self._store.add(key, own)
        self._barrier(f"all_sum({key!r})", f"{key}/barrier", seconds)
        return int(self._store.get(key))

    # --- parts -----------------------------------------------------------------------------------

    def _begin(self, call: str, key: str, timeout: Timeout, *data: Value) -> tuple[str, float, list[bytes]]:
        """The arguments, checked. A key works once: a second use would find the first one's data."""
        seconds, parts = to_seconds(timeout, call), [to_bytes(call, part) for part in data]
        name = to_key(call, key)
        if name in self._used:
            raise CallerError(f"{call}: key {name!r} was used before; use a new key for each call.")
        self._used.add(name)
        return name, seconds, parts

    def _barrier(self, call: str, key: str, seconds: float, block: bool = True) -> None:
        self._store.set(f"{key}/{self._rank}", "1")
        if self._store.add(f"{key}/num_members", 1) == self._world_size:
            self._store.set(f"{key}/last_members", "1")
        if block and not self._came([f"{key}/last_members"], seconds):
            raise self._late(call, key, list(range(self._world_size)), seconds)

    def _from_ranks(self, call: str, key: str, ranks: list[int], seconds: float) -> list[bytes]:
        names = [f"{key}/{rank}" for rank in ranks]
        if not self._came(names, seconds):
            raise self._late(call, key, ranks, seconds)
        return list(self._store.multi_get(names))

    def _receive(self, what: str, key: str, name: str, seconds: float) -> bytes:
        if not self._came([name], seconds):
            nobody = f"No rank has called {what}_send({key!r}, ...)."
            raise deadline(f"{what}_recv({key!r})", seconds, fix=nobody, kind=StoreDeadlineError)
        return self._store.get(name)

    def _came(self, names: list[str], seconds: float) -> bool:
        """Wait for keys; returns whether they came in time."""
        end = time.monotonic() + seconds
        try:
            if names:
                self._store.wait(names, timedelta(seconds=seconds))
        except DeadlineError:
            return False
        except RuntimeError:  # what PyTorch's stores raise, for a timeout and for a lost connection alike
            if time.monotonic() < end:
                raise
            return False
        return True

    def _late(self, call: str, key: str, ranks: list[int], seconds: float) -> DeadlineError:
        here = [rank for rank in ranks if self._store.check([f"{key}/{rank}"])]
        arrived = sorted({*here, self._rank})
        missing = [rank for rank in ranks if rank not in arrived]
        return deadline(call, seconds, missing=missing, arrived=arrived, kind=StoreDeadlineError)
