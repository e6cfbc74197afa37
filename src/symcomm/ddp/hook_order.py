"""HookOrder: hooks of buckets are called one after another, and backward never waits for them.

A hook may start more collectives in callbacks of its works. On the CPU these run in other threads, and all ranks must
make theirs and the next bucket's in one order. So a bucket's hook is called once the hook before it has no callback
left that could start a collective. Until then it waits in a queue, and autograd goes on: the reducer looks at the queue
whenever a gradient comes, and empties it at the end of backward. All hooks run in autograd's thread, as in PyTorch.

A collective that the model itself makes in backward keeps its place too: the hooks that were due before it go first,
with all that follows in their callbacks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from symcomm.group.chains import Chain, current_chain


class HookOrder:
    """The hooks of one reducer. Its methods are called under the reducer's lock, except ``_let_hooks_go_first``."""

    def __init__(self, lock: Any):
        self._lock = lock
        self._waiting: deque[Callable[[], Any]] = deque()
        self._chain = Chain()  # of the last hook that was called
        self._thread = 0  # autograd's
        self._guarded: Any = None  # the group's calls, while they let hooks go first

    def call(self, group: Any, hook: Callable[[], Any]) -> None:
        """Call ``hook`` when its turn comes: now, or in one of the calls below. ``group`` is the reducer's."""
        self._thread = threading.get_ident()
        self._waiting.append(lambda: self._run(group, hook))
        self.advance()
        if self._guarded is None and not self._chain.is_quiet():
            self._guarded = getattr(getattr(group, "core", None), "interception", None)
            if self._guarded is not None:
                self._guarded.add(self._let_hooks_go_first)

    def advance(self) -> None:
        """Call the hooks whose turn has come."""
        while self._waiting and self._chain.is_quiet():
            self._call_next()

    def finish(self) -> None:
        """Call all waiting hooks, each in its turn."""
        while self._waiting:
            self._chain.wait_until_quiet()
            self._call_next()

    def end(self) -> None:
        """The backward pass is over: from now on, collectives of this thread are no longer the model's."""
        try:
            self.finish()
        finally:
            if self._guarded is not None:
                self._guarded.remove(self._let_hooks_go_first)
                self._guarded = None

    def call_in_turn(self, group: Any, hook: Callable[[], Any]) -> Any:
        """Wait for the turn of ``hook`` and call it; its result."""
        self.finish()
        self._chain.wait_until_quiet()
        return self._run(group, hook)

    def _call_next(self) -> None:
        call = self._waiting.popleft()
        try:
            call()
        except BaseException:
            self._waiting.clear()  # the backward pass ends here
            raise

    def _run(self, group: Any, hook: Callable[[], Any]) -> Any:
        self._chain = chain = Chain()
        with chain.entered():
            future = hook()
            if future is not None and not _are_ours(group):
                chain.hold()
                future.add_done_callback(lambda _: chain.release())
        return future

    def _let_hooks_go_first(self, call: Any, make: Callable[[], Any]) -> Any:
        if threading.get_ident() == self._thread and current_chain() is not self._chain:
            with self._lock:
                self.finish()
                self._chain.wait_until_quiet()
        return make()


def _are_ours(group: Any) -> bool:
    """Whether this group and all of torch's are ours. We do not see callbacks of others' works: with those, a hook
    counts as over once its future is done."""
    return all(getattr(known, "is_symcomm", False) for known in (group, *dist.distributed_c10d._world.pg_map))
