"""Places where symmetric memory can be: the interface that on_cpu.py and on_gpu.py implement."""

from __future__ import annotations

import json
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from symcomm import errors
from symcomm.errors import format_ranks
from symcomm.group.process_group import ProcessGroup
from symcomm.memory.hosts import alike
from symcomm.symm_mem import settings

if TYPE_CHECKING:
    import torch

M = TypeVar("M")


class Allocation:
    """Facts about a piece of memory. The memory holds this object, never the other way round."""

    def __init__(self, address: int, nbytes: int):
        self.address = address
        self.nbytes = nbytes
        self.group_name: Any = None  # or the group itself: the default of rendezvous()
        self.peer_memories: weakref.WeakKeyDictionary[ProcessGroup, PeerMemory] = weakref.WeakKeyDictionary()


class PeerMemory(ABC):
    """Where every rank of a group has the same piece of memory, and its signal pad. It lives as long as this rank's
    piece, so it does not hold the group, which may go first."""

    device: torch.device
    buffers: list[int]  # addresses, by rank
    pad_addresses: list[int]

    def __init__(self, nbytes: int):
        self.nbytes = nbytes
        self.pad_bytes = settings.get_signal_pad_size()

    def exchange(self, group: ProcessGroup, **info: Any) -> list[dict[str, Any]]:
        """Exchange facts about each rank's memory. Raises if sizes differ."""
        info |= {"nbytes": self.nbytes, "pad_bytes": self.pad_bytes}
        infos = [json.loads(item) for item in group.all_gather_bytes(json.dumps(info).encode())]
        _check_alike(group, "nbytes", "allocated", infos, "allocate the same size on every rank")
        fix = "call set_signal_pad_size alike on every rank"
        _check_alike(group, "pad_bytes", "asked for signal pads of", infos, fix)
        return infos

    @property
    @abstractmethod
    def arrays(self) -> tuple[int, int]:
        """The addresses of the arrays of buffers' and of signal pads' addresses, for kernels."""

    @abstractmethod
    def storage(self, address: int, nbytes: int, keeps: Any) -> torch.UntypedStorage:
        """A storage over bytes of a rank's buffer or pad. It holds ``keeps``."""

    @abstractmethod
    def barrier(self, group: ProcessGroup, what: str, channel: int, timeout_ns: int) -> None: ...

    @abstractmethod
    def put(self, group: ProcessGroup, what: str, rank: int, channel: int, timeout_ns: int) -> None: ...

    @abstractmethod
    def take(self, group: ProcessGroup, what: str, rank: int, channel: int, timeout_ns: int) -> None: ...


def _check_alike(group: ProcessGroup, key: str, verb: str, infos: Sequence[dict[str, Any]], fix: str) -> None:
    by_size = alike([info[key] for info in infos])
    if len(by_size) > 1:
        sides = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)} {verb} {infos[ranks[0]][key]} bytes"
            for ranks in by_size
        )
        raise errors.CollectiveMismatchError(f"rendezvous on group {group.name!r}: sizes differ: {sides}; {fix}.")


class Place(ABC):
    """A kind of memory. ``how``: the words in errors that say how tensors get there."""

    how: str

    @abstractmethod
    def new(
        self, nbytes: int, device: torch.device, group_name: Any, alloc_id: int | None
    ) -> tuple[torch.UntypedStorage, torch.device]:
        """Fresh memory, and its device. The content is undefined."""

    @abstractmethod
    def find(self, tensor: torch.Tensor) -> tuple[Any, Allocation] | None:
        """The memory in which a tensor lies, and facts about it; None for ordinary memory."""

    @abstractmethod
    def meet(self, memory: Any, group: ProcessGroup) -> PeerMemory:
        """Exchange where the pieces lie. Every rank of the group calls this with its own piece."""

    @abstractmethod
    def write_words(self, tensor: torch.Tensor, offset: int, value: int, count: int | None) -> None:
        """Set ``count`` 32-bit words. None: set one word, and a rank that sees it sees everything written before."""


def persistent(
    kept: dict[Any, tuple[M, int]], key: Any, is_lent: bool, alloc_id: int, nbytes: int, allocate: Callable[[], M]
) -> M:
    """The memory that ``kept`` has under ``key``, allocated the first time. ``is_lent``: a tensor that is alive has it.
    Errors have torch's own words, which scripts may look for."""
    if is_lent:
        raise errors.BadArgumentError(
            f"empty_strided_p2p: can not allocate with alloc_id == {alloc_id} because a previous allocation with the "
            "same alloc_id is still active; drop that tensor first, or use another id."
        )
    memory, known = kept[key] = kept.get(key) or (allocate(), nbytes)
    if known != nbytes:
        raise errors.BadArgumentError(
            f"empty_strided_p2p: requested allocation size ({nbytes}) is different from the size of a previous "
            f"allocation with the same alloc_id {alloc_id} ({known}); use another id."
        )
    return memory
