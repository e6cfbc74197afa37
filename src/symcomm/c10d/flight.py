"""The flight recorder under PyTorch's names: what this rank did on our groups, in torch's format."""

from __future__ import annotations

from typing import Any

from symcomm.c10d.options import flag
from symcomm.memory.arena import current_arena, has_arena
from symcomm.observe.recorder.dump import this_rank, write_for_torch
from symcomm.observe.recorder.torch_format import as_json, as_pickle


def _dump_fr_trace(
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = None,
    onlyActive: bool | None = None,
    backend: str = "symcomm",
) -> bytes:
    """What this rank recorded, as a pickle. By default everything; ``onlyActive``: what has not ended.

    PyTorch has a recorder for each ``backend``; there is one here, whichever engine ran the operation.

    Raises: WrongTypeError."""
    _check_flags(includeCollectives=includeCollectives, includeStackTraces=includeStackTraces, onlyActive=onlyActive)
    return as_pickle(this_rank(includeCollectives, includeStackTraces, onlyActive))


def _check_flags(**flags: Any) -> None:
    for name, given in flags.items():
        flag(f"_dump_fr_trace.{name}", given)


def _dump_fr_trace_file(
    rank: int,
    includeCollectives: bool | None = None,
    includeStackTraces: bool | None = False,
    onlyActive: bool | None = None,
    backend: str = "symcomm",
) -> None:
    """The same, into the file that ``TORCH_FR_DUMP_TEMP_FILE`` (or PyTorch's place) and ``rank`` name.

    Raises: OSError when the file cannot be written."""
    write_for_torch(rank, _dump_fr_trace(includeCollectives, bool(includeStackTraces), onlyActive))


def _dump_fr_trace_json(
    includeCollectives: bool | None = None, onlyActive: bool | None = None, backend: str = "symcomm"
) -> bytes:
    """The same as JSON, without call sites. Raises: WrongTypeError."""
    _check_flags(includeCollectives=includeCollectives, onlyActive=onlyActive)
    return as_json(this_rank(includeCollectives, False, onlyActive))


def _dump_nccl_trace(
    includeCollectives: bool | None = None, includeStackTraces: bool | None = None, onlyActive: bool | None = None
) -> bytes:
    """The older name of ``_dump_fr_trace``. Raises: nothing."""
    return _dump_fr_trace(includeCollectives, includeStackTraces, onlyActive)


def _dump_nccl_trace_json(includeCollectives: bool | None = None, onlyActive: bool | None = None) -> bytes:
    """The older name of ``_dump_fr_trace_json``. Raises: nothing."""
    return _dump_fr_trace_json(includeCollectives, onlyActive)


def _reset_fr_recording_nccl() -> None:
    """The older name of ``_reset_fr_trace``. Raises: nothing."""
    _reset_fr_trace()


def _reset_fr_trace(backend: str = "symcomm") -> None:
    """Forget what was recorded so far. Raises: nothing."""
    if has_arena():
        current_arena().flight.forget()
