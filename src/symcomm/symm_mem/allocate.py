"""Tensors in this rank's arena.

The memory of a tensor is a ctypes array over a piece of the arena. torch keeps it alive while any tensor, view or
storage over it lives; when the last one goes, the piece returns to the arena.
"""

from __future__ import annotations

import ctypes
import operator
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm.group import registry
from symcomm.memory.arena import Arena, bytes_type, current_arena

if TYPE_CHECKING:
    import torch

Memory = Any  # a ctypes array with an attribute ``allocation``: whoever holds it keeps the bytes


class Allocation:
    """What is known of a piece of memory. The memory holds it, never the other way round."""

    def __init__(self, arena: Arena, address: int, nbytes: int):
        self.arena = arena
        self.address = address
        self.nbytes = nbytes
        self.group_name: Any = None  # or the group itself, that rendezvous() uses unless told another
        self.peer_memories: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by group, see handle.py

    @property
    def offset(self) -> int:
        """Where it begins in its arena."""
        return self.arena.offset_of(self.address, self.nbytes)


_memories: weakref.WeakValueDictionary[int, Memory] = weakref.WeakValueDictionary()  # by address
_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()  # all that something was allocated in


def allocate(arena: Arena, nbytes: int) -> Memory:
    """Fresh memory; its content is whatever was there before."""
    memory: Memory = arena.buffer(max(nbytes, 1))
    memory.allocation = Allocation(arena, ctypes.addressof(memory), nbytes)
    _memories[memory.allocation.address] = memory
    _arenas.add(arena)
    return memory


def find_memory(address: int) -> Memory | None:
    """The memory that an address lies in, or None."""
    memory = _memories.get(address)
    if memory is not None or not any(a.base <= address < a.base + a.nbytes for a in list(_arenas)):
        return memory
    for start, candidate in list(_memories.items()):  # an address inside, as symmetrize(flat=True) makes them
        if start <= address < start + max(candidate.allocation.nbytes, 1):
            return candidate
    return None


def part_of(memory: Memory, offset: int, nbytes: int) -> Memory:
    """Some bytes of ``memory``, which they keep alive."""
    return bytes_type(max(nbytes, 1)).from_buffer(memory, offset)


def storage_over(buffer: Any) -> torch.UntypedStorage:
    """A torch storage over the bytes of a ctypes array, which it keeps alive."""
    import torch

    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def to_sizes(call: str, name: str, values: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(v) for v in values)
    except TypeError:
        raise errors.bad_argument(call, name, values, "a sequence of ints") from None
    if any(s < 0 for s in sizes):
        raise errors.bad_argument(call, name, sizes, "a sequence of ints that are not negative")
    return sizes


def check_dtype(call: str, dtype: Any) -> None:
    import torch

    if not isinstance(dtype, torch.dtype):
        raise errors.bad_argument(call, "dtype", dtype, "a torch.dtype")


def _check_device(call: str, device: Any) -> torch.device:
    import torch

    try:
        place = torch.get_default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise errors.bad_argument(call, "device", device, "'cpu' or 'cuda'") from None
    if place.type not in ("cpu", "cuda"):
        raise errors.bad_argument(call, "device", str(place), "'cpu' or 'cuda'")
    return place


def empty(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """Like ``torch.empty``, in memory that peers can map: ``empty(2, 3)`` or ``empty((2, 3))``.

    Raises: BadArgumentError, ResourceError."""
    import torch

    if len(size) == 1 and isinstance(size[0], Sequence):
        size = tuple(size[0])
    sizes = to_sizes("symm_mem.empty", "size", size)
    stride = torch._prims_common.make_contiguous_strides_for(sizes)
    return empty_strided_p2p(sizes, stride, torch.get_default_dtype() if dtype is None else dtype, device)


def zeros(*size: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
    """Like ``torch.zeros``, in memory that peers can map.

    Raises: BadArgumentError, ResourceError."""
    return empty(*size, dtype=dtype, device=device).zero_()


def empty_strided_p2p(
    size: Sequence[int],
    stride: Sequence[int],
    dtype: torch.dtype,
    device: Any = None,
    group_name: Any = None,
    alloc_id: int | None = None,
) -> torch.Tensor:
    """Like ``torch.empty_strided``, in memory that peers can map.

    The same ``alloc_id`` gives the same memory again, with the handles that were made for it, once the tensor it was
    given out as is gone. ``group_name`` is the group that ``rendezvous`` uses unless it is told another: a name, or a
    group of ours or torch.distributed's.

    Raises: BadArgumentError, also while a tensor with that ``alloc_id`` is alive; ResourceError.
    """
    import torch

    call = "empty_strided_p2p"
    place = _check_device(call, device)
    check_dtype(call, dtype)
    sizes, strides = to_sizes(call, "size", size), to_sizes(call, "stride", stride)
    if len(sizes) != len(strides):
        raise errors.bad_argument(call, "stride", strides, f"as long as size {sizes}")
    last = 0 if 0 in sizes else 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    nbytes = last * dtype.itemsize
    if place.type == "cuda":
        from symcomm.symm_mem import on_gpu

        return on_gpu.empty_strided(sizes, strides, nbytes, dtype, place, group_name, alloc_id)
    arena = _arena_of(group_name)
    memory = allocate(arena, nbytes) if alloc_id is None else _persistent(arena, alloc_id, nbytes)
    memory.allocation.group_name = group_name
    part = part_of(memory, 0, nbytes)
    if alloc_id is not None:
        _lent[arena, alloc_id] = part
    return torch.empty(0, dtype=dtype, device="cpu").set_(storage_over(part), 0, sizes, strides)


def _arena_of(group_name: Any) -> Arena:
    group = registry.find(group_name) if isinstance(group_name, str) else getattr(group_name, "core", group_name)
    return current_arena() if group is None else group.arena


_kept: weakref.WeakKeyDictionary[Arena, dict[int, Memory]] = weakref.WeakKeyDictionary()  # by alloc_id, for ever
_lent: weakref.WeakValueDictionary[tuple[Arena, int], Memory] = weakref.WeakValueDictionary()  # while a tensor lives


def _persistent(arena: Arena, alloc_id: int, nbytes: int) -> Memory:
    kept = _kept.setdefault(arena, {})
    if (arena, alloc_id) in _lent:
        raise still_active(alloc_id)
    if alloc_id not in kept:
        kept[alloc_id] = allocate(arena, nbytes)
    known = kept[alloc_id].allocation.nbytes
    if known != nbytes:
        raise other_size(alloc_id, nbytes, known)
    return kept[alloc_id]


def still_active(alloc_id: int) -> errors.BadArgumentError:
    """In the words of torch's own, which scripts may look for; so is the next."""
    return errors.BadArgumentError(
        f"empty_strided_p2p: can not allocate with alloc_id == {alloc_id} because a previous allocation with the same "
        "alloc_id is still active; drop that tensor first, or use another id."
    )


def other_size(alloc_id: int, nbytes: int, known: int) -> errors.BadArgumentError:
    return errors.BadArgumentError(
        f"empty_strided_p2p: requested allocation size ({nbytes}) is different from the size of a previous allocation "
        f"with the same alloc_id {alloc_id} ({known}); use another id."
    )


def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in symmetric memory, by whichever way it came there.

    Raises: nothing."""
    import torch

    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        return False
    if tensor.is_cuda:
        from symcomm.symm_mem import on_gpu

        return on_gpu.find_piece(tensor) is not None
    if not tensor.is_cpu:
        return False
    return find_memory(tensor.untyped_storage().data_ptr()) is not None


def memory_stats() -> dict[str, int]:
    """Bytes of this rank's arena: in use now, the most ever in use, taken from the system, idle, and the limit.

    ``idle_bytes`` are kept for the next allocation; ``trim()`` returns them. A part of ``used_bytes`` may not be taken
    yet: groups reserve room for messages that exists once it is used.

    Raises: nothing.
    """
    arena = current_arena()
    return {
        "used_bytes": arena.used_bytes,
        "peak_bytes": arena.peak_bytes,
        "reserved_bytes": arena.reserved_bytes,
        "idle_bytes": arena.idle_bytes,
        "limit_bytes": arena.nbytes,
    }


def trim() -> int:
    """Return idle pages of this rank's arena to the system; says how many bytes that were.

    Raises: nothing."""
    return current_arena().trim()
