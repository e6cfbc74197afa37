"""What: torch's own functions that dump its flight recorder show what our groups did.
Why: C++ backends write torch's recorder, and since 2.14 a hook that slows every call down; ours records all calls
anyway. So a program that reads torch's recorder from Python gets our entries as well, in torch's format.
Versions: torch since 2.15 has a recorder for each backend, and shows ours under ``backend="symcomm"``; older ones show
our entries among the others, by time. If torch's hook is attached to a group of ours, torch's recorder has these calls
itself, and we leave it alone.
Undo: the functions are torch's again.
"""

from __future__ import annotations

import functools
import json
import pickle
from collections.abc import Callable
from typing import Any

import torch._C._distributed_c10d as torch_c10d

from symcomm.memory.arena import current_arena, has_arena
from symcomm.torch_backend import versions
from symcomm.undo import Undo, all_of, replace

BACKEND = "symcomm"
_module: Any = torch_c10d


def apply() -> Undo:
    by_backend = "backend" in (_module._dump_fr_trace.__doc__ or "")
    made: dict[str, Callable[[Any], Any]] = {
        "_dump_fr_trace": lambda theirs: _dump(theirs, True, by_backend),
        "_dump_fr_trace_json": lambda theirs: _dump(theirs, False, by_backend),
        **({"_dump_fr_trace_file": _dump_file, "_reset_fr_trace": _reset} if by_backend else {}),
    }
    there = versions.present(_module, made)
    undos = [replace(_module, name, functools.wraps(known)(made[name](known))) for name, known in there.items()]
    return all_of(*undos)


def _dump(theirs: Any, pickled: bool, by_backend: bool) -> Any:
    """A dump as a pickle, or as JSON, which has no stacks."""
    names = ["includeCollectives", *(["includeStackTraces"] if pickled else []), "onlyActive", "backend"]

    def dump(*args: Any, **kwargs: Any) -> bytes:
        from symcomm.observe.recorder.dump import this_rank  # on demand: ranks load no observer before
        from symcomm.observe.recorder.torch_format import as_json, as_pickle

        read, write = (pickle.loads, as_pickle) if pickled else (json.loads, as_json)
        told = theirs(*args, **kwargs)
        asked = {**dict(zip(names, args, strict=False)), **kwargs}
        if by_backend and asked.get("backend") != BACKEND:
            return told
        found = read(told)
        if any(str(entry["profiling_name"]).startswith(f"{BACKEND}:") for entry in found.get("entries", ())):
            return told  # torch's hook records these calls
        ours = this_rank(asked.get("includeCollectives"), asked.get("includeStackTraces"), asked.get("onlyActive"))
        if by_backend or not ours["pg_config"]:
            return write(ours) if ours["pg_config"] else told
        together = _together(found, read(write(ours)))
        return pickle.dumps(together, protocol=2) if pickled else json.dumps(together, sort_keys=True).encode()

    return dump


def _together(theirs: dict[str, Any], ours: dict[str, Any]) -> dict[str, Any]:
    """Both dumps as one. Our numbers of groups and entries continue torch's."""
    groups = 1 + max(map(int, theirs.get("pg_status", {})), default=-1)
    records = 1 + max((entry["record_id"] for entry in theirs.get("entries", ())), default=-1)
    both = {**theirs}
    both["pg_config"] = {**theirs.get("pg_config", {}), **ours["pg_config"]}
    status = {str(int(number) + groups): facts for number, facts in ours["pg_status"].items()}
    both["pg_status"] = {**theirs.get("pg_status", {}), **status}
    if "entries" in ours:
        moved = [
            {**entry, "record_id": entry["record_id"] + records, "pg_id": entry["pg_id"] + groups}
            for entry in ours["entries"]
        ]
        both["entries"] = sorted([*theirs.get("entries", ()), *moved], key=lambda entry: entry["time_created_ns"])
    return both


def _dump_file(theirs: Any) -> Any:
    def dump(rank: int, *args: Any, **kwargs: Any) -> None:
        from symcomm.observe.recorder.dump import write_for_torch

        names = ("includeCollectives", "includeStackTraces", "onlyActive", "backend")
        asked = {"includeStackTraces": False, **dict(zip(names, args, strict=False)), **kwargs}
        if asked.get("backend") != BACKEND:
            return theirs(rank, *args, **kwargs)
        return write_for_torch(rank, _module._dump_fr_trace(**asked))

    return dump


def _reset(theirs: Any) -> Any:
    def reset(*args: Any, **kwargs: Any) -> None:
        theirs(*args, **kwargs)
        if BACKEND in (*args, *kwargs.values()) and has_arena():
            current_arena().flight.forget()

    return reset
