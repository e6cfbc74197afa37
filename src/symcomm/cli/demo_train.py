"""The training job of `symcomm demo`: a small language model, data parallel, on the backend that the argument names.

Rank 0 prints one JSON line per step; the demo draws them. Run it by hand with
``symcomm run -n 2 -m symcomm.cli.demo_train symcomm``.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from typing import Any

STEPS = 60
PLAIN_STEPS = 10  # steps without communication, to tell its share
CONTEXT = 32
BATCH = 16
WIDTH = 256


def text() -> str:
    """Prose that every Python has: the topics of its own help()."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))[:400_000]


def make_model(torch: Any, symbols: int) -> Any:
    nn = torch.nn
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(symbols, WIDTH), nn.Flatten(),
        nn.Linear(CONTEXT * WIDTH, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, symbols),
    )  # fmt: skip


def main(backend: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(backend)
    rank, world = dist.get_rank(), dist.get_world_size()
    data = torch.tensor(list(text().encode("ascii", "replace")))
    model = torch.nn.parallel.DistributedDataParallel(make_model(torch, 128), gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    draw = torch.Generator().manual_seed(rank)

    def step(communicate: bool) -> float:
        places = torch.randint(len(data) - CONTEXT - 1, (BATCH,), generator=draw)
        inputs = torch.stack([data[p : p + CONTEXT] for p in places])
        wanted = torch.stack([data[p + CONTEXT] for p in places])
        with contextlib.nullcontext() if communicate else model.no_sync():
            loss = torch.nn.functional.cross_entropy(model(inputs), wanted)
            loss.backward()
        if communicate:
            optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        return float(loss.detach())

    for _ in range(3):
        step(True)
    dist.barrier()
    alone = time.perf_counter()
    for _ in range(PLAIN_STEPS):
        step(False)
    alone = (time.perf_counter() - alone) / PLAIN_STEPS
    dist.barrier()
    started = time.perf_counter()
    for n in range(1, STEPS + 1):
        loss = step(True)
        if rank == 0:
            spent = time.perf_counter() - started
            line = {"step": n, "loss": loss, "seconds": spent, "alone": alone, "examples": n * BATCH * world}
            print(json.dumps(line), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
