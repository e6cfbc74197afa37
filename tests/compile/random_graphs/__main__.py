"""See the package's text. Two ranks are forked from a process that has loaded torch."""

from __future__ import annotations

import argparse
import gc
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._inductor import config

from symcomm.torch_backend.register import register
from tests.compile.random_graphs.generate import program_of
from tests.compile.random_graphs.program import SIZES, Program, text_of
from tests.compile.random_graphs.steps import TABLE, WORLD
from tests.compile.random_graphs.trial import Trial
from tests.torch_backend.checks import leave

COMMAND = "python -m tests.compile.random_graphs --graphs 1 --seed"


def described(program: Program) -> str:
    given = "; ".join(f"x{i}: {[d.at(SIZES[0]) for d in x.shape]} {x.dtype}" for i, x in enumerate(program.inputs))
    how = f"{dict(program.options)} dynamic={program.dynamic} traced={program.traced}"
    return f"# {how} {given}\n{text_of(program, TABLE)}"


def on_rank(rank: int, path: str, chosen: argparse.Namespace) -> int:
    """How many graphs failed."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    register()
    wait = timedelta(seconds=120)
    dist.init_process_group("symcomm", init_method=f"file://{path}", rank=rank, world_size=WORLD, timeout=wait)
    trial = Trial(dist.group.WORLD, compiled_gloo=not chosen.quick)
    failed, began = 0, time.monotonic()
    with config.patch({"cpp.simdlen": 1, "compile_threads": 1}):
        for first in range(chosen.seed, chosen.seed + chosen.graphs, chosen.together):
            seeds = range(first, min(first + chosen.together, chosen.seed + chosen.graphs))
            failed += _batch(trial, [program_of(seed) for seed in seeds], rank == 0, chosen.shrink)
            done = seeds[-1] + 1 - chosen.seed
            if rank == 0 and (done % 10 < len(seeds) or done == chosen.graphs):
                spent = time.monotonic() - began
                print(f"{done} of {chosen.graphs} graphs, {failed} failed, {spent:.0f} s", flush=True)
    if rank == 0:
        print(
            f"{trial.compiled_on_gloo} compiled on Gloo too, of which torch gives wrong values there for seeds "
            f"{trial.wrong_on_gloo}; Gloo refused {trial.unknown_to_gloo} calls",
            flush=True,
        )
    leave()
    return failed


def _batch(trial: Trial, programs: list[Program], speaks: bool, shrink: bool) -> int:
    """Graphs of one compilation, or of few; where one fails, each is tried alone."""
    kinds: dict[object, list[Program]] = {}
    for program in programs:
        alike = kinds.setdefault((program.dynamic, program.traced), [])
        alike.append(replace(program, options=alike[0].options) if alike else program)
    failed = 0
    for alike in kinds.values():
        if not (words := trial.words(alike)):
            continue
        alone = [(program, said) for program in alike if len(alike) > 1 and (said := trial.words([program]))]
        for program, said in alone or [(alike[0], words)]:
            failed += 1
            if speaks:
                print(f"== {COMMAND} {program.seed}\n{described(program)}{said}", flush=True)
            if shrink and (alone or len(alike) == 1):
                program, said = trial.shrunk(program)
                if speaks:
                    print(f"== its smallest part that fails:\n{described(program)}{said}", flush=True)
        if speaks and not alone and len(alike) > 1:
            print(f"== only together, each alone is well: seeds {[program.seed for program in alike]}", flush=True)
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.compile.random_graphs", description=__doc__)
    parser.add_argument("--graphs", type=int, default=500, help="how many (500)")
    parser.add_argument("--seed", type=int, default=0, help="of the first graph; each has the next number (0)")
    parser.add_argument(
        "--together", type=int, default=1, help="graphs compiled as one, with the options of the first (1)"
    )
    parser.add_argument("--quick", action="store_true", help="do not compile on Gloo")
    parser.add_argument("--no-shrink", dest="shrink", action="store_false", help="show failing graphs as they are")
    chosen = parser.parse_args()
    gc.freeze()
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = min(on_rank(rank, f"{folder}/store", chosen), 1)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    for rank, code in enumerate(codes):
        if code < 0:
            print(f"rank {rank} ended by {signal.Signals(-code).name}", flush=True)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
