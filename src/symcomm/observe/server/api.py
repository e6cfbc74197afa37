"""Our own routes, under /api/v1: a rank's identity, operations and state, as JSON.

Operations and stalls are read from the ranks' shared memory, so one rank's server also reports on peers that are stuck
or dead and cannot answer themselves: ``?rank=R`` on operations, and ``/api/v1/peers``.
"""

from __future__ import annotations

import base64
import os
import platform
import socket
import sys
import time
from datetime import timedelta
from typing import Any

import symcomm
from symcomm._core import native
from symcomm.errors import CallerError
from symcomm.group import registry
from symcomm.observe import server_registry
from symcomm.observe.recorder import gil
from symcomm.observe.recorder.records import Operation, on_this_host, operations_at
from symcomm.observe.recorder.stacks import thread_stacks
from symcomm.observe.server.handlers import route
from symcomm.observe.server.requests import Request, Response
from symcomm.observe.top import metrics  # noqa: F401  (it has a route)
from symcomm.store.lease import root_of

OPERATIONS, MOST_OPERATIONS = 500, 5000  # in one answer: by default, and at most
KEYS, VALUE_BYTES = 1000, 64 << 10
STORE_SECONDS = 5.0


@route("GET", "/api/v1/rank")
def rank(request: Request) -> dict[str, Any]:
    """Which rank this is. ``clock_ns`` is CLOCK_MONOTONIC, the clock of operations' times."""
    facts, group = request.rank, request.rank.group
    return {
        "rank": facts.rank,
        "world_size": None if group is None else group.size,
        "local_rank": os.environ.get("LOCAL_RANK"),
        "job": server_registry.job_name(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "version": symcomm.__version__,
        "python": platform.python_version(),
        "torch": getattr(sys.modules.get("torch"), "__version__", None),
        "program": sys.argv[:1],
        "address": facts.address,
        "uptime_s": round(time.time() - facts.started, 3),
        "clock_ns": time.monotonic_ns(),
        "time": time.time(),
    }


@route("GET", "/api/v1/server")
def server(request: Request) -> dict[str, Any]:
    """The server's clients, and the connections that it has ended, by reason."""
    acceptor = request.rank.acceptor
    return {"connections": acceptor.connections, "closed": dict(acceptor.closed), "pauses": acceptor.pauses}


# --- operations and groups ---------------------------------------------------------------------------


@route("GET", "/api/v1/operations")
def operations(request: Request) -> dict[str, Any]:
    """Operations with numbers above ``since``, oldest first, at most ``limit``; of ``rank`` of the first group.

    Ask again with ``since=next``; it stays below operations that still run, so that you see their ends. ``lost`` counts
    what the ring has overwritten meanwhile.
    """
    group = request.group
    since = request.get_number("since", 0, 0, 2**63)
    limit = request.get_number("limit", OPERATIONS, 1, MOST_OPERATIONS)
    of_rank = request.get_number("rank", group.rank, 0, group.size - 1)
    here = on_this_host(group)
    if group.global_ranks[of_rank] not in here.global_ranks:
        raise CallerError(f"rank {of_rank} is on another host; ask a server there, see /api/v1/servers.")
    known = operations_at(here.peers[here.global_ranks.index(group.global_ranks[of_rank])].flight)
    fresh = [op for op in known if op.number > since]
    shown = fresh[:limit]
    running = [op.number for op in shown if op.state == "running"]
    return {
        "rank": of_rank,
        "clock_ns": time.monotonic_ns(),
        "operations": [op.to_dict() for op in shown],
        "next": min(running) - 1 if running else shown[-1].number if shown else since,
        "more": len(fresh) > limit,
        "lost": max(0, known[0].number - since - 1) if known else 0,
    }


@route("GET", "/api/v1/groups")
def groups(request: Request) -> list[dict[str, Any]]:
    first = request.rank.group
    if first is None:
        return []
    return [_group_facts(group) for group in registry.of_rank(first.arena.nonce)]


def _group_facts(group: Any) -> dict[str, Any]:
    failure = group.failure
    return {
        "name": group.name,
        "rank": group.rank,
        "size": group.size,
        "ranks": group.global_ranks,
        "sequence_number": group.sequence_number if not group.has_left else None,
        "timeout_s": group.timeout,
        "failure": None if failure is None else str(failure),
    }


@route("GET", "/api/v1/peers")
def peers(request: Request) -> list[dict[str, Any]]:
    """Every rank of the first group on this host, as its shared memory shows it, even one that cannot answer."""
    group = on_this_host(request.group)
    return [_peer_facts(group, number, peer) for number, peer in enumerate(group.peers)]


@route("GET", "/api/v1/servers")
def servers(request: Request) -> list[dict[str, Any]]:
    """Where the servers of the job's ranks are, on all hosts, as they published it in the store."""
    group = request.group
    own = {**server_registry.facts_of(request.rank), "address": request.rank.address}
    if request.rank.store is None:
        return [own]
    found = {own["rank"]: own} | server_registry.of_job(_own_store(request), group.size)
    return [found[number] for number in sorted(found)]


def _own_store(request: Request) -> Any:
    """The rank's store on a connection of our own, since the rank's may be waiting."""
    shared = root_of(request.rank.store).clone()
    shared.set_timeout(timedelta(seconds=STORE_SECONDS))
    return shared


def _peer_facts(group: Any, number: int, peer: Any) -> dict[str, Any]:
    word = int.from_bytes(native.peek(peer.life, 4), sys.byteorder)
    known = operations_at(peer.flight)
    last: Operation | None = known[-1] if known else None
    return {
        "rank": group.global_ranks[number],
        "pid": peer.pid,
        "state": "died" if word & native.LIFE_OWNER_DIED else "alive" if word else "ended",
        "stalled": gil.stall_of(peer),
        "last_operation": None if last is None else last.to_dict(),
    }


# --- the process -------------------------------------------------------------------------------------


@route("GET", "/api/v1/stacks")
def stacks(request: Request) -> list[dict[str, Any]]:
    """Every thread's Python stack, innermost frame first; the rank's thread first."""
    return [stack.to_dict() for stack in thread_stacks(request.rank.thread)]


@route("GET", "/api/v1/memory")
def memory(request: Request) -> dict[str, Any]:
    """This rank's arena in bytes: addresses, in use, peak, freed but kept, and the pages that it really takes."""
    arena = request.group.arena
    return {
        "addresses": arena.nbytes,
        "used": arena.used_bytes,
        "peak": arena.peak_bytes,
        "idle": arena.idle_bytes,
        "reserved": arena.reserved_bytes,
        "huge_pages": bool(arena.huge_pages),
    }


@route("GET", "/api/v1/store")
def store(request: Request) -> Any:
    """The names of the store's keys (those that begin with ``prefix``); with ``key``, its value: only for the token."""
    if request.rank.store is None:
        raise CallerError("this rank has no store.")
    key = request.get_param("key")
    if key and not request.has_token:
        return Response.of_json({"error": "a store's values are shown only to who sends the job's token."}, 401)
    shared = _own_store(request)
    if key:
        if not shared.check([key]):
            raise CallerError(f"the store has no key {key[:200]!r}.")
        value = bytes(shared.get(key))
        shown = value[:VALUE_BYTES]
        return {"key": key, "bytes": len(value), "value_base64": base64.b64encode(shown).decode()}
    names = sorted(name for name in shared.list_keys() if name.startswith(request.get_param("prefix")))
    return {"keys": names[:KEYS], "count": len(names)}


@route("POST", "/api/v1/dump")
def dump(request: Request) -> dict[str, Any]:
    """All of the above but the store, in one document, for a bug report. Writes nothing."""
    request.params.setdefault("limit", str(MOST_OPERATIONS))
    document: dict[str, Any] = {"rank": rank(request), "groups": groups(request), "stacks": stacks(request)}
    if request.rank.group is not None:
        document |= {"operations": operations(request), "memory": memory(request), "peers": peers(request)}
    return document
