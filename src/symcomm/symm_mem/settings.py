"""Settings of symmetric memory: the backend, and the size of signal pads."""

from __future__ import annotations

from typing import Any

from symcomm import errors

BACKEND = "symcomm"
# As in PyTorch: 32 channels of 72 ranks, 4 bytes each.
DEFAULT_PAD_BYTES = 32 * 72 * 4
MOST_PAD_BYTES = 1 << 30

_pad_bytes = DEFAULT_PAD_BYTES


def get_backend(device: Any) -> str | None:
    """``"symcomm"`` for the CPU, and for CUDA where there is a GPU; None for other devices.

    Raises: nothing."""
    import torch

    kind = torch.device(device).type
    return BACKEND if kind == "cpu" or (kind == "cuda" and torch.cuda.is_available()) else None


def set_backend(name: str) -> None:
    """Refuses every name but that of the one backend.

    Raises: BadArgumentError."""
    if name != BACKEND:
        raise errors.bad_argument(
            "set_backend", "name", name, repr(BACKEND), "for CUDA backends use torch.distributed._symmetric_memory"
        )


def has_multicast_support(device_type: Any, device_idx: int = 0) -> bool:
    """False: Symcomm writes to each rank by itself, also where hardware could write to all at once (NVLink SHARP).

    Raises: nothing."""
    return False


def get_mempool_allocator(device: Any) -> Any:
    """Always raises: torch has memory pools (``torch.cuda.MemPool``) for CUDA and XPU only, and they take an allocator
    of torch's own. ``symm_mem.empty`` needs no pool: it reuses freed memory by itself, on the CPU and on GPUs.

    Raises: BadArgumentError."""
    import torch

    if torch.device(device).type == "cuda":
        fix = "allocate with symm_mem.empty(device='cuda'), or use torch.distributed._symmetric_memory for a pool"
        raise errors.bad_argument("get_mempool_allocator", "device", str(device), "one of torch's own backends'", fix)
    fix = "torch has no memory pools for CPU tensors: allocate with symm_mem.empty, or move with symcomm.symmetrize"
    raise errors.bad_argument("get_mempool_allocator", "device", str(device), "a CUDA device", fix)


def get_signal_pad_size() -> int:
    """The bytes of the signal pads that the next rendezvous() makes.

    Raises: nothing."""
    return _pad_bytes


def set_signal_pad_size(size: int) -> None:
    """Set the size for later rendezvous(), alike on all ranks: 4 bytes for each rank and channel.

    Raises: BadArgumentError."""
    global _pad_bytes
    if not isinstance(size, int) or not 4 <= size <= MOST_PAD_BYTES or size % 4:
        raise errors.bad_argument("set_signal_pad_size", "size", size, f"a multiple of 4, 4 to {MOST_PAD_BYTES}")
    _pad_bytes = size
