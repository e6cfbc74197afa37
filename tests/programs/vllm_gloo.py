"""A plugin for vLLM that leaves its groups on Gloo: without its own shared memory."""

from __future__ import annotations


def register() -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
