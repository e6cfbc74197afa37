"""Tensors that torch's own backends take are taken, those they refuse are refused: Gloo and ours in one table. And what
one rank refuses in a call of ``torch.distributed``, all do."""

from __future__ import annotations

import datetime
import warnings

import pytest
import torch
import torch.distributed as dist

from symcomm import errors
from tests.support.ranks import run_ranks

pytestmark = pytest.mark.torch_versions

WORLD = 2


def begin(rank: int, path: str, backend: str):
    torch.set_num_threads(1)
    dist.init_process_group(
        backend, store=dist.FileStore(path, WORLD), rank=rank, world_size=WORLD,
        timeout=datetime.timedelta(seconds=20),
    )  # fmt: skip
    return dist.group.WORLD


# --- what is taken --------------------------------------------------------------------------------------------------


def kinds(rank: int) -> dict:
    values = torch.arange(4.0) + rank * 10
    return {
        "expanded": lambda: torch.tensor([1.0 + rank]).expand(4),
        "expanded rows": lambda: torch.tensor([[1.0 + rank, 2.0 + rank]]).expand(2, 2),
        "requires grad": lambda: values.clone().requires_grad_() * 2,
        "meta": lambda: torch.empty(4, device="meta"),
        "csr": lambda: torch.eye(2).to_sparse_csr(),
        "mkldnn": lambda: values.to_mkldnn(),
        "quantized": lambda: torch.quantize_per_tensor(values, 0.5, 0, torch.qint8),
        "empty": lambda: torch.empty(0),
        "transposed": lambda: values.clone().view(2, 2).t(),
    }


def calls(rank: int) -> dict:
    def zeros(x, n=1):
        return torch.zeros(n * x.numel())

    return {
        "all_reduce": lambda x: dist.all_reduce(x),
        "all_reduce max": lambda x: dist.all_reduce(x, dist.ReduceOp.MAX),
        "reduce": lambda x: dist.reduce(x, 0),
        "broadcast": lambda x: dist.broadcast(x, 0),
        "all_gather": lambda x: dist.all_gather([zeros(x).view(x.shape) for _ in range(WORLD)], x),
        "all_gather out": lambda x: dist.all_gather([x, x.clone()], torch.ones(x.shape)),
        "scatter out": lambda x: dist.scatter(x, [torch.ones(x.shape)] * WORLD if rank == 0 else None, 0),
        "all_to_all_single": lambda x: dist.all_to_all_single(zeros(x), x),
        "all_to_all_single out": lambda x: dist.all_to_all_single(x, torch.ones(x.shape)),
        "reduce_scatter_tensor": lambda x: dist.reduce_scatter_tensor(torch.zeros(x.numel() // WORLD), x),
    }


# Gloo reads and writes tensors that are not contiguous as if they were, beyond their memory: nothing to compare.
LEFT_OUT = {(call, "transposed") for call in calls(0)} | {
    ("all_gather out", kind) for kind in ("meta", "csr", "mkldnn")
}
LEFT_OUT |= {("all_gather out", "quantized"), ("all_gather", "quantized"), ("scatter out", "quantized")}
LEFT_OUT |= {("all_to_all_single", "quantized"), ("all_to_all_single out", "quantized")}
LEFT_OUT |= {("reduce_scatter_tensor", kind) for kind in ("quantized", "expanded rows")}  # torch's own checks of dtypes


LEFT_OUT |= {("reduce", "requires grad")}  # Gloo changes other ranks' tensors than the root's


# torch 2.10 has no collectives on meta tensors.
HAS_META = torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "Meta")


def seen(x) -> str:
    return "meta" if x.is_meta else str(x.tolist()) if x.layout == torch.strided and not x.is_quantized else ""


def outcome(act) -> str:
    """What a call says, in a form that backends share."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return f"took {act()}"
        except NotImplementedError:
            return "NotImplementedError"
        except TypeError:
            return "TypeError"
        except (RuntimeError, ValueError):
            return "refused"


def every_kind(rank: int, world: int, path: str, backend: str) -> dict:
    group = begin(rank, path, backend)
    found = {}
    for call, act in calls(rank).items():
        for kind, make in kinds(rank).items():
            if (call, kind) not in LEFT_OUT:
                x = make()
                found[call, kind] = outcome(lambda act=act, x=x: (act(x), seen(x))[1])
    found |= {("binding", name): outcome(act) for name, act in bindings(group, rank).items()}
    return found


def bindings(group, rank: int) -> dict:
    o, i = torch.zeros(2), torch.ones(4)
    lots = [torch.ones(2)] * WORLD

    def work(count=4):
        return dist.all_reduce(torch.ones(count), async_op=True)

    def sparse():
        tensor = torch.sparse_coo_tensor([[0, 1 + rank]], [1.0, 2.0], (4,), check_invariants=False)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            dist.all_reduce(tensor)
        return tensor.to_dense().tolist()

    return {
        **{f"wait({t!r})": lambda t=t: work().wait(t) for t in (1.0, 1, 0, None, "x", datetime.timedelta(seconds=9))},
        "wait of more": lambda: work(100_000).wait(1.0 * 20),
        "wait by name": lambda: work().wait(timeout=20.0),
        "_reduce_scatter_base": lambda: (group._reduce_scatter_base(outputTensor=o, inputTensor=i).wait(), o.tolist()),
        "reduce_scatter": lambda: (group.reduce_scatter(output=o, input=lots).wait(), o.tolist()),
        "allreduce": lambda: group.allreduce(tensor=torch.ones(2)).wait(),
        "broadcast": lambda: group.broadcast(tensor=torch.ones(2), root=0).wait(),
        "reduce": lambda: group.reduce(tensor=torch.ones(2), root=0).wait(),
        "allgather": lambda: group.allgather(output_tensors=[o, o.clone()], input_tensor=torch.ones(2)).wait(),
        "scatter": lambda: group.scatter(
            output_tensor=torch.ones(2), input_tensors=lots if rank == 0 else [], root=0
        ).wait(),
        "negative tag": lambda: group.send([o], 1 - rank, -1).wait(),
        "dist.send": lambda: dist.send(o, 1 - rank, tag=-1),
        "dist.irecv": lambda: dist.irecv(o, 1 - rank, tag=-1).wait(),
        "meta backend": lambda: group._get_backend(torch.device("meta")) and None,
        "meta message": lambda: dist.isend(torch.empty(2, device="meta"), 1 - rank).wait(),
        "sparse": sparse,
        "named": lambda: (Named(0, 1).getBackendName(), Named(0, 1).name()),
    }


class Named(dist.ProcessGroup):
    def getBackendName(self):
        return "mine"


def test_the_same_is_taken_as_by_gloo(tmp_path):
    gloo, ours = (
        run_ranks(every_kind, WORLD, str(tmp_path / name), name, deadline=110) for name in ("gloo", "symcomm")
    )
    differ = [
        f"rank {rank} {row}: Gloo {theirs[row]}, ours {mine[row]}"
        for rank, (theirs, mine) in enumerate(zip(gloo, ours, strict=True))
        for row in theirs
        if theirs[row] != mine[row] and not (row[1].startswith("meta") and not HAS_META)
    ]
    assert not differ, "\n".join(differ)


# --- what one rank refuses ------------------------------------------------------------------------------------------


def wrong_calls(group, rank: int) -> dict:
    """(the right call, wrong ones)"""
    ones = torch.ones
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 1
    right = dist.BroadcastOptions()
    right.rootRank = 0
    lots = [ones(2) for _ in range(WORLD)]
    return {
        "broadcast": (
            lambda: group.broadcast([ones(2)], right).wait(),
            [
                lambda: group.broadcast([ones(2)], options).wait(),
                lambda: group.broadcast("x", right),
                lambda: group.broadcast(ones(2), 7),
                lambda: group.broadcast([], right),
            ],
        ),
        "all_reduce": (
            lambda: dist.all_reduce(ones(4)),
            [
                lambda: dist.all_reduce(torch.quantize_per_tensor(ones(4), 0.5, 0, torch.qint8)),
                lambda: dist.all_reduce(torch.eye(2).to_sparse_csr()),
                lambda: group.allreduce([ones(4)], 3.5j),
                lambda: group.allreduce([ones(4), ones(3)]),
                lambda: dist.all_reduce(ones(4), dist.ReduceOp.BAND),
                lambda: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX),
            ],
        ),
        "async": (lambda: dist.all_reduce(ones(4), async_op=True).wait(), [lambda: group.allreduce("x").wait()]),
        "all_gather": (
            lambda: dist.all_gather([ones(2) for _ in lots], ones(2)),
            [lambda: dist.all_gather([ones(2)], ones(2)), lambda: dist.all_gather([ones(1).expand(2)] * 2, ones(2))],
        ),
        "all_to_all": (
            lambda: dist.all_to_all([ones(2) for _ in lots], lots),
            [lambda: dist.all_to_all([ones(2)], lots)],
        ),
        "all_to_all_single": (
            lambda: dist.all_to_all_single(ones(4), ones(4), [2, 2], [2, 2]),
            [
                lambda: dist.all_to_all_single(ones(4), ones(4), ones(2), [2, 2]),
                lambda: dist.all_to_all_single(ones(4), ones(4), [2, 2], [3, 3]),
            ],
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter(ones(2), lots),
            [lambda: dist.reduce_scatter(ones(2), lots[1:]), lambda: group.reduce_scatter([ones(2)] * 2, [lots])],
        ),
        "coalesced": (lambda: coalesced(ones(2), ones(2)), [lambda: coalesced(ones(2), torch.eye(2).to_sparse_csr())]),
        "several": (
            lambda: group.allreduce([ones(2), ones(2)]).wait(),
            [lambda: group.allreduce([ones(2), 7]), lambda: group.allreduce([ones(2), ones(3)])],
        ),
        "sparse": (
            lambda: dist.all_reduce(torch.eye(2).to_sparse()),
            [lambda: dist.all_reduce(torch.eye(2).to_sparse(), dist.ReduceOp.MAX)],
        ),
        "barrier": (lambda: dist.barrier(), [lambda: group.barrier(timeout="soon")]),
        "monitored_barrier": (
            lambda: group.monitored_barrier(),
            [
                lambda: group.monitored_barrier(wait_all_ranks="yes"),
                lambda: group.monitored_barrier(timeout="soon"),
                lambda: group.monitored_barrier(datetime.timedelta(0)),
            ],
        ),
        "objects": (
            lambda: dist.all_gather_object([None] * WORLD, 1),
            [lambda: group.core.all_gather_object(lambda: 1)],
        ),
    }  # fmt: skip


def coalesced(*tensors) -> None:
    with dist.distributed_c10d._coalescing_manager(async_ops=True) as manager:
        for tensor in (*tensors, torch.ones(2)):
            dist.all_reduce(tensor)
    manager.wait()


def one_rank_refuses(rank: int, world: int, path: str, level: str) -> list[str]:
    dist.set_debug_level(getattr(dist.DebugLevel, level))
    group = begin(rank, path, "symcomm")
    wrong = []
    calls = wrong_calls(group, rank)
    if level == "DETAIL":
        del calls["objects"]  # whose wrong call is one of the group below, which compares nothing before
    for name, (right, bad) in calls.items():
        for k, act in enumerate(bad):
            for who in range(WORLD):
                try:
                    (act if who == rank else right)()
                    said: BaseException | None = None
                except Exception as error:
                    said = error
                is_told = isinstance(said, errors.CallRefusedError)
                if level == "DETAIL" and isinstance(said, errors.CollectiveMismatchError):
                    continue  # all ranks compared their tensors, and saw it
                if said is None or is_told != (who != rank) or (is_told and "test_refusals_torch.py:" not in str(said)):
                    wrong.append(f"{name} {k} by {who}: {said!r}")
                total = torch.full((4,), rank + 1.0)
                dist.all_reduce(total)
                if total.tolist() != [3.0] * 4:
                    wrong.append(f"{name} {k} by {who}: {total}")
    return wrong


@pytest.mark.parametrize("level", ["OFF", "DETAIL"])
def test_what_one_rank_refuses_all_do(tmp_path, level):
    """Also where ranks compare their calls before they make them."""
    assert run_ranks(one_rank_refuses, WORLD, str(tmp_path / "store"), level) == [[], []]


def expanded_alone(rank: int, world: int, path: str) -> list[object]:
    """An output whose elements are one in memory takes a result that has one value there, and no other."""
    begin(rank, path, "symcomm")
    found: list[object] = []
    for values in ([3.0, 3.0], [3.0, 4.0]):
        for asynchronous in (False, True):
            place = torch.tensor(values) if rank == 0 else torch.zeros(1).expand(2)
            try:
                work = dist.broadcast(place, 0, async_op=asynchronous)
                if work is not None:
                    work.wait()
                found.append(place.tolist())
            except errors.BadArgumentError as error:
                found.append(str(error)[:20])
    total = torch.ones(2)
    dist.all_reduce(total)
    return [*found, total.tolist()]


def test_an_expanded_output_holds_one_value(tmp_path):
    first, second = run_ranks(expanded_alone, WORLD, str(tmp_path / "store"))
    assert first == [[3.0, 3.0], [3.0, 3.0], [3.0, 4.0], [3.0, 4.0], [2.0, 2.0]]
    assert second == [[3.0, 3.0], [3.0, 3.0], *["the result differs b"] * 2, [2.0, 2.0]]
