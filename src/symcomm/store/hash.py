"""HashStore: a store for the threads of one process, and the table that FileStore also keeps."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from symcomm.store.base import (
    QueueEmptyError,
    Store,
    Timeout,
    Value,
    add_to,
    keys_missing,
    to_bytes,
    to_flag,
    to_int,
    to_key,
    to_keys,
    to_pairs,
    wait_late,
)

Result = TypeVar("Result")


class Table:
    """Keys and queues in memory. Every change goes through ``change``, so that it can be logged."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.queues: dict[str, deque[bytes]] = {}

    def change(self, kind: str, key: str, value: bytes = b"") -> None:
        """Make one change: ``set``, ``append``, ``delete``, ``push`` or ``pop``."""
        if kind == "set":
            self.values[key] = value
        elif kind == "append":
            self.values[key] = self.values.get(key, b"") + value
        elif kind == "delete":
            self.values.pop(key, None)  # PyTorch's also deletes what is not there
        elif kind == "push":
            self.queues.setdefault(key, deque()).append(value)
        elif kind == "pop":
            self.queues[key].popleft()
            if not self.queues[key]:
                del self.queues[key]
        else:
            raise AssertionError(kind)

    def has(self, key: str) -> bool:
        """Whether ``key`` is set or is a queue that is not empty."""
        return key in self.values or key in self.queues


class TableStore(Store):
    """Every call of a store, made of three: look at the table, look until there is something, edit it."""

    def _look(self, step: Callable[[Table], Result]) -> Result:
        """Run ``step``, which only reads, on the newest table."""
        raise self._lacks("_look")

    def _look_until(self, step: Callable[[Table], Result | None], seconds: float) -> Result | None:
        """Run ``step`` again whenever the table changed, until it returns something true; None after ``seconds``."""
        raise self._lacks("_look_until")

    def _edit(self, step: Callable[[Table], Result]) -> Result:
        """Run ``step`` on the newest table while no one else can change it."""
        raise self._lacks("_edit")

    def set(self, key: str, value: Value) -> None:
        name, data = to_key(self._call("set"), key), to_bytes(self._call("set"), value)
        self._edit(lambda table: table.change("set", name, data))

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def check(self, keys: Sequence[str]) -> bool:
        names = to_keys(self._call("check"), keys)
        return self._look(lambda table: all(map(table.has, names)))

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        names = to_keys(self._call("wait"), keys)
        seconds = self._seconds(timeout)
        if not self._look_until(lambda table: all(map(table.has, names)) or None, seconds):
            missing = self._look(lambda table: [name for name in names if not table.has(name)])
            if missing:
                raise keys_missing(self, "wait", missing, seconds)

    def add(self, key: str, amount: int) -> int:
        call = self._call("add")
        name, amount = to_key(call, key), to_int(call, "amount", amount)

        def step(table: Table) -> int:
            total = add_to(call, name, table.values.get(name, b""), amount)
            table.change("set", name, b"%d" % total)
            return total

        return self._edit(step)

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        call = self._call("compare_set")
        name, old, new = to_key(call, key), to_bytes(call, expected), to_bytes(call, desired)

        def step(table: Table) -> bytes:
            if table.values.get(name, b"") == old:
                table.change("set", name, new)
            return table.values.get(name, old)

        return self._edit(step)

    def append(self, key: str, value: Value) -> None:
        name, data = to_key(self._call("append"), key), to_bytes(self._call("append"), value)
        self._edit(lambda table: table.change("append", name, data))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        names = to_keys(self._call("get"), keys)
        if not names:
            return []
        seconds = self._seconds(None)

        def step(table: Table) -> list[bytes] | None:
            return [table.values[n] for n in names] if all(n in table.values for n in names) else None

        found = self._look_until(step, seconds)
        if found is None:
            missing = self._look(lambda table: [name for name in names if name not in table.values])
            raise keys_missing(self, "get", missing or names, seconds)
        return found

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        pairs = to_pairs(self._call("multi_set"), keys, values)

        def step(table: Table) -> None:
            for name, data in pairs:
                table.change("set", name, data)

        self._edit(step)

    def delete_key(self, key: str) -> bool:
        name = to_key(self._call("delete_key"), key)

        def step(table: Table) -> bool:
            there = name in table.values
            if there:
                table.change("delete", name)
            return there

        return self._edit(step)

    def list_keys(self) -> list[str]:
        return self._look(lambda table: list(table.values))

    def num_keys(self) -> int:
        return self._look(lambda table: len(table.values))

    def queue_push(self, key: str, value: Value) -> None:
        name, data = to_key(self._call("queue_push"), key), to_bytes(self._call("queue_push"), value)
        self._edit(lambda table: table.change("push", name, data))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        name, block = to_key(self._call("queue_pop"), key), to_flag(self._call("queue_pop"), "block", block)
        seconds = self._seconds(None) if block else 0.0
        end = time.monotonic() + seconds

        def step(table: Table) -> bytes | None:
            if name not in table.queues:
                return None
            oldest = table.queues[name][0]
            table.change("pop", name)
            return oldest

        # Others may be faster: what we saw can be gone when we come to take it.
        while (oldest := self._edit(step)) is None:
            left = end - time.monotonic()
            if left <= 0 or not self._look_until(lambda table: name in table.queues or None, left):
                call = self._call("queue_pop")
                if not block:
                    raise QueueEmptyError(f"{call}: queue {name!r} is empty.")
                raise wait_late(call, [name], seconds, f"nobody pushed to queue {name!r}")
        return oldest

    def queue_len(self, key: str) -> int:
        name = to_key(self._call("queue_len"), key)
        return self._look(lambda table: len(table.queues.get(name, ())))

    def has_extended_api(self) -> bool:
        return True

    def _call(self, method: str) -> str:
        return f"{type(self).__name__}.{method}"


class HashStore(TableStore):
    """A store in this process's memory. Threads may share it; a setter wakes those that wait.

    Raises: WrongTypeError, StoreDeadlineError, QueueEmptyError."""

    def __init__(self) -> None:
        self._table = Table()
        self._changed = threading.Condition()

    def _look(self, step: Callable[[Table], Result]) -> Result:
        with self._changed:
            return step(self._table)

    def _look_until(self, step: Callable[[Table], Result | None], seconds: float) -> Result | None:
        with self._changed:
            return self._changed.wait_for(lambda: step(self._table), seconds)

    def _edit(self, step: Callable[[Table], Result]) -> Result:
        with self._changed:
            result = step(self._table)
            self._changed.notify_all()
            return result
