"""Run by hand: ``python -m tests.soak.hosts [MINUTES]``. Random collectives and messages across pretended hosts; now
and then a rank, or a whole host, kills itself in the middle; the survivors must raise, name exactly those, shrink and
go on with right values, until few are left. Every round must end, and must end right."""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time

from symcomm import errors
from tests.support.ranks import run_ranks

LAYOUTS = ([2, 2], [1, 1, 1, 1], [3, 1], [2, 1, 2], [1, 3, 2])


def _one_call(group, kind: str, count: int) -> None:
    """A call whose result every rank can check by itself."""
    import torch

    size, rank = group.size, group.rank
    if kind == "all_reduce":
        x = torch.full((count,), float(rank))
        group.all_reduce(x)
        assert (x == size * (size - 1) / 2).all()
    elif kind == "async":
        xs = [torch.full((count,), float(rank + i)) for i in range(3)]
        for i, work in enumerate([group.all_reduce(x, async_op=True) for x in xs]):
            work.wait()
            assert (xs[i] == size * (size - 1) / 2 + i * size).all()
    elif kind == "broadcast":
        x = torch.full((count,), float(rank))
        group.broadcast(x, count % size)
        assert (x == count % size).all()
    elif kind == "all_gather":
        out = torch.empty(count * size)
        group.all_gather_single(out, torch.full((count,), float(rank)))
        assert (out.view(size, count) == torch.arange(size).view(size, 1)).all()
    elif kind == "reduce_scatter":
        out = torch.empty(count)
        group.reduce_scatter_single(out, torch.arange(size).repeat_interleave(count).float())
        assert (out == size * rank).all()
    elif kind == "all_to_all":
        out = torch.empty(count * size)
        group.all_to_all_single(out, torch.full((count * size,), float(rank)))
        assert (out.view(size, count) == torch.arange(size).view(size, 1)).all()
    elif kind == "scatter":
        out, root = torch.empty(count), count % size
        group.scatter(out, [torch.full((count,), float(r)) for r in range(size)] if rank == root else None, root)
        assert (out == rank).all()
    elif kind == "gather":
        root = count % size
        outs = [torch.empty(count) for _ in range(size)] if rank == root else None
        group.gather(outs, torch.full((count,), float(rank)), root)
        assert all((out == r).all() for r, out in enumerate(outs or []))
    elif kind == "ring":
        x, y = torch.full((count,), float(rank)), torch.empty(count)
        works = [group.irecv(y, (rank - 1) % size, 3), group.isend(x, (rank + 1) % size, 3)]
        for work in works:
            work.wait()
        assert (y == (rank - 1) % size).all()
    else:
        group.barrier()


KINDS = (
    "all_reduce", "async", "broadcast", "all_gather", "reduce_scatter", "all_to_all", "scatter", "gather", "ring",
    "barrier",
)  # fmt: skip


def _rank(rank: int, world: int, path: str, seed: int, hosts: list[int]):
    import symcomm

    mine = [f"host{h}" for h, k in enumerate(hosts) for _ in range(k)]
    os.environ["SYMCOMM_HOST_ID"] = mine[rank]
    group = symcomm.init(store=symcomm.FileStore(path, world), rank=rank, world_size=world, timeout=40)
    dice = random.Random(seed)  # the same on all ranks
    for _ in range(3):
        doomed_rank = dice.choice(group.global_ranks)
        whole_host = dice.random() < 0.4
        doomed = [r for r in group.global_ranks if r == doomed_rank or (whole_host and mine[r] == mine[doomed_rank])]
        if len(doomed) == group.size:
            break
        calls = [
            (dice.choice(KINDS), dice.choice((1, 100, 3000, 70_000, 2_000_000))) for _ in range(dice.randint(2, 9))
        ]
        delay = dice.choice((0.0, 0.001, 0.01, 0.1))
        gone = sorted(group.global_ranks.index(r) for r in doomed)
        try:  # the last of the calls may fail too: what a rank has sent can get lost when it is killed right then
            for kind, count in calls:
                _one_call(group, kind, count)
            if rank in doomed:
                time.sleep(delay)
                os.kill(os.getpid(), signal.SIGKILL)
            for k in range(1000):
                _one_call(group, KINDS[k % len(KINDS)], 5000)
            raise AssertionError("nobody noticed")
        except errors.RankFailedError as error:
            if not set(error.ranks) <= set(gone) or not error.ranks:
                raise AssertionError(f"doomed {gone}: {error}") from error
        if rank in doomed:  # another of them was faster
            os.kill(os.getpid(), signal.SIGKILL)
        group = group.shrink(quorum=1)  # however many of them go
        if set(group.global_ranks) & set(doomed):  # another of the doomed went while we agreed
            try:
                _one_call(group, "all_reduce", 1000)
                return f"kept {doomed}: {group.global_ranks}"
            except errors.RankFailedError:
                group = group.shrink(quorum=1)
        _one_call(group, "all_reduce", 1000)
    return "done"


def main() -> None:
    minutes = float(sys.argv[1]) if len(sys.argv) > 1 else 2.0
    end, rounds, first = time.monotonic() + minutes * 60, 0, int(time.time())
    while time.monotonic() < end:
        seed = first + rounds
        hosts = LAYOUTS[seed % len(LAYOUTS)]
        with tempfile.TemporaryDirectory() as folder:
            outcomes = run_ranks(_rank, sum(hosts), f"{folder}/store", seed, hosts, deadline=100, outcomes=True)
        bad = [o for o in outcomes if not (o.kind == "died" and o.text == "SIGKILL") and o.value != "done"]
        if bad:
            print(f"round {rounds}, seed {seed}, hosts {hosts}:", *outcomes, sep="\n  ")
            sys.exit(1)
        rounds += 1
    print(f"{rounds} rounds, all ended right")


if __name__ == "__main__":
    main()
