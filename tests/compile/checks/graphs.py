"""What is done to a graph: comm buffers, waits, buckets, overlap, matmuls in pieces."""

from __future__ import annotations

import os
import re
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch._inductor import config

from symcomm import compile as symcompile
from symcomm import symm_mem
from symcomm.bench.ddp_worker import memory
from symcomm.compile import report, runtime
from symcomm.torch_backend import symm_reduce
from tests.compile.checks import Compiled, alike, as_eager, check


def two_layers(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    hidden = functional.all_reduce(a @ w, "sum", "0")
    return functional.all_reduce(hidden @ w, "sum", "0")


@check
def kernels_write_into_comm_buffers(rank: int) -> None:
    compiled = as_eager(two_layers, torch.randn(64, 64), torch.randn(64, 64) / 8)
    line = r"buf\d+ = empty_strided_p2p\(\(64, 64\), \(64, 1\), torch.float32, .*, group_name='0', alloc_id=(\d+)\)"
    numbers = re.findall(line, compiled.code)  # as torch writes it for a GPU, which tools look for
    assert len(set(numbers)) == compiled.code.count("empty_strided_p2p(") == 2, compiled.code
    assert "empty_strided_cpu(" not in compiled.code.split("def call")[1]
    assert [record.plan for record in compiled.records] == ["direct", "direct"]
    assert symm_mem.is_symm_mem_tensor(compiled.result), "the result left the graph in a copy"
    without = as_eager(two_layers, torch.randn(64, 64), torch.randn(64, 64) / 8, zero_copy=False)
    assert "empty_strided_p2p(" not in without.code and {r.reason for r in without.records} == {"switched off"}


@check
def comm_buffers_of_other_devices_are_torchs(rank: int) -> None:
    """A graph may use two devices; its code has one name for both."""
    with pytest.raises(RuntimeError, match="(?i)SymmetricMemory.*meta"):
        runtime.comm_buffer((2,), (1,), torch.float32, torch.device("meta"), group_name="0", alloc_id=1)


@check
def the_same_memory_again(rank: int) -> None:
    a, w = torch.randn(64, 64), torch.randn(64, 64) / 8
    compiled = Compiled(two_layers, a, w)
    expected = two_layers(a, w)
    held = [compiled.function(a, w) for _ in range(5)]
    assert len({t.data_ptr() for t in held}) == 5
    for result in held:
        alike(result, expected)
    del held, result
    compiled.result = None
    addresses, used = set(), set()
    steps, first = int(os.environ.get("SYMCOMM_COMPILE_STEPS", "300")), 0
    for step in range(steps):
        addresses.add(compiled.function(a, w).data_ptr())
        if step >= 20:
            used.add(symm_mem.memory_stats()["used_bytes"])
        if step == steps // 2:
            first = memory("VmRSS:")
    assert len(addresses) <= 6 and len(used) == 1, (addresses, used)
    assert memory("VmRSS:") - first < 4 << 20, "the second half of the iterations needed more memory"
    kept = runtime.places(dist.group.WORLD.core)
    assert sorted(kept.values()) == [1, 6], kept
    many = [compiled.function(a, w) for _ in range(runtime.MOST + 8)]
    assert len({t.data_ptr() for t in many}) == len(many)
    assert max(runtime.places(dist.group.WORLD.core).values()) == runtime.MOST


@check
def launches_leave_nothing_behind(rank: int) -> None:
    a, w = torch.randn(64, 64), torch.randn(64, 64) / 8
    compiled = Compiled(two_layers, a, w, block=False)
    expected = two_layers(a, w)
    for _ in range(100):
        alike(compiled.function(a, w), expected)
    assert torch._C._distributed_c10d._get_work_registry_size() == 0
    compiled.result = None
    compiled.function(a, w)
    assert max(runtime.places(dist.group.WORLD.core).values()) <= 3


@check
def errors_name_the_call(rank: int) -> None:
    """A rank that makes another call is an error in the compiled graph of every rank, as in eager code."""
    size = 64 if rank else 32
    a, w = torch.randn(size, 64), torch.randn(64, 64)
    try:
        torch.compile(two_layers, fullgraph=True)(a, w)
    except RuntimeError as error:
        assert "all_reduce" in str(error) and "rank" in str(error), error
    else:
        raise AssertionError("nothing was raised")


@check
def a_missing_rank_is_a_timeout(rank: int) -> None:
    group = dist.new_group([0, 1], backend="symcomm", timeout=timedelta(seconds=2))

    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(x @ x, "sum", group)

    compiled = Compiled(function, torch.randn(40, 40))
    if rank == 0:
        try:
            compiled.function(torch.randn(40, 40))
        except RuntimeError as error:
            assert "rank 1" in str(error), error
        else:
            raise AssertionError("nothing was raised")
    dist.barrier()


@check
def reasons(rank: int) -> None:
    def function(a: torch.Tensor) -> list[torch.Tensor]:
        product = a @ a
        values = torch.sort(a * 2).values
        return [
            functional.all_gather_tensor(a, 0, "0"),
            functional.all_gather_tensor(a[:4] + 1, 0, "0"),
            product,
            functional.all_gather_tensor(product, 0, "0"),
            functional.all_gather_tensor(values, 0, "0"),
        ]

    compiled = as_eager(function, torch.randn(64, 64), bucket=False)
    words = [record.reason for record in compiled.records]
    assert len(words) == 4
    for expected in ("an input of the graph", "copying is faster", "a result of the graph too", "allocates it"):
        assert any(expected in reason for reason in words), (expected, words)


@check
def small_ones_are_joined(rank: int) -> None:
    def function(a: torch.Tensor) -> list[torch.Tensor]:
        reduced = [functional.all_reduce(a + k, "sum", "0") for k in range(5)]
        gathered = [functional.all_gather_tensor(a * k, 0, "0") for k in range(5)]
        scattered = [functional.reduce_scatter_tensor(a - k, "sum", 0, "0") for k in range(5)]
        return reduced + gathered + scattered

    a, said = torch.randn(16, 8), []
    with patch.object(report, "say", said.append):
        joined = as_eager(function, a, block=True)
    assert "12 of the graph's 15 collectives were joined with others" in said, said
    assert len(joined.records) == 3 and "wait_tensor" not in joined.code, joined.records
    launched = as_eager(function, a, block=False)
    assert len(launched.records) == 3 and launched.code.count("wait_tensor.default(") == 3, launched.code
    apart = as_eager(function, a, bucket=False)
    assert len(apart.records) == 15


@check
def large_ones_are_not_joined(rank: int) -> None:
    def function(a: torch.Tensor) -> list[torch.Tensor]:
        return [functional.all_reduce(a @ a, "sum", "0"), functional.all_reduce(a @ a.t(), "sum", "0")]

    assert len(as_eager(function, torch.randn(256, 256), exact=False).records) == 2


@check
def waits_move_down(rank: int) -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = functional.all_reduce(a @ a, "sum", "0")
        one = first + 1
        two = b @ b @ b
        return one, two

    compiled = as_eager(function, torch.randn(128, 128), torch.randn(128, 128), overlap=True, block=False)
    lines = compiled.code.split("def call")[1].splitlines()
    launch, end = (next(k for k, line in enumerate(lines) if word in line) for word in ("all_reduce_", "wait_tensor"))
    between = [line for line in lines[launch:end] if "extern_kernels.mm" in line]
    assert len(between) == 2, compiled.code
    assert compiled.records[0].between == 2 and compiled.records[0].wait == "launch and wait"


@check
def nothing_beside_blocks(rank: int) -> None:
    """Even where overlap is asked for, a chain has nothing to overlap."""
    compiled = as_eager(two_layers, torch.randn(64, 64), torch.randn(64, 64) / 8, overlap=True)
    assert "wait_tensor" not in compiled.code and {r.wait for r in compiled.records} == {"blocks"}


@check
def matmuls_in_pieces(rank: int) -> None:
    def gather_first(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.all_gather_tensor(a, 0, "0") @ w

    def scatter_after(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return functional.reduce_scatter_tensor(a @ w, "sum", 0, "0")

    a, w = torch.randn(64, 32), torch.randn(32, 48)
    compiled = as_eager(gather_first, a, w, exact=False, fuse=True)
    assert "fused_all_gather_matmul" in compiled.code, compiled.code
    assert [(r.op, r.shape) for r in compiled.records] == [("fused_all_gather_matmul", (64, 32))], compiled.records
    compiled = as_eager(scatter_after, a, w, exact=False, fuse=True)
    assert "fused_matmul_reduce_scatter" in compiled.code, compiled.code
    compiled = as_eager(scatter_after, a, w, exact=False, fuse=False)
    assert "fused" not in compiled.code.split("def call")[1]
    asked = []
    with patch.object(symm_reduce, "pays_in_pieces", lambda *given: asked.append(given) or True):
        for shape in ((64, 32), (6, 4, 32)):
            a = torch.randn(shape)
            as_eager(gather_first, a, w, exact=False, fuse=True)
            as_eager(scatter_after, a, w, exact=False, fuse=True)
    assert len(asked) >= 4


@check
def messages_are_waited_for(rank: int) -> None:
    """They have no call that blocks, so no wait may be left out."""
    ops = torch.ops._c10d_functional

    def function(a: torch.Tensor) -> torch.Tensor:
        if rank == 0:
            return ops.wait_tensor(ops.isend(a + 1, 1, 0, "0"))
        return ops.wait_tensor(ops.irecv(torch.empty(64, 64), 0, 0, "0")) * 2

    compiled = Compiled(function, torch.ones(64, 64), block=True)
    assert "wait_tensor" in compiled.code
    if rank == 1:
        alike(compiled.result, torch.full((64, 64), 4.0))


@check
def passes_of_the_user_run_too(rank: int) -> None:
    seen = []
    with config.patch(post_grad_custom_post_pass=lambda graph: seen.append(len(graph.nodes))):
        as_eager(two_layers, torch.randn(64, 64), torch.randn(64, 64) / 8)
    assert seen


@check
def explained(rank: int) -> None:
    found = symcompile.explain(two_layers, torch.randn(64, 64), torch.randn(64, 64) / 8, show=False)
    assert [r.op for r in found.records] == ["all_reduce_", "all_reduce_"]
    assert found.as_rows()[0] == ["all_reduce_", "64 x 64 float32", "16,384 B", "direct", "yes", "blocks"]


@check
def the_table(rank: int) -> None:
    """Shapes are those of torch's own meta functions; eager methods, gradients and plans exist."""
    from symcomm.compile.table import TABLE, WAIT, WAIT_FOR_ALL

    ops = torch.ops._c10d_functional
    a = torch.empty(8, 6, device="meta")
    arguments = {
        "all_reduce": (a, "sum", "0"), "all_gather_into_tensor": (a, 2, "0"), "broadcast": (a, 0, "0"),
        "reduce_scatter_tensor": (a, "sum", 2, "0"), "all_to_all_single": (a, [3, 1], [6, 2], "0"),
        "all_gather_into_tensor_coalesced": ([a, a.t()], 2, "0"), "all_reduce_coalesced": ([a, a], "sum", "0"),
        "reduce_scatter_tensor_coalesced": ([a, a.t()], "sum", 2, "0"),
        "isend": (a, 1, 0, "0"), "irecv": (a, 0, 0, "0"), "batch_p2p_ops": (["isend"], [1], [0], [a], "0"),
    }  # fmt: skip
    for name, given in arguments.items():
        entry = TABLE[f"_c10d_functional::{name}"]
        theirs, ours = getattr(ops, name)(*given), entry.meta(*given)
        for one, other in zip(*((x if isinstance(x, list) else [x]) for x in (theirs, ours)), strict=True):
            assert one.shape == other.shape and one.dtype == other.dtype, name
    group = dist.group.WORLD
    for entry in TABLE.values():
        assert entry.packet is not None and callable(getattr(group, entry.eager)) and entry.gradient
        assert entry.autograd is not None or not entry.rule
        assert entry.plan is None or entry.plan(rank, 2, 4096, 11).world == 2
    known = {s.name for s in torch._C._jit_get_all_schemas() if s.name.startswith("_c10d_functional::")}
    assert known - set(TABLE) - {WAIT_FOR_ALL} == {WAIT, "_c10d_functional::_wrap_tensor_autograd"}
