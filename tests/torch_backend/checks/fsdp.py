"""FSDP2 on our groups: its buffers are symmetric, without a call of ours in the program."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from symcomm import errors
from symcomm.memory.shared_heap import heap_stats
from symcomm.observe.recorder.records import Operation, operations_of
from tests.torch_backend.checks import check, equal, joined

WIDTH = 512  # a layer's buffers are large enough to be symmetric, also with two bytes a number
STEPS = 3


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def _sharded(group: Any, **options: Any) -> nn.Sequential:
    mesh = dist.DeviceMesh.from_group(group, "cpu", mesh_dim_names=(group.group_name,))
    model = _model()
    for layer in model:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def _train(model: nn.Sequential, rank: int, accumulate: int = 1) -> list[torch.Tensor]:
    """This rank's shards after a few steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    draw = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        for turn in range(accumulate):
            model.set_requires_gradient_sync(turn == accumulate - 1)
            model(torch.randn(8, WIDTH, generator=draw)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.to_local().detach().clone() for p in model.parameters()]


def _new_operations(group: Any, since: int) -> list[Operation]:
    own = operations_of(group.core)[group.core.rank]
    calls = ("all_gather", "reduce_scatter")
    return [op for op in own if op.number > since and op.group == group.core.name and op.call in calls]


def _last(group: Any) -> int:
    return max((op.number for op in operations_of(group.core)[group.core.rank]), default=0)


def _trained(ours: Any, gloo: Any, rank: int, accumulate: int = 1, **options: Any) -> list[Operation]:
    """Train on both; the values must be the same. Returns what the recorder has of ours."""
    since = _last(ours)
    mine = _train(_sharded(ours, **options), rank, accumulate)
    expected = _train(_sharded(gloo, **options), rank, accumulate)
    torch.testing.assert_close(mine, expected, rtol=1e-6, atol=1e-7)
    return _new_operations(ours, since)


def _used(group: Any) -> int:
    gc.collect()
    return group.core.arena.used_bytes


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "not resharded": {"reshard_after_forward": False},
    "accumulated": {"accumulate": 3},
}


@check
def fsdp_is_direct_by_itself(rank: int, path: str) -> None:
    with joined(rank, path) as ours:
        gloo = dist.new_group(backend="gloo")
        before = None
        for name, options in VARIANTS.items():
            operations = _trained(ours, gloo, rank, **options)
            gathers = sum(op.call == "all_gather" for op in operations)
            assert gathers and len(operations) > gathers, (name, operations)
            ordinary = [str(op) for op in operations if not op.zero_copy]
            assert not ordinary, f"{name}: {ordinary}"
            left = _used(ours)  # what is left of the first is the group's own
            assert before is None or left <= before, f"{name} keeps {left - before} bytes"
            before = left


@check
def several_fsdp_roots_are_direct(rank: int, path: str) -> None:
    """Two models at once, one of them on another group; their buffers come and go between each other's."""
    with joined(rank, path) as ours:
        other, gloo = dist.new_group(), dist.new_group(backend="gloo")
        wanted = _train(_sharded(gloo), rank)

        def both() -> None:
            since, models = _last(ours), [_sharded(ours), _sharded(other)]
            for group, model in zip((ours, other), models, strict=True):
                torch.testing.assert_close(_train(model, rank), wanted, rtol=1e-6, atol=1e-7)
                operations = _new_operations(group, since)
                assert operations and all(op.zero_copy for op in operations)

        both()
        used = _used(ours)
        both()
        assert _used(ours) == used, "or models leave buffers behind"


def _has_heap() -> bool:
    """With the shared heap, ordinary tensors are symmetric, too."""
    return not heap_stats().why_not


def _is_ordinary(ours: Any, rank: int, prepare: Callable[[Sequence[Any]], None]) -> None:
    since, model = _last(ours), _sharded(ours)
    prepare([*model, model])
    _train(model, rank)
    operations = _new_operations(ours, since)
    assert operations and any(op.zero_copy for op in operations) == _has_heap()


@check
def who_chooses_fsdp_buffers_has_them(rank: int, path: str) -> None:
    """torch's own switches work as on other groups, and where there is no room, or nothing to gain, nothing changes."""
    with joined(rank, path) as ours:

        def switch(modules: Sequence[Any], enable: bool) -> None:
            for module in modules:
                module.set_allocate_memory_from_process_group_for_comm(enable)

        _is_ordinary(ours, rank, functools.partial(switch, enable=False))
        with mock.patch.object(type(ours), "allocate_tensor", side_effect=errors.ResourceError("full")) as full:
            _is_ordinary(ours, rank, lambda modules: None)
            assert full.called
        since, model = _last(ours), _sharded(ours)
        switch([*model, model], True)
        _train(model, rank)
        assert all(op.zero_copy for op in _new_operations(ours, since))
        comm = _sharded(ours)[0]._get_fsdp_state()._fsdp_param_group._all_gather_comm
        as_asked = {"dtype": torch.float32, "device": torch.device("cpu")}
        with FakeTensorMode():
            assert isinstance(comm.allocate((1 << 20,), **as_asked), FakeTensor)
        arena = ours.core.arena
        small, large = comm.allocate((16,), **as_asked), comm.allocate((1 << 20,), **as_asked)
        inside = [arena.base <= t.data_ptr() < arena.base + arena.nbytes for t in (small, large)]
        equal(inside, [False, True])
        assert small.shape == (16,) and large.shape == (1 << 20,)
