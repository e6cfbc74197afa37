"""A feed of ranks on any number of hosts, from their servers (``symcomm run --server``), asked concurrently.

Each host has its own clock. An answer carries the server's time, read between our question and its arrival; the
quickest answer so far tells best how far the clocks are apart.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from symcomm import errors
from symcomm.observe.recorder.records import Operation
from symcomm.observe.recorder.stacks import ThreadStack
from symcomm.observe.top.feed import Feed, GroupFacts, RankFacts, Sample

ANSWER = 2.0  # seconds for a server to answer
ANSWER_BYTES = 64 << 20  # that its answer may have
PIECE = 64 << 10  # bytes of it that are read at a time
AT_ONCE = 64  # servers asked at the same time
AT_A_TIME = 5000  # operations in one answer
MEMORY_S = 5.0  # how often a rank is asked for its memory
FAILURES = (OSError, ValueError, KeyError, TypeError, http.client.HTTPException)


def get_json(address: str, token: str, path: str, seconds: float = ANSWER) -> Any:
    """What a rank's server at ``unix:/path``, ``http://host:port`` or ``https://host:port`` answers; any of FAILURES
    when it does not."""
    end, place = time.monotonic() + seconds, urlsplit(address)
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    with contextlib.closing(kind(place.hostname or "localhost", place.port, timeout=seconds)) as connection:
        if place.scheme == "unix":
            connection.sock = socket.socket(socket.AF_UNIX)
            connection.sock.settimeout(seconds)
            connection.sock.connect(place.path)
        connection.request("GET", path, headers={"Authorization": f"Bearer {token}"})
        answer, body = connection.getresponse(), bytearray()
        while piece := answer.read(PIECE):  # as it comes, since an announced length may be a lie
            body += piece
            if len(body) > ANSWER_BYTES or time.monotonic() > end:
                raise ConnectionAbortedError(f"an answer of more than {len(body)} bytes")
        if answer.status != 200:
            raise ConnectionRefusedError(f"{address}{path}: {answer.status} {answer.reason}")
        return json.loads(body)


class _Server:
    """One rank, through its server."""

    def __init__(self, facts: dict[str, Any], token: str):
        self.rank, self.pid, self.address, self.token = facts["rank"], facts["pid"], facts["address"], token
        self.alive = True
        self.total = self.missed = self.memory = 0
        self._since: int | None = None
        self._ended: set[int] = set()  # numbers above ``since`` that were told as ended
        self._offset = 0  # to be added to its times
        self._quickest = float("inf")  # answer so far, ns
        self._memory_at = 0.0

    def poll(self) -> list[Operation]:
        """Operations that began or ended since the last poll, on our clock. A server that does not listen is dead; one
        that is late may be busy."""
        try:
            found = self._read()
            if time.monotonic() > self._memory_at:
                self.memory = get_json(self.address, self.token, "/api/v1/memory")["reserved"]
                self._memory_at = time.monotonic() + MEMORY_S
            self.alive = True
            return found
        except (ConnectionError, FileNotFoundError):
            self.alive = False
        except FAILURES:
            pass
        return []

    def _read(self) -> list[Operation]:
        asked = time.monotonic_ns()
        answer = get_json(self.address, self.token, f"/api/v1/operations?since={self._since or 0}&limit={AT_A_TIME}")
        took = time.monotonic_ns() - asked
        if took < self._quickest:
            self._quickest, self._offset = took, asked + took // 2 - answer["clock_ns"]
        if self._since is not None:  # what came before the first poll does not count as lost
            self.missed += answer["lost"]
        self._since = answer["next"]
        found = []
        for facts in answer["operations"]:
            self.total = max(self.total, facts["number"])
            if facts["number"] not in self._ended:
                op = Operation.from_dict(facts)
                finished = None if op.finished_ns is None else op.finished_ns + self._offset
                found.append(op.changed(created_ns=op.created_ns + self._offset, finished_ns=finished))
        self._ended |= {op.number for op in found if op.finished_ns is not None}
        self._ended = {number for number in self._ended if number > answer["next"]}
        return found

    def stacks(self) -> list[ThreadStack]:
        with contextlib.suppress(*FAILURES):
            return [ThreadStack.from_dict(one) for one in get_json(self.address, self.token, "/api/v1/stacks")]
        return []


class ServersFeed(Feed):
    """Made by ``attach_servers``."""

    def __init__(self, servers: list[_Server], title: str):
        self.title = title
        self._servers = {server.rank: server for server in servers}
        self._groups: dict[tuple[Any, ...], GroupFacts] = {}  # disjoint ones may share a name
        self._pool = ThreadPoolExecutor(min(AT_ONCE, len(servers)), "symcomm-ask")

    def poll(self) -> Sample:
        servers = list(self._servers.values())
        operations = dict(zip(self._servers, self._pool.map(_Server.poll, servers), strict=True))
        for one in operations.values():
            self._groups.update({(op.group, op.ranks): GroupFacts(op.group, len(op.ranks), op.ranks) for op in one})
        ranks = [RankFacts(s.rank, s.pid, s.alive, s.total, s.memory, s.missed) for s in servers]
        return Sample(time.monotonic_ns(), ranks, operations, list(self._groups.values()))

    def find_stacks(self, ranks: Iterable[int]) -> dict[int, list[ThreadStack]]:
        asked = [self._servers[rank] for rank in ranks if rank in self._servers]
        return dict(zip((s.rank for s in asked), self._pool.map(_Server.stacks, asked), strict=True))

    def store_keys(self) -> list[str]:
        for server in self._servers.values():
            with contextlib.suppress(*FAILURES):
                return get_json(server.address, server.token, "/api/v1/store")["keys"]
        return []

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def attach_servers(address: str, token: str) -> ServersFeed:
    """A feed of a whole job, found through any rank's server. All ranks must have the same token."""
    if not address.startswith(("http://", "https://", "unix:")):
        allowed = "http://HOST:PORT, https://HOST:PORT or unix:PATH"
        raise errors.bad_argument("symcomm top", "--server", address, allowed)
    try:
        known = get_json(address, token, "/api/v1/servers")
        first = get_json(address, token, "/api/v1/rank")
    except FAILURES as error:
        raise errors.ResourceError(
            f"symcomm top: the server at {address} does not answer ({error}); is the job there, "
            "and SYMCOMM_TOKEN the job's?"
        ) from None
    servers = [_Server(facts, token) for facts in known]
    hosts = len({facts["host"] for facts in known})
    program = " ".join(first["program"]) or "job"
    return ServersFeed(servers, f"{program}, {len(servers)} ranks on {hosts} host{'s' if hosts != 1 else ''}")
