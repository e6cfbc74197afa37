"""vLLM's MessageQueue within a host, on a queue that knows its readers: whoever waits for a dead process gets an error
that names it, instead of waiting on. Nothing lies in /dev/shm, and no socket wakes anybody."""

from __future__ import annotations

import logging
import math
import os
import secrets
import time
from dataclasses import dataclass
from typing import Any

from symcomm import errors
from symcomm.sharing.queue import Queue, QueueReader
from symcomm.sharing.region import named, physical_room

FOUND, ALL_THERE = 60.0, 600.0  # seconds: the writer is there before its readers, which may have to load torch
TELL_AFTER = 60.0  # seconds without a message, as vLLM's own

log = logging.getLogger("vllm.symcomm")
found_dead: set[int] = set()  # processes, by any queue of this one


@dataclass
class Handle:
    """What vLLM sends to readers, pickled. It looks at the first two."""

    local_reader_ranks: list[int]
    name: str  # which is not to be guessed, and so the token, too
    remote_subscribe_addr: None = None


class MessageQueue:
    """Calls, arguments and what they return are those of vLLM 0.32. A queue without one of its readers is of no use to
    vLLM, so every call fails once one is gone."""

    n_remote_reader = 0

    local_reader_rank = -1

    def __init__(
        self,
        n_reader: int,
        n_local_reader: int,
        local_reader_ranks: list[int] | None = None,
        max_chunk_bytes: int = 24 << 20,  # slots are what Queue has, and long messages of any length
        max_chunks: int = 10,
        connect_ip: str | None = None,
        enable_shm_tensor_arena: bool = False,  # large tensors are not copied to readers anyway
    ):
        assert n_reader == n_local_reader > 0
        ranks = list(range(n_local_reader)) if local_reader_ranks is None else local_reader_ranks
        assert len(ranks) == n_local_reader
        self.n_local_reader, self.shutting_down = n_local_reader, False
        self._is_writer, self._is_local_reader, self._is_remote_reader = True, False, False
        self.handle = Handle(ranks, f"vllm-{os.getpid()}-{secrets.token_hex(8)}")
        # What nobody reads is dropped: a put that waited for a reader which has left would wait for good.
        name = self.handle.name
        self._end: Any = Queue(name, capacity=physical_room(), readers=0, timeout=math.inf, token=name)
        self._readers: list[int] = []  # their processes, once all were there
        self._broken: Exception | None = None

    @classmethod
    def create_from_handle(cls, handle: Handle, rank: int) -> MessageQueue:
        assert rank in handle.local_reader_ranks
        self = cls.__new__(cls)
        self.handle, self.shutting_down, self._broken = handle, False, None
        self._is_writer, self._is_local_reader, self._is_remote_reader = False, True, False
        self.local_reader_rank = handle.local_reader_ranks.index(rank)
        self._end = QueueReader(handle.name, timeout=FOUND, token=handle.name)
        return self

    def export_handle(self) -> Handle:
        return self.handle

    def wait_until_ready(self) -> None:
        """The writer waits for all readers. They are ready as they are."""
        if self._is_writer and not self._readers:
            self._end.await_readers(self.n_local_reader, timeout=ALL_THERE)
            self._readers = self._end.readers

    def enqueue(self, obj: Any, timeout: float | None = None) -> None:
        assert self._is_writer, "Only writers can enqueue"
        if self.shutting_down:
            return
        if self._broken is not None:
            raise self._broken
        self.wait_until_ready()
        try:
            self._end.put(obj, timeout=timeout)
            if len(there := self._end.readers) < self.n_local_reader:
                left = sorted(set(self._readers) - set(there))
                raise errors.QueueClosedError(f"enqueue on {self.handle.name!r}: its reader {named(left)} closed it.")
        except errors.QueueClosedError as error:
            if self.shutting_down:
                return  # meanwhile, and nobody reads any more
            self._broken = error
            raise
        except errors.ProcessDiedError as error:
            found_dead.update(error.pids)
            self._broken = error
            raise

    def dequeue(self, timeout: float | None = None, indefinite: bool = False) -> Any:
        if self._is_writer:
            raise RuntimeError("Only readers can dequeue")
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while True:
            left = max(0.0, end - time.monotonic())
            try:
                return self._end.get(timeout=left if indefinite else min(left, TELL_AFTER))
            except errors.DeadlineError:  # a TimeoutError, as vLLM's
                if time.monotonic() >= end:
                    raise
                log.info("symcomm: no message from %s in %d s.", named([self._end.writer]), TELL_AFTER)
            except errors.QueueClosedError as error:
                if self.shutting_down:
                    raise RuntimeError("cancelled") from error
                raise
            except errors.ProcessDiedError as error:
                found_dead.update(error.pids)
                raise

    def broadcast_object(self, obj: Any = None) -> Any:
        if self._is_writer:
            self.enqueue(obj)
            return obj
        return self.dequeue()

    def shutdown(self) -> None:
        """Whoever waits in a call of this end, in another thread, stops; the other side learns of it."""
        self.shutting_down = True
        self._end.close()
