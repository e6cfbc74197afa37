"""Autograd is told what torch.distributed's calls write, and refuses what it refuses on Gloo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from symcomm import ddp
from symcomm.ddp.broadcast import broadcast_coalesced
from tests.support.autograd import LEAF, Case, must_be_noticed, saved
from tests.support.autograd import check as check_case
from tests.torch_backend.checks import WORLD, check, equal, joined

New = Callable[[int], torch.Tensor]
CACHED = (
    "all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "gather", "scatter", "reduce_scatter",
    "reduce_scatter_tensor", "all_to_all_single",
)  # fmt: skip


def _calls(rank: int, new: New, n: int = 3, group: Any = None) -> dict[str, Case]:
    x, y, z, b, got, part, half = (new(n) for _ in range(7))
    row, taken, swapped = ([new(n) for _ in range(WORLD)] for _ in range(3))
    whole, flat = new(WORLD * n), new(WORLD * n)
    mine, six, sent = torch.ones(n), torch.ones(WORLD * n), [torch.ones(n) for _ in range(WORLD)]
    root, o = rank == 1, {"group": group}
    return {
        "all_reduce": Case(lambda **a: dist.all_reduce(x, **o, **a), [x], []),
        "all_reduce_coalesced": Case(lambda **a: dist.all_reduce_coalesced([z], **o, **a), [z], []),
        "reduce": Case(lambda **a: dist.reduce(y, 1, **o, **a), [y] if root else [], [] if root else [y]),
        "broadcast": Case(lambda **a: dist.broadcast(b, 1, **o, **a), [] if root else [b], [b] if root else []),
        "all_gather": Case(lambda **a: dist.all_gather(row, mine, **o, **a), row, [mine]),
        "all_gather_into_tensor": Case(lambda **a: dist.all_gather_into_tensor(whole, mine, **o, **a), [whole], [mine]),
        "gather": Case(
            lambda **a: dist.gather(mine, taken if root else None, 1, **o, **a), taken if root else [], [mine]
        ),
        "scatter": Case(lambda **a: dist.scatter(got, sent if root else None, 1, **o, **a), [got], sent),
        "reduce_scatter": Case(lambda **a: dist.reduce_scatter(part, sent, **o, **a), [part], sent),
        "reduce_scatter_tensor": Case(lambda **a: dist.reduce_scatter_tensor(half, six, **o, **a), [half], [six]),
        "all_to_all": Case(lambda **a: dist.all_to_all(swapped, sent, **o, **a), swapped, sent),
        "all_to_all_single": Case(lambda **a: dist.all_to_all_single(flat, six, **o, **a), [flat], [six]),
    }  # fmt: skip


def _awaited(work: Any) -> None:
    if work is not None:
        work.wait()


@check
def every_call_tells_autograd(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        for make in (torch.ones, lambda n: torch.ones(n + 2)[1:-1], lambda n: torch.ones(2 * n)[::2]):
            for name in _calls(rank, make):
                check_case(case := _calls(rank, make)[name], case.call, f"{name}, first")
                before = group.call_stats()["collectives"]["short"]
                check_case(case := _calls(rank, make)[name], case.call, f"{name}, again")
                if name in CACHED and make(3).is_contiguous():
                    after = group.call_stats()["collectives"]["short"]
                    assert after == before + 1, f"{name} has left the fast path"
                for n in (3, 5000):
                    case = _calls(rank, make, n)[name]
                    check_case(case, lambda c=case: c.call(async_op=True).wait(), f"{name}, asynchronous, {n}")


def _received(rank: int, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    return {
        "recv": lambda: dist.recv(x, 1),
        "recv from any": lambda: dist.recv(x),
        "irecv": lambda: dist.irecv(x, 1).wait(),
        "irecv from any": lambda: dist.irecv(x).wait(),
        "batch": lambda: [w.wait() for w in dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 1)])],
    }


@check
def every_receive_tells_autograd(rank: int, path: str) -> None:
    with joined(rank, path):
        for n in (3, 100_000):
            for name in _received(rank, torch.ones(1)):
                x = torch.ones(n)
                if rank == 1:
                    check_case(Case(lambda: None, [], [x]), lambda x=x: dist.send(x, 0), "send")
                else:
                    check_case(Case(lambda: None, [x], []), _received(rank, x)[name], f"{name} of {n}")


def _together(x: torch.Tensor, y: torch.Tensor) -> None:
    with dist._coalescing_manager():
        dist.all_reduce(x)
        dist.all_reduce(y)


def _together_on_cpu(x: torch.Tensor, y: torch.Tensor) -> None:
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        dist.all_reduce(x)
        dist.all_reduce(y)
    manager.wait()


@check
def several_at_once_tell_autograd(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        a, b = torch.ones(4), torch.ones(4)
        for together in (_together, _together_on_cpu):
            check_case(Case(lambda: None, [a, b], []), lambda f=together: f(a, b), together.__name__)
        x, y = torch.ones(4), torch.ones(2)
        for act in (dist._broadcast_coalesced, broadcast_coalesced):
            what = act.__module__
            others = [x, y] if rank else []  # torch's copies the root's own to themselves
            check_case(Case(lambda: None, others, []), lambda f=act: f(group, [x, y], 8, 0), what)
        roots = [] if rank else [x, y]
        check_case(Case(lambda: None, [], roots), lambda: broadcast_coalesced(group, [x, y], 8), "root")
        pieces = [torch.ones(3), torch.ones(3)]
        check_case(Case(lambda: None, pieces, []), lambda: group.allreduce(pieces).wait(), "a list of tensors")


@check
def functional_operators_tell_autograd(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        ops, name = torch.ops._c10d_functional, group.group_name
        x, small, large = torch.ones(4), torch.ones(2), torch.ones(8)
        wait = ops.wait_tensor
        for what, (act, written, read) in {
            "all_reduce_": (lambda: wait(ops.all_reduce_(x, "sum", name)), [x], []),
            "broadcast_": (lambda: wait(ops.broadcast_(x, 1, name)), [] if rank else [x], [x] if rank else []),
            "all_reduce_coalesced_": (lambda: [wait(t) for t in ops.all_reduce_coalesced_([x], "sum", name)], [x], []),
            "all_gather_into_tensor_out": (
                lambda: wait(ops.all_gather_into_tensor_out(x, WORLD, name, out=large)), [large], [x],
            ),
            "all_reduce": (lambda: wait(ops.all_reduce(x, "sum", name)), [], [x]),
            "all_gather_into_tensor": (lambda: wait(ops.all_gather_into_tensor(x, WORLD, name)), [], [x]),
            "reduce_scatter_tensor": (lambda: wait(ops.reduce_scatter_tensor(x, "sum", WORLD, name)), [], [x, small]),
        }.items():  # fmt: skip
            check_case(Case(act, written, read), act, what)


def _refused(rank: int, name: str, group: Any) -> str:
    """Why leaves that require grad are refused; "" if they are not."""
    case = _calls(rank, lambda n: torch.ones(n, requires_grad=True), group=group)[name]
    try:
        _awaited(case.call(async_op=True))
    except RuntimeError as error:
        return str(error)
    return ""


@check
def leaves_are_refused_where_gloo_refuses_them(rank: int, path: str) -> None:
    with joined(rank, path) as group:
        for name in _calls(rank, torch.ones):
            gloo = dist.new_group([0, 1], backend="gloo")  # which is of no use after a refusal
            theirs, ours = _refused(rank, name, gloo), _refused(rank, name, None)
            assert bool(theirs) == bool(ours), f"{name}: Gloo says {theirs!r}, we say {ours!r}"
            assert not ours or LEAF in ours, ours
            words = (LEAF, "is being modified inplace", "does not support alltoall")  # the last before torch 2.12
            assert not theirs or any(word in theirs for word in words), (name, theirs)
        x, n = torch.ones(2, requires_grad=True), 0
        for act in (dist._broadcast_coalesced, broadcast_coalesced):
            try:
                act(group, [x], 8, 0)
            except RuntimeError as error:
                assert LEAF in str(error)
                n += 1
            with torch.no_grad():
                act(group, [x], 8, 0)
        assert n == 2, "on all ranks alike"
        total = torch.ones(1)
        dist.all_reduce(total)
        equal(total, [float(WORLD)])


@check
def one_refusal_leaves_the_others_their_results(rank: int, path: str) -> None:
    with joined(rank, path):
        for _ in range(2):
            row = [torch.zeros(2, requires_grad=rank == 0) for _ in range(WORLD)]
            try:
                dist.all_gather(row, torch.full((2,), rank + 1.0))
            except RuntimeError as error:
                assert rank == 0 and LEAF in str(error)
                equal(torch.cat(row).detach(), torch.zeros(4))
            else:
                assert rank == 1
                equal(torch.cat(row), [1.0, 1.0, 2.0, 2.0])
        dist.barrier()


@check
def a_bucket_tells_autograd(rank: int, path: str) -> None:
    with joined(rank, path):
        results: list[torch.Tensor] = []

        def hook(state, bucket):  # type: ignore[no-untyped-def]  # torch looks at annotations
            with torch.enable_grad():
                results.extend(saved([bucket.buffer()]))
            return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda f: f.value()[0])

        for kind in (DistributedDataParallel, ddp.DistributedDataParallel):
            net = kind(torch.nn.Linear(3, 2))
            net.register_comm_hook(None, hook)
            net(torch.ones(4, 3)).sum().backward()
            assert results
            must_be_noticed(results, "a bucket")
            results.clear()


@check
def tensors_of_inference_mode_have_no_counter(rank: int, path: str) -> None:
    with joined(rank, path), torch.inference_mode():
        for name in _calls(rank, torch.ones):
            for options in ({}, {}, {"async_op": True}):
                _awaited(_calls(rank, torch.ones)[name].call(**options))
        x = torch.ones(3)
        if rank:
            dist.send(x, 0)
        else:
            dist.recv(x, 1)
