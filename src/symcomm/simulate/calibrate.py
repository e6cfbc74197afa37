"""Measures this machine with our own collectives.

For hosts too: ``fit_link`` turns two or three measured calls of a real group of several hosts into a Link, with which
other sizes, collectives and numbers of hosts can be predicted.

Each number is chosen so that the walk of a plan (host.py) takes as long as the call did: the time to meet from a
barrier, the rates of a cache and of memory from all_gather.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from symcomm import errors
from symcomm.simulate.host import host_seconds
from symcomm.simulate.machine import DEFAULT, Machine, load
from symcomm.simulate.predict import predict, travels_along
from symcomm.simulate.topology import Link

SMALL, LARGE = 256 << 10, 32 << 20  # bytes: in a core's cache, and in none
# Measured with two ranks: (collective, bytes, the number that follows from it)
CASES = (("all_gather", SMALL, "cached"), ("all_gather", LARGE, "memory"))
CALL = ("reduce_scatter", 8)  # what it takes beyond a barrier is the cost of a call with tensors
MANY = 8  # ranks that show what a host's memory gives to all, if there are as many cores
REPETITIONS = 30
DEADLINE = 120.0  # seconds for each of the two runs


def calibrate(seconds: float = 0.5, mode: str = "processes") -> Machine:
    """Measure for about ``seconds`` a case, and return the machine."""
    from symcomm.group.spawn import spawn

    cores = len(os.sched_getaffinity(0))
    cases = [("barrier", 0), CALL, *((collective, nbytes) for collective, nbytes, _ in CASES)]
    two = spawn(measure, 2, (cases, seconds), mode=mode, deadline=DEADLINE)[0]
    unfitted = dataclasses.replace(DEFAULT, name=f"{platform.node()}, {cores} cores, {platform.machine()}")
    machine = fit(unfitted, dict(zip(cases, two, strict=True)))
    if cores < 4:
        return machine  # too few cores to learn what a host's memory gives: keep DEFAULT's number
    ranks = min(cores, MANY)
    cases = [("barrier", 0), ("all_gather", LARGE)]
    barrier, gather = spawn(measure, ranks, (cases, seconds), mode=mode, deadline=DEADLINE)[0]
    machine = dataclasses.replace(machine, peer=max(0.0, (barrier - machine.meet) / (ranks - 2)))
    return _solve(machine, "host_memory", lambda m: host_seconds("all_gather", LARGE, ranks, m), gather)


def measure(group: Any, cases: list[tuple[str, int]], seconds: float) -> list[float]:
    """Seconds of one call, on this rank: the fastest of repetitions, each a barrier and a loop of calls.

    Other programs on this machine disturb the fastest repetition least.
    """
    try:
        import numpy as np
    except ImportError:
        raise errors.ResourceError(
            "symcomm simulate: --calibrate needs NumPy, which is not installed; run `pip install 'symcomm[torch]'`."
        ) from None

    def call_of(collective: str, nbytes: int) -> Callable[[], Any]:
        piece = np.zeros(nbytes // 4 // group.size, np.float32)
        whole = np.zeros(len(piece) * group.size, np.float32)
        if collective == "barrier":
            return group.barrier
        if collective == "all_gather":
            return lambda: group.all_gather_single(whole, piece)
        return lambda: group.reduce_scatter_single(piece, whole)

    return [_time(group, call_of(collective, nbytes), seconds) for collective, nbytes in cases]


def _time(group: Any, call: Callable[[], Any], seconds: float) -> float:
    """Seconds of a call. All ranks make the same number of calls; rank 0 chooses it."""
    for _ in range(5):
        call()  # makes the plan, touches the memory
    began = time.perf_counter()
    for _ in range(3):
        call()
    each = max((time.perf_counter() - began) / 3, 1e-7)
    asked = max(1, min(10000, int(seconds / REPETITIONS / each)))
    calls = int.from_bytes(group.all_gather_bytes(asked.to_bytes(8, "little"))[0], "little")
    times = []
    for _ in range(REPETITIONS):
        group.barrier()
        began = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - began) / calls)
    return min(times)


def fit(machine: Machine, measured: dict[tuple[str, int], float]) -> Machine:
    """The machine on which two ranks' plans take as long as they did."""
    meet = measured["barrier", 0]
    machine = dataclasses.replace(machine, meet=meet, call=max(0.0, measured[CALL] - meet))
    for collective, nbytes, name in CASES:
        walk = functools.partial(host_seconds, collective, nbytes, 2)
        machine = _solve(machine, name, walk, measured[collective, nbytes])
    return machine


def _solve(machine: Machine, name: str, walk: Callable[[Machine], float], seconds: float) -> Machine:
    """The machine on which the walk takes ``seconds``, by its rate ``name``."""

    def changed(rate: float) -> Machine:
        values: dict[str, Any] = {name: rate}
        return dataclasses.replace(machine, **values)

    return changed(_search(lambda rate: walk(changed(rate)), seconds, 1e8, 1e13))


def _search(time_of: Callable[[float], float], seconds: float, low: float, high: float) -> float:
    """The rate at which something takes ``seconds``. A higher rate never takes longer, so bisection finds it."""
    for _ in range(50):
        rate = (low * high) ** 0.5
        if time_of(rate) > seconds:
            low = rate
        else:
            high = rate
    return (low * high) ** 0.5


def fitted_sizes(sizes: Iterable[int], hosts: int, ranks_per_host: int, collective: str = "all_reduce") -> list[int]:
    """The sizes that determine a link: the smallest that travels with the arrival (if any does), the smallest that does
    not, and the largest."""
    small = [n for n in sizes if travels_along(collective, n, hosts, ranks_per_host)]
    large = sorted(set(sizes) - set(small))
    if len(large) < 2:
        raise errors.bad_argument("fit_link", "measured", sorted(sizes), "of two sizes or more that an engine carries")
    return [*([min(small)] if small else []), min(large), max(large)]


def fit_link(
    measured: Mapping[int, float],
    hosts: int,
    ranks_per_host: int,
    *,
    collective: str = "all_reduce",
    machine: Machine | None = None,
    cores_per_host: float = 0,
) -> Link:
    """A Link from measured calls of real hosts, ``{bytes: seconds}``; ``fitted_sizes`` says which of them are used.

    A size that travels with the arrival gives the cost to meet, the next one the cost of a message, the largest the
    bandwidth. Software time includes latency, and bandwidth includes headers, because they cannot be told apart.
    Without a size for it, ``message`` includes the arrival, too.
    """
    for nbytes, seconds in measured.items():
        if nbytes < 1 or not seconds > 0:
            raise errors.bad_argument("fit_link", "measured", {nbytes: seconds}, "bytes and seconds of more than 0")
    *small, middle, large = fitted_sizes(measured, hosts, ranks_per_host, collective)
    host = machine or load()

    def fitted(link: Link, name: str, nbytes: int, *, low: float, high: float, is_rate: bool) -> Link:
        def changed(rate: float) -> Link:
            return link._replace(**{name: rate if is_rate else 1 / rate})

        def seconds_at(rate: float) -> float:
            return predict(
                collective, nbytes, hosts, ranks_per_host, changed(rate), machine=host, cores_per_host=cores_per_host
            )

        return changed(_search(seconds_at, measured[nbytes], low, high))

    link = Link(latency=0.0, arrival=0.0)
    for _ in range(20):  # each changes the others a little
        if small:
            link = fitted(link, "arrival", small[0], low=1e-1, high=1e9, is_rate=False)
        link = fitted(link, "message", middle, low=1e-1, high=1e9, is_rate=False)
        link = fitted(link, "bandwidth", large, low=1e5, high=1e13, is_rate=True)
    return link
