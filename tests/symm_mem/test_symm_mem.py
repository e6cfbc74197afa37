"""Symmetric tensors: allocation and its end, rendezvous, peers' memory, signals."""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import weakref
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import _SymmetricMemory as TorchSymmetricMemory

import symcomm
from symcomm import errors, symm_mem, testing
from symcomm.group.factory import make_group
from symcomm.memory.arena import current_arena
from symcomm.store import FileStore, HashStore
from tests.support.places import join, rank_main, spawn
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch_versions

MODES = pytest.mark.parametrize("mode", ["threads", "processes"])


# --- allocation --------------------------------------------------------------------------------------


def test_empty_takes_sizes_as_torch_does():
    assert symm_mem.empty(2, 3).shape == symm_mem.empty((2, 3)).shape == symm_mem.empty([2, 3]).shape == (2, 3)
    assert symm_mem.empty(torch.Size([4])).shape == (4,)
    assert symm_mem.empty(()).shape == ()
    assert symm_mem.empty(3, 0, 2).stride() == torch.empty(3, 0, 2).stride()
    assert symm_mem.empty(2).dtype == torch.get_default_dtype()
    assert symm_mem.empty(2, dtype=torch.bfloat16, device="cpu").dtype == torch.bfloat16
    for tensor in (symm_mem.empty(7), symm_mem.empty(0)):
        assert symm_mem.is_symm_mem_tensor(tensor) and symm_mem.is_symm_mem_tensor(tensor[1:])
    assert not symm_mem.is_symm_mem_tensor(torch.empty(7))
    assert not symm_mem.is_symm_mem_tensor(torch.empty(0))
    assert not symm_mem.is_symm_mem_tensor(torch.empty(7, device="meta"))
    assert not symm_mem.is_symm_mem_tensor(torch.eye(3).to_sparse())


def test_zeros_are_zeros_in_used_memory():
    for _ in range(3):
        tensor = symm_mem.zeros(1000, dtype=torch.int32)
        assert not tensor.any()
        tensor.fill_(-1)
        del tensor


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.int64, torch.bool, torch.complex64, torch.uint32]
)
def test_it_behaves_like_any_tensor(dtype):
    plain = torch.arange(24).reshape(2, 3, 4).to(dtype)
    tensor = symm_mem.empty_strided_p2p((2, 3, 4), (1, 8, 2), dtype, "cpu")
    tensor.copy_(plain)
    assert tensor.stride() == (1, 8, 2) and torch.equal(tensor, plain)
    assert torch.equal(tensor.transpose(0, 1).contiguous(), plain.transpose(0, 1))


def test_another_default_device():
    with torch.device("meta"):
        with pytest.raises(errors.BadArgumentError, match="device must be 'cpu' or 'cuda', got 'meta'"):
            symm_mem.empty(2)
        assert symm_mem.zeros(2, device="cpu").tolist() == [0, 0]
        weight = torch.ones(2, 2, device="cpu", requires_grad=True)
        symcomm.symmetrize(weight, grads="allocate")
    assert symm_mem.is_symm_mem_tensor(weight) and weight.grad.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: symm_mem.empty(-1), r"size must be a sequence of ints that are not negative, got \(-1,\)"),
        (lambda: symm_mem.empty(2, device="meta"), "device must be 'cpu' or 'cuda', got 'meta'"),
        (lambda: symm_mem.empty(2, device="gpu"), "device must be 'cpu' or 'cuda', got 'gpu'"),
        (lambda: symm_mem.empty(2, dtype="int8"), "dtype must be a torch.dtype, got 'int8'"),
        (lambda: symm_mem.memset32(symm_mem.zeros(2, dtype=torch.uint32), 0, 1.5), "val must be an int, got 1.5"),
        (lambda: symm_mem.empty_strided_p2p((2, 2), (1,), torch.int8), r"stride must be as long as size \(2, 2\)"),
        (lambda: symm_mem.empty_strided_p2p(2, (1,), torch.int8), "size must be a sequence of ints, got 2"),
    ],
)
def test_bad_sizes_are_refused(call, says):
    with pytest.raises(errors.BadArgumentError, match=says):
        call()


def keep_view(t):
    return t[10:20].view(2, 5)


def keep_storage(t):
    return t.untyped_storage()


def keep_numpy(t):
    return t.numpy()[3:]


def keep_set(t):
    return torch.empty(0).set_(t.untyped_storage(), 4, (2, 2))


def keep_parameter(t):
    return torch.nn.Parameter(t)


def keep_graph(t):
    leaf = t.requires_grad_()
    return (leaf * leaf).sum()


@pytest.mark.parametrize("keep", [keep_view, keep_storage, keep_numpy, keep_set, keep_parameter, keep_graph])
def test_memory_lives_as_long_as_anything_over_it(keep):
    gc.collect()
    before = symm_mem.memory_stats()["used_bytes"]
    kept = keep(symm_mem.zeros(5000))
    gc.collect()
    assert symm_mem.memory_stats()["used_bytes"] > before
    del kept
    gc.collect()
    assert symm_mem.memory_stats()["used_bytes"] == before


def test_statistics_and_trim():
    tensor = symm_mem.zeros(1 << 22, dtype=torch.uint8)
    stats = symm_mem.memory_stats()
    assert set(stats) == {"used_bytes", "peak_bytes", "reserved_bytes", "idle_bytes", "limit_bytes"}
    assert stats["used_bytes"] >= 1 << 22 and stats["peak_bytes"] >= stats["used_bytes"]
    assert stats["limit_bytes"] >= stats["reserved_bytes"] >= 1 << 22
    del tensor
    assert symm_mem.memory_stats()["idle_bytes"] >= 1 << 22
    assert symm_mem.trim() >= 1 << 22
    assert symm_mem.memory_stats()["idle_bytes"] == 0
    assert symm_mem.memory_stats()["reserved_bytes"] <= stats["reserved_bytes"] - (1 << 22)


def test_persistent_allocation():
    args = ((64, 64), (64, 1), torch.float32, torch.device("cpu"))
    tensor = symm_mem.empty_strided_p2p(*args, alloc_id=42)
    address = tensor.data_ptr()
    tensor.fill_(5)
    view = tensor[3]
    del tensor
    with pytest.raises(
        errors.BadArgumentError,
        match="alloc_id == 42 because a previous allocation with the same alloc_id is still active; drop",
    ):
        symm_mem.empty_strided_p2p(*args, alloc_id=42)
    assert symm_mem.empty_strided_p2p(*args, alloc_id=43).data_ptr() != address
    del view
    again = symm_mem.empty_strided_p2p(*args, alloc_id=42)
    assert again.data_ptr() == address and (again == 5).all()
    del again
    said = (
        r"requested allocation size \(4\) is different from the size of a previous allocation with the same alloc_id 42"
    )
    with pytest.raises(errors.BadArgumentError, match=said):
        symm_mem.empty_strided_p2p((1,), (1,), torch.float32, "cpu", alloc_id=42)


def _persistent_meets_once(group):
    args = ((8,), (1,), torch.float32, "cpu", "world", 7)
    tensor = symm_mem.empty_strided_p2p(*args)
    before = group.sequence_number
    pointers = symm_mem.rendezvous(tensor).buffer_ptrs
    first = group.sequence_number
    del tensor
    tensor = symm_mem.empty_strided_p2p(*args)
    assert symm_mem.rendezvous(tensor).buffer_ptrs == pointers
    assert before < first == group.sequence_number, "the second time needs no talk"
    group.barrier()


def test_persistent_memory_keeps_its_handle():
    spawn(_persistent_meets_once, 2)


# --- settings ----------------------------------------------------------------------------------------


def test_every_name_of_torch_is_there():
    ours = set(dir(symm_mem)) | set(dir(symm_mem.SymmetricMemory)) | {"rank", "world_size", "offset"}
    theirs = {
        name for name in dir(TorchSymmetricMemory) if not name.startswith("_") and not name.startswith("pybind11")
    }
    assert theirs <= ours


def test_backend():
    assert symm_mem.get_backend("cpu") == "symcomm"
    assert symm_mem.get_backend(torch.device("cuda", 0)) == ("symcomm" if torch.cuda.is_available() else None)
    symm_mem.set_backend("symcomm")
    with pytest.raises(errors.BadArgumentError, match="name must be 'symcomm', got 'NVSHMEM'"):
        symm_mem.set_backend("NVSHMEM")
    assert symm_mem.has_multicast_support(torch._C._autograd.DeviceType.CPU, 0) is False
    with pytest.raises(
        errors.BadArgumentError, match=r"no memory pools for CPU tensors: allocate with symm_mem\.empty"
    ):
        symm_mem.get_mempool_allocator("cpu")
    assert not hasattr(torch.cpu, "MemPool"), "torch has memory pools on the CPU: give them an allocator"
    with pytest.raises(errors.BadArgumentError, match="got 'cuda'; allocate with symm_mem.empty.device='cuda'"):
        symm_mem.get_mempool_allocator("cuda")


def _pad_of(group, sizes):
    symm_mem.set_signal_pad_size(sizes[group.rank])
    return symm_mem.rendezvous(symm_mem.empty(4), group).signal_pad_size


def _no_room(group):
    handle = symm_mem.rendezvous(symm_mem.empty(4), group)
    with pytest.raises(errors.BadArgumentError, match="absent: 4 bytes have room for none, got 0; make more"):
        handle.barrier()


def test_signal_pad_size():
    default = symm_mem.get_signal_pad_size()
    assert default == TorchSymmetricMemory.signal_pad_size
    try:
        for bad in (0, -4, 6, 1 << 40, 8.0):
            with pytest.raises(errors.BadArgumentError, match="size must be a multiple of 4"):
                symm_mem.set_signal_pad_size(bad)
        assert spawn(_pad_of, 2, "processes", [64, 64]) == [64, 64]
        with pytest.raises(AssertionError, match="rank 0 asked for signal pads of 64 bytes; rank 1 .* 128 bytes"):
            spawn(_pad_of, 2, "processes", [64, 128])
        symm_mem.set_signal_pad_size(4)
        spawn(_no_room, 2)
    finally:
        symm_mem.set_signal_pad_size(default)


# --- words ---------------------------------------------------------------------------------------------


def test_memset32_and_stream_write_value32():
    words = symm_mem.zeros(8, dtype=torch.uint32)
    assert symm_mem.memset32(words, offset=2, val=0xFFFFFFFF, count=3) is words
    assert symm_mem.stream_write_value32(words, offset=7, val=9) is words
    assert words.tolist() == [0, 0, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0, 0, 9]
    assert symm_mem.memset32(words[1:], 0, 1).tolist()[0] == 1
    assert symm_mem.memset32(torch.zeros(2, dtype=torch.uint32), 1, 5).tolist() == [0, 5], "any CPU tensor will do"


@pytest.mark.parametrize("call", [symm_mem.memset32, symm_mem.stream_write_value32])
@pytest.mark.parametrize(
    ("tensor", "offset", "val", "says"),
    [
        (
            torch.zeros(8, dtype=torch.int32),
            0,
            1,
            "a flat, contiguous uint32 tensor on the CPU or a CUDA GPU, got 'torch.int32",
        ),
        (torch.zeros(2, 4, dtype=torch.uint32), 0, 1, r"flat.*shape \(2, 4\)"),
        (torch.zeros(8, dtype=torch.uint32)[::2], 0, 1, "flat, contiguous"),
        (torch.zeros(8, dtype=torch.uint32), -1, 1, "offset must be greater than or equal to 0, got -1"),
        (torch.zeros(8, dtype=torch.uint32), 8, 1, r"offset \+ count \(8 \+ 1\) exceeded the numel of the input \(8\)"),
        (torch.zeros(8, dtype=torch.uint32), 0, -1, r"val must be in the range of 0 to 4294967295 \(uint32_t\)"),
        (torch.zeros(8, dtype=torch.uint32), 0, 1 << 32, r"val must be in the range of 0 to 4294967295 \(uint32_t\)"),
    ],
)
def test_words_are_checked(call, tensor, offset, val, says):
    with pytest.raises(errors.BadArgumentError, match=says):
        call(tensor, offset, val)


@pytest.mark.parametrize("count", [0, -1, 9])
def test_memset32_checks_count(count):
    with pytest.raises(errors.BadArgumentError, match="count"):
        symm_mem.memset32(torch.zeros(8, dtype=torch.uint32), 0, 1, count)


# --- rendezvous ----------------------------------------------------------------------------------------


def _see_each_other(group):
    tensor = symm_mem.empty(2, 3)
    tensor.fill_(group.rank)
    handle = symm_mem.rendezvous(tensor, group)
    assert (handle.rank, handle.world_size, handle.offset) == (group.rank, group.size, 0)
    assert handle.buffer_size == 24 and handle.device.type == "cpu" and handle.multicast_ptr == 0
    assert handle.buffer_ptrs[group.rank] == tensor.data_ptr()
    handle.barrier()
    seen = [handle.get_buffer(r, (2, 3), torch.float32)[0, 0].item() for r in range(group.size)]
    handle.barrier()
    right = handle.get_buffer((group.rank + 1) % group.size, (2,), torch.float32, storage_offset=4)
    right.fill_(100.0 + group.rank)
    handle.barrier()
    assert right.data_ptr() == handle.buffer_ptrs[(group.rank + 1) % group.size] + 16
    return seen, tensor.flatten()[4].item()


@MODES
@pytest.mark.parametrize("world", [1, 3])
def test_peers_see_each_others_writes(mode, world):
    for rank, (seen, written) in enumerate(spawn(_see_each_other, world, mode)):
        assert seen == list(range(world))
        assert written == 100.0 + (rank - 1) % world


def _by_every_name(group):
    tensor = symm_mem.zeros(4)
    sub = group.new_group([1, 0], name="pair")
    before = group.sequence_number
    pointers = symm_mem.rendezvous(tensor).buffer_ptrs
    talked = group.sequence_number
    assert symm_mem.rendezvous(tensor, "world").buffer_ptrs == pointers
    assert symm_mem.rendezvous(tensor[2:], group).buffer_ptrs == pointers
    assert before < talked == group.sequence_number, "one storage, one group: one rendezvous"
    assert symm_mem.rendezvous(tensor, "pair").buffer_ptrs == pointers[::-1]
    assert symm_mem.rendezvous(tensor, "pair").signal_pad_ptrs != symm_mem.rendezvous(tensor).signal_pad_ptrs
    with pytest.raises(errors.BadArgumentError, match="'nobody'.*set_group_info") as caught:
        symm_mem.rendezvous(tensor, "nobody")
    assert "'pair', 'world'" in str(caught.value)
    group.barrier()
    return sub.size


@MODES
def test_groups_by_object_name_and_default(mode):
    assert spawn(_by_every_name, 2, mode) == [2, 2]


def _not_symmetric(group):
    for tensor, says in (
        (torch.zeros(3), "must be in symmetric memory, got 'a tensor in ordinary memory of cpu'; .*symm_mem.empty"),
        (torch.empty(3, device="meta"), "ordinary memory of meta"),
        ([1.0], "got 'list'"),
    ):
        with pytest.raises(errors.BadArgumentError, match=says):
            symm_mem.rendezvous(tensor, group)
    with pytest.raises(errors.BadArgumentError, match="group must be a ProcessGroup, its name, or None, got 'int'"):
        symm_mem.rendezvous(symm_mem.empty(3), 3)
    with pytest.raises(errors.CollectiveMismatchError) as caught:
        symm_mem.rendezvous(symm_mem.empty(3 + group.rank // 2, dtype=torch.int8), group)
    return str(caught.value)


def test_what_cannot_meet_is_refused_on_every_rank():
    texts = spawn(_not_symmetric, 3)
    assert set(texts) == {
        "rendezvous on group 'world': sizes differ: ranks 0, 1 allocated 3 bytes; rank 2 allocated 4 bytes; "
        "allocate the same size on every rank."
    }


def _anothers_memory(group, box):
    if group.rank == 0:
        box.append(symm_mem.zeros(3))
    group.barrier()
    if group.rank == 1:
        with pytest.raises(errors.BadArgumentError, match="got 'memory of another rank'"):
            symm_mem.rendezvous(box[0], group)
    group.barrier()


def test_another_ranks_tensor_is_refused():
    spawn(_anothers_memory, 2, "threads", [])


def _through_a_store(rank, world, path, kind):
    if kind == "torch":
        store = torch.distributed.FileStore(path, world)
    else:
        store = FileStore(path, world)
    symm_mem.set_group_info("mine", rank, world, store)
    with pytest.raises(errors.BadArgumentError, match="not taken"):
        symm_mem.set_group_info("mine", rank, world, store)
    tensor = symm_mem.empty_strided_p2p((2,), (1,), torch.float32, "cpu", "mine").fill_(rank)
    handle = symm_mem.rendezvous(tensor)
    handle.barrier()
    seen = [handle.get_remote_tensor(r, (1,), torch.float32).item() for r in range(world)]
    handle.barrier()
    return seen, handle.group.name


@pytest.mark.parametrize("kind", ["ours", "torch"])
def test_group_info_makes_a_group(tmp_path, kind):
    assert run_ranks(_through_a_store, 2, str(tmp_path / "store"), kind) == [([0.0, 1.0], "mine")] * 2


def test_group_info_is_checked():
    with pytest.raises(errors.BadArgumentError, match="a rank of that many"):
        symm_mem.set_group_info("odd", 3, 2, HashStore())


# --- views of peers --------------------------------------------------------------------------------------


def _views(group):
    handle = symm_mem.rendezvous(symm_mem.zeros(4, dtype=torch.int64), group)
    assert handle.get_buffer(0, (), torch.int64).shape == ()
    assert handle.get_buffer(0, (0,), torch.int64, storage_offset=4).numel() == 0
    assert handle.get_buffer(0, (32,), torch.uint8).numel() == 32
    pad = handle.get_signal_pad(0)
    assert pad.dtype is torch.uint32 and pad.numel() * 4 == handle.signal_pad_size and not pad.any()
    assert handle.get_signal_pad(0, (2, 2), torch.int32, 1).data_ptr() == handle.signal_pad_ptrs[0] + 4
    for call, says in (
        (lambda: handle.get_buffer(1, (1,), torch.int64), r"rank must be in \[0, 0\], a rank of this group, got 1"),
        (lambda: handle.get_buffer(0, (5,), torch.int64), r"\(5,\), up to byte 40"),
        (lambda: handle.get_buffer(0, (1,), torch.int64, 4), "within the 32 bytes allocated"),
        (lambda: handle.get_buffer(0, (1,), torch.int64, -1), "storage_offset must be .*not negative, got -1"),
        (
            lambda: handle.get_buffer(0, (1,), torch.int64, 0.5),
            "storage_offset must be a number of elements, .*got 0.5",
        ),
        (lambda: handle.get_buffer(0, 1, torch.int64), "get_buffer: sizes must be a sequence of ints, got 1"),
        (lambda: handle.get_buffer(0, (-1,), torch.int64), r"sizes must be .* that are not negative, got \(-1,\)"),
        (lambda: handle.get_buffer(0, (1,), "int64"), "get_buffer: dtype must be a torch.dtype, got 'int64'"),
        (lambda: handle.barrier(0, 0.5), "timeout_ms must be 0 .the group's timeout. or more, got 0.5"),
        (lambda: handle.get_remote_tensor(-1, (1,), torch.int64), r"peer must be in \[0"),
        (lambda: handle.get_signal_pad(0, (1 << 20,)), "within the 9216 bytes allocated"),
    ):
        with pytest.raises(errors.BadArgumentError, match=says):
            call()
    import ctypes

    array = (ctypes.c_void_p * 1).from_address(handle.buffer_ptrs_dev)
    assert list(array) == handle.buffer_ptrs
    assert list((ctypes.c_void_p * 1).from_address(handle.signal_pad_ptrs_dev)) == handle.signal_pad_ptrs


def test_views_of_peers_are_checked():
    spawn(_views, 1)


def _handle_outlives_tensor(group):
    used = symm_mem.memory_stats()["used_bytes"]
    handle = symm_mem.rendezvous(symm_mem.zeros(1000), group)
    mine = handle.get_buffer(group.rank, (1000,), torch.float32)
    del handle
    gc.collect()
    other = symm_mem.empty(1000).fill_(3)
    assert not mine.any(), "a view of our own part keeps it"
    del mine, other
    gc.collect()
    group.barrier()
    return symm_mem.memory_stats()["used_bytes"] - used


def test_the_handle_keeps_our_part():
    assert spawn(_handle_outlives_tensor, 2) == [0, 0]


def _tensor_outlives_group(group):
    tensor, child = symm_mem.zeros(1000), group.new_group([0, 1])
    symm_mem.rendezvous(tensor, child).barrier()
    gone = weakref.ref(child)
    child.destroy()
    del child
    gc.collect()
    return gone() is None and symm_mem.is_symm_mem_tensor(tensor)


def test_a_tensor_does_not_keep_the_groups_that_it_has_met_with():
    assert spawn(_tensor_outlives_group, 2) == [True, True]


# --- signals ---------------------------------------------------------------------------------------------


def _ping_pong(group, turns):
    """The value is always the one that was written before the signal."""
    handle = symm_mem.rendezvous(symm_mem.zeros(64, dtype=torch.int64), group)
    mine = handle.get_buffer(group.rank, (64,), torch.int64)
    theirs = handle.get_buffer(1 - group.rank, (64,), torch.int64)
    for turn in range(1, turns + 1):
        if (turn + group.rank) % 2:
            theirs.fill_(turn)
            handle.put_signal(1 - group.rank, channel=3)
        else:
            handle.wait_signal(1 - group.rank, channel=3)
            assert (mine == turn).all()
    handle.barrier()
    return handle.get_signal_pad(group.rank).any().item()


@MODES
def test_a_signal_publishes_what_was_written(mode):
    assert spawn(_ping_pong, 2, mode, 2000) == [False, False], "pads are zero again afterwards"


def _many_barriers(group, turns):
    handle = symm_mem.rendezvous(symm_mem.zeros(1, dtype=torch.int64), group)
    mine = handle.get_buffer(group.rank, (1,), torch.int64)
    peers = [handle.get_buffer(r, (1,), torch.int64) for r in range(group.size)]
    for turn in range(turns):
        mine.fill_(turn)
        handle.barrier(channel=turn % 5)
        assert {p.item() for p in peers} == {turn}
        handle.barrier(channel=turn % 5)
    return handle.get_signal_pad(group.rank).any().item()


@MODES
@pytest.mark.parametrize("world", [1, 2, 5])
def test_barriers(mode, world):
    assert not any(spawn(_many_barriers, world, mode, 100))


def _channels(group):
    handle = symm_mem.rendezvous(symm_mem.zeros(1), group)
    last = handle.signal_pad_size // (4 * group.size) - 1
    if group.rank == 0:
        handle.put_signal(1, channel=last)
        handle.put_signal(1, channel=0)
        with pytest.raises(
            errors.DeadlineError, match=r"put_signal\(dst_rank=1, channel=0\) .*50 ms: rank 1 did not"
        ) as e:
            handle.put_signal(1, channel=0, timeout_ms=50)  # the first one was not taken yet
        assert e.value.missing == [1]
        handle.barrier(channel=1)
    else:
        handle.barrier(channel=1)
        handle.wait_signal(0, channel=last)
        handle.wait_signal(0, channel=0)
        with pytest.raises(errors.DeadlineError, match=r"wait_signal\(src_rank=0, channel=4\) on group 'world'"):
            handle.wait_signal(0, channel=4, timeout_ms=50)
    handle.barrier()
    handle.put_signal(group.rank, channel=2)  # to oneself
    handle.wait_signal(group.rank, channel=2)
    for call, says in (
        (
            lambda: handle.barrier(channel=last + 1),
            f"channel must be 0 to {last}, the maximum supported channel, got {last + 1}; .*set_signal_pad_size",
        ),
        (lambda: handle.put_signal(0, channel=-1), "channel must be 0 to"),
        (lambda: handle.put_signal(2), r"dst_rank must be in \[0, 1\], a rank of this group, got 2"),
        (lambda: handle.wait_signal(-1), r"src_rank must be in \[0"),
        (lambda: handle.barrier(timeout_ms=-1), "timeout_ms must be 0"),
    ):
        with pytest.raises(errors.BadArgumentError, match=says):
            call()
    handle.barrier()


@MODES
def test_channels_deadlines_and_ranges(mode):
    spawn(_channels, 2, mode)


def _missing_at_barrier(group):
    handle = symm_mem.rendezvous(symm_mem.zeros(1), group)
    if group.rank == 2:
        group.barrier()
        return "absent"
    with pytest.raises(errors.DeadlineError, match="barrier.* rank 2 did not come") as caught:
        handle.barrier(timeout_ms=200)
    group.barrier()  # the group itself is not harmed
    return caught.value.missing


def test_a_barrier_names_who_is_missing():
    assert spawn(_missing_at_barrier, 3) == [[2], [2], "absent"]


def _written_by_hand(group):
    handle = symm_mem.rendezvous(symm_mem.zeros(1), group)
    if group.rank == 0:
        time.sleep(0.05)
        symm_mem.stream_write_value32(handle.get_signal_pad(1), offset=0, val=1)
    else:
        handle.wait_signal(0)
    handle.barrier()


def test_a_pad_may_be_written_by_hand():
    spawn(_written_by_hand, 2)


def _wait_for_the_dead(rank, world, path, call):
    group = join(rank, world, path)
    handle = symm_mem.rendezvous(symm_mem.zeros(1), group)
    handle.barrier()
    if rank == 1:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(errors.RankFailedError, match=r"failed on rank \d: rank 1 \(pid \d+\) died") as caught:
        if call == "wait":
            handle.wait_signal(1)
        elif call == "put":
            while True:
                handle.put_signal(1)
        else:
            handle.barrier()
    return caught.value.ranks, time.monotonic() - start


@pytest.mark.parametrize("call", ["wait", "put", "barrier"])
def test_a_dead_peer_is_noticed(tmp_path, call):
    outcomes = run_ranks(_wait_for_the_dead, 3, str(tmp_path / "store"), call, outcomes=True, deadline=50)
    assert outcomes[1].text == "SIGKILL"
    for outcome in (outcomes[0], outcomes[2]):
        assert outcome.kind == "returned", outcome.text
        assert outcome.value[0] == [1] and outcome.value[1] < 10, "far less than the 20 s the group would wait"


def _wait_for_one_who_left(group):
    handle = symm_mem.rendezvous(symm_mem.zeros(1), group)
    handle.barrier()
    if group.rank == 1:
        handle.put_signal(0)
        return "left"
    time.sleep(0.1)
    handle.wait_signal(1)  # given before it left
    with pytest.raises(errors.RankFailedError, match="rank 1 .* left the group"):
        handle.wait_signal(1)
    return "stayed"


def test_a_peer_that_left_is_noticed():
    assert spawn(_wait_for_one_who_left, 2) == ["stayed", "left"]


def _abort_wakes(group):
    handle = symm_mem.rendezvous(symm_mem.zeros(1), group)
    handle.barrier()
    if group.rank == 1:
        time.sleep(0.1)
        group.abort()
        return
    with pytest.raises(errors.GroupUnusableError, match="aborted"):
        handle.wait_signal(1)
    group.destroy()
    with pytest.raises(errors.GroupUnusableError, match="destroyed"):
        handle.put_signal(0)


def test_abort_ends_waits():
    spawn(_abort_wakes, 2)


class Alarm(Exception):
    pass


def _interrupted(rank, world):
    def ring(*_):
        raise Alarm

    group = make_group(0, 1, lambda item: [item], timeout=30)
    handle = symm_mem.rendezvous(symm_mem.zeros(1), group)
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(Alarm):
        handle.wait_signal(0)
    handle.put_signal(0)
    handle.wait_signal(0)
    return True


def test_ctrl_c_ends_a_wait():
    assert run_ranks(_interrupted, 1, deadline=20) == [True]


def test_the_interpreter_runs_while_we_wait():
    group = make_group(0, 1, lambda item: [item], timeout=30)
    handle = symm_mem.rendezvous(symm_mem.zeros(1), group)
    waiter = threading.Thread(target=handle.wait_signal, args=(0,))
    waiter.start()
    time.sleep(0.05)
    assert waiter.is_alive()
    handle.put_signal(0)
    waiter.join(10)
    assert not waiter.is_alive()
    assert current_arena() is group.arena


# --- sharing by name -------------------------------------------------------------------------------------


def _named(rank, world, path, shm):
    os.environ.update(SYMCOMM_SHARE="named", SYMCOMM_SHM_DIR=shm)
    return rank_main(rank, world, path, _see_each_other, ())


def test_sharing_by_name(tmp_path):
    shm = tmp_path / "shm"
    shm.mkdir()
    results = run_ranks(_named, 3, str(tmp_path / "store"), str(shm))
    assert [seen for seen, _ in results] == [[0, 1, 2]] * 3
    assert list(shm.iterdir()) == []


# --- the documentation -----------------------------------------------------------------------------------

DOCUMENT = Path(__file__).parents[2] / "docs/how-to/symmetric-memory.md"
SNIPPETS = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)


@pytest.mark.parametrize("index", range(len(SNIPPETS)))
def test_the_documentation_runs(index, capsys):
    code = SNIPPETS[index]
    exec(compile(code, f"{DOCUMENT.name}[{index}]", "exec"), {"__name__": "snippet"})
    printed = capsys.readouterr().out
    for promise in re.findall(r"^print\(.*\)\s+# (\[.*\])$", code, re.MULTILINE):
        assert promise in printed


def test_the_documentation_has_snippets():
    assert len(SNIPPETS) >= 5


@testing.ranks([2, 3], deadline=60)
def test_lists_of_pieces(group):
    """Pieces of one symmetric tensor in order take part as that tensor; in another order they are a list like any."""
    n, count = group.size, 5000
    for mixed_up in (False, True):
        for rounds in range(2):
            whole = symm_mem.empty(n * count)
            whole.copy_(torch.arange(n * count) + 100.0 * group.rank + rounds)
            pieces = list(whole.chunk(n))
            if mixed_up and group.rank == 0:
                pieces[0], pieces[1] = pieces[1], pieces[0]
            k = 1 - group.rank if mixed_up and group.rank < 2 else group.rank
            out = torch.empty(count)
            group.scatter(out, pieces if group.rank == 0 else None, 0)
            assert torch.equal(out, torch.arange(k * count, (k + 1) * count) + float(rounds))
            group.reduce_scatter(out, pieces)
            starts = [
                (1 - group.rank if mixed_up and r == 0 and group.rank < 2 else group.rank) * count for r in range(n)
            ]
            wanted = sum(torch.arange(s, s + count) + 100.0 * r + rounds for r, s in enumerate(starts))
            assert torch.equal(out, wanted)
            outs = list(torch.empty(n * count).chunk(n))
            group.all_to_all(outs, pieces)
            wanted = [torch.arange(s, s + count) + 100.0 * r + rounds for r, s in enumerate(starts)]
            assert all(map(torch.equal, outs, wanted))
