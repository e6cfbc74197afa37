"""How newcomers and members find each other, in the store.

A process that wants to join draws a ticket, leaves a request and waits for an answer: an invitation to a round
(admission.py). In the store, below ``grow/<name of the group>``::

    tickets               how many were drawn
    request/T, answer/T   the process that drew ticket T; its invitation, or that the ticket was withdrawn
    rounds, N/...         how many there were; the keys of round N
    closed                why there is nothing to join any more
"""

from __future__ import annotations

import errno
import json
import os
import select
from typing import Any

from symcomm import errors
from symcomm.memory.hosts import boot_id
from symcomm.store.prefix import PrefixStore

NO_DESCRIPTOR = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def _started(pid: int) -> str:
    """When a process started. Together with its pid, that identifies it for ever."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[19]


def join_request(rank: int | None) -> dict[str, Any]:
    pid = os.getpid()
    return {"pid": pid, "started": _started(pid), "names": _pid_namespace(), "rank": rank}


def _pid_namespace() -> str:
    """Pids mean the same within one pid namespace of one machine, until it boots again."""
    return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"


class NewcomerProcess:
    """The process behind a request. ``is_dead()`` can only tell for a process of this pid namespace."""

    def __init__(self, request: dict[str, Any]):
        self.pid = request["pid"]
        self.dead = False
        self._fd: int | None = None
        if request["names"] != _pid_namespace():
            return  # in another container, or on another host: only the deadline will tell
        try:
            self.dead = _started(self.pid) != request["started"]
            self._fd = os.pidfd_open(self.pid)
            self.dead = self.dead or self._ended()
        except OSError as error:
            self.dead = error.errno not in NO_DESCRIPTOR  # else it may live, and only the deadline will tell

    def _ended(self) -> bool:
        if self._fd is None:
            return False
        poll = select.poll()  # select() takes no descriptors above 1023
        poll.register(self._fd, select.POLLIN)
        return bool(poll.poll(0))

    def is_dead(self) -> bool:
        self.dead = self.dead or self._ended()
        return self.dead

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)


class JoinQueue:
    """The requests to join a group, and their answers, in a store."""

    def __init__(self, store: Any, name: str):
        self.store = PrefixStore(f"grow/{name}", store)
        self._first = 1  # all tickets before this one are answered

    def round_store(self, number: int) -> PrefixStore:
        """The part of the store that belongs to a round."""
        return PrefixStore(str(number), self.store)

    # -- a newcomer's side

    def request_to_join(self, request: dict[str, Any]) -> int:
        ticket = self.store.add("tickets", 1)
        self.store.set(f"request/{ticket}", json.dumps(request))
        return ticket

    def answer(self, ticket: int) -> dict[str, Any] | None:
        """The invitation, once there is one."""
        if self.store.check([f"answer/{ticket}"]):
            return json.loads(self.store.get(f"answer/{ticket}"))
        if self.store.check(["closed"]):
            raise errors.GroupUnusableError(f"join: {bytes(self.store.get('closed')).decode()}.")
        return None

    def settle(self, ticket: int, answer: dict[str, Any]) -> bool:
        """Answer a ticket; False if it has another answer already."""
        text = json.dumps(answer)
        return bytes(self.store.compare_set(f"answer/{ticket}", "", text)).decode() == text

    # -- the members' side

    def waiting(self) -> dict[int, dict[str, Any]]:
        """Ticket -> request, of those that were not answered yet."""
        drawn = self.store.add("tickets", 0)
        found: dict[int, dict[str, Any]] = {}
        for ticket in range(self._first, drawn + 1):
            if self.store.check([f"answer/{ticket}"]):
                if ticket == self._first:
                    self._first += 1
            elif self.store.check([f"request/{ticket}"]):  # otherwise it is being written
                found[ticket] = json.loads(self.store.get(f"request/{ticket}"))
        return found
