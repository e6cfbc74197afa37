"""Run by hand: ``python -m tests.soak.host_programs [PROGRAMS] [FIRST SEED]``. Random programs of messages, collectives
and asynchronous works across pretended hosts, each rank a process; all must end, with the right values."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

from tests.support.host_programs import Program, SymcommCalls, TorchCalls, members_of, run_program
from tests.support.ranks import run_ranks

LAYOUTS = [[1, 1], [2, 1], [1, 1, 1], [2, 2], [1, 3]]
AT_ONCE = 25  # programs of one start of ranks
SECONDS = 40.0  # of a call, which takes milliseconds: that is called standing still


def groups_of(world: Any, seed: int) -> tuple[list[list[int]], list[Any]]:
    """The world and two groups of some of its ranks, the same for the same seed: which ranks, and the groups."""
    members = members_of([world.size], random.Random(seed))
    return members, [world, *(world.new_group(ranks, name=f"some{i}") for i, ranks in enumerate(members[1:]))]


def by_torch(rank: int, world: int, path: str, backend: str, hosts: Sequence[int], seeds: Iterable[int]) -> int:
    """The programs that Gloo can run too, by torch.distributed; how many."""
    import torch.distributed as dist

    os.environ["SYMCOMM_HOST_ID"] = str(hosts[rank])
    if backend == "symcomm":
        import symcomm.torch_backend  # noqa: F401
    limit, done = timedelta(seconds=SECONDS), 0
    dist.init_process_group(backend, store=dist.FileStore(path, world), rank=rank, world_size=world, timeout=limit)
    members = members_of([world], random.Random(world))
    groups = [dist.group.WORLD, *(dist.new_group(ranks, timeout=limit) for ranks in members[1:])]
    for seed in seeds:
        try:
            run_program(Program(seed, members, mix=False), groups, rank, TorchCalls())
        except BaseException as error:
            raise AssertionError(f"seed {seed}, {backend}: {error}") from error
        done += 1
    dist.destroy_process_group()
    return done


def _rank(rank: int, size: int, path: str, seeds: list[int], hosts: list[int], any_source: bool) -> list[int]:
    import symcomm

    os.environ["SYMCOMM_HOST_ID"] = str(hosts[rank])
    world = symcomm.init(store=symcomm.FileStore(path, size), rank=rank, world_size=size, timeout=SECONDS)
    members, groups = groups_of(world, seeds[0])
    for seed in seeds:
        try:
            run_program(Program(seed, members, any_source=any_source), groups, rank, SymcommCalls())
        except BaseException as error:
            raise AssertionError(f"seed {seed} of {seeds[0]}, groups {members}: {error}") from error
    return seeds


def soak(seeds: list[int], layout: list[int], any_source: bool = True) -> dict[int, str]:
    """What was wrong, by the first seed."""
    hosts = [h for h, count in enumerate(layout) for _ in range(count)]
    with tempfile.TemporaryDirectory() as folder:
        outcomes = run_ranks(
            _rank, len(hosts), f"{folder}/store", seeds, hosts, any_source, deadline=3 * SECONDS + len(seeds),
            outcomes=True,
        )  # fmt: skip
    bad = [str(o) for o in outcomes if o.value != seeds]
    return {seeds[0]: "\n".join(bad)} if bad else {}


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    first = int(sys.argv[2]) if len(sys.argv) > 2 else int(time.time())
    begun, found = time.monotonic(), {}
    for done in range(0, count, AT_ONCE):
        layout, seeds = LAYOUTS[done // AT_ONCE % len(LAYOUTS)], list(range(first + done, first + done + AT_ONCE))
        wrong = soak(seeds, layout)
        found |= wrong
        for seed, words in wrong.items():
            print(f"hosts {layout}, from seed {seed}:\n{words}", flush=True)
        print(
            f"{done + AT_ONCE} programs, {time.monotonic() - begun:.0f} s, {len(found)} starts went wrong", flush=True
        )
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
