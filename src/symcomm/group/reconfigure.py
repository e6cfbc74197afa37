"""Groups whose members come and go: each ``reconfigure`` names who is in the group from then on.

Every process that may be a member has a handle, which names a small store that it serves (handles.py). Callers bring
the handles together by whatever they have. Then all members of the new group call ``reconfigure`` with the same uuid
and the same handles. They connect to the store of the first, exchange there what is needed to build the new group, and
say when they have; one agreement decides for all whether they go on in it. Until then everybody keeps the old group.

Members notice a death at once: the first one holds a connection to each of the others, and they hold one to it.

The agreement has to survive the death of any member, the first included. So it is kept by several: every member takes
what it holds to be true ("go", or why not) to the stores of the first three, in this order. The first value that
reaches a store stays, and each who comes takes it along to the next. Where one of these three lives, all members pass
it, and leave it with the same answer. A keeper that is cut off from some members, and not from others, must not part
them: who gets no answer from one says no to the rest. If they say "go" all the same, or nothing at all, it cannot know
what holds, and leaves the old group as well as the new one.

In a member's store::

    at/<ident>                    the uuid that a process last came with
    <uuid>-<hash>/1/i, 2/i ...    in one reconfiguration: what number i told the others, first, second ...
    <uuid>-<hash>/verdict         "go", or why not
    <uuid>-<hash>/left            how many need the keys no more; the last one deletes them
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import select
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any

from symcomm import errors
from symcomm.errors import words_for_seconds
from symcomm.group import hooks, registry
from symcomm.group.grow import GO, Round
from symcomm.group.handles import Endpoint, Handle, endpoint, members_of
from symcomm.group.making import make_group
from symcomm.group.process_group import DEFAULT_TIMEOUT, ProcessGroup
from symcomm.group.work import Timeout, to_ns
from symcomm.store import tcp_wire as wire
from symcomm.store.prefix import PrefixStore
from symcomm.store.tcp import TCPStore

__all__ = ["ReconfigurableGroup", "Reconfiguration"]

KEEPERS = 3  # stores that keep the verdict: two of them may die in the moment it is made
WATCH_SECONDS = 1.0  # to connect to a member that is to be watched
KEEPER_SECONDS = 5.0  # for one of them to answer; a process that is gone is found out at once
LOST = (errors.StoreConnectionError, errors.StoreAuthError)  # the second: somebody else has that port now
SILENT = (errors.StoreUnreachableError, errors.StoreDeadlineError)  # stopped, or far away
MOST = 1 << 63
EMPTY = "has not been initialized: it has no members yet. Call reconfigure() before issuing collectives"  # Gloo's words
DESTROYED = "was destroyed"


class Reconfiguration(Round):
    """One attempt of ``members`` to form a group, as number ``index`` of them. ``known``: uuids of earlier ones."""

    def __init__(
        self, members: Sequence[Handle], index: int, uuid: int, seconds: float, own: Endpoint, known: Collection[int]
    ):
        super().__init__(None, index, len(members), seconds, self._find_dead)
        self._members, self._own, self.uuid, self._known = members, own, uuid, known
        everybody = "\n".join(map(str, members)).encode()
        self._prefix = f"{uuid}-{hashlib.sha256(everybody).hexdigest()[:16]}"
        self._servers: dict[int, TCPStore] = {}
        self._watched: dict[int, tuple[int, wire.Connection]] = {}  # descriptor -> who, and the connection
        self._poll = select.poll()
        servers = {member[:2]: place for place, member in reversed(list(enumerate(members)))}
        self._keepers = sorted(servers.values())[:KEEPERS]  # without those that did not answer
        self._silent: list[int] = []  # those that may live, but did not answer
        self._is_known = True  # what was decided

    # --- connections ------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Reach the first member's store; the first member watches the others from now on."""
        with self._blaming(0):
            server = self._server(0, self.left())
            server.set(f"at/{self._members[self.index].ident}", str(self.uuid))
            self._store = PrefixStore(self._prefix, server)
        if self.index == 0:
            self._watch()

    def _is_here(self, place: int) -> bool:
        """Whether a member is in this process; where threads are ranks, others than this one are."""
        return self._members[place][:2] == self._members[self.index][:2]

    def _server(self, place: int, seconds: float) -> TCPStore:
        """The store that a member serves."""
        if self._is_here(place):
            return self._own.store
        lifetime = timedelta(seconds=seconds)
        if place not in self._servers:
            to = self._members[place]
            self._servers[place] = TCPStore(to.address, to.port, timeout=lifetime, token=to.token, patient=False)
        self._servers[place].set_timeout(lifetime)
        return self._servers[place]

    def _watch(self) -> None:
        end = time.monotonic() + self.left() / 2
        for place, to in enumerate(self._members):
            seconds = min(end - time.monotonic(), WATCH_SECONDS)
            if self._is_here(place) or seconds <= 0:
                continue
            try:
                connection = wire.connect(to.address, to.port, seconds, to.token.encode(), patient=False)
            except SILENT:
                continue  # it is stopped, or far away: only the deadline will tell
            except LOST as error:
                raise self._gone(place) from error
            self._watched[connection.fd] = place, connection
            self._poll.register(connection.fd, select.POLLIN | select.POLLRDHUP)  # nothing but its end is to come

    def _find_dead(self) -> str:
        for fd, _ in self._poll.poll(0):
            return self.to_verdict(self._gone(self._watched[fd][0]))
        return ""

    def refuse(self, error: errors.SymcommError) -> None:
        """Do not take part, and let the others know why."""
        self.decide(self.to_verdict(error))
        self._keepers = []

    def close(self) -> None:
        """This member needs nothing of the others any more; the last one that says so deletes what was written."""
        for place in self._keepers:
            with contextlib.suppress(*LOST, errors.DeadlineError):
                part = PrefixStore(self._prefix, self._server(place, KEEPER_SECONDS))
                if part.add("left", 1) == self.size:
                    for key in part.list_keys():
                        part.delete_key(key)
        for server in self._servers.values():
            server.close()
        for _, connection in self._watched.values():
            connection.close()

    # --- the round --------------------------------------------------------------------------------------------

    def exchange(self, item: bytes) -> list[bytes]:
        with self._blaming(0):
            return super().exchange(item)

    def check(self) -> None:
        with self._blaming(0):
            super().check()

    def decide(self, verdict: str) -> str:
        """See the module's text: what the keepers say. Where one of them does not answer, others may have had "go" from
        it or not: from there on this member says no, and it knows the outcome only if the last one agrees."""
        said = ""
        for place in list(self._keepers):
            try:
                part = PrefixStore(self._prefix, self._server(place, KEEPER_SECONDS))
                said = verdict = bytes(part.compare_set("verdict", "", verdict)).decode()
            except (*SILENT, errors.DeadlineError):
                self._keepers.remove(place)
                self._silent.append(place)
                if verdict == GO:
                    verdict = self.to_verdict(errors.RankFailedError(f"{self._who(place)} does not answer", [place]))
            except LOST:
                self._keepers.remove(place)
        self._is_known = not self._silent or said not in ("", GO)
        return verdict

    def settle(self, verdict: str) -> str:
        verdict = self.decide(verdict)
        if not self._is_known:
            raise errors.RankFailedError(
                f"reconfigure to uuid {self.uuid}: {', '.join(map(self._who, self._silent))} did not answer, so rank "
                f"{self.index} cannot know whether the others went on; it is in no group any more.",
                [self.index],
            )
        return verdict

    # --- words ------------------------------------------------------------------------------------------------

    def _who(self, place: int, more: str = "") -> str:
        return f"rank {place} (pid {self._members[place].pid} on {self._members[place].address}{more})"

    def _gone(self, place: int) -> errors.RankFailedError:
        return errors.RankFailedError(f"{self._who(place)} is gone", [place])

    @contextlib.contextmanager
    def _blaming(self, place: int) -> Iterator[None]:
        """What goes wrong with a member's store is that member's."""
        try:
            yield
        except SILENT as error:
            if self.left() > 0.1:  # the network gave up before we did
                raise errors.RankFailedError(f"{self._who(place)} cannot be reached", [place]) from error
            raise self.late([place]) from error
        except LOST as error:
            raise self._gone(place) from error

    def late(self, missing: Sequence[int]) -> errors.DeadlineError:
        who = ", ".join(self._who(place, self._elsewhere(place)) for place in missing)
        return errors.DeadlineError(f"{who} did not come within {words_for_seconds(self.seconds)}", missing)

    def _elsewhere(self, place: int) -> str:
        """What a member that did not come to this reconfiguration came with instead."""
        if self._turn > 1:
            return ""  # it came, and then stopped
        with contextlib.suppress(*LOST, errors.DeadlineError):
            server, key = self._server(0, KEEPER_SECONDS), f"at/{self._members[place].ident}"
            if server.check([key]):
                uuid = int(server.get(key))
                if uuid == self.uuid:
                    return "; it came with other handles"
                if uuid not in self._known:
                    return f"; it came with uuid {uuid}"
        return ""

    def to_verdict(self, error: BaseException) -> str:
        ranks = getattr(error, "missing", None) or getattr(error, "ranks", [])
        return json.dumps({"kind": type(error).__name__, "why": str(error).rstrip("."), "ranks": ranks})

    def to_error(self, verdict: str) -> errors.SymcommError:
        told = json.loads(verdict)
        kind = getattr(errors, told["kind"], None) if told["kind"] in errors.__all__ else None
        if kind in (errors.RankFailedError, errors.DeadlineError):
            return kind(told["why"], told["ranks"])
        return (kind or errors.RankFailedError)(told["why"])


class ReconfigurableGroup:
    """What ``symcomm.init(enable_reconfigure=True)`` gives: a group without members until the first ``reconfigure``.

    It then has all methods of a ProcessGroup, those of ``current``, which every ``reconfigure`` replaces.

    Raises: BadArgumentError, RankFailedError, DeadlineError, GroupUnusableError."""

    def __init__(self, name: str = "world", timeout: Timeout = None, engine: str | None = None):
        self._label = name
        self._seconds = DEFAULT_TIMEOUT if timeout is None else to_ns("init", timeout) / 1e9
        self._engine = engine
        self._endpoint: Endpoint | None = None
        self._handle: Handle | None = None
        self._group: ProcessGroup | None = None
        self._used: set[int] = set()
        self._borrowed: set[str] = set()  # methods of the current group that this object has
        self._busy = threading.Lock()
        self._why = EMPTY  # there is no group
        self._pid = os.getpid()

    @classmethod
    def of(cls, group: ProcessGroup) -> ReconfigurableGroup:
        """Let the members of a group change that was made with them."""
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
        """The group before."""
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
        if self._handle is None:
            self._endpoint = endpoint()
            self._handle = self._endpoint.new_handle()
        return self._handle

    def reconfigure(self, uuid: int, handles: Collection[str], timeout: Timeout = None) -> ProcessGroup:
        """The processes with these handles form the group from now on; each of them calls this, alike.

        ``uuid``: a number that was never used before. ``handles``: a list gives ranks by position; a set lets them be
        chosen. Either all members go on in the new group, which is returned, or none does and all are told why:
        RankFailedError or DeadlineError name who was gone or did not come, and the group is what it was. The old group
        is left once the new one exists: what is pending on it fails."""
        seconds = self._seconds if timeout is None else to_ns("reconfigure", timeout) / 1e9
        if isinstance(uuid, bool) or not isinstance(uuid, int) or not -MOST <= uuid < MOST:
            raise errors.bad_argument("reconfigure", "uuid", uuid, "a whole number of 64 bits")
        own = self._own_handle()
        members = members_of(handles, own)
        assert self._endpoint is not None
        if not self._busy.acquire(blocking=False):
            raise errors.CallerError(f"reconfigure: group {self._label!r} is being reconfigured already, by a thread.")
        round_ = Reconfiguration(members, members.index(own), uuid, seconds, self._endpoint, self._used)
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
            round_.refuse(errors.BadArgumentError(told))  # the others may not know it, and would wait for us
            raise refusal
        self._used.add(uuid)
        try:
            group = round_.build(self._make)
        except errors.SymcommError as unknown:  # what the others do
            if (old := self._replace(None)) is not None:
                old.leave("was left: what its members were reconfigured to is not known here")
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
            group.take_over_hooks(old)
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
        """Leave the group for good. Handles of this process lead nowhere from now on."""
        old = self._replace(None)
        if old is not None:
            old.destroy()
        self._endpoint, self._why = None, DESTROYED
