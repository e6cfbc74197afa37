"""_SymmetricMemory: what PyTorch's refuses on any machine ours refuses too; what it does on GPUs ours does on CPUs."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("torch")
import torch

from symcomm.torch_backend.group import TorchGroup
from tests.support.c10d_compare import on_two_ranks, ours, same, theirs

pytestmark = pytest.mark.torch_versions

CPU = torch.device("cpu")
S, D = "m._SymmetricMemory", "torch._C._autograd.DeviceType"

SAME = [
    f"{S}()",
    "m._DMAConnectivity()",
    f"{S}.has_multicast_support({D}.CPU, 0)",
    f"{S}.has_multicast_support({D}.CUDA, 0)",
    f"{S}.has_multicast_support('cpu', 0)",
    f"{S}.get_backend('cpu')",
    f"{S}.get_backend(torch.device('cuda'))",
    f"{S}.get_mempool_allocator(torch.device('cpu'))",
    f"{S}.get_mempool_allocator(torch.device('meta'))",
    f"{S}.rendezvous(torch.ones(1))",
    f"{S}.rendezvous(3)",
    f"{S}.is_symm_mem_tensor(torch.ones(1))",
    f"{S}.is_symm_mem_tensor(3)",
    f"{S}.set_backend('zzz')",
    f"{S}.set_backend(3)",
    f"{S}.set_group_info('a', 0, 1, 3)",
    f"{S}.set_group_info('twice', 0, 1, m.HashStore())\n{S}.set_group_info('twice', 0, 1, m.HashStore())",
    f"{S}.empty_strided_p2p((3,), (1,), torch.float32, torch.device('meta'))",
    f"{S}.memset32(torch.zeros(4, dtype=torch.float32), 0, 1)",
    f"{S}.memset32(3, 0, 1)",
    f"{S}.signal_pad_size",
    f"{S}.signal_pad_size = 1024\n{S}.signal_pad_size",
    "m._detect_dma_connectivity(3, 'nvlink')",
    f"m._detect_dma_connectivity({D}.CPU, 'nvlink')",
    f"m._detect_dma_connectivity({D}.XPU, 'nvlink')",
]


@pytest.fixture(autouse=True)
def pads_as_before():
    before, theirs_before = ours._SymmetricMemory.signal_pad_size, theirs._SymmetricMemory.signal_pad_size
    yield
    ours._SymmetricMemory.signal_pad_size = before
    theirs._SymmetricMemory.signal_pad_size = theirs_before


@pytest.mark.parametrize("text", SAME)
def test_same(text: str):
    same(text)


def test_our_backend_is_named():
    assert ours._SymmetricMemory.get_backend(CPU) == "symcomm"
    ours._SymmetricMemory.set_backend("symcomm")


def test_words_are_written():
    words = torch.zeros(4, dtype=torch.uint32)
    assert ours._SymmetricMemory.memset32(words, 1, 7, 2).tolist() == [0, 7, 7, 0]
    assert ours._SymmetricMemory.stream_write_value32(words, 3, 9).tolist() == [0, 7, 7, 9]
    with pytest.raises(ValueError, match="offset"):
        ours._SymmetricMemory.memset32(words, 4, 1)


def exchange(memory, mine, rank: int) -> list:
    """Fill ours, meet, read the other's; then signal, and look at pads."""
    mine.fill_(rank + 1)
    memory.barrier(channel=0, timeout_ms=20_000)
    other = 1 - rank
    seen = [
        memory.get_buffer(other, (4,), torch.float32).tolist(),
        memory.get_remote_tensor(other, (2,), torch.float32).tolist(),
        memory.get_signal_pad(other).dtype == torch.uint32,
        (memory.rank, memory.world_size, memory.buffer_size, memory.offset, memory.multicast_ptr),
        (len(memory.buffer_ptrs), len(memory.signal_pad_ptrs), memory.signal_pad_size, str(memory.device)),
        memory.buffer_ptrs_dev != 0 and memory.signal_pad_ptrs_dev != 0 and memory.boxed() is memory,
    ]
    memory.put_signal(other, channel=1, timeout_ms=20_000)
    memory.wait_signal(other, channel=1, timeout_ms=20_000)
    memory.barrier()
    return seen


def wanted(rank: int) -> list:
    value = float(2 - rank)
    return [[value] * 4, [value] * 2, True, (rank, 2, 16, 0, 0), (2, 2, 9216, "cpu"), True]


def test_rendezvous_by_group_info():
    def body(store, rank):
        ours._SymmetricMemory.set_group_info("by info", rank, 2, store)
        mine = ours._SymmetricMemory.empty_strided_p2p((4,), (1,), torch.float32, CPU, "by info")
        assert ours._SymmetricMemory.is_symm_mem_tensor(mine)
        memory = ours._SymmetricMemory.rendezvous(mine)
        assert type(memory) is ours._SymmetricMemory
        return exchange(memory, mine, rank)

    assert on_two_ranks(body) == [wanted(0), wanted(1)]


@pytest.mark.parametrize("make", ["engine", "facade"])
def test_rendezvous_by_the_name_of_a_torch_group(make: str):
    """Where threads are ranks, each needs names of its own."""
    ours._set_thread_isolation_mode(True)

    def body(store, rank):
        if make == "engine":
            group = TorchGroup(store, rank, 2, timedelta(seconds=20), "first")
        else:
            group = ours.ProcessGroup(store, rank, 2)
        group._set_group_name("renamed")
        ours._register_process_group("renamed", group)
        mine = ours._SymmetricMemory.empty_strided_p2p((4,), (1,), torch.float32, CPU)
        memory = ours._SymmetricMemory.rendezvous(mine, "renamed")
        seen = exchange(memory, mine, rank)
        ours._unregister_process_group("renamed")
        group.shutdown()
        return seen

    try:
        assert on_two_ranks(body) == [wanted(0), wanted(1)]
    finally:
        ours._set_thread_isolation_mode(False)


def test_memory_nodes():
    found = ours._detect_dma_connectivity(torch._C._autograd.DeviceType.CPU, "numa")
    assert found.connection_type == "numa" and found.device_type == torch._C._autograd.DeviceType.CPU
    assert all(len(row) == len(found.matrix) for row in found.matrix)
    assert all(row[i] == min(row) for i, row in enumerate(found.matrix))
