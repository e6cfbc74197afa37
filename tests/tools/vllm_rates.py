"""Tokens per second of vLLM on two ranks: Symcomm, vLLM's own shared memory, Gloo, in turns in one job.

    make programs NAMES=vllm           # makes the environment
    PYTHONPATH=src ~/.cache/symcomm/programs-vllm/bin/python -m tests.tools.vllm_rates [--compiled] [--bind "0|1"]

All engines are up at the same time. A turn begins when the others sleep: vLLM's queues offer their cores for a second.
Prefill is prompts of 256 tokens and one more token; decode is prompts of 16 and 32 more tokens. The fastest round of
each counts; the medians stand behind.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from tests.programs.vllm import environment
from tests.programs.vllm_engine import make_model

VARIANTS = {"Symcomm": "symcomm", "sleeping": "symcomm,sleep", "shm": "none", "shm, sleeping": "sleep", "Gloo": "gloo"}
QUIET = 1.3  # seconds
KINDS = {"prefill": (1, 256), "decode": (32, 16)}  # tokens made, tokens of each prompt


class Engine:
    def __init__(self, plugin: str, asked: dict[str, Any], folder: Path, bind: str, how: str):
        environ = environment(plugin, folder) | {"VLLM_CPU_OMP_THREADS_BIND": bind, "OMP_NUM_THREADS": "1"}
        self.log = folder / f"{plugin}.log"
        with open(self.log, "w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.programs.vllm_engine", how, json.dumps(asked)],
                env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        self.hear()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith('{"'):
                return json.loads(line)
        raise SystemExit(f"an engine has ended: {self.log.read_text()[-2000:]}")

    def seconds(self, count: int, tokens: int, length: int) -> float:
        assert self.process.stdin is not None
        time.sleep(QUIET)
        self.process.stdin.write(json.dumps({"count": count, "tokens": tokens, "length": length}) + "\n")
        self.process.stdin.flush()
        return self.hear()["seconds"]

    def end(self) -> None:
        self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        self.process.kill()
        self.process.wait()


def measure(engines: dict[str, Engine], kinds: list[str], batches: list[int], rounds: int) -> None:
    for kind in kinds:
        tokens, length = KINDS[kind]
        for batch in batches:
            times: dict[str, list[float]] = {name: [] for name in engines}
            for turn in range(rounds + 1):
                for name, engine in list(engines.items())[:: 1 if turn % 2 else -1]:
                    seconds = engine.seconds(batch, tokens, length)
                    times[name] += [seconds] * (turn > 0)  # the first one warms up
            moved = batch * (length if kind == "prefill" else tokens)
            told = [f"{name} {moved / min(t):.1f} ({moved / statistics.median(t):.1f})" for name, t in times.items()]
            print(f"{kind}, batch {batch}: {', '.join(told)} tokens/s", flush=True)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--compiled", action="store_true")
    ask.add_argument("--rounds", type=int, default=9)
    ask.add_argument("--bind", default="nobind", help="VLLM_CPU_OMP_THREADS_BIND")
    ask.add_argument("--model", default="llama8")
    ask.add_argument("--dtype", default="bfloat16")
    ask.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    ask.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    ask.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    ask.add_argument("--keep", help="a folder for models and compiled graphs: the next start is faster")
    ask.add_argument("--fork", action="store_true", help="start vLLM's processes as forks: faster on a busy machine")
    options = ask.parse_args()
    with contextlib.nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory("-vllm") as name:
        folder = Path(name)
        folder.mkdir(parents=True, exist_ok=True)
        make_model(folder, options.model)
        asked = {"folder": name, "model": options.model, "tp": 2, "eager": not options.compiled, "dtype": options.dtype}
        engines = {}
        os.environ.setdefault("PYTHONPATH", "")
        try:
            for variant in options.variants:
                engines[variant] = Engine(
                    VARIANTS[variant], asked, folder, options.bind, "forked" if options.fork else "turns"
                )
            how = "compiled" if options.compiled else "eager"
            print(f"{options.model}, {options.dtype}, {how}, fastest (median) of {options.rounds} rounds", flush=True)
            measure(engines, options.kinds, options.batches, options.rounds)
        finally:
            for engine in engines.values():
                engine.end()


if __name__ == "__main__":
    main()
