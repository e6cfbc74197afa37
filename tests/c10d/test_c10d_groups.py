"""Groups and backends: the fake one, the dispatching one, the checking one; PyTorch's and ours side by side."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

pytest.importorskip("torch")
import torch
import torch.distributed as dist

from symcomm.torch_backend.group import TorchGroup
from tests.support.c10d_compare import (
    on_two_ranks,
    ours,
    outcome,
    plain,
    same,
    since_2_13,
    since_2_15,
    theirs,
)
from tests.support.ranks import until

pytestmark = pytest.mark.torch_versions

CPU = torch.device("cpu")

# --- the fake group -----------------------------------------------------------------------------------------------

FAKE = "f = m.FakeProcessGroup._create_internal(1, 4)\na = torch.arange(4.)\nE = lambda *s: torch.full(s, -1.)\n"
FAKE_FACTS = [
    "rank()", "size()", "name()", "_get_backend_name()", "_get_sequence_number_for_group()",
    "supports_coalescing", "supports_shrinking",
    "supports_time_estimate", "mem_allocator", "supports_tensor_alloc(torch.device('cpu'))", "memory_stats()",
    "suspend()", "resume()", "abort()", "shutdown()", "monitored_barrier()",
    "_start_coalescing()", "_end_coalescing()", "eager_connect_single_device(torch.device('cpu'))", "shrink([0])",
    "allocate_tensor(3, dtype=torch.float32, device=torch.device('cpu'))", "setUsePgForSymmMemRendezvous(True)",
    "barrier()", "allreduce([torch.ones(2)])", "allreduce(torch.ones(2))", "allreduce(torch.ones(2), R.MAX)",
    "allreduce(3)", "allreduce([])", "broadcast([torch.ones(1)])", "broadcast(torch.ones(1), root=0)",
    "reduce(torch.ones(1), root=0)", "send([torch.ones(1)], 0, 0)", "recv([torch.ones(1)], 0, 0)",
    "recv_anysource([torch.ones(1)], 0)", "allreduce_coalesced([torch.ones(1)])", "options.error_on_collective",
    "options.fake_option", "options.backend", "options._timeout", "options.group_name", "options.global_ranks_in_group",
]  # fmt: skip


NEWER_FACTS = [
    "_set_sequence_number_for_group()", "supports_splitting", "set_timeout(td(seconds=2))", "_supports_time_estimate",
    "get_error()", "_add_ephemeral_timeout(td(seconds=1))", "_start_time_estimate()", "supports_abort_hooks",
    "supports_completion_hooks", "supports_window", "supports_reconfigure", "bound_device_id", "_set_group_uid('a')",
    "register_abort_hook(1, lambda: 0)", "new_window()", "get_reconfigure_handle()", "_enable_collectives_timing()",
    "_wait_for_pending_works()", "_register_on_completion_hook(print)", "gather_single(torch.ones(4), torch.ones(1))",
    "allreduce_sparse([torch.ones(2)])", "merge(m.FakeStore(), m.Backend.Options('fake'), 0, 2)",
    "split(m.FakeStore(), [1, 0], m.FakeProcessGroup.Options()).rank()",
    "split(m.FakeStore(), [1, 0], m.FakeProcessGroup.Options()).size()",
]  # fmt: skip


@since_2_15
@pytest.mark.parametrize("fact", NEWER_FACTS)
def test_facts_of_newer_fakes(fact: str):
    same(f"{FAKE}f.{fact}")


@pytest.mark.parametrize("fact", FAKE_FACTS)
def test_fake_facts(fact: str):
    same(f"{FAKE}f.{fact}")


FAKE_DATA = [
    "o = [E(4) for _ in range(4)]\nf.allgather([o], [a])\no",
    "o = [E(4) for _ in range(4)]\nf.allgather(o, a)\no",
    "o = E(16)\nf._allgather_base(o, a)\no",
    "o = E(4, 2, 2)\nf._allgather_base(o, torch.arange(4.).view(2, 2))\no",
    "f._allgather_base(E(3), a)",
    "o = E(4)\nf._reduce_scatter_base(o, torch.arange(16.))\no",
    "f._reduce_scatter_base(E(4), torch.arange(15.))",
    "o = E(4)\nf.reduce_scatter([o], [[a, a + 1, a + 2, a + 3]])\no",
    "f.reduce_scatter([E(4)], [[a, a]])",
    "o = [[E(4)] for _ in range(4)]\nf.allgather_coalesced(o, [a])\no",
    "f.gather([[E(4) for _ in range(4)]], [a])",
    "f.gather([], [a])",
    "p = m.GatherOptions()\np.rootRank = 1\no = [E(4) for _ in range(4)]\nf.gather([o], [a], p)\no",
    "p = m.GatherOptions()\np.rootRank = 1\nf.gather([[E(4)]], [a], p)",
    "o = [E(4) for _ in range(4)]\nf.gather(o, a, root=1)\no",
    "f.scatter([E(4)], [[a, a, a, a]])",
    "o = E(4)\nf.scatter([o], [])\no",
    "p = m.ScatterOptions()\np.rootRank = 1\no = E(4)\nf.scatter([o], [[a, a + 1, a + 2, a + 3]], p)\no",
    "o = E(16)\nf.alltoall_base(o, torch.arange(16.), [], [])\no",
    *[
        pytest.param(text, marks=since_2_15)
        for text in (
            "o = E(4, 2)\nf.alltoall_base(o, torch.arange(8.).view(4, 2), [1, 1, 1, 1], [1, 1, 1, 1])\no",
            "o = E(7)\nf.alltoall_base(o, torch.arange(5.), [4, 1, 1, 1], [2, 1, 1, 1])\no",
            "o = E(4)\nf.alltoall_base(o, torch.arange(7.), [1, 1, 1, 1], [4, 1, 1, 1])\no",
        )
    ],
    "o = [E(4) for _ in range(4)]\nf.alltoall(o, [a, a + 1, a + 2, a + 3])\no",
    "f.alltoall([E(4)], [a, a, a, a])",
    "o = E(4)\nf.broadcast(o, 0)\no",
    "o = E(4)\nf.recv([o], 0, 0)\no",
]


@since_2_13  # before, the fake group moves data in all-gathers only, and checks little
@pytest.mark.parametrize("text", FAKE_DATA)
def test_fake_data(text: str):
    if "alltoall_base" in text and torch.__version__.startswith("2.14."):
        pytest.skip("torch 2.14's fake group repeats its first piece there; those before and after do not")
    same(f"{FAKE}{text}")


FAKE_MAKING = [
    "m.FakeProcessGroup(0, 1)",
    pytest.param("m.FakeProcessGroup._create_internal(5, 4)", marks=since_2_13),
    pytest.param("m.FakeProcessGroup._create_internal(-1, 4)", marks=since_2_13),
    pytest.param("m.FakeProcessGroup._create_internal(0, 0)", marks=since_2_13),
    "m.FakeProcessGroup._create_internal(rank=0, world_size=2).size()",
    "isinstance(m.FakeProcessGroup._create_internal(0, 1), m.Backend)",
    "o = m.FakeProcessGroup.Options()\no.fake_option = 3\n"
    "m.FakeProcessGroup._create_internal(0, 2, o).options.fake_option",
    "o = m.FakeProcessGroup.Options()\no.error_on_collective = True\n"
    "m.FakeProcessGroup._create_internal(0, 2, o).allreduce(torch.ones(1))",
    "o = m.FakeProcessGroup.Options()\no.error_on_collective = True\n"
    "m.FakeProcessGroup._create_internal(0, 2, o).send([torch.ones(1)], 0, 0)",
    "m.Backend()",
    pytest.param("m.Backend(0, 1).size()", marks=since_2_15),
    "m.Backend.Options()",
    "m.Backend.Options('x').backend",
    "m.Backend.Options(backend='x', timeout=td(seconds=3))._timeout",
    "m.Backend.Options('x')._timeout",
    "m.Backend.Options(3)",
    "m.Backend.Options('x').group_name",
    "o = m.Backend.Options('x')\no.backend = 'y'",
    "o = m.Backend.Options('x')\no.global_ranks_in_group = [1, 2]\no.global_ranks_in_group",
]


@pytest.mark.parametrize("text", FAKE_MAKING)
def test_making_backends(text: str):
    same(text)


# --- the group that sends operations to backends ------------------------------------------------------------------

BARE = [
    "rank()", "size()", "name()", "group_name", "group_desc", "_device_types", "bound_device_id", "_has_hooks()",
    "use_pg_for_symm_mem_rendezvous", "_backend_id(m.ProcessGroup.GLOO)", "_get_backend(torch.device('cpu'))",
    "_get_backend_name()", "_get_sequence_number_for_group()", "_set_sequence_number_for_group()", "get_group_store()",
    "barrier()", "allreduce(torch.ones(1))", "allreduce([torch.ones(1)])", "allreduce(3)", "set_timeout(td(seconds=3))",
    "shutdown()", "abort()", "_enable_collectives_timing()", "_wait_for_pending_works()", "boxed()",
    "_set_group_name('a')", "_set_group_name(3)", "_start_coalescing(torch.device('cpu'))", "monitored_barrier()",
    "_register_on_completion_hook(lambda w: None)", "send([torch.ones(1)], 1, 0)", "_set_group_desc('x')",
    "broadcast(torch.ones(1), 0)", "allgather([[torch.ones(1)]], [torch.ones(1)])",
    "all_gather_single(torch.ones(2), torch.ones(1))", "alltoall_base(torch.ones(2), torch.ones(2), [], [])",
]  # fmt: skip


@pytest.mark.parametrize("call", BARE)
def test_a_group_without_backends(call: str):
    same(f"p = m.ProcessGroup(0, 2)\np.{call}")


GROUPS = [
    "m.ProcessGroup()",
    "m.ProcessGroup(0)",
    "m.ProcessGroup('a', 1)",
    "m.ProcessGroup(3, 0, 1)",
    "m.ProcessGroup(rank=0, size=3).size()",
    "m.ProcessGroup(m.HashStore(), 0, 1)",
    "m.ProcessGroup(m.HashStore(), 0, 1).get_group_store()",
    "m.ProcessGroup(0, 1) == m.ProcessGroup(0, 1)",
    "len({m.ProcessGroup(0, 1), m.ProcessGroup(0, 1)})",
    "p = m.ProcessGroup(0, 1)\np._set_group_desc('zz')\np.group_desc",
    "p = m.ProcessGroup(0, 1)\np.bound_device_id = torch.device('cuda:1')\np.bound_device_id",
    "p = m.ProcessGroup(0, 1)\np.bound_device_id = torch.device('cuda')",
    "p = m.ProcessGroup(0, 1)\np.bound_device_id = None\np.bound_device_id",
    "p = m.ProcessGroup(0, 1)\nm.ProcessGroup.unbox(p.boxed()) is p",
    "m.ProcessGroup.unbox(3)",
    "isinstance(m.ProcessGroup(0, 1), m.ProcessGroup)",
    "isinstance(3, m.ProcessGroup)",
    "m.ProcessGroup(0, 1)._id() == 0",
]


@pytest.mark.parametrize("text", GROUPS)
def test_groups(text: str):
    same(text)


WITH_FAKE = (
    "p = m.ProcessGroup(1, 4)\nf = m.FakeProcessGroup._create_internal(1, 4)\n"
    "p._register_backend(torch.device('cpu'), m.ProcessGroup.CUSTOM, f)\nE = lambda *s: torch.full(s, -1.)\n"
    "a = torch.arange(4.)\n"
)
DISPATCHED = [
    "[p._device_types, p._get_backend(torch.device('cpu')) is f, p.name()]",
    "p._set_default_backend(m.ProcessGroup.CUSTOM)\n"
    "[p.name(), p._get_backend_name(), p._backend_id(m.ProcessGroup.CUSTOM) > 0]",
    "p._set_default_backend(m.ProcessGroup.CUSTOM)\np._get_sequence_number_for_group()",
    "p._set_default_backend(3)",
    "p._get_backend(torch.device('cuda'))",
    "p.allreduce(torch.ones(1)).wait()",
    "p.allreduce([torch.ones(1)], m.AllreduceOptions()).wait()",
    "p.barrier().wait()",
    "o = [E(16)]\np.allgather_into_tensor_coalesced(o, [a]).wait()\no",
    "o = [E(16)]\np.all_gather_single_coalesced(o, [a]).wait()\no",
    pytest.param("o = [E(4)]\np.reduce_scatter_tensor_coalesced(o, [torch.arange(16.)]).wait()\no", marks=since_2_13),
    "o = E(16)\np.all_gather_single(o, a).wait()\no",
    "o = E(16)\np._allgather_base(o, a).wait()\no",
    "o = E(4)\np.reduce_scatter_single(o, torch.arange(16.)).wait()\no",
    "o = E(16)\np.all_to_all_single(o, torch.arange(16.), [], []).wait()\no",
    "o = [E(4) for _ in range(4)]\np.allgather([o], [a]).wait()\no",
    pytest.param("o = [E(4) for _ in range(4)]\np.alltoall(o, [a, a + 1, a + 2, a + 3]).wait()\no", marks=since_2_13),
    "p.send([a], 0, 0).wait()",
    "p.recv([a], 0, 0).wait()",
    "p.recv_anysource([a], 0).wait()",
    "p.monitored_barrier()",
    "p._start_coalescing(torch.device('cpu'))\np._end_coalescing(torch.device('cpu'))",
    "p.shutdown()",
    "p.abort()",
]


@pytest.mark.parametrize("text", DISPATCHED)
def test_operations_go_to_the_backend_of_the_device(text: str):
    same(f"{WITH_FAKE}{text}")


def test_pytorchs_backends_serve_our_group():
    group = ours.ProcessGroup(0, 1)
    gloo = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=20))
    group._register_backend(CPU, ours.ProcessGroup.GLOO, gloo)
    group._set_default_backend(ours.ProcessGroup.GLOO)
    tensor, gathered = torch.ones(2), torch.zeros(2)
    options = ours.AllreduceOptions()
    options.reduceOp = ours.ReduceOp.MAX
    group.allreduce([tensor], options).wait()
    group.all_gather_single(gathered, tensor).wait()
    group.monitored_barrier()
    assert group.name() == "gloo" and gathered.tolist() == [1, 1]


def test_what_kills_pytorchs_process_is_refused():
    group, fake = ours.ProcessGroup(1, 4), ours.FakeProcessGroup._create_internal(1, 4)
    group._register_backend(CPU, ours.ProcessGroup.CUSTOM, fake)
    group._register_backend(torch.device("meta"), ours.ProcessGroup.CUSTOM)  # the one that is there
    assert group._get_backend(torch.device("meta")) is fake
    with pytest.raises(RuntimeError, match="Backend fake does not support split_group"):
        group.split_group([0, 1])
    group._register_backend(torch.device("cuda"), ours.ProcessGroup.NCCL)
    with pytest.raises(RuntimeError, match="No backend type associated with device type cuda"):
        group._get_backend(torch.device("cuda"))
    with pytest.raises(ValueError, match="as many as the 1 keys"):
        ours.HashStore().multi_set(["a"], [])


class Doubling(ours.Backend):
    """A backend written in Python: a sum is twice our own."""

    def allreduce(self, tensors, opts=None, op=None, timeout=None):
        for tensor in tensors if isinstance(tensors, list) else [tensors]:
            tensor.mul_(2)
        work = ours.PythonCallbackWork(lambda timeout: True)
        work.wait()
        return work


def test_a_backend_written_in_python():
    group = ours.ProcessGroup(0, 2)
    group._register_backend(CPU, ours.ProcessGroup.CUSTOM, Doubling(0, 2))
    group._set_group_name("doubling")
    tensor = torch.ones(2)
    group.allreduce([tensor]).wait()
    assert tensor.tolist() == [2, 2]
    with pytest.raises(RuntimeError, match="Backend doubling does not support broadcast"):
        group.broadcast(tensor, 0)
    ours._register_process_group("doubling", group)
    try:  # C++ reaches it too
        result = torch.ops._c10d_functional.all_reduce(tensor, "sum", "doubling")
        assert torch.ops._c10d_functional.wait_tensor(result).tolist() == [4, 4]
    finally:
        ours._unregister_process_group("doubling")


# --- our engine behind the group ----------------------------------------------------------------------------------


def every_collective(group, module) -> list:
    """Each collective in each of its forms once; what came out."""
    rank, options = group.rank(), module.AllreduceOptions()
    options.reduceOp = module.ReduceOp.MAX
    seen = []

    def run(call, *args, see, **named):
        getattr(group, call)(*args, **named).wait()
        seen.append((call, plain(see)))

    def new(*values):
        return torch.tensor([float(v) for v in values])

    def in_place(call, *args, listed=False, seen_here=True, **named):
        a = new(rank, 10)
        run(call, [a] if listed else a, *args, see=a if seen_here else 0, **named)

    soon = timedelta(seconds=20)
    in_place("allreduce", listed=True)
    in_place("allreduce", options, listed=True)
    in_place("allreduce", module.ReduceOp.MAX)
    in_place("allreduce", op=module.ReduceOp.PRODUCT, timeout=soon)
    in_place("broadcast", 1)
    in_place("broadcast", root=1)
    in_place("broadcast", 1, soon)
    in_place("reduce", 0, module.ReduceOp.MAX, soon, seen_here=rank == 0)
    o = [new(0, 0), new(0, 0)]
    run("allgather", [o], [new(rank, 5)], see=o)
    run("allgather", o, new(rank, 6), soon, see=o)
    o = new(0, 0, 0, 0)
    run("_allgather_base", o, new(rank, 7), see=o)
    o = new(0)
    run("_reduce_scatter_base", o, new(rank, 7), see=o)
    run("reduce_scatter", [o], [[new(rank), new(8)]], see=o)
    run("reduce_scatter", o, [new(rank), new(8)], module.ReduceOp.MAX, see=o)
    run("scatter", [o], [[new(1), new(2)]] if rank == 0 else [], see=o)
    run("scatter", o, [new(3), new(4)] if rank == 1 else [], 1, see=o)
    o = [new(0), new(0)] if rank == 1 else []
    run("gather", o, new(rank), 1, soon, see=o)
    o = new(0, 0)
    run("alltoall_base", o, new(rank, 9), [], [], see=o)
    run("alltoall_base", o, new(rank, 9), [1, 1], [1, 1], soon, see=o)
    run("barrier", see=0)
    a = new(rank)
    if rank == 0:
        run("send", [a], 1, 3, see=0)
    else:
        run("recv", [a], 0, 3, see=a)
    a, b = new(rank), new(2)
    run("allreduce_coalesced", [a, b], see=[a, b])
    return seen


def test_every_collective_gives_what_gloo_gives():
    def with_gloo(store, rank):
        group = dist.ProcessGroupGloo(ours.as_torch_store(store), rank, 2, timedelta(seconds=20))
        return every_collective(group, theirs)

    def with_ours(store, rank):
        group = ours.ProcessGroup(store, rank, 2)
        seen = every_collective(group, ours)
        group.shutdown()
        return seen

    def engine_with_pytorchs_options(store, rank):
        group = TorchGroup(store, rank, 2, timedelta(seconds=20), "pair")
        seen = every_collective(group, theirs)
        group.shutdown()
        return seen

    wanted = on_two_ranks(with_gloo)
    assert on_two_ranks(with_ours) == wanted
    assert on_two_ranks(engine_with_pytorchs_options) == wanted


def test_pytorchs_data_parallel_on_our_group():
    """Its reducer is C++; it calls broadcast, allgather and allreduce of the group it is given."""
    group = ours.ProcessGroup(ours.HashStore(), 0, 1)
    group._set_group_name("ddp")
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    inner = torch.nn.parallel.DistributedDataParallel(model, process_group=group)
    inner(torch.ones(4, 3)).sum().backward()
    assert model.weight.grad.tolist() == [[4.0] * 3] * 2
    assert group._get_sequence_number_for_group() > 0
    group.shutdown()


def test_premul_sum():
    def body(store, rank):
        group = ours.ProcessGroup(store, rank, 2)
        a, b = torch.ones(2), torch.ones(2)
        group.allreduce(a, ours._make_nccl_premul_sum(3.0)).wait()
        group.allreduce(b, theirs._make_nccl_premul_sum(2.0)).wait()
        group.shutdown()
        return a.tolist() + b.tolist()

    assert on_two_ranks(body) == [[6, 6, 4, 4]] * 2


def test_completion_hook_and_split_and_merge():
    def body(store, rank):
        group = ours.ProcessGroup(store, rank, 2)
        group._set_group_name("pair")
        told = []
        group._register_on_completion_hook(told.append)
        group.allreduce(torch.ones(1)).wait()
        group.barrier().wait()
        assert until(lambda: len(told) == 2, 20)  # the first thread that sees an operation's end runs its hooks
        told.sort(key=lambda info: info.seq)
        alone = group.split_group([rank] if rank == 0 else [0], group_name="first", group_desc="alone")
        facts = (
            [i.op_type.name for i in told],
            [i.seq for i in told],
            all(i.time_finished >= i.time_started for i in told),
        )
        sizes = None if alone is None else (alone.size(), alone.rank(), alone.group_name, alone.group_desc)
        merged = group.merge_remote_group(ours.PrefixStore("m", store), 2, group_name="both")
        both = torch.ones(1)
        merged.allreduce(both).wait()
        group.shutdown()
        return facts, sizes, merged.group_name, merged.size(), both.item(), group._has_hooks()

    first, second = on_two_ranks(body)
    told = (["ALLREDUCE", "BARRIER"], [1, 2], True)
    assert first == (told, (1, 0, "first", "alone"), "both", 2, 2.0, True)
    assert second == (told, None, "both", 2, 2.0, True)


def test_several_groups_meet_in_one_store():
    def body(store, rank):
        sums = []
        for _ in range(3):
            group = ours.ProcessGroup(store, rank, 2)
            tensor = torch.full((1,), float(rank + 1))
            group.allreduce(tensor).wait()
            sums.append(tensor.item())
            group.barrier().wait()
            group.shutdown()
        return sums

    assert on_two_ranks(body) == [[3, 3, 3]] * 2


def test_sequence_numbers_and_names():
    group = ours.ProcessGroup(ours.HashStore(), 0, 1)
    assert group.name() == "symcomm"
    group.allreduce(torch.ones(1)).wait()
    assert group._get_sequence_number_for_group() == 1
    assert isinstance(group._get_backend(CPU), TorchGroup) and isinstance(group._get_backend(CPU), ours.Backend)
    assert isinstance(group._get_backend(CPU), ours.ProcessGroup)
    group.shutdown()


# --- groups by name -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["ours", "gloo"])
def test_hooks_of_a_group_see_its_calls(backend: str):
    """It does not matter which backend runs them."""
    group = ours.ProcessGroup(ours.HashStore(), 0, 1)
    if backend == "gloo":
        gloo = theirs.ProcessGroupGloo(theirs.HashStore(), 0, 1)
        group._register_backend(torch.device("cpu"), ours.ProcessGroup.BackendType.GLOO, gloo)
        group._set_default_backend(ours.ProcessGroup.BackendType.GLOO)
    seen: list = []
    group.register_pre_hook(1, lambda a: seen.append((a.name, a.op_id, a.root, len(a.input_tensors))))
    group.register_post_hook(1, lambda a: seen.append((a.name, a.op_id, isinstance(a.work, ours.Work))))
    group.allreduce([torch.ones(2)]).wait()
    group.broadcast(torch.ones(2), root=0).wait()
    group._allgather_base(outputTensor=torch.ones(2), inputTensor=torch.ones(2)).wait()
    group.barrier().wait()
    names = ours.HookOpName
    assert seen == [
        (names.ALLREDUCE, 0, -1, 1), (names.ALLREDUCE, 0, True), (names.BROADCAST, 1, 0, 1), (names.BROADCAST, 1, True),
        (names.ALLGATHER_BASE, 2, -1, 0), (names.ALLGATHER_BASE, 2, True), (names.BARRIER, 3, -1, 0),
        (names.BARRIER, 3, True),
    ]  # fmt: skip
    group.unregister_pre_hook(1)
    group.unregister_post_hook(1)
    group.allreduce([torch.ones(2)]).wait()
    assert len(seen) == 8
    assert group.supports_abort_hooks is (backend == "ours")
    if backend == "ours":
        group.register_abort_hook(1, lambda: seen.append("aborted"))
        group.abort()
        assert seen[8:] == ["aborted"]


def test_newer_names_reach_backends_that_define_the_older():
    class Older(ours.Backend):
        def _allgather_base(self, output, input, opts=None):
            return "older"

    class Newer(ours.Backend):
        def all_gather_single(self, output, input, opts=None):
            return "newer"

    for kind in (Older, Newer):
        backend = kind(0, 1)
        assert backend.all_gather_single(1, 2) == backend._allgather_base(1, 2) == kind.__name__.lower()
        with pytest.raises(RuntimeError, match="does not support reduce_scatter_single"):
            backend.reduce_scatter_single(1, 2)


def test_registry():
    for text in (
        "p = m.ProcessGroup(0, 1)\nm._register_process_group('g1', p)\nm._resolve_process_group('g1') is p",
        "p = m.ProcessGroup(0, 1)\nm._register_process_group('g1', p)\ndel p\nm._resolve_process_group('g1')",
        "p = m.ProcessGroup(0, 1)\nm._register_process_group('g1', p)\nm._unregister_process_group('g1')\n"
        "m._resolve_process_group('g1')",
        "m._resolve_process_group('g1')",
        "m._unregister_process_group('never')",
        "p = m.ProcessGroup(0, 1)\nm._register_process_group('g2', p)\nm._register_process_group('g2', p)",
        "m._unregister_all_process_groups()",
        "m._register_process_group('a', 3)",
        "m._current_process_group()",
        "p = m.ProcessGroup(0, 1)\nm._set_process_group(p)\nm._current_process_group() is p",
        "m._set_process_group(None)\nm._current_process_group()",
        "m._set_comm_profiling_name('abc')\nm._get_comm_profiling_name()",
        "m._set_comm_profiling_name(3)",
        "m._set_comm_profiling_name('')\nm._get_comm_profiling_name()",
        "m._set_global_rank(0)",
        "m._set_global_rank('a')",
        "m._set_thread_isolation_mode(True)\nm._set_thread_isolation_mode(False)",
    ):
        same(f"m._unregister_all_process_groups()\n{text}")


def test_registry_of_each_thread():
    """In thread isolation mode every thread has names of its own; our groups among them."""
    ours._set_thread_isolation_mode(True)
    try:
        mine = ours.ProcessGroup(0, 1)
        ours._register_process_group("same name", mine)
        seen = []

        def other() -> None:
            seen.append(outcome("m._resolve_process_group('same name')", ours)[0])
            group = ours.ProcessGroup(1, 2)
            ours._register_process_group("same name", group)
            seen.append(ours._resolve_process_group("same name") is group)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join(20)
        assert seen == ["raised", True] and ours._resolve_process_group("same name") is mine
        ours._unregister_process_group("same name")
    finally:
        ours._set_thread_isolation_mode(False)


def test_functional_collectives_find_our_group_by_name():
    group = ours.ProcessGroup(ours.HashStore(), 0, 1)
    group._set_group_name("functional")
    ours._register_process_group("functional", group)
    try:
        result = torch.ops._c10d_functional.all_reduce(torch.ones(3), "sum", "functional")
        assert torch.ops._c10d_functional.wait_tensor(result).tolist() == [1, 1, 1]
        gathered = torch.ops._c10d_functional.all_gather_into_tensor(torch.ones(3), 1, "functional")
        assert torch.ops._c10d_functional.wait_tensor(gathered).tolist() == [1, 1, 1]
    finally:
        ours._unregister_process_group("functional")
        group.shutdown()
