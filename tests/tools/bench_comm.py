"""1,000 small tensors on the CPU: the coalesced calls against torch's way through a flat buffer. Prints a table."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch._utils import _flatten_dense_tensors, _reorder_tensors_as, _take_tensors, _unflatten_dense_tensors

from symcomm import comm

LIMIT = 10 << 20


def best(call: Callable[[], object], tries: int = 40) -> float:
    call()
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def torch_broadcast(tensors):
    out = []
    for chunk in _take_tensors(tensors, LIMIT):
        out += [t.data for t in _unflatten_dense_tensors(_flatten_dense_tensors(chunk).clone(), chunk)]
    return _reorder_tensors_as(out, tensors)


def torch_reduce(lists):
    out = []
    for chunks in zip(*(_take_tensors(tensors, LIMIT) for tensors in lists), strict=True):
        total, *others = map(_flatten_dense_tensors, chunks)
        for other in others:
            total = total.add_(other)
        out += [t.data for t in _unflatten_dense_tensors(total, chunks[0])]
    return _reorder_tensors_as(out, lists[0])


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'1,000 tensors of':>20} {'call':>24} {'torch ms':>9} {'ours ms':>9}")
    for elements in (8, 256, 4096):
        lists = [[torch.randn(elements) for _ in range(1000)] for _ in range(4)]
        rows: list[tuple[str, Callable[[], object], Callable[[], object]]] = [
            (
                "broadcast_coalesced",
                lambda t=lists[0]: torch_broadcast(t),
                lambda t=lists[0]: comm.broadcast_coalesced(t, ["cpu", "cpu"]),
            )
        ]
        for n in (2, 4):
            rows.append(
                (
                    f"reduce_add_coalesced x{n}",
                    lambda some=lists[:n]: torch_reduce(some),
                    lambda some=lists[:n]: comm.reduce_add_coalesced(some, "cpu"),
                )
            )
        for name, theirs, ours in rows:
            print(f"{elements * 4:>14} bytes {name:>24} {best(theirs):>9.2f} {best(ours):>9.2f}")


if __name__ == "__main__":
    main()
