"""Operators of torch.ops.symm_mem that one rank calls alone: put, get, signals, and a matmul that waits for them."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from symcomm import errors
from symcomm._core import native
from symcomm.errors import format_ranks
from symcomm.group.process_group import DEFAULT_TIMEOUT, ProcessGroup
from symcomm.symm_mem.allocate import find_meeting, rendezvous
from symcomm.symm_mem.groups import look_up
from symcomm.symm_mem.handle import SymmetricMemory

MOST_PAUSE = 1e-3  # seconds, at most, between looks at a word that takes long


def get_remote_tensors(x: Tensor, group_name: str) -> list[Tensor]:
    handle = rendezvous(x, group_name)
    return [_counterpart("get_remote_tensors", handle, x, peer) for peer in range(handle.world_size)]


def _counterpart(call: str, handle: SymmetricMemory, tensor: Tensor, peer: int) -> Tensor:
    """The same elements as ``tensor``'s, in ``peer``'s memory."""
    if not tensor.is_contiguous():
        raise errors.bad_argument(call, "tensor", f"strides {tensor.stride()}", "contiguous")
    skipped = handle.offset // tensor.element_size() + tensor.storage_offset()
    return handle.get_buffer(peer, tensor.shape, tensor.dtype, skipped)


def _met(call: str, tensor: Tensor) -> SymmetricMemory:
    """The handle of ``tensor``. It must exist already: these calls name no group, and one rank makes them alone."""
    handle = find_meeting(tensor, look_up(None))
    if handle is None:
        fix = "call rendezvous(tensor, group) on every rank first"
        raise errors.bad_argument(call, "tensor", "one that met with no group", "a symmetric tensor", fix)
    return handle


def put(tensor: Tensor, peer: int) -> None:
    """Write the tensor to the peer's counterpart of it."""
    _counterpart("put", _met("put", tensor), tensor, peer).copy_(tensor)


def memcpy_to_multicast(symm_mem_out: Tensor, src: Tensor, byte_offset: int, group_name: str) -> Tensor:
    """Write ``src`` to every rank's ``symm_mem_out``, from ``byte_offset`` on. The caller synchronizes."""
    call = "memcpy_to_multicast_"
    if not 0 <= byte_offset <= symm_mem_out.nbytes - src.nbytes:
        raise errors.bad_argument(call, "byte_offset", byte_offset, f"0 to {symm_mem_out.nbytes - src.nbytes}")
    handle = rendezvous(symm_mem_out, group_name)
    given = src.contiguous().view(-1).view(torch.uint8)
    for peer in range(handle.world_size):
        place = _counterpart(call, handle, symm_mem_out, peer).view(-1).view(torch.uint8)
        place[byte_offset : byte_offset + given.numel()].copy_(given)
    native.change_tensors(symm_mem_out)
    return symm_mem_out


def get(tensor: Tensor, peer: int) -> None:
    """Fill the tensor from the peer's counterpart of it."""
    tensor.copy_(_counterpart("get", _met("get", tensor), tensor, peer))


def nvshmem_put_with_signal(tensor: Tensor, sigpad: Tensor, signal: int, peer: int) -> None:
    """Write the tensor to the peer, then ``signal`` to the peer's counterpart of ``sigpad``."""
    call = "nvshmem_put_with_signal"
    handle = _met(call, tensor)
    pads = handle.signal_pad_ptrs
    skipped = sigpad.data_ptr() - pads[handle.rank]
    if 0 <= skipped < handle.signal_pad_size:
        word = handle.get_signal_pad(peer, (1,), torch.uint8, skipped)
    else:
        word = _counterpart(call, _met(call, sigpad), sigpad, peer)
    _check_signal(call, signal, sigpad.dtype)
    put(tensor, peer)
    _write_signal(word.data_ptr(), signal, sigpad.element_size())


def nvshmem_wait_for_signal(sigpad: Tensor, signal: int, peer: int) -> None:
    """Return once the first word of ``sigpad`` is ``signal``."""
    handle = find_meeting(sigpad)
    group = look_up(None) if handle is None else handle.group
    writers = [peer] if group is not None and 0 <= peer < group.size else []
    _wait_for("nvshmem_wait_for_signal", sigpad.view(-1)[:1], signal, group, writers)
    native.change_tensors(sigpad)


def nccl_put_with_signal(tensor: Tensor, signal: int, peer: int) -> None:
    """Write the tensor to the peer, then ``signal`` to the last word of the peer's signal pad for it."""
    handle = _met("nccl_put_with_signal", tensor)
    _check_signal("nccl_put_with_signal", signal, torch.uint32)
    put(tensor, peer)
    _write_signal(_last_word(handle, peer).data_ptr(), signal, 4)


def nccl_wait_for_signal(sigpad: Tensor, signal: int) -> None:
    """``sigpad`` is the tensor that is put; its signal stays in place."""
    handle = _met("nccl_wait_for_signal", sigpad)
    others = [rank for rank in range(handle.world_size) if rank != handle.rank]
    _wait_for("nccl_wait_for_signal", _last_word(handle, handle.rank), signal, handle.group, others)
    native.change_tensors(sigpad)


def _last_word(handle: SymmetricMemory, rank: int) -> Tensor:
    return handle.get_signal_pad(rank, (1,), torch.uint32, handle.signal_pad_size // 4 - 1)


def _check_signal(call: str, signal: int, dtype: torch.dtype) -> None:
    if dtype.is_floating_point or dtype.is_complex or dtype.itemsize not in (4, 8):
        raise errors.bad_argument(call, "sigpad", dtype, "of 32-bit or 64-bit integers")
    room = torch.iinfo(dtype)
    if not room.min <= signal <= room.max:
        raise errors.bad_argument(call, "signal", signal, f"{room.min} to {room.max} ({dtype})")


def _write_signal(address: int, signal: int, nbytes: int) -> None:
    """Write the low half last: a rank that sees the whole value sees all earlier writes."""
    if nbytes == 8:
        native.write_words(address + 4, signal >> 32 & 0xFFFFFFFF, 1)
    native.write_words(address, signal & 0xFFFFFFFF, 1)


def _wait_for(call: str, word: Tensor, value: int, group: ProcessGroup | None, writers: Sequence[int] = ()) -> None:
    """Wait until a word is ``value``, for as long as the group's time-out, while at least one of ``writers`` lives."""
    seconds = group.timeout if group is not None else DEFAULT_TIMEOUT
    end, pause = time.monotonic() + seconds, 0.0
    what = f"{call}: waiting for {value}"
    while word.item() != value:
        gone = group is not None and pause == MOST_PAUSE and _are_gone(group, writers)
        if gone and word.item() != value:  # one may have written it just before it left
            raise errors.RankFailedError(f"{what} failed: rank {format_ranks(writers)} died or left.", writers)
        if time.monotonic() > end:
            raise errors.deadline(f"{what}, found {word.item()},", seconds)
        time.sleep(pause)
        pause = min(pause + 20e-6, MOST_PAUSE)
    time.sleep(0)  # gives the GIL up and takes it again, so that no later read comes before that of the word


def _are_gone(group: ProcessGroup, ranks: Sequence[int]) -> bool:
    group.check_usable()
    report = group.handle.report()["ranks"]
    return bool(ranks) and all(report[rank]["gone"] for rank in ranks)


def async_input_mm(a: Tensor, b: Tensor, a_chunk_signals: Tensor, a_chunk_pivot: int) -> Tensor:
    """``a @ b``, by chunks of rows, starting with chunk ``a_chunk_pivot``; each waits until its signal is 1."""
    call = "_async_input_mm"
    chunks = a_chunk_signals.numel()
    if not chunks or a.shape[0] % chunks:
        raise errors.bad_argument(
            call, "a_chunk_signals", f"{chunks} long", f"a divisor of {a.shape[0]}, the rows of a"
        )
    group = look_up(None)
    out = a.new_empty(a.shape[0], b.shape[1])
    sources, targets, signals = a.chunk(chunks), out.chunk(chunks), a_chunk_signals.view(-1)
    for k in range(chunks):
        chunk = (a_chunk_pivot + k) % chunks
        _wait_for(call, signals[chunk : chunk + 1], 1, group)
        torch.mm(sources[chunk], b, out=targets[chunk])
    return out
