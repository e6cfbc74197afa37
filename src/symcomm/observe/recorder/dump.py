"""Dumps: one file per rank, in PyTorch's format. The key ``symcomm`` has what that format lacks."""

from __future__ import annotations

import contextlib
import os
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from symcomm.group import registry
from symcomm.memory.arena import current_arena, has_arena
from symcomm.memory.flight import read_groups
from symcomm.observe.recorder.records import operations_at
from symcomm.observe.recorder.stacks import ThreadStack
from symcomm.observe.recorder.torch_format import as_pickle, torch_dump
from symcomm.observe.recorder.trace import RankTrace

FILE = "trace_rank_"
PREFIXES = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
SWITCHES = ("TORCH_FR_DUMP_ON_TIMEOUT", "TORCH_NCCL_DUMP_ON_TIMEOUT")


def prefix_from_environment() -> str | None:
    """The prefix of dump files, before the rank's number; None if nobody asked for dumps."""
    switch = next((os.environ[name] for name in SWITCHES if name in os.environ), "").lower()
    if folder := os.environ.get("SYMCOMM_TRACE_DIR"):
        return os.path.join(folder, FILE)
    if switch in ("0", "n", "no", "off", "false"):
        return None
    if prefix := next((os.environ[name] for name in PREFIXES if os.environ.get(name)), None):
        return prefix
    return torchs_prefix() if switch else None


def torchs_prefix() -> str:
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return os.path.join(cache, "torch", "comm_lib_trace_rank_")


def boot_id() -> str:
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
    return socket.gethostname()


def note(rank: int, pid: int, flight: int, stacks: Sequence[ThreadStack] = (), started_wall_ns: int = 0) -> RankTrace:
    """A dump of the recorder at address ``flight``, this rank's or a peer's."""
    return RankTrace(
        rank=rank,
        pid=pid,
        host=socket.gethostname(),
        boot=boot_id(),
        noted_ns=time.monotonic_ns(),
        noted_wall_ns=time.time_ns(),
        started_wall_ns=started_wall_ns,
        operations=operations_at(flight),
        stacks=list(stacks),
        groups=list(read_groups(flight).values()),
    )


def this_rank(
    collectives: bool | None, stacks: bool | None, only_active: bool | None, arena: Any = None
) -> dict[str, Any]:
    """What the rank of ``arena``, or of this thread, recorded. The first arguments are those of PyTorch's functions;
    None: the default."""
    if arena is None and not has_arena():
        return torch_dump([], {}, collectives=collectives is not False)
    place = (arena or current_arena()).flight.address
    groups = (registry.find(name) for name in registry.names())
    return torch_dump(
        operations_at(place),
        read_groups(place),
        collectives=collectives is not False,
        stacks=stacks is not False,
        only_active=bool(only_active),
        timeouts_ms={group.name: int(group.timeout * 1000) for group in groups if group is not None},
    )


def write_for_torch(rank: int, dump: bytes) -> None:
    """Write into the file that ``TORCH_FR_DUMP_TEMP_FILE`` (or PyTorch's default) and ``rank`` name."""
    path = Path(f"{prefix_from_environment() or torchs_prefix()}{rank}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(dump)


def write(trace: RankTrace, path: str, *, timeouts_ms: Mapping[str, int] | None = None, replace: bool = True) -> str:
    """Write a dump atomically: a reader finds a whole one or none. ``replace=False`` keeps an existing dump."""
    groups = dict(enumerate(trace.groups, 1))
    dump = torch_dump(trace.operations, groups, timeouts_ms=timeouts_ms)
    data = as_pickle({**dump, "symcomm": trace.to_dict()})
    folder = os.path.dirname(path) or "."
    os.makedirs(folder, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(prefix=".trace-", suffix=".part", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        if replace:
            os.replace(draft, path)
        else:
            with contextlib.suppress(FileExistsError):
                os.link(draft, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
    return path
