"""A round (admission.py) that survives the death of any participant. reconfigure() runs it.

Every process that may be a member serves a small store (handles.py). The participants exchange what they need to build
the group in the first member's store. That member holds a connection to each of the others, and they hold one to it, so
a death is noticed at once.

The verdict is in a register of three replicas. Every member takes its verdict ("go", or why not) to the stores of the
first three members, in this order. The first value that reaches a store stays there, and every member takes it along to
the next store. If one of the three is alive, all members pass it, and leave it with the same answer.

A replica may be cut off from some members only, which must not divide them. So a member that gets no answer from one
says no to the rest. If these say "go" all the same, or do not answer either, it cannot know the verdict, and leaves
both the old and the new group. Deaths alone never divide the members, nor do cuts. Both at once may, but then the new
group has a dead member, and fails.

In a member's store::

    at/<ident>                    the uuid that a process last came with
    <uuid>-<hash>/1/i, 2/i ...    in one reconfiguration: the items of participant i in the first, second ... exchange
    <uuid>-<hash>/verdict         "go", or why not
    <uuid>-<hash>/left            how many members are done with the keys; the last one deletes them
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import select
import time
from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta

from symcomm import errors
from symcomm.errors import format_seconds
from symcomm.membership.admission import GO, Round
from symcomm.membership.handles import Handle, HandleServer
from symcomm.store import tcp_wire as wire
from symcomm.store.prefix import PrefixStore
from symcomm.store.tcp import TCPStore

REPLICAS = 3  # stores that hold the verdict: two of them may die meanwhile
WATCH_SECONDS = 1.0  # to connect to a member, so as to watch it
REPLICA_SECONDS = 5.0  # for a replica to answer; a process that is gone is noticed at once
GONE_ERRORS = (errors.StoreConnectionError, errors.StoreAuthError)  # the second: another program has that port now
UNREACHABLE_ERRORS = (errors.StoreUnreachableError, errors.StoreDeadlineError)  # stopped, or far away


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
        self._watched: dict[int, tuple[int, wire.StoreConnection]] = {}  # descriptor -> (rank, connection)
        self._poll = select.poll()
        servers = {member[:2]: rank for rank, member in reversed(list(enumerate(members)))}
        self._replicas = sorted(servers.values())[:REPLICAS]  # those that did not answer are removed
        self._unreachable: list[int] = []  # replicas that may live, but did not answer
        self._is_known = True  # whether this member knows the verdict

    # --- connections ------------------------------------------------------------------------------------------

    def connect(self) -> None:
        """Reach the first member's store; the first member watches the others from now on."""
        with self._blame_first():
            server = self._server(0, self.left())
            server.set(f"at/{self._members[self.index].ident}", str(self.uuid))
            self._store = PrefixStore(self._prefix, server)
        if self.index == 0:
            self._watch()

    def _is_here(self, rank: int) -> bool:
        """Whether a member is in this process: itself, and other ranks where threads are ranks."""
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
            self._poll.register(connection.fd, select.POLLIN | select.POLLRDHUP)  # only its end can make it readable

    def _find_dead(self) -> str:
        for fd, _ in self._poll.poll(0):
            return self.to_verdict(self.gone_ranks(self._watched[fd][0]))
        return ""

    def refuse(self, error: errors.SymcommError) -> None:
        """Do not take part, and tell the others why."""
        self.decide(self.to_verdict(error))
        self._replicas = []

    def close(self) -> None:
        """Say that this member is done with the keys; the last one deletes them."""
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
        with self._blame_first():
            return super().exchange(item)

    def check(self) -> None:
        with self._blame_first():
            super().check()

    def decide(self, verdict: str) -> str:
        """The replicas' verdict; see the module's text. If one does not answer, other members may or may not have read
        "go" there. From then on this member says no, and it knows the verdict only if the last replica agrees."""
        said = ""
        for rank in list(self._replicas):
            try:
                part = PrefixStore(self._prefix, self._server(rank, REPLICA_SECONDS))
                said = verdict = bytes(part.compare_set("verdict", "", verdict)).decode()
            except (*UNREACHABLE_ERRORS, errors.DeadlineError):
                self._replicas.remove(rank)
                self._unreachable.append(rank)
                if verdict == GO:
                    verdict = self.to_verdict(errors.RankFailedError(f"{self.describe(rank)} does not answer", [rank]))
            except GONE_ERRORS:
                self._replicas.remove(rank)
        self._is_known = not self._unreachable or said not in ("", GO)
        return verdict

    def settle(self, verdict: str) -> str:
        verdict = self.decide(verdict)
        if not self._is_known:
            raise errors.RankFailedError(
                f"reconfigure to uuid {self.uuid}: {', '.join(map(self.describe, self._unreachable))} did not answer, "
                f"so rank {self.index} cannot know whether the others went on; it is in no group any more.",
                [self.index],
            )
        return verdict

    # --- words ------------------------------------------------------------------------------------------------

    def describe(self, index: int, more: str = "") -> str:
        return f"rank {index} (pid {self._members[index].pid} on {self._members[index].address}{more})"

    def gone_ranks(self, rank: int) -> errors.RankFailedError:
        return errors.RankFailedError(f"{self.describe(rank)} is gone", [rank])

    @contextlib.contextmanager
    def _blame_first(self) -> Iterator[None]:
        """Blame a failure of the first member's store on that member."""
        try:
            yield
        except UNREACHABLE_ERRORS as error:
            if self.left() > 0.1:  # the network gave up before the deadline
                raise errors.RankFailedError(f"{self.describe(0)} cannot be reached", [0]) from error
            raise self.late([0]) from error
        except GONE_ERRORS as error:
            raise self.gone_ranks(0) from error

    def late(self, missing: Sequence[int]) -> errors.DeadlineError:
        who = ", ".join(self.describe(rank, self._elsewhere(rank)) for rank in missing)
        return errors.DeadlineError(f"{who} did not come within {format_seconds(self.seconds)}", missing)

    def _elsewhere(self, rank: int) -> str:
        """What a missing member came with instead of this reconfiguration."""
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
