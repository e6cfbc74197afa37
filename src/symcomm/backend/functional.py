"""Functional collectives that torch's C++ does not bring to Python groups.

``_c10d_functional`` resolves a group by name and calls it. For two of its operators torch 2.13 looks past a Python
group for a C++ backend inside it, and finds none. For CPU and CUDA tensors those two get kernels of ours, which do the
same on our groups and hand every other group to the kernel that was there.

Inside ``allow_inflight_collective_as_graph_input_ctx`` the tensors of asynchronous calls are known to ``wait_tensor``,
so that a compiled graph can wait for what eager code has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, _register_work, _resolve_process_group

from symcomm.backend import versions

__all__ = ["install", "register_work"]

_installed: list[Any] = []  # the library; its kernels live as long as it does


def install() -> None:
    """Once a process, when the first group is made."""
    if _installed:
        return
    library = torch.library.Library("_c10d_functional", "IMPL")
    _installed.append(library)
    kernels: dict[str, Callable[..., Any]] = {"all_gather_into_tensor_out": _all_gather_out, "batch_p2p_ops": _batch}
    for name in versions.functional_operators(kernels):
        for where in ("CPU", "CUDA") if versions.HAS_CUDA else ("CPU",):
            known = torch.library.get_kernel(f"_c10d_functional::{name}", where)
            library.impl(name, _either(known, kernels[name]), where, with_keyset=True)


def _either(known: Any, ours: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        answer = ours(*args, **kwargs)
        return known.call_boxed(keys, *args, **kwargs) if answer is None else answer

    return kernel


def _our(group: Any) -> Any:
    """The group of this name (newer graphs carry the group itself) if it is ours, else None."""
    found = _resolve_process_group(group) if isinstance(group, str) else group
    return found if getattr(found, "is_symcomm", False) else None


def _all_gather_out(input: Any, group_size: int, group_name: Any, *, out: Any) -> Any:
    group = _our(group_name)
    if group is None:
        return None
    _register_work(out, group.all_gather_single(out, input, AllgatherOptions()))
    return out


def _batch(ops: Sequence[str], peers: Sequence[int], tags: Sequence[int], tensors: Sequence[Any], name: Any) -> Any:
    if _our(name) is None:
        return None
    functional = torch.ops._c10d_functional
    each = {"isend": functional.isend, "irecv": functional.irecv}
    return [each[op](*message, name) for op, *message in zip(ops, tensors, peers, tags, strict=True)]


def register_work(work: Any, tensors: Sequence[Any]) -> None:
    """``wait_tensor`` of any of these waits for the work."""
    for tensor in tensors:
        for one in tensor if isinstance(tensor, (list, tuple)) else [tensor]:
            _register_work(one, work)
