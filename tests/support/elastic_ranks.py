"""Ranks that come and go, as forked processes that meet in a file.

``ElasticRanks.member(fn, rank, world)`` calls ``fn(group, *args)`` in a rank of the first group,
``ElasticRanks.newcomer(fn)`` calls ``fn(store, *args)`` in a process that is to join. ``ElasticRanks.outcomes()`` waits
for all, with a hard deadline, and reports what each did; nobody ends before all have said what they have to say, so
that no end is taken for a fault.
"""

from __future__ import annotations

import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from symcomm.group.default import join_ranks
from symcomm.group.local import LocalGroup
from symcomm.store import FileStore
from tests.support.faults import Outcome, readable


class ElasticRanks:
    def __init__(self, folder: Path, timeout: float = 20.0):
        self.path = str(folder / "store")
        self.timeout = timeout
        self.pids: list[int] = []
        self._readers: list[int] = []
        self._go, self._end = os.pipe()

    def member(self, fn: Callable, rank: int, world: int, *args: Any) -> int:
        def run() -> Any:
            store = FileStore(self.path)
            group = join_ranks(store, rank, world, 20.0, partial(LocalGroup, timeout=self.timeout))
            return fn(group, *args)

        return self._fork(run)

    def newcomer(self, fn: Callable, *args: Any) -> int:
        return self._fork(lambda: fn(FileStore(self.path), *args))

    def _fork(self, run: Callable[[], Any]) -> int:
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                for fd in [self._end, reader, *self._readers]:
                    os.close(fd)
                self._child(run, writer)
            finally:
                os._exit(0)
        os.close(writer)
        self._readers.append(reader)
        self.pids.append(pid)
        return len(self.pids) - 1

    def _child(self, run: Callable[[], Any], writer: int) -> None:
        torch.set_num_threads(1)  # a forked child has none of its parent's OpenMP threads
        try:
            outcome = ("returned", run(), "")
        except BaseException as error:
            outcome = ("raised", f"{type(error).__name__}: {error}", traceback.format_exc())
        payload = pickle.dumps(outcome)
        while payload:
            payload = payload[os.write(writer, payload) :]
        os.close(writer)
        readable([self._go], 60)

    def outcomes(self, deadline: float = 30.0) -> list[Outcome]:
        end = time.monotonic() + deadline
        texts: dict[int, bytes] = {fd: b"" for fd in self._readers}
        open_ = set(self._readers)
        while open_ and (left := end - time.monotonic()) > 0:
            for fd in readable(open_, left):
                piece = os.read(fd, 1 << 16)
                texts[fd] += piece
                if not piece:
                    open_.discard(fd)
        os.close(self._end)
        found = []
        for number, (fd, pid) in enumerate(zip(self._readers, self.pids, strict=True)):
            if fd in open_:
                os.kill(pid, signal.SIGKILL)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(fd)
            if fd in open_:
                found.append(Outcome(number, "stuck", text=f"still running after {deadline} s"))
            elif texts[fd]:
                kind, value, text = pickle.loads(texts[fd])
                found.append(Outcome(number, kind, value, text=text))
            else:
                found.append(Outcome(number, "died", status))
        os.close(self._go)
        return found


def returned(outcomes: list[Outcome]) -> list[Any]:
    assert all(o.kind == "returned" for o in outcomes), "\n".join(map(str, outcomes))
    return [o.value for o in outcomes]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
