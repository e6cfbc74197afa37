"""Our engine under torch's interface (TorchGroup) beside Gloo: overloads, keywords, works, hooks, merged groups."""

from __future__ import annotations

from datetime import timedelta

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from symcomm.torch_backend.group import TorchGroup
from tests.support.c10d_compare import (
    family,
    on_two_ranks,
    ours,
    outcome,
    plain,
    skip_what_is_newer,
    theirs,
)
from tests.support.ranks import until

pytestmark = pytest.mark.torch_versions

LIMIT = timedelta(seconds=20)


@pytest.fixture(scope="module")
def pair():
    """(Gloo, our engine, our group around an engine), all of one rank."""
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, LIMIT)
    engine = TorchGroup(ours.HashStore(), 0, 1, LIMIT, "one")
    facade = ours.ProcessGroup(ours.HashStore(), 0, 1)
    yield gloo, engine, facade
    engine.shutdown()
    facade.shutdown()


ONE, ZERO = "torch.tensor([3.0])", "torch.zeros(1)"
CALLS = [
    f"allreduce([{ONE}])",
    f"allreduce({ONE}, R.MAX, td(seconds=9))",
    f"allreduce(tensors=[{ONE}], opts=m.AllreduceOptions())",
    f"allreduce_coalesced([{ONE}, {ONE}])",
    f"reduce({ONE}, 0, R.SUM)",
    f"broadcast([{ONE}], m.BroadcastOptions())",
    f"broadcast({ONE}, 0)",
    f"allgather([[{ZERO}]], [{ONE}])",
    f"allgather(output_tensors=[[{ZERO}]], input_tensors=[{ONE}])",
    f"gather([[{ZERO}]], [{ONE}])",
    f"gather(output_tensors=[[{ZERO}]], input_tensors=[{ONE}], opts=m.GatherOptions())",
    f"scatter([{ZERO}], [[{ONE}]])",
    f"scatter(output_tensors=[{ZERO}], input_tensors=[[{ONE}]])",
    f"alltoall_base({ZERO}, {ONE}, [], [])",
    f"_allgather_base({ZERO}, {ONE})",
    "barrier()",
]


# Gloo does not tell these apart from the plain form; NCCL and we do.
COARSE = {
    theirs.OpType.ALLREDUCE_COALESCED.value: theirs.OpType.ALLREDUCE.value,
    theirs.OpType._ALLGATHER_BASE.value: theirs.OpType.ALLGATHER.value,
    theirs.OpType.ALLTOALL_BASE.value: theirs.OpType.ALLTOALL.value,
}


@pytest.mark.parametrize("call", CALLS)
def test_works_like_gloos(pair, call: str):
    """The same kind of operation, the same tensors as result and in the future."""
    gloo, engine, facade = pair
    seen = []
    for group, module in ((gloo, theirs), (engine, theirs), (engine, ours), (facade, ours)):
        kind, work = outcome(f"g.{call}", module, g=group)
        assert kind == "gave", work
        assert work.wait() is True and work.is_completed() and work.is_success()
        future = plain(work.get_future().wait())
        tensors = plain(work.result()) if call != "barrier()" else None
        seen.append(
            (COARSE.get(work._get_op_type(), work._get_op_type()), tensors, future if call != "barrier()" else None)
        )
    assert seen == [seen[0]] * len(seen)


FACTS = [
    "rank()", "size()", "supports_splitting", "mem_allocator", "suspend()", "resume()", "monitored_barrier()",
    "_set_sequence_number_for_group()", "setUsePgForSymmMemRendezvous(True)", "allreduce([])",
    "broadcast(torch.ones(1), 7)",
    "allreduce([torch.ones(1), torch.ones(2)])", "allreduce(torch.ones(1)).source_rank()", "set_timeout(td(seconds=9))",
    "gather([[]], [torch.ones(1)])", "scatter([torch.ones(1)], [[]])", "allgather([[]], [torch.ones(1)])",
]  # fmt: skip


@pytest.mark.parametrize("fact", FACTS)
def test_facts_like_gloos(pair, fact: str):
    gloo, engine, _ = pair
    wanted, got = outcome(f"g.{fact}", theirs, g=gloo), outcome(f"g.{fact}", theirs, g=engine)
    if wanted[0] == "raised" and (got[0] == "gave" or family(wanted[1]) != family(got[1])):
        skip_what_is_newer(*wanted)
    assert wanted[0] == got[0], (wanted, got)
    if wanted[0] == "gave":
        assert plain(wanted[1]) == plain(got[1])
    else:
        assert family(wanted[1]) == family(got[1])


def test_what_gloo_cannot(pair):
    _, engine, facade = pair
    work = engine.allreduce([torch.ones(1)])
    work.wait()
    assert 0 <= work._get_duration() < 60_000
    blocking = ours.AllreduceOptions()
    blocking.asyncOp = False
    assert engine.broadcast([torch.ones(1)], ours.BroadcastOptions())._get_op_type() == theirs.OpType.BROADCAST.value
    assert engine.allreduce([torch.arange(3, dtype=torch.int16)], blocking).wait()
    assert "symmetric_used_bytes" in engine.memory_stats()
    facade.use_pg_for_symm_mem_rendezvous = True
    assert facade.use_pg_for_symm_mem_rendezvous and engine.supports_tensor_alloc(torch.device("cpu"))


def test_hook_on_the_engine():
    engine = TorchGroup(ours.HashStore(), 0, 1, LIMIT, "hooked")
    told: list = []
    assert not engine._has_hooks()
    engine._register_on_completion_hook(told.append)
    engine.allreduce([torch.ones(1)]).wait()
    blocking = theirs.BroadcastOptions()
    blocking.asyncOp = False
    engine.broadcast([torch.ones(1)], blocking)
    engine._wait_for_pending_works()
    assert until(lambda: len(told) == 2, 20)  # the first thread that sees an operation's end runs its hooks
    assert sorted(info.op_type.name for info in told) == ["ALLREDUCE", "BROADCAST"]
    assert all(ours.OpType[info.op_type.name] == info.op_type for info in told)
    assert all(info.active_duration == info.time_finished - info.time_started for info in told)
    assert isinstance(told[0], ours.WorkInfo) and engine._has_hooks()
    with pytest.raises(RuntimeError, match="registered already"):
        engine._register_on_completion_hook(print)
    with pytest.raises(ValueError, match="a function of one argument"):
        engine._register_on_completion_hook(3)
    engine.shutdown()


def test_two_groups_become_one():
    def body(store, rank):
        alone = TorchGroup(ours.PrefixStore(f"alone {rank}", store), 0, 1, LIMIT, "alone")
        both = alone.merge_remote_group(ours.PrefixStore("both", store), 2, timeout=LIMIT)
        tensor = torch.ones(1)
        both.allreduce([tensor]).wait()
        facts = (both.size(), both.getGroupName(), both.getGroupDesc(), tensor.item(), both.rank())
        both.shutdown()
        alone.shutdown()
        return facts

    facts = on_two_ranks(body)
    assert [f[:4] for f in facts] == [(2, "alone:merge", ":merge", 2.0)] * 2
    assert sorted(f[4] for f in facts) == [0, 1]


def test_source_of_a_message():
    def body(store, rank):
        group = TorchGroup(store, rank, 2, LIMIT, "pair")
        tensor = torch.full((2,), float(rank))
        if rank == 0:
            group.send([tensor], dstRank=1, tag=4).wait()
            source = None
        else:
            work = group.recv_anysource([tensor], 4)
            work.wait()
            source = work.source_rank(), work._get_op_type() == theirs.OpType.RECVANYSOURCE.value
        group.barrier().wait()
        group.shutdown()
        return tensor.tolist(), source

    assert on_two_ranks(body) == [([0, 0], None), ([0, 0], (0, True))]


def test_init_process_group_on_our_store():
    from symcomm.torch_backend.register import register

    register()
    dist.init_process_group("symcomm", store=ours.as_torch_store(ours.HashStore()), rank=0, world_size=1)
    try:
        tensor = torch.ones(2)
        dist.all_reduce(tensor)
        group = dist.group.WORLD
        assert isinstance(group, ours.ProcessGroup) and isinstance(group, ours.Backend)
        assert tensor.tolist() == [1, 1] and dist.get_backend() == "symcomm"
    finally:
        dist.destroy_process_group()
