"""Which way calls of torch.distributed's functions take: blocking ones of a kind seen before never leave the core."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch._C._distributed_c10d as torch_c10d
import torch.distributed as dist

from symcomm._core import native
from symcomm.ops import CACHED
from symcomm.torch_backend import options_layout
from symcomm.torch_backend.work import done
from tests.support.tensor_kinds import OF_THEIR_MEMORY, OTHERS
from tests.torch_backend.checks import WORLD, check, equal, joined, refused

SHORT = {"short": 1, "long": 0, "inline": 1, "queued": 0}
LONG = {"short": 0, "long": 1, "inline": 1, "queued": 0}
QUEUED = {"short": 0, "long": 1, "inline": 0, "queued": 1}
LEFT = {"short": 1, "long": 0, "inline": 0, "queued": 1}
Case = tuple[Callable[..., Any], list[torch.Tensor], list[float]]


def _calls(rank: int, make: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, Case]:
    """(call, the tensors that it changes, what they hold then)"""

    def new(value: float, n: int = 3) -> torch.Tensor:
        return make(torch.full((n,), float(value)))

    one, two, three, four, mine = (new(rank + 1) for _ in range(5))
    row, at_one, pieces = ([new(k + 1) for k in range(WORLD)] for _ in range(3))
    whole, swapped, six, gathered = new(0, 6), new(0, 6), new(rank + 1, 6), new(0, 6)
    half, part, got = new(0), new(0), new(0)
    root = rank == 1
    return {
        "all_reduce": (lambda **o: dist.all_reduce(one, **o), [one], [3]),
        "min": (lambda **o: dist.all_reduce(two, dist.ReduceOp.MIN, **o), [two], [1]),
        "reduce": (lambda **o: dist.reduce(three, 1, **o), [three], [3 if root else 1]),
        "broadcast": (lambda **o: dist.broadcast(four, 1, **o), [four], [2]),
        "all_gather": (lambda **o: dist.all_gather(row, mine, **o), row, [1, 2]),
        "all_gather_into_tensor": (
            lambda **o: dist.all_gather_into_tensor(whole, mine, **o), list(whole.detach().split(3)), [1, 2],
        ),
        "gather": (
            lambda **o: dist.gather(mine, at_one if root else None, 1, **o), at_one if root else [], [1, 2][: 2 * root],
        ),
        "scatter": (lambda **o: dist.scatter(got, pieces if root else None, 1, **o), [got], [rank + 1]),
        "reduce_scatter": (lambda **o: dist.reduce_scatter(part, [mine] * WORLD, **o), [part], [3]),
        "reduce_scatter_tensor": (lambda **o: dist.reduce_scatter_tensor(half, six, **o), [half], [3]),
        "all_to_all_single": (
            lambda **o: dist.all_to_all_single(swapped, six, **o), list(swapped.detach().split(3)), [1, 2],
        ),
        "barrier": (lambda **o: dist.barrier(**o), [], []),
        "gather_single": (
            lambda **o: _gather_single(gathered, mine, **o), list(gathered.detach().split(3)) if root else [],
            [1, 2][: 2 * root],
        ),
    }  # fmt: skip


def _gather_single(output: torch.Tensor, input: torch.Tensor, async_op: bool = False) -> Any:
    options = dist.GatherOptions()
    options.rootRank, options.asyncOp = 1, async_op
    return dist.group.WORLD.gather_single(output, input, options)


def _ways(group: Any, call: Callable[[], Any], what: str = "collectives") -> dict[str, int]:
    before = group.call_stats()[what]
    call()
    after = group.call_stats()[what]
    return {name: after[name] - before[name] for name in after}


@contextlib.contextmanager
def _kept_from_python(group: Any) -> Iterator[None]:
    """Fails if a call is dressed for torch by Python: the core's counts would not show it."""

    def run_new(op: Any, *_: Any) -> Any:
        raise AssertionError(f"{op.name} takes the slow path to the core")

    group.calls.run_new = run_new
    try:
        yield
    finally:
        del group.calls.run_new


def _each(group: Any, rank: int, kinds: dict[str, Callable], expected: dict[str, int], leave_out: tuple = ()) -> None:
    for kind, make in kinds.items():
        if kind in leave_out:
            continue
        for call, *_ in _calls(rank, make).values():
            call()
        for name, (call, tensors, values) in _calls(rank, make).items():
            with _kept_from_python(group) if expected == SHORT else contextlib.nullcontext():
                ways = _ways(group, call)
            assert ways == (SHORT if name == "barrier" else expected), f"{name}, {kind}: {ways}"
            for tensor, value in zip(tensors, values, strict=True):
                equal(tensor.detach().clone().float(), torch.full((3,), float(value)))


@check
def every_dense_tensor_takes_the_fast_path(rank: int, path: str) -> None:
    no_minimum, no_split = "complex", "two dimensions"
    with joined(rank, path) as group, torch.no_grad():  # otherwise some calls refuse leaves that require grad
        _each(group, rank, OF_THEIR_MEMORY, SHORT, (no_minimum, no_split))


@check
def tensors_that_are_not_their_memory_take_the_slow_path(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        _each(group, rank, {"negative": OTHERS["negative"]}, LONG)


@check
def options_that_the_core_cannot_read_are_asked(rank: int, path: str) -> None:
    """As on a torch that keeps them in another way: the calls stay short."""
    assert options_layout.install() == set(CACHED)
    with joined(rank, path) as group:
        none = [(int(kind), int, 0, 0, 0, 0, 0, 0) for kind in CACHED]  # no options are of type int
        native.use_options(torch.autograd._profiler_enabled, tuple(none))
        try:
            _each(group, rank, {"heap": OF_THEIR_MEMORY["heap"]}, SHORT)
        finally:
            options_layout.install.cache_clear()
            options_layout.install()


@check
def what_else_a_call_asks_for_is_not_lost_on_the_fast_path(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        x = torch.full((3,), rank + 1.0)
        for _ in range(2):
            dist.all_reduce(x.clone())
        options = dist.AllreduceOptions()
        options.asyncOp, options.timeout = False, timedelta(seconds=9)
        assert _ways(group, lambda: group.allreduce([x.clone()], options)) == LONG, "a time-out of its own"
        y = x.clone()
        dist.all_reduce(y, torch_c10d._make_nccl_premul_sum(2.0))
        equal(y, torch.full((3,), 6.0))
        with torch.profiler.profile() as profile:
            dist.all_reduce(x.clone())
        assert any(event.key == "symcomm:all_reduce" for event in profile.key_averages())
        assert _ways(group, lambda: dist.all_reduce(x.clone())) == SHORT
        assert group.allreduce([x.clone()], _blocking(dist.AllreduceOptions())) is done
        assert _ways(group, lambda: dist.all_reduce(torch.ones(3).to("meta"))) == dict.fromkeys(SHORT, 0), "no values"


def _blocking(options: Any) -> Any:
    options.asyncOp = False
    return options


@check
def asynchronous_and_coalesced_calls_are_counted(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        large = torch.ones(1 << 16)
        ways = _ways(group, lambda: dist.all_reduce(large, async_op=True).wait())
        assert ways["long"] == 1 == ways["inline"] + ways["queued"], f"not seen before: {ways}"
        for name, (call, tensors, values) in _calls(rank, torch.clone).items():
            call()
            ways = _ways(group, lambda call=call: call(async_op=True).wait())
            assert ways in (SHORT, LEFT), f"{name}: {ways}"  # whether the group's thread was quicker
            if name not in ("all_reduce", "reduce"):  # which have added twice now
                for tensor, value in zip(tensors, values, strict=True):
                    equal(tensor, torch.full((3,), float(value)))
        a, b = torch.ones(3), torch.ones(4)
        dist.all_reduce(a)
        dist.all_reduce(b)

        def coalesced() -> None:
            with dist._coalescing_manager():
                dist.all_reduce(a)
                dist.all_reduce(b)

        ways = _ways(group, coalesced)
        assert ways["short"] + ways["long"] == 2 == ways["inline"] + ways["queued"], ways
        equal(a, torch.full((3,), 4.0))
        equal(b, torch.full((4,), 4.0))


@check
def the_group_inside_is_the_short_entrance(rank: int, path: str) -> None:
    import symcomm

    with joined(rank, path) as group:
        core = symcomm.of(group)
        assert core is group.core is symcomm.of()
        x = torch.ones(2)
        core.all_reduce(x)
        dist.all_reduce(x)
        equal(x, torch.full((2,), 4.0))
        assert _ways(group, lambda: core.all_reduce(x)) == SHORT == _ways(group, lambda: dist.all_reduce(x))
    refused(lambda: symcomm.of(torch.ones(1)), "of: group must be a ProcessGroup, its name, or None")


# --- messages -------------------------------------------------------------------------------------------------------


def _message(group: Any, rank: int, make: Callable, n: int, kind: str, expected: tuple[dict, dict]) -> None:
    """Rank 0 sends ``n`` elements, rank 1 receives them; ``expected``: the way of each."""
    values = torch.arange(n) % 4 + 5.0  # which every type can hold
    tensor = make(values if rank == 0 else torch.zeros(n))

    def call() -> None:
        if rank == 0:
            dist.send(tensor, 1, tag=3)
        else:
            assert dist.recv(tensor, 0, tag=3) == 0

    ways = _ways(group, call, "messages")
    assert ways == expected[rank], f"{n} elements, {kind}: {ways}"
    equal(tensor.detach().clone().reshape(-1).to(torch.complex64), values)


@check
def blocking_messages_of_every_dense_tensor_take_the_fast_path(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        dist.all_reduce(torch.ones(1))  # a process's first tensor teaches the core what torch's tensors are
        for kind, make in OF_THEIR_MEMORY.items():
            for n in (0, 1, 5):
                _message(group, rank, make, n, kind, (SHORT, SHORT))
        ring = 256 * 1024  # bytes; more of them than that are sent in turns
        _message(group, rank, torch.clone, ring, "larger than the ring", (SHORT, SHORT))


@check
def blocking_messages_of_other_tensors_stay_in_the_callers_thread(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        for kind in ("negative", "imaginary part", "subclass", "every second"):
            _message(group, rank, OTHERS[kind], 5, kind, (LONG, LONG))


@check
def messages_that_nobody_waits_for_yet_are_left_to_the_thread(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        dist.all_reduce(torch.ones(1))
        x, peer = torch.full((3,), rank + 1.0), 1 - rank
        got = torch.zeros(3)

        def batch() -> None:
            for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, x, peer), dist.P2POp(dist.irecv, got, peer)]):
                work.wait()

        ways = _ways(group, batch, "messages")
        assert ways == {name: 2 * n for name, n in LEFT.items()}, ways
        equal(got, [peer + 1.0] * 3)
        works: list[Any] = []
        start = (lambda: works.append(dist.isend(x, 1))) if rank == 0 else (lambda: works.append(dist.irecv(got, 0)))
        assert _ways(group, start, "messages") == LEFT
        works[0].wait()
        dist.barrier()  # what C++ or a thread without Python code below it calls has nobody to look back at
        group.send([x], peer, 4)
        group.recv([got], peer, 4).wait()
        equal(got, [peer + 1.0] * 3)


@check
def a_blocking_receive_from_anybody_names_the_sender(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        dist.all_reduce(torch.ones(1))
        got = torch.zeros(2)

        def call() -> None:
            if rank == 0:
                dist.send(torch.full((2,), 7.0), 1)
            else:
                assert dist.recv(got) == 0
                equal(got, [7.0, 7.0])

        assert _ways(group, call, "messages") == SHORT


@check
def blocking_messages_fail_as_others_do(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        if rank == 0:
            dist.send(torch.ones(3), 1)
        else:
            refused(lambda: dist.recv(torch.ones(2), 0), "rank 0 sent 12 bytes of float32")
            group.core.set_timeout(0.1)
            refused(lambda: dist.recv(torch.ones(2), 0), "Timed out waiting 100ms", "receive from rank 0")
            refused(lambda: dist.recv(torch.ones(2)), "Timed out waiting 100ms", "receive from any rank")
            group.core.set_timeout(30)
        dist.barrier()
        refused(lambda: dist.send(torch.ones(2).to_sparse(), 1 - rank), "send: tensor")
        with torch.profiler.profile() as profile:
            dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.zeros(2), 0)
        assert any(event.key == f"symcomm:{('send', 'recv')[rank]}" for event in profile.key_averages())
        if rank == 0:
            group.core.abort()
            refused(lambda: dist.recv(torch.ones(2), 1), "abort")
        else:
            refused(lambda: dist.recv(torch.ones(2), 0), "abort")
