"""One rank of `symcomm bench torch`: small calls of torch.distributed, on a group for each way that a call can go.

order      answer
prepare    {"torch": its version, "ways": those that this torch has}
time       {"seconds": of one call, "long": calls that took the slow path through Python}
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from symcomm.bench.torch_worker import join
from symcomm.bench.worker import pin, serve

WAYS = {"direct": "symcomm", "watched": "symcomm, watched by NanCheckHook", "gloo": "gloo"}
# name -> (elements of float32, whether it is asynchronous); None: a barrier
CALLS: dict[str, tuple[int, bool] | None] = {
    "all_reduce 8 B": (2, False),
    "all_reduce 1 KiB": (256, False),
    "all_reduce 16 KiB": (4096, False),
    "barrier": None,
    "async 8 B": (2, True),
}
WARMUP = 20


class Groups:
    """The same ranks in one group for each path."""

    def __init__(self, args: SimpleNamespace) -> None:
        import torch

        from symcomm.torch_backend import versions

        self.rank = args.rank
        if args.pinned:
            pin(args.rank, args.world)
        torch.set_num_threads(1)
        gc.disable()
        dist = join("symcomm", args)
        self.by_way: dict[str, Any] = {"direct": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}
        if versions.HAS_PYTHON_BACKENDS:
            import torch._C._distributed_c10d as torch_c10d

            self.by_way["watched"] = dist.new_group()
            self._hook = vars(torch_c10d)["NanCheckHook"].attach(self.by_way["watched"])

    def prepare(self) -> dict[str, Any]:
        import torch

        return {"torch": torch.__version__, "ways": list(self.by_way)}

    def time(self, way: str, call: str, steps: int) -> dict[str, float]:
        run = self.call_of(way, call)
        run()  # the first of its kind is planned
        before = self.long_calls(way)
        return {"seconds": seconds_of(run, steps), "long": self.long_calls(way) - before}

    def long_calls(self, way: str) -> int:
        """How many calls Python has planned so far; 0 if a library does not say."""
        count = getattr(self.by_way[way], "call_stats", None)
        return count()["collectives"]["long"] if count else 0

    def call_of(self, way: str, call: str) -> Callable[[], Any]:
        import torch
        import torch.distributed as dist

        group, what = self.by_way[way], CALLS[call]
        if what is None:
            return lambda: dist.barrier(group=group)
        count, is_async = what
        values = torch.zeros(count)
        if is_async:
            return lambda: dist.all_reduce(values, group=group, async_op=True).wait()
        return lambda: dist.all_reduce(values, group=group)


def seconds_of(call: Callable[[], Any], steps: int) -> float:
    for _ in range(WARMUP):
        call()
    begin = time.perf_counter()
    for _ in range(steps):
        call()
    return (time.perf_counter() - begin) / steps


if __name__ == "__main__":
    serve(Groups)
