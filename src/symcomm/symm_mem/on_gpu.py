"""Symmetric tensors in a GPU's memory: the same calls as on the CPU, in the order of streams.

Signals are words in GPU memory, so that kernels of one's own may use them too. A stream puts a signal by writing 1 once
the word is 0, and takes it by waiting for 1 and writing 0.
"""

from __future__ import annotations

import contextlib
import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from symcomm import errors
from symcomm.cuda import devices
from symcomm.cuda.driver import WAIT_EQUAL, driver
from symcomm.cuda.failure import CudaFailures, explain_cuda_errors
from symcomm.cuda.group import CudaGroup, device_group
from symcomm.cuda.pool import PoolBuffer, RawMemory, find_block, opened_pieces, pool_of, storage_over
from symcomm.cuda.watchdog import Outstanding
from symcomm.group.process_group import ProcessGroup
from symcomm.memory.arena import current_arena
from symcomm.symm_mem import settings
from symcomm.symm_mem.allocate import other_size, still_active
from symcomm.symm_mem.groups import find_group
from symcomm.symm_mem.handle import SymmetricMemory, check_alike

if TYPE_CHECKING:
    import torch


class CudaAllocation:
    """What is known of a piece of memory, as on the CPU."""

    def __init__(self, device: int, nbytes: int):
        self.device = device
        self.nbytes = nbytes
        self.group_name: Any = None
        self.peer_memories: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


_pieces: weakref.WeakValueDictionary[int, PoolBuffer] = weakref.WeakValueDictionary()  # by address
_facts: weakref.WeakKeyDictionary[PoolBuffer, CudaAllocation] = weakref.WeakKeyDictionary()
_Id = tuple[bytes, int, int]  # the rank's arena (ranks may be threads), device, alloc_id
_kept: dict[_Id, PoolBuffer] = {}  # for ever
_lent: weakref.WeakValueDictionary[_Id, RawMemory] = weakref.WeakValueDictionary()  # while a tensor lives


@contextlib.contextmanager
def using(device: torch.device) -> Iterator[None]:
    """The driver's calls are about ``device``: its default stream has the number 0, as every other GPU's has."""
    import torch

    with torch.cuda.device(device):
        driver().enter(device.index)
        yield


def empty_strided(
    sizes: Sequence[int], strides: Sequence[int], nbytes: int, dtype: torch.dtype, device: torch.device,
    group_name: Any, alloc_id: int | None,
) -> torch.Tensor:  # fmt: skip
    """``empty_strided_p2p`` on a GPU."""
    import torch

    devices.need_cuda("symm_mem.empty")
    index = torch.cuda.current_device() if device.index is None else device.index
    torch.cuda._lazy_init()
    source: Any
    if alloc_id is None:
        source = piece = _allocate(index, nbytes)
    else:
        key = (current_arena().nonce, index, alloc_id)
        piece = _persistent(key, nbytes)
        source = _lent[key] = RawMemory(piece.address, piece.nbytes, piece)
    _facts[piece].group_name = group_name
    return torch.empty(0, dtype=dtype, device=torch.device("cuda", index)).set_(
        storage_over(source, index), 0, tuple(sizes), tuple(strides)
    )


def _allocate(device: int, nbytes: int) -> PoolBuffer:
    piece = pool_of(device).allocate(nbytes)
    _pieces[piece.address] = piece
    _facts[piece] = CudaAllocation(device, nbytes)
    return piece


def _persistent(key: _Id, nbytes: int) -> PoolBuffer:
    _, device, alloc_id = key
    if key in _lent:
        raise still_active(alloc_id)
    if key not in _kept:
        _kept[key] = _allocate(device, nbytes)
    known = _facts[_kept[key]].nbytes
    if known != nbytes:
        raise other_size(alloc_id, nbytes, known)
    return _kept[key]


def find_piece(tensor: torch.Tensor) -> PoolBuffer | None:
    """The symmetric memory that a CUDA tensor lies in, or None."""
    address = tensor.untyped_storage().data_ptr()
    piece = _pieces.get(address)
    if piece is not None or find_block(tensor.get_device(), address) is None:
        return piece
    # An address inside, as get_buffer() with an offset makes them.
    return next((p for start, p in list(_pieces.items()) if start <= address < start + p.nbytes), None)


# --- rendezvous --------------------------------------------------------------------------------------------------


class CudaPeerMemory:
    """Where every rank has the same piece of memory, and its signal pad."""

    def __init__(self, gpu: CudaGroup, piece: PoolBuffer, nbytes: int):
        import torch

        self.gpu = gpu
        self.nbytes = nbytes
        self.pad_bytes = settings.get_signal_pad_size()
        self._pad = pool_of(gpu.device).allocate(self.pad_bytes)
        place = torch.device("cuda", gpu.device)
        torch.as_tensor(self._pad, device=place).zero_()
        torch.cuda.current_stream(place).synchronize()  # nobody signals before it is clear
        info = {
            "handle": piece.block.handle.hex(), "offset": piece.offset, "nbytes": nbytes,
            "pad_handle": self._pad.block.handle.hex(), "pad": self._pad.offset, "pad_bytes": self.pad_bytes,
        }  # fmt: skip
        infos = [json.loads(item) for item in gpu.core.all_gather_bytes(json.dumps(info).encode())]
        check_alike(gpu.core, "nbytes", "allocated", infos, "allocate the same size on every rank")
        fix = "call set_signal_pad_size alike on every rank"
        check_alike(gpu.core, "pad_bytes", "asked for signal pads of", infos, fix)
        driver().enter(gpu.device)
        self.buffers, self.pad_addresses = opened_pieces(infos), opened_pieces(infos, "pad_handle", "pad")
        self.buffer_array = torch.tensor(self.buffers, dtype=torch.int64, device=place)
        self.pad_array = torch.tensor(self.pad_addresses, dtype=torch.int64, device=place)


def rendezvous(tensor: torch.Tensor, group: Any = None) -> GpuSymmetricMemory:
    """See ``symm_mem.rendezvous``."""
    piece = find_piece(tensor)
    if piece is None:
        what = f"a tensor in ordinary memory of {tensor.device}"
        fix = "allocate it with symm_mem.empty(..., device='cuda')"
        raise errors.bad_argument("rendezvous", "tensor", what, "in symmetric memory", fix)
    facts = _facts[piece]
    chosen = find_group("rendezvous", facts.group_name if group is None else group)
    peer_memory = facts.peer_memories.get(chosen)
    if peer_memory is None:
        chosen.check_usable()
        peer_memory = facts.peer_memories[chosen] = CudaPeerMemory(
            device_group(chosen, facts.device), piece, facts.nbytes
        )
    offset = tensor.untyped_storage().data_ptr() - piece.address
    return GpuSymmetricMemory(chosen, piece, peer_memory, offset)


class GpuSymmetricMemory(SymmetricMemory):
    """The same piece of memory on every rank's GPU. Signals and barriers are in the order of the current stream."""

    def __init__(self, group: ProcessGroup, piece: PoolBuffer, peer_memory: Any, offset: int):
        super().__init__(group, piece, peer_memory, offset)
        self._gpu: CudaGroup = peer_memory.gpu

    @property
    def device(self) -> torch.device:
        import torch

        return torch.device("cuda", self._gpu.device)

    @property
    def buffer_ptrs_dev(self) -> int:
        """Address, on the GPU, of an array of the buffers' addresses, for kernels."""
        return self._peer_memory.buffer_array.data_ptr()

    @property
    def signal_pad_ptrs_dev(self) -> int:
        """Address, on the GPU, of an array of the signal pads' addresses, for kernels."""
        return self._peer_memory.pad_array.data_ptr()

    def _storage(self, address: int, nbytes: int) -> torch.UntypedStorage:
        return storage_over(RawMemory(address, nbytes, self), self._gpu.device)

    # --- signals ------------------------------------------------------------------------------------------------

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """What comes later in the current stream begins once every rank's stream has come here."""
        self._check_channel("barrier", channel)
        others = [r for r in range(self.world_size) if r != self.rank]
        steps = [self._put(r, channel) for r in others] + [self._take(r, channel) for r in others]
        self._enqueue(f"barrier(channel={channel})", steps, others, timeout_ms)

    def _signal(self, call: str, name: str, act: Callable[..., Any], peer: int, channel: int, timeout_ms: int) -> None:
        """``put_signal`` and ``wait_signal``, in the order of the current stream."""
        self._check_rank(call, name, peer)
        self._check_channel(call, channel)
        step = (self._put if call == "put_signal" else self._take)(peer, channel)
        self._enqueue(f"{call}({name}={peer}, channel={channel})", [step], [peer], timeout_ms)

    def _put(self, rank: int, channel: int) -> tuple[int, int, int]:
        """(address, the value to wait for, the value to write)"""
        return self._peer_memory.pad_addresses[rank] + 4 * (channel * self.world_size + self.rank), 0, 1

    def _take(self, rank: int, channel: int) -> tuple[int, int, int]:
        return self._peer_memory.pad_addresses[self.rank] + 4 * (channel * self.world_size + rank), 1, 0

    @property
    def failures(self) -> CudaFailures:
        return self._gpu.failures

    @explain_cuda_errors
    def _enqueue(self, what: str, steps: Sequence[tuple[int, int, int]], peers: list[int], timeout_ms: int) -> None:
        import torch

        timeout = self.timeout_ns(what, timeout_ms) / 1e9
        self.failures.check_usable(what)
        stream = torch.cuda.current_stream(self.device)
        with using(self.device):
            for address, awaited, written in steps:
                driver().wait(stream.cuda_stream, address, awaited, WAIT_EQUAL)
                driver().write(stream.cuda_stream, address, written)
            passed = torch.cuda.Event()
            passed.record(stream)

        def release(_: list[int]) -> None:
            rescue = self._gpu.rescue
            for address, awaited, _written in steps:
                if passed.query():
                    return
                driver().enter(self._gpu.device)
                driver().write(rescue.cuda_stream, address, awaited)
                rescue.synchronize()

        missing: Callable[[], list[int]] = lambda: [] if passed.query() else peers  # noqa: E731
        self._gpu.failures.watchdog.add(Outstanding(what, missing, release, time.monotonic(), timeout))


# --- words -------------------------------------------------------------------------------------------------------


def fill_words(tensor: torch.Tensor, offset: int, value: int, count: int) -> None:
    import torch

    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    with using(tensor.device):
        driver().fill32(tensor.data_ptr() + 4 * offset, value, count, stream)


def write_word(tensor: torch.Tensor, offset: int, value: int) -> None:
    """In the order of the stream; whoever sees it there sees everything that came before."""
    import torch

    stream = torch.cuda.current_stream(tensor.device).cuda_stream
    with using(tensor.device):
        driver().write(stream, tensor.data_ptr() + 4 * offset, value)
