"""Ranks and hosts that go away: every survivor on every host raises, names them, and goes on without them.

Hosts are pretended (SYMCOMM_HOST_ID), the ranks are processes, and what happens to them is real.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import time

import pytest

from symcomm import errors
from tests.support.ranks import run_ranks

HOSTS = [0, 0, 1, 2, 2]


def _join(rank: int, world: int, path: str, timeout: float = 30.0):
    import symcomm

    os.environ["SYMCOMM_HOST_ID"] = str(HOSTS[rank])
    return symcomm.init(store=symcomm.FileStore(path, world), rank=rank, world_size=world, timeout=timeout)


def _sum(group) -> float:
    import torch

    x = torch.ones(100_000)
    group.all_reduce(x)
    return x[-1].item()


def _expect_failure(group, ranks: list[int]) -> str:
    begun = time.monotonic()
    with pytest.raises(errors.RankFailedError) as info:
        while True:
            _sum(group)
    assert info.value.ranks == ranks, info.value
    assert time.monotonic() - begun < 20  # the group's deadline is 30 s
    return str(info.value)


def _one_after_the_other(rank: int, world: int, path: str):
    """Rank 1 dies, then host 2, then rank 2; the others go on each time."""
    said = []
    group = _join(rank, world, path)
    said.append(_sum(group))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said.append(_expect_failure(group, [1]))
    group = group.shrink()
    said.append((_sum(group), group.global_ranks, group.spans_hosts))
    if rank in (3, 4):
        os.kill(os.getpid(), signal.SIGKILL)
    said.append(_expect_failure(group, [2, 3]))
    group = group.shrink()
    said.append((_sum(group), group.global_ranks, group.spans_hosts))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    said.append(_expect_failure(group, [1]))
    group = group.shrink()
    said.append((_sum(group), group.global_ranks, group.spans_hosts))
    return said


def test_a_rank_then_a_host_then_another(tmp_path):
    outcomes = run_ranks(_one_after_the_other, 5, str(tmp_path / "store"), deadline=100, outcomes=True)
    assert [o.kind for o in outcomes] == ["returned", "died", "died", "died", "died"], "\n".join(map(str, outcomes))
    said = outcomes[0].value
    assert said[0] == 5.0 and said[2] == (4.0, [0, 2, 3, 4], True)
    assert "rank 1 (pid " in said[1] and ") died" in said[1] and "Survivors: 0, 2-4." in said[1]
    assert "host 2 (" in said[3] and "with ranks 2, 3 cannot be reached any more" in said[3]
    assert said[4] == (2.0, [0, 2], True)
    assert said[6] == (1.0, [0], False)


def _leaves(rank: int, world: int, path: str):
    """Rank 2 leaves while others wait for it; a message to it and one from it fail alike."""
    import torch

    group = _join(rank, world, path)
    _sum(group)
    child = os.fork()  # which is not the rank: its end must not reach the others
    if child == 0:
        with contextlib.suppress(errors.GroupUnusableError):
            group.barrier()
        atexit._run_exitfuncs()
        os._exit(0)
    os.waitpid(child, 0)
    _sum(group)
    if rank == 2:
        group.destroy()
        return "left"
    with pytest.raises(errors.RankFailedError) as info:
        group.recv(torch.empty(1), 2) if rank == 0 else group.barrier()
    return info.value.ranks, "rank 2" in str(info.value)


def test_a_rank_that_leaves_is_named(tmp_path):
    assert run_ranks(_leaves, 3, str(tmp_path / "store"), deadline=60) == [
        ([2], True),
        ([2], True),
        "left",
    ]
