"""What the parts of a group share: who this rank is, how long its calls may take, and whether the group can be used.

A group owns its executor, its messages and its hooks, which know this and not the group. A group that the program drops
leaves at once; so operations under way hold it, too (``whole``).
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from symcomm import errors
from symcomm._core import native
from symcomm.group.failure import Site, Status, explain
from symcomm.group.refusal import refused
from symcomm.group.watcher import Watcher
from symcomm.memory.arena import Arena, Peer, current_arena


class Owner(Protocol):
    """The group."""

    def on_failure(self, error: errors.SymcommError) -> None:
        """The group cannot be used any more; called once."""
        ...


class GroupState:
    """One rank's state in one group. ``handle`` and ``peers`` are of the ranks of this host."""

    __slots__ = (
        "_lock", "arena", "extended_ns", "failure", "handle", "letting_go", "mailbox", "name", "peers", "rank", "size",
        "timeout_ns", "watcher", "whole",
    )  # fmt: skip
    handle: native.Group
    peers: list[Peer]

    def __init__(self, group: Owner, rank: int, size: int, name: str, timeout_ns: int):
        self.whole = weakref.ref(group)
        self.rank, self.size, self.name = rank, size, name
        self.arena: Arena = current_arena()
        self.timeout_ns = timeout_ns
        self.extended_ns = 0  # the part of it that extensions have added
        self.mailbox: native.Group | None = None  # the core's, while it carries all messages of a group that is usable
        self.failure: errors.SymcommError | None = None  # what ended the group, as this rank was told
        self.letting_go: list[Callable[[], Any]] = []  # after a failure, these return once no tensor is used any more
        self.watcher = Watcher()
        self._lock = threading.RLock()  # a signal handler may take it while its thread holds it

    @property
    def timeout(self) -> float:
        """Seconds after which an operation gives up, unless the call says otherwise."""
        return self.timeout_ns / 1e9

    def change_timeout(self, nanoseconds: int) -> None:
        """Set how long calls may take that do not say otherwise."""
        self.timeout_ns = nanoseconds
        if self.mailbox is not None:  # calls that go from the facade straight to the core
            self.mailbox.set_timeout(nanoseconds)

    def extend_timeout(self, nanoseconds: int) -> None:
        """Add to what operations may take, or take that back."""
        with self._lock:
            self.extended_ns += nanoseconds
            self.change_timeout(self.timeout_ns + nanoseconds)

    # --- failure ----------------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Raise if the group was destroyed, or has failed."""
        if self.failure is not None:
            self.let_go()
            raise self.unusable_error()

    def unusable_error(self) -> errors.GroupUnusableError:
        error = errors.GroupUnusableError(f"group {self.name!r} cannot be used any more: {self.failure}")
        error.__cause__ = self.failure
        return error

    def fail(self, describe: Callable[[], errors.SymcommError]) -> errors.SymcommError:
        """The exception for a failure. The first one has the full description, later ones refer to it; observers and
        abort hooks are told once, whichever way the failure was found."""
        with self._lock:
            first = describe() if self.failure is None else None
            if first is not None:  # a copy, since an error that was raised holds frames, and these the caller's tensors
                self.end(copy.copy(first))
        self.let_go()
        if first is None:
            return self.unusable_error()
        group = self.whole()
        if group is not None:
            group.on_failure(first)
        return first

    def fail_with_status(self, status: int, call: str, site: Site, seconds: float | None) -> errors.SymcommError:
        """The exception for an operation that the core ended with ``status``. ``seconds``: how long it ran; None: the
        core knows."""
        if status & 0xFF == Status.NESTED:
            return errors.nested(call, self.name)
        if status & 0xFF == Status.REFUSED:
            told = self.handle.refusal(status >> 8)
            return refused(f"{call} #{status >> 8} on group {self.name!r}", told and told[1])
        return self.fail(lambda: explain(self, status, call, site, seconds))

    def end(self, why: errors.SymcommError) -> None:
        """The group cannot be used any more, unless that is known already."""
        if self.failure is None:
            self.failure, self.mailbox = why, None

    def let_go(self) -> None:
        """After a failure: return once no tensor of this rank's calls is used any more."""
        for return_when_unused in list(self.letting_go):
            return_when_unused()

    def after_fork(self) -> None:
        """In a forked child, which is not the rank: make the group unusable, whatever locks the parent held."""
        self._lock = threading.RLock()
        self.failure, self.mailbox = errors.forked(self.failure), None
