"""One rank of one side of `symcomm bench llm`: its part of a model, which writes tokens when the controller asks.

order      answer
start      {}, or {"unsupported": why this side cannot run here}; the ranks meet
prepare    {}; makes this rank's part of the model, compiles it if it is asked to, and writes once
check      {"tokens": what it writes}
time       {"prefill": [seconds], "decode": [seconds of each token], "reducing": [how many of those in all_reduce]}

Sides: "one" is one process with the whole model; "gloo" and "symcomm" call `dist.all_reduce`, "direct" calls the
Symcomm group behind torch's, "deepspeed" DeepSpeed's `inference_all_reduce`.
"""

from __future__ import annotations

import gc
import glob
import importlib
import os
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from symcomm.bench.torch_worker import join
from symcomm.bench.worker import Unsupported, serve

Reduce = Callable[[Any], Any]  # adds up a tensor over all ranks, in place


def make_reduce(args: SimpleNamespace) -> Reduce:
    if args.name == "one":
        return lambda tensor: None
    dist = join("gloo" if args.name in ("gloo", "deepspeed") else "symcomm", args)
    if args.name == "deepspeed":
        return _deepspeed_reduce(args.rank, args.world)
    return dist.group.WORLD.core.all_reduce if args.name == "direct" else dist.all_reduce


def _deepspeed_reduce(rank: int, world: int) -> Reduce:
    """DeepSpeed's shared-memory operator, which DeepSpeed builds on first use."""
    job = f"symcomm-bench-{os.getppid()}"  # a part of its buffers' names
    os.environ.update(DS_ACCELERATOR="cpu", LOCAL_SIZE=str(world), MASTER_ADDR=job, MASTER_PORT=str(world))
    os.environ["PATH"] = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # where ninja is
    import torch

    deepspeed = importlib.import_module("deepspeed")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False, verbose=False, rank=rank, world_size=world)
    operators = torch.ops.deepspeed
    if not hasattr(operators, "inference_all_reduce_"):
        raise Unsupported("its shared-memory operator could not be built")
    reduce: Reduce = deepspeed.comm.inference_all_reduce
    reduce(torch.zeros(1))
    for buffer in glob.glob(f"/dev/shm/deepspeed_*_{job}_*_{rank}"):  # all have it mapped; nobody else removes it
        os.unlink(buffer)
    return reduce


class LlmRun:
    def __init__(self, rank: int, world: int, reduce: Reduce, order: dict[str, Any]):
        import torch

        from symcomm.llama import Config, Llama, Parallel

        compiled = order["compiled"]
        self.reducing = 0.0

        class Ranks(Parallel):
            def all_reduce(ranks, x: Any) -> Any:
                if compiled:  # a graph has no clock
                    reduce(x)
                    return x
                begin = time.perf_counter()
                reduce(x)
                self.reducing += time.perf_counter() - begin
                return x

        Ranks.rank, Ranks.size = rank, world
        torch.set_num_threads(order["threads"])
        config = Config(**order["config"])
        model = Llama(config, Ranks())
        self.step: Any = torch.compile(model, dynamic=False) if compiled else model
        draw = torch.Generator().manual_seed(1)
        self.prompt = torch.randint(config.vocabulary, (config.batch, order["prompt"]), generator=draw)
        self.places = torch.arange(config.length).split([order["prompt"], *[1] * order["tokens"]])
        self.write()

    def write(self) -> tuple[dict[str, list[float]], list[Any]]:
        """Read the prompt, then write a token for each place; returns times and tokens."""
        import torch

        found: dict[str, list[float]] = {"prefill": [], "decode": [], "reducing": []}
        written = [self.prompt]
        with torch.inference_mode():
            for place in self.places:
                self.reducing, begin = 0.0, time.perf_counter()
                written.append(self.step(written[-1].view(len(self.prompt), -1), place))
                seconds = time.perf_counter() - begin
                if len(written) == 2:
                    found["prefill"] = [seconds]
                else:
                    found["decode"].append(seconds)
                    found["reducing"].append(self.reducing)
        return found, written[1:]


class LlmOrders:
    """Ranks are not pinned: each may have several threads."""

    def __init__(self, args: SimpleNamespace):
        self.args, self.rank = args, args.rank
        gc.disable()

    def start(self) -> dict[str, str]:
        try:
            self.reduce = make_reduce(self.args)
        except (ImportError, Unsupported) as reason:
            return {"unsupported": str(reason)}
        return {}

    def prepare(self, **order: Any) -> dict[str, Any]:
        self.run = LlmRun(self.rank, self.args.world, self.reduce, order)
        return {}

    def check(self) -> dict[str, Any]:
        return {"tokens": [token.tolist() for token in self.run.write()[1]]}

    def time(self) -> dict[str, list[float]]:
        return self.run.write()[0]


if __name__ == "__main__":
    serve(LlmOrders)
