"""Wrong calls: what Gloo refuses, we refuse too, and our message has the words of Gloo's."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.common_distributed import simple_sparse_reduce_tests

from symcomm import errors
from symcomm.group import failure_words
from symcomm.torch_backend.group import TorchGroup
from symcomm.torch_backend.work import late
from tests.torch_backend.checks import KEPT, WORLD, check, equal, joined, refused

Call = Callable[[Any], Any]


def _pair(rank: int, path: str) -> tuple[Any, TorchGroup]:
    """A group of Gloo's and one of ours."""
    store = dist.FileStore(path, WORLD)
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, WORLD, timedelta(seconds=20))
    KEPT.append(gloo)
    return gloo, TorchGroup(dist.PrefixStore("ours", store), rank, WORLD, timedelta(seconds=20), "ours")


def _with(kind: Any, **facts: Any) -> Any:
    options = kind()
    for name, value in facts.items():
        setattr(options, name, value)
    return options


def _said(call: Call, group: Any) -> str:
    try:
        call(group)
    except RuntimeError as error:
        return str(error)
    raise AssertionError(f"{type(group).__name__} took it")


ONE, DOUBLE, TWO = torch.zeros(1), torch.zeros(1, dtype=torch.float64), torch.zeros(2)
SPARSE = torch.sparse_coo_tensor([[0]], [1], size=(2,), check_invariants=False)
LONGER = torch.sparse_coo_tensor([[0]], [1], size=(4,), check_invariants=False)


def _wrong_roots(me: int) -> Iterator[Call]:
    for root in (-1, WORLD):
        yield lambda g, root=root: g.broadcast([ONE], _with(dist.BroadcastOptions, rootRank=root))
        yield lambda g, root=root: g.reduce([ONE], _with(dist.ReduceOptions, rootRank=root))
        yield lambda g, root=root: g.scatter([ONE], [], _with(dist.ScatterOptions, rootRank=root))
        yield lambda g, root=root: g.gather([], [ONE], _with(dist.GatherOptions, rootRank=root))
    for tensors, number in (([ONE], -1), ([ONE], 1), ([], 0)):
        options = _with(dist.BroadcastOptions, rootRank=me, rootTensor=number)
        yield lambda g, tensors=tensors, options=options: g.broadcast(tensors, options)
    yield lambda g: g.reduce([ONE], _with(dist.ReduceOptions, rootRank=me, rootTensor=1))


def _wrong_lists(me: int) -> Iterator[Call]:
    yield lambda g: g.reduce([ONE, ONE], _with(dist.ReduceOptions, rootRank=me))
    for tensors in ([], [ONE, ONE]):
        yield lambda g, t=tensors: g.scatter(t, [], _with(dist.ScatterOptions, rootRank=0))
        yield lambda g, t=tensors: g.gather([], t, _with(dist.GatherOptions, rootRank=0))
    row = [ONE] * WORLD
    for lists in ([], [row, row], [row[1:]], [[ONE, *row]], [[DOUBLE] * WORLD], [[TWO] * WORLD]):
        yield lambda g, lists=lists: g.scatter([ONE], lists, _with(dist.ScatterOptions, rootRank=me))
        yield lambda g, lists=lists: g.gather(lists, [ONE], _with(dist.GatherOptions, rootRank=me))
    yield lambda g: g.scatter([ONE], [row], _with(dist.ScatterOptions, rootRank=1 - me))
    yield lambda g: g.gather([row], [ONE], _with(dist.GatherOptions, rootRank=1 - me))
    for outputs, inputs in (
        ([], []), ([], [ONE]), ([row, row], [ONE]), ([row[1:]], [ONE]), ([[ONE, *row]], [ONE]),
        ([[ONE, DOUBLE]], [ONE]), ([[ONE, TWO]], [ONE]), ([row * 2] * 2, [ONE, DOUBLE]), ([row * 2] * 2, [ONE, TWO]),
    ):  # fmt: skip
        yield lambda g, outputs=outputs, inputs=inputs: g.allgather(outputs, inputs)
    for places in ([[torch.zeros(0)], [ONE]], [[DOUBLE], [ONE]], [[ONE]] * (WORLD + 1)):
        yield lambda g, places=places: g.allgather_coalesced(places, [ONE])


def _unlike_tensors(me: int) -> Iterator[Call]:
    for tensors in ([], [ONE, DOUBLE], [ONE, TWO], [ONE, SPARSE], [SPARSE, LONGER]):
        yield lambda g, tensors=tensors: g.allreduce(tensors, dist.AllreduceOptions())
    for tensors in ([ONE, DOUBLE], [ONE, TWO]):
        yield lambda g, t=tensors: g.broadcast(t, _with(dist.BroadcastOptions, rootRank=me))
    for tensors in ([], [ONE, DOUBLE], [ONE, SPARSE], [SPARSE, SPARSE.clone()]):
        yield lambda g, t=tensors: g.allreduce_coalesced(t, dist.AllreduceCoalescedOptions())
    for op in (dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX):
        yield lambda g, op=op: g.allreduce([LONGER], _with(dist.AllreduceOptions, reduceOp=op))


@check
def words_of_gloo(rank: int, path: str) -> None:
    gloo, ours = _pair(rank, path)
    for calls in (_wrong_roots, _wrong_lists, _unlike_tensors):
        for call in calls(rank):
            theirs = re.sub(r"^ProcessGroupGloo::\w+: ", "", _said(call, gloo))
            words = re.sub(r" at index \d+$", "", re.split(r": -?\d| \(| containing|, same", theirs)[0])
            said = _said(call, ours)
            assert words in said, f"{words!r} is not in {said!r}"
    ours.barrier().wait()  # none of it reached the group
    ours.shutdown()


@check
def words_of_all_to_all(rank: int, path: str) -> None:
    """Gloo finds these when it waits."""
    with joined(rank, path):
        out, given = torch.zeros(4), torch.ones(4)
        refused(lambda: dist.all_to_all_single(out, given, [1], [2, 2]), "Number of tensor splits not equal")
        refused(lambda: dist.all_to_all_single(out, given, [1, 2], [2, 2]), "Split sizes doesn't match total dim 0")
        refused(lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)), "does not divide equally")
        refused(lambda: dist.all_to_all_single(torch.zeros(2, 2), torch.ones(2, 2).t()), "Tensors must be contiguous")
        dist.barrier()


@check
def who_is_late(rank: int, path: str) -> None:
    """The words of Gloo for an operation that took too long, with the time it had."""
    store = dist.FileStore(path, WORLD)
    limit = timedelta(milliseconds=30)
    calls: list[Call] = [
        lambda g: g.allreduce([ONE.clone()], _with(dist.AllreduceOptions, timeout=limit)).wait(),
        lambda g: g.allreduce([ONE.clone()], _with(dist.AllreduceOptions, timeout=limit, asyncOp=False)),
        lambda g: g.set_timeout(limit) or g.allreduce([ONE.clone()]).wait(),
        lambda g: g.set_timeout(limit) or g.barrier(_with(dist.BarrierOptions, asyncOp=False)),
        lambda g: g.set_timeout(limit) or g.recv([ONE.clone()], 1, 7).wait(limit),
    ]
    for k, call in enumerate(calls):
        group = TorchGroup(dist.PrefixStore(str(k), store), rank, WORLD, timedelta(seconds=20), "late")
        if rank == 0:
            said = _said(call, group)
            assert said.startswith("Timed out waiting 30ms: "), said
            assert "1" in said and "late" in said, said
            store.set(f"over {k}", "")
        else:
            store.wait([f"over {k}"], timedelta(seconds=20))
        group.shutdown()
    gone = errors.RankFailedError("rank 1 left", [1])  # when both happened, both are said
    assert late(gone, 0.03, 0.01) is gone
    elsewhere = failure_words.timed_out("all_reduce #1", 1, 1e-3, 0, "did not come: 1", [1])
    assert late(elsewhere, 20.0, 1e-3) is elsewhere and "rank 0's deadline" in str(elsewhere)  # it took no 20 s
    both = late(gone, 0.03, 0.05)
    assert isinstance(both, errors.RankFailedError) and both.ranks == [1]
    assert str(both) == "Timed out waiting 30ms: rank 1 left"


@check
def futures_hold_what_gloos_hold(rank: int, path: str) -> None:
    gloo, ours = _pair(rank, path)
    values = []
    for group in (gloo, ours):
        mine = torch.tensor([rank + 1.0])
        rows = [[torch.zeros(1) for _ in range(2 * WORLD)] for _ in range(2)]
        works = [
            group.allreduce([mine.clone()]), group.allreduce(mine.clone()), group.broadcast([torch.empty(0)]),
            group.allgather([[torch.zeros(1) for _ in range(WORLD)]], [mine]), group.allgather(rows, [mine, mine + 10]),
            group.allreduce_coalesced([mine.clone(), mine + 1]), group.broadcast(mine.clone(), root=1),
            group.gather([[torch.zeros(1) for _ in range(WORLD)]] if rank == 0 else [], [mine]),
        ]  # fmt: skip
        values.append([work.get_future().wait() for work in works])
    for k, (theirs, mine) in enumerate(zip(*values, strict=True)):
        if k == 7 and rank == 1:
            continue  # Gloo says nothing in particular away from the root
        torch.testing.assert_close(mine, theirs)
    assert type(ours.create_device(interface="lo")) is type(None)
    for tensor in [torch.full((100, 100), float(k)) for k in range(16)]:
        ours.allreduce(tensor)
    ours.barrier().get_future().wait()
    equal(tensor[0, 0], 30.0)
    ours.shutdown()


@check
def what_gloo_takes(rank: int, path: str) -> None:
    """Calls that need care: a tensor twice in a list, strided ones in inference mode, sparse ones of every kind."""
    gloo, ours = _pair(rank, path)
    results = []
    for group in (gloo, ours):
        twice = [torch.tensor([rank + 1.0])] * 2
        found = [group.allreduce_coalesced(twice).get_future().wait()]
        with torch.inference_mode():
            column = torch.full((2, 2), float(rank))[:, 0]
            places = [torch.zeros(2, 2)[:, 0] for _ in range(WORLD)]
            found.append(group.allgather([places], [column]).get_future().wait())
        results.append(found)
    torch.testing.assert_close(results[1], results[0])
    with torch.inference_mode():  # Gloo reduces what lies behind the first element in memory
        ours.allreduce([column]).wait()
        equal(column, [1.0, 1.0])
    for count in (1, 2):
        for tensors, expected in simple_sparse_reduce_tests(rank, WORLD, num_inputs=count):
            got = ours.allreduce(tensors).get_future().wait()
            for value, sum_ in zip([*got, *tensors], [*expected] * 2, strict=True):
                torch.testing.assert_close(value.to_dense(), sum_.to_dense())
    ours.shutdown()
