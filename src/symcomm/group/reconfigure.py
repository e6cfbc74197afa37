"""Groups whose members come and go: each ``reconfigure`` names who is in the group from then on.

Every process that may be a member has a handle (membership/handles.py). Programs exchange the handles by any means.
Then all members of the new group call ``reconfigure`` with the same uuid and the same handles. They build the new
group, and one verdict says for all whether they go on in it (membership/replicated_round.py). Until then each member
keeps the old group."""

from __future__ import annotations

import inspect
import os
import threading
from collections.abc import Collection
from datetime import timedelta
from typing import Any

from symcomm import errors
from symcomm.group import hooks, registry
from symcomm.group.factory import make_group
from symcomm.group.process_group import DEFAULT_TIMEOUT, ProcessGroup
from symcomm.group.work import Timeout, to_ns
from symcomm.membership.admission import GO, Round
from symcomm.membership.handles import Handle, HandleServer, handle_server, members_of
from symcomm.membership.replicated_round import Reconfiguration

MOST = 1 << 63
EMPTY = "has not been initialized: it has no members yet. Call reconfigure() before issuing collectives"  # Gloo's words
DESTROYED = "was destroyed"


class ReconfigurableGroup:
    """What ``symcomm.init(enable_reconfigure=True)`` gives: a group without members until the first ``reconfigure``.

    It then has all methods of a ProcessGroup, those of ``current``, which every ``reconfigure`` replaces.

    Raises: BadArgumentError, RankFailedError, DeadlineError, GroupUnusableError."""

    def __init__(self, name: str = "world", timeout: Timeout = None, engine: str | None = None):
        self._label = name
        self._seconds = DEFAULT_TIMEOUT if timeout is None else to_ns("init", timeout) / 1e9
        self._engine = engine
        self._handle_server: HandleServer | None = None
        self.handle: Handle | None = None
        self._group: ProcessGroup | None = None
        self._used: set[int] = set()
        self._borrowed: set[str] = set()  # methods of the current group that this object's dictionary holds
        self._busy = threading.Lock()
        self._why = EMPTY  # why there is no group
        self._pid = os.getpid()

    @classmethod
    def of(cls, group: ProcessGroup) -> ReconfigurableGroup:
        """Let the members of an existing group change."""
        found = cls(group.name, group.timeout)
        found._group = group
        return found

    @property
    def current(self) -> ProcessGroup:
        """The group that the last ``reconfigure`` made."""
        if self._group is None:
            raise errors.GroupUnusableError(f"group {self._label!r} {self._why}.")
        return self._group

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = getattr(self.current, name)
        if inspect.ismethod(value):  # next time it is found without asking here
            self.__dict__[name] = value
            self._borrowed.add(name)
        return value

    def _replace(self, group: ProcessGroup | None) -> ProcessGroup | None:
        """Make ``group`` the current one; returns the one before."""
        old, self._group = self._group, group
        while self._borrowed:
            del self.__dict__[self._borrowed.pop()]
        return old

    def __repr__(self) -> str:
        group = "no members" if self._group is None else f"rank {self._group.rank} of {self._group.size}"
        return f"<ReconfigurableGroup {self._label!r}: {group}>"

    def get_reconfigure_handle(self) -> str:
        """Names this process to the others; the same as long as this object lives. Treat it as a secret."""
        return str(self._own_handle())

    def _own_handle(self) -> Handle:
        if os.getpid() != self._pid:
            raise errors.GroupUnusableError(f"group {self._label!r} cannot be used: {errors.forked(None)}")
        if self._why == DESTROYED:
            raise errors.GroupUnusableError(f"group {self._label!r} {DESTROYED}.")
        if self.handle is None:
            self._handle_server = handle_server()
            self.handle = self._handle_server.new_handle()
        return self.handle

    def reconfigure(self, uuid: int, handles: Collection[str], timeout: Timeout = None) -> ProcessGroup:
        """The processes with these handles form the group from now on. Each of them calls this with the same arguments.

        ``uuid``: a number that was never used before. ``handles``: a list gives ranks by position; a set lets them be
        chosen. Either all members go on in the new group, which is returned, or none does and all are told why:
        RankFailedError or DeadlineError name who was gone or did not come, and the group is what it was. The old group
        is left once the new one exists: what is pending on it fails."""
        seconds = self._seconds if timeout is None else to_ns("reconfigure", timeout) / 1e9
        if isinstance(uuid, bool) or not isinstance(uuid, int) or not -MOST <= uuid < MOST:
            raise errors.bad_argument("reconfigure", "uuid", uuid, "a whole number of 64 bits")
        own = self._own_handle()
        members = members_of(handles, own)
        assert self._handle_server is not None
        if not self._busy.acquire(blocking=False):
            raise errors.CallerError(f"reconfigure: group {self._label!r} is being reconfigured already, by a thread.")
        round_ = Reconfiguration(members, members.index(own), uuid, seconds, self._handle_server, self._used)
        try:
            return self._go_on_in(self._form(round_, uuid), uuid)
        finally:
            round_.close()
            self._busy.release()

    def _form(self, round_: Reconfiguration, uuid: int) -> ProcessGroup:
        """The new group, or the exception that says why there is none, the same on every member."""
        if uuid in self._used:
            refusal = errors.bad_argument("reconfigure", "uuid", uuid, "a fresh one each time", "it was already used")
            told = f"uuid {uuid} was already used by rank {round_.index}; pass a fresh one each time"
            round_.refuse(errors.BadArgumentError(told))  # the others may not know that, and would wait for this rank
            raise refusal
        self._used.add(uuid)
        try:
            group = round_.build(self._make)
        except errors.SymcommError as unknown:  # this rank does not know what the others do
            if (old := self._replace(None)) is not None:
                old.leave("was left: this rank could not learn which group its members are in")
            self._why = f"has no members: {str(unknown).rstrip('.')}"
            raise
        if round_.why != GO:
            error = round_.to_error(round_.why)
            told = str(error)
            state = "the group is what it was" if self._group is not None else "the group has no members yet"
            error.args = (f"reconfigure of group {self._label!r} to uuid {uuid} failed: {told}; {state}.",)
            if self._group is None:
                self._why = f"has no members: its reconfigure failed ({told}). Call it again, with a fresh uuid"
            raise error
        return group

    def _make(self, round_: Round) -> ProcessGroup:
        assert isinstance(round_, Reconfiguration)
        round_.connect()
        name = f"{self._label}@{round_.uuid}"
        group = make_group(round_.index, round_.size, round_, name, round_.left(), engine=self._engine)
        group.set_timeout(self._seconds)  # the short deadline was for building it
        return group

    def _go_on_in(self, group: ProcessGroup, uuid: int) -> ProcessGroup:
        old = self._replace(group)
        registry.add(group, self._label)
        if old is not None:
            old.call_hooks.move_to(group.call_hooks)
            old.leave(f"was left when its members were reconfigured (uuid {uuid})")
        else:
            hooks.joined(group)
        return group

    @property
    def timeout(self) -> float:
        """Seconds after which an operation, or a ``reconfigure``, gives up unless the call says otherwise."""
        return self._seconds

    def set_timeout(self, timeout: float | timedelta) -> None:
        self._seconds = to_ns("set_timeout", timeout) / 1e9
        if self._group is not None:
            self._group.set_timeout(timeout)

    def destroy(self) -> None:
        """Leave the group for good. Its handle cannot be used from now on."""
        old = self._replace(None)
        if old is not None:
            old.destroy()
        self._handle_server, self._why = None, DESTROYED
