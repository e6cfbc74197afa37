"""vLLM's message queues: what killed processes would leave of them, and who waits for an answer of a dead one."""

from __future__ import annotations

from typing import Any

from symcomm import errors
from symcomm.integrations.vllm import last_words
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


def wake_engine() -> None:
    """When a worker has died, vLLM's engine stops waiting for its answer before the others end, not seconds behind."""
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    end_workers = MultiprocExecutor.shutdown

    def shutdown(self: Any) -> None:
        if getattr(self, "is_failed", False) and not getattr(self, "shutting_down", False):
            if dead := [_epitaph(worker) for worker in self.workers if worker.proc.exitcode]:
                last_words.leave(f"{' and '.join(dead)}.", sure=False)  # the others may have been in no call
            for queue in getattr(self, "response_mqs", ()):
                queue.shutdown()
        end_workers(self)

    replace(MultiprocExecutor, "shutdown", shutdown)


def _epitaph(worker: Any) -> str:
    return f"rank {worker.rank} (pid {worker.proc.pid}) {errors.format_exit(worker.proc.exitcode)}"
