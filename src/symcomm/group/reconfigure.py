"""Groups whose members come and go: each ``reconfigure`` names who is in the group from then on.

Every process that may be a member has a handle, which names a small store that it serves (handles.py). Callers bring
the handles together by whatever they have. Then all members of the new group call ``reconfigure`` with the same uuid
and the same handles. They connect to the store of the first, exchange there what is needed to build the new group, and
say when they have; one agreement decides for all whether they go on in it. Until then everybody keeps the old group.

Members notice a death at once: the first one holds a connection to each of the others, and they hold one to it.

The agreement has to survive the death of any member, the first included. So it is replicated: every member takes its
verdict ("go", or why not) to the stores of the first three members, in this order. The first value that reaches a store
stays, and every member takes it along to the next. Where one of these three is alive, all members pass it, and leave
it with the same answer. A replica that is cut off from some members only must not divide them: a member that gets no
answer from one says no to the rest. If they say "go" all the same, or do not answer either, it cannot know the verdict,
and leaves the old group as well as the new one.

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
from symcomm.errors import format_seconds
from symcomm.group import hooks, registry
from symcomm.group.factory import make_group
from symcomm.group.grow import GO, Round
from symcomm.group.handles import Handle, HandleServer, handle_server, members_of
from symcomm.group.process_group import DEFAULT_TIMEOUT, ProcessGroup
from symcomm.group.work import Timeout, to_ns
from symcomm.store import tcp_wire as wire
from symcomm.store.prefix import PrefixStore
from symcomm.store.tcp import TCPStore

REPLICAS = 3  # stores that hold the verdict: two of them may die while it is made
WATCH_SECONDS = 1.0  # to connect to a member that is to be watched
REPLICA_SECONDS = 5.0  # for one of them to answer; a process that is gone is found out at once
GONE_ERRORS = (errors.StoreConnectionError, errors.StoreAuthError)  # the second: somebody else has that port now
UNREACHABLE_ERRORS = (errors.StoreUnreachableError, errors.StoreDeadlineError)  # stopped, or far away
MOST = 1 << 63
EMPTY = "has not been initialized: it has no members yet. Call reconfigure() before issuing collectives"  # Gloo's words
DESTROYED = "was destroyed"


class Reconfiguration(Round):
    """One attempt of ``members`` to form a group, as number ``index`` of them. ``known``: uuids of earlier ones."""

    def __init__(
        self,
        members: Sequence[Handle],
        index: int,
        uuid: int,
        seconds: float,
        own: HandleServer,
        known: Collection[int],
    ):
        super().__init__(None, index, len(members), seconds, self._find_dead)
        self._members, self._own, self.uuid, self._known = members, own, uuid, known
        everybody = "\n".join(map(str, members)).encode()
        self._prefix = f"{uuid}-{hashlib.sha256(everybody).hexdigest()[:16]}"
        self._servers: dict[int, TCPStore] = {}
        self._watched: dict[int, tuple[int, wire.Connection]] = {}  # descriptor -> who, and the connection
        self._poll = select.poll()
        servers = {member[:2]: rank for rank, member in reversed(list(enumerate(members)))}
        self._replicas = sorted(servers.values())[:REPLICAS]  # without those that did not answer
        self._unreachable: list[int] = []  # those that may live, but did not answer
        self._is_known = True  # what was decided

    # --- connections ------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Reach the first member's store; the first member watches the others from now on."""
        with self._blame(0):
            server = self._server(0, self.left())
            server.set(f"at/{self._members[self.index].ident}", str(self.uuid))
            self._store = PrefixStore(self._prefix, server)
        if self.index == 0:
            self._watch()

    def _is_here(self, rank: int) -> bool:
        """Whether a member is in this process; where threads are ranks, others than this one are."""
        return self._members[rank][:2] == self._members[self.index][:2]

    def _server(self, rank: int, seconds: float) -> TCPStore:
        """The store that a member serves."""
        if self._is_here(rank):
            return self._own.store
        lifetime = timedelta(seconds=seconds)
        if rank not in self._servers:
            to = self._members[rank]
            self._servers[rank] = TCPStore(to.address, to.port, timeout=lifetime, token=to.token, patient=False)
        self._servers[rank].set_timeout(lifetime)
        return self._servers[rank]

    def _watch(self) -> None:
        end = time.monotonic() + self.left() / 2
        for rank, to in enumerate(self._members):
            seconds = min(end - time.monotonic(), WATCH_SECONDS)
            if self._is_here(rank) or seconds <= 0:
                continue
            try:
                connection = wire.connect(to.address, to.port, seconds, to.token.encode(), patient=False)
            except UNREACHABLE_ERRORS:
                continue  # it is stopped, or far away: only the deadline will tell
            except GONE_ERRORS as error:
                raise self.gone_ranks(rank) from error
            self._watched[connection.fd] = rank, connection
            self._poll.register(connection.fd, select.POLLIN | select.POLLRDHUP)  # nothing but its end is to come

    def _find_dead(self) -> str:
        for fd, _ in self._poll.poll(0):
            return self.to_verdict(self.gone_ranks(self._watched[fd][0]))
        return ""

    def refuse(self, error: errors.SymcommError) -> None:
        """Do not take part, and let the others know why."""
        self.decide(self.to_verdict(error))
        self._replicas = []

    def close(self) -> None:
        """This member needs nothing of the others any more; the last one that says so deletes what was written."""
        for rank in self._replicas:
            with contextlib.suppress(*GONE_ERRORS, errors.DeadlineError):
                part = PrefixStore(self._prefix, self._server(rank, REPLICA_SECONDS))
                if part.add("left", 1) == self.size:
                    for key in part.list_keys():
                        part.delete_key(key)
        for server in self._servers.values():
            server.close()
        for _, connection in self._watched.values():
            connection.close()

    # --- the round --------------------------------------------------------------------------------------------

    def exchange(self, item: bytes) -> list[bytes]:
        with self._blame(0):
            return super().exchange(item)

    def check(self) -> None:
        with self._blame(0):
            super().check()

    def decide(self, verdict: str) -> str:
        """See the module's text: what the replicas say. Where one of them does not answer, others may have had "go"
        from it or not: from there on this member says no, and it knows the outcome only if the last one agrees."""
        said = ""
        for rank in list(self._replicas):
            try:
                part = PrefixStore(self._prefix, self._server(rank, REPLICA_SECONDS))
                said = verdict = bytes(part.compare_set("verdict", "", verdict)).decode()
            except (*UNREACHABLE_ERRORS, errors.DeadlineError):
                self._replicas.remove(rank)
                self._unreachable.append(rank)
                if verdict == GO:
                    verdict = self.to_verdict(errors.RankFailedError(f"{self._who(rank)} does not answer", [rank]))
            except GONE_ERRORS:
                self._replicas.remove(rank)
        self._is_known = not self._unreachable or said not in ("", GO)
        return verdict

    def settle(self, verdict: str) -> str:
        verdict = self.decide(verdict)
        if not self._is_known:
            raise errors.RankFailedError(
                f"reconfigure to uuid {self.uuid}: {', '.join(map(self._who, self._unreachable))} did not answer, so "
                f"rank {self.index} cannot know whether the others went on; it is in no group any more.",
                [self.index],
            )
        return verdict

    # --- words ------------------------------------------------------------------------------------------------

    def describe(self, index: int) -> str:
        return self._who(index)

    def _who(self, rank: int, more: str = "") -> str:
        return f"rank {rank} (pid {self._members[rank].pid} on {self._members[rank].address}{more})"

    def gone_ranks(self, rank: int) -> errors.RankFailedError:
        return errors.RankFailedError(f"{self._who(rank)} is gone", [rank])

    @contextlib.contextmanager
    def _blame(self, rank: int) -> Iterator[None]:
        """A failure of a member's store is blamed on that member."""
        try:
            yield
        except UNREACHABLE_ERRORS as error:
            if self.left() > 0.1:  # the network gave up before we did
                raise errors.RankFailedError(f"{self._who(rank)} cannot be reached", [rank]) from error
            raise self.late([rank]) from error
        except GONE_ERRORS as error:
            raise self.gone_ranks(rank) from error

    def late(self, missing: Sequence[int]) -> errors.DeadlineError:
        who = ", ".join(self._who(rank, self._elsewhere(rank)) for rank in missing)
        return errors.DeadlineError(f"{who} did not come within {format_seconds(self.seconds)}", missing)

    def _elsewhere(self, rank: int) -> str:
        """What a member that did not come to this reconfiguration came with instead."""
        if self._turn > 1:
            return ""  # it came, and then stopped
        with contextlib.suppress(*GONE_ERRORS, errors.DeadlineError):
            server, key = self._server(0, REPLICA_SECONDS), f"at/{self._members[rank].ident}"
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
        self._handle_server: HandleServer | None = None
        self.handle: Handle | None = None
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
        if self.handle is None:
            self._handle_server = handle_server()
            self.handle = self._handle_server.new_handle()
        return self.handle

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
        """Leave the group for good. Handles of this process lead nowhere from now on."""
        old = self._replace(None)
        if old is not None:
            old.destroy()
        self._handle_server, self._why = None, DESTROYED
