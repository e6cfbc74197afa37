"""``symcomm bench queue``: a message from one process to another, through our queue and others', in turns.

Each time runs from before ``put`` until the reader has the message and has looked at every page of it; memcpy's until
that process has looked at every page of its copy. Every message is a new object. The next one is sent once the reader
has reported this one through a pipe.
"""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from symcomm import errors
from symcomm.bench import table as bench_table
from symcomm.bench.frame import Asked, Workload, forked, in_turns, pick
from symcomm.bench.pictures import Bars, Panel
from symcomm.bench.run import Seen, Tick, quiet
from symcomm.memory.limits import format_bytes
from symcomm.preflight import has_torch

SIDES = {
    "ours": "symcomm",
    "mp": "multiprocessing",
    "torch": "torch.multiprocessing",
    "zmq": "ZeroMQ",
}
MEMCPY = "memcpy"
DEADLINE = 60.0
MOST_BYTES = 1 << 20  # nobody pickles more of them, whose memory is new each time

Row = dict[str, Any]


@dataclass(frozen=True)
class QueueWorkload(Workload):
    """Messages of these many bytes, by each side in each of ``rounds``: pickled bytes, and tensors."""

    sizes: Sequence[int] = (1 << 10, 64 << 10, 1 << 20, 64 << 20)
    rounds: int = 5
    steps: int = 200  # messages of a turn, fewer of large ones
    sides: Sequence[str] = tuple(SIDES)

    @property
    def turns(self) -> int:
        return len(self.cases) * self.rounds * (len(self.sides) + 1)

    @property
    def cases(self) -> list[tuple[str, int]]:
        kinds = ("bytes", "tensor") if has_torch() else ("bytes",)
        return [(kind, size) for kind in kinds for size in self.sizes if kind == "tensor" or size <= MOST_BYTES]

    def count(self, nbytes: int) -> int:
        return max(3, min(self.steps, (64 << 20) // nbytes))

    def how(self, best: bool) -> str:
        return "fastest turn's median" if best else f"median of the medians of {self.rounds} turns"


QUICK: dict[str, Any] = {"rounds": 2, "steps": 30, "sizes": (1 << 10, 1 << 20)}


def ask(asked: Asked) -> QueueWorkload:
    """Against those that are installed."""
    there = {"ours": True, "mp": True, "torch": has_torch(), "zmq": importlib.util.find_spec("zmq") is not None}
    return asked.workload(QueueWorkload, QUICK, sides=tuple(side for side in SIDES if there[side]))


def run_queue_bench(workload: QueueWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[Row]:
    rows: list[Row] = []
    with contextlib.ExitStack() as opened:
        ends = {side: opened.enter_context(_open(side)) for side in workload.sides}
        for kind, nbytes in workload.cases:
            row: Row = {"kind": kind, "bytes": nbytes, MEMCPY: []}
            row |= {side: [] for side in workload.sides}
            for side in in_turns((*workload.sides, MEMCPY), workload.rounds):
                times = _copy_times if side == MEMCPY else ends[side].times
                row[side].append(statistics.median(times(kind, nbytes, workload.count(nbytes))))
                tick(f"{kind} of {format_bytes(nbytes)}, {SIDES.get(side, side)}")
            rows.append(row)
            seen(rows)
    return rows


def _new(kind: str, nbytes: int) -> Any:
    if kind == "bytes":
        return b"\1" * nbytes
    import torch

    return torch.ones(nbytes, dtype=torch.uint8)


def _look(message: Any) -> int:
    """Whether all of it is there: one element of each page."""
    pages = message[::4096]
    return sum(pages) if isinstance(pages, (bytes, bytearray)) else int(pages.sum())


def _copy_times(kind: str, nbytes: int, count: int) -> list[float]:
    """What is timed of a message, too: a new object, and every page of the copy."""
    target, found = bytearray(nbytes), []
    for _ in range(count + 1):
        message = _new(kind, nbytes)
        source = memoryview(message if kind == "bytes" else message.numpy())
        begin = time.perf_counter()
        memoryview(target)[:] = source
        if _look(target if kind == "bytes" else _as_tensor(target)) != -(-nbytes // 4096):
            raise errors.SymcommError("symcomm bench queue: a copy is not what was copied; nothing was timed.")
        found.append(time.perf_counter() - begin)
    return found[1:]


def _as_tensor(buffer: bytearray) -> Any:
    import torch

    return torch.frombuffer(buffer, dtype=torch.uint8)


# --- both ends ---------------------------------------------------------------------------------------------------


@dataclass
class _Ends:
    """A queue with a reader in a process of its own."""

    put: Callable[[Any], None]
    heard: Any

    def times(self, kind: str, nbytes: int, count: int) -> list[float]:
        found = []
        for _ in range(count + 1):
            message = _new(kind, nbytes)
            begin = time.perf_counter()
            self.put(message)
            if not self.heard.poll(DEADLINE):
                raise errors.DeadlineError("symcomm bench queue: a message did not arrive.")
            end, pages = self.heard.recv()
            if pages != -(-nbytes // 4096):
                raise errors.SymcommError("symcomm bench queue: a message is not what was sent; nothing was timed.")
            found.append(end - begin)  # of one clock
        return found[1:]


def _read(get: Callable[[], Callable[[], Any]], pipe: Any) -> None:
    take = get()
    pipe.send("there")
    while True:
        message = take()
        pages = _look(message)
        pipe.send((time.perf_counter(), pages))
        del message


@contextlib.contextmanager
def _open(side: str) -> Iterator[_Ends]:
    put, get, close = _OPEN[side]()
    try:
        with forked(f"the reader of {SIDES[side]}", _read, get) as (heard, _):
            yield _Ends(put, heard)
    finally:
        close()


def _open_ours() -> tuple[Any, Any, Any]:
    from symcomm.sharing.queue import Queue, QueueReader

    queue = Queue(timeout=DEADLINE)
    return queue.put, lambda: QueueReader(queue.fileno(), timeout=DEADLINE).get, queue.close


def _open_mp() -> tuple[Any, Any, Any]:
    queue = multiprocessing.get_context("fork").Queue()
    return queue.put, lambda: queue.get, queue.close


def _open_torch() -> tuple[Any, Any, Any]:
    import torch.multiprocessing

    queue: Any = torch.multiprocessing.get_context("fork").Queue()
    return queue.put, lambda: queue.get, queue.close


def _open_zmq() -> tuple[Any, Any, Any]:
    zmq: Any = importlib.import_module("zmq")
    context = zmq.Context()
    socket = context.socket(zmq.PAIR)
    address = f"ipc://@symcomm-bench-{id(socket)}-{time.monotonic_ns()}"
    socket.bind(address)

    def get() -> Any:
        reader = zmq.Context().socket(zmq.PAIR)
        reader.connect(address)
        return reader.recv_pyobj

    def close() -> None:
        socket.close(0)
        context.term()

    return socket.send_pyobj, get, close


_OPEN = {"ours": _open_ours, "mp": _open_mp, "torch": _open_torch, "zmq": _open_zmq}


# --- words -------------------------------------------------------------------------------------------------------


def as_table(rows: Sequence[Row], workload: QueueWorkload, best: bool = False) -> bench_table.Table:
    others = [side for side in workload.sides if side != "ours"]
    head = ["message", "size", *(f"{SIDES[side]} (us)" for side in workload.sides), "memcpy (us)"]
    head += [f"{SIDES[side]} / ours" for side in others]
    body = []
    for row in rows:
        seconds = {side: pick(row[side], best) for side in (*workload.sides, MEMCPY)}
        cells = [row["kind"], format_bytes(row["bytes"])]
        cells += [bench_table.microseconds(seconds[side]) for side in (*workload.sides, MEMCPY)]
        body.append(cells + [bench_table.times(seconds[side] / seconds["ours"]) for side in others])
    return "messages between two processes", head, body


def picture(rows: Sequence[Row], workload: QueueWorkload, best: bool = False) -> list[Panel]:
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        bars = {SIDES[side]: pick(row[side], best) * 1e6 for side in workload.sides}
        panels.setdefault(row["kind"], {})[format_bytes(row["bytes"])] = bars
    return [Bars(kind, "microseconds", groups, logarithmic=True) for kind, groups in panels.items()]


def note(rows: Sequence[Row], workload: QueueWorkload) -> str:
    missing = [SIDES[side] for side in SIDES if side not in workload.sides]
    without = f"; not installed: {', '.join(missing)}" if missing else ""
    return f"from before put until the reader has seen every page; above 1: ours is faster{without}"
