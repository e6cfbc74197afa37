"""Compiled collectives give what eager ones give, bit for bit."""

from __future__ import annotations

import functools

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from symcomm.collectives.tree import combine
from tests.compile.checks import Compiled, alike, as_eager, check, check_on_four, gradients, second_group

ops = torch.ops._c10d_functional
wait = ops.wait_tensor


@check
def every_operator(rank: int) -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> list[torch.Tensor]:
        out = [
            wait(ops.all_reduce(a + 1, "sum", "0")),
            wait(ops.all_reduce(a + 2, "max", "0")),
            wait(ops.all_gather_into_tensor(a * 2, 2, "0")),
            wait(ops.reduce_scatter_tensor(a * 3, "avg", 2, "0")),
            wait(ops.all_to_all_single(a * 4, [16, 48] if rank else [48, 16], [16, 48] if rank else [48, 16], "0")),
            wait(ops.broadcast(a * 5, 1, "0")),
        ]
        for several in (
            ops.all_reduce_coalesced([a + 6, b + 6], "sum", "0"),
            ops.all_gather_into_tensor_coalesced([a * 7, b * 7], 2, "0"),
            ops.reduce_scatter_tensor_coalesced([a * 8, b * 8], "sum", 2, "0"),
        ):
            out += [wait(one) for one in several]
        return out

    torch.manual_seed(rank)
    a, b = torch.randn(64, 32), torch.randn(32, 64)
    for choice in (True, False):
        compiled = as_eager(function, a, b, block=choice, bucket=False)
        assert len(compiled.records) == 9, compiled.records
        assert all(record.zero_copy for record in compiled.records), compiled.records
        assert ("wait_tensor" in compiled.code) is not choice


@check_on_four
def sums_are_the_tree_over_ranks(rank: int) -> None:
    """However they are lowered, of any size, alone or in a bucket: bit for bit NumPy's additions in that order."""
    counts = (64, 5000, 300_000)

    def inputs(of: int) -> list[torch.Tensor]:
        draw = torch.Generator().manual_seed(of)
        sizes = torch.randint(-9, 6, (max(counts),), generator=draw).float().exp2()
        return [torch.randn(count, generator=draw) * sizes[:count] for count in counts]

    def function(*several: torch.Tensor) -> list[torch.Tensor]:
        sums = [wait(ops.all_reduce(a * 2, "sum", "0")) for a in several]
        return sums + [wait(ops.reduce_scatter_tensor(a * 2, "sum", 4, "0")) for a in several]

    shares = [[(2 * a).numpy() for a in of_rank] for of_rank in zip(*map(inputs, range(4)), strict=True)]
    sums = [torch.from_numpy(combine(np.add, of_ranks)) for of_ranks in shares]
    one_by_one = torch.from_numpy(functools.reduce(np.add, shares[0]))
    assert not torch.equal(one_by_one, sums[0]), "the comparison can fail"
    for options in ({"block": True, "bucket": False}, {"block": False, "bucket": True}):
        alike(Compiled(function, *inputs(rank), **options).result, [*sums, *(whole.chunk(4)[rank] for whole in sums)])


@check
def in_place_operators(rank: int) -> None:
    def function(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        b = a @ a
        dist.all_reduce(b)
        return b, b + 1

    def on_the_input(a: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(a)
        return a + 1

    as_eager(function, torch.randn(40, 40))
    mine = torch.full((40, 40), rank + 1.0)
    alike(Compiled(on_the_input, mine).result, torch.full((40, 40), 4.0))
    alike(mine, torch.full((40, 40), 3.0))


@check
def into_given_tensors(rank: int) -> None:
    def function(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole, part = torch.empty(80, 40), torch.empty(20, 40)
        dist.all_gather_into_tensor(whole, a + 1)
        dist.reduce_scatter_tensor(part, a * 2)
        return whole, part

    as_eager(function, torch.randn(40, 40))


@check
def the_input_survives(rank: int) -> None:
    def function(a: torch.Tensor) -> tuple[torch.Tensor, ...]:
        b = a @ a
        one = functional.all_reduce(b, "sum", "0")
        two = functional.all_reduce(b, "max", "0")
        three = functional.all_reduce(a, "sum", "0")
        return b, one, two, three, one + two

    a = torch.randn(40, 40)
    before = a.clone()
    as_eager(function, a)
    alike(a, before)


@check
def the_result_may_be_changed(rank: int) -> None:
    def function(a: torch.Tensor) -> torch.Tensor:
        b = functional.all_reduce(a @ a, "sum", "0")
        b.add_(1)
        return functional.all_reduce(b, "sum", "0").mul_(2)

    as_eager(function, torch.randn(40, 40))


@check
def odd_inputs(rank: int) -> None:
    def function(a: torch.Tensor, number: torch.Tensor, nothing: torch.Tensor) -> list[torch.Tensor]:
        return [
            functional.all_reduce(a.t() * 2, "sum", "0"),
            functional.all_gather_tensor(a.t() + 1, 0, "0"),
            functional.all_gather_tensor(a, 1, "0"),
            functional.reduce_scatter_tensor(a * 2, "sum", 1, "0"),
            functional.all_reduce(a[3:5], "sum", "0"),
            functional.all_reduce(number + 1, "sum", "0"),
            functional.all_reduce(nothing * 2, "sum", "0"),
        ]

    as_eager(function, torch.randn(50, 46), torch.tensor(float(rank)), torch.empty(0, 3))


@check
def element_types(rank: int) -> None:
    for dtype in (torch.bfloat16, torch.int64, torch.bool):

        def function(a: torch.Tensor) -> list[torch.Tensor]:
            return [functional.all_reduce(a.clone(), "max", "0"), functional.all_gather_tensor(a.clone(), 0, "0")]

        as_eager(function, torch.randint(0, 2, (64, 128)).to(dtype))


@check
def backward(rank: int) -> None:
    def function(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        whole = functional.all_gather_tensor_autograd(a @ w, 0, "0")
        part = functional.reduce_scatter_tensor_autograd(whole * whole, "sum", 0, "0")
        mixed = functional.all_to_all_single_autograd(part @ w, None, None, "0")
        return wait(ops.all_reduce(mixed @ w, "sum", "0"))

    a, w = torch.randn(32, 32), torch.randn(32, 32) / 6
    compiled = torch.compile(function, fullgraph=True)
    alike(gradients(compiled, a, w), gradients(function, a, w), exact=False)


@check
def sizes_that_change(rank: int) -> None:
    def function(a: torch.Tensor) -> list[torch.Tensor]:
        return [
            functional.all_reduce(a * 2, "sum", "0"),
            functional.all_gather_tensor(a + 1, 0, "0"),
            functional.reduce_scatter_tensor(a + 2, "sum", 0, "0"),
        ]

    compiled = Compiled(function, torch.randn(64, 32), dynamic=True)
    assert {record.reason for record in compiled.records} == {"its size is symbolic"}
    with torch.compiler.set_stance("fail_on_recompile"):
        for rows in (4, 10, 4096):
            a = torch.randn(rows, 32)
            alike(compiled.function(a), function(a))


@check
def groups_of_their_own(rank: int) -> None:
    with second_group("symcomm") as other, second_group("symcomm") as third:

        def function(a: torch.Tensor) -> torch.Tensor:
            b = functional.all_reduce(a @ a, "sum", other)
            return functional.all_reduce(b @ a, "sum", third)

        compiled = as_eager(function, torch.randn(40, 40) / 6)
        assert len({record.group for record in compiled.records}) == 2


@check
def other_backends_as_before(rank: int) -> None:
    """The same graph, on a group with a name of its own and cached, is never taken for ours."""
    with second_group("gloo") as gloo:

        def function(a: torch.Tensor) -> torch.Tensor:
            return functional.all_reduce(a @ a, "sum", gloo)

        compiled = as_eager(function, torch.randn(40, 40))
        assert "symcomm" not in compiled.code and not compiled.records
