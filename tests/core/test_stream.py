"""Copies with non-temporal stores (`_core/memory/nontemporal.c`): the same bytes, whatever their size and address."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from symcomm._core import native

pytest.importorskip("torch", reason="values are compared with torch's")


def run(*command: str) -> str:
    env = {**os.environ, "SYMCOMM_STREAM_BYTES": "0"}
    done = subprocess.run([sys.executable, *command], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("wrong", ["many", "-1", "12 MiB", "9" * 30])
def test_a_threshold_that_is_no_number_is_refused(wrong: str):
    environment = {**os.environ, "SYMCOMM_STREAM_BYTES": wrong}
    command = [sys.executable, "-c", "import symcomm._core._native"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)
    words = f"ValueError: SYMCOMM_STREAM_BYTES must be a number of bytes such as 33554432, got '{wrong}'."
    assert done.stderr.splitlines()[-1] == words


EDGES = """
import torch, symcomm
from symcomm import symm_mem

def check(group):
    source, target = (symm_mem.empty(1 << 17, dtype=torch.uint8) for _ in range(2))
    source.copy_(torch.arange(1 << 17) * 31 % 251)
    wrong = 0
    for size in (4096, 16384, 16384 + 64, 5 * 16384 - 1, 6 * 16384 + 4097):  # pages are copied four at a time
        for start in (0, 1, 63, 64):
            given, got = source[start : start + size], target[3 * start : 3 * start + size]
            target.fill_(255)
            got.copy_(given if group.rank == 0 else 0 * given)
            group.broadcast(got, 0)
            wrong += not torch.equal(got, given) or int((target == 255).sum()) != len(target) - size
    return wrong

print(symcomm.spawn(check, 2, mode="threads", deadline=60))
"""


WAYS = """
import torch, symcomm
from symcomm.collectives.limits import Limits
from symcomm.group.factory import make_group
from symcomm.observe.recorder import records

world = symcomm.init()
for most in (2, 1):
    limits = Limits(
        attach_bytes=1, attach_gather_bytes=1, attach_scatter_bytes=1, attach_ranks=2, attach_large_ranks=most
    )
    group = make_group(world.rank, 2, world.all_gather_bytes, "lent", limits=limits)
    group.barrier()
    pair, one = torch.arange(1 << 15) + group.rank, torch.empty(1 << 14, dtype=torch.int64)
    got = [torch.empty_like(pair) for _ in range(2)]
    group.scatter(one, list(pair.chunk(2)) if group.rank == 0 else None, 0)
    group.all_to_all_single(got[0], pair)
    group.all_gather_single(got[1], pair[: 1 << 14])
    first = torch.arange(1 << 14)
    mine = first + (group.rank << 14)
    assert torch.equal(one, mine)
    assert torch.equal(got[0], torch.cat([mine, mine + 1])) and torch.equal(got[1], torch.cat([first, first + 1]))
    print(*(op.plan for op in records.operations_of(group)[group.rank][-3:]))
"""


def test_what_the_cache_does_not_hold_is_not_read_by_system_call_where_that_takes_longer(tmp_path: Path):
    """The kernel has no such stores. A scatter's root, who would copy everything, lends its tensors all the same."""
    file = tmp_path / "ways.py"
    file.write_text(WAYS)
    lines = run("-m", "symcomm", "run", "-n", "2", "--no-prefix", str(file)).splitlines()
    assert sorted(lines) == ["attached attached streamed"] * 2 + ["attached streamed streamed"] * 2


MEASURED = """
from symcomm.bench import attach
attach.SIZES = (1 << 14,)
rows = attach.run_attach_bench(attach.AttachWorkload(attach.FEWEST, rounds=1, seconds=0.001))
print([row.call for row in rows], attach.thresholds(rows)[1] == attach.NO_BYTES)
"""


def test_nor_is_it_measured_by_bench_attach():
    assert run("-c", MEASURED) == "['all_to_all', 'scatter'] True\n"


def test_every_edge_of_a_block():
    assert run("-c", EDGES) == "[0, 0]\n"


NARROWER = "avx2" if "avx2" in native.reduce_sets()[0] else ""  # than the widest stores that this CPU has


@pytest.mark.parametrize(("ranks", "kernels"), [("2", ""), ("3", NARROWER)])
def test_every_collective_and_messages(ranks: str, kernels: str, monkeypatch: pytest.MonkeyPatch):
    """Before it measures, a benchmark compares every element."""
    monkeypatch.setenv("SYMCOMM_KERNELS", kernels)
    sizes = ("-b", "12", "-e", "3M", "-f", "64")
    said = run("-m", "symcomm", "bench", "all", *sizes, "--ranks", ranks, "--rounds", "1", "-n", "1", "-w", "1")
    assert "# wrong elements: 0" in said
    assert said.count("all_to_all") >= 1 and said.count("p2p") >= 1, said
