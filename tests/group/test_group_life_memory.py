"""What groups cost while they exist, and that nothing of it is left when they are gone."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import symcomm
from symcomm import errors, testing
from symcomm._core import native
from symcomm.collectives import all_reduce
from symcomm.collectives.plan import At, Collective, Copy, Plan, Space
from symcomm.group.leaving import free_retired, retired_count
from symcomm.group.process_group import ProcessGroup
from symcomm.memory import arena as arenas
from symcomm.types import DType, RedOpType
from tests.support.faults import join_group
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch_versions

CYCLES = 300
KIB, MIB = 1 << 10, 1 << 20


def resident(kind: str) -> int:
    """Bytes of this process's memory: RssAnon, or RssShmem for what it shares."""
    line = next(text for text in Path("/proc/self/status").read_text().splitlines() if text.startswith(kind))
    return int(line.split()[1]) * KIB


def held() -> dict[str, int]:
    """What a process may have too much of."""
    return {
        "private": resident("RssAnon"),
        "shared": resident("RssShmem"),
        "arena": arenas.current_arena().reserved_bytes,
        "used": arenas.current_arena().used_bytes,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "python threads": threading.active_count(),
        "retired": retired_count(),
    }


def _cycles(make: Any, drop: Any, settle: Any) -> dict[str, int]:
    """How much more is held after CYCLES groups than before. The collector sleeps: cycles would grow until it comes."""
    gc.collect()
    gc.disable()
    for number in range(CYCLES + 50):
        if number == 50:
            settle()
            before = held()
        group = make()
        drop(group)
        del group
    settle()
    after = held()
    return {what: after[what] - before[what] for what in before}


def check_level(grown: dict[str, int]) -> None:
    assert grown["private"] <= CYCLES * KIB  # it was 8 KiB a group and more; Gloo's take 0.1
    assert grown["shared"] <= CYCLES * KIB  # the flight recorder fills its ring
    assert grown["arena"] <= CYCLES * KIB
    assert {what: grown[what] for what in ("used", "descriptors", "threads", "python threads", "retired")} == {
        "used": 0, "descriptors": 0, "threads": 0, "python threads": 0, "retired": 0,
    }, grown  # fmt: skip


def _through_torch(rank: int, world: int, place: str) -> dict[str, int]:
    from symcomm.torch_backend.register import register

    register()
    dist.init_process_group("symcomm", init_method=f"file://{place}", rank=rank, world_size=world)

    def settle() -> None:
        dist.barrier()  # everybody has left the last one
        free_retired()

    grown = _cycles(dist.new_group, dist.destroy_process_group, settle)
    group = dist.new_group()
    mine, core = weakref.ref(group), weakref.ref(group.core)
    dist.destroy_process_group(group)
    del group
    assert mine() is None and core() is None  # not even the collector is needed
    dist.destroy_process_group()
    return grown


def test_groups_of_torch_leave_nothing(tmp_path):
    for grown in run_ranks(_through_torch, 2, str(tmp_path / "store"), deadline=120):
        check_level(grown)


def _joined(rank: int, world: int, folder: str, fn: Any) -> Any:
    group = join_group(rank, world, folder, 10.0)
    return fn(group)


def in_processes(fn: Any, folder: Path) -> list[Any]:
    return run_ranks(_joined, 2, str(folder), fn, deadline=120)


def _ours(group: ProcessGroup) -> dict[str, int]:
    def make() -> ProcessGroup:
        child = group.new_group(range(group.size))
        assert child is not None
        child.all_reduce(torch.ones(4))
        return child

    def settle() -> None:
        group.barrier()
        free_retired()

    return _cycles(make, ProcessGroup.destroy, settle)


def test_our_own_groups_leave_nothing(tmp_path):
    for grown in in_processes(_ours, tmp_path):
        check_level(grown)


def _idle(group: ProcessGroup) -> tuple[int, int, int]:
    arena = arenas.current_arena()
    before = arena.reserved_bytes
    kept = [group.new_group(range(group.size)) for _ in range(50)]
    for child in kept:
        assert child is not None
        child.barrier()
    idle = arena.reserved_bytes - before
    assert kept[0] is not None
    kept[0].all_reduce(torch.ones(1))
    small = arena.reserved_bytes - before
    kept[0].all_reduce(torch.ones(4 << 20))
    large = arena.reserved_bytes - before
    for child in kept:
        assert child is not None
        child.destroy()
    return idle, small, large


@pytest.mark.ordinary_memory("counts an arena's pages, among which tensors' would be")
def test_an_idle_group_takes_pages_not_megabytes(tmp_path):
    """Staging areas get memory with the first call that stages something, and as much as it stages."""
    for idle, small, large in in_processes(_idle, tmp_path):
        assert idle <= 50 * 32 * KIB
        assert small - idle <= 64 * KIB
        assert MIB <= large - idle <= 5 * MIB


def _no_room(group: ProcessGroup) -> str:
    child = group.new_group(range(group.size))
    assert child is not None
    child.all_reduce(torch.ones(8))
    real = arenas.check_room
    arenas.check_room = _refuse
    try:
        with pytest.raises(errors.ResourceError) as caught:
            child.all_reduce(torch.ones(4 << 20))
        child.all_reduce(torch.ones(8))  # nothing began, so the group is as good as before
    finally:
        arenas.check_room = real
    values = torch.ones(4 << 20)
    child.all_reduce(values)
    assert values.unique().tolist() == [2.0]
    return str(caught.value)


def _refuse(nbytes: int, directory: str | None = None) -> None:
    raise errors.ResourceError(f"symmetric memory: {nbytes} asked, 0 left")


def test_no_memory_to_stage_in_is_an_error_at_the_call(tmp_path):
    assert all("0 left" in text for text in in_processes(_no_room, tmp_path))


def _unreserved(group: ProcessGroup) -> int:
    child = group.new_group(range(group.size))
    assert child is not None
    plan = native.make_plan(all_reduce(child.rank, child.size, 8, DType.FLOAT32, RedOpType.SUM).encode())
    values = torch.ones(8)
    return child.handle.run(plan, (values.data_ptr(),), (values.data_ptr(),), 0, 0, ()) & 0xFF


def test_the_core_refuses_a_plan_whose_memory_is_not_reserved():
    assert symcomm.spawn(_unreserved, 2, mode="threads", deadline=60) == [6, 6]  # STATUS_PLAN


def test_a_plan_must_not_write_where_another_rank_stages():
    plan = Plan(Collective.BROADCAST, 0, 2, 8)
    plan.head = [Copy((At(Space.STAGE, 0),), At(Space.IN), 8)]
    native.make_plan(plan.encode())
    plan.head = [Copy((At(Space.STAGE, 1),), At(Space.IN), 8)]
    with pytest.raises(ValueError, match="another rank's staging area"):
        native.make_plan(plan.encode())


@testing.ranks(1, deadline=60)
def test_any_number_of_kinds_of_calls(group: ProcessGroup):
    """More kinds of calls than the core remembers, so that its table grows, and starts anew."""
    for count in [*range(1, 3300), *range(1, 50)]:
        values = torch.ones(count)
        group.all_reduce(values)
        assert values[-1].item() == group.size
