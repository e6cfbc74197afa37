"""What the messages of a round cost on a topology.

``model``    ours, always there. A message takes its software's time, the latency of its links, and as long as its
             slowest wire needs. Messages that share a wire share its bandwidth evenly, so a wire that carries k of n
             bytes is busy for k*n / bandwidth. All messages of a round have one size, and then the busiest wire decides
             when the last of them arrives: its messages get the smallest share of all, hence end last. This is what
             max-min fair sharing gives, without playing it.
``simgrid``  SimGrid's simulator plays every round as flows over the same wires; needs the extra ``symcomm[simulate]``.

In both, the time excludes combining and copies inside hosts; predict.py adds those.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from symcomm.errors import BadArgumentError, ResourceError, bad_argument, deadline
from symcomm.simulate.rounds import Pairs, Round
from symcomm.simulate.topology import Topology

Engine = Callable[[Topology, Sequence[Round]], list[float]]  # the time of each round, done once
SIMGRID_DEADLINE = 300.0


def model_seconds(topology: Topology, rounds: Sequence[Round]) -> list[float]:
    return [_message_seconds(topology, r) if r.pairs else 0.0 for r in rounds]


def _message_seconds(topology: Topology, messages: Round) -> float:
    hops, seconds_a_byte = _longest_and_busiest(topology, messages.pairs)
    return messages.software * topology.link.message + hops * topology.link.latency + messages.nbytes * seconds_a_byte


@functools.lru_cache(maxsize=256)
def _longest_and_busiest(topology: Topology, pairs: Pairs) -> tuple[int, float]:
    """(links of the longest route, seconds that the busiest wire takes when every message has one byte)."""
    carried: Counter[Any] = Counter()
    hops = 0
    for pair, times in Counter(pairs).items():
        route = topology.route(*pair)
        hops = max(hops, len(route))
        for _ in range(times):
            carried.update(route)
    return hops, max(times / wire.bandwidth for wire, times in carried.items())


def simgrid_seconds(topology: Topology, rounds: Sequence[Round]) -> list[float]:
    """A process for each question: SimGrid has one platform per process."""
    question = _as_platform(topology, rounds)
    command = [sys.executable, "-m", "symcomm.simulate.simgrid_worker"]
    try:
        done = subprocess.run(
            command, input=json.dumps(question), capture_output=True, text=True, timeout=SIMGRID_DEADLINE
        )
    except subprocess.TimeoutExpired:
        fix = "Ask for fewer hosts, or use --engine model."
        raise deadline("symcomm simulate: SimGrid", SIMGRID_DEADLINE, fix=fix) from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        raise ResourceError(f"symcomm simulate: SimGrid ended with code {done.returncode}: {last}")
    times = json.loads(done.stdout.splitlines()[-1])
    return [r.software * topology.link.message + t if r.pairs else 0.0 for r, t in zip(rounds, times, strict=True)]


def _as_platform(topology: Topology, rounds: Sequence[Round]) -> dict[str, Any]:
    """The wires and routes that messages take."""
    wires: dict[tuple[Any, ...], int] = {}
    bandwidths: list[float] = []
    routes = []
    for a, b in dict.fromkeys(pair for r in rounds for pair in r.pairs):
        taken = topology.route(a, b)
        for wire in taken:
            if wire.name not in wires:
                wires[wire.name] = len(bandwidths)
                bandwidths.append(wire.bandwidth)
        routes.append((a, b, [wires[wire.name] for wire in taken]))
    return {
        "hosts": topology.hosts,
        "latency": topology.link.latency,
        "bandwidths": bandwidths,
        "routes": routes,
        "rounds": [{"pairs": r.pairs, "nbytes": r.nbytes} for r in rounds],
    }


ENGINES: dict[str, Engine] = {"model": model_seconds, "simgrid": simgrid_seconds}


def find_engine(name: str) -> Engine:
    if name not in ENGINES:
        raise bad_argument("simulate", "--engine", name, f"one of {', '.join(ENGINES)}")
    if name == "simgrid" and importlib.util.find_spec("simgrid") is None:
        raise BadArgumentError(
            "symcomm simulate: --engine simgrid needs SimGrid, which is not installed; install 'symcomm[simulate]' as "
            "docs/how-to/simulate.md says, or use --engine model."
        )
    return ENGINES[name]
