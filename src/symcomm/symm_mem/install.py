"""What: torch's own entrances to symmetric memory take CPU tensors. There are three: the static functions of
``_SymmetricMemory``, the Python functions of ``torch.distributed._symmetric_memory``, and the operators
``torch.ops.symm_mem.*``. Each calls our functions for CPU tensors, and torch's for all others.
Why: torch has symmetric memory on GPUs only.
Versions: all; older ones lack some of the names.
Undo: ``uninstall()``.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

from symcomm import errors
from symcomm.group.process_group import ProcessGroup
from symcomm.symm_mem import allocate, settings, words
from symcomm.symm_mem.groups import find_group, is_known
from symcomm.symm_mem.handle import SymmetricMemory
from symcomm.undo import Switch, Undo, all_of, replace

_operators = "symcomm.torch_backend.symm_ops"  # above this layer, so it is loaded by name


def install() -> None:
    """Have torch's symmetric-memory functions and operators call ours for CPU tensors. A second call does nothing.

    Raises: ModuleNotFoundError without torch."""
    _installed.on()


def uninstall() -> None:
    """Undo install().

    Raises: nothing."""
    _installed.off()


def _change_torch() -> Undo:
    import torch.distributed._symmetric_memory as functions
    from torch._C._distributed_c10d import _SymmetricMemory as statics

    made = [(statics, name, staticmethod(make(getattr(statics, name)))) for name, make in _there(statics, _STATICS)]
    made += [(functions, name, make(getattr(functions, name))) for name, make in _there(functions, _FUNCTIONS)]
    undos = [replace(owner, name, new) for owner, name, new in made]
    return all_of(*undos, importlib.import_module(_operators).register())


_installed = Switch(_change_torch)


def _there(owner: Any, table: dict[str, Callable[[Any], Any]]) -> list[tuple[str, Callable[[Any], Any]]]:
    return [(name, make) for name, make in table.items() if name in vars(owner)]


def _by(is_cpu: Callable[..., bool], ours: Callable[..., Any]) -> Callable[[Any], Any]:
    """Makes the function that asks ``is_cpu`` about its arguments, then calls ours or theirs."""

    def make(theirs: Any) -> Any:
        @functools.wraps(theirs)
        def chosen(*args: Any, **kwargs: Any) -> Any:
            return (ours if is_cpu(*args, **kwargs) else theirs)(*args, **kwargs)

        return chosen

    return make


def _is_cpu(device: Any) -> bool:
    import torch

    return torch.device(device).type == "cpu"


def _is_on_cpu(tensor: Any, *_: Any, **__: Any) -> bool:
    import torch

    return isinstance(tensor, torch.Tensor) and tensor.is_cpu


def _is_input_on_cpu(input: Any, *_: Any, **__: Any) -> bool:
    return _is_on_cpu(input)


# --- our functions ---------------------------------------------------------------------------------------


def meet(tensor: Any, group_name: Any = None) -> SymmetricMemory | None:
    """A rendezvous with torch's meaning: None for a tensor that is not in symmetric memory."""
    return allocate.rendezvous(tensor, group_name) if allocate.is_symm_mem_tensor(tensor) else None


_workspaces: weakref.WeakKeyDictionary[ProcessGroup, Any] = weakref.WeakKeyDictionary()


def workspace(group_name: Any, min_size: int) -> SymmetricMemory:
    """A group's scratch memory of at least ``min_size`` bytes, kept for later. Every rank asks for the same size."""
    import torch

    group = find_group("get_symm_mem_workspace", group_name)
    tensor = _workspaces.get(group)
    if tensor is None or tensor.numel() < min_size:
        tensor = _workspaces[group] = allocate.empty(min_size, dtype=torch.uint8, device="cpu")
    return allocate.rendezvous(tensor, group)


def _wants_cpu_workspace(group_name: str, min_size: int) -> bool:
    """The call names no device: a process that has used CUDA means CUDA."""
    import torch

    return is_known(group_name) and not torch.cuda.is_initialized()


def put_and_signal(src: Any, hdl: SymmetricMemory, peer: int) -> None:
    hdl.get_buffer(peer, src.shape, src.dtype).copy_(src)
    hdl.put_signal(peer)


def get_elements(dst: Any, hdl: SymmetricMemory, peer: int, offset: int = 0) -> None:
    """Fill ``dst`` from ``peer``'s tensor, from its element ``offset`` on. Errors contain torch's words."""
    size = dst.element_size()
    if not dst.is_contiguous():
        raise errors.bad_argument("get", "dst", f"strides {tuple(dst.stride())}", "backed by contiguous memory")
    if offset < 0 or hdl.offset % size:
        raise errors.bad_argument("get", "offset", offset, "non-negative, and aligned to elements")
    if not 0 <= peer < hdl.world_size:
        raise errors.BadArgumentError(f"get: invalid peer {peer}; the group's ranks are 0 to {hdl.world_size - 1}.")
    end = hdl.offset + (offset + dst.numel()) * size
    if end > hdl.buffer_size:
        raise errors.BadArgumentError(
            f"get: the range up to byte {end} exceeds the symmetric allocation of {hdl.buffer_size} bytes; "
            "ask for fewer elements, or from a smaller offset."
        )
    dst.copy_(hdl.get_buffer(peer, dst.shape, dst.dtype, hdl.offset // size + offset))


def _set_pad_size(theirs: Any) -> Any:
    def set_signal_pad_size(size: int) -> None:
        settings.set_signal_pad_size(size)
        theirs(size)

    return set_signal_pad_size


def _enabled(theirs: Any) -> Any:
    import torch.distributed._symmetric_memory as functions

    def is_symm_mem_enabled_for_group(group_name: str) -> bool:
        return theirs(group_name) or (not functions._is_test_mode and is_known(group_name))

    return is_symm_mem_enabled_for_group


def _reduce_scatter_offset(
    input: Any, out: Any, group: str, *, dim: int, offsets: Any = None, dst_ranks: Any = None, red_op: str = "sum"
) -> None:
    import torch

    torch.ops.symm_mem.nccl_reduce_scatter_offset(input, out, group, dim, offsets, dst_ranks, red_op)


def _device_of_call(size: Any, stride: Any, dtype: Any, device: Any, *_: Any, **__: Any) -> bool:
    return _is_cpu(device)


def _device_type(device_type: Any, *_: Any) -> bool:
    return getattr(device_type, "name", str(device_type)).lower() == "cpu"


_STATICS: dict[str, Callable[[Any], Any]] = {
    "empty_strided_p2p": _by(_device_of_call, allocate.empty_strided_p2p),
    "rendezvous": _by(_is_on_cpu, meet),
    "is_symm_mem_tensor": _by(_is_on_cpu, allocate.is_symm_mem_tensor),
    "memset32": _by(_is_input_on_cpu, words.memset32),
    "stream_write_value32": _by(_is_input_on_cpu, words.stream_write_value32),
    "get_backend": _by(_is_cpu, settings.get_backend),
    "set_backend": _by(lambda name: name == settings.BACKEND, settings.set_backend),
    "get_mempool_allocator": _by(_is_cpu, settings.get_mempool_allocator),
    "has_multicast_support": _by(_device_type, settings.has_multicast_support),
}
# torch's other functions (empty, get_backend, is_symm_mem_tensor, ...) call the static ones.
_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "rendezvous": _by(_is_on_cpu, lambda tensor, group: meet(tensor, group)),
    "enable_symm_mem_for_group": _by(is_known, lambda group_name: None),  # every group of ours has it
    "is_symm_mem_enabled_for_group": _enabled,
    "get_symm_mem_workspace": _by(_wants_cpu_workspace, workspace),
    "set_signal_pad_size": _set_pad_size,
    "get": _by(_is_on_cpu, get_elements),
    "put_signal": _by(_is_on_cpu, put_and_signal),
    "wait_signal": _by(lambda hdl, peer: isinstance(hdl, SymmetricMemory), lambda hdl, peer: hdl.wait_signal(peer)),
    "reduce_scatter_offset": _by(_is_input_on_cpu, _reduce_scatter_offset),
}
