"""What a step of vLLM on two ranks takes, by Symcomm's flight recorder: computing, waiting for the other rank, calls,
and the engine between two steps.

    PYTHONPATH=src ~/.cache/symcomm/programs-vllm/bin/python -m tests.tools.vllm_waits [--compiled]
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.programs import vllm_engine
from tests.programs.vllm import environment

TOKENS, ROUNDS = 16, 4
INSIDE = "SYMCOMM_VLLM_WAITS"  # the folder; set in the process that has vLLM's environment


def recorded(worker: Any) -> list[list[tuple[int, str, int, int]]]:
    """In a worker: of each rank, every call's number, name, beginning and end."""
    from vllm.distributed.parallel_state import get_tp_group

    import symcomm
    from symcomm.observe.recorder.records import operations_of

    ranks = operations_of(symcomm.of(get_tp_group().device_group))
    return [[(op.seq, op.call, op.created_ns, op.finished_ns or 0) for op in ops] for ops in ranks]


def measure(engine: Any, batch: int) -> tuple[float, list[list[tuple[int, str, int, int]]]]:
    """Seconds of the fastest round, and its calls."""
    rounds = []
    for _ in range(ROUNDS):
        last = max(call[0] for call in engine.collective_rpc(recorded)[0][0])
        begun = time.perf_counter()
        vllm_engine.generate(engine, batch, TOKENS)
        seconds = time.perf_counter() - begun
        ranks = engine.collective_rpc(recorded)[0]
        rounds.append((seconds, [[call for call in calls if call[0] > last and call[3]] for calls in ranks]))
    return min(rounds, key=lambda each: each[0])


def tell(batch: int, seconds: float, ranks: list[list[tuple[int, str, int, int]]]) -> None:
    one, two = ({call[0]: call for call in calls} for calls in ranks)
    both = [(one[number], two[number]) for number in sorted(one.keys() & two.keys())]
    waiting = sum(abs(a[2] - b[2]) for a, b in both)
    calling = sum(max(a[3], b[3]) - max(a[2], b[2]) for a, b in both)
    gaps = [(a[1], min(c[2], d[2]) - max(a[3], b[3])) for (a, b), (c, d) in pairwise(both)]
    between = sum(ns for call, ns in gaps if call != "all_reduce")  # a step ends with the logits
    computing = sum(ns for call, ns in gaps if call == "all_reduce")
    parts = {"computing": computing, "waiting": waiting, "calls": calling, "between steps": between}
    told = ", ".join(f"{name} {ns / 1e6 / TOKENS:.2f}" for name, ns in parts.items())
    print(f"batch {batch}: a step takes {seconds * 1e3 / TOKENS:.2f} ms: {told}", flush=True)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--compiled", action="store_true")
    options = ask.parse_args()
    if (folder := os.environ.get(INSIDE)) is None:
        with tempfile.TemporaryDirectory(prefix="symcomm-vllm-") as folder:
            more = {INSIDE: folder, "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
            command = [sys.executable, "-m", "tests.tools.vllm_waits", *sys.argv[1:]]
            sys.exit(os.spawnve(os.P_WAIT, sys.executable, command, environment("symcomm", Path(folder)) | more))
    vllm_engine.fork_processes()
    asked = {"folder": folder, "model": "llama8", "tp": 2, "eager": not options.compiled, "dtype": "bfloat16"}
    engine = vllm_engine.make_engine(asked)
    for batch in (1, 8, 32):
        vllm_engine.generate(engine, batch, TOKENS)
        tell(batch, *measure(engine, batch))


if __name__ == "__main__":
    main()
