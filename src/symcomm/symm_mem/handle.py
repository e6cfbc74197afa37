"""rendezvous(): ranks learn where each other's memory is. SymmetricMemory: what one does with it."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm._core import native
from symcomm.errors import format_ranks
from symcomm.group.failure import explain_peer
from symcomm.group.process_group import ProcessGroup
from symcomm.memory.arena import bytes_type
from symcomm.symm_mem import settings
from symcomm.symm_mem.allocate import check_dtype, find_memory, storage_over, to_sizes
from symcomm.symm_mem.groups import find_group

if TYPE_CHECKING:
    import torch

SLEEPERS = 64  # bytes behind a signal pad for the word that counts who sleeps on it


# --- rendezvous ----------------------------------------------------------------------------------------


class PeerMemory:
    """Where every rank has the same piece of memory, and its signal pad. Lives as long as our own piece does."""

    def __init__(self, group: ProcessGroup, offset: int, nbytes: int):
        if group.spans_hosts:
            raise errors.ResourceError(
                f"rendezvous: the ranks of group {group.name!r} are on several hosts, and symmetric memory reaches no "
                "farther than one; use a group of one host's ranks."
            )
        self.nbytes = nbytes
        self.pad_bytes = settings.get_signal_pad_size()
        self._pad = group.arena.buffer(_pad_total(self.pad_bytes))
        ctypes.memset(self._pad, 0, len(self._pad))
        pad_offset = ctypes.addressof(self._pad) - group.arena.base
        info = {"offset": offset, "nbytes": nbytes, "pad": pad_offset, "pad_bytes": self.pad_bytes}
        infos = [json.loads(item) for item in group.all_gather_bytes(json.dumps(info).encode())]
        check_alike(group, "nbytes", "allocated", infos, "allocate the same size on every rank")
        check_alike(
            group, "pad_bytes", "asked for signal pads of", infos, "call set_signal_pad_size alike on every rank"
        )
        bases = [peer.base for peer in group.peers]
        self.buffers = [base + c["offset"] for base, c in zip(bases, infos, strict=True)]
        self.pad_addresses = [base + c["pad"] for base, c in zip(bases, infos, strict=True)]
        self.pads = native.make_pads(group.handle, tuple(self.pad_addresses), _pad_total(self.pad_bytes) - SLEEPERS)
        self.buffer_array = (ctypes.c_void_p * group.size)(*self.buffers)
        self.pad_array = (ctypes.c_void_p * group.size)(*self.pad_addresses)


def _pad_total(pad_bytes: int) -> int:
    return -(-pad_bytes // SLEEPERS) * SLEEPERS + SLEEPERS


def check_alike(group: ProcessGroup, key: str, verb: str, infos: Sequence[dict[str, Any]], fix: str) -> None:
    by_size: dict[int, list[int]] = {}
    for rank, info in enumerate(infos):
        by_size.setdefault(info[key], []).append(rank)
    if len(by_size) > 1:
        sides = "; ".join(
            f"rank{'s' if len(ranks) > 1 else ''} {format_ranks(ranks)} {verb} {size} bytes"
            for size, ranks in by_size.items()
        )
        raise errors.CollectiveMismatchError(f"rendezvous on group {group.name!r}: sizes differ: {sides}; {fix}.")


def _start_of(call: str, storage_offset: Any, dtype: Any) -> int:
    """The byte that element ``storage_offset`` begins at."""
    check_dtype(call, dtype)
    if not hasattr(storage_offset, "__index__") or storage_offset < 0:
        raise errors.bad_argument(call, "storage_offset", storage_offset, "a number of elements, not negative")
    return storage_offset * dtype.itemsize


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
    if tensor.is_cuda:
        from symcomm.symm_mem import on_gpu

        return on_gpu.rendezvous(tensor, group)
    address = tensor.untyped_storage().data_ptr() if tensor.is_cpu and tensor.layout is torch.strided else 0
    memory = find_memory(address) if address else None
    if memory is None:
        what = f"a tensor in ordinary memory of {tensor.device}"
        fix = "allocate it with symm_mem.empty, or move it with symcomm.symmetrize"
        raise errors.bad_argument("rendezvous", "tensor", what, "in symmetric memory", fix)
    allocation = memory.allocation
    chosen = find_group("rendezvous", allocation.group_name if group is None else group)
    if allocation.arena is not chosen.arena:
        raise errors.bad_argument(
            "rendezvous", "tensor", "memory of another rank", f"allocated by rank {chosen.rank} itself"
        )
    peer_memory = allocation.peer_memories.get(chosen)
    if peer_memory is None:
        chosen.check_usable()
        peer_memory = allocation.peer_memories[chosen] = PeerMemory(chosen, allocation.offset, allocation.nbytes)
    return SymmetricMemory(chosen, memory, peer_memory, address - allocation.address)


def find_meeting(tensor: torch.Tensor) -> SymmetricMemory | None:
    """The handle of the only group that the tensor's memory has met with; None for none or several."""
    memory = find_memory(tensor.untyped_storage().data_ptr())
    if memory is None or len(memory.allocation.peer_memories) != 1:
        return None
    [(group, peer_memory)] = memory.allocation.peer_memories.items()
    offset = tensor.untyped_storage().data_ptr() - memory.allocation.address
    return SymmetricMemory(group, memory, peer_memory, offset)


class SymmetricMemory:
    """The same piece of memory on every rank of a group, made by ``rendezvous``.

    It keeps this rank's piece alive. Peers' pieces live as long as the peers keep theirs: like a collective, a handle
    is used while all ranks still have it.

    Raises: BadArgumentError; RankFailedError and DeadlineError from ``barrier``, ``put_signal`` and ``wait_signal``.
    """

    def __init__(self, group: ProcessGroup, memory: Any, peer_memory: Any, offset: int):
        self.group = group
        self.rank = group.rank
        self.world_size = group.size
        self.offset = offset  # bytes from the start of the buffer to the tensor that was met with
        self._memory = memory
        self._peer_memory = peer_memory

    def __repr__(self) -> str:
        return (
            f"<SymmetricMemory of {self.buffer_size} bytes, rank {self.rank} of {self.world_size} in "
            f"group {self.group.name!r}>"
        )

    # --- where things are ---------------------------------------------------------------------------------

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cpu")

    @property
    def buffer_ptrs(self) -> list[int]:
        """Where each rank's buffer is mapped in this process."""
        return list(self._peer_memory.buffers)

    @property
    def buffer_size(self) -> int:
        return self._peer_memory.nbytes

    @property
    def buffer_ptrs_dev(self) -> int:
        """Address of an array of the buffers' addresses, for kernels. On the CPU that is host memory too."""
        return ctypes.addressof(self._peer_memory.buffer_array)

    @property
    def signal_pad_ptrs(self) -> list[int]:
        return list(self._peer_memory.pad_addresses)

    @property
    def signal_pad_size(self) -> int:
        return self._peer_memory.pad_bytes

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """Address of an array of the signal pads' addresses, for kernels."""
        return ctypes.addressof(self._peer_memory.pad_array)

    @property
    def multicast_ptr(self) -> int:
        """0: there is no multicast on the CPU."""
        return 0

    has_multicast_support = staticmethod(settings.has_multicast_support)

    def get_peer_cft_handle(self, peer: int) -> tuple[int, int]:
        """NCCL's endpoints on a GPU, in torch 2.15: there are none here."""
        raise errors.CallerError(f"get_peer_cft_handle({peer}): only NCCL has such endpoints; use get_buffer.")

    def get_multimem_cft_handle(self) -> tuple[int, int]:
        raise errors.CallerError("get_multimem_cft_handle: only NCCL has such endpoints; use get_buffer.")

    # --- tensors over peers' memory ---------------------------------------------------------------------------

    def get_buffer(self, rank: int, sizes: Sequence[int], dtype: torch.dtype, storage_offset: int = 0) -> torch.Tensor:
        """A contiguous tensor over ``rank``'s buffer, from element ``storage_offset`` on."""
        start = _start_of("get_buffer", storage_offset, dtype)
        return self._view("get_buffer", "rank", self._peer_memory.buffers, self.buffer_size, rank, sizes, dtype, start)

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor over ``peer``'s counterpart of the tensor this handle was made from."""
        buffers = self._peer_memory.buffers
        return self._view("get_remote_tensor", "peer", buffers, self.buffer_size, peer, sizes, dtype, self.offset)

    def get_signal_pad(
        self, rank: int, sizes: Sequence[int] = (), dtype: torch.dtype | None = None, storage_offset: int = 0
    ) -> torch.Tensor:
        """A tensor over ``rank``'s signal pad: uint32 words, all of them, unless told otherwise."""
        import torch

        dtype = torch.uint32 if dtype is None else dtype
        start = _start_of("get_signal_pad", storage_offset, dtype)
        sizes = to_sizes("get_signal_pad", "sizes", sizes) or (self.signal_pad_size // dtype.itemsize,)
        pads = self._peer_memory.pad_addresses
        return self._view("get_signal_pad", "rank", pads, self.signal_pad_size, rank, sizes, dtype, start)

    def _view(
        self,
        call: str,
        name: str,
        bases: Sequence[int],
        room: int,
        rank: int,
        sizes: Sequence[int],
        dtype: Any,
        start: int,
    ) -> torch.Tensor:
        import torch

        self._check_rank(call, name, rank)
        check_dtype(call, dtype)
        sizes = to_sizes(call, "sizes", sizes)
        end = start + math.prod(sizes) * dtype.itemsize
        if end > room:
            raise errors.bad_argument(call, "sizes", f"{sizes}, up to byte {end}", f"within the {room} bytes allocated")
        storage = self._storage(bases[rank] + start, max(end - start, 1))
        strides = torch._prims_common.make_contiguous_strides_for(sizes)
        return torch.empty(0, dtype=dtype, device=self.device).set_(storage, 0, sizes, strides)

    def _storage(self, address: int, nbytes: int) -> torch.UntypedStorage:
        """Bytes of some rank's buffer or pad; they keep this handle."""
        part: Any = bytes_type(nbytes).from_address(address)
        part.keeps = self
        return storage_over(part)

    def boxed(self) -> SymmetricMemory:
        """The handle itself: Python code needs no box around it."""
        return self

    # --- signals ------------------------------------------------------------------------------------------------

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Return once every rank has come to the barrier of this channel. timeout_ms 0: the group's timeout."""
        self._check_channel("barrier", channel)
        self.group.check_usable()
        status, culprit = native.signal_barrier(self._peer_memory.pads, channel, self.timeout_ns("barrier", timeout_ms))
        if status:
            raise self._explain(f"barrier(channel={channel})", status, culprit, timeout_ms)

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signal ``dst_rank``, once it has taken the signal before this one."""
        self._signal("put_signal", "dst_rank", native.signal_put, dst_rank, channel, timeout_ms)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for a signal of ``src_rank`` and take it. What it wrote before the signal is visible then."""
        self._signal("wait_signal", "src_rank", native.signal_take, src_rank, channel, timeout_ms)

    def _signal(self, call: str, name: str, act: Callable[..., Any], peer: int, channel: int, timeout_ms: int) -> None:
        self._check_rank(call, name, peer)
        self._check_channel(call, channel)
        self.group.check_usable()
        status = act(self._peer_memory.pads, peer, channel, self.timeout_ns(call, timeout_ms))
        if status:
            raise self._explain(f"{call}({name}={peer}, channel={channel})", status, peer, timeout_ms)

    def _check_rank(self, call: str, name: str, rank: int) -> None:
        if not isinstance(rank, int) or not 0 <= rank < self.world_size:
            raise errors.bad_argument(call, name, rank, f"in [0, {self.world_size - 1}], a rank of this group")

    def _check_channel(self, call: str, channel: int) -> None:
        channels = self.signal_pad_size // (4 * self.world_size)
        if not isinstance(channel, int) or not 0 <= channel < channels:
            range_ = (
                f"0 to {channels - 1}, the maximum supported channel"
                if channels
                else (f"absent: {self.signal_pad_size} bytes have room for none")
            )
            fix = "make more with set_signal_pad_size before rendezvous"
            raise errors.bad_argument(call, "channel", channel, range_, fix)

    def timeout_ns(self, call: str, timeout_ms: int) -> int:
        if not hasattr(timeout_ms, "__index__") or timeout_ms < 0:
            raise errors.bad_argument(call, "timeout_ms", timeout_ms, "0 (the group's timeout) or more")
        return timeout_ms * 1_000_000 or self.group.timeout_ns

    def _explain(self, what: str, status: int, peer: int, timeout_ms: int) -> errors.SymcommError:
        return explain_peer(self.group, what, status, peer, timeout_ms / 1000 or self.group.timeout)
