"""Operations in the format of PyTorch's flight recorder, which ``torchfrtrace`` and other tools read.

That format lacks some of what we record (reduce operation, root), and differs in places:

* A name begins with a backend that ``torchfrtrace`` knows, so ours say ``gloo:``.
* We record numbers of elements, not shapes: every tensor has one dimension.
* A failed operation is one that never completed.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Mapping, Sequence
from typing import Any

from symcomm.observe.recorder.records import GroupKeys, Operation
from symcomm.types import DType

VERSION = "2.10"  # of the format, as torch 2.13 writes it
BACKEND = "gloo"
MESSAGES = 1 << 32  # added to messages' numbers, or torchfrtrace takes a message and a collective for one call
SCALAR_TYPES = {
    DType.UINT8: "Byte", DType.INT8: "Char", DType.INT16: "Short", DType.INT32: "Int", DType.INT64: "Long",
    DType.UINT16: "UInt16", DType.UINT32: "UInt32", DType.UINT64: "UInt64", DType.BOOL: "Bool",
    DType.FLOAT16: "Half", DType.BFLOAT16: "BFloat16", DType.FLOAT32: "Float", DType.FLOAT64: "Double",
    DType.COMPLEX64: "ComplexFloat", DType.COMPLEX128: "ComplexDouble", DType.FLOAT8_E4M3FN: "Float8_e4m3fn",
    DType.FLOAT8_E5M2: "Float8_e5m2", DType.FLOAT8_E4M3FNUZ: "Float8_e4m3fnuz",
    DType.FLOAT8_E5M2FNUZ: "Float8_e5m2fnuz",
}  # fmt: skip
DTYPES = {dtype.label: name for dtype, name in SCALAR_TYPES.items()}


def torch_dump(
    operations: Sequence[Operation],
    groups: Mapping[int, dict[str, Any]],
    *,
    collectives: bool = True,
    stacks: bool = True,
    only_active: bool = False,
    timeouts_ms: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The dump of one rank. ``groups`` are those of its recorder, by number."""
    named = {facts["name"]: (number - 1, facts) for number, facts in sorted(groups.items())}  # the latest of a name
    current = latest_of_each_group(operations)
    dump: dict[str, Any] = {
        "version": VERSION,
        "pg_config": {
            name: {"name": name, "desc": _description(facts), "ranks": str(list(facts["ranks"]))}
            for name, (_, facts) in named.items()
        },
        "comm_lib_version": "",
        "pg_status": {str(at): _status(name, current) for name, (at, _) in named.items()},
    }
    if collectives:
        entries = _entries(current, named, timeouts_ms or {})
        if only_active:
            entries = [e for e in entries if e["time_discovered_completed_ns"] is None]
        if not stacks:
            for entry in entries:
                del entry["frames"]
        dump["entries"] = entries
    return dump


def as_pickle(dump: dict[str, Any]) -> bytes:
    return pickle.dumps(dump, protocol=2)


def as_json(dump: dict[str, Any]) -> bytes:
    """As torch writes it: no frames, a field for NCCL, 0 for unknown times, and no list of entries if it is empty."""

    def plain(entry: dict[str, Any]) -> dict[str, Any]:
        times = {k: v or 0 for k, v in entry.items() if k.startswith("time_discovered")}
        return {k: v for k, v in {**entry, **times}.items() if k != "frames"}

    entries = [plain(entry) for entry in dump.get("entries", ())]
    dump = {key: value for key, value in dump.items() if key != "entries"} | {"nccl_comm_state": {}}
    if entries:
        dump["entries"] = entries
    return json.dumps(dump, sort_keys=True, separators=(",", ":")).encode()


def latest_of_each_group(operations: Sequence[Operation]) -> list[Operation]:
    """Drops operations of earlier groups of the same name, which counted from 0 too."""
    keys = list(map(GroupKeys(), operations))
    starts: dict[int, tuple[int, int]] = {}  # group -> (last sequence number, number of its first operation)
    for key, op in zip(keys, operations, strict=True):
        if not op.is_message:
            last, start = starts.get(key, (-1, 0))
            starts[key] = (op.seq, start if op.seq > last else op.number)
    return [op for key, op in zip(keys, operations, strict=True) if op.number >= starts.get(key, (0, 0))[1]]


def _description(facts: dict[str, Any]) -> str:
    return facts.get("description") or "undefined"


def _status(group: str, operations: Sequence[Operation]) -> dict[str, int]:
    seqs = [op.seq for op in operations if op.group == group and not op.is_message]
    done = [op.seq for op in operations if op.group == group and not op.is_message and op.state == "completed"]
    last = max(seqs, default=-1)
    return {
        "last_enqueued_collective": last,
        "last_started_collective": last,
        "last_completed_collective": max(done, default=-1),
    }


def _entries(
    operations: Sequence[Operation], named: Mapping[str, tuple[int, dict[str, Any]]], timeouts_ms: Mapping[str, int]
) -> list[dict[str, Any]]:
    to_wall = time.time_ns() - time.monotonic_ns()
    collectives: dict[str, int] = {}
    messages: dict[str, dict[str, int]] = {}  # group -> call -> how many so far
    entries = []
    for op in operations:
        if op.is_message:
            messages.setdefault(op.group, {})[op.call] = op.seq
        else:
            collectives[op.group] = op.seq
        at, facts = named.get(op.group, (0, {}))
        sizes = _sizes(op)
        done = op.finished_ns if op.state == "completed" else None
        entry: dict[str, Any] = {
            "record_id": op.number - 1,
            "pg_id": at,
            "process_group": (op.group, _description(facts)),
            "thread_name": "",
            "thread_id": "",
            "collective_seq_id": collectives.get(op.group, 0),
            "p2p_seq_id": MESSAGES + sum(messages[op.group].values()) if op.group in messages else 0,
            "op_id": op.number,
            "profiling_name": f"{BACKEND}:{_name(op)}",
            "time_created_ns": op.created_ns + to_wall,
            "input_sizes": sizes[0],
            "input_dtypes": [DTYPES[op.dtype]] * len(sizes[0]),
            "output_sizes": sizes[1],
            "output_dtypes": [DTYPES[op.dtype]] * len(sizes[1]),
            "state": "completed" if done else "started",
            "time_discovered_started_ns": op.created_ns + op.waited_us * 1000 + to_wall if done else None,
            "time_discovered_completed_ns": done + to_wall if done else None,
            "retired": op.finished_ns is not None,
            "timeout_ms": timeouts_ms.get(op.group, 0),
            "is_p2p": op.is_message,
            "frames": _frames(op),
        }
        if done:
            entry["duration_ms"] = (done - op.created_ns) / 1e6
        entries.append(entry)
    return entries


def _frames(op: Operation) -> list[dict[str, Any]]:
    file, _, line = op.site.rpartition(":")
    return [{"name": op.call, "filename": file, "line": int(line)}] if line.isdigit() else []


def _name(op: Operation) -> str:
    """As torch names the operation."""
    if op.is_message:  # torchfrtrace counts ranks of a group in ascending order
        order = sorted(op.ranks)
        me, peer = (order.index(op.ranks[r]) if 0 <= r < len(op.ranks) else r for r in (op.rank, op.root or 0))
        return f"send {me}->{peer}" if op.call == "send" else f"recv {me}<-{peer}"
    if op.call in ("all_gather", "reduce_scatter") and op.count % max(len(op.ranks), 1):
        return f"{op.call}_v"
    return "all_to_all" if op.call.startswith("all_to_all") else op.call


def _sizes(op: Operation) -> tuple[list[list[int]], list[list[int]]]:
    """Of inputs and outputs."""
    total, part = [[op.count]], [[op.count // max(len(op.ranks), 1)]]
    if op.call == "barrier":
        return [], []
    if op.call == "all_gather":
        return part, total
    if op.call == "reduce_scatter":
        return total, part
    if op.call == "gather":
        return part, total if op.root == op.rank else []
    if op.call == "scatter":
        return total if op.root == op.rank else [], part
    if op.call.startswith("all_to_all"):
        return part, part
    return total, total
