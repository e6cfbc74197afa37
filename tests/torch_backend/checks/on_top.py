"""What is built on top: functional collectives, DTensor, FSDP, DDP, checkpoints, the profiler."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn

from tests.torch_backend.checks import WORLD, check, equal, joined


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
def results_on_their_way_are_tensors_too(rank: int, path: str) -> None:
    """What functional collectives return may be passed on before anybody has waited for it."""
    with joined(rank, path) as group:

        def begun() -> torch.Tensor:
            return funcol.all_reduce(torch.ones(2), "sum", group)

        assert type(begun()) is funcol.AsyncCollectiveTensor
        value, other = begun(), begun()
        dist.all_reduce(value)
        dist.all_reduce_coalesced([value, other])
        equal(value.wait(), [8.0, 8.0])
        equal(other.wait(), [4.0, 4.0])
        gathered, parts = torch.empty(4), [torch.empty(2), torch.empty(2)]
        dist.all_gather_into_tensor(gathered, begun())
        equal(gathered, [2.0] * 4)
        dist.all_gather(parts, begun() * (rank + 1), async_op=True).wait()
        equal(torch.cat(parts), [2.0, 2.0, 4.0, 4.0])
        whole = begun()
        dist.all_to_all(parts, [whole[:1].expand(2), whole])
        equal(torch.cat(parts), [2.0] * 4)
        received = begun()
        messages = [(dist.isend, begun() + rank), (dist.irecv, received)]
        for work in dist.batch_isend_irecv([dist.P2POp(do, tensor, 1 - rank) for do, tensor in messages]):
            work.wait()
        equal(received.wait(), [3.0 - rank] * 2)


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
        arena = group.core.arena
        assert arena.base <= buffer.data_ptr() < arena.base + arena.nbytes
        assert group.supports_tensor_alloc(torch.device("cpu")) and not group.supports_tensor_alloc("cuda")
        buffer.fill_(1.0)
        dist.all_reduce(buffer)
        equal(buffer, torch.full((1000,), 2.0))
        used = group.memory_stats()["symmetric_used_bytes"]
        del buffer
        assert group.memory_stats()["symmetric_used_bytes"] < used


@check
def communication_is_counted(rank: int, path: str) -> None:
    """``CommDebugMode`` sees on our groups what it sees on Gloo's, and what it watches goes on as usual."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.debug import CommDebugMode

    def counted(group: Any) -> dict[str, int]:
        one, two = torch.full((4,), float(rank)), [torch.zeros(4), torch.zeros(4)]
        torch.manual_seed(0)
        parallel = nn.parallel.DistributedDataParallel(_model(), process_group=group)
        mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))  # equal to no other mesh
        sharded = fully_shard(_model(), mesh=mesh)
        with CommDebugMode() as seen:
            dist.all_reduce(one, group=group)
            result = dist.all_reduce(one, group=group, async_op=True).get_future().wait()
            dist.all_gather(two, one, group=group)
            dist.all_gather_object([None, None], rank, group=group)
            dist.all_reduce(torch.ones(2).to_sparse(), group=group)
            with dist._coalescing_manager(group):
                dist.all_gather_into_tensor(torch.zeros(8), one, group=group)
                dist.all_gather_into_tensor(torch.zeros(8), one, group=group)
            for model in (parallel, sharded):
                model(_batch(rank)).sum().backward()
        equal(torch.stack([*result, *two]), torch.full((3, 4), 2.0))
        for got, wanted in zip(sharded.parameters(), parallel.module.parameters(), strict=True):
            assert torch.allclose(got.grad.to_local(), wanted.grad.chunk(WORLD)[rank])
        return {str(operator): count for operator, count in seen.get_comm_counts().items() if count}

    with joined(rank, path) as ours:
        gloo = counted(dist.new_group(backend="gloo"))
        assert counted(ours) == gloo and gloo["c10d._allgather_base_"] and gloo["c10d._reduce_scatter_base_"]


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
def ddp_with_uneven_inputs(rank: int, path: str) -> None:
    """Gradients of the last iteration, as on Gloo: ranks that have run out of input stand by."""

    def train(backend: str, by_initial: bool) -> list[torch.Tensor]:
        with joined(rank, f"{path}-{backend}-{by_initial}", backend):
            model = nn.parallel.DistributedDataParallel(_model())
            with model.join(divide_by_initial_world_size=by_initial):
                for step in range(2 + 2 * rank):
                    model.zero_grad()
                    model(_batch(rank) + step).sum().backward()
            return [p.grad.clone() for p in model.parameters()]

    for by_initial in (True, False):
        for ours, theirs in zip(train("symcomm", by_initial), train("gloo", by_initial), strict=True):
            equal(ours, theirs)


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
        differentiable.all_reduce(leaf, group=dist.group.WORLD).sum().backward()
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
def ddp_with_sparse_gradients(rank: int, path: str) -> None:
    from torch.nn.parallel import DistributedDataParallel

    with joined(rank, path) as group:

        def halved(_, bucket):  # type: ignore[no-untyped-def]  # DDP looks at annotations
            return group.allreduce([bucket.buffer()]).get_future().then(lambda future: future.wait()[0] / WORLD)

        for views in (False, True):
            for hook in (None, halved):
                torch.manual_seed(1)
                model = nn.EmbeddingBag(10, 3, sparse=True)
                parallel = DistributedDataParallel(model, gradient_as_bucket_view=views)
                if hook is not None:
                    parallel.register_comm_hook(None, hook)
                parallel(torch.tensor([[0, 1 + rank]])).sum().backward()
                gradient = model.weight.grad
                assert gradient is not None and gradient.is_sparse
                torch.manual_seed(1)
                alone = nn.EmbeddingBag(10, 3, sparse=True)
                (alone(torch.tensor([[0, 1], [0, 2]])).sum() / WORLD).backward()
                torch.testing.assert_close(gradient.to_dense(), alone.weight.grad.to_dense())  # type: ignore[union-attr]


@check
def pieces_of_ddp(rank: int, path: str) -> None:
    """What DDP is made of, called directly."""
    with joined(rank, path) as group:
        target = [*torch.arange(60.0).chunk(5), *torch.arange(60, dtype=torch.float64).chunk(5)]
        for root in range(WORLD):
            tensors = [t.clone() if rank == root else torch.zeros_like(t) for t in target]
            dist._broadcast_coalesced(group, tensors, buffer_size=256, src=root)
            for got, expected in zip(tensors, target, strict=True):
                equal(got, expected)
        model = nn.Linear(2, 4)
        reducer = dist.Reducer(list(model.parameters()), [[0, 1]], [1 << 20], group)
        reducer.prepare_for_forward()
        loss = model(torch.full((1, 2), float(rank))).sum()
        reducer.prepare_for_backward(loss)
        loss.backward()
        equal(model.weight.grad, torch.full((4, 2), 0.5))


@check
def functional_collectives_of_our_own(rank: int, path: str) -> None:
    """Operators for which torch's C++ would look past us."""
    ops, wait = torch.ops._c10d_functional, torch.ops._c10d_functional.wait_tensor
    with joined(rank, path) as group:
        gloo = dist.new_group(backend="gloo")
        for name in (group.group_name, gloo.group_name):
            mine, out = torch.full((2,), float(rank)), torch.empty(4)
            assert wait(ops.all_gather_into_tensor_out(mine, WORLD, name, out=out)).data_ptr() == out.data_ptr()
            equal(out, [0.0, 0.0, 1.0, 1.0])
            if not hasattr(ops, "batch_p2p_ops"):  # before torch 2.12
                continue
            got = torch.zeros(2)
            sent, came = ops.batch_p2p_ops(["isend", "irecv"], [1 - rank] * 2, [0, 0], [mine, got], name)
            wait(sent)
            equal(wait(came), [1.0 - rank] * 2)
            equal(got, [1.0 - rank] * 2)
