"""``symcomm bench store``: TCPStore, ours beside PyTorch's, in one run and in turns, so that noise hits both alike.

Servers and clients are processes of their own, as in a job. Latencies are medians; above a ratio of 1 ours is faster.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from symcomm.bench import table as bench_table
from symcomm.bench.frame import Asked, Workload, forked, in_turns
from symcomm.bench.pictures import Bars, Panel
from symcomm.bench.run import Seen, Tick, quiet
from symcomm.errors import ResourceError
from symcomm.preflight import INSTALL_TORCH, has_torch

SIDES = {"ours": "ours", "torch": "PyTorch"}

_TIMEOUT = timedelta(seconds=60)
_ROUNDS = 10  # turns that ours and PyTorch's take
_DEADLINE = 300.0  # seconds for any one measurement
_CONNECTING_PROCESSES = 4

_EIGHT = [f"bench/m{i}" for i in range(8)]

# name -> (what to do before, what to measure); s is the store, i counts
_CALLS: dict[str, tuple[Callable[[Any], Any], Callable[[Any, int], Any]]] = {
    "set": (lambda s: None, lambda s, i: s.set("bench/k", "v" * 16)),
    "get": (lambda s: s.set("bench/k", "v" * 16), lambda s, i: s.get("bench/k")),
    "add": (lambda s: None, lambda s, i: s.add("bench/n", 1)),
    "check": (lambda s: s.set("bench/k", "v"), lambda s, i: s.check(["bench/k"])),
    "compare_set": (lambda s: s.set("bench/c", "a"), lambda s, i: s.compare_set("bench/c", "a", "a")),
    "wait": (lambda s: s.set("bench/k", "v"), lambda s, i: s.wait(["bench/k"])),
    "multi_get (8 keys)": (lambda s: s.multi_set(_EIGHT, ["v" * 16] * 8), lambda s, i: s.multi_get(_EIGHT)),
    "queue push + pop": (lambda s: None, lambda s, i: (s.queue_push("bench/q", "v"), s.queue_pop("bench/q"))),
}


@dataclass(frozen=True)
class StoreWorkload(Workload):
    """Every call with each number of ``clients``; waking; and connecting so many at once."""

    clients: Sequence[int] = (1, 8)
    calls: int = 2000  # of each kind, by each client
    connect: Sequence[int] = (100, 500)
    sides: Sequence[str] = tuple(SIDES)

    @property
    def turns(self) -> int:
        return len(self.sides) * (len(self.clients) * len(_CALLS) * _ROUNDS + 1 + len(self.connect)) + 1


QUICK: dict[str, Any] = {"calls": 200, "connect": (20,)}


def ask(asked: Asked) -> StoreWorkload:
    """Against PyTorch's, if torch is installed."""
    usual: dict[str, Any] = {} if has_torch() else {"sides": ("ours",)}
    return asked.workload(StoreWorkload, QUICK, **usual)


Row = dict[str, Any]  # what, clients; for each side its time in us and, where many call at once, calls per second


def run_store_bench(workload: StoreWorkload, tick: Tick = quiet, seen: Seen = quiet) -> list[Row]:
    for side in workload.sides:
        _store_class(side)  # load it before forking, so that processes start quickly
    rows: list[Row] = []
    _allow_files(max([*workload.connect, *workload.clients, 1]))
    with contextlib.ExitStack() as stack:
        servers = {side: forked(f"the server of the {SIDES[side]} store", _serve, side) for side in workload.sides}
        ports = {side: stack.enter_context(server)[1] for side, server in servers.items()}
        for count in workload.clients:
            rows += _measure_calls(ports, count, workload.calls, tick)
            seen(rows)
        waking = _in_processes(2, tick, _ping_pong, ports, workload.calls)[0]
        rows.append({"what": "set until a waiter goes on", "clients": 2, **_in_us(waking)})
        seen(rows)
        rows += _measure_connecting(ports, workload.connect, tick)
        seen(rows)
    return rows


def _store_class(side: str) -> Any:
    if side == "ours":
        from symcomm.store.tcp import TCPStore

        return TCPStore
    import torch.distributed

    return torch.distributed.TCPStore


def _connect(side: str, port: int) -> Any:
    return _store_class(side)("127.0.0.1", port, timeout=_TIMEOUT)


# --- processes -------------------------------------------------------------------------------------------


def _allow_files(connections: int) -> None:
    count = connections + 200
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ResourceError(f"{count} connections need as many file descriptors; the limit is {hard} (`ulimit -Hn`).")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _serve(side: str, pipe: Any) -> None:
    store = _store_class(side)("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    pipe.send(store.port)
    pipe.poll(None)  # until the other end is closed


@dataclass(frozen=True)
class _StoreClient:
    """One of several processes that measure together."""

    rank: int
    barrier: Any
    pipe: Any

    def meet(self) -> None:
        self.barrier.wait(_DEADLINE)

    def tell(self, what: str) -> None:
        """A turn is done. Rank 0 reports it for all, while nothing is timed."""
        if self.rank == 0:
            self.pipe.send(("turn", what))

    def run(self, work: Callable[..., Any], args: Sequence[Any]) -> None:
        self.pipe.send(("result", work(self, *args)))


def _in_processes(count: int, tick: Tick, work: Callable[..., Any], *args: Any) -> list[Any]:
    """``work(client, *args)`` in ``count`` processes at once; their results by rank."""
    ctx: Any = mp.get_context("fork")
    barrier = ctx.Barrier(count)
    pipes = [ctx.Pipe(duplex=False) for _ in range(count)]
    clients = [_StoreClient(rank, barrier, send) for rank, (_, send) in enumerate(pipes)]
    processes = [ctx.Process(target=client.run, args=(work, args), daemon=True) for client in clients]
    for process in processes:
        process.start()
    results = []
    try:
        for rank, (receive, send) in enumerate(pipes):
            send.close()
            results.append(_result_of(rank, receive, tick))
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return results


def _result_of(rank: int, pipe: Any, tick: Tick) -> Any:
    while pipe.poll(_DEADLINE):
        kind, value = pipe.recv()
        if kind == "result":
            return value
        tick(value)
    raise ResourceError(f"symcomm bench: client process {rank} of the store said nothing for {_DEADLINE:.0f} s.")


# --- measurements ------------------------------------------------------------------------------------------


def _time_calls(client: _StoreClient, ports: dict[str, int], calls: int) -> dict[tuple[str, str], Any]:
    """The median of each call (seconds), and when each of its rounds began and ended, by (call, side)."""
    stores = {side: _connect(side, port) for side, port in ports.items()}
    samples: dict[tuple[str, str], list[float]] = {}
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    clock = time.perf_counter
    format_clients = f"{client.barrier.parties} client{'s' * (client.barrier.parties > 1)}"
    for name, (prepare, call) in _CALLS.items():
        for side in in_turns(list(stores), _ROUNDS):
            store = stores[side]
            prepare(store)
            for i in range(20):
                call(store, i)
            client.meet()
            own = samples.setdefault((name, side), [])
            begin = clock()
            for i in range(calls // _ROUNDS):
                start = clock()
                call(store, i)
                own.append(clock() - start)
            store.num_keys()  # a set has no answer; this call is answered after all sets
            spans.setdefault((name, side), []).append((begin, clock()))
            client.meet()
            client.tell(f"{name}, {SIDES[side]}, {format_clients}")
    return {key: (statistics.median(samples[key]), spans[key]) for key in samples}


def _measure_calls(ports: dict[str, int], count: int, calls: int, tick: Tick) -> list[Row]:
    results = _in_processes(count, tick, _time_calls, ports, calls)
    rows = []
    for name in _CALLS:
        row: Row = {"what": name, "clients": count}
        for side in ports:
            medians = [result[name, side][0] for result in results]
            rounds = zip(*(result[name, side][1] for result in results), strict=True)
            elapsed = [max(end for _, end in spans) - min(begin for begin, _ in spans) for spans in rounds]
            row[f"{side}_us"] = statistics.median(medians) * 1e6
            row[f"{side}_per_s"] = count * (calls // _ROUNDS) / statistics.median(elapsed)
        rows.append(row)
    return rows


def _ping_pong(client: _StoreClient, ports: dict[str, int], calls: int) -> dict[str, float]:
    """One sets what the other waits for, and back; half of the round trip."""
    medians = {}
    me, other = client.rank, 1 - client.rank
    for side, port in ports.items():
        store = _connect(side, port)
        samples = []
        client.meet()
        for i in range(calls // 2):
            start = time.perf_counter()
            if me == 1:
                store.wait([f"ping/0/{i}"])
            store.set(f"ping/{me}/{i}", "v")
            if me == 0:
                store.wait([f"ping/{other}/{i}"])
            samples.append((time.perf_counter() - start) / 2)
        client.meet()
        client.tell(f"waking, {SIDES[side]}")
        medians[side] = statistics.median(samples)
    return medians


def _connect_one_by_one(client: _StoreClient, ports: dict[str, int], count: int) -> dict[str, float]:
    samples: dict[str, list[float]] = {side: [] for side in ports}
    for _ in range(count):
        for side, port in ports.items():
            start = time.perf_counter()
            store = _connect(side, port)
            samples[side].append(time.perf_counter() - start)
            del store
    client.tell("connecting")
    return {side: statistics.median(own) for side, own in samples.items()}


def _connect_some(client: _StoreClient, side: str, port: int, count: int) -> tuple[float, float]:
    _allow_files(count)
    client.meet()
    begin = time.perf_counter()
    stores = [_connect(side, port) for _ in range(count)]
    end = time.perf_counter()
    client.meet()  # nobody leaves before all are there
    client.tell(f"connecting {count * client.barrier.parties} at once, {SIDES[side]}")
    del stores
    return begin, end


def _measure_connecting(ports: dict[str, int], counts: Sequence[int], tick: Tick) -> list[Row]:
    """One client after the other, and many at once. PyTorch's clients also look up the names of addresses, which takes
    seconds where the resolver is slow."""
    single = _in_processes(1, tick, _connect_one_by_one, ports, 40)[0]
    rows: list[Row] = [{"what": "connect", "clients": 1, **_in_us(single)}]
    for count in counts:
        row: Row = {"what": f"connect {count} at once", "clients": count}
        processes = min(_CONNECTING_PROCESSES, count)
        for side in ports:
            spans = _in_processes(processes, tick, _connect_some, side, ports[side], count // processes)
            row[f"{side}_us"] = (max(end for _, end in spans) - min(begin for begin, _ in spans)) * 1e6
        rows.append(row)
    return rows


def _in_us(seconds: dict[str, float]) -> Row:
    return {f"{side}_us": value * 1e6 for side, value in seconds.items()}


# --- words ---------------------------------------------------------------------------------------------------


def as_table(rows: Sequence[Row], workload: StoreWorkload, best: bool = False) -> bench_table.Table:
    head = ["call", "clients"]
    for unit in ("us", "calls/s"):
        head += [f"{SIDES[side]} ({unit})" for side in workload.sides] + ["ratio"] * (len(workload.sides) > 1)
    title = "TCPStore, ours beside PyTorch's" if len(workload.sides) > 1 else "TCPStore"
    return title, head, [_cells(row, workload.sides) for row in rows]


def _cells(row: Row, sides: Sequence[str]) -> list[str]:
    cells = [row["what"], str(row["clients"])]
    times = [row[f"{side}_us"] for side in sides]
    cells += [bench_table.microseconds(us / 1e6) for us in times]
    if len(sides) > 1:
        cells.append(bench_table.times(times[1] / times[0]))
    rates = [row.get(f"{side}_per_s") for side in sides]
    cells += ["-" if rate is None else f"{rate:,.0f}" for rate in rates]
    if len(sides) > 1:
        cells.append(bench_table.times(bench_table.ratio(rates[0], rates[1])))
    return cells


def picture(rows: Sequence[Row], workload: StoreWorkload, best: bool = False) -> list[Panel]:
    """Times of calls, a panel for each number of clients; waking and connecting in one of their own."""
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for row in rows:
        clients = f"{row['clients']} client{'s' * (row['clients'] > 1)}"
        title = clients if row["what"] in _CALLS else "waking and connecting"
        panels.setdefault(title, {})[row["what"]] = {SIDES[side]: row[f"{side}_us"] for side in workload.sides}
    return [Bars(title, "microseconds", groups, logarithmic=True) for title, groups in panels.items()]


def note(rows: Sequence[Row], workload: StoreWorkload) -> str:
    if "torch" not in workload.sides:
        return f"ours alone, since torch is not installed; `{INSTALL_TORCH}` to see PyTorch's beside it"
    return "us: the median of all calls; calls/s: of all clients together; a ratio above 1: ours is faster"
