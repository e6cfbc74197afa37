"""Dumps that PyTorch itself wrote (for NCCL or Gloo), as far as they have what our records have."""

from __future__ import annotations

import ast
import math
import re
from typing import Any

from symcomm.observe.recorder.records import Operation
from symcomm.observe.recorder.torch_format import DTYPES
from symcomm.observe.recorder.trace import RankTrace

LABELS = {name: label for label, name in DTYPES.items()}


def from_torch(rank: int, dump: dict[str, Any]) -> RankTrace:
    """The record of ``rank``; times are those of the dump's own clock."""
    groups = []
    for name, facts in dump.get("pg_config", {}).items():
        ranks = ast.literal_eval(facts["ranks"])
        mine = ranks.index(rank) if rank in ranks else -1
        groups.append({"name": name, "rank": mine, "size": len(ranks), "ranks": ranks, "description": facts["desc"]})
    known = {group["name"]: group for group in groups}
    if len(groups) == 1:  # Gloo's has no name in some versions
        named = {entry["process_group"][0] for entry in dump.get("entries", [])}
        groups = [{**groups[0], "name": name} for name in named] or groups
        known = {group["name"]: group for group in groups}
    entries = [e for e in dump.get("entries", []) if not e["profiling_name"].endswith(":coalesced")]
    operations = [_operation(e, rank, known.get(e["process_group"][0], {})) for e in entries]
    last = max((op.finished_ns or op.created_ns for op in operations), default=0)
    return RankTrace(rank=rank, noted_ns=last, noted_wall_ns=last, operations=operations, groups=groups)


def _operation(entry: dict[str, Any], rank: int, group: dict[str, Any]) -> Operation:
    call, _, peers = entry["profiling_name"].partition(":")[2].partition(" ")
    sizes = entry["input_sizes"] + entry["output_sizes"]
    count = max((math.prod(size) for size in sizes), default=0)
    dtype = next(iter(entry["input_dtypes"] + entry["output_dtypes"]), "Byte")
    frame = next(iter(entry.get("frames", [])), None)
    root = int(re.findall(r"\d+", peers)[-1]) if peers else None
    done = entry["time_discovered_completed_ns"] or None
    ended = entry["state"] == "completed" or (entry["retired"] and entry["profiling_name"].startswith("gloo:"))
    return Operation(
        rank=group.get("rank", rank),
        number=entry["record_id"] + 1,
        group=entry["process_group"][0],
        ranks=tuple(group.get("ranks", ())),
        seq=entry["p2p_seq_id"] if entry.get("is_p2p") else entry["collective_seq_id"],
        call=call,
        dtype=LABELS.get(dtype, dtype),
        op=None,
        root=root,
        count=count,
        nbytes=0,
        created_ns=entry["time_created_ns"],
        finished_ns=done,
        waited_us=0,
        state="completed" if ended else "running",
        plan="",
        zero_copy=False,
        site=f"{frame['filename']}:{frame['line']}" if frame else "",
        exact_site=True,
    )
