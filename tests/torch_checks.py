"""What users do with ``torch.distributed``, on our backend: each check runs on two forked ranks with groups of its own.

``python -m tests.torch_checks`` runs all of them (or those named) in one process tree and prints a JSON line each;
tests/test_torch_backend.py makes tests of the lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch._C._distributed_c10d import _make_nccl_premul_sum

from symcomm import errors
from symcomm.backend.register import register

WORLD = 2
CHECKS: dict[str, Callable[[int, str], None]] = {}


def check(function: Callable[[int, str], None]) -> Callable[[int, str], None]:
    """A check gets its rank and the path of a file that does not exist yet, the same on all ranks."""
    CHECKS[function.__name__] = function
    return function


@contextlib.contextmanager
def joined(rank: int, path: str, backend: str = "symcomm", **options: Any) -> Iterator[Any]:
    options.setdefault("init_method", f"file://{path}")
    dist.init_process_group(backend, rank=rank, world_size=WORLD, timeout=timedelta(seconds=30), **options)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def refused(call: Callable[[], Any], *words: str) -> None:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        for word in words:
            assert word in str(error), f"{word!r} is not in {error}"
    else:
        raise AssertionError("nothing was raised")


def equal(got: Any, expected: Any) -> None:
    assert torch.equal(torch.as_tensor(got), torch.as_tensor(expected)), f"got {got}, expected {expected}"


# --- joining and leaving ------------------------------------------------------------------------------------------


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@check
def init_methods(rank: int, path: str) -> None:
    with joined(rank, path + "-meet") as group:
        ports = torch.tensor([_free_port(), _free_port()])
        dist.broadcast(ports, 0)
        assert dist.get_backend() == "symcomm" and group.name() == "symcomm"
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
def device_maps(rank: int, path: str) -> None:
    for number, backend in enumerate(("cpu:symcomm,cuda:nccl", "cpu:symcomm", "cpu:symcomm,cuda:symcomm")):
        with joined(rank, f"{path}-{number}", backend):
            value = torch.ones(3)
            dist.all_reduce(value)
            equal(value, [2.0] * 3)


@check
def split_and_shrink(rank: int, path: str) -> None:
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
def training_libraries(rank: int, path: str) -> None:
    """ZeRO, join(), differentiable collectives, checkpoints and pipelines."""
    import torch.distributed.checkpoint as checkpoint
    import torch.distributed.nn.functional as differentiable
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    from torch.nn.parallel import DistributedDataParallel

    with joined(rank, path):
        model = DistributedDataParallel(nn.Linear(4, 4))
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
        with model.join():
            for _ in range(2 + rank):
                model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        optimizer.consolidate_state_dict(0)
        leaf = torch.ones(2, requires_grad=True)
        differentiable.all_reduce(leaf).sum().backward()
        equal(leaf.grad, [2.0, 2.0])
        state = {"weight": torch.full((3,), 5.0)}
        checkpoint.save(state, checkpoint_id=path + "-saved")
        loaded = {"weight": torch.zeros(3)}
        checkpoint.load(loaded, checkpoint_id=path + "-saved")
        equal(loaded["weight"], [5.0] * 3)
        checkpoint.async_save(state, checkpoint_id=path + "-async").result()
        stage = PipelineStage(nn.Linear(4, 4), rank, WORLD, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 2, loss_fn=lambda a, b: (a - b).square().sum())
        if rank == 0:
            schedule.step(torch.ones(4, 4))
        else:
            schedule.step(target=torch.ones(4, 4))
        gradient = stage.submod.weight.grad
        assert gradient is not None and gradient.abs().sum() > 0


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
        assert (group.rank(), group.size(), group.name()) == (rank, WORLD, "symcomm")


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


# --- collectives --------------------------------------------------------------------------------------------------


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
def short_way_sees_every_difference(rank: int, path: str) -> None:
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
        refused(lambda: dist.all_reduce(torch.ones(2, device="meta")), "meta")
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
        refused(lambda: group.allreduce([torch.ones(1), torch.ones(2)]), "shape")
        refused(lambda: group.allreduce([]), "tensors")
        refused(lambda: group.scatter([torch.ones(1)], [[torch.ones(1)], [torch.ones(1)]]), "one list")
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


# --- what is built on top -----------------------------------------------------------------------------------------


@check
def functional_collectives(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        name, ops, wait = group.group_name, torch.ops._c10d_functional, torch.ops._c10d_functional.wait_tensor
        mine = torch.full((2, 2), float(rank))
        equal(funcol.all_reduce(mine, "sum", group).wait(), torch.ones(2, 2))
        equal(wait(ops.all_reduce(mine, "avg", name)), torch.full((2, 2), 0.5))
        again = mine.clone()
        assert wait(ops.all_reduce_(again, "sum", name)).data_ptr() == again.data_ptr()
        for value in funcol.all_reduce_coalesced([mine, mine + 1], "max", group):
            wait(value)
        equal(wait(funcol.all_gather_tensor(mine, 0, group)), torch.cat([torch.zeros(2, 2), torch.ones(2, 2)]))
        equal(wait(funcol.all_gather_tensor(mine, 1, group))[0], [0.0, 0.0, 1.0, 1.0])
        equal(wait(funcol.reduce_scatter_tensor(torch.arange(4.0), "sum", 0, group)), [[0.0, 2.0], [4.0, 6.0]][rank])
        for k, value in enumerate(funcol.all_gather_into_tensor_coalesced([mine[0], mine[0] + 1], group)):
            equal(wait(value), [0.0 + k, 0.0 + k, 1.0 + k, 1.0 + k])
        parts = funcol.reduce_scatter_tensor_coalesced([torch.arange(2.0)] * 2, "sum", [0, 0], group)
        equal(torch.cat([wait(p) for p in parts]), [2.0 * rank] * 2)
        sent, got = [[1, 2], [2, 1]][rank], [[1, 2], [2, 1]][rank]
        equal(wait(funcol.all_to_all_single(torch.full((3,), float(rank)), got, sent, group)).sum(), [2.0, 1.0][rank])
        equal(wait(funcol.broadcast(mine, 1, group)), torch.ones(2, 2))
        before = torch._C._distributed_c10d._get_work_registry_size()
        value = ops.all_reduce(mine, "sum", name)
        assert torch._C._distributed_c10d._get_work_registry_size() == before + 1
        wait(value)
        assert torch._C._distributed_c10d._get_work_registry_size() == before
        ops.all_reduce(mine, "sum", name)  # never waited for; leaving must not hang


@check
def dtensor(rank: int, path: str) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    with joined(rank, path):
        mesh = dist.init_device_mesh("cpu", (WORLD,), mesh_dim_names=("tp",))
        torch.manual_seed(0)
        whole = torch.randn(4, 6)
        rows = distribute_tensor(whole, mesh, [Shard(0)])
        equal(rows.to_local(), whole.chunk(2)[rank])
        equal(rows.redistribute(mesh, [Shard(1)]).to_local(), whole.chunk(2, 1)[rank])
        equal(rows.full_tensor(), whole)
        partial = DTensor.from_local(torch.ones(2, 2), mesh, [Partial()])
        equal(partial.redistribute(mesh, [Replicate()]).to_local(), torch.full((2, 2), 2.0))
        equal(partial.redistribute(mesh, [Shard(0)]).to_local(), torch.full((1, 2), 2.0))
        torch.testing.assert_close(
            (rows @ distribute_tensor(whole.T, mesh, [Replicate()])).full_tensor(), whole @ whole.T
        )
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2))
        expected = model(whole)
        parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
        torch.testing.assert_close(model(whole), expected)
        assert distribute_module(nn.Linear(2, 2), mesh) is not None


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def _batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 + rank))


def _mean_gradients() -> list[torch.Tensor]:
    """What data parallelism must arrive at, computed by one process."""
    model = _model()
    sum(model(_batch(r)).square().sum() for r in range(WORLD)).div(WORLD).backward()  # type: ignore[union-attr]
    return [p.grad for p in model.parameters()]  # type: ignore[misc]


@check
def fsdp2(rank: int, path: str) -> None:
    from torch.distributed.fsdp import fully_shard

    with joined(rank, path) as group:
        mesh = dist.init_device_mesh("cpu", (WORLD,))
        for symmetric in (False, True):
            model = _model()
            for layer in (model[0], model[2]):
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            if symmetric:
                for module in (model[0], model[2], model):
                    module.set_allocate_memory_from_process_group_for_comm(True)
            target = mesh.get_group()
            with mock.patch.object(
                type(target), "allocate_tensor", autospec=True, side_effect=type(target).allocate_tensor
            ) as spy:
                model(_batch(rank)).square().sum().backward()
            assert (spy.call_count > 0) == symmetric, f"allocate_tensor was called {spy.call_count} times"
            for parameter, expected in zip(model.parameters(), _mean_gradients(), strict=True):
                torch.testing.assert_close(parameter.grad.full_tensor(), expected)
        buffer = group.allocate_tensor(1000, dtype=torch.float32, device=torch.device("cpu"))
        arena = group.core._arena
        assert arena.base <= buffer.data_ptr() < arena.base + arena.nbytes
        assert group.supports_tensor_alloc(torch.device("cpu")) and not group.supports_tensor_alloc("cuda")
        buffer.fill_(1.0)
        dist.all_reduce(buffer)
        equal(buffer, torch.full((1000,), 2.0))
        used = group.memory_stats()["symmetric_used_bytes"]
        del buffer
        assert group.memory_stats()["symmetric_used_bytes"] < used


@check
def ddp_variants(rank: int, path: str) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
    from torch.nn.parallel import DistributedDataParallel

    hooks = {
        "allreduce": (default_hooks.allreduce_hook, 1e-6),
        "fp16": (default_hooks.fp16_compress_hook, 1e-2),
        "bf16": (lambda state, bucket: default_hooks.bf16_compress_hook(state, bucket), 1e-1),  # torch knows the name
    }
    with joined(rank, path):
        expected = _mean_gradients()
        variants: list[tuple[dict[str, bool], Any, float]] = [
            ({}, None, 1e-6),
            ({"static_graph": True}, None, 1e-6),
            ({"find_unused_parameters": True}, None, 1e-6),
            ({"gradient_as_bucket_view": True}, None, 1e-6),
            *[({}, hook, tolerance) for hook, tolerance in hooks.values()],
        ]
        for options, hook, tolerance in variants:
            model = DistributedDataParallel(_model(), **options)  # type: ignore[arg-type]
            if hook is not None:
                model.register_comm_hook(None, hook)
            for _ in range(2):
                model.zero_grad()
                model(_batch(rank)).square().sum().backward()
            for parameter, value in zip(model.parameters(), expected, strict=True):
                torch.testing.assert_close(parameter.grad, value, rtol=tolerance, atol=tolerance * 10)
        model = DistributedDataParallel(_model())
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        for _ in range(4):
            model.zero_grad()
            model(_batch(rank)).square().sum().backward()
        gradient = next(model.parameters()).grad
        assert gradient is not None and gradient.abs().sum() > 0
        both = [torch.empty_like(gradient) for _ in range(WORLD)]
        dist.all_gather(both, gradient)
        equal(both[0], both[1])


@check
def profiler_events(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            dist.all_reduce(torch.ones(3, 2))
            group.allreduce([torch.ones(5)]).wait()
            dist.isend(torch.ones(1), 1 - rank)
            dist.recv(torch.ones(1), 1 - rank)
        events = {e.name: e for e in profile.events() if e.name.startswith("symcomm:")}
        assert {"symcomm:all_reduce", "symcomm:send", "symcomm:recv"} <= set(events), list(events)
        assert all(e.is_async for e in events.values())
        shapes = [e.input_shapes for e in profile.events() if e.name == "symcomm:all_reduce"]
        assert shapes == [[[3, 2]], [[5]]], shapes
        trace = f"{path}-trace-{rank}.json"
        profile.export_chrome_trace(trace)
        told = [e["args"] for e in json.loads(Path(trace).read_text())["traceEvents"] if e["name"] == "symcomm_comms"]
        assert (
            told[0]["Collective name"] == "all_reduce" and told[0]["In msg nelems"] == 6 and told[0]["Group size"] == 2
        )


# --- running ------------------------------------------------------------------------------------------------------


def _on_rank(rank: int, names: list[str], folder: str, out: int, checks: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    register()
    for name in names:
        try:
            checks[name](rank, f"{folder}/{name}")
            text = ""
        except BaseException:
            text = traceback.format_exc()
            if dist.is_initialized():
                dist.destroy_process_group()
        os.write(out, (json.dumps({"check": name, "rank": rank, "text": text}) + "\n").encode())


def main(names: list[str], checks: dict[str, Any] = CHECKS) -> int:
    """Forks the ranks of this process, which has imported torch once and done nothing else with it."""
    chosen = names or list(checks)
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                try:
                    _on_rank(rank, chosen, folder, 1, checks)
                finally:
                    os._exit(0)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
