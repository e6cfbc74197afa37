"""Graphs that make_fx traces, and what goes in and out of compiled ones by other ways than functional operators."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch._inductor.compile_fx import compile_fx
from torch.fx.experimental.proxy_tensor import make_fx

from symcomm.compile import report
from symcomm.torch_backend.group import TorchGroup
from tests.compile.checks import Compiled, alike, check, second_group

old = torch.ops.c10d_functional  # by tag and ranks instead of a group's name


def _into(*shape: int) -> Callable[[Callable[..., Any]], Callable[..., torch.Tensor]]:
    """A function of one tensor (and a group) from a call that writes into another one."""

    def make(call: Callable[..., Any]) -> Callable[..., torch.Tensor]:
        def function(x: torch.Tensor, group: Any = None) -> torch.Tensor:
            out = x.new_zeros(shape)
            call(out, x.clone(), group)
            return out + 1

        return function

    return make


def _lists(call: Callable[..., Any]) -> Callable[..., torch.Tensor]:
    def function(x: torch.Tensor, group: Any = None) -> torch.Tensor:
        out = [torch.zeros_like(x), torch.zeros_like(x)]
        call(out, x.clone(), group)
        return out[0] - out[1]

    return function


def _of_one_tensor(function: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda x: function(x)


CALLS = {
    "allreduce_": _into(4)(lambda out, x, g: dist.all_reduce(out.add_(x), op=dist.ReduceOp.MAX, group=g)),
    "broadcast_": _into(4)(lambda out, x, g: dist.broadcast(out.add_(x), 1, group=g)),
    "reduce_": _into(4)(lambda out, x, g: dist.reduce(out.add_(x), 0, group=g)),
    "allgather_": _lists(lambda out, x, g: dist.all_gather(out, x, group=g)),
    "_allgather_base_": _into(8)(lambda out, x, g: dist.all_gather_into_tensor(out, x, group=g)),
    "reduce_scatter_": _into(2)(lambda out, x, g: dist.reduce_scatter(out, list(x.chunk(2)), group=g)),
    "_reduce_scatter_base_": _into(2)(lambda out, x, g: dist.reduce_scatter_tensor(out, x, group=g)),
    "gather_": _lists(lambda out, x, g: dist.gather(x, out if dist.get_rank() == 0 else None, 0, group=g)),
    "scatter_": _into(2)(
        lambda out, x, g: dist.scatter(out, list(x.chunk(2)) if dist.get_rank() == 0 else None, 0, group=g)
    ),
    "alltoall_": _lists(lambda out, x, g: dist.all_to_all(out, [x * 1, x * 2], group=g)),
    "alltoall_base_": _into(4)(lambda out, x, g: dist.all_to_all_single(out, x, group=g)),
}


@check
def calls_become_nodes(rank: int) -> None:
    methods = dict(vars(TorchGroup))
    x = torch.arange(4.0) + 10 * rank
    for operator, function in CALLS.items():
        graph = make_fx(_of_one_tensor(function))(x)
        assert f"c10d.{operator}.default" in graph.code, (operator, graph.code)
        alike(graph(x * 2), function(x * 2))
    assert dict(vars(TorchGroup)) == methods, "methods are exchanged only while tracing"
    with second_group("gloo") as gloo:

        def elsewhere(t: torch.Tensor) -> torch.Tensor:
            t = t.clone()
            dist.all_reduce(t, group=gloo)
            return t

        assert "c10d.allreduce_.default" in make_fx(elsewhere)(x).code  # not run: Gloo's graphs wait for nothing
        for operator, function in CALLS.items():  # Gloo's own calls, which the same kernels pass on
            if operator == "alltoall_":  # which Gloo does not have
                continue
            theirs, ours = function(x, gloo), function(x)
            if operator != "reduce_" or rank == 0:  # Gloo leaves sums of some ranks with the others
                alike(theirs, ours)
        for _ in range(5):  # C++ calls these operators too, and Gloo's thread wants the interpreter's lock now and then
            model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4), process_group=gloo)
            with model.join():
                for _ in range(2 + rank):
                    model(x).sum().backward()


@check
def graphs_that_hold_a_group(rank: int) -> None:
    """make_fx, then the pieces that torch compiles such graphs with."""
    from torch._inductor._functionalize_collectives import (
        _functionalize_inplace_collectives,
        _unbox_process_group_torchbinds,
    )

    def function(t: torch.Tensor) -> torch.Tensor:
        t = t * 2
        dist.all_reduce(t)
        return t + 1

    x = torch.randn(64, 64)
    graph = _unbox_process_group_torchbinds(_functionalize_inplace_collectives(make_fx(function)(x)))
    assert graph._torchbind_obj0 is dist.group.WORLD
    alike(graph(x), function(x))
    with report.listening() as records:
        compiled: Any = compile_fx(copy.copy(graph), [x])
        alike(compiled(x), function(x))
    assert [record.zero_copy for record in records] == [True], records


@check
def eager_code_begins_and_a_graph_waits(rank: int) -> None:
    registered = torch._C._distributed_c10d._get_work_registry_size
    before = registered()

    def wait(y: torch.Tensor) -> torch.Tensor:
        old.wait_tensor(y)
        return y * y

    compiled = torch.compile(wait, fullgraph=True)
    for _ in range(3):
        y = torch.full((512, 512), rank + 1.0)
        with functional.allow_inflight_collective_as_graph_input_ctx():
            work = dist.all_reduce(y, async_op=True)
        assert registered() == before + 1 and isinstance(work, dist.Work)
        alike(compiled(y), torch.full((512, 512), 9.0))
        assert registered() == before
    work = dist.all_reduce(torch.ones(4), async_op=True)
    assert registered() == before
    work.wait()


@check
def a_graph_begins_and_eager_code_waits(rank: int) -> None:
    def begin(a: torch.Tensor) -> torch.Tensor:
        return old.all_reduce(a @ a, "sum", "", [0, 1], 2)

    for size in (4, 64):
        a = torch.ones(size, size) + rank
        begun: Any = compile_fx(make_fx(begin)(a), [a])
        alike(old.wait_tensor(begun(a)), old.wait_tensor(begin(a)))


@check
def splits_that_only_the_data_knows(rank: int) -> None:
    def function(x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        theirs = functional.wait_tensor(functional.all_to_all_single(counts, None, None, "0"))
        return functional.all_to_all_single(x * 2, theirs.tolist(), counts.tolist(), "0")

    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        compiled: Any = torch.compile(function, fullgraph=True, dynamic=True)
        for more in (1, 5):
            counts = torch.tensor([3 + rank, 2 + more])
            x = torch.randn(int(counts.sum()), 7)
            alike(compiled(x, counts), function(x, counts))


@check
def results_viewed_before_the_wait(rank: int) -> None:
    ops = torch.ops._c10d_functional

    def function(a: torch.Tensor) -> torch.Tensor:
        return ops.wait_tensor(ops.all_gather_into_tensor(a, 2, "0").view(torch.int32))

    compiled = Compiled(function, torch.randn(40, 40))
    before = torch._C._distributed_c10d._get_work_registry_size()
    for _ in range(20):
        a = torch.randn(40, 40)
        alike(compiled.function(a), function(a))
    assert torch._C._distributed_c10d._get_work_registry_size() == before


@check
def strides_as_in_eager_code(rank: int) -> None:
    ops = torch.ops._c10d_functional

    def function(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        begun = ops.all_reduce(a.t(), "sum", "0")
        return begun, ops.wait_tensor(begun)

    for size in ((16, 8), (96, 64)):
        a = torch.randn(size)
        got, expected = torch.compile(function, fullgraph=True)(a), function(a)
        alike(list(got), list(expected))
        assert [t.stride() for t in got] == [t.stride() for t in expected]
