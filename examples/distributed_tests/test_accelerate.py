"""What accelerate's script of tests for its operations checks, as tests of pytest: no launcher and no ports.

pip install 'symcomm[testing]' accelerate
pytest examples/distributed_tests
BACKEND=gloo pytest examples/distributed_tests
"""

import os

import pytest
import torch
import torch.distributed as dist

from symcomm import testing

accelerate = pytest.importorskip("accelerate")
from accelerate.utils import operations  # noqa: E402

ranks = testing.ranks([2, 4], mode="processes", backend=os.environ.get("BACKEND", "symcomm"))


def own() -> torch.Tensor:
    """Two elements a rank: 1 and 2, 3 and 4, and so on."""
    state = accelerate.PartialState(cpu=True)
    assert (state.process_index, state.num_processes) == (dist.get_rank(), dist.get_world_size())
    return torch.arange(2.0) + 2 * state.process_index + 1


def everybodys() -> list[float]:
    return [i + 1.0 for i in range(2 * dist.get_world_size())]


@ranks
def test_gather(group):
    assert operations.gather(own()).tolist() == everybodys()


@ranks
def test_gather_of_a_dictionary(group):
    found = operations.gather({"a": own(), "b": [own() * 10]})
    assert found["a"].tolist() == everybodys() and found["b"][0].tolist() == [10 * x for x in everybodys()]


@ranks
def test_gather_of_columns(group):
    rows = own().reshape(1, 2).expand(3, 2).t()  # not contiguous
    assert operations.gather(rows).tolist() == [[x] * 3 for x in everybodys()]


@ranks
def test_gather_of_objects(group):
    mine = [{"rank": dist.get_rank()}] * (1 + dist.get_rank())
    own()
    expected = [{"rank": r} for r in range(dist.get_world_size()) for _ in range(1 + r)]
    assert operations.gather_object(mine) == expected


@ranks
def test_broadcast(group):
    last = dist.get_world_size() - 1
    assert operations.broadcast(own(), from_process=last).tolist() == everybodys()[-2:]


@ranks
def test_padding_to_the_longest(group):
    own()
    mine = torch.ones(2, 1 + dist.get_rank())
    padded = operations.pad_across_processes(mine, dim=1, pad_index=-1)
    assert padded.shape == (2, dist.get_world_size())
    assert padded[:, : 1 + dist.get_rank()].eq(1).all() and padded[:, 1 + dist.get_rank() :].eq(-1).all()


@ranks
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_reduce(group, reduction):
    n = dist.get_world_size()
    sums = torch.tensor([float(sum(range(1, 2 * n, 2))), float(sum(range(2, 2 * n + 1, 2)))])
    found = operations.reduce(own(), reduction)
    torch.testing.assert_close(found, sums / n if reduction == "mean" else sums)


@ranks
def test_shapes_that_differ_are_refused(group, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DEBUG_MODE", "1")
    own()
    with pytest.raises(operations.DistributedOperationException):
        operations.gather(torch.ones(1 + dist.get_rank()))
