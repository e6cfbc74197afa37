"""One-sided windows: values, offsets, counted signals, order, and what is refused."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from symcomm import errors, symm_mem
from symcomm.c10d import PutOptions, WaitSignalOptions
from symcomm.group.buffers import torch_dtypes
from symcomm.torch_versions import release
from symcomm.windows import WindowAccessType
from tests.support.places import spawn, sync

pytestmark = pytest.mark.torch_versions

MODES = pytest.mark.parametrize("mode", ["threads", "processes"])
# Ranks of one host, as threads and as processes, and ranks on several: the same values everywhere.
PLACES = pytest.mark.parametrize("place", ["threads", "processes", (1, 1), (2, 1), (1, 1, 1)], ids=str)


def world_of(place) -> int:
    return sum(place) if isinstance(place, tuple) else 3


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
        sync(window, group)
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
    sync(window, group)
    assert mine.tolist() == [1 - 2j, 3 - 4j, 1 + 2j, 3 + 4j]


def test_sources_of_other_kinds():
    spawn(other_sources, 2)


def differing_shapes(group):
    mine = torch.zeros(group.rank + 1, 2, dtype=[torch.float32, torch.int16][group.rank])
    window = group.new_window(mine)
    assert [window.map_remote_tensor(r).shape for r in (0, 1)] == [(1, 2), (2, 2)]
    assert [window.map_remote_tensor(r).dtype for r in (0, 1)] == [torch.float32, torch.int16]
    window.map_remote_tensor(1 - group.rank)[0, group.rank] = 7
    sync(window, group)
    assert mine.flatten().tolist()[1 - group.rank] == 7
    empty = group.new_window(torch.zeros(0 if group.rank else 3))  # a rank that only puts
    if group.rank:
        empty.put(torch.ones(3), 0)
    empty.put(torch.ones(0), 1)
    sync(empty, group)
    assert empty.map_remote_tensor(1).shape == (0,)
    return empty.map_remote_tensor(0).tolist()


@MODES
def test_every_rank_has_its_own_shape(mode):
    assert spawn(differing_shapes, 2, mode) == [[1, 1, 1]] * 2


# --- memory ------------------------------------------------------------------------------------------------------


FOLLOWS = release(torch.__version__) >= (2, 12)  # before that, views made earlier do not follow their storage


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
        stays = ("symmetric", "view") if FOLLOWS else ("symmetric",)  # the view has moved with the weight
        assert (tensor.data_ptr() == before) == (name in stays), name
        window.put(torch.full((2,), 5.0), 1 - group.rank, 1)
        sync(window, group)
        assert tensor.flatten()[1:3].tolist() == [5.0, 5.0], name
        if users is not None and (FOLLOWS or name != "view"):
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
    sync(window, group)
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


def dropped(group):
    window = group.new_window(torch.zeros(1000))
    group.barrier()
    if group.rank == 1:
        del window  # without a word to the others
        gc.collect()
        others = [symm_mem.zeros(1000) for _ in range(20)]
    group.barrier()
    if group.rank == 0:
        window.put(torch.ones(1000), 1)
        window.signal(1)
    group.barrier()
    return sum(t.sum().item() for t in others) if group.rank == 1 else 0.0


@MODES
def test_memory_of_a_dropped_window_is_not_given_to_others(mode):
    assert spawn(dropped, 2, mode) == [0.0, 0.0]


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


def many_waits(group):
    """They end in order, however many there are, and none of them is lost when the window is registered anew."""
    window = group.new_window(torch.zeros(1))
    works = [window.wait_signal(1 - group.rank, async_op=True) for _ in range(3000)]
    for _ in works:
        window.signal(1 - group.rank)
    assert works[-1].wait() and all(work.is_success() for work in works)
    window.signal(1 - group.rank)
    window.tensor_deregister()
    window.tensor_register(torch.zeros(1))
    with pytest.raises(errors.DeadlineError):
        window.wait_signal(1 - group.rank, timeout=0.05)  # that was the old one's
    group.barrier()


@pytest.mark.parametrize("place", ["threads", (1, 1)], ids=str)
def test_many_waits(place):
    spawn(many_waits, 2, place)


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
    sync(window, group)
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
    sync(window, group)
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


# --- hooks -------------------------------------------------------------------------------------------------------


def hooked(group):
    seen = []
    group.register_pre_hook(1, lambda args: seen.append((args.name.name, len(args.input_tensors), args.async_op)))
    window = group.new_window(torch.zeros(2))
    group.unregister_pre_hook(1)
    sync(window, group)
    return seen


@pytest.mark.parametrize("place", ["threads", (1, 1)], ids=str)
def test_hooks_see_one_call(place):
    assert spawn(hooked, 2, place) == [[("NEW_WINDOW", 1, False)]] * 2
