"""Collectives as torch's operators: eager and compiled, in place and not, with fake kernels and no graph break."""

from __future__ import annotations

import importlib

import pytest

torch = pytest.importorskip("torch", reason="operators are torch's")
dist = importlib.import_module("torch.distributed")
symcomm = importlib.import_module("symcomm")
operators = importlib.import_module("symcomm.integrations.operators")
from tests.support.children import children  # noqa: E402

pytestmark = pytest.mark.torch_versions


def rank_of_two(say, rank: int, folder: str, function) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("symcomm", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    operators.announce("pair", symcomm.of(dist.group.WORLD))
    say(function(rank))
    dist.barrier()
    dist.destroy_process_group()


def on_two_ranks(folder, function) -> list:
    with children() as start:
        ranks = [start(rank_of_two, rank, str(folder), function) for rank in range(2)]
        return [child.hear(90) for child in ranks]


def every_operator(x: torch.Tensor) -> list[torch.Tensor]:
    ops = torch.ops.symcomm
    changed = x + 1
    ops.all_reduce_(changed, "pair")
    return [
        changed,
        ops.all_reduce(x * 2, "pair"),
        ops.all_gather(x, 2, "pair"),
        ops.reduce_scatter(x, 2, "pair"),
        ops.all_to_all(x, "pair"),
    ]


def expected(rank: int) -> list[list[float]]:
    both = [[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]]
    total = [a + b for a, b in zip(*both, strict=True)]
    half = slice(2 * rank, 2 * rank + 2)
    return [
        [t + 2 for t in total],
        [2 * t for t in total],
        both[0] + both[1],
        total[half],
        both[0][half] + both[1][half],
    ]


def values(rank: int) -> list[list[float]]:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]) * (10 if rank else 1)
    return [each.tolist() for each in every_operator(x)] + [x.tolist()]


def compiled(rank: int) -> list[list[float]]:
    x = torch.tensor([1.0, 2.0, 3.0, 4.0]) * (10 if rank else 1)
    run = torch.compile(every_operator, backend="aot_eager", fullgraph=True)
    with torch._dynamo.config.patch(optimize_ddp=False):  # of use to DDP only, of which earlier tests may leave traces
        return [each.tolist() for each in run(x)] + [x.tolist()]


@pytest.mark.parametrize("run", [values, compiled])
def test_values(run, tmp_path):
    for rank, got in enumerate(on_two_ranks(tmp_path, run)):
        own = [[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0]][rank]
        assert got == [*expected(rank), own]  # the input is as it was


def test_traced_shapes_are_those_of_values():
    with torch._subclasses.FakeTensorMode():
        x = torch.empty(4, 3)
        shapes = [tuple(each.shape) for each in every_operator(x)]
    assert shapes == [(4, 3), (4, 3), (8, 3), (2, 3), (4, 3)]


def test_a_group_that_nobody_announced_is_named():
    with pytest.raises(symcomm.errors.BadArgumentError, match="symcomm::all_reduce: group must be one of"):
        torch.ops.symcomm.all_reduce(torch.ones(2), "nobody's")
