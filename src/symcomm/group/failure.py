"""Turns a failed operation into an exception whose message is the same on every rank.

The core reports the kind of failure and the state of every rank's control block. On a mismatch each rank publishes its
own call and waits briefly for the others', so that every message names all calls.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any

from symcomm import errors
from symcomm._core import native
from symcomm.collectives.plan import Collective
from symcomm.collectives.select import ON_DEVICE, sizes_in
from symcomm.errors import format_exit, format_ranks
from symcomm.group import failure_words as words
from symcomm.types import DType, RedOpType

RECORD_WAIT = 0.08  # the others are woken at once; 80 ms stays within the 100 ms that we promise
EXIT_WAIT = 0.08  # tearing down a process took 5 to 60 ms on a busy machine
PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


class Status(enum.IntEnum):
    """How an operation ended, as the core says it (``enum status`` in _core/group/status.h)."""

    OK = native.STATUS_OK
    MISMATCH = native.STATUS_MISMATCH
    DEAD = native.STATUS_DEAD
    LEFT = native.STATUS_LEFT
    TIMEOUT = native.STATUS_TIMEOUT
    ABORTED = native.STATUS_ABORTED
    PLAN = native.STATUS_PLAN
    INTERRUPTED = native.STATUS_INTERRUPTED
    HALF_SENT = native.STATUS_HALF_SENT
    NESTED = native.STATUS_NESTED
    UNREADABLE = native.STATUS_UNREADABLE
    REFUSED = native.STATUS_REFUSED


Site = tuple[str, int]  # file, line; formatted only on failure
_is_inner: dict[str, bool] = {}  # by file


def call_site(depth: int = 1) -> Site:
    """The innermost frame that is neither ours nor torch's."""
    frame: Any = sys._getframe(depth)
    while frame is not None:
        file = frame.f_code.co_filename
        if not is_inner(file):
            return file, frame.f_lineno
        frame = frame.f_back
    return "?", 0


def is_inner(file: str) -> bool:
    """Whether calls in this file are made on behalf of its caller."""
    inner = _is_inner.get(file)
    if inner is None:
        inner = _is_inner[file] = file.startswith(_inner_folders())
    return inner


native.use_inner_files(is_inner)  # the core looks for places as call_site() does


def format_site(site: Site) -> str:
    name, line = site
    if cell := errors.notebook_cells().get(name):
        return f"{cell}:{line}"
    with contextlib.suppress(OSError):  # the working directory may be gone
        near = os.path.relpath(name)
        name = name if near.startswith("..") else near
    return f"{name}:{line}"


def _inner_folders() -> tuple[str, ...]:
    """Folders whose code makes collective calls on behalf of its caller."""
    ours = tuple(
        PACKAGE + name + os.sep for name in ("group", "store", "hierarchical", "cuda", "torch_backend", "c10d", "ddp")
    )
    ours = (*ours, contextlib.__file__)  # of a ``with`` around calls, as torch's coalescing
    torch = sys.modules.get("torch")
    return (*ours, os.path.dirname(torch.__file__) + os.sep) if torch is not None and torch.__file__ else ours


REDUCING = {Collective.ALL_REDUCE, Collective.REDUCE_SCATTER, Collective.REDUCE}
ROOTED = {Collective.BROADCAST, Collective.REDUCE, Collective.GATHER, Collective.SCATTER}


def describe_call(signature: int, count: int, name: str = "custom") -> str:
    """A published signature as a call: ``all_reduce(float32 x 1024, SUM)``. ``name``: of a plan that a caller wrote."""
    try:
        collective = Collective(signature & 0xFF)
    except ValueError:
        return f"operation {signature & 0xFF}"
    text = call_words(collective, signature >> 8 & 0xFF, signature >> 16 & 0xFF, signature >> 24, sizes_in(count))
    text = name + text.removeprefix("custom") if collective is Collective.CUSTOM else text
    return text + (" on a GPU" if count & ON_DEVICE else "")


def call_words(collective: Collective, dtype: int, redop: int, root: int, sizes: str) -> str:
    if collective is Collective.BARRIER:
        return "barrier()"
    parts = [f"{DType(dtype).label} x {sizes}"]
    if collective in REDUCING:
        parts.append(RedOpType(redop).name)
    if collective in ROOTED:
        parts.append(f"root {root}")
    elif collective in REDUCING and root:
        parts.append(f"{root} shards")
    return f"{collective.label}({', '.join(parts)})"


def with_sizes(call: str, collective: int) -> str:
    """The words for a call that is still gathering the sizes of all ranks' pieces; empty for any other."""
    forms = {"all_to_all": "all_to_all with lists", "all_to_all_single": "all_to_all_single with splits"}
    return forms.get(call, "") if collective == Collective.ALL_GATHER else ""


def how_it_ended(pid: int) -> str:
    """How a dead process ended, while its parent has not reaped it yet. The kernel marks the life word before it tears
    the process down, so the exit code may be a few milliseconds away."""
    deadline = time.monotonic() + EXIT_WAIT
    while True:
        try:
            with open(f"/proc/{pid}/stat") as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return "died"
        if fields[0] in "ZX":
            return format_exit(os.waitstatus_to_exitcode(int(fields[-1])))
        if dumps_core(pid):  # which may take long; the signal is already known
            return f"{format_exit(-(int(fields[-1]) & 0x7F))} (it still writes a core dump)"
        if time.monotonic() > deadline:
            return "died"
        time.sleep(0.001)


def dumps_core(pid: int) -> bool:
    """Whether the kernel is writing a core dump of the process, which will never run again."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        return "\nCoreDumping:\t1\n" in file.read()
    return False


def how_rank_ended(rank: int, pid: int, status: int) -> str:
    """``rank 1 (pid 4711) died with SIGKILL``. ``status``: as the core has it."""
    return f"rank {rank} (pid {pid}) {how_it_ended(pid) if status == Status.DEAD else 'left the group'}"


def explain(group: Any, status: int, call: str, at: Site, seconds: float | None) -> errors.SymcommError:
    """The exception for a failed operation of ``group``. ``seconds``: how long it ran; None: ask the core."""
    site = format_site(at)
    report = group.handle.report()
    if seconds is None:
        seconds = report["running"]
    seq = report["seq"] = status >> 8 or report["seq"]  # of the operation that failed; there may be later ones
    status = report["status"] or status & 0xFF
    me = report["ranks"][group.rank]
    number = "" if call.endswith(",") else f" #{seq}"  # messages ("send to rank 1, tag 0,") are not counted
    what = f"{call}{number} on group {group.name!r}"
    text = call
    if me["seq"] == seq:
        text = with_sizes(call, me["signature"] & 0xFF) or describe_call(me["signature"], me["count"], call)
    _publish(group, text, site, seq)
    if status == Status.MISMATCH:
        return _mismatch(group, what, report, text, site)
    if status in (Status.DEAD, Status.LEFT):
        return _rank_gone(group, what, report, seconds)
    if status == Status.TIMEOUT:
        return _timed_out(group, what, report, seconds)
    if status == Status.HALF_SENT:
        return errors.DeadlineError(
            f"{what} failed: rank {report['origin']} gave up a message to rank {report['culprit']} of which it had "
            "sent a part, so no later message could be read. Receive in time, or give a longer timeout.",
            [report["culprit"]],
        )
    if status == Status.UNREADABLE:
        return errors.GroupUnusableError(
            f"{what} failed: rank {report['origin']} could not copy out of the tensor of rank {report['culprit']}: a "
            "part of it is not mapped any more, or a part of the output is not writable."
        )
    if status in (Status.ABORTED, Status.INTERRUPTED):
        return words.aborted(what, report["origin"])
    return errors.InternalError(f"{what}: the plan does not fit the group. This is a bug of ours: please report it.")


def explain_peer(group: Any, what: str, status: int, peer: int, seconds: float) -> errors.SymcommError:
    """The exception for a failed wait for one rank's signal. The group stays usable."""
    text, pid = f"{what} on group {group.name!r}", group.peers[peer].pid
    if status in (Status.DEAD, Status.LEFT):
        how = how_rank_ended(peer, pid, status)
        return words.ranks_gone(f"{text} failed on rank {group.rank}: {how}", [peer], None)
    if status == Status.TIMEOUT:
        return words.peer_late(text, seconds, peer, pid)
    if group.failure is not None:
        return group.unusable_error()
    return errors.GroupUnusableError(f"{text} failed: the group was aborted or an operation on it failed before.")


def check_living(group: Any, ranks: Collection[int], what: str) -> None:
    """Raise if one of ``ranks`` died or left; for waits outside the group's operations."""
    report = group.handle.report()["ranks"]
    gone = {r["rank"]: r["gone"] for r in report if r["gone"] and r["rank"] in ranks and r["rank"] != group.rank}
    if not gone:
        return
    how = "; ".join(how_rank_ended(rank, group.peers[rank].pid, status) for rank, status in gone.items())
    left = [r["rank"] for r in report if not r["gone"]]
    raise words.ranks_gone(f"{what} failed on rank {group.rank} of group {group.name!r}: {how}", list(gone), left)


def _publish(group: Any, call: str, site: str, seq: int) -> None:
    """Publish what this rank was doing. Of a long path, the end is kept."""
    while len(text := json.dumps({"call": call, "site": site, "seq": seq}).encode()) > native.CALL_BYTES:
        site = f"...{site[len(site) // 4 + 4 :]}"
    group.handle.publish(native.RECORD_CALL, text)


def _await_records(group: Any, ranks: Sequence[int]) -> list[dict[str, Any] | None]:
    deadline = time.monotonic() + RECORD_WAIT
    while True:
        records = group.handle.records(native.RECORD_CALL)
        if all(records[r] is not None for r in ranks) or time.monotonic() > deadline:
            return [json.loads(item) if item is not None else None for item in records]
        time.sleep(0.001)


def _mismatch(group: Any, what: str, report: dict[str, Any], text: str, site: str) -> errors.SymcommError:
    there = [r["rank"] for r in report["ranks"] if r["seq"] >= report["abort_seq"] and not r["gone"]]
    sides: dict[str, list[int]] = {}
    coming = [r["rank"] for r in report["ranks"] if not r["gone"]]
    for rank, record in enumerate(_await_records(group, coming)):
        if rank == group.rank:
            side = f"{text} at {site}"
        elif record is not None:
            side = f"{record['call']} at {record['site']}"
        elif rank in there:
            seen = report["ranks"][rank]
            side = describe_call(seen["signature"], seen["count"])
        else:
            side = "nothing yet"
        sides.setdefault(side, []).append(rank)
    return words.mismatched(what, words.list_calls(sides))


def _last_seen(seen: dict[str, Any], seq: int) -> str:
    if seen["seq"] <= 0:
        return "before its first operation"
    last = f"{describe_call(seen['signature'], seen['count'])} #{seen['seq']}"
    return f"in {last}" if seen["seq"] >= seq else f"after {last}"


def waits_for_message(seen: dict[str, Any]) -> str:
    """What a missing rank does instead, if it waits for a message."""
    if not seen["message"]:
        return ""
    peer, is_send = seen["message"] // 2 - 2, seen["message"] % 2
    who = "any rank" if peer < 0 else f"rank {peer}"
    return f" and waits to send to {who}" if is_send else f" and waits for a message from {who}"


def _rank_gone(group: Any, what: str, report: dict[str, Any], seconds: float) -> errors.SymcommError:
    first = report["culprit"]  # others may have left because of it, so besides it only dead ranks are named
    gone = [first, *(r["rank"] for r in report["ranks"] if r["gone"] == Status.DEAD and r["rank"] != first)]
    parts = []
    for rank in gone:
        pid = group.peers[rank].pid
        seen = report["ranks"][rank]
        how = "left the group" if seen["gone"] == Status.LEFT else how_it_ended(pid)
        parts.append(f"rank {rank} (pid {pid}) {how} {_last_seen(seen, report['seq'])}")
    return words.rank_failed(what, group.rank, group.size, seconds, "; ".join(parts), gone)


def _timed_out(group: Any, what: str, report: dict[str, Any], seconds: float) -> errors.SymcommError:
    seq = report["abort_seq"] or report["seq"]
    absent = [r for r in report["ranks"] if r["seq"] < seq]
    if report["culprit"] == report["origin"]:  # the rank had not begun the operation
        missing = [report["origin"]]
        story = f"rank {report['origin']} was still busy with operations before it"
    elif absent:
        missing = [r["rank"] for r in absent]
        last = "; ".join(
            f"rank {r['rank']} was last seen {_last_seen(r, seq)}{waits_for_message(r)}" for r in absent[:4]
        )
        arrived = [r["rank"] for r in report["ranks"] if r["seq"] >= seq]
        story = f"did not come: {format_ranks(missing)}; arrived: {format_ranks(arrived)}; {last}"
    else:
        missing = [report["culprit"]]
        story = f"all arrived, but rank {report['culprit']} does not go on (stopped, or starved of a core?)"
    return words.timed_out(what, group.rank, seconds, report["origin"], story, missing)
