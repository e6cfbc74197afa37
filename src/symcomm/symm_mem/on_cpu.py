"""Symmetric tensors in this rank's arena.

The memory of a tensor is a ctypes array over a piece of the arena. torch keeps it alive while any tensor, view or
storage over it lives; when the last one goes, the piece returns to the arena.
"""

from __future__ import annotations

import ctypes
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm._core import native
from symcomm.group import registry
from symcomm.group.failure import explain_peer
from symcomm.group.process_group import ProcessGroup
from symcomm.memory.arena import Arena, bytes_type, current_arena
from symcomm.symm_mem.place import Allocation, PeerMemory, Place, persistent

if TYPE_CHECKING:
    import torch

Memory = Any  # a ctypes array with an attribute ``allocation``: its holders keep the bytes
SLEEPERS = 64  # bytes behind a signal pad for the word that counts its sleepers


class ArenaAllocation(Allocation):
    def __init__(self, arena: Arena, address: int, nbytes: int):
        super().__init__(address, nbytes)
        self.arena = arena

    @property
    def offset(self) -> int:
        """Where it begins in its arena."""
        return self.arena.offset_of(self.address, self.nbytes)


_memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()  # by address
_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()  # those with allocations


def allocate(arena: Arena, nbytes: int) -> Memory:
    """Fresh memory; its content is undefined."""
    memory: Memory = arena.buffer(max(nbytes, 1))
    memory.allocation = ArenaAllocation(arena, ctypes.addressof(memory), nbytes)
    _memories[memory.allocation.address] = memory
    _arenas.add(arena)
    return memory


def find_memory(address: int) -> Memory | None:
    """The memory in which an address lies, or None."""
    memory = _memories.get(address)
    if memory is not None or not any(a.base <= address < a.base + a.nbytes for a in list(_arenas)):
        return memory
    for start, candidate in list(_memories.items()):  # symmetrize(flat=True) makes tensors inside a piece
        if start <= address < start + max(candidate.allocation.nbytes, 1):
            return candidate
    return None


def part_of(memory: Memory, offset: int, nbytes: int) -> Memory:
    """A part of ``memory``, which it keeps alive."""
    return bytes_type(max(nbytes, 1)).from_buffer(memory, offset)


def storage_over(buffer: Any) -> torch.UntypedStorage:
    """A torch storage over the bytes of a ctypes array, which it keeps alive."""
    import torch

    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def mapped_storage(address: int, nbytes: int, keeps: Any) -> torch.UntypedStorage:
    """A torch storage over memory that a rank owns. It keeps ``keeps`` alive."""
    part: Any = bytes_type(nbytes).from_address(address)
    part.keeps = keeps
    return storage_over(part)


def _arena_of(group_name: Any) -> Arena:
    group = registry.find(group_name) if isinstance(group_name, str) else getattr(group_name, "core", group_name)
    return current_arena() if group is None else group.arena


# alloc_id -> (memory, size), for ever
_kept: weakref.WeakKeyDictionary[Arena, dict[int, tuple[Memory, int]]] = weakref.WeakKeyDictionary()
_lent: weakref.WeakValueDictionary[tuple[Arena, int], Memory] = weakref.WeakValueDictionary()  # while a tensor lives


class ArenaPeers(PeerMemory):
    """Memory in the arenas of one host's ranks."""

    def __init__(self, group: ProcessGroup, offset: int, nbytes: int):
        import torch

        if group.spans_hosts:
            raise errors.ResourceError(
                f"rendezvous: the ranks of group {group.name!r} are on several hosts, and symmetric memory does not "
                "reach beyond one host; use a group of one host's ranks."
            )
        super().__init__(nbytes)
        self.device = torch.device("cpu")
        room = -(-self.pad_bytes // SLEEPERS) * SLEEPERS
        self._pad = group.arena.buffer(room + SLEEPERS)
        ctypes.memset(self._pad, 0, len(self._pad))
        infos = self.exchange(group, offset=offset, pad=ctypes.addressof(self._pad) - group.arena.base)
        bases = [peer.base for peer in group.peers]
        self.buffers = [base + info["offset"] for base, info in zip(bases, infos, strict=True)]
        self.pad_addresses = [base + info["pad"] for base, info in zip(bases, infos, strict=True)]
        self._pads = native.make_pads(group.handle, tuple(self.pad_addresses), room)
        self._arrays = [(ctypes.c_void_p * group.size)(*each) for each in (self.buffers, self.pad_addresses)]

    @property
    def arrays(self) -> tuple[int, int]:
        buffers, pads = map(ctypes.addressof, self._arrays)
        return buffers, pads

    def storage(self, address: int, nbytes: int, keeps: Any) -> torch.UntypedStorage:
        return mapped_storage(address, nbytes, keeps)

    def barrier(self, group: ProcessGroup, what: str, channel: int, timeout_ns: int) -> None:
        group.check_usable()
        _check(group, what, *native.signal_barrier(self._pads, channel, timeout_ns), timeout_ns)

    def put(self, group: ProcessGroup, what: str, rank: int, channel: int, timeout_ns: int) -> None:
        group.check_usable()
        _check(group, what, native.signal_put(self._pads, rank, channel, timeout_ns), rank, timeout_ns)

    def take(self, group: ProcessGroup, what: str, rank: int, channel: int, timeout_ns: int) -> None:
        group.check_usable()
        _check(group, what, native.signal_take(self._pads, rank, channel, timeout_ns), rank, timeout_ns)


def _check(group: ProcessGroup, what: str, status: int, peer: int, timeout_ns: int) -> None:
    if status:
        raise explain_peer(group, what, status, peer, timeout_ns / 1e9)


class OnCPU(Place):
    how = "allocate it with symm_mem.empty, or move it with symcomm.symmetrize"

    def new(
        self, nbytes: int, device: torch.device, group_name: Any, alloc_id: int | None
    ) -> tuple[torch.UntypedStorage, torch.device]:
        arena = _arena_of(group_name)
        make = partial(allocate, arena, nbytes)
        if alloc_id is None:
            memory = make()
        else:
            kept, is_lent = _kept.setdefault(arena, {}), (arena, alloc_id) in _lent
            memory = persistent(kept, alloc_id, is_lent, alloc_id, nbytes, make)
        memory.allocation.group_name = group_name
        part = part_of(memory, 0, nbytes)
        if alloc_id is not None:
            _lent[arena, alloc_id] = part
        return storage_over(part), device

    def find(self, tensor: torch.Tensor) -> tuple[Memory, Allocation] | None:
        memory = find_memory(tensor.untyped_storage().data_ptr())
        return None if memory is None else (memory, memory.allocation)

    def meet(self, memory: Memory, group: ProcessGroup) -> PeerMemory:
        allocation: ArenaAllocation = memory.allocation
        if allocation.arena is not group.arena:
            raise errors.bad_argument(
                "rendezvous", "tensor", "memory of another rank", f"allocated by rank {group.rank} itself"
            )
        group.check_usable()
        return ArenaPeers(group, allocation.offset, allocation.nbytes)

    def write_words(self, tensor: torch.Tensor, offset: int, value: int, count: int | None) -> None:
        native.write_words(tensor.data_ptr() + 4 * offset, value, count or 1)
