"""What hooks call the operations of a group: the names that PyTorch 2.15 has for them."""

from __future__ import annotations

import enum
from typing import Any

__all__ = ["HookOpName"]


class HookOpName(enum.Enum):
    """Members equal those of PyTorch with the same name, where it has them (write ours on the left)."""

    SEND = 0
    RECV = 1
    BROADCAST = 2
    ALLREDUCE = 3
    REDUCE = 4
    ALLGATHER = 5
    REDUCE_SCATTER = 6
    ALLTOALL = 7
    BARRIER = 8
    SCATTER = 9
    GATHER = 10
    SPLIT = 11
    NEW_WINDOW = 12
    ALLREDUCE_COALESCED = 13
    ALLGATHER_BASE = 14
    ALLGATHER_COALESCED = 15
    ALLGATHER_INTO_TENSOR_COALESCED = 16
    REDUCE_SCATTER_BASE = 17
    REDUCE_SCATTER_TENSOR_COALESCED = 18
    ALLTOALL_BASE = 19
    UNKNOWN = 20

    @classmethod
    def _missing_(cls, value: object) -> Any:
        if not isinstance(value, int):
            raise TypeError(f"HookOpName: value must be a number of HookOpName, got {value!r}.")
        return None

    def __eq__(self, other: object) -> bool:
        if type(other) is HookOpName:
            return self is other
        theirs = type(other)
        is_torchs = theirs.__name__ == "HookOpName" and theirs.__module__.startswith("torch.")
        return is_torchs and self.value == getattr(other, "value", None)

    def __hash__(self) -> int:
        return self.value

    def __int__(self) -> int:
        return self.value

    __index__ = __int__
