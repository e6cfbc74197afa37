"""Functions that depend on stack frames and code objects of other code. Nothing else in the package looks at these.

==================  ================================================================================================
``is_awaited``      ``dist.send`` and ``dist.isend`` make the same call of a group; only the caller's frame tells which.
``wants_stacked``   torch's quantization hooks expect NCCL's futures, all others Gloo's, and both ask in the same way.
``named_for_cpp``   C++ calls a Python group's method, unless a function of that name is already calling C++.
==================  ================================================================================================

``symcomm.group.failure.call_site`` walks the stack as well: errors name the line that made a call.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

_SEND, _RECV = (inspect.unwrap(call).__code__ for call in (dist.send, dist.recv))
_STACKED = "quantization_hooks.py"


def is_awaited() -> bool:
    """Whether dist.send or dist.recv, which wait at once, called the group's method that called our caller, by way of
    torch's isend or irecv."""
    frame: Any = sys._getframe(2).f_back
    return frame is not None and (frame := frame.f_back) is not None and frame.f_code in (_SEND, _RECV)


def wants_stacked() -> bool:
    """Whether the caller of our caller takes an all_gather's outputs as one tensor."""
    return sys._getframe(2).f_code.co_filename.endswith(_STACKED)


def named_for_cpp(call: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``call``, which may call C++'s method ``name`` of its first argument without being called back."""
    call.__code__ = call.__code__.replace(co_name=name)
    call.__name__ = name
    return call
