"""Groups across hosts compute what torch computes, whatever the hosts: threads as ranks, pretended hosts, real Gloo."""

from __future__ import annotations

import functools
import re
import threading

import pytest
import torch

import symcomm
from symcomm import errors
from symcomm._core import native
from symcomm.group.buffers import torch_dtypes
from symcomm.hierarchical import pipelined
from symcomm.hierarchical import topology as layout
from symcomm.hierarchical.topology import EAGER_HOST_MAX, Layout, fits_eager, split_evenly
from symcomm.types import DType, RedOpType

LAYOUTS = [[2, 2], [1, 1, 1], [1, 3], [3, 1, 2]]
ids = ["+".join(map(str, hosts)) for hosts in LAYOUTS]


def run(fn, hosts, *args, **kwargs):
    return symcomm.spawn(fn, sum(hosts), args, mode="threads", hosts=hosts, deadline=60, **kwargs)


def values(rank: int, count: int, dtype=torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(-4, 5, (count,), generator=generator).to(dtype)


@pytest.fixture
def small_chunks(monkeypatch):
    """Tensors of some kilobytes take several chunks, and the engine."""
    monkeypatch.setattr(pipelined, "CHUNK", 2048)
    monkeypatch.setattr(layout, "EAGER_HOST_MAX", 0)


# --- who is where ------------------------------------------------------------------------------------------------


def test_pieces_differ_by_one_at_most():
    for count in range(12):
        for parts in range(1, 6):
            sizes = split_evenly(count, parts)
            assert sum(sizes) == count and max(sizes) - min(sizes) <= 1


def test_few_bytes_travel_with_the_arrival():
    assert fits_eager(4096, 1000) and not fits_eager(4097, 1000)
    assert fits_eager(EAGER_HOST_MAX, 2) and not fits_eager(EAGER_HOST_MAX + 1, 2) and not fits_eager(EAGER_HOST_MAX, 3)
    assert fits_eager(128 << 10, 3, is_whole=True) and not fits_eager((128 << 10) + 1, 3, is_whole=True)
    layout = Layout([[0, 1], [2]], 0)
    assert layout.fits_eager(EAGER_HOST_MAX, is_whole=True)
    layout.eager_host_max = 5000  # as an engine may say
    assert layout.fits_eager(5000) and not layout.fits_eager(5001)
    assert Layout([[0, 1], [2]], 2).largest_host_total([1, 2, 4]) == 4


@pytest.mark.parametrize("hosts", [[[0, 1], [2, 3]], [[0, 3], [1], [2, 4, 5]], [[0], [1, 2, 3]]])
def test_everybody_speaks_to_every_host(hosts):
    views = {r: Layout(hosts, r) for ranks in hosts for r in ranks}
    for rank, view in views.items():
        for h in view.others:
            assert view.counterparts(h)
            for other in view.counterparts(h):
                assert rank in views[other].counterparts(view.host)
            assert sorted(r for wave in view.waves(h) for r in wave) == view.hosts[h]
            assert view.holder(h, rank) in view.hosts[h]


def test_symmetric_tensors_stay_on_one_host():
    def meet(group):
        tensor = symcomm.symm_mem.empty(4)
        with pytest.raises(errors.ResourceError, match="rendezvous: the ranks of group 'world' are on several hosts"):
            symcomm.symm_mem.rendezvous(tensor, group)
        return True

    assert run(meet, [1, 1]) == [True, True]


# --- values ------------------------------------------------------------------------------------------------------


def every_collective(group, count: int):
    """What each call gave, by name."""
    rank, size = group.rank, group.size
    said: dict = {"host": (group.layout.host, group.layout.local)}
    mine = values(rank, count)
    x = mine.clone()
    group.all_reduce(x)
    said["all_reduce"] = x
    x = mine.clone()
    group.reduce(x, size - 1, "max")
    said["reduce"] = x
    x = mine.clone()
    group.broadcast(x, size - 1)
    said["broadcast"] = x
    out = torch.full((size * count,), -9.0)
    group.all_gather_single(out, mine)
    said["all_gather_single"] = out
    outs = [torch.full(((r + 1) * count,), -9.0) for r in range(size)]
    group.all_gather(outs, values(rank, (rank + 1) * count))
    said["all_gather"] = torch.cat(outs)
    out = torch.empty(count)
    group.reduce_scatter_single(out, values(rank, count * size))
    said["reduce_scatter_single"] = out
    out = torch.empty((rank + 1) * count)
    group.reduce_scatter(out, [values(10 * rank + r, (r + 1) * count) for r in range(size)], "min")
    said["reduce_scatter"] = out
    outs = [torch.empty(count) for _ in range(size)] if rank == 1 else None
    group.gather(outs, mine, 1)
    said["gather"] = torch.cat(outs) if outs else None
    said["gather_single"] = torch.empty(size * count) if rank == 1 else None
    group.gather_single(said["gather_single"], mine, 1)
    out = torch.empty(count)
    group.scatter(out, [values(50 + r, count) for r in range(size)] if rank == 2 else None, 2)
    said["scatter"] = out
    out = torch.empty(count)
    group.scatter_single(out, torch.cat([values(60 + r, count) for r in range(size)]) if rank == 2 else None, 2)
    said["scatter_single"] = out
    out = torch.empty(size * count)
    group.all_to_all_single(out, values(rank, size * count))
    said["all_to_all_single"] = out
    outs = [torch.empty((1 + (r + rank) % 3) * count) for r in range(size)]
    group.all_to_all(outs, [values(10 * rank + r, (1 + (r + rank) % 3) * count) for r in range(size)])
    said["all_to_all"] = torch.cat(outs)
    group.barrier()
    said["object"] = group.all_gather_bytes(b"." * rank)
    return said


@pytest.mark.parametrize("count", [3, 301, 2000])  # all, some and none travel with an arrival
@pytest.mark.parametrize("hosts", LAYOUTS, ids=ids)
def test_every_collective(hosts, count, small_chunks):
    size = sum(hosts)
    said = run(every_collective, hosts, count)
    inputs = [values(r, count) for r in range(size)]
    for rank, got in enumerate(said):
        torch.testing.assert_close(got["all_reduce"], sum(inputs))
        wanted = functools.reduce(torch.maximum, inputs) if rank == size - 1 else inputs[rank]
        assert torch.equal(got["reduce"], wanted)
        assert torch.equal(got["broadcast"], inputs[-1])
        assert torch.equal(got["all_gather_single"], torch.cat(inputs))
        assert torch.equal(got["all_gather"], torch.cat([values(r, (r + 1) * count) for r in range(size)]))
        whole = sum(values(r, count * size) for r in range(size))
        assert torch.equal(got["reduce_scatter_single"], whole[rank * count : (rank + 1) * count])
        pieces = [values(10 * r + rank, (rank + 1) * count) for r in range(size)]
        assert torch.equal(got["reduce_scatter"], functools.reduce(torch.minimum, pieces))
        assert got["gather_single"] is None if rank != 1 else torch.equal(got["gather_single"], torch.cat(inputs))
        assert got["gather"] is None if rank != 1 else torch.equal(got["gather"], torch.cat(inputs))
        assert torch.equal(got["scatter"], values(50 + rank, count))
        assert torch.equal(got["scatter_single"], values(60 + rank, count))
        assert torch.equal(
            got["all_to_all_single"],
            torch.cat([values(r, size * count)[rank * count : (rank + 1) * count] for r in range(size)]),
        )
        wanted = torch.cat([values(10 * r + rank, (1 + (r + rank) % 3) * count) for r in range(size)])
        assert torch.equal(got["all_to_all"], wanted)
        assert got["object"] == [b"." * r for r in range(size)]
    assert [got["host"] for got in said] == [(h, i) for h, k in enumerate(hosts) for i in range(k)]


def every_type(group):
    said = {}
    for torch_dtype, dtype in torch_dtypes().items():
        for op in RedOpType:
            if native.reduce_defined(dtype, op) and op is not RedOpType.PREMUL_SUM:
                x = values(group.rank, 7, torch.float32).abs().add(1).to(torch_dtype)
                group.all_reduce(x, op)
                said[dtype, op] = x
    x = values(group.rank, 7)
    group.all_reduce(x, symcomm.make_premul_sum(0.5))
    return said, x


@pytest.mark.parametrize("hosts", [[2, 1]])
def test_every_dtype_and_operation(hosts):
    """As one host's group gives, where rounding cannot differ: small whole numbers."""
    across = run(every_type, hosts)
    alone = symcomm.spawn(every_type, 3, mode="threads", deadline=60)
    assert torch.equal(across[0][1], sum(values(r, 7) * 0.5 for r in range(3)))
    for (said, _), (plain, _) in zip(across, alone, strict=True):
        assert said.keys() == plain.keys() and len(said) > 60
        for key, got in said.items():
            wide = torch.complex128 if got.is_complex() else torch.float64
            tolerance = 0.3 if key[0].itemsize == 1 and key[0] >= DType.FLOAT8_E4M3FN else 0.02
            torch.testing.assert_close(got.to(wide), plain[key].to(wide), rtol=tolerance, atol=0, msg=str(key))


def same_bits(group):
    x = torch.randn(5000, generator=torch.Generator().manual_seed(group.rank))
    whole = x.clone()
    group.all_reduce(whole)
    parts = x.clone()
    group.all_reduce(parts[:7])
    group.all_reduce(parts[7:])
    return whole, parts


def test_all_ranks_get_the_same_bits_whatever_the_size(small_chunks):
    said = run(same_bits, [2, 1, 2])
    for whole, parts in said:
        assert torch.equal(whole, said[0][0]) and torch.equal(parts, said[0][0])


def odd_tensors(group):
    x = torch.arange(12.0).reshape(3, 4).t()  # not contiguous
    group.all_reduce(x)
    empty = torch.empty(0)
    group.all_reduce(empty)
    group.all_gather([torch.empty(0) for _ in range(group.size)], empty)
    place = torch.zeros(group.size)
    place[group.rank] = group.rank
    group.all_gather_single(place, place[group.rank : group.rank + 1])  # in place
    moved = torch.full((group.size, 2), float(group.rank))  # each sends two, and lays what comes over it
    group.all_to_all_single(moved.view(-1), moved.view(-1), [2] * group.size, [2] * group.size)
    assert moved.tolist() == [[float(r)] * 2 for r in range(group.size)]
    a, b = torch.ones(2), torch.ones(3, dtype=torch.int64)
    group.all_reduce_coalesced([a, b])
    return x, place, a, b


def test_tensors_that_are_odd():
    for x, place, a, b in run(odd_tensors, [2, 1]):
        assert torch.equal(x, 3 * torch.arange(12.0).reshape(3, 4).t())
        assert place.tolist() == [0, 1, 2] and a.tolist() == [3, 3] and b.tolist() == [3, 3, 3]


# --- asynchronous, messages, groups ------------------------------------------------------------------------------


def asynchronous(group):
    xs = [torch.full((4,), float(group.rank + i)) for i in range(5)]
    works = [group.all_reduce(x, async_op=True) for x in xs]
    last = torch.ones(1)
    group.all_reduce(last)  # behind the others
    assert all(work.is_completed() for work in works)
    for work in works:
        assert work.wait()
    future = group.all_reduce(torch.ones(2), async_op=True).get_future()
    return [x[0].item() for x in xs], last.item(), [t.tolist() for t in future.wait()]


def test_asynchronous_operations_keep_their_order():
    for said in run(asynchronous, [2, 1]):
        assert said == ([3.0, 6.0, 9.0, 12.0, 15.0], 3.0, [[3.0, 3.0]])


def calls_without_a_thread(group, has_threads):
    kind = errors.CallRefusedError if group.rank else errors.ResourceError
    for _ in range(2):  # the second call starts no thread that the first left unstarted
        with pytest.raises(kind, match="no thread could be started for asynchronous operations"):
            group.all_reduce(torch.ones(2), async_op=True).wait()
    group.barrier()
    has_threads.set()
    total = torch.ones(2)
    group.all_reduce(total, async_op=True).wait()
    return total.tolist(), group.sequence_number


def test_a_rank_without_a_thread_refuses_its_asynchronous_calls(monkeypatch):
    start, has_threads = threading.Thread.start, threading.Event()

    def start_elsewhere(thread):
        is_refused = thread.name == "symcomm-hosts" and threading.current_thread().name == "symcomm-rank-0"
        if is_refused and not has_threads.is_set():
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_elsewhere)
    assert run(calls_without_a_thread, [1, 1], has_threads) == [([2.0, 2.0], 4)] * 2


def messages(group):
    """Around the ring, small and large, then everybody to rank 0, which takes whoever comes."""
    size, rank = group.size, group.rank
    after, before = (rank + 1) % size, (rank - 1) % size
    said = []
    for count in (0, 3, 5000, 200_000):
        got = torch.empty(count)
        works = group.batch(
            [symcomm.Message.send(values(rank, count), after, 7), symcomm.Message.receive(got, before, 7)]
        )
        for work in works:
            work.wait()
        said.append(torch.equal(got, values(before, count)) and works[1].source == before)
    for count in (3, 9000):
        if rank:
            group.send(torch.full((count,), float(rank)), 0, count)
        else:
            who = []
            for _ in range(size - 1):
                x = torch.empty(count)
                source = group.recv(x, tag=count)
                said.append(bool((x == source).all()))
                who.append(source)
            said.append(sorted(who) == list(range(1, size)))
    group.monitored_barrier(20)
    return said


def test_messages():
    assert all(all(said) for said in run(messages, [2, 2]))


def wrong_messages(group):
    said = []
    if group.rank == 0:
        with pytest.raises(errors.DeadlineError, match="receive from rank 2, tag 1, .*can still be used") as info:
            group.recv(torch.empty(2), 2, 1, timeout=0.1)
        said.append(info.value.missing)
        with pytest.raises(errors.BadArgumentError, match="rank 2 sent 12 bytes of float32, the tensor here has 8"):
            group.recv(torch.empty(2), 2, 2)
    if group.rank == 2:
        group.send(torch.empty(3), 0, 2)
        with pytest.raises(errors.DeadlineError, match="send to rank 0, tag 9, .*can still be used"):
            group.send(torch.empty(100_000), 0, 9, timeout=0.1)
    with pytest.raises(errors.BadArgumentError, match="peer must be a rank of this group, 0 to 2, got 3"):
        group.send(torch.empty(1), 3)
    group.barrier()
    if group.rank == 0:
        with pytest.raises(errors.DeadlineError):  # it was withdrawn
            group.recv(torch.empty(100_000), 2, 9, timeout=0.1)
    group.barrier()
    return said


def test_messages_that_nobody_answers_or_of_another_size():
    assert run(wrong_messages, [2, 1])[0] == [[2]]


def taken_back_too_late(group, source):
    """The receiver accepts a message before it hears that the sender has taken it back."""
    said = []
    if group.rank == 1:
        with pytest.raises(errors.DeadlineError, match="can still be used"):
            group.send(torch.ones(100_000), 0, 9, timeout=0.1)
        group.barrier()
        group.send(torch.full((100_000,), 2.0), 0, 9)
    else:
        group.matcher.on_cancelled = lambda rank, header: None
        group.barrier()
        x = torch.empty(100_000)
        said = [group.recv(x, source, 9, timeout=20), x.mean().item()]
        with pytest.raises(errors.DeadlineError, match="can still be used"):
            group.recv(x, source, 9, timeout=0.1)
    group.barrier()
    return said


@pytest.mark.parametrize("source", [1, symcomm.ANY_SOURCE])
def test_message_that_is_taken_back_while_it_is_accepted(source):
    assert run(taken_back_too_late, [1, 1], source)[0] == [1, 2.0]


def groups(group):
    inside = group.new_group([0, 1])
    across = group.new_group([1, 3], name="across")
    halves = group.split(group.rank % 2)
    said = [type(g).__name__ if g is not None else None for g in (inside, across, halves)]
    x = torch.tensor([1.0 + group.rank])
    halves.all_reduce(x)
    if across is not None:
        y = torch.tensor([10.0 * group.rank])
        across.all_reduce(y)
        said.append(y.item())
    return said, x.item(), halves.global_ranks


def test_groups_from_groups():
    said = run(groups, [2, 2])
    assert [s[0] for s in said] == [
        ["LocalGroup", None, "HierarchicalGroup"],
        ["LocalGroup", "HierarchicalGroup", "HierarchicalGroup", 40.0],
        [None, None, "HierarchicalGroup"],
        [None, "HierarchicalGroup", "HierarchicalGroup", 40.0],
    ]
    assert [s[1] for s in said] == [4.0, 6.0, 4.0, 6.0] and said[0][2] == [0, 2]


# --- refusals ----------------------------------------------------------------------------------------------------


def mismatched(group, odd):
    try:
        if group.rank == odd:
            group.all_reduce(torch.ones(3))
        else:
            group.all_reduce(torch.ones(4))
    except errors.CollectiveMismatchError as error:
        with pytest.raises(errors.GroupUnusableError):
            group.barrier()
        return str(error)


@pytest.mark.parametrize("odd", [1, 2])  # beside a rank of its host, and alone on its own
def test_different_calls(odd):
    """Two ranks of a host may differ, and tell, before one of another host has come."""
    others = "ranks? 0(, 2)?" if odd == 1 else "ranks 0, 1"
    for text in run(mismatched, [2, 1], odd):
        assert re.search(rf"{others} called all_reduce\(float32 x 4, SUM\) at", text), text
        assert f"rank {odd} called all_reduce(float32 x 3, SUM) at" in text


def different_pieces(group):
    pieces = torch.ones(6).split([2, 3, 1] if group.rank == 1 else [1, 3, 2])
    with pytest.raises(errors.CollectiveMismatchError) as caught:
        group.all_gather(pieces, pieces[group.rank].clone())
    return str(caught.value)


def test_different_sizes_are_told():
    for text in run(different_pieces, [2, 1]):
        assert "rank 1 called all_gather(float32 x [2, 3, 1]) at" in text, text
        assert re.search(r"ranks? 0(, 2)? called all_gather\(float32 x \[1, 3, 2\]\) at", text), text


def late(group):
    if group.rank == 3:
        return "stayed away"
    with pytest.raises(errors.DeadlineError) as info:
        group.barrier(timeout=1.5)
    return info.value.missing, "did not come: 3; arrived: 0-2" in str(info.value)


@pytest.mark.parametrize("lacks_threads", [False, True])
def test_a_rank_that_does_not_come_is_named_on_every_host(lacks_threads, monkeypatch):
    done, start = threading.Barrier(4), threading.Thread.start

    def start_few(thread):
        if thread.name.startswith(("symcomm-answer", "symcomm-abort", "symcomm-tell")):
            raise RuntimeError("can't start new thread")
        start(thread)

    if lacks_threads:
        monkeypatch.setattr(threading.Thread, "start", start_few)

    def both(group):
        said = late(group)
        done.wait(30)
        return said

    assert run(both, [2, 2]) == [([3], True)] * 3 + ["stayed away"]


def test_spawn_refuses_hosts_that_do_not_add_up():
    with pytest.raises(errors.BadArgumentError, match=r"hosts must be numbers of ranks that add up to 4, got \[2, 1\]"):
        symcomm.spawn(late, 4, hosts=[2, 1])


def test_an_engine_that_is_none(monkeypatch):
    monkeypatch.setenv("SYMCOMM_ENGINE", "pigeon")
    with pytest.raises(errors.BadArgumentError, match="engine must be one of gloo, mpi, nccl, got 'pigeon'"):
        run(late, [1, 1])
