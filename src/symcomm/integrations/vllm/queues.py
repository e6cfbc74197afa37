"""vLLM's message queues are files in /dev/shm, which stay there when processes are killed: their names go early."""

from __future__ import annotations

from typing import Any

from symcomm.undo import replace


def forget_names() -> None:
    """A queue loses its name as soon as all its readers have opened it; its memory goes with the last process."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    wait = MessageQueue.wait_until_ready

    def wait_until_ready(self: Any) -> None:
        wait(self)
        buffer = getattr(self, "buffer", None)
        if self._is_writer and buffer is not None and buffer.is_creator:
            buffer.is_creator = False  # so that nobody removes a name that another queue may have by then
            buffer.shared_memory.unlink()

    replace(MessageQueue, "wait_until_ready", wait_until_ready)
