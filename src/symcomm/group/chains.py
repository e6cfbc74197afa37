"""Chains: a call together with everything that happens in callbacks of the works it started.

When a thread inside a chain adds a callback to a work, the callback belongs to the chain, wherever it runs. So the code
that opened the chain can tell whether any part of it may still start operations.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_thread = threading.local()


def current_chain() -> Chain | None:
    """The chain that this thread runs in."""
    return getattr(_thread, "chain", None)


class Chain:
    """``is_quiet()`` once no thread runs inside it and none of its callbacks is still to come."""

    def __init__(self) -> None:
        self._change = threading.Condition(threading.Lock())
        self._going = 0

    def hold(self) -> None:
        with self._change:
            self._going += 1

    def release(self) -> None:
        with self._change:
            self._going -= 1
            if not self._going:
                self._change.notify_all()

    def is_quiet(self) -> bool:
        return not self._going

    def wait_until_quiet(self) -> None:
        """Works end at their deadline at the latest, so this ends if the callbacks do."""
        with self._change:
            self._change.wait_for(self.is_quiet)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Run the block inside the chain."""
        before = current_chain()
        self.hold()
        _thread.chain = self
        try:
            yield
        finally:
            _thread.chain = before
            self.release()


class Continuation:
    """A callback of a chain. It is called once, or cancelled."""

    def __init__(self, chain: Chain, callback: Callable[[], None]):
        self._chain = chain
        self._callback = callback
        chain.hold()

    def __call__(self) -> None:
        try:
            with self._chain.entered():
                self._callback()
        finally:
            self._chain.release()

    def cancel(self) -> None:
        self._chain.release()


def continued(callback: Callable[[], None]) -> Callable[[], None]:
    """``callback``, as part of this thread's chain if there is one."""
    chain = current_chain()
    return callback if chain is None else Continuation(chain, callback)
