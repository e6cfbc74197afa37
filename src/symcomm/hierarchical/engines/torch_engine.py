"""Engines that torch brings along: Gloo for any network, NCCL through GPUs.

Both are torch's own C++ process groups, used only to send and receive bytes. They rendezvous in a TCPStore of ours that
the first rank serves: torch's client resolves 127.0.0.1 by DNS, and hangs for seconds where that does not answer. A
thread waits for transfers, since a wait cannot be cancelled. Gloo closes all connections when one of its own deadlines
passes, so it is given none, except to abort everything.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib.util
import os
import queue
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from symcomm import errors
from symcomm.hierarchical.engines.base import Engine, EngineContext, Expected, Move, Transfer, in_background
from symcomm.hierarchical.session import job_secret
from symcomm.hierarchical.topology import EAGER_HOST_MAX
from symcomm.memory.share import check_descriptors
from symcomm.store import TCPStore

NEVER = timedelta(days=365)
LARGEST_TAG = 1 << 30
DESCRIPTORS = 8  # file descriptors for an engine besides one for each rank; Gloo was seen to take 3
ABORT_TAG = (1 << 31) - 2
LOOK = timedelta(milliseconds=200)  # between two checks whether a group that connects was given up


def _bytes_at(address: int, nbytes: int) -> Any:
    """Memory as a torch tensor. The code that starts a transfer keeps the memory alive."""
    import torch

    return torch.frombuffer((ctypes.c_char * nbytes).from_address(address), dtype=torch.uint8)


def _as_torch_store(store: TCPStore, given_up: threading.Event) -> Any:
    """Our store as one of torch's. The caller must keep it: C++ keeps only its own half alive. Waits in it end soon
    after ``given_up`` is set."""
    import torch.distributed as dist

    def wait(keys: list[str], timeout: timedelta | None = None) -> None:
        limit = store.timeout if timeout is None else timeout
        end = time.monotonic() + limit.total_seconds()
        while True:
            try:
                return store.wait(keys, min(LOOK, timedelta(seconds=max(0.001, end - time.monotonic()))))
            except errors.DeadlineError:
                if given_up.is_set() or time.monotonic() >= end:
                    raise

    def get(key: str) -> bytes:
        wait([key])
        return store.get(key)

    def multi_get(keys: list[str]) -> list[bytes]:
        wait(keys)
        return store.multi_get(keys)

    class TorchStore(dist.Store):
        def __init__(self) -> None:
            super().__init__()
            self.wait, self.get, self.multi_get = wait, get, multi_get
            for name in ("set", "add", "check", "compare_set", "delete_key", "multi_set"):
                setattr(self, name, getattr(store, name))
            self.deleteKey, self.getNumKeys = store.delete_key, store.num_keys  # the names that C++ calls
            self.set_timeout = store.set_timeout

    return TorchStore()


def _why_without(library: str) -> str:
    """Why torch cannot bring ``library`` along here; empty when it can."""
    if importlib.util.find_spec("torch") is None:
        return "it comes with torch, which is not installed"
    import torch.distributed as dist

    has = dist.is_available() and getattr(dist, f"is_{library.lower()}_available")()
    return "" if has else f"this build of torch has no {library}"


_connected: set[_TorchEngine] = set()


@atexit.register
def _end_all() -> None:
    """A thread that is inside torch when the interpreter exits would crash the process."""
    for engine in list(_connected):
        if engine.pid == os.getpid():
            engine.end_threads()


class _TorchEngine(Engine):
    def __init__(self, context: EngineContext):
        self.context = context
        self.pid = os.getpid()
        self._served: TCPStore | None = None
        self._store: Any = None
        self._first: dict[str, Any] = {}  # the first rank's endpoint
        self._group: Any = None
        self._post = threading.RLock()  # held while moves start, so that a pair's messages keep their order
        self._waiting: dict[int, queue.SimpleQueue[tuple[list[Any], Transfer] | None]] = {}  # by tag
        self._threads: list[threading.Thread] = []
        self._under_way: set[Transfer] = set()
        self.endpoint = {}
        if context.rank == 0:
            token = "" if job_secret() else secrets.token_hex(16)  # all ranks have the job's own
            self._served = TCPStore(context.address, 0, is_master=True, token=token or None)
            self.endpoint = {"address": context.address, "port": self._served.port, "token": token}

    def connect(self, endpoints: Sequence[dict[str, Any]], timeout: float) -> None:
        """Connects in a thread: both the store and the engine would wait for a peer that died meanwhile."""
        self._first, size = endpoints[0], self.context.size
        needed = DESCRIPTORS + size * (1 if self._served is None else 2)  # the store's server has one for each, too
        how, limit, given_up = self.name.capitalize(), timedelta(seconds=timeout), threading.Event()
        check_descriptors(f"connecting by {how}", self.context.rank, needed)
        try:
            join = partial(self._join, limit, given_up)
            self._group = in_background(join, timeout, self.context, how, self._absent)
        finally:
            if self._group is None:
                given_up.set()  # ends waits for the others in the store, and their connections
        _connected.add(self)

    def _join(self, limit: timedelta, given_up: threading.Event) -> Any:
        store = self._served or self._open_store(limit)
        store.set_timeout(limit)
        store.set(f"connecting/{self.context.rank}", b"1")
        self._store = _as_torch_store(store, given_up)
        return self._make_group()

    def _open_store(self, timeout: timedelta) -> TCPStore:
        """A client of the store that the first rank serves."""
        first = self._first
        return TCPStore(first["address"], first["port"], timeout=timeout, token=first["token"] or None, patient=False)

    def _absent(self) -> list[int]:
        """Ranks that have not begun to connect, as the first rank's store says; the first rank if it does not answer.
        This takes a connection of its own: the engine still waits in the other."""
        try:
            with contextlib.closing(self._open_store(timedelta(seconds=1))) as store:
                return [r for r in range(self.context.size) if not store.check([f"connecting/{r}"])]
        except RuntimeError:
            return [0]

    def _make_group(self) -> Any:
        raise AssertionError("made by the engines below")

    def start(
        self, moves: Sequence[Move], then: Callable[[Transfer], None] | None = None, expected: Expected | None = None
    ) -> Transfer:
        moves, begun = [m for m in moves if m.nbytes], []
        awaited = expected.moves if expected is not None else []
        transfer = Transfer([m.peer for m in (*moves, *awaited)], then)
        try:
            with self._post:
                if expected is not None and expected.begun:
                    begun = expected.begun
                else:
                    moves += awaited
                if self._group is None:
                    raise RuntimeError(f"engine {self.name} was closed")
                works = begun + self._begin(moves)
                self._under_way.add(transfer)
                self._waiter(next((m.tag for m in (*moves, *awaited)), 0)).put((works, transfer))
        except RuntimeError as error:  # the peer is gone already, or no thread could be started
            self._under_way.discard(transfer)
            transfer.end(error)
        return transfer

    def _waiter(self, tag: int) -> queue.SimpleQueue[Any]:
        """The queue of the thread for transfers of one tag, which end about in the order of their start."""
        waiting = self._waiting.get(tag)
        if waiting is None:
            waiting = queue.SimpleQueue()
            thread = threading.Thread(target=self._on_ready, args=(waiting,), name=f"symcomm-{self.name}", daemon=True)
            thread.start()
            self._threads.append(thread)
            self._waiting[tag] = waiting
        return waiting

    def _begin(self, moves: Sequence[Move]) -> list[Any]:
        """Start moves; returns the works to wait for. Receives come first, so that arriving bytes have a place."""
        works = []
        for m in sorted(moves, key=lambda m: m.is_send):
            act = self._group.send if m.is_send else self._group.recv
            works.append(act([_bytes_at(m.address, m.nbytes)], m.peer, m.label(LARGEST_TAG)))
        return works

    def _on_ready(self, waiting: queue.SimpleQueue[Any]) -> None:
        """A thread of the engine: waits for transfers, in the order in which they were started."""
        while (item := waiting.get()) is not None:
            works, transfer = item
            error: BaseException | None = None
            work = None
            for work in works:
                try:
                    work.wait()
                except RuntimeError as reason:
                    error = error or reason
            del item, works, work  # they must not be the last to go, in a thread that outlives the group
            self._under_way.discard(transfer)
            transfer.end(error)

    def close(self) -> None:
        with self._post:
            for waiting in self._waiting.values():
                waiting.put(None)
            self._waiting = {}
            over = not self._under_way
        if over:  # the threads have nothing left to do; one that Python kills inside PyTorch ends the process
            self._join_threads()
            with self._post:
                _connected.discard(self)
                self._group = self._store = self._served = None

    def _join_threads(self) -> None:
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2.0)

    def end_threads(self) -> None:
        """Called when the process ends."""
        if self._under_way:
            self.abort()
        self.close()
        self._join_threads()


class GlooEngine(_TorchEngine):
    name = "gloo"
    eager_host_max = EAGER_HOST_MAX

    @staticmethod
    def why_not() -> str:
        return _why_without("Gloo")

    def _make_group(self) -> Any:
        from torch._C._distributed_c10d import ProcessGroupGloo

        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = NEVER
        options._devices = [gloo.create_device(hostname=self.context.address)]
        return gloo(self._store, self.context.rank, self.context.size, options)

    def expect(self, moves: Sequence[Move]) -> Expected:
        expected = Expected(moves)
        with self._post, contextlib.suppress(RuntimeError):  # the peer is gone, as start will find
            if self._group is not None:
                expected.begun = self._begin(expected.moves)
        return expected

    def abort(self) -> None:
        """Let a wait run out of time: Gloo then closes all connections, which ends all waits, here and at the peers."""
        group, size = self._group, self.context.size
        if group is None or size == 1:
            return
        nothing = bytearray(1)
        context = (ctypes.c_char * 1).from_buffer(nothing)
        with contextlib.suppress(RuntimeError):
            peer = (self.context.rank + 1) % size
            group.recv([_bytes_at(ctypes.addressof(context), 1)], peer, ABORT_TAG).wait(timedelta(milliseconds=1))


class NcclEngine(_TorchEngine):
    """For hosts whose fast network only NCCL knows: bytes pass through the memory of this rank's GPU."""

    name = "nccl"
    has_tags = False

    @staticmethod
    def why_not() -> str:
        if reason := _why_without("NCCL"):
            return reason
        import torch

        return "" if torch.cuda.is_available() else "this machine has no GPU"

    def __init__(self, context: EngineContext):
        import torch

        super().__init__(context)
        self._device = torch.device("cuda", torch.cuda.current_device())  # of the thread that makes the group

    def _make_group(self) -> Any:
        import torch
        import torch._C._distributed_c10d as torch_c10d
        import torch.distributed as dist

        nccl: Any = vars(torch_c10d)["ProcessGroupNCCL"]
        options = nccl.Options()
        options._timeout = NEVER
        self._stream = torch.cuda.Stream(self._device)
        backend = nccl(self._store, self.context.rank, self.context.size, options)
        whole = dist.ProcessGroup(self._store, self.context.rank, self.context.size)  # this one can send batches
        whole._set_default_backend(dist.ProcessGroup.BackendType.NCCL)
        whole._register_backend(self._device, dist.ProcessGroup.BackendType.NCCL, backend)
        return whole

    def _begin(self, moves: Sequence[Move]) -> list[Any]:
        """One batch, so that sends and receives of a pair do not wait for each other."""
        import torch

        if not moves:
            return []
        with torch.cuda.stream(self._stream):
            hosts = [_bytes_at(m.address, m.nbytes) for m in moves]
            staged = [
                host.to(self._device) if m.is_send else torch.empty(m.nbytes, dtype=torch.uint8, device=self._device)
                for host, m in zip(hosts, moves, strict=True)
            ]
            self._group._start_coalescing(self._device)
            for m, piece in zip(moves, staged, strict=True):
                (self._group.send if m.is_send else self._group.recv)([piece], m.peer, m.tag)
            work = self._group._end_coalescing(self._device)
        pairs = [(h, s) for m, h, s in zip(moves, hosts, staged, strict=True) if not m.is_send]
        return [_Fetch(work, pairs, staged, self._stream)]

    def abort(self) -> None:
        if self._group is not None:
            self._group.abort()


class _Fetch:
    """Waits for a batch of NCCL's, and copies the received bytes to the host."""

    def __init__(self, work: Any, pairs: list[tuple[Any, Any]], staged: list[Any], stream: Any):
        self._work, self._pairs, self._staged, self._stream = work, pairs, staged, stream

    def wait(self) -> None:
        import torch

        with torch.cuda.stream(self._stream):
            self._work.wait()
            for host, piece in self._pairs:
                host.copy_(piece)
        self._stream.synchronize()
