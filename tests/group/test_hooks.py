"""Hooks see every call of a group, as torch 2.15 has it; without them the fast path is taken."""

from __future__ import annotations

import os
import pickle
import signal
import threading
import time
import warnings
from typing import Any

import pytest
import torch

import symcomm
from symcomm import HookOpName, Message, errors
from symcomm.group.call_hooks import GROUP_CALLS
from tests.support.hook_log import Log
from tests.support.ranks import run_ranks

pytestmark = [pytest.mark.torch_versions, pytest.mark.timeout(120)]


def on_threads(work: Any, ranks: int = 2, **options: Any) -> list[Any]:
    return symcomm.spawn(work, ranks, mode="threads", deadline=60, **options)


# --- our own groups ---------------------------------------------------------------------------------------------------

ONE, TWO, FOUR = (1,), (2,), (4,)


def every_call(g: Any) -> list[tuple[str, Any, Any]]:
    """(what, the call, what a pre-hook is told: names, root, sizes of inputs and outputs)"""
    t, peer, at_root = torch.ones, 1 - g.rank, g.rank == 1
    two = [t(2), t(2)]
    messages = [Message.send(t(2), peer), Message.receive(t(2), peer)]
    both = [("SEND", peer, [TWO], []), ("RECV", peer, [], [TWO])]
    return [
        ("all_reduce", lambda a: g.all_reduce(t(2), async_op=a), [("ALLREDUCE", -1, [TWO], [])]),
        ("reduce", lambda a: g.reduce(t(2), 1, async_op=a), [("REDUCE", 1, [TWO], [])]),
        ("broadcast", lambda a: g.broadcast(t(2), 1, async_op=a), [("BROADCAST", 1, [TWO], [])]),
        ("all_gather", lambda a: g.all_gather([t(2), t(2)], t(2), async_op=a), [("ALLGATHER", -1, [TWO], [TWO, TWO])]),
        ("all_gather_single", lambda a: g.all_gather_single(t(4), t(2), async_op=a),
         [("ALLGATHER_BASE", -1, [TWO], [FOUR])]),
        ("reduce_scatter", lambda a: g.reduce_scatter(t(2), two, async_op=a),
         [("REDUCE_SCATTER", -1, [TWO, TWO], [TWO])]),
        ("reduce_scatter_single", lambda a: g.reduce_scatter_single(t(2), t(4), async_op=a),
         [("REDUCE_SCATTER_BASE", -1, [FOUR], [TWO])]),
        ("gather", lambda a: g.gather([t(2), t(2)] if at_root else None, t(2), 1, async_op=a),
         [("GATHER", 1, [TWO], [TWO, TWO] if at_root else [])]),
        ("gather_single", lambda a: g.gather_single(t(4) if at_root else None, t(2), 1, async_op=a),
         [("GATHER", 1, [TWO], [FOUR] if at_root else [])]),
        ("scatter", lambda a: g.scatter(t(2), two if at_root else None, 1, async_op=a),
         [("SCATTER", 1, [TWO, TWO] if at_root else [], [TWO])]),
        ("scatter_single", lambda a: g.scatter_single(t(2), t(4) if at_root else None, 1, async_op=a),
         [("SCATTER", 1, [FOUR] if at_root else [], [TWO])]),
        ("all_to_all", lambda a: g.all_to_all([t(2), t(2)], two, async_op=a), [("ALLTOALL", -1, [TWO] * 2, [TWO] * 2)]),
        ("all_to_all_single", lambda a: g.all_to_all_single(t(2), t(2), async_op=a),
         [("ALLTOALL_BASE", -1, [TWO], [TWO])]),
        ("barrier", lambda a: g.barrier(async_op=a), [("BARRIER", -1, [], [])]),
        ("all_reduce_coalesced", lambda a: g.all_reduce_coalesced([t(2), t(1)], async_op=a),
         [("ALLREDUCE_COALESCED", -1, [TWO, ONE], [])]),
        ("all_gather_coalesced", lambda a: g.all_gather_coalesced([t(4)], [t(2)], async_op=a),
         [("ALLGATHER_INTO_TENSOR_COALESCED", -1, [TWO], [FOUR])]),
        ("reduce_scatter_coalesced", lambda a: g.reduce_scatter_coalesced([t(2)], [t(4)], async_op=a),
         [("REDUCE_SCATTER_TENSOR_COALESCED", -1, [FOUR], [TWO])]),
        ("monitored_barrier", lambda a: g.monitored_barrier(), [("BARRIER", -1, [], [])]),
        ("all_gather_bytes", lambda a: g.all_gather_bytes(b"x"), [("ALLGATHER", -1, [], [])]),
        ("batch", lambda a: [w.wait() for w in g.batch(messages)], both),
        ("isend", lambda a: [w.wait() for w in (g.isend(t(2), peer), g.irecv(t(2), peer))], both),
        ("send", lambda a: (g.send(t(2), 1) if g.rank == 0 else g.recv(t(2), 0)),
         [("RECV", 0, [], [TWO]) if at_root else ("SEND", 1, [TWO], [])]),
        ("split", lambda a: g.split(0), [("SPLIT", -1, [], [])]),
        ("new_group", lambda a: g.new_group([0, 1]), [("SPLIT", -1, [], [])]),
    ]  # fmt: skip


def seen_by_hooks(g: Any) -> None:
    log, number = Log(g), 0
    always = {"batch": True, "isend": True}
    never = {"monitored_barrier", "all_gather_bytes", "send", "split", "new_group"}
    for is_async in (False, True):
        for what, call, told in every_call(g):
            log.said.clear()
            work = call(is_async)
            if is_async and hasattr(work, "wait"):
                work.wait()
            shown = always.get(what, is_async and what not in never)
            ids = range(number, number + len(told))
            number += len(told)
            pre = [("pre", name, k, shown, *rest) for k, (name, *rest) in zip(ids, told, strict=True)]
            post = [("post", name, k, shown, shown) for k, (name, *_) in zip(ids, told, strict=True)]
            assert [x for x in log.said if x[0] == "pre"] == pre, (what, log.said)
            assert [x for x in log.said if x[0] == "post"] == post, (what, log.said)
    g.unregister_pre_hook(1)
    g.unregister_post_hook(1)
    log.said.clear()
    for _, call, _ in every_call(g):
        call(False)
    assert log.said == []
    assert not {what for what, *_ in every_call(g)} & set(vars(g))


def test_every_call_of_a_group_is_seen():
    on_threads(seen_by_hooks)


def names_the_calls(g: Any) -> None:
    told = {what for what, *_ in every_call(g)}
    assert GROUP_CALLS.methods.keys() - told == {"all_gather_lists", "irecv", "new_window", "recv"}, (
        "add it to every_call"
    )
    of_others = {name for name in dir(type(g)) if name.endswith(("_object", "_shards"))}
    public = {name for name in symcomm.__all__ if callable(getattr(type(g), name, None))}
    unseen = public - GROUP_CALLS.methods.keys() - of_others - {"destroy", "shard_range"}
    assert unseen == set(), "hooks do not see these: they need a CallSpec in group/call_hooks.py"


def test_every_public_call_is_one_that_hooks_see():
    on_threads(names_the_calls, ranks=1)


def test_every_call_across_hosts_is_seen():
    on_threads(seen_by_hooks, hosts=[1, 1])


def rules(g: Any) -> None:
    said: list[Any] = []
    for number in (7, -2, 3):
        g.register_pre_hook(number, lambda args, number=number: said.append(number))
    g.barrier()
    assert said == [-2, 3, 7]  # in the order of ids, not of registration
    g.register_pre_hook(3, lambda args: said.append("replaced"))
    said.clear()
    g.barrier()
    assert said == [-2, "replaced", 7]
    g.unregister_pre_hook(99)
    g.unregister_post_hook(99)
    g.unregister_abort_hook(99)

    def refuse(args: Any) -> None:
        raise KeyError("no")

    g.register_post_hook(0, lambda args: said.append("post"))
    g.register_pre_hook(5, refuse)
    said.clear()
    value, before = torch.ones(2), g.sequence_number
    with pytest.raises(KeyError, match="no"):
        g.all_reduce(value)
    assert said == [-2, "replaced"]  # neither later hooks nor the call
    assert value.tolist() == [1, 1] and g.sequence_number == before + 1  # the number of the call that was refused
    g.unregister_pre_hook(5)
    g.register_post_hook(1, refuse)
    with pytest.raises(KeyError, match="no"):
        g.all_reduce(value)
    assert value.tolist() == [2, 2]  # the call had been made
    g.unregister_post_hook(1)
    for register in (g.register_pre_hook, g.register_post_hook, g.register_abort_hook):
        with pytest.raises(errors.BadArgumentError, match="hook_id must be a whole number, got '1'"):
            register("1", refuse)
        with pytest.raises(errors.BadArgumentError, match="hook must be a function of (no|one) argument, got 3"):
            register(1, 3)


def test_rules_of_hooks():
    on_threads(rules)


def test_a_hook_may_call_the_group_itself():
    def work(g: Any) -> Any:
        seen = []

        def hook(args: Any) -> None:
            seen.append(args.name)
            g.barrier()

        g.register_pre_hook(1, hook)
        g.all_reduce(torch.ones(1))
        return seen

    assert on_threads(work) == [[HookOpName.ALLREDUCE]] * 2


def test_a_failed_call_has_no_post_hook():
    def work(g: Any) -> Any:
        log = Log(g)
        with pytest.raises(errors.BadArgumentError, match="root"):
            g.broadcast(torch.ones(1), root=9)
        return [kind for kind, *_ in log.said]

    assert on_threads(work) == [["pre"]] * 2


def test_groups_with_hooks_are_let_go():
    """A group that nobody holds any more goes at once, hooks or not."""
    import weakref

    def work(g: Any) -> bool:
        part = g.new_group([0, 1])
        part.register_pre_hook(1, lambda args: None)
        part.barrier()
        ref = weakref.ref(part)
        del part
        return ref() is None

    assert on_threads(work) == [True, True]


# --- aborts -----------------------------------------------------------------------------------------------------------


def aborted(g: Any) -> Any:
    ran: list[str] = []
    for number in (2, 1):
        g.register_abort_hook(number, lambda number=number: ran.append(str(number)))
    g.register_abort_hook(3, lambda: ran.append("gone"))
    g.unregister_abort_hook(3)
    g.barrier()
    assert ran == [] and g.supports_abort_hooks and g.supports_completion_hooks
    if g.rank == 0:
        g.abort()
        assert ran == ["1", "2"]
    for _ in range(2):
        with pytest.raises(errors.SymcommError):
            g.all_reduce(torch.ones(1))
    g.abort()
    return ran


@pytest.mark.parametrize("hosts", [{}, {"hosts": [1, 1]}], ids=["one host", "two hosts"])
def test_abort_hooks_run_once_on_every_rank(hosts: dict[str, Any]):
    assert on_threads(aborted, **hosts) == [["1", "2"]] * 2


def test_abort_hooks_run_when_a_rank_is_late():
    over = threading.Event()

    def work(g: Any) -> Any:
        ran: list[int] = []
        g.register_abort_hook(1, lambda: ran.append(1))
        if g.rank == 0:
            with pytest.raises(errors.DeadlineError):
                g.barrier(timeout=0.2)
            over.set()
        else:
            assert over.wait(30) and ran == []
            with pytest.raises(errors.SymcommError):
                g.barrier()  # which is how this rank learns of it
        return ran

    assert on_threads(work) == [[1], [1]]


def test_a_leaving_group_does_not_abort():
    def work(g: Any) -> Any:
        ran: list[int] = []
        g.register_abort_hook(1, lambda: ran.append(1))
        g.barrier()
        g.destroy()
        return ran

    assert on_threads(work) == [[], []]


def test_what_an_abort_hook_raises_is_told_and_goes_no_further():
    def work(g: Any) -> Any:
        ran: list[int] = []

        def bad() -> None:
            raise KeyError("oh")

        g.register_abort_hook(1, bad)
        g.register_abort_hook(2, lambda: ran.append(1))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            g.abort()
        assert ["an abort hook raised KeyError" in str(w.message) for w in caught] == [True]
        return ran

    assert on_threads(work, 1) == [[1]]


def death(rank: int, world: int, path: str) -> Any:
    group = symcomm.init(store=symcomm.FileStore(path), rank=rank, world_size=world)
    ran: list[int] = []
    group.register_abort_hook(1, lambda: ran.append(1))
    group.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(errors.RankFailedError):
        group.all_reduce(torch.ones(1))
    return ran


def test_abort_hooks_run_when_a_rank_dies(tmp_path: Any):
    said = run_ranks(death, 3, str(tmp_path / "store"), outcomes=True)
    assert [(o.kind, o.value) for o in said if o.rank != 1] == [("returned", [1])] * 2


# --- hooks that are ready to use --------------------------------------------------------------------------------------

NAN = float("nan")


def nan_checked(g: Any) -> None:
    hook = symcomm.NanCheckHook.attach(g)
    bad, good = torch.tensor([1.0, NAN]), torch.ones(2)
    words = rf"NaN found in input tensor 0 \(float32 of shape \(2,\)\) of allreduce on rank {g.rank} of group 'world'"
    before = g.sequence_number
    with pytest.raises(RuntimeError, match=words):
        g.all_reduce(bad)
    for kind in (torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.float8_e5m2):
        with pytest.raises(RuntimeError, match="NaN found"):
            g.all_gather([good.to(kind), good.to(kind)], bad.to(kind))
    with pytest.raises(RuntimeError, match="NaN found in input tensor 1"):
        g.all_reduce_coalesced([good, bad])
    with pytest.raises(RuntimeError, match="NaN found in input tensor 0 .* of send"):
        g.isend(bad, 1 - g.rank)
    g.all_reduce(torch.ones(2, dtype=torch.int32))
    assert g.sequence_number == before + 8  # what was refused took its number, but the message
    g.broadcast(good if g.rank == 0 else bad.clone(), 0)  # only the root's is sent
    g.all_gather([bad.clone(), bad.clone()], good)
    g.scatter(bad.clone(), [good, good] if g.rank == 0 else None, 0)
    if g.rank == 0:
        g.send(good, 1)
    else:
        g.recv(bad.clone(), 0)
    hook.remove()
    hook.remove()
    g.all_reduce(bad)
    assert bad.isnan().tolist() == [False, True]
    with pytest.raises(errors.BadArgumentError, match="group must be a group of symcomm"):
        symcomm.NanCheckHook.attach(3)


def test_nan_check():
    on_threads(nan_checked)


def test_health_check():
    from symcomm.observe.server.handlers import get_handler

    class Answer:
        def set_content(self, content: str, kind: str) -> None:
            self.said = content, kind

        def set_status(self, status: int) -> None:
            self.status = status

    class Request:
        def body(self) -> bytes:
            return b""

        def get_param(self, name: str) -> str:
            return ""

    def ask() -> tuple[Any, int]:
        answer = Answer()
        get_handler("c10d_health_check")(Request(), answer)
        return answer.said, answer.status

    def work(g: Any) -> None:
        assert symcomm.HealthCheckHook.attach(g) is None
        g.abort()

    assert ask() == (('{"healthy":true,"unhealthy_backends":[]}', "application/json"), 200)
    on_threads(work, 1)
    assert ask() == (('{"healthy":false,"unhealthy_backends":["symcomm"]}', "application/json"), 200)
    symcomm.group.hook_classes._unhealthy.clear()


def test_flight_recorder_hook(tmp_path: Any, monkeypatch: pytest.MonkeyPatch):
    for name in ("SYMCOMM_TRACE_DIR", "TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def work(g: Any) -> None:
        symcomm.FlightRecorderHook.attach(g, [5, 7])
        removed = symcomm.FlightRecorderHook.attach(g, [15, 17])
        removed.remove()
        removed.remove()
        with pytest.raises(errors.BadArgumentError, match="one rank for each of 2"):
            symcomm.FlightRecorderHook.attach(g, [5])
        g.all_reduce(torch.ones(3))
        g.barrier()
        g.abort()

    on_threads(work)
    folder = tmp_path / "torch"
    assert sorted(f.name for f in folder.iterdir()) == ["comm_lib_trace_rank_5", "comm_lib_trace_rank_7"]
    entries = pickle.loads((folder / "comm_lib_trace_rank_5").read_bytes())["entries"]
    assert [e["profiling_name"] for e in entries][:2] == ["gloo:all_reduce", "gloo:barrier"]


def numbered(g: Any) -> None:
    before = g.sequence_number
    works = [g.all_reduce(torch.ones(4096), async_op=True) for _ in range(3)]
    assert [w.sequence_number for w in works] == [before + 1, before + 2, before + 3]
    g.barrier()  # behind the others
    assert g.all_reduce(torch.ones(1), async_op=True).sequence_number == before + 5
    assert [w.wait() for w in works] == [True] * 3
    g.barrier()
    g.barrier()
    last = g.broadcast(torch.ones(1), async_op=True)
    assert last.sequence_number == before + 8
    last.wait()
    assert g.sequence_number == before + 8


@pytest.mark.parametrize("hosts", [{}, {"hosts": [1, 1]}], ids=["one host", "two hosts"])
def test_works_know_their_number(hosts: dict[str, Any]):
    on_threads(numbered, **hosts)


# --- more time, once --------------------------------------------------------------------------------------------------


def more_time(g: Any) -> None:
    usual = g.timeout
    g.add_ephemeral_timeout(5.0)
    g.add_ephemeral_timeout(2.0)
    assert g.timeout == usual + 7
    g.barrier()
    assert g.timeout == usual and "barrier" not in vars(g)
    g.add_ephemeral_timeout(5.0)
    g.set_timeout(11.0)
    assert g.timeout == 16
    if g.rank == 0:
        work = g.all_reduce(torch.ones(2), async_op=True)
        assert g.timeout == 16  # until it has ended
    g.send(torch.ones(1), 1) if g.rank == 0 else g.recv(torch.ones(1), 0)
    if g.rank == 1:
        work = g.all_reduce(torch.ones(2), async_op=True)
    work.wait()
    work.get_future().wait()
    g.barrier()
    assert g.timeout == 11
    with pytest.raises(errors.BadArgumentError, match="timeout must be a positive"):
        g.add_ephemeral_timeout(-1)


def test_ephemeral_timeouts():
    on_threads(more_time)


def test_an_extended_call_waits_longer_once():
    over = threading.Event()

    def work(g: Any) -> Any:
        g.set_timeout(0.3)
        if g.rank == 0:
            g.add_ephemeral_timeout(30.0)
            g.barrier()  # the other comes later than 0.3 s
            with pytest.raises(errors.DeadlineError, match="timed out on rank 0"):
                g.barrier()
            over.set()
        else:
            g.set_timeout(30.0)
            time.sleep(1.0)
            g.barrier()
            assert over.wait(30)
        return True

    assert on_threads(work) == [True, True]
