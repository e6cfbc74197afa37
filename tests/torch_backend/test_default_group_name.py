"""torch numbers its groups; people read about the default group as 'world', whoever made it."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as torch_c10d
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


def _described(rank: int, world: int, place: str, backend: str) -> list[str]:
    """What a dump says of each operation's group besides its name."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = "100"  # or torch records nothing
    dist.init_process_group(backend, init_method=f"file://{place}", rank=rank, world_size=world)
    groups = [None, dist.new_group([0, 1], group_desc="pair"), dist.new_group([0, 1])]
    groups += [dist.new_group([0, 1], group_desc="many words " * 60)]
    for group in groups:
        dist.all_reduce(torch.ones(1), group=group)
    dump = _dump_fr_trace_json if backend == "symcomm" else torch_c10d._dump_fr_trace_json
    entries = json.loads(dump())["entries"][-len(groups) :]
    dist.barrier()
    dist.destroy_process_group()
    return [entry["process_group"][1] for entry in entries]


def test_dumps_say_of_groups_what_those_of_gloo_say(tmp_path):
    ours, theirs = (
        run_ranks(_described, 2, str(tmp_path / backend), backend, deadline=60)[0] for backend in ("symcomm", "gloo")
    )
    assert theirs[:3] == ["default_pg", "pair", "undefined"] and ours[:3] == theirs[:3]
    assert ours[3] == "undefined"  # a recorder has little room for each group
