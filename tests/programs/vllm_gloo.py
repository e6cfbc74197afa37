"""A plugin for vLLM that leaves its groups on Gloo: without its own shared memory."""

from __future__ import annotations


def register() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False


def sleep() -> None:
    """Whoever waits for a message of vLLM's sleeps, instead of offering its core for a second."""
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    init = SpinCondition.__init__

    def without_spinning(self, is_reader, context, notify_address, busy_loop_s=0.0):
        init(self, is_reader, context, notify_address, busy_loop_s=0.0)

    SpinCondition.__init__ = without_spinning
