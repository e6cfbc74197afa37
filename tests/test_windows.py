"""One-sided windows: values, offsets, counted signals, order, and what is said when something is wrong."""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import threading
import time

import pytest
import torch
import torch.distributed as dist

import symcomm
from symcomm import errors, symm_mem
from symcomm.c10d import PutOptions, WaitSignalOptions
from symcomm.group.buffers import torch_dtypes
from symcomm.group.default import exchange_through
from symcomm.store import FileStore
from symcomm.windows import WindowAccessType
from tests.ranks import run_ranks

START = "forkserver"  # loads torch once, not in every rank
multiprocessing.get_context(START).set_forkserver_preload(["torch.distributed", "symcomm.windows.hosts", "pytest"])
MODES = pytest.mark.parametrize("mode", ["threads", "processes"])
# Ranks of one host, as threads and as processes, and ranks on several: the same values everywhere.
PLACES = pytest.mark.parametrize("place", ["threads", "processes", (1, 1), (2, 1), (1, 1, 1)], ids=str)


def spawn(fn, world: int, place="threads", *args):
    if place == "processes":
        with tempfile.TemporaryDirectory() as folder:
            return run_ranks(_rank_main, world, f"{folder}/store", fn, args, start=START)
    hosts = list(place) if isinstance(place, tuple) else None
    return symcomm.spawn(fn, world, args, mode="threads", hosts=hosts, timeout=20, deadline=60)


def join(rank: int, world: int, path: str) -> symcomm.ProcessGroup:
    return symcomm.ProcessGroup(rank, world, exchange_through(FileStore(path, world), rank, world, 30.0), timeout=20)


def _rank_main(rank, world, path, fn, args):
    torch.set_num_threads(1)
    group = join(rank, world, path)
    try:
        return fn(group, *args)
    finally:
        group.destroy()


def world_of(place) -> int:
    return sum(place) if isinstance(place, tuple) else 3


def meet(window, group) -> None:
    """Everybody has got here: by signals alone."""
    for rank in range(group.size):
        window.signal(rank)
    for rank in range(group.size):
        window.wait_signal(rank)


# --- values ------------------------------------------------------------------------------------------------------


def everybody_puts_everywhere(group, n):
    mine = torch.full((group.size, n), -1.0)
    window = group.new_window(mine)
    for rank in range(group.size):
        window.put(torch.full((n,), 10.0 * group.rank + rank), rank, group.rank * n)
        window.signal(rank)
    for rank in range(group.size):
        window.wait_signal(rank)
        assert (mine[rank] == 10.0 * rank + group.rank).all()
    window.tensor_deregister()
    return mine[:, 0].tolist()


@PLACES
def test_everybody_puts_everywhere(place):
    world = world_of(place)
    for n in (1, 1000):
        expected = [[10.0 * source + rank for source in range(world)] for rank in range(world)]
        assert spawn(everybody_puts_everywhere, world, place, n) == expected


@pytest.mark.parametrize("world", [1, 2, 4])
def test_worlds(world):
    assert len(spawn(everybody_puts_everywhere, world, "threads", 5)) == world


def puts_that_take_several_frames(group):
    n = 1_000_000  # between hosts more than fits into the connection's buffers
    mine = torch.zeros(n, dtype=torch.int64)
    window = group.new_window(mine)
    sent = torch.arange(n) * (group.rank + 1)
    window.put(sent, 1 - group.rank)
    window.signal(1 - group.rank)
    window.wait_signal(1 - group.rank)
    assert torch.equal(mine, torch.arange(n) * (2 - group.rank))
    window.tensor_deregister()


@pytest.mark.parametrize("place", ["threads", (1, 1)], ids=str)
def test_large_puts(place):
    spawn(puts_that_take_several_frames, 2, place)


def every_dtype(group):
    peer, seen = 1 - group.rank, []
    for dtype in torch_dtypes():
        source = torch.arange(1, 7).to(dtype)
        mine = torch.zeros(9).to(dtype)
        window = group.new_window(mine)
        window.put(source, peer, 2)
        window.put(source[::2], peer, 0) if dtype is torch.float32 else None  # not contiguous
        meet(window, group)
        expected = torch.zeros(9).to(dtype)
        expected[2:8] = source
        if dtype is torch.float32:
            expected[:3] = source[::2]
        assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8)), dtype
        window.tensor_deregister()
        seen.append(dtype)
    return len(seen)


@pytest.mark.parametrize("place", ["threads", (1, 1)], ids=str)
def test_every_dtype(place):
    assert spawn(every_dtype, 2, place) == [len(torch_dtypes())] * 2


def other_sources(group):
    mine = torch.zeros(4, dtype=torch.complex64)
    window = group.new_window(mine)
    peer = 1 - group.rank
    values = torch.tensor([1 + 2j, 3 + 4j])
    window.put(values.conj(), peer, 0)  # lazily conjugated
    window.put(values.numpy(), peer, 2)  # not a tensor at all
    meet(window, group)
    assert mine.tolist() == [1 - 2j, 3 - 4j, 1 + 2j, 3 + 4j]


def test_sources_of_other_kinds():
    spawn(other_sources, 2)


def differing_shapes(group):
    mine = torch.zeros(group.rank + 1, 2, dtype=[torch.float32, torch.int16][group.rank])
    window = group.new_window(mine)
    assert [window.map_remote_tensor(r).shape for r in (0, 1)] == [(1, 2), (2, 2)]
    assert [window.map_remote_tensor(r).dtype for r in (0, 1)] == [torch.float32, torch.int16]
    window.map_remote_tensor(1 - group.rank)[0, group.rank] = 7
    meet(window, group)
    assert mine.flatten().tolist()[1 - group.rank] == 7
    empty = group.new_window(torch.zeros(0 if group.rank else 3))  # a rank that only puts
    if group.rank:
        empty.put(torch.ones(3), 0)
    empty.put(torch.ones(0), 1)
    meet(empty, group)
    assert empty.map_remote_tensor(1).shape == (0,)
    return empty.map_remote_tensor(0).tolist()


@MODES
def test_every_rank_has_its_own_shape(mode):
    assert spawn(differing_shapes, 2, mode) == [[1, 1, 1]] * 2


# --- memory ------------------------------------------------------------------------------------------------------


def homes(group):
    module = torch.nn.Linear(3, 3)
    view = module.weight.data[1]
    found = {
        "parameter": (module.weight, lambda: module.weight),
        "view": (view, lambda: module.weight[1]),
        "symmetric": (symm_mem.zeros(9), None),
        "tensor": (torch.zeros(9), None),
    }
    for name, (tensor, users) in found.items():
        before = tensor.data_ptr()
        window = group.new_window(tensor)
        assert (tensor.data_ptr() == before) == (name in ("symmetric", "view")), name  # the weight has moved with it
        window.put(torch.full((2,), 5.0), 1 - group.rank, 1)
        meet(window, group)
        assert tensor.flatten()[1:3].tolist() == [5.0, 5.0], name
        if users is not None:
            assert users().flatten()[1:3].tolist() == [5.0, 5.0], name
        window.tensor_deregister()
    assert symm_mem.is_symm_mem_tensor(module.weight)


@MODES
def test_any_dense_tensor_can_be_registered(mode):
    spawn(homes, 2, mode)


def ownership(group):
    kept = group.new_window(torch.full((4,), float(group.rank)))  # nobody else holds the tensor
    assert kept.map_remote_tensor(1 - group.rank).tolist() == [1.0 - group.rank] * 4
    mine = torch.zeros(4)
    window = group.new_window()
    window.tensor_register(mine, owning=False)
    window.put(torch.ones(4), 1 - group.rank)
    meet(window, group)
    with pytest.raises(errors.CallerError, match="does not own this rank's tensor; register it with owning=True"):
        window.map_remote_tensor(group.rank)
    view = kept.map_remote_tensor(group.rank)
    group.barrier()
    kept.tensor_deregister()
    del kept
    assert view.tolist() == [float(group.rank)] * 4  # views keep the memory
    return mine.tolist()


@MODES
def test_ownership(mode):
    assert spawn(ownership, 2, mode) == [[1.0] * 4] * 2


# --- signals -----------------------------------------------------------------------------------------------------


def counted(group):
    window = group.new_window(torch.zeros(1))
    if group.rank == 0:
        for _ in range(1000):
            window.signal(1)  # nobody takes them yet: it does not wait
        window.wait_signal(1)
        return None
    for _ in range(1000):
        window.wait_signal(0)
    with pytest.raises(
        errors.DeadlineError, match=r"wait_signal\(peer_rank=0\) on group .* timed out after 50 ms"
    ) as e:
        window.wait_signal(0, timeout=0.05)
    window.signal(0)
    return e.value.missing


@PLACES
def test_signals_are_counted(place):
    if world_of(place) == 2 or isinstance(place, str):
        assert spawn(counted, 2, place) == [None, [0]]


def in_order(group, rounds):
    mine = torch.zeros(4096, dtype=torch.int32)
    window = group.new_window(mine)
    peer = 1 - group.rank
    for i in range(1, rounds):
        window.put(torch.full((4096,), i, dtype=torch.int32), peer)
        window.signal(peer)
        window.wait_signal(peer)
        assert int(mine.min()) == int(mine.max()) == i
        window.signal(peer)  # we have looked
        window.wait_signal(peer)


@pytest.mark.parametrize("place", ["threads", "processes", (1, 1)], ids=str)
def test_whoever_takes_a_signal_sees_what_was_put_before(place):
    spawn(in_order, 2, place, 2000 if place == "processes" else 200)


def asynchronous(group):
    window = group.new_window(torch.zeros(2))
    peer = 1 - group.rank
    first, second = window.wait_signal(peer, async_op=True), window.wait_signal(peer, async_op=True)
    assert not second.is_completed() and not first.is_completed() and first.exception() is None
    with pytest.raises(errors.DeadlineError, match="waiting for wait_signal"):
        second.wait(0.05)  # it goes on
    ended = threading.Event()
    second.add_done_callback(ended.set)
    assert window.put(torch.ones(1), peer, 1, async_op=True).wait()
    assert window.signal(peer, async_op=True).is_completed()
    group.barrier()
    window.signal(peer)
    assert second.wait() and first.is_success() and second.is_success()
    assert ended.wait(10)
    late = window.wait_signal(peer, async_op=True, timeout=0.05)
    dropped = window.wait_signal(peer, async_op=True)
    with pytest.raises(errors.DeadlineError, match="timed out after 50 ms"):
        late.wait()
    group.barrier()
    window.signal(peer)
    window.signal(peer)
    window.wait_signal(peer)  # the second: the first is for the wait that came before
    with pytest.raises(errors.DeadlineError):
        window.wait_signal(peer, timeout=0.05)
    assert dropped.is_success()
    group.barrier()


@pytest.mark.parametrize("place", ["threads", "processes", (1, 1)], ids=str)
def test_asynchronous_waits_end_in_order(place):
    spawn(asynchronous, 2, place)


def options(group):
    window = group.new_window(torch.zeros(2))
    limit = WaitSignalOptions()
    limit.timeout = 0.05
    with pytest.raises(errors.DeadlineError, match="after 50 ms"):
        window.wait_signal(0, opts=limit)
    window.put(torch.ones(1), 0, 1, False, PutOptions())
    with pytest.raises(errors.BadArgumentError, match="wait_signal: timeout must be a positive number"):
        window.wait_signal(0, timeout=0)
    return window.map_remote_tensor(0).tolist()


def test_options():
    assert spawn(options, 1) == [[0.0, 1.0]]


# --- refusals ----------------------------------------------------------------------------------------------------

REFUSED = [
    (lambda w: w.put(torch.ones(3), 1, 6), "put: target_offset_nelems must be 0 to 5, since rank 1's window has 8"),
    (lambda w: w.put(torch.ones(3), 1, -1), "put: target_offset_nelems must be 0 to 5"),
    (lambda w: w.put(torch.ones(3), 1, 1 << 62), "put: target_offset_nelems must be 0 to 5"),
    (lambda w: w.put(torch.ones(3), 1, 1 << 70), "put: target_offset_nelems must be 0 to 5"),
    (lambda w: w.put(torch.ones(3), 1, 0.5), "put: target_offset_nelems must be 0 to 5"),
    (
        lambda w: w.put(torch.ones(9), 1),
        "put: tensor must be one that fits into rank 1's 8 elements, got 'a tensor of 9",
    ),
    (
        lambda w: w.put(torch.ones(1, dtype=torch.int32), 1),
        "put: tensor must be of float32, as rank 1's tensor in this",
    ),
    (lambda w: w.put([1.0], 1), "put: tensor must be a tensor"),
    (lambda w: w.put(torch.ones(1), 2), r"put: dst_rank must be in \[0, 1\]"),
    (lambda w: w.put(torch.ones(1), -1), r"put: dst_rank must be in \[0, 1\]"),
    (lambda w: w.signal(2), r"signal: peer_rank must be in \[0, 1\]"),
    (lambda w: w.wait_signal("0"), r"wait_signal: peer_rank must be in \[0, 1\]"),
    (lambda w: w.map_remote_tensor(2), r"map_remote_tensor: rank must be in \[0, 1\]"),
    (lambda w: w.get_attr(2), r"get_attr: peer_rank must be in \[0, 1\]"),
]


def refusals(group):
    mine = torch.zeros(8)
    window = group.new_window(mine)
    for call, words in REFUSED:
        with pytest.raises(errors.BadArgumentError, match=words):
            call(window)
    group.barrier()
    assert mine.count_nonzero() == 0  # nothing was written
    with pytest.raises(errors.CallerError, match="tensor_register: the window has a tensor already"):
        window.tensor_register(mine)
    window.tensor_deregister()
    for call in (lambda: window.put(torch.ones(1), 0), lambda: window.signal(0), window.tensor_deregister):
        with pytest.raises(errors.CallerError, match="the window has no tensor; call tensor_register"):
            call()
    window.tensor_register(mine)  # and again
    window.put(torch.ones(8), 1 - group.rank)
    meet(window, group)
    return mine.sum().item()


@pytest.mark.parametrize("place", ["threads", "processes", (1, 1)], ids=str)
def test_refusals_come_before_a_byte_is_written(place):
    assert spawn(refusals, 2, place) == [8.0, 8.0]


TENSORS = [
    (lambda: torch.zeros(4, 4).t(), r"a view with strides \(1, 4\)'; use .contiguous\(\) first"),
    (lambda: torch.zeros(4, 4).to_sparse(), "use .to_dense"),
    (lambda: torch.zeros(4, device="meta"), "got 'a tensor on meta'"),
    (lambda: torch.zeros(4).share_memory_(), "shared with other processes"),
    (lambda: [0.0], "got 'list'"),
]


def wrong_tensors(group):
    window = group.new_window()
    for make, words in TENSORS:
        tensor = make() if group.rank == 1 else torch.zeros(4)
        with pytest.raises(errors.CallerError, match=words) as caught:
            window.tensor_register(tensor)
        if group.rank == 0:
            assert "rank 1 could not take part" in str(caught.value)
    window.tensor_register(torch.zeros(4))  # nothing is left of it
    meet(window, group)
    with pytest.raises(errors.BadArgumentError, match=f"got 'memory of rank {1 - group.rank}'"):
        group.new_window(window.map_remote_tensor(1 - group.rank))


@MODES
def test_tensors_that_are_refused_are_refused_on_every_rank(mode):
    spawn(wrong_tensors, 2, mode)


def windows_mixed_up(group):
    windows = [group.new_window(), group.new_window()]
    with pytest.raises(errors.CollectiveMismatchError, match="the ranks mean different windows"):
        windows[group.rank].tensor_register(torch.zeros(2))
    windows[0].tensor_register(torch.zeros(2))


def test_windows_that_are_mixed_up():
    spawn(windows_mixed_up, 2)


def attributes(group):
    window = group.new_window(torch.full((2,), float(group.rank)))
    found = []
    for rank in range(group.size):
        mapped = window.get_attr(rank).access_type is WindowAccessType.UNIFIED
        assert mapped == (group.layout.host_of[rank] == group.layout.host)
        if mapped:
            assert window.map_remote_tensor(rank).tolist() == [rank, rank]
        else:
            with pytest.raises(errors.CallerError, match=f"rank {rank} is on another host, whose memory cannot be"):
                window.map_remote_tensor(rank)
        found.append(mapped)
    group.barrier()
    return found


def test_what_is_mapped_between_hosts():
    assert spawn(attributes, 3, (2, 1)) == [[True, True, False], [True, True, False], [False, False, True]]


def unseen_puts(group):
    """tensor_deregister waits for puts that no signal followed."""
    mine = torch.zeros(200_000)
    window = group.new_window(mine)
    window.put(torch.ones(200_000), 1 - group.rank)
    window.tensor_deregister()
    return mine.sum().item()


@pytest.mark.parametrize("place", ["threads", (1, 1)], ids=str)
def test_deregister_waits_for_puts(place):
    assert spawn(unseen_puts, 2, place) == [200_000.0] * 2


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
    outcomes = run_ranks(killed_during_a_wait, 2, str(tmp_path / "store"), outcomes=True, start=START)
    assert [o.kind for o in outcomes] == ["returned", "died"], outcomes[0].text


HOSTS = [0, 1, 1]  # pretended; the ranks are processes


def killed_on_another_host(rank, world, path):
    """Rank 0 waits for a signal from another host, rank 1 for one from its own."""
    os.environ["SYMCOMM_HOST_ID"] = str(HOSTS[rank])
    group = symcomm.init(store=symcomm.FileStore(path, world), rank=rank, world_size=world, timeout=20)
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
    meet(again, smaller)
    return smaller.size


def test_a_peer_that_is_killed_on_another_host_is_named(tmp_path):
    outcomes = run_ranks(killed_on_another_host, 3, str(tmp_path / "store"), outcomes=True, start=START)
    assert [o.kind for o in outcomes] == ["returned", "returned", "died"], "\n".join(map(str, outcomes))
    assert [o.value for o in outcomes[:2]] == [2, 2]


def left(group):
    window = group.new_window(torch.zeros(2))
    if group.rank == 1:
        group.destroy()
        with pytest.raises(errors.GroupUnusableError, match="was destroyed"):
            window.put(torch.ones(1), 0)
        with pytest.raises(errors.GroupUnusableError, match="was destroyed"):
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
    from symcomm.backend.register import register

    register()
    dist.init_process_group("symcomm", rank=rank, world_size=world, store=dist.FileStore(path, world))
    group = dist.group.WORLD
    assert group.supports_window
    supports, make = getattr(dist, "_supports_window", None), getattr(dist, "_new_window", None)
    if supports is not None:
        assert supports()
    mine = torch.zeros(4)
    window = make(mine) if make is not None else group.new_window(mine)
    assert isinstance(window, symcomm.Window)
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
    dist.destroy_process_group()


def _torch_options(seconds: float) -> list:
    from datetime import timedelta

    made = getattr(torch._C._distributed_c10d, "WaitSignalOptions", WaitSignalOptions)()
    made.timeout = timedelta(seconds=seconds)
    return [made]


def test_through_torch_distributed(tmp_path):
    run_ranks(through_torch, 2, str(tmp_path / "store"), start=START)


def gloo_says(rank, world, path):
    dist.init_process_group("gloo", rank=rank, world_size=world, store=dist.FileStore(path, world))
    supports = dist._supports_window()
    dist.destroy_process_group()
    return supports


@pytest.mark.skipif(not hasattr(dist, "_supports_window"), reason="torch has windows since 2.15")
def test_gloo_has_none(tmp_path):
    """When it has, compare with it here."""
    assert run_ranks(gloo_says, 1, str(tmp_path / "store")) == [False]
