"""What people compile: tensor parallel, FSDP2, DDP, DTensors that change their sharding."""

from __future__ import annotations

import copy

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from symcomm.compile import report
from tests.compile.checks import alike, check, uncached


def _model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))


def _train(model: nn.Module, steps: int = 2) -> list[torch.Tensor]:
    """Losses of a few steps of SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(7)
    losses = []
    for _ in range(steps):
        loss = model(torch.randn(48, 32, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@check
def tensor_parallel(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(_model(), mesh, plan)
    with report.listening() as records, uncached():
        got = _train(torch.compile(model, fullgraph=True))  # type: ignore[arg-type]
    alike(got, _train(parallelize_module(_model(), mesh, plan)), exact=False)
    alike(got, _train(_model()), exact=False)
    assert any(record.zero_copy for record in records), records


@check
def fsdp2(rank: int) -> None:
    def sharded() -> nn.Module:
        model = _model()
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return model

    alike(_train(torch.compile(sharded())), _train(sharded()), exact=False)  # type: ignore[arg-type]


@check
def ddp(rank: int) -> None:
    def replicated() -> nn.Module:
        return DistributedDataParallel(_model())

    alike(_train(torch.compile(replicated())), _train(replicated()), exact=False)  # type: ignore[arg-type]


@check
def ddp_with_its_reductions_in_the_graph(rank: int) -> None:
    """PyTorch's functional form of DDP: forward, backward and reductions in one graph each."""
    with (
        torch._dynamo.config.patch(optimize_ddp="python_reducer"),
        torch._dynamo.compiled_autograd._enable(torch.compile(fullgraph=True)),
        report.listening() as records,
        uncached(),
    ):
        got = _train(torch.compile(DistributedDataParallel(_model()), fullgraph=True))  # type: ignore[arg-type]
    alike(got, _train(DistributedDataParallel(_model())), exact=False)
    assert records


@check
def ddp_by_functional_collectives(rank: int) -> None:
    """The whole step in one graph: the reductions are in it."""

    def gradients(model: nn.Module, batch: torch.Tensor) -> list[torch.Tensor]:
        parameters = dict(model.named_parameters())

        def loss(values: dict[str, torch.Tensor]) -> torch.Tensor:
            return torch.func.functional_call(model, values, (batch,)).square().mean()

        found = torch.func.grad(loss)(parameters)
        return [functional.all_reduce(g, "avg", "0") for g in found.values()]

    model, batch = _model(), torch.randn(16, 32)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with report.listening() as records, uncached():
        got = torch.compile(gradients, fullgraph=True)(copy.deepcopy(model), batch)
    alike(got, gradients(model, batch), exact=False)
    assert 1 <= len(records) < 4, records  # four gradients, the small ones joined


@check
def dtensor_changes_its_sharding(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(64.0 * 32).view(64, 32)

    def function(x: torch.Tensor) -> torch.Tensor:
        return (x.redistribute(mesh, [Shard(1)]) * 2).redistribute(mesh, [Replicate()]).to_local()  # type: ignore[attr-defined]

    x = distribute_tensor(whole, mesh, [Shard(0)])
    alike(torch.compile(function, fullgraph=True)(x), whole * 2)


@check
def a_result_still_on_its_way(rank: int) -> None:
    """An eager collective that has not been waited for goes into a graph."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x @ x, "sum", "0")

    x = torch.randn(40, 40)
    pending = functional.all_reduce(x, "sum", dist.group.WORLD)
    expected = function(functional.all_reduce(x, "sum", dist.group.WORLD))
    alike(torch.compile(function)(pending), expected, exact=False)


@check
def without_gradients(rank: int) -> None:
    x = torch.randn(40, 40)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            torch._dynamo.reset()
            got = torch.compile(lambda t: functional.all_reduce(t @ t, "sum", "0"), fullgraph=True)(x)
            alike(got, functional.all_reduce(x @ x, "sum", "0") + 0)
