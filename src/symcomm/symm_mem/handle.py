"""SymmetricMemory: what ranks can do with each other's memory after a rendezvous."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm.group.process_group import ProcessGroup
from symcomm.symm_mem import settings
from symcomm.symm_mem.place import PeerMemory

if TYPE_CHECKING:
    import torch


def to_sizes(call: str, name: str, values: Any) -> tuple[int, ...]:
    try:
        sizes = tuple(operator.index(v) for v in values)
    except TypeError:
        raise errors.bad_argument(call, name, values, "a sequence of ints") from None
    if any(s < 0 for s in sizes):
        raise errors.bad_argument(call, name, sizes, "a sequence of ints that are not negative")
    return sizes


def check_rank(call: str, name: str, rank: Any, size: int) -> None:
    if not isinstance(rank, int) or not 0 <= rank < size:
        raise errors.bad_argument(call, name, rank, f"in [0, {size - 1}], a rank of this group")


def check_dtype(call: str, dtype: Any) -> None:
    import torch

    if not isinstance(dtype, torch.dtype):
        raise errors.bad_argument(call, "dtype", dtype, "a torch.dtype")


def _start_of(call: str, storage_offset: Any, dtype: Any) -> int:
    """The byte at which element ``storage_offset`` begins."""
    check_dtype(call, dtype)
    if not hasattr(storage_offset, "__index__") or storage_offset < 0:
        raise errors.bad_argument(call, "storage_offset", storage_offset, "a number of elements, not negative")
    return storage_offset * dtype.itemsize


class SymmetricMemory:
    """The same piece of memory on every rank of a group, made by ``rendezvous``.

    It keeps this rank's piece alive. Peers' pieces live as long as the peers keep theirs: like a collective, a handle
    is used while all ranks still have it.

    Raises: BadArgumentError; RankFailedError and DeadlineError from ``barrier``, ``put_signal`` and ``wait_signal``.
    """

    def __init__(self, group: ProcessGroup, memory: Any, peer_memory: PeerMemory, offset: int):
        self.group = group
        self.rank = group.rank
        self.world_size = group.size
        self.offset = offset  # bytes from the start of the buffer to the tensor given to rendezvous()
        self._memory = memory
        self._peer_memory = peer_memory

    def as_kind(self, kind: type[SymmetricMemory]) -> SymmetricMemory:
        """This handle, as an object of a subclass."""
        other = object.__new__(kind)
        SymmetricMemory.__init__(other, self.group, self._memory, self._peer_memory, self.offset)
        return other

    def __repr__(self) -> str:
        return (
            f"<SymmetricMemory of {self.buffer_size} bytes, rank {self.rank} of {self.world_size} in "
            f"group {self.group.name!r}>"
        )

    # --- where things are ---------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        return self._peer_memory.device

    @property
    def buffer_ptrs(self) -> list[int]:
        """The addresses at which this process has mapped each rank's buffer."""
        return list(self._peer_memory.buffers)

    @property
    def buffer_size(self) -> int:
        return self._peer_memory.nbytes

    @property
    def buffer_ptrs_dev(self) -> int:
        """The address of an array of the buffers' addresses, in the device's memory, for kernels."""
        return self._peer_memory.arrays[0]

    @property
    def signal_pad_ptrs(self) -> list[int]:
        return list(self._peer_memory.pad_addresses)

    @property
    def signal_pad_size(self) -> int:
        return self._peer_memory.pad_bytes

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """The address of an array of the signal pads' addresses, for kernels."""
        return self._peer_memory.arrays[1]

    @property
    def multicast_ptr(self) -> int:
        """0: there is no multicast."""
        return 0

    has_multicast_support = staticmethod(settings.has_multicast_support)

    def get_peer_cft_handle(self, peer: int) -> tuple[int, int]:
        """Refused: in torch 2.15 these are NCCL's endpoints on a GPU, and there are none here."""
        raise errors.CallerError(f"get_peer_cft_handle({peer}): only NCCL has such endpoints; use get_buffer.")

    def get_multimem_cft_handle(self) -> tuple[int, int]:
        raise errors.CallerError("get_multimem_cft_handle: only NCCL has such endpoints; use get_buffer.")

    # --- tensors over peers' memory ---------------------------------------------------------------------------

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """A contiguous tensor over ``rank``'s buffer, from element ``storage_offset`` on."""
        return self._view("get_buffer", "rank", rank, sizes, dtype, _start_of("get_buffer", storage_offset, dtype))

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over ``peer``'s counterpart of the tensor that this handle was made for."""
        return self._view("get_remote_tensor", "peer", peer, sizes, dtype, self.offset)

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] = (), dtype: torch.dtype | None = None, storage_offset: int = 0
    ) -> torch.Tensor:
        """A tensor over ``rank``'s signal pad; by default, all of its uint32 words."""
        import torch

        dtype = torch.uint32 if dtype is None else dtype
        start = _start_of("get_signal_pad", storage_offset, dtype)
        sizes = to_sizes("get_signal_pad", "sizes", sizes) or (self.signal_pad_size // dtype.itemsize,)
        return self._view("get_signal_pad", "rank", rank, sizes, dtype, start, of_pad=True)

    def _view(
        self, call: str, name: str, rank: int, sizes: Sequence[int], dtype: Any, start: int, of_pad: bool = False
    ) -> torch.Tensor:
        """A tensor over ``rank``'s buffer, or its signal pad, from byte ``start`` on."""
        import torch

        memory = self._peer_memory
        bases, room = (memory.pad_addresses, memory.pad_bytes) if of_pad else (memory.buffers, memory.nbytes)
        check_rank(call, name, rank, self.world_size)
        check_dtype(call, dtype)
        sizes = to_sizes(call, "sizes", sizes)
        end = start + math.prod(sizes) * dtype.itemsize
        if end > room:
            raise errors.bad_argument(call, "sizes", f"{sizes}, up to byte {end}", f"within the {room} bytes allocated")
        storage = memory.storage(bases[rank] + start, max(end - start, 1), self)
        strides = torch._prims_common.make_contiguous_strides_for(sizes)
        return torch.empty(0, dtype=dtype, device=self.device).set_(storage, 0, sizes, strides)

    def boxed(self) -> SymmetricMemory:
        """The handle itself: Python code needs no box around it."""
        return self

    # --- signals ------------------------------------------------------------------------------------------------

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Return once every rank has come to the barrier of this channel. timeout_ms 0: the group's timeout.

        On a GPU this and the next two calls run in the order of the current stream: they return at once, and later work
        in the stream waits."""
        self._check_channel("barrier", channel)
        timeout_ns = self.timeout_ns("barrier", timeout_ms)
        self._peer_memory.barrier(self.group, f"barrier(channel={channel})", channel, timeout_ns)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signal ``dst_rank``, once it has taken the previous signal."""
        self._signal("put_signal", "dst_rank", self._peer_memory.put, dst_rank, channel, timeout_ms)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for a signal of ``src_rank`` and take it. All that it wrote before the signal is then visible."""
        self._signal("wait_signal", "src_rank", self._peer_memory.take, src_rank, channel, timeout_ms)

    def _signal(self, call: str, name: str, act: Callable[..., None], peer: int, channel: int, timeout_ms: int) -> None:
        check_rank(call, name, peer, self.world_size)
        self._check_channel(call, channel)
        act(self.group, f"{call}({name}={peer}, channel={channel})", peer, channel, self.timeout_ns(call, timeout_ms))

    def _check_channel(self, call: str, channel: int) -> None:
        channels = self.signal_pad_size // (4 * self.world_size)
        if not isinstance(channel, int) or not 0 <= channel < channels:
            none = f"absent: {self.signal_pad_size} bytes have room for none"
            allowed = f"0 to {channels - 1}, the maximum supported channel" if channels else none
            fix = "make more with set_signal_pad_size before rendezvous"
            raise errors.bad_argument(call, "channel", channel, allowed, fix)

    def timeout_ns(self, call: str, timeout_ms: int) -> int:
        if not hasattr(timeout_ms, "__index__") or timeout_ms < 0:
            raise errors.bad_argument(call, "timeout_ms", timeout_ms, "0 (the group's timeout) or more")
        return timeout_ms * 1_000_000 or self.group.timeout_ns
