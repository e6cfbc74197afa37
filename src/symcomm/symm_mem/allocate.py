"""Makes symmetric tensors, and tells ranks where each other's are. The calls are the same for CPUs and GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm.group.process_group import ProcessGroup
from symcomm.memory.arena import current_arena
from symcomm.symm_mem.groups import find_group
from symcomm.symm_mem.handle import SymmetricMemory, check_dtype, to_sizes
from symcomm.symm_mem.on_cpu import OnCPU
from symcomm.symm_mem.place import Allocation, Place

if TYPE_CHECKING:
    import torch

_on_cpu = OnCPU()


def place_of(device: torch.device) -> Place | None:
    """The kind of symmetric memory that such a device has, or None."""
    if device.type == "cpu":
        return _on_cpu
    if device.type != "cuda":
        return None
    from symcomm.symm_mem.on_gpu import OnGPU

    return OnGPU()


def _find(tensor: Any) -> tuple[Place, Any, Allocation] | None:
    """(the kind of memory that a tensor lies in, that memory, facts about it); None for ordinary memory."""
    import torch

    place = place_of(tensor.device) if tensor.layout is torch.strided else None
    found = None if place is None else place.find(tensor)
    return None if place is None or found is None else (place, *found)


def _check_device(call: str, device: Any) -> tuple[torch.device, Place]:
    import torch

    try:
        chosen = torch.get_default_device() if device is None else torch.device(device)
    except (RuntimeError, TypeError):
        raise errors.bad_argument(call, "device", device, "'cpu' or 'cuda'") from None
    place = place_of(chosen)
    if place is None:
        raise errors.bad_argument(call, "device", str(chosen), "'cpu' or 'cuda'")
    return chosen, place


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

    The same ``alloc_id`` gives the same memory again, with the handles that were made for it, once the previous tensor
    there is gone. ``group_name`` is the group that ``rendezvous`` uses by default: a name, or a group of ours or
    torch.distributed's.

    Raises: BadArgumentError, also while a tensor with that ``alloc_id`` is alive; ResourceError.
    """
    import torch

    call = "empty_strided_p2p"
    chosen, place = _check_device(call, device)
    check_dtype(call, dtype)
    sizes, strides = to_sizes(call, "size", size), to_sizes(call, "stride", stride)
    if len(sizes) != len(strides):
        raise errors.bad_argument(call, "stride", strides, f"as long as size {sizes}")
    last = 0 if 0 in sizes else 1 + sum((n - 1) * s for n, s in zip(sizes, strides, strict=True))
    nbytes = last * dtype.itemsize
    storage, where = place.new(nbytes, chosen, group_name, alloc_id)
    return torch.empty(0, dtype=dtype, device=where).set_(storage, 0, sizes, strides)


def rendezvous(tensor: torch.Tensor, group: Any = None) -> SymmetricMemory:
    """Every rank of ``group`` calls it with its tensor from ``symm_mem.empty``, all of one size.

    ``group``: one of ours, one of torch.distributed's on our backend, the name of either, or None for the default
    group: ours, or else torch's. The ranks talk to each other the first time only; after that the same memory gives
    the same answer at once.

    Raises: BadArgumentError, CollectiveMismatchError, RankFailedError, DeadlineError, ResourceError.
    """
    import torch

    if not isinstance(tensor, torch.Tensor):
        raise errors.bad_argument("rendezvous", "tensor", type(tensor).__name__, "a tensor from symm_mem.empty")
    found = _find(tensor)
    if found is None:
        what = f"a tensor in ordinary memory of {tensor.device}"
        how = (place_of(tensor.device) or _on_cpu).how
        raise errors.bad_argument("rendezvous", "tensor", what, "in symmetric memory", how)
    place, memory, allocation = found
    chosen = find_group("rendezvous", allocation.group_name if group is None else group)
    if chosen not in allocation.peer_memories:
        allocation.peer_memories[chosen] = place.meet(memory, chosen)
    return _handle(tensor, chosen, memory, allocation)


def find_meeting(tensor: torch.Tensor, preferred: ProcessGroup | None = None) -> SymmetricMemory | None:
    """The handle for the one group in which there was a rendezvous with the tensor's memory; of several, for the
    preferred one; or None."""
    found = _find(tensor)
    if found is None:
        return None
    _, memory, allocation = found
    groups = list(allocation.peer_memories)
    if len(groups) != 1:
        groups = [group for group in groups if group is preferred]
    return _handle(tensor, groups[0], memory, allocation) if groups else None


def _handle(tensor: torch.Tensor, group: ProcessGroup, memory: Any, allocation: Allocation) -> SymmetricMemory:
    offset = tensor.untyped_storage().data_ptr() - allocation.address
    return SymmetricMemory(group, memory, allocation.peer_memories[group], offset)


def is_symm_mem_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in symmetric memory, however it got there.

    Raises: nothing."""
    import torch

    return isinstance(tensor, torch.Tensor) and _find(tensor) is not None


def memory_stats() -> dict[str, int]:
    """Bytes of this rank's arena: in use now, the most ever in use, taken from the system, idle, and the limit.

    ``idle_bytes`` are kept for the next allocation; ``trim()`` returns them. A part of ``used_bytes`` may not be taken
    from the system yet: groups reserve room for messages, whose pages exist once they are used.

    Raises: nothing.
    """
    arena = current_arena()
    return {
        "used_bytes": arena.used_bytes,
        "peak_bytes": arena.peak_bytes,
        "reserved_bytes": arena.reserved_bytes,
        "idle_bytes": arena.idle_bytes,
        "limit_bytes": arena.own_bytes,
    }


def trim() -> int:
    """Return idle pages of this rank's arena to the system. Returns how many bytes they were.

    Raises: nothing."""
    return current_arena().trim()
