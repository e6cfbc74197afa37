"""Every collective, message and future."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _make_nccl_premul_sum

from symcomm import errors
from tests.torch_backend.checks import WORLD, check, equal, joined, refused


def _every_collective(rank: int, async_op: bool) -> None:
    def run(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        work = call(*args, async_op=async_op, **kwargs)
        if async_op:
            assert work.wait() and work.is_completed() and work.is_success()
            assert work.get_future().wait() is not None
        else:
            assert work is None

    mine = torch.arange(4.0) + rank
    value = mine.clone()
    run(dist.all_reduce, value)
    equal(value, [1.0, 3.0, 5.0, 7.0])
    value = mine.clone()
    run(dist.all_reduce, value, op=dist.ReduceOp.AVG)
    equal(value, [0.5, 1.5, 2.5, 3.5])
    value = mine.clone()
    run(dist.all_reduce, value, op=dist.ReduceOp.MAX)
    equal(value, torch.arange(4.0) + 1)
    value = mine.clone()
    run(dist.reduce, value, 1)
    equal(value, [1.0, 3.0, 5.0, 7.0] if rank == 1 else mine)
    value = mine.clone()
    run(dist.broadcast, value, 1)
    equal(value, torch.arange(4.0) + 1)
    places = [torch.empty(4), torch.empty(4)]
    run(dist.all_gather, places, mine)
    equal(torch.cat(places), [0.0, 1.0, 2.0, 3.0, 1.0, 2.0, 3.0, 4.0])
    whole = torch.empty(8)
    run(dist.all_gather_into_tensor, whole, mine)
    equal(whole, torch.cat(places))
    run(dist.gather, mine, places if rank == 0 else None, 0)
    value = torch.empty(4)
    run(dist.scatter, value, [torch.zeros(4), torch.ones(4)] if rank == 0 else None, 0)
    equal(value, [float(rank)] * 4)
    value = torch.empty(2)
    run(dist.reduce_scatter, value, list(mine.chunk(2)))
    equal(value, [[1.0, 3.0], [5.0, 7.0]][rank])
    value = torch.empty(2)
    run(dist.reduce_scatter_tensor, value, mine)
    equal(value, [[1.0, 3.0], [5.0, 7.0]][rank])
    value = torch.empty(4)
    run(dist.all_to_all_single, value, mine)
    equal(value, [[0.0, 1.0, 1.0, 2.0], [2.0, 3.0, 3.0, 4.0]][rank])
    splits = ([3, 1], [1, 3])  # rank 0 keeps three of its rows, rank 1 three of its own
    value = torch.empty(4)
    run(dist.all_to_all_single, value, mine, [3, 1] if rank == 0 else [1, 3], list(splits[rank]))
    equal(value, [[0.0, 1.0, 2.0, 1.0], [3.0, 2.0, 3.0, 4.0]][rank])
    outs = [torch.empty(2), torch.empty(2)]
    run(dist.all_to_all, outs, list(mine.chunk(2)))
    equal(torch.cat(outs), [[0.0, 1.0, 1.0, 2.0], [2.0, 3.0, 3.0, 4.0]][rank])
    run(dist.barrier)


@check
def every_collective_sync(rank: int, path: str) -> None:
    with joined(rank, path):
        for _ in range(2):  # the second time some calls take a shorter way
            _every_collective(rank, False)


@check
def every_collective_async(rank: int, path: str) -> None:
    with joined(rank, path):
        _every_collective(rank, True)


@check
def fast_path_sees_every_difference(rank: int, path: str) -> None:
    """Calls that look like an earlier one but need more than its plan."""
    with joined(rank, path):
        for _ in range(2):
            dist.all_reduce(torch.ones(2))
        wide = torch.ones(2, 2)
        dist.all_reduce(wide[:, 0])
        equal(wide, [[2.0, 1.0], [2.0, 1.0]])
        negative = torch._neg_view(torch.ones(2))
        dist.all_reduce(negative)
        equal(negative + 0, [-2.0, -2.0])
        leaf = torch.ones(2, requires_grad=True)
        with torch.no_grad():
            dist.all_reduce(leaf)
        equal(leaf.detach(), [2.0, 2.0])
        sparse = torch.sparse_coo_tensor([[rank]], [1.0], size=(2,))
        dist.all_reduce(sparse)
        equal(sparse.to_dense(), [1.0, 1.0])
        scaled = torch.ones(2)
        dist.all_reduce(scaled, op=_make_nccl_premul_sum(0.5))
        dist.all_reduce(scaled, op=_make_nccl_premul_sum(2.0))
        equal(scaled, [4.0, 4.0])
        dist.all_reduce(torch.ones(2, device="meta"))  # which has no values: returns, as on Gloo
        refused(lambda: dist.broadcast(torch.ones(2), 7))
        refused(lambda: dist.all_gather_into_tensor(torch.ones(3), torch.ones(2)), "output", "4 elements")
        refused(lambda: dist.reduce_scatter_tensor(torch.ones(2), torch.ones(5)), "input", "4 elements")
        dist.barrier()


@check
def every_dtype(rank: int, path: str) -> None:
    names = (
        "uint8 int8 int16 int32 int64 uint16 uint32 uint64 bool float16 bfloat16 float32 float64 complex64 complex128"
    )
    with joined(rank, path):
        for name in [*names.split(), "float8_e4m3fn", "float8_e5m2"]:
            dtype = getattr(torch, name)
            for async_op in (False, True):
                mine = torch.tensor([0, 1, 1]).to(dtype) if rank == 0 else torch.tensor([1, 0, 1]).to(dtype)
                total, first, both = mine.clone(), mine.clone(), [torch.empty_like(mine) for _ in range(WORLD)]
                works = [
                    dist.all_reduce(total, async_op=async_op),
                    dist.broadcast(first, 0, async_op=async_op),
                    dist.all_gather(both, mine, async_op=async_op),
                ]
                assert all(work.wait() for work in works if work is not None)
                equal(total.to(torch.complex128).real, [1.0, 1.0, 1.0 if dtype is torch.bool else 2.0])
                equal(first.to(torch.complex128).real, [0.0, 1.0, 1.0])
                equal(both[1].to(torch.complex128).real, [1.0, 0.0, 1.0])


@check
def coalescing(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        for device in (None, torch.device("cpu")):
            for async_ops in (False, True):
                values = [torch.full((k + 1,), rank + 1.0) for k in range(3)]
                with dist._coalescing_manager(group, device, async_ops) as manager:
                    for value in values:
                        dist.all_reduce(value)
                if async_ops:
                    manager.wait()
                for value in values:
                    equal(value, [3.0] * len(value))
        outs = [torch.empty(2), torch.empty(4)]
        with dist._coalescing_manager(group):
            for k, out in enumerate(outs):
                dist.all_gather_into_tensor(out, torch.full((k + 1,), float(rank)))
        equal(outs[1], [0.0, 0.0, 1.0, 1.0])
        group._start_coalescing(torch.device("cpu"))
        values = [torch.ones(2), torch.ones(3)]
        for value in values:
            dist.all_reduce(value)
        future = group._end_coalescing(torch.device("cpu")).get_future()
        equal(torch.cat(future.wait()), [2.0] * 5)
        dist.all_gather_coalesced([[torch.empty(1)] for _ in range(WORLD)], [torch.ones(1)])


@check
def messages(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        peer = 1 - rank
        got, gift = torch.empty(3), torch.full((3,), float(rank))
        ops = [dist.P2POp(dist.isend, gift, peer), dist.P2POp(dist.irecv, got, peer)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        equal(got, [float(peer)] * 3)
        if rank == 0:
            dist.send(gift, 1, tag=5)
        else:
            work = group.recv_anysource([got], 5)
            work.wait()
            assert work._source_rank() == 0
            equal(work.get_future().wait()[0], [0.0] * 3)
        itself = dist.irecv(got, rank)
        dist.isend(gift, rank).wait()
        itself.wait()
        equal(got, gift)


@check
def objects(rank: int, path: str) -> None:
    with joined(rank, path):
        mine = {"rank": rank, "text": "x" * (100 * rank)}
        everyone: list[Any] = [None] * WORLD
        dist.all_gather_object(everyone, mine)
        assert [e["rank"] for e in everyone] == [0, 1]
        some = [mine] if rank == 1 else [None]
        dist.broadcast_object_list(some, src=1)
        assert some[0]["rank"] == 1
        gathered: Any = [None] * WORLD if rank == 0 else None
        dist.gather_object(mine, gathered, dst=0)
        assert rank == 1 or gathered[1]["rank"] == 1
        one: list[Any] = [None]
        dist.scatter_object_list(one, ["a", "b"] if rank == 0 else None, src=0)
        assert one == ["ab"[rank]]
        if rank == 0:
            dist.send_object_list([mine], dst=1)
        else:
            dist.recv_object_list(some, src=0)
            assert some[0]["rank"] == 0


@check
def lists_of_tensors(rank: int, path: str) -> None:
    """People who hold the group may pass several tensors of one rank, as to torch's own backends."""
    with joined(rank, path) as group:
        future = group.allreduce([torch.tensor([2.0 * rank]), torch.tensor([2.0 * rank + 1])]).get_future()
        equal(torch.cat(future.wait()), [6.0, 6.0])
        options = dist.BroadcastOptions()
        options.rootRank = options.rootTensor = 1
        pair = [torch.tensor([2 * rank]), torch.tensor([2 * rank + 1])]
        group.broadcast(pair, options).wait()
        equal(torch.cat(pair), [3, 3])
        places = [[torch.tensor([-1]) for _ in range(4)] for _ in range(2)]
        group.allgather(places, [torch.tensor([2 * rank]), torch.tensor([2 * rank + 1])]).wait()
        assert [[t.item() for t in row] for row in places] == [[0, 1, 2, 3]] * 2
        refused(lambda: group.allreduce([torch.ones(1), torch.ones(2)]), "invalid tensor size")
        refused(lambda: group.allreduce([]), "tensors")
        from_me = dist.ScatterOptions()
        from_me.rootRank = rank
        refused(lambda: group.scatter([torch.ones(1)], [[torch.ones(1)], [torch.ones(1)]], from_me), "one list")
        group.broadcast(torch.ones(1), root=0).get_future().wait()


@check
def sparse_sums(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        value = torch.sparse_coo_tensor([[0, rank]], [1.0, 2.0], size=(3,))
        dist.all_reduce(value)
        equal(value.to_dense(), [4.0, 2.0, 0.0])
        pair = [torch.sparse_coo_tensor([[k]], [1.0], size=(2,)) for k in range(2)]
        group.allreduce(pair).wait()
        equal(pair[1].to_dense(), [2.0, 2.0])
        refused(lambda: dist.all_reduce(value, op=dist.ReduceOp.MAX), "SUM for sparse", "to_dense")
        refused(lambda: dist.broadcast(value, 0), "sparse", "dense")


@check
def futures_and_errors(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        doubled = group.allreduce([torch.ones(2)]).get_future().then(lambda f: f.wait()[0] * 2)
        equal(doubled.wait(), [4.0, 4.0])
        works = [group.allreduce([torch.tensor([k + rank])]) for k in range(300)]
        for k, future in enumerate([w.get_future() for w in works]):
            equal(future.wait()[0], [2 * k + 1])
        for k, work in enumerate([group.allreduce([torch.full((50, 50), float(k))]) for k in range(8)]):
            if k == 7:
                group.barrier().wait()
                equal(work.result()[0][0, 0], 14.0)
        later = group.allreduce([torch.ones(3 + rank)])  # not the same size everywhere
        refused(later.get_future().wait, "did not make the same call")
        assert isinstance(later.exception(), errors.CollectiveMismatchError) and not later.is_success()
        refused(later.wait, "did not make the same call")
