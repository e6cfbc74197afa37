"""The enumerations of the binding, how functions get its names, and the debug level."""

from __future__ import annotations

import os
from typing import Any

import torch._C._distributed_c10d as torch_c10d

from symcomm import errors
from symcomm.errors import wrong_type
from symcomm.types import Numbered


def named(call: Any, name: str, doc: str | None = None) -> Any:
    """A function that was made for a name of the binding, with that name."""
    call.__name__ = call.__qualname__ = name
    call.__doc__ = doc
    return call


class DebugLevel(Numbered):
    """How much checking and logging ``TORCH_DISTRIBUTED_DEBUG`` asks for."""

    OFF = 0
    INFO = 1
    DETAIL = 2


class ErrorType(Numbered):
    """What ended a group."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2
    REMOTE_ERROR = 3


class WorkResult(Numbered):
    """How one operation ended; the value of ``Work.get_future_result()``."""

    SUCCESS = 0
    TIMEOUT = 1
    COMM_ERROR = 2
    UNKNOWN = 100


class OpType(Numbered):
    """What an operation is."""

    BROADCAST = 0
    ALLREDUCE = 1
    ALLREDUCE_COALESCED = 2
    REDUCE = 3
    ALLGATHER = 4
    _ALLGATHER_BASE = 5
    ALLGATHER_COALESCED = 6
    GATHER = 7
    SCATTER = 8
    REDUCE_SCATTER = 9
    ALLTOALL_BASE = 10
    ALLTOALL = 11
    SEND = 12
    RECV = 13
    RECVANYSOURCE = 14
    BARRIER = 15
    _REDUCE_SCATTER_BASE = 16
    COALESCED = 17
    _ALLREDUCE_SPARSE = 18
    REDUCE_SCATTER_TENSOR_COALESCED = 19
    ALLGATHER_INTO_TENSOR_COALESCED = 20
    UNKNOWN = 100

    @classmethod
    def _is_unsigned_byte(cls) -> bool:
        return True


class BackendType(Numbered):
    """Kinds of backends; ``ProcessGroup.BackendType``. This one also equals its number."""

    UNDEFINED = 0
    GLOO = 1
    NCCL = 2
    UCC = 3
    MPI = 4
    XCCL = 5
    CUSTOM = 6

    def __eq__(self, other: object) -> bool:
        return self.value == other if isinstance(other, int) else super().__eq__(other)

    __hash__ = Numbered.__hash__


# --- the debug level: PyTorch's variable, so that both sides always agree ------------------------------------------


def get_debug_level() -> DebugLevel:
    """The level in force, for us and for PyTorch. Raises: nothing."""
    return DebugLevel(torch_c10d.get_debug_level().value)


def set_debug_level(level: Any) -> None:
    """Change the level, for us and for PyTorch. Raises: WrongTypeError."""
    if not isinstance(level, (DebugLevel, torch_c10d.DebugLevel)):
        raise wrong_type("set_debug_level", "level", level, "a DebugLevel")
    torch_c10d.set_debug_level(torch_c10d.DebugLevel(level.value))


def set_debug_level_from_env() -> None:
    """Take the level from ``TORCH_DISTRIBUTED_DEBUG``: OFF (or unset), INFO or DETAIL, in any case of letters.

    Raises: BadArgumentError for another word."""
    word = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "OFF")
    names = ", ".join(DebugLevel.__members__)
    if word.upper() not in DebugLevel.__members__:
        raise errors.bad_argument("set_debug_level_from_env", "TORCH_DISTRIBUTED_DEBUG", word, f"one of {names}")
    set_debug_level(DebugLevel[word.upper()])
