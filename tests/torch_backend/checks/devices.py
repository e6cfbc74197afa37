"""Maps from devices to backends. There is no GPU here: the second device is torch's "meta", which holds no data."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake", which is C++ and does nothing
from torch._C._distributed_c10d import FakeProcessGroup

from symcomm.torch_backend.work import DoneWork
from tests.torch_backend.checks import WORLD, check, equal, joined, refused

assert torch.testing._internal.distributed.fake_pg


class Recorder(dist.ProcessGroup):
    """An engine that keeps the names of the calls it gets."""

    def __init__(self, rank: int, size: int):
        super().__init__(rank, size)
        self.calls: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        if name.startswith(("all", "reduce", "broadcast", "gather", "scatter", "send", "recv", "_all", "_red")):
            return lambda *args: self.calls.append(name) or DoneWork()
        return super().__getattribute__(name)


@check
def device_maps(rank: int, path: str) -> None:
    for number, backend in enumerate(("cpu:symcomm,cuda:nccl", "cpu:symcomm", "cpu:symcomm,cuda:symcomm")):
        with joined(rank, f"{path}-{number}", backend) as group:
            value = torch.ones(3)
            dist.all_reduce(value)
            dist.all_reduce(value, group=dist.new_group([0, 1]))
            equal(value, [4.0] * 3)
            assert dist.get_backend() == backend and group.name() == "custom"
            assert dist.get_backend_config() == backend and group._get_backend(torch.device("cpu")) is group
            assert group._device_types == [torch.device("cpu")] or dist.is_nccl_available()
            everyone: list[Any] = [None] * WORLD
            dist.all_gather_object(everyone, rank)
            assert everyone == [0, 1]
            before = group.core.sequence_number
            dist.all_reduce(torch.ones(2, device="meta"))  # which has no values: returns, as on Gloo
            assert group.core.sequence_number == before


@check
def engine_not_in_this_build(rank: int, path: str) -> None:
    with joined(rank, path, "cpu:symcomm,cuda:nccl") as group:
        if not dist.is_nccl_available():
            refused(lambda: group._get_backend(torch.device("cuda")), "no nccl", "cpu:symcomm,cuda:nccl", ".cpu()")
        dist.barrier()


@check
def other_devices_have_their_engine(rank: int, path: str) -> None:
    made: list[Recorder] = []

    def create(store: Any, rank: int, size: int, timeout: Any) -> Recorder:
        made.append(Recorder(rank, size))
        return made[-1]

    dist.Backend.register_backend("recorder", create, devices=["meta"])
    with joined(rank, path, "cpu:symcomm,meta:recorder") as group:
        assert torch.device("meta") in group._device_types and not made
        there, two = torch.ones(4, device="meta"), [torch.ones(2, device="meta") for _ in range(WORLD)]
        dist.all_reduce(there)
        assert len(made) == 1 and group._get_backend("cpu") is group
        dist.broadcast(there, 0)
        dist.reduce(there, 0)
        dist.all_gather(two, two[0].clone())
        dist.all_gather_into_tensor(there, two[0])
        dist.reduce_scatter(two[0], list(two))
        dist.reduce_scatter_tensor(two[0], there)
        dist.gather(two[0], two if rank == 0 else None, 0)
        dist.scatter(two[0], two if rank == 0 else None, 0)
        dist.all_to_all(two, list(two))
        dist.all_to_all_single(there, there.clone())
        dist.isend(there, 1 - rank)
        dist.irecv(there, 1 - rank)
        group.allreduce(there, dist.ReduceOp.MAX).wait()
        group.broadcast(there, 1).wait()
        assert made[0].calls == [
            "allreduce", "broadcast", "reduce", "allgather", "_allgather_base", "reduce_scatter",
            "_reduce_scatter_base", "gather", "scatter", "alltoall", "alltoall_base", "send", "recv", "allreduce",
            "broadcast",
        ]  # fmt: skip
        dist.all_reduce(there, group=dist.new_group([0, 1]))
        assert len(made) == 2 and made[1].calls == ["allreduce"]
        here = torch.ones(1)
        dist.all_reduce(here)
        equal(here, [2.0])


@check
def other_devices_on_a_cpp_engine(rank: int, path: str) -> None:
    """Calls arrive at a backend of torch's kind, inside a group of torch's kind."""
    if not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta"):
        return  # torch 2.10 has no collectives on meta tensors
    with joined(rank, path, "cpu:symcomm,meta:fake") as group:
        there = torch.ones(4, device="meta")
        work = dist.all_reduce(there, async_op=True)
        assert work is not None and work.wait()
        dist.broadcast(there, 1)
        dist.all_gather_into_tensor(torch.ones(8, device="meta"), there)
        assert isinstance(group._get_backend(torch.device("meta")), FakeProcessGroup)
        group._start_coalescing(torch.device("meta"))
        group._end_coalescing(torch.device("meta"))


@check
def gloo_for_another_device(rank: int, path: str) -> None:
    """Gloo is made when it is first needed, by those who need it, and is torch's own."""
    with joined(rank, path, "cpu:symcomm,cuda:gloo") as group:
        engine = group._get_backend(torch.device("cuda"))
        assert type(engine).__name__ == "ProcessGroupGloo" and engine.size() == WORLD
        value = torch.ones(2)
        engine.allreduce([value]).wait()
        equal(value, [2.0, 2.0])
        assert engine.options._timeout == group.options._timeout


@check
def tensors_on_a_gpu(rank: int, path: str) -> None:
    """Says nothing where there is none, or where the process that forked this one has used it. The ranks share one GPU,
    so NCCL gets groups of one rank."""
    if not torch.cuda.is_available() or torch.cuda._is_in_bad_fork():
        return
    with joined(rank, path, "cpu:symcomm,cuda:gloo"):
        there, here = torch.ones(4, device="cuda:0"), torch.ones(4)
        dist.all_reduce(there)
        dist.all_reduce(here)
        equal(there.cpu(), here)
        dist.broadcast(there, 1, async_op=True).wait()  # type: ignore[union-attr]
    with joined(rank, path + "-nccl", "cpu:symcomm,cuda:nccl") as group:
        torch.cuda.set_device(0)
        alone = [dist.new_group([r]) for r in range(WORLD)][rank]
        there = torch.full((4,), 3.0, device="cuda:0")
        dist.all_reduce(there, group=alone)
        dist.all_gather_into_tensor(torch.empty(4, device="cuda:0"), there, group=alone)
        equal(there.cpu(), [3.0] * 4)
        assert type(alone._get_backend(there.device)).__name__ == "ProcessGroupNCCL"
        assert torch.device("cuda") in group._device_types
        here = torch.ones(1)
        dist.all_reduce(here)
        equal(here, [2.0])
