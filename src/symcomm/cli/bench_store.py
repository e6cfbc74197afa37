"""Measures TCPStore, ours beside PyTorch's, in one run and in turns, so that noise hits both alike.

Servers and clients are processes of their own, as in a job. Latencies are medians; a ratio above 1 means ours is
faster.
"""

from __future__ import annotations

import json as json_format
import multiprocessing as mp
import os
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

from symcomm.errors import ResourceError

__all__ = ["run_store_bench"]

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
    "multi_get (8 keys)": (
        lambda s: s.multi_set(_EIGHT, ["v" * 16] * 8),
        lambda s, i: s.multi_get(_EIGHT),
    ),
    "queue push + pop": (lambda s: None, lambda s, i: (s.queue_push("bench/q", "v"), s.queue_pop("bench/q"))),
}


def run_store_bench(
    clients: Sequence[int] = (1, 8),
    calls: int = 2000,
    connect: Sequence[int] = (100, 500),
    against_torch: bool = True,
    json: bool = False,
) -> dict[str, Any]:
    """Measure every call with each number of ``clients``, waking, and connecting; prints a table or JSON."""
    kinds = ["ours", "torch"] if against_torch else ["ours"]
    for kind in kinds:
        _store_class(kind)  # loaded before the processes are made, so that they start in a blink
    rows: list[dict[str, Any]] = []
    with _Servers(kinds, max([*connect, *clients, 1])) as ports:
        for count in clients:
            rows += _measure_calls(kinds, ports, count, calls)
        rows.append(_measure_waking(kinds, ports, calls))
        rows += _measure_connecting(kinds, ports, connect)
    result = {"cpus": os.cpu_count(), "rows": rows}
    if json:
        print(json_format.dumps(result, indent=1))
    else:
        _print_table(rows, against_torch)
    return result


def _store_class(kind: str) -> Any:
    if kind == "ours":
        from symcomm.store.tcp import TCPStore

        return TCPStore
    import torch.distributed

    return torch.distributed.TCPStore


def _client(kind: str, port: int) -> Any:
    return _store_class(kind)("127.0.0.1", port, timeout=_TIMEOUT)


# --- processes -------------------------------------------------------------------------------------------


def _allow_files(count: int) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= count:
        return
    if hard != resource.RLIM_INFINITY and hard < count:
        raise ResourceError(f"{count} connections need as many file descriptors; the limit is {hard} (`ulimit -Hn`).")
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, hard))


def _serve(kind: str, pipe: Any) -> None:
    store = _store_class(kind)("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_TIMEOUT)
    pipe.send(store.port)
    pipe.poll(None)  # until the other end is closed


class _Servers:
    """One server process for each kind; gives their ports."""

    def __init__(self, kinds: list[str], connections: int):
        _allow_files(connections + 200)
        ctx: Any = mp.get_context("fork")
        self._pipes, self._processes = [], []
        self._ports = {}
        for kind in kinds:
            ours, theirs = ctx.Pipe()
            process = ctx.Process(target=_serve, args=(kind, theirs), daemon=True)
            process.start()
            if not ours.poll(_DEADLINE):
                raise ResourceError(f"the {kind} server did not start.")
            self._ports[kind] = ours.recv()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> dict[str, int]:
        return self._ports

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()


def _in_processes(count: int, work: Callable, *args: Any) -> list[Any]:
    """``work(rank, barrier, *args)`` in ``count`` processes at once; their results by rank."""
    ctx: Any = mp.get_context("fork")
    barrier = ctx.Barrier(count)
    pipes = [ctx.Pipe(duplex=False) for _ in range(count)]

    def run(rank: int) -> None:
        pipes[rank][1].send(work(rank, barrier, *args))

    processes = [ctx.Process(target=run, args=(rank,), daemon=True) for rank in range(count)]
    for process in processes:
        process.start()
    results = []
    try:
        for rank, (receive, send) in enumerate(pipes):
            send.close()
            if not receive.poll(_DEADLINE):
                raise ResourceError(f"client process {rank} gave no result in {_DEADLINE:.0f} s.")
            results.append(receive.recv())
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return results


# --- measurements ------------------------------------------------------------------------------------------


def _time_calls(rank: int, barrier: Any, ports: dict[str, int], calls: int) -> dict[tuple[str, str], Any]:
    """Samples of each call (seconds) and the time that each round took, by (call, kind)."""
    stores = {kind: _client(kind, port) for kind, port in ports.items()}
    samples: dict[tuple[str, str], list[float]] = {}
    spans: dict[tuple[str, str], list[tuple[float, float]]] = {}
    clock = time.perf_counter
    for name, (prepare, call) in _CALLS.items():
        for turn in range(_ROUNDS):
            for kind in list(stores)[:: 1 if turn % 2 else -1]:
                store = stores[kind]
                prepare(store)
                for i in range(20):
                    call(store, i)
                barrier.wait(_DEADLINE)
                own = samples.setdefault((name, kind), [])
                begin = clock()
                for i in range(calls // _ROUNDS):
                    start = clock()
                    call(store, i)
                    own.append(clock() - start)
                store.num_keys()  # a set has no answer: this one comes after all of them were done
                spans.setdefault((name, kind), []).append((begin, clock()))
                barrier.wait(_DEADLINE)
    return {key: (statistics.median(samples[key]), spans[key]) for key in samples}


def _measure_calls(kinds: list[str], ports: dict[str, int], count: int, calls: int) -> list[dict[str, Any]]:
    results = _in_processes(count, _time_calls, ports, calls)
    rows = []
    for name in _CALLS:
        row: dict[str, Any] = {"what": name, "clients": count}
        for kind in kinds:
            medians = [result[name, kind][0] for result in results]
            rounds = zip(*(result[name, kind][1] for result in results), strict=True)
            elapsed = [max(end for _, end in spans) - min(begin for begin, _ in spans) for spans in rounds]
            row[f"{kind}_us"] = statistics.median(medians) * 1e6
            row[f"{kind}_per_s"] = count * (calls // _ROUNDS) / statistics.median(elapsed)
        rows.append(row)
    return rows


def _ping_pong(rank: int, barrier: Any, ports: dict[str, int], calls: int) -> dict[str, float]:
    """One sets what the other waits for, and back; the time for one way."""
    medians = {}
    for kind, port in ports.items():
        store = _client(kind, port)
        other = 1 - rank
        samples = []
        barrier.wait(_DEADLINE)
        for i in range(calls // 2):
            start = time.perf_counter()
            if rank == 1:
                store.wait([f"ping/0/{i}"])
            store.set(f"ping/{rank}/{i}", "v")
            if rank == 0:
                store.wait([f"ping/{other}/{i}"])
            samples.append((time.perf_counter() - start) / 2)
        barrier.wait(_DEADLINE)
        medians[kind] = statistics.median(samples)
    return medians


def _measure_waking(kinds: list[str], ports: dict[str, int], calls: int) -> dict[str, Any]:
    result = _in_processes(2, _ping_pong, ports, calls)[0]
    return {"what": "set until a waiter goes on", "clients": 2, **{f"{kind}_us": result[kind] * 1e6 for kind in kinds}}


def _connect_one_by_one(rank: int, barrier: Any, ports: dict[str, int], count: int) -> dict[str, float]:
    samples: dict[str, list[float]] = {kind: [] for kind in ports}
    for _ in range(count):
        for kind, port in ports.items():
            start = time.perf_counter()
            store = _client(kind, port)
            samples[kind].append(time.perf_counter() - start)
            del store
    return {kind: statistics.median(own) for kind, own in samples.items()}


def _connect_some(rank: int, barrier: Any, kind: str, port: int, count: int) -> tuple[float, float]:
    _allow_files(count + 200)
    barrier.wait(_DEADLINE)
    begin = time.perf_counter()
    stores = [_client(kind, port) for _ in range(count)]
    end = time.perf_counter()
    barrier.wait(_DEADLINE)  # nobody leaves before all are there
    del stores
    return begin, end


def _measure_connecting(kinds: list[str], ports: dict[str, int], counts: Sequence[int]) -> list[dict[str, Any]]:
    """One client after the other, and many at once. PyTorch's also asks for the names of addresses: where the
    resolver is slow, some of its clients take seconds."""
    single = _in_processes(1, _connect_one_by_one, ports, 40)[0]
    rows: list[dict[str, Any]] = [{"what": "connect", "clients": 1, **{f"{k}_us": single[k] * 1e6 for k in kinds}}]
    for count in counts:
        row: dict[str, Any] = {"what": f"connect {count} at once", "clients": count}
        processes = min(_CONNECTING_PROCESSES, count)
        for kind in kinds:
            spans = _in_processes(processes, _connect_some, kind, ports[kind], count // processes)
            row[f"{kind}_us"] = (max(end for _, end in spans) - min(begin for begin, _ in spans)) * 1e6
        rows.append(row)
    return rows


# --- the table -----------------------------------------------------------------------------------------------


def _words(microseconds: float) -> str:
    return f"{microseconds:.1f} µs" if microseconds < 10000 else f"{microseconds / 1e6:.2f} s"


def _print_table(rows: list[dict[str, Any]], against_torch: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="TCPStore: median time of a call, calls per second of all clients together")
    table.add_column("call")
    for name in ("clients", "ours", *(("PyTorch", "ratio") if against_torch else ())):
        table.add_column(name, justify="right")
    for name in ("ours/s", *(("PyTorch/s", "ratio") if against_torch else ())):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [row["what"], str(row["clients"]), _words(row["ours_us"])]
        if against_torch:
            cells += [_words(row["torch_us"]), f"{row['torch_us'] / row['ours_us']:.2f}"]
        if "ours_per_s" in row:
            cells.append(f"{row['ours_per_s']:,.0f}")
            if against_torch:
                cells += [f"{row['torch_per_s']:,.0f}", f"{row['ours_per_s'] / row['torch_per_s']:.2f}"]
        table.add_row(*cells)
    Console(file=sys.stdout, width=None if sys.stdout.isatty() else 120).print(table)
