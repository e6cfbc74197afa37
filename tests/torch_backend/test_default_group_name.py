"""torch numbers its groups; people read about the default group as 'world', whoever made it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist

from symcomm import errors
from symcomm.c10d import _dump_fr_trace_json
from symcomm.memory.arena import current_arena
from symcomm.memory.flight import read_groups
from symcomm.observe.top.feed import attach
from symcomm.observe.top.model import Live
from symcomm.observe.top.snapshot import snapshot
from symcomm.symm_mem.groups import look_up
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch_versions


def _names(rank: int, world: int, place: str) -> dict[str, Any]:
    from symcomm.torch_backend.register import register

    register()
    dist.init_process_group("symcomm", init_method=f"file://{place}", rank=rank, world_size=world)
    default: Any = dist.group.WORLD
    other: Any = dist.new_group([0, 1], group_desc="pair")
    dist.all_reduce(torch.ones(1))
    told: dict[str, Any] = {
        "torch": [default.group_name, default.group_desc, other.group_name],
        "by torch's name": look_up(default.group_name) is default.core,
        "recorder": [facts["name"] for facts in read_groups(current_arena().flight.address).values()],
        "dump": "world" in _dump_fr_trace_json().decode(),
    }
    if rank == 0:
        feed = attach([os.getpid()], "job")
        live = Live(feed)
        live.refresh()
        told["top"] = sorted(group.name for group in live.groups)
        told["page"] = str(snapshot(live))
        feed.close()
    dist.barrier()
    try:
        dist.all_reduce(torch.ones(1 + rank))
    except errors.CollectiveMismatchError as error:
        told["error"] = str(error)
    try:
        dist.all_reduce(torch.ones(1 + rank), group=other)
    except errors.CollectiveMismatchError as error:
        told["error of the other"] = str(error)
    return told


def test_the_default_group_of_torch_is_called_world(tmp_path):
    for told in run_ranks(_names, 2, str(tmp_path / "store"), deadline=60):
        default, description, other = told["torch"]
        assert (default, description) == ("0", "default_pg")  # torch's own name is torch's affair
        assert told["by torch's name"] and told["dump"]
        assert told["recorder"] == ["world", other]
        assert " on group 'world'" in told["error"]
        assert f" on group '{other}'" in told["error of the other"]
        if "top" in told:
            assert told["top"] == sorted(["world", other])
            assert "'world'" in told["page"]
