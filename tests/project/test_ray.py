"""Ranks on a Ray cluster: one that is started here."""

from __future__ import annotations

import os
import signal
import time

import pytest

import symcomm.ray
from symcomm import errors

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'symcomm[ray]'")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    """Four CPUs in Ray's books, whatever this machine has; workers find our sources."""
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, object_store_memory=100 << 20, address="local")
    yield
    ray.shutdown()


def add_up(group, scale):
    import numpy as np

    import symcomm.store

    assert symcomm.default_group() is group
    values = np.full(1000, group.rank + 1, np.float32)
    group.all_reduce(values)
    met = symcomm.store.rendezvous(timeout=30)  # as a library would that knows nothing of Ray
    met.store.barrier("here", met.world_size)
    assert (met.rank, met.local_rank, met.local_world_size) == (group.rank, group.rank, group.size)
    group.barrier()  # before the store goes away with rank 0
    return group.rank, group.size, float(values[0]) * scale, os.environ["FLAVOUR"]


def test_ranks_share_memory_and_return_in_order():
    found = symcomm.ray.run(add_up, 2, (2,), deadline=60, env={"FLAVOUR": "plum"})
    assert found == [(rank, 2, 6.0, "plum") for rank in range(2)]


def fail(group, how):
    if group.rank == 1:
        if how == "raise":
            raise KeyError("no such layer")
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()


def test_what_a_rank_raises_is_what_the_caller_gets():
    with pytest.raises(KeyError, match="no such layer"):
        symcomm.ray.run(fail, 2, ("raise",), deadline=60)


def test_a_death_is_named():
    with pytest.raises(errors.RankFailedError, match=r"symcomm\.ray\.run: rank 1 died") as info:
        symcomm.ray.run(fail, 2, ("die",), deadline=60)
    assert info.value.ranks == [1]


def sleep(group):
    if group.rank == 1:
        time.sleep(600)
    return group.rank


def test_a_deadline_names_who_is_missing():
    with pytest.raises(
        errors.DeadlineError, match=r"symcomm\.ray\.run timed out after .*: rank.* did not come"
    ) as info:
        symcomm.ray.run(sleep, 2, deadline=4)
    assert 1 in info.value.missing  # and rank 0, where this machine is very busy


def test_no_room_is_said():
    words = r"no room for 9 ranks of 1 CPU each \(PACK\) within 1 s; the cluster has .* free of 4 CPU"
    with pytest.raises(errors.ResourceError, match=words):
        symcomm.ray.run(sleep, 9, start_deadline=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"n": 0}, "n must be a positive number of ranks, got 0"),
        ({"n": 1, "strategy": "LOOSE"}, "strategy must be one of PACK"),
        ({"n": 1, "num_cpus": 0}, "num_cpus must be more than 0 where num_gpus is 0"),
        ({"n": 1, "num_gpus": -1}, "num_gpus must be 0 or more"),
    ],
)
def test_mistakes_get_one_sentence(arguments, words):
    with pytest.raises(errors.BadArgumentError, match=words):
        symcomm.ray.run(sleep, **arguments)
