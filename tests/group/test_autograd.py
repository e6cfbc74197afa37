"""Autograd is told of every tensor that a call writes, whichever way it takes, so that no gradient is computed from
overwritten values.

The same through torch.distributed, and a comparison with Gloo, is in tests/torch_backend/checks/autograd.py.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import symcomm
from symcomm import errors, symm_mem, testing
from symcomm._core import native
from symcomm.group import torch_layout, torch_values
from symcomm.group.buffers import torch_dtypes
from symcomm.group.p2p import ANY_SOURCE, Message
from symcomm.group.process_group import ProcessGroup
from symcomm.types import RedOpType
from tests.support.autograd import LEAF, Case, check, must_be_noticed, saved

pytestmark = pytest.mark.torch_versions

WORLD = 2
New = Callable[[int], torch.Tensor]


def cases(g: ProcessGroup, new: New, n: int = 3) -> dict[str, Case]:
    x, y, z, b, c, part, piece, got, came, sub = (new(n) for _ in range(10))
    row, taken, swapped, sent, lists = ([new(n) for _ in range(WORLD)] for _ in range(5))
    whole, six, gathered, flat, mine = (new(WORLD * n) for _ in range(5))
    root = g.rank == 1
    return {
        "all_reduce": Case(lambda **o: g.all_reduce(x, **o), [x], []),
        "premul": Case(lambda **o: g.all_reduce(c, symcomm.make_premul_sum(2.0), **o), [c], []),
        "reduce": Case(lambda **o: g.reduce(y, 1, **o), [y] if root else [], [] if root else [y]),
        "broadcast": Case(lambda **o: g.broadcast(b, 1, **o), [] if root else [b], [b] if root else []),
        "reduce_scatter_single": Case(lambda **o: g.reduce_scatter_single(part, six, **o), [part], [six]),
        "reduce_scatter": Case(lambda **o: g.reduce_scatter(piece, sent, **o), [piece], sent),
        "all_gather_single": Case(lambda **o: g.all_gather_single(whole, z, **o), [whole], [z]),
        "all_gather": Case(lambda **o: g.all_gather(row, z, **o), row, [z]),
        "gather": Case(lambda **o: g.gather(taken if root else None, z, 1, **o), taken if root else [], [z]),
        "gather_single": Case(
            lambda **o: g.gather_single(gathered if root else None, z, 1, **o), [gathered] if root else [], [z]
        ),
        "scatter": Case(lambda **o: g.scatter(got, sent if root else None, 1, **o), [got], sent if root else []),
        "scatter_single": Case(
            lambda **o: g.scatter_single(came, six if root else None, 1, **o), [came], [six] if root else []
        ),
        "all_to_all_single": Case(lambda **o: g.all_to_all_single(flat, six, **o), [flat], [six]),
        "all_to_all_single, splits": Case(
            lambda **o: g.all_to_all_single(mine, six, [n, n], [n, n], **o), [mine], [six]
        ),
        "all_to_all": Case(lambda **o: g.all_to_all(swapped, sent, **o), swapped, sent),
        "all_reduce_coalesced": Case(lambda **o: g.all_reduce_coalesced([x, sub], **o), [x, sub], []),
        "all_gather_coalesced": Case(lambda **o: g.all_gather_coalesced([whole], [z], **o), [whole], [z]),
        "all_gather_lists": Case(lambda **o: g.all_gather_lists([[lists[0]], [lists[1]]], [z], **o), lists, [z]),
        "reduce_scatter_coalesced": Case(lambda **o: g.reduce_scatter_coalesced([part], [six], **o), [part], [six]),
    }  # fmt: skip


REFUSE = {
    "reduce_scatter_single", "reduce_scatter", "all_gather_single", "all_gather", "gather", "gather_single",
    "all_to_all", "all_reduce_coalesced", "all_gather_coalesced", "all_gather_lists", "reduce_scatter_coalesced",
}  # fmt: skip
CACHED = {
    "all_reduce", "reduce", "broadcast", "reduce_scatter_single", "reduce_scatter", "all_gather_single", "all_gather",
    "gather", "gather_single", "scatter", "scatter_single", "all_to_all_single",
}  # fmt: skip


def _ordinary(n: int) -> torch.Tensor:
    return torch.ones(n)


def _slice(n: int) -> torch.Tensor:
    return torch.ones(n + 2)[1:-1]


def _every_second(n: int) -> torch.Tensor:
    return torch.ones(2 * n)[::2]


class Subclass(torch.Tensor):
    pass


KINDS: dict[str, New] = {
    "ordinary": _ordinary,
    "symmetric": lambda n: symm_mem.empty(n).fill_(1.0),
    "slice": _slice,
    "subclass": lambda n: torch.ones(n).as_subclass(Subclass),  # type: ignore[dict-item]
    "not contiguous": _every_second,
}
SHORT_KINDS = ("ordinary", "symmetric", "slice")


def _ways(g: ProcessGroup, name: str, new: New, is_short: bool) -> None:
    """The first call, one that is known by then, one with a time-out, and one that is awaited later."""
    check(case := cases(g, new)[name], case.call, f"{name}, first")
    before = g.call_stats()["collectives"]["short"] if not g.spans_hosts else 0
    check(case := cases(g, new)[name], case.call, f"{name}, again")
    if is_short and name in CACHED and not g.spans_hosts:
        assert g.call_stats()["collectives"]["short"] == before + 1, f"{name} has left the fast path"
    check(case := cases(g, new)[name], lambda: case.call(timeout=9.0), f"{name}, long")
    check(case := cases(g, new)[name], lambda: case.call(async_op=True).wait(), f"{name}, asynchronous")
    check(case := cases(g, new, 5000)[name], lambda: case.call(async_op=True).wait(), f"{name}, large")


def _every_call(g: ProcessGroup, kinds: dict[str, New], is_short: bool = True) -> None:
    for kind, new in kinds.items():
        for name in cases(g, new):
            _ways(g, name, new, is_short and kind in SHORT_KINDS)


@pytest.mark.parametrize("hosts", [None, [1, 1]], ids=["one host", "two hosts"])
def test_every_call_tells_autograd_what_it_writes_and_nothing_else(hosts: list[int] | None):
    symcomm.spawn(_every_call, WORLD, (KINDS,), mode="threads", hosts=hosts, timeout=20, deadline=110)


def test_where_the_counter_cannot_be_found_torch_raises_it():
    api, kinds = torch.Tensor.__dlpack_c_exchange_api__, (torch.Tensor, torch.nn.Parameter)
    layout = torch_layout.tensor_layout(torch)
    torch_dtypes()
    ordinary = {"ordinary": _ordinary, "slice": _slice}
    autograd = torch.autograd.graph.increment_version, torch.is_grad_enabled
    for other in (None, (*layout[:4], -1, -1)):
        native.use_tensors(kinds, api, other)
        native.use_autograd(*autograd, 0)
        try:
            symcomm.spawn(_every_call, WORLD, (ordinary,), mode="threads", timeout=20, deadline=60)
            symcomm.spawn(_messages, WORLD, mode="threads", timeout=20, deadline=60)
            symcomm.spawn(_refusals, WORLD, mode="threads", timeout=20, deadline=60)
        finally:
            native.use_tensors(kinds, api, layout)
            native.use_values(torch_values.value_layout(torch))
            native.use_autograd(*autograd, torch_layout.asks_requires_grad(torch))


# --- the counter ----------------------------------------------------------------------------------------------------


def test_views_share_the_counter_with_their_base():
    torch_dtypes()
    base = torch.zeros(8)
    view, alias, copy = base[2:], base.detach(), base.data
    for tensor in (base, view, alias, base.view(2, 4)):
        before = base._version
        native.change_tensors(tensor)
        assert base._version == view._version == alias._version == before + 1
    assert copy._version == 0, "what .data gives has a counter of its own"
    native.change_tensors((base, view, 7, None, "x"))
    assert base._version == before + 3


def _kept(g: ProcessGroup) -> None:
    x, y = torch.ones(3), torch.ones(3)
    results = saved([x, y])
    assert native.keep_versions(True) is False
    try:
        g.all_reduce(x)
        work = g.all_reduce(y, async_op=True)
    finally:
        assert native.keep_versions(False) is True
    work.wait()
    for result in results:
        result.backward()
    results = saved([x])
    g.all_reduce(x)
    must_be_noticed(results, "after that")


@pytest.mark.parametrize("hosts", [None, [1, 1]], ids=["one host", "two hosts"])
def test_a_thread_may_keep_versions_while_it_calls(hosts: list[int] | None):
    """As DistributedDataParallel's buffer hooks do: see torch_patches/buffer_hook.py."""
    symcomm.spawn(_kept, WORLD, mode="threads", hosts=hosts, timeout=20, deadline=60)


@testing.ranks(WORLD, timeout=20, deadline=60)
def test_what_is_written_through_a_view_counts_for_all_of_its_memory(g: ProcessGroup):
    base = torch.ones(6)
    results = saved([base, base[:3], base[2:]])
    g.all_reduce(base[4:])
    must_be_noticed(results, "a view was written")
    results = saved([base[:2]])
    g.all_reduce(base)
    must_be_noticed(results, "the base was written")


def _without_counter(g: ProcessGroup) -> None:
    def new(n: int) -> torch.Tensor:
        with torch.inference_mode():
            return torch.ones(n)

    for name in cases(g, new):
        for options in ({}, {}, {"timeout": 9.0}, {"async_op": True}):
            case = cases(g, new)[name]
            work = case.call(**options)
            if work is not None:
                work.wait()
            assert not any(not t.is_inference() for t in case.written)
    x, peer = new(3), 1 - g.rank
    for work in g.batch([Message.send(new(3), peer), Message.receive(x, peer)]):
        work.wait()
    if g.rank:
        g.send(x, 0)
    else:
        g.recv(x, 1)
    window = g.new_window(torch.ones(3))
    with torch.inference_mode():
        window.put(x, peer)
        window.signal(peer)
        window.wait_signal(peer)
    window.tensor_deregister()


@pytest.mark.parametrize("hosts", [None, [1, 1]], ids=["one host", "two hosts"])
def test_tensors_of_inference_mode_have_no_counter_and_work_everywhere(hosts: list[int] | None):
    symcomm.spawn(_without_counter, WORLD, mode="threads", hosts=hosts, timeout=20, deadline=60)


# --- while an operation runs ----------------------------------------------------------------------------------------


def _in_flight(hosts: list[int] | None) -> None:
    """Rank 0 saves tensors before an asynchronous call, and while it runs; rank 1 comes when it has."""
    has_saved = threading.Event()

    def rank(g: ProcessGroup) -> None:
        x, y = torch.ones(3), torch.ones(3)
        if g.rank == 1:
            assert has_saved.wait(20)
            g.all_reduce(x)
            g.send(y, 0)
            return
        work, message = g.all_reduce(x, async_op=True), g.irecv(y, 1)
        meanwhile = saved([x, y])
        has_saved.set()
        work.wait()
        message.wait()
        must_be_noticed(meanwhile, "saved while it ran")
        after = saved([x, y])
        for waited in (work, message, work, message):  # once more
            waited.wait()
        assert work.is_completed() and message.is_completed()
        for result in after:
            result.backward()

    symcomm.spawn(rank, WORLD, mode="threads", hosts=hosts, timeout=20, deadline=60)


@pytest.mark.parametrize("hosts", [None, [1, 1]], ids=["one host", "two hosts"])
def test_what_is_saved_while_an_operation_runs_is_noticed_too(hosts: list[int] | None):
    _in_flight(hosts)


def _ordered(g: ProcessGroup) -> None:
    tensors = [torch.ones(3) for _ in range(4)]
    works = [g.all_reduce(t, async_op=True) for t in tensors]
    works[-1].wait()  # operations of a group end in order
    results = saved(tensors)
    for work in works:
        work.wait()
    g.all_reduce(torch.ones(1), async_op=True).wait()
    for result in results:
        result.backward()


def test_a_work_that_is_awaited_late_changes_nothing():
    for _ in range(5):
        symcomm.spawn(_ordered, WORLD, mode="threads", timeout=20, deadline=60)


# --- messages, windows, plans, NumPy ----------------------------------------------------------------------------------


def _receives(g: ProcessGroup, x: torch.Tensor) -> dict[str, Callable[[], Any]]:
    return {
        "recv": lambda: g.recv(x, 1),
        "recv, long": lambda: g.recv(x, 1, timeout=9.0),
        "recv from any": lambda: g.recv(x, ANY_SOURCE),
        "irecv": lambda: g.irecv(x, 1).wait(),
        "irecv from any": lambda: g.irecv(x).wait(),
        "batch": lambda: g.batch([Message.receive(x, 1)])[0].wait(),
    }


def _messages(g: ProcessGroup) -> None:
    for n in (3, 300_000):
        for kind, new in KINDS.items():
            for name in _receives(g, torch.ones(1)):
                x = new(n)
                if g.rank == 1:
                    check(Case(lambda: None, [], [x]), lambda x=x: g.send(x, 0), "send")
                else:
                    check(Case(lambda: None, [x], []), _receives(g, x)[name], f"{name}, {kind}, {n}")
        x = torch.ones(n)
        if g.rank == 1:
            check(Case(lambda: None, [], [x]), lambda x=x: g.isend(x, 0).wait(), "isend")
        else:
            g.recv(x, 1)


@pytest.mark.parametrize("hosts", [None, [1, 1]], ids=["one host", "two hosts"])
def test_every_receive_tells_autograd_and_no_send_does(hosts: list[int] | None):
    symcomm.spawn(_messages, WORLD, mode="threads", hosts=hosts, timeout=20, deadline=60)


def _windows(g: ProcessGroup, owning: bool) -> None:
    mine, source, peer = torch.ones(4), torch.ones(2), 1 - g.rank
    window = g.new_window()
    window.tensor_register(mine, owning)

    def exchange(**options: Any) -> None:
        window.put(source, peer)
        window.signal(peer)
        work = window.wait_signal(peer, **options)
        work.wait()

    for what, act in {
        "wait_signal": exchange,
        "wait_signal, long": lambda: exchange(timeout=9.0),
        "wait_signal, asynchronous": lambda: exchange(async_op=True),
        "put to itself": lambda: window.put(source, g.rank),
        "put to itself, long": lambda: window.put(source, g.rank, timeout=9.0),
    }.items():
        check(Case(lambda: None, [mine], [source]), act, what)
        g.barrier()
    quiet = saved([mine])
    window.signal(peer)  # to take a signal is what counts, not to send one
    for result in quiet:
        result.backward()
    window.wait_signal(peer)
    if owning:
        check(Case(lambda: None, [mine], []), lambda: window.map_remote_tensor(g.rank).fill_(2.0), "through the map")
        g.barrier()
    left = saved([mine])
    window.put(source, peer)
    window.tensor_deregister()
    must_be_noticed(left, "tensor_deregister")


@pytest.mark.parametrize("owning", [True, False], ids=["owning", "not owning"])
@pytest.mark.parametrize("hosts", [None, [1, 1]], ids=["one host", "two hosts"])
def test_a_window_tells_autograd_when_what_was_put_is_there(hosts: list[int] | None, owning: bool):
    symcomm.spawn(_windows, WORLD, (owning,), mode="threads", hosts=hosts, timeout=20, deadline=60)


@testing.ranks(WORLD, timeout=20, deadline=60)
def test_plans_of_callers_own_tell_autograd(g: ProcessGroup):
    from symcomm import collectives

    plan = collectives.all_reduce(g.rank, g.size, 3, symcomm.DType.FLOAT32, RedOpType.SUM, limits=g.plan_limits)
    for options in ({}, {"async_op": True}):
        x, out = torch.ones(3), torch.zeros(3)

        def act(x: Any = x, out: Any = out, options: Any = options) -> None:
            work = g.run_plan("mine", plan, [x], [out], **options)
            if work is not None:
                work.wait()

        check(Case(lambda: None, [out], [x]), act, "run_plan")


# --- what autograd refuses --------------------------------------------------------------------------------------------


def _leaf(n: int) -> torch.Tensor:
    return torch.ones(n, requires_grad=True)


def _refused(g: ProcessGroup, name: str, options: dict[str, Any]) -> None:
    case = cases(g, _leaf)[name]
    if case.written and name in REFUSE:
        with pytest.raises(errors.OutputRefusedError, match=LEAF):
            case.call(**options)
        assert all(t._version == 0 and t.tolist() == [1.0] * len(t) for t in case.written), name
    else:  # a program may reduce its parameters, or have them broadcast
        work = case.call(**options)
        if work is not None:
            work.wait()
        assert all(t._version for t in case.written), name


def _refusals(g: ProcessGroup) -> None:
    for name in cases(g, _leaf):
        for options in ({}, {}, {"timeout": 9.0}, {"async_op": True}):
            _refused(g, name, options)
            with torch.no_grad():
                case = cases(g, _leaf)[name]
                work = case.call(**options)
                if work is not None:
                    work.wait()
                assert all(t._version for t in case.written), name
    g.barrier()


@pytest.mark.parametrize("hosts", [None, [1, 1]], ids=["one host", "two hosts"])
def test_leaves_that_require_grad_are_refused_in_torchs_words(hosts: list[int] | None):
    symcomm.spawn(_refusals, WORLD, mode="threads", hosts=hosts, timeout=20, deadline=60)


def _refused_on_one(g: ProcessGroup) -> None:
    """The other rank gets its values, and the group goes on."""
    for options in ({}, {"timeout": 9.0}, {"async_op": True}):
        for name in sorted(REFUSE):
            case = cases(g, _leaf if g.rank == 1 else _ordinary)[name]
            if case.written and g.rank == 1:
                with pytest.raises(errors.OutputRefusedError, match=LEAF):
                    case.call(**options)
                assert all(t.tolist() == [1.0] * len(t) for t in case.written), name
            else:
                work = case.call(**options)
                if work is not None:
                    work.wait()
                value = 2.0 if "reduce" in name else 1.0
                assert all(t.tolist() == [value] * len(t) for t in case.written), name
            g.barrier()


@pytest.mark.parametrize("hosts", [None, [1, 1]], ids=["one host", "two hosts"])
def test_a_refusal_on_one_rank_leaves_the_others_their_results(hosts: list[int] | None):
    symcomm.spawn(_refused_on_one, WORLD, mode="threads", hosts=hosts, timeout=20, deadline=60)


@testing.ranks(WORLD, timeout=20, deadline=60)
def test_outputs_that_were_computed_lose_their_history(g: ProcessGroup):
    for kind in ("plain", "view"):
        for _ in range(2):
            x = torch.ones(3, requires_grad=True)
            b = (x * 2 if kind == "plain" else (x * 2)[:]).contiguous()
            g.all_gather([b, torch.empty(3)] if g.rank == 0 else [torch.empty(3), b], torch.full((3,), 5.0))
            assert b.tolist() == [5.0] * 3
            (b * b).sum().backward()
            assert x.grad is not None and x.grad.tolist() == [0.0] * 3, "b has nothing to do with x any more"
    x = torch.ones(4, requires_grad=True)
    with pytest.raises(errors.OutputRefusedError, match="a view of a leaf Variable"):
        g.all_gather([x[:2], x[2:]], torch.ones(2))
