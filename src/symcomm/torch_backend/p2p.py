"""Messages that their callers wait for at once.

``dist.send`` and ``dist.recv`` call the same methods of a group as ``dist.isend`` and ``dist.irecv``, and wait for the
work they get. Only the caller's frame tells the two apart. A message that is waited for needs no other thread.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch.distributed as dist

from symcomm import errors
from symcomm.group.p2p import ANY_SOURCE
from symcomm.torch_backend.checks import single
from symcomm.torch_backend.profile import is_profiling
from symcomm.torch_backend.work import Received, done, late

_SEND, _RECV = (inspect.unwrap(call).__code__ for call in (dist.send, dist.recv))


def _is_awaited() -> bool:
    """Whether the group's method that asks was called by way of dist.send or dist.recv, with one function of torch's
    (isend, irecv) between."""
    frame: Any = sys._getframe(2).f_back
    return frame is not None and (frame := frame.f_back) is not None and frame.f_code in (_SEND, _RECV)


def exchange(core: Any, is_send: bool, tensors: Any, peer: int, tag: int) -> Any:
    """Send or receive within the call. None: nothing was done, because nobody waits for it yet, the profiler wants to
    see it begin and end, or the tensor is on another device. Called by the group's method itself."""
    if not _is_awaited() or is_profiling():
        return None
    tensor = single("send" if is_send else "recv", tensors, "tensor list")
    if not tensor.is_cpu or tag < 0:
        return None
    try:
        if is_send:
            core.send(tensor, peer, tag)
            return done
        source = core.recv(tensor, peer, tag)
    except (errors.DeadlineError, errors.RankFailedError) as error:
        raise late(error, core.timeout, 0.0) from error.__cause__
    return done if peer != ANY_SOURCE else Received(source)
