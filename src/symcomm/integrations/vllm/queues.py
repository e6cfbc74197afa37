"""vLLM's message queues become ours where all readers are on one host; and who waits for an answer of a dead worker."""

from __future__ import annotations

from typing import Any

from symcomm import errors
from symcomm.integrations.vllm import last_words, message_queue
from symcomm.undo import replace

REAPED = 0.2  # seconds until the kernel says how a process ended of which a queue has said that it has


def take_over() -> None:
    """Whoever makes a MessageQueue whose readers are all on this host gets ours, whatever has imported vLLM's class."""
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    theirs = MessageQueue.create_from_handle

    def make(cls: Any, n_reader: int = 0, n_local_reader: int = 0, *more: Any, **named: Any) -> Any:
        if n_reader == n_local_reader > 0:
            return message_queue.MessageQueue(n_reader, n_local_reader, *more, **named)
        return object.__new__(cls)

    def create_from_handle(handle: Any, rank: int) -> Any:
        ours = message_queue.MessageQueue.create_from_handle
        return (ours if isinstance(handle, message_queue.Handle) else theirs)(handle, rank)

    replace(MessageQueue, "__new__", staticmethod(make))
    replace(MessageQueue, "create_from_handle", staticmethod(create_from_handle))


def forget_names() -> None:
    """A queue that stays vLLM's, with readers on other hosts, loses its name as soon as all those here have opened it.
    Its memory goes with the last process."""
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
        if not getattr(self, "shutting_down", False) and (dead := _dead(getattr(self, "workers", None) or ())):
            last_words.leave(f"{' and '.join(dead)}.", sure=False)  # the others may have been in no call
            for queue in getattr(self, "response_mqs", ()):
                queue.shutdown()
        end_workers(self)

    replace(MultiprocExecutor, "shutdown", shutdown)


def _dead(workers: Any) -> list[str]:
    """Who of them, and how; also when a queue has noticed it before vLLM."""
    for worker in workers:
        if worker.proc.pid in message_queue.found_dead:
            worker.proc.join(REAPED)
    return [
        f"rank {worker.rank} (pid {worker.proc.pid}) {errors.format_exit(worker.proc.exitcode)}"
        for worker in workers
        if worker.proc.exitcode
    ]
