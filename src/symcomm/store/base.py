"""Store: the calls of every key-value store, some of them made of simpler ones.

A subclass defines the primitives it can (``set``, ``get``, ``check``, ``add``, ``compare_set``, ``delete_key``,
``list_keys``, ``queue_*``). ``wait``, ``append``, ``multi_get``, ``multi_set``, ``num_keys``, ``barrier`` and ``clone``
then work by themselves; a subclass overrides them if it can do better.

Keys are text. You pass values as str or bytes and get bytes back. A call that waits raises StoreDeadlineError after
``timeout`` seconds (300 unless set); the error names the missing keys.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

from symcomm.arguments import as_flag, as_int, as_list, as_text
from symcomm.errors import (
    CallerError,
    DeadlineError,
    OutOfRangeError,
    QueueEmptyError,
    StoreDeadlineError,
    bad_argument,
    format_seconds,
    wrong_type,
)

__all__ = ["DEFAULT_TIMEOUT", "NotOfferedError", "QueueEmptyError", "Store", "Timeout", "Value"]

Value = str | bytes | bytearray | memoryview
Timeout = timedelta | float

DEFAULT_TIMEOUT = timedelta(seconds=300)

_LONGEST = 1e9  # seconds; thirty years, and below what the system's clocks can take
_NUMBER = re.compile(rb"\s*([+-]?)0*(\d+)")  # what follows is ignored, as PyTorch's stores do
_INT64 = range(-(2**63), 2**63)
_POLL_FIRST, _POLL_LAST = 0.001, 0.020  # seconds between two polls of a store that cannot wake us


class NotOfferedError(CallerError, NotImplementedError):
    """This class of store does not have the call."""


class Store:
    """A key-value store that several processes or threads share. See the module's text for how to subclass it.

    Raises: WrongTypeError, StoreDeadlineError; NotImplementedError for a call that a subclass lacks."""

    _timeout = DEFAULT_TIMEOUT

    # --- primitives: a subclass defines those it offers -----------------------------------------

    def set(self, key: str, value: Value) -> None:
        """Store ``value`` under ``key``; replaces an earlier value."""
        raise self._lacks("set")

    def get(self, key: str) -> bytes:
        """The value of ``key``; waits until it is set."""
        raise self._lacks("get")

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all ``keys`` exist now. Never waits."""
        raise self._lacks("check")

    def add(self, key: str, amount: int) -> int:
        """Add to the decimal number under ``key`` (0 if absent), in one atomic step; returns the sum."""
        raise self._lacks("add")

    def compare_set(self, key: str, expected: Value, desired: Value) -> bytes:
        """Set ``key`` to ``desired`` if its value is ``expected``, in one atomic step; returns the value afterwards.

        An absent key counts as holding ``expected`` if that is empty. If ``expected`` is not empty, nothing is set
        and ``expected`` itself comes back.
        """
        raise self._lacks("compare_set")

    def delete_key(self, key: str) -> bool:
        """Forget ``key``; returns whether it existed."""
        if type(self).deleteKey is not Store.deleteKey:
            return self.deleteKey(key)
        raise self._lacks("delete_key")

    def list_keys(self) -> list[str]:
        """All keys, in no particular order."""
        raise self._lacks("list_keys")

    def queue_push(self, key: str, value: Value) -> None:
        """Put ``value`` at the end of the queue ``key``. Queues and plain keys do not see each other."""
        raise self._lacks("queue_push")

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Take the oldest value of the queue; if it is empty, wait for one, or raise QueueEmptyError."""
        raise self._lacks("queue_pop")

    def queue_len(self, key: str) -> int:
        """How many values the queue holds (0 before the first push)."""
        raise self._lacks("queue_len")

    # --- what follows from the primitives --------------------------------------------------------

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Return once all ``keys`` exist. This class polls, every 1 to 20 ms."""
        keys = to_keys(f"{type(self).__name__}.wait", keys)
        seconds = self._seconds(timeout)
        for _ in poll_until(seconds):
            if self.check(keys):
                return
        missing = [key for key in keys if not self.check([key])]
        if missing:
            raise keys_missing(self, "wait", missing, seconds)

    def append(self, key: str, value: Value) -> None:
        """Append ``value`` to what is there, atomically; an absent key counts as empty."""
        tail = to_bytes(f"{type(self).__name__}.append", value)
        with self._exclusively(key, self._seconds(None)):
            try:
                before = self.get(key) if self.check([key]) else b""
            except NotOfferedError:
                before = b""  # PyTorch's stores can be without check(), and get() may wait: compare_set() tells, too
            while (now := self.compare_set(key, before, before + tail)) != before + tail:
                before = now

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """``get`` for each key."""
        return [self.get(key) for key in to_keys(f"{type(self).__name__}.multi_get", keys)]

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """``set`` for each pair."""
        for key, value in to_pairs(f"{type(self).__name__}.multi_set", keys, values):
            self.set(key, value)

    def num_keys(self) -> int:
        """How many keys there are."""
        if type(self).getNumKeys is not Store.getNumKeys:
            return self.getNumKeys()
        return len(self.list_keys())

    def barrier(self, key: str, world_size: int, timeout: Timeout | None = None) -> None:
        """Return once ``world_size`` callers have come. The same key works for one barrier after another.

        A caller that gives up takes itself off the count, so that it does not count towards a later try.
        """
        call = f"{type(self).__name__}.barrier"
        key, world_size = to_key(call, key), to_world_size(call, world_size)
        seconds = self._seconds(timeout)
        counter = f"{key}/num_members"
        turn, place = divmod(self.add(counter, 1) - 1, world_size)
        if place == world_size - 1:
            if turn > 0:
                self._forget(_marker(key, turn - 1))  # callers of this turn have left the previous one
            self.set(_marker(key, turn), "1")  # the last thing we do: the others may leave now, with the store
            return
        try:
            self.wait([_marker(key, turn)], timedelta(seconds=seconds))
        except DeadlineError:
            came = self._withdraw(counter, (turn + 1) * world_size)
            if came is not None:
                here = came - turn * world_size
                raise barrier_late(f"{call}({key!r})", key, seconds, f"{here} of {world_size} came") from None

    def clone(self) -> Store:
        """A store with the same content, for use by another thread at the same time; here the store itself."""
        return self

    def has_extended_api(self) -> bool:
        """Whether append, multi_get, multi_set and queues are the store's own, not made of simpler calls."""
        return False

    # PyTorch's C++ calls Python classes by these names: a subclass may define either one.

    def deleteKey(self, key: str) -> bool:
        """``delete_key``."""
        return self.delete_key(key)

    def getNumKeys(self) -> int:
        """``num_keys``."""
        return self.num_keys()

    @property
    def timeout(self) -> timedelta:
        """How long ``get``, ``wait``, ``queue_pop`` and ``barrier`` wait unless told otherwise."""
        return self._timeout

    def set_timeout(self, timeout: Timeout) -> None:
        """Change ``timeout``: a timedelta or seconds."""
        self._timeout = timedelta(seconds=to_seconds(timeout, f"{type(self).__name__}.set_timeout"))

    # --- for subclasses --------------------------------------------------------------------------

    def _seconds(self, timeout: Timeout | None) -> float:
        return to_seconds(self.timeout if timeout is None else timeout)

    def _lacks(self, call: str) -> NotOfferedError:
        name = type(self).__name__
        return NotOfferedError(
            f"{name}.{call}: Not implemented. This store class does not define {call}(); define it in {name} to use it."
        )

    def _forget(self, key: str) -> bool:
        """Delete ``key`` if this store can delete; returns whether it can."""
        try:
            self.delete_key(key)
        except CallerError:
            return False
        return True

    @contextlib.contextmanager
    def _exclusively(self, key: str, seconds: float) -> Iterator[None]:
        """Lock ``key`` against other callers of this.

        compare_set cannot tell its caller from another that wrote the same value, so a change that depends on the
        previous value needs this lock: our token is unique.
        """
        lock, token = f"{key}/lock", os.urandom(16).hex().encode()
        for _ in poll_until(seconds):
            if self.compare_set(lock, b"", token) == token:
                break
        else:
            raise StoreDeadlineError(f"{type(self).__name__}: {lock!r} was taken for {format_seconds(seconds)}.")
        try:
            yield
        finally:
            if not self._forget(lock):
                self.compare_set(lock, token, b"")

    def _withdraw(self, counter: str, full: int) -> int | None:
        """Take one off a barrier's count; returns the count before, or None if the barrier was full already."""
        try:
            with self._exclusively(counter, 5.0):
                while int(now := self.get(counter)) < full:
                    less = b"%d" % (int(now) - 1)
                    if self.compare_set(counter, now, less) == less:
                        return int(now)
                return None
        except (CallerError, DeadlineError):
            return int(self.get(counter))  # we cannot undo it: the count keeps us, as in PyTorch


# --- helpers for every store -----------------------------------------------------------------------


def to_bytes(call: str, value: object) -> bytes:
    """A value as bytes: text becomes UTF-8."""
    if isinstance(value, str):
        try:
            return value.encode()
        except UnicodeEncodeError:
            raise wrong_type(call, "value", value, "text that UTF-8 can hold", "pass bytes") from None
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise wrong_type(call, "value", value, "str or bytes", "use str(value), or pickle.dumps(value) for objects")


def to_key(call: str, key: object) -> str:
    """A key as text."""
    if isinstance(key, str) and key.isascii():
        return key
    found = as_text(key)
    if found is None:
        refuse = bad_argument if isinstance(key, bytes | bytearray) else wrong_type
        raise refuse(call, "key", key, "text that UTF-8 can hold" if isinstance(key, str) else "a str")
    return found


def to_keys(call: str, keys: object) -> list[str]:
    """A list of keys. Refuses a lone str, which would pass for a list of letters."""
    return [to_key(call, key) for key in _to_list(call, "keys", keys, "put brackets around a single key")]


def _to_list(call: str, argument: str, items: object, fix: str = "") -> list[Any]:
    found = as_list(items)
    if found is None:
        raise wrong_type(call, argument, items, "a list of str", fix)
    return found


def to_pairs(call: str, keys: object, values: object) -> list[tuple[str, bytes]]:
    """Keys with their values; there must be equally many."""
    names, given = to_keys(call, keys), _to_list(call, "values", values)
    if len(names) != len(given):
        raise bad_argument(call, "values", f"{len(given)} values", f"as many as the {len(names)} keys")
    return [(name, to_bytes(call, value)) for name, value in zip(names, given, strict=True)]


def to_int(call: str, argument: str, number: object, within: range = _INT64, allowed: str = "") -> int:
    found = number if type(number) is int else as_int(number)
    if found is None or found not in within:
        raise wrong_type(call, argument, number, allowed or "an int that fits in 64 bits")
    return found


def to_world_size(call: str, world_size: object) -> int:
    number = to_int(call, "world_size", world_size)
    if number < 1:
        raise bad_argument(call, "world_size", number, "a positive int")
    return number


def to_flag(call: str, argument: str, flag: object) -> bool:
    found = as_flag(flag)
    if found is None:
        raise wrong_type(call, argument, flag, "a bool")
    return found


def add_to(call: str, key: str, stored: bytes, amount: int) -> int:
    """``stored + amount``; ``stored`` begins with a decimal number, or is empty for 0."""
    found = _NUMBER.match(stored)
    if stored and not found:
        raise bad_argument(call, f"the value of {key!r}", stored, "a decimal number", "use another key for counting")
    sign, digits = found.groups() if found else (b"", b"0")
    before = int(sign + digits) if len(digits) < 20 else 2**64  # Python refuses to read thousands of digits
    if before not in _INT64:
        raise OutOfRangeError(
            f"{call}: the value of {key!r} does not fit in 64 bits, got {stored[:40]!r}; use another key for counting."
        )
    if before + amount not in _INT64:
        raise OutOfRangeError(f"{call}: {before} + {amount} does not fit in 64 bits; {key!r} stays {before}.")
    return before + amount


def to_seconds(timeout: object, call: str = "Store") -> float:
    """A timedelta or a number of seconds, as seconds."""
    if isinstance(timeout, timedelta):
        return to_seconds(timeout.total_seconds(), call)
    is_number = isinstance(timeout, int | float) and not isinstance(timeout, bool)
    if is_number and 0 <= timeout <= _LONGEST:  # type: ignore[operator]
        return float(timeout)  # type: ignore[arg-type]
    refuse = bad_argument if is_number else wrong_type
    raise refuse(call, "timeout", timeout, "a timedelta or a number of seconds, from 0 to 1e9")


def poll_until(seconds: float) -> Iterator[None]:
    """Yields at once, then every 1 to 20 ms, less and less often, and once more after the deadline."""
    end = time.monotonic() + seconds
    pause = _POLL_FIRST
    yield
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(pause, left))
        pause = min(pause * 1.5, _POLL_LAST)
        yield


def keys_missing(store: Store, call: str, keys: Sequence[str], seconds: float) -> DeadlineError:
    """The error of a wait for keys that were never set."""
    names = ", ".join(repr(key) for key in keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "")
    what = "key" if len(keys) == 1 else "keys"
    return wait_late(f"{type(store).__name__}.{call}", keys, seconds, f"nobody set {what} {names}")


# Programs search errors for PyTorch's words, so these follow ours in parentheses.


def wait_late(call: str, keys: Sequence[str], seconds: float, why: str) -> StoreDeadlineError:
    theirs = f"wait timeout after {seconds * 1e3:.0f}ms, keys: {', '.join('/' + key for key in keys[:8])}"
    return StoreDeadlineError(f"{call} timed out after {format_seconds(seconds)}: {why} ({theirs}).")


def barrier_late(call: str, key: str, seconds: float, why: str) -> StoreDeadlineError:
    theirs = f"barrier timeout after {seconds * 1e3:.0f}ms, key: {key}"
    return StoreDeadlineError(f"{call} timed out after {format_seconds(seconds)}: {why} ({theirs}).")


def _marker(key: str, turn: int) -> str:
    return f"{key}/last_member" if turn == 0 else f"{key}/last_member/{turn}"
