"""What: two operators of ``_c10d_functional`` get kernels of ours for CPU and CUDA tensors. These serve our groups, and
leave every other group to the kernel that was there.
Why: ``_c10d_functional`` resolves a group by name and calls it. For these two, torch looks past a Python group for a
C++ backend inside it, and finds none.
Versions: those whose kernels do that (see versions.py).
Undo: the kernels are torch's again.

Inside ``allow_inflight_collective_as_graph_input_ctx``, ``wait_tensor`` knows the tensors of asynchronous calls, so
that a compiled graph can wait for calls that eager code has begun.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, _register_work, _resolve_process_group

from symcomm.torch_backend import versions
from symcomm.undo import Undo


def apply() -> Undo:
    library = torch.library.Library("_c10d_functional", "IMPL")  # its kernels live as long as it does
    kernels: dict[str, Callable[..., Any]] = {"all_gather_into_tensor_out": _all_gather_out, "batch_p2p_ops": _batch}
    for name in versions.functional_operators(kernels):
        for where in ("CPU", "CUDA") if versions.HAS_CUDA else ("CPU",):
            known = torch.library.get_kernel(f"_c10d_functional::{name}", where)
            library.impl(name, _either(known, kernels[name]), where, with_keyset=True)
    return library._destroy


def _either(known: Any, ours: Callable[..., Any]) -> Callable[..., Any]:
    def kernel(keys: Any, *args: Any, **kwargs: Any) -> Any:
        answer = ours(*args, **kwargs)
        return known.call_boxed(keys, *args, **kwargs) if answer is None else answer

    return kernel


def our_group_of(group: Any) -> Any:
    """The group of this name (newer graphs carry the group itself) if it is ours, else None."""
    found = _resolve_process_group(group) if isinstance(group, str) else group
    return found if getattr(found, "is_symcomm", False) else None


def _all_gather_out(input: Any, group_size: int, group_name: Any, *, out: Any) -> Any:
    group = our_group_of(group_name)
    if group is None:
        return None
    _register_work(out, group.all_gather_single(out, input, AllgatherOptions()))
    return out


def _batch(ops: Sequence[str], peers: Sequence[int], tags: Sequence[int], tensors: Sequence[Any], name: Any) -> Any:
    if our_group_of(name) is None:
        return None
    functional = torch.ops._c10d_functional
    each = {"isend": functional.isend, "irecv": functional.irecv}
    return [each[op](*message, name) for op, *message in zip(ops, tensors, peers, tags, strict=True)]


def register_work(work: Any, tensors: Sequence[Any]) -> None:
    """Make ``wait_tensor`` of any of these tensors wait for the work."""
    for tensor in tensors:
        for one in tensor if isinstance(tensor, (list, tuple)) else [tensor]:
            _register_work(one, work)
