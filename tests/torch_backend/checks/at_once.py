"""Small asynchronous calls: whoever waits for one runs it, and nobody waits in the call itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from symcomm import errors
from tests.torch_backend.checks import WORLD, check, equal, joined, refused


def _calls(rank: int) -> list[tuple[Callable[[], Any], Callable[[], list[Any]], list[float]]]:
    """(an asynchronous call, where its result is, what that is)."""
    mine = torch.tensor([rank + 1.0])
    total, root, sent, one = mine.clone(), mine.clone(), mine.clone(), torch.zeros(1)
    row, two, half = [torch.zeros(1) for _ in range(WORLD)], torch.zeros(WORLD), torch.zeros(1)
    swapped, pair = torch.zeros(WORLD), torch.tensor([rank + 1.0, rank + 11.0])
    pieces = [torch.tensor([r + 5.0]) for r in range(WORLD)]
    at_root = rank == 0
    return [
        (lambda: dist.all_reduce(total, async_op=True), lambda: [total], [3.0]),
        (lambda: dist.reduce(root, 0, async_op=True), lambda: [root] if at_root else [], [3.0] if at_root else []),
        (lambda: dist.broadcast(sent, 1, async_op=True), lambda: [sent], [2.0]),
        (lambda: dist.all_gather(row, mine, async_op=True), lambda: row, [1.0, 2.0]),
        (lambda: dist.all_gather_into_tensor(two, mine, async_op=True), lambda: [two], [1.0, 2.0]),
        (lambda: dist.reduce_scatter_tensor(half, pair, async_op=True), lambda: [half], [[3.0, 23.0][rank]]),
        (
            lambda: dist.all_to_all_single(swapped, pair, async_op=True),
            lambda: [swapped],
            [[1.0, 2.0], [11.0, 12.0]][rank],
        ),
        (lambda: dist.scatter(one, pieces if at_root else None, async_op=True), lambda: [one], [rank + 5.0]),
        (
            lambda: dist.gather(mine, row if at_root else None, async_op=True),
            lambda: row if at_root else [],
            [1.0, 2.0] if at_root else [],
        ),
    ]


@check
def small_calls(rank: int, path: str) -> None:
    with joined(rank, path):
        for _ in range(3):  # the first of a kind takes the slow path
            for call, result, expected in _calls(rank):
                work = call()
                assert work.wait() and work.is_completed() and work.is_success() and work.exception() is None
                assert work._get_duration() >= 0
                work.get_future().wait()
                if expected:
                    equal(torch.cat(result()), expected)


@check
def nobody_waits_in_the_call(rank: int, path: str) -> None:
    """A call returns though the other rank comes only after a message that is sent behind it."""
    with joined(rank, path):
        for size in (1, 1 << 14) * 10:
            tensor = torch.full((size,), rank + 1.0)
            word = torch.zeros(1)
            for first in range(WORLD):
                if rank == first:
                    work = dist.all_reduce(tensor, async_op=True)
                    dist.send(word, 1 - rank)
                    work.wait()
                else:
                    dist.recv(word, 1 - rank)
                    dist.all_reduce(tensor, async_op=True).wait()
            equal(tensor[:1], [6.0])
            works = [dist.all_reduce(tensor, async_op=True) for _ in range(4)]
            for work in works:
                work.wait()
            equal(tensor[-1:], [96.0])


def _uneven(rank: int, group: Any, as_list: bool, rows: int) -> tuple[list[Any], Callable[[], Any]]:
    """(where pieces come, an asynchronous call with pieces of uneven sizes)"""
    sent = [rows, rows + 1] if rank == 0 else [rows + 2, 0]
    got = [rows, rows + 2] if rank == 0 else [rows + 1, 0]
    given = torch.arange(2.0 * sum(sent)).view(-1, 2) + 1000 * rank
    if not as_list:
        out = torch.zeros(sum(got), 2)
        return [out], lambda: dist.all_to_all_single(out, given, got, sent, group=group, async_op=True)
    outs = [torch.zeros(n, 2) for n in got]
    return outs, lambda: dist.all_to_all(outs, list(given.split(sent)), group=group, async_op=True)


@check
def uneven_exchanges_return_at_once(rank: int, path: str) -> None:
    """Though the other rank comes only after a message that is sent behind the call; with Gloo's values."""
    with joined(rank, path):
        gloo = dist.new_group(backend="gloo")
        for rows, as_list in ((0, False), (1, False), (3000, False), (0, True), (5, True), (3000, True)):
            outs, call = _uneven(rank, None, as_list, rows)
            if rank == 1:
                dist.recv(torch.zeros(1), 0)
            work = call()
            behind = torch.ones(1)
            after = dist.all_reduce(behind, async_op=True)
            if rank == 0:
                dist.send(torch.zeros(1), 1)
            after.wait()
            assert behind.item() == WORLD and work.is_completed()  # they end in order
            assert work.wait() and work.is_success()
            equal(torch.cat([t.view(-1) for t in work.get_future().wait()]), torch.cat([t.view(-1) for t in outs]))
            expected, like_gloo = _uneven(rank, gloo, False, rows)
            like_gloo().wait()
            equal(torch.cat(outs), expected[0])


@check
def failures_come_out_of_wait(rank: int, path: str) -> None:
    with joined(rank, path):
        for size in (2, 3):  # so that both kinds are known
            dist.all_reduce(torch.ones(size), async_op=True).wait()
        tensor = torch.ones(2 + rank)
        work = dist.all_reduce(tensor, async_op=True)
        refused(work.wait, "the ranks did not make the same call")
        assert isinstance(work.exception(), errors.CollectiveMismatchError) and not work.is_success()
        refused(work.get_future().wait, "the ranks did not make the same call")
        refused(work.result, "the ranks did not make the same call")
