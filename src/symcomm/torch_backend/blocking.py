"""Runs calls that block within the call: ``dist.send``, ``dist.recv`` and monitored barriers."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from symcomm import errors
from symcomm.group.p2p import ANY_SOURCE
from symcomm.torch_backend import values
from symcomm.torch_backend.arguments import seconds_of
from symcomm.torch_backend.checks import single
from symcomm.torch_backend.frames import is_awaited
from symcomm.torch_backend.profile import is_profiling
from symcomm.torch_backend.work import Received, done, late


def exchange(core: Any, is_send: bool, tensors: Any, peer: int, tag: int) -> Any:
    """Send or receive within the call. Does nothing and returns None if the caller does not wait at once, if the
    profiler must see the message begin and end, or if the tensor is on another device. Only a group's method may call
    this (see frames.py)."""
    if not is_awaited() or is_profiling():
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


def monitored_barrier(core: Any, timeout: Any, wait_all_ranks: bool) -> None:
    """Our group's monitored barrier, whose errors begin with Gloo's words."""
    try:
        values.flag("monitored_barrier: wait_all_ranks", wait_all_ranks)
        timeout = values.optional(values.duration, "monitored_barrier: timeout", timeout)
        if timeout is not None and timedelta(0) <= timeout < timedelta(milliseconds=1):
            raise errors.DeadlineError(f"Rank {core.rank} timed out in monitoredBarrier after 0 ms.")
    except Exception as error:
        core.monitored_barriers.refuse(error)
        raise
    try:
        core.monitored_barrier(seconds_of(None, timeout), wait_all_ranks)
    except errors.DeadlineError as error:
        if core.rank == 0:
            who = ("Ranks " if wait_all_ranks else "Rank ") + ", ".join(map(str, error.missing))
            said = f"{who} failed to pass monitoredBarrier"
        else:
            said = (
                f"Rank {core.rank} successfully reached monitoredBarrier, but received errors while waiting for "
                "send/recv from rank 0"
            )
        raise errors.DeadlineError(f"{said}. {error}", error.missing) from error
