"""What torch's profiler exports about our collectives: the fields that Kineto's readers know, with the right values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from symcomm.torch_backend.register import register
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch_versions

FIELDS = {
    "Collective name", "dtype", "In msg nelems", "Out msg nelems", "In split size", "Out split size",
    "Global rank start", "Global rank stride", "Group size", "Rank", "Process Group Name",
    "Process Group Description", "Process Group Ranks", "Seq", "Is asynchronized op",
}  # fmt: skip


def profiled(rank: int, world: int, folder: str) -> list[dict]:
    register()
    dist.init_process_group("symcomm", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    alone = dist.new_group([1])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        dist.all_reduce(torch.ones(3, 2))
        dist.all_gather_into_tensor(torch.empty(8, dtype=torch.bfloat16), torch.ones(4, dtype=torch.bfloat16))
        got = [3, 3] if rank else [1, 1]
        dist.all_to_all_single(torch.empty(sum(got)), torch.ones(4), got, [1, 3])
        dist.broadcast(torch.ones(5, dtype=torch.int64), 0, async_op=True).wait()
        if rank == 0:
            dist.send(torch.ones(7), 1)
        else:
            dist.recv(torch.empty(7), 0)
            dist.all_reduce(torch.ones(2), group=alone)
        dist.barrier()
    path = Path(folder, f"trace-{rank}.json")
    profile.export_chrome_trace(str(path))
    dist.destroy_process_group()
    return [e["args"] for e in json.loads(path.read_text())["traceEvents"] if e["name"] == "symcomm_comms"]


def test_exported_trace_has_the_fields(tmp_path):
    first, second = run_ranks(profiled, 2, str(tmp_path), deadline=90)
    assert not [(e["Collective name"], FIELDS - set(e)) for e in first + second if FIELDS - set(e)]
    reduce, gather, shuffle, broadcast, message, barrier = first
    names = [event["Collective name"] for event in first]
    assert names == ["all_reduce", "all_gather_single", "all_to_all", "broadcast", "send", "barrier"], names
    assert (reduce["dtype"], reduce["In msg nelems"], reduce["Out msg nelems"]) == ("Float", 6, 6)
    assert (gather["dtype"], gather["In msg nelems"], gather["Out msg nelems"]) == ("BFloat16", 4, 8)
    assert (shuffle["In split size"], shuffle["Out split size"]) == ("[1, 3]", "[1, 1]")
    assert broadcast["dtype"] == "Long" and broadcast["Is asynchronized op"] and not reduce["Is asynchronized op"]
    assert (message["Src Rank"], message["Dst Rank"]) == (0, 1)
    assert {e["Group size"] for e in first} == {2} and {e["Process Group Ranks"] for e in first} == {"[0, 1]"}
    assert (reduce["Global rank start"], reduce["Global rank stride"], reduce["Rank"]) == (0, 1, 0)
    numbers = [e["Seq"] for e in (reduce, gather, shuffle, broadcast, barrier)]
    assert numbers == sorted(set(numbers)) and numbers[1] == numbers[0] + 1
    received, lonely = second[4], second[5]
    assert (received["Collective name"], received["Src Rank"], received["Dst Rank"]) == ("recv", 0, 1)
    assert (lonely["Group size"], lonely["Process Group Ranks"], lonely["Global rank start"]) == (1, "[1]", 1)
    assert lonely["Process Group Name"] != reduce["Process Group Name"]
