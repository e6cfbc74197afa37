"""The flight recorder under PyTorch's names: what this rank did on our groups, in torch's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from symcomm.group import registry
from symcomm.memory.arena import current_arena, has_arena
from symcomm.memory.flight import read_groups
from symcomm.observe.dump import prefix_from_environment, torchs_prefix
from symcomm.observe.records import operations_at
from symcomm.observe.torch_format import as_json, as_pickle, torch_dump

__all__ = [
    "_dump_fr_trace",
    "_dump_fr_trace_file",
    "_dump_fr_trace_json",
    "_dump_nccl_trace",
    "_dump_nccl_trace_json",
    "_reset_fr_recording_nccl",
    "_reset_fr_trace",
]


def _dump(collectives: bool | None, stacks: bool | None, only_active: bool | None) -> dict[str, Any]:
    if not has_arena():
        return torch_dump([], {}, collectives=collectives is not False)
    place = current_arena().flight.address
    groups = (registry.find(name) for name in registry.names())
    return torch_dump(
        operations_at(place),
        read_groups(place),
        collectives=collectives is not False,
        stacks=stacks is not False,
        only_active=bool(only_active),
        timeouts_ms={group.name: int(group.timeout * 1000) for group in groups if group is not None},
    )


def _dump_fr_trace(
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = None,
    onlyActive: bool | None = None,
    backend: str = "symcomm",
) -> bytes:
    """What this rank recorded, as a pickle. By default everything; ``onlyActive``: what has not ended.

    PyTorch has a recorder for each ``backend``; there is one here, whichever engine ran the operation."""
    return as_pickle(_dump(includeCollectives, includeStackTraces, onlyActive))


def _dump_fr_trace_file(
    rank: int,
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = False,
    onlyActive: bool | None = None,
    backend: str = "symcomm",
) -> None:
    """The same, into the file that ``TORCH_FR_DUMP_TEMP_FILE`` (or PyTorch's place) and ``rank`` name."""
    path = Path(f"{prefix_from_environment() or torchs_prefix()}{rank}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(_dump_fr_trace(includeCollectives, bool(includeStackTraces), onlyActive))


def _dump_fr_trace_json(
    includeCollectives: bool | None = None, onlyActive: bool | None = None, backend: str = "symcomm"
) -> bytes:
    """The same as JSON, without call sites."""
    return as_json(_dump(includeCollectives, False, onlyActive))


def _dump_nccl_trace(
    includeCollectives: bool | None = None, includeStackTraces: bool | None = None, onlyActive: bool | None = None
) -> bytes:
    """The older name of ``_dump_fr_trace``; there is one recorder, whichever engine ran the operation."""
    return _dump_fr_trace(includeCollectives, includeStackTraces, onlyActive)


def _dump_nccl_trace_json(includeCollectives: bool | None = None, onlyActive: bool | None = None) -> bytes:
    """The older name of ``_dump_fr_trace_json``."""
    return _dump_fr_trace_json(includeCollectives, onlyActive)


def _reset_fr_recording_nccl() -> None:
    """The older name of ``_reset_fr_trace``."""
    _reset_fr_trace()


def _reset_fr_trace(backend: str = "symcomm") -> None:
    """Forget what was recorded so far."""
    if has_arena():
        current_arena().flight.forget()
