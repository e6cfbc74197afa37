"""_ProcessGroupWrapper: what it says of backends, and of ranks whose calls differ or that do not come."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from symcomm.c10d import wrapper
from symcomm.errors import CollectiveMismatchError
from symcomm.torch_backend.group import TorchGroup
from tests.support.c10d_compare import family, on_two_ranks, ours, outcome, plain, since_2_13, theirs

pytestmark = pytest.mark.torch_versions

WRAPPED = [
    "w.wrapped_pg is i", "w.name()", "w._get_backend_name()", "w.rank()", "w.size()", "w.get_error()",
    "w.supports_splitting", "w._get_sequence_number_for_group()", "type(w.options).__name__", "w.memory_stats()",
    "w.allreduce(torch.ones(1)).wait()", "w.allreduce([torch.ones(1)], m.AllreduceOptions()).wait()",
    "w.barrier().wait()", "w.broadcast(torch.ones(1), 0).wait()", "m._ProcessGroupWrapper(i, 3)",
]  # fmt: skip


@since_2_13  # its wrapper has more to say since
def test_wrapper_facts():
    results = []
    for module in (theirs, ours):
        store = dist.HashStore()
        inner, helper = (dist.ProcessGroupGloo(dist.PrefixStore(p, store), 0, 1, timedelta(seconds=20)) for p in "ab")
        texts = [f"w = m._ProcessGroupWrapper(i, h)\n{text}" for text in WRAPPED]
        facts = [outcome(text, module, i=inner, h=helper) for text in texts]
        results.append([(kind, value if kind == "gave" else family(value)) for kind, value in facts])
    assert [(kind, plain(value)) for kind, value in results[0]] == [(kind, plain(value)) for kind, value in results[1]]


def test_wrapper_says_what_ended_our_engine():
    engine = TorchGroup(ours.HashStore(), 0, 1, timedelta(seconds=20), "one")
    group = ours._ProcessGroupWrapper(engine, engine)
    assert group.get_error() is ours.ErrorType.SUCCESS
    group.allreduce(torch.ones(1)).wait()
    group.shutdown()
    assert group.get_error() is ours.ErrorType.COMM_ERROR


def test_wrapper_names_what_each_rank_called():
    def body(store, rank):
        inner = ours.FakeProcessGroup._create_internal(rank, 2)
        helper = TorchGroup(store, rank, 2, timedelta(seconds=20), "helper")
        group = ours._ProcessGroupWrapper(inner, helper)
        group.allreduce(torch.ones(3)).wait()
        try:
            group.allreduce(torch.ones(3)) if rank == 0 else group.broadcast(torch.ones(3), 0)
        except CollectiveMismatchError as error:
            return str(error)
        finally:
            helper.shutdown()

    said = on_two_ranks(body)
    assert said[0] == said[1] and "rank 0 called #2 allreduce of float32[3]; rank 1 called #2 broadcast" in said[0]


def _tensors_of(rank: int, what: str) -> tuple[int, torch.dtype]:
    return (2 + rank, torch.float32) if what == "shape" else (2, (torch.float32, torch.float64)[rank])


# (group, options' module, rank, n elements of a dtype)
MISMATCHED = {
    "allreduce": lambda g, m, rank, new: g.allreduce([new()]),
    "allreduce by keyword": lambda g, m, rank, new: g.allreduce(tensors=[new()]),
    "broadcast": lambda g, m, rank, new: g.broadcast(tensor=new(), root=0),
    "reduce": lambda g, m, rank, new: g.reduce(new(), 0),
    "allgather": lambda g, m, rank, new: g.allgather([[new(), new()]], [new()]),
    "allgather by keyword": lambda g, m, rank, new: g.allgather(output_tensors=[new(), new()], input_tensor=new()),
    "gather": lambda g, m, rank, new: g.gather([[new(), new()]] if rank == 0 else [], [new()], m.GatherOptions()),
    "scatter": lambda g, m, rank, new: g.scatter([new()], [[new(), new()]] if rank == 0 else [], m.ScatterOptions()),
    "reduce_scatter": lambda g, m, rank, new: g.reduce_scatter([new()], [[new(), new()]]),
}


@pytest.mark.parametrize("what", ["shape", "dtype"])
@pytest.mark.parametrize("call", MISMATCHED)
@pytest.mark.parametrize("module", [theirs, ours], ids=["theirs", "ours"])
def test_wrapper_over_gloo_finds_tensors_that_differ(module, call: str, what: str):
    """Gloo itself would end the process, or return what was never sent."""

    def body(store, rank):
        inner, helper = (
            dist.ProcessGroupGloo(dist.PrefixStore(p, store), rank, 2, timedelta(seconds=20)) for p in "ab"
        )
        n, dtype = _tensors_of(rank, what)
        with pytest.raises(RuntimeError, match="Detected mismatch between collectives on ranks") as caught:
            MISMATCHED[call](
                module._ProcessGroupWrapper(inner, helper), module, rank, lambda: torch.ones(n, dtype=dtype)
            )
        return str(caught.value)

    for said in on_two_ranks(body, dist.HashStore()):
        assert all(f"rank {r}" in said.lower() for r in (0, 1))


@pytest.mark.parametrize("module", [theirs, ours], ids=["theirs", "ours"])
def test_wrapper_over_gloo_names_who_does_not_come(module):
    over = threading.Event()

    def body(store, rank):
        inner, helper = (dist.ProcessGroupGloo(dist.PrefixStore(p, store), rank, 2, timedelta(seconds=1)) for p in "ab")
        group = module._ProcessGroupWrapper(inner, helper)
        if rank == 1:
            assert over.wait(20)
            return
        with pytest.raises(RuntimeError, match="Ranks 1 failed to pass monitoredBarrier in 1000 ms"):
            group.allreduce([torch.ones(1)])
        over.set()

    on_two_ranks(body, dist.HashStore())


def test_wrapper_tells_long_calls_apart():
    same_beginning = [[torch.ones(1)] * 200 + [torch.ones(n)] for n in (1, 2)]
    said = [wrapper._fixed_length(wrapper.describe("allreduce_coalesced", (x,), {})) for x in same_beginning]
    assert said[0] != said[1] and {len(words) for words in said} == {512}
