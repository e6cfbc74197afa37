"""One rank of one side of `symcomm bench groups`, which makes and drops groups when the controller asks for it.

order      answer
time       {"make": [seconds of one new_group, ...], "drop": [seconds of its end, ...]}
hold       {"bytes": what a group takes that is made and not used}
leave      {"bytes": what is left of a group after it is gone}

Sides: "gloo" and "symcomm" through torch.distributed, on a TCPStore that rank 0 serves; "ours" through our own API.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from symcomm.bench.torch_worker import join
from symcomm.bench.worker import GROUP_TIMEOUT, serve

WARM_UP = 20  # groups that are not counted


@dataclass
class GroupsSide:
    """How this side makes groups of all ranks, and drops them."""

    rank: int
    make: Callable[[], Any]
    drop: Callable[[Any], None]
    barrier: Callable[[], Any]

    def cycle(self) -> tuple[float, float]:
        """Seconds to make a group and to end it. Barriers, not counted, keep ranks from waiting for each other."""
        self.barrier()
        start = time.perf_counter()
        group = self.make()
        made = time.perf_counter()
        self.barrier()  # Gloo's ranks must not leave while others are still connecting
        leaving = time.perf_counter()
        self.drop(group)
        del group  # Gloo ends its threads here
        return made - start, time.perf_counter() - leaving

    def time(self, steps: int) -> dict[str, list[float]]:
        seconds = [self.cycle() for _ in range(WARM_UP + steps)][WARM_UP:]
        return {"make": [made for made, _ in seconds], "drop": [dropped for _, dropped in seconds]}

    def hold(self, groups: int) -> dict[str, float]:
        before = own_bytes()
        held = [self.make() for _ in range(groups)]
        self.barrier()
        taken = (own_bytes() - before) / groups
        for group in held:
            self.drop(group)
        self.barrier()
        return {"bytes": taken}

    def leave(self, groups: int) -> dict[str, float]:
        for _ in range(WARM_UP):
            self.cycle()
        before = own_bytes()
        for _ in range(groups):
            self.cycle()
        return {"bytes": (own_bytes() - before) / groups}


def own_bytes() -> int:
    """Memory of this process: private pages, and the memory files that it made, touched or not."""
    status = Path("/proc/self/status").read_text().splitlines()
    private = next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))
    shared = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed by now
            if os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:"):
                shared += os.stat(f"/proc/self/fd/{name}").st_blocks * 512
    return private + shared


def make_side(args: SimpleNamespace) -> GroupsSide:
    rank, world = args.rank, args.world
    if args.name == "ours":
        import symcomm

        group = symcomm.init(
            store=symcomm.FileStore(args.store, world), rank=rank, world_size=world, timeout=GROUP_TIMEOUT
        )
        return GroupsSide(rank, lambda: group.new_group(range(world)), lambda child: child.destroy(), group.barrier)
    import torch.distributed as dist

    lifetime = timedelta(seconds=GROUP_TIMEOUT)
    address = dist.FileStore(args.store, world)
    if rank == 0:
        place = dist.TCPStore("127.0.0.1", 0, world, is_master=True, timeout=lifetime, wait_for_workers=False)
        address.set("port", str(place.port))
    else:
        place = dist.TCPStore("127.0.0.1", int(address.get("port")), world, is_master=False, timeout=lifetime)
    join(args.name, args, place)
    return GroupsSide(rank, dist.new_group, dist.destroy_process_group, dist.barrier)


if __name__ == "__main__":
    serve(make_side)
