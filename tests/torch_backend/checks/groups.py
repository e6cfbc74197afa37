"""Joining, leaving, groups from groups, time-outs."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from symcomm import errors, symm_mem
from symcomm.torch_backend.bootstrap import store_prefix_of
from symcomm.torch_backend.group import TorchGroup
from symcomm.torch_backend.versions import SPLIT_KEEPS_ORDER
from tests.support.ports import free_port
from tests.torch_backend.checks import WORLD, check, check3, equal, joined, refused


@check
def init_methods(rank: int, path: str) -> None:
    with joined(rank, path + "-meet") as group:
        ports = torch.tensor([free_port(), free_port()])
        dist.broadcast(ports, 0)
        assert dist.get_backend() == "symcomm" and group.name() == "custom"
    tcp, env = ports.tolist()
    with joined(rank, path, init_method=f"tcp://127.0.0.1:{tcp}"):
        dist.barrier()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(env), RANK=str(rank), WORLD_SIZE=str(WORLD))
    dist.init_process_group("symcomm")
    assert dist.get_rank() == rank and dist.get_world_size() == WORLD
    dist.destroy_process_group()
    with joined(rank, path, init_method=None, store=dist.FileStore(path + "-store", WORLD)):
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value)
        equal(value, [3.0])


@check
def groups_come_and_go(rank: int, path: str) -> None:
    for again in range(3):
        with joined(rank, f"{path}-{again}"):
            alone = [dist.new_group([r]) for r in range(WORLD)]
            both = dist.new_group([1, 0], group_desc="both")
            assert both.group_desc == "both" and dist.get_process_group_ranks(both) == [0, 1]
            value = torch.tensor([float(rank)])
            dist.all_reduce(value, group=alone[rank])
            equal(value, [float(rank)])
            dist.all_reduce(value, group=both)
            equal(value, [1.0])
            mine, _ = dist.new_subgroups(group_size=1)
            assert dist.get_world_size(mine) == 1
            dist.destroy_process_group(both)


@check
def splits_and_merges(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        part = group.split_group([1], group_name="second")
        assert (part is None) == (rank == 0)
        whole = group.split_group([0, 1], timeout=timedelta(seconds=20))
        value = torch.tensor([rank])
        whole.allreduce([value]).wait()
        equal(value, [1])
        assert whole.getSize() == 2 and whole.options._timeout == timedelta(seconds=20)
        alone = [group.split_group([r]) for r in range(WORLD)][rank]
        merged = alone.merge_remote_group(
            dist.FileStore(path + "-merge", WORLD), WORLD, timedelta(seconds=20), "merged"
        )
        assert merged.size() == 2 and merged.group_name == "merged"
        merged.barrier().wait()


@check
def calls_on_the_group(rank: int, path: str) -> None:
    """Plain arguments instead of options objects, as newer code passes them."""
    with joined(rank, path) as group:
        patience: Any = {"timeout": timedelta(seconds=20)}
        value, places = torch.ones(3), [torch.zeros(3) for _ in range(WORLD)]
        group.allreduce(value, **patience).wait()
        group.broadcast(value, root=0, **patience).wait()
        group.allgather(places, value, **patience).wait()
        equal(torch.cat(places), [2.0] * 6)
        group.gather(places if rank == 0 else [], value, root=0, **patience).wait()
        group.scatter(value, [torch.ones(3)] * WORLD if rank == 0 else [], root=0, **patience).wait()
        group.reduce_scatter(value, [torch.ones(3)] * WORLD, op=dist.ReduceOp.SUM, **patience).wait()
        equal(value, [2.0] * 3)
        group.reduce(value, root=1, op=dist.ReduceOp.MAX, **patience).wait()
        group.all_to_all_single(torch.zeros(2), torch.ones(2), [1, 1], [1, 1], **patience).wait()
        group.barrier(**patience).wait()
        assert (group.rank(), group.size(), group.name()) == (rank, WORLD, "custom")
        assert group._get_backend_name() == "symcomm" and group.get_backend("cpu") is group._get_backend("cpu") is group


@check
def times_out_by_name(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        dist.barrier(device_ids=[0])
        dist.monitored_barrier(timeout=timedelta(seconds=20), wait_all_ranks=True)
        group.set_timeout(timedelta(seconds=21))
        assert group.core.timeout == 21 and group.options._timeout == timedelta(seconds=21)
        if rank == 0:
            refused(lambda: dist.monitored_barrier(timeout=timedelta(seconds=0.2)), "Rank 1 failed to pass")
            refused(lambda: group.recv([torch.ones(1)], 1, 99).wait(timedelta(seconds=0.2)), "rank 1", "timed out")
        dist.barrier()


@check
def abort_ends_every_rank(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        dist.barrier()
        if rank == 0:
            group.abort()
        refused(lambda: group.barrier().wait(), "abort")
        refused(lambda: dist.all_reduce(torch.ones(1)), "cannot be used")


# --- torch's functions that know other backends by name ------------------------------------------------------------


@check3
def torch_splits_a_group(rank: int, path: str) -> None:
    with joined(rank, path, world=3) as world:
        part = dist.split_group(split_ranks=[[0, 2], [1]], timeout=timedelta(seconds=20), group_desc="part")
        assert part is not None and part.group_desc == "part" and dist.get_backend(part) == "symcomm"
        assert dist.get_process_group_ranks(part) == ([1] if rank == 1 else [0, 2])
        value = torch.tensor([rank + 1.0])
        dist.all_reduce(value, group=part)
        equal(value, [[4.0], [2.0], [4.0]][rank])
        assert part.options._timeout == timedelta(seconds=20) and part.size() == (1 if rank == 1 else 2)
        some = dist.split_group(split_ranks=[[2, 1]])  # by the order of the list since torch 2.15, by size before
        if rank == 0:
            assert some is (dist.GroupMember.NON_GROUP_MEMBER if SPLIT_KEEPS_ORDER else None)
        else:
            members = [2, 1] if SPLIT_KEEPS_ORDER else [1, 2]
            assert some.rank() == members.index(rank) and dist.get_group_rank(some, 2) == members.index(2)
            inner = dist.split_group(some, [[1], [0]])  # ranks of the parent, not of the world
            assert dist.get_process_group_ranks(inner) == [rank]
            dist.destroy_process_group(some)
        refused(lambda: dist.split_group(split_ranks=[]), "split_ranks", "none of them empty")
        refused(lambda: dist.split_group(split_ranks=[[0], [0, 1]]), "no rank twice")
        refused(lambda: dist.split_group(split_ranks=[[0, 7]]), "0 to 2")
        refused(lambda: dist.split_group(split_ranks=[[0, 1, 2]], backend="gloo"), "parent group's")
        refused(lambda: world.split_group([0, 7]), "0 to 2")


@check3
def torch_shrinks_a_group(rank: int, path: str) -> None:
    with joined(rank, path, world=3) as world:
        pair = dist.new_group([1, 2])
        if rank > 0:
            refused(lambda: dist.shrink_group([], pair), "at least one")
            refused(lambda: dist.shrink_group([0, 1], pair), "not all of them")
            refused(lambda: dist.shrink_group((1,), pair), "list")
            refused(lambda: dist.shrink_group([1], pair, shrink_flags=7), "SHRINK_ABORT")
        if rank == 2:
            refused(lambda: dist.shrink_group([1], pair), "exclusion list")
        if rank == 1:
            alone = dist.shrink_group([1], pair)
            assert dist.get_process_group_ranks(alone) == [1] and alone.group_desc.endswith(":shrunk")
            refused(lambda: dist.all_reduce(torch.ones(1), group=pair))
        unfinished = world.allreduce([torch.full((1000,), float(rank))])
        if rank == 1:  # stays behind, and learns that from its next call
            unfinished.wait()
            refused(world.barrier().wait, "abort")
            return
        smaller = dist.shrink_group([1])
        equal(unfinished.result()[0][0], 3.0)  # what was under way ended well
        assert smaller is dist.group.WORLD and dist.get_world_size() == 2 and dist.get_rank() == rank // 2
        assert dist.get_process_group_ranks(smaller) == [0, 1] and dist.get_backend() == "symcomm"
        value = torch.tensor([float(rank)])
        dist.all_reduce(value)
        equal(value, [2.0])
        dist.all_reduce(value, group=dist.new_group([0, 1]))
        equal(value, [4.0])


@check
def torch_sets_the_timeout(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=17))
        assert group.core.timeout == 17 and group.options._timeout == timedelta(seconds=17)


@check
def newest_interface(rank: int, path: str) -> None:
    try:
        import torch.distributed._dist2 as dist2
    except ModuleNotFoundError:  # gone since torch 2.14
        return
    with joined(rank, path + "-meet"):
        port = torch.tensor([free_port()])
        dist.broadcast(port, 0)
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port.item()), "RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    os.environ.update(place)
    first, second = (dist2.new_group("symcomm", timedelta(seconds=20), "cpu") for _ in range(2))
    assert dist2.current_process_group() is None
    with dist2.process_group(first):
        assert dist2.current_process_group() is first
        with dist2.process_group(second):
            assert dist2.current_process_group() is second
    value = torch.ones(2)
    first.allreduce(value, timeout=timedelta(seconds=20)).wait()
    second.allreduce(value, timeout=timedelta(seconds=20)).wait()
    equal(value, [4.0, 4.0])
    part = first.split_group([0], timeout=timedelta(seconds=15), group_name="first")
    assert (part is None) == (rank == 1)
    if part is not None:
        assert part.group_name == "first" and part._get_backend("cpu").options._timeout == timedelta(seconds=15)
    refused(lambda: dist2.new_group("symcomm", timedelta(seconds=20), "cpu", speed=11), "speed")
    first.barrier().wait()
    for group in (first, second):
        group.shutdown()


@check
def groups_of_one_name(rank: int, path: str) -> None:
    """Each rank makes a group of its own under a name that the other uses too, in the same place of the store."""
    store = dist.FileStore(path, WORLD)
    met = dist.PrefixStore("3", store)
    for _ in range(5):
        group = TorchGroup(met, 0, 1, timedelta(seconds=20), "3", [rank])
        value = torch.tensor([rank + 1.0])
        group.allreduce(value).wait()
        equal(value, [rank + 1.0])
        assert group.core.peers[0].pid == os.getpid()
        group.shutdown()
    assert store_prefix_of([0, 1]) != store_prefix_of([2, 3])


class _Left:
    """A group of which rank 1 ended, and then, since it had found that, rank 2."""

    rank = 0

    def monitored_barrier(self, *_: Any, **__: Any) -> None:
        raise errors.RankFailedError("1 and 2 are gone", [1, 2])


@check
def careful_groups(rank: int, path: str) -> None:
    """TORCH_DISTRIBUTED_DEBUG=DETAIL: differences are found before they do harm."""
    try:
        dist.set_debug_level(dist.DebugLevel.DETAIL)
        with joined(rank, path) as group:
            value, two = torch.ones(2, 3), torch.ones(2)
            for _ in range(2):
                dist.all_reduce(value)
            equal(value, torch.full((2, 3), 4.0))
            words = ("Collectives differ in the following", "SequenceNumber", "Float [2, 3]", "cpu")
            refused(lambda: group.allreduce([value]) if rank else group.reduce([value]), "ALLREDUCE", "REDUCE", *words)
            refused(lambda: group.reduce([value]) if rank else group.barrier(), "BARRIER", *words)
            refused(lambda: group.allreduce([value.view(3, 2) if rank else value]), "[3, 2]", "shapes", *words)
            refused(lambda: group.allreduce([two.long() if rank else two]), "Long [2]", "Float [2]", "dtypes")
            rows = [torch.zeros(1 + r) for r in range(WORLD)]
            dist.all_gather(rows, torch.full((1 + rank,), 7.0))  # these may differ
            equal(rows[1], [7.0, 7.0])
            dist.barrier()
            group.set_timeout(timedelta(seconds=0.3))
            if rank == 0:
                refused(lambda: dist.all_reduce(value), "Ranks 1 failed to pass monitoredBarrier")
            assert group.calls.debug_checks is not None
            kept, group.calls.debug_checks._core = group.calls.debug_checks._core, _Left()
            refused(lambda: dist.all_reduce(value), "Ranks 1 failed to pass monitoredBarrier", "1 and 2 are gone")
            group.calls.debug_checks._core = kept
    finally:
        dist.set_debug_level(dist.DebugLevel.OFF)


def _coalesced(team: Any, ins: Any, outs: Any) -> Any:
    with dist._coalescing_manager(group=team, async_ops=True) as manager:
        dist.all_reduce(ins, group=team)
        dist.all_reduce(outs, group=team)
    return manager.works[0]


ASYNCHRONOUS: dict[str, Any] = {  # (group, a tensor, one that is WORLD times as large) -> work
    "all_reduce": lambda team, x, _: dist.all_reduce(x, group=team, async_op=True),
    "all_gather": lambda team, x, out: dist.all_gather(list(out.chunk(WORLD)), x, group=team, async_op=True),
    "all_gather_into_tensor": lambda team, x, out: dist.all_gather_into_tensor(out, x, group=team, async_op=True),
    "reduce_scatter_tensor": lambda team, x, out: dist.reduce_scatter_tensor(x, out, group=team, async_op=True),
    "broadcast": lambda team, x, _: dist.broadcast(x, 0, group=team, async_op=True),
    "broadcast to rank 0": lambda team, x, _: dist.broadcast(x, 1, group=team, async_op=True),
    "all_to_all_single": lambda team, _, out: dist.all_to_all_single(out, out * 2, group=team, async_op=True),
    "coalesced": _coalesced,
}


@check
def works_that_were_given_up(rank: int, path: str) -> None:
    """Rank 1 comes when rank 0's wait has raised, and rank 0 has overwritten its tensors."""
    with joined(rank, path):
        token = torch.zeros(1)
        for name, start in ASYNCHRONOUS.items():
            for make, n in ((torch.ones, 8), (torch.ones, 5000), (symm_mem.zeros, 5000)):
                team = dist.new_group(range(WORLD))
                x, out = make(n), make(WORLD * n)
                if rank == 1:
                    dist.recv(token, 0)
                    refused(lambda: start(team, x, out).wait(), "timed out on rank 1", "rank 0's deadline")  # noqa: B023
                    dist.send(token, 0)
                    continue
                work = start(team, x, out)
                assert not work.is_completed(), name
                limit = timedelta(milliseconds=50)
                refused(lambda: work.wait(limit), "Timed out waiting", "did not come: 1", "shrink()")  # noqa: B023
                x.fill_(-1.0), out.fill_(-1.0)
                refused(lambda: work.get_future().wait(), "did not come: 1")  # noqa: B023
                refused(work.wait, "Timed out")
                assert work.is_completed() and not work.is_success()
                dist.send(token, 1)
                dist.recv(token, 1)
                assert bool((x == -1.0).all() and (out == -1.0).all()), name
