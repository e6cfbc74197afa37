"""MPI as an engine, through mpi4py: for clusters whose network MPI knows best.

mpirun or srun must have started the ranks, so that MPI knows them all. Once they are connected, one thread makes all
calls of MPI, so any level of thread support but the lowest will do.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from symcomm import errors
from symcomm.hierarchical.engines.base import Engine, EngineContext, Expected, Move, Transfer, in_background

# A program that starts ranks for MPI sets one of these.
STARTED_BY = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMIX_RANK", "PMI_RANK", "MPI_LOCALNRANKS")
LONGEST_NAP = 0.0005  # seconds between two looks at the transfers under way, at most
LARGEST_TAG = 32767  # what every MPI takes


class MpiEngine(Engine):
    name = "mpi"

    @staticmethod
    def why_not() -> str:
        if importlib.util.find_spec("mpi4py") is None:
            return "mpi4py is not installed"
        if not any(name in os.environ for name in STARTED_BY):
            return "the ranks were not started by mpirun or srun"
        return ""

    def __init__(self, context: EngineContext):
        from mpi4py import MPI

        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise errors.ResourceError("engine mpi: this MPI does not let threads call it; use engine gloo.")
        self.context = context
        self._mpi: Any = MPI
        self._comm: Any = None
        self.endpoint = {"world_rank": MPI.COMM_WORLD.Get_rank()}
        self._asked: queue.SimpleQueue[tuple[list[Move], Transfer | None, Expected | None] | None] = queue.SimpleQueue()
        self._aborted = False

    def connect(self, endpoints: Sequence[dict[str, Any]], timeout: float) -> None:
        world = self._mpi.COMM_WORLD
        members = world.Get_group().Incl([endpoint["world_rank"] for endpoint in endpoints])
        self._comm = in_background(lambda: world.Create_group(members), timeout, self.context, "MPI")
        self._thread = threading.Thread(target=self._work, name="symcomm-mpi", daemon=True)
        self._thread.start()

    def expect(self, moves: Sequence[Move]) -> Expected:
        expected = Expected(moves)
        self._asked.put(([], None, expected))
        return expected

    def start(
        self, moves: Sequence[Move], then: Callable[[Transfer], None] | None = None, expected: Expected | None = None
    ) -> Transfer:
        awaited = expected.moves if expected is not None else []
        transfer = Transfer([m.peer for m in (*moves, *awaited)], then)
        self._asked.put(([m for m in moves if m.nbytes], transfer, expected))
        return transfer

    def _work(self) -> None:
        """Start transfers that are asked for, and end those that are complete."""
        under_way: deque[tuple[list[Any], Transfer]] = deque()
        nap = 0.0
        while True:
            try:
                item = self._asked.get(block=not under_way)
                if item is None:
                    break
                moves, transfer, expected = item
                if transfer is None and expected is not None:
                    expected.begun = self._begin(expected.moves)
                elif transfer is not None:
                    begun = expected.begun if expected is not None else []
                    under_way.append((begun + self._begin(moves), transfer))
                nap = 0.0
            except queue.Empty:
                pass
            if self._aborted:
                break
            before = len(under_way)
            under_way = deque(pair for pair in under_way if not self._has_ended(*pair))
            if len(under_way) == before:
                nap = min(LONGEST_NAP, nap + 1e-6)
                time.sleep(nap)
        self._give_up(under_way)

    def _begin(self, moves: Sequence[Move]) -> list[Any]:
        requests = []
        for m in moves:
            memory = (ctypes.c_char * m.nbytes).from_address(m.address)
            act = self._comm.Isend if m.is_send else self._comm.Irecv
            requests.append(act([memory, self._mpi.BYTE], m.peer, m.label(LARGEST_TAG)))
        return requests

    def _has_ended(self, requests: list[Any], transfer: Transfer) -> bool:
        try:
            if requests and not self._mpi.Request.Testall(requests):
                return False
        except self._mpi.Exception as error:
            transfer.end(error)
            return True
        transfer.end()
        return True

    def _give_up(self, under_way: deque[tuple[list[Any], Transfer]]) -> None:
        for requests, transfer in under_way:
            for request in requests:
                with contextlib.suppress(self._mpi.Exception):
                    request.Cancel()
            transfer.end(errors.GroupUnusableError("engine mpi was aborted."))
        while True:
            try:
                item = self._asked.get_nowait()
            except queue.Empty:
                return
            if item is not None and item[1] is not None:
                item[1].end(errors.GroupUnusableError("engine mpi was aborted."))

    def abort(self) -> None:
        self._aborted = True
        self._asked.put(None)
        if self._comm is not None and threading.current_thread() is not self._thread:
            self._thread.join(2.0)  # transfers that it has not cancelled by then are up to MPI

    def close(self) -> None:
        self._asked.put(None)
