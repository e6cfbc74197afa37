"""A rank that makes its default group, uses it and destroys it, again and again; see test_group_life.py.

    python -m tests.support.life_program FOLDER torch 15 symcomm 10      a rank that a launcher started
    python -m tests.support.life_program FOLDER torch 15 spawn           starts two with torch.multiprocessing.spawn

Old groups stay in variables, memory is allocated meanwhile, ranks lag by random times, a sub-group is alive when the
default group is destroyed. Prints "rank R: N cycles of torch", after it has seen that nothing of them is left.
"""

from __future__ import annotations

import gc
import os
import random
import socket
import sys
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing

import symcomm
from symcomm.group import leaving
from symcomm.memory.arena import current_arena
from symcomm.torch_backend.register import register

WARM_UP = 5  # cycles after which nothing may grow any more


def main(folder: str, cycles: list[str]) -> None:
    torch.set_num_threads(1)
    register()
    gc.disable()  # nothing may wait for the collector
    if "RANK" not in os.environ:  # mpirun speaks of itself only
        os.environ["RANK"] = os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"]
        os.environ["WORLD_SIZE"] = os.environ.get("OMPI_COMM_WORLD_SIZE") or os.environ["PMI_SIZE"]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    for api, count in zip(cycles[::2], cycles[1::2], strict=True):
        live(api, int(count), rank, world)
        await_all(f"{folder}/{api}", rank, world)


def await_all(path: str, rank: int, world: int) -> None:
    """Wait for all ranks: one that is ahead would find the store of the others' previous cycle at the same port."""
    open(f"{path}-{rank}", "w").close()
    deadline = time.monotonic() + 60
    while not all(os.path.exists(f"{path}-{other}") for other in range(world)):
        assert time.monotonic() < deadline, "the others have not come so far"
        time.sleep(0.005)


def live(api: str, cycles: int, rank: int, world: int) -> None:
    lags = random.Random(rank)
    cycle = {"torch": through_torch, "symcomm": through_symcomm}[api]
    kept: list[Any] = []
    before: dict[str, int] = {}
    for number in range(cycles):
        time.sleep(lags.choice((0.0, 0.0, 0.001, 0.01)))
        kept += cycle(rank, world, number)
        if number == WARM_UP:
            before = held()
    grown = what_grew(before)
    assert not grown, f"rank {rank}: (then, now) of what grew in {cycles} cycles: {grown}"
    assert kept
    print(f"rank {rank}: {cycles} cycles of {api}", flush=True)


def what_grew(before: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What has grown, once threads have ended and other ranks have left."""
    deadline = time.monotonic() + 5
    while True:
        after = held()
        grown = {what: (before[what], after[what]) for what in before if after[what] > before[what]}
        if not grown or time.monotonic() > deadline:
            return grown
        time.sleep(0.01)


def held() -> dict[str, int]:
    """Counts of things in this process that a group could have left behind."""
    leaving.free_retired()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "groups left, but not by all": leaving.retired_count(),
        "arena bytes": current_arena().used_bytes,
    }


def through_torch(rank: int, world: int, number: int) -> list[Any]:
    dist.init_process_group("symcomm")
    group = dist.group.WORLD
    value = torch.full((1000,), float(rank + number))
    dist.all_reduce(value)
    assert value.tolist() == [float(sum(range(world)) + world * number)] * 1000
    pieces = [torch.empty(2) for _ in range(world)]
    dist.all_gather(pieces, torch.full((2,), float(rank)))
    assert [p[0].item() for p in pieces] == [float(r) for r in range(world)]
    if rank == 0:
        dist.send(torch.tensor([number]), 1)
    elif rank == 1:
        got = torch.zeros(1, dtype=torch.int64)
        dist.recv(got, 0)
        assert got.item() == number
    part = dist.new_group(list(range(world)), use_local_synchronization=number % 2 == 1)
    work = dist.all_reduce(torch.ones(100_000), group=part, async_op=True)
    work.wait()
    objects: list[Any] = [None] * world
    dist.all_gather_object(objects, {"rank": rank, "number": number})
    assert objects == [{"rank": r, "number": number} for r in range(world)]
    if number % 3 == 0:
        dist.destroy_process_group(part)
        again = dist.new_group(list(range(world)), use_local_synchronization=True)
        dist.barrier(group=again)
    dist.destroy_process_group()
    return [group, part] if number < 3 else []


def through_symcomm(rank: int, world: int, number: int) -> list[Any]:
    group = symcomm.init()
    value = torch.full((1000,), float(rank + number))
    group.all_reduce(value)
    assert value.tolist() == [float(sum(range(world)) + world * number)] * 1000
    buffer = symcomm.symm_mem.empty(1000)
    buffer.fill_(float(rank))
    group.broadcast(buffer, root=world - 1)
    assert buffer[0].item() == world - 1
    if rank == 0:
        group.send(torch.tensor([number]), 1)
    elif rank == 1:
        got = torch.zeros(1, dtype=torch.int64)
        group.recv(got, 0)
        assert got.item() == number
    part = group.new_group(range(world))
    assert part is not None
    work = part.all_reduce(torch.ones(100_000), async_op=True)
    assert work is not None
    work.wait()
    part.destroy()
    symcomm.destroy()
    return [group, part] if number < 3 else []


def spawned(rank: int, place: dict[str, str], folder: str, cycles: list[str]) -> None:
    os.environ.update(place, RANK=str(rank))
    main(folder, cycles)


if __name__ == "__main__":
    if sys.argv[-1] == "spawn":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        torch.multiprocessing.spawn(spawned, (place, sys.argv[1], sys.argv[2:-1]), 2)
    else:
        main(sys.argv[1], sys.argv[2:])
