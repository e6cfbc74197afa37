"""Hooks and the calls of torch 2.15 on the torch backend: compared with Gloo where torch has them."""

from __future__ import annotations

import contextlib
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch._C._distributed_c10d as torch_c10d
import torch.distributed as dist

from symcomm import errors
from tests.support.hook_log import Log, as_torch_does
from tests.support.ranks import run_ranks
from tests.torch_backend.checks import leave

pytestmark = [pytest.mark.torch_versions, pytest.mark.timeout(150)]


@contextlib.contextmanager
def joined(rank: int, world: int, path: str, backend: str = "symcomm"):
    from symcomm.torch_backend.register import register

    register()
    dist.init_process_group(
        backend, init_method=f"file://{path}", rank=rank, world_size=world, timeout=timedelta(seconds=60)
    )
    try:
        yield dist.group.WORLD
    finally:
        leave()


def calls_of(rank: int, group: Any) -> dict[str, Any]:
    """Every kind of call that torch.distributed makes, each on tensors of its own sizes."""
    ops, t, name = torch.ops._c10d_functional, torch.ones, group.group_name
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

    def coalesced(call: Any, *pairs: Any) -> None:
        with dist._coalescing_manager():
            for pair in pairs:
                call(*pair)

    def passed_on() -> None:
        batch = [dist.P2POp(dist.isend if rank == 0 else dist.irecv, t(2), 1 - rank)]
        [w.wait() for w in dist.batch_isend_irecv(batch)]

    return {
        "all_reduce": lambda: dist.all_reduce(t(4)),
        "all_reduce again": lambda: dist.all_reduce(t(4)),
        "all_reduce async": lambda: dist.all_reduce(t(4), async_op=True).wait(),
        "all_reduce_coalesced": lambda: dist.all_reduce_coalesced([t(4), t(2)]),
        "reduce": lambda: dist.reduce(t(4), 1),
        "broadcast": lambda: dist.broadcast(t(4), 1),
        "broadcast again": lambda: dist.broadcast(t(4), 1),
        "all_gather": lambda: dist.all_gather([t(4), t(4)], t(4)),
        "all_gather_into_tensor": lambda: gather(t(8), t(4)),
        "all_gather_coalesced": lambda: dist.all_gather_coalesced([[t(4)], [t(4)]], [t(4)]),
        "reduce_scatter": lambda: dist.reduce_scatter(t(4), [t(4), t(4)]),
        "reduce_scatter_tensor": lambda: scatter(t(4), t(8)),
        "gather": lambda: dist.gather(t(4), [t(4), t(4)] if rank == 1 else None, 1),
        "scatter": lambda: dist.scatter(t(4), [t(4), t(4)] if rank == 1 else None, 1),
        "all_to_all_single": lambda: dist.all_to_all_single(t(4), t(4)),
        "all_to_all": lambda: dist.all_to_all([t(2), t(2)], [t(2), t(2)]),
        "barrier": lambda: dist.barrier(),
        "barrier async": lambda: dist.barrier(async_op=True).wait(),
        "send": lambda: dist.send(t(4), 1) if rank == 0 else dist.recv(t(4), 0),
        "recv from any": lambda: dist.send(t(4), 1) if rank == 0 else dist.recv(t(4)),
        "isend": lambda: (dist.isend(t(4), 1) if rank == 0 else dist.irecv(t(4), 0)).wait(),
        "batch": passed_on,
        "coalesced all_reduce": lambda: coalesced(dist.all_reduce, [t(2)], [t(3)]),
        "coalesced all_gather": lambda: coalesced(gather, [t(4), t(2)], [t(6), t(3)]),
        "coalesced reduce_scatter": lambda: coalesced(scatter, [t(2), t(4)], [t(3), t(6)]),
        "objects": lambda: dist.all_gather_object([None, None], 3),
        "functional all_reduce": lambda: ops.wait_tensor(ops.all_reduce(t(4), "sum", name)),
        "functional all_gather": lambda: ops.wait_tensor(ops.all_gather_into_tensor(t(4), 2, name)),
        "functional all_gather_out": lambda: ops.wait_tensor(
            ops.all_gather_into_tensor_out(t(4), 2, name, out=t(8))
        ),
    }  # fmt: skip


def logged(rank: int, world: int, path: str, backend: str) -> dict[str, list[Any]]:
    with joined(rank, world, path, backend) as group:
        dist.all_reduce(torch.ones(4))
        log, said = Log(group), {}
        for what, call in calls_of(rank, group).items():
            log.said.clear()
            call()
            said[what] = list(log.said)
        group.unregister_pre_hook(1)
        group.unregister_post_hook(1)
        log.said.clear()
        dist.all_reduce(torch.ones(4))
        assert log.said == []
        return said


@as_torch_does
def test_hooks_are_told_what_gloos_are(tmp_path: Any):
    theirs = run_ranks(logged, 2, str(tmp_path / "gloo"), "gloo")
    ours = run_ranks(logged, 2, str(tmp_path / "ours"), "symcomm")
    for rank in range(2):
        for what, said in theirs[rank].items():
            assert ours[rank][what] == said, what


# --- the fast path ----------------------------------------------------------------------------------------------------


class Counted:
    """How many calls took the fast path and found it."""

    def __init__(self, group_type: Any):
        self._run = group_type.run_cached_options
        self.short = 0
        group_type.run_cached_options = lambda *args: self._count(*args)

    def _count(self, *args: Any) -> int:
        status = self._run(*args)
        self.short += status == 0
        return status


def fast_path(rank: int, world: int, path: str) -> Any:
    from symcomm._core import native

    with joined(rank, world, path) as group:
        calls = calls_of(rank, group)
        kinds = ["all_reduce", "reduce", "broadcast", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor",
                 "gather", "scatter", "all_to_all_single"]  # fmt: skip
        for what in kinds:
            calls[what]()
        counted = Counted(native.Group)
        without = []
        for what in kinds:
            counted.short = 0
            calls[what]()
            without.append(counted.short)
        assert without == [1] * len(kinds)
        assert not {"allreduce", "broadcast"} & set(vars(group))

        log, seen = Log(group), 0
        for what, call in calls.items():
            log.said.clear()
            call()
            assert [kind for kind, *_ in log.said] in (["pre", "post"], ["pre", "post"] * 2), (what, log.said)
            seen += len(log.said) // 2
        group.unregister_pre_hook(1)
        group.unregister_post_hook(1)

        counted.short = 0
        for what in kinds:
            calls[what]()
        assert counted.short == len(kinds)
        return seen - len(calls)  # an exchange of objects is two calls


def test_the_fast_path_is_left_to_hooks_only(tmp_path: Any):
    assert run_ranks(fast_path, 2, str(tmp_path / "meet")) == [1, 1]


def types_of_hooks(rank: int, world: int, path: str) -> None:
    from symcomm import HookOpName
    from symcomm.group.call_hooks import PreHookArgs

    with joined(rank, world, path) as group:
        seen: list[Any] = []
        group.register_pre_hook(1, seen.append)
        group.core.register_pre_hook(2, seen.append)
        dist.all_reduce(torch.ones(1))
        group.core.all_reduce(torch.ones(1))
        theirs = getattr(torch_c10d, "HookOpName", HookOpName)
        assert [type(a) for a in seen] == [PreHookArgs] * 4
        assert [a.name for a in seen] == [theirs.ALLREDUCE, HookOpName.ALLREDUCE] * 2
        assert [a.op_id for a in seen] == [0, 0, 1, 1]  # one call, whichever object it is made through
        assert HookOpName.ALLREDUCE == theirs.ALLREDUCE and HookOpName.ALLREDUCE != theirs.REDUCE
        assert group.supports_abort_hooks and group.supports_completion_hooks
        ran: list[int] = []
        group.register_abort_hook(1, lambda: ran.append(1))
        dist.barrier()
        group.abort()
        assert ran == [1]


def watched(rank: int, world: int, path: str) -> Any:
    with joined(rank, world, path) as group:
        hook = torch_c10d.NanCheckHook.attach(group)
        log, source = Log(group), None
        if rank == 0:
            dist.send(torch.ones(2), 1)
        else:
            source = dist.recv(torch.ones(2))
        work = dist.all_reduce(torch.ones(2), async_op=True)
        work.wait()
        assert work.is_completed() and len(log.said) == 4
        hook.remove()
        return source


@as_torch_does
def test_works_of_watched_groups_are_whole(tmp_path: Any):
    """torch's own hook sends calls through C++; ours see each of them once all the same."""
    assert run_ranks(watched, 2, str(tmp_path / "meet")) == [None, 0]


def unhealthy(rank: int, world: int, path: str) -> Any:
    from symcomm.group.hook_classes import unhealthy_backends

    with joined(rank, world, path) as group:
        before = unhealthy_backends()
        group.abort()
        return before, unhealthy_backends()


@as_torch_does
def test_torch_watches_the_health_of_every_group(tmp_path: Any):
    assert run_ranks(unhealthy, 1, str(tmp_path / "meet")) == [([], ["symcomm"])]


def test_types_that_hooks_are_given(tmp_path: Any):
    run_ranks(types_of_hooks, 2, str(tmp_path / "meet"))


# --- NaNs -------------------------------------------------------------------------------------------------------------


def nans(rank: int, world: int, path: str, backend: str) -> dict[str, str]:
    """What each call raised with torch's hook on torch's group, or ours on ours."""
    from symcomm import NanCheckHook

    nan, good = torch.tensor([1.0, float("nan")]), torch.ones(2)
    with joined(rank, world, path, backend) as group:
        hook = (NanCheckHook if backend == "symcomm" else torch_c10d.NanCheckHook).attach(group)
        calls: dict[str, Any] = {
            "all_reduce": lambda: dist.all_reduce(nan.clone()),
            "float16": lambda: dist.all_reduce(nan.half()),
            "complex": lambda: dist.all_gather([torch.ones(1, dtype=torch.cfloat)] * 2, nan[1:].cfloat()),
            "integers": lambda: dist.all_reduce(torch.ones(2, dtype=torch.int32)),
            "broadcast": lambda: dist.broadcast(nan.clone() if rank == 1 else good.clone(), 0),
            # On torch's backends the others would wait.
            "broadcast of it": lambda: dist.broadcast(nan.clone(), 0) if backend == "symcomm" or rank == 0 else None,
            "send": lambda: dist.send(nan.clone(), 1) if rank == 0 else None,
            "recv": lambda: dist.send(good, 1) if rank == 0 else dist.recv(nan.clone(), 0),
            "outputs": lambda: dist.all_gather([nan.clone(), nan.clone()], good),
            "scatter": lambda: dist.scatter(nan.clone(), [good, good] if rank == 0 else None, 0),
            "reduce": lambda: dist.reduce(nan.clone(), 0),
            "gather": lambda: dist.gather(nan.clone(), [good, good] if rank == 0 else None, 0),
        }
        said = {}
        for what, call in calls.items():
            try:
                call()
                said[what] = ""
            except errors.CallRefusedError as error:
                said[what] = f"told {error.ranks}"
            except RuntimeError as error:
                said[what] = "NaN" if str(error).startswith("NaN found in input tensor") else str(error)
        hook.remove()
        dist.all_reduce(nan.clone())
        return said


EXPECTED = {
    "all_reduce": "NaN", "float16": "NaN", "complex": "NaN", "integers": "", "broadcast": "", "recv": "",
    "outputs": "", "scatter": "", "reduce": "NaN", "gather": "NaN",
}  # fmt: skip


def test_nan_check_on_torchs_view(tmp_path: Any):
    said = run_ranks(nans, 2, str(tmp_path / "ours"), "symcomm")
    assert said[0] == {**EXPECTED, "broadcast of it": "NaN", "send": "NaN"}
    assert said[1] == {**EXPECTED, "broadcast of it": "told [0]", "send": ""}


@as_torch_does
def test_nan_check_is_torchs(tmp_path: Any):
    gloos = run_ranks(nans, 2, str(tmp_path / "gloo"), "gloo")
    ours = run_ranks(nans, 2, str(tmp_path / "us"), "symcomm")
    assert (gloos[1].pop("broadcast of it"), ours[1].pop("broadcast of it")) == ("", "told [0]")
    assert ours == gloos


# --- new calls --------------------------------------------------------------------------------------------------------


def gathered(rank: int, world: int, path: str) -> None:
    with joined(rank, world, path) as group:
        for dtype in (torch.float32, torch.int16, torch.bfloat16, torch.complex64):
            mine = torch.arange(6).reshape(2, 3).to(dtype) + rank
            parts = [torch.empty_like(mine) for _ in range(world)] if rank == 1 else None
            dist.gather(mine, parts, 1)
            options = torch_c10d.GatherOptions()
            options.rootRank = 1
            for shape in ((12,), (2, 2, 3)):
                whole = torch.zeros(shape, dtype=dtype) if rank == 1 else mine.new_empty(0)
                for call in (group.gather_single, group.gather_into_tensor):
                    for is_async in (True, False):
                        options.asyncOp = is_async
                        whole.zero_()
                        call(whole, mine, options).wait()
                        assert parts is None or torch.equal(whole.flatten(), torch.stack(parts).flatten())
                if hasattr(dist, "gather_single"):
                    whole.zero_()
                    dist.gather_single(mine, whole if rank == 1 else None, 1)
                    assert parts is None or torch.equal(whole.flatten(), torch.stack(parts).flatten())
        with pytest.raises(RuntimeError, match="output must be 4 elements"):
            group.gather_single(torch.ones(3), torch.ones(2), root=rank)


def test_gather_single(tmp_path: Any):
    run_ranks(gathered, 2, str(tmp_path / "meet"))


def estimated(rank: int, world: int, path: str) -> Any:
    from symcomm.simulate.host import host_seconds
    from symcomm.simulate.machine import load

    with joined(rank, world, path) as group:
        assert group.supports_time_estimate and group._supports_time_estimate
        value, before = torch.full((1000,), float(rank)), group.core.sequence_number
        with dist._time_estimator() as one:
            dist.all_reduce(value)
        expected = host_seconds("all_reduce", 4000, world, load()) * 1e6
        assert one.estimated_time == pytest.approx(expected) and expected > 0
        with dist._time_estimator() as all_kinds:
            for what, call in calls_of(rank, group).items():
                if what not in ("objects", "recv from any"):  # which look at what they received
                    call()
        assert all_kinds.estimated_time > one.estimated_time
        assert value.tolist() == [rank] * 1000 and group.core.sequence_number == before
        dist.all_reduce(value)
        assert value.tolist() == [1.0] * 1000
        with pytest.raises(RuntimeError, match="no estimate is under way"):
            group._end_time_estimate()
        group._start_time_estimate()
        with pytest.raises(RuntimeError, match="an estimate is under way"):
            group._start_time_estimate()
        assert group._end_time_estimate() == 0.0


def test_time_estimates(tmp_path: Any):
    run_ranks(estimated, 2, str(tmp_path / "meet"))


def test_time_estimates_across_hosts():
    """Every kind of call has a cost there; more bytes cost more."""
    import symcomm
    from symcomm.torch_backend.estimate import _MODELS, _seconds

    def work(group: Any) -> Any:
        return {model: [_seconds(group, model, n) for n in (1 << 10, 1 << 24)] for model, *_ in _MODELS.values()}

    for costs in symcomm.spawn(work, 3, mode="threads", hosts=[2, 1], deadline=60):
        assert {model for model, (small, large) in costs.items() if not 0 < small < large} == set()


def facts(rank: int, world: int, path: str) -> None:
    with joined(rank, world, path) as group:
        works = [dist.all_reduce(torch.ones(1 << 16), async_op=True) for _ in range(3)]
        numbers = [w._get_sequence_number() for w in works]
        [w.wait() for w in works]
        assert numbers == [1, 2, 3] and group._get_sequence_number_for_group() == 3
        assert [w.timeout for w in works] == [timedelta(seconds=60)] * 3
        dist.all_reduce(torch.ones(2))
        work = dist.all_reduce(torch.ones(1 << 16), async_op=True)
        assert work._get_sequence_number() == 5
        work.wait()
        assert group._get_backend(torch.device("cpu")).get_error() == torch_c10d.ErrorType.SUCCESS
        group._set_group_uid("7")
        group._add_ephemeral_timeout(timedelta(0))
        assert group.core.timeout == 60
        group._add_ephemeral_timeout(timedelta(seconds=40))
        assert group.core.timeout == 100
        dist.barrier()
        assert group.core.timeout == 60

        options = torch_c10d.Backend.Options("symcomm", timedelta(seconds=20))
        part = group.split(group.get_group_store(), [1, 0], options)
        assert (part.rank(), part.size(), part.core.timeout) == (1 - rank, 2, 20)
        value = torch.tensor([float(rank)])
        part.broadcast(value, root=0).wait()
        assert value.item() == 1.0
        alone = group.split(group.get_group_store(), [0])
        assert alone.size() == 1 if rank == 0 else alone is None
        store = dist.PrefixStore("merge", group.get_group_store())
        merged = part.merge(store, options, rank, 2)
        merged.allreduce([value]).wait()
        assert (merged.rank(), merged.size(), value.item()) == (rank, 2, 2.0)
        with pytest.raises(RuntimeError, match="merge: rank must be one of the 2 ranks"):
            part.merge(store, options, 2, 2)


def test_facts_about_works_and_groups(tmp_path: Any):
    run_ranks(facts, 2, str(tmp_path / "meet"))


def failed(rank: int, world: int, path: str) -> str:
    with joined(rank, world, path) as group:
        late, gone, stopped = (dist.new_group([0, 1]) for _ in range(3))
        store = group.get_group_store()
        if rank == 0:
            with pytest.raises(RuntimeError):
                late.barrier(timeout=timedelta(milliseconds=100)).wait()
            store.set("late", "1")
        else:
            store.wait(["late"])
            gone.shutdown()
            store.set("gone", "1")
        if rank == 0:
            store.wait(["gone"])
            with pytest.raises(RuntimeError):
                gone.barrier().wait()
            stopped.abort()
            with pytest.raises(RuntimeError):
                stopped.barrier().wait()
            store.set("done", "1")
        store.wait(["done"])
        return [g.get_error().name for g in (late, gone, stopped)] if rank == 0 else []


def test_get_error_says_what_ended_a_group(tmp_path: Any):
    assert run_ranks(failed, 2, str(tmp_path / "meet"))[0] == ["TIMEOUT", "REMOTE_ERROR", "COMM_ERROR"]
