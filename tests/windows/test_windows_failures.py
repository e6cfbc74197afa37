"""Windows when a peer dies, leaves or aborts; and windows of torch.distributed's groups."""

from __future__ import annotations

import gc
import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

import symcomm
from symcomm import errors
from symcomm.c10d import WaitSignalOptions
from symcomm.windows import WindowAccessType
from tests.support.faults import join_group
from tests.support.places import join, spawn, sync
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch_versions

# --- failures ----------------------------------------------------------------------------------------------------


def killed_during_a_wait(rank, world, path):
    group = join(rank, world, path)
    window = group.new_window(torch.zeros(2))
    if rank == 1:
        window.signal(0)  # counts, though its sender dies
        group.barrier()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()
    window.wait_signal(1)
    with pytest.raises(
        errors.RankFailedError, match=r"wait_signal\(peer_rank=1\) on group .* rank 1 \(pid .* died"
    ) as e:
        window.wait_signal(1)
    assert e.value.ranks == [1]
    for call in (lambda: window.put(torch.ones(1), 1), lambda: window.signal(1), lambda: window.wait_signal(1)):
        with pytest.raises(errors.RankFailedError, match=r"rank 1 \(pid \d+\) died"):
            call()
    window.put(torch.ones(1), 0)  # the others go on
    window.signal(0)
    window.wait_signal(0)
    with pytest.raises(errors.RankFailedError):
        window.tensor_deregister()
    with pytest.raises(errors.CallerError, match="the window has no tensor"):
        window.put(torch.ones(1), 0)
    return "survived"


def test_a_peer_that_is_killed_during_a_wait_is_named(tmp_path):
    outcomes = run_ranks(killed_during_a_wait, 2, str(tmp_path / "store"), outcomes=True)
    assert [o.kind for o in outcomes] == ["returned", "died"], outcomes[0].text


HOSTS = [0, 1, 1]  # pretended; the ranks are processes


def killed_on_another_host(rank, world, path):
    """Rank 0 waits for a signal from another host, rank 1 for one from its own."""
    os.environ["SYMCOMM_HOST_ID"] = str(HOSTS[rank])
    group = join(rank, world, path)
    window = group.new_window(torch.zeros(2))
    if rank == 2:
        window.signal(0)
        window.signal(1)
        group.barrier()
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    group.barrier()
    window.wait_signal(2)
    with pytest.raises(errors.RankFailedError, match=r"rank 2 \(pid \d+\) died") as caught:
        window.wait_signal(2)
    assert caught.value.ranks == [2]
    with pytest.raises(errors.GroupUnusableError):
        window.put(torch.ones(1), 2)
    smaller = group.shrink()
    again = smaller.new_window(torch.zeros(2))
    sync(again, smaller)
    return smaller.size


def test_a_peer_that_is_killed_on_another_host_is_named(tmp_path):
    outcomes = run_ranks(killed_on_another_host, 3, str(tmp_path / "store"), outcomes=True)
    assert [o.kind for o in outcomes] == ["returned", "returned", "died"], "\n".join(map(str, outcomes))
    assert [o.value for o in outcomes[:2]] == [2, 2]


def left(group):
    window = group.new_window(torch.zeros(2))
    if group.rank == 1:
        signal = window.wait_signal(0, async_op=True)
        group.destroy()
        with pytest.raises(errors.GroupUnusableError):  # nobody sent it
            signal.wait()
        assert signal.is_completed() and not signal.is_success()
        with pytest.raises(errors.GroupUnusableError, match="was destroyed"):
            window.put(torch.ones(1), 0)
        with pytest.raises(errors.GroupUnusableError, match="was destroyed"):
            window.signal(0)
        with pytest.raises(errors.GroupUnusableError, match="was destroyed"):
            window.tensor_deregister()
        with pytest.raises(errors.CallerError, match="the window has no tensor"):
            window.signal(0)
        return "left"
    with pytest.raises(errors.RankFailedError, match=r"rank 1 \(pid \d+\) left the group") as caught:
        window.wait_signal(1)
    return caught.value.ranks


@pytest.mark.parametrize("place", ["threads", (1, 1)], ids=str)
def test_a_peer_that_leaves_is_named(place):
    assert spawn(left, 2, place) == [[1], "left"]


def aborted(group):
    window = group.new_window(torch.zeros(2))
    if group.rank == 1:
        time.sleep(0.2)
        group.abort()
        return
    with pytest.raises(errors.GroupUnusableError, match="aborted"):
        window.wait_signal(1)
    with pytest.raises(errors.GroupUnusableError):
        window.put(torch.ones(1), 1)


@pytest.mark.parametrize("place", ["threads", (1, 1)], ids=str)
def test_abort_ends_waits(place):
    spawn(aborted, 2, place)


# --- torch.distributed -------------------------------------------------------------------------------------------


def through_torch(rank, world, path):
    from symcomm.torch_backend.register import register

    register()
    dist.init_process_group("symcomm", rank=rank, world_size=world, store=dist.FileStore(path, world))
    group = dist.group.WORLD
    assert group.supports_window
    supports, make = getattr(dist, "_supports_window", None), getattr(dist, "_new_window", None)
    if supports is not None:
        assert supports()
    mine, seen = torch.zeros(4), []
    group.register_pre_hook(7, lambda args: seen.append(args.name.name))
    window = make(mine) if make is not None else group.new_window(mine)
    group.unregister_pre_hook(7)
    assert isinstance(window, symcomm.Window) and seen == ["NEW_WINDOW"]
    peer = 1 - rank
    works = [window.put(torch.ones(2), peer, 1, True), window.signal(peer, False)]
    pending = window.wait_signal(peer, True)
    assert pending.get_future().wait() == [] and pending.wait()
    assert all(isinstance(work, dist.Work) and work.wait() for work in (*works, pending))
    assert mine.tolist() == [0, 1, 1, 0]
    kinds = getattr(torch._C._distributed_c10d, "WindowAccessType", WindowAccessType)
    assert window.get_attr(peer).access_type == kinds.UNIFIED
    failing = window.wait_signal(peer, True, *_torch_options(0.05))
    with pytest.raises(errors.DeadlineError, match="timed out after 50 ms"):
        failing.wait()
    with pytest.raises(RuntimeError):
        failing.get_future().wait()
    dist.barrier()
    window.tensor_deregister()
    allocated = group.allocate_tensor(4, dtype=torch.float32)
    address = allocated.data_ptr()
    window.tensor_register(allocated)
    assert allocated.data_ptr() == address  # peers can map it where it is
    window.put(torch.full((4,), 3.0), peer)
    sync(window, window.group)
    assert allocated.tolist() == [3.0] * 4
    window.tensor_deregister()
    dist.destroy_process_group()


def _torch_options(seconds: float) -> list:
    made = getattr(torch._C._distributed_c10d, "WaitSignalOptions", WaitSignalOptions)()
    made.timeout = timedelta(seconds=seconds)
    return [made]


def test_through_torch_distributed(tmp_path):
    run_ranks(through_torch, 2, str(tmp_path / "store"))


def gloo_says(rank, world, path):
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(path, world))
    supports = dist._supports_window()
    dist.destroy_process_group()
    return supports


@pytest.mark.skipif(not hasattr(dist, "_supports_window"), reason="torch has windows since 2.15")
def test_gloo_has_none(tmp_path):
    """When it has, compare with it here."""
    assert run_ranks(gloo_says, 1, str(tmp_path / "store")) == [False]


# --- memory that was given back ------------------------------------------------------------------------------------

PUT = 64 << 20  # elements, so that a put takes long enough to be stopped in the middle


def stopped_in_a_put(rank, world, folder, way):
    """Rank 1 is stopped in the middle of a put; rank 0 leaves, allocates anew, and lets it go on."""
    group = join_group(rank, world, folder, 20.0)
    place = symcomm.symm_mem.empty(PUT).zero_()
    window = group.new_window(place)
    group.barrier()
    if rank == 1:
        try:
            window.put(torch.ones(PUT), 0)
        except errors.SymcommError as error:
            return str(error)
        finally:
            open(f"{folder}/put", "w").close()
        return "nothing"
    pid, seen = group.peers[1].pid, place[:1].numpy()
    while not seen[0]:
        pass
    os.kill(pid, signal.SIGSTOP)
    assert not place[-1], "the put was over before it could be stopped"
    if way == "fails":
        with pytest.raises(errors.DeadlineError):
            group.barrier(timeout=0.2)
        with pytest.raises(errors.SymcommError):
            window.tensor_deregister()
    if way != "is forgotten":
        group.destroy()
    del group, window, place, seen
    gc.collect()
    fresh = [symcomm.symm_mem.empty(PUT).fill_(7.0) for _ in range(2)]
    os.kill(pid, signal.SIGCONT)
    while not os.path.exists(f"{folder}/put"):
        time.sleep(0.001)
    return [bool((t == 7.0).all()) for t in fresh]


@pytest.mark.parametrize("way", ["leaves", "fails", "is forgotten"])
def test_a_put_into_a_window_that_is_gone_reaches_nothing_else(tmp_path, way):
    outcomes = run_ranks(stopped_in_a_put, 2, str(tmp_path), way, outcomes=True)
    assert [o.kind for o in outcomes] == ["returned", "returned"], "\n".join(map(str, outcomes))
    assert outcomes[0].value == [True, True]
    assert (
        "put(dst_rank=0)" in outcomes[1].value and "rank 0" in outcomes[1].value
    )  # it is told that it came to nothing
