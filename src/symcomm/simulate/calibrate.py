"""Measures this machine with our own collectives.

Each number is the one with which a plan's walk (host.py) takes as long as the call did: the time to meet from a
barrier, the rates of a cache and of memory from all_gather.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import time
from collections.abc import Callable
from typing import Any

from symcomm import errors
from symcomm.simulate.host import host_seconds
from symcomm.simulate.machine import DEFAULT, Machine

__all__ = ["calibrate", "fit", "measure"]

SMALL, LARGE = 256 << 10, 32 << 20  # bytes: in a core's cache, and in none
# What is measured with two ranks: (collective, bytes, the number that follows from it)
CASES = (("all_gather", SMALL, "cached"), ("all_gather", LARGE, "memory"))
CALL = ("reduce_scatter", 8)  # what is above a barrier's time is what a call with tensors costs
MANY = 8  # ranks that show what a host's memory gives to all, where there are as many cores
REPETITIONS = 30
DEADLINE = 120.0  # seconds for each of the two runs


def calibrate(seconds: float = 0.5, mode: str = "processes") -> Machine:
    """Measure for about ``seconds`` a case, and return the machine."""
    from symcomm.group.spawn import spawn

    cores = len(os.sched_getaffinity(0))
    cases = [("barrier", 0), CALL, *((collective, nbytes) for collective, nbytes, _ in CASES)]
    two = spawn(measure, 2, (cases, seconds), mode=mode, deadline=DEADLINE)[0]
    machine = fit(_named(cores), dict(zip(cases, two, strict=True)))
    if cores < 4:
        return machine  # too few to learn what a host's memory gives: DEFAULT's number stays
    ranks = min(cores, MANY)
    cases = [("barrier", 0), ("all_gather", LARGE)]
    barrier, gather = spawn(measure, ranks, (cases, seconds), mode=mode, deadline=DEADLINE)[0]
    machine = dataclasses.replace(machine, peer=max(0.0, (barrier - machine.meet) / (ranks - 2)))
    return _solve(machine, "host_memory", lambda m: host_seconds("all_gather", LARGE, ranks, m), gather)


def _named(cores: int) -> Machine:
    return dataclasses.replace(DEFAULT, name=f"{platform.node()}, {cores} cores, {platform.machine()}")


def measure(group: Any, cases: list[tuple[str, int]], seconds: float) -> list[float]:
    """Seconds of one call, on this rank: the fastest of repetitions, each a barrier and a loop of calls.

    Others may work on this machine meanwhile; the fastest one is the one they disturbed least.
    """
    try:
        import numpy as np
    except ImportError:
        raise errors.ResourceError(
            "simulate: --calibrate needs NumPy, which is not installed; run `pip install 'symcomm[torch]'`."
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
    """All ranks make the same number of calls, which rank 0's first ones decide."""
    for _ in range(5):
        call()  # makes the plan, touches the memory
    began = time.perf_counter()
    for _ in range(3):
        call()
    each = max((time.perf_counter() - began) / 3, 1e-7)
    asked = max(1, min(10000, int(seconds / REPETITIONS / each)))
    calls = int.from_bytes(group.all_gather_object(asked.to_bytes(8, "little"))[0], "little")
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
        walk = _walk(collective, nbytes)
        machine = _solve(machine, name, walk, measured[collective, nbytes])
    return machine


def _walk(collective: str, nbytes: int) -> Callable[[Machine], float]:
    return lambda machine: host_seconds(collective, nbytes, 2, machine)


def _solve(machine: Machine, name: str, walk: Callable[[Machine], float], seconds: float) -> Machine:
    """The rate with which the walk takes ``seconds``: a higher rate never takes longer, so halving finds it."""
    low, high = 1e8, 1e13  # bytes/s
    for _ in range(50):
        rate = (low * high) ** 0.5
        if walk(dataclasses.replace(machine, **{name: rate})) > seconds:
            low = rate
        else:
            high = rate
    return dataclasses.replace(machine, **{name: (low * high) ** 0.5})
