"""One rank of one side of a benchmark: Symcomm, Gloo or an MPI. The only file of ours that an MPI's Python sees.

It imports nothing of Symcomm unless it plays Symcomm. Orders come as JSON lines over a Unix socket, so a rank that has
nothing to do sleeps in the kernel and takes no core from the measured side.

order       answer
prepare     {} once the tensors exist and the call was made once; or {"unsupported": reason}
check       {"wrong": elements of this rank's result that are not what they must be}
time        {"ns": [mean of one call, for each repetition], "long": ours that Python had to plan, "calls": all of ours}
sample      {"median", "p99", "total"}: nanoseconds of one call, and of all of them
drop        {} once the tensors are gone
finish      {} once an MPI has taken its files away; no order of the above may follow
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import itertools
import json
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

ONE_SIDED = ("put", "put_signal")  # rank 0 writes into rank 1's window; both write to each other, and wait
REDUCING = ("all_reduce", "reduce", "reduce_scatter")
GROUP_TIMEOUT = 60.0  # seconds; less than the controller's deadlines, so that the side reports first

# MPI knows no 16-bit floats: their bytes travel as uint16 where nothing is reduced.
MPI_DTYPES = {
    "int8": "INT8_T", "uint8": "UINT8_T", "int32": "INT32_T", "uint32": "UINT32_T", "int64": "INT64_T",
    "uint64": "UINT64_T", "float32": "FLOAT", "float64": "DOUBLE", "uint16": "UINT16_T",
}  # fmt: skip


class Unsupported(Exception):
    """This side has no such call, dtype or operation."""


PART = 1 << 18  # elements compared at once, few enough for a cache
PERIOD = 10  # after which the values repeat, and so do results


def values(np: Any, rank: int, start: int, count: int, op: str) -> Any:
    """What rank ``rank`` holds at elements start..start+count: small whole numbers, exact in every dtype."""
    index = np.arange(start, start + PERIOD, dtype=np.int64)
    return repeated(np, (index + rank) % 2 + 1 if op == "prod" else (index + 3 * rank) % 5, count)


def reduced(np: Any, world: int, start: int, count: int, op: str) -> Any:
    parts = (values(np, r, start, PERIOD, op) for r in range(world))
    combine = {"sum": np.add, "avg": np.add, "prod": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    total = functools.reduce(combine, parts)
    return repeated(np, total / world if op == "avg" else total, count)


def repeated(np: Any, period: Any, count: int) -> Any:
    return np.tile(period, -(-count // PERIOD))[:count]


def inputs_of(np: Any, rank: int, case: SimpleNamespace) -> Any:
    """The whole input of a rank, as numbers."""
    length = case.count * (case.world if case.collective in ("reduce_scatter", "scatter", "all_to_all") else 1)
    return values(np, rank, 0, length, case.op)


def expected(np: Any, rank: int, case: SimpleNamespace) -> Any:
    """What this rank's result must be; None when it has none."""
    name, n, world, root = case.collective, case.count, case.world, case.root
    if name == "all_reduce" or (name == "reduce" and rank == root):
        return reduced(np, world, 0, n, case.op)
    if name == "reduce_scatter":
        return reduced(np, world, rank * n, n, case.op)
    if name == "broadcast":
        return values(np, root, 0, n, case.op)
    if name == "all_gather" or (name == "gather" and rank == root):
        return np.concatenate([values(np, r, 0, n, case.op) for r in range(world)])
    if name == "scatter":
        return values(np, root, rank * n, n, case.op)
    if name == "all_to_all":
        return np.concatenate([values(np, r, rank * n, n, case.op) for r in range(world)])
    if (name in ("p2p", "put_signal") and rank < 2) or (name == "put" and rank == 1):
        return values(np, 1 - rank, 0, n, case.op)
    return None


class TorchSide:
    """Symcomm and Gloo: torch tensors, and collectives of which some only work in place."""

    reduce_scatter: str  # the library's name for it
    all_gather: str

    def __init__(self, library: Any, ops: Any, rank: int, world: int) -> None:
        import torch

        self.torch = torch
        torch.set_num_threads(1)
        self.library, self.ops, self.rank, self.world = library, ops, rank, world
        self.barrier: Callable[..., Any] = library.barrier

    def empty(self, count: int, dtype: str, kind: str) -> Any:
        return self.torch.empty(count, dtype=getattr(self.torch, dtype))

    def window(self, count: int, dtype: str) -> tuple[Any, Any]:
        """A window, and the memory that peers write to through it."""
        raise Unsupported("it has no windows")

    def ways(self) -> dict[str, int]:
        """How many calls took the slow path, and how many there were; empty if a library does not say."""
        return {}

    def assign(self, tensor: Any, numbers: Any) -> None:
        tensor.copy_(self.torch.from_numpy(numbers))

    def zero(self, tensor: Any) -> None:
        tensor.zero_()

    def numbers(self, tensor: Any) -> Any:
        return tensor.to(self.torch.float64).numpy()

    def call(self, case: SimpleNamespace, source: Any, result: Any) -> Callable[..., Any]:
        at_root, copies_first = self.rank == case.root, False
        if case.collective in ("all_reduce", "reduce") and not case.in_place:
            copies_first = case.collective == "all_reduce" or at_root
            result = result if copies_first else source
        many = result if case.collective == "gather" else source
        pieces = list(many.chunk(self.world)) if case.collective in ("gather", "scatter") and at_root else None
        call = self.bind(case, source, result, pieces)
        return after_copy(functools.partial(result.copy_, source), call) if copies_first else call

    def bind(self, case: SimpleNamespace, source: Any, result: Any, pieces: list[Any] | None) -> Callable[..., Any]:
        """The library's call with all its arguments."""
        library, root, make = self.library, case.root, functools.partial
        op = getattr(self.ops, TORCH_OPS[case.op])
        calls: dict[str, Callable[..., Any]] = {
            "all_reduce": make(library.all_reduce, result, op),
            "reduce": make(library.reduce, result, root, op),
            "reduce_scatter": make(getattr(library, self.reduce_scatter), result, source, op),
            "broadcast": make(library.broadcast, result, root),
            "all_gather": make(getattr(library, self.all_gather), result, source),
            "gather": make(library.gather, source, pieces, root),
            "scatter": make(library.scatter, result, pieces, root),
            "all_to_all": make(library.all_to_all_single, result, source),
            "p2p": ping_pong(self.rank, make(library.send, source), make(library.recv, result)),
            "barrier": self.barrier,
        }
        return calls[case.collective]


def after_copy(copy: Callable[..., Any], call: Callable[..., Any]) -> Callable[..., Any]:
    """An out-of-place call from an in-place one: a copy first, as a program would write it."""

    def both() -> None:
        copy()
        call()

    return both


def waited(start: Callable[..., Any]) -> Callable[..., Any]:
    """A call that waits for what ``start`` begins."""
    return lambda *args: start(*args).wait()


TORCH_OPS = {"sum": "SUM", "prod": "PRODUCT", "min": "MIN", "max": "MAX", "avg": "AVG"}


class SymcommSide(TorchSide):
    reduce_scatter, all_gather = "reduce_scatter_single", "all_gather_single"

    def __init__(self, group: Any):
        import symcomm

        super().__init__(group, symcomm.ReduceOp, group.rank, group.size)
        self.group = group

    @classmethod
    def joined(cls, args: SimpleNamespace) -> SymcommSide:
        os.environ["SYMCOMM_HEAP"] = "1"  # only series "heap" uses that memory
        import symcomm
        from symcomm.torch_backend import torch_patches

        torch_patches.apply("cpu_allocator")  # where torch was loaded before, or does not load us
        store = symcomm.FileStore(args.store, args.world)
        return cls(symcomm.init(store=store, rank=args.rank, world_size=args.world, timeout=GROUP_TIMEOUT))

    def empty(self, count: int, dtype: str, kind: str) -> Any:
        from symcomm.memory import shared_heap

        if kind != "symmetric":
            if kind == "heap" and (why := shared_heap.heap_stats().why_not):
                raise Unsupported(why)
            shared_heap.serve_from(shared_heap.LEAST_BYTES if kind == "heap" else shared_heap.NEVER)
            return super().empty(count, dtype, kind)
        torch_dtype = getattr(self.torch, dtype)
        return self.torch.frombuffer(self.group.arena.buffer(count * torch_dtype.itemsize), dtype=torch_dtype)

    def window(self, count: int, dtype: str) -> tuple[Any, Any]:
        memory = self.empty(count, dtype, "ordinary")
        return self.group.new_window(memory), memory

    def bind(self, case: SimpleNamespace, source: Any, result: Any, pieces: list[Any] | None) -> Callable[..., Any]:
        """gather and scatter have one buffer at the root, as MPI's."""
        make, group, name = functools.partial, self.group, case.collective
        if case.kind == "async" and name == "p2p":
            return ping_pong(self.rank, waited(make(group.isend, source)), waited(make(group.irecv, result)))
        if name == "gather":
            call: Callable[..., Any] = make(group.gather_single, result if pieces else None, source, case.root)
        elif name == "scatter":
            call = make(group.scatter_single, result, source if pieces else None, case.root)
        else:
            call = super().bind(case, source, result, pieces)
        return waited(make(call, async_op=True)) if case.kind == "async" else call

    def ways(self) -> dict[str, int]:
        counts = self.group.call_stats().values()
        return {"long": sum(c["long"] for c in counts), "calls": sum(c["short"] + c["long"] for c in counts)}

    def close_window(self, case: SimpleNamespace) -> None:
        case.window.tensor_deregister()

    def one_sided(self, case: SimpleNamespace, source: Any) -> Callable[..., Any]:
        window = case.window
        if case.collective == "put":
            return functools.partial(window.put, source, 1) if self.rank == 0 else nothing

        def send(peer: int) -> None:
            window.put(source, peer)
            window.signal(peer)

        return ping_pong(self.rank, send, window.wait_signal)


class GlooSide(TorchSide):
    """torch.distributed's default group, whoever made it."""

    reduce_scatter, all_gather = "reduce_scatter_tensor", "all_gather_into_tensor"

    def __init__(self) -> None:
        import torch.distributed as dist

        super().__init__(dist, dist.ReduceOp, dist.get_rank(), dist.get_world_size())

    @classmethod
    def joined(cls, args: SimpleNamespace) -> GlooSide:
        from datetime import timedelta

        import torch.distributed as dist

        store, seconds = dist.FileStore(args.store, args.world), timedelta(seconds=GROUP_TIMEOUT)
        dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.world, timeout=seconds)
        return cls()


class MPISide:
    """mpi4py's buffer calls on NumPy arrays, with the buffers described once, outside the loop."""

    def __init__(self, args: SimpleNamespace):
        import mpi4py

        mpi4py.rc.threads = False  # one thread calls MPI: its fastest mode
        import numpy
        from mpi4py import MPI

        self.np, self.MPI, self.comm = numpy, MPI, MPI.COMM_WORLD
        self.rank, self.world = self.comm.rank, self.comm.size
        self.barrier = self.comm.Barrier

    def empty(self, count: int, dtype: str, kind: str) -> Any:
        return self.np.empty(count, dtype={"float16": "uint16", "bfloat16": "uint16"}.get(dtype, dtype))

    def window(self, count: int, dtype: str) -> tuple[Any, Any]:
        """Memory that MPI allocates itself: what it maps between the ranks of a host."""
        memory = self.empty(count, dtype, "ordinary")
        window = self.MPI.Win.Allocate(memory.nbytes, memory.itemsize, comm=self.comm)
        return window, self.np.frombuffer(window.tomemory(), memory.dtype)

    def close_window(self, case: SimpleNamespace) -> None:
        if case.collective == "put":
            case.window.Unlock_all()
        case.window.Free()

    def one_sided(self, case: SimpleNamespace, source: Any) -> Callable[..., Any]:
        """put: an access epoch that is open all the time, and a flush. put_signal: a fence after each put."""
        window, sent = case.window, self.describe(source)
        if case.collective == "put":
            window.Lock_all()

            def put() -> None:
                window.Put(sent, 1)
                window.Flush(1)

            return put if self.rank == 0 else nothing
        window.Fence()

        def send(peer: int) -> None:
            window.Put(sent, peer)
            window.Fence()

        def recv(peer: int) -> None:
            window.Fence()

        if self.rank > 1:
            return after_copy(window.Fence, window.Fence)  # all ranks take part in a fence
        return ping_pong(self.rank, send, recv)

    def assign(self, array: Any, numbers: Any) -> None:
        array[...] = numbers

    def numbers(self, array: Any) -> Any:
        return array.astype(self.np.float64)

    def zero(self, array: Any) -> None:
        array.fill(0)

    def ways(self) -> dict[str, int]:
        return {}

    def call(self, case: SimpleNamespace, source: Any, result: Any) -> Callable[..., Any]:
        comm, root, at_root, make = self.comm, case.root, self.rank == case.root, functools.partial
        if case.collective in REDUCING and (case.dtype in ("float16", "bfloat16") or case.op == "avg"):
            raise Unsupported(f"MPI has no {case.op} of {case.dtype}")
        op = self.MPI.SUM if case.op == "avg" else getattr(self.MPI, case.op.upper())
        send, recv = self.describe(source), self.describe(result)
        given = self.MPI.IN_PLACE if case.in_place else send
        root_only = recv if at_root else None
        calls: dict[str, Callable[..., Any]] = {
            "all_reduce": make(comm.Allreduce, given, recv, op),
            "reduce": make(comm.Reduce, given if at_root else send, root_only, op, root),
            "reduce_scatter": make(comm.Reduce_scatter_block, *self.scattered(case, source, result), op),
            "broadcast": make(comm.Bcast, recv, root),
            "all_gather": make(comm.Allgather, given, recv),
            "gather": make(comm.Gather, given if at_root else send, root_only, root),
            "scatter": make(comm.Scatter, send, self.MPI.IN_PLACE if at_root and case.in_place else recv, root),
            "all_to_all": make(comm.Alltoall, send, recv),
            "p2p": ping_pong(self.rank, make(comm.Send, send), make(comm.Recv, recv)),
        }
        return calls[case.collective]

    def describe(self, array: Any) -> Any:
        return None if array is None else [array, getattr(self.MPI, MPI_DTYPES[str(array.dtype)])]

    def scattered(self, case: SimpleNamespace, source: Any, result: Any) -> tuple[Any, Any]:
        """In place, MPI leaves the result at the front of the input, on every rank."""
        if case.in_place:
            return self.MPI.IN_PLACE, self.describe(source)
        return self.describe(source), self.describe(result)


SIDES: dict[str, Callable[[SimpleNamespace], Any]] = {
    "symcomm": SymcommSide.joined,
    "gloo": GlooSide.joined,
    "mpich": MPISide,
    "openmpi": MPISide,
}


def nothing() -> None:
    """The part of a rank that others write to."""


def ping_pong(rank: int, send: Callable[..., Any], recv: Callable[..., Any]) -> Callable[..., Any]:
    """A message there and one back between ranks 0 and 1; other ranks do nothing."""
    peer = 1 - rank

    def ping() -> None:
        send(peer)
        recv(peer)

    def pong() -> None:
        recv(peer)
        send(peer)

    return ping if rank == 0 else pong if rank == 1 else nothing


class Bench:
    """Tensors and call of one case on one side."""

    def __init__(self, side: Any, case: SimpleNamespace):
        import numpy

        self.np, self.side, self.case = numpy, side, case
        case.world = side.world
        self.source, self.result = self.tensors()
        self.fill()
        if case.collective == "barrier":
            self.call = side.bind(case, None, None, None) if case.kind == "async" else side.barrier
        elif case.collective in ONE_SIDED:
            self.call = side.one_sided(case, self.source)
        else:
            self.call = side.call(case, self.source, self.result)

    def tensors(self) -> tuple[Any, Any]:
        """(input, result). In place, one is a part of the other, or they are the same."""
        case, world, rank = self.case, self.side.world, self.side.rank
        if case.collective == "barrier":
            return None, None
        make = functools.partial(self.side.empty, dtype=case.dtype, kind=case.kind)
        n, at_root = case.count, rank == case.root
        if case.collective in ONE_SIDED:
            case.window, result = self.side.window(n, case.dtype)
            return make(n), result
        mine = slice(rank * n, (rank + 1) * n)
        wide_source = case.collective in ("reduce_scatter", "all_to_all") or (case.collective == "scatter" and at_root)
        wide_result = case.collective in ("all_gather", "all_to_all") or (case.collective == "gather" and at_root)
        no_source = case.collective == "scatter" and not at_root
        no_result = case.collective == "gather" and not at_root
        if not case.in_place:
            source = None if no_source else make(n * world if wide_source else n)
            return source, None if no_result else make(n * world if wide_result else n)
        if wide_source:
            source = make(n * world)
            return source, source[mine]
        if no_result:
            return make(n), None
        result = make(n * world if wide_result else n)
        return (None if no_source else result[mine] if wide_result else result), result

    def fill(self) -> None:
        """Give the input its values, and the result others, so that we notice a call that does nothing."""
        case = self.case
        if self.result is not None:
            self.side.assign(self.result, self.np.full(len(self.result), 9, self.np.int64))
        if self.source is not None:
            self.side.assign(self.source, inputs_of(self.np, self.side.rank, case)[: len(self.source)])
        self.zeroed = False

    def check(self) -> int:
        """Make the call once on known values; returns how many elements of the result are wrong."""
        self.fill()
        self.side.barrier()
        self.call()
        if self.case.collective == "put":
            self.side.barrier()  # the target does not know when the put is over
        right = expected(self.np, self.side.rank, self.case)
        if right is None:
            return 0
        result = self.result
        if self.case.collective == "reduce_scatter" and self.case.in_place and isinstance(self.side, MPISide):
            result = self.source[: self.case.count]
        parts = (slice(at, at + PART) for at in range(0, len(right), PART))
        return sum(int(self.np.count_nonzero(self.side.numbers(result[p]) != self.rounded(right[p]))) for p in parts)

    def rounded(self, numbers: Any) -> Any:
        """``numbers`` as the case's dtype holds them."""
        scratch = self.side.empty(len(numbers), self.case.dtype, "ordinary")
        self.side.assign(scratch, numbers)
        return self.side.numbers(scratch)

    def clear(self) -> None:
        """Zeros stay zeros under every operation, however often it is repeated."""
        for tensor in (self.source, self.result):
            if tensor is not None and not self.zeroed:
                self.side.zero(tensor)
        self.zeroed = True

    def time(self, iterations: int, repetitions: int, warmup: int) -> list[float]:
        """Nanoseconds of one call, the mean of each repetition."""
        self.clear()
        call, barrier, now = self.call, self.side.barrier, time.perf_counter_ns
        for _ in range(warmup):
            call()
        means = []
        for _ in range(repetitions):
            barrier()
            start = now()
            for _ in itertools.repeat(None, iterations):
                call()
            means.append((now() - start) / iterations)
        return [mean / self.messages for mean in means]

    @property
    def messages(self) -> int:
        """Of one call: there and back are two."""
        return 2 if self.case.collective in ("p2p", "put_signal") else 1

    def sample(self, calls: int) -> dict[str, float]:
        """Time every single call; returns the median and the 99th percentile."""
        self.clear()
        call, now = self.call, time.perf_counter_ns
        took = []
        for _ in range(5):
            call()
        self.side.barrier()
        start = before = now()
        for _ in itertools.repeat(None, calls):
            call()
            after = now()
            took.append(after - before)
            before = after
        took.sort()
        median, p99 = (took[int(calls * part)] / self.messages for part in (0.5, 0.99))
        return {"median": median, "p99": p99, "total": before - start}

    def close(self) -> None:
        """All ranks close together."""
        if self.case.collective in ONE_SIDED:
            self.side.close_window(self.case)


def die_with(connection: socket.socket) -> None:
    """End this process when the controller is gone, even inside a call that never returns."""

    def watch() -> None:
        poll = select.poll()
        poll.register(connection, 0)  # hang-up and errors only; sleeps in the kernel until then
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


class Orders:
    """The orders in the table at the top."""

    def __init__(self, args: SimpleNamespace):
        self.side = SIDES[args.name](args)
        self.rank: int = self.side.rank
        self.cases: dict[int, Bench] = {}
        if args.pinned:
            pin(self.side.rank, self.side.world)
        gc.freeze()  # what is loaded by now stays, so collections after each case skip it
        gc.disable()

    def prepare(self, case: int, spec: dict[str, Any]) -> dict[str, Any]:
        try:
            bench = Bench(self.side, SimpleNamespace(**spec))
            self.side.barrier()
            bench.call()
        except Unsupported as reason:
            return {"unsupported": str(reason)}
        except (RuntimeError, NotImplementedError, ValueError) as error:
            return {"unsupported": str(error).splitlines()[0] if str(error) else type(error).__name__}
        self.cases[case] = bench
        return {}

    def check(self, case: int) -> dict[str, Any]:
        return {"wrong": self.cases[case].check()}

    def time(self, case: int, iterations: int, repetitions: int, warmup: int) -> dict[str, Any]:
        before = self.side.ways()
        means = self.cases[case].time(iterations, repetitions, warmup)
        return {"ns": means} | {name: count - before[name] for name, count in self.side.ways().items()}

    def sample(self, case: int, calls: int) -> dict[str, Any]:
        return self.cases[case].sample(calls)

    def drop(self, case: int) -> dict[str, Any]:
        if case in self.cases:
            self.cases.pop(case).close()
        gc.collect()
        return {}

    def finish(self) -> dict[str, Any]:
        self.side.MPI.Finalize()
        return {}


def pin(rank: int, world: int) -> None:
    """Keep the calling thread on a core of its own, if there are enough; helper threads of libraries stay free."""
    cores = sorted(os.sched_getaffinity(0))
    if world <= len(cores):
        os.sched_setaffinity(0, {cores[rank]})


def serve(make: Callable[[SimpleNamespace], Any]) -> None:
    """Be a rank: ``make`` an object with a method for each order, say who we are, then obey until the controller hangs
    up. What is made is told the side's name, its rank, the world, a file to meet in, and whether to be pinned."""
    faulthandler.register(signal.SIGUSR1, 2, all_threads=False)  # asks where this rank is; see whereabouts.py
    address, name, rank, world, store, pinned = sys.argv[1:7]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(address)
    die_with(connection)
    orders = make(SimpleNamespace(name=name, rank=int(rank), world=int(world), store=store, pinned=pinned == "pin"))
    with connection, connection.makefile("rw") as stream:
        stream.write(json.dumps({"rank": orders.rank, "pid": os.getpid()}) + "\n")
        stream.flush()
        for line in stream:
            order = json.loads(line)
            try:
                answer = getattr(orders, order.pop("do"))(**order)
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            stream.write(json.dumps(answer) + "\n")
            stream.flush()
    os._exit(0)  # peers may be gone already: nothing to finalize together


if __name__ == "__main__":
    serve(Orders)
