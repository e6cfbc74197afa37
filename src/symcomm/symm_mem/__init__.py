"""Symmetric memory for tensors: ranks allocate it, meet, access each other's, and signal.

allocate.py    empty, zeros, empty_strided_p2p; rendezvous(), in which ranks learn where each other's memory is
handle.py      the SymmetricMemory that it returns: peers' buffers, signals, barrier
place.py       the interface that CPU and GPU memory implement
on_cpu.py      tensors in this rank's arena
on_gpu.py      tensors in a GPU's memory
groups.py      finds the group that a caller means: ours, torch's, a name, None
words.py       memset32 and stream_write_value32
settings.py    backend and signal pad size
symmetrize.py  moves existing tensors and modules into symmetric memory
install.py     makes torch's own functions and operators take CPU tensors, by calling ours

Names and meaning are those of ``torch.distributed._symmetric_memory`` where it has them. torch is imported when the
first tensor is made, not before.
"""

from __future__ import annotations

from symcomm.symm_mem.allocate import (
    empty,
    empty_strided_p2p,
    is_symm_mem_tensor,
    memory_stats,
    rendezvous,
    trim,
    zeros,
)
from symcomm.symm_mem.groups import set_group_info
from symcomm.symm_mem.handle import SymmetricMemory
from symcomm.symm_mem.install import install, uninstall
from symcomm.symm_mem.settings import (
    get_backend,
    get_mempool_allocator,
    get_signal_pad_size,
    has_multicast_support,
    set_backend,
    set_signal_pad_size,
)
from symcomm.symm_mem.symmetrize import symmetrize
from symcomm.symm_mem.words import memset32, stream_write_value32

__all__ = [
    "SymmetricMemory", "empty", "empty_strided_p2p", "get_backend", "get_mempool_allocator", "get_signal_pad_size",
    "has_multicast_support", "install", "is_symm_mem_tensor", "memory_stats", "memset32", "rendezvous", "set_backend",
    "set_group_info", "set_signal_pad_size", "stream_write_value32", "symmetrize", "trim", "uninstall", "zeros",
]  # fmt: skip
